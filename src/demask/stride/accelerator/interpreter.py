"""The reference interpreter: buffers of float32 words that know what they hold.

Each word carries the name of the value it belongs to. An instruction that reads a value finds that
name in every word, or the run stops: so a plan that lays one value over another that is still
wanted cannot pass unnoticed, whatever the numbers are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from demask.errors import BadInput
from demask.stride.accelerator.machine import HOST, WORD, BufferOperand, Instruction
from demask.stride.accelerator.units import checked

NOTHING = 0  # what a word holds that nothing was written to


class MachineMemory:
    """What host and device hold while a list of instructions runs.

    host: tensors by name. sizes: bytes of each buffer on the device.
    """

    def __init__(self, host: Mapping[str, Tensor], sizes: Mapping[str, int]):
        self.host = dict(host)
        self.words = {name: torch.zeros(size // WORD, dtype=torch.float32)
                      for name, size in sizes.items()}  # fmt: skip
        self.tags = {name: torch.zeros(size // WORD, dtype=torch.int32)
                     for name, size in sizes.items()}  # fmt: skip
        self.numbers: dict[str, int] = {}
        self.names = ["nothing"]

    def execute(self, instruction: Instruction) -> None:
        """Do what an instruction says. BadInput: it breaks the rules of its unit, or reads what is
        not there."""
        ability = checked(instruction)
        _check_overlap(instruction, inplace=ability.inplace)
        reads = [self.read(operand) for operand in instruction.reads]
        made = ability.run(reads, instruction.settings, instruction.writes.shape)
        self.write(instruction, made)

    def read(self, operand: BufferOperand) -> Tensor:
        """The value of an operand, in its shape."""
        if operand.buffer == HOST:
            if operand.value not in self.host:
                raise BadInput(f"the host has no {operand.value!r:.60}")
            held = self.host[operand.value]
            if tuple(held.shape) != operand.shape:
                raise BadInput(f"the host's {operand.value!r:.60} has the shape "
                               f"{tuple(held.shape)}, expected {operand.shape}")  # fmt: skip
            return held
        tags = self._region(self.tags, operand)
        number = self.numbers.get(operand.value, NOTHING)
        wrong = torch.nonzero(tags != number) if number else torch.zeros(1, 1, dtype=torch.int64)
        if len(wrong):
            first = int(wrong[0, 0])
            raise BadInput(
                f"expected {operand.value} at {operand.buffer}+{operand.address}, {operand.bytes} "
                f"bytes; byte {first * WORD} of them holds {self.names[int(tags[first])]}"
            )
        return self._region(self.words, operand).view(operand.shape)

    def write(self, instruction: Instruction, made: Tensor) -> None:
        """Put a result where the instruction says."""
        operand = instruction.writes
        if operand.buffer == HOST:
            self.host[operand.value] = made.clone()
            return
        if operand.value not in self.numbers:
            self.numbers[operand.value] = len(self.names)
            self.names.append(operand.value)
        for regions, value in ((self.words, made), (self.tags, self.numbers[operand.value])):
            place = self._region(regions, operand).view(operand.shape)
            if instruction.op == "move":
                place = _block(place, instruction)
            place[...] = value

    def _region(self, regions: Mapping[str, Tensor], operand: BufferOperand) -> Tensor:
        held = regions.get(operand.buffer)
        start, count = operand.address // WORD, math.prod(operand.shape)
        if held is None or operand.address % WORD or not 0 <= start <= len(held) - count:
            size = "no buffer" if held is None else f"{len(held) * WORD} bytes"
            raise BadInput(f"expected {operand.value} in a buffer, in words of {WORD} bytes, found "
                           f"it at {operand} of {size}")  # fmt: skip
        return held[start : start + count]


def executed(
    instructions: Sequence[Instruction],
    host: Mapping[str, Tensor],
    sizes: Mapping[str, int],
) -> dict[str, Tensor]:
    """What the host holds after the instructions have run in order."""
    memory = MachineMemory(host, sizes)
    with torch.no_grad():
        for number, instruction in enumerate(instructions):
            try:
                memory.execute(instruction)
            except BadInput as error:
                raise BadInput(f"instruction {number} ({instruction.op}): {error}") from error
    return memory.host


def _check_overlap(instruction: Instruction, *, inplace: bool) -> None:
    """A unit writes while it reads: only element by element may a result lie on an operand."""
    y = instruction.writes
    for x in instruction.reads:
        apart = x.address + x.bytes <= y.address or y.address + y.bytes <= x.address
        same = inplace and x.address == y.address and x.bytes == y.bytes
        if x.buffer == y.buffer != HOST and not (apart or same):
            raise BadInput(f"expected the result apart from the operands, found {y} over {x}")


def _block(place: Tensor, instruction: Instruction) -> Tensor:
    """The part of a region that a move writes."""
    settings = {name: value for name, value in instruction.settings.items()
                if isinstance(value, tuple)}  # fmt: skip
    for axis, (at, source) in enumerate(zip(settings["at"], settings["order"], strict=True)):
        place = place.narrow(axis, at, settings["size"][source])
    return place
