"""Replacement of inputs of an ONNX file by constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files.onnx.model import OnnxFile, OnnxNode
from demask.files.onnx.values import NUMPY
from demask.graph.provenance import NAMELESS, OnnxPort

#: by the kind of number that an input takes, the kinds (of numpy) that its value may have
_KINDS = {"bool": "b", "int": "iu", "float": "iuf", "complex": "iufc"}


def fix_inputs(file: OnnxFile, values: Mapping[str, Any]) -> OnnxFile:
    """The file with constants in place of some inputs; sizes that those inputs name become numbers.

    Args:
        values: a number, list, array or tensor by the name of the input.

    Raises:
        BadInput: no input has the name, or the value does not fit it.
    """
    ports = {port.name: port for port in file.graph.inputs}
    for name in values:
        if name not in ports:
            raise BadInput(f"no input {name!r} to fix; expected one of {list(ports)}")
    tensors = {name: _fitted(ports[name], value) for name, value in values.items()}
    sizes = _named_sizes(ports, tensors)
    nodes = [OnnxNode("Constant", "", "", (), (name,), {"value": t}) for name, t in tensors.items()]
    graph = replace(
        file.graph,
        nodes=(*nodes, *file.graph.nodes),
        inputs=tuple(_sized(p, sizes) for p in file.graph.inputs if p.name not in tensors),
        outputs=tuple(_sized(p, sizes) for p in file.graph.outputs),
    )
    return replace(file, graph=graph)


def _fitted(port: OnnxPort, value: Any) -> Tensor:
    """A value as a tensor of an input's dtype and sizes; BadInput where it does not fit."""
    what, dtype = f"input {port.name!r}", getattr(torch, port.dtype or "-", None)
    if not isinstance(dtype, torch.dtype):
        raise BadInput(f"{what} takes no tensor of numbers ({port.dtype or 'text'}): leave it open")
    try:
        array = _array(value)
        source = torch.from_numpy(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"{what}: expected a number, a list or an array, got {value!r}") from error
    if array.size and array.dtype.kind not in _KINDS[_kind(dtype)]:
        raise BadInput(f"{what}: expected {port.dtype}, got {array.dtype}")
    tensor = source.to(dtype)
    if not _is_exact(tensor, array):
        raise BadInput(f"{what}: expected numbers that {port.dtype} has, got {value!r}")
    sizes = array.shape if port.sizes is None else port.sizes
    pairs = list(zip(sizes, array.shape, strict=False))
    if len(sizes) != array.ndim or any(isinstance(n, int) and n != m for n, m in pairs):
        raise BadInput(f"{what}: expected sizes {list(sizes)}, got {list(array.shape)}")
    return tensor


def _array(value: Any) -> np.ndarray:
    """A copy of a caller's value, as an array of native byte order."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value if value.dtype in NUMPY else value.float()).numpy()
    array = np.array(value)
    # By name: torch does not accept some 64-bit dtypes and byte orders.
    return array.astype(np.dtype(array.dtype.newbyteorder("=").str))


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "int"


def _is_exact(tensor: Tensor, array: np.ndarray) -> bool:
    """Whether a tensor has the numbers of an array, except for rounding: no overflow."""
    if not array.size or _kind(tensor.dtype) in ("bool", "complex"):
        return True
    if _kind(tensor.dtype) == "int":
        limits = torch.iinfo(tensor.dtype)
        return limits.min <= int(array.min()) and int(array.max()) <= limits.max
    return bool((tensor.float().isfinite() | ~torch.from_numpy(array).isfinite()).all())


def _named_sizes(ports: Mapping[str, OnnxPort], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The numbers of named sizes, from the shapes of the constants."""
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        for size, n in zip(ports[name].sizes or (), tensor.shape, strict=False):
            if isinstance(size, int) or size in NAMELESS:
                continue
            if sizes.setdefault(size, n) != n:
                raise BadInput(f"size {size!r}: expected one number, got {sizes[size]} and {n}")
    return sizes


def _sized(port: OnnxPort, sizes: Mapping[str, int]) -> OnnxPort:
    if port.sizes is None:
        return port
    return replace(port, sizes=tuple(n if isinstance(n, int) else sizes.get(n, n) for n in port.sizes))
