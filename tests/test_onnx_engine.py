"""The ONNX package's node tests through the whole of demask: read, demasked, written, run.

Each outcome is one of `exact`, `refused` (a DemaskError, which tells why), and what must not be:
`wrong`, or any other error. Cases: those whose inputs and outputs are float32 tensors.
"""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from conformance import Case, cases, to_torch

import demask
from demask.errors import DemaskError
from demask.files.onnx.module import OnnxModule
from demask.files.onnx.read import parsed
from demask.files.onnx.write import proto_of, serialized

PARTS = 16  # for several workers
SAMPLE = 40
DRAWS = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case at one stage: `demask`, `write` or `runtime`."""

    case: str
    stage: str
    kind: str  # exact, refused, lacking (the runtime has no kernel), wrong, crashed
    words: str = ""

    def __str__(self) -> str:
        return f"{self.case}: {self.kind} ({self.stage}) {self.words}"


@cache
def chosen() -> tuple[Case, ...]:
    return tuple(case for case in cases() if case.float32 == "all" and not case.expected)


def outcomes(case: Case) -> Iterator[Outcome]:
    """What becomes of one case, stage by stage; it ends where one is not exact."""
    for stage, kind, words in _stages(case):
        yield Outcome(case.name, stage, kind, " ".join(words.split())[:200])


def _stages(case: Case) -> Iterator[tuple[str, str, str]]:
    module = OnnxModule(parsed(case.model, Path()))
    (given, expected), *_ = case.data
    args = tuple(map(to_torch, given))
    try:
        slim = demask.demask(module, args)
    except Exception as error:
        yield "demask", *_error(error)
        return
    found = _compared(module, slim, args, expected, case)
    yield "demask", "wrong" if found else "exact", found or ""
    try:
        data = serialized(proto_of(slim))
    except Exception as error:
        yield "write", *_error(error)
        return
    yield "write", "exact", ""
    yield "runtime", *_run(data, args, expected, case)


def _error(error: Exception) -> tuple[str, str]:
    kind = "refused" if isinstance(error, DemaskError) else "crashed"
    return kind, f"{type(error).__name__}: {error}"


def _compared(module, slim, args: Sequence, expected: Sequence, case: Case) -> str | None:
    """How the slim network differs: from what the case expects, or, on draws, from the module."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        found = _difference(_tuple(slim(*args)), list(map(to_torch, expected)), case)
        for _ in range(DRAWS):
            drawn = [torch.randn(t.shape, generator=draw) for t in args]
            found = found or _difference(_tuple(slim(*drawn)), _tuple(module(*drawn)), case)
    return found


def _tuple(made) -> tuple:
    return made if isinstance(made, tuple) else (made,)


def _difference(made: Sequence, expected: Sequence, case: Case) -> str | None:
    try:
        torch.testing.assert_close(
            list(made), list(expected), rtol=case.rtol, atol=case.atol, equal_nan=True
        )
    except (AssertionError, ValueError) as error:
        return str(error)
    return None


def _run(data: bytes, args: Sequence, expected: Sequence, case: Case) -> tuple[str, str]:
    """What ONNX Runtime makes of the network written."""
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    try:
        session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        lacking = type(error).__name__ == "NotImplemented"
        return "lacking" if lacking else "crashed", f"{type(error).__name__}: {error}"
    feed = {i.name: t.numpy() for i, t in zip(session.get_inputs(), args, strict=True)}
    try:
        made = [torch.from_numpy(np.asarray(v)) for v in session.run(None, feed)]
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {error}"
    found = _difference(made, list(map(to_torch, expected)), case)
    return ("wrong", found) if found else ("exact", "")


def bad(some: Sequence[Case]) -> list[str]:
    """The outcomes that must not be."""
    torch.manual_seed(0)
    found = [outcome for case in some for outcome in outcomes(case)]
    return [str(outcome) for outcome in found if outcome.kind in ("wrong", "crashed")]


@pytest.mark.parametrize("part", range(4))
def test_node_tests_come_through_demask_and_back_a_sample(part):
    some = chosen()[:: len(chosen()) // SAMPLE][part::4]
    assert not bad(some)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_node_tests_come_through_demask_and_back(part):
    assert not bad(chosen()[part::PARTS])


if __name__ == "__main__":
    import sys
    import time

    names = sys.argv[1:]
    count: Counter[tuple[str, str]] = Counter()
    start = time.time()
    for case in chosen():
        if names and case.op not in names and case.name not in names:
            continue
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for outcome in outcomes(case):
                count[outcome.stage, outcome.kind] += 1
                if outcome.kind != "exact":
                    print(outcome, flush=True)
        for w in {str(w.message)[:150] for w in seen}:
            print("   WARN", case.name, w, flush=True)
    print(dict(count), time.time() - start)
