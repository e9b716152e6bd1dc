"""Where norms over the image take their statistics from: the image, windows of it, or constants.

A group or instance norm that was trained on small tiles sees other statistics on a full image.

    image    mean and variance of the full image, what the network computes on it
    tile:N   those of the window that a position is in; windows have about N rows and columns of
             the input, and divide the image evenly
    frozen   constants, measured by `calibrate`

Calls are replaced in the graph, so that plans, tasks and files know nothing of it. The input of a
network is normalized by calls before its own.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from demask.errors import BadInput
from demask.failures import public
from demask.graph.editor import GraphEditor
from demask.graph.isolation import in_isolation
from demask.graph.program import Program
from demask.ops import schema, traits
from demask.ops.schema import fake
from demask.records import decode, encode
from demask.traverse.captured_size import captured, network_of
from demask.traverse.storage.dtype_conversion import assign

aten = torch.ops.aten
IMAGE, TILE = "image", re.compile(r"tile:(\d+)")
EPSILON = 1e-12  # added to the variance of an image: it is 0 where all positions are equal
Model = nn.Module | ExportedProgram | str | os.PathLike[str]


def with_normalized_input(program: Program, normalize: Any) -> Program:
    """The program of one input whose input has mean 0 and deviation 1.

    normalize: None: the program itself; "image": per channel over the full image; or (means,
    deviations), each a number or one per channel: the network receives (x - mean) / deviation.

    Raises:
        BadInput: for other values of `normalize`, or if the network takes integers.
    """
    if normalize is None:
        return program
    editor = GraphEditor(program)
    placeholder = next(iter(editor.graph.find_nodes(op="placeholder")))
    value = fake(placeholder)
    if not value.is_floating_point():
        raise BadInput("normalize: this network takes integers, and normalizes them itself")
    readers = list(placeholder.users)
    if not readers:
        return program
    with editor.graph.inserting_after(placeholder):
        first = editor.graph.call_function(aten.clone.default, (placeholder,))
    normalized = _insert_normalization(editor, placeholder, first, normalize)
    for reader in readers:
        reader.replace_input_with(placeholder, normalized)
    return editor.finish()


def _insert_normalization(editor: GraphEditor, x: fx.Node, reader: fx.Node, normalize: Any) -> fx.Node:
    """The normalized value of an input, before `reader`."""
    value = fake(x)
    if isinstance(normalize, str):
        if normalize != "image":
            raise BadInput(f'expected normalize="image" or (means, deviations), got {normalize!r}')
        norm = aten.instance_norm.default
        return editor.insert(reader, None, norm, x, None, None, None, None, True, 0.1, EPSILON, False)
    shape = (1, value.shape[1], *(1 for _ in range(value.ndim - 2)))
    mean, deviation = (
        torch.tensor(row, dtype=value.dtype).reshape(shape) for row in _per_channel(normalize, value.shape[1])
    )
    names = editor.add_constant("mean", mean, reader), editor.add_constant("std", deviation, reader)
    centered = editor.insert(reader, None, aten.sub.Tensor, x, names[0])
    return editor.insert(reader, None, aten.div.Tensor, centered, names[1])


def _per_channel(normalize: Any, channels: int) -> tuple[list[float], list[float]]:
    try:
        mean, std = (np.broadcast_to(np.asarray(row, np.float64), (channels,)) for row in normalize)
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"normalize: expected one mean and one deviation for each of {channels} channels, got {normalize!r:.80}"
        ) from error
    if not np.isfinite(mean).all() or not np.isfinite(std).all() or not (std > 0).all():
        raise BadInput("normalize: expected finite means and deviations above 0")
    return mean.tolist(), std.tolist()


@dataclass(frozen=True, slots=True)
class NormMoments:
    """The statistics of one norm.

    Attributes:
        name: name of the call in the captured graph.
        mean: tuple of floats, one per group of channels.
        variance: tuple of floats, one per group of channels, population variance.
    """

    name: str
    mean: tuple[float, ...]
    variance: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FrozenStatistics:
    """The result of `calibrate`: constants in place of statistics over the image.

    Attributes:
        norms: tuple of `NormMoments`, one per norm over the image, in order of execution.
        tiles: number of tiles that were measured.

    Example:
        >>> import torch
        >>> from demask.traverse import FrozenStatistics, calibrate
        >>> frozen = calibrate(torch.nn.InstanceNorm2d(2), torch.ones(3, 2, 8, 8))
        >>> frozen.norms[0].mean, frozen.norms[0].variance
        ((1.0, 1.0), (0.0, 0.0))
        >>> FrozenStatistics.from_dict(frozen.to_dict()) == frozen
        True
    """

    norms: tuple[NormMoments, ...]
    tiles: int

    def to_dict(self) -> dict[str, Any]:
        """The attributes as a dictionary of JSON types."""
        return encode(FrozenStatistics, self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FrozenStatistics:
        """The inverse of `to_dict`."""
        return decode(FrozenStatistics, data, "statistics, as `FrozenStatistics.to_dict` returns them")


Statistics = str | FrozenStatistics


def with_statistics(program: Program, statistics: Statistics) -> Program:
    """The program whose norms over the image use these statistics.

    statistics: "image", "tile:N", or frozen ones. A call may be of any size of image.

    Raises:
        BadInput: for other texts, statistics of another network, or windows in a network whose
            norms read no images (N, C, H, W).
    """
    if isinstance(statistics, FrozenStatistics):
        return _with_constants(program, statistics)
    match = TILE.fullmatch(statistics) if isinstance(statistics, str) else None
    if match is None or not int(match[1]):
        if statistics == IMAGE:
            return program
        raise BadInput(
            f'expected statistics="image", "tile:N" with N rows of the input, or what '
            f"calibrate() returns, got {statistics!r:.80}"
        )
    return _with_windows(program, int(match[1]))


def norms_of(graph: fx.Graph) -> list[fx.Node]:
    """The norms whose statistics are over the image."""

    def is_over_image(node: fx.Node) -> bool:
        bound = schema.arguments(node)
        return bool(bound.get("use_input_stats", bound.get("training", True)))

    norms = (node for node in graph.nodes if node.target in traits.IMAGE_NORMS)
    return [node for node in norms if node.meta["val"].ndim >= 3 and is_over_image(node)]


def groups_of(node: fx.Node) -> int:
    """The number of groups of channels that are normalized together."""
    return int(schema.arguments(node).get("num_groups", node.meta["val"].shape[1]))


# --- constants --------------------------------------------------------------------------------


def _with_constants(program: Program, statistics: FrozenStatistics) -> Program:
    editor = GraphEditor(program)
    norms = norms_of(editor.graph)
    known = [(one.name, len(one.mean)) for one in statistics.norms]
    own = [(node.name, groups_of(node)) for node in norms]
    if known != own:
        raise BadInput(
            f"statistics: they are of the norms {known}, this network has {own}; call calibrate() with this network"
        )
    for node, moments in zip(norms, statistics.norms, strict=True):
        bound, value = schema.arguments(node), node.meta["val"]
        repeats = value.shape[1] // len(moments.mean)
        mean, variance = (
            torch.tensor(row, dtype=torch.float64).repeat_interleave(repeats)
            for row in (moments.mean, moments.variance)
        )
        scale = (variance + bound["eps"]).rsqrt()
        shape = [1, value.shape[1], *[1] * (value.ndim - 2)]
        scale, shift = (
            editor.add_constant(name, row.reshape(shape), node)
            for name, row in (("norm_scale", scale), ("norm_shift", -mean * scale))
        )
        with editor.graph.inserting_before(node):
            replacement = _apply_constants(editor, node, scale, shift)
        editor.replace(node, replacement, inherit=True)
    return editor.finish()


def _apply_constants(editor: GraphEditor, node: fx.Node, scale: fx.Node, shift: fx.Node) -> fx.Node:
    """(x * scale + shift) * weight + bias as one call; the constants are computed once."""
    bound, value = schema.arguments(node), node.meta["val"]
    shape = [1, value.shape[1], *[1] * (value.ndim - 2)]
    weight, bias = (
        None if bound[name] is None else editor.call(aten.reshape.default, bound[name], shape)
        for name in ("weight", "bias")
    )
    if weight is not None:
        scale, shift = (editor.call(aten.mul.Tensor, v, weight) for v in (scale, shift))
    if bias is not None:
        shift = editor.call(aten.add.Tensor, shift, bias)
    work = _work_dtype(value)
    x, scale, shift = (_cast(editor, v, work) for v in (bound["input"], scale, shift))
    return _cast(editor, editor.call(aten.addcmul.default, shift, x, scale), value.dtype)


def _work_dtype(value: Tensor) -> torch.dtype:
    return torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype


def _cast(editor: GraphEditor, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    is_same = node.meta["val"].dtype == dtype
    return node if is_same else editor.call(aten.to.dtype, node, dtype)


# --- windows ----------------------------------------------------------------------------------


def _with_windows(program: Program, size: int) -> Program:
    editor = GraphEditor(program)
    image = next(n.meta["val"] for n in editor.graph.find_nodes(op="placeholder"))
    for node in norms_of(editor.graph):
        if node.meta["val"].ndim != 4 or image.ndim != 4:
            raise BadInput(
                f"statistics='tile:{size}': {node.name} reads "
                f"{tuple(node.meta['val'].shape)}, expected images (N, C, H, W)"
            )
        windows = [max(1, round(n / size)) for n in image.shape[2:]]
        extents = [-(-n // k) for n, k in zip(node.meta["val"].shape[2:], windows, strict=True)]
        with editor.graph.inserting_before(node):
            replacement = _normalize_windows(editor, node, extents)
        editor.replace(node, replacement, inherit=True)
    return editor.finish()


def _normalize_windows(editor: GraphEditor, node: fx.Node, extents: Sequence[int]) -> fx.Node:
    """The norm with the statistics of windows of these extents. Squared distances from the mean are
    averaged, not squares: their difference would lose digits."""
    bound, value = schema.arguments(node), node.meta["val"]
    x = _cast(editor, bound["input"], _work_dtype(value))
    mean = _window_means(editor, x, extents, groups_of(node))
    centered = editor.call(aten.sub.Tensor, x, _spread_over_windows(editor, mean, extents, value))
    squares = editor.call(aten.mul.Tensor, centered, centered)
    variance = _window_means(editor, squares, extents, groups_of(node))
    scale = editor.call(aten.rsqrt.default, editor.call(aten.add.Scalar, variance, bound["eps"]))
    shape = [1, value.shape[1], 1, 1]
    if bound["weight"] is not None:
        weight = editor.call(aten.reshape.default, bound["weight"], shape)
        scale = editor.call(aten.mul.Tensor, scale, weight)
    y = editor.call(aten.mul.Tensor, centered, _spread_over_windows(editor, scale, extents, value))
    if bound["bias"] is not None:
        bias = editor.call(aten.reshape.default, bound["bias"], shape)
        y = editor.call(aten.add.Tensor, y, bias)
    return _cast(editor, y, value.dtype)


def _window_means(editor: GraphEditor, x: fx.Node, extents: Sequence[int], groups: int) -> fx.Node:
    """Means of windows and groups of channels, (N, C, windows down, windows across)."""
    size = list(extents)
    means = editor.call(aten.avg_pool2d.default, x, size, size, [0, 0], True, False)
    n, channels, down, across = means.meta["val"].shape
    if groups == channels:
        return means
    grouped = editor.call(aten.reshape.default, means, [n, groups, channels // groups, down, across])
    grouped = editor.call(aten.mean.dim, grouped, [2], True)
    wide = [n, groups, channels // groups, down, across]
    wide_means = editor.call(aten.expand.default, grouped, wide)
    return editor.call(aten.reshape.default, wide_means, [n, channels, down, across])


def _spread_over_windows(editor: GraphEditor, windows: fx.Node, extents: Sequence[int], like: Tensor) -> fx.Node:
    """The value of its window at each position."""
    down, across = (n * k for n, k in zip(windows.meta["val"].shape[2:], extents, strict=True))
    wide = editor.call(aten.upsample_nearest2d.vec, windows, [down, across], None)
    for axis, size in ((2, like.shape[2]), (3, like.shape[3])):
        if wide.meta["val"].shape[axis] != size:
            wide = editor.call(aten.slice.Tensor, wide, axis, 0, size)
    return wide


# --- calibration ------------------------------------------------------------------------------


@in_isolation
@public
def calibrate(model: Model, tiles: Tensor | np.ndarray | Iterable[Any], *, normalize: Any = None) -> FrozenStatistics:
    """The statistics that the norms of a network see on tiles, as `FrozenStatistics`.

    Group and instance norms that were trained on tiles see other statistics on a full image. With
    `stream(..., statistics=calibrate(model, tiles))` they use those of the tiles, as constants. The
    mean and the variance of each norm are averaged over the tiles, as batch norm averages them.

    Args:
        model: network of one input, as in `stream`.
        tiles: tensor or array (N, C, H, W) of N tiles, or an iterable of such; uint8 tiles are read
            as x / 255, as in `stream`. Take tiles as those of the training, of its size.
        normalize: as in `stream`; default None, no normalization.

    Raises:
        BadInput: a tile has a wrong shape or dtype, there is none, or the network has no norm whose
            statistics are over the image.
        NotExportable: torch.export cannot capture the model.

    Example:
        >>> import torch
        >>> from torch.nn import Conv2d, InstanceNorm2d, Sequential
        >>> from demask.traverse import calibrate, stream
        >>> net = Sequential(Conv2d(3, 4, 3, padding=1), InstanceNorm2d(4), Conv2d(4, 3, 1))
        >>> frozen = calibrate(net, torch.rand(8, 3, 32, 32))
        >>> len(frozen.norms), len(frozen.norms[0].mean), frozen.tiles
        (1, 4, 8)
        >>> x, y = torch.rand(1, 3, 90, 70), torch.empty(1, 3, 90, 70)
        >>> stream(net, x, y, memory="16MiB", statistics=frozen).rows
        90
    """
    frozen = measure(_programs_of_tiles(model, tiles, normalize))
    if not frozen.tiles:
        raise BadInput(
            "calibrate: expected at least one tile, and a network with norms over the "
            "image, such as group or instance norm"
        )
    return frozen


def _programs_of_tiles(model: Model, tiles: Any, normalize: Any) -> Iterator[tuple[Program, Tensor]]:
    """The program of each tile, and the tile as the network takes it."""
    network, programs = network_of(model), {}
    for batch in [tiles] if isinstance(tiles, Tensor | np.ndarray) else tiles:
        values = torch.as_tensor(batch)
        if values.ndim < 3 or 0 in values.shape:
            raise BadInput(f"calibrate: expected tiles (N, C, H, W), got {tuple(values.shape)}")
        key = tuple(values.shape[1:]), values.dtype
        if key not in programs:
            program = captured(network, (1, *key[0]), key[1])
            programs[key] = with_normalized_input(program, normalize)
        inputs = list(programs[key].graph.find_nodes(op="placeholder"))
        for tile in values.split(1):
            into = torch.empty(tile.shape, dtype=fake(inputs[0]).dtype)
            assign(into, tile)
            yield programs[key], into


class MomentRecorder(fx.Interpreter):
    """Runs a program and adds up the moments of its norms over the image, per image."""

    def __init__(self, program: Program):
        module = torch.nn.Module()
        for name, constant in program.constants.items():
            _set_tensor(module, name, constant.tensor)
        super().__init__(module, graph=program.graph)
        self.norms: dict[fx.Node, tuple[int, Any, Any]] = dict.fromkeys(norms_of(program.graph), (0, 0.0, 0.0))

    def run_node(self, n: fx.Node) -> Any:
        if n in self.norms:
            x: Any = self.env[schema.arguments(n)["input"]]
            grouped = x.detach().double().reshape(x.shape[0], groups_of(n), -1)
            variance, mean = torch.var_mean(grouped, 2, correction=0)
            count, means, variances = self.norms[n]
            self.norms[n] = count + x.shape[0], means + mean.sum(0), variances + variance.sum(0)
        return super().run_node(n)


def _set_tensor(module: torch.nn.Module, name: str, tensor: Tensor) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        if not hasattr(module, parent):
            setattr(module, parent, torch.nn.Module())
        module = getattr(module, parent)
    setattr(module, last, torch.nn.Parameter(tensor, False) if tensor.is_floating_point() else tensor)


def measure(programs: Iterable[tuple[Program, Tensor]]) -> FrozenStatistics:
    """The mean over images of the means and variances that norms see, as batch norm averages them.

    programs: the network captured for a tile, and the tile.
    """
    totals: list[tuple[str, int, Any, Any]] = []
    for program, tile in programs:
        recorder = MomentRecorder(program)
        with torch.no_grad():
            recorder.run(tile)
        rows = [(node.name, *sums) for node, sums in recorder.norms.items()]
        if totals and [row[0] for row in rows] != [row[0] for row in totals]:
            raise BadInput("calibrate: the network has other norms for other sizes of tiles")
        totals = (
            rows
            if not totals
            else [(name, a + b, m + n, v + w) for (name, a, m, v), (_, b, n, w) in zip(totals, rows, strict=True)]
        )
    norms = tuple(
        NormMoments(name, tuple((means / count).tolist()), tuple((sums / count).tolist()))
        for name, count, means, sums in totals
    )
    if any(not math.isfinite(x) for one in norms for x in (*one.mean, *one.variance)):
        raise BadInput("calibrate: a norm sees values that are not finite in these tiles")
    return FrozenStatistics(norms, totals[0][1] if totals else 0)
