"""A whole network as the instruction list of an accelerator that has no strided convolution.

Weights and inputs go to the device, outputs come back, and nothing in between: an op that the
device does not have is refused before the first instruction (feature row 002-d).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from demask.errors import BadInput
from demask.failures import public
from demask.graph.capture.capture import capture
from demask.graph.capture.fold_constants import folded
from demask.graph.capture.functionalize import functionalized
from demask.graph.normalize.canonical_calls import spelled
from demask.graph.program import Program
from demask.machine.byte_sizes import human
from demask.ops import TABLE, Table
from demask.stride.accelerator import instruction_json as stored
from demask.stride.accelerator.addresses import placed
from demask.stride.accelerator.emit_compute import RULES
from demask.stride.accelerator.emitter import emitted
from demask.stride.accelerator.instruction_json import Ports
from demask.stride.accelerator.interpreter import executed
from demask.stride.accelerator.machine import (
    Counts,
    Instruction,
    InstructionWork,
    Machine,
    Setting,
    counted,
)
from demask.stride.accelerator.units import unit_of, work_of
from demask.stride.lowering.lower import lowered
from demask.stride.targets import Target
from demask.tune.passes.fold_affine import absorbed


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
    """The instruction list of `model(*args, **kwargs)`, in eval mode, at the sizes of the example.

    Batch norms go into the weights before them, strided convolutions into the form that `target`
    allows (`demask.stride.lower`). machine: sizes of the units and buffers. table: the op table, as
    `demask.demask` takes it. Raises BadInput, which names the nodes: an op that the machine does
    not have, a stride that the target has no sound form for, numbers other than float32, a buffer
    that is too small; and NotExportable.

    >>> import torch, demask.stride
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
    >>> listing = instructions(net, (torch.ones(1, 4),))
    >>> [row.op for row in listing.instructions]
    ['load', 'load', 'load', 'product', 'add', 'relu', 'store']
    >>> torch.equal(listing.run(torch.ones(1, 4)), net(torch.ones(1, 4)))
    True
    """
    given = spelled(folded(functionalized(capture(model, args, kwargs, dynamic_shapes={}))))
    program, choices = lowered(absorbed(given), target, table)
    return listed(program, machine or Machine(), tuple(map(str, choices)))


def listed(program: Program, machine: Machine, notes: tuple[str, ...] = ()) -> Instructions:
    """The instruction list of a program without strided convolutions, whose sizes are static."""
    listing = emitted(program, RULES)
    plan = placed(listing, machine)
    return Instructions(machine, listing.inputs, listing.outputs, listing.weights,
                        plan.instructions, plan.sizes, notes)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Instructions:
    """What an accelerator does to run a network once, from the load of its weights on.

    inputs, outputs: names and shapes, in the order of the network's. weights: the host's copy of
    what is loaded before. sizes: bytes of each buffer that are used. notes: what became of the
    strides.
    """

    machine: Machine
    inputs: Ports
    outputs: Ports
    weights: Mapping[str, Tensor]
    instructions: tuple[Instruction, ...]
    sizes: Mapping[str, int]
    notes: tuple[str, ...] = ()

    def run(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """What the network returns for inputs of the shapes of the example (those given by keyword
        behind the others), computed by the reference interpreter: one tensor, or a tuple. BadInput:
        other inputs; or an instruction reads what is not there."""
        _check_inputs(inputs, self.inputs)
        host = dict(self.weights)
        for (name, _), tensor in zip(self.inputs, inputs, strict=True):
            host[name] = tensor.detach().to("cpu")
        held = executed(self.instructions, host, self.sizes)
        made = tuple(held[name] for name, _ in self.outputs)
        return made[0] if len(made) == 1 else made

    @property
    def counts(self) -> Counts:
        """Cycles by unit, multiply-adds, bytes by buffer, transfers between host and device."""
        return counted((unit, row, work) for unit, row, work in self._works())

    def _works(self) -> Iterator[tuple[str, Instruction, InstructionWork]]:
        for row in self.instructions:
            yield unit_of(row.op), row, work_of(row, self.machine)

    def to_dict(self) -> dict[str, Any]:
        """The list in JSON types, weights as base64 text."""
        return stored.encoded(self.machine, self.inputs, self.outputs, self.weights,
                              self.instructions, self.sizes, self.notes)  # fmt: skip

    @classmethod
    def from_dict(cls, data: Any) -> Instructions:
        """The list that to_dict() gave. BadInput: damaged, or no list that the machine can run."""
        return cls(**stored.decoded(data))

    def __str__(self) -> str:
        counts = self.counts
        cycles = ", ".join(f"{unit} {n - (counts.loading if unit == 'dma' else 0):,}"
                           for unit, n in counts.cycles.items())  # fmt: skip
        crossed = ", ".join(f"{n} {kind} ({human(counts.transferred[kind])})"
                            for kind, n in counts.transfers.items())  # fmt: skip
        used = ", ".join(f"{buffer} {human(size)}" for buffer, size in self.sizes.items())
        lines = [f"{len(self.instructions)} instructions, {counts.macs:,} multiply-adds",
                 f"cycles: {counts.total:,} per run ({cycles}), and {counts.loading:,} to load the "
                 "weights once", f"buffers: {used}", f"between host and device: {crossed}",
                 *self.notes]  # fmt: skip
        rows = (_line(k, row) for k, row in enumerate(self.instructions))
        return "\n".join([*lines, *rows])


def _line(number: int, row: Instruction) -> str:
    reads = ", ".join(map(str, row.reads))
    settings = "; ".join(f"{name} {_plain(value)}" for name, value in row.settings.items())
    text = f"{number:5}  {unit_of(row.op):6}  {row.op:12}  {reads} -> {row.writes}"
    return f"{text}; {settings}" if settings else text


def _plain(value: Setting) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"


def _check_inputs(given: tuple[Any, ...], expected: Ports) -> None:
    found = [f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor)
             else type(value).__name__ for value in given]  # fmt: skip
    if found != [f"{torch.float32} {shape}" for _, shape in expected]:
        wanted = ", ".join(f"{name} {shape}" for name, shape in expected)
        raise BadInput(f"expected float32 tensors {wanted}; got {', '.join(found) or 'nothing'}: "
                       "a list of instructions is for the sizes of its example")  # fmt: skip
