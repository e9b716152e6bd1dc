"""The levels of a network, the values stored between them, and the sizes of weight blocks.

The plan is compared with the budget before anything runs. It counts the bytes of values stored for
all N inputs, of temporary values in a level, and of one block of a streamed weight.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from demask.errors import BadInput
from demask.exec.call_groups import CallGroup, group_calls
from demask.facts.analysis import Analysis
from demask.files.weight_file import StoredTensor
from demask.graph.program import Program
from demask.ops import Relation, Table, schema
from demask.ops.entries.contraction import PRODUCTS
from demask.ops.entries.recurrent import GATES
from demask.ops.schema import fake
from demask.ops.traits import MEMORY_VIEWS, TRANSPOSED_VIEWS
from demask.traverse.batching.batch_plan import (
    BatchAxes,
    BatchPlan,
    LayerTraffic,
    Level,
    StreamedLayer,
    find_batch_axes,
)

aten = torch.ops.aten
WORK = 4 * 2**20  # bytes of BLAS and allocator in addition to tensors: 0.5 to 2.6 MiB measured
BLOCK = 16 * 2**20  # bytes: of 1 GiB, blocks of 4 to 48 MiB were equally fast on a quiet machine
ROWS = 64  # rows of blocks are multiples of it where possible: full tiles of the matrix product
Operands = tuple[fx.Node, fx.Node, fx.Node | None]  # input, matrix and bias of a product
_VIEWS = MEMORY_VIEWS | {operator.getitem}


def plan_batches(
    program: Program,
    stored: Mapping[str, StoredTensor],
    budget: int,
    inputs: int,
    table: Table,
    at_once: int | None = None,
) -> BatchPlan:
    """The plan to run `inputs` inputs of a program within `budget` bytes.

    stored: constants in a file. at_once: None: the largest number that fits.

    Raises:
        BadInput: if no plan fits; the message has the least budget.
    """
    shape = _LevelShape(program, stored, inputs, table)
    levels = shape.levels()
    constants = shape.constants_in_memory(levels)
    resident = sum(program.constants[name].tensor.nbytes for name in constants) if stored else 0
    fixed = [resident + WORK + size for size in shape.stored_bytes(levels)]
    least = shape.peak(levels, fixed, at_once or 1)
    if least > budget:
        raise BadInput(
            f"expected a budget of {least:,} bytes or more for {inputs} inputs at a time, got "
            f"{budget:,}; give memory={least}, or fewer inputs"
        )
    tries = [at_once] if at_once else range(inputs, 0, -1)
    best = next(k for k in tries if shape.peak(levels, fixed, k) <= budget)
    levels = tuple(shape.blocked(level, budget - size) for level, size in zip(levels, fixed, strict=True))
    peak = shape.peak(levels, fixed, best)
    outline = replace(program, constants={})
    for node in program.graph.find_nodes(op="get_attr"):
        node.meta.pop("positions", None)  # a constant, which the plan must not retain
    return BatchPlan(outline, levels, shape.batch_axes, inputs, best, peak, least, frozenset(constants), resident)


def streamable(program: Program, inputs: int, table: Table) -> dict[str, StoredTensor]:
    """The constants that only fully connected layers read: they can stay in a file."""
    every = {
        name: StoredTensor(name, c.tensor.dtype, tuple(c.tensor.shape), 0) for name, c in program.constants.items()
    }
    shape = _LevelShape(program, every, inputs, table)
    return {layer.stored.name: layer.stored for layer in shape.streams.values()}


class _LevelShape:
    """The level of each call, and the bytes of values, constants and blocks.

    connected: the operands of fully connected layers. streams: those with weights in a file. level_of:
    index of the level of each value of the batch.
    """

    def __init__(self, program: Program, stored: Mapping[str, StoredTensor], inputs: int, table: Table):
        self.program, self.inputs = program, inputs
        self.analysis = Analysis(program, table)
        self.batch_axes: BatchAxes = find_batch_axes(self.analysis, inputs)
        self.nodes = list(program.graph.nodes)
        self.results = self.nodes[-1].all_input_nodes
        self.constant = set[fx.Node]()  # values that depend on constants alone
        for n in self.nodes:
            depends = n.op == "call_function" and n not in self.batch_axes.by_value
            if n.op == "get_attr" or (depends and self.constant.issuperset(n.all_input_nodes)):
                self.constant.add(n)
        self.connected = {n: operands for n in self.nodes if (operands := self._product(n)) is not None}
        self.streams = {n: s for n, operands in self.connected.items() if (s := _streamed(n, operands, stored))}
        self.level_of = self._level_indices()

    def _product(self, node: fx.Node) -> Operands | None:
        """The operands of a call that multiplies values of the batch with a constant matrix; None for other calls."""
        operands = _operands(node)
        if operands is None or operands[0] not in self.batch_axes.by_value:
            return None
        return operands if all(n is None or n in self.constant for n in operands[1:]) else None

    def _level_indices(self) -> dict[fx.Node, int]:
        """The level index of each value of the batch: odd for fully connected layers, even between
        them. Layers with the same index do not read each other."""
        level_of: dict[fx.Node, int] = {}
        for node in self.nodes:
            before = max((level_of[n] for n in node.all_input_nodes if n in level_of), default=0)
            if node in self.connected:
                level_of[node] = before + 1 + before % 2
            elif node in self.batch_axes.by_value:
                level_of[node] = before + before % 2
        return level_of

    def levels(self) -> tuple[Level, ...]:
        """The levels in order; each fully connected layer is a level."""
        by_level: dict[Any, list[fx.Node]] = {}
        for node in sorted(self.level_of, key=self.level_of.__getitem__):  # sorted() keeps the graph's order
            if node.op == "call_function":
                key = (self.level_of[node], node if node in self.connected else None)
                by_level.setdefault(key, []).append(node)
        if any(node in self.batch_axes.sizes for node in self.results):
            raise BadInput(
                "the network returns the size of its batch, which no pass knows; give a "
                "part of the model that returns tensors"
            )
        calls = [n for n in self.nodes if n.op == "call_function" and n not in self.batch_axes.sizes]
        constant = [n for n in calls if n not in self.level_of]  # and what depends on inputs without a batch axis
        members = list(by_level.values())
        if results := [n for n in constant if n in self.results]:
            members.append(results)
        groups = group_calls(self.program, members, set(constant))
        return tuple(self._level(nodes[-1], group) for nodes, group in zip(members, groups, strict=True))

    def _level(self, node: fx.Node, group: CallGroup) -> Level:
        """The level of a group with this call."""
        streamed = self.streams.get(node)
        if streamed is not None:
            weight = LayerTraffic(node.name, streamed.stored.name, True, streamed.stored.nbytes)
            return Level(group, True, (weight,), streamed)
        layers = tuple(layer for n in group.calls if (layer := self._layer(n)) is not None)
        return Level(group, node in self.connected or node not in self.level_of, layers)

    def _layer(self, node: fx.Node) -> LayerTraffic | None:
        """The constant matrices or kernels that a call multiplies with; None for other calls."""
        relation = self.analysis.relation(node) if node in self.batch_axes.by_value else None
        if not isinstance(relation, Relation):
            return None
        if relation.entry.fill != "sum" and not relation.back:
            return None
        operands = [o.value for o in relation.operands if isinstance(o.value, fx.Node)]
        constants = [n for n in operands if n in self.constant and fake(n).ndim > 1]
        if not constants:
            return None
        names = "+".join(dict.fromkeys(_constant_name(n) for n in constants))
        size = sum(fake(n).numel() * fake(n).dtype.itemsize for n in constants)
        return LayerTraffic(node.name, names, node in self.connected, size)

    def constants_in_memory(self, levels: Sequence[Level]) -> set[str]:
        """The names of the constants that levels read from memory, and of those that the network returns."""
        names = {str(n.target) for n in self.results if n.op == "get_attr"}
        for level in levels:
            streamed = () if level.streamed is None else (level.streamed.stored.name,)
            names |= set(level.group.constants).difference(streamed)
        return names

    def stored_bytes(self, levels: Sequence[Level]) -> list[int]:
        """Bytes stored for all inputs while each level runs, including values that it writes."""
        alive: set[fx.Node] = set()
        result = []
        for level in levels:
            alive |= set(level.group.writes)
            result.append(sum(self.batch_axes.nbytes(n, self.inputs) for n in alive))
            alive -= level.group.last_reads
        return result

    def working(self, level: Level, at_once: int) -> int:
        """Bytes of a level's temporary values, or of a streamed layer's block."""
        if level.streamed is not None:
            block = level.streamed
            return self._fixed_bytes(block) + max(block.rows, 1) * self._row_bytes(block)
        count = self.inputs if level.connected else min(at_once, self.inputs)
        copied = count < self.inputs
        axes = self.batch_axes.by_value
        parts = [n for n in level.group.reads if copied and n in axes and axes[n].copies]
        copied_parts = sum(self.batch_axes.nbytes(n, count) for n in parts)
        alive, most = Counter(), 0
        temporaries, owner = Counter(), {}
        for node in level.group.calls:
            source = owner.get(node.args[0]) if node.target in _VIEWS else None
            owner[node] = source or node
            alive[owner[node]] += 1
            if source is None and (copied or node not in level.group.writes):
                temporaries[node] = self.batch_axes.nbytes(node, count)
            # A recurrent call computes the gates of all steps first.
            gates = GATES.get(str(node.target), 0) * self.batch_axes.nbytes(node, count)
            most = max(most, temporaries.total() + gates)
            for value in owner.keys() & level.group.frees[node]:
                alive[owner[value]] -= 1
                if not alive[owner[value]]:
                    del temporaries[owner[value]]
        return copied_parts + most

    def peak(self, levels: Sequence[Level], fixed: Sequence[int], at_once: int) -> int:
        """Bytes of the level that takes most. fixed: bytes of each level at any `at_once`."""
        pairs = zip(levels, fixed, strict=True)
        return max((size + self.working(level, at_once) for level, size in pairs), default=WORK)

    def _product_rows(self, layer: StreamedLayer) -> int:
        """Rows of a layer's product: positions of all inputs."""
        features = layer.stored.shape[1 if layer.out_first else 0]
        return self.batch_axes.nbytes(layer.x, self.inputs) // (fake(layer.x).dtype.itemsize * features)

    def _row_bytes(self, layer: StreamedLayer) -> int:
        """Bytes per row of a block: its weights and their products."""
        width = layer.stored.row_bytes
        if layer.out_first:
            return width + self._product_rows(layer) * layer.stored.dtype.itemsize
        partial_sums = 4 * (layer.outputs + self._product_rows(layer)) if layer.sums_wide else 0
        return width + partial_sums

    def _fixed_bytes(self, layer: StreamedLayer) -> int:
        # partial sums in float32
        return 4 * self._product_rows(layer) * layer.outputs if layer.sums_wide else 0

    def blocked(self, level: Level, room: int) -> Level:
        """The level with the largest blocks that fit, up to BLOCK bytes."""
        layer = level.streamed
        if layer is None:
            return level
        most = min(layer.stored.shape[0], max(BLOCK // layer.stored.row_bytes, ROWS))
        rows = max(min(most, (room - self._fixed_bytes(layer)) // self._row_bytes(layer)), 1)
        rows -= rows % ROWS if ROWS < rows < layer.stored.shape[0] else 0
        return replace(level, streamed=replace(layer, rows=rows))


def _streamed(node: fx.Node, operands: Operands, stored: Mapping[str, StoredTensor]) -> StreamedLayer | None:
    """The layer of a product whose matrix can stay in a file; None for other products."""
    x, weight, bias = operands
    source: Any = weight
    while source.target in TRANSPOSED_VIEWS:
        source = source.args[0]
    in_file = stored.get(str(source.target)) if source.op == "get_attr" else None
    is_plain_bias = bias is None or (bias.op == "get_attr" and fake(bias).ndim == 1)
    if in_file is None or not is_plain_bias or not _read_by_products(source):
        return None
    matrix, view = fake(source), fake(weight)
    is_transposed = (matrix.shape, matrix.stride()) != (view.shape, view.stride())
    name = None if bias is None else str(bias.target)
    return StreamedLayer(node, x, name, in_file, (node.target is aten.linear.default) != is_transposed)


def is_view(node: fx.Node) -> bool:
    """Whether a call returns a transposed or plain view of its operand."""
    return node.target in TRANSPOSED_VIEWS


def _operands(node: fx.Node) -> Operands | None:
    """Input, matrix and bias of a product with a matrix; None for other calls."""
    if str(node.target) not in PRODUCTS:
        return None
    bound: Any = schema.arguments(node)
    if node.target is aten.linear.default:
        x, weight, bias = bound["input"], bound["weight"], bound["bias"]
    elif node.target is aten.addmm.default:
        x, weight, bias = bound["mat1"], bound["mat2"], bound["self"]
        if (bound["alpha"], bound["beta"]) != (1, 1):
            return None
    else:
        x, weight, bias = bound["self"], bound.get("other", bound.get("mat2")), None
    is_matrix = fake(weight).ndim == 2 and fake(x).ndim >= 2
    return (x, weight, bias) if is_matrix else None


def _read_by_products(node: fx.Node) -> bool:
    """Whether only matrix products read a constant, possibly through views."""
    return all(
        _read_by_products(user)
        if user.target in TRANSPOSED_VIEWS
        else (operands := _operands(user)) is not None and node in operands[1:2]
        for user in node.users
    )


def _constant_name(node: fx.Node) -> str:
    while node.op == "call_function":
        node = node.all_input_nodes[0]
    return str(node.target)
