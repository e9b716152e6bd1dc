"""Folders with weights of 8 bits: weights and scales are cut alike, and stay as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from demask import checkpoint
from demask.checkpoint.folder import Scale
from demask.errors import BadInput, DemaskError
from demask.failures import strict
from masked_folders import LLAMA, build, config_of, llama, load, outputs, tensors, write

BLOCK = 8
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
PACKED = {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": ["lm_head"]}
KINDS = {  # dtype, axes of blocks (0: one scale for all), suffix of scales, settings
    "blocks": (torch.float8_e4m3fn, (BLOCK, BLOCK), "_scale_inv", FP8),
    "tensor": (torch.float8_e4m3fn, (0, 0), "_scale", {**PACKED, "format": "float-quantized"}),
    "rows": (torch.int8, (1, 0), "_scale", {**PACKED, "format": "int-quantized"}),
    "groups": (torch.int8, (1, BLOCK), "_scale", {**PACKED, "format": "int-quantized"}),
}


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """Scales, one for each number of a weight."""
    scales = scales.reshape(-1, 1) if scales.ndim == 1 else scales
    for axis, n in enumerate(shape):
        scales = scales.repeat_interleave(n // scales.shape[axis], axis)
    return scales


def quantize(path: Path, kind: str) -> Path:
    """Quantize the weights of the layers of a folder, in place."""
    dtype, blocks, suffix, settings = KINDS[kind]
    own = tensors(path)
    for name, weight in list(own.items()):
        if ".layers." in name and weight.ndim == 2:
            counts = [n // b if b else 1 for n, b in zip(weight.shape, blocks, strict=True)]
            split = weight.reshape(counts[0], -1, counts[1], weight.shape[1] // counts[1])
            largest = split.abs().amax((1, 3)).clamp(min=1e-3)
            scales = largest / (127 if dtype == torch.int8 else 448)
            numbers = weight / spread(scales, weight.shape)
            own[name] = (numbers.round() if dtype == torch.int8 else numbers).to(dtype)
            own[name + suffix] = scales if any(blocks) else scales[0]
    save_file(own, path / "model.safetensors", {"format": "pt"})
    config = config_of(path)
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return path


def values(path: Path) -> dict[str, Tensor]:
    """The weights of a folder, as numbers."""
    own = tensors(path)
    scales = {n: own.pop(n) for n in list(own) if n.endswith(("_scale", "_scale_inv"))}
    return {
        name: weight.float() * spread(scale, weight.shape)
        for name, weight in own.items()
        if (scale := scales.get(name + "_scale", scales.get(name + "_scale_inv"))) is not None
    }


def masked() -> object:
    """Two layers: of three blocks of 8 units, one is zero; one of two groups of heads is not read.
    In the second layer single units of the last block are zero, too."""
    model = build("LlamaForCausalLM", "llama", **{**LLAMA, "num_hidden_layers": 2})
    for layer in model.model.layers:
        layer.mlp.down_proj.weight[:, 8:16] = 0
        layer.self_attn.o_proj.weight[:, 16:] = 0
    model.model.layers[1].mlp.down_proj.weight[:, 16:20] = 0
    return model


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_scales_are_cut_alike(tmp_path, kind):
    source, out = quantize(write(masked(), tmp_path / "in"), kind), tmp_path / "out"
    report = checkpoint.slim(source, out, multiple=4)
    before, after = values(source), values(out)
    assert before.keys() == after.keys() and len(after) == 2 * 7
    assert {t.dtype for n, t in tensors(out).items() if n in after} == {KINDS[kind][0]}
    for layer in range(2):
        units = [k for k in range(24) if not 8 <= k < 16]
        if layer and BLOCK not in KINDS[kind][1]:  # the first dead ones fill up
            units = [*range(12), *range(20, 24)]
        name = f"model.layers.{layer}."
        for leaf in ("gate", "up"):
            weight = name + f"mlp.{leaf}_proj.weight"
            assert torch.equal(after[weight], before[weight][units])
        for weight, rest in (("mlp.down_proj.weight", units), ("self_attn.o_proj.weight", slice(16))):
            assert torch.equal(after[name + weight], before[name + weight][:, rest])
        assert torch.equal(after[name + "self_attn.k_proj.weight"], before[name + "self_attn.k_proj.weight"][:8])
    assert config_of(out)["intermediate_size"] == 16
    assert config_of(out)["quantization_config"] == KINDS[kind][3]
    assert report.proof.difference < 1e-5 and report.proof.tokens == 32


def test_transformers_reads_what_is_written(tmp_path):
    source, out = quantize(write(masked(), tmp_path / "in"), "blocks"), tmp_path / "out"
    checkpoint.slim(source, out, multiple=4)
    original, smaller = load(masked(), source), load(masked(), out)
    difference = (outputs(original).float() - outputs(smaller).float()).abs().max()
    assert difference <= 1e-5 * outputs(original).abs().max()


def test_names_of_layers_in_the_settings(tmp_path):
    source, out = quantize(write(llama(), tmp_path / "in"), "blocks"), tmp_path / "out"
    config = config_of(source)
    names = ["lm_head", *(f"model.layers.{k}.self_attn.q_proj" for k in range(3))]
    config["quantization_config"]["modules_to_not_convert"] = names
    (source / "config.json").write_text(json.dumps(config))
    report = checkpoint.slim(source, out, multiple=4, check=False)
    assert report.layers == {"model.layers": (3, 2)}
    settings = config_of(out)["quantization_config"]
    assert settings["modules_to_not_convert"] == names[:3]
    assert torch.equal(
        values(out)["model.layers.1.self_attn.v_proj.weight"],
        values(source)["model.layers.2.self_attn.v_proj.weight"][8:],
    )
    config["quantization_config"]["modules_to_not_convert"] = [r"re:.*layers\.2\..*"]
    (source / "config.json").write_text(json.dumps(config))
    with strict(False), pytest.raises(BadInput, match="by number"):
        checkpoint.slim(source, tmp_path / "other", multiple=4, check=False)


def test_heads_that_share_a_scale_stay(tmp_path):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
    model = build("LlamaForCausalLM", "llama", **{**LLAMA, "num_hidden_layers": 1, **heads})
    model.model.layers[0].self_attn.o_proj.weight[:, 16:] = 0
    source = quantize(write(model, tmp_path / "in"), "blocks")
    report = checkpoint.slim(source, tmp_path / "out", multiple=4)
    assert config_of(tmp_path / "out")["num_key_value_heads"] == 4
    assert any("have scales in common" in note for note in report.notes)


def zero_points(own):
    own["model.layers.0.mlp.up_proj.weight_zero_point"] = torch.ones(24, 1, dtype=torch.int8)


def no_scale(own):
    del own["model.layers.0.mlp.up_proj.weight_scale"]


def short_scale(own):
    own["model.layers.0.mlp.up_proj.weight_scale"] = torch.ones(5, 1)


@pytest.mark.parametrize("damage", [zero_points, no_scale, short_scale])
def test_other_weights_of_8_bits(tmp_path, damage):
    source = quantize(write(masked(), tmp_path / "in"), "rows")
    own = tensors(source)
    damage(own)
    save_file(own, source / "model.safetensors")
    with strict(False), pytest.raises(BadInput, match=r"up_proj\.weight.*slim the folder that"):
        checkpoint.slim(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({**PACKED, "format": "pack-quantized"}, "compressed-tensors: pack"),
        ("text", "?"),
        ({}, "?"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path, settings, name):
    source = write(masked(), tmp_path / "in")
    config = {**config_of(source), "quantization_config": settings}
    (source / "config.json").write_text(json.dumps(config))
    with strict(False), pytest.raises(BadInput, match=re.escape(f"quantized ({name}")):
        checkpoint.slim(source, tmp_path / "out")


def test_a_block_is_not_cut_in_two():
    scale = Scale("w_scale", (4, 0))
    cuts = scale.cuts({0: torch.tensor([4, 5, 6, 7, 8]), 1: torch.tensor([1])})
    assert {axis: own.tolist() for axis, own in cuts.items()} == {0: [1, 2]}
    with pytest.raises(DemaskError, match="cut in two"):
        scale.cuts({0: torch.tensor([0, 1, 2, 4])})
