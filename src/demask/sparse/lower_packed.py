"""`demask::packed_linear` in graphs and files: as `aten.linear` with the dense weight, which every library knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.ops import schema
from demask.ops.custom import CustomOp
from demask.registry import CUSTOM_OPS
from demask.sparse.packed_linear import PACKED_LINEAR
from demask.sparse.products.packed import PackedMatrix, check_tensors
from demask.sparse.products.packed_product import to_dense


def _matrix_of(arguments: Mapping[str, Any]) -> PackedMatrix:
    size = arguments["rows"], arguments["columns"]
    return PackedMatrix(arguments["form"], size, tuple(arguments["tensors"]), arguments["scale"])


def run_densely(
    x: Tensor, tensors: list[Tensor], scale: Tensor | None, bias: Tensor | None, form: str, rows: int, columns: int
) -> Tensor:
    """The op by torch's own ops."""
    return F.linear(x, to_dense(PackedMatrix(form, (rows, columns), tuple(tensors), scale), x.dtype), bias)


def lower_packed(program: Program) -> Program:
    """The program with torch's linear layers, and dense weights, instead of packed ones."""
    editor = GraphEditor(program)
    for node in editor.calls(PACKED_LINEAR):
        arguments = schema.arguments(node)
        reads = [*arguments["tensors"], arguments["scale"]]
        known = [None if read is None else editor.tensor(read) for read in reads]
        *tensors, scale = known
        if any(read is not None and tensor is None for read, tensor in zip(reads, known, strict=True)):
            continue
        packed = _matrix_of(arguments | {"tensors": tensors, "scale": scale})
        value = node.meta.get("val")
        dense = to_dense(packed, packed.dtype if scale is None else torch.float32 if value is None else value.dtype)
        name = editor.constants[str(reads[0].target)].name.rpartition(".")[0]
        weight = editor.add_constant(f"{name}.weight".lstrip("."), dense, node, parameter=True)
        linear = editor.insert(node, node, torch.ops.aten.linear.default, arguments["x"], weight, arguments["bias"])
        editor.replace(node, linear)
    return editor.finish()


def check(arguments: Mapping[str, Any]) -> None:
    """Raise BadInput for tensors that are not those of a packed matrix."""
    if all(tensor is not None for tensor in arguments["tensors"]):
        check_tensors(_matrix_of(arguments))


CUSTOM_OPS.register("packed_linear", CustomOp(run_densely, lower_packed, check))
