"""Relations: an entry's line bound to a call, with sizes of letters and axes of operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, fx

from demask.errors import TableError
from demask.ops import schema
from demask.ops.entry import Declined, Entry, SizedLine, Table, op_name
from demask.ops.notation import ELLIPSIS, Axes, Line, parse
from demask.ops.positions import IndexMap, compute_index_maps
from demask.ops.schema import Operand, fake

MAX_AXIS = 2**28  # positions of an axis: facts and layouts use memory per position
_BOUNDED = ("sum", "mean", "max", "min", "softmax")


@dataclass(frozen=True)
class Relation:
    """The dependence of one call's outputs on its operands: an `Entry` with the shapes of the call.

    `bind` returns it. A letter (string) names an axis, as in `Line`; broadcast axes (`...`) have
    the letters "_0" for the last axis, "_1" for the axis before it, and so on. Operands and outputs
    are numbered from 0.

    Attributes:
        node: the call, an `fx.Node`.
        entry: the table's `Entry` for the op of the call.
        operands: the tensor arguments, in the order of the op's schema; each has `name` (of the
            argument), `index` (in an argument that is a list, else None) and `value` (the `fx.Node`
            that computes it, or a number).
        ins, outs: the axes of each operand and of each output. An axis is a tuple of letters; () is
            an axis of size one, which broadcasts.
        size: number of positions by letter; None for a dynamic size.
        moves: per output, a mapping from the letter of each moved axis of n positions to its index
            map: `source`, int64 [n], the number of the operand that each position is copied from
            (-1: padding); `position`, int64 [n], the position in that operand; `value` of the
            padding. {} where sizes are dynamic.
        window, complete, moved, back: letters of the axes with the marks `~`, `!`, `@` and `^`, a
            frozenset each; see `Line`.
        contracted: letters that are summed over: in two operands or more, and in no output.
        factors: numbers of the operands that are multiplied in a sum of products; the others are
            added to the sum. (0, 1) where `contracted` is empty, as for a depthwise convolution,
            which sums over its window only.
        mixed: letters along which an output position may depend on several positions of an operand.
        looped: letters along which a position depends on all others through earlier steps
            (recurrent layers).
        positions: numbers of the operands that tell to which positions values are scattered.
        selectors: numbers of the operands that only select weights at run time.
        is_grouped: whether the call is a sum of products with groups, as a grouped convolution.
        total: whether the output is finite whenever all operands other than constants are finite.

    Example:
        >>> import torch
        >>> from demask.ops import TABLE, bind
        >>> from demask.ops.laws import call_node
        >>> linear = call_node(torch.ops.aten.linear.default, torch.ones(5, 3), torch.ones(2, 3))
        >>> relation = bind(linear, TABLE)
        >>> relation.ins, relation.outs
        (((('_0',), ('i',)), (('o',), ('i',))), ((('_0',), ('o',)),))
        >>> relation.size["i"], sorted(relation.contracted)
        (3, ['i'])
    """

    node: fx.Node
    entry: Entry
    operands: tuple[Operand, ...]
    ins: tuple[Axes, ...]
    outs: tuple[Axes, ...]
    size: Mapping[str, int | None]
    moves: tuple[Mapping[str, IndexMap], ...]
    window: frozenset[str]
    complete: frozenset[str]
    moved: frozenset[str]
    back: frozenset[str] = frozenset()

    def letters(self, axes: Axes) -> frozenset[str]:
        """The letters in some axes, a frozenset of strings.

        Args:
            axes: axes as in `ins[k]` or `outs[k]`: a tuple of tuples of letters.
        """
        return frozenset(letter for axis in axes for letter in axis)

    @cached_property
    def contracted(self) -> frozenset[str]:
        """The letters that are summed over: in two operands or more, in no output."""
        output_letters = self.letters(tuple(axis for axes in self.outs for axis in axes))
        counts: dict[str, int] = {}
        for axes in self.ins:
            for letter in self.letters(axes) - output_letters - self.moved - self.window - self.complete:
                counts[letter] = counts.get(letter, 0) + 1
        return frozenset(letter for letter, count in counts.items() if count > 1)

    @cached_property
    def factors(self) -> tuple[int, ...]:
        """Numbers of the operands that are multiplied in a sum of products, a tuple of ints.

        The other operands are added to the sum. (0, 1) where `contracted` is empty: a depthwise
        convolution sums over its window alone, and its factors are the first two operands.
        """
        summed = self.contracted
        return tuple(k for k, a in enumerate(self.ins) if self.letters(a) & summed) or (0, 1)

    @property
    def total(self) -> bool:
        """Whether the output is finite whenever all operands other than constants are finite."""
        nodes = [o.value if isinstance(o.value, fx.Node) else None for o in self.operands]
        computed = [k for k, node in enumerate(nodes) if node is not None and node.op != "get_attr"]
        entry = self.entry
        if entry.total:
            eps = schema.arguments(self.node).get("eps")
            allowed = {
                "all": True,
                "one": len(computed) < 2,
                "first": computed in ([], [0]),
                "eps": eps is None or eps > 0,
            }
            return allowed[entry.total]
        linear = entry.fill in ("sum", "mix", "same", "recur") or entry.rest in _BOUNDED
        dtypes = [fake(n).dtype for n in nodes if n is not None and n.op != "get_attr"]
        index_dtypes = [dtype for dtype in dtypes if not dtype.is_floating_point and dtype != torch.bool]
        is_lookup = bool(index_dtypes) and len(self.operands) > 1  # an index, or the ends of parts
        return not computed or bool(self.moved) or entry.free or (linear and not is_lookup)

    @property
    def is_grouped(self) -> bool:
        """Whether the call is a sum of products with groups: several letters share an axis.

        Each group may then retain another number of positions.
        """
        return self.entry.fill == "sum" and any(len(a) > 1 for axes in self.ins for a in axes)

    @property
    def selectors(self) -> tuple[int, ...]:
        """Numbers of the operands that only select weights at run time, a tuple of ints."""
        output_letters = self.letters(tuple(axis for axes in self.outs for axis in axes))
        letters = [self.letters(axes) for axes in self.ins]
        return tuple(k for k, a in enumerate(letters) if a and a <= self.complete - output_letters)

    @cached_property
    def positions(self) -> frozenset[int]:
        """Numbers of the operands that tell to which positions values are scattered."""
        names = ("index", "indices", "lengths") if self.entry.fill == "scatter" else ()
        return frozenset(k for k, o in enumerate(self.operands) if o.name in names)

    @cached_property
    def mixed(self) -> frozenset[str]:
        """The letters along which an output position may depend on several operand positions."""
        return self.window | self.complete | self.moved | self.back | self.looped

    @cached_property
    def looped(self) -> frozenset[str]:
        """The letters along which a position depends on all others, through earlier steps."""
        letter_sets = [self.letters(axes) for axes in self.ins if self.letters(axes) & self.back]
        return frozenset(letter.removesuffix("^") for letters in letter_sets for letter in letters)


def bind(node: fx.Node, table: Table) -> Relation | Declined:
    """The `Relation` of a call, or `Declined` with a reason if the table has no rule for the call.

    Args:
        node: a call of an op, an `fx.Node`. Its `meta["val"]`, and those of its operands, are
            tensors (fake ones suffice) with the shapes and dtypes of the call.
        table: the table of ops, such as `demask.ops.TABLE`.

    Raises:
        TableError: the line of the entry does not fit the number of operands, their ranks or their
            sizes.

    Example:
        >>> import torch
        >>> from demask.ops import TABLE, bind
        >>> from demask.ops.laws import call_node
        >>> relu = call_node(torch.ops.aten.relu.default, torch.ones(5, 3))
        >>> bind(relu, TABLE).outs
        ((('_1',), ('_0',)),)
        >>> bind(call_node(torch.ops.aten.trace.default, torch.ones(3, 3)), TABLE)
        Declined(text='no rule for aten.trace.default')
    """
    name = op_name(node.target)
    entry = table.get(name)
    if entry is None:
        return Declined(f"no rule for {name}")
    if schema.draws_random_numbers(node):
        return Declined(f"{name} draws random numbers, which depend on the shape")
    declared = entry.line if isinstance(entry.line, str) else entry.line(node)
    if isinstance(declared, Declined):
        return declared
    text, known = (declared, {}) if isinstance(declared, str) else (declared.line, declared.sizes)
    if isinstance(declared, SizedLine) and declared.mixes:
        entry = replace(entry, fill="mix", main=1)
    tensors = schema.operands(node, entry.indices)
    numbers = [*(operand.value for operand in tensors), schema.arguments(node).get("fill_value")]
    if schema.is_dynamic(numbers):
        return Declined(f"{name} with a number known only at run time")
    constants = {name: _constant_index(schema.arguments(node)[name]) for name in entry.indices}
    indices = {name: value for name, value in constants.items() if value is not None}
    if len(indices) < len(constants):
        return Declined(f"{name} with positions known only at run time")
    line = _expanded(parse(text), node, tensors)
    shapes = [schema.sizes(_value(operand)) for operand in tensors]
    output_shapes = [schema.sizes(value) for value in schema.outputs(node)]
    size = _sizes(line, shapes, output_shapes, known, f"{name} ({node.name})")
    if (length := _half_dynamic(line, [*shapes, *output_shapes])) is not None:
        return Declined(f"{name} with an axis of {length} in one tensor, of any size in another")
    longest = max((n for n in size.values() if n is not None), default=0)
    if longest > MAX_AXIS:
        return Declined(f"{name} with an axis of {longest:,} positions: more than {MAX_AXIS:,}")
    line = _broadcast(line, shapes, size)
    maps = compute_index_maps(node, line, size, tensors, indices) if line.moved else [{} for _ in line.outs]
    return Relation(
        node, entry, tensors, line.ins, line.outs, size, tuple(maps), line.window, line.complete, line.moved, line.back
    )


def _constant_index(value) -> Tensor | None:
    """The value of a constant index, which constant folding stores on its node; else None."""
    return value.meta.get("positions") if isinstance(value, fx.Node) else None


def _value(operand: Operand):
    """The fake tensor of an operand, or its number."""
    return fake(operand.value) if isinstance(operand.value, fx.Node) else operand.value


def _expanded(line: Line, node: fx.Node, tensors: tuple[Operand, ...]) -> Line:
    """The line with letters in the place of `...`, for the operands that the call has."""
    values = schema.outputs(node)
    present = _present(line, node, tensors)
    if len(present) != len(tensors) or len(line.outs) != len(values):
        raise TableError(
            f"entry of {node.target} has {len(line.ins)} operands and {len(line.outs)} outputs, "
            f"the call {node.name} has {len(tensors)} and {len(values)}"
        )
    ins = [_dots(axes, len(schema.sizes(_value(op)))) for axes, op in zip(present, tensors, strict=True)]
    outs = [_dots(axes, len(schema.sizes(v))) for axes, v in zip(line.outs, values, strict=True)]
    for axes, rank, described in [
        *((a, len(schema.sizes(_value(op))), op.name) for a, op in zip(ins, tensors, strict=True)),
        *((a, len(schema.sizes(v)), "output") for a, v in zip(outs, values, strict=True)),
    ]:
        if len(axes) != rank:
            raise TableError(
                f"entry of {node.target}: {described} of {node.name} has {rank} axes, the line has {len(axes)}"
            )
    return replace(line, ins=tuple(ins), outs=tuple(outs))


def _present(line: Line, node: fx.Node, tensors: tuple[Operand, ...]) -> list[Axes]:
    """The axes of the line's operands, without optional ones that are None in this call."""
    if not line.ins:
        return [()] * len(tensors)  # No operands before the arrow: the call's operands, if any, have no axes.
    if any(operand.index is not None for operand in tensors) or len(line.ins) == len(tensors):
        return list(line.ins)
    values = schema.arguments(node)
    names = [argument.name for argument in schema.signature(node.target) if argument.tensors]
    return [axes for name, axes in zip(names, line.ins, strict=False) if values[name] is not None]


def _dots(axes: Axes, rank: int) -> Axes:
    """Axes with `rank` axes in all, letters in the place of `...`."""
    if ELLIPSIS not in axes:
        return axes
    index, count = axes.index(ELLIPSIS), rank - len(axes) + 1
    if count < 0:
        return axes[:index] + axes[index + 1 :]
    return axes[:index] + tuple((f"_{count - 1 - k}",) for k in range(count)) + axes[index + 1 :]


def _sizes(line, shapes, output_shapes, known, where: str) -> dict[str, int | None]:
    """The size of every letter; raises TableError if two axes disagree."""
    size: dict[str, int | None] = dict(known)
    shaped = [*zip(line.ins, shapes, strict=True), *zip(line.outs, output_shapes, strict=True)]
    for axes, shape in shaped:
        for axis, n in zip(axes, shape, strict=True):
            if len(axis) == 1 and (axis[0] not in size or size[axis[0]] == 1):
                size[axis[0]] = n
    for axes, shape in shaped:
        for axis, n in zip(axes, shape, strict=True):
            _check_axis(axis, n, size, where)
    return size


def _half_dynamic(line: Line, shapes: list[tuple[schema.Size, ...]]) -> int | None:
    """The length of an axis that is static in one tensor of a call and dynamic in another, else
    None: torch.export does not compare the two for some ops."""
    lengths: dict[str, set[int | None]] = {}
    for axes, shape in zip([*line.ins, *line.outs], shapes, strict=True):
        for axis, n in zip(axes, shape, strict=True):
            if len(axis) == 1 and n != 1:
                lengths.setdefault(axis[0], set()).add(n)
    half_dynamic = (sizes for sizes in lengths.values() if None in sizes and len(sizes) > 1)
    return next((n for sizes in half_dynamic for n in sizes if n is not None), None)


def _check_axis(axis, n, size: dict[str, int | None], where: str) -> None:
    """Set the size of an axis's one unknown letter. Raises TableError if sizes disagree."""
    missing = [letter for letter in axis if letter not in size]
    product = 1
    for letter in axis:
        factor = size.get(letter, 1)
        product = None if product is None or factor is None else product * factor
    if len(missing) == 1:
        is_known = n is not None and product
        size[missing[0]] = n // product if is_known and n is not None and product else None
        return
    if missing:
        raise TableError(f"{where}: sizes of {missing} are not determined; return a SizedLine")
    if n not in (None, 1) and product not in (None, n):
        raise TableError(f"{where}: axis {axis} is {n} long, the product of its letters is {product}")


def _broadcast(line: Line, shapes, size: Mapping[str, int | None]) -> Line:
    """The line with a literal 1 for each input axis of size one that broadcasts."""

    def axis_of(axis, n):
        return () if n == 1 and len(axis) == 1 and size[axis[0]] != 1 else axis

    ins = tuple(
        tuple(axis_of(axis, n) for axis, n in zip(axes, shape, strict=True))
        for axes, shape in zip(line.ins, shapes, strict=True)
    )
    return replace(line, ins=ins)
