"""The ONNX file that ONNX Runtime runs fastest: candidates are measured, and the winner checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.errors import BadInput, DemaskError, Mismatch, NotExportable
from demask.facts.analysis import Analysis
from demask.failures import described, is_strict, public
from demask.files.atomic_write import check_writable
from demask.files.onnx import from_onnx
from demask.files.onnx.check import UNCHECKED, Judge, Verdict, first_line, session
from demask.files.onnx.edit.convert import opset_of
from demask.files.onnx.edit.edit_file import EditedFile, edit_file, file_with, save_edited
from demask.files.onnx.edit.names import foreign_nodes
from demask.files.onnx.edit.protos import stored_bytes
from demask.files.onnx.module import OnnxModule
from demask.files.onnx.read.reader import installed, parse_model, read
from demask.files.onnx.values import numpy_of
from demask.files.onnx.write.leftover_weights import remove_unnamed, weight_files
from demask.files.onnx.write.writer import (
    LARGEST,
    as_demasked,
    check_opset,
    check_tolerance,
    copy_file,
    judge_of,
    proto_of,
    save,
    serialized,
    size_of,
)
from demask.graph.example_inputs import draw_examples
from demask.graph.isolation import in_isolation
from demask.graph.program import Program
from demask.graph.provenance import GIVEN, WHOLE, Provenance, Speed, TuneDecision
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
ROUNDS, SECONDS = 8, 10.0
EDITED = "the file, edited"
ORIGINAL = Verdict(0.0, "nothing")  # of the original file itself
NOISE = 1.05  # exported tensors have to be smaller by more than this than those of the edit
EXPORT = 1.25  # an export has to be this much faster: it loses the file's nodes, names and op set
ProgressCallback = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Deployed:
    """The network in the file that `optimize_onnx` wrote.

    Attributes:
        slim: the network as a graph module; its attribute `demasked` is the record for
            `demask.report`. None for a file with ops that demask cannot run.
        error: largest difference from the original network, relative to the largest value of the
            output; None if nothing was compared.
        edited: the file, if it is the original with smaller tensors; None for one that was
            exported, or the original itself.
        checked: what ran both networks and how far they differ, in words; or "unchecked".
        notes: remarks, as in the report.
        speed, decisions: timings, as in the report; None and () without them.
    """

    slim: Demasked | None
    error: float | None
    edited: EditedFile | None = None
    checked: str = ""
    notes: tuple[str, ...] = ()
    speed: Speed | None = None
    decisions: tuple[TuneDecision, ...] = ()


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
    opset: int | None = None,
    threads: int | None = None,
    check: bool = True,
    tolerance: float | None = None,
    table: Table = TABLE,
    progress: ProgressCallback = lambda words: None,
) -> Deployed:
    """The demasked network that is written to an ONNX file, the fastest in ONNX Runtime.

    If ONNX Runtime is installed, candidates are timed with the original network. They differ in the
    widths of layers (multiples of 1, 4, 8 or 16 channels) and in the handling of constants at
    padded borders. If none is faster and no larger, the original network is written. Without ONNX
    Runtime, widths are multiples of 8. Needs `pip install demask[onnx]`.

    What is written was compared with the original network: on the example, zeros, ones, and tiny,
    large, negative and random numbers, at two sizes where sizes are dynamic; in ONNX Runtime with
    its optimizations (and without, for quantized networks), or where that is missing or cannot, in
    the reference implementation of `onnx`.

    An ONNX file is edited: nodes, names, op set and metadata that need not change are copied byte
    for byte, also ops that demask has no function for. Only where that removes nothing, differs or
    is slower is the network exported. Files of weights that the file at `path` named, and that
    no file in its folder names any more, are removed; notes say so.

    Args:
        model: an `nn.Module`, a `torch.export.ExportedProgram`, or the path of an ONNX file.
        path: name of the file, which is replaced if it exists.
        args: example inputs by position, a tuple such as (x,), of the sizes to tune for. Default:
            (), as for a demasked network or an exported program; an ONNX file needs examples.
        kwargs: example inputs by name, a mapping. Default: None, for no such inputs.
        dynamic_shapes: sizes that may differ from call to call, as for `demask.demask`.
        minimal: whether to write the smallest candidate (multiples of 1) without timing. Default:
            False.
        opset: version of ONNX's op set, an int such as 17; a file is converted by `onnx`. Default:
            None, for that of the file, or the exporter's.
        threads: number of threads of ONNX Runtime, 1 or more, with the limit of `demask.optimize`.
            Default: `torch.get_num_threads()`.
        check: whether to compare what is written with the original network. False also writes files
            that nothing here can run. Default: True.
        tolerance: largest allowed difference / largest value of the output, above 0. Default: None,
            for 84 units in the last place (1e-5 for float32) or, if that is larger, what rounding
            moves the original.
        table: the table of ops. Default: `demask.ops.TABLE`.
        progress: function that is called with a short text at each step. Default: does nothing.

    Returns:
        `slim`: the written network, a graph module with the record `demasked`. `error`: largest
        difference from the original / largest value of the output; None if not compared.

    Raises:
        BadInput: an argument has a wrong value, the ONNX file cannot be read, `path` cannot be
            written, nothing here can run it, or a package is not installed.
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
        opset=opset, threads=threads, check=check, tolerance=tolerance, table=table,
        progress=progress,
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
    opset: int | None = None,
    threads: int | None = None,
    check: bool = True,
    tolerance: float | None = None,
    table: Table = TABLE,
    progress: ProgressCallback = lambda words: None,
) -> Deployed:
    """As `optimize_onnx`, for a loaded network. file: the ONNX file that it was read from. model:
    None if demask cannot run the file."""
    check_writable(path)
    check_tolerance(tolerance)
    check_opset(opset)
    edited, failure = None, None
    if file is not None and not kwargs:
        progress("editing the file")
        edited, failure = _edited(os.fspath(file), args, table)
        if edited is not None and opset is not None:
            edited = replace(file_with(file, edited.model, opset), barriers=edited.barriers,
                             foreign=edited.foreign)  # fmt: skip
    named: dict[str, Any] = {}
    program = None
    if model is not None:
        progress("capturing")
        try:
            args, named = draw_examples((model,), args, dict(kwargs or {}))
            program = captured(model, args, named, dynamic_shapes)
        except DemaskError:
            if edited is None:
                raise
    elif failure is not None:
        raise failure
    inputs = [t for t in pytree.tree_leaves((args, named)) if isinstance(t, Tensor)]
    original = None  # the file in another op set
    if file is not None:
        source: str | bytes = os.fspath(file)
        judge_for = partial(Judge.of_file, source, inputs, tolerance)
        if opset not in (None, opset_of(installed().load(source, load_external_data=False))):
            original = file_with(file, opset=opset)
            source = original.model.SerializeToString()
    else:
        assert program is not None
        network = as_demasked(program)
        source = serialized(_exported(network, opset))
        judge_for = partial(judge_of, network, source, (args, named), tolerance, table)
    race = _SessionRace(source, inputs, threads)
    candidates = _OnnxCandidates(program, race, judge_for if check else None, table, progress,
                             opset, file is not None)  # fmt: skip
    if failure is not None:
        candidates.notes.append(f"the file could not be edited: {failure}")
    if edited is not None:
        candidates.add(EDITED, edited.model.SerializeToString())
    before = weight_files(path)
    name = _winner(candidates, minimal)
    slim, verdict = None, UNCHECKED
    if name is None:
        progress("writing the original network")
        if isinstance(source, str):
            verdict = ORIGINAL
        elif check:  # exporters and converters may be wrong
            verdict = candidates.compared(source)
        if original is not None:
            save_edited(original, path)
        elif isinstance(source, bytes) or not _is_same_file(source, path):
            copy_file(source, path)
        if program is not None:
            slim = build(program, unchanged_provenance(candidates.reduced(True)[1])).eval()
    else:
        progress("writing")
        chosen = candidates.valid[name]
        slim, verdict = chosen.slim, chosen.verdict
        if name == EDITED:
            assert edited is not None and file is not None
            barriers = [f"{name} is not cut: {reason}" for name, reason in edited.barriers]
            candidates.notes += [f"the file was edited: {edited.unchanged} of {edited.nodes} nodes "
                                 "are the original's, byte for byte", *barriers]  # fmt: skip
            if program is not None:
                slim = _as_network(edited, Path(file), (args, named), dynamic_shapes, candidates)
            save_edited(edited, path)
        else:
            if file is not None:
                _describe(chosen.model, file)
            save(chosen.model, path)
    candidates.notes += remove_unnamed(path, before)
    if verdict.warning and tolerance is None:
        candidates.notes.insert(0, verdict.warning)
    if slim is not None:
        notes = (*slim.demasked.notes, *candidates.notes)
        slim.demasked = replace(slim.demasked, notes=notes, **candidates.measured)
    checked = "it is the original file" if verdict is ORIGINAL else str(verdict)
    return Deployed(slim, verdict.error, edited if name == EDITED else None, checked,
                    tuple(candidates.notes), **candidates.measured)  # fmt: skip


def _describe(model: Any, file: str | os.PathLike[str]) -> None:
    """Set what a file says of itself, and of its inputs and outputs, in an export of it."""
    proto = installed().load(os.fspath(file), load_external_data=False)
    for name in ("producer_name", "producer_version", "domain", "model_version"):
        setattr(model, name, getattr(proto, name) or None)
    model.doc_string = proto.doc_string or None
    ports = {v.name: v for v in (*proto.graph.input, *proto.graph.output)}
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.name in ports:
            value.doc_string = ports[value.name].doc_string or None
            value.metadata_props.update({p.key: p.value for p in ports[value.name].metadata_props})
    model.graph.doc_string = proto.graph.doc_string or None
    model.graph.metadata_props.update({p.key: p.value for p in proto.graph.metadata_props})


def _as_network(
    edited: EditedFile, file: Path, call: Any, dynamic_shapes: Any, candidates: _OnnxCandidates
) -> Demasked | None:
    """An edited file as a graph module with its record; None where it cannot be captured."""
    args, named = call
    try:
        network = OnnxModule(parse_model(edited.model, file.parent))
        program = captured(network, args, named, dynamic_shapes)
    except DemaskError:
        return None
    sizes = measure_program(program, Analysis(program, candidates.table).relations)
    record = unchanged_provenance(candidates.reduced(True)[1])
    return build(program, replace(record, after=sizes)).eval()


def _edited(path: str, args: Any, table: Table) -> tuple[EditedFile | None, DemaskError | None]:
    """A file, edited; None where that removes nothing. And why it cannot be edited."""
    try:
        edited = edit_file(path, args, table)
        if edited is not None and stored_bytes(edited.model.graph) > LARGEST:
            return None, BadInput("it has more than 2 GiB, which no runtime takes as one message")
        return edited, None
    except DemaskError as error:
        return None, error
    except Exception as error:  # a fault of a handler: the file is exported
        if is_strict():
            raise
        return None, BadInput(f"editing failed inside: {described(error)}")


def _is_same_file(source: str, path: str | os.PathLike[str]) -> bool:
    return os.path.exists(path) and os.path.samefile(source, path)


def _exported(slim: Demasked, opset: int | None) -> Any:
    """The `onnx_ir.Model` of a network. Raises NotExportable where it has another op set."""
    model = proto_of(slim, opset=opset)
    if opset is not None and (version := model.opset_imports[""]) != opset:
        reason = f"torch's exporter writes op set {version}, not {opset}"
        raise NotExportable(reason, "the network", "leave --opset (opset=) out")
    return model


def _winner(candidates: _OnnxCandidates, minimal: bool) -> str | None:
    """Name of the candidate to write; None for the original network.

    Raises:
        Mismatch: something smaller could be written, but computes something else.
    """
    race, program = candidates.race, candidates.program
    own = [EDITED] if EDITED in candidates.valid else []
    if minimal or race.runtime is None:
        if program is not None:
            candidates.enter(*((True, 1) if minimal else (False, WIDTH)))
        # Of tensors: what an export lacks of the file's names and documentation is no gain.
        sizes = {name: stored_bytes(installed().ModelProto.FromString(one.data).graph)
                 * (1 if name == EDITED else NOISE) for name, one in candidates.valid.items()
                 if name == EDITED or not candidates.is_file
                 or NOISE * len(one.data) < size_of(race.baseline)}  # fmt: skip
        return candidates.best(sizes)
    if program is not None:
        choices = (False, True) if candidates.has_borders else (True,)
        for borders in choices:
            candidates.enter(borders, WIDTH)
    exports = [name for name in candidates.valid if name != EDITED]
    if exports:
        candidates.progress("measuring in ONNX Runtime")
        first_rounds = race.rounds(exports, ROUNDS, SECONDS)
        first = min(exports, key=lambda name: median(first_rounds[name]))
        for multiple in MULTIPLES:
            candidates.enter(candidates.valid[first].borders, multiple)
    if not candidates.valid:
        candidates.check()
        return None
    candidates.progress("measuring in ONNX Runtime")
    all_rounds = race.rounds(list(candidates.valid), ROUNDS, SECONDS)
    medians = {name: median(seconds) for name, seconds in all_rounds.items()}
    seconds = {name: medians[name] * (1 if name in own else EXPORT if own else 1)
               for name in candidates.valid}  # fmt: skip
    best = candidates.best(seconds)
    if best is None:
        return None
    candidates.progress("measuring against the original network")
    own = [EDITED] if EDITED in candidates.valid else []
    final = race.rounds([best, *(name for name in own if name != best)], PAIRS, float("inf"))
    if (
        own
        and best != EDITED
        and (  # of several exports, one may have been lucky
            speed_of(final[GIVEN], final[EDITED]).least >= ALLOWED
            and speed_of(final[EDITED], final[best]).least < EXPORT
        )
    ):
        best = candidates.best({EDITED: 0.0}) or best
    speed = replace(speed_of(final[GIVEN], final[best]), threads=race.threads)
    has_gain = best in own or not candidates.is_file or speed.ratio > NOISE or (
        NOISE * len(candidates.valid[best].data) < size_of(race.baseline)
    )  # fmt: skip
    chosen = best if speed.least >= ALLOWED and has_gain else GIVEN
    # The rows of both are from the same rounds, as is the ratio.
    medians |= {GIVEN: speed.given[0], best: speed.result[0]}
    candidates.measured = {"decisions": (TuneDecision(WHOLE, chosen, medians),), "speed": speed}
    if chosen == best:
        return best
    words = "may be slower in ONNX Runtime" if has_gain else "is hardly smaller or faster"
    candidates.notes.append(
        f"the fastest candidate ({best}) {words} than the original network (ratio "
        f"{speed.ratio:.2f}, at least {speed.least:.2f}): that was written, unchanged; --minimal "
        "writes the smallest"
    )
    return None


@dataclass(slots=True)
class _OnnxCandidate:
    """A file that may be written. data: its bytes. slim, model: the network and the `onnx_ir.Model`
    of an export. borders: whether it may have border maps."""

    data: bytes
    slim: Demasked | None = None
    model: Any = None
    borders: bool = True
    verdict: Verdict = UNCHECKED


@dataclass
class _OnnxCandidates:
    """Candidates for the file. valid: by name. judge_for: returns the judge; None if nothing is
    compared. is_file: whether the original is a file. reductions: demasked programs, with border
    maps (True) and without."""

    program: Program | None
    race: _SessionRace
    judge_for: Callable[[], Judge] | None
    table: Table
    progress: ProgressCallback
    opset: int | None = None
    is_file: bool = False
    valid: dict[str, _OnnxCandidate] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    reductions: dict[bool, tuple[Program, Provenance]] = field(default_factory=dict)
    failure: DemaskError | None = None

    @cached_property
    def judge(self) -> Judge:
        """The judge of all candidates."""
        assert self.judge_for is not None
        return self.judge_for()

    def compared(self, data: bytes) -> Verdict:
        """How far a file differs. Raises Mismatch if too far, BadInput where nothing runs it."""
        try:
            return self.judge.compare(data)
        except BadInput as error:
            raise BadInput(
                f"{error}. So no result can be compared with it, and nothing was written; "
                "check=False (--check off) writes it all the same"
            ) from error

    def reduced(self, borders: bool) -> tuple[Program, Provenance]:
        """The demasked program, with or without border maps."""
        if borders not in self.reductions:
            assert self.program is not None
            self.progress("removing what is masked")
            self.reductions[borders] = shrink_program(self.program, self.table, borders=borders)
        return self.reductions[borders]

    @property
    def has_borders(self) -> bool:
        """Whether the demasked program can have border maps."""
        return "border map" in self.reduced(True)[1].effects

    def add(self, name: str, data: bytes, **more: Any) -> None:
        """Add a candidate, to the race too; one that the runtime does not run is left out."""
        try:
            self.race.add(name, data)
        except BadInput as error:
            self._leave_out(name, error)
            return
        self.valid[name] = _OnnxCandidate(data, **more)

    def _leave_out(self, name: str, error: DemaskError) -> None:
        self.notes.append(f"{name} is left out: {error}")
        self.failure = error
        self.valid.pop(name, None)

    def enter(self, borders: bool, multiple: int) -> None:
        """Export one candidate and add it."""
        borders = borders or not self.has_borders
        name = "minimal widths" if multiple == 1 else f"widths in multiples of {multiple}"
        if self.has_borders:
            name += ", border maps" if borders else ", constants computed"
        if name in self.valid:
            return
        self.progress(f"writing: {name}")
        program, provenance = self.reduced(borders)
        rewritten = for_runtime(program, self.table, multiple)
        try:
            slim = build(rewritten, optimized_provenance(rewritten, provenance, self.table)).eval()
            model = _exported(slim, self.opset)
            data = serialized(model)
        except DemaskError as error:
            if is_strict():
                raise
            self._leave_out(name, error)
            return
        if len(data) > size_of(self.race.baseline):
            self.notes.append(f"{name} is left out: its file is larger than the original one")
            return
        self.add(name, data, slim=slim, model=model, borders=borders)

    def best(self, costs: Mapping[str, float]) -> str | None:
        """The candidate of least cost that computes what the original does; others are left out.
        Raises the last failure if none is left."""
        for name in sorted(costs, key=costs.__getitem__):
            if self.judge_for is None:
                return name
            self.progress(f"checking: {name}")
            try:
                self.valid[name].verdict = self.compared(self.valid[name].data)
                return name
            except Mismatch as error:
                self._leave_out(name, error)
        self.check()
        return None

    def check(self) -> None:
        """Raise the last failure if no candidate is valid."""
        if not self.valid and self.failure is not None:
            raise self.failure


class _SessionRace:
    """Networks in ONNX Runtime, called in turns with the same inputs. baseline: path of the
    original network's file, or its bytes. runtime: its session; None where that cannot run."""

    def __init__(self, baseline: str | bytes, inputs: Sequence[Tensor], threads: int | None):
        self.baseline, self.inputs = baseline, inputs
        self.threads = checked_threads(threads)
        self.calls: dict[str, Callable[[], Any]] = {}
        try:
            self.runtime = session(baseline, self.threads)
        except BadInput:  # of ops of another runtime: nothing is measured
            self.runtime = None
        if self.runtime is not None:
            self.calls[GIVEN] = self._call(self.runtime)

    def add(self, name: str, data: bytes) -> None:
        """Add a network. Raises BadInput where the runtime cannot run it."""
        if self.runtime is not None:
            self.calls[name] = self._call(session(data, self.threads))

    def _call(self, runner: Any) -> Callable[[], Any]:
        names = [port.name for port in runner.get_inputs()]
        feed = {n: numpy_of(x) for n, x in zip(names, self.inputs, strict=True)}
        try:
            runner.run(None, feed)
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            raise BadInput(f"ONNX Runtime fails on the example: {first_line(error)}") from error
        return lambda: runner.run(None, feed)

    def rounds(self, names: Sequence[str], pairs: int, seconds: float) -> dict[str, list[float]]:
        """Seconds of each round, of the named networks and of the original one."""
        calls = {name: self.calls[name] for name in (GIVEN, *names)}
        return sample_seconds(calls, pairs, seconds=seconds)
