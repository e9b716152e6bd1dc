"""Instruction lists of whole networks for an accelerator without strided convolutions.

Only weights, inputs and outputs cross between host and device: a network with an op that the device
does not have is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from demask.errors import BadInput
from demask.failures import public
from demask.graph.capture.capture import capture
from demask.graph.capture.fold_constants import fold_constants
from demask.graph.capture.functionalize import functionalize
from demask.graph.isolation import in_isolation
from demask.graph.normalize.canonical_calls import canonicalize_calls
from demask.graph.program import Program
from demask.machine.byte_sizes import format_bytes
from demask.ops import TABLE, Table
from demask.pages import InTerminal, Lines, OnPage, Page, PageSource, Span, TextTable, Timeline
from demask.records import decode, encode
from demask.stride.accelerator.addresses import assign_addresses
from demask.stride.accelerator.emit_compute import RULES
from demask.stride.accelerator.emitter import emit
from demask.stride.accelerator.instruction_json import FORMAT, Ports, Steps, Weights, check
from demask.stride.accelerator.interpreter import run_instructions
from demask.stride.accelerator.machine import (
    ACTIVATIONS,
    Counts,
    Instruction,
    InstructionWork,
    Machine,
    Setting,
    count_work,
    crossing,
)
from demask.stride.accelerator.units import unit_of, work_of
from demask.stride.lowering.lower import lowered
from demask.stride.targets import Target
from demask.tune.passes.fold_affine import fold_affine


@in_isolation
@public
def instructions(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: str | Path | Target = "matrix_unit",
    machine: Machine | None = None,
    table: Table = TABLE,
) -> Instructions:
    """The `Instructions` that compute `model(*args, **kwargs)` in eval mode on an accelerator.

    They are for the sizes of the example inputs. Batch norms are folded into weights, and strided
    convolutions are replaced as by `demask.stride.lower`. `model` is not changed.

    Args:
        model: an `nn.Module`, in any mode, or a `torch.export.ExportedProgram`; all numbers are
            float32.
        args: example inputs by position, a tuple such as (x,). Default: ().
        kwargs: example inputs by name, a mapping. Default: None, for no such inputs.
        target: the ops that may replace strided convolutions: name of a built-in target
            ("max_pool", "avg_pool", "slice", "no_pool", "space_to_depth", "fhe" or "matrix_unit"),
            path of a TOML file, or a `Target`. Default: "matrix_unit".
        machine: sizes and speeds of the accelerator. Default: `demask.stride.Machine()`.
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
    captured = canonicalize_calls(fold_constants(functionalize(capture(model, args, kwargs, dynamic_shapes={}))))
    program, choices = lowered(fold_affine(captured), target, table)
    return listed(program, machine or Machine(), tuple(map(str, choices)))


def listed(program: Program, machine: Machine, notes: tuple[str, ...] = ()) -> Instructions:
    """The instruction list of a program with static sizes and without strided convolutions."""
    listing = emit(program, RULES)
    plan = assign_addresses(listing, machine)
    return Instructions(machine, listing.inputs, listing.outputs, listing.weights, plan.instructions, plan.sizes, notes)


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
        return {"format": FORMAT, **encode(Instructions, self)}

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
        fields = {name: value for name, value in data.items() if name != "format"}
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
