"""Folders and outputs that cannot be used end in one line, with nothing half written."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from demask import checkpoint
from demask.errors import BadInput, DemaskError, RefusedFile
from demask.failures import strict
from demask.files import atomic_write
from masked_folders import config_of, llama, tensors, write
from night import at_night


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.no_grad():
        return write(llama(), tmp_path_factory.mktemp("masked") / "in", shard="12KB")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.no_grad():
        return write(llama(), tmp_path_factory.mktemp("single") / "in")


@pytest.fixture
def copy(masked: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(masked, tmp_path / "in"))


INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of"


def shard(folder: Path) -> Path:
    return next(p for p in sorted(folder.iterdir()) if p.name.startswith(FIRST))


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def missing(folder: Path) -> None:
    shard(folder).unlink()


def truncated(folder: Path) -> None:
    data = shard(folder).read_bytes()
    shard(folder).write_bytes(data[:-7])


def no_header(folder: Path) -> None:
    shard(folder).write_bytes(b"\0" * 3)


def dtype(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = shard(folder).read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        next(v for k, v in header.items() if k != "__metadata__")["dtype"] = name
        text = json.dumps(header).encode()
        shard(folder).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])

    return change


def index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: edit(folder / INDEX, change)


def files(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    return index(lambda data: change(data["weight_map"]))


def config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", lambda data: data.update(values))


def pickles(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    torch.save({}, folder / "pytorch_model.bin")


def link_outside(folder: Path) -> None:
    path = shard(folder)
    outside = folder.parent / "elsewhere.safetensors"
    path.rename(outside)
    path.symlink_to(outside)


def first_name(folder: Path) -> str:
    return sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))[0]


def pipe_as_shard(folder: Path) -> None:
    shard(folder).unlink()
    os.mkfifo(folder / first_name(folder))


def lacks_a_tensor(folder: Path) -> None:
    kept = {k: v for k, v in tensors(folder).items() if k != "model.norm.weight"}
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    save_file(kept, folder / "model.safetensors")


def other_shape(folder: Path) -> None:
    own = tensors(folder)
    own["model.layers.1.mlp.up_proj.weight"] = torch.ones(23, 32)
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    save_file(own, folder / "model.safetensors")


NAME = "model.norm.weight"
BAD: dict[str, tuple[Callable[[Path], Any], type[DemaskError], str]] = {
    "missing-shard": (missing, BadInput, "no such file"),
    "truncated": (truncated, RefusedFile, "damaged or truncated"),
    "no-header": (no_header, BadInput, "expected a safetensors file"),
    "f4": (dtype("F4"), BadInput, "have a dtype that demask does not read"),
    "e8m0": (dtype("F8_E8M0"), BadInput, "have a dtype that demask does not read"),
    "index-names-others": (files(lambda m: m.update(ghost=m[NAME])), BadInput, "ghost is said to"),
    "index-lacks-one": (files(lambda m: m.pop(NAME)), BadInput, "said to be in None"),
    "index-wrong-file": (files(lambda m: m.update({NAME: first_of(m)})), BadInput, "and is in"),
    "path-in-index": (files(lambda m: m.update({NAME: "../in/x"})), RefusedFile, "name of a file"),
    "dots-in-index": (files(lambda m: m.update({NAME: ".."})), BadInput, "no such file"),
    "zero-byte": (files(lambda m: m.update({NAME: "a\0b"})), RefusedFile, "name of a file"),
    "empty-name": (files(lambda m: m.update({NAME: ""})), BadInput, "no such file"),
    "number-in-index": (files(lambda m: m.update({NAME: 3})), BadInput, "weight_map"),
    "list-as-index": (index(lambda d: d.update(weight_map=[1])), BadInput, "weight_map"),
    "link-outside": (link_outside, RefusedFile, "outside of the folder"),
    "pipe": (pipe_as_shard, BadInput, "no such file"),
    "pickles": (pickles, BadInput, "save_pretrained"),
    "no-config": (lambda f: (f / "config.json").unlink(), BadInput, "it has no config.json"),
    "config-no-json": (lambda f: (f / "config.json").write_text("{"), BadInput, "config.json"),
    "no-class": (config(architectures=["NoSuchLM"]), BadInput, "has no 'NoSuchLM'"),
    "two-classes": (config(architectures=["A", "B"]), BadInput, "expected one class"),
    "own-code": (config(auto_map={"AutoModel": "x.Y"}), BadInput, "does not run"),
    "quantized": (config(quantization_config={"quant_method": "gptq"}), BadInput, "gptq"),
    "wide": (config(hidden_size=10**12), BadInput, "by the config"),
    "wider-than-files": (config(intermediate_size=10**6), BadInput, "by the config"),
    "negative": (config(hidden_size=-32), BadInput, "config"),
    "text": (config(hidden_size="many"), BadInput, "refuses the config"),
    "layers": (config(num_hidden_layers=10**9), BadInput, "num_hidden_layers is 1000000000"),
    "heads": (config(num_attention_heads=10**9), BadInput, "num_attention_heads is"),
    "lacks-a-tensor": (lacks_a_tensor, BadInput, "no tensor is model.norm.weight"),
    "other-shape": (other_shape, BadInput, "by the config"),
}


def first_of(files_of: dict[str, str]) -> str:
    return min(set(files_of.values()) - {files_of[NAME]})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", BAD)
def test_bad_folders(copy: Path, kind: str) -> None:
    damage, error, words = BAD[kind]
    damage(copy)
    with strict(False), pytest.raises(error) as caught:
        checkpoint.slim(copy, copy.parent / "out", multiple=4)
    text = str(caught.value)
    assert words in text and "\n" not in text and len(text) < 600, text
    assert not any(p.name.startswith("out") for p in copy.parent.iterdir())


def test_bad_outputs(masked: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    mine = tmp_path / "mine.partial"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    (tmp_path / "file.partial").write_text("mine")
    for out in (
        masked,
        masked / "below",
        tmp_path / "there",
        tmp_path / "link",
        tmp_path / "no" / "out",
        tmp_path / "mine",
        tmp_path / "file",
        "a\0b",
    ):
        with strict(False), pytest.raises(BadInput) as caught:
            checkpoint.slim(masked, out, multiple=4, check=False)
        assert "\n" not in str(caught.value)
    assert (mine / "thesis.txt").read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"there", "link", "mine.partial", "file.partial"}


def test_links_of_a_hub_cache(single: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    for k, path in enumerate(single.iterdir()):
        shutil.copy(path, tmp_path / "blobs" / str(k))
        (snapshot / path.name).symlink_to(f"../../blobs/{k}")
    checkpoint.slim(snapshot, tmp_path / "out", multiple=4, check=False)
    assert not any(p.is_symlink() for p in (tmp_path / "out").iterdir())


def test_more_than_the_class_has(single: Path, tmp_path: Path) -> None:
    source, out = Path(shutil.copytree(single, tmp_path / "in")), tmp_path / "out"
    (source / "tokenizer.json").unlink()
    more = tensors(source)
    more["speculator.weight"] = torch.ones(3)
    save_file(more, source / "model.safetensors")
    checkpoint.slim(source, out, multiple=4)
    assert torch.equal(tensors(out)["speculator.weight"], torch.ones(3))


def test_folders_inside(single: Path, tmp_path: Path) -> None:
    source, out = Path(shutil.copytree(single, tmp_path / "in")), tmp_path / "out"
    dense = {"linear.weight": torch.ones(2, 3)}
    copied = {
        "1_Pooling/config.json": b"{}",
        "2_Dense/config.json": b"{}",
        "a/b/c/notes.md": b"c",
        "onnx/config.json": b"[]",
    }
    left = {"onnx/model.onnx": b"o", "original/consolidated.00.pth": b"p", ".cache/x": b"x", "pytorch_model.bin": b"b"}
    for name, data in {**copied, **left}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    save_file(dense, source / "2_Dense" / "model.safetensors")
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}, {}, 3, {"path": 4}]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "more").symlink_to(source / "a", target_is_directory=True)
    (source / "a" / "linked.md").symlink_to("../1_Pooling/config.json")
    report = checkpoint.slim(source, out, multiple=4, check=False)
    copied |= {"a/linked.md": b"{}", "modules.json": json.dumps(modules).encode()}
    for name, data in copied.items():
        assert (out / name).read_bytes() == data and not (out / name).is_symlink()
    assert tensors(out / "2_Dense").keys() == dense.keys()
    assert not any((out / name).exists() for name in (*left, "more"))
    (note,) = (note for note in report.notes if note.startswith("not copied"))
    assert note.endswith(": .cache, more, onnx/model.onnx, original/consolidated.00.pth, pytorch_model.bin")
    checkpoint.slim(out, tmp_path / "again", multiple=4, check=False)


def test_a_link_in_a_folder_inside(single: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(single, tmp_path / "in"))
    (tmp_path / "secret").write_text("outside")
    (source / "a").mkdir()
    (source / "a" / "notes.md").symlink_to("../../secret")
    with strict(False), pytest.raises(RefusedFile, match="outside of the folder"):
        checkpoint.slim(source, tmp_path / "out", multiple=4, check=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite(single: Path, tmp_path: Path, value: float) -> None:
    source, out = Path(shutil.copytree(single, tmp_path / "in")), tmp_path / "out"
    own = tensors(source)
    own["model.layers.0.mlp.up_proj.weight"][20, 3] = value
    save_file(own, source / "model.safetensors")
    with strict(False), pytest.raises(BadInput, match="not a number") as caught:
        checkpoint.slim(source, out, multiple=4)
    assert "\n" not in str(caught.value)
    assert not out.exists()


def test_full_disk(single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"

    def full(path: Any, target: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr(shutil, "copyfile", full)
    with strict(False), pytest.raises(DemaskError, match="No space left") as caught:
        checkpoint.slim(single, out, multiple=4, check=False)
    assert "\n" not in str(caught.value) and not out.exists()
    monkeypatch.undo()
    checkpoint.slim(single, out, multiple=4, check=False)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A disk of its own, of as many bytes as it is called with; what is on it stays."""
    path, options = tmp_path / "disk", ["tmpfs", str(tmp_path / "disk")]
    path.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", *options], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"disks cannot be mounted here ({error})")

    def sized(count: int) -> Path:
        resized = ["mount", "-o", f"remount,size={count}", str(path)]
        subprocess.run(resized, check=True, capture_output=True)
        return path

    yield sized
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize(
    ("name", "options"),
    at_night(("out", {}), ("out", {"target": "mlx", "per_layer": True}), ("out.gguf", {"target": "llama.cpp"})),
)
def test_disks_that_are_full_at_any_step(
    single: Path, tmp_path: Path, disk: Callable[[int], Path], name: str, options: dict[str, Any]
) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    call = partial(checkpoint.slim, single, check=False, multiple=4, **options)
    expected = tmp_path / "expected" / name  # a GGUF file has its name in it
    expected.parent.mkdir()
    call(expected)
    refused, room = 0, 2 * page
    while True:
        out = disk(room) / name
        try:
            with strict(False):
                call(out)
            break
        except DemaskError as error:
            assert "No space left" in str(error) and "\n" not in str(error)
            assert not out.exists()
            refused, room = refused + 1, room + 2 * page
    assert refused and [p.name for p in out.parent.iterdir()] == [name]
    files = [p.relative_to(expected) for p in expected.rglob("*")] if expected.is_dir() else [""]
    for file in files:
        assert (out / file).is_dir() or (out / file).read_bytes() == (expected / file).read_bytes()


def run_until(source: Path, out: Path, step: int, multiple: int, **options: Any) -> None:
    """Slim a folder in a process that is killed at a step."""
    steps = 0

    def count(title: str, done: int = 1) -> None:
        nonlocal steps
        if steps == step:
            os.kill(os.getpid(), signal.SIGKILL)
        steps += 1

    checkpoint.slim(source, out, multiple=multiple, check=False, progress=count, **options)


def test_killed_at_any_time(masked: Path, tmp_path: Path) -> None:
    out, context = tmp_path / "out", multiprocessing.get_context("fork")
    titles: list[str] = []
    checkpoint.slim(
        masked, tmp_path / "whole", multiple=4, check=False, progress=lambda title, done=1: titles.append(title)
    )
    first = next(k for k, title in enumerate(titles) if title.startswith("writing file"))
    # Of another multiple first: nothing of it may stay.
    below = out.with_name("out.partial") / "1_Pooling"
    for step, multiple in ((first + 2, 8), (0, 4), (first, 4), (len(titles) - 1, 4)):
        process = context.Process(target=run_until, args=(masked, out, step, multiple))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL and not out.exists()
        if multiple == 8:
            below.mkdir()
    (out.with_name("out.partial") / ".demask-0.part").write_text("of a killed process")
    checkpoint.slim(masked, out, multiple=4, check=False)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "whole").iterdir()
    }
    assert config_of(out)["intermediate_size"] == 20


@pytest.mark.parametrize(
    ("name", "options"), at_night(("out", {"target": "mlx", "per_layer": True}), ("out.gguf", {"target": "llama.cpp"}))
)
def test_other_formats_killed_at_any_step(masked: Path, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    titles: list[str] = []
    expected, out = tmp_path / "expected" / name, tmp_path / "folder" / name
    expected.parent.mkdir(), out.parent.mkdir()
    checkpoint.slim(
        masked, expected, multiple=4, check=False, **options, progress=lambda title, done=1: titles.append(title)
    )
    for step in range(len(titles)):
        process = multiprocessing.get_context("fork").Process(
            target=run_until, args=(masked, out, step, 4), kwargs=options
        )
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL and not out.exists()
    checkpoint.slim(masked, out, multiple=4, check=False, **options)
    assert [p.name for p in out.parent.iterdir()] == [name]
    pairs = [(out, expected)] if out.is_file() else zip(sorted(out.iterdir()), sorted(expected.iterdir()), strict=True)
    assert all(a.name == b.name and a.read_bytes() == b.read_bytes() for a, b in pairs)


def test_two_processes_at_once(single: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        atomic_write.locked_folder(tmp_path / "out.partial"),
        pytest.raises(BadInput, match="another process is writing it"),
    ):
        checkpoint.slim(single, out, multiple=4, check=False)
    checkpoint.slim(single, out, multiple=4, check=False)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
