"""The ops of the accelerator's units: one entry per op.

An entry defines the operands and settings of an instruction, a check of its shapes (see `checked`),
its result, and its cost. Numbers are float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from demask.errors import BadInput
from demask.stride.accelerator.machine import ACTIVATIONS, HOST, WORD, Instruction, InstructionWork, Machine, Setting

Shape = tuple[int, ...]
Settings = Mapping[str, Setting]
FLOAT, INT, INTS = "a number", "an integer", "a list of integers"
REACH = 4096  # largest padding and dilation of an instruction


@dataclass(frozen=True, slots=True)
class Ability:
    """One op of one unit.

    reads: allowed numbers of operands. shape: raises BadInput if shapes of operands and result do
    not fit. run(values, settings, shape): the result. work: its cost. settings, optional: kinds of
    required and of optional settings, by name. inplace: whether the result may be written over the
    first operand of the same size.
    """

    unit: str
    reads: tuple[int, ...]
    shape: Callable[[Instruction], None]
    run: Callable[[Sequence[Tensor], Settings, Shape], Tensor]
    work: Callable[[Instruction, Machine], InstructionWork]
    settings: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    inplace: bool = False


def check_instruction(instruction: Instruction) -> Ability:
    """The entry of an instruction. Raises BadInput if the instruction violates it."""
    ability = ABILITIES.get(instruction.op)
    if ability is None:
        raise BadInput(f"expected an op of the machine, got {instruction.op!r:.40}")
    if len(instruction.reads) not in ability.reads:
        raise BadInput(f"{instruction.op}: expected operands {ability.reads}, got {len(instruction.reads)}")
    known = {**ability.settings, **ability.optional}
    for name, value in instruction.settings.items():
        if name not in known or not _is_of_kind(known[name], value):
            raise BadInput(
                f"{instruction.op}: setting {name!r:.40} is {value!r:.60}; expected "
                f"{known.get(name, f'one of {sorted(known)}')}"
            )
    if missing := set(ability.settings) - set(instruction.settings):
        raise BadInput(f"{instruction.op}: settings {sorted(missing)} are missing")
    on_host = [operand.buffer == HOST for operand in (*instruction.reads, instruction.writes)]
    if ability.unit != "dma" and (any(on_host) or instruction.writes.buffer != ACTIVATIONS):
        raise BadInput(f"{instruction.op}: expected operands on the device, and a result in {ACTIVATIONS}")
    ability.shape(instruction)
    return ability


def _is_of_kind(kind: str, value: Any) -> bool:
    """Whether a setting has the kind FLOAT, INT or INTS."""
    if kind == FLOAT:
        return type(value) in (int, float)
    if kind == INT:
        return type(value) is int
    return isinstance(value, tuple) and all(type(n) is int for n in value)


def _need(instruction: Instruction, is_valid: bool, what: str) -> None:
    """Raise BadInput with the expectation `what` if a check failed."""
    if not is_valid:
        shapes = ", ".join(str(operand.shape) for operand in instruction.reads)
        raise BadInput(
            f"{instruction.op}: expected {what}, got {shapes} -> "
            f"{instruction.writes.shape} with {dict(instruction.settings)}"
        )


# The matrix unit.


def _convolves(i: Instruction) -> None:
    x, w, y, s = i.reads[0].shape, i.reads[1].shape, i.writes.shape, _ints(i)
    axes, groups = len(w) - 2, i.settings["groups"]
    lists = [s[name] for name in ("before", "after", "dilation")]
    _need(i, axes in (1, 2, 3) and len(x) == len(y) == len(w), "a batch of images and a kernel")
    _need(i, all(len(n) == axes for n in lists), "one padding and dilation per axis")
    _need(i, groups > 0 and x[1] == w[1] * groups and w[0] % groups == 0, "channels that fit")  # type: ignore[operator]
    for before, after, step in zip(*lists, strict=True):
        in_range = 0 <= before <= REACH and 0 <= after <= REACH and 0 < step <= REACH
        _need(i, in_range, f"paddings and dilations up to {REACH}")
    sizes = [
        n + before + after - (k - 1) * step for n, k, before, after, step in zip(x[2:], w[2:], *lists, strict=True)
    ]
    _need(i, y == (x[0], w[0], *sizes), f"the result {(x[0], w[0], *sizes)}")


def _convolve(reads: Sequence[Tensor], s: Settings, shape: Shape) -> Tensor:
    """The convolution as one product per tap of the kernel, as a systolic array computes it."""
    (x, w), settings, groups = reads, _tuples(s), s["groups"]
    assert isinstance(groups, int)
    ends = zip(settings["before"], settings["after"], strict=True)
    x = F.pad(x, [n for pair in reversed(list(ends)) for n in pair])
    x = x.unflatten(1, (groups, -1))
    kernel = w.unflatten(0, (groups, -1))
    total = x.new_zeros(shape[0], groups, shape[1] // groups, math.prod(shape[2:]))
    for tap in itertools.product(*map(range, w.shape[2:])):
        part = x
        for axis, k in enumerate(tap):
            part = part.narrow(3 + axis, k * settings["dilation"][axis], shape[2 + axis])
        total += kernel[(..., *tap)] @ part.flatten(3)
    return total.reshape(shape)


def _convolve_work(i: Instruction, machine: Machine) -> InstructionWork:
    x, w, y = (*i.reads, i.writes)
    groups, terms = i.settings["groups"], math.prod(w.shape[1:])
    assert isinstance(groups, int)
    positions, channels = y.shape[0] * math.prod(y.shape[2:]), w.shape[0] // groups
    passes = -(-channels // machine.columns)  # x streams through once per tile of channels
    cycles = machine.matrix(positions, terms, channels, groups)
    macs = groups * positions * terms * channels
    return InstructionWork(cycles, (x.bytes * passes, w.bytes), y.bytes, macs)


def _multiplies(i: Instruction) -> None:
    x, w, y = i.reads[0].shape, i.reads[1].shape, i.writes.shape
    transposed = i.settings["transposed"]
    _need(i, transposed in (0, 1) and len(x) == len(w) == len(y) >= 2, "matrices")
    _need(i, x[:-2] == w[:-2] == y[:-2], "as many matrices on both sides")
    terms, channels = (w[-1], w[-2]) if transposed else (w[-2], w[-1])
    _need(i, x[-1] == terms and y[-2:] == (x[-2], channels), "rows and columns that fit")


def _multiply(reads: Sequence[Tensor], s: Settings, shape: Shape) -> Tensor:
    x, w = reads
    return x @ (w.mT if s["transposed"] else w)


def _multiply_work(i: Instruction, machine: Machine) -> InstructionWork:
    x, w, y = (*i.reads, i.writes)
    groups = math.prod(x.shape[:-2])
    positions, terms, channels = x.shape[-2], x.shape[-1], y.shape[-1]
    passes = -(-channels // machine.columns)  # x streams through once per tile of channels
    cycles = machine.matrix(positions, terms, channels, groups)
    macs = groups * positions * terms * channels
    return InstructionWork(cycles, (x.bytes * passes, w.bytes), y.bytes, macs)


# The vector unit.


def _broadcasts(i: Instruction) -> None:
    """Check operands that are repeated along axes of size 1, as in NumPy."""
    if "immediate" in ABILITIES[i.op].optional:
        numbers = len(i.reads) + ("immediate" in i.settings)
        _need(i, numbers == 2, "a second operand, or an immediate one")
    y = i.writes.shape
    for operand in i.reads:
        x = operand.shape
        fits = len(x) <= len(y) and all(n in (1, m) for n, m in zip(x[::-1], y[::-1], strict=False))
        _need(i, fits, "operands that fit the result")


def _vector_work(i: Instruction, machine: Machine) -> InstructionWork:
    elements = math.prod(i.writes.shape)
    return InstructionWork(-(-elements // machine.lanes), tuple(x.bytes for x in i.reads), i.writes.bytes)


def _unary_unit(function: Callable[..., Tensor], **settings: str) -> Ability:
    """The entry of a function of one operand and of numbers, passed by keyword."""

    def run(reads: Sequence[Tensor], s: Settings, shape: Shape) -> Tensor:
        return function(reads[0], **s).expand(shape)

    return Ability("vector", (1,), _broadcasts, run, _vector_work, settings, inplace=True)


def _binary(function: Callable[..., Tensor]) -> Ability:
    """The entry of a function of two operands; the second one may be a number."""

    def run(reads: Sequence[Tensor], s: Settings, shape: Shape) -> Tensor:
        other = reads[1] if len(reads) == 2 else torch.tensor(s["immediate"], dtype=torch.float32)
        return function(reads[0], other).expand(shape)

    return Ability("vector", (1, 2), _broadcasts, run, _vector_work, optional={"immediate": FLOAT}, inplace=True)


def _clamp(reads: Sequence[Tensor], s: Settings, shape: Shape) -> Tensor:
    low, high = s.get("low", -math.inf), s.get("high", math.inf)
    return reads[0].clamp(low, high).expand(shape)  # type: ignore[arg-type]


def _select(reads: Sequence[Tensor], s: Settings, shape: Shape) -> Tensor:
    return torch.where(reads[0] != 0, reads[1], reads[2]).expand(shape)


def _fill(reads: Sequence[Tensor], s: Settings, shape: Shape) -> Tensor:
    return torch.full(shape, float(s["value"]), dtype=torch.float32)  # type: ignore[arg-type]


# The pooling unit: windows over the last axes. Positions outside of the image are ignored.


def _pools(i: Instruction) -> None:
    x, y, s = i.reads[0].shape, i.writes.shape, _ints(i)
    axes = len(s["window"])
    lists = [s[name] for name in ("window", "step", "before", "dilation")]
    _need(i, 0 < axes <= len(x) == len(y) and all(len(n) == axes for n in lists), "a window")
    _need(i, x[:-axes] == y[:-axes], "the other axes as they are")
    for n, m, k, step, before, dilation in zip(x[-axes:], y[-axes:], *lists, strict=True):
        span = (k - 1) * dilation + 1
        in_range = 0 <= before <= REACH and 0 < dilation <= REACH
        _need(i, in_range, f"paddings and dilations up to {REACH}")
        _need(i, 0 < step <= span and before < span, "windows that cover all positions")
        _need(i, m > 0 and (m - 1) * step - before < n, "windows that begin in the image")


def _taps(shape: Shape, s: Mapping[str, tuple[int, ...]]) -> list[int]:
    """Number of taps of a window that read the image for some output, along each axis."""
    sizes = shape[len(shape) - len(s["window"]) :]
    axes = zip(sizes, s["window"], s["before"], s["dilation"], strict=True)
    return [min(k, -(-(n + before) // dilation)) for n, k, before, dilation in axes]


def _windows(x: Tensor, settings: Settings, shape: Shape, outside: float) -> Tensor:
    """The windows of each output, (*shape, *taps). outside: the value of positions outside of the
    image. Taps that read no position of the image in any window are dropped."""
    s = _tuples(settings)
    lists = [s[name] for name in ("window", "step", "before", "dilation")]
    axes, pads = len(lists[0]), list[int]()
    taps = _taps(x.shape, s)
    spans = [(k - 1) * dilation + 1 for k, dilation in zip(taps, s["dilation"], strict=True)]
    for axis, (step, before, span) in enumerate(zip(lists[1], lists[2], spans, strict=True)):
        needed = (shape[axis - axes] - 1) * step + span
        pads = [before, needed - before - x.shape[axis - axes], *pads]
    x = F.pad(x, pads, value=outside)
    for axis, (step, span, dilation) in enumerate(zip(lists[1], spans, lists[3], strict=True)):
        x = x.unfold(len(shape) - axes + axis, span, step)[..., ::dilation]
    return x


def _tap_axes(windows: Tensor, shape: Shape) -> tuple[int, ...]:
    """The axes of taps."""
    return tuple(range(len(shape), windows.ndim))


def _max_pool(reads: Sequence[Tensor], s: Settings, shape: Shape) -> Tensor:
    windows = _windows(reads[0], s, shape, -math.inf)
    return windows.amax(_tap_axes(windows, shape))


def _sum_pool(reads: Sequence[Tensor], s: Settings, shape: Shape) -> Tensor:
    windows = _windows(reads[0], s, shape, 0.0)
    return windows.sum(_tap_axes(windows, shape))


def _average_pool(reads: Sequence[Tensor], s: Settings, shape: Shape) -> Tensor:
    return _sum_pool(reads, s, shape) / math.prod(_tuples(s)["window"])


def _pool_work(i: Instruction, machine: Machine) -> InstructionWork:
    x, y = i.reads[0], i.writes
    taps = math.prod(_taps(x.shape, _ints(i)))
    cycles = -(-math.prod(y.shape) // machine.pool_lanes) * taps
    return InstructionWork(cycles, (x.bytes,), y.bytes)


_WINDOW: Mapping[str, str] = dict[str, str].fromkeys(("window", "step", "before", "dilation"), INTS)


def _pool(run: Callable[[Sequence[Tensor], Settings, Shape], Tensor]) -> Ability:
    return Ability("pool", (1,), _pools, run, _pool_work, _WINDOW)


# The unit that moves blocks: a block of one value, its axes permuted, into a block of another.


def _moves(i: Instruction) -> None:
    x, y, s = i.reads[0].shape, i.writes.shape, _ints(i)
    axes = range(len(x))
    _need(i, len(x) == len(y) and all(len(s[name]) == len(x) for name in _MOVE), "axes that fit")
    _need(i, sorted(s["order"]) == list(axes), "an order of the axes")
    for n, start, size in zip(x, s["start"], s["size"], strict=True):
        _need(i, 0 <= start < start + size <= n, "a block within the operand")
    for m, at, axis in zip(y, s["at"], s["order"], strict=True):
        _need(i, 0 <= at <= m - s["size"][axis], "a block within the result")


def _permuted_block(reads: Sequence[Tensor], s: Settings, shape: Shape) -> Tensor:
    settings, x = _tuples(s), reads[0]
    for axis, (start, size) in enumerate(zip(settings["start"], settings["size"], strict=True)):
        x = x.narrow(axis, start, size)
    return x.permute(settings["order"])


def _move_work(i: Instruction, machine: Machine) -> InstructionWork:
    amount = math.prod(_ints(i)["size"]) * WORD
    return InstructionWork(-(-amount // machine.move_bytes), (amount,), amount)


_MOVE = ("start", "size", "order", "at")


# Between host and device.


def _loads(i: Instruction) -> None:
    x, y, s = i.reads[0], i.writes, _ints(i)
    _need(i, x.buffer == HOST != y.buffer, "an operand on the host")
    start, size = s.get("start", (0,) * len(x.shape)), s.get("size", x.shape)
    _need(i, len(start) == len(size) == len(x.shape) and size == y.shape, "a block of the result's shape")
    is_inside = all(0 <= low < low + n <= m for low, n, m in zip(start, size, x.shape, strict=True))
    _need(i, is_inside, "a block within the operand")


def _stores(i: Instruction) -> None:
    x, y = i.reads[0], i.writes
    at = _ints(i).get("at", (0,) * len(x.shape))
    _need(i, x.buffer != HOST == y.buffer, "an operand on the device")
    _need(i, len(at) == len(x.shape) == len(y.shape), "axes that fit")
    _need(i, "at" in i.settings or x.shape == y.shape, "one shape, or the position of a block")
    is_inside = all(0 <= low < low + n <= m for low, n, m in zip(at, x.shape, y.shape, strict=True))
    _need(i, is_inside, "a block within the result")


def _load_block(reads: Sequence[Tensor], s: Settings, shape: Shape) -> Tensor:
    block, settings = reads[0], _tuples(s)
    for axis, start in enumerate(settings.get("start", ())):
        block = block.narrow(axis, start, shape[axis])
    return block


def _store_block(reads: Sequence[Tensor], s: Settings, shape: Shape) -> Tensor:
    return reads[0]


def _dma_work(i: Instruction, machine: Machine) -> InstructionWork:
    amount = min(i.writes.bytes, i.reads[0].bytes)  # the block's
    return InstructionWork(-(-amount // machine.host_bytes), (amount,), amount)


def _ints(i: Instruction) -> dict[str, tuple[int, ...]]:
    return _tuples(i.settings)


def _tuples(settings: Settings) -> dict[str, tuple[int, ...]]:
    return {name: value for name, value in settings.items() if isinstance(value, tuple)}


ABILITIES: Mapping[str, Ability] = {
    "load": Ability("dma", (1,), _loads, _load_block, _dma_work, optional={"start": INTS, "size": INTS}),
    "store": Ability("dma", (1,), _stores, _store_block, _dma_work, optional={"at": INTS}),
    "convolve": Ability(
        "matrix",
        (2,),
        _convolves,
        _convolve,
        _convolve_work,
        {"before": INTS, "after": INTS, "dilation": INTS, "groups": INT},
    ),
    "product": Ability("matrix", (2,), _multiplies, _multiply, _multiply_work, {"transposed": INT}),
    "max_pool": _pool(_max_pool),
    "sum_pool": _pool(_sum_pool),
    "average_pool": _pool(_average_pool),
    "move": Ability("move", (1,), _moves, _permuted_block, _move_work, dict.fromkeys(_MOVE, INTS)),
    "fill": Ability("vector", (0,), _broadcasts, _fill, _vector_work, {"value": FLOAT}),
    "repeat": _unary_unit(lambda x: x),
    "select": Ability("vector", (3,), _broadcasts, _select, _vector_work, inplace=True),
    "add": _binary(torch.add),
    "subtract": _binary(torch.sub),
    "multiply": _binary(torch.mul),
    "divide": _binary(torch.div),
    "maximum": _binary(torch.maximum),
    "minimum": _binary(torch.minimum),
    "power": _binary(torch.pow),
    "relu": _unary_unit(torch.relu),
    "clamp": Ability(
        "vector", (1,), _broadcasts, _clamp, _vector_work, optional={"low": FLOAT, "high": FLOAT}, inplace=True
    ),
    "leaky_relu": _unary_unit(lambda x, slope: F.leaky_relu(x, slope), slope=FLOAT),
    "elu": _unary_unit(lambda x, alpha: F.elu(x, alpha), alpha=FLOAT),
    "softplus": _unary_unit(F.softplus),
    "sigmoid": _unary_unit(torch.sigmoid),
    "tanh": _unary_unit(torch.tanh),
    "silu": _unary_unit(F.silu),
    "gelu": _unary_unit(F.gelu),
    "gelu_tanh": _unary_unit(lambda x: F.gelu(x, approximate="tanh")),
    "mish": _unary_unit(F.mish),
    "hard_swish": _unary_unit(F.hardswish),
    "hard_sigmoid": _unary_unit(F.hardsigmoid),
    "erf": _unary_unit(torch.erf),
    "exp": _unary_unit(torch.exp),
    "log": _unary_unit(torch.log),
    "sqrt": _unary_unit(torch.sqrt),
    "rsqrt": _unary_unit(torch.rsqrt),
    "reciprocal": _unary_unit(torch.reciprocal),
    "negate": _unary_unit(torch.neg),
    "abs": _unary_unit(torch.abs),
    "sin": _unary_unit(torch.sin),
    "cos": _unary_unit(torch.cos),
    "floor": _unary_unit(torch.floor),
}


def unit_of(op: str) -> str:
    """The unit that runs an op."""
    return ABILITIES[op].unit


def work_of(instruction: Instruction, machine: Machine) -> InstructionWork:
    """Cost of an instruction on a machine."""
    return ABILITIES[instruction.op].work(instruction, machine)
