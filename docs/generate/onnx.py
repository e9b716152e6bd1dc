"""docs/onnx-ops.md, from the table of ONNX ops and the ONNX package's node tests, which are counted
and not run."""

from __future__ import annotations

import textwrap
from collections import Counter
from fnmatch import fnmatchcase

import onnx

import conformance
from demask.files.onnx import ops
from demask.files.onnx.op_functions import Ops
from demask.files.onnx.ops import ENTRIES
from docs.generate import DOCS

PATH = DOCS / "onnx-ops.md"
ELSEWHERE = {("", "Constant"): "plan"}  # no function: its value is known before anything runs
HEAD = """# ONNX: ops and node tests

What the [ONNX reader](onnx.md) has a function for. Made by `python -m docs onnx`, as a test
checks. Counts are those of onnx {version}, whose newest op set is {opset}.

"""
TESTS = """
These are the tests that the ONNX package brings for each op. All are run by
[test_onnx_nodes.py](../tests/files/onnx/read/test_onnx_nodes.py); those with float32 alone go on
through `demask()`, back into a file and through ONNX Runtime in
[test_onnx_engine.py](../tests/files/onnx/write/test_onnx_engine.py). Those that fail are known; on
other processors some of them pass:
"""
OPS = """
{count} ops, one PyTorch function each, in a file below `demask/files/onnx/ops`; those in `reference`
are run by onnx's reference implementation, and cannot be captured. *node tests*: how many of the op's
pass, in its plain form and written out as the function that ONNX defines it by.
{untested} ops have none of their own. Ops of ONNX without a function, which are refused:
{missing}.
"""


def files() -> dict[tuple[str, str], str]:
    """The file of each op's entry, below demask/files/onnx/ops."""
    modules = [(name, module) for name, module in vars(ops).items() if hasattr(module, "OPS")]
    homes = {key: name for name, module in modules for key in module.OPS.entries}
    if homes.keys() != ENTRIES.keys() or not all(isinstance(m.OPS, Ops) for _, m in modules):
        raise ValueError("expected every entry of the table in one file below ops/")
    return homes | ELSEWHERE


def missing() -> str:
    """Ops of ONNX that have no function, and are not replaced by newer ones."""
    newest = {(s.domain, s.name): s for s in onnx.defs.get_all_schemas()}
    lacking = sorted(k for k in newest.keys() - files().keys() if not newest[k].deprecated)
    return ", ".join(f"`{_name(key)}`" for key in lacking)


def _name(key: tuple[str, str]) -> str:
    return ".".join(filter(None, key))


def table() -> list[str]:
    """One line per op."""
    cases = Counter(case.key for case in conformance.cases())
    passed = Counter(case.key for case in conformance.cases() if not case.expected)
    lines = ["| op | file | node tests |", "| --- | --- | --: |"]
    for key, name in sorted(files().items()):
        cell = f"{passed[key]} of {cases[key]}" if cases[key] else "none"
        lines.append(f"| `{_name(key)}` | {name} | {cell} |")
    return lines


def totals() -> list[str]:
    """How many tests pass, of all and of those with float32."""
    lines = ["| node tests | pass | of | % |", "| --- | --: | --: | --: |"]
    kinds = {
        "all": ("all", "some", "none"),
        "float32 inputs and outputs alone": ("all",),
        "float32 among inputs and outputs": ("all", "some"),
    }
    for title, kind in kinds.items():
        chosen = [case for case in conformance.cases() if case.float32 in kind]
        good = sum(not case.expected for case in chosen)
        lines.append(f"| {title} | {good} | {len(chosen)} | {100 * good / len(chosen):.1f} |")
    return lines


def expected() -> list[str]:
    """The tests that may fail, with why: a line per reason."""
    lines = []
    for why in dict.fromkeys(conformance.EXPECTED.values()):
        patterns = [names for names, reason in conformance.EXPECTED.items() if reason == why]
        count = sum(any(fnmatchcase(case.name, names) for names in patterns) for case in conformance.cases())
        lines.append(f"- {', '.join(f'`{names}`' for names in patterns)} ({count} tests). {why}")
    return lines


def page() -> str:
    """The text of the page."""
    tested = {case.key for case in conformance.cases()}
    untested = len(files().keys() - tested)
    head = HEAD.format(version=onnx.__version__, opset=onnx.defs.onnx_opset_version())
    parts = [
        head,
        "## Node tests\n",
        *totals(),
        TESTS,
        *expected(),
        "\n## Ops",
        OPS.format(count=len(files()), untested=untested, missing=textwrap.fill(missing(), 98)),
        *table(),
    ]
    return "\n".join(parts) + "\n"
