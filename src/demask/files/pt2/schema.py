"""Checks of a .pt2 program's JSON: types by torch's own schema, every text field by a rule.

A text field without a rule is refused, so fields that a later torch adds are refused too.

The grammar of symbolic expressions in a .pt2: only what torch.export writes.

torch evaluates these texts as Python (`sympify`), so a text could run code.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from demask.compat.export_schema import Union, schema
from demask.errors import BadInput, RefusedFile
from demask.files.allowed_names import BUILTINS, check_fqn, check_name, find_op
from demask.files.pytree_specs import check_call_spec, check_spec
from demask.graph.capture import export_guards

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


Rule = Callable[[str], Any]

MAX_TEXT = 10_000
MAX_EXPRESSIONS = 2**21  # characters of all distinct ones
_DEVICE = re.compile(r"cpu|cuda|mps|xpu|meta")
# A symbol, whose number torch counts up to, or a size derived from it, such as 2*s0 + 1.
_RANGE = re.compile(r"(u|zf|zuf)\d{1,6}|(\d{1,6}\*)?s\d{1,6}( [+-] \d{1,6})?", re.ASCII)
_PAYLOAD = re.compile(r"(weight|tensor)_\d{1,9}", re.ASCII)
_LABEL = re.compile(r"[\w.<>+=-]{1,500}", re.ASCII)
_ARGUMENT = re.compile(r"([A-Za-z_]\w{0,200})?", re.ASCII)  # "from" and "self" are among them
_DIALECT = re.compile(r"TRAINING|ATEN|")
_WRAPPERS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
# Fields that demask does not need and torch would look up or unpickle.
_REFUSED = {
    "Argument.as_operator": "an operator passed as a value",
    "Argument.as_string_to_argument": "a dictionary passed to an operator",
    "CustomObjArgument": "a custom object",
    "InputToCustomObjSpec": "a custom object",
    "TokenArgument": "an effect token",
}


@dataclass(frozen=True, slots=True)
class ProgramSchema:
    """The schema with its rules. namespaces: of the ops that a node may call. expressions: the
    distinct symbolic expressions so far, as sympy takes time for each."""

    namespaces: frozenset[str]
    expressions: set[str] = field(default_factory=set)

    def clean(self, kind: Any, value: Any, where: str) -> Any:
        """`value`, JSON of the schema type `kind`, without fields that are not needed.

        Raises:
            BadInput, RefusedFile: with the field (`where`), the expected and the actual value.
        """
        origin, inner = typing.get_origin(kind), typing.get_args(kind)
        if origin in (typing.Union, types.UnionType):
            return None if value is None else self.clean(inner[0], value, where)
        if origin is list:
            _expect(isinstance(value, list), "a list", value, where)
            return [self.clean(inner[0], item, where) for item in value]
        if origin is dict:
            return self._clean_mapping(inner[1], value, where)
        if not isinstance(kind, type):
            raise RefusedFile(f"{where}: this torch has a field that demask does not support")
        if kind.__name__ in _REFUSED:
            raise RefusedFile(f"{where}: got {_REFUSED[kind.__name__]}; expected tensors only")
        if issubclass(kind, Union):
            return self._clean_union(kind, value, where)
        if dataclasses.is_dataclass(kind):
            return self._clean_record(kind, value)
        return self._clean_scalar(kind, value, where)

    def _clean_union(self, kind: type, value: Any, where: str) -> dict[str, Any]:
        fields = _fields(kind)
        single = isinstance(value, dict) and len(value) == 1
        _expect(single and next(iter(value)) in fields, f"a {kind.__name__}", value, where)
        tag, inner = next(iter(value.items()))
        field_name = f"{kind.__name__}.{tag}"
        if field_name in _REFUSED:
            raise RefusedFile(f"{where}: got {_REFUSED[field_name]}; expected tensors and numbers")
        return {tag: self.clean(fields[tag], inner, field_name)}

    def _clean_record(self, kind: type, value: Any) -> dict[str, Any]:
        fields, name = _fields(kind), kind.__name__
        _expect(isinstance(value, dict), f"a {name}", value, name)
        unknown = sorted(set(value) - set(fields))
        if unknown:
            raise BadInput(
                f"{name}: got the field {unknown[0]!r}; this file was written by a newer torch, update torch to read it"
            )
        cleaned = {}
        for key, inner in value.items():
            field_name = f"{name}.{key}"
            if field_name in _REWRITTEN:
                cleaned[key] = _REWRITTEN[field_name](inner)
            else:
                cleaned[key] = self.clean(fields[key], inner, field_name)
        missing = sorted(_required(kind) - set(cleaned))
        _expect(not missing, f"the field {missing[:1]}", value, name)
        return cleaned

    def _clean_mapping(self, kind: Any, value: Any, where: str) -> dict[str, Any]:
        _expect(isinstance(value, dict), "a JSON object", value, where)
        for key in value:
            self._check_text(key, f"{where} keys")
        return {key: self.clean(kind, inner, where) for key, inner in value.items()}

    def _clean_scalar(self, kind: type, value: Any, where: str) -> Any:
        if kind is str:
            _expect(isinstance(value, str), "a string", value, where)
            self._check_text(value, where)
            return value
        if kind is float:
            is_valid = type(value) in (int, float) or value in ("Infinity", "-Infinity", "NaN")
        elif kind is bool:
            is_valid = type(value) is bool
        elif issubclass(kind, enum.IntEnum):
            is_valid = type(value) is int and value in set(kind)
        else:
            is_valid = kind is int and type(value) is int and abs(value) <= 2**63
        _expect(is_valid, f"a {kind.__name__}", value, where)
        return value

    def _check_text(self, text: str, where: str) -> None:
        own_rules = {"Node.target": self._check_target, "SymExpr.expr_str": self._check_expression}
        rule = own_rules.get(where) or _TEXT_RULES.get(where)
        if rule is None:
            raise RefusedFile(f"{where}: this torch has a text field that demask does not know")
        try:
            rule(text)
        except BadInput as error:
            raise type(error)(f"{where}: {error}") from None

    def _check_expression(self, text: str) -> None:
        if text not in self.expressions:
            self.expressions.add(check_expression(text))

    def _check_target(self, target: str) -> None:
        kind, _, name = target.partition(".")
        plain = f"operator.{name}" if kind == "_operator" else target
        if plain in BUILTINS and plain != "operator.getitem":
            return
        if target in {f"torch.ops.higher_order.{wrapper}" for wrapper in _WRAPPERS}:
            return
        if not target.startswith("torch.ops."):
            raise RefusedFile(f"got the target {target[:80]!r}; expected an op of torch.ops.aten")
        find_op(target.removeprefix("torch.ops."), self.namespaces)


def clean_program(value: Any, namespaces: Collection[str]) -> dict[str, Any]:
    """The JSON of an exported program with names, targets, expressions and specs checked.

    Node metadata except the module stack is removed.
    """
    program = ProgramSchema(frozenset(namespaces))
    cleaned = program.clean(schema.ExportedProgram, value, "program")
    if sum(map(len, program.expressions)) > MAX_EXPRESSIONS:
        raise RefusedFile(f"more than {MAX_EXPRESSIONS} characters of symbolic expressions")
    return cleaned


def clean_payloads(value: Any) -> dict[str, Any]:
    """The JSON of a table of tensors (weights or constants), checked like the program."""
    return ProgramSchema(frozenset()).clean(schema.PayloadConfig, value, "tensors")


@cache
def _fields(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, globalns=dict(vars(schema)))


@cache
def _required(kind: type) -> frozenset[str]:
    return frozenset(
        each.name
        for each in dataclasses.fields(kind)
        if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
    )


def _expect(known: bool, expected: str, value: Any, where: str) -> None:
    if not known:
        shown = repr(value) if not isinstance(value, dict | list) else f"a {type(value).__name__}"
        raise BadInput(f"{where}: expected {expected}, got {shown[:80]}")


def _matches(pattern: re.Pattern[str], expected: str) -> Rule:
    def rule(text: str) -> None:
        if not pattern.fullmatch(text):
            raise RefusedFile(f"got {text[:80]!r}; expected {expected}")

    return rule


def _any_text(text: str) -> None:
    if len(text) > MAX_TEXT:
        raise RefusedFile(f"got a text of {len(text)} characters; expected at most {MAX_TEXT}")


def _module_stack(metadata: Any) -> dict[str, str]:
    """The module stack in a node's metadata, if printable; torch never looks up these names."""
    stack = metadata.get("nn_module_stack") if isinstance(metadata, Mapping) else None
    if not isinstance(stack, str) or len(stack) > MAX_TEXT or not stack.isprintable():
        return {}
    plain = all(entry.count(",") == 2 for entry in stack.split(";"))
    return {"nn_module_stack": stack} if plain else {}


def _conditions(texts: Any) -> list[str]:
    """Checked conditions on sizes, which torch runs as Python."""
    known = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    _expect(known, "a list of strings", texts, "ExportedProgram.guards_code")
    return [export_guards.check_condition(text) for text in texts]


_REWRITTEN: dict[str, Callable[[Any], Any]] = {
    "Node.metadata": _module_stack,
    "GraphModule.metadata": lambda _: {},
    "ExportedProgram.guards_code": _conditions,
}


def _path_or_empty(text: str) -> None:
    if text:
        check_fqn(text)


_RULES: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    (
        check_name,
        (
            "TensorArgument.name",
            "GraphArgument.name",
            "SymIntArgument.as_name",
            "SymFloatArgument.as_name",
            "SymBoolArgument.as_name",
            "InputToConstantInputSpec.name",
            "Graph.tensor_values keys",
            "Graph.sym_int_values keys",
            "Graph.sym_float_values keys",
            "Graph.sym_bool_values keys",
            "Graph.custom_obj_values keys",
            "Node.name",
            "GradientToUserInputSpec.user_input_name",
            "UserInputMutationSpec.user_input_name",
            "ModuleCallSignature.forward_arg_names",
            "NamedTupleDef.field_names",
        ),
    ),
    (
        check_fqn,
        (
            "InputToParameterSpec.parameter_name",
            "InputToBufferSpec.buffer_name",
            "InputToTensorConstantSpec.tensor_constant_name",
            "BufferMutationSpec.buffer_name",
            "ParameterMutationSpec.parameter_name",
            "GradientToParameterSpec.parameter_name",
            "PayloadConfig.config keys",
        ),
    ),
    (_path_or_empty, ("ModuleCallEntry.fqn",)),
    (_matches(_ARGUMENT, "an argument name"), ("NamedArgument.name",)),
    (check_call_spec, ("ModuleCallSignature.in_spec",)),
    (check_spec, ("ModuleCallSignature.out_spec",)),
    (_matches(_DEVICE, "cpu, cuda, mps, xpu or meta"), ("Device.type",)),
    (_matches(_RANGE, "a symbol like s0 or 2*s0"), ("ExportedProgram.range_constraints keys",)),
    (_matches(_PAYLOAD, "weight_<n> or tensor_<n>"), ("PayloadMeta.path_name",)),
    (
        _matches(_LABEL, "a plain label"),
        (
            "ExportedProgram.opset_version keys",
            "ExportedProgram.torch_version",
            "GraphModule.treespec_namedtuple_fields keys",
        ),
    ),
    (_matches(_DIALECT, "TRAINING or ATEN"), ("ExportedProgram.verifiers",)),
    (_any_text, ("Argument.as_string", "Argument.as_strings", "ConstantValue.as_string")),
)
_TEXT_RULES: dict[str, Rule] = {name: rule for rule, names in _RULES for name in names}
