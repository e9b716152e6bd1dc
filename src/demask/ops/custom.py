"""demask's own ops in graphs and files: reference functions, lowerings, checks of arguments.

Each is registered in `registry.CUSTOM_OPS` where it is defined, under its name in files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from demask.compat.dispatch import base_name
from demask.registry import CUSTOM_OPS


@dataclass(frozen=True, slots=True)
class CustomOp:
    """A custom op.

    run: the same function in ATen ops, which torch.export traces through.
    lower: a pass that replaces the op's calls by ATen calls, from a `graph.program.Program` to
        one without them, for an op that no other library knows. None: its calls stay in graphs.
    check: raises BadInput for arguments that no call can have. Its argument maps names to values:
        constants as tensors, None for computed values.
    bind: a faster function for the code that runs a graph: from the arguments of a call by name to
        a function with the same result and its arguments, a tuple.
    """

    run: Callable[..., Any]
    lower: Callable[[Any], Any] | None = None
    check: Callable[[Mapping[str, Any]], None] | None = None
    bind: Callable[[Mapping[str, Any]], tuple[Callable[..., Any], tuple[Any, ...]]] | None = None


def is_custom_op(name: str) -> bool:
    """Whether an op name ("segment") is one of demask's custom ops; imports its module."""
    return name in CUSTOM_OPS and CUSTOM_OPS.get(name) is not None


def custom_op_of(op: Any) -> CustomOp | None:
    """The custom op that a node's target is; None for other targets."""
    if getattr(op, "namespace", "") != "demask" or base_name(op) not in CUSTOM_OPS:
        return None
    return CUSTOM_OPS.get(base_name(op))
