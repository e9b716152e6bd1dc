"""ONNX ops of ai.onnx.ml: encoders, linear models, trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files.onnx.op_functions import Ops, Value
from demask.files.onnx.values import Host, numbers_of

OPS = Ops("ai.onnx.ml")

OPS("Binarizer")(lambda x, *, threshold=0.0: (x > threshold).to(x.dtype))


@OPS("ArrayFeatureExtractor")
def array_feature_extractor(
    x: Value, places: Tensor, *, as_tensor: Callable[[Value], Tensor]
) -> Value:
    """Columns of x; of one row where x has a single axis."""
    if isinstance(x, Host) and x.dtype is None:
        return Host.of(np.atleast_2d(x.array[..., places.reshape(-1).tolist()]))
    columns = as_tensor(x).index_select(-1, places.reshape(-1))
    return columns.unsqueeze(0) if columns.ndim == 1 else columns


@OPS("LabelEncoder")
def label_encoder(
    x: Value, *, classes_strings: Sequence[str] | None = None, keys_floats: Any = None,
    keys_int64s: Any = None, keys_strings: Any = None, keys_tensor: Value = None,
    values_floats: Any = None, values_int64s: Any = None, values_strings: Any = None,
    values_tensor: Value = None, default_float: float = -0.0, default_int64: int = -1,
    default_string: str = "_Unused", default_tensor: Value = None, version: int,
    as_tensor: Callable[[Value], Tensor],
) -> Value:  # fmt: skip
    """For each element the value that stands beside it in a list of keys, or a default.

    Of equal keys the last counts, and NaN is one; before opset 4 the first, as in onnxruntime."""
    if classes_strings is not None:  # opset 1: positions and texts, one way or the other
        numbers = range(len(classes_strings))
        texts_come = isinstance(x, Host) and x.dtype is None
        keys_strings, values_int64s = (classes_strings, numbers) if texts_come else (None, None)
        keys_int64s, values_strings = (None, None) if texts_come else (numbers, classes_strings)
    keys = _first(keys_floats, keys_int64s, keys_strings, keys_tensor)
    values, default, dtype = _first(
        values_floats and (values_floats, default_float, torch.float32),
        values_int64s and (values_int64s, default_int64, torch.int64),
        values_strings and (values_strings, default_string, None),
        (values_tensor, default_tensor, getattr(values_tensor, "dtype", None)),
    )
    values = numbers_of(values)
    if default is None:
        default = "_Unused" if dtype is None else -0.0 if dtype.is_floating_point else -1
    default = numbers_of(default)[0] if isinstance(default, Host | Tensor) else default
    places = _places(x, numbers_of(keys), version >= 4, as_tensor)
    if dtype is None:
        words = np.array([default, *values], dtype=object)
        return Host.of(words[places.numpy(force=True)])
    return torch.tensor([default, *values], dtype=dtype, device=places.device)[places]


def _first(*found: Any) -> Any:
    return next(f for f in found if f is not None and f != ())


def _places(
    x: Value, keys: list[Any], last: bool, as_tensor: Callable[[Value], Tensor]
) -> Tensor:  # fmt: skip
    """Where each element stands among the keys, from 1; 0 where it does not."""
    order = list(range(1, len(keys) + 1))
    if isinstance(x, Host) and x.dtype is None:
        pairs = list(zip(keys, order, strict=True))
        known = dict(pairs if last else pairs[::-1])
        found = [known.get(text, 0) for text in x.array.flat]
        return torch.tensor(found, dtype=torch.int64).reshape(x.array.shape)
    tensor = as_tensor(x)
    options = torch.tensor(keys, dtype=tensor.dtype, device=tensor.device)
    same = tensor.unsqueeze(-1) == options
    if last:
        same = same | (tensor.isnan().unsqueeze(-1) & options.isnan())
    numbers = torch.tensor(order, device=tensor.device)
    if last:
        return torch.where(same, numbers, 0).amax(-1)
    first = torch.where(same, numbers, len(keys) + 1).amin(-1)
    return first.where(first <= len(keys), 0)


@OPS("Scaler")
def scaler(
    x: Tensor, *, offset: Sequence[float] = (0.0,), scale: Sequence[float] = (1.0,)
) -> Tensor:
    """(x - offset) * scale in float32, for each column or for all."""
    x = x.to(torch.float32)
    return (x - x.new_tensor(offset)) * x.new_tensor(scale)


@OPS("Normalizer")
def normalizer(x: Tensor, *, norm: str = "MAX") -> Tensor:
    """Rows divided by their norm; MAX is the largest number, with its sign, as in onnxruntime."""
    if norm not in ("L1", "L2", "MAX"):
        raise BadInput(f"expected norm MAX, L1 or L2, got {norm!r}")
    x = x.to(torch.float32)
    if norm == "MAX":
        size = x.amax(-1, keepdim=True)
    else:
        size = torch.linalg.vector_norm(x, 1.0 if norm == "L1" else 2.0, -1, keepdim=True)
    return x / torch.where(size == 0, 1.0, size)


def _transformed(scores: Tensor, name: str) -> Tensor:
    """Scores after `post_transform`."""
    if name == "NONE":
        return scores
    if name == "LOGISTIC":
        return torch.sigmoid(scores)
    if name == "SOFTMAX":
        return torch.softmax(scores, -1)
    raise BadInput(f"expected post_transform NONE, LOGISTIC or SOFTMAX, got {name!r}")


@OPS("LinearRegressor")
def linear_regressor(
    x: Tensor, *, coefficients: Sequence[float], intercepts: Sequence[float] = (),
    targets: int = 1, post_transform: str = "NONE",
) -> Tensor:  # fmt: skip
    """x @ coefficients + intercepts, in float32."""
    x = x.to(torch.float32)
    scores = x @ x.new_tensor(coefficients).reshape(targets, -1).T
    return _transformed(scores + x.new_tensor(intercepts) if intercepts else scores, post_transform)


@OPS("LinearClassifier")
def linear_classifier(
    x: Tensor, *, coefficients: Sequence[float], intercepts: Sequence[float] = (),
    classlabels_ints: Sequence[int] = (), classlabels_strings: Sequence[str] = (),
    multi_class: int = 0, post_transform: str = "NONE",
) -> tuple[Value, Tensor]:  # fmt: skip
    """The label with the largest score, and the scores of all."""
    x = x.to(torch.float32)
    labels = classlabels_strings or classlabels_ints
    rows = x.new_tensor(coefficients).reshape(-1, x.shape[-1])
    scores = x @ rows.T + (x.new_tensor(intercepts) if intercepts else 0.0)
    if rows.shape[0] == 1 and len(labels) == 2 and post_transform == "LOGISTIC":
        scores = torch.cat([-scores, scores], -1)
    if scores.shape[-1] != len(labels) or len(labels) < 2:
        raise BadInput(f"expected a label for each score, got {len(labels)} labels")
    best = scores.argmax(-1)
    scores = _transformed(scores, post_transform)
    if classlabels_strings:
        words = np.array(classlabels_strings, dtype=object)
        return Host.of(words[best.numpy(force=True)]), scores
    return torch.tensor(classlabels_ints, device=x.device)[best], scores
