"""Conversion of graph node arguments to JSON and back: a closed set of tagged values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from demask.compat import onednn
from demask.compat.dispatch import OpOverload, base_name, is_mutable, overload_name
from demask.errors import BadInput, RefusedFile
from demask.files.allowed_names import BUILTINS, find_op
from demask.graph.node_records import TensorType

MAX_DEPTH = 20
MAX_TEXT = 4_000_000  # characters, enough for the program of a segment
MAX_SIZE = 10_000  # characters of a symbolic size

_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|meta)(:\d{1,3})?", re.ASCII)
_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def _torch_constants(kind: type) -> dict[str, Any]:
    """The constants of a type in torch, by name ("float32": torch.float32)."""
    constants = [value for value in vars(torch).values() if isinstance(value, kind)]
    return {str(value).removeprefix("torch."): value for value in constants}


#: torch.dtype by name, "float32"
DTYPES: dict[str, torch.dtype] = _torch_constants(torch.dtype)
_CONSTANTS: dict[str, tuple[type, dict[str, Any]]] = {
    "dtype": (torch.dtype, DTYPES),
    "layout": (torch.layout, _torch_constants(torch.layout)),
    "memory_format": (torch.memory_format, _torch_constants(torch.memory_format)),
}
_BUILTIN_NAMES = {function: name for name, function in BUILTINS.items()}


def encode(value: Any) -> Any:
    """JSON for one argument: plain JSON for None, bool, int, str, finite floats and lists; an
    object with one tag for nodes, tuples, slices, complex numbers and constants of torch."""
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case complex():
            return {"complex": [encode(value.real), encode(value.imag)]}
        case fx.Node():
            return {"node": value.name}
        case torch.Size() | tuple():
            return {"tuple": [encode(item) for item in value]}
        case list():
            return [encode(item) for item in value]
        case slice():
            return {"slice": [encode(item) for item in (value.start, value.stop, value.step)]}
        case torch.device():
            return {"device": str(value)}
    for tag, (kind, _) in _CONSTANTS.items():
        if isinstance(value, kind):
            return {tag: str(value).removeprefix("torch.")}
    raise BadInput(f"an argument of type {type(value).__name__} cannot be saved: {value!r:.60}")


def decode(data: Any, nodes: Mapping[str, fx.Node], depth: int = 0) -> Any:
    """The argument that `encode` wrote; RefusedFile otherwise. nodes: earlier nodes by name."""
    if depth > MAX_DEPTH:
        raise RefusedFile(f"got arguments nested deeper than {MAX_DEPTH}")
    match data:
        case None | bool() | float():
            return data
        case str() if len(data) <= MAX_TEXT:
            return data
        case int() if abs(data) < 2**63:
            return data
        case list():
            return [decode(item, nodes, depth + 1) for item in data]
        case {"tuple": list(items), **rest} if not rest:
            return tuple(decode(item, nodes, depth + 1) for item in items)
        case {"slice": [start, stop, step], **rest} if not rest:
            return slice(*(decode(item, nodes, depth + 1) for item in (start, stop, step)))
        case {"complex": [real, imaginary], **rest} if not rest:
            return complex(_decode_float(real), _decode_float(imaginary))
        case {"node": str(name), **rest} if not rest and name in nodes:
            return nodes[name]
        case dict() if len(data) == 1:
            return _decode_constant(*next(iter(data.items())))
    raise RefusedFile(f"got the argument {_short(data)}; expected a value that demask writes")


WRITE = torch.ops.aten.copy_.default  # the one call that may change a tensor: an input


def encode_target(target: Any) -> str:
    """The name under which a function is stored: "aten.add.Tensor", "operator.mul"."""
    if isinstance(target, OpOverload):
        name = f"{target.namespace}.{base_name(target)}.{overload_name(target)}"
        decode_target(name)
        return name
    if target in _BUILTIN_NAMES:
        return _BUILTIN_NAMES[target]
    raise BadInput(f"a call of {target} cannot be saved; only ATen ops and integer arithmetic can")


def decode_target(name: Any) -> Any:
    """The function named `name`: one of `BUILTINS`, a functional op, or WRITE."""
    if isinstance(name, str) and name in BUILTINS:
        return BUILTINS[name]
    op = find_op(name, ("aten", "demask", onednn.NAMESPACE))
    if is_mutable(op) and op is not WRITE:
        raise RefusedFile(f"got the op {name}, which changes its arguments; expected its functional form")
    return op


def encode_value(value: TensorType) -> list[Any]:
    """JSON for the type of a node's result."""
    return [str(value.dtype).removeprefix("torch."), list(value.sizes), value.device]


def decode_value(data: Any) -> TensorType:
    """The type that `encode_value` wrote. RefusedFile otherwise."""
    match data:
        case [str(dtype), list(sizes), str(device)] if (
            dtype in DTYPES
            and all(type(n) in (int, str) and len(str(n)) <= MAX_SIZE for n in sizes)
            and _DEVICE.fullmatch(device)
        ):
            return TensorType(DTYPES[dtype], tuple(sizes), device)
    raise RefusedFile(f"got the type {_short(data)}; expected a dtype, sizes and a device")


def _decode_constant(tag: str, text: Any) -> Any:
    if tag == "float" and isinstance(text, str) and text in _NOT_FINITE:
        return _NOT_FINITE[text]
    if tag == "device" and isinstance(text, str) and _DEVICE.fullmatch(text):
        return torch.device(text)
    if tag in _CONSTANTS and isinstance(text, str) and text in _CONSTANTS[tag][1]:
        return _CONSTANTS[tag][1][text]
    raise RefusedFile(f"got the value {_short({tag: text})}; expected one that demask writes")


def _decode_float(data: Any) -> float:
    value = decode(data, {})
    if type(value) not in (int, float):
        raise RefusedFile(f"got {_short(data)}; expected a number")
    return float(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
