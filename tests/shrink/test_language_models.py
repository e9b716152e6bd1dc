"""Language models that come back in their class: caches, configs, files, adapters, training."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import prune

import architectures
import demask
from demask.errors import Mismatch
from demask.failures import strict
from demask.shrink.own_class.pretrained import fitting_configs
from night import at_night
from rounds import rounds


@pytest.mark.nightly
@pytest.mark.parametrize("modules", [None, *at_night("auto")])
def test_every_layer_keeps_its_place_in_the_cache(modules: str | None) -> None:
    """The third of three layers has the number of the key and value heads, of which one goes."""
    model, ids = llama(0, num_hidden_layers=3)
    slim: Any = demask.demask(model, (), {"input_ids": ids}, modules=modules)
    assert [layer.self_attn.layer_idx for layer in slim.model.layers] == [*range(3)]
    assert torch.equal(slim.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))
    torch.testing.assert_close(slim(ids).logits, model(ids).logits)


def llama(more: int, **options: Any) -> tuple[Any, Tensor]:
    """A small LLaMA, a head group and units masked in both layers; `more` units in the second."""
    pytest.importorskip("transformers")
    transformers = architectures.transformers()
    config = transformers.LlamaConfig(
        vocab_size=60,
        intermediate_size=64,
        max_position_embeddings=64,
        **({"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2} | options),
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for k, layer in enumerate(model.model.layers):
            layer.mlp.down_proj.weight[:, : 16 + more * k] = 0
            groups = layer.self_attn.config.num_key_value_heads
            layer.self_attn.o_proj.weight[:, : 32 // groups] = 0
    return model, torch.randint(3, 50, (2, 6))


@functools.cache
def demasked_llama() -> tuple[Any, Tensor, Any]:
    """`llama(0)`, its example, and it demasked: shared, so never to be changed."""
    model, ids = llama(0)
    return model, ids, demask.demask(model, (), {"input_ids": ids})


OPTIONS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def test_a_language_model_generates_and_is_saved(tmp_path: Path) -> None:
    model, ids, shared = demasked_llama()
    slim = copy.deepcopy(shared)
    assert type(slim) is type(model)
    assert torch.equal(slim.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))
    assert (slim.config.num_attention_heads, slim.config.intermediate_size) == (2, 48)
    assert demask.verify(model, slim, (), {"input_ids": ids}).ok
    slim.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, slim(ids).logits)
    fresh = demask.resize(type(model)(model.config), slim.state_dict())
    assert torch.equal(fresh(ids).logits, slim(ids).logits)
    demask.save(slim, tmp_path / "slim.demask")
    loaded: Any = demask.load(tmp_path / "slim.demask", into=type(model)(model.config))
    loaded.save_pretrained(tmp_path / "again")
    again = type(model).from_pretrained(tmp_path / "again")
    assert again.config.intermediate_size == 48
    assert torch.equal(again(ids).logits, slim(ids).logits)


def test_the_check_sees_a_layer_in_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cache nothing tells the layers apart, so the network is called with it, too."""
    module = importlib.import_module("demask.shrink.strategies")
    real = module.own_class

    def planted(*args: Any) -> nn.Module:
        made = real(*args)
        made.model.layers[1].self_attn.layer_idx = 0
        return made

    model, ids = llama(0)
    monkeypatch.setattr(module, "own_class", planted)
    with pytest.raises(Mismatch, match="the network computes something else"):
        demask.demask(model, (), {"input_ids": ids})
    with strict(False):
        slim: Any = demask.demask(model, (), {"input_ids": ids})
    assert any(isinstance(part, fx.GraphModule) for part in slim.modules())


ZEROS = pytest.mark.filterwarnings("ignore:save_pretrained writes sizes:UserWarning")


@ZEROS
@pytest.mark.nightly
def test_zeros_are_written_where_no_config_describes_the_sizes(tmp_path: Path) -> None:
    model, ids = llama(8)
    slim: Any = demask.demask(model, (), {"input_ids": ids})
    assert torch.equal(slim.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))
    again = saved_and_read(slim, tmp_path / "written")
    assert again.config.intermediate_size == 48  # the second layer has 40
    assert torch.equal(again(ids).logits, slim(ids).logits)
    assert slim.model.layers[1].mlp.down_proj.weight.shape == (32, 40)
    demask.save(slim, tmp_path / "slim.demask")
    loaded: Any = demask.load(tmp_path / "slim.demask", into=type(model)(model.config))
    assert torch.equal(loaded(ids).logits, slim(ids).logits)
    again = saved_and_read(loaded, tmp_path / "loaded")
    assert torch.equal(again(ids).logits, slim(ids).logits)
    with torch.no_grad():  # as many units as the second layer has left
        slim.model.layers[0].mlp.down_proj.weight[:, :8] = 0
    even: Any = demask.demask(slim, (), {"input_ids": ids})
    even.save_pretrained(tmp_path / "folder")
    again = type(model).from_pretrained(tmp_path / "folder")
    torch.testing.assert_close(again(ids).logits, even(ids).logits)


@pytest.mark.nightly  # by day three rounds of smaller networks, in tests/shrink/training
def test_three_rounds_of_an_encoder() -> None:
    transformers = architectures.transformers()
    config = transformers.BertConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=50,
        max_position_embeddings=7,
    )
    torch.manual_seed(0)
    net = transformers.BertForSequenceClassification(config)
    ids = torch.arange(14).reshape(2, 7)
    rounds(net, (ids,), lambda n: [(layer.intermediate.dense,) for layer in n.bert.encoder.layer])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the libraries, on each other
def test_an_adapter_is_trained_on_a_slim_language_model() -> None:
    peft = pytest.importorskip("peft")
    _, ids, shared = demasked_llama()
    slim = copy.deepcopy(shared)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(slim, config)
    optimizer = torch.optim.Adam((p for p in tuned.parameters() if p.requires_grad), 1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = tuned(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    merged = demask.demask(tuned.merge_and_unload().eval(), (), {"input_ids": ids})
    assert sum(p.numel() for p in merged.parameters()) <= sum(p.numel() for p in slim.parameters())


def saved_and_read(slim: Any, folder: Path, **options: Any) -> Any:
    """What transformers reads from what the network writes: no tensor is missing or new."""
    slim.save_pretrained(folder, **options)
    again, found = type(slim).from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    return again.eval()


def test_a_dead_layer_and_units_by_modules_are_saved(tmp_path: Path) -> None:
    model, ids = llama(0, num_hidden_layers=3)
    dead = model.model.layers[1]
    with torch.no_grad():
        dead.self_attn.o_proj.weight.zero_()
        dead.mlp.down_proj.weight.zero_()
    for modules in (None, "auto"):
        slim: Any = demask.demask(model, (), {"input_ids": ids}, modules=modules)
        assert (len(slim.model.layers), slim.config.num_hidden_layers) == (2, 2)
        assert torch.equal(slim.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))
        again = saved_and_read(slim, tmp_path / str(modules))
        assert again.config.intermediate_size == 48
        torch.testing.assert_close(again(ids).logits, model(ids).logits)


def test_a_config_that_derives_the_width_of_heads_says_it(tmp_path: Path) -> None:
    transformers = architectures.transformers()
    sizes: Any = {
        "vocab_size": 60,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**sizes, num_attention_heads=8)
    model: Any = transformers.Qwen2ForCausalLM(config).eval()
    ids = torch.randint(3, 50, (2, 6))
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data[:, :32] = 0
    slim: Any = demask.demask(model, (), {"input_ids": ids})
    again = saved_and_read(slim, tmp_path / "half")
    assert (again.config.num_attention_heads, again.config.head_dim) == (4, 8)
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


@ZEROS
def test_a_config_that_its_own_class_refuses_is_not_written(tmp_path: Path) -> None:
    model, ids = llama(0, hidden_size=64, num_attention_heads=8, num_key_value_heads=4)
    with torch.no_grad():  # six heads are left, which do not divide 64
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:, :16] = 0
    slim: Any = demask.demask(model, (), {"input_ids": ids})
    torch.testing.assert_close(slim(ids).logits, model(ids).logits)
    again = saved_and_read(slim, tmp_path / "eight")
    assert again.config.num_attention_heads == 8
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    rows = slim.model.layers[0].self_attn.q_proj.weight.data[:8].clone()
    slim.model.layers[0].self_attn.q_proj.weight = nn.Parameter(rows)
    refuse(slim, tmp_path / "eight", "q_proj.weight is")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def refuse(slim: Any, folder: Path, why: str, **options: Any) -> None:
    """Nothing is written, and what was in the folder stays."""
    before = files_of(folder)
    with pytest.raises(demask.BadInput, match=rf"{why}.*demask\.save"):
        slim.save_pretrained(folder, **options)
    assert files_of(folder) == before


def test_what_is_saved_is_checked_after_later_changes(tmp_path: Path) -> None:
    _, ids, shared = demasked_llama()
    (tmp_path / "tokenizer.json").write_text("{}")
    for options in ({}, {"max_shard_size": "4KB"}, {"state_dict": shared.state_dict()}):
        folder = tmp_path / str(len(options)) / next(iter(options), "")
        again = saved_and_read(pickle.loads(pickle.dumps(shared)), folder, **options)
        assert torch.equal(again(ids).logits, shared(ids).logits)
    shared.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    larger = copy.deepcopy(shared)
    larger.resize_token_embeddings(70, mean_resizing=False)
    again = saved_and_read(larger, tmp_path / "larger")
    assert torch.equal(again(ids).logits, larger(ids).logits)

    state = shared.state_dict()
    del state["model.norm.weight"]
    refuse(shared, tmp_path, "model.norm.weight is missing", state_dict=state)
    changed = copy.deepcopy(shared)
    prune.l1_unstructured(changed.model.layers[0].mlp.up_proj, "weight", 2)
    refuse(changed, tmp_path, "its config has no model.layers.0.mlp.up_proj.weight_orig")
    refuse(changed.model, tmp_path, "its config has no layers.0.mlp.up_proj.weight_orig")
    changed = copy.deepcopy(shared)
    changed.model.layers[1].mlp = fx.symbolic_trace(changed.model.layers[1].mlp)
    refuse(changed, tmp_path, "model.layers.1.mlp is a graph")
    changed = copy.deepcopy(shared)
    changed.lm_head.weight = changed.model.embed_tokens.weight
    refuse(changed, tmp_path, "which its config does not say")
    changed.config.tie_word_embeddings = True
    saved_and_read(changed, tmp_path / "tied")
    changed.lm_head.weight = nn.Parameter(torch.zeros_like(changed.lm_head.weight))
    refuse(changed, tmp_path, "its config ties")
    changed = copy.deepcopy(shared)
    changed.config.num_attention_heads = 3  # which do not divide the width
    refuse(changed, tmp_path, "its class refuses the config")
    changed = copy.deepcopy(shared)
    changed.model.rotary_emb.inv_freq = torch.ones(3)
    refuse(changed, tmp_path, "inv_freq is .3")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the libraries, on each other
def test_adapters_are_saved_alone(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", minversion="0.22")  # what transformers asks for
    slim = copy.deepcopy(demasked_llama()[2])
    slim.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    slim.save_pretrained(tmp_path)
    assert "adapter_model.safetensors" in files_of(tmp_path)
    assert "config.json" not in files_of(tmp_path)


@pytest.mark.nightly
def test_a_graph_is_not_saved_as_a_model(tmp_path: Path) -> None:
    model, ids = llama(0)
    slim: Any = demask.demask(model, (), {"input_ids": ids}, result="graph")
    refuse(slim, tmp_path, "it is a graph")


def fitted(cut: Any, **sizes: Any) -> Any:
    """The config that fits a model with cut tensors, of a config that still has these sizes; None
    if there is none."""
    for name, value in sizes.items():
        *holders, leaf = name.split("__")
        setattr(functools.reduce(getattr, holders, cut.config), leaf, value)
    return next((cut.config for _ in fitting_configs(cut)), None)


def test_a_scale_that_a_config_derives_otherwise_is_not_saved() -> None:
    """Heads of 5 that were cut from 8 keep the scale of 8, which a config with 5 does not say."""
    transformers = architectures.transformers()
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=8,
        image_size=8,
        patch_size=8,
        head_dim=5,
    )
    model: Any = transformers.ViTModel(config)
    assert fitted(copy.deepcopy(model), head_dim=8).head_dim == 5
    model.layers[0].attention.scaling = 8**-0.5
    assert fitted(model, head_dim=8) is None


def test_configs_within_configs_and_lists_of_sizes_follow() -> None:
    transformers = architectures.transformers()
    sizes: Any = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = sizes | {"intermediate_size": 24, "vocab_size": 20, "max_position_embeddings": 8}
    image = sizes | {"intermediate_size": 40, "image_size": 8, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=12)
    both = transformers.CLIPModel(config)
    shared = both.text_model.config
    config = fitted(both, text_config__intermediate_size=48, vision_config__intermediate_size=48)
    assert config.text_config is shared and shared.intermediate_size == 24
    assert config.vision_config.intermediate_size == 40
    config = transformers.ConvNextConfig(hidden_sizes=[6, 10, 12, 14], depths=[1] * 4)
    stages = transformers.ConvNextModel(config)
    assert fitted(stages, hidden_sizes=[8, 10, 16, 14]).hidden_sizes == [6, 10, 12, 14]
