"""The network a user gets: called like the model, executed by its plan within its budget."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from demask.compat.fake_tensors import FakeTensorMode
from demask.compat.fx_internals import signature_of
from demask.graph.program import Constant, Program
from demask.graph.provenance import Provenance, Sizes
from demask.graph.result.codegen import TRACED, Codegen
from demask.graph.result.demasked_module import Demasked, build
from demask.ops import TABLE, Table
from demask.registry import RESULT_KINDS
from demask.shrink.pipeline import inputs_of
from demask.traverse.analysis.flow import Flow, flow_of
from demask.traverse.execution.run import ImageRun, Told, execute, rehearse
from demask.traverse.execution.segment_executor import Counter
from demask.traverse.planning.plan import TilePlan
from demask.traverse.planning.plan_memory import MemoryLayout, lay_out_checked
from demask.traverse.storage.sources_and_sinks import tensor_sink, tensor_source

# An image of a call: the network, met with its plan; inputs; results, filled in; which of how many.
# Returns the values without rows, and what was done.
Image = Callable[
    ["Tiled", "Prepared", list[Any], list[Any], int, int], tuple[dict[fx.Node, Any], Counter]
]

LOADED = 16 * 2**20  # bytes of code that a first call may load, beyond what plans count for it
PLANNED = "_demask_planned"  # in the code: the function that runs the plan


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan met with its network: made at the first call, held by no copy and no file."""

    flow: Flow
    layout: MemoryLayout


class TiledCodegen(Codegen):
    """Calls the plan, but for torch.compile and torch.export, which see the graph."""

    def _gen_python_code(self, *args: Any, **kwargs: Any) -> Any:
        code = super()._gen_python_code(*args, **kwargs)
        code.globals[PLANNED] = planned
        return code

    def gen_fn_def(self, free_vars: list[str], *args: Any, **kwargs: Any) -> str:
        """The head of the function, with a call of the plan on the flattened inputs."""
        names = ", ".join(name.split(":")[0].split("=")[0].strip() for name in free_vars)
        head = super().gen_fn_def(free_vars, *args, **kwargs)
        return f"{head}\n    if not {TRACED}():\n        return {PLANNED}(self, [{names}])"


class Tiled(Demasked):
    """A network that runs in tiles within a budget, for inference: calls record no gradients.

    plan: how it runs. table: the op table; set it again where a network of ops of your own was
    unpickled. counted: what the last call did. prepared: the plan met with the graph, from the
    first call on. Its weights are read at every call. It can be copied, pickled and saved.
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
        """The plan, computed off-line and stored with the network (row 003-b)."""
        return self.plan.to_dict()

    def _unarchived(self, extra: Any) -> None:
        """Take over a plan; BadInput where it is none, or none of this network."""
        self.plan, self.prepared = TilePlan.from_dict(extra), None
        self.ready()

    def ready(self) -> Prepared:
        """The plan met with the graph."""
        if self.prepared is None:
            flow = flow_of(program_of(self), self.table)
            self.prepared = Prepared(flow, lay_out_checked(flow, self.plan.segments))
            self.prepared.layout.compile_kernels()
        return self.prepared


RESULT_KINDS.register("tiled", Tiled)


def tiled(
    program: Program, plan: TilePlan, flow: Flow, layout: MemoryLayout, table: Table
) -> Tiled:
    """The module of a program and its plan."""
    nothing = Sizes(0, 0, 0)
    notes = (*program.notes, "runs in tiles: " + str(plan).partition("\n")[0])
    record = Provenance(
        {}, (), {}, notes, inputs_of(program), nothing, nothing, guards=program.guards
    )
    made: Any = build(program, record, Tiled)
    layout.compile_kernels()
    if plan.budget - plan.peak < LOADED:
        rehearse(flow, layout, constants(made, flow))
    made.plan, made.table, made.prepared = plan, table, Prepared(flow, layout)
    return made


def program_of(module: Tiled) -> Program:
    """The program of a module's graph, with the values that its nodes make at the plan's sizes."""
    info: Any = signature_of(module.graph)
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    names = [str(n.target) for n in graph.find_nodes(op="get_attr")]
    constants = {name: Constant(attrgetter(name)(module), name, parameter=True) for name in names}
    _sized(graph, module)
    return Program(graph, constants, info.in_spec, info.out_spec, tuple(info.orig_args))


def _sized(graph: fx.Graph, module: Tiled) -> None:
    """Give each node the value it makes, as a fake tensor."""
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
                args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)


def called(
    module: Tiled, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Image | None = None
) -> Any:
    """One call, without gradients: image by image. run: how an image is executed, where not by the
    plan."""
    info: Any = signature_of(module.graph)
    return planned(module, _flat(info, args, kwargs), run)


@torch.no_grad()
def planned(module: Tiled, flat: list[Any], run: Image | None = None) -> Any:
    """One call, of flattened inputs."""
    info: Any = signature_of(module.graph)
    here = module.ready()
    count = _images(module, here.flow, flat)
    each = _each(here.flow, flat, count)
    results: list[Any] = [None] * len(here.flow.outputs)
    module.counted = Counter()
    for k in range(count):
        mine = [x[k : k + 1] if node in each and node not in here.flow.axes else x
                for node, x in zip(here.flow.inputs, flat, strict=True)]  # fmt: skip
        values, counter = (run or image)(module, here, mine, results, k, count)
        module.counted = Counter(
            module.counted.macs + counter.macs, module.counted.steps + counter.steps
        )
        for index, node in enumerate(here.flow.outputs):
            if not isinstance(node, fx.Node):
                results[index] = node
            elif node not in here.flow.axes:
                value = values[node]
                results[index] = _joined(results[index], value, k, count) if node in each else value
    return pytree.tree_unflatten(results, info.out_spec)


def _each(flow: Flow, flat: Sequence[Any], count: int) -> set[fx.Node]:
    """The values of which each image has its own."""
    found = {node for node, value in zip(flow.inputs, flat, strict=True)
             if isinstance(value, Tensor) and value.ndim and value.shape[0] == count
             and node.meta["val"].shape[0] == 1}  # fmt: skip
    for node in flow.calls:
        if any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _joined(found: Any, value: Any, k: int, count: int) -> Any:
    """A whole value of one image, among those of the others."""
    if count == 1 or not isinstance(value, Tensor):
        return value
    if found is None:
        found = value.new_empty((count, *value.shape[1:]))
    found[k : k + 1] = value
    return found


def _flat(info: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    flat, spec = pytree.tree_flatten((args, dict(kwargs)))
    if spec != info.in_spec:
        raise TypeError(f"expected a call like that of the example: {info.in_spec}, got {spec}")
    return flat


def _images(module: Tiled, flow: Flow, flat: Sequence[Any]) -> int:
    """How many images the inputs bring; ValueError where they are not what the plan is for."""
    pairs = list(zip(flow.inputs, flat, strict=True))
    counts = set()
    for node, value in pairs:
        _check_kind(node, value)
        if node in flow.axes:
            if tuple(value.shape[1:]) != tuple(node.meta["val"].shape[1:]):
                raise _unplanned(node, value)
            counts.add(value.shape[0])
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"expected inputs of one number of images, got {sorted(counts)}")
    count = counts.pop()
    if count != 1 and not module.plan.images:
        raise ValueError(f"the plan is for one image at a time, got {count}: it was made from an "
                         "example of one, which does not show that images are independent; give "
                         "demask.traverse.tile an example of two or more")  # fmt: skip
    for node, value in pairs:
        if isinstance(value, Tensor) and node not in flow.axes:
            expected = tuple(node.meta["val"].shape)
            if tuple(value.shape) not in (expected, (count, *expected[1:]) if expected[:1] == (1,)
                                          else expected):  # fmt: skip
                raise _unplanned(node, value)
    return count


def _check_kind(node: fx.Node, value: Any) -> None:
    """ValueError unless an input is a tensor of the example's type, or the example's very value."""
    expected = node.meta.get("val")
    if not isinstance(expected, Tensor):
        if value != expected or type(value) is not type(expected):
            raise ValueError(f"input {node.name!r}: expected {expected!r}, as in the example that "
                             f"the plan was made from, got {value!r:.60}")  # fmt: skip
    elif not isinstance(value, Tensor) or value.ndim != expected.ndim:
        raise _unplanned(node, value)
    elif value.dtype != expected.dtype:
        raise ValueError(f"input {node.name!r}: expected {expected.dtype}, got {value.dtype}")
    elif value.device.type != "cpu":
        raise ValueError(f"input {node.name!r}: expected a tensor on the CPU, got {value.device}")


def _unplanned(node: fx.Node, value: Any) -> ValueError:
    found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    expected = tuple(node.meta["val"].shape)
    return ValueError(f"input {node.name!r}: the plan is for {expected}, got {found}; call "
                      "demask.traverse.tile with an example of this size")  # fmt: skip


def image(
    module: Tiled, here: Prepared, flat: Sequence[Any], results: list[Any], k: int, count: int,
    told: Told | None = None,
) -> tuple[dict[fx.Node, Any], Counter]:  # fmt: skip
    """Image k of a call; results with rows are allocated at the first."""
    flow = here.flow
    sources, wholes = {}, constants(module, flow)
    for node, value in zip(flow.inputs, flat, strict=True):
        if node in flow.axes:
            sources[node] = tensor_source(value, flow.axes[node], k)
        else:
            wholes[node] = value
    sinks, given = {}, dict(zip(flow.inputs, flat, strict=True))
    for index, node in enumerate(flow.outputs):
        if not isinstance(node, fx.Node) or node not in flow.axes:
            continue
        if flow.outputs.index(node) < index:  # handed out twice, as one tensor
            results[index] = results[flow.outputs.index(node)]
            continue
        if results[index] is None:
            results[index] = empty_result(node, flat, count)
        if node in given:
            results[index][k : k + 1] = given[node][k : k + 1]
        else:
            sinks[node] = tensor_sink(results[index], flow.axes[node], node.meta["val"].dtype, k)
    return execute(flow, here.layout, ImageRun(sources, sinks, wholes), told=told,
                   folder=tempfile.gettempdir())  # fmt: skip


def constants(module: nn.Module, flow: Flow) -> dict[fx.Node, Any]:
    """The tensors that a flow reads: those of the module where it has them."""
    found = flow.constants
    for node in found:
        with suppress(AttributeError):
            found[node] = attrgetter(str(node.target))(module)
    return found


def empty_result(node: fx.Node, flat: Sequence[Any], count: int) -> Tensor:
    """Memory for a result, laid out as the first input is."""
    value = node.meta["val"]
    first = next((x for x in flat if isinstance(x, Tensor) and x.ndim == value.ndim == 4), None)
    last = first is not None and first.is_contiguous(memory_format=torch.channels_last)
    last = last and not first.is_contiguous()  # type: ignore[union-attr]
    form = torch.channels_last if last else torch.contiguous_format
    return torch.empty((count, *value.shape[1:]), dtype=value.dtype, memory_format=form)


__all__ = ["Tiled", "tiled"]
