"""Recurrent layers: hidden units and input features are cut in all weights, gate by gate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from demask.files.onnx.edit.calls import HANDLERS, NodeEdit
from demask.files.onnx.edit.ops.contraction import contracted, sum_of
from demask.files.onnx.edit.refusals import all_positions
from demask.files.onnx.ops.nn.recurrent import ZERO_AT_ZERO, direction_activations
from demask.shrink.layout.cells import Layout, Positions, whole

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
MAIN = {"LSTM": 3, "GRU": 2, "RNN": 0}  # the gate that a unit takes its value from
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
    direction_axes = (2, 1, 1) if batch_first else (1, 0, 0)  # of Y, Y_h, Y_c
    wanted = [(x[axis], x[-1]) for x, axis in zip(edit.wanted, direction_axes, strict=False)
              if x is not None]  # fmt: skip
    directions = sorted({d for pair in wanted for d in all_positions(pair[0], len(w))})
    if "activation_alpha" in edit.attributes or "activation_beta" in edit.attributes:
        directions = list(range(len(w)))  # which of them are whose is not stated
    units = list(dict.fromkeys(u for pair in wanted for u in all_positions(pair[1], size)))
    split = r.reshape(len(w), gates, size, size)[directions] != 0
    silent = np.stack([_silent_units(edit, d) for d in directions])
    while True:
        read = split[:, :, units].any((1, 2)) & ~silent
        more = [u for u in np.flatnonzero(read.any(0)).tolist() if u not in set(units)]
        if not more:
            break
        units += more
    rows = [gate * size + u for gate in range(gates) for u in units]
    features, lost = contracted(edit, 0, 2, np.moveaxis(w[directions][:, rows], 2, 0))
    ways, columns = whole(directions, len(w)), whole(features, w.shape[2])
    kept: Positions = whole(units, size)
    edit.adapt(0, (None, None, columns))
    edit.adapt(1, (ways, whole(rows, gates * size), columns))
    edit.adapt(2, (ways, whole(rows, gates * size), kept))
    biases = [gate * size + u for gate in range(2 * gates) for u in units]
    if lost:
        old = edit.constant(B) if edit.name(B) else np.zeros((len(w), 2 * gates * size), w.dtype)
        new = old[directions][:, biases].astype(np.float64)
        new[:, : len(rows)] += sum_of(w[directions][:, rows], 2, lost)
        edit.replace(B, editor.replacement(new.astype(w.dtype), edit.name(B) or edit.name(1)))
    elif edit.name(B):
        edit.adapt(B, (ways, whole(biases, 2 * gates * size)))
    if edit.name(P):
        peepholes = [gate * size + u for gate in range(3) for u in units]
        edit.adapt(P, (ways, whole(peepholes, 3 * size)))
    state: Layout = (None, ways, kept) if batch_first else (ways, None, kept)
    for k in STATES:
        if edit.name(k):
            edit.adapt(k, state)
    if edit.name(4):
        edit.adapt(4, (None,))
    if kept is not None:
        edit.set("hidden_size", len(kept))
    if ways is not None:
        edit.set("direction", ("forward", "reverse")[directions[0]])
        if "activations" in edit.attributes:
            half = len(edit.attributes["activations"]) // 2
            edit.set("activations", edit.attributes["activations"][directions[0] * half :][:half])
    y: Layout = (None, None, ways, kept) if batch_first else (None, ways, None, kept)
    return [y, state, state][: len(edit.node.output)]


def _silent_units(edit: NodeEdit, direction: int) -> np.ndarray:
    """The units of a direction that start at 0 and compute 0 from zeros and each other: bool."""
    op, editor = edit.node.op_type, edit.editor
    w, r = edit.constant(1)[direction], edit.constant(2)[direction]
    gates, size = GATES[op], r.shape[1]
    rows = slice(MAIN[op] * size, (MAIN[op] + 1) * size)
    names = [name.decode() for name in edit.attributes.get("activations", ())]
    _, values = direction_activations(op, names, direction)
    bias = np.zeros((2, size))
    if edit.name(B):
        bias = edit.constant(B)[direction].reshape(2, gates * size)[:, rows].astype(np.float64)
    total = bias.sum(0)
    if op == "RNN" and values == ["relu"]:
        silent = total <= 0
    elif op == "GRU":  # which multiplies one of the biases by a gate
        silent = (bias == 0).all(0)
    else:
        silent = total == 0
    silent &= ZERO_AT_ZERO.issuperset(values)
    x = edit.name(0)
    read = np.ones(w.shape[1], bool)
    if x in editor.values:
        zero = editor.values[x].known & (editor.fill(x) == 0)
        read &= ~zero.all((0, 1))
    silent &= ~((w[rows] != 0) & read).any(1)
    for k in STATES:
        if edit.name(k):
            silent &= _zero_at_start(edit, k, direction)
    while True:
        fewer = silent & ~((r[rows] != 0) & ~silent).any(1)
        if (fewer == silent).all():
            return silent
        silent = fewer


def _zero_at_start(edit: NodeEdit, k: int, direction: int) -> np.ndarray:
    """The units whose initial state (operand k) is known to be 0."""
    editor, name = edit.editor, edit.name(k)
    if name in editor.constants:
        zero = editor.array(name) == 0
    else:
        zero = editor.values[name].known & (editor.fill(name) == 0)
    axes = (1, 0) if edit.attributes.get("layout", 0) else (0, 1)  # of directions and the batch
    zero = np.moveaxis(zero, axes, (0, 1)).all(1)
    return zero[direction if len(zero) > 1 else 0]
