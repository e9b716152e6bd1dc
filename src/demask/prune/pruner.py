"""The Pruner: masks what scores say is least important, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from demask.errors import BadInput, DemaskError
from demask.failures import described, public
from demask.graph.provenance import Sizes
from demask.prune.allocation.shares import Scores, Uniform
from demask.prune.coupling import Coupling, as_arguments
from demask.prune.masks import (
    check_masks,
    find_places,
    find_uncalled,
    read_masks,
    remove_masks,
    replace_masks,
    run_in_eval_mode,
    write_masks,
)
from demask.prune.removal_cost import RemovalCost
from demask.prune.schedules import OneShot, check_fraction
from demask.prune.scores import L1, InputRecorder, Score, ScoreView
from demask.prune.structures import find_candidates
from demask.text_table import number_table, render_text

Allocation = Callable[[Scores, float, "Pruner"], Mapping[str, "int | Tensor"]]
Schedule = Callable[[int], float]


@dataclass(frozen=True, eq=False)
class Pruned:
    """What one step of a `Pruner` masked. It prints as a table.

    Attributes:
        step: the number of the step, from 1.
        fraction: the fraction of all units that should be masked after it.
        removed: by group or weight, the units that were masked in this step, int64, in order.
        units: by group or weight, the number of units in all.
        left: by group or weight, the number of units that stay.
        before, after: the size of the network that `demask.demask` returns before and after the
            step: parameters that a call reads, MACs of the example inputs, bytes. Counted
            from the op table; single weights and blocks count only where they leave no slice.
            Tokens that no output reads, as all but the first in the last layer of a classifier, are
            in neither. Of buffers of integers that demask cuts, the bytes stay.
        plan: what the allocation returned; of `Latency` a `LatencyPlan`, with what was measured.

    Example:
        >>> import torch
        >>> from demask import prune
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> print(prune.Pruner(net, torch.zeros(1, 4)).step(0.25))
               units   removed   left
        ──────────────────────────────
         0         8         2      6
        <BLANKLINE>
         all       8         2      6
        <BLANKLINE>
        parameters: 58 -> 44
        MACs: 48 -> 36
    """

    step: int
    fraction: float
    removed: Mapping[str, Tensor]
    units: Mapping[str, int]
    left: Mapping[str, int]
    before: Sizes
    after: Sizes
    plan: Mapping[str, int | Tensor]

    def __str__(self) -> str:
        table = number_table("", "units", "removed", "left")
        for name, removed in self.removed.items():
            row = self.units[name], len(removed), self.left[name]
            table.add_row(name, *(f"{n:,}" for n in row))
        totals = [sum(self.units.values()), sum(map(len, self.removed.values())), sum(self.left.values())]
        table.add_section()
        table.add_row("all", *(f"{n:,}" for n in totals))
        sizes = "\n".join(
            f"{what}: {a:,} -> {b:,}"
            for what, a, b in (
                ("parameters", self.before.parameters, self.after.parameters),
                ("MACs", self.before.macs, self.after.macs),
            )
        )
        return f"{render_text(table)}\n\n{sizes}"


class Pruner:
    """Masks parts of a network, step by step, while it is trained or before.

    Which slices must go together is read off the op table (`demask.prune.groups`), so that
    `demask.demask` removes exactly what is masked. Masks are those of `torch.nn.utils.prune`, or
    parametrizations where a tensor is parametrized already or read without its module being called:
    parameters stay the same objects, so that an optimizer created before or after can go on.

    Args:
        model: the network, an `nn.Module`, also in `DistributedDataParallel` or `torch.compile`, in
            any mode. It is masked in place by `step`. Masks that it has stay.
        example_inputs: a tuple of the model's inputs, one tensor, or a mapping of keyword inputs.
        score: the importance of units: `L1()` (default), `L2`, `Taylor`, `Activation`,
            `Fluctuation`, `Random`, or a callable that takes a `ScoreView` and returns a
            tensor [units].
        structure: what is removed as one: "channel" (default), "head", "unit", "expert", or parts
            of single weights: "block:RxC" (as "block:4x1"), "n:m" ("2:4": two of every four
            consecutive inputs stay) and "element".
        allocation: how the removed fraction is shared: `Uniform()` (default), `Global`,
            `OutlierWeighted`, or a callable (scores by name, fraction, pruner) that returns by name
            how many units stay, or which, a bool tensor.
        schedule: the fraction of all units that is masked after each step: `OneShot(0.5)`
            (default), `Cubic`, `Iterative`, or a callable that takes the number of the step.
        skip: names or globs of modules and parameters that are to remain uncut.

    Attributes:
        model: the model, without `DistributedDataParallel` and `torch.compile`.
        inputs: the example inputs by position and by name.
        coupling: its slices.
        removal_cost: the size of what demask makes of it, `removal_cost.masked(masks)`.
        candidates: what can be removed, a tuple.
        steps: the number of steps so far.

    Raises:
        BadInput: an unknown structure, one that the network has nothing of, a name in `skip` that
            does not exist, inputs that the model does not accept, a score, allocation or schedule
            that is no function, or an optimized network.
        NotExportable: the model cannot be captured in full.

    Example:
        >>> import demask, torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> x = torch.zeros(1, 4)
        >>> pruner = demask.prune.Pruner(net, x, schedule=demask.prune.OneShot(0.75))
        >>> pruned = pruner.step()
        >>> pruned.left, pruned.after.parameters
        ({'0': 2}, 16)
        >>> demask.demask(net, (x,)).demasked.after.parameters
        16
    """

    @public
    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        *,
        score: Score | None = None,
        structure: str = "channel",
        allocation: Allocation | None = None,
        schedule: Schedule | None = None,
        skip: Sequence[str] = (),
    ):
        for value, what, such in (
            (score, "score", "prune.L1()"),
            (allocation, "allocation", "prune.MACs(0.5)"),
            (schedule, "schedule", "prune.OneShot(0.5)"),
        ):
            _check_function(value, what, such)
        self.model: nn.Module = _unwrap(model)
        self.structure = structure
        self.score: Score = L1() if score is None else score
        self.allocation: Allocation = Uniform() if allocation is None else allocation
        self.schedule: Schedule = OneShot() if schedule is None else schedule
        self.inputs = args, kwargs = as_arguments(example_inputs)
        self.coupling = Coupling.of(self.model, args, kwargs, skip=skip)
        self.removal_cost = RemovalCost.of(self.coupling)
        places = find_places(self.model)
        shapes = {name: at[0].value.shape for name, at in places.items()}
        self.candidates = find_candidates(structure, self.coupling, shapes)
        self.steps = 0
        self._uncalled = _uncalled_in(self.model, args, kwargs)
        self._recorder = InputRecorder(self._read_layers() if self._needs_inputs else {})

    @property
    def _needs_inputs(self) -> bool:
        return bool(getattr(self.score, "needs_inputs", False))

    def _read_layers(self) -> dict[str, Any]:
        """The places of the weights whose inputs the score needs."""
        places = find_places(self.model)
        names = {
            m.parameter
            for c in self.candidates
            for m in c.members
            if m.is_weight and (c.group is None or not m.produces)
        }
        return {name: places[name] for name in names - self._uncalled}

    @public
    def step(self, fraction: float | None = None) -> Pruned:
        """Mask units until a fraction of all is masked, in place; masked units stay so.

        Args:
            fraction: of all units, those masked before among them, from 0 to less than 1. Default:
                what the schedule says for this step.

        Returns:
            What went, and the sizes before and after.

        Raises:
            BadInput: another fraction; scores with NaN, of a wrong shape, or that need gradients or
                inputs that are missing; an allocation that keeps nothing of a group; a score,
                allocation or schedule that fails. Nothing is changed then.
        """
        number = self.steps + 1
        planned: Any = fraction
        if fraction is None:
            planned = _call_function(f"schedule on step {number}", self.schedule, number)
        target = check_fraction(planned)
        masks = read_masks(self.model)
        views = self._score_views()
        alive = {c.name: c.alive(masks) for c in self.candidates}
        scores = {
            c.name: self._checked_scores(view).masked_fill(~alive[c.name], -torch.inf)
            for c, view in zip(self.candidates, views, strict=True)
        }
        plan = self._allocate(scores, alive, target)
        keep = self._select_units(plan, scores, alive)
        more = self._masks_of(keep)
        gone = {name: alive[name] & ~keep[name] for name in keep}
        before = self.removal_cost.masked(masks)
        write_masks(self.model, more, self._uncalled)
        self._add_to_biases(self._bias_changes(views, gone))
        self.steps = number
        pruned = Pruned(
            number,
            target,
            {name: mask.nonzero().squeeze(1) for name, mask in gone.items()},
            {c.name: c.units for c in self.candidates},
            {name: int(mask.sum()) for name, mask in keep.items()},
            before,
            self.removal_cost.masked(read_masks(self.model)),
            plan,
        )
        recover = getattr(self.schedule, "recover", None)
        if recover is not None:
            recover()
        return pruned

    # --- scores and allocation --------------------------------------------------------------------

    def _score_views(self) -> list[ScoreView]:
        places, statistics = find_places(self.model), self._recorder.statistics
        return [ScoreView(c, places, statistics) for c in self.candidates]

    def scores(self) -> dict[str, Tensor]:
        """By group or weight, the scores of its units, float64 [units], averaged over ranks.

        Raises:
            BadInput: as `step`, for scores.
        """
        return {view.candidates.name: self._checked_scores(view) for view in self._score_views()}

    def _checked_scores(self, view: ScoreView) -> Tensor:
        """The checked scores of a group's or weight's units, float64 on the CPU."""
        name, units = view.candidates.name, view.candidates.units
        scores = _call_function(f"score on {name}", self.score, view)
        if not isinstance(scores, Tensor) or scores.shape != (units,):
            raise BadInput(f"expected {units} scores for {name}, got {scores!r:.60}")
        scores = _average_over_ranks(scores.detach(), self.model).double().cpu()
        if bool(scores.isnan().any()):
            raise BadInput(
                f"{int(scores.isnan().sum())} of {units} scores of {name} are NaN: look for NaN in "
                "its weights, their gradients or inputs. Nothing was masked"
            )
        return scores

    def _allocate(
        self, scores: Mapping[str, Tensor], alive: Mapping[str, Tensor], fraction: float
    ) -> Mapping[str, int | Tensor]:
        """By group or weight, how many units stay, or which, as the allocation says."""
        finite = {name: s.masked_fill(~alive[name], 0.0) for name, s in scores.items()}
        shares = _call_function("allocation", self.allocation, finite, fraction, self)
        if not isinstance(shares, Mapping):
            raise BadInput(
                "expected the allocation to return how many units stay by name, of "
                f"{', '.join(finite)}; got {shares!r:.60}"
            )
        return shares

    def _select_units(
        self, plan: Mapping[str, int | Tensor], scores: Mapping[str, Tensor], alive: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """By group or weight, the units that stay, bool. Raises BadInput where none would."""
        keep = {}
        for candidates in self.candidates:
            name, share = candidates.name, plan.get(candidates.name)
            mine = alive[name]
            if isinstance(share, Tensor) and share.dtype == torch.bool and share.shape == mine.shape:
                chosen = share.cpu() & mine
            elif isinstance(share, int) and share >= 0:
                chosen = candidates.choose(scores[name], share) & mine
            else:
                raise BadInput(
                    f"expected how many units of {name} stay, an integer of 0 or more, "
                    f"or which, bool [{len(mine)}]; got {share!r:.60}"
                )
            if bool(mine.any()) and not bool(chosen.any()):
                raise BadInput(f"all units of {name} would be masked: keep at least one")
            keep[name] = chosen
        return keep

    def _masks_of(self, keep: Mapping[str, Tensor]) -> dict[str, Tensor]:
        masks: dict[str, Tensor] = {}
        for candidates in self.candidates:
            for name, mask in candidates.expand(keep[candidates.name]).items():
                masks[name] = masks[name] & mask if name in masks else mask
        return masks

    # --- biases -----------------------------------------------------------------------------------

    def _bias_changes(self, views: Sequence[ScoreView], gone: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By reading weight, what its layer's bias changes by, [outputs]."""
        compensate = getattr(self.score, "compensate", None)
        if compensate is None:
            return {}
        recorder, self._recorder.is_active = InputRecorder(self._read_layers()), False
        run_in_eval_mode(self.model, *self.inputs)
        recorder.remove()
        self._recorder.is_active = True
        changes: dict[str, Tensor] = {}
        for view in views:
            mine = compensate(view, gone[view.candidates.name], recorder.statistics)
            for name, change in mine.items():
                changes[name] = changes[name] + change if name in changes else change
        return {name: _average_over_ranks(change, self.model) for name, change in changes.items()}

    def _add_to_biases(self, changes: Mapping[str, Tensor]) -> None:
        """Add to the biases of layers, by the names of their weights; those without get one."""
        places = find_places(self.model)
        for name, change in changes.items():
            module, weight = places[name][0].module, places[name][0].value
            change = change.to(weight)
            if getattr(module, "bias", None) is None:
                module.bias = nn.Parameter(change)
            else:
                biases = find_places(module)["bias"]
                with torch.no_grad():
                    biases[0].parameter.add_(change)

    # --- masks and state --------------------------------------------------------------------------

    @public
    def masks(self) -> dict[str, Tensor]:
        """By name of a masked parameter, a copy of its mask, bool of its shape, True where it
        stays."""
        return read_masks(self.model)

    @public
    def remove(self) -> None:
        """Multiply parameters with their masks and remove masks and hooks, in place: the model has
        plain parameters again, the same objects. Masks on parametrized tensors stay."""
        self._recorder.remove()
        remove_masks(self.model)

    @public
    def state_dict(self) -> dict[str, Any]:
        """The masks, the number of steps and the statistics gathered, as tensors and plain values,
        which `torch.load(weights_only=True)` reads."""
        return {
            "structure": self.structure,
            "steps": self.steps,
            "masks": self.masks(),
            "statistics": self._recorder.state_dict(),
        }

    @public
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set masks, number of steps and statistics to what `state_dict` returned, in place.

        Args:
            state: of a pruner of the same structure and a model with the same parameters.

        Raises:
            BadInput: another structure, masks of parameters that the model lacks or of other
                shapes, or statistics of other layers. Nothing is changed then.
        """
        missing = {"structure", "steps", "masks", "statistics"} - set(state)
        if missing or state["structure"] != self.structure:
            what = f"without {', '.join(sorted(missing))}" if missing else state["structure"]
            raise BadInput(f"expected the state of a Pruner of {self.structure}, got one {what}")
        steps, masks = state["steps"], state["masks"]
        if not isinstance(steps, int) or steps < 0:
            raise BadInput(f"expected the state of a Pruner, got one after {steps!r:.40} steps")
        check_masks(self.model, masks)
        statistics = self._recorder.read_state(state["statistics"])
        replace_masks(self.model, masks, self._uncalled)
        self.steps, self._recorder.statistics = steps, statistics


def _check_function(value: Any, what: str, such: str) -> None:
    if value is not None and (not callable(value) or isinstance(value, type)):
        got = f"the class {value.__name__}" if isinstance(value, type) else f"{value!r:.40}"
        raise BadInput(f"expected {what} to be one such as {such}, or a function; got {got}")


def _call_function(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """What a function of the user's returns. Raises BadInput where it fails."""
    try:
        return function(*args)
    except (DemaskError, MemoryError):
        raise
    except Exception as error:
        raise BadInput(f"the {what} failed: {described(error)}. Nothing was masked") from error


def _unwrap(model: nn.Module) -> nn.Module:
    """The model without `DistributedDataParallel` and `torch.compile`, which share its modules."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return _unwrap(model.module)
    compiled = getattr(model, "_orig_mod", None)
    return _unwrap(compiled) if isinstance(compiled, nn.Module) else model


def _uncalled_in(model: nn.Module, args: tuple, kwargs: Mapping | None) -> frozenset[str]:
    """As `find_uncalled`. Raises BadInput for a network whose layers do not run as modules."""
    try:
        return find_uncalled(model, args, kwargs)
    except BadInput as error:
        if not getattr(getattr(model, "demasked", None), "decisions", ()):
            raise
        raise BadInput(
            "layers of an optimized network do not run as modules, so it cannot be "
            "masked: prune the network that demask.optimize was called with"
        ) from error


def _average_over_ranks(values: Tensor, model: nn.Module) -> Tensor:
    """The mean of values over all ranks, so that masks are equal on all; without ranks, as is."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return values
    # on the device of the model: NCCL sums nothing on the CPU
    total = values.to(next(model.parameters()).device, copy=True)
    distributed.all_reduce(total)
    return total / distributed.get_world_size()
