"""Quantized networks in ONNX files: float weights converted back to the integers they came from.

`demask` works on dequantized floats. A runtime computes a layer in integers only if its weights are
integers in the file, so weights are converted back to their quantization grid where dequantizing
gives exactly the same floats.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx, nn

from demask.errors import BadInput
from demask.files.onnx.model import OnnxNode
from demask.graph.capture.fold_constants import plain_name
from demask.graph.module_copy import structural_copy
from demask.graph.provenance import Cut, QuantizationGrid
from demask.graph.result.demasked_module import Demasked, attach
from demask.graph.result.module_calls import lower_modules
from demask.ops import schema
from demask.ops.quantization import DTYPES, broadcast_scale, dequantize_values
from demask.ops.traits import CONVOLUTIONS

aten = torch.ops.aten
KINDS = {**DTYPES, "int32": torch.int32}  # dtypes of stored constants
FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # of scales
OFF = 1e-3  # largest distance of a bias from an integer: constants were added to it in float32
SINCE = 21  # the first op set that quantizes to 16 bits
FEW = 8  # elements of a row that preselect its scale
# Layers whose bias has, per channel, the scale of the input times the scale of the weight.
_LAYERS = (*CONVOLUTIONS, aten.linear.default)
_COPIES = re.compile(r"(_folded\d*|_\d+)+$")  # suffixes that passes add to names of constants


def grids_of(nodes: Iterable[OnnxNode], constants: Mapping[str, Any]) -> dict[str, QuantizationGrid]:
    """Grids of constants that are dequantized, directly or after QuantizeLinear, by name."""
    nodes = list(nodes)
    quantizers = {n.outputs[0]: n for n in nodes if (n.domain, n.op) == ("", "QuantizeLinear")}
    grids: dict[str, QuantizationGrid] = {}
    for node in nodes:
        if (node.domain, node.op) != ("", "DequantizeLinear") or not any(node.inputs[:1]):
            continue
        name = node.inputs[0]
        dtype = getattr(constants.get(name), "dtype", None)
        if name not in constants and name in quantizers:
            quantizer = quantizers[name]
            name, zero_point = quantizer.inputs[0], (*quantizer.inputs, "", "")[2]
            dtype = getattr(constants.get(zero_point), "dtype", torch.uint8)
        grid = _grid_of_node(node, dtype, constants) if name in constants else None
        if grid is not None:
            grids.setdefault(name, grid)
    return grids


def _grid_of_node(node: OnnxNode, dtype: Any, constants: Mapping[str, Any]) -> QuantizationGrid | None:
    _, scale, point = (*(constants.get(name) for name in node.inputs), None, None)[:3]
    kind, axis = str(dtype).removeprefix("torch."), node.attributes.get("axis", 1)
    if kind not in KINDS or not isinstance(scale, Tensor) or scale.ndim > 1:
        return None
    if len(node.inputs) > 2 and node.inputs[2] and not isinstance(point, Tensor):
        return None
    points = torch.zeros(scale.shape, dtype=torch.int32) if point is None else point
    is_positive = scale.is_floating_point() and bool((scale.isfinite() & (scale > 0)).all())
    if not is_positive or points.numel() != scale.numel() or not isinstance(axis, int):
        return None
    return QuantizationGrid(kind, axis, tuple(scale.reshape(-1).tolist()), tuple(points.reshape(-1).tolist()))


@dataclass(frozen=True, slots=True)
class QuantizedConstant:
    """A constant in integers; one scale and zero point, or one per position on `axis`."""

    integers: Tensor
    scale: Tensor
    zero_point: Tensor
    axis: int


def quantize_constants(slim: Demasked) -> Demasked:
    """The network with constants that came from a grid as integers that it dequantizes."""
    interface = slim.demasked.interface
    if interface is None or not interface.grids:
        return slim
    copy: Any = structural_copy(slim, share=True)
    grids = {plain_name(k): g for k, g in interface.grids.items()} | dict(interface.grids)
    lower_modules(copy.graph, copy)
    reads: dict[str, list[fx.Node]] = {}
    for node in copy.graph.find_nodes(op="get_attr"):
        reads.setdefault(str(node.target), []).append(node)
    constants: dict[str, QuantizedConstant] = {}
    for name in reads:
        cut = slim.demasked.cuts.get(name)
        source = name if cut is None else cut.source
        grid = grids.get(source) or grids.get(_COPIES.sub("", source))
        constant = None if grid is None else quantize_exactly(_tensor_at(copy, name), grid, cut)
        if constant is not None:
            constants[name] = constant
    for node in copy.graph.nodes:
        if node.target in _LAYERS:
            constants |= _bias_grid(copy, node, constants)
    for name, constant in constants.items():
        _insert_dequantize(copy, name, constant, reads[name])
    copy.recompile()
    return copy


def _tensor_at(module: nn.Module, name: str) -> Tensor:
    return reduce(getattr, name.split("."), module).detach()  # type: ignore[arg-type]


def _insert_dequantize(
    module: fx.GraphModule, name: str, constant: QuantizedConstant, reads: Iterable[fx.Node]
) -> None:
    """Replace a constant of the graph by integers and a call that dequantizes them."""
    above, _, leaf = name.rpartition(".")
    delattr(module.get_submodule(above), leaf)
    attach(module, name, constant.integers)
    paths = [_unused_name(module, f"{name}_{what}") for what in ("scale", "zero_point")]
    for path, tensor in zip(paths, (constant.scale, constant.zero_point), strict=True):
        attach(module, path, tensor)
    for read in reads:
        with module.graph.inserting_after(read):
            grid = [module.graph.create_node("get_attr", path) for path in paths]
        with module.graph.inserting_after(grid[0]):
            target = torch.ops.demask.dequantize.default
            call = module.graph.call_function(target, (read, *grid, constant.axis))
        read.replace_all_uses_with(call, lambda user, call=call: user is not call)


def _unused_name(module: nn.Module, name: str) -> str:
    names = {n for n, _ in (*module.named_parameters(), *module.named_buffers())}
    return next(n for k in range(len(names) + 1) if (n := f"{name}_{k}" if k else name) not in names)


def quantize_exactly(tensor: Tensor, grid: QuantizationGrid, cut: Cut | None = None) -> QuantizedConstant | None:
    """A float constant in integers; None where dequantizing does not give equal floats.

    cut: how the tensor was cut from the constant that the grid describes.
    """
    dtype, count = KINDS.get(grid.dtype), len(grid.scales)
    fits = tensor.dtype in FLOATS and tensor.numel() and 0 < count == len(grid.zero_points)
    if dtype is None or not fits or not bool(tensor.isfinite().all()):
        return None
    scales = torch.tensor(grid.scales, dtype=tensor.dtype, device=tensor.device)
    points = torch.tensor(grid.zero_points, device=tensor.device)
    if count == 1:
        return _integers_if_exact(tensor, dtype, scales.reshape(()), points.reshape(()), 0)
    for axis in sorted(range(tensor.ndim), key=lambda k: k != grid.axis % tensor.ndim):
        rows = tensor.movedim(axis, 0).reshape(tensor.shape[axis], -1)
        scale_indices = _matching_scales(rows, scales, points, dtype, _source_positions(cut, axis))
        constant = (
            None
            if scale_indices is None
            else _integers_if_exact(tensor, dtype, scales[scale_indices], points[scale_indices], axis)
        )
        if constant is not None:
            return constant
    return None


def _source_positions(cut: Cut | None, axis: int) -> Sequence[int]:
    """Positions on one axis of the source of a cut; () if unknown."""
    if cut is None or axis >= min(len(cut.kept), len(cut.shape)):
        return ()
    positions = cut.kept[axis]
    return range(cut.shape[axis]) if positions is None else positions


def _integers_if_exact(
    tensor: Tensor, dtype: torch.dtype, scale: Tensor, point: Tensor, axis: int
) -> QuantizedConstant | None:
    """The tensor in integers, if dequantizing them gives the tensor."""
    constant = QuantizedConstant(_to_integers(tensor, dtype, scale, point, axis), scale, point.to(dtype), axis)
    restored = dequantize_values(constant.integers, constant.scale, constant.zero_point, axis)
    return constant if torch.equal(restored, tensor) else None


def _to_integers(tensor: Tensor, dtype: torch.dtype, scale: Tensor, point: Tensor, axis: int) -> Tensor:
    """A tensor quantized: divided by scales, rounded, plus zero points, clamped to the dtype."""
    ratio = tensor.double() / broadcast_scale(scale.double(), tensor, axis)
    limits = torch.iinfo(dtype)
    moved = ratio.round() + broadcast_scale(point.double(), tensor, axis)
    return moved.clamp(limits.min, limits.max).to(dtype)


def _matching_scales(
    rows: Tensor, scales: Tensor, points: Tensor, dtype: torch.dtype, positions: Sequence[int]
) -> Tensor | None:
    """For each row the index of a scale that represents it exactly; None where a row has none."""
    known = list(positions) if len(positions) == len(rows) else []
    in_range = all(0 <= n < len(scales) for n in known)
    if known and in_range and bool(_are_exact(rows, scales[known], points[known], dtype).all()):
        return torch.tensor(known)
    indices = []
    for k, row in enumerate(rows):
        # A single number is close to a multiple of a small step by chance.
        candidates = [] if dtype == torch.int32 and bool(row.any()) else range(len(scales))
        order = [n for n in (*positions[k : k + 1], *candidates) if 0 <= n < len(scales)]
        indices.append(_matching_scale(row, order, scales, points, dtype))
    return None if None in indices or not indices else torch.tensor(indices)


def _matching_scale(
    row: Tensor, order: Sequence[int], scales: Tensor, points: Tensor, dtype: torch.dtype
) -> int | None:
    """The first index in `order` of a scale that represents a row exactly."""
    sample = row[row != 0][:FEW].expand(len(order), -1)
    likely = _are_exact(sample, scales[order], points[order], dtype).tolist() if order else []
    preselected = (k for k, fits in zip(order, likely, strict=True) if fits)
    matches = (k for k in preselected if bool(_are_exact(row[None], scales[[k]], points[[k]], dtype)))
    return next(matches, None)


def _are_exact(rows: Tensor, scales: Tensor, points: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether each row is represented exactly by its scale and zero point (bool, one per row)."""
    integers = _to_integers(rows, dtype, scales, points, 0)
    return (dequantize_values(integers, scales, points.to(dtype), 0) == rows).all(1)


def _bias_grid(
    module: nn.Module, node: fx.Node, stored: Mapping[str, QuantizedConstant]
) -> dict[str, QuantizedConstant]:
    """The bias of a quantized layer in integers, by name; {} where it is not close to integers.

    Its scale is the scale of the input times that of the weight.
    """
    arguments = schema.arguments(node)
    x, weight, bias = (arguments[name] for name in ("input", "weight", "bias"))
    operands = [x.args[1] if x.target is torch.ops.demask.dequantize.default else None, bias, weight]
    if any(not isinstance(n, fx.Node) or n.op != "get_attr" for n in operands):
        return {}
    scale, tensor = (_tensor_at(module, str(n.target)) for n in operands[:2])
    kernel = stored.get(weight.target)
    if scale.numel() != 1 or kernel is None or (kernel.scale.ndim and kernel.axis != 0):
        return {}
    steps = scale.reshape(()) * kernel.scale
    ratio = tensor.double() / steps.double()
    integers = ratio.round()
    is_off = (ratio - integers).abs() > OFF + integers.abs() * 2 * torch.finfo(tensor.dtype).eps
    if bool((is_off | (integers.abs() >= 2**31)).any()):
        return {}
    integers = integers.to(torch.int32)
    return {bias.target: QuantizedConstant(integers, steps, torch.zeros_like(steps, dtype=torch.int32), 0)}


def opset_for(slim: fx.GraphModule, opset: int | None) -> int | None:
    """The op set of a file: at least 21 for networks that quantize to 16 bits."""
    calls = slim.graph.find_nodes(op="call_function", target=torch.ops.demask.quantize.default)
    wide = any(DTYPES[schema.arguments(node)["dtype"]].itemsize == 2 for node in calls)
    if wide and opset is not None and opset < SINCE:
        raise BadInput(f"opset {opset}; expected {SINCE} or later, which can quantize to 16 bits")
    return SINCE if wide and opset is None else opset


def translations() -> dict[Any, Any]:
    """ONNX functions of demask's quantization ops for torch's exporter."""
    from onnxscript import ir
    from onnxscript import opset18 as op

    def quantize(x: Any, scale: Any, zero_point: Any, axis: int, dtype: str) -> Any:
        kind = ir.DataType[dtype.upper()]
        if zero_point is None and kind != ir.DataType.UINT8:
            zero_point = op.Sub(scale, scale)
        if zero_point is not None and zero_point.dtype != kind:
            zero_point = op.Cast(zero_point, to=int(kind))
        return op.QuantizeLinear(x, scale, zero_point, axis=axis)

    def dequantize(x: Any, scale: Any, zero_point: Any, axis: int) -> Any:
        return op.DequantizeLinear(x, scale, zero_point, axis=axis)

    ops = torch.ops.demask
    return {ops.quantize.default: quantize, ops.dequantize.default: dequantize}
