"""Who multiplies in gpu_sparse.py: each contender is a list of calls over copies of its weights,
that are called in turn, so that weights come from memory and not from the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.sparse.gpu_problems import Problem
from demask.sparse.csr_matrix import CsrMatrix, like
from demask.sparse.products import gpu_formats as gpu_forms
from demask.sparse.products import gpu_products as gpu
from demask.sparse.products.gpu_formats import formats_of, processors_of
from demask.sparse.products.gpu_products import KernelChoice

CACHES, MOST = 3, 12  # copies are larger than so many caches together, or there are so many
BLOCK = 64  # of BSR
Calls = list[Callable[[], Tensor]]


class NotRun(Exception):
    """Why a contender is not there."""


@dataclass(frozen=True, slots=True)
class Case:
    """w [m, k] dense with zeros; x the other operand, in two layouts: rows and columns side by
    side; y, for SDDMM, the left operand. wanted: the result in float64."""

    problem: Problem
    w: Tensor
    x: Tensor
    y: Tensor | None
    wanted: Tensor

    @property
    def cache(self) -> int:
        """Bytes of the cache between the processors and memory."""
        if not self.w.is_cuda:
            return 1 << 16
        return torch.cuda.get_device_properties(self.w.device).L2_cache_size


def build_case(problem: Problem, device: str, seed: int) -> Case:
    """A problem's operands, of random numbers, and its result in float64."""
    generator = torch.Generator(device).manual_seed(seed)
    where = {"generator": generator, "device": device}
    mask = problem.make(generator)
    w = (torch.randn(problem.m, problem.k, **where) * mask).to(problem.dtype)
    inner = problem.m if problem.task == "transposed" else problem.k
    x = torch.randn(inner, problem.n, **where).to(problem.dtype)
    if problem.task == "sddmm":
        y = torch.randn(problem.m, problem.n, **where).to(problem.dtype)
        return Case(problem, w, x, y, (y.double() @ x.double().t())[mask & (w != 0)])
    left = w.t() if problem.task == "transposed" else w
    wanted = torch.cat([left.double() @ part.double() for part in x.split(256, 1)], 1)
    return Case(problem, w, x, None, wanted)


def copies(case: Case, bytes_: int) -> int:
    """How many copies of weights are read in turn."""
    return max(1, min(MOST, -(-CACHES * case.cache // max(bytes_, 1))))


def rows_of(w: Tensor) -> CsrMatrix:
    """By its nonzeros, int32."""
    there = w != 0
    crow = F.pad(there.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    return CsrMatrix(crow, there.nonzero()[:, 1].to(torch.int32), w[there], None, tuple(w.shape))


def copied(m: CsrMatrix) -> CsrMatrix:
    return CsrMatrix(m.crow.clone(), m.col.clone(), m.values.clone(), None, m.size)


def bytes_of(m: CsrMatrix) -> int:
    """Of a matrix with its bitmap, as it is read."""
    return m.values.nbytes + m.size[0] * m.size[1] * 3 // 16


def matrices(case: Case) -> list[CsrMatrix]:
    """Copies of a problem's matrix."""
    first = rows_of(case.w)
    return [first] + [copied(first) for _ in range(copies(case, bytes_of(first)) - 1)]


def ours(case: Case, several: Sequence[CsrMatrix] = (), choice: KernelChoice | None = None) -> Calls:
    """demask, as a layer calls it: tokens side by side. several: copies of the matrix, else new ones.
    choice: a kernel, else the one that is chosen by measuring."""
    several = several or matrices(case)
    if case.problem.task == "sddmm":
        assert case.y is not None
        return [partial(gpu.sddmm, m, case.y, case.x, choice) for m in several]
    call = gpu.spmm_transposed if case.problem.task == "transposed" else gpu.spmm
    return [partial(call, m, lain(case.x), choice=choice) for m in several]


def configurations(case: Case) -> list[KernelChoice]:
    """Our kernels that may be the fastest."""
    m = rows_of(case.w)
    has_bits = formats_of(m).bitmap(m) is not None
    return gpu.candidates(case.problem.task, m, case.problem.n, has_bits, processors_of(case.w.device))


def words(choice: KernelChoice) -> str:
    """A kernel as text: its kind, tile, parts and warps."""
    kind, height, width, warps, split = choice
    return kind if kind == "dense" else f"{kind} {height}×{width}×{split} w{warps}"


def forget() -> None:
    """Drop what is cached of matrices; which kernels are fast stays known."""
    gpu_forms.FORMATS.clear()


def lain(x: Tensor) -> Tensor:
    """[k, n] whose columns, that is tokens, are each side by side."""
    return x.t().contiguous().t()


def ours_poisoned(case: Case, choice: KernelChoice | None = None) -> tuple[Tensor, str]:
    """The result in memory that was filled with NaN, and the kernel that computed it: `choice`, else
    the one that is chosen by measuring."""
    m, task = rows_of(case.w), case.problem.task
    if task == "sddmm":
        assert case.y is not None
        choice = choice or gpu.select_kernel(task, m, case.y, case.x)
        out = torch.full_like(m.values, torch.nan)
        result = gpu.run_sddmm(m, formats_of(m), case.y, case.x, choice, out)
    else:
        x = lain(case.x)
        choice = choice or gpu.select_kernel(task, m, x)
        out = like(x, len(case.wanted), x.shape[1]).fill_(torch.nan)
        if task == "transposed":
            result = gpu.run_transposed(m, formats_of(m), x, choice, out)
        else:
            result = gpu.run(m, formats_of(m), x, None, None, choice, out)
    return result, words(choice)


def dense(case: Case) -> Calls:
    """cuBLAS, with the zeros; for SDDMM the whole product, and what is wanted of it."""
    weights = [case.w, *(case.w.clone() for _ in range(copies(case, case.w.nbytes) - 1))]
    if case.problem.task == "sddmm":
        there = (case.w != 0).view(-1).nonzero()[:, 0]
        y, x = case.y, case.x
        assert y is not None
        return [lambda: (y @ x.t()).view(-1)[there]]
    weights = [w.t() for w in weights] if case.problem.task == "transposed" else weights
    tokens = case.x.t().contiguous()
    return [partial(_linear, tokens, w) for w in weights]


def _linear(tokens: Tensor, w: Tensor) -> Tensor:
    return F.linear(tokens, w).t()


def dense_tf32(case: Case) -> Calls:
    """cuBLAS with float32 numbers cut to TF32: other results, in the third digit."""
    if case.problem.dtype != torch.float32:
        raise NotRun("float32 alone")
    return dense(case)


def csr(case: Case) -> Calls:
    """torch.sparse, that is cuSPARSE; SDDMM in float16 where it takes no bfloat16."""
    first = rows_of(case.w)
    bytes_ = first.values.nbytes + first.col.nbytes
    several = [first] + [copied(first) for _ in range(copies(case, bytes_) - 1)]
    weights = [torch.sparse_csr_tensor(m.crow, m.col, m.values, m.size, check_invariants=False) for m in several]
    if case.problem.task == "transposed":
        raise NotRun("has no transposed product")
    if case.problem.task == "sddmm":
        y, x = case.y, case.x
        assert y is not None
        try:
            return _sampled(weights[0], y, x)
        except RuntimeError:
            return _sampled(weights[0].to(torch.float16), y.half(), x.half())
    return [partial(torch.mm, w, case.x) for w in weights]


def _sampled(w: Tensor, y: Tensor, x: Tensor) -> Calls:
    zero = w * 0
    torch.sparse.sampled_addmm(zero, y, x.t())  # raises where there is none
    return [lambda: torch.sparse.sampled_addmm(zero, y, x.t()).values()]


def half(case: Case) -> Calls:
    """2:4: the two largest of four weights; drops others, so that its results are others."""
    if case.problem.task != "spmm" or case.problem.dtype == torch.float32 or not case.w.is_cuda:
        raise NotRun("16-bit SpMM on a GPU alone")
    groups = case.w.abs().view(-1, 4)
    largest = torch.zeros_like(groups).scatter_(1, groups.topk(2, 1).indices, 1).view_as(case.w)
    w = torch.sparse.to_sparse_semi_structured((case.w * largest).contiguous())
    tokens = case.x.t().contiguous()
    return [partial(_linear, tokens, w)]


def bsr(case: Case) -> Calls:
    """torch's BSR kernels in Triton: as many nonzeros, in blocks, so that its results are
    others."""
    m, k = case.problem.m, case.problem.k
    if case.problem.task != "spmm" or m % BLOCK or k % BLOCK or not case.w.is_cuda:
        raise NotRun("SpMM of whole blocks on a GPU alone")
    density = 1 - case.problem.sparsity
    there = torch.rand(m // BLOCK, k // BLOCK, device=case.w.device) < density
    mask = there.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    w = (torch.randn_like(case.w) * mask).to_sparse_bsr(BLOCK)
    tokens = case.x.t().contiguous()
    return [partial(_linear, tokens, w)]


CONTENDERS: Mapping[str, Callable[[Case], Calls]] = {
    "demask": ours,
    "cuBLAS": dense,
    "cuBLAS TF32": dense_tf32,
    "cuSPARSE": csr,
    "2:4": half,
    "BSR": bsr,
}
OTHERS = ("cuBLAS TF32", "2:4", "BSR")  # compute something else


def error(case: Case, result: Tensor) -> float:
    """The norm of the difference to that of the result in float64; NaN stays."""
    difference = torch.linalg.vector_norm(result.double() - case.wanted)
    return float(difference / torch.linalg.vector_norm(case.wanted).clamp(min=1e-30))
