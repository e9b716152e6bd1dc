"""`demask slim`: write a network without the work that was masked away."""

from __future__ import annotations

import gc
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from demask.cli.groups import NO_NEXT
from demask.cli.options import (
    Model,
    NetworkOptions,
    ShowOptions,
    Switch,
    Tolerance,
    check_output,
    import_modules,
    show_written,
    verify_and_write,
    written_sections,
)
from demask.errors import BadInput
from demask.progress import progress


def slim(
    model: Model,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to write the result: .pt2, .demask, .onnx, .gguf, or a folder."),
    ] = None,
    loader: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="LOADER",
            help="For folders: what is to load the result: transformers (default), vllm, mlx or llama.cpp.",
        ),
    ] = None,
    per_layer: Annotated[
        bool,
        typer.Option(
            "--per-layer", help="For folders, --for vllm or mlx: every layer has sizes of its own (nemotron-nas)."
        ),
    ] = False,
    multiple: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="For folders: round units up to this. Default: 64, for llama.cpp 32."),
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
            metavar="FOLDER", help="For folders: a LoRA adapter of MODEL, which is cut with it, into OUTPUT/adapter."
        ),
    ] = None,
    sparse: Annotated[
        bool,
        typer.Option(
            "--sparse",
            help="For folders: store linear layers with many zeros without them; demask.checkpoint.load reads it.",
        ),
    ] = False,
    in_place: Annotated[bool, typer.Option("--in-place", help="Replace MODEL, a .onnx file, by the result.")] = False,
    minimal: Annotated[
        bool, typer.Option("--minimal", help="For .onnx: do not round widths up, do not measure.")
    ] = False,
    opset: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="For .onnx: the op set to write. Default: that of MODEL.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="For .onnx: the runtime's threads. Default: as many as torch's.")
    ] = None,
    tolerance: Tolerance = None,
    check: Annotated[
        Switch,
        typer.Option(
            help="For .onnx and folders: whether to compare the result with MODEL. off also writes "
            "what nothing here can run."
        ),
    ] = Switch.on,
    *,
    display: ShowOptions,
    options: NetworkOptions,
) -> str | None:
    """Write a network that computes the same as MODEL without the work that was masked away.

    The result is checked against MODEL before anything is written: a difference above --tolerance
    writes nothing, and exits with 1. A .pt2 result is plain torch and runs where demask is not
    installed; a .demask result records what was cut. A .onnx file is edited: what need not change
    stays as it is, byte for byte. Only where that saves less is it exported, with widths
    rounded up to those that ONNX Runtime is fastest at, measured where it is installed (else to
    multiples of 8); if nothing is faster, MODEL is written unchanged.

    A folder of Hugging Face becomes a smaller one of the same class, in bounded memory: units,
    heads and layers that zeros make useless go, as far as its config can say so. For llama.cpp it
    becomes a .gguf file, in which every layer has sizes of its own. With --sparse, zeros in no pattern
    are not stored either.

    \b
    Example:
      demask slim model.pt2 -o slim.pt2
      demask slim Llama-masked -o Llama-slim --for vllm
      demask slim Llama-masked -o Llama-slim.gguf --for llama.cpp
      demask slim Llama-sparse -o Llama-packed --sparse
      demask slim model.onnx -o slim.onnx --threads 1
      demask slim model.onnx --in-place --minimal
      demask slim speech.onnx -o slim.onnx --fix rate=16000
    """
    if (output is None) != in_place:
        raise BadInput("expected either --output FILE or --in-place")
    if model.is_dir():
        others = {
            "--in-place": in_place,
            "--minimal": minimal,
            "--opset": opset,
            "--threads": threads,
            "--tolerance": tolerance is not None,
            "--size": options.sizes,
            "--input": options.inputs,
            "--static": options.static,
            "--fix": options.fix,
        }
        if wrong := [name for name, value in others.items() if value]:
            raise BadInput(f"{' and '.join(wrong)}: for files; {model} is a folder")
        assert output is not None
        with progress("reading the headers") as step:
            from demask import checkpoint

            rows = vocabulary
            if vocabulary is not None and vocabulary != checkpoint.DROP_ZERO:
                rows = checkpoint.read_numbers(Path(vocabulary))
            report = checkpoint.slim(
                model,
                output,
                target=loader or "transformers",
                per_layer=per_layer,
                multiple=multiple,
                vocabulary=rows,
                experts=experts or "keep",
                adapter=adapter,
                sparse=sparse,
                check=check is Switch.on,
                progress=step,
            )
        display.show(report, report.to_dict())
        return None
    others = {
        "--for": loader,
        "--multiple": multiple,
        "--vocabulary": vocabulary,
        "--experts": experts,
        "--adapter": adapter,
        "--per-layer": per_layer or None,
        "--sparse": sparse or None,
    }
    if wrong := [name for name, value in others.items() if value is not None]:
        raise BadInput(f"{' and '.join(wrong)}: for folders; {model} is none")
    if in_place and model.suffix != ".onnx":
        raise BadInput(f"--in-place is for .onnx files, got {model}: give --output FILE")
    output = model if output is None else output
    check_output(output, suffixes=(".pt2", ".demask", ".onnx"))
    for_onnx = {
        "--minimal": minimal,
        "--threads": threads,
        "--tolerance": tolerance is not None,
        "--opset": opset,
        "--check": check is Switch.off,
    }
    if output.suffix != ".onnx" and any(for_onnx.values()):
        raise BadInput(f"{' and '.join(k for k, v in for_onnx.items() if v)}: for .onnx results, leave them out")
    following: str | None = None
    with progress("loading") as step:
        import demask
        from demask.cli.read_network import read_network, read_to_edit

        if output.suffix == ".onnx":
            from demask.machine.allocator import return_freed_blocks
            from demask.optimize_onnx import deploy

            return_freed_blocks()
            import_modules(options.imports)
            network = read_to_edit(model, options)
            args, file = network.args, network.file
            # A file is edited first. That takes less memory without the network in it.
            stays = network if file is None else None
            del network
            gc.collect()  # graphs have cycles
            deployed = deploy(
                lambda: (stays or read_to_edit(model, options)).model,
                args,
                output,
                file=file,
                minimal=minimal,
                opset=opset,
                threads=threads,
                check=check is Switch.on,
                tolerance=tolerance,
                progress=step,
            )
            shown = partial(_print_deployed, deployed, output)
            following = NO_NEXT if deployed.slim is None else following
        else:
            network = read_network(model, options)
            step("demasking")
            result = demask.demask(network.model, network.args, result="graph")
            verification = verify_and_write(network, result, output, step)
            shown = partial(show_written, result, output, verification)
    shown(display)
    return following


def _print_deployed(deployed: Any, output: Path, display: ShowOptions) -> None:
    import demask

    edited = deployed.edited
    if deployed.slim is not None:
        record = demask.report(deployed.slim).to_dict()
    else:  # demask cannot capture the file
        record: dict[str, Any] = {"notes": list(deployed.notes)}
        if edited is not None:
            record |= {
                "nodes": edited.nodes,
                "unchanged": edited.unchanged,
                "barriers": dict(edited.barriers),
                "foreign": sorted(edited.foreign),
            }
        if deployed.speed is not None:
            record["speed"] = asdict(deployed.speed)
    data = {"output": str(output), "report": record, "error": deployed.error, "checked": deployed.checked}
    written = written_sections(output, deployed.checked)
    display.show(deployed.page().followed_by(*written), data)
