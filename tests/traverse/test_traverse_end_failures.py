"""What parts cannot come from or go to is refused; old files outlive failures and kills."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import textwrap

import numpy as np
import pytest
import torch

import own_process
from demask.errors import BadInput
from demask.traverse.storage.sources_and_sinks import spill, tensor_sink, tensor_source
from stored_arrays import array_sink, array_source
from test_traverse_ends import drawn


def hostile(path, kind):
    """A file that is no plain array."""
    if kind == "pickle":
        np.save(path, np.array([{}], object), allow_pickle=True)
    elif kind == "short":
        np.save(path, drawn((1, 2, 3, 4)))
        path.write_bytes(path.read_bytes()[:-1])
    elif kind == "zip":
        np.savez(path.with_suffix(".npz"), drawn((2, 2)))
        path.with_suffix(".npz").rename(path)
    elif kind == "nested":
        text = b"(" * 9000
        path.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    elif kind == "structure":
        np.save(path, np.zeros(3, [("a", "f4")]))
    elif kind == "text":
        np.save(path, np.array(["a"]))
    elif kind == "folder":
        path.mkdir()


@pytest.mark.parametrize("kind", ["pickle", "short", "zip", "nested", "structure", "text", "folder", "missing"])
def test_a_file_that_is_no_array_is_refused_by_name(tmp_path, kind):
    path = tmp_path / "x.npy"
    hostile(path, kind)
    with pytest.raises(BadInput, match=r"x\.npy"):
        array_source(path, (2, 3))


def test_a_file_cut_short_while_it_is_read_is_an_error(tmp_path):
    np.save(tmp_path / "x.npy", drawn((1, 2, 3, 4)))
    source = array_source(tmp_path / "x.npy", (2, 3))
    os.truncate(tmp_path / "x.npy", 140)
    with pytest.raises(BadInput, match="ended at byte 140"):
        source.read(((0, 3), (0, 4)), torch.empty(1, 2, 3, 4))


@pytest.mark.parametrize(
    ("values", "stored"),
    [("float32", "int32"), ("int64", "int32"), ("int8", "uint8"), ("int64", "bool"), ("complex64", "float32")],
)
def test_a_conversion_that_loses_numbers_is_refused(tmp_path, values, stored):
    kinds = getattr(torch, values), getattr(torch, stored)
    sink = array_sink(tmp_path / "y.npy", (1, 2, 3, 4), (2, 3), *kinds)
    with pytest.raises(BadInput, match=f"{values}.*{stored}"), sink:
        pass


def test_a_sink_says_what_it_cannot_write(tmp_path):
    sink = array_sink(tmp_path / "y.npy", (1, 2, 3, 4), (2, 3), torch.bfloat16)
    with pytest.raises(BadInput, match=r"numpy has no bfloat16.*output='float32'"), sink:
        pass
    sink = array_sink(tmp_path / "no" / "y.npy", (1, 2, 3, 4), (2, 3), torch.float32)
    with pytest.raises(BadInput, match="does not exist"), sink:
        pass
    np.save(tmp_path / "x.npy", drawn((1, 2, 3, 4)))
    with pytest.raises(BadInput, match=r"mode='r\+'"):
        tensor_sink(np.load(tmp_path / "x.npy", mmap_mode="r"), (2, 3), torch.float32)
    with pytest.raises(BadInput, match="copy it first"):
        tensor_source(drawn((1, 2, 3, 4))[:, ::-1], (2, 3))
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]


def test_a_spill_refuses_parts_in_another_layout(tmp_path):
    held = spill((1, 3, 4, 5), torch.float32, (2, 3), tmp_path)
    with pytest.raises(ValueError, match="laid out"):
        held.write(((0, 4), (0, 5)), torch.zeros(1, 3, 4, 5))
    with pytest.raises(ValueError, match="expected a part of"):
        held.write(((0, 4), (0, 5)), torch.zeros(1, 3, 4, 4))


def test_files_are_closed_with_their_ends(tmp_path):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    np.save(tmp_path / "x.npy", drawn((1, 2, 3, 4)))
    held = spill((1, 2, 3, 4), torch.float32, (2, 3), tmp_path)
    source = array_source(tmp_path / "x.npy", (2, 3))
    with array_sink(tmp_path / "y.npy", (1, 2, 3, 4), (2, 3), torch.float32) as sink:
        assert len(os.listdir("/proc/self/fd")) >= before + 3
    held.close()
    held.close()
    for spoil in (copy.deepcopy, pickle.dumps):  # a second owner would close it twice
        with pytest.raises(TypeError, match="is open"):
            spoil(source)
    del source, sink
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def child(code, tmp_path):
    """A process of its own that runs `code` after these lines."""
    start = """
        import os, resource, sys, time
        import numpy as np, torch
        from demask.exec.axes import empty, part
        from demask.traverse.storage.sources_and_sinks import StoredSource, spill, tensor_source
        from demask.traverse.storage.store import SliceStore
        from stored_arrays import array_sink, array_source, full_order
        torch.set_num_threads(1)
    """
    return own_process.start(textwrap.dedent(start) + textwrap.dedent(code), folder=tmp_path)


@pytest.mark.nightly
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="reads Linux's /proc")
def test_a_mapped_gibibyte_passes_through_a_few_mebibytes(tmp_path):
    """A file with holes, read as float32 and written as bytes, in bands of 64 rows."""
    code = """
        def kib(key):
            return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1])
        shape, axes = (1, 4, 4096, 16384), (2, 3)
        np.lib.format.open_memmap("x.npy", "w+", np.float32, shape)._mmap.close()
        band = empty((1, 4, 64, 16384), axes, torch.float32).zero_()
        mapped = SliceStore.of(np.load("x.npy", mmap_mode="r"))
        source = StoredSource.of(mapped, full_order(shape), axes)
        with array_sink("y.npy", shape, axes, torch.float32, torch.uint8) as sink:
            open("/proc/self/clear_refs", "w").write("5")
            before = kib("VmRSS")
            for row in range(0, 4096, 64):
                window = (row, row + 64), (0, 16384)
                source.read(window, band)
                sink.write(window, band)
        print(kib("VmHWM") - before)
    """
    out, err = child(code, tmp_path).communicate(timeout=300)
    assert out, err
    assert int(out) < 32 * 1024
    assert (tmp_path / "y.npy").stat().st_size == 4 * 4096 * 16384 + 128
    for path in tmp_path.iterdir():
        path.unlink()  # pytest keeps folders
