"""CPU kernels as an ARM processor runs them, in qemu: some of each family, and faults that must be seen."""

from __future__ import annotations

import pytest

import own_process
from tests.arm.emulated import missing_tool

pytestmark = pytest.mark.skipif(bool(missing_tool()), reason=missing_tool())

PRODUCTS = """
import sys
import torch
from demask.kernels.llvm.emitter import Emitter
from tests.arm.emulated import emulate

driver = emulate()
from demask.sparse import PackedLinear, SparseConv2d, sddmm, spmm

fault = sys.argv[1]
if fault == "arithmetic":
    Emitter.fma = lambda self, a, b, c: self.b.fsub(c, self.b.fmul(a, b))
torch.manual_seed(0)
weight = torch.randn(24, 70) * (torch.rand(24, 70) < 0.5)
x, images = torch.randn(3, 70), torch.randn(1, 8, 9, 9)
layer = torch.nn.Linear(70, 24, False)
layer.weight.data.copy_(weight)
matrix = weight.to_sparse_csr()
conv = torch.nn.Conv2d(8, 12, 3)
conv.weight.data *= torch.rand_like(conv.weight) < 0.3
y = torch.randn(24, 3)
if fault == "address":
    matrix.values().untyped_storage().resize_(0)  # which reads what is not there
cases = {form: (PackedLinear.from_dense(layer, form)(x), x.double() @ weight.double().T)
         for form in ("dense", "bitmap", "columns")}
cases["spmm"] = spmm(matrix, x.T), weight.double() @ x.double().T
cases["sddmm"] = sddmm(y, x, matrix).to_dense(), (y.double() @ x.double()) * (weight != 0)
cases["conv"] = SparseConv2d.from_dense(conv)(images), conv.double()(images.double())
wrong = [name for name, (made, exact) in cases.items() if (made - exact).abs().max() > 1e-5 * exact.abs().max()]
print("wrong:", *wrong, "calls:", driver.calls)
driver.stop()
"""


def test_kernels_run_on_an_arm_processor() -> None:
    status, out, err = own_process.run(PRODUCTS, "")
    assert status == 0, err
    wrong, calls = out.split("calls:")
    assert wrong.split() == ["wrong:"] and int(calls) >= 6


def test_a_planted_fault_is_seen() -> None:
    status, out, err = own_process.run(PRODUCTS, "arithmetic")
    assert status == 0, err
    assert {"dense", "bitmap", "spmm", "conv"} <= set(out.split())


def test_code_that_reads_where_nothing_is_ends() -> None:
    status, _, err = own_process.run(PRODUCTS, "address")
    assert status == 1 and "aarch64 code ended with" in err
