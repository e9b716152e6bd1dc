"""Weights as the kernels of chains read them: tiles of columns, integers with their bounds.

Arrays have memory of their own in pages of 2 MB where the system has them: a chain reads tens of
megabytes in an order that pages of 4 KB would slow down.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import torch

from demask.kernels.cpu.zero_proof import CONSTANTS, UNIT
from demask.kernels.llvm.isa import Isa
from demask.pilot.simplifiers.rounding import levels

PAGE = 2**21
TINY = 1e-33  # more than what products that underflow may add up to
ULPS = 40 * UNIT  # of the bias, which are added to it in the bound
SMALLEST = 1e-35  # scale
HALF, MIDDLE = 16, 7.5  # weight of the upper half of a byte, mean of the lower half


def zeros_in_huge_pages(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Zeros that begin at a page of 2 MB.

    >>> zeros_in_huge_pages((3, 5), np.float32).ctypes.data % 2**21
    0
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % PAGE
    return np.frombuffer(memory, dtype, int(np.prod(shape)), start).reshape(shape)


def count_tiles(rows: int, vectors: int, isa: Isa) -> int:
    """How many tiles of `vectors` vectors the rows fill."""
    return -(-rows // (vectors * isa.lanes))


def tile_columns(weight: np.ndarray, vectors: int, isa: Isa) -> np.ndarray:
    """float32 [rows, columns] as [tiles, columns, rows of a tile]; rows beyond the last are 0."""
    (rows, columns), size = weight.shape, vectors * isa.lanes
    weight_tiles = zeros_in_huge_pages((count_tiles(rows, vectors, isa), columns, size), np.float32)
    for tile, part in enumerate(weight_tiles):
        tile_rows = weight[tile * size : (tile + 1) * size]
        part[:, : len(tile_rows)] = tile_rows.T
    return weight_tiles


def pad_bias(bias: np.ndarray | None, rows: int) -> np.ndarray:
    """float32 [rows], 0 beyond the last and +0 for -0, in an aligned array."""
    padded = zeros_in_huge_pages((rows,), np.float32)
    if bias is not None:
        padded[: len(bias)] = bias + np.float32(0)
    return padded


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Weights as integers q and the constants of the bound: weight ~ scale q + center.

    weights: in the order of the kernel; constants: [vectors of rows, CONSTANTS, lanes], or [rows,
    CONSTANTS] for a second level. See `kernels.cpu.zero_proof`.
    """

    weights: np.ndarray
    constants: np.ndarray

    @property
    def bytes(self) -> int:
        return self.weights.nbytes + self.constants.nbytes


def quantize_rows(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(q int8 in -127 … 127 [rows, columns], scale float32 [rows]) of a matrix, as `rounding.levels`
    returns them with one scale per row. Scales below 1e-35 and their q become 0: the other terms of
    the bounds cover them."""
    parts, scales = levels(torch.from_numpy(weight), 8)
    q, scale = parts[:, 0].numpy(), scales[:, 0, 0].numpy()
    q[scale < SMALLEST] = 0
    scale[scale < SMALLEST] = 0
    return q.astype(np.int8), scale


def round_up(x: np.ndarray) -> np.ndarray:
    """float64 >= 0 rounded up to float32; infinite beyond their range."""
    return np.nextafter((x * (1 + 1e-9)).astype(np.float32), np.float32(np.inf)) * (x > 0)


def bound_constants(
    weight: np.ndarray, bias: np.ndarray | None, q: np.ndarray, scale: np.ndarray, center: np.ndarray, padded: int
) -> np.ndarray:
    """The constants of the bound of every row, float32 [padded, CONSTANTS]."""
    rows = len(weight)
    constants = np.zeros((padded, len(CONSTANTS)), np.float32)
    constants[rows:, CONSTANTS.index("bias")] = -1  # padding rows are proved zero
    for first in range(0, rows, 512):  # float64 copies of a part at a time
        part = slice(first, min(first + 512, rows))
        w, n = weight[part].astype(np.float64), q[part].astype(np.float64)
        s, c = scale[part].astype(np.float64), center[part].astype(np.float64)
        b = np.zeros(len(w)) if bias is None else bias[part].astype(np.float64)
        b = b + ULPS * np.abs(b) + TINY * (np.abs(w).max(1, initial=0) > 0)
        with np.errstate(over="ignore"):  # infinite: such a row is computed
            constants[part] = _bound_constants(w, n, (s, c), b)
    return constants


def _bound_constants(w: np.ndarray, n: np.ndarray, scale: tuple[np.ndarray, np.ndarray], b: np.ndarray) -> np.ndarray:
    """float32 [rows, CONSTANTS] from weights w, integers n, (scale, center) and bias b."""
    s, c = scale
    off = w - s[:, None] * n - c[:, None]
    named = {
        "scale": s,
        "total": s * n.sum(1),
        "size": round_up(s * np.abs(n).sum(1)),
        "least": round_up(np.abs(off).max(1, initial=0)),
        "norm": round_up(np.sqrt((off**2).sum(1))),
        "largest": round_up(np.abs(w).max(1, initial=0) + np.abs(c)),
        "center": c,
        "bias": np.nextafter(b.astype(np.float32), np.float32(np.inf), where=b != 0, out=np.zeros(len(b), np.float32)),
    }
    return np.stack([named[key].astype(np.float32) for key in CONSTANTS], 1)


def by_vectors(constants: np.ndarray, isa: Isa) -> np.ndarray:
    """[rows, constants] as [vectors of rows, constants, lanes]."""
    return in_huge_pages(constants.reshape(-1, isa.lanes, constants.shape[1]).transpose(0, 2, 1))


def in_huge_pages(array: np.ndarray) -> np.ndarray:
    """A copy in pages of 2 MB."""
    copy = zeros_in_huge_pages(array.shape, array.dtype.type)
    copy[:] = array
    return copy


def group_columns(q: np.ndarray, width: int, vectors: int, isa: Isa) -> np.ndarray:
    """Bytes [rows, columns] as [tiles, groups, rows of a tile, width]."""
    (rows, columns), size = q.shape, vectors * isa.lanes
    groups, count = -(-columns // width), count_tiles(rows, vectors, isa)
    padded_bytes = np.zeros((count * size, groups * width), np.uint8)
    padded_bytes[:rows, :columns] = q.view(np.uint8)
    return padded_bytes.reshape(count, size, groups, width).transpose(0, 2, 1, 3)


def pack_8_bits(weight: np.ndarray, bias: np.ndarray | None, vectors: int, isa: Isa) -> PackedWeights:
    """Weights of 8 bits, in groups of 4 columns."""
    q, scale = quantize_rows(weight)
    parts = group_columns(q, 4, vectors, isa)
    padded = parts.shape[0] * parts.shape[2]
    constants = bound_constants(weight, bias, q, scale, np.zeros_like(scale), padded)
    return PackedWeights(in_huge_pages(parts), by_vectors(constants, isa))


def pack_4_and_4_bits(
    weight: np.ndarray, bias: np.ndarray | None, vectors: int, isa: Isa
) -> tuple[PackedWeights, PackedWeights]:
    """Weights of 8 bits as two planes: the upper halves in groups of 8 columns, the lower ones by
    row."""
    q, scale = quantize_rows(weight)
    upper, lower = ((q >> 4) + 8).astype(np.uint8), (q & 15).astype(np.uint8)
    parts = group_columns(upper, 8, vectors, isa)
    both = in_huge_pages(parts[..., :4] | parts[..., 4:] << 4)
    padded = parts.shape[0] * parts.shape[2]
    center = scale * np.float32(MIDDLE - 8 * HALF)
    first = bound_constants(weight, bias, upper, scale * np.float32(HALF), center, padded)
    columns = -(-q.shape[1] // 128) * 128
    wide = np.zeros((len(q), columns // 128, 2, 64), np.uint8)
    wide.reshape(len(q), columns)[:, : q.shape[1]] = lower
    rows = in_huge_pages((wide[:, :, 0] | wide[:, :, 1] << 4).reshape(len(q), -1))
    second = in_huge_pages(bound_constants(weight, bias, q, scale, np.zeros_like(scale), padded))
    return PackedWeights(both, by_vectors(first, isa)), PackedWeights(rows, second)


def pack_levels(
    weight: np.ndarray, bias: np.ndarray | None, bits: int, vectors: int, isa: Isa
) -> tuple[PackedWeights, PackedWeights | None]:
    """The weights of the first level, of `bits` (8 or 4), and of the second, None for 8."""
    if bits == 8:
        return pack_8_bits(weight, bias, vectors, isa), None
    return pack_4_and_4_bits(weight, bias, vectors, isa)
