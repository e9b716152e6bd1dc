"""Quantized networks in ONNX files: weights as the whole numbers they were, ops by their names.

`demask` works on the floats that a quantized weight stands for. Written as floats they would no
longer tell a runtime that the layer can run on whole numbers, so they go back onto the grid that
they came from: only where each number on it gives the very float.
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
from demask.graph.capture.fold_constants import plain
from demask.graph.module_copy import structural_copy
from demask.graph.provenance import Cut, QuantizationGrid
from demask.graph.result.demasked_module import Demasked, attach
from demask.graph.result.module_calls import spell
from demask.ops import schema
from demask.ops.quantization import DTYPES, along, dequantized
from demask.ops.traits import CONVOLUTIONS

aten = torch.ops.aten
KINDS = {**DTYPES, "int32": torch.int32}  # what a constant can be stored in
FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # of scales
OFF = 1e-3  # how far a bias may be from a whole number: constants were added to it in float32
SINCE = 21  # the op set that can quantize to 16 bits
FEW = 8  # numbers of a row by which scales are sorted out
# Layers whose bias lies, channel by channel, on the grid of their input times that of their weight.
_LAYERS = (*CONVOLUTIONS, aten.linear.default)
_COPIES = re.compile(r"(_folded\d*|_\d+)+$")  # what passes put behind the name of a constant


def grids_of(
    nodes: Iterable[OnnxNode], constants: Mapping[str, Any]
) -> dict[str, QuantizationGrid]:
    """The grids of constants that nodes dequantize (or quantize first), by the constants' names."""
    nodes = list(nodes)
    makers = {n.outputs[0]: n for n in nodes if (n.domain, n.op) == ("", "QuantizeLinear")}
    found: dict[str, QuantizationGrid] = {}
    for node in nodes:
        if (node.domain, node.op) != ("", "DequantizeLinear") or not node.inputs[0]:
            continue
        name = node.inputs[0]
        dtype = getattr(constants.get(name), "dtype", None)
        if name not in constants and name in makers:
            maker = makers[name]
            name, point = maker.inputs[0], (*maker.inputs, "", "")[2]
            dtype = getattr(constants.get(point), "dtype", torch.uint8)
        grid = _grid(node, dtype, constants) if name in constants else None
        if grid is not None:
            found.setdefault(name, grid)
    return found


def _grid(node: OnnxNode, dtype: Any, constants: Mapping[str, Any]) -> QuantizationGrid | None:
    _, scale, point = (*(constants.get(name) for name in node.inputs), None, None)[:3]
    kind, axis = str(dtype).removeprefix("torch."), node.attributes.get("axis", 1)
    if kind not in KINDS or not isinstance(scale, Tensor) or scale.ndim > 1:
        return None
    if len(node.inputs) > 2 and node.inputs[2] and not isinstance(point, Tensor):
        return None
    points = torch.zeros(scale.shape, dtype=torch.int32) if point is None else point
    good = scale.is_floating_point() and bool((scale.isfinite() & (scale > 0)).all())
    if not good or points.numel() != scale.numel() or not isinstance(axis, int):
        return None
    return QuantizationGrid(
        kind, axis, tuple(scale.reshape(-1).tolist()), tuple(points.reshape(-1).tolist())
    )


@dataclass(frozen=True, slots=True)
class Stored:
    """A constant in whole numbers; one scale and zero point, or one for each place on `axis`."""

    whole: Tensor
    scale: Tensor
    zero_point: Tensor
    axis: int


def on_grids(slim: Demasked) -> Demasked:
    """The network with constants that came from a grid as whole numbers, dequantized again."""
    interface = slim.demasked.interface
    if interface is None or not interface.grids:
        return slim
    twin: Any = structural_copy(slim, share=True)
    grids = {plain(k): g for k, g in interface.grids.items()} | dict(interface.grids)
    spell(twin.graph, twin)
    reads: dict[str, list[fx.Node]] = {}
    for node in twin.graph.find_nodes(op="get_attr"):
        reads.setdefault(str(node.target), []).append(node)
    stored: dict[str, Stored] = {}
    for name in reads:
        cut = slim.demasked.cuts.get(name)
        source = name if cut is None else cut.source
        grid = grids.get(source) or grids.get(_COPIES.sub("", source))
        made = None if grid is None else gridded(_held(twin, name), grid, cut)
        if made is not None:
            stored[name] = made
    for node in twin.graph.nodes:
        if node.target in _LAYERS:
            stored |= _bias(twin, node, stored)
    for name, made in stored.items():
        _put(twin, name, made, reads[name])
    twin.recompile()
    return twin


def _held(module: nn.Module, name: str) -> Tensor:
    return reduce(getattr, name.split("."), module).detach()  # type: ignore[arg-type]


def _put(module: fx.GraphModule, name: str, made: Stored, reads: Iterable[fx.Node]) -> None:
    """Let the graph read a constant in whole numbers, and dequantize them."""
    above, _, leaf = name.rpartition(".")
    delattr(module.get_submodule(above), leaf)
    attach(module, name, made.whole)
    places = [_free(module, f"{name}_{what}") for what in ("scale", "zero_point")]
    for place, tensor in zip(places, (made.scale, made.zero_point), strict=True):
        attach(module, place, tensor)
    for read in reads:
        with module.graph.inserting_after(read):
            grid = [module.graph.create_node("get_attr", place) for place in places]
        with module.graph.inserting_after(grid[0]):
            target = torch.ops.demask.dequantize.default
            call = module.graph.call_function(target, (read, *grid, made.axis))
        read.replace_all_uses_with(call, lambda user, call=call: user is not call)


def _free(module: nn.Module, name: str) -> str:
    names = {n for n, _ in (*module.named_parameters(), *module.named_buffers())}
    return next(
        n for k in range(len(names) + 1) if (n := f"{name}_{k}" if k else name) not in names
    )


def gridded(tensor: Tensor, grid: QuantizationGrid, cut: Cut | None = None) -> Stored | None:
    """A float constant as the whole numbers that it came from; None where some number on it does
    not give the very float."""
    dtype, count = KINDS.get(grid.dtype), len(grid.scales)
    fits = tensor.dtype in FLOATS and tensor.numel() and 0 < count == len(grid.zero_points)
    if dtype is None or not fits or not bool(tensor.isfinite().all()):
        return None
    scales = torch.tensor(grid.scales, dtype=tensor.dtype, device=tensor.device)
    points = torch.tensor(grid.zero_points, device=tensor.device)
    if count == 1:
        return _checked(tensor, dtype, scales.reshape(()), points.reshape(()), 0)
    for axis in sorted(range(tensor.ndim), key=lambda k: k != grid.axis % tensor.ndim):
        rows = tensor.movedim(axis, 0).reshape(tensor.shape[axis], -1)
        at = _places(rows, scales, points, dtype, _kept(cut, axis))
        made = None if at is None else _checked(tensor, dtype, scales[at], points[at], axis)
        if made is not None:
            return made
    return None


def _kept(cut: Cut | None, axis: int) -> Sequence[int]:
    """Where the slices of a constant stood on one axis of the one it was cut from."""
    if cut is None or axis >= min(len(cut.kept), len(cut.shape)):
        return ()
    kept = cut.kept[axis]
    return range(cut.shape[axis]) if kept is None else kept


def _checked(
    tensor: Tensor, dtype: torch.dtype, scale: Tensor, point: Tensor, axis: int
) -> Stored | None:
    """The tensor in whole numbers, if those give it back."""
    made = Stored(_whole(tensor, dtype, scale, point, axis), scale, point.to(dtype), axis)
    found = dequantized(made.whole, made.scale, made.zero_point, axis)
    return made if torch.equal(found, tensor) else None


def _whole(tensor: Tensor, dtype: torch.dtype, scale: Tensor, point: Tensor, axis: int) -> Tensor:
    """The whole numbers nearest to a tensor's."""
    ratio = tensor.double() / along(scale.double(), tensor, axis)
    limits = torch.iinfo(dtype)
    moved = ratio.round() + along(point.double(), tensor, axis)
    return moved.clamp(limits.min, limits.max).to(dtype)


def _places(
    rows: Tensor, scales: Tensor, points: Tensor, dtype: torch.dtype, kept: Sequence[int]
) -> Tensor | None:
    """For each row the number of a scale on which its values are; None where a row has none."""
    known = list(kept) if len(kept) == len(rows) else []
    inside = all(0 <= n < len(scales) for n in known)
    if known and inside and bool(_fits(rows, scales[known], points[known], dtype).all()):
        return torch.tensor(known)
    found = []
    for k, row in enumerate(rows):
        # A number alone is on a grid of small steps by chance.
        tried = [] if dtype == torch.int32 and bool(row.any()) else range(len(scales))
        order = [n for n in (*kept[k : k + 1], *tried) if 0 <= n < len(scales)]
        found.append(_place(row, order, scales, points, dtype))
    return None if None in found or not found else torch.tensor(found)


def _place(
    row: Tensor, order: Sequence[int], scales: Tensor, points: Tensor, dtype: torch.dtype
) -> int | None:
    """The first number of a scale, of those in `order`, on which a row's values are."""
    few = row[row != 0][:FEW].expand(len(order), -1)
    likely = _fits(few, scales[order], points[order], dtype).tolist() if order else []
    whole = (k for k, fits in zip(order, likely, strict=True) if fits)
    found = (k for k in whole if bool(_fits(row[None], scales[[k]], points[[k]], dtype)))
    return next(found, None)


def _fits(rows: Tensor, scales: Tensor, points: Tensor, dtype: torch.dtype) -> Tensor:
    """Which rows are on their grids."""
    whole = _whole(rows, dtype, scales, points, 0)
    return (dequantized(whole, scales, points.to(dtype), 0) == rows).all(1)


def _bias(module: nn.Module, node: fx.Node, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The bias of a layer of whole numbers, by its name, on the grid of the layer's sums; nothing
    where it is not there."""
    found = schema.arguments(node)
    x, weight, bias = (found[name] for name in ("input", "weight", "bias"))
    read = [x.args[1] if x.target is torch.ops.demask.dequantize.default else None, bias, weight]
    if any(not isinstance(n, fx.Node) or n.op != "get_attr" for n in read):
        return {}
    scale, tensor = (_held(module, str(n.target)) for n in read[:2])
    kernel = stored.get(weight.target)
    if scale.numel() != 1 or kernel is None or (kernel.scale.ndim and kernel.axis != 0):
        return {}
    steps = scale.reshape(()) * kernel.scale
    ratio = tensor.double() / steps.double()
    whole = ratio.round()
    far = (ratio - whole).abs() > OFF + whole.abs() * 2 * torch.finfo(tensor.dtype).eps
    if bool((far | (whole.abs() >= 2**31)).any()):
        return {}
    whole = whole.to(torch.int32)
    return {bias.target: Stored(whole, steps, torch.zeros_like(steps, dtype=torch.int32), 0)}


def opset_for(slim: fx.GraphModule, opset: int | None) -> int | None:
    """The op set to write a network in: ONNX quantizes to 16 bits since version 21."""
    calls = slim.graph.find_nodes(op="call_function", target=torch.ops.demask.quantize.default)
    wide = any(DTYPES[schema.arguments(node)["dtype"]].itemsize == 2 for node in calls)
    if wide and opset is not None and opset < SINCE:
        raise BadInput(f"opset {opset}; expected {SINCE} or later, which can quantize to 16 bits")
    return SINCE if wide and opset is None else opset


def translations() -> dict[Any, Any]:
    """What torch's exporter writes for demask's own ops."""
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
