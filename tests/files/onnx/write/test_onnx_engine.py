"""The ONNX package's node tests through the whole of demask: read, demasked, written, run.

Cases: those whose inputs and outputs are float32 tensors alone. At each stage one is *exact*;
*refused* (by a DemaskError), as it is and with its numbers as constants; *lacking* (ONNX Runtime
has no kernel); *wrong*; or *crashed* by any other error. `KNOWN` lists all that are not exact.
`python tests/files/onnx/write/test_onnx_engine.py LSTM GRU` prints and counts what becomes of some
ops' cases, without names of all.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import demask
from demask.errors import DemaskError
from demask.files.onnx.module import OnnxModule
from demask.files.onnx.read.reader import parse_model
from demask.files.onnx.write.writer import proto_of, serialized

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from conformance import Case, cases, compare, to_torch  # noqa: E402

PARTS, SAMPLE, WRITTEN = 16, 20, 5
DRAWS = 2
RUNTIME = 1e-5  # of the largest output: 84 units in the last place, for sums in another order
#: by stage, kind and name (with `*`), why a case may come through no further
KNOWN: Mapping[tuple[str, str, str], str] = {
    ("run", "wrong", "test_mod_float_edge_cases_fmod_0_float32"): "torch.onnx writes a remainder as"
    " a division, of which an infinite divisor leaves NaN; exactness is for finite numbers",
    ("demask", "refused", "test_range_float_type_positive_delta*"): "how much comes out depends on"
    " the value of an input",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case at a stage (demask, write, run): exact, refused, lacking, wrong or
    crashed."""

    case: str
    stage: str
    kind: str
    words: str = ""

    @property
    def listed(self) -> bool:
        """Is it exact, or does KNOWN say why not?"""
        mine = [names for stage, kind, names in KNOWN if (stage, kind) == (self.stage, self.kind)]
        return self.kind == "exact" or any(fnmatchcase(self.case, names) for names in mine)

    def __str__(self) -> str:
        return f"{self.case}: {self.kind} ({self.stage}): {' '.join(self.words.split())[:300]}"


@cache
def chosen() -> tuple[Case, ...]:
    """The cases."""
    return tuple(case for case in cases() if case.float32 == "all" and not case.expected)


def outcomes(case: Case) -> Iterator[Outcome]:
    """What becomes of a case, stage by stage, up to the first that is not exact."""
    stages = _stages(case)
    first = next(stages)
    if first.kind == "refused" and (other := _with_constants(case)) is not None:
        yield from _stages(other)
        return
    yield first
    yield from stages


def _with_constants(case: Case) -> Case | None:
    """The case with inputs behind the first that have no axes or one as constants, which they are
    in networks (scales of Resize, bounds of Range); None where it has none."""
    fixed = [k for k, value in enumerate(case.data[0][0]) if k and np.ndim(value) < 2]
    return _fixed(case, {k: case.data[0][0][k] for k in fixed}) if fixed else None


def _fixed(case: Case, values: Mapping[int, Any]) -> Case:
    """The case with constants in place of some inputs."""
    model, (given, expected) = onnx.ModelProto(), case.data[0]
    model.CopyFrom(case.model)
    ports = list(model.graph.input)
    for k in sorted(values, reverse=True):
        model.graph.initializer.append(onnx.numpy_helper.from_array(values[k], ports[k].name))
        del model.graph.input[k]
    free = [value for k, value in enumerate(given) if k not in values]
    return replace(case, model=model, data=[(free, expected)])


def masked(case: Case, axis: int) -> Case | None:
    """The case with all inputs but the first as constants, every second slice of which is zero, and
    what the module makes then; None where none has such an axis, or zeros make no sense (scales of
    Resize)."""
    values, cut = {}, False
    for k, value in enumerate(case.data[0][0][1:], 1):
        values[k] = np.array(value)
        if values[k].ndim > axis and values[k].shape[axis] > 1:
            np.moveaxis(values[k], axis, 0)[::2] = 0
            cut = True
    if not cut:
        return None
    made = _fixed(case, values)
    ((given,), _), *_ = made.data
    try:
        outs = OnnxModule(parse_model(made.model, Path()))(to_torch(given))
    except DemaskError:
        return None
    outs = [outs] if isinstance(outs, Tensor) else outs
    return replace(made, data=[([given], [out.detach().numpy() for out in outs])])


def _stages(case: Case) -> Iterator[Outcome]:
    module = OnnxModule(parse_model(case.model, Path()))
    (given, expected), *_ = case.data
    args, wanted = [tuple(map(to_torch, values)) for values in (given, expected)]
    steps: dict[str, Callable[[Any], Any]] = {
        "demask": lambda _: demask.demask(module, args),
        "write": lambda slim: serialized(proto_of(slim)),
        "run": lambda data: _run(data, args),
    }
    checks: dict[str, Callable[[Any], str | None]] = {
        "demask": lambda slim: _difference(slim(*args), wanted, case) or _on_draws(module, slim, args, case),
        "run": lambda made: _difference(made, wanted, _rounded(case, wanted)),
    }
    made = None
    for stage, step in steps.items():
        try:
            made = step(made)
        except Exception as error:
            yield Outcome(case.name, stage, _kind(error), f"{type(error).__name__}: {error}")
            return
        found = checks[stage](made) if stage in checks else None
        yield Outcome(case.name, stage, "wrong" if found else "exact", found or "")
        if found:
            return


def _kind(error: Exception) -> str:
    if isinstance(error, DemaskError):
        return "refused"
    lacking = isinstance(error, ort.capi.onnxruntime_pybind11_state.NotImplemented)
    return "lacking" if lacking else "crashed"


def _run(data: bytes, args: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs in ONNX Runtime."""
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    feed = {p.name: t.numpy() for p, t in zip(session.get_inputs(), args, strict=True)}
    return tuple(torch.from_numpy(np.asarray(value)) for value in session.run(None, feed))


def _rounded(case: Case, wanted: Sequence[Tensor]) -> Case:
    """The case with the tolerance that another runtime needs."""
    finite = [t[t.isfinite()].abs() for t in wanted]
    return replace(case, atol=case.atol + RUNTIME * max(float(t.max()) for t in finite if len(t)))


def _on_draws(module: nn.Module, slim: nn.Module, args: Sequence[Tensor], case: Case) -> str | None:
    """How the two differ on other inputs of the same sizes."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(DRAWS):
        drawn = [torch.randn(t.shape, generator=draw) for t in args]
        if found := _difference(slim(*drawn), module(*drawn), case):
            return found
    return None


def _difference(made: Any, wanted: Any, case: Case) -> str | None:
    made, wanted = ([v] if isinstance(v, Tensor) else list(v) for v in (made, wanted))
    close = {"rtol": case.rtol, "atol": case.atol, "equal_nan": True}
    try:
        torch.testing.assert_close(made, wanted, **close)
    except AssertionError as error:
        return str(error)
    return None


def unwanted(some: Iterable[Case], stages: int = 3) -> list[str]:
    """What became of cases in the first stages, where it should not."""
    torch.manual_seed(0)
    found = [each for case in some for each in islice(outcomes(case), stages)]
    return [str(each) for each in found if not each.listed]


def sample(count: int) -> tuple[Case, ...]:
    """About so many cases, of all ops' alike."""
    return chosen()[:: len(chosen()) // count]


@pytest.mark.parametrize("count, stages", [(SAMPLE, 1), (WRITTEN, 3)])
def test_a_sample_of_node_tests_comes_through(count, stages):
    found = unwanted(sample(count), stages)
    assert not found, "\n".join(found)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_every_node_test_comes_through(part):
    found = unwanted(chosen()[part::PARTS])
    assert not found, "\n".join(found)


@pytest.mark.nightly
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("part", range(4))
def test_every_node_test_with_zeros_in_its_weights_comes_through(part, axis):
    some = [m for case in chosen()[part::4] if (m := masked(case, axis)) is not None]
    found = unwanted(some, 1)
    assert len(some) > 50
    assert not found, "\n".join(found)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(4))
def test_node_tests_of_other_types_are_exact_or_refused(part):
    others = [case for case in cases() if case.float32 != "all" and not case.expected]
    found = [words for case in others[part::4] if (words := _fault(case)) is not None]
    assert not found, "\n".join(found)


def _fault(case: Case) -> str | None:
    """What is wrong with a case demasked; None where it is exact or refused."""
    module = OnnxModule(parse_model(case.model, Path()))
    (given, expected), *_ = case.data
    args = tuple(map(to_torch, given))
    try:
        made = demask.demask(module, args)(*args)
        made = made if isinstance(made, tuple) else (made,)
        for k, (a, b) in enumerate(zip(made, expected, strict=True)):
            compare(f"output {k}", a, b, case)
    except DemaskError:
        return None
    except Exception as error:
        return f"{case.name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


def one(name: str) -> Case:
    return next(case for case in cases() if case.name == name)


@pytest.mark.parametrize("stage", ["demask", "run"])
def test_a_wrong_output_is_found(monkeypatch, stage):
    """At the stage where it is wrong."""
    if stage == "demask":
        monkeypatch.setattr(demask, "demask", lambda module, args: nn.Identity())
    else:
        monkeypatch.setattr(sys.modules[__name__], "_run", lambda data, args: args)
    *before, last = outcomes(one("test_sigmoid"))
    assert (last.stage, last.kind) == (stage, "wrong")
    assert {each.kind for each in before} <= {"exact"}
    assert unwanted([one("test_sigmoid")])


@pytest.mark.parametrize("error, kind", [(demask.BadInput("no"), "refused"), (RuntimeError("no"), "crashed")])
def test_an_error_that_is_not_listed_is_found(monkeypatch, error, kind):
    def planted(module, args):
        raise error

    monkeypatch.setattr(demask, "demask", planted)
    assert [each.kind for each in outcomes(one("test_relu"))] == [kind]
    assert unwanted([one("test_relu")])
    monkeypatch.setitem(KNOWN, ("demask", "refused", "test_relu"), "planted")
    assert bool(unwanted([one("test_relu")])) == (kind == "crashed")


def main(names: Sequence[str]) -> None:
    """Print what becomes of cases, and how many of them come how far."""
    counts: Counter[tuple[str, str]] = Counter()
    for case in chosen():
        if names and case.op not in names and case.name not in names:
            continue
        for outcome in outcomes(case):
            counts[outcome.stage, outcome.kind] += 1
            if outcome.kind != "exact":
                print(outcome, flush=True)
    for (stage, kind), count in counts.items():
        print(f"{stage}, {kind}: {count}")


if __name__ == "__main__":
    main(sys.argv[1:])
