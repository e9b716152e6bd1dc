"""The same masks for all layers whose results meet, so that demask removes slices of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from demask.failures import public, warn_caller
from demask.graph.isolation import in_isolation
from demask.prune.coupling import Group, Member, as_arguments, groups
from demask.prune.masks import find_places, find_uncalled, write_masks


@dataclass(frozen=True, slots=True)
class Alignment:
    """Slices of a group that are masked alike now.

    Attributes:
        name: of the group, as "layer2.0.conv2".
        size: the number of its slices.
        slices: those that are masked in all weights that compute them, ascending.
        dropped: by parameter, the share of its norm (L2, 0 to 1) that was masked for this; those of
            which nothing was dropped are absent.

    Example:
        >>> from demask.prune import Alignment
        >>> print(Alignment("a", 8, (0, 1), {"b.weight": 0.5}))
        a: 2 of 8 slices masked alike; masked of b.weight: 50.0 % of its norm
    """

    name: str
    size: int
    slices: tuple[int, ...]
    dropped: Mapping[str, float]

    def __str__(self) -> str:
        shares = ", ".join(f"{name}: {100 * share:.1f} %" for name, share in self.dropped.items())
        more = f"; masked of {shares} of its norm" if shares else ""
        return f"{self.name}: {len(self.slices)} of {self.size} slices masked alike{more}"


@in_isolation
@public
def align(
    model: nn.Module, example_inputs: Any, *, structure: str = "channel", skip: Sequence[str] = ()
) -> tuple[Alignment, ...]:
    """Mask the same slices of all layers whose results meet, in place. This is a step of pruning,
    not exact: it returns what was dropped.

    A residual add joins the channels of two layers. Where each of them was masked on its own,
    `demask.demask` keeps, in the model's own class, what one of them has. Of every such group
    (`demask.prune.groups`), as many slices are masked as the weight with the fewest masked ones
    has: those whose weights have the least norm (L2, over all weights that compute them). Other
    zeros stay, and `demask.demask` still warns of them. Call it once: a second call is a further
    step of pruning, which counts the zeros of the first.

    Args:
        model: an `nn.Module`, in any mode, whose weights have zeros or masks. Masks are added to
            its parameters, as by `Pruner`.
        example_inputs: a tuple of the model's inputs, one tensor, or a mapping of keyword inputs.
        structure: what is masked as one: "channel" (default), "unit" or "head".
        skip: names or globs of modules and parameters that are to remain as they are.

    Returns:
        A tuple of `Alignment`, one for each group in which something was masked. Where no group has a slice that
        can be, a warning says which of its weights has no zero slice.

    Raises:
        BadInput: an unknown structure, a name in `skip` that does not exist, or inputs that the
            model does not accept.
        NotExportable: the model cannot be captured in full.

    Example:
        >>> import torch, demask
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.a, self.b, self.c = (torch.nn.Linear(4, 4) for _ in range(3))
        ...     def forward(self, x):
        ...         return self.c(self.a(x) + self.b(x))
        >>> net, x = Net(), torch.zeros(1, 4)
        >>> net.a.weight.data[:2], net.b.weight.data[1:3] = 0, 0
        >>> [len(aligned.slices) for aligned in demask.prune.align(net, x)]
        [2]
        >>> demask.demask(net, (x,)).a.out_features
        2
    """
    args, kwargs = as_arguments(example_inputs)
    values = {name: places[0].value for name, places in find_places(model).items()}
    masks: dict[str, Tensor] = {}
    done, reasons, are_alike = [], [], False
    for group in groups(model, example_inputs, structure=structure, skip=skip):
        counts, slices = _common_slices(group, values)
        fewest = min(counts, key=counts.__getitem__, default="")
        if len(counts) > 1 and not counts[fewest] and any((values[name] == 0).any() for name in counts):
            reasons.append(f"of the {group.size} slices of {group.name}, {fewest} has none that is zero")
        dropped = {}
        for member in group.producers if slices is not None else ():
            mask = _mask_of(member, ~slices, values[member.parameter])  # type: ignore[operator]
            value = values[member.parameter].double()
            lost = float((value * ~mask).norm() / value.norm().clamp(min=1e-300))
            if lost > 0:
                dropped[member.parameter] = lost
            masks[member.parameter] = masks.get(member.parameter, torch.ones_like(mask)) & mask
        are_alike |= slices is not None
        if slices is not None and dropped:
            chosen = tuple(slices.nonzero().squeeze(1).tolist())
            done.append(Alignment(group.name, group.size, chosen, dropped))
    write_masks(model, masks, find_uncalled(model, args, kwargs))
    if not are_alike:
        why = "; ".join(reasons[:3]) or "no two weights with zeros compute the same slices"
        warn_caller(f"prune.align masks nothing: {why} (`demask.prune.groups` lists what is removed together)")
    return tuple(done)


def _common_slices(group: Group, values: Mapping[str, Tensor]) -> tuple[dict[str, int], Tensor | None]:
    """By weight that computes a group, its zero slices; and the slices to mask, bool [size]: as many as the weight
    with the fewest has. None where fewer than two weights compute it, or one has none that is zero."""
    squares = torch.zeros(group.size, dtype=torch.float64)
    counts: dict[str, int] = {}
    for member in group.producers:
        if not member.is_weight:
            continue
        value = values[member.parameter].double().cpu()
        others = [axis for axis in range(value.ndim) if axis != member.axis]
        rows = value.square().sum(others) if others else value.square()
        own = torch.zeros(group.size, dtype=torch.float64)
        belongs = member.slices >= 0
        own.index_add_(0, member.slices[belongs].cpu(), rows[belongs.cpu()])
        counts[member.parameter] = int((own == 0).sum())
        squares += own
    least = min(counts.values(), default=0)
    if len(counts) < 2 or not least:
        return counts, None
    chosen = torch.zeros(group.size, dtype=torch.bool)
    chosen[squares.argsort(stable=True)[:least]] = True
    return counts, chosen


def _mask_of(member: Member, stays: Tensor, value: Tensor) -> Tensor:
    """The mask of a parameter in which slices stay, bool of its shape."""
    line = member.mask(stays.to(member.slices.device)).to(value.device)
    shape = [-1 if axis == member.axis else 1 for axis in range(value.ndim)]
    return line.view(shape).expand(value.shape)
