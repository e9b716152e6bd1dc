"""A small accelerator beside a host: what it is made of, an instruction of it, and what one costs.

A matrix unit (a systolic array that holds one tile of weights while data stream through it), a
vector unit, a pooling unit, a unit that moves blocks, and two buffers on the device: weights, and
activations. All of it is float32. After US patent 9,721,203 (strides without strided convolutions)
and Jouppi et al. 2017, "In-datacenter performance analysis of a tensor processing unit".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from demask.errors import BadInput

HOST, WEIGHTS, ACTIVATIONS = "host", "weights", "activations"
BUFFERS = (HOST, WEIGHTS, ACTIVATIONS)
CROSSINGS = ("weights", "inputs", "outputs")  # between host and device
UNITS = ("dma", "matrix", "vector", "pool", "move")
WORD = 4  # bytes of a float32: the one type of number that the machine has
Setting = int | float | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """Sizes of the units, and what they do in a cycle.

    rows, columns: of the matrix unit, which makes `rows * columns` multiply-adds per cycle. lanes,
    pool_lanes: elements that the vector unit and the pooling unit take per cycle. move_bytes,
    host_bytes: bytes per cycle inside of the activations buffer, and to or from the host.
    weight_bytes, activation_bytes: of the buffers.

    Cycles, one instruction after another (units do not overlap):
    matrix: with M positions, K terms each, N channels, in G groups: per tile of weights
        max(M, rows), since the next tile is loaded while data stream through this one; and rows +
        columns to fill and drain. Tiles: ceil(K / rows) * ceil(N / columns) per group; groups that
        fit beside each other on the diagonal share one.
    vector: elements written / lanes, whatever the function.
    pool: elements written / pool_lanes, times the elements of a window that lie in the image.
    move, dma: bytes / bytes per cycle.
    """

    rows: int = 128
    columns: int = 128
    lanes: int = 128
    pool_lanes: int = 128
    move_bytes: int = 512
    host_bytes: int = 64
    weight_bytes: int = 8 * 2**30
    activation_bytes: int = 24 * 2**20

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if type(value) is not int or not 0 < value < 2**48:
                raise BadInput(f"machine: {name} is {value!r:.40}; expected a positive integer")

    def matrix(self, positions: int, terms: int, channels: int, groups: int) -> int:
        """Cycles of `groups` products of (positions, terms) by (terms, channels)."""
        beside = max(1, min(self.rows // max(terms, 1), self.columns // max(channels, 1)))
        tiles = _over(terms, self.rows) * _over(channels, self.columns) * _over(groups, beside)
        return tiles * max(positions, self.rows) + self.rows + self.columns


@dataclass(frozen=True, slots=True)
class BufferOperand:
    """A value where it lies: its buffer, the byte it begins at, and the shape it is taken for.

    value: what must be there. Elements stand in row-major order, so a value of another shape with
    as many elements is the same bytes. On the host values are found by name, at address 0.
    """

    value: str
    buffer: str
    address: int
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * WORD

    def __str__(self) -> str:
        place = HOST if self.buffer == HOST else f"{self.buffer}+{self.address}"
        return f"{place} {self.value} ({', '.join(map(str, self.shape))})"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of one unit: what it does, what it reads, what it writes, and how."""

    op: str
    reads: tuple[BufferOperand, ...]
    writes: BufferOperand
    settings: Mapping[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InstructionWork:
    """What an instruction takes: cycles of its unit, multiply-adds of the matrix unit, bytes read
    per operand, bytes written."""

    cycles: int
    reads: tuple[int, ...]
    writes: int
    macs: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """What a list of instructions takes.

    cycles, instructions: by unit. macs: of the matrix unit. read, written: bytes by buffer.
    transfers, transferred: how often something crosses between host and device, and its bytes:
    "weights" and "inputs" to the device, "outputs" from it. loading: cycles of the transfers of
    weights, which are loaded once for many runs.
    """

    cycles: Mapping[str, int]
    instructions: Mapping[str, int]
    macs: int
    read: Mapping[str, int]
    written: Mapping[str, int]
    transfers: Mapping[str, int]
    transferred: Mapping[str, int]
    loading: int

    @property
    def total(self) -> int:
        """Cycles of a run, one instruction after another, weights loaded before."""
        return sum(self.cycles.values()) - self.loading


def counted(steps: Iterable[tuple[str, Instruction, InstructionWork]]) -> Counts:
    """The sums over instructions, each with its unit and what it takes."""
    cycles, number = _none(UNITS), _none(UNITS)
    read, written = _none(BUFFERS), _none(BUFFERS)
    transfers, transferred = _none(CROSSINGS), _none(CROSSINGS)
    macs = loading = 0
    for unit, instruction, work in steps:
        cycles[unit] += work.cycles
        number[unit] += 1
        macs += work.macs
        for operand, amount in zip(instruction.reads, work.reads, strict=True):
            read[operand.buffer] += amount
        written[instruction.writes.buffer] += work.writes
        if (kind := crossing(instruction)) is not None:
            transfers[kind] += 1
            transferred[kind] += work.writes
            loading += work.cycles if kind == "weights" else 0
    return Counts(cycles, number, macs, read, written, transfers, transferred, loading)


def _none(names: Iterable[str]) -> dict[str, int]:
    return dict.fromkeys(names, 0)


def crossing(instruction: Instruction) -> str | None:
    """What crosses between host and device: "weights", "inputs", "outputs", or None."""
    if instruction.writes.buffer == HOST:
        return "outputs"
    if any(operand.buffer == HOST for operand in instruction.reads):
        return "weights" if instruction.writes.buffer == WEIGHTS else "inputs"
    return None


def machine_of(data: Any) -> Machine:
    """The machine whose fields stand in a JSON object. BadInput: damaged."""
    names = set(Machine.__slots__)
    if not isinstance(data, dict) or set(data) != names:
        raise BadInput(f"machine: expected an object with {sorted(names)}, got {data!r:.80}")
    return Machine(**data)


def _over(amount: int, size: int) -> int:
    return -(-amount // size)
