"""ONNX ops that torch has no function for, run on numbers by onnx's reference implementation.

Here are those that end on any input, change nothing outside of their outputs and agree with ONNX Runtime. Others
have functions of their own: onnx's RegexFullMatch backtracks, StringNormalizer sets the process's locale, trees
follow cycles, LabelEncoder and linear models compute other values.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files.onnx.model import OnnxNode
from demask.files.onnx.op_functions import Ops, Value
from demask.files.onnx.values import BITS, NUMPY, TORCH, Host, numpy_of

ML, TRAINING = "ai.onnx.ml", "ai.onnx.preview.training"
OPS = Ops()


@OPS("MelWeightMatrix", "TfIdfVectorizer")
@OPS("FeatureVectorizer", "Imputer", "OneHotEncoder", "SVMRegressor", domain=ML)
@OPS("Adagrad", "Adam", "Momentum", domain=TRAINING)
def run_reference(*inputs: Value, node: OnnxNode, version: int, device: torch.device) -> tuple[Value, ...]:
    """What onnx computes for a node, as tensors; BadInput while `torch.export` captures calls on tensors."""
    from onnx import helper, numpy_helper
    from onnx.reference import ReferenceEvaluator

    names = [f"input{k}" if value is not None else "" for k, value in enumerate(inputs)]
    outputs = [f"output{k}" for k in range(len(node.outputs))]
    proto = helper.make_node(node.op, names, outputs, domain=node.domain)
    for key, value in node.attributes.items():
        if isinstance(value, Tensor | Host):
            value = numpy_helper.from_array(_input_array(value))
        if value != ():
            proto.attribute.append(helper.make_attribute(key, value))
    feeds = {name: _input_array(value) for name, value in zip(names, inputs, strict=True) if name}
    results = ReferenceEvaluator(proto, opsets={node.domain: version}).run(None, feeds)
    return tuple(_as_value(result, device) for result in results)  # type: ignore[arg-type]


def _input_array(value: object) -> np.ndarray:
    if isinstance(value, Tensor):
        if torch.compiler.is_compiling():
            raise BadInput("onnx's reference implementation computes it, on numbers that a capture does not have")
        return numpy_of(value)
    if not isinstance(value, Host) or (value.array.dtype == object and value.dtype is not None):
        raise BadInput(f"expected numbers or text, got {type(value).__name__} of unknown sizes")
    return value.array


def _as_value(array: np.ndarray, device: torch.device) -> Value:
    if array.dtype.kind in "OU":
        return Host.of(array.astype(object))
    if array.dtype in TORCH:
        return torch.from_numpy(array).to(device)
    bits = NUMPY[BITS[array.itemsize]]
    return torch.from_numpy(array.view(bits)).view(getattr(torch, array.dtype.name)).to(device)
