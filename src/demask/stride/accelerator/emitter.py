"""A program as steps of the accelerator, by value: what each unit does, before it has a place.

The rules, which write the steps of one ATen call each, stand in `emit_rules`, `emit_windows` and
`emit_shapes`. Calls that have no rule, or that their rule refuses, are named with the reason, and
nothing is emitted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from demask.compat.dispatch import has_schema
from demask.errors import BadInput
from demask.graph.program import Program
from demask.graph.queries import input_dependent
from demask.ops import schema
from demask.stride.accelerator.machine import ACTIVATIONS, HOST, WEIGHTS, WORD, Setting

MOST = 5  # refused calls that an error names


@dataclass(frozen=True, slots=True)
class ValueRef:
    """A value, the buffer it is in, and the shape it is taken for."""

    value: str
    buffer: str
    shape: tuple[int, ...]

    def view(self, *shape: int) -> ValueRef:
        """The same bytes, taken for another shape."""
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
    """The steps of a whole network, in order, and what the host has and gets, by name and shape."""

    steps: tuple[UnitStep, ...]
    weights: Mapping[str, Tensor]
    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    outputs: tuple[tuple[str, tuple[int, ...]], ...]


class CannotEmit(Exception):
    """Why the machine cannot do a call; the text completes "node: "."""


Made = ValueRef | tuple[ValueRef, ...]
Rule = Callable[["InstructionEmitter", fx.Node, dict[str, Any]], Made]


class InstructionEmitter:
    """Writes the steps of a program. `put`, `move` and `constant` are what rules use."""

    def __init__(self, program: Program):
        self.program, self.graph = program, program.graph
        self.live = input_dependent(program.graph)
        self.steps: list[UnitStep] = []
        self.weights: dict[str, Tensor] = {}
        self.refs: dict[fx.Node, Made] = {}
        self.fixed: dict[fx.Node, Any] = {}
        self.names: set[str] = set()
        self.ports = {node.name for node in program.graph.find_nodes(op="placeholder")}
        self.node: fx.Node | None = None

    def put(
        self, op: str, reads: Sequence[ValueRef], shape: Sequence[int], into: ValueRef | None = None,
        **settings: Setting,
    ) -> ValueRef:  # fmt: skip
        """A step that makes a new value of a shape, or writes part of the value `into`."""
        made = into or ValueRef(self._fresh(op), ACTIVATIONS, tuple(shape))
        self.steps.append(UnitStep(op, tuple(reads), made, settings))
        return made

    def move(self, x: ValueRef, order: Sequence[int] | None = None, into: ValueRef | None = None,
             **block: Sequence[int]) -> ValueRef:  # fmt: skip
        """A block of a value (start, size: all of it), its axes in another order, as a new value or
        `at` a place of another."""
        axes = range(len(x.shape))
        settings = {"start": tuple(block.get("start", (0 for _ in axes))),
                    "size": tuple(block.get("size", x.shape)),
                    "order": tuple(axes if order is None else order),
                    "at": tuple(block.get("at", (0 for _ in axes)))}  # fmt: skip
        shape = [settings["size"][axis] for axis in settings["order"]]
        return self.put("move", [x], shape, into, **settings)

    def constant(self, name: str, tensor: Tensor) -> ValueRef:
        """A tensor in the weights buffer; one that is there already is found again."""
        value = tensor.detach().to("cpu", torch.float32).contiguous()
        names = (
            f"{name}.{k}" if k else name for k in range(len(self.weights) + len(self.ports) + 1)
        )
        for free in names:
            if free in self.ports:
                continue
            held = self.weights.setdefault(free, value)
            if held is value or (held.shape == value.shape and torch.equal(held, value)):
                return ValueRef(free, WEIGHTS, tuple(value.shape))
        raise AssertionError("there is a free name among one more than are taken")

    def number(self, value: float) -> ValueRef:
        """A number in the weights buffer."""
        return self.constant(f"number_{value:g}", torch.tensor(float(value)))

    def ref(self, value: Any) -> ValueRef:
        """What an argument stands for. Refused: no float32 tensor that the device has."""
        if isinstance(value, bool | int | float):
            return self.number(value)
        made = self.refs.get(value)
        if isinstance(made, ValueRef):
            return made
        tensor = self.fixed.get(value)
        if not isinstance(tensor, Tensor):
            raise CannotEmit(f"it reads {value}, which is no tensor that the machine holds")
        name = str(value.target) if value.op == "get_attr" else value.name
        found = self.refs[value] = self.constant(name, tensor)
        return found

    def is_fixed(self, value: Any) -> bool:
        """Is an argument a tensor known before the run?"""
        return isinstance(value, fx.Node) and isinstance(self.fixed.get(value), Tensor)

    def _fresh(self, op: str) -> str:
        assert self.node is not None
        names = [self.node.name, f"{self.node.name}.{op}"]
        numbered = (f"{names[1]}.{k}" for k in range(2, len(self.names) + 4))
        found = next(n for n in (*names, *numbered) if n not in self.names)
        self.names.add(found)
        return found


def emitted(program: Program, rules: Mapping[Any, Rule]) -> Listing:
    """The steps of a program, whose sizes are static. BadInput: what the machine does not have."""
    emitter = InstructionEmitter(program)
    refused: list[str] = []
    inputs = [n for n in program.graph.find_nodes(op="placeholder")
              if isinstance(n.meta.get("val"), Tensor)]  # fmt: skip
    _check_sizes(inputs)
    for node in program.graph.nodes:
        emitter.node = node
        try:
            _emit(emitter, node, rules)
        except CannotEmit as reason:
            kind = "" if node.op == "placeholder" else f" ({node.target})"
            refused.append(f"{node.name}{kind}: {reason}")
            emitter.refs[node] = _guess(node)
    results = _results(program, emitter, refused)
    if refused:
        more = f"; and {len(refused) - MOST} more" if len(refused) > MOST else ""
        raise BadInput("the accelerator cannot run this network: "
                       + "; ".join(refused[:MOST]) + more
                       + "; run these parts elsewhere, or spell them in other ops")  # fmt: skip
    loads = [_load(name, tuple(tensor.shape), WEIGHTS) for name, tensor in emitter.weights.items()]
    loads += [_load(node.name, shape_of(node), ACTIVATIONS) for node in inputs]
    outputs = list(zip(_named(results, emitter), results, strict=True))
    stores = [
        UnitStep("store", (ref,), ValueRef(name, HOST, ref.shape), {}) for name, ref in outputs
    ]
    return Listing((*loads, *emitter.steps, *stores), emitter.weights,
                   tuple((node.name, shape_of(node)) for node in inputs),
                   tuple((name, ref.shape) for name, ref in outputs))  # fmt: skip


def _check_sizes(inputs: Sequence[fx.Node]) -> None:
    for node in inputs:
        if any(not isinstance(size, int) for size in node.meta["val"].shape):
            raise BadInput(
                f"the sizes of {node.name} are dynamic; expected those of one example: give the "
                "model itself, or export it without dynamic shapes"
            )


def _named(results: list[ValueRef], emitter: InstructionEmitter) -> list[str]:
    """Names for what the host gets, which nothing has that it holds already."""
    taken, start = {*emitter.weights, *emitter.ports}, "output_"
    while any(name.startswith(start) for name in taken):
        start += "_"
    return [f"{start}{k}" for k in range(len(results))]


def _results(program: Program, emitter: InstructionEmitter, refused: list[str]) -> list[ValueRef]:
    """What the network returns, as values; what is no tensor of the machine's goes to `refused`."""
    found: list[ValueRef] = []
    output = next(iter(program.graph.find_nodes(op="output")))
    for value in output.args[0]:  # type: ignore[union-attr]
        try:
            if not isinstance(value, fx.Node):
                raise CannotEmit(f"it is {value!r:.40}; expected tensors alone")
            _check(value)
            found.append(emitter.ref(value).view(*shape_of(value)))
        except CannotEmit as reason:
            refused.append(f"output: {reason}")
    return found


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The static sizes of a node's value."""
    return tuple(int(size) for size in node.meta["val"].shape)


def _emit(emitter: InstructionEmitter, node: fx.Node, rules: Mapping[Any, Rule]) -> None:
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
            raise CannotEmit("no unit of the machine does this op")
        _check(node)
        emitter.refs[node] = rule(emitter, node, arguments(node))


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name; of a builtin (getitem), by position."""
    if not has_schema(node.target):
        return {str(k): value for k, value in enumerate(node.args)}
    return schema.arguments(node)


def _check(node: fx.Node) -> None:
    values = node.meta.get("val")
    if isinstance(values, (list, tuple)):  # of several results, those that are read
        read = [user.args[1] for user in node.users if user.target is operator.getitem]
        values = [value for k, value in enumerate(values) if k in read]
    for value in values if isinstance(values, list) else [values]:
        if not isinstance(value, Tensor):
            raise CannotEmit("it makes no tensor")
        if any(not isinstance(size, int) for size in value.shape):
            raise CannotEmit("its sizes are dynamic; expected those of one example")
        if value.dtype != torch.float32:
            raise CannotEmit(f"it is {value.dtype}; the machine has torch.float32 alone")
        if value.numel() == 0:
            raise CannotEmit("it is empty")


def _evaluated(emitter: InstructionEmitter, node: fx.Node) -> Any:
    """The value of a call that depends on no input: computed before the run."""

    def known(source: fx.Node) -> Any:
        if source in emitter.fixed:
            return emitter.fixed[source]
        value = source.meta["val"]  # of an input the sizes alone are read
        return torch.empty(value.shape, dtype=value.dtype)

    args, kwargs = map_arg((node.args, node.kwargs), known)
    with torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _guess(node: fx.Node) -> Made:
    """A stand-in for what a refused call makes, so that the calls behind it are looked at too."""
    values = node.meta.get("val")
    if isinstance(values, (list, tuple)):
        return tuple(ValueRef(node.name, ACTIVATIONS, tuple(value.shape)) for value in values)
    shape = tuple(values.shape) if isinstance(values, Tensor) else ()
    return ValueRef(node.name, ACTIVATIONS, shape)


def _load(name: str, shape: tuple[int, ...], buffer: str) -> UnitStep:
    return UnitStep("load", (ValueRef(name, HOST, shape),), ValueRef(name, buffer, shape), {})
