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
from demask.graph.program import Program
from demask.graph.queries import input_dependent
from demask.ops import schema
from demask.ops.schema import fake
from demask.stride.accelerator.machine import ACTIVATIONS, HOST, WEIGHTS, WORD, Setting

MOST = 5  # refused calls that an error names


@dataclass(frozen=True, slots=True)
class ValueRef:
    """A value, its buffer, and the shape with which it is read or written."""

    value: str
    buffer: str
    shape: tuple[int, ...]

    def view(self, *shape: int) -> ValueRef:
        """The same value with another shape."""
        assert math.prod(shape) == math.prod(self.shape), (self, shape)
        return replace(self, shape=shape)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * WORD


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


NodeRefs = ValueRef | tuple[ValueRef, ...]
Rule = Callable[["InstructionEmitter", fx.Node, dict[str, Any]], NodeRefs]


class InstructionEmitter:
    """Writes the steps of a program. Rules call `put`, `move` and `constant`.

    refs: values of live nodes. fixed: results of nodes that depend on no input.
    """

    def __init__(self, program: Program):
        self.program, self.graph = program, program.graph
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

    def constant(self, name: str, tensor: Tensor) -> ValueRef:
        """A tensor in the weights buffer, shared if the same one is there already."""
        value = tensor.detach().to("cpu", torch.float32).contiguous()
        names = (f"{name}.{k}" if k else name for k in range(len(self.weights) + len(self.ports) + 1))
        for free in names:
            if free in self.ports:
                continue
            stored = self.weights.setdefault(free, value)
            if stored is value or (stored.shape == value.shape and torch.equal(stored, value)):
                return ValueRef(free, WEIGHTS, tuple(value.shape))
        raise AssertionError("there are more candidate names than names in use")

    def number(self, value: float) -> ValueRef:
        """A number in the weights buffer."""
        return self.constant(f"number_{value:g}", torch.tensor(float(value)))

    def ref(self, value: Any) -> ValueRef:
        """The value of an argument. Raises CannotEmit if it is no float32 tensor of the device."""
        if isinstance(value, bool | int | float):
            return self.number(value)
        known = self.refs.get(value)
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

    def _fresh(self, op: str) -> str:
        """An unused name for the result of a step."""
        assert self.node is not None
        names = [self.node.name, f"{self.node.name}.{op}"]
        numbered = (f"{names[1]}.{k}" for k in range(2, len(self.names) + 4))
        name = next(n for n in (*names, *numbered) if n not in self.names)
        self.names.add(name)
        return name


def emit(program: Program, rules: Mapping[Any, Rule]) -> Listing:
    """The steps of a program with static sizes. Raises BadInput if the machine lacks an op."""
    emitter = InstructionEmitter(program)
    refused: list[str] = []
    inputs = [n for n in program.graph.find_nodes(op="placeholder") if isinstance(n.meta.get("val"), Tensor)]
    _check_sizes(inputs)
    for node in program.graph.nodes:
        emitter.node = node
        try:
            _emit(emitter, node, rules)
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
    loads = [_load(name, tuple(tensor.shape), WEIGHTS) for name, tensor in emitter.weights.items()]
    loads += [_load(node.name, shape_of(node), ACTIVATIONS) for node in inputs]
    outputs = list(zip(_unused_names(results, emitter), results, strict=True))
    stores = [UnitStep("store", (ref,), ValueRef(name, HOST, ref.shape), {}) for name, ref in outputs]
    return Listing(
        (*loads, *emitter.steps, *stores),
        emitter.weights,
        tuple((node.name, shape_of(node)) for node in inputs),
        tuple((name, ref.shape) for name, ref in outputs),
    )


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
            emitter.refs[node] = ValueRef(node.name, ACTIVATIONS, shape_of(node))
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


def _load(name: str, shape: tuple[int, ...], buffer: str) -> UnitStep:
    return UnitStep("load", (ValueRef(name, HOST, shape),), ValueRef(name, buffer, shape), {})
