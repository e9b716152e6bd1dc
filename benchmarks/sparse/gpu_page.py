"""The page that gpu_sparse.py writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log
from typing import Any

PEERS = ("cuBLAS", "cuBLAS TF32", "cuSPARSE", "2:4", "BSR")
#: (what, which rows, peer, how many times as fast)
GOALS: Sequence[tuple[str, Callable[[Any], bool], str, float]] = (
    *((f"bfloat16, n ≤ 64, layers from 8192², {s:.0%}",
       lambda r, s=s: r.suite == "A" and r.task == "spmm" and r.n <= 64 and r.m * r.k >= 8192**2
       and abs(r.sparsity - s) < 0.01, "cuBLAS", goal)
      for s, goal in ((0.7, 1.8), (0.8, 2.5), (0.9, 3.0))),
    ("bfloat16 layers, all", lambda r: r.suite == "A" and r.task == "spmm", "cuSPARSE", 20.0),
    ("float32, really pruned networks", lambda r: r.suite == "B", "cuSPARSE", 3.0),
    ("bfloat16 SDDMM", lambda r: r.task == "sddmm", "cuSPARSE", 10.0),
)  # fmt: skip


def page(rows: Sequence[Any], left: Sequence[str], words: str) -> str:
    """The whole page. rows: of gpu_sparse; left: titles of what there was no time for."""
    parts = [
        "# Sparse products on a GPU",
        words,
        "Microseconds of a call, the median (10 % to 90 %) of CUDA graphs that read copies of the "
        "weights in turn; contenders took turns. Under a peer: its time over ours, so that more "
        "than 1 means that ours is faster. cuBLAS computes with the zeros; TF32, 2:4 and BSR "
        "(blocks of 64) compute something else: they cut numbers, drop weights, or want blocks. "
        "Ours is measured once per kind of product; `dense` means that it was fastest to "
        "decompress the weights and call cuBLAS. First call: of a new matrix, whose form (tasks, "
        "bitmap) is computed then and cached. Errors: norms, against float64.",
        summary(rows),
        table(rows),
    ]
    failed = {f"{row.title}, {who}: {why}" for row in rows for who, why in row.not_run.items()
              if "alone" not in why and "has no" not in why}  # fmt: skip
    if failed:
        parts.append("Not run:\n\n" + "\n".join(f"- {line}" for line in sorted(failed)))
    if left:
        parts.append(f"No time was left for {len(left)}: " + "; ".join(left) + ".")
    return "\n\n".join(parts) + "\n"


def ratios(rows: Sequence[Any], peer: str) -> list[float]:
    """The peer's time over ours, where both ran.

    >>> from types import SimpleNamespace
    >>> ratios([SimpleNamespace(seconds={"demask": (1.0,), "a": (3.0,)})], "a")
    [3.0]
    """
    both = [row.seconds for row in rows if {"demask", peer} <= row.seconds.keys()]
    return [seconds[peer][0] / seconds["demask"][0] for seconds in both]


def summary(rows: Sequence[Any]) -> str:
    """Geometric means and goals."""
    lines = []
    for what, among, peer, goal in GOALS:
        speeds = ratios([row for row in rows if among(row)], peer)
        if not speeds:
            lines.append([what, peer, f"{goal:g}", "not run", "", ""])
            continue
        mean = exp(sum(map(log, speeds)) / len(speeds))
        wins = f"{sum(one > 1 for one in speeds)} of {len(speeds)}"
        span = f"{min(speeds):.2f} to {max(speeds):.2f}"
        lines.append([what, peer, f"{goal:g}", f"{mean:.2f}", span, wins])
    head = ["which", "against", "goal", "geometric mean", "from, to", "faster"]
    return _pipes(head, lines)


def table(rows: Sequence[Any]) -> str:
    """One line per problem."""
    lines = []
    for row in rows:
        if "demask" not in row.seconds:
            continue
        ours, low, high = (1e6 * s for s in row.seconds["demask"])
        against = [f"{row.seconds[p][0] / row.seconds['demask'][0]:.2f}" if p in row.seconds else ""
                   for p in PEERS]  # fmt: skip
        rate = 2 * row.nonzeros * row.n / row.seconds["demask"][0] / 1e12
        lines.append(
            [row.title, f"{ours:.1f} ({low:.1f} to {high:.1f})", row.choice,
             f"{1e3 * row.prepared:.1f}", *against,
             f"{rate:.2f}", f"{row.errors['demask']:.0e}"]
        )  # fmt: skip
    head = ["product", "demask, µs", "by", "first call, ms", *PEERS, "useful TFLOP/s", "error"]
    return _pipes(head, lines)


def _pipes(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *lines])
