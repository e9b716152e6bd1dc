"""A program on given sizes as a tape: layouts, borders, and the kernels of each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from demask.kernels.cpu import relayout as move
from demask.kernels.llvm.isa import Isa
from demask.ops.activations import ACTIVATIONS
from demask.sparse.plan.layer_plan import (
    WindowPiece,
    as_conv,
    chain_pays,
    emit_alone,
    emit_chain,
    looks_at_pixels,
    pieces,
    reach,
    shape_of,
    touched,
    windows,
)
from demask.sparse.plan.tape import Buffer, NoPlan, Tape
from demask.sparse.plan.tile_layout import (
    NO_BORDER,
    At,
    Border,
    GridLayout,
    TileGrid,
    commons,
    grid_for,
    widened,
)
from demask.sparse.plan.tiling import Tiling, TilingProblem, best
from demask.sparse.plan.value_moves import Moves, as_windows, elements
from demask.sparse.segment_program import (
    Add,
    Cat,
    ConvStep,
    Flat,
    LinearStep,
    MeanStep,
    PoolStep,
    SegmentProgram,
    Step,
    canonical,
    reads,
)

# Cycles, to choose grids by: of a product of vectors; of a line of a border, made by another thread
# or by this one; of a line that is copied into another grid.
VECTOR, CROSSED, OWN, COPIED = 0.75, 40.0, 10.0, 18.0
LEAST = -math.inf


@dataclass(frozen=True, slots=True)
class Need:
    """How a step reads a value: in which grid, with which border, filled with what."""

    value: int
    grid: TileGrid
    border: Border
    fill: float


@dataclass(slots=True)
class TapeBuilder:
    """Writes the tape of a program."""

    program: SegmentProgram
    weights: Sequence[Tensor]
    inputs: Sequence[Tensor]
    isa: Isa
    threads: int
    tape: Tape = field(init=False)
    moves: Moves = field(init=False)
    shapes: list[tuple[int, int, int, int]] = field(init=False)
    grids: list[TileGrid] = field(default_factory=list)
    needs: dict[int, list[Need]] = field(default_factory=dict)
    positive: list[bool] = field(default_factory=list)
    made: dict[tuple[int, TileGrid, float], Buffer] = field(default_factory=dict)
    cuts: list[tuple[str, Tiling]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)  # values that are still to be made

    def __post_init__(self) -> None:
        self.tape = Tape(self.threads)
        self.moves = Moves(self.tape, self.isa)
        shapes = self.program.shapes([tuple(x.shape) for x in self.inputs])
        self.shapes = [canonical(*both) for both in zip(self.program.kinds, shapes, strict=True)]
        for value, size in enumerate(self.shapes):
            if math.prod(size) == 0 or max(size) >= 2**24:
                raise NoPlan(f"value {value} has the size {size}")
            if size[0] > self.isa.lanes:
                raise NoPlan(f"{size[0]} images at once")
        found = []
        for place, common in enumerate((None, *commons(self.isa.lanes))):
            self._choose(common)
            found.append((self._cost(), place, common))
        self._choose(min(found)[2])

    # -- what values look like

    def _cost(self) -> float:
        """Cycles of one thread that depend on grids, about: products, borders, copies."""
        cycles, count = 0.0, len(self.program.inputs)
        for value, grid in enumerate(self.grids):
            channels = self.shapes[value][1]
            sizes = [grid.part(part)[2:] for part in range(grid.parts)]
            h, w = max(sizes, key=lambda size: size[0] * size[1])
            step = self.program.steps[value - count] if value >= count else None
            if isinstance(step, (ConvStep, LinearStep)):
                nonzeros = step.weight.values[2] - step.weight.values[1]
                cycles += VECTOR * nonzeros * h * w / (self.threads if grid.parts == 1 else 1)
            above, below, left, right = self._border(value)
            if self.threads > 1:
                cycles += channels * (CROSSED * (above + below) * w + OWN * (left + right) * h)
            for other, border in {(n.grid, n.border) for n in self.needs.get(value, ())}:
                if other != grid:
                    lines = (other.height + border[0]) * (other.width + border[2])
                    cycles += COPIED * channels * lines / self.threads
        return cycles

    def _choose(self, common: tuple[int, int] | None) -> None:
        """Grids of all values, with as many rows and columns of tiles as are common to all, where
        these fit; how each is read."""
        count = len(self.program.inputs)
        self.grids, self.positive, self.needs = [], [], {}
        for value, (batch, _, height, width) in enumerate(self.shapes):
            grid = grid_for(batch, height, width, self.isa.lanes, self.threads, common)
            step = self.program.steps[value - count] if value >= count else None
            if isinstance(step, ConvStep) and step.transposed:
                grid = _multiple(replace(grid, parts=1), step.stride)
            self.grids.append(grid)
            self.positive.append(step is not None and self._is_positive(step))
            for need in [] if step is None else self._reads(step, grid):
                self.needs.setdefault(need.value, []).append(need)

    def _is_positive(self, step: Step) -> bool:
        act = getattr(step, "act", None)
        if act is not None:
            return ACTIVATIONS[act[0]].nonnegative(*act[1])
        kept = isinstance(step, (PoolStep, MeanStep, Flat, Add, Cat))
        return kept and all(self.positive[v] for v in reads(step))

    def _reads(self, step: Step, grid: TileGrid) -> list[Need]:
        x = reads(step)[0]
        if isinstance(step, (ConvStep, PoolStep)):
            of = self.input_grid(step, grid)
            if isinstance(step, ConvStep):
                border = reach(of, grid, windows(step))
                added = [] if step.add is None else [Need(step.add, grid, NO_BORDER, 0.0)]
                return [Need(x, of, border, 0.0), *added]
            border = reach(of, grid, windows(as_windows(step)))
            largest = not step.mean and not self.positive[x]
            return [Need(x, of, border, LEAST if largest else 0.0)]
        if isinstance(step, (MeanStep, Flat)):
            return [Need(x, self.grids[x], NO_BORDER, 0.0)]
        return [Need(v, grid, NO_BORDER, 0.0) for v in reads(step)]

    def input_grid(self, step: ConvStep | PoolStep, grid: TileGrid) -> TileGrid:
        """The grid of what a windowed step reads, for an output in `grid`."""
        if isinstance(step, ConvStep) and step.transposed:
            s = step.stride
            return replace(grid, height=grid.height // s[0], width=grid.width // s[1])
        return grid.scaled(step.stride)

    def layout(self, value: int, grid: TileGrid, border: Border) -> GridLayout:
        apart = self.tape.apart // self.isa.line if grid.parts > 1 else 0
        return GridLayout(self.shapes[value], grid, border, self.isa.lanes, apart)

    # -- buffers

    def main(self, value: int) -> Buffer:
        """Where a value is made: with the borders that its readers want there, if they agree."""
        key = (value, self.grids[value], 0.0)
        if key not in self.made:
            layout = self.layout(value, self.grids[value], self._border(value))
            self.made[key] = Buffer(layout)
        return self.made[key]

    def _border(self, value: int) -> Border:
        """The border that readers of a value want where it is made."""
        border = NO_BORDER
        for need in self.needs.get(value, ()):
            if need.grid == self.grids[value] and need.fill == 0.0:
                border = widened(border, need.border)
        return border

    def buffer(self, need: Need) -> Buffer:
        """A value as a step reads it; copied into another layout if it lies otherwise."""
        border = need.border != NO_BORDER
        fill = need.fill if border else 0.0
        key = (need.value, need.grid, fill)
        if key in self.made:
            return self.made[key]
        border_ = NO_BORDER
        for other in self.needs[need.value]:
            if other.grid == need.grid and (other.fill == fill or other.border == NO_BORDER):
                border_ = widened(border_, other.border)
        made = Buffer(self.layout(need.value, need.grid, border_), fill)
        self.made[key] = made
        self._copy(self.main(need.value), made, self._read_of(need.value, made.layout))
        return made

    def _read_of(self, value: int, layout: GridLayout) -> set[At]:
        """The positions of a copy of a value that anybody reads."""
        found: set[At] = set()
        for reader in self.left:
            step = self.step(reader)
            if value not in reads(step):
                continue
            if not isinstance(step, (ConvStep, PoolStep)) or step.x != value:
                return set(layout.around())
            made = self.grids[reader]
            for window in windows(step if isinstance(step, ConvStep) else as_windows(step)):
                found |= touched(window, layout.grid, made)
        return found

    def _copy(self, source: Buffer, to: Buffer, wanted: set[At]) -> None:
        """A value into another layout, borders too, at the positions that are wanted."""
        self.tape.phase()
        rows = []
        for at in sorted(wanted & set(to.layout.around())):
            image, y, x, real = to.layout.pixels(at)
            held = [np.where(real, a, 0) for a in (image, y, x)]
            found = np.where(real, source.layout.element(*held), -1)
            rows.append((at[0], to.layout.line(*at), found))
        self.moves.moved(move.Gather(to.fill), (source, 0), (to, 0), to.layout,
                    (self.moves.pitch(source), self.moves.pitch(to)), rows)  # fmt: skip

    # -- steps

    def build(self, strides: Sequence[tuple[int, int, int, int]]) -> None:
        """Write the whole tape. strides: in elements, of each input as (batch, channel, y, x)."""
        count = len(self.program.inputs)
        for value, stride in enumerate(strides):
            self._take(value, stride)
        self.left = [count + place for place in range(len(self.program.steps))]
        while self.left:
            chain = self._chain()
            if len(chain) == 1:
                self._step(self.step(chain[0]), chain[0])
            else:
                self._chained(chain)
            self.left = [value for value in self.left if value not in chain]
        for place, value in enumerate(self.program.outputs):
            self._give(value, 1 + count + place)

    def step(self, value: int) -> Step:
        """What makes a value."""
        return self.program.steps[value - len(self.program.inputs)]

    def _chain(self) -> list[int]:
        """The next value to make, and those that its threads may make right after it."""
        chain, waiting = self.left[:1], set(self.left)
        head = self.step(chain[0])
        if not isinstance(head, (ConvStep, LinearStep)) or as_conv(head).transposed:
            return chain
        shapes = [self._shape(chain[0])]
        for value in self.left[1:]:
            step = self.step(value)
            if not isinstance(step, (ConvStep, LinearStep)) or not looks_at_pixels(step):
                continue
            grids = {self.grids[v] for v in (value, *(v for v in reads(step) if v in chain))}
            made = all(v not in waiting or v in chain for v in reads(step))
            if made and grids == {self.grids[chain[0]]}:
                more = [*shapes, self._shape(value)]
                if chain_pays(more, self.threads, self.isa):
                    chain, shapes = [*chain, value], more
        return chain

    def estimate(self) -> float:
        """Cycles of the layers, about."""
        first = len(self.program.inputs)
        layers = [first + k for k, step in enumerate(self.program.steps)
                  if isinstance(step, (ConvStep, LinearStep))]  # fmt: skip
        return sum(best(self._shape(v), self.threads, self.isa)[0] for v in layers)

    def largest(self) -> int:
        """Bytes of the largest value."""
        return max(size[1] * grid.positions for size, grid in
                   zip(self.shapes, self.grids, strict=True)) * self.isa.line  # fmt: skip

    def _shape(self, value: int) -> TilingProblem:
        """What is to be cut of the layer that makes a value."""
        step = self.step(value)
        assert isinstance(step, (ConvStep, LinearStep))
        nonzeros = step.weight.values[2] - step.weight.values[1]
        conv = as_conv(step)
        channels = self.shapes[step.x][1]
        return shape_of(conv, windows(conv)[0], self.grids[value], channels, nonzeros)

    def _chained(self, chain: list[int]) -> None:
        """Several layers in one phase."""
        found: list[WindowPiece] = []
        for place, value in enumerate(chain):
            step, inside = self.step(value), chain[:place]
            assert isinstance(step, (ConvStep, LinearStep))
            needs = self._reads(step, self.grids[value])
            sources = [self.main(n.value) if n.value in inside else self.buffer(n) for n in needs]
            found += self._pieces(step, sources, self._out(value, inside))
        self.tape.phase()
        cuts = emit_chain(self.tape, self.isa, found)
        self.cuts += [(p.step.name, cut) for p, cut in zip(found, cuts, strict=True)]
        for piece in found:
            self.moves.borders(piece.out)

    def _pieces(
        self, step: ConvStep | LinearStep, sources: list[Buffer], out: Buffer
    ) -> list[WindowPiece]:
        add = sources[-1] if step.add is not None else None
        return pieces(as_conv(step), self.weights, sources[0], add, out)

    def _out(self, value: int, before: Sequence[int]) -> Buffer:
        """Where a layer writes: over what it adds, if nobody reads that afterwards. before: layers
        of the same phase that come first."""
        step = self.step(value)
        add = getattr(step, "add", None)
        if add is None or add in self.program.outputs or add == reads(step)[0]:
            return self.main(value)
        others = [v for v in self.left if v != value and add in reads(self.step(v))]
        if any(v not in before or not looks_at_pixels(self.step(v)) for v in others):  # type: ignore[arg-type]
            return self.main(value)
        key = (value, self.grids[value], 0.0)
        old = self.made.get((add, self.grids[value], 0.0))
        if old is not None and key not in self.made and old.layout.border == self._border(value):
            self.made[key] = old
        return self.main(value)

    def _take(self, value: int, stride: tuple[int, int, int, int]) -> None:
        to = self.main(value)
        self.tape.phase()
        rows = elements(to.layout, stride, to.layout.around())
        self.moves.moved(move.Gather(to.fill), (1 + value, 0), (to, 0), to.layout,
                    (4 * stride[1], self.moves.pitch(to)), rows)  # fmt: skip

    def _give(self, value: int, slot: int) -> None:
        source = self.main(value)
        self.tape.phase()
        _, channels, height, width = self.shapes[value]
        tokens = self.program.kinds[value] == "tokens"
        stride = ((0, 1, 0, channels) if tokens
                  else (channels * height * width, height * width, width, 1))  # fmt: skip
        rows = elements(source.layout, stride, source.layout.inside())
        self.moves.moved(move.Scatter(), (source, 0), (slot, 0), source.layout,
                    (self.moves.pitch(source), 4 * stride[1]), rows)  # fmt: skip

    def _step(self, step: Step, value: int) -> None:
        grid = self.grids[value]
        sources = [self.buffer(need) for need in self._reads(step, grid)]
        out = self._out(value, ()) if isinstance(step, (ConvStep, LinearStep)) else self.main(value)
        self.tape.phase()
        if isinstance(step, (ConvStep, LinearStep)):
            cuts = emit_alone(self.tape, self.isa, self._pieces(step, sources, out))
            self.cuts += [(step.name, cut) for cut in cuts]
        elif isinstance(step, PoolStep):
            self.moves.pool(step, sources[0], out)
        elif isinstance(step, MeanStep):
            self.moves.mean(sources[0], out)
        elif isinstance(step, Flat):
            self.moves.flat(sources[0], out)
        elif isinstance(step, Cat):
            first = 0
            for source in sources:
                self.moves.pointwise(None, [source], out, first)
                first += source.layout.size[1]
        else:
            self.moves.pointwise(step.act, sources, out, 0)
        self.moves.borders(out)


def _multiple(grid: TileGrid, of: tuple[int, int]) -> TileGrid:
    """The grid with tiles rounded up to multiples."""
    return replace(grid, height=-(-grid.height // of[0]) * of[0],
                   width=-(-grid.width // of[1]) * of[1])  # fmt: skip
