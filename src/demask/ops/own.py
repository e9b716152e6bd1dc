"""Demask's own ops in graphs and files: what each stands for, and what it may be called with.

Parts further down in the layout register theirs here; those above, which write modules and read
files, look it up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from demask.compat.dispatch import base_name
from demask.errors import TableError


@dataclass(frozen=True, slots=True)
class Own:
    """What there is to know of an op.

    run: the same function in ATen ops, which torch.export looks through.
    spelled: of an op that no other library knows, the pass that puts ATen calls in the place of
        its calls: a `graph.program.Program` -> one without them. None: it stays in graphs.
    check: given the arguments of a call by their names, constants as tensors and None for what is
        computed, raises BadInput for those that no call can have.
    """

    run: Callable[..., Any]
    spelled: Callable[[Any], Any] | None = None
    check: Callable[[Mapping[str, Any]], None] | None = None


OWN: dict[Any, Own] = {}
# By an op's name, the module further down that registers it: `import demask` imports none of them.
HOMES = {
    "chain": "demask.pilot.chain_op",
    "moments": "demask.traverse.parted",
    "segment": "demask.sparse.spell",
}


def known(name: str) -> bool:
    """Whether an op of this name ("segment") is one of demask's; it is registered then."""
    if name in HOMES:
        import_module(HOMES[name])
    return any(base_name(op) == name for op in OWN)


def own_of(op: Any) -> Own | None:
    """What there is to know of a node's target; None for what is not demask's own."""
    if getattr(op, "namespace", "") == "demask":
        known(base_name(op))
    return OWN.get(op)


def register(op: Any, own: Own) -> None:
    """Make an op (an overload) known; TableError for a second entry."""
    if op in OWN:
        raise TableError(f"op {op} is known already; there is one entry per op")
    OWN[op] = own
