"""The op `demask::spmm`: a matrix in CSR or DCSR times a dense one, with gradients.

torch.ops.demask.spmm(Tensor crow, Tensor col, Tensor values, Tensor? rows, int[] size,
                      Tensor x, Tensor? bias, str act, float[] numbers) -> Tensor

The tensors' device chooses what runs: kernels of the CPU (`multiply`), of GPUs (`gpu`), ATen ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from demask.errors import BadInput
from demask.kernels.llvm import availability as llvm
from demask.ops.activations import ACTIVATIONS, Act, activate
from demask.sparse.csr_matrix import CsrMatrix, like, row_of
from demask.sparse.products.gradient_ops import kernels, parts, sampled, turned
from demask.sparse.reference import check_indices

NARROW = (torch.float16, torch.bfloat16)

_LIBRARY = Library("demask", "FRAGMENT")
_LIBRARY.define(
    "spmm(Tensor crow, Tensor col, Tensor values, Tensor? rows, int[] size, Tensor x, Tensor? bias,"
    " str act, float[] numbers) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def product(
    crow: Tensor, col: Tensor, values: Tensor, rows: Tensor | None, size: tuple[int, int],
    x: Tensor, bias: Tensor | None = None, act: Act | None = None,
) -> Tensor:  # fmt: skip
    """act(matrix @ x + bias) [size[0], n]. rows: what row each of CSR's rows is; by default its
    own."""
    name, numbers = act or ("", ())
    return torch.ops.demask.spmm.default(
        crow, col, values, rows, size, x, bias, name, list(map(float, numbers))
    )


def check(m: CsrMatrix, x: Tensor, bias: Tensor | None, act: Act | None) -> None:
    """Raise BadInput for what cannot be multiplied; indices are not looked at."""
    indices = [t for t in (m.crow, m.col, m.names) if t is not None]
    whole = {t.dtype for t in indices}
    if len(whole) != 1 or not whole <= {torch.int32, torch.int64}:
        raise BadInput(f"expected indices in int32 or int64, got {[t.dtype for t in indices]}")
    given = [m.values, x, *([] if bias is None else [bias])]
    if len({t.dtype for t in given}) != 1 or not x.is_floating_point():
        raise BadInput(
            f"expected floating-point numbers of one dtype, got {[t.dtype for t in given]}"
        )
    if any(t.layout != torch.strided or t.device != x.device for t in (*indices, *given)):
        raise BadInput(f"expected dense tensors on {x.device}")
    count = m.size[0] if m.names is None else m.names.numel()
    shapes = tuple(m.crow.shape), tuple(m.col.shape), x.shape[0] if x.ndim == 2 else None
    if shapes != ((count + 1,), tuple(m.values.shape), m.size[1]):
        raise BadInput(f"expected row starts, columns and x for a matrix of {m.size}, got {shapes}")
    if bias is not None and tuple(bias.shape) != m.size[:1]:
        raise BadInput(f"expected a bias of shape ({m.size[0]},), got {tuple(bias.shape)}")
    if act is not None and (act[0] not in ACTIVATIONS or len(act[1]) != ACTIVATIONS[act[0]].count):
        raise BadInput(f"expected an activation, got {act}")


def _given(
    crow: Tensor, col: Tensor, values: Tensor, rows: Tensor | None, size: Any, x: Tensor,
    bias: Tensor | None, act: str, numbers: list[float],
) -> tuple[CsrMatrix, Tensor, Tensor | None, Act | None]:  # fmt: skip
    """The arguments of the op, checked."""
    if len(size) != 2:
        raise BadInput(f"expected two sizes, got {tuple(size)}")
    m = CsrMatrix(crow, col, values, rows, (size[0], size[1]))
    found = (act, tuple(numbers)) if act else None
    check(m, x, bias, found)
    return m, x, bias, found


def on_cpu(*given: Any) -> Tensor:
    """The op's kernel on the CPU."""
    m, x, bias, act = _given(*given)
    if x.dtype not in (torch.float32, *NARROW) or not llvm.installed():
        return _by_aten(m, x, bias, act)
    from demask.sparse.products.spmm_cpu import multiplied

    if x.dtype in NARROW:
        wide = None if bias is None else bias.float()
        return multiplied(m._replace(values=m.values.float()), x.float(), wide, act).to(x.dtype)
    return multiplied(m, x, bias, act)


def elsewhere(*given: Any) -> Tensor:
    """The op's kernel on other devices; on a GPU, the output lies as x does."""
    m, x, bias, act = _given(*given)
    gpu = kernels(x)
    if gpu is not None and gpu.takes(m, x):
        return gpu.spmm(m, x, bias, act)
    made = _by_aten(m, x, bias, act)
    return like(x, *made.shape).copy_(made) if x.is_cuda else made


def _by_aten(m: CsrMatrix, x: Tensor, bias: Tensor | None, act: Act | None) -> Tensor:
    """The product by ATen ops; float16 and bfloat16 are computed in float32."""
    if x.dtype not in NARROW:
        return _gathered(m, x, bias, act)
    wide = None if bias is None else bias.float()
    return _gathered(m._replace(values=m.values.float()), x.float(), wide, act).to(x.dtype)


def _gathered(m: CsrMatrix, x: Tensor, bias: Tensor | None, act: Act | None) -> Tensor:
    check_indices(m.crow, m.col, m.size[1])
    row = row_of(m)
    if len(row) and not 0 <= int(row.min()) <= int(row.max()) < m.size[0]:
        raise BadInput(f"expected rows below {m.size[0]}, got {int(row.min())} to {int(row.max())}")
    made = x.new_zeros(m.size[0], x.shape[1])
    for part in parts(len(row), x.shape[1]):
        made.index_add_(0, row[part], m.values[part, None] * x[m.col[part].long()])
    return activate(made if bias is None else made + bias[:, None], act)


def fake(*given: Any) -> Tensor:
    """The output without values."""
    m, x, _, _ = _given(*given)
    columns = x.shape[1]
    return like(x, m.size[0], columns) if x.is_cuda else x.new_empty(m.size[0], columns)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    crow, col, values, rows, size, x, bias, act, numbers = inputs
    ctx.save_for_backward(crow, col, values, rows, x, bias)
    ctx.size, ctx.act = size, (act, tuple(numbers)) if act else None


def _slopes(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
    """Those of values, x and the bias: products with the transposed matrix, and of slopes with x
    where nonzeros are."""
    crow, col, values, rows, x, bias = ctx.saved_tensors
    m = CsrMatrix(crow, col, values, rows, tuple(ctx.size))
    if ctx.act is not None:
        slope = _before(m, x, bias, ctx.act, slope)
    of_x = of_values = None
    if ctx.needs_input_grad[5]:
        of_x = turned(m, slope)
    if ctx.needs_input_grad[2]:
        of_values = sampled(m, slope, x)
    of_bias = slope.sum(1) if bias is not None and ctx.needs_input_grad[6] else None
    return None, None, of_values, None, None, of_x, of_bias, None, None


def _before(m: CsrMatrix, x: Tensor, bias: Tensor | None, act: Act, slope: Tensor) -> Tensor:
    """The slope of what the activation was given, which is computed again."""
    again = torch.is_grad_enabled()
    z = product(*m[:3], m.names, m.size, x, bias)
    with torch.enable_grad():
        z = z.view_as(z) if again else z.detach().requires_grad_()
        y = activate(z, act)
        (found,) = torch.autograd.grad(y, z, slope, create_graph=again)
    return found


_LIBRARY.impl("spmm", on_cpu, "CPU")
_LIBRARY.impl("spmm", elsewhere, "CompositeExplicitAutograd")
torch.library.register_fake("demask::spmm", fake, lib=_LIBRARY)
torch.library.register_autograd("demask::spmm", _slopes, setup_context=_keep, lib=_LIBRARY)
