"""What code in the documentation prints: the python blocks of pages, each page as one program, with
the text block that follows; and the scripts of examples/ that show what they print.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from docs.generate import DOCS, ROOT

BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<out>.*?)^```\n)?", re.M | re.S)
PRINTS = re.compile(r"(?<=\nIt prints:\n\n```text\n).*?(?=```\n\"\"\"\n)", re.S)


def rerun(page: Path) -> str:
    """The text of a page, or of a script, with what its code prints."""
    return rerun_script(page) if page.suffix == ".py" else rerun_blocks(page)


def rerun_blocks(page: Path) -> str:
    """The text of a page with every text block as its python block prints it."""
    names: dict[str, object] = {}

    def again(match: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(match["code"], page.name, "exec"), names)
        if match["out"] is None:
            return match[0]
        lines = without_blanks(printed.getvalue())
        return f"```python\n{match['code']}```\n\n```text\n{lines}\n```\n"

    return BLOCK.sub(again, page.read_text())


def rerun_script(script: Path, arguments: tuple[str, ...] = ()) -> str:
    """The text of a script with what it prints; it runs in an empty folder, which is removed."""
    printed, text = io.StringIO(), script.read_text()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(action="ignore"),
        command_line([str(script), *arguments]),
    ):
        runpy.run_path(str(script), run_name="__main__")
    lines = without_blanks(printed.getvalue())
    return PRINTS.sub(lambda _: f"{lines}\n", text)


@contextlib.contextmanager
def command_line(words: list[str]) -> Iterator[None]:
    """The words of a command line, as a script sees them."""
    before, sys.argv = sys.argv, words
    try:
        yield
    finally:
        sys.argv = before


def without_blanks(text: str) -> str:
    """Lines without blanks at their ends, and without empty ones around them."""
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def pages() -> list[Path]:
    """The pages that hold code."""
    return [page for page in sorted(DOCS.glob("*.md")) if "```python" in page.read_text()]


def scripts() -> list[Path]:
    """The scripts of examples/ that show what they print."""
    return [path for path in sorted(ROOT.glob("examples/*.py")) if PRINTS.search(path.read_text())]
