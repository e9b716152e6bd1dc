"""What each benchmark shows and needs, as its script declares in `BENCHMARK`."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from benchmarks import ROOT

FOLDER = ROOT / "benchmarks"
QUICK = ROOT / "build" / "benchmarks"
DEV, BENCH = "the development environment", "the extra `bench` (`make bench`)"
SHARED_DATA = "the folder shared/data next to the project"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The declaration of a script.

    shows: one line. time: of a full run, or its bound. needs: environment, data, hardware. results:
    files in benchmarks/results, or paths from the root of the project. quick: options of a short
    run; None where there is none.
    """

    shows: str
    time: str
    results: tuple[str, ...]
    needs: tuple[str, ...] = (DEV,)
    quick: str | None = ""


@cache
def scripts() -> dict[str, tuple[str, Benchmark]]:
    """By name, the engine and the declaration of each script; none is imported, since peers may not
    be installed."""
    names = {"Benchmark": Benchmark, "DEV": DEV, "BENCH": BENCH, "SHARED_DATA": SHARED_DATA}
    declared = {}
    for path in sorted(FOLDER.glob("*/*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BENCHMARK":
                value = eval(compile(ast.Expression(node.value), str(path), "eval"), names)
                declared[path.stem] = (path.parent.name, value)
    return declared


def main_of(name: str) -> Callable[[], None]:
    """The function `main` of a script."""
    return import_module(f"benchmarks.{scripts()[name][0]}.{name}").main


def result_path(name: str) -> Path:
    """Where a result is."""
    return ROOT / name if "/" in name else FOLDER / "results" / name


def markdown_list() -> str:
    """The table of benchmarks/README.md."""
    lines = ["| name | shows | takes | needs | writes |", "|---|---|---|---|---|"]
    for name, (engine, benchmark) in scripts().items():
        results = ", ".join(f"[{r}](results/{r})" if "/" not in r else f"[{r}](../{r})"
                            for r in benchmark.results)  # fmt: skip
        lines.append(f"| {engine}: `{name}` | {benchmark.shows} | {benchmark.time} | "
                     f"{'; '.join(benchmark.needs)} | {results} |")  # fmt: skip
    return "\n".join(lines)
