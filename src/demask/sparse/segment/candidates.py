"""Candidates of a network that compute only with nonzeros of weights.

The cost model predicts the dense and sparse seconds of each layer. `demask.optimize` measures whole
candidates, as all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle
from math import inf, prod

import torch
from torch import Tensor, fx

from demask.graph.editor import GraphEditor
from demask.graph.program import Constant
from demask.graph.program import Program as Whole
from demask.graph.provenance import TuneDecision
from demask.graph.queries import input_dependent
from demask.machine.cost import Question
from demask.ops import Table
from demask.sparse.plan.segment_plan import SegmentPlan
from demask.sparse.segment.build_segments import csr, name_of, segmented, segments_of
from demask.sparse.segment.match_calls import MatchedCall, matrix
from demask.sparse.segment_program import ConvStep, LinearStep, SegmentProgram, SparseWeight
from demask.tune.candidates import GAIN, Candidate, CandidateBuilder, seconds_by_image_size
from demask.tune.layer_costs import CACHE, LayerCosts
from demask.tune.onnxruntime_candidate import for_runtime
from demask.tune.passes.absorb_gathers import absorb_gathers
from demask.tune.passes.fold_affine import fold_affine
from demask.tune.passes.fuse_epilogues import epilogue_chain

DENSEST = 0.6  # largest share of nonzeros of a sparse layer: above it no kernel is faster
EACH, ALL = "sparse layers, where each is faster", "all sparse layers"
DENSE, SPARSE = "dense", "sparse"
GAIN_OF_EACH = 0.9  # share of sparse seconds below which a mix of dense and sparse layers pays
SETS = 3  # inputs that a layer is timed with in turns, if one would stay in the cache


@dataclass(slots=True)
class SparseCandidates:
    """The sparse candidates of a network, for the sizes of its example input.

    precision: how weights are stored. least: dense seconds of the layers considered.
    """

    asker: LayerCosts
    table: Table
    precision: str | None = None
    least: float = 0.0
    seen: set[str] = field(default_factory=set)

    def forms(
        self, reduced: Whole, original: Whole, tell: Callable[[str], object]
    ) -> Iterator[Candidate]:
        """Candidates of a network with removed channels, then of the original.

        If many channels remain, leaving all of them may cost less than the calls between layers.
        """
        if not any(map(_is_sparse, reduced.constants.values())):
            return
        cut = _elements(reduced) < _elements(original)
        for name, base in _bases(reduced, original if cut else None, self.table):
            tell("measuring sparse layers")
            sparse_layers = _SparseLayers(self.asker)
            yield from self._new(self._candidate(ALL + name, base, sparse_layers))
            seconds = sparse_layers.known.values()
            self.least = max(self.least, sum(s[DENSE] for s in seconds))
            mixed_seconds = sum(min(s.values()) for s in seconds)
            # If few layers are slightly faster dense, leaving and entering segments costs more.
            if mixed_seconds < GAIN_OF_EACH * sum(s[SPARSE] for s in seconds):
                sparse_layers.every = False
                yield from self._new(self._candidate(EACH + name, base, sparse_layers))

    def _new(self, form: Candidate) -> Iterator[Candidate]:
        """The candidate, if it has segments and differs from earlier ones."""
        graph_text = str(form.program.graph)
        if segments_of(form.program.graph) and graph_text not in self.seen:
            self.seen.add(graph_text)
            yield form

    def _candidate(self, name: str, base: Whole, sparse_layers: _SparseLayers) -> Candidate:
        """One candidate: segments, and the fastest implementations of all other calls."""
        form = self._outside(name, segmented(base, sparse_layers.core, sparse_layers.between))
        form.decisions = [*sparse_layers.decisions(), *form.decisions]
        if self.precision is None:
            return form
        narrow = segmented(
            base, sparse_layers.core, sparse_layers.between, precision=self.precision
        )
        program = self._outside(name, narrow).program
        return replace(form, program=program, exact=form.program)

    def _outside(self, name: str, program: Whole) -> Candidate:
        """A candidate with the fastest implementations of calls outside of segments."""
        sizes = seconds_by_image_size(program, self.asker)
        last = {size for size, costs in sizes.items() if costs[True] < GAIN * costs[False]}
        maker = CandidateBuilder(
            self.asker, lambda node: self.asker.shape(node)[2:] in last, self.table
        )
        return maker.build(name, program)


def _bases(reduced: Whole, original: Whole | None, table: Table) -> Iterator[tuple[str, Whole]]:
    """Programs without norms whose joins are sums, with suffixes for their names."""
    yield "", absorb_gathers(for_runtime(reduced, table), table)
    if original is not None:
        yield ", uncut", fold_affine(original)


def _elements(program: Whole) -> int:
    return sum(constant.tensor.numel() for constant in program.constants.values())


@dataclass(slots=True)
class _SparseLayers:
    """The choice of sparse layers of a program.

    every: all possible layers, instead of those that the cost model predicts to be faster. Layers
    between them are included.
    """

    asker: LayerCosts
    every: bool = True
    known: dict[str, dict[str, float]] = field(default_factory=dict)  # node name -> seconds
    names: dict[str, str] = field(default_factory=dict)
    live: dict[GraphEditor, set[fx.Node]] = field(default_factory=dict)

    def core(self, editor: GraphEditor, call: MatchedCall) -> bool:
        """Whether a layer is sparse and should be in a segment."""
        weight = editor.tensor(call.weight)
        assert weight is not None
        density = float(weight.count_nonzero()) / weight.numel()
        if density > DENSEST:
            return False
        name = call.node.name
        if name not in self.known:
            self.known[name] = self._predicted(editor, call, matrix(call, weight), density)
            self.names[name] = name_of(editor, call)
        seconds = self.known[name]
        return seconds[SPARSE] < (inf if self.every else seconds[DENSE])

    def between(self, editor: GraphEditor, call: MatchedCall) -> bool:
        """Whether a dense layer may be in a segment.

        A depthwise one costs less there than leaving the segment.
        """
        depthwise = isinstance(call.step, ConvStep) and call.step.groups == call.step.out
        return self.every or depthwise

    def decisions(self) -> list[TuneDecision]:
        """The choices for the layers that could be sparse."""
        return [TuneDecision(self.names[node], self._form(seconds), seconds)
                for node, seconds in self.known.items()]  # fmt: skip

    def _form(self, seconds: Mapping[str, float]) -> str:
        limit = inf if self.every else seconds[DENSE]
        return SPARSE if seconds[SPARSE] < limit else DENSE

    def _predicted(
        self, editor: GraphEditor, call: MatchedCall, matrix: Tensor, density: float
    ) -> dict[str, float]:
        """Seconds of a layer in its fastest dense implementation, and with its nonzeros."""
        if editor not in self.live:
            self.live = {editor: input_dependent(editor.graph)}
        epilogue = epilogue_chain(call.node, self.live[editor])
        layer = self.asker.of(call.node)
        _, dense = self.asker.layer(layer, False, epilogue.after, other=epilogue.other is not None)
        count = round(float(f"{density:.2g}") * matrix.numel())
        pixels = prod(layer.out) // max(len(matrix), 1)
        bytes_moved = 4.0 * (prod(layer.x) + prod(layer.out)) + 8.0 * count
        name = f"sparse; {layer}; density {density:.2g}; {count} nonzeros"
        shape = tuple(matrix.shape)
        make = _timed(call, layer.x, shape, count / max(matrix.numel(), 1))
        question = Question(name, 2.0 * count * pixels, bytes_moved, make)
        return {DENSE: dense, SPARSE: self.asker.costs.seconds(question)}


def _is_sparse(constant: Constant) -> bool:
    """Whether a constant may be the weight of a sparse layer."""
    tensor = constant.tensor
    if tensor.ndim < 2 or not tensor.numel() or tensor.dtype is not torch.float32:
        return False
    return int(tensor.count_nonzero()) <= DENSEST * tensor.numel()


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
        assert isinstance(call.step, (ConvStep, LinearStep))
        step = replace(
            call.step, weight=SparseWeight(*spans), bias=None if call.bias is None else bias
        )
        weights = [torch.cat([values, torch.randn(shape[0], generator=draw)]),
                   torch.cat([crow, col])]  # fmt: skip
        input_count = SETS if 4 * prod(x) > CACHE else 1
        inputs = [torch.randn(x, generator=draw) for _ in range(input_count)]
        program = SegmentProgram((call.kind,), (step,), (1,))
        plan, alternating = (
            SegmentPlan.of(program, weights, inputs[:1], torch.get_num_threads()),
            cycle(inputs),
        )
        return lambda: plan([next(alternating)])

    return make
