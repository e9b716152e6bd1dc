"""What a chain costs on this machine, before it runs: bytes by the way they are read.

A chain of one vector reads each weight once, so its seconds are bytes over bandwidth, and something
per call and per layer. Bandwidth depends on where the bytes come from and how they lie: all columns
one after the other, some columns of each tile (pieces of 1 KB), whole numbers of few bits, single
rows. Each is measured with the kernels themselves, once per machine and number of threads, and kept
with the other answers of `machine.cost`. What many inputs read comes from the last cache, the rest
from memory (`held`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from demask.kernels.cpu.zero_proof import CONSTANTS
from demask.machine.cost import Costs, Question
from demask.pilot.chains.chain_plan import ChainLayer, ChainPlan, LayerCounts

KINDS = ("dense", "columns", "whole", "rows")
SHARE = 16  # one of so many columns is read, where some are
#: bytes of what is read in turns: to time the last cache, to see how much of it is ours, memory
NEAR, MIDDLE, FAR = 12 * 2**20, 24 * 2**20, 128 * 2**20
WITHIN = 30.0  # times that a machine may be slower or faster than `NOMINAL`
CACHE = 16 * 2**20  # of the last cache, where the system does not say


@dataclass(frozen=True, slots=True)
class Reads:
    """Bytes that a layer reads in one call, by kind (`KINDS`)."""

    dense: float = 0.0
    columns: float = 0.0
    whole: float = 0.0
    rows: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.dense + self.columns + self.whole + self.rows

    def __add__(self, other: Reads) -> Reads:
        return Reads(*(getattr(self, k) + getattr(other, k) for k in KINDS))


def reads(rows: int, columns: int, mode: str, seen: LayerCounts) -> Reads:
    """What a layer reads, from what was seen of it: live columns, rows that were not proved zero.

    Listed rows are read over live columns, in lines of 64 bytes: all lines with a live column.

    >>> reads(4096, 784, "columns", Seen(392, 4096, 4096)).total / reads(
    ...     4096, 784, "dense", Seen(784, 4096, 4096)).total
    0.5
    """
    if mode == "dense":
        return Reads(dense=4.0 * rows * columns)
    live = seen.columns / max(columns, 1)
    if mode == "columns":
        return Reads(columns=4.0 * rows * seen.columns)
    touched = 1 - (1 - live) ** 16
    exact = 4.0 * columns * touched * seen.rows
    constants = 4.0 * len(CONSTANTS) * rows
    if mode == "certified":
        groups = 1 - (1 - live) ** 4
        return Reads(whole=rows * columns * groups + constants, rows=exact)
    groups = 1 - (1 - live) ** 8
    second = seen.first * (columns / 2 + 4 * len(CONSTANTS))
    return Reads(whole=rows * columns * groups / 2 + constants, rows=exact + second)


@dataclass(frozen=True, slots=True)
class ChainRates:
    """Seconds per byte by kind, from the last cache and from memory; seconds of a call and of a
    layer; bytes that the last cache holds."""

    near: dict[str, float]
    far: dict[str, float]
    call: float
    layer: float
    cache: float
    threads: int

    def seconds(self, layers: Sequence[Reads], held: Sequence[float]) -> float:
        """Predicted seconds of a call. held: of each layer's bytes, the share that the last cache
        has (0 for all: a call after something else took the cache)."""
        moved = 0.0
        for reads_, share in zip(layers, held, strict=True):
            for k in KINDS:
                per = share * self.near[k] + (1 - share) * self.far[k]
                moved += getattr(reads_, k) * per
        return self.call + self.layer * len(layers) + moved


@dataclass(frozen=True, slots=True)
class Uses:
    """Parts of weights that calls read: bytes of each, and the share of calls that read it."""

    bytes: Tensor
    share: Tensor


def held(layers: Sequence[Sequence[Uses]], cache: float) -> list[float]:
    """Of what calls on different inputs read, layer by layer, the share that a cache of so many
    bytes has.

    A part that a share f of the calls reads is there if one of the last T calls read it,
    1 - (1 - f)^T; T is such that what is there fills the cache (Che, Tung and Wang, "Hierarchical
    Web Caching Systems", 2002). Of what every call reads, a share T is there where T < 1: caches do
    not throw out the oldest line exactly.

    >>> half = [Uses(torch.tensor([100.0]), torch.tensor([1.0]))]
    >>> held([half], 200.0), round(held([half, half], 100.0)[0], 2)
    ([1.0], 0.5)
    """
    parts = [use for layer in layers for use in layer]
    if sum(float(use.bytes[use.share > 0].sum()) for use in parts) <= cache:
        return [1.0] * len(layers)

    def there(use: Uses, calls: float) -> Tensor:
        every = torch.full_like(use.share, min(calls, 1.0))
        return torch.where(use.share >= 1, every, 1 - (1 - use.share) ** calls)

    least, most = 0.0, 1e6
    for _ in range(60):
        calls = (least + most) / 2
        full = sum(float((use.bytes * there(use, calls)).sum()) for use in parts) > cache
        least, most = (least, calls) if full else (calls, most)
    shares = []
    for layer in layers:
        moved = sum(float((use.bytes * use.share).sum()) for use in layer)
        found = sum(float((use.bytes * use.share * there(use, least)).sum()) for use in layer)
        shares.append(found / moved if moved else 1.0)
    return shares


def last_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> float:
    """Bytes of the largest cache, as Linux says."""
    found = [CACHE]
    for path in folder.glob("index*/size"):
        word = path.read_text().strip()
        unit = {"K": 2**10, "M": 2**20}.get(word[-1:], 1)
        found.append(int(word.rstrip("KM")) * unit)
    return float(max(found[1:], default=found[0]))


def here(threads: int | None = None) -> ChainRates:
    """What conditions are decided by: this machine's numbers where they were measured and kept (as
    `explain` does), else `NOMINAL`; for so many threads (None: as many as torch has now)."""
    costs = Costs.open(threads=threads, measure=False)
    found = _asked(costs) if all(map(costs.measured, _names(costs))) else NOMINAL
    return found if plausible(found) else NOMINAL


def measured(costs: Costs) -> ChainRates:
    """This machine's numbers, asked of `costs`: measured, kept, or estimated from its bandwidth.

    Numbers that no machine has (`plausible`) come of a busy one: they are measured once more, and
    forgotten for `NOMINAL` where that does not help. From memory, whole numbers and rows take what
    they take from the cache, or what all or some columns take from memory, whichever is longer.
    """
    for _ in range(2):
        if plausible(found := _asked(costs)):
            return found
        costs.forget(_names(costs))
    return NOMINAL


def plausible(machine: ChainRates) -> bool:
    """Whether its numbers are within `WITHIN` times of `NOMINAL`, either way; calls may be faster.

    Two threads that wait for each other on one core take a thousand times as long.
    """
    pairs = [(getattr(machine, at)[kind], getattr(NOMINAL, at)[kind])
             for at in ("near", "far") for kind in KINDS]  # fmt: skip
    calls = machine.call <= WITHIN * NOMINAL.call and machine.layer <= WITHIN * NOMINAL.layer
    return calls and all(usual / WITHIN <= mine <= WITHIN * usual for mine, usual in pairs)


def _names(costs: Costs) -> list[str]:
    """The questions that a machine's numbers come of."""
    large = [_large(costs, kind, NEAR) for kind in KINDS]
    large += [_large(costs, kind, FAR) for kind in ("dense", "columns")]
    large.append(_large(costs, "dense", MIDDLE))
    return [q.name for q in (_small(costs, 1), _small(costs, 8), *large)]


def _asked(costs: Costs) -> ChainRates:
    one, eight = (costs.seconds(_small(costs, layers)) for layers in (1, 8))
    layer = max((eight - one) / 7, 0.0)
    call = max(one - layer, 0.0)

    def speed(kind: str, room: int) -> float:
        question = _large(costs, kind, room)
        taken = costs.seconds(question) - call - layer
        return max(taken, 1e-9) / question.bytes

    near = {kind: speed(kind, NEAR) for kind in ("dense", "columns", "whole")}
    both = _large(costs, "rows", NEAR)
    rest = costs.seconds(both) - call - layer - both.bytes / 3 * near["whole"]
    near["rows"] = max(rest, 1e-9) / (both.bytes * 2 / 3)
    far = {kind: max(speed(kind, FAR), near[kind]) for kind in ("dense", "columns")}
    far |= {"whole": max(near["whole"], far["dense"]), "rows": max(near["rows"], far["columns"])}
    # of a cache that others use, too, less is ours than the system says
    span, middle = far["dense"] - near["dense"], speed("dense", MIDDLE)
    ours = max(NEAR, min(1.0, (far["dense"] - middle) / span) * MIDDLE) if span > 0 else MIDDLE
    whole = 0.8 * last_cache()
    cache = min(whole, ours) if ours < 0.95 * MIDDLE else whole
    return ChainRates(near, far, call, layer, cache, costs.threads)


def _small(costs: Costs, layers: int) -> Question:
    """A call with next to nothing to read."""

    def make() -> Callable[[], object]:
        one = ChainLayer(torch.zeros(16, 16), None, True)
        plan = ChainPlan([one] * layers, ["columns"] * layers, torch.get_num_threads())
        x = torch.zeros(1, 16)
        return lambda: plan(x)

    return Question(f"chain of {layers}, {costs.threads} threads", 0, 64, make)


def _large(costs: Costs, kind: str, room: int) -> Question:
    """A layer that reads so many bytes in turns: all columns, one of SHARE, scattered (others in
    the next call), whole numbers, or those and then half of the rows (1 to 2 of the bytes)."""
    rows = 4096
    columns = room // rows if kind == "whole" else room // (4 * rows)
    columns = columns // 3 * 4 if kind == "rows" else columns
    moved = {"dense": 4.0, "columns": 4.0 / SHARE, "whole": 1.0, "rows": 3.0}[kind] * rows * columns

    def make() -> Callable[[], object]:
        draw = torch.Generator().manual_seed(0)
        weight, bias = torch.rand((rows, columns), generator=draw) * 1e-3, torch.zeros(rows) - 1e3
        inputs = [torch.rand((1, columns), generator=draw) + 0.5 for _ in range(SHARE)]
        if kind == "columns":
            order = torch.randperm(columns, generator=draw) % SHARE
            inputs = [x * (order == k) for k, x in enumerate(inputs)]
        if kind == "rows":
            bias[::2] = 1e3
        mode = kind if kind in ("dense", "columns") else "certified"
        plan = ChainPlan([ChainLayer(weight, bias, True)], [mode], torch.get_num_threads())
        turns = cycle(inputs)
        return lambda: plan(next(turns))

    what = "scattered columns" if kind == "columns" else kind
    name = f"chain reading {what}, {room / 2**20:.0f} MiB in turns, {costs.threads} threads"
    return Question(name, moved / 2, moved, make)


#: what choices are made by where nothing was measured: a server's two threads, in round numbers
NOMINAL = ChainRates(
    near={"dense": 1.2e-11, "columns": 1.4e-11, "whole": 1.6e-11, "rows": 2.2e-11},
    far={"dense": 2.0e-11, "columns": 2.6e-11, "whole": 2.2e-11, "rows": 2.8e-11},
    call=1.2e-5, layer=2e-6, cache=0.8 * 32 * 2**20, threads=2,
)  # fmt: skip
