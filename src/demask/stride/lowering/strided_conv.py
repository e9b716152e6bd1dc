"""A strided convolution where it stands: its geometry, and what is known of its values.

Along each axis, with stride s, the convolution of stride 1 has `wide` positions, of which 0, s,
2 s, ... are kept: `out` of them. A window of s positions, from a kept one on, holds it first; the
last window may be cut off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from demask.facts.ranges import Range, Ranges
from demask.graph.editor import GraphEditor
from demask.graph.queries import is_pointwise, only_reader
from demask.ops import Table, schema
from demask.ops.traits import CONVOLUTIONS_ANY_PADDING
from demask.stride.lowering.form_writers import Write

aten = torch.ops.aten


class ConvAxis(NamedTuple):
    """One axis of a convolution: positions of its input, taps, and zeros before and behind."""

    size: int
    kernel: int
    stride: int
    dilation: int = 1
    before: int = 0
    behind: int = 0

    @property
    def span(self) -> int:
        """Positions from the first tap to the last."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def wide(self) -> int:
        """Positions of the convolution of stride 1."""
        return self.size + self.before + self.behind - self.span + 1

    @property
    def out(self) -> int:
        return -(-self.wide // self.stride)

    def reads(self, place: int) -> bool:
        """Does a position of the wide value read any of the input, beside zeros of the padding?"""
        start = place - self.before
        first = -(-max(-start, 0) // self.dilation)  # the first tap that is not before the input
        return first < self.kernel and start + first * self.dilation < self.size


@functools.cache
def reading(axis: ConvAxis) -> tuple[bool, bool]:
    """Does any kept position read some of the input; does any dropped one?"""
    kept = any(axis.reads(v) for v in range(0, axis.wide, axis.stride))
    dropped = any(axis.reads(v) for v in range(axis.wide) if v % axis.stride)
    return kept, dropped


Step = Callable[[Write, Any], Any]  # a function of a value, written again on another one


@dataclass(frozen=True, slots=True)
class StridedConv:
    """A strided convolution with static sizes.

    axes: its spatial ones. channels: into it and out of it. dtype: of its value. ranges: of its
    value, and behind each function that follows: functions of one position each, alike at all of
    them, every one the only reader of the value before it. constant: are the weights known?
    """

    axes: tuple[ConvAxis, ...]
    channels: tuple[int, int]
    groups: int
    dtype: torch.dtype
    ranges: tuple[Range, ...]
    constant: bool = True

    @property
    def rank(self) -> int:
        return len(self.axes)

    @property
    def stride(self) -> list[int]:
        return [axis.stride for axis in self.axes]

    @property
    def wide(self) -> tuple[int, ...]:
        return tuple(axis.wide for axis in self.axes)

    @property
    def whole(self) -> bool:
        """Are values whole numbers, which are always finite?"""
        return not self.dtype.is_floating_point

    @property
    def drops(self) -> bool:
        """Is any position of the wide value dropped?"""
        return any(axis.stride > 1 and axis.wide > 1 for axis in self.axes)

    @property
    def drops_input(self) -> bool:
        """Does any dropped position read the input, so that it may be Inf or NaN alone?"""
        found = [reading(axis) for axis in self.axes]
        return any(
            dropped and all(any(other) for other in found[:k] + found[k + 1 :])
            for k, (_, dropped) in enumerate(found)
        )

    def axis(self, k: int) -> int:
        """A spatial axis, counted from the last one of a value: it may have no batch."""
        return k - self.rank


@dataclass(frozen=True, slots=True)
class FormInputs:
    """What a form reads: input, weight and bias, as values of what writes it; the weight's numbers
    where they are constant; and the functions behind."""

    x: Any
    weight: Any
    bias: Any
    numbers: Tensor | None
    steps: tuple[Step, ...] = ()


def strided(node: fx.Node, largest: int = 1) -> bool:
    """Is a call a convolution of a larger stride?"""
    if node.op != "call_function" or node.target not in CONVOLUTIONS_ANY_PADDING:
        return False
    return any(n > largest for n in _each(node, "stride"))


def _each(node: fx.Node, name: str) -> list[int]:
    rank, value = CONVOLUTIONS_ANY_PADDING[node.target], schema.arguments(node)[name]
    if isinstance(value, str):  # "valid": a stride takes no other word
        return [0] * rank
    values = [value] if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values


def chain_of(node: fx.Node, table: Table) -> list[fx.Node]:
    """The convolution, and the functions behind it (see `StridedConv`)."""
    chain, rank = [node], CONVOLUTIONS_ANY_PADDING[node.target]
    while (reader := only_reader(chain[-1])) is not None:
        if not _follows(reader, chain[-1], rank, table):
            break
        chain.append(reader)
    return chain


def _follows(reader: fx.Node, source: fx.Node, rank: int, table: Table) -> bool:
    """Is a reader a function of each position alone, alike at all positions of the last axes?"""
    norm = reader.target is aten.batch_norm.default
    if norm and schema.arguments(reader)["training"]:
        return False
    if not norm and not is_pointwise(reader, table):
        return False
    made, value = reader.meta["val"], source.meta["val"]
    others = [n for n in reader.all_input_nodes if n is not source]
    plain = all(n.op == "get_attr" for n in others) and not schema.is_dynamic(_rest(reader))
    flat = norm or all(set(n.meta["val"].shape[-rank:]) <= {1} for n in others)
    same = made.dtype == value.dtype and made.ndim == value.ndim
    return plain and flat and same and all(map(schema.same_size, made.shape, value.shape))


def _rest(node: fx.Node) -> list[Any]:
    names = {o.name for o in schema.operands(node)}
    return [v for name, v in schema.arguments(node).items() if name not in names]


def site_of(
    editor: GraphEditor, chain: Sequence[fx.Node], known: Ranges, largest: float
) -> StridedConv | str:
    """The site of a strided convolution, the first of a chain (`chain_of`); why it has none.
    largest: bound of all values."""
    node = chain[0]
    arguments, rank = schema.arguments(node), CONVOLUTIONS_ANY_PADDING[node.target]
    x, weight = arguments["input"].meta["val"], arguments["weight"].meta["val"]
    sizes = [*x.shape[-rank:], *weight.shape]
    if not all(isinstance(n, int) for n in sizes):
        return "its spatial sizes are dynamic; they have to be static"
    if node.meta["val"].is_complex():
        return "complex numbers have no order, and no forms"
    each = {name: _each(node, name) for name in ("stride", "padding", "dilation")}
    axes = tuple(
        ConvAxis(x.shape[k - rank], weight.shape[k - rank], each["stride"][k], each["dilation"][k],
             each["padding"][k], each["padding"][k])
        for k in range(rank)
    )  # fmt: skip
    bounds = (known[n] for n in chain)
    ranges = tuple(Range(max(r.low, -largest), min(r.high, largest)) for r in bounds)
    channels = (weight.shape[1] * arguments["groups"], weight.shape[0])
    constant = editor.tensor(arguments["weight"]) is not None
    return StridedConv(axes, channels, arguments["groups"], node.meta["val"].dtype, ranges, constant)


def call_of(editor: GraphEditor, chain: Sequence[fx.Node]) -> FormInputs:
    """What a form of the convolution reads, the first of a chain (`chain_of`)."""
    arguments = schema.arguments(chain[0])
    steps = tuple(_step(chain[k], chain[k + 1]) for k in range(len(chain) - 1))
    numbers = editor.tensor(arguments["weight"])
    return FormInputs(arguments["input"], arguments["weight"], arguments["bias"], numbers, steps)


def _step(source: fx.Node, node: fx.Node) -> Step:
    def again(write: Write, value: Any) -> Any:
        args, kwargs = map_arg(
            (node.args, node.kwargs), lambda n: value if n is source else write.read(n)
        )
        return write.call(node.target, *args, **kwargs)

    return again


__all__ = [
    "ConvAxis",
    "FormInputs",
    "Step",
    "StridedConv",
    "call_of",
    "chain_of",
    "site_of",
    "strided",
]
