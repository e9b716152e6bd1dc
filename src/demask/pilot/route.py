"""A route: the pilot answers where it is confident, and the full network where it is not.

The pilot is any network of the same call: a smaller one, or the network itself with fewer bits. It
runs for all rows (examples of a batch). Rows whose answer is not confident enough are gathered, the
full network runs for these alone, and its answers replace the pilot's. Confidence comes from the
pilot's class scores, as in the cascades of Viola and Jones (2001) for detectors and in IDK cascades
(Wang et al. 2017) for classifiers. `demask.pilot.guarantee` bounds the loss.

`Route.calibrated` chooses the threshold from examples: the boldest with a guarantee, if routing is faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from demask.errors import BadInput
from demask.machine.clock import median_seconds, race
from demask.ops import TABLE, Table
from demask.pilot.guarantee import Guarantee, compared, guarantee, splits
from demask.pilot.router import CONFIDENCES, Router, ThresholdRoute, call_copy, picked, pilot_network, scores

SHARES = tuple(k / 100 for k in range(95, -1, -1))  # of rows for the full network, tried
PAIRS, SECONDS = 15, 10.0  # calls of each network that are timed, and how long at most


@dataclass(frozen=True, slots=True, eq=False)
class Calibrated:
    """The result of `Route.calibrated`: a route, its guarantee, and whether it is faster here.

    A route runs a cheap network, the pilot, for all examples of a batch (rows), and the full
    network only for rows on which the pilot is not confident. Times are medians on this machine,
    for a batch of the size that was passed to `Route.calibrated`. `print` shows the result as a
    table.

    Attributes:
        route: the `Route`, with a threshold of inf where no threshold is guaranteed or routing is
            never faster.
        router: the `Router` to call; the router runs the full network alone where single calls are
            not faster.
        guarantee: the `Guarantee` of the threshold.
        share: share of rows that the full network runs, 0 to 1.
        pilot: seconds of the pilot for a batch.
        full: seconds of the full network for a batch.
        rest: seconds of the full network for `share` of a batch.
        reason: why routing is refused, in words; "" where it is not.
        pays: whether single calls are expected to be faster than those of the full network.
        gain: expected speed of a single call, as a multiple of the full network's.
        stream_gain: the same for `Router.stream`, which fills full batches for the full network.

    Example:
        >>> import torch
        >>> from demask.pilot import Route
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Linear(4, 3).eval()
        >>> calibration = Route.calibrated(net, "bits:8", torch.randn(1000, 4), loss=0.05)
        >>> calibration.guarantee.threshold < 0.1  # the pilot may answer nearly all
        True
    """

    route: ThresholdRoute
    router: Router
    guarantee: Guarantee
    share: float
    pilot: float
    full: float
    rest: float
    reason: str

    @property
    def pays(self) -> bool:
        """Whether single calls are expected to be faster than those of the full network."""
        return not self.reason

    @property
    def gain(self) -> float:
        """Expected speed of a single call, as a multiple of the full network's."""
        return self.full / (self.pilot + self.rest)

    @property
    def stream_gain(self) -> float:
        """Expected speed of `Router.stream`, as a multiple of the full network's.

        In a stream, the rows for the full network fill full batches.
        """
        return self.full / (self.pilot + self.share * self.full)

    def __str__(self) -> str:
        times = f"{1e3 * self.pilot:.3g} ms, {1e3 * self.full:.3g} ms"
        lines = [
            ("pilot, full network, per batch", times),
            ("rows for the full network", f"{self.share:.1%}"),
            ("expected gain: a call, a stream", f"{self.gain:.2f}x, {self.stream_gain:.2f}x"),
            ("use", self.reason or "route"),
        ]
        width = max(len(name) for name, _ in lines)
        return "\n".join([str(self.guarantee), *(f"{a:{width}}  {b}" for a, b in lines)])


@torch.no_grad()
def calibrated(
    model: nn.Module,
    pilot: nn.Module,
    wanted: ThresholdRoute,
    args: tuple[Any, ...],
    labels: Tensor | None,
    promise: tuple[float, float],
    batch: int,
    dealt: tuple[int, Sequence[float]],
) -> Calibrated:
    """The result of `Route.calibrated`, for networks in eval mode.

    wanted: the route but for its threshold. promise: loss and level. dealt: seed and parts of the
    splits.
    """
    rows = _rows(args, labels, batch)
    sure, mine, better, full = _answers(Router(model, pilot, wanted), args, rows, batch)
    split = splits(rows, *dealt)
    shares = torch.tensor(SHARES, dtype=sure.dtype)
    # Values that occur: rounded to float32, where they are compared, they stay the same.
    known = sure[split.choose].nan_to_num(nan=0.0).clamp(0, 1)  # an entropy rounds
    knobs = known.quantile(shares, interpolation="lower").unique().flip(0)
    answers = torch.where(sure > knobs[:, None], mine, better)
    bound = guarantee(compared(knobs.tolist(), full, answers, labels), *promise, split=split)
    threshold = math.inf if bound.threshold is None else bound.threshold
    seen = sure[torch.cat([split.bound, split.report])]
    share = float((~(seen > threshold)).float().mean())
    times = _times(model, pilot, args, rows, batch, share)
    return _judged(replace(wanted, threshold=threshold), model, pilot, bound, share, times)


def _rows(args: tuple[Any, ...], labels: Tensor | None, batch: int) -> int:
    sizes = {len(t) if isinstance(t, Tensor) and t.ndim else 0 for t in args}
    if len(sizes) != 1 or 0 in sizes:
        raise BadInput(
            "expected inputs as tensors with one row per example, as many in each, got "
            f"{[list(getattr(t, 'shape', [])) for t in args]}"
        )
    rows = sizes.pop()
    if labels is not None and (tuple(labels.shape) != (rows,) or labels.is_floating_point()):
        raise BadInput(f"expected labels as {rows} classes, integers, got {labels.dtype} {list(labels.shape)}")
    if batch < 1:
        raise BadInput(f"expected batch >= 1, got {batch}")
    return rows


def _answers(router: Router, args: tuple[Any, ...], rows: int, batch: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For all rows: the confidence of the pilot, its classes, those of the rows for the full
    network, and those of the full network alone."""
    parts = []
    for part in torch.arange(rows, device=args[0].device).split(batch):
        some = picked(args, part, rows)
        cheap, full = router.pilot(*some), router.full(*some)
        better = router.merged(cheap, full, torch.arange(len(part), device=part.device))
        sure = CONFIDENCES[router.route.confidence](scores(cheap))
        parts.append((sure.double(), *(scores(output).argmax(1) for output in (cheap, better, full))))
    sure, mine, better, full = (torch.cat(one).cpu() for one in zip(*parts, strict=True))
    return sure, mine, better, full


def _times(
    model: nn.Module, pilot: nn.Module, args: tuple[Any, ...], rows: int, batch: int, share: float
) -> tuple[float, float, float]:
    """Seconds of the pilot, of the full network, and of the full network for `share` of a batch."""
    count = min(batch, rows)
    device = args[0].device
    some = picked(args, torch.arange(count, device=device), rows)
    few = picked(args, torch.arange(max(1, math.ceil(share * count)), device=device), rows)
    calls = {"pilot": partial(pilot, *some), "full": partial(model, *some), "rest": partial(model, *few)}
    taken = median_seconds(race(calls, PAIRS, 1, seconds=SECONDS, device=device))
    return taken["pilot"], taken["full"], taken["rest"]


def _judged(
    route: ThresholdRoute,
    model: nn.Module,
    pilot: nn.Module,
    bound: Guarantee,
    share: float,
    times: tuple[float, float, float],
) -> Calibrated:
    """The route, if pilot and rest take less than the full network; else the full network alone."""
    cheap, full, rest = times
    rest = rest if share else 0.0
    words = (
        f"the pilot takes {1e3 * cheap:.3g} ms of the full network's {1e3 * full:.3g}, and "
        f"{share:.1%} of the rows need both"
    )
    reason = ""
    if bound.threshold is None:
        kind = "a loss" if bound.reported.labelled else "a disagreement"
        reason = f"do not route: {kind} of {bound.loss:.2%} cannot be guaranteed for any threshold"
    elif cheap + share * full >= full:
        reason = f"do not route: it does not pay, for {words}"
        route = replace(route, threshold=math.inf)
    elif cheap + rest >= full:
        reason = f"route streams only: a single call does not pay, for {words}"
    router = Router(model, pilot, route)
    router = router.alone(reason) if reason else router
    return Calibrated(route, router, bound, share, *times[:2], rest, reason)


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
