"""The grammar of symbolic expressions in a .pt2: only what torch.export writes.

torch evaluates these texts as Python (`sympify`), so a text could run code.
"""

from __future__ import annotations

import ast
import re

from demask.errors import RefusedFile

MAX_LENGTH = 20_000
MAX_DEPTH = 60
MAX_INTEGER = 2**64
MAX_EXPONENT = 16
MAX_EXTREMES = 8  # sympy compares every pair of the arguments of Max

_SYMBOL = re.compile(r"(?!__)[A-Za-z_]\w{0,99}", re.ASCII)
_BARE_SYMBOL = re.compile(r"(s|u|zf|zuf)\d{1,6}|oo|int_oo|true|false", re.ASCII)
_FLOAT = re.compile(r"-?\d{1,40}(\.\d{0,40})?(e[+-]?\d{1,3})?", re.ASCII)
_ASSUMPTIONS = frozenset("integer positive negative nonnegative nonpositive nonzero real finite even odd".split())
_POWERS = frozenset(("Pow", "PowByNatural"))
_FUNCTIONS = _POWERS | frozenset(
    "Add Mul Mod PythonMod FloorDiv CleanDiv CeilDiv ModularIndexing Max Min Abs Where Piecewise "
    "ExprCondPair IntTrueDiv FloatTrueDiv ToFloat TruncToInt TruncToFloat FloorToInt CeilToInt "
    "RoundToInt Identity floor ceiling Integer Rational Equality Unequality Eq Ne LessThan "
    "GreaterThan StrictLessThan StrictGreaterThan Le Ge Lt Gt And Or Not Tuple".split()
)
_BINARY = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_COMPARE = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def check_expression(text: str) -> str:
    """Return `text` if it has only known functions, + - * // %, comparisons, symbols, integers.

    Raises:
        RefusedFile: anything else.

    Example:
        >>> check_expression("Add(Symbol('s0', integer=True), Integer(-2))")
        "Add(Symbol('s0', integer=True), Integer(-2))"
    """
    try:
        if len(text) > MAX_LENGTH:
            raise RefusedFile(f"a symbolic expression of {len(text)} characters (> {MAX_LENGTH})")
        _check(ast.parse(text, mode="eval").body, 0)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        shown = text if len(text) <= 80 else text[:77] + "..."
        reason = error if isinstance(error, RefusedFile) else "not an expression"
        raise RefusedFile(
            f"got the symbolic expression {shown!r} ({reason}); "
            "expected sums, products and quotients of symbols and integers"
        ) from error
    return text


def _check(node: ast.expr, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise RefusedFile(f"nested deeper than {MAX_DEPTH}")
    match node:
        case ast.Constant(value=int(value)) if abs(value) <= MAX_INTEGER:
            return
        case ast.Name(id=name) if _BARE_SYMBOL.fullmatch(name):
            return
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _check(operand, depth + 1)
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _BINARY):
            _check(left, depth + 1)
            _check(right, depth + 1)
        case ast.Compare(left=left, ops=ops, comparators=others) if all(isinstance(op, _COMPARE) for op in ops):
            for operand in (left, *others):
                _check(operand, depth + 1)
        case ast.Call(func=ast.Name(id=name)):
            _check_call(name, node, depth)
        case _:
            raise RefusedFile(f"unexpected {ast.unparse(node)[:40]}")


def _check_call(name: str, call: ast.Call, depth: int) -> None:
    if name in ("Symbol", "Float"):
        return _check_atom(name, call)
    if name not in _FUNCTIONS or call.keywords:
        raise RefusedFile(f"unexpected call of {name}")
    for argument in call.args:
        _check(argument, depth + 1)
    if name in _POWERS:
        _check_power(call)
    if _extremes(call) > MAX_EXTREMES:
        raise RefusedFile(f"{name} of more than {MAX_EXTREMES} values")
    return None


def _extremes(node: ast.expr) -> int:
    """Number of values compared by nested Max and Min; 1 for anything else."""
    match node:
        case ast.Call(func=ast.Name(id="Max" | "Min"), args=args):
            return sum(_extremes(argument) for argument in args)
    return 1


def _check_atom(name: str, call: ast.Call) -> None:
    """Refuse all but Symbol('s0', integer=True) and Float('0.5', precision=53)."""
    match call.args:
        case [ast.Constant(value=str(text))]:
            pattern = _SYMBOL if name == "Symbol" else _FLOAT
            is_known = pattern.fullmatch(text) is not None
        case _:
            is_known = False
    for option in call.keywords:
        match option.arg, option.value:
            case "precision", ast.Constant(value=int(value)):
                is_known = is_known and name == "Float" and 1 <= value <= 200
            case str(word), ast.Constant(value=bool()):
                is_known = is_known and name == "Symbol" and word in _ASSUMPTIONS
            case _:
                is_known = False
    if not is_known:
        raise RefusedFile(f"unexpected {ast.unparse(call)[:40]}")


def _check_power(call: ast.Call) -> None:
    """Refuse all but small constant exponents, not nested: sympy evaluates powers at once."""
    match call.args:
        case [base, ast.Call(func=ast.Name(id="Integer"), args=[exponent])]:
            power = _integer(exponent)
        case [base, exponent]:
            power = _integer(exponent)
        case _:
            raise RefusedFile("a power without two arguments")
    nested = any(isinstance(n, ast.Name) and n.id in _POWERS for n in ast.walk(base))
    if power is None or abs(power) > MAX_EXPONENT or nested:
        raise RefusedFile(f"unexpected {ast.unparse(call)[:40]}")


def _integer(node: ast.expr) -> int | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if type(value) is int else None
