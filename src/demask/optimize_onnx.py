"""A network as the ONNX file that a runtime runs fastest: each candidate checked, then measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.errors import BadInput, DemaskError, Mismatch
from demask.failures import public
from demask.files.atomic_write import check_writable
from demask.files.onnx import from_onnx
from demask.files.onnx.check import Arrays, Draw, Judge, draws, first_line, onnxruntime, session
from demask.files.onnx.write.writer import (
    check_tolerance,
    copy_file,
    judge_of,
    proto_of,
    remembering,
    save,
    serialized,
    size_of,
)
from demask.graph.example_inputs import examples
from demask.graph.program import Program
from demask.graph.provenance import GIVEN, WHOLE, Provenance, TuneDecision
from demask.graph.result.demasked_module import Demasked, build
from demask.machine.benchmark import ALLOWED, PAIRS
from demask.machine.threads import checked_threads
from demask.machine.timing import sampled
from demask.ops import TABLE, Table
from demask.optimize import remembered, unchanged
from demask.shrink.pipeline import given as captured
from demask.shrink.pipeline import reduced
from demask.tune.onnxruntime_candidate import for_runtime
from demask.tune.race import speed_of

WIDTH = 8  # widths are rounded up to it where nothing can be measured
MULTIPLES = (1, 4, 16)  # tried beside it where ONNX Runtime is there to measure
ROUNDS, SECONDS = 15, 10.0
Tell = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Deployed:
    """What was written. slim: the network in its form, with its provenance (sizes, what was
    measured): `demask.report` prints it. error: the largest difference from the network as it was,
    both in ONNX Runtime, relative to the largest output; None where no runtime is installed."""

    slim: Demasked
    error: float | None


@public
def optimize_onnx(
    model: nn.Module | ExportedProgram | str | os.PathLike[str],
    path: str | os.PathLike[str],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    minimal: bool = False,
    threads: int | None = None,
    tolerance: float | None = None,
    table: Table = TABLE,
    progress: Tell = lambda words: None,
) -> Deployed:
    """Demask a network and write it to `path` as the ONNX file that ONNX Runtime runs fastest.

    With ONNX Runtime installed, candidates (widths in multiples of 1, 4, 8, 16; constants that
    enter padded windows computed, or added as maps) are compared with the network as it was, and
    timed in turns with it; where none is faster, or none smaller, the network is written as it was.
    Without ONNX Runtime widths are rounded up to 8, and nothing is compared.

    model: a module, an exported program, or the path of an ONNX file. args, kwargs: example inputs,
    of the sizes to be fast for; a file needs none where its sizes are numbers. dynamic_shapes,
    table: as `demask.demask` takes them. minimal: write the smallest candidate, without timing.
    threads: of the runtime, None for `torch.get_num_threads()`. tolerance: the largest difference
    allowed, relative to the largest value of an output; None for 1e-5, or what rounding alone makes
    of that output where it is more (of a quantized network: two steps). progress: called with a few
    words at each step. Raises NotExportable, BadInput, or Mismatch where no candidate computes the
    same; then nothing is written.

    >>> import torch, demask
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> demask.optimize_onnx(net, "net.onnx", (torch.randn(1, 4),)).error    # doctest: +SKIP
    0.0
    """
    file = model if isinstance(model, str | os.PathLike) else None
    network = from_onnx(model) if isinstance(model, str | os.PathLike) else model
    return deploy(
        network, args, path, kwargs, file=file, dynamic_shapes=dynamic_shapes, minimal=minimal,
        threads=threads, tolerance=tolerance, table=table, progress=progress,
    )  # fmt: skip


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
    table: Table = TABLE,
    progress: Tell = lambda words: None,
) -> Deployed:
    """As `optimize_onnx`, of a network that was read. file: the ONNX file that it came from."""
    check_writable(path)
    check_tolerance(tolerance)
    progress("capturing")
    args, named = examples((model,), args, dict(kwargs or {}))
    inputs = [t for t in pytree.tree_leaves((args, named)) if isinstance(t, Tensor)]
    program = captured(model, args, named, dynamic_shapes)
    whole = remembering(program)
    judge = judge_of(whole, (args, named), tolerance, table)
    source = serialized(proto_of(whole)) if file is None else os.fspath(file)
    race = _SessionRace(source, inputs, threads, judge)
    forms = _Forms(program, race, table, progress)
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


def _winner(forms: _Forms, race: _SessionRace, minimal: bool, progress: Tell) -> str | None:
    """The form to write; None for the network as it was."""
    if minimal or race.runtime is None:
        form = (True, 1) if minimal else (False, WIDTH)
        forms.enter(*form)
        forms.check()
        return next(iter(forms.made), None)
    kinds = (False, True) if forms.has_borders else (True,)
    for borders in kinds:
        forms.enter(borders, WIDTH)
    forms.check()
    if not forms.made:
        return None
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
    forms.measured = {"decisions": (TuneDecision(WHOLE, chosen, whole),), "speed": speed}
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
    race: _SessionRace
    table: Table
    progress: Tell
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
        form = for_runtime(program, self.table, multiple)
        try:
            slim = build(form, remembered(form, provenance, self.table)).eval()
            model = proto_of(slim)
            data = serialized(model)
            if len(data) > size_of(self.race.given):
                self.notes.append(f"{name} is left out: its file is larger than the network's own")
                return
            error = self.race.enter(name, data)
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


class _SessionRace:
    """Networks in ONNX Runtime, called in turns with the same inputs. given: a path, or bytes."""

    def __init__(
        self, given: str | bytes, inputs: Sequence[Tensor], threads: int | None, judge: Judge
    ):
        self.runtime, self.given, self.judge = onnxruntime(), given, judge
        self.threads = checked_threads(threads)
        self.sessions: dict[str, Any] = {}
        if self.runtime is None:
            return
        first = self.sessions["given"] = session(given, self.threads)
        self.names = [port.name for port in first.get_inputs()]
        self.draws = draws(inputs)
        self.expected = [self._outputs(first, draw) for draw in self.draws]

    def _outputs(self, runner: Any, draw: Draw) -> Arrays | None:
        """What a file computes; None where it fails, as a network may on some inputs."""
        feed = {n: x.cpu().numpy() for n, x in zip(self.names, draw.inputs, strict=True)}
        try:
            return runner.run(None, feed)
        except Exception as error:  # its classes are many, and share no base
            if draw is self.draws[0]:
                raise BadInput(f"ONNX Runtime fails on {draw.kind}: {first_line(error)}") from error
            return None

    def enter(self, name: str, data: bytes) -> float | None:
        """Let a network take part; its error. Mismatch where it computes something else."""
        if self.runtime is None:
            return None
        runner, errors = session(data, self.threads), [0.0]
        for draw, expected in zip(self.draws, self.expected, strict=True):
            outputs = None if expected is None else self._outputs(runner, draw)
            if expected is not None and outputs is None:
                raise Mismatch(f"ONNX Runtime fails on {draw.kind}, and not on the network given")
            if expected is not None and outputs is not None:
                errors.append(self.judge.difference(draw, expected, outputs))
        self.sessions[name] = runner
        return max(errors)

    def rounds(self, names: Sequence[str], pairs: int, seconds: float) -> dict[str, list[float]]:
        """The seconds of each round, of these and the network given."""
        example = self.draws[0]
        calls = {name: self._call(self.sessions[name], example) for name in ("given", *names)}
        return sampled(calls, pairs, seconds=seconds)

    def _call(self, runner: Any, draw: Draw) -> Callable[[], Any]:
        feed = {n: x.cpu().numpy() for n, x in zip(self.names, draw.inputs, strict=True)}
        return lambda: runner.run(None, feed)
