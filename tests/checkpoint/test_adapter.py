"""LoRA adapters that peft writes are cut with their folder."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from architectures import transformers
from demask import checkpoint
from demask.errors import BadInput
from demask.failures import strict
from masked_folders import LLAMA, build, config_of, load, tensors, write

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the libraries, on each other
    transformers()
    peft = pytest.importorskip("peft")
LIMIT = 1e-5
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]  # of the libraries, on each other


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def masked(kind="LlamaForCausalLM", model_type="llama", **config):
    model = build(kind, model_type, **{**LLAMA, **config})
    if model_type == "llama":
        for layer in model.model.layers:
            layer.mlp.gate_proj.weight[4:12] = 0
            layer.mlp.up_proj.weight[4:12] = 0
            layer.mlp.down_proj.weight[:, 4:12] = 0
            layer.self_attn.o_proj.weight[:, 16:] = 0
    return model


def write_adapter(model, path, revived=(), **settings):
    """The adapter of a model with random numbers, which leaves zeros zero but those of `revived`
    units."""
    settings = {"r": 3, "lora_alpha": 6, **settings}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(1)
    dead = [k for k in range(4, 12) if k not in revived]
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        if "lora_A" in name and "down_proj" in name:
            parameter[:, dead] = 0
        if "lora_A" in name and "o_proj" in name:
            parameter[:, 16:] = 0
        if "lora_B" in name and ("gate_proj" in name or "up_proj" in name):
            parameter[dead] = 0
    adapted.save_pretrained(path)
    return adapted.eval()


def logits(model):
    tokens = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    return model(input_ids=tokens).logits


def with_adapter(model, base, path):
    return peft.PeftModel.from_pretrained(load(model, base), path).eval()


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "all": {"target_modules": ALL},
    "ranks": {
        "target_modules": ALL,
        "use_rslora": True,
        "alpha_pattern": {"q_proj": 2},
        "rank_pattern": {"up_proj": 5},
    },
    "dora": {"target_modules": ["q_proj", "v_proj", "down_proj"], "use_dora": True},
    "saved": {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_adapters_of_a_slim_folder(tmp_path, case):
    model = masked()
    source, lora = write(model, tmp_path / "in"), tmp_path / "lora"
    adapted = write_adapter(masked(), lora, **CASES[case])
    expected, base = logits(adapted), logits(model)
    assert (expected - base).abs().max() > 0.01 * base.abs().max()
    report = checkpoint.slim(source, tmp_path / "out", multiple=4, adapter=lora)
    out = tmp_path / "out"
    config = config_of(out)
    assert (config["intermediate_size"], config["num_key_value_heads"]) == (16, 1)
    actual = logits(with_adapter(model, out, out / "adapter"))
    assert (actual - expected).abs().max() < LIMIT * expected.abs().max()
    assert (logits(load(model, out)) - base).abs().max() < LIMIT * base.abs().max()
    assert any(note.startswith("with the adapter: outputs differ by") for note in report.notes)
    settings = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert settings.pop("base_model_name_or_path") == str(out)
    old = json.loads((lora / "adapter_config.json").read_text())
    assert {k: v for k, v in old.items() if k != "base_model_name_or_path"} == settings
    assert (out / "adapter" / "README.md").exists()


def test_units_that_an_adapter_computes_stay(tmp_path):
    source, lora = write(masked(), tmp_path / "in"), tmp_path / "lora"
    adapted = write_adapter(masked(), lora, revived=(4, 5), target_modules=ALL)
    out = tmp_path / "out"
    checkpoint.slim(source, out, multiple=2, adapter=lora)
    assert config_of(out)["intermediate_size"] == 18
    expected = logits(adapted)
    actual = logits(with_adapter(masked(), out, out / "adapter"))
    assert (actual - expected).abs().max() < LIMIT * expected.abs().max()


def test_weights_in_the_other_order_and_constants(tmp_path):
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "n_inner": 24}
    model, again = (
        build("GPT2LMHeadModel", "gpt2", vocab_size=40, bos_token_id=1, eos_token_id=2, **sizes) for _ in range(2)
    )
    for own in (model, again):
        for layer in own.transformer.h:
            layer.mlp.c_fc.weight[:, :8] = 0
            layer.mlp.c_fc.bias[:4] = 0  # of the others, the biases are constants
            layer.mlp.c_proj.weight[4:8] = 0
    source, lora, out = write(model, tmp_path / "in"), tmp_path / "lora", tmp_path / "out"
    settings = {"target_modules": ["mlp.c_proj"], "fan_in_fan_out": True}
    adapted = peft.get_peft_model(again, peft.LoraConfig(task_type="CAUSAL_LM", r=3, **settings))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter += 0.2 * torch.randn(parameter.shape)
        if "lora_A" in name:
            parameter[:, 4:6] = 0
    adapted.save_pretrained(lora)
    checkpoint.slim(source, out, multiple=2, adapter=lora)
    assert config_of(out)["n_inner"] == 18  # 0 to 3 are zero, 4 and 5 not read; 6 and 7 are
    expected = logits(adapted.eval())
    actual = logits(with_adapter(model, out, out / "adapter"))
    assert (actual - expected).abs().max() < LIMIT * expected.abs().max()


def test_layers_that_are_removed(tmp_path):
    def make():
        model = masked()
        model.model.layers[1].mlp.down_proj.weight[:] = 0
        model.model.layers[1].self_attn.o_proj.weight[:] = 0
        return model

    source, out = write(make(), tmp_path / "in"), tmp_path / "out"
    targets = {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1, 2]}
    adapted = write_adapter(make(), tmp_path / "lora", **targets)
    report = checkpoint.slim(source, out, multiple=4, adapter=tmp_path / "lora")
    assert report.layers == {"model.layers": (3, 2)}
    names = set(tensors(out / "adapter"))
    assert names and all(".layers.1." in name for name in names)
    settings = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert settings["layers_to_transform"] == [1]
    expected = logits(adapted)
    actual = logits(with_adapter(make(), out, out / "adapter"))
    assert (actual - expected).abs().max() < LIMIT * expected.abs().max()
    settings.update(target_modules=["layers.1.mlp.up_proj"], layers_to_transform=None)
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(settings))
    with strict(False), pytest.raises(BadInput, match="number of a layer"):
        checkpoint.slim(source, tmp_path / "other", adapter=tmp_path / "lora", check=False)
    assert not (tmp_path / "other").exists()


@pytest.mark.nightly
def test_an_adapter_and_the_vocabulary(tmp_path):
    def make():
        model = masked()
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
            weight[36:] = 0
        return model

    source, out = write(make(), tmp_path / "in"), tmp_path / "out"
    (source / "tokenizer.json").unlink()
    adapted = peft.get_peft_model(
        make(), peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["embed_tokens", "lm_head"])
    )
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter += 0.2 * torch.randn(parameter.shape)
    adapted.save_pretrained(tmp_path / "lora")
    expected = logits(adapted.eval())[..., :36]
    checkpoint.slim(source, out, multiple=4, adapter=tmp_path / "lora", vocabulary=range(36, 40))
    assert config_of(out)["vocab_size"] == 36
    tokens = torch.randint(3, 36, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = adapted(input_ids=tokens).logits[..., :36]
    actual = with_adapter(make(), out, out / "adapter")(input_ids=tokens).logits
    assert (actual - expected).abs().max() < LIMIT * expected.abs().max()


def settings(**values):
    def change(path):
        file = path / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (settings(peft_type="IA3"), "got 'IA3'"),
        (settings(layer_replication=[[0, 1]]), "with layer_"),
        (lambda p: (p / "adapter_model.safetensors").unlink(), "as peft writes it"),
    ],
)
def test_other_adapters(tmp_path, damage, words):
    source, lora = write(masked(), tmp_path / "in"), tmp_path / "lora"
    write_adapter(masked(), lora, target_modules=["q_proj"])
    damage(lora)
    with strict(False), pytest.raises(BadInput, match=words):
        checkpoint.slim(source, tmp_path / "out", adapter=lora, check=False)


def test_an_adapter_of_another_folder(tmp_path):
    source, lora = write(masked(intermediate_size=16), tmp_path / "in"), tmp_path / "lora"
    write_adapter(masked(), lora, target_modules=["up_proj"])
    with strict(False), pytest.raises(BadInput, match="of another folder"):
        checkpoint.slim(source, tmp_path / "out", adapter=lora, check=False)
