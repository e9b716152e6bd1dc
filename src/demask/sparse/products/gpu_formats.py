"""Data that GPU kernels need in addition to a CSR matrix: tasks, a bitmap, its transpose.

All of it depends only on the positions of nonzeros and is cached as long as the row starts live;
values may change from call to call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from demask.errors import BadInput
from demask.exec.steps.segment_weights import check_indices
from demask.kernels.plan_cache import TensorCache, identity, version
from demask.sparse.csr_matrix import CsrMatrix, row_of

TILE, LONG = 64, 128  # of a bitmap, as in `kernels.gpu`
VECTOR = 8  # nonzeros per load
ALIGNED = 32  # bytes: a vector of 32-bit values or columns
SHORTEST = 128  # nonzeros below which no row is split
SHARES = 16  # fewest tasks per processor, if possible
SIZES = 8  # entries of `MatrixFormats.cached`
Derived = TypeVar("Derived")


class Tasks(NamedTuple):
    """Rows and parts of rows, in the order in which programs compute them. int32.

    begins, ends: of their nonzeros. targets: the row of the output, or -1 - slot for parts. rows,
    firsts, counts: of split rows: the row, its first slot, its number of parts.
    """

    begins: Tensor
    ends: Tensor
    targets: Tensor
    rows: Tensor
    firsts: Tensor
    counts: Tensor
    slots: int


class Bitmap(NamedTuple):
    """masks [tiles, high] int64, starts [tiles, high] int32, as described in `kernels.gpu`."""

    masks: Tensor
    starts: Tensor
    high: int
    tiles: int


class TransposedMatrix(NamedTuple):
    """The transposed matrix: CSR, and the number of the original value of each value (int64)."""

    crow: Tensor
    col: Tensor
    order: Tensor


def snake(groups: int, processors: int) -> np.ndarray:
    """The order of sorted groups that are assigned to processors back and forth.

    >>> snake(7, 3).tolist()
    [0, 1, 2, 5, 4, 3, 6]
    """
    order = np.arange(groups)
    for first in range(processors, groups, 2 * processors):
        order[first : first + processors] = order[first : first + processors][::-1]
    return order


def parted(crow: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(row, begin, end, parts of that row) of every task: rows in parts of at most `longest`.

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
    crow: np.ndarray, names: np.ndarray | None, processors: int, together: int, longest: int | None = None
) -> dict[str, np.ndarray]:
    """The arrays of `Tasks`, on the host.

    Tasks are sorted by length; groups of `together` similar ones are assigned to `processors` back
    and forth. Rows longer than `longest` are split.

    >>> tasks = deal_tasks(np.array([0, 1, 4, 4, 6]), None, 2, 1)  # 1, 3, 0, 2 nonzeros
    >>> tasks["targets"].tolist()
    [1, 3, 2, 0]
    """
    entries = int(crow[-1]) if len(crow) else 0
    if longest is None:
        per_share = entries // (SHARES * processors)
        longest = -(-max(SHORTEST, per_share) // VECTOR) * VECTOR
    row, begin, end, parts = parted(crow, longest)
    name = np.arange(len(crow) - 1) if names is None else names
    split = parts > 1
    targets = np.where(split, -split.cumsum(), name[row])  # -1 - slot, slots from 0 up
    order = np.argsort(begin - end, kind="stable")
    full_groups = len(order) // together
    groups = order[: full_groups * together].reshape(full_groups, together)[snake(full_groups, processors)]
    order = np.concatenate([groups.reshape(-1), order[full_groups * together :]])
    heads = np.flatnonzero(split & (begin == crow[row]))
    tasks = {
        "begins": begin[order],
        "ends": end[order],
        "targets": targets[order],
        "rows": name[row[heads]],
        "firsts": -1 - targets[heads],
        "counts": parts[heads],
    }
    return {key: value.astype(np.int32) for key, value in tasks.items()}


def full(m: CsrMatrix) -> CsrMatrix:
    """The matrix with its empty rows; stored rows are in increasing order."""
    if m.names is None:
        return m
    counts = torch.zeros(m.size[0], dtype=torch.int64, device=m.crow.device)
    counts[m.names.long()] = m.crow.diff().long()
    crow = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(m.crow.dtype)
    return m._replace(crow=crow, names=None)


def bitmap_of(m: CsrMatrix) -> Bitmap | None:
    """The bitmap of a matrix; None if rows, or columns of a row, are not strictly increasing."""
    rows, columns = m.size
    row, col = row_of(m), m.col.long()
    position = row * columns + col
    if (position[1:] <= position[:-1]).any():
        return None
    m = full(m)
    high, tiles = -(-rows // LONG) * LONG, -(-columns // TILE)
    cell = col // TILE * high + row
    counts = torch.bincount(cell, minlength=tiles * high).view(tiles, high)
    starts = torch.nn.functional.pad(m.crow[:-1].long(), (0, high - rows))
    starts = starts + counts.cumsum(0) - counts
    masks = torch.zeros(tiles * high, dtype=torch.int64, device=col.device)
    masks.index_add_(0, cell, torch.ones_like(col) << col % TILE)  # bit 63 is the sign
    return Bitmap(masks.view(tiles, high), starts.to(torch.int32), high, tiles)


def transpose_of(m: CsrMatrix) -> TransposedMatrix:
    """The transpose of a matrix."""
    order = torch.argsort(m.col, stable=True)
    counts = torch.bincount(m.col, minlength=m.size[1])
    crow = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    return TransposedMatrix(crow, row_of(m)[order].to(torch.int32), order)


@lru_cache(maxsize=16)
def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; 4 if kernels are interpreted."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


class MatrixFormats:
    """Formats of one matrix, each created when it is first needed.

    It has no reference to tensors of the matrix, so that it is freed together with the matrix.
    """

    def __init__(self, m: CsrMatrix) -> None:
        check_indices(m.crow, m.col, m.size[1])
        if m.names is not None and m.names.numel():
            smallest, largest = int(m.names.min()), int(m.names.max())
            if not 0 <= smallest <= largest < m.size[0]:
                raise BadInput(f"expected rows below {m.size[0]}, got {smallest} to {largest}")
        self._tasks: dict[tuple[int, int | None], Tasks] = {}
        self._dense: tuple[StorageWeakRef, Hashable, Tensor | None] | None = None
        self._derived: dict[str, Any] = {}
        self._cached: dict[Hashable, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For copies, whose values are others."""
        return {**self.__dict__, "_dense": None}

    def tasks(self, m: CsrMatrix, together: int, longest: int | None = None) -> Tasks:
        """Tasks of `spmm_rows` in groups of `together`."""
        if (together, longest) not in self._tasks:
            names = None if m.names is None else m.names.cpu().numpy()
            arrays = deal_tasks(m.crow.cpu().numpy(), names, processors_of(m.crow.device), together, longest)
            tensors = {k: torch.from_numpy(v).to(m.crow.device) for k, v in arrays.items()}
            slots = int(arrays["counts"].sum())
            self._tasks[together, longest] = Tasks(**tensors, slots=slots)
        return self._tasks[together, longest]

    def parts(self, m: CsrMatrix, entries: int) -> tuple[Tensor, Tensor, Tensor]:
        """Begins, ends and rows (int32) of tasks of `sddmm_rows`: at most `entries` of one row."""
        key = f"parts {entries}"
        if key not in self._derived:
            row, begin, end, _ = parted(m.crow.cpu().numpy(), entries)
            names = None if m.names is None else m.names.cpu().numpy()
            row = row if names is None else names[row]
            is_task = end > begin
            self._derived[key] = tuple(
                torch.from_numpy(t[is_task].astype(np.int32)).to(m.crow.device) for t in (begin, end, row)
            )
        return self._derived[key]

    def bitmap(self, m: CsrMatrix) -> Bitmap | None:
        """The bitmap; None if rows, or columns of a row, are not strictly increasing."""
        if "bitmap" not in self._derived:
            self._derived["bitmap"] = bitmap_of(m)
        return self._derived["bitmap"]

    def dense(self, m: CsrMatrix, decompress: Callable[[], Tensor]) -> Tensor:
        """The dense matrix, cached from the second call with the same values on until they change: values in training,
        which change from call to call, are never cached."""
        values = m.values
        storage = StorageWeakRef(values.untyped_storage())
        state = storage.cdata, values.storage_offset(), version(values), values.dtype
        known = self._dense
        if known is None or known[0].expired() or known[1] != state:
            self._dense = storage, state, None
            return decompress()
        if known[2] is not None:
            return known[2]
        dense = decompress()
        self._dense = storage, state, dense
        return dense

    def transposed(self, m: CsrMatrix) -> TransposedMatrix:
        """The transpose.

        On the CPU it is computed again if the indices have changed since: torch does not count
        writes into the indices of a sparse_csr tensor.
        """
        indices = [] if m.crow.is_cuda else [t for t in (m.crow, m.col, m.names) if t is not None]
        copies, transpose = self._derived.get("transposed", ((), None))
        if transpose is None or not all(map(_equal, indices, copies)):
            check_indices(m.crow, m.col, m.size[1])
            transpose = transpose_of(m)
            self._derived["transposed"] = [t.clone() for t in indices], transpose
        return transpose

    def cached(self, key: Hashable, make: Callable[[], Derived]) -> Derived:
        """Data derived from the indices for some key, cached for the last SIZES keys."""
        if key not in self._cached:
            if len(self._cached) >= SIZES:
                self._cached.clear()
            self._cached[key] = make()
        return self._cached[key]

    def narrow(self, m: CsrMatrix) -> Tensor:
        """Columns as uint16 if there are at most 65,536, else as int32, at an aligned address."""
        is_short = m.size[1] <= 1 << 16
        if not is_short and m.col.dtype == torch.int32 and m.col.data_ptr() % ALIGNED == 0 and m.col.is_contiguous():
            return m.col
        if "col" not in self._derived:
            col = m.col.to(torch.int16 if is_short else torch.int32, copy=True).contiguous()
            self._derived["col"] = col.view(torch.uint16) if is_short else col
        return self._derived["col"]


# versions of indices, formats
FORMATS: TensorCache[tuple[tuple[int, ...], MatrixFormats]] = TensorCache()


def formats_of(m: CsrMatrix) -> MatrixFormats:
    """The formats of a matrix, cached as long as its indices live and do not change.

    The cache is unlimited, as a recorded CUDA graph reads the formats of its matrices. Raises
    BadInput for invalid indices.
    """
    parts = [t for t in (m.crow, m.col, m.names) if t is not None]
    key = (m.size, *identity(parts))
    versions = tuple(map(version, parts))
    known = FORMATS.entries.get(key)
    if known is not None and known[0] == versions:
        return known[1]
    return FORMATS.put(key, parts, (versions, MatrixFormats(m)))[1]


def _equal(a: Tensor, b: Tensor) -> bool:
    """As torch.equal for integers on the CPU, but faster."""
    return bool((a.numpy() == b.numpy()).all())
