"""Masked checkpoint folders become smaller ones, which transformers reads and computes the same."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open

from demask import checkpoint
from masked_folders import HEAD, LLAMA, TEXT, build, config_of, generated, llama, load, outputs, tensors, write

LIMIT = 1e-5  # of the largest logit: sums of fewer numbers, in another order


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def test_units_groups_and_a_layer_of_llama(tmp_path):
    model = llama()
    source, out = write(model, tmp_path / "in"), tmp_path / "out"
    report = checkpoint.slim(source, out, multiple=4)
    before, after = tensors(source), tensors(out)
    mlp, attention = ("model.layers.{}.mlp.{}_proj.weight", "model.layers.{}.self_attn.{}_proj.weight")
    # 14 and 18 units live: 20 of each stay, the first ones of the dead.
    kept = {0: [*range(10), *range(14, 24)], 2: [*range(6), *range(8, 22), *range(22, 24)][:20]}
    kept[2] = sorted({*range(24)} - {*range(2, 8)} | {2, 3})
    groups = {0: slice(0, 2 * HEAD), 2: slice(2 * HEAD, 4 * HEAD)}
    for new, old in enumerate((0, 2)):
        units, heads = kept[old], groups[old]
        for name in ("gate", "up"):
            assert torch.equal(after[mlp.format(new, name)], before[mlp.format(old, name)][units])
        down = before[mlp.format(old, "down")][:, units]
        assert torch.equal(after[mlp.format(new, "down")], down)
        output = before[attention.format(old, "o")][:, heads]
        assert torch.equal(after[attention.format(new, "o")], output)
        query = before[attention.format(old, "q")][heads]
        assert torch.equal(after[attention.format(new, "q")], query)
        group = slice(old // 2 * HEAD, (old // 2 + 1) * HEAD)
        for name in "kv":
            value = before[attention.format(old, name)][group]
            assert torch.equal(after[attention.format(new, name)], value)
    layers = {f"model.layers.{k}." for k in (0, 1)}
    assert {n[: len("model.layers.0.")] for n in after if ".layers." in n} == layers
    config, old_config = config_of(out), config_of(source)
    changed = {key: value for key, value in config.items() if value != old_config.get(key)}
    assert changed == {
        "intermediate_size": 20,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
    }
    assert old_config.keys() == config.keys()
    assert report.layers == {"model.layers": (3, 2)}
    assert [(row.kind, row.before, row.live, row.written) for row in report.slices] == [
        ("head", 2, (1, 1), 1),
        ("unit", 24, (14, 18), 20),
    ]
    assert report.parameters == tuple(sum(t.numel() for t in f.values()) for f in (before, after))
    assert report.removed == pytest.approx(1 - report.parameters[1] / report.parameters[0])
    assert report.removed < report.removable < 1
    assert "model.layers.2 costs the difference: mask it to 16 units to save" in report.advice
    assert report.proof.tokens == 32 and report.proof.flips == 0 and report.proof.difference < LIMIT
    assert json.loads(json.dumps(report.to_dict()))["removed"] == report.removed
    assert "3 -> 2 layers" in str(report)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert {p.name for p in out.iterdir()} == {p.name for p in source.iterdir()}
    assert {p.name for p in tmp_path.iterdir()} == {"in", "out"}
    original, smaller = load(model, source), load(model, out)
    assert (outputs(original) - outputs(smaller)).abs().max() < LIMIT * outputs(original).abs().max()
    assert torch.equal(generated(original), generated(smaller))


def test_shards_in_bfloat16_with_tied_weights(tmp_path):
    model = llama(tie_word_embeddings=True)
    source = write(model, tmp_path / "in", torch.bfloat16, "12KB")
    files = sorted(p.name for p in source.glob("*.safetensors"))
    assert len(files) > 2
    for out in (tmp_path / "again", tmp_path / "out"):
        checkpoint.slim(source, out, multiple=4, check=out.name == "out")
    assert {p.name for p in out.iterdir()} == {p.name for p in source.iterdir()}
    for path in out.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    after = tensors(out)
    assert {t.dtype for t in after.values()} == {torch.bfloat16} and "lm_head.weight" not in after
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in after.values())
    assert index["weight_map"].keys() == after.keys()
    for file in files:
        with safe_open(out / file, "pt") as tensors_of_file:
            names = {name for name, at in index["weight_map"].items() if at == file}
            assert set(tensors_of_file.keys()) == names
    original, smaller = load(model, source), load(model, out)
    assert torch.equal(generated(original), generated(smaller))


def test_biases_that_masks_leave_are_folded(tmp_path):
    model = build(
        "GPT2LMHeadModel",
        "gpt2",
        n_embd=32,
        n_head=4,
        n_layer=2,
        vocab_size=40,
        n_positions=64,
        n_inner=24,
        bos_token_id=1,
        eos_token_id=2,
    )
    for layer, units in zip(model.transformer.h, (8, 12), strict=True):
        layer.mlp.c_fc.weight[:, :units] = 0  # their biases stay: units are constants
        layer.attn.c_attn.weight[:, 2 * 32 : 2 * 32 + HEAD] = 0  # values of a head
    source, out = write(model, tmp_path / "in"), tmp_path / "out"
    report = checkpoint.slim(source, out, multiple=4)
    before, after = tensors(source), tensors(out)
    name = "transformer.h.{}.mlp.{}"
    names = set(before)
    prefix = "" if name.format(0, "c_fc.weight") in names else "transformer."
    for layer in range(2):
        fc, bias, weight, added = (
            before[name.format(layer, part).removeprefix(prefix)]
            for part in ("c_fc.weight", "c_fc.bias", "c_proj.weight", "c_proj.bias")
        )
        gone = [*range(8)] if layer == 0 else [*range(4, 12)]  # 16 of each stay
        constant = torch.nn.functional.gelu(bias[gone], approximate="tanh")
        own = after[name.format(layer, "c_proj.bias").removeprefix(prefix)]
        assert torch.allclose(own, added + constant @ weight[gone], atol=1e-6)
        assert after[name.format(layer, "c_fc.weight").removeprefix(prefix)].shape == (32, 16)
        assert fc.shape == (32, 24)
    assert config_of(out)["n_inner"] == 16
    assert [(row.kind, row.written) for row in report.slices if row.kind == "unit"] == [("unit", 16)]
    original, smaller = load(model, source), load(model, out)
    assert (outputs(original) - outputs(smaller)).abs().max() < LIMIT * outputs(original).abs().max()


def test_experts_that_are_stored_one_by_one(tmp_path):
    model = build("MixtralForCausalLM", "mixtral", **{**LLAMA, "num_hidden_layers": 2}, num_local_experts=4)
    for layer in model.model.layers:
        for expert in range(4):
            layer.mlp.experts.down_proj[expert][:, expert : expert + 8] = 0
    source, out = write(model, tmp_path / "in"), tmp_path / "out"
    checkpoint.slim(source, out, multiple=4)
    before, after = tensors(source), tensors(out)
    assert before.keys() == after.keys() and config_of(out)["intermediate_size"] == 16
    experts = [name for name in after if ".experts." in name]
    assert len(experts) == 2 * 4 * 3
    for name in experts:
        expert, kind = name.split(".experts.")[1].split(".")[:2]
        units = sorted({*range(24)} - {*range(int(expert), int(expert) + 8)})
        along = before[name][:, units] if kind == "w2" else before[name][units]
        assert torch.equal(after[name], along)
    original, smaller = load(model, source), load(model, out)
    assert torch.equal(generated(original), generated(smaller))


@pytest.mark.nightly
def test_heads_that_all_layers_share(tmp_path):
    sizes = {"d_model": 32, "d_ff": 24, "d_kv": 8, "num_heads": 4, "vocab_size": 40}
    layers = {"num_layers": 1, "num_decoder_layers": 1, "decoder_start_token_id": 0}
    model = build("T5ForConditionalGeneration", "t5", **sizes, **layers)
    for name, parameter in model.named_parameters():
        if name.endswith("ention.o.weight"):
            parameter[:, HEAD : 2 * HEAD] = 0
        if name.endswith("wo.weight"):
            parameter[:, :8] = 0
    source, out = write(model, tmp_path / "in"), tmp_path / "out"
    checkpoint.slim(source, out, multiple=4)
    config = config_of(out)
    assert (config["num_heads"], config["d_ff"], config["d_kv"]) == (3, 16, 8)
    key = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert torch.equal(tensors(out)[key], tensors(source)[key][:, [0, 2, 3]])
    original, smaller = load(model, source), load(model, out)
    assert (outputs(original) - outputs(smaller)).abs().max() < LIMIT * outputs(original).abs().max()


def test_lists_with_an_entry_per_layer(tmp_path):
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    model = build(
        "Qwen2ForCausalLM",
        "qwen2",
        **{**LLAMA, "num_hidden_layers": 4},
        layer_types=kinds,
        use_sliding_window=True,
        sliding_window=4,
    )
    dead = model.model.layers[2]
    dead.mlp.down_proj.weight[:] = 0
    dead.self_attn.o_proj.weight[:] = 0
    source, out = write(model, tmp_path / "in"), tmp_path / "out"
    report = checkpoint.slim(source, out, multiple=4)
    assert report.layers == {"model.layers": (4, 3)}
    assert config_of(out)["layer_types"] == [kinds[k] for k in (0, 1, 3)]
    before, after = tensors(source), tensors(out)
    last = "model.layers.{}.mlp.up_proj.weight"
    assert torch.equal(after[last.format(2)], before[last.format(3)])
    original, smaller = load(model, source), load(model, out)
    assert (outputs(original) - outputs(smaller)).abs().max() < LIMIT * outputs(original).abs().max()


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPTNeoXForCausalLM"])
def test_silent_channels_stay(tmp_path, name):
    kind = {"LlamaForCausalLM": "llama", "GPTNeoXForCausalLM": "gpt_neox"}[name]
    model = build(name, kind, **{**LLAMA, "num_hidden_layers": 2, "num_key_value_heads": 4})
    ends = (
        "o_proj.weight",
        "down_proj.weight",
        "attention.dense.weight",
        "4h_to_h.weight",
        "attention.dense.bias",
        "4h_to_h.bias",
    )
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(ends):
            parameter[[3, 7]] = 0
        if parameter_name.endswith(("embed_tokens.weight", "embed_in.weight")):
            parameter[:, [2, 3, 7]] = 0
    source = write(model, tmp_path / "in")
    report = checkpoint.slim(source, tmp_path / "out", multiple=4, check=False)
    (note,) = report.notes
    assert note.startswith("2 channels of the residual stream are zero")
    assert config_of(tmp_path / "out")["hidden_size"] == 32


@pytest.mark.nightly
def test_layers_of_a_kind_that_a_config_names_together(tmp_path):
    sizes = {"hidden_size": 32, "num_heads": 4, "intermediate_size": 24, "vocab_size": 40}
    model = build(
        "GPTNeoForCausalLM",
        "gpt_neo",
        num_layers=4,
        max_position_embeddings=64,
        attention_types=[[["global", "local"], 2]],
        **sizes,
    )
    for layer in model.transformer.h:
        layer.mlp.c_proj.weight[:, :8] = 0
        layer.attn.attention.out_proj.weight[:, :HEAD] = 0
    report = checkpoint.slim(write(model, tmp_path / "in"), tmp_path / "out", multiple=4)
    assert config_of(tmp_path / "out")["intermediate_size"] == 16
    (note,) = report.notes
    assert note.startswith("the heads of transformer.h.0.attn") and "has fewer there" in note


@pytest.mark.sampled(2)
@pytest.mark.parametrize("half", ["attention", "feed-forward"])
def test_dead_half_of_a_layer(tmp_path, half):
    model = build("LlamaForCausalLM", "llama", **{**LLAMA, "num_hidden_layers": 2})
    for layer in model.model.layers if half == "attention" else ():
        layer.self_attn.o_proj.weight[:] = 0
    for layer in () if half == "attention" else model.model.layers:
        layer.mlp.down_proj.weight[:] = 0
    model.model.embed_tokens.weight[3:9] = 0  # rows of the vocabulary stay
    source, out = write(model, tmp_path / "in"), tmp_path / "out"
    report = checkpoint.slim(source, out, multiple=4, check=False)
    config = config_of(out)
    if half == "attention":  # the fewest that a config can say
        assert (config["num_key_value_heads"], config["intermediate_size"]) == (1, 24)
    else:
        assert (config["num_key_value_heads"], config["intermediate_size"]) == (2, 4)
    assert config["num_hidden_layers"] == 2 and config["vocab_size"] == TEXT["vocab_size"]
    assert report.proof is None and "not compared" in str(report)
    original, smaller = load(model, source), load(model, out)
    assert (outputs(original) - outputs(smaller)).abs().max() < LIMIT * outputs(original).abs().max()
