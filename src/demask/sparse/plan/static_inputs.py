"""Static inputs of a plan, such as border maps: converted to the layout of the kernels once.

They are converted again when a call has other tensors or changed ones. Calls that run at the same
time may have different ones, so converted values are never overwritten.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from demask.kernels.memory_probe import MemoryProbe
from demask.kernels.thread_team import Job
from demask.sparse.plan.tape import HEADER, STATIC, EncodedTape, NoPlan, TapeArena


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
        return cls(weakref.ref(tensor), storage, _layout(tensor), tensor._version)

    def is_current(self, tensor: Tensor) -> bool:
        """Whether this is the tensor, in the same memory and without writes that torch counts."""
        return (
            self.tensor() is tensor
            and self.version == tensor._version
            and self.storage() is tensor.untyped_storage()
            and self.layout == _layout(tensor)
        )


def _layout(tensor: Tensor) -> Hashable:
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
        self.converted: ConvertedInputs | None = None  # replaced as a whole: read without a lock

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
