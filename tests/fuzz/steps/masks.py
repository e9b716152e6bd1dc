"""Statements that mask a layer, in every way people do it."""

from __future__ import annotations

import random

KINDS = (
    "rows rows rows columns columns both both dead pruned pruned removed parametrized "
    "weight_norm old_weight_norm scattered none none none none"
).split()


def some(rng: random.Random, size: int) -> list[int]:
    """Positions to mask: some, nearly all, rarely none or all."""
    amount = rng.choice(["some"] * 6 + ["nearly"] * 2 + ["none", "all"])
    count = {"none": 0, "all": size, "nearly": size - 1}.get(amount)
    if count is None:
        count = rng.randint(1, max(1, size - 1)) if size > 1 else 0
    return sorted(rng.sample(range(size), count))


def mask_layer(rng: random.Random, m: str, out: tuple[int, int], into: tuple[int, int], bias: bool) -> list[str]:
    """Masks for layer `m`, over the axes of its weight that outputs and inputs lie on."""
    kind = rng.choice(KINDS)
    (o, rows), (i, columns) = (out[0], some(rng, out[1])), (into[0], some(rng, into[1]))
    row, column = [_zero(m, axis, gone) for axis, gone in ((o, rows), (i, columns))]
    # Where the output axis of a weight is per group, the bias is longer than the rows.
    biased = bias and rng.random() < 0.5 and o == 0
    zero_bias = [f"{m}.bias.data[{rows}] = 0"] if biased else []
    lines = {
        "none": [],
        "rows": [row, *zero_bias],
        "columns": [column],
        "both": [row, column, *zero_bias],
        "dead": [f"{m}.weight.data.zero_()", *([f"{m}.bias.data.zero_()"] if biased else [])]
        if rng.random() < 0.4
        else [row, *zero_bias],
        "scattered": [f"{m}.weight.data.mul_(torch.rand_like({m}.weight) > 0.6)"],
        "parametrized": [
            f'parametrize.register_parametrization({m}, "weight", Masked(ones_but({m}.weight, {o}, {rows})))'
        ],
        "weight_norm": [
            f"parametrizations.weight_norm({m})",
            f"{m}.parametrizations.weight.original0.data[{rows if o == 0 else columns}] = 0",
        ],
        "old_weight_norm": [f"nn.utils.weight_norm({m})", f"{m}.weight_g.data[{rows if o == 0 else columns}] = 0"],
    }
    if kind in ("pruned", "removed"):
        return _pruned(m, o, rows, i, columns, biased, kind == "removed")
    return lines[kind]


def _zero(m: str, axis: int, gone: list[int]) -> str:
    return f"{m}.weight.data[{gone}] = 0" if axis == 0 else f"{m}.weight.data[:, {gone}] = 0"


def _pruned(m: str, o: int, rows: list, i: int, columns: list, biased: bool, removed: bool) -> list[str]:
    mask = f"ones_but({m}.weight, {o}, {rows}) * ones_but({m}.weight, {i}, {columns})"
    lines = [f'prune.custom_from_mask({m}, "weight", {mask})']
    lines += [f'prune.remove({m}, "weight")'] if removed else []
    lines += [f'prune.custom_from_mask({m}, "bias", ones_but({m}.bias, 0, {rows}))'] if biased else []
    return lines


def mask_scale(rng: random.Random, m: str, size: int) -> list[str]:
    """Zero scales of a norm, shift kept or zero; its statistics and weights are random."""
    lines = [f"nn.init.normal_({m}.weight, 1, 0.3)", f"nn.init.normal_({m}.bias, 0, 0.5)"]
    if rng.random() < 0.6:
        gone = some(rng, size)
        lines += [f"{m}.weight.data[{gone}] = 0"]
        lines += [f"{m}.bias.data[{gone}] = 0"] if rng.random() < 0.4 else []
    return lines


def statistics(m: str) -> list[str]:
    return [f"{m}.running_mean.normal_(0, 0.4)", f"{m}.running_var.uniform_(0.4, 2)"]
