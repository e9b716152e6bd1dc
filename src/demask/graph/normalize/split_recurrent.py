"""Recurrent calls of one layer and one direction each: the form that has an entry in the table.

backward(x) == flip(forward(flip(x)))        along time
layers(x)   == layer_n(... layer_1(x))       directions of a layer joined along features

`layered` reads the laws from left to right, `joined` from right to left.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from demask.graph.editor import GraphEditor, drop_unread
from demask.graph.program import Program
from demask.graph.result.recurrent_modules import is_zeros, parts_of
from demask.ops import schema
from demask.ops.entries.recurrent import GATES, LSTM, weights_of
from demask.ops.traits import SIZED_ZEROS

aten = torch.ops.aten


def layered(program: Program) -> Program:
    """The program with every recurrent call of several layers or directions as calls of one."""
    if not any(map(_splits, program.graph.nodes)):
        return program
    editor = GraphEditor(program)
    for node in filter(_splits, editor.calls()):
        with editor.graph.inserting_before(node):
            _split(editor, node)
    return editor.finish()


def _splits(node: fx.Node) -> bool:
    """Has a recurrent call several layers or directions, and no dropout between them?"""
    if str(node.target) not in GATES:
        return False
    found = schema.arguments(node)
    parts = found["num_layers"] > 1 or found["bidirectional"]
    return parts and not (found["train"] and found["dropout"])


def _split(editor: GraphEditor, node: fx.Node) -> None:
    """Replace a call's outputs by those of one call per layer and direction."""
    found = schema.arguments(node)
    count, two = weights_of(node), 2 if found["bidirectional"] else 1
    time = 1 if found["batch_first"] else 0
    x, ends = found["input"], []
    for layer in range(found["num_layers"]):
        made = []
        for direction in range(two):
            k = layer * two + direction
            params = found["params"][k * count : (k + 1) * count]
            out, *states = _part(editor, node, x, k, list(params), time if direction else None)
            made.append(out)
            ends.append(states)
        x = made[0] if two == 1 else editor.call_for(node, aten.cat.default, made, 2)
    joined = [
        editor.call_for(node, aten.cat.default, list(parts), 0) for parts in zip(*ends, strict=True)
    ]
    for user in list(node.users):
        user.replace_all_uses_with([x, *joined][user.args[1]])  # type: ignore[index]
        editor.graph.erase_node(user)
    editor.graph.erase_node(node)


def _part(
    editor: GraphEditor, node: fx.Node, x: fx.Node, k: int, params: list[Any], flipped: int | None
) -> list[fx.Node]:
    """The outputs of layer and direction number k. flipped: the axis along which time runs
    backward."""
    found = schema.arguments(node)
    given = found["hx"] if isinstance(found["hx"], (list, tuple)) else [found["hx"]]
    states = [editor.call_for(node, aten.slice.Tensor, h, 0, k, k + 1) for h in given]
    if flipped is not None:
        x = editor.call_for(node, aten.flip.default, x, [flipped])
    found |= {"input": x, "hx": states if str(node.target) == LSTM else states[0]}
    found |= {"params": params, "num_layers": 1, "bidirectional": False}
    call = editor.call_named(node.target, found, node)
    parts = [editor.call(operator.getitem, call, i) for i in range(len(states) + 1)]
    if flipped is not None:
        parts[0] = editor.call_for(node, aten.flip.default, parts[0], [flipped])
    return parts


# ------------------------------------------------------------------- calls of one layer -> one call


def joined(graph: fx.Graph) -> None:
    """Make one call of the calls of all layers and directions of a module, where they are what
    `layered` makes of one: a module of torch.nn has all of its layers and directions alike."""
    groups: dict[tuple[str, Any], dict[str, list[fx.Node]]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and str(node.target) in GATES and not _splits(node):
            path, part = _place_of(node)
            groups.setdefault((path, node.target), {}).setdefault(part, []).append(node)
    if not groups:
        return
    editor = GraphEditor.in_place(graph)
    for parts in groups.values():
        two = any(part.endswith("_reverse") for part in parts)
        names = parts_of(len(parts) // (1 + two), two)
        if len(parts) > 1 and set(names) == set(parts) and all(len(c) == 1 for c in parts.values()):
            stack = _Stack([parts[name][0] for name in names], two)
            if stack.fits():
                stack.join(editor)
    drop_unread(graph)


def _place_of(call: fx.Node) -> tuple[str, str]:
    """Path of the module that a call's first weight is of, and the layer and direction of it:
    ("encoder.lstm", "l0_reverse")."""
    weight = schema.arguments(call)["params"][0]
    path, _, leaf = str(weight.target if isinstance(weight, fx.Node) else "").rpartition(".")
    return path, leaf.removeprefix("weight_ih_")


@dataclass(frozen=True, slots=True)
class _Stack:
    """Calls of one layer and direction each, in the order of their parameters in one call."""

    calls: list[fx.Node]
    two: bool

    @property
    def layers(self) -> list[list[fx.Node]]:
        """The calls of each layer: forward, and backward where there are two directions."""
        step = 1 + self.two
        return [self.calls[k : k + step] for k in range(0, len(self.calls), step)]

    def found(self, k: int = 0) -> dict[str, Any]:
        """The arguments of a call."""
        return schema.arguments(self.calls[k])

    @property
    def time(self) -> int:
        """The axis of time."""
        return 1 if self.found()["batch_first"] else 0

    def fits(self) -> bool:
        """Is there one call that computes what these do?"""
        own = {"input", "hx", "params"}
        first, *others = ({name: value for name, value in self.found(k).items() if name not in own}
                          for k in range(len(self.calls)))  # fmt: skip
        widths = {tuple(self.found(k)["params"][1].meta["val"].shape)
                  for k in range(len(self.calls))}  # fmt: skip
        counts = {len(self.found(k)["params"]) for k in range(len(self.calls))}
        alike = all(other == first for other in others) and len(widths) == len(counts) == 1
        return alike and self._is_chain() and self.states() is not None and self._is_read_behind()

    def _is_chain(self) -> bool:
        """Does each layer read what the layer before it makes, and nobody else?"""
        before: fx.Node | None = None
        for layer in self.layers:
            x = schema.arguments(layer[0])["input"]
            reads = [schema.arguments(call)["input"] for call in layer]
            if self.two and not _is_call(reads[1], aten.flip.default, x, [self.time]):
                return False
            if before is not None and (x is not before or not set(x.users) <= {layer[0], *reads}):
                return False
            if before is not None and self.two and len(reads[1].users) != 1:
                return False
            if (before := self.output(layer)) is None:
                return False
        return True

    def output(self, layer: list[fx.Node]) -> fx.Node | None:
        """What the calls of a layer make, both directions beside each other."""
        parts = [_read(call, 0) for call in layer]
        if not self.two or parts[0] is None or parts[1] is None:
            return parts[0]
        flipped = _only(parts[1])
        made = _only(parts[0])
        if flipped is None or made is None or _only(flipped) is not made:
            return None
        turned = _is_call(flipped, aten.flip.default, parts[1], [self.time])
        return made if turned and _is_call(made, aten.cat.default, [parts[0], flipped], 2) else None

    def states(self) -> list[fx.Node] | None:
        """The states that the layers begin with are parts of these, or zeros like these."""
        rows = [_listed(self.found(k)["hx"]) for k in range(len(self.calls))]
        firsts = rows[0]
        if all(is_zeros(state) for row in rows for state in row):
            return firsts if all(state.target in SIZED_ZEROS for state in firsts) else None
        wholes = [state.args[0] if state.args else None for state in firsts]
        fits = all(_is_call(state, aten.slice.Tensor, whole, 0, k, k + 1, 1)
                   for k, row in enumerate(rows)
                   for state, whole in zip(row, wholes, strict=True))  # fmt: skip
        return wholes if fits else None  # type: ignore[return-value]

    def _is_read_behind(self) -> bool:
        """Is what the calls make read behind the last of them?"""
        order = {node: k for k, node in enumerate(self.calls[0].graph.nodes)}
        last = max(order[call] for call in self.calls)
        ends = [user for call in self.calls for read in call.users
                if read.args[1] != 0 for user in read.users]  # fmt: skip
        return all(order[user] > last for user in ends)

    def join(self, editor: GraphEditor) -> None:
        """Put the one call in the place of these."""
        order = {node: k for k, node in enumerate(editor.graph.nodes)}
        last, found, n = max(self.calls, key=order.__getitem__), self.found(), len(self.calls)
        states, output = self.states() or [], self.output(self.layers[-1])
        assert output is not None  # `fits` says so
        with editor.graph.inserting_before(last):
            if is_zeros(states[0]):
                states = [_stacked(editor, state, n) for state in states]
            found |= {"hx": states if str(last.target) == LSTM else states[0]}
            found |= {"params": [p for k in range(n) for p in self.found(k)["params"]]}
            found |= {"num_layers": len(self.layers), "bidirectional": self.two}
            call = editor.call_named(last.target, found, self.calls[0])
            results = [editor.call(operator.getitem, call, k) for k in range(len(states) + 1)]
            output.replace_all_uses_with(results[0])
            for k, whole in enumerate(results[1:], 1):
                self._read_from(editor, whole, k)

    def _read_from(self, editor: GraphEditor, whole: fx.Node, output: int) -> None:
        """Read the last states of all layers from one tensor."""
        reads = [_read(call, output) for call in self.calls]
        made = _only(reads[0]) if reads[0] is not None else None
        if made is not None and _is_call(made, aten.cat.default, reads, 0):
            made.replace_all_uses_with(whole)
        for k, call in enumerate(self.calls):
            for read in [user for user in call.users if user.args[1] == output and user.users]:
                part = editor.call(aten.slice.Tensor, whole, 0, k, k + 1)
                read.replace_all_uses_with(part)


def _stacked(editor: GraphEditor, zeros: fx.Node, count: int) -> fx.Node:
    """Zeros for several layers, like those for one."""
    args = [[count, *arg[1:]] if isinstance(arg, (list, tuple)) else arg for arg in zeros.args]
    return editor.call_for(zeros, zeros.target, *args, **zeros.kwargs)


def _listed(states: Any) -> list[Any]:
    return list(states) if isinstance(states, (list, tuple)) else [states]


def _is_call(node: Any, target: Any, *args: Any) -> bool:
    """Is a node a call of an op with these arguments, the first ones of all?"""
    if not isinstance(node, fx.Node) or node.target is not target:
        return False
    return list(schema.arguments(node).values())[: len(args)] == list(args)


def _read(call: fx.Node, output: int) -> fx.Node | None:
    """The node that reads an output of a call, if there is one alone."""
    reads = [user for user in call.users if user.args[1] == output]
    return reads[0] if len(reads) == 1 else None


def _only(node: fx.Node) -> fx.Node | None:
    """The one user of a node, if there is one alone."""
    return next(iter(node.users)) if len(node.users) == 1 else None
