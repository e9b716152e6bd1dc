"""Constant matrices stored for products: dense, as a bitmap and nonzeros, or as nonzeros and their columns.

form      bytes per element, for a density d and numbers of b bytes   zeros of the matrix
dense     b                                                          multiplied
bitmap    1/8 + d b                                                  multiplied (0 * inf is NaN)
columns   d (b + 2), or d (b + 4) with more than 65,536 columns      skipped
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from demask.errors import BadInput
from demask.kernels.bitmap_layout import BITS, SLACK, STEP, padded_columns
from demask.sparse.csr_matrix import NUMBERS

BLOCK = 2**20  # elements that are decoded at a time: 4 MiB
#: names of the tensors of each form
FORMS = {"dense": ("values",), "bitmap": ("values", "bits", "starts"), "columns": ("values", "crow", "col")}
#: of files: density below which a form takes less time with one vector than the one before it: bitmap, columns (AVX2,
#: Zen 3)
DENSITIES = {torch.bfloat16: (0.65, 0.15), torch.float16: (0.65, 0.15), torch.float32: (0.6, 0.4)}
NARROW_COLUMNS = 2**16  # columns that 16 bits number
LEAST_GROUP = STEP  # columns with a scale of their own; more: a power of two


@dataclass(slots=True, eq=False)
class PackedMatrix:
    """A matrix in one of the forms.

    form: its name. size: rows and columns. tensors: of the form, on the CPU:

        dense     the matrix
        bitmap    nonzeros, bits (uint8 [pairs of rows, bytes]), first nonzero of each pair (int64)
        columns   nonzeros, row starts (int32), columns (int16, read as unsigned, or int32)

    scale: float32 [rows] by which rows of 8-bit integers are multiplied, or [rows, groups] for groups of their
    columns; None for other dtypes. operands: what calls of kernels read of the matrix, for each thread.
    """

    form: str
    size: tuple[int, int]
    tensors: tuple[Tensor, ...]
    scale: Tensor | None = None
    operands: dict[int, list[bytes]] = field(
        default_factory=dict, init=False, repr=False
    )  # of kernels, by number of threads

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored numbers."""
        return self.tensors[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.all_tensors)

    @property
    def all_tensors(self) -> list[Tensor]:
        """The tensors, and the scale if there is one."""
        return [*self.tensors, *([] if self.scale is None else [self.scale])]

    @property
    def group(self) -> int:
        """How many columns have a scale in common; 0: all, or there are no scales."""
        if self.scale is None or self.scale.ndim == 1:
            return 0
        group = LEAST_GROUP
        while group < self.size[1] and groups_of(self.size[1], group) > self.scale.shape[1]:
            group *= 2
        return group

    def scaled(self, rows: Tensor, first: int, last: int) -> Tensor:
        """Rows from one to another, which were not multiplied with their scales."""
        if self.scale is None:
            return rows
        scale = self.scale[first:last]
        return rows * (scale.repeat_interleave(self.group, 1)[:, : self.size[1]] if self.group else scale[:, None])

    @property
    def stored_numbers(self) -> int:
        """How many numbers are stored: all of a dense matrix, the nonzeros of others."""
        return self.tensors[0].numel() - SLACK * (self.form == "bitmap")

    @property
    def density(self) -> float:
        """The number of nonzeros, divided by that of all elements."""
        count = int(self.tensors[0].count_nonzero()) if self.form == "dense" else self.stored_numbers
        return count / max(self.size[0] * self.size[1], 1)

    def decode_bits(self, first: int, last: int) -> Tensor:
        """Rows of a bitmap by torch's ops."""
        values, bits, starts = self.tensors
        pairs = slice(first // 2, (last + 1) // 2)
        places = torch.arange(BITS, dtype=torch.uint8, device=bits.device)
        mask = (bits[pairs].view(-1, bits.shape[1] // 2, 2, 1) >> places & 1).bool().transpose(1, 2)
        dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
        block = torch.zeros(mask.shape, dtype=dtype, device=bits.device)
        in_turns = block.transpose(1, 2)
        in_turns[mask.transpose(1, 2)] = values[int(starts[pairs.start]) : int(starts[pairs.stop])].to(dtype)
        return block.flatten(2).flatten(0, 1)[: last - first, : self.size[1]]


def form_of_density(density: float, dtype: torch.dtype) -> str:
    """The form of a file, for any machine; `form_choice` has that of this one."""
    bitmap, columns = DENSITIES[dtype]
    return "columns" if density < columns else "bitmap" if density < bitmap else "dense"


def empty_matrix(
    form: str, size: tuple[int, int], count: int, dtype: torch.dtype, device: Any = None, group: int = 0
) -> PackedMatrix:
    """A matrix without values: the shapes and dtypes of its tensors. count: of stored numbers. group: of scales.

    >>> [tuple(t.shape) for t in empty_matrix("columns", (4, 8), 5, torch.bfloat16, "meta").tensors]
    [(5,), (5,), (5,)]
    """
    rows, columns = size
    pairs = -(-rows // 2)
    shapes: dict[str, tuple[tuple[tuple[int, ...], torch.dtype], ...]] = {
        "dense": ((size, dtype),),
        "bitmap": (
            ((count + SLACK,), dtype),
            ((pairs, padded_columns(columns) // BITS * 2), torch.uint8),
            ((pairs + 1,), torch.int64),
        ),
        "columns": (
            ((count,), dtype),
            ((rows + 1,), torch.int32),
            ((count,), torch.int16 if columns <= NARROW_COLUMNS else torch.int32),
        ),
    }
    tensors = tuple(torch.empty(shape, dtype=kind, device=device) for shape, kind in shapes[form])
    shape = (rows, groups_of(columns, group)) if group else (rows,)
    scale = torch.empty(shape, device=device) if dtype == torch.int8 else None
    return PackedMatrix(form, size, tensors, scale)


def pack(matrix: Tensor, form: str, scale: Tensor | None = None) -> PackedMatrix:
    """A dense matrix of one of the dtypes of `NUMBERS` in a form.

    >>> pack(torch.tensor([[0.0, 3.0], [0.0, 0.0]]), "columns").tensors
    (tensor([3.]), tensor([0, 1, 1], dtype=torch.int32), tensor([1], dtype=torch.int16))
    """
    rows, columns = matrix.shape
    if form == "dense":
        return PackedMatrix(form, (rows, columns), (matrix.contiguous(),), scale)
    if form == "bitmap":
        return PackedMatrix(form, (rows, columns), _bitmap_of(matrix), scale)
    mask = matrix != 0
    crow = F.pad(mask.sum(1).cumsum(0), (1, 0)).int()
    kind = torch.int16 if columns <= NARROW_COLUMNS else torch.int32
    return PackedMatrix(form, (rows, columns), (matrix[mask], crow, mask.nonzero()[:, 1].to(kind)), scale)


def _bitmap_of(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nonzeros, bits and starts, computed for some rows at a time."""
    rows, columns = matrix.shape
    pairs, width = -(-rows // 2), padded_columns(columns)
    powers = 2 ** torch.arange(BITS, dtype=torch.uint8)
    bits = torch.empty(pairs, width // BITS * 2, dtype=torch.uint8)
    values, counts = [], [torch.zeros(1, dtype=torch.int64)]
    step = max(BLOCK // width, 1)
    for first in range(0, pairs, step):
        part = matrix[2 * first : 2 * (first + step)]
        part = F.pad(part, (0, width - columns, 0, len(part) % 2))
        eights = part.view(-1, 2, width // BITS, BITS).transpose(1, 2)
        mask = eights != 0
        bits[first : first + len(mask)] = (mask * powers).sum(-1, dtype=torch.uint8).flatten(1)
        values.append(eights[mask])
        counts.append(mask.sum((1, 2, 3)))
    return torch.cat([*values, matrix.new_zeros(SLACK)]), bits, torch.cat(counts).cumsum(0)


def groups_of(columns: int, group: int) -> int:
    """How many groups of columns there are."""
    return -(-columns // group)


def quantize(matrix: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """(8-bit integers, scales): the largest magnitude of a row, or of a group of its columns, is 127 times its scale.
    Zeros stay zeros. Scales: float32 [rows], or [rows, groups].

    >>> quantize(torch.tensor([[0.0, 254.0, -1.0]]))
    (tensor([[  0, 127,   0]], dtype=torch.int8), tensor([2.]))
    """
    rows, columns = matrix.shape
    width = group or max(columns, 1)
    wide = F.pad(matrix.float(), (0, -columns % width)).view(rows, groups_of(columns, width), width)
    scale = wide.abs().amax(2) / 127
    steps = (wide / torch.where(scale > 0, scale, 1.0)[..., None]).round().to(torch.int8)
    return steps.flatten(1)[:, :columns].contiguous(), scale if group else scale.sum(1)


def check_tensors(packed: PackedMatrix) -> None:
    """Raise BadInput where the tensors are not those of a matrix in this form."""
    form, (rows, columns), tensors = packed.form, packed.size, packed.tensors
    if form not in FORMS or len(tensors) != (1 if form == "dense" else 3):
        raise BadInput(
            f"expected a matrix in one of the forms {', '.join(FORMS)}, got {form!r} of {len(tensors)} tensors"
        )
    if tensors[0].dtype not in (*NUMBERS, torch.float64) or (packed.scale is not None) != (
        tensors[0].dtype == torch.int8
    ):
        raise BadInput(f"expected float32, float16, bfloat16 or scaled 8-bit integers, got {tensors[0].dtype}")
    if (scale := packed.scale) is not None:
        is_grouped = scale.ndim == 2 and form != "columns" and scale.shape[1] == groups_of(columns, packed.group or 1)
        if scale.dtype != torch.float32 or scale.shape[:1] != (rows,) or not (scale.ndim == 1 or is_grouped):
            raise BadInput(
                f"expected scales in float32 of {rows} rows, or of groups of their columns in another form than "
                f"columns, got {scale.dtype} {tuple(scale.shape)} for {form}"
            )
    if any(not t.is_contiguous() for t in packed.all_tensors):
        raise BadInput("expected contiguous tensors")
    expected = empty_matrix(form, packed.size, max(packed.stored_numbers, 0), packed.dtype, "meta")
    kinds = [[(t.dtype, t.shape) for t in matrix.tensors] for matrix in (packed, expected)]
    if kinds[0] != kinds[1] or not (form == "dense" or (_is_bitmap if form == "bitmap" else _is_csr)(packed)):
        got = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in tensors)
        raise BadInput(f"expected {form} of a matrix of {rows} x {columns}, got tensors that are not: {got}")


def _is_bitmap(packed: PackedMatrix) -> bool:
    """Whether starts are sums of the bits."""
    values, bits, starts = packed.tensors
    ones = torch.tensor([n.bit_count() for n in range(256)], dtype=torch.uint8)
    counts = ones[bits.long()].sum(1, dtype=torch.int64) if bits.numel() else starts[1:] * 0
    return torch.equal(starts, F.pad(counts.cumsum(0), (1, 0))) and int(starts[-1]) == len(values) - SLACK


def _is_csr(packed: PackedMatrix) -> bool:
    """Whether row starts rise to the number of nonzeros, and columns are in range."""
    _, crow, col = packed.tensors
    if int(crow[0]) or int(crow[-1]) != len(col) or bool((crow.diff() < 0).any()):
        return False
    return not len(col) or int(column_numbers(col).max()) < packed.size[1]


def column_numbers(col: Tensor) -> Tensor:
    """Columns as int64."""
    return col.long() & 0xFFFF if col.dtype == torch.int16 else col.long()
