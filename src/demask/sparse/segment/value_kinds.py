"""Kinds of values of segments, where the calls themselves do not say them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from demask.graph.editor import GraphEditor
from demask.ops.activations import activations_by_op
from demask.ops.traits import IDENTITIES, OVER_LAST_AXIS

aten = torch.ops.aten


def constants_of(editor: GraphEditor, nodes: Sequence[fx.Node]) -> tuple[str, Tensor | None]:
    """The name of the first of the constants of a call, and all one after another; "" and None if
    there is none, or one is not known."""
    tensors = [editor.tensor(node) for node in nodes]
    known = [tensor.flatten() for tensor in tensors if tensor is not None]
    if not known or len(known) < len(nodes):
        return "", None
    return editor.constants[str(nodes[0].target)].name, torch.cat(known)


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
