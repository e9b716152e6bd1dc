"""What pages of docs/ are generated from: one module per page or picture, `PATH` and `page()`, the
text, or `figure()`."""

from pathlib import Path

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
