"""Finds the chains linear, ReLU, linear, … of a program, and replaces each by one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from demask.graph.editor import GraphEditor
from demask.ops import op_name, schema
from demask.pilot.chains.chain_op import CHAIN, ChainStep
from demask.pilot.conditions.base import Decision

aten = torch.ops.aten
LINEAR = aten.linear.default


@dataclass(frozen=True, slots=True)
class LinearChain:
    """A chain. calls: its linear calls; relus: whether ReLU follows each; last: its last node;
    names:
    of its layers."""

    calls: tuple[fx.Node, ...]
    relus: tuple[bool, ...]
    last: fx.Node
    names: tuple[str, ...]


def remove_dropout(editor: GraphEditor) -> None:
    """Remove dropouts that do nothing in eval mode."""
    for node in editor.calls(aten.dropout.default):
        if not schema.draws_random_numbers(node):
            editor.replace(node, node.args[0])


def find_chains(editor: GraphEditor) -> tuple[list[LinearChain], list[Decision]]:
    """The longest chains, in order, and why other layers are in none."""
    chains, decisions, taken = [], [], set()
    for node in editor.calls(LINEAR):
        if node in taken:
            continue
        name = layer_name(editor, node)
        if reason := _unfit(editor, node):
            decisions.append(Decision(name, "as it was", reason))
            continue
        calls, relus, last = [node], [], node
        while True:
            relu = _only_reader(last)
            relus.append(relu is not None and relu.target is aten.relu.default)
            last = relu if relus[-1] and relu is not None else last
            follower = _only_reader(last)
            if not relus[-1] or follower is None or follower.target is not LINEAR:
                break
            if follower.args[0] is not last or _unfit(editor, follower):
                break
            calls.append(follower)
            last = follower
        taken.update(calls)
        names = tuple(layer_name(editor, call) for call in calls)
        chains.append(LinearChain(tuple(calls), tuple(relus), last, names))
    return chains, decisions


def reader_names(chain: LinearChain) -> str:
    """The ops that read the last layer of a chain, in words."""
    readers = [op_name(user) for user in chain.last.users if user.op == "call_function"]
    return " and ".join(dict.fromkeys(readers)) or "the output"


def layer_name(editor: GraphEditor, call: fx.Node) -> str:
    """The name of a layer: that of the module with its weight."""
    weight = schema.arguments(call)["weight"]
    if weight.op != "get_attr":
        return call.name
    return editor.constants[str(weight.target)].name.rpartition(".")[0]


def replace_chain(editor: GraphEditor, chain: LinearChain, modes: Sequence[str]) -> None:
    """Replace a chain by one call, its layers in these modes."""
    steps, weights = [], []
    for call, relu, mode in zip(chain.calls, chain.relus, modes, strict=True):
        arguments = schema.arguments(call)
        weights += [w for w in (arguments["weight"], arguments["bias"]) if w is not None]
        steps.append(ChainStep(mode, arguments["bias"] is not None, relu))
    text, first = ",".join(map(str, steps)), schema.arguments(chain.calls[0])["input"]
    chain_call = editor.insert(chain.last.next, chain.last, CHAIN, first, weights, text)
    chain.last.replace_all_uses_with(chain_call, lambda user: user is not chain_call)


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _unfit(editor: GraphEditor, call: fx.Node) -> str:
    """Why a linear call can be in no chain; "" where it can."""
    arguments = schema.arguments(call)
    tensors = [editor.tensor(w) for w in (arguments["weight"], arguments["bias"]) if w is not None]
    if any(t is None for t in tensors):
        return "its weight or bias is computed"
    for t in tensors:
        assert t is not None
        if t.dtype is not torch.float32 or t.device.type != "cpu":
            kind = str(t.dtype).removeprefix("torch.")
            return f"its weights are {kind} on {t.device.type}, expected float32 on the CPU"
        if not bool(t.isfinite().all()):
            return "its weights have NaN or infinities: 0 times one of them is not 0"
    return ""
