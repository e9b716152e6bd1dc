"""A strided convolution: its geometry, the ranges of its values, and what writes it in another form.

Along each axis, with stride s, the convolution of stride 1 has `wide` positions. The stride selects
`out` of them: 0, s, 2 s, ... A window of s positions starts at each selected one; the last window
may be incomplete.

A form is a sequence of calls and constants, written through the `FormWriter` protocol: into a graph, or on
meta tensors, to count the cost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from demask.facts.ranges import Range, Ranges
from demask.graph.editor import GraphEditor
from demask.graph.queries import is_pointwise, only_reader
from demask.ops import Table, schema
from demask.ops.schema import fake
from demask.ops.traits import CONVOLUTIONS, CONVOLUTIONS_ANY_PADDING

aten = torch.ops.aten


class FormWriter(Protocol):
    """Receives the calls and constants of a form, in order. Values are of the writer's own type."""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """The value of a call."""
        ...

    def constant(self, name: str, tensor: Tensor, *, weight: bool = False) -> Any:
        """A constant. weight: whether it is computed from a layer's weight: then a parameter."""
        ...

    def read(self, node: fx.Node) -> Any:
        """The value of a node outside the form."""
        ...


class Cost(NamedTuple):
    """Cost of a form: multiply-adds, whether it rounds, written elements, calls. Costs compare in
    this order; less is better."""

    macs: int
    rounds: bool
    elements: int
    nodes: int


@dataclass(slots=True)
class GraphWriter:
    """Writes a form before a node of a graph. name: of the module to which new constants belong.
    constants: names of those written so far, by content; equal ones are shared. meta: metadata of
    new nodes."""

    editor: GraphEditor
    reader: fx.Node
    name: str
    constants: dict[Any, str]
    meta: dict[str, Any] = field(default_factory=dict)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.editor.insert(self.reader, None, target, *args, **kwargs)
        node.meta |= self.meta
        return node

    def constant(self, name: str, tensor: Tensor, *, weight: bool = False) -> fx.Node:
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        key = (name, tensor.dtype, tuple(tensor.shape), content)
        known = self.constants.get(key)
        if known is None:
            full = f"{self.name}.{name}".lstrip(".")
            node = self.editor.add_constant(full, tensor, self.reader, parameter=weight)
            self.constants[key] = str(node.target)
            return node
        with self.editor.graph.inserting_before(self.reader):
            return self.editor.read_constant(known)

    def read(self, node: fx.Node) -> fx.Node:
        return node


@dataclass(slots=True)
class CostCounter:
    """Runs a form on meta tensors and counts its cost. batch: a size that differs from call to
    call, and is counted as 1."""

    batch: Any = None
    macs: int = 0
    elements: int = 0
    nodes: int = 0

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Tensor:
        value = target(*args, **kwargs)
        self.nodes += 1
        self.elements += value.numel()
        if target in CONVOLUTIONS:
            self.macs += value.numel() * args[1][0].numel()
        return value

    def constant(self, name: str, tensor: Tensor, *, weight: bool = False) -> Tensor:
        return tensor.to("meta")

    def read(self, node: fx.Node) -> Tensor:
        value = fake(node)
        shape = [1 if self._is_batch(size) else schema.example_size(size) for size in value.shape]
        return torch.empty(shape, dtype=value.dtype, device="meta")

    def _is_batch(self, size: Any) -> bool:
        return not isinstance(size, int) and str(size) == str(self.batch)

    def cost(self, *, rounds: bool) -> Cost:
        """The cost of all calls so far."""
        return Cost(self.macs, rounds, self.elements, self.nodes)


class ConvAxis(NamedTuple):
    """One axis of a convolution: size of the input, taps of the kernel, stride, dilation, and zeros
    before and after the input."""

    size: int
    kernel: int
    stride: int
    dilation: int = 1
    before: int = 0
    after: int = 0

    @property
    def span(self) -> int:
        """Number of positions from the first tap to the last."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def wide(self) -> int:
        """Output size of the convolution of stride 1."""
        return self.size + self.before + self.after - self.span + 1

    @property
    def out(self) -> int:
        """Output size of the strided convolution."""
        return -(-self.wide // self.stride)

    def reads(self, position: int) -> bool:
        """Whether a position of the wide value reads the input, not only zeros of the padding."""
        start = position - self.before
        first = -(-max(-start, 0) // self.dilation)  # the first tap that is not before the input
        return first < self.kernel and start + first * self.dilation < self.size


@functools.cache
def reads_input(axis: ConvAxis) -> tuple[bool, bool]:
    """Whether any selected position reads the input, and whether any dropped one does."""
    selected = any(axis.reads(v) for v in range(0, axis.wide, axis.stride))
    dropped = any(axis.reads(v) for v in range(axis.wide) if v % axis.stride)
    return selected, dropped


Step = Callable[[FormWriter, Any], Any]  # writes a function of the graph, applied to a value


@dataclass(frozen=True, slots=True)
class StridedConv:
    """A strided convolution with static sizes.

    axes: spatial axes. channels: of input and output. dtype: of its value. ranges: of its value,
    and of the value of each function after it. These functions are pointwise, the same at all
    positions, and each is the only reader of the value before it. constant: whether the weights
    are constants.
    """

    axes: tuple[ConvAxis, ...]
    channels: tuple[int, int]
    groups: int
    dtype: torch.dtype
    ranges: tuple[Range, ...]
    constant: bool = True

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.axes)

    @property
    def stride(self) -> list[int]:
        """Stride of each spatial axis."""
        return [axis.stride for axis in self.axes]

    @property
    def wide(self) -> tuple[int, ...]:
        """Spatial output sizes of the convolution of stride 1."""
        return tuple(axis.wide for axis in self.axes)

    @property
    def integral(self) -> bool:
        """Whether values are integers, which are always finite."""
        return not self.dtype.is_floating_point

    @property
    def drops(self) -> bool:
        """Whether any position of the wide value is dropped."""
        return any(axis.stride > 1 and axis.wide > 1 for axis in self.axes)

    @property
    def drops_input(self) -> bool:
        """Whether any dropped position reads the input, so that only it may be Inf or NaN."""
        reads = [reads_input(axis) for axis in self.axes]
        return any(
            dropped and all(any(other) for other in reads[:k] + reads[k + 1 :]) for k, (_, dropped) in enumerate(reads)
        )

    def axis(self, k: int) -> int:
        """Spatial axis k as a negative axis of the value, which may have no batch."""
        return k - self.rank


@dataclass(frozen=True, slots=True)
class FormInputs:
    """The inputs of a form. x, weight, bias: values of the form's writer. numbers: the weight's
    tensor if it is constant. steps: the functions after the convolution."""

    x: Any
    weight: Any
    bias: Any
    numbers: Tensor | None
    steps: tuple[Step, ...] = ()


def has_stride(node: fx.Node, largest: int = 1) -> bool:
    """Whether a call is a convolution with a stride larger than `largest`."""
    if node.op != "call_function" or node.target not in CONVOLUTIONS_ANY_PADDING:
        return False
    return any(n > largest for n in _one_per_axis(node, "stride"))


def _one_per_axis(node: fx.Node, name: str) -> list[int]:
    rank, value = CONVOLUTIONS_ANY_PADDING[node.target], schema.arguments(node)[name]
    if isinstance(value, str):  # "valid": strided convolutions accept no other string
        return [0] * rank
    values = [value] if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values


def chain_of(node: fx.Node, table: Table) -> list[fx.Node]:
    """The convolution, and the functions after it (see `StridedConv`)."""
    chain, rank = [node], CONVOLUTIONS_ANY_PADDING[node.target]
    while (reader := only_reader(chain[-1])) is not None:
        if not _follows(reader, chain[-1], rank, table):
            break
        chain.append(reader)
    return chain


def _follows(reader: fx.Node, source: fx.Node, rank: int, table: Table) -> bool:
    """Whether a reader is pointwise, and the same at all positions of the spatial axes."""
    norm = reader.target is aten.batch_norm.default
    if norm and schema.arguments(reader)["training"]:
        return False
    if not norm and not is_pointwise(reader, table):
        return False
    output, value = fake(reader), fake(source)
    others = [n for n in reader.all_input_nodes if n is not source]
    plain = all(n.op == "get_attr" for n in others) and not schema.is_dynamic(_other_arguments(reader))
    flat = norm or all(set(fake(n).shape[-rank:]) <= {1} for n in others)
    same = output.dtype == value.dtype and output.ndim == value.ndim
    return plain and flat and same and all(map(schema.same_size, output.shape, value.shape))


def _other_arguments(node: fx.Node) -> list[Any]:
    names = {o.name for o in schema.operands(node)}
    return [v for name, v in schema.arguments(node).items() if name not in names]


def site_of(editor: GraphEditor, chain: Sequence[fx.Node], known: Ranges, largest: float) -> StridedConv | str:
    """Geometry and ranges of the strided convolution of a chain (`chain_of`); or why it cannot be
    lowered. known: ranges by node. largest: bound of all values."""
    node = chain[0]
    arguments, rank = schema.arguments(node), CONVOLUTIONS_ANY_PADDING[node.target]
    x, weight = fake(arguments["input"]), fake(arguments["weight"])
    sizes = [*x.shape[-rank:], *weight.shape]
    if not all(isinstance(n, int) for n in sizes):
        return "its spatial sizes are dynamic; they have to be static"
    if fake(node).is_complex():
        return "no form is defined for complex numbers"
    each = {name: _one_per_axis(node, name) for name in ("stride", "padding", "dilation")}
    axes = tuple(
        ConvAxis(
            x.shape[k - rank],
            weight.shape[k - rank],
            each["stride"][k],
            each["dilation"][k],
            each["padding"][k],
            each["padding"][k],
        )
        for k in range(rank)
    )
    bounds = (known[n] for n in chain)
    ranges = tuple(Range(max(r.low, -largest), min(r.high, largest)) for r in bounds)
    channels = (weight.shape[1] * arguments["groups"], weight.shape[0])
    constant = editor.tensor(arguments["weight"]) is not None
    return StridedConv(axes, channels, arguments["groups"], fake(node).dtype, ranges, constant)


def call_of(editor: GraphEditor, chain: Sequence[fx.Node]) -> FormInputs:
    """The inputs of a form that replaces the convolution of a chain (`chain_of`)."""
    arguments = schema.arguments(chain[0])
    steps = tuple(_step(chain[k], chain[k + 1]) for k in range(len(chain) - 1))
    numbers = editor.tensor(arguments["weight"])
    return FormInputs(arguments["input"], arguments["weight"], arguments["bias"], numbers, steps)


def _step(source: fx.Node, node: fx.Node) -> Step:
    """A function that writes the call `node` with another value in place of `source`."""

    def again(write: FormWriter, value: Any) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: value if n is source else write.read(n))
        return write.call(node.target, *args, **kwargs)

    return again


__all__ = ["ConvAxis", "FormInputs", "Step", "StridedConv", "call_of", "chain_of", "has_stride", "site_of"]
