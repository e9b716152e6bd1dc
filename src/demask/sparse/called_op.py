"""The entries of the table of ATen ops that steps call (`segment_calls.CALLED`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from demask.errors import BadInput

# How plans compute an op:
MOVED, POINTWISE, SOFTMAX, RESIZED = "moved", "pointwise", "softmax", "resized"
Numbers = tuple[Any, ...]  # integers; of pointwise calls, numbers
Shape = tuple[Any, ...]
Match = tuple[tuple[fx.Node, ...], Numbers, fx.Node | None]


@dataclass(frozen=True, slots=True)
class CalledOp:
    """An ATen op that a step calls.

    arguments: those of the op, from operands, numbers and the index tensor (or None). targets: the
    ops of graphs that it may be; match: their operands, numbers and the constant that is the index,
    from the arguments of a call by name and its node; None for a call that it is not. shape: of the
    result, from the shapes of operands, the numbers and the length of the index; sizes may be
    symbolic. lowering: how plans compute it. operands, numbers: how many; None for any. indexed:
    whether it reads an index. reals: whether numbers of a move may be fractions. spatial: whether
    operands and result are images, or signals, as their rank says.
    """

    op: Any
    arguments: Callable[[Sequence[Any], Numbers, Any], tuple[Any, ...]]
    targets: tuple[Any, ...]
    match: Callable[[Mapping[str, Any], fx.Node], Match | None]
    shape: Callable[[Sequence[Shape], Numbers, int], Shape]
    lowering: str = MOVED
    operands: int | None = 1
    numbers: int | None = None
    indexed: bool = False
    reals: bool = False
    spatial: bool = False

    def call(self, operands: Sequence[Tensor], numbers: Numbers, index: Tensor | None) -> Tensor:
        """The result. Raises BadInput if operands and numbers do not match the op."""
        try:
            result: Tensor = self.op(*self.arguments(operands, numbers, index))
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise BadInput(f"invalid operands of {self.op}: {error!s:.200}") from None
        return result

    @property
    def numeric(self) -> tuple[type, ...]:
        """The types of its numbers."""
        return (int,) if self.lowering == MOVED and not self.reals else (int, float)
