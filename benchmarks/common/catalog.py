"""What each benchmark shows and needs, as its script declares in `BENCHMARK`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
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


def scripts() -> dict[str, str]:
    """The modules that declare a benchmark, by name, without importing them."""
    names = {}
    for path in sorted(FOLDER.glob("*/*.py")):
        body = ast.parse(path.read_text()).body
        targets = [t for node in body if isinstance(node, ast.Assign) for t in node.targets]
        if any(isinstance(target, ast.Name) and target.id == "BENCHMARK" for target in targets):
            names[path.stem] = ".".join(("benchmarks", path.parent.name, path.stem))
    return names


def benchmarks() -> Iterator[tuple[str, str, Benchmark]]:
    """(name, engine, declaration) of each script."""
    for name, module in scripts().items():
        yield name, module.split(".")[1], declared(module)


def declared(module: str) -> Benchmark:
    """The declaration of a script, which is evaluated by itself: peers need not be installed."""
    path = ROOT / Path(*module.split(".")).with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BENCHMARK":
            names = {"Benchmark": Benchmark, "DEV": DEV, "BENCH": BENCH, "SHARED_DATA": SHARED_DATA}
            return eval(compile(ast.Expression(node.value), str(path), "eval"), names)
    raise ValueError(f"{module} declares no BENCHMARK")


def main_of(name: str) -> object:
    """The function `main` of a script."""
    return import_module(scripts()[name]).main


def result_path(name: str) -> Path:
    """Where a result is."""
    return ROOT / name if "/" in name else FOLDER / "results" / name


def markdown_list() -> str:
    """The table of benchmarks/README.md."""
    lines = ["| name | shows | takes | needs | writes |", "|---|---|---|---|---|"]
    for name, engine, benchmark in benchmarks():
        results = ", ".join(f"[{r}](results/{r})" if "/" not in r else f"[{r}](../{r})"
                            for r in benchmark.results)  # fmt: skip
        lines.append(f"| {engine}: `{name}` | {benchmark.shows} | {benchmark.time} | "
                     f"{'; '.join(benchmark.needs)} | {results} |")  # fmt: skip
    return "\n".join(lines)
