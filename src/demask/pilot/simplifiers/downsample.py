"""A network run on smaller images: every spatial axis shrinks, through the full graph.

Spatial axes of the inputs are interpolated down, and the graph is written again for the sizes that
follow. The table says which axis of each value a spatial axis has become (a row of tokens, a part
of a flattened vector). Constants along such an axis are resampled; for those that are summed over
it, the sum is preserved. Outputs are resized to full size. So ranks and the number of layers stay.
A network in which a size cannot shrink is refused, with the call and the reason.

An axis is a sequence of segments (a class token, then patches), and a segment is a product of
factors, major first (rows, columns). A factor has a full size and a small one. Resampling is linear
along each factor: D, a matrix (small, full), shortens, R, a matrix (full, small), lengthens.

    W x ~ W R x_small      so a weight that sums over a full axis becomes W R: its sum is preserved

since every row of R sums to one.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import inf, prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.nn.functional import interpolate

from demask.errors import BadInput, DemaskError
from demask.facts.analysis import Analysis
from demask.facts.known import Key, key_of
from demask.graph.editor import GraphEditor
from demask.graph.program import Constant, Program
from demask.graph.result.demasked_module import Demasked
from demask.numerics import is_number
from demask.ops import Declined, Relation, op_name, schema
from demask.ops.schema import fake
from demask.pilot.weight_layers import check_finite
from demask.shrink.build_uncut import build_uncut

aten = torch.ops.aten

MODES = ("nearest", "bilinear", "bicubic", "area")


@dataclass(frozen=True, slots=True)
class Factor:
    """Sizes of one factor of an axis; None for a dynamic one, which is never resampled. inner: the
    axis that it is, where that runs over several segments."""

    full: int | None
    small: int | None
    inner: Axis | None = None

    @property
    def scaled(self) -> bool:
        return self.full != self.small


Segment = tuple["Factor", ...]
Axis = tuple[Segment, ...]


def axis_of(full: int | None, small: int | None) -> Axis:
    """An axis of one factor."""
    return ((Factor(full, small),),)


def scaled(axis: Axis) -> bool:
    """Whether an axis is shorter than it was."""
    return any(factor.scaled for segment in axis for factor in segment)


def size(axis: Axis, *, full: bool = False) -> int | None:
    """The size of an axis; None where dynamic.

    >>> size(((Factor(1, 1),), (Factor(8, 4), Factor(8, 4)))), size(axis_of(8, 4), full=True)
    (17, 8)
    """
    total = 0
    for segment in axis:
        sizes = [factor.full if full else factor.small for factor in segment]
        if any(n is None for n in sizes):
            return None
        total += prod(n for n in sizes if n is not None)
    return total


def split(axis: Axis, sizes: list[int | None]) -> list[Axis] | None:
    """An axis as a product of axes of these full sizes, major first; None where it is not one.

    >>> split(((Factor(8, 8), Factor(6, 3)),), [4, 12]) == [
    ...     ((Factor(4, 4),),), ((Factor(2, 2), Factor(6, 3)),)]
    True
    """
    if len(sizes) == 1:
        return [axis]
    if len(axis) != 1:
        return None
    left, parts = list(axis[0]), []
    for wanted in sizes:
        taken: list[Factor] = []
        if wanted is None:
            if not left or left[0].full is not None:
                return None
            parts.append(((left.pop(0),),))
            continue
        while (product := prod(f.full or 0 for f in taken)) < wanted:
            if not left or left[0].full is None:
                return None
            rest = wanted // product
            if wanted % product == 0 and left[0].full > rest and left[0].full % rest == 0:
                pair = _split_factor(left[0], rest)
                if pair is None:
                    return None
                left[:1] = pair
            taken.append(left.pop(0))
        if product != wanted:
            return None
        alone = taken[0].inner if len(taken) == 1 else None
        parts.append(alone or (tuple(taken) or (Factor(1, 1),),))
    return None if any(factor.full != 1 for factor in left) else parts


def _split_factor(factor: Factor, major: int) -> list[Factor] | None:
    """A factor as a major and a minor one: where it is scaled the minor one stays as it is (windows
    of a fixed size), if that divides."""
    assert factor.full is not None
    assert factor.small is not None
    if factor.inner is not None:
        return None
    minor = factor.full // major
    if not factor.scaled:
        return [Factor(major, major), Factor(minor, minor)]
    if factor.small % minor:
        return None
    return [Factor(major, factor.small // minor), Factor(minor, minor)]


def merged(axes: list[Axis]) -> Axis:
    """The product of axes."""
    if len(axes) == 1:
        return axes[0]
    return (tuple(factor for axis in axes for factor in _axis_as_factors(axis)),)


def _axis_as_factors(axis: Axis) -> Segment:
    """An axis as factors: one, where it runs over segments."""
    return axis[0] if len(axis) == 1 else (Factor(size(axis, full=True), size(axis), axis),)


def resampled(tensor: Tensor, dim: int, axis: Axis, mode: str, *, summed: bool) -> Tensor:
    """A full constant along a shorter axis. summed: it is multiplied and summed along the axis."""
    parts, start, last = [], 0, tensor.movedim(dim, -1)
    for segment in axis:
        sizes = [factor.full or 0 for factor in segment]
        part = last[..., start : start + prod(sizes)].unflatten(-1, sizes)
        start += prod(sizes)
        for k, factor in enumerate(segment):
            if factor.inner is not None:
                part = resampled(part, k - len(segment), factor.inner, mode, summed=summed)
            elif factor.scaled:
                part = _along(part, k - len(segment), factor, mode, summed)
        parts.append(part.flatten(-len(segment)))
    return torch.cat(parts, -1).movedim(-1, dim).contiguous()


def _along(part: Tensor, dim: int, factor: Factor, mode: str, summed: bool) -> Tensor:
    assert factor.full is not None
    assert factor.small is not None
    if summed:
        matrix = matrix_of(factor.small, factor.full, mode).T
    else:
        matrix = matrix_of(factor.full, factor.small, mode)
    moved = part.movedim(dim, -1) @ matrix.T.to(part.dtype)
    return moved.movedim(-1, dim)


@cache
def matrix_of(before: int, after: int, mode: str) -> Tensor:
    """The matrix (after, before) that resamples a vector, float64; its rows sum to one.

    >>> matrix_of(4, 2, "bilinear").tolist()
    [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]]
    """
    check_mode(mode)
    eye = torch.eye(before, dtype=torch.float64)[None, None]
    if mode == "area" and after > before:
        mode = "nearest"  # the mean of a part of one position
    corners = {"align_corners": False} if mode in ("bilinear", "bicubic") else {}
    return interpolate(eye, size=(after, before), mode=mode, **corners)[0, 0]


def full_matrix(axis: Axis, mode: str) -> Tensor:
    """The matrix (full, small) that resizes a value along an axis to full size, float64."""
    total = size(axis, full=True)
    assert total is not None
    # Of every full position, its weight on every small one: the identity, summed.
    return resampled(torch.eye(total, dtype=torch.float64), 1, axis, mode, summed=True)


def check_mode(mode: str) -> None:
    """Raise BadInput for an unknown mode."""
    if mode not in MODES:
        raise BadInput(f"expected one of {', '.join(MODES)}, got {mode!r}")


_SIZED = ("view", "_unsafe_view", "reshape", "unflatten", "expand")  # take sizes, which are rebuilt
_PADS = ("pad", "constant_pad_nd", "reflection_pad", "replication_pad")
_RESIZES: dict[tuple[int, str], tuple[Any, bool]] = {
    (3, "nearest"): (aten.upsample_nearest1d.vec, False),
    (4, "nearest"): (aten.upsample_nearest2d.vec, False),
    (5, "nearest"): (aten.upsample_nearest3d.vec, False),
    (3, "bilinear"): (aten.upsample_linear1d.vec, True),
    (4, "bilinear"): (aten.upsample_bilinear2d.vec, True),
    (5, "bilinear"): (aten.upsample_trilinear3d.vec, True),
    (4, "bicubic"): (aten.upsample_bicubic2d.vec, True),
}
_AREA = {3: aten.adaptive_avg_pool1d.default, 4: aten.adaptive_avg_pool2d.default, 5: aten.adaptive_avg_pool3d.default}


@dataclass(frozen=True, slots=True)
class Downsample:
    """A simplifier that runs the network on smaller images, and resizes the outputs to full size.

    A simplifier derives a cheaper network from a network. Inputs and outputs of the network keep
    their sizes; resizing is a part of the new network. Every spatial axis of the inputs is divided
    by `factor`. Spatial axes are axes 2 and higher of floating-point inputs with four or five axes
    (images, volumes), and axis 2 of inputs with three axes that a convolution or pool reads
    (signals). Weights with an element per position, such as position embeddings, are resampled;
    kernels of convolutions are not. Pass `Downsample(2)`, or its text "downsample:2" or
    "downsample:2:area", as `by` of `simplify` and `compare`.

    Args:
        factor: full size divided by new size, above 1; new sizes are rounded and at least 1.
        mode: interpolation: "nearest", "bilinear" (linear for one axis, trilinear for three; the
            default), "bicubic" (images only) or "area" (the mean).

    Raises:
        BadInput: `factor` is not above 1 and finite, or `mode` is unknown; when the simplifier is
            applied: no input has spatial axes, their sizes are dynamic, or a call cannot run on
            smaller images.

    Example:
        >>> import torch
        >>> from demask.pilot import Downsample, compare
        >>> net, images = torch.nn.Conv2d(3, 8, 3, padding=1), torch.randn(2, 3, 32, 32)
        >>> comparison = compare(net, (images,), by=[Downsample(2)], pairs=0)
        >>> comparison.macs, comparison.rows[0].macs  # multiply-adds, full and at half the size
        (442368, 110592)
    """

    factor: float
    mode: str = "bilinear"

    def __post_init__(self) -> None:
        check_mode(self.mode)
        if not is_number(self.factor) or not 1 < self.factor < inf:
            raise BadInput(f"expected a finite factor above 1, got {self.factor!r}; such as 2")

    def text(self) -> str:
        """The simplifier's text, such as "downsample:2:bilinear"."""
        return f"downsample:{self.factor:g}:{self.mode}"

    def applied(self, analysis: Analysis) -> Demasked:
        """The network that takes and returns full images and computes on smaller ones.

        Args:
            analysis: facts about the captured network, which is not changed.

        Raises:
            BadInput: the network cannot run on smaller images; the message names the call.
        """
        smaller = _Smaller(analysis, self.factor, self.mode)
        program = smaller.build()
        note = f"{self.text()}: {smaller.resampled} constants resampled"
        return build_uncut(analysis, program, [note])

    def weight_bytes(self, weight: Tensor, rows: int) -> float:
        """Bytes of one weight in its own dtype.

        Args:
            weight: a tensor of any shape.
            rows: not used.
        """
        return weight.numel() * weight.element_size()


class _CannotShorten(Exception):
    """A call cannot run on shorter axes; the text says why."""


class _Smaller:
    """Writes a program again, node by node, for smaller images."""

    def __init__(self, analysis: Analysis, factor: float, mode: str):
        self.program, self.factor, self.mode = analysis.program, factor, mode
        self.relations = analysis.relations
        self.editor = GraphEditor.empty(self.program)
        self.graph, self.constants = self.editor.graph, self.editor.constants
        self.env: dict[fx.Node, fx.Node] = {}
        self.axes: dict[Key, tuple[Axis, ...]] = {}
        self.reads: dict[tuple[str, tuple[Axis, ...]], fx.Node] = {}
        self.resampled = 0

    def build(self) -> Program:
        """The program for smaller images."""
        inputs = self.program.graph.find_nodes(op="placeholder")
        if not any(_spatial_axes(node, self.relations) for node in inputs):
            raise BadInput(
                f"downsample:{self.factor:g}: no input has spatial axes: expected images "
                "(N, C, H, W), volumes, or sequences that windows read"
            )
        for node in self.program.graph.nodes:
            try:
                self._copy_node(node)
            except _CannotShorten as refused:
                where = f"{node.name} ({op_name(node.target)})" if node.op != "output" else "output"
                raise BadInput(
                    f"downsample:{self.factor:g}: {where}: {refused}; choose another simplifier, or another factor"
                ) from refused
        return self.editor.finish()

    def _copy_node(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._copy_input(node)
        elif node.op == "get_attr":
            self.constants[str(node.target)] = self.program.constants[str(node.target)]
            self.env[node] = self.graph.node_copy(node)
            self._set_full_axes(node)
        elif node.op == "output":
            outputs: Any = node.args[0]
            self.graph.output(tuple(self._full_size_output(v) if isinstance(v, fx.Node) else v for v in outputs))
        elif node.target is operator.getitem:
            source: Any = node.args[0]
            self.env[node] = self.editor.call(operator.getitem, self._new_node(source), node.args[1])
        else:
            self._copy_call(node)

    # ------------------------------------------------------------------------- inputs, outputs

    def _copy_input(self, node: fx.Node) -> None:
        self.env[node] = self.graph.node_copy(node)
        self._set_full_axes(node)
        value = node.meta.get("val")
        spatial = _spatial_axes(node, self.relations)
        if not spatial or not isinstance(value, Tensor):
            return
        full = [value.shape[axis] for axis in spatial]
        if not all(isinstance(n, int) for n in full):
            raise _CannotShorten("its spatial sizes are dynamic; give an example of a fixed size")
        small = [max(1, round(n / self.factor)) for n in full]
        self.env[node] = self._resize_value(self.env[node], small)
        axes = list(self.axes[node, 0])
        for axis, n, m in zip(spatial, full, small, strict=True):
            axes[axis] = axis_of(n, m)
        self.axes[node, 0] = tuple(axes)

    def _resize_value(self, x: fx.Node, sizes: list[int]) -> fx.Node:
        rank = len(sizes) + 2
        if self.mode == "area" and fake(x).shape[-1] >= sizes[-1]:
            return self.editor.call(_AREA[rank], x, sizes)
        mode = "nearest" if self.mode == "area" else self.mode
        if (rank, mode) not in _RESIZES:
            raise _CannotShorten(f"{mode} interpolation is for images, this value has {rank} axes")
        target, corners = _RESIZES[rank, mode]
        return self.editor.call(target, x, sizes, *([False] if corners else []), None)

    def _full_size_output(self, node: fx.Node) -> fx.Node:
        output, axes = self._new_node(node), self.axes.get(key_of(node), ())
        changed = [k for k, axis in enumerate(axes) if scaled(axis)]
        plain = all(len(axes[k]) == len(axes[k][0]) == 1 for k in changed)
        if not changed:
            return output
        if plain and changed == list(range(2, len(axes))) and 3 <= len(axes) <= 5:
            return self._resize_value(output, [size(axes[k], full=True) or 0 for k in changed])
        for k in changed:
            matrix = full_matrix(axes[k], self.mode).to(fake(output).dtype)
            read = self._add_constant(f"resampling_{len(self.constants)}", matrix, parameter=False)
            last = len(axes) - 1
            transposed = self.editor.call(aten.transpose.int, output, k, last) if k < last else output
            full = self.editor.call(aten.linear.default, transposed, read)
            output = self.editor.call(aten.transpose.int, full, k, last) if k < last else full
        return output

    # --------------------------------------------------------------------------------- calls

    def _copy_call(self, node: fx.Node) -> None:
        relation = self.relations.get(node)
        short = [n for n in node.all_input_nodes if any(map(scaled, self.axes.get(key_of(n), ())))]
        if not isinstance(relation, Relation) or not short:
            if short and not _reads_sizes(node):
                reason = relation.text if isinstance(relation, Declined) else "it has no rule"
                raise _CannotShorten(reason)
            arguments = map_arg((node.args, node.kwargs), self._new_node)
            self._call_with(node, arguments[0], arguments[1])
            for k in range(len(schema.outputs(node))):
                self._set_full_axes(node, k)
            return
        letters = self._shorter_letters(relation)
        self._check_moves(relation)
        arguments = self._new_arguments(relation, letters)
        self._call_with(node, *schema.bind_arguments(node.target, arguments))
        self._set_output_axes(relation, letters)

    def _call_with(self, node: fx.Node, args: Any, kwargs: Any) -> None:
        try:
            call = self.editor.call(node.target, *args, **kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError, DemaskError) as error:
            first = str(error).strip().splitlines()[0]
            raise _CannotShorten(f"it does not take the smaller sizes ({first})") from error
        call.meta |= {k: v for k, v in node.meta.items() if k != "val"}
        self.env[node] = call

    def _shorter_letters(self, relation: Relation) -> dict[str, Axis]:
        """The axis that each letter of the operands has become."""
        letters: dict[str, Axis] = {}
        for k, operand in enumerate(relation.operands):
            if not isinstance(operand.value, fx.Node) or operand.value.op == "get_attr":
                continue
            operand_axes = self.axes.get(key_of(operand.value))
            for axis, mine in zip(relation.ins[k], operand_axes or (), strict=False):
                if not axis:
                    continue
                parts = split(mine, [relation.size[letter] for letter in axis])
                if parts is None:
                    raise _CannotShorten("an axis that shrinks is split into parts that do not divide it")
                for letter, part in zip(axis, parts, strict=True):
                    before = letters.setdefault(letter, part)
                    if size(before) != size(part):
                        raise _CannotShorten(f"it joins axes of {size(before)} and {size(part)}")
        return letters

    def _check_moves(self, relation: Relation) -> None:
        """Raise _CannotShorten for a move of positions that has another meaning on the shorter
        axis."""
        name = op_name(relation.node.target).split(".")[1]
        arguments = schema.arguments(relation.node)
        for k, operand in enumerate(relation.operands):
            operand_axes = self.axes.get(key_of(operand.value), ())
            for dim, (axis, mine) in enumerate(zip(relation.ins[k], operand_axes, strict=False)):
                if not (set(axis) & relation.moved and scaled(mine)):
                    continue
                if name in ("cat", "flip") or name.startswith(_PADS):
                    continue
                if name == "select" and arguments["index"] in (0, -1):
                    continue
                if name == "slice" and _reads_to_end(arguments, operand.value, dim):
                    start = arguments["start"] or 0
                    if start == 0 or (arguments["step"] == 1 and _segments_from(mine, start) is not None):
                        continue
                raise _CannotShorten("it picks positions along an axis that shrinks")

    def _new_arguments(self, relation: Relation, letters: Mapping[str, Axis]) -> dict[str, Any]:
        node = relation.node
        arguments = map_arg(schema.arguments(node), self._new_node)
        values = [self._new_operand(relation, k, letters) for k in range(len(relation.operands))]
        arguments = schema.replace_operands(arguments, relation.operands, values)
        name = op_name(node.target).split(".")[1]
        if name in _SIZED and relation.entry.args is not None:
            sizes = self._output_sizes(relation, letters, name)
            every: Any = [sizes]
            arguments |= relation.entry.args(node, every)
        if "normalized_shape" in arguments:
            count = len(arguments["normalized_shape"])
            axes = self.axes[key_of(relation.operands[0].value)][-count:]
            arguments["normalized_shape"] = [size(axis) for axis in axes]
        if arguments.get("output_size") is not None and name.startswith(("upsample", "_upsample")):
            arguments["output_size"] = self._upsampled_sizes(relation, arguments["output_size"])
        if "kernel_size" in arguments and relation.window:
            arguments |= self._global_pool_arguments(relation, arguments)
        return arguments

    def _output_sizes(self, relation: Relation, letters: Mapping[str, Axis], name: str) -> list[Any]:
        """Sizes of the output as arguments; dynamic ones as in the call, or inferred."""
        arguments: Any = schema.arguments(relation.node)
        arguments = arguments.get("size", arguments.get("shape"))
        sizes: list[Any] = []
        value = fake(relation.node)
        for k, axis in enumerate(relation.outs[0]):
            full = value.shape[k]
            new_axis = self._shorter_axis(relation, axis, letters, full if isinstance(full, int) else None)
            sizes.append(size(new_axis))
        dynamic = [k for k, n in enumerate(sizes) if n is None]
        for k in dynamic:
            alone = len(dynamic) == 1 and name != "expand"
            sizes[k] = -1 if alone or arguments is None else map_arg(arguments[k], self._new_node)
        return sizes

    def _shorter_axis(self, relation: Relation, axis: Any, letters: Mapping[str, Axis], full: int | None) -> Axis:
        """What an axis of letters has become; letters of no operand keep their size."""
        if not axis:
            return axis_of(full, full)
        parts = [letters.get(a) or axis_of(relation.size[a], relation.size[a]) for a in axis]
        return merged(parts)

    def _upsampled_sizes(self, relation: Relation, sizes: list[Any]) -> list[int]:
        """Sizes of an upsampling call, smaller by as much as its input is."""
        axes = self.axes[key_of(relation.operands[0].value)][-len(sizes) :]
        ratios = [(size(axis) or 1) / (size(axis, full=True) or 1) for axis in axes]
        return [max(1, round(n * ratio)) for n, ratio in zip(sizes, ratios, strict=True)]

    def _global_pool_arguments(self, relation: Relation, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a pool of the full image, for the smaller one; {} for other pools."""
        kernel = list(arguments["kernel_size"])
        axes = self.axes[key_of(relation.operands[0].value)][-len(kernel) :]
        if any(arguments.get("padding") or [0]) or kernel != [size(a, full=True) for a in axes]:
            return {}
        return {"kernel_size": [size(axis) for axis in axes], "stride": []}

    def _new_operand(self, relation: Relation, k: int, letters: Mapping[str, Axis]) -> Any:
        """An operand of the new call: constants along axes that shrank are resampled."""
        value = relation.operands[k].value
        if not isinstance(value, fx.Node) or value.op != "get_attr":
            return self._new_node(value) if isinstance(value, fx.Node) else value
        axes = []
        for dim, axis in enumerate(relation.ins[k]):
            full = fake(value).shape[dim]
            axes.append(
                axis_of(full, full)
                if set(axis) & relation.window
                else self._shorter_axis(relation, axis, letters, full)
            )
        changed = [dim for dim, axis in enumerate(axes) if scaled(axis)]
        if not changed:
            return self._new_node(value)
        key = (str(value.target), tuple(axes))
        if key not in self.reads:
            summed = {d for d in changed if set(relation.ins[k][d]) <= relation.contracted}
            self.reads[key] = self._shorten_constant(value, axes, changed, summed)
        return self.reads[key]

    def _shorten_constant(self, read: fx.Node, axes: list[Axis], changed: list[int], summed: set[int]) -> fx.Node:
        constant = self.program.constants[str(read.target)]
        tensor = constant.tensor
        if not tensor.is_floating_point():
            raise _CannotShorten(f"{constant.name} has dtype {tensor.dtype}, which cannot be interpolated")
        check_finite(tensor, constant.name)
        for dim in changed:
            tensor = resampled(tensor, dim, axes[dim], self.mode, summed=dim in summed)
        self.resampled += 1
        return self._add_constant(constant.name, tensor, parameter=constant.parameter)

    def _add_constant(self, name: str, tensor: Tensor, *, parameter: bool) -> fx.Node:
        """A new constant: under this name unless the full one is still read, else under another."""
        taken = self.constants.get(name)
        full = any(n.op == "get_attr" and n.target == name and n.users for n in self.graph.nodes)
        key = f"{name}_small" if taken is not None and full else name
        self.constants[key] = Constant(tensor, key, parameter)
        return self.editor.read_constant(key)

    def _set_output_axes(self, relation: Relation, letters: Mapping[str, Axis]) -> None:
        """What the axes of the call's outputs have become."""
        node = relation.node
        outputs = schema.outputs(self.env[node])
        for k, (old, new) in enumerate(zip(schema.outputs(node), outputs, strict=True)):
            axes = []
            for dim, axis in enumerate(relation.outs[k]):
                full, small = (v.shape[dim] if isinstance(v.shape[dim], int) else None for v in (old, new))
                known = not set(axis) & (relation.window | relation.moved)
                if known:
                    new_axis = self._shorter_axis(relation, axis, letters, full)
                else:
                    new_axis = self._moved_axis(relation, dim, full, small)
                if size(new_axis) != small:
                    raise _CannotShorten(f"axis {dim} of its result has {small} positions, not {size(new_axis)}")
                axes.append(new_axis)
            self.axes[node, k] = tuple(axes)

    def _moved_axis(self, relation: Relation, dim: int, full: Any, small: Any) -> Axis:
        """The axis of an output of windows, or of a call that moves positions along it."""
        name = op_name(relation.node.target).split(".")[1]
        if name == "cat":
            parts = [self._axes_of(operand.value)[dim] for operand in relation.operands]
            return tuple(segment for part in parts for segment in part)
        if name == "slice":
            before = self._axes_of(relation.operands[0].value)[dim]
            start = schema.arguments(relation.node)["start"] or 0
            if len(before) > 1 and start:
                return _segments_after(before, start)
        return axis_of(full, small)

    # ------------------------------------------------------------------------------ helpers

    def _axes_of(self, node: fx.Node) -> tuple[Axis, ...]:
        return self.axes[key_of(node)]

    def _set_full_axes(self, node: fx.Node, k: int = 0) -> None:
        value = schema.outputs(node)[k]
        if isinstance(value, Tensor):
            self.axes[node, k] = tuple(axis_of(n, n) for n in schema.sizes(value))

    def _new_node(self, node: fx.Node) -> fx.Node:
        return self.env[node]


def _spatial_axes(node: fx.Node, relations: Mapping[fx.Node, Relation | Declined]) -> list[int]:
    """The spatial axes of an input."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return []
    readers = [relations.get(user) for user in node.users]
    windows = any(isinstance(r, Relation) and r.window for r in readers)
    if value.ndim in (4, 5) or (value.ndim == 3 and windows):
        return list(range(2, value.ndim))
    return []


def _reads_sizes(node: fx.Node) -> bool:
    return "sym_size" in str(node.target) or not isinstance(node.meta.get("val"), Tensor)


def _reads_to_end(arguments: Mapping[str, Any], source: fx.Node, dim: int) -> bool:
    full = fake(source).shape[dim]
    return arguments["end"] is None or (isinstance(arguments["end"], int) and arguments["end"] >= full)


def _segments_from(axis: Axis, start: int) -> Axis | None:
    for k, segment in enumerate(axis):
        if start == 0:
            return axis[k:]
        if any(factor.scaled for factor in segment):
            return None
        start -= prod(factor.full or 0 for factor in segment)
        if start < 0:
            return None
    return None


def _segments_after(axis: Axis, start: int) -> Axis:
    segments = _segments_from(axis, start)
    assert segments is not None
    return segments
