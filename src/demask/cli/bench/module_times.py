"""Milliseconds by module, of a network and of its demasked version, for the page of a bench."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from demask.cli.bench.contenders import Inputs
from demask.graph.program import path_of
from demask.report import Report
from demask.report.values import ModuleRow

ROUNDS = 10  # calls of each network
OTHERS = "(calls without weights)"
WORDS = (
    "Milliseconds: medians, with every op timed alone. Their sum is more than a call takes "
    "that is not interrupted after each op."
)


def with_times(report: Report, networks: tuple[nn.Module, nn.Module], inputs: Inputs, rounds: int) -> Report:
    """The report with seconds of each module in the two networks; what belongs to none of them is a
    row of its own."""
    pairs = [_seconds(network, inputs, min(rounds, ROUNDS)) for network in networks]
    names = {row.name for row in report.modules}
    others = [sum(s for name, s in of.items() if name not in names) for of in pairs]
    rows = [replace(row, seconds=(pairs[0].get(row.name), pairs[1].get(row.name))) for row in report.modules]
    last = ModuleRow(OTHERS, (0, 0), (0, 0), seconds=(others[0], others[1]))
    return replace(report, modules=(*rows, last))


@torch.no_grad()
def _seconds(network: nn.Module, inputs: Inputs, rounds: int) -> Mapping[str, float]:
    """The median of each module's seconds in some calls, after one that is not timed."""
    clocks = [_OpClock(network) for _ in range(rounds + 1)]
    for clock in clocks:
        clock.run(*pytree.tree_leaves(inputs), enable_io_processing=False)
    return {name: median(clock.seconds[name] for clock in clocks[1:]) for name in clocks[0].seconds}


class _OpClock(fx.Interpreter):
    """Runs a graph op by op. seconds: by the module of the largest tensor that an op reads, or else
    by the module that contains the op."""

    def __init__(self, network: nn.Module):
        super().__init__(network)
        self.seconds = defaultdict[str, float](float)

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node."""
        if not n.op.startswith("call"):
            return super().run_node(n)
        start = perf_counter()
        value = super().run_node(n)
        self.seconds[self._owner(n)] += perf_counter() - start
        return value

    def _owner(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return str(node.target)
        largest = max(self._tensors(node), default=(0, ""))[1]
        return largest.rpartition(".")[0] if largest else path_of(node)

    def _tensors(self, node: fx.Node) -> Iterator[tuple[int, str]]:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and isinstance(value := self.env.get(source), Tensor):
                yield value.numel(), str(source.target)
