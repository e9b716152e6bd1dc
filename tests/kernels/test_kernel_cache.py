"""Compiled kernels in files: what later processes load, and what they must not run."""

import ctypes
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llvmlite")
import own_process
from demask.kernels.cpu.tiles import relayout
from demask.kernels.llvm import activations, jit
from demask.kernels.llvm.emitter import I64
from demask.kernels.llvm.isa import AVX2, host
from demask.kernels.llvm.jit import LIMIT, MOST, Code, source
from demask.machine import private_files
from demask.machine.private_files import PrivateFiles

NAME = "0" * 64


@dataclass(frozen=True)
class Added:
    """Kernel k(address): adds a constant to the number at an address."""

    number: int

    arguments = 1

    def emit(self, e):
        address = e.pointer(e.args[0])
        e.b.store(e.b.add(e.load(I64, address), I64(self.number)), address)


def result(code, number=2):
    """What the kernel of a Code adds to 40."""
    kernel, memory = Added(number), np.array([40])
    ctypes.CFUNCTYPE(None, ctypes.c_int64)(code.addresses([kernel])[kernel])(memory.ctypes.data)
    return int(memory[0])


@pytest.fixture
def files(tmp_path):
    return PrivateFiles(tmp_path / "new" / "kernels", "kernel", LIMIT, MOST)


def only(files):
    """The only file of a folder."""
    (path,) = files.folder.iterdir()
    return path


def test_a_kernel_is_compiled_once(files):
    first, second = Code(files), Code(files)
    assert (result(first), first.compiled) == (42, 1)
    assert (result(second), second.compiled) == (42, 0)
    assert (result(second, 3), second.compiled) == (43, 1)
    assert files.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in files.folder.iterdir()} == {0o600}


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:10],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[:-200] + bytes([data[-200] ^ 1]) + data[-199:],
        lambda data: data.replace(b"kernel 1", b"kernel 0"),
        lambda data: bytes(len(data)),
    ],
)
def test_a_damaged_file_is_compiled_anew_and_replaced(files, damage):
    result(Code(files))
    path = only(files)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    code = Code(files)
    assert (result(code), code.compiled) == (42, 1)
    assert only(files).read_bytes() == whole


def test_a_file_under_another_name_is_not_used(files):
    result(Code(files))
    path = only(files)
    kernel = Added(3)
    path.rename(path.with_name(jit.kernel_key(kernel, host())))
    assert result(Code(files), 3) == 43


def below_a_file(path):
    path.parent.mkdir(parents=True)
    path.touch()


def is_a_file(path):
    below_a_file(path / "x")


def is_a_link(path):
    real = path.parent.with_name("real")
    real.mkdir(mode=0o700)
    path.parent.mkdir()
    path.symlink_to(real)


def of_mode(mode):
    def make(path):
        path.parent.mkdir()
        path.mkdir()
        path.chmod(mode)

    return make


@pytest.mark.parametrize("make", [below_a_file, is_a_link, of_mode(0o777), of_mode(0o702), of_mode(0o720)])
def test_a_folder_that_must_not_be_used_is_left_alone(files, make):
    make(files.folder)
    before = sorted(files.folder.parent.rglob("*"))
    code = Code(files)
    assert (result(code), code.compiled) == (42, 1)
    assert sorted(files.folder.parent.rglob("*")) == before


def test_files_that_others_can_write_are_not_read(files):
    result(Code(files))
    only(files).chmod(0o666)
    code = Code(files)
    assert (result(code), code.compiled) == (42, 1)
    result(loaded := Code(files))
    assert loaded.compiled == 0  # the file was replaced


def test_files_of_another_user_are_not_read(files, monkeypatch):
    result(Code(files))
    user = os.geteuid()
    monkeypatch.setattr(private_files.os, "geteuid", lambda: user + 1)
    code = Code(files)
    assert (result(code), code.compiled) == (42, 1)


def test_an_unwritable_folder_is_read(files, monkeypatch):
    result(Code(files))
    real = os.open

    def refused(path, flags, *args, **kwargs):  # root may write into any folder
        if flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *args, **kwargs)

    def read_only(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(private_files.os, "open", refused)
    monkeypatch.setattr(private_files.os, "utime", read_only)
    code = Code(files)
    assert (result(code), result(code, 3), code.compiled) == (42, 43, 1)


def test_a_full_disk_is_ignored(files, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(private_files.os, "replace", full)
    code = Code(files)
    assert (result(code), code.compiled) == (42, 1)
    assert list(files.folder.iterdir()) == []


def test_the_oldest_files_are_removed(files):
    files.limit = 5000
    for number in range(8):
        files.write(f"{number}", bytes(900))
        os.utime(files.folder / f"{number}", (number, number))
        files.read("1")  # used last
        assert sum(path.stat().st_size for path in files.folder.iterdir()) <= 5000
    kept = {path.name for path in files.folder.iterdir()}
    assert {"1", "7"} <= kept
    assert not {"0", "2", "3"} & kept
    other = PrivateFiles(files.folder, "kernel", 2000, MOST)  # counts what others have written
    other.write("8", bytes(900))
    assert {path.name for path in files.folder.iterdir()} == {"8"}


def test_names_tell_kernels_and_processors_apart():
    kernels = [
        Added(1),
        Added(2),
        Added(-1),
        relayout.Gather(),
        relayout.Gather(-0.0),
        relayout.Gather(float("-inf")),
        relayout.Scatter(),
        relayout.Pointwise(None, True),
        relayout.Pointwise(("relu", ()), True),
        relayout.Pointwise(("relu", ()), False),
    ]
    isas = [host(), AVX2, replace(AVX2, features="+avx512f"), replace(AVX2, cpu="znver4")]
    names = {jit.kernel_key(kernel, isa) for kernel in kernels for isa in isas}
    assert None not in names
    assert len(names) == len(kernels) * len(isas)
    assert jit.kernel_key(Added(np.int64(1)), AVX2) in names
    assert "k_x" in source(kernels[:1], AVX2, ["k_x"])


def test_kernels_whose_code_has_no_name_are_not_written(files, monkeypatch):
    @dataclass(frozen=True)
    class Local(Added):
        pass

    assert jit.kernel_key(Local(1), AVX2) is None
    assert jit.kernel_key(Added(object()), AVX2) is None
    monkeypatch.setitem(activations.LOWERINGS, "own", lambda e, x: x)
    assert jit.kernel_key(relayout.Pointwise(("own", ()), False), AVX2) is None
    emit = Added.emit
    with monkeypatch.context() as patch:
        patch.setattr(relayout.Scatter, "emit", lambda self, e: emit(self, e))
        assert jit.kernel_key(relayout.Scatter(), AVX2) is None
    monkeypatch.setattr(jit, "kernel_key", lambda *_: None)
    code = Code(files)
    assert (result(code), result(code, 3), code.compiled) == (42, 43, 2)
    assert not files.folder.exists()


def test_an_edited_file_gives_another_name(monkeypatch):
    before = jit.kernel_key(Added(1), AVX2)
    jit._files_digest.cache_clear()
    read = Path.read_bytes
    edited = lambda path: read(path) + b"#" * (path.name == "relayout.py")  # noqa: E731
    monkeypatch.setattr(Path, "read_bytes", edited)
    assert jit.kernel_key(Added(1), AVX2) not in (None, before)
    jit._files_digest.cache_clear()
    monkeypatch.setattr(private_files, "IMPORTED", 0.0)  # all files were edited since
    assert jit.kernel_key(Added(1), AVX2) is None
    jit._files_digest.cache_clear()


SEGMENT = """
import torch
from demask.kernels.llvm.jit import CODE
from demask.sparse import spmm
from demask.sparse.segment.segment_op import segment
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import (SparseWeight, linear_step)
step = linear_step(0, SparseWeight((0, 0, 1), (1, 0, 3), (1, 3, 4)), None, out=2)
weights = [torch.tensor([5.0]), torch.tensor([0, 0, 1, 2], dtype=torch.int32)]
for count in (1, 40):
    y, = segment([torch.eye(count, 3)], weights, SegmentProgram(("tokens",), (step,), (1,)).text())
    assert y.sum() == (5 if count > 2 else 0)
print(CODE.files.folder, CODE.compiled, len(CODE.known))
"""


def started(folder):
    """A process that runs a segment, with its cache folder below `folder`."""
    environment = {"XDG_CACHE_HOME": str(folder), "HOME": str(folder)}
    return own_process.start(SEGMENT, environment=environment)


def counts(process):
    """The folder, and how many kernels a process has compiled and used."""
    output, err = process.communicate()
    assert process.returncode == 0, err
    folder, compiled, used = output.split()
    return Path(folder), int(compiled), int(used)


def test_a_later_process_compiles_nothing(tmp_path):
    both = [started(tmp_path) for _ in range(2)]  # at once
    for process in both:
        folder, compiled, used = counts(process)
        assert folder.is_relative_to(tmp_path)
        assert 0 <= compiled <= used
    assert len(list(folder.iterdir())) == used  # nothing else is left
    assert counts(started(tmp_path)) == (folder, 0, used)
