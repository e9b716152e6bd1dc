"""Absorption of gathers and slices of channels into the layers after them.

    conv(x[:, p], W) == conv(x, W')      with columns of zeros in W' for channels not in p

Depthwise layers and activations in between compute all channels, with kernels of zeros. A gather
copies its value and ends the blocked layout that a runtime uses between layers, while a few more
channels often cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.queries import channels_of, input_dependent, is_pointwise
from demask.graph.value import Value
from demask.ops import Table
from demask.ops.traits import OUTPUT_AXIS
from demask.rewrites.rule import Pass, case
from demask.tune.fold_affine import contraction_weight
from demask.tune.pad_channels import (
    change_weight,
    contracts_axis,
    is_depthwise,
    is_pooling,
    is_rounding,
    set_arguments,
    set_width,
)

aten = torch.ops.aten
COPY = 96  # multiply-adds that take as long as copying one value and restoring its layout


@dataclass(slots=True)
class _GatherRegion:
    """The calls after a gather. axis: of the channels; count, positions: channels before it, and
    those that it selects. through: calls between it and the layers (`readers`) that can absorb it."""

    axis: int
    count: int
    positions: Tensor
    through: dict[Value, None] = field(default_factory=dict)
    readers: dict[Value, None] = field(default_factory=dict)


def absorb_gathers(program: Program, table: Table) -> Program:
    """The program without gathers that cost more than they save."""
    editor, is_changed = GraphEditor(program), False
    for node in editor.calls(aten.index_select.default, aten.slice.Tensor):
        live, gather = input_dependent(editor.graph), Value(node, editor)
        region = _region(gather, table) if node in live else None
        if region is not None and _is_worth(region):
            _apply(gather, region)
            is_changed = True
    return editor.finish() if is_changed else program


def _region(gather: Value, table: Table) -> _GatherRegion | None:
    """The calls after a gather, if it can be absorbed into all layers that read it."""
    axis = gather.arg("dim") % gather.rank
    count, selected = channels_of(gather.arg("self").node, axis), channels_of(gather.node, axis)
    if count is None or selected is None or (axis != 1 and axis != gather.rank - 1):
        return None
    positions = _positions(gather, count)
    if positions is None or len(positions) != selected or len(set(positions.tolist())) != selected:
        return None
    region, stack = _GatherRegion(axis, count, positions), [gather]
    while stack:
        value = stack.pop()
        for user in value.users:
            if contracts_axis(user, value, axis):
                region.readers[user] = None
            elif _computes_channels_separately(user, axis, table):
                region.through[user] = None
                stack.append(user)
            else:
                return None
    return region


def _positions(gather: Value, count: int) -> Tensor | None:
    """The channels, of `count`, that a gather or slice selects; None if they are not constant."""
    if gather.calls(aten.index_select.default):
        return gather.arg("index").constant
    ends = [gather.arg(name) for name in ("start", "end", "step")]
    if not all(n is None or isinstance(n, int) for n in ends):
        return None
    return torch.arange(count)[slice(*ends)]


def _computes_channels_separately(user: Value, axis: int, table: Table) -> bool:
    """Whether a call computes each channel separately, so that it can compute all of them."""
    if contraction_weight(user) is not None:
        return axis == 1 and is_depthwise(user)
    if is_rounding(user):
        return True
    return len(user.operands) == 1 and (is_pointwise(user.node, table) or (axis == 1 and is_pooling(user)))


def _is_worth(region: _GatherRegion) -> bool:
    """Whether the gather's copy takes longer than the multiply-adds that it saves."""
    more, selected = region.count - len(region.positions), len(region.positions)
    products = 0
    for reader in region.readers:
        weight = reader.arg("weight")
        products += more * weight.fake.numel() // weight.shape[1 - OUTPUT_AXIS[reader.target]]
    return bool(region.readers) and products <= COPY * selected


def _apply(gather: Value, region: _GatherRegion) -> None:
    """Remove a gather and widen the calls after it."""

    def spread(tensor: Tensor, axis: int) -> Tensor:
        """Rows or columns at their channels before the gather; others are zeros."""
        shape = list(tensor.shape)
        shape[axis] = region.count
        return tensor.new_zeros(shape).index_copy(axis, region.positions, tensor)

    for layer in region.through:
        if contraction_weight(layer) is not None:
            change_weight(layer, spread, rows=True)
            set_arguments(layer, groups=region.count)
    for layer in region.readers:
        change_weight(layer, spread, rows=False)
    for value in region.through:
        set_width(value, region.axis, region.count)
    gather.editor.replace(gather.node, gather.arg("self").node)


class _Selected(nn.Module):
    """Some channels of an image or of tokens, and layers that read them."""

    def __init__(self, *layers: nn.Module, axis: int = 1, slices: bool = False):
        super().__init__()
        self.layers, self.axis, self.slices = nn.Sequential(*layers), axis, slices

    def forward(self, x: Tensor) -> Tensor:
        if self.slices:
            return self.layers(torch.ops.aten.slice(x, self.axis, 1, 6, 2))
        return self.layers(x.index_select(self.axis, torch.tensor([4, 0, 2])))


ABSORB_GATHERS = Pass(
    "the absorption of gathers",
    absorb_gathers,
    "conv(x[:, p], W) == conv(x, W')",
    cases=(
        case(_Selected(nn.Conv2d(3, 4, 3)), (2, 6, 4, 5)),
        case(_Selected(nn.Conv2d(3, 3, 3, groups=3), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 1)), (2, 6, 4, 6)),
        case(_Selected(nn.ReLU(), nn.ConvTranspose2d(3, 4, 1), slices=True), (2, 6, 4, 5)),
        case(_Selected(nn.ReLU(), nn.Linear(3, 4), axis=-1), (2, 3, 6), dynamic={0: (0, 1)}),
    ),
    exact=False,
)
