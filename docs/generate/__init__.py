"""What pages and pictures of docs/ are generated from: a module for each, with `PATH` and `page()`,
the text, or `pages()`, texts by path, or `figure()`, a picture of matplotlib."""

from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent


def texts(module: ModuleType) -> dict[Path, str]:
    """The texts that a module of this package generates, by the path of their files."""
    return module.pages() if hasattr(module, "pages") else {module.PATH: module.page()}
