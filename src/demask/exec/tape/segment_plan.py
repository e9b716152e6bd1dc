"""A segment planned for one machine and one input size, cached by `demask::segment`.

Static inputs of a plan, such as border maps: converted to the layout of the kernels once.

They are converted again when a call has other tensors or changed ones. Calls that run at the same
time may have different ones, so converted values are never overwritten.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.tape.layers.layer_plan import Weights
from demask.exec.tape.moved_values import MovedValues
from demask.exec.tape.plan_rows import PlanRow, plan_text
from demask.exec.tape.tape import HEADER, INEXACT, STATIC, EncodedTape, NoPlan, TapeArena
from demask.exec.tape.tape_builder import TapeBuilder
from demask.kernels.llvm.isa import Isa, host
from demask.kernels.memory_probe import MemoryProbe
from demask.kernels.thread_team import Job
from demask.ops.regions import Interval


@dataclass(frozen=True, slots=True)
class ConvertedInput:
    """A tensor as it was when it was converted: its memory, the layout of that, and its version.

    `tensor.data = other` replaces memory and layout, and counts as no write.
    """

    tensor: weakref.ref[Tensor]
    storage: weakref.ref[torch.UntypedStorage]
    layout: Hashable
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> ConvertedInput:
        storage = weakref.ref(tensor.untyped_storage())
        return cls(weakref.ref(tensor), storage, _input_layout(tensor), tensor._version)

    def is_current(self, tensor: Tensor) -> bool:
        """Whether this is the tensor, in the same memory and without writes that torch counts."""
        return (
            self.tensor() is tensor
            and self.version == tensor._version
            and self.storage() is tensor.untyped_storage()
            and self.layout == _input_layout(tensor)
        )


def _input_layout(tensor: Tensor) -> Hashable:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


@dataclass(frozen=True, slots=True)
class ConvertedInputs:
    """Static inputs in the layout of the kernels, with references to their tensors."""

    arena: TapeArena
    tensors: list[ConvertedInput]
    probe: MemoryProbe

    def are_current(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the converted tensors, unchanged as far as can be seen."""
        for known, tensor in zip(self.tensors, tensors, strict=True):
            if not known.is_current(tensor):
                return False
        return self.probe.same()  # reads their memory, which is therefore the converted one


class StaticInputs:
    """The static inputs of a tape.

    numbers: of the inputs. tape: converts them. size: bytes of the converted values, including a
    header. first: the first image that the tape computes.
    """

    def __init__(self, numbers: Sequence[int], inputs: Sequence[Tensor], tape: EncodedTape, size: int, first: int):
        self.numbers, self.tape, self.size, self.first = numbers, tape, size, first
        self.layouts = [(inputs[k].shape, inputs[k].stride()) for k in numbers]
        self.converted: ConvertedInputs | None = None  # replaced in full: read without a lock

    def arena(self, inputs: Sequence[Tensor], threads: int) -> TapeArena:
        """Memory with the converted inputs of a call.

        Raises NoPlan for inputs of other sizes or strides than the planned ones.
        """
        tensors, converted = [inputs[k] for k in self.numbers], self.converted
        if any(t.is_inference() for t in tensors):  # torch counts no writes to them
            return self._convert(tensors, threads)
        if converted is None or not converted.are_current(tensors):
            arena = self._convert(tensors, threads)
            known = [ConvertedInput.of(t) for t in tensors]
            self.converted = converted = ConvertedInputs(arena, known, MemoryProbe(tensors))
        return converted.arena

    def _convert(self, tensors: Sequence[Tensor], threads: int) -> TapeArena:
        if any(
            t.dtype is not torch.float32 or t.device.type != "cpu" or t.layout is not torch.strided for t in tensors
        ):
            raise NoPlan("inputs are not dense float32 on the CPU")
        if [(t.shape, t.stride()) for t in tensors] != self.layouts:
            raise NoPlan("static inputs have other sizes or strides")
        arena = TapeArena(max(self.size, HEADER))
        arena.slots[STATIC] = arena.address
        for number, tensor in zip(self.numbers, tensors, strict=True):
            offset = self.first * tensor.stride(0) * tensor.element_size() if tensor.ndim else 0
            arena.slots[1 + number] = tensor.data_ptr() + offset
        tape = self.tape
        Job(tape.entries, tape.ends, tape.threads, np.array([arena.address])).run(threads)
        return arena


__all__ = ["NoPlan", "SegmentPlan"]
CACHE = 2**18  # limit in bytes for the largest value when several images are computed at once
SMALL, AHEAD = 2**14, 8  # bytes of outputs that are allocated ahead, for as many calls
MOST_AVOIDED = 1024  # calls in a row by the definition, after failures
SPARE = 4  # sets of memory cached, for calls that run at the same time


@dataclass(frozen=True, slots=True)
class SegmentMemory:
    """The memory of one call."""

    job: Job
    arenas: list[TapeArena]
    slots: np.ndarray  # [runs, inputs and outputs]: addresses


@dataclass(slots=True)
class Batch:
    """Images of a batch computed by one tape: `runs` times `images`, starting at image `first`.

    alone: whether each thread computes full runs; otherwise all threads share the only run.
    static: the inputs that are converted once. shared: memory for the tapes of several plans, which do not run at the
    same time; None for memory of its own.
    """

    ready: EncodedTape
    first: int
    images: int
    runs: int
    alone: bool
    static: StaticInputs | None
    spare: list[SegmentMemory] = field(default_factory=list)
    shared: list[TapeArena] | None = None

    def take(self, threads: int, tensors: int) -> SegmentMemory:
        """Memory for a call, which `run` returns to the spare memory."""
        try:
            return self.spare.pop()
        except IndexError:
            arenas = self.shared or [TapeArena(self.ready.size) for _ in range(threads if self.alone else 1)]
            addresses = np.array([arena.address for arena in arenas], np.int64)
            slots = np.zeros((self.runs, tensors), np.int64)
            ready, own_slots = self.ready, slots if self.alone else None
            return SegmentMemory(
                Job(ready.entries, ready.ends, ready.threads, addresses, own_slots, steady=True), arenas, slots
            )

    def run(self, threads: int, tensors: Sequence[Tensor]) -> bool:
        """Compute the batch; whether no kernel has set `INEXACT`. tensors: inputs, then outputs."""
        static = None if self.static is None else self.static.arena(tensors, threads)
        memory = self.take(threads, len(tensors))
        if not self.alone and not self.first:
            memory.arenas[0].set_slots([t.data_ptr() for t in tensors])
        else:
            self._set_slots(memory, tensors)
        if static is not None:
            for arena in memory.arenas:
                arena.slots[STATIC] = static.address
        memory.job.run(threads)
        is_exact = True
        for arena in memory.arenas:
            if arena.slots[INEXACT]:
                is_exact, arena.slots[INEXACT] = False, 0
        if len(self.spare) < SPARE:
            self.spare.append(memory)
        return is_exact

    def _set_slots(self, memory: SegmentMemory, tensors: Sequence[Tensor]) -> None:
        """Store the addresses of the batch's images."""
        for k, tensor in enumerate(tensors):
            step = tensor.stride(0) * 4 if tensor.ndim and (self.alone or self.first) else 0
            begin = tensor.data_ptr() + self.first * step
            memory.slots[:, k] = begin + step * self.images * np.arange(self.runs)
        if not self.alone:
            memory.arenas[0].set_slots(memory.slots[0].tolist())


class SpareOutputs:
    """New output tensors, each returned once. Small ones are allocated for several calls at once: a
    single call of torch.empty takes 10 to 20 µs after kernels that have filled the caches, and each
    further one 3 µs."""

    def __init__(self, shapes: list[tuple[int, ...]]):
        self.shapes = shapes
        is_small = 4 * sum(map(math.prod, shapes)) <= SMALL
        self.count = AHEAD if is_small else 1
        self.ready: dict[bool, list[list[Tensor]]] = {True: [], False: []}  # by inference mode

    def take(self) -> list[Tensor]:
        """Tensors of a call, float32 without values."""
        ready = self.ready[torch.is_inference_mode_enabled()]
        try:
            return ready.pop()
        except IndexError:
            new = [
                [torch.empty(shape, dtype=torch.float32, device="cpu") for shape in self.shapes]
                for _ in range(self.count)
            ]
            ready += new[1:]
            return new[0]

    def put(self, outputs: list[Tensor]) -> None:
        """Let a later call return these tensors again, which the caller no longer reads, unless enough are ready."""
        ready = self.ready[torch.is_inference_mode_enabled()]
        if len(ready) < self.count:
            ready.append(outputs)

    def clear(self) -> None:
        """Free the ready tensors."""
        for ready in self.ready.values():
            ready.clear()


class SegmentPlan:
    """plan(inputs) -> outputs, for inputs with the planned sizes and strides.

    Several threads may call it at once.

    Layers by minimal filtering may give NaN where the definition gives another value that is not
    finite. Such calls are computed again by a plan without these, and so are the next ones, at
    once: 1, then 2, 4 and so on.
    """

    def __init__(
        self,
        batches: list[Batch],
        shapes: list[tuple[int, ...]],
        threads: int,
        rows: list[PlanRow],
        planned: PlanArguments | None,
    ):
        self.batches, self.shapes, self.threads, self.rows = batches, shapes, threads, rows
        self.outputs = SpareOutputs(shapes)
        self.planned, self.definition = planned, None
        self.avoided, self.next = 0, 1  # calls by the definition: now, and after the next failure

    @classmethod
    def of(
        cls,
        program: SegmentProgram,
        weights: Sequence[Tensor],
        inputs: Sequence[Tensor],
        threads: int,
        isa: Isa | None = None,
        filters: bool = True,
    ) -> SegmentPlan:
        """The plan for inputs with these sizes and strides.

        isa: instructions to use; all of this machine by default. filters: whether layers may be
        computed by minimal filtering. Raises BadInput for invalid weights, NoPlan for what the
        kernels do not support.
        """
        isa = isa or host()
        if any(x.dtype is not torch.float32 or x.device.type != "cpu" for x in inputs):
            raise NoPlan("inputs are not float32 on the CPU")
        if len(inputs) + len(program.outputs) >= INEXACT:
            raise NoPlan(f"{len(inputs)} inputs and {len(program.outputs)} outputs")
        shapes = program.shapes([tuple(x.shape) for x in inputs])
        batches, rows, is_exact = [], [], True
        read: Weights = {}
        for first, images, runs in _batches(program, weights, inputs, threads, isa, read):
            batch_inputs = [x[:images] for x in inputs] if images else inputs
            alone = images > 0 and runs > 1
            # Images of a split batch may have different values: only expanded ones are static.
            numbers = tuple(k for k in program.static if not images or not inputs[k].stride(0))
            part = replace(program, static=numbers)
            own_threads = 1 if alone else threads
            builder = TapeBuilder(part, weights, batch_inputs, isa, own_threads, filters, read)
            builder.build([_element_strides(kind, x) for kind, x in zip(program.inputs, batch_inputs, strict=True)])
            static = None
            if numbers:
                static_tape = builder.static_tape.done(isa)
                static = StaticInputs(numbers, inputs, static_tape, builder.static_bytes, first)
            batches.append(Batch(builder.tape.done(isa), first, images, runs, alone, static))
            rows = rows or builder.rows()
            is_exact = is_exact and builder.is_exact
        planned = None if is_exact else PlanArguments.of(program, weights, threads, isa)
        return cls(batches, [shapes[v] for v in program.outputs], threads, rows, planned)

    @property
    def bytes(self) -> int:
        """Bytes of intermediate values of one call, which stay allocated until `free`."""
        each = [sum(end - start for start, end in batch.ready.used) for batch in self.batches]
        return sum(n * (self.threads if b.alone else 1) for n, b in zip(each, self.batches, strict=True))

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights in the layout of the kernels, and of the arguments of kernels."""
        return sum(array.nbytes for batch in self.batches for array in batch.ready.arrays)

    @property
    def used(self) -> tuple[Interval, ...]:
        """The ranges of bytes of its arena that it uses; none if it has not just one arena."""
        is_one = len(self.batches) == 1 and not self.batches[0].alone
        return self.batches[0].ready.used if is_one else ()

    def share(self, arena: TapeArena) -> None:
        """Use this arena, of as many bytes as `used`, until `free`; no other plan may run in it at the same time."""
        self.batches[0].spare.clear()
        self.batches[0].shared = [arena]

    def free(self) -> None:
        """Return the memory that waits for the next call to the system; that call allocates it again."""
        self.outputs.clear()
        for batch in self.batches:
            batch.spare.clear()
            batch.shared = None

    def __str__(self) -> str:
        """The plan as a table: a row per value."""
        tape, runs = self.batches[0].ready, sum(batch.runs for batch in self.batches)
        steps = sum(row.op != "input" for row in self.rows)
        parts = [f"{steps} steps", f"{len(tape.ends) // tape.threads} phases", f"arena {tape.size / 1024:,.0f} KiB"]
        parts += [f"{self.threads} threads" if self.threads > 1 else "1 thread"]
        parts += [f"{runs} runs"] if runs > 1 else []
        return plan_text(self.rows, f"segment: {', '.join(parts)}")

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        if self.avoided > 0 and self.definition is not None:
            self.avoided -= 1
            return self.definition(inputs)
        outputs, is_exact = self.outputs.take(), True
        for batch in self.batches:
            is_exact &= batch.run(self.threads, (*inputs, *outputs))
        if is_exact or self.planned is None:
            self.next = 1
            return outputs
        if self.definition is None:
            self.definition = self.planned.definition(inputs)
        self.avoided, self.next = self.next, min(2 * self.next, MOST_AVOIDED)
        return self.definition(inputs)


@dataclass(frozen=True, slots=True)
class PlanArguments:
    """The arguments of a plan. Weights may be freed: caches of plans end with them."""

    program: SegmentProgram
    weights: list[weakref.ref[Tensor]]
    threads: int
    isa: Isa

    @classmethod
    def of(cls, program: SegmentProgram, weights: Sequence[Tensor], threads: int, isa: Isa) -> PlanArguments:
        return cls(program, list(map(weakref.ref, weights)), threads, isa)

    def definition(self, inputs: Sequence[Tensor]) -> SegmentPlan:
        """The plan without minimal filtering. Raises NoPlan if a weight has been freed."""
        weights = [weight for reference in self.weights if (weight := reference()) is not None]
        if len(weights) < len(self.weights):
            raise NoPlan("a weight has been freed")
        arguments = self.program, weights, inputs, self.threads, self.isa
        return SegmentPlan.of(*arguments, filters=False)


def _batches(
    program: SegmentProgram, weights: Sequence[Tensor], inputs: Sequence[Tensor], threads: int, isa: Isa, read: Weights
) -> list[tuple[int, int, int]]:
    """(first image, images at once, runs) of each part of a batch; images 0: all at once.

    A batch is split if its images are independent: threads with different images need no barriers.
    """
    count = _independent_images(program, inputs)
    if count is None or count == 1:
        return [(0, 0, 1)]
    sizes = [n for n in (1, 2, 4, 8, 16) if n <= min(count, isa.lanes)]
    shapes = program.shapes([tuple(x.shape) for x in inputs])
    if not MovedValues(program, weights, shapes).keeps_images(sizes):
        return [(0, 0, 1)]
    costs: dict[int, float] = {}
    for n in sizes:
        builder = TapeBuilder(program, weights, [x[:n] for x in inputs], isa, 1, read=read)
        if n == 1 or (count // n >= threads and builder.largest() <= CACHE):
            costs[n] = builder.estimate() / n
    images = min(costs, key=costs.__getitem__)
    runs, remainder = divmod(count, images)
    return [(0, images, runs)] + ([(runs * images, remainder, 1)] if remainder else [])


def _independent_images(program: SegmentProgram, inputs: Sequence[Tensor]) -> int | None:
    """Number of images of inputs and outputs; None unless each value has one entry per image."""
    if any(kind == "tokens" for kind in program.inputs):
        return None
    input_counts = {x.shape[0] for x in inputs}
    output_counts = {shape[0] for shape in (program.shapes([x.shape for x in inputs])[v] for v in program.outputs)}
    return input_counts.pop() if len(input_counts) == 1 and output_counts == input_counts else None


def _element_strides(kind: str, x: Tensor) -> tuple[int, int, int, int]:
    """Strides in elements along (batch, channel, y, x)."""
    if kind == "image":
        strides = x.stride()
    elif kind == "signal":
        strides = (x.stride(0), x.stride(1), 0, x.stride(2))
    elif kind == "pixels":
        strides = (x.stride(0), x.stride(3), x.stride(1), x.stride(2))
    else:
        tokens = x.flatten(0, -2) if x.ndim > 2 else x.reshape(-1, x.shape[-1])
        if tokens.data_ptr() != x.data_ptr():
            raise BadInput(f"expected tokens with one constant stride, got strides {x.stride()}")
        strides = (0, tokens.stride(1), 0, tokens.stride(0))
    if any(step < 0 for step in strides):
        raise BadInput(f"expected strides that are not negative, got {x.stride()}")
    return strides  # type: ignore[return-value]
