"""A file gives back the class of the network that was saved, where it has what that is built of."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import architectures
import demask


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(8, 4, 3), nn.GELU()),
        nn.Flatten(),
        nn.Linear(4 * 16, 3),
    ).eval()
    net[0].weight.data[:5], net[0].bias.data[:5] = 0, 0
    return net


X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def test_layers_of_torch_come_back_and_are_saved_again(tmp_path: Path) -> None:
    net = convolutions()
    slim: Any = demask.demask(net, (X,))
    slim[3][0].bias.requires_grad_(False)
    demask.save(slim, tmp_path / "a")
    again: Any = demask.load(tmp_path / "a")
    assert type(again) is nn.Sequential and type(again[3]) is nn.Sequential
    assert str(again) == str(slim) and again[0].out_channels == slim[0].out_channels < 8
    assert torch.equal(again(X), slim(X)) and not again.training
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in slim.parameters()]
    demask.save(again, tmp_path / "b")
    assert torch.equal(demask.load(tmp_path / "b")(X), slim(X))
    assert demask.verify(net, again, (X,)).ok


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = convolutions()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_another_class_is_named(tmp_path: Path) -> None:
    net = Own().eval()
    slim = demask.demask(net, (X,))
    demask.save(slim, tmp_path / "own")
    with pytest.warns(UserWarning, match=r"pass into=Own\(\.\.\.\)"):
        graph = demask.load(tmp_path / "own")
    assert isinstance(graph, fx.GraphModule) and torch.allclose(graph(X), slim(X), atol=1e-6)
    loaded = demask.load(tmp_path / "own", into=Own())
    assert type(loaded) is Own and torch.equal(loaded(X), slim(X))
    demask.save(loaded, tmp_path / "again")
    assert type(demask.load(tmp_path / "again", into=Own())) is Own


def test_a_model_of_transformers_comes_back_from_its_config(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    hub = architectures.transformers()
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 20,
    }
    net: Any = hub.BertForSequenceClassification(hub.BertConfig(**sizes)).eval()
    dense = net.bert.encoder.layer[0].intermediate.dense
    dense.weight.data[:10], dense.bias.data[:10] = 0, 0
    ids = torch.randint(0, 50, (2, 7))
    slim = demask.demask(net, (), {"input_ids": ids})
    demask.save(slim, tmp_path / "bert")
    again: Any = demask.load(tmp_path / "bert")
    assert type(again) is type(net) and again.config.intermediate_size == 14
    other = torch.randint(0, 50, (3, 11))  # a length that the example had not
    torch.testing.assert_close(again(input_ids=other).logits, net(input_ids=other).logits)
    again.save_pretrained(tmp_path / "folder")
    again.bert.pooler.dense = torch.nn.Linear(16, 8)
    with pytest.raises(demask.BadInput, match=r"pooler.dense.weight is .8, 16"):
        again.save_pretrained(tmp_path / "folder")
    into = demask.load(tmp_path / "bert", into=type(net)(net.config)).eval()
    torch.testing.assert_close(into(input_ids=other).logits, net(input_ids=other).logits)


BERT = "transformers.models.bert.modeling_bert"


@pytest.mark.parametrize(
    "own",
    [
        {"class": "os.system", "config": {}},
        {"class": f"{BERT}.nn", "config": {}},
        {"class": f"{BERT}.BertModel", "config": {"num_hidden_layers": 10**9}},
        {"class": f"{BERT}.BertModel", "config": {"vocab_size": 10**13}},
        {"class": "transformers.models.no.modeling_no.No", "config": {}},
        {"class": "torch.nn.Sequential"},
        [],
        3,
        {"class": 3},
    ],
)
def test_of_a_class_that_cannot_be_built_a_graph_is_left(own: Any, tmp_path: Path) -> None:
    path = written(own, tmp_path)
    with pytest.warns(UserWarning, match="returns a graph"):
        assert isinstance(demask.load(path), fx.GraphModule)


@pytest.mark.parametrize(
    "layers",
    [
        {"type": "Module"},
        {"type": "Linear", "in_features": 10**15, "out_features": "x"},
        [],
        None,
        {"type": "Sequential", "layers": 3},
        {"type": "Sequential", "layers": [["a.b", {"type": "ReLU"}]]},
        {"type": "Sequential", "layers": [[1, {"type": "ReLU"}]]},
    ],
)
def test_layers_that_are_none_are_refused(layers: Any, tmp_path: Path) -> None:
    path = written({"class": "torch.nn.Sequential", "layers": layers}, tmp_path)
    with pytest.raises(demask.RefusedFile, match="none of torch"):
        demask.load(path)


def written(own: Any, folder: Path) -> Path:
    """A file of a network whose class is said to be `own`."""
    demask.save(demask.demask(convolutions(), (X,)), folder / "net")
    with zipfile.ZipFile(folder / "net") as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    document = json.loads(entries["graph.json"])
    document["own"] = own
    with zipfile.ZipFile(folder / "other", "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("graph.json", json.dumps(document))
        archive.writestr("tensors.safetensors", entries["tensors.safetensors"])
    return folder / "other"
