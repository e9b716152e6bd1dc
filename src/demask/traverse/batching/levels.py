"""Which level each call of a network is in, what is held when, and how large blocks may be.

The plan is compared with the budget before anything runs: what is held for all N inputs, what the
calls of a level make and drop, and one block of a streamed weight, are counted in bytes of tensors.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

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
from demask.ops.traits import MATRIX_TRANSPOSES, MEMORY_VIEWS, TRANSPOSED_VIEWS
from demask.traverse.batching.batch_axis import Lanes, lanes_of
from demask.traverse.batching.batch_plan import (
    BatchCall,
    BatchPlan,
    BatchRef,
    LayerWeight,
    Level,
    StreamedLayer,
    constants_read,
)

aten = torch.ops.aten
WORK = 4 * 2**20  # bytes that BLAS and allocator take beside tensors: 0.5 to 2.6 MiB were measured
BLOCK = 16 * 2**20  # bytes: of 1 GiB, blocks of 4 to 48 MiB were equally fast on a quiet machine
ROWS = 64  # a block's rows are a multiple where they can be: full tiles of the matrix product
_VIEWS = MEMORY_VIEWS | {operator.getitem}


def planned(
    program: Program,
    stored: Mapping[str, StoredTensor],
    budget: int,
    inputs: int,
    table: Table,
    at_once: int | None = None,
) -> BatchPlan:
    """How `inputs` inputs of a program run within `budget` bytes. stored: constants in a file.

    BadInput, with the least budget that would do, where they do not.
    """
    shape = _LevelShape(program, stored, inputs, table)
    levels = shape.levels()
    resident = shape.resident(levels)
    fixed = [resident + WORK + size for size in shape.held(levels)]
    least = shape.peak(levels, fixed, at_once or 1)
    if least > budget:
        raise BadInput(
            f"expected a budget of {least:,} bytes or more for {inputs} inputs at a time, got "
            f"{budget:,}; give memory={least}, or fewer inputs"
        )
    tries = [at_once] if at_once else range(inputs, 0, -1)
    best = next(k for k in tries if shape.peak(levels, fixed, k) <= budget)
    levels = [
        shape.blocked(level, budget - size) for level, size in zip(levels, fixed, strict=True)
    ]
    lanes = {node.name: lane for node, lane in shape.lanes.of.items() if node in shape.kept}
    sizes = {node.name: found for node, found in shape.lanes.sizes.items()}
    given = _names(program.graph.find_nodes(op="placeholder"))
    return BatchPlan(
        tuple(levels), lanes, sizes, inputs, best, shape.peak(levels, fixed, best), least, resident,
        given, _refs(shape.results), program.out_spec,
    )  # fmt: skip


def streamable(program: Program, inputs: int, table: Table) -> dict[str, StoredTensor]:
    """The constants that fully connected layers alone read: they could stay in a file."""
    every = {
        name: StoredTensor(name, c.tensor.dtype, tuple(c.tensor.shape), 0)
        for name, c in program.constants.items()
    }
    shape = _LevelShape(program, every, inputs, table)
    return {layer.stored.name: layer.stored for layer in shape.streams.values()}


class _LevelShape:
    """Which call is in which level, and the bytes of everything."""

    def __init__(
        self, program: Program, stored: Mapping[str, StoredTensor], inputs: int, table: Table
    ):
        self.program, self.stored, self.inputs = program, stored, inputs
        self.analysis = Analysis(program, table)
        self.lanes: Lanes = lanes_of(self.analysis, inputs)
        self.nodes = list(program.graph.nodes)
        self.results: Any = self.nodes[-1].args[0]
        self.streams = {n: s for n in self.nodes if (s := self._streamed(n, stored))}
        self.whole = {n for n in self.nodes if n in self.streams or self._connected(n)}
        self.at = self._places()
        self.kept: set[fx.Node] = set()

    def _connected(self, node: fx.Node) -> bool:
        """A product of values of the batch with a constant matrix, perhaps with a bias."""
        found = _operands(node)
        if found is None:
            return False
        x, weight, bias = found
        return x in self.lanes.of and self._constant(weight) and (
            bias is None or self._constant(bias)
        )  # fmt: skip

    def _constant(self, node: fx.Node) -> bool:
        """Made of constants alone."""
        if node.op != "call_function":
            return node.op == "get_attr"
        return node not in self.lanes.of and all(map(self._constant, node.all_input_nodes))

    def _streamed(self, node: fx.Node, stored: Mapping[str, StoredTensor]) -> StreamedLayer | None:
        found = _operands(node) if self._connected(node) else None
        if found is None:
            return None
        x, weight, bias = found
        source, flips = _seen(weight)
        place = stored.get(str(source.target)) if source.op == "get_attr" else None
        plain = bias is None or (bias.op == "get_attr" and bias.meta["val"].ndim == 1)
        if place is None or not plain or not _read_by_products(source):
            return None
        tall = node.target is aten.linear.default
        name = None if bias is None else str(bias.target)
        return StreamedLayer(node.name, x.name, name, place, tall == (flips % 2 == 0))

    def _places(self) -> dict[fx.Node, int]:
        """Even: between fully connected layers. Odd: such a layer; those of one number do not read
        each other."""
        at: dict[fx.Node, int] = {}
        for node in self.nodes:
            before = max((at[n] for n in node.all_input_nodes if n in at), default=0)
            if node in self.whole:
                at[node] = before + 1 + before % 2
            elif node in self.lanes.of:
                at[node] = before + before % 2
        return at

    def levels(self) -> list[Level]:
        """Calls by level; a fully connected layer is one of its own."""
        groups: dict[Any, list[fx.Node]] = {}
        for node in sorted(self.at, key=self.at.__getitem__):  # sorted() keeps the graph's order
            if node.op == "call_function":
                key = (self.at[node], node if node in self.whole else None)
                groups.setdefault(key, []).append(node)
        made = list(groups.values())
        constant = [n for n in _nodes(self.results) if self._loose(n)]
        made += [constant] if constant else []
        last = self._last(made)
        return [self._level(k, group, last) for k, group in enumerate(made)]

    def _loose(self, node: fx.Node) -> bool:
        """Is a result of the network made of constants alone?"""
        if node in self.lanes.sizes:
            raise BadInput("the network returns the size of its batch, which no pass knows; give a "
                           "part of the model that returns tensors")  # fmt: skip
        return node.op == "call_function" and node not in self.at

    def _last(self, groups: list[list[fx.Node]]) -> dict[fx.Node, int]:
        """The last level that reads a value of the batch: one after the end for the results."""
        last = {n: len(groups) for n in _nodes(self.results)}
        for k, group in enumerate(groups):
            for node in group:
                for source in node.all_input_nodes:
                    last[source] = max(last.get(source, 0), k)
        return last

    def _level(self, k: int, group: list[fx.Node], last: Mapping[fx.Node, int]) -> Level:
        inside = set(group)
        reads = {s: None for n in group for s in n.all_input_nodes
                 if s in self.lanes.of and s not in inside}  # fmt: skip
        # A tuple is held as what is picked of it.
        writes = [n for n in group if last.get(n, -1) > k and isinstance(n.meta["val"], Tensor)]
        ready = [n for n in reads if last[n] == k and n.op != "placeholder"]
        self.kept |= {*reads, *writes, *_nodes(self.results)}
        names = (_names(reads), _names(writes), _names(ready))
        if group[0] in self.streams:
            return Level(True, (), self.streams[group[0]], *names)
        connected = group[0] in self.whole or group[0] not in self.at
        return Level(connected, self._calls(group, set(writes)), None, *names)

    def _calls(self, group: list[fx.Node], writes: set[fx.Node]) -> tuple[BatchCall, ...]:
        """The group's calls, and those over constants that they read."""
        needed: dict[fx.Node, None] = {}
        for node in group:
            self._add(node, needed, set(group))
        order = [n for n in self.nodes if n in needed]
        last = {source: node for node in order for source in node.all_input_nodes}
        frees: dict[fx.Node, list[str]] = {}
        for node in order:
            if node not in writes:
                frees.setdefault(last.get(node, node), []).append(node.name)
        return tuple(
            BatchCall(n.name, n.target, _refs(n.args), _refs(n.kwargs), self._weight(n),
                 tuple(frees.get(n, ())))
            for n in order
        )  # fmt: skip

    def _add(self, node: fx.Node, needed: dict[fx.Node, None], group: set[fx.Node]) -> None:
        if node in needed or node.op != "call_function" or node in self.lanes.sizes:
            return
        if node in group or node not in self.lanes.of:
            needed[node] = None
            for source in node.all_input_nodes:
                self._add(source, needed, group)

    def _weight(self, node: fx.Node) -> LayerWeight | None:
        """The largest matrix or kernel of constants that a call sums products with."""
        batched = node.op == "call_function" and node in self.lanes.of
        relation = self.analysis.relation(node) if batched else None
        if not isinstance(relation, Relation):
            return None
        if relation.entry.fill != "sum" and not relation.back:
            return None
        operands = [o.value for o in relation.operands if isinstance(o.value, fx.Node)]
        found = [n for n in operands if self._constant(n) and n.meta["val"].ndim > 1]
        if not found:
            return None
        names = "+".join(dict.fromkeys(_root(n) for n in found))
        return LayerWeight(names, sum(_bytes(n) for n in found), node in self.whole)

    def resident(self, levels: Sequence[Level]) -> int:
        """Bytes of constants that had to be taken into memory, because others are in a file."""
        if not self.stored:
            return 0
        used = constants_read(levels) | {str(n.target) for n in _nodes(self.results, "get_attr")}
        return sum(c.tensor.nbytes for n, c in self.program.constants.items() if n in used)

    def held(self, levels: Sequence[Level]) -> list[int]:
        """Bytes held for all inputs while each level runs: those it writes among them."""
        nodes = {n.name: n for n in self.nodes}
        alive: set[str] = set()
        found = []
        for level in levels:
            alive |= set(level.writes)
            found.append(sum(self.lanes.nbytes(nodes[n], self.inputs) for n in alive))
            alive -= set(level.drops)
        return found

    def working(self, level: Level, at_once: int) -> int:
        """Bytes of what a level makes and drops; a streamed layer's block at its smallest, or as it
        was chosen."""
        if level.streamed is not None:
            block = level.streamed
            return self._fixed(block) + max(block.rows, 1) * self._row(block)
        count = self.inputs if level.connected else min(at_once, self.inputs)
        nodes = {n.name: n for n in self.nodes}
        copied = count < self.inputs
        parts = sum(
            self.lanes.nbytes(nodes[n], count)
            for n in level.reads
            if copied and self.lanes.of[nodes[n]].copies
        )
        alive, most = Counter(), 0
        made, base = Counter(), {}
        for call in level.calls:
            node = nodes[call.name]
            source = base.get(getattr(node.args[0], "name", "")) if node.target in _VIEWS else None
            base[call.name] = source or call.name
            alive[base[call.name]] += 1
            if source is None and (copied or call.name not in level.writes):
                made[call.name] = self.lanes.nbytes(node, count)
            # A recurrent call makes its gates first, of all steps.
            gates = GATES.get(str(node.target), 0) * self.lanes.nbytes(node, count)
            most = max(most, made.total() + gates)
            for name in call.frees:
                alive[base[name]] -= 1
                if not alive[base[name]]:
                    del made[base[name]]
        return parts + most

    def peak(self, levels: Sequence[Level], fixed: Sequence[int], at_once: int) -> int:
        """Bytes of the level that takes most. fixed: bytes that each needs in any case."""
        pairs = zip(levels, fixed, strict=True)
        return max((size + self.working(level, at_once) for level, size in pairs), default=WORK)

    def _products(self, layer: StreamedLayer) -> int:
        """Rows of the product: positions of all inputs."""
        nodes = {n.name: n for n in self.nodes}
        features = layer.stored.shape[1 if layer.out_first else 0]
        size = self.lanes.nbytes(nodes[layer.x], self.inputs)
        return size // (nodes[layer.x].meta["val"].dtype.itemsize * features)

    def _row(self, layer: StreamedLayer) -> int:
        """Bytes per row of a block: its weights, and what is made with them."""
        width = layer.stored.row_bytes
        if layer.out_first:
            return width + self._products(layer) * layer.stored.dtype.itemsize
        wide = 4 * (layer.outputs + self._products(layer)) if layer.sums_wide else 0
        return width + wide

    def _fixed(self, layer: StreamedLayer) -> int:
        """Bytes beside the block: partial sums in float32."""
        return 4 * self._products(layer) * layer.outputs if layer.sums_wide else 0

    def blocked(self, level: Level, room: int) -> Level:
        """The level with the largest blocks that have room, or are worth having."""
        layer = level.streamed
        if layer is None:
            return level
        most = min(layer.stored.shape[0], max(BLOCK // layer.stored.row_bytes, ROWS))
        rows = max(min(most, (room - self._fixed(layer)) // self._row(layer)), 1)
        rows -= rows % ROWS if ROWS < rows < layer.stored.shape[0] else 0
        return replace(level, streamed=replace(layer, rows=rows))


def _seen(node: fx.Node) -> tuple[fx.Node, int]:
    """What a matrix is a view of, and how often its axes change places."""
    source: Any = node
    flips = 0
    while source.target in TRANSPOSED_VIEWS:
        flips += _flips(source)
        source = source.args[0]
    return source, flips


def _flips(node: fx.Node) -> bool:
    """Does a view of a matrix have its axes in the other order?"""
    found = schema.arguments(node)
    if node.target is aten.transpose.int:
        return (found["dim0"] - found["dim1"]) % 2 == 1
    if node.target is aten.permute.default:
        return found["dims"][0] % 2 == 1
    return node.target in MATRIX_TRANSPOSES


def is_view(node: fx.Node) -> bool:
    """Does a call return the memory of its operand, seen in another order?"""
    return node.target in TRANSPOSED_VIEWS


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Input, matrix and bias of a product with a matrix; None for anything else."""
    if str(node.target) not in PRODUCTS:
        return None
    found: Any = schema.arguments(node)
    if node.target is aten.linear.default:
        x, weight, bias = found["input"], found["weight"], found["bias"]
    elif node.target is aten.addmm.default:
        x, weight, bias = found["mat1"], found["mat2"], found["self"]
        if (found["alpha"], found["beta"]) != (1, 1):
            return None
    else:
        x, weight, bias = found["self"], found.get("other", found.get("mat2")), None
    matrix = weight.meta["val"].ndim == 2 and x.meta["val"].ndim >= 2
    return (x, weight, bias) if matrix else None


def _read_by_products(node: fx.Node) -> bool:
    """Is a constant read by products with a matrix alone, through views of it?"""
    return all(
        _read_by_products(user) if user.target in TRANSPOSED_VIEWS
        else _operands(user) is not None and node in _operands(user)[1:2]  # type: ignore[index]
        for user in node.users
    )  # fmt: skip


def _root(node: fx.Node) -> str:
    """The constant that others are made of."""
    while node.op == "call_function":
        node = node.all_input_nodes[0]
    return str(node.target)


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.dtype.itemsize


def _nodes(results: Sequence[Any], op: str = "") -> list[fx.Node]:
    """The results that are nodes, of one kind or all."""
    return [n for n in results if isinstance(n, fx.Node) and op in ("", n.op)]


def _names(nodes: Any) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _refs(args: Any) -> Any:
    """Arguments with names in the place of nodes; constants by the name the model gives them."""
    return map_arg(
        args,
        lambda n: BatchRef(f"={n.target}" if n.op == "get_attr" else n.name),  # type: ignore[arg-type,return-value]
    )
