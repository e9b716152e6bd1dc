"""Steps by value -> instructions with addresses: each value lies where its lifetime allows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from demask.errors import BadInput
from demask.machine.arena import Block, aligned, planned
from demask.machine.byte_sizes import human
from demask.stride.accelerator.emitter import Listing, UnitStep, ValueRef
from demask.stride.accelerator.machine import (
    ACTIVATIONS,
    WEIGHTS,
    BufferOperand,
    Instruction,
    Machine,
)
from demask.stride.accelerator.units import ABILITIES


@dataclass(frozen=True, slots=True)
class PlacedInstructions:
    """Instructions, and how many bytes of each buffer they reach."""

    instructions: tuple[Instruction, ...]
    sizes: Mapping[str, int]


def placed(listing: Listing, machine: Machine) -> PlacedInstructions:
    """The steps of a network with addresses. BadInput: a buffer is too small.

    Weights lie one behind another: all are wanted in every run. Activations share places: a value
    lives from the step that begins to write it to the last that reads it. What the vector unit
    makes element by element lies on an operand that nobody reads later.
    """
    weights, end = dict[str, int](), 0
    for name, tensor in listing.weights.items():
        weights[name] = end
        end += aligned(tensor.numel() * 4)
    places = _shared(listing.steps)
    blocks = _blocks(listing.steps, places)
    plan = planned([*blocks.values()])
    offsets = dict(zip(blocks, plan.offsets, strict=True))
    sizes = {WEIGHTS: end, ACTIVATIONS: plan.size}
    _check_room(sizes, machine)

    def operand(ref: ValueRef) -> BufferOperand:
        address = 0
        if ref.buffer == WEIGHTS:
            address = weights[ref.value]
        elif ref.buffer == ACTIVATIONS:
            address = offsets[places[ref.value]]
        return BufferOperand(ref.value, ref.buffer, address, ref.shape)

    made = (Instruction(step.op, tuple(map(operand, step.reads)), operand(step.writes),
                        step.settings) for step in listing.steps)  # fmt: skip
    return PlacedInstructions(tuple(made), sizes)


def _shared(steps: tuple[UnitStep, ...]) -> dict[str, str]:
    """Per value in the activations buffer, the value in whose place it lies: its own, or that of
    an operand."""
    last = {ref.value: k for k, step in enumerate(steps) for ref in step.reads}
    places: dict[str, str] = {}
    for k, step in enumerate(steps):
        made = step.writes
        if made.buffer != ACTIVATIONS or made.value in places:
            continue
        over = [ref for ref in step.reads if ref.buffer == ACTIVATIONS
                and last[ref.value] == k and ref.bytes == made.bytes]  # fmt: skip
        inplace = over and ABILITIES[step.op].inplace
        places[made.value] = places[over[0].value] if inplace else made.value
    return places


def _blocks(steps: tuple[UnitStep, ...], places: Mapping[str, str]) -> dict[str, Block]:
    """The bytes and the lifetime of each place."""
    found: dict[str, Block] = {}
    for k, step in enumerate(steps):
        for ref in (*step.reads, step.writes):
            if ref.buffer == ACTIVATIONS:
                place = places[ref.value]
                before = found.get(place, Block(ref.bytes, k, k))
                found[place] = Block(before.size, before.start, k)
    return found


def _check_room(sizes: Mapping[str, int], machine: Machine) -> None:
    for buffer, name in ((WEIGHTS, "weight_bytes"), (ACTIVATIONS, "activation_bytes")):
        room = getattr(machine, name)
        if sizes[buffer] > room:
            raise BadInput(
                f"the {buffer} buffer has {human(room)}, the network needs {human(sizes[buffer])} "
                f"of it at once: give machine=Machine({name}={sizes[buffer]}), or run a smaller "
                "batch or smaller images"
            )
