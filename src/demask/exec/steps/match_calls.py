"""Calls of ATen ops as steps of a segment, with the kinds of their values.

Kinds of values of segments, where the calls themselves do not say them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from demask.exec.steps.called_op import MOVED
from demask.exec.steps.recurrent_rows import recurrence_of
from demask.exec.steps.segment_calls import CALLED, LAST, called_by_target
from demask.exec.steps.segment_rows import ELEMENTWISE, lowering_of
from demask.exec.steps.segment_steps import (
    CHANNELS_LAST,
    KINDS,
    NO_WEIGHT,
    SPATIAL,
    AnyStep,
    Layer,
    activation_step,
    add_step,
    call_step,
    channel_axis,
    concat_step,
    conv_step,
    flat_step,
    has_rank,
    is_conv,
    linear_step,
    mean_step,
    pool_step,
    scale_step,
    select_step,
)
from demask.graph.editor import GraphEditor
from demask.graph.queries import has_shape, input_dependent
from demask.ops import schema
from demask.ops.activations import Act, activations_by_op
from demask.ops.schema import fake, same_size
from demask.ops.traits import IDENTITIES, OVER_LAST_AXIS, PADS, SQUEEZES

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
    return "image" if fake(node).ndim == 4 and "image" in kinds else "tokens"


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


ANY = "any"  # kind of the operands of calls that read each kind


@dataclass(frozen=True, slots=True)
class MatchedCall:
    """A call that a segment can replace.

    reads: its operands; kind, makes: kinds of operands and output ("" if not yet known: elementwise
    calls work with any kind; ANY of operands that may be of several). step: its step without values
    and weights; None if the output equals the operand. weight, bias: of a layer, nodes that read
    constants. affine: weight and bias of a norm as a layer, tensors [channels]. channels: of a
    selection, numbers of channels of x, -1 for zeros. index: of a call that reads positions.
    """

    node: fx.Node
    reads: tuple[fx.Node, ...]
    kind: str
    makes: str
    step: AnyStep | None
    weight: fx.Node | None = None
    bias: fx.Node | None = None
    affine: tuple[Tensor, Tensor] | None = None
    channels: Tensor | None = None
    index: Tensor | None = None

    @property
    def op(self) -> str:
        """The op of its step; "" if the output equals the operand."""
        return "" if self.step is None else self.step.op

    @property
    def is_layer(self) -> bool:
        return self.weight is not None

    @property
    def is_elementwise(self) -> bool:
        return lowering_of(self.step) == ELEMENTWISE

    @property
    def act(self) -> Act | None:
        """The activation, if the call is only that."""
        return self.step.act if self.step is not None and self.op == "map" else None


def calls_of(editor: GraphEditor, dtype: torch.dtype) -> dict[fx.Node, MatchedCall]:
    """Calls that a segment could replace, in order: on values of this dtype on the CPU."""
    live, calls = input_dependent(editor.graph), {}
    rules: dict[Any, Rule] = dict.fromkeys(called_by_target(), lambda *call: None)
    rules |= {**_RULES, **dict.fromkeys(activations_by_op(), _match_activation)}
    for node in editor.graph.nodes:
        rule = rules.get(node.target) if node.op == "call_function" and node in live else None
        if rule is None or not _is_dense_on_cpu(node, dtype):
            continue
        call = rule(editor, node, schema.arguments(node)) or _called(editor, node)
        if call is not None and all(_is_dense_on_cpu(source, dtype) for source in call.reads):
            calls[node] = call
    return _with_kinds(editor, calls)


def matrix(call: MatchedCall, weight: Tensor) -> Tensor:
    """The weight of a layer as a matrix [out, in / groups * kernel]."""
    if call.affine is not None:
        return call.affine[0].reshape(-1, 1)
    if not is_conv(call.step) or not call.step.fields.transposed:
        return weight.flatten(1)
    in_channels, group_outputs, *kernel = weight.shape
    groups = call.step.fields.groups
    parts = weight.reshape(groups, in_channels // groups, group_outputs, *kernel).transpose(1, 2)
    return parts.reshape(groups * group_outputs, -1)


def _is_dense_on_cpu(node: fx.Node, dtype: torch.dtype) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return value.dtype is dtype and value.device.type == "cpu"


def _with_kinds(editor: GraphEditor, calls: Mapping[fx.Node, MatchedCall]) -> dict[fx.Node, MatchedCall]:
    """The calls with the kinds of their values: from producers, else readers, else rank."""
    reader_kinds: dict[fx.Node, str] = {}
    for node, call in reversed(list(calls.items())):
        kind = call.kind or next((reader_kinds[u] for u in node.users if u in reader_kinds), "")
        if kind and kind != ANY:
            reader_kinds[node] = kind
    with_kinds: dict[fx.Node, MatchedCall] = {}
    for node, call in calls.items():
        read_as = next((reader_kinds[u] for u in node.users if u in reader_kinds), "")
        if not call.kind:
            kinds = [with_kinds[source].makes for source in call.reads if source in with_kinds]
            kind = next(iter(kinds), read_as)
            kinds_of = CALLED[call.op].kinds if call.op in CALLED else KINDS
            if kind not in kinds_of:
                kind = kind_by_rank(node, kinds_of)
            if has_rank(kind, fake(node).ndim) and _joins_channels(call, node, kind):
                with_kinds[node] = replace(call, kind=kind, makes=kind)
                continue
            call = _called(editor, node) if call.op == "cat" else call
        if call is not None and call.kind:
            fits = bool(read_as) and has_rank(read_as, fake(node).ndim)
            makes = call.makes or (read_as if fits else "tokens")
            with_kinds[node] = replace(call, makes=makes)
    return with_kinds


def _called(editor: GraphEditor, node: fx.Node) -> MatchedCall | None:
    """A call of an op of `CALLED`; results of moves are of the kind that is read, else tokens."""
    arguments = schema.arguments(node)
    for name in called_by_target().get(node.target, ()):
        entry = CALLED[name]
        matched = entry.match(arguments, node) if fake(node).ndim else None
        if matched is None:
            continue
        operands, numbers, nodes = matched
        named, index = constants_of(editor, nodes)
        if (nodes and index is None) or not all(isinstance(x, fx.Node) for x in operands):
            continue
        kind = entry.kinds[0] if len(entry.kinds) == 1 else ""
        if entry.kinds == SPATIAL:
            kind = "image" if fake(node).ndim == 4 else "signal"
        elif entry.lowering == MOVED:
            kind = ANY
        elif entry.kinds == CHANNELS_LAST and is_channels_last(operands[0]):
            kind = "pixels"
        step = call_step((0,) * len(operands), name, "tokens", numbers, name=entry.name_of(named))
        makes = "" if kind == ANY else kind
        return MatchedCall(node, operands, kind, makes, step, index=index)
    return None


def _joins_channels(call: MatchedCall, node: fx.Node, kind: str) -> bool:
    """Whether a concatenation is along channels; True for other calls."""
    if call.op != "cat":
        return True
    rank = fake(node).ndim
    if kind == "matrices":
        return False
    return schema.arguments(node)["dim"] % rank == channel_axis(kind) % rank


# ---------------------------------------------------------------------------------------- layers

Arguments = Mapping[str, Any]
Rule = Callable[[GraphEditor, fx.Node, Arguments], "MatchedCall | None"]


def _convolution(editor: GraphEditor, node: fx.Node, arguments: Arguments) -> MatchedCall | None:
    weight = _constant_weight(editor, arguments)
    if weight is None or fake(node).ndim != weight.ndim:
        return None  # computed weights, or an image without batch axis
    axes = weight.ndim - 2
    stride, dilation = (_number_per_axis(arguments[key], axes) for key in ("stride", "dilation"))
    kernel = tuple(weight.shape[2:])
    pads = _padding(arguments["padding"], kernel, dilation, axes)
    if stride is None or dilation is None or pads is None:
        return None
    x, border = _without_border(arguments["input"], axes)
    if any(map(any, border)):
        pads = tuple((a + b, c + d) for (a, c), (b, d) in zip(pads, border, strict=True))
        arguments = {**arguments, "input": x}
    window = _image_geometry(kernel, stride, pads, dilation)
    step = conv_step(0, NO_WEIGHT, None, weight.shape[0], **window, groups=arguments["groups"])
    return _layer_call(node, arguments, "signal" if axes == 1 else "image", step)


def _without_border(x: Any, axes: int) -> tuple[Any, tuple[tuple[int, int], ...]]:
    """The operand of a convolution without a border of zeros along its axes, and positions of the border (before,
    after) per axis; the operand as it is, and none, where it has no such border."""
    none = ((0, 0),) * axes
    if not isinstance(x, fx.Node) or x.target not in PADS:
        return x, none
    arguments = schema.arguments(x)
    is_zero = arguments.get("mode", "constant") == "constant" and arguments["value"] in (None, 0)
    pads = arguments["pad"]
    if not is_zero or not all(type(n) is int and n >= 0 for n in pads) or any(pads[2 * axes :]):
        return x, none
    pairs = [*zip(pads[::2], pads[1::2], strict=True), *none][:axes]
    return arguments["self"], tuple(reversed(pairs))


def _transposed(editor: GraphEditor, node: fx.Node, arguments: Arguments) -> MatchedCall | None:
    weight = _constant_weight(editor, arguments)
    if weight is None or fake(node).ndim != weight.ndim:
        return None
    axes = weight.ndim - 2
    numbers = [_number_per_axis(arguments[key], axes) for key in ("stride", "dilation", "padding", "output_padding")]
    if any(n is None for n in numbers):
        return None
    stride, dilation, padding, output_padding = numbers
    pads = tuple((a, a - b) for a, b in zip(padding, output_padding, strict=True))  # type: ignore[arg-type]
    if any(after < 0 for _, after in pads):
        return None  # the output has zeros after the computed part
    out, kernel = weight.shape[1] * arguments["groups"], tuple(weight.shape[2:])
    window = _image_geometry(kernel, stride, pads, dilation)
    step = conv_step(0, NO_WEIGHT, None, out, **window, groups=arguments["groups"], transposed=True)
    return _layer_call(node, arguments, "signal" if axes == 1 else "image", step)


def _image_geometry(kernel: Any, stride: Any, pads: Any, dilation: Any) -> dict[str, Any]:
    """Geometry along height and width; a signal is an image of height 1."""
    geometry = {"kernel": kernel, "stride": stride, "padding": pads, "dilation": dilation}
    if len(kernel) == 2:
        return geometry
    height_fields = {"kernel": 1, "stride": 1, "padding": (0, 0), "dilation": 1}
    return {key: (height_fields[key], *value) for key, value in geometry.items()}


def _match_linear(editor: GraphEditor, node: fx.Node, arguments: Arguments) -> MatchedCall | None:
    weight = _constant_weight(editor, arguments)
    if weight is None or weight.ndim != 2:
        return None
    kind = "pixels" if is_channels_last(arguments["input"]) else "tokens"
    return _layer_call(node, arguments, kind, linear_step(0, NO_WEIGHT, None, weight.shape[0]))


def _layer_call(node: fx.Node, arguments: Arguments, kind: str, step: Layer) -> MatchedCall | None:
    call = MatchedCall(node, (arguments["input"],), kind, kind, step, arguments["weight"], arguments["bias"])
    return call if isinstance(arguments["input"], fx.Node) else None


def _constant_weight(editor: GraphEditor, arguments: Arguments) -> Tensor | None:
    """The weight of a layer, if weight and bias are constants."""
    weight, bias = editor.tensor(arguments["weight"]), editor.tensor(arguments["bias"])
    if weight is None or (arguments["bias"] is not None and bias is None) or not weight.numel():
        return None
    has_dtype = bias is None or bias.dtype is weight.dtype
    return weight if has_dtype and weight.layout is torch.strided else None


def _number_per_axis(value: Any, count: int) -> tuple[int, ...] | None:
    """One number per axis; None if one is known only at run time."""
    numbers = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not all(type(n) is int for n in numbers):
        return None
    return numbers * count if len(numbers) == 1 else numbers


def _padding(value: Any, kernel: Sequence[int], dilation: Any, axes: int) -> Any:
    """Padding before and after each axis, from numbers, "same" or "valid"."""
    if value == "valid":
        return ((0, 0),) * axes
    if value == "same":
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((n // 2, n - n // 2) for n in reach)
    numbers = _number_per_axis(value, axes)
    return None if numbers is None else tuple((n, n) for n in numbers)


# ------------------------------------------------------------------------- calls between layers


def _match_activation(editor: GraphEditor, node: fx.Node, arguments: Arguments) -> MatchedCall | None:
    for activation, op in activations_by_op()[node.target]:
        numbers = op.read(arguments.__getitem__)
        if numbers is not None:
            x = next(iter(arguments.values()))  # the first argument of the op
            return MatchedCall(node, (x,), "", "", activation_step(0, (activation.name, numbers)))
    return None


def _norm(editor: GraphEditor, node: fx.Node, arguments: Arguments) -> MatchedCall | None:
    """A batch norm with constant statistics as a convolution of each channel with one weight."""
    names = ("weight", "bias", "running_mean", "running_var")
    weight, bias, mean, var = (editor.tensor(arguments[name]) for name in names)
    is_constant = mean is not None and var is not None and not arguments["training"]
    has_weights = (weight is None) == (arguments["weight"] is None) and (bias is None) == (arguments["bias"] is None)
    if not is_constant or not has_weights or fake(node).ndim != 4:
        return None
    assert mean is not None and var is not None
    scale = (var.double() + arguments["eps"]).rsqrt()
    scale = scale if weight is None else scale * weight.double()
    shift = -mean.double() * scale
    shift = shift if bias is None else shift + bias.double()
    step = conv_step(0, NO_WEIGHT, None, len(mean), (1, 1), groups=len(mean))
    return MatchedCall(
        node,
        (arguments["input"],),
        "image",
        "image",
        step,
        arguments["running_mean"],
        arguments["bias"],
        affine=(scale.to(mean.dtype), shift.to(mean.dtype)),
    )


def _scaled(editor: GraphEditor, node: fx.Node, arguments: Arguments) -> MatchedCall | None:
    """The product of an image and one factor per channel, computed or constant."""
    sides, shape = (arguments["self"], arguments["other"]), fake(node).shape
    if len(shape) != 4 or not all(isinstance(side, fx.Node) for side in sides):
        return None
    for x, z in (sides, sides[::-1]):
        if has_shape(x, shape) and has_shape(z, (*shape[:2], 1, 1)):
            return MatchedCall(node, (x, z), "image", "image", scale_step(0, 0))
        factors = editor.tensor(z)
        if factors is not None and has_shape(x, shape) and factors.shape == (shape[1], 1, 1):
            step = conv_step(0, NO_WEIGHT, None, len(factors), (1, 1), groups=len(factors))
            scale = factors.flatten()
            return MatchedCall(node, (x,), "image", "image", step, z, affine=(scale, torch.zeros_like(scale)))
    return None


# ------------------------------------------------------------------------- selections of channels


def _match_selection(editor: GraphEditor, node: fx.Node, arguments: Arguments) -> MatchedCall | None:
    numbers = editor.tensor(arguments["index"])
    return None if numbers is None else _selection(node, arguments["dim"], numbers.long())


def _sliced(editor: GraphEditor, node: fx.Node, arguments: Arguments) -> MatchedCall | None:
    """A slice of channels, or every n-th row or column of an image."""
    x, numbers = arguments["self"], [arguments[key] for key in ("start", "end", "step")]
    start, end, step = (0 if numbers[0] is None else numbers[0]), *numbers[1:]
    shape = fake(x).shape
    axis = arguments["dim"] % len(shape)
    if start == 0 and step == 1 and has_shape(node, shape) and _reaches_end(end, shape[axis], 1):
        return MatchedCall(node, (x,), "", "", None)
    if axis < 2:
        if not all(type(n) is int for n in (start, step, shape[axis])):
            return None
        if end is not None and type(end) is not int:
            return None
        return _selection(node, axis, torch.arange(shape[axis])[start:end:step])
    if len(shape) != 4 or start != 0 or type(step) is not int:
        return None
    if not _reaches_end(end, shape[axis], step):
        return None
    stride = (step, 1) if axis == 2 else (1, step)
    return _selection(node, 1, torch.arange(shape[1]), stride) if type(shape[1]) is int else None


def _reaches_end(end: Any, size: Any, step: int) -> bool:
    """Whether a slice up to `end` (an argument of a node) has the last of each `step` elements."""
    if end is None or (type(end) is int and end == LAST):
        return True
    end = fake(end) if isinstance(end, fx.Node) else end
    if type(end) is int and type(size) is int:
        return -(-min(end, size) // step) == -(-size // step)
    return same_size(end, size)


def _padded(editor: GraphEditor, node: fx.Node, arguments: Arguments) -> MatchedCall | None:
    """Channels of zeros before or after those of an image."""
    shape, pads = fake(arguments["self"]).shape, arguments["pad"]
    before, after = pads[4:6] if len(pads) > 4 else (0, 0)
    is_known = all(type(n) is int for n in (*pads, shape[1] if len(shape) == 4 else None))
    if (
        not is_known
        or arguments.get("mode", "constant") != "constant"
        or arguments["value"] not in (None, 0)
        or any((*pads[:4], *pads[6:]))
        or min(before, after) < 0
    ):
        return None
    numbers = [torch.full((before,), -1), torch.arange(shape[1]), torch.full((after,), -1)]
    return _selection(node, 1, torch.cat(numbers))


def _selection(node: fx.Node, axis: int, channels: Tensor, stride: tuple[int, int] = (1, 1)) -> MatchedCall | None:
    """A selection of channels, if the axis is that of channels."""
    rank = fake(node).ndim
    kind = {(4, 1): "image", (2, 1): "tokens"}.get((rank, axis % rank))
    if kind is None or not len(channels):
        return None
    step = select_step(0, (0, 0, 1), stride, bool((channels < 0).any()))
    x = next(iter(schema.arguments(node).values()))
    return MatchedCall(node, (x,), kind, kind, step, channels=channels)


def _match_copy(editor: GraphEditor, node: fx.Node, arguments: Arguments) -> MatchedCall | None:
    x = arguments["self"]
    return MatchedCall(node, (x,), "", "", None) if has_shape(x, fake(node).shape) else None


def _match_sum(editor: GraphEditor, node: fx.Node, arguments: Arguments) -> MatchedCall | None:
    sides = arguments["self"], arguments["other"]
    if arguments["alpha"] != 1 or not all(isinstance(side, fx.Node) for side in sides):
        return None
    return (
        MatchedCall(node, sides, "", "", add_step(0, 0)) if all(has_shape(s, fake(node).shape) for s in sides) else None
    )


def _match_join(editor: GraphEditor, node: fx.Node, arguments: Arguments) -> MatchedCall | None:
    parts = tuple(arguments["tensors"])
    rank = fake(node).ndim
    has_empty = any(fake(part).ndim != rank for part in parts)  # which torch ignores
    if has_empty or recurrence_of(node) is not None:
        return None
    return MatchedCall(node, parts, "", "", concat_step((0,)))


def _match_max_pool(editor: GraphEditor, node: fx.Node, arguments: Arguments) -> MatchedCall | None:
    return _match_pool(node, arguments, mean=False, counted=True)


def _match_mean_pool(editor: GraphEditor, node: fx.Node, arguments: Arguments) -> MatchedCall | None:
    if arguments["divisor_override"] is not None:
        return None
    return _match_pool(node, arguments, mean=True, counted=arguments["count_include_pad"])


def _match_pool(node: fx.Node, arguments: Arguments, *, mean: bool, counted: bool) -> MatchedCall | None:
    kernel = _number_per_axis(arguments["kernel_size"], 2)
    stride = _number_per_axis(arguments["stride"] or arguments["kernel_size"], 2)
    padding, dilation = (_number_per_axis(arguments.get(key, 1), 2) for key in ("padding", "dilation"))
    if None in (kernel, stride, padding, dilation) or fake(node).ndim != 4:
        return None
    step = pool_step(0, mean, kernel, stride, padding, dilation, arguments["ceil_mode"], counted)  # type: ignore
    return MatchedCall(node, (arguments["self"],), "image", "image", step)


def _adaptive(editor: GraphEditor, node: fx.Node, arguments: Arguments) -> MatchedCall | None:
    x = arguments["self"]
    if fake(node).ndim != 4:
        return None
    if has_shape(x, fake(node).shape):
        return MatchedCall(node, (x,), "", "", None)
    is_global = _number_per_axis(arguments["output_size"], 2) == (1, 1)
    return MatchedCall(node, (x,), "image", "image", mean_step(0, keep=True)) if is_global else None


def _match_mean(editor: GraphEditor, node: fx.Node, arguments: Arguments) -> MatchedCall | None:
    x, dims = arguments["self"], arguments["dim"]
    rank = fake(x).ndim
    if rank != 4 or sorted(d % 4 for d in dims or ()) != [2, 3] or arguments["dtype"] is not None:
        return None
    makes = "image" if arguments["keepdim"] else "tokens"
    return MatchedCall(node, (x,), "image", makes, mean_step(0, keep=arguments["keepdim"]))


def _flat(editor: GraphEditor, node: fx.Node, arguments: Arguments) -> MatchedCall | None:
    """Images of one pixel as tokens, or a reshape to the same shape."""
    x = arguments["self"]
    if not isinstance(x.meta.get("val"), Tensor):
        return None
    if has_shape(x, fake(node).shape):
        return MatchedCall(node, (x,), "", "", None)
    before, after = fake(x).shape, fake(node).shape
    is_image_to_rows = len(before) == 4 and len(after) == 2 and tuple(before[2:]) == (1, 1)
    if not is_image_to_rows or not all(map(same_size, before[:2], after)):
        return None
    return MatchedCall(node, (x,), "image", "tokens", flat_step(0))


_RULES: dict[Any, Rule] = {
    aten.conv1d.default: _convolution,
    aten.conv1d.padding: _convolution,
    aten.conv2d.default: _convolution,
    aten.conv2d.padding: _convolution,
    aten.conv_transpose1d.default: _transposed,
    aten.conv_transpose2d.input: _transposed,
    aten.linear.default: _match_linear,
    aten.add.Tensor: _match_sum,
    aten.mul.Tensor: _scaled,
    aten.batch_norm.default: _norm,
    aten.index_select.default: _match_selection,
    aten.slice.Tensor: _sliced,
    **dict.fromkeys(PADS, _padded),
    aten.cat.default: _match_join,
    aten.max_pool2d.default: _match_max_pool,
    aten.avg_pool2d.default: _match_mean_pool,
    aten.adaptive_avg_pool2d.default: _adaptive,
    aten.mean.dim: _match_mean,
    aten.flatten.using_ints: _flat,
    aten.view.default: _flat,
    aten.reshape.default: _flat,
    **dict.fromkeys(SQUEEZES, _flat),
    **dict.fromkeys(IDENTITIES, _match_copy),
}
