"""Folders with sizes by layer (nemotron-nas), and classes that compute what others do."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from architectures import transformers
from demask.checkpoint import blocks, slim
from demask.errors import BadInput, Mismatch
from masked_folders import build, config_of, generated, outputs, tensors, write

HEAD = 8
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 640,
    "num_hidden_layers": 5,
    "vocab_size": 40,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 777.0},
}
UNITS, GROUPS = ((600, 100, 0, 0, 70), (0, 2, 3, 0, 1))  # live, by layer: the fourth returns its input


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def masked(kind: str = "llama", name: str = "LlamaForCausalLM", **more: Any) -> Any:
    model = build(name, kind, **{**SIZES, **more})
    generator = torch.Generator().manual_seed(1)
    for layer, units, groups in zip(model.model.layers, UNITS, GROUPS, strict=True):
        dead = torch.randperm(640, generator=generator)[units:]
        layer.mlp.down_proj.weight[:, dead] = 0
        live = torch.randperm(4, generator=generator)[:groups]
        rows = torch.ones(4, len(layer.self_attn.v_proj.weight) // 4, dtype=torch.bool)
        rows[live] = False
        layer.self_attn.v_proj.weight[rows.flatten()] = 0
        if layer.self_attn.v_proj.bias is not None:
            layer.self_attn.v_proj.bias[rows.flatten()] = 0
    return model


def logits_of_blocks(path: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What a folder of blocks computes, as nemotron-nas is defined."""
    config, weights = config_of(path), tensors(path)
    heads, used = config["num_attention_heads"], {"model.embed_tokens.weight"}

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        used.add(f"{name}.weight")
        return x @ weights[f"{name}.weight"].T

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        used.add(f"{name}.weight")
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], config["rms_norm_eps"])

    def rotated(x: torch.Tensor) -> torch.Tensor:  # [heads, tokens, HEAD]
        angles = torch.arange(len(tokens))[:, None] / 777.0 ** (torch.arange(0, HEAD, 2) / HEAD)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    x = weights["model.embed_tokens.weight"][tokens]
    for k, block in enumerate(config["block_configs"]):
        own = f"model.layers.{k}."
        if not block["attention"]["no_op"]:
            y = norm(x, own + "input_layernorm")
            q, key, value = (
                linear(y, f"{own}self_attn.{n}_proj").view(len(tokens), -1, HEAD).transpose(0, 1) for n in "qkv"
            )
            group = block["attention"]["n_heads_in_group"]
            assert len(q) == heads == group * len(key)
            key, value = (t.repeat_interleave(group, 0) for t in (rotated(key), value))
            y = F.scaled_dot_product_attention(rotated(q), key, value, is_causal=True)
            x = x + linear(y.transpose(0, 1).flatten(1), own + "self_attn.o_proj")
        if not block["ffn"]["no_op"]:
            y = norm(x, own + "post_attention_layernorm")
            gate = F.silu(linear(y, own + "mlp.gate_proj"))
            x = x + linear(gate * linear(y, own + "mlp.up_proj"), own + "mlp.down_proj")
    logits = linear(norm(x, "model.norm"), "lm_head")
    assert used == weights.keys()
    return logits


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shard", ["5GB", "80KB"])
@pytest.mark.parametrize("target", ["vllm", "mlx"])
def test_folder_has_sizes_by_layer_and_computes_the_same(tmp_path, target, shard):
    model = masked()
    source, out = write(model, tmp_path / "in", shard=shard), tmp_path / "out"
    report = slim(source, out, target=target, per_layer=True)
    config, after = config_of(out), tensors(out)
    halves = config["block_configs"]
    dead = [[half["no_op"] for half in block.values()] for block in halves]
    groups = [block["attention"].get("n_heads_in_group") for block in halves]
    up = [after[f"model.layers.{k}.mlp.up_proj.weight"].shape[0] for k in (0, 1, 3)]
    if target == "vllm":  # the first layer has heads, and all have six queries: 1, 2, 3 and 1 groups
        assert dead == [[False, False], [False, False], [False, True], [False, False]]
        assert (config["num_attention_heads"], groups, up) == (6, [6, 3, 2, 6], [640, 128, 128])
        assert [block["ffn"].get("intermediate_size") for block in halves] == [640, 128, None, 128]
        assert config["auto_map"] == {"AutoConfig": "configuration_decilm.DeciLMConfig"}
    else:  # eight queries: 2, 4 and 1 groups; units in multiples of 256, though there are 640
        assert dead == [[True, False], [False, False], [False, True], [False, False]]
        assert (config["num_attention_heads"], groups, up) == (8, [None, 4, 2, 8], [768, 256, 256])
        assert "auto_map" not in config and config["rope_theta"] == 777.0
    assert config["num_hidden_layers"] == 4 and config["architectures"] == ["DeciLMForCausalLM"]
    names = {p.name for p in source.iterdir()}
    names |= {"configuration_decilm.py"} if target == "vllm" else set()
    assert {p.name for p in out.iterdir()} == names
    assert {p.name for p in tmp_path.iterdir()} == {"in", "out"}
    one = slim(source, tmp_path / "one", target=target)
    assert report.removed > one.removed
    assert one.by_layer[target] == pytest.approx(report.removed, abs=1e-9)
    assert report.proof is not None and report.proof.tokens == 32
    tokens = torch.tensor([5, 9, 21, 7, 33, 12, 30, 6])
    torch.testing.assert_close(logits_of_blocks(out, tokens), model(tokens[None]).logits[0], rtol=1e-5, atol=1e-5)


def test_code_of_the_config(tmp_path):
    """Halves are read as attributes; those of which the config says nothing are absent."""
    write(masked(), tmp_path / "in")
    slim(tmp_path / "in", tmp_path / "out", target="vllm", per_layer=True, check=False)
    path = tmp_path / "out" / blocks.CODE_FILE
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.DeciLMConfig.from_pretrained(tmp_path / "out")
    assert config.block_configs[1].attention.n_heads_in_group == 3
    assert not hasattr(config.block_configs[1].ffn, "ffn_mult")
    assert json.loads(config.to_json_string())["block_configs"][1]["ffn"]["intermediate_size"] == 128


def fault_in_queries(monkeypatch):
    monkeypatch.setattr(blocks, "_QUERIES", ("q_proj.weight",))


def fault_in_units(monkeypatch):
    """The config says more units than there are."""

    def changed(*args):
        config = blocks.config_of_blocks(*args)
        config["block_configs"][0]["ffn"]["intermediate_size"] += 64
        return config

    monkeypatch.setattr(sys.modules[slim.__module__], "config_of_blocks", changed)


def fault_in_groups(monkeypatch):
    """Zeros follow the queries of all heads, not those of each."""
    pad = F.pad

    def padded(positions, more, **options):
        if positions.ndim == 1 or "value" not in options:
            return pad(positions, more, **options)
        return pad(positions.flatten(), (0, more[1] * len(positions)), **options)

    monkeypatch.setattr(blocks.F, "pad", padded)


@pytest.mark.parametrize("fault", [fault_in_queries, fault_in_units, fault_in_groups])
def test_the_proof_sees(tmp_path, monkeypatch, fault):
    fault(monkeypatch)
    write(masked(), tmp_path / "in")
    with pytest.raises(Mismatch):
        slim(tmp_path / "in", tmp_path / "out", target="vllm", per_layer=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("target", "kind", "name", "changes", "words"),
    [
        ("transformers", "llama", "LlamaForCausalLM", {}, "loads no folder with sizes by layer"),
        ("vllm", "qwen2", "Qwen2ForCausalLM", {}, "loads sizes by layer of llama, mistral"),
        ("vllm", "llama", "LlamaForCausalLM", {"attention_bias": True}, "has no biases"),
        ("mlx", "llama", "LlamaForCausalLM", {"head_dim": 16}, "64 numbers altogether, not 128"),
        ("mlx", "llama", "LlamaForCausalLM", {"hidden_act": "gelu"}, "applies silu, not gelu"),
        ("vllm", "mistral", "MistralForCausalLM", {"sliding_window": 8}, "sliding window"),
    ],
)
def test_what_blocks_cannot_say_is_refused(tmp_path, target, kind, name, changes, words):
    write(build(name, kind, **{**SIZES, **changes}), tmp_path / "in")
    with pytest.raises(BadInput, match=words):
        slim(tmp_path / "in", tmp_path / "out", target=target, per_layer=True)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", ["vllm", "mlx"])
def test_qwen2_with_fewer_heads_is_a_llama(tmp_path, target):
    model = masked("qwen2", "Qwen2ForCausalLM")
    model.model.layers[2].self_attn.o_proj.weight[:, : 4 * HEAD] = 0
    model.model.layers[1].self_attn.o_proj.weight[:, 4 * HEAD :] = 0
    source, out = write(model, tmp_path / "in", shard="80KB"), tmp_path / "out"
    report = slim(source, out, target=target)
    config, after = config_of(out), tensors(out)
    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
    assert config["attention_bias"] and not {"use_sliding_window", "layer_types"} & config.keys()
    assert config["num_key_value_heads"] < 4
    assert config.get("rope_theta") == (777.0 if target == "mlx" else None)
    assert "which computes the same" in report.notes[0]
    for k in range(4):
        assert not after[f"model.layers.{k}.self_attn.o_proj.bias"].any()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == after.keys()
    loaded, found = transformers().LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(found.values())
    loaded.eval()
    assert (outputs(model) - outputs(loaded)).abs().max() < 1e-5 * outputs(model).abs().max()
    assert torch.equal(generated(model), generated(loaded))


def test_qwen2_stays_where_no_heads_go_or_a_window_slides(tmp_path):
    model = masked("qwen2", "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=4, max_window_layers=2)
    report = slim(write(model, tmp_path / "in"), tmp_path / "out", target="vllm")
    assert config_of(tmp_path / "out")["model_type"] == "qwen2"
    assert any("loads no qwen2 with fewer heads: those of" in note for note in report.notes)
    model = build("Qwen2ForCausalLM", "qwen2", **SIZES)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight[:, 100:] = 0
    report = slim(write(model, tmp_path / "in2"), tmp_path / "out2", target="vllm")
    assert config_of(tmp_path / "out2")["model_type"] == "qwen2" and not report.notes


def test_what_mlx_does_not_read_stays(tmp_path):
    """The number of a layer, units of GPT-NeoX; and keys of transformers 4 are added."""
    sizes = {**SIZES, "head_dim": HEAD, "num_hidden_layers": 3, "sliding_window": 16}
    del sizes["rope_parameters"]
    model = build("Gemma3ForCausalLM", "gemma3_text", **sizes)
    dead = model.model.layers[1]
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        dead.get_submodule(name).weight[:] = 0
    source = write(model, tmp_path / "in")
    report = slim(source, tmp_path / "vllm", target="vllm", check=False)
    assert config_of(tmp_path / "vllm")["num_hidden_layers"] == 2
    report = slim(source, tmp_path / "mlx", target="mlx", check=False)
    config = config_of(tmp_path / "mlx")
    assert config["num_hidden_layers"] == 3 and any("stay: what" in note for note in report.notes)
    rotations = config["rope_parameters"]
    assert config["rope_theta"] == rotations["full_attention"]["rope_theta"]
    assert config["rope_local_base_freq"] == rotations["sliding_attention"]["rope_theta"]

    model = build("GPTNeoXForCausalLM", "gpt_neox", **{**sizes, "intermediate_size": 256})
    for layer in model.gpt_neox.layers:
        layer.mlp.dense_4h_to_h.weight[:, 100:] = 0
    source = write(model, tmp_path / "in2")
    report = slim(source, tmp_path / "out2", target="mlx", check=False)
    config = config_of(tmp_path / "out2")
    assert config["intermediate_size"] == 256 and config["rotary_pct"] == 0.25
    assert config["rotary_emb_base"] == config["rope_theta"]
    assert report.notes[0].startswith("mlx loads no gpt_neox with fewer units: those of")
