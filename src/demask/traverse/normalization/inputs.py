"""Normalization of a network's input, as calls before its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx

from demask.errors import BadInput
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.ops.schema import fake

aten = torch.ops.aten
EPSILON = 1e-12  # added to the variance of an image: it is 0 where all positions are equal


def with_normalized_input(program: Program, normalize: Any) -> Program:
    """The program of one input whose input has mean 0 and deviation 1.

    normalize: None: the program itself; "image": per channel over the whole image; or (means,
    deviations), each a number or one per channel: the network receives (x - mean) / deviation.

    Raises:
        BadInput: for other values of `normalize`, or if the network takes whole numbers.
    """
    if normalize is None:
        return program
    editor = GraphEditor(program)
    placeholder = next(iter(editor.graph.find_nodes(op="placeholder")))
    value = fake(placeholder)
    if not value.is_floating_point():
        raise BadInput("normalize: this network takes whole numbers, and normalizes them itself")
    readers = list(placeholder.users)
    if not readers:
        return program
    with editor.graph.inserting_after(placeholder):
        first = editor.graph.call_function(aten.clone.default, (placeholder,))
    normalized = _normalize(editor, placeholder, first, normalize)
    for reader in readers:
        reader.replace_input_with(placeholder, normalized)
    return editor.finish()


def _normalize(editor: GraphEditor, x: fx.Node, reader: fx.Node, normalize: Any) -> fx.Node:
    """The normalized value of an input, before `reader`."""
    value = fake(x)
    if isinstance(normalize, str):
        if normalize != "image":
            raise BadInput(f'expected normalize="image" or (means, deviations), got {normalize!r}')
        norm = aten.instance_norm.default
        return editor.insert(reader, None, norm, x, None, None, None, None, True, 0.1, EPSILON, False)
    shape = (1, value.shape[1], *(1 for _ in range(value.ndim - 2)))
    mean, deviation = (
        torch.tensor(row, dtype=value.dtype).reshape(shape) for row in _per_channel(normalize, value.shape[1])
    )
    names = editor.add_constant("mean", mean, reader), editor.add_constant("std", deviation, reader)
    centered = editor.insert(reader, None, aten.sub.Tensor, x, names[0])
    return editor.insert(reader, None, aten.div.Tensor, centered, names[1])


def _per_channel(normalize: Any, channels: int) -> tuple[list[float], list[float]]:
    try:
        mean, std = (np.broadcast_to(np.asarray(row, np.float64), (channels,)) for row in normalize)
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"normalize: expected one mean and one deviation for each of {channels} channels, got {normalize!r:.80}"
        ) from error
    if not np.isfinite(mean).all() or not np.isfinite(std).all() or not (std > 0).all():
        raise BadInput("normalize: expected finite means and deviations above 0")
    return mean.tolist(), std.tolist()
