"""The levels of a network, the values stored between them, and the sizes of weight blocks.

The plan is compared with the budget before anything runs. It counts the bytes of values stored for
all N inputs, of temporary values in a level, and of one block of a streamed weight.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from demask.errors import BadInput
from demask.facts.analysis import Analysis
from demask.files.weight_file import StoredTensor
from demask.graph.program import Program
from demask.ops import Relation, Table, schema
from demask.ops.entries.contraction import PRODUCTS
from demask.ops.entries.recurrent import GATES
from demask.ops.schema import fake
from demask.ops.traits import MATRIX_TRANSPOSES, MEMORY_VIEWS, TRANSPOSED_VIEWS
from demask.traverse.batching.batch_plan import (
    BatchAxes,
    BatchCall,
    BatchPlan,
    BatchRef,
    LayerWeight,
    Level,
    StreamedLayer,
    constants_read,
    find_batch_axes,
)

aten = torch.ops.aten
WORK = 4 * 2**20  # bytes of BLAS and allocator in addition to tensors: 0.5 to 2.6 MiB measured
BLOCK = 16 * 2**20  # bytes: of 1 GiB, blocks of 4 to 48 MiB were equally fast on a quiet machine
ROWS = 64  # rows of blocks are multiples of it where possible: full tiles of the matrix product
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
    resident = shape.resident(levels)
    fixed = [resident + WORK + size for size in shape.stored_bytes(levels)]
    least = shape.peak(levels, fixed, at_once or 1)
    if least > budget:
        raise BadInput(
            f"expected a budget of {least:,} bytes or more for {inputs} inputs at a time, got "
            f"{budget:,}; give memory={least}, or fewer inputs"
        )
    tries = [at_once] if at_once else range(inputs, 0, -1)
    best = next(k for k in tries if shape.peak(levels, fixed, k) <= budget)
    levels = [shape.blocked(level, budget - size) for level, size in zip(levels, fixed, strict=True)]
    batch_axes = {node.name: axis for node, axis in shape.batch_axes.by_value.items() if node in shape.stored_values}
    sizes = {node.name: values for node, values in shape.batch_axes.sizes.items()}
    input_names = _names(program.graph.find_nodes(op="placeholder"))
    return BatchPlan(
        tuple(levels),
        batch_axes,
        sizes,
        inputs,
        best,
        shape.peak(levels, fixed, best),
        least,
        resident,
        input_names,
        _replace_nodes(shape.results),
        program.out_spec,
    )


def streamable(program: Program, inputs: int, table: Table) -> dict[str, StoredTensor]:
    """The constants that only fully connected layers read: they can stay in a file."""
    every = {
        name: StoredTensor(name, c.tensor.dtype, tuple(c.tensor.shape), 0) for name, c in program.constants.items()
    }
    shape = _LevelShape(program, every, inputs, table)
    return {layer.stored.name: layer.stored for layer in shape.streams.values()}


class _LevelShape:
    """The level of each call, and the bytes of values, constants and blocks.

    streams: layers with weights in a file. connected: all fully connected layers. level_of: index
    of the level of each value of the batch. stored_values: values stored between levels.
    """

    def __init__(self, program: Program, stored: Mapping[str, StoredTensor], inputs: int, table: Table):
        self.program, self.stored, self.inputs = program, stored, inputs
        self.analysis = Analysis(program, table)
        self.batch_axes: BatchAxes = find_batch_axes(self.analysis, inputs)
        self.nodes = list(program.graph.nodes)
        self.by_name = {n.name: n for n in self.nodes}
        self.results: Any = self.nodes[-1].args[0]
        self.streams = {n: s for n in self.nodes if (s := self._find_streamed(n, stored))}
        self.connected = {n for n in self.nodes if n in self.streams or self._is_connected(n)}
        self.level_of = self._level_indices()
        self.stored_values: set[fx.Node] = set()

    def _is_connected(self, node: fx.Node) -> bool:
        """Whether a node multiplies values of the batch with a constant matrix."""
        operands = _operands(node)
        if operands is None:
            return False
        x, weight, bias = operands
        return x in self.batch_axes.by_value and self._is_constant(weight) and (bias is None or self._is_constant(bias))

    def _is_constant(self, node: fx.Node) -> bool:
        if node.op != "call_function":
            return node.op == "get_attr"
        return node not in self.batch_axes.by_value and all(map(self._is_constant, node.all_input_nodes))

    def _find_streamed(self, node: fx.Node, stored: Mapping[str, StoredTensor]) -> StreamedLayer | None:
        operands = _operands(node) if self._is_connected(node) else None
        if operands is None:
            return None
        x, weight, bias = operands
        source, swaps = _viewed(weight)
        in_file = stored.get(str(source.target)) if source.op == "get_attr" else None
        is_plain_bias = bias is None or (bias.op == "get_attr" and fake(bias).ndim == 1)
        if in_file is None or not is_plain_bias or not _read_by_products(source):
            return None
        is_linear = node.target is aten.linear.default
        name = None if bias is None else str(bias.target)
        return StreamedLayer(node.name, x.name, name, in_file, is_linear == (swaps % 2 == 0))

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

    def levels(self) -> list[Level]:
        """The levels in order; each fully connected layer is a level."""
        by_level: dict[Any, list[fx.Node]] = {}
        for node in sorted(self.level_of, key=self.level_of.__getitem__):  # sorted() keeps the graph's order
            if node.op == "call_function":
                key = (self.level_of[node], node if node in self.connected else None)
                by_level.setdefault(key, []).append(node)
        groups = list(by_level.values())
        constant = [n for n in _nodes(self.results) if self._is_constant_result(n)]
        groups += [constant] if constant else []
        last = self._last_levels(groups)
        return [self._build_level(k, group, last) for k, group in enumerate(groups)]

    def _is_constant_result(self, node: fx.Node) -> bool:
        """Whether a result of the network is a call that depends on constants only."""
        if node in self.batch_axes.sizes:
            raise BadInput(
                "the network returns the size of its batch, which no pass knows; give a "
                "part of the model that returns tensors"
            )
        return node.op == "call_function" and node not in self.level_of

    def _last_levels(self, groups: list[list[fx.Node]]) -> dict[fx.Node, int]:
        """The last level that reads each value; the number of levels for results."""
        last = {n: len(groups) for n in _nodes(self.results)}
        for k, group in enumerate(groups):
            for node in group:
                for source in node.all_input_nodes:
                    last[source] = max(last.get(source, 0), k)
        return last

    def _build_level(self, k: int, group: list[fx.Node], last: Mapping[fx.Node, int]) -> Level:
        inside = set(group)
        reads = {s: None for n in group for s in n.all_input_nodes if s in self.batch_axes.by_value and s not in inside}
        # Of a tuple, its elements are stored.
        writes = [n for n in group if last.get(n, -1) > k and isinstance(fake(n), Tensor)]
        last_reads = [n for n in reads if last[n] == k and n.op != "placeholder"]
        self.stored_values |= {*reads, *writes, *_nodes(self.results)}
        names = (_names(reads), _names(writes), _names(last_reads))
        if group[0] in self.streams:
            return Level(True, (), self.streams[group[0]], *names)
        connected = group[0] in self.connected or group[0] not in self.level_of
        return Level(connected, self._calls(group, set(writes)), None, *names)

    def _calls(self, group: list[fx.Node], writes: set[fx.Node]) -> tuple[BatchCall, ...]:
        """The calls of a group, with calls on constants that they read."""
        needed: dict[fx.Node, None] = {}
        for node in group:
            self._add_needed(node, needed, set(group))
        order = [n for n in self.nodes if n in needed]
        last = {source: node for node in order for source in node.all_input_nodes}
        frees: dict[fx.Node, list[str]] = {}
        for node in order:
            if node not in writes:
                frees.setdefault(last.get(node, node), []).append(node.name)
        return tuple(
            BatchCall(
                n.name,
                n.target,
                _replace_nodes(n.args),
                _replace_nodes(n.kwargs),
                self._weight(n),
                tuple(frees.get(n, ())),
            )
            for n in order
        )

    def _add_needed(self, node: fx.Node, needed: dict[fx.Node, None], group: set[fx.Node]) -> None:
        if node in needed or node.op != "call_function" or node in self.batch_axes.sizes:
            return
        if node in group or node not in self.batch_axes.by_value:
            needed[node] = None
            for source in node.all_input_nodes:
                self._add_needed(source, needed, group)

    def _weight(self, node: fx.Node) -> LayerWeight | None:
        """The constant matrices or kernels that a call multiplies with; None for other calls."""
        batched = node.op == "call_function" and node in self.batch_axes.by_value
        relation = self.analysis.relation(node) if batched else None
        if not isinstance(relation, Relation):
            return None
        if relation.entry.fill != "sum" and not relation.back:
            return None
        operands = [o.value for o in relation.operands if isinstance(o.value, fx.Node)]
        constants = [n for n in operands if self._is_constant(n) and fake(n).ndim > 1]
        if not constants:
            return None
        names = "+".join(dict.fromkeys(_constant_name(n) for n in constants))
        size = sum(fake(n).numel() * fake(n).dtype.itemsize for n in constants)
        return LayerWeight(names, size, node in self.connected)

    def resident(self, levels: Sequence[Level]) -> int:
        """Bytes of constants in memory; 0 unless others are in a file."""
        if not self.stored:
            return 0
        used = constants_read(levels) | {str(n.target) for n in _nodes(self.results, "get_attr")}
        return sum(c.tensor.nbytes for n, c in self.program.constants.items() if n in used)

    def stored_bytes(self, levels: Sequence[Level]) -> list[int]:
        """Bytes stored for all inputs while each level runs, including values that it writes."""
        alive: set[str] = set()
        result = []
        for level in levels:
            alive |= set(level.writes)
            result.append(sum(self.batch_axes.nbytes(self.by_name[n], self.inputs) for n in alive))
            alive -= set(level.drops)
        return result

    def working(self, level: Level, at_once: int) -> int:
        """Bytes of a level's temporary values, or of a streamed layer's block."""
        if level.streamed is not None:
            block = level.streamed
            return self._fixed_bytes(block) + max(block.rows, 1) * self._row_bytes(block)
        count = self.inputs if level.connected else min(at_once, self.inputs)
        copied = count < self.inputs
        copied_parts = sum(
            self.batch_axes.nbytes(self.by_name[n], count)
            for n in level.reads
            if copied and self.batch_axes.by_value[self.by_name[n]].copies
        )
        alive, most = Counter(), 0
        temporaries, owner = Counter(), {}
        for call in level.calls:
            node = self.by_name[call.name]
            source = owner.get(getattr(node.args[0], "name", "")) if node.target in _VIEWS else None
            owner[call.name] = source or call.name
            alive[owner[call.name]] += 1
            if source is None and (copied or call.name not in level.writes):
                temporaries[call.name] = self.batch_axes.nbytes(node, count)
            # A recurrent call computes the gates of all steps first.
            gates = GATES.get(str(node.target), 0) * self.batch_axes.nbytes(node, count)
            most = max(most, temporaries.total() + gates)
            for name in call.frees:
                alive[owner[name]] -= 1
                if not alive[owner[name]]:
                    del temporaries[owner[name]]
        return copied_parts + most

    def peak(self, levels: Sequence[Level], fixed: Sequence[int], at_once: int) -> int:
        """Bytes of the level that takes most. fixed: bytes of each level at any `at_once`."""
        pairs = zip(levels, fixed, strict=True)
        return max((size + self.working(level, at_once) for level, size in pairs), default=WORK)

    def _product_rows(self, layer: StreamedLayer) -> int:
        """Rows of a layer's product: positions of all inputs."""
        features = layer.stored.shape[1 if layer.out_first else 0]
        x = self.by_name[layer.x]
        return self.batch_axes.nbytes(x, self.inputs) // (fake(x).dtype.itemsize * features)

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


def _viewed(node: fx.Node) -> tuple[fx.Node, int]:
    """The node that a matrix is a view of, and how often its axes are exchanged."""
    source: Any = node
    swaps = 0
    while source.target in TRANSPOSED_VIEWS:
        swaps += _swaps_axes(source)
        source = source.args[0]
    return source, swaps


def _swaps_axes(node: fx.Node) -> bool:
    """Whether a view of a matrix has its axes exchanged."""
    bound = schema.arguments(node)
    if node.target is aten.transpose.int:
        return (bound["dim0"] - bound["dim1"]) % 2 == 1
    if node.target is aten.permute.default:
        return bound["dims"][0] % 2 == 1
    return node.target in MATRIX_TRANSPOSES


def is_view(node: fx.Node) -> bool:
    """Whether a call returns a transposed or plain view of its operand."""
    return node.target in TRANSPOSED_VIEWS


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
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


def _nodes(results: Sequence[Any], op: str = "") -> list[fx.Node]:
    return [n for n in results if isinstance(n, fx.Node) and op in ("", n.op)]


def _names(nodes: Any) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _replace_nodes(args: Any) -> Any:
    """Arguments with references in place of nodes; constants by their name in the model."""
    return map_arg(args, cast(Any, lambda n: BatchRef(f"={n.target}" if n.op == "get_attr" else n.name)))
