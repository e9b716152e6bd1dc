"""Segments as equivalent ATen calls with dense weights, for other dtypes, devices and files.

Calls of a segment without torch's dispatcher, in the code that optimized networks run.

A call of the op converts its lists of tensors and the text of the program from Python to C++ and
back, and looks up the plans by the memory of the weights. A bound function has the program, and
remembers the plan of the last call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor, float32, fx, get_num_threads, strided
from torch.fx.proxy import GraphAppendingTracer
from torch.utils import _pytree as pytree

from demask.compat.dispatch import (
    OWN_TYPES,
    count_dispatch_modes,
    count_function_modes,
    has_functorch_transforms,
    tracing_state,
)
from demask.compat.fake_tensors import FakeTensorMode
from demask.compat.tracing import make_fx
from demask.errors import BadInput
from demask.exec.steps import reference
from demask.exec.steps import segment_weights as stored
from demask.exec.steps.called_op import POSITIONS, CalledOp
from demask.exec.steps.segment_calls import CALLED
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_rows import call, row_of
from demask.exec.steps.segment_steps import (
    CHANNELS_LAST,
    RANKS,
    AnyStep,
    Layer,
    Numbers,
    SparseWeight,
    Step,
    channel_axis,
    is_conv,
    is_layer,
)
from demask.files.allowed_names import check_fqn
from demask.graph.editor import GraphEditor
from demask.graph.program import Program as FullProgram
from demask.kernels.llvm.availability import NoPlan
from demask.kernels.plan_cache import VERSION, plans_of
from demask.ops import schema
from demask.ops.custom import CustomOp
from demask.registry import CUSTOM_OPS
from demask.sparse.segment.build_segments import segments_of
from demask.sparse.segment.segment_op import SegmentPlans

segment = torch.ops.demask.segment.default
ADDRESS = Tensor.data_ptr


class _KnownCall:
    """A plan for certain weights and for inputs of certain sizes. It keeps neither alive: caches of
    plans end with their weights.

    Weights are recognized by their numbers in Python, which are theirs as long as they live, their
    addresses and versions: all are compared without a loop of Python, as a network may have
    hundreds. So little is done here because kernels leave nothing of this code in the caches.
    """

    __slots__ = ("addresses", "are_alive", "count", "ends", "numbers", "plan", "probe", "sizes", "threads", "versions")

    def __init__(self, plans: SegmentPlans, inputs: Sequence[Tensor], weights: Sequence[Tensor]):
        """Raises KeyError if there is no plan for the inputs as they are."""
        key = plans.key(inputs, weights)
        plan, copied = plans.plans[key]
        if plan is None or copied or plans.probe is None or any(w.is_inference() for w in weights):
            raise KeyError
        self.plan, self.probe = weakref.ref(plan), plans.probe
        self.numbers, self.addresses = list(map(id, weights)), list(map(ADDRESS, weights))
        self.versions = list(key[0][:-1])  # those of the plan, whatever is written meanwhile
        self.count, self.threads = len(inputs), torch.get_num_threads()
        self.sizes = [(k, inputs[k].shape, inputs[k].stride()) for k in plans.dynamic]
        self.are_alive = True
        self.ends = [weakref.ref(weight, self._forget) for weight in weights]

    def _forget(self, _: object) -> None:
        self.are_alive = False

    def outputs(self, inputs: list[Tensor], weights: list[Tensor]) -> list[Tensor] | None:
        """The outputs by the plan; None if it is not for these tensors, or weights have changed.

        Plans check that static inputs are the tensors that they have converted.
        """
        if not self.are_alive or list(map(id, weights)) != self.numbers:
            return None
        if list(map(ADDRESS, weights)) != self.addresses:
            return None
        if list(map(VERSION, weights)) != self.versions or get_num_threads() != self.threads:
            return None
        for k, shape, stride in self.sizes:
            x = inputs[k]
            if type(x) not in OWN_TYPES or not x.is_cpu or x.layout is not strided:
                return None
            if x.shape != shape or x.stride() != stride or x.dtype is not float32:
                return None
        plan = self.plan()
        if plan is None or len(inputs) != self.count or not self.probe.same():
            return None
        try:
            return plan(inputs)
        except NoPlan:  # no memory for a call now
            return None


def bound(arguments: Mapping[str, Any]) -> tuple[Callable[..., list[Tensor]], tuple[Any, ...]]:
    """A function that equals the op for the program in `arguments` (by name), and its arguments:
    inputs and weights. Several threads may call it at once."""
    text: str = arguments["program"]
    last: _KnownCall | None = None

    def bound_segment(inputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
        nonlocal last
        if not _is_plain_call():
            return segment(inputs, weights, text)
        known = last
        if known is not None and (outputs := known.outputs(inputs, weights)) is not None:
            return outputs
        if not _are_plain(inputs) or not _are_plain(weights):
            return segment(inputs, weights, text)
        plans = plans_of(weights, text, SegmentPlans)
        outputs = plans.run(inputs, weights)
        with suppress(KeyError):
            last = _KnownCall(plans, inputs, weights)
        return outputs

    return bound_segment, (arguments["inputs"], arguments["weights"])


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are dense ones of torch on the CPU."""
    for tensor in tensors:
        if type(tensor) not in OWN_TYPES or not tensor.is_cpu or tensor.layout is not torch.strided:
            return False
    return True


def _is_plain_call() -> bool:
    """Whether the op would do no more with plain tensors now than run a plan."""
    if torch.is_grad_enabled() or count_dispatch_modes() or count_function_modes():
        return False
    return not has_functorch_transforms() and tracing_state() is None


UNKNOWN = (5040, 10080)  # examples of sizes that are known at run time only, which views may divide by up to 10


def inlined(program: FullProgram) -> FullProgram:
    """The program with segments replaced by ATen calls. Layers have their original names.

    Raises BadInput for a segment with computed weights, or with inputs of unknown width.
    """
    editor = GraphEditor(program)
    for node, inner in segments_of(editor.graph):
        values = _InlinedSegment(editor, node, inner).nodes()
        for user in list(node.users):
            output = values[inner.outputs[schema.output_of(user)]]
            editor.replace(user, output, inherit=True)
        editor.graph.erase_node(node)
    return editor.finish()


def run(inputs: Sequence[Tensor], weights: Sequence[Tensor], program: str) -> list[Tensor]:
    """The outputs of the op, computed by ATen ops."""
    return reference.run(SegmentProgram.parse(program), inputs, weights)


def check(arguments: Mapping[str, Any]) -> None:
    """Raise BadInput for a call of the op that is invalid for all inputs."""
    program = SegmentProgram.parse(arguments["program"])
    if len(arguments["inputs"]) != len(program.inputs):
        raise BadInput(f"expected {len(program.inputs)} inputs, got {len(arguments['inputs'])}")
    weights = arguments["weights"]
    are_known = not any(w is None for w in weights)  # computed weights are checked when the op is called
    for step in program.steps:
        _module_name(step)
        if are_known:
            row_of(step).check_stored(step, weights)


CUSTOM_OPS.register("segment", CustomOp(run, inlined, check, bound))


class _InlinedSegment:
    """One segment, while it is converted to ATen calls."""

    def __init__(self, editor: GraphEditor, node: fx.Node, program: SegmentProgram):
        arguments = schema.arguments(node)
        self.editor, self.node, self.program = editor, node, program
        self.values: list[fx.Node] = list(arguments["inputs"])
        # Of each value; None where it is known at run time only.
        self.channels: list[Any] = [_channel_count(x, k) for x, k in zip(self.values, program.inputs, strict=True)]
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
            kind = self.program.kinds[step.x]
            channels = [self.channels[value] for value in step.reads]
            operands = [self.values[value] for value in step.reads]
            if step.op in CALLED:
                self._call(step, kind, operands)
                continue
            if any(width is None for width in channels):
                raise BadInput(f"{self.node.name}: expected values with a fixed number of channels")
            if is_layer(step):
                operands += self._layer_weights(step, kind, channels[0])
            elif step.index is not None:
                numbers = stored.index(step, channels[0], self.weights)
                operands.append(self.editor.add_constant("segment.channels", numbers, self.node))
            result = self.program.kinds[len(self.values)]
            self.values.append(self._inlined(_calls(step, kind), operands))
            shapes = [_value_shape(step, kind, count) for count in channels]
            self.channels.append(int(row_of(step).shape(step, shapes, kind)[channel_axis(result)]))
        return self.values

    def _call(self, step: Step[Numbers], kind: str, operands: list[fx.Node]) -> None:
        """Append the call of a step that calls one op."""
        entry, numbers = CALLED[step.op], step.fields.numbers
        constants = row_of(step).constants(step, kind, (), self.dtype, self.weights)[0]
        parts = entry.split(constants, self.channels[step.x], numbers)
        nodes = [
            self.editor.add_constant(name, part, self.node, parameter=entry.constants != POSITIONS)
            for name, part in zip(entry.names_of_constants(_module_name(step)), parts, strict=False)
        ]
        node = self._called(entry, entry.arguments(operands, numbers, nodes))
        self.channels.append(self._value_width(len(self.values), step.kind))
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

    def _value_width(self, value: int, kind: str) -> int | None:
        """The channels of a value; None where they depend on sizes that are known at run time
        only, as those of a column of tokens do."""
        widths = set()
        for other in UNKNOWN:
            shapes = [
                [n if isinstance(n, int) else other for n in _value_sizes(x)]
                for x in self.values[: len(self.program.inputs)]
            ]
            widths.add(self.program.shapes(shapes)[value][channel_axis(kind)])
        return None if len(widths) > 1 else int(widths.pop())

    def _layer_weights(self, step: Layer, kind: str, channels: int) -> list[fx.Node]:
        """The weight of a layer, and its bias if there is one; shared by layers with the same
        weights.
        """
        shape = _value_shape(step, kind, channels)
        key = step.weight, step.bias, channels, step.fields.groups if is_conv(step) else 1
        if key not in self.layers:
            tensors = {"weight": stored.weight(step, self.weights, shape, self.dtype)}
            bias = stored.bias(step, self.weights)
            if bias is not None:
                tensors["bias"] = bias.to(self.dtype)
            self.layers[key] = [
                self.editor.add_constant(f"{_module_name(step)}.{attribute}", tensor, self.node, parameter=True)
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


def _module_name(step: AnyStep) -> str:
    """The name of the module of a step.

    Raises RefusedFile for a name that would be code in the source generated by torch.fx, as
    programs may come from files.
    """
    return check_fqn(step.name or "segment")


def _channel_count(node: fx.Node, kind: str) -> int:
    """The number of channels of a value, from its graph or file."""
    sizes = _value_sizes(node)
    axis = channel_axis(kind)
    size = sizes[axis] if len(sizes) > (1 if axis == 1 else 0) else None
    if not isinstance(size, int):
        raise BadInput(f"{node.name}: expected a value with a fixed number of channels")
    return size


def _value_sizes(node: fx.Node) -> Sequence[Any]:
    value = node.meta.get("val", node.meta.get("value"))
    return value.shape if isinstance(value, Tensor) else getattr(value, "sizes", ())


def _value_shape(step: AnyStep, kind: str, channels: int) -> tuple[int, ...]:
    """An example shape of an operand of a step."""
    if kind in CHANNELS_LAST:
        return (1,) * ((RANKS[kind] or 2) - 2) + (2, channels)
    sizes = [1, 1]
    if is_conv(step) or step.op == "pool":
        pads = step.fields.padding if is_conv(step) else ((0, 0), (0, 0))
        axes = zip(step.fields.kernel, step.fields.dilation, pads, strict=True)
        sizes = [d * (k - 1) + 1 + sum(p) for k, d, p in axes]
    return (2, channels, *(sizes[1:] if kind == "signal" else sizes))


def _calls(step: AnyStep, kind: str) -> fx.Graph:
    """The ATen calls of a step, a function of its operands, weight and bias."""
    index = None if step.index is None else (0, 0, 1)
    step = replace(step, reads=(0,) * len(step.reads), index=index, name="")
    if is_layer(step):
        out = step.fields.groups if is_conv(step) else 1
        empty, bias = (0, 0, 0), None if step.bias is None else (0, 0, out)
        weight = SparseWeight(empty, (0, 0, out + 1), empty)
        step = replace(step, fields=step.fields._replace(out=out), weight=weight, bias=bias)
    return _traced(step, kind)


@cache
def _traced(step: AnyStep, kind: str) -> fx.Graph:
    """The calls of a step with the fewest channels; they do not depend on sizes."""
    shapes = [_value_shape(step, kind, step.fields.groups if is_conv(step) else 1)] * len(step.reads)
    if step.adds:
        shapes[-1] = row_of(step).shape(step, shapes, kind)

    def run(*tensors: Tensor) -> Tensor:
        return call(step, kind, tensors[: len(shapes)], *tensors[len(shapes) :])

    with FakeTensorMode(), torch.no_grad():
        fakes = [torch.empty(shape) for shape in shapes]
        if is_layer(step):
            kernel = step.fields.kernel[1 if kind == "signal" else 0 :] if is_conv(step) else ()
            fakes.append(torch.empty(step.fields.out, 1, *kernel))
            fakes += [torch.empty(step.fields.out)] * (step.bias is not None)
        elif step.index is not None:
            fakes.append(torch.zeros(1, dtype=torch.int32))
        return make_fx(run, pre_dispatch=True)(*fakes).graph
