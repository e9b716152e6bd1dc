"""A segment on one machine and one size, ready to run: what `demask::segment` keeps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.kernels.isa import host
from demask.kernels.team import Job
from demask.sparse.build import Builder
from demask.sparse.program import Program
from demask.sparse.tape import Arena, NoPlan, Ready
from demask.sparse.tiling import Cut

__all__ = ["NoPlan", "Plan"]
SPARE = 4  # sets of memory that are kept: calls that run at the same time


@dataclass(slots=True)
class Part:
    """Images of a batch that are computed at once, by one tape; runs of it, alike."""

    ready: Ready
    images: int
    first: int
    runs: int
    spare: list[tuple[Job, list[Arena]]] = field(default_factory=list)

    def take(self) -> tuple[Job, list[Arena]]:
        """Memory for a call, until it is given back."""
        try:
            return self.spare.pop()
        except IndexError:
            arenas = [Arena(self.ready.size) for _ in range(self.runs)]
            places = np.array([arena.address for arena in arenas], np.int64)
            return Job(self.ready.entries, self.ready.ends, self.ready.threads, places), arenas

    def give(self, memory: tuple[Job, list[Arena]]) -> None:
        if len(self.spare) < SPARE:
            self.spare.append(memory)


class Plan:
    """plan(inputs) -> outputs, for inputs of the sizes and strides it was made for. Several threads
    may call it at once."""

    def __init__(self, parts: list[Part], shapes: list[tuple[int, ...]], threads: int,
                 cuts: list[tuple[str, Cut]]):  # fmt: skip
        self.parts, self.shapes, self.threads, self.cuts = parts, shapes, threads, cuts
        self.lock = threading.Lock()

    @classmethod
    def of(cls, program: Program, weights: Sequence[Tensor], inputs: Sequence[Tensor],
           threads: int) -> Plan:  # fmt: skip
        """The plan for inputs like these. BadInput: weights that do not fit; NoPlan: what the
        kernels cannot do."""
        if any(x.dtype is not torch.float32 or x.device.type != "cpu" for x in inputs):
            raise NoPlan("inputs are not float32 on the CPU")
        sizes = [tuple(x.shape) for x in inputs]
        shapes = program.shapes(sizes)
        builder = Builder(program, weights, sizes, host(), threads)
        builder.build([_strides(kind, x) for kind, x in zip(program.inputs, inputs, strict=True)])
        part = Part(builder.tape.done(), 0, 0, 1)
        return cls([part], [shapes[v] for v in program.outputs], threads, builder.cuts)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        outputs = [torch.empty(shape) for shape in self.shapes]
        for part in self.parts:
            job, arenas = memory = part.take()
            slots = [t.data_ptr() for t in (*inputs, *outputs)]
            for arena in arenas:
                arena.slots[1 : 1 + len(slots)] = slots
            job.run(self.threads)
            part.give(memory)
        return outputs

    @property
    def bytes(self) -> int:
        """Of packed weights and tables."""
        return sum(part.ready.weight_bytes for part in self.parts)


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
