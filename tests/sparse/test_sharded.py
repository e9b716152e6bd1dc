"""One matrix on several devices or machines: the product is that of the matrix, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.sparse import DCSR, shard, spmm


def drawn(m: int = 200, k: int = 96, density: float = 0.1, *, heavy: int = 0) -> Tensor:
    """heavy: a row that is full."""
    generator = torch.Generator().manual_seed(m + k)
    mask = torch.rand(m, k, generator=generator) < density
    mask[heavy] = True
    mask[m // 2 : m // 2 + 20] = False
    return (torch.randn(m, k, generator=generator) * mask).to_sparse_csr()


@pytest.mark.parametrize("count", [1, 2, 3, 7, 200])
def test_products_are_bit_equal(count: int) -> None:
    matrix, x = drawn(), torch.randn(96, 5)
    sharded = shard(matrix, ["cpu"] * count)
    assert torch.equal(sharded @ x, spmm(matrix, x))
    bias = torch.randn(200)
    assert torch.equal(sharded(x, bias, "relu"), spmm(matrix, x, bias, "relu"))
    assert torch.equal(shard(DCSR.from_csr(matrix), ["cpu"] * count) @ x, spmm(matrix, x))
    starts, ends = zip(*sharded.rows, strict=True)
    assert starts == (0, *ends[:-1]) and ends[-1] == 200
    assert sum(sharded.nonzeros) == matrix.values().numel()
    assert str(sharded).startswith(f"200 x 96 in {count} shards\ncpu: rows 0 to ")


def test_shards_have_about_as_many_nonzeros() -> None:
    matrix = drawn(2000, 64)
    total = matrix.values().numel()
    for shares in (None, [1, 1, 1, 1], [1, 2, 3, 4]):
        counts = shard(matrix, ["cpu"] * 4, shares=shares).nonzeros
        for count, share in zip(counts, shares or [1] * 4, strict=True):
            assert abs(count / total - share / sum(shares or [1] * 4)) < 0.03


def test_empty_matrices_and_full_rows() -> None:
    empty = torch.zeros(6, 4).to_sparse_csr()
    assert shard(empty, ["cpu"] * 3).rows == ((0, 2), (2, 4), (4, 6))
    assert torch.equal(shard(empty, ["cpu"] * 6) @ torch.ones(4, 2), torch.zeros(6, 2))
    first = torch.zeros(4, 1000)
    first[0] = 1
    assert shard(first.to_sparse_csr(), ["cpu"] * 3).rows == ((0, 1), (1, 2), (2, 4))


def test_the_matrix_is_copied_and_x_has_a_gradient() -> None:
    matrix, x = drawn(), torch.randn(96, 5, requires_grad=True)
    sharded = shard(matrix, ["cpu", torch.device("cpu")])
    expected = spmm(matrix, x)
    (gradient,) = torch.autograd.grad((sharded @ x).square().sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), x)[0])
    matrix.values().zero_()
    assert torch.equal(sharded @ x, expected)


@pytest.mark.parametrize(
    ("devices", "shares", "what"),
    [
        ([], None, "expected 1 to 200 devices"),
        (["cpu"] * 201, None, "expected 1 to 200 devices"),
        ("cpu", None, "expected devices, such as"),
        (["abacus"], None, "expected devices of torch"),
        (["cpu"] * 2, [1], "expected 2 shares"),
        (["cpu"] * 2, [1, 0], "expected 2 shares"),
    ],
)
def test_what_cannot_be_split_is_refused(devices: Any, shares: Any, what: str) -> None:
    with pytest.raises(BadInput, match=what):
        shard(drawn(), devices, shares=shares)


def test_operands_are_checked() -> None:
    sharded = shard(drawn(), ["cpu"] * 2)
    for x, bias in ((torch.randn(95, 2), None), (torch.randn(96), None), (torch.randn(96, 2), torch.randn(3))):
        with pytest.raises(BadInput):
            sharded(x, bias)
    with pytest.raises(BadInput):
        shard(torch.randn(3, 3), ["cpu"])


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed", reason="needs the extra for clusters")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def test_workers_of_a_cluster(client: Any) -> None:
    matrix, x, bias = drawn(), torch.randn(96, 5), torch.randn(200)
    sharded = shard(matrix, client)
    assert len(sharded.rows) == 2 and set(sharded.devices) == set(client.scheduler_info()["workers"])
    for _ in range(5):
        assert torch.equal(sharded @ x, spmm(matrix, x))
    assert torch.equal(sharded(x, bias, "relu"), spmm(matrix, x, bias, "relu"))
