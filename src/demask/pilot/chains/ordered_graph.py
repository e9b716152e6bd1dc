"""Chains linear, ReLU, linear, … of a graph, each replaced by one call that runs in order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx, nn

from demask.compat.fx_internals import signature_of
from demask.errors import BadInput
from demask.facts.analysis import Analysis
from demask.graph.editor import GraphEditor
from demask.graph.result.demasked_module import Demasked
from demask.graph.result.module_calls import lower_modules
from demask.machine.byte_sizes import parse_memory
from demask.numerics import is_number
from demask.ops import TABLE, Table, schema
from demask.pilot.chains.find import LinearChain, find_chains, reader_names, remove_dropout
from demask.pilot.chains.ordered_chain import DEFAULT, Done, Limit, Ordered
from demask.pilot.chains.ordered_plan import unfit
from demask.pilot.conditions.base import Condition, Conditioned, Decision
from demask.pilot.simplifiers.rounding import Bits
from demask.pilot.simplifiers.simplify import simplifier
from demask.shrink.build_uncut import build_uncut
from demask.shrink.pipeline import capture_program


class OrderedNetwork(Demasked):
    """A network whose chains run in order of importance, for inference: calls record no gradients.

    chains: the submodule that runs each chain, by the name of the chain's first layer.
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
        modules: Any = {name: self.get_submodule(path) for name, path in self.chains.items()}
        return {name: module.last for name, module in modules.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        copied.conditioned, copied.chains = self.conditioned, self.chains
        return copied


@dataclass(frozen=True, slots=True)
class Order:
    """A condition that computes the most important units of linear layers first, until a limit.

    A condition selects the work that a network does. Pass `Order(0.001)`, or its text "order:0.001"
    (seconds) or "order:bytes=20MiB", to the function `condition`. In chains of linear layers and
    ReLU, a pilot (the same layers with weights of few bits) runs first and rates all units. Units
    are then computed with full weights until the limit, and the other units have the pilot's
    values. The first units are those that can add the most to the next layer: the pilot's value
    times the norm of the next layer's weights for the unit. The pilot always runs, whatever the
    limit, and after the deadline at most one block of units (1 MiB of weights) is finished.

    The pilot argument is a `Bits` or its text "bits:N:G"; None is "bits:4:64". The conditioned
    module has `last`, which maps the name of each chain's first layer to a record of the last call:
    `seconds`, `pilot` (seconds), `units` (a tuple: units that were computed per layer), `of` (a
    tuple: all units per layer) and `bytes` (of weights that were read). A last layer of less than
    1/16 of the chain's weights is always computed whole, and has no entry in `units` and `of`. The
    record is None before the first call, and where torch ran the whole chain without a limit, since
    values were not finite float32 on the CPU.

    Args:
        deadline: seconds for all chains of a call, 0 or more; default None: no limit.
        bytes: limit of the bytes of weights that a call reads, the pilot's included: an integer, 1
            or more, or a text such as "20MiB" or "1.5GB"; default None: no limit. One of `deadline`
            and `bytes` must be set. Limits are divided among chains in proportion to their bytes of
            weights, and the seconds of a chain begin when it starts.

    Raises:
        BadInput: neither limit is set, or one is not valid; when the condition is applied: the
            pilot is no `Bits`.

    Example:
        >>> import torch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> from demask.pilot import Order, condition
        >>> net, x = Sequential(Linear(64, 256), ReLU(), Linear(256, 2)).eval(), torch.randn(1, 64)
        >>> ordered = condition(net, (x,), pilot="bits:4:64", condition=Order(bytes=20_000))
        >>> _ = ordered(x)
        >>> ordered.last["0"].units, ordered.last["0"].of, ordered.last["0"].bytes
        ((30,), (256,), 19968)
    """

    name: ClassVar[str] = "order"
    deadline: float | None = None
    bytes: int | str | None = None

    def __post_init__(self) -> None:
        if self.deadline is None and self.bytes is None:
            raise BadInput("an order needs a deadline in seconds or bytes: 'order:0.001' or 'order:bytes=20MiB'")
        if self.deadline is not None and not (is_number(self.deadline) and self.deadline >= 0):
            raise BadInput(f"expected a deadline of 0 seconds or more, got {self.deadline!r}")
        if self.bytes is not None:
            parse_memory(self.bytes)

    def applied(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        pilot: Any,
        table: Table = TABLE,
    ) -> nn.Module:
        """The module whose chains stop at the limit; raises BadInput for a pilot that is no `Bits`.

        Arguments are those of `Condition.applied`; None as `pilot` is "bits:4:64".
        """
        seconds = math.inf if self.deadline is None else float(self.deadline)
        most = math.inf if self.bytes is None else float(parse_memory(self.bytes))
        return ordered(model, args, kwargs, self, Limit(seconds, most), pilot, table)


def ordered(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    condition: Condition,
    limit: Limit,
    pilot: Any,
    table: Table,
) -> OrderedNetwork:
    """The network with each of its chains in order, within the chain's share of the limit. Layers
    that are in no chain stay as they are, and `conditioned.decisions` says why."""
    bits = _bits(pilot)
    program = capture_program(model, args, kwargs, None)
    editor = GraphEditor(program)
    remove_dropout(editor)
    chains, decisions = _chains(editor, bits)
    network = build_uncut(Analysis(program, table), editor.finish(), ["chains run in order of importance"])
    lower_modules(network.graph, network)
    nodes = {node.name: node for node in network.graph.nodes}
    sizes = [sum(_bytes(editor, call) for call in chain.calls) for chain in chains]
    paths = {}
    for k, (chain, size) in enumerate(zip(chains, sizes, strict=True)):
        share, path = size / sum(sizes), f"ordered_{k}"
        calls = [nodes[call.name] for call in chain.calls]
        mine = Limit(limit.seconds * share, limit.bytes * share)
        _replace(network, calls, path, bits, mine)
        paths[chain.names[0]] = path
    info: Any = signature_of(network.graph)
    result = OrderedNetwork.of(network, network.graph, info, network.demasked).eval()
    result.chains = paths
    result.conditioned = Conditioned(condition, bits.text(), not chains, tuple(decisions))
    return result


def _chains(editor: GraphEditor, bits: Bits) -> tuple[list[LinearChain], list[Decision]]:
    """The chains of two layers or more, and a line for each linear layer."""
    every, decisions = find_chains(editor)
    chains = [chain for chain in every if len(chain.calls) > 1]
    for chain in every:
        words = f"chain {' → '.join(chain.names)}"
        if len(chain.calls) == 1:
            words = f"{reader_names(chain)} follows it, expected a ReLU and a linear layer alone"
            decisions.append(Decision(chain.names[0], "as it was", words))
            continue
        for name, call in zip(chain.names, chain.calls, strict=True):
            weight = editor.tensor(schema.arguments(call)["weight"])
            slow = "" if weight is None else unfit(bits, weight.shape[1])
            decisions.append(Decision(name, "in order", words + f"; {slow}" * bool(slow)))
    return chains, decisions


def _bytes(editor: GraphEditor, call: fx.Node) -> int:
    weight = editor.tensor(schema.arguments(call)["weight"])
    return 0 if weight is None else weight.numel() * weight.element_size()


def _replace(module: Demasked, calls: Sequence[fx.Node], path: str, bits: Bits, limit: Limit) -> None:
    """Replace a chain by one call of a submodule. Its weights are passed in as arguments, so that
    they keep their names."""
    tensors, biased = [], []
    for call in calls:
        own = call.all_input_nodes[1:]
        tensors += own
        biased.append(len(own) == 2)
    module.add_module(path, Ordered(tuple(biased), bits, limit))
    last = calls[-1]
    with module.graph.inserting_before(last):
        chain_call = module.graph.call_module(path, (calls[0].args[0], *tensors))
    chain_call.meta.update(last.meta)
    last.replace_all_uses_with(chain_call)
    for call in reversed(calls):
        between: Any = call.args[0]
        module.graph.erase_node(call)
        if call is not calls[0]:
            module.graph.erase_node(between)


def _bits(pilot: Any) -> Bits:
    chosen = DEFAULT if pilot is None else simplifier(pilot) if isinstance(pilot, str) else pilot
    if not isinstance(chosen, Bits):
        raise BadInput(
            f"order needs a pilot that runs on the live input with weights of few bits, "
            f"such as 'bits:4:64'; got {pilot!r:.80}"
        )
    return chosen
