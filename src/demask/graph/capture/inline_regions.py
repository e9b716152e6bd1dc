"""Inlining of regions that torch.export stores as separate graphs.

Examples: `with torch.no_grad():` in a model exported with gradients, a disabled autocast.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from demask.errors import NotExportable

_GRAD, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"


def inline_regions(module: fx.GraphModule) -> fx.Graph:
    """The module's graph with regions inlined. Raises NotExportable for a region under an enabled
    autocast, whose casts are in no graph."""
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
    """The first call of a region; None if there is none."""
    calls = (node for node in graph.nodes if node.op == "call_function")
    return next((n for n in calls if str(n.target) in (_GRAD, _AUTOCAST)), None)


def _inline(graph: fx.Graph, node: fx.Node, module: fx.GraphModule) -> None:
    """Replace the call of a region by the region's calls."""
    is_autocast = str(node.target) == _AUTOCAST
    if is_autocast and node.args[2]:
        raise NotExportable(
            "a part of the model runs under torch.autocast",
            "unknown",
            "convert the model to the type that autocast would use, or export it without",
        )
    args: Any = node.args[4:] if is_autocast else node.args[1:]
    module_node, *inputs = args
    region: Any = module.get_submodule(str(module_node.target))
    placeholders = [n for n in region.graph.nodes if n.op == "placeholder"]
    mapping: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
    with graph.inserting_before(node):
        output: Any = graph.graph_copy(region.graph, mapping)
    for user in list(node.users):
        if user.target is operator.getitem and isinstance(output, (tuple, list)):
            user.replace_all_uses_with(output[user.args[1]])  # type: ignore[index]
            graph.erase_node(user)
    if isinstance(output, fx.Node):
        node.replace_all_uses_with(output)
    graph.erase_node(node)
    if not module_node.users:
        graph.erase_node(module_node)
