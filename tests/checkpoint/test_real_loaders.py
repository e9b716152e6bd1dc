"""Each loader reads what `slim` writes for it, and generates what the masked original does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from demask.checkpoint import slim
from demask.checkpoint.targets import TARGETS
from families import FAMILIES, OTHERS
from loaders import Loader, running
from masked_folders import build, config_of, mask_model

# Dead shares by layer: some slices, the attention, the feed-forward, both, most slices.
UNITS, HEADS = (0.6, 0.74, 1.0, 1.0, 0.9), (0.5, 1.0, 0.5, 1.0, 0.75)
LAYERS = ("num_hidden_layers", "n_layer")
# Sizes that kernels take: heads of 32, units in multiples of 64.
SCALES = {
    "hidden_size": 4,
    "n_embd": 4,
    "word_embed_proj_dim": 4,
    "num_attention_heads": 2,
    "n_head": 2,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 8,
    "ffn_dim": 8,
    "n_inner": 8,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
KNOWN = {
    "vllm": ("llama", "mistral", "qwen2", "qwen3", "mixtral", "gemma2", "gemma3_text", "phi3",
             "gpt2", "opt", "olmo2", "stablelm", "qwen2_moe", "qwen3_moe"),
    "mlx": ("llama", "mistral", "qwen2", "qwen3", "mixtral", "gemma2", "gemma3_text", "phi3",
            "gpt_neox", "olmo2", "stablelm", "qwen2_moe", "qwen3_moe"),
}  # fmt: skip
PROMPT = [5, 9, 21, 7, 33, 12, 30, 6]


@pytest.fixture(scope="module", params=KNOWN)
def loader(request: Any, tmp_path_factory: Any) -> Iterator[Loader]:
    with running(request.param, tmp_path_factory.mktemp(request.param)) as own:
        yield own


def masked(name: str, path: Path, **more: Any) -> tuple[Any, Path]:
    """A masked model of five layers, and its folder, with a tokenizer of words."""
    kind, config = {**FAMILIES, **OTHERS}[name]
    config = {k: v * SCALES.get(k, 1) if isinstance(v, int) else v for k, v in config.items()}
    if name == "gpt_neox":  # mlx-lm loads no other width
        config["intermediate_size"] = 4 * config["hidden_size"]
    layers = 7 if name == "gemma3_text" else 5  # mlx-lm wants one of its sixth layers
    config |= {key: layers for key in LAYERS if key in config}
    model = build(kind, name, **{**config, "dtype": "float32", **more})
    mask_model(model, "read", UNITS, HEADS)
    model.save_pretrained(path)
    words = {"a": 0} | {f"w{k}": k for k in range(1, 100)}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": words, "merges": []}}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return model, path


def expected(model: Any) -> list[int]:
    tokens = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=16, min_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return tokens[0, len(PROMPT) :].tolist()


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted({*KNOWN["vllm"], *KNOWN["mlx"]}))
def test_loader_generates_the_same(name: str, loader: Loader, tmp_path: Path) -> None:
    if name not in KNOWN[loader.name]:
        pytest.skip(f"{loader.name} has no {name}")
    with torch.no_grad():
        model, source = masked(name, tmp_path / "in")
        report = slim(source, tmp_path / "out", target=loader.name)
        (answer,) = loader.answers(tmp_path / "out", [PROMPT])
        assert answer["tokens"] == expected(model)
    assert report.removed > 0 or name in TARGETS[loader.name].full_units


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_loader_of_sizes_by_layer_generates_the_same(name: str, loader: Loader, tmp_path: Path) -> None:
    with torch.no_grad():
        model, source = masked(name, tmp_path / "in", **({"sliding_window": None} if name == "mistral" else {}))
        one = slim(source, tmp_path / "one", target=loader.name)
        report = slim(source, tmp_path / "out", target=loader.name, per_layer=True)
        own = TARGETS[loader.name].blocks[name]
        (answer,) = loader.answers(tmp_path / "out", [PROMPT], trust=own.code)
        assert answer["tokens"] == expected(model)
    assert report.removed > one.removed
    assert len(config_of(tmp_path / "out")["block_configs"]) == 4
