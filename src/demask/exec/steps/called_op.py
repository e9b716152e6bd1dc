"""An entry of the table of calls of single ATen ops (`segment_calls`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, fx

from demask.errors import BadInput
from demask.exec.steps.segment_steps import KINDS, SPATIAL

# How plans compute an op.
MOVED, POINTWISE, OVER_CHANNELS, PRODUCT = "moved", "pointwise", "over channels", "product"
RESIZED, RECURRENT = "resized", "recurrent"
POSITIONS, FACTORS, PARAMETERS = "positions", "factors", "parameters"  # constants that an op reads
FACTOR_NAMES = "weight", "bias"  # of the parameters of a module
PARAMETER_NAMES = "weight_ih", "weight_hh", "bias_ih", "bias_hh"  # of a recurrent module
Numbers = tuple[Any, ...]  # integers; of calls that are no moves, numbers
Shape = tuple[Any, ...]
#: operands, numbers, and nodes of constants
Match = tuple[tuple[fx.Node, ...], Numbers, tuple[fx.Node, ...]]


@dataclass(frozen=True, slots=True)
class CalledOp:
    """An ATen op that a step calls.

    arguments: those of the op, from operands, numbers and constants. targets: the ops of graphs
    that it may be; match: their operands, numbers and constants, from the arguments of a call by
    name and its node; None for a call that it is not. shape: of the result, from the shapes of
    operands, the numbers and the number of constants; sizes may be symbolic. lowering: how plans
    compute it. operands, numbers: how many; None for any. constants: int32 positions, or factors:
    vectors with an element per channel of the first operand, or parameters: float tensors of the
    shapes `parts`, from the channels of the first operand and the numbers; None if it reads none.
    optional: whether it may read none. kinds: of operands and result; moves of any kinds may change
    them. reals: whether numbers of a move may be fractions.
    """

    op: Any
    arguments: Callable[[Sequence[Any], Numbers, Sequence[Any]], tuple[Any, ...]]
    targets: tuple[Any, ...]
    match: Callable[[Mapping[str, Any], fx.Node], Match | None]
    shape: Callable[[Sequence[Shape], Numbers, int], Shape]
    lowering: str = MOVED
    operands: int | None = 1
    numbers: int | None = None
    constants: str | None = None
    parts: Callable[[int, Numbers], list[tuple[int, ...]]] | None = None
    optional: bool = False
    kinds: tuple[str, ...] = KINDS
    reals: bool = False

    @property
    def numeric(self) -> tuple[type, ...]:
        """The types of its numbers."""
        return (int,) if self.lowering == MOVED and not self.reals else (int, float)

    @property
    def keeps_kind(self) -> bool:
        """Whether the result is of the kind of the operands."""
        return self.lowering != MOVED or self.kinds != KINDS

    def call(self, operands: Sequence[Tensor], numbers: Numbers, stored: Tensor | None) -> Tensor:
        """The result. Raises BadInput if operands, numbers and constants do not match the op."""
        shape = operands[0].shape or (1,)
        try:
            constants = self.split(stored, shape[1 if self.kinds == SPATIAL else -1], numbers)
            result: Tensor = self.op(*self.arguments(operands, numbers, constants))
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise BadInput(f"invalid operands of {self.op}: {error!s:.200}") from None
        return result

    def split(self, stored: Tensor | None, channels: int, numbers: Numbers) -> list[Tensor]:
        """The constants that are stored one after another, for so many channels."""
        if stored is None:
            return []
        if self.parts is not None:
            shapes = self.parts(channels, numbers)
            parts = stored.split([prod(shape) for shape in shapes])
            return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        return [stored] if self.constants == POSITIONS else list(stored.reshape(-1, channels))

    def name_of(self, constant: str) -> str:
        """The name of a step, from that of its first constant: the module, and of parameters the
        layer and direction ("encoder.lstm.l0")."""
        module, _, leaf = constant.rpartition(".")
        if self.constants != PARAMETERS:
            return module
        layer = leaf.removeprefix(f"{PARAMETER_NAMES[0]}_")
        return f"{module}.{layer}" if module else layer

    def names_of_constants(self, name: str) -> list[str]:
        """The names of the constants of a step with this name."""
        if self.constants == PARAMETERS:
            module, dot, layer = name.rpartition(".")
            return [f"{module}{dot}{leaf}_{layer}" for leaf in PARAMETER_NAMES]
        return [f"{name}.{leaf}" for leaf in (FACTOR_NAMES if self.constants == FACTORS else (POSITIONS,))]


def axis_of(shape: Shape, axis: Any) -> int:
    """An axis, counted from the first. Raises BadInput if the shape has no such axis."""
    if not -len(shape) <= axis < len(shape):
        raise BadInput(f"expected an axis of {shape}, got {axis!r:.40}")
    return int(axis) % len(shape)


def with_size(shape: Shape, axis: int, size: Any) -> Shape:
    """The shape with another size of an axis."""
    return (*shape[:axis], size, *shape[axis + 1 :])


def same_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    """The only shape. Raises BadInput if there are several."""
    if any(tuple(shape) != tuple(shapes[0]) for shape in shapes):
        raise BadInput(f"expected values of one shape, got {shapes}")
    return shapes[0]
