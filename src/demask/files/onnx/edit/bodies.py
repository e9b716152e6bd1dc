"""Branches of `If` and bodies of loops, each edited as a file of its own.

What a body reads from the graph around it, and what it returns, is not cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import DemaskError, Mismatch
from demask.failures import is_strict
from demask.files.onnx.check import Judge
from demask.files.onnx.edit.constants import evaluated
from demask.files.onnx.edit.foreign import declared_types
from demask.files.onnx.edit.protos import (
    attributes_of,
    copy_of,
    graph_names,
    graph_reads,
    is_standard,
    outer_reads,
    rename,
    subgraphs,
    tensors_of,
)

LEAST_BYTES = 4096  # of tensors in a body that is worth an edit of its own
Arrays = Mapping[str, np.ndarray]
EditModel = Callable[[Any, Sequence[Tensor]], Any]


def edit_bodies(model: Any, feeds: Arrays, edit: EditModel) -> Any:
    """The file with smaller bodies, or the file itself. edit: returns a smaller file, or the same
    one, for example inputs."""
    stored = {t.name: t for t in model.graph.initializer}
    places = [
        (k, j)
        for k, node in enumerate(model.graph.node)
        for j, body in enumerate(subgraphs(node))
        if sum(t.ByteSize() for t in tensors_of(body))
        + sum(stored[n].ByteSize() for n in set(outer_reads(body)) & set(stored))
        > LEAST_BYTES
    ]
    if not places:
        return model
    new, taken = copy_of(model), graph_names(model.graph)
    producers = {name for node in model.graph.node for name in node.output if name}
    reads = {n for k, j in places for n in outer_reads(subgraphs(model.graph.node[k])[j])}
    reads |= {name for k, _ in places for name in model.graph.node[k].input}
    computed = evaluated(model, reads & producers, producers, feeds)
    arrays, types = {**computed, **feeds}, declared_types(model, infer=bool(computed))
    for k, j in places:
        body = subgraphs(new.graph.node[k])[j]
        part = _as_file(model, model.graph.node[k], body, arrays, types)
        if part is None:
            continue
        file, inputs = part
        try:
            judge = Judge.of_file(file.SerializeToString(), inputs)
            if judge.original.outputs(inputs, optimized=True) is None:
                continue
            smaller = edit(file, inputs)
            if smaller is file:
                continue
            judge.compare(smaller.SerializeToString())
        except DemaskError as error:  # it stays as it is
            if is_strict() and isinstance(error, Mismatch):
                raise
            continue
        _put_back(body, smaller.graph, stored, taken)
    live = {n for node in new.graph.node for n in (*node.input, *graph_reads(node))}
    live |= {value.name for value in new.graph.output}
    for tensor in list(new.graph.initializer):
        if tensor.name not in live:
            new.graph.initializer.remove(tensor)
    return new if new.ByteSize() < model.ByteSize() else model


def _as_file(
    model: Any, node: Any, body: Any, arrays: Arrays, types: Mapping[str, Any]
) -> tuple[Any, tuple[Tensor, ...]] | None:
    """A body as a file, and example inputs. None where these are not known."""
    from onnx import ModelProto, helper

    examples = _body_inputs(node, body, arrays)
    stored = {t.name: t for t in model.graph.initializer}
    file = ModelProto(ir_version=model.ir_version)
    file.opset_import.extend(model.opset_import)
    file.functions.extend(model.functions)
    file.graph.CopyFrom(body)
    del file.graph.input[:]
    for name in dict.fromkeys(outer_reads(body)):
        if name in stored:
            file.graph.initializer.append(stored[name])
        else:
            examples.append((name, arrays.get(name), types.get(name, (0, None))[1]))
    for name, array, dims in examples:
        if array is None or array.dtype.kind not in "fiub":
            return None
        dims = dims if dims is not None and len(dims) == array.ndim else [None] * array.ndim
        sizes = [n or f"{name}.{axis}" for axis, n in enumerate(dims)]
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        file.graph.input.append(helper.make_tensor_value_info(name, kind, sizes))
    computed = {name for inner in file.graph.node for name in inner.output}
    if not computed.issuperset(value.name for value in file.graph.output):
        return None
    return file, tuple(torch.from_numpy(np.array(array)) for _, array, _ in examples)


def _body_inputs(node: Any, body: Any, arrays: Arrays) -> list[tuple[str, Any, Any]]:
    """Names, examples and sizes of the inputs of a loop's body: those of its first step."""
    values: list[Any] = [arrays.get(name) for name in node.input]
    if not is_standard(node) or node.op_type not in ("Loop", "Scan"):
        values = []
    elif node.op_type == "Loop":
        values = [np.array(0, np.int64), np.array(True), *values[2:]]
    else:
        attributes = attributes_of(node)
        count = attributes["num_scan_inputs"]
        axes = attributes.get("scan_input_axes") or [0] * count
        slices = [
            x if x is None else x.take(0, a) if x.shape[a] else None for x, a in zip(values[-count:], axes, strict=True)
        ]
        values = [*values[:-count], *slices]
    inputs = []
    for k, value in enumerate(body.input):
        shape = value.type.tensor_type.shape
        dims = [d.dim_value or d.dim_param or None for d in shape.dim]
        array = values[k] if k < len(values) else None
        inputs.append((value.name, array, dims if len(dims) else None))
    return inputs


def _put_back(body: Any, edited: Any, stored: Mapping[str, Any], taken: set[str]) -> None:
    """Replace a body by an edited one, in place. Tensors of the graph around it that were not cut
    are read from there; new names differ from all others in the file, and are added to `taken`."""
    before, inputs = graph_names(body), list(body.input)
    new = copy_of(edited)
    del new.input[:], new.initializer[:]
    new.input.extend(inputs)
    names: dict[str, str] = {}
    for tensor in edited.initializer:
        if tensor != stored.get(tensor.name):
            new.initializer.append(tensor)
            if tensor.name in stored:
                names[tensor.name] = tensor.name
    names |= {name: name for name in graph_names(new) - before if name in taken}
    for name in names:
        while names[name] in taken:
            names[name] += "_"
        taken.add(names[name])
    taken |= graph_names(new)
    rename(new, names)
    body.CopyFrom(new)
