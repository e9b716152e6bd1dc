"""Plants faults into a copy of the sources, one at a time, and runs the tests that must see each.

    python -m mutants                 every fault; --shard 2/6: the second sixth
    python -m mutants arena bf16      those whose name contains one of the words
    python -m mutants --count 20      twenty of them, others on each day (--evening N: on day N)
    python -m mutants --page FILE     write the results so far to a page

Results are merged into build/mutants.json. Exit status 1 where a fault is missed, 2 where a line no
longer exists. Each fault is a process forked from this one, which has imported what tests import
except demask. Only tests that CI runs are run.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import gc
import importlib
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from mutants.faults import FAULTS, ROOT, Fault

IMPORTED = ("torch", "torch.export", "torch._export", "torch.onnx", "torch._dynamo", "sympy",
            "pytest", "numpy", "safetensors.torch", "llvmlite.binding", "rich.table",
            "typer", "onnx", "onnxscript", "xml.etree.ElementTree")  # fmt: skip
SECONDS = 300  # of processor time: a fault may make tests run for ever, which is seen, too
RESULTS = ROOT / "build" / "mutants.json"


def selected(arguments: argparse.Namespace) -> list[Fault]:
    """The faults that the command line asks for."""
    faults = list(FAULTS)
    if arguments.words:
        faults = [f for f in FAULTS if any(word in f.name for word in arguments.words)]
    elif arguments.count is not None:
        start = arguments.evening * arguments.count % len(FAULTS)
        faults = [*FAULTS, *FAULTS][start : start + min(arguments.count, len(FAULTS))]
    number, count = map(int, arguments.shard.split("/"))
    return faults[number - 1 :: count]


def run_tests(source: Path, tests: tuple[str, ...], result: Path) -> None:
    """Run test files with the package in `source`, and write the first that fails to a file."""
    import pytest

    class First:
        """Reports the first failure."""

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            self.pytest_runtest_logreport(report)

        def pytest_runtest_logreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                result.write_text(report.nodeid)
                os._exit(0)

    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.chdir(ROOT)
    sys.path.insert(0, str(source))
    os.environ |= {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True
    command = ["-x", "-q", "-p", "no:cacheprovider", "--rotation", "all", *tests]
    status = pytest.main(command, plugins=[First()])
    os._exit(0 if status == pytest.ExitCode.OK else 4)


def caught(fault: Fault, source: Path) -> str:
    """The first test that fails with the fault in the copy `source` of the sources; "" for none."""
    path = source / "demask" / fault.file
    text = path.read_text()
    if fault.line not in text:
        raise LookupError(f"{fault.file} has no such line: {fault.line}")
    path.write_text(text.replace(fault.line, fault.wrong))
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        stale.unlink()  # its time may be that of the changed file
    result = source / "result"
    result.write_text("")
    try:
        child = os.fork()
        if not child:
            try:
                os.setsid()
                run_tests(source, fault.tests, result)
            except BaseException:
                result.write_text(traceback.format_exc())
            os._exit(4)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what its tests started
    finally:
        path.write_text(text)
    if status > 0:
        raise RuntimeError(f"the tests of {fault.name} did not run: {result.read_text()}")
    return f"the tests ended by signal {-status}" if status else result.read_text()


def main(arguments: argparse.Namespace) -> int:
    """Print what each fault makes fail; the exit status."""
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    chosen, status = selected(arguments), 0
    print(f"{len(chosen)} of {len(FAULTS)} faults", flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(source, quiet=2)
        for fault in chosen:
            before = os.times()
            start = time.monotonic()
            try:
                test = caught(fault, source)
            except LookupError as error:
                print(f"{fault.name:50} {error}", flush=True)
                status = 2
                continue
            after = os.times()
            used = after.children_user + after.children_system
            used -= before.children_user + before.children_system
            print(
                f"{fault.name:50} {test or 'MISSED'}  ({used:.0f} s of processor time, "
                f"{time.monotonic() - start:.0f} s)",
                flush=True,
            )
            status = status or int(not test)
            results = read_results()
            results[fault.name] = {"test": test, "seconds": round(used, 1), "commit": commit}
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return status


def read_results() -> dict[str, dict]:
    """The results so far, by name of the fault."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def page() -> str:
    """The results as a page."""
    results = {f.name: r for f in FAULTS if (r := read_results().get(f.name))}
    files = {f.name: f.file for f in FAULTS}
    missed = [name for name, result in results.items() if not result["test"]]
    parts = Counter(f.file.partition("/")[0].removesuffix(".py") for f in FAULTS)
    runs = Counter(result["commit"] for result in results.values())
    lines = [
        "# Planted faults",
        "",
        "Each is one changed line in a copy of `src/demask`; a test of CI must fail. The list is",
        "in `tests/mutants`. `make mutants` runs all, `make nightly` 20 an evening, in turn. This",
        "page is written by `python -m mutants --page FILE` in `tests`.",
        "",
        f"{len(FAULTS)} faults, {len(results)} run, {len(results) - len(missed)} seen, "
        f"{len(missed)} missed; commits: {', '.join(f'{c} ({n})' for c, n in runs.items())}.",
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"{platform.system()}; Python {platform.python_version()}, torch {version('torch')}, "
        f"pytest {version('pytest')}.",
        "",
        "| part | faults | run | missed |",
        "| --- | --- | --- | --- |",
    ]
    for part, count in parts.most_common():
        own = [n for n in results if files[n].partition("/")[0].removesuffix(".py") == part]
        lines.append(f"| {part} | {count} | {len(own)} | {sum(n in missed for n in own)} |")
    lines += ["", "| fault | seen first by | seconds of processor time |", "| --- | --- | --- |"]
    for name, result in results.items():
        test = result["test"].rpartition("/")[2].partition("[")[0].replace("::", ": ")
        lines.append(f"| {name} | {test or '**missed**'} | {result['seconds']:.0f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="parts of names")
    parser.add_argument("--shard", default="1/1", metavar="K/N")
    parser.add_argument("--count", type=int, metavar="N", help="how many, in turn")
    parser.add_argument("--evening", type=int, default=int(time.time() // 86400), metavar="N")
    parser.add_argument("--page", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.page is not None:
        options.page.write_text(page())
    else:
        sys.exit(main(options))
