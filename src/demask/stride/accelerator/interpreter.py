"""The reference interpreter: buffers of float32 words, each tagged with the value it belongs to.

An instruction that reads a value checks the tag of every word. So an address assignment that
overwrites a value before its last read is detected, whatever the numbers are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from demask.errors import BadInput
from demask.stride.accelerator.machine import HOST, WORD, BufferOperand, Instruction
from demask.stride.accelerator.units import check_instruction

NOTHING = 0  # tag of a word that was never written


class MachineMemory:
    """The memory of host and device. host: tensors by name. sizes: bytes of each device buffer."""

    def __init__(self, host: Mapping[str, Tensor], sizes: Mapping[str, int]):
        self.host = dict(host)
        self.words = {name: torch.zeros(size // WORD, dtype=torch.float32) for name, size in sizes.items()}
        self.tags = {name: torch.zeros(size // WORD, dtype=torch.int32) for name, size in sizes.items()}
        self.numbers: dict[str, int] = {}
        self.names = ["nothing"]

    def execute(self, instruction: Instruction) -> None:
        """Run an instruction. Raises BadInput if it violates the rules of its unit or reads a value
        that is not in memory."""
        ability = check_instruction(instruction)
        _check_overlap(instruction, inplace=ability.inplace)
        reads = [self.read(operand) for operand in instruction.reads]
        result = ability.run(reads, instruction.settings, instruction.writes.shape)
        self.write(instruction, result)

    def read(self, operand: BufferOperand) -> Tensor:
        """The value of an operand, with its shape."""
        if operand.buffer == HOST:
            if operand.value not in self.host:
                raise BadInput(f"the host has no {operand.value!r:.60}")
            tensor = self.host[operand.value]
            if tuple(tensor.shape) != operand.shape:
                raise BadInput(
                    f"{operand.value!r:.60} on the host has the shape {tuple(tensor.shape)}, expected {operand.shape}"
                )
            return tensor
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

    def write(self, instruction: Instruction, result: Tensor) -> None:
        """Store the result of an instruction."""
        operand = instruction.writes
        if operand.buffer == HOST:
            self.host[operand.value] = result.clone()
            return
        if operand.value not in self.numbers:
            self.numbers[operand.value] = len(self.names)
            self.names.append(operand.value)
        for regions, value in ((self.words, result), (self.tags, self.numbers[operand.value])):
            region = self._region(regions, operand).view(operand.shape)
            if instruction.op == "move":
                region = _block(region, instruction)
            region[...] = value

    def _region(self, regions: Mapping[str, Tensor], operand: BufferOperand) -> Tensor:
        """The words, or their tags, of an operand's buffer region."""
        buffer = regions.get(operand.buffer)
        start, count = operand.address // WORD, math.prod(operand.shape)
        if buffer is None or operand.address % WORD or not 0 <= start <= len(buffer) - count:
            size = "no buffer" if buffer is None else f"{len(buffer) * WORD} bytes"
            raise BadInput(f"expected {operand.value} in a buffer, in words of {WORD} bytes, got {operand} of {size}")
        return buffer[start : start + count]


def run_instructions(
    instructions: Sequence[Instruction], host: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> dict[str, Tensor]:
    """The host's values, by name, after all instructions have run in order."""
    memory = MachineMemory(host, sizes)
    with torch.no_grad():
        for number, instruction in enumerate(instructions):
            try:
                memory.execute(instruction)
            except BadInput as error:
                raise BadInput(f"instruction {number} ({instruction.op}): {error}") from error
    return memory.host


def _check_overlap(instruction: Instruction, *, inplace: bool) -> None:
    """Raise BadInput if a result overlaps an operand. Units write while they read: only elementwise
    results may be written over an operand."""
    y = instruction.writes
    for x in instruction.reads:
        disjoint = x.address + x.bytes <= y.address or y.address + y.bytes <= x.address
        same = inplace and x.address == y.address and x.bytes == y.bytes
        if x.buffer == y.buffer != HOST and not (disjoint or same):
            raise BadInput(f"expected disjoint result and operands, got {y} over {x}")


def _block(region: Tensor, instruction: Instruction) -> Tensor:
    """The part of a region that a move writes."""
    settings = {name: value for name, value in instruction.settings.items() if isinstance(value, tuple)}
    for axis, (start, source) in enumerate(zip(settings["at"], settings["order"], strict=True)):
        region = region.narrow(axis, start, settings["size"][source])
    return region
