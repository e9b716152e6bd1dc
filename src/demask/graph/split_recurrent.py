"""Split recurrent calls into calls of one layer and one direction, which the table has entries for.

backward(x) == flip(forward(flip(x)))        along time
layers(x)   == layer_n(... layer_1(x))       directions of a layer joined along features

`split_recurrent` applies these laws from left to right, `join_recurrent` from right to left.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from demask.graph.editor import GraphEditor, drop_unread
from demask.graph.program import Program
from demask.graph.result.recurrent_modules import is_zeros, tensor_suffixes
from demask.ops import schema
from demask.ops.entries.recurrent import GATES, LSTM, count_parameters
from demask.ops.schema import fake
from demask.ops.traits import SIZED_ZEROS

aten = torch.ops.aten


def split_recurrent(program: Program) -> Program:
    """The program whose recurrent calls have one layer and one direction each."""
    if not any(map(_splits, program.graph.nodes)):
        return program
    editor = GraphEditor(program)
    split_calls(editor, lambda node: True)
    return editor.finish()


def split_calls(editor: GraphEditor, wanted: Callable[[fx.Node], bool]) -> None:
    """Split the recurrent calls of a graph that are wanted."""
    for node in filter(_splits, editor.calls()):
        if wanted(node):
            with editor.graph.inserting_before(node):
                _split(editor, node)


def _splits(node: fx.Node) -> bool:
    """Whether a node is a recurrent call with several layers or directions and no dropout."""
    if str(node.target) not in GATES:
        return False
    call_arguments = schema.arguments(node)
    has_several = call_arguments["num_layers"] > 1 or call_arguments["bidirectional"]
    return has_several and not (call_arguments["train"] and call_arguments["dropout"])


def _split(editor: GraphEditor, node: fx.Node) -> None:
    """Replace a call by one call per layer and direction."""
    call_arguments = schema.arguments(node)
    count, directions = count_parameters(node), 2 if call_arguments["bidirectional"] else 1
    time = 1 if call_arguments["batch_first"] else 0
    x, final_states = call_arguments["input"], []
    for layer in range(call_arguments["num_layers"]):
        layer_outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            params = call_arguments["params"][k * count : (k + 1) * count]
            out, *states = _part(editor, node, x, k, list(params), time if direction else None)
            layer_outputs.append(out)
            final_states.append(states)
        x = layer_outputs[0] if directions == 1 else editor.call_for(node, aten.cat.default, layer_outputs, 2)
    joined = [editor.call_for(node, aten.cat.default, list(parts), 0) for parts in zip(*final_states, strict=True)]
    for user in list(node.users):
        user.replace_all_uses_with([x, *joined][schema.output_of(user)])
        editor.graph.erase_node(user)
    editor.graph.erase_node(node)


def _part(
    editor: GraphEditor, node: fx.Node, x: fx.Node, k: int, params: list[Any], flipped: int | None
) -> list[fx.Node]:
    """The outputs of a new call for layer and direction number k. flipped: the axis of time for the
    backward direction, else None."""
    call_arguments = schema.arguments(node)
    initial_states = call_arguments["hx"] if isinstance(call_arguments["hx"], (list, tuple)) else [call_arguments["hx"]]
    states = [editor.call_for(node, aten.slice.Tensor, h, 0, k, k + 1) for h in initial_states]
    if flipped is not None:
        x = editor.call_for(node, aten.flip.default, x, [flipped])
    call_arguments |= {"input": x, "hx": states if str(node.target) == LSTM else states[0]}
    call_arguments |= {"params": params, "num_layers": 1, "bidirectional": False}
    call = editor.call_named(node.target, call_arguments, node)
    parts = [editor.call(operator.getitem, call, i) for i in range(len(states) + 1)]
    if flipped is not None:
        parts[0] = editor.call_for(node, aten.flip.default, parts[0], [flipped])
    return parts


# ------------------------------------------------------------------- calls of one layer -> one call


def join_recurrent(graph: fx.Graph) -> None:
    """Join the calls of all layers and directions of a module of torch.nn into one call, if they
    are calls that `split_recurrent` returns for one: the module requires equal layers and
    directions."""
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
        names = tensor_suffixes(len(parts) // (1 + two), two)
        if len(parts) > 1 and set(names) == set(parts) and all(len(c) == 1 for c in parts.values()):
            stack = _Stack([parts[name][0] for name in names], two)
            if stack.fits():
                stack.join(editor)
    drop_unread(graph)


def _place_of(call: fx.Node) -> tuple[str, str]:
    """The path of the module of a call's first weight, and the layer and direction:
    ("encoder.lstm", "l0_reverse")."""
    weight = schema.arguments(call)["params"][0]
    path, _, leaf = str(weight.target if isinstance(weight, fx.Node) else "").rpartition(".")
    return path, leaf.removeprefix("weight_ih_")


@dataclass(frozen=True, slots=True)
class _Stack:
    """Calls of one layer and direction each, in the order of parameters in a joined call. two:
    whether there are two directions."""

    calls: list[fx.Node]
    two: bool

    @property
    def layers(self) -> list[list[fx.Node]]:
        """The calls of each layer: forward, and backward if there are two directions."""
        step = 1 + self.two
        return [self.calls[k : k + step] for k in range(0, len(self.calls), step)]

    def arguments(self, k: int = 0) -> dict[str, Any]:
        """The arguments of a call."""
        return schema.arguments(self.calls[k])

    @property
    def time(self) -> int:
        """The axis of time."""
        return 1 if self.arguments()["batch_first"] else 0

    def fits(self) -> bool:
        """Whether one call computes the same as these."""
        operands = {"input", "hx", "params"}
        first, *others = (
            {name: value for name, value in self.arguments(k).items() if name not in operands}
            for k in range(len(self.calls))
        )
        widths = {tuple(fake(self.arguments(k)["params"][1]).shape) for k in range(len(self.calls))}
        counts = {len(self.arguments(k)["params"]) for k in range(len(self.calls))}
        is_equal = all(other == first for other in others) and len(widths) == len(counts) == 1
        return is_equal and self._is_chain() and self.states() is not None and self._is_read_after()

    def _is_chain(self) -> bool:
        """Whether each layer reads the output of the layer before it, and no other node does."""
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
        """The output of a layer, its directions concatenated; None if there is none."""
        parts = [_read(call, 0) for call in layer]
        if not self.two or parts[0] is None or parts[1] is None:
            return parts[0]
        flipped = _only(parts[1])
        joined_output = _only(parts[0])
        if flipped is None or joined_output is None or _only(flipped) is not joined_output:
            return None
        is_flipped_back = _is_call(flipped, aten.flip.default, parts[1], [self.time])
        return (
            joined_output
            if is_flipped_back and _is_call(joined_output, aten.cat.default, [parts[0], flipped], 2)
            else None
        )

    def states(self) -> list[fx.Node] | None:
        """The initial states of all layers in one tensor each, or the zeros of one layer; None if
        there are none."""
        rows = [_listed(self.arguments(k)["hx"]) for k in range(len(self.calls))]
        firsts = rows[0]
        if all(is_zeros(state) for row in rows for state in row):
            return firsts if all(state.target in SIZED_ZEROS for state in firsts) else None
        wholes: list[Any] = [state.args[0] if state.args else None for state in firsts]
        fits = all(
            _is_call(state, aten.slice.Tensor, whole, 0, k, k + 1, 1)
            for k, row in enumerate(rows)
            for state, whole in zip(row, wholes, strict=True)
        )
        return wholes if fits else None

    def _is_read_after(self) -> bool:
        """Whether the final states are read only after the last of the calls."""
        order = {node: k for k, node in enumerate(self.calls[0].graph.nodes)}
        last = max(order[call] for call in self.calls)
        readers = [user for call in self.calls for read in call.users if read.args[1] != 0 for user in read.users]
        return all(order[user] > last for user in readers)

    def join(self, editor: GraphEditor) -> None:
        """Replace these calls by one call."""
        order = {node: k for k, node in enumerate(editor.graph.nodes)}
        last, call_arguments, n = (max(self.calls, key=order.__getitem__), self.arguments(), len(self.calls))
        states, output = self.states() or [], self.output(self.layers[-1])
        assert output is not None  # `fits` says so
        with editor.graph.inserting_before(last):
            if is_zeros(states[0]):
                states = [_stacked(editor, state, n) for state in states]
            call_arguments |= {"hx": states if str(last.target) == LSTM else states[0]}
            call_arguments |= {"params": [p for k in range(n) for p in self.arguments(k)["params"]]}
            call_arguments |= {"num_layers": len(self.layers), "bidirectional": self.two}
            call = editor.call_named(last.target, call_arguments, self.calls[0])
            results = [editor.call(operator.getitem, call, k) for k in range(len(states) + 1)]
            output.replace_all_uses_with(results[0])
            for k, states_of_all in enumerate(results[1:], 1):
                self._read_from(editor, states_of_all, k)

    def _read_from(self, editor: GraphEditor, states_of_all: fx.Node, output: int) -> None:
        """Let readers of the final states of each layer read parts of one tensor."""
        reads = [_read(call, output) for call in self.calls]
        joined_states = _only(reads[0]) if reads[0] is not None else None
        if joined_states is not None and _is_call(joined_states, aten.cat.default, reads, 0):
            joined_states.replace_all_uses_with(states_of_all)
        for k, call in enumerate(self.calls):
            for read in [user for user in call.users if user.args[1] == output and user.users]:
                part = editor.call(aten.slice.Tensor, states_of_all, 0, k, k + 1)
                read.replace_all_uses_with(part)


def _stacked(editor: GraphEditor, zeros: fx.Node, count: int) -> fx.Node:
    """A new call of zeros for several layers, from the one for one layer."""
    args = [[count, *arg[1:]] if isinstance(arg, (list, tuple)) else arg for arg in zeros.args]
    return editor.call_for(zeros, zeros.target, *args, **zeros.kwargs)


def _listed(states: Any) -> list[Any]:
    return list(states) if isinstance(states, (list, tuple)) else [states]


def _is_call(node: Any, target: Any, *args: Any) -> bool:
    """Whether a node is a call of an op whose first arguments are these."""
    if not isinstance(node, fx.Node) or node.target is not target:
        return False
    return list(schema.arguments(node).values())[: len(args)] == list(args)


def _read(call: fx.Node, output: int) -> fx.Node | None:
    """The only node that reads an output of a call, else None."""
    reads = [user for user in call.users if user.args[1] == output]
    return reads[0] if len(reads) == 1 else None


def _only(node: fx.Node) -> fx.Node | None:
    """The only user of a node, else None."""
    return next(iter(node.users)) if len(node.users) == 1 else None
