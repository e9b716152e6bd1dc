"""The products that gpu_sparse.py times: layers of language models with random weights, and
patterns of really pruned networks.

Random weights are like those of the Deep Learning Matrix Collection: |w| = |z| exp(a g_i + b h_j)
with normal z, g, h, of which the largest stay; a and b give rows and columns whose lengths vary as
much as in magnitude-pruned Transformers (coefficients of variation 0.25 and 0.21).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, pi, sqrt
from pathlib import Path
from statistics import NormalDist
from zipfile import ZipFile

import torch
from torch import Tensor

import dlmc

LAYERS = ((4096, 4096), (8192, 8192), (28672, 8192))
COLUMNS = (16, 64, 1, 256, 1024)
SPARSITIES = (0.7, 0.8, 0.9)
ROWS_VARY, COLUMNS_VARY = 0.25, 0.21
PIXELS = {"group1": 3136, "group2": 784, "group3": 196, "group4": 49}  # of ResNet-50's stages


@dataclass(frozen=True, slots=True)
class Problem:
    """task: "spmm" w [m, k] @ x [k, n]; "transposed" w.T @ y [m, n]; "sddmm" a [m, n] @ b [k, n].T
    at w. make: of a generator, the mask [m, k] on its device."""

    suite: str
    name: str
    task: str
    m: int
    k: int
    n: int
    sparsity: float
    dtype: torch.dtype
    make: Callable[[torch.Generator], Tensor]

    @property
    def title(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.task} {self.name} {self.m}×{self.k}, n={self.n}, {self.sparsity:.0%}, {kind}"


def spread_of(varies: float, density: float, length: int) -> float:
    """The a for which lengths vary so, beyond what chance alone does."""
    normal = NormalDist()
    t = normal.inv_cdf(1 - density / 2)
    gradient = t * exp(-t * t / 2) / sqrt(2 * pi) / (density / 2)
    return sqrt(max(varies**2 - (1 - density) / (density * length), 0.0)) / gradient


def draw_mask(m: int, k: int, sparsity: float, generator: torch.Generator) -> Tensor:
    """A mask [m, k] of this sparsity.

    >>> mask = draw_mask(512, 1024, 0.9, torch.Generator().manual_seed(0))
    >>> lengths = mask.sum(1).float()
    >>> round(mask.float().mean().item(), 2), round((lengths.std() / lengths.mean()).item(), 1)
    (0.1, 0.2)
    """
    density = 1 - sparsity
    where = {"generator": generator, "device": generator.device}
    size = torch.randn(m, k, **where).abs_()
    size *= (spread_of(ROWS_VARY, density, k) * torch.randn(m, 1, **where)).exp_()
    size *= (spread_of(COLUMNS_VARY, density, m) * torch.randn(1, k, **where)).exp_()
    places = torch.randint(m * k, (min(m * k, 1 << 20),), **where)
    sample = size.view(-1)[places].sort().values
    return size > sample[int(sparsity * (len(sample) - 1))]


def layer(task: str, m: int, k: int, n: int, sparsity: float, dtype: torch.dtype = torch.bfloat16) -> Problem:
    """A layer of a language model with random weights."""
    return Problem("A", "layer", task, m, k, n, sparsity, dtype, partial(draw_mask, m, k, sparsity))


def layers(
    sizes: Sequence[tuple[int, int]] = LAYERS,
    columns: Sequence[int] = COLUMNS,
    sparsities: Sequence[float] = SPARSITIES,
) -> Iterator[Problem]:
    """Suite A: bfloat16 layers of language models; gradients of x and of values for one of them."""
    middle = sizes[min(1, len(sizes) - 1)]
    for n in columns:  # what matters most comes first
        tasks = [("spmm", size) for size in sizes]
        tasks += [("transposed", middle), ("sddmm", middle)] if n in (columns[0], 256) else []
        for sparsity in sparsities:
            for task, (m, k) in tasks:
                yield layer(task, m, k, n, sparsity)


def stored(path: Path, name: str, generator: torch.Generator) -> Tensor:
    """A mask of the collection."""
    with ZipFile(path) as archive:
        return dlmc.parsed(archive.read(name).decode()).to(generator.device)


def pruned(path: Path, every: int, columns: Sequence[int] = ()) -> Iterator[Problem]:
    """Suite B: every so many matrices of the collection, float32, with these numbers of columns, else
    Transformers with 256 and 2048, ResNet-50 with as many as a picture has pixels there."""
    with ZipFile(path) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".smtx"))
        heads = {name: archive.read(name).split(b"\n", 1)[0].decode() for name in names[::every]}
    for name, head in heads.items():
        m, k, count = (int(word) for word in head.replace(",", " ").split())
        network, short = name.split("/")[0], Path(name).stem
        pixels = [n for group, n in PIXELS.items() if group in short] or [12544]
        for n in columns or ((256, 2048) if network == "transformer" else pixels):
            mask, sparsity = partial(stored, path, name), 1 - count / (m * k)
            kind = f"{network} {short.replace('_fully_connected', '')[-40:]}"
            yield Problem("B", kind, "spmm", m, k, n, sparsity, torch.float32, mask)
