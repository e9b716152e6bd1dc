"""The calls of one run of a model, recorded on tensors without data.

torch.export proves much that a halo does not need, and takes seconds for hundreds of layers. This
dispatch mode records the calls as they run: in inference mode torch dispatches composite ops
(conv2d, linear, group_norm) whole, which is the level of the table. Models that the recording does
not support (control flow that depends on values, writes through views) go through torch.export.
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

from demask.compat.dispatch import OpOverload, TorchDispatchMode, base_name, is_mutable, overload_name
from demask.failures import is_strict
from demask.graph.capture.capture import capture
from demask.graph.capture.fold_constants import fold_constants
from demask.graph.capture.functionalize import functionalize
from demask.graph.module_copy import structural_copy
from demask.graph.result.demasked_module import to_exportable
from demask.ops import Table
from demask.ops.entry import op_name
from demask.ops.schema import fake
from demask.rewrites.driver import rewrite
from demask.rewrites.normalize import CANONICAL


@dataclass(frozen=True, slots=True)
class HaloRecording:
    """The calls of one run that depend on the inputs.

    inputs, outputs: a node per leaf of (args, kwargs) and of the result; None for leaves that are
    no tensors, and for outputs that depend on no input. Nodes have meta["val"], and meta["module"],
    the path of the calling module.
    """

    graph: fx.Graph
    inputs: tuple[fx.Node | None, ...]
    outputs: tuple[fx.Node | None, ...]


class _NotRecordable(Exception):
    """The recording does not support the model; the message contains the reason."""


def record_calls(
    model: nn.Module | ExportedProgram, args: tuple[Any, ...], kwargs: Mapping[str, Any], table: Table
) -> HaloRecording:
    """The calls of `model(*args, **kwargs)` in eval mode; the model is not changed.

    Raises:
        NotExportable, BadInput: as `capture`, if neither recording nor export supports the model.
    """
    if isinstance(model, ExportedProgram):  # as a module, which is captured at the example's sizes
        return _exported(model.module(check_guards=False), args, kwargs)
    try:
        recording = _run(to_exportable(structural_copy(model, share=True).eval()), args, kwargs)
    except Exception as error:  # export has a better message, or supports the model
        exported = _exported(model, args, kwargs)
        if is_strict() and not isinstance(error, _NotRecordable):
            raise
        return exported
    is_known = all(_is_known(node, table) for node in recording.graph.nodes)
    return recording if is_known else _exported(model, args, kwargs)


def _is_known(node: fx.Node, table: Table) -> bool:
    is_op = isinstance(node.target, OpOverload)
    return not is_op or op_name(node.target) in table


def _exported(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> HaloRecording:
    """The recording by torch.export, functional and canonical."""
    program = rewrite(fold_constants(functionalize(capture(model, args, kwargs, dynamic_shapes={}))), CANONICAL)
    inputs = [n if isinstance(n.meta.get("val"), Tensor) else None for n in program.graph.find_nodes(op="placeholder")]
    for node in program.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        path = next(reversed([entry[0] for entry in stack.values()]), "")
        node.meta["module"] = path.removeprefix("L['self']").lstrip(".")
    (result,) = next(iter(program.graph.find_nodes(op="output"))).args
    outputs: Any = [n if isinstance(n, fx.Node) else None for n in result]
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
        module.register_forward_pre_hook(_entering(mode.modules, name))
        module.register_forward_hook(_leaving(mode.modules))
    meta_args, meta_kwargs = pytree.tree_unflatten(leaves, spec)
    with torch.inference_mode(), mode:
        result = work(*meta_args, **meta_kwargs)
    outputs = [mode.node(v) for v in pytree.tree_leaves(result)]
    return HaloRecording(mode.graph, tuple(nodes), tuple(outputs))


def _entering(modules: list[str], name: str) -> Callable[..., None]:
    return lambda *_: modules.append(name)


def _leaving(modules: list[str]) -> Callable[..., None]:
    def leave(*_: Any) -> None:
        modules.pop()  # a hook that returns something replaces the module's output

    return leave


class _HaloRecorder(TorchDispatchMode):
    """A mode that records every call that reads a tensor that depends on an input. Such tensors are
    meta tensors; all others are real, and calls among them run.

    modules: names of the modules being called, innermost last. recorded: tensors with their node by
    id; they stay alive, so that no id is reused. aliases: recorded tensors by storage. results:
    shape, strides and dtype by call, as torch takes long to compute them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.modules = [""]
        self.recorded: dict[int, tuple[Tensor, fx.Node]] = {}
        self.constants: dict[int, tuple[Tensor, fx.Node]] = {}
        self.aliases: dict[int, list[Tensor]] = {}
        self.results: dict[Any, tuple[Any, ...]] = {}

    def input(self, tensor: Tensor) -> fx.Node:
        node = self.graph.placeholder(f"input_{len(self.recorded)}")
        node.meta["val"] = tensor
        return self._remember(tensor, node)

    def node(self, value: Any) -> fx.Node | None:
        return self.recorded[id(value)][1] if id(value) in self.recorded else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        if not any(id(leaf) in self.recorded for leaf in leaves):
            return func(*args, **(kwargs or {}))
        result = self._result(func, [self._value(leaf) for leaf in leaves], spec)
        nodes = [self._operand(leaf) for leaf in leaves]
        operands, keywords = pytree.tree_unflatten(nodes, spec)
        if is_mutable(func):
            self._write(func, args, operands, keywords)
            return args[0]
        node = self._call(func, operands, keywords, result)
        if isinstance(result, Tensor):
            self._remember(result, node)
            return result
        for k, part in enumerate(result):
            if isinstance(part, Tensor):
                self._remember(part, self._call(operator.getitem, (node, k), {}, part))
        return result

    def _result(self, func: Any, leaves: list[Any], spec: Any) -> Any:
        """The result of a call on tensors without data."""
        key = (func, spec, *map(_describe, leaves))
        if key in self.results:
            return torch.empty_strided(*self.results[key][:2], dtype=self.results[key][2], device="meta")
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            storages = {_storage(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
            if _storage(result) not in storages and not is_mutable(func):
                self.results[key] = (result.shape, result.stride(), result.dtype)
        return result

    def _call(self, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(val=value, module=self.modules[-1])
        return node

    def _write(self, func: Any, args: Any, operands: Any, keywords: Any) -> None:
        """Record an in-place call as the op that returns a new value."""
        name = base_name(func)
        functional = getattr(torch.ops.aten, name.removesuffix("_"), None)
        functional = getattr(functional, overload_name(func), None)
        if not name.endswith("_") or functional is None or id(args[0]) not in self.recorded:
            raise _NotRecordable(f"{func} writes into a value that no input determines")
        aliases = self.aliases[_storage(args[0])]
        if any(_geometry(tensor) != _geometry(args[0]) for tensor in aliases):
            raise _NotRecordable(f"{func} writes through a view")
        node = self._call(functional, operands, keywords, args[0])
        for tensor in aliases:
            self.recorded[id(tensor)] = (tensor, node)

    def _remember(self, tensor: Tensor, node: fx.Node) -> fx.Node:
        if id(tensor) not in self.recorded:
            self.aliases.setdefault(_storage(tensor), []).append(tensor)
        self.recorded[id(tensor)] = (tensor, node)
        return node

    def _value(self, leaf: Any) -> Any:
        """A leaf of a call as the call runs on it: without data."""
        if not isinstance(leaf, Tensor) or id(leaf) in self.recorded:
            return leaf
        return fake(self._constant(leaf))

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


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.shape, leaf.stride()
    return type(leaf), leaf if isinstance(leaf, (int, float, bool)) else repr(leaf)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()
