"""`demask optimize` and `demask bench`: the fastest form of a network, and a race of its forms."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from demask.cli.options import Model, NetworkOptions, Picture, ShowOptions, check_output, show_written, verify_and_write
from demask.progress import progress


def _repeated_count_option(words: str) -> Any:
    """An option that takes a count from 1 on, any number of times."""
    return typer.Option(min=1, metavar="N", help=f"{words} May be repeated.")


Threads = Annotated[list[int] | None, _repeated_count_option("Torch's threads; default: as many as it takes.")]
Batches = Annotated[
    list[int] | None,
    _repeated_count_option("Batch size; default: that of the example. Another needs a dynamic dimension 0."),
]


def optimize(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the result: .demask, or .pt2.")],
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads to optimize for. Default: as many as torch takes.")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where measurements are stored. Default: the user's cache folder."),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="bf16|int8", help="Store the weights of sparse layers with fewer bits; the error is reported."
        ),
    ] = None,
    *,
    display: ShowOptions,
    options: NetworkOptions,
) -> None:
    """Write the network that computes the same as MODEL and was measured fastest on this machine.

    MODEL is demasked; then norms are folded into weights, activations are fused into layers, images
    get the faster memory format, and layers with many zeros use sparse kernels. Nothing slower than
    MODEL is written: if no candidate is faster, MODEL is written unchanged. A .demask result stores
    these choices; a .pt2 result is the same network in plain torch ops, zeros included, for
    machines without demask.

    \b
    Examples:
      demask optimize model.pt2 -o fast.demask --threads 2
      demask optimize model.pt2 -o small.demask --precision int8
    """
    check_output(output, suffixes=(".demask", ".pt2"))
    with progress("loading") as step:
        import demask
        from demask.cli.read_network import read_network
        from demask.machine.allocator import fix_allocator

        network = read_network(model, options)
        fix_allocator()
        result = demask.optimize(
            network.model, network.args, threads=threads, precision=precision, cache=cache, progress=step
        )
        verification = verify_and_write(network, result, output, step, exact=precision is None)
    show_written(result, output, verification, display)


def bench(
    model: Model,
    threads: Threads = None,
    batch: Batches = None,
    pairs: Annotated[int, typer.Option(min=1, help="Calls of each contender, in turns.")] = 30,
    seconds: Annotated[float, typer.Option(min=0, help="At most, per setting.")] = 60.0,
    with_compile: Annotated[bool, typer.Option("--compile/--no-compile", help="Whether to time torch.compile.")] = True,
    plot: Picture = None,
    *,
    display: ShowOptions,
    options: NetworkOptions,
) -> None:
    """Time MODEL, and MODEL demasked, optimized and compiled, on this machine; print one table.

    In each setting (threads and batch size) all are called in turns, in one process. Each row
    shows the median with its spread, the speed relative to MODEL, and how far the outputs differ.
    Where torch.compile does not work, its rows say why.

    \b
    Example:
      demask bench model.pt2 --threads 1 --batch 8 --plot bench.svg
    """
    with progress("loading"):
        from demask.cli import bench as benching
        from demask.cli.read_network import read_network

        network = read_network(model, options)
        counts, batches = (tuple(dict.fromkeys(values or ())) for values in (threads, batch))
        settings = benching.BenchSettings(counts, batches, pairs, seconds, with_compile)
    with progress("demasking", settings.steps) as step:
        measured = benching.bench(network, model.name, settings, step, modules=display.page is not None)
    display.show(measured, measured.to_dict())
    if plot is not None:
        with progress("drawing"):
            benching.draw(measured, plot)
