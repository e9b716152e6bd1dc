"""prepare(): a sparse matrix checked and packed once, for many products."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from demask.errors import BadInput
from demask.exec.steps.segment_weights import check_indices
from demask.kernels.plan_cache import version
from demask.ops.activations import ActivationLike, act_of, apply_activation
from demask.sparse.csr_matrix import NUMBERS
from demask.sparse.functional import DCSR, csr_parts
from demask.sparse.packed_linear import PackedLinear, check_group, pack_weight
from demask.sparse.products.form_choice import chosen_form
from demask.sparse.products.packed import NARROW_COLUMNS, PackedMatrix


@dataclass(frozen=True, slots=True, eq=False)
class PreparedMatrix:
    """A constant matrix [m, k] that is ready for products, from `prepare`.

    Attributes:
        size: (m, k).
        packed: the stored form. `packed.form` is its name, `packed.nbytes` its size.

    Example:
        >>> import torch
        >>> from demask.sparse import prepare
        >>> matrix = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
        >>> prepared = prepare(matrix)
        >>> prepared @ torch.ones(2, 1), prepared.linear(torch.ones(3, 2)).shape
        (tensor([[2.],
                [0.]]), torch.Size([3, 2]))
    """

    packed: PackedMatrix
    layer: PackedLinear = field(repr=False)
    sources: tuple[tuple[weakref.ref[Tensor], int], ...] = field(repr=False)

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.packed.size

    def __matmul__(self, x: Tensor) -> Tensor:
        """The product with x [k, n]: [m, n], in the dtype of x."""
        return self(x)

    def __call__(self, x: Tensor, bias: Tensor | None = None, activation: ActivationLike = None) -> Tensor:
        """activation(matrix @ x + bias) [m, n], in the dtype of x.

        Args:
            x: dense, [k, n], float32, bfloat16 or float16. It may need a gradient.
            bias: [m], one per row. Default: none.
            activation: as of `spmm`. Default: none.

        Raises:
            BadInput: shapes or dtypes do not match, or the matrix was written after it was prepared.
        """
        if x.ndim != 2:
            raise BadInput(f"expected a matrix [{self.size[1]}, n], got {tuple(x.shape)}")
        return self.linear(x.t(), bias, activation).t()

    def linear(self, x: Tensor, bias: Tensor | None = None, activation: ActivationLike = None) -> Tensor:
        """activation(x @ matrix.T + bias) [..., m], as of a linear layer. x: [..., k]. Raises BadInput as a call."""
        if any((source := ref()) is not None and version(source) != written for ref, written in self.sources):
            raise BadInput("the matrix was written after it was prepared; prepare it again")
        out = self.layer(x)
        out = out if bias is None else out + bias
        return apply_activation(out, act_of(activation))

    def __str__(self) -> str:
        (m, k), packed = self.size, self.packed
        dense = m * k * packed.tensors[0].element_size()
        share = f"{packed.nbytes / dense:.0%} of dense" if dense else "empty"
        dtype = str(packed.dtype).removeprefix("torch.")
        return f"{m} x {k}, {dtype}, {packed.density:.1%} nonzero: {packed.form}, {packed.nbytes:,} bytes ({share})"


def prepare(
    matrix: Tensor | DCSR,
    *,
    dtype: torch.dtype | None = None,
    columns: int = 1,
    form: str | None = None,
    group: int = 0,
) -> PreparedMatrix:
    """A matrix checked and packed once, in the form that takes the least time for many products.

    `spmm` reads a matrix as it is in every call. Where the matrix stays the same, such as the weight of a layer in
    inference, its prepared form takes less time: 16-bit columns, a bit for each element, or the dense matrix. The
    forms are timed for the first matrix of a kind (size, zeros in steps of 5 %, dtype, columns), and the times are
    stored in the user's cache folder.

    Args:
        matrix: [m, k], on the CPU: dense, torch.sparse_csr or DCSR; float32, bfloat16 or float16. It is copied;
            zeros are not stored.
        dtype: of the stored numbers. Default: the matrix's, which is exact. torch.bfloat16 and torch.float16 round;
            torch.int8 stores integers with a scale for each row.
        columns: about how many columns x has. Default: 1.
        form: "dense", "bitmap" or "columns", as of `PackedLinear`. Default: the one that takes the least time.
        group: with torch.int8, how many columns of a row have a scale in common: 32, or another power of two from it
            on. Default: 0, all of them.

    Returns:
        A `PreparedMatrix`: `prepared @ x`, `prepared(x, bias, activation)`, `prepared.linear(x)`; str() tells the form.

    Raises:
        BadInput: another layout, dtype or device; or indices that are out of range.

    Example:
        >>> import torch
        >>> from demask.sparse import prepare
        >>> matrix = torch.randn(64, 96) * (torch.rand(64, 96) < 0.5)
        >>> prepared, x = prepare(matrix), torch.randn(96, 1)
        >>> torch.allclose(prepared @ x, matrix @ x, atol=1e-4)
        True
    """
    if isinstance(matrix, DCSR):
        sources, values, size = (matrix.rows, matrix.crow, matrix.col, matrix.values), matrix.values, matrix.size
    elif not isinstance(matrix, Tensor):
        raise BadInput(f"expected a tensor or DCSR, got {type(matrix).__name__}")
    elif matrix.layout == torch.strided and matrix.ndim == 2:
        sources, values, size = (matrix,), matrix, (matrix.shape[0], matrix.shape[1])
    else:
        values = csr_parts(matrix)[2]
        sources, size = (matrix,), (matrix.shape[0], matrix.shape[1])
    if not values.is_cpu or values.dtype not in NUMBERS or values.dtype == torch.int8:
        raise BadInput(f"expected float32, bfloat16 or float16 on the CPU, got {values.dtype} on {values.device}")
    if dtype is not None and dtype not in NUMBERS:
        raise BadInput(f"expected to store float32, bfloat16, float16 or int8, got {dtype}")
    if type(columns) is not int or columns < 1:
        raise BadInput(f"expected a number of columns from 1 on, got {columns!r}")
    stored = dtype or values.dtype
    count = int(values.count_nonzero())
    check_group(stored, group)
    if form is None:
        form = chosen_form(size, count / max(size[0] * size[1], 1), stored, columns, group)
    if isinstance(matrix, Tensor) and matrix.layout == torch.strided:
        packed = pack_weight(matrix.detach().clone() if form == "dense" else matrix.detach(), form, stored, group)
    else:
        csr = matrix.to_csr() if isinstance(matrix, DCSR) else matrix
        crow, col, numbers = (t.detach() for t in csr_parts(csr))
        check_indices(crow, col, size[1])
        if form == "columns" and stored != torch.int8:
            kind = torch.int16 if size[1] <= NARROW_COLUMNS else torch.int32
            copies = (numbers.to(stored, copy=True), crow.to(torch.int32, copy=True), col.to(kind, copy=True))
            packed = PackedMatrix(form, size, copies)
        else:
            packed = pack_weight(csr.detach().to_dense(), form, stored, group)
    layer = PackedLinear(packed, dtype=values.dtype)
    return PreparedMatrix(packed, layer, tuple((weakref.ref(t), version(t)) for t in sources))
