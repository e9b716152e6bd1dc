"""Conditions on sizes in the notation of exported programs (`L['x'].size()[2] % 32 == 0`).

torch runs them as Python, so those of a file are checked here before torch reads them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from demask.compat.symbolic_shapes import SYM_SQRT
from demask.errors import RefusedFile
from demask.graph.guards import NODES, are_true, collect_guards, to_python
from demask.graph.program import Program
from demask.ops.schema import fake
from demask.pytree_paths import leaves_with_paths

MAX_LENGTH = 20_000
MAX_DEPTH = 100
MAX_EXPONENT = 16
_KEY = re.compile(r"[A-Za-z_]\w{0,99}", re.ASCII)
_NUMBERED = re.compile(r"(.+)_(\d+)")
#: torch's functions of sizes, as Python expressions
_FUNCTIONS: dict[str, Callable[[str], str]] = {
    "math.trunc": "int({0})".format,
    "math.floor": "int(({0})//1)".format,
    "math.ceil": "(-int((-({0}))//1))".format,
    "torch.sym_float": "float({0})".format,
    SYM_SQRT: "(({0})**0.5)".format,
    "abs": "max({0},-({0}))".format,
    "round": "round({0})".format,
}
# of several sizes; torch 2.14 writes its own functions
_SEVERAL = {"max": "max", "min": "min", "torch.sym_max": "max", "torch.sym_min": "min"}


class _Unknown(Exception):
    """A condition with a part that cannot be expressed."""


def check_condition(text: str) -> str:
    """A condition that is safe for torch to run. Raises RefusedFile for other code.

    >>> check_condition("L['x'].size()[3] // 2 % 4 == 0")
    "L['x'].size()[3] // 2 % 4 == 0"
    """
    try:
        if len(text) > MAX_LENGTH:
            raise _Unknown(f"{len(text)} characters")
        tree = ast.parse(text, mode="eval").body
        _translate(tree, lambda source, axis: f"size{axis}")
        return ast.unparse(tree)
    except (_Unknown, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RefusedFile(f"expected a comparison of sizes, got the condition {text[:80]!r} ({error})") from error


def collect_conditions(exported: ExportedProgram, shape_env: Any) -> tuple[str, ...]:
    """The conditions that an export relied on; a program from a file contains them."""
    from_export = collect_guards(shape_env, exported.range_constraints)
    known = shape_env is not None and shape_env.guards
    return from_export if known else tuple(dict.fromkeys((*from_export, *read_conditions(exported))))


def read_conditions(exported: ExportedProgram) -> Iterator[str]:
    """The conditions that a program's file contains, in the symbols of its sizes. A condition that
    cannot be expressed is replaced by the example's values of its symbols."""
    texts: Sequence[str] = getattr(exported, "_guards_code", ())
    sources = dict(_sources(exported)) if texts else {}

    def size(source: str, axis: int) -> str:
        value = fake(sources[source]) if source in sources else None
        if not isinstance(value, Tensor) or axis >= value.ndim:
            raise _Unknown(source)
        length: Any = value.shape[axis]
        text = str(length) if isinstance(length, int) else to_python(length.node.expr)
        if text is None:
            raise _Unknown(source)
        return f"({text})"

    for text in texts:
        try:
            condition = _translate(ast.parse(text, mode="eval").body, size)
            yield ast.unparse(ast.parse(condition, mode="eval"))
        except (_Unknown, SyntaxError, RecursionError):
            yield from _as_in_example(text, sources)


def find_violated_guard(program: Program, args: Any, kwargs: Any) -> str | None:
    """The first guard that the example inputs violate, or None: an example of one image is captured
    as two, and the graph may not be valid for one."""
    nodes = [n for n in program.graph.nodes if n.op == "placeholder"]
    values = [fake(n) for n in nodes if isinstance(n.meta.get("val"), Tensor)]
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if len(values) != len(tensors):
        return None
    sizes = {
        str(size.node.expr): n
        for value, x in zip(values, tensors, strict=True)
        for size, n in zip(value.shape, x.shape, strict=False)
        if not isinstance(size, int)
    }
    return next((guard for guard in program.guards if not are_true([guard], sizes)), None)


def describe_ranges(exported: ExportedProgram) -> tuple[str, ...]:
    """Notes on the ranges of dynamic sizes."""
    notes = []
    for symbol, bounds in exported.range_constraints.items():
        low, high = bounds.lower, bounds.upper
        if low > 2 or str(high) != "int_oo":
            notes.append(f"dynamic dimension {symbol} is known to work from {low} to {high} only")
    return tuple(notes)


def _as_in_example(text: str, sources: dict[str, fx.Node]) -> Iterator[str]:
    """Conditions that fix the symbols of a condition to their values in the example."""
    for source, node in sources.items():
        for size in fake(node).shape if source in text else ():
            if not isinstance(size, int) and size.node.hint is not None:
                symbol = to_python(size.node.expr)
                yield f"{symbol} == {size.node.hint}"


def _sources(exported: ExportedProgram) -> Iterator[tuple[str, fx.Node]]:
    """The names of each tensor input in conditions, with its node."""
    specs = exported.graph_signature.input_specs
    users = {s.arg.name for s in specs if s.kind is InputKind.USER_INPUT}
    nodes = [node for node in exported.graph.nodes if node.name in users]
    spec = exported.call_spec.in_spec
    signature = exported.module_call_graph[0].signature
    names = list(signature.forward_arg_names or ()) if signature else []
    args, kwargs = pytree.tree_unflatten(range(spec.num_leaves), spec)  # type: ignore[arg-type]
    names += [f"arg_{k}" for k in range(len(names), len(args))]
    for root, value in [*zip(names, args, strict=False), *kwargs.items()]:
        for path, k in leaves_with_paths(value):
            if not isinstance(nodes[k].meta.get("val"), Tensor):
                continue
            rest = pytree.keystr(path)
            yield f"L[{root!r}]{rest}", nodes[k]
            yield f"L['flat_args'][{k}]", nodes[k]
            if numbered := _NUMBERED.fullmatch(root):  # of `*args`
                yield f"L[{numbered[1]!r}][{numbered[2]}]{rest}", nodes[k]


def _translate(tree: ast.expr, size: Callable[[str, int], str], depth: int = 0) -> str:
    """A condition of torch as a Python expression. size: returns the text of the size of an axis of
    an input. Raises _Unknown."""

    def inner(part: ast.expr) -> str:
        return _translate(part, size, depth + 1)

    if depth > MAX_DEPTH:
        raise _Unknown("nested too deep")
    match tree:
        case ast.Subscript(
            value=ast.Call(func=ast.Attribute(value=source, attr="size"), args=[], keywords=[]),
            slice=ast.Constant(value=int(axis)),
        ) if axis >= 0:
            return size(_source(source), axis)
        case ast.Call(func=function, args=arguments, keywords=[]):
            name = ast.unparse(function)
            if name in _FUNCTIONS and len(arguments) == 1:
                return _FUNCTIONS[name](inner(arguments[0]))
            if name in _SEVERAL and len(arguments) > 1:
                return f"{_SEVERAL[name]}({','.join(map(inner, arguments))})"
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return repr(number)
        case ast.BinOp(op=ast.Pow(), right=right) if not _is_small(right):
            raise _Unknown("a power that is no small number")
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, NODES):
            both = ast.BinOp(ast.Name("a"), op, ast.Name("b"))
            return _fill_pattern(both, a=inner(left), b=inner(right))
        case ast.UnaryOp(op=op, operand=operand) if isinstance(op, NODES):
            return _fill_pattern(ast.UnaryOp(op, ast.Name("a")), a=inner(operand))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if isinstance(op, NODES):
            both = ast.Compare(ast.Name("a"), [op], [ast.Name("b")])
            return _fill_pattern(both, a=inner(left), b=inner(right))
        case ast.BoolOp(op=op, values=values):
            word = " and " if isinstance(op, ast.And) else " or "
            return f"({word.join(map(inner, values))})"
    raise _Unknown(ast.unparse(tree)[:40])


def _fill_pattern(pattern: ast.expr, **parts: str) -> str:
    """A pattern over `a` and `b` with these replaced by `parts`."""
    return re.sub(r"\b[ab]\b", lambda m: f"({parts[m[0]]})", ast.unparse(pattern))


def _is_small(exponent: ast.expr) -> bool:
    try:
        return abs(ast.literal_eval(exponent)) <= MAX_EXPONENT
    except (ValueError, TypeError):
        return False


def _source(tree: ast.expr) -> str:
    """The text of an input, `L['x'][0]`: only plain names and numbers."""
    match tree:
        case ast.Name(id="L"):
            return "L"
        case ast.Subscript(value=value, slice=ast.Constant(value=int() | str() as key)):
            if isinstance(key, int) or _KEY.fullmatch(key):
                return f"{_source(value)}[{key!r}]"
    raise _Unknown("no input")
