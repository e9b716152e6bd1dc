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

    A condition selects the work that a network does. Pass `Route(0.8)`, or its text "route:0.8", to
    the function `condition`. The pilot, a cheaper network with the same inputs, runs for all rows
    (examples of a batch). The rows whose confidence is not above the threshold are gathered, the
    full network runs for these alone, and its outputs replace the pilot's, as in IDK cascades (Wang
    et al. 2017). Outputs are class scores [rows, classes], before softmax. `condition` times the
    two networks on the example, also with check=False. Where routing is not faster or rows depend
    on each other, the full network runs alone, and `conditioned.decisions` says why.
    `Route.calibrated` chooses a threshold with a guarantee.

    Args:
        threshold: confidence, 0 to 1, above which the pilot's answer is used; inf: the full network
            alone.
        confidence: "margin" (the default: difference of the two largest probabilities), "softmax"
            (the largest probability) or "entropy" (1 - entropy / log classes).
        answer: for the rows that the full network runs: "full" (the default), its scores, or
            "both", the logarithm of the mean of both networks' probabilities, which costs no
            further call.

    Raises:
        BadInput: `threshold` is out of range, or `confidence` or `answer` is unknown; when the
            condition is applied: there is no pilot, or the outputs of the two networks do not match
            or are no class scores.
        NotExportable: when the condition is applied: the pilot is a simplifier, and torch.export
            cannot capture the model.

    Example:
        >>> import torch
        >>> from demask.pilot import Route, Router
        >>> scores = torch.tensor([[4.0, 0.0], [0.1, 0.0]])  # margins 0.96 and 0.05
        >>> net, pilot = torch.nn.Identity(), torch.nn.Identity()  # outputs are the scores
        >>> routed = Router(net, pilot, Route(0.5))  # as `condition` returns, without timing
        >>> _ = routed(scores)
        >>> routed.last.rows, routed.last.escalated  # the full network ran one of two rows
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
        """A `Calibrated`: the route with the fewest full runs that a guarantee allows.

        Its `route` is the `Route`, `router` the module to call and `guarantee` the guarantee;
        `pays` says whether routing is faster on this machine. If no threshold passes the test or
        routing is never faster, the threshold is inf: the full network runs for all rows.

        Args:
            model: the full network.
            pilot: a network with the same inputs, a simplifier or its text, such as "bits:4".
            inputs: a tensor or a tuple of tensors, one example per row.
            labels: classes, int64 [rows]; default None: the full network's answers are the
                reference.
            loss: greatest loss of accuracy, a share of examples; without labels, greatest share of
                answers that differ from the full network's; default 0.002.
            level: probability with which the loss is not exceeded; default 0.95.
            confidence: measure of confidence, as of `Route`; default "margin".
            answer: answer for the rows that the full network runs, as of `Route`; default "full".
            batch: rows per call, 1 or more; default 64.
            seed: seed of the random division of examples; default 0.
            parts: proportions of examples to choose, to test and to report (`splits`); default (1,
                4, 5).
            table: facts about each ATen op; default: the library's table.

        Raises:
            BadInput: too few examples, a value out of range, a pilot of another type, or outputs
                that are no class scores.
            NotExportable: torch.export cannot capture the model, from which a simplifier derives
                the pilot.
        """
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        few = tuple(leaf[:batch] if isinstance(leaf, Tensor) else leaf for leaf in args)
        networks = call_copy(model), pilot_network(pilot, model, few, {}, table)[0]
        wanted = Route(math.inf, confidence, answer)
        return calibrated(*networks, wanted, args, labels, (loss, level), batch, (seed, parts))


__all__ = ["Route", "Router"]
