"""What each benchmark shows and needs, as its script declares in `BENCHMARK`."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from benchmarks import ROOT

FOLDER = ROOT / "benchmarks"
QUICK = ROOT / "build" / "benchmarks"
# What the scripts of a folder measure: a change there makes their results old.
MEASURES = {
    "optimize": ("tune", "kernels", "machine"),
    "pilot": ("pilot", "kernels"),
    "shrink": ("shrink", "facts", "graph", "ops"),
    "sparse": ("sparse", "kernels", "tune"),
    "stride": ("stride", "tune"),
    "traverse": ("traverse", "kernels"),
}
DEV, BENCH = "the development environment", "the extra `bench` (`make bench`)"
SHARED_DATA = "the folder shared/data next to the project"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The declaration of a script.

    shows: one line. time: of a full run, or its bound. needs: environment, data, hardware. quick:
    options of a short run; None where there is none. writes: files other than the page of its name,
    in benchmarks/results or by their paths from the root of the project. measures: folders and
    files of src/demask whose speed or memory it shows, other than those of `MEASURES`.
    """

    shows: str
    time: str
    needs: tuple[str, ...] = (DEV,)
    quick: str | None = ""
    writes: tuple[str, ...] = ()
    measures: tuple[str, ...] = ()


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


def sources(name: str) -> list[str]:
    """Files and folders, from the project's root, whose change makes a script's results old."""
    folder, benchmark = scripts()[name]
    return [f"src/demask/{part}" for part in benchmark.measures or MEASURES[folder]]


def results(name: str) -> list[Path]:
    """The files that a script writes: its page, if the ledger has one, and others."""
    benchmark = scripts()[name][1]
    page = FOLDER / "results" / f"{name}.md"
    others = [ROOT / file if "/" in file else page.with_name(file) for file in benchmark.writes]
    return [*([page] if page.exists() else []), *others]


def markdown_list() -> str:
    """The table of benchmarks/README.md."""
    lines = ["| name | shows | takes | needs | writes |", "|---|---|---|---|---|"]
    for name, (engine, benchmark) in scripts().items():
        links = ", ".join(f"[{path.name}]({os.path.relpath(path, FOLDER)})" for path in results(name))
        lines.append(
            f"| {engine}: `{name}` | {benchmark.shows} | {benchmark.time} | {'; '.join(benchmark.needs)} | {links} |"
        )
    return "\n".join(lines)
