"""`prune.checkpoint`: folders masked one module at a time, as `Pruner` masks the loaded model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from demask import checkpoint, prune
from demask.errors import BadInput
from masked_folders import LLAMA, TEXT, build, load, tensors, write

IDS = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(0))


def llama():
    return build("LlamaForCausalLM", "llama", **{**LLAMA, "num_hidden_layers": 4})


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize(
    ("structure", "score"),
    [("unit", prune.L1()), ("head", prune.Activation()), ("unit", prune.Fluctuation(compensation=False))],
    ids=["magnitude", "activation", "fluctuation"],
)
def test_scores_and_masks_are_those_of_a_pruner(tmp_path, structure, score):
    source = write(llama(), tmp_path / "in")
    masked = prune.checkpoint(source, tmp_path / "out", IDS, score=score, structure=structure)
    model = load(llama(), source)
    pruner = prune.Pruner(model, {"input_ids": IDS, "use_cache": False}, score=score, structure=structure)
    model(input_ids=IDS)
    expected = pruner.scores()
    assert expected.keys() == masked.scores.keys()
    for name, scores in expected.items():
        torch.testing.assert_close(masked.scores[name], scores, rtol=1e-6, atol=0)
    pruner.step(0.5)
    pruner.remove()
    assert_equal(tensors(tmp_path / "out"), dict(model.named_parameters()))
    assert checkpoint.slim(tmp_path / "out", tmp_path / "slim", multiple=1, check=False).removed > 0


@pytest.mark.parametrize("structure", ["unit", "layer"])
def test_experts_in_one_tensor_and_in_several(tmp_path, structure):
    """Mixtral's folders have a tensor per expert and matrix, its model one for all."""
    sizes = {"intermediate_size": 24, "num_hidden_layers": 2, "num_key_value_heads": 2}

    def mixtral():
        return build("MixtralForCausalLM", "mixtral", **TEXT, **sizes, num_local_experts=2)

    source = write(mixtral(), tmp_path / "in")
    masked = prune.checkpoint(source, tmp_path / "out", IDS, structure=structure)
    if structure == "layer":
        report = checkpoint.slim(tmp_path / "out", tmp_path / "slim", check=False)
        assert report.layers == {"model.layers": (2, 1)}
        return
    model = load(mixtral(), source)
    pruner = prune.Pruner(model, {"input_ids": IDS, "use_cache": False}, structure="unit")
    expected = pruner.scores()
    assert expected.keys() == masked.scores.keys() and len(expected) == 2
    for name, scores in expected.items():
        torch.testing.assert_close(masked.scores[name], scores, rtol=1e-6, atol=0)
    pruner.step(0.5)
    pruner.remove()
    again = dict(load(mixtral(), tmp_path / "out").named_parameters())
    assert_equal(again, dict(model.named_parameters()))
    report = checkpoint.slim(tmp_path / "out", tmp_path / "slim", multiple=1, check=False)
    assert [row.written for row in report.slices if row.kind == "unit"] == [16]  # 12, in eights


def test_layers_that_change_least_return_their_inputs(tmp_path):
    source = write(llama(), tmp_path / "in")
    model, inputs = load(llama(), source), []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, args, out: inputs.append((args[0], out)))
    model(input_ids=IDS)
    changes = torch.stack(
        [1 - torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1).mean() for a, b in inputs]
    )
    masked = prune.checkpoint(source, tmp_path / "out", IDS, structure="layer", amount=0.25)
    torch.testing.assert_close(masked.scores["model.layers"], changes, rtol=1e-6, atol=1e-9)
    assert masked.removed["model.layers"].tolist() == [int(changes.argmin())]
    report = checkpoint.slim(tmp_path / "out", tmp_path / "slim", check=False)
    before, after = report.layers["model.layers"]
    assert after == before - 1


def test_unfinished_folder_of_other_masks_is_not_continued(tmp_path, monkeypatch):
    source, out = write(llama(), tmp_path / "in"), tmp_path / "out"

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # all tensors are written by then
        patch.setattr("demask.checkpoint.mask.shutil.copyfile", fail)
        with pytest.raises(KeyboardInterrupt):
            prune.checkpoint(source, out, IDS, score=prune.Activation())
    other = IDS.flip(0) // 3 + 3
    prune.checkpoint(source, out, other, score=prune.Activation())
    prune.checkpoint(source, tmp_path / "new", other, score=prune.Activation())
    assert_equal(tensors(out), tensors(tmp_path / "new"))


def test_what_cannot_be_masked_is_refused(tmp_path):
    source, out = write(llama(), tmp_path / "in"), tmp_path / "out"
    for options, words in (
        ({"structure": "channel"}, "expected a structure"),
        ({"score": prune.Activation()}, "expected a text"),
        ({"text": torch.ones(3)}, "expected token ids"),
        ({"text": IDS, "score": prune.Fluctuation()}, "has none"),
    ):
        with pytest.raises(BadInput, match=words):
            prune.checkpoint(source, out, **options)
    assert not out.exists() and not Path(f"{out}.partial").exists()


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
