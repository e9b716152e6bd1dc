"""docs/nightly.md, from what `make nightly` left in build/nightly.

One file per run (`1-of-6.xml`, in JUnit's format), with its commit (`1-of-6.commit`).
Files named `again*.xml` are of tests that were run again, at a later commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.common.ledger import commit, describe, markdown
from docs.generate import DOCS, ROOT

RUNS = ROOT / "build" / "nightly"
PATH = DOCS / "nightly.md"

HEAD = """# The slow suites, run to their end

`make nightly SHARD=k/n` runs a part of the tests that take too long for every push: all networks of
torchvision, transformers' architectures, pretrained files, thousands of random networks (also of
another generator, where there is `../shared/fuzz`), every node test of ONNX, both laws on many
draws, the GPU kernels in an interpreter, the cases that had no turn for this commit; then a part of
20 [planted faults](mutants.md). Written by `python -m docs nightly` from the files that it
writes.

"""


@dataclass(frozen=True, slots=True)
class Test:
    """One test of a run. outcome: passed, failed or skipped; reason: its first line."""

    file: str
    name: str
    outcome: str
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class Run:
    """A shard, or tests that were run again."""

    name: str
    commit: str
    day: str
    seconds: float
    tests: tuple[Test, ...]

    def count(self, outcome: str) -> int:
        return sum(test.outcome == outcome for test in self.tests)


def read_runs(folder: Path) -> list[Run]:
    """All runs of a folder, in the order of their names."""
    return [_run(path) for path in sorted(folder.glob("*.xml"))]


def _run(path: Path) -> Run:
    suite = ElementTree.parse(path).getroot()[0]
    commit = path.with_suffix(".commit")
    return Run(
        path.stem.replace("-of-", "/"),
        commit.read_text().strip() if commit.exists() else "",
        suite.attrib["timestamp"].partition("T")[0],
        float(suite.attrib["time"]),
        tuple(_tests(suite)),
    )


def _tests(suite: ElementTree.Element) -> Iterator[Test]:
    for case in suite.iter("testcase"):
        outcome, reason = "passed", ""
        for part in case:
            if part.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if part.tag == "skipped" else "failed"
                reason = (part.get("message") or "").strip().partition("\n")[0]
        file = case.attrib["classname"].rpartition(".")[2]
        seconds = float(case.attrib["time"])
        yield Test(file, case.attrib["name"], outcome, seconds, reason)


def page() -> str:
    """The page of the documentation."""
    runs = read_runs(RUNS)
    shards = [run for run in runs if not run.name.startswith("again")]
    again = {(t.file, t.name): (run, t) for run in runs if run not in shards for t in run.tests}
    text = HEAD + f"{describe()}, commit {commit()}; two tests at a time.\n\n## Shards\n\n"
    if missing := _missing(shards):
        text += f"Not run to their end since tests are dealt out anew: {missing}.\n\n"
    head = ("shard", "commit", "day", "tests", "passed", "failed", "skipped", "minutes")
    text += markdown(head, [_shard(run) for run in shards]) + "\n\n## Failures\n\n"
    failed = [(run, t) for run in shards for t in run.tests if t.outcome == "failed"]
    rows = [[f"`{t.file}`: {_short(t.name, 90)}", _short(t.reason, 110), _end(again, t)] for _, t in failed]
    text += markdown(("test", "failed with", "run again"), rows) if rows else "None."
    text += "\n\n## Files\n\n"
    head = ("file", "tests", "failed", "skipped", "minutes, all tests")
    return text + markdown(head, list(_files(shards))) + "\n"


def _missing(shards: list[Run]) -> str:
    """The shards that there is no report of."""
    names = {run.name for run in shards}
    counts = {int(name.partition("/")[2]) for name in names}
    whole = [f"{k}/{count}" for count in sorted(counts) for k in range(1, count + 1)]
    return ", ".join(name for name in whole if name not in names)


def _shard(run: Run) -> list[str]:
    counts = [str(run.count(outcome)) for outcome in ("passed", "failed", "skipped")]
    day = [run.name, run.commit, run.day, str(len(run.tests))]
    return [*day, *counts, f"{run.seconds / 60:.0f}"]


def _end(again: dict[tuple[str, str], tuple[Run, Test]], test: Test) -> str:
    """How a failed test ended when it was run again."""
    if (test.file, test.name) not in again:
        return "no"
    run, later = again[test.file, test.name]
    return f"{later.outcome} at {run.commit}"


def _files(shards: list[Run]) -> Iterator[list[str]]:
    tests = [test for run in shards for test in run.tests]
    seconds: Counter[str] = Counter()
    for test in tests:
        seconds[test.file] += test.seconds  # type: ignore[assignment]
    for file, total in seconds.most_common():
        mine = [test.outcome for test in tests if test.file == file]
        counts = [str(mine.count(outcome)) for outcome in ("failed", "skipped")]
        yield [f"`{file}`", str(len(mine)), *counts, f"{total / 60:.1f}"]


def _short(text: str, most: int) -> str:
    text = text.replace("|", "/").replace("\n", " ")
    return text if len(text) <= most else f"{text[:most]}…"
