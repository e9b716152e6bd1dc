"""Rows of the vocabulary and experts, which go on request."""

from __future__ import annotations

import json

import pytest
import torch

from demask import checkpoint
from demask.errors import BadInput
from demask.failures import strict
from masked_folders import LLAMA, build, config_of, llama, load, outputs, tensors, write

LIMIT = 1e-5  # of the largest output: sums of fewer numbers, in another order
WORDS = {f"w{k}": k for k in range(30)}


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def write_tokenizer(path, words=WORDS):
    """A tokenizer of words, in place of the folder's."""
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return path


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tied", [False, True])
def test_zero_rows_at_the_end_of_the_vocabulary(tmp_path, tied):
    model = llama(tie_word_embeddings=tied)
    for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
        weight[28:] = 0  # of 40, of which 30 are tokens of the tokenizer
        weight[5] = 0
    source = write_tokenizer(write(model, tmp_path / "in"))
    report = checkpoint.slim(source, tmp_path / "out", multiple=4, vocabulary="drop-zero")
    before, after = tensors(source), tensors(tmp_path / "out")
    assert config_of(tmp_path / "out")["vocab_size"] == 32
    names = ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not tied)
    for name in names:
        assert torch.equal(after[name], before[name][:32])
    assert ("lm_head.weight" in after) == (not tied)
    assert "40 -> 32 rows" in report.notes[0] and report.proof.difference < LIMIT
    assert report.parameters[0] == sum(t.numel() for t in before.values())
    original, smaller = load(model, source), load(model, tmp_path / "out")
    tokens = torch.randint(3, 32, (2, 9), generator=torch.Generator().manual_seed(0))
    expected, actual = (m(input_ids=tokens).logits for m in (original, smaller))
    assert (expected[..., :32] - actual).abs().max() < LIMIT * expected.abs().max()


def test_rows_that_are_named(tmp_path):
    source = write_tokenizer(write(llama(), tmp_path / "in"))
    checkpoint.slim(source, tmp_path / "out", multiple=1, vocabulary=range(31, 40))
    assert config_of(tmp_path / "out")["vocab_size"] == 31
    assert torch.equal(tensors(tmp_path / "out")["lm_head.weight"], tensors(source)["lm_head.weight"][:31])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([29, *range(30, 40)], "a token of the tokenizer has number 29"),
        ([35], "row 39 stay"),
        ([40], "from 0 to 39"),
        ([], "from 0 to 39"),
        ("zero", "drop-zero"),
    ],
)
def test_rows_that_cannot_go(tmp_path, rows, words):
    source = write_tokenizer(write(llama(), tmp_path / "in"))
    with strict(False), pytest.raises(BadInput, match=words):
        checkpoint.slim(source, tmp_path / "out", multiple=1, vocabulary=rows, check=False)
    assert not (tmp_path / "out").exists()


def test_rows_that_a_config_names(tmp_path):
    model = llama()
    model.generation_config.eos_token_id = [2, 35]
    for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
        weight[28:] = 0
    source = write_tokenizer(write(model, tmp_path / "in"))
    checkpoint.slim(source, tmp_path / "out", multiple=1, vocabulary="drop-zero", check=False)
    assert config_of(tmp_path / "out")["vocab_size"] == 36


def test_no_row_goes(tmp_path):
    source = write_tokenizer(write(llama(), tmp_path / "in"))
    report = checkpoint.slim(source, tmp_path / "out", vocabulary="drop-zero", check=False)
    assert "none of 40 rows" in report.notes[0]
    assert config_of(tmp_path / "out")["vocab_size"] == 40


def mixture(**config):
    return build("MixtralForCausalLM", "mixtral", **{**LLAMA, "num_hidden_layers": 2}, num_local_experts=4, **config)


def test_experts_that_add_nothing_are_dropped(tmp_path):
    model = mixture()
    for layer, dead in zip(model.model.layers, ([1, 3], [0]), strict=True):
        for expert in dead:
            layer.mlp.experts.down_proj[expert] = 0
    source, out = write(model, tmp_path / "in"), tmp_path / "out"
    report = checkpoint.slim(source, out, multiple=4, experts="drop")
    assert config_of(out)["num_local_experts"] == 3
    before, after = tensors(source), tensors(out)
    for layer, staying in enumerate(([0, 1, 2], [1, 2, 3])):
        name = f"model.layers.{layer}.block_sparse_moe."
        assert torch.equal(after[name + "gate.weight"], before[name + "gate.weight"][staying])
        for new, old in enumerate(staying):
            for leaf in ("w1", "w2", "w3"):
                expert = before[f"{name}experts.{old}.{leaf}.weight"]
                assert torch.equal(after[f"{name}experts.{new}.{leaf}.weight"], expert)
    assert len(after) == len(before) - 2 * 3
    assert report.proof.requested > 1e-3 and "changes outputs by" in str(report)
    assert "4 -> 3 experts in 2 layers" in report.notes[0]
    original, smaller = load(model, source), load(model, out)
    change = (outputs(original) - outputs(smaller)).abs().max() / outputs(original).abs().max()
    assert 0.1 * report.proof.requested < change < 10 * report.proof.requested


@pytest.mark.nightly
def test_as_many_experts_stay_as_are_chosen(tmp_path):
    model = mixture(num_experts_per_tok=3)
    for layer in model.model.layers:
        layer.mlp.experts.down_proj[1:] = 0
    source, out = write(model, tmp_path / "in"), tmp_path / "out"
    checkpoint.slim(source, out, multiple=4, experts="drop", check=False)
    assert config_of(out)["num_local_experts"] == 3
    load(model, out)


def test_experts_stay_by_default(tmp_path):
    model = mixture()
    for layer in model.model.layers:
        layer.mlp.experts.down_proj[1] = 0
    report = checkpoint.slim(write(model, tmp_path / "in"), tmp_path / "out", multiple=4)
    assert config_of(tmp_path / "out")["num_local_experts"] == 4
    assert report.proof.requested is None
