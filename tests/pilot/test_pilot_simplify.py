"""Simplifiers: what each computes, on every kind of layer, and what they refuse."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.pilot import Bits, Channels, Downsample, Exponents, LowRank, simplifier, simplify
from demask.pilot import weight_layers as layers
from demask.pilot.simplifiers import downsample, rounding
from demask.pilot.simplifiers import low_rank as lowrank
from pilot_networks import networks

NETWORKS = networks()
TEXTS = ("bits:8", "bits:3:5", "bits:1", "exponents", "rank:0.5", "channels:0.5")


def leaves(out):
    return [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]


EVERY = [(name, text) for name in NETWORKS for text in (*TEXTS, "downsample:2", "downsample:2:area")]
QUICK = {
    ("residual", "bits:8"),
    ("depthwise", "rank:0.5"),
    ("recurrent", "bits:3:5"),
    ("recurrent", "downsample:2"),
    ("unet", "channels:0.5"),
    ("flat", "downsample:2"),
    ("tokens", "downsample:2:area"),
}


@pytest.mark.parametrize(
    ("name", "text"), [pytest.param(*one, marks=[] if one in QUICK else [pytest.mark.nightly]) for one in EVERY]
)
def test_same_call_same_shapes_and_the_model_stays(name, text):
    model, args = NETWORKS[name]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    if text.startswith("downsample") and name == "recurrent":
        with pytest.raises(BadInput, match="no input has spatial axes"):
            simplify(model, args, by=text)
        return
    slim = simplify(model, args, by=text)
    for batch in (1, 2):
        small = tuple(x[:batch] for x in args)
        with torch.no_grad():
            made, full = leaves(slim(*small)), leaves(model(*small))
        assert [t.shape for t in made] == [t.shape for t in full]
        assert all(t.dtype == f.dtype and t.isfinite().all() for t, f in zip(made, full, strict=True))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# -- rounding --------------------------------------------------------------------------------------


def levels(row, bits):
    """A row by hand: whole multiples of its largest magnitude over 2^(bits-1) - 1."""
    top = max(abs(v) for v in row)
    step = top / (2 ** (bits - 1) - 1)
    return [step * round(v / step) if step else 0.0 for v in row]


@pytest.mark.parametrize("bits", [2, 3, 5, 8, 16])
def test_bits_are_whole_multiples_of_a_step_per_row(bits):
    w = torch.randn(5, 7, dtype=torch.float64)
    w[2] = 0
    expected = torch.tensor([levels(row, bits) for row in w.tolist()], dtype=torch.float64)
    made = rounding.quantized(w, bits)
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=0)
    step = w.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert bool(((made - w).abs() <= step / 2 * (1 + 1e-12)).all())
    assert len(made[0].unique()) <= 2**bits - 1


def test_groups_have_scales_of_their_own():
    w = torch.randn(3, 7, dtype=torch.float64)
    made = rounding.quantized(w, 4, group=3)
    for low, high in ((0, 3), (3, 6), (6, 7)):
        torch.testing.assert_close(made[:, low:high], rounding.quantized(w[:, low:high], 4))


def test_one_bit_is_the_sign_times_the_mean():
    w = torch.tensor([[1.0, -2.0, 3.0]])
    assert rounding.quantized(w, 1).tolist() == [[2.0, -2.0, 2.0]]


def test_powers_of_two_are_the_nearest_by_difference():
    w = torch.cat([torch.randn(500, dtype=torch.float64), torch.tensor([0.0, 1.5, -1.5, 0.75])])
    every = torch.tensor([2.0**e for e in range(-40, 4)], dtype=torch.float64)
    made = rounding.powers(w)
    least = (w.abs()[:, None] - every).abs().amin(1)
    assert torch.equal((w - made).abs()[w != 0], least[w != 0])
    assert torch.equal(made.sign(), w.sign())


@pytest.mark.parametrize(("name", "rows"), [("linear", 0), ("conv", 0), ("up", 1), ("mm", 1)])
def test_rows_are_the_outputs_of_any_layer(name, rows):
    """Each output channel is rounded by itself: scaling one leaves the others as they are."""

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6))

        def forward(self, x):
            return x @ self.weight

    model, x = {
        "linear": (nn.Linear(4, 6), torch.randn(2, 4)),
        "conv": (nn.Conv2d(4, 6, 3), torch.randn(2, 4, 5, 5)),
        "up": (nn.ConvTranspose2d(4, 6, 2), torch.randn(2, 4, 5, 5)),
        "mm": (Product(), torch.randn(2, 4)),
    }[name]
    with torch.no_grad():
        model.weight.select(rows, 2).mul_(100)
    slim = dict(simplify(model.eval(), (x,), by="bits:4").named_parameters())
    weight = slim["weight"]
    for k in range(6):
        row = model.weight.select(rows, k)
        torch.testing.assert_close(
            weight.select(rows, k).flatten(), rounding.quantized(row.detach().reshape(1, -1), 4)[0]
        )


@pytest.mark.parametrize("by", [Bits(8), Exponents(), LowRank(0.5)])
def test_weights_that_are_not_finite_are_refused(by):
    model = nn.Linear(3, 2)
    model.weight.data[0, 0] = math.inf
    with pytest.raises(BadInput, match="weight holds Inf or NaN"):
        simplify(model, (torch.ones(1, 3),), by=by)


def test_bytes_of_stored_weights():
    w = torch.randn(10, 64)
    assert Bits(8).weight_bytes(w, 10) == 640 + 40
    assert Bits(4, group=16).weight_bytes(w, 10) == 320 + 4 * 40
    assert LowRank(0.5).weight_bytes(w, 10) == 2560
    assert Exponents().weight_bytes(torch.tensor([[1.0, 2.0, 4.0, 0.0]]), 1) == 4 * 3 / 8


# -- low rank --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(9, 5), (4, 20)])
def test_factors_are_the_best_of_their_rank(shape):
    matrix = torch.randn(shape, dtype=torch.float64)
    values = torch.linalg.svdvals(matrix)
    for rank in (1, 3):
        basis, mixed = lowrank.factors(matrix, rank)
        assert basis.shape == (rank, shape[1]) and mixed.shape == (shape[0], rank)
        gap = (matrix - mixed @ basis).norm()
        torch.testing.assert_close(gap, values[rank:].norm(), rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    "name", ["residual", "flat", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("tokens", "unet"))]
)
def test_a_network_of_low_rank_keeps_its_outputs(name):
    """Weights that have half the rank are found again, in layers that are thinner."""
    model, args = networks()[name]
    model, args = model.double(), tuple(x.double() for x in args)
    slim = simplify(model, args, by="rank:0.5")
    again = simplify(slim, args, by="rank:1")
    with torch.no_grad():
        torch.testing.assert_close(again(*args), slim(*args), rtol=1e-9, atol=1e-9)
    assert slim.demasked.after.macs < slim.demasked.before.macs
    layer = {"residual": "a", "flat": "a", "tokens": "layer.linear1", "unet": "b"}[name]
    names = dict(slim.named_parameters())
    assert f"{layer}.basis.weight" in names and f"{layer}.weight" in names


def test_a_rank_that_saves_nothing_stays_one_layer():
    slim = simplify(nn.Linear(6, 6).eval(), (torch.randn(2, 6),), by="rank:0.5")
    assert [n for n, _ in slim.named_parameters()] == ["weight", "bias"]
    assert torch.linalg.matrix_rank(slim.weight) == 3


# -- channels --------------------------------------------------------------------------------------


def kept_by_norm(weight, count):
    return sorted(weight.flatten(1).norm(dim=1).argsort(descending=True)[:count].tolist())


def test_a_hidden_layer_keeps_its_largest_units():
    model, args = networks()["flat"]
    slim = simplify(model, args, by="channels:0.5")
    kept = kept_by_norm(model.a.weight, 5)
    assert sorted(slim.demasked.cuts["a.weight"].kept[0]) == kept
    with torch.no_grad():
        hidden = F.relu(model.a(args[0].flatten(1)))
        mask = torch.zeros(10).index_fill(0, torch.tensor(kept), 1)
        torch.testing.assert_close(slim(*args), model.b(hidden * mask))


def test_a_residual_stream_is_cut_as_one():
    """All that add to it and all that read it keep the same channels: no scatter is left."""
    model, args = networks()["residual"]
    slim = simplify(model, args, by="channels:0.5")
    assert slim.stem.weight.shape[0] == 3 == slim.b.weight.shape[0]
    assert slim.head.weight.shape == (5, 3) and slim.a.weight.shape[:2] == (4, 3)
    cuts = slim.demasked.cuts
    assert sorted(cuts["stem.weight"].kept[0]) == sorted(cuts["b.weight"].kept[0])
    assert not slim.demasked.effects
    with torch.no_grad():
        x, kept = args[0], torch.tensor(sorted(cuts["stem.weight"].kept[0]))
        mask = torch.zeros(6).index_fill(0, kept, 1).view(1, -1, 1, 1)
        inner = torch.zeros(8).index_fill(0, torch.tensor(cuts["a.weight"].kept[0]), 1)
        y = F.relu(model.bn(model.stem(x))) * mask
        z = model.bnb(model.b(F.relu(model.bna(model.a(y))) * inner.view(1, -1, 1, 1))) * mask
        expected = model.head(F.relu(y + z).mean((2, 3)))
        torch.testing.assert_close(slim(x), expected)


def test_a_depthwise_layer_is_cut_with_the_one_before():
    model, args = networks()["depthwise"]
    slim = simplify(model, args, by="channels:0.25")
    assert slim.a.weight.shape[0] == slim.d.weight.shape[0] == slim.b.weight.shape[1] == 2


def test_everything_is_kept_where_all_is_asked_for():
    model, args = networks()["unet"]
    slim = simplify(model, args, by="channels:1")
    with torch.no_grad():
        torch.testing.assert_close(slim(*args), model(*args))


# -- smaller images --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic", "area"])
@pytest.mark.parametrize(("full", "small"), [(8, 4), (7, 3), (9, 4), (5, 1)])
def test_resampling_keeps_constants(full, small, mode):
    for before, after in ((full, small), (small, full)):
        made = downsample.matrix_of(before, after, mode).sum(1)
        torch.testing.assert_close(made, torch.ones(after, dtype=torch.float64))


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic", "area"])
def test_flat_weights_keep_their_sums(mode):
    """On images of one colour a perceptron says what it said, whatever the size."""
    model, _ = networks()["flat"]
    grey = torch.rand(3, 1, 1, 1).expand(3, 1, 12, 12)
    for factor in (2, 3, 5):
        slim = simplify(model, (grey,), by=Downsample(factor, mode))
        assert slim.a.weight.shape == (10, round(12 / factor) ** 2)
        with torch.no_grad():
            torch.testing.assert_close(slim(grey), model(grey), rtol=1e-4, atol=1e-5)


def test_blocks_of_equal_pixels_lose_nothing():
    """W R x_small == W x where x is R x_small."""
    model, _ = networks()["flat"]
    blocks = torch.rand(3, 1, 6, 6).repeat_interleave(2, 2).repeat_interleave(2, 3)
    slim = simplify(model.double(), (blocks.double(),), by="downsample:2:nearest")
    with torch.no_grad():
        torch.testing.assert_close(slim(blocks.double()), model(blocks.double()))


def test_convolutions_run_on_the_smaller_image():
    model, args = networks()["residual"]
    slim = simplify(model, args, by="downsample:2")
    small = F.interpolate(args[0], scale_factor=0.5, mode="bilinear")
    with torch.no_grad():
        torch.testing.assert_close(slim(*args), model(small))


def test_images_come_out_in_full_size():
    model, args = networks()["unet"]
    slim = simplify(model, args, by="downsample:2:nearest")
    with torch.no_grad():
        small = model(F.interpolate(args[0], scale_factor=0.5, mode="nearest"))
        torch.testing.assert_close(slim(*args), F.interpolate(small, scale_factor=2.0))


def test_positions_of_tokens_are_resampled_and_the_class_token_is_not():
    model, args = networks()["tokens"]
    slim = simplify(model, args, by="downsample:2:bilinear")
    grid = model.pos[:, 1:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    small = F.interpolate(grid, scale_factor=0.5, mode="bilinear").flatten(2).transpose(1, 2)
    torch.testing.assert_close(slim.pos[:, 1:], small)
    assert torch.equal(slim.pos[:, :1], model.pos[:, :1])
    copy = networks()["tokens"][0]
    copy.pos = nn.Parameter(torch.cat([model.pos[:, :1], small], 1))
    with torch.no_grad():
        half = F.interpolate(args[0], scale_factor=0.5, mode="bilinear")
        torch.testing.assert_close(slim(*args), copy(half), rtol=1e-4, atol=1e-5)


def test_a_size_that_cannot_shrink_is_refused_with_the_call():
    model, args = networks()["unet"]
    with pytest.raises(BadInput, match=r"cat.*joins axes of"):
        simplify(model, args, by="downsample:3")

    class Cropped(nn.Module):
        def forward(self, x):
            return F.conv2d(x, torch.ones(1, 3, 1, 1))[:, :, 2:9]

    with pytest.raises(BadInput, match="picks positions along an axis that shrinks"):
        simplify(Cropped(), (torch.randn(2, 3, 12, 12),), by="downsample:2")


# -- texts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "one", [Bits(8), Bits(4, 64), Exponents(), LowRank(0.25), Channels(0.5), Downsample(2), Downsample(1.5, "area")]
)
def test_a_text_gives_its_simplifier(one):
    assert simplifier(one.text()) == one == simplifier(one)


@pytest.mark.parametrize(
    "text", ["", "bit:8", "bits", "bits:0", "bits:17", "bits:x", "bits:8:0", "exponents:2",
             "rank:0", "rank:1.5", "channels:", "channels:2", "downsample:1", "downsample:2:cubic",
             "downsample:nan"]
)  # fmt: skip
def test_texts_that_mean_nothing_are_refused(text):
    with pytest.raises(BadInput):
        simplifier(text)


def test_layers_and_rows_of_a_network():
    from demask.facts.analysis import Analysis
    from demask.ops import TABLE
    from demask.shrink.pipeline import capture_program

    program = capture_program(*NETWORKS["unet"], None, None)
    found = layers.layers_of(Analysis(program, TABLE))
    assert [(one.name, one.rows, one.axis) for one in found] == [
        ("a", (0,), 1),
        ("b", (0,), 1),
        ("up", (1,), 1),
        ("c", (0,), 1),
    ]
    for one in found:
        weight = program.constants[one.weight].tensor
        matrix = layers.by_rows(weight, one.rows)
        assert torch.equal(layers.from_rows(matrix, weight, one.rows), weight)
