"""Nightly: real architectures obey the law of groups. What demask removes beyond it is listed."""

from __future__ import annotations

import pytest
import torch

from networks import torchvision
from prune_networks import broken_law, randomized

pytestmark = pytest.mark.nightly
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(14).view(2, 7)
VISION = """resnet18 mobilenet_v3_small squeezenet1_1 shufflenet_v2_x0_5 densenet121 efficientnet_b0
    convnext_tiny resnext50_32x4d regnet_y_400mf mnasnet0_5""".split()
SMALL = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SHARED = {**SMALL, "num_attention_heads": 8, "num_key_value_heads": 4}
# Class of the configuration: its arguments, and the structures that it has.
LANGUAGE = {
    "GPT2Config": ({"vocab_size": 90, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}, ("head", "unit")),
    "LlamaConfig": (SHARED, ("head", "unit")),
    "Qwen3Config": ({**SHARED, "head_dim": 8}, ("head", "unit")),
    "OPTConfig": (
        {
            "vocab_size": 90,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 32,
        },
        ("head", "unit"),
    ),
    "MixtralConfig": ({**SHARED, "num_local_experts": 4}, ("unit",)),
}


@pytest.mark.parametrize("name", VISION)
def test_channels_of_vision_networks(name: str) -> None:
    torch.manual_seed(0)
    model = randomized(getattr(torchvision().models, name)(weights=None))
    assert broken_law(model, (IMAGES,)) == []


@pytest.mark.parametrize("name", LANGUAGE)
def test_heads_and_units_of_language_models(name: str) -> None:
    torchvision()
    transformers = pytest.importorskip("transformers")
    arguments, structures = LANGUAGE[name]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**arguments)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for structure in structures:
        # positions beyond these tokens, and OPT's padding, have rows that nothing reads
        wasteful = name in ("GPT2Config", "OPTConfig")
        assert broken_law(randomized(model), (TOKENS,), structure=structure, wasteful=wasteful) == [], structure
