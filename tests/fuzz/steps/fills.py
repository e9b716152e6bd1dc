"""Steps for networks in which zeros of masks meet quotients, roots, logarithms and indices."""

from __future__ import annotations

from fuzz.draft import Draft
from fuzz.steps.layers import linear
from fuzz.steps.plain import act, cat, join, matmul, normalise, reduce, reshape, take


def gate(d: Draft, x: str) -> str | None:
    """A mask over some axes of a value, and at times constants where it is off."""
    shape, r, v = d.shape(x), d.rng, d.new()
    factor, lines = _mask(d, v, shape)
    body = f"{v} = {x} * {factor}"
    if r.random() < 0.5:
        sizes = [1, *(n if r.random() < 0.4 else 1 for n in shape[1:])]
        lines += [f'self.register_buffer("f{v[1:]}", torch.randn({sizes}))']
        hidden = r.random() < 0.4
        body += f" + self.f{v[1:]}" + (f" * ({factor} == 0)" if hidden else "")
    return d.add("gate", [x], body, lines)


def _mask(d: Draft, v: str, shape: tuple[int, ...]) -> tuple[str, list[str]]:
    """Factors over one axis, over some, or over each of some alone."""
    r, name = d.rng, f"self.g{v[1:]}"
    axes = r.sample(range(1, len(shape)), r.randint(1, len(shape) - 1))
    sizes = [n if k in axes else 1 for k, n in enumerate(shape)]
    if r.random() < 0.4:
        lines = [f'self.register_buffer("g{v[1:]}", torch.rand({sizes}))']
        for k in axes:
            gone = sorted(r.sample(range(shape[k]), r.randint(0, shape[k] - 1)))
            lines.append(f"{name}.index_fill_({k}, torch.tensor({gone}, dtype=torch.long), 0.0)")
        return name, lines
    share = r.choice((0.2, 0.5, 0.8, 0.9))
    mask = f"(torch.rand({sizes}) < {share}) * torch.rand({sizes})"
    return name, [f'self.register_buffer("g{v[1:]}", {mask})']


# {0}: the value, {1}: another one that broadcasts over it, {2}: an axis. Finite for all of them.
_PARTIAL = (
    "{0} / (1 + {1} * {1})",
    "{0} / (1 + {1}.abs())",
    "{0} * (1 + {1} * {1}).rsqrt()",
    "{0} / (0.5 + {1}.abs()).sqrt()",
    "{0} * (1.5 + {1}.abs()).log()",
    "{0} * (1 + {1}.abs()).reciprocal()",
    "{0} * (1 + {1} * {1}) ** -0.75",
    "({0} - {0}.amax({2}, keepdim=True)).exp()",
    "({0} - {0}.amax({2}, keepdim=True)).exp() / (1 + {1} * {1})",
    "torch.acos(torch.tanh({0}) / (1 + {1}.abs()))",
    "torch.atan2({0}, 1 + {1}.abs())",
    "torch.remainder({0}, 1 + {1}.abs())",
    "torch.fmod({0}, 1 + {1} * {1})",
    "torch.xlogy({0}, 1 + {1} * {1})",
    "torch.logit(0.1 + 0.8 * torch.sigmoid({0}) / (1 + {1} * {1}))",
    "{0} / (1 + {0}.abs().amax({2}, keepdim=True))",
    "{0} / {0}.exp().sum({2}, keepdim=True)",
    "F.layer_norm({0} + torch.linspace(0, 9, {0}.shape[-1]), {0}.shape[-1:], eps=0.0) / (1 + {1} * {1})",
    "((7 * {0}).long() // (1 + {1}.abs().long())).double()",
    "((7 * {0}).long() % (1 + {1}.abs().long())).double()",
    "torch.arange(1.0, 9.0)[(4 / (1 + {1}.abs())).long()] * {0}",
    "F.embedding((6 / (1 + {1} * {1})).long(), torch.eye(7, 3)).sum(-1) * {0}",
    "{0} / (1 + F.avg_pool1d(({0} * {0}).flatten(1, -2), 3, 1, 1).view_as({0}))",
    "{0} / (1 + {0}.cumsum({2}) ** 2)",
    "{0} / (1 + {0}.var({2}, keepdim=True))",
)


def partial(d: Draft, x: str) -> str | None:
    """A call that is no finite number for some of what it may be called on."""
    full, r, v = d.shape(x), d.rng, d.new()
    fits = [
        y
        for y in d.floats()
        if len(d.shape(y)) == len(full) and all(a in (1, b) for a, b in zip(d.shape(y), full, strict=True))
    ]
    y = r.choice(fits)
    form = r.choice(_PARTIAL).format(x, y, r.randrange(1, len(full)))
    if r.random() < 0.3:
        return d.add("partial", [x, y], f"{v} = {form}")
    # What is read of it is another part than what is known of its operands.
    factor, lines = _mask(d, v, full)
    return d.add("partial", [x, y], f"{v} = {form} * {factor}", lines)


def response(d: Draft, x: str) -> str | None:
    v = d.new()
    return d.add("response", [x], f"{v} = F.local_response_norm({x}, {d.rng.randint(2, 4)})")


def offset(d: Draft, x: str) -> str | None:
    """Constants, or what a value is relative to its axis."""
    shape, r, v = d.shape(x), d.rng, d.new()
    if r.random() < 0.4:
        name = r.choice(("amax", "mean", "amin"))
        return d.add("offset", [x], f"{v} = {x} - {x}.{name}({r.randrange(1, len(shape))}, keepdim=True)")
    sizes = [n if r.random() < 0.6 else 1 for n in (1, *shape[1:])]
    line = f'self.register_buffer("c{v[1:]}", torch.randn({sizes}))'
    return d.add("offset", [x], f"{v} = {x} + self.c{v[1:]}", [line])


def window(d: Draft, x: str) -> str | None:
    """A mean over a window, with zeros beside the image."""
    n, v = len(d.shape(x)) - 2, d.new()
    if n not in (1, 2):
        return None
    sizes = [3, 1][:n] if d.rng.random() < 0.5 else [1, 3][-n:]
    pads = [k // 2 for k in sizes]
    return d.add("window", [x], f"{v} = F.avg_pool{n}d({x}, {sizes}, 1, {pads})")


# Small networks of many masks: those of `gate` are over positions, not over full slices alone.
FILLS = {
    gate: 30, partial: 30, offset: 20, window: 10, response: 3, act: 5, join: 5, reduce: 3,
    normalise: 2, cat: 2, take: 3, reshape: 2, matmul: 2, linear: 4,
}  # fmt: skip
