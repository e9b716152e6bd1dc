"""Per op without an entry: how many parameters demask removes with a guess in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, fx, nn

import demask
from demask.cli.read_network import NetworkFile
from demask.graph.provenance import Provenance, Reason
from demask.ops import Declined, Entry, SizedLine, Table, schema
from demask.ops.schema import same_size
from demask.progress import ProgressStep


@dataclass(frozen=True, slots=True)
class Gap:
    """An op without a rule, because of which slices were not removed.

    calls: its calls in the model. slices: those restored before it, and unused ones of its outputs.
    places: the modules, or nodes. frees: upper bound on the parameters that an entry would remove;
    None where the op does not preserve the shape of its operands, so that it is unknown.
    """

    op: str
    calls: int
    slices: int
    places: tuple[str, ...]
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
        freed = _freed(network, record, _guessing(op, table), op)
        result.append(Gap(op, many, slices, places, freed))
    return tuple(sorted(result, key=lambda gap: (-(gap.frees or 0), -gap.slices, gap.op)))


def _freed(network: NetworkFile, record: Provenance, table: Table, op: str) -> int | None:
    """How many more parameters are removed if the op is assumed to work position by position."""
    try:
        slim: Any = demask.demask(network.model, network.args, table=table, result="graph")
    except Exception:  # The op may refuse smaller operands in any way; this is but a guess.
        return None
    if any(reason.op == op and reason.count for reason in slim.demasked.reasons):
        return None
    return max(0, record.after.parameters - slim.demasked.after.parameters)


def _guessing(op: str, table: Table) -> Table:
    """The table with an entry for an op: its own, where that covers the call, else a guess."""
    own = table.get(op)
    if own is None:
        return table.extended({op: Entry(_positionwise)})

    def line(node: fx.Node) -> str | SizedLine | Declined:
        text = own.line if isinstance(own.line, str) else own.line(node)
        return _positionwise(node) if isinstance(text, Declined) else text

    entries = {**table, op: replace(own, line=line)}
    return Table(entries.items())


def _positionwise(node: fx.Node) -> str | Declined:
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
