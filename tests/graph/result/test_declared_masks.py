"""Which zeros remove weights: all, those that masks declare, or those of masks that are given. And
in every case a scale of ones and a shift of zeros that nobody pruned stay parameters."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize, prune

import demask
from demask import BadInput

IN, WIDE, MIDDLE, OUT = 6, 16, 12, 4
HALF = torch.arange(WIDE) % 2 == 0  # the rows that are kept


class Adapted(nn.Module):
    """A linear layer with an adapter of zeros beside it, a norm as it begins, and a last layer."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Linear(IN, WIDE), norm(WIDE), nn.Linear(WIDE, OUT)
        self.down, self.up = nn.Linear(IN, 2, bias=False), nn.Linear(2, WIDE, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.n(self.a(x) + self.up(self.down(x))))


class Chain(nn.Module):
    """Two layers whose first loses rows, which the second need not read then."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(IN, WIDE), nn.Linear(WIDE, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(functional.relu(self.a(x)))


class Mask(nn.Module):
    """A parametrization: a weight times a buffer."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


class Masked(nn.Module):
    """A linear layer that multiplies its weight by a mask at every call, and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.b = nn.Parameter(torch.randn(WIDE, IN)), nn.Linear(WIDE, OUT)
        self.register_buffer("mask", HALF[:, None].float())

    def forward(self, x: Tensor) -> Tensor:
        return self.b(functional.linear(x, self.weight * self.mask).tanh())


def names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters()}


def inputs() -> tuple[Tensor]:
    return (torch.randn(3, IN, generator=torch.Generator().manual_seed(1)),)


def equal(slim: nn.Module, net: nn.Module, args: tuple[Tensor, ...]) -> None:
    demask.verify(net, slim, args)


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm, nn.BatchNorm1d])
def test_an_adapter_of_zeros_stays_where_masks_are_declared(norm: type[nn.Module]) -> None:
    net = Adapted(norm).eval()
    prune.ln_structured(net.a, "weight", amount=0.5, n=2, dim=0)
    slim = demask.demask(net, inputs(), masks="declared", result="graph")
    assert {"n.weight", "up.weight", "down.weight"} <= names(slim)
    assert slim.get_parameter("up.weight").shape == (WIDE, 2)
    assert slim.get_parameter("a.weight").shape == (WIDE // 2, IN)
    equal(slim, net, inputs())
    assert "up.weight" not in names(demask.demask(net, inputs(), result="graph"))


def test_prune_hooks_declare_their_masks() -> None:
    net = Chain().eval()
    prune.custom_from_mask(net.a, "weight", HALF[:, None].expand(WIDE, IN))
    slim = demask.demask(net, inputs(), masks="declared")
    assert slim.get_parameter("a.weight").shape == (WIDE // 2, IN)
    assert slim.get_parameter("b.weight").shape == (OUT, WIDE // 2)
    equal(slim, net, inputs())


@pytest.mark.parametrize("bias", [False, True])
def test_channels_of_a_pruned_convolution_go_with_their_bias_and_norm(bias: bool) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=bias), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 3)
    ).eval()
    net[1].bias.data.uniform_(0.1, 1)
    prune.ln_structured(net[0], "weight", amount=0.5, n=2, dim=0)
    args = (torch.randn(2, 3, 8, 8),)
    slim = demask.demask(net, args, masks="declared")
    shapes = {name: tuple(p.shape) for name, p in slim.named_parameters()}
    assert shapes["0.weight"] == (4, 3, 3, 3)
    assert shapes["1.weight"] == (4,)
    assert shapes["3.weight"] == (5, 4, 3, 3)
    zeros = demask.demask(net, args)
    assert shapes == {name: tuple(p.shape) for name, p in zeros.named_parameters()}
    equal(slim, net, args)


def test_parametrizations_declare_what_they_make_zero() -> None:
    net = Chain().eval()
    parametrize.register_parametrization(net.a, "weight", Mask(HALF[:, None].float()))
    slim = demask.demask(net, inputs(), masks="declared")
    assert slim.get_parameter("a.weight").shape == (WIDE // 2, IN)
    equal(slim, net, inputs())


def test_a_buffer_multiplied_in_forward_declares_zeros() -> None:
    net = Masked().eval()
    slim = demask.demask(net, inputs(), masks="declared")
    assert slim.get_parameter("weight").shape == (WIDE // 2, IN)
    assert slim.get_parameter("b.weight").shape == (OUT, WIDE // 2)
    equal(slim, net, inputs())


def test_zeros_under_a_mask_of_ones_are_not_declared() -> None:
    net = Masked().eval()
    net.mask.fill_(1)
    net.weight.data[~HALF] = 0
    slim = demask.demask(net, inputs(), masks="declared")
    assert slim.get_parameter("weight").shape == (WIDE, IN)
    assert demask.demask(net, inputs()).get_parameter("weight").shape == (WIDE // 2, IN)


def test_zeros_that_nobody_declares_stay() -> None:
    net = Chain().eval()
    net.a.weight.data[~HALF] = 0
    net.a.bias.data.zero_()
    slim = demask.demask(net, inputs(), masks="declared")
    assert {n: p.shape for n, p in slim.named_parameters()} == {n: p.shape for n, p in net.named_parameters()}
    equal(slim, net, inputs())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(WIDE, IN), (WIDE, 1)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_given_masks_are_multiplied_onto_their_parameters(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    net = Adapted().eval()
    before = {name: p.clone() for name, p in net.named_parameters()}
    mask = HALF[:, None].expand(shape).to(dtype)
    slim = demask.demask(net, inputs(), masks={"a.weight": mask, "a.bias": HALF}, result="graph")
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    assert slim.get_parameter("a.weight").shape == (WIDE // 2, IN)
    assert {"n.weight", "up.weight", "down.weight"} <= names(slim)
    net.a.weight.data *= HALF[:, None]
    net.a.bias.data *= HALF
    equal(slim, net, inputs())


def test_given_masks_of_an_exported_program_and_of_parts() -> None:
    net, masks = Chain().eval(), {"a.weight": HALF[:, None], "a.bias": HALF}
    exported = torch.export.export(net, inputs())
    slim = demask.demask(exported, inputs(), masks=masks)
    parts = demask.demask(Outer(net), inputs(), modules=["part"], masks={f"part.{n}": m for n, m in masks.items()})
    for result, start in ((slim, ""), (parts, "part.")):
        assert result.get_parameter(f"{start}a.weight").shape == (WIDE // 2, IN)
        assert result.get_parameter(f"{start}b.weight").shape == (OUT, WIDE // 2)
    net.a.weight.data *= HALF[:, None]
    net.a.bias.data *= HALF
    equal(slim, net, inputs())
    torch.testing.assert_close(parts(*inputs()), Outer(net)(*inputs()))


class Outer(nn.Module):
    """A network with another inside."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) + x[:, :1]


class Tied(nn.Module):
    """One weight that two layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDE, WIDE, bias=False), nn.Linear(WIDE, WIDE, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(functional.relu(self.a(x)))


@pytest.mark.parametrize("name", ["a.weight", "b.weight"])
def test_a_mask_of_a_tied_parameter_holds_wherever_it_is_read(name: str) -> None:
    net, args = Tied().eval(), (torch.randn(2, WIDE),)
    slim = demask.demask(net, args, masks={name: HALF[:, None]}, result="graph")
    net.a.weight.data *= HALF[:, None]
    equal(slim, net, args)
    assert sum(p.numel() for p in slim.parameters()) < WIDE * WIDE


@pytest.mark.parametrize(
    ("masks", "text"),
    [
        ("zero", "expected masks to be"),
        (3, "expected masks to be"),
        ({"a.wieght": HALF}, "did you mean 'a.weight'"),
        ({"a.weight": HALF}, r"expected the parameter's shape \(16, 6\)"),
        ({"a.bias": HALF[:, None]}, "or one that broadcasts to it"),
        ({"a.bias": HALF.tolist()}, "expected a tensor of 0 and 1, got list"),
        ({"a.bias": HALF * 0.5}, "expected only 0 .remove. and 1"),
        ({3: HALF}, "3 is no parameter"),
    ],
)
def test_masks_that_do_not_fit_are_refused(masks: object, text: str) -> None:
    with pytest.raises(BadInput, match=text):
        demask.demask(Chain().eval(), inputs(), masks=masks)  # type: ignore[arg-type]


class Written(nn.Module):
    """An RMS norm written out, with a scale and a shift."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x + self.bias


class Gated(nn.Module):
    """A norm between two layers with gates, scales and shifts, all as they begin."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.a, self.n = nn.Linear(IN, WIDE), norm(WIDE)
        self.b, self.c = nn.Linear(WIDE, MIDDLE), nn.Linear(MIDDLE, OUT)
        self.scale, self.gate = nn.Parameter(torch.ones(MIDDLE)), nn.Parameter(torch.ones(()))
        self.shift, self.wide = nn.Parameter(torch.zeros(MIDDLE)), nn.Parameter(torch.ones(MIDDLE))
        for layer in (self.a, self.b, self.c):
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.b(self.n(self.a(x))))
        x = (x * self.scale + self.shift) * self.gate
        return self.c(x * self.wide.expand(x.shape[0], -1))


NORMS = (nn.LayerNorm, partial(nn.RMSNorm, eps=1e-6), nn.BatchNorm1d, Written)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("mode", ["zeros", "declared"])
@pytest.mark.parametrize("amount", [0, 0.25, 0.5])
@pytest.mark.parametrize("bias", [False, True])
def test_scales_of_ones_and_shifts_of_zeros_stay_parameters(
    norm: Callable[[int], nn.Module], mode: str, amount: float, bias: bool
) -> None:
    net = Gated(norm).eval()
    net.scale.requires_grad_(False)
    net.b.bias.requires_grad_(False)
    for layer in (net.a, net.b) if amount else ():
        prune.ln_structured(layer, "weight", amount, n=2, dim=0)
        if bias:
            prune.custom_from_mask(layer, "bias", layer.weight_mask.any(1))
    slim = demask.demask(net, inputs(), masks=mode)
    expected = {name.removesuffix("_orig"): p.requires_grad for name, p in net.named_parameters()}
    made = {name: p.requires_grad for name, p in slim.named_parameters()}
    assert made | expected == made
    equal(slim, net, inputs())


@pytest.mark.parametrize("mode", ["zeros", "declared"])
def test_scales_trained_afterwards_change_what_the_result_computes(mode: str) -> None:
    net = Gated(Written).eval()
    prune.ln_structured(net.a, "weight", 0.5, n=2, dim=0)
    slim = demask.demask(net, inputs(), masks=mode)
    for name in ("scale", "shift", "gate", "wide", "n.weight", "c.bias"):
        slim.zero_grad()
        slim(*inputs()).square().sum().backward()
        assert bool((slim.get_parameter(name).grad != 0).any()), name


class Classified(nn.Module):
    """A class token of zeros before the others, positions of zeros, a transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, WIDE))
        self.positions = nn.Parameter(torch.zeros(1, 4, WIDE))
        self.a, self.b = nn.Linear(IN, WIDE), nn.Linear(WIDE, OUT)
        self.layer = nn.TransformerEncoderLayer(WIDE, 2, 8, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), self.a(x)], 1) + self.positions
        return self.b(self.layer(x)[:, 0])


def test_a_class_token_and_positions_of_zeros_stay_where_masks_are_declared() -> None:
    net, args = Classified().eval(), (torch.randn(2, 3, IN),)
    prune.ln_structured(net.layer.linear1, "weight", amount=0.5, n=2, dim=0)
    slim = demask.demask(net, args, masks="declared")
    assert {name.removesuffix("_orig") for name in names(net)} <= names(slim)
    assert slim.get_parameter("layer.linear1.weight").shape == (4, WIDE)
    equal(slim, net, args)


class Neutral(nn.Module):
    """A linear layer whose result is multiplied by a buffer of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(IN, OUT)
        self.register_buffer("one", torch.ones(OUT))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.one


def test_a_scale_of_ones_that_is_a_buffer_is_folded_with_what_was_pruned() -> None:
    net = Neutral().eval()
    net.a.weight.data[:, :2] = 0
    slim = demask.demask(net, inputs(), result="graph")
    assert not any(name.startswith("one") for name, _ in slim.named_buffers())
    assert "mul" not in slim.code
    equal(slim, net, inputs())
