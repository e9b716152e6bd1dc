"""How far beyond a tile a network reads: the exact halo, found from the rules of its calls.

Let a tile of outputs [a, b) come from [a * r, b * r) of an input, r input positions per output
position, both ends whole. Then

    outputs[a:b] of the image == outputs of input[a * r - before : b * r + after], cropped

for every such tile whose halo lies within the image, whatever its alignment to strides; `before`
and `after` are the least numbers for which each alignment reads no more. A crop itself begins at a
multiple of `align`, or strided layers would sample other positions than in the whole image.
"""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table as TextTable
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.compat.dispatch import has_schema
from demask.errors import BadInput, NotExportable
from demask.failures import public
from demask.ops import TABLE, Table
from demask.ops.entry import op_name
from demask.ops.flow import Part
from demask.text_table import WIDTH, as_lines
from demask.traverse.halos.axis_steps import Rules, TooSmall
from demask.traverse.halos.error_curve import Leaf, Point, TileCut, curve_of
from demask.traverse.halos.record import HaloRecording, recorded
from demask.traverse.halos.spans import (
    NAMES,
    Paths,
    alignment,
    alignments,
    least_multiple,
    paths_of,
    relations_of,
    spans,
)  # fmt: skip

GROWTH, TRIES = 4, 3  # an image that is too small is taken this much larger, this often
OWN = "in the curve, global calls see a tile's own statistics: its errors do not reach 0"
SHOWN = 3  # global calls of a kind that the text names
Tell = Callable[[str, float], object]  # what is being done, and the share that is done


@dataclass(frozen=True, slots=True)
class Side:
    """The halo along one axis of an input, in its positions.

    before, after: for exact tiles; math.inf where a global call reads all positions. local_before,
    local_after: with global calls taken position by position (statistics given from elsewhere).
    align: a crop begins at a multiple of it.
    """

    before: float
    after: float
    local_before: int
    local_after: int
    align: int

    @property
    def exact(self) -> bool:
        """Is there a halo with which tiles are exact?"""
        return math.isfinite(self.before + self.after)


@dataclass(frozen=True, slots=True)
class InputHalo:
    """Of one input: the leaf of the call it is, its name, and a side per image axis it has."""

    leaf: int
    name: str
    rows: Side
    columns: Side | None


@dataclass(frozen=True, slots=True)
class Barrier:
    """A call that reads all positions along some image axes: its node, op, the module that makes
    it ("" where that is the model itself), the axes, and why."""

    node: str
    op: str
    module: str
    axes: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.op} ({self.node}){where}, {' and '.join(self.axes)}: {self.why}"


@dataclass(frozen=True, slots=True)
class Halo:
    """What `halo` found; prints as a table."""

    inputs: tuple[InputHalo, ...]
    barriers: tuple[Barrier, ...]
    notes: tuple[str, ...] = ()
    curve: tuple[Point, ...] = ()

    def __getitem__(self, name: str) -> InputHalo:
        """The input of that name. Raises KeyError naming those there are."""
        for found in self.inputs:
            if found.name == name:
                return found
        raise KeyError(f"expected one of {[found.name for found in self.inputs]}, got {name!r}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON takes them: None stands for infinite."""
        return _plain(asdict(self))

    def __str__(self) -> str:
        return _text(self)


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
    """How many input positions beyond a tile's own must be given for the tile to be exact.

    Images are inputs of four dimensions and more, rows and columns the third and the fourth;
    sequences are inputs of three, positions the last. The model is read in eval mode and left as
    it is; nothing is computed, but for the curve. Raises BadInput where no input is one of these,
    and what `demask.capture` raises where the model cannot be read.

    curve: also run the model on tiles with growing padding and compare with the whole image.
    levels: the values that are 0 and 255 in the curve's 8-bit values. progress: told, while the
    curve is run, what is done and which share of all. table: the op table, as `demask.demask`
    takes it.

    >>> import torch
    >>> found = halo(torch.nn.Conv2d(3, 8, 5, padding=2), (torch.zeros(1, 3, 32, 32),))
    >>> found.inputs[0].rows.before, found.inputs[0].rows.after
    (2, 2)
    """
    kwargs = dict(kwargs or {})
    _check(args, kwargs)
    found, paths, notes = _read(model, args, kwargs, table)
    names = _names(model, args, kwargs)
    inputs = tuple(
        InputHalo(k, names[k], _side(paths[0], node),
                  _side(paths[1], node) if node in paths[1].places else None)
        for k, node in enumerate(found.inputs) if node is not None and node in paths[0].places
    )  # fmt: skip
    result = Halo(inputs, _barriers(paths), notes)
    if not curve:
        return result
    cuts = tuple(_cut(axis, found, inputs, k) for k, axis in enumerate(paths) if axis.places)
    points = curve_of(model, (args, kwargs), cuts, levels, progress)
    if result.barriers:
        notes += (OWN,)
    return Halo(inputs, result.barriers, notes, points)


def _check(args: Any, kwargs: dict[str, Any]) -> None:
    """Raise BadInput unless an input has positions."""
    if not isinstance(args, tuple):
        raise BadInput(f"args must be a tuple of the model's inputs, got {type(args).__name__}: "
                       "write (x,) for one input")  # fmt: skip
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


def _read(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], table: Table
) -> tuple[HaloRecording, tuple[Paths, Paths], tuple[str, ...]]:
    """The recording and its paths along rows and columns: at the size given or, along an axis so
    short that a call sees nothing but border, at a larger one."""
    given = found = recorded(model, args, kwargs, table)
    factors: tuple[int, ...] = (1, 1)
    for attempt in range(TRIES + 1):
        paths = _paths(found, table, last=attempt == TRIES)
        if isinstance(paths[0], Paths) and isinstance(paths[1], Paths):
            pairs = zip(factors, NAMES, strict=True)
            sizes = " and ".join(f"{n} times the {name}" for n, name in pairs if n > 1)
            note = f"read at {sizes} given: there, calls would see both borders"
            return found, (paths[0], paths[1]), (note,) * (max(factors) > 1)
        factors = tuple(n if isinstance(axis, Paths) else n * GROWTH
                        for n, axis in zip(factors, paths, strict=True))  # fmt: skip
        try:
            found = recorded(model, *_larger(args, kwargs, factors), table)
        except (NotExportable, BadInput):
            break
    rows, columns = _paths(given, table, last=True)
    note = "some calls see both borders of the image: this holds for the size given alone"
    return given, (rows, columns), (note,)  # type: ignore[return-value]


def _larger(args: Any, kwargs: Any, factors: tuple[int, ...]) -> tuple[Any, Any]:
    """The example with images larger, along rows and along columns."""

    def grown(leaf: Any) -> Any:
        if not _is_image(leaf):
            return leaf
        sizes = [n * factors[k - 2] if k in (2, 3) else n for k, n in enumerate(leaf.shape)]
        return leaf.new_zeros(()).expand(sizes)

    return pytree.tree_map(grown, (args, kwargs))


def _paths(found: HaloRecording, table: Table, *, last: bool) -> list[Paths | TooSmall]:
    """Along rows and along columns; TooSmall, unless it is the `last` try, where an image has too
    few of them."""
    relations, rules = relations_of(found, table), Rules()
    values = [node for node in found.inputs if node is not None]
    both: list[Paths | TooSmall] = []
    for axis in (2, 3):
        inputs = {n: Part(axis, 1, n.meta["val"].shape[axis]) for n in values
                  if 2 < n.meta["val"].ndim > axis}  # fmt: skip
        try:
            both.append(paths_of(found, relations, inputs, rules, last))
        except TooSmall as small:
            both.append(small)
    return both


def _names(model: Any, args: Any, kwargs: Any) -> list[str]:
    """A name for each leaf of the call, by forward's signature where it has one name for each."""
    leaves = pytree.tree_leaves((args, kwargs))
    plain = [f"input {k}" for k in range(len(leaves))]
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except (AttributeError, TypeError, ValueError):
        return plain
    paths = [(path, leaf) for path, leaf in pytree.tree_flatten_with_path(dict(bound))[0]]
    if [id(leaf) for _, leaf in paths] != [id(leaf) for leaf in leaves]:
        return plain
    return [str(path[0].key) + pytree.keystr(path[1:]) for path, _ in paths]  # type: ignore[attr-defined]


# --- from paths to numbers ----------------------------------------------------------------------


def _side(paths: Paths, node: fx.Node) -> Side:
    """The halo of an input that has the axis, over all alignments of tiles."""
    inputs = {n: place for n, place in paths.places.items() if n.op == "placeholder"}
    exact, local = [], []
    for at in alignments(paths, inputs):
        own = at / paths.scales[node]
        for spread, is_local in ((exact, False), (local, True)):
            start, end = spans(paths, at, local=is_local).get(node, (own, own))
            spread.append((own - start, end - own))
    reach = [max(0, *(sides[k] for sides in spread)) for spread in (exact, local) for k in (0, 1)]
    before, after = (v if math.isinf(v) else int(v) for v in reach[:2])
    return Side(before, after, int(reach[2]), int(reach[3]), alignment(paths, node))


def _barriers(paths: tuple[Paths, Paths]) -> tuple[Barrier, ...]:
    """The global calls that the outputs depend on, in the order of the calls."""
    found: dict[fx.Node, tuple[list[str], str]] = {}
    for name, axis in zip(NAMES, paths, strict=True):
        if not axis.places:
            continue
        for node, edges in axis.edges.items():
            why = next((edge.why for edge in edges if edge.why), "")
            if why:
                found.setdefault(node, ([], why))[0].append(name)
    return tuple(
        Barrier(
            node.name, op_name(_call(node).target), node.meta.get("module", ""), tuple(axes), why
        )
        for node, (axes, why) in found.items()
    )


def _call(node: fx.Node) -> fx.Node:
    """The call that makes a value: of one of several outputs, the call before."""
    return node if has_schema(node.target) else node.all_input_nodes[0]


def _cut(paths: Paths, found: HaloRecording, inputs: tuple[InputHalo, ...], axis: int) -> TileCut:
    """How the leaves of the call and of the result are cut along an image axis."""

    def leaf(node: fx.Node | None) -> Leaf | None:
        known = node is not None and node in paths.places
        return Leaf(paths.places[node].axis, paths.scale(node)) if known else None  # type: ignore[index]

    given, made = tuple(map(leaf, found.inputs)), tuple(map(leaf, found.outputs))
    halo, grid = Fraction(0), Fraction(1)
    for one in inputs:
        side, place = (one.rows, one.columns)[axis], given[one.leaf]
        if side is not None and place is not None:
            halo = max(halo, place.scale * max(side.local_before, side.local_after))
            grid = least_multiple([grid, place.scale * side.align])
    grid = least_multiple([grid, *(o.scale for o in made if o is not None)])
    return TileCut(given, made, math.ceil(halo), int(grid))


# --- in words -----------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if value == math.inf else value


def _text(found: Halo) -> str:
    table = TextTable("input", "axis", "exact", "local", "align", box=SIMPLE_HEAD)
    for one in found.inputs:
        for name, side in (("rows", one.rows), ("columns", one.columns)):
            if side is not None:
                exact = _pair(side.before, side.after)
                local = _pair(side.local_before, side.local_after)
                table.add_row(one.name, name, exact, local, str(side.align))
    lines = [*as_lines(table), *_barrier_lines(found.barriers)]
    lines += [f"padding {point}" for point in found.curve]
    return "\n".join([*lines, *found.notes])


def _barrier_lines(barriers: tuple[Barrier, ...]) -> list[str]:
    """What is global, calls of one kind on one line."""
    alike: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
    for one in barriers:
        places = alike.setdefault((one.op, one.axes, one.why), [])
        places.append(one.module or one.node)
    lines = ["read the whole image (`local` takes them position by position):"] if alike else []
    for (op, axes, why), places in alike.items():
        more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
        words = f"{op} along {' and '.join(axes)} {why}: {', '.join(places[:SHOWN])}{more}"
        lines += textwrap.wrap(words, WIDTH - 2, initial_indent="  ", subsequent_indent="    ")
    return lines


def _pair(before: float, after: float) -> str:
    """Two numbers, or one where they are the same."""
    return f"{before}" if before == after else f"{before} before, {after} after"
