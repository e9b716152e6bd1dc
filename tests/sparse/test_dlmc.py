"""The masks of a really pruned network: read right, refused where wrong, and where they belong."""

from __future__ import annotations

import doctest

import pytest
import torch

import dlmc
import networks
import sparse_networks

there = pytest.mark.skipif(not dlmc.DATA.exists(), reason="the masks are in shared/data beside the project")


@pytest.mark.parametrize("module", [dlmc, sparse_networks], ids=lambda module: module.__name__)
def test_examples_run(module) -> None:
    found = doctest.testmod(module)
    assert found.failed == 0
    assert found.attempted > 0


@pytest.mark.parametrize(
    "text",
    ["2, 3, 3\n0 1 3\n2 0 1", "2 3 3\n0 1 3\n2 0 1\n", "2, 3, 3\r\n0 1 3\r\n2 0 1\r\n"],
    ids=["commas", "blanks", "other line ends"],
)
def test_a_file_is_read(text: str) -> None:
    assert dlmc.parsed(text).tolist() == [[False, False, True], [True, True, False]]


@pytest.mark.parametrize("text", ["2, 3, 0\n0 0 0\n", "2, 3, 0\n0 0 0\n\n"])
def test_a_file_without_positions_is_read(text: str) -> None:
    assert dlmc.parsed(text).tolist() == [[False] * 3] * 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a line of rows, columns and nonzeros"),
        ("2, 3\n0 1 3\n2 0 1", "expected a line of rows, columns and nonzeros"),
        ("2, 3, 3\n0 1 3 3\n2 0 1", "expected 2 rows"),
        ("2, 3, 3\n0 1 2\n2 0 1", "expected 2 rows that end at 3"),
        ("2, 3, 3\n1 1 3\n2 0 1", "expected 2 rows"),
        ("3, 3, 3\n0 2 1 3\n2 0 1", "expected 3 rows"),
        ("2, 3, 3\n0 1 3\n2 0", "expected 3 columns below 3"),
        ("2, 3, 3\n0 1 3\n2 0 3", "expected 3 columns below 3"),
        ("2, 3, 3\n0 1 3\n2 0 -1", "expected 3 columns below 3"),
        ("2, 3, 3\n0 1 3\n2 1 1", "expected 3 positions, got 2"),
        ("2, 3, 3\n0 1 3\n2 0 one", "invalid literal|could not convert"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dlmc.parsed(text)


def test_columns_are_taps_of_channels() -> None:
    """mask[o, (y * width + x) * inputs + i] belongs to weight[o, i, y, x]."""
    outputs, inputs, height, width = 2, 3, 4, 5
    flat = torch.rand(outputs, height * width * inputs) < 0.5
    made = dlmc.shaped(flat, torch.Size([outputs, inputs, height, width]))
    for o in range(outputs):
        for i in range(inputs):
            for y in range(height):
                for x in range(width):
                    assert made[o, i, y, x] == flat[o, (y * width + x) * inputs + i]


def test_a_mask_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight of \(2, 3, 4, 5\), got \(2, 59\)"):
        dlmc.shaped(torch.ones(2, 59, dtype=torch.bool), torch.Size([2, 3, 4, 5]))


@pytest.mark.sampled(9)
@there
@pytest.mark.parametrize("sparsity", dlmc.SPARSITIES)
def test_every_layer_has_its_mask(sparsity: float) -> None:
    with torch.device("meta"):
        model = networks.torchvision().models.resnet50(weights=None)
    masks, layers = dlmc.masks(sparsity), sparse_networks.layers(model)
    assert masks.keys() == layers.keys()
    assert len(masks) == 54
    kept = sum(int(dlmc.shaped(m, layers[n].weight.shape).sum()) for n, m in masks.items())
    assert kept / sum(mask.numel() for mask in masks.values()) == pytest.approx(1 - sparsity, abs=2e-6)


@there
def test_the_order_of_columns_is_that_of_the_patterns() -> None:
    """Read as torch lays weights out, the taps would look alike; the centre of a kernel counts."""
    mask = dlmc.masks(0.9)["conv1"]
    shares = dlmc.shaped(mask, torch.Size([64, 3, 7, 7])).float().mean((0, 1))
    corners = shares[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert shares[2:5, 2:5].mean() > 3 * corners.max()
    other = mask.view(64, 3, 7, 7).float().mean((0, 1))
    assert other[2:5, 2:5].mean() < 2 * other[[0, 0, -1, -1], [0, -1, 0, -1]].max()


@there
def test_what_makes_a_channel_goes_with_what_reads_it() -> None:
    """Per layer: nonzeros in the row that makes a channel, and those that read that channel."""
    masks = dlmc.masks(0.9)
    found = []
    for name in masks:
        if name.endswith("conv2"):
            made = masks[name.removesuffix("2") + "1"].sum(1)
            width = len(made)
            read = dlmc.shaped(masks[name], torch.Size([width, width, 3, 3])).sum((0, 2, 3))
            found.append(torch.corrcoef(torch.stack([made, read]).double())[0, 1])
    assert len(found) == 16
    assert torch.stack(found).mean() > 0.2
