"""docs/commands.md, what `--help` prints of each command."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import typer

from demask.cli.main import app
from docs.generate import DOCS

PATH = DOCS / "commands.md"
WIDTH = 90
HEAD = """# Commands

What `demask COMMAND --help` prints, by what the commands are for. Made by `python -m docs
commands`, as a test checks. Exit codes: 0 done, 1 a check failed, 2 bad input, 130 interrupted.
"""


def contexts(command: Any, parent: Any = None, name: str = "demask") -> Iterator[Any]:
    """The context of each command that does something, below a command or group."""
    context = command.context_class(command, info_name=name, parent=parent, terminal_width=WIDTH)
    if not hasattr(command, "list_commands"):
        yield context
        return
    for child in command.list_commands(context):
        yield from contexts(command.get_command(context, child), context, child)


def job_of(context: Any) -> str:
    """What a command, or the group that it is in, is for."""
    return context.command.rich_help_panel or context.parent.command.rich_help_panel


def page() -> str:
    """The page."""
    parts = [HEAD]
    for job, of_job in groupby(contexts(typer.main.get_command(app)), job_of):
        parts.append(f"\n## {job}\n")
        for context in of_job:
            lines = "\n".join(line.rstrip() for line in context.get_help().splitlines())
            parts.append(f"\n### {context.command_path}\n\n```text\n{lines}\n```\n")
    return "".join(parts)
