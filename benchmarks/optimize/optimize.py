"""Times of masked networks as they are, and by optimize, torch.compile and ONNX Runtime, in turns:
`python -m benchmarks run optimize`. Writes benchmarks/results/optimize.md.
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import product
from math import isnan, nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnxruntime
import torch
from rich.progress import Progress
from torch import Tensor, nn

import cifar
import demask
from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.tables import RESULTS, command, format_spread, markdown
from benchmarks.shrink import encoder, peers
from demask.cli.bench import contenders
from demask.graph.provenance import Provenance
from demask.graph.queries import ExampleSizes
from demask.machine.benchmark import ALLOWED
from demask.machine.cost import CostError, Costs
from demask.machine.describe import format_counts, format_threads
from demask.machine.timing import Timing, sample_seconds
from demask.ops import TABLE
from demask.shrink.pipeline import capture_program, shrink_program
from demask.tune.candidates import generate_candidates
from demask.tune.layer_costs import PLAIN, LayerCosts

BENCHMARK = Benchmark(
    "optimize(), torch.compile and ONNX Runtime on masked networks",
    "at most 60 s a setting, and compilation", ("optimize.md",), needs=(DEV, SHARED_DATA),
    quick="--networks encoder --threads 1 --pairs 3 --seconds 3",
)  # fmt: skip

MASKED, DENSE, DEMASKED, OPTIMIZED = "masked", "dense, optimized", "demasked", "optimized"
COMPILED = ("masked, compiled", "demasked, compiled")
RUNTIME = ("masked, ONNX Runtime", "demasked, ONNX Runtime")
RIVALS = (MASKED, DENSE, DEMASKED, *COMPILED, *RUNTIME)
PACKAGES = ("onnxruntime", "onnx", "onnxscript", "torchvision", "transformers")
BLOCK, WARMUP, PAUSE = 8, 2, 0.05  # rounds, calls, seconds: see `timed`
TOKENS, WORDS, SIZE = 128, 30522, 224
COSTS = "costs.json"

Call = Callable[[], Any]


class Hidden(nn.Module):
    """An encoder as a function of token ids alone."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).last_hidden_state


@dataclass(frozen=True, slots=True)
class Network:
    """A masked network: how to build it, its batches, its input for one of them."""

    title: str
    make: Callable[[torch.Generator], nn.Module]
    batches: tuple[int, ...]
    inputs: Callable[[int, torch.Generator], Tensor]


def resnet(title: str, shifts: bool) -> Network:
    return Network(
        title, lambda g: cifar.masked(cifar.trained(56), g, shifts=shifts), (64, 1),
        lambda batch, _: cifar.images(batch)[0],
    )  # fmt: skip


def hidden(generator: torch.Generator) -> nn.Module:
    torch.manual_seed(0)
    return Hidden(encoder.masked(encoder.encoder("sdpa"), generator)[0]).eval()


NETWORKS = {
    "resnet56-zero": resnet("ResNet-56, shifts zero", False),
    "resnet56-kept": resnet("ResNet-56, shifts nonzero", True),
    "mobilenet_v2": Network(
        f"MobileNetV2, {SIZE} x {SIZE}, shifts nonzero",
        lambda _: peers.prepared("mobilenet_v2", True, SIZE)[0], (1, 16),
        lambda batch, g: peers.drawn("mobilenet_v2", batch, SIZE, g),
    ),
    "encoder": Network(
        f"MiniLM-sized encoder, {TOKENS} tokens", hidden, (8, 1),
        lambda batch, g: torch.randint(0, WORDS, (batch, TOKENS), generator=g),
    ),
}  # fmt: skip


@torch.no_grad()
def filled(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """A copy without zeros: random values as large as the other ones of a tensor in their place."""
    model = deepcopy(model)
    for values in model.parameters():
        gone = values == 0
        size = values[~gone].square().mean().sqrt()
        values[gone] = torch.randn(int(gone.sum()), generator=generator) * size
    return model


@dataclass(frozen=True, slots=True)
class Row:
    """A contender. seconds: of its preparation. difference: relative to the largest output."""

    call: Call | None
    seconds: float = nan
    failure: str = ""
    timing: Timing | None = None
    difference: float = nan


def compiled(model: nn.Module, x: Tensor) -> Row:
    """By torch.compile, for these sizes and threads; seconds: with its first call, no caches."""
    contender = contenders.compiled(contenders.Contender.of("", model), ((x,), {}))
    call = None if contender.failure else lambda: contender.module(x)
    return Row(call, contender.preparation or nan, contender.failure)


def exported(model: nn.Module, x: Tensor, threads: int, path: Path) -> Row:
    """In ONNX Runtime, with all optimizations (its default); seconds: export, making a session."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # Its threads spin within a call, as usual, but not on into the next contender's.
    options.add_session_config_entry("session.force_spinning_stop", "1")

    def start_session() -> onnxruntime.InferenceSession:
        torch.onnx.export(model, (x,), path, dynamo=True, verbose=False)
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter warns of its own calls
            session, seconds = contenders.timed(start_session)
        feed = {session.get_inputs()[0].name: x.numpy()}
        session.run(None, feed)
    except Exception as error:  # it may raise anything, and then that is its result
        return Row(None, failure=contenders.reason(error))
    return Row(lambda: torch.from_numpy(session.run(None, feed)[0]), seconds)


@dataclass(frozen=True, slots=True)
class Setting:
    """All contenders in one setting; provenance: optimize()'s; error: of analytic answers."""

    network: str
    batch: int
    threads: int
    rows: Mapping[str, Row]
    provenance: Provenance
    error: CostError

    def __str__(self) -> str:
        return f"{self.network}, batch {self.batch}, {format_threads(self.threads)}"

    def speed(self, who: str, other: str = OPTIMIZED) -> float:
        """How many times as fast `other` is: the ratio of the medians; NaN where one fails."""
        ours, theirs = (self.rows[name].timing for name in (who, other))
        return ours.median / theirs.median if ours and theirs else nan

    def beats(self, who: str) -> bool:
        """Whether a contender is faster than the optimized network, in the digits shown."""
        return round(self.speed(who), 2) < 1


def analytic(model: nn.Module, x: Tensor, threads: int, path: Path) -> CostError:
    """The error of the cost model's analytic answers, over what optimize() measured into the file:
    its candidates are generated once more, with a cost model that times nothing."""
    costs = Costs.open(path, threads=threads, measure=False)
    program = shrink_program(capture_program(model, (x,), {}, None), TABLE)[0]
    for _ in generate_candidates(
        program, LayerCosts(costs, ExampleSizes.of(program.graph, [x])), TABLE, lambda words: None
    ):
        pass
    return costs.error()


def contending(
    model: nn.Module, dense: nn.Module, x: Tensor, threads: int, folder: Path
) -> tuple[dict[str, Row], demask.Demasked]:
    """Every contender, and the result of optimize(); each optimize() measures anew."""
    builders = (
        lambda: demask.optimize(dense, (x,), threads=threads, cache=folder / "dense.json"),
        lambda: demask.demask(model, (x,)),
        lambda: demask.optimize(model, (x,), threads=threads, cache=folder / COSTS),
    )
    results = [contenders.timed(build) for build in builders]
    row_of = {MASKED: Row(lambda: model(x))}
    for who, (network, seconds) in zip((DENSE, DEMASKED, OPTIMIZED), results, strict=True):
        row_of[who] = Row(lambda network=network: network(x), seconds)
    (slim, _), (fast, _) = results[1:]
    torch.compiler.reset()  # what was compiled for other threads and sizes
    row_of |= {who: compiled(m, x) for who, m in zip(COMPILED, (model, slim), strict=True)}
    for who, m in zip(RUNTIME, (model, slim), strict=True):
        row_of[who] = exported(m, x, threads, folder / f"{who}.onnx")
    return row_of, fast


def timed(calls: Mapping[str, Call], pairs: int, seconds: float) -> dict[str, Timing]:
    """Torch's contenders in turns, then ONNX Runtime's, then torch's again, a few rounds at a time:
    an idle thread of the one pool spins on the core that the other needs, hence the pause too."""
    pools = [{w: c for w, c in calls.items() if (w in RUNTIME) == other} for other in (False, True)]
    taken: dict[str, list[float]] = defaultdict(list)
    starts = range(0, pairs, BLOCK)
    most = seconds / len(starts) / len(pools)
    for start, pool in product(starts, filter(None, pools)):
        time.sleep(PAUSE)
        for who, part in sample_seconds(
            pool, min(BLOCK, pairs - start), WARMUP, seconds=most
        ).items():
            taken[who] += part
    return {who: Timing.of(part) for who, part in taken.items()}


@torch.no_grad()
def measured(network: Network, batch: int, threads: int, pairs: int, seconds: float) -> Setting:
    """One setting."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    model = network.make(generator)
    dense, x = filled(model, generator), network.inputs(batch, generator)
    with TemporaryDirectory() as folder:
        row_of, fast = contending(model, dense, x, threads, Path(folder))
        error = analytic(model, x, threads, Path(folder, COSTS))
        calls = {who: row.call for who, row in row_of.items() if row.call is not None}
        expected = {who: (dense if who == DENSE else model)(x) for who in calls}
        gaps = {who: contenders.difference(expected[who], call()) for who, call in calls.items()}
        timings = timed(calls, pairs, seconds)
    for who, timing in timings.items():  # without the calls, which hold networks
        row_of[who] = replace(row_of[who], call=None, timing=timing, difference=gaps[who])
    return Setting(network.title, batch, threads, row_of, fast.demasked, error)


def rows(
    names: Sequence[str], threads: Sequence[int], pairs: int, seconds: float, bar: Progress
) -> Iterator[Setting]:
    """Every network at every batch size and number of threads."""
    chosen = [NETWORKS[name] for name in names]
    tasks = [(one, batch, t) for one in chosen for batch in one.batches for t in threads]
    step = bar.add_task("", total=len(tasks))
    contenders.set_up_compiler()
    for network, batch, count in tasks:
        bar.update(step, description=f"{network.title}, batch {batch}, {format_threads(count)}")
        setting = measured(network, batch, count, pairs, seconds)
        bar.console.log(*cells(setting), sep="; ")
        bar.advance(step)
        yield setting


def number(value: float, form: str = ".2f") -> str:
    return "–" if isnan(value) else format(value, form)


def cells(setting: Setting) -> list[str]:
    """The setting in one line: what optimize() gains over each other contender, and decided."""
    speeds = {who: number(setting.speed(who)) for who in RIVALS}
    first, *others = setting.provenance.decisions
    unchanged = setting.provenance.speed.least < ALLOWED
    layers = [d.seconds[d.chosen] for d in others if PLAIN in d.seconds]
    return [
        setting.network, str(setting.batch), str(setting.threads),
        *(f"**{speed}**" if setting.beats(who) else speed for who, speed in speeds.items()),
        f"unchanged: {first.chosen} may be slower" if unchanged else first.chosen,
        f"{setting.rows[OPTIMIZED].seconds:.1f}",
        f"{number(setting.error.median)} / {number(setting.error.high)} of {setting.error.count}",
        f"{1e3 * sum(layers):.1f}" if layers else "–", f"{1e3 * first.seconds[first.chosen]:.1f}",
    ]  # fmt: skip


HEAD = ["network", "batch", "threads", *(f"/ {who}" for who in RIVALS), "chosen", "optimize(), s",
        "analytic error", "its layers, ms", "whole, ms"]  # fmt: skip
TIMES = ["batch", "threads", "contender", "ms", "speed", "difference", "prepared in, s", ""]


def lines(setting: Setting) -> Iterator[list[str]]:
    """A line per contender."""
    for who, row in setting.rows.items():
        failure = f"fails: {row.failure.replace('|', '/')}"
        yield [
            str(setting.batch), str(setting.threads), who,
            format_spread(row.timing) if row.timing else failure,
            number(setting.speed(MASKED, who)), number(row.difference, ".0e"),
            number(row.seconds, ".1f"),
            "**faster than optimized**" if setting.beats(who) else "",
        ]  # fmt: skip


def losses(settings: Sequence[Setting]) -> str:
    """Per contender, the settings in which it was faster than optimize()'s result, or failed."""
    parts = []
    for who in RIVALS:
        lost = [f"{s} ({1 / s.speed(who):.2f} times as fast)" for s in settings if s.beats(who)]
        failed = [str(s) for s in settings if not s.rows[who].timing]
        words = f"**{len(lost)} of {len(settings)}**: {'; '.join(lost)}" if lost else "none"
        fails = f" It fails in {len(failed)}: {'; '.join(failed)}." if failed else ""
        parts.append(f"- {who}: faster than optimized in {words}.{fails}")
    unchanged = sum(s.provenance.speed.least < ALLOWED for s in settings)
    return "\n".join([*parts, f"- optimize() returned the network unchanged in {unchanged}."])


INTRO = """# What optimize gains, against torch.compile and ONNX Runtime

{words} {versions}.

Half of each convolution's output channels are masked, or half of the heads and units of each layer,
drawn anew for each layer. ResNet-56 is trained and sees real images, the others are random. Shifts
*nonzero*: masked channels are constants; *zero*: they are 0. All is prepared for the very batch
and threads, in float32.

*Dense, optimized*: optimize() of the same network with random values in place of zeros: what
optimized gains over it is due to removal. *Compiled*: torch.compile, fullgraph, not dynamic. *ONNX
Runtime*: `torch.onnx.export(dynamo=True)`, on the CPU. *ms*: median (10 %–90 % quantile) of {calls}
calls in turns in one process, {block} rounds of torch's contenders, then of ONNX Runtime's, whose
threads are others, and so on. *Speed*: times as fast as masked. *Difference*: from masked (dense:
from the original dense network), relative to the largest output. *Prepared in*: with export, or the
first call of what is compiled; nothing is cached.

## Where something was faster than optimized, of {count} settings

{losses}"""
CHOSEN = """## What optimize chose

*/ x*: how many times as fast as x the optimized network is; **bold** where x is faster.
*Analytic error*: |log(analytic / measured)| of the cost model, median / 90 % quantile, over what
optimize() measured. *Its layers*: the sum of what the layers of the chosen form took, each timed
alone (joins and the rest are not in it); *whole*: what the network took in that form."""


def page(settings: Sequence[Setting], words: str) -> str:
    """The results as markdown, a pair of tables per network."""
    calls = format_counts(row.timing for s in settings for row in s.rows.values() if row.timing)
    parts = [INTRO.format(
        words=words, versions=", ".join(f"{name} {version(name)}" for name in PACKAGES),
        calls=calls, block=BLOCK, count=len(settings), losses=losses(settings),
    )]  # fmt: skip
    parts += [CHOSEN, markdown(HEAD, [cells(s) for s in settings])]
    for title in dict.fromkeys(s.network for s in settings):
        part = [line for s in settings if s.network == title for line in lines(s)]
        parts += [f"## {title}", markdown(TIMES, part)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    command(__doc__, rows, HEAD, cells, page, RESULTS / "optimize.md", 120.0, tuple(NETWORKS))


if __name__ == "__main__":
    main()
