"""Pictures drawn with matplotlib, which is an extra: what their files may be named."""

from __future__ import annotations

from pathlib import Path

from demask.errors import BadInput
from demask.installation import install_command

SUFFIXES = (".svg", ".png", ".pdf")
DOTS = 160  # per inch, where the format has dots


def check_picture(path: Path, what: str = "a picture") -> None:
    """Raise BadInput where no picture can be drawn to `path`: another suffix than SUFFIXES, or no
    matplotlib, which is an extra. what: the output it is for."""
    if path.suffix not in SUFFIXES:
        raise BadInput(f"expected a picture that ends in {', '.join(SUFFIXES)}, got {path}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise BadInput(f"{what} needs matplotlib ({error}): {install_command('plot')}, or leave it out") from error
