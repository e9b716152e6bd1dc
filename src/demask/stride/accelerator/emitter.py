"""A program as steps of the accelerator's units: instructions on values without addresses.

Rules that write the steps of one ATen call are in `emit_compute`, `emit_windows` and `emit_layout`.
If a call has no rule, or its rule refuses it, an error names the call and the reason.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from demask.compat.dispatch import has_schema
from demask.errors import BadInput
from demask.exec.device import Device
from demask.exec.parts import PartsProgram
from demask.graph.program import Program
from demask.graph.queries import input_dependent
from demask.ops import schema
from demask.ops.schema import fake
from demask.stride.accelerator.machine import ACTIVATIONS, HOST, WEIGHTS, WORD, Setting

MOST = 5  # refused calls that an error names


@dataclass(frozen=True, slots=True)
class ValueRef:
    """A value, its buffer, and the shape with which it is read or written. compressed: see `BufferOperand`."""

    value: str
    buffer: str
    shape: tuple[int, ...]
    compressed: int = 0

    def view(self, *shape: int) -> ValueRef:
        """The same value with another shape."""
        assert math.prod(shape) == math.prod(self.shape), (self, shape)
        return replace(self, shape=shape)

    @property
    def bytes(self) -> int:
        return self.compressed or math.prod(self.shape) * WORD


@dataclass(frozen=True, slots=True)
class HostBlock:
    """A block of a value of the host: from position `start` on, of shape `size`. It is loaded where a step reads it."""

    value: ValueRef
    start: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def of(name: str, shape: tuple[int, ...]) -> HostBlock:
        """All of a value."""
        return HostBlock(ValueRef(name, HOST, shape), (0,) * len(shape), shape)

    def narrow(self, axis: int, start: int, end: int) -> HostBlock:
        """Positions start, ..., end - 1 of one axis."""
        starts = tuple(n + start if k == axis else n for k, n in enumerate(self.start))
        return HostBlock(self.value, starts, tuple(end - start if k == axis else n for k, n in enumerate(self.size)))


@dataclass(frozen=True, slots=True)
class UnitStep:
    """An instruction without addresses."""

    op: str
    reads: tuple[ValueRef, ...]
    writes: ValueRef
    settings: Mapping[str, Setting]


@dataclass(frozen=True, slots=True)
class Listing:
    """The steps of a network, in order. weights: on the host, by name. inputs, outputs: names and
    shapes."""

    steps: tuple[UnitStep, ...]
    weights: Mapping[str, Tensor]
    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    outputs: tuple[tuple[str, tuple[int, ...]], ...]


class CannotEmit(Exception):
    """Why the machine cannot run a call; the text completes "node: "."""


NodeRefs = ValueRef | HostBlock | tuple[ValueRef, ...]
Rule = Callable[["InstructionEmitter", fx.Node, dict[str, Any]], NodeRefs]


class InstructionEmitter:
    """Writes the steps of a program. Rules call `put`, `move` and `constant`.

    device: says how weights are stored. parts: of tiled execution; None for a program that runs in one piece. refs:
    values of live nodes. fixed: results of nodes that depend on no input.
    """

    def __init__(self, program: Program, device: Device, parts: PartsProgram | None = None):
        self.program, self.graph, self.parts, self.device = program, program.graph, parts, device
        self.live = input_dependent(program.graph)
        self.steps: list[UnitStep] = []
        self.weights: dict[str, Tensor] = {}
        self.refs: dict[fx.Node, NodeRefs] = {}
        self.fixed: dict[fx.Node, Any] = {}
        self.names: set[str] = set()
        self.ports = {node.name for node in program.graph.find_nodes(op="placeholder")}
        self.node: fx.Node | None = None

    def put(
        self,
        op: str,
        reads: Sequence[ValueRef],
        shape: Sequence[int],
        into: ValueRef | None = None,
        **settings: Setting,
    ) -> ValueRef:
        """The result of a new step: a new value of `shape`, or `into`, of which a part is
        written."""
        result = into or ValueRef(self._fresh(op), ACTIVATIONS, tuple(shape))
        self.steps.append(UnitStep(op, tuple(reads), result, settings))
        return result

    def move(
        self, x: ValueRef, order: Sequence[int] | None = None, into: ValueRef | None = None, **block: Sequence[int]
    ) -> ValueRef:
        """A block of a value (`start`, `size`; default all of it), its axes in `order`, as a new
        value, or written `into` another at the position `at`."""
        axes = range(len(x.shape))
        settings = {
            "start": tuple(block.get("start", (0 for _ in axes))),
            "size": tuple(block.get("size", x.shape)),
            "order": tuple(axes if order is None else order),
            "at": tuple(block.get("at", (0 for _ in axes))),
        }
        shape = [settings["size"][axis] for axis in settings["order"]]
        return self.put("move", [x], shape, into, **settings)

    def _load(self, block: HostBlock) -> ValueRef:
        """A block of a value of the host, as a value of the device."""
        is_all = block.size == block.value.shape
        settings: dict[str, Any] = {} if is_all else {"start": block.start, "size": block.size}
        return self.put("load", [block.value], block.size, **settings)

    def write_part(self, node: fx.Node) -> None:
        """Write a part to its positions in the values that consist of parts."""
        for join, at in () if self.parts is None else self.parts.writes.get(node, ()):
            if join not in self.refs:
                name, shape = self._fresh("join", join), shape_of(join)
                is_outside = self.parts is not None and join in self.parts.outside
                self.refs[join] = HostBlock.of(name, shape) if is_outside else ValueRef(name, ACTIVATIONS, shape)
            result, part = self.refs[join], self.ref(node)
            if isinstance(result, HostBlock):
                self.put("store", [part], result.size, result.value, at=at)
            else:
                assert isinstance(result, ValueRef)
                self.move(part, into=result, at=at)

    def constant(self, name: str, tensor: Tensor) -> ValueRef:
        """A tensor in the weights buffer, shared if the same one is there already."""
        value = tensor.detach().to("cpu", torch.float32).contiguous()
        names = (f"{name}.{k}" if k else name for k in range(len(self.weights) + len(self.ports) + 1))
        for free in names:
            if free in self.ports:
                continue
            stored = self.weights.setdefault(free, value)
            if stored is value or (stored.shape == value.shape and torch.equal(stored, value)):
                size = self.device.weight_bytes([value])
                compressed = size if self.device.weights == "compressed" and size < value.numel() * WORD else 0
                return ValueRef(free, WEIGHTS, tuple(value.shape), compressed)
        raise AssertionError("there are more candidate names than names in use")

    def number(self, value: float) -> ValueRef:
        """A number in the weights buffer."""
        return self.constant(f"number_{value:g}", torch.tensor(float(value)))

    def ref(self, value: Any) -> ValueRef:
        """The value of an argument. Raises CannotEmit if it is no float32 tensor of the device."""
        if isinstance(value, bool | int | float):
            return self.number(value)
        known = self.refs.get(value)
        if isinstance(known, HostBlock):
            known = self.refs[value] = self._load(known)
        if isinstance(known, ValueRef):
            return known
        tensor = self.fixed.get(value)
        if not isinstance(tensor, Tensor):
            raise CannotEmit(f"it reads {value}, which is no tensor in the machine's memory")
        name = str(value.target) if value.op == "get_attr" else value.name
        constant = self.refs[value] = self.constant(name, tensor)
        return constant

    def is_fixed(self, value: Any) -> bool:
        """Whether an argument is a tensor known before the run."""
        return isinstance(value, fx.Node) and isinstance(self.fixed.get(value), Tensor)

    def _fresh(self, op: str, node: fx.Node | None = None) -> str:
        """An unused name for the result of a step of a node; default: of the current one."""
        node = node or self.node
        assert node is not None
        names = [node.name, f"{node.name}.{op}"]
        numbered = (f"{names[1]}.{k}" for k in range(2, len(self.names) + 4))
        name = next(n for n in (*names, *numbered) if n not in self.names)
        self.names.add(name)
        return name


def emit(program: Program, rules: Mapping[Any, Rule], device: Device, parts: PartsProgram | None = None) -> Listing:
    """The steps of a program with static sizes. device: says how weights are stored. parts: if it is one of parts.

    Raises BadInput if the machine lacks an op.
    """
    emitter = InstructionEmitter(program, device, parts)
    refused: list[str] = []
    inputs = [n for n in program.graph.find_nodes(op="placeholder") if isinstance(n.meta.get("val"), Tensor)]
    _check_sizes(inputs)
    for node in program.graph.nodes:
        emitter.node = node
        if parts is not None and node in parts.joins:
            continue
        try:
            _emit(emitter, node, rules)
            emitter.write_part(node)
        except CannotEmit as reason:
            kind = "" if node.op == "placeholder" else f" ({node.target})"
            refused.append(f"{node.name}{kind}: {reason}")
            emitter.refs[node] = _placeholder_result(node)
    results = _results(program, emitter, refused)
    if refused:
        more = f"; and {len(refused) - MOST} more" if len(refused) > MOST else ""
        raise BadInput(
            "the accelerator cannot run this network: "
            + "; ".join(refused[:MOST])
            + more
            + "; run these parts elsewhere, or rewrite them in other ops"
        )
    outputs = list(zip(_unused_names(results, emitter), results, strict=True))
    stores = [UnitStep("store", (ref,), ValueRef(name, HOST, ref.shape), {}) for name, ref in outputs]
    stored = {ref.value: name for name, ref in outputs if ref.buffer == HOST}
    steps = [*(_with_result(step, stored) for step in emitter.steps)]
    steps = _read_steps([*steps, *(step for step in stores if step.reads[0].buffer != HOST)])
    read = {ref.value: ref for step in steps for ref in step.reads if ref.buffer == WEIGHTS}
    weights = {name: tensor for name, tensor in emitter.weights.items() if name in read}
    loads = [_load(replace(read[name], shape=tuple(tensor.shape))) for name, tensor in weights.items()]
    on_device = [node for node in inputs if parts is None or node not in parts.outside]
    loads += [_load(ValueRef(node.name, ACTIVATIONS, shape_of(node))) for node in on_device]
    return Listing(
        (*loads, *steps),
        weights,
        tuple((node.name, shape_of(node)) for node in inputs),
        tuple((name, ref.shape) for name, ref in outputs),
    )


def _with_result(step: UnitStep, names: Mapping[str, str]) -> UnitStep:
    """The step, writing to the names of outputs."""
    name = names.get(step.writes.value) if step.writes.buffer == HOST else None
    return step if name is None else replace(step, writes=replace(step.writes, value=name))


def _read_steps(steps: Sequence[UnitStep]) -> list[UnitStep]:
    """The steps whose results are stored, or read by such steps: what a convolution reads as its padding is not."""
    needed, result = set[tuple[str, str]](), list[UnitStep]()
    for step in reversed(steps):
        if step.writes.buffer == HOST or (step.writes.value, step.writes.buffer) in needed:
            needed |= {(ref.value, ref.buffer) for ref in step.reads}
            result.append(step)
    return result[::-1]


def _check_sizes(inputs: Sequence[fx.Node]) -> None:
    for node in inputs:
        if any(not isinstance(size, int) for size in fake(node).shape):
            raise BadInput(
                f"the sizes of {node.name} are dynamic; expected those of one example: pass the "
                "model itself, or export it without dynamic shapes"
            )


def _unused_names(results: list[ValueRef], emitter: InstructionEmitter) -> list[str]:
    taken, start = {*emitter.weights, *emitter.ports}, "output_"
    while any(name.startswith(start) for name in taken):
        start += "_"
    return [f"{start}{k}" for k in range(len(results))]


def _results(program: Program, emitter: InstructionEmitter, refused: list[str]) -> list[ValueRef]:
    """The network's outputs. Reasons for those that are no tensor of the machine are appended to
    `refused`."""
    outputs: list[ValueRef] = []
    output = next(iter(program.graph.find_nodes(op="output")))
    for value in output.args[0]:
        try:
            if not isinstance(value, fx.Node):
                raise CannotEmit(f"it is {value!r:.40}; expected only tensors")
            _check(value)
            known = emitter.refs.get(value)
            if isinstance(known, HostBlock) and value.op != "placeholder":
                outputs.append(known.value)  # stored part by part
            else:
                outputs.append(emitter.ref(value).view(*shape_of(value)))
        except CannotEmit as reason:
            refused.append(f"output: {reason}")
    return outputs


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The static sizes of a node's value."""
    return tuple(int(size) for size in fake(node).shape)


def _emit(emitter: InstructionEmitter, node: fx.Node, rules: Mapping[Any, Rule]) -> None:
    """Write the steps of a node. Raises CannotEmit."""
    if node.op == "get_attr":
        emitter.fixed[node] = emitter.program.constants[str(node.target)].tensor
    elif node.op == "placeholder":
        if isinstance(node.meta.get("val"), Tensor):
            _check(node)
            emitter.names.add(node.name)
            is_outside = emitter.parts is not None and node in emitter.parts.outside
            shape = shape_of(node)
            emitter.refs[node] = (
                HostBlock.of(node.name, shape) if is_outside else ValueRef(node.name, ACTIVATIONS, shape)
            )
    elif node.op == "call_function" and node not in emitter.live:
        emitter.fixed[node] = _evaluated(emitter, node)
    elif node.op != "output":
        rule = rules.get(node.target)
        if rule is None:
            raise CannotEmit("no unit of the machine runs this op")
        _check(node)
        emitter.refs[node] = rule(emitter, node, arguments(node))


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name; for a builtin (getitem), by position."""
    if not has_schema(node.target):
        return {str(k): value for k, value in enumerate(node.args)}
    return schema.arguments(node)


def _check(node: fx.Node) -> None:
    """Raise CannotEmit unless the values of a node are nonempty float32 tensors of static size."""
    values = node.meta.get("val")
    if isinstance(values, (list, tuple)):  # only results that are read count
        read = [user.args[1] for user in node.users if user.target is operator.getitem]
        values = [value for k, value in enumerate(values) if k in read]
    for value in values if isinstance(values, list) else [values]:
        if not isinstance(value, Tensor):
            raise CannotEmit("its result is no tensor")
        if any(not isinstance(size, int) for size in value.shape):
            raise CannotEmit("its sizes are dynamic; expected those of one example")
        if value.dtype != torch.float32:
            raise CannotEmit(f"it is {value.dtype}; the machine has only torch.float32")
        if value.numel() == 0:
            raise CannotEmit("it is empty")


def _evaluated(emitter: InstructionEmitter, node: fx.Node) -> Any:
    """The value of a call that depends on no input: computed before the run."""

    def known(source: fx.Node) -> Any:
        if source in emitter.fixed:
            return emitter.fixed[source]
        value = fake(source)  # an input: only its sizes are read
        return torch.empty(value.shape, dtype=value.dtype)

    with torch.no_grad():
        return schema.call_on(node, known)


def _placeholder_result(node: fx.Node) -> NodeRefs:
    """A placeholder for the result of a refused call, so that later calls are checked, too."""
    values = node.meta.get("val")
    if isinstance(values, (list, tuple)):
        return tuple(ValueRef(node.name, ACTIVATIONS, tuple(value.shape)) for value in values)
    shape = tuple(values.shape) if isinstance(values, Tensor) else ()
    return ValueRef(node.name, ACTIVATIONS, shape)


def _load(result: ValueRef) -> UnitStep:
    return UnitStep("load", (ValueRef(result.value, HOST, result.shape),), result, {})
