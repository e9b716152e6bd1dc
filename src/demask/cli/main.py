"""The commands of `demask`. Torch is imported inside them, so that `demask --help` is quick."""

from __future__ import annotations

import gc
import sys
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from demask.cli.commands import halos, streams, strides
from demask.cli.commands import pilot as pilots
from demask.cli.failures import CHECK_FAILED, status_of, words_of
from demask.cli.options import (
    Fix,
    Imports,
    Inputs,
    Json,
    Model,
    Sizes,
    Static,
    Switch,
    Tolerance,
    check_output,
    check_plot,
    import_modules,
    plain,
    show,
    verify_and_write,
)
from demask.cli.pruning import command as pruning
from demask.errors import BadInput
from demask.progress import progress

app = typer.Typer(
    name="demask",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _several(words: str) -> Any:
    """An option that takes a count from 1 on, any number of times."""
    return typer.Option(min=1, metavar="N", help=f"{words} May be repeated.")


Threads = Annotated[list[int] | None, _several("Torch's threads; default: as many as it takes.")]
Batches = Annotated[
    list[int] | None,
    _several("Batch size; default: that of the example. Another needs a dynamic dimension 0."),
]
Picture = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also draw it: .svg, .png or .pdf.")
]


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
        typer.echo(f"demask {_version()}")
        raise typer.Exit


def _version() -> str:
    try:
        return version("demask")
    except PackageNotFoundError:
        return "(run from a source tree that is not installed)"


@app.callback()
def start(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Makes pruned and masked neural networks actually smaller and faster, computing the same.

    \b
    Try it:
      demask demo
    """


@app.command()
def demo(
    as_json: Json = False,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="FILE.pt2", help="Also write the masked network, to try things on."),
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
        from demask.cli.demo import demo as demonstration
        from demask.cli.demo.digits import load_digits

        digits = load_digits()
    with progress("training", demonstration.steps(digits)) as step:
        shown = demonstration.run(digits, step, runs, keep)
    show(shown, shown.to_dict(), as_json)


@app.command()
def slim(
    model: Model,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Where to write the result: .pt2, .demask, .onnx, .gguf, or a folder.",
        ),
    ] = None,
    loader: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="LOADER",
            help="For folders: what is to load the result: transformers (default), vllm, mlx or "
            "llama.cpp.",
        ),
    ] = None,
    per_layer: Annotated[
        bool,
        typer.Option(
            "--per-layer",
            help="For folders, --for vllm or mlx: every layer has sizes of its own (nemotron-nas).",
        ),
    ] = False,
    multiple: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="For folders: round units up to this. Default: 64, for llama.cpp 32.",
        ),
    ] = None,
    vocabulary: Annotated[
        str | None,
        typer.Option(
            metavar="drop-zero|FILE",
            help="For folders: remove rows at the end of the vocabulary that are zero and no "
            "token's, or those whose numbers are in FILE.",
        ),
    ] = None,
    experts: Annotated[
        str | None,
        typer.Option(
            metavar="drop",
            help="For folders: remove experts that add nothing. Others are chosen in their place; "
            "the report says what that changes.",
        ),
    ] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="For folders: a LoRA adapter of MODEL, which is cut with it, into OUTPUT/adapter.",
        ),
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Replace MODEL, a .onnx file, by the result.")
    ] = False,
    minimal: Annotated[
        bool, typer.Option("--minimal", help="For .onnx: do not round widths up, do not measure.")
    ] = False,
    opset: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="For .onnx: the op set to write. Default: that of MODEL."
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="For .onnx: the runtime's threads. Default: as many as torch's."),
    ] = None,
    tolerance: Tolerance = None,
    check: Annotated[
        Switch,
        typer.Option(
            help="For .onnx and folders: whether to compare the result with MODEL. off also writes "
            "what nothing here can run."
        ),
    ] = Switch.on,
    as_json: Json = False,
    imports: Imports = None,
    sizes: Sizes = None,
    inputs: Inputs = None,
    static: Static = False,
    fix: Fix = None,
) -> None:
    """Write a network that computes the same as MODEL without the work that was masked away.

    The result is checked against MODEL before anything is written: a difference above --tolerance
    writes nothing, and exits with 1. A .pt2 result is plain torch and runs where demask is not
    installed; a .demask result records what was cut. A .onnx file is edited: what need not change
    stays as it is, byte for byte. Only where that saves less is it exported, with widths
    rounded up to those that ONNX Runtime is fastest at, measured where it is installed (else to
    multiples of 8); if nothing is faster, MODEL is written unchanged.

    A folder of Hugging Face becomes a smaller one of the same class, in bounded memory: units,
    heads and layers that zeros make useless go, as far as its config can say so. For llama.cpp it
    becomes a .gguf file, in which every layer has sizes of its own.

    \b
    Example:
      demask slim model.pt2 -o slim.pt2
      demask slim Llama-masked -o Llama-slim --for vllm
      demask slim Llama-masked -o Llama-slim.gguf --for llama.cpp
      demask slim model.onnx -o slim.onnx --threads 1
      demask slim model.onnx --in-place --minimal
      demask slim speech.onnx -o slim.onnx --fix rate=16000
    """
    if (output is None) != in_place:
        raise BadInput("expected either --output FILE or --in-place")
    if model.is_dir():
        others = {"--in-place": in_place, "--minimal": minimal, "--opset": opset,
                  "--threads": threads, "--tolerance": tolerance is not None, "--size": sizes,
                  "--input": inputs, "--static": static, "--fix": fix}  # fmt: skip
        if wrong := [name for name, value in others.items() if value]:
            raise BadInput(f"{' and '.join(wrong)}: for files; {model} is a folder")
        assert output is not None
        with progress("reading the headers") as step:
            from demask import checkpoint

            rows = vocabulary
            if vocabulary is not None and vocabulary != checkpoint.DROP_ZERO:
                rows = checkpoint.read_numbers(Path(vocabulary))
            report = checkpoint.slim(
                model, output, target=loader or "transformers", per_layer=per_layer,
                multiple=multiple, vocabulary=rows, experts=experts or "keep", adapter=adapter,
                check=check is Switch.on, progress=step,
            )  # fmt: skip
        show(report, report.to_dict(), as_json)
        return
    others = {"--for": loader, "--multiple": multiple, "--vocabulary": vocabulary,
              "--experts": experts, "--adapter": adapter,
              "--per-layer": per_layer or None}  # fmt: skip
    if wrong := [name for name, value in others.items() if value is not None]:
        raise BadInput(f"{' and '.join(wrong)}: for folders; {model} is none")
    if in_place and model.suffix != ".onnx":
        raise BadInput(f"--in-place is for .onnx files, got {model}: give --output FILE")
    output = model if output is None else output
    check_output(output, suffixes=(".pt2", ".demask", ".onnx"))
    options = {"--minimal": minimal, "--threads": threads, "--tolerance": tolerance is not None,
               "--opset": opset, "--check": check is Switch.off}  # fmt: skip
    if output.suffix != ".onnx" and any(options.values()):
        raise BadInput(f"{' and '.join(k for k, v in options.items() if v)}: for .onnx results, "
                       "leave them out")  # fmt: skip
    with progress("loading") as step:
        import demask
        from demask.cli.read_network import ExampleOptions, read_network, read_to_edit

        import_modules(imports)
        if output.suffix == ".onnx":
            from demask.machine.allocator import return_freed_blocks
            from demask.optimize_onnx import deploy

            return_freed_blocks()
            example = ExampleOptions(sizes or (), inputs or (), static, fix or ())
            network = read_to_edit(model, example)
            args, file = network.args, network.file
            # A file is edited first. That takes less memory without the network in it.
            stays = network if file is None else None
            del network
            gc.collect()  # graphs have cycles
            deployed = deploy(
                lambda: (stays or read_to_edit(model, example)).model, args, output, file=file,
                minimal=minimal, opset=opset, threads=threads, check=check is Switch.on,
                tolerance=tolerance, progress=step,
            )  # fmt: skip
            shown = partial(_print_deployed, deployed, output)
        else:
            network = read_network(model, sizes, inputs, static, fix)
            step("demasking")
            result = demask.demask(network.model, network.args, result="graph")
            verification = verify_and_write(network, result, output, step)
            shown = partial(_print_written, result, output, verification)
    shown(as_json)


@app.command()
def optimize(
    model: Model,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Where to write the result: .demask, or .pt2."),
    ],
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads to optimize for. Default: as many as torch takes."),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where measurements are stored. Default: the user's cache folder."
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="bf16|int8",
            help="Store the weights of sparse layers with fewer bits; the error is reported.",
        ),
    ] = None,
    as_json: Json = False,
    imports: Imports = None,
    sizes: Sizes = None,
    inputs: Inputs = None,
    static: Static = False,
    fix: Fix = None,
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

        import_modules(imports)
        network = read_network(model, sizes, inputs, static, fix)
        fix_allocator()
        result = demask.optimize(
            network.model, network.args, threads=threads, precision=precision, cache=cache,
            progress=step,
        )  # fmt: skip
        verification = verify_and_write(network, result, output, step, exact=precision is None)
    _print_written(result, output, verification, as_json)


@app.command()
def inspect(
    model: Model,
    as_json: Json = False,
    imports: Imports = None,
    sizes: Sizes = None,
    inputs: Inputs = None,
    static: Static = False,
    fix: Fix = None,
) -> None:
    """Print what could be removed from MODEL: sizes, masked share per module, ops without a rule.

    For every op whose missing rule keeps something from being removed, it prints what a rule would
    free at most; each takes as long as demasking once more. Of a .onnx file it also prints which
    nodes `demask slim` would change, and which it does not cut and why.

    \b
    Example:
      demask inspect model.pt2
      demask inspect model.onnx
    """
    with progress("loading") as step:
        from demask.cli.commands.inspection import inspect_edit, inspect_network
        from demask.cli.read_network import ExampleOptions, read_to_edit

        import_modules(imports)
        network = read_to_edit(model, ExampleOptions(sizes or (), inputs or (), static, fix or ()))
        parts: list[Any] = []
        data: dict[str, Any] = {}
        if network.model is not None:
            step("looking for masked work")
            inspection = inspect_network(network, step)
            parts, data = [inspection], inspection.to_dict()
        if network.file is not None:
            step("editing the file, to see what changes")
            edit = inspect_edit(network.file, network.args)
            parts, data = [*parts, edit], data | {"edit": edit.to_dict()}
    show("\n\n".join(map(str, parts)), data, as_json)


@app.command()
def verify(
    a: Model,
    b: Model,
    as_json: Json = False,
    imports: Imports = None,
    sizes: Sizes = None,
    inputs: Inputs = None,
    fix: Fix = None,
) -> None:
    """Check that A and B compute the same; exit with 1 if they do not.

    An input fixed by --fix is fixed in B too, if B has it.

    \b
    Example:
      demask verify model.pt2 slim.pt2
    """
    with progress("loading") as step:
        import demask
        from demask.cli.read_inputs import check_same_inputs
        from demask.cli.read_network import fixes_of, read_network

        import_modules(imports)
        # Another ONNX file has sizes of its own to choose; others are called with those of A.
        theirs = (sizes, inputs) if b.suffix == ".onnx" else (None, None)
        first = read_network(a, sizes, inputs, fix=fix)
        second = read_network(b, *theirs, fix=fixes_of(b, fix))
        check_same_inputs(first, second)
        step("comparing")
        verification = demask.verify(first.model, second.module, first.args, check=False)
    show(str(verification), plain(verification), as_json)
    if not verification.ok:
        raise typer.Exit(CHECK_FAILED)


@app.command()
def bench(
    model: Model,
    threads: Threads = None,
    batch: Batches = None,
    pairs: Annotated[int, typer.Option(min=1, help="Calls of each contender, in turns.")] = 30,
    seconds: Annotated[float, typer.Option(min=0, help="At most, per setting.")] = 60.0,
    with_compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Whether to time torch.compile.")
    ] = True,
    plot: Picture = None,
    as_json: Json = False,
    imports: Imports = None,
    sizes: Sizes = None,
    inputs: Inputs = None,
    static: Static = False,
    fix: Fix = None,
) -> None:
    """Time MODEL, and MODEL demasked, optimized and compiled, on this machine; print one table.

    In each setting (threads and batch size) all are called in turns, in one process. Each row
    shows the median with its spread, the speed relative to MODEL, and how far the outputs differ.
    Where torch.compile does not work, its rows say why.

    \b
    Example:
      demask bench model.pt2 --threads 1 --batch 8 --plot bench.svg
    """
    if plot is not None:
        check_plot(plot)
    with progress("loading"):
        from demask.cli.bench import bench as benching
        from demask.cli.read_network import read_network

        import_modules(imports)
        network = read_network(model, sizes, inputs, static, fix)
        counts, batches = (tuple(dict.fromkeys(values or ())) for values in (threads, batch))
        settings = benching.BenchSettings(counts, batches, pairs, seconds, with_compile)
    with progress("demasking", settings.steps) as step:
        measured = benching.bench(network, model.name, settings, step)
    show(measured, measured.to_dict(), as_json)
    if plot is not None:
        from demask.cli.bench.plot import draw

        draw(measured, plot)


app.command("lower")(strides.lower)
app.command("raise")(strides.raise_strides)
app.command("prune")(pruning.prune)
app.command("stream")(streams.stream)
app.command("halo")(halos.halo)
app.add_typer(pilots.app, name="pilot")


def _print_written(result: Any, output: Path, verification: Any, as_json: bool) -> None:
    import demask

    report = demask.report(result)
    data = {"output": str(output), "report": report.to_dict()}
    data["verification"] = plain(verification)
    show(f"{report}\nwritten to {output} ({verification})", data, as_json)


def _print_deployed(deployed: Any, output: Path, as_json: bool) -> None:
    import demask
    from demask.report.speed import returned, speed_parts
    from demask.text_table import render_text

    edited = deployed.edited
    if deployed.slim is not None:
        report = demask.report(deployed.slim)
        record = report.to_dict()
    else:  # demask cannot capture the file
        record: dict[str, Any] = {"notes": list(deployed.notes)}
        lines = [returned(deployed.decisions), *deployed.notes]
        if edited is not None:
            record |= {"nodes": edited.nodes, "unchanged": edited.unchanged,
                       "barriers": dict(edited.barriers),
                       "foreign": sorted(edited.foreign)}  # fmt: skip
            lines.append(f"not understood: {', '.join(record['foreign'])}")
        elif deployed.speed is None:
            lines.append("nothing to remove: the original network was written")
        if deployed.speed is not None:
            record["speed"] = asdict(deployed.speed)
            lines.append(render_text(*speed_parts(deployed.speed, deployed.decisions)))
        report = "\n".join(filter(None, lines))
    data = {"output": str(output), "report": record, "error": deployed.error,
            "checked": deployed.checked}  # fmt: skip
    show(f"{report}\nwritten to {output} ({deployed.checked})", data, as_json)
