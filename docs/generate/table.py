"""docs/table.md, from `demask.ops.TABLE`."""

from __future__ import annotations

from collections import Counter
from dataclasses import MISSING, fields

import torch
from torch import fx
from torch.utils import _pytree as pytree

from demask.ops import TABLE, Declined, Entry, Relation, SizedLine, bind
from demask.ops.entry import Shape
from demask.ops.laws import call_node, draw_tensor, target_of
from demask.rewrites.normalize import REWRITTEN
from docs.generate import DOCS

PATH = DOCS / "table.md"
SHOWN = "zero main stays sized pads affine neutral args indices region free total range".split()
HEAD = """# The table

One entry per ATen op: how the axes of its outputs depend on the axes of its inputs. Made from
`demask.ops.TABLE` by `python -m docs table`; a test keeps it so. How to read a line is in
[architecture.md](architecture.md#3-the-table-demaskops), what the columns mean in
`demask.ops.entry.Entry`.

- *kind*: follows from the line, and from how a known value is filled in; nobody declares it.
  *contract* sums products, *mix* averages by weights that come from products (attention), *reduce*
  and *complete* need full axes, *window* slides, *recur* reads its own output of the step before,
  *move* computes nothing, *create* reads no value.
- *line*: where an entry's line is a function of the call (marked *f*), the one for its
  first law case.
- *fill*: how the value of a known output is computed.
- *columns*: what else the entry states; a name alone means a function of the call.
- *cases*: the calls on which both laws are tested, each with many drawn masks.

"""


def kind(relation: Relation) -> str:
    """What a line makes of its axes, in one word."""
    fill = relation.entry.fill
    if fill in ("sum", "mix", "recur"):
        return {"sum": "contract"}.get(fill, fill)
    if relation.entry.free:
        return "create"
    gone = relation.complete - relation.letters(tuple(a for axes in relation.outs for a in axes))
    if gone:
        return "reduce" if fill == "run" else "look-up"
    if relation.window:
        return "window"
    if relation.moved or fill == "same":
        return "move"
    return "complete" if relation.complete else "pointwise"


def first_call(name: str, entry: Entry) -> fx.Node:
    """The call of an entry's first law case, on drawn tensors."""
    draw = torch.Generator().manual_seed(0)
    case = entry.cases[0]
    args, kwargs = pytree.tree_map(
        lambda leaf: draw_tensor(leaf, draw) if isinstance(leaf, Shape) else leaf, (case.args, dict(case.kwargs))
    )
    return call_node(target_of(name), *args, **kwargs)


def line(entry: Entry, node: fx.Node) -> str:
    """The line for a call, with the sizes that no operand shows."""
    if isinstance(entry.line, str):
        return f"`{entry.line}`"
    result = entry.line(node)
    if isinstance(result, Declined):
        raise ValueError(f"the first case of {node.target} has no line: {result.text}")
    text = result.line if isinstance(result, SizedLine) else result
    return f"`{' '.join(text.split())}` *f*"


def columns(entry: Entry) -> str:
    """The columns that an entry sets, other than line, fill and cases."""
    plain = {f.name: f.default for f in fields(Entry) if f.default is not MISSING}
    values = {name: getattr(entry, name) for name in SHOWN if getattr(entry, name) != plain[name]}
    texts = [name if callable(value) or value is True else f"{name}={value}" for name, value in values.items()]
    return ", ".join(texts).replace("'", "")


def row(name: str, entry: Entry) -> tuple[str, list[str]]:
    """The kind of an entry, and its cells. One without cases has no call to show its line by."""
    if not entry.cases:
        return "contract", [f"`{name}`", "contract", "*f*", entry.fill, columns(entry), "0"]
    node = first_call(name, entry)
    relation = bind(node, TABLE)
    if isinstance(relation, Declined):
        raise ValueError(f"the first case of {name} is declined: {relation.text}")
    short = name.removeprefix("aten.")
    family = kind(relation)
    cases = str(len(entry.cases))
    return family, [f"`{short}`", family, line(entry, node), entry.fill, columns(entry), cases]


def page() -> str:
    """The full page, in the order of the table."""
    rows = [row(name, entry) for name, entry in TABLE.items()]
    counts = Counter(word for word, _ in rows)
    said = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    lines = [["op (`aten.`)", "kind", "line", "fill", "columns", "cases"], ["---"] * 6]
    lines += [cells for _, cells in rows]
    body = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    others = ", ".join(f"`{name.removeprefix('aten.')}`" for name in sorted(REWRITTEN))
    module = "demask.rewrites.normalize"
    tail = f"Rewritten as other ops before the table is queried (`{module}`): {others}."
    return f"{HEAD}{len(TABLE)} entries: {said}.\n\n{body}\n\n{tail}\n"
