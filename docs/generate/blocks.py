"""The python blocks of the pages in docs/, run, each page as one program, with what they print in
the text block that follows.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from docs.generate import DOCS

BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<out>.*?)^```\n)?", re.M | re.S
)


def rerun(page: Path) -> str:
    """The text of a page with every text block as its python block prints it."""
    names: dict[str, object] = {}

    def again(match: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(match["code"], page.name, "exec"), names)
        if match["out"] is None:
            return match[0]
        lines = "\n".join(line.rstrip() for line in printed.getvalue().strip("\n").splitlines())
        return f"```python\n{match['code']}```\n\n```text\n{lines}\n```\n"

    return BLOCK.sub(again, page.read_text())


def pages() -> list[Path]:
    """The pages that hold code."""
    return [page for page in sorted(DOCS.glob("*.md")) if "```python" in page.read_text()]
