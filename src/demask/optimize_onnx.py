"""The ONNX file that ONNX Runtime runs fastest: candidates are checked, then measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.errors import BadInput, DemaskError, Mismatch, NotExportable
from demask.facts.analysis import Analysis
from demask.failures import described, is_strict, public
from demask.files.atomic_write import check_writable
from demask.files.onnx import from_onnx
from demask.files.onnx.check import (
    Arrays,
    Draw,
    OutputComparator,
    draws,
    first_line,
    onnxruntime,
    session,
)
from demask.files.onnx.edit.edit_file import EditedFile, edit_file, save_edited
from demask.files.onnx.edit.names import foreign_nodes
from demask.files.onnx.edit.verdict import Verdict, compare_files
from demask.files.onnx.module import OnnxModule
from demask.files.onnx.read.reader import parse_model, read
from demask.files.onnx.write.writer import (
    as_demasked,
    check_tolerance,
    comparator_of,
    copy_file,
    proto_of,
    save,
    serialized,
    size_of,
    tensor_bytes,
)
from demask.graph.example_inputs import draw_examples
from demask.graph.isolation import in_isolation
from demask.graph.program import Program
from demask.graph.provenance import GIVEN, WHOLE, Provenance, TuneDecision
from demask.graph.result.demasked_module import Demasked, build
from demask.machine.benchmark import ALLOWED, PAIRS
from demask.machine.threads import checked_threads
from demask.machine.timing import sample_seconds
from demask.ops import TABLE, Table
from demask.optimize import optimized_provenance, unchanged_provenance
from demask.shrink.pipeline import capture_program as captured
from demask.shrink.pipeline import shrink_program
from demask.shrink.program_size import measure_program
from demask.tune.onnxruntime_candidate import for_runtime
from demask.tune.race import speed_of

WIDTH = 8  # widths are rounded up to a multiple of it if nothing can be measured
MULTIPLES = (1, 4, 16)  # also measured if ONNX Runtime is installed
ROUNDS, SECONDS = 15, 10.0
EDITED = "the file, edited"
NOISE = 1.05  # an exported network has to be faster or smaller by more than this than the edit
ProgressCallback = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Deployed:
    """The network in the file that `optimize_onnx` wrote.

    Attributes:
        slim: the network as a graph module; its attribute `demasked` is the record for
            `demask.report`. None for an edited file with ops that demask cannot run.
        error: largest difference from the original network, both in ONNX Runtime, relative to the
            largest value of the output; None where nothing here runs the file.
        edited: the file, if it is the original with smaller tensors; None for one that was
            exported, or the original itself.
    """

    slim: Demasked | None
    error: float | None
    edited: EditedFile | None = None


@in_isolation
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
    progress: ProgressCallback = lambda words: None,
) -> Deployed:
    """The demasked network that is written to an ONNX file, the fastest in ONNX Runtime.

    If ONNX Runtime is installed, candidates are compared and timed with the original network. They
    differ in the widths of layers (multiples of 1, 4, 8 or 16 channels) and in the handling of
    constants at padded borders. If none is faster and no larger, the original network is written.
    Without ONNX Runtime, widths are multiples of 8, and nothing is compared. Needs
    `pip install demask[onnx]`.

    An ONNX file is edited: nodes, names, op set and metadata that need not change are copied byte
    for byte, also ops that demask has no function for. Only where that removes nothing, differs or
    is slower is the network exported anew.

    Args:
        model: an `nn.Module`, a `torch.export.ExportedProgram`, or the path of an ONNX file.
        path: name of the file, which is replaced if it exists.
        args: example inputs by position, a tuple such as (x,), of the sizes to tune for. Default:
            (), as for a demasked network or an exported program; an ONNX file needs examples.
        kwargs: example inputs by name, a mapping. Default: None, for no such inputs.
        dynamic_shapes: sizes that may differ from call to call, as for `demask.demask`.
        minimal: whether to write the smallest candidate (multiples of 1) without timing. Default:
            False.
        threads: number of threads of ONNX Runtime, 1 or more, with the limit of `demask.optimize`.
            Default: `torch.get_num_threads()`.
        tolerance: largest allowed difference / largest value of the output, above 0. Default: None,
            for 1e-5 or, if that is larger, the effect of rounding (two steps of a quantized
            output).
        table: the table of ops. Default: `demask.ops.TABLE`.
        progress: function that is called with a short text at each step. Default: does nothing.

    Returns:
        `slim`: the written network, a graph module with the record `demasked`. `error`: largest
        difference from the original / largest value of the output; None without ONNX Runtime.

    Raises:
        BadInput: an argument has a wrong value, the ONNX file cannot be read, `path` cannot be
            written, or a package is not installed.
        RefusedFile: the ONNX file has contents out of bounds, as for `demask.from_onnx`.
        NotExportable: the model cannot be captured or written as ONNX.
        Mismatch: the outputs of all candidates differ from those of the model. No file is written.

    Example:
        >>> import demask, tempfile, torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> net[0].weight.data[:6], net[0].bias.data[:6] = 0, 0  # six units are always zero
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     written = demask.optimize_onnx(
        ...         net, f"{folder}/net.onnx", (torch.ones(1, 4),), minimal=True
        ...     )
        >>> written.slim.demasked.before.parameters, written.slim.demasked.after.parameters
        (58, 16)
    """
    file = model if isinstance(model, str | os.PathLike) else None
    network: Any = model
    if file is not None:
        network = None if foreign_nodes(read(file)) else from_onnx(file)
    return deploy(
        network, args, path, kwargs, file=file, dynamic_shapes=dynamic_shapes, minimal=minimal,
        threads=threads, tolerance=tolerance, table=table, progress=progress,
    )  # fmt: skip


@in_isolation
@public
def deploy(
    model: nn.Module | ExportedProgram | None,
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
    progress: ProgressCallback = lambda words: None,
) -> Deployed:
    """As `optimize_onnx`, for a loaded network. file: the ONNX file that it was read from. model:
    None if demask cannot run the file."""
    check_writable(path)
    check_tolerance(tolerance)
    edit = _Edit()
    if file is not None and not kwargs:
        progress("editing the file")
        edit = _Edit.of(os.fspath(file), args, tolerance, table)
    try:
        if model is None and edit.file is None and edit.failure is None:
            copy_file(os.fspath(file or path), path)
            return Deployed(None, 0.0)
        if model is None:
            raise edit.failure or NotExportable(
                "it has ops that demask has no function for", "the file", "it was edited instead"
            )
        return _deploy(model, args, path, kwargs, file, edit, dynamic_shapes, minimal, threads,
                       tolerance, table, progress)  # fmt: skip
    except DemaskError:
        if edit.file is None:
            raise
        # The network cannot be captured, only parts of it.
        if not minimal and edit.verdict is not None and edit.verdict.error is not None:
            race = _SessionRace(os.fspath(file or path), args, threads, None)
            race.add(EDITED, edit.file.model.SerializeToString())
            progress("measuring against the original network")
            final = race.rounds([EDITED], PAIRS, float("inf"))
            if speed_of(final[GIVEN], final[EDITED]).least < ALLOWED:
                copy_file(race.baseline, path)
                return Deployed(None, 0.0)
        return _write_edit(edit, None, path)


@dataclass(frozen=True, slots=True)
class _Edit:
    """An edited file that computes what the original does; or why there is none."""

    file: EditedFile | None = None
    verdict: Verdict | None = None
    failure: DemaskError | None = None

    @classmethod
    def of(cls, path: str, args: Any, tolerance: float | None, table: Table) -> Self:
        """The edit of a file; none where it has no gain, fails, or computes something else."""
        try:
            edited = edit_file(path, args, table)
            if edited is None:
                return cls()
            data = edited.model.SerializeToString()
            return cls(edited, compare_files(path, data, args, tolerance))
        except DemaskError as error:
            return cls(failure=error)
        except Exception as error:  # a fault of a handler: the file is exported anew
            if is_strict():
                raise
            return cls(failure=BadInput(f"editing failed inside: {described(error)}"))

    @property
    def notes(self) -> tuple[str, ...]:
        """What the report says of it."""
        if self.file is None:
            return (f"the file could not be edited: {self.failure}",) if self.failure else ()
        barriers = [f"{name} stays whole: {reason}" for name, reason in self.file.barriers]
        unchanged = (
            f"{self.file.unchanged} of {self.file.nodes} nodes are the original's, byte for byte"
        )
        return (f"the file was edited: {unchanged}", *barriers)


def _write_edit(edit: _Edit, slim: Demasked | None, path: str | os.PathLike[str]) -> Deployed:
    """Write an edited file."""
    assert edit.file is not None and edit.verdict is not None
    save_edited(edit.file, path)
    return Deployed(slim, edit.verdict.error, edit.file)


def _deploy(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...],
    path: str | os.PathLike[str],
    kwargs: Mapping[str, Any] | None,
    file: str | os.PathLike[str] | None,
    edit: _Edit,
    dynamic_shapes: Any,
    minimal: bool,
    threads: int | None,
    tolerance: float | None,
    table: Table,
    progress: ProgressCallback,
) -> Deployed:
    progress("capturing")
    args, named = draw_examples((model,), args, dict(kwargs or {}))
    inputs = [t for t in pytree.tree_leaves((args, named)) if isinstance(t, Tensor)]
    program = captured(model, args, named, dynamic_shapes)
    whole = as_demasked(program)
    judge = comparator_of(whole, (args, named), tolerance, table)
    source = serialized(proto_of(whole)) if file is None else os.fspath(file)
    race = _SessionRace(source, inputs, threads, judge)
    candidates = _OnnxCandidates(program, race, table, progress, notes=list(edit.notes))
    if edit.file is not None:
        race.add(EDITED, edit.file.model.SerializeToString())
    name = _winner(candidates, race, minimal, edit.file, progress)
    if name is None:
        slim = build(
            program, candidates.recorded(unchanged_provenance(candidates.reduced(True)[1]))
        ).eval()
        progress("writing the original network")
        copy_file(race.baseline, path)
        return Deployed(slim, 0.0)
    if name == EDITED:
        assert edit.file is not None and file is not None
        network = OnnxModule(parse_model(edit.file.model, Path(file).parent))
        program = captured(network, args, named, dynamic_shapes)
        sizes = measure_program(program, Analysis(program, table).relations)
        record = replace(unchanged_provenance(candidates.reduced(True)[1]), after=sizes)
        return _write_edit(edit, build(program, candidates.recorded(record)).eval(), path)
    slim, model_proto, error = candidates.valid[name]
    progress("writing")
    save(model_proto, path)
    slim.demasked = candidates.recorded(slim.demasked)
    return Deployed(slim, error)


def _winner(
    candidates: _OnnxCandidates,
    race: _SessionRace,
    minimal: bool,
    edited: EditedFile | None,
    progress: ProgressCallback,
) -> str | None:
    """Name of the candidate to write; None for the original network."""
    if minimal or race.runtime is None:
        options = (True, 1) if minimal else (False, WIDTH)
        candidates.enter(*options)
        if edited is None or race.runtime is None:  # which could not be compared then
            candidates.check()
            return next(iter(candidates.valid), None)
        for name, (_, model, _) in list(candidates.valid.items()):
            if NOISE * tensor_bytes(model) < edited.tensor_bytes and candidates.agrees(name):
                return name
        return EDITED
    choices = (False, True) if candidates.has_borders else (True,)
    for borders in choices:
        candidates.enter(borders, WIDTH)
    own = [EDITED] if EDITED in race.sessions else []
    if not own:
        candidates.check()
    if not candidates.valid and not own:
        return None
    if candidates.valid:
        progress("measuring in ONNX Runtime")
        first_rounds = race.rounds(list(candidates.valid), ROUNDS, SECONDS)
        first = min(candidates.valid, key=lambda name: median(first_rounds[name]))
        for multiple in MULTIPLES:
            candidates.enter(candidates.borders[first], multiple)
    progress("measuring in ONNX Runtime")
    all_rounds = race.rounds([*own, *candidates.valid], ROUNDS, SECONDS)
    medians = {name: median(seconds) for name, seconds in all_rounds.items()}
    best = min([*own, *candidates.valid], key=medians.__getitem__)
    if own and medians[EDITED] <= medians[best] * NOISE:
        best = EDITED
    while own and best != EDITED and not candidates.agrees(best):
        del candidates.valid[best]
        best = min([*own, *candidates.valid], key=medians.__getitem__)
    progress("measuring against the original network")
    final = race.rounds([best], PAIRS, float("inf"))
    speed = replace(speed_of(final[GIVEN], final[best]), threads=race.threads)
    chosen = best if speed.least >= ALLOWED else GIVEN
    medians = {GIVEN: speed.given[0], **medians}
    candidates.measured = {"decisions": (TuneDecision(WHOLE, chosen, medians),), "speed": speed}
    if chosen == best:
        return best
    candidates.notes.append(
        f"the fastest candidate ({best}) may be slower in ONNX Runtime than the original network "
        f"(ratio {speed.ratio:.2f}, at least {speed.least:.2f}): that was written, unchanged; "
        "--minimal writes the smallest"
    )
    return None


@dataclass(slots=True)
class _OnnxCandidates:
    """Candidates for the file. valid: network, `onnx_ir.Model` and error of those that compute the
    same, by name. reductions: demasked programs, with border maps (True) and without."""

    program: Program
    race: _SessionRace
    table: Table
    progress: ProgressCallback
    valid: dict[str, tuple[Demasked, Any, float | None]] = field(default_factory=dict)
    borders: dict[str, bool] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    reductions: dict[bool, tuple[Program, Provenance]] = field(default_factory=dict)
    failure: DemaskError | None = None

    def reduced(self, borders: bool) -> tuple[Program, Provenance]:
        """The demasked program, with or without border maps."""
        if borders not in self.reductions:
            self.progress("removing what is masked")
            self.reductions[borders] = shrink_program(self.program, self.table, borders=borders)
        return self.reductions[borders]

    @property
    def has_borders(self) -> bool:
        """Whether the demasked program can have border maps."""
        return "border map" in self.reduced(True)[1].effects

    def enter(self, borders: bool, multiple: int) -> None:
        """Build one candidate and add it to the race if it computes the same."""
        borders = borders or not self.has_borders
        name = "minimal widths" if multiple == 1 else f"widths in multiples of {multiple}"
        if self.has_borders:
            name += ", border maps" if borders else ", constants computed"
        self.progress(f"writing and checking: {name}")
        program, provenance = self.reduced(borders)
        rewritten = for_runtime(program, self.table, multiple)
        try:
            slim = build(rewritten, optimized_provenance(rewritten, provenance, self.table)).eval()
            model = proto_of(slim)
            data = serialized(model)
            if len(data) > size_of(self.race.baseline):
                self.notes.append(f"{name} is left out: its file is larger than the original one")
                return
            error = self.race.enter(name, data)
        except DemaskError as error:
            if is_strict():
                raise
            self.notes.append(f"{name} is left out: {error}")
            self.failure = error
            return
        self.valid[name], self.borders[name] = (slim, model, error), borders

    def agrees(self, name: str) -> bool:
        """Whether a candidate passes the comparison that edits of the file have passed."""
        race, data = self.race, serialized(self.valid[name][1])
        tolerance = None if race.judge is None else race.judge.tolerance
        try:
            compare_files(str(race.baseline), data, race.draws[0].inputs, tolerance)
        except (BadInput, Mismatch) as error:
            self.notes.append(f"{name} is left out: {error}")
            return False
        return True

    def check(self) -> None:
        """Raise the last failure if no candidate is valid."""
        if not self.valid and self.failure is not None:
            raise self.failure

    def recorded(self, provenance: Provenance) -> Provenance:
        """The provenance with measurements and with notes on candidates that were left out."""
        return replace(provenance, notes=(*provenance.notes, *self.notes), **self.measured)


class _SessionRace:
    """Networks in ONNX Runtime, called in turns with the same inputs. baseline: path of the
    original network's file, or its bytes."""

    def __init__(
        self,
        baseline: str | bytes,
        inputs: Sequence[Tensor],
        threads: int | None,
        judge: OutputComparator | None,
    ):
        self.runtime, self.baseline, self.judge = onnxruntime(), baseline, judge
        self.threads = checked_threads(threads)
        self.sessions: dict[str, Any] = {}
        if self.runtime is None:
            return
        first = self.sessions[GIVEN] = session(baseline, self.threads)
        self.names = [port.name for port in first.get_inputs()]
        self.draws = draws(inputs)
        self.expected = [self._outputs(first, draw) for draw in self.draws]

    def _outputs(self, runner: Any, draw: Draw) -> Arrays | None:
        """Outputs of a session; None if it fails, as a network may on some random inputs."""
        feed = {n: x.cpu().numpy() for n, x in zip(self.names, draw.inputs, strict=True)}
        try:
            return runner.run(None, feed)
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            if draw is self.draws[0]:
                raise BadInput(f"ONNX Runtime fails on {draw.kind}: {first_line(error)}") from error
            return None

    def enter(self, name: str, data: bytes) -> float | None:
        """Add a network to the race; its largest error. Raises Mismatch if outputs differ."""
        if self.runtime is None or self.judge is None:
            return None
        runner, errors = session(data, self.threads), [0.0]
        for draw, expected in zip(self.draws, self.expected, strict=True):
            outputs = None if expected is None else self._outputs(runner, draw)
            if expected is not None and outputs is None:
                raise Mismatch(
                    f"ONNX Runtime fails on {draw.kind}, but not on the original network"
                )
            if expected is not None and outputs is not None:
                errors.append(self.judge.difference(draw, expected, outputs))
        self.sessions[name] = runner
        return max(errors)

    def add(self, name: str, data: bytes) -> None:
        """Add a network that has been compared already."""
        if self.runtime is not None:
            self.sessions[name] = session(data, self.threads)

    def rounds(self, names: Sequence[str], pairs: int, seconds: float) -> dict[str, list[float]]:
        """Seconds of each round, of the named networks and of the original one."""
        example = self.draws[0]
        calls = {name: self._call(self.sessions[name], example) for name in (GIVEN, *names)}
        return sample_seconds(calls, pairs, seconds=seconds)

    def _call(self, runner: Any, draw: Draw) -> Callable[[], Any]:
        feed = {n: x.cpu().numpy() for n, x in zip(self.names, draw.inputs, strict=True)}
        return lambda: runner.run(None, feed)
