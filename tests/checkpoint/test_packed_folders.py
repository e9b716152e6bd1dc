"""Folders with packed weights: zeros in no pattern are not stored, and the network is of its own class."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.quantizers import auto

from demask import BadInput, checkpoint
from demask.machine.cost import Costs
from demask.sparse import PackedLinear, sparsify
from demask.sparse.products import form_choice
from masked_folders import config_of, llama, load, outputs, tensors, write


@pytest.fixture(autouse=True)
def _no_gradients(monkeypatch):
    monkeypatch.setattr(
        form_choice, "costs_of_machine", lambda threads: Costs.open(False, threads=threads, measure=False)
    )
    with torch.no_grad():
        yield


def sparse_llama():
    """A masked LLaMA with zeros in no pattern too; in its last layer none."""
    model, random = llama(), torch.Generator().manual_seed(1)
    for name, module in model.named_modules():
        if type(module) is nn.Linear and ".2." not in name and name != "lm_head":
            share = 0.05 if "q_proj" in name else 0.4
            module.weight *= torch.rand(module.weight.shape, generator=random) < share
    return model


def forms(model):
    return {n: m.form for n, m in model.named_modules() if isinstance(m, PackedLinear)}


def test_layers_with_many_zeros_are_packed_and_the_rest_is_as_before(tmp_path):
    model = sparse_llama()
    source, out, again = write(model, tmp_path / "in", torch.bfloat16), tmp_path / "out", tmp_path / "again"
    report = checkpoint.slim(source, out, multiple=4, sparse=True)
    dense = checkpoint.slim(source, tmp_path / "dense", multiple=4)
    slim, packed = load(model, tmp_path / "dense"), checkpoint.load(out)
    assert type(packed) is type(model) and not packed.training
    found = forms(packed)
    assert {name: "columns" if "q_proj" in name else "bitmap" for name in found} == found
    linear = {n for n, m in slim.named_modules() if isinstance(m, nn.Linear)}
    assert all(".1." in n or n == "lm_head" for n in linear - found.keys())  # of three layers one is removed
    for name, weight in slim.state_dict().items():
        module, _, leaf = name.rpartition(".")
        assert torch.equal(getattr(packed.get_submodule(module), leaf), weight)
    assert report.parameters == dense.parameters and report.bytes[1] < dense.bytes[1]
    assert report.proof is not None and report.proof.difference < 1e-5
    assert (outputs(packed) - outputs(slim)).abs().max() <= 0.02 * outputs(slim).abs().max()  # of bfloat16
    # A packed folder is one like any other: it can be written dense again.
    checkpoint.slim(out, again, multiple=4)
    before, after = tensors(tmp_path / "dense"), tensors(again)
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    assert config_of(again) == config_of(tmp_path / "dense")


@pytest.mark.parametrize(("stored", "group"), [(None, 0), (torch.int8, 0), (torch.int8, 32)], ids=str)
def test_a_sparsified_network_is_saved_packed(tmp_path, monkeypatch, stored, group):
    monkeypatch.setattr("demask.sparse.sparsified._times_as_fast", lambda *_: (2.0, 2.0))
    model = load(sparse_llama(), write(sparse_llama(), tmp_path / "in"))
    sparsify(model, dtype=stored, skip=["lm_head"], group=group)
    expected = outputs(model)
    model.save_pretrained(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert forms(loaded) == forms(model) != {}
    assert torch.equal(outputs(loaded), expected)
    assert not forms(loaded.dequantize())
    model.model.layers[0].mlp.up_proj = model.model.layers[0].mlp.up_proj.to_dense()
    model.save_pretrained(tmp_path / "out")
    assert forms(checkpoint.load(tmp_path / "out")) == forms(model)


def test_a_folder_without_zeros_stays_one_for_all_loaders(tmp_path):
    model = load(llama(), write(llama(), tmp_path / "masked"))
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.02)
    report = checkpoint.slim(write(model, tmp_path / "in"), tmp_path / "out", sparse=True)
    assert "quantization_config" not in config_of(tmp_path / "out")
    assert any("no linear layer" in note for note in report.notes)
    assert torch.equal(outputs(checkpoint.load(tmp_path / "out")), outputs(model))


@pytest.mark.parametrize(
    ("options", "text"),
    [({"target": "vllm"}, "packed weights are for transformers"), ({"adapter": "x"}, "without an adapter")],
)
def test_packed_weights_are_for_transformers(tmp_path, options, text):
    source = write(sparse_llama(), tmp_path / "in")
    with pytest.raises(BadInput, match=text):
        checkpoint.slim(source, tmp_path / "out", sparse=True, **options)
    assert not (tmp_path / "out").exists()


LAYER = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"form": "triangle"}, "expected a form"),
        ({"size": [2, -1]}, "expected a form"),
        ({"size": [2**40, 2**40]}, "expected a form"),
        ({"numbers": 10**12}, "expected a form"),
        ({"numbers": "9"}, "expected a form"),
        ({"dtype": "float1"}, "expected a form"),
        ({"dtype": []}, "expected a form"),
        ({"numbers": 3}, "its tensors are not"),
        ({"form": "columns"}, "its tensors are not"),
        ({"dtype": "int8"}, "its tensors are not"),
        ({"group": 64}, "groups of columns"),
        ({"dtype": "int8", "group": "x"}, "expected a group"),
        (None, "expected a form"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_is_refused(tmp_path, change, text):
    out = tmp_path / "out"
    checkpoint.slim(write(sparse_llama(), tmp_path / "in"), out, multiple=4, sparse=True, check=False)
    config = config_of(out)
    layers = config["quantization_config"]["layers"]
    layers[LAYER] = None if change is None else layers[LAYER] | change
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=re.escape(text)):
        checkpoint.load(out)
    with pytest.raises(BadInput, match=re.escape(text)):
        checkpoint.slim(out, tmp_path / "new")


def test_damaged_tensors_are_refused(tmp_path):
    out = tmp_path / "out"
    checkpoint.slim(write(sparse_llama(), tmp_path / "in"), out, multiple=4, sparse=True, check=False)
    (file,) = out.glob("*.safetensors")
    data, length = bytearray(file.read_bytes()), int.from_bytes(file.read_bytes()[:8], "little")
    start = 8 + length + json.loads(data[8 : 8 + length])[f"{LAYER}.bits"]["data_offsets"][0]
    data[start] ^= 1
    file.write_bytes(data)
    with pytest.raises(BadInput, match="expected bitmap of a matrix"):
        outputs(checkpoint.load(out))
    with pytest.raises(BadInput, match="expected bitmap of a matrix"):
        checkpoint.slim(out, tmp_path / "new")


def test_the_network_without_its_head_is_read(tmp_path):
    out = tmp_path / "out"
    checkpoint.slim(write(sparse_llama(), tmp_path / "in"), out, multiple=4, sparse=True, check=False)
    full, part = checkpoint.load(out), AutoModel.from_pretrained(out)
    assert {f"model.{name}" for name in forms(part)} == {name for name in forms(full) if name != "lm_head"}
    tokens = torch.arange(8)[None]
    assert torch.equal(part(tokens).last_hidden_state, full.model(tokens).last_hidden_state)


@pytest.mark.parametrize("writer", ["slim", "save_pretrained"])
def test_transformers_alone_refuses_a_packed_folder(writer, tmp_path, monkeypatch):
    """It would go on with random weights, as it goes on without a method that it does not know."""
    out = tmp_path / "out"
    checkpoint.slim(write(sparse_llama(), tmp_path / "in"), out, multiple=4, sparse=True, check=False)
    if writer == "save_pretrained":
        loaded, out = checkpoint.load(out), tmp_path / "again"
        loaded.save_pretrained(out)
    assert forms(AutoModelForCausalLM.from_pretrained(out))
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "demask")
    monkeypatch.delitem(auto.AUTO_QUANTIZER_MAPPING, "demask")
    for reader in (AutoModelForCausalLM, AutoModel):
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            reader.from_pretrained(out)
