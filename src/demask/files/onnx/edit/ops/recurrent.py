"""Recurrent layers: hidden units and input features are cut in all weights, gate by gate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from demask.files.onnx.edit.calls import HANDLERS, NodeEdit
from demask.files.onnx.edit.editor import Editor, all_positions, require
from demask.files.onnx.edit.ops.contraction import contracted, sum_of
from demask.files.onnx.edit.ops.move import groups_of, set_target
from demask.files.onnx.edit.protos import attributes_of, copy_of, is_standard
from demask.shrink.layout.cells import Layout, Positions, cut_positions

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
B, P = 3, 7  # operands: W, R, B, sequence_lens, initial_h, initial_c, P follow x
STATES = (5, 6)


@HANDLERS(*GATES)
def recurrent(edit: NodeEdit) -> Sequence[Layout | None]:
    """f(x, W, R)[units] == f(x[q], W[units, q], R[units, units]) where the units left out are 0 at
    every step, or no unit that stays reads them; likewise for directions."""
    editor, op = edit.editor, edit.node.op_type
    w, r = edit.constant(1), edit.constant(2)  # [direction, gate * unit, feature or unit]
    gates, size = GATES[op], r.shape[2]
    batch_first = bool(edit.attributes.get("layout", 0))
    wanted = [(x[-2] if batch_first else x[-3], x[-1]) for x in edit.wanted if x is not None]
    directions = sorted({d for pair in wanted for d in all_positions(pair[0], len(w))})
    if "activation_alpha" in edit.attributes or "activation_beta" in edit.attributes:
        directions = list(range(len(w)))  # which of them are whose is not stated
    reads = [(r[d].reshape(gates, size, size) != 0).any(0) & ~_silent_units(edit, d, size) for d in directions]
    joined = _joined_directions(edit, size) if len(directions) == 2 else None
    if joined is not None:
        units = [_closed(own, read) for own, read in zip(joined.units, reads, strict=True)]
        count = max(map(len, units))
        for own in units:  # as many in both directions: some stay though none reads them
            own += [u for u in range(size) if u not in set(own)][: count - len(own)]
    else:
        first = [u for pair in wanted for u in all_positions(pair[1], size)]
        units = [_closed(first, np.any(reads, 0))] * len(directions)

    def rows(count: int) -> list[list[int]]:
        return [[gate * size + u for gate in range(count) for u in own] for own in units]

    weights = np.stack([w[d][own] for d, own in zip(directions, rows(gates), strict=True)])
    features, lost = contracted(edit, 0, 2, np.moveaxis(weights, 2, 0))
    edit.adapt(0, (None, None, cut_positions(features, w.shape[2])))
    _cut(edit, 1, directions, rows(gates), [features] * len(directions))
    _cut(edit, 2, directions, rows(gates), units)
    if lost:
        old = edit.constant(B) if edit.name(B) else np.zeros((len(w), 2 * gates * size), w.dtype)
        new = np.stack([old[d][own] for d, own in zip(directions, rows(2 * gates), strict=True)])
        new = new.astype(np.float64)
        new[:, : weights.shape[1]] += sum_of(weights, 2, lost)
        edit.replace(B, editor.replacement(new.astype(w.dtype), edit.name(B) or edit.name(1)))
    elif edit.name(B):
        _cut(edit, B, directions, rows(2 * gates))
    if edit.name(P):
        _cut(edit, P, directions, rows(3))
    ways, cut_units = cut_positions(directions, len(w)), cut_positions(units[0], size)
    state: Layout = (None, ways, cut_units) if batch_first else (ways, None, cut_units)
    for k in STATES:
        if edit.name(k):
            require(joined is None, "initial states of directions with other units")
            edit.adapt(k, state)
    if edit.name(4):
        edit.adapt(4, (None,))
    if cut_units is not None:
        edit.set("hidden_size", len(cut_units))
    if ways is not None:
        edit.set("direction", ("forward", "reverse")[directions[0]])
        if "activations" in edit.attributes:
            half = len(edit.attributes["activations"]) // 2
            edit.set("activations", edit.attributes["activations"][directions[0] * half :][:half])
    if joined is not None:
        return joined.replace(edit, [u + d * size for d in directions for u in units[d]])
    y: Layout = (None, None, ways, cut_units) if batch_first else (None, ways, None, cut_units)
    return [y, state, state][: len(edit.node.output)]


def _closed(units: Iterable[int], reads: np.ndarray) -> list[int]:
    """Units, and those that they read, directly or not. reads: bool [unit, unit that it reads]."""
    closed = dict.fromkeys(units)
    queue = list(closed)
    while queue:
        more = [v for v in np.flatnonzero(reads[queue.pop()]).tolist() if v not in closed]
        closed |= dict.fromkeys(more)
        queue += more
    return list(closed)


def _cut(edit: NodeEdit, k: int, directions: list[int], *axes: list[list[int]]) -> None:
    """Read weights (operand k) of some directions, at other positions of each on the axes after."""
    if all(own == axis[0] for axis in axes for own in axis):
        layout = (directions, *(axis[0] for axis in axes))
        edit.adapt(k, tuple(cut_positions(p, n) for p, n in zip(layout, edit.shape(k), strict=True)))
        return
    old = edit.constant(k)
    parts = [old[(d, *np.ix_(*own))] for d, *own in zip(directions, *axes, strict=True)]
    edit.replace(k, edit.editor.replacement(np.stack(parts), edit.name(k)))


@dataclass(frozen=True)
class _JoinedDirections:
    """Nodes that join the outputs of both directions along one axis: each can have units of its own."""

    units: list[list[int]]  # that are wanted of each direction
    nodes: list[Any]  # from the layer's only reader to the Reshape that joins
    unit_axes: list[int]  # of what each of them reads
    axis: int  # of the joined units

    def replace(self, edit: NodeEdit, positions: list[int]) -> Sequence[Layout | None]:
        """Add the layer and all of these nodes but the last, which becomes the new node; returns
        its layouts."""
        editor, (*moves, last) = edit.editor, self.nodes
        shape = editor.shape(last.output[0])
        layout = tuple(cut_positions(positions, n) if k == self.axis else None for k, n in enumerate(shape))
        reshape = NodeEdit(editor, last, copy_of(last), [layout])
        if any(p is not None for p in layout):
            set_target(reshape, shape, layout)
        editor.nodes += [copy_of(edit.new), *moves]
        for node, axis in zip((edit.node, *moves), self.unit_axes, strict=True):
            sizes: list[Positions] = [None] * len(editor.shape(node.output[0]))
            sizes[axis] = tuple(range(len(positions) // 2))  # a size: nothing else reads it
            editor.layouts[node.output[0]] = tuple(sizes)
        editor.done |= {node.output[0] for node in self.nodes}
        edit.new.CopyFrom(reshape.new)
        return [layout]


def _joined_directions(edit: NodeEdit, size: int) -> _JoinedDirections | None:
    """What joins the directions of the only output that is read; None where each is read alone, or
    of equal units."""
    editor = edit.editor
    read = [k for k, name in enumerate(edit.node.output) if name and _reading_nodes(editor, name)]
    stored = all(edit.name(k) in ("", *editor.constants.tensors) for k in (1, 2, B, P))
    if len(read) != 1 or not stored or any(edit.name(k) for k in STATES):
        return None
    name, nodes, unit_axes = edit.node.output[read[0]], [], []
    axis = len(editor.shape(name)) - (2 if edit.attributes.get("layout") else 3)
    axes = [axis, len(editor.shape(name)) - 1]  # of directions and units
    while True:
        readers = _reading_nodes(editor, name)
        if len(readers) != 1 or readers[0] is None or not is_standard(readers[0]):
            return None
        nodes, unit_axes = [*nodes, readers[0]], [*unit_axes, axes[1]]
        if readers[0].op_type == "Reshape":
            break
        if readers[0].op_type != "Transpose":
            return None
        order = attributes_of(readers[0]).get("perm") or list(range(len(editor.shape(name))))[::-1]
        axes, name = [list(order).index(k) for k in axes], readers[0].output[0]
    output = nodes[-1].output[0]
    groups = groups_of(editor.shape(name), editor.shape(output))
    joined = [after for before, after in groups if before == axes and len(after) == 1]
    if not joined or (layout := editor.wanted(output)) is None:
        return None
    ((at,),) = joined
    positions = all_positions(layout[at], 2 * size)
    units = [[p - d * size for p in positions if p // size == d] for d in (0, 1)]
    return None if set(units[0]) == set(units[1]) else _JoinedDirections(units, nodes, unit_axes, at)


def _reading_nodes(editor: Editor, name: str) -> list[Any]:
    """The nodes that read a value; None for the graph's outputs and for subgraphs."""
    nodes = [node for node in editor.graph.node for read in node.input if read == name]
    return [*nodes, *[None] * (name in editor.outputs or name in editor.inner_reads)]


def _silent_units(edit: NodeEdit, direction: int, size: int) -> np.ndarray:
    """The units of a direction that are 0 at every step, and so in every output: bool."""
    name = next(filter(None, edit.node.output))
    zero = edit.editor.zeros(name)
    zero = np.moveaxis(zero, zero.ndim - (2 if edit.attributes.get("layout") else 3), 0)
    zero = np.asarray(zero.all(tuple(range(1, zero.ndim - 1))))
    return np.broadcast_to(zero[direction if len(zero) > 1 else 0], [size])
