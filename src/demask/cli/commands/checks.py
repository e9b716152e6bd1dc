"""`demask inspect` and `demask verify`: what could be removed, and whether two networks agree."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import demask
from demask.cli.failures import CHECK_FAILED
from demask.cli.options import Fix, Imports, Inputs, Model, NetworkOptions, ShowOptions, Sizes, import_modules, plain
from demask.pages import Page
from demask.progress import progress


def inspect(
    model: Model,
    rewrites: Annotated[
        bool, typer.Option("--rewrites", help="Also print every change on the way to the smallest graph, and why.")
    ] = False,
    *,
    display: ShowOptions,
    options: NetworkOptions,
) -> None:
    """Print what could be removed from MODEL: sizes, masked share per module, ops without a rule.

    For every op whose missing rule keeps something from being removed, it prints what a rule would
    free at most; each takes as long as demasking once more. Of a .onnx file it also prints which
    nodes `demask slim` would change, and which it does not cut and why.

    \b
    Example:
      demask inspect model.pt2
      demask inspect model.onnx
      demask inspect model.pt2 --rewrites
    """
    with progress("loading") as step:
        from demask.cli.commands.inspection import RewriteInspection, inspect_edit, inspect_network
        from demask.cli.read_network import read_to_edit

        import_modules(options.imports)
        network = read_to_edit(model, options)
        parts: list[Any] = []
        data: dict[str, Any] = {}
        if network.model is not None:
            step("looking for masked work")
            inspection = inspect_network(network, step)
            parts, data = [inspection], inspection.to_dict()
            if rewrites:
                step("listing what changes")
                changes = RewriteInspection(demask.explain(network.model, network.args))
                parts, data = [*parts, changes], data | {"rewrites": changes.to_dict()}
        if network.file is not None:
            step("editing the file, to see what changes")
            edit = inspect_edit(network.file, network.args)
            parts, data = [*parts, edit], data | {"edit": edit.to_dict()}
    sections = [section for part in parts for section in part.page().sections]
    display.show(Page("demask inspect", sections), data)


def verify(
    a: Annotated[Path, typer.Argument(metavar="A", help="The original: a file, as of slim.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The other.")],
    *,
    display: ShowOptions,
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

        first = read_network(a, NetworkOptions(imports, sizes, inputs, fix=fix))
        # Another ONNX file has sizes of its own to choose; others are called with those of A.
        theirs = (sizes, inputs) if b.suffix == ".onnx" else (None, None)
        second = read_network(b, NetworkOptions(None, *theirs, fix=fixes_of(b, fix)))
        check_same_inputs(first, second)
        step("comparing")
        verification = demask.verify(first.model, second.module, first.args, check=False)
    display.show(verification, plain(verification))
    if not verification.ok:
        raise typer.Exit(CHECK_FAILED)
