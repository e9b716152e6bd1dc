"""Adding calls to a graph so that every node knows the (fake) value it makes."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from demask.compat.fake_shapes import shapes_only
from demask.compat.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    disable_fake_tensor_cache,
    enable_python_dispatcher,
    is_contiguous_or_false,
)
from demask.compat.symbolic_shapes import GuardOnDataDependentSymNode
from demask.errors import NotExportable
from demask.ops.recurrent import GATES
from demask.ops.schema import same_size
from demask.ops.traits import VIEWS

ADVICE = (
    "sizes here depend on the values of a tensor; make them numbers, or demask only a part that "
    "does not hold this call: modules=['backbone']"
)


@dataclass(slots=True)
class _Values:
    """Fake values of one mode, by what makes them: passes make the same calls again and again, and
    running one on sizes that are symbols takes a millisecond.

    shapes: by the id of a fake tensor, the tensor (so that the id stays its own) and its metadata.
    """

    calls: dict[Hashable, Any] = field(default_factory=dict)
    shapes: dict[int, tuple[Tensor, Hashable]] = field(default_factory=dict)

    @classmethod
    def of(cls, mode: FakeTensorMode) -> _Values:
        """Those of a mode, which owns them: they live as long as it does."""
        return vars(mode).setdefault("demask_values", cls())

    def key(self, value: Any) -> Hashable:
        """What of an argument decides what a call makes. Numbers of different types differ.
        Raises TypeError for what cannot be compared."""
        if isinstance(value, Tensor):
            if id(value) not in self.shapes:
                self.shapes[id(value)] = (value, _metadata(value))
            return self.shapes[id(value)][1]
        if isinstance(value, (list, tuple)):
            return tuple(map(self.key, value))
        if isinstance(value, dict):
            return tuple((name, self.key(item)) for name, item in value.items())
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return (type(value), value.node.expr)
        hash(value)
        return (type(value), value)


def _metadata(value: Tensor) -> Hashable:
    """Type, sizes, strides, offset, dtype, device and flags of a tensor, fake or real."""
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    numbers = tuple(n if isinstance(n, int) else n.node.expr for n in sizes)
    return (type(value), value.ndim, numbers, value.dtype, value.device, value.requires_grad,
            value.is_conj(), value.is_neg())  # fmt: skip


class Builder:
    """Appends calls to a graph; each gets meta["val"] by a run on its operands' fake values, shared
    with equal calls: its metadata counts, not its memory. replaced: the call that new ones stand
    for, in the same module, if it is known."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode):
        self.graph, self.mode = graph, mode
        self.replaced: fx.Node | None = None
        self.values = _Values.of(mode)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of `target`; operands may be nodes, numbers, lists of both. A view of what is not
        dense, which may be refused, is a reshape."""
        if target in VIEWS and not self._is_contiguous(args[0].meta["val"]):
            target = torch.ops.aten.reshape.default
        node = self._call(target, args, kwargs)
        self.value(node)
        return node

    def _call(self, target: Any, args: Any, kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        if self.replaced is not None and "nn_module_stack" in self.replaced.meta:
            node.meta["nn_module_stack"] = self.replaced.meta["nn_module_stack"]
        return node

    def call_shaped(
        self, shape: Any, like: fx.Node, target: Any, args: Any, kwargs: Any
    ) -> fx.Node:
        """A call known to make a dense tensor of a shape, of the dtype of its operand `like`: told
        so, where a run on fake values would take sums over symbols to find it."""
        value = like.meta["val"]
        if not self._is_contiguous(value):
            return self.call(target, *args, **kwargs)
        node = self._call(target, tuple(args), kwargs)
        same = len(shape) == value.ndim and all(map(same_size, shape, value.shape))
        node.meta["val"] = value if same else self._dense(shape, value)
        return node

    def _is_contiguous(self, value: Tensor) -> bool:
        key = ("is_contiguous", self.values.key(value))
        if key not in self.values.calls:
            self.values.calls[key] = is_contiguous_or_false(value)
        return self.values.calls[key]

    def _dense(self, shape: Any, like: Tensor) -> Tensor:
        """A dense fake tensor of a shape."""
        key = (self.values.key(tuple(shape)), like.dtype, like.device)
        if key not in self.values.calls:
            with self.mode, torch.no_grad():
                self.values.calls[key] = like.new_empty(shape)
        return self.values.calls[key]

    def value(self, node: fx.Node) -> None:
        """Give a call_function node its fake value."""
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        try:
            key = (node.target, self.values.key(args), self.values.key(kwargs))
        except TypeError:
            node.meta["val"] = self.run(node, args, kwargs)
            return
        if key not in self.values.calls or _is_unique(node.target):
            self.values.calls[key] = self.run(node, args, kwargs)
        node.meta["val"] = self.values.calls[key]

    def run(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """What a call makes of fake operands, in memory of its own or in theirs."""
        env = self.mode.shape_env
        # Asking a dynamic size a question (is it 2?) must not make the answer true of it.
        unasked = env.suppress_guards() if env is not None else contextlib.nullcontext()
        shaped = shapes_only() if str(node.target) in GATES else contextlib.nullcontext()
        # torch's own cache makes each value twice, and this class keeps them itself.
        cacheless = disable_fake_tensor_cache(self.mode)
        with self.mode, unasked, shaped, cacheless, enable_python_dispatcher(), torch.no_grad():
            try:
                return node.target(*args, **kwargs)  # type: ignore[operator]
            except GuardOnDataDependentSymNode as error:
                first = str(error).strip().splitlines()[0]
                raise NotExportable(f"{node.target}: {first}", node.name, ADVICE) from error

    def fake(self, tensor: Tensor) -> Tensor:
        """A fake tensor like a real one, all sizes static."""
        if tensor.layout is not torch.strided:
            return self.mode.from_tensor(tensor, static_shapes=True)
        key = _metadata(tensor)
        if key not in self.values.calls:
            self.values.calls[key] = self.mode.from_tensor(tensor, static_shapes=True)
        return self.values.calls[key]


def _is_unique(target: Any) -> bool:
    """Does every call make sizes of its own, which values decide?"""
    tags = getattr(target, "tags", ())
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


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
