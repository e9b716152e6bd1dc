"""Conditions on sizes in ONNX files, which have no assertions.

A graph that was captured under `h % 32 == 0` computes wrong results for other sizes. The module
refuses those (`graph.guards`). The file counts the violated conditions and adds the count to the
sizes of a reshape of an input: a count of 0 reshapes the input to its own sizes; for any other,
every runtime refuses the reshape, in a node named after the conditions.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from demask.graph.guards import parse_condition, rename_symbols
from demask.graph.provenance import InputSpec

_ARITHMETIC: Mapping[type, str] = {ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul", ast.Pow: "Pow", ast.Mod: "Mod"}
_COMPARISONS: Mapping[type, str] = {
    ast.Eq: "Equal",
    ast.Lt: "Less",
    ast.LtE: "LessOrEqual",
    ast.Gt: "Greater",
    ast.GtE: "GreaterOrEqual",
}
_DTYPES: Mapping[type, Any] = {bool: np.bool_, int: np.int64, float: np.float64}


class _Number(NamedTuple):
    """A scalar value of the file. kind: int (int64), float (float64) or bool."""

    value: Any
    kind: type


def refuse_sizes(model: Any, specs: Sequence[InputSpec], guards: Sequence[str]) -> None:
    """Make an `onnx_ir.Model` fail on sizes that violate one of `guards`, in place.

    specs: of its inputs, in their order, with the symbols in the guards.
    """
    graph = model.graph
    inputs = [v for v in graph.inputs if v.name not in graph.initializers]
    axes = _axes_of_symbols(specs)
    trees = [tree for guard in guards if (tree := parse_condition(guard, axes)) is not None]
    sized = [k for k, spec in enumerate(specs) if spec.sizes]
    if not trees or not sized or len(specs) != len(inputs):
        return
    names = {s: _size_name(inputs[k], axis) for s, (k, axis) in axes.items()}
    smallest = inputs[min(sized, key=lambda k: math.prod(specs[k].example))]
    users = list(smallest.uses())
    file = _SizeWriter(inputs, axes)
    violations = [file.call("Cast", [file.call("Not", [file.of(tree)])], int) for tree in trees]
    count = functools.reduce(lambda a, b: file.call("Add", [a, b]), violations)
    sizes = file.call("Add", [file.sizes(smallest), count])
    reshaped = file.call("Reshape", [_Number(smallest, int), sizes]).value
    reshaped.type, reshaped.shape = smallest.type, smallest.shape
    file.nodes[-1].name = "only for sizes with " + " and ".join(
        dict.fromkeys(rename_symbols(ast.unparse(tree), names) for tree in trees)
    )
    graph.insert_before(graph[0], file.nodes)
    for user, position in users:
        user.replace_input_with(position, reshaped)


def _axes_of_symbols(specs: Sequence[InputSpec]) -> dict[str, tuple[int, int]]:
    """For each symbol, the index of an input and its axis of that size."""
    axes: dict[str, tuple[int, int]] = {}
    for k, spec in enumerate(specs):
        for axis, size in enumerate(spec.sizes):
            if isinstance(size, str):
                axes.setdefault(size, (k, axis))
    return axes


def _size_name(value: Any, axis: int) -> str:
    size = value.shape[axis]
    return str(size if isinstance(size, int) else size.value)


class _SizeWriter:
    """Writes arithmetic on sizes of inputs as nodes. axes: input and axis of each symbol."""

    def __init__(self, inputs: Sequence[Any], axes: Mapping[str, tuple[int, int]]):
        self.inputs, self.axes = inputs, axes
        self.nodes: list[Any] = []
        self.shapes: dict[str, _Number] = {}

    def of(self, tree: ast.expr) -> _Number:
        """The value of an expression."""
        match tree:
            case ast.Constant(value=int() | float() as number):
                return self.constant(number)
            case ast.Name(id=symbol):
                k, axis = self.axes[symbol]
                return self.call("Gather", [self.sizes(self.inputs[k]), self.constant(axis)])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self.call("Not", [self.of(operand)])
            case ast.UnaryOp(operand=operand):
                return self.call("Neg", [self.of(operand)])
            case ast.BoolOp(op=op, values=values):
                name = "And" if isinstance(op, ast.And) else "Or"
                parts = map(self.of, values)
                return functools.reduce(lambda a, b: self.call(name, [a, b]), parts)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                pair = self.alike([self.of(left), self.of(right)])
                if isinstance(op, ast.NotEq):
                    return self.call("Not", [self.call("Equal", pair, bool)])
                return self.call(_COMPARISONS[type(op)], pair, bool)
            case ast.BinOp(left=left, op=op, right=right):
                return self.arithmetic(op, self.of(left), self.of(right))
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return self.function(name, [self.of(argument) for argument in arguments])
        raise AssertionError(ast.dump(tree))

    def arithmetic(self, op: ast.operator, a: _Number, b: _Number) -> _Number:
        if isinstance(op, ast.Div):
            return self.call("Div", [self.cast(a, float), self.cast(b, float)])
        a, b = self.alike([a, b])
        if type(op) in _ARITHMETIC:
            return self.call(_ARITHMETIC[type(op)], [a, b])
        if a.kind is float:
            return self.call("Floor", [self.call("Div", [a, b])])
        rest = self.call("Mod", [a, b])  # of the divisor's sign, as Python's; Div truncates
        return self.call("Div", [self.call("Sub", [a, rest]), b])

    def function(self, name: str, arguments: list[_Number]) -> _Number:
        match name:
            case "max" | "min":
                return self.call(name.capitalize(), self.alike(arguments))
            case "float":
                return self.cast(arguments[0], float)
            case "round":
                return self.cast(self.call("Round", [self.cast(arguments[0], float)]), int)
        return self.cast(arguments[0], int)

    def sizes(self, value: Any) -> _Number:
        if value.name not in self.shapes:
            self.shapes[value.name] = self.call("Shape", [_Number(value, int)])
        return self.shapes[value.name]

    def constant(self, number: float) -> _Number:
        import onnx_ir as ir

        result = self.call("Constant", [], type(number))
        tensor = ir.tensor(np.array(number, _DTYPES[type(number)]))
        self.nodes[-1].attributes["value"] = ir.AttrTensor("value", tensor)
        return result

    def alike(self, numbers: Sequence[_Number]) -> list[_Number]:
        kind = float if any(number.kind is float for number in numbers) else int
        return [self.cast(number, kind) for number in numbers]

    def cast(self, number: _Number, kind: type) -> _Number:
        return number if number.kind is kind else self.call("Cast", [number], kind)

    def call(self, op: str, inputs: Sequence[_Number], kind: type | None = None) -> _Number:
        """The output of a new node, by default of the inputs' kind."""
        import onnx_ir as ir

        kind = inputs[0].kind if kind is None else kind
        dtype = ir.DataType.from_numpy(np.dtype(_DTYPES[kind]))
        node = ir.node(op, [number.value for number in inputs])
        if op == "Cast":
            node.attributes["to"] = ir.AttrInt64("to", dtype)
        node.outputs[0].name, node.outputs[0].dtype = f"sizes/{len(self.nodes)}", dtype
        self.nodes.append(node)
        return _Number(node.outputs[0], kind)
