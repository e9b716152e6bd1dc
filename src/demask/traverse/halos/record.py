"""The calls of one run of a model, recorded on tensors that hold no data.

torch.export proves much that a halo does not need, and takes seconds for hundreds of layers. Here
a dispatch mode writes down the calls as they come: in inference mode torch hands it composite ops
(conv2d, linear, group_norm) whole, which is the level of the table. What the recording cannot
follow (a value that decides which way to go, a write through a view) is left to torch.export.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.compat.dispatch import (
    OpOverload,
    TorchDispatchMode,
    base_name,
    is_mutable,
    overload_name,
)
from demask.graph.capture.capture import capture
from demask.graph.capture.fold_constants import folded
from demask.graph.capture.functionalize import functionalized
from demask.graph.module_copy import structural_copy
from demask.graph.normalize.canonical_calls import spelled
from demask.graph.result.demasked_module import exportable
from demask.ops import Table
from demask.ops.entry import op_name


@dataclass(frozen=True, slots=True)
class HaloRecording:
    """The calls of one run that depend on the inputs.

    inputs, outputs: a node per leaf of (args, kwargs) and of what the model returns; None for what
    is no tensor or, of outputs, depends on no input. Nodes have meta["val"], and meta["module"],
    the path of the module that made the call.
    """

    graph: fx.Graph
    inputs: tuple[fx.Node | None, ...]
    outputs: tuple[fx.Node | None, ...]


class _Lost(Exception):
    """The recording cannot follow the model; the message says why."""


def recorded(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    table: Table,
) -> HaloRecording:
    """The calls of `model(*args, **kwargs)` in eval mode; the model is not changed.

    Raises what `capture` raises where neither way takes the model.
    """
    if isinstance(model, ExportedProgram):
        return _exported(model, args, kwargs)
    try:
        found = _run(exportable(structural_copy(model, share=True).eval()), args, kwargs)
    except Exception:  # whatever it was: export says it better, or takes the model
        return _exported(model, args, kwargs)
    known = all(_is_known(node, table) for node in found.graph.nodes)
    return found if known else _exported(model, args, kwargs)


def _is_known(node: fx.Node, table: Table) -> bool:
    is_op = isinstance(node.target, OpOverload)
    return not is_op or op_name(node.target) in table


def _exported(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> HaloRecording:
    """By torch.export, with in-place ops and ops outside the table respelled."""
    program = spelled(folded(functionalized(capture(model, args, kwargs, dynamic_shapes={}))))
    inputs = [n if isinstance(n.meta.get("val"), Tensor) else None
              for n in program.graph.find_nodes(op="placeholder")]  # fmt: skip
    for node in program.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        path = next(reversed([entry[0] for entry in stack.values()]), "")
        node.meta["module"] = path.removeprefix("L['self']").lstrip(".")
    (result,) = next(iter(program.graph.find_nodes(op="output"))).args
    outputs: Any = [n if isinstance(n, fx.Node) else None for n in result]  # type: ignore[union-attr]
    return HaloRecording(program.graph, tuple(inputs), tuple(outputs))


def _run(work: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> HaloRecording:
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    mode = _HaloRecorder()
    nodes: list[fx.Node | None] = [None] * len(leaves)
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[k] = torch.empty_like(leaf, device="meta", requires_grad=False)
            nodes[k] = mode.input(leaves[k])
    for name, module in work.named_modules():
        module.register_forward_pre_hook(_entering(mode.where, name))
        module.register_forward_hook(_leaving(mode.where))
    given, named = pytree.tree_unflatten(leaves, spec)
    with torch.inference_mode(), mode:
        result = work(*given, **named)
    made = [mode.node(v) for v in pytree.tree_leaves(result)]
    return HaloRecording(mode.graph, tuple(nodes), tuple(made))


def _entering(where: list[str], name: str) -> Callable[..., None]:
    return lambda *_: where.append(name)


def _leaving(where: list[str]) -> Callable[..., None]:
    def leave(*_: Any) -> None:
        where.pop()  # a hook that returns something replaces the module's output

    return leave


class _HaloRecorder(TorchDispatchMode):
    """Writes down every call that reads a tensor that depends on an input; such tensors are meta
    tensors, all others are real, and calls among them run.

    where: the modules being called, innermost last. held: all recorded tensors by id, with their
    node: kept alive, so that an id stays theirs. shared: the same by storage. like: what calls that
    are alike made, a new tensor each: torch takes long to find that out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.where = [""]
        self.held: dict[int, tuple[Tensor, fx.Node]] = {}
        self.constants: dict[int, tuple[Tensor, fx.Node]] = {}
        self.shared: dict[int, list[Tensor]] = {}
        self.like: dict[Any, tuple[Any, ...]] = {}

    def input(self, tensor: Tensor) -> fx.Node:
        node = self.graph.placeholder(f"input_{len(self.held)}")
        node.meta["val"] = tensor
        return self._hold(tensor, node)

    def node(self, value: Any) -> fx.Node | None:
        return self.held[id(value)][1] if id(value) in self.held else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        if not any(id(leaf) in self.held for leaf in leaves):
            return func(*args, **(kwargs or {}))
        made = self._made(func, [self._value(leaf) for leaf in leaves], spec)
        calls = [self._operand(leaf) for leaf in leaves]
        operands, keywords = pytree.tree_unflatten(calls, spec)
        if is_mutable(func):
            self._write(func, args, operands, keywords)
            return args[0]
        node = self._call(func, operands, keywords, made)
        if isinstance(made, Tensor):
            self._hold(made, node)
            return made
        for k, part in enumerate(made):
            if isinstance(part, Tensor):
                self._hold(part, self._call(operator.getitem, (node, k), {}, part))
        return made

    def _made(self, func: Any, leaves: list[Any], spec: Any) -> Any:
        """What a call makes of tensors without data."""
        key = (func, spec, *map(_described, leaves))
        if key in self.like:
            return torch.empty_strided(*self.like[key][:2], dtype=self.like[key][2], device="meta")
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        made = func(*args, **kwargs)
        if isinstance(made, Tensor):
            given = {_storage(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
            if _storage(made) not in given and not is_mutable(func):
                self.like[key] = (made.shape, made.stride(), made.dtype)
        return made

    def _call(self, target: Any, args: Any, kwargs: Any, made: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(val=made, module=self.where[-1])
        return node

    def _write(self, func: Any, args: Any, operands: Any, keywords: Any) -> None:
        """An in-place call is recorded as the op that makes a new value."""
        name = base_name(func)
        plain = getattr(torch.ops.aten, name.removesuffix("_"), None)
        plain = getattr(plain, overload_name(func), None)
        if not name.endswith("_") or plain is None or id(args[0]) not in self.held:
            raise _Lost(f"{func} writes into what is no value of its own")
        alike = self.shared[_storage(args[0])]
        if any(_geometry(tensor) != _geometry(args[0]) for tensor in alike):
            raise _Lost(f"{func} writes through a view")
        node = self._call(plain, operands, keywords, args[0])
        for tensor in alike:
            self.held[id(tensor)] = (tensor, node)

    def _hold(self, tensor: Tensor, node: fx.Node) -> fx.Node:
        if id(tensor) not in self.held:
            self.shared.setdefault(_storage(tensor), []).append(tensor)
        self.held[id(tensor)] = (tensor, node)
        return node

    def _value(self, leaf: Any) -> Any:
        """What a call is run on: no data."""
        if not isinstance(leaf, Tensor) or id(leaf) in self.held:
            return leaf
        return self._constant(leaf).meta["val"]

    def _operand(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return self.node(leaf) or self._constant(leaf)

    def _constant(self, tensor: Tensor) -> fx.Node:
        if id(tensor) in self.constants:
            return self.constants[id(tensor)][1]
        node = self.graph.create_node("get_attr", f"constant_{len(self.constants)}")
        node.meta["val"] = tensor.to("meta")
        if not tensor.is_floating_point() and not tensor.is_meta:
            node.meta["positions"] = tensor
        self.constants[id(tensor)] = (tensor, node)
        return node


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.shape, leaf.stride()
    return type(leaf), leaf if isinstance(leaf, (int, float, bool)) else repr(leaf)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()
