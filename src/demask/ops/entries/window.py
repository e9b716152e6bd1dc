"""Entries of pooling and resizing: windows slide along axes, in each channel separately."""

from __future__ import annotations

from torch import fx

from demask.ops import schema
from demask.ops.entry import Case, Entry
from demask.ops.entry import Shape as S

_AXES = {1: "~s0", 2: "~s0 ~s1", 3: "~s0 ~s1 ~s2"}
_TAILS = {1: (8,), 2: (6, 8), 3: (4, 4, 6)}


def _counts_padding(node: fx.Node) -> bool:
    call_arguments = schema.arguments(node)
    return bool(call_arguments["count_include_pad"]) and any(pad != 0 for pad in call_arguments["padding"])


def _line(d: int) -> str:
    return f"... {_AXES[d]} -> ... {_AXES[d]}"


def _pools(d: int) -> list[tuple[str, Entry]]:
    x, two, three, one = S((2, 3, *_TAILS[d])), [2] * d, [3] * d, [1] * d
    pooled = (Case((x, two), {}), Case((x, three, two, one), {}))
    ceil = Case((x, three, two, one, one, True), {}) if d > 1 else Case((x, three, two, one), {})
    out = [3, 4, 2][:d]
    return [
        (f"aten.max_pool{d}d.default", Entry(
            _line(d), fill="same", region="conv", range="hull", cases=(*pooled, ceil))),
        (f"aten.avg_pool{d}d.default", Entry(
            _line(d), fill="same", pads=_counts_padding, region="conv", range="sign", cases=(
                *pooled, Case((x, three, two, one, False, False), {})))),
        (f"aten.adaptive_avg_pool{d}d.default", Entry(
            _line(d), fill="same", region="adaptive", range="sign", cases=(
                Case((x, [1] * d), {}), Case((x, out), {})))),
        (f"aten.adaptive_max_pool{d}d.default", Entry(
            f"{_line(d)}, ... {_AXES[d]}", fill="same", region="adaptive", range="hull", cases=(
                Case((x, out), {}),))),
    ]  # fmt: skip


def _resizes() -> list[tuple[str, Entry]]:
    kinds = [
        *(("upsample_nearest", d, "nearest") for d in (1, 2, 3)),
        *(("_upsample_nearest_exact", d, "exact") for d in (1, 2, 3)),
        ("upsample_linear", 1, "linear"),
        ("upsample_bilinear", 2, "linear"),
        ("upsample_trilinear", 3, "linear"),
        ("upsample_bicubic", 2, "cubic"),
    ]
    entries = []
    for name, d, region in kinds:
        align = (False,) if region in ("linear", "cubic") else ()
        sized = Case((S((2, 3, *_TAILS[d])), [9, 7, 5][:d], *align, None), {})
        scaled = Case((S((2, 3, *_TAILS[d])), None, *align, [2.0] * d), {})
        third = Case((S((2, 3, *_TAILS[d])), None, *align, [3.0, 0.7, 1.5][:d]), {})
        corner = (Case((S((2, 3, *_TAILS[d])), None, True, [2.0] * d), {}),) if align else ()
        bounds = {"linear": "sign", "cubic": ""}.get(region, "hull")
        entry = Entry(_line(d), fill="same", region=region, range=bounds, cases=(sized, scaled, third, *corner))
        entries.append((f"aten.{name}{d}d.vec", entry))
    return entries


ENTRIES = [*_pools(1), *_pools(2), *_pools(3), *_resizes()]
