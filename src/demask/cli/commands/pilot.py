"""`demask pilot`: a cheap run that conditions the full run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from demask.cli.groups import CommandsByJob, add_command
from demask.cli.options import Model, NetworkOptions, Picture, ShowOptions, check_output, import_modules
from demask.errors import BadInput
from demask.pages import Lines, OnPage
from demask.progress import progress

app = typer.Typer(cls=CommandsByJob, no_args_is_help=True, rich_markup_mode=None)

Data = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help="Inputs: .npy, .npz or .safetensors (an array for each input, by name or in order; "
        "first axes run over the inputs), or a folder of images of one size.",
    ),
]
Batch = Annotated[int, typer.Option(min=1, help="Inputs at a time, where the network lets one choose.")]


@app.callback()
def start() -> None:
    """Run a simplified network first, which conditions the full run.

    \b
    Example:
      demask pilot compare model.pt2 images.npy
    """


def compare(
    model: Model,
    data: Data,
    by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIMPLIFIER",
            help="bits:8, bits:4:64 (groups of 64), exponents, rank:0.25, channels:0.5, "
            "downsample:2:bilinear. May be repeated. Default: one of each kind.",
        ),
    ] = None,
    pairs: Annotated[int, typer.Option(min=0, help="Calls timed in turns; 0: none.")] = 15,
    batch: Batch = 32,
    plot: Picture = None,
    *,
    display: ShowOptions,
    options: NetworkOptions,
) -> None:
    """Print how close simplified versions of MODEL come to it on DATA, and what they cost.

    For each: how often its largest output has the same index, its relative error, the correlation
    of its magnitudes per channel with the full run's, precision and recall of the zeros that it
    predicts after ReLU, bytes of stored weights, multiply-adds, and the measured speed. Simplifiers
    that do not apply are listed below the table, with the reason.

    \b
    Examples:
      demask pilot compare model.pt2 images.npy
      demask pilot compare model.pt2 images.npy --by bits:8 --by downsample:2:area --json
    """
    with progress("loading") as step:
        from demask.cli.read_inputs import read_inputs
        from demask.cli.read_network import read_network
        from demask.pilot.compare import DEFAULT
        from demask.pilot.compare import compare as compared

        network = read_network(model, options)
        calls = read_inputs(data, network, batch)
        comparison = compared(network.model, calls, by=by or DEFAULT, pairs=pairs, progress=step)
    display.show(comparison, comparison.to_dict())
    if plot is not None:
        with progress("drawing"):
            from demask.pilot.compare import draw_comparison

            draw_comparison(comparison, plot)


def collect(
    model: Model,
    data: Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write them: .safetensors.")],
    per: Annotated[str, typer.Option(metavar="PART", help="channel, unit, head, token or tile:T.")] = "channel",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="At most this many bytes of weights in memory, such as 64MiB: read slice by slice "
            "from a .demask file.",
        ),
    ] = None,
    measure: Annotated[
        str, typer.Option(metavar="MEASURE", help="mean or max, of |value|; or contribution, to the outputs.")
    ] = "mean",
    batch: Batch = 32,
    plot: Picture = None,
    *,
    display: ShowOptions,
    options: NetworkOptions,
) -> None:
    """Write execution data: one magnitude per channel, unit, head, token or tile of each layer.

    Magnitudes are measured after norm and activation, for every input in DATA.

    \b
    Examples:
      demask pilot collect model.pt2 images.npy -o data.safetensors --plot data.png
      demask pilot collect model.demask images.npy -o data.safetensors --memory 64MiB
      demask pilot collect model.pt2 images.npy -o data.safetensors --measure contribution
    """
    check_output(output, suffixes=(".safetensors",))
    with progress("loading") as step:
        from demask.cli.read_inputs import read_inputs
        from demask.cli.read_network import NetworkFile, read_network
        from demask.files.archive import outline
        from demask.pilot.data.collect import collect as collected

        sliced = memory is not None
        if sliced and model.suffix != ".demask":
            raise BadInput(
                f"--memory reads weights from a .demask file, got {model}; write one "
                f"with: demask slim {model} -o model.demask"
            )
        if sliced:
            import_modules(options.imports)
        network = NetworkFile(outline(model).slim, ()) if sliced else read_network(model, options)
        calls = read_inputs(data, network, batch)
        source: Any = model if sliced else network.model
        collection = collected(
            source, calls, per=per, memory=memory, measure=measure, source=str(data.name), progress=step
        )
        step("writing")
        collection.save(output)
        if plot is not None:
            collection.plot(plot)
    rows = {name: m.mean(0).tolist() for name, m in collection.magnitudes.items()}
    written = {"output": str(output), "per": per, "source": collection.source, "mean": rows}
    written |= {"slices": collection.slices, "held": collection.held}
    line = Lines([f"written to {output}"], is_close=True)
    display.show(collection.page().followed_by(line), written)


def explain(
    model: Model,
    data: Data,
    threads: Annotated[int | None, typer.Option(min=1, help="Torch's threads; default: as many as it takes.")] = None,
    loss: Annotated[float, typer.Option(min=0.0, max=1.0, help="The share of answers that may differ.")] = 0.01,
    batch: Batch = 1,
    *,
    display: ShowOptions,
    options: NetworkOptions,
) -> None:
    """Print what conditions would gain and lose for MODEL on this machine, and what not to use.

    Gains are predicted from the weights that each condition reads and this machine's bandwidths,
    which are measured once and stored; losses are measured on DATA.

    \b
    Example:
      demask pilot explain model.pt2 images.npy --threads 1
    """
    with progress("loading") as step:
        from demask.cli.read_inputs import read_inputs
        from demask.cli.read_network import read_network
        from demask.pilot.explain import explain as explained

        network = read_network(model, options)
        calls = read_inputs(data, network, batch)
        step("predicting")
        explanation = explained(network.module, calls, threads=threads, loss=loss)
    display.show(explanation, explanation.to_dict())


def condition(
    model: Model,
    condition: Annotated[
        str,
        typer.Option(
            metavar="CONDITION",
            help="columns, certified, skip:0.5, constant:0.5, value:0.5, precision:0.5:bits=4, route:0.8, regions:….",
        ),
    ] = "columns",
    pilot: Annotated[
        str | None, typer.Option(metavar="SIMPLIFIER", help="The cheap run: bits:4, …; default: none.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Inputs to decide and time with, as for compare; default: random ones.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the result: .demask, where it can be.")
    ] = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Return it even if it may be slower than MODEL.")
    ] = False,
    *,
    display: ShowOptions,
    options: NetworkOptions,
) -> None:
    """Condition MODEL, time it against MODEL, and print what is done at each layer, and why.

    Where the conditioned network may be slower, MODEL stays unchanged, unless --unchecked. Networks
    that run more than one graph (a pilot, a queue) cannot be written: use demask.pilot.condition in
    Python.

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
        from demask.pilot import condition as apply
        from demask.report.report import memory_timeline

        network = read_network(model, options)
        step("conditioning")
        example = network.example if data is None else read_inputs(data, network, 1)[0]
        conditioned: Any = apply(network.module, example, pilot=pilot, condition=condition, check=not unchecked)
        if output is not None:
            if not isinstance(conditioned, Demasked):
                raise BadInput(
                    f"{condition} returns a module that cannot be written; leave --output out, or "
                    "use demask.pilot.condition in Python"
                )
            step("writing")
            demask.save(conditioned, output)
    about: Any = conditioned.conditioned
    rows = [decision._asdict() for decision in about.decisions]
    said = {"condition": condition, "pilot": about.pilot, "exact": about.exact, "decisions": rows}
    written = Lines([f"written to {output}"] * (output is not None), is_close=True)
    timeline = memory_timeline(conditioned)
    shown = about.page().followed_by(OnPage([timeline] if timeline else []), written)
    display.show(shown, said | ({"output": str(output)} if output else {}))


for _command in (compare, collect, explain, condition):
    add_command(app, _command.__name__, _command)
