"""The exact halo of a network, the input positions that it reads outside of a tile.

Let a tile of outputs [a, b) correspond to [a * r, b * r) of an input, with r input positions per
output position, both ends integers. Then

    outputs[a:b] of the image == outputs of input[a * r - before : b * r + after], cropped

for every such tile whose halo is within the image, at any alignment to strides. `before` and
`after` are the least numbers that suffice for all alignments; they follow from the table's rules. A
crop begins at a multiple of `align`, else strided layers would sample other positions than in the
full image. The error of a tile is measured as a function of its padding.
"""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.compat.dispatch import has_schema
from demask.errors import BadInput, NotExportable
from demask.failures import public
from demask.graph.capture.errors import check_args
from demask.graph.isolation import in_isolation
from demask.graph.module_copy import structural_copy
from demask.ops import TABLE, Table
from demask.ops.entry import op_name
from demask.ops.flow import Part
from demask.ops.schema import fake
from demask.pages import Lines, Page, PageSource, TextTable
from demask.pytree_paths import leaves_with_paths
from demask.text_table import WIDTH
from demask.traverse.halo_spans import (
    NAMES,
    HaloRecording,
    Paths,
    Rules,
    TooSmall,
    alignment,
    alignments,
    least_multiple,
    paths_of,
    record_calls,
    relations_of,
    spans,
)

SHARES = tuple(Fraction(k, 8) for k in (*range(9), 10))  # of the halo
TILE = 4  # the tile is this part of the image a side, in its middle


@dataclass(frozen=True, slots=True)
class Point:
    """The error of a tile with one padding.

    Attributes:
        padding: positions of the first input added at each side, per image axis.
        share: `padding` divided by the halo, before rounding to strides.
        max_abs: largest absolute error of the tile's outputs.
        changed: share of the tile's output values that differ after rounding to 8 bits.
    """

    padding: tuple[int, ...]
    share: float
    max_abs: float
    changed: float

    def __str__(self) -> str:
        sizes = " x ".join(map(str, self.padding))
        return (
            f"{sizes} ({self.share:.0%} of the halo): largest error {self.max_abs:.2g}, "
            f"{self.changed:.2%} of the 8-bit values change"
        )


@dataclass(frozen=True, slots=True)
class Leaf:
    """An image axis of an input or output. scale: positions of the first input per position."""

    axis: int
    scale: Fraction


@dataclass(frozen=True, slots=True)
class TileCut:
    """Tiles along one image axis.

    inputs, outputs: the leaves of the call and of its result; None: not cut. halo, grid: in
    positions of the first input; crops begin and end on the grid.
    """

    inputs: tuple[Leaf | None, ...]
    outputs: tuple[Leaf | None, ...]
    halo: int
    grid: int


Range = tuple[int, int]  # of positions of the first input


def curve_of(
    model: Any,
    call: tuple[tuple[Any, ...], Mapping[str, Any]],
    cuts: Sequence[TileCut],
    levels: tuple[float, float],
    progress: Callable[[str, float], object] | None,
) -> tuple[Point, ...]:
    """The errors of the tile in the middle of the image for distinct, growing paddings.

    Paddings are multiples of the grid of the network's strides, and smaller than the image.

    Raises:
        BadInput: if the model does not run on tiles, or no output is cut along every axis.
    """
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"a curve needs a model that runs, got {type(model).__name__}: give the nn.Module that was exported"
        )
    tell = progress or (lambda title, share: None)
    work = structural_copy(model, share=True).eval()
    leaves, spec = pytree.tree_flatten(call)
    tell("full image", 0.0)
    references = _run_model(work, leaves, spec)
    sizes = [_count_positions(cut, leaves) for cut in cuts]
    tile = [_middle(size, cut.grid) for size, cut in zip(sizes, cuts, strict=True)]
    points: dict[tuple[int, ...], Point] = {}
    for k, share in enumerate(SHARES):
        tell(f"tile with {float(share):.0%} of the halo", (k + 1) / (len(SHARES) + 1))
        crops = [_pad_tile(one, cut, share, size) for one, cut, size in zip(tile, cuts, sizes, strict=True)]
        padding = tuple(max(one[0] - crop[0], crop[1] - one[1]) for one, crop in zip(tile, crops, strict=True))
        if padding in points or crops == [(0, size) for size in sizes]:
            continue  # a crop that is the full image is no tile
        parts = [_crop_leaf(leaf, cuts, k, crops) for k, leaf in enumerate(leaves)]
        outputs = _run_model(work, parts, spec)
        pairs = _tiles(outputs, references, cuts, tile, crops)
        points[padding] = Point(padding, float(share), *_measure_errors(pairs, levels))
    tell("compared", 1.0)
    return tuple(points.values())


def _run_model(work: nn.Module, leaves: Sequence[Any], spec: Any) -> list[Any]:
    args, kwargs = pytree.tree_unflatten(list(leaves), spec)
    try:
        with torch.no_grad():
            return pytree.tree_leaves(work(*args, **kwargs))
    except RuntimeError as error:
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        raise BadInput(f"the model does not run on inputs of shapes {shapes}, so it has no curve: {error}") from error


def _count_positions(cut: TileCut, leaves: Sequence[Any]) -> int:
    k, leaf = next((k, leaf) for k, leaf in enumerate(cut.inputs) if leaf is not None)
    return leaves[k].shape[leaf.axis]


def _middle(size: int, grid: int) -> Range:
    length = max(size // TILE // grid, 1) * grid
    start = (size - length) // 2 // grid * grid
    return start, start + length


def _pad_tile(tile: Range, cut: TileCut, share: Fraction, size: int) -> Range:
    """A tile padded by a share of the halo, rounded up to the grid, within the image."""
    pad = math.ceil(share * cut.halo / cut.grid) * cut.grid
    return max(tile[0] - pad, 0), min(tile[1] + pad, size)


def _crop_leaf(leaf: Any, cuts: Sequence[TileCut], k: int, crops: Sequence[Range]) -> Any:
    for cut, (start, end) in zip(cuts, crops, strict=True):
        leaf_cut = cut.inputs[k]
        if leaf_cut is not None:
            first, last = int(start / leaf_cut.scale), int(end / leaf_cut.scale)
            leaf = leaf.narrow(leaf_cut.axis, first, last - first)
    return leaf


def _tiles(
    outputs: Sequence[Any],
    references: Sequence[Any],
    cuts: Sequence[TileCut],
    tile: Sequence[Range],
    crops: Sequence[Range],
) -> list[tuple[Tensor, Tensor]]:
    """The tile of each output: computed from a crop, and cut from the full output."""
    pairs = []
    for k, (part, image) in enumerate(zip(outputs, references, strict=True)):
        leaves = [leaf for cut in cuts if (leaf := cut.outputs[k]) is not None]
        if len(leaves) < len(cuts):
            continue
        for leaf, (start, end), (first, _) in zip(leaves, tile, crops, strict=True):
            length = int((end - start) / leaf.scale)
            part = part.narrow(leaf.axis, int((start - first) / leaf.scale), length)
            image = image.narrow(leaf.axis, int(start / leaf.scale), length)
        pairs.append((part, image))
    if not pairs:
        raise BadInput("no output has positions along the image's axes, so tiles have no curve")
    return pairs


def _measure_errors(pairs: Sequence[tuple[Tensor, Tensor]], levels: tuple[float, float]) -> tuple[float, float]:
    """The largest absolute difference, and the share of 8-bit values that differ."""
    low, high = levels
    worst = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
    bits = [[((v - low) / (high - low)).clamp(0, 1).mul(255).round() for v in pair] for pair in pairs]
    changed = sum(int((a != b).sum()) for a, b in bits)
    return worst, changed / sum(a.numel() for a, _ in pairs)


GROWTH, TRIES = 4, 3  # factor by which a too small image is enlarged, and how often
OWN = "in the curve, global calls see a tile's own statistics: its errors do not reach 0"
SHOWN = 3  # global calls of a kind that the text names
Tell = Callable[[str, float], object]  # title of the current work, share that is finished


@dataclass(frozen=True, slots=True)
class Side:
    """The halo of one input along one axis, in positions of that input.

    Attributes:
        before: positions required before the tile; math.inf if a call reads the full axis.
        after: positions required after the tile; math.inf if a call reads the full axis.
        local_before, local_after: the same if calls that read the full axis, such as group norm,
            received their statistics of the full image; always finite.
        align: a crop of the input must begin at a multiple of this number; 1 without strides.
        exact: whether `before` and `after` are finite, so that padded tiles are exact.
    """

    before: float
    after: float
    local_before: int
    local_after: int
    align: int

    @property
    def exact(self) -> bool:
        """Whether `before` and `after` are finite, so that tiles with this padding are exact."""
        return math.isfinite(self.before + self.after)


@dataclass(frozen=True, slots=True)
class InputHalo:
    """The halo of one input of a model.

    Attributes:
        leaf: index of the input among all inputs, (args, kwargs) flattened.
        name: name of the parameter of `forward`, or "input <leaf>" if it has none.
        rows: `Side` along the rows of an image or the positions of a sequence.
        columns: `Side` along the columns; None for sequences.
    """

    leaf: int
    name: str
    rows: Side
    columns: Side | None


@dataclass(frozen=True, slots=True)
class Barrier:
    """A call that reads all positions of an image axis, so that no finite halo is enough.

    Attributes:
        node: name of the call.
        op: name of the op, such as "aten.group_norm.default".
        module: path of the submodule that makes the call, "" for the model itself.
        axes: axes that the call reads in full, "rows", "columns" or both.
        why: the reason in words.
    """

    node: str
    op: str
    module: str
    axes: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        location = f" in {self.module}" if self.module else ""
        return f"{self.op} ({self.node}){location}, {' and '.join(self.axes)}: {self.why}"


@dataclass(frozen=True, slots=True)
class Halo(PageSource):
    """The result of `halo`: the number of input positions that a tile needs outside of the tile.

    `print` shows a table. For an input with the name x, `result["x"]` is its entry in `inputs`.
    Along an axis with r input positions per output position, positions a to b of the output depend
    only on the crop input[a * r - before : b * r + after]. If the crop is within the image and
    begins at a multiple of `align`, the network's output of the crop has the same values there.

    Attributes:
        inputs: tuple with an entry per image or sequence: `name`, `leaf` (index among all inputs),
            `rows` and `columns` (None for sequences). `rows` and `columns` have, in positions of
            the input, `before` and `after` (number required at either side of a tile; math.inf if a
            call reads the full image), `align` (a crop must begin at a multiple of this number),
            and `local_before` and `local_after` (the numbers that a tile would need if calls that
            read the full image received their statistics from elsewhere).
        barriers: tuple of the calls that read the full image: `node` (name of the call), `op`,
            `module` (path of the submodule), `axes` and `why` (the reason).
        notes: tuple of texts, such as a restriction to the example's size; default ().
        curve: errors of a tile with growing padding if requested, else (): `padding` (positions per
            axis), `share` (padding divided by the halo), `max_abs` (largest absolute error) and
            `changed` (share of output values that differ after rounding to 8 bits).

    Example:
        >>> import torch
        >>> from demask.traverse import halo
        >>> from torch.nn import Conv2d, Sequential
        >>> model = Sequential(Conv2d(1, 1, 5, padding=2), Conv2d(1, 1, 3, padding=1))
        >>> rows = halo(model, (torch.ones(1, 1, 32, 32),)).inputs[0].rows
        >>> rows.before, rows.after, rows.align  # 2 of the first window, 1 of the second
        (3, 3, 1)
    """

    inputs: tuple[InputHalo, ...]
    barriers: tuple[Barrier, ...]
    notes: tuple[str, ...] = ()
    curve: tuple[Point, ...] = ()

    def __getitem__(self, name: str) -> InputHalo:
        """The entry of `inputs` with that name.

        Raises:
            KeyError: no input has that name; the message lists the names.
        """
        for one in self.inputs:
            if one.name == name:
                return one
        raise KeyError(f"expected one of {[one.name for one in self.inputs]}, got {name!r}")

    def to_dict(self) -> dict[str, Any]:
        """The attributes as a dictionary of JSON types; None instead of infinity."""
        return _without_infinity(asdict(self))

    def page(self) -> Page:
        """What `print`, `to_html` and notebooks show, as sections."""
        rows = []
        for one in self.inputs:
            for name, side in (("rows", one.rows), ("columns", one.columns)):
                if side is not None:
                    exact = _pair(side.before, side.after)
                    local = _pair(side.local_before, side.local_after)
                    rows.append((one.name, name, exact, local, str(side.align)))
        lines = [*_barrier_lines(self.barriers), *(f"padding {point}" for point in self.curve)]
        head = ("input", "axis", "exact", "local", "align")
        return Page(
            "demask halo",
            (
                TextTable(head, rows, "Positions that a tile needs around it", left=range(len(head))),
                Lines([*lines, *self.notes], "What reads more"),
            ),
        )


@in_isolation
@public
def halo(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    curve: bool = False,
    levels: tuple[float, float] = (0.0, 1.0),
    progress: Tell | None = None,
    table: Table = TABLE,
) -> Halo:
    """The number of input positions that a tile needs outside of the tile, as a `Halo`.

    A halo is the part of the receptive field outside of the tile: the smallest padding with which
    tiles that are computed one by one equal the full output, for tiles at any position. Inputs of
    four axes or more are images with rows and columns as axes 2 and 3; inputs of three axes are
    sequences with positions as axis 2. The model is analyzed in eval mode, is not changed, and runs
    only if `curve` is set.

    Args:
        model: nn.Module or ExportedProgram.
        args: tuple of example inputs. Values matter only for `curve`.
        kwargs: mapping of example keyword inputs; default None, no keyword inputs.
        curve: whether to run the model on a tile in the middle of the image with growing padding
            and compare it with the full output; needs an nn.Module; default False.
        levels: output values that 8-bit rounding maps to 0 and 255, for `curve`; default (0.0,
            1.0).
        progress: function called with a title and the finished share, 0 to 1, while `curve` is
            computed; default None, no calls.
        table: op table, which describes which inputs each output position of an ATen op reads;
            default `demask.ops.TABLE`. `TABLE.extended` adds your own ops.

    Raises:
        BadInput: `model`, `args` or `kwargs` has a wrong type; no input has three axes or more; the
            model fails on the example; or, for `curve`, the model does not run on tiles.
        NotExportable: the model cannot be captured as a graph.

    Example:
        >>> import torch
        >>> from demask.traverse import halo
        >>> sizes = halo(torch.nn.Conv2d(3, 8, 5, padding=2), (torch.zeros(1, 3, 32, 32),))
        >>> sizes.inputs[0].rows.before, sizes.inputs[0].rows.after
        (2, 2)
    """
    check_args(args)
    kwargs = dict(kwargs or {})
    _check_has_image(args, kwargs)
    recording, paths, notes = _record_paths(model, args, kwargs, table)
    names = _input_names(model, args, kwargs)
    inputs = tuple(
        InputHalo(
            k,
            names[k],
            _measure_side(paths[0], node),
            _measure_side(paths[1], node) if node in paths[1].parts else None,
        )
        for k, node in enumerate(recording.inputs)
        if node is not None and node in paths[0].parts
    )
    result = Halo(inputs, _barriers(paths), notes)
    if not curve:
        return result
    cuts = tuple(_cut_leaves(axis, recording, inputs, k) for k, axis in enumerate(paths) if axis.parts)
    points = curve_of(model, (args, kwargs), cuts, levels, progress)
    if result.barriers:
        notes += (OWN,)
    return Halo(inputs, result.barriers, notes, points)


def _check_has_image(args: Any, kwargs: dict[str, Any]) -> None:
    leaves = pytree.tree_leaves((args, kwargs))
    if not any(_is_image(leaf) for leaf in leaves):
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        raise BadInput(
            "expected an image (n, channels, rows, columns) or a sequence (n, channels, positions) "
            f"among the inputs, got shapes {shapes}"
        )


def _is_image(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 2


# --- reading the model --------------------------------------------------------------------------


def _record_paths(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], table: Table
) -> tuple[HaloRecording, tuple[Paths, Paths], tuple[str, ...]]:
    """The recording, its paths along rows and columns, and notes.

    Axes so short that a call reads only border are enlarged.
    """
    original = recording = record_calls(model, args, kwargs, table)
    factors: tuple[int, ...] = (1, 1)
    for attempt in range(TRIES + 1):
        paths = _paths(recording, table, last=attempt == TRIES)
        if isinstance(paths[0], Paths) and isinstance(paths[1], Paths):
            pairs = zip(factors, NAMES, strict=True)
            sizes = " and ".join(f"{n} times the {name}" for n, name in pairs if n > 1)
            note = f"read at {sizes} of the example: in it, calls see both borders"
            return recording, (paths[0], paths[1]), (note,) * (max(factors) > 1)
        factors = tuple(n if isinstance(axis, Paths) else n * GROWTH for n, axis in zip(factors, paths, strict=True))
        try:
            recording = record_calls(model, *_enlarge_images(args, kwargs, factors), table)
        except (NotExportable, BadInput):
            break
    rows, columns = _paths(original, table, last=True)
    note = "some calls see both borders of the image: this holds only for the example's size"
    return original, (rows, columns), (note,)  # type: ignore[return-value]


def _enlarge_images(args: Any, kwargs: Any, factors: tuple[int, ...]) -> tuple[Any, Any]:
    """The example with images enlarged by factors along rows and columns."""

    def enlarge(leaf: Any) -> Any:
        if not _is_image(leaf):
            return leaf
        sizes = [n * factors[k - 2] if k in (2, 3) else n for k, n in enumerate(leaf.shape)]
        return leaf.new_zeros(()).expand(sizes)

    return pytree.tree_map(enlarge, (args, kwargs))


def _paths(recording: HaloRecording, table: Table, *, last: bool) -> list[Paths | TooSmall]:
    """The paths along rows and along columns; TooSmall in place of paths where the image has too
    few positions, unless `last`."""
    relations, rules = relations_of(recording, table), Rules()
    values = [node for node in recording.inputs if node is not None]
    result: list[Paths | TooSmall] = []
    for axis in (2, 3):
        inputs = {n: Part(axis, 1, fake(n).shape[axis]) for n in values if 2 < fake(n).ndim > axis}
        try:
            result.append(paths_of(recording, relations, inputs, rules, last))
        except TooSmall as small:
            result.append(small)
    return result


def _input_names(model: Any, args: Any, kwargs: Any) -> list[str]:
    """A name for each leaf of the call, from forward's signature if that names every leaf."""
    leaves = pytree.tree_leaves((args, kwargs))
    numbered = [f"input {k}" for k in range(len(leaves))]
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except (AttributeError, TypeError, ValueError):
        return numbered
    paths = leaves_with_paths(dict(bound))
    if [id(leaf) for _, leaf in paths] != [id(leaf) for leaf in leaves]:
        return numbered
    return [str(path[0].key) + pytree.keystr(path[1:]) for path, _ in paths]


# --- from paths to numbers ----------------------------------------------------------------------


def _measure_side(paths: Paths, node: fx.Node) -> Side:
    """The halo of an input along one image axis, over all alignments of tiles."""
    inputs = {n: part for n, part in paths.parts.items() if n.op == "placeholder"}
    exact, local = [], []
    for tile_start in alignments(paths, inputs):
        position = tile_start / paths.scales[node]
        for reaches, is_local in ((exact, False), (local, True)):
            own = position, position
            start, end = spans(paths, tile_start, local=is_local).get(node, own)
            reaches.append((position - start, end - position))
    reach = [max(0, *(sides[k] for sides in reaches)) for reaches in (exact, local) for k in (0, 1)]
    before, after = (v if math.isinf(v) else int(v) for v in reach[:2])
    return Side(before, after, int(reach[2]), int(reach[3]), alignment(paths, node))


def _barriers(paths: tuple[Paths, Paths]) -> tuple[Barrier, ...]:
    """The global calls that the outputs depend on, in the order of the calls."""
    calls: dict[fx.Node, tuple[list[str], str]] = {}
    for name, axis in zip(NAMES, paths, strict=True):
        if not axis.parts:
            continue
        for node, edges in axis.edges.items():
            why = next((edge.why for edge in edges if edge.why), "")
            if why:
                calls.setdefault(node, ([], why))[0].append(name)
    return tuple(
        Barrier(node.name, op_name(call.target), node.meta.get("module", ""), tuple(axes), why)
        for node, (axes, why) in calls.items()
        # for one of several outputs, the call that has them
        for call in (node if has_schema(node.target) else node.all_input_nodes[0],)
    )


def _cut_leaves(paths: Paths, recording: HaloRecording, inputs: tuple[InputHalo, ...], axis: int) -> TileCut:
    """How the leaves of the call and of the result are cut along an image axis."""

    def leaf(node: fx.Node | None) -> Leaf | None:
        has_axis = node is not None and node in paths.parts
        return Leaf(paths.parts[node].axis, paths.scale(node)) if has_axis else None  # type: ignore[index]

    on_inputs, on_outputs = tuple(map(leaf, recording.inputs)), tuple(map(leaf, recording.outputs))
    halo, grid = Fraction(0), Fraction(1)
    for one in inputs:
        side, cut = (one.rows, one.columns)[axis], on_inputs[one.leaf]
        if side is not None and cut is not None:
            halo = max(halo, cut.scale * max(side.local_before, side.local_after))
            grid = least_multiple([grid, cut.scale * side.align])
    grid = least_multiple([grid, *(o.scale for o in on_outputs if o is not None)])
    return TileCut(on_inputs, on_outputs, math.ceil(halo), int(grid))


# --- in words -----------------------------------------------------------------------------------


def _without_infinity(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_infinity(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_infinity(item) for item in value]
    return None if value == math.inf else value


def _barrier_lines(barriers: tuple[Barrier, ...]) -> list[str]:
    """Lines on global calls, calls of one kind on one line."""
    groups: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
    for one in barriers:
        nodes = groups.setdefault((one.op, one.axes, one.why), [])
        nodes.append(one.module or one.node)
    lines = ["read the full image (`local` takes them position by position):"] if groups else []
    for (op, axes, why), nodes in groups.items():
        more = f" and {len(nodes) - SHOWN} more" if len(nodes) > SHOWN else ""
        line = f"{op} along {' and '.join(axes)} {why}: {', '.join(nodes[:SHOWN])}{more}"
        lines += textwrap.wrap(line, WIDTH - 2, initial_indent="  ", subsequent_indent="    ")
    return lines


def _pair(before: float, after: float) -> str:
    return f"{before}" if before == after else f"{before} before, {after} after"
