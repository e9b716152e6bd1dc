"""What loads a checkpoint, and what it accepts.

Found by experiment on CPUs in November 2026: transformers 5.24, vLLM 0.32.0, mlx-lm 0.32.2,
llama.cpp of October 2026. A family that is not listed for a loader keeps all heads there: some of
its classes compute the width of a head from other numbers of the config, and then load nothing.
Formats with sizes by layer compute a LLaMA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from demask.checkpoint.family import slides

_TEXT_INDEPENDENT_ROTATIONS = ("default", "linear", "llama3")  # whose frequencies do not depend on the text
# By kind of slices, the beginnings of names, in a layer of LLaMA, of the half that has them: all
# formats with sizes by layer describe layers that are built so.
HALVES = {"head": ("self_attn.", "input_layernorm."), "unit": ("mlp.", "post_attention_layernorm.")}
_NAS = "nemotron-nas"
_AS_LLAMA = {"Qwen2ForCausalLM": ("LlamaForCausalLM", {"model_type": "llama", "attention_bias": True})}


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """A format in which every layer has sizes of its own."""

    name: str  # of the architecture, as in the file
    headless: int | None  # the number of the first layer that may have no heads; None: all have some
    unitless: bool = False  # whether layers without units load


@dataclass(frozen=True, slots=True)
class GgufArchitecture(LayerFormat):
    """An architecture of llama.cpp."""

    pairs: bool = False  # whether the two rows of q and k that are rotated together are neighbors
    fused: bool = False  # whether q, k and v are one tensor, one below the other
    biases: bool = True  # whether products have biases
    untied: bool = True  # whether the output has a weight of its own
    frequencies: bool = True  # whether the file says by what factors the frequencies of rotation differ


@dataclass(frozen=True, slots=True)
class BlockFormat(LayerFormat):
    """A folder whose config lists its layers (`block_configs`): all have as many queries, and each has its own
    number of keys and values, which divides that of the queries."""

    multiple: int = 1  # of units: the config has them as a share of the width, which is rounded up
    own_head_size: bool = False  # whether the config says how wide a head is, so that queries may go
    code: bool = False  # whether the folder needs the code of its config's class


@dataclass(frozen=True, slots=True)
class LoaderTarget:
    """A loader of checkpoints."""

    name: str  # as `checkpoint.slim` takes it
    multiple: int = 64  # of units, unless the user says another: what its kernels and quantizers take
    # by model type, more keys of transformers 4 that it reads (of rotations the old ones), and those whose values
    # they have; None: it reads those of transformers 5
    old_keys: Mapping[str, Mapping[str, str]] | None = None
    # model types of which it loads fewer heads than the width has room for; None: all that the class takes
    cut_heads: frozenset[str] | None = None
    full_units: frozenset[str] = frozenset()  # those of which it loads no fewer units than a multiple of the width
    numbered: frozenset[str] = frozenset()  # those of which the number of a layer says what the layer computes
    # by class of others, one that computes the same, of which it loads fewer heads, and what the config then says;
    # its other parameters are zero
    other_classes: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    # of GGUF files, by model type; a loader of folders has none
    architectures: Mapping[str, GgufArchitecture] = field(default_factory=dict)
    # by model type, the folder with sizes by layer that it loads
    blocks: Mapping[str, BlockFormat] = field(default_factory=dict)

    def cuts_heads(self, model_type: str) -> bool:
        """Whether it loads models of a type with fewer heads."""
        return self.cut_heads is None or model_type in self.cut_heads


_DECI = GgufArchitecture("deci", 1, pairs=True)
_OPENELM = GgufArchitecture("openelm", None, fused=True, biases=False, untied=False, frequencies=False)
_VLLM = BlockFormat(_NAS, 1, unitless=True, own_head_size=True, code=True)
_MLX = BlockFormat(_NAS, 0, unitless=True, multiple=256)

TARGETS: Mapping[str, LoaderTarget] = {
    target.name: target
    for target in (
        LoaderTarget("transformers"),
        LoaderTarget(
            "vllm",
            cut_heads=frozenset({"llama", "mistral", "mixtral", "qwen3", "gemma2", "gemma3_text", "phi3"}),
            other_classes=_AS_LLAMA,
            blocks={"llama": _VLLM, "mistral": _VLLM},
        ),
        LoaderTarget(
            "mlx",
            old_keys={
                "gpt_neox": {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
                "qwen3_moe": {"num_experts": "num_local_experts"},
            },
            full_units=frozenset({"gpt2", "gpt_neox"}),
            numbered=frozenset({"gemma3", "gemma3_text", "cohere2", "exaone4"}),
            cut_heads=frozenset({"llama", "qwen3", "qwen3_moe", "gemma2", "gemma3", "gemma3_text"}),
            other_classes=_AS_LLAMA,
            blocks={"llama": _MLX, "mistral": _MLX},
        ),
        LoaderTarget(  # blocks of its 8-bit and 4-bit numbers are 32 wide
            "llama.cpp", 32, architectures={"llama": _DECI, "mistral": _DECI, "qwen2": _DECI, "qwen3": _OPENELM}
        ),
    )
}


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
    if (rotation := config.rope_parameters["rope_type"]) not in _TEXT_INDEPENDENT_ROTATIONS:
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
