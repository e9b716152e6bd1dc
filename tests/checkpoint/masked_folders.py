"""Checkpoint folders of tiny models with zeros, as transformers writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from architectures import transformers
from demask.checkpoint.family import Family, find_stacks
from demask.checkpoint.slices import ReducedModel, SliceGroup

TEXT = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
}
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


def mask_slices(model: Any, group: SliceGroup, layer: int, dead: torch.Tensor, how: str) -> None:
    """Zero slices in a layer: where they are computed, or where they are read."""
    tensors = dict(model.named_parameters())
    for member in group.members:
        name = f"{member.kind.stack}.{layer}.{member.name}" if member.kind else member.name
        is_left = how == "computed-but-biases" and member.rank == 1
        if name in tensors and member.produces == (how != "read") and not is_left:
            positions = member.positions[dead].reshape(-1)
            tensors[name].data.movedim(member.axis, 0)[positions] = 0


def mask_model(
    model: Any, how: str, units: Sequence[float] = (0.5, 0.3, 0.6, 1.0), heads: Sequence[float] = (0.5, 0.5, 0.25, 1.0)
) -> None:
    """Mask slices of all layers. units, heads: the shares that are dead, by layer, in turn."""
    data = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    family = Family.of(Path("in"), data)
    data = family.full_config(data)
    stacks = find_stacks(family, data, family.build(data))
    groups = ReducedModel(family, data, stacks).groups
    generator = torch.Generator().manual_seed(2)
    for group in groups:
        alike = torch.randperm(group.size, generator=generator)[: group.size // 4]
        for kind in sorted(group.kinds):
            kinds = next(s.kinds for s in stacks if s.path == kind.stack)
            for layer in (k for k, first in enumerate(kinds) if first == kind.layer):
                shares = units if group.kind == "unit" else heads
                share = shares[layer % len(shares)]
                order = torch.randperm(group.size, generator=generator)
                dead = alike if group.is_shared else order[: int(group.size * share)]
                mask_slices(model, group, layer, dead, how)


def write(model: Any, path: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Path:
    """The folder of a model, with a tokenizer's file and a text."""
    model.to(dtype).save_pretrained(path, max_shard_size=shard)
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


def tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a folder, read by safetensors."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


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
