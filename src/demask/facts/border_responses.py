"""Responses at borders: channels that no input decides, though they are not constant.

A constant that passes a window which reads zeros outside of its image (a depthwise convolution, an
average pool that counts its padding) has one value inside of the image and others along its border,
at every size of the image. These values, one for each kind of place, are the channel's response.
Pointwise calls change responses place by place. What is linear in a channel, such as its average
over the image or a sum over channels, is the same linear function of all responses: a channel whose
response is a linear combination of those of others can be left to them (`facts.carriers`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from demask.facts.fills import call
from demask.facts.known import Facts, Key, Relations, key_of, operand_facts
from demask.failures import attributed
from demask.ops import Relation, schema


@dataclass(frozen=True, slots=True)
class Responses:
    """The responses of the channels of a value, its axis 1.

    window: the call at whose border they differ. valid: bool [channels], which of them no input
    decides. values: float64 [channels, places]. is_linear: whether the value is a linear function
    of the responses, that of a constant is the constant; else it has them itself.
    """

    window: fx.Node
    valid: Tensor
    values: Tensor
    is_linear: bool = False


def find_responses(graph: fx.Graph, relations: Relations, facts: Facts) -> dict[Key, Responses]:
    """The responses of all values that have some which are no constants. Raises CallFailed."""
    earlier: dict[Key, Responses] = {}
    for node in graph.nodes:
        relation = relations.get(node)
        if not isinstance(relation, Relation) or len(relation.outs) != 1:
            continue
        with attributed(node):
            responses = _respond(relation, facts, earlier)
            if responses is not None and bool(_varies(responses).any()):
                earlier[node, 0] = responses
    return earlier


def _varies(responses: Responses) -> Tensor:
    """Which channels differ at the border: bool [channels]."""
    values = responses.values
    return responses.valid & (values != values[:, :1]).any(1)


def _respond(relation: Relation, facts: Facts, earlier: dict[Key, Responses]) -> Responses | None:
    """The responses of a call's output, or None."""
    entry, node = relation.entry, relation.node
    value = node.meta["val"]
    if (
        not isinstance(value, Tensor)
        or value.ndim < 2
        or not value.is_floating_point()
        or not isinstance(value.shape[1], int)
    ):
        return None
    sources = [o.value for o in relation.operands if isinstance(o.value, fx.Node)]
    several = [earlier[key_of(source)] for source in sources if key_of(source) in earlier]
    if entry.reads_padding(node) and entry.region == "conv" and value.ndim > 2:
        return _of_window(relation, facts)
    if not several:
        return None
    first = several[0]
    is_average = entry.rest == "mean" or (entry.fill == "same" and entry.range == "sign")
    if is_average and not entry.reads_padding(node) and len(sources) == 1:
        channels = relation.ins[0][1:2]
        keeps = not relation.moved and channels == relation.outs[0][1:2] and channels[0]
        inside = not set(channels[0]) & (relation.window | relation.complete) if channels else False
        return replace(first, is_linear=True) if keeps and inside else None
    mixing = relation.contracted | relation.complete | relation.window | relation.moved
    if mixing or relation.back or entry.fill != "run" or entry.free or first.is_linear:
        return None
    if any(other.window is not first.window or other.is_linear for other in several):
        return None
    return _of_pointwise(relation, facts, earlier, first)


def _of_pointwise(
    relation: Relation, facts: Facts, earlier: dict[Key, Responses], first: Responses
) -> Responses | None:
    """The responses after a pointwise call, whose other operands are constants of each channel."""
    (letters, count), rank = (relation.outs[0][1], len(first.valid)), len(relation.outs[0])
    valid, values = torch.ones(count, dtype=torch.bool), []
    for k, (operand, fact) in enumerate(zip(relation.operands, operand_facts(relation, facts), strict=True)):
        axes = relation.ins[k]
        if not isinstance(operand.value, fx.Node):
            values.append(operand.value)
        elif (responses := earlier.get(key_of(operand.value))) is not None:
            if len(axes) != rank or axes[1] != letters or responses.values.shape != first.values.shape:
                return None
            valid &= responses.valid
            values.append(responses.values.reshape(1, *first.values.shape, *[1] * (rank - 3)))
        else:
            if any(n != 1 and axis != letters for axis, n in zip(axes, fact.known.shape, strict=True)):
                return None
            valid &= fact.known.reshape(-1)
            wide = [count if axis == letters else 1 for axis in axes]
            values.append(fact.fill.double().expand(wide).contiguous())
    arguments = schema.arguments(relation.node)
    names = {operand.name for operand in relation.operands}
    if rank < 3 or any(schema.is_dynamic(v) for name, v in arguments.items() if name not in names):
        return None
    result = call(relation.node, schema.replace_operands(arguments, relation.operands, values))
    result = torch.as_tensor(result).double()
    if result.numel() != first.values.numel():
        return None
    result = result.reshape(first.values.shape)
    finite = torch.isfinite(result).all(1)
    return replace(first, valid=valid & finite, values=torch.where(finite[:, None], result, 0))


def _of_window(relation: Relation, facts: Facts) -> Responses | None:
    """The responses after a window over constants."""
    arguments, node = schema.arguments(relation.node), relation.node
    inputs = operand_facts(relation, facts)
    x = relation.operands[0].value.meta["val"]
    if x.ndim != node.meta["val"].ndim or arguments.get("ceil_mode"):
        return None
    known, fill = inputs[0].known, inputs[0].fill
    if any(n != 1 for k, n in enumerate(fill.shape) if k != 1) or not bool((fill != 0).any()):
        return None
    channels = x.shape[1]
    known, fill = known.reshape(-1).expand(channels), fill.reshape(-1).double().expand(channels)
    space = x.ndim - 2
    if "weight" in arguments:
        weight = inputs[relation.factors[1]]
        sizes = relation.operands[1].value.meta["val"].shape
        if sizes[1] != 1 or not bool(weight.known.all()):
            return None
        kernel = weight.fill.double().expand(sizes)
        groups = arguments["groups"]
        parts = kernel.reshape(groups, -1, *kernel.shape[1:])  # [group, output, input, taps ...]
        into = fill.view(groups, 1, -1, *[1] * space)
        taps = (parts * into).sum(2).flatten(0, 1)
        unknown = ~known.view(groups, 1, -1) & (parts != 0).flatten(3).any(3)
        valid, bias = ~unknown.any(2).flatten(), 0.0
        if relation.operands[-1].name == "bias":
            added = inputs[-1]
            valid = valid & added.known.reshape(-1)
            bias = added.fill.double().reshape(-1, 1)
    else:
        sizes = _each(arguments["kernel_size"], space)
        divisor = arguments.get("divisor_override") or torch.Size(sizes).numel()
        taps = (fill / divisor).view(-1, *[1] * space).expand(-1, *sizes)
        valid, bias = known, 0.0
    strides = _each(arguments["stride"] or arguments["kernel_size"], space)
    dilations = _each(arguments.get("dilation", 1), space)
    for k in range(space):
        size, padding = x.shape[2 + k], arguments["padding"]
        padding = padding if isinstance(padding, str) else _each(padding, space)[k]
        read = _read_taps(taps.shape[1], strides[k], padding, dilations[k], size)
        taps = torch.einsum("ct...,pt->c...p", taps, read.double())
    values = taps.reshape(len(taps), -1) + bias
    values = values if len(values) == len(valid) else values.expand(len(valid), -1)
    return Responses(node, valid, torch.where(valid[:, None], values, 0))


def _each(value: Any, space: int) -> list[int]:
    """A size per axis of an image."""
    sizes = [value] if isinstance(value, int) else list(value)
    return sizes * space if len(sizes) == 1 else sizes


def _read_taps(kernel: int, stride: int, padding: int | str, dilation: int, size: Any) -> Tensor:
    """Which taps of a window are inside of the image, along one axis, at each kind of place: bool
    [places, kernel]. size: of the image; all sizes where it is dynamic."""
    extent = dilation * (kernel - 1) + 1
    left = (extent - 1) // 2 if padding == "same" else 0 if padding == "valid" else int(padding)
    both = extent - 1 if padding == "same" else 2 * left
    sizes = [size] if isinstance(size, int) else range(1, 2 * extent + both + stride + 1)
    places: dict[tuple[bool, ...], None] = {}
    for n in sizes:
        last = n + both - extent
        for start in range(-left, last - left + 1, stride):
            taps = [start + dilation * tap for tap in range(kernel)]
            places[tuple(0 <= tap < n for tap in taps)] = None
    return torch.tensor(list(places))
