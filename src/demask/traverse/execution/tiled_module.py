"""The module that `tile` returns: called like the model, executed by its plan in its budget."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from demask.compat.fake_tensors import FakeTensorMode
from demask.compat.fx_internals import signature_of
from demask.exec.analysis.flow import Flow, flow_of
from demask.exec.planning.plan import TilePlan
from demask.exec.planning.plan_memory import MemoryLayout
from demask.exec.planning.planner import lay_out_plan
from demask.graph.program import Constant, Program
from demask.graph.result.codegen import TRACED, Codegen
from demask.graph.result.demasked_module import Demasked, build, unmeasured
from demask.ops import TABLE, Table, schema
from demask.ops.schema import fake
from demask.registry import RESULT_KINDS
from demask.traverse.execution.run import ImageRun, OnStep, execute, rehearse
from demask.traverse.execution.segment_executor import Counter
from demask.traverse.execution.stage_parts import PartsOfStages
from demask.traverse.storage.sources_and_sinks import tensor_sink, tensor_source

# Runs an image of a call: module, its flow and layout, inputs, results to fill, index, count.
# Returns the values without rows, and multiply-adds and steps.
Image = Callable[["Tiled", "Prepared", list[Any], list[Any], int, int], tuple[dict[fx.Node, Any], Counter]]

LOADED = 16 * 2**20  # bytes of code that a first call may load and that plans do not count
PLANNED = "_demask_planned"  # name of the function that runs the plan, in generated code


@dataclass(frozen=True, slots=True)
class Prepared:
    """The flow and the memory layout of a plan; not copied and not saved with the module."""

    flow: Flow
    layout: MemoryLayout


class TiledCodegen(Codegen):
    """Generated code that runs the plan; torch.compile and torch.export trace the graph instead."""

    def _gen_python_code(self, *args: Any, **kwargs: Any) -> Any:
        code = super()._gen_python_code(*args, **kwargs)
        code.globals[PLANNED] = planned
        return code

    def gen_fn_def(self, free_vars: list[str], *args: Any, **kwargs: Any) -> str:
        """The head of the function, which returns `planned` of the flattened inputs."""
        names = ", ".join(name.split(":")[0].split("=")[0].strip() for name in free_vars)
        head = super().gen_fn_def(free_vars, *args, **kwargs)
        return f"{head}\n    if not {TRACED}():\n        return {PLANNED}(self, [{names}])"


class Tiled(Demasked):
    """The module that `tile` returns: a network that runs in tiles, for inference only.

    Its weights are read at every call. It can be copied, pickled, saved and loaded.

    Attributes:
        plan: the `Plan` that it executes.
        table: op table; set it again after unpickling a network with ops of your own.
        counted: multiply-adds (`macs`) and number of steps (`steps`) of the last call.
        prepared: data computed from the plan; None after copying or loading, until the first call.
    """

    codegen = TiledCodegen
    trains = False
    plan: TilePlan
    table: Table = TABLE
    counted: Counter = Counter()
    prepared: Prepared | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        prepared, self.prepared = self.prepared, None
        memo[id(self.table)] = self.table
        try:
            copied = super().__deepcopy__(memo)
        finally:
            self.prepared = prepared
        copied.plan, copied.table = self.plan, self.table
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        make, args, state = super().__reduce__()
        left_out = ("prepared", "table")
        return make, args, {name: value for name, value in state.items() if name not in left_out}

    def _archived(self) -> dict[str, Any]:
        """The plan as a dictionary, stored with the network."""
        return self.plan.to_dict()

    def _unarchived(self, extra: Any) -> None:
        """Set the plan from a dictionary.

        Raises:
            BadInput: if it is no plan, or not one of this network.
        """
        self.plan, self.prepared = TilePlan.from_dict(extra), None
        self.ready()

    def ready(self) -> Prepared:
        """The flow and memory layout of the plan, computed once.

        Raises:
            BadInput: if the plan does not fit the graph.
        """
        if self.prepared is None:
            flow = replace(flow_of(program_of(self), self.table), parts=PartsOfStages(self.table))
            self.prepared = Prepared(*lay_out_plan(flow, self.plan))
            self.prepared.layout.compile_kernels()
        return self.prepared


RESULT_KINDS.register("tiled", Tiled)


def tiled(program: Program, plan: TilePlan, flow: Flow, layout: MemoryLayout, table: Table) -> Tiled:
    """The module of a program and its plan."""
    notes = (*program.notes, "runs in tiles: " + str(plan).partition("\n")[0])
    module: Any = build(program, replace(unmeasured(program), notes=notes), Tiled)
    layout.compile_kernels()
    if plan.budget - plan.peak < LOADED:
        rehearse(flow, layout, constants(module, flow))
    module.plan, module.table, module.prepared = plan, table, Prepared(flow, layout)
    return module


def program_of(module: Tiled) -> Program:
    """The program of a module's graph, with fake values of the plan's sizes."""
    info: Any = signature_of(module.graph)
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    names = [str(n.target) for n in graph.find_nodes(op="get_attr")]
    constants = {name: Constant(attrgetter(name)(module), name, parameter=True) for name in names}
    _set_fake_values(graph, module)
    return Program(graph, constants, info.in_spec, info.out_spec, tuple(info.orig_args))


def _set_fake_values(graph: fx.Graph, module: Tiled) -> None:
    """Set the fake tensor of each node."""
    specs = {spec.name: spec for spec in module.demasked.inputs}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for node in graph.nodes:
            if node.op == "placeholder":
                spec = specs.get(node.name)
                if spec is not None:
                    node.meta["val"] = torch.empty(spec.example, dtype=getattr(torch, spec.dtype))
            elif node.op == "get_attr":
                node.meta["val"] = mode.from_tensor(attrgetter(str(node.target))(module))
            elif node.op == "call_function":
                node.meta["val"] = schema.call_on(node, fake)


def call_by_image(module: Tiled, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Image | None = None) -> Any:
    """The results of one call, image by image, without gradients. run: executes an image; None: by
    the plan."""
    info: Any = signature_of(module.graph)
    flat, spec = pytree.tree_flatten((args, dict(kwargs)))
    if spec != info.in_spec:
        raise TypeError(f"expected a call like that of the example: {info.in_spec}, got {spec}")
    return planned(module, flat, run)


@torch.no_grad()
def planned(module: Tiled, flat: list[Any], run: Image | None = None) -> Any:
    """The results of one call with flattened inputs. run: executes an image; None: by the plan.

    Raises:
        ValueError: if the inputs are not of the plan's sizes, dtypes and devices.
    """
    info: Any = signature_of(module.graph)
    prepared = module.ready()
    count = _count_images(module, prepared.flow, flat)
    per_image = _nodes_per_image(prepared.flow, flat, count)
    results: list[Any] = [None] * len(prepared.flow.outputs)
    module.counted = Counter()
    for k in range(count):
        image_inputs = [
            x[k : k + 1] if node in per_image and node not in prepared.flow.axes else x
            for node, x in zip(prepared.flow.inputs, flat, strict=True)
        ]
        values, counter = (run or run_image)(module, prepared, image_inputs, results, k, count)
        module.counted = Counter(module.counted.macs + counter.macs, module.counted.steps + counter.steps)
        for index, node in enumerate(prepared.flow.outputs):
            if not isinstance(node, fx.Node):
                results[index] = node
            elif node not in prepared.flow.axes:
                value = values[node]
                results[index] = _stack(results[index], value, k, count) if node in per_image else value
    return pytree.tree_unflatten(results, info.out_spec)


def _nodes_per_image(flow: Flow, flat: Sequence[Any], count: int) -> set[fx.Node]:
    """The nodes whose values differ by image."""
    nodes = {
        node
        for node, value in zip(flow.inputs, flat, strict=True)
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == count and fake(node).shape[0] == 1
    }
    for node in flow.calls:
        if any(n in nodes for n in node.all_input_nodes):
            nodes.add(node)
    return nodes


def _stack(stacked: Any, value: Any, k: int, count: int) -> Any:
    """The stacked uncut values of all images, with that of image k set."""
    if count == 1 or not isinstance(value, Tensor):
        return value
    if stacked is None:
        stacked = value.new_empty((count, *value.shape[1:]))
    stacked[k : k + 1] = value
    return stacked


def _count_images(module: Tiled, flow: Flow, flat: Sequence[Any]) -> int:
    """The number of images in the inputs. Raises ValueError where the plan does not fit them."""
    pairs = list(zip(flow.inputs, flat, strict=True))
    counts = set()
    for node, value in pairs:
        _check_kind(node, value)
        if node in flow.axes:
            if tuple(value.shape[1:]) != tuple(fake(node).shape[1:]):
                raise _size_error(node, value)
            counts.add(value.shape[0])
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"expected inputs of one number of images, got {sorted(counts)}")
    count = counts.pop()
    if count != 1 and not module.plan.images:
        raise ValueError(
            f"the plan is for one image at a time, got {count}: its example had one, "
            "which does not show that images are independent; give "
            "demask.traverse.tile an example of two or more"
        )
    for node, value in pairs:
        if isinstance(value, Tensor) and node not in flow.axes:
            expected = tuple(fake(node).shape)
            if tuple(value.shape) not in (expected, (count, *expected[1:]) if expected[:1] == (1,) else expected):
                raise _size_error(node, value)
    return count


def _check_kind(node: fx.Node, value: Any) -> None:
    """Raise ValueError unless an input is a tensor like the example's, or equals its constant."""
    expected = node.meta.get("val")
    if not isinstance(expected, Tensor):
        if value != expected or type(value) is not type(expected):
            raise ValueError(f"input {node.name!r}: expected {expected!r}, as in the plan's example, got {value!r:.60}")
    elif not isinstance(value, Tensor) or value.ndim != expected.ndim:
        raise _size_error(node, value)
    elif value.dtype != expected.dtype:
        raise ValueError(f"input {node.name!r}: expected {expected.dtype}, got {value.dtype}")
    elif value.device.type != "cpu":
        raise ValueError(f"input {node.name!r}: expected a tensor on the CPU, got {value.device}")


def _size_error(node: fx.Node, value: Any) -> ValueError:
    actual = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    expected = tuple(fake(node).shape)
    return ValueError(
        f"input {node.name!r}: the plan is for {expected}, got {actual}; call "
        "demask.traverse.tile with an example of this size"
    )


def run_image(
    module: Tiled,
    prepared: Prepared,
    flat: Sequence[Any],
    results: list[Any],
    k: int,
    count: int,
    on_step: OnStep | None = None,
) -> tuple[dict[fx.Node, Any], Counter]:
    """Run image k of a call. Results with rows are allocated at the first image.

    Returns the values without rows, and multiply-adds and steps. on_step: called after each step.
    """
    flow = prepared.flow
    sources, uncut_values = {}, constants(module, flow)
    for node, value in zip(flow.inputs, flat, strict=True):
        if node in flow.axes:
            sources[node] = tensor_source(value, flow.axes[node], k)
        else:
            uncut_values[node] = value
    sinks, inputs = {}, dict(zip(flow.inputs, flat, strict=True))
    for index, node in enumerate(flow.outputs):
        if not isinstance(node, fx.Node) or node not in flow.axes:
            continue
        if flow.outputs.index(node) < index:  # returned twice, as one tensor
            results[index] = results[flow.outputs.index(node)]
            continue
        if results[index] is None:
            results[index] = empty_result(node, flat, count)
        if node in inputs:
            results[index][k : k + 1] = inputs[node][k : k + 1]
        else:
            sinks[node] = tensor_sink(results[index], flow.axes[node], fake(node).dtype, k)
    return execute(
        flow, prepared.layout, ImageRun(sources, sinks, uncut_values), on_step=on_step, folder=tempfile.gettempdir()
    )


def constants(module: nn.Module, flow: Flow) -> dict[fx.Node, Any]:
    """The constants that a flow reads: the module's tensors, else the captured ones."""
    tensors = flow.constants
    for node in tensors:
        with suppress(AttributeError):
            tensors[node] = attrgetter(str(node.target))(module)
    return tensors


def empty_result(node: fx.Node, flat: Sequence[Any], count: int) -> Tensor:
    """Memory for a result of `count` images, in the memory format of the first 4-d input."""
    value = fake(node)
    first = next((x for x in flat if isinstance(x, Tensor) and x.ndim == value.ndim == 4), None)
    is_channels_last = first is not None and first.is_contiguous(memory_format=torch.channels_last)
    is_channels_last = is_channels_last and not first.is_contiguous()  # type: ignore[union-attr]
    memory_format = torch.channels_last if is_channels_last else torch.contiguous_format
    return torch.empty((count, *value.shape[1:]), dtype=value.dtype, memory_format=memory_format)
