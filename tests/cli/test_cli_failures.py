"""Commands that fail: one line on stderr, a status, bounded time and memory; no traceback."""

import io
import os
import runpy
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import demask
import test_cli
from demask.errors import BadInput
from demask.files.arrays import read_arrays
from demask.graph.capture.fold_constants import fold_constants
from demask.ops import TABLE
from demask.shrink.pipeline import shrink_program

run = test_cli.run  # a fixture


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A folder with two networks of different inputs."""
    folder = tmp_path_factory.mktemp("stored")
    for name, net in (("n", nn.Linear(4, 2)), ("other", nn.Linear(3, 2))):
        example = torch.randn(2, net.in_features)
        demask.to_pt2(demask.demask(net.eval(), (example,)), folder / f"{name}.pt2")
    return folder


@pytest.fixture
def files(stored, tmp_path):
    """The folder that commands run in, with copies of both."""
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    return tmp_path


def failed(outcome, status=2):
    """The one line that a command ended in."""
    assert outcome.code == status, outcome
    (line,) = outcome.err.splitlines()
    assert line.startswith("demask: ") and "Traceback" not in line
    return line


# -- files that are not what they claim -----------------------------------------------------------


def npy(shape, dtype="<f4", numbers=b""):
    file = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + numbers


def bomb(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", npy((2**23, 4)) + bytes(2**27))


def packed(path):
    np.savez_compressed(path, **{"input:0": np.zeros((3, 4), np.float32)})


HOSTILE = {
    "bomb.npz": (bomb, "a zip bomb"),
    "huge.npy": (lambda p: p.write_bytes(npy((2**48, 4))), "has 0 of them"),
    "objects.npy": (lambda p: p.write_bytes(npy((2,), "|O", b"cos\nsystem")), "array of numbers"),
    "records.npy": (lambda p: p.write_bytes(npy((1,), [("a", "<f4")], bytes(4))), "of numbers"),
    "text.npy": (lambda p: p.write_text("text"), "numpy.save wrote"),
    "short.npy": (lambda p: p.write_bytes(npy((2, 4), numbers=bytes(31))), "has 31 of them"),
    "notzip.npz": (lambda p: p.write_bytes(b"PK\x03\x04" + bytes(100)), "expected a zip archive"),
    "pipe.npy": (lambda p: os.mkfifo(p), "another kind"),
    "pipe.safetensors": (lambda p: os.mkfifo(p), "another kind"),
    "pipe.npz": (lambda p: os.mkfifo(p), "another kind"),
    "zero.npy": (lambda p: p.symlink_to("/dev/zero"), "another kind"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_arrays_that_lie_are_refused(tmp_path, name):
    make, words = HOSTILE[name]
    make(tmp_path / name)
    with pytest.raises(BadInput, match=words):
        read_arrays(tmp_path / name)


def test_a_command_refuses_them_in_one_line(run, files):
    (files / "huge.npy").write_bytes(npy((2**48, 4)))
    assert "has 0 of them" in failed(run("pilot", "compare", "n.pt2", "huge.npy"))
    os.mkfifo(files / "pipe.pt2")
    assert "another kind" in failed(run("inspect", "pipe.pt2"))


def test_arrays_are_read_as_numpy_reads_them(tmp_path):
    arrays = {
        "c": np.arange(12.0).reshape(3, 4),
        "f": np.asfortranarray(np.arange(12).reshape(3, 4)),
        "big": np.arange(5, dtype=">i4"),
        "empty": np.zeros((0, 3)),
        "number": np.array(True),
        "complex": np.ones((2, 1), np.complex64),
        "half": np.ones(3, np.float16),
    }
    np.savez(tmp_path / "all.npz", **arrays)
    np.savez_compressed(tmp_path / "packed.npz", **arrays)
    for file in ("all.npz", "packed.npz"):
        made = read_arrays(tmp_path / file)
        assert made.keys() == arrays.keys()
        for name, array in arrays.items():
            assert np.array_equal(made[name].numpy(), array), name
    np.save(tmp_path / "one.npy", arrays["f"])
    assert np.array_equal(read_arrays(tmp_path / "one.npy")[""].numpy(), arrays["f"])
    packed(tmp_path / "odd.npz")
    assert list(read_arrays(tmp_path / "odd.npz")) == ["input:0"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("a = " + "9" * 5000, "expected a TOML document"),
        ("a = 1 #" + "x" * 2**16, "at most 65,536 bytes"),
        ("ops = []\n[conv]\nstride = 1.5", "an integer"),
    ],
)
def test_hostile_targets_are_refused(run, files, text, words):
    (files / "mine.toml").write_text(text)
    line = failed(run("lower", "n.pt2", "-o", "o.pt2", "--target", "mine.toml"))
    assert words in line and not (files / "o.pt2").exists()


# -- networks in formats that demask does not read ------------------------------------------------


def script(path):
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)


OTHERS = {
    "script.pt": (script, "TorchScript"),
    "state.pth": (lambda p: torch.save(nn.Linear(2, 2).state_dict(), p), "a pickle of torch.save"),
    "whole.pt2": (lambda p: torch.save(nn.Linear(2, 2), p), "a pickle of torch.save"),
    "old.pt": (lambda p: torch.save({}, p, _use_new_zipfile_serialization=False), "a pickle of torch.save"),
    "w.safetensors": (lambda p: safetensors.torch.save_file({"w": torch.ones(2)}, p), "no graph"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_are_refused_by_name_with_what_to_do(run, tmp_path, name):
    make, words = OTHERS[name]
    make(tmp_path / name)
    line = failed(run("inspect", name))
    assert words in line and "torch.export.export(module, inputs)" in line and name in line


# -- words that a command does not take ---------------------------------------------------------------

REFUSED = (  # outputs are checked first, before `empty.pt2`, which is no network, is read
    ("slim", "Missing argument"),
    ("slim n.pt2", "--output FILE or --in-place"),
    ("dance", "dance"),
    ("verify n.pt2", "Missing argument"),
    ("slim missing.pt2 -o o.pt2", "missing.pt2"),
    ("slim broken.pt2 -o o.pt2", "broken.pt2"),
    ("slim empty.pt2 -o o.tflite", "ends in .pt2 or .demask or .onnx"),
    ("slim empty.pt2 -o missing/o.pt2", "does not exist"),
    ("verify n.pt2 broken.pt2", "broken.pt2"),
    ("bench broken.pt2", "broken.pt2"),
    ("bench n.pt2 --batch 0", "--batch"),
    ("bench n.pt2 --threads 0", "--threads"),
    ("bench n.pt2 --pairs 0", "--pairs"),
    ("bench empty.pt2 --plot o.jpg", "ends in .svg or .png or .pdf"),
    ("bench empty.pt2 --plot missing/o.svg", "does not exist"),
    ("optimize empty.pt2 -o o.onnx", "expected an output that ends in"),
    ("optimize empty.pt2 -o no/such/folder/o.demask", "folder"),
    ("optimize n.pt2 -o o.demask --threads 0", "threads"),
    ("lower n.pt2 -o o.pt2 --target gpu", "no target 'gpu'"),
    ("lower n.pt2 -o o.pt2 --target own.toml", "no such file"),
    ("lower empty.pt2 -o o.txt", "ends in .pt2"),
    ("halo missing.pt2", "missing.pt2"),
    ("halo n.pt2 --tile 0", "--tile"),
)


@pytest.mark.parametrize(("words", "complaint"), REFUSED)
def test_wrong_words_end_with_2_and_leave_nothing(run, files, words, complaint):
    (files / "empty.pt2").touch()
    (files / "broken.pt2").write_bytes((files / "n.pt2").read_bytes()[:2000])
    before = sorted(p.name for p in files.iterdir())
    outcome = run(*words.split())
    assert (outcome.code, outcome.out) == (2, "")
    assert complaint in outcome.err and "Traceback" not in outcome.err
    assert sorted(p.name for p in files.iterdir()) == before


# -- absurd numbers -------------------------------------------------------------------------------

HUGE = 10**12
ABSURD = (
    ("bench", "n.pt2", "--threads", HUGE, "--no-compile"),
    ("bench", "n.pt2", "--batch", HUGE, "--no-compile"),
    ("bench", "n.pt2", "--seconds", "nan", "--no-compile"),
    ("optimize", "n.pt2", "-o", "o.demask", "--threads", HUGE),
    ("pilot", "explain", "n.pt2", "x.npy", "--threads", HUGE),
    ("pilot", "explain", "n.pt2", "x.npy", "--loss", "nan"),
    ("pilot", "compare", "n.pt2", "x.npy", "--by", f"bits:{HUGE}"),
    ("pilot", "compare", "n.pt2", "x.npy", "--by", "bits:-1"),
    ("pilot", "compare", "n.pt2", "x.npy", "--by", "rank:nan"),
    ("pilot", "compare", "n.pt2", "x.npy", "--by", "channels:-1"),
    ("pilot", "collect", "n.pt2", "x.npy", "-o", "o.safetensors", "--per", f"tile:{HUGE}"),
    ("pilot", "collect", "n.pt2", "x.npy", "-o", "o.safetensors", "--memory", "nan"),
    ("pilot", "condition", "n.pt2", "--condition", "skip:nan"),
    ("pilot", "condition", "n.pt2", "--condition", "skip:-1"),
    ("pilot", "condition", "n.pt2", "--condition", f"precision:0.5:bits={HUGE}"),
    ("pilot", "condition", "n.pt2", "--condition", "order:deadline=-1"),
    ("stream", "n.pt2", "x.npy", "o.npy", "--memory", "-1"),
    ("stream", "n.pt2", "x.npy", "o.npy", "--memory", f"{HUGE}0000000TiB"),
    ("stream", "n.pt2", "x.npy", "o.npy", "--memory", "nan"),
    ("verify", "n.pt2", "other.pt2"),
    ("demo", "--runs", 0),
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("words", ABSURD, ids=lambda words: " ".join(map(str, words)))
def test_absurd_numbers_are_bad_input(run, files, words):
    np.save(files / "x.npy", np.ones((3, 4), np.float32))
    before = sorted(p.name for p in files.iterdir())
    outcome = run(*words)
    assert outcome.code == 2, outcome
    assert "internal error" not in outcome.err and "Traceback" not in outcome.err
    assert len([line for line in outcome.err.splitlines() if line.startswith("demask: ")]) <= 1
    assert sorted(p.name for p in files.iterdir()) == before


# -- errors that nobody expected ------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (KeyError("lost"), 2, "internal error, KeyError: 'lost'; please report it"),
        (RuntimeError("first\nsecond"), 2, "internal error, RuntimeError: first; please"),
        (MemoryError(), 2, "not enough memory"),
        (RuntimeError("[x] DefaultCPUAllocator: can't allocate memory: you"), 2, "not enough"),
        (FileNotFoundError(2, "No such file", "gone.txt"), 2, "gone.txt: No such file"),
        (demask.NotExportable("aten.foo", "m.py:3", "change it"), 2, "; at: m.py:3; what to change"),
        (demask.Mismatch("they differ"), 1, "they differ"),
    ],
)
def test_any_error_ends_in_one_line(run, files, monkeypatch, error, status, words):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(demask, "demask", fail)
    monkeypatch.setenv("TMPDIR", str(files))
    monkeypatch.setattr("tempfile.tempdir", None)
    line = failed(run("slim", "n.pt2", "-o", "o.demask"), status)
    assert words in line
    if "internal error" in words:
        report = Path(line.rpartition(" ")[2])
        assert "in fail" in report.read_text() and report.parent == files


def test_an_interrupted_command_ends_with_130(run, files, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(demask, "demask", interrupted)
    assert run("slim", "n.pt2", "-o", "o.demask").code == 130
    assert not (files / "o.demask").exists()


def test_python_runs_the_package_as_a_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demask", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("demask", run_name="__main__")
    assert not ended.value.code and capsys.readouterr().out.startswith("demask ")


def test_a_small_file_does_not_ask_for_a_large_constant():
    class Large(nn.Module):
        def forward(self, x):
            return x + torch.ones(2**34).sum() + torch.zeros(3).expand(2**33, 3)[0, :1]

    program = demask.graph.capture.capture.capture(torch.export.export(Large(), (torch.randn(2, 3),)))
    assert any(node.target is torch.ops.aten.ones.default for node in fold_constants(program).graph.nodes)
    shrink_program(program, TABLE)  # not demask(), which runs the network to check its result
