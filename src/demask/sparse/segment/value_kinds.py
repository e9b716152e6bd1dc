"""Kinds of values of segments, where the calls themselves do not say them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from demask.ops.activations import activations_by_op
from demask.ops.traits import IDENTITIES, OVER_LAST_AXIS

aten = torch.ops.aten


def stored(constants: Sequence[Tensor | None]) -> Tensor | None:
    """The constants of a call one after another; None if there is none, or one is not known."""
    known = [constant.flatten() for constant in constants if constant is not None]
    return torch.cat(known) if known and len(known) == len(constants) else None


def kind_by_rank(node: fx.Node, kinds: Sequence[str]) -> str:
    """The kind of a value of which no other call says it."""
    return "image" if node.meta["val"].ndim == 4 and "image" in kinds else "tokens"


def is_channels_last(node: Any) -> bool:
    """Whether a value is computed, pixel by pixel, from an image that was permuted to have its
    channels last."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        if getattr(node.meta.get("val"), "ndim", 0) != 4:
            return False
        arguments: Any = node.args
        if node.target is aten.permute.default:
            return [n % 4 for n in arguments[1]] == [0, 2, 3, 1]
        is_pixelwise = node.target in OVER_LAST_AXIS or node.target in IDENTITIES
        if not is_pixelwise and node.target not in activations_by_op():
            return False
        node = arguments[0]
    return False
