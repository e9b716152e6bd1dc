"""Replaces layers with mostly zero weights, and the calls between them, by `demask::segment`.

    fc2(gelu(fc1(x))) == segment([x], [values, index], program)

One call replaces a full region of a graph (`convex_groups`): intermediate values stay in the
layout of the kernels, and activations and sums are fused into the layers.

Before regions are sought, calls are rewritten as those that segments can hold.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

import demask.sparse.segment.segment_op  # noqa: F401  (registers the op that graphs call)
from demask.exec.steps.called_op import RECURRENT
from demask.exec.steps.convex_groups import SegmentRegion, Wanted, regions
from demask.exec.steps.match_calls import ANY, MatchedCall, matrix
from demask.exec.steps.recurrent_rows import prepare_recurrent
from demask.exec.steps.segment_calls import CALLED, sizes_of_reshape
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_rows import SELECTION, lowering_of
from demask.exec.steps.segment_steps import (
    INPUTS,
    AnyStep,
    Numbers,
    Selection,
    Span,
    SparseWeight,
    Step,
    call_step,
    canonical,
    is_conv,
    is_layer,
)
from demask.graph.editor import GraphEditor, drop_unread
from demask.graph.program import Program as FullProgram
from demask.graph.queries import has_shape, input_dependent
from demask.ops import schema
from demask.ops.activations import Act
from demask.ops.schema import fake, same_size
from demask.rewrites.driver import apply_rules
from demask.rewrites.segment import SEGMENT as SEGMENT_RULES

aten = torch.ops.aten


def prepare_calls(editor: GraphEditor) -> None:
    """Rewrite calls of a graph for segments, in place."""
    apply_rules(editor, SEGMENT_RULES)
    drop_unread(editor.graph)
    _expand_static_addends(editor)
    _read_sizes_from_inputs(editor)


def _read_sizes_from_inputs(editor: GraphEditor) -> None:
    """Read dynamic sizes from inputs if possible: a segment does not return all of its values."""
    known: dict[Any, tuple[fx.Node, int]] = {}
    for node in editor.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, Tensor):
            for axis, size in enumerate(value.shape):
                if not isinstance(size, int):
                    known.setdefault(size.node.expr, (node, axis))
    for node in editor.calls(aten.sym_size.int):
        size = node.meta["val"]
        if not isinstance(size, int) and size.node.expr in known:
            node.args = known[size.node.expr]


def _expand_static_addends(editor: GraphEditor) -> None:
    """Expand values that depend on sizes alone, such as border maps, to the shapes to which they
    are added: segments add values of one shape."""
    live = input_dependent(editor.graph)
    for node in editor.calls(aten.add.Tensor):
        shape = fake(node).shape
        for side, other in ((0, 1), (1, 0)):
            value, x = node.args[side], node.args[other]
            if not isinstance(value, fx.Node) or value in live or x not in live:
                continue
            is_tensor = isinstance(value.meta.get("val"), Tensor) and len(shape) > 2
            if is_tensor and has_shape(x, shape) and not has_shape(value, shape):
                with editor.graph.inserting_before(node):
                    expanded = editor.call(aten.expand.default, value, _new_sizes(editor, value, x))
                node.update_arg(side, expanded)


def _new_sizes(editor: GraphEditor, value: fx.Node, x: fx.Node) -> list[Any]:
    """The sizes of x for an expansion of a value; -1 for those that the value has: they need not be
    read from x, which would be computed before the expansion, in another segment."""
    sizes, old = editor.sizes(x), fake(value).shape
    new = fake(x).shape
    first = len(new) - len(old)
    return [-1 if k >= first and same_size(new[k], old[k - first]) else size for k, size in enumerate(sizes)]


SEGMENT = torch.ops.demask.segment.default
VALUES, INDEX, NARROW = 0, 1, 2  # the weight tensors of a segment
DENSE_FROM = 0.5  # share of nonzeros from which a weight is dense: CSR would need as many bytes
NARROWEST = 127  # largest int8 in use; -128 has no positive counterpart


def segmented(
    program: FullProgram,
    core: Wanted,
    allowed: Wanted,
    *,
    dtype: torch.dtype = torch.float32,
    precision: str | None = None,
) -> FullProgram:
    """The program with regions of sparse layers as segments.

    core: whether a layer should be in a segment. allowed: whether another layer may be between such
    layers. dtype: of the values of segments. precision: how sparse weights are stored: "bf16",
    "int8" (with a scale per row), or None to leave them as they are.
    """
    editor = GraphEditor(program)
    prepare_recurrent(editor, dtype)
    prepare_calls(editor)
    replacements: dict[fx.Node, fx.Node] = {}  # node of a region -> output of its segment
    for region in regions(editor, dtype, core, allowed):
        replacements |= _replaced(editor, region, replacements, precision)
    _sort_nodes(editor.graph)
    return editor.finish()


def name_of(editor: GraphEditor, call: MatchedCall) -> str:
    """The name of the module that has the weight of a layer."""
    return editor.constants[str(call.weight.target)].name.rpartition(".")[0]  # type: ignore[union-attr]


def segments_of(graph: fx.Graph) -> list[tuple[fx.Node, SegmentProgram]]:
    """The segments of a graph and their programs."""
    return [
        (node, SegmentProgram.parse(schema.arguments(node)["program"]))
        for node in graph.nodes
        if node.target is SEGMENT
    ]


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A layer that stores a part of its weights, or all: its name, stored weights, all weights,
    multiplications per call, and the numbers in its bias."""

    name: str
    stored: int
    weights: int
    products: int
    bias: int = 0


def layers(program: SegmentProgram, shapes: Sequence[Sequence[int]]) -> list[StoredLayer]:
    """The layers of a segment for inputs of these shapes."""
    value_shapes, segment_layers = program.shapes(shapes), []
    for step, out_shape in zip(program.steps, value_shapes[len(program.inputs) :], strict=True):
        if lowering_of(step) == RECURRENT:
            segment_layers.append(_recurrent_layer(step, value_shapes[step.x]))
        if not is_layer(step):
            continue
        kind, (_, first, end) = program.kinds[step.x], step.weight.values
        transposed = is_conv(step) and step.fields.transposed
        batch, _, height, width = canonical(kind, value_shapes[step.x] if transposed else out_shape)
        columns = canonical(kind, value_shapes[step.x])[1]
        if is_conv(step):
            columns = columns // step.fields.groups * prod(step.fields.kernel)
        pixels, stored = batch * height * width, end - first
        bias = 0 if step.bias is None else step.bias[2] - step.bias[1]
        segment_layers.append(StoredLayer(step.name, stored, step.fields.out * columns, stored * pixels, bias))
    return segment_layers


def _recurrent_layer(step: Step[Numbers], x: Sequence[int]) -> StoredLayer:
    """A recurrent layer, all weights of which are stored: every step multiplies by each once."""
    parts = CALLED[step.op].parts
    assert parts is not None
    shapes = parts(x[2], step.fields.numbers)
    weights, bias = (sum(prod(shape) for shape in shapes if len(shape) == rank) for rank in (2, 1))
    return StoredLayer(step.name, weights, weights, weights * x[0] * x[1], bias)


def layers_of(network: FullProgram) -> list[StoredLayer]:
    """The layers of all segments of a program, for the sizes of the example inputs."""
    segment_layers = []
    for node, program in segments_of(network.graph):
        inputs = schema.arguments(node)["inputs"]
        segment_layers += layers(program, [list(network.example.shape(x)) for x in inputs])
    return segment_layers


def _replaced(
    editor: GraphEditor, region: SegmentRegion, known: Mapping[fx.Node, fx.Node], precision: str | None
) -> dict[fx.Node, fx.Node]:
    """Replace a region by the call of a segment; returns region node -> output of the segment."""
    nodes = _nodes_within(region, known)
    outputs = [c.node for c in region.calls if any(user not in nodes for user in c.node.users)]
    steps = _Steps(editor, region.calls, set(outputs), _WeightStore(editor, precision))
    program, reader = steps.program(outputs), region.calls[-1].node.next
    weights = steps.store.constants(reader)
    inputs = [known.get(source, source) for source, _ in steps.inputs]
    segment = editor.insert(reader, outputs[0], SEGMENT, inputs, weights, program.text())
    segment.meta = {"val": [fake(node) for node in outputs]}
    replacements = {
        node: editor.insert(reader, node, operator.getitem, segment, number) for number, node in enumerate(outputs)
    }
    for node, replacement in replacements.items():
        node.replace_all_uses_with(replacement, lambda user: user not in nodes)
    for node in [node for node in reversed(editor.graph.nodes) if node in nodes]:
        editor.graph.erase_node(node)
    return replacements


def _nodes_within(region: SegmentRegion, known: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """The nodes of a region, and those between a call and what it reads: of rows, the recurrent
    call and its results. known: outputs of earlier segments, which are read instead of nodes."""
    nodes = region.nodes
    reads = {known.get(source, source) for call in region.calls for source in call.reads}
    for call in region.calls:
        waiting = [node for node in call.node.all_input_nodes if node not in reads]
        while waiting:
            node = waiting.pop()
            is_call = node.op == "call_function" and node not in reads
            if is_call and node not in nodes and set(node.users) <= nodes:
                nodes.add(node)
                waiting += node.all_input_nodes
    return nodes


def _sort_nodes(graph: fx.Graph) -> None:
    """Sort nodes after the nodes that they read, otherwise in the present order.

    Raises CycleError if a region was not convex.
    """
    position = {node: k for k, node in enumerate(graph.nodes)}
    sorter = TopologicalSorter({node: node.all_input_nodes for node in graph.nodes})
    sorter.prepare()
    ready: list[tuple[int, fx.Node]] = []
    order: list[fx.Node] = []
    while sorter.is_active():
        for node in sorter.get_ready():
            heappush(ready, (position[node], node))
        order.append(heappop(ready)[1])
        sorter.done(order[-1])
    for before, node in pairwise(order):
        if before.next is not node:
            before.append(node)


# ------------------------------------------------------------------------------------- one segment


@dataclass(frozen=True, slots=True)
class _LayerChain:
    """A call with the sum and activation that are fused into it.

    last: the node whose value it computes. add: the added value.
    """

    call: MatchedCall
    last: fx.Node
    add: fx.Node | None = None
    act: Act | None = None


class _Steps:
    """The steps of a region, while they are collected."""

    def __init__(
        self, editor: GraphEditor, calls: Sequence[MatchedCall], outputs: Collection[fx.Node], store: _WeightStore
    ):
        self.editor, self.store, self.outputs = editor, store, outputs
        self.calls = {call.node: call for call in calls}
        outside = ((s, c) for c in calls for s in c.reads if s not in self.calls)
        sources = ((s, _kind_of_input(s, c.kind)) for s, c in outside)
        self.converted: dict[tuple[fx.Node, str], int] = {}  # values as other kinds
        self.inputs = {source: number for number, source in enumerate(dict.fromkeys(sources))}
        self.live = input_dependent(editor.graph)
        self.steps: list[AnyStep] = []
        self.values: dict[fx.Node, int] = {}

    def program(self, outputs: Sequence[fx.Node]) -> SegmentProgram:
        """The program that computes these values."""
        for chain in self._layer_chains():
            self._append(chain)
        numbers = tuple(self.values[node] for node in outputs)
        static = tuple(k for (source, _), k in self.inputs.items() if source not in self.live)
        kinds = tuple(kind for _, kind in self.inputs)
        return SegmentProgram(kinds, tuple(self.steps), numbers, static)

    def _layer_chains(self) -> list[_LayerChain]:
        """The calls in the order of the last node of each chain.

        If two layers are added, the sum is fused into the later one.
        """
        chains: dict[fx.Node, _LayerChain] = {}
        fused: set[fx.Node] = set()
        layers = [call for call in reversed(self.calls.values()) if call.is_layer]
        sums = [call for call in self.calls.values() if call.op in ("add", "scale")]
        selections = [call for call in self.calls.values() if call.channels is not None]
        for call in [*layers, *sums, *selections]:
            if call.node not in fused:
                fuse = self._chain if call.channels is None else self._selections
                chain, members = fuse(call, fused)
                chains[chain.last] = chain
                fused |= members
        single_calls = {node: _LayerChain(call, node) for node, call in self.calls.items() if node not in fused}
        chains |= single_calls
        return [chains[node] for node in self.calls if node in chains]

    def _chain(self, call: MatchedCall, fused: set[fx.Node]) -> tuple[_LayerChain, set[fx.Node]]:
        """A layer or a sum with all calls that can be fused into it, and their nodes."""
        chain, members = _LayerChain(call, call.node), {call.node}
        reader = self._only_reader(chain.last, fused)
        while reader is not None and _can_select_rows(chain.call, reader):
            chain = _LayerChain(_selected_rows(chain.call, reader), reader.node)
            members.add(reader.node)
            reader = self._only_reader(chain.last, fused)
        if call.is_layer and reader is not None and reader.op == "add":
            left, right = reader.reads
            if left is not right:
                other = right if left is chain.last else left
                chain = replace(chain, last=reader.node, add=other)
                members.add(reader.node)
                reader = self._only_reader(chain.last, fused)
        if reader is not None and reader.act is not None:
            chain = replace(chain, last=reader.node, act=reader.act)
            members.add(reader.node)
        return chain, members

    def _selections(self, call: MatchedCall, fused: set[fx.Node]) -> tuple[_LayerChain, set[fx.Node]]:
        """A selection of channels with the selections that alone read its result, as one."""
        chain, members = _LayerChain(call, call.node), {call.node}
        reader = self._only_reader(chain.last, fused)
        while reader is not None and reader.channels is not None:
            chain = _LayerChain(_composed(chain.call, reader), reader.node)
            members.add(reader.node)
            reader = self._only_reader(chain.last, fused)
        return chain, members

    def _only_reader(self, node: fx.Node, fused: set[fx.Node]) -> MatchedCall | None:
        """The call that reads a value, if it is the only one. A recurrent call, which is known by
        one of its outputs, is none: nothing is fused with it."""
        if node in self.outputs or len(node.users) != 1:
            return None
        reader = next(iter(node.users))
        return None if reader in fused else self.calls.get(reader)

    def _append(self, chain: _LayerChain) -> None:
        """Append the step of a chain."""
        call, step = chain.call, chain.call.step
        reads = [self._value(source, call.kind) for source in call.reads]
        if step is None:
            self.values[chain.last] = reads[0]
            return
        if is_layer(step):
            weight, bias = self.store.layer(call)
            reads += [] if chain.add is None else [self._value(chain.add, call.kind)]
            step = replace(step, weight=weight, bias=bias, adds=chain.add is not None, name=name_of(self.editor, call))
        elif call.channels is not None:
            step = replace(step, index=self.store.channels(call.channels))
        elif step.op in CALLED:
            span = None if call.index is None else self.store.stored(call.index)
            step = replace(step, kind=call.makes, index=span)
        self.steps.append(replace(step, reads=tuple(reads), act=chain.act or step.act))
        self.values[chain.last] = len(self.inputs) + len(self.steps) - 1

    def _value(self, source: fx.Node, kind: str) -> int:
        """The number of a value, as a kind; a step makes it one of tokens or matrices."""
        if source in self.calls:
            value, own = self.values[source], self.calls[source].makes
        else:
            own = _kind_of_input(source, kind)
            value = self.inputs[source, own]
        if kind in (own, ANY):
            return value
        if (source, kind) not in self.converted:
            sizes = sizes_of_reshape(fake(source).shape, fake(source).shape)
            assert sizes is not None
            self.steps.append(call_step((value,), "reshape", kind, sizes))
            self.converted[source, kind] = len(self.inputs) + len(self.steps) - 1
        return self.converted[source, kind]


def _kind_of_input(source: fx.Node, kind: str) -> str:
    if kind in INPUTS:
        return kind
    return "image" if kind == ANY and fake(source).ndim == 4 else "tokens"


def _can_select_rows(layer: MatchedCall, reader: MatchedCall) -> bool:
    selection: Any = reader.step
    is_one_group = layer.op == "linear" or (is_conv(layer.step) and layer.step.fields.groups == 1)
    return is_one_group and lowering_of(selection) == SELECTION and selection.fields.stride == (1, 1)


def _selected_rows(layer: MatchedCall, selection: MatchedCall) -> MatchedCall:
    step, channels = layer.step, selection.channels
    assert step is not None and channels is not None
    if layer.channels is not None:
        channels = torch.where(channels < 0, -1, layer.channels[channels.clamp(min=0)])
    return replace(layer, channels=channels, step=replace(step, fields=step.fields._replace(out=len(channels))))


def _composed(first: MatchedCall, second: MatchedCall) -> MatchedCall:
    """Two selections of channels as one."""
    assert first.channels is not None and second.channels is not None
    assert first.step is not None and second.step is not None
    numbers = first.channels[second.channels.clamp(min=0)]
    numbers = torch.where(second.channels < 0, -1, numbers)
    rows, columns = (a * b for a, b in zip(first.step.fields.stride, second.step.fields.stride, strict=True))
    fields = Selection((rows, columns), bool((numbers < 0).any()))
    return replace(first, step=replace(first.step, fields=fields), channels=numbers)


def csr(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, row starts and columns (int32) of the nonzeros of a matrix."""
    is_nonzero = matrix != 0
    crow = torch.zeros(len(matrix) + 1, dtype=torch.int32)
    crow[1:] = is_nonzero.sum(1).cumsum(0)
    return matrix[is_nonzero], crow, is_nonzero.nonzero()[:, 1].to(torch.int32)


def _take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    result = tensor[rows.clamp(min=0)]
    result[rows < 0] = 0
    return result


class _WeightStore:
    """The weights of a segment, while they are collected: flat tensors, with layers as spans."""

    def __init__(self, editor: GraphEditor, precision: str | None):
        self.editor, self.precision = editor, precision
        self.parts: dict[int, list[Tensor]] = {VALUES: [], INDEX: [], NARROW: []}
        self.known: dict[Any, tuple[SparseWeight, Span | None]] = {}

    def layer(self, call: MatchedCall) -> tuple[SparseWeight, Span | None]:
        """The weight and bias of a layer; a layer that is called twice is stored once."""
        assert call.weight is not None
        bias = self.editor.tensor(call.bias) if call.affine is None else call.affine[1]
        # The name identifies the weight; groups determine its matrix.
        groups = call.step.fields.groups if is_conv(call.step) else 1
        bias_name = None if call.bias is None else call.bias.target
        rows = None if call.channels is None else tuple(call.channels.tolist())
        key = call.weight.target, bias_name, groups, rows
        if key not in self.known:
            weight = self.editor.tensor(call.weight)
            assert weight is not None
            own = matrix(call, weight)
            if call.channels is not None:
                own = _take_rows(own, call.channels)
                bias = None if bias is None else _take_rows(bias, call.channels)
            bias_span = None if bias is None else self._add_span(VALUES, bias)
            self.known[key] = self._matrix(own), bias_span
        return self.known[key]

    def channels(self, numbers: Tensor) -> Span:
        return self._add_span(INDEX, numbers.to(torch.int32))

    def stored(self, constants: Tensor) -> Span:
        is_factors = constants.is_floating_point()
        return self._add_span(VALUES, constants) if is_factors else self.channels(constants)

    def constants(self, reader: fx.Node) -> list[fx.Node]:
        """The tensors as constants of the graph."""
        constants = []
        for name, (number, parts) in zip(("values", "index", "narrow"), self.parts.items(), strict=True):
            if number == NARROW and not parts:
                break
            tensor = torch.cat(parts) if parts else torch.zeros(0)
            is_parameter = tensor.is_floating_point()
            constants.append(self.editor.add_constant(f"segment.{name}", tensor, reader, parameter=is_parameter))
        return constants

    def _matrix(self, matrix: Tensor) -> SparseWeight:
        """The spans of a matrix: in CSR, or of all values if at least half are nonzero."""
        if matrix.count_nonzero() >= DENSE_FROM * matrix.numel():
            return SparseWeight(self._add_span(VALUES, matrix.flatten()))
        values, crow, col = csr(matrix)
        spans = self._add_span(INDEX, crow), self._add_span(INDEX, col)
        if self.precision is None:
            return SparseWeight(self._add_span(VALUES, values), *spans)
        if self.precision == "bf16":
            return SparseWeight(self._add_span(NARROW, values.bfloat16()), *spans)
        scale = matrix.abs().amax(1) / NARROWEST
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        scaled = values / scale.repeat_interleave(crow.diff())
        narrow = self._add_span(NARROW, scaled.round().to(torch.int8))
        return SparseWeight(narrow, *spans, self._add_span(VALUES, scale))

    def _add_span(self, number: int, part: Tensor) -> Span:
        parts = self.parts[number]
        first = sum(previous.numel() for previous in parts)
        parts.append(part.detach())
        return number, first, first + part.numel()
