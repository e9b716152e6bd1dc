"""The module of a network whose positions a pilot chooses at every call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from demask.errors import BadInput
from demask.facts.analysis import Analysis
from demask.facts.known import Key
from demask.graph.program import Program, copy_tensors
from demask.graph.result.demasked_module import Demasked
from demask.ops import Table
from demask.pilot.conditions.base import Conditioned
from demask.pilot.data.execution_data import ExecutionData
from demask.shrink.build_uncut import build_sharing, build_uncut
from demask.shrink.runtime_index import IndexedSupport, emit_indexed, emit_masked


@dataclass(frozen=True, slots=True)
class ChosenPositions:
    """How positions are chosen from magnitudes.

    layers, sizes: the layers, and how many positions each has. keep: the share that is computed.
    threshold: or those above `threshold` times the mean of their layer. rest: whether the others
    are indexed too. values: whether the pilot's values are used.
    """

    layers: tuple[str, ...]
    sizes: tuple[int, ...]
    keep: float | None
    threshold: float | None
    rest: bool = False
    values: bool = False

    def indices(self, magnitudes: Sequence[Tensor]) -> list[Tensor]:
        """int64 [k] per layer, rising; with `rest`, then the others.

        >>> ChosenPositions(("a",), (4,), 0.5, None).indices([torch.tensor([1.0, 3.0, 0.0, 2.0])])
        [tensor([1, 3])]
        """
        indices = [self._index(m) for m in magnitudes]
        return indices + [_others(i, n) for i, n in zip(indices, self.sizes, strict=True)] * self.rest

    def _index(self, magnitudes: Tensor) -> Tensor:
        if self.keep is not None:
            count = max(1, round(self.keep * len(magnitudes)))
            return magnitudes.topk(count).indices.sort().values
        assert self.threshold is not None
        above = (magnitudes > self.threshold * magnitudes.mean()).nonzero().squeeze(1)
        return above if len(above) else magnitudes.argmax().reshape(1)


def _others(index: Tensor, size: int) -> Tensor:
    mask = torch.ones(size, dtype=torch.bool, device=index.device)
    return mask.index_fill(0, index, False).nonzero().squeeze(1)


class Supported(nn.Module):
    """A network of which a pilot chooses what is computed, call by call.

    pilot: returns magnitudes (and values); None where `update` sets them. network: takes the
    inputs, the indices, and the pilot's values. chosen: how indices follow from magnitudes.
    conditioned: what was done. last: the index of each layer in the last call.
    """

    conditioned: Conditioned

    def __init__(
        self,
        program: Program,
        picks: Mapping[Key, IndexedSupport],
        observer: Program | None,
        chosen: ChosenPositions,
        conditioned: Conditioned,
        table: Table,
    ):
        super().__init__()
        analysis = Analysis(copy_tensors(program), table)
        self.network: Demasked = build_sharing(analysis, emit_indexed(analysis, picks), ())
        # torch has no convolution of no channels: where an index is empty all is computed.
        self.whole: Demasked = build_sharing(analysis, emit_masked(analysis, picks), ())
        self.pilot = None
        if observer is not None:
            self.pilot = build_uncut(Analysis(observer, table), observer, ())
        self.chosen, self.conditioned = chosen, conditioned
        self.last: tuple[Tensor, ...] = ()
        for k in range(len(chosen.layers) if observer is None else 0):
            self.register_buffer(f"magnitude_{k}", None)
        self.eval()

    def update(self, data: ExecutionData) -> None:
        """Take the indices of later calls from other execution data, such as of the frame before.

        Raises BadInput where a pilot runs on the live input, or a layer or position is missing.
        """
        if self.pilot is not None:
            raise BadInput(
                "expected a module conditioned by ExecutionData; this one's pilot runs "
                "on the live input, and needs no update"
            )
        for k, (name, size) in enumerate(zip(self.chosen.layers, self.chosen.sizes, strict=True)):
            priorities = data.priorities(name)
            if len(priorities) != size:
                raise BadInput(
                    f"expected magnitudes of {size} positions of {name!r}, one per "
                    f"channel or unit, got {len(priorities)} {data.per}s"
                )
            setattr(self, f"magnitude_{k}", priorities.clone())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        magnitudes, values = self._piloted(args, kwargs)
        return self.run(self.chosen.indices(magnitudes), args, kwargs, values)

    def run(
        self,
        indices: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        values: Sequence[Tensor] = (),
    ) -> Any:
        """The outputs for indices of your own, int64 [k] of distinct positions per layer."""
        self.last = tuple(indices)
        network = self.network if all(len(index) for index in indices) else self.whole
        return network(*args, *indices, *values, **dict(kwargs or {}))

    def _piloted(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        count = len(self.chosen.layers)
        if self.pilot is None:
            return [getattr(self, f"magnitude_{k}") for k in range(count)], ()
        results = self.pilot(*args, **kwargs)
        return results[:count], results[count:]
