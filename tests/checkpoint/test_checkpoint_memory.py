"""A folder is slimmed, and the result compared with it, in a part of its size."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import own_process
from masked_folders import llama, write

WIDTH, UNITS, LAYERS, SHARDS = 1024, 2560, 45, 15
SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": UNITS,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
}
CODE = """
import sys
sys.path[:0] = sys.argv[1:]
from architectures import transformers
transformers()
from demask import checkpoint
def kib(key):
    return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1])
checkpoint.slim("small", "small-slim", multiple=4)  # imports what is needed
open("/proc/self/clear_refs", "w").write("5")
before = kib("VmRSS")
report = checkpoint.slim("in", "out")
print(kib("VmHWM") - before, report.memory // 1024, kib("VmHWM"))
"""


def write_large(path: Path) -> int:
    """Write a bfloat16 folder of several shards, other units masked in each layer; its bytes."""
    path.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        **SIZES,
    }
    (path / "config.json").write_text(json.dumps(config))
    noise = (torch.randn(UNITS, WIDTH) / WIDTH**0.5).bfloat16()
    tensors = {
        "model.embed_tokens.weight": noise.repeat(2, 1)[:4096].clone(),
        "model.norm.weight": torch.ones(WIDTH).bfloat16(),
    }
    weight_map, total = {}, 0
    for layer in range(LAYERS):
        own = {
            f"self_attn.{name}_proj": noise[:rows]
            for name, rows in (("q", WIDTH), ("k", 256), ("v", 256), ("o", WIDTH))
        }
        own |= {"mlp.gate_proj": noise, "mlp.up_proj": noise, "mlp.down_proj": noise.T}
        own = {f"model.layers.{layer}.{name}.weight": t.contiguous() for name, t in own.items()}
        own[f"model.layers.{layer}.mlp.up_proj.weight"] = masked = noise.clone()
        masked[: 1200 + 8 * layer] = 0
        for name in ("input_layernorm", "post_attention_layernorm"):
            own[f"model.layers.{layer}.{name}.weight"] = torch.ones(WIDTH).bfloat16()
        tensors |= own
        if (layer + 1) % (LAYERS // SHARDS) == 0:
            file = f"model-{layer:05}.safetensors"
            save_file({name: t.clone() for name, t in tensors.items()}, path / file, {"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
            total += sum(t.nbytes for t in tensors.values())
            tensors = {}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


@pytest.mark.nightly
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="reads Linux's /proc")
def test_a_part_of_the_folder_is_in_memory(tmp_path: Path) -> None:
    with torch.no_grad():
        write(llama(), tmp_path / "small", torch.bfloat16)
        size = write_large(tmp_path / "in")
    status, out, err = own_process.run(CODE, *sys.path, folder=tmp_path)
    assert status == 0, err
    more, reported, peak = (1024 * int(n) for n in out.split()[-3:])
    assert more < size / 10, f"{more / 1e6:.0f} MB of {size / 1e6:.0f} MB"
    assert reported >= peak - 2**20
