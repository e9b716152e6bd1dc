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
    """A condition that runs the full network only where a cheap pilot is not confident.

    Text: "route:T", as in "route:0.8". The pilot, a cheaper network of the same call, runs for all
    rows (examples of a batch). The rows whose confidence is not above the threshold are gathered,
    the full network runs for these alone, and its answers replace the pilot's. Outputs are class
    scores [rows, classes]. `Route.calibrated` chooses a threshold with a guarantee.

    Args:
        threshold: confidence, 0 to 1; inf for the full network alone.
        confidence: "margin" (the default: difference of the two largest probabilities), "softmax"
            (the largest probability) or "entropy" (1 - entropy / log classes).
        answer: for the rows that the full network runs: "full" (the default), its answer, or
            "both", the logarithm of the mean of both networks' probabilities, which costs nothing
            more and is often right more often than either.

    Raises:
        BadInput: `threshold` is NaN, or `confidence` or `answer` is unknown; when it is applied:
            the outputs of the two networks do not match or are no class scores.

    Example:
        >>> import torch
        >>> from demask.pilot import Route, Router
        >>> scores = torch.tensor([[4.0, 0.0], [0.1, 0.0]])  # margins 0.96 and 0.05
        >>> routed = Router(full=torch.nn.Identity(), pilot=torch.nn.Identity(), route=Route(0.5))
        >>> _ = routed(scores)
        >>> routed.last.rows, routed.last.escalated  # of two rows the full network ran one
        (2, 1)
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
        """The route that runs the full network for as few rows as a guarantee allows.

        The result, a `Calibrated`, has the guarantee, and whether routing is faster on this
        machine. If no threshold passes the test, the threshold is inf: the full network runs for
        all rows.

        Args:
            model: the full network.
            pilot: a network of the same call, a simplifier or its text, such as "bits:4".
            inputs: a tensor or a tuple of tensors, one example per row.
            labels: classes, int64 [rows]; default None.
            loss: greatest loss of accuracy, a share of examples; without labels, greatest share of
                answers that differ from the full network's; default 0.002.
            level: probability with which the loss is not exceeded; default 0.95.
            confidence, answer: as of `Route`.
            batch: rows per call, default 64.
            seed, parts: how examples are divided, to choose, bound and report (`splits`); default 0
                and (1, 4, 5).
            table: the op table, as `demask.demask` takes it.

        Raises:
            BadInput: too few examples, a value out of range, or outputs that are no class scores.
        """
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        few = tuple(leaf[:batch] if isinstance(leaf, Tensor) else leaf for leaf in args)
        networks = call_copy(model), pilot_network(pilot, model, few, {}, table)[0]
        wanted = Route(math.inf, confidence, answer)
        return calibrated(*networks, wanted, args, labels, (loss, level), batch,
                          (seed, parts))  # fmt: skip


__all__ = ["Route", "Router"]
