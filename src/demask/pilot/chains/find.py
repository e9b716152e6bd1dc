"""Where the chains linear, ReLU, linear, … of a program are, and the call that stands for each."""

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
    """A chain: its linear calls, whether ReLU follows each, what reads of it, and the names of the
    layers."""

    calls: tuple[fx.Node, ...]
    relus: tuple[bool, ...]
    last: fx.Node
    names: tuple[str, ...]


def without_dropout(editor: GraphEditor) -> None:
    """Let dropouts, which do nothing in eval mode, go."""
    for node in editor.calls(aten.dropout.default):
        found = schema.arguments(node)
        if not found["train"]:
            editor.replace(node, found["input"])


def found(editor: GraphEditor) -> tuple[list[LinearChain], list[Decision]]:
    """The longest chains, in order, and why layers are in none, or end one."""
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


def behind(chain: LinearChain) -> str:
    """What a chain's last layer is read by, in words, where that is no ReLU."""
    readers = [op_name(user) for user in chain.last.users if user.op == "call_function"]
    return " and ".join(dict.fromkeys(readers)) or "the output"


def layer_name(editor: GraphEditor, call: fx.Node) -> str:
    """A layer by the module that holds its weight."""
    weight = schema.arguments(call)["weight"]
    if weight.op != "get_attr":
        return call.name
    return editor.constants[str(weight.target)].name.rpartition(".")[0]


def replaced(editor: GraphEditor, chain: LinearChain, modes: Sequence[str]) -> None:
    """Put one call in the place of a chain."""
    steps, weights = [], []
    for call, relu, mode in zip(chain.calls, chain.relus, modes, strict=True):
        given = schema.arguments(call)
        weights += [w for w in (given["weight"], given["bias"]) if w is not None]
        steps.append(ChainStep(mode, given["bias"] is not None, relu))
    text, first = ",".join(map(str, steps)), schema.arguments(chain.calls[0])["input"]
    made = editor.insert(chain.last.next, chain.last, CHAIN, first, weights, text)
    chain.last.replace_all_uses_with(made, lambda user: user is not made)


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _unfit(editor: GraphEditor, call: fx.Node) -> str:
    """Why a linear call can be in no chain; "" where it can."""
    given = schema.arguments(call)
    tensors = [editor.tensor(w) for w in (given["weight"], given["bias"]) if w is not None]
    if any(t is None for t in tensors):
        return "its weight or bias is computed"
    for t in tensors:
        assert t is not None
        if t.dtype is not torch.float32 or t.device.type != "cpu":
            kind = str(t.dtype).removeprefix("torch.")
            return f"its weights are {kind} on {t.device.type}, expected float32 on the CPU"
        if not bool(t.isfinite().all()):
            return "its weights hold NaN or infinities: 0 times one of them is not 0"
    return ""
