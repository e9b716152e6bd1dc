"""Demask's own ops in graphs and files: what each stands for, and what it may be called with.

Parts further down in the layout register theirs here; those above, which write modules and read
files, look it up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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


def register(op: Any, own: Own) -> None:
    """Make an op (an overload) known; TableError for a second entry."""
    if op in OWN:
        raise TableError(f"op {op} is known already; there is one entry per op")
    OWN[op] = own
