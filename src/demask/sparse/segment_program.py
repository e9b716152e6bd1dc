"""A segment of a network as a value: steps over images and tokens, with weights as spans of
tensors.

A program defines what is computed, but not how: layouts, tiles and packed weights belong to a plan
(`sparse.plan`), which is for one machine and one size. It is text in graphs and files, so it is
untrusted until `SegmentProgram.parse` has checked it.

Value k is input k, or the output of step k - len(inputs). Kinds of values, by their tensors:

    image     [batch, channels, height, width]
    signal    [batch, channels, length]
    tokens    [..., channels]
    pixels    [batch, height, width, channels], an image with channels last
    matrices  [..., rows, columns], each with tokens of its own

Checks of the steps of segments, whose texts may come from files, and the shapes of values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any

from demask.errors import BadInput
from demask.ops.activations import ACTIVATIONS
from demask.sparse.segment_calls import CALLED
from demask.sparse.segment_steps import (
    CHANNELS_LAST,
    INPUTS,
    KINDS,
    LARGEST,
    MAX_SIZE,
    NAMES,
    STEPS,
    ActivationStep,
    CallStep,
    ConcatStep,
    ConvStep,
    FlattenStep,
    LinearStep,
    MeanStep,
    PoolStep,
    ScaleStep,
    SelectStep,
    Span,
    SparseWeight,
    Step,
    channel_axis,
    has_rank,
    reads,
)


def is_count(value: Any, least: int = 0) -> bool:
    """Whether a value is an integer from `least` to MAX_SIZE."""
    return type(value) is int and least <= value <= MAX_SIZE


def kind_of(step: Step, operands: Sequence[str]) -> str:
    """The kind of the output of a step. operands: kinds of its operands."""
    if isinstance(step, CallStep):
        entry = CALLED[step.call]
        is_of_kind = set(operands) == {step.kind} and step.kind in entry.kinds
        if entry.keeps_kind and not is_of_kind:
            raise BadInput(f"expected operands of the kind {step.kind}, got {operands}")
        return step.kind
    images = dict.fromkeys((PoolStep, MeanStep, FlattenStep, ScaleStep), ("image",))
    plain = tuple(kind for kind in KINDS if kind != "matrices")  # channels are those of one image
    some = {
        ConvStep: ("image", "signal"),
        LinearStep: ("tokens", "pixels"),
        ConcatStep: plain,
        SelectStep: plain,
        **images,
    }
    allowed = some.get(type(step), KINDS)
    if operands[0] not in allowed or len(set(operands)) != 1:
        raise BadInput(f"expected values of one kind of {allowed}, got {operands}")
    if isinstance(step, ConvStep) and operands[0] == "signal":
        first = step.kernel[0], step.stride[0], step.dilation[0], step.padding[0]
        if first != (1, 1, 1, (0, 0)):
            raise BadInput(f"expected a kernel of height 1 for a signal, got {step.kernel}")
    if isinstance(step, SelectStep) and operands[0] != "image" and step.stride != (1, 1):
        raise BadInput(f"expected stride 1 for {operands[0]}, got {step.stride}")
    if isinstance(step, FlattenStep) or (isinstance(step, MeanStep) and not step.keep):
        return "tokens"
    return operands[0]


def check_step(step: Step, known: int) -> None:
    """Raise BadInput for fields that are invalid for all sizes."""
    if not all(is_count(v) and v < known for v in reads(step)) or not reads(step):
        raise BadInput(f"expected values before it, got {reads(step)!r:.80}")
    if isinstance(step, MeanStep) and type(step.keep) is not bool:
        raise BadInput(f"expected a flag, got keep={step.keep!r:.40}")
    if isinstance(step, (ConvStep, LinearStep)):
        _check_layer(step)
    if isinstance(step, (ConvStep, PoolStep)):
        _check_window(step)
    if isinstance(step, SelectStep):
        _check_select(step)
    if isinstance(step, CallStep):
        _check_call(step)
    act = getattr(step, "act", None)
    if act is not None or isinstance(step, ActivationStep):
        _check_act(act)


def _check_layer(step: ConvStep | LinearStep) -> None:
    weight = step.weight
    spans = weight_spans(weight) + ([] if step.bias is None else [step.bias])
    for span in spans:
        if len(span) != 3 or not all(map(is_count, span)) or span[1] > span[2]:
            raise BadInput(f"expected spans (tensor, first, end), got {span!r:.80}")
    if not is_count(step.out, 1) or type(step.name) is not str:
        raise BadInput(f"expected output channels and a name, got {step.out!r}, {step.name!r:.40}")
    _check_weight(weight, step.out)
    for what, span in (("bias", step.bias), ("scale", weight.scale)):
        if span is not None and span[2] - span[1] != step.out:
            raise BadInput(f"expected a {what} per output channel, got {span}")


def _check_weight(weight: SparseWeight, rows: int) -> None:
    count = weight.values[2] - weight.values[1]
    if weight.csr is None:
        if (weight.crow, weight.col, weight.scale) != (None, None, None):
            raise BadInput(f"expected row starts and columns, or values alone, got {weight}")
        if count % rows:
            raise BadInput(f"expected values of {rows} rows, got {weight.values}")
        return
    _, crow, col = weight.csr
    if crow[2] - crow[1] != rows + 1:
        raise BadInput(f"expected {rows + 1} row starts, got {crow}")
    if count != col[2] - col[1]:
        raise BadInput(f"expected a column per value, got {weight.values} and {col}")


def _check_select(step: SelectStep) -> None:
    index, stride = step.index, step.stride
    if len(index) != 3 or not all(map(is_count, index)) or index[1] >= index[2]:
        raise BadInput(f"expected a span (tensor, first, end), got {index!r:.80}")
    if len(stride) != 2 or not all(is_count(n, 1) for n in stride):
        raise BadInput(f"expected two positive strides, got {stride!r:.80}")
    if type(step.padded) is not bool:
        raise BadInput(f"expected a flag, got padded={step.padded!r:.40}")


def _check_call(step: CallStep) -> None:
    entry = CALLED.get(step.call) if type(step.call) is str else None
    if type(step.name) is not str:
        raise BadInput(f"expected a name, got {step.name!r:.40}")
    if entry is None or step.kind not in KINDS:
        raise BadInput(f"expected a call of {sorted(CALLED)}, got {step.call!r:.40}")
    for what, number, limit in (
        ("operands", len(step.xs), entry.operands),
        ("numbers", len(step.numbers), entry.numbers),
    ):
        if limit is not None and number != limit:
            raise BadInput(f"expected {limit} {what} of {step.call}, got {number}")
    if not all(type(n) in entry.numeric and abs(n) <= max(LARGEST, MAX_SIZE) for n in step.numbers):
        raise BadInput(f"expected numbers of {step.call}, got {step.numbers!r:.80}")
    is_read = step.index is not None
    if is_read != (entry.constants is not None) and not (entry.optional and not is_read):
        raise BadInput(f"expected constants where some are read, got {step.index!r:.80}")
    span = step.index
    if span is not None and (len(span) != 3 or not all(map(is_count, span)) or span[1] >= span[2]):
        raise BadInput(f"expected a span (tensor, first, end), got {span!r:.80}")


def _check_window(step: ConvStep | PoolStep) -> None:
    for key in ("kernel", "stride", "dilation"):
        sizes = getattr(step, key)
        if len(sizes) != 2 or not all(is_count(n, 1) for n in sizes):
            raise BadInput(f"expected two positive {key} sizes, got {sizes!r:.80}")
    if len(step.padding) != 2:
        raise BadInput(f"expected padding of two axes, got {step.padding!r:.80}")
    if isinstance(step, ConvStep):
        _check_conv(step)
        return
    if not all(map(is_count, step.padding)) or any(2 * p > k for p, k in zip(step.padding, step.kernel, strict=True)):
        raise BadInput(f"expected padding of at most half the kernel, got {step.padding!r:.80}")
    if any(type(flag) is not bool for flag in (step.mean, step.ceil, step.counted)):
        raise BadInput(f"expected flags, got {step.mean!r}, {step.ceil!r}, {step.counted!r}")
    if step.mean and step.dilation != (1, 1):
        raise BadInput(f"expected a mean of windows without dilation, got {step.dilation}")


def _check_conv(step: ConvStep) -> None:
    if not is_count(step.groups, 1) or step.out % step.groups:
        raise BadInput(f"expected groups that divide {step.out}, got {step.groups!r}")
    if type(step.transposed) is not bool:
        raise BadInput(f"expected a flag, got transposed={step.transposed!r}")
    for axis, pair in enumerate(step.padding):
        limit = max(step.stride[axis], step.dilation[axis]) if step.transposed else 1
        is_pair = type(pair) is tuple and len(pair) == 2
        if not is_pair or not is_count(pair[0]) or not is_count(pair[1], 1 - limit):
            raise BadInput(f"expected padding (before, after) per axis, got {step.padding!r:.80}")


def _check_act(act: Any) -> None:
    known = type(act) is tuple and len(act) == 2 and act[0] in ACTIVATIONS
    numbers = act[1] if known else ()
    if not known or len(numbers) != ACTIVATIONS[act[0]].count:
        raise BadInput(f"expected an activation of {sorted(ACTIVATIONS)}, got {act!r:.80}")
    if not all(type(n) in (int, float) and (abs(n) <= LARGEST or abs(n) == inf) for n in numbers):
        raise BadInput(f"expected numbers, got {act!r:.80}")


def shape_of_step(step: Step, shapes: Sequence[tuple[Any, ...]], kind: str) -> tuple[Any, ...]:
    """The shape of the output of a step."""
    x = shapes[reads(step)[0]]
    if isinstance(step, CallStep):
        count = 0 if step.index is None else step.index[2] - step.index[1]
        operands = [tuple(shapes[v]) for v in step.xs]
        return _check_kind(CALLED[step.call].shape(operands, step.numbers, count), step.kind)
    if isinstance(step, LinearStep):
        return _check_added_shape(step, shapes, (*x[:-1], step.out))
    if isinstance(step, ConvStep):
        if x[1] % step.groups:
            raise BadInput(f"expected channels in {step.groups} groups, got {x[1]}")
        height = (1,) if len(x) == 3 else ()
        sizes = _convolved(step, (*height, *x[2:]))
        return _check_added_shape(step, shapes, (x[0], step.out, *sizes[len(height) :]))
    if isinstance(step, PoolStep):
        return (x[0], x[1], *_pooled(step, x[2:]))
    if isinstance(step, MeanStep):
        return (x[0], x[1], 1, 1) if step.keep else (x[0], x[1])
    if isinstance(step, FlattenStep):
        if x[2] != 1 or x[3] != 1:
            raise BadInput(f"expected images of one pixel, got {x}")
        return (x[0], x[1])
    if isinstance(step, ConcatStep):
        return _joined([shapes[v] for v in step.xs], channel_axis(kind) % len(x))
    if isinstance(step, SelectStep):
        if kind != "image":
            last = kind in CHANNELS_LAST
            return (*x[:-1], step.out) if last else (x[0], step.out, x[2])
        return (x[0], step.out, *(-(-n // s) for n, s in zip(x[2:], step.stride, strict=True)))
    if isinstance(step, ScaleStep):
        if tuple(shapes[step.z]) != (x[0], x[1], 1, 1):
            raise BadInput(f"expected one factor per channel of {x}, got {shapes[step.z]}")
        return x
    return _check_added_shape(step, shapes, x)


def _check_kind(shape: tuple[Any, ...], kind: str) -> tuple[Any, ...]:
    """The shape. Raises BadInput if it is not one of that kind."""
    if not has_rank(kind, len(shape)):
        raise BadInput(f"expected the shape of {kind}, got {shape}")
    return shape


def _joined(shapes: Sequence[tuple[Any, ...]], axis: int) -> tuple[Any, ...]:
    """The shape of values concatenated along an axis."""
    other_sizes = [(*shape[:axis], *shape[axis + 1 :]) for shape in shapes]
    if any(sizes != other_sizes[0] for sizes in other_sizes):
        raise BadInput(f"expected shapes that differ only in axis {axis}, got {shapes}")
    total = shapes[0][axis]
    for shape in shapes[1:]:
        total = total + shape[axis]
    return (*shapes[0][:axis], total, *shapes[0][axis + 1 :])


def check_positive(shape: tuple[Any, ...], kind: str) -> tuple[Any, ...]:
    """The shape. Raises BadInput if an image is empty or too large (symbolic sizes pass)."""
    sizes = () if kind in CHANNELS_LAST else shape[2:]
    if any(isinstance(size, int) and not 1 <= size <= MAX_SIZE for size in sizes):
        raise BadInput(f"expected windows that fit into the input, got an output of {shape}")
    return shape


def _check_added_shape(step: Step, shapes: Sequence[tuple[Any, ...]], shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """`shape`. Raises BadInput if the added value has another shape."""
    addend = getattr(step, "add", None)
    addend = getattr(step, "z", None) if addend is None else addend
    if addend is not None and tuple(shapes[addend]) != shape:
        raise BadInput(f"expected {shape} to be added, got {shapes[addend]}")
    return shape


def _convolved(step: ConvStep, sizes: Sequence[Any]) -> list[Any]:
    """Output sizes of a convolution."""
    outputs = []
    for axis, size in enumerate(sizes):
        reach = step.dilation[axis] * (step.kernel[axis] - 1)
        padding_before, padding_after = step.padding[axis]
        if step.transposed:
            outputs.append((size - 1) * step.stride[axis] + reach + 1 - padding_before - padding_after)
        else:
            outputs.append((size + padding_before + padding_after - reach - 1) // step.stride[axis] + 1)
    return outputs


def _pooled(step: PoolStep, sizes: Sequence[Any]) -> list[Any]:
    """Output sizes of a pool."""
    outputs = []
    for axis, size in enumerate(sizes):
        reach, pad = step.dilation[axis] * (step.kernel[axis] - 1), step.padding[axis]
        stride = step.stride[axis]
        last_start = size + 2 * pad - reach - 1 + (stride - 1 if step.ceil else 0)
        count = last_start // stride + 1
        if step.ceil and (count - 1) * stride >= size + pad:
            count = count - 1
        outputs.append(count)
    return outputs


def weight_spans(weight: SparseWeight) -> list[Span]:
    spans = [weight.values] if weight.csr is None else list(weight.csr)
    return spans if weight.scale is None else [*spans, weight.scale]


MAX_TEXT = 4_000_000  # characters of a program: ResNet-152 has 60,000


@dataclass(frozen=True, slots=True)
class SegmentProgram:
    """Steps from inputs to outputs. inputs: kind of each input; outputs: numbers of values.

    static: numbers of inputs that are the same tensors in many calls, such as border maps: a plan
    converts them to its layout once, and again only when they change.
    """

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    static: tuple[int, ...] = ()
    kinds: tuple[str, ...] = field(init=False, compare=False)  # of every value

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", _kinds(self))

    def text(self) -> str:
        """The program as one line of JSON, read by `SegmentProgram.parse`."""
        steps = [{"op": NAMES[type(s)], **_changed_fields(s)} for s in self.steps]
        document: dict[str, Any] = {"inputs": self.inputs, "steps": steps, "outputs": self.outputs}
        if self.static:
            document["static"] = self.static
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> SegmentProgram:
        """The program of a text. Raises BadInput if the text is not a valid program."""
        if len(text) > MAX_TEXT:
            raise BadInput(f"expected a program of at most {MAX_TEXT} characters, got {len(text)}")
        try:
            document = json.loads(text)
            steps = tuple(_step(dict(entry)) for entry in document["steps"])
            numbers = (tuple(document.get(key, ())) for key in ("outputs", "static"))
            return cls(tuple(document["inputs"]), steps, *numbers)
        except BadInput:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadInput(f"expected a program as written by SegmentProgram.text: {error!r:.200}") from None

    def shapes(self, inputs: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        """The shape of every value; sizes may be symbolic.

        Raises BadInput if the inputs or steps do not match.
        """
        if len(inputs) != len(self.inputs):
            raise BadInput(f"expected {len(self.inputs)} inputs, got {len(inputs)}")
        shapes: list[tuple[Any, ...]] = []
        for kind, shape in zip(self.inputs, inputs, strict=True):
            if not has_rank(kind, len(shape)):
                raise BadInput(f"expected {kind}, got a tensor of shape {tuple(shape)}")
            shapes.append(tuple(shape))
        for number, step in enumerate(self.steps):
            kind = self.kinds[reads(step)[0]]
            try:
                shapes.append(check_positive(shape_of_step(step, shapes, kind), kind))
            except BadInput as error:
                raise BadInput(f"step {number} ({NAMES[type(step)]}): {error}") from None
        return shapes


def _changed_fields(step: Step) -> dict[str, Any]:
    """The fields of a step that differ from their defaults."""
    changed = {}
    for f in fields(step):
        value = getattr(step, f.name)
        if value != f.default:
            changed[f.name] = weight_spans(value) if isinstance(value, SparseWeight) else value
    return changed


def _step(entry: dict[str, Any]) -> Step:
    kind = STEPS[entry.pop("op")]
    known = {f.name for f in fields(kind)}
    if set(entry) - known:
        raise BadInput(f"expected the fields {sorted(known)}, got {sorted(entry)}")
    values = {key: _tupled(value) for key, value in entry.items()}
    if "weight" in values:
        values["weight"] = SparseWeight(*values["weight"])
    return kind(**values)


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def _kinds(program: SegmentProgram) -> tuple[str, ...]:
    """The kind of each value. Raises BadInput for steps with invalid fields."""
    kinds: list[str] = []
    for kind in program.inputs:
        if kind not in INPUTS:
            raise BadInput(f"expected inputs of the kinds {INPUTS}, got {kind!r:.40}")
        kinds.append(kind)
    for number, step in enumerate(program.steps):
        try:
            check_step(step, len(kinds))
            kinds.append(kind_of(step, [kinds[v] for v in reads(step)]))
        except BadInput as error:
            raise BadInput(f"step {number} ({NAMES[type(step)]}): {error}") from None
    if not program.outputs or not all(is_count(v) and v < len(kinds) for v in program.outputs):
        raise BadInput(f"expected outputs among {len(kinds)} values, got {program.outputs!r:.80}")
    input_count = len(program.inputs)
    if not all(is_count(v) and v < input_count for v in program.static):
        raise BadInput(f"expected static inputs below {input_count}, got {program.static!r:.80}")
    return tuple(kinds)
