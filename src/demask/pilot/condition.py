"""condition(): the same call with less work, chosen by a cheap run; or the model, and why.

Each condition is a frozen dataclass in the file of its engine, and has a text ("columns",
"skip:0.5"). The module that is returned has `conditioned`, which says what was done to each layer.
It was timed alternately with the model, and is never the slower of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from demask.errors import BadInput
from demask.failures import public
from demask.graph.module_copy import structural_copy
from demask.machine.benchmark import ALLOWED, PAIRS
from demask.machine.timing import sample_seconds
from demask.ops import TABLE, Table
from demask.pilot.chains.exact_conditions import Certified, Columns
from demask.pilot.chains.ordered_graph import Order
from demask.pilot.conditions.base import Condition, Conditioned, Decision, parsed
from demask.pilot.conditions.channel_conditions import ConstantChannels, Precision, Skip, Value
from demask.pilot.conditions.regions import Regions
from demask.pilot.data.execution_data import ExecutionData
from demask.pilot.guarantee import LEVEL, LOSS, Guarantee, guarantee, observed
from demask.pilot.routing.route import Route
from demask.pilot.simplifiers.simplify import Simplifier
from demask.tune.race import speed_of

KINDS = (Columns, Certified, Skip, ConstantChannels, Value, Precision, Order, Route, Regions)
CHOSEN = (
    Skip,
    ConstantChannels,
    Value,
    Precision,
    Route,
)  # whose first parameter a guarantee chooses
KNOBS = (
    0.95,
    0.9,
    0.8,
    0.7,
    0.6,
    0.5,
    0.4,
    0.3,
    0.2,
)  # shares that are computed, the most careful first
WHOLE = "the network, whole"
WARMUP = 3


@public
def condition(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    pilot: str | Simplifier | nn.Module | ExecutionData | None = None,
    condition: str | Condition = "columns",
    check: bool = True,
    calibration: Iterable[Any] | None = None,
    labels: Tensor | None = None,
    loss: float = LOSS,
    level: float = LEVEL,
    knobs: Sequence[float] = KNOBS,
    clock: Callable[[], float] = perf_counter,
    table: Table = TABLE,
) -> nn.Module:
    """A module of the same call that does only the work that the condition selects.

    The model is not changed.

    Args:
        args, kwargs: example inputs; the module is also timed on them.
        pilot: a simplifier or its text ("bits:4"), a module of the same call, execution data of an
            earlier frame or a calibration set, or None.
        condition: a dataclass or its text: "columns", "certified", "skip:0.5", "constant:0.5",
            "value:0.5", "precision:0.5:bits=4", "order:deadline=0.001", "route:0.8", "regions:…".
        check: time the module against the model, in 30 rounds. Where it may be slower (the lower 95
        %
            bound of the ratio of medians is below 0.97) a copy of the model is returned, and
            `conditioned.decisions` says so. Conditions with a deadline are not timed.
        calibration: batches (a tensor or an args tuple each), for a condition that is named without
        its
            first parameter ("skip"): the boldest of `knobs` that `guarantee` accepts is taken;
            where
            there is none, the model. Positions are chosen for a batch together, so give batches of
            as
            many examples as later calls have.
        labels: classes, int64 [examples]; with them the loss is in accuracy, else in answers that
            differ.
        loss, level: the loss is at most `loss` with probability `level` on new examples.
        knobs: values of the condition's first parameter, the most careful first.
        clock: returns seconds, for `check`.
        table: the op table, as `demask.demask` takes it.

    Raises:
        BadInput: the condition, the pilot or the inputs do not fit the model.
        NotExportable: torch.export cannot capture the model.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)).eval()
    >>> x = torch.randn(2, 8)
    >>> half = condition(net, (x,), pilot="bits:8", condition="skip:0.5", check=False)
    >>> half(torch.randn(2, 8)).shape, half.conditioned.decisions[0]
    (torch.Size([2, 4]), Decision(layer='0', what='skip', why='0.5 of 64 positions'))
    """
    example = tuple(args), dict(kwargs or {})
    if calibration is not None:
        module, chosen = _calibrated(model, example, (pilot, table), condition, list(calibration),
                                 labels, (loss, level), knobs)  # fmt: skip
    else:
        chosen = condition_of(condition)
        module = chosen.applied(model, *example, pilot, table)
    about: Any = module.conditioned
    if not check or isinstance(chosen, Order) or about.decisions[:1] == _DENSE:
        return module
    why = slower(model, module, example, clock)
    return dense(model, about, why) if why else module


_DENSE = (Decision(WHOLE, "dense", "no value of its parameter can be guaranteed"),)


def condition_of(text: str | Condition) -> Condition:
    """The condition of a text; raises BadInput, which lists the conditions, for any other text.

    >>> condition_of("skip:0.5"), condition_of("columns")
    (Skip(keep=0.5, threshold=None, layers='*'), Columns())
    """
    if isinstance(text, str):
        try:
            return parsed(text, KINDS)
        except TypeError as error:  # a parameter that has no default
            raise BadInput(f"the condition {text!r} is not complete: say its threshold, as in "
                           f"'{text}:0.8'") from error  # fmt: skip
    if isinstance(text, Condition):
        return text
    names = ", ".join(kind.name for kind in KINDS)
    raise BadInput(f"expected a condition or its text ({names}), got {type(text).__name__}")


def slower(
    model: nn.Module,
    module: nn.Module,
    example: tuple[tuple[Any, ...], Mapping[str, Any]],
    clock: Callable[[], float] = perf_counter,
) -> str:
    """Why a conditioned module may be slower than the model, by alternate timing; "" otherwise."""
    args, kwargs = example
    original = _eval(model)
    calls = {
        "baseline": partial(original, *args, **kwargs),
        "result": partial(module, *args, **kwargs),
    }
    with torch.no_grad():
        speed = speed_of(**sample_seconds(calls, PAIRS, WARMUP, clock=clock))
    if speed.least >= ALLOWED:
        return ""
    return (f"conditioned it may be slower (ratio {speed.ratio:.2f}, at least {speed.least:.2f}); "
            "check=False (--unchecked) returns it all the same")  # fmt: skip


def dense(model: nn.Module, wanted: Conditioned, why: str) -> nn.Module:
    """A copy of the model in eval mode that says why it is not conditioned; it shares tensors."""
    copy: Any = _eval(model)
    left = (Decision(d.layer, "as it was", f"it would be {d.what}: {d.why}")
            for d in wanted.decisions)  # fmt: skip
    decisions = (Decision(WHOLE, "dense", why), *left)
    copy.conditioned = Conditioned(wanted.condition, wanted.pilot, True, decisions)
    return copy


def _eval(model: nn.Module) -> nn.Module:
    copy = structural_copy(model, share=True)
    for part in copy.modules():
        part.training = False
    return copy


def _calibrated(
    model: nn.Module, example: tuple[tuple[Any, ...], dict[str, Any]], by: tuple[Any, Table],
    wanted: str | Condition, batches: list[Any], labels: Tensor | None,
    bounds: tuple[float, float], knobs: Sequence[float],
) -> tuple[Any, Condition]:  # fmt: skip
    """The conditioned module of the boldest parameter that is guaranteed, or the model. by: the
    pilot and the table; bounds: loss and level."""
    if not isinstance(wanted, str) or ":" in wanted:
        raise BadInput(f"calibration chooses the parameter of a condition that is named without "
                       f"it, such as 'skip'; got {wanted!r}")  # fmt: skip
    if wanted not in (names := [kind.name for kind in CHOSEN]):
        raise BadInput(f"calibration chooses the parameter of {', '.join(names)}; {wanted!r} has "
                       "none to choose: leave calibration out")  # fmt: skip
    conditions = {knob: condition_of(f"{wanted}:{knob}") for knob in knobs}
    modules = {knob: kind.applied(model, *example, *by) for knob, kind in conditions.items()}
    outcomes = observed(_eval(model), modules.__getitem__, knobs, batches, labels)
    bound = guarantee(outcomes, *bounds)
    boldest = bound.threshold
    chosen: Any = modules[knobs[0] if boldest is None else boldest]
    if boldest is None:
        lost = dense(model, chosen.conditioned, _DENSE[0].why)
        return _with(lost, bound), conditions[knobs[0]]
    return _with(chosen, bound), conditions[boldest]


def _with(module: Any, bound: Guarantee) -> nn.Module:
    module.guarantee = bound
    return module
