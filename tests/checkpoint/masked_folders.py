"""Checkpoint folders of tiny models with zeros, as transformers writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from architectures import transformers

TEXT = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 40, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64}  # fmt: skip
LLAMA = {**TEXT, "intermediate_size": 24, "num_hidden_layers": 3, "num_key_value_heads": 2}
HEAD = 8  # positions


def build(name: str, model_type: str, **config: Any) -> Any:
    """A model of a class of transformers, with random weights of which none is zero."""
    library = transformers()
    model = getattr(library, name)(library.AutoConfig.for_model(model_type, **config)).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            parameter.add_(0.2 * noise)
        else:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model


def llama(**config: Any) -> Any:
    """Three layers: 10 units of the first are not computed, 6 of the last not read; the second
    returns its input; one of two groups of heads is not read."""
    model = build("LlamaForCausalLM", "llama", **{**LLAMA, **config})
    first, second, third = model.model.layers
    first.mlp.gate_proj.weight[4:14] = 0
    second.mlp.down_proj.weight[:] = 0
    second.self_attn.o_proj.weight[:] = 0
    third.mlp.down_proj.weight[:, 2:8] = 0
    first.self_attn.o_proj.weight[:, 2 * HEAD :] = 0
    third.self_attn.o_proj.weight[:, : 2 * HEAD] = 0
    return model


def write(model: Any, path: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Path:
    """The folder of a model, with a tokenizer's file and a text."""
    model.to(dtype).save_pretrained(path, max_shard_size=shard)
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


def tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a folder, read by safetensors."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(path.glob("*.safetensors"))
            for name, tensor in load_file(file).items()}  # fmt: skip


def config_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def load(model: Any, path: Path) -> Any:
    """A folder read by the class of a model, which must find what it expects."""
    loaded, found = type(model).from_pretrained(path, output_loading_info=True)
    assert not any(found.values()), found
    return loaded.eval()


def outputs(model: Any, length: int = 9) -> Tensor:
    """The logits of two texts."""
    tokens = torch.randint(3, 40, (2, length), generator=torch.Generator().manual_seed(length))
    more = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    return model(input_ids=tokens, **more).logits


def generated(model: Any) -> Tensor:
    """The tokens that a model generates for a text."""
    tokens = torch.tensor([[5, 9, 21, 7]])
    return model.generate(tokens, max_new_tokens=16, do_sample=False, eos_token_id=None)
