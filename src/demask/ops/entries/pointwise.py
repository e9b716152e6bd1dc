"""Entries of ops that compute each position alone, including batch norm in eval mode."""

from __future__ import annotations

from math import inf
from typing import Any

from torch import fx

from demask.ops import schema
from demask.ops.entry import Case, Declined, Entry
from demask.ops.entry import Shape as S
from demask.ops.schema import fake

_UNARY = """relu relu6 sigmoid silu tanh hardswish hardsigmoid hardtanh leaky_relu elu selu
    celu softplus mish exp expm1 abs neg sin cos atan sinh erf erfc floor ceil
    round trunc sign square softshrink hardshrink log_sigmoid gelu logical_not isnan isinf isfinite
    frac signbit sinc special_i0
    nan_to_num alias detach clone contiguous lift_fresh lift_fresh_copy zeros_like ones_like"""
# How bounds follow (column `range`); least values are rounded down.
_RANGES: dict[str, Any] = {
    **dict.fromkeys(
        """relu relu6 hardtanh leaky_relu abs neg floor ceil round trunc sign square
        softshrink hardshrink reciprocal add.Scalar sub.Scalar rsub.Scalar mul.Scalar div.Scalar
        clamp.default clamp_min.default clamp_max.default maximum.default minimum.default
        to.dtype to.dtype_layout to.device _to_copy.default""".split(),
        "ends",
    ),
    **dict.fromkeys(
        """sigmoid tanh hardsigmoid elu selu celu softplus exp expm1 atan sinh erf erfc
        log_sigmoid log log1p log2 log10 rsqrt logit pow.Tensor_Scalar""".split(),
        "about",
    ),
    **dict.fromkeys("alias detach clone contiguous lift_fresh lift_fresh_copy".split(), "hull"),
    "silu": -0.2785,
    "mish": -0.3089,
    "hardswish": -0.3751,
    "gelu": -0.1701,
    "sin": (-1.0, 1.0),
    "cos": (-1.0, 1.0),
    "zeros_like": (0.0, 0.0),
    "ones_like": (1.0, 1.0),
    "sqrt": (0.0, inf),
}
# Ops that may overflow or be NaN for values that the original network does not compute (column
# `total`).
_PARTIAL = {"exp", "expm1", "sinh", "square", "pow.Tensor_Scalar", "float_power.Tensor_Scalar", "special_i0"}
_POSITIVE = "log log1p log2 log10 sqrt rsqrt reciprocal logit erfinv lgamma digamma special_entr"
_SCALAR = {
    "add.Scalar": 1.5,
    "sub.Scalar": 1.5,
    "rsub.Scalar": 1.5,
    "mul.Scalar": 1.5,
    "div.Scalar": 1.5,
    "pow.Tensor_Scalar": 2,
    "eq.Scalar": 0,
    "ne.Scalar": 0,
    "gt.Scalar": 0,
    "ge.Scalar": 0,
    "lt.Scalar": 0,
    "le.Scalar": 0,
    "remainder.Scalar": 1.5,
    "fmod.Scalar": 1.5,
    "clamp.default": 0,
    "float_power.Tensor_Scalar": 2,
    "clamp_min.default": 0,
    "clamp_max.default": 0,
    "fill.Scalar": 1.5,
}
_BINARY = """rsub.Tensor maximum.default minimum.default atan2.default
    fmax.default fmin.default copysign.Tensor logaddexp.default logaddexp2.default
    eq.Tensor ne.Tensor gt.Tensor ge.Tensor lt.Tensor le.Tensor logical_or.default"""
_PAIR = (Case((S((2, 3, 4)), S((2, 3, 4))), {}), Case((S((2, 3, 4, 5)), S((3, 1, 1))), {}))


def _unary() -> list[tuple[str, Entry]]:
    free = {"zeros_like", "ones_like", "fill.Scalar"}
    plain = [
        (
            f"aten.{n}.default",
            Entry(
                "... -> ...",
                free=n in free,
                total=_total_of_unary(n),
                range=_RANGES.get(n, ""),
                cases=(Case((S((2, 3, 4)),), {}),),
            ),
        )
        for n in _UNARY.split()
    ]
    positive = [
        (
            f"aten.{n}.default",
            Entry("... -> ...", range=_RANGES.get(n, ""), cases=(Case((S((2, 3), of="positive"),), {}),)),
        )
        for n in _POSITIVE.split()
    ]
    scalar = [
        (
            f"aten.{n}",
            Entry(
                "... -> ...",
                free=n in free,
                total=_total_of_unary(n),
                range=_RANGES.get(n, ""),
                cases=(Case((S((2, 3, 4)), value), {}),),
            ),
        )
        for n, value in _SCALAR.items()
    ]
    return plain + positive + scalar


def _total_of_unary(name: str) -> str:
    return "" if name in _PARTIAL else "all"


def _binary() -> list[tuple[str, Entry]]:
    plain = [
        (f"aten.{n}", Entry("..., ... -> ...", total="all", range=_RANGES.get(n, ""), cases=_PAIR))
        for n in _BINARY.split()
    ]
    positive = (Case((S((2, 3, 4)), S((2, 3, 4), of="positive")), {}),)
    modes = (Case((*positive[0].args,), {"rounding_mode": "floor"}),)
    return [
        *plain,
        ("aten.add.Tensor", Entry("..., ... -> ...", neutral=(0, (0, 1)), total="all", range="ends", cases=_PAIR)),
        ("aten.sub.Tensor", Entry("..., ... -> ...", neutral=(0, (1,)), total="all", range="ends", cases=_PAIR)),
        (
            "aten.mul.Tensor",
            Entry("..., ... -> ...", zero="any", neutral=(1, (0, 1)), total="one", range="ends", cases=_PAIR),
        ),
        ("aten.logical_and.default", Entry("..., ... -> ...", zero="any", total="all", cases=_PAIR)),
        (
            "aten.div.Tensor",
            Entry("..., ... -> ...", zero="first", neutral=(1, (1,)), total="first", range="ends", cases=positive),
        ),
        ("aten.div.Tensor_mode", Entry("..., ... -> ...", zero="first", total="first", range="ends", cases=modes)),
        ("aten.pow.Tensor_Tensor", Entry("..., ... -> ...", cases=(Case((S((2, 3), of="positive"), S((2, 3))), {}),))),
        ("aten.pow.Scalar", Entry("... -> ...", cases=(Case((2.0, S((2, 3, 4))), {}),))),
        (
            "aten.bitwise_and.Tensor",
            Entry(
                "..., ... -> ...",
                zero="any",
                total="all",
                cases=(Case((S((2, 3), of="bool"), S((2, 3), of="bool")), {}),),
            ),
        ),
        (
            "aten.bitwise_or.Tensor",
            Entry("..., ... -> ...", total="all", cases=(Case((S((2, 3), of="bool"), S((2, 3), of="bool")), {}),)),
        ),
        ("aten.bitwise_not.default", Entry("... -> ...", total="all", cases=(Case((S((2, 3), of="bool"),), {}),))),
        *_ternary(),
    ]


def _ternary() -> list[tuple[str, Entry]]:
    return [
        ("aten.addcmul.default", Entry("..., ..., ... -> ...", total="one", cases=(
            Case((S((2, 3)), S((2, 3)), S((2, 3))), {}),
            Case((S((3,), True), S((2, 3)), S((3,), True)), {})))),
        *((f"aten.clamp_{name}.Tensor", Entry("..., ... -> ...", total="all", range="ends", cases=(
            Case((S((2, 3)), S((2, 3))), {}),))) for name in ("min", "max")),
        ("aten.threshold.default", Entry("... -> ...", total="all", cases=(
            Case((S((2, 3)), 0.1, 20.0), {}),))),
        ("aten.lerp.Scalar", Entry("..., ... -> ...", total="all", cases=(
            Case((S((2, 3)), S((2, 3)), 0.3), {}),))),
        ("aten.lerp.Tensor", Entry("..., ..., ... -> ...", total="all", cases=(
            Case((S((2, 3)), S((2, 3)), S((3,))), {}),))),
        ("aten.where.self", Entry("..., ..., ... -> ...", total="all", range="ends", cases=(
            Case((S((2, 3), of="bool"), S((2, 3)), S((2, 3))), {}),))),
        *((f"aten.where.{kind}", Entry(
            "..., ... -> ..." if kind != "Scalar" else "... -> ...", total="all", cases=(
                Case((S((2, 3), of="bool"), *values), {}),)))
          for kind, values in (("ScalarOther", (S((2, 3)), 0.5)), ("Scalar", (0.5, 2.0)),
                               ("ScalarSelf", (0.5, S((2, 3)))))),
        ("aten.masked_fill.Scalar", Entry("..., ... -> ...", total="all", range="ends", cases=(
            Case((S((2, 3)), S((2, 3), of="bool"), 0.5), {}),))),
        ("aten.masked_fill.Tensor", Entry("..., ..., ... -> ...", total="all", range="ends", cases=(
            Case((S((2, 3)), S((2, 3), of="bool"), S((), True)), {}),))),
    ]  # fmt: skip


def _cast() -> list[tuple[str, Entry]]:
    import torch

    x, single = S((2, 3)), {"dtype": torch.float32}
    cases = {
        "to.dtype": Case((x, torch.float32), {}),
        "to.dtype_layout": Case((x,), single),
        "to.device": Case((x, torch.device("cpu"), torch.float32), {}),
        "_to_copy.default": Case((x,), single),
    }
    return [(f"aten.{name}", Entry("... -> ...", range=_RANGES[name], cases=(case,))) for name, case in cases.items()]


def _full(node: fx.Node) -> str:
    return "-> " + " ".join(f"a{k}" for k in range(len(schema.sizes(schema.outputs(node)[0]))))


def _full_from(node: fx.Node) -> str:
    rank = len(schema.sizes(fake(schema.operands(node)[0].value)))
    return " ".join(f"!b{k}" for k in range(rank)) + " " + _full(node)


def _size(node: fx.Node, sizes: Any) -> dict[str, Any]:
    return {"size": sizes[0]}


def _created() -> list[tuple[str, Entry]]:
    constants: list[tuple[str, tuple[float, ...]]] = [("zeros", ()), ("ones", ()), ("full", (1.5,))]
    of_sizes = [
        (f"aten.{n}.default", Entry(_full, free=True, args=_size, cases=(Case(([4, 5], *v), {}),)))
        for n, v in constants
    ]
    new = [
        (f"aten.new_{n}.default", Entry(_full_from, free=True, args=_size, cases=(Case((S((2, 3)), [4, 5], *v), {}),)))
        for n, v in constants
    ]
    like = [("aten.full_like.default", Entry("... -> ...", free=True, cases=(Case((S((2, 3)), 1.5), {}),)))]
    return of_sizes + new + like


def _batch_norm(node: fx.Node) -> str | Declined:
    if schema.arguments(node)["training"]:
        return Declined("batch norm that uses the statistics of its batch")
    return "n c ..., c, c, c, c -> n c ..."


def _prelu(node: fx.Node) -> str:
    rank = len(schema.sizes(fake(schema.operands(node)[0].value)))
    return "n c ..., c -> n c ..." if rank > 1 else "..., ... -> ..."


_CHANNELS = (S((3,), True), S((3,), True), S((3,), True), S((3,), True, "positive"))
ENTRIES = [
    *_unary(),
    *_binary(),
    *_cast(),
    *_created(),
    ("aten.batch_norm.default", Entry(_batch_norm, affine=(1, 2), total="first", cases=(
        Case((S((2, 3, 4, 5)), *_CHANNELS, False, 0.1, 1e-5, False), {}),
        Case((S((2, 3)), None, None, *_CHANNELS[2:], False, 0.1, 1e-5, False), {})))),
    ("aten.dropout.default", Entry("... -> ...", total="all", range="hull", cases=(
        Case((S((2, 3)), 0.5, False), {}),))),
    *((f"aten.{name}.default", Entry("... -> ...", total="all", range="hull", cases=(
        Case((S((2, 3, 4, 4)), 0.5, False), {}),)))
      for name in ("feature_dropout", "alpha_dropout", "feature_alpha_dropout")),
    ("aten.prelu.default", Entry(_prelu, total="first", cases=(
        Case((S((2, 3, 4)), S((3,), True)), {}),))),
]  # fmt: skip
