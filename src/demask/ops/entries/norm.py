"""Entries of ops over complete axes: norms, softmax, reductions."""

from __future__ import annotations

from typing import Any

from torch import fx

from demask.ops import schema
from demask.ops.entry import Case, Entry, SizedLine
from demask.ops.entry import Shape as S
from demask.ops.schema import fake


def _rank(node: fx.Node) -> int:
    return len(schema.sizes(fake(schema.operands(node)[0].value)))


def _layer_norm(node: fx.Node) -> str:
    normalized = " ".join(f"!d{k}" for k in range(len(schema.arguments(node)["normalized_shape"])))
    parameter_axes = normalized.replace("!", "")
    return f"... {normalized}, {parameter_axes}, {parameter_axes} -> ... {normalized}"


def _group_norm(node: fx.Node) -> SizedLine:
    space = " ".join(f"!s{k}" for k in range(_rank(node) - 2))
    line = f"n (g !c) {space}, (g c), (g c) -> n (g !c) {space}"
    return SizedLine(line, {"g": schema.arguments(node)["num_groups"]})


def _groups(node: fx.Node, sizes: Any) -> dict[str, Any]:
    """The number of groups for fewer channels: full groups are removed."""
    channels = fake(node.args[0]).shape[1]
    return {"num_groups": sizes[0][1] // (channels // schema.arguments(node)["num_groups"])}


def _instance_norm(node: fx.Node) -> str:
    mark = "!" if schema.arguments(node)["use_input_stats"] else ""
    space = " ".join(f"{mark}s{k}" for k in range(_rank(node) - 2))
    return f"n c {space}, c, c, c, c -> n c {space}"


def _reduced(node: fx.Node) -> str:
    """Reduced axes must be complete; the outputs have no such axes, or axes of size one."""
    rank, call_arguments = _rank(node), schema.arguments(node)
    dims = call_arguments.get("dim")
    dims = list(range(rank)) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    reduced = {dim % max(rank, 1) for dim in dims}
    input_axes = " ".join(f"!a{k}" if k in reduced else f"a{k}" for k in range(rank))
    reduced_axis = "1" if call_arguments.get("keepdim") else ""
    output_axes = " ".join(reduced_axis if k in reduced else f"a{k}" for k in range(rank))
    return f"{input_axes} -> {', '.join([output_axes] * len(schema.outputs(node)))}"


def _along(node: fx.Node) -> str:
    """The axis `dim` must be complete, and remains."""
    rank = _rank(node)
    dim = schema.arguments(node)["dim"] % max(rank, 1)
    axes = " ".join(f"!a{k}" if k == dim else f"a{k}" for k in range(rank))
    return f"{axes} -> {', '.join([axes] * len(schema.outputs(node)))}"


def _largest(node: fx.Node) -> str:
    """As `_along`; the output has other positions along the axis, which are computed together."""
    rank, dim = _rank(node), schema.arguments(node)["dim"]
    input_axes, output_axes = (
        " ".join(name if k == dim % max(rank, 1) else f"a{k}" for k in range(rank)) for name in ("!s", "!k")
    )
    return f"{input_axes} -> {output_axes}, {output_axes}"


_OVER_ONE = [(S((2, 3, 4)), [1]), (S((2, 3, 4)), [-1], True), (S((2, 3, 4, 5)), [2, 3])]
_REDUCED = tuple(Case(args, {}) for args in _OVER_ONE)
_MEANS = {"mean.dim": "mean", "amax.default": "max", "amin.default": "min"}
_SUMS = {"sum.dim_IntList": "sum"}
_WHOLE = ("mean.default", "sum.default")
_X, _BOOL = S((2, 3, 4)), S((2, 3, 4), of="bool")
_POSITIVE = S((2, 3, 4), of="positive")
# Other reductions: name, column `total`, arguments of each case. An index is of the first of equal
# values.
_REDUCTIONS: list[Any] = [
    *(
        (f"{name}.{kind}", "", *cases)
        for name in ("var", "std", "var_mean", "std_mean")
        for kind, cases in (("default", [(_X,)]), ("dim", [(_X, [1]), (_X, [1, 2], False, True)]))
    ),
    ("logsumexp.default", "", (_X, [1], True), (_X, [1, 2])),
    ("prod.default", "", (_POSITIVE,)),
    ("prod.dim_int", "", (_X, 1)),
    ("linalg_vector_norm.default", "", (_X, 2, [1], True), (_X, 3)),
    ("norm.Scalar", "", (_X,)),
    ("norm.ScalarOpt_dim", "", (_X, 2, [1])),
    *((f"{name}.default", "all", (_X,)) for name in ("max", "min", "median", "nanmedian")),
    *((f"{name}.dim", "all", (_X, 1), (_X, 1, True)) for name in ("max", "min", "median", "nanmedian")),
    ("mode.default", "all", (_X, 1)),
    ("kthvalue.default", "all", (_X, 2, 1)),
    ("aminmax.default", "all", (_X,)),
    *((f"arg{name}.default", "all", (_X,), (_X, 1)) for name in ("max", "min")),
    *(
        (f"{name}.{kind}", "all", args)
        for name in ("any", "all")
        for kind, args in (("default", (_BOOL,)), ("dim", (_BOOL, 1)), ("dims", (_BOOL, [1, 2], True)))
    ),
    ("count_nonzero.default", "all", (_X, 1)),
    ("count_nonzero.dim_IntList", "all", (_X, [1])),
    ("nansum.default", "all", (_X, [1])),
]
# Ops along an axis -> column `total`.
_SCANS = {
    "cumsum.default": "all",
    "cumprod.default": "",
    "logcumsumexp.default": "",
    "cummax.default": "all",
    "cummin.default": "all",
    "sort.default": "all",
}
_STABLE = {"sort": "run", "argsort": "none"}
_SPREAD = (_REDUCED[0], Case((S((2, 3, 4, 5)), [2, 3]), {"correction": 0, "keepdim": True}))
ENTRIES = [
    *((f"aten.{n}", Entry(_reduced, rest=k, cases=_REDUCED)) for n, k in _MEANS.items()),
    *((f"aten.{n}", Entry(_reduced, sized=True, rest=k, cases=_REDUCED))
      for n, k in _SUMS.items()),
    *((f"aten.{n}", Entry(_reduced, sized=True, cases=(Case((S((2, 3)),), {}),))) for n in _WHOLE),
    *((f"aten.{n}.correction", Entry(_reduced, sized=True, cases=_SPREAD))
      for n in ("var", "std", "var_mean", "std_mean")),
    *((f"aten.{name}", Entry(_reduced, sized=True, total=total, cases=tuple(
        Case(args, {}) for args in arguments))) for name, total, *arguments in _REDUCTIONS),
    *((f"aten.{name}", Entry(_along, sized=True, total=total, cases=(Case((_X, 1), {}),)))
      for name, total in _SCANS.items()),
    ("aten.argsort.default", Entry(_along, fill="none", total="all", cases=(Case((_X, 1), {}),))),
    *((f"aten.{name}.stable", Entry(_along, fill=fill, sized=True, total="all", cases=(
        Case((_X,), {"stable": True, "dim": 1}),))) for name, fill in _STABLE.items()),
    ("aten.topk.default", Entry(_largest, sized=True, total="all", cases=(
        Case((_X, 2, 1), {}),))),
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
    ("aten.softmax.int", Entry(_along, sized=True, rest="softmax", cases=(
        Case((S((2, 3, 4)), -1), {}), Case((S((2, 3, 4)), 1), {})))),
    ("aten.log_softmax.int", Entry(_along, sized=True, total="all", cases=(
        Case((S((2, 3, 4)), 1), {}),))),
]  # fmt: skip
