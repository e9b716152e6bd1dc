"""ResNet-56 after a pilot, on CIFAR-10: `python -m benchmarks run pilot_router`.

A ResNet-20, or the network itself with fewer bits, answers where it is sure; the rest is passed to
ResNet-56 (`demask.pilot.Route`). Thresholds are chosen by the mean of some images, and with a
guarantee; both are judged on other images, over many random splits. Writes results/pilot_router.md
and pilot_router.svg. Needs the trained weights and the test images of shared/data.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles, stdev

import onnxruntime
import torch
from rich.progress import Progress, track
from torch import Tensor, nn

import cifar
import demask
from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.tables import RESULTS, format_spread, load_average, markdown, provenance
from demask.machine.allocator import fix_allocator
from demask.machine.threads import set_threads
from demask.machine.timing import Timing, sample_seconds, time_alternately
from demask.pilot import Route, Router, by_mean, guarantee, splits
from demask.pilot.guarantee import LEVEL, Outcomes, compared
from demask.pilot.rate_bounds import upper_bound
from demask.pilot.routing.calibrate import SHARES
from demask.pilot.routing.confidence import margin
from demask.pilot.simplifiers.simplify import simplify

BENCHMARK = Benchmark(
    "a ResNet-20 that answers where it is sure, before ResNet-56", "not timed",
    writes=("pilot_router.svg",), needs=(DEV, SHARED_DATA),
    quick="--images 500 --splits 3 --rounds 2 --streams 1 --quick",
)  # fmt: skip

BATCH, PARTS = 64, (1, 4, 5)  # images per call; of ten: to choose, to bound, to report
LOSSES = (0.0, 0.002, 0.005, 0.01)
TARGET, MEAN_GAIN, SURE_GAIN = 0.002, 2.0, 1.6
PILOTS = ("ResNet-20", "ResNet-56, 4 bits", "ResNet-56, 5 bits", "ResNet-56, 8 bits",
          "ResNet-20, int8", "ResNet-56, int8")  # fmt: skip
COLOURS = ("#2a78b5", "#d1661f", "#3b8f4a", "#8c5fb0")


class Runtime(nn.Module):
    """A network in ONNX Runtime, as a module."""

    def __init__(self, path: Path, threads: int):
        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        # Its threads spin within a call, as usual, but not on into the other network's.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self.session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        self.name = self.session.get_inputs()[0].name

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.session.run(None, {self.name: x.numpy()})[0])


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
        quantize_static(str(ready), str(target), Reader(), per_channel=True,
                        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8)  # fmt: skip
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

    calls = {f"{one.name}|{name}": call(engine)
             for one in contenders for name, engine in one.engines.items()}  # fmt: skip
    for key, timing in time_alternately(calls, rounds, 2).items():
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

    def over(self, name: str) -> tuple[float, float, float, float]:
        """Mean, deviation, and the range of 95 % of the splits."""
        values = [getattr(one, name) for one in self.judged]
        cuts = quantiles(values, n=40, method="inclusive")
        return mean(values), stdev(values), cuts[0], cuts[-1]

    @property
    def within(self) -> float:
        """Of the splits, those with a loss on the reporting images of at most the target."""
        return mean(one.loss <= self.target for one in self.judged)

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
        return Judged(threshold, share, outcome.loss, outcome.disagreement, self.gain(share),
                      outcome.disagreement_bound())  # fmt: skip

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
    taken = sample_seconds(calls, rounds, 1)
    results = []
    for name, (row, router) in routers.items():
        ratios = [a / b for a, b in zip(taken["full"], taken[name], strict=True)]
        last = router.last
        assert last.latency is not None
        results.append(Streamed(row, median(ratios), min(ratios), row.judged[0].gain, last.share,
                              last.latency))  # fmt: skip
    return results


# --- the page -----------------------------------------------------------------------------------


def percent(values: tuple[float, float, float, float], sign: str = "") -> str:
    """Mean ± deviation (range of 95 % of the splits), in percent or points."""
    average, spreads, low, high = (100 * value for value in values)
    return f"{average:{sign}.2f} ± {spreads:.2f} ({low:{sign}.2f} to {high:{sign}.2f})"


def cells(row: Row) -> list[str]:
    gain, spreads, low, high = row.over("gain")
    speed = f"{gain:.2f} ± {spreads:.2f} ({low:.2f}–{high:.2f})"
    return [row.pilot, row.answer, row.rule, f"{100 * row.target:.1f}",
            f"{100 * row.over('share')[0]:.1f}", speed,
            percent(row.over("loss"), "+"), percent(row.over("disagreement")),
            f"{100 * row.over('bound')[0]:.2f}", f"{row.within:.0%}", str(row.refused)]  # fmt: skip


HEAD = ["pilot", "answer", "rule", "loss allowed, points", "in full, %", "speed-up",
        "accuracy lost", "disagreement, %", "its bound, %", "within loss", "refused"]  # fmt: skip


def verdicts(rows: list[Row]) -> str:
    """The two targets, each with the best row that answers it; the pilots that are trained."""
    plain = [row for row in rows if row.pilot == "ResNet-20"]
    lines = []
    for rule, least in (("mean", MEAN_GAIN), ("guarantee", SURE_GAIN)):
        fit = [row for row in plain if row.rule == rule and row.over("loss")[0] <= TARGET
               and (rule == "mean" or row.target <= TARGET)]  # fmt: skip
        best = max(fit, key=lambda row: row.over("gain")[0], default=None)
        got = "no row" if best is None else (
            f"{best.over('gain')[0]:.2f}x (answer: {best.answer}, loss allowed "
            f"{100 * best.target:.1f}, lost {100 * best.over('loss')[0]:+.2f} points)")  # fmt: skip
        kind = "a mean loss" if rule == "mean" else f"a {LEVEL:.0%} guarantee of a loss"
        lines.append(f"- {least:.1f}x at {kind} of at most {100 * TARGET:.1f} points: {got}.")
    return "\n".join(lines)


def page(contenders: list[Network], rows: list[Row], ends: list[Streamed], labels: Tensor,
         words: str) -> str:  # fmt: skip
    full = contenders[0]
    accuracy = {
        one.name: float((one.logits.argmax(1) == labels).float().mean()) for one in contenders
    }
    same = {one.name: float((one.logits.argmax(1) == full.logits.argmax(1)).float().mean())
            for one in contenders}  # fmt: skip
    whole = full.times[full.engine].median
    engines = [[one.name, name, format_spread(timing), f"{whole / timing.median:.2f}",
                f"{100 * accuracy[one.name]:.2f}", f"{100 * same[one.name]:.2f}"]
               for one in contenders for name, timing in one.times.items()]  # fmt: skip
    streams = [[one.row.pilot, one.row.answer, one.row.rule, f"{100 * one.row.target:.1f}",
                f"{100 * one.share:.1f}", f"{one.gain:.2f} ({one.least:.2f})",
                f"{one.expected:.2f}", format_spread(one.late)] for one in ends]  # fmt: skip
    sizes = " + ".join(f"{len(labels) * part // sum(PARTS):,}" for part in PARTS)
    heads = [
        "network",
        "engine",
        f"ms per {BATCH} images",
        "speed-up",
        "accuracy, %",
        "as ResNet-56, %",
    ]
    return f"""# ResNet-56 after a pilot

{words}

CIFAR-10's {len(labels):,} test images, as JPEG. The reference is ResNet-56 in the fastest of its
engines ({full.engine}), each timed in turns on other images at every call; networks of a cascade
run in their fastest engine, too. Those of 4, 5 and 8 bits have rounded weights and run in float32;
"int8" are 8 bits in ONNX Runtime, weights and activations.

{markdown(heads, engines)}

Targets, over {len(rows[0].judged)} random splits:

{verdicts(rows)}

## Thresholds

Images are split as {sizes}: to choose, to bound, to report. *Mean*: the boldest threshold whose
loss on the first two parts is at most the one allowed. *Guarantee*: the boldest that the tests of
`demask.pilot.guarantee` pass at {LEVEL:.0%}. All else is of the third part: *in full*, images that
are passed to ResNet-56; *speed-up*, from the times above, for a queue that fills batches; *accuracy
lost*, in points (negative: better than ResNet-56); *disagreement*, other answers than ResNet-56's,
and the mean of its {LEVEL:.0%} bounds; *within loss*, splits whose third part loses no more than
allowed: less than promised is possible under a guarantee, for that part is a sample, too;
*refused*, splits in which nothing can be guaranteed and ResNet-56 runs alone (loss 0, speed-up 1).
Mean ± deviation (range of 95 % of the splits). Confidence: softmax margin. *Both*: answers of
ResNet-56 are averaged with the pilot's.

{markdown(HEAD, [cells(row) for row in rows])}

![Speed-up against accuracy and disagreement](pilot_router.svg)

## End to end

The first split's third part through `Router.stream`, {BATCH} images a call, those for ResNet-56
queued until there are {BATCH}; in turns with ResNet-56 alone. Measured: median of rounds (the
least). Expected: as above. Latency: milliseconds until a batch has all its answers.

{markdown(["pilot", "answer", "rule", "loss allowed, points", "in full, %", "speed-up, measured",
           "expected", "latency"], streams)}
"""  # fmt: skip


def draw(cascades: list[Cascade], rows: list[Row], path: Path, words: str) -> None:
    """The whole curve on all images, and where the rules land."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "router"  # the same picture for the same numbers
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    shown = [one for one in cascades if "bits" not in one.pilot.name]
    names = ("loss", "disagreement")
    for colour, one in zip(COLOURS, shown, strict=False):
        every = torch.arange(len(one.sure))
        curve = [one.judged(float(knob), every) for knob in one.knobs(every)]
        gains = [point.gain for point in curve]
        label = f"{one.pilot.name}, {one.answer}"
        for axes, name in zip(panels, names, strict=True):
            values = [100 * getattr(point, name) for point in curve]
            axes.plot(gains, values, color=colour, linewidth=1.2, label=label)
            for row in rows:
                if (row.pilot, row.answer) == (one.pilot.name, one.answer):
                    _point(axes, row, name, colour)
    panels[0].set_title(
        "accuracy lost, points (below 0: better than ResNet-56)", fontsize=9, loc="left"
    )
    panels[1].set_title("answers that differ from ResNet-56, %", fontsize=9, loc="left")
    for axes in panels:
        axes.set_xlabel("times as fast as ResNet-56, expected from measured times", fontsize=8)
        axes.axvline(1, color="#8c8c8c", linewidth=0.8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].axhline(0, color="#8c8c8c", linewidth=0.8)
    panels[0].plot(
        [], [], "o", color="#444444", markersize=4, label="mean rule, 0, 0.2, 0.5, 1 allowed"
    )
    panels[0].plot([], [], "s", color="#444444", markersize=4, markerfacecolor="white",
                   label="95 % guarantee, the same")  # fmt: skip
    panels[0].legend(fontsize=7, frameon=False, loc="upper left")
    figure.supxlabel(words, x=0.01, ha="left", fontsize=6, color="#444444", wrap=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


def _point(axes, row: Row, name: str, colour: str) -> None:
    """Where a rule lands on average, and the deviation over splits."""
    x, value = row.over("gain"), row.over(name)
    sure = row.rule == "guarantee"
    axes.errorbar(x[0], 100 * value[0], xerr=x[1], yerr=100 * value[1], color=colour,
                  fmt="s" if sure else "o", markersize=4, linewidth=0.6, elinewidth=0.5,
                  markerfacecolor="white" if sure else colour)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--splits", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=31, help="timed calls of each engine")
    parser.add_argument("--streams", type=int, default=5, help="timed runs of each stream")
    parser.add_argument("--pilots", nargs="+", choices=PILOTS, default=PILOTS)
    parser.add_argument("--quick", action="store_true", help="without demask.optimize, which times")
    parser.add_argument("--cache", type=Path, help="a file that keeps all networks' answers")
    parser.add_argument("--output", type=Path, default=RESULTS / "pilot_router.md")
    options = parser.parse_args()
    allocator, before = fix_allocator(), load_average()
    x, labels = cifar.images(options.images)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), set_threads(options.threads):
        other = cifar.images(512, "cifar10_train_jpeg.zip")[0]
        contenders = list(
            networks(options.pilots, x, other, Path(folder), options.threads, not options.quick)
        )
        timed(contenders, x, options.rounds)
        answered(contenders, x, options.cache)
        ways = {
            one.name: ("full",) if "bits" in one.name else ("full", "both") for one in contenders
        }
        cascades = [Cascade(one, contenders[0], labels, answer)
                    for one in contenders[1:] for answer in ways[one.name]]  # fmt: skip
        with Progress(transient=True) as bar:
            rows = [row for one in cascades for row in one.rows(options.splits, bar)]
        small = [one for one in cascades if one.pilot.name.startswith("ResNet-20")]
        ends = streamed(small, rows, x, options.streams)
    threads = f"{options.threads} thread{'s' if options.threads > 1 else ''}"
    runtime = f"ONNX Runtime {onnxruntime.__version__}"
    words = provenance("pilot_router", runtime, threads, allocator, before=before)
    text = page(contenders, rows, ends, labels, words)
    options.output.write_text(text)
    draw(cascades, rows, options.output.with_suffix(".svg"), words)
    print(text)


if __name__ == "__main__":
    main()
