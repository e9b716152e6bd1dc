"""A network as the ONNX file that a runtime runs fastest: each candidate checked, then measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.errors import BadInput, DemaskError, Mismatch
from demask.failures import public
from demask.files.onnx.write import copy_file, proto_of, remembering, save, serialized
from demask.graph.examples import examples
from demask.graph.program import Program
from demask.graph.provenance import GIVEN, WHOLE, Decision, Provenance
from demask.graph.result import Demasked, build
from demask.machine.compare import ALLOWED, PAIRS
from demask.machine.threads import checked_threads
from demask.machine.timing import sampled
from demask.ops import TABLE, Table
from demask.optimize import remembered, speed_of, unchanged
from demask.shrink.demask import given as captured
from demask.shrink.demask import reduced
from demask.tune.runtime import for_runtime

WIDTH = 8  # widths are rounded up to it where nothing can be measured
MULTIPLES = (1, 4, 16)  # tried beside it where ONNX Runtime is there to measure
ROUNDS, SECONDS = 15, 10.0
DRAWS = 3
UNITS = 84  # in the last place, of the largest output: 1e-5 in float32
# Steps of an 8-bit value, where values are rounded: a sum halfway between two goes to either, and
# sums in another order are a little off.
FLIPS = 2
Tell = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Deployed:
    """What was written. slim: the network in its form, with its provenance (sizes, what was
    measured). error: the largest difference from the network given, both in ONNX Runtime, relative
    to the largest output; None where no runtime is there to tell."""

    slim: Demasked
    error: float | None


@public
def deploy(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...],
    path: str | os.PathLike[str],
    kwargs: Mapping[str, Any] | None = None,
    *,
    file: str | os.PathLike[str] | None = None,
    dynamic_shapes: Any = None,
    minimal: bool = False,
    threads: int | None = None,
    tolerance: float | None = None,
    progress: Tell = lambda words: None,
    table: Table | None = None,
) -> Deployed:
    """Demask a network and write it to `path` as the ONNX file that runs fastest.

    With ONNX Runtime installed, candidates (widths in multiples of 1, 4, 8, 16; constants that
    enter padded windows computed, or added as maps) are compared with the network given and called
    beside it in turns; where none is faster, the network is written as it was. Without it, widths
    are rounded up to 8. Outputs may differ by 1e-5 of the largest (the rounding of sums in another
    order), in a quantized network by 2 steps (where a sum falls on the edge between two).
    minimal: the smallest candidate, whatever it takes. args, kwargs: example inputs, of the sizes
    to be fast for. file: the ONNX file that `model` came from. threads: the runtime's. table:
    the op table, as `demask.demask` takes it. tolerance:
    the largest difference of an output that is allowed, relative to its largest value; None for the
    differences named above.
    Raises NotExportable, BadInput, or Mismatch where no candidate computes the same.
    """
    if tolerance is not None and not 0 < tolerance < float("inf"):
        raise BadInput(f"expected tolerance=None or a number above 0, got {tolerance}")
    progress("capturing")
    args, named = examples((model,), args, dict(kwargs or {}))
    inputs = [t for t in pytree.tree_leaves((args, named)) if isinstance(t, Tensor)]
    program = captured(model, args, named, dynamic_shapes)
    source = serialized(proto_of(remembering(program))) if file is None else os.fspath(file)
    race = _Race(source, inputs, threads, tolerance or _steps(program))
    forms = _Forms(program, race, progress, TABLE if table is None else table)
    name = _winner(forms, race, minimal, progress)
    if name is None:
        slim = build(program, forms.told(unchanged(forms.smaller(True)[1]))).eval()
        progress("writing the network as it was")
        copy_file(race.given, path)
        return Deployed(slim, 0.0)
    slim, model_proto, error = forms.made[name]
    progress("writing")
    save(model_proto, path)
    slim.demasked = forms.told(slim.demasked)
    return Deployed(slim, error)


def _winner(forms: _Forms, race: _Race, minimal: bool, progress: Tell) -> str | None:
    """The form to write; None for the network as it was."""
    if minimal or race.runtime is None:
        form = (True, 1) if minimal else (False, WIDTH)
        forms.enter(*form)
        forms.check()
        return next(iter(forms.made))
    kinds = (False, True) if forms.has_borders else (True,)
    for borders in kinds:
        forms.enter(borders, WIDTH)
    forms.check()
    progress("measuring in ONNX Runtime")
    found = race.rounds(list(forms.made), ROUNDS, SECONDS)
    first = min(forms.made, key=lambda name: median(found[name]))
    for multiple in MULTIPLES:
        forms.enter(forms.borders[first], multiple)
    progress("measuring in ONNX Runtime")
    found = race.rounds(list(forms.made), ROUNDS, SECONDS)
    whole = {name: median(taken) for name, taken in found.items()}
    best = min(forms.made, key=whole.__getitem__)
    progress("measuring beside the network as given")
    taken = race.rounds([best], PAIRS, float("inf"))
    speed = replace(speed_of(taken[GIVEN], taken[best]), threads=race.threads)
    chosen = best if speed.least >= ALLOWED else GIVEN
    whole = {GIVEN: speed.given[0], **whole}
    forms.measured = {"decisions": (Decision(WHOLE, chosen, whole),), "speed": speed}
    if chosen == best:
        return best
    forms.notes.append(
        f"the fastest form ({best}) may be slower in ONNX Runtime than the network as given (ratio "
        f"{speed.ratio:.2f}, at least {speed.least:.2f}): that was written, unchanged; --minimal "
        "writes the smallest"
    )
    return None


@dataclass(slots=True)
class _Forms:
    """The candidates. made: by name the network, its `onnx_ir.Model`, its error."""

    program: Program
    race: _Race
    progress: Tell
    table: Table
    made: dict[str, tuple[Demasked, Any, float | None]] = field(default_factory=dict)
    borders: dict[str, bool] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    reductions: dict[bool, tuple[Program, Provenance]] = field(default_factory=dict)
    failure: DemaskError | None = None

    def smaller(self, borders: bool) -> tuple[Program, Provenance]:
        """The demasked program, with border maps or without."""
        if borders not in self.reductions:
            self.progress("removing what is masked")
            self.reductions[borders] = reduced(self.program, self.table, borders=borders)
        return self.reductions[borders]

    @property
    def has_borders(self) -> bool:
        return "border map" in self.smaller(True)[1].effects

    def enter(self, borders: bool, multiple: int) -> None:
        """Make one candidate, and let it take part if it computes the same."""
        borders = borders or not self.has_borders
        name = "minimal widths" if multiple == 1 else f"widths in multiples of {multiple}"
        if self.has_borders:
            name += ", border maps" if borders else ", constants computed"
        self.progress(f"writing and checking: {name}")
        program, provenance = self.smaller(borders)
        form = for_runtime(program, multiple)
        try:
            slim = build(form, remembered(form, provenance)).eval()
            model = proto_of(slim)
            error = self.race.enter(name, serialized(model))
        except DemaskError as error:
            self.notes.append(f"{name} is left out: {error}")
            self.failure = error
            return
        self.made[name], self.borders[name] = (slim, model, error), borders

    def check(self) -> None:
        """Raise what stopped the candidates, if none is left."""
        if not self.made and self.failure is not None:
            raise self.failure

    def told(self, provenance: Provenance) -> Provenance:
        """A provenance that tells what was measured, and what was left out."""
        return replace(provenance, notes=(*provenance.notes, *self.notes), **self.measured)


def _steps(program: Program) -> float | None:
    """The difference that the coarsest values of a quantized network allow; None for others."""
    target = torch.ops.demask.quantize.default
    calls = program.graph.find_nodes(op="call_function", target=target)
    sizes = [node.meta["val"].dtype.itemsize for node in calls]
    return FLIPS / (2 ** (8 * min(sizes)) - 1) if sizes else None


class _Race:
    """Networks in ONNX Runtime, called in turns with the same inputs. given: a path, or bytes."""

    def __init__(
        self,
        given: str | bytes,
        inputs: Sequence[Tensor],
        threads: int | None,
        tolerance: float | None,
    ):
        self.runtime, self.given, self.tolerance = _runtime(), given, tolerance
        self.threads = checked_threads(threads)
        self.sessions: dict[str, Any] = {}
        if self.runtime is None:
            return
        first = self._session(given)
        self.sessions["given"] = first
        self.names = [port.name for port in first.get_inputs()]
        self.draws = [self._feed(inputs, seed) for seed in range(DRAWS)]
        self.expected = [first.run(None, feed) for feed in self.draws]

    def _session(self, model: str | bytes) -> Any:
        options = self.runtime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = self.threads, 3
        # Threads of one session that wait by spinning would take the cores from the next one.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            return self.runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its classes are many, and share no base
            raise BadInput(f"ONNX Runtime does not take the network: {_first(error)}") from error

    def _feed(self, inputs: Sequence[Tensor], seed: int) -> Mapping[str, np.ndarray]:
        """Inputs for one call: the example, then as many seeded normal numbers."""
        generator = torch.Generator().manual_seed(seed)
        feed = {}
        for name, value in zip(self.names, inputs, strict=True):
            if seed and value.is_floating_point():
                value = torch.randn(value.shape, generator=generator).to(value.dtype)
            feed[name] = value.detach().cpu().numpy()
        return feed

    def enter(self, name: str, data: bytes) -> float | None:
        """Let a network take part; its error. Mismatch where it computes something else."""
        if self.runtime is None:
            return None
        session = self._session(data)
        errors = [0.0]
        for feed, expected in zip(self.draws, self.expected, strict=True):
            for k, (a, b) in enumerate(zip(expected, session.run(None, feed), strict=True)):
                errors.append(_error(k, a, b, self.tolerance))
        self.sessions[name] = session
        return max(errors)

    def rounds(self, names: Sequence[str], pairs: int, seconds: float) -> dict[str, list[float]]:
        """The seconds of each round, of these and the network given."""
        feed = self.draws[0]
        calls = {name: self._call(self.sessions[name], feed) for name in ("given", *names)}
        return sampled(calls, pairs, seconds=seconds)

    def _call(self, session: Any, feed: Mapping[str, np.ndarray]) -> Callable[[], Any]:
        return lambda: session.run(None, feed)


def _error(k: int, a: Any, b: Any, tolerance: float | None = None) -> float:
    """How far output k is off, relative to its largest value; Mismatch where it is too far.
    tolerance: what is allowed; None for UNITS in the last place, and equal integers."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        raise Mismatch(f"output {k} is {b.dtype} {b.shape}, expected {a.dtype} {a.shape}")
    if a.dtype.kind != "f" and not (tolerance and a.dtype.kind in "iu" and a.dtype.itemsize < 4):
        if not np.array_equal(a, b):
            raise Mismatch(f"output {k} ({a.dtype}) differs")
        return 0.0
    finite = np.isfinite(a)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        raise Mismatch(f"output {k} has other values that are not finite")
    wide = a[finite].astype(np.float64), b[finite].astype(np.float64)
    if not wide[0].size:
        return 0.0
    gap, largest = float(np.abs(wide[0] - wide[1]).max()), float(np.abs(wide[0]).max())
    error = gap / largest if largest else gap
    if not error <= (tolerance or UNITS * float(np.finfo(a.dtype).eps)):
        raise Mismatch(f"output {k} differs by {error:.2g} relative to its largest value")
    return error


def _runtime() -> Any:
    """The package onnxruntime, None where it is missing."""
    try:
        import onnxruntime
    except ImportError:
        return None
    return onnxruntime


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
