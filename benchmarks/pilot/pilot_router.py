"""ResNet-56 after a pilot, on CIFAR-10: `python -m benchmarks run pilot_router`.

A ResNet-20, or the network itself with fewer bits, answers where it is sure; the rest is passed to
ResNet-56 (`demask.pilot.Route`). Thresholds are chosen by the mean of some images, and with a
guarantee; both are judged on other images, over many random splits.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import onnxruntime
import torch
from rich.progress import Progress, track
from torch import Tensor, nn

import cifar
import demask
from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.inductor import NAME, inductor
from benchmarks.common.ledger import RESULTS, Cell, Page, Run, Table, save
from demask.machine.allocator import fix_allocator
from demask.machine.clock import Timing, race, set_threads
from demask.machine.describe import format_threads, load_average
from demask.pilot import Route, Router, by_mean, guarantee, splits
from demask.pilot.guarantee import LEVEL, Outcomes, compared, upper_bound
from demask.pilot.route import SHARES
from demask.pilot.router import margin
from demask.pilot.simplifiers.simplify import simplify

BENCHMARK = Benchmark(
    "a ResNet-20 that answers where it is sure, before ResNet-56",
    "not timed",
    needs=(DEV, SHARED_DATA),
    quick="--images 500 --splits 3 --rounds 2 --streams 1 --quick",
    writes=("pilot_router.svg",),
)

BATCH, PARTS = 64, (1, 4, 5)  # images per call; of ten: to choose, to bound, to report
LOSSES = (0.0, 0.002, 0.005, 0.01)
TARGET = 0.002
PILOTS = (
    "ResNet-20",
    "ResNet-56, 4 bits",
    "ResNet-56, 5 bits",
    "ResNet-56, 8 bits",
    "ResNet-20, int8",
    "ResNet-56, int8",
)
COLOURS = ("#2a78b5", "#d1661f", "#3b8f4a", "#8c5fb0")


class Runtime(nn.Module):
    """A network in ONNX Runtime, as a module."""

    def __init__(self, path: Path, threads: int):
        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        # Its threads spin within a call, as usual, but not on into the other network's.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.name = self.session.get_inputs()[0].name

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.session.run(None, {self.name: x.numpy()})[0])


class Compiled(nn.Module):
    """A network compiled by inductor for batches of one size; others run in torch."""

    def __init__(self, model: nn.Module, x: Tensor):
        super().__init__()
        self.model, self.x = model, x.clone()
        self.call: Any = inductor(model, self.x)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape != self.x.shape:
            return self.model(x)
        self.x.copy_(x)
        return self.call()


@dataclass(slots=True)
class Network:
    """A network in its engines, its fastest one, and what it says of all images."""

    name: str
    engines: dict[str, nn.Module]
    times: dict[str, Timing] = field(default_factory=dict)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def engine(self) -> str:
        return min(self.times, key=lambda name: self.times[name].median)

    @property
    def seconds(self) -> float:
        """Per image."""
        return self.times[self.engine].median / BATCH


def exported(model: nn.Module, x: Tensor, path: Path) -> Path:
    demask.to_onnx(model, path, (x,))
    return path


def quantized(path: Path, x: Tensor) -> Path:
    """The file in 8 bits, weights and activations, calibrated on images that are not tested."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.parts = iter(x.split(BATCH))

        def get_next(self) -> dict[str, object] | None:
            part = next(self.parts, None)
            return None if part is None else {name: part.numpy()}

    name = onnxruntime.InferenceSession(str(path)).get_inputs()[0].name
    ready, target = path.with_suffix(".ready.onnx"), path.with_suffix(".int8.onnx")
    quant_pre_process(str(path), str(ready), skip_symbolic_shape=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_static(
            str(ready),
            str(target),
            Reader(),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
    return target


def networks(
    pilots: Sequence[str], x: Tensor, other: Tensor, folder: Path, threads: int, optimized: bool
) -> Iterator[Network]:
    """ResNet-56, then the pilots. x: images to prepare engines for. other: to calibrate 8 bits."""
    first = x[:BATCH]
    full = cifar.trained(56)
    for name in track(("ResNet-56", *pilots), "engines", transient=True):
        depth = int(name[7:9])
        bits = name.partition(", ")[2]
        model = full if depth == 56 else cifar.trained(depth)
        if bits.endswith("bits"):
            model = simplify(full, (first,), by=f"bits:{bits[0]}").eval()
        path = exported(model, first, folder / f"{name}.onnx".replace(" ", ""))
        if bits == "int8":
            yield Network(name, {"ONNX Runtime": Runtime(quantized(path, other), threads)})
            continue
        engines = {"torch": model, "ONNX Runtime": Runtime(path, threads)}
        if optimized and not bits:
            engines[NAME] = Compiled(model, first)
            engines["demask.optimize"] = demask.optimize(model, (first,), threads=threads)
        yield Network(name, engines)


def timed(contenders: list[Network], x: Tensor, rounds: int) -> None:
    """Every engine in turns, each on other images at every call."""
    batches = x[: len(x) // BATCH * BATCH].split(BATCH)
    count = [0]

    def call(engine: nn.Module) -> Callable[[], object]:
        def one() -> Tensor:
            count[0] += 1
            return engine(batches[count[0] % len(batches)])

        return one

    calls = {f"{one.name}|{name}": call(engine) for one in contenders for name, engine in one.engines.items()}
    for key, timing in Timing.of_each(race(calls, rounds, 2)).items():
        name, _, engine = key.partition("|")
        next(one for one in contenders if one.name == name).times[engine] = timing


def answered(contenders: list[Network], x: Tensor, cache: Path | None) -> None:
    """Set each network's logits, by torch or by its only engine. cache: a file of such logits."""
    logits_of = torch.load(cache) if cache and cache.exists() else {}
    for one in track(contenders, "answers", transient=True):
        if len(logits_of.get(one.name, ())) != len(x):
            engine = next(iter(one.engines.values()))
            logits_of[one.name] = torch.cat([engine(part) for part in x.split(250)])
        one.logits = logits_of[one.name]
    if cache:
        torch.save(logits_of, cache)


@dataclass(frozen=True, slots=True)
class Judged:
    """A rule on one split: its threshold, and what became of the images that report."""

    threshold: float
    share: float
    loss: float
    disagreement: float
    gain: float
    bound: float


@dataclass(frozen=True, slots=True)
class Row:
    """A rule over all splits. rule: "mean" or "guarantee"."""

    pilot: str
    answer: str
    rule: str
    target: float
    judged: tuple[Judged, ...]

    def over(self, name: str) -> tuple[float, float]:
        """Mean and deviation over the splits."""
        values = [getattr(one, name) for one in self.judged]
        return mean(values), stdev(values)

    @property
    def within(self) -> float:
        """Of the splits, those with a loss on the reporting images of at most the target."""
        return mean(float(one.loss <= self.target) for one in self.judged)

    @property
    def refused(self) -> int:
        return sum(one.threshold == math.inf for one in self.judged)


class Cascade:
    """A pilot and the full network on all images, for one way to answer."""

    def __init__(self, pilot: Network, full: Network, labels: Tensor, answer: str):
        self.pilot, self.full, self.labels, self.answer = pilot, full, labels, answer
        self.sure = margin(pilot.logits)
        self.mine, self.whole = pilot.logits.argmax(1), full.logits.argmax(1)
        logs = [one.logits.log_softmax(1) for one in (pilot, full)]
        self.better = torch.logaddexp(*logs).argmax(1) if answer == "both" else self.whole

    def outcomes(self, knobs: Tensor) -> Outcomes:
        answers = torch.where(self.sure > knobs[:, None], self.mine, self.better)
        return compared(knobs.tolist(), self.whole, answers, self.labels)

    def knobs(self, rows: Tensor) -> Tensor:
        shares = torch.tensor(SHARES)
        return self.sure[rows].quantile(shares, interpolation="lower").unique().flip(0)

    def gain(self, share: float) -> float:
        """Expected from the times of both, in a queue that fills batches."""
        return self.full.seconds / (self.pilot.seconds + share * self.full.seconds)

    def judged(self, threshold: float | None, report: Tensor) -> Judged:
        if threshold is None:  # the full network alone, without the pilot
            return Judged(math.inf, 1.0, 0.0, 0.0, 1.0, upper_bound(0, len(report)))
        outcome = self.outcomes(torch.tensor([threshold])).at(report).measured()[0]
        share = float((self.sure[report] <= threshold).float().mean())
        return Judged(
            threshold, share, outcome.loss, outcome.disagreement, self.gain(share), outcome.disagreement_bound()
        )

    def rows(self, count: int, bar: Progress) -> Iterator[Row]:
        """Both rules at all losses, over `count` splits."""
        judged_of: dict[tuple[str, float], list[Judged]] = {}
        words = f"{self.pilot.name}, {self.answer}"
        for seed in bar.track(range(count), description=words):
            split = splits(len(self.sure), seed, PARTS)
            known = self.outcomes(self.knobs(split.choose))
            seen = known.at(torch.cat([split.choose, split.bound]))
            for loss in LOSSES:
                sure = guarantee(known, loss, LEVEL, split=split).threshold
                thresholds = {"mean": by_mean(seen, loss), "guarantee": sure}
                for rule, threshold in thresholds.items():
                    one = self.judged(threshold, split.report)
                    judged_of.setdefault((rule, loss), []).append(one)
        for (rule, loss), judged in sorted(judged_of.items(), reverse=True):
            yield Row(self.pilot.name, self.answer, rule, loss, tuple(judged))


@dataclass(frozen=True, slots=True)
class Streamed:
    """A cascade end to end: measured against the full network, calculated, and what it did."""

    row: Row
    gain: float
    least: float
    expected: float
    share: float
    late: Timing


def streamed(cascades: list[Cascade], rows: list[Row], x: Tensor, rounds: int) -> list[Streamed]:
    """The rules at two losses on the first split's reporting images, queued in batches."""
    report = x[splits(len(x), 0, PARTS).report]
    parts, full = list(report.split(BATCH)), cascades[0].full
    network = full.engines[full.engine]
    routers: dict[str, tuple[Row, Router]] = {}
    for one in cascades:
        for row in rows:
            wanted = (row.pilot, row.answer) == (one.pilot.name, one.answer)
            if wanted and row.target in (0.0, TARGET) and row.judged[0].threshold < math.inf:
                route = Route(row.judged[0].threshold, answer=one.answer)
                pilot = one.pilot.engines[one.pilot.engine]
                name = f"{row.pilot}|{row.answer}|{row.rule}|{row.target}"
                routers[name] = row, Router(network, pilot, route)
    calls: dict[str, Callable[[], object]] = {"full": lambda: [network(part) for part in parts]}
    for name, (_, router) in routers.items():
        calls[name] = lambda router=router: list(router.stream(parts, batch=BATCH, fixed=True))
    taken = race(calls, rounds, 1)
    results = []
    for name, (row, router) in routers.items():
        ratios = [a / b for a, b in zip(taken["full"], taken[name], strict=True)]
        last = router.last
        assert last.latency is not None
        results.append(Streamed(row, median(ratios), min(ratios), row.judged[0].gain, last.share, last.latency))
    return results


# --- the page -----------------------------------------------------------------------------------

ENGINES = ["network", "engine", f"ms per {BATCH} images", "speed-up", "right, %", "as ResNet-56, %"]
SETTING = ["pilot", "answer", "rule", "loss allowed, points"]
RULES = [
    *SETTING,
    "passed on, %",
    "speed-up",
    "±",
    "lost, points",
    "± points",
    "disagreement, %",
    "± %",
    "its bound, %",
    "within loss, %",
    "refused",
]
STREAMS = [*SETTING, "passed on, %", "speed-up, measured", "least", "expected", "latency, ms"]


def engines(contenders: Sequence[Network], labels: Tensor) -> Iterator[list[Cell]]:
    full = contenders[0]
    answers = full.logits.argmax(1)
    for one in contenders:
        mine = one.logits.argmax(1)
        right, same = (100 * float((mine == of).float().mean()) for of in (labels, answers))
        for name, timing in one.times.items():
            yield [one.name, name, timing, full.seconds * BATCH / timing.median, right, same]


def setting(row: Row) -> list[Cell]:
    return [row.pilot, row.answer, row.rule, 100 * row.target]


def rule(row: Row) -> list[Cell]:
    points = (100 * value for name in ("loss", "disagreement") for value in row.over(name))
    return [
        *setting(row),
        100 * row.over("share")[0],
        *row.over("gain"),
        *points,
        100 * row.over("bound")[0],
        100 * row.within,
        row.refused,
    ]


def stream(one: Streamed) -> list[Cell]:
    return [*setting(one.row), 100 * one.share, one.gain, one.least, one.expected, one.late]


def verdict(rows: Sequence[Row]) -> str:
    """The fastest of each rule that loses little enough, of the pilot that is trained."""
    gains_of = []
    for rule, kind in (("mean", "with a mean loss"), ("guarantee", f"guaranteed at {LEVEL:.0%}")):
        gains = [
            row.over("gain")[0]
            for row in rows
            if row.pilot == "ResNet-20" and row.rule == rule and row.target <= TARGET and row.over("loss")[0] <= TARGET
        ]
        gains_of.append(f"{max(gains, default=1.0):.2f} times {kind}")
    slower = sum(row.over("gain")[0] < 1 for row in rows)
    return (
        f"ResNet-20 before ResNet-56, at most {100 * TARGET:.1f} points lost: "
        f"{', '.join(gains_of)}; slower in {slower} of {len(rows)}"
    )


def page(contenders: list[Network], rows: list[Row], ends: list[Streamed], labels: Tensor) -> Page:
    sizes = " + ".join(f"{len(labels) * part // sum(PARTS):,}" for part in PARTS)
    return Page(
        "ResNet-56 after a pilot",
        [
            f"""
CIFAR-10's {len(labels):,} test images, as JPEG. The reference is ResNet-56 in the fastest of its
engines ({contenders[0].engine}), each timed in turns on other images at every call; networks of a
cascade run in their fastest engine, too. Those of 4, 5 and 8 bits have rounded weights and run in
float32; "int8" are 8 bits in ONNX Runtime {onnxruntime.__version__}, weights and activations.""",
            Table(ENGINES, [*engines(contenders, labels)], 2),
            f"""
## Thresholds

Images are split as {sizes}: to choose, to bound, to report; means and deviations over
{len(rows[0].judged)} random splits. *Mean*: the boldest threshold whose loss on the first two parts
is at most the one allowed. *Guarantee*: the boldest that the tests of `demask.pilot.guarantee` pass
at {LEVEL:.0%}. All else is of the third part: *passed on*, to ResNet-56; *speed-up*, from the times
above, for a queue that fills batches; *lost*, in accuracy (negative: better than ResNet-56);
*disagreement*, other answers than ResNet-56's, and the mean of its {LEVEL:.0%} bounds; *within
loss*, splits whose third part loses no more than allowed: less than promised is possible under a
guarantee, for that part is a sample, too; *refused*, splits in which nothing can be guaranteed and
ResNet-56 runs alone (loss 0, speed-up 1). Confidence: softmax margin. *Both*: answers of ResNet-56
are averaged with the pilot's.""",
            Table(RULES, [*map(rule, rows)], 4),
            f"""
![Speed-up against accuracy and disagreement](pilot_router.svg)

## End to end

The first split's third part through `Router.stream`, {BATCH} images a call, those for ResNet-56
queued until there are {BATCH}; in turns with ResNet-56 alone. Measured: median of rounds, and the
least. Expected: as above. Latency: until a batch has all its answers.""",
            Table(STREAMS, [*map(stream, ends)], 4),
        ],
        verdict(rows),
    )


def draw(cascades: list[Cascade], rows: list[Row], path: Path) -> None:
    """The whole curve on all images, and where the rules land: means, deviations over splits."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "router"  # the same picture for the same numbers
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    titles = {
        "loss": "accuracy lost, points (below 0: better than ResNet-56)",
        "disagreement": "answers that differ from ResNet-56, %",
    }
    shown = [one for one in cascades if "bits" not in one.pilot.name]
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for colour, one in zip(COLOURS, shown, strict=False):
            every = torch.arange(len(one.sure))
            curve = [one.judged(float(knob), every) for knob in one.knobs(every)]
            axes.plot(
                [point.gain for point in curve],
                [100 * getattr(point, name) for point in curve],
                color=colour,
                linewidth=1.2,
                label=f"{one.pilot.name}, {one.answer}",
            )
            for rule, marker, face in (("mean", "o", colour), ("guarantee", "s", "white")):
                wanted = one.pilot.name, one.answer, rule
                mine = [row for row in rows if (row.pilot, row.answer, row.rule) == wanted]
                x, wide = zip(*(row.over("gain") for row in mine), strict=True)
                y, high = zip(*(row.over(name) for row in mine), strict=True)
                axes.errorbar(
                    x,
                    [100 * v for v in y],
                    [100 * v for v in high],
                    wide,
                    fmt=marker,
                    color=colour,
                    markersize=4,
                    elinewidth=0.5,
                    markerfacecolor=face,
                )
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xlabel("times as fast as ResNet-56, expected from measured times", fontsize=8)
        axes.axvline(1, color="#8c8c8c", linewidth=0.8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].axhline(0, color="#8c8c8c", linewidth=0.8)
    for marker, face, words in (
        ("o", "#444444", "mean rule, 0, 0.2, 0.5, 1 allowed"),
        ("s", "white", "95 % guarantee, the same"),
    ):
        panels[0].plot([], [], marker, color="#444444", markersize=4, markerfacecolor=face, label=words)
    panels[0].legend(fontsize=7, frameon=False, loc="upper left")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--splits", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=31, help="timed calls of each engine")
    parser.add_argument("--streams", type=int, default=5, help="timed runs of each stream")
    parser.add_argument("--pilots", nargs="+", choices=PILOTS, default=PILOTS)
    parser.add_argument("--quick", action="store_true", help="without demask.optimize and torch.compile")
    parser.add_argument("--cache", type=Path, help="a file that keeps all networks' answers")
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    options = parser.parse_args()
    allocator, before = fix_allocator(), load_average()
    x, labels = cifar.images(options.images)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), set_threads(options.threads):
        other = cifar.images(512, "cifar10_train_jpeg.zip")[0]
        contenders = list(networks(options.pilots, x, other, Path(folder), options.threads, not options.quick))
        timed(contenders, x, options.rounds)
        answered(contenders, x, options.cache)
        ways = {one.name: ("full",) if "bits" in one.name else ("full", "both") for one in contenders}
        cascades = [Cascade(one, contenders[0], labels, answer) for one in contenders[1:] for answer in ways[one.name]]
        with Progress(transient=True) as bar:
            rows = [row for one in cascades for row in one.rows(options.splits, bar)]
        small = [one for one in cascades if one.pilot.name.startswith("ResNet-20")]
        ends = streamed(small, rows, x, options.streams)
    run = Run.now(format_threads(options.threads), allocator, before=before)
    print(save("pilot_router", page(contenders, rows, ends, labels), run, options.output))
    draw(cascades, rows, (options.output or RESULTS / "pilot_router.md").with_suffix(".svg"))


if __name__ == "__main__":
    main()
