"""The laws every entry of the table must obey, tested with no code per op.

    scatter:  op(x * mask + fill) * out_mask == demask of the same
    region:   tile(op(x)) == tile(op(y)) for every y that equals x on the claimed input region
    minimal:  re-randomizing any kept slice of any weight moves some output

This is the bottom layer, so the function that demasks is an argument: pass `demask.demask`.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from demask.errors import Mismatch, TableError
from demask.ops import regions, schema
from demask.ops.entry import Case, Declined, Shape, Table
from demask.ops.flow import axis_of
from demask.ops.laws.draws import Axes, drawn, drawn_fill, drawn_mask, drawn_scale, tied_masks
from demask.ops.laws.minimality import missed
from demask.ops.relation import Relation, bind

Demask = Callable[..., fx.GraphModule]
_TOLERANCE = 1e-10  # float64, relative: sums in another order, a few hundred terms long
_BATCHES = (5, 16)  # neither is a size of any case


def law_cases(table: Table) -> Iterator[tuple[str, int, Case]]:
    """Every case of every entry: op name, number of the case, case."""
    for name, entry in table.items():
        yield from ((name, index, case) for index, case in enumerate(entry.cases))


def target_of(name: str) -> Any:
    """The callable that a name of the table stands for. Raises TableError if torch has none.

    >>> target_of("aten.relu.default")
    <OpOverload(op='aten.relu', overload='default')>
    """
    namespace, _, rest = name.partition(".")
    op, _, overload = rest.rpartition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), op), overload)
    except AttributeError as error:
        raise TableError(f"the table names {name!r}, which torch.ops does not have") from error


class LawModule(nn.Module):
    """op(x * scale + fill) * out_scale for scales with masked positions drawn from `seed`, float64.

    Activations of the case are the inputs of forward, in order (`inputs` draws them); its constants
    are parameters with masked positions of their own; integers and booleans come as they are.
    inner, outer: per activation and per output, the axes that may be masked; left out, every one.
    tied: constants whose positions go together: per constant, its mask, zero where it is off.
    """

    def __init__(
        self,
        target: Any,
        case: Case,
        seed: int,
        inner: Mapping[int, frozenset[int]] | None = None,
        outer: Mapping[int, frozenset[int]] | None = None,
        tied: Mapping[int, Tensor] = types.MappingProxyType({}),
    ):
        super().__init__()
        self.target, self.seed = target, seed
        leaves, self.spec = pytree.tree_flatten((case.args, dict(case.kwargs)))
        self.leaves = tuple(leaves)
        generator = torch.Generator().manual_seed(seed)
        for k, leaf in enumerate(leaves):
            if k in tied:
                self._hold(f"constant{k}", drawn(leaf, generator) * tied[k])
            elif isinstance(leaf, Shape):
                self._draw(k, leaf, generator, None if inner is None else inner.get(k, frozenset()))
        with torch.no_grad():
            made = self._run(self.inputs(0))
        for k, value in enumerate(made):
            axes = None if outer is None else outer.get(k, frozenset())
            mask = drawn_mask(value.shape, generator, axes)
            self._hold(f"out{k}", drawn_scale(mask, "normal", generator))
        self.eval()

    def _draw(self, k: int, shape: Shape, generator: torch.Generator, axes: Axes) -> None:
        if shape.of not in ("normal", "positive"):
            if shape.constant:
                self.register_buffer(f"constant{k}", drawn(shape, generator))
            return
        mask = drawn_mask(shape.sizes, generator, None if shape.constant else axes)
        fill = drawn_fill(mask, shape.of, generator)
        if shape.constant:
            self._hold(f"constant{k}", drawn(shape, generator) * mask + fill)
        else:
            self._hold(f"scale{k}", drawn_scale(mask, shape.of, generator))
            # A parameter of zeros would stay, whether or not the call takes a shift out again.
            self.register_buffer(f"fill{k}", fill)

    def _hold(self, name: str, value: Tensor) -> None:
        # Running statistics are among them, and those take no gradient.
        self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def inputs(self, seed: int, batch: int | None = None, dynamic: Any = ()) -> tuple[Tensor, ...]:
        """Inputs of forward; those whose number is in `dynamic` have `batch` rows."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + seed)
        found = []
        for number, shape in enumerate(s for s in self.leaves if _is_input(s)):
            sizes = list(shape.sizes)
            if batch is not None and number in dynamic:
                sizes[0] = batch
            found.append(drawn(shape, generator, sizes))
        return tuple(found)

    def wide_inputs(self, number: int, batch: int | None, dynamic: Any) -> tuple[Tensor, ...]:
        """Inputs for the minimality oracle; every third ones reach what comparisons with drawn
        constants do not tell apart otherwise."""
        wide = 8.0 if number % 3 == 2 else 1.0
        shapes = [shape for shape in self.leaves if _is_input(shape)]
        inputs = self.inputs(len(_BATCHES) + 2 + number, batch, dynamic)
        return tuple(x * wide if shape.of == "normal" else x
                     for shape, x in zip(shapes, inputs, strict=True))  # fmt: skip

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        made = self._run(inputs)
        wide = [v if v.dtype == torch.float64 else v.double() for v in made]
        return tuple(v * getattr(self, f"out{k}") for k, v in enumerate(wide))

    def _run(self, inputs: Iterable[Tensor]) -> tuple[Tensor, ...]:
        rest = iter(inputs)
        values = [self._value(k, leaf, rest) for k, leaf in enumerate(self.leaves)]
        args, kwargs = pytree.tree_unflatten(values, self.spec)
        made = self.target(*args, **kwargs)
        return tuple(made) if isinstance(made, (list, tuple)) else (made,)

    def _value(self, k: int, leaf: Any, rest: Iterator[Tensor]) -> Any:
        if not isinstance(leaf, Shape):
            return leaf
        if leaf.constant:
            return getattr(self, f"constant{k}")
        value = next(rest)
        if leaf.of not in ("normal", "positive"):
            return value
        return value * getattr(self, f"scale{k}") + getattr(self, f"fill{k}")


def _is_input(leaf: Any) -> bool:
    return isinstance(leaf, Shape) and not leaf.constant


@dataclass(frozen=True, slots=True)
class ScatterResult:
    """How far a demasked law module is from its original.

    error: max |a - b| / max |a| over all outputs and batches; inf where shapes or the positions of
    NaN differ. batches: the batch sizes compared, None for the case's own. slim: the demasked
    module, and what draws inputs for it, by a number, at the largest batch.
    """

    name: str
    seed: int
    error: float
    batches: tuple[int | None, ...]
    slim: fx.GraphModule
    draw: Callable[[int], tuple[Tensor, ...]]

    @property
    def ok(self) -> bool:
        return self.error <= _TOLERANCE


def check_scatter_law(
    name: str, case: Case, seed: int, table: Table, demask: Demask
) -> ScatterResult:
    """The scatter law for one case: demask the law module, compare at the case's own batch and,
    where dimension 0 of an input is dynamic, at two others.

    Even seeds mask only axes that the op may lose positions of; odd seeds mask any, windows and
    normalised axes too; one seed in four masks the first axis as well, which makes it static.
    """
    inner, outer = maskable(name, case, table, every=bool(seed % 2), first=seed % 4 == 3)
    tied = {} if seed % 2 else _tied(name, case, seed, table)
    module = LawModule(target_of(name), case, seed, inner, outer, tied)
    slim = demask(module, module.inputs(0), table=table, result="graph")
    specs: Any = slim.demasked
    dynamic = {k for k, s in enumerate(specs.inputs) if s.sizes and _is_symbol(s.sizes[0])}
    batches = (None, *(b for b in _BATCHES if dynamic and _runs(module, b, dynamic)))
    error = 0.0
    for k, batch in enumerate(batches):
        inputs = module.inputs(k + 1, batch, dynamic)
        with torch.no_grad():
            error = max(error, relative_error(module(*inputs), slim(*inputs)))
    draw = partial(module.wide_inputs, batch=batches[-1], dynamic=dynamic)
    return ScatterResult(name, seed, error, batches, slim, draw)


def _runs(module: LawModule, batch: int, dynamic: Any) -> bool:
    """Does the module itself take a batch? Capture of some ops compares no sizes."""
    with torch.no_grad():
        try:
            module(*module.inputs(0, batch, dynamic))
        except RuntimeError:
            return False
    return True


def maskable(name: str, case: Case, table: Table, *, every: bool, first: bool) -> tuple[dict, dict]:
    """Axes of each activation (by leaf) and of each output to mask."""
    leaves, spec = pytree.tree_flatten((case.args, dict(case.kwargs)))
    relation = bind(drawn_call(name, leaves, spec, torch.Generator().manual_seed(0)), table)
    shaped = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Shape)]
    if isinstance(relation, Declined):
        return {}, {}
    fixed = frozenset() if every else relation.window | relation.complete

    def free(axes: Any) -> frozenset[int]:
        return frozenset(k for k, a in enumerate(axes) if (k or first) and not set(a) & fixed)

    at = {o.value: relation.ins[k] for k, o in enumerate(relation.operands)}
    places = [node for node in relation.node.graph.nodes if node.op == "placeholder"]
    inner = {k: free(at[node]) for k, node in zip(shaped, places, strict=True) if node in at}
    return inner, {k: free(axes) for k, axes in enumerate(relation.outs)}


def _tied(name: str, case: Case, seed: int, table: Table) -> dict[int, Tensor]:
    """Masks of the constants of a recurrent call, by leaf: its gates and all that reads back lose
    the same units."""
    leaves, spec = pytree.tree_flatten((case.args, dict(case.kwargs)))
    generator = torch.Generator().manual_seed(seed)
    relation = bind(drawn_call(name, leaves, spec, generator), table)
    if isinstance(relation, Declined) or not relation.back:
        return {}
    masks = {o.value: mask for o, mask in
             zip(relation.operands, tied_masks(relation, generator), strict=True)}  # fmt: skip
    shaped = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Shape)]
    places = [node for node in relation.node.graph.nodes if node.op == "placeholder"]
    return {k: masks[node] for k, node in zip(shaped, places, strict=True)
            if leaves[k].constant and leaves[k].of == "normal"}  # fmt: skip


def drawn_call(name: str, leaves: list, spec: Any, generator: torch.Generator) -> fx.Node:
    """The call of a case on drawn tensors, as a node."""
    values = [drawn(leaf, generator) if isinstance(leaf, Shape) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(values, spec)
    return call_node(target_of(name), *args, **kwargs)


def _is_symbol(size: int | str) -> bool:
    return isinstance(size, str) and not size.isdigit()


def relative_error(expected: Iterable[Tensor], found: Iterable[Tensor]) -> float:
    """max |a - b| / max |a| over pairs of tensors; inf where shapes, dtypes or NaN differ.

    Against 1e-3 where all of a is smaller: the deviation of equal numbers is a rounding error.
    """
    worst = 0.0
    for a, b in itertools.zip_longest(expected, found):
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        same = (a == b) | (a.isnan() & b.isnan())
        if not bool(same.all()):
            gap = (a - b).abs()[~same].max()
            scale = a.abs()[a.isfinite()].max().clamp(min=1e-3)
            worst = max(worst, float("inf") if gap.isnan() else float(gap / scale))
    return worst


def call_node(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call of an op on real tensors as a graph node, to be bound to the table.

    Integer tensors count as constants: positions to take are known.
    """
    graph = fx.Graph()

    def placed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"x_{len(graph.nodes)}")
        node.meta["val"] = value
        if value.dtype == torch.int64:
            node.meta["positions"] = value
        return node

    places = pytree.tree_map(placed, (args, kwargs))
    node = graph.call_function(target, *places)
    with torch.no_grad():
        node.meta["val"] = target(*args, **kwargs)
    return node


@dataclass(frozen=True, slots=True)
class RegionResult:
    """What garbage outside the claimed input regions did.

    tiles: how many were tried. broken: those whose output changed. loose: claims along windowed and
    moved axes whose first or last position changed nothing when spoiled.
    """

    tiles: int
    broken: tuple[str, ...]
    loose: tuple[str, ...]


def check_region_law(name: str, case: Case, seed: int, table: Table) -> RegionResult | Declined:
    """The region law for one case: every axis of every output, several tiles, every operand."""
    generator = torch.Generator().manual_seed(seed)
    leaves, spec = pytree.tree_flatten((case.args, dict(case.kwargs)))
    relation = bind(drawn_call(name, leaves, spec, generator), table)
    if isinstance(relation, Declined):
        return relation
    tiles, broken, loose = 0, [], []
    for out, axes in enumerate(relation.outs):
        for axis, operand in itertools.product(range(len(axes)), range(len(relation.operands))):
            at = axis_of(relation, operand, axis, out=out)
            if at is None:
                continue
            size = schema.outputs(relation.node)[out].shape[axis]
            for start, end in _tiles(size, generator):
                tile = _LawTile(relation, operand, at, out, axis, start, end)
                tiles += 1
                broken += tile.broken(generator)
                loose += tile.loose(generator)
    return RegionResult(tiles, tuple(broken), tuple(loose))


def _tiles(size: int, generator: torch.Generator) -> list[tuple[int, int]]:
    """Every single position of a short axis, its halves, and three drawn intervals."""
    ends = [(0, 1), (size - 1, size), (0, size // 2), (size // 2, size), (0, size)]
    found = {(k, k + 1) for k in range(min(size, 8))} | {(a, b) for a, b in ends if a < b}
    for _ in range(3):
        a, b = sorted(int(torch.randint(size + 1, (), generator=generator)) for _ in range(2))
        found |= {(a, b)} if a < b else set()
    return sorted(found)


@dataclass(frozen=True, slots=True)
class _LawTile:
    """Positions [start, end) of one axis of one output, asked of axis `at` of one operand."""

    relation: Relation
    operand: int
    at: int
    out: int
    axis: int
    start: int
    end: int

    def broken(self, generator: torch.Generator) -> list[str]:
        """Spoils all that neither `needed` nor the pair input_start, input_end claims."""
        args = (self.relation, self.operand, self.axis)
        exact = regions.needed(*args, self.start, self.end, out=self.out)
        pair = (regions.input_start(*args, self.start, out=self.out),
                regions.input_end(*args, self.end, out=self.out))  # fmt: skip
        size = self._value.shape[self.at]
        return [
            f"{self}: {claim} is not enough"
            for claim in sorted({exact, pair})
            if not self._holds([k for k in range(size) if not claim[0] <= k < claim[1]], generator)
        ]

    def loose(self, generator: torch.Generator) -> list[str]:
        """Is the first and the last claimed position of a windowed or moved axis really read?"""
        letters = set(self.relation.outs[self.out][self.axis])
        if not letters & (self.relation.window | self.relation.moved):
            return []
        args = (self.relation, self.operand, self.axis, self.start, self.end)
        low, high = regions.needed(*args, out=self.out)
        edges = sorted({low, high - 1}) if low < high else []
        return [f"{self}: {k} is not read" for k in edges if self._holds([k], generator)]

    @property
    def _value(self) -> Tensor:
        return self.relation.operands[self.operand].value.meta["val"]

    def _holds(self, spoiled: list[int], generator: torch.Generator) -> bool:
        """Is the tile the same when the given positions hold garbage?"""
        if not spoiled:
            return True
        value = self._value.clone()
        value.index_copy_(
            self.at, torch.tensor(spoiled), garbage(value, self.at, spoiled, generator)
        )
        expected = schema.outputs(self.relation.node)[self.out]
        found = call_with(self.relation, self.operand, value)[self.out]
        a, b = (v.narrow(self.axis, self.start, self.end - self.start) for v in (expected, found))
        return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())

    def __str__(self) -> str:
        name = self.relation.operands[self.operand].name
        return (f"{self.relation.node.target}: [{self.start}, {self.end}) of axis {self.axis} of "
                f"output {self.out} from axis {self.at} of {name}")  # fmt: skip


def garbage(value: Tensor, axis: int, where: list[int], generator: torch.Generator) -> Tensor:
    """Other values for some positions: NaN and large numbers, other indices, flipped booleans."""
    old = value.index_select(axis, torch.tensor(where))
    if value.dtype == torch.bool:
        return ~old
    if not value.is_floating_point():
        top = int(value.max()) + 1
        return (old + torch.randint(1, max(top, 2), old.shape, generator=generator)) % top
    large = 1e6 * torch.randn(old.shape, generator=generator, dtype=old.dtype)
    spoiled = torch.rand(old.shape, generator=generator) < 0.5
    return large.masked_fill(spoiled, float("nan"))


def call_with(relation: Relation, operand: int, value: Tensor) -> list[Tensor]:
    """The call once more with another value of one operand."""
    values = [value if k == operand else o.value for k, o in enumerate(relation.operands)]
    found = schema.replaced(schema.arguments(relation.node), relation.operands, values)
    found = map_arg(found, lambda node: node.meta["val"])
    args, kwargs = schema.call(relation.node.target, found)
    with torch.no_grad():
        made = relation.node.target(*args, **kwargs)  # type: ignore[operator]
    return list(made) if isinstance(made, (list, tuple)) else [made]


def check(name: str, table: Table, demask: Demask, *, seeds: int = 3) -> None:
    """Checks both laws on every case of an entry; for your own ops, too.

    Raises Mismatch naming the case, seed and tile that break a law, TableError if there is no case.

    >>> import demask
    >>> check("aten.relu.default", demask.ops.TABLE, demask.demask, seeds=1)
    """
    entry = table.get(name)
    if entry is None or not entry.cases:
        raise TableError(f"{name!r} has no entry with cases: give Entry(line, cases=(Case(...),))")
    for (index, case), seed in itertools.product(enumerate(entry.cases), range(seeds)):
        result = check_scatter_law(name, case, seed, table, demask)
        if not result.ok:
            raise Mismatch(
                f"{name}, case {index}, seed {seed}: the demasked module is {result.error:.1e} "
                f"relative off, expected at most {_TOLERANCE:g}: check line, zero and fill"
            )
        region = check_region_law(name, case, seed, table)
        if isinstance(region, RegionResult) and region.broken:
            raise Mismatch(f"case {index}, seed {seed}: {region.broken[0]}: check line and region")


__all__ = [
    "LawModule",
    "RegionResult",
    "ScatterResult",
    "call_node",
    "call_with",
    "check",
    "check_region_law",
    "check_scatter_law",
    "drawn_call",
    "garbage",
    "law_cases",
    "missed",
]
