"""The command `demask demo`. Torch is imported inside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from demask.cli.options import ShowOptions, check_output
from demask.progress import progress


def demo(
    *,
    display: ShowOptions,
    keep: Annotated[
        Path | None, typer.Option(metavar="FILE.pt2", help="Also write the masked network, to try things on.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Timed forward passes per network.")] = 30,
) -> None:
    """Train, prune and demask a small network that reads handwritten digits; print one table.

    It trains a residual CNN on scikit-learn's bundled digits (no download), prunes it with
    torch.nn.utils.prune, shows that this alone makes it no smaller and no faster, demasks it, and
    measures all three. Under a minute on two cores.

    \b
    Example:
      demask demo --keep model.pt2
    """
    if keep is not None:
        check_output(keep, suffixes=(".pt2",))
    with progress("loading"):
        from demask.cli import demo as demonstration
        from demask.cli.digits import load_digits

        digits = load_digits()
    with progress("training", demonstration.steps(digits)) as step:
        shown = demonstration.run(digits, step, runs, keep)
    display.show(shown, shown.to_dict())
