"""A program for fixed sizes as a tape: layouts, borders, and the kernels of each step.

How steps read values.

Values that are channels of another value, and need no memory of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from demask.exec.steps.called_op import MOVED, OVER_CHANNELS, POINTWISE, PRODUCT, RECURRENT, RESIZED
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_rows import (
    ELEMENTWISE,
    FLAT,
    JOIN,
    LAYER,
    MEAN,
    POOL,
    SCALE,
    SELECTION,
    is_positive,
    lowering_of,
)
from demask.exec.steps.segment_steps import (
    CHANNELS_LAST,
    AnyStep,
    Layer,
    as_conv,
    canonical,
    is_conv,
    is_layer,
    is_pixelwise,
)
from demask.exec.tape.layers.depthwise_layer import permutes_edges
from demask.exec.tape.layers.layer_plan import LayerKinds, Weights, chain_pays, emit_alone, emit_chain
from demask.exec.tape.layers.layer_windows import OutputWindow, reach, touched, windows
from demask.exec.tape.layers.pack_weights import selected
from demask.exec.tape.layers.tiling import TilingProblem, best
from demask.exec.tape.layers.window_piece import WindowPiece, pieces, shape_of
from demask.exec.tape.layers.winograd_layer import SIDE, emit_winograd
from demask.exec.tape.moved_values import MovedValues, MoveWriter, factors_of, is_move
from demask.exec.tape.plan_rows import PlanRow
from demask.exec.tape.tape import HEADER, Buffer, NoPlan, Tape
from demask.exec.tape.tile_layout import (
    NO_BORDER,
    At,
    Border,
    GridLayout,
    TileGrid,
    at_array,
    commons,
    grid_for,
    widened,
)
from demask.exec.tape.value_moves import Moves, elements, rows_of
from demask.exec.tape.write_call import call_cycles, write_call
from demask.kernels.cpu.tiles import relayout as move
from demask.kernels.llvm.isa import Isa

Place = tuple[int, int]  # a value and one of its channels


def find_parts(moved: MovedValues, channels: Sequence[int], grids: Sequence[TileGrid]) -> dict[int, Place]:
    """Values that are channels of others, with the value and the first channel.

    Operands of concatenations are written into their results. A concatenation of values that are in
    order in a longer one is a part of that, a slice of channels a part of its operand, and so is a
    moved value that is such a slice in the layout of kernels, such as one head of several.
    """
    program, weights = moved.program, moved.weights
    parts: dict[int, Place] = {}

    def share_memory(value: int, container: int, first: int) -> None:
        owner = owner_of(parts, container)[0]
        is_static = value in program.static or owner in program.static
        if grids[value] == grids[container] and value not in parts and owner != value and not is_static:
            parts[value] = container, first

    steps = list(enumerate(program.steps, len(program.inputs)))
    joins = [(value, step.reads) for value, step in steps if lowering_of(step) == JOIN]
    for value, xs in sorted(joins, key=lambda join: -len(join[1])):
        firsts = np.cumsum([0] + [channels[x] for x in xs]).tolist()[:-1]
        locations = [parts.get(x, (x, 0)) for x in xs]
        container, first = locations[0]
        if len(locations) > 1 and locations == [(container, first + shift) for shift in firsts]:
            share_memory(value, container, first)
            continue
        for x, shift in zip(xs, firsts, strict=True):
            if xs.count(x) == 1:
                share_memory(x, value, shift)
    for value, step in steps:
        if lowering_of(step) == SELECTION and step.fields.stride == (1, 1):
            numbers = selected(step, weights, channels[step.x])
            if numbers[0] >= 0 and (np.diff(numbers) == 1).all():
                share_memory(value, step.x, int(numbers[0]))
        elif is_move(step) and value in moved.written:
            container = moved.location(value)
            if container is not None:
                share_memory(value, *container)
    return parts


def owner_of(parts: Mapping[int, Place], value: int) -> Place:
    """The value that owns the memory of a value, and the first channel of that there."""
    first = 0
    while value in parts:
        value, shift = parts[value]
        first += shift
    return value, first


@dataclass(frozen=True, slots=True)
class Need:
    """How a step reads a value: grid, border and fill value."""

    value: int
    grid: TileGrid
    border: Border
    fill: float


# Cycles for the choice of grids: per product of vectors; per line of a border, written by another
# thread or by this one; per line copied to another grid.
VECTOR, CROSSED, OWN, COPIED = 0.75, 40.0, 10.0, 18.0
LEAST = -math.inf


@dataclass(slots=True)
class TapeBuilder:
    """Writes the tape of a program, and the tape that converts its static inputs."""

    program: SegmentProgram
    weights: Sequence[Tensor]
    inputs: Sequence[Tensor]
    isa: Isa
    threads: int
    filters: bool = True  # whether layers may be computed by minimal filtering
    read: Weights = field(default_factory=dict)  # those of other builders for the program
    tape: Tape = field(init=False)
    static_tape: Tape = field(init=False)
    static_bytes: int = HEADER  # of the memory of static inputs in their layouts
    is_exact: bool = True  # unless the kernel of a layer may set `INEXACT`
    shapes: list[tuple[int, int, int, int]] = field(init=False)
    moved: MovedValues = field(init=False)
    layers: LayerKinds = field(init=False)
    grids: list[TileGrid] = field(default_factory=list)
    needs: dict[int, list[Need]] = field(default_factory=dict)
    positive: list[bool] = field(default_factory=list)
    parts: dict[int, Place] = field(default_factory=dict)
    buffers: dict[tuple[int, TileGrid, float], Buffer] = field(default_factory=dict)
    remaining: list[int] = field(default_factory=list)  # values not yet computed
    chains: dict[int, int] = field(default_factory=dict)  # value -> the first that is computed in the same phase

    def __post_init__(self) -> None:
        self.tape, self.static_tape = Tape(self.threads), Tape(self.threads)
        shapes = self.program.shapes([tuple(x.shape) for x in self.inputs])
        self.moved = MovedValues(self.program, self.weights, shapes)
        self.shapes = [canonical(*both) for both in zip(self.program.kinds, shapes, strict=True)]
        for value, size in enumerate(self.shapes):
            if math.prod(size) == 0 or max(size) >= 2**24:
                raise NoPlan(f"value {value} has the size {size}")
            if size[0] > self.isa.lanes:
                raise NoPlan(f"{size[0]} images at once")
        self.layers = LayerKinds(self.program, self.weights, self.shapes, self.read)
        if self.filters:
            self.layers = self.layers.with_filters(self.isa.lanes)
        costs = []
        for number, common in enumerate((None, *commons(self.isa.lanes))):
            self._choose_grids(common)
            costs.append((self._grid_cycles(), number, common))
        self._choose_grids(min(costs)[2])
        channels = [size[1] for size in self.shapes]
        self.parts = find_parts(self.moved, channels, self.grids)

    # -- grids and borders

    def _grid_cycles(self) -> float:
        """Approximate cycles of one thread that depend on grids: products, borders, copies."""
        cycles, count = 0.0, len(self.program.inputs)
        for value, grid in enumerate(self.grids):
            channels = self.shapes[value][1]
            sizes = [grid.part(part)[2:] for part in range(grid.parts)]
            h, w = max(sizes, key=lambda size: size[0] * size[1])
            step = self.program.steps[value - count] if value >= count else None
            if is_layer(step):
                nonzeros = step.weight.values[2] - step.weight.values[1]
                cycles += VECTOR * nonzeros * h * w / (self.threads if grid.parts == 1 else 1)
            above, below, left, right = self._needed_border(value)
            if self.threads > 1:
                cycles += channels * (CROSSED * (above + below) * w + OWN * (left + right) * h)
            for other, border in {(n.grid, n.border) for n in self.needs.get(value, ())}:
                if other != grid:
                    lines = (other.height + border[0]) * (other.width + border[2])
                    cycles += COPIED * channels * lines / self.threads
        return cycles

    def _choose_grids(self, common: tuple[int, int] | None) -> None:
        """Choose the grids of all values, and how steps read them.

        common: rows and columns of tiles to use for all values that they are suitable for.
        """
        count = len(self.program.inputs)
        self.grids, self.positive, self.needs = [], [], {}
        for value, (batch, _, height, width) in enumerate(self.shapes):
            unit = SIDE if (height, width) in self.layers.filtered else 1
            grid = grid_for(batch, height, width, self.isa.lanes, self.threads, common, unit)
            step = self.program.steps[value - count] if value >= count else None
            if is_conv(step) and step.fields.transposed:
                grid = replace(grid, parts=1, unit=1).rounded_up(step.fields.stride)
            self.grids.append(grid)
            self.positive.append(step is not None and is_positive(step, self.positive))
            for need in [] if step is None else self.needs_of(step, grid):
                self.needs.setdefault(need.value, []).append(need)

    def needs_of(self, step: AnyStep, grid: TileGrid) -> list[Need]:
        """How a step reads its operands, for an output in a grid."""
        return LOWERINGS[lowering_of(step)].needs(self, step, grid)

    def layout(self, value: int, grid: TileGrid, border: Border) -> GridLayout:
        """The layout of a value in a grid."""
        size, lanes = self.shapes[value], self.isa.lanes
        part_bytes = self.tape.thread_bytes
        if value in self.program.static:
            part_bytes = GridLayout(size, grid, border, lanes).bytes
        part_pitch = part_bytes // self.isa.line if grid.parts > 1 else 0
        return GridLayout(size, grid, border, lanes, part_pitch)

    # -- buffers

    def main(self, value: int) -> Buffer:
        """The buffer that the step of a value writes, with the borders that its readers need."""
        key = (value, self.grids[value], 0.0)
        if key not in self.buffers:
            owner, first = owner_of(self.parts, value)
            if owner == value:
                layout = self.layout(value, self.grids[value], self._needed_border(value))
                self.buffers[key] = self._new_buffer(value, layout, 0.0)
            else:
                count, line = self.shapes[value][1], self.isa.line
                self.buffers[key] = self.main(owner).channels(first, count, line)
        return self.buffers[key]

    def _new_buffer(self, value: int, layout: GridLayout, fill: float) -> Buffer:
        """Memory for a value: of the arena, or for a static input in its own memory."""
        if value not in self.program.static:
            return Buffer(layout, fill)
        buffer = Buffer(layout, fill, offset=self.static_bytes)
        self.static_bytes += layout.bytes * layout.grid.parts
        return buffer

    def _moves_of(self, value: int) -> Moves:
        tape = self.static_tape if value in self.program.static else self.tape
        tape.phase()
        return Moves(tape, self.isa)

    def _needed_border(self, value: int) -> Border:
        """The border that readers of a value need in its own grid, or those of another value in the
        same memory."""
        border, owner = NO_BORDER, owner_of(self.parts, value)[0]
        for part in [owner, *(v for v in self.parts if owner_of(self.parts, v)[0] == owner)]:
            for need in self.needs.get(part, ()):
                if need.grid == self.grids[part] and need.fill == 0.0:
                    border = widened(border, need.border)
        return border

    def buffer(self, need: Need) -> Buffer:
        """The buffer of a value in the layout that a step reads; copied if the layout differs."""
        has_border = need.border != NO_BORDER
        fill = need.fill if has_border else 0.0
        key = (need.value, need.grid, fill)
        if key in self.buffers:
            return self.buffers[key]
        copy_border = NO_BORDER
        for other in self.needs[need.value]:
            if other.grid == need.grid and (other.fill == fill or other.border == NO_BORDER):
                copy_border = widened(copy_border, other.border)
        layout = self.layout(need.value, need.grid, copy_border)
        copy = self._new_buffer(need.value, layout, fill)
        self.buffers[key] = copy
        self._write_copy(need.value, copy, self._read_of(need.value, copy.layout))
        return copy

    def _read_of(self, value: int, layout: GridLayout) -> set[At]:
        """The positions of a copy of a value that are read."""
        positions: set[At] = set()
        for reader in self.remaining:
            step, out_grid = self.step(reader), self.grids[reader]
            needs = self.needs_of(step, out_grid)
            if not any(n.value == value and n.grid == layout.grid for n in needs):
                continue
            taps = LOWERINGS[lowering_of(step)].windows(step)
            # A depthwise layer may read lines that no tap is at, and permute them.
            if not taps or step.x != value or step.add == value or self.layers.is_depthwise(step):
                return set(layout.around())
            for window in taps:
                positions |= touched(window, layout.grid, out_grid)
        return positions

    def _write_copy(self, value: int, to: Buffer, positions: set[At]) -> None:
        """Write a copy of a value in another layout, including borders, at these positions."""
        source, moves = self.main(value), self._moves_of(value)
        at = at_array(sorted(positions & set(to.layout.around())))
        image, y, x, is_inside = to.layout.pixels(at)
        pixel = [np.where(is_inside, a, 0) for a in (image, y, x)]
        numbers = np.where(is_inside, source.layout.element(*pixel), -1)
        rows = rows_of(to.layout, at, numbers)
        moves.moved(move.Gather(to.fill), (source, 0), (to, 0), to.layout, (moves.pitch(source), moves.pitch(to)), rows)

    # -- steps

    def build(self, strides: Sequence[tuple[int, int, int, int]]) -> None:
        """Write the tape. strides: of each input along (batch, channel, y, x), in elements."""
        count = len(self.program.inputs)
        for value, stride in enumerate(strides):
            self.tape.value = value
            self._load_input(value, stride)
        self.remaining = [count + number for number in range(len(self.program.steps))]
        while self.remaining:
            chain = self._next_chain()
            self.tape.value = chain[0]
            self.chains |= dict.fromkeys(chain, chain[0])
            if len(chain) == 1:
                self._write_step(self.step(chain[0]), chain[0])
            else:
                self._write_chain(chain)
            self.remaining = [value for value in self.remaining if value not in chain]
        for number, value in enumerate(self.program.outputs):
            self.tape.value = value
            self._store_output(value, 1 + count + number)

    def rows(self) -> list[PlanRow]:
        """What the tape does for each value."""
        rows = []
        for value, (grid, size) in enumerate(zip(self.grids, self.shapes, strict=True)):
            step = self.moved.step(value)
            first = self.chains.get(value, value)
            owner = owner_of(self.parts, value)[0]
            kernels = tuple((phase, name, n) for (phase, name), n in self.tape.kernels.get(first, {}).items())
            reads = () if step is None else step.reads
            op = "input" if step is None else step.op if step.act is None else f"{step.op}, {step.act[0]}"
            name = "" if step is None else step.name
            rows.append(PlanRow(value, op, reads, name, size, grid, kernels, None if first == value else first, owner))
        return rows

    def step(self, value: int) -> AnyStep:
        """The step that computes a value."""
        return self.program.steps[value - len(self.program.inputs)]

    def _next_chain(self) -> list[int]:
        """The next value to compute, and values that its threads can compute without a barrier."""
        chain, waiting = self.remaining[:1], set(self.remaining)
        head = self.step(chain[0])
        if not is_layer(head) or as_conv(head).fields.transposed:
            return chain
        if self.layers.has_own_kernel(chain[0]):
            return chain
        shapes = [self._tiling_problem(chain[0])]
        for value in self.remaining[1:]:
            step = self.step(value)
            if not is_layer(step) or not is_pixelwise(step) or self.layers.has_own_kernel(value):
                continue
            grids = {self.grids[v] for v in (value, *(v for v in step.reads if v in chain))}
            are_ready = all(v not in waiting or v in chain for v in step.reads)
            if are_ready and grids == {self.grids[chain[0]]}:
                longer = [*shapes, self._tiling_problem(value)]
                if chain_pays(longer, self.threads, self.isa):
                    chain, shapes = [*chain, value], longer
        return chain

    def estimate(self) -> float:
        """Estimated cycles of the layers."""
        steps = enumerate(self.program.steps, len(self.program.inputs))
        layers = [v for v, step in steps if is_layer(step)]
        cycles = sum(best(self._tiling_problem(v), self.threads, self.isa)[0] for v in layers)
        return cycles + call_cycles(self.moved)

    def largest(self) -> int:
        """Bytes of the largest value."""
        return max(size[1] * grid.positions for size, grid in zip(self.shapes, self.grids, strict=True)) * self.isa.line

    def _tiling_problem(self, value: int) -> TilingProblem:
        """The tiling problem of the layer that computes a value."""
        conv = as_conv(self.layers.step(value))
        nonzeros = conv.weight.values[2] - conv.weight.values[1]
        channels = self.shapes[conv.x][1]
        return shape_of(conv, windows(conv.fields)[0], self.grids[value], channels, nonzeros)

    def _write_chain(self, chain: list[int]) -> None:
        """Write several layers in one phase."""
        window_pieces: list[WindowPiece] = []
        for number, value in enumerate(chain):
            earlier = chain[:number]
            needs = self.needs_of(self.step(value), self.grids[value])
            sources = [self.main(n.value) if n.value in earlier else self.buffer(n) for n in needs]
            window_pieces += self.layer_windows(value, sources, self._output_buffer(value, earlier))
        self.tape.phase()
        emit_chain(self.tape, self.isa, window_pieces)
        for piece in window_pieces:
            Moves(self.tape, self.isa).borders(piece.out)

    def layer_windows(self, value: int, sources: Sequence[Buffer], out: Buffer) -> list[WindowPiece]:
        """The windows of the layer that computes a value."""
        step = as_conv(self.layers.step(value))
        return pieces(step, self.layers.weight(value), sources[0], sources[-1] if step.adds else None, out)

    def _output_buffer(self, value: int, earlier: Sequence[int]) -> Buffer:
        """The buffer that a step writes: of a layer that of the value it adds, if it is not read afterwards.

        earlier: preceding layers of the same phase.
        """
        step = self.step(value)
        add = step.add if is_layer(step) else None
        fixed = {*self.moved.stored, *self.program.static, step.x}
        owners = {owner_of(self.parts, part)[0] for part in self.parts}
        if add is None or add in fixed:
            return self.main(value)
        if owners & {owner_of(self.parts, v)[0] for v in (value, add)}:
            return self.main(value)
        reads_of = {v: self.moved.sources(self.step(v)) for v in self.remaining if v != value}
        readers = [v for v, sources in reads_of.items() if add in sources]
        if any(v not in earlier or not is_pixelwise(self.step(v)) for v in readers):  # type: ignore[arg-type]
            return self.main(value)
        key = (value, self.grids[value], 0.0)
        add_buffer = self.buffers.get((add, self.grids[value], 0.0))
        if (
            add_buffer is not None
            and key not in self.buffers
            and add_buffer.layout.border == self._needed_border(value)
        ):
            self.buffers[key] = add_buffer
        return self.main(value)

    def _load_input(self, value: int, stride: tuple[int, int, int, int]) -> None:
        to, moves = self.main(value), self._moves_of(value)
        rows = elements(to.layout, stride, to.layout.around())
        moves.moved(move.Gather(to.fill), (1 + value, 0), (to, 0), to.layout, (4 * stride[1], moves.pitch(to)), rows)

    def _store_output(self, value: int, slot: int) -> None:
        """Write the scatter to an output."""
        self.tape.phase()  # also for a static input, which the other tape has only converted
        step, kind = self.moved.step(value), self.program.kinds[value]
        if step is not None and (kind == "matrices" or (is_move(step) and value not in self.moved.written)):
            owners = self.moved.sources(step) if is_move(step) else (value,)
            sources = {v: self.main(v) for v in owners}
            MoveWriter(self.tape, self.moved, sources, self.isa.lanes).to_output(value, slot)
            return
        source, moves = self.main(value), Moves(self.tape, self.isa)
        _, channels, height, width = self.shapes[value]
        image = channels * height * width
        stride = (image, 1, width * channels, channels) if kind in CHANNELS_LAST else (image, height * width, width, 1)
        rows = elements(source.layout, stride, source.layout.inside())
        moves.moved(move.Scatter(), (source, 0), (slot, 0), source.layout, (moves.pitch(source), 4 * stride[1]), rows)

    def _write_step(self, step: AnyStep, value: int) -> None:
        """Write one step."""
        if is_move(step) and value not in self.moved.written:
            return
        if is_move(step) and self.parts.get(value, 0) == self.moved.location(value):
            self.main(value)
            return
        sources = [self.buffer(need) for need in self.needs_of(step, self.grids[value])]
        out = self._output_buffer(value, ())
        self.tape.phase()
        for written in LOWERINGS[lowering_of(step)].write(StepCall(self, value, step, sources, out)):
            Moves(self.tape, self.isa).borders(written)


# ------------------------------------------------------------------------------- what lowerings need


def _own_grids(builder: TapeBuilder, step: AnyStep, grid: TileGrid) -> list[Need]:
    """Operands in their grids, whatever that of the result."""
    return [Need(v, builder.grids[v], NO_BORDER, 0.0) for v in step.reads]


def _same_grid(builder: TapeBuilder, step: AnyStep, grid: TileGrid) -> list[Need]:
    """Operands in the grid of the result, but for factors of products, which are read one by one."""
    factors = factors_of(step)
    return [
        Need(s, builder.grids[s] if v in factors else grid, NO_BORDER, 0.0)
        for v, s in zip(step.reads, builder.moved.sources(step), strict=True)
    ]


def _sources(builder: TapeBuilder, step: AnyStep, grid: TileGrid) -> list[Need]:
    """The values that a move comes from, in their grids."""
    return [Need(v, builder.grids[v], NO_BORDER, 0.0) for v in builder.moved.sources(step)]


def _first_in_grid(builder: TapeBuilder, step: AnyStep, grid: TileGrid) -> list[Need]:
    """The first operand in the grid of the result, the second in its own."""
    x, z = step.reads
    return [Need(x, grid, NO_BORDER, 0.0), Need(z, builder.grids[z], NO_BORDER, 0.0)]


def _windows_of_layer(builder: TapeBuilder, step: Layer, grid: TileGrid) -> list[Need]:
    if not is_conv(step):
        return _same_grid(builder, step, grid)
    if step.fields.transposed:
        stride = step.fields.stride
        wanted = replace(grid, height=grid.height // stride[0], width=grid.width // stride[1])
    else:
        wanted = grid.scaled(step.fields.stride)
    input_grid = _as_own(builder, step.x, wanted)
    border = reach(input_grid, grid, windows(step.fields))
    layout = GridLayout(builder.shapes[step.x], input_grid, border, builder.isa.lanes)
    if builder.layers.is_depthwise(step) and permutes_edges(step.fields, layout, grid):
        border = NO_BORDER
    added = [] if step.add is None else [Need(step.add, grid, NO_BORDER, 0.0)]
    return [Need(step.x, input_grid, border, 0.0), *added]


def _windows_of(builder: TapeBuilder, step: AnyStep, grid: TileGrid) -> list[Need]:
    """The windows of a pool or the pixels of a selection, with a border: its parts and those of the
    result may begin at different pixels."""
    input_grid = _as_own(builder, step.x, grid.scaled(step.fields.stride))
    is_maximum = lowering_of(step) == POOL and not step.fields.mean
    fill = LEAST if is_maximum and not builder.positive[step.x] else 0.0
    return [Need(step.x, input_grid, reach(input_grid, grid, windows(step.fields.window)), fill)]


def _as_own(builder: TapeBuilder, value: int, wanted: TileGrid) -> TileGrid:
    """A grid in which a value is read: its own where tiles are equal."""
    own = builder.grids[value]
    return own if replace(wanted, unit=own.unit) == own else wanted


# -------------------------------------------------------------------------------- what lowerings write


class StepCall(NamedTuple):
    """A step to write to the last phase of a tape. sources: as its lowering needs them."""

    builder: TapeBuilder
    value: int
    step: Any
    sources: list[Buffer]
    out: Buffer

    @property
    def moves(self) -> Moves:
        """What writes to the tape."""
        return Moves(self.builder.tape, self.builder.isa)


def _write_layer(call: StepCall) -> list[Buffer]:
    builder, value = call.builder, call.value
    tape, isa = builder.tape, builder.isa
    layer_pieces = builder.layer_windows(value, call.sources, call.out)
    block = builder.layers.filtered_block(value)
    if block is None:
        emit_alone(tape, isa, layer_pieces)
    else:
        emit_winograd(tape, isa, layer_pieces[0], block)
        builder.is_exact = False
    return [call.out]


def _write_pool(call: StepCall) -> list[Buffer]:
    call.moves.pool(call.step.fields, call.sources[0], call.out)
    return [call.out]


def _write_mean(call: StepCall) -> list[Buffer]:
    call.moves.mean(call.sources[0], call.out)
    return [call.out]


def _write_flat(call: StepCall) -> list[Buffer]:
    call.moves.flat(call.sources[0], call.out)
    return [call.out]


def _write_scaled(call: StepCall) -> list[Buffer]:
    call.moves.scale(call.step.act, (call.sources[0], call.sources[1]), call.out)
    return [call.out]


def _write_elementwise(call: StepCall) -> list[Buffer]:
    call.moves.pointwise(move.Pointwise(call.step.act, len(call.sources) == 2), call.sources, call.out)
    return [call.out]


def _write_selection(call: StepCall) -> list[Buffer]:
    builder, x = call.builder, call.step.x
    if builder.parts.get(call.value, (-1, 0))[0] == x:
        return []  # a slice is already in the memory of x
    channels = selected(call.step, builder.weights, builder.shapes[x][1])
    call.moves.select(call.step.fields, channels, call.sources[0], call.out)
    return [call.out]


def _write_join(call: StepCall) -> list[Buffer]:
    """Write the operands of a concatenation that are not yet in its memory."""
    builder = call.builder
    first, copies = 0, []
    owner, shift = owner_of(builder.parts, call.value)
    for x, source in zip(call.step.reads, call.sources, strict=True):
        count = source.layout.size[1]
        if owner_of(builder.parts, x) != (owner, shift + first):
            copies.append((source, call.out.channels(first, count, builder.isa.line)))
        first += count
    for source, to in copies:
        call.moves.pointwise(move.Pointwise(None, False), [source], to)
    return [to for _, to in copies]


def _write_called(call: StepCall) -> list[Buffer]:
    write_call(call.value, call.moves, call.builder.moved, call.sources, call.out)
    return [call.out]


class Lowering(NamedTuple):
    """How plans compute steps: the needs of their operands, what is written, and the windows of their
    first operand, if they read no more. write returns the buffers whose borders are to be written."""

    needs: Callable[[TapeBuilder, Any, TileGrid], list[Need]]
    write: Callable[[StepCall], list[Buffer]]
    windows: Callable[[Any], Sequence[OutputWindow]] = lambda step: ()


#: lowering of a row of `segment_rows.ROWS` -> how plans compute it
LOWERINGS: dict[str, Lowering] = {
    LAYER: Lowering(_windows_of_layer, _write_layer, lambda step: windows(step.fields) if is_conv(step) else ()),
    POOL: Lowering(_windows_of, _write_pool, lambda step: windows(step.fields.window)),
    SELECTION: Lowering(_windows_of, _write_selection),
    MEAN: Lowering(_own_grids, _write_mean),
    FLAT: Lowering(_own_grids, _write_flat),
    SCALE: Lowering(_first_in_grid, _write_scaled),
    ELEMENTWISE: Lowering(_same_grid, _write_elementwise),
    JOIN: Lowering(_same_grid, _write_join),
    MOVED: Lowering(_sources, _write_called),
    RESIZED: Lowering(_own_grids, _write_called),
    RECURRENT: Lowering(_own_grids, _write_called),
    **dict.fromkeys((OVER_CHANNELS, PRODUCT, POINTWISE), Lowering(_same_grid, _write_called)),
}
