"""Results of calls on known values: an op is run on the fills of its operands."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from demask.facts.masks import Fact
from demask.numerics import all_along
from demask.ops import Relation, schema

MAX_FILL = 2**28  # most elements of a value that is computed to find known positions
_LENGTHS = (1, 2, 3)  # of axes of any length, in runs whose results are compared


def results_on_fills(relation: Relation, inputs: list[Fact], arguments: dict[str, Any]) -> list[Fact] | None:
    """The outputs of the op on the fills. Axes along which nothing varies have size 1.

    Where a result may depend on the length of an axis of any length, or on the number of values
    that are scattered to one position, it is known if it is the same for several of these."""
    output_letters = relation.letters(tuple(axis for axes in relation.outs for axis in axes))
    lengths = [{}]
    if relation.entry.fill == "scatter":
        values, one = relation.complete - output_letters, relation.complete & output_letters
        lengths = [dict.fromkeys(values, n) | dict.fromkeys(one, 1) for n in (0, *_LENGTHS)]
    elif relation.entry.sized:
        gone = (missing_letters(relation, k) for k in range(len(relation.outs)))
        dynamic = {a for a in relation.complete.union(*gone) if relation.size[a] is None}
        lengths = [dict.fromkeys(dynamic, n) for n in _LENGTHS] if dynamic else lengths
    results: list[Fact] = []
    for sizes in lengths:
        outputs = _run_on_fills(relation, inputs, arguments, sizes)
        if outputs is None:
            return None
        for k, (value, axes) in enumerate(zip(outputs, relation.outs, strict=True)):
            known = torch.ones([1] * value.ndim, dtype=torch.bool)
            for axis, letters in enumerate(axes):
                if set(letters) & set(sizes):
                    row = value.narrow(axis, 0, 1)
                    known = known & all_along(value == row, [axis], keepdim=True)
                    value = row
            if k < len(results):
                known = results[k].known & known & (value == results[k].fill)
                results[k] = Fact(known, value)
            else:
                results.append(Fact(known, value))
    return results


def _run_on_fills(
    relation: Relation, inputs: list[Fact], arguments: dict[str, Any], lengths: dict[str, int]
) -> list[Tensor] | None:
    """The outputs of the op on the fills, with `lengths` of some letters; all that is scattered is
    scattered to position 0. None where they would be too large, or where the op does not take these
    lengths."""
    sizes, varies = _run_sizes(relation, inputs)
    sizes |= lengths
    values = []
    for k, fact in enumerate(inputs):
        if not isinstance(relation.operands[k].value, fx.Node):
            values.append(relation.operands[k].value)
            continue
        shape: list[int] = []
        for axis, n in zip(relation.ins[k], fact.fill.shape, strict=True):
            want = 1
            for letter in axis:
                want *= sizes[letter]
            shape.append(want if lengths.keys() & set(axis) else max(n, want))
        if math.prod(shape) > MAX_FILL:
            return None
        # Unknown integers may be divisors: they are 1, not 0.
        fill = torch.where(fact.known, fact.fill, fact.fill.new_ones(()))
        if k in relation.positions:
            count = len(values[0]) if relation.operands[k].name == "lengths" else 0
            fill = fill.new_full([1] * fill.ndim, count)
        values.append(fill.expand(shape).contiguous())
    call_arguments = schema.replace_operands(arguments, relation.operands, values)
    try:
        result = call(relation.node, call_arguments)
    except (RuntimeError, IndexError):
        if lengths:
            return None
        raise
    outputs = list(result) if isinstance(result, (list, tuple)) else [result]
    # Results along an axis over which the op works differ even for equal values (cumsum).
    varies |= relation.complete if relation.entry.sized else set()
    for out, axes in enumerate(relation.outs):
        for axis, letters in enumerate(axes):
            if not varies & set(letters):
                outputs[out] = outputs[out].narrow(axis, 0, 1)
    return outputs


def _run_sizes(relation: Relation, inputs: list[Fact]) -> tuple[dict[str, int], set[str]]:
    """The size of each letter in a run on fills, and the letters along which the result varies."""
    varies: set[str] = set()
    for axes, fact in zip(relation.ins, inputs, strict=True):
        for axis, n in zip(axes, fact.fill.shape, strict=True):
            if n != 1:
                varies |= set(axis)
    together = {a for axes in relation.ins for axis in axes if len(axis) > 1 for a in axis}
    whole = relation.complete.union(*(missing_letters(relation, k) for k in range(len(relation.outs))))
    sizes = {}
    for letter, size in relation.size.items():
        full = letter in varies or letter in together or (letter in whole and relation.entry.sized)
        # A norm over equal values does not depend on their number; two are enough for a variance.
        short = min(2, size or 2) if letter in whole else 1
        sizes[letter] = size if full and size is not None else short
    return sizes, varies


def missing_letters(relation: Relation, out: int) -> set[str]:
    output_letters = relation.letters(relation.outs[out])
    return {a for axes in relation.ins for a in relation.letters(axes) if a not in output_letters}


def call(node: fx.Node, arguments: dict[str, Any]) -> Any:
    with torch.no_grad():
        return schema.call_with(node, arguments)
