"""Ops that move elements: the operand's layout is that of the output, moved back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import sympy

from demask.files.onnx.edit.calls import HANDLERS, NodeEdit
from demask.files.onnx.edit.editor import all_positions, require
from demask.shrink.layout.cells import Layout, Positions, cut_positions

Group = tuple[list[int], list[int]]


def _replaced(layout: Layout, axis: int, positions: Positions) -> Layout:
    return (*layout[:axis], positions, *layout[axis + 1 :])


@HANDLERS("Transpose")
def transpose(edit: NodeEdit) -> Sequence[Layout | None]:
    """Positions of an axis are those of the axis it comes from."""
    layout = edit.layout
    operand: list[Positions] = [None] * len(layout)
    order = edit.attributes.get("perm") or list(range(len(layout)))[::-1]
    for axis, source in enumerate(order):
        operand[source] = layout[axis]
    edit.adapt(0, tuple(operand))
    return [layout]


@HANDLERS("Squeeze")
def squeeze(edit: NodeEdit) -> Sequence[Layout | None]:
    """Axes of size 1 go; the others keep their positions."""
    shape = edit.shape(0)
    axes = edit.axes(1, len(shape))
    if axes is None:
        axes = [k for k, n in enumerate(shape) if n == 1]
        cut_to_one = [p for p in edit.layout if p is not None and len(p) == 1]
        require(not cut_to_one, "its axes are those of size 1")
    rest = iter(edit.layout)
    edit.adapt(0, tuple(None if k in axes else next(rest) for k in range(len(shape))))
    return [edit.layout]


@HANDLERS("Unsqueeze")
def unsqueeze(edit: NodeEdit) -> Sequence[Layout | None]:
    """New axes have size 1; the others keep their positions."""
    axes = edit.axes(1, len(edit.layout)) or []
    edit.adapt(0, tuple(p for k, p in enumerate(edit.layout) if k not in axes))
    return [edit.layout]


def groups_of(before: Sequence[Any], after: Sequence[Any]) -> list[Group]:
    """The smallest groups of consecutive axes with equal products, of two shapes of one tensor.

    >>> groups_of((2, 6, 5), (2, 2, 3, 5))
    [([0], [0]), ([1], [1, 2]), ([2], [3])]
    """
    groups: list[Group] = []
    i = j = 0
    while i < len(before) and j < len(after):
        left, right = [i], [j]
        i, j = i + 1, j + 1
        while (pair := [_product(before, left), _product(after, right)])[0] != pair[1]:
            is_short = _is_multiple(pair[1], pair[0])
            if is_short and i < len(before):
                left.append(i)
                i += 1
            else:
                require(j < len(after), "sizes that do not fit")
                right.append(j)
                j += 1
        groups.append((left, right))
    rest = list(range(i, len(before))), list(range(j, len(after)))
    require(_product(before, rest[0]) == _product(after, rest[1]) == 1, "sizes that do not fit")
    return [*groups, rest] if rest[0] or rest[1] else groups


def _product(shape: Sequence[Any], axes: Sequence[int]) -> Any:
    return sympy.expand(sympy.prod([shape[k] for k in axes]))


def _is_multiple(a: Any, b: Any) -> bool:
    return sympy.fraction(sympy.cancel(a / b))[1] == 1


@HANDLERS("Reshape", "Flatten")
def reshape(edit: NodeEdit) -> Sequence[Layout | None]:
    """Groups of axes with equal products are cut alike where positions are a product of axes."""
    editor = edit.editor
    before, after = edit.shape(0), editor.shape(edit.node.output[0])
    require(edit.name(0) in editor.layouts, "a known operand")
    require(0 not in (*before, *after), "no elements")
    operand: list[Positions] = [None] * len(before)
    layout = list(edit.layout)
    for left, right in groups_of(before, after):
        if len(left) == len(right) == 1:
            operand[left[0]] = layout[right[0]]
            continue
        if all(layout[k] is None for k in right):
            continue
        sizes = [before[k] for k in left], [after[k] for k in right]
        cut = None
        if all(isinstance(n, int) for n in (*sizes[0], *sizes[1])):
            cut = _moved_back([layout[k] for k in right], *sizes)
        if cut is None:
            for k in right:
                layout[k] = None
        else:
            for k, positions in zip(left, cut, strict=True):
                operand[k] = positions
    edit.adapt(0, tuple(operand))
    if edit.node.op_type == "Reshape" and any(p is not None for p in layout):
        set_target(edit, after, layout)
    return [tuple(layout)]


def _moved_back(layout: Sequence[Positions], before: Sequence[int], after: Sequence[int]) -> list[Positions] | None:
    """Positions on the axes before, for those on the axes after; None if they are no product."""
    index = np.ix_(*(all_positions(p, n) for p, n in zip(layout, after, strict=True)))
    flat = np.arange(int(np.prod(after))).reshape(after)[index].reshape(-1)
    axes = [list(dict.fromkeys(k.tolist())) for k in np.unravel_index(flat, before)]
    back = np.arange(int(np.prod(before))).reshape(before)[np.ix_(*axes)].reshape(-1)
    if back.tolist() != flat.tolist():
        return None
    return [cut_positions(p, n) for p, n in zip(axes, before, strict=True)]


def set_target(edit: NodeEdit, after: Sequence[Any], layout: Sequence[Positions]) -> None:
    """The sizes that a reshape is to: 0 (as before) and -1 (the rest) stay."""
    editor, target = edit.editor, edit.name(1)

    def new(old: Sequence[int]) -> list[int]:
        return [n if n in (0, -1) or p is None else len(p) for n, p in zip(old, layout, strict=True)]

    if "shape" in edit.attributes:
        edit.set("shape", new(edit.attributes["shape"]))
    elif target in editor.constants:
        old = edit.constant(1)
        sizes = np.asarray(new(old.tolist()), old.dtype)
        if not np.array_equal(sizes, old):
            edit.replace(1, editor.replacement(sizes, target))
    else:
        require(target in editor.named.hosts, "a target that depends on data")
        old = editor.named.hosts[target].tolist()
        lost = [
            0 if p is None or (isinstance(n, int) and n in (0, -1)) else size - len(p)
            for n, p, size in zip(old, layout, after, strict=True)
        ]
        if any(lost):
            change = editor.integers([-n for n in lost])
            edit.replace(1, editor.emit("Add", [target, change], edit.node.output[0]))


@HANDLERS("Expand")
def expand(edit: NodeEdit) -> Sequence[Layout | None]:
    """Axes that are repeated need one position of the operand."""
    layout, old = edit.layout, edit.constant(1)
    edit.adapt(0, edit.broadcast(0, layout), broadcast=True)
    offset = len(layout) - len(old)
    sizes = [
        n if n == 1 or layout[k + offset] is None else len(layout[k + offset] or ()) for k, n in enumerate(old.tolist())
    ]
    if sizes != old.tolist():
        edit.replace(1, edit.editor.replacement(np.asarray(sizes, old.dtype), edit.name(1)))
    return [layout]


@HANDLERS("Concat")
def concat(edit: NodeEdit) -> Sequence[Layout | None]:
    """Each operand gets its part of the positions; operands without any go."""
    layout = edit.layout
    axis = edit.attributes.get("axis", 1) % len(layout)
    names = list(edit.node.input)
    positions = layout[axis]
    if positions is None:
        for k in range(len(names)):
            edit.adapt(k, layout)
        return [layout]
    del edit.new.input[:]
    start, order = 0, []
    for k, name in enumerate(names):
        size = edit.shape(k)[axis]
        require(isinstance(size, int), "a dynamic size")
        own = [p - start for p in positions if start <= p < start + size]
        if own:
            part = _replaced(layout, axis, cut_positions(own, size))
            edit.new.input.append(edit.editor.adapt(name, part))
        order += [p + start for p in own]
        start += size
    return [_replaced(layout, axis, tuple(order))]


@HANDLERS("Slice")
def slice_axes(edit: NodeEdit) -> Sequence[Layout | None]:
    """Along sliced axes, positions are those that the slice selects; the other axes are free."""
    shape, rank = edit.shape(0), len(edit.layout)
    axes = edit.axes(3, rank)
    if axes is None:
        axes = list(range(len(edit.integers(1, "starts"))))
    if all(edit.layout[k] is None for k in axes):
        edit.adapt(0, edit.layout)
        return [edit.layout]
    starts, ends = (edit.integers(k, name) for k, name in ((1, "starts"), (2, "ends")))
    steps = edit.integers(4, "steps") if edit.name(4) else [1] * len(starts)
    operand, left_over = list(edit.layout), []
    for j, axis in enumerate(axes):
        positions, operand[axis] = edit.layout[axis], None
        if positions is None:
            left_over.append(j)
            continue
        require(isinstance(shape[axis], int), "a dynamic size")
        selected = range(shape[axis])[slice(starts[j], max(ends[j], -(2**31)), steps[j])]
        operand[axis] = tuple(selected[p] for p in positions)
    edit.adapt(0, tuple(operand))
    bounds = [[values[j] for j in left_over] for values in (starts, ends, axes, steps)]
    if not left_over:
        edit.become("Identity", [edit.new.input[0]])
    elif "starts" in edit.attributes:
        for name, values in zip(("starts", "ends", "axes"), bounds, strict=False):
            edit.set(name, values)
    else:
        for k, values in enumerate(bounds, 1):
            edit.replace(k, edit.editor.integers(values))
    return [edit.layout]


@HANDLERS("Split")
def split(edit: NodeEdit) -> Sequence[Layout | None]:
    """The parts keep their positions in the operand, in its order."""
    editor, shape = edit.editor, edit.shape(0)
    rank = len(shape)
    axis = edit.attributes.get("axis", 0) % rank
    sizes = [editor.shape(name)[axis] for name in edit.node.output]
    others = {tuple(p for k, p in enumerate(layout) if k != axis) for layout in edit.wanted if layout is not None}
    require(len(others) == 1 and edit.name(0) in editor.layouts, "parts of several layouts")
    rest = list(others.pop())
    current = editor.layouts[edit.name(0)][axis]
    if current is None and all(x is None or x[axis] is None for x in edit.wanted):
        layout = (*rest[:axis], None, *rest[axis:])
        edit.adapt(0, layout)
        return [layout] * len(sizes)
    require(all(isinstance(n, int) for n in sizes), "a dynamic size")
    starts = np.cumsum([0, *sizes]).tolist()
    present = set(all_positions(current, shape[axis]))
    for layout, start, size in zip(edit.wanted, starts, sizes, strict=False):
        if layout is not None:
            present |= {p + start for p in all_positions(layout[axis], size)}
    order = all_positions(current, shape[axis])
    if len(order) < len(present):
        order = sorted(present)
    parts = [[p for p in order if a <= p < b] for a, b in itertools.pairwise(starts)]
    require(all(parts), "an empty part")
    edit.adapt(0, (*rest[:axis], tuple(p for part in parts for p in part), *rest[axis:]))
    counts = [len(part) for part in parts]
    if counts != sizes or "split" in edit.attributes or edit.name(1):
        _set_split(edit, counts)
    return [
        (*rest[:axis], cut_positions([p - a for p in part], n), *rest[axis:])
        for part, a, n in zip(parts, starts, sizes, strict=False)
    ]


def _set_split(edit: NodeEdit, counts: Sequence[int]) -> None:
    if edit.opset < 13:
        edit.set("split", list(counts))
    elif edit.name(1) or len(set(counts)) > 1:
        edit.set("num_outputs", None)
        if not edit.name(1) or edit.constant(1).tolist() != list(counts):
            edit.replace(1, edit.editor.integers(counts))


@HANDLERS("Gather")
def gather(edit: NodeEdit) -> Sequence[Layout | None]:
    """Indices select among the positions that are there."""
    editor, layout, shape = edit.editor, edit.layout, edit.shape(0)
    axis = edit.attributes.get("axis", 0) % len(shape)
    count = len(edit.shape(1)) if edit.name(1) in editor.values else edit.constant(1).ndim
    data, indices = edit.name(0), edit.name(1)
    selected = layout[axis : axis + count]
    operand = (*layout[:axis], None, *layout[axis + count :])
    current = editor.layouts[data][axis] if data in editor.layouts else None
    if current is None and indices in editor.values and indices not in editor.constants:
        edit.adapt(1, selected)
    elif current is not None or any(p is not None for p in selected):
        require(isinstance(shape[axis], int) and count <= 1, "indices of several axes")
        old = edit.constant(1)
        index = (np.atleast_1d(old) % shape[axis])[all_positions(selected[0] if count else None, old.size)].tolist()
        if data not in editor.constants:
            present = all_positions(current, shape[axis])
            if not set(index) <= set(present):
                present = sorted(set(index) | set(present))
            operand = _replaced(operand, axis, cut_positions(present, shape[axis]))
            index = [present.index(k) for k in index]
        new = np.asarray(index if count else index[0], old.dtype)
        if not np.array_equal(new, old):
            edit.replace(1, editor.replacement(new, indices))
    edit.adapt(0, operand)
    return [layout]


@HANDLERS("Pad")
def pad(edit: NodeEdit) -> Sequence[Layout | None]:
    """Axes that are not padded are cut freely."""
    rank = len(edit.layout)
    pads = edit.attributes.get("pads") or edit.attributes.get("paddings")
    if pads is None:
        pads = edit.constant(1).tolist()
        axes = edit.axes(3, rank) if edit.name(3) else list(range(rank))
        assert axes is not None
    else:
        axes = list(range(rank))
    half = len(pads) // 2
    padded = {axis for j, axis in enumerate(axes) if pads[j] or pads[half + j]}
    layout = tuple(None if k in padded else p for k, p in enumerate(edit.layout))
    edit.adapt(0, layout)
    return [layout]
