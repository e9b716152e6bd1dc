"""The forms of a network that compute with its nonzeros alone: which layers, found by measuring.

A layer's dense and sparse seconds are asked of the cost model. What a whole form takes is measured
by `demask.optimize`, as that of every other form.
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
from demask.tune.candidates import GAIN, Candidate, Maker, by_size
from demask.tune.layer_costs import CACHE, Asker
from demask.tune.onnxruntime_candidate import for_runtime
from demask.tune.passes.absorb_gathers import ungathered
from demask.tune.passes.fold_affine import absorbed
from demask.tune.passes.fuse_epilogues import chain

DENSEST = 0.6  # share of nonzeros above which a layer is not asked about: no kernel gains there
EACH, ALL = "sparse layers, where each is faster", "all sparse layers"
DENSE, SPARSE = "dense", "sparse"
GAIN_OF_EACH = 0.9  # share of their seconds below which layers are worth being apart
SETS = 3  # inputs that a layer is timed on in turns, where one would stay in the cache


@dataclass(slots=True)
class Sparse:
    """The sparse forms of a network, on the sizes of its example.

    precision: how weights are stored. least: seconds that the layers asked about take in a dense
    form, each in its fastest.
    """

    asker: Asker
    table: Table
    precision: str | None = None
    least: float = 0.0
    seen: set[str] = field(default_factory=set)

    def forms(
        self, reduced: Whole, given: Whole, tell: Callable[[str], object]
    ) -> Iterator[Candidate]:
        """The forms of a network from which channels were removed, then as it was given: where many
        channels are left, keeping all may cost less than what stands between others."""
        if not any(map(_is_sparse, reduced.constants.values())):
            return
        cut = _elements(reduced) < _elements(given)
        for name, base in _bases(reduced, given if cut else None, self.table):
            tell("asking what sparse layers cost")
            chosen = _SparseLayers(self.asker)
            yield from self._new(self._made(ALL + name, base, chosen))
            seconds = chosen.known.values()
            self.least = max(self.least, sum(s[DENSE] for s in seconds))
            mixed = sum(min(s.values()) for s in seconds)
            # Where few layers are a little faster dense, the way out and in again costs more.
            if mixed < GAIN_OF_EACH * sum(s[SPARSE] for s in seconds):
                chosen.every = False
                yield from self._new(self._made(EACH + name, base, chosen))

    def _new(self, form: Candidate) -> Iterator[Candidate]:
        """The form, if it has segments and there was none like it."""
        words = str(form.program.graph)
        if segments_of(form.program.graph) and words not in self.seen:
            self.seen.add(words)
            yield form

    def _made(self, name: str, base: Whole, chosen: _SparseLayers) -> Candidate:
        """One form: segments, and the fastest forms of what is outside of them."""
        form = self._outside(name, segmented(base, chosen.core, chosen.between))
        form.decisions = [*chosen.decisions(), *form.decisions]
        if self.precision is None:
            return form
        narrow = segmented(base, chosen.core, chosen.between, precision=self.precision)
        program = self._outside(name, narrow).program
        return replace(form, program=program, exact=form.program)

    def _outside(self, name: str, program: Whole) -> Candidate:
        sizes = by_size(program, self.asker)
        last = {size for size, costs in sizes.items() if costs[True] < GAIN * costs[False]}
        maker = Maker(self.asker, lambda node: self.asker.shape(node)[2:] in last, self.table)
        return maker.made(name, program)


def _bases(reduced: Whole, given: Whole | None, table: Table) -> Iterator[tuple[str, Whole]]:
    """Programs of layers without norms, whose joins are sums; what to call them."""
    yield "", ungathered(for_runtime(reduced, table), table)
    if given is not None:
        yield ", uncut", absorbed(given)


def _elements(program: Whole) -> int:
    return sum(constant.tensor.numel() for constant in program.constants.values())


@dataclass(slots=True)
class _SparseLayers:
    """Which layers of a program are sparse. every: all that may be, not those alone for which the
    cost model says so; what lies between them goes along."""

    asker: Asker
    every: bool = True
    known: dict[str, dict[str, float]] = field(default_factory=dict)  # by node: seconds
    names: dict[str, str] = field(default_factory=dict)
    live: dict[GraphEditor, set[fx.Node]] = field(default_factory=dict)

    def core(self, editor: GraphEditor, call: MatchedCall) -> bool:
        """Is a layer sparse, and worth a segment?"""
        weight = editor.tensor(call.weight)
        assert weight is not None
        density = float(weight.count_nonzero()) / weight.numel()
        if density > DENSEST:
            return False
        name = call.node.name
        if name not in self.known:
            self.known[name] = self._asked(editor, call, matrix(call, weight), density)
            self.names[name] = name_of(editor, call)
        found = self.known[name]
        return found[SPARSE] < (inf if self.every else found[DENSE])

    def between(self, editor: GraphEditor, call: MatchedCall) -> bool:
        """May a dense layer be in a segment? One of few weights costs less there than going out."""
        depthwise = isinstance(call.step, ConvStep) and call.step.groups == call.step.out
        return self.every or depthwise

    def decisions(self) -> list[TuneDecision]:
        """What was chosen for the layers that could be sparse."""
        return [TuneDecision(self.names[node], self._form(seconds), seconds)
                for node, seconds in self.known.items()]  # fmt: skip

    def _form(self, seconds: Mapping[str, float]) -> str:
        limit = inf if self.every else seconds[DENSE]
        return SPARSE if seconds[SPARSE] < limit else DENSE

    def _asked(
        self, editor: GraphEditor, call: MatchedCall, matrix: Tensor, density: float
    ) -> dict[str, float]:
        """Seconds of a layer in its fastest dense form, and by its nonzeros."""
        if editor not in self.live:
            self.live = {editor: input_dependent(editor.graph)}
        found = chain(call.node, self.live[editor])
        layer = self.asker.of(call.node)
        _, dense = self.asker.layer(layer, False, found.after, other=found.other is not None)
        count = round(float(f"{density:.2g}") * matrix.numel())
        pixels = prod(layer.out) // max(len(matrix), 1)
        moved = 4.0 * (prod(layer.x) + prod(layer.out)) + 8.0 * count
        name = f"sparse; {layer}; density {density:.2g}; {count} nonzeros"
        shape = tuple(matrix.shape)
        make = _timed(call, layer.x, shape, count / max(matrix.numel(), 1))
        question = Question(name, 2.0 * count * pixels, moved, make)
        return {DENSE: dense, SPARSE: self.asker.costs.seconds(question)}


def _is_sparse(constant: Constant) -> bool:
    """May a constant be the weight of a layer that is worth being sparse?"""
    tensor = constant.tensor
    if tensor.ndim < 2 or not tensor.numel() or tensor.dtype is not torch.float32:
        return False
    return int(tensor.count_nonzero()) <= DENSEST * tensor.numel()


def _timed(
    call: MatchedCall, x: tuple[int, ...], shape: tuple[int, ...], density: float
) -> Callable[[], Callable[[], object]]:
    """What makes the call to time: a layer as a segment of its own, on drawn weights and inputs."""

    def make() -> Callable[[], object]:
        draw = torch.Generator().manual_seed(0)
        here = torch.rand(shape, generator=draw) < density
        values, crow, col = csr(torch.randn(shape, generator=draw) * here)
        spans = ((0, 0, len(values)), (1, 0, len(crow)), (1, len(crow), len(crow) + len(col)))
        bias = (0, len(values), len(values) + shape[0])
        assert isinstance(call.step, (ConvStep, LinearStep))
        step = replace(
            call.step, weight=SparseWeight(*spans), bias=None if call.bias is None else bias
        )
        weights = [torch.cat([values, torch.randn(shape[0], generator=draw)]),
                   torch.cat([crow, col])]  # fmt: skip
        sets = SETS if 4 * prod(x) > CACHE else 1
        inputs = [torch.randn(x, generator=draw) for _ in range(sets)]
        program = SegmentProgram((call.kind,), (step,), (1,))
        plan, turns = (
            SegmentPlan.of(program, weights, inputs[:1], torch.get_num_threads()),
            cycle(inputs),
        )
        return lambda: plan([next(turns)])

    return make
