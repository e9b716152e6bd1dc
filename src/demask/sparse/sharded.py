"""shard(): one sparse matrix spread over devices, or over the workers of a dask client.

Each shard has consecutive rows with about as many nonzeros, so that

    matrix @ x == cat([shard @ x for each shard])

bit for bit: no sum crosses a shard. x is copied to every device, and the parts of the result to where x is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from demask.errors import BadInput
from demask.numerics import is_number
from demask.ops.activations import ActivationLike
from demask.sparse.functional import DCSR, csr_parts, spmm


@dataclass(frozen=True, slots=True, eq=False)
class ShardedMatrix:
    """A sparse matrix [m, k] whose rows are on several devices, from `shard`.

    Attributes:
        size: (m, k).
        devices: where each shard is: texts such as "cuda:0", or addresses of dask workers.
        rows: of each shard, its first row and its last row + 1, a tuple of pairs.
        nonzeros: number of nonzeros of each shard.

    Example:
        >>> import torch
        >>> from demask.sparse import shard
        >>> matrix = torch.eye(4).to_sparse_csr()
        >>> sharded = shard(matrix, ["cpu", "cpu"])
        >>> sharded.rows, sharded @ torch.ones(4, 1)
        (((0, 2), (2, 4)), tensor([[1.],
                [1.],
                [1.],
                [1.]]))
    """

    size: tuple[int, int]
    devices: tuple[str, ...]
    rows: tuple[tuple[int, int], ...]
    nonzeros: tuple[int, ...]
    shards: tuple[Any, ...] = field(repr=False)
    client: Any = field(default=None, repr=False)

    def __matmul__(self, x: Tensor) -> Tensor:
        """The product with x [k, n]: [m, n], on the device of x."""
        return self(x)

    def __call__(self, x: Tensor, bias: Tensor | None = None, activation: ActivationLike = None) -> Tensor:
        """activation(matrix @ x + bias) [m, n], on the device of x; what `spmm` returns.

        Args:
            x: dense, [k, n], of the matrix's dtype, on any device. On devices it may need a gradient; on workers it
                gets none.
            bias: [m], one per row. Default: none.
            activation: as of `spmm`. Default: none.

        Raises:
            BadInput: shapes or dtypes do not match.
        """
        if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[0] != self.size[1]:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise BadInput(f"expected a matrix [{self.size[1]}, n], got {shape}")
        if bias is not None and tuple(bias.shape) != (self.size[0],):
            raise BadInput(f"expected a bias of {self.size[0]} numbers, got {tuple(bias.shape)}")
        biases = [None if bias is None else bias[start:end] for start, end in self.rows]
        if self.client is not None:
            # Keys of their own: with those of contents, dask drops what is sent again while it is still read.
            (there,) = self.client.scatter([x.detach().cpu()], broadcast=True, hash=False)
            sent = [None if b is None else b.detach().cpu() for b in biases]
            futures = [
                self.client.submit(_product, one, there, b, activation, workers=[name], pure=False)
                for one, name, b in zip(self.shards, self.devices, sent, strict=True)
            ]
            return torch.cat([part.to(x.device) for part in self.client.gather(futures)])
        copies = {name: x.to(name) for name in dict.fromkeys(self.devices)}  # before any product: copies overlap
        parts = [
            spmm(one, copies[name], None if b is None else b.to(name), activation)
            for one, name, b in zip(self.shards, self.devices, biases, strict=True)
        ]
        return torch.cat([part.to(x.device) for part in parts])

    def __str__(self) -> str:
        rows = (
            f"{name}: rows {start} to {end - 1}, {count:,} nonzeros"
            for name, (start, end), count in zip(self.devices, self.rows, self.nonzeros, strict=True)
        )
        return "\n".join([f"{self.size[0]} x {self.size[1]} in {len(self.rows)} shards", *rows])


def shard(
    matrix: Tensor | DCSR, devices: Sequence[str | torch.device] | Any, *, shares: Sequence[float] | None = None
) -> ShardedMatrix:
    """A sparse matrix spread over devices or machines, by rows with about as many nonzeros on each.

    Args:
        matrix: torch.sparse_csr or DCSR [m, k], floating-point; the shards are copies.
        devices: of torch, such as ["cuda:0", "cuda:1"]; one may be named several times. Or a client of
            dask.distributed: a shard for each of its workers.
        shares: work of each device in proportion to the others, as of their speeds: numbers above 0. Default: None,
            equal.

    Returns:
        A `ShardedMatrix`: `sharded @ x`, `sharded(x, bias, activation)`; str() says which rows are where.

    Raises:
        BadInput: the matrix has another layout; there are no devices or more than rows; or shares do not fit.

    Example:
        >>> import torch
        >>> from demask.sparse import shard, spmm
        >>> matrix = (torch.randn(64, 32) * (torch.rand(64, 32) < 0.1)).to_sparse_csr()
        >>> x = torch.randn(32, 8)
        >>> torch.equal(shard(matrix, ["cpu", "cpu", "cpu"], shares=[1, 1, 2]) @ x, spmm(matrix, x))
        True
    """
    csr = matrix.to_csr() if isinstance(matrix, DCSR) else matrix
    crow, col, values = csr_parts(csr)
    client: Any = devices if hasattr(devices, "scheduler_info") else None
    names = [*client.scheduler_info(n_workers=-1)["workers"]] if client is not None else _device_names(devices)
    size = (csr.shape[0], csr.shape[1])
    if not 0 < len(names) <= max(size[0], 1):
        raise BadInput(f"expected 1 to {size[0]} devices, as many as rows, got {len(names)}")
    rows = _split(crow, _checked_shares(shares, len(names)))
    parts = []
    for start, end in rows:
        first, last = int(crow[start]), int(crow[end])
        arrays = (crow[start : end + 1] - crow[start], col[first:last].clone(), values.detach()[first:last].clone())
        parts.append(torch.sparse_csr_tensor(*arrays, (end - start, size[1]), check_invariants=False))
    counts = tuple(part.values().numel() for part in parts)
    if client is not None:
        arrays = [(part.crow_indices(), part.col_indices(), part.values(), tuple(part.shape)) for part in parts]
        sent = [client.scatter([one], workers=[name], hash=False)[0] for one, name in zip(arrays, names, strict=True)]
        return ShardedMatrix(size, tuple(names), rows, counts, tuple(sent), client)
    there = tuple(part.to(name) for part, name in zip(parts, names, strict=True))
    return ShardedMatrix(size, tuple(names), rows, counts, there)


def _device_names(devices: Any) -> list[str]:
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise BadInput(f"expected devices, such as ['cuda:0', 'cuda:1'], or a dask client, got {devices!r:.60}")
    try:
        return [str(torch.device(device)) for device in devices]
    except (RuntimeError, TypeError) as error:
        raise BadInput(f"expected devices of torch, such as 'cuda:0': {error}") from error


def _checked_shares(shares: Sequence[float] | None, count: int) -> list[float]:
    listed = [1.0] * count if shares is None else list(shares)
    if len(listed) != count or not all(is_number(share) and 0 < share < float("inf") for share in listed):
        raise BadInput(f"expected {count} shares above 0, one for each device, got {shares!r:.80}")
    return [float(share) for share in listed]


def _split(crow: Tensor, shares: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """Consecutive rows with about these shares of the nonzeros, one row at least for each."""
    count, parts = crow.numel() - 1, len(shares)
    # A row costs about as much as a nonzero: a matrix of empty rows is split, too.
    cost = (crow - crow[0]).double().cpu() + torch.arange(count + 1)
    wanted = torch.tensor(shares, dtype=torch.float64).cumsum(0)[:-1] / sum(shares) * cost[-1]
    ends = torch.searchsorted(cost, wanted).tolist()
    bounds = [0]
    for k, end in enumerate(ends, 1):
        bounds.append(min(max(end, bounds[-1] + 1), count - (parts - k)))
    bounds.append(count)
    return tuple(pairwise(bounds))


def _product(arrays: tuple[Any, ...], x: Tensor, bias: Tensor | None, activation: ActivationLike) -> Tensor:
    """The product of a shard, in a worker."""
    crow, col, values, size = arrays
    matrix = torch.sparse_csr_tensor(crow, col, values, size, check_invariants=False)
    with torch.no_grad():
        return spmm(matrix, x, bias, activation)
