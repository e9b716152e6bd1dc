"""Instruction lists of networks for an accelerator without strided convolutions.

Only weights, inputs, outputs, and values between parts of a network that does not fit cross between host and device: a
network with an op that the device does not have is refused.

The reference interpreter: buffers of float32 words, each tagged with the value it belongs to.

An instruction that reads a value checks the tag of every word. So an address assignment that
overwrites a value before its last read is detected, whatever the numbers are.

The form of instruction lists in JSON, and what a list from a file must obey.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from demask.errors import BadInput, BudgetTooSmall
from demask.exec.device import Device
from demask.exec.planning.plan import TilePlan
from demask.failures import public
from demask.graph.capture.capture import capture
from demask.graph.capture.fold_constants import fold_constants
from demask.graph.capture.functionalize import functionalize
from demask.graph.isolation import in_isolation
from demask.graph.program import Program
from demask.machine.arena import align_size
from demask.machine.byte_sizes import format_bytes
from demask.ops import TABLE, Table
from demask.pages import InTerminal, Lines, OnPage, Page, PageSource, Span, TextTable, Timeline
from demask.records import Limit, Stored, decode, encode
from demask.rewrites.driver import rewrite
from demask.rewrites.normalize import CANONICAL
from demask.stride.accelerator.addresses import list_in_one_piece, list_in_parts
from demask.stride.accelerator.machine import (
    ACTIVATIONS,
    HOST,
    MAX_BYTES,
    WEIGHTS,
    WORD,
    BufferOperand,
    Counts,
    Instruction,
    InstructionWork,
    Machine,
    Setting,
    Shape,
    Text,
    compress,
    count_work,
    crossing,
    decompress,
)
from demask.stride.accelerator.units import check_instruction, unit_of, work_of
from demask.stride.lower import lowered
from demask.stride.recurrent_passes import RECURRENT_PASSES
from demask.stride.targets import Target
from demask.tune.fold_affine import FOLD

FORMAT = "demask instructions 1"
MAX_INSTRUCTIONS = 1_000_000
SHORT = Limit(f"at most {MAX_INSTRUCTIONS}", lambda rows: len(rows) <= MAX_INSTRUCTIONS)
Ports = Annotated[tuple[tuple[Text, Shape], ...], SHORT]  # names and shapes
Steps = Annotated[tuple[Instruction, ...], SHORT]


def _write_weight(tensor: Tensor) -> dict[str, Any]:
    data = tensor.contiguous().numpy().astype("<f4").tobytes()
    return {"shape": list(tensor.shape), "data": base64.b64encode(data).decode()}


def _read_weight(data: Any) -> Tensor:
    _need(isinstance(data, dict) and set(data) == {"shape", "data"}, "a shape and data", data)
    shape, text = decode(Shape, data["shape"], "shape"), data["data"]
    size = math.prod(shape) * WORD
    _need(isinstance(text, str) and len(text) == 4 * -(-size // 3), f"{size} bytes in base64", text)
    content = base64.b64decode(text, validate=True)
    _need(len(content) == size, f"{size} bytes", len(content))
    return torch.from_numpy(np.frombuffer(content, "<f4").astype(np.float32)).reshape(shape)


Weights = Mapping[Text, Annotated[Tensor, Stored(_write_weight, _read_weight)]]


def check(listing: Instructions) -> Instructions:
    """A list from a file. Raises BadInput if it cannot run on its machine."""
    machine, weights, sizes = listing.machine, listing.weights, listing.sizes
    names = {name for name, _ in (*listing.inputs, *listing.outputs)}
    distinct = len(names) == len(listing.inputs) + len(listing.outputs) and not names & set(weights)
    _need(distinct, "distinct names of inputs, outputs and weights", sorted(names))
    room = {
        WEIGHTS: min(machine.weight_bytes, sum(align_size(t.numel() * WORD) for t in weights.values())),
        ACTIVATIONS: min(machine.activation_bytes, MAX_BYTES),
    }
    _need(set(sizes) == set(room), f"sizes of {sorted(room)}", sorted(sizes))
    for buffer, size in sizes.items():
        is_valid = 0 <= size <= room[buffer] and size % WORD == 0
        _need(is_valid, f"at most {room[buffer]} bytes of {buffer}", size)
    host = {name: tuple(tensor.shape) for name, tensor in weights.items()} | dict(listing.inputs)
    outputs = dict(listing.outputs)
    blocks = {row.writes.value for row in listing.instructions if row.writes.buffer == HOST and "at" in row.settings}
    known, complete = host | outputs, list[str]()
    for k, row in enumerate(listing.instructions):
        result = row.writes
        try:
            if result.buffer == HOST:
                _need(result.value not in host, "a result that is no input", result)
                known.setdefault(result.value, result.shape)  # a value between parts of the network
                complete += [result.value] if "at" not in row.settings else []
            for operand in (*row.reads, result):
                _check_operand(operand, sizes, known)
            check_instruction(row)
        except BadInput as error:
            raise BadInput(f"instruction {k}: {error}") from error
    _need(sorted(complete) == sorted(outputs.keys() - blocks), f"each of {sorted(outputs)} stored once", complete)
    return listing


def _check_operand(operand: BufferOperand, sizes: Mapping[str, int], host: Mapping[str, tuple[int, ...]]) -> None:
    """host: shapes of values of the host that the operand may be."""
    if operand.buffer == HOST:
        _need(host.get(operand.value) == operand.shape and operand.address == 0, "a value of the host", operand)
    else:
        size = sizes[operand.buffer]
        _need(operand.address + operand.bytes <= size, f"an address within {size} bytes", operand)


def _need(is_valid: bool, expected: str, actual: Any) -> None:
    if not is_valid:
        raise BadInput(f"instruction list: expected {expected}, got {str(actual)[:80]}")


NOTHING = 0  # tag of a word that was never written


class MachineMemory:
    """The memory of host and device. host: tensors by name. sizes: bytes of each device buffer."""

    def __init__(self, host: Mapping[str, Tensor], sizes: Mapping[str, int]):
        self.host = dict(host)
        self.missing: dict[str, Tensor] = {}  # of values of the host that are stored block by block: what is not stored
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
        missing = [self.missing.get(operand.value) for operand in instruction.reads if operand.buffer == HOST]
        for flags in (flags for flags in missing if flags is not None):
            if bool(ability.run([flags], instruction.settings, instruction.writes.shape).any()):
                raise BadInput(f"expected a block that is stored on the host, got {instruction.reads[0]}")
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
        words = self._region(self.words, operand)
        return decompress(words, operand.shape) if operand.compressed else words.view(operand.shape)

    def write(self, instruction: Instruction, result: Tensor) -> None:
        """Store the result of an instruction."""
        operand = instruction.writes
        if operand.buffer == HOST:
            self._store(operand, result, instruction.settings.get("at"))
            return
        if operand.value not in self.numbers:
            self.numbers[operand.value] = len(self.names)
            self.names.append(operand.value)
        number = self.numbers[operand.value]
        if operand.compressed:
            words = compress(result)
            if len(words) * WORD != operand.compressed:
                raise BadInput(f"expected {len(words) * WORD} bytes of nonzeros, got {operand}")
            self._region(self.words, operand)[...] = words
            self._region(self.tags, operand)[...] = number
            return
        for regions, value in ((self.words, result), (self.tags, number)):
            region = self._region(regions, operand).view(operand.shape)
            if instruction.op == "move":
                region = _written_block(region, instruction)
            region[...] = value

    def _store(self, operand: BufferOperand, result: Tensor, at: Setting | None) -> None:
        """Store a value on the host, or a block of it at a position."""
        if not isinstance(at, tuple):
            self.host[operand.value] = result.clone()
            return
        if operand.value not in self.missing:
            self.missing[operand.value] = torch.ones(operand.shape, dtype=torch.bool)
            self.host[operand.value] = torch.zeros(operand.shape)
        block = tuple(slice(low, low + n) for low, n in zip(at, result.shape, strict=True))
        self.host[operand.value][block] = result
        self.missing[operand.value][block] = False

    def _region(self, regions: Mapping[str, Tensor], operand: BufferOperand) -> Tensor:
        """The words, or their tags, of an operand's buffer region."""
        buffer = regions.get(operand.buffer)
        start, count = operand.address // WORD, operand.bytes // WORD
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
    if incomplete := [name for name, missing in memory.missing.items() if bool(missing.any())]:
        raise BadInput(f"instruction list: expected all blocks of {incomplete[0]!r:.60}, some are not stored")
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


def _written_block(region: Tensor, instruction: Instruction) -> Tensor:
    """The part of a region that a move writes."""
    settings = {name: value for name, value in instruction.settings.items() if isinstance(value, tuple)}
    for axis, (start, source) in enumerate(zip(settings["at"], settings["order"], strict=True)):
        region = region.narrow(axis, start, settings["size"][source])
    return region


@in_isolation
@public
def instructions(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: str | Path | Target = "matrix_unit",
    machine: Machine | None = None,
    device: Device | None = None,
    table: Table = TABLE,
) -> Instructions:
    """The `Instructions` that compute `model(*args, **kwargs)` in eval mode on an accelerator.

    They are for the sizes of the example inputs. Batch norms are folded into weights, and strided
    convolutions are replaced as by `demask.stride.lower`. A recurrent layer (LSTM, GRU, RNN) is a pass of the
    units for every time, which reads the state that the pass before it wrote. `model` is not changed.

    Where the values of a network do not fit the buffer of activations at once, it runs in parts: bands of rows, or
    tiles, of images are loaded, computed through several layers, and stored on the host, in the order of a plan of
    `demask.traverse`. Results are the same; cycles are more, as the matrix unit fills and drains for every part.

    Args:
        model: an `nn.Module`, in any mode, or a `torch.export.ExportedProgram`; all numbers are
            float32.
        args: example inputs by position, a tuple such as (x,). Default: ().
        kwargs: example inputs by name, a mapping. Default: None, for no such inputs.
        target: the ops that may replace strided convolutions: name of a built-in target
            ("max_pool", "avg_pool", "slice", "no_pool", "space_to_depth", "fhe" or "matrix_unit"),
            path of a TOML file, or a `Target`. Default: "matrix_unit".
        machine: sizes and speeds of the accelerator. Default: `demask.stride.Machine()`.
        device: one memory for weights, values and instructions (16 bytes each), in place of the machine's buffers, as
            in `demask.traverse.plan`: `Device("64KiB", weights="compressed")` stores of weights only the nonzeros and
            a bit for each element; with weights="outside", they are in the machine's buffer of weights, and not
            counted. Default: None, the machine's buffers.
        table: the table of ops. Default: `demask.ops.TABLE`.

    Raises:
        BadInput: the accelerator lacks an op of the network, a value is not float32, a size is
            dynamic, a buffer is too small, the target is not valid, or the model does not run on
            the example inputs. The message names the nodes.
        NoSoundForm: a strided convolution has no exact form in the target's ops.
        NotExportable: the model cannot be captured.

    Example:
        >>> import torch
        >>> from demask.stride import instructions
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        >>> listing = instructions(net, (torch.ones(1, 4),))
        >>> [step.op for step in listing.instructions]
        ['load', 'load', 'load', 'product', 'add', 'relu', 'store']
        >>> torch.equal(listing.run(torch.ones(1, 4)), net(torch.ones(1, 4)))
        True
    """
    if not isinstance(machine, Machine | None):
        raise BadInput(f"expected demask.stride.Machine(...) as machine, got {type(machine).__name__}")
    if not isinstance(device, Device | None):
        raise BadInput(f"expected demask.traverse.Device(...) as device, got {type(device).__name__}")
    captured = rewrite(fold_constants(functionalize(capture(model, args, kwargs, dynamic_shapes={}))), CANONICAL)
    program, choices = lowered(rewrite(captured, FOLD), target, table)
    return listed(program, machine or Machine(), tuple(map(str, choices)), device, table)


def listed(
    program: Program, machine: Machine, notes: tuple[str, ...] = (), device: Device | None = None, table: Table = TABLE
) -> Instructions:
    """The instruction list of a program with static sizes and without strided convolutions. In parts, where the values
    do not fit the buffer of activations, or the memory of a device."""
    program = rewrite(program, RECURRENT_PASSES)
    memory = device or Device(machine.activation_bytes, weights="outside")
    one = list_in_one_piece(program, memory)
    if one.bytes_in(memory) > memory.bytes and one.sizes[WEIGHTS] <= machine.weight_bytes:
        one = list_in_parts(program, machine, memory, table) or one
    if device is not None:
        used, values = one.bytes_in(device), one.sizes[ACTIVATIONS]
        if used > device.bytes:
            raise BudgetTooSmall(
                f"the device has {format_bytes(device.bytes)}, the network needs {format_bytes(used)} of it (values "
                f"{format_bytes(values)}): pass device=Device({used}, ...), or use a smaller batch or smaller images",
                used,
            )
        weights, others = max(one.sizes[WEIGHTS], 1), used - values
        weights = machine.weight_bytes if device.weights == "outside" else weights
        machine = replace(machine, weight_bytes=weights, activation_bytes=device.bytes - others)
    for buffer, name in ((WEIGHTS, "weight_bytes"), (ACTIVATIONS, "activation_bytes")):
        room, size = getattr(machine, name), one.sizes[buffer]
        if size > room:
            raise BudgetTooSmall(
                f"the {buffer} buffer has {format_bytes(room)}, the network needs {format_bytes(size)} of it at once: "
                f"pass machine=Machine({name}={size}), or use a smaller batch or smaller images",
                size,
            )
    ends = one.listing.inputs, one.listing.outputs, one.listing.weights
    return Instructions(machine, *ends, one.instructions, one.sizes, notes, one.plan)


@dataclass(frozen=True, slots=True, eq=False)
class Instructions(PageSource):
    """The steps with which an accelerator loads a network's weights and computes its outputs once.

    `demask.stride.instructions` returns it; `print` shows the steps and their cost, `to_html` and
    notebooks also the memory over time. All tensors are float32 and in row-major order.

    Attributes:
        machine: the `Machine` for which addresses are assigned and cycles are counted.
        inputs, outputs: a tuple of pairs (name, shape), in the network's order.
        weights: tensors on the host by name, float32.
        instructions: the steps in order, a tuple. Each has `op` (a str), `reads` (a tuple of
            operands), `writes` (the result) and `settings` (numbers by name, such as the kernel
            size). Operands have `value` (the name), `buffer` ("host", "weights" or "activations"),
            `address` (of the first byte) and `shape`.
        sizes: used bytes by buffer: "weights" and "activations".
        notes: texts that say how strided convolutions were replaced. Default: ().
        plan: of the parts in which the network runs, a `demask.traverse.Plan`; None (default) if its values fit the
            buffer of activations, so that it runs in one piece.

    Example:
        >>> import demask, torch
        >>> model, x = torch.nn.Conv2d(1, 2, 3).eval(), torch.ones(1, 1, 8, 8)
        >>> listing = demask.stride.instructions(model, (x,))
        >>> torch.allclose(listing.run(x), model(x), atol=1e-6), listing.counts.macs
        (True, 648)
    """

    machine: Machine
    inputs: Ports
    outputs: Ports
    weights: Weights
    instructions: Steps
    sizes: Mapping[str, int]
    notes: tuple[str, ...] = ()
    plan: TilePlan | None = None

    def run(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The network's outputs, computed step by step on the CPU: one float32 tensor, or a tuple.

        Args:
            inputs: float32 tensors with the names and shapes of `inputs`, in this order: those of
                `args`, then those of `kwargs`.

        Raises:
            BadInput: an input has another shape or dtype, or an instruction reads a value that is
                not in memory.
        """
        _check_inputs(inputs, self.inputs)
        host = dict(self.weights)
        for (name, _), tensor in zip(self.inputs, inputs, strict=True):
            host[name] = tensor.detach().to("cpu")
        values = run_instructions(self.instructions, host, self.sizes)
        outputs = tuple(values[name] for name, _ in self.outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    @property
    def counts(self) -> Counts:
        """The cost of one run and of loading the weights.

        `cycles` and `instructions`: numbers by unit ("dma", "matrix", "vector", "pool", "move").
        `total`: cycles of a run, without `loading`, the cycles that load the weights once. `macs`:
        multiply-adds of the matrix unit. `read`, `written`: bytes by buffer. `transfers`,
        `transferred`: number and bytes of the transfers between host and device, by "weights",
        "inputs" and "outputs".
        """
        return count_work((unit, row, work) for unit, row, work in self._works())

    def _works(self) -> Iterator[tuple[str, Instruction, InstructionWork]]:
        for row in self.instructions:
            yield unit_of(row.op), row, work_of(row, self.machine)

    def to_dict(self) -> dict[str, Any]:
        """The instructions as a dict of JSON types; `from_dict` is the inverse.

        Weights are base64 text of their little-endian float32 bytes.
        """
        fields = encode(Instructions, self)
        return {"format": FORMAT, **{name: value for name, value in fields.items() if name != "plan" or value}}

    @classmethod
    def from_dict(cls, data: Any) -> Instructions:
        """The `Instructions` in a dict that `to_dict` returned, also after it was stored as JSON.

        Args:
            data: the dict.

        Raises:
            BadInput: `data` is damaged, or the instructions cannot run on their machine.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise BadInput(f"instruction list: expected the format {FORMAT!r}, got {data!r:.80}")
        fields = {"plan": None} | {name: value for name, value in data.items() if name != "format"}
        return check(decode(Instructions, fields, "instruction list", exact=True))

    def page(self) -> Page:
        """What `print`, `to_html` and notebooks show, as sections."""
        counts = self.counts
        cycles = ", ".join(
            f"{unit} {n - (counts.loading if unit == 'dma' else 0):,}" for unit, n in counts.cycles.items()
        )
        crossed = ", ".join(
            f"{n} {kind} ({format_bytes(counts.transferred[kind])})" for kind, n in counts.transfers.items()
        )
        used = ", ".join(f"{buffer} {format_bytes(size)}" for buffer, size in self.sizes.items())
        lines = [
            f"{len(self.instructions)} instructions, {counts.macs:,} multiply-adds",
            f"cycles: {counts.total:,} per run ({cycles}), and {counts.loading:,} to load the weights once",
            f"buffers: {used}",
            f"between host and device: {crossed}",
        ]
        cells = [_cells(k, row) for k, row in enumerate(self.instructions)]
        listed = [
            f"{k:>5}  {unit:6}  {op:12}  {operands}{f'; {settings}' * bool(settings)}"
            for k, unit, op, operands, settings in cells
        ]
        cycles_of = [f"{work.cycles:,}" for _, _, work in self._works()]
        head = ("step", "unit", "op", "reads -> writes", "settings", "cycles")
        rows = [(*row, n) for row, n in zip(cells, cycles_of, strict=True)]
        table = TextTable(head, rows, "Instructions", left=(0, 1, 2, 3, 4))
        return Page(
            "demask: instructions",
            (
                Lines(lines),
                OnPage([self._timeline()]),
                Lines(self.notes, "Strided convolutions", is_close=True),
                InTerminal([Lines(listed, is_close=True)]),
                OnPage([table]),
            ),
        )

    def _timeline(self) -> Timeline:
        """Cycles of a run against bytes alive in the buffer of activations."""
        steps = zip(self._works(), _count_alive(self.instructions), strict=True)
        spans = [
            Span(f"step {k}, {row.op}", float(work.cycles), size, f"{work.cycles:,} cycles")
            for k, ((_, row, work), size) in enumerate(steps)
            if crossing(row) != "weights"  # loaded once for many runs
        ]
        return Timeline(spans, "cycles of a run", "Activations in memory")


def _cells(number: int, row: Instruction) -> tuple[str, ...]:
    reads = ", ".join(map(str, row.reads))
    settings = "; ".join(f"{name} {_plain(value)}" for name, value in row.settings.items())
    return str(number), unit_of(row.op), row.op, f"{reads} -> {row.writes}", settings


def _count_alive(steps: Sequence[Instruction]) -> list[int]:
    """Bytes of the activations that are alive at each step: from the one that writes a value to the
    last that reads it. What is written over an operand has its memory."""
    owners, lives = dict[str, str](), dict[str, tuple[int, int, int]]()
    for k, step in enumerate(steps):
        over = {one.address: one.value for one in step.reads if one.buffer == ACTIVATIONS}
        for one in (*step.reads, step.writes):
            if one.buffer == ACTIVATIONS:
                same = over.get(one.address, one.value)
                owner = owners.setdefault(one.value, owners.get(same, one.value))
                size, start, _ = lives.get(owner, (one.bytes, k, k))
                lives[owner] = max(size, one.bytes), start, k
    alive = [0] * len(steps)
    for size, start, end in lives.values():
        for k in range(start, end + 1):
            alive[k] += size
    return alive


def _plain(value: Setting) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"


def _check_inputs(inputs: tuple[Any, ...], expected: Ports) -> None:
    actual = [
        f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__ for value in inputs
    ]
    if actual != [f"{torch.float32} {shape}" for _, shape in expected]:
        wanted = ", ".join(f"{name} {shape}" for name, shape in expected)
        raise BadInput(
            f"expected float32 tensors {wanted}; got {', '.join(actual) or 'nothing'}: "
            "an instruction list is for the sizes of its example"
        )
