"""The steps of segments: values that say what is computed, but not how.

Value k of a program is input k, or the output of step k - len(inputs). Kinds of values, by their
tensors:

    image     [batch, channels, height, width]
    signal    [batch, channels, length]
    tokens    [..., channels]
    pixels    [batch, height, width, channels], an image with channels last
    matrices  [..., rows, columns], each with tokens of its own
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from demask.ops.activations import Act

#: kind -> rank of its tensors; None for any
RANKS: dict[str, int | None] = {"image": 4, "signal": 3, "tokens": None, "pixels": 4, "matrices": None}
KINDS = tuple(RANKS)
INPUTS = ("image", "signal", "tokens", "pixels")  # kinds of inputs of programs
CHANNELS_LAST = ("tokens", "pixels", "matrices")
SPATIAL = ("image", "signal")
MAX_SIZE = 2**31 - 1
LARGEST = 3.4e38  # fits in float32
Span = tuple[int, int, int]  # number of the tensor, first element, end
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SparseWeight:
    """A matrix [rows, columns] in CSR: float values, int32 row starts and columns; or, without row
    starts and columns, a dense one: all float values, row by row.

    The matrix of a convolution is [out, in / groups * kernel height * kernel width], that is
    `weight.flatten(1)`. values: float32, bfloat16, or in CSR int8 with a float32 scale per row.
    """

    values: Span
    crow: Span | None = None
    col: Span | None = None
    scale: Span | None = None

    @property
    def csr(self) -> tuple[Span, Span, Span] | None:
        """Values, row starts and columns; None for a dense matrix."""
        return None if self.crow is None or self.col is None else (self.values, self.crow, self.col)


@dataclass(frozen=True, slots=True)
class ConvStep:
    """act(conv(x) + bias + value `add`) of an image or a signal (height 1).

    padding: before and after, per axis. transposed: as conv_transpose, with the full output (input
    spaced by the stride, kernel not flipped) cropped by `padding`. The padding after an axis may be
    negative, down to 1 - max(stride, dilation): the output_padding of torch is before - after. The
    matrix is [out, in / groups * kernel] too, that is weight.transpose(0, 1).flatten(1) for one
    group.
    Fields of a signal are those of an image of height 1: (1, kernel), ((0, 0), (before, after)).
    """

    x: int
    weight: SparseWeight
    bias: Span | None
    out: int
    kernel: Pair
    stride: Pair = (1, 1)
    padding: tuple[Pair, Pair] = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    groups: int = 1
    transposed: bool = False
    act: Act | None = None
    add: int | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class LinearStep:
    """act(x @ W.T + bias + value `add`) of tokens."""

    x: int
    weight: SparseWeight
    bias: Span | None
    out: int
    act: Act | None = None
    add: int | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class PoolStep:
    """The maximum or mean of each window.

    ceil: windows may start inside and end outside of the padded image. counted: means include the
    padding; their windows have no dilation.
    """

    x: int
    mean: bool
    kernel: Pair
    stride: Pair
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    ceil: bool = False
    counted: bool = True


@dataclass(frozen=True, slots=True)
class MeanStep:
    """The mean of each channel of an image, as an image of one pixel (keep) or as tokens."""

    x: int
    keep: bool


@dataclass(frozen=True, slots=True)
class FlattenStep:
    """Images of one pixel as tokens."""

    x: int


@dataclass(frozen=True, slots=True)
class ActivationStep:
    """act(x)."""

    x: int
    act: Act


@dataclass(frozen=True, slots=True)
class AddStep:
    """act(x + z) of values of the same shape."""

    x: int
    z: int
    act: Act | None = None


@dataclass(frozen=True, slots=True)
class ScaleStep:
    """act(x * z) of an image and an image of one pixel."""

    x: int
    z: int
    act: Act | None = None


@dataclass(frozen=True, slots=True)
class ConcatStep:
    """Channels of several values, concatenated."""

    xs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SelectStep:
    """Channel index[k] of x as channel k, for every `stride`-th row and column of an image.

    index: int32 channel numbers. padded: whether some are -1, for a channel of zeros.
    """

    x: int
    index: Span
    stride: Pair = (1, 1)
    padded: bool = False

    @property
    def out(self) -> int:
        """Number of channels of the output."""
        return self.index[2] - self.index[1]


@dataclass(frozen=True, slots=True)
class CallStep:
    """An op of `segment_calls.CALLED`, by name, of several values of the same or other kinds.

    kind: of the result. index: the constants of ops that read some: int32 positions, or factors.
    """

    xs: tuple[int, ...]
    call: str
    kind: str
    numbers: tuple[Any, ...] = ()
    index: Span | None = None
    name: str = ""


Step = (
    ConvStep
    | LinearStep
    | PoolStep
    | MeanStep
    | FlattenStep
    | ActivationStep
    | AddStep
    | ScaleStep
    | ConcatStep
    | SelectStep
    | CallStep
)
# Names of steps in the text of a program, which is stored in files.
STEPS: dict[str, type] = {
    "conv": ConvStep,
    "linear": LinearStep,
    "pool": PoolStep,
    "mean": MeanStep,
    "flat": FlattenStep,
    "map": ActivationStep,
    "add": AddStep,
    "scale": ScaleStep,
    "cat": ConcatStep,
    "select": SelectStep,
    "call": CallStep,
}
NAMES = {kind: name for name, kind in STEPS.items()}


def reads(step: Step) -> tuple[int, ...]:
    """The values that a step reads."""
    if isinstance(step, (ConcatStep, CallStep)):
        return step.xs
    if isinstance(step, (AddStep, ScaleStep)):
        return step.x, step.z
    add = getattr(step, "add", None)
    return (step.x,) if add is None else (step.x, add)


def canonical(kind: str, shape: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """(batch, channels, height, width) of a value; tokens are pixels of one row, and the columns of
    all matrices are channels of their rows."""
    if kind == "image":
        return shape[0], shape[1], shape[2], shape[3]
    if kind == "signal":
        return shape[0], shape[1], 1, shape[2]
    if kind == "pixels":
        return shape[0], shape[3], shape[1], shape[2]
    if kind == "matrices":
        return 1, prod(shape[:-2]) * shape[-1], 1, shape[-2]
    return 1, shape[-1], 1, prod(shape[:-1])


def channel_axis(kind: str) -> int:
    """The axis of channels of a kind."""
    return -1 if kind in CHANNELS_LAST else 1


def has_rank(kind: str, rank: int) -> bool:
    """Whether a kind has tensors of this rank."""
    return rank >= (2 if kind == "matrices" else 1) if RANKS[kind] is None else rank == RANKS[kind]
