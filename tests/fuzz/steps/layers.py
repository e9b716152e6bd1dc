"""Steps with weights: each function draws one on a value, or declines with None."""

from __future__ import annotations

from fuzz.draft import Draft
from fuzz.steps.masks import mask_layer, mask_scale, some, statistics

WIDTHS = (3, 4, 5, 6, 7, 8, 9, 11, 12)


def linear(d: Draft, x: str) -> str | None:
    size, v = d.shape(x)[-1], d.new()
    out, bias, m = d.rng.choice((size, *WIDTHS)), d.rng.random() < 0.8, f"self.m{v[1:]}"
    init = [f"{m} = nn.Linear({size}, {out}, bias={bias})"]
    init += mask_layer(d.rng, m, (0, out), (1, size), bias)
    return _remember(d, d.add("linear", [x], f"{v} = {m}({x})", init), m, x)


def conv(d: Draft, x: str) -> str | None:
    shape, v, r = d.shape(x), d.new(), d.rng
    n, c = len(shape) - 2, shape[1]
    if n not in (1, 2, 3):
        return None
    groups = _groups(r, c)
    out = groups * r.randint(1, 3) if groups > 1 else r.choice((c, *WIDTHS))
    same, bias, m = r.random() < 0.5, r.random() < 0.7, f"self.m{v[1:]}"
    out = (c if r.random() < 0.7 else out) if same and c % groups == 0 else out
    dilation = r.choice((1, 1, 2))
    # No longer than the image: taps that only ever read padding say nothing of masks.
    fits = [[k for k in ((1, 3, 3) if same else (1, 2, 3)) if dilation * (k - 1) < size] for size in shape[2:]]
    kernel = tuple(r.choice(f) for f in fits)
    if same:
        padding = "'same'" if r.random() < 0.4 else tuple((k - 1) // 2 * dilation for k in kernel)
        text = f"padding={padding}, dilation={dilation}"
    else:
        padding = tuple(r.randint(0, max(0, k - 1)) for k in kernel)
        stride = tuple(r.randint(1, 2) for _ in range(n))
        text = f"stride={stride}, padding={padding}, dilation={dilation}"
    mode = r.choice(["zeros"] * 7 + ["reflect", "circular", "replicate"])
    init = [f"{m} = nn.Conv{n}d({c}, {out}, {kernel}, {text}, groups={groups}, bias={bias}, padding_mode='{mode}')"]
    init += mask_layer(r, m, (0, out), (1, c // groups), bias)
    kind = "conv" if groups == 1 else "depthwise" if groups == c else "grouped"
    return _remember(d, d.add(kind, [x], f"{v} = {m}({x})", init), m, x)


def _groups(r, c: int) -> int:
    if r.random() < 0.6:
        return 1
    if r.random() < 0.5:
        return c
    return r.choice([g for g in range(1, c + 1) if c % g == 0])


def conv_transpose(d: Draft, x: str) -> str | None:
    shape, v, r = d.shape(x), d.new(), d.rng
    n, c = len(shape) - 2, shape[1]
    if n not in (1, 2, 3):
        return None
    groups = _groups(r, c) if r.random() < 0.5 else 1
    each, stride = r.randint(1, 3) if groups > 1 else r.choice(WIDTHS), r.randint(1, 3)
    kernel, padding, extra = r.randint(1, 3), r.randint(0, 1), r.randint(0, stride - 1)
    bias, m = r.random() < 0.7, f"self.m{v[1:]}"
    init = [
        f"{m} = nn.ConvTranspose{n}d({c}, {each * groups}, {kernel}, stride={stride}, "
        f"padding={padding}, output_padding={extra}, groups={groups}, bias={bias})"
    ]
    init += mask_layer(r, m, (1, each), (0, c), bias)
    return d.add("conv_transpose", [x], f"{v} = {m}({x})", init)


def batch_norm(d: Draft, x: str) -> str | None:
    shape, v = d.shape(x), d.new()
    if len(shape) not in (2, 3, 4, 5):
        return None
    m, affine = f"self.m{v[1:]}", d.rng.random() < 0.85
    init = [f"{m} = nn.BatchNorm{max(1, len(shape) - 2)}d({shape[1]}, affine={affine})"]
    init += [*statistics(m), *(mask_scale(d.rng, m, shape[1]) if affine else [])]
    return _remember(d, d.add("batch_norm", [x], f"{v} = {m}({x})", init), m, x)


def instance_norm(d: Draft, x: str) -> str | None:
    shape, v = d.shape(x), d.new()
    if len(shape) not in (3, 4, 5):
        return None
    m, tracks = f"self.m{v[1:]}", d.rng.random() < 0.3
    init = [f"{m} = nn.InstanceNorm{len(shape) - 2}d({shape[1]}, affine=True, track_running_stats={tracks})"]
    init += [*mask_scale(d.rng, m, shape[1]), *(statistics(m) if tracks else [])]
    return d.add("instance_norm", [x], f"{v} = {m}({x})", init)


def group_norm(d: Draft, x: str) -> str | None:
    shape, v = d.shape(x), d.new()
    if len(shape) < 3:
        return None
    m, c = f"self.m{v[1:]}", shape[1]
    groups = d.rng.choice([g for g in range(1, c + 1) if c % g == 0])
    init = [f"{m} = nn.GroupNorm({groups}, {c})", *mask_scale(d.rng, m, c)]
    return d.add("group_norm", [x], f"{v} = {m}({x})", init)


def layer_norm(d: Draft, x: str) -> str | None:
    shape, v = d.shape(x), d.new()
    m, count = f"self.m{v[1:]}", 2 if len(shape) > 3 and d.rng.random() < 0.3 else 1
    over = shape[-count:]
    if over[-1] == 1:  # the norm of one value is a constant
        return None
    init = [f"{m} = nn.LayerNorm({over})", *mask_scale(d.rng, m, over[0])]
    return d.add("layer_norm", [x], f"{v} = {m}({x})", init)


def prelu(d: Draft, x: str) -> str | None:
    shape, v = d.shape(x), d.new()
    m = f"self.m{v[1:]}"
    init = [f"{m} = nn.PReLU({shape[1]})", f"nn.init.normal_({m}.weight, 0, 0.3)"]
    return d.add("prelu", [x], f"{v} = {m}({x})", init)


def squeeze_excite(d: Draft, x: str) -> str | None:
    shape, v, r = d.shape(x), d.new(), d.rng
    if len(shape) < 3:
        return None
    a, b, c, inner = f"self.a{v[1:]}", f"self.b{v[1:]}", shape[1], r.randint(2, 5)
    init = [f"{a} = nn.Linear({c}, {inner})", f"{b} = nn.Linear({inner}, {c})"]
    init += mask_layer(r, a, (0, inner), (1, c), True) + mask_layer(r, b, (0, c), (1, inner), True)
    axes, tail = tuple(range(2, len(shape))), ", ".join(["None"] * (len(shape) - 2))
    gate = f"torch.sigmoid({b}(torch.relu({a}({x}.mean({axes})))))"
    return d.add("squeeze_excite", [x], f"{v} = {x} * {gate}[:, :, {tail}]", init)


def masked_weight(d: Draft, x: str) -> str | None:
    """weight * mask inside forward."""
    size, v, r = d.shape(x)[-1], d.new(), d.rng
    out, k = r.choice((size, *WIDTHS)), v[1:]
    rows, columns = some(r, out), some(r, size)
    init = [
        f"self.w{k} = nn.Parameter(torch.randn({out}, {size}) * 0.4)",
        f"self.b{k} = nn.Parameter(torch.randn({out}))",
        f'self.register_buffer("k{k}", ones_but(self.w{k}, 0, {rows}) * ones_but(self.w{k}, 1, {columns}))',
    ]
    shift = f"self.b{k}" if r.random() < 0.5 else f"self.b{k} * self.k{k}.amax(1)"
    return d.add("masked_weight", [x], f"{v} = F.linear({x}, self.w{k} * self.k{k}, {shift})", init)


def constant_mask(d: Draft, x: str) -> str | None:
    """A constant multiplied onto (or added to) an activation."""
    shape, v, r = d.shape(x), d.new(), d.rng
    k, axis = v[1:], r.randint(1, len(shape) - 1)
    gone = some(r, shape[axis])
    over = [n if k == axis or r.random() < 0.2 else 1 for k, n in enumerate(shape)]
    sizes = tuple(over[1:])
    made = f"ones_but(torch.rand({sizes}) + 0.5, {axis - 1}, {gone})"
    scale = "" if r.random() < 0.5 else f" * (torch.rand({sizes}) + 0.5)"
    made = made + scale
    init = [f'self.register_buffer("k{k}", {made})' if r.random() < 0.7 else f"self.k{k} = {made}"]
    return d.add("constant_mask", [x], f"{v} = {x} {r.choice('**+')} self.k{k}", init)


def reused(d: Draft, x: str) -> str | None:
    """A module called again on another value of the same shape."""
    fits = [m for m, (_, shape) in d.modules.items() if shape == d.shape(x)]
    if not fits:
        return None
    v, m = d.new(), d.rng.choice(fits)
    return d.add("reused", [x], f"{v} = {m}({x})")


def tied(d: Draft, x: str) -> str | None:
    """One Parameter under two names."""
    fits = [m for m, (kind, shape) in d.modules.items() if kind == "linear" and shape[-1] == d.shape(x)[-1]]
    # A weight that a hook or a parametrization computes is no Parameter to share.
    computed = [line for step in d.steps for line in step.init if "norm(" in line or "prune" in line]
    computed += [line for step in d.steps for line in step.init if "parametriz" in line]
    fits = [m for m in fits if not any(f"{m}," in line or f"{m})" in line for line in computed)]
    if not fits:
        return None
    v, other = d.new(), d.rng.choice(fits)
    m = f"self.m{v[1:]}"
    init = [f"{m} = nn.Linear({other}.in_features, {other}.out_features)", f"{m}.weight = {other}.weight"]
    return d.add("tied", [x], f"{v} = {m}({x})", init)


def attention(d: Draft, x: str) -> str | None:
    shape, v, r = d.shape(x), d.new(), d.rng
    if len(shape) != 3:
        return None
    heads, each, k = r.randint(1, 3), r.randint(2, 3), v[1:]
    wide, size = heads * each, shape[2]
    init, body = [], []
    for name in "qkv":
        m = f"self.{name}{k}"
        # Softmax hides the bias of the keys: it adds the same to every logit of a query.
        bias = name != "k" or r.random() < 0.2
        init += [f"{m} = nn.Linear({size}, {wide}, bias={bias})"]
        init += mask_layer(r, m, (0, wide), (1, size), bias)
        body += [f"{name}{k} = {m}({x}).unflatten(2, ({heads}, {each})).transpose(1, 2)"]
    init += [f"self.o{k} = nn.Linear({wide}, {size})"]
    init += mask_layer(r, f"self.o{k}", (0, size), (1, wide), True)
    if r.random() < 0.5:
        body += [f"s{k} = torch.softmax(q{k} @ k{k}.transpose(2, 3) * 0.6, -1) @ v_{k}"]
        body[2] = body[2].replace(f"v{k} =", f"v_{k} =", 1)
    else:
        body[2] = body[2].replace(f"v{k} =", f"v_{k} =", 1)
        body += [f"s{k} = F.scaled_dot_product_attention(q{k}, k{k}, v_{k})"]
    body += [f"{v} = self.o{k}(s{k}.transpose(1, 2).flatten(2))"]
    return d.add("attention", [x], body, init)


def block(d: Draft, x: str) -> str | None:
    """A residual block: two 3×3 convolutions, norms, and the add."""
    shape, r = d.shape(x), d.rng
    n, c = len(shape) - 2, shape[1]
    if n not in (1, 2, 3):
        return None
    inner = r.choice(WIDTHS)
    last: str | None = x
    if min(shape[2:]) < 2:
        return None
    for i, o in ((c, inner), (inner, c)):
        v = d.new()
        m = f"self.m{v[1:]}"
        init = [f"{m} = nn.Conv{n}d({i}, {o}, 3, padding=1, bias={r.random() < 0.5})"]
        init += mask_layer(r, m, (0, o), (1, i), False)
        last = d.add("conv", [last], f"{v} = {m}({last})", init)
        last = batch_norm(d, last) if last else None
        if last is None:
            return None
        if o == inner:
            v = d.new()
            last = d.add("act", [last], f"{v} = torch.relu({last})")
    v = d.new()
    return d.add("residual", [x, last], f"{v} = {r.choice(('torch.relu', ''))}({x} + {last})")


def _remember(d: Draft, made: str | None, m: str, x: str) -> str | None:
    """Modules that may be called again or give their weight away."""
    if made is not None and len(d.steps[-1].init) <= 2 and "norm" not in str(d.steps[-1].init):
        d.modules[m] = (d.steps[-1].op, d.shape(x))
    return made


LAYERS = {
    linear: 8, conv: 16, conv_transpose: 3, batch_norm: 7, instance_norm: 2, group_norm: 2,
    layer_norm: 3, prelu: 1, squeeze_excite: 2, masked_weight: 2, constant_mask: 4, reused: 4,
    tied: 4, attention: 4, block: 3,
}  # fmt: skip
