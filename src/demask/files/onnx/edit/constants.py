"""Values of an ONNX file that no input changes, as ONNX Runtime computes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from demask.files.onnx.check import session
from demask.files.onnx.edit.protos import graph_reads, is_standard

RANDOM = ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
Arrays = Mapping[str, np.ndarray]


class FileConstants:
    """The constants of a file's main graph, by name: initializers, and what nodes compute from
    constants alone, when they are read first."""

    def __init__(self, model: Any):
        self.model = model
        self.tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self.sparse = {t.values.name: t for t in model.graph.sparse_initializer}
        self.names = {*self.tensors, *self.sparse}
        self.producers: dict[str, Any] = {}
        self.read: list[str] = []  # computed constants that nodes with inputs read
        for node in model.graph.node:
            operands = [name for name in node.input if name]
            if (
                is_standard(node)
                and node.op_type not in RANDOM
                and not graph_reads(node)
                and all(name in self.names for name in operands)
            ):
                self.names |= {name for name in node.output if name}
            else:
                self.read += [name for name in operands if name in self.names]
            self.producers |= {name: node for name in node.output if name}
        self._arrays: dict[str, np.ndarray] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of a constant."""
        stored = self.tensors.get(name) or self.sparse.get(name)
        return self[name].shape if stored is None else tuple(stored.dims)

    def __getitem__(self, name: str) -> np.ndarray:
        """The array of a constant; KeyError where the runtime cannot compute it."""
        from onnx import numpy_helper

        if name in self.tensors:  # without a cache, which would copy each weight
            return numpy_helper.to_array(self.tensors[name])
        if name in self.sparse:
            return _dense_array(self.sparse[name])
        if name not in self._arrays:
            wanted = [n for n in self.read if n not in self.tensors and n not in self._arrays]
            self._arrays |= evaluated(self.model, {*wanted, name}, self.names)
        return self._arrays[name]


def _dense_array(tensor: Any) -> np.ndarray:
    """The array of a sparse tensor, whose indices are flat or one row per value."""
    from onnx import numpy_helper

    values, indices = map(numpy_helper.to_array, (tensor.values, tensor.indices))
    dense = np.zeros(list(tensor.dims), values.dtype)
    dense[tuple(indices.T) if indices.ndim > 1 else np.unravel_index(indices, dense.shape)] = values
    return dense


def evaluated(
    model: Any, names: Iterable[str], known: Iterable[str], feeds: Arrays | None = None
) -> dict[str, np.ndarray]:
    """Values of some names in ONNX Runtime, without its optimizations; all or nothing.

    known: names that can be computed; nodes of others are left out. feeds: inputs of the graph.
    """
    part = part_of(model, set(names), set(known), keep_inputs=feeds is not None)
    outputs = [value.name for value in part.graph.output]
    if not outputs:
        return {}
    try:
        runner = session(part.SerializeToString(), optimized=False)
        if runner is None:
            from onnx.reference import ReferenceEvaluator

            runner = ReferenceEvaluator(part)
        arrays = runner.run(outputs, dict(feeds or {}))
    except Exception:  # its exceptions share no base class
        return {}
    return {n: a for n, a in zip(outputs, arrays, strict=True) if isinstance(a, np.ndarray)}


def part_of(model: Any, names: set[str], known: set[str], *, keep_inputs: bool) -> Any:
    """The part of a file that computes some names."""
    import onnx

    needed, nodes = set(names), []
    for node in reversed(model.graph.node):
        if needed & set(node.output) and known >= {name for name in node.output if name}:
            nodes.append(node)
            needed |= {*node.input, *graph_reads(node)}
    part = onnx.ModelProto()
    part.ir_version = model.ir_version
    part.opset_import.extend(model.opset_import)
    part.functions.extend(model.functions)
    part.graph.name = "part"
    part.graph.node.extend(reversed(nodes))
    part.graph.initializer.extend(t for t in model.graph.initializer if t.name in needed)
    part.graph.sparse_initializer.extend(t for t in model.graph.sparse_initializer if t.values.name in needed)
    if keep_inputs:
        part.graph.input.extend(model.graph.input)
    computed = {name for node in nodes for name in node.output}
    part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(names & computed))
    return part
