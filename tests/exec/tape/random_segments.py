"""Segments of all kinds of steps, drawn at random or step by step; the widths of vectors on which
their plans run here; and the laws of memory and of planted faults."""

from __future__ import annotations

import ctypes
import math
import mmap
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import activation_step, call_step, flat_step
from demask.exec.tape import segment_plan, tape, tape_builder
from demask.exec.tape.layers import dense_layer, depthwise_layer, layer_plan, winograd_layer
from demask.exec.tape.segment_plan import SegmentPlan
from demask.kernels.llvm.isa import AVX2, Isa, host
from guarded import guarded
from segment_drafts import RELU, Draft, compare

EPS = 1e-5  # of norms
LAST = 2**63 - 1
STRIDES = [(1, 1), (2, 2), (1, 3), (4, 1)]
ACTS = (None, RELU, ("silu", ()), ("gelu", ()), ("tanh", ()), ("clamp", (-1.0, -0.5)))
OPS = {"lstm": (4, 2), "gru": (3, 1)}  # recurrent layers: gates, states


# ------------------------------------------------------------------------------------------- lanes


def narrower(lanes: int, registers: int) -> Isa:
    """This machine, with shorter vectors."""
    return replace(host(), name=f"{lanes} lanes", lanes=lanes, registers=registers)


# Those of 8 lanes are AVX2 itself where it runs.
WIDTHS = [narrower(4, 16), *([AVX2] if host().lanes > AVX2.lanes else []), host()]
# The narrowest at night: it differs from the middle one in numbers only.
MOST = [pytest.param(WIDTHS[0], marks=pytest.mark.nightly), *WIDTHS[1:]]


def widths(isas: Sequence = WIDTHS) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("isa", isas, ids=lambda isa: isa.name)


# -------------------------------------------------------------------------------------- segments


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class SegmentDraft(Draft):
    """A draft with calls of ops, and the layers that consist of them."""

    def call(
        self, name: str, *xs: int, kind: str = "tokens", numbers: tuple = (), index: list[int] | None = None
    ) -> int:
        span = None if index is None else self.stored(torch.tensor(index, dtype=torch.int32))
        return self.append(call_step(xs, name, kind, numbers, span))

    def factors(self, *vectors: Tensor) -> tuple[int, int, int] | None:
        return self.stored(torch.cat(vectors)) if vectors else None

    def norm(self, x: int, count: int = 2, kind: str = "tokens", name: str = "norm") -> int:
        channels = self.shape(x)[-1]
        span = self.factors(*(self._drawn(channels) for _ in range(count)))
        return self.append(call_step((x,), name, kind, (channels, EPS), span))

    def prelu(self, x: int) -> int:
        kind = "image" if len(self.shape(x)) == 4 else "signal"
        return self.append(call_step((x,), "prelu", kind, (), self.factors(self._drawn(self.shape(x)[1]))))

    def heads(self, x: int, count: int) -> int:
        """Tokens [batch, length, channels] as matrices [batch, heads, length, width]."""
        batch, length, channels = self.shape(x)
        sizes = -1 if batch > 1 else 1, length, count, channels // count
        x = self.call("reshape", x, numbers=sizes)
        return self.call("permute", x, kind="matrices", numbers=(0, 2, 1, 3))

    def whole(self, x: int) -> int:
        """The inverse of `heads`."""
        batch, heads, length, width = self.shape(x)
        x = self.call("permute", x, numbers=(0, 2, 1, 3))
        return self.call("reshape", x, numbers=(-1 if batch > 1 else 1, length, heads * width))

    def attention(self, x: int, heads: int, *mask: int) -> int:
        """Self-attention of tokens."""
        parts = [self.heads(self.linear(x, self.shape(x)[-1], 1.0), heads) for _ in range(3)]
        return self.whole(self.call("attention", *parts, *mask, kind="matrices"))

    def recurrent(
        self,
        name: str,
        x: int,
        hidden: int,
        *states: int,
        biases: bool = True,
        batch_first: bool = False,
        backwards: bool = False,
    ) -> int:
        rows, columns = OPS[name][0] * hidden, self.shape(x)[-1]
        shapes = [(rows, columns), (rows, hidden), *[(rows,)] * (2 * biases)]
        span = self.factors(*(self._drawn(*s).flatten() / hidden**0.5 for s in shapes))
        numbers = hidden, int(biases), int(batch_first), int(backwards)
        return self.append(call_step((x, *states), name, "tokens", numbers, span))

    def outputs_of(self, x: int, batch_first: bool = False) -> int:
        """The outputs among the rows of a recurrent layer."""
        return self.call("slice", x, numbers=(int(batch_first), 0, -1, 1))

    def values(self) -> range:
        return range(len(self.inputs) + len(self.steps))

    def convolved(self, draw: random.Random, x: int) -> int:
        """A convolution of any kind."""
        channels, kernel = self.shape(x)[1], draw.choice([1, 1, 3, 3, 5, 7])
        density, out = draw.choice([0.1, 0.4, 1.0]), draw.choice([1, 3, 6, 8, 17])
        fields: dict[str, Any] = {"act": draw.choice(ACTS)}
        fields |= {"stride": (draw.choice([1, 1, 2]),) * 2}
        match draw.choice(["dense", "dense", "depthwise", "groups", "transposed"]):
            case "depthwise":
                out, density = channels, 1.0
                fields |= {"groups": channels}
            case "groups" if channels % 2 == 0:
                out *= 2
                fields |= {"groups": 2}
            case "transposed":
                fields |= {"transposed": True}
        return self.conv(x, out, kernel, density, **fields)

    def step_of_images(self, draw: random.Random) -> None:
        """A random step."""
        x = draw.choice(self.values())
        batch, channels, *size = self.shape(x)
        alike = [v for v in self.values() if [*self.shape(v)[2:]] == size]
        same = [v for v in alike if self.shape(v)[1] == channels]
        gates = [v for v in self.values() if self.shape(v) == (batch, channels, 1, 1)]
        act, density = draw.choice(ACTS), draw.choice([0.3, 1.0])
        rest = ["sum", "pool", "mean", "gate", "scale", "pick", "add", "map", "prelu"]
        match draw.choice(["conv"] * 4 + ["cat"] * 3 + ["slice"] * 2 + rest):
            case "conv":
                self.convolved(draw, x)
            case "sum":
                self.conv(x, channels, draw.choice([1, 3]), density, act=act, add=draw.choice(same))
            case "pool":
                self.pool(x, draw.random() < 0.5, draw.choice([1, 1, 2]), ceil=draw.random() < 0.5)
            case "mean":
                self.mean(x)
            case "gate":
                self.scale(x, self.conv(self.mean(x), channels, 1, density), act)
            case "scale" if gates:
                self.scale(x, draw.choice(gates), act)
            case "slice":
                first = draw.randrange(channels)
                self.select(x, list(range(first, draw.randint(first + 1, channels))))
            case "pick":
                numbers = [draw.randrange(-1, channels) for _ in range(draw.randint(1, 7))]
                self.select(x, numbers, draw.choice(STRIDES))
            case "cat":
                self.cat(*draw.choices(alike, k=draw.randint(1, 4)))
            case "add":
                self.add(x, draw.choice(same), act)
            case "map":
                self.append(activation_step(x, ("silu", ())))
            case "prelu":
                self.prelu(x)

    def classified(self, draw: random.Random, x: int) -> None:
        """A mean and linear layers, which have one position for one image."""
        tokens = self.mean(x, draw.random() < 0.5)
        if len(self.shape(tokens)) == 4:
            tokens = self.append(flat_step(tokens))
        for _ in range(2):
            y = self.linear(tokens, 37, draw.choice([0.2, 1.0]), act=draw.choice(ACTS))
            tokens = self.linear(y, 37, draw.choice([0.2, 1.0]), add=y, act=draw.choice(ACTS))

    def step_of_tokens(self, draw: random.Random) -> None:
        """A random step over [time, batch, features]."""
        x = draw.choice(self.values())
        shape, batch_first = self.shape(x), draw.random() < 0.5
        alike = [v for v in self.values() if self.shape(v)[:2] == shape[:2]]
        match draw.choice(["layer", "layer", "layer", "linear", "slice", "cat", "permute", "norm"]):
            case "layer":
                name, hidden = draw.choice(list(OPS)), draw.randint(1, 20)
                wanted = 1, shape[0] if batch_first else shape[1], hidden
                states = [v for v in self.values() if self.shape(v) == wanted]
                given = draw.choices(states, k=OPS[name][1]) if states else []
                self.recurrent(
                    name,
                    x,
                    hidden,
                    *given,
                    biases=draw.random() < 0.5,
                    batch_first=batch_first,
                    backwards=draw.random() < 0.5,
                )
            case "linear":
                self.linear(x, draw.randint(1, 9), draw.choice([0.3, 1.0]))
            case "slice":
                self.call("slice", x, numbers=(draw.randrange(2), -1, LAST, 1))
            case "cat":
                self.cat(*draw.choices(alike, k=2))
            case "permute":
                self.call("permute", x, numbers=(1, 0, 2))
            case "norm":
                self.norm(x)


def random_segment(seed: int, kind: str = "image", most: int = 6, side: int = 14) -> SegmentDraft:
    """A random program. most: steps, and for images some at its end. side: largest of images."""
    draw = random.Random(seed)
    if kind == "tokens":
        first = draw.randint(1, 9), draw.randint(1, 9), draw.randint(1, 12)
        draft = SegmentDraft(first, kind=kind, seed=seed)
        for _ in range(draw.randint(2, most)):
            draft.step_of_tokens(draw)
        return draft
    batch, size = draw.choice([1, 1, 2, 3]), (draw.randint(1, side), draw.randint(1, side))
    channels = draw.choice([*range(1, 7), 16])
    draft = SegmentDraft((batch, channels, *size), (batch, 4, *size), seed=seed)
    for _ in range(draw.randint(3, most)):
        draft.step_of_images(draw)
    if draw.random() < 0.3:
        draft.classified(draw, len(draft.steps) + 1)
    return draft


def check_random(seed: int, kind: str = "image", most: int = 6, **laws: Any) -> None:
    """All values, or the last ones alone, whose operands may be overwritten, equal float64 with the
    same bits for two numbers of threads, or for those among `laws` of `check`."""
    draft, draw = random_segment(seed, kind, most), random.Random(~seed)
    every = draft.values()
    outputs = draw.choice([(), {every[-1], draw.choice(every)}])
    static = draw.choice([(), (), (1,)]) if kind == "image" else ()
    laws = {"threads": draw.sample((1, 2, 3), 2), "at_once": draw.random() < 0.3} | laws
    try:
        draft.check(*outputs, static=static, **laws)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r:.300}") from error


# ------------------------------------------------------------------------------------------- laws


def outputs(draft: Draft, *values: int, threads: int = 2, isa: Isa | None = None) -> list[Tensor]:
    program = draft.program(*values)
    return SegmentPlan.of(program, draft.weights, draft.inputs, threads, isa)(draft.inputs)


def same_bits(draft: Draft, *values: int, isa: Isa | None = None) -> list[Tensor]:
    """The outputs, compared with float64 and for several numbers of threads."""
    return draft.check(*values, threads=(1, 2, 3, 4), isa=isa, each=True)(draft.inputs)


class Guarded(tape.TapeArena):
    """An arena that ends where memory ends."""

    def __init__(self, size: int):
        room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, room + mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        libc = ctypes.CDLL(None)
        assert libc.mprotect(ctypes.c_void_p(address + room), mmap.PAGESIZE, 0) == 0
        first = (room - size) // 64 * 64
        self.slots = np.frombuffer(self.memory, np.int64, tape.MAX_SLOTS, first)
        self.address = self.slots.ctypes.data
        self.slots[0] = self.address


def stays_within_memory(
    program: SegmentProgram,
    weights: Sequence[Tensor],
    inputs: Sequence[Tensor],
    threads: int = 2,
    isa: Isa | None = None,
    near: Callable = compare,
) -> None:
    """Inputs, outputs, weights, tables and the arena end (or begin) at pages without access, which
    would stop the process; `near` compares outputs with those of the program."""
    fields = tape.Tape._field_array

    def held(self: Any, call: Any, offsets: Any) -> Any:
        for key, value in list(call.fields.items()):
            if isinstance(value, np.ndarray) and value.size:
                raw = np.ascontiguousarray(value).view(np.uint8).reshape(-1)
                kept.append(guarded(torch.from_numpy(raw.copy()), end))
                call.fields[key] = kept[-1].numpy()
        return fields(self, call, offsets)

    for end in (True, False):
        kept: list[Tensor] = []
        held_inputs = [guarded(x, end) for x in inputs]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tape.Tape, "_field_array", held)
            patch.setattr(segment_plan, "TapeArena", Guarded)
            plan = SegmentPlan.of(program, weights, held_inputs, threads, isa)
            made = [guarded(torch.zeros(shape), end) for shape in plan.shapes]
            for batch in plan.batches:
                batch.run(threads, (*held_inputs, *made))
        near(made, program, weights, inputs)
        assert all(map(torch.equal, held_inputs, inputs)) and kept


def sees(
    owner: Any, name: str, wrong: Callable[[Any], Any], law: Callable[[], Any], errors: Any = AssertionError
) -> None:
    """Assert that a law holds, and no longer with what `wrong` makes of an attribute of `owner`."""
    law()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(errors):
        patch.setattr(owner, name, wrong(getattr(owner, name)))
        law()


def record(patch: pytest.MonkeyPatch, owner: Any, name: str, of: Callable[..., Iterable]) -> list:
    """What `of` makes of the arguments of each call of a function, which still does its work."""
    found: list = []
    real = getattr(owner, name)

    def recorded(*args: Any) -> Any:
        found.extend(of(*args))
        return real(*args)

    patch.setattr(owner, name, recorded)
    return found


def weigh(patch: pytest.MonkeyPatch, tiles: float, both: float) -> None:
    """How much longer than channels in lanes tiles must take, and both kernels, to be left out."""
    patch.setattr(dense_layer, "TILES", tiles)
    patch.setattr(dense_layer, "BOTH", both)


def computed_as(form: str, patch: pytest.MonkeyPatch) -> list:
    """A list to which each layer that is computed in a form will be added, where there is a choice
    all of them: shapes of weights; for "channels" the threads of calls; or depthwise pieces."""
    if form.startswith("depthwise"):
        patch.setattr(depthwise_layer, "EDGE_PRODUCTS", 10**6 if "permuted" in form else 0)
        patch.setattr(depthwise_layer, "EDGE_SHARE", 0.0)
        return record(patch, layer_plan, "emit_depthwise", lambda tape, isa, piece: [piece])
    if form == "channels":
        weigh(patch, math.inf, math.inf)
        return record(
            patch, dense_layer, "emit_channels", lambda tape, isa, piece, shares: [share[0] for share in shares]
        )
    if form == "filtered":
        patch.setattr(winograd_layer, "PAYS", math.inf)
        patch.setattr(winograd_layer, "LEAST", 1)
    shapes = record(patch, tape_builder, "emit_winograd", lambda tape, isa, piece, block: [block.weight.shape])
    if form != "filtered":
        record(
            patch,
            layer_plan,
            "emit_dense",
            lambda tape, isa, piece: shapes.extend(block.weight.shape for block in piece.layer.blocks) or (),
        )
    return shapes
