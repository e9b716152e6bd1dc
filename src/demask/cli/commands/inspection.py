"""`demask inspect`: what could be removed from a model, per module, and the ops that it calls.

Per op without an entry: how many parameters demask removes with a guess in its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor, fx, nn

import demask
from demask.cli.read_network import NetworkFile
from demask.compat.dispatch import OpOverload, schema_of
from demask.files.onnx.edit.edit_file import NodeChange, changes_of, examine
from demask.files.onnx.read.reader import installed
from demask.files.onnx.write.writer import size_of
from demask.graph.provenance import Provenance, Reason
from demask.graph.result.module_calls import graph_of_calls
from demask.ops import TABLE, Declined, Entry, SizedLine, Table, schema
from demask.ops.entry import op_name
from demask.ops.schema import same_size
from demask.pages import InTerminal, Lines, OnPage, Page, PageSource, Section, TextTable
from demask.progress import ProgressStep
from demask.report.report import Report
from demask.report.sections import NAMED, ROWS, report_sections
from demask.report.values import share
from demask.rewrites.normalize import REWRITTEN


@dataclass(frozen=True, slots=True)
class Gap:
    """An op without a rule, because of which slices were not removed."""

    op: str
    calls: int  # in the model
    slices: int  # restored before it, and unused ones of its outputs
    places: tuple[str, ...]  # modules, or nodes
    # parameters that an entry would remove, at most; None if its outputs have other shapes than its operands
    frees: int | None


def gaps(
    network: NetworkFile, slim: nn.Module, calls: Mapping[str, int], step: ProgressStep, table: Table
) -> tuple[Gap, ...]:
    """The gaps in the table that left slices in `slim`, the demasked network; largest first.

    Each takes one more demask, with a table where the op works position by position.
    """
    record = cast(Provenance, slim.demasked)
    by_op: dict[str, list[Reason]] = {}
    for reason in record.reasons:
        if reason.op and reason.count:
            by_op.setdefault(reason.op, []).append(reason)
    result = []
    for op, reasons in by_op.items():
        step(f"measuring what an entry for {op} would free")
        places = tuple(dict.fromkeys(reason.module or reason.node for reason in reasons))
        slices = sum(reason.count for reason in reasons)
        many = calls.get(op, len({reason.node for reason in reasons}))
        freed = _count_freed(network, record, _with_guess(op, table), op)
        result.append(Gap(op, many, slices, places, freed))
    return tuple(sorted(result, key=lambda gap: (-(gap.frees or 0), -gap.slices, gap.op)))


def _count_freed(network: NetworkFile, record: Provenance, table: Table, op: str) -> int | None:
    """How many more parameters are removed if the op is assumed to work position by position."""
    try:
        slim: Any = demask.demask(network.model, network.args, table=table, check=False, result="graph")
    except Exception:  # The op may refuse smaller operands in any way; this is but a guess.
        return None
    if any(reason.op == op and reason.count for reason in slim.demasked.reasons):
        return None
    return max(0, record.after.parameters - slim.demasked.after.parameters)


def _with_guess(op: str, table: Table) -> Table:
    """The table with an entry for an op: its own, where that covers the call, else a guess."""
    own = table.get(op)
    if own is None:
        return table.extended({op: Entry(_positionwise_line)})

    def line(node: fx.Node) -> str | SizedLine | Declined:
        text = own.line if isinstance(own.line, str) else own.line(node)
        return _positionwise_line(node) if isinstance(text, Declined) else text

    entries = {**table, op: replace(own, line=line)}
    return Table(entries.items())


def _positionwise_line(node: fx.Node) -> str | Declined:
    """The line of a call whose outputs have the shape that its operands broadcast to."""
    which = schema.operands(node)
    values = [o.value.meta.get("val") for o in which if isinstance(o.value, fx.Node)]
    shapes = [value.shape for value in values if isinstance(value, Tensor)]
    outputs = schema.outputs(node)
    if not all(isinstance(out, Tensor) and _is_broadcast(out.shape, shapes) for out in outputs):
        return Declined(f"{node.target} does not keep the shape of its operands")
    return f"{', '.join(['...'] * len(which))} -> {', '.join(['...'] * len(outputs))}"


def _is_broadcast(shape: Sequence[Any], shapes: Sequence[Sequence[Any]]) -> bool:
    if max(map(len, shapes), default=0) != len(shape):
        return False
    for k in range(1, len(shape) + 1):
        sizes = [s[-k] for s in shapes if len(s) >= k]
        longer = [size for size in sizes if not (isinstance(size, int) and size == 1)]
        if not all(same_size(size, shape[-k]) for size in longer or sizes):
            return False
    return True


@dataclass(frozen=True, slots=True)
class ModuleShare:
    """One module's own parameters, and how many could be removed."""

    module: str
    parameters: int
    masked: int


@dataclass(frozen=True, slots=True)
class Inspection(PageSource):
    """What could be removed from a model."""

    report: Report  # of the demasked model; `before` is the model itself
    modules: tuple[ModuleShare, ...]  # those with parameters, most masked first
    known: Mapping[str, int]  # calls of each op with an entry in the table
    unknown: Mapping[str, int]  # those of ops without one
    gaps: tuple[Gap, ...]  # ops without a rule that prevent removals

    def to_dict(self) -> dict[str, Any]:
        """The inspection as plain dictionaries, ready for JSON."""
        ops: dict[str, Any] = {
            "with_entry": dict(self.known),
            "without_entry": dict(self.unknown),
            "gaps": [asdict(gap) for gap in self.gaps],
        }
        modules = [asdict(module) for module in self.modules]
        return {"report": self.report.to_dict(), "modules": modules, "ops": ops}

    def page(self) -> Page:
        """What the command prints and writes, as sections."""
        own = report_sections(self.report, removed=False)  # its table has the rows of `modules`
        return Page("demask inspect", (*own, *_inspection_sections(self)), self.report.summary)


def inspect_network(network: NetworkFile, step: ProgressStep, table: Table = TABLE) -> Inspection:
    """The inspection of a network, which is demasked for it and stays unchanged.

    step: called with a description of each step. table: the op table, as `demask.demask` takes it.
    """
    slim = demask.demask(network.model, network.args, table=table, result="graph")
    report = demask.report(slim)
    model = network.model
    known = {*table, *REWRITTEN}
    ops = _count_tensor_ops(graph_of_calls(model) if isinstance(model, fx.GraphModule) else model.graph)
    return Inspection(
        report,
        _module_shares(slim, report.removed),
        {name: count for name, count in ops.items() if name in known},
        {name: count for name, count in ops.items() if name not in known},
        gaps(network, slim, ops, step, table),
    )


@dataclass(frozen=True, slots=True)
class EditInspection(PageSource):
    """What an edit of an ONNX file would change."""

    bytes: tuple[int, int]  # of the file, and of the edited one
    nodes: int = 0  # of the edited file
    unchanged: int = 0  # how many of these are the file's own
    changes: tuple[NodeChange, ...] = ()  # of the other nodes, and of tensors that nodes read
    barriers: tuple[tuple[str, str], ...] = ()  # nodes that are not cut, and why
    note: str = ""  # why there is no edit

    def to_dict(self) -> dict[str, Any]:
        """The inspection as plain dictionaries, ready for JSON."""
        return asdict(self)

    def page(self) -> Page:
        """What the command prints and writes, as sections."""
        return Page("demask inspect", tuple(_edit_sections(self)))


@dataclass(frozen=True, slots=True)
class RewriteInspection(PageSource):
    """Every change on the way from a network to the smallest graph."""

    trace: demask.Trace

    def to_dict(self) -> dict[str, Any]:
        """The changes as plain dictionaries, ready for JSON."""
        return self.trace.to_dict()

    def page(self) -> Page:
        """What the command prints and writes: a section per change."""
        sections: list[Section] = [Lines([f"{len(self.trace.changes)} changes"], "What is rewritten")]
        for change in self.trace.changes:
            head, *lines = str(change).splitlines()
            sections += [Lines([head]), Lines(lines, is_close=True)]
        return Page("demask inspect", tuple(sections))


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
    return EditInspection((size, after), edited.nodes, edited.unchanged, changes, edited.barriers, note)


def _edit_sections(edit: EditInspection) -> Iterator[Section]:
    before, after = edit.bytes
    yield Lines(
        [
            edit.note
            or (
                f"edit of the file: {before:,} -> {after:,} bytes; {edit.unchanged:,} of {edit.nodes:,} "
                "nodes are the file's own, byte for byte"
            )
        ],
        "An edit of the file",
    )
    rows = [(row.node, row.op, row.change) for row in edit.changes]
    yield TextTable(
        ("node", "op", "change"), rows, "Nodes that change", left=(0, 1, 2), terminal_rows=_first_rows(rows, "nodes")
    )
    reasons: dict[str, list[str]] = {}
    for node, reason in edit.barriers:
        reasons.setdefault(reason, []).append(node)
    lines = []
    for reason, nodes in list(reasons.items())[:ROWS]:
        more = f" and {len(nodes) - NAMED} more" if len(nodes) > NAMED else ""
        lines.append(f"not cut: {', '.join(nodes[:NAMED])}{more}: {reason}")
    yield InTerminal([Lines(lines, is_wrapped=True, is_close=True)])
    every = [(reason, f"{len(nodes):,}", ", ".join(nodes)) for reason, nodes in reasons.items()]
    yield OnPage([TextTable(("nodes that are not cut, and why", "nodes", "which"), every, left=(0, 2))])


def _first_rows(rows: Sequence[tuple[str, ...]], what: str) -> list[tuple[str, ...]]:
    """The rows that a terminal shows, and how many more there are."""
    more = len(rows) - ROWS
    return [*rows[:ROWS], *[(f"{more} more {what}: see --json or --report",)] * (more > 0)]


def _count_tensor_ops(graph: fx.Graph) -> Counter[str]:
    calls = (node.target for node in graph.nodes if node.op == "call_function")
    return Counter(op_name(target) for target in calls if _returns_tensors(target))


def _returns_tensors(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return False
    return any("Tensor" in str(output.type) for output in schema_of(target).returns)


def _module_shares(slim: nn.Module, removed: Mapping[str, int]) -> tuple[ModuleShare, ...]:
    """Per module of the original with parameters: their number, and how many were removed."""
    record = cast(Provenance, slim.demasked)
    original = {name.rpartition(".")[0] for name in record.cuts} | set(removed)
    left: Counter[str] = Counter()
    for name, tensor in _parameters_by_read_name(slim).items():
        left[name.rpartition(".")[0]] += tensor.numel()
    rows = [ModuleShare(module, left[module] + removed.get(module, 0), removed.get(module, 0)) for module in original]
    return tuple(sorted(rows, key=lambda row: (-row.masked, row.module)))


def _parameters_by_read_name(slim: nn.Module) -> dict[str, Tensor]:
    """Every parameter once; a tied one under the name by which the graph reads it."""
    graph = cast(fx.Graph, slim.graph)
    read = {str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")}
    names = list(slim.named_parameters(remove_duplicate=False))
    names.sort(key=lambda row: not read & {row[0], row[0].rpartition(".")[0]})
    distinct = {id(tensor): (name, tensor) for name, tensor in reversed(names)}
    return dict(distinct.values())


def _inspection_sections(inspection: Inspection) -> Iterator[Section]:
    rows = [
        (
            row.module or "(the model itself)",
            f"{row.parameters:,}",
            f"{row.masked:,}",
            share(row.masked, row.parameters),
        )
        for row in inspection.modules
    ]
    yield TextTable(
        ("module", "parameters", "masked", "share"),
        rows,
        "Masked by module",
        terminal_rows=_first_rows(rows, "modules"),
    )
    yield Lines(
        [
            f"ops with an entry: {_op_counts(inspection.known)}",
            f"ops without an entry: {_op_counts(inspection.unknown)}",
        ],
        "Ops",
        True,
    )
    rows = [
        (
            _short_op_name(gap.op),
            f"{gap.calls:,}",
            f"{gap.slices:,}",
            "not known" if gap.frees is None else f"at most {gap.frees:,} parameters",
        )
        for gap in inspection.gaps
    ]
    head = ("no rule for", "calls", "slices not removed", "an entry would free")
    yield TextTable(head, rows, "What entries for ops would free", terminal_rows=_first_rows(rows, "ops"))


def _short_op_name(op: str) -> str:
    return op.removesuffix(".default")


def _op_counts(ops: Mapping[str, int]) -> str:
    rows = sorted(ops.items(), key=lambda row: (-row[1], row[0]))
    return ", ".join(f"{count} {_short_op_name(name)}" for name, count in rows) or "none"
