"""The kernels compiled for an A100 and an H100 (sm_80, sm_90), with no GPU here: registers, loads,
tensor cores."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("triton")

from compiled_kernels import compiled
from demask.kernels import gpu
from demask.sparse.products.gpu_products import FEW_COLUMNS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton has its assembler on Linux")
TARGETS = (80, 90)  # A100, H100
REST = {"first": "fp32", "second": "fp32", "n": "i32"}


def rows(kind, height, lanes, width, warps, even=True, target=90):
    pointer = f"*{kind}"
    types = dict.fromkeys(("begins", "ends", "targets"), "*i32") | {"col": "*u16"}
    types |= dict.fromkeys(("values", "x", "out", "bias"), pointer) | {"partial": "*fp32"}
    types |= dict.fromkeys(("tasks", "x_row", "out_row"), "i32") | REST
    constants = {"ROWS": height, "LANES": lanes, "WIDTH": width, "SPLIT": True, "BIASED": True, "ACT": "relu"}
    small = set() if lanes == 1 else {"n", "x_row", "out_row"}
    aligned = [*types.keys() - {"tasks", "first", "second"} - small] if even else []
    kernel = gpu.spmm_rows
    return compiled(kernel, types, constants | {"out_column": 1}, aligned, warps, target)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("height", "width", "warps"), [(4, 64, 1), (8, 64, 2), (2, 128, 1)])
@pytest.mark.parametrize("target", TARGETS)
def test_rows_load_vectors(height, width, warps, target):
    """Values and x by 16 bytes; nothing goes from thread to thread but the longest row, before the
    loop."""
    found = rows("fp32", height, 1, width, warps, target=target)
    sums = height * width // (32 * warps)  # per thread, four nonzeros at a time
    assert found.count("LDG.E.128") >= 1 + 4 * sums // 4
    assert found.count("FFMA") == 4 * sums
    assert found.count("SHFL") <= 4
    assert found.count("BAR") == found.count("LDS") == 0
    assert found.stack == 0
    assert found.registers <= 96


def test_several_rows_of_half_a_warp_load_vectors():
    found = rows("bf16", 4, 1, 64, 1)
    assert found.count("LDG.E.128") >= 4  # four nonzeros of 2 x 64 values a time
    assert found.stack == found.count("BAR") == 0
    assert found.registers <= 96


@pytest.mark.sampled(8)
@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("shape", [(lanes, warps) for lanes, warps in FEW_COLUMNS if warps == 1], ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_lanes_of_few_columns_load_vectors(kind, n, shape, target):
    """Eight columns by 16 bytes, their values by one or two times 16, and rows of x at once; lanes
    add their sums by shuffles, after the loop."""
    lanes, warps = shape
    width, size = 1 << (n - 1).bit_length(), 4 if kind == "fp32" else 2
    found = rows(kind, 32 * warps // lanes, lanes, width, warps, target=target)
    of_x = 8 * width * size // 16 if width * size >= 16 else 0
    assert found.count("LDG.E.128") == 1 + size // 2 + of_x
    assert found.count("LDG.E.64") == (8 if width * size == 8 else 0)
    assert found.count("FFMA") + found.count("FMUL") >= 8 * width
    assert found.count("LDL") == found.count("STL") == found.stack == 0
    assert found.registers <= 72


def test_a_planted_fault_is_found():
    """Without aligned addresses there are no vectors."""
    assert rows("fp32", 4, 1, 64, 1, even=False).count("LDG.E.128") == 0


nightly = pytest.mark.nightly
TILES = {"bf16, narrow": ("bf16", 128, 16, False, 8, 96), "fp16, transposed": ("fp16", 64, 64, True, 4, 144)}
MORE = {
    "bf16": ("bf16", 128, 64, False, 8, 136),
    "bf16, wide": ("bf16", 128, 128, False, 8, 176),
    "fp32, narrow": ("fp32", 64, 16, False, 4, 168),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*TILES, *(pytest.param(n, marks=nightly) for n in MORE)])
@pytest.mark.parametrize("target", TARGETS)
def test_bitmaps_use_tensor_cores(name, target):
    """Bits are counted before the loop and in it, once for eight elements, and each is loaded once."""
    kind, height, width, turned, warps, registers = (TILES | MORE)[name]
    types = {"masks": "*i64", "starts": "*i32", "partial": "*fp32"} | REST
    types |= dict.fromkeys(("values", "x", "out", "bias"), f"*{kind}")
    types |= dict.fromkeys(("high", "tiles", "x_row", "out_row", "k", "m", "share"), "i32")
    aligned = [*types.keys() - {"tiles", "share", "first", "second"}]
    constants = {
        "HEIGHT": height,
        "WIDTH": width,
        "TRANSPOSED": turned,
        "SPLIT": True,
        "BIASED": True,
        "ACT": "relu",
        "WIDE": False,
        "x_column": 1,
        "out_column": 1,
    }
    found = compiled(gpu.spmm_bitmap, types, constants, aligned, warps, target)
    assert found.count("HGMMA" if target >= 90 else "HMMA") > 0
    octets = height * 8 // (32 * warps)  # per thread
    assert found.count("POPC") == 2 * 2 * octets
    assert found.count("LDG") <= 8 * octets + 32  # bits, starts, x and the bias
    assert found.count("LDL") == found.count("STL") == found.stack == 0, "registers do not hold a tile"
    assert found.registers <= registers


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", TARGETS)
def test_sddmm_by_rows_loads_vectors(target):
    types = dict.fromkeys(("begins", "ends", "rows"), "*i32") | {"col": "*u16"}
    types |= dict.fromkeys(("a", "b", "out"), "*fp32") | dict.fromkeys(("a_row", "b_row", "k"), "i32")
    for entries, step, warps in ((32, 128, 4), (8, 128, 1)):
        constants = {"ENTRIES": entries, "STEP": step}
        found = compiled(gpu.sddmm_rows, types, constants, types, warps, target)
        assert found.count("LDG.E.128") >= entries * step // (32 * warps) // 4
        assert found.stack == 0
        assert found.registers <= 128


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", TARGETS)
def test_sddmm_by_tiles_uses_tensor_cores(target):
    types = {"masks": "*i64", "starts": "*i32"} | dict.fromkeys(("a", "b", "out"), "*bf16")
    types |= dict.fromkeys(("high", "a_row", "b_row", "m", "n", "k"), "i32")
    constants = {"HEIGHT": 128, "STEP": 64, "WIDE": False, "a_step": 1, "b_step": 1}
    found = compiled(gpu.sddmm_bitmap, types, constants, types, 4, target)
    assert found.count("HGMMA" if target >= 90 else "HMMA") > 0
    assert found.count("POPC") == 2 * 8  # per octet, of which a thread has 8
    assert found.registers <= 176
    assert found.count("LDG.E.128") >= 12
    assert found.stack == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", TARGETS)
def test_the_dense_matrix_is_written_by_vectors(target):
    types = {"masks": "*i64", "starts": "*i32", "values": "*bf16", "out": "*bf16"}
    types |= dict.fromkeys(("high", "m", "k"), "i32")
    found = compiled(gpu.decompress, types, {"HEIGHT": 64}, types, 4, target)
    assert found.count("STG.E.128") == 4
    assert found.count("LDS") == found.count("STS") == found.count("BAR") == 0
    assert found.stack == 0


@nightly
def test_every_activation_compiles():
    types = {"partial": "*fp32", "out": "*bf16", "bias": "*bf16"} | REST
    types |= dict.fromkeys(("rows", "firsts", "counts"), "*i32")
    types |= dict.fromkeys(("tasks", "parts", "step", "out_row", "out_column"), "i32")
    for act in ("gelu", "gelu_tanh", "tanh", "hardswish", "clamp", "leaky_relu", "sigmoid", "silu"):
        constants = {"HEIGHT": 4, "WIDTH": 256, "LISTED": True, "BIASED": True, "ACT": act}
        assert compiled(gpu.finish, types, constants, (), 4).stack == 0


def test_the_others_compile():
    types = {"offsets": "*i64", "rows": "*i64", "begins": "*i64", "values": "*fp32", "total": "i64"}
    types |= {"other_col": "*i32", "other_values": "*fp32", "keys": "*i64", "products": "*fp32"}
    types |= dict.fromkeys(("entries", "halvings", "n"), "i32")
    assert compiled(gpu.expand, types, {"COUNT": 256}, (), 4).stack == 0
    types = {"products": "*fp32", "order": "*i64", "begins": "*i64", "out": "*fp32", "count": "i32"}
    assert compiled(gpu.compress, types, {"COUNT": 256}, (), 4).stack == 0
