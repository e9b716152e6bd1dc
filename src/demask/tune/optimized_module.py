"""The module that optimize() returns: a functional graph, and faster code that runs it.

The graph is what is saved, copied, verified and exported. The code that calls run is generated from
it: values that depend only on input sizes (border maps, side networks, packed weights) are computed
by the first call with these sizes and cached; results are written over values that are no longer
read, or into an arena (`buffer_assignment`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from demask.compat.dispatch import schema_of
from demask.compat.fx_internals import codegen_of
from demask.graph.editor import reshape_views
from demask.graph.program import Program
from demask.graph.queries import COPY, input_dependent
from demask.graph.result.codegen import TRACED, Codegen
from demask.graph.result.demasked_module import Demasked, apply_pass, attach
from demask.machine.arena import Block, View, plan_arena, strided_bytes
from demask.ops import schema
from demask.ops.custom import custom_op_of
from demask.tune.buffer_assignment import InArena, InPlace, assign_buffers, sharing_cached
from demask.tune.epilogue import is_fused, is_pack, pack_weight, run_unfused, unfuse
from demask.tune.shape_cache import ShapeCache, ShapeEntry
from demask.tune.stale_sources import count_writes, sources_of

WHOLE = "_demask_whole"  # name of the full graph's function in generated code


class FastCodegen(Codegen):
    """Generates code for the fast graph in place of the module's graph.

    While torch.compile or torch.export trace a call, the code runs `traced`: the full graph in
    ATen ops.
    """

    traced: fx.Graph

    def _gen_python_code(self, nodes: Any, root_module: str, *args: Any, **kwargs: Any) -> Any:
        whole = list(nodes)
        if not whole:
            return super()._gen_python_code(nodes, root_module, *args, **kwargs)
        quick, self.traced = fast_graph(whole[0].graph), self._whole(whole[0].graph)
        names = dict((written := self.traced.python_code("self")).globals)
        exec(written.src, names)
        code = super()._gen_python_code(quick.nodes, root_module, *args, **kwargs)
        code.globals[WHOLE] = names["forward"]
        return code

    def gen_fn_def(self, *args: Any, **kwargs: Any) -> str:
        """The head of the function, which calls the full graph's function while traced."""
        head, line, rest = super().gen_fn_def(*args, **kwargs).partition("\n")
        names = ", ".join(["self", *(n for n in self.pytree_info.orig_args if n != "self")])
        return f"{head}\n    if {TRACED}():\n        return {WHOLE}({names}){line}{rest}"

    def _whole(self, graph: fx.Graph) -> fx.Graph:
        """A copy of a graph with fused calls replaced by ATen ops."""
        copy, info = fx.Graph(), self.pytree_info
        copy.output(copy.graph_copy(graph, {}))
        program = Program(copy, {}, info.in_spec, info.out_spec, tuple(info.orig_args))
        plain_graph = unfuse(program).graph
        plain_graph.set_codegen(Codegen(info, self.provenance))
        return plain_graph


class Optimized(Demasked):
    """A network optimized for one machine, for inference: calls record no gradients.

    It can be copied, pickled and saved, without the values cached between calls (`ShapeCache`).
    After conversion to another dtype or device it runs torch's plain ops. Several threads may call
    it. The next call uses changed weights; only after writes through NumPy or DLPack, or through
    `.data` of a buffer, call `refresh()`. torch.compile and torch.export see a network of ATen ops
    (`FastCodegen`).
    """

    codegen = FastCodegen
    trains = False
    plans: ShapeCache

    @classmethod
    def of(cls, root: nn.Module, graph: fx.Graph, specs: Any, provenance: Any) -> Self:
        """The module of a graph. specs: pytrees of the call and the result."""
        reshape_views(graph)
        module = super().of(root, graph, specs, provenance)
        count_writes(module)
        return module

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.plans = ShapeCache()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        count_writes(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # no_grad() costs 2 µs
            return super().__call__(*args, **kwargs)
        with torch.no_grad():
            return super().__call__(*args, **kwargs)

    @property
    def graph(self) -> fx.Graph:
        """The full graph; while torch.export traces it, in ATen ops."""
        if torch.compiler.is_compiling() and isinstance(codegen_of(self._graph), FastCodegen):
            return codegen_of(self._graph).traced
        return self._graph

    @graph.setter
    def graph(self, g: fx.Graph) -> None:
        fx.GraphModule.graph.__set__(self, g)

    def plan_for(self, inputs: tuple[Any, ...]) -> ShapeEntry:
        """The cached entry for inputs of these sizes (flattened, as the graph's placeholders)."""
        return self.plans.of(inputs, lambda: _new_entry(self, inputs))

    def refresh(self) -> None:
        """Drop values computed from weights: the next call computes them again."""
        self.plans = ShapeCache()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.refresh()  # also where a parent's state is loaded
        super()._load_from_state_dict(*args, **kwargs)

    def plain(self) -> Demasked:
        """The same network in ATen ops only, sharing its tensors: it can be exported and compiled,
        and runs in every dtype and on every device."""
        return apply_pass(self, unfuse).plain()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        before = _dtypes_and_devices(self)
        super()._apply(fn, recurse)
        self.refresh()
        if _dtypes_and_devices(self) != before:
            self._becomes(self.plain())
        return self

    def _becomes(self, other: Demasked) -> None:
        """Adopt the graph of another network, with the tensors that it reads."""
        before, graph = _names_of_tensors(self.graph), other.graph
        for node in graph.nodes:
            node.meta.pop("value", None)  # memory was planned for the former dtype and device
        for name in _names_of_tensors(graph) - before:
            attach(self, name, operator.attrgetter(name)(other))
        for name in before - _names_of_tensors(graph):
            path, _, leaf = name.rpartition(".")
            delattr(self.get_submodule(path), leaf)
        graph.set_codegen(codegen_of(self.graph))
        self.graph = graph


def _names_of_tensors(graph: fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.find_nodes(op="get_attr")}


def _dtypes_and_devices(module: nn.Module) -> set[Any]:
    tensors = [*module.parameters(), *module.buffers()]
    return {(t.dtype, t.device) for t in tensors if t.is_floating_point()}


def fast_graph(graph: fx.Graph) -> fx.Graph:
    """The graph that calls run: it gets the cached entry for its inputs' sizes, and reads from it
    the values that depend on no input, and views of an arena."""
    live, calls = input_dependent(graph), assign_buffers(graph)
    quick, new = fx.Graph(), {}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in inputs:
        new[node] = quick.node_copy(node)
        new[node].name = node.name
    plan = quick.call_method("__call__", (quick.get_attr("plan_for"), tuple(map(new.get, inputs))))
    cached, memory = precomputed_nodes(graph, live), arena_nodes(calls)
    values = quick.call_function(getattr, (plan, "precomputed")) if cached else None
    new |= {n: quick.call_function(operator.getitem, (values, k)) for k, n in enumerate(cached)}
    taken = quick.call_method("take", (plan,)) if memory else None
    views = {n: quick.call_function(operator.getitem, (taken, k)) for k, n in enumerate(memory)}
    for node in graph.nodes:
        if node in new or node not in live:
            continue
        if node.op == "output":
            for source in sharing_cached(graph, node.all_input_nodes):
                # The caller may write to returned tensors.
                new[source] = quick.call_function(COPY, (new[source],))
            if taken is not None:
                quick.call_method("give", (plan, taken))
        new[node] = _copied(quick, node, new, calls.get(node), views)
    return quick


def _copied(
    quick: fx.Graph,
    node: fx.Node,
    new: dict[fx.Node, Any],
    call: InPlace | InArena | None,
    views: dict[fx.Node, fx.Node],
) -> fx.Node:
    """A node copied into the fast graph, in place or into a view of the arena if `call` says so.
    new: copies of the nodes before it."""
    if call is None:
        return _bind_to_function(quick, node, new) or quick.node_copy(node, lambda n: new[n])
    if isinstance(call, InPlace):
        args, kwargs = map_arg((call.args, dict(call.kwargs)), lambda n: new[n])
        return quick.call_function(call.target, args, kwargs)
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: new[n])
    if node.target is COPY:
        return quick.call_function(call.target, (views[node], args[0]))
    out = next(a.name for a in schema_of(call.target).arguments if a.is_out)
    return quick.call_function(call.target, args, {**kwargs, out: views[node]})


def _bind_to_function(quick: fx.Graph, node: fx.Node, new: dict[fx.Node, Any]) -> fx.Node | None:
    """A call of one of demask's ops as a call of a faster function, if the op has one."""
    custom = custom_op_of(node.target)
    if custom is None or custom.bind is None:
        return None
    function, args = custom.bind(schema.arguments(node))
    return quick.call_function(function, map_arg(args, lambda n: new[n]))


def precomputed_nodes(graph: fx.Graph, live: set[fx.Node]) -> list[fx.Node]:
    """The nodes that depend on no input and are read by nodes that do (`live`)."""
    return [n for n in graph.nodes if n not in live and any(user in live for user in n.users)]


def arena_nodes(calls: dict[fx.Node, InPlace | InArena]) -> list[fx.Node]:
    """The calls that write into the arena, in order."""
    return [node for node, call in calls.items() if isinstance(call, InArena)]


def _new_entry(module: Optimized, inputs: Sequence[Any]) -> ShapeEntry:
    """The entry for inputs of these sizes. The graph runs once to measure its values."""
    graph = module.graph
    live, calls = input_dependent(graph), assign_buffers(graph)
    cached, memory = precomputed_nodes(graph, live), arena_nodes(calls)
    with torch.inference_mode(False), torch.no_grad():  # later calls may not be in inference mode
        sources = sources_of(module, (str(n.target) for n in graph.find_nodes(op="get_attr")))
        aliases = {} if sources is None else sources.aliases
        values = _run(module, inputs, {*cached, *memory}, aliases)
    views, blocks = [], []
    for node in memory:
        shape, stride, dtype = values[node]
        call = calls[node]
        assert isinstance(call, InArena)
        blocks.append(Block(strided_bytes(shape, stride, dtype), call.start, call.end))
        views.append(View(0, shape, stride, dtype))
    arena = plan_arena(blocks)
    placed = tuple(View(offset, v.shape, v.stride, v.dtype) for offset, v in zip(arena.offsets, views, strict=True))
    if not values.keys() >= set(cached):
        raise ValueError("this graph reads packed weights where no layer does: it is damaged")
    valid = (lambda: False) if sources is None else sources.unchanged
    return ShapeEntry(tuple(values[node] for node in cached), arena.size, placed, valid)


def _run(
    module: nn.Module, inputs: Sequence[Any], wanted: set[fx.Node], tensors: Mapping[str, Tensor]
) -> dict[fx.Node, Any]:
    """Run a graph; the `wanted` values, or shape, stride and dtype of those that depend on inputs.
    tensors: of the module, by name; others are read from the module.

    Fused calls run as ATen ops, which check every shape, so that oneDNN is later called only on
    shapes that fit, even for a graph from a file.
    """
    remaining, results = iter(inputs), {}
    graph: fx.Graph = module.graph  # type: ignore[assignment]
    live = input_dependent(graph)
    values: dict[fx.Node, Any] = {}
    left = {node: len(node.users) for node in graph.nodes}
    for node in graph.nodes:
        if node.op == "output":
            break
        if node.op == "placeholder":
            values[node] = next(remaining)
        elif node.op == "get_attr":
            name = str(node.target)
            values[node] = tensors[name] if name in tensors else operator.attrgetter(name)(module)
        elif is_pack(node):
            values[node] = values[node.args[0]]
        elif is_fused(node):
            arguments = schema.arguments(node)
            values[node] = run_unfused(map_arg(arguments, lambda n: values[n]))
            if is_pack(arguments["W"]) and arguments["W"] in wanted:
                weight, x = values[arguments["W"]], values[arguments["X"]]
                results[arguments["W"]] = pack_weight(node, weight, x)
        else:
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
            values[node] = _called_function(module, node)(*args, **kwargs)
        if node in wanted and not is_pack(node):
            value = values[node]
            results[node] = (tuple(value.shape), value.stride(), value.dtype) if node in live else value
        for source in node.all_input_nodes:
            left[source] -= 1
            if not left[source]:
                values.pop(source, None)
    return results


def _called_function(module: nn.Module, node: fx.Node) -> Callable[..., Any]:
    if node.op == "call_module":
        return module.get_submodule(str(node.target))
    if node.op == "call_method":
        return lambda self, *args, **kwargs: getattr(self, str(node.target))(*args, **kwargs)
    function: Any = node.target
    return function
