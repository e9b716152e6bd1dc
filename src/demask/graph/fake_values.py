"""Fake values of calls: tensors without data, shared by equal calls."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
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
from demask.ops.entries.recurrent import GATES

ADVICE = (
    "sizes here depend on the values of a tensor; make them numbers, or demask only a part without "
    "this call: modules=[names of submodules], or modules='auto'"
)


@dataclass(slots=True, eq=False)
class FakeValues:
    """A cache of the fake values of one mode: passes repeat calls, and a call on symbolic sizes
    takes a millisecond. Shared values have the same metadata, not the same memory.

    cache: values by the call, or by the metadata, that determines them. metadata: by the id of a
    fake tensor, the tensor (so that its id is not reused) and its metadata.
    """

    mode: FakeTensorMode
    cache: dict[Hashable, Any] = field(default_factory=dict)
    metadata: dict[int, tuple[Tensor, Hashable]] = field(default_factory=dict)

    @classmethod
    def of(cls, mode: FakeTensorMode) -> FakeValues:
        """The cache of a mode, stored in the mode."""
        return vars(mode).setdefault("demask_values", cls(mode))

    def call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """The value of a call with fake operands."""
        try:
            key = (node.target, self._key(args), self._key(kwargs))
        except TypeError:
            return self._run(node, args, kwargs)
        if key not in self.cache or _is_unique(node.target):
            self.cache[key] = self._run(node, args, kwargs)
        return self.cache[key]

    def like(self, tensor: Tensor) -> Tensor:
        """A fake tensor with the metadata of a real one; all sizes are static."""
        if tensor.layout is not torch.strided:
            return self.mode.from_tensor(tensor, static_shapes=True)
        key = _metadata(tensor)
        if key not in self.cache:
            self.cache[key] = self.mode.from_tensor(tensor, static_shapes=True)
        return self.cache[key]

    def dense(self, shape: Any, like: Tensor) -> Tensor:
        """A dense fake tensor of a shape, with the dtype and device of another tensor."""
        key = (self._key(tuple(shape)), like.dtype, like.device)
        if key not in self.cache:
            with self.mode, torch.no_grad():
                self.cache[key] = like.new_empty(shape)
        return self.cache[key]

    def is_contiguous(self, value: Tensor) -> bool:
        """Whether a fake tensor is contiguous for all values of its symbols."""
        key = ("is_contiguous", self._key(value))
        if key not in self.cache:
            self.cache[key] = is_contiguous_or_false(value)
        return self.cache[key]

    def _key(self, value: Any) -> Hashable:
        """The cache key of an argument. Numbers of different types have different keys. Raises
        TypeError for values that are not hashable."""
        if isinstance(value, Tensor):
            if id(value) not in self.metadata:
                self.metadata[id(value)] = (value, _metadata(value))
            return self.metadata[id(value)][1]
        if isinstance(value, (list, tuple)):
            return tuple(map(self._key, value))
        if isinstance(value, dict):
            return tuple((name, self._key(item)) for name, item in value.items())
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return (type(value), value.node.expr)
        hash(value)
        return (type(value), value)

    def _run(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """The value of a call with fake operands, computed by torch. Raises NotExportable."""
        target: Any = node.target
        env = self.mode.shape_env
        # A comparison with a dynamic size (is it 2?) must not add a guard.
        without_guards = env.suppress_guards() if env is not None else contextlib.nullcontext()
        shapes_alone = shapes_only() if str(node.target) in GATES else contextlib.nullcontext()
        # torch's own cache would compute each value twice.
        without_cache = disable_fake_tensor_cache(self.mode)
        with self.mode, without_guards, shapes_alone, without_cache, enable_python_dispatcher(), torch.no_grad():
            try:
                return target(*args, **kwargs)
            except GuardOnDataDependentSymNode as error:
                first = str(error).strip().splitlines()[0]
                raise NotExportable(f"{node.target}: {first}", node.name, ADVICE) from error


def _metadata(value: Tensor) -> Hashable:
    """Type, sizes, strides, offset, dtype, device and flags of a tensor, fake or real."""
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    numbers = tuple(n if isinstance(n, int) else n.node.expr for n in sizes)
    return (
        type(value),
        value.ndim,
        numbers,
        value.dtype,
        value.device,
        value.requires_grad,
        value.is_conj(),
        value.is_neg(),
    )


def _is_unique(target: Any) -> bool:
    """Whether each call has new sizes, which depend on values."""
    tags = getattr(target, "tags", ())
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


def mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The fake mode of a graph's values; a new one for a graph without tensors."""
    for node in graph.nodes:
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    return FakeTensorMode()
