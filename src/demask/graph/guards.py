"""What must hold of the sizes of a call for a captured graph to be the network's: said in Python.
And of its inputs that are no tensors: what they were is part of the graph.

torch.export walks one path through the code. Where that path was chosen by a size (`if h > 224`),
or where an expression of sizes came out as a number and was taken for one, the graph holds for such
sizes alone. A result checks its inputs, since its answer for other sizes would be wrong.
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

REFUSE, REFUSE_VALUE = "_refuse_sizes", "_refuse_value"  # what generated code calls
_SCALARS = (bool, int, float, str)
_SYMBOL = re.compile(r"[A-Za-z]\w{0,30}", re.ASCII)
NODES = (
    ast.Expression, ast.Compare, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Name, ast.Load, ast.Call,
    ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.USub, ast.Pow,
    ast.Div, ast.Eq, ast.NotEq, ast.Lt, ast.Gt, ast.LtE, ast.GtE, ast.BoolOp, ast.And, ast.Or,
    ast.Not,
)  # fmt: skip
# Functions of sizes (sympy's, and torch's own) between their arguments, and before.
_SIGNS = {
    "Add": "+", "Mul": "*", "FloorDiv": "//", "CleanDiv": "//", "IntTrueDiv": "/",
    "FloatTrueDiv": "/", "Mod": "%", "PythonMod": "%", "Pow": "**", "PowByNatural": "**",
    "FloatPow": "**", "Equality": " == ", "Unequality": " != ", "StrictLessThan": " < ",
    "LessThan": " <= ", "StrictGreaterThan": " > ", "GreaterThan": " >= ", "And": " and ",
    "Or": " or ",
}  # fmt: skip
_CALLS = {"Max": "max", "Min": "min", "ToFloat": "float", "TruncToInt": "int",
          "RoundToInt": "round", "Not": "not "}  # fmt: skip
_NAMES: dict[str, Any] = {"max": max, "min": min, "int": int, "float": float, "round": round}
SYMBOLIC = {  # of sizes that torch.export leaves open, which Python's own fix
    "float": torch.sym_float, "int": torch.sym_int,
    "max": lambda *sizes: reduce(torch.sym_max, sizes),
    "min": lambda *sizes: reduce(torch.sym_min, sizes),
}  # fmt: skip
_TORCH = os.path.dirname(torch.__file__) + os.sep
_LAYERS = os.path.join(_TORCH, "nn", "")


def guards_of(shape_env: Any, ranges: Mapping[Any, Any]) -> tuple[str, ...]:
    """The conditions on symbols that an export relied on, as Python. Where one has no form here,
    its symbols are to be what they are in the example.

    Inequalities that torch asked for, not the model's code, are left out: they speak of memory
    layouts, and fail at batch 1 where nothing else does.
    """
    found: dict[str, None] = {}
    for symbol, bounds in ranges.items():
        low, high = bounds.lower, bounds.upper
        if symbol.is_Symbol and low.is_Integer and low > 2:
            found[f"{symbol} >= {low}"] = None
        if symbol.is_Symbol and high.is_Integer:
            found[f"{symbol} <= {high}"] = None
    for guard in shape_env.guards if shape_env is not None else ():
        if isinstance(guard.expr, sympy.Eq) or _is_of_model(guard):
            text = spelled(guard.expr)
            found |= dict.fromkeys(_pinned(guard.expr, shape_env) if text is None else [text])
    return tuple(found)


def _is_of_model(guard: Any) -> bool:
    """Whether the model's code asked for a condition (`if h > w`), not torch's. Bounds of one size
    are in the ranges already."""
    bound = all(side.is_Symbol or side.is_Integer for side in guard.expr.args)
    if bound and len(guard.expr.free_symbols) < 2:
        return False
    where = getattr(guard.sloc.framework_loc, "filename", "")
    return bool(where) and (not where.startswith(_TORCH) or where.startswith(_LAYERS))


def _pinned(condition: Any, shape_env: Any) -> list[str]:
    """The sizes of the example, as conditions, of the symbols of a condition."""
    values = getattr(shape_env, "backed_var_to_val", None) or shape_env.var_to_val
    return [f"{s} == {values[s]}" for s in sorted(condition.free_symbols, key=str) if s in values]


def spelled(expr: Any) -> str | None:
    """An expression as Python; None where it has a part that we do not know."""
    if expr.is_Symbol or expr.is_Integer:
        return f"({expr})"
    if expr.is_number and not expr.args:
        return repr(float(expr)) if expr.is_finite else None
    if expr.is_Mul and isinstance(expr.args[0], sympy.Rational) and expr.args[0].q > 1:
        whole = spelled(sympy.Mul(*expr.args[1:]))  # of a whole number, exactly
        return whole and f"({whole}*{expr.args[0].p}//{expr.args[0].q})"
    parts = [spelled(argument) for argument in expr.args]
    texts = [part for part in parts if part is not None]
    kind = type(expr).__name__
    if not parts or len(texts) < len(parts):
        return None
    if kind in _SIGNS:
        joined = _SIGNS[kind].join(texts)
        return joined if kind in ("Equality", "Unequality") else f"({joined})"
    return f"{_CALLS[kind]}({', '.join(texts)})" if kind in _CALLS else None


def refuse(words: str) -> NoReturn:
    """What generated code calls for sizes that it does not hold for.

    Raised from here, not in the generated code, whose errors torch.fx prints with a page of source.
    """
    raise BadInput(words)


def refuse_value(name: str, expected: str, found: object) -> NoReturn:
    """What generated code calls for an input that is not what it was in the example."""
    got = repr(found) if isinstance(found, (*_SCALARS, type(None))) else type(found).__name__
    raise BadInput(
        f"{name}: expected {expected}, as in the example that this network was captured with, "
        f"got {got:.80}; demask an example like yours"
    )


def values_of(graph: fx.Graph) -> dict[str, str]:
    """The inputs of a captured graph that are no tensors: what they were, as Python spells it."""
    given = {n.name: n.meta["val"] for n in graph.nodes
             if n.op == "placeholder" and "val" in n.meta}  # fmt: skip
    return {name: repr(value) for name, value in given.items()
            if value is None or type(value) in _SCALARS}  # fmt: skip


def value_checks(names: Mapping[str, str], values: Mapping[str, str]) -> Iterator[str]:
    """Lines of Python that call `refuse_value` where an input is not what it was in the example.

    names: of the inputs, and of the variables that hold them. values: by name, as `values_of` says.
    """
    for name, text in values.items():
        wrong = _differs(names[name], text) if name in names else None
        if wrong is not None:
            yield f"if {wrong}: {REFUSE_VALUE}({name!r}, {text!r}, {names[name]})\n"


def _differs(name: str, text: str) -> str | None:
    """Is the variable another value than `text` spells? None where that spells no plain value."""
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


def checker(names: Sequence[str], lines: Sequence[str], **known: Any) -> Callable[..., None]:
    """A function that runs lines of `checks` or `value_checks` over its arguments, on sizes that
    torch.export leaves open, too.

    names: of the variables that hold them; known: other functions that the lines call."""
    known |= {REFUSE: refuse, REFUSE_VALUE: refuse_value}
    body = "".join(f"    {line}" for line in lines) or "    pass"
    exec(compile(f"def check({', '.join(names)}):\n{body}", "<sizes>", "exec"), known)
    return known["check"]


def checks(
    names: Mapping[str, str], inputs: Sequence[InputSpec], guards: Sequence[str]
) -> Iterator[str]:
    """Lines of Python that call `refuse` where a graph does not hold for the inputs' sizes.

    names: of the inputs, and of the variables that hold them."""
    where: dict[str, str] = {}
    for spec in inputs:
        if spec.name not in names:
            continue
        wrong, name = [], names[spec.name]
        for axis, size in enumerate(spec.sizes):
            here = f"{name}.shape[{axis}]"
            if isinstance(size, int):
                wrong.append(f"{here} != {size}")
            elif _SYMBOL.fullmatch(size):
                if size in where:
                    wrong.append(f"{here} != {where[size]}")
                where.setdefault(size, here)
        yield from _raising(" or ".join(wrong), name, spec)
    for guard in guards:
        tree = condition(guard, where)
        if tree is not None:
            text = ast.unparse(tree)
            words = f"this network was captured for sizes with {text}; demask an example like yours"
            yield f"if not ({renamed(text, where)}): {REFUSE}({words!r})\n"


def _raising(wrong: str, name: str, spec: InputSpec) -> Iterator[str]:
    if wrong:
        sizes = ", ".join(str(size) for size in spec.sizes if re.fullmatch(r"\w+", str(size)))
        words = f"{name}: expected sizes ({sizes}), where names stand for any size, got "
        after = "; for others demask with dynamic_shapes, or with an example of that size"
        got = f"str(tuple({name}.shape))"
        yield f"if {wrong}: {REFUSE}({words!r} + {got} + {after!r})\n"


def condition(guard: str, symbols: Collection[str]) -> ast.expr | None:
    """A condition as Python reads it; None if it is not one of ours, or has other symbols."""
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


def fixed_by(guards: Sequence[str], symbols: Collection[str]) -> set[str]:
    """The symbols that may have one size alone."""
    trees = (condition(guard, symbols) for guard in guards)
    return {tree.left.id for tree in trees if isinstance(tree, ast.Compare)
            and isinstance(tree.left, ast.Name) and isinstance(tree.ops[0], ast.Eq)
            and isinstance(tree.comparators[0], ast.Constant)}  # fmt: skip


def hold(guards: Sequence[str], sizes: Mapping[str, int]) -> bool:
    """Whether the conditions hold for sizes by their symbols."""
    known = {"__builtins__": {}, **_NAMES, **sizes}
    trees = [tree for guard in guards if (tree := condition(guard, sizes)) is not None]
    codes = [compile(ast.Expression(tree), "<sizes>", "eval") for tree in trees]
    try:
        return all(eval(code, known) for code in codes)
    except ArithmeticError:  # such as a remainder by a size that is 0
        return False


def renamed(text: str, names: Mapping[str, str]) -> str:
    """A condition with other names for its symbols."""
    return re.sub(r"[A-Za-z]\w*", lambda m: names.get(m.group(0), m.group(0)), text)
