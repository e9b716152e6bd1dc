"""The pilot answers where it is sure, and the full network only where it is not.

The pilot is any network of the same call: a smaller one, or the network itself with fewer bits. It
runs for all rows (examples of a batch). Rows whose answer is not sure enough are gathered, the full
network runs for these alone, and its answers are put in their places. How sure: from the pilot's
class scores, as Viola and Jones's cascades do with detectors (2001) and IDK cascades with
classifiers (Wang et al. 2017). What that loses is found out in `demask.pilot.guarantee`.
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
    """Rows of which the pilot is surer than `threshold` keep its answer.

    confidence: "margin" (of the two largest probabilities), "softmax" (the largest one) or
    "entropy" (1 - entropy / log classes): 0 to 1 each. answer, of the other rows: "full", the full
    network's, or "both", the logarithm of the mean of both networks' probabilities, which is often
    right more often than either and costs nothing more. threshold=inf: the full network alone.
    `Route.calibrated` finds a threshold with a guarantee. Feature row 001-e.

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
        `demask.pilot.routing.calibrate.Calibrated`, with the guarantee and whether it pays.

        pilot: as `applied` takes it. inputs: a tensor or an args tuple of tensors, one example per
        row; labels: classes, int64 [rows]. loss: of accuracy, as a share of examples, that `level`
        promises not to exceed; without labels, of answers that differ from the full network's.
        parts: how examples are split, to choose, bound and report. batch: rows per call.
        table: the op table, as `demask.demask` takes it.
        """
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        few = tuple(leaf[:batch] if isinstance(leaf, Tensor) else leaf for leaf in args)
        networks = call_copy(model), pilot_network(pilot, model, few, {}, table)[0]
        wanted = Route(math.inf, confidence, answer)
        return calibrated(*networks, wanted, args, labels, (loss, level), batch,
                          (seed, parts))  # fmt: skip


__all__ = ["Route", "Router"]
