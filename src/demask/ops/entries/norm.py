"""Entries of ops over complete axes: norms, softmax, reductions."""

from __future__ import annotations

from typing import Any

from torch import fx

from demask.ops import schema
from demask.ops.entry import Case, Declined, Entry, SizedLine
from demask.ops.entry import Shape as S


def _rank(node: fx.Node) -> int:
    return len(schema.sizes(schema.operands(node)[0].value.meta["val"]))


def _layer_norm(node: fx.Node) -> str:
    normalized = " ".join(f"!d{k}" for k in range(len(schema.arguments(node)["normalized_shape"])))
    parameter_axes = normalized.replace("!", "")
    return f"... {normalized}, {parameter_axes}, {parameter_axes} -> ... {normalized}"


def _group_norm(node: fx.Node) -> SizedLine:
    space = " ".join(f"!s{k}" for k in range(_rank(node) - 2))
    line = f"n (g !c) {space}, (g c), (g c) -> n (g !c) {space}"
    return SizedLine(line, {"g": schema.arguments(node)["num_groups"]})


def _groups(node: fx.Node, sizes: Any) -> dict[str, Any]:
    """The number of groups for fewer channels: whole groups are removed."""
    channels = node.args[0].meta["val"].shape[1]  # type: ignore[union-attr]
    return {"num_groups": sizes[0][1] // (channels // schema.arguments(node)["num_groups"])}


def _instance_norm(node: fx.Node) -> str:
    mark = "!" if schema.arguments(node)["use_input_stats"] else ""
    space = " ".join(f"{mark}s{k}" for k in range(_rank(node) - 2))
    return f"n c {space}, c, c, c, c -> n c {space}"


def _softmax(node: fx.Node) -> str:
    rank = _rank(node)
    dim = schema.arguments(node)["dim"] % max(rank, 1)
    axes = " ".join(f"!a{k}" if k == dim else f"a{k}" for k in range(rank))
    return f"{axes} -> {axes}"


def _reduced(node: fx.Node) -> str:
    """Reduced axes must be complete; the output has no such axes, or axes of size one."""
    rank, call_arguments = _rank(node), schema.arguments(node)
    dims = call_arguments.get("dim")
    dims = list(range(rank)) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    reduced = {dim % max(rank, 1) for dim in dims}
    input_axes = " ".join(f"!a{k}" if k in reduced else f"a{k}" for k in range(rank))
    reduced_axis = "1" if call_arguments.get("keepdim") else ""
    output_axes = " ".join(reduced_axis if k in reduced else f"a{k}" for k in range(rank))
    return f"{input_axes} -> {output_axes}"


def _spread(node: fx.Node) -> str | Declined:
    """The variance of equal values is 0, but of a single value NaN: the length must be known."""
    line, sizes = _reduced(node), schema.sizes(schema.operands(node)[0].value.meta["val"])
    is_reduced = [f"!a{k}" in line.split() for k in range(len(sizes))]
    if any(reduced and size is None for reduced, size in zip(is_reduced, sizes, strict=True)):
        return Declined("variance over a dynamic axis")
    return line


def _both_moments(node: fx.Node) -> str | Declined:
    line = _spread(node)
    return line if isinstance(line, Declined) else f"{line}, {line.partition('->')[2]}"


_OVER_ONE = [(S((2, 3, 4)), [1]), (S((2, 3, 4)), [-1], True), (S((2, 3, 4, 5)), [2, 3])]
_REDUCED = tuple(Case(args, {}) for args in _OVER_ONE)
_MEANS = {"mean.dim": "mean", "amax.default": "max", "amin.default": "min"}
_SUMS = {"sum.dim_IntList": "sum"}
_WHOLE = ("mean.default", "sum.default")
_SPREAD = (_REDUCED[0], Case((S((2, 3, 4, 5)), [2, 3]), {"correction": 0, "keepdim": True}))
ENTRIES = [
    *((f"aten.{n}", Entry(_reduced, rest=k, cases=_REDUCED)) for n, k in _MEANS.items()),
    *((f"aten.{n}", Entry(_reduced, sized=True, rest=k, cases=_REDUCED))
      for n, k in _SUMS.items()),
    *((f"aten.{n}", Entry(_reduced, sized=True, cases=(Case((S((2, 3)),), {}),))) for n in _WHOLE),
    *((f"aten.{n}.correction", Entry(_spread, sized=True, cases=_SPREAD)) for n in ("var", "std")),
    ("aten.var_mean.correction", Entry(_both_moments, sized=True, cases=_SPREAD)),
    ("aten.linalg_vector_norm.default", Entry(_reduced, sized=True, cases=(
        Case((S((2, 3, 4)), 2, [1], True), {}),))),
    ("aten.layer_norm.default", Entry(
        _layer_norm, affine=(1, 2), sized=True, rest="layer", total="eps", cases=(
        Case((S((2, 3, 4)), [4], S((4,), True), S((4,), True)), {}),
        Case((S((2, 3, 4)), [3, 4]), {})))),
    ("aten.rms_norm.default", Entry(
        _layer_norm, zero="first", affine=(1, 2), sized=True, rest="rms", total="eps", cases=(
            Case((S((2, 3, 4)), [4], S((4,), True), 1e-6), {}),))),
    ("aten.group_norm.default", Entry(
        _group_norm, affine=(1, 2), args=_groups, total="eps", cases=(
        Case((S((2, 6, 4, 5)), 3, S((6,), True), S((6,), True)), {}),
        Case((S((2, 6, 4)), 2), {})))),
    ("aten.instance_norm.default", Entry(_instance_norm, affine=(1, 2), total="eps", cases=(
        Case((S((2, 3, 4, 5)), S((3,), True), S((3,), True), None, None, True, 0.1, 1e-5, False),
             {}),))),
    ("aten.softmax.int", Entry(_softmax, sized=True, rest="softmax", cases=(
        Case((S((2, 3, 4)), -1), {}), Case((S((2, 3, 4)), 1), {})))),
    ("aten.log_softmax.int", Entry(_softmax, sized=True, total="all", cases=(
        Case((S((2, 3, 4)), 1), {}),))),
]  # fmt: skip
