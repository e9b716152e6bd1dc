"""The best answer for so many bytes: `python -m benchmarks run pilot_deadline --cache FOLDER`.

A perceptron 784-4096-4096-10 on Fashion-MNIST, trained without a penalty on its hidden values. A
share of the bytes of its weights may be read per image, one image at a time; the pilot's bytes
count. Which hidden units are computed in full is decided by a pilot of 3, 4 or 8 bits, by chance,
by the weights, by a calibration set, or by an oracle. Writes benchmarks/results/pilot_deadline.md
and .svg. Counts and accuracies do not depend on the machine; a second table, of deadlines in
seconds, does.
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
from benchmarks.common.tables import RESULTS, load_average, markdown, provenance
from benchmarks.pilot.trained_networks import images, network
from demask.machine.threads import set_threads
from demask.ops import TABLE
from demask.pilot.chains.ordered_chain import OrderedChain, OrderedLayer
from demask.pilot.chains.ordered_graph import Order
from demask.pilot.simplifiers.rounding import Bits

BENCHMARK = Benchmark(
    "the best answer for so many bytes of weights", "not timed",
    ("pilot_deadline.md", "pilot_deadline.svg"),
    needs=(DEV, "a folder of trained networks (`--cache`)", "Fashion-MNIST"),
    quick="--images 200 --threads 1",
)  # fmt: skip

SHARES = (0.05, 0.1, 0.12, 0.15, 0.25, 0.5)
PILOTS = (Bits(3, 64), Bits(4, 64), Bits(8))
SEEDS = 5
PART = 1000  # images at a time
CALIBRATION = 2000  # training images
CHECKED = 40  # images whose answers are compared with the module's
TARGET = 2.0  # points over the best order without a pilot, at a quarter of the bytes
CLOCKED = (Bits(4, 64), Bits(8))  # pilots of the deadlines
PARTS = (0.0, 0.1, 0.2, 0.3, 0.5)  # of the seconds that torch takes
TIMED, TURN = 400, 20  # images: all, and in turn
HALF = 1.96  # standard errors of half an interval of 95 %


@dataclass(frozen=True, slots=True)
class Row:
    """A contender at a share of the bytes: per image, whether it was right, and whether it says
    what the whole network says. `units`: computed per hidden layer, of all."""

    who: str
    share: float
    units: float
    right: Tensor
    same: Tensor

    @property
    def accuracy(self) -> float:
        return 100 * float(self.right.float().mean())

    @property
    def agreement(self) -> float:
        return 100 * float(self.same.float().mean())


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
    yield Static("weights: row norm × out norm",
                 [_falling(n * o) for n, o in zip(norms, outs, strict=True)])  # fmt: skip
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
    layers: Sequence[OrderedLayer], x: Tensor, scores: Sequence[Tensor],
    fills: Sequence[Tensor] | None, part: float,
) -> Tensor:  # fmt: skip
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


def check(
    model: nn.Sequential, x: Tensor, contender_answers: Mapping[Any, Tensor]
) -> tuple[int, int]:
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
        raise AssertionError(
            f"{differ} of {compared} answers of the module are others than counted"
        )
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

    def line(self, whole: Sequence[int], dense: float) -> list[str]:
        """whole: the network's answers; dense: its median seconds."""
        same = sum(a == b for a, b in zip(self.answers, whole, strict=True))
        late = [1e3 * (taken - self.deadline) for taken in self.seconds]
        return [
            self.bits.text(), f"{self.part:g}" if self.part else "0: the pilot alone",
            f"{1e3 * self.deadline:.2f} ms",
            f"{1e3 * statistics.median(self.seconds):.2f} ms "
            f"({statistics.median(self.seconds) / dense:.2f})",
            f"{100 * statistics.mean(self.units):.0f} %", f"{100 * same / len(whole):.1f} %",
            f"{statistics.median(late):+.2f} ms", f"{statistics.quantiles(late, n=20)[-1]:+.2f} ms",
        ]  # fmt: skip


def deadlines(model: nn.Sequential, x: Tensor) -> tuple[list[list[str]], str]:
    """Lines of a table: answers at parts of the network's own time; and that time in words.

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
    middle, last = statistics.median(dense), statistics.quantiles(dense, n=20)[-1]
    words = (
        f"median {1e3 * middle:.2f} ms, least {1e3 * min(dense):.2f} ms, 95 % {1e3 * last:.2f} ms"
    )
    return [one.line(whole, middle) for one in contenders], words


def _seconds(module: nn.Module, image: Tensor) -> tuple[float, int]:
    """Seconds of a call, and the class it answers."""
    start = perf_counter()
    y = module(image[None])
    return perf_counter() - start, int(y.argmax())


# ---------------------------------------------------------------------------------------- the page


def table(rows: Sequence[Row]) -> str:
    """Accuracy and agreement by contender and share."""
    names = [n for n in dict.fromkeys(row.who for row in rows) if "seed" not in n]
    lines = [_random(rows)]
    for name in names:
        mine = {row.share: row for row in rows if row.who == name}
        if name.endswith("alone"):
            ((share, row),) = mine.items()
            name, mine = f"{name} ({100 * share:.1f} %)", {}
            cell = f"{row.accuracy:.2f} / {row.agreement:.2f}"
            lines.append([name, cell, *[""] * (len(SHARES) - 1)])
            continue
        lines.append([name, *[
            f"{mine[s].accuracy:.2f} / {mine[s].agreement:.2f}" if s in mine else "–"
            for s in SHARES
        ]])  # fmt: skip
    return markdown(["order", *[f"{100 * s:.0f} %" for s in SHARES]], lines)


def _mean(rows: Sequence[Row]) -> Row:
    """The mean of orders by chance, image by image."""
    right = torch.stack([r.right.float() for r in rows]).mean(0)
    same = torch.stack([r.same.float() for r in rows]).mean(0)
    return Row("random, mean", rows[0].share, rows[0].units, right, same)


def _random(rows: Sequence[Row]) -> list[str]:
    line = [f"random, mean ± deviation of {SEEDS}"]
    for share in SHARES:
        mine = [r for r in rows if r.share == share and r.who.startswith("random")]
        a, s = [r.accuracy for r in mine], [r.agreement for r in mine]
        line.append(f"{statistics.mean(a):.2f} ± {statistics.stdev(a):.2f} / "
                    f"{statistics.mean(s):.2f}")  # fmt: skip
    return line


def differences(rows: Sequence[Row]) -> str:
    """The best pilot of each share against the best order without one, and against its own answer,
    paired over images, with intervals of 95 %."""
    lines = []
    for share in SHARES:
        here = [r for r in rows if r.share == share]
        filled = [r for r in here if r.who.endswith("filled")]
        draws = [r for r in here if r.who.startswith("random")]
        rivals = [_mean(draws), *[r for r in here if r.who.startswith(("weights", "calibration"))]]
        if not filled:
            continue
        best = max(rivals, key=lambda r: r.accuracy)
        for mine in filled:
            alone = next(r for r in rows if r.who == mine.who.replace("filled", "alone"))
            lines.append([f"{100 * share:.0f} %", mine.who, f"{100 * mine.units:.1f} %",
                          f"{_gap(mine, best)} ({best.who})", _gap(mine, alone),
                          f"{mine.agreement - alone.agreement:+.2f}"])  # fmt: skip
    head = ["bytes", "order", "units in full", "accuracy over the best without a pilot",
            "over the pilot alone", "agreement over the pilot alone"]  # fmt: skip
    return markdown(head, lines)


def _gap(a: Row, b: Row) -> str:
    difference = (a.right.float() - b.right.float()) * 100
    half = HALF * float(difference.std()) / len(difference) ** 0.5
    return f"{float(difference.mean()):+.2f} ± {half:.2f}"


def picture(rows: Sequence[Row], whole: float, path: Path) -> None:
    """Accuracy against bytes."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    styles = {
        "pilot bits:3:64, filled": ("#0b6e4f", "o-"), "pilot bits:4:64, filled": ("#30638e", "s-"),
        "pilot bits:8, filled": ("#6a4c93", "D-"), "pilot bits:4:64, zeros": ("#30638e", "s:"),
        "weights: row norm × out norm": ("#e09f3e", "v--"),
        "calibration: mean × out norm": ("#d1495b", "^--"),
        "calibration, mean elsewhere": ("#d1495b", "^-"), "oracle": ("#999999", "x:"),
    }  # fmt: skip
    for name, (colour, style) in styles.items():
        mine = sorted((r.share, r.accuracy) for r in rows if r.who == name)
        if mine:
            axes.plot(*zip(*((100 * s, a) for s, a in mine), strict=True), style, color=colour,
                      label=name, markersize=5, linewidth=1.4)  # fmt: skip
    shares = [s for s in SHARES if any(r.share == s and "seed" in r.who for r in rows)]
    drawn = [[r.accuracy for r in rows if r.share == s and "seed" in r.who] for s in shares]
    axes.errorbar([100 * s for s in shares], [statistics.mean(d) for d in drawn],
                  [statistics.stdev(d) for d in drawn], fmt="--", color="#555555", capsize=3,
                  label=f"random, {SEEDS} orders", linewidth=1.2)  # fmt: skip
    for row in rows:
        if row.who.endswith("alone"):
            colour = styles[row.who.replace("alone", "filled")][0]
            axes.plot(100 * row.share, row.accuracy, "*", color=colour, markersize=12)
    axes.plot([], [], "*", color="#333333", markersize=10, label="a pilot alone")
    axes.axhline(whole, color="#bbbbbb", linewidth=1, zorder=0)
    axes.text(100 * SHARES[0], whole + 0.8, "whole network", color="#777777", fontsize=8)
    axes.set_ylim(top=whole + 4)
    axes.set(xscale="log", xlabel="bytes of weights read, % of all (the pilot's included)",
             ylabel="accuracy, %")  # fmt: skip
    axes.set_xticks([100 * s for s in SHARES], [f"{100 * s:.0f}" for s in SHARES])
    axes.minorticks_off()
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def page(rows: Sequence[Row], whole: float, exact: float, timed: tuple[list[list[str]], str],
         words: str, checked: tuple[int, int]) -> str:  # fmt: skip
    """The page of the results."""
    count = len(rows[0].right)
    head = ["pilot", "part of torch's time", "deadline", "seconds, median", "units in full",
            "agreement", "late, median", "late, 95 %"]  # fmt: skip
    lines, dense = timed
    clock = markdown(head, lines)
    return f"""# Units in the order of importance

{words}

A perceptron 784-4096-4096-10 on Fashion-MNIST without a penalty; {count} test images; the whole
network: {whole:.2f} % right. A share of the bytes of its weights is read per image. The last layer
(0.2 %) is always read, and the pilot's weights with their scales are counted. Cells: accuracy /
agreement with the whole network, in %. "filled": units that are not computed keep the pilot's
value; "zeros": they are 0. {checked[0]} answers were also computed by the module itself, one image
at a time; {checked[1]} differ, for its kernels round inputs to 16 bits. Skipping the columns of
zero inputs (exact, no pilot) reads {100 * exact:.0f} % of the bytes: from there on it is the better
choice.

{table(rows)}

![accuracy against bytes](pilot_deadline.svg)

Paired differences in points, with intervals of 95 %; the best order without a pilot is the best
of these images, orders by chance taken together:

{differences(rows)}

A deadline in time, for parts of the seconds that torch takes for the whole network
({dense}; {TIMED} images, one at a time, {TURN} in turn). The
pilot's packed bits and the chosen rows are read
by kernels. Seconds are those of the whole call, in parentheses over torch's median; "late" is
beyond the deadline, which for the pilot alone is 0. Agreement is with the whole network:

{clock}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="folder of trained networks")
    parser.add_argument("--network", default="none")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "pilot_deadline.md")
    options = parser.parse_args()
    before = load_average()
    model = network(options.network, options.cache)
    (x, classes), (seen, _) = images("test"), images("train")
    x, classes = x[: options.images], classes[: options.images]
    with torch.no_grad(), set_threads(options.threads), Progress(transient=True) as bar:
        contender_answers, whole = answers(model, x, seen[:CALIBRATION], bar)
        checked = check(model, x, contender_answers)
        timed = deadlines(model, x)
        exact = columns(model, x)
    rows = [Row(who, share, units, answer == classes, answer == whole)
            for (who, share, units), answer in contender_answers.items()]  # fmt: skip
    truth = 100 * float((whole == classes).float().mean())
    words = provenance("pilot_deadline", f"{options.threads} threads", before=before)
    text = page(rows, truth, exact, timed, words, checked)
    options.output.write_text(text)
    picture(rows, truth, options.output.with_suffix(".svg"))
    print(text)


if __name__ == "__main__":
    main()
