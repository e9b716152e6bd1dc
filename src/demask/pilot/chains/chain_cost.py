"""Predicted seconds of a chain on this machine, from the bytes that it reads.

A chain of one vector reads each weight once, so its seconds are bytes over bandwidth, plus a
constant per call and per layer. Bandwidth depends on whether the bytes come from the last-level
cache or from memory (`cached_shares`), and on the access pattern: all columns in order, some
columns of each tile (pieces of 1 KB), weights of few bits as integers, single rows. Each is
measured with the kernels themselves, once per machine and number of threads, and stored with the
other measurements of `machine.cost`.
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
#: bytes of weights read in turn: to time the last-level cache, to see how much of it this process
#: has, and to time memory
NEAR, MIDDLE, FAR = 12 * 2**20, 24 * 2**20, 128 * 2**20
WITHIN = 30.0  # times that a machine may be slower or faster than `NOMINAL`
CACHE = 16 * 2**20  # bytes of the last-level cache, where the system does not say


@dataclass(frozen=True, slots=True)
class Reads:
    """Bytes that a layer reads in one call, by kind (`KINDS`)."""

    dense: float = 0.0
    columns: float = 0.0
    whole: float = 0.0
    rows: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return self.dense + self.columns + self.whole + self.rows

    def __add__(self, other: Reads) -> Reads:
        return Reads(*(getattr(self, k) + getattr(other, k) for k in KINDS))


def reads(rows: int, columns: int, mode: str, seen: LayerCounts) -> Reads:
    """What a layer reads in one call, from the counts of an earlier one.

    Rows that are not proved zero are read over live columns, in lines of 64 bytes: all lines with a
    live column.

    >>> half, all_ = LayerCounts(392, 4096, 4096), LayerCounts(784, 4096, 4096)
    >>> reads(4096, 784, "columns", half).total / reads(4096, 784, "dense", all_).total
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
    """What a machine takes to run chains.

    near, far: seconds per byte by kind, from the last-level cache and from memory. call, layer:
    seconds per call and per layer. cache: bytes that the last-level cache can keep of the weights.
    """

    near: dict[str, float]
    far: dict[str, float]
    call: float
    layer: float
    cache: float
    threads: int

    def seconds(self, layers: Sequence[Reads], cached: Sequence[float]) -> float:
        """Predicted seconds of a call. cached: for each layer the share of its bytes that is in the
        last-level cache (0 for all: other work has evicted the weights)."""
        seconds = 0.0
        for reads_, share in zip(layers, cached, strict=True):
            for k in KINDS:
                per = share * self.near[k] + (1 - share) * self.far[k]
                seconds += getattr(reads_, k) * per
        return self.call + self.layer * len(layers) + seconds


@dataclass(frozen=True, slots=True)
class Uses:
    """Parts of weights that calls read: bytes of each, and the share of calls that read it."""

    bytes: Tensor
    share: Tensor


def cached_shares(layers: Sequence[Sequence[Uses]], cache: float) -> list[float]:
    """For each layer the share of the bytes it reads that is in a cache of `cache` bytes, over
    calls on different inputs.

    A part that a share f of the calls reads is cached if one of the last T calls read it, with
    probability 1 - (1 - f)^T; T is such that the cached parts fill the cache (Che, Tung and Wang,
    "Hierarchical Web Caching Systems", 2002). Of what every call reads, a share T is cached where T
    < 1: caches do not evict the oldest line exactly.

    >>> half = [Uses(torch.tensor([100.0]), torch.tensor([1.0]))]
    >>> cached_shares([half], 200.0), round(cached_shares([half, half], 100.0)[0], 2)
    ([1.0], 0.5)
    """
    parts = [use for layer in layers for use in layer]
    if sum(float(use.bytes[use.share > 0].sum()) for use in parts) <= cache:
        return [1.0] * len(layers)

    def cached(use: Uses, calls: float) -> Tensor:
        every = torch.full_like(use.share, min(calls, 1.0))
        return torch.where(use.share >= 1, every, 1 - (1 - use.share) ** calls)

    least, most = 0.0, 1e6
    for _ in range(60):
        calls = (least + most) / 2
        full = sum(float((use.bytes * cached(use, calls)).sum()) for use in parts) > cache
        least, most = (least, calls) if full else (calls, most)
    shares = []
    for layer in layers:
        bytes_read = sum(float((use.bytes * use.share).sum()) for use in layer)
        bytes_cached = sum(float((use.bytes * use.share * cached(use, least)).sum()) for use in layer)
        shares.append(bytes_cached / bytes_read if bytes_read else 1.0)
    return shares


def last_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> float:
    """Bytes of the largest cache, as Linux reports it."""
    sizes = [CACHE]
    for path in folder.glob("index*/size"):
        word = path.read_text().strip()
        unit = {"K": 2**10, "M": 2**20}.get(word[-1:], 1)
        sizes.append(int(word.rstrip("KM")) * unit)
    return float(max(sizes[1:], default=sizes[0]))


def here(threads: int | None = None) -> ChainRates:
    """The rates that decide conditions: this machine's, where they were measured and stored (as
    `explain` does), else `NOMINAL`. threads: None for as many as torch has now."""
    costs = Costs.open(threads=threads, measure=False)
    rates = _measured_rates(costs) if all(map(costs.measured, _measurement_names(costs))) else NOMINAL
    return rates if plausible(rates) else NOMINAL


def measured(costs: Costs) -> ChainRates:
    """This machine's rates from `costs`: measured now or earlier, or estimated from its bandwidth.

    Rates that no machine has (`plausible`) come from a busy machine: they are measured once more,
    and replaced by `NOMINAL` where that does not help. From memory, integers and rows take as
    long as from the cache, or as long as all or some columns from memory, whichever is longer.
    """
    for _ in range(2):
        if plausible(rates := _measured_rates(costs)):
            return rates
        costs.forget(_measurement_names(costs))
    return NOMINAL


def plausible(machine: ChainRates) -> bool:
    """Whether the rates are within a factor `WITHIN` of `NOMINAL`; calls may be faster.

    Two threads that wait for each other on one core take a thousand times as long.
    """
    pairs = [
        (getattr(machine, level)[kind], getattr(NOMINAL, level)[kind]) for level in ("near", "far") for kind in KINDS
    ]
    calls = machine.call <= WITHIN * NOMINAL.call and machine.layer <= WITHIN * NOMINAL.layer
    return calls and all(usual / WITHIN <= mine <= WITHIN * usual for mine, usual in pairs)


def _measurement_names(costs: Costs) -> list[str]:
    large = [_large_layer(costs, kind, NEAR) for kind in KINDS]
    large += [_large_layer(costs, kind, FAR) for kind in ("dense", "columns")]
    large.append(_large_layer(costs, "dense", MIDDLE))
    return [q.name for q in (_small_call(costs, 1), _small_call(costs, 8), *large)]


def _measured_rates(costs: Costs) -> ChainRates:
    one, eight = (costs.seconds(_small_call(costs, layers)) for layers in (1, 8))
    layer = max((eight - one) / 7, 0.0)
    call = max(one - layer, 0.0)

    def speed(kind: str, nbytes: int) -> float:
        question = _large_layer(costs, kind, nbytes)
        taken = costs.seconds(question) - call - layer
        return max(taken, 1e-9) / question.bytes

    near = {kind: speed(kind, NEAR) for kind in ("dense", "columns", "whole")}
    rows_question = _large_layer(costs, "rows", NEAR)
    rest = costs.seconds(rows_question) - call - layer - rows_question.bytes / 3 * near["whole"]
    near["rows"] = max(rest, 1e-9) / (rows_question.bytes * 2 / 3)
    far = {kind: max(speed(kind, FAR), near[kind]) for kind in ("dense", "columns")}
    far |= {"whole": max(near["whole"], far["dense"]), "rows": max(near["rows"], far["columns"])}
    # other processes use the cache, too: less is available than the system says
    span, middle = far["dense"] - near["dense"], speed("dense", MIDDLE)
    available = max(NEAR, min(1.0, (far["dense"] - middle) / span) * MIDDLE) if span > 0 else MIDDLE
    whole = 0.8 * last_cache()
    cache = min(whole, available) if available < 0.95 * MIDDLE else whole
    return ChainRates(near, far, call, layer, cache, costs.threads)


def _small_call(costs: Costs, layers: int) -> Question:
    """A measurement of a call that reads next to nothing."""

    def make() -> Callable[[], object]:
        one = ChainLayer(torch.zeros(16, 16), None, True)
        plan = ChainPlan([one] * layers, ["columns"] * layers, torch.get_num_threads())
        x = torch.zeros(1, 16)
        return lambda: plan(x)

    return Question(f"chain of {layers}, {costs.threads} threads", 0, 64, make)


def _large_layer(costs: Costs, kind: str, room: int) -> Question:
    """A measurement of a layer that reads `room` bytes of weights in turn: all columns ("dense"),
    one of SHARE, scattered, others in each call ("columns"), integers ("whole"), or
    integers and then half of the rows ("rows": 1 to 2 of the bytes)."""
    rows = 4096
    columns = room // rows if kind == "whole" else room // (4 * rows)
    columns = columns // 3 * 4 if kind == "rows" else columns
    bytes_read = {"dense": 4.0, "columns": 4.0 / SHARE, "whole": 1.0, "rows": 3.0}[kind] * rows * columns

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
        input_cycle = cycle(inputs)
        return lambda: plan(next(input_cycle))

    what = "scattered columns" if kind == "columns" else kind
    name = f"chain reading {what}, {room / 2**20:.0f} MiB in turns, {costs.threads} threads"
    return Question(name, bytes_read / 2, bytes_read, make)


#: rates where nothing was measured: a server with two threads, in round numbers
NOMINAL = ChainRates(
    near={"dense": 1.2e-11, "columns": 1.4e-11, "whole": 1.6e-11, "rows": 2.2e-11},
    far={"dense": 2.0e-11, "columns": 2.6e-11, "whole": 2.2e-11, "rows": 2.8e-11},
    call=1.2e-5,
    layer=2e-6,
    cache=0.8 * 32 * 2**20,
    threads=2,
)
