"""Regions that torch.export keeps as graphs of their own are put back into the graph around them.

A `with torch.no_grad():` in a model exported with gradients is one, a disabled autocast another.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from demask.errors import NotExportable

_GRAD, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"


def inlined(module: fx.GraphModule) -> fx.Graph:
    """The module's graph without such regions. Raises NotExportable for a region under an autocast
    that is enabled, whose casts stand in no graph."""
    if _region(module.graph) is None:
        return module.graph
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, mapping)
    graph.output(result)
    while (node := _region(graph)) is not None:
        _inline(graph, node, module)
    return graph


def _region(graph: fx.Graph) -> fx.Node | None:
    calls = (node for node in graph.nodes if node.op == "call_function")
    return next((n for n in calls if str(n.target) in (_GRAD, _AUTOCAST)), None)


def _inline(graph: fx.Graph, node: fx.Node, module: fx.GraphModule) -> None:
    """Put the region's calls in the place of the call of the region."""
    cast = str(node.target) == _AUTOCAST
    if cast and node.args[2]:
        raise NotExportable(
            "a part of the model runs under torch.autocast",
            "unknown",
            "convert the model to the type that autocast would use, or export it without",
        )
    args: Any = node.args[4:] if cast else node.args[1:]
    held, *inputs = args
    region: Any = module.get_submodule(str(held.target))
    places = [n for n in region.graph.nodes if n.op == "placeholder"]
    mapping: dict[fx.Node, Any] = dict(zip(places, inputs, strict=True))
    with graph.inserting_before(node):
        made: Any = graph.graph_copy(region.graph, mapping)
    for user in list(node.users):
        if user.target is operator.getitem and isinstance(made, (tuple, list)):
            user.replace_all_uses_with(made[user.args[1]])  # type: ignore[index]
            graph.erase_node(user)
    if isinstance(made, fx.Node):
        node.replace_all_uses_with(made)
    graph.erase_node(node)
    if not held.users:
        graph.erase_node(held)
