"""Types and sizes of what ops compute that demask has no function for, and a call for such
an op in a program."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.files.onnx.check import inputs_of, longer_inputs
from demask.files.onnx.edit.constants import evaluated
from demask.files.onnx.edit.protos import attributes_of, graph_reads, is_standard
from demask.files.onnx.read.tensors import DTYPES

Dimension = int | tuple[int, int] | None  # a size; that of an axis (operand, axis); any
SAME_SIZES = ("BatchNormalization", "Elu", "Erf", "Exp", "Gelu", "HardSwish", "Identity",
              "InstanceNormalization", "LayerNormalization", "LeakyRelu", "Mish", "Neg", "Relu",
              "Sigmoid", "Softmax", "Softplus", "Sqrt", "Tanh")  # fmt: skip
Type = tuple[int, list[int | str | None] | None]  # of an element, as a number; sizes


def opaque_outputs(model: Any, feeds: Mapping[str, np.ndarray], names: Collection[str]) -> dict[str, OpaqueOutput]:
    """The outputs of some nodes, by name, without those whose type or number of axes is unknown.

    A size is that of an axis of an operand if the file names both alike, or if shape inference
    derives none and the runtime computes equal sizes on two examples. What neither infers is read
    off the nodes that read the output.
    """
    readers = {o: node for node in model.graph.node for o in node.output if o}
    producers = set(readers)
    operands = {n for name in names for n in _operands(readers[name])}
    wanted = {n for n in (*names, *operands) if n in producers}
    examples = (dict(feeds), longer_inputs(inputs_of(model), feeds))
    runs = [evaluated(model, wanted, producers, example) for example in examples]
    # Shape inference ends the process on some invalid files, which the runtime refuses.
    is_run = bool(runs[0]) or not all(map(is_standard, model.graph.node))
    declared = declared_types(model, infer=is_run)
    runs = [run | example for run, example in zip(runs, examples, strict=True)]
    outputs = {}
    for name in names:
        tensors = _operands(readers[name])
        dtype, dims = declared.get(name, (0, None))
        arrays = [run.get(name) for run in runs]
        if dims is None and arrays[0] is None:
            dtype, dims = _type_as_read(model, name, declared)
        if dims is None and arrays[0] is None:
            continue
        if arrays[0] is not None and arrays[0].dtype.kind in "OUS":
            continue
        if dims is None:
            dims = [None] * (0 if arrays[0] is None else arrays[0].ndim)
        kind = arrays[0].dtype if arrays[0] is not None else DTYPES.get(dtype)
        if kind is None:
            continue
        sizes = [
            n if isinstance(n, int) else _equal_axis(k, n, tensors, name, declared, runs, is_standard(readers[name]))
            for k, n in enumerate(dims)
        ]
        outputs[name] = OpaqueOutput(str(kind).removeprefix("torch."), tuple(sizes))
    return outputs


def _operands(node: Any) -> list[str]:
    return [name for name in (*node.input, *graph_reads(node)) if name]


def _type_as_read(model: Any, name: str, declared: Mapping[str, Type]) -> Type:
    """Element type and sizes that the readers of a value require."""
    if declared.get(name, (0, None))[1] is not None:
        return declared[name]
    tensors = {t.name: t for t in model.graph.initializer}
    types: list[Type] = [(0, None)]
    for node in model.graph.node:
        if name not in node.input or not node.output or not is_standard(node):
            continue
        attributes, op = attributes_of(node), node.op_type
        weights = tensors.get(node.input[1]) if len(node.input) > 1 else None
        if op in SAME_SIZES:
            types.append(_type_as_read(model, node.output[0], declared))
        elif weights is None or len(weights.dims) < 2 or name != node.input[0] or name in node.input[1:]:
            continue
        elif op == "MatMul" and len(weights.dims) == 2:
            dims = _type_as_read(model, node.output[0], declared)[1]
            if dims is not None and len(dims) > 1:
                types.append((weights.data_type, [*dims[:-1], weights.dims[0]]))
        elif op == "Gemm" and not attributes.get("transA"):
            types.append((weights.data_type, [None, weights.dims[bool(attributes.get("transB"))]]))
        elif op in ("Conv", "ConvTranspose"):
            groups = attributes.get("group", 1)
            size = weights.dims[1] * groups if op == "Conv" else weights.dims[0]
            types.append((weights.data_type, [None, size, *[None] * (len(weights.dims) - 2)]))
    return next((t for t in types if t[1] is not None), types[0])


def declared_types(model: Any, *, infer: bool) -> dict[str, Type]:
    """Element type and sizes that the file states, or shape inference derives, by name."""
    from onnx import shape_inference

    try:
        graph = shape_inference.infer_shapes(model).graph if infer else model.graph
    except Exception:  # larger than a message, or invalid for it
        graph = model.graph
    values = {}
    for value in (*graph.value_info, *graph.input, *graph.output):
        kind = value.type.tensor_type
        dims = None
        if kind.HasField("shape"):
            dims = [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in kind.shape.dim]
        values[value.name] = (kind.elem_type, dims)
    return values


def _equal_axis(
    k: int, size: Any, operands: list[str], name: str, declared: Any, runs: Any, standard: bool
) -> Dimension:
    """The axis of an operand that has the size of axis k of an output; None if there is none."""
    first, second = (run.get(name) for run in runs)
    for at, operand in enumerate(operands):
        dims = declared.get(operand, (0, None))[1] or []
        if size and size in dims:
            return at, dims.index(size)
    if first is None or second is None:
        return None
    pair = (int(first.shape[k]), int(second.shape[k]))
    if pair[0] == pair[1]:  # an op of ONNX without inferred sizes has sizes that depend on data
        return None if standard else pair[0]
    for at, operand in enumerate(operands):
        arrays = [run.get(operand) for run in runs]
        if any(array is None for array in arrays):
            continue
        pairs = list(zip(arrays[0].shape, arrays[1].shape, strict=True))
        if pair in pairs:
            return at, pairs.index(pair)
    return None


@dataclass(frozen=True, slots=True)
class OpaqueOutput:
    """An output: its dtype ("float32") and sizes."""

    dtype: str
    sizes: tuple[Dimension, ...]


# Nothing may run it ahead: not where all that it reads is stored, either.
@torch.library.custom_op("demask::opaque", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def opaque(operands: list[Tensor], dtypes: str, ranks: list[int], operand: list[int], axis: list[int]) -> list[Tensor]:
    """Stands in a program that is analyzed, never run, for a call that demask has no function for.

    Args:
        operands: all tensors that the call reads.
        dtypes: of the outputs, comma-separated. ranks: of each output.
        operand, axis: of each dimension of all outputs: an axis of an operand; (-1, n) for a fixed
            size n; (-2, 0) for a size that depends on data.
    """
    return _empty_outputs(operands, dtypes, ranks, operand, axis, lambda: 1)


@opaque.register_fake
def _(operands: list[Tensor], dtypes: str, ranks: list[int], operand: list[int], axis: list[int]) -> list[Tensor]:
    context = torch.library.get_ctx()
    return _empty_outputs(operands, dtypes, ranks, operand, axis, context.new_dynamic_size)


def _empty_outputs(operands, dtypes, ranks, operand, axis, new_size) -> list[Tensor]:
    def size(k: int, at: int):
        return operands[k].shape[at] if k >= 0 else at if k == -1 else new_size()

    sizes, outputs = iter(zip(operand, axis, strict=True)), []
    for dtype, rank in zip(dtypes.split(","), ranks, strict=True):
        shape = [size(*next(sizes)) for _ in range(rank)]
        outputs.append(torch.zeros(shape, dtype=getattr(torch, dtype)))
    return outputs


def opaque_call(operands: Sequence[Tensor], outputs: Sequence[OpaqueOutput]) -> list[Tensor]:
    """The outputs of a call."""
    pairs = [(-2, 0) if n is None else (-1, n) if isinstance(n, int) else n for output in outputs for n in output.sizes]
    return torch.ops.demask.opaque(
        list(operands),
        ",".join(o.dtype for o in outputs),
        [len(o.sizes) for o in outputs],
        [k for k, _ in pairs],
        [at for _, at in pairs],
    )
