"""The ONNX file that ONNX Runtime runs fastest: candidates are measured, and the winner checked."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.errors import BadInput, DemaskError, Mismatch, NotExportable
from demask.failures import described, is_strict, public
from demask.files.atomic_write import check_writable
from demask.files.onnx import from_onnx
from demask.files.onnx.check import UNCHECKED, FileVerdict, Judge, first_line, session
from demask.files.onnx.edit.edit_file import EditedFile, edit_file, file_with, save_edited
from demask.files.onnx.edit.names import foreign_nodes
from demask.files.onnx.edit.protos import opset_of, stored_bytes
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
    serialized,
    size_of,
)
from demask.graph.example_inputs import draw_examples
from demask.graph.isolation import in_isolation
from demask.graph.program import Program
from demask.graph.provenance import GIVEN, WHOLE, Provenance, Speed, TuneDecision
from demask.graph.result.demasked_module import Demasked, build
from demask.machine import clock
from demask.machine.allocator import release_free_memory
from demask.machine.clock import PAIRS, checked_threads, is_clear, is_faster
from demask.ops import TABLE, Table
from demask.optimize import optimized_provenance, unchanged_provenance
from demask.pages import Lines, OnPage, Page, PageSource, Section, TextTable
from demask.report import report
from demask.report.sections import report_sections, returned, speed_sections
from demask.shrink.pipeline import capture_program as captured
from demask.shrink.pipeline import shrink_program
from demask.tune.onnxruntime_candidate import for_runtime
from demask.tune.race import WARMUP, speed_of

WIDTH = 8  # widths are rounded up to a multiple of it if nothing can be measured
MULTIPLES = (1, 4, 16)  # also measured if ONNX Runtime is installed
ROUNDS, SECONDS = 8, 10.0
EDITED = "the file, edited"
PLAIN = "the file, edited without new nodes"
ORIGINAL = FileVerdict(0.0, "nothing")  # of the original file itself
NOISE = 1.05  # exported tensors have to be smaller by more than this than those of the edit
EXPORT = 1.25  # an export has to be this much faster: it loses the file's nodes, names and op set
ProgressCallback = Callable[[str], object]
Edit = Callable[[], tuple[EditedFile | None, DemaskError | None]]


@dataclass(frozen=True, slots=True)
class Deployed(PageSource):
    """The network in the file that `optimize_onnx` wrote; it prints as a report, and is a page by
    `to_html`.

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

    def page(self) -> Page:
        """What `print`, `to_html` and notebooks show, as sections."""
        compared = OnPage([Lines([self.checked], "Verification")])
        if self.slim is not None:
            shown = report(self.slim)
            return Page("demask slim", (*report_sections(shown), compared), shown.summary)
        return Page("demask slim", (*self._sections(), compared))

    def _sections(self) -> Iterator[Section]:
        """What is known of a file that demask cannot run."""
        edited, lines = self.edited, [returned(self.decisions), *self.notes]
        if edited is not None:
            lines.append(f"not understood: {', '.join(sorted(edited.foreign))}")
        elif self.speed is None:
            lines.append("nothing to remove: the original network was written")
        yield Lines([*filter(None, lines)], "What was written")
        if edited is not None:
            rows = [(f"{edited.nodes:,}", f"{edited.unchanged:,}")]
            yield OnPage(
                [
                    TextTable(("nodes", "of the file, byte for byte"), rows),
                    TextTable(("node that is not cut", "why"), [*edited.barriers], "What would free more", (0, 1)),
                ]
            )
        if self.speed is not None:
            yield from speed_sections(self.speed, self.decisions)


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
    Runtime, widths are multiples of 8. Needs the extra `onnx`.

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
            for 64 units in the last place (1 % at most) or, if that is larger, what rounding moves
            the original.
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
    return deploy(
        (lambda: network) if file is None else partial(_network_in, file),
        args,
        path,
        kwargs,
        file=file,
        dynamic_shapes=dynamic_shapes,
        minimal=minimal,
        opset=opset,
        threads=threads,
        check=check,
        tolerance=tolerance,
        table=table,
        progress=progress,
    )


def _network_in(file: str | os.PathLike[str]) -> nn.Module | None:
    """The network in an ONNX file; None if demask has no function for an op of it."""
    return None if foreign_nodes(read(file)) else from_onnx(file)


@in_isolation
@public
def deploy(
    model: Callable[[], nn.Module | ExportedProgram | None],
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
    """As `optimize_onnx`, for a network that `model` returns, None if demask cannot run it. file:
    the ONNX file that it is read from; it is read again where the original network is written, so
    that it takes no memory while candidates are measured."""
    check_writable(path)
    check_tolerance(tolerance)
    check_opset(opset)

    def step(words: str) -> None:
        release_free_memory()  # of the step before
        progress(words)

    edit = partial(_edited, file, args, table, opset)
    edited, failure = None, None
    if file is not None and not kwargs:
        step("editing the file")
        edited, failure = edit()
        gc.collect()  # of the graphs, which have cycles
    before = weight_files(path)
    step("capturing")
    named: dict[str, Any] = {}
    program, network = None, model()
    if network is not None:
        try:
            args, named = draw_examples((network,), args, dict(kwargs or {}))
            program = captured(network, args, named, dynamic_shapes)
        except DemaskError:
            if edited is None:
                raise
    elif failure is not None:
        raise failure
    del network
    inputs = [t for t in pytree.tree_leaves((args, named)) if isinstance(t, Tensor)]
    original = None  # the file in another op set
    if file is not None:
        source: str | bytes = os.fspath(file)
        judge_for = partial(Judge.of_file, source, inputs, tolerance)
        if opset is not None and opset != opset_of(installed().load(source, load_external_data=False)):
            original = file_with(file, opset=opset)
            source = original.model.SerializeToString()
    else:
        assert program is not None
        network = as_demasked(program)
        source = serialized(_exported(network, opset))
        judge_for = partial(judge_of, network, source, (args, named), tolerance, table)
        del network
    reductions: dict[bool, tuple[Program, Provenance]] = {}
    if program is not None:
        step("removing what is masked")
        reductions[True] = shrink_program(program, table)
        if "border map" in reductions[True][1].effects:
            reductions[False] = shrink_program(program, table, borders=False)
    if file is not None:  # it is read again if it is written
        program = None
    race = _SessionRace(source, inputs, threads)
    gc.collect()
    release_free_memory()
    provenance = reductions[True][1] if reductions else None
    candidates = _OnnxCandidates(
        reductions,
        race,
        judge_for if check else None,
        table,
        step,
        opset,
        None if file is None else partial(edit, insert=False),
    )
    if failure is not None:
        candidates.notes.append(f"the file could not be edited: {failure}")
    if edited is not None:
        candidates.add_edit(EDITED, edited)
    del edited
    name = _winner(candidates, minimal)
    candidates.race.close()
    slim, verdict, edited = None, UNCHECKED, None
    if name is None:
        step("writing the original network")
        if isinstance(source, str):
            verdict = ORIGINAL
        elif check:  # exporters and converters may be wrong
            verdict = candidates.compared(source)
        if provenance is not None:
            if program is None and (network := model()) is not None:
                program = captured(network, args, named, dynamic_shapes)
            assert program is not None
            slim = build(program, unchanged_provenance(provenance)).eval()
        if original is not None:
            save_edited(original, path)
        elif isinstance(source, bytes) or not _is_same_file(source, path):
            copy_file(source, path)
    else:
        step("writing")
        chosen = candidates.valid[name]
        slim, verdict = chosen.slim, chosen.verdict
        if chosen.edited is not None:
            assert file is not None
            edited = replace(chosen.edited, model=installed().ModelProto.FromString(chosen.data))
            barriers = [f"{name} is not cut: {reason}" for name, reason in edited.barriers]
            candidates.notes += [
                f"the file was edited: {edited.unchanged} of {edited.nodes} nodes are the original's, byte for byte",
                *barriers,
            ]
            if provenance is not None:
                slim = _as_network(edited, Path(file), (args, named), dynamic_shapes, provenance, table)
            save_edited(edited, path)
        else:
            copy_file(chosen.data if file is None else _described(chosen.data, file), path)
    candidates.notes += remove_unnamed(path, before)
    if verdict.warning and tolerance is None:
        candidates.notes.insert(0, verdict.warning)
    if slim is not None:
        notes = (*slim.demasked.notes, *candidates.notes)
        slim.demasked = replace(slim.demasked, notes=notes, **candidates.measured)
    checked = "it is the original file" if verdict is ORIGINAL else str(verdict)
    return Deployed(slim, verdict.error, edited, checked, tuple(candidates.notes), **candidates.measured)


def _described(data: bytes, file: str | os.PathLike[str]) -> bytes:
    """An export of a file, with what that says of itself, and of its inputs and outputs."""
    proto = installed().ModelProto.FromString(data)
    original = installed().load(os.fspath(file), load_external_data=False)
    before = {v.name: v for v in (*original.graph.input, *original.graph.output)}
    ports = [v for v in (*proto.graph.input, *proto.graph.output) if v.name in before]
    pairs = [(proto.graph, original.graph), *((v, before[v.name]) for v in ports)]
    for name in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        for new, old in [(proto, original), *(pairs if name == "doc_string" else [])]:
            new.ClearField(name)
            if old.HasField(name):
                setattr(new, name, getattr(old, name))
    for new, old in pairs:
        new.ClearField("metadata_props")
        new.metadata_props.extend(old.metadata_props)
    return proto.SerializeToString()


def _as_network(
    edited: EditedFile, file: Path, call: Any, dynamic_shapes: Any, provenance: Provenance, table: Table
) -> Demasked | None:
    """An edited file as a graph module with its record; None where it cannot be captured."""
    args, named = call
    try:
        network = OnnxModule(parse_model(edited.model, file.parent))
        program = captured(network, args, named, dynamic_shapes)
    except DemaskError:
        return None
    record = optimized_provenance(program, provenance, table)
    return build(program, replace(record, reasons=())).eval()


def _edited(
    file: Any, args: Any, table: Table, opset: int | None, *, insert: bool = True
) -> tuple[EditedFile | None, DemaskError | None]:
    """A file, edited and in an op set; None where an edit removes nothing. And why it cannot be
    edited. insert: as for `edit_file`."""
    try:
        edited = edit_file(os.fspath(file), args, table, insert=insert)
        if edited is not None and stored_bytes(edited.model.graph) > LARGEST:
            return None, BadInput("it has more than 2 GiB, which no runtime takes as one message")
        if edited is not None and opset is not None:
            edited = replace(file_with(file, edited.model, opset), barriers=edited.barriers, foreign=edited.foreign)
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
    race, reductions = candidates.race, candidates.reductions
    if minimal or not race.is_possible:
        if reductions:
            candidates.enter(*((True, 1) if minimal else (False, WIDTH)))
        # Of tensors: what an export lacks of the file's names and documentation is no gain.
        sizes = {
            name: stored_bytes(installed().ModelProto.FromString(one.data).graph) * (1 if one.edited else NOISE)
            for name, one in candidates.valid.items()
            if one.edited or candidates.edit_again is None or NOISE * len(one.data) < race.size
        }
        return candidates.best(sizes)
    for borders in sorted(reductions):
        candidates.enter(borders, WIDTH)
    exports = [name for name, one in candidates.valid.items() if one.edited is None]
    if exports:
        borders = candidates.valid[exports[0]].borders
        if len(exports) > 1:
            candidates.progress("measuring in ONNX Runtime")
            seconds = clock.median_seconds(race.rounds(exports, ROUNDS, seconds=SECONDS))
            first = min(exports, key=seconds.__getitem__)
            borders = candidates.valid[first].borders
        for multiple in MULTIPLES:
            candidates.enter(borders, multiple)
    if not candidates.valid:
        candidates.check()
        return None
    candidates.progress("measuring in ONNX Runtime")
    medians = clock.median_seconds(race.rounds(list(candidates.valid), ROUNDS, seconds=SECONDS))
    seconds = {
        name: medians[name] * (1 if one.edited or EDITED not in candidates.valid else EXPORT)
        for name, one in candidates.valid.items()
    }
    fastest, note = min(seconds, key=seconds.__getitem__), ""
    if EDITED in seconds and fastest != EDITED:  # of several exports, one may have been lucky
        race.close()
        rounds = race.rounds([GIVEN, fastest, EDITED], PAIRS)
        no_slower = is_faster(clock.lower_bound(rounds[GIVEN], rounds[EDITED]))
        if no_slower and not is_faster(clock.lower_bound(rounds[EDITED], rounds[fastest]), EXPORT):
            seconds[EDITED] = 0.0
    while (best := candidates.best(seconds)) is not None:
        candidates.progress("measuring against the original network")
        final = race.rounds((GIVEN, best), PAIRS, is_enough=is_clear(GIVEN, best))
        speed = replace(speed_of(final[GIVEN], final[best]), threads=race.threads)
        one = candidates.valid[best]
        has_gain = (
            one.edited is not None
            or candidates.edit_again is None
            or speed.ratio > NOISE
            or NOISE * len(one.data) < race.size
        )
        chosen = best if is_faster(speed.least) and has_gain else GIVEN
        # The rows of both are from the same rounds, as is the ratio.
        medians |= {GIVEN: speed.given[0], best: speed.result[0]}
        decision = TuneDecision(WHOLE, chosen, medians)
        candidates.measured = {"decisions": (decision,), "speed": speed}
        if chosen == best:
            return best
        words = "may be slower in ONNX Runtime" if has_gain else "is hardly smaller or faster"
        note = (
            f"{best} {words} than the original network (ratio {speed.ratio:.2f}, at least {speed.least:.2f}), "
            "which is written, unchanged; --minimal writes the smallest candidate, "
            f"{min(len(other.data) for other in candidates.valid.values()):,} of {race.size:,} bytes"
        )
        if best != EDITED or not candidates.edit_plainly():
            break
        seconds = {PLAIN: 0.0}
    candidates.notes += [note] if note else []
    return None


@dataclass(slots=True)
class _OnnxCandidate:
    """A file that may be written. data: its bytes. edited: of an edit, without the model. slim,
    program: the network of an export, and its program. borders: whether it may have border maps."""

    data: bytes
    edited: EditedFile | None = None
    slim: Demasked | None = None
    program: Program | None = None
    borders: bool = True
    verdict: FileVerdict = UNCHECKED


@dataclass
class _OnnxCandidates:
    """Candidates for the file. valid: by name. reductions: demasked programs, with border maps
    (True) and, where that differs, without, until they are exported; none where demask cannot run
    the network. judge_for: returns the judge; None if nothing is compared. edit_again: edits the
    file without insertions; None if the original is no file."""

    reductions: dict[bool, tuple[Program, Provenance]]
    race: _SessionRace
    judge_for: Callable[[], Judge] | None
    table: Table
    progress: ProgressCallback
    opset: int | None = None
    edit_again: Edit | None = None
    valid: dict[str, _OnnxCandidate] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    failure: DemaskError | None = None

    @cached_property
    def judge(self) -> Judge:
        """The judge of all candidates."""
        assert self.judge_for is not None
        return self.judge_for()

    def compared(self, data: bytes) -> FileVerdict:
        """How far a file differs. Raises Mismatch if too far, BadInput where nothing runs it."""
        try:
            return self.judge.compare(data)
        except BadInput as error:
            raise BadInput(
                f"{error}. So no result can be compared with it, and nothing was written; "
                "check=False (--check off) writes it all the same"
            ) from error

    def add(self, name: str, data: bytes, **more: Any) -> None:
        """Add a candidate, to the race too; one that the runtime does not run is left out."""
        try:
            self.race.add(name, data)
        except BadInput as error:
            self._leave_out(name, error)
            return
        self.valid[name] = _OnnxCandidate(data, **more)

    def add_edit(self, name: str, edited: EditedFile) -> None:
        """Add an edited file: its bytes, without the model."""
        self.add(name, edited.model.SerializeToString(), edited=replace(edited, model=None))

    def _leave_out(self, name: str, error: DemaskError) -> None:
        if is_strict():
            raise error
        self.notes.append(f"{name} is left out: {error}")
        self.failure = error
        self.valid.pop(name, None)

    def enter(self, borders: bool, multiple: int) -> None:
        """Export one candidate and add it."""
        borders = borders or False not in self.reductions
        name = "minimal widths" if multiple == 1 else f"widths in multiples of {multiple}"
        if False in self.reductions:
            name += ", border maps" if borders else ", constants computed"
        if name in self.valid:
            return
        self.progress(f"writing: {name}")
        program, provenance = self.reductions[borders]
        rewritten = for_runtime(program, self.table, multiple)
        if any(one.program and _same_calls_and_tensors(rewritten, one.program) for one in self.valid.values()):
            return
        try:
            slim = build(rewritten, optimized_provenance(rewritten, provenance, self.table)).eval()
            data = serialized(_exported(slim, self.opset))
        except DemaskError as error:
            self._leave_out(name, error)
            return
        if len(data) > self.race.size:
            self.notes.append(f"{name} is left out: its file is larger than the original one")
            return
        self.add(name, data, slim=slim, program=rewritten, borders=borders)

    def edit_plainly(self) -> bool:
        """Add an edit that inserts no nodes, which take time; whether there is another one."""
        if self.edit_again is None:
            return False
        self.progress("editing the file without new nodes")
        self.race.close()
        edited, _ = self.edit_again()
        before = self.valid[EDITED].edited
        if edited is None or before is None or edited.nodes >= before.nodes:
            return False
        self.add_edit(PLAIN, edited)
        return PLAIN in self.valid

    def best(self, costs: Mapping[str, float]) -> str | None:
        """The candidate of least cost that computes what the original does; others are left out.
        Raises the last failure if none is left."""
        self.race.close()
        self.reductions.clear()
        for name in sorted(costs, key=costs.__getitem__):
            try:
                if self.judge_for is not None:
                    self.progress(f"checking: {name}")
                    self.valid[name].verdict = self.compared(self.valid[name].data)
            except Mismatch as error:
                self._leave_out(name, error)
                continue
            self.valid = {name: self.valid[name]}
            self.__dict__.pop("judge", None)  # with the sessions that it has
            return name
        self.check()
        return None

    def check(self) -> None:
        """Raise the last failure if no candidate is valid."""
        if not self.valid and self.failure is not None:
            raise self.failure


class _SessionRace:
    """Networks in ONNX Runtime, called in turns with the same inputs. baseline: path of the
    original network's file, or its bytes. size: of these. files: the other networks."""

    def __init__(self, baseline: str | bytes, inputs: Sequence[Tensor], threads: int | None):
        self.baseline, self.inputs, self.size = baseline, inputs, size_of(baseline)
        self.threads = checked_threads(threads)
        self.files: dict[str, str | bytes] = {GIVEN: baseline}
        self.calls: dict[str, Callable[[], Any]] = {}  # those that have a session

    @cached_property
    def is_possible(self) -> bool:
        """Whether ONNX Runtime takes the original network."""
        try:
            return session(self.baseline, self.threads) is not None
        except BadInput:  # of ops of another runtime: nothing is measured
            return False

    def add(self, name: str, data: bytes) -> None:
        """Add a network. Raises BadInput where the runtime cannot run it."""
        if self.is_possible:
            self.files[name] = data
            self.calls[name] = self._call(data)

    def close(self) -> None:
        """End all sessions, each of which takes more memory than its file."""
        self.calls.clear()

    def _call(self, file: str | bytes) -> Callable[[], Any]:
        runner = session(file, self.threads)
        names = [port.name for port in runner.get_inputs()]
        feed = {n: numpy_of(x) for n, x in zip(names, self.inputs, strict=True)}
        try:
            runner.run(None, feed)
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            raise BadInput(f"ONNX Runtime fails on the example: {first_line(error)}") from error
        return lambda: runner.run(None, feed)

    def rounds(self, names: Sequence[str], rounds: int, **limits: Any) -> clock.Samples:
        """Seconds of each round, of the named networks. limits: as for `demask.machine.clock.race`."""
        for name in names:
            if name not in self.calls:
                self.calls[name] = self._call(self.files[name])
        return clock.race({name: self.calls[name] for name in names}, rounds, WARMUP, **limits)


def _same_calls_and_tensors(a: Program, b: Program) -> bool:
    return str(a.graph) == str(b.graph) and all(
        torch.equal(constant.tensor, b.constants[name].tensor) for name, constant in a.constants.items()
    )
