"""Inputs of every kind against their definition: not finite, empty, strided, of other types."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demask.pilot.chains.chain_op import chain
from demask.sparse import SparseConv1d, SparseConv2d, SparseLinear, sddmm, spmm

COLUMNS, ROWS = 20, 24
#: relative to the largest output
CLOSE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")


def weight(*shape: int) -> Tensor:
    """Quarters, which every type holds; a row and a column of zeros."""
    g = torch.Generator().manual_seed(0)
    w = torch.randint(-8, 9, shape, generator=g) / 4 * (torch.rand(shape, generator=g) < 0.3)
    w[0], w[:, 3] = 0, 0
    return w


def products(w: Tensor, columns: Tensor) -> Tensor:
    """w [o, k] times columns [n, k, l], of what is not 0 in w alone."""
    w = w.detach().double().flatten(1)[None, :, :, None]
    return torch.where(w != 0, w * columns[:, None], 0).sum(2)


@dataclass(frozen=True)
class Case:
    """run(x) and, of x in float64, exact(x); the input's shape."""

    run: Callable[[Tensor], Tensor]
    exact: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]


def of_layer(kind: Any, dense: Any, shape: tuple[int, ...]) -> Case:
    with torch.no_grad():
        dense.weight.copy_(weight(*dense.weight.shape))
        dense.bias.copy_(weight(2, len(dense.bias))[1])
    sparse = {t: kind.from_dense(copy.deepcopy(dense)).to(t).eval() for t in CLOSE}

    def exact(x: Tensor) -> Tensor:
        if isinstance(dense, nn.Linear):
            y = products(dense.weight, x[:, :, None])[..., 0]
        else:
            images = x if x.ndim == 4 else x[:, :, None]
            size = (1, *dense.kernel_size)[-2:]
            out = [n - k + 1 for n, k in zip(images.shape[2:], size, strict=True)]
            y = products(dense.weight, F.unfold(images, size)).unflatten(2, out)
            y = y if x.ndim == 4 else y[:, :, 0]
        return y + dense.bias.detach().double().reshape(-1, *[1] * (y.ndim - 2))

    return Case(lambda x: sparse[x.dtype](x), exact, shape)


def of_chain(mode: str) -> Case:
    """All products, those with 0 too, as torch has it."""
    w = {t: weight(ROWS, COLUMNS).to(t) for t in CLOSE}
    act = F.relu if "relu" in mode else lambda y: y
    return Case(lambda x: chain(x, [w[x.dtype]], mode), lambda x: act(x @ w[x.dtype].T), (2, COLUMNS))


def of_spmm(columns: int) -> Case:
    w = weight(ROWS, COLUMNS)
    return Case(lambda x: spmm(w.to(x.dtype).to_sparse_csr(), x), lambda x: products(w, x[None])[0], (COLUMNS, columns))


def of_sddmm() -> Case:
    mask = weight(ROWS, ROWS)

    def run(x: Tensor) -> Tensor:
        return sddmm(x, x.T, mask.to(x.dtype).to_sparse_csr()).values()

    return Case(run, lambda x: (x @ x.T)[mask != 0], (ROWS, 7))


CASES = {
    "linear": of_layer(SparseLinear, nn.Linear(COLUMNS, ROWS), (5, COLUMNS)),
    "one row": of_layer(SparseLinear, nn.Linear(COLUMNS, ROWS), (1, COLUMNS)),
    "signals": of_layer(SparseConv1d, nn.Conv1d(COLUMNS, ROWS, 3), (2, COLUMNS, 9)),
    "images": of_layer(SparseConv2d, nn.Conv2d(COLUMNS, ROWS, 3), (2, COLUMNS, 5, 6)),
    **{mode: of_chain(mode) for mode in ("dense", "columns", "certified+relu", "two+relu")},
    "spmm": of_spmm(7),
    "spmm, one column": of_spmm(1),
    "sddmm": of_sddmm(),
}


def put(value: float, at: slice = slice(17, 18)) -> Callable[[Tensor], Tensor]:
    """The input with another value in some places."""

    def changed(x: Tensor) -> Tensor:
        x.view(-1)[at] = value
        return x

    return changed


def apart(x: Tensor) -> Tensor:
    """Every other element of memory that begins at an odd one."""
    memory = torch.full((2 * x.numel() + 3,), torch.nan, dtype=x.dtype)[3:]
    return memory[::2].view(x.shape).copy_(x)


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as usual": lambda x: x,
    "NaN": put(torch.nan),
    "infinite": put(torch.inf),
    "both infinities": lambda x: put(-torch.inf, slice(5, 6))(put(torch.inf)(x)),
    "all NaN": put(torch.nan, slice(None)),
    "zeros": put(0.0, slice(None)),
    "negative zeros": put(-0.0, slice(None)),
    "denormal": lambda x: x * 1e-40,
    "large": lambda x: x * 1e15,
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "apart": apart,
    "expanded": lambda x: x[:1].expand(x.shape),
    "misaligned": lambda x: torch.cat([x.new_ones(1), x.reshape(-1)])[1:].view(x.shape),
    "gradients": lambda x: x.requires_grad_(),
    "float64": lambda x: x.double(),
    "bfloat16": lambda x: x.bfloat16(),
    "float16": lambda x: x.half(),
    "none at all": lambda x: x[:0],
}


def close(found: Tensor, wanted: Tensor, name: str) -> None:
    """Equal where not finite; else near, by the largest output."""
    assert found.shape == wanted.shape, name
    limit = CLOSE[found.dtype] * wanted.nan_to_num(0, 0, 0).abs().max() if wanted.numel() else 0
    found = found.detach().double()
    torch.testing.assert_close(
        found, wanted, rtol=0, atol=float(limit) + 1e-44, equal_nan=True, msg=lambda words: f"{name}: {words}"
    )


@pytest.mark.parametrize("name", CASES)
def test_every_input(name: str) -> None:
    """Twice: the second call uses what the first has made."""
    case = CASES[name]
    for how, change in INPUTS.items():
        if how == "none at all" and name in ("spmm", "spmm, one column", "sddmm"):
            continue  # a matrix of another size
        x = torch.randn(case.shape, generator=torch.Generator().manual_seed(2))
        x = change(x.relu() if name in ("columns", "certified+relu") else x)
        wanted = case.exact(x.detach().double())
        for _ in range(2):
            close(case.run(x), wanted, how)
