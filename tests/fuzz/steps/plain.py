"""Steps without weights: each function draws one on a value, or declines with None."""

from __future__ import annotations

from fuzz.draft import Draft
from fuzz.steps.masks import some

ACTS = (
    "torch.relu({0})",
    "F.relu6({0})",
    "F.gelu({0})",
    "torch.sigmoid({0})",
    "torch.tanh({0})",
    "F.hardswish({0})",
    "F.silu({0})",
    "F.softplus({0})",
    "F.leaky_relu({0}, 0.1)",
    "F.elu({0})",
    "{0}.abs()",
    "torch.exp(-{0}.abs())",
    "{0}.clamp(-0.5, 0.8)",
    "{0} * 0.7",
    "{0} + 0.3",
    "1 - {0}",
    "{0} ** 2",
    "-{0}",
    "torch.where({0} > 0, {0}, 0.2 * {0})",
    "{0}.masked_fill({0} < -0.3, 0.1)",
    "{0} / ({0}.abs() + 1)",
    "F.hardsigmoid({0})",
    "F.mish({0})",
    "F.selu({0})",
    "F.softsign({0})",
    "F.dropout({0}, 0.4, False)",
)


def act(d: Draft, x: str) -> str | None:
    v = d.new()
    return d.add("act", [x], f"{v} = " + d.rng.choice(ACTS).format(x))


def join(d: Draft, x: str) -> str | None:
    """Two branches of one shape, or a per-channel one broadcast over the other."""
    full = d.shape(x)
    fits = [y for y in d.floats() if y != x and d.shape(y) == full]
    wide = [
        y
        for y in d.floats()
        if len(d.shape(y)) == len(full)
        and y not in fits
        and y != x
        and all(a in (1, b) for a, b in zip(d.shape(y), full, strict=True))
    ]
    if not fits + wide:
        return None
    v, y = d.new(), d.rng.choice(fits or wide)
    form = d.rng.choice(
        ["{0} + {1}"] * 5
        + [
            "{0} - {1}",
            "{1} - {0}",
            "{0} * {1}",
            "{0} * {1}",
            "torch.maximum({0}, {1})",
            "torch.add({0}, {1}, alpha=0.7)",
        ]
    )
    return d.add("join", [x, y], f"{v} = {form.format(x, y)}")


def cat(d: Draft, x: str) -> str | None:
    full = d.shape(x)
    fits = [y for y in d.floats() if len(d.shape(y)) == len(full) and d.shape(y)[2:] == full[2:]]
    v, y = d.new(), d.rng.choice(fits)
    parts = [x, y] if d.rng.random() < 0.5 else [y, x]
    return d.add("cat", [x, y], f"{v} = torch.cat([{', '.join(parts)}], 1)")


def split(d: Draft, x: str) -> str | None:
    c, r, v = d.shape(x)[1], d.rng, d.new()
    if c < 3:
        return None
    w = d.new()
    at = r.randint(1, c - 1)
    form = r.choice(
        (f"torch.split({x}, [{at}, {c - at}], 1)", f"torch.chunk({x}, 2, 1)", f"torch.tensor_split({x}, 2, 1)")
    )
    return d.add("split", [x], f"{v}, {w} = {form}", outs=(v, w))


def take(d: Draft, x: str) -> str | None:
    """slice, select, index_select, flip, roll."""
    shape, r, v = d.shape(x), d.rng, d.new()
    axis = 1 if r.random() < 0.6 else r.randint(1, len(shape) - 1)
    n, pre = shape[axis], ":, " * axis
    start, step = r.randint(0, max(0, n // 2)), r.choice((1, 1, 2))
    picked = [r.randrange(n) for _ in range(r.randint(1, n))]
    forms = [
        f"{x}[{pre}{start}::{step}]",
        f"{x}[{pre}:{max(1, n - 1)}]",
        f"{x}.flip({axis})",
        f"{x}.roll({r.randint(1, 4)}, {axis})",
        f"{x}.index_select({axis}, self.i{v[1:]})",
        f"{x}.narrow({axis}, {start}, {n - start})",
    ]
    forms += [f"{x}.select({axis}, {r.randrange(n)})"] if len(shape) > 2 else []
    form = r.choice(forms)
    init = [f'self.register_buffer("i{v[1:]}", torch.tensor({picked}))'] if "self.i" in form else []
    return d.add("take", [x], f"{v} = {form}", init)


def pad(d: Draft, x: str) -> str | None:
    shape, r, v = d.shape(x), d.rng, d.new()
    n, mode = len(shape) - 2, r.choice(("constant", "constant", "reflect", "replicate", "circular"))
    if mode == "constant":
        ends = [r.randint(0, 2) for _ in range(2 * (n + (1 if r.random() < 0.4 else 0)))]
        return d.add("pad", [x], f"{v} = F.pad({x}, {ends}, value={r.choice((0.0, 0.0, 0.7))})")
    ends = [r.randint(0, 1) for _ in range(2 * n)]
    return d.add("pad", [x], f"{v} = F.pad({x}, {ends}, mode='{mode}')")


def pool(d: Draft, x: str) -> str | None:
    n, r, v = len(d.shape(x)) - 2, d.rng, d.new()
    if n not in (1, 2, 3):
        return None
    kernel = r.randint(2, 3)
    common = f"{kernel}, stride={r.randint(1, 2)}, padding={r.randint(0, 1)}"
    common += f", ceil_mode={r.random() < 0.3}"
    out = tuple(r.randint(1, 3) for _ in range(n))
    form = r.choice(
        (
            f"F.max_pool{n}d({x}, {common})",
            f"F.avg_pool{n}d({x}, {common}, count_include_pad={r.random() < 0.5})",
            f"F.adaptive_avg_pool{n}d({x}, {out})",
            f"F.adaptive_max_pool{n}d({x}, {out})",
        )
    )
    return d.add("pool", [x], f"{v} = {form}")


def upsample(d: Draft, x: str) -> str | None:
    n, r, v = len(d.shape(x)) - 2, d.rng, d.new()
    if n not in (1, 2, 3):
        return None
    smooth = {1: "linear", 2: "bilinear", 3: "trilinear"}[n]
    form = r.choice(("mode='nearest'", f"mode='{smooth}'", f"mode='{smooth}', align_corners=True"))
    return d.add("upsample", [x], f"{v} = F.interpolate({x}, scale_factor=2, {form})")


def shuffle(d: Draft, x: str) -> str | None:
    """Pixel shuffle and unshuffle, channel shuffle by views."""
    shape, r, v = d.shape(x), d.rng, d.new()
    if len(shape) < 3:
        return None
    c, rest = shape[1], ", ".join(f"{x}.shape[{k}]" for k in range(2, len(shape)))
    batch = f"{x}.shape[0]"
    forms = [
        f"{x}.view({batch}, {g}, {c // g}, {rest}).transpose(1, 2).reshape({batch}, {c}, {rest})"
        for g in range(2, c)
        if c % g == 0
    ]
    forms += [f"F.pixel_shuffle({x}, 2)"] * 3 if len(shape) == 4 and c % 4 == 0 else []
    even = len(shape) == 4 and shape[2] % 2 == 0 and shape[3] % 2 == 0
    forms += [f"F.pixel_unshuffle({x}, 2)"] * 3 if even else []
    return d.add("shuffle", [x], f"{v} = {r.choice(forms)}") if forms else None


def reshape(d: Draft, x: str) -> str | None:
    shape, r, v = d.shape(x), d.rng, d.new()
    last, rank = shape[-1], len(shape)
    axes = list(range(1, rank))
    r.shuffle(axes)
    forms = [f"{x}.permute(0, {', '.join(map(str, axes))})", f"{x}.flatten(1)"]
    forms += [f"{x}.transpose(1, {rank - 1})"] if rank > 2 else []
    forms += [f"{x}.flatten({rank - 2})"] * 2 if rank > 3 else []
    forms += [f"{x}.unsqueeze({r.randint(1, rank)})"] if rank < 5 else []
    forms += [f"{x}.unflatten({rank - 1}, ({g}, {last // g}))" for g in range(2, last) if last % g == 0 and rank < 5]
    forms += [f"{x}.reshape({x}.shape[0], {last}, -1)"] if rank > 2 else []
    ones = [k for k in range(1, rank) if shape[k] == 1]
    if ones:
        sizes = [r.randint(2, 5) if k == ones[0] else -1 for k in range(rank)]
        forms += [f"{x}.expand({', '.join(map(str, sizes))})"] * 2
        forms += [f"{x}.squeeze({ones[0]})"] if rank > 2 else []
    return d.add("reshape", [x], f"{v} = {r.choice(forms)}")


def flatten_linear(d: Draft, x: str) -> str | None:
    from fuzz.steps.layers import linear

    if len(d.shape(x)) < 3:
        return None
    v = d.new()
    flat = d.add("reshape", [x], f"{v} = {x}.flatten(1)")
    return linear(d, flat) if flat else None


def reduce(d: Draft, x: str) -> str | None:
    shape, r, v = d.shape(x), d.rng, d.new()
    rank, name = len(shape), r.choice(("mean", "sum", "amax", "mean", "amin"))
    keep = r.random() < 0.5
    if rank == 2 and not keep:
        return None
    count = r.randint(1, max(1, rank - 2))
    axes = tuple(sorted(r.sample(range(1, rank), count)))
    return d.add("reduce", [x], f"{v} = {x}.{name}({axes}, keepdim={keep})")


def normalise(d: Draft, x: str) -> str | None:
    shape, r, v = d.shape(x), d.rng, d.new()
    axis = 1 if r.random() < 0.5 else len(shape) - 1
    if shape[axis] == 1:  # the softmax of one value is a constant
        return None
    form = r.choice(
        (
            "torch.softmax({0}, {1})",
            "torch.softmax({0}, {1})",
            "F.glu({0}, {1})",
            "torch.log_softmax({0}, {1})",
            "F.normalize({0}, dim={1})",
            "{0}.cumsum({1})",
        )
    )
    return d.add("normalise", [x], f"{v} = {form.format(x, axis)}")


def matmul(d: Draft, x: str) -> str | None:
    shape, r, v = d.shape(x), d.rng, d.new()
    if len(shape) not in (3, 4):
        return None
    swap = f"{len(shape) - 2}, {len(shape) - 1}"
    fits = [y for y in d.floats() if d.shape(y) == shape]
    y = r.choice(fits)
    forms = [f"{x} @ {y}.transpose({swap})", f"{x}.transpose({swap}) @ {y}"]
    forms += (
        [f"torch.bmm({x}, {y}.transpose(1, 2))", f"torch.einsum('bij,bkj->bik', {x}, {y})"] if len(shape) == 3 else []
    )
    scale = f" * {round(1 / (shape[-1] + 1), 3)}"
    return d.add("matmul", [x, y], f"{v} = {r.choice(forms)}{scale}")


def in_place(d: Draft, x: str) -> str | None:
    """A write into a value that others may have read, or will."""
    shape, r, v = d.shape(x), d.rng, d.new()
    if not d.owned(x):
        return None
    c = shape[1]
    at, gone = r.randrange(c), some(r, c)
    forms = [
        [f"{v} = F.relu({x}, inplace=True)"],
        [f"{x}[:, {at}] = 0", f"{v} = {x} * 1.5"],
        [f"{x}[:, {at}:] *= 0.5", f"{v} = {x}"],
        [f"{v} = {x}.clone()", f"{v}[:, {gone}] = 0.25"],
        [f"{x}.mul_(0.8)", f"{v} = {x} + 0.1"],
        [f"{v} = torch.zeros_like({x})", f"{v}[:, :{at + 1}] = {x}[:, :{at + 1}]"],
    ]
    fits = [y for y in d.floats() if y != x and d.shape(y) == shape]
    if fits:
        y = r.choice(fits)
        return d.add("inplace", [x, y], [f"{x} += {y}", f"{v} = {x}"])
    return d.add("inplace", [x], r.choice(forms))


def dead_branch(d: Draft, x: str) -> str | None:
    """A branch whose every path is zero."""
    shape, v = d.shape(x), d.new()
    m, size = f"self.m{v[1:]}", shape[-1]
    init = [f"{m} = nn.Linear({size}, {size}, bias=False)", f"{m}.weight.data.zero_()"]
    return d.add("dead_branch", [x], f"{v} = {x} + torch.tanh({m}({x})) * 2", init)


PLAIN = {
    act: 14, join: 9, cat: 5, split: 3, take: 5, pad: 3, pool: 4, upsample: 2, shuffle: 3,
    reshape: 6, flatten_linear: 3, reduce: 3, normalise: 2, matmul: 2, in_place: 4, dead_branch: 1,
}  # fmt: skip
