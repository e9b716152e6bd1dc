"""Values of a program's nodes for example inputs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, fx, nn

from demask.graph.program import Program


class RecordedRun(fx.Interpreter):
    """Runs a program and stores the values of some nodes in `values`."""

    def __init__(self, program: Program, wanted: Collection[fx.Node]) -> None:
        super().__init__(nn.Module(), graph=program.graph)
        self._constants, self._wanted = program.constants, wanted
        self.values: dict[fx.Node, Any] = {}

    def fetch_attr(self, target: str) -> Tensor:
        return self._constants[target].tensor

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self._wanted:
            self.values[n] = value
        return value
