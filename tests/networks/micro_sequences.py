"""Micro-networks of attention, norms and streams, hand-counted; `micro.MICROS` holds them too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from micro import Made, Net, dead, image, micro


class Attention(nn.Module):
    """Self-attention: fused or separate projections, shared key heads, one op or several."""

    def __init__(
        self,
        width: int,
        *,
        heads: int = 4,
        shared: int | None = None,
        form: str = "sdpa",
        fused: str = "",
        bias: bool = True,
    ):
        super().__init__()
        self.heads, self.size, self.form, self.fused = heads, width // heads, form, fused
        self.shared = heads if shared is None else shared
        if fused:
            self.qkv = nn.Linear(width, 3 * width, bias=bias)
        else:
            narrow = self.shared * self.size
            self.q, self.k = nn.Linear(width, width, bias), nn.Linear(width, narrow, bias)
            self.v = nn.Linear(width, narrow, bias)
        self.o = nn.Linear(width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        share = self.heads // self.shared
        if self.form == "expand":
            k, v = (t[:, :, None].expand(-1, -1, share, -1, -1).flatten(1, 2) for t in (k, v))
        elif self.form == "interleave":
            k, v = (t.repeat_interleave(share, 1) for t in (k, v))
        if self.form == "products":
            y = torch.softmax(q @ k.transpose(-1, -2) * self.size**-0.5, -1) @ v
        elif self.form == "einsum":
            p = torch.einsum("bhtd,bhsd->bhts", q, k) * self.size**-0.5
            y = torch.einsum("bhts,bhsd->bhtd", torch.softmax(p, -1), v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.form == "flag")
        return self.o(y.transpose(1, 2).reshape(x.shape))

    def split(self, x: Tensor) -> list[Tensor]:
        b, t, _ = x.shape
        if self.fused == "major":
            projected = self.qkv(x).reshape(b, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
            return [projected[0], projected[1], projected[2]]
        if self.fused == "minor":
            projected = self.qkv(x).view(b, t, self.heads, 3 * self.size).transpose(1, 2)
            return list(projected.chunk(3, -1))
        parts = (self.q(x), self.k(x), self.v(x))
        return [p.view(b, t, -1, self.size).transpose(1, 2) for p in parts]


HALF = [0, 1, 2, 3, 8, 9, 10, 11]  # heads 0 and 2 of 4, 4 positions each
RAGGED = [0, 1, 6, 7, 9, 10, 12, 15]  # other 2 of 4 positions in each head


def tokens(width: int) -> tuple[Tensor, ...]:
    return (torch.randn(2, 5, width),)


@micro(3 * (16 * 8 + 8) + 8 * 16 + 16)
def heads() -> Made:
    net = Attention(16)
    dead(net.v, HALF)
    return net, tokens(16)


@micro(3 * (16 * 8 + 8) + 8 * 16 + 16)
def heads_of_constant_values() -> Made:
    net = Attention(16)
    dead(net.v, HALF, bias=False)
    return net, tokens(16)


@micro(2 * (16 * 8 + 8) + 2 * (16 * 16 + 16))
def keys_that_are_the_same_for_every_token() -> Made:
    net = Attention(16)
    dead(net.k, RAGGED, bias=False)
    return net, tokens(16)


@micro(2 * (16 * 16 + 16) + 4)  # a number per head stays: attention takes no keys of no size
def keys_of_biases_alone() -> Made:
    net = Attention(16)
    dead(net.k, list(range(16)), bias=False)
    return net, tokens(16)


@micro(3 * (16 * 8 + 8) + 8 * 16 + 16)
def heads_in_products() -> Made:
    net = Attention(16, form="products")
    dead(net.v, HALF, bias=False)
    return net, tokens(16)


@micro(3 * (16 * 8 + 8) + 8 * 16 + 16)
def heads_nobody_reads() -> Made:
    net = Attention(16, form="products")
    with torch.no_grad():
        net.o.weight[:, HALF] = 0
    return net, tokens(16)


@micro(3 * (16 * 8 + 8) + 8 * 16 + 16)
def heads_in_einsums() -> Made:
    net = Attention(16, form="einsum")
    dead(net.v, HALF)
    return net, tokens(16)


def multihead(weights: bool) -> Made:
    net = nn.MultiheadAttention(16, 4, batch_first=True)
    with torch.no_grad():
        net.in_proj_bias.normal_()
        net.in_proj_weight[[32 + p for p in HALF]] = 0
    return Net(lambda m, x: m["a"](x, x, x, need_weights=weights)[0], a=net), tokens(16)


@micro(3 * (16 * 8 + 8) + 8 * 16 + 16)
def heads_merged_into_the_batch() -> Made:
    return multihead(weights=False)


@micro(3 * (16 * 8 + 8) + 8 * 16 + 16)
def products_of_heads_merged_into_the_batch() -> Made:
    return multihead(weights=True)


@micro(32 * 48 + 48 + 16 * 32 + 32)
def heads_of_a_fused_projection() -> Made:
    net = Attention(32, fused="major")
    dead(net.qkv, [64 + p for p in (*range(8), *range(16, 24))])
    return net, tokens(32)


def shared(form: str) -> Made:
    net = Attention(32, shared=2, form=form, bias=False)
    dead(net.v, list(range(8)))
    return net, tokens(32)


@micro(32 * 16 + 2 * 32 * 8 + 16 * 32)
def a_shared_value_head() -> Made:
    return shared("flag")


@micro(32 * 16 + 2 * 32 * 8 + 16 * 32)
def a_shared_value_head_expanded() -> Made:
    return shared("expand")


@micro(32 * 16 + 2 * 32 * 8 + 16 * 32)
def a_shared_value_head_repeated() -> Made:
    return shared("interleave")


@micro(2 * (16 * 16 + 16) + 16 * 8 + 8 + 8 * 16 + 16)
def ragged_values() -> Made:
    net = Attention(16)
    dead(net.v, RAGGED)
    return net, tokens(16)


@micro(2 * (16 * 8 + 8) + 2 * (16 * 16 + 16))
def ragged_queries_and_keys() -> Made:
    net = Attention(16)
    dead(net.q, RAGGED), dead(net.k, RAGGED)
    return net, tokens(16)


def ragged_fused(fused: str) -> Made:
    net = Attention(16, fused=fused)
    major = fused == "major"
    dead(net.qkv, [32 + p if major else p // 4 * 12 + 8 + p % 4 for p in RAGGED])
    return net, tokens(16)


@micro(16 * 40 + 40 + 8 * 16 + 16)
def ragged_values_of_a_fused_projection() -> Made:
    return ragged_fused("major")


@micro(16 * 40 + 40 + 8 * 16 + 16)
def ragged_values_of_an_interleaved_projection() -> Made:
    return ragged_fused("minor")


@micro(32 + 16 * 16 + 16 + 16 * 16 + 16)
def units_with_biases() -> Made:
    net = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    dead(net[1], list(range(0, 32, 2)), bias=False)
    return net, tokens(16)


@micro(2 * 16 * 16 + 16 * 16 + 16)
def gated_units() -> Made:
    """Eight units lose their gate, other eight what it gates."""
    gate, up, down = nn.Linear(16, 32, False), nn.Linear(16, 32, False), nn.Linear(32, 16)
    dead(gate, list(range(8))), dead(up, list(range(20, 28)))
    net = Net(lambda m, x: m["d"](F.silu(m["g"](x)) * m["u"](x)), g=gate, u=up, d=down)
    return net, tokens(16)


# What dead positions of a norm become is -m/s or 1/s times a number: one column, or two.
@micro(32 + 16 * 16 + 16 + 32 + 16 * 16 + 16 + 16)
def layer_norm_over_a_shrunken_axis() -> Made:
    net = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16))
    with torch.no_grad():
        net[2].weight.normal_(), net[2].bias.normal_()
    dead(net[1], list(range(0, 32, 2)))
    return net, tokens(16)


@micro(16 * 16 + 16 + 32 + 16 * 16 + 16 + 2 * 16)
def layer_norm_over_constants() -> Made:
    net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16))
    with torch.no_grad():
        net[1].weight.normal_(), net[1].bias.normal_(), net[0].bias.normal_()
    dead(net[0], list(range(0, 32, 2)), bias=False)
    return net, tokens(16)


@micro(16 * 16 + 16 + 16 + 16 * 16 + 16)
def rms_norm_over_a_shrunken_axis() -> Made:
    net = nn.Sequential(nn.Linear(16, 32), nn.RMSNorm(32), nn.Linear(32, 16))
    nn.init.normal_(net[1].weight)
    dead(net[0], list(range(0, 32, 2)))
    return net, tokens(16)


@micro(16 * 8 + 9 * 4 + 4)
def softmax_over_equal_logits() -> Made:
    net = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Softmax(-1), nn.Linear(16, 4))
    return nn.Sequential(dead(net[0], list(range(0, 16, 2))), net[1], net[2]), image(5, 16)


class Stream(nn.Module):
    """A pre-norm block on a residual stream, half of whose channels nothing writes to."""

    def __init__(self, norm: type[nn.Module]):
        super().__init__()
        self.embed, self.attention = nn.Linear(6, 16), Attention(16)
        self.norms = nn.ModuleList([norm(16) for _ in range(3)])
        self.inner, self.outer, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 10)
        with torch.no_grad():
            for parameter in self.norms.parameters():
                nn.init.normal_(parameter)
        for layer in (self.embed, self.attention.o, self.outer):
            dead(layer, list(range(0, 16, 2)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.attention(self.norms[0](x))
        x = x + self.outer(F.gelu(self.inner(self.norms[1](x))))
        return self.head(self.norms[2](x))


_LINEARS = 6 * 8 + 8 + 3 * (8 * 16 + 16) + 16 * 8 + 8 + 8 * 32 + 32 + 32 * 8 + 8 + 8 * 10 + 10


@micro(_LINEARS + 3 * 16 + 3 * 16 + 32 + 10)
def channels_of_a_stream() -> Made:
    return Stream(nn.LayerNorm), tokens(6)


@micro(_LINEARS + 3 * 8)
def channels_of_a_stream_with_rms_norms() -> Made:
    return Stream(nn.RMSNorm), tokens(6)


@micro(3 * 4 * 9 + 4 * 4 * 9 + 4 * 4 * 9 + 6 * 4 * 9, resizable=True)
def misaligned_residual() -> Made:
    """Both sides of the add keep their own four of eight channels; six are left of their sum."""
    a, b, c = (nn.Conv2d(i, 8, 3, padding=1, bias=False) for i in (3, 8, 8))
    dead(a, [0, 1, 2, 3]), dead(b, [0, 2, 4, 6]), dead(c, [0, 1, 4, 5])
    net = Net(
        lambda m, x: m["d"]((y := F.relu(m["a"](x))) + m["c"](F.relu(m["b"](y)))),
        a=a,
        b=b,
        c=c,
        d=nn.Conv2d(8, 4, 3, bias=False),
    )
    return net, image()


@micro(2 * (32 * 32 + 32) + 32 * 18 + 18 + 18 * 32 + 32)
def heads_of_very_different_sizes() -> Made:
    """Attended to in two groups: 2 and 8 of 8 positions are left in the largest of each."""
    net = Attention(32)
    dead(net.v, [h * 8 + p for h, gone in enumerate((6, 0, 7, 1)) for p in range(gone)])
    return net, tokens(32)


@micro(6 * 4 + 4 + 2 * 8 + 8 * 2 + 2)
def layer_norm() -> Made:
    net = nn.Sequential(dead(nn.Linear(6, 8), [0, 2, 3, 5]), nn.LayerNorm(8), nn.Linear(8, 2))
    return net, image(3, 6)


@micro(3 * 4 * 9 + 4 + 2 * 4 + 4 * 2 + 2, resizable=True)
def group_norm_with_dead_groups() -> Made:
    norm_layer = nn.GroupNorm(4, 8)
    net = nn.Sequential(dead(nn.Conv2d(3, 8, 3), [0, 1, 6, 7], bias=False), norm_layer, nn.Conv2d(8, 2, 1))
    with torch.no_grad():
        net[0].bias[[1, 7]] = net[0].bias[[0, 6]]
    return net, image()


@micro(6 * 3 + 3 + 6 * 2 + 2 + 5 * 4 + 4)
def stacked_then_merged() -> Made:
    """Two values along an axis of their own, merged into their features, as the directions of an
    LSTM in an ONNX file: each loses other entries."""
    net = Net(
        lambda m, x: m["c"](torch.stack((m["a"](x), m["b"](x)), 1).permute(0, 2, 1, 3).reshape(*x.shape[:2], 10)),
        a=dead(nn.Linear(6, 5), [0, 3]),
        b=dead(nn.Linear(6, 5), [1, 2, 4]),
        c=nn.Linear(10, 4),
    )
    return net, tokens(6)
