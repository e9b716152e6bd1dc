"""Names, op targets and pytree specs that a file may contain: fixed lists, never attribute look-ups by
name."""

from __future__ import annotations

import keyword
import math
import operator
import re
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.utils import _pytree as pytree

from demask.compat import onednn
from demask.compat.dispatch import OpOverload, has_kernel, read_schema
from demask.errors import BadInput, RefusedFile
from demask.files.bounded_read import parse_json
from demask.ops.custom import is_custom_op

MAX_SPEC_NODES = 200_000
MAX_SPEC_DEPTH = 50
_FACTORIES = frozenset("list dict tuple set int float str bool".split())
_KEYED = ("builtins.dict", "collections.OrderedDict", "collections.defaultdict")
_SCALAR = str | int | float | bool | None
MAX_NAME = 1000
_FQN_PART = re.compile(r"(?!__)[\w \-+:/@#]{1,200}")
_OP = re.compile(r"([a-z][a-z0-9_]*)\.([a-zA-Z_][a-zA-Z0-9_]*)\.([a-zA-Z][a-zA-Z0-9_]*)")
_OPERATORS = "add sub mul floordiv truediv mod pow neg pos eq ne lt le gt ge and_ or_ lshift rshift getitem"
_SYMBOLIC = "sym_max sym_min sym_not sym_int sym_float sym_ite sym_sqrt sym_sum _sym_sqrt".split()
#: the plain Python functions that a graph may call, by the name they are stored under
BUILTINS: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()},
    **{f"torch.{name}": getattr(torch, name) for name in _SYMBOLIC if hasattr(torch, name)},
    "math.trunc": math.trunc,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
}
# Private ops that occur in exported graphs; other private kernels trust their arguments.
_PRIVATE_OPS = (
    "_adaptive_avg_pool2d _adaptive_avg_pool3d _assert_async _assert_scalar "
    "_assert_tensor_metadata _cdist_forward _conj _convolution _embedding_bag _fft_c2c _fft_c2r "
    "_fft_r2c _local_scalar_dense _log_softmax _native_batch_norm_legit "
    "_native_batch_norm_legit_no_training _native_multi_head_attention _pdist_forward "
    "_reshape_alias _scaled_dot_product_flash_attention_for_cpu _shape_as_tensor _softmax "
    "_to_copy _transformer_encoder_layer_fwd _trilinear _unsafe_index _unsafe_view "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d _weight_norm _weight_norm_interface "
).split()
# Their kernels read tensors as packed C++ objects, or replace the storage of a tensor.
_REFUSED_OPS = re.compile(
    rf"(fbgemm|cudnn|miopen|{onednn.NAMESPACE}|quantized|sparse|fused)_.*|"
    r"set|set_|set_data|record_stream"
)
_TEXT_ARGUMENTS = frozenset(
    "approximate mode padding pad_mode padding_side indexing rounding_mode interpolation reduce "
    "equation norm ord p UPLO driver side activation assert_msg "
    "attr algorithm binary_attr unary_attr unary_algorithm "
    "dtype form program".split()
)
_ARGUMENT_TYPE = re.compile(r"((Optional|List)\[)*(Tensor|int|float|bool|number|complex|str|Device|Generator)\]*")


def check_name(name: Any) -> str:
    """Return `name` if it is a Python identifier, safe as a variable in generated source.

    Raises:
        RefusedFile: anything else.
    """
    is_valid = isinstance(name, str) and len(name) <= MAX_NAME and name.isidentifier()
    if is_valid and not keyword.iskeyword(name):
        return name
    raise RefusedFile(f"got the name {_short(name)}; expected a Python identifier")


def check_fqn(name: Any) -> str:
    """Return `name` if it is a dotted path of a tensor or module, safe in generated source.

    Raises:
        RefusedFile: anything else, such as quotes, backslashes or double underscores.
    """
    is_valid = isinstance(name, str) and len(name) <= MAX_NAME
    if is_valid and all(_FQN_PART.fullmatch(part) for part in name.split(".")):
        return name
    raise RefusedFile(f"got the path {_short(name)}; expected a dotted name like 'layer1.weight'")


def find_op(name: Any, namespaces: Collection[str] = ("aten",)) -> OpOverload:
    """The op named `name` ("aten.add.Tensor"), from one of `namespaces`.

    Raises:
        RefusedFile: no such op, or one that takes file names, C++ objects, storages or streams.
    """
    match = _OP.fullmatch(name) if isinstance(name, str) and len(name) <= MAX_NAME else None
    if match is None or match[1] not in namespaces:
        allowed = ", ".join(sorted(namespaces))
        raise RefusedFile(f"got the op {_short(name)}; expected an op of: {allowed}")
    space, base, overload = match.groups()
    schema_name = f"{space}::{base}", "" if overload == "default" else overload
    if not _is_harmless(space, base) or not _takes_plain_values(*schema_name):
        raise RefusedFile(f"got the op {name}; no model needs it, or this torch does not know it")
    op = getattr(getattr(getattr(torch.ops, space), base), overload)
    if not isinstance(op, OpOverload):
        raise RefusedFile(f"got the op {name}; expected an overload of a registered op")
    return op


def _is_harmless(space: str, base: str) -> bool:
    if space == onednn.NAMESPACE:
        # optimize() writes them. Their kernels check few arguments, so demask first runs the ATen
        # ops that they replace, on the same shapes (`tune.optimized_module`).
        return base in onednn.OPS
    if space == "demask":
        return is_custom_op(base)
    if space != "aten":
        return True  # the caller named this namespace
    if base.startswith("__"):
        return base.strip("_") in ("and", "or", "xor", "lshift", "rshift")
    return base in _PRIVATE_OPS if base.startswith("_") else not _REFUSED_OPS.fullmatch(base)


def _takes_plain_values(name: str, overload: str) -> bool:
    if not has_kernel(f"{name}.{overload}" if overload else name):
        return False
    return all(_is_plain(argument) for argument in read_schema(name, overload).arguments)


def _is_plain(argument: Any) -> bool:
    type_text = str(argument.type)
    if not _ARGUMENT_TYPE.fullmatch(type_text):
        return False
    return "str" not in type_text or argument.name in _TEXT_ARGUMENTS


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def check_spec(text: Any) -> str:
    """Return `text` if it is a pytree spec of known container types, safe for torch to read.

    Raises:
        BadInput: a container type that a library must register first; the message names it.
        RefusedFile: anything that would import a module, and specs that are too large.
    """
    if not isinstance(text, str):
        raise RefusedFile(f"got a tree spec of type {type(text).__name__}; expected a string")
    document = parse_json(text, "tree spec")
    match document:
        case [1, dict(root)]:
            pending: list[tuple[Any, int]] = [(root, 0)]
        case _:
            raise RefusedFile("got a tree spec of an unknown version; expected version 1")
    count = 0
    while pending:
        node, depth = pending.pop()
        count += 1
        if count > MAX_SPEC_NODES or depth > MAX_SPEC_DEPTH:
            raise RefusedFile(f"got a tree spec of more than {MAX_SPEC_NODES} nodes or too deep")
        pending.extend((child, depth + 1) for child in _checked_children(node))
    return text


def load_spec(text: Any) -> pytree.TreeSpec:
    """The pytree spec in `text`; errors as `check_spec`."""
    checked = check_spec(text)
    try:
        return pytree.treespec_loads(checked)
    except Exception as error:
        raise BadInput(f"this torch cannot read the tree spec: {error}") from error


def check_call_spec(text: Any) -> str:
    """`check_spec` for (args, kwargs): keywords must be identifiers, as they become source code."""
    spec = load_spec(text)
    if spec.type is not tuple or spec.num_children != 2:
        return check_spec(text)
    keywords = spec.child(1)
    for name in keywords.context if keywords.type is dict else ():
        check_name(name)
    return text


def _checked_children(node: Any) -> list[Any]:
    """The children of a node, after its own type and context are checked."""
    match node:
        case {"type": None, "context": None, "children_spec": [], **rest} if not rest:
            return []
        case {"type": str(kind), "context": context, "children_spec": list(children), **rest} if not rest:
            _check_context(kind, context, len(children))
            return children
        case _:
            raise RefusedFile("got a tree spec node that is neither a leaf nor a container")


def _check_context(kind: str, context: Any, children: int) -> None:
    if kind not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
        module = kind.rpartition(".")[0]
        raise BadInput(
            f"the model takes or returns a {kind!r}, which is not known here: import {module} "
            f"first (on the command line: --import {module}); if that does not register it, do so "
            "with torch.export.register_dataclass"
        )
    if kind == "collections.defaultdict":
        context = _defaultdict_keys(context)
    elif kind == "collections.namedtuple":
        if context not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
            raise BadInput(
                f"the model takes or returns the named tuple {context!r}, which is not "
                "known here; import the library that defines it first"
            )
    elif isinstance(context, str):
        context = parse_json(context, f"context of {kind}")
    _check_no_enumeration(context)
    if kind in _KEYED and (not isinstance(context, list) or len(context) != children):
        raise RefusedFile(f"got a {kind} of {children} values whose keys do not match")


def _defaultdict_keys(context: Any) -> Any:
    match context:
        case {"default_factory_module": "builtins", "default_factory_name": str(name), "dict_context": list(keys)} if (
            name in _FACTORIES
        ):
            return keys
        case _:
            raise RefusedFile("got a defaultdict whose factory is not a builtin type")


def _check_no_enumeration(context: Any) -> None:
    """Refuse JSON objects that torch decodes as enumerations: it would import their module."""
    match context:
        case dict():
            if "__enum__" in context:
                raise RefusedFile("got an enumeration in a tree spec; expected plain keys")
            parts: list[Any] = list(context.values())
        case list():
            parts = context
        case _:
            return
    for part in parts:
        if not isinstance(part, _SCALAR):
            _check_no_enumeration(part)
