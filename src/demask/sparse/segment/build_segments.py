"""Layers whose weights are mostly zeros become calls of `demask::segment`, with what lies between.

    fc2(gelu(fc1(x))) == segment([x], [values, index], program)

One call stands for a whole region of a graph (`sparse.regions`): what passes from layer to layer
then stays in the order that the kernels like, and activations and sums are computed as they store.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

import demask.sparse.segment.segment_op  # noqa: F401  (registers the op that graphs call)
from demask.graph.editor import GraphEditor
from demask.graph.program import Program as Whole
from demask.ops import schema
from demask.ops.activations import Act
from demask.sparse.segment.convex_groups import SegmentRegion, Wanted, regions
from demask.sparse.segment.match_calls import MatchedCall, matrix
from demask.sparse.segment_program import (
    Add,
    Cat,
    ConvStep,
    LinearStep,
    SegmentProgram,
    Span,
    SparseWeight,
    Step,
    canonical,
)

SEGMENT = torch.ops.demask.segment.default
VALUES, INDEX, NARROW = 0, 1, 2  # the weight tensors of a segment
NARROWEST = 127  # of int8; -128 would have no counterpart
aten = torch.ops.aten


def segmented(
    program: Whole, core: Wanted, allowed: Wanted, *, dtype: torch.dtype = torch.float32,
    precision: str | None = None,
) -> Whole:  # fmt: skip
    """The program with its regions of sparse layers as segments.

    core: is a layer worth a segment? allowed: may another layer lie between such ones? dtype: of
    the values that segments take. precision: how weights are stored: "bf16", "int8" (with a scale
    per row), None for as they are.
    """
    editor = GraphEditor(program)
    _read_off_inputs(editor)
    for node in editor.calls(aten.dropout.default):
        found = schema.arguments(node)
        if not found["train"]:  # between a layer and what is added to it, often
            editor.replace(node, found["input"])
    made: dict[fx.Node, fx.Node] = {}  # what stands for values that were made in a region
    for region in regions(editor, dtype, core, allowed):
        made |= _replaced(editor, region, made, precision)
    _in_order(editor.graph)
    return editor.finish()


def name_of(editor: GraphEditor, call: MatchedCall) -> str:
    """A layer by the module that holds its weight."""
    return editor.constants[str(call.weight.target)].name.rpartition(".")[0]  # type: ignore[union-attr]


def segments_of(graph: fx.Graph) -> list[tuple[fx.Node, SegmentProgram]]:
    """The segments of a graph, each with its program."""
    return [(node, SegmentProgram.parse(schema.arguments(node)["program"]))
            for node in graph.nodes if node.target is SEGMENT]  # fmt: skip


@dataclass(frozen=True, slots=True)
class SegmentLayer:
    """A layer of a segment: its name, how many weights are stored of how many there are, and the
    multiplications of one call."""

    name: str
    stored: int
    weights: int
    products: int


def layers(program: SegmentProgram, shapes: Sequence[Sequence[int]]) -> list[SegmentLayer]:
    """The layers of a segment that is called on inputs of these shapes."""
    sizes, found = program.shapes(shapes), []
    for step, made in zip(program.steps, sizes[len(program.inputs) :], strict=True):
        if not isinstance(step, (ConvStep, LinearStep)):
            continue
        kind, (_, first, end) = program.kinds[step.x], step.weight.values
        transposed = isinstance(step, ConvStep) and step.transposed
        batch, _, height, width = canonical(kind, sizes[step.x] if transposed else made)
        columns = canonical(kind, sizes[step.x])[1]
        if isinstance(step, ConvStep):
            columns = columns // step.groups * step.kernel[0] * step.kernel[1]
        pixels = batch * height * width
        found.append(
            SegmentLayer(step.name, end - first, step.out * columns, (end - first) * pixels)
        )
    return found


def layers_of(graph: fx.Graph) -> list[SegmentLayer]:
    """The layers of all segments of a graph, on the sizes it was captured with."""
    found = []
    for node, program in segments_of(graph):
        inputs = schema.arguments(node)["inputs"]
        found += layers(program, [list(map(schema.hint, x.meta["val"].shape)) for x in inputs])
    return found


def _read_off_inputs(editor: GraphEditor) -> None:
    """Let dynamic sizes be read off the inputs where they can: who reads them off a value within a
    segment would need that value."""
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


def _replaced(
    editor: GraphEditor,
    region: SegmentRegion,
    known: Mapping[fx.Node, fx.Node],
    precision: str | None,
) -> dict[fx.Node, fx.Node]:
    """Put the call of a segment in the place of a region: its values by those they replace."""
    nodes = region.nodes
    outputs = [c.node for c in region.calls if any(user not in nodes for user in c.node.users)]
    steps = _Steps(editor, region.calls, set(outputs), _Store(editor, precision))
    program, reader = steps.program(outputs), region.calls[-1].node.next
    weights = steps.store.constants(reader)
    inputs = [known.get(source, source) for source, _ in steps.inputs]
    segment = editor.insert(reader, outputs[0], SEGMENT, inputs, weights, program.text())
    segment.meta = {"val": [node.meta["val"] for node in outputs]}
    made = {node: editor.insert(reader, node, operator.getitem, segment, place)
            for place, node in enumerate(outputs)}  # fmt: skip
    for node, one in made.items():
        node.replace_all_uses_with(one, lambda user: user not in nodes)
    for call in reversed(region.calls):
        editor.graph.erase_node(call.node)
    return made


def _in_order(graph: fx.Graph) -> None:
    """Let every node stand behind those it reads, else in the order as it is. CycleError where
    regions were not convex."""
    place = {node: k for k, node in enumerate(graph.nodes)}
    sorter = TopologicalSorter({node: node.all_input_nodes for node in graph.nodes})
    sorter.prepare()
    ready: list[tuple[int, fx.Node]] = []
    order: list[fx.Node] = []
    while sorter.is_active():
        for node in sorter.get_ready():
            heappush(ready, (place[node], node))
        order.append(heappop(ready)[1])
        sorter.done(order[-1])
    for before, node in pairwise(order):
        if before.next is not node:
            before.append(node)


# ------------------------------------------------------------------------------------- one segment


@dataclass(frozen=True, slots=True)
class _LayerChain:
    """A call with what is computed as it stores: what is added, the activation; the last of them
    makes the value."""

    call: MatchedCall
    last: fx.Node
    add: fx.Node | None = None
    act: Act | None = None


class _Steps:
    """The steps of a region while they are gathered."""

    def __init__(
        self,
        editor: GraphEditor,
        calls: Sequence[MatchedCall],
        outputs: Collection[fx.Node],
        store: _Store,
    ):
        self.editor, self.store, self.outputs = editor, store, outputs
        self.calls = {call.node: call for call in calls}
        places = ((s, c.kind) for c in calls for s in c.reads if s not in self.calls)
        self.inputs = {place: number for number, place in enumerate(dict.fromkeys(places))}
        self.steps: list[Step] = []
        self.values: dict[fx.Node, int] = {}

    def program(self, outputs: Sequence[fx.Node]) -> SegmentProgram:
        """The program that makes these values."""
        for chain in self._chains():
            self._append(chain)
        ends = tuple(self.values[node] for node in outputs)
        return SegmentProgram(tuple(kind for _, kind in self.inputs), tuple(self.steps), ends)

    def _chains(self) -> list[_LayerChain]:
        """The calls, in the order of the last of each chain. Of two layers that are added, the
        later one adds."""
        found: dict[fx.Node, _LayerChain] = {}
        taken: set[fx.Node] = set()
        layers = [call for call in reversed(self.calls.values()) if call.is_layer]
        sums = [call for call in self.calls.values() if isinstance(call.step, Add)]
        for call in [*layers, *sums]:
            if call.node not in taken:
                chain, members = self._chain(call, taken)
                found[chain.last] = chain
                taken |= members
        rest = {
            node: _LayerChain(call, node) for node, call in self.calls.items() if node not in taken
        }
        found |= rest
        return [found[node] for node in self.calls if node in found]

    def _chain(self, call: MatchedCall, taken: set[fx.Node]) -> tuple[_LayerChain, set[fx.Node]]:
        """A layer or a sum, and all that can be computed with it."""
        chain, members = _LayerChain(call, call.node), {call.node}
        reader = self._reader(chain.last, taken)
        if call.is_layer and reader is not None and isinstance(reader.step, Add):
            left, right = reader.reads
            if left is not right:
                other = right if left is call.node else left
                chain = replace(chain, last=reader.node, add=other)
                members.add(reader.node)
                reader = self._reader(chain.last, taken)
        if reader is not None and reader.act is not None:
            chain = replace(chain, last=reader.node, act=reader.act)
            members.add(reader.node)
        return chain, members

    def _reader(self, node: fx.Node, taken: set[fx.Node]) -> MatchedCall | None:
        """The one call that reads a value, if nobody else does."""
        if node in self.outputs or len(node.users) != 1:
            return None
        reader = next(iter(node.users))
        return None if reader in taken else self.calls[reader]

    def _append(self, chain: _LayerChain) -> None:
        call, step = chain.call, chain.call.step
        reads = [self._value(source, call.kind) for source in call.reads]
        if step is None:
            self.values[chain.last] = reads[0]
            return
        if isinstance(step, (ConvStep, LinearStep)):
            weight, bias = self.store.layer(call)
            add = None if chain.add is None else self._value(chain.add, call.kind)
            step = replace(step, x=reads[0], weight=weight, bias=bias, act=chain.act, add=add,
                           name=name_of(self.editor, call))  # fmt: skip
        elif isinstance(step, Add):
            step = replace(step, x=reads[0], z=reads[1], act=chain.act)
        elif isinstance(step, Cat):
            step = replace(step, xs=tuple(reads))
        else:
            step = replace(step, x=reads[0])
        self.steps.append(step)
        self.values[chain.last] = len(self.inputs) + len(self.steps) - 1

    def _value(self, source: fx.Node, kind: str) -> int:
        return self.values[source] if source in self.calls else self.inputs[source, kind]


def csr(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, row starts and columns (int32) of the numbers in a matrix that are not 0."""
    here = matrix != 0
    crow = torch.zeros(len(matrix) + 1, dtype=torch.int32)
    crow[1:] = here.sum(1).cumsum(0)
    return matrix[here], crow, here.nonzero()[:, 1].to(torch.int32)


class _Store:
    """The weights of a segment while they are gathered: flat tensors, of which layers are spans."""

    def __init__(self, editor: GraphEditor, precision: str | None):
        self.editor, self.precision = editor, precision
        self.parts: dict[int, list[Tensor]] = {VALUES: [], INDEX: [], NARROW: []}
        self.known: dict[Any, tuple[SparseWeight, Span | None]] = {}

    def layer(self, call: MatchedCall) -> tuple[SparseWeight, Span | None]:
        """The weight and bias of a layer; one that is called twice is stored once."""
        assert call.weight is not None
        bias = self.editor.tensor(call.bias)
        # The name of a weight in the graph says which one it is, its groups how it is cut.
        groups = call.step.groups if isinstance(call.step, ConvStep) else 1
        key = call.weight.target, None if call.bias is None else call.bias.target, groups
        if key not in self.known:
            weight = self.editor.tensor(call.weight)
            assert weight is not None
            held = None if bias is None else self._held(VALUES, bias)
            self.known[key] = self._matrix(matrix(call, weight)), held
        return self.known[key]

    def constants(self, reader: fx.Node) -> list[fx.Node]:
        """The tensors as constants of the graph."""
        found = []
        for name, (place, parts) in zip(("values", "index", "narrow"), self.parts.items(),
                                        strict=True):  # fmt: skip
            if place == NARROW and not parts:
                break
            whole = torch.cat(parts) if parts else torch.zeros(0)
            parameter = whole.is_floating_point()
            found.append(
                self.editor.add_constant(f"segment.{name}", whole, reader, parameter=parameter)
            )
        return found

    def _matrix(self, matrix: Tensor) -> SparseWeight:
        """A matrix in CSR."""
        values, crow, col = csr(matrix)
        spans = self._held(INDEX, crow), self._held(INDEX, col)
        if self.precision is None:
            return SparseWeight(self._held(VALUES, values), *spans)
        if self.precision == "bf16":
            return SparseWeight(self._held(NARROW, values.bfloat16()), *spans)
        scale = matrix.abs().amax(1) / NARROWEST
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        whole = values / scale.repeat_interleave(crow.diff())
        narrow = self._held(NARROW, whole.round().to(torch.int8))
        return SparseWeight(narrow, *spans, self._held(VALUES, scale))

    def _held(self, place: int, part: Tensor) -> Span:
        parts = self.parts[place]
        first = sum(held.numel() for held in parts)
        parts.append(part.detach())
        return place, first, first + part.numel()
