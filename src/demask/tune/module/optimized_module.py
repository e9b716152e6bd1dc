"""The module that optimize() gives back: a graph like any other, and code that runs it fast.

The graph is functional and whole: it is what is saved, copied, verified and exported. The code that
calls run is made from it: what depends on the sizes of inputs alone (border maps, side networks,
weights in the layout that a kernel wants) is computed by the first call with these sizes and kept;
values are written over what is no longer read, or into an arena (`memory`).
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
from demask.graph.result.demasked_module import Demasked, attach, changed
from demask.machine.arena import Block, View, extent, planned
from demask.ops import schema
from demask.tune.epilogue import is_fused, is_pack, packed, plain, run_plain
from demask.tune.module.buffer_assignment import InArena, InPlace, decided, kept_bodies
from demask.tune.module.shape_cache import Plans, ShapeEntry
from demask.tune.stale_sources import count_writes, sources_of

WHOLE = "_demask_whole"  # in the code: the function of the whole graph


class FastCodegen(Codegen):
    """Writes the code of the fast graph where that of the whole graph is asked for.

    While torch.compile or torch.export trace a call, it is that of `traced`: the whole graph in
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
        """The head of the function, which leaves the call to the whole graph if it is traced."""
        head, line, rest = super().gen_fn_def(*args, **kwargs).partition("\n")
        names = ", ".join(["self", *(n for n in self.pytree_info.orig_args if n != "self")])
        return f"{head}\n    if {TRACED}():\n        return {WHOLE}({names}){line}{rest}"

    def _whole(self, graph: fx.Graph) -> fx.Graph:
        """A graph in ATen ops."""
        copy, info = fx.Graph(), self.pytree_info
        copy.output(copy.graph_copy(graph, {}))
        program = Program(copy, {}, info.in_spec, info.out_spec, tuple(info.orig_args))
        made = plain(program).graph
        made.set_codegen(Codegen(info, self.provenance))
        return made


class Optimized(Demasked):
    """A network made fast for one machine, for inference: calls record no gradients.

    It can be copied, pickled and saved; what it keeps between calls (see `Plans`) is not part of
    that. Converted to another dtype or moved to another device it goes on with torch's plain ops.
    Several threads may call it. Weights that change are seen by the next call; only after writing
    to them through NumPy or DLPack, or through `.data` of a buffer, call `refresh()`. torch.compile
    and torch.export see the network in ATen ops alone (`FastCodegen`).
    """

    codegen = FastCodegen
    trains = False
    plans: Plans

    @classmethod
    def of(cls, root: nn.Module, graph: fx.Graph, specs: Any, provenance: Any) -> Self:
        """The module of a graph whose call and result have the given pytrees."""
        reshape_views(graph)
        module = super().of(root, graph, specs, provenance)
        count_writes(module)
        return module

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.plans = Plans()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        count_writes(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return super().__call__(*args, **kwargs)

    @property
    def graph(self) -> fx.Graph:
        """The whole graph; while torch.export traces it, in ATen ops."""
        if torch.compiler.is_compiling() and isinstance(codegen_of(self._graph), FastCodegen):
            return codegen_of(self._graph).traced
        return self._graph

    @graph.setter
    def graph(self, g: fx.Graph) -> None:
        fx.GraphModule.graph.__set__(self, g)

    def plan_for(self, inputs: tuple[Any, ...]) -> ShapeEntry:
        """What is kept for inputs of these sizes (flattened, as the graph's placeholders)."""
        return self.plans.of(inputs, lambda: made(self, inputs))

    def refresh(self) -> None:
        """Forget what was computed from the weights: the next call computes it anew."""
        self.plans = Plans()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.refresh()  # also where a parent's state is loaded
        super()._load_from_state_dict(*args, **kwargs)

    def plain(self) -> Demasked:
        """The same network in ATen ops alone, sharing its tensors: it exports, compiles, and runs
        in every dtype and on every device."""
        return changed(self, plain).plain()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        before = _kinds(self)
        super()._apply(fn, recurse)
        self.refresh()
        if _kinds(self) != before:
            self._becomes(self.plain())
        return self

    def _becomes(self, other: Demasked) -> None:
        """Take over the graph of another network, with what it reads and not what it does not."""
        before, graph = _read(self.graph), other.graph
        for node in graph.nodes:
            node.meta.pop("value", None)  # planned memory was for what the values were
        for name in _read(graph) - before:
            attach(self, name, operator.attrgetter(name)(other))
        for name in before - _read(graph):
            path, _, leaf = name.rpartition(".")
            delattr(self.get_submodule(path), leaf)
        graph.set_codegen(codegen_of(self.graph))
        self.graph = graph


def _read(graph: fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.find_nodes(op="get_attr")}


def _kinds(module: nn.Module) -> set[Any]:
    tensors = [*module.parameters(), *module.buffers()]
    return {(t.dtype, t.device) for t in tensors if t.is_floating_point()}


def fast_graph(graph: fx.Graph) -> fx.Graph:
    """The graph that is run: it asks for the plan of its inputs' sizes, and reads from that what no
    input reaches."""
    live, calls = input_dependent(graph), decided(graph)
    quick, new = fx.Graph(), {}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in inputs:
        new[node] = quick.node_copy(node)
        new[node].name = node.name
    plan = quick.call_method("__call__", (quick.get_attr("plan_for"), tuple(map(new.get, inputs))))
    kept, memory = kept_nodes(graph, live), arena_nodes(calls)
    values = quick.call_function(getattr, (plan, "kept")) if kept else None
    new |= {n: quick.call_function(operator.getitem, (values, k)) for k, n in enumerate(kept)}
    taken = quick.call_method("take", (plan,)) if memory else None
    views = {n: quick.call_function(operator.getitem, (taken, k)) for k, n in enumerate(memory)}
    for node in graph.nodes:
        if node in new or node not in live:
            continue
        if node.op == "output":
            for source in kept_bodies(graph, node.all_input_nodes):
                # The caller may write to what it gets.
                new[source] = quick.call_function(COPY, (new[source],))
            if taken is not None:
                quick.call_method("give", (plan, taken))
        new[node] = _copied(quick, node, new, calls.get(node), views)
    return quick


def _copied(
    quick: fx.Graph, node: fx.Node, new: dict[fx.Node, Any], call: InPlace | InArena | None,
    views: dict[fx.Node, fx.Node],
) -> fx.Node:  # fmt: skip
    if call is None:
        return quick.node_copy(node, lambda n: new[n])
    if isinstance(call, InPlace):
        args, kwargs = map_arg((call.args, dict(call.kwargs)), lambda n: new[n])
        return quick.call_function(call.target, args, kwargs)
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: new[n])
    if node.target is COPY:
        return quick.call_function(call.target, (views[node], args[0]))
    out = next(a.name for a in schema_of(call.target).arguments if a.is_out)
    return quick.call_function(call.target, args, {**kwargs, out: views[node]})


def kept_nodes(graph: fx.Graph, live: set[fx.Node]) -> list[fx.Node]:
    """What no input reaches and something that one does reach reads."""
    return [n for n in graph.nodes if n not in live and any(user in live for user in n.users)]


def arena_nodes(calls: dict[fx.Node, InPlace | InArena]) -> list[fx.Node]:
    """The calls that write into the arena, in order."""
    return [node for node, call in calls.items() if isinstance(call, InArena)]


def made(module: Optimized, inputs: Sequence[Any]) -> ShapeEntry:
    """The plan for inputs of these sizes: the graph is run once, to see what it makes."""
    graph = module.graph
    live, calls = input_dependent(graph), decided(graph)
    kept, memory = kept_nodes(graph, live), arena_nodes(calls)
    with torch.inference_mode(False), torch.no_grad():  # later calls may be outside of it
        sources = sources_of(module, (str(n.target) for n in graph.find_nodes(op="get_attr")))
        aliases = {} if sources is None else sources.aliases
        values = _run(module, inputs, {*kept, *memory}, aliases)
    views, blocks = [], []
    for node in memory:
        shape, stride, dtype = values[node]
        call = calls[node]
        assert isinstance(call, InArena)
        blocks.append(Block(extent(shape, stride, dtype), call.start, call.end))
        views.append(View(0, shape, stride, dtype))
    plan = planned(blocks)
    placed = tuple(View(offset, v.shape, v.stride, v.dtype)
                   for offset, v in zip(plan.offsets, views, strict=True))  # fmt: skip
    if not values.keys() >= set(kept):
        raise ValueError("this graph reads packed weights where no layer does: it is damaged")
    valid = (lambda: False) if sources is None else sources.unchanged
    return ShapeEntry(tuple(values[node] for node in kept), plan.size, placed, valid)


def _run(
    module: nn.Module, inputs: Sequence[Any], wanted: set[fx.Node], tensors: Mapping[str, Tensor]
) -> dict[fx.Node, Any]:
    """Run a graph as it stands; of wanted values that inputs reach, their shape, stride, dtype.
    tensors: of the module, by name; those that are not among them are read from it.

    Fused calls are made in the ATen ops they stand for, which check every shape: what oneDNN is
    then called on was seen to fit, whatever file the graph came from.
    """
    given, found = iter(inputs), {}
    graph: fx.Graph = module.graph  # type: ignore[assignment]
    live = input_dependent(graph)
    values: dict[fx.Node, Any] = {}
    left = {node: len(node.users) for node in graph.nodes}
    for node in graph.nodes:
        if node.op == "output":
            break
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            name = str(node.target)
            values[node] = tensors[name] if name in tensors else operator.attrgetter(name)(module)
        elif is_pack(node):
            values[node] = values[node.args[0]]  # type: ignore[index]
        elif is_fused(node):
            arguments = schema.arguments(node)
            values[node] = run_plain(map_arg(arguments, lambda n: values[n]))
            if is_pack(arguments["W"]) and arguments["W"] in wanted:
                weight, x = values[arguments["W"]], values[arguments["X"]]
                found[arguments["W"]] = packed(node, weight, x)
        else:
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
            values[node] = _called(module, node)(*args, **kwargs)
        if node in wanted and not is_pack(node):
            value = values[node]
            found[node] = (
                (tuple(value.shape), value.stride(), value.dtype) if node in live else value
            )
        for source in node.all_input_nodes:
            left[source] -= 1
            if not left[source]:
                values.pop(source, None)
    return found


def _called(module: nn.Module, node: fx.Node) -> Callable[..., Any]:
    if node.op == "call_module":
        return module.get_submodule(str(node.target))
    if node.op == "call_method":
        return lambda self, *args, **kwargs: getattr(self, str(node.target))(*args, **kwargs)
    return node.target  # type: ignore[return-value]
