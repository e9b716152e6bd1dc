"""A random network as text: what it says is what runs, so a failure prints its own reproduction."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

PREAMBLE = """\
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

torch.set_default_dtype(torch.float64)

class Masked(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", mask)
    def forward(self, weight):
        return weight * self.mask

def ones_but(like, axis, gone):
    return torch.ones_like(like).index_fill(axis, torch.tensor(gone, dtype=torch.long), 0.0)
"""


@dataclass(frozen=True, slots=True)
class Input:
    """One argument of forward: its shape without the batch; high: indices below it (0: floats)."""

    name: str
    shape: tuple[int, ...]
    high: int = 0

    def example(self, batch: int, draw: torch.Generator) -> Tensor:
        if self.high:
            return torch.randint(self.high, (batch, *self.shape), generator=draw)
        return torch.randn((batch, *self.shape), generator=draw, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Step:
    """One op of a network: `init` runs in __init__ and `body` in forward; it makes `outs`."""

    op: str
    reads: tuple[str, ...]
    outs: tuple[str, ...]
    init: tuple[str, ...]
    body: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A network: steps from inputs to outputs. form: what forward returns them as."""

    seed: int
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    form: str = "tuple"
    batch: int = 2
    dynamic: bool = False

    def text(self) -> str:
        """Python source: PREAMBLE and a class Net."""
        names = ", ".join(i.name for i in self.inputs)
        lines = [PREAMBLE, "class Net(nn.Module):", "    def __init__(self):"]
        lines += ["        super().__init__()"]
        for step in self.steps:
            if step.init:
                lines += [f"        torch.manual_seed({self.seed + 7919 * int(step.outs[0][1:])})"]
            lines += [f"        {line}" for line in step.init]
        lines += [f"    def forward(self, {names}):"]
        lines += [f"        {line}" for step in self.steps for line in step.body]
        lines += [f"        return {self._returned()}", ""]
        return "\n".join(lines)

    def snippet(self) -> str:
        """`text` and a call of demask: paste it and run it."""
        made = [
            f"torch.randint({i.high}, {(self.batch, *i.shape)})" if i.high else f"torch.randn({(self.batch, *i.shape)})"
            for i in self.inputs
        ]
        lines = [self.text(), "import demask", "net = Net().eval()", f"args = ({', '.join(made)},)"]
        if self.dynamic:
            lines += ["auto = {k: torch.export.Dim.AUTO for k in (0, 2, 3)}"]
        shapes = ", dynamic_shapes=(auto,)" if self.dynamic else ""
        return "\n".join([*lines, f"slim = demask.demask(net, args{shapes})"])

    def _returned(self) -> str:
        if self.form == "one" and len(self.outputs) == 1:
            return self.outputs[0]
        if self.form == "dict":
            return "{" + ", ".join(f"'{o}': {o}" for o in self.outputs) + "}"
        if self.form == "nested":
            return f"[{self.outputs[0]}, ({', '.join(self.outputs[1:])},)]"
        return f"({', '.join(self.outputs)},)"

    def build(self) -> nn.Module:
        """The network, float64, in eval mode; equal programs give equal weights."""
        space: dict[str, object] = {}
        before = torch.get_default_dtype()
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                # The old weight_norm says that it is old; it is what many models still use.
                warnings.filterwarnings("ignore", ".*weight_norm.*is deprecated.*", FutureWarning)
                exec(compile(self.text(), f"<network {self.seed}>", "exec"), space)
                return space["Net"]().eval()  # type: ignore[operator]
        finally:
            torch.set_default_dtype(before)

    def example(self, batch: int, seed: int = 0, *, grow: int = 0) -> tuple[Tensor, ...]:
        """Random arguments; grow: how much longer every dimension after the channels is."""
        draw = torch.Generator().manual_seed(self.seed * 31 + seed)
        found = []
        for each in self.inputs:
            shape = (each.shape[0], *(n + grow * (k + 1) for k, n in enumerate(each.shape[1:])))
            grown = Input(each.name, shape, each.high) if grow else each
            found.append(grown.example(batch, draw))
        return tuple(found)


def without(program: Program, gone: int) -> Iterable[Program]:
    """The program with one step dropped, once per operand that can stand for its outputs."""
    step = program.steps[gone]
    rest = program.steps[:gone] + program.steps[gone + 1 :]
    for stand in dict.fromkeys(step.reads):
        names = dict.fromkeys(step.outs, stand)
        outputs = tuple(dict.fromkeys(names.get(o, o) for o in program.outputs))
        yield _replaced(program, tuple(renamed(s, names) for s in rest), outputs)


def renamed(step: Step, names: dict[str, str]) -> Step:
    """The step with other operands."""
    if not set(step.reads) & set(names):
        return step

    def swap(line: str) -> str:
        return re.sub(r"\bv\d+\b", lambda m: names.get(m.group(), m.group()), line)

    reads = tuple(names.get(r, r) for r in step.reads)
    return Step(step.op, reads, step.outs, step.init, tuple(swap(line) for line in step.body))


def _replaced(program: Program, steps: tuple[Step, ...], outputs: tuple[str, ...]) -> Program:
    inputs = program.inputs
    return Program(program.seed, inputs, steps, outputs, program.form, program.batch, program.dynamic)


def pruned(program: Program) -> Program:
    """Steps nobody reads are dropped, in-place ones kept; inputs stay."""
    read = set(program.outputs)
    kept: list[Step] = []
    for step in reversed(program.steps):
        if set(step.outs) & read or step.op.startswith("inplace"):
            kept.append(step)
            read |= set(step.reads)
    return _replaced(program, tuple(reversed(kept)), program.outputs)


def smaller(program: Program) -> Iterable[Program]:
    """Programs one change simpler."""
    clean = pruned(program)
    if clean.steps != program.steps:
        yield clean
    for k, _ in enumerate(program.outputs):
        if len(program.outputs) > 1:
            left = program.outputs[:k] + program.outputs[k + 1 :]
            yield pruned(_replaced(program, program.steps, left))
    if program.form != "one" and len(program.outputs) == 1:
        yield Program(
            program.seed, program.inputs, program.steps, program.outputs, "one", program.batch, program.dynamic
        )
    for step in program.steps[:-1]:
        for out in step.outs:
            if (out,) != program.outputs:
                yield pruned(_replaced(program, program.steps, (out,)))
    for k in reversed(range(len(program.steps))):
        yield from without(program, k)
    for k, step in enumerate(program.steps):
        for line in range(1, len(step.init)):
            init = step.init[:line] + step.init[line + 1 :]
            lighter = Step(step.op, step.reads, step.outs, init, step.body)
            yield _replaced(program, (*program.steps[:k], lighter, *program.steps[k + 1 :]), program.outputs)
