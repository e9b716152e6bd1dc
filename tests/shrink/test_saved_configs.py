"""Networks whose sizes no config describes are written with zeros, and read as their class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import architectures
import demask
from night import at_night

pytestmark = pytest.mark.filterwarnings("ignore:save_pretrained writes sizes:UserWarning")
TEXT = {"vocab_size": 60, "max_position_embeddings": 64}
WIDTHS = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}


def zero(model: Any, unit: str, head: str = "", *, along: int = 1) -> None:
    """Mask 8 units of the first layer, 16 of the second and so on, and the second head of 8 in all:
    of the weights that read them, by the ends of their names."""
    counts = dict.fromkeys((unit, head), 0)
    for name, p in model.named_parameters():
        if name.endswith(unit) and p.ndim == 2:
            counts[unit] += 1
            p.narrow(along, 0, 8 * counts[unit]).zero_()
        elif head and name.endswith(head):
            p.narrow(along, 8, 8).zero_()
    assert counts[unit] > 1


def bert(t: Any) -> tuple[Any, dict[str, int]]:
    model = t.BertModel(t.BertConfig(num_hidden_layers=2, vocab_size=60, **WIDTHS))
    for layer in model.encoder.layer:
        layer.attention.output.dense.weight[:, 8:16] = 0
    for k, layer in enumerate(model.encoder.layer):
        layer.output.dense.weight[:, : 8 + 8 * k] = 0
    return model, {"intermediate_size": 40, "num_attention_heads": 4}


def gpt2(t: Any) -> tuple[Any, dict[str, int]]:
    model = t.GPT2LMHeadModel(
        t.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=60, n_positions=64, n_inner=48, bos_token_id=0, eos_token_id=0
        )
    )
    zero(model, "mlp.c_proj.weight", "attn.c_proj.weight", along=0)
    return model, {"n_inner": 40, "n_head": 4}


def opt(t: Any) -> tuple[Any, dict[str, int]]:
    """One of three layers is dead, which for OPT's code is one of small sizes."""
    model = t.OPTForCausalLM(
        t.OPTConfig(
            hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=32, **TEXT
        )
    )
    zero(model, "fc2.weight")
    last = model.model.decoder.layers[2]
    for part in (last.fc2, last.self_attn.out_proj):
        part.weight.zero_(), part.bias.zero_()
    return model, {"ffn_dim": 40, "num_attention_heads": 4}


def phi3(t: Any) -> tuple[Any, dict[str, int]]:
    """Joined rows of queries, keys and values; three heads do not divide the width, which the
    config then says of a head."""
    config = t.Phi3Config(
        num_hidden_layers=2, num_key_value_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2, **WIDTHS, **TEXT
    )
    model = t.Phi3ForCausalLM(config)
    zero(model, "mlp.down_proj.weight", "self_attn.o_proj.weight")
    return model, {"intermediate_size": 40, "num_attention_heads": 3}


def qwen3(t: Any) -> tuple[Any, dict[str, int]]:
    """Two heads of one layer and one of the other: three in both, in any width."""
    config = t.Qwen3Config(num_hidden_layers=2, num_key_value_heads=4, head_dim=8, **WIDTHS, **TEXT)
    model = t.Qwen3ForCausalLM(config)
    zero(model, "mlp.down_proj.weight", "self_attn.o_proj.weight")
    model.model.layers[0].self_attn.o_proj.weight[:, 16:24] = 0
    return model, {"intermediate_size": 40, "num_attention_heads": 3, "num_key_value_heads": 3}


def wav2vec2(t: Any) -> tuple[Any, dict[str, int]]:
    """Positions pass a convolution with a norm of weights."""
    config = t.Wav2Vec2Config(
        num_hidden_layers=2,
        conv_dim=(16, 16, 16),
        conv_stride=(5, 2, 2),
        conv_kernel=(10, 3, 3),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        **WIDTHS,
    )
    model = t.Wav2Vec2Model(config)
    zero(model, "feed_forward.output_dense.weight")
    return model, {"intermediate_size": 40}


def t5(t: Any) -> tuple[Any, dict[str, int]]:
    model = t.T5ForConditionalGeneration(
        t.T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    )
    zero(model, "DenseReluDense.wo.weight")
    return model, {"d_ff": 40}


@pytest.mark.parametrize("build", [bert, *at_night(gpt2, opt, phi3, qwen3, wav2vec2, t5)])
def test_the_smallest_config_with_room_is_written(
    build: Callable[[Any], tuple[Any, dict[str, int]]], tmp_path: Path
) -> None:
    transformers = architectures.transformers()
    torch.manual_seed(0)
    with torch.no_grad():
        model, expected = build(transformers)
    model.eval()
    ids = torch.randint(3, 50, (2, 7))
    inputs: dict[str, Tensor] = {"input_ids": ids}
    if build is wav2vec2:
        inputs = {"input_values": torch.randn(2, 800)}
    if build is t5:
        inputs["decoder_input_ids"] = ids[:, :5]
    slim: Any = demask.demask(model, (), inputs)
    sizes = {name: p.shape for name, p in slim.named_parameters()}
    slim.save_pretrained(tmp_path)
    assert {name: p.shape for name, p in slim.named_parameters()} == sizes
    again, found = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values()), found
    assert {name: getattr(again.config, name) for name in expected} == expected
    counts = [sum(p.numel() for p in net.parameters()) for net in (slim, again, model)]
    assert counts[1] < counts[2] and (build is phi3 or counts[0] < counts[1])
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(**inputs)[0], model(**inputs)[0])
