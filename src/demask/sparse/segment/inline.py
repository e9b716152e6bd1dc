"""Segments as equivalent ATen calls with dense weights, for other dtypes, devices and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.proxy import GraphAppendingTracer
from torch.utils import _pytree as pytree

from demask.compat.fake_tensors import FakeTensorMode
from demask.compat.tracing import make_fx
from demask.errors import BadInput
from demask.files.allowed_names import check_fqn
from demask.graph.editor import GraphEditor
from demask.graph.program import Program as Whole
from demask.ops import schema
from demask.ops.custom import CustomOp
from demask.registry import CUSTOM_OPS
from demask.sparse import reference as dense
from demask.sparse.calls.called_op import POSITIONS, CalledOp
from demask.sparse.segment.build_segments import segments_of
from demask.sparse.segment.segment_call import bound
from demask.sparse.segment_calls import CALLED
from demask.sparse.segment_program import SegmentProgram
from demask.sparse.segment_steps import (
    CHANNELS_LAST,
    MAX_SIZE,
    RANKS,
    AddStep,
    CallStep,
    ConcatStep,
    ConvStep,
    LinearStep,
    PoolStep,
    ScaleStep,
    SelectStep,
    SparseWeight,
    Step,
    channel_axis,
    reads,
)

UNKNOWN = (512, 1024)  # examples of sizes that are known at run time only


def inlined(program: Whole) -> Whole:
    """The program with segments replaced by ATen calls. Layers have their original names.

    Raises BadInput for a segment with computed weights, or with inputs of unknown width.
    """
    editor = GraphEditor(program)
    for node, inner in segments_of(editor.graph):
        values = _InlinedSegment(editor, node, inner).nodes()
        for user in list(node.users):
            output = values[inner.outputs[user.args[1]]]  # type: ignore[index]
            editor.replace(user, output, inherit=True)
        editor.graph.erase_node(node)
    return editor.finish()


def run(inputs: Sequence[Tensor], weights: Sequence[Tensor], program: str) -> list[Tensor]:
    """The outputs of the op, computed by ATen ops."""
    return dense.run(SegmentProgram.parse(program), inputs, weights)


def check(arguments: Mapping[str, Any]) -> None:
    """Raise BadInput for a call of the op that is invalid for all inputs."""
    program = SegmentProgram.parse(arguments["program"])
    if len(arguments["inputs"]) != len(program.inputs):
        raise BadInput(f"expected {len(program.inputs)} inputs, got {len(arguments['inputs'])}")
    weights = arguments["weights"]
    for step in program.steps:
        if isinstance(step, SelectStep) and not any(w is None for w in weights):
            dense.index(step, MAX_SIZE, weights)
        if isinstance(step, CallStep):
            _name(step)
        if isinstance(step, CallStep) and step.index and not any(w is None for w in weights):
            dense.call_constants(step, weights, torch.float32)
        if not isinstance(step, (ConvStep, LinearStep)):
            continue
        _name(step)
        if any(w is None for w in weights):
            continue  # computed weights are checked when the op is called
        if step.weight.csr is None:
            dense.dense_values(step.weight, weights)
        else:
            dense.matrix(step.weight, weights, MAX_SIZE)
        for span in (step.bias, step.weight.scale):
            if span is not None:
                dense.part(span, weights)


CUSTOM_OPS.register("segment", CustomOp(run, inlined, check, bound))


class _InlinedSegment:
    """One segment, while it is converted to ATen calls."""

    def __init__(self, editor: GraphEditor, node: fx.Node, program: SegmentProgram):
        arguments = schema.arguments(node)
        self.editor, self.node, self.program = editor, node, program
        self.values: list[fx.Node] = list(arguments["inputs"])
        # Of each value; None where it is known at run time only.
        self.channels: list[Any] = [_channels(x, k) for x, k in zip(self.values, program.inputs, strict=True)]
        weights = [editor.tensor(weight) for weight in arguments["weights"]]
        if any(weight is None for weight in weights):
            raise BadInput(f"{node.name}: expected weights that are constants")
        self.weights: list[Any] = weights
        floats = [w.dtype for w in self.weights if w.is_floating_point()]
        self.dtype = reduce(torch.promote_types, floats)
        self.layers: dict[Any, list[fx.Node]] = {}

    def nodes(self) -> list[fx.Node]:
        """The nodes of all values."""
        for step in self.program.steps:
            kind = self.program.kinds[reads(step)[0]]
            channels = [self.channels[value] for value in reads(step)]
            operands = [self.values[value] for value in reads(step)]
            if isinstance(step, CallStep):
                self._call(step, operands)
                continue
            if any(width is None for width in channels):
                raise BadInput(f"{self.node.name}: expected values with a fixed number of channels")
            if isinstance(step, (ConvStep, LinearStep)):
                operands += self._layer(step, kind, channels[0])
            elif isinstance(step, SelectStep):
                numbers = dense.index(step, channels[0], self.weights)
                operands.append(self.editor.add_constant("segment.channels", numbers, self.node))
            self.values.append(self._inlined(_calls(step, kind), operands))
            width = sum(channels) if isinstance(step, ConcatStep) else getattr(step, "out", channels[0])
            self.channels.append(width)
        return self.values

    def _call(self, step: CallStep, operands: list[fx.Node]) -> None:
        """Append the call of a step that calls one op."""
        entry = CALLED[step.call]
        stored = dense.call_constants(step, self.weights, self.dtype)
        parts = entry.split(stored, self.channels[step.xs[0]], step.numbers)
        constants = [
            self.editor.add_constant(name, part, self.node, parameter=entry.constants != POSITIONS)
            for name, part in zip(entry.names_of_constants(_name(step)), parts, strict=False)
        ]
        node = self._called(entry, entry.arguments(operands, step.numbers, constants))
        self.channels.append(self._width(len(self.values), step.kind))
        self.values.append(node)

    def _called(self, entry: CalledOp, arguments: tuple[Any, ...]) -> fx.Node:
        """The node of the result of an op, or of a function of several ops."""
        last, graph = self.node.prev, self.editor.graph
        with graph.inserting_before(self.node):
            tracer = GraphAppendingTracer(graph)
            result = entry.op(*pytree.tree_map_only(fx.Node, lambda node: fx.Proxy(node, tracer), arguments))
        while last.next is not self.node:
            last = last.next
            if all("val" in source.meta for source in last.all_input_nodes):
                self.editor.set_value(last)
        return result.node

    def _width(self, value: int, kind: str) -> int | None:
        """The channels of a value; None where they depend on sizes that are known at run time
        only, as those of a column of tokens do."""
        widths = set()
        for other in UNKNOWN:
            shapes = [
                [n if isinstance(n, int) else other for n in _sizes(x)] for x in self.values[: len(self.program.inputs)]
            ]
            widths.add(self.program.shapes(shapes)[value][channel_axis(kind)])
        return None if len(widths) > 1 else int(widths.pop())

    def _layer(self, step: ConvStep | LinearStep, kind: str, channels: int) -> list[fx.Node]:
        """The weight of a layer, and its bias if there is one; shared by layers with the same
        weights.
        """
        shape = _shape(step, kind, channels)
        key = step.weight, step.bias, channels, getattr(step, "groups", 1)
        if key not in self.layers:
            tensors = {"weight": dense.weight(step, self.weights, shape, self.dtype)}
            bias = dense.bias(step, self.weights)
            if bias is not None:
                tensors["bias"] = bias.to(self.dtype)
            self.layers[key] = [
                self.editor.add_constant(f"{_name(step)}.{attribute}", tensor, self.node, parameter=True)
                for attribute, tensor in tensors.items()
            ]
        return self.layers[key]

    def _inlined(self, graph: fx.Graph, operands: Sequence[fx.Node]) -> fx.Node:
        """Copy the calls of a graph to before the segment; returns the output node."""
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        mapping: dict[fx.Node, fx.Node] = dict(zip(placeholders, operands, strict=True))
        with self.editor.graph.inserting_before(self.node):
            output: Any = self.editor.graph.graph_copy(graph, mapping)
        for old in graph.nodes:
            if old.op == "call_function":
                node = mapping[old]
                node.meta = {}
                if all("val" in source.meta for source in node.all_input_nodes):
                    self.editor.set_value(node)
        return output


def _name(step: ConvStep | LinearStep | CallStep) -> str:
    """The name of the module of a layer or norm.

    Raises RefusedFile for a name that would be code in the source generated by torch.fx, as
    programs may come from files.
    """
    return check_fqn(step.name or "segment")


def _channels(node: fx.Node, kind: str) -> int:
    """The number of channels of a value, from its graph or file."""
    sizes = _sizes(node)
    axis = channel_axis(kind)
    size = sizes[axis] if len(sizes) > (1 if axis == 1 else 0) else None
    if not isinstance(size, int):
        raise BadInput(f"{node.name}: expected a value with a fixed number of channels")
    return size


def _sizes(node: fx.Node) -> Sequence[Any]:
    """The sizes of a value; those known at run time only are no integers."""
    value = node.meta.get("val", node.meta.get("value"))
    return value.shape if isinstance(value, Tensor) else getattr(value, "sizes", ())


def _shape(step: Step, kind: str, channels: int) -> tuple[int, ...]:
    """An example shape of an operand of a step."""
    if kind in CHANNELS_LAST:
        return (1,) * ((RANKS[kind] or 2) - 2) + (2, channels)
    sizes = [1, 1]
    if isinstance(step, (ConvStep, PoolStep)):
        pads = step.padding if isinstance(step, ConvStep) else ((0, 0), (0, 0))
        sizes = [d * (k - 1) + 1 + sum(p) for k, d, p in zip(step.kernel, step.dilation, pads, strict=True)]
    return (2, channels, *(sizes[1:] if kind == "signal" else sizes))


def _calls(step: Step, kind: str) -> fx.Graph:
    """The ATen calls of a step, a function of its operands, weight and bias."""
    if isinstance(step, (ConvStep, LinearStep)):
        out = step.groups if isinstance(step, ConvStep) else 1
        empty, bias_span = (0, 0, 0), (0, 0, out)
        step = replace(
            step,
            x=0,
            out=out,
            weight=SparseWeight(empty, (0, 0, out + 1), empty),
            bias=None if step.bias is None else bias_span,
            name="",
            add=None if step.add is None else 0,
        )
    elif isinstance(step, ConcatStep):
        step = ConcatStep((0,) * len(step.xs))
    elif isinstance(step, SelectStep):
        step = replace(step, x=0, index=(0, 0, 1))
    else:
        step = replace(step, x=0, **({"z": 0} if isinstance(step, (AddStep, ScaleStep)) else {}))
    return _traced(step, kind)


@cache
def _traced(step: Step, kind: str) -> fx.Graph:
    """The calls of a step with the fewest channels; they do not depend on sizes."""
    channels = step.groups if isinstance(step, ConvStep) else 1
    shapes = [_shape(step, kind, channels)] * len(reads(step))
    is_layer = isinstance(step, (ConvStep, LinearStep))
    if is_layer and step.add is not None:
        shapes[1] = SegmentProgram((kind,), (replace(step, add=None),), (1,)).shapes(shapes[:1])[1]

    def run(*tensors: Tensor) -> Tensor:
        return dense.call(step, kind, tensors[: len(shapes)], *tensors[len(shapes) :])

    with FakeTensorMode(), torch.no_grad():
        fakes = [torch.empty(shape) for shape in shapes]
        if is_layer:
            fakes.append(torch.empty(_weight_shape(step, kind)))
            fakes += [torch.empty(step.out)] * (step.bias is not None)
        elif isinstance(step, SelectStep):
            fakes.append(torch.zeros(1, dtype=torch.int32))
        return make_fx(run, pre_dispatch=True)(*fakes).graph


def _weight_shape(step: ConvStep | LinearStep, kind: str) -> tuple[int, ...]:
    """The weight shape of a layer with one channel per group."""
    kernel = () if isinstance(step, LinearStep) else step.kernel[1 if kind == "signal" else 0 :]
    return step.out, 1, *kernel
