"""The link from a demasked network to the parameters of the original, which it does not keep alive.

It is an attribute of the network, not a field of its Provenance: that is a record for files, and
objects of a process do not belong there. Weak references, not names alone: an optimizer stores
parameters, not names. Copies of the network share the link. Pickles and files have none.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from demask.graph.provenance import Positions

_ORIGIN = "_demasked_origin"  # attribute of a module


@dataclass(frozen=True, slots=True)
class Piece:
    """How a tensor of a demasked network follows from one of the original.

    source: its name in the original, without masks and parametrizations ("conv.weight"). shape:
    its original shape. positions: per axis, those that remain, in their new order; None for a whole
    axis. parameters: names of the parameters that the original computes it from
    ("conv.weight_orig"). has_state: whether it is a slice of the only one of these, up to masked
    elements and an added constant: then optimizer states are cut as it was. is_slice: whether it is
    a slice of the source's value, up to a constant. offset: that constant, of the result's shape.
    carries: whether it is of a layer whose weights have the products of removed ones added, which
    are 0 in a layer that computes the same. masked: which of its elements are zeros of a mask that the
    original multiplies the source with; None if there are none.
    """

    source: str
    shape: tuple[int, ...]
    positions: tuple[Positions, ...]
    parameters: tuple[str, ...] = ()
    has_state: bool = False
    is_slice: bool = False
    offset: Tensor | None = None
    carries: bool = False
    masked: Tensor | None = None


@dataclass(frozen=True, slots=True)
class OriginalParameter:
    """A parameter of the original network."""

    reference: weakref.ref[Tensor]
    shape: tuple[int, ...]
    requires_grad: bool


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Where the tensors of a demasked network come from.

    parameters: of the original, by name, in its order; tied ones once. pieces: by name of a tensor
    in the demasked network, without masks and parametrizations. added: the floating-point tensors
    that the original has not, as they were computed. masks: those passed to `demask()`. model: the
    original.
    """

    parameters: Mapping[str, OriginalParameter]
    pieces: Mapping[str, Piece]
    added: Mapping[str, Tensor] = field(default_factory=dict)
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    model: weakref.ref[nn.Module] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # another process has no original


def set_origin(network: nn.Module, origin: Origin | None) -> None:
    """Attach the origin of a demasked network, in place."""
    vars(network)[_ORIGIN] = origin


def get_origin(network: nn.Module) -> Origin | None:
    """The origin of a demasked network; None for others, and for one that was read from a file."""
    return vars(network).get(_ORIGIN)
