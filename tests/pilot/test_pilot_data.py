"""Execution data: magnitudes by hand, whole and slice by slice, stored, printed, drawn."""

import re
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import demask
from demask.errors import BadInput
from demask.exec.call_groups import walk
from demask.files.weight_file import WeightFile
from demask.pilot import ExecutionData, collect, simplify
from pilot_networks import Residual, networks


@pytest.fixture(scope="module")
def residual():
    return networks()["residual"]


def same(a, b, **tolerance):
    assert list(a.magnitudes) == list(b.magnitudes)
    for name, found in a.magnitudes.items():
        torch.testing.assert_close(found, b.magnitudes[name], **tolerance)


# -- magnitudes ------------------------------------------------------------------------------------


@torch.no_grad()
def by_hand(model, x):
    """What the readers of each layer of Residual see."""
    stem = F.relu(model.bn(model.stem(x)))
    a = F.relu(model.bna(model.a(stem)))
    b = F.relu(stem + model.bnb(model.b(a)))
    return {"stem": stem, "a": a, "b": b, "head": model.head(b.mean((2, 3)))}


@pytest.mark.parametrize("measure", ["mean", "max"])
def test_a_channel_is_measured_behind_its_norm_and_activation(residual, measure):
    model, args = residual
    data = collect(model, args, measure=measure)
    assert data.source == "live input, 3 inputs" and data.per == "channel"
    values = by_hand(model, *args)
    assert list(data.magnitudes) == list(values)
    for name, value in values.items():
        flat = value.abs().flatten(2) if value.ndim > 2 else value.abs().unsqueeze(2)
        expected = flat.amax(2) if measure == "max" else flat.mean(2)
        torch.testing.assert_close(data.magnitudes[name], expected)
    torch.testing.assert_close(data.priorities("a"), data.magnitudes["a"].mean(0))


@pytest.mark.parametrize("outputs", [4, 64, 200])
def test_contributions_are_changes_of_the_outputs(outputs):
    """Exact in a network that is linear in the channel; of many outputs estimated, to a fifth here."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(6 * 16, outputs)).eval()
    x = torch.randn(5, 2, 6, 6)
    data = collect(model, (x,), measure="contribution")
    assert data.measure == "contribution" and str(data).splitlines()[-1].startswith("contribution per channel")
    for channel in range(6):
        ablated = model[:2](x).detach()
        ablated[:, channel] = 0
        change = (model[2:](ablated) - model(x)).norm(dim=1)
        tolerance = 1e-5 if outputs <= 64 else 0.35
        torch.testing.assert_close(data.magnitudes["0"][:, channel], change, rtol=tolerance, atol=1e-6)
    exact = outputs <= 64
    torch.testing.assert_close(
        data.magnitudes["3"], model(x).abs(), rtol=1e-5 if exact else 1, atol=1e-6 if exact else 1
    )


def test_contributions_of_tiles_tokens_and_heads(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(2 * 5 * 7, 3)).eval()
    x = torch.randn(2, 1, 5, 7)
    data = collect(model, (x,), per="tile:4", measure="contribution")
    assert data.grids["0"] == (2, 2)
    values = model[0](x).detach()
    for k, (rows, columns) in enumerate([(slice(0, 4), slice(0, 4)), (slice(4, 5), slice(4, 7))]):
        ablated = values.clone()
        ablated[:, :, rows, columns] = 0
        change = (model[1:](ablated) - model(x)).norm(dim=1)
        torch.testing.assert_close(data.magnitudes["0"][:, 3 * k], change)
    data.save(tmp_path / "data.safetensors")
    back = ExecutionData.load(tmp_path / "data.safetensors")
    assert back.measure == "contribution" and torch.equal(back.priorities("0"), data.priorities("0"))


def test_what_contributes_nothing_and_what_cannot():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.used, self.unused = nn.Embedding(9, 4), nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            y = self.words(x)
            return self.used(y).relu().sum(1), self.unused(y).argmax(-1)

    torch.manual_seed(0)
    model, x = Net().eval(), torch.randint(0, 9, (4, 6))
    data = collect(model, (x,), measure="contribution")
    assert data.magnitudes["unused"].abs().max() == 0 < data.magnitudes["used"].min(0).values.max()
    with pytest.raises(BadInput, match="leave memory and weights out"):
        collect(model, (x,), measure="contribution", memory="1MiB")
    with pytest.raises(BadInput, match="the network has none"):
        collect(nn.Sequential(nn.Linear(2, 2), Argmax()), (torch.ones(1, 2),), measure="contribution")


class Argmax(nn.Module):
    def forward(self, x):
        return x.argmax(-1)


def test_units_are_those_of_linear_layers(residual):
    assert list(collect(*residual, per="unit").magnitudes) == ["head"]


def test_tiles_are_means_over_channels_and_positions(residual):
    model, args = residual
    data = collect(model, args, per="tile:5")
    for name in ("stem", "b"):
        maps = by_hand(model, *args)[name].abs().mean(1)
        assert data.grids[name] == (4, 4) and data.magnitudes[name].shape == (3, 16)
        for k, (row, column) in ((0, (0, 0)), (6, (5, 10)), (15, (15, 15))):
            part = maps[:, row : row + 5, column : column + 5].mean((1, 2))
            torch.testing.assert_close(data.magnitudes[name][:, k], part)
    assert "head" not in data.magnitudes


def test_tokens_and_heads():
    model, args = networks()["tokens"]
    tokens = collect(model, args, per="token")
    assert tokens.magnitudes["layer.linear1"].shape == (3, 17)
    seen = {}
    model.layer.linear1.register_forward_hook(lambda m, i, out: seen.update(linear1=out))
    model(*args)  # with gradients: without, torch fuses the layer
    expected = F.relu(seen["linear1"].detach()).abs().mean(2)
    torch.testing.assert_close(tokens.magnitudes["layer.linear1"], expected)
    heads = collect(model, args, per="head")
    assert {name: tuple(m.shape) for name, m in heads.magnitudes.items()} == {"layer.self_attn": (3, 3)}


def test_heads_by_hand_and_spelled_out():
    class Spelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x):
            q, k, v = (t.unflatten(2, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, 2))
            mixed = torch.softmax(q @ k.transpose(2, 3) / 2, -1) @ v
            self.mixed = mixed.detach()
            return self.out(mixed.transpose(1, 2).flatten(2))

    model, x = Spelled().eval(), torch.randn(3, 5, 8)
    data = collect(model, (x,), per="head")
    model(x)
    (found,) = data.magnitudes.values()
    torch.testing.assert_close(found, model.mixed.abs().mean((2, 3)))


def test_what_was_cut_away_counts_as_zero(residual):
    model, args = residual
    slim = simplify(model, args, by="channels:0.5")
    data, full = collect(slim, args), collect(model, args)
    assert {n: m.shape for n, m in data.magnitudes.items()} == {n: m.shape for n, m in full.magnitudes.items()}
    kept = slim.demasked.cuts["a.weight"].kept[0]
    gone = [k for k in range(8) if k not in kept]
    assert not data.magnitudes["a"][:, gone].any() and data.magnitudes["a"][:, list(kept)].any()


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"per": "layer"}, "expected parts per channel"),
        ({"per": "tile:0"}, "expected parts per channel"),
        ({"per": "head"}, "has no heads"),
        ({"measure": "sum"}, "measure of mean, max"),
        ({"memory": 100}, "weights of the largest layer"),
        ({"weights": "none.safetensors", "memory": "1MB"}, "cannot be read"),
    ],
)
def test_what_is_refused(residual, more, complaint):
    with pytest.raises(BadInput, match=complaint):
        collect(*residual, **more)


def test_inputs_that_do_not_fit_are_refused(residual):
    model, args = residual
    with pytest.raises(BadInput, match="expected a tuple of arguments"):
        collect(model, [args[0]])
    with pytest.raises(BadInput, match=r"expected torch.float32 \['any', 3, 16, 16\]"):
        collect(model, [args, (torch.randn(2, 3, 8, 8),)])
    with pytest.raises(BadInput, match="one input or more"):
        collect(model, [])


# -- slice by slice --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(residual, tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    model, args = residual
    save_file(dict(model.state_dict()), folder / "model.safetensors")
    demask.save(demask.demask(model, args), folder / "model.demask")
    return folder


BUDGET = 2000  # bytes; the largest layer has 6 · 8 · 9 · 4 = 1728, all of them 4.6 kB


def calls(args):
    return [(args[0][:1],), (args[0][1:],)]


@pytest.mark.parametrize("kind", ["memory", "safetensors", "demask"])
def test_slices_give_the_same_data(residual, stored, kind):
    model, args = residual
    expected = collect(model, calls(args))
    if kind == "memory":
        found = collect(model, calls(args), memory=BUDGET)
    elif kind == "safetensors":
        empty = Residual().to("meta").eval()
        path = stored / "model.safetensors"
        found = collect(empty, calls(args), memory=BUDGET, weights=path)
    else:
        found = collect(stored / "model.demask", calls(args), memory=BUDGET)
    same(found, expected)
    assert found.slices > 2 and 1728 <= found.held <= BUDGET
    assert expected.slices == 1 and expected.held > BUDGET


def test_weights_read_are_gone_when_the_next_ones_come(residual, stored, monkeypatch):
    """The bytes of all tensors read from the file that are alive at a time."""
    alive, most = {}, []
    plain = WeightFile.tensor

    def counted(self, entry):
        made = plain(self, entry)
        key = len(most)
        alive[key] = made.nbytes
        # torch keeps a storage's object as long as the storage, which views share.
        weakref.finalize(made.untyped_storage(), alive.pop, key)
        most.append(sum(alive.values()))
        return made

    monkeypatch.setattr(WeightFile, "tensor", counted)
    data = collect(stored / "model.demask", calls(residual[1]), memory=BUDGET)
    assert max(most) <= data.held <= BUDGET and sum(alive.values()) == 0
    assert len(most) >= 12  # each tensor, of layers and norms


def test_values_between_slices_go_to_disk(residual, monkeypatch):
    model, args = residual
    runs = []
    module = sys.modules["demask.pilot.data.collect"]
    monkeypatch.setattr(module, "walk", lambda *a, **k: runs.append(walk(*a, **k)) or runs[-1])
    found = collect(model, calls(args), memory=BUDGET)
    assert runs[0].spilled == 2 and runs[0].boundary_bytes <= BUDGET
    same(found, collect(model, calls(args)))
    assert runs[1].spilled == 0


def test_a_file_that_does_not_fit_is_refused(stored, tmp_path):
    path = stored / "model.safetensors"
    with pytest.raises(BadInput, match=re.escape("'stem.weight' to be (7, 3, 3, 3)")):
        collect(Residual(7).eval(), (torch.randn(1, 3, 16, 16),), memory="1MB", weights=path)
    save_file({"stem.weight": torch.zeros(6, 3, 3, 3)}, tmp_path / "part.safetensors")
    with pytest.raises(BadInput, match="on the meta device only"):
        collect(
            Residual().to("meta").eval(),
            (torch.randn(1, 3, 16, 16),),
            memory="1MB",
            weights=tmp_path / "part.safetensors",
        )
    with pytest.raises(BadInput, match="read in full"):
        collect(tmp_path / "model.pt2", (torch.randn(1, 3, 16, 16),), memory="1MB")


def test_a_damaged_archive_is_refused(stored, tmp_path):
    data = (stored / "model.demask").read_bytes()
    at = data.index(b'"dtype":"F32"')
    for planted in (data[: len(data) // 2], data[:at] + b'"dtype":"F99"' + data[at + 13 :]):
        (tmp_path / "bad.demask").write_bytes(planted)
        with pytest.raises(BadInput):
            collect(tmp_path / "bad.demask", (torch.randn(1, 3, 16, 16),), memory="1MB")


# -- stored, printed, drawn ------------------------------------------------------------------------


def test_data_comes_back_from_a_file(residual, tmp_path):
    data = collect(*residual, per="tile:4", source="earlier frame")
    data.save(tmp_path / "data.safetensors")
    again = ExecutionData.load(tmp_path / "data.safetensors")
    same(again, data, rtol=0, atol=0)
    assert again.grids == data.grids and again.source == "earlier frame, 3 inputs"
    assert str(again) == str(data)
    assert "stem" in str(data) and "earlier frame, 3 inputs" in str(data)


def test_files_that_are_something_else_are_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(BadInput, match="expected execution data that demask wrote"):
        ExecutionData.load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(BadInput, match="expected execution data in safetensors"):
        ExecutionData.load(path)
    with pytest.raises(BadInput, match="expected float32"):
        ExecutionData("channel", {"a": torch.zeros(2, 2, 2)}, "nothing")


@pytest.mark.parametrize("per", ["channel", "tile:4"])
def test_it_is_drawn(residual, tmp_path, per):
    image = pytest.importorskip("matplotlib.image")
    collect(*residual, per=per).plot(tmp_path / "data.png")
    assert image.imread(tmp_path / "data.png").std() > 0.05
    with pytest.raises(BadInput, match=r"ends in \.svg"):
        collect(*residual, per=per).plot(tmp_path / "data.txt")


def test_priorities_of_a_layer_that_is_not_there(residual):
    with pytest.raises(BadInput, match=r"no magnitudes of 'x'; there are of stem, a, b, head"):
        collect(*residual).priorities("x")
