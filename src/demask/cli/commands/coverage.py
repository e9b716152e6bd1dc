"""What an entry would free: per op that the table does not cover, one demask with a guess of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, fx, nn

import demask
from demask.cli.progress import ProgressStep
from demask.cli.read_network import NetworkFile
from demask.graph.provenance import Provenance, Reason
from demask.ops import Declined, Entry, SizedLine, Table, schema
from demask.ops.schema import same_size


@dataclass(frozen=True, slots=True)
class Gap:
    """An op that slices were kept for, because nothing is known of its calls.

    calls: in the model. kept: slices put back before it, or made by it and read by nobody. places:
    the modules, or nodes. frees: at most so many parameters more would go if it had an entry; None
    where that is not known: where it does not keep the shape of its operands.
    """

    op: str
    calls: int
    kept: int
    places: tuple[str, ...]
    frees: int | None


def gaps(
    given: NetworkFile, slim: nn.Module, calls: Mapping[str, int], step: ProgressStep, table: Table
) -> tuple[Gap, ...]:
    """The gaps in the table that `slim`, made of the network given, tells of; most freed first.

    Each takes one more demask, of a table where the op works position by position.
    """
    record = cast(Provenance, slim.demasked)
    found: dict[str, list[Reason]] = {}
    for reason in record.reasons:
        if reason.op and reason.count:
            found.setdefault(reason.op, []).append(reason)
    made = []
    for op, reasons in found.items():
        step(f"asking what an entry for {op} would free")
        places = tuple(dict.fromkeys(reason.module or reason.node for reason in reasons))
        kept = sum(reason.count for reason in reasons)
        many = calls.get(op, len({reason.node for reason in reasons}))
        made.append(Gap(op, many, kept, places, _freed(given, record, _guessing(op, table), op)))
    return tuple(sorted(made, key=lambda gap: (-(gap.frees or 0), -gap.kept, gap.op)))


def _freed(given: NetworkFile, record: Provenance, table: Table, op: str) -> int | None:
    """How many parameters more go where the op is taken to work position by position."""
    try:
        slim: Any = demask.demask(given.model, given.args, table=table, result="graph")
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
        told = own.line if isinstance(own.line, str) else own.line(node)
        return _positionwise(node) if isinstance(told, Declined) else told

    entries = {**table, op: replace(own, line=line)}
    return Table(entries.items())


def _positionwise(node: fx.Node) -> str | Declined:
    """The line of a call whose outputs have the shape that its operands broadcast to."""
    which = schema.operands(node)
    values = [o.value.meta.get("val") for o in which if isinstance(o.value, fx.Node)]
    shapes = [value.shape for value in values if isinstance(value, Tensor)]
    made = schema.outputs(node)
    if not all(isinstance(out, Tensor) and _is_broadcast(out.shape, shapes) for out in made):
        return Declined(f"{node.target} does not keep the shape of its operands")
    return f"{', '.join(['...'] * len(which))} -> {', '.join(['...'] * len(made))}"


def _is_broadcast(shape: Sequence[Any], shapes: Sequence[Sequence[Any]]) -> bool:
    if max(map(len, shapes), default=0) != len(shape):
        return False
    for k in range(1, len(shape) + 1):
        sizes = [s[-k] for s in shapes if len(s) >= k]
        longer = [size for size in sizes if not (isinstance(size, int) and size == 1)]
        if not all(same_size(size, shape[-k]) for size in longer or sizes):
            return False
    return True
