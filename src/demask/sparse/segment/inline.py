"""Segments as the ATen calls that they stand for, with dense weights: what other dtypes, devices,
files and libraries take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor, fx

from demask.compat.fake_tensors import FakeTensorMode
from demask.compat.tracing import make_fx
from demask.errors import BadInput
from demask.files.allowed_names import check_fqn
from demask.graph.editor import GraphEditor
from demask.graph.program import Program as Whole
from demask.ops import schema
from demask.ops.custom import Own
from demask.registry import CUSTOM_OPS
from demask.sparse import reference as dense
from demask.sparse.segment.build_segments import segments_of
from demask.sparse.segment_program import (
    MAX_SIZE,
    Add,
    Cat,
    ConvStep,
    LinearStep,
    PoolStep,
    SegmentProgram,
    SparseWeight,
    Step,
    reads,
)


def spelled(program: Whole) -> Whole:
    """The program without segments. Layers are called what they were called before.

    BadInput for a segment whose weights are computed, or whose inputs are of unknown width.
    """
    editor = GraphEditor(program)
    for node, inner in segments_of(editor.graph):
        made = _InlinedSegment(editor, node, inner).made()
        for user in list(node.users):
            one = made[inner.outputs[user.args[1]]]  # type: ignore[index]
            editor.replace(user, one, inherit=True)
        editor.graph.erase_node(node)
    return editor.finish()


def run(inputs: Sequence[Tensor], weights: Sequence[Tensor], program: str) -> list[Tensor]:
    """What the op makes, by ATen ops."""
    return dense.run(SegmentProgram.parse(program), inputs, weights)


def check(found: Mapping[str, Any]) -> None:
    """BadInput for a call of the op that no inputs could make good."""
    program = SegmentProgram.parse(found["program"])
    if len(found["inputs"]) != len(program.inputs):
        raise BadInput(f"expected {len(program.inputs)} inputs, got {len(found['inputs'])}")
    weights = found["weights"]
    for step in program.steps:
        if not isinstance(step, (ConvStep, LinearStep)):
            continue
        _name(step)
        if any(w is None for w in weights):
            continue  # computed: they are checked when the op is called
        dense.matrix(step.weight, weights, MAX_SIZE)
        for span in (step.bias, step.weight.scale):
            if span is not None:
                dense.part(span, weights)


CUSTOM_OPS.register("segment", Own(run, spelled, check))


class _InlinedSegment:
    """One segment on the way into ATen calls."""

    def __init__(self, editor: GraphEditor, node: fx.Node, program: SegmentProgram):
        found = schema.arguments(node)
        self.editor, self.node, self.program = editor, node, program
        self.values: list[fx.Node] = list(found["inputs"])
        self.channels = [_channels(x, k) for x, k in zip(self.values, program.inputs, strict=True)]
        weights = [editor.tensor(weight) for weight in found["weights"]]
        if any(weight is None for weight in weights):
            raise BadInput(f"{node.name}: expected weights that are constants")
        self.weights: list[Any] = weights
        floats = [w.dtype for w in self.weights if w.is_floating_point()]
        self.dtype = reduce(torch.promote_types, floats)
        self.layers: dict[Any, list[fx.Node]] = {}

    def made(self) -> list[fx.Node]:
        """The nodes of all values."""
        for step in self.program.steps:
            kind = self.program.kinds[reads(step)[0]]
            channels = [self.channels[value] for value in reads(step)]
            operands = [self.values[value] for value in reads(step)]
            if isinstance(step, (ConvStep, LinearStep)):
                operands += self._layer(step, kind, channels[0])
            self.values.append(self._inlined(_calls(step, kind), operands))
            wide = sum(channels) if isinstance(step, Cat) else getattr(step, "out", channels[0])
            self.channels.append(wide)
        return self.values

    def _layer(self, step: ConvStep | LinearStep, kind: str, channels: int) -> list[fx.Node]:
        """The weight of a layer, and its bias if it has one; one for layers that share them."""
        shape = _shape(step, kind, channels)
        key = step.weight, step.bias, channels, getattr(step, "groups", 1)
        if key not in self.layers:
            found = {"weight": dense.weight(step, self.weights, shape, self.dtype)}
            bias = dense.bias(step, self.weights)
            if bias is not None:
                found["bias"] = bias.to(self.dtype)
            self.layers[key] = [
                self.editor.add_constant(f"{_name(step)}.{leaf}", tensor, self.node, parameter=True)
                for leaf, tensor in found.items()
            ]
        return self.layers[key]

    def _inlined(self, graph: fx.Graph, operands: Sequence[fx.Node]) -> fx.Node:
        """The calls of a graph on these operands, in front of the segment."""
        places = [n for n in graph.nodes if n.op == "placeholder"]
        mapping: dict[fx.Node, fx.Node] = dict(zip(places, operands, strict=True))
        with self.editor.graph.inserting_before(self.node):
            made: Any = self.editor.graph.graph_copy(graph, mapping)
        for old in graph.nodes:
            if old.op == "call_function":
                node = mapping[old]
                node.meta = {}
                if all("val" in source.meta for source in node.all_input_nodes):
                    self.editor.set_value(node)
        return made


def _name(step: ConvStep | LinearStep) -> str:
    """What the module of a layer is called. RefusedFile for a name that would be code in the source
    that torch.fx writes: programs come from files too."""
    return check_fqn(step.name or "segment")


def _channels(node: fx.Node, kind: str) -> int:
    """How wide a value is, as its graph or its file says."""
    value = node.meta.get("val", node.meta.get("value"))
    sizes = value.shape if isinstance(value, Tensor) else getattr(value, "sizes", ())
    axis = -1 if kind == "tokens" else 1
    size = sizes[axis] if len(sizes) > (1 if axis == 1 else 0) else None
    if not isinstance(size, int):
        raise BadInput(f"{node.name}: expected a value with a fixed number of channels")
    return size


def _shape(step: Step, kind: str, channels: int) -> tuple[int, ...]:
    """A shape that a step takes."""
    if kind == "tokens":
        return (2, channels)
    sizes = [1, 1]
    if isinstance(step, (ConvStep, PoolStep)):
        pads = step.padding if isinstance(step, ConvStep) else ((0, 0), (0, 0))
        sizes = [d * (k - 1) + 1 + sum(p)
                 for k, d, p in zip(step.kernel, step.dilation, pads, strict=True)]  # fmt: skip
    return (2, channels, *(sizes[1:] if kind == "signal" else sizes))


def _calls(step: Step, kind: str) -> fx.Graph:
    """The ATen calls of a step: of its operands, then its weight and bias."""
    if isinstance(step, (ConvStep, LinearStep)):
        out = step.groups if isinstance(step, ConvStep) else 1
        nothing, row = (0, 0, 0), (0, 0, out)
        step = replace(step, x=0, out=out, weight=SparseWeight(nothing, (0, 0, out + 1), nothing),
                       bias=None if step.bias is None else row, name="",
                       add=None if step.add is None else 0)  # fmt: skip
    elif isinstance(step, Cat):
        step = Cat((0,) * len(step.xs))
    else:
        step = replace(step, x=0, **({"z": 0} if isinstance(step, Add) else {}))
    return _traced(step, kind)


@cache
def _traced(step: Step, kind: str) -> fx.Graph:
    """The calls of a step of the fewest channels: which they are does not depend on sizes."""
    channels = step.groups if isinstance(step, ConvStep) else 1
    shapes = [_shape(step, kind, channels)] * len(reads(step))
    layer = isinstance(step, (ConvStep, LinearStep))
    if layer and step.add is not None:
        shapes[1] = SegmentProgram((kind,), (replace(step, add=None),), (1,)).shapes(shapes[:1])[1]

    def run(*tensors: Tensor) -> Tensor:
        return dense.call(step, kind, tensors[: len(shapes)], *tensors[len(shapes) :])

    with FakeTensorMode(), torch.no_grad():
        fakes = [torch.empty(shape) for shape in shapes]
        if layer:
            fakes.append(torch.empty(_weight_shape(step, kind)))
            fakes += [torch.empty(step.out)] * (step.bias is not None)
        return make_fx(run, pre_dispatch=True)(*fakes).graph


def _weight_shape(step: ConvStep | LinearStep, kind: str) -> tuple[int, ...]:
    """The shape of the weight of a layer with as few channels as it has groups."""
    kernel = () if isinstance(step, LinearStep) else step.kernel[1 if kind == "signal" else 0 :]
    return step.out, 1, *kernel
