"""Calls on parts of their operands, drawn and compared with the full call."""

from __future__ import annotations

import itertools
import random
import zlib
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, Phase, settings
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from demask.exec import axes as parts
from demask.exec.axes import Axes, Window
from demask.exec.local.dispatch import Local, local
from demask.machine.arena import ALIGNMENT
from demask.ops import TABLE, Declined, Relation, bind, regions
from demask.ops.entry import Shape as S
from demask.ops.laws import call_node, draw_tensor, target_of

DRAWS = settings(
    derandomize=True, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
IMAGE: Axes = (2, 3)
GARBAGE = 77


@dataclass
class Scratch:
    """Memory that counts what is asked of it, and is full of garbage."""

    bytes: int = 0
    asked: list[tuple[int, ...]] = field(default_factory=list)

    def __call__(self, shape, axes, dtype):
        made = parts.empty(shape, axes, dtype)
        made.fill_(GARBAGE)
        self.bytes += -(-made.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.asked.append(tuple(shape))
        return made


def related(name: str, args, kwargs, dtype=torch.float64, seed: int = 0) -> Relation | Declined:
    """A case of the table, bound on drawn tensors of a type."""
    generator = torch.Generator().manual_seed(seed)
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    values = [_drawn(leaf, generator, dtype) if isinstance(leaf, S) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(values, spec)
    return bind(call_node(target_of(name), *args, **kwargs), TABLE)


def _drawn(leaf: S, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    value = draw_tensor(leaf, generator)
    if value.dtype != torch.float64:
        return value
    return (3 * value).to(dtype) if not dtype.is_floating_point else value.to(dtype)


def pairs(relation: Relation) -> list[Axes]:
    """Every choice of rows and columns among the output's axes."""
    rank = len(relation.outs[0])
    found: list[Axes] = [(a, None) for a in range(rank)]
    return found + [(a, b) for a, b in itertools.permutations(range(rank), 2)]


def cut_axes(relation: Relation, pair: Axes, constants: set[fx.Node]) -> dict[fx.Node, Axes]:
    """The axes that the operands have when the output's are `pair`."""
    found: dict[fx.Node, Axes] = {}
    for k, operand in enumerate(relation.operands):
        if not isinstance(operand.value, fx.Node) or operand.value in constants:
            continue
        rows, columns = (None if a is None else regions.axis_of(relation, k, a) for a in pair)
        if rows is not None:
            found[operand.value] = (rows, None if columns == rows else columns)
    if pair[1] is not None and all(columns is None for _, columns in found.values()):
        return {}  # No operand's columns run along them.
    return found | {relation.node: pair} if found else {}


def laid_out(value: Tensor, axes: Axes) -> Tensor:
    made = parts.empty(value.shape, axes, value.dtype)
    return made.copy_(value)


def windows(shape, axes: Axes, chance: random.Random) -> list[Window]:
    """All, single rows, both borders, and drawn ones."""

    def intervals(axis):
        if axis is None:
            return [(0, 1)]
        n = shape[axis]
        a, b = sorted(chance.sample(range(n + 1), 2)) if n else (0, 0)
        return [(0, n), (0, 1), (n - 1, n), (0, (n + 1) // 2), (n // 2, n), (a, b)]

    both = list(itertools.product(intervals(axes[0]), intervals(axes[1])))
    chosen = chance.sample(both, min(len(both), 8))
    return [both[0], *(w for w in chosen if all(a < b for a, b in w))]


def run(here: Local, window: Window, values: dict[fx.Node, Tensor], scratch=parts.empty, **more):
    """The part of a window, in the middle of a block of garbage; checks that the block keeps it."""
    operands = [values.get(o.value, o.value) for o in here.relation.operands]
    for k, read in enumerate(here.reads):
        needs = tuple(here.needs(k, dim, *window[dim]) for dim in (0, 1))
        taken = parts.part(operands[read.operand], here.call_axes[read.node], needs)
        operands[read.operand] = taken
    shape = list(parts.cut_shape(here.call.shape, here.axes, window))
    block = list(shape)
    block[here.axes[0]] += 2
    made = parts.empty(block, here.axes, here.call.dtype).fill_(GARBAGE)
    into = made.narrow(here.axes[0], 1, shape[here.axes[0]])
    if "prefill" in more:
        into.copy_(more.pop("prefill"))
    result = here.run(operands, window, into, scratch, **more)
    assert result.shape == into.shape and result.data_ptr() == into.data_ptr()
    for edge in (made.narrow(here.axes[0], 0, 1), made.narrow(here.axes[0], block[here.axes[0]] - 1, 1)):
        assert bool((edge == torch.full((), GARBAGE).to(made.dtype)).all())
    return into


@dataclass
class Checked:
    """What a case was checked on."""

    runs: int = 0
    error: float = 0.0
    declined: set[str] = field(default_factory=set)


def check(relation: Relation, seed: int, exact: bool, only: Axes | None = None) -> Checked:
    chance, found = random.Random(seed), Checked()
    nodes = [o.value for o in relation.operands if isinstance(o.value, fx.Node)]
    for pair in [only] if only else pairs(relation):
        held = {n for n in nodes if chance.random() < 0.2}
        axes = cut_axes(relation, pair, held) or cut_axes(relation, pair, set())
        if not axes:
            continue
        here = local(relation.node, relation, axes)
        if isinstance(here, Declined):
            found.declined.add(here.text)
            continue
        check_windows(here, axes, chance, exact, found)
    return found


class Placed:
    """A Local with the axes of its operands, as the test gave them."""

    def __init__(self, here: Local, axes):
        self._here, self.call_axes = here, axes

    def __getattr__(self, name):
        return getattr(self._here, name)


def check_windows(here: Local, axes, chance: random.Random, exact: bool, found: Checked) -> None:
    whole = here.node.meta["val"]
    values = {}
    for operand in here.relation.operands:
        if isinstance(operand.value, fx.Node):
            value = operand.value.meta["val"]
            cut = axes.get(operand.value)
            values[operand.value] = value if cut is None else laid_out(value, cut)
    for window in windows(whole.shape, here.axes, chance):
        scratch = Scratch()
        made = run(Placed(here, axes), window, values, scratch)
        expected = parts.part(whole, here.axes, window)
        assert made.shape == expected.shape and made.dtype == expected.dtype
        same = (made == expected) | ((made != made) & (expected != expected))
        if exact:
            assert bool(same.all()), (here.node.target, here.axes, window)
        gap = (made.double() - expected.double())[~same].abs()
        top = whole.double().abs()[whole.isfinite()] if whole.is_floating_point() else whole.double().abs()
        error = float(gap.max() / top.max().clamp(min=1e-300)) if gap.numel() else 0.0
        assert error <= 1e-12, (here.node.target, here.axes, window, error)
        assert scratch.bytes <= here.scratch_bytes(window), (here.node.target, here.axes, window)
        found.runs += 1
        found.error = max(found.error, error)


def holds(name: str, *args, dtype=torch.float64, exact=False, axes: Axes = IMAGE, **kwargs) -> None:
    """The run law of a call, along the rows and columns of an image and along its rows alone."""
    relation = related(name, args, kwargs, dtype)
    assert isinstance(relation, Relation)
    seed = zlib.crc32(repr((name, args, kwargs)).encode())
    for pair in (axes, (axes[0], None)):
        found = check(relation, seed, exact, only=pair)
        assert found.runs and not found.declined, (name, args, found.declined)


def image_call(name: str, *args, dtype=torch.float32, pair: Axes = IMAGE, **kwargs) -> Placed:
    relation = related(name, args, kwargs, dtype)
    assert isinstance(relation, Relation)
    axes = cut_axes(relation, pair, set())
    here = local(relation.node, relation, axes)
    assert isinstance(here, Local)
    return Placed(here, axes)


def values_of(here: Placed) -> dict[fx.Node, Tensor]:
    found = {}
    for operand in here.relation.operands:
        if isinstance(operand.value, fx.Node):
            value, cut = operand.value.meta["val"], here.call_axes.get(operand.value)
            found[operand.value] = value if cut is None else laid_out(value, cut)
    return found


def exact_result(here: Placed) -> Tensor:
    """The full call in float64."""
    args, kwargs = fx.node.map_arg((here.node.args, here.node.kwargs), lambda node: node.meta["val"].double())
    return here.node.target(*args, **kwargs)


def assert_close(result: Tensor, expected: Tensor) -> None:
    """Within 64 units in the last place of the largest: sums of up to 576 terms in another order."""
    top = expected.abs().max().clamp(min=1e-6)
    assert (result.double() - expected).abs().max() <= 64 * torch.finfo(torch.float32).eps * top


CONV = ("aten.conv2d.default", S((1, 8, 12, 10)), S((16, 8, 3, 3), True), S((16,), True), [1, 1], [1, 1])
