"""The best answer for so many bytes: `python -m benchmarks run pilot_deadline --cache FOLDER`.

A perceptron 784-4096-4096-10 on Fashion-MNIST, trained without a penalty on its hidden values. A
share of the bytes of its weights may be read per image, one image at a time; the pilot's bytes
count. Which hidden units are computed in full is decided by a pilot of 3, 4 or 8 bits, by chance,
by the weights, by a calibration set, or by an oracle. Counts and accuracies do not depend on the
machine; a last table, of deadlines in seconds, does.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn

from benchmarks.common.catalog import DEV, Benchmark
from benchmarks.common.ledger import RESULTS, Cell, Page, Run, Table, save
from benchmarks.pilot.trained_networks import images, network
from demask.machine.clock import Timing
from demask.machine.describe import format_threads, load_average
from demask.machine.threads import set_threads
from demask.ops import TABLE
from demask.pilot.chains.ordered_chain import OrderedChain, OrderedLayer
from demask.pilot.chains.ordered_graph import Order
from demask.pilot.simplifiers.rounding import Bits

BENCHMARK = Benchmark(
    "the best answer for so many bytes of weights",
    "not timed",
    needs=(DEV, "a folder of trained networks (`--cache`)", "Fashion-MNIST"),
    quick="--images 200 --threads 1",
    writes=("pilot_deadline.svg",),
)

SHARES = (0.05, 0.1, 0.12, 0.15, 0.25, 0.5)
PILOTS = (Bits(3, 64), Bits(4, 64), Bits(8))
SEEDS = 5
PART = 1000  # images at a time
CALIBRATION = 2000  # training images
CHECKED = 40  # images whose answers are compared with the module's
CLOCKED = (Bits(4, 64), Bits(8))  # pilots of the deadlines
PARTS = (0.0, 0.1, 0.2, 0.3, 0.5)  # of the seconds that torch takes
TIMED, TURN = 400, 20  # images: all, and in turn
HALF = 1.96  # standard errors of half an interval of 95 %


@dataclass(frozen=True, slots=True)
class Row:
    """A contender at a share of the bytes: per image, whether it was right, and whether it says
    what the whole network says. units: computed per hidden layer, of all. deviation: of the
    accuracy, over several orders, which are taken together."""

    who: str
    share: float
    units: float
    right: Tensor
    same: Tensor
    deviation: float | None = None

    @property
    def accuracy(self) -> float:
        return 100 * float(self.right.mean())

    def over(self, other: Row) -> tuple[float, float]:
        """Points of accuracy over another, paired, and half of an interval of 95 %."""
        gap = 100 * (self.right - other.right)
        return float(gap.mean()), HALF * float(gap.std()) / len(gap) ** 0.5


def rows_of(answers: Mapping[tuple[str, float, float], Tensor], classes: Tensor, whole: Tensor) -> Iterator[Row]:
    """A row each; orders by chance are one."""
    together: dict[tuple[str, float, float], list[Tensor]] = {}
    for (who, share, units), answer in answers.items():
        name = "random" if who.startswith("random") else who
        together.setdefault((name, share, units), []).append(answer)
    for key, several in together.items():
        right, same = ((torch.stack(several) == wanted).float() for wanted in (classes, whole))
        spread = 100 * float(right.mean(1).std()) if len(several) > 1 else None
        yield Row(*key, right.mean(0), same.mean(0), spread)


def layers_of(model: nn.Sequential, bits: Bits) -> list[OrderedLayer]:
    """The linear layers with pilots of so many bits."""
    return [OrderedLayer(m.weight, m.bias, bits) for m in model if isinstance(m, nn.Linear)]


@dataclass(frozen=True, slots=True)
class Static:
    """Orders that are the same for every image, best first, one per hidden layer, and the values
    of units that are not computed (0 where there are none)."""

    name: str
    orders: Sequence[Tensor]
    fills: Sequence[Tensor] | None = None


def statics(layers: Sequence[OrderedLayer], seen: Tensor) -> Iterator[Static]:
    """Orders that need no pilot; `seen`: inputs to calibrate with."""
    hidden, widths = layers[:-1], [len(layer.weight) for layer in layers[:-1]]
    for seed in range(SEEDS):
        draw = torch.Generator().manual_seed(seed)
        yield Static(f"random, seed {seed}", [torch.randperm(n, generator=draw) for n in widths])
    norms = [layer.weight.norm(dim=1) for layer in hidden]
    outs = [layer.columns_norm for layer in layers[1:]]
    yield Static("weights: row norm", [_falling(n) for n in norms])
    yield Static("weights: row norm × out norm", [_falling(n * o) for n, o in zip(norms, outs, strict=True)])
    means, h = [], seen
    for layer in hidden:
        h = layer.full(h).relu()
        means.append(h.mean(0))
    orders = [_falling(m * o) for m, o in zip(means, outs, strict=True)]
    yield Static("calibration: mean × out norm", orders)
    yield Static("calibration, mean elsewhere", orders, means)


def _falling(values: Tensor) -> Tensor:
    return values.argsort(descending=True, stable=True)


def room(chain: OrderedChain, share: float, pilot: bool) -> float | None:
    """The share of each hidden layer that a share of all bytes pays for; None for less than the
    pilot alone."""
    whole = sum(layer.nbytes for layer in chain.layers)
    first = chain.pilot_bytes if pilot else chain.layers[-1].nbytes
    ordered = sum(layer.nbytes for layer in chain.ordered)
    left = (share * whole - first) / ordered
    return None if left < 0 else min(left, 1.0)


def with_static(layers: Sequence[OrderedLayer], x: Tensor, order: Static, part: float) -> Tensor:
    """Answers with the first units of each layer computed."""
    for k, layer in enumerate(layers[:-1]):
        units = order.orders[k][: int(part * len(layer.weight) + 1e-6)]
        fill = torch.zeros(len(layer.weight)) if order.fills is None else order.fills[k]
        values = fill.expand(len(x), -1).clone()
        values[:, units] = layer.rows(x, units).relu()
        x = values
    return layers[-1].full(x)


def with_scores(
    layers: Sequence[OrderedLayer], x: Tensor, scores: Sequence[Tensor], fills: Sequence[Tensor] | None, part: float
) -> Tensor:
    """Answers with, image by image, the units of the highest scores (images, units) computed."""
    for k, layer in enumerate(layers[:-1]):
        count = int(part * len(layer.weight) + 1e-6)
        units = scores[k].topk(count, dim=1, sorted=False).indices
        values = torch.zeros(len(x), len(layer.weight)) if fills is None else fills[k].clone()
        values.scatter_(1, units, layer.full(x).relu().gather(1, units))
        x = values
    return layers[-1].full(x)


def answers(
    model: nn.Sequential, x: Tensor, seen: Tensor, bar: Progress
) -> tuple[dict[tuple[str, float, float], Tensor], Tensor]:
    """Answers (images,) by contender, share of bytes and share of units; and the network's."""
    chains = {bits: OrderedChain(layers_of(model, bits)) for bits in PILOTS}
    layers = chains[PILOTS[0]].layers
    orders = list(statics(layers, seen))
    parts: dict[tuple[str, float, float], list[Tensor]] = {}
    whole = []
    for batch in bar.track(x.split(PART), description="images"):
        whole.append(model(batch).argmax(1))
        for key, logits in _of_batch(chains, orders, batch):
            parts.setdefault(key, []).append(logits.argmax(1))
    return {key: torch.cat(part) for key, part in parts.items()}, torch.cat(whole)


def _of_batch(
    chains: Mapping[Bits, OrderedChain], orders: Sequence[Static], x: Tensor
) -> Iterator[tuple[tuple[str, float, float], Tensor]]:
    layers = next(iter(chains.values())).layers
    truth, h = [], x
    for k, layer in enumerate(layers[:-1]):
        h = layer.full(h).relu()
        truth.append(h * layers[k + 1].columns_norm)
    for share in SHARES:
        part = room(next(iter(chains.values())), share, pilot=False)
        if part is not None:
            for order in orders:
                yield (order.name, share, part), with_static(layers, x, order, part)
            yield ("oracle", share, part), with_scores(layers, x, truth, None, part)
    for bits, chain in chains.items():
        values = chain.piloted(x)
        scores = [v * layers[k + 1].columns_norm for k, v in enumerate(values)]
        fills = [v.relu() for v in values]
        alone = chain.pilot_bytes / sum(layer.nbytes for layer in layers)
        yield (f"pilot {bits.text()}, alone", alone, 0.0), layers[-1].full(fills[-1])
        for share in SHARES:
            part = room(chain, share, pilot=True)
            if part is None:
                continue
            name = f"pilot {bits.text()}"
            yield (f"{name}, filled", share, part), with_scores(layers, x, scores, fills, part)
            yield (f"{name}, zeros", share, part), with_scores(layers, x, scores, None, part)


def check(model: nn.Sequential, x: Tensor, contender_answers: Mapping[Any, Tensor]) -> tuple[int, int]:
    """How many answers of the module, image by image, were compared with those counted above, and
    how many differ: its kernels round inputs to 16 bits. Raises where more do than one of 100."""
    compared = differ = 0
    whole = sum(layer.nbytes for layer in layers_of(model, PILOTS[0]))
    for (who, share, _), answer in contender_answers.items():
        name, _, kind = who.partition(", ")
        if kind != "filled":
            continue
        order = Order(bytes=int(share * whole))
        conditioned = order.applied(model, (x[:2],), None, name.removeprefix("pilot "), TABLE)
        count = min(CHECKED, len(x))
        got = torch.cat([conditioned(x[k : k + 1]).argmax(1) for k in range(count)])
        compared, differ = compared + count, differ + int((got != answer[:count]).sum())
    if differ > compared / 100:
        raise AssertionError(f"{differ} of {compared} answers of the module are others than counted")
    return compared, differ


def columns(model: nn.Sequential, x: Tensor) -> float:
    """The share of bytes that skipping the columns of zero inputs reads, the mean over images."""
    layers, total = layers_of(model, PILOTS[0]), 0.0
    for layer in layers:
        live = (x != 0).sum(1).double().mean()
        total += float(live) * 4 * len(layer.weight)
        x = layer.full(x).relu()
    return total / sum(layer.nbytes for layer in layers)


# ------------------------------------------------------------------------------------- the deadline


@dataclass(slots=True)
class Timed:
    """Calls with one deadline: seconds of each, units computed in full, the answers."""

    bits: Bits
    part: float
    deadline: float
    seconds: list[float] = field(default_factory=list)
    units: list[float] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)

    def cells(self, whole: Sequence[int], dense: float) -> list[Cell]:
        """whole: the network's answers; dense: its median seconds."""
        same = sum(a == b for a, b in zip(self.answers, whole, strict=True))
        late = [1e3 * (taken - self.deadline) for taken in self.seconds]
        timing = Timing.of(self.seconds)
        return [
            self.bits.text(),
            self.part,
            1e3 * self.deadline,
            timing,
            timing.median / dense,
            100 * statistics.mean(self.units),
            100 * same / len(whole),
            statistics.median(late),
            statistics.quantiles(late, n=20)[-1],
        ]


def deadlines(model: nn.Sequential, x: Tensor) -> list[list[Cell]]:
    """Answers at parts of the network's own time, which comes first.

    One image at a time; TURN images by the network, then by each contender, and so on.
    """
    modules, x = {}, x[:TIMED]
    for image in x[:TURN]:
        model(image[None])
    guess = statistics.median(_seconds(model, image)[0] for image in x[:TURN])
    contenders = [Timed(bits, part, part * guess) for bits in CLOCKED for part in PARTS]
    for k, one in enumerate(contenders):
        order = Order(deadline=one.deadline)
        modules[k] = order.applied(model, (x[:1],), None, one.bits.text(), TABLE)
        for image in x[:5]:
            modules[k](image[None])
    dense, whole = [], []
    for batch in x.split(TURN):
        for image in batch:
            taken, answer = _seconds(model, image)
            dense.append(taken)
            whole.append(answer)
        for k, one in enumerate(contenders):
            for image in batch:
                taken, answer = _seconds(modules[k], image)
                one.seconds.append(taken)
                one.answers.append(answer)
                (done,) = modules[k].last.values()
                one.units.append(sum(done.units) / sum(done.of))
    timing = Timing.of(dense)
    first: list[Cell] = ["torch, whole", None, None, timing, 1.0, 100.0, 100.0, None, None]
    return [first, *(one.cells(whole, timing.median) for one in contenders)]


def _seconds(module: nn.Module, image: Tensor) -> tuple[float, int]:
    """Seconds of a call, and the class it answers."""
    start = perf_counter()
    y = module(image[None])
    return perf_counter() - start, int(y.argmax())


# ---------------------------------------------------------------------------------------- the page


ORDERS = ["order", "bytes, %", "units in full, %", "right, %", "deviation", "as the whole network, %"]
PAIRED = [
    "order",
    "bytes, %",
    "over the best without a pilot, points",
    "± 95 %",
    "which it is",
    "over the pilot alone, points",
    "± 95 % of that",
]
CLOCK = [
    "pilot",
    "part of torch's time",
    "deadline, ms",
    "a call, ms",
    "of torch's time",
    "units in full, %",
    "as the whole network, %",
    "late, ms",
    "late, 95 %, ms",
]


def differences(rows: Sequence[Row]) -> Iterator[list[Cell]]:
    """Pilots of each share against the best order without one, and against their own answers."""
    for mine in rows:
        if mine.who.endswith("filled"):
            best = max(
                (
                    row
                    for row in rows
                    if row.share == mine.share and row.who.startswith(("random", "weights", "calibration"))
                ),
                key=lambda row: row.accuracy,
            )
            alone = next(r for r in rows if r.who == mine.who.replace("filled", "alone"))
            yield [mine.who, 100 * mine.share, *mine.over(best), best.who, *mine.over(alone)]


def page(
    rows: Sequence[Row], whole: float, exact: float, timed: Sequence[Sequence[Cell]], checked: tuple[int, int]
) -> Page:
    paired = list(differences(rows))
    orders = [
        [row.who, 100 * row.share, 100 * row.units, row.accuracy, row.deviation, 100 * float(row.same.mean())]
        for row in rows
    ]
    gains = [gain for line in paired if isinstance(gain := line[2], float)]
    late = [seconds for line in timed if isinstance(seconds := line[-1], float)]
    summary = (
        f"{min(gains):+.2f} to {max(gains):+.2f} points over the best order without a "
        f"pilot, fewer in {sum(gain < 0 for gain in gains)} of {len(gains)}; 95 % of the "
        f"answers at most {max(late):.2f} ms after the deadline"
    )
    return Page(
        "Units in the order of importance",
        [
            f"""
A perceptron 784-4096-4096-10 on Fashion-MNIST without a penalty; {len(rows[0].right):,} test
images; the whole network: {whole:.2f} % right. A share of the bytes of its weights is read per
image. The last layer (0.2 %) is always read, and the pilot's weights with their scales are counted.
*Filled*: units that are not computed keep the pilot's value; *zeros*: they are 0; *random*: mean
and deviation of {SEEDS} orders. {checked[0]} answers were also computed by the module itself, one
image at a time; {checked[1]} differ, for its kernels round inputs to 16 bits. Skipping the columns
of zero inputs (exact, no pilot) reads {100 * exact:.0f} % of the bytes: from there on it is the
better choice.""",
            Table(ORDERS, orders, 2),
            """
![accuracy against bytes](pilot_deadline.svg)

Paired differences, with intervals of 95 %; the best order without a pilot is the best of these
images, orders by chance taken together:""",
            Table(PAIRED, paired, 2),
            f"""
A deadline, for parts of the time that torch takes for the whole network; {TIMED} images, one at a
time, {TURN} in turn. The pilot's packed bits and the chosen rows are read by kernels. *Late*:
median, and 95 %, beyond the deadline, which for the pilot alone is 0:""",
            Table(CLOCK, timed, 2),
        ],
        summary,
    )


def picture(rows: Sequence[Row], whole: float, path: Path) -> None:
    """Accuracy against bytes."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    styles = {
        "pilot bits:3:64, filled": ("#0b6e4f", "o-"),
        "pilot bits:4:64, filled": ("#30638e", "s-"),
        "pilot bits:8, filled": ("#6a4c93", "D-"),
        "pilot bits:4:64, zeros": ("#30638e", "s:"),
        "weights: row norm × out norm": ("#e09f3e", "v--"),
        "calibration: mean × out norm": ("#d1495b", "^--"),
        "calibration, mean elsewhere": ("#d1495b", "^-"),
        "oracle": ("#999999", "x:"),
    }
    for name, (colour, style) in styles.items():
        mine = sorted((r.share, r.accuracy) for r in rows if r.who == name)
        if mine:
            axes.plot(
                *zip(*((100 * s, a) for s, a in mine), strict=True),
                style,
                color=colour,
                label=name,
                markersize=5,
                linewidth=1.4,
            )
    drawn = [row for row in rows if row.who == "random"]
    axes.errorbar(
        [100 * row.share for row in drawn],
        [row.accuracy for row in drawn],
        [row.deviation or 0 for row in drawn],
        fmt="--",
        color="#555555",
        capsize=3,
        label=f"random, {SEEDS} orders",
        linewidth=1.2,
    )
    for row in rows:
        if row.who.endswith("alone"):
            colour = styles[row.who.replace("alone", "filled")][0]
            axes.plot(100 * row.share, row.accuracy, "*", color=colour, markersize=12)
    axes.plot([], [], "*", color="#333333", markersize=10, label="a pilot alone")
    axes.axhline(whole, color="#bbbbbb", linewidth=1, zorder=0)
    axes.text(100 * SHARES[0], whole + 0.8, "whole network", color="#777777", fontsize=8)
    axes.set_ylim(top=whole + 4)
    axes.set(xscale="log", xlabel="bytes of weights read, % of all (the pilot's included)", ylabel="accuracy, %")
    axes.set_xticks([100 * s for s in SHARES], [f"{100 * s:.0f}" for s in SHARES])
    axes.minorticks_off()
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="folder of trained networks")
    parser.add_argument("--network", default="none")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    options = parser.parse_args()
    before = load_average()
    model = network(options.network, options.cache)
    assert isinstance(model, nn.Sequential)
    (x, classes), (seen, _) = images("test"), images("train")
    x, classes = x[: options.images], classes[: options.images]
    with torch.no_grad(), set_threads(options.threads), Progress(transient=True) as bar:
        contender_answers, whole = answers(model, x, seen[:CALIBRATION], bar)
        checked = check(model, x, contender_answers)
        timed = deadlines(model, x)
        exact = columns(model, x)
    rows = list(rows_of(contender_answers, classes, whole))
    truth = 100 * float((whole == classes).float().mean())
    run = Run.now(format_threads(options.threads), before=before)
    print(save("pilot_deadline", page(rows, truth, exact, timed, checked), run, options.output))
    picture(rows, truth, (options.output or RESULTS / "pilot_deadline.md").with_suffix(".svg"))


if __name__ == "__main__":
    main()
