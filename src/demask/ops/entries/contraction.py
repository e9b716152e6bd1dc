"""Products that are summed: linear, matmul, convolutions, attention; and embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from demask.ops import schema
from demask.ops.entry import Case, Declined, Entry, SizedLine
from demask.ops.entry import Shape as S

# Products with a matrix, [out, in] or [in, out].
PRODUCTS = {f"aten.{name}.default" for name in ("linear", "addmm", "mm", "matmul")}
# What leaves the last axis of its first operand as it is, or shares it out again row by row.
_KEEP_SUMS = {f"aten.{name}" for name in (
    "dropout.default", "clone.default", "contiguous.default", "alias.default", "detach.default",
    "to.dtype", "_to_copy.default", "view.default", "reshape.default", "_unsafe_view.default",
    "expand.default",
)}  # fmt: skip


def _rank(node: fx.Node, name: str) -> int:
    return len(schema.sizes(schema.arguments(node)[name].meta["val"]))


def _parts(node: fx.Node) -> tuple[int, Any, str, str, str]:
    """Of a convolution: groups, weight, and the batch, space and kernel axes of its line."""
    found = schema.arguments(node)
    x, weight = found["input"].meta["val"], found["weight"].meta["val"]
    space, kernel = (" ".join(f"~{a}{d}" for d in range(weight.ndim - 2)) for a in "sk")
    return found["groups"], weight, "n " if x.ndim == weight.ndim else "", space, kernel


def _conv(node: fx.Node) -> str | SizedLine | Declined:
    """n i ~s.., o i ~k.. -> n o ~s..; with groups n (g i), (g o) i; depthwise n g, (g o) 1."""
    groups, weight, batch, space, kernel = _parts(node)
    if schema.is_dynamic(groups):
        return Declined("a convolution whose number of groups comes at run time")
    if groups == 1:
        return f"{batch}i {space}, o i {kernel}, o -> {batch}o {space}"
    if weight.shape[0] == groups and weight.shape[1] == 1:
        return f"{batch}g {space}, g 1 {kernel}, g -> {batch}g {space}"
    line = f"{batch}(g i) {space}, (g o) i {kernel}, (g o) -> {batch}(g o) {space}"
    return SizedLine(line, {"g": groups, "i": weight.shape[1], "o": weight.shape[0] // groups})


def _conv_transpose(node: fx.Node) -> str | SizedLine | Declined:
    """As a convolution, with the weight's input axis first."""
    groups, weight, batch, space, kernel = _parts(node)
    if schema.is_dynamic(groups):
        return Declined("a convolution whose number of groups comes at run time")
    if groups == 1:
        return f"{batch}i {space}, i o {kernel}, o -> {batch}o {space}"
    line = f"{batch}(g i) {space}, (g i) o {kernel}, (g o) -> {batch}(g o) {space}"
    return SizedLine(line, {"g": groups, "i": weight.shape[0] // groups, "o": weight.shape[1]})


def _padded(node: fx.Node) -> bool:
    """Does the window read beyond its input? `same` pads unless every kernel is 1."""
    found = schema.arguments(node)
    padding = found["padding"]
    if isinstance(padding, str):
        kernel = found["weight"].meta["val"].shape[2:]
        return padding == "same" and any(size != 1 for size in kernel)
    return any(pad != 0 for pad in padding)


def _groups(node: fx.Node, made: Any) -> dict[str, Any]:
    """Depthwise convolutions have as many groups as channels are left."""
    weight = schema.arguments(node)["weight"].meta["val"]
    depthwise = schema.arguments(node)["groups"] > 1 and weight.shape[1] == 1
    depthwise = depthwise and weight.shape[0] == schema.arguments(node)["groups"]
    return {"groups": made[0][1 - (len(made[0]) < weight.ndim)]} if depthwise else {}


def _matmul(node: fx.Node) -> str | SizedLine:
    a, b = _rank(node, "self"), _rank(node, "other")
    if _is_softmax(node.args[0]) and b > 1:
        return SizedLine(
            "... t !i, ... !i o -> ... t o" if a > 1 else "!i, ... !i o -> ... o", {}, mixes=True
        )
    left = "... t i" if a > 1 else "i"
    right = "... i o" if b > 1 else "i"
    return (
        f"{left}, {right} -> ..." + " t" * (a > 1) + " o" * (b > 1) if max(a, b) > 1 else "i, i ->"
    )


def _bmm(node: fx.Node) -> str | SizedLine:
    if _is_softmax(node.args[0]):
        return SizedLine("b t !i, b !i o -> b t o", {}, mixes=True)
    return "b t i, b i o -> b t o"


def _is_softmax(value: Any) -> bool:
    """Do the entries of a value sum to one along its last axis? (Attention spelled out.)"""
    while isinstance(value, fx.Node) and str(value.target) in _KEEP_SUMS:
        before = value.args[0].meta["val"]  # type: ignore[union-attr]
        if not before.ndim or not schema.same_size(before.shape[-1], value.meta["val"].shape[-1]):
            return False
        value = value.args[0]
    if not isinstance(value, fx.Node) or value.target is not torch.ops.aten.softmax.int:
        return False
    return schema.arguments(value)["dim"] in (-1, value.meta["val"].ndim - 1)


def _einsum(node: fx.Node) -> str | Declined:
    """An equation is a line already, but for spaces."""
    equation = str(schema.arguments(node)["equation"]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    parts = left.split(",")
    if not arrow:
        right = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    if len(parts) != 2 or "." in equation or any(len(set(p)) < len(p) for p in parts):
        return Declined(
            f"einsum {equation!r}: two operands without dots or repeated letters have a rule"
        )
    if (set(parts[0]) ^ set(parts[1])) - set(right):
        return Declined(f"einsum {equation!r}: an axis is summed in one operand alone")
    lines = [" ".join(c.lower() + "u" * c.isupper() for c in part) for part in (*parts, right)]
    return f"{lines[0]}, {lines[1]} -> {lines[2]}"


def _addmm(node: fx.Node) -> str | Declined:
    found = schema.arguments(node)
    if found["beta"] != 1 or found["alpha"] != 1:
        return Declined("addmm with beta or alpha other than 1")
    bias = found["self"].meta["val"]
    first = {0: "", 1: "o", 2: "n o"}[bias.ndim]
    return f"{first}, n i, i o -> n o"


def _convs() -> list[tuple[str, Entry]]:
    result = []
    for d, tail in ((1, (7,)), (2, (5, 6)), (3, (4, 3, 3))):
        k, one, pad = (3, 3, 2)[:d], [1] * d, [1] * d
        dense = Case((S((2, 4, *tail)), S((6, 4, *k), True), S((6,), True), one, pad), {})
        bare = Case((S((2, 4, *tail)), S((6, 4, *k), True), None, [2] * d, [0] * d), {})
        grouped = Case((S((2, 4, *tail)), S((6, 2, *k), True), S((6,), True), one, pad, one, 2), {})
        depth = Case((S((2, 4, *tail)), S((4, 1, *k), True), None, one, pad, one, 4), {})
        # An odd kernel: with an even one `same` pads unevenly, and torch warns.
        same = Case((S((2, 4, *tail)), S((6, 4, *[3] * d), True), None, one, "same"), {})
        up = Case((S((2, 4, *tail)), S((4, 6, *k), True), S((6,), True), [2] * d, pad, [1] * d), {})
        gap = Case((S((2, 4, *tail)), S((4, 3, *([1] * d)), True), None, [2] * d), {})
        upg = Case((S((2, 4, *tail)), S((4, 3, *k), True), None, [2] * d, pad, [0] * d, 2), {})
        entry = {"fill": "sum", "pads": _padded, "args": _groups, "region": "conv"}
        result += [
            (f"aten.conv{d}d.default", Entry(_conv, **entry, cases=(dense, bare, grouped, depth))),
            (f"aten.conv{d}d.padding", Entry(_conv, **entry, cases=(same,))),
        ]
        name = f"aten.conv_transpose{d}d." + ("default" if d == 1 else "input")
        transposed = {"fill": "sum", "pads": True, "region": "transposed", "cases": (up, gap, upg)}
        result.append((name, Entry(_conv_transpose, **transposed)))
    return result


def _attention(node: fx.Node) -> str | SizedLine | Declined:
    """softmax(q · k + mask) · v: keys are normalised over; causal queries must stay in place."""
    found = schema.arguments(node)
    if found["dropout_p"]:
        return Declined("attention with dropout")
    t = "!t" if found["is_causal"] else "t"
    if not found["enable_gqa"]:
        return f"... {t} d, ... !s d, ... !s e, ... {t} !s -> ... {t} e"
    heads, shared = (found[name].meta["val"].shape[-3] for name in ("query", "key"))
    mask = found["attn_mask"]
    shape = () if mask is None else mask.meta["val"].shape
    axis = (
        "" if len(shape) == 2 else "... 1 " if len(shape) > 2 and shape[-3] == 1 else "... (h r) "
    )
    line = f"... (h r) {t} d, ... h !s d, ... h !s e, {axis}{t} !s -> ... (h r) {t} e"
    return SizedLine(line, {"h": shared, "r": heads // shared})


def _scale(node: fx.Node, made: Any) -> dict[str, Any]:
    """The scale stays that of the old head size."""
    found = schema.arguments(node)
    scale = found["scale"]
    return {"scale": found["query"].meta["val"].shape[-1] ** -0.5 if scale is None else scale}


def _grouped(node: fx.Node) -> str | Declined:
    """Rows of x, each times the matrix of its expert; `offs` says where an expert's rows end. What
    is zero in the matrices of all experts is zero whatever the rows."""
    found = schema.arguments(node)
    x, weight = list(found.values())[:2]
    if (x.meta["val"].ndim, weight.meta["val"].ndim) != (2, 3) or found["offs"] is None:
        return Declined("a grouped product of other than rows with a matrix for each expert")
    if found.get("bias") is not None:
        return Declined("a grouped product with a bias")
    return "t i, !e i o, !e -> t o"


def _embedding(node: fx.Node) -> str:
    return "!v e, ... -> ... e"


# Products that choose a matrix for each row at run time, and what rows they take. They know no
# float64, in which laws are tested, or belong to another library: no cases.
GROUPED = {"aten._grouped_mm.default": 16, "transformers.grouped_mm_fallback.default": 1}

ENTRIES = [
    *_convs(),
    ("aten.linear.default", Entry("... i, o i, o -> ... o", fill="sum", cases=(
        Case((S((2, 3, 4)), S((5, 4), True), S((5,), True)), {}),
        Case((S((2, 4)), S((5, 4), True), None), {})))),
    ("aten.mm.default", Entry("t i, i o -> t o", fill="sum", cases=(
        Case((S((3, 4)), S((4, 5), True)), {}), Case((S((3, 4)), S((4, 5))), {})))),
    ("aten.einsum.default", Entry(_einsum, fill="sum", cases=(
        Case(("bthd,bshd->bhts", [S((2, 3, 4, 5)), S((2, 6, 4, 5))]), {}),
        Case(("bti,oi->bto", [S((2, 3, 4)), S((5, 4), True)]), {}),
        Case(("i,j->ij", [S((3,)), S((4,))]), {})))),
    ("aten.bmm.default", Entry(_bmm, fill="sum", cases=(
        Case((S((2, 3, 4)), S((2, 4, 5))), {}),))),
    ("aten.matmul.default", Entry(_matmul, fill="sum", cases=(
        Case((S((2, 3, 4)), S((4, 5), True)), {}), Case((S((2, 3, 4)), S((2, 4, 5))), {}),
        Case((S((2, 4)), S((4,), True)), {}), Case((S((4, 3)), S((2, 3, 5))), {})))),
    ("aten.addmm.default", Entry(_addmm, fill="sum", cases=(
        Case((S((5,), True), S((3, 4)), S((4, 5), True)), {}),))),
    ("aten.scaled_dot_product_attention.default", Entry(
        _attention, fill="mix", main=2, args=_scale, cases=(
        Case((S((2, 3, 4, 5)), S((2, 3, 7, 5)), S((2, 3, 7, 6))), {}),
        Case((S((2, 3, 4, 5)), S((2, 3, 7, 5)), S((2, 3, 7, 6)), S((4, 7))), {}),
        Case((S((2, 4, 5)), S((2, 4, 5)), S((2, 4, 6)), None, 0.0, True), {}),
        Case((S((2, 6, 4, 5)), S((2, 3, 7, 5)), S((2, 3, 7, 6)), S((6, 4, 7))),
             {"enable_gqa": True})))),
    *((name, Entry(_grouped, fill="sum", align=align)) for name, align in GROUPED.items()),
    ("aten.embedding.default", Entry(_embedding, fill="same", cases=(
        Case((S((7, 4), True), S((2, 3), of=7)), {}),))),
]  # fmt: skip
