"""Statistics of inputs against float64: means and variances of batches, of any size and layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from demask import prune
from demask.prune.scores import InputStatistics

KEYS = ("mean", "variance", "norm", "mean_magnitude")


def reference(batches: list[Tensor], axis: int) -> dict[str, Tensor]:
    """The statistics of all values at once, in float64."""
    rows = torch.cat([x.double().movedim(axis, -1).reshape(-1, x.shape[axis]) for x in batches])
    return {
        "mean": rows.mean(0),
        "variance": (rows - rows.mean(0)).square().mean(0),
        "norm": rows.square().sum(0).sqrt(),
        "mean_magnitude": rows.abs().mean(0),
    }


def statistics_of(batches: list[Tensor], axis: int) -> InputStatistics:
    statistics = InputStatistics.empty(batches[0].shape[axis])
    for batch in batches:
        statistics.add(batch, axis)
    return statistics


def check(batches: list[Tensor], axis: int, rtol: float) -> None:
    mine, expected = statistics_of(batches, axis), reference(batches, axis)
    assert mine.count == sum(b.numel() // b.shape[axis] for b in batches)
    for key in KEYS:
        assert getattr(mine, key).dtype == torch.float64
        torch.testing.assert_close(getattr(mine, key), expected[key], rtol=rtol, atol=0)


@pytest.mark.parametrize("mean, deviation", [(0, 1), (3, 0.5), (1000, 0.1), (-3e4, 1), (1e-6, 1e-9)])
def test_variances_are_right_where_the_mean_is_large(mean, deviation):
    """float32 sums of squares would lose all of a variance that is 1e-8 of the squared mean."""
    torch.manual_seed(0)
    batches = [mean + deviation * torch.randn(n, 5) for n in (7, 1, 300, 64)]
    check(batches, -1, 2e-5)


def test_batches_whose_means_differ():
    torch.manual_seed(0)
    check([shift + torch.randn(40, 3) for shift in (0.0, 1e3, -1e3, 5e4)], -1, 1e-6)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_inputs_of_several_parts_in_both_layouts(layout):
    """650,000 values: three parts. Half of them are zero, as after ReLU."""
    torch.manual_seed(0)
    x = torch.randn(26, 10, 50, 50).add(torch.arange(10.0).view(-1, 1, 1)).relu()
    check([x.to(memory_format=layout), x[:3].to(memory_format=layout)], 1, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype):
    torch.manual_seed(0)
    check([(4 + torch.randn(9, 6, 3)).to(dtype) for _ in range(3)], -1, 1e-6)
    exact = [1e8 + torch.randn(500, 2, dtype=torch.float64) for _ in range(2)]
    check(exact, -1, 1e-6)


def test_constants_have_no_variance():
    x = torch.full((1000, 4), 0.1)
    assert float(statistics_of([x, x[:7]], -1).variance.max()) < 1e-16


def test_one_vector_and_nothing():
    statistics = InputStatistics.empty(3)
    statistics.add(torch.empty(0, 3))
    assert statistics.count == 0
    statistics.add(torch.tensor([1.0, -2.0, 3.0]))
    statistics.add(torch.tensor([3.0, -2.0, 1.0]))
    assert statistics.count == 2
    assert statistics.mean.tolist() == [2.0, -2.0, 2.0]
    assert statistics.variance.tolist() == [1.0, 0.0, 1.0]
    assert statistics.mean_magnitude.tolist() == [2.0, 2.0, 2.0]


def test_calls_in_inference_mode_and_with_gradients_mix():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    x = torch.randn(16, 4)
    pruner = prune.Pruner(net, x, score=prune.Fluctuation())
    with torch.inference_mode():
        net(x[:8])
    net(x[8:]).sum().backward()
    hidden = net[1](net[0](x)).detach().double()
    expected = hidden.var(0, correction=0) * net[2].weight.detach().double().square().sum(0)
    torch.testing.assert_close(pruner.scores()["0"], expected, rtol=1e-5, atol=1e-7)


def test_nan_is_seen():
    x = torch.ones(5, 2)
    x[3, 1] = torch.nan
    assert statistics_of([x], -1).variance.isnan().tolist() == [False, True]
