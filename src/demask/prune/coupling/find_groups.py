"""`groups()`: the slices of a network that can only be removed together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from demask.errors import BadInput
from demask.failures import public
from demask.graph.isolation import in_isolation
from demask.prune.coupling.coupling import Coupling
from demask.prune.coupling.groups import Groups

Arguments = tuple[tuple[Any, ...], Mapping[str, Any] | None]
# The kinds of groups that a structure consists of.
KINDS_OF = {"channel": ("channel", "unit"), "unit": ("unit",), "head": ("head",), "expert": ("expert",)}


@in_isolation
@public
def groups(model: nn.Module, example_inputs: Any, *, structure: str = "channel", skip: Sequence[str] = ()) -> Groups:
    """The slices of a network that can only be removed together, by the op table.

    A slice is a position of an axis (a channel) or several (the rows of a head): where it is zero
    in all weights that compute it, `demask.demask` removes it there and in all weights that read
    it. What reaches the inputs or outputs of the network, or a call that needs the whole axis (a
    layer norm, a softmax), cannot be removed and is in no group.

    Args:
        model: an `nn.Module`, in any mode. It may be masked or parametrized.
        example_inputs: a tuple of the model's inputs, one tensor, or a mapping of keyword inputs.
        structure: "channel" (default): outputs of convolutions and linear layers, features of
            attention heads among them; "unit": of linear layers outside of attention (feed-forward)
            alone; "head": heads of attention, with the keys and values that several queries share.
        skip: names or globs of modules and parameters that are to remain whole.

    Returns:
        A tuple of `Group`, in the order of calls; no position is in two of them. `print` shows it
        as a table.

    Raises:
        BadInput: an unknown structure, a name in `skip` that does not exist, or inputs that the
            model does not accept.
        NotExportable: the model cannot be captured as a whole.

    Example:
        >>> import torch
        >>> from demask import prune
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> [str(group) for group in prune.groups(net, torch.zeros(1, 4))]
        ['0: 8 units of 0.weight[0], 0.bias[0]; read by 2.weight[1]']
    """
    args, kwargs = as_arguments(example_inputs)
    kinds = kinds_of(structure)
    return select_groups(Coupling.of(model, args, kwargs, skip=skip), kinds)


def as_arguments(example_inputs: Any) -> Arguments:
    """Example inputs as arguments by position and by name. Raises BadInput for other types."""
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), None
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple):
        return example_inputs, None
    raise BadInput(
        "expected example_inputs to be a tuple of the model's inputs, a tensor or a mapping of "
        f"keyword inputs, got {type(example_inputs).__name__}"
    )


def kinds_of(structure: str) -> tuple[str, ...]:
    """The kinds of groups of a structure. Raises BadInput for others."""
    if structure not in KINDS_OF:
        raise BadInput(f"expected a structure of {', '.join(KINDS_OF)}; got {structure!r}")
    return KINDS_OF[structure]


def select_groups(coupling: Coupling, kinds: Iterable[str]) -> Groups:
    """The groups of some kinds. Of groups with common positions, as the axis (group, channel) of a
    grouped convolution has, that with most slices."""
    every = (*coupling.groups, *coupling.experts)
    candidates = [group for group in every if group.kind in kinds]
    chosen: set[str] = set()
    taken: dict[tuple[str, int], Tensor] = {}
    for group in sorted(candidates, key=lambda group: -group.size):
        places = {(m.parameter, m.axis): m.slices >= 0 for m in group.members}
        if any(bool((taken[p] & mask).any()) for p, mask in places.items() if p in taken):
            continue
        chosen.add(group.name)
        for place, mask in places.items():
            taken[place] = taken[place] | mask if place in taken else mask
    return Groups(group for group in candidates if group.name in chosen)
