"""A segment on one machine and one size, ready to run: what `demask::segment` keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.kernels.cpu.thread_team import Job
from demask.kernels.llvm.isa import Isa, host
from demask.sparse.plan.tape import MAX_SLOTS, EncodedTape, NoPlan, TapeArena
from demask.sparse.plan.tape_builder import TapeBuilder
from demask.sparse.plan.tiling import Tiling
from demask.sparse.segment_program import SegmentProgram

__all__ = ["NoPlan", "SegmentPlan"]
CACHE = 2**18  # bytes of the largest value, where several images are computed at once
SPARE = 4  # sets of memory that are kept: calls that run at the same time


@dataclass(frozen=True, slots=True)
class SegmentMemory:
    """What a call needs for itself."""

    job: Job
    arenas: list[TapeArena]
    slots: np.ndarray  # [runs, inputs and outputs]: addresses


@dataclass(slots=True)
class Batch:
    """Images of a batch: `runs` times `images`, from the first on, by one tape. alone: each thread
    takes whole runs, else all threads share each (there is one then)."""

    ready: EncodedTape
    first: int
    images: int
    runs: int
    alone: bool
    spare: list[SegmentMemory] = field(default_factory=list)

    def take(self, threads: int, tensors: int) -> SegmentMemory:
        """Memory for a call, until it is given back."""
        try:
            return self.spare.pop()
        except IndexError:
            arenas = [TapeArena(self.ready.size) for _ in range(threads if self.alone else 1)]
            places = np.array([arena.address for arena in arenas], np.int64)
            slots = np.zeros((self.runs, tensors), np.int64)
            ready, own = self.ready, slots if self.alone else None
            return SegmentMemory(
                Job(ready.entries, ready.ends, ready.threads, places, own), arenas, slots
            )

    def run(self, threads: int, tensors: Sequence[Tensor]) -> None:
        memory = self.take(threads, len(tensors))
        for k, tensor in enumerate(tensors):
            step = tensor.stride(0) * 4 if tensor.ndim and (self.alone or self.first) else 0
            begin = tensor.data_ptr() + self.first * step
            memory.slots[:, k] = begin + step * self.images * np.arange(self.runs)
        if not self.alone:
            memory.arenas[0].slots[1 : 1 + len(tensors)] = memory.slots[0]
        memory.job.run(threads)
        if len(self.spare) < SPARE:
            self.spare.append(memory)


class SegmentPlan:
    """plan(inputs) -> outputs, for inputs of the sizes and strides it was made for. Several threads
    may call it at once."""

    def __init__(self, batches: list[Batch], shapes: list[tuple[int, ...]], threads: int,
                 cuts: list[tuple[str, Tiling]]):  # fmt: skip
        self.batches, self.shapes, self.threads, self.cuts = batches, shapes, threads, cuts

    @classmethod
    def of(cls, program: SegmentProgram, weights: Sequence[Tensor], inputs: Sequence[Tensor],
           threads: int, isa: Isa | None = None) -> SegmentPlan:  # fmt: skip
        """The plan for inputs like these. isa: what may be used of this machine (None: all).
        BadInput: weights that do not fit; NoPlan: what the kernels cannot do."""
        isa = isa or host()
        if any(x.dtype is not torch.float32 or x.device.type != "cpu" for x in inputs):
            raise NoPlan("inputs are not float32 on the CPU")
        if len(inputs) + len(program.outputs) >= MAX_SLOTS:
            raise NoPlan(f"{len(inputs)} inputs and {len(program.outputs)} outputs")
        shapes = program.shapes([tuple(x.shape) for x in inputs])
        batches, cuts = [], []
        for first, images, runs in _batches(program, weights, inputs, threads, isa):
            own = [x[:images] for x in inputs] if images else inputs
            alone = images > 0 and runs > 1
            builder = TapeBuilder(program, weights, own, isa, 1 if alone else threads)
            builder.build([_strides(kind, x) for kind, x in zip(program.inputs, own, strict=True)])
            batches.append(Batch(builder.tape.done(isa), first, images, runs, alone))
            cuts += builder.cuts
        return cls(batches, [shapes[v] for v in program.outputs], threads, cuts)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        outputs = [torch.empty(shape) for shape in self.shapes]
        for batch in self.batches:
            batch.run(self.threads, (*inputs, *outputs))
        return outputs


def _batches(program: SegmentProgram, weights: Sequence[Tensor], inputs: Sequence[Tensor],
             threads: int, isa: Isa) -> list[tuple[int, int, int]]:  # fmt: skip
    """(first image, images at once, runs) of each part; images 0: all at once. A batch is cut
    where its images are independent: threads that take different ones wait for nobody."""
    count = _independent(program, inputs)
    if count is None or count == 1:
        return [(0, 0, 1)]
    sizes = [n for n in (1, 2, 4, 8, 16) if n <= min(count, isa.lanes)]
    costs: dict[int, float] = {}
    for n in sizes:
        builder = TapeBuilder(program, weights, [x[:n] for x in inputs], isa, 1)
        if n == 1 or (count // n >= threads and builder.largest() <= CACHE):
            costs[n] = builder.estimate() / n
    images = min(costs, key=costs.__getitem__)
    runs, left = divmod(count, images)
    return [(0, images, runs)] + ([(runs * images, left, 1)] if left else [])


def _independent(program: SegmentProgram, inputs: Sequence[Tensor]) -> int | None:
    """How many images come in and go out; None where values are not one per image."""
    if any(kind == "tokens" for kind in program.inputs):
        return None
    counts = {x.shape[0] for x in inputs}
    made = {shape[0] for shape in (program.shapes([x.shape for x in inputs])[v]
                                   for v in program.outputs)}  # fmt: skip
    return counts.pop() if len(counts) == 1 and made == counts else None


def _strides(kind: str, x: Tensor) -> tuple[int, int, int, int]:
    """Elements between neighbours along (batch, channel, y, x)."""
    if kind == "image":
        found = x.stride()
    elif kind == "signal":
        found = (x.stride(0), x.stride(1), 0, x.stride(2))
    else:
        flat = x.flatten(0, -2) if x.ndim > 2 else x.reshape(-1, x.shape[-1])
        if flat.data_ptr() != x.data_ptr():
            raise BadInput(f"expected tokens that follow one another, got strides {x.stride()}")
        found = (0, flat.stride(1), 0, flat.stride(0))
    if any(step < 0 for step in found):
        raise BadInput(f"expected strides that are not negative, got {x.stride()}")
    return found  # type: ignore[return-value]
