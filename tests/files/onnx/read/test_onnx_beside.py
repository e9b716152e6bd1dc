"""ONNX files whose weights lie in other files: nothing outside their folder is read."""

import os

import pytest
import torch

import onnx_files
from demask.errors import BadInput, RefusedFile
from demask.files.onnx.module import from_onnx
from demask.files.onnx.read import tensors
from onnx_files import WEIGHTS, edited, planted, weight

OUTSIDE = onnx_files.outside


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "net").mkdir()
    return onnx_files.with_weights(tmp_path / "net")


def test_weights_beside_the_file(folder):
    (folder / "m.onnx").write_bytes(OUTSIDE().SerializeToString())
    made = from_onnx(folder / "m.onnx")
    assert torch.equal(made.w, torch.from_numpy(onnx_files.weights(6, 8)))
    (folder / WEIGHTS).write_bytes(b"")  # what was read stays
    assert made.w.isfinite().all()


BESIDE = {
    "up": (OUTSIDE("../secret"), "'../secret': expected a path below", RefusedFile),
    "down and up": (OUTSIDE("a/../../secret"), "expected a path below", RefusedFile),
    "absolute": (OUTSIDE("/etc/passwd"), "expected a path below", RefusedFile),
    "a drive": (OUTSIDE("C:\\secret"), "expected a path below", RefusedFile),
    "a share": (OUTSIDE("\\\\host\\secret"), "expected a path below", RefusedFile),
    "up in Windows": (OUTSIDE("a\\..\\..\\secret"), "expected a path below", RefusedFile),
    "a link out": (OUTSIDE("link"), "leads out of the folder", RefusedFile),
    "a link to a folder out": (OUTSIDE("up/secret"), "leads out of the folder", RefusedFile),
    "a link to itself": (OUTSIDE("round"), "cannot be (resolved|read)", BadInput),
    "a device by a link": (OUTSIDE("zero"), "leads out of the folder", RefusedFile),
    "a pipe": (OUTSIDE("pipe"), "expected a plain file", BadInput),
    "the folder": (OUTSIDE("."), "expected a plain file", BadInput),
    "missing": (OUTSIDE("none.bin"), "'none.bin': no such file", BadInput),
    "no location": (OUTSIDE(None), "expected a location", BadInput),
    "an empty location": (OUTSIDE(""), "expected a location", BadInput),
    "a NUL": (OUTSIDE("a\0b"), "expected a location", BadInput),
    "a location that speaks": (OUTSIDE("\x1b[2J"), r"'\\x1b\[2J': no such file", BadInput),
    "memory of onnxruntime": (OUTSIDE("*/_ORT_MEM_ADDR_/*"), "no such file", BadInput),
    "a long location": (OUTSIDE("x" * 300), "cannot be (resolved|read)", BadInput),
    "a negative offset": (OUTSIDE(offset=-1), "expected offset to be an integer", BadInput),
    "an offset past the end": (OUTSIDE(offset=17), "bytes 17 to 209.*has 208", BadInput),
    "an absurd offset": (OUTSIDE(offset=2**63), "expected offset to be an integer", BadInput),
    "an offset of digits": (OUTSIDE(offset="1_6"), "offset to be an integer", BadInput),
    "another length": (OUTSIDE(length=191), "need 192 bytes, its length is 191", BadInput),
    "a negative length": (OUTSIDE(length="-192"), "expected length to be an integer", BadInput),
    "larger sizes": (OUTSIDE(length=None, sizes=(6, 9)), "bytes 16 to 232.*has 208", BadInput),
    "absurd sizes": (OUTSIDE(length=None, sizes=(2**20, 2**22)), "has 208", BadInput),
}


@pytest.mark.parametrize("name", BESIDE)
def test_attacks_by_files_beside(folder, name):
    (folder.parent / "secret").write_bytes(bytes(300))
    (folder / "link").symlink_to("../secret")
    (folder / "up").symlink_to("..")
    (folder / "round").symlink_to("round")
    (folder / "zero").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    made, words, error = BESIDE[name]
    planted(folder, made, f"tensor 'w': .*{words}", error)


def test_a_key_given_twice(folder):
    made = OUTSIDE()
    made.graph.initializer[0].external_data.add(key="location", value="other")
    planted(folder, made, "the same key twice")


def test_bytes_inside_and_beside(folder):
    made = edited(OUTSIDE, weight(raw_data=bytes(192)))
    planted(folder, made, "both in the file and in external data")


def test_links_within_the_folder_and_a_cache_of_downloads(folder):
    """Hugging Face's: the folder has links to the file and to its weights, in one other folder."""
    (folder / "inner").symlink_to(WEIGHTS)
    (folder / "m.onnx").write_bytes(OUTSIDE("inner", length=None).SerializeToString())
    assert from_onnx(folder / "m.onnx").w.shape == (6, 8)
    snapshot = folder.parent / "snapshot"
    snapshot.mkdir()
    for name in ("m.onnx", WEIGHTS):
        (snapshot / name).symlink_to(folder / name)
    (folder / "m.onnx").write_bytes(OUTSIDE().SerializeToString())
    assert from_onnx(snapshot / "m.onnx").w.shape == (6, 8)


def test_the_same_bytes_over_and_over(folder, monkeypatch):
    monkeypatch.setattr(tensors, "FREE", 0)
    made = OUTSIDE()
    for k in range(5):
        twin = made.graph.initializer.add()
        twin.CopyFrom(made.graph.initializer[0])
        twin.name, twin.external_data[0].value = f"w{k}", "./" * k + WEIGHTS
    planted(folder, made, "the 208 bytes of .* too often", RefusedFile)
    del made.graph.initializer[3:]
    (folder / "m.onnx").write_bytes(made.SerializeToString())
    assert from_onnx(folder / "m.onnx").w1.shape == (6, 8)
