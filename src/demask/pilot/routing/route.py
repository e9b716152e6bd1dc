"""A route: the pilot answers where it is confident, and the full network where it is not.

The pilot is any network of the same call: a smaller one, or the network itself with fewer bits. It
runs for all rows (examples of a batch). Rows whose answer is not confident enough are gathered, the
full network runs for these alone, and its answers replace the pilot's. Confidence comes from the
pilot's class scores, as in the cascades of Viola and Jones (2001) for detectors and in IDK cascades
(Wang et al. 2017) for classifiers. `demask.pilot.guarantee` bounds the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from demask.ops import TABLE, Table
from demask.pilot.routing.calibrate import Calibrated, calibrated
from demask.pilot.routing.router import Router, ThresholdRoute, call_copy, pilot_network


@dataclass(frozen=True, slots=True)
class Route(ThresholdRoute):
    """A condition under which rows where the pilot's confidence is above `threshold` keep its
    answer.

    Args:
        threshold: 0 to 1; inf for the full network alone. `Route.calibrated` chooses one with a
            guarantee.
        confidence: "margin" (difference of the two largest probabilities), "softmax" (the largest
        one)
            or "entropy" (1 - entropy / log classes).
        answer: of the other rows: "full", the full network's, or "both", the logarithm of the mean
        of
            both networks' probabilities, which is often right more often than either and costs
            nothing
            more.

    Raises:
        BadInput: NaN as threshold, or an unknown `confidence` or `answer`.

    >>> import torch
    >>> net, small = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    >>> routed = Router(net, small, Route(0.2))
    >>> routed(torch.randn(8, 4)).shape, routed.last.rows
    (torch.Size([8, 3]), 8)
    """

    @staticmethod
    def calibrated(
        model: nn.Module,
        pilot: Any,
        inputs: Any,
        labels: Tensor | None = None,
        loss: float = 0.002,
        level: float = 0.95,
        *,
        confidence: str = "margin",
        answer: str = "full",
        batch: int = 64,
        seed: int = 0,
        parts: tuple[float, float, float] = (1, 4, 5),
        table: Table = TABLE,
    ) -> Calibrated:
        """The route that runs the full network for as few rows as a guarantee allows: a
        `Calibrated`, with the guarantee and whether routing is faster.

        Args:
            pilot: as `applied` takes it.
            inputs: a tensor or an args tuple of tensors, one example per row.
            labels: classes, int64 [rows].
            loss: of accuracy, as a share of examples, that `level` promises not to exceed; without
            labels,
                of answers that differ from the full network's.
            batch: rows per call.
            seed, parts: how examples are split, to choose, bound and report.
            table: the op table, as `demask.demask` takes it.
        """
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        few = tuple(leaf[:batch] if isinstance(leaf, Tensor) else leaf for leaf in args)
        networks = call_copy(model), pilot_network(pilot, model, few, {}, table)[0]
        wanted = Route(math.inf, confidence, answer)
        return calibrated(*networks, wanted, args, labels, (loss, level), batch,
                          (seed, parts))  # fmt: skip


__all__ = ["Route", "Router"]
