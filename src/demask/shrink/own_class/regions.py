"""The modules of a smaller program that become graphs: the smallest that preserve shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn

from demask.graph.program import Program
from demask.graph.result.module_calls import kind_of
from demask.graph.result.resize import has_numbers
from demask.shrink.own_class.numbers import is_below
from demask.shrink.own_class.proof import ProgramMismatch, path_of


@dataclass(frozen=True, slots=True)
class ModuleRegion:
    """The calls of one module in a program. inputs: values from elsewhere that they read. outputs:
    their values that are read elsewhere."""

    path: str
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def regions_of(program: Program, model: nn.Module, places: Iterable[str]) -> list[ModuleRegion]:
    """The smallest modules that contain what preserves shapes by more than smaller layers, and
    `places`. Raises ProgramMismatch where that is the whole model."""
    modules = _Modules(program, model)
    owners: dict[fx.Node, str] = {}
    for node in program.graph.nodes:
        if "effect" in node.meta:
            owners[node] = modules.owner(node)
    wanted = {*owners.values(), *map(modules.around, places)}
    if "" in wanted:
        raise ProgramMismatch("more than shapes changed between the modules of the whole model")
    paths = [path for path in sorted(wanted)
             if not any(path != other and is_below(path, [other]) for other in wanted)]  # fmt: skip
    order = {node: k for k, node in enumerate(program.graph.nodes)}
    regions, taken = [], dict[fx.Node, str]()
    for path in paths:
        inside = {node for node in order if path in modules.scopes(node)}
        effects = {node for node, owner in owners.items() if is_below(owner, [path])}
        own = _close((inside - owners.keys()) | effects, order)
        for node in own:
            if node in taken:
                raise ProgramMismatch(f"{path} and {taken[node]} are computed in one another", path)
            taken[node] = path
        regions.append(_build_region(path, sorted(own, key=order.__getitem__)))
    return regions


class _Modules:
    """The modules of a model whose calls can be identified in a program."""

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
        """The smallest module around a place that a graph can replace; "" for the whole model."""
        while path and path not in self.graphs:
            path = path.rpartition(".")[0]
        return path

    def owner(self, effect: fx.Node) -> str:
        """The module that computes a node that preserves a shape: that of all its readers, or that
        of all its operands, whichever is smaller."""
        readers = self._common(_nearest_beyond(effect, lambda node: list(node.users)))
        sources = self._common(_nearest_beyond(effect, _tensors_read))
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
    """The paths of the modules in whose code a call is, the outermost first."""
    return tuple(path for path, _ in (node.meta.get("nn_module_stack") or {}).values())


def _tensors_read(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if n.op != "get_attr"]


def _nearest_beyond(effect: fx.Node, step: Callable[[fx.Node], list[fx.Node]]) -> list[fx.Node]:
    """The nearest nodes in a direction that do not preserve shapes themselves."""
    nearest, stack = [], step(effect)
    while stack:
        node = stack.pop()
        if "effect" in node.meta:
            stack += step(node)
        elif isinstance(node.meta.get("val"), Tensor) or node.op == "output":
            nearest.append(node)
    return nearest


def _close(own: set[fx.Node], order: dict[fx.Node, int]) -> set[fx.Node]:
    """The nodes, and those on a path between them."""
    after: set[fx.Node] = set()
    for node in order:
        if any(n in own or n in after for n in node.all_input_nodes):
            after.add(node)
    before: set[fx.Node] = set()
    for node in reversed(order):
        if any(n in own or n in before for n in node.users):
            before.add(node)
    return own | (after & before)


def _build_region(path: str, nodes: Sequence[fx.Node]) -> ModuleRegion:
    own = set(nodes)
    inputs = dict.fromkeys(n for node in nodes for n in node.all_input_nodes
                           if n not in own and n.op != "get_attr")  # fmt: skip
    outputs = [n for n in nodes if n.op != "get_attr" and any(user not in own for user in n.users)]
    return ModuleRegion(path, tuple(nodes), tuple(inputs), tuple(outputs))
