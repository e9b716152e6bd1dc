"""A small accelerator attached to a host: its units, instructions and their costs.

It has a matrix unit (a systolic array that stores one tile of weights while data stream through
it), a vector unit, a pooling unit, a unit that moves blocks, and two buffers: weights and
activations. All numbers are float32. After US patent 9,721,203 (strides without strided
convolutions) and Jouppi et al. 2017, "In-datacenter performance analysis of a tensor processing
unit".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.records import Limit, Stored, decode

HOST, WEIGHTS, ACTIVATIONS = "host", "weights", "activations"
BUFFERS = (HOST, WEIGHTS, ACTIVATIONS)
CROSSINGS = ("weights", "inputs", "outputs")  # between host and device
UNITS = ("dma", "matrix", "vector", "pool", "move")
WORD = 4  # bytes of a float32, the machine's only number type
MAX_RANK, MAX_TEXT = 16, 1000
MAX_BYTES = 2**34  # of one buffer, which the interpreter allocates
Setting = int | float | tuple[int, ...]
Text = Annotated[str, Limit(f"at most {MAX_TEXT} characters", lambda text: len(text) <= MAX_TEXT)]
Shape = Annotated[
    tuple[Annotated[int, Limit("a size", range(1, 2**40).__contains__)], ...],
    Limit(f"at most {MAX_RANK} axes", lambda shape: len(shape) <= MAX_RANK),
    Limit(f"at most {MAX_BYTES} bytes", lambda shape: math.prod(shape) * WORD <= MAX_BYTES),
]
Buffer = Annotated[str, Limit(f"one of {BUFFERS}", BUFFERS.__contains__)]
Address = Annotated[int, Limit(f"a multiple of {WORD}", lambda address: address >= 0 and address % WORD == 0)]


@dataclass(frozen=True, slots=True)
class Machine:
    """The sizes and speeds of an accelerator, for which `instructions` counts cycles.

    Attributes:
        rows, columns: size of the matrix unit, a systolic array of rows * columns multiply-adds per
            cycle. Default: 128 each.
        lanes, pool_lanes: elements per cycle of the vector unit and of the pooling unit. Default:
            128 each.
        move_bytes, host_bytes: bytes per cycle within the activations buffer, and between host and
            device. Default: 512 and 64.
        weight_bytes, activation_bytes: sizes of the two buffers in bytes. Default: 8 GiB and 24
            MiB.

    One unit runs at a time. The cycles of each instruction are rounded up:
        matrix: see `matrix`.
        vector: (elements of the result) / lanes, for every function.
        pool: (elements of the result) * (elements of a window inside the image) / pool_lanes.
        move (within the activations buffer): bytes / move_bytes.
        dma (between host and device): bytes / host_bytes.

    Source: US patent 9,721,203; Jouppi et al. 2017, "In-datacenter performance analysis of a tensor
    processing unit".

    Raises:
        BadInput: a field is not an integer from 1 to 2^48 - 1.

    Example:
        >>> import torch
        >>> from demask.stride import Machine, instructions
        >>> net, x = torch.nn.Linear(256, 256), torch.ones(1, 256)
        >>> large, small = Machine(), Machine(rows=64, columns=64)
        >>> [instructions(net, (x,), machine=m).counts.cycles["matrix"] for m in (large, small)]
        [768, 1152]
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
        """Cycles of `groups` products of matrices (positions, terms) and (terms, channels), an int.

        A tile is the part of the weights that the matrix unit stores at a time. Cycles: tiles *
        max(positions, rows), as the next tile is loaded while data stream through the current one,
        plus rows + columns to fill and drain the unit. A group has ceil(terms / rows) *
        ceil(channels / columns) tiles; several groups share one tile if they fit on its diagonal.

        Args:
            positions: output positions of all batch elements, or rows of the first matrix.
            terms: products per output element: input channels per group * kernel elements, or
                columns of the first matrix.
            channels: output channels per group, or columns of the second matrix.
            groups: number of groups of the convolution, or of matrices in a batched product.
        """
        groups_per_tile = max(1, min(self.rows // max(terms, 1), self.columns // max(channels, 1)))
        tiles = _ceil_div(terms, self.rows) * _ceil_div(channels, self.columns) * _ceil_div(groups, groups_per_tile)
        return tiles * max(positions, self.rows) + self.rows + self.columns


def compress(weight: Tensor) -> Tensor:
    """The words of a float32 tensor in a buffer, float32 [words]: a bit for each element, 1 where it is not zero, in
    words of 32 bits; then the nonzeros."""
    flat = weight.detach().reshape(-1)
    bits = np.zeros(-(-flat.numel() // 32) * 32, np.uint8)
    bits[: flat.numel()] = (flat != 0).numpy()
    words = np.packbits(bits, bitorder="little").view(np.float32)
    return torch.cat([torch.from_numpy(words.copy()), flat[flat != 0]])


def decompress(words: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The float32 tensor of a shape that `compress` wrote. Raises BadInput for other words."""
    count = math.prod(shape)
    start = -(-count // 32)
    if len(words) < start:
        raise BadInput(f"expected a bit for each of {count} elements, got {len(words)} words")
    bits = np.unpackbits(words[:start].numpy().view(np.uint8), bitorder="little")[:count].astype(bool)
    if int(bits.sum()) != len(words) - start:
        raise BadInput(f"expected {int(bits.sum())} nonzeros after the bits, got {len(words) - start} words")
    weight = torch.zeros(count)
    weight[torch.from_numpy(bits)] = words[start:]
    return weight.reshape(shape)


@dataclass(frozen=True, slots=True)
class BufferOperand:
    """A value in memory: its name, buffer, first byte and shape.

    Elements are in row-major order, so that a value of another shape with as many elements has the
    same bytes. Values on the host are identified by name, at address 0. compressed: bytes of a weight of which the
    buffer has only the nonzeros, after a bit for each element (`compress`); 0: all elements.
    """

    value: str
    buffer: str
    address: int
    shape: tuple[int, ...]
    compressed: int = 0

    @property
    def bytes(self) -> int:
        return self.compressed or math.prod(self.shape) * WORD

    def __str__(self) -> str:
        place = HOST if self.buffer == HOST else f"{self.buffer}+{self.address}"
        packed = f" in {self.compressed} bytes" if self.compressed else ""
        return f"{place} {self.value} ({', '.join(map(str, self.shape))}){packed}"


def _write_operand(operand: BufferOperand) -> list[Any]:
    row = [operand.value, operand.buffer, operand.address, list(operand.shape)]
    return [*row, operand.compressed] if operand.compressed else row


def _read_operand(data: Any) -> BufferOperand:
    is_compressed = isinstance(data, list | tuple) and len(data) == 5
    kind: Any = tuple[Text, Buffer, Address, Shape, Address] if is_compressed else tuple[Text, Buffer, Address, Shape]
    return BufferOperand(*decode(kind, data, "operand", exact=True))


def _write_setting(value: Setting) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return value if math.isfinite(value) else str(value)


def _read_setting(data: Any) -> Setting:
    if data in ("inf", "-inf", "nan"):
        return float(data)
    integer = Annotated[int, Limit("an integer of 48 bits", lambda n: abs(n) < 2**48)]
    numbers = Annotated[tuple[integer, ...], Limit(f"at most {MAX_RANK}", lambda row: len(row) <= MAX_RANK)]
    return data if type(data) is float else decode(integer | numbers, data, "setting")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of one unit: op, operands, result and settings."""

    op: Text
    reads: tuple[Annotated[BufferOperand, Stored(_write_operand, _read_operand)], ...]
    writes: Annotated[BufferOperand, Stored(_write_operand, _read_operand)]
    settings: Mapping[Text, Annotated[Setting, Stored(_write_setting, _read_setting)]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InstructionWork:
    """Cost of an instruction: cycles of its unit, bytes read per operand, bytes written,
    multiply-adds of the matrix unit."""

    cycles: int
    reads: tuple[int, ...]
    writes: int
    macs: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """Cost of an instruction list.

    cycles, instructions: by unit. macs: multiply-adds of the matrix unit. read, written: bytes by
    buffer. transfers, transferred: number and bytes of transfers between host and device:
    "weights" and "inputs" to the device, "outputs" from it. loading: cycles to load the weights,
    once for many runs.
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
        """Cycles of a run, without loading the weights."""
        return sum(self.cycles.values()) - self.loading


def count_work(steps: Iterable[tuple[str, Instruction, InstructionWork]]) -> Counts:
    """The total cost of instructions, each passed with its unit and its work."""
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
    """What an instruction transfers between host and device: "weights", "inputs", "outputs", or
    None."""
    if instruction.writes.buffer == HOST:
        return "outputs"
    if any(operand.buffer == HOST for operand in instruction.reads):
        return "weights" if instruction.writes.buffer == WEIGHTS else "inputs"
    return None


def _ceil_div(amount: int, size: int) -> int:
    return -(-amount // size)
