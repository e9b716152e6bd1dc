"""Reads the networks of commands, from any supported file, with example inputs: their names, sizes and
types, and arrays that fit them."""

from __future__ import annotations

import ast
import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.cli.options import NetworkOptions, import_modules
from demask.errors import BadInput, NotExportable, RefusedFile
from demask.files.arrays import read_arrays
from demask.files.onnx.check import session
from demask.files.onnx.module import OnnxModule, from_onnx
from demask.files.onnx.read.reader import read
from demask.files.onnx.write.writer import as_demasked, default_interface
from demask.files.pt2 import read_model
from demask.files.retrace import MAX_EXAMPLE
from demask.graph import provenance
from demask.graph.capture.capture import capture
from demask.graph.example_inputs import draw_input, expected_domains, inputs_of_program
from demask.graph.module_copy import structural_copy
from demask.graph.provenance import NAMELESS, Interface, Provenance
from demask.ops.schema import example_size

OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}
PLAIN = NetworkOptions()
# Sizes that are tried for what an ONNX file leaves open: of images, lines of text at the end; of
# other axes.
TRIED = (((224, 224), 16), ((320, 320), 512), ((640, 640), 4096), ((48, 320), 16), ((32, 320), 16))


@dataclass(frozen=True, slots=True)
class NetworkInput:
    """An input of a network: its name, its sizes (dynamic ones by name) and its type."""

    name: str
    sizes: tuple[int | str, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, sizes: Sequence[int | str], dtype: torch.dtype) -> NetworkInput:
        """With INPUT.AXIS as the names of dynamic sizes that have none."""
        named = (f"{name}.{k}" if n in NAMELESS else n for k, n in enumerate(sizes))
        return cls(name, tuple(named), dtype)

    def __str__(self) -> str:
        sizes = ", ".join("any" if isinstance(n, str) else str(n) for n in self.sizes)
        return f"{self.name} {str(self.dtype).removeprefix('torch.')} [{sizes}]"

    def agrees(self, shape: Sequence[int | str], start: int = 0) -> bool:
        """Whether fixed sizes are alike, from an axis on."""
        if len(shape) != len(self.sizes):
            return False
        pairs = zip(self.sizes[start:], shape[start:], strict=True)
        return all(isinstance(a, str) or isinstance(b, str) or a == b for a, b in pairs)


def matched(arrays: Mapping[str, Tensor], ports: Sequence[NetworkInput], path: Path) -> dict[str, Tensor]:
    """One array for each input: by name, else in order."""
    names = [port.name for port in ports]
    if set(names) <= set(arrays):
        return {name: arrays[name] for name in names}
    if len(arrays) != len(ports):
        raise BadInput(f"{path}: expected arrays for {names}, got {list(arrays)}")
    return dict(zip(names, arrays.values(), strict=True))


def fitted(array: Tensor, port: NetworkInput, path: Path, start: int = 0) -> Tensor:
    """An array in the type of an input; BadInput where its sizes, from axis `start` on, or its type
    do not fit. Numbers of uint8 become x / 255 for an input of floating ones."""
    kind = str(array.dtype).removeprefix("torch.")
    if port.dtype.is_floating_point and array.dtype == torch.uint8:
        array = array.to(port.dtype) / 255
    elif port.dtype.is_floating_point == array.is_floating_point():
        array = array.to(port.dtype)
    if array.dtype != port.dtype or not port.agrees(array.shape, start):
        raise BadInput(f"{path}: expected input {port}, got {kind} {list(array.shape)}")
    return array


@dataclass(frozen=True, slots=True)
class NetworkFile:
    """A network read from a file, and example arguments."""

    model: Any  # None for a file that can only be edited, of `read_to_edit`
    args: tuple[Tensor, ...]  # () where the program has its own
    file: Path | None = None  # the ONNX file that computes this

    @property
    def module(self) -> nn.Module:
        """The network as something that can be called."""
        if isinstance(self.model, ExportedProgram):
            return self.model.module(check_guards=False)
        return self.model

    @property
    def example(self) -> tuple[Tensor, ...]:
        """Example arguments, drawn where there are none; BadInput where it takes keywords."""
        return self.args or _draw_inputs(self.model, _shapes_of(self.model))


def read_network(path: Path, options: NetworkOptions = PLAIN, *, inner: bool = False) -> NetworkFile:
    """The network in a .pt2 file, an archive of demask or an ONNX file, with example inputs as the
    options say; raises BadInput for anything else. inner: fix all sizes but the
    batch's, where --static does not fix all."""
    import_modules(options.imports)
    static: bool | str = options.static or (inner and "inner")
    if path.suffix == ".onnx" or options.fix:
        return _read_onnx(path, options, static)
    model = read_model(path)
    if static == "inner":
        sizes = [n for port in ports_of(NetworkFile(model, ())) for n in port.sizes[1:]]
        static = static if any(isinstance(n, str) for n in sizes) else False
    if not (options.sizes or options.inputs or static):
        args = () if isinstance(model, ExportedProgram) else _draw_inputs(model, _shapes_of(model))
        return NetworkFile(model, args)
    ports = ports_of(NetworkFile(model, ()))
    arrays = _input_arrays(options.inputs, ports)
    shapes = _resolve_sizes(ports, _parse_sizes(options.sizes, ports, path), arrays, _shapes_of(model))
    drawings = _draw_inputs(model, shapes)
    args = tuple(arrays.get(p.name, x) for p, x in zip(ports, drawings, strict=True))
    return NetworkFile(_fix_sizes(model, args, static) if static else model, args)


def ports_of(network: NetworkFile) -> tuple[NetworkInput, ...]:
    """The inputs of a network that was read from a file."""
    if isinstance(network.model, ExportedProgram):
        values = inputs_of_program(network.model).items()
        return tuple(
            NetworkInput.of(n, [s if isinstance(s, int) else str(s) for s in v.shape], v.dtype)
            for n, v in values
            if isinstance(v, Tensor)
        )
    record = cast(Provenance, network.model.demasked)
    return tuple(NetworkInput.of(s.name, s.sizes, getattr(torch, s.dtype)) for s in record.inputs)


def _shapes_of(model: ExportedProgram | fx.GraphModule) -> list[tuple[int, ...]]:
    """The sizes of the example inputs that a network stores."""
    if isinstance(model, ExportedProgram):
        values = inputs_of_program(model).values()
        return [tuple(map(example_size, v.shape)) for v in values if isinstance(v, Tensor)]
    return [spec.example for spec in cast(Provenance, model.demasked).inputs]


def _draw_inputs(model: ExportedProgram | fx.GraphModule, shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """Random example inputs in the ranges that the network's first ops accept."""
    ports, domains = ports_of(NetworkFile(model, ())), expected_domains(cast(Any, model))
    if isinstance(model, ExportedProgram):
        spec: Any = model.call_spec.in_spec
        if spec.num_leaves != len(ports):
            raise BadInput("the network takes inputs that are not tensors: use it in Python")
        args, kwargs = pytree.tree_unflatten(list(range(len(ports))), spec)
        if kwargs or list(args) != list(range(len(ports))):
            raise BadInput(
                "the network takes keywords or nested inputs: leave --size, --input and --static out, or use Python"
            )
    return tuple(example(port, shape, domains.get(port.name)) for port, shape in zip(ports, shapes, strict=True))


def example(port: NetworkInput, shape: Sequence[int], domain: Any = None) -> Tensor:
    """A tensor for an input; BadInput where it would be too large."""
    if math.prod(shape) > MAX_EXAMPLE:
        raise BadInput(f"input {port.name!r}: sizes {list(shape)} are too large: more than {MAX_EXAMPLE:,} elements")
    return draw_input(shape, port.dtype, domain)


# ----------------------------------------------------------------------------------------- ONNX


def fixed_network(path: Path, fix: Sequence[str] | None) -> OnnxModule:
    """The network in an ONNX file, with constants in place of inputs as `--fix` says."""
    if path.suffix != ".onnx":
        raise BadInput(f"--fix is for .onnx files, got {path}: leave it out")
    values: dict[str, Any] = {}
    for text in fix or ():
        name, _, value = text.partition("=")
        try:
            number = json.loads(value)
        except ValueError as error:
            raise BadInput(
                f"expected --fix NAME=VALUE, such as --fix rate=16000 or --fix sizes=[1,2], got {text!r}"
            ) from error
        if name in values:
            raise BadInput(f"--fix {name} appears twice: expected once")
        values[name] = number
    return from_onnx(path, inputs=values)


def fixes_of(path: Path, fix: Sequence[str] | None) -> list[str]:
    """The values of `--fix` whose inputs the network has."""
    if path.suffix != ".onnx" or not fix:
        return []
    names = {port.name for port in from_onnx(path).interface.inputs}
    return [text for text in fix if text.partition("=")[0] in names]


def _read_onnx(path: Path, options: NetworkOptions, static: bool | str) -> NetworkFile:
    module = fixed_network(path, options.fix)
    ports = tuple(map(_port, cast(Interface, module.interface).inputs))
    arrays, chosen = _input_arrays(options.inputs, ports), _parse_sizes(options.sizes, ports, path)
    args = _find_running_inputs(module, ports, chosen, arrays)
    if static:
        module.interface = _with_static_sizes(module.interface, args, static)
    model = as_demasked(capture(module, args))
    domains = expected_domains(model)
    names = [spec.name for spec in cast(Provenance, model.demasked).inputs]
    args = tuple(
        arrays.get(port.name, draw_input(x.shape, x.dtype, domains.get(name)))
        for port, name, x in zip(ports, names, args, strict=True)
    )
    return NetworkFile(model, args, None if options.fix else path)


def read_to_edit(path: Path, options: NetworkOptions) -> NetworkFile:
    """The network in an ONNX file that can be edited, if not captured: with ops that demask has no
    function for, or text. ONNX Runtime runs it, or nothing."""
    try:
        return read_network(path, options)
    except (BadInput, NotExportable) as error:
        if path.suffix != ".onnx" or options.fix or isinstance(error, RefusedFile):
            raise
    ports = tuple(map(_port, read(path).graph.inputs))
    arrays, chosen = _input_arrays(options.inputs, ports), _parse_sizes(options.sizes, ports, path)

    def run(*args: Tensor) -> None:
        try:
            runner = session(str(path))
        except BadInput:  # an op of another runtime: any sizes may do
            return
        if runner is not None:
            runner.run(None, {p.name: x.numpy() for p, x in zip(ports, args, strict=True)})

    return NetworkFile(None, _find_running_inputs(run, ports, chosen, arrays), path)


def _port(port: provenance.OnnxPort) -> NetworkInput:
    dtype = getattr(torch, port.dtype or "-", None)
    if port.sizes is None or not isinstance(dtype, torch.dtype):
        raise BadInput(
            f"input {port.name!r}: expected a tensor of a known rank and type, got {port.dtype!r}; "
            "use demask.from_onnx(path) and pass example inputs in Python"
        )
    return NetworkInput.of(port.name, port.sizes, dtype)


def _find_running_inputs(
    module: Callable[..., Any], ports: Sequence[NetworkInput], chosen: Mapping[str, int], arrays: Mapping[str, Tensor]
) -> tuple[Tensor, ...]:
    """Inputs of the first of the sizes to try that the network accepts."""
    failures: list[str] = []
    tried = list(product((1, None), TRIED)) if any(_dynamic_sizes(ports)) else [(1, TRIED[0])]
    for other, (image, length) in tried:
        # Open sizes of further inputs are those of a state, which is of one, or of the first.
        lengths = [length, *[other or length] * (len(ports) - 1)]
        guesses = [
            _guess_sizes(port, image, n, further=k > 0) for k, (port, n) in enumerate(zip(ports, lengths, strict=True))
        ]
        shapes = _resolve_sizes(ports, chosen, arrays, guesses)
        args = tuple(arrays.get(port.name, example(port, shape)) for port, shape in zip(ports, shapes, strict=True))
        try:
            with torch.no_grad():
                module(*args)
            return args
        except Exception as error:  # whatever the ops raise of sizes that do not fit
            failures.append(f"{[list(x.shape) for x in args]}: {error}")
    names = ", ".join(dict.fromkeys(_dynamic_sizes(ports))) or "none"
    raise BadInput(
        f"the network fails on example inputs of sizes {failures[0]}; give --input FILE, or --size NAME=N for {names}"
    )


def _guess_sizes(port: NetworkInput, image: tuple[int, int], length: int, *, further: bool) -> tuple[int, ...]:
    """Sizes to try: one at first, then images where there are four axes; but a further input whose
    last size is known is a cache of keys or values."""
    is_image = len(port.sizes) == 4 and not (further and isinstance(port.sizes[3], int))
    return tuple(
        size if isinstance(size, int) else 1 if axis == 0 else image[axis - 2] if is_image and axis > 1 else length
        for axis, size in enumerate(port.sizes)
    )


# ------------------------------------------------------------------------- what the caller says


def _dynamic_sizes(ports: Sequence[NetworkInput]) -> Iterator[str]:
    return (size for port in ports for size in port.sizes if isinstance(size, str))


def _parse_sizes(sizes: Sequence[str] | None, ports: Sequence[NetworkInput], path: Path) -> dict[str, int]:
    known, chosen = set(_dynamic_sizes(ports)), {}
    for text in sizes or ():
        name, _, number = text.rpartition("=")
        if not name or not number.isdecimal() or not 0 < int(number[:20]) <= MAX_EXAMPLE:
            raise BadInput(f"expected --size NAME=NUMBER, such as --size batch=8, got {text!r}")
        if name not in known:
            has = ", ".join(sorted(known)) or "none"
            raise BadInput(f"--size {name}: {path} has no such size; it has {has}")
        chosen[name] = int(number)
    return chosen


def _input_arrays(inputs: Sequence[str] | None, ports: Sequence[NetworkInput]) -> dict[str, Tensor]:
    """The example inputs in files, by the name of the input."""
    by_name: dict[str, Tensor] = {}
    for text in inputs or ():
        name, _, file = text.partition("=")
        if name not in {port.name for port in ports}:
            name, file = "", text
        path = Path(file)
        free = [p for p in ports if p.name not in by_name and name in ("", p.name)]
        stored = read_arrays(path)
        if path.suffix == ".npy":
            free = free[:1]
        if not free or (name and len(stored) != 1):
            raise BadInput(f"--input {text}: expected one array for each input ({', '.join(map(str, ports))})")
        for port, array in zip(free, matched(stored, free, path).values(), strict=True):
            by_name[port.name] = fitted(array, port, path)
    return by_name


def _resolve_sizes(
    ports: Sequence[NetworkInput],
    chosen: Mapping[str, int],
    arrays: Mapping[str, Tensor],
    guesses: Sequence[Sequence[int]],
) -> list[tuple[int, ...]]:
    """The sizes of all inputs, where each name is one number: that of --size or of an array in a
    file, else the first guess."""
    values = dict(chosen)
    for port in ports:
        if port.name in arrays:
            for name, n in zip(port.sizes, arrays[port.name].shape, strict=True):
                if isinstance(name, str) and values.setdefault(name, n) != n:
                    raise BadInput(f"size {name}: got {values[name]} and {n} (input {port.name!r})")
    named_axes = [
        (axis, name, guess[axis])
        for port, guess in zip(ports, guesses, strict=True)
        for axis, name in enumerate(port.sizes)
        if isinstance(name, str)
    ]
    ones = {name: 1 for _, name, _ in named_axes if name.isidentifier()}
    computed = {name for _, name, _ in named_axes if name not in ones and computed_size(name, ones) is not None}
    for _, name, n in sorted(named_axes, key=lambda row: row[0]):  # what is a batch anywhere, is one
        if name not in computed:
            values.setdefault(name, n)
    for name in computed:
        values.setdefault(name, computed_size(name, values) or 1)
    return [tuple(n if isinstance(n, int) else values[n] for n in p.sizes) for p in ports]


def computed_size(text: str, values: Mapping[str, int]) -> int | None:
    """The number that a size such as "past_length + length" says, 1 at least; None for one that is
    not computed from others. Exporters say so how many positions a mask covers."""

    def number(tree: ast.expr) -> int:
        match tree:
            case ast.Constant(value=int(n)):
                return n
            case ast.Name(id=name) if name in values:
                return values[name]
            case ast.BinOp(left=a, op=op, right=b) if type(op) in OPERATORS:
                return OPERATORS[type(op)](number(a), number(b))
        raise ValueError(text)

    try:
        return max(1, number(ast.parse(text, mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _with_static_sizes(interface: Interface, args: Sequence[Tensor], static: bool | str) -> Interface:
    """An interface whose sizes are those of the example. "inner": but for the batch, which is what
    axis 0 of an input has, wherever it is; that of several inputs has to have a name."""
    batch = {port.sizes[0] for port in interface.inputs if port.sizes}
    if static != "inner" or (len(interface.inputs) > 1 and batch & set(NAMELESS)):
        batch = set()
    inputs = []
    for port, x in zip(interface.inputs, args, strict=True):
        sizes = [
            size if size in batch and (axis == 0 or size not in NAMELESS) else n
            for axis, (size, n) in enumerate(zip(port.sizes or (), x.shape, strict=True))
        ]
        inputs.append(replace(port, sizes=tuple(sizes)))
    return replace(interface, inputs=tuple(inputs))


def _fix_sizes(model: ExportedProgram | fx.GraphModule, args: tuple[Tensor, ...], static: bool | str) -> fx.GraphModule:
    """The network with sizes fixed to those of the example."""
    network: Any = (
        as_demasked(capture(model)) if isinstance(model, ExportedProgram) else structural_copy(model, share=True)
    )
    record = cast(Provenance, network.demasked)
    interface = record.interface or default_interface(network)
    network.demasked = replace(record, interface=_with_static_sizes(interface, args, static))
    return as_demasked(capture(network, args))
