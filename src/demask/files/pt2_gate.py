"""Checks that every .pt2 file passes before torch reads it.

`torch.export.load` can run code from a file: pickled weights and sample inputs, Python in
symbolic expressions, in names (a graph becomes source) and in guards, any function named as an
operator, modules named in tree specs, compiled libraries. So the file is read here, within limits
and against allow lists, and torch reads a copy of the checked parts, without inputs.

The program's JSON is checked by the types of torch's own schema, and every text field by a rule: a text
field without one is refused, so fields that a later torch adds are refused too. torch evaluates symbolic
expressions as Python (`sympify`), so they may have only what torch.export writes.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import json
import math
import os
import re
import shutil
import types
import typing
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from demask.compat.export_schema import DTYPES, SCHEMA_VERSION, Layout, Union, load_pt2, schema
from demask.errors import BadInput, RefusedFile
from demask.files.allowed_names import BUILTINS, check_call_spec, check_fqn, check_name, check_spec, find_op
from demask.files.atomic_write import temporary_folder
from demask.files.bounded_read import open_zip, read_json
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
MAX_EXPANDED = 2**28  # elements of a tensor that repeats stored elements (stride 0)
_PROGRAM = "models/model.json"
_TABLES = (
    ("data/weights/", "data/weights/model_weights_config.json"),
    ("data/constants/", "data/constants/model_constants_config.json"),
)
_DROPPED = ("extra/", ".data/", "data/sample_inputs/")
_FIXED = {"archive_format": b"pt2", "archive_version": b"0", "byteorder": b"little"}


@dataclass(frozen=True, slots=True)
class _Checked:
    """The parts of a .pt2 that torch will read: JSON by entry, and the entries of raw tensors."""

    root: str
    documents: dict[str, Any]
    payloads: tuple[str, ...]


def check(path: str | os.PathLike[str], *, namespaces: Collection[str] = ()) -> None:
    """Check that the .pt2 at `path` contains a plain program and raw tensors.

    Args:
        namespaces: op namespaces allowed in addition to aten, such as "torchvision". The caller
            has imported the libraries that define them.

    Raises:
        BadInput: not a readable .pt2.
        RefusedFile: contents that could run code or exhaust memory.
    """
    with _with_advice(), open_zip(path) as archive:
        _check_archive(archive, namespaces)


def open_pt2(path: str | os.PathLike[str], *, namespaces: Collection[str] = ()) -> torch.export.ExportedProgram:
    """The program in the .pt2 at `path`, without sample inputs; errors as `check`.

    Example: `open_pt2("model.pt2").module()(torch.randn(1, 3, 224, 224))`
    """
    with _with_advice(), temporary_folder() as folder:
        copy = folder / "model.pt2"
        with open_zip(path) as archive:
            _write_copy(archive, _check_archive(archive, namespaces), copy)
        return _load_copy(copy, path)


@contextmanager
def _with_advice() -> Iterator[None]:
    try:
        yield
    except RefusedFile as error:
        raise RefusedFile(
            f"{error}\n  the file was not opened; export the model again with torch.export.save, "
            "from a source you trust"
        ) from None


def _load_copy(copy: Path, path: str | os.PathLike[str]) -> torch.export.ExportedProgram:
    try:
        return load_pt2(str(copy)).exported_programs["model"]
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise BadInput(
            f"{path}: torch {torch.__version__} cannot read this program: {reason[-1][:300]}; "
            "export it again with this torch"
        ) from error


def _check_archive(archive: zipfile.ZipFile, namespaces: Collection[str]) -> _Checked:
    root, names = _root_entries(archive)
    documents, payloads, known = {}, [], {_PROGRAM, *_FIXED}
    for folder, table in _TABLES:
        payloads_json = read_json(archive, f"{root}/{table}")
        config = ProgramSchema(frozenset()).clean(schema.PayloadConfig, payloads_json, "tensors")
        sizes = {
            name: archive.getinfo(f"{root}/{name}").file_size
            for name in names
            if name.startswith(folder) and name != table
        }
        _check_tensors(config["config"], folder, sizes)
        documents[table] = config
        used = {folder + meta["path_name"] for meta in config["config"].values()}
        payloads.extend(sorted(used))
        known |= used | {table}
    for name in names:
        if name not in known and not name.startswith(_DROPPED):
            raise RefusedFile(f"entry {name!r}: expected a program and raw tensors only")
    program = clean_program(read_json(archive, f"{root}/{_PROGRAM}"), {"aten", *namespaces})
    _check_version(program)
    documents[_PROGRAM] = program
    return _Checked(root, documents, tuple(payloads))


def _root_entries(archive: zipfile.ZipFile) -> tuple[str, list[str]]:
    """The archive's only root folder and the entries in it; checks the fixed entries."""
    full = archive.namelist()
    roots = {name.split("/")[0] for name in full}
    if len(roots) != 1 or not all("/" in name for name in full):
        raise BadInput(
            "expected a .pt2 written by torch.export.save (torch 2.8 or later), got another zip "
            "archive; save the model again with torch.export.save"
        )
    root = roots.pop()
    for name, expected in _FIXED.items():
        entry = f"{root}/{name}"
        if entry not in archive.NameToInfo or archive.getinfo(entry).file_size > 16:
            raise BadInput(f"entry {name!r} is missing; expected a complete .pt2 of torch.export.save")
        if archive.read(entry) != expected:
            raise BadInput(f"entry {name!r}: expected {expected!r}, got something else")
    return root, [name[len(root) + 1 :] for name in full]


def _check_version(program: dict[str, Any]) -> None:
    major = program["schema_version"]["major"]
    if major != SCHEMA_VERSION[0]:
        raise BadInput(
            f"schema version {major}, expected {SCHEMA_VERSION[0]}; export the model again with "
            f"torch {torch.__version__}"
        )


def _check_tensors(config: dict[str, Any], folder: str, sizes: dict[str, int]) -> None:
    dtypes: dict[str, int] = {}
    for fqn, meta in config.items():
        record = folder + meta["path_name"]
        if meta["use_pickle"]:
            raise RefusedFile(f"tensor {fqn}: stored as a pickle; expected raw bytes")
        if meta["tensor_meta"] is None or record not in sizes:
            raise BadInput(f"tensor {fqn}: its bytes ({record}) or its sizes are missing")
        dtype = meta["tensor_meta"]["dtype"]
        if dtypes.setdefault(record, dtype) != dtype:
            raise RefusedFile(f"tensor {fqn}: {record} is read as two dtypes")
        _check_extent(fqn, meta["tensor_meta"], sizes[record])


def _check_extent(fqn: str, meta: dict[str, Any], stored: int) -> None:
    """Refuse tensors with elements outside the `stored` bytes, or with far more elements."""
    if meta["layout"] != Layout.Strided or meta["dtype"] not in DTYPES:
        raise RefusedFile(f"tensor {fqn}: expected a strided tensor of a known dtype")
    width = DTYPES[meta["dtype"]].itemsize
    sizes, strides = _natural_numbers(fqn, meta["sizes"]), _natural_numbers(fqn, meta["strides"])
    offset = _natural_numbers(fqn, [meta["storage_offset"]])[0]
    if len(sizes) != len(strides) or len(sizes) > 64 or stored % width:
        raise RefusedFile(f"tensor {fqn}: sizes, strides and bytes do not match")
    count = math.prod(sizes)
    last = offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    available = stored // width
    if (count and last >= available) or offset > available or (not available and count):
        raise RefusedFile(f"tensor {fqn}: element {last} of {available} stored: out of bounds")
    if count > max(available, MAX_EXPANDED):
        raise RefusedFile(f"tensor {fqn}: {count} elements expanded from {available} stored")


def _natural_numbers(fqn: str, sizes: list[dict[str, Any]]) -> list[int]:
    values = [size.get("as_int", -1) for size in sizes]
    if min(values, default=0) < 0:
        raise RefusedFile(f"tensor {fqn}: a size, stride or offset that is not a natural number")
    return values


def _write_copy(archive: zipfile.ZipFile, checked: _Checked, copy: Path) -> None:
    with zipfile.ZipFile(copy, "w", zipfile.ZIP_STORED) as clean:
        for name in checked.payloads:
            source = archive.open(f"{checked.root}/{name}")
            with source, clean.open(f"model/{name}", "w", force_zip64=True) as target:
                shutil.copyfileobj(source, target, 2**20)
        for name, document in checked.documents.items():
            clean.writestr(f"model/{name}", json.dumps(document))
        for name, content in _FIXED.items():
            clean.writestr(f"model/{name}", content)
        clean.writestr("model/.data/version", b"6\n")
        clean.writestr("model/data/sample_inputs/model.pt", b"")


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
        fields = _field_types(kind)
        single = isinstance(value, dict) and len(value) == 1
        _expect(single and next(iter(value)) in fields, f"a {kind.__name__}", value, where)
        tag, inner = next(iter(value.items()))
        field_name = f"{kind.__name__}.{tag}"
        if field_name in _REFUSED:
            raise RefusedFile(f"{where}: got {_REFUSED[field_name]}; expected tensors and numbers")
        return {tag: self.clean(fields[tag], inner, field_name)}

    def _clean_record(self, kind: type, value: Any) -> dict[str, Any]:
        fields, name = _field_types(kind), kind.__name__
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
        missing = sorted(_required_fields(kind) - set(cleaned))
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


@cache
def _field_types(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, globalns=dict(vars(schema)))


@cache
def _required_fields(kind: type) -> frozenset[str]:
    return frozenset(
        each.name
        for each in dataclasses.fields(kind)
        if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
    )


def _expect(known: bool, expected: str, value: Any, where: str) -> None:
    if not known:
        shown = repr(value) if not isinstance(value, dict | list) else f"a {type(value).__name__}"
        raise BadInput(f"{where}: expected {expected}, got {shown[:80]}")


def _matching_rule(pattern: re.Pattern[str], expected: str) -> Rule:
    def rule(text: str) -> None:
        if not pattern.fullmatch(text):
            raise RefusedFile(f"got {text[:80]!r}; expected {expected}")

    return rule


def _check_text_length(text: str) -> None:
    if len(text) > MAX_TEXT:
        raise RefusedFile(f"got a text of {len(text)} characters; expected at most {MAX_TEXT}")


def _clean_module_stack(metadata: Any) -> dict[str, str]:
    """The module stack in a node's metadata, if printable; torch never looks up these names."""
    stack = metadata.get("nn_module_stack") if isinstance(metadata, Mapping) else None
    if not isinstance(stack, str) or len(stack) > MAX_TEXT or not stack.isprintable():
        return {}
    plain = all(entry.count(",") == 2 for entry in stack.split(";"))
    return {"nn_module_stack": stack} if plain else {}


def _check_conditions(texts: Any) -> list[str]:
    """Checked conditions on sizes, which torch runs as Python."""
    known = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    _expect(known, "a list of strings", texts, "ExportedProgram.guards_code")
    return [export_guards.check_condition(text) for text in texts]


def _check_path_or_empty(text: str) -> None:
    if text:
        check_fqn(text)


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
        _check_node(ast.parse(text, mode="eval").body, 0)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        shown = text if len(text) <= 80 else text[:77] + "..."
        reason = error if isinstance(error, RefusedFile) else "not an expression"
        raise RefusedFile(
            f"got the symbolic expression {shown!r} ({reason}); "
            "expected sums, products and quotients of symbols and integers"
        ) from error
    return text


def _check_node(node: ast.expr, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise RefusedFile(f"nested deeper than {MAX_DEPTH}")
    match node:
        case ast.Constant(value=int(value)) if abs(value) <= MAX_INTEGER:
            return
        case ast.Name(id=name) if _BARE_SYMBOL.fullmatch(name):
            return
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _check_node(operand, depth + 1)
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _BINARY):
            _check_node(left, depth + 1)
            _check_node(right, depth + 1)
        case ast.Compare(left=left, ops=ops, comparators=others) if all(isinstance(op, _COMPARE) for op in ops):
            for operand in (left, *others):
                _check_node(operand, depth + 1)
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
        _check_node(argument, depth + 1)
    if name in _POWERS:
        _check_power(call)
    if _count_extremes(call) > MAX_EXTREMES:
        raise RefusedFile(f"{name} of more than {MAX_EXTREMES} values")
    return None


def _count_extremes(node: ast.expr) -> int:
    """Number of values compared by nested Max and Min; 1 for anything else."""
    match node:
        case ast.Call(func=ast.Name(id="Max" | "Min"), args=args):
            return sum(_count_extremes(argument) for argument in args)
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
            power = _constant_integer(exponent)
        case [base, exponent]:
            power = _constant_integer(exponent)
        case _:
            raise RefusedFile("a power without two arguments")
    nested = any(isinstance(n, ast.Name) and n.id in _POWERS for n in ast.walk(base))
    if power is None or abs(power) > MAX_EXPONENT or nested:
        raise RefusedFile(f"unexpected {ast.unparse(call)[:40]}")


def _constant_integer(node: ast.expr) -> int | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if type(value) is int else None


_REWRITTEN: dict[str, Callable[[Any], Any]] = {
    "Node.metadata": _clean_module_stack,
    "GraphModule.metadata": lambda _: {},
    "ExportedProgram.guards_code": _check_conditions,
}


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
    (_check_path_or_empty, ("ModuleCallEntry.fqn",)),
    (_matching_rule(_ARGUMENT, "an argument name"), ("NamedArgument.name",)),
    (check_call_spec, ("ModuleCallSignature.in_spec",)),
    (check_spec, ("ModuleCallSignature.out_spec",)),
    (_matching_rule(_DEVICE, "cpu, cuda, mps, xpu or meta"), ("Device.type",)),
    (_matching_rule(_RANGE, "a symbol like s0 or 2*s0"), ("ExportedProgram.range_constraints keys",)),
    (_matching_rule(_PAYLOAD, "weight_<n> or tensor_<n>"), ("PayloadMeta.path_name",)),
    (
        _matching_rule(_LABEL, "a plain label"),
        (
            "ExportedProgram.opset_version keys",
            "ExportedProgram.torch_version",
            "GraphModule.treespec_namedtuple_fields keys",
        ),
    ),
    (_matching_rule(_DIALECT, "TRAINING or ATEN"), ("ExportedProgram.verifiers",)),
    (_check_text_length, ("Argument.as_string", "Argument.as_strings", "ConstantValue.as_string")),
)


_TEXT_RULES: dict[str, Rule] = {name: rule for rule, names in _RULES for name in names}
