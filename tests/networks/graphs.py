"""demask() with a graph for a result, for tests of what stands in one."""

from __future__ import annotations

import functools

from torch import fx, nn

import demask

to_graph = functools.partial(demask.demask, result="graph")


def form_of(slim: nn.Module) -> str:
    """What came back: a network of its own "class", one with graphs for "parts", or a "graph"."""
    if isinstance(slim, fx.GraphModule):
        return "graph"
    return "parts" if any(isinstance(m, fx.GraphModule) for m in slim.modules()) else "class"
