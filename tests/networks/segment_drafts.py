"""Programs drawn up step by step, with their weights; and plans compared with float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from demask.exec.steps import reference as dense
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import (
    SparseWeight,
    Step,
    add_step,
    concat_step,
    conv_step,
    linear_step,
    mean_step,
    pool_step,
    scale_step,
    select_step,
)
from demask.exec.tape import segment_plan
from demask.exec.tape.segment_plan import SegmentPlan
from demask.exec.tape.tape import HEADER, TapeArena
from demask.kernels.llvm.isa import Isa, host
from sparse_cases import csr, matrix

# Of the largest value of a program: later steps carry the rounding of earlier ones.
ULPS = 128.0
RELU = ("relu", ())
Threads = int | Sequence[int]


class Draft:
    """A program while it is drawn up: methods append a step and return the number of its value."""

    def __init__(self, *shapes: Sequence[int], kind: str = "image", seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)
        self.inputs = [self._drawn(*shape) for shape in shapes]
        self.kinds = [kind] * len(shapes)
        self.steps: list[Step] = []
        self.weights: list[Tensor] = []

    def _drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def program(self, *outputs: int, static: tuple[int, ...] = ()) -> SegmentProgram:
        """The program with these outputs; by default with every value as one."""
        every = range(len(self.inputs) + len(self.steps))
        return SegmentProgram(tuple(self.kinds), tuple(self.steps), outputs or tuple(every), static)

    def shape(self, value: int) -> tuple[int, ...]:
        return self.program().shapes([x.shape for x in self.inputs])[value]

    def append(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.inputs) + len(self.steps) - 1

    def stored(self, tensor: Tensor) -> tuple[int, int, int]:
        """The span of a new weight tensor."""
        self.weights.append(tensor)
        return len(self.weights) - 1, 0, tensor.numel()

    def weight(self, rows: int, columns: int, density: float) -> SparseWeight:
        values = matrix(rows, columns, density, len(self.weights), torch.float32)
        return SparseWeight(*map(self.stored, csr(values / max(1.0, columns * density) ** 0.5)))

    def conv(self, x: int, out: int, kernel: int = 3, density: float = 0.3, **fields: Any) -> int:
        """A convolution that keeps the size of images, unless `fields` say otherwise."""
        inner = self.shape(x)[1] // fields.get("groups", 1)
        window = {"kernel": (kernel, kernel), "padding": ((kernel // 2,) * 2,) * 2}
        weight, bias = self.weight(out, inner * kernel**2, density), self.stored(self._drawn(out))
        return self.append(conv_step(x, weight, bias, out, **window | fields))

    def linear(self, x: int, out: int, density: float = 0.3, **fields: Any) -> int:
        weight = self.weight(out, self.shape(x)[-1], density)
        return self.append(linear_step(x, weight, self.stored(self._drawn(out)), out, **fields))

    def pool(self, x: int, mean: bool = False, stride: int = 1, **fields: Any) -> int:
        return self.append(pool_step(x, mean, (3, 3), (stride, stride), (1, 1), **fields))

    def select(self, x: int, numbers: Sequence[int], stride: tuple[int, int] = (1, 1)) -> int:
        index = self.stored(torch.tensor(numbers, dtype=torch.int32))
        return self.append(select_step(x, index, stride, min(numbers) < 0))

    def cat(self, *xs: int) -> int:
        return self.append(concat_step(xs))

    def add(self, x: int, z: int, act: Any = None) -> int:
        return self.append(add_step(x, z, act))

    def scale(self, x: int, z: int, act: Any = None) -> int:
        return self.append(scale_step(x, z, act))

    def mean(self, x: int, keep: bool = True) -> int:
        return self.append(mean_step(x, keep))

    def check(
        self, *outputs: int, static: tuple[int, ...] = (), threads: Threads = 2, isa: Isa | None = None, **laws: bool
    ) -> SegmentPlan:
        """Compare the plans of these outputs with float64."""
        program = self.program(*outputs, static=static)
        return check(program, self.weights, self.inputs, threads, isa, **laws)


@contextmanager
def all_at_once(images: int = 1) -> Iterator[None]:
    """Plans compute all images of a batch at once, side by side in the lanes of vectors. Skips tests of more images
    than vectors have lanes."""
    if images > host().lanes:
        pytest.skip(f"vectors have fewer lanes than {images}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_plan, "_batches", lambda *_: [(0, 0, 1)])
        yield


def exact(program: SegmentProgram, weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs in float64."""
    wide = [w.double() if w.is_floating_point() else w for w in weights]
    return dense.run(program, [x.double() for x in inputs], wide)


def compare(
    outputs: Sequence[Tensor],
    program: SegmentProgram,
    weights: Sequence[Tensor],
    inputs: Sequence[Tensor],
    each: bool = False,
) -> None:
    """Assert that outputs equal those in float64, and are finite where those are.

    each: by the largest element of each output, and half as far from it.
    """
    expected = exact(program, weights, inputs)
    finite = [want[want.isfinite()].abs() for want in expected]
    sizes = [float(want.max()) if want.numel() else 0.0 for want in finite]
    eps = torch.finfo(torch.float32).eps
    for k, (y, want) in enumerate(zip(outputs, expected, strict=True)):
        assert y.shape == want.shape
        unit, ulps = eps * max(sizes[k] if each else max(sizes), 1e-30), ULPS / (1 + each)
        gap = (y.double() - want)[want.isfinite()].abs()
        assert not gap.numel() or bool((gap <= ulps * unit).all()), (k, float(gap.max()) / unit)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32)


def call_in_nan(plan: SegmentPlan, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a plan whose memory is full of NaN before the call."""
    if not plan.used:
        return plan(inputs)
    arena = TapeArena(max(end for _, end in plan.used))
    memory = np.frombuffer(arena.memory, np.uint8)
    for begin, end in plan.used:
        memory[max(begin, HEADER) : end] = 255
    plan.share(arena)
    outputs = plan(inputs)
    plan.free()
    return outputs


def check(
    program: SegmentProgram,
    weights: Sequence[Tensor],
    inputs: Sequence[Tensor],
    threads: Threads = 2,
    isa: Isa | None = None,
    *,
    each: bool = False,
    at_once: bool = False,
) -> SegmentPlan:
    """Compare plans with float64; the first of them is returned.

    Outputs have the same bits for all these numbers of threads and, if at_once, with all images of
    a batch at once; and when a plan is called again, since memory is used again, and is full of NaN before.
    """
    counts = (threads,) if isinstance(threads, int) else threads
    plans = [SegmentPlan.of(program, weights, inputs, count, isa) for count in counts]
    if at_once:
        with all_at_once():
            plans.append(SegmentPlan.of(program, weights, inputs, 2, isa))
    first, *others = [call(inputs) for plan in plans for call in (plan, partial(call_in_nan, plan))]
    compare(first, program, weights, inputs, each)
    for k, other in enumerate(others, 1):
        same = [torch.equal(bits(a), bits(b)) for a, b in zip(first, other, strict=True)]
        assert all(same), f"plan {k // 2}, call {k % 2}: output {same.index(False)}"
    return plans[0]
