"""The steps of segments: values that say what is computed, but not how.

Value k of a program is input k, or the output of step k - len(inputs). Kinds of values, by their
tensors:

    image     [batch, channels, height, width]
    signal    [batch, channels, length]
    tokens    [..., channels]
    pixels    [batch, height, width, channels], an image with channels last
    matrices  [..., rows, columns], each with tokens of its own

What a step is, its op says: `segment_rows.ROWS` has one row per op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, NamedTuple, TypeGuard, TypeVar

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
Pads = tuple[Pair, Pair]  # before and after, per axis


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


NO_WEIGHT = SparseWeight((0, 0, 0))  # of steps that have none, and until it is stored


class NoFields(NamedTuple):
    """The fields of ops that have none."""


class Window(NamedTuple):
    """The fields of a convolution of an image or a signal (height 1).

    padding: before and after, per axis. transposed: as conv_transpose, with the full output (input
    spaced by the stride, kernel not flipped) cropped by `padding`. The padding after an axis may be
    negative, down to 1 - max(stride, dilation): the output_padding of torch is before - after. The
    matrix is [out, in / groups * kernel] too, that is weight.transpose(0, 1).flatten(1) for one
    group.
    Fields of a signal are those of an image of height 1: (1, kernel), ((0, 0), (before, after)).
    """

    out: int
    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pads = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    groups: int = 1
    transposed: bool = False

    @property
    def is_pixelwise(self) -> bool:
        """Whether each output pixel depends only on the same input pixel."""
        is_1x1 = self.kernel == self.stride == (1, 1) and self.padding == ((0, 0), (0, 0))
        return is_1x1 and not self.transposed


class Outputs(NamedTuple):
    """The fields of a linear layer: x @ W.T of tokens."""

    out: int


class Pool(NamedTuple):
    """The fields of the maximum or mean of each window.

    ceil: windows may start inside and end outside of the padded image. counted: means include the
    padding; their windows have no dilation.
    """

    mean: bool
    kernel: Pair
    stride: Pair
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    ceil: bool = False
    counted: bool = True

    @property
    def window(self) -> Window:
        """A convolution with the same windows."""
        top, left = self.padding
        return Window(1, self.kernel, self.stride, ((top, top), (left, left)), self.dilation)


class Mean(NamedTuple):
    """The field of a mean of each channel of an image: an image of one pixel (keep) or tokens."""

    keep: bool


class Selection(NamedTuple):
    """The fields of a selection: channel index[k] of x as channel k, for every `stride`-th row and
    column of an image.

    The index is int32 channel numbers. padded: whether some are -1, for a channel of zeros.
    """

    stride: Pair = (1, 1)
    padded: bool = False

    @property
    def window(self) -> Window:
        """A convolution of the same pixels."""
        return Window(1, (1, 1), self.stride)


class Numbers(NamedTuple):
    """The fields of a call of an ATen op: its numbers, as its entry of `CALLED` says."""

    numbers: tuple[Any, ...] = ()


F = TypeVar("F", bound=tuple[Any, ...], covariant=True)


@dataclass(frozen=True, slots=True)
class Step(Generic[F]):
    """One call of a program: act(op(operands) + the last operand if `adds`).

    op: a key of `segment_rows.ROWS`. reads: the values that it reads. weight, bias: of a layer.
    index: the other constants of ops that read some: int32 positions or channels, or factors. kind:
    of the result, for calls of ATen ops. name: of the module.
    """

    op: str
    reads: tuple[int, ...]
    fields: F
    weight: SparseWeight = NO_WEIGHT
    bias: Span | None = None
    index: Span | None = None
    act: Act | None = None
    adds: bool = False
    kind: str = ""
    name: str = ""

    @property
    def x(self) -> int:
        """The first value that it reads."""
        return self.reads[0]

    @property
    def add(self) -> int | None:
        """The value that it adds."""
        return self.reads[-1] if self.adds else None


AnyStep = Step[Any]
Conv = Step[Window]
Layer = Step[Window] | Step[Outputs]


def conv_step(
    x: int,
    weight: SparseWeight,
    bias: Span | None,
    out: int,
    kernel: Pair,
    stride: Pair = (1, 1),
    padding: Pads = ((0, 0), (0, 0)),
    dilation: Pair = (1, 1),
    groups: int = 1,
    transposed: bool = False,
    act: Act | None = None,
    add: int | None = None,
    name: str = "",
) -> Conv:
    """A convolution, with an activation and an added value; the other fields are those of `Window`."""
    fields = Window(out, kernel, stride, padding, dilation, groups, transposed)
    return Step("conv", _with_added(x, add), fields, weight, bias, act=act, adds=add is not None, name=name)


def linear_step(
    x: int,
    weight: SparseWeight,
    bias: Span | None,
    out: int,
    act: Act | None = None,
    add: int | None = None,
    name: str = "",
) -> Step[Outputs]:
    """A linear layer, with an activation and an added value."""
    return Step("linear", _with_added(x, add), Outputs(out), weight, bias, act=act, adds=add is not None, name=name)


def _with_added(x: int, add: int | None) -> tuple[int, ...]:
    return (x,) if add is None else (x, add)


def pool_step(x: int, *fields: Any, **named: Any) -> Step[Pool]:
    """A pool; its fields are those of `Pool`."""
    return Step("pool", (x,), Pool(*fields, **named))


def mean_step(x: int, keep: bool) -> Step[Mean]:
    """The mean of each channel of an image."""
    return Step("mean", (x,), Mean(keep))


def flat_step(x: int) -> Step[NoFields]:
    """Images of one pixel as tokens."""
    return Step("flat", (x,), NoFields())


def activation_step(x: int, act: Act) -> Step[NoFields]:
    """act(x)."""
    return Step("map", (x,), NoFields(), act=act)


def add_step(x: int, z: int, act: Act | None = None) -> Step[NoFields]:
    """act(x + z) of values of the same shape."""
    return Step("add", (x, z), NoFields(), act=act, adds=True)


def scale_step(x: int, z: int, act: Act | None = None) -> Step[NoFields]:
    """act(x * z) of an image and an image of one pixel."""
    return Step("scale", (x, z), NoFields(), act=act)


def concat_step(xs: tuple[int, ...]) -> Step[NoFields]:
    """Channels of several values, concatenated."""
    return Step("cat", xs, NoFields())


def select_step(x: int, index: Span, stride: Pair = (1, 1), padded: bool = False) -> Step[Selection]:
    """A selection of channels; its fields are those of `Selection`."""
    return Step("select", (x,), Selection(stride, padded), index=index)


def call_step(
    xs: tuple[int, ...], op: str, kind: str, numbers: tuple[Any, ...] = (), index: Span | None = None, name: str = ""
) -> Step[Numbers]:
    """A call of an op of `segment_calls.CALLED`, by name, of values of the same or other kinds."""
    return Step(op, xs, Numbers(numbers), index=index, kind=kind, name=name)


def is_conv(step: AnyStep | None) -> TypeGuard[Conv]:
    """Whether a step is a convolution."""
    return step is not None and step.op == "conv"


def is_layer(step: AnyStep | None) -> TypeGuard[Layer]:
    """Whether a step has weights and products: a convolution or a linear layer."""
    return step is not None and step.op in ("conv", "linear")


def is_pixelwise(step: Layer) -> bool:
    """Whether each output pixel of a layer depends only on the same input pixel."""
    return not is_conv(step) or step.fields.is_pixelwise


def as_conv(step: Layer) -> Conv:
    """A layer as a convolution of images."""
    if is_conv(step):
        return step
    window = Window(step.fields.out, (1, 1))
    return Step("conv", step.reads, window, step.weight, step.bias, act=step.act, adds=step.adds, name=step.name)


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
