"""`demask pilot`: a cheap run first, and what it says of the run that follows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from demask.cli.options import (
    Fix,
    Imports,
    Inputs,
    Json,
    Model,
    Sizes,
    Static,
    check_output,
    import_modules,
    show,
)
from demask.cli.progress import progress
from demask.errors import BadInput

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Data = Annotated[
    Path,
    typer.Argument(
        help="Inputs: .npy, .npz or .safetensors (an array for each input, by name or in order; "
        "first axes run over the inputs), or a folder of images of one size."
    ),
]
Batch = Annotated[
    int, typer.Option(min=1, help="Inputs at a time, where the network lets one choose.")
]
Picture = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also draw it: .svg, .png or .pdf.")
]


@app.callback()
def start() -> None:
    """Run a simplified network first, and let it condition the run that follows.

    \b
    Example:
      demask pilot compare model.pt2 images.npy
    """


@app.command()
def compare(
    model: Model,
    data: Data,
    by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIMPLIFIER",
            help="bits:8, bits:4:64 (groups of 64), exponents, rank:0.25, channels:0.5, "
            "downsample:2:bilinear. May be given several times. Default: one of each kind.",
        ),
    ] = None,
    pairs: Annotated[int, typer.Option(min=0, help="Calls timed in turns; 0: none.")] = 15,
    batch: Batch = 32,
    plot: Picture = None,
    as_json: Json = False,
    imports: Imports = None,
    sizes: Sizes = None,
    inputs: Inputs = None,
    static: Static = False,
    fix: Fix = None,
) -> None:
    """Print what simplified forms of MODEL keep of it on DATA, and what they cost.

    Of each: how often its largest output is at the same place, its relative error, how its
    magnitudes per channel correlate with the full run's, how many zeros behind ReLU it foretells
    (precision and recall), bytes of weights as stored, multiply-adds, and the measured speed. What
    a network refuses stands below the table, with the reason.

    \b
    Examples:
      demask pilot compare model.pt2 images.npy
      demask pilot compare model.pt2 images.npy --by bits:8 --by downsample:2:area --json
    """
    if plot is not None:
        _check_plot(plot)
    with progress("loading") as step:
        from demask.cli.read_inputs import read_inputs
        from demask.cli.read_network import read_network
        from demask.pilot.compare import DEFAULT
        from demask.pilot.compare import compare as compared

        import_modules(imports)
        given = read_network(model, sizes, inputs, static, fix)
        calls = read_inputs(data, given, batch)
        found = compared(given.model, calls, by=by or DEFAULT, pairs=pairs, progress=step)
    show(found, found.to_dict(), as_json)
    if plot is not None:
        from demask.pilot.draw_comparison import draw

        draw(found, plot)


@app.command()
def collect(
    model: Model,
    data: Data,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write them: .safetensors.")
    ],
    per: Annotated[
        str, typer.Option(metavar="PART", help="channel, unit, head, token or tile:T.")
    ] = "channel",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Hold at most so many bytes of weights at a time, such as 64MiB: slice by slice, "
            "from a .demask file.",
        ),
    ] = None,
    measure: Annotated[str, typer.Option(metavar="mean|max", help="Of |value|.")] = "mean",
    batch: Batch = 32,
    plot: Picture = None,
    as_json: Json = False,
    imports: Imports = None,
    sizes: Sizes = None,
    inputs: Inputs = None,
    static: Static = False,
    fix: Fix = None,
) -> None:
    """Write execution data: one magnitude per channel, unit, head, token or tile of each layer.

    Magnitudes are taken behind norm and activation, of every input in DATA.

    \b
    Examples:
      demask pilot collect model.pt2 images.npy -o data.safetensors --plot data.png
      demask pilot collect model.demask images.npy -o data.safetensors --memory 64MiB
    """
    check_output(output, suffixes=(".safetensors",))
    if plot is not None:
        _check_plot(plot)
    with progress("loading") as step:
        from demask.cli.read_inputs import read_inputs
        from demask.cli.read_network import NetworkFile, read_network
        from demask.files.archive.archive import outline
        from demask.pilot.data.collect import collect as collected

        import_modules(imports)
        sliced = memory is not None
        if sliced and model.suffix != ".demask":
            raise BadInput(f"--memory reads weights from a .demask file, got {model}; write one "
                           f"with: demask slim {model} -o model.demask")  # fmt: skip
        given = (
            NetworkFile(outline(model).slim, ())
            if sliced
            else read_network(model, sizes, inputs, static, fix)
        )
        calls = read_inputs(data, given, batch)
        network: Any = model if sliced else given.model
        found = collected(network, calls, per=per, memory=memory, measure=measure,
                          source=str(data.name), progress=step)  # fmt: skip
        step("writing")
        found.save(output)
        if plot is not None:
            found.plot(plot)
    rows = {name: m.mean(0).tolist() for name, m in found.magnitudes.items()}
    written = {"output": str(output), "per": per, "source": found.source, "mean": rows}
    show(f"{found}\nwritten to {output}", written | {"slices": found.slices, "held": found.held},
         as_json)  # fmt: skip


@app.command()
def explain(
    model: Model,
    data: Data,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Torch's threads; default: as many as it takes.")
    ] = None,
    loss: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="The share of answers that may differ.")
    ] = 0.01,
    batch: Batch = 1,
    as_json: Json = False,
    imports: Imports = None,
    sizes: Sizes = None,
    inputs: Inputs = None,
    static: Static = False,
    fix: Fix = None,
) -> None:
    """Print what conditions would gain and lose for MODEL on this machine, and what not to use.

    Predicted from the weights that each would read and this machine's bandwidths, which are
    measured once and kept; losses are measured on DATA.

    \b
    Example:
      demask pilot explain model.pt2 images.npy --threads 1
    """
    with progress("loading") as step:
        from demask.cli.read_inputs import read_inputs
        from demask.cli.read_network import read_network
        from demask.pilot.explain import explain as explained

        import_modules(imports)
        given = read_network(model, sizes, inputs, static, fix)
        calls = read_inputs(data, given, batch)
        step("predicting")
        found = explained(given.module, calls, threads=threads, loss=loss)
    show(found, found.to_dict(), as_json)


@app.command()
def condition(
    model: Model,
    condition: Annotated[
        str,
        typer.Option(
            metavar="CONDITION",
            help="columns, certified, skip:0.5, constant:0.5, value:0.5, precision:0.5:bits=4, "
            "order:deadline=0.001, route:0.8, regions:….",
        ),
    ] = "columns",
    pilot: Annotated[
        str | None,
        typer.Option(metavar="SIMPLIFIER", help="The cheap run: bits:4, …; default: none."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Inputs to decide and time with, as of compare; default: random ones."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Also write the result: .demask, where it can be."),
    ] = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Take it although it may be slower than MODEL.")
    ] = False,
    as_json: Json = False,
    imports: Imports = None,
    sizes: Sizes = None,
    inputs: Inputs = None,
    static: Static = False,
    fix: Fix = None,
) -> None:
    """Condition MODEL, time it beside MODEL, and print what is done at each layer, and why.

    Where the conditioned network may be slower, it says so and stays as it is, unless --unchecked.
    Networks that hold a run of their own (a pilot, a queue) cannot be written: make them in Python
    with demask.pilot.condition.

    \b
    Example:
      demask pilot condition model.pt2 --condition columns --data images.npy
    """
    if output is not None:
        check_output(output, suffixes=(".demask",))
    with progress("loading") as step:
        import demask
        from demask.cli.read_inputs import read_inputs
        from demask.cli.read_network import read_network
        from demask.graph.result.demasked_module import Demasked
        from demask.pilot import condition as conditioned

        import_modules(imports)
        given = read_network(model, sizes, inputs, static, fix)
        step("conditioning")
        example = given.example if data is None else read_inputs(data, given, 1)[0]
        made: Any = conditioned(given.module, example, pilot=pilot, condition=condition,
                                check=not unchecked)  # fmt: skip
        if output is not None:
            if not isinstance(made, Demasked):
                raise BadInput(
                    f"{condition} gives a module that no file holds; leave --output out, and make "
                    "it in Python with demask.pilot.condition"
                )
            step("writing")
            demask.save(made, output)
    about: Any = made.conditioned
    rows = [decision._asdict() for decision in about.decisions]
    said = {"condition": condition, "pilot": about.pilot, "exact": about.exact, "decisions": rows}
    words = f"\nwritten to {output}" if output is not None else ""
    show(f"{about}{words}", said | ({"output": str(output)} if output else {}), as_json)


def _check_plot(path: Path) -> None:
    """Raise BadInput now if no picture could be drawn to `path` after the work."""
    from demask.pilot.data.draw import SUFFIXES, check_installed

    check_output(path, SUFFIXES)
    check_installed()


__all__ = ["app"]
