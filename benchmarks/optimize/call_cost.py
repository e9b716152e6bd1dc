"""What a call of a segment costs beyond its kernels: `python -m benchmarks run call_cost`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from rich.progress import Progress
from torch import Tensor, nn

import cifar
from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.command import command
from benchmarks.common.ledger import Page, Table
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import activation_step
from demask.exec.tape.segment_plan import Batch
from demask.graph.result.demasked_module import build
from demask.machine.clock import Timing, race
from demask.ops import TABLE
from demask.shrink.pipeline import capture_program, shrink_program
from demask.sparse.segment.build_segments import segmented
from demask.sparse.segment.inline import bound
from demask.sparse.segment.segment_op import SegmentPlans, segment
from demask.tune.fold_affine import fold_affine
from demask.tune.optimized_module import Optimized

BENCHMARK = Benchmark(
    "a call of a segment beyond its kernels, in microseconds",
    "about 5 s a setting",
    needs=(DEV, SHARED_DATA),
    quick="--networks nothing --threads 1 --pairs 5 --seconds 1",
    measures=("exec", "sparse/segment", "kernels"),
)

TARGET = 10e-6  # seconds
Arguments = tuple[list[Tensor], list[Tensor], str]


def nothing() -> Arguments:
    """The arguments of a segment that computes one number."""
    program = SegmentProgram(("image",), (activation_step(0, ("relu", ())),), (1,))
    return [torch.ones(1, 1, 1, 1)], [], program.text()


def as_one_segment(model: nn.Module, x: Tensor) -> nn.Module:
    """The demasked network with all its layers in segments."""
    program = capture_program(model, (x,), None, None)
    program, provenance = shrink_program(program, TABLE)
    whole = segmented(fold_affine(program), lambda *_: True, lambda *_: True)
    return build(whole, provenance, Optimized).eval()


def recorded(network: nn.Module, x: Tensor) -> Arguments:
    """The arguments of the largest segment that a network calls."""
    calls: list[tuple[SegmentPlans, list[Tensor], list[Tensor]]] = []
    run = SegmentPlans.run

    def record(self: SegmentPlans, inputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
        calls.append((self, inputs, weights))
        return run(self, inputs, weights)

    with patch.object(SegmentPlans, "run", record), torch.no_grad():
        network(x)
    plans, inputs, weights = max(calls, key=lambda each: len(each[0].program.steps))
    return inputs, weights, plans.program.text()


def half_masked(depth: int) -> Arguments:
    """The arguments of a half masked ResNet for CIFAR as a segment."""
    model = cifar.masked(cifar.trained(depth), torch.Generator().manual_seed(0), shifts=False)
    image = torch.randn(1, 3, 32, 32)
    return recorded(as_one_segment(model.eval(), image), image)


PROGRAMS: Mapping[str, Callable[[], Arguments]] = {
    "nothing": nothing,
    "ResNet-20": lambda: half_masked(20),
    "ResNet-56": lambda: half_masked(56),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One program and number of threads; call: of the op, kernels: of the machine code alone."""

    name: str
    threads: int
    steps: int
    call: Timing
    kernels: Timing

    @property
    def cost(self) -> float:
        """Seconds beyond the kernels."""
        return self.call.median - self.kernels.median


def kernels_of(arguments: Arguments, threads: int) -> Callable[[], object]:
    """A call of the machine code of a segment, for the same inputs and outputs."""
    batches: list[Batch] = []
    run = Batch.run

    def record(self: Batch, count: int, tensors: Sequence[Tensor]) -> bool:
        batches.append(self)
        return run(self, count, tensors)

    with patch.object(Batch, "run", record):
        outputs = segment(*arguments)
    (batch,) = batches
    memory = batch.spare.pop()  # other calls write to other outputs
    return lambda: (memory.job.run(threads), outputs)


def rows(chosen: Sequence[str], threads: Sequence[int], pairs: int, seconds: float, bar: Progress) -> Iterator[Row]:
    step = bar.add_task("", total=len(chosen) * len(threads))
    for name in chosen:
        bar.update(step, description=name)
        arguments = PROGRAMS[name]()
        for count in threads:
            torch.set_num_threads(count)
            with torch.no_grad():
                call, operands = bound(dict(zip(NAMES, arguments, strict=True)))
                calls = {"call": partial(call, *operands), "kernels": kernels_of(arguments, count)}
                timings = Timing.of_each(race(calls, pairs, seconds=seconds))
            steps = len(SegmentProgram.parse(arguments[2]).steps)
            yield Row(name, count, steps, timings["call"], timings["kernels"])
            bar.advance(step)


NAMES = ("inputs", "weights", "program")
HEAD = ["program", "threads", "steps", "call, ms", "kernels, ms", "beyond, µs"]


def page(rows: Sequence[Row]) -> Page:
    text = f"""
*Call*: `demask::segment` as an optimized network calls it. *Kernels*: the machine code of the same
call alone, with the same memory. *Nothing*: a program of one number. Half of the channels of the
networks are masked; batch 1, float32. Both run in turns in one process (median, 10 %–90 %
quantile). Asked: at most {1e6 * TARGET:.0f} µs beyond the kernels."""
    cells = [[row.name, row.threads, row.steps, row.call, row.kernels, 1e6 * row.cost] for row in rows]
    costs, over = [1e6 * row.cost for row in rows], sum(row.cost > TARGET for row in rows)
    summary = (
        f"{min(costs):.0f} to {max(costs):.0f} µs beyond the kernels; more than "
        f"{1e6 * TARGET:.0f} in {over} of {len(rows)}"
    )
    return Page("Calls of segments", [text, Table(HEAD, cells, 2)], summary)


def main() -> None:
    command("call_cost", __doc__, rows, page, 5.0, list(PROGRAMS))


if __name__ == "__main__":
    main()
