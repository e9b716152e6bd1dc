"""Groups: slices of a network that can only be removed everywhere at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from demask.text_table import number_table, render_text


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """Where the slices of a group are in one parameter.

    Attributes:
        parameter: its name in `model.named_parameters(remove_duplicate=False)`, without the
            suffixes of masks and parametrizations: "layer1.0.conv1.weight". A tied parameter has
            one member, with its first name.
        axis: the axis of the parameter.
        slices: int64 [length of the axis]: the slice that each position belongs to, -1 for none.
        produces: True: where these positions are zero in all producing members, the slice is
            (rows, biases, scales and shifts of norms, columns of embeddings). False: they are
            multiplied with the slice (columns of the next weight).
        is_weight: whether it is the weight of a product or an embedding, not a bias or norm.

    Example:
        >>> import torch
        >>> from demask import prune
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 3))
        >>> (group,) = prune.groups(net, (torch.zeros(1, 3, 8, 8),))
        >>> [(m.parameter, m.axis, m.produces) for m in group.members]
        [('0.weight', 0, True), ('0.bias', 0, True), ('1.weight', 1, False)]
        >>> group.members[0].positions(2)
        tensor([2])
    """

    parameter: str
    axis: int
    slices: Tensor = field(repr=False)
    produces: bool
    is_weight: bool = True

    def positions(self, k: int) -> Tensor:
        """The positions along `axis` that belong to slice k, int64, in order."""
        return (self.slices == k).nonzero().squeeze(1)

    def mask(self, keep: Tensor) -> Tensor:
        """The positions along `axis` that stay, bool [length of the axis], of slices that do.

        Args:
            keep: bool [number of slices].
        """
        return (self.slices < 0) | keep.to(self.slices.device)[self.slices.clamp(min=0)]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Slices that can be removed one by one, each of them everywhere at once.

    Attributes:
        name: the first module that computes them, as "layer1.0.conv1"; unique among groups.
        size: the number of slices.
        members: where they are in the model's parameters, a tuple of `Member`.
        kind: "channel"; "unit": of linear layers alone; "head": of attention, with the keys and
            values that several heads share; "expert".

    Example:
        >>> import torch
        >>> from demask import prune
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> (group,) = prune.groups(net, (torch.zeros(1, 4),))
        >>> print(group)
        0: 8 units of 0.weight[0], 0.bias[0]; read by 2.weight[1]
    """

    name: str
    size: int
    members: tuple[Member, ...]
    kind: str

    @property
    def producers(self) -> tuple[Member, ...]:
        """The members that must be zero for a slice to be."""
        return tuple(member for member in self.members if member.produces)

    @property
    def readers(self) -> tuple[Member, ...]:
        """The members that are multiplied with the slices."""
        return tuple(member for member in self.members if not member.produces)

    def gone(self, masks: Mapping[str, Tensor]) -> Tensor:
        """The slices that masks make zero, bool [size].

        Args:
            masks: by parameter, bool of its shape, True where it stays; others stay whole.
        """
        live = torch.zeros(self.size, dtype=torch.bool)
        for member in self.producers:
            mask = masks.get(member.parameter)
            stays = member.slices >= 0
            if mask is not None:
                stays = stays & _any_along(mask, member.axis)
            live[member.slices[stays]] = True
        return ~live

    def __str__(self) -> str:
        computed, read = (
            ", ".join(f"{m.parameter}[{m.axis}]" for m in members) for members in (self.producers, self.readers)
        )
        return f"{self.name}: {self.size} {self.kind}s of {computed}" + (f"; read by {read}" if read else "")


def _any_along(mask: Tensor, axis: int) -> Tensor:
    """Any element at each position of an axis, bool [length of the axis], on the CPU."""
    return mask.movedim(axis, 0).reshape(mask.shape[axis], -1).any(1).cpu()


def _weights(members: tuple[Member, ...], most: int = 3) -> str:
    """The first weights of members, and how many more there are."""
    names = list(dict.fromkeys(m.parameter for m in members if m.is_weight))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class Groups(tuple[Group, ...]):
    """Groups of a network; it prints as a table."""

    def __str__(self) -> str:
        table = number_table("group", "slices", pad_edge=False)
        for head in ("kind", "computed by", "read by"):
            table.add_column(head, overflow="fold")
        for group in self:
            table.add_row(group.name, str(group.size), group.kind, *map(_weights, (group.producers, group.readers)))
        return render_text(table)
