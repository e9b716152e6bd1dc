"""Steps of sequence models: attention in its forms, gated units, norms, recurrence, windows."""

from __future__ import annotations

from fuzz.draft import Draft
from fuzz.steps.masks import mask_layer, mask_scale, some


def heads(d: Draft, x: str) -> str | None:
    """Attention with fused or separate projections, shared key heads, rotary pairs, heads merged
    into the batch; whole heads, and other positions in every head, masked."""
    shape, v, r = d.shape(x), d.new(), d.rng
    if len(shape) != 3:
        return None
    k, size, groups, each = v[1:], shape[2], r.choice((1, 2)), r.choice((2, 4))
    share = r.choice((1, 1, 2))
    n = groups * share
    wide, narrow = n * each, groups * each
    init, body = [], []
    fused = share == 1 and r.random() < 0.5
    if fused:
        m, order = f"self.m{k}", r.choice(("3hd", "h3d"))
        init += [f"{m} = nn.Linear({size}, {3 * wide})"]
        rows = _fused_rows(r, n, each, order)
        init += [f"{m}.weight.data[{rows}] = 0"]
        init += [f"{m}.bias.data[{rows}] = 0"] if r.random() < 0.6 else []
        sizes = f"(3, {n}, {each})" if order == "3hd" else f"({n}, 3, {each})"
        moved = "(2, 0, 3, 1, 4)" if order == "3hd" else "(3, 0, 2, 1, 4)"
        body += [f"q{k}, k{k}, w{k} = {m}({x}).unflatten(2, {sizes}).permute{moved}.unbind(0)"]
    else:
        for name, count in (("q", wide), ("k", narrow), ("w", narrow)):
            m = f"self.{name}{k}"
            init += [f"{m} = nn.Linear({size}, {count}, bias={name != 'k'})"]
            init += _ragged(r, m, count, each, name != "k")
            sizes = f"(-1, {shape[1]}, {count // each}, {each})"
            body += [f"{name}{k} = {m}({x}).view{sizes}.transpose(1, 2)"]
    if r.random() < 0.3:
        body += _rotary(k, shape[1], each)
    flag = False
    if share > 1:
        form = r.choice(("expand", "interleave", "flag"))
        flag = form == "flag"
        for name in () if flag else ("k", "w"):
            wider = f"{name}{k}.repeat_interleave({share}, 1)"
            if form == "expand":
                wider = f"{name}{k}[:, :, None].expand(-1, -1, {share}, -1, -1).flatten(1, 2)"
            body += [f"{name}{k} = {wider}"]
    causal = r.random() < 0.3
    if flag or r.random() < 0.5:
        options = f"is_causal={causal}, enable_gqa={flag}"
        body += [f"s{k} = F.scaled_dot_product_attention(q{k}, k{k}, w{k}, {options})"]
    elif r.random() < 0.4:
        body += [f"a{k}, b{k}, c{k} = [t.flatten(0, 1) for t in (q{k}, k{k}, w{k})]"]
        body += [f"l{k} = torch.bmm(a{k} * 0.5, b{k}.transpose(1, 2))"]
        body += [f"s{k} = torch.bmm(torch.softmax(l{k}, -1), c{k})"]
        body += [f"s{k} = s{k}.view(-1, {n}, {shape[1]}, {each})"]
    elif r.random() < 0.5:
        body += [f'l{k} = torch.einsum("bhtd,bhsd->bhts", q{k}, k{k}) * {each**-0.5}']
        body += [
            f"p{k} = torch.softmax(l{k}, -1)",
            f'l{k} = torch.einsum("bhts,bhsd->bhtd", p{k}, w{k})',
            f"s{k} = l{k}",
        ]
    else:
        body += [f"l{k} = q{k} @ k{k}.transpose(-1, -2) * {each**-0.5}"]
        mask = f"torch.ones({shape[1]}, {shape[1]}, dtype=torch.bool).triu(1)"
        body += [f"l{k} = l{k}.masked_fill({mask}, -1e4)"] if causal else []
        body += [f"s{k} = torch.softmax(l{k}, -1) @ w{k}"]
    o = f"self.o{k}"
    init += [f"{o} = nn.Linear({wide}, {size})", *mask_layer(r, o, (0, size), (1, wide), True)]
    body += [f"{v} = {o}(s{k}.transpose(1, 2).reshape(-1, {shape[1]}, {wide}))"]
    body += [f"{v} = {x} + {v}"] if r.random() < 0.5 else []
    return d.add("heads", [x], body, init)


def _fused_rows(r, n: int, each: int, order: str) -> list[int]:
    """Rows of a fused projection: some of each part, mostly other ones in every head."""
    rows = set()
    for part in r.sample(range(3), r.randint(0, 3)):
        for head in range(n):
            for place in some(r, each) if r.random() < 0.8 else range(each):
                at = (part * n + head) if order == "3hd" else head * 3 + part
                rows.add(at * each + place)
    return sorted(rows)


def _ragged(r, m: str, wide: int, each: int, bias: bool) -> list[str]:
    if r.random() < 0.5:
        return []
    rows = [h * each + p for h in range(wide // each) for p in some(r, each)]
    lines = [f"{m}.weight.data[{rows}] = 0"]
    return lines + ([f"{m}.bias.data[{rows}] = 0"] if bias and r.random() < 0.6 else [])


def _rotary(k: str, length: int, each: int) -> list[str]:
    half = each // 2
    lines = [f"f{k} = torch.arange({length}.0)[:, None] * torch.linspace(0.1, 1, {half}).repeat(2)"]
    for name in "qk":
        turned = f"torch.cat([-{name}{k}[..., {half}:], {name}{k}[..., :{half}]], -1)"
        lines += [f"{name}{k} = {name}{k} * f{k}.cos() + {turned} * f{k}.sin()"]
    return lines


def multihead(d: Draft, x: str) -> str | None:
    """torch's own attention module."""
    shape, v, r = d.shape(x), d.new(), d.rng
    if len(shape) != 3 or shape[2] % 2:
        return None
    m, size = f"self.m{v[1:]}", shape[2]
    init = [f"{m} = nn.MultiheadAttention({size}, 2, batch_first={r.random() < 0.7})"]
    init += [f"nn.init.normal_({m}.in_proj_bias)"]
    rows = [2 * size + p for p in some(r, size)]
    init += [f"{m}.in_proj_weight.data[{rows}] = 0"]
    init += [f"{m}.in_proj_bias.data[{rows}] = 0"] if r.random() < 0.5 else []
    init += [f"{m}.out_proj.weight.data[:, {some(r, size)}] = 0"] if r.random() < 0.3 else []
    return d.add("multihead", [x], f"{v} = {m}({x}, {x}, {x}, need_weights={r.random() < 0.5})[0]", init)


def normed(d: Draft, x: str) -> str | None:
    """A norm over an axis that a masked linear makes, and a linear behind it."""
    shape, v, r = d.shape(x), d.new(), d.rng
    k, size, inner, out = v[1:], shape[-1], r.choice((4, 6, 8)), r.choice((3, 5, shape[-1]))
    a, n, b = f"self.a{k}", f"self.n{k}", f"self.b{k}"
    init = [f"{a} = nn.Linear({size}, {inner})", *mask_layer(r, a, (0, inner), (1, size), True)]
    kind = r.choice(("layer", "layer", "rms", "spelled", "softmax", "logits"))
    norm = f"{n}({a}({x}))"
    if kind == "layer":
        init += [f"{n} = nn.LayerNorm({inner})", *mask_scale(r, n, inner)]
    elif kind == "rms":
        init += [f"{n} = nn.RMSNorm({inner})", f"nn.init.normal_({n}.weight)"]
    elif kind == "spelled":
        init += [f"{n} = nn.Parameter(torch.randn({inner}))"]
        norm = f"h{k} * torch.rsqrt(h{k}.pow(2).mean(-1, keepdim=True) + 1e-5) * {n}"
    else:
        norm = f"torch.softmax(h{k}, -1)"
    body = [f"h{k} = {a}({x})"] if "h" + k in norm else []
    init += [f"{b} = nn.Linear({inner}, {out})", *mask_layer(r, b, (0, out), (1, inner), True)]
    return d.add("normed", [x], [*body, f"{v} = {b}({norm})" if kind != "logits" else f"{v} = {norm}"], init)


def reduced(d: Draft, x: str) -> str | None:
    """A mean, sum or largest value along an axis, kept as an axis of one."""
    shape, v, r = d.shape(x), d.new(), d.rng
    axis = r.randint(1, len(shape) - 1)
    form = r.choice(
        ("mean({0}, keepdim=True)", "sum({0}, keepdim=True)", "amax({0}, keepdim=True)", "amin({0}, keepdim=True)")
    )
    return d.add("reduced", [x], f"{v} = {x} * 0.5 + {x}." + form.format(axis))


def gated(d: Draft, x: str) -> str | None:
    """Gated feed-forward units on a residual stream."""
    shape, v, r = d.shape(x), d.new(), d.rng
    k, size, inner = v[1:], shape[-1], r.choice((5, 7, 8))
    init = []
    for name, (i, o) in (("g", (size, inner)), ("u", (size, inner)), ("w", (inner, size))):
        m, bias = f"self.{name}{k}", r.random() < 0.5
        init += [f"{m} = nn.Linear({i}, {o}, bias={bias})", *mask_layer(r, m, (0, o), (1, i), bias)]
    gate = r.choice(("F.silu", "torch.sigmoid", "F.gelu"))
    body = f"{v} = {x} + self.w{k}({gate}(self.g{k}({x})) * self.u{k}({x}))"
    return d.add("gated", [x], body, init)


def recurrent(d: Draft, x: str) -> str | None:
    """LSTM, GRU or RNN with dead units: of a layer, of a direction."""
    shape, v, r = d.shape(x), d.new(), d.rng
    if len(shape) != 3 or shape[1] > 13:
        return None
    m, size, hidden = f"self.m{v[1:]}", shape[2], r.choice((3, 4, 6))
    kind, layers, both = r.choice(("LSTM", "GRU", "RNN")), r.choice((1, 1, 2)), r.random() < 0.4
    more = ", proj_size=2" if kind == "LSTM" and r.random() < 0.25 else ""
    more += ", nonlinearity='relu'" if kind == "RNN" and r.random() < 0.5 else ""
    bias = r.random() < 0.8
    init = [f"{m} = nn.{kind}({size}, {hidden}, {layers}, bias={bias}, batch_first=True, bidirectional={both}{more})"]
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    for layer in range(layers):
        for suffix in ("", "_reverse")[: 1 + both]:
            units = some(r, hidden)
            only = r.random() < 0.3 and kind != "RNN"
            which = [2] if only else range(gates)
            rows = [g * hidden + u for g in which for u in units]
            names = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if bias and r.random() < 0.8 else [])]
            init += [f"{m}.{name}_l{layer}{suffix}.data[{rows}] = 0" for name in names]
    states = r.random() < 0.3
    body = f"{v} = {m}({x})[0]"
    if states:
        count = layers * (1 + both)
        made = f"torch.tanh({x}.mean(1))[:, :1].expand(-1, {hidden}).repeat({count}, 1, 1)"
        if kind == "LSTM":
            first = made.replace(f"-1, {hidden}", "-1, 2") if more else made
            body = f"{v} = {m}({x}, ({first}, {made}))[0]"
        else:
            body = f"{v} = {m}({x}, {made})[0]"
    return d.add("recurrent", [x], body, init)


def windows(d: Draft, x: str) -> str | None:
    """Tokens rolled, cut into windows, a masked linear inside, put together and rolled back."""
    shape, v, r = d.shape(x), d.new(), d.rng
    if len(shape) != 3 or (shape[1] % 2 and shape[1] % 3):
        return None
    size, k, length = (2 if shape[1] % 2 == 0 else 3), v[1:], shape[1]
    m, back = f"self.m{k}", r.randint(0, 2)
    init = [f"{m} = nn.Linear({shape[2]}, {shape[2]})"]
    init += mask_layer(r, m, (0, shape[2]), (1, shape[2]), True)
    body = [
        f"p{k} = {x}.roll({-back}, 1).view(-1, {length // size}, {size}, {shape[2]})",
        f"p{k} = {m}(p{k}.reshape(-1, {size}, {shape[2]}))",
        f"{v} = p{k}.view(-1, {length}, {shape[2]}).roll({back}, 1)",
    ]
    return d.add("windows", [x], body, init)


SEQUENCES = {heads: 8, multihead: 3, normed: 6, reduced: 2, gated: 4, recurrent: 5, windows: 2}
