"""The laws that every entry of the table must satisfy, tested without code per op.

    scatter:  op(x * mask + fill) * out_mask == demask of the same
    region:   tile(op(x)) == tile(op(y)) for every y that equals x on the required input region
    minimal:  re-randomizing any remaining slice of any weight changes some output

Layers above `ops` may not be imported here, so `demask.demask` is passed as an argument.
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
from demask.ops.laws.draws import Axes, draw_fill, draw_mask, draw_scale, draw_tensor, draw_tied_masks
from demask.ops.laws.minimality import missed
from demask.ops.relation import Relation, bind
from demask.ops.schema import fake

Demask = Callable[..., fx.GraphModule]
_TOLERANCE = 1e-10  # float64, relative: reordered sums of a few hundred terms
_BATCHES = (5, 16)  # neither is a size of any case


def law_cases(table: Table) -> Iterator[tuple[str, int, Case]]:
    """Every case of every entry: op name, index of the case, case."""
    for name, entry in table.items():
        yield from ((name, index, case) for index, case in enumerate(entry.cases))


def target_of(name: str) -> Any:
    """The op with a name in the table. Raises TableError if torch.ops has none.

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
    """op(x * scale + fill) * out_scale in float64, with random scales that are 0 where masked.

    Activations of the case are the inputs of forward, in order (`inputs` draws them). Its constants
    are parameters with masks of their own; integers and booleans are not masked. inner, outer: the
    axes that may be masked, per activation and per output; None: all. tied: masks of constants that
    share masked positions, by index among the arguments' leaves; zero where masked.
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
                self._add_parameter(f"constant{k}", draw_tensor(leaf, generator) * tied[k])
            elif isinstance(leaf, Shape):
                self._draw(k, leaf, generator, None if inner is None else inner.get(k, frozenset()))
        with torch.no_grad():
            outputs = self._run(self.inputs(0))
        for k, value in enumerate(outputs):
            axes = None if outer is None else outer.get(k, frozenset())
            mask = draw_mask(value.shape, generator, axes)
            self._add_parameter(f"out{k}", draw_scale(mask, "normal", generator))
        self.eval()

    def _draw(self, k: int, shape: Shape, generator: torch.Generator, axes: Axes) -> None:
        if shape.of not in ("normal", "positive"):
            if shape.constant:
                self.register_buffer(f"constant{k}", draw_tensor(shape, generator))
            return
        mask = draw_mask(shape.sizes, generator, None if shape.constant else axes)
        fill = draw_fill(mask, shape.of, generator)
        if shape.constant:
            self._add_parameter(f"constant{k}", draw_tensor(shape, generator) * mask + fill)
        else:
            self._add_parameter(f"scale{k}", draw_scale(mask, shape.of, generator))
            # A parameter of zeros would remain even if the call cancels a shift.
            self.register_buffer(f"fill{k}", fill)

    def _add_parameter(self, name: str, value: Tensor) -> None:
        # Running statistics are parameters here, and have no gradient.
        self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def inputs(self, seed: int, batch: int | None = None, dynamic: Any = ()) -> tuple[Tensor, ...]:
        """Random inputs of forward; those whose index is in `dynamic` have `batch` rows."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + seed)
        tensors = []
        for number, shape in enumerate(s for s in self.leaves if _is_input(s)):
            sizes = list(shape.sizes)
            if batch is not None and number in dynamic:
                sizes[0] = batch
            tensors.append(draw_tensor(shape, generator, sizes))
        return tuple(tensors)

    def wide_inputs(self, number: int, batch: int | None, dynamic: Any) -> tuple[Tensor, ...]:
        """Inputs for the minimality oracle; every third set is large, so that comparisons with
        random constants have both results."""
        wide = 8.0 if number % 3 == 2 else 1.0
        shapes = [shape for shape in self.leaves if _is_input(shape)]
        inputs = self.inputs(len(_BATCHES) + 2 + number, batch, dynamic)
        return tuple(x * wide if shape.of == "normal" else x for shape, x in zip(shapes, inputs, strict=True))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = self._run(inputs)
        wide = [v if v.dtype == torch.float64 else v.double() for v in outputs]
        return tuple(v * getattr(self, f"out{k}") for k, v in enumerate(wide))

    def _run(self, inputs: Iterable[Tensor]) -> tuple[Tensor, ...]:
        rest = iter(inputs)
        values = [self._value(k, leaf, rest) for k, leaf in enumerate(self.leaves)]
        args, kwargs = pytree.tree_unflatten(values, self.spec)
        output = self.target(*args, **kwargs)
        return tuple(output) if isinstance(output, (list, tuple)) else (output,)

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
    """Whether a leaf of a case's arguments is an activation."""
    return isinstance(leaf, Shape) and not leaf.constant


@dataclass(frozen=True, slots=True)
class ScatterResult:
    """The error of a demasked law module.

    error: max |a - b| / max |a| over all outputs and batches; inf if shapes or positions of NaN
    differ. batches: the batch sizes compared, None for the case's own. slim: the demasked module.
    draw: returns inputs for it at the largest batch, by an index.
    """

    name: str
    seed: int
    error: float
    batches: tuple[int | None, ...]
    slim: fx.GraphModule
    draw: Callable[[int], tuple[Tensor, ...]]

    @property
    def ok(self) -> bool:
        """Whether the error is a rounding error."""
        return self.error <= _TOLERANCE


def check_scatter_law(name: str, case: Case, seed: int, table: Table, demask: Demask) -> ScatterResult:
    """Check the scatter law for one case: demask the law module, compare at the case's own batch
    and, if dimension 0 of an input is dynamic, at two others.

    Even seeds mask only axes that may lose positions; odd seeds mask any, including windowed and
    complete axes; one seed in four also masks the first axis, which makes it static.
    """
    inner, outer = maskable_axes(name, case, table, every=bool(seed % 2), first=seed % 4 == 3)
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
    """Whether the module accepts a batch size: torch.export does not compare the sizes of some
    ops."""
    with torch.no_grad():
        try:
            module(*module.inputs(0, batch, dynamic))
        except (IndexError, RuntimeError):
            return False
    return True


def maskable_axes(name: str, case: Case, table: Table, *, every: bool, first: bool) -> tuple[dict, dict]:
    """The axes that may be masked, per activation (by leaf) and per output."""
    leaves, spec = pytree.tree_flatten((case.args, dict(case.kwargs)))
    relation = bind(draw_call(name, leaves, spec, torch.Generator().manual_seed(0)), table)
    shaped = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Shape)]
    if isinstance(relation, Declined):
        return {}, {}
    fixed = frozenset() if every else relation.window | relation.complete

    def free(axes: Any) -> frozenset[int]:
        return frozenset(k for k, a in enumerate(axes) if (k or first) and not set(a) & fixed)

    operand_axes = {o.value: relation.ins[k] for k, o in enumerate(relation.operands)}
    placeholders = [node for node in relation.node.graph.nodes if node.op == "placeholder"]
    inner = {k: free(operand_axes[node]) for k, node in zip(shaped, placeholders, strict=True) if node in operand_axes}
    return inner, {k: free(axes) for k, axes in enumerate(relation.outs)}


def _tied(name: str, case: Case, seed: int, table: Table) -> dict[int, Tensor]:
    """Masks of the constants of a recurrent call, by leaf: all of them lose the same units."""
    leaves, spec = pytree.tree_flatten((case.args, dict(case.kwargs)))
    generator = torch.Generator().manual_seed(seed)
    relation = bind(draw_call(name, leaves, spec, generator), table)
    if isinstance(relation, Declined) or not relation.back:
        return {}
    masks = {o.value: mask for o, mask in zip(relation.operands, draw_tied_masks(relation, generator), strict=True)}
    shaped = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Shape)]
    placeholders = [node for node in relation.node.graph.nodes if node.op == "placeholder"]
    return {
        k: masks[node]
        for k, node in zip(shaped, placeholders, strict=True)
        if leaves[k].constant and leaves[k].of == "normal"
    }


def draw_call(name: str, leaves: list, spec: Any, generator: torch.Generator) -> fx.Node:
    """The call of a case on random tensors, as a node."""
    values = [draw_tensor(leaf, generator) if isinstance(leaf, Shape) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(values, spec)
    return call_node(target_of(name), *args, **kwargs)


def _is_symbol(size: int | str) -> bool:
    return isinstance(size, str) and not size.isdigit()


def relative_error(expected: Iterable[Tensor], actual: Iterable[Tensor]) -> float:
    """max |a - b| / max |a| over pairs of tensors; inf if shapes, dtypes or NaN differ.

    max |a| counts as 1e-3 if it is smaller: differences of nearly equal numbers are rounding
    errors.
    """
    worst = 0.0
    for a, b in itertools.zip_longest(expected, actual):
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        is_equal = (a == b) | (a.isnan() & b.isnan())
        if not bool(is_equal.all()):
            gap = (a - b).abs()[~is_equal].max()
            scale = a.abs()[a.isfinite()].max().clamp(min=1e-3)
            worst = max(worst, float("inf") if gap.isnan() else float(gap / scale))
    return worst


def call_node(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call of an op on real tensors as a graph node, for `bind`.

    Integer tensors count as constants: the positions that they select are known.
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

    nodes = pytree.tree_map(placed, (args, kwargs))
    node = graph.call_function(target, *nodes)
    with torch.no_grad():
        node.meta["val"] = target(*args, **kwargs)
    return node


@dataclass(frozen=True, slots=True)
class RegionResult:
    """The effect of garbage outside of the input regions.

    tiles: their number. broken: tiles whose output changed, in words. loose: regions along windowed
    and moved axes whose first or last position did not change the output.
    """

    tiles: int
    broken: tuple[str, ...]
    loose: tuple[str, ...]


def check_region_law(name: str, case: Case, seed: int, table: Table) -> RegionResult | Declined:
    """Check the region law for one case: all axes of all outputs, several tiles, all operands."""
    generator = torch.Generator().manual_seed(seed)
    leaves, spec = pytree.tree_flatten((case.args, dict(case.kwargs)))
    relation = bind(draw_call(name, leaves, spec, generator), table)
    if isinstance(relation, Declined):
        return relation
    tiles, broken, loose = 0, [], []
    for out, axes in enumerate(relation.outs):
        for axis, operand in itertools.product(range(len(axes)), range(len(relation.operands))):
            operand_axis = axis_of(relation, operand, axis, out=out)
            if operand_axis is None:
                continue
            size = schema.outputs(relation.node)[out].shape[axis]
            for start, end in _tiles(size, generator):
                tile = _LawTile(relation, operand, operand_axis, out, axis, start, end)
                tiles += 1
                broken += tile.broken(generator)
                loose += tile.loose(generator)
    return RegionResult(tiles, tuple(broken), tuple(loose))


def _tiles(size: int, generator: torch.Generator) -> list[tuple[int, int]]:
    """Each single position of a short axis, its halves, and three random intervals."""
    ends = [(0, 1), (size - 1, size), (0, size // 2), (size // 2, size), (0, size)]
    intervals = {(k, k + 1) for k in range(min(size, 8))} | {(a, b) for a, b in ends if a < b}
    for _ in range(3):
        a, b = sorted(int(torch.randint(size + 1, (), generator=generator)) for _ in range(2))
        intervals |= {(a, b)} if a < b else set()
    return sorted(intervals)


@dataclass(frozen=True, slots=True)
class _LawTile:
    """Positions [start, end) of one axis of one output, computed from axis `at` of one operand."""

    relation: Relation
    operand: int
    at: int
    out: int
    axis: int
    start: int
    end: int

    def broken(self, generator: torch.Generator) -> list[str]:
        """The input regions outside of which garbage changes the tile, in words: `needed` and the
        pair (input_start, input_end) are tried."""
        args = (self.relation, self.operand, self.axis)
        exact = regions.needed_interval(*args, self.start, self.end, out=self.out)
        pair = (regions.input_start(*args, self.start, out=self.out), regions.input_end(*args, self.end, out=self.out))
        size = self._value.shape[self.at]
        return [
            f"{self}: {claim} is not enough"
            for claim in sorted({exact, pair})
            if not self._holds([k for k in range(size) if not claim[0] <= k < claim[1]], generator)
        ]

    def loose(self, generator: torch.Generator) -> list[str]:
        """The first and last required positions of a windowed or moved axis that are not read, in
        words."""
        letters = set(self.relation.outs[self.out][self.axis])
        if not letters & (self.relation.window | self.relation.moved):
            return []
        args = (self.relation, self.operand, self.axis, self.start, self.end)
        low, high = regions.needed_interval(*args, out=self.out)
        edges = sorted({low, high - 1}) if low < high else []
        return [f"{self}: {k} is not read" for k in edges if self._holds([k], generator)]

    @property
    def _value(self) -> Tensor:
        return fake(self.relation.operands[self.operand].value)

    def _holds(self, spoiled: list[int], generator: torch.Generator) -> bool:
        """Whether the tile is the same with garbage at some positions of the operand."""
        if not spoiled:
            return True
        value = self._value.clone()
        value.index_copy_(self.at, torch.tensor(spoiled), garbage(value, self.at, spoiled, generator))
        expected = schema.outputs(self.relation.node)[self.out]
        actual = call_with(self.relation, self.operand, value)[self.out]
        a, b = (v.narrow(self.axis, self.start, self.end - self.start) for v in (expected, actual))
        return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())

    def __str__(self) -> str:
        name = self.relation.operands[self.operand].name
        return (
            f"{self.relation.node.target}: [{self.start}, {self.end}) of axis {self.axis} of "
            f"output {self.out} from axis {self.at} of {name}"
        )


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
    """The outputs of the call with another value of one operand."""
    values = [value if k == operand else o.value for k, o in enumerate(relation.operands)]
    call_arguments = schema.replace_operands(schema.arguments(relation.node), relation.operands, values)
    call_arguments = map_arg(call_arguments, lambda node: fake(node))
    args, kwargs = schema.bind_arguments(relation.node.target, call_arguments)
    with torch.no_grad():
        output = relation.node.target(*args, **kwargs)  # type: ignore[operator]
    return list(output) if isinstance(output, (list, tuple)) else [output]


def check(name: str, table: Table, demask: Demask, *, seeds: int = 3) -> None:
    """Check the scatter and region laws on every case of an entry, also for your own ops.

    Args:
        name: of the op, "my.op.default".
        table: the table with its entry.
        demask: pass `demask.demask`.
        seeds: the number of random masks per case.

    Raises:
        Mismatch: a law is violated; the message names the case, the seed and the tile.
        TableError: the op has no entry with cases.

    >>> import demask
    >>> check("aten.relu.default", demask.ops.TABLE, demask.demask, seeds=1)
    """
    entry = table.get(name)
    if entry is None or not entry.cases:
        raise TableError(f"{name!r} has no entry with cases: extend the table by Entry(line, cases=(Case(...),))")
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
    "draw_call",
    "garbage",
    "law_cases",
    "missed",
]
