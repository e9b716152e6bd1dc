"""What formats with sizes by layer compute: a LLaMA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from demask.checkpoint.family import slides

_ROTATIONS = ("default", "linear", "llama3")  # whose frequencies do not depend on the text


def differs_from_llama(model: Any) -> str:
    """What a model, which is on the meta device, computes that a LLaMA does not; "" for nothing.
    Biases are not compared, nor norms of heads."""
    config, kind = model.config, type(model).__name__
    if not kind.endswith("ForCausalLM"):
        return f"has no weights of {kind}"
    if config.hidden_act != "silu":
        return f"applies silu, not {config.hidden_act}"
    if slides(config):
        return "attends to all tokens, not to a sliding window"
    if (rotation := config.rope_parameters["rope_type"]) not in _ROTATIONS:
        return f"has no rotations of type {rotation}"
    if len(frequency_factors(model)) * 2 != head_size(config):
        return "rotates all of a head"
    return ""


def has_biases(model: Any) -> bool:
    """Whether products have biases."""
    return any(name.endswith(".bias") for name, _ in model.named_parameters())


def head_size(config: Any) -> int:
    """How wide a head is."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def frequency_factors(model: Any) -> Tensor:
    """By how much the frequencies of a model's rotation are smaller than without scaling."""
    rotary = type(model.model.rotary_emb)(model.config)
    size = 2 * len(rotary.inv_freq)
    base = model.config.rope_parameters["rope_theta"]
    unscaled = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)
    return unscaled / rotary.inv_freq
