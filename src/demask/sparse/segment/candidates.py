"""Candidates of a network whose layers run in segments.

`demask.optimize` measures complete candidates, as all others. The cost model predicts the seconds of
layers: the dense ones tell whether other candidates can be as fast, the sparse ones which layers
should be sparse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, cycle
from math import prod

import torch
from torch import Tensor

from demask.exec.steps.convex_groups import Wanted
from demask.exec.steps.match_calls import MatchedCall, calls_of, matrix
from demask.exec.steps.recurrent_rows import is_recurrent
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import SparseWeight, is_conv, is_layer
from demask.exec.tape.segment_plan import SegmentPlan
from demask.facts.analysis import Analysis
from demask.failures import Log
from demask.graph.editor import GraphEditor
from demask.graph.program import Constant
from demask.graph.program import Program as FullProgram
from demask.graph.provenance import TuneDecision
from demask.graph.queries import input_dependent
from demask.graph.value import Value
from demask.kernels.llvm import availability as llvm
from demask.machine.cost import Question
from demask.ops import Relation, Table, schema
from demask.rewrites.activations import ACTIVATIONS
from demask.rewrites.driver import rewrite
from demask.rewrites.rule import Phase
from demask.shrink.program_size import count_macs, sum_macs
from demask.sparse.segment.build_segments import DENSE_FROM, NARROW, csr, name_of, segmented, segments_of
from demask.tune.absorb_gathers import ABSORB_GATHERS
from demask.tune.candidates import GAIN, Candidate, CandidateBuilder, seconds_by_image_size
from demask.tune.epilogue import Epilogue
from demask.tune.fold_affine import FOLD, FOLD_AFFINE
from demask.tune.fuse_epilogues import epilogue_chain
from demask.tune.layer_costs import CACHE, Layer, LayerCosts
from demask.tune.onnxruntime_candidate import RUNTIME

ALL, EACH = "segments of all layers", "sparse layers, where each is faster"
BY_INDEX, OUTSIDE = ", joins by index", ", large products outside"
DENSE, SPARSE = "dense", "sparse"
# A candidate with segments that takes less than this share of the time of all dense layers has won.
AHEAD = 0.7
LEAST_SHARE = 0.5  # of the multiply-adds of a network, in segments of all layers
GAIN_OF_EACH = 0.9  # share of sparse seconds below which a mix of dense and sparse layers pays
# Joins as sums of layers that write at their own positions; joins as they are.
SUMS = Phase("layers of segments", (*RUNTIME.entries, ABSORB_GATHERS))
JOINS = Phase("layers of segments, joins by index", (*ACTIVATIONS.entries, FOLD_AFFINE))
SETS = 3  # inputs that a layer is timed with in turns, if one would stay in the cache
TOKENS, WIDTH = 64, 256  # of dense matrices that torch may multiply faster than a segment


@dataclass(slots=True)
class SegmentCandidates:
    """The candidates of a network with segments, for the sizes of its example input.

    precision: how sparse weights are stored. log: notes the rewrites that failed, which are left
    out. layers: those in segments of all layers.
    """

    asker: LayerCosts
    table: Table
    precision: str | None = None
    log: Log = field(default_factory=Log)
    layers: list[FusedLayer] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def forms(self, reduced: FullProgram, original: FullProgram, tell: Callable[[str], object]) -> Iterator[Candidate]:
        """Candidates of a network with removed channels, then of the original.

        If many channels remain and layers are sparse, leaving all of them may cost less than the
        calls between layers.
        """
        if not llvm.is_installed():
            return
        shares = [_share_in_segments(reduced, self.asker, self.table, large) for large in (True, False)]
        is_useful = shares[0] >= LEAST_SHARE
        if not is_useful and not any(map(_is_sparse, reduced.constants.values())):
            return
        cut = _elements(reduced) < _elements(original)
        for name, base in _base_programs(reduced, original if cut else None, self.table, self.log):
            if is_useful:
                tell("building segments")
                yield from self._if_new(self._all_layers(ALL + name, base))
                if LEAST_SHARE <= shares[1] < shares[0]:
                    yield from self._if_new(self._all_layers(ALL + name + OUTSIDE, base, large=False))
            tell("measuring sparse layers")
            sparse_layers = _SparseLayers(self.asker)
            program = segmented(base, sparse_layers.core, _is_depthwise)
            # If few layers are slightly faster dense, leaving and entering segments costs more.
            if not is_useful or sparse_layers.are_worth_a_mix():
                mixed = self._make_candidate(EACH + name, base, program, sparse_layers.core, _is_depthwise)
                mixed.decisions[:0] = sparse_layers.decisions()
                yield from self._if_new(mixed)
            if not sparse_layers.known and name == BY_INDEX:
                return  # dense layers with zeros left in them are slower

    def _all_layers(self, name: str, base: FullProgram, large: bool = True) -> Candidate:
        """The candidate with all layers in segments. large: also large products."""
        layers = _AllLayers(self.asker, large)
        program = segmented(base, layers.core, layers.core)
        candidate = self._make_candidate(name, base, program, layers.core, layers.core)
        self.layers = max(self.layers, list(layers.outside.values()), key=len)
        return candidate

    def are_ahead(self, seconds: float) -> bool:
        """Whether the layers in segments alone take much longer outside of them than `seconds`: by
        the rates of this machine, or in their fastest measured implementations."""
        if not self.layers:
            return False
        if seconds < sum(layer.roofline(self.asker) for layer in self.layers):
            return True
        measured = accumulate(layer.seconds(self.asker, (False, True)) for layer in self.layers)
        return any(seconds < AHEAD * total for total in measured)

    def _if_new(self, form: Candidate) -> Iterator[Candidate]:
        graph_text = str(form.program.graph)
        if segments_of(form.program.graph) and graph_text not in self.seen:
            self.seen.add(graph_text)
            yield form

    def _make_candidate(
        self, name: str, base: FullProgram, program: FullProgram, core: Wanted, between: Wanted
    ) -> Candidate:
        """One candidate: segments, and the fastest implementations of all other calls. program:
        `base` with segments."""
        form = self._with_fast_calls(name, program)
        if self.precision is None:
            return form
        narrow = segmented(base, core, between, precision=self.precision)
        if not _has_narrow_weights(narrow):
            return form
        program = self._with_fast_calls(name, narrow).program
        return replace(form, program=program, exact=form.program)

    def _with_fast_calls(self, name: str, program: FullProgram) -> Candidate:
        sizes = seconds_by_image_size(program, self.asker)
        last = {size for size, costs in sizes.items() if costs[True] < GAIN * costs[False]}
        maker = CandidateBuilder(self.asker, lambda call: self.asker.shape(call.node)[2:] in last, self.table, self.log)
        return maker.build(name, program)


def _base_programs(
    reduced: FullProgram, original: FullProgram | None, table: Table, log: Log | None = None
) -> Iterator[tuple[str, FullProgram]]:
    """Programs without norms, with suffixes for their names: joins as sums of layers that write at
    their own positions, joins as they are, the original with all channels."""
    yield "", rewrite(reduced, SUMS, table, log)
    yield BY_INDEX, rewrite(reduced, JOINS, table, log)
    if original is not None:
        yield ", uncut", rewrite(original, FOLD, table, log)


def _elements(program: FullProgram) -> int:
    return sum(constant.tensor.numel() for constant in program.constants.values())


def _share_in_segments(program: FullProgram, asker: LayerCosts, table: Table, large: bool) -> float:
    """The share of a network's multiply-adds in layers that segments would compute, recurrent ones
    among them. large: also large products."""
    relations = Analysis(program, table).relations
    editor, wanted = GraphEditor(program), _AllLayers(asker, large)
    calls = calls_of(editor, torch.float32)
    names = {node.name for node, call in calls.items() if call.is_layer and wanted.is_wanted(editor, call)}
    names |= {node.name for node in editor.calls() if is_recurrent(editor, node, torch.float32)}
    inside = sum(
        count_macs(relation, asker.example)
        for node, relation in relations.items()
        if node.name in names and isinstance(relation, Relation)
    )
    return inside / max(sum_macs(relations, asker.example), 1)


def _has_narrow_weights(program: FullProgram) -> bool:
    return any(len(schema.arguments(node)["weights"]) > NARROW for node, _ in segments_of(program.graph))


def _weight_density(editor: GraphEditor, call: MatchedCall) -> float:
    weight = editor.tensor(call.weight)
    assert weight is not None
    return 1.0 if call.affine is not None else float(weight.count_nonzero()) / weight.numel()


def _is_depthwise(editor: GraphEditor, call: MatchedCall) -> bool:
    """Whether a layer is a depthwise convolution, which costs less than leaving a segment."""
    return is_conv(call.step) and call.step.fields.groups == call.step.fields.out


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """A layer as it would be outside of segments, with what oneDNN could compute with it."""

    layer: Layer
    after: Epilogue
    other: bool

    @classmethod
    def of(cls, call: Value, asker: LayerCosts) -> FusedLayer:
        """The layer of an ATen call."""
        epilogue = epilogue_chain(call, input_dependent(call.node.graph))
        return cls(asker.of(call.node), epilogue.after, epilogue.other is not None)

    def seconds(self, asker: LayerCosts, layouts: tuple[bool, ...]) -> float:
        """Seconds of its fastest dense implementation. layouts: whether images are in channels
        last."""
        layouts = layouts if len(self.layer.x) == 4 else layouts[:1]
        return min(asker.layer(self.layer, last, self.after, other=self.other)[1] for last in layouts)

    def roofline(self, asker: LayerCosts) -> float:
        """Seconds that it takes at the least by the rates of this machine."""
        return asker.roofline(self.layer, self.other)


@dataclass(slots=True)
class _AllLayers:
    """All layers of a program that segments should hold. large: also large products."""

    asker: LayerCosts
    large: bool
    outside: dict[str, FusedLayer] = field(default_factory=dict)  # by node name, no norms

    def core(self, editor: GraphEditor, call: MatchedCall) -> bool:
        if not self.is_wanted(editor, call):
            return False
        if call.affine is None and call.node.name not in self.outside:
            self.outside[call.node.name] = FusedLayer.of(Value(call.node, editor), self.asker)
        return True

    def is_wanted(self, editor: GraphEditor, call: MatchedCall) -> bool:
        return self.large or not self._is_large_product(editor, call)

    def _is_large_product(self, editor: GraphEditor, call: MatchedCall) -> bool:
        """Whether a layer is a product of large dense matrices."""
        if call.op != "linear":
            return False
        weight = editor.tensor(call.weight)
        assert weight is not None
        tokens = prod(self.asker.shape(call.reads[0])[:-1])
        is_large = tokens >= TOKENS and min(weight.shape) >= WIDTH
        return is_large and _weight_density(editor, call) >= DENSE_FROM


@dataclass(slots=True)
class _SparseLayers:
    """The sparse layers of a program that the cost model predicts to be faster than dense ones."""

    asker: LayerCosts
    known: dict[str, dict[str, float]] = field(default_factory=dict)  # node name -> seconds
    names: dict[str, str] = field(default_factory=dict)

    def core(self, editor: GraphEditor, call: MatchedCall) -> bool:
        """Whether a layer is sparse and should be in a segment."""
        density = _weight_density(editor, call)
        if density >= DENSE_FROM:
            return False
        name = call.node.name
        if name not in self.known:
            weight = editor.tensor(call.weight)
            assert weight is not None
            self.known[name] = self._predicted(Value(call.node, editor), call, matrix(call, weight), density)
            self.names[name] = name_of(editor, call)
        return self.known[name][SPARSE] < self.known[name][DENSE]

    def are_worth_a_mix(self) -> bool:
        seconds = self.known.values()
        mixed = sum(min(s.values()) for s in seconds)
        return mixed < GAIN_OF_EACH * sum(s[SPARSE] for s in seconds)

    def decisions(self) -> list[TuneDecision]:
        return [
            TuneDecision(self.names[node], min(seconds, key=seconds.__getitem__), seconds)
            for node, seconds in self.known.items()
        ]

    def _predicted(self, node: Value, call: MatchedCall, matrix: Tensor, density: float) -> dict[str, float]:
        """Seconds of a layer in its fastest dense implementation, and with its nonzeros."""
        layer = self.asker.of(call.node)
        count = round(float(f"{density:.2g}") * matrix.numel())
        pixels = prod(layer.out) // max(len(matrix), 1)
        bytes_moved = 4.0 * (prod(layer.x) + prod(layer.out)) + 8.0 * count
        name = f"sparse; {layer}; density {density:.2g}; {count} nonzeros"
        shape = tuple(matrix.shape)
        make = _timed(call, layer.x, shape, count / max(matrix.numel(), 1))
        question = Question(name, 2.0 * count * pixels, bytes_moved, make)
        dense = FusedLayer.of(node, self.asker).seconds(self.asker, (False,))
        return {DENSE: dense, SPARSE: self.asker.costs.seconds(question)}


def _is_sparse(constant: Constant) -> bool:
    tensor = constant.tensor
    if tensor.ndim < 2 or not tensor.numel() or tensor.dtype is not torch.float32:
        return False
    return int(tensor.count_nonzero()) < DENSE_FROM * tensor.numel()


def _timed(
    call: MatchedCall, x: tuple[int, ...], shape: tuple[int, ...], density: float
) -> Callable[[], Callable[[], object]]:
    """A function that creates the call to time: a layer as a segment, with random tensors."""

    def make() -> Callable[[], object]:
        draw = torch.Generator().manual_seed(0)
        is_nonzero = torch.rand(shape, generator=draw) < density
        values, crow, col = csr(torch.randn(shape, generator=draw) * is_nonzero)
        spans = ((0, 0, len(values)), (1, 0, len(crow)), (1, len(crow), len(crow) + len(col)))
        bias = (0, len(values), len(values) + shape[0])
        layer = call.step
        assert is_layer(layer)
        step = replace(layer, weight=SparseWeight(*spans), bias=None if call.bias is None else bias)
        weights = [torch.cat([values, torch.randn(shape[0], generator=draw)]), torch.cat([crow, col])]
        input_count = SETS if 4 * prod(x) > CACHE else 1
        inputs = [torch.randn(x, generator=draw) for _ in range(input_count)]
        program = SegmentProgram((call.kind,), (step,), (1,))
        plan, alternating = (SegmentPlan.of(program, weights, inputs[:1], torch.get_num_threads()), cycle(inputs))
        return lambda: plan([next(alternating)])

    return make
