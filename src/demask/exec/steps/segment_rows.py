"""What each op of a step is: one row per op, for every user of programs.

A row says the fields and constants of its steps and how their text is written, the kinds and shapes
of values, the result in ATen ops, and by which lowering plans compute it (`plan.tape_builder`). The
ops that are single ATen ops have their entries in `segment_calls.CALLED`, which become rows here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from demask.errors import BadInput
from demask.exec.steps import segment_weights as stored
from demask.exec.steps.called_op import MOVED, POSITIONS, CalledOp, Shape
from demask.exec.steps.segment_calls import CALLED
from demask.exec.steps.segment_steps import (
    CHANNELS_LAST,
    KINDS,
    LARGEST,
    MAX_SIZE,
    SPATIAL,
    AnyStep,
    Conv,
    Layer,
    Mean,
    NoFields,
    Numbers,
    Outputs,
    Pool,
    Selection,
    Span,
    SparseWeight,
    Step,
    Window,
    channel_axis,
    has_rank,
)
from demask.ops.activations import ACTIVATIONS, apply_activation

# How plans compute ops that no entry of `CALLED` is.
LAYER, POOL, MEAN, FLAT, ELEMENTWISE = "layer", "pool", "mean", "flat", "elementwise"
SCALE, JOIN, SELECTION = "scale", "join", "selection"
Constants = tuple[Tensor | None, Tensor | None]


def _is_valid(step: AnyStep) -> None:
    """No check."""


def _no_constants(
    step: AnyStep, kind: str, shape: Sequence[int], dtype: torch.dtype, weights: Sequence[Tensor]
) -> Constants:
    return None, None


@dataclass(frozen=True, slots=True)
class Row:
    """What a step of an op is.

    lowering: how plans compute it. fields: the type of its fields. keys: of its text, in order. kinds:
    of its operands, which have one kind. makes: the kind of the result, from that of the operands.
    shape: of the result, from the shapes of the operands and their kind; sizes may be symbolic. run:
    the result in ATen ops, before the sum and the activation, from the operands and constants. check
    raises BadInput for fields that are invalid for all sizes, check_stored for constants that are
    invalid for all inputs. constants: of a step, for an operand of this shape and dtype. keeps_sign:
    whether the result is not negative if the operands are not. activates, adds: whether its steps always
    have an activation, or add their last operand. called: of a call of an ATen op.
    """

    lowering: str
    shape: Callable[[AnyStep, Sequence[Shape], str], Shape]
    run: Callable[[AnyStep, str, Sequence[Tensor], Constants], Tensor]
    keys: tuple[str, ...] = ("x",)
    fields: type[Any] = NoFields
    kinds: tuple[str, ...] = KINDS
    makes: Callable[[AnyStep, str], str] = lambda step, kind: kind
    check: Callable[[Any], None] = _is_valid
    check_stored: Callable[[Any, Sequence[Tensor]], None] = lambda step, weights: None
    constants: Callable[[Any, str, Sequence[int], torch.dtype, Sequence[Tensor]], Constants] = _no_constants
    keeps_sign: bool = False
    activates: bool = False
    adds: bool = False
    called: CalledOp | None = None

    @property
    def operands(self) -> int | None:
        """The number of operands, without one that is added; None for any."""
        if self.called is not None:
            return self.called.operands
        return None if "xs" in self.keys else len({"x", "z"} & set(self.keys))

    @property
    def mixes_kinds(self) -> bool:
        """Whether operands may be of any kinds."""
        return self.called is not None and not self.called.keeps_kind


def row_of(step: AnyStep) -> Row:
    """The row of the op of a step."""
    return ROWS[step.op]


def lowering_of(step: AnyStep | None) -> str:
    """How plans compute a step; "" if there is none."""
    return "" if step is None else ROWS[step.op].lowering


def name_of(step: AnyStep) -> str:
    """The name of a step in messages and texts."""
    return "call" if step.op in CALLED else step.op


# ---------------------------------------------------------------------------------------- the driver


def is_count(value: Any, least: int = 0) -> bool:
    """Whether a value is an integer from `least` to MAX_SIZE."""
    return type(value) is int and least <= value <= MAX_SIZE


def check_step(step: AnyStep, known: int) -> None:
    """Raise BadInput for fields that are invalid for all sizes. known: number of values before it."""
    row = ROWS.get(step.op) if type(step.op) is str else None
    if row is None:
        raise BadInput(f"expected an op of {sorted(ROWS)}, got {step.op!r:.40}")
    if type(step.reads) is not tuple or not step.reads or not all(is_count(v) and v < known for v in step.reads):
        raise BadInput(f"expected values before it, got {step.reads!r:.80}")
    expected = row.operands
    if expected is not None and len(step.reads) != expected + (step.adds and "add" in row.keys):
        raise BadInput(f"expected {expected} operands of {step.op}, got {len(step.reads)}")
    if type(step.name) is not str:
        raise BadInput(f"expected a name, got {step.name!r:.40}")
    row.check(step)
    if step.act is not None or row.activates:
        _check_act(step.act)
    if (step.act is not None and "act" not in row.keys) or (step.adds and not row.adds and "add" not in row.keys):
        raise BadInput(f"expected {step.op} without activation and sum, got {step!r:.200}")


def _check_act(act: Any) -> None:
    known = type(act) is tuple and len(act) == 2 and act[0] in ACTIVATIONS
    numbers = act[1] if known else ()
    if not known or len(numbers) != ACTIVATIONS[act[0]].count:
        raise BadInput(f"expected an activation of {sorted(ACTIVATIONS)}, got {act!r:.80}")
    if not all(type(n) in (int, float) and (abs(n) <= LARGEST or abs(n) == inf) for n in numbers):
        raise BadInput(f"expected numbers, got {act!r:.80}")


def kind_of(step: AnyStep, operands: Sequence[str]) -> str:
    """The kind of the output of a step. operands: kinds of its operands."""
    row = ROWS[step.op]
    if not row.mixes_kinds and (operands[0] not in row.kinds or len(set(operands)) != 1):
        raise BadInput(f"expected values of one kind of {row.kinds}, got {operands}")
    return row.makes(step, operands[0])


def shape_of(step: AnyStep, shapes: Sequence[Shape], kind: str) -> Shape:
    """The shape of the output of a step, from those of its operands and their kind."""
    shape = ROWS[step.op].shape(step, shapes, kind)
    if step.adds and tuple(shapes[-1]) != shape:
        raise BadInput(f"expected {shape} to be added, got {shapes[-1]}")
    return shape


def call(
    step: AnyStep, kind: str, operands: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """The output of a step for its operands, computed by ATen ops.

    kind: of the operands, as in `SegmentProgram.kinds`. weight, bias: the results of `constants_of`;
    of layers in the dtype of the operands.
    """
    y = ROWS[step.op].run(step, kind, operands, (weight, bias))
    return apply_activation(y + operands[-1] if step.adds else y, step.act)


def constants_of(step: AnyStep, kind: str, x: Tensor, weights: Sequence[Tensor]) -> Constants:
    """Weight and bias of a layer in the dtype of x, its first operand; (numbers, None) of a selection,
    (constants, None) of a call, or (None, None)."""
    return ROWS[step.op].constants(step, kind, x.shape, x.dtype, weights)


def is_positive(step: AnyStep, positive: Sequence[bool]) -> bool:
    """Whether the output of a step is never negative. positive: the same of every value before it."""
    if step.act is not None:
        return ACTIVATIONS[step.act[0]].nonnegative(*step.act[1])
    return ROWS[step.op].keeps_sign and all(positive[v] for v in step.reads)


# ------------------------------------------------------------------------------------------- layers


def weight_spans(weight: SparseWeight) -> list[Span]:
    """The spans of a weight: values, row starts and columns if any, scales if any."""
    spans = [weight.values] if weight.csr is None else list(weight.csr)
    return spans if weight.scale is None else [*spans, weight.scale]


def _is_span(span: Any) -> bool:
    return len(span) == 3 and all(map(is_count, span))


def _check_layer(step: Layer) -> None:
    weight, out = step.weight, step.fields.out
    for span in weight_spans(weight) + ([] if step.bias is None else [step.bias]):
        if not _is_span(span) or span[1] > span[2]:
            raise BadInput(f"expected spans (tensor, first, end), got {span!r:.80}")
    if not is_count(out, 1):
        raise BadInput(f"expected output channels, got {out!r:.40}")
    count = weight.values[2] - weight.values[1]
    if weight.csr is not None:
        _, crow, col = weight.csr
        if crow[2] - crow[1] != out + 1:
            raise BadInput(f"expected {out + 1} row starts, got {crow}")
        if count != col[2] - col[1]:
            raise BadInput(f"expected a column per value, got {weight.values} and {col}")
    elif (weight.crow, weight.col, weight.scale) != (None, None, None):
        raise BadInput(f"expected row starts and columns, or values alone, got {weight}")
    elif count % out:
        raise BadInput(f"expected values of {out} rows, got {weight.values}")
    for what, span in (("bias", step.bias), ("scale", weight.scale)):
        if span is not None and span[2] - span[1] != out:
            raise BadInput(f"expected a {what} per output channel, got {span}")


def _layer_constants(
    step: Layer, kind: str, shape: Sequence[int], dtype: torch.dtype, weights: Sequence[Tensor]
) -> Constants:
    bias = stored.bias(step, weights)
    return stored.weight(step, weights, shape, dtype), None if bias is None else bias.to(dtype)


def _weight_of(step: AnyStep, constants: Constants) -> Tensor:
    if constants[0] is None:
        raise BadInput(f"expected the weight of a {step.op}")
    return constants[0]


def _check_window(window: Window | Pool) -> None:
    for key in ("kernel", "stride", "dilation"):
        sizes = getattr(window, key)
        if len(sizes) != 2 or not all(is_count(n, 1) for n in sizes):
            raise BadInput(f"expected two positive {key} sizes, got {sizes!r:.80}")
    if len(window.padding) != 2:
        raise BadInput(f"expected padding of two axes, got {window.padding!r:.80}")


def _check_conv(step: Conv) -> None:
    _check_layer(step)
    window = step.fields
    _check_window(window)
    if not is_count(window.groups, 1) or window.out % window.groups:
        raise BadInput(f"expected groups that divide {window.out}, got {window.groups!r}")
    if type(window.transposed) is not bool:
        raise BadInput(f"expected a flag, got transposed={window.transposed!r}")
    for axis, pair in enumerate(window.padding):
        limit = max(window.stride[axis], window.dilation[axis]) if window.transposed else 1
        is_pair = type(pair) is tuple and len(pair) == 2
        if not is_pair or not is_count(pair[0]) or not is_count(pair[1], 1 - limit):
            raise BadInput(f"expected padding (before, after) per axis, got {window.padding!r:.80}")


def _kind_of_conv(step: Conv, kind: str) -> str:
    window = step.fields
    first = window.kernel[0], window.stride[0], window.dilation[0], window.padding[0]
    if kind == "signal" and first != (1, 1, 1, (0, 0)):
        raise BadInput(f"expected a kernel of height 1 for a signal, got {window.kernel}")
    return kind


def _convolved_shape(step: Conv, shapes: Sequence[Shape], kind: str) -> Shape:
    x, window, sizes = shapes[0], step.fields, []
    if x[1] % window.groups:
        raise BadInput(f"expected channels in {window.groups} groups, got {x[1]}")
    for axis, size in enumerate(x[2:], 4 - len(x)):  # the only axis of a signal is the width
        reach, stride = window.dilation[axis] * (window.kernel[axis] - 1), window.stride[axis]
        before, after = window.padding[axis]
        if window.transposed:
            sizes.append((size - 1) * stride + reach + 1 - before - after)
        else:
            sizes.append((size + before + after - reach - 1) // stride + 1)
    return (x[0], window.out, *sizes)


def _convolve(step: Conv, kind: str, operands: Sequence[Tensor], constants: Constants) -> Tensor:
    """A convolution of images or signals, with padding that may differ before and after an axis."""
    x, weight, bias, window = operands[0], _weight_of(step, constants), constants[1], step.fields
    axes = x.dim() - 2
    stride, dilation = window.stride[-axes:], window.dilation[-axes:]
    before, after = zip(*window.padding[-axes:], strict=True)
    if window.transposed:
        return _transpose(window, x, weight, bias)
    if before != after:
        x, before = F.pad(x, _pad_ends(before, after)), (0,) * axes
    function = torch.conv1d if axes == 1 else torch.conv2d
    return function(x, weight, bias, stride, before, dilation, window.groups)


def _transpose(window: Window, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A transposed convolution, cropped where torch does not support the output padding."""
    axes = x.dim() - 2
    stride, dilation = window.stride[-axes:], window.dilation[-axes:]
    before, after = zip(*window.padding[-axes:], strict=True)
    function: Any = torch.conv_transpose1d if axes == 1 else torch.conv_transpose2d
    output_padding = tuple(a - b for a, b in zip(before, after, strict=True))
    if all(0 <= n < max(s, d) for n, s, d in zip(output_padding, stride, dilation, strict=True)):
        return function(x, weight, bias, stride, before, output_padding, window.groups, dilation)
    full = function(x, weight, None, stride, 0, 0, window.groups, dilation)
    cropped = F.pad(full, _pad_ends([-n for n in before], [-n for n in after]))
    return cropped if bias is None else cropped + bias.reshape(-1, *[1] * axes)


def _pad_ends(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Padding before and after each axis in the order of F.pad: the last axis first."""
    pairs = zip(reversed(before), reversed(after), strict=True)
    return [n for pair in pairs for n in pair]


def _multiply(step: Step[Outputs], kind: str, operands: Sequence[Tensor], constants: Constants) -> Tensor:
    return F.linear(operands[0], _weight_of(step, constants), constants[1])


# ------------------------------------------------------------------------------------- other ten ops


def _same_shape(step: AnyStep, shapes: Sequence[Shape], kind: str) -> Shape:
    return shapes[0]


def _first(step: AnyStep, kind: str, operands: Sequence[Tensor], constants: Constants) -> Tensor:
    return operands[0]


def _check_pool(step: Step[Pool]) -> None:
    pool = step.fields
    _check_window(pool)
    if not all(map(is_count, pool.padding)) or any(2 * p > k for p, k in zip(pool.padding, pool.kernel, strict=True)):
        raise BadInput(f"expected padding of at most half the kernel, got {pool.padding!r:.80}")
    if any(type(flag) is not bool for flag in (pool.mean, pool.ceil, pool.counted)):
        raise BadInput(f"expected flags, got {pool.mean!r}, {pool.ceil!r}, {pool.counted!r}")
    if pool.mean and pool.dilation != (1, 1):
        raise BadInput(f"expected a mean of windows without dilation, got {pool.dilation}")


def _pooled_shape(step: Step[Pool], shapes: Sequence[Shape], kind: str) -> Shape:
    x, pool, sizes = shapes[0], step.fields, []
    for axis, size in enumerate(x[2:]):
        reach, pad, stride = pool.dilation[axis] * (pool.kernel[axis] - 1), pool.padding[axis], pool.stride[axis]
        last_start = size + 2 * pad - reach - 1 + (stride - 1 if pool.ceil else 0)
        count = last_start // stride + 1
        if pool.ceil and (count - 1) * stride >= size + pad:
            count = count - 1
        sizes.append(count)
    return (x[0], x[1], *sizes)


def _pool(step: Step[Pool], kind: str, operands: Sequence[Tensor], constants: Constants) -> Tensor:
    x, pool = operands[0], step.fields
    if pool.mean:
        return F.avg_pool2d(x, pool.kernel, pool.stride, pool.padding, pool.ceil, pool.counted)
    return F.max_pool2d(x, pool.kernel, pool.stride, pool.padding, pool.dilation, pool.ceil)


def _check_mean(step: Step[Mean]) -> None:
    if type(step.fields.keep) is not bool:
        raise BadInput(f"expected a flag, got keep={step.fields.keep!r:.40}")


def _flat_shape(step: AnyStep, shapes: Sequence[Shape], kind: str) -> Shape:
    x = shapes[0]
    if x[2] != 1 or x[3] != 1:
        raise BadInput(f"expected images of one pixel, got {x}")
    return (x[0], x[1])


def _scaled_shape(step: AnyStep, shapes: Sequence[Shape], kind: str) -> Shape:
    x, z = shapes
    if tuple(z) != (x[0], x[1], 1, 1):
        raise BadInput(f"expected one factor per channel of {x}, got {z}")
    return x


def _joined_shape(step: AnyStep, shapes: Sequence[Shape], kind: str) -> Shape:
    axis = channel_axis(kind) % len(shapes[0])
    others = [(*shape[:axis], *shape[axis + 1 :]) for shape in shapes]
    if any(sizes != others[0] for sizes in others):
        raise BadInput(f"expected shapes that differ only in axis {axis}, got {shapes}")
    total = shapes[0][axis]
    for shape in shapes[1:]:
        total = total + shape[axis]
    return (*shapes[0][:axis], total, *shapes[0][axis + 1 :])


def _check_selection(step: Step[Selection]) -> None:
    index, (stride, padded) = step.index, step.fields
    if index is None or not _is_span(index) or index[1] >= index[2]:
        raise BadInput(f"expected a span (tensor, first, end), got {index!r:.80}")
    if len(stride) != 2 or not all(is_count(n, 1) for n in stride):
        raise BadInput(f"expected two positive strides, got {stride!r:.80}")
    if type(padded) is not bool:
        raise BadInput(f"expected a flag, got padded={padded!r:.40}")


def _kind_of_selection(step: Step[Selection], kind: str) -> str:
    if kind != "image" and step.fields.stride != (1, 1):
        raise BadInput(f"expected stride 1 for {kind}, got {step.fields.stride}")
    return kind


def _selected_shape(step: Step[Selection], shapes: Sequence[Shape], kind: str) -> Shape:
    x, (_, first, end) = shapes[0], step.index or (0, 0, 0)
    if kind in CHANNELS_LAST:
        return (*x[:-1], end - first)
    return (x[0], end - first, *(-(-n // s) for n, s in zip(x[2:], step.fields.stride[-len(x[2:]) :], strict=True)))


def _select(step: Step[Selection], kind: str, operands: Sequence[Tensor], constants: Constants) -> Tensor:
    x, numbers = operands[0], constants[0]
    if numbers is None:
        raise BadInput("expected the channel numbers of a selection")
    axis, (stride, padded) = channel_axis(kind) % x.ndim, step.fields
    if padded:
        x = F.pad(x, [0, 0] * (x.ndim - 1 - axis) + [1, 0])
        numbers = numbers + 1  # no size: segments are converted by calls traced with other sizes
    if kind == "image" and stride != (1, 1):
        x = x[:, :, :: stride[0], :: stride[1]]
    return x.index_select(axis, numbers)


def _selection_constants(
    step: Step[Selection], kind: str, shape: Sequence[int], dtype: torch.dtype, weights: Sequence[Tensor]
) -> Constants:
    return stored.index(step, shape[channel_axis(kind)], weights), None


def _check_stored_selection(step: Step[Selection], weights: Sequence[Tensor]) -> None:
    stored.index(step, MAX_SIZE, weights)


# ---------------------------------------------------------------------------- calls of single ATen ops


def _called(entry: CalledOp) -> Row:
    """The row of a call of an ATen op."""

    def shape(step: Step[Numbers], shapes: Sequence[Shape], kind: str) -> Shape:
        count = 0 if step.index is None else step.index[2] - step.index[1]
        result = entry.shape([tuple(shape) for shape in shapes], step.fields.numbers, count)
        if not has_rank(step.kind, len(result)):
            raise BadInput(f"expected the shape of {step.kind}, got {result}")
        return result

    def run(step: Step[Numbers], kind: str, operands: Sequence[Tensor], constants: Constants) -> Tensor:
        return entry.call(operands, step.fields.numbers, constants[0])

    def kind_of_result(step: AnyStep, kind: str) -> str:
        if entry.keeps_kind and kind != step.kind:
            raise BadInput(f"expected operands of the kind {step.kind}, got {kind}")
        return step.kind

    def check(step: Step[Numbers]) -> None:
        numbers, span = step.fields.numbers, step.index
        if step.kind not in KINDS:
            raise BadInput(f"expected a kind of {KINDS}, got {step.kind!r:.40}")
        if entry.numbers is not None and len(numbers) != entry.numbers:
            raise BadInput(f"expected {entry.numbers} numbers of {step.op}, got {len(numbers)}")
        if not all(type(n) in entry.numeric and abs(n) <= max(LARGEST, MAX_SIZE) for n in numbers):
            raise BadInput(f"expected numbers of {step.op}, got {numbers!r:.80}")
        if (span is not None) != (entry.constants is not None) and not (entry.optional and span is None):
            raise BadInput(f"expected constants where some are read, got {span!r:.80}")
        if span is not None and (not _is_span(span) or span[1] >= span[2]):
            raise BadInput(f"expected a span (tensor, first, end), got {span!r:.80}")

    def constants(
        step: AnyStep, kind: str, shape: Sequence[int], dtype: torch.dtype, weights: Sequence[Tensor]
    ) -> Constants:
        """int32 positions, or factors in this dtype. Raises BadInput for another dtype."""
        if step.index is None:
            return None, None
        if entry.constants == POSITIONS:
            return stored.positions(step.index, weights), None
        factors = stored.part(step.index, weights)
        if not factors.is_floating_point():
            raise BadInput(f"expected factors, got {factors.dtype}")
        return factors.to(dtype), None

    def check_stored(step: AnyStep, weights: Sequence[Tensor]) -> None:
        constants(step, step.kind, (), torch.float32, weights)

    return Row(
        entry.lowering,
        shape,
        run,
        ("xs", "call", "kind", "numbers", "index", "name"),
        Numbers,
        entry.kinds,
        kind_of_result,
        check,
        check_stored,
        constants,
        keeps_sign=entry.lowering == MOVED,
        called=entry,
    )


CHANNEL_KINDS = tuple(kind for kind in KINDS if kind != "matrices")  # channels are those of one image
IMAGE = ("image",)

#: op -> what it is
ROWS: dict[str, Row] = {
    "conv": Row(
        LAYER, _convolved_shape, _convolve, ("x", "weight", "bias", *Window._fields, "act", "add", "name"),
        Window, SPATIAL, _kind_of_conv, _check_conv, stored.check_layer, _layer_constants),
    "linear": Row(
        LAYER, lambda step, shapes, kind: (*shapes[0][:-1], step.fields.out), _multiply,
        ("x", "weight", "bias", "out", "act", "add", "name"), Outputs, ("tokens", "pixels"),
        check=_check_layer, check_stored=stored.check_layer, constants=_layer_constants),
    "pool": Row(
        POOL, _pooled_shape, _pool, ("x", *Pool._fields), Pool, IMAGE, check=_check_pool, keeps_sign=True),
    "mean": Row(
        MEAN, lambda step, shapes, kind: (*shapes[0][:2], *((1, 1) if step.fields.keep else ())),
        lambda step, kind, operands, constants: operands[0].mean((2, 3), keepdim=step.fields.keep),
        ("x", "keep"), Mean, IMAGE, lambda step, kind: kind if step.fields.keep else "tokens", _check_mean,
        keeps_sign=True),
    "flat": Row(
        FLAT, _flat_shape, lambda step, kind, operands, constants: operands[0].flatten(1), kinds=IMAGE,
        makes=lambda step, kind: "tokens", keeps_sign=True),
    "map": Row(ELEMENTWISE, _same_shape, _first, ("x", "act"), activates=True),
    "add": Row(ELEMENTWISE, _same_shape, _first, ("x", "z", "act"), keeps_sign=True, adds=True),
    "scale": Row(
        SCALE, _scaled_shape, lambda step, kind, operands, constants: operands[0] * operands[1],
        ("x", "z", "act"), kinds=IMAGE, keeps_sign=True),
    "cat": Row(
        JOIN, _joined_shape,
        lambda step, kind, operands, constants: torch.cat(list(operands), dim=channel_axis(kind)),
        ("xs",), kinds=CHANNEL_KINDS, keeps_sign=True),
    "select": Row(
        SELECTION, _selected_shape, _select, ("x", "index", *Selection._fields), Selection, CHANNEL_KINDS,
        _kind_of_selection, _check_selection, _check_stored_selection,
        _selection_constants, keeps_sign=True),
    **{name: _called(entry) for name, entry in CALLED.items()},
}  # fmt: skip
