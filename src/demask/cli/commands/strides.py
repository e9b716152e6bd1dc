"""`demask lower` and `demask raise`: remove strided convolutions for a target, and restore them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from demask.cli.options import (
    Model,
    NetworkOptions,
    ShowOptions,
    check_output,
    plain,
    verify_and_write,
    written_sections,
)
from demask.pages import Lines, OnPage, Page
from demask.progress import progress

SUFFIXES = (".pt2", ".demask", ".onnx")
Output = Annotated[Path, typer.Option("--output", "-o", help="Where to write the result: .pt2, .demask or .onnx.")]


def lower(
    model: Model,
    output: Output,
    target: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="What the hardware can do: max_pool, avg_pool, slice, no_pool, space_to_depth, "
            "fhe, matrix_unit, or a .toml file of your own.",
        ),
    ] = "max_pool",
    *,
    display: ShowOptions,
    options: NetworkOptions,
) -> None:
    """Write MODEL without strided convolutions, for a target that has none.

    Each becomes a convolution of stride 1 and the cheapest subsampling that the target has and that
    is exact for the layer; where there is none, the reason of every form is printed. The result is
    checked against MODEL before anything is written.

    \b
    Examples:
      demask lower model.onnx -o lowered.onnx --target max_pool
      demask lower model.pt2 -o lowered.pt2 --target accelerator.toml
    """
    check_output(output, suffixes=SUFFIXES)
    with progress("loading") as step:
        from demask.cli.read_network import read_network
        from demask.stride import lower

        network = read_network(model, options, inner=True)
        step("lowering")
        result = lower(network.model, network.args, target=target)
        _verify_and_show(network, result, output, step, display)


def raise_strides(model: Model, output: Output, *, display: ShowOptions, options: NetworkOptions) -> None:
    """Write MODEL with strided convolutions in place of those that are subsampled afterwards.

    A slice, a pool of single positions, or a mask and a pool becomes the stride of the convolution
    before it, through pointwise layers, norms, joins and sums. The result is checked against MODEL
    before anything is written.

    \b
    Example:
      demask raise lowered.onnx -o model.onnx
    """
    check_output(output, suffixes=SUFFIXES)
    with progress("loading") as step:
        from demask.cli.read_network import read_network
        from demask.stride import raise_strides

        network = read_network(model, options, inner=True)
        step("raising strides")
        result = raise_strides(network.model, network.args)
        _verify_and_show(network, result, output, step, display)


def _verify_and_show(network: Any, result: Any, output: Path, step: Any, display: ShowOptions) -> None:
    from demask.report import report
    from demask.report.sections import module_sections, sizes_table

    verification = verify_and_write(network, result, output, step)
    notes, own = list(result.demasked.notes), report(result)
    words = f"largest difference {verification.max_abs:.2g} in {verification.dtype}"
    timeline = [own.timeline] if own.timeline else []
    shown = Page(
        "demask lower",
        (
            Lines(notes, "Strided convolutions"),
            OnPage([sizes_table(own), *module_sections(own), *timeline]),
            *written_sections(output, words, verification.page().sections),
        ),
    )
    data = {"output": str(output), "notes": notes, "verification": plain(verification)}
    display.show(shown, data)


__all__ = ["lower", "raise_strides"]
