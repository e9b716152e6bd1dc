"""Files of weights: read as safetensors reads them, hostile ones and others refused."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from demask.errors import BadInput, RefusedFile
from demask.files.weight_file import WeightFile, with_weights
from demask.traverse.batching.batch import FILE, batch, traffic
from demask.traverse.batching.batch_plan import LayerTraffic, Traffic


def test_files_are_read_as_safetensors_reads_them_and_written_as_it_writes(tmp_path):
    tensors = {
        "a": torch.randn(5, 3),
        "b.c": torch.randn(2, 3, 4).bfloat16(),
        "n": torch.tensor(7),
        "none": torch.zeros(0, 4),
        "t": torch.randn(4, 6).T,
    }
    path = tmp_path / "w.safetensors"
    for writes in (WeightFile.write, _saved):
        file = writes(path, tensors)
        assert set(file.tensors) == set(tensors)
        for name in ("a", "b.c", "none", "t"):
            buffer = torch.empty(100, dtype=torch.uint8)
            found = [block.clone() for _, block in file.blocks(file.tensors[name], 2, buffer)]
            assert torch.equal(torch.cat([tensors[name][:0], *found]), tensors[name])
    WeightFile.write(path, tensors)
    assert all(torch.equal(load_file(path)[n], t) for n, t in tensors.items())


def _saved(path, tensors):
    save_file({n: t.contiguous() for n, t in tensors.items()}, path, metadata={"format": "pt"})
    return WeightFile.read(path)


def _header(entries, values=b"\0" * 64):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + values


GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\xff" * 64,
        (10**9).to_bytes(8, "little") + b"{}",
        _header(b"[]"),
        _header(b"{"),
        _header({"a": 1}),
        _header({"a": GOOD | {"shape": [2, -3]}}),
        _header({"a": GOOD | {"shape": [2.0, 3]}}),
        _header({"a": GOOD | {"shape": [2, 4]}}),
        _header({"a": GOOD | {"data_offsets": [64, 88]}}),
        _header({"a": GOOD}, b"\0" * 23),
        _header({"a": GOOD | {"data_offsets": [24, 0]}}),
        _header({"a": GOOD | {"data_offsets": [-24, 0]}}),
        _header({"a": GOOD | {"shape": [2**62, 4], "data_offsets": [0, 64]}}),
    ],
)
def test_hostile_files_are_refused(data, tmp_path):
    (tmp_path / "w.safetensors").write_bytes(data)
    with pytest.raises((BadInput, RefusedFile)):
        WeightFile.read(tmp_path / "w.safetensors")
    with pytest.raises(BadInput):
        batch(nn.Linear(3, 2), (torch.randn(2, 3),), weights=tmp_path / "w.safetensors")


def test_files_that_do_not_fit_are_refused(tmp_path):
    model, x = nn.Linear(8, 4), torch.randn(2, 8)
    path = tmp_path / "w.safetensors"
    with pytest.raises(BadInput, match="cannot be read"):
        batch(model, (x,), weights=path)
    save_file({"weight": torch.randn(4, 9)}, path)
    with pytest.raises(BadInput, match=r"\(4, 9\)"):
        batch(model, (x,), weights=path)
    save_file({"weight": torch.randn(4, 8).half()}, path)
    with pytest.raises(BadInput, match="float16"):
        batch(model, (x,), weights=path)
    save_file({"bias": torch.randn(4)}, path)
    with pytest.raises(BadInput, match="meta"):
        batch(nn.Linear(8, 4, device="meta"), (x,), weights=path)


def test_a_file_that_changed_is_refused(tmp_path):
    model, x = nn.Linear(8, 4), torch.randn(2, 8)
    module = batch(model, (x,), weights=tmp_path)
    assert torch.allclose(module(x), model(x))
    os.utime(tmp_path / FILE, ns=(1, 1))
    with pytest.raises(BadInput, match="changed"):
        module(x)
    (tmp_path / FILE).unlink()
    with pytest.raises(BadInput, match="cannot be read"):
        module(x)


def test_traffic_for_a_folder_writes_nothing(tmp_path):
    found = traffic(nn.Linear(8, 4), (torch.randn(2, 8),), weights=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert found == Traffic(16, (LayerTraffic("linear", "weight", True, 128, 128),))


@pytest.mark.parametrize("name", ["0.weight", "1.weight"])
def test_a_tied_weight_is_read_by_any_of_its_names(name, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to("meta")
    model[1].weight = model[0].weight
    value = torch.randn(4, 4)
    file = _saved(tmp_path / "w.safetensors", {name: value})
    copy, places = with_weights(model, file, file.tensor)
    assert copy[0].weight is copy[1].weight and torch.equal(copy[0].weight, value)
    assert places == dict.fromkeys(["0.weight", "1.weight"], file.tensors[name])
    assert model[0].weight.is_meta


def test_a_part_of_a_file_ends_where_it_says(tmp_path):
    path = tmp_path / "archive"
    path.write_bytes(b"before" + _header({"a": GOOD}))
    assert WeightFile.read(path, (6, path.stat().st_size)).tensors["a"].shape == (2, 3)
    with pytest.raises(RefusedFile, match="t: tensor 'a' needs 24 bytes"):
        WeightFile.read(path, (6, path.stat().st_size - 41), "t")
