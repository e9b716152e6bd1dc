"""Demask's own ops in graphs and files: what each stands for, and what it may be called with.

Each is registered in `registry.CUSTOM_OPS` where it is defined, under its name in files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from demask.compat.dispatch import base_name
from demask.registry import CUSTOM_OPS


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


def is_own(name: str) -> bool:
    """Whether an op of this name ("segment") is one of demask's; it is registered then."""
    return name in CUSTOM_OPS and CUSTOM_OPS.get(name) is not None


def own_of(op: Any) -> Own | None:
    """What there is to know of a node's target; None for what is not demask's own."""
    if getattr(op, "namespace", "") != "demask" or base_name(op) not in CUSTOM_OPS:
        return None
    return CUSTOM_OPS.get(base_name(op))
