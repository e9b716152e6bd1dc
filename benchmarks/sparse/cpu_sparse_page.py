"""The tables of benchmarks/sparse/cpu_sparse.py: what was measured, in words and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isnan, nan
from statistics import median
from typing import Any

import sparse_networks as nets
from benchmarks.common import limits
from benchmarks.common.tables import format_spread, markdown
from benchmarks.sparse.sparse_engines import (
    CALLED,
    DEEPSPARSE,
    EAGER,
    FROZEN,
    LEAST,
    NOT_RUN,
    OPENVINO,
    OURS,
    RUNTIME,
    SPINNING,
    WHO,
    Entry,
)
from demask.machine.describe import format_counts, format_threads, has_wide_spread
from demask.machine.timing import Timing

# A peer may have several forms: the fastest one counts.
PEERS = {
    "ONNX Runtime": (RUNTIME, SPINNING), "torch": (FROZEN, EAGER), "torch, eager": (EAGER,),
    "OpenVINO": (OPENVINO,), "DeepSparse": (DEEPSPARSE,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One setting. samples: the seconds of each contender's turns, in the order of the rounds.

    entries: without their engines. nonzeros: weights that are not zero. operations: two for each
    time that one of them is used in a call. prepared: seconds. notes: what contenders report
    of themselves. latencies: between the cores, in seconds, one for each round.
    """

    case: nets.Case
    threads: int
    nonzeros: int
    operations: int
    entries: Mapping[str, Entry]
    prepared: Mapping[str, float]
    notes: Mapping[str, Mapping[str, Any]]
    samples: Mapping[str, Sequence[float]]
    latencies: Sequence[float]

    def __str__(self) -> str:
        return f"{self.case}, {format_threads(self.threads)}"

    def timing(self, who: str) -> Timing | None:
        """A contender's timing; None where it was not timed."""
        taken = self.samples.get(who)
        return Timing.of(list(taken)) if taken else None

    def fastest(self, *names: str) -> float:
        """The median seconds of the fastest of these contenders; NaN where none was timed."""
        medians = [timing.median for who in names if (timing := self.timing(who))]
        return min(medians, default=nan)

    def speed(self, peer: str) -> float:
        """How many times as fast as a peer in its fastest form demask is: of the medians."""
        return self.fastest(*PEERS[peer]) / self.fastest(OURS)

    def loses(self, peer: str) -> bool:
        """Whether the peer is faster, in the digits shown."""
        return round(self.speed(peer), 2) < 1

    @property
    def seconds(self) -> tuple[float, float]:
        """That optimize() took, and took again with what the first time measured."""
        return self.prepared.get(OURS, nan), self.notes.get(OURS, {}).get("again", nan)


# -- goals ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Goal:
    """How many times as fast as a peer a setting should be, by the host's state."""

    title: str
    sparsity: float
    rows: int
    peer: str
    fast: float
    slow: float

    def line(self, row: Row) -> list[str]:
        """The goal and what was measured."""
        state = limits.state(median(row.latencies))
        least, speed = self.slow if state == "slow" else self.fast, row.speed(self.peer)
        return [
            str(row), f"times as fast as {self.peer}", f"≥ {least:g}", number(speed),
            verdict(speed, speed >= least), latency_words(row.latencies),
        ]  # fmt: skip


RESNETS = ((nets.RANDOM, 0.7), (nets.RESNET, 0.8), (nets.RESNET, 0.9), (nets.RESNET, 0.95))
OVER = {  # at batch 1, fast and slow state
    "ONNX Runtime": ((2.2, 2.0), (3.2, 2.7), (5.5, 4.2), (8.5, 6.0)),
    "DeepSparse": ((1.7, 1.6), (2.0, 1.8), (2.3, 2.0), (2.9, 2.4)),
}
GOALS = (
    *(Goal(*network, 1, peer, *least)
      for peer, pairs in OVER.items() for network, least in zip(RESNETS, pairs, strict=True)),
    Goal(nets.RESNET, 0.9, 16, "DeepSparse", 1.0, 1.0),
    Goal(nets.LINEAR, 0.9, 128, "ONNX Runtime", 5.0, 5.0),
    Goal(nets.LINEAR, 0.9, 1, "ONNX Runtime", 1.0, 1.0),
)  # fmt: skip
GOAL = ["setting", "", "goal", "measured", "", "latency"]
SECONDS = (("optimize(), s", 20.0), ("optimize() again, s", 3.0))  # of a ResNet-50 at batch 1


def verdict(value: float, met: bool) -> str:
    return "–" if isnan(value) else "met" if met else "**missed**"


def goal_lines(results: Sequence[Row]) -> Iterator[list[str]]:
    """Each goal that was measured, on as many threads as there were at most."""
    threads = max(row.threads for row in results)
    rows = {
        (row.case.title, row.case.sparsity, row.case.rows): row
        for row in results if row.threads == threads
    }  # fmt: skip
    for goal in GOALS:
        row = rows.get((goal.title, goal.sparsity, goal.rows))
        if row is not None:
            yield goal.line(row)
    for network in RESNETS:
        row = rows.get((*network, 1))
        if row is None:
            continue
        for (words, most), taken in zip(SECONDS, row.seconds, strict=True):
            cell = number(taken, ".1f")
            yield [str(row), words, f"≤ {most:g}", cell, verdict(taken, taken <= most), ""]


# -- words ---------------------------------------------------------------------------------------


def number(value: float, form: str = ".2f") -> str:
    return "–" if isnan(value) else format(value, form)


def latency_words(latencies: Sequence[float]) -> str:
    """The latency of these rounds and the host's state; where it changed, how many rounds it was in
    which.

    >>> latency_words([0.55e-6, 0.57e-6, 0.56e-6])
    '0.56 µs, fast'
    >>> latency_words([0.55e-6, 0.97e-6, 0.96e-6])
    '0.96 µs, slow (1 fast, 2 slow)'
    """
    states, middle = Counter(map(limits.state, latencies)), median(latencies)
    words = f"{number(1e6 * middle)} µs, {limits.state(middle)}"
    each = ", ".join(f"{states[name]} {name}" for name in sorted(states))
    return f"{words} ({each})" if len(states) > 1 else words


def time_cell(row: Row, who: str) -> str:
    """A contender's time, or why there is none."""
    timing = row.timing(who)
    return format_spread(timing) if timing else row.entries[who].failure.replace("|", "/")


def speed_cell(row: Row, peer: str) -> str:
    """How many times as fast as a peer: bold where the peer is faster."""
    words = number(row.speed(peer))
    return f"**{words}**" if row.loses(peer) else words


def setting_cells(row: Row) -> list[str]:
    return [f"{row.case.sparsity:.0%}", f"{row.case.unit} {row.case.rows}", str(row.threads)]


SETTING = ["sparsity", "size", "threads"]
SHORT = ["setting", "demask, ms", *(f"/ {peer}" for peer in PEERS)]
TIMES = [*SETTING, *(f"{who}, ms" for who in WHO), "latency"]
SPEEDS = ["network", *SETTING, *(f"/ {peer}" for peer in PEERS), "1 / density", "GFLOP/s", "error",
          "optimize(), s", "again, s", "latency"]  # fmt: skip


def short_cells(row: Row) -> list[str]:
    """The setting in short: bold would not show where this is printed, so * marks a loss."""
    speeds = [number(row.speed(peer)) + " *" * row.loses(peer) for peer in PEERS]
    return [str(row), time_cell(row, OURS), *speeds]


def time_cells(row: Row) -> list[str]:
    return [
        *setting_cells(row), *(time_cell(row, who) for who in WHO), latency_words(row.latencies)
    ]  # fmt: skip


def speed_cells(row: Row) -> list[str]:
    return [
        row.case.title, *setting_cells(row), *(speed_cell(row, peer) for peer in PEERS),
        number(1 / (1 - row.case.sparsity), ".1f"),
        number(1e-9 * row.operations / row.fastest(OURS), ".0f"),
        number(row.entries[OURS].error, ".0e"), *(number(taken, ".1f") for taken in row.seconds),
        latency_words(row.latencies),
    ]  # fmt: skip


def losses(rows: Sequence[Row]) -> str:
    """Per peer the settings in which it was faster, of all in which it ran."""
    lines = []
    for peer in PEERS:
        run = [row for row in rows if not isnan(row.speed(peer))]
        lost = [
            f"{row} ({1 / row.speed(peer):.2f} times as fast)" for row in run if row.loses(peer)
        ]
        words = f"**{len(lost)} of {len(run)}**: {'; '.join(lost)}" if lost else f"0 of {len(run)}"
        lines.append(f"- {peer}: faster than demask in {words}.")
    failed = [
        f"{who} in {row}: {row.entries[who].failure}" for row in rows for who in WHO
        if row.entries[who].failure not in ("", NOT_RUN)
    ]  # fmt: skip
    wide = [
        f"{who} in {row}" for row in rows for who in WHO
        if (timing := row.timing(who)) and has_wide_spread([timing])
    ]  # fmt: skip
    missing = any(row.entries[DEEPSPARSE].failure == NOT_RUN for row in rows)
    lines += [f"- Fails: {'; '.join(failed)}."] if failed else []
    if wide:
        lines.append(
            f"- Spread wide (90 % quantile over twice the 10 % one), as where something else was "
            f"running: {'; '.join(wide)}."
        )
    lines += ["- DeepSparse was not run: `--deepsparse` names a Python that has it."] * missing
    return "\n".join(lines)


PEAKS = ["", "threads", "operands in registers", "in the first cache", "there, 4 bytes off a line"]


def peak_lines(peaks: Mapping[str, Sequence[limits.Peak]]) -> list[list[str]]:
    """What the machine's multiply-add units did, before and after the rest was measured."""
    return [
        [when, str(p.threads), *(f"{v:.0f}" for v in (p.registers, p.memory, p.misaligned))]
        for when, part in peaks.items() for p in part
    ]  # fmt: skip


INTRO = """# Sparse networks on the CPU, in demask and other runtimes

{words}

All is float32. The masks of *{pruned}* are those of a network that was pruned by magnitude and
trained (Deep Learning Matrix Collection, Gale et al. 2020: 54 weights, zeros where theirs are),
with random values; *{random}* and all others have zeros at random positions. Norms are set so
that activations are of order one. MobileNetV1: its 1x1 convolutions are sparse. The others compute
with the zeros, except DeepSparse, which is built for them.

Milliseconds: the median (10 %–90 % quantile) of {calls} turns of each contender, in rounds that run
forward and backward. A turn: every process at rest, the contender called untimed, then timed, each
for {least:g} ms or one call. Every contender's outputs were first compared with torch's in float64:
beyond {allowed:g} of the largest, it is not timed. *Latency*: one way between the two cores, a word
written by one and read by the other, in every round; *fast* below {border:g} µs, else *slow*.

*/ x*: how many times as fast as x demask is, x in its fastest form: ONNX Runtime with threads that
spin or wait, torch frozen or eager. **Bold**: x is faster. *1 / density*:
what leaving out the zeros could gain. *GFLOP/s*: of demask, two operations for each use of a weight
that is not zero. *Error*: of demask. *Again*: optimize() with what it measured the first time."""


def page(
    rows: Sequence[Row], words: str, peaks: Mapping[str, Sequence[limits.Peak]], allowed: float
) -> str:
    """The results as markdown."""
    every = [timing for row in rows for who in WHO if (timing := row.timing(who))]
    latency = latency_words([seconds for row in rows for seconds in row.latencies])
    lines = list(goal_lines(rows))
    goals = [f"## Goals\n\nLatency: {latency}.", markdown(GOAL, lines)] if lines else []
    parts = [
        INTRO.format(
            words=words, pruned=nets.RESNET, random=nets.RANDOM, calls=format_counts(every),
            least=1e3 * LEAST, allowed=allowed, border=1e6 * limits.BORDER,
        ),
        f"## This machine\n\nLatency, all rounds: {latency}. Multiply-adds of its widest vectors, "
        "1e9 operations a second:",
        markdown(PEAKS, peak_lines(peaks)),
        *goals,
        f"## Where something was faster than demask\n\n{losses(rows)}",
        f"## Speed\n\nLatency: {latency}.", markdown(SPEEDS, [speed_cells(row) for row in rows]),
    ]  # fmt: skip
    for title in dict.fromkeys(row.case.title for row in rows):
        part = [row for row in rows if row.case.title == title]
        here = latency_words([seconds for row in part for seconds in row.latencies])
        parts += [
            f"## {title}\n\nLatency: {here}.",
            markdown(TIMES, [time_cells(row) for row in part]),
        ]
    called = "\n".join(f"- **{who}**: {text}" for who, text in CALLED.items())
    return "\n\n".join([*parts, f"## How each was called\n\n{called}"]) + "\n"


def stored(rows: Sequence[Row], words: str, peaks: Mapping[str, Sequence[limits.Peak]]) -> str:
    """The results as JSON, a line per setting, with every sample in seconds."""
    head = {
        "about": words,
        "peaks": {when: [asdict(p) for p in part] for when, part in peaks.items()},
    }
    lines = [json.dumps(_line(row)) for row in rows]
    return f'{{"machine": {json.dumps(head)},\n"settings": [\n' + ",\n".join(lines) + "\n]}\n"


def _line(row: Row) -> dict[str, Any]:
    return {
        "network": row.case.title, "sparsity": row.case.sparsity, row.case.unit: row.case.rows,
        "threads": row.threads, "nonzeros": row.nonzeros, "operations": row.operations,
        "speed": _each(PEERS, lambda peer: round(row.speed(peer), 3)),
        "error": _each(WHO, lambda who: float(f"{row.entries[who].error:.2g}")),
        "failure": {who: entry.failure for who, entry in row.entries.items() if entry.failure},
        "prepared": {who: round(taken, 3) for who, taken in row.prepared.items()},
        "notes": row.notes,
        "latencies": [round(seconds, 9) for seconds in row.latencies],
        "samples": {who: [round(s, 7) for s in part] for who, part in row.samples.items()},
    }  # fmt: skip


def _each(names: Mapping[str, object] | Sequence[str], of: Callable[[str], float]) -> dict:
    """Numbers by name, without those that are not there: JSON has no NaN."""
    return {name: value for name in names if not isnan(value := of(name))}
