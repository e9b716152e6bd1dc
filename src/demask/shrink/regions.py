"""The parts of a smaller program that no smaller module of their class computes, as graphs.

A region is what the code of one module computes in the program, with what keeps shapes there. Its
graph takes the arguments of the module and returns what the module does, so it can stand in the
module's place. Which argument is which value is found by running both on the example; that the
whole is then right is proved elsewhere (`Proof`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from demask.graph.copying import structural_copy
from demask.graph.hooks import HOOKS
from demask.graph.modules import kind_of
from demask.graph.program import Constant, Program
from demask.graph.provenance import Provenance
from demask.graph.resize import has_numbers, put_module
from demask.graph.restore import Originals
from demask.graph.result import Demasked, build
from demask.shrink.check import call
from demask.shrink.measure import counted
from demask.shrink.numbers import is_below
from demask.shrink.pipeline import inputs_of
from demask.shrink.proof import Proof, Unlike, path_of

NEAR = 1e-3  # relative: as near are two values that are the same but for rounding


@dataclass(frozen=True, slots=True)
class Region:
    """The calls of one module in a program. inputs: the values from elsewhere that they read;
    outputs: their values that are read elsewhere."""

    path: str
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


# --------------------------------------------------------------------------- which parts


def regions_of(program: Program, model: nn.Module, places: Iterable[str]) -> list[Region]:
    """The smallest modules that hold what keeps shapes by more than smaller layers, and `places`.
    Raises Unlike where that is the whole model."""
    modules = _Modules(program, model)
    owners: dict[fx.Node, str] = {}
    for node in program.graph.nodes:
        if "effect" in node.meta:
            owners[node] = modules.owner(node)
    wanted = {*owners.values(), *map(modules.around, places)}
    if "" in wanted:
        raise Unlike("more than shapes changed between the modules of the whole model")
    paths = [path for path in sorted(wanted)
             if not any(path != other and is_below(path, [other]) for other in wanted)]  # fmt: skip
    order = {node: k for k, node in enumerate(program.graph.nodes)}
    found, taken = [], dict[fx.Node, str]()
    for path in paths:
        inside = {node for node in order if path in modules.scopes(node)}
        effects = {node for node, owner in owners.items() if is_below(owner, [path])}
        own = _closed((inside - owners.keys()) | effects, order)
        for node in own:
            if node in taken:
                raise Unlike(f"{path} and {taken[node]} are computed in one another", path)
            taken[node] = path
        found.append(_region(path, sorted(own, key=order.__getitem__)))
    return found


class _Modules:
    """The modules of a model whose calls can be told in a program."""

    def __init__(self, program: Program, model: nn.Module) -> None:
        self._scopes = {node: _scopes(node) for node in program.graph.nodes}
        called = {name for scopes in self._scopes.values() for name in scopes}
        often = {name.partition("@")[0] for name in called if "@" in name}
        layer = {path for path, module in model.named_modules()
                 if kind_of(module) or has_numbers(module)}  # fmt: skip
        self.graphs = called - often - layer

    def scopes(self, node: fx.Node) -> tuple[str, ...]:
        return self._scopes[node]

    def around(self, path: str) -> str:
        """The smallest module around a place that a graph can stand for; "" for the whole model."""
        while path and path not in self.graphs:
            path = path.rpartition(".")[0]
        return path

    def owner(self, effect: fx.Node) -> str:
        """The module that computes what keeps a shape: that of all who read it, or that of all it
        is computed from, whichever is the smaller."""
        readers = self._common(_beyond(effect, lambda node: list(node.users)))
        sources = self._common(_beyond(effect, _tensors_read))
        return readers if readers and not is_below(sources, [readers]) else sources or readers

    def _common(self, nodes: Sequence[fx.Node]) -> str:
        paths = [path_of(node).split(".") for node in nodes]
        same = []
        for steps in zip(*paths, strict=False):
            if len(set(steps)) > 1:
                break
            same.append(steps[0])
        return self.around(".".join(same))


def _scopes(node: fx.Node) -> tuple[str, ...]:
    """The paths of the modules in whose code a call is made, the outermost first."""
    return tuple(path for path, _ in (node.meta.get("nn_module_stack") or {}).values())


def _tensors_read(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if n.op != "get_attr"]


def _beyond(effect: fx.Node, step: Callable[[fx.Node], list[fx.Node]]) -> list[fx.Node]:
    """The nearest nodes in a direction that keep no shapes themselves."""
    found, stack = [], step(effect)
    while stack:
        node = stack.pop()
        if "effect" in node.meta:
            stack += step(node)
        elif isinstance(node.meta.get("val"), Tensor) or node.op == "output":
            found.append(node)
    return found


def _closed(own: set[fx.Node], order: dict[fx.Node, int]) -> set[fx.Node]:
    """The nodes with what lies on the way between them."""
    after: set[fx.Node] = set()
    for node in order:
        if any(n in own or n in after for n in node.all_input_nodes):
            after.add(node)
    before: set[fx.Node] = set()
    for node in reversed(order):
        if any(n in own or n in before for n in node.users):
            before.add(node)
    return own | (after & before)


def _region(path: str, nodes: Sequence[fx.Node]) -> Region:
    own = set(nodes)
    inputs = dict.fromkeys(n for node in nodes for n in node.all_input_nodes
                           if n not in own and n.op != "get_attr")  # fmt: skip
    outputs = [n for n in nodes if n.op != "get_attr" and any(user not in own for user in n.users)]
    return Region(path, tuple(nodes), tuple(inputs), tuple(outputs))


# --------------------------------------------------------------------------- their calls


@dataclass(slots=True)
class _Call:
    """How a module is called, and what it returns, in terms of a region's values."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    inputs: Mapping[int, fx.Node] | None = None  # of the leaves of the call
    outputs: Sequence[Any] = ()  # leaves of the result: nodes, or what is no tensor
    out_spec: Any = None


def graphs_in(
    network: nn.Module,
    model: nn.Module,
    proof: Proof,
    regions: Sequence[Region],
    originals: Originals | None,
) -> None:
    """Put graphs of regions in the places of their modules, in a copy of the model that has the
    smaller tensors. Raises Unlike with the place where a module's call cannot be told."""
    values = _values_at(regions, proof)
    returned = _returned(model, [region.path for region in regions], proof)
    calls = {region.path: _Call() for region in regions}
    probed = structural_copy(network, share=True)
    for region in regions:
        if region.path not in returned:
            raise Unlike(f"{region.path} is not called", region.path)
        matched = partial(_matched, region, returned[region.path], values, calls[region.path])
        put_module(probed, region.path, _Probe(matched))
    proof.run(probed)
    for region in regions:
        module = network.get_submodule(region.path)
        graph = _graph(region, calls[region.path], proof, module, originals)
        hooks = {k: v for k, v in vars(module).items() if k.startswith(("_forward_", "_backward_"))}
        vars(graph).update(hooks)
        put_module(network, region.path, graph)


class _Probe(nn.Module):
    """Stands where a region's graph will, for one run."""

    def __init__(self, call: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._function = (call,)  # a tuple of what copies share

    def __deepcopy__(self, memo: Any) -> _Probe:
        return _Probe(*self._function)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function[0](args, kwargs)


class _Run(fx.Interpreter):
    """Runs a program and remembers some of its values."""

    def __init__(self, program: Program, wanted: Collection[fx.Node]) -> None:
        super().__init__(nn.Module(), graph=program.graph)
        self._constants, self._wanted = program.constants, wanted
        self.values: dict[fx.Node, Any] = {}

    def fetch_attr(self, target: str) -> Tensor:
        return self._constants[target].tensor

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self._wanted:
            self.values[n] = value
        return value


def _values_at(regions: Sequence[Region], proof: Proof) -> dict[fx.Node, Any]:
    """What goes in and out of regions, for the example."""
    wanted = {node for region in regions for node in (*region.inputs, *region.outputs)}
    run = _Run(proof.after, wanted)
    call(run.run, (tuple(pytree.tree_leaves(proof.inputs)), {}))
    return run.values


def _returned(model: nn.Module, paths: Sequence[str], proof: Proof) -> dict[str, Any]:
    """What modules return for the example."""
    found: dict[str, Any] = {}
    work = structural_copy(model, share=True)

    def keep(path: str) -> Callable[..., None]:
        return lambda module, inputs, output: found.update({path: output})

    for path in paths:
        work.get_submodule(path).register_forward_hook(keep(path))
    proof.run(work)
    return found


def _matched(
    region: Region, returned: Any, values: Mapping[fx.Node, Any], found: _Call,
    args: tuple[Any, ...], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """Fill in how a module is called, now that it is; what it returns."""
    leaves = pytree.tree_leaves((args, kwargs))
    inputs: dict[int, fx.Node] = {}
    for node in region.inputs:
        value = values[node]
        if not isinstance(value, Tensor):
            continue
        near = {k: _gap(leaf, value) for k, leaf in enumerate(leaves)
                if isinstance(leaf, Tensor) and k not in inputs and leaf.shape == value.shape
                and leaf.dtype == value.dtype}  # fmt: skip
        best = min(near, key=near.__getitem__, default=None)
        if best is not None and near[best] <= NEAR:
            inputs[best] = node
    wanted, spec = pytree.tree_flatten(returned)
    outputs: list[Any] = list(wanted)
    free = list(region.outputs)
    for k, leaf in enumerate(wanted):
        if not isinstance(leaf, Tensor):
            continue
        fits = {node: _share(values[node], leaf) for node in free
                if _can_be_cut(values[node], leaf)}  # fmt: skip
        if not fits:
            raise Unlike(f"not all that {region.path} returns is used", region.path)
        outputs[k] = max(fits, key=fits.__getitem__)
        free.remove(outputs[k])
    if free:
        raise Unlike(f"values inside {region.path} are read elsewhere", region.path)
    found.args, found.kwargs, found.inputs = args, kwargs, inputs
    found.outputs, found.out_spec = outputs, spec
    made = [values[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in outputs]
    return pytree.tree_unflatten(made, spec)


def _gap(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    if not a.numel() or torch.equal(a, b):
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().nan_to_num().max() / b.abs().nan_to_num().max().clamp(min=1e-30))


def _can_be_cut(value: Any, of: Tensor) -> bool:
    same = isinstance(value, Tensor) and value.dtype == of.dtype and value.ndim == of.ndim
    return same and all(a <= b for a, b in zip(value.shape, of.shape, strict=True))


def _share(value: Tensor, of: Tensor) -> float:
    """How large a part of a tensor's values another has."""
    return float(torch.isin(value.detach(), of.detach()).double().mean()) if value.numel() else 1.0


# --------------------------------------------------------------------------- their graphs


def _graph(
    region: Region, call: _Call, proof: Proof, module: nn.Module,
    originals: Originals | None,
) -> Demasked:  # fmt: skip
    """The network of a region, called as its module is."""
    program = _program(region, call, proof.after, module)
    prefix = f"{region.path}."
    cuts = {name.removeprefix(prefix): replace(cut, source=cut.source.removeprefix(prefix))
            for name, cut in proof.cuts.items() if name.startswith(prefix)}  # fmt: skip
    used = {node.name for node in program.graph.find_nodes(op="placeholder") if node.users}
    record = Provenance(
        cuts={name: cut for name, cut in cuts.items() if name in program.constants},
        reasons=(),
        effects={},
        notes=(),
        inputs=tuple(spec for spec in inputs_of(program) if spec.name in used),
        before=counted(module),
        after=counted(module),
        guards=(),
    )
    return build(program, record, originals=_inside(originals, region.path))


def _inside(originals: Originals | None, path: str) -> Originals | None:
    """The originals of a module, which by itself has no hooks: its graph keeps them."""
    if originals is None:
        return None
    prefix = f"{path}."
    module = copy.copy(originals.model.get_submodule(path))
    for name in HOOKS:
        vars(module)[name] = {}
    kept = {name.removeprefix(prefix): layer for name, layer in originals.kept.items()
            if name.startswith(prefix)}  # fmt: skip
    return Originals(module, kept)


def _program(region: Region, call: _Call, whole: Program, module: nn.Module) -> Program:
    """The program of a region, its inputs and outputs those of its module."""
    assert call.inputs is not None
    graph, mapping = fx.Graph(), dict[fx.Node, fx.Node]()
    leaves, in_spec = pytree.tree_flatten((call.args, dict(call.kwargs or {})))
    for k, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            # The code around may give a tensor in other calls: masks are often left out.
            raise Unlike(f"{region.path} takes {leaf!r:.40}, which is no tensor", region.path)
        input_, node = graph.placeholder(f"input_{k}"), call.inputs.get(k)
        input_.meta["val"] = node.meta["val"] if node is not None else leaf
        if node is not None:
            mapping[node] = input_
    constants = _Constants(region.path, whole)
    for node in region.inputs:
        _compute(node, graph, mapping, constants, region.path)
    for node in region.nodes:
        _copy(node, graph, mapping, constants, region.path)
    values = [mapping[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in call.outputs]
    graph.output(tuple(values))
    names = _names(module, call)
    return Program(graph, constants.own, in_spec, call.out_spec, names, training=whole.training)


class _Constants:
    """The constants that a region reads, by their names in its module."""

    def __init__(self, path: str, program: Program) -> None:
        self.path, self.all = path, program.constants
        self.own: dict[str, Constant] = {}

    def take(self, target: str) -> str:
        """The name in the module of a constant of the program. Raises Unlike for a parameter that
        is others', too."""
        constant, prefix = self.all[target], f"{self.path}."
        names = constant.aliases or (constant.name,)
        inside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        if constant.parameter and len(inside) < len(names):
            raise Unlike(f"{self.path} shares {target} with other modules", self.path)
        name = target.removeprefix(prefix)
        if not target.startswith(prefix):
            name = "constant_" + target.replace(".", "_")
        aliases = tuple(inside) if constant.aliases else ()
        self.own[name] = replace(constant, name=name, aliases=aliases)
        return name


def _compute(
    node: fx.Node, graph: fx.Graph, mapping: dict[fx.Node, fx.Node], constants: _Constants,
    path: str,
) -> None:  # fmt: skip
    """Compute in a region a value from elsewhere that is none of its module's arguments: a size,
    or what follows from sizes and constants. Raises Unlike."""
    if node in mapping:
        return
    if node.op == "get_attr":
        _copy(node, graph, mapping, constants, path)
        return
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        for source, input_ in list(mapping.items()):
            tensor = source.meta.get("val")
            if input_.op != "placeholder" or not isinstance(tensor, Tensor):
                continue
            for axis, size in enumerate(tensor.shape):
                if isinstance(size, torch.SymInt) and size.node.expr == value.node.expr:
                    size_of = torch.ops.aten.sym_size.int
                    mapping[node] = graph.call_function(size_of, (input_, axis))
                    mapping[node].meta["val"] = value
                    return
    if node.op != "call_function":
        raise Unlike(f"{path} reads a value that is none of its arguments ({node})", path)
    for source in node.all_input_nodes:
        _compute(source, graph, mapping, constants, path)
    _copy(node, graph, mapping, constants, path)


def _copy(
    node: fx.Node, graph: fx.Graph, mapping: dict[fx.Node, fx.Node], constants: _Constants,
    path: str,
) -> None:  # fmt: skip
    """Copy a call into the graph of a region; its module's names begin there."""
    for source in node.all_input_nodes:
        if source not in mapping:  # a constant
            _copy(source, graph, mapping, constants, path)
    if node.op == "get_attr":
        new = graph.create_node("get_attr", constants.take(str(node.target)))
    else:
        new = graph.node_copy(node, lambda n: mapping[n])
    new.meta = dict(node.meta)
    stack = {key: (name.removeprefix(f"{path}."), kind)
             for key, (name, kind) in (node.meta.get("nn_module_stack") or {}).items()
             if name.startswith(f"{path}.")}  # fmt: skip
    new.meta["nn_module_stack"] = stack
    mapping[node] = new


def _names(module: nn.Module, call: _Call) -> tuple[str, ...]:
    """The names of forward's arguments, in the order of the call."""
    named = inspect.signature(module.forward).parameters.values()
    plain = [p.name for p in named if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    more = [f"args_{k}" for k in range(len(call.args) - len(plain))]
    return (*plain[: len(call.args)], *more, *(call.kwargs or {}))
