"""Carriers: channels whose values represent those of dropped channels, in sums that read them.

A constant channel that enters a zero-padded convolution is not constant after it, as windows at the
border read zeros. A border map adds what dropped channels contributed. A carrier needs no added
call: one constant channel p stays (of each group), and its kernel takes the products of all dropped
ones,

    W'[:, p] = W[:, p] + Σ_c (fill_c / fill_p) · W[:, c]

which is exact at the border, too: fill_p is read wherever each fill_c was. So it is for channels
that differ at borders before the sum (`border_responses`): those stay whose responses the others
are linear combinations of, and the bias of a sum without padding takes a constant rest.

Responses at borders: channels that no input decides, though they are not constant.

A constant that passes a window which reads zeros outside of its image (a depthwise convolution, an
average pool that counts its padding) has one value inside of the image and others along its border,
at every size of the image. These values, one for each kind of place, are the channel's response.
Pointwise calls change responses place by place. What is linear in a channel, such as its average
over the image or a sum over channels, is the same linear function of all responses: a channel whose
response is a linear combination of those of others can be left to them (`facts.carriers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from demask.facts.fills import call
from demask.facts.known import Facts, Key, Relations, key_of, operand_facts, uniform_letters
from demask.facts.masks import Fact, all_over, project, spread, uniform_over
from demask.failures import attributed
from demask.ops import Relation, schema
from demask.ops.schema import fake


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
    value = fake(node)
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
    x = fake(relation.operands[0].value)
    if x.ndim != fake(node).ndim or arguments.get("ceil_mode"):
        return None
    known, fill = inputs[0].known, inputs[0].fill
    if any(n != 1 for k, n in enumerate(fill.shape) if k != 1) or not bool((fill != 0).any()):
        return None
    channels = x.shape[1]
    known, fill = known.reshape(-1).expand(channels), fill.reshape(-1).double().expand(channels)
    space = x.ndim - 2
    if "weight" in arguments:
        weight = inputs[relation.factors[1]]
        sizes = fake(relation.operands[1].value).shape
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


EXACT = 1e-12  # of a response: what rounding leaves of one that is a combination of others
GROWTH = 4.0  # summands of a combination, in all, relative to their sum: so rounding stays small


@dataclass(frozen=True, slots=True)
class CarriedChannels:
    """Channels that a sum reads, of which some can carry others.

    axis: of the channels, in the first factor. values: float64 [groups, channels of each, places],
    what they are at each kind of place. valid: bool, of the first two axes: channels of which that
    is known. window: whose border they differ at, None for constants. has_constant: whether a bias
    can take constants. has_all_constants: whether all constants that are dropped are among them.
    """

    axis: int
    values: Tensor
    valid: Tensor
    window: fx.Node | None
    has_constant: bool
    has_all_constants: bool

    def lacking(self, live: Tensor) -> Tensor:
        """Channels that have to stay besides the live ones: bool [channels]."""
        stays, result = live.view(self.valid.shape), torch.zeros_like(self.valid)
        for g in (self.valid & ~stays).any(1).nonzero().squeeze(1).tolist():
            dropped, carriers = self._channels(g, ~stays[g]), self._channels(g, stays[g])
            _, basis = _pivots(self.values[g, carriers], self._constant_rows())
            more, _ = _pivots(self.values[g, dropped], basis)
            result[g, dropped[more]] = True
            while len(dropped := self._channels(g, ~stays[g] & ~result[g])):
                carriers = self._channels(g, stays[g] | result[g])
                growth = self._combine(g, dropped, carriers)[1]
                if float(growth.max()) <= GROWTH:
                    break
                result[g, dropped[growth.argmax()]] = True
        return result.reshape(-1)

    def combinations(self, live: Tensor) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor]]:
        """For each group with dropped channels: its number, these channels, their carriers, and the
        dropped ones as combinations of these: float64 [dropped, carriers], and of a constant 1:
        float64 [dropped]."""
        stays = live.view(self.valid.shape)
        for g in (self.valid & ~stays).any(1).nonzero().squeeze(1).tolist():
            dropped, carriers = self._channels(g, ~stays[g]), self._channels(g, stays[g])
            factors, _ = self._combine(g, dropped, carriers)
            constant = factors[:, len(carriers) :].sum(1)
            yield g, dropped, carriers, factors[:, : len(carriers)], constant

    def _combine(self, group: int, dropped: Tensor, carriers: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest factors of dropped channels as combinations of carriers and of a constant:
        float64 [dropped, carriers]; and how much larger the summands are than what they sum to, by
        which rounding grows: float64 [dropped]."""
        wanted = self.values[group, dropped]
        rows = torch.cat([self.values[group, carriers], self._constant_rows()])
        sizes = rows.norm(dim=1, keepdim=True)
        # of least norm; with its own driver torch may miss a rank where it is deficient
        solved = torch.linalg.lstsq((rows / sizes).T, wanted.T, driver="gelsd").solution
        return (solved / sizes).T, solved.abs().sum(0) / wanted.norm(dim=1)

    def _channels(self, group: int, mask: Tensor) -> Tensor:
        """The valid channels of a group in a mask."""
        return (self.valid[group] & mask).nonzero().squeeze(1)

    def _constant_rows(self) -> Tensor:
        """What a bias can take, as rows like those of channels."""
        return torch.ones(int(self.has_constant), self.values.shape[2], dtype=torch.float64)


def _pivots(rows: Tensor, basis: Tensor) -> tuple[list[int], Tensor]:
    """The rows, those with the largest rest first, of which all others are combinations, together
    with those of `basis`; and what they span with these: orthonormal rows."""
    rest, sizes, chosen = rows.clone(), rows.norm(dim=1), []
    basis = torch.linalg.qr(basis.T).Q.T
    for _ in range(2):  # rounding leaves some of large rows
        rest -= rest @ basis.T @ basis
    while len(rest) and bool((over := (norms := rest.norm(dim=1)) > EXACT * sizes).any()):
        largest = int(torch.where(over, norms, -1).argmax())
        direction = rest[largest] - rest[largest] @ basis.T @ basis
        direction = direction / direction.norm()
        for _ in range(2):
            rest -= torch.outer(rest @ direction, direction)
        rest[largest] = 0
        chosen.append(largest)
        basis = torch.cat([basis, direction[None]])
    return chosen, basis


def find_carried(
    graph: fx.Graph, relations: Relations, facts: Facts, *, constants: bool
) -> dict[fx.Node, CarriedChannels]:
    """The channels of calls that can carry others. constants: whether constants before padding
    are among them, which need border maps else. Raises CallFailed where a rule fails."""
    responses, carried = find_responses(graph, relations, facts), {}
    for node, relation in relations.items():
        if isinstance(relation, Relation) and _sums_channels(relation):
            with attributed(node):
                source = key_of(relation.operands[relation.factors[0]].value)
                channels = _carried_channels(relation, facts, responses.get(source), constants)
            if channels is not None and bool(channels.valid.any()):
                carried[node] = channels
    return carried


def _carried_channels(
    relation: Relation, facts: Facts, responses: Responses | None, with_constants: bool
) -> CarriedChannels | None:
    """The channels of one call that can carry others: constants before padding, and those with
    responses."""
    is_padded = relation.entry.reads_padding(relation.node)
    if responses is None and not (is_padded and with_constants):
        return None
    axis, known, constants = constant_channels(relation, facts)
    valid, values = known & (constants != 0), constants.double()[:, None]
    if responses is not None and axis == 1 and not (is_padded and responses.is_linear):
        places = responses.values.shape[1]
        values = torch.where(known[:, None], values.expand(-1, places), responses.values)
        valid = (valid | responses.valid) & (values != 0).any(1)
    elif not is_padded:
        return None
    has_all = is_padded and with_constants
    valid = valid if has_all else valid & ~known
    valid = valid & ~_without_weights(relation, facts, axis).expand(len(valid))
    if not is_padded:
        bias = schema.arguments(relation.node).get("bias", relation.node)
        takes = bias is None or (isinstance(bias, fx.Node) and bias.op == "get_attr")
        if relation.is_grouped or not takes:
            return None
    groups = schema.arguments(relation.node)["groups"] if relation.is_grouped else 1
    return CarriedChannels(
        axis,
        values.reshape(groups, -1, values.shape[1]),
        valid.view(groups, -1),
        responses and responses.window,
        not is_padded,
        has_all,
    )


def _without_weights(relation: Relation, facts: Facts, axis: int) -> Tensor:
    """Which channels along an axis of the first factor have weights of zero alone."""
    first, second = relation.factors
    weight, order = facts[key_of(relation.operands[second].value)], list(relation.size)
    channels, axes = relation.ins[first][axis], relation.ins[second]
    if channels in axes:
        others = tuple(k for k, letters in enumerate(axes) if letters != channels)
        return weight.all_over(others, zero=True).reshape(-1)
    zero = spread(weight.zero, relation.ins[second], order, relation.size)
    zero = all_over(zero, order, set(order) - set(channels))
    return project(zero, (channels,), order, relation.size)


def carries_constants(relation: Relation) -> bool:
    """Whether constants that enter a padded window need no border map: one constant channel (of
    each group) can carry others, or all of them stay (a depthwise convolution)."""
    if relation.entry.fill != "sum" or relation.complete:
        return False
    channels = relation.letters(relation.ins[relation.factors[0]]) & relation.contracted
    return not channels or _sums_channels(relation)


def _sums_channels(relation: Relation) -> bool:
    """Whether a call is a sum over channels with a weight that no other call reads."""
    if relation.entry.fill != "sum" or relation.complete or relation.back:
        return False
    first, second = relation.factors
    channels = any(set(axis) & relation.contracted for axis in relation.ins[first])
    source, weight = relation.operands[first].value, relation.operands[second].value
    is_weight = isinstance(weight, fx.Node) and weight.op == "get_attr"
    return channels and isinstance(source, fx.Node) and is_weight and _has_one_reader(weight)


def _has_one_reader(weight: fx.Node) -> bool:
    """Whether one call reads the tensor of a get_attr node."""
    reads = weight.graph.find_nodes(op="get_attr")
    return sum(len(read.users) for read in reads if read.target == weight.target) == 1


def constant_channels(relation: Relation, facts: Facts) -> tuple[int, Tensor, Tensor]:
    """The axis of channels of the first factor, which of them are one constant (bool [channels]),
    and the constants."""
    first = relation.factors[0]
    fact = one_value(relation, operand_facts(relation, facts)[first])
    axis = next(d for d, a in enumerate(relation.ins[first]) if set(a) & relation.contracted)
    size = 1
    for letter in relation.ins[first][axis]:
        size *= relation.size[letter] or 1
    known, fill = torch.broadcast_tensors(fact.known, fact.fill)
    if any(n != 1 for d, n in enumerate(known.shape) if d != axis):
        return axis, torch.zeros(size, dtype=torch.bool), torch.zeros(size)
    return axis, known.reshape(-1).expand(size), fill.reshape(-1).expand(size)


def output_channels(relation: Relation) -> int:
    """The output axis of the weight's output letter."""
    letters = relation.letters(relation.ins[relation.factors[1]])
    return next(k for k, axis in enumerate(relation.outs[0]) if set(axis) & letters and not set(axis) & relation.window)


def one_value(relation: Relation, fact: Fact) -> Fact:
    """The fact of the first factor, known where it is uniform along all letters that a sum, or a
    border map, needs it to be."""
    axes, letters = relation.ins[relation.factors[0]], uniform_letters(relation)
    order = [str(k) for k in range(len(axes))]
    return uniform_over(fact, order, {str(k) for k, a in enumerate(axes) if set(a) & letters})
