"""Entries of ONNX ops: one short PyTorch function per op, and the binding of nodes to it.

Positional parameters of a function take the node's inputs in order, or attributes of the same name:
`axes` of Squeeze was an attribute before opset 13 and is an input since, so one function serves
both. Keyword-only parameters take attributes, and six names of context: `version` (of the op set),
`outputs` (how many the node has), `run` (calls a subgraph), `device` (of new tensors), `as_tensor`
(converts a `Value` to a tensor), `node` (for a function that takes its attributes from there).
An annotation determines the type of an argument:

    Tensor   a tensor
    Ints     a list of ints, which may be symbolic; Floats likewise
    Int      one of them; Float likewise
    Number   a Python number where a scalar (no axes) is known without reading a tensor, else the
             tensor
    Value    unchanged: Tensor, Host, list or None

A parameter with no annotation is a tensor.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from demask.errors import BadInput, TableError
from demask.files.onnx.model import OnnxNode
from demask.files.onnx.values import Host, Value, number_of, numbers_of, tensor_of

Ints = list[Any]
Floats = list[Any]
Int = Any
Float = Any
Number = Any
MAX_WORK = 2**22  # most elements of a result of arithmetic on host values
CONTEXT = ("version", "outputs", "run", "device", "as_tensor", "node")


@dataclass(frozen=True, slots=True)
class OnnxCall:
    """What a node's function uses in addition to inputs and attributes."""

    lookup: Callable[[str], Tensor]  # a tensor of the module, by name
    device: torch.device
    context: Mapping[str, Any]
    record: Callable[[Callable[..., Any], list, dict], None] | None = None  # calls on tensors

    def convert(self, value: Value, kind: str) -> Any:
        """A value converted to the type that an annotation names."""
        if value is None or kind == "Value":
            return value
        if kind in ("Ints", "Floats"):
            return numbers_of(value)
        if kind in ("Int", "Float") or (kind == "Number" and _is_known_scalar(value)):
            return number_of(value)
        if isinstance(value, Host | Tensor) and kind in ("Tensor", "Number"):
            return tensor_of(value, self.lookup, self.device)
        return value


@dataclass(frozen=True, slots=True)
class OnnxEntry:
    """The implementation of one ONNX op."""

    name: str
    domain: str
    function: Callable[..., Any]  # on tensors
    host: Callable[..., Any] | None = None  # on numpy arrays, for arithmetic on sizes
    stored: tuple[int, ...] = ()  # inputs that become buffers if constant, as they are not trained

    def __call__(self, node: OnnxNode, inputs: Sequence[Value], call: OnnxCall) -> tuple[Value, ...]:
        """The outputs of a node."""
        are_known = all(v is None or (isinstance(v, Host) and v.folds) for v in inputs)
        if self.host is not None and are_known and _is_small_work(inputs):
            result = self._on_host(node, inputs, call)
            if result is not NotImplemented:
                return result
        args, named = _bind(self.function, node, inputs, call)
        if call.record is not None:
            call.record(self.function, args, named)
        result = self.function(*args, **named)
        return result if isinstance(result, tuple) else (result,)

    def _on_host(self, node: OnnxNode, inputs: Sequence[Value], call: OnnxCall) -> Any:
        arrays = [v.array if isinstance(v, Host) else v for v in inputs]
        args, named = _bind(self.host, node, arrays, call)
        result = self.host(*args, **named)  # type: ignore[misc]
        if result is NotImplemented:
            return result
        dtype = next((v.dtype for v in inputs if isinstance(v, Host)), None)
        outputs = result if isinstance(result, tuple) else (result,)
        return tuple(v if v is None or isinstance(v, Host | Tensor | list) else Host.of(v, dtype) for v in outputs)


def _is_known_scalar(value: Value) -> bool:
    return isinstance(value, Host) and value.folds and not value.array.ndim


def _is_small_work(inputs: Sequence[Value]) -> bool:
    """Whether results of arithmetic on these inputs have at most MAX_WORK elements."""
    sizes = [v.array.size for v in inputs if isinstance(v, Host)]
    return math.prod(n for n in sizes if n) <= MAX_WORK and sum(sizes) <= MAX_WORK


@dataclass(frozen=True, slots=True)
class Signature:
    """Parameters of a function: all by name, positional ones, the variadic one, the type of each,
    and names of context."""

    parameters: Mapping[str, inspect.Parameter]
    plain: tuple[inspect.Parameter, ...]
    rest: inspect.Parameter | None
    kinds: Mapping[str, str]
    context: tuple[str, ...]


@functools.cache
def _signature_of(function: Any) -> Signature:
    """The signature of a function, cached: `inspect` takes longer than most ops."""
    parameters = inspect.signature(function).parameters
    positional = [p for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
    rest = next((p for p in positional if p.kind is p.VAR_POSITIONAL), None)
    kinds = {name: _annotated_type(p) for name, p in parameters.items()}
    context = tuple(name for name in CONTEXT if name in parameters)
    return Signature(parameters, tuple(p for p in positional if p is not rest), rest, kinds, context)


def _bind(function: Any, node: OnnxNode, inputs: Sequence[Any], call: OnnxCall) -> tuple[list, dict]:
    """Args and kwargs of a function, from a node's inputs and attributes."""
    signature = _signature_of(function)
    plain, rest = signature.plain, signature.rest
    if len(inputs) > len(plain) and rest is None:
        raise BadInput(f"{node}: expected at most {len(plain)} inputs, got {len(inputs)}")
    kinds = [signature.kinds[p.name] for p in plain]
    if rest is not None:
        kinds += [signature.kinds[rest.name]] * max(0, len(inputs) - len(plain))
    args = [call.convert(v, kind) for v, kind in zip(inputs, kinds, strict=False)]
    while args and args[-1] is None and len(args) <= len(plain):
        args.pop()  # absent: the function's own default
    taken = {p.name for p in plain[: len(args)]}
    named = {}
    for name, value in () if "node" in signature.context else node.attributes.items():
        parameter_named = signature.parameters.get(name)
        if parameter_named is None or name in taken or parameter_named is rest:
            raise BadInput(f"{node}: demask does not know its attribute {name!r}")
        named[name] = call.convert(value, signature.kinds[name])
    for name in signature.context:
        named[name] = call.context[name]
    for k, parameter in enumerate(plain[: len(args)]):
        if args[k] is None and parameter.default is not parameter.empty:
            args[k] = parameter.default
    missing = [p.name for p in plain[len(args) :] if p.default is p.empty and p.name not in named]
    if missing:
        raise BadInput(f"{node}: input {missing[0]!r} is missing")
    return args, named


def _annotated_type(parameter: inspect.Parameter) -> str:
    if parameter.annotation is parameter.empty:
        return "Tensor"
    return str(parameter.annotation).partition("|")[0].strip()


@dataclass(slots=True)
class Ops:
    """Entries of one family, registered by decorators: `@OPS("Relu")`."""

    domain: str = ""
    entries: dict[tuple[str, str], OnnxEntry] = field(default_factory=dict)

    def __call__(
        self,
        *names: str,
        host: Callable[..., Any] | None = None,
        stored: tuple[int, ...] = (),
        domain: str | None = None,
    ) -> Any:
        """Register the decorated function for the ops with these names."""

        def enter(function: Callable[..., Any]) -> Callable[..., Any]:
            for name in names:
                self.put(OnnxEntry(name, self.domain if domain is None else domain, function, host, stored))
            return function

        return enter

    def put(self, entry: OnnxEntry) -> None:
        """Add an entry; TableError if the op has one."""
        key = (entry.domain, entry.name)
        if key in self.entries:
            raise TableError(f"two entries for ONNX op {entry.name}; expected one")
        self.entries[key] = entry

    def __iter__(self) -> Iterator[OnnxEntry]:
        return iter(self.entries.values())


def join_tables(*families: Ops) -> Mapping[tuple[str, str], OnnxEntry]:
    """The table of several families; TableError where two have an entry for one op."""
    joined = Ops()
    for family in families:
        for entry in family:
            joined.put(entry)
    return joined.entries
