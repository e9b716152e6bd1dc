"""What kernels on a GPU are given beside a matrix in CSR: tasks, a bitmap, its transpose.

All of it follows from the positions of nonzeros alone and is kept as long as their row starts live:
values may change from call to call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.kernels.plan_cache import TensorCache, identity, version
from demask.sparse.csr_matrix import CsrMatrix, row_of
from demask.sparse.reference import check_indices

TILE, LONG = 64, 128  # of a bitmap, as `kernels.gpu.bitmap` has them
VECTOR = 4  # nonzeros per load
SHORTEST = 128  # nonzeros below which no row is split
SHARES = 16  # tasks that a processor should get at least
SIZES = 8  # of which `Form.beside` keeps what is made
Made = TypeVar("Made")


class Tasks(NamedTuple):
    """Rows and parts of rows, in the order in which programs take them. int32.

    begins, ends: of their nonzeros. targets: the row of the output, or -1 - slot for parts.
    rows, firsts, counts: of rows in parts: the row, its first slot, how many it has.
    """

    begins: Tensor
    ends: Tensor
    targets: Tensor
    rows: Tensor
    firsts: Tensor
    counts: Tensor
    slots: int


class Bitmap(NamedTuple):
    """masks [tiles, high, 2], starts [tiles, high] int32, as `kernels.gpu.bitmap` says."""

    masks: Tensor
    starts: Tensor
    high: int
    tiles: int


class TransposedMatrix(NamedTuple):
    """The transposed matrix: CSR, and which of the values its values are (int64)."""

    crow: Tensor
    col: Tensor
    order: Tensor


def snake(groups: int, processors: int) -> np.ndarray:
    """The order of sorted groups that are dealt to processors to and fro.

    >>> snake(7, 3).tolist()
    [0, 1, 2, 5, 4, 3, 6]
    """
    order = np.arange(groups)
    for first in range(processors, groups, 2 * processors):
        order[first : first + processors] = order[first : first + processors][::-1]
    return order


def parted(crow: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(row, begin, end, parts of that row) of every task: rows in parts of at most so many.

    >>> [part.tolist() for part in parted(np.array([0, 5, 5, 7]), 4)]
    [[0, 0, 1, 2], [0, 4, 5, 5], [4, 5, 5, 7], [2, 2, 1, 1]]
    """
    starts, counts = crow[:-1].astype(np.int64), np.diff(crow.astype(np.int64))
    parts = np.maximum(-(-counts // longest), 1)
    row = np.repeat(np.arange(len(counts)), parts)
    within = np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)
    begin = starts[row] + within * longest
    return row, begin, np.minimum(begin + longest, starts[row] + counts[row]), parts[row]


def deal_tasks(
    crow: np.ndarray, names: np.ndarray | None, processors: int, together: int,
    longest: int | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The arrays of `Tasks`, on the host: sorted by length, groups of `together` that are similar,
    dealt to `processors` to and fro; rows longer than `longest` in parts.

    >>> made = deal_tasks(np.array([0, 1, 4, 4, 6]), None, 2, 1)  # 1, 3, 0, 2 nonzeros
    >>> made["targets"].tolist()
    [1, 3, 2, 0]
    """
    entries = int(crow[-1]) if len(crow) else 0
    if longest is None:
        fair = entries // (SHARES * processors)
        longest = -(-max(SHORTEST, fair) // VECTOR) * VECTOR
    row, begin, end, parts = parted(crow, longest)
    name = np.arange(len(crow) - 1) if names is None else names
    split = parts > 1
    targets = np.where(split, -split.cumsum(), name[row])  # -1 - slot, slots from 0 up
    order = np.argsort(begin - end, kind="stable")
    whole = len(order) // together
    groups = order[: whole * together].reshape(whole, together)[snake(whole, processors)]
    order = np.concatenate([groups.reshape(-1), order[whole * together :]])
    heads = np.flatnonzero(split & (begin == crow[row]))
    found = {
        "begins": begin[order], "ends": end[order], "targets": targets[order],
        "rows": name[row[heads]], "firsts": -1 - targets[heads], "counts": parts[heads],
    }  # fmt: skip
    return {key: value.astype(np.int32) for key, value in found.items()}


def full(m: CsrMatrix) -> CsrMatrix:
    """The matrix with its empty rows; those that are there rise."""
    if m.names is None:
        return m
    counts = torch.zeros(m.size[0], dtype=torch.int64, device=m.crow.device)
    counts[m.names.long()] = m.crow.diff().long()
    crow = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(m.crow.dtype)
    return m._replace(crow=crow, names=None)


def bitmap_of(m: CsrMatrix) -> Bitmap | None:
    """The bitmap of a matrix; None if its rows, or columns of a row, do not rise."""
    rows, columns = m.size
    row, col = row_of(m), m.col.long()
    place = row * columns + col
    if (place[1:] <= place[:-1]).any():
        return None
    m = full(m)
    high, tiles = -(-rows // LONG) * LONG, -(-columns // TILE)
    at = col // TILE * high + row
    counts = torch.bincount(at, minlength=tiles * high).view(tiles, high)
    starts = torch.nn.functional.pad(m.crow[:-1].long(), (0, high - rows))
    starts = starts + counts.cumsum(0) - counts
    words = torch.zeros(tiles * high * 2, dtype=torch.int64, device=col.device)
    words.index_add_(0, at * 2 + col % TILE // 32, torch.ones_like(col) << col % 32)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)  # bits of a signed word
    masks = words.to(torch.int32).view(tiles, high, 2)
    return Bitmap(masks, starts.to(torch.int32), high, tiles)


def turned_of(m: CsrMatrix) -> TransposedMatrix:
    """The transpose of a matrix."""
    order = torch.argsort(m.col, stable=True)
    counts = torch.bincount(m.col, minlength=m.size[1])
    crow = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    return TransposedMatrix(crow, row_of(m)[order].to(torch.int32), order)


@lru_cache(maxsize=16)
def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; 4 stand for them where kernels are interpreted."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


class MatrixFormats:
    """What is made of one matrix when it is first asked for. It holds no tensor of the matrix, so
    that it goes with it."""

    def __init__(self, m: CsrMatrix) -> None:
        check_indices(m.crow, m.col, m.size[1])
        if m.names is not None and m.names.numel():
            least, most = int(m.names.min()), int(m.names.max())
            if not 0 <= least <= most < m.size[0]:
                raise BadInput(f"expected rows below {m.size[0]}, got {least} to {most}")
        self._tasks: dict[tuple[int, int | None], Tasks] = {}
        self._made: dict[str, Any] = {}
        self._beside: dict[Hashable, Any] = {}

    def tasks(self, m: CsrMatrix, together: int, longest: int | None = None) -> Tasks:
        """Tasks of spmm_rows in groups of `together`."""
        if (together, longest) not in self._tasks:
            names = None if m.names is None else m.names.cpu().numpy()
            made = deal_tasks(
                m.crow.cpu().numpy(), names, processors_of(m.crow.device), together, longest
            )
            tensors = {k: torch.from_numpy(v).to(m.crow.device) for k, v in made.items()}
            slots = int(made["counts"].sum())
            self._tasks[together, longest] = Tasks(**tensors, slots=slots)
        return self._tasks[together, longest]

    def parts(self, m: CsrMatrix, entries: int) -> tuple[Tensor, Tensor, Tensor]:
        """Begins, ends and rows (int32) of tasks of sddmm_rows: so many entries of one row."""
        key = f"parts {entries}"
        if key not in self._made:
            row, begin, end, _ = parted(m.crow.cpu().numpy(), entries)
            names = None if m.names is None else m.names.cpu().numpy()
            row = row if names is None else names[row]
            there = end > begin
            self._made[key] = tuple(
                torch.from_numpy(t[there].astype(np.int32)).to(m.crow.device)
                for t in (begin, end, row)
            )
        return self._made[key]

    def bitmap(self, m: CsrMatrix) -> Bitmap | None:
        """None if rows, or columns of a row, do not rise."""
        if "bitmap" not in self._made:
            self._made["bitmap"] = bitmap_of(m)
        return self._made["bitmap"]

    def turned(self, m: CsrMatrix) -> TransposedMatrix:
        """The transpose; on the CPU, made again where indices are no longer those it was made of:
        torch counts no writes into those of a sparse_csr tensor."""
        indices = [] if m.crow.is_cuda else [t for t in (m.crow, m.col, m.names) if t is not None]
        copies, made = self._made.get("turned", ((), None))
        if made is None or not all(map(_equal, indices, copies)):
            check_indices(m.crow, m.col, m.size[1])
            made = turned_of(m)
            self._made["turned"] = [t.clone() for t in indices], made
        return made

    def beside(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What is made of the indices for some sizes, those of the last few kept."""
        if key not in self._beside:
            if len(self._beside) >= SIZES:
                self._beside.clear()
            self._beside[key] = make()
        return self._beside[key]

    def narrow(self, m: CsrMatrix) -> Tensor:
        """Columns in int32, at an aligned address."""
        if m.col.dtype == torch.int32 and m.col.data_ptr() % 16 == 0 and m.col.is_contiguous():
            return m.col
        if "col" not in self._made:
            self._made["col"] = m.col.to(torch.int32, copy=True).contiguous()
        return self._made["col"]


FORMS: TensorCache[tuple[tuple[int, ...], MatrixFormats]] = (
    TensorCache()
)  # versions of indices, form


def form_of(m: CsrMatrix) -> MatrixFormats:
    """The form of a matrix, kept as long as its indices live and nothing is written to them;
    BadInput for indices that do not fit.

    There may be any number: a recorded CUDA graph reads the forms of its matrices.
    """
    parts = [t for t in (m.crow, m.col, m.names) if t is not None]
    key = (m.size, *identity(parts))
    versions = tuple(map(version, parts))
    known = FORMS.entries.get(key)
    if known is not None and known[0] == versions:
        return known[1]
    return FORMS.put(key, parts, (versions, MatrixFormats(m)))[1]


def _equal(a: Tensor, b: Tensor) -> bool:
    """As torch.equal, of whole numbers on the CPU, faster."""
    return bool((a.numpy() == b.numpy()).all())
