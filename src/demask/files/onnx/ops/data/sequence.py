"""ONNX ops on sequences (lists) and on optional values (None if absent)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files.onnx.op_functions import Int, Ops, Value
from demask.files.onnx.values import Host, number_of, numbers_of

OPS = Ops()

OPS("SequenceEmpty")(lambda *, dtype=1: [])


@OPS("SequenceConstruct")
def sequence_of(*elements: Value) -> list[Value]:
    """The inputs as a sequence."""
    return list(elements)


def _listed(sequence: Value) -> list[Any]:
    if not isinstance(sequence, list):
        raise BadInput(f"expected a sequence, got {type(sequence).__name__}")
    return sequence


def _nonnegative(position: int, end: int) -> int:
    """A position as a non-negative number; BadInput outside of [-end, end]."""
    if not -end <= position <= end:
        raise BadInput(f"expected a position in [{-end}, {end}], got {position}")
    return position + end if position < 0 else position


@OPS("SequenceInsert")
def inserted(sequence: Value, element: Value, position: Int | None = None) -> list[Value]:
    """The sequence with an element inserted at a position, by default at the end."""
    elements = _listed(sequence)
    end = len(elements)
    index = end if position is None else _nonnegative(position, end)
    return [*elements[:index], element, *elements[index:]]


@OPS("SequenceErase")
def erased(sequence: Value, position: Int = -1) -> list[Value]:
    """The sequence without the element at a position, by default the last."""
    elements = _listed(sequence)
    index = range(len(elements))[position]
    return [*elements[:index], *elements[index + 1 :]]


@OPS("SequenceAt")
def element(sequence: Value, position: Int) -> Value:
    """The element at a position, negative ones from the end."""
    return _listed(sequence)[position]


@OPS("SequenceLength")
def length(sequence: Value) -> Host:
    """The number of elements."""
    return Host.of(np.array(len(_listed(sequence))))


def _host_split(x: np.ndarray, split: np.ndarray | None = None, *, axis: int = 0, keepdims: int = 1) -> Any:
    length = x.shape[axis]
    if split is None:
        parts = [np.take(x, [k] if keepdims else k, axis) for k in range(length)]
    else:
        sizes = [split.item()] * -(-length // split.item()) if split.ndim == 0 else split.tolist()
        parts = np.split(x, np.cumsum(sizes)[:-1].astype(int), axis)
    return [np.asarray(part) for part in parts]


@OPS("SplitToSequence")
def split_to_sequence(
    x: Value, split: Value = None, *, axis: int = 0, keepdims: int = 1, as_tensor: Callable[[Value], Tensor]
) -> list[Value]:
    """Parts of x along an axis: of `split` sizes, or of one size, where the last may be smaller."""
    if isinstance(x, Host) and x.folds and not isinstance(split, Tensor):
        sizes = None if split is None else split.array  # type: ignore[union-attr]
        return [Host.of(part, x.dtype) for part in _host_split(x.array, sizes, axis=axis, keepdims=keepdims)]
    tensor = as_tensor(x)
    if split is None:
        return list(tensor.split(1, axis) if keepdims else tensor.unbind(axis))
    scalar = (split.array if isinstance(split, Host) else split).ndim == 0  # type: ignore[union-attr]
    return list(tensor.split(number_of(split) if scalar else numbers_of(split), axis))


@OPS("ConcatFromSequence")
def concatenated(sequence: Value, *, axis: int, new_axis: int = 0, as_tensor: Callable[[Value], Tensor]) -> Value:
    """The elements concatenated along an axis, or stacked along a new one."""
    elements = _listed(sequence)
    known = [v for v in elements if isinstance(v, Host) and (v.folds or v.dtype is None)]
    if known and len(known) == len(elements):
        arrays = [v.array for v in known]
        result = np.stack(arrays, axis) if new_axis else np.concatenate(arrays, axis)
        return Host.of(result, known[0].dtype)
    tensors = [as_tensor(v) for v in elements]
    return torch.stack(tensors, axis) if new_axis else torch.cat(tensors, axis)


@OPS("Optional")
def optional(x: Value = None, *, type: str = "") -> Value:
    """x, or None."""
    return x


@OPS("OptionalHasElement")
def has_element(x: Value = None) -> Host:
    """Whether there is a value."""
    return Host.of(np.array(x is not None))


@OPS("OptionalGetElement")
def got_element(x: Value) -> Value:
    """The value; BadInput if there is none."""
    if x is None:
        raise BadInput("expected an optional that has a value, got an empty one")
    return x
