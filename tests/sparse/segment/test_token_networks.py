"""Transformers and networks with channels last become one segment, and come back."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from test_sparse_segments import all_sparse, always, and_back, check, made, pruned, steps
from torch import Tensor, nn
from torch.nn import functional as F

from demask.rewrites.driver import rewrite
from demask.shrink.pipeline import capture_program
from demask.sparse.segment.build_segments import segmented, segments_of
from demask.tune.fold_affine import FOLD
from micro import Net
from test_tune import ran

WIDTH, HEADS = 8, 2
TOKENS = torch.randn(2, 11, WIDTH, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 3, 16, 12, generator=torch.Generator().manual_seed(1))
MASK = torch.zeros(11, 11).masked_fill(torch.arange(11) > 8, -math.inf)


class Attention(nn.Module):
    """Self-attention; keywords: of the attention."""

    def __init__(self, **keywords: object):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        mask, self.masks = keywords.pop("attn_mask", None), keywords.pop("masks", True)
        self.register_buffer("mask", mask if mask is None else mask.clone())
        self.keywords = keywords

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        sizes = batch, length, HEADS, WIDTH // HEADS
        parts = [part(x).view(sizes).transpose(1, 2) for part in self.parts[:3]]
        mask = self.mask
        if not self.masks:
            mask = torch.arange(length)[None, :] >= 0
        if mask is not None and mask.is_floating_point():
            mask = mask.to(x.dtype)
        y = F.scaled_dot_product_attention(*parts, attn_mask=mask, **self.keywords)
        return self.parts[3](y.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """A layer of a transformer, norms first."""

    def __init__(self, **keywords: object):
        super().__init__()
        self.a, self.n, self.m = Attention(**keywords), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(self.n(x))
        return x + self.down(F.gelu(self.up(self.m(x))))


class ByHand(nn.Module):
    """Attention as products and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        sizes = *x.shape[:2], HEADS, WIDTH // HEADS
        q, k, v = (part(x).view(sizes).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = (q @ k.transpose(-1, -2) / 2.0).softmax(-1) @ v
        return y.transpose(1, 2).reshape(x.shape)


class Patches(nn.Module):
    """A vision transformer: patches, a class token, positions, its first token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, WIDTH, 4, 4), nn.Linear(WIDTH, 5)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 13, WIDTH))
        self.blocks, self.n = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.n(self.blocks(x))[:, 0])


class ChannelsLast(nn.Module):
    """A block of ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 6, 2, 2), nn.Conv2d(6, 6, 7, padding=3, groups=6)
        self.n, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 16), nn.Linear(16, 6)
        self.scale = nn.Parameter(torch.randn(6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.n(self.conv(x).permute(0, 2, 3, 1))
        y = self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)
        return x + self.scale * y


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "block": (Block, TOKENS),
    "causal": (lambda: Attention(is_causal=True), TOKENS),
    "scaled": (lambda: Attention(scale=0.3), TOKENS),
    "added mask": (lambda: Attention(attn_mask=MASK), TOKENS),
    "mask": (lambda: Attention(attn_mask=MASK == 0), TOKENS),
    "mask of nothing": (lambda: Attention(attn_mask=None, masks=False), TOKENS),
    "by hand": (ByHand, TOKENS),
    "patches": (Patches, IMAGE),
    "channels last": (ChannelsLast, IMAGE),
    "rms": (
        lambda: Net(
            lambda m, x: m["b"](m["n"](m["a"](x))), a=nn.Linear(WIDTH, 6), n=nn.RMSNorm(6, eps=1e-5), b=nn.Linear(6, 4)
        ),
        TOKENS,
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_becomes_one_segment_and_comes_back(name: str) -> None:
    make, x = NETWORKS[name]
    program, args = made(make(), x)
    found = check(program, all_sparse, args)
    assert len(segments_of(found.graph)) == 1, steps(found)
    back = check(program, and_back, args)
    assert not segments_of(back.graph)
    heavy = {"aten.linear.default", "aten.matmul.default", "aten.scaled_dot_product_attention.default"}
    assert not heavy & {str(node.target) for node in found.graph.nodes}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["block", "patches", "channels last"])
def test_plans_in_float32(name: str) -> None:
    """The same bits for any number of threads, and the network in float64 up to rounding."""
    make, x = NETWORKS[name]
    model = pruned(make())
    with torch.no_grad():
        want = model(x.double())
    program = rewrite(capture_program(model.float(), (x,), None, None), FOLD)
    program = segmented(program, always, always)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found += ran(program, (x,))
    finally:
        torch.set_num_threads(before)
    assert float((found[0] - want).abs().max()) <= 64 * 2.0**-23 * float(want.abs().max())
    assert all(torch.equal(found[0], other) for other in found[1:])
