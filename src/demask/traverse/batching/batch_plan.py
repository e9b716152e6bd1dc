"""One pass of a network over N inputs, as a list of levels.

A level is one fully connected layer, which runs for all N inputs at once so that its weights are
read once, or the calls between such layers, which run for `at_once` inputs at a time. Values that
later levels read are stored for all N inputs. `demask.traverse.batching.levels` computes the plan.

`Traffic` is the bytes of weights that are read for a number of inputs, counted or predicted.
Weights are the matrices and kernels that a call multiplies with. Biases, parameters of norms and
rows of embeddings are left out: together they are a thousandth of the traffic.

`find_batch_axes` also checks that inputs of a batch stay separate:

    f(cat(x_1, ..., x_n)) == cat(f(x_1), ..., f(x_n))

holds for a network in which every call carries the letter of the batch from its operands to its
outputs. Calls that sum over it, normalize along it or move its positions mix inputs: such a network
is refused, with the name of the call.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.exec.call_groups import CallGroup
from demask.facts.analysis import Analysis
from demask.files.weight_file import StoredTensor
from demask.graph.program import Program
from demask.ops import Declined, Relation, schema
from demask.ops.flow import Part, follow, is_mixed
from demask.ops.schema import fake

Values = Mapping[fx.Node, Any]
_ADVICE = "inputs of a batch cannot be computed a few at a time; give a part of the model that can"


@dataclass(frozen=True, slots=True)
class BatchAxis:
    """An axis of (outer, inputs, count) positions.

    >>> x = torch.arange(12).view(2, 3, 2)
    >>> BatchAxis(0, 2, 2).part(x.flatten(), 3, 1, 2).tolist()
    [2, 3, 8, 9]
    """

    axis: int
    outer: int = 1
    count: int = 1

    @property
    def copies(self) -> bool:
        """Whether a part of the batch is a copy, not a view."""
        return self.axis > 0 or self.outer > 1

    def cut(self, value: Tensor, n: int) -> Tensor:
        """A view of the value with its axis as three: outer, n, count."""
        return value.unflatten(self.axis, (self.outer, n, self.count))

    def span(self, value: Tensor, n: int, start: int, end: int) -> Tensor:
        """Inputs [start, end) of the n in a value, with its axis as three."""
        return self.cut(value, n).narrow(self.axis + 1, start, end - start)

    def part(self, value: Tensor, n: int, start: int, end: int) -> Tensor:
        """Inputs [start, end) of the n in a value; a copy where the axis is not the first."""
        if (start, end) == (0, n):
            return value
        inputs = self.span(value, n, start, end).flatten(self.axis, self.axis + 2)
        return inputs if self.axis == 0 else inputs.contiguous()


@dataclass(frozen=True, slots=True)
class BatchAxes:
    """The batch axes of a program.

    by_value: the axis of every value of the batch; a tuple for calls with several outputs. sizes:
    values of integer nodes for 1, 2, ... inputs. symbol: the batch size in symbolic shapes.
    """

    by_value: Mapping[fx.Node, Any]
    sizes: Mapping[fx.Node, tuple[int, ...]]
    symbol: Any

    def parts(self, values: Values, nodes: Iterable[fx.Node], n: int, start: int, count: int) -> dict[fx.Node, Any]:
        """The values of these nodes, of `count` of the n inputs from `start` on."""
        parts = {}
        for node in nodes:
            axis = self.by_value.get(node)
            if node in self.sizes:
                parts[node] = self.sizes[node][count - 1]
            else:
                parts[node] = values[node] if axis is None else axis.part(values[node], n, start, start + count)
        return parts

    def put(
        self, into: dict[fx.Node, Any], nodes: Iterable[fx.Node], parts: Values, n: int, start: int, count: int
    ) -> None:
        """Write the values of these nodes, of `count` inputs from `start` on, into values of n inputs."""
        for node in nodes:
            axis, part = self.by_value.get(node), parts[node]
            if axis is None or count == n:
                into[node] = part
                continue
            if node not in into:
                into[node] = part.new_empty([s * n // count if k == axis.axis else s for k, s in enumerate(part.shape)])
            axis.span(into[node], n, start, start + count).copy_(axis.cut(part, count))

    def nbytes(self, node: fx.Node, n: int) -> int:
        """Bytes that a value takes for n inputs."""
        return sum(
            math.prod(_size_for(size, self.symbol, n) for size in leaf.shape) * leaf.dtype.itemsize
            for leaf in pytree.tree_leaves(node.meta.get("val"))
            if isinstance(leaf, Tensor)
        )


def find_batch_axes(analysis: Analysis, inputs: int) -> BatchAxes:
    """The batch axes of a program captured with a dynamic batch size.

    inputs: largest number at a time, for the table of sizes.

    Raises:
        BadInput: if no single size is dynamic, or a call mixes inputs of a batch.
    """
    program = analysis.program
    symbol = _symbol(program)
    batch_axes: dict[fx.Node, Any] = {}
    sizes: dict[fx.Node, tuple[int, ...]] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            sizes[node] = tuple(_size_for(value, symbol, n) for n in range(1, inputs + 1))
        elif node.op == "placeholder":
            batch_axes |= _input_axis(node, symbol)
        elif node.target is operator.getitem:
            batch_axes |= _axis_of_output(node, batch_axes)
        elif node.op == "call_function":
            batch_axes |= _axes_of_call(node, batch_axes, symbol, analysis)
    return BatchAxes(batch_axes, sizes, symbol)


def _symbol(program: Program) -> Any:
    symbols = {
        size.node.expr
        for node in program.graph.find_nodes(op="placeholder")
        for leaf in pytree.tree_leaves(node.meta.get("val"))
        for size in getattr(leaf, "shape", ())
        if isinstance(size, torch.SymInt)
    }
    if len(symbols) == 1 and next(iter(symbols)).is_Symbol:
        return symbols.pop()
    hint = " (" + program.notes[0] + ")" if not symbols and program.notes else ""
    raise BadInput(
        f"expected one dynamic size, the inputs' first, got {sorted(map(str, symbols))}{hint}; "
        "batch() takes networks that run at any batch size"
    )


def _size_for(size: Any, symbol: Any, n: int) -> int:
    return size if isinstance(size, int) else int(size.node.expr.subs(symbol, n))


def _input_axis(node: fx.Node, symbol: Any) -> dict[fx.Node, BatchAxis]:
    """The batch axis of an input, its first one."""
    shape: Any = getattr(node.meta.get("val"), "shape", ())
    if not any(isinstance(size, torch.SymInt) for size in shape):
        return {}
    if isinstance(shape[0], torch.SymInt) and all(isinstance(size, int) for size in shape[1:]):
        return {node: BatchAxis(0)}
    raise BadInput(f"input {node.name}: expected the batch as its first axis, got {tuple(shape)}")


def _axis_of_output(node: fx.Node, by_value: Mapping[fx.Node, Any]) -> dict[fx.Node, BatchAxis]:
    source: Any = node.args[0]
    axes = by_value.get(source)
    axis = None if axes is None else axes[node.args[1]]
    return {} if axis is None else {node: axis}


def _axes_of_call(
    node: fx.Node, by_value: Mapping[fx.Node, Any], symbol: Any, analysis: Analysis
) -> dict[fx.Node, Any]:
    reads = [source for source in node.all_input_nodes if source in by_value]
    outs = schema.outputs(node)
    if not any(isinstance(s, torch.SymInt) for out in outs for s in getattr(out, "shape", ())):
        return _check_without_batch(node, reads, analysis)
    relation = analysis.relation(node)
    if isinstance(relation, Declined):
        raise BadInput(f"{node.name}: {relation.text}, so {_ADVICE}")
    axes = [_batch_axis(relation, k, by_value, symbol) for k in range(len(outs))]
    has_several = isinstance(fake(node), (list, tuple))
    return {node: tuple(axes) if has_several else axes[0]}


def _check_without_batch(node: fx.Node, reads: list[fx.Node], analysis: Analysis) -> dict[fx.Node, Any]:
    """No batch axis, for a value without a dynamic size; BadInput if it reads the batch."""
    relation = analysis.relation(node) if reads else None
    free = isinstance(relation, Relation) and relation.entry.free
    if reads and not free and node.target is not torch.ops.aten.sym_size.int:
        raise BadInput(f"{node.name} ({node.target}) has no axis for the batch of {reads[0].name}: {_ADVICE}")
    return {}


def _batch_axis(relation: Relation, out: int, by_value: Mapping[fx.Node, Any], symbol: Any) -> BatchAxis | None:
    """The batch axis of an output; all operands' batch axes must lead to the same one."""
    shape = schema.outputs(relation.node)[out].shape
    axis = next((k for k, size in enumerate(shape) if isinstance(size, torch.SymInt)), None)
    read = [] if relation.entry.free else list(_carried_parts(relation, out, by_value))
    if axis is None:
        return None if not read else _refuse_mixed(relation)
    if not read:
        return _repeated_axis(relation, out, axis, symbol)
    part = read[0]
    if part is None or part.axis != axis or any(other != part for other in read):
        return _refuse_mixed(relation)
    outer = shape[axis].node.expr / (part.inner * symbol)
    return BatchAxis(axis, int(outer), part.inner) if outer.is_Integer else _refuse_mixed(relation)


def _carried_parts(relation: Relation, out: int, by_value: Mapping[fx.Node, Any]) -> Iterator[Part | None]:
    """The part of an output that each operand's batch axis becomes; None where there is none."""
    for k, operand in enumerate(relation.operands):
        batch_axis = by_value.get(operand.value)
        if batch_axis is not None:
            mixed = is_mixed(relation, k, batch_axis.axis)
            yield (None if mixed else follow(relation, k, Part(batch_axis.axis, batch_axis.count), out=out))


def _repeated_axis(relation: Relation, out: int, axis: int, symbol: Any) -> BatchAxis:
    """The batch axis of a value that is the same for every input, such as a repeated constant."""
    letters = relation.outs[out][axis]
    inside = {letter for axes in relation.ins for letter in relation.letters(axes)}
    if not relation.entry.free and set(letters) & inside:
        return _refuse_mixed(relation)
    size = schema.outputs(relation.node)[out].shape[axis]
    return BatchAxis(axis, 1, int(size.node.expr / symbol))


def _refuse_mixed(relation: Relation) -> Any:
    raise BadInput(f"{relation.node.name} ({relation.node.target}) mixes the inputs of a batch: {_ADVICE}")


@dataclass(frozen=True, slots=True)
class LayerTraffic:
    """The bytes of weights read by one call that multiplies with constant weights.

    Attributes:
        name: name of the call.
        weight: name of the weight among the model's constants.
        connected: whether the call is a fully connected layer, which runs for many inputs at a
            time.
        weight_bytes: size of the weight in bytes.
        read: bytes of the weight read, for all inputs; default 0.
    """

    name: str
    weight: str
    connected: bool
    weight_bytes: int
    read: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of weights that a network reads for a number of inputs; prints as a table.

    The saving is computed as in US 10,417,555 B2: a layer of 16M weights of 2 bytes reads 32 MB for
    sixteen images at once and 512 MB for sixteen images one by one. (The patent prints 256 MB,
    which is one byte per weight.) If 90 % of all weights are in such layers, 15/16 * 0.9 = 84 % of
    the bytes are saved.

    Attributes:
        inputs: number of inputs.
        layers: tuple of `LayerTraffic`, one entry per call with weights, in order of execution.
        weight_bytes: bytes of all weights.
        weight_bytes_read: bytes of weights read for all inputs.
        unbatched: bytes of weights read if each input is computed alone.
        saved: 1 - weight_bytes_read / unbatched, from 0 to 1.
        connected: the `Traffic` of fully connected layers only.

    Example:
        >>> from demask.traverse.batching.batch_plan import LayerTraffic, Traffic
        >>> M = 2**20
        >>> conv = LayerTraffic("conv", "conv.weight", False, 10 * M, 16 * 10 * M)
        >>> fc = LayerTraffic("fc", "fc.weight", True, 90 * M, 90 * M)
        >>> both = Traffic(16, (conv, fc))
        >>> both.weight_bytes // M, both.weight_bytes_read // M, both.unbatched // M
        (100, 250, 1600)
        >>> round(both.saved, 3), 15 / 16 * 0.9
        (0.844, 0.84375)
    """

    inputs: int
    layers: tuple[LayerTraffic, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; those that several layers share count once."""
        return sum({layer.weight: layer.weight_bytes for layer in self.layers}.values())

    @property
    def weight_bytes_read(self) -> int:
        """Bytes that were read."""
        return sum(layer.read for layer in self.layers)

    @property
    def unbatched(self) -> int:
        """Bytes to read if every call read its weights for each input separately."""
        return self.inputs * sum(layer.weight_bytes for layer in self.layers)

    @property
    def saved(self) -> float:
        """The share of the unbatched bytes that was not read."""
        return 1 - self.weight_bytes_read / self.unbatched if self.unbatched else 0.0

    @property
    def connected(self) -> Traffic:
        """The traffic of the fully connected layers only."""
        return Traffic(self.inputs, tuple(layer for layer in self.layers if layer.connected))

    def __str__(self) -> str:
        """A table: a row per layer, the sum of the fully connected ones, and of all."""
        lines = [("layer", "kind", "weights, MB", "one by one, MB", "read, MB", "saved")]
        for layer in self.layers:
            kind = "connected" if layer.connected else ""
            lines.append((layer.name, kind, *_cells(Traffic(self.inputs, (layer,)))))
        count = f"{self.inputs} input{'s' if self.inputs != 1 else ''}"
        lines.append(("fully connected", "", *_cells(self.connected)))
        lines.append((f"all, {count}", "", *_cells(self)))
        widths = [max(len(line[k]) for line in lines) for k in range(6)]
        rule = "  ".join("-" * width for width in widths)
        sides = "<<>>>>"  # words aligned left, numbers right
        columns = list(zip(sides, widths, strict=True))
        shown = ["  ".join(f"{w:{s}{n}}" for w, (s, n) in zip(line, columns, strict=True)).rstrip() for line in lines]
        return "\n".join([shown[0], rule, *shown[1:-2], rule, *shown[-2:]])


def _cells(traffic: Traffic) -> tuple[str, str, str, str]:
    sizes = (traffic.weight_bytes, traffic.unbatched, traffic.weight_bytes_read)
    first, second, third = (f"{size / 1e6:,.3f}" for size in sizes)
    return first, second, third, f"{100 * traffic.saved:.1f} %"


@dataclass(frozen=True, slots=True)
class StreamedLayer:
    """A fully connected layer whose weight stays in a file.

    node, x: the call and its input. bias: name of a constant. out_first: whether the weight is [out, in]; then blocks
    are outputs, else they are inputs, and partial products are summed. rows: of a block.
    """

    node: fx.Node
    x: fx.Node
    bias: str | None
    stored: StoredTensor
    out_first: bool
    rows: int = 0

    @property
    def outputs(self) -> int:
        """The number of output features."""
        return self.stored.shape[0 if self.out_first else 1]

    @property
    def sums_wide(self) -> bool:
        """Whether partial products are summed in float32, as for dtypes of less than 4 bytes."""
        return not self.out_first and self.stored.dtype.itemsize < 4


@dataclass(frozen=True, slots=True)
class Level:
    """A level of a pass: a group of calls.

    connected: whether it runs for all inputs at once. layers: its calls that multiply with weights. streamed: a layer
    whose weight is in a file, which runs in place of the calls.
    """

    group: CallGroup
    connected: bool
    layers: tuple[LayerTraffic, ...]
    streamed: StreamedLayer | None = None


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The levels of a pass, in order.

    program: the network, without its constants. batch_axes: of its values. inputs: per pass, N. at_once: inputs at a
    time between fully connected layers. peak: predicted maximum bytes; least: with the smallest blocks. constants:
    names of those that are read from memory; resident: their bytes, if others are in a file.
    """

    program: Program
    levels: tuple[Level, ...]
    batch_axes: BatchAxes
    inputs: int
    at_once: int
    peak: int
    least: int
    constants: frozenset[str]
    resident: int

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchPlan:
        return self

    @property
    def layers(self) -> tuple[LayerTraffic, ...]:
        """The calls that multiply with weights, in order; nothing is read yet."""
        return tuple(layer for level in self.levels for layer in level.layers)

    def traffic(self, batch: int) -> Traffic:
        """Predicted bytes of weights that a call with `batch` inputs reads."""
        passes = [min(self.inputs, batch - start) for start in range(0, batch, self.inputs)]
        steps = sum(-(-n // self.at_once) for n in passes)
        times = {True: len(passes), False: steps}
        layers = (replace(layer, read=layer.weight_bytes * times[layer.connected]) for layer in self.layers)
        return Traffic(batch, tuple(layers))
