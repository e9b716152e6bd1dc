"""Assignment of addresses: each value is stored where its lifetime allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from demask.errors import BadInput
from demask.machine.arena import Block, align_size, plan_arena
from demask.machine.byte_sizes import format_bytes
from demask.stride.accelerator.emitter import Listing, UnitStep, ValueRef
from demask.stride.accelerator.machine import ACTIVATIONS, WEIGHTS, BufferOperand, Instruction, Machine
from demask.stride.accelerator.units import ABILITIES


@dataclass(frozen=True, slots=True)
class PlacedInstructions:
    """Instructions with addresses. sizes: used bytes of each buffer."""

    instructions: tuple[Instruction, ...]
    sizes: Mapping[str, int]


def assign_addresses(listing: Listing, machine: Machine) -> PlacedInstructions:
    """The steps of a network with addresses. Raises BadInput if a buffer is too small.

    Weights are stored one after another, since every run needs all of them. Activations share
    memory: a value is alive from the first step that writes it to the last that reads it. The
    vector unit may write its result over an operand that no later step reads.
    """
    weights, end = dict[str, int](), 0
    for name, tensor in listing.weights.items():
        weights[name] = end
        end += align_size(tensor.numel() * 4)
    owners = _shared(listing.steps)
    blocks = _blocks(listing.steps, owners)
    plan = plan_arena([*blocks.values()])
    offsets = dict(zip(blocks, plan.offsets, strict=True))
    sizes = {WEIGHTS: end, ACTIVATIONS: plan.size}
    _check_room(sizes, machine)

    def operand(ref: ValueRef) -> BufferOperand:
        address = 0
        if ref.buffer == WEIGHTS:
            address = weights[ref.value]
        elif ref.buffer == ACTIVATIONS:
            address = offsets[owners[ref.value]]
        return BufferOperand(ref.value, ref.buffer, address, ref.shape)

    instructions = (
        Instruction(step.op, tuple(map(operand, step.reads)), operand(step.writes), step.settings)
        for step in listing.steps
    )
    return PlacedInstructions(tuple(instructions), sizes)


def _shared(steps: tuple[UnitStep, ...]) -> dict[str, str]:
    """By value in the activations buffer, the value whose memory it uses: itself, or an operand."""
    last = {ref.value: k for k, step in enumerate(steps) for ref in step.reads}
    owners: dict[str, str] = {}
    for k, step in enumerate(steps):
        result = step.writes
        if result.buffer != ACTIVATIONS or result.value in owners:
            continue
        over = [
            ref
            for ref in step.reads
            if ref.buffer == ACTIVATIONS and last[ref.value] == k and ref.bytes == result.bytes
        ]
        inplace = over and ABILITIES[step.op].inplace
        owners[result.value] = owners[over[0].value] if inplace else result.value
    return owners


def _blocks(steps: tuple[UnitStep, ...], owners: Mapping[str, str]) -> dict[str, Block]:
    """Bytes and lifetime of the memory of each owner. owners: by value (`_shared`)."""
    blocks: dict[str, Block] = {}
    for k, step in enumerate(steps):
        for ref in (*step.reads, step.writes):
            if ref.buffer == ACTIVATIONS:
                owner = owners[ref.value]
                before = blocks.get(owner, Block(ref.bytes, k, k))
                blocks[owner] = Block(before.size, before.start, k)
    return blocks


def _check_room(sizes: Mapping[str, int], machine: Machine) -> None:
    for buffer, name in ((WEIGHTS, "weight_bytes"), (ACTIVATIONS, "activation_bytes")):
        room = getattr(machine, name)
        if sizes[buffer] > room:
            raise BadInput(
                f"the {buffer} buffer has {format_bytes(room)}, the network needs "
                f"{format_bytes(sizes[buffer])} of it at once: pass "
                f"machine=Machine({name}={sizes[buffer]}), or use a smaller batch or smaller images"
            )
