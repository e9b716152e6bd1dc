"""`demask inspect`: what could be removed from a model, per module, and the ops that it calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table as TextTable
from rich.text import Text
from torch import Tensor, fx, nn

import demask
from demask.cli.commands.coverage import Gap, gaps
from demask.cli.read_network import NetworkFile
from demask.compat.dispatch import OpOverload, schema_of
from demask.files.onnx.edit.changes import NodeChange, changes_of
from demask.files.onnx.edit.edit_file import examine
from demask.files.onnx.read.reader import installed
from demask.files.onnx.write.writer import size_of
from demask.graph.normalize.canonical_calls import CANONICALIZED
from demask.graph.provenance import Provenance
from demask.graph.result.module_calls import graph_of_calls
from demask.ops import TABLE, Table
from demask.ops.entry import op_name
from demask.progress import ProgressStep
from demask.report.report import Report
from demask.report.sections import PLACES, ROWS
from demask.report.values import share
from demask.text_table import number_table, render_text


@dataclass(frozen=True, slots=True)
class ModuleShare:
    """One module's own parameters, and how many could be removed."""

    module: str
    parameters: int
    masked: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """What could be removed from a model.

    report: of the demasked model; `before` is the model itself. modules: those with parameters,
    most masked first. known, unknown: calls of each op with and without an entry in the table.
    gaps: ops without a rule that prevent removals, and what an entry would free.
    """

    report: Report
    modules: tuple[ModuleShare, ...]
    known: Mapping[str, int]
    unknown: Mapping[str, int]
    gaps: tuple[Gap, ...]

    def to_dict(self) -> dict[str, Any]:
        """The inspection as plain dictionaries, ready for JSON."""
        ops: dict[str, Any] = {
            "with_entry": dict(self.known),
            "without_entry": dict(self.unknown),
            "gaps": [asdict(gap) for gap in self.gaps],
        }
        modules = [asdict(module) for module in self.modules]
        return {"report": self.report.to_dict(), "modules": modules, "ops": ops}

    def __str__(self) -> str:
        report = replace(self.report, removed={})  # its table has the rows of `modules`
        return f"{report}\n\n{render_text(*_parts(self))}"


def inspect_network(network: NetworkFile, step: ProgressStep, table: Table = TABLE) -> Inspection:
    """The inspection of a network, which is demasked for it and stays unchanged.

    step: called with a description of each step. table: the op table, as `demask.demask` takes it.
    """
    slim = demask.demask(network.model, network.args, table=table, result="graph")
    report = demask.report(slim)
    model = network.model
    known = {*table, *CANONICALIZED}
    ops = _ops(graph_of_calls(model) if isinstance(model, fx.GraphModule) else model.graph)
    return Inspection(
        report,
        _modules(slim, report.removed),
        {name: count for name, count in ops.items() if name in known},
        {name: count for name, count in ops.items() if name not in known},
        gaps(network, slim, ops, step, table),
    )


@dataclass(frozen=True, slots=True)
class EditInspection:
    """What an edit of an ONNX file would change.

    bytes: of the file and of the edited one. nodes, unchanged: how many nodes that has, and how
    many of these are the file's own. changes: of the others, and of tensors that nodes read.
    barriers: nodes that are not cut, and why. note: why there is no edit.
    """

    bytes: tuple[int, int]
    nodes: int = 0
    unchanged: int = 0
    changes: tuple[NodeChange, ...] = ()
    barriers: tuple[tuple[str, str], ...] = ()
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The inspection as plain dictionaries, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return render_text(*_edit_parts(self))


def inspect_edit(path: Path, args: Sequence[Tensor], table: Table = TABLE) -> EditInspection:
    """What editing an ONNX file would change; nothing is written. args: example inputs."""
    size = size_of(str(path))
    try:
        edited, is_smaller = examine(path, args, table)
    except demask.DemaskError as error:
        return EditInspection((size, size), note=f"the file cannot be edited: {error}")
    changes = tuple(changes_of(installed().load(str(path)), edited.model))
    after = edited.model.ByteSize() if is_smaller else size
    note = "" if is_smaller else "an edit of the file removes nothing"
    return EditInspection((size, after), edited.nodes, edited.unchanged, changes, edited.barriers,
                          note)  # fmt: skip


def _edit_parts(edit: EditInspection) -> Iterable[RenderableType]:
    before, after = edit.bytes
    yield Text(edit.note or (
        f"edit of the file: {before:,} -> {after:,} bytes; {edit.unchanged:,} of {edit.nodes:,} "
        "nodes are the file's own, byte for byte"
    ))  # fmt: skip
    table = TextTable("node", "op", "change", box=SIMPLE_HEAD)
    for row in edit.changes[:ROWS]:
        table.add_row(Text(row.node), Text(row.op), Text(row.change))
    if len(edit.changes) > ROWS:
        table.add_row(f"{len(edit.changes) - ROWS} more nodes: see --json", "", "")
    if edit.changes:
        yield table
    reasons: dict[str, list[str]] = {}
    for node, reason in edit.barriers:
        reasons.setdefault(reason, []).append(node)
    for reason, nodes in list(reasons.items())[:ROWS]:
        more = f" and {len(nodes) - PLACES} more" if len(nodes) > PLACES else ""
        yield Text(f"not cut: {', '.join(nodes[:PLACES])}{more}: {reason}")


def _ops(graph: fx.Graph) -> Counter[str]:
    """How often each op that returns a tensor is called."""
    calls = (node.target for node in graph.nodes if node.op == "call_function")
    return Counter(op_name(target) for target in calls if _returns_tensors(target))


def _returns_tensors(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return False
    return any("Tensor" in str(output.type) for output in schema_of(target).returns)


def _modules(slim: nn.Module, removed: Mapping[str, int]) -> tuple[ModuleShare, ...]:
    """Per module of the original with parameters: their number, and how many were removed."""
    record = cast(Provenance, slim.demasked)
    original = {name.rpartition(".")[0] for name in record.cuts} | set(removed)
    left: Counter[str] = Counter()
    for name, tensor in _read_names(slim).items():
        left[name.rpartition(".")[0]] += tensor.numel()
    rows = [
        ModuleShare(module, left[module] + removed.get(module, 0), removed.get(module, 0))
        for module in original
    ]
    return tuple(sorted(rows, key=lambda row: (-row.masked, row.module)))


def _read_names(slim: nn.Module) -> dict[str, Tensor]:
    """Every parameter once; a tied one under the name by which the graph reads it."""
    graph = cast(fx.Graph, slim.graph)
    read = {str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")}
    names = list(slim.named_parameters(remove_duplicate=False))
    names.sort(key=lambda row: not read & {row[0], row[0].rpartition(".")[0]})
    distinct = {id(tensor): (name, tensor) for name, tensor in reversed(names)}
    return dict(distinct.values())


def _parts(inspection: Inspection) -> Iterable[RenderableType]:
    table = number_table("module", "parameters", "masked", "share")
    for row in inspection.modules[:ROWS]:
        numbers = (f"{row.parameters:,}", f"{row.masked:,}", share(row.masked, row.parameters))
        table.add_row(Text(row.module or "(the model itself)"), *numbers)
    if len(inspection.modules) > ROWS:
        table.add_row(f"{len(inspection.modules) - ROWS} more modules: see --json", "", "", "")
    yield table
    yield Text(f"\nops with an entry: {_counts(inspection.known)}")
    yield Text(f"ops without an entry: {_counts(inspection.unknown)}")
    if inspection.gaps:
        yield Text("")
        yield _gaps_table(inspection.gaps)


def _gaps_table(gaps: Sequence[Gap]) -> TextTable:
    table = number_table("no rule for", "calls", "slices not removed", "an entry would free")
    for gap in gaps[:ROWS]:
        words = "not known" if gap.frees is None else f"at most {gap.frees:,} parameters"
        table.add_row(_short(gap.op), f"{gap.calls:,}", f"{gap.slices:,}", words)
    if len(gaps) > ROWS:
        table.add_row(f"{len(gaps) - ROWS} more ops: see --json", "", "", "")
    return table


def _short(op: str) -> str:
    return op.removesuffix(".default")


def _counts(ops: Mapping[str, int]) -> str:
    rows = sorted(ops.items(), key=lambda row: (-row[1], row[0]))
    return ", ".join(f"{count} {_short(name)}" for name, count in rows) or "none"
