"""condition(): the same call with less work, chosen by a cheap run; or the model, and why.

Each condition is a frozen dataclass in the file of its engine, and has a text ("columns",
"skip:0.5"). The module that is returned has `conditioned`, which says what was done to each layer.
It was timed alternately with the model, and is never the slower of the two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from demask.errors import BadInput
from demask.failures import public
from demask.graph.isolation import in_isolation
from demask.graph.module_copy import structural_copy
from demask.graph.provenance import WHOLE
from demask.machine.byte_sizes import parse_memory
from demask.machine.clock import PAIRS, is_faster, race
from demask.ops import TABLE, Table
from demask.pilot.chains.exact_conditions import Certified, Columns
from demask.pilot.conditions.base import Args, Condition, Conditioned, Decision, Kwargs, parsed
from demask.pilot.conditions.channel_conditions import ConstantChannels, PilotValue, Precision, Skip
from demask.pilot.conditions.packet_weights import skipping_packets
from demask.pilot.conditions.regions import Regions
from demask.pilot.data.execution_data import ExecutionData
from demask.pilot.guarantee import LEVEL, LOSS, Guarantee, guarantee, observed
from demask.pilot.route import Route
from demask.pilot.simplifiers.simplify import Simplifier
from demask.tune.race import speed_of

KINDS = (Columns, Certified, Skip, ConstantChannels, PilotValue, Precision, Route, Regions)
CHOSEN = (Skip, ConstantChannels, PilotValue, Precision, Route)  # whose first parameter a guarantee chooses
KNOBS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)  # shares that are computed, the most careful first
WARMUP = 3


@in_isolation
@public
def condition(
    model: nn.Module,
    args: Args,
    kwargs: Kwargs = None,
    *,
    pilot: str | Simplifier | nn.Module | ExecutionData | None = None,
    condition: str | Condition = "columns",
    check: bool = True,
    weights: str | os.PathLike[str] | None = None,
    memory: int | str | None = None,
    calibration: Iterable[Any] | None = None,
    labels: Tensor | None = None,
    loss: float = LOSS,
    level: float = LEVEL,
    knobs: Sequence[float] = KNOBS,
    clock: Callable[[], float] = perf_counter,
    table: Table = TABLE,
) -> nn.Module:
    """A network with the same inputs that does only the work which a condition selects.

    The model is not changed. The result has an attribute `conditioned` (a `Conditioned`), which
    says how each layer is run and why.

    Args:
        model: the network, which is run in eval mode.
        args: example inputs by position, a tuple; the result is also timed on the example.
        kwargs: example inputs by name; default None: none.
        pilot: the cheap run that selects the work: a simplifier (derives a cheaper network) or its
            text, such as "bits:4", a network with the same inputs, an ExecutionData (magnitudes of
            channels) of earlier inputs, or None (the default) for conditions that need none.
        condition: a condition or its text: "columns" (the default), "certified", "skip:0.5",
            "constant:0.5", "value:0.5", "precision:0.5:bits=4", "route:0.8", "regions:0.1".
            Parameters follow as "name=value", as in "skip:threshold=0.1".
        check: whether to time the result and the model in turns, 30 times each; default True. Speed
            is the median time of the model divided by that of the result. Where the lower 95 %
            bound of the speed is below 0.97, the result may be slower: a copy of the model is
            returned, and `conditioned.decisions` says so.
        weights: path of a packet file (`write_packets`) with the weights of `model`, which may be on
            the meta device; default None: the model's own. The condition is then "skip", its pilot
            None (the file's priorities), an ExecutionData or a network: only rows of weights that
            are computed are read, when their layer runs. The result has `bytes_read` and
            `peak_weight_bytes`, of its last call, and `close`; it is not timed.
        memory: with `weights`: most bytes of weights in memory at a time, a number or a text such
            as "64MiB"; rows within it are retained for later calls; default None: no limit.
        calibration: batches of examples (each a tensor or a tuple of arguments), for a condition
            that is named without its parameter: "skip", "constant", "value", "precision" or
            "route". The most aggressive value (the one that leaves out most work) of `knobs` that
            `guarantee` accepts is used, and the result has the `Guarantee` as `guarantee`; where no
            value passes, a copy of the model is returned. Channels are chosen for a batch together,
            so pass batches as large as those of later calls. Default None: no calibration.
        labels: classes of the calibration examples, int64 [examples]; with labels the loss is the
            accuracy lost; without (None, the default) the loss is the share of answers that differ
            from the model's.
        loss: greatest loss on new examples, a share of examples, 0 to 1; default 0.002.
        level: probability with which the loss is not exceeded, between 0 and 1; default 0.95.
        knobs: values of the condition's parameter to test, the most careful first; default 0.95,
            0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2.
        clock: function that returns seconds, for `check`; default time.perf_counter.
        table: facts about each ATen op; default: the library's table.

    Returns:
        An nn.Module; where the condition does not help, a copy of the model that shares its
        weights.

    Raises:
        BadInput: the packet file does not fit the model or the condition, or rows exceed `memory`;
            the condition is unknown or has a value out of range, the pilot does not fit the
            condition or the model, or the condition cannot be applied to the model; with
            calibration: the condition has its parameter or has none to choose, there are too few
            examples, labels are not integers, one per example, or `loss` or `level` is out of
            range.
        NotExportable: torch.export cannot capture the model.

    Example:
        >>> import torch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> from demask.pilot import condition
        >>> net, x = Sequential(Linear(8, 64), ReLU(), Linear(64, 4)).eval(), torch.randn(2, 8)
        >>> half = condition(net, (x,), pilot="bits:8", condition="skip:0.5", check=False)
        >>> print(half.conditioned)
        skip:0.5 by bits:8, outputs may differ
        0: skip (0.5 of 64 positions)
        2: dense (the network's output is returned in full)
    """
    example = tuple(args), dict(kwargs or {})
    if weights is not None:
        wanted = condition_of(condition)
        if not isinstance(wanted, Skip) or isinstance(pilot, str | Simplifier) or calibration is not None:
            raise BadInput(
                "with weights in a packet file, expected a condition such as 'skip:0.5', without calibration, and as "
                "pilot None (the file's priorities), an ExecutionData or a network: others need all weights"
            )
        budget = None if memory is None else parse_memory(memory)
        return skipping_packets(wanted, model, *example, pilot, weights, budget, table)
    if memory is not None:
        raise BadInput("memory limits weights that are read from a file: pass weights, the path of a packet file")
    if calibration is not None:
        module, chosen = _calibrated(
            model, example, (pilot, table), condition, list(calibration), labels, (loss, level), knobs
        )
    else:
        chosen = condition_of(condition)
        module = chosen.applied(model, *example, pilot, table)
    about: Any = module.conditioned
    if not check or about.decisions[:1] == _DENSE:
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
            raise BadInput(f"the condition {text!r} is not complete: say its threshold, as in '{text}:0.8'") from error
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
    calls = {"baseline": partial(original, *args, **kwargs), "result": partial(module, *args, **kwargs)}
    with torch.no_grad():
        speed = speed_of(**race(calls, PAIRS, WARMUP, clock=clock))
    if is_faster(speed.least):
        return ""
    return (
        f"conditioned it may be slower (ratio {speed.ratio:.2f}, at least {speed.least:.2f}); "
        "check=False (--unchecked) returns it all the same"
    )


def dense(model: nn.Module, wanted: Conditioned, why: str) -> nn.Module:
    """A copy of the model in eval mode that says why it is not conditioned; it shares tensors."""
    copy: Any = _eval(model)
    left = (Decision(d.layer, "as it was", f"it would be {d.what}: {d.why}") for d in wanted.decisions)
    decisions = (Decision(WHOLE, "dense", why), *left)
    copy.conditioned = Conditioned(wanted.condition, wanted.pilot, True, decisions)
    return copy


def _eval(model: nn.Module) -> nn.Module:
    copy = structural_copy(model, share=True)
    for part in copy.modules():
        part.training = False
    return copy


def _calibrated(
    model: nn.Module,
    example: tuple[tuple[Any, ...], dict[str, Any]],
    by: tuple[Any, Table],
    wanted: str | Condition,
    batches: list[Any],
    labels: Tensor | None,
    bounds: tuple[float, float],
    knobs: Sequence[float],
) -> tuple[Any, Condition]:
    """The conditioned module of the boldest parameter that is guaranteed, or the model. by: the
    pilot and the table; bounds: loss and level."""
    if not isinstance(wanted, str) or ":" in wanted:
        raise BadInput(
            f"calibration chooses the parameter of a condition that is named without it, such as 'skip'; got {wanted!r}"
        )
    if wanted not in (names := [kind.name for kind in CHOSEN]):
        raise BadInput(
            f"calibration chooses the parameter of {', '.join(names)}; {wanted!r} has "
            "none to choose: leave calibration out"
        )
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
