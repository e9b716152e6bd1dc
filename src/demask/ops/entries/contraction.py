"""Entries of contractions: linear, matmul, convolutions, attention; and of embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from demask.ops import schema
from demask.ops.entry import Case, Declined, Entry, SizedLine
from demask.ops.entry import Shape as S
from demask.ops.schema import fake

# Products with a matrix, [out, in] or [in, out].
PRODUCTS = {f"aten.{name}.default" for name in ("linear", "addmm", "mm", "matmul")}
# Ops that leave the last axis of the first operand unchanged, or may reshape the others.
_PRESERVES_SUMS = {
    f"aten.{name}"
    for name in (
        "dropout.default",
        "clone.default",
        "contiguous.default",
        "alias.default",
        "detach.default",
        "to.dtype",
        "_to_copy.default",
        "view.default",
        "reshape.default",
        "_unsafe_view.default",
        "expand.default",
    )
}


def _rank(node: fx.Node, name: str) -> int:
    return len(schema.sizes(fake(schema.arguments(node)[name])))


def _convolution_axes(node: fx.Node) -> tuple[int, Any, str, str, str]:
    """Of a convolution: groups, the weight's value, and the batch, space and kernel axes of its
    line."""
    call_arguments = schema.arguments(node)
    x, weight = fake(call_arguments["input"]), fake(call_arguments["weight"])
    space, kernel = (" ".join(f"~{a}{d}" for d in range(weight.ndim - 2)) for a in "sk")
    return call_arguments["groups"], weight, "n " if x.ndim == weight.ndim else "", space, kernel


def _conv(node: fx.Node) -> str | SizedLine | Declined:
    """n i ~s.., o i ~k.. -> n o ~s..; with groups n (g i), (g o) i; depthwise n g, (g o) 1."""
    groups, weight, batch, space, kernel = _convolution_axes(node)
    if schema.is_dynamic(groups):
        return Declined("a convolution whose number of groups is known only at run time")
    if groups == 1:
        return f"{batch}i {space}, o i {kernel}, o -> {batch}o {space}"
    if weight.shape[0] == groups and weight.shape[1] == 1:
        return f"{batch}g {space}, g 1 {kernel}, g -> {batch}g {space}"
    line = f"{batch}(g i) {space}, (g o) i {kernel}, (g o) -> {batch}(g o) {space}"
    return SizedLine(line, {"g": groups, "i": weight.shape[1], "o": weight.shape[0] // groups})


def _conv_transpose(node: fx.Node) -> str | SizedLine | Declined:
    """As a convolution, with the weight's input axis first."""
    groups, weight, batch, space, kernel = _convolution_axes(node)
    if schema.is_dynamic(groups):
        return Declined("a convolution whose number of groups is known only at run time")
    if groups == 1:
        return f"{batch}i {space}, i o {kernel}, o -> {batch}o {space}"
    line = f"{batch}(g i) {space}, (g i) o {kernel}, (g o) -> {batch}(g o) {space}"
    return SizedLine(line, {"g": groups, "i": weight.shape[0] // groups, "o": weight.shape[1]})


def _padded(node: fx.Node) -> bool:
    """Whether windows read outside of the input: `same` pads unless all kernel sizes are 1."""
    call_arguments = schema.arguments(node)
    padding = call_arguments["padding"]
    if isinstance(padding, str):
        kernel = fake(call_arguments["weight"]).shape[2:]
        return padding == "same" and any(size != 1 for size in kernel)
    return any(pad != 0 for pad in padding)


def _depthwise_groups(node: fx.Node, sizes: Any) -> dict[str, Any]:
    weight = fake(schema.arguments(node)["weight"])
    is_depthwise = schema.arguments(node)["groups"] > 1 and weight.shape[1] == 1
    is_depthwise = is_depthwise and weight.shape[0] == schema.arguments(node)["groups"]
    return {"groups": sizes[0][1 - (len(sizes[0]) < weight.ndim)]} if is_depthwise else {}


def _matmul(node: fx.Node) -> str | SizedLine:
    a, b = _rank(node, "self"), _rank(node, "other")
    if _is_softmax(node.args[0]) and b > 1:
        return SizedLine("... t !i, ... !i o -> ... t o" if a > 1 else "!i, ... !i o -> ... o", {}, mixes=True)
    left = "... t i" if a > 1 else "i"
    right = "... i o" if b > 1 else "i"
    return f"{left}, {right} -> ..." + " t" * (a > 1) + " o" * (b > 1) if max(a, b) > 1 else "i, i ->"


def _bmm(node: fx.Node) -> str | SizedLine:
    if _is_softmax(node.args[0]):
        return SizedLine("b t !i, b !i o -> b t o", {}, mixes=True)
    return "b t i, b i o -> b t o"


def _is_softmax(value: Any) -> bool:
    """Whether the entries of a value sum to one along its last axis (attention in single ops)."""
    while isinstance(value, fx.Node) and str(value.target) in _PRESERVES_SUMS:
        before = fake(value.args[0])
        if schema.draws_random_numbers(value):
            return False
        if not before.ndim or not schema.same_size(before.shape[-1], fake(value).shape[-1]):
            return False
        value = value.args[0]
    if not isinstance(value, fx.Node) or value.target is not torch.ops.aten.softmax.int:
        return False
    return schema.arguments(value)["dim"] in (-1, fake(value).ndim - 1)


def _einsum(node: fx.Node) -> str | Declined:
    """The line of an einsum: its equation with spaces."""
    equation = str(schema.arguments(node)["equation"]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    parts = left.split(",")
    if not arrow:
        right = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    if len(parts) != 2 or "." in equation or any(len(set(p)) < len(p) for p in parts):
        return Declined(f"einsum {equation!r}: two operands without dots or repeated letters have a rule")
    if (set(parts[0]) ^ set(parts[1])) - set(right):
        return Declined(f"einsum {equation!r}: an axis is summed in one operand alone")
    lines = [" ".join(c.lower() + "u" * c.isupper() for c in part) for part in (*parts, right)]
    return f"{lines[0]}, {lines[1]} -> {lines[2]}"


def _addmm(node: fx.Node) -> str | Declined:
    call_arguments = schema.arguments(node)
    if call_arguments["beta"] != 1 or call_arguments["alpha"] != 1:
        return Declined("addmm with beta or alpha other than 1")
    bias = fake(call_arguments["self"])
    first = {0: "", 1: "o", 2: "n o"}[bias.ndim]
    return f"{first}, n i, i o -> n o"


def _convs() -> list[tuple[str, Entry]]:
    entries = []
    for d, tail in ((1, (7,)), (2, (5, 6)), (3, (4, 3, 3))):
        k, one, pad = (3, 3, 2)[:d], [1] * d, [1] * d
        dense = Case((S((2, 4, *tail)), S((6, 4, *k), True), S((6,), True), one, pad), {})
        no_bias = Case((S((2, 4, *tail)), S((6, 4, *k), True), None, [2] * d, [0] * d), {})
        grouped = Case((S((2, 4, *tail)), S((6, 2, *k), True), S((6,), True), one, pad, one, 2), {})
        depthwise = Case((S((2, 4, *tail)), S((4, 1, *k), True), None, one, pad, one, 4), {})
        # An odd kernel: for an even one `same` pads unevenly, and torch warns.
        same = Case((S((2, 4, *tail)), S((6, 4, *[3] * d), True), None, one, "same"), {})
        transposed_case = Case((S((2, 4, *tail)), S((4, 6, *k), True), S((6,), True), [2] * d, pad, [1] * d), {})
        strided = Case((S((2, 4, *tail)), S((4, 3, *([1] * d)), True), None, [2] * d), {})
        transposed_grouped = Case((S((2, 4, *tail)), S((4, 3, *k), True), None, [2] * d, pad, [0] * d, 2), {})
        entry = {"fill": "sum", "pads": _padded, "args": _depthwise_groups, "region": "conv"}
        entries += [
            (f"aten.conv{d}d.default", Entry(_conv, **entry, cases=(dense, no_bias, grouped, depthwise))),
            (f"aten.conv{d}d.padding", Entry(_conv, **entry, cases=(same,))),
        ]
        name = f"aten.conv_transpose{d}d." + ("default" if d == 1 else "input")
        transposed = {
            "fill": "sum",
            "pads": True,
            "region": "transposed",
            "cases": (transposed_case, strided, transposed_grouped),
        }
        entries.append((name, Entry(_conv_transpose, **transposed)))
    return entries


def _attention(node: fx.Node) -> str | SizedLine | Declined:
    """softmax(q · k + mask) · v: normalized over the keys; causal queries must stay in position."""
    call_arguments = schema.arguments(node)
    if call_arguments["dropout_p"]:
        return Declined("attention with dropout")
    t = "!t" if call_arguments["is_causal"] else "t"
    if not call_arguments["enable_gqa"]:
        return f"... {t} d, ... !s d, ... !s e, ... {t} !s -> ... {t} e"
    heads, shared = (fake(call_arguments[name]).shape[-3] for name in ("query", "key"))
    mask = call_arguments["attn_mask"]
    shape = () if mask is None else fake(mask).shape
    axis = "" if len(shape) == 2 else "... 1 " if len(shape) > 2 and shape[-3] == 1 else "... (h r) "
    line = f"... (h r) {t} d, ... h !s d, ... h !s e, {axis}{t} !s -> ... (h r) {t} e"
    return SizedLine(line, {"h": shared, "r": heads // shared})


def _original_scale(node: fx.Node, sizes: Any) -> dict[str, Any]:
    call_arguments = schema.arguments(node)
    scale = call_arguments["scale"]
    return {"scale": fake(call_arguments["query"]).shape[-1] ** -0.5 if scale is None else scale}


def _grouped(node: fx.Node) -> str | Declined:
    """Rows of x, each times the matrix of its expert; `offs` are the ends of the experts' rows. An
    entry that is zero in the matrices of all experts is zero for all rows."""
    call_arguments = schema.arguments(node)
    x, weight = list(call_arguments.values())[:2]
    if (fake(x).ndim, fake(weight).ndim) != (2, 3) or call_arguments["offs"] is None:
        return Declined("a grouped product of operands other than rows and a matrix per expert")
    if call_arguments.get("bias") is not None:
        return Declined("a grouped product with a bias")
    return "t i, !e i o, !e -> t o"


def _embedding(node: fx.Node) -> str:
    return "!v e, ... -> ... e"


# Products that select a matrix per row at run time -> the alignment of rows in bytes. They have no
# cases: they do not support float64, in which laws are tested, or belong to another library.
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
        _attention, fill="mix", main=2, args=_original_scale, cases=(
        Case((S((2, 3, 4, 5)), S((2, 3, 7, 5)), S((2, 3, 7, 6))), {}),
        Case((S((2, 3, 4, 5)), S((2, 3, 7, 5)), S((2, 3, 7, 6)), S((4, 7))), {}),
        Case((S((2, 4, 5)), S((2, 4, 5)), S((2, 4, 6)), None, 0.0, True), {}),
        Case((S((2, 6, 4, 5)), S((2, 3, 7, 5)), S((2, 3, 7, 6)), S((6, 4, 7))),
             {"enable_gqa": True})))),
    *((name, Entry(_grouped, fill="sum", align=align)) for name, align in GROUPED.items()),
    ("aten.embedding.default", Entry(_embedding, fill="same", cases=(
        Case((S((7, 4), True), S((2, 3), of=7)), {}),))),
]  # fmt: skip
