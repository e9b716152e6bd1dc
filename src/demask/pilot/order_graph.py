"""Chains linear, ReLU, linear, … of a graph, each replaced by one call that runs in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from demask.errors import BadInput
from demask.graph.program import Program, copied
from demask.graph.result import Demasked
from demask.pilot.conditioned import Condition, Conditioned, Decision
from demask.pilot.order import DEFAULT, Done, Limit, Ordered
from demask.pilot.rounding import Bits
from demask.pilot.simplify import simplifier
from demask.shrink.demask import given
from demask.shrink.finished import finished

aten = torch.ops.aten
LINEAR, RELU = aten.linear.default, aten.relu.default


@dataclass(frozen=True, slots=True)
class Found:
    """The linear calls of a chain, first to last, the names of their layers, bytes of weights."""

    calls: tuple[fx.Node, ...]
    names: tuple[str, ...]
    nbytes: int


class OrderedNetwork(Demasked):
    """A network whose chains run in order of importance, for inference: calls record no gradients.

    chains: by the name of a chain's first layer, the submodule that runs it.
    """

    trains = False
    conditioned: Conditioned
    chains: Mapping[str, str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return super().__call__(*args, **kwargs)

    @property
    def last(self) -> dict[str, Done | None]:
        """What the last call did, by the name of each chain's first layer."""
        made: Any = {name: self.get_submodule(path) for name, path in self.chains.items()}
        return {name: module.last for name, module in made.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        copied.conditioned, copied.chains = self.conditioned, self.chains
        return copied


def ordered(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    condition: Condition,
    limit: Limit,
    pilot: Any,
) -> OrderedNetwork:
    """The network with each of its chains in order, within its share of the limit. Layers that are
    in no chain stay as they are, and `conditioned.decisions` says why."""
    bits = _bits(pilot)
    program = given(model, args, kwargs, None)
    made = finished(program, _without_dropout(program), ["chains run in order of importance"])
    found, decisions = chains_of(made)
    whole, chains = sum(chain.nbytes for chain in found), {}
    for k, chain in enumerate(found):
        share = chain.nbytes / whole
        path = f"ordered_{k}"
        mine = Limit(limit.seconds * share, limit.bytes * share)
        _replace(made, chain, path, bits, mine)
        chains[chain.names[0]] = path
    info: Any = made.graph._codegen.pytree_info  # type: ignore[attr-defined]
    result = OrderedNetwork.of(made, made.graph, info, made.demasked).eval()
    result.chains = chains
    result.conditioned = Conditioned(condition, bits.text(), exact=False, decisions=decisions)
    return result


def chains_of(module: Demasked) -> tuple[list[Found], tuple[Decision, ...]]:
    """The longest chains of a network's graph, and a line for each linear layer."""
    found, decisions, taken = [], [], set()
    for node in module.graph.find_nodes(op="call_function", target=LINEAR):
        if node in taken:
            continue
        calls, why = [node], _unfit(module, node)
        while not why:
            follower, why = _follower(module, calls[-1])
            if follower is not None:
                calls.append(follower)
        taken.update(calls)
        names = tuple(_layer(call) for call in calls)
        if len(calls) == 1:
            decisions.append(Decision(names[0], "dense", why))
            continue
        weights: list[Any] = [attrgetter(str(call.args[1].target))(module) for call in calls]  # type: ignore[union-attr]
        found.append(Found(tuple(calls), names, sum(w.numel() * w.element_size() for w in weights)))
        for name in names:
            decisions.append(Decision(name, "in order", f"chain {' → '.join(names)}"))
    return found, tuple(decisions)


def _layer(call: fx.Node) -> str:
    weight: Any = call.args[1]
    return str(weight.target).removesuffix(".weight") if weight.op == "get_attr" else call.name


def _unfit(module: Demasked, call: fx.Node) -> str:
    """Why a linear call cannot be part of a chain; "" where it can."""
    if any(n.op != "get_attr" for n in call.all_input_nodes[1:]):
        return "its weight or bias is computed"
    weight: Any = attrgetter(str(call.args[1].target))(module)  # type: ignore[union-attr]
    if weight.dtype != torch.float32:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}, expected float32"
    return ""


def _follower(module: Demasked, call: fx.Node) -> tuple[fx.Node | None, str]:
    """The linear call that alone reads the ReLU of this one; or none, and why."""
    if len(call.users) != 1:
        return None, f"its output is read {len(call.users)} times, expected a ReLU alone"
    relu = next(iter(call.users))
    if relu.target is not RELU:
        what = str(relu.target).removeprefix("aten.").removesuffix(".default")
        return None, f"its output goes to {what}, expected a ReLU and a linear layer"
    readers = list(relu.users)
    if len(readers) != 1 or readers[0].target is not LINEAR or readers[0].args[0] is not relu:
        return None, "no linear layer alone reads its ReLU"
    why = _unfit(module, readers[0])
    return (None, f"the layer behind it does not fit: {why}") if why else (readers[0], "")


def _replace(module: Demasked, chain: Found, path: str, bits: Bits, limit: Limit) -> None:
    """One call of a submodule in place of a chain; weights stay where they are and are handed in,
    so that they keep their names."""
    tensors, biased = [], []
    for call in chain.calls:
        own = call.all_input_nodes[1:]
        tensors += own
        biased.append(len(own) == 2)
    module.add_module(path, Ordered(tuple(biased), bits, limit))
    last = chain.calls[-1]
    with module.graph.inserting_before(last):
        made = module.graph.call_module(path, (chain.calls[0].args[0], *tensors))
    made.meta.update(last.meta)
    last.replace_all_uses_with(made)
    for call in reversed(chain.calls):
        between: Any = call.args[0]
        module.graph.erase_node(call)
        if call is not chain.calls[0]:
            module.graph.erase_node(between)


def _without_dropout(program: Program) -> Program:
    """The program without dropouts behind linear layers and ReLUs: nothing, in eval mode."""
    graph, _ = copied(program)
    for node in graph.find_nodes(op="call_function", target=aten.dropout.default):
        before: Any = node.args[0]
        if node.args[2] is False and before.target in (LINEAR, RELU):
            node.replace_all_uses_with(before)
            graph.erase_node(node)
    return program.with_graph(graph)


def _bits(pilot: Any) -> Bits:
    chosen = DEFAULT if pilot is None else simplifier(pilot) if isinstance(pilot, str) else pilot
    if not isinstance(chosen, Bits):
        raise BadInput(f"order needs a pilot that runs on the live input with weights of few bits, "
                       f"such as 'bits:4:64'; got {pilot!r:.80}")  # fmt: skip
    return chosen
