"""Guards: conditions on the inputs of a captured graph, as Python expressions and as checks.

torch.export traces one path through the code. If a size selected that path (`if h > 224`), or an
expression of sizes became a number, the graph is valid for some sizes only. Inputs that are no
tensors are part of the graph. A result checks its inputs, since outputs for others would be wrong.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, NoReturn

import sympy
import torch
from torch import fx

from demask.errors import BadInput
from demask.graph.provenance import InputSpec
from demask.ops.schema import fake

REFUSE, REFUSE_VALUE = "_refuse_sizes", "_refuse_value"  # called by generated code
_SCALARS = (bool, int, float, str)
_SYMBOL = re.compile(r"[A-Za-z]\w{0,30}", re.ASCII)
NODES = (
    ast.Expression, ast.Compare, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Name, ast.Load, ast.Call,
    ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.USub, ast.Pow,
    ast.Div, ast.Eq, ast.NotEq, ast.Lt, ast.Gt, ast.LtE, ast.GtE, ast.BoolOp, ast.And, ast.Or,
    ast.Not,
)  # fmt: skip
# Functions of sizes (of sympy and torch) as infix operators, and as function calls.
_SIGNS = {
    "Add": "+",
    "Mul": "*",
    "FloorDiv": "//",
    "CleanDiv": "//",
    "IntTrueDiv": "/",
    "FloatTrueDiv": "/",
    "Mod": "%",
    "PythonMod": "%",
    "Pow": "**",
    "PowByNatural": "**",
    "FloatPow": "**",
    "Equality": " == ",
    "Unequality": " != ",
    "StrictLessThan": " < ",
    "LessThan": " <= ",
    "StrictGreaterThan": " > ",
    "GreaterThan": " >= ",
    "And": " and ",
    "Or": " or ",
}
_CALLS = {"Max": "max", "Min": "min", "ToFloat": "float", "TruncToInt": "int", "RoundToInt": "round", "Not": "not "}
_NAMES: dict[str, Any] = {"max": max, "min": min, "int": int, "float": float, "round": round}
SYMBOLIC = {  # for sizes that are symbols: Python's own functions would specialize them
    "float": torch.sym_float,
    "int": torch.sym_int,
    "max": lambda *sizes: reduce(torch.sym_max, sizes),
    "min": lambda *sizes: reduce(torch.sym_min, sizes),
}
_TORCH = os.path.dirname(torch.__file__) + os.sep
_LAYERS = os.path.join(_TORCH, "nn", "")


def collect_guards(shape_env: Any, ranges: Mapping[Any, Any]) -> tuple[str, ...]:
    """The conditions on symbols that an export relied on, as Python. A condition that cannot be
    expressed is replaced by the example's values of its symbols.

    Inequalities that torch's code added, not the model's, are left out: they concern memory
    layouts, and fail at batch 1, where the graph is valid.
    """
    conditions: dict[str, None] = {}
    for symbol, bounds in ranges.items():
        low, high = bounds.lower, bounds.upper
        if symbol.is_Symbol and low.is_Integer and low > 2:
            conditions[f"{symbol} >= {low}"] = None
        if symbol.is_Symbol and high.is_Integer:
            conditions[f"{symbol} <= {high}"] = None
    for guard in shape_env.guards if shape_env is not None else ():
        if isinstance(guard.expr, sympy.Eq) or _is_of_model(guard):
            text = to_python(guard.expr)
            conditions |= dict.fromkeys(_pin_symbols(guard.expr, shape_env) if text is None else [text])
    return tuple(conditions)


def _is_of_model(guard: Any) -> bool:
    """Whether the model's code added a condition (`if h > w`), not torch's code. Bounds of a single
    size are in the ranges already."""
    bound = all(side.is_Symbol or side.is_Integer for side in guard.expr.args)
    if bound and len(guard.expr.free_symbols) < 2:
        return False
    where = getattr(guard.sloc.framework_loc, "filename", "")
    return bool(where) and (not where.startswith(_TORCH) or where.startswith(_LAYERS))


def _pin_symbols(condition: Any, shape_env: Any) -> list[str]:
    """Conditions that fix the symbols of a condition to their values in the example."""
    values = getattr(shape_env, "backed_var_to_val", None) or shape_env.var_to_val
    return [f"{s} == {values[s]}" for s in sorted(condition.free_symbols, key=str) if s in values]


def to_python(expr: Any) -> str | None:
    """An expression as Python; None if a part of it cannot be expressed."""
    if expr.is_Symbol or expr.is_Integer:
        return f"({expr})"
    if expr.is_number and not expr.args:
        return repr(float(expr)) if expr.is_finite else None
    if expr.is_Mul and isinstance(expr.args[0], sympy.Rational) and expr.args[0].q > 1:
        factor = to_python(sympy.Mul(*expr.args[1:]))  # exact for integers
        return factor and f"({factor}*{expr.args[0].p}//{expr.args[0].q})"
    parts = [to_python(argument) for argument in expr.args]
    texts = [part for part in parts if part is not None]
    function = type(expr).__name__
    if not parts or len(texts) < len(parts):
        return None
    if function in _SIGNS:
        joined = _SIGNS[function].join(texts)
        return joined if function in ("Equality", "Unequality") else f"({joined})"
    return f"{_CALLS[function]}({', '.join(texts)})" if function in _CALLS else None


def refuse_sizes(words: str) -> NoReturn:
    """Raise BadInput; called by generated code for sizes that the graph is not valid for.

    Raised here, since torch.fx prints errors in generated code with a page of source.
    """
    raise BadInput(words)


def refuse_value(name: str, expected: str, value: object) -> NoReturn:
    """Raise BadInput; called by generated code for an input that differs from the example's."""
    got = repr(value) if isinstance(value, (*_SCALARS, type(None))) else type(value).__name__
    raise BadInput(
        f"{name}: expected {expected}, as in the example that this network was captured with, "
        f"got {got:.80}; demask an example like yours"
    )


def literal_inputs(graph: fx.Graph) -> dict[str, str]:
    """The inputs of a captured graph that are no tensors, as Python literals by name."""
    inputs = {n.name: fake(n) for n in graph.nodes if n.op == "placeholder" and "val" in n.meta}
    return {name: repr(value) for name, value in inputs.items() if value is None or type(value) in _SCALARS}


def value_checks(names: Mapping[str, str], values: Mapping[str, str]) -> Iterator[str]:
    """Lines of Python that call `refuse_value` if an input differs from the example's.

    names: the variable of each input. values: from `literal_inputs`.
    """
    for name, text in values.items():
        wrong = _differs(names[name], text) if name in names else None
        if wrong is not None:
            yield f"if {wrong}: {REFUSE_VALUE}({name!r}, {text!r}, {names[name]})\n"


def _differs(name: str, text: str) -> str | None:
    """A Python expression for whether a variable differs from a literal; None if it is no literal
    of a plain value."""
    scalar = f"not isinstance({name}, (bool, int, float, str))"
    if text == "nan":
        return f"{scalar} or {name} == {name}"
    if text in ("inf", "-inf"):
        return f"{scalar} or {name} != float({text!r})"
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    if value is None:
        return f"{name} is not None"
    return f"{scalar} or {name} != {value!r}" if type(value) in _SCALARS else None


def compile_checks(names: Sequence[str], lines: Sequence[str], **known: Any) -> Callable[..., None]:
    """A function that runs lines of `size_checks` or `value_checks` on its arguments, also on sizes
    that are symbols.

    names: the variables of the arguments. known: other functions that the lines call.
    """
    known |= {REFUSE: refuse_sizes, REFUSE_VALUE: refuse_value}
    body = "".join(f"    {line}" for line in lines) or "    pass"
    exec(compile(f"def check({', '.join(names)}):\n{body}", "<sizes>", "exec"), known)
    return known["check"]


def size_checks(names: Mapping[str, str], inputs: Sequence[InputSpec], guards: Sequence[str]) -> Iterator[str]:
    """Lines of Python that call `refuse_sizes` if a graph is not valid for the inputs' sizes.

    names: the variable of each input.
    """
    variables: dict[str, str] = {}
    for spec in inputs:
        if spec.name not in names:
            continue
        differences, name = [], names[spec.name]
        for axis, size in enumerate(spec.sizes):
            variable = f"{name}.shape[{axis}]"
            if isinstance(size, int):
                differences.append(f"{variable} != {size}")
            elif _SYMBOL.fullmatch(size):
                if size in variables:
                    differences.append(f"{variable} != {variables[size]}")
                variables.setdefault(size, variable)
        yield from _raising(" or ".join(differences), name, spec)
    for guard in guards:
        tree = parse_condition(guard, variables)
        if tree is not None:
            text = ast.unparse(tree)
            words = f"this network was captured for sizes with {text}; demask an example like yours"
            yield f"if not ({rename_symbols(text, variables)}): {REFUSE}({words!r})\n"


def _raising(wrong: str, name: str, spec: InputSpec) -> Iterator[str]:
    """A line of Python that refuses an input if the expression `wrong` is true."""
    if wrong:
        sizes = ", ".join(str(size) for size in spec.sizes if re.fullmatch(r"\w+", str(size)))
        words = f"{name}: expected sizes ({sizes}), where names are any size, got "
        after = "; for others demask with dynamic_shapes, or with an example of that size"
        got = f"str(tuple({name}.shape))"
        yield f"if {wrong}: {REFUSE}({words!r} + {got} + {after!r})\n"


def parse_condition(guard: str, symbols: Collection[str]) -> ast.expr | None:
    """The syntax tree of a condition; None for other code, or if it has other symbols."""
    try:
        tree = ast.parse(guard, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in ast.walk(tree):
        if not isinstance(node, NODES):
            return None
        if isinstance(node, ast.Name) and node.id not in {*symbols, *_NAMES}:
            return None
        if isinstance(node, ast.Constant) and type(node.value) not in (int, float):
            return None
    return tree.body


def fixed_symbols(guards: Sequence[str], symbols: Collection[str]) -> set[str]:
    """The symbols that the guards fix to one size."""
    trees = (parse_condition(guard, symbols) for guard in guards)
    return {
        tree.left.id
        for tree in trees
        if isinstance(tree, ast.Compare)
        and isinstance(tree.left, ast.Name)
        and isinstance(tree.ops[0], ast.Eq)
        and isinstance(tree.comparators[0], ast.Constant)
    }


def are_true(guards: Sequence[str], sizes: Mapping[str, int]) -> bool:
    """Whether the conditions are true for these sizes, by symbol."""
    known = {"__builtins__": {}, **_NAMES, **sizes}
    trees = [tree for guard in guards if (tree := parse_condition(guard, sizes)) is not None]
    codes = [compile(ast.Expression(tree), "<sizes>", "eval") for tree in trees]
    try:
        return all(eval(code, known) for code in codes)
    except ArithmeticError:  # such as a remainder by a size that is 0
        return False


def rename_symbols(text: str, names: Mapping[str, str]) -> str:
    """A condition with its symbols renamed."""
    return re.sub(r"[A-Za-z]\w*", lambda m: names.get(m.group(0), m.group(0)), text)
