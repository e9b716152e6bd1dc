"""Adding calls to a graph so that every node knows the (fake) value it makes."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from demask.errors import NotExportable
from demask.graph.shapes import shapes_only
from demask.ops.recurrent import GATES
from demask.ops.schema import same_size

ADVICE = (
    "sizes here depend on the values of a tensor; make them numbers, or demask only a part that "
    "does not hold this call: modules=['backbone']"
)


class Builder:
    """Appends calls to a graph; each gets meta["val"] by a run on its operands' fake values."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode):
        self.graph, self.mode = graph, mode

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of `target`; operands may be nodes, numbers, lists of both."""
        node = self.graph.call_function(target, args, kwargs)
        self.value(node)
        return node

    def call_shaped(
        self, shape: Any, like: fx.Node, target: Any, args: Any, kwargs: Any
    ) -> fx.Node:
        """A call known to make a dense tensor of a shape, of the dtype of its operand `like`: told
        so, where a run on fake values would take sums over symbols to find it."""
        value = like.meta["val"]
        if not value.is_contiguous():
            return self.call(target, *args, **kwargs)
        node = self.graph.call_function(target, tuple(args), kwargs)
        same = len(shape) == value.ndim and all(map(same_size, shape, value.shape))
        with self.mode, torch.no_grad():
            node.meta["val"] = value if same else value.new_empty(shape)
        return node

    def value(self, node: fx.Node) -> None:
        """Give a call_function node its fake value."""
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        env = self.mode.shape_env
        # Asking a dynamic size a question (is it 2?) must not make the answer true of it.
        unasked = env.suppress_guards() if env is not None else contextlib.nullcontext()
        shaped = shapes_only() if str(node.target) in GATES else contextlib.nullcontext()
        with self.mode, unasked, shaped, enable_python_dispatcher(), torch.no_grad():
            try:
                node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
            except GuardOnDataDependentSymNode as error:
                first = str(error).strip().splitlines()[0]
                raise NotExportable(f"{node.target}: {first}", node.name, ADVICE) from error

    def fake(self, tensor: Tensor) -> Tensor:
        """The fake twin of a real tensor, all sizes static."""
        return self.mode.from_tensor(tensor, static_shapes=True)


def mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The fake mode the graph was captured under (a new one for a graph without tensors)."""
    for node in graph.nodes:
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    return FakeTensorMode()


def sizes_of(build: Builder, node: fx.Node) -> list[Any]:
    """The sizes of a node's value as call arguments: numbers, or nodes that read them."""
    value = node.meta["val"]
    return [
        size if isinstance(size, int) else build.call(torch.ops.aten.sym_size.int, node, axis)
        for axis, size in enumerate(value.shape)
    ]


def same_shape(a: Tensor, b: Tensor) -> bool:
    """Are two fake tensors of one shape, dynamic sizes included, without guarding on them?"""
    return a.ndim == b.ndim and all(same_size(m, n) for m, n in zip(a.shape, b.shape, strict=True))
