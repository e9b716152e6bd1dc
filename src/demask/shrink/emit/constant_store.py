"""Constants of the new graph: cut tensors, fills and indices; and sizes known at run time."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from demask.errors import DemaskError
from demask.graph.editor import GraphEditor
from demask.graph.program import Constant
from demask.graph.provenance import Cut
from demask.ops.schema import fake
from demask.shrink.layout.cells import Layout


class ConstantStore:
    """Constants and sizes of a graph that is being emitted. Each is added once and read by name."""

    def __init__(self, editor: GraphEditor):
        self.editor, self.source = editor, dict(editor.program.constants)
        self.constants = editor.constants
        self.cuts: dict[str, Cut] = {}
        self._modules: set[str] = set()  # paths that names of constants begin with
        self._reads: dict[str, fx.Node] = {}
        self._cut: dict[Any, str] = {}
        self._index: dict[tuple[int, ...], fx.Node] = {}
        self._ones: dict[Any, fx.Node] = {}
        self._sizes: dict[Any, Any] = {}
        self._numbers: dict[Any, fx.Node] = {}
        self._symbols = _symbols(editor.graph.find_nodes(op="placeholder"))
        # Of sizes known only at run time (a count of nonzeros): what emits each, by its symbol.
        self.size_emitters: dict[Any, Callable[[], fx.Node]] = {}

    def read(self, name: str) -> fx.Node:
        """The get_attr node of a constant."""
        if name not in self._reads:
            self._reads[name] = self.editor.read_constant(name)
        return self._reads[name]

    def cut(self, source: fx.Node, want: Layout) -> fx.Node:
        """The read of an old constant, cut to a layout; equal cuts of tied tensors stay tied. A
        tensor that stays whole is shared."""
        old = self.source[str(source.target)]
        key = (old.name, want)
        if key not in self._cut:
            tied = (old.tensor.data_ptr(), old.tensor.shape, old.tensor.stride(), want)
            twin = self._cut.get(tied)
            constant = old.moved(lambda tensor: _in_memory(select(tensor, want)))
            name = self.add(replace(constant, tensor=self.constants[twin].tensor) if twin else constant)
            self.cuts[name] = Cut(old.name, tuple(old.tensor.shape), want)
            self._cut[key] = name
            self._cut.setdefault(tied, name)
        return self.read(self._cut[key])

    def add(self, constant: Constant) -> str:
        """The name under which a constant is stored: its own, or the next free one like it. Two
        equal constants, for two calls of one module, are stored once."""
        name, k = constant.name, 1
        while name in self.constants or name in self._modules or self._is_inside_tensor(name):
            if name in self.constants and _are_equal_constants(self.constants[name], constant):
                return name
            name, k = f"{constant.name}_{k}", k + 1
        self.constants[name] = replace(constant, name=name)
        self._modules.update(_containers(name))
        return name

    def _is_inside_tensor(self, name: str) -> bool:
        """Whether a name would be an attribute inside another's tensor."""
        return any(path in self.constants for path in _containers(name))

    def constant(self, tensor: Tensor, name: str) -> fx.Node:
        """The read of a new buffer."""
        return self.read(self.add(Constant(tensor.contiguous().clone(), name, parameter=False)))

    def constant_here(self, tensor: Tensor, name: str) -> fx.Node:
        """The read of a new buffer at the insertion point (others are at the first read)."""
        return self.editor.read_constant(self.add(Constant(tensor.contiguous(), name, False)))

    def index(self, positions: Sequence[int]) -> fx.Node:
        """The read of an int64 index buffer."""
        key = tuple(positions)
        if key not in self._index:
            tensor = torch.tensor(key, dtype=torch.long)
            self._index[key] = self.read(self.add(Constant(tensor, "index", parameter=False)))
        return self._index[key]

    def value(self, tensor: Tensor, name: str) -> fx.Node:
        """A known tensor: a number where it is uniform (no tensor is stored), else a buffer."""
        flat = tensor.reshape(-1)
        if not self._inputs() or not len(flat) or not bool((flat == flat[0]).all()):
            return self.constant(tensor, name)
        key = (flat[0].item(), tensor.dtype)
        if key not in self._numbers:
            # Without axes, so that it never decides the dtype of an op's result.
            self._numbers[key] = self.full([], flat[0])
        return self._numbers[key]

    def _inputs(self) -> list[fx.Node]:
        placeholders = self.editor.graph.find_nodes(op="placeholder")
        return [n for n in placeholders if isinstance(n.meta.get("val"), Tensor)]

    def full(self, sizes: Sequence[Any], number: Tensor) -> fx.Node:
        """A tensor filled with one number, on the device of the inputs if there are any."""
        value, aten = number.item(), torch.ops.aten
        if inputs := self._inputs():
            args: Any = (inputs[0], list(sizes), value)
            return self.editor.call(aten.new_full.default, *args, dtype=number.dtype)
        return self.editor.call(aten.full.default, list(sizes), value, dtype=number.dtype)

    def ones(self, sizes: Sequence[Any], like: fx.Node) -> fx.Node:
        """A tensor of ones, created at each call, with the dtype and device of the constant `like`,
        which may be moved."""
        key = (tuple(sizes), fake(like).dtype)
        if key not in self._ones:
            self._ones[key] = self.editor.call(torch.ops.aten.new_ones.default, like, list(sizes))
        return self._ones[key]

    def read_sizes(self, node: fx.Node) -> None:
        """Let sizes that no input has, such as a number of nonzeros, be read from a new value."""
        for symbol, place in _symbols([node]).items():
            self._symbols.setdefault(symbol, place)

    def size(self, size: Any) -> Any:
        """A size as a call argument: a number, or a node that computes it from input sizes."""
        if isinstance(size, int):
            return size
        return self.expression(size.node.expr)

    def expression(self, expr: sympy.Expr) -> Any:
        """A number, or a node that computes an expression over the inputs' dynamic dimensions."""
        if expr.is_Integer:
            return int(expr)
        if expr.is_number and not expr.args:
            return float(expr)
        if expr not in self._sizes:
            self._sizes[expr] = self._node(expr)
        return self._sizes[expr]

    def _node(self, expr: sympy.Expr) -> fx.Node:
        if expr in self._symbols:
            node, axis = self._symbols[expr]
            return self.editor.call(torch.ops.aten.sym_size.int, node, axis)
        if expr in self.size_emitters:
            return self.size_emitters[expr]()
        kind = type(expr).__name__
        if expr.is_Mul and isinstance(expr.args[0], sympy.Rational) and not expr.args[0].is_Integer:
            share, rest = expr.args[0], expr / expr.args[0]  # of an integer, exactly
            product = self.editor.call(operator.mul, self.expression(rest), int(share.p))
            return self.editor.call(operator.floordiv, product, int(share.q))
        args = [self.expression(a) for a in expr.args]  # type: ignore[arg-type]
        if kind in _REPEATED:
            return reduce(partial(self.editor.call, _REPEATED[kind]), args)
        if kind == "ModularIndexing":  # (a // b) % c
            return self.editor.call(operator.mod, self.editor.call(operator.floordiv, *args[:2]), args[2])
        if kind in _FUNCTIONS and not (kind == "Pow" and args[1] not in range(1, 64)):
            return self.editor.call(_FUNCTIONS[kind], *args)
        raise DemaskError(
            f"a size of the network, {expr}, has no form in a graph yet; pass dynamic_shapes={{}} "
            "for a network of the example's sizes alone"
        )


# Python functions of the functions of sizes (of sympy and torch): those applied to two or more
# arguments in turn, and those of one or two.
_REPEATED: dict[str, Any] = {"Add": operator.add, "Mul": operator.mul, "Max": torch.sym_max, "Min": torch.sym_min}
_FUNCTIONS: dict[str, Any] = {
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Pow": operator.pow,
    "PowByNatural": operator.pow,
    "FloatPow": operator.pow,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "ToFloat": torch.sym_float,
    "TruncToInt": math.trunc,
    "FloorToInt": math.floor,
    "CeilToInt": math.ceil,
    "floor": math.floor,
    "ceiling": math.ceil,
}


def select(tensor: Tensor, want: Layout) -> Tensor:
    """The wanted positions of each axis; the tensor itself where these are all."""
    for axis, positions in enumerate(want):
        if positions is not None:
            index = torch.tensor(positions, dtype=torch.long, device=tensor.device)
            tensor = tensor.index_select(axis, index)
    return tensor


def _in_memory(tensor: Tensor) -> Tensor:
    """The tensor, contiguous; one that repeats elements stays in their memory: its values are in a file."""
    return tensor if 0 in tensor.stride() else tensor.contiguous()


def cut(tensor: Tensor, want: Layout) -> Tensor:
    """The wanted positions of each axis, as a tensor with its own memory."""
    selected = select(tensor, want)
    if selected is tensor:
        return tensor.clone(memory_format=torch.contiguous_format)
    return selected.contiguous()


def _symbols(inputs: Sequence[fx.Node]) -> dict[Any, tuple[fx.Node, int]]:
    symbols: dict[Any, tuple[fx.Node, int]] = {}
    for node in inputs:
        value = node.meta.get("val")
        for axis, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if not isinstance(size, int) and size.node.expr.is_Symbol:
                symbols.setdefault(size.node.expr, (node, axis))
    return symbols


def _are_equal_constants(a: Constant, b: Constant) -> bool:
    if (a.parameter, a.requires_grad) != (b.parameter, b.requires_grad) or a.tensor.dtype != b.tensor.dtype:
        return False
    return a.tensor.shape == b.tensor.shape and torch.equal(a.tensor, b.tensor)


def _containers(name: str) -> list[str]:
    """The modules that contain a name: "a" and "a.b" of "a.b.weight"."""
    return [name[:k] for k, letter in enumerate(name) if letter == "."]


def is_nested(a: str, b: str) -> bool:
    """Whether one name would be an attribute inside the other's tensor."""
    return a.startswith(f"{b}.") or b.startswith(f"{a}.")
