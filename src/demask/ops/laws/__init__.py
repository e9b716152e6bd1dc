"""The laws that every entry of the table must satisfy, tested without code per op.

    scatter:  op(x * mask + fill) * out_mask == demask of the same
    region:   tile(op(x)) == tile(op(y)) for every y that equals x on the required input region
    minimal:  re-randomizing any remaining slice of any weight changes some output

Layers above `ops` may not be imported here, so `demask.demask` is passed as an argument.

The last one, of the slices of a module's weights that no output depends on, complements the others, which
an engine that removes nothing satisfies.
"""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from demask.errors import Mismatch, TableError
from demask.ops import regions, schema
from demask.ops.entry import Case, Declined, Shape, Table
from demask.ops.flow import axis_of
from demask.ops.relation import Relation, bind
from demask.ops.schema import fake

Draw = Callable[[int], tuple[Any, ...]]


def missed(slim: nn.Module, args: tuple[Any, ...] | Draw, seeds: int = 3) -> list[str]:
    """Slices of weights that no output depends on, as "name, axis 0: position 3".

    Weights are parameters and floating-point buffers. Each slice of each axis is re-randomized
    alone, unless its gradient is not zero for one of `seeds` random inputs. args: inputs, which are
    shuffled, or a function that returns random inputs by an index. For float64 modules: differences
    below 1e-12 of the largest output count as rounding.

    >>> net = torch.nn.Linear(2, 3).double()
    >>> missed(torch.nn.Sequential(net, torch.nn.Softmax(-1)), (torch.randn(4, 2).double(),))
    []
    """
    oracle = _Oracle(slim, args if callable(args) else partial(_shuffled, args), seeds)
    slices = []
    for name, value in oracle.weights.items():
        for axis, size in enumerate(value.shape):
            has_gradient = oracle.moves[name]
            other_axes = [k for k in range(value.ndim) if k != axis]
            is_used = has_gradient.any(other_axes) if other_axes else has_gradient
            slices += [
                f"{name}, axis {axis}: position {k}"
                for k in range(size)
                if not bool(is_used[k]) and not oracle.moved(name, axis, k)
            ]
    return slices


class _Oracle:
    """A module, its outputs for random inputs, and the weights that have nonzero gradients."""

    def __init__(self, slim: nn.Module, draw: Draw, seeds: int):
        self.slim, self.draw, self.seeds = slim, draw, seeds
        named = [*slim.named_parameters(), *slim.named_buffers()]
        self.weights = {n: v.detach() for n, v in named if v.is_floating_point() and v.numel()}
        self.draws: list[tuple[tuple[Any, ...], list[Tensor]]] = []
        self.moves = {n: torch.zeros_like(v, dtype=torch.bool) for n, v in self.weights.items()}
        for seed in range(seeds):
            self._differentiate(self._draw(seed)[0])

    def _differentiate(self, draw: tuple[Any, ...]) -> None:
        """Mark the weights with a nonzero gradient of a random sum of the outputs."""
        weights = {name: v.clone().requires_grad_() for name, v in self.weights.items()}
        try:
            outputs = [v for v in _tensors(functional_call(self.slim, weights, draw)) if v.requires_grad]
        except RuntimeError:
            return  # Some op has no gradient for a weight: every slice is re-randomized.
        if not outputs:
            return
        generator = torch.Generator().manual_seed(0)
        total = sum((v * torch.randn(v.shape, generator=generator, dtype=v.dtype)).sum() for v in outputs)
        gradients = torch.autograd.grad(total, list(weights.values()), allow_unused=True)  # type: ignore[arg-type]
        scale = max(float(v.detach().abs().max()) if v.numel() else 0.0 for v in outputs)
        for name, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                self.moves[name] |= gradient.abs() > 1e-9 * scale

    def moved(self, name: str, axis: int, position: int) -> bool:
        """Whether an output changes if one slice of a weight is re-randomized or set to zero."""
        value = self.weights[name]
        generator = torch.Generator().manual_seed(position)
        scale = float(value.abs().max()) + 1.0
        for attempt in range(4 * self.seeds):
            draw, before = self._draw(attempt)
            changed = value.clone()
            weight_slice = changed.select(axis, position)
            random_slice = scale * torch.randn(weight_slice.shape, generator=generator, dtype=value.dtype)
            weight_slice.copy_(random_slice if attempt % 3 < 2 else torch.zeros_like(random_slice))
            with torch.no_grad():
                after = _tensors(functional_call(self.slim, {name: changed}, draw))
            if any(_differs(a, b) for a, b in zip(before, after, strict=True)):
                return True
        return False

    def _draw(self, number: int) -> tuple[tuple[Any, ...], list[Tensor]]:
        """The random inputs with an index, and the module's outputs for them."""
        while len(self.draws) <= number:
            draw = self.draw(len(self.draws))
            with torch.no_grad():
                self.draws.append((draw, _tensors(self.slim(*draw))))
        return self.draws[number]


def _differs(a: Tensor, b: Tensor) -> bool:
    """Whether two outputs differ by more than rounding."""
    if not a.is_floating_point():
        return not torch.equal(a, b)
    is_equal = (a == b) | (a.isnan() & b.isnan())
    if bool(is_equal.all()):
        return False
    gap, scale = (a - b).abs()[~is_equal].max(), a.abs().nan_to_num(0, 0, 0).max()
    return bool(gap.isnan()) or bool(gap > 1e-12 * scale)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _shuffled(args: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    """Inputs with permuted values; floats are scaled by 0.9 to 1.1, except for seed 0."""
    generator = torch.Generator().manual_seed(seed)

    def draw(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        order = torch.randperm(leaf.numel(), generator=generator)
        permuted = leaf.detach().reshape(-1)[order].reshape(leaf.shape)
        if not permuted.is_floating_point() or seed == 0:
            return permuted
        return permuted * (0.9 + 0.2 * torch.rand(leaf.shape, generator=generator, dtype=leaf.dtype))

    return pytree.tree_map(draw, args)


Axes = frozenset[int] | None


def draw_tensor(shape: Shape, generator: torch.Generator, sizes: Iterable[int] | None = None) -> Tensor:
    """A float64 tensor for a shape of a case. Some activations are integers, so that comparisons
    and rounding see equal values."""
    size = tuple(shape.sizes if sizes is None else sizes)
    if isinstance(shape.of, int):
        return torch.randint(shape.of, size, generator=generator)
    uniform = torch.rand(size, generator=generator, dtype=torch.float64)
    if shape.of == "bool":
        return uniform < 0.5
    if shape.of == "zero":
        return torch.zeros(size, dtype=torch.float64)
    if shape.of == "positive":
        return 0.2 + 0.6 * uniform  # below 1 too: logit
    value = torch.randn(size, generator=generator, dtype=torch.float64)
    # + 0.0: atan2 distinguishes -0.0 from 0.0, and sums lose the sign.
    return value if shape.constant else torch.where(uniform < 0.6, value.round() + 0.0, value)


def draw_support(size: int, generator: torch.Generator) -> Tensor:
    """The live positions of an axis, bool [size]: none, all, one, or random ones."""
    choice = int(torch.randint(8, (), generator=generator))
    if choice == 0:
        return torch.zeros(size, dtype=torch.bool)
    if choice == 1:
        return torch.arange(size) == int(torch.randint(max(size, 1), (), generator=generator))
    if choice < 5:
        return torch.rand(size, generator=generator) < 0.5
    return torch.ones(size, dtype=torch.bool)


def draw_mask(sizes: Iterable[int], generator: torch.Generator, axes: Axes = None) -> Tensor:
    """A bool mask, the product of a support per axis; fully live axes have size 1.

    axes: those that may be masked; None: all.
    """
    sizes = list(sizes)
    mask = torch.ones([1] * len(sizes), dtype=torch.bool)
    for axis, size in enumerate(sizes):
        support = draw_support(size, generator)
        if (axes is None or axis in axes) and not bool(support.all()):
            mask = mask & support.view([-1 if k == axis else 1 for k in range(len(sizes))])
    return mask


def draw_scale(mask: Tensor, of: str | int, generator: torch.Generator) -> Tensor:
    """A factor per position, 0 where the mask is 0. There are two factors, so that equal values
    occur."""
    low, high = (0.5, 0.9) if of == "positive" else (0.5, 2.0)
    pick = torch.rand(mask.shape, generator=generator) < 0.5
    return torch.where(pick, low, high).double() * mask


def draw_fill(mask: Tensor, of: str | int, generator: torch.Generator) -> Tensor:
    """Values where the mask is 0: zeros, one value, or a value per position; 0 elsewhere."""
    choice = int(torch.randint(3, (), generator=generator))
    values = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    if of == "positive":
        values = 0.2 + 0.6 * torch.rand(mask.shape, generator=generator, dtype=torch.float64)
    elif choice == 0:
        values = torch.zeros(mask.shape, dtype=torch.float64)
    if choice == 1:
        values = values.flatten()[:1].reshape([1] * mask.ndim).expand(mask.shape)
    return values.masked_fill(mask, 0.0)


def draw_tied_masks(relation: Relation, generator: torch.Generator) -> list[Tensor]:
    """A mask per operand, the product of one support per letter: the input and the output of a
    recurrence lose the same positions."""
    support = {
        letter: torch.ones(size or 1, dtype=torch.bool)
        if letter in relation.complete
        else draw_support(size or 1, generator)
        for letter, size in relation.size.items()
    }
    support |= {letter: support[letter.removesuffix("^")] for letter in relation.back}
    return [_mask_of(axes, support) for axes in relation.ins]


def _mask_of(axes: Any, support: Mapping[str, Tensor]) -> Tensor:
    """The product of the supports of all letters, in the shape of the axes."""
    mask, shape = torch.ones((), dtype=torch.bool), []
    for axis in axes:
        for letter in axis:
            mask = mask.unsqueeze(-1) & support[letter]
        shape.append(math.prod(len(support[letter]) for letter in axis))
    return mask.reshape(shape)


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
    with torch.no_grad():
        output = schema.call_with(relation.node, call_arguments)
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
