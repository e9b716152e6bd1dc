"""The commands of `demask`, by job. What takes long to import is imported when one runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from demask.cli.commands import checks, demo, pilot, prune, slim, speed, streams, strides
from demask.cli.failures import status_of, words_of
from demask.cli.groups import CommandsByJob, add_command
from demask.installation import VERSION

app = typer.Typer(
    name="demask",
    cls=CommandsByJob,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
JOBS = {
    "Try it": {"demo": demo.demo},
    "Make a network smaller": {"slim": slim.slim, "prune": prune.prune},
    "Make it faster": {"optimize": speed.optimize, "bench": speed.bench},
    "Look into it, and check it": {"inspect": checks.inspect, "verify": checks.verify},
    "Run it on large images": {"stream": streams.stream, "halo": streams.halo},
    "Replace strided convolutions": {"lower": strides.lower, "raise": strides.raise_strides},
}
for _job, _commands in JOBS.items():
    for _name, _command in _commands.items():
        add_command(app, _name, _command, _job)
app.add_typer(pilot.app, name="pilot", rich_help_panel="Compute less of it")


def main() -> None:
    """Run the command line and exit: 0 done, 1 a check failed, 2 bad input or an error of demask's
    own, 130 interrupted."""
    try:
        app(prog_name="demask")
    except (Exception, KeyboardInterrupt) as error:
        print(f"demask: {words_of(error)}", file=sys.stderr)
        sys.exit(status_of(error))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"demask {VERSION}")
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Makes pruned and masked neural networks actually smaller and faster, computing the same.

    \b
    Try it:
      demask demo
    """
