"""Optimized networks in files: what comes back is as it was, and what does not fit is refused
before oneDNN, which checks little, sees it."""

import contextlib
import copy
import json
import pickle
import zipfile

import pytest
import torch
from torch import nn

import demask
from demask.compat.onednn import available
from demask.errors import DemaskError
from demask.files.archive import GRAPH, TENSORS
from demask.graph.result.demasked_module import Demasked, build
from demask.ops import TABLE
from demask.rewrites.driver import rewrite
from demask.shrink.pipeline import capture_program, shrink_program
from demask.tune.channels_last import convert_layouts
from demask.tune.fold_affine import FOLD
from demask.tune.fuse_epilogues import fuse_epilogues
from demask.tune.join_as_sum import rewrite_joins
from demask.tune.optimized_module import Optimized

pytestmark = pytest.mark.skipif(not available(torch.float32, torch.device("cpu")), reason="this torch has no oneDNN")


class Net(nn.Module):
    """Two layers that meet, one that pads constants, one that is linear."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        x = self.c(torch.relu(self.norm(self.a(x)) + self.b(x)))
        return nn.functional.gelu(self.fc(x.mean((2, 3))))


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    model = Net().eval()
    with torch.no_grad():
        model.a.weight[:4] = model.a.bias[:4] = 0
        model.b.weight[3:6] = model.b.bias[3:6] = 0
        model.norm.bias[0] = 0.5
    x = torch.randn(2, 3, 8, 8)
    program, provenance = shrink_program(capture_program(model, (x,), None, None), TABLE)
    program = fuse_epilogues(rewrite_joins(rewrite(program, FOLD), TABLE), lambda *_: True)
    return model, build(convert_layouts(program, TABLE, lambda _: True), provenance, Optimized), x


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_a_file_gives_back_the_form_and_its_code(network, tmp_path):
    model, fast, x = network
    demask.save(fast, tmp_path / "fast.demask")
    loaded = demask.load(tmp_path / "fast.demask")
    assert isinstance(loaded, Optimized)
    assert loaded.code == fast.code and "_convolution_pointwise_" in loaded.code
    assert loaded.demasked == fast.demasked
    close(loaded(x), model(x))
    assert not fast.plans.known.keys() - {(x.shape,)}


@pytest.mark.parametrize("again", [copy.deepcopy, lambda fast: pickle.loads(pickle.dumps(fast))])
def test_copies_hold_no_plans_and_run_the_same_code(network, again):
    model, fast, x = network
    fast(x)
    other = again(fast)
    assert not other.plans.known and other.code == fast.code
    close(other(x), model(x))


def test_a_pt2_file_holds_plain_ops(network, tmp_path):
    model, fast, x = network
    demask.to_pt2(fast, tmp_path / "fast.pt2")
    exported = torch.export.load(tmp_path / "fast.pt2")
    assert not [n for n in exported.graph.nodes if "mkldnn" in str(n.target)]
    close(exported.module()(x), model(x))


def test_it_is_verified_and_demasked_again(network):
    model, fast, x = network
    assert demask.verify(model, fast, (x,)).ok
    close(demask.demask(fast, (x,))(x), model(x))


def test_another_dtype_goes_on_in_plain_ops(network):
    model, fast, x = network
    double = copy.deepcopy(fast).double()
    assert "mkldnn" not in double.code
    expected = copy.deepcopy(model).double()(x.double())
    torch.testing.assert_close(double(x.double()), expected, atol=1e-6, rtol=1e-6)


def edited(path, edit):
    """The archive at `path` with its graph edited."""
    with zipfile.ZipFile(path) as archive:
        document = json.loads(archive.read(GRAPH))
        tensors = archive.read(TENSORS)
    edit(document)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(GRAPH, json.dumps(document))
        archive.writestr(TENSORS, tensors)


def calls(document, name):
    return [row for row in document["nodes"] if name in row["target"]]


def not_optimized(document):
    document["optimized"] = False


def geometry(document):
    calls(document, "_convolution_pointwise")[-1]["args"][-9] = [7, 7]  # the padding


def fewer_groups(document):
    for row in calls(document, "_convolution_pointwise"):
        row["args"] = [3 if a == 1 and type(a) is int else a for a in row["args"]]


def another_weight(document):
    first, *_, last = calls(document, "_reorder_convolution_weight")
    first["args"][0], last["args"][0] = last["args"][0], first["args"][0]


def another_addend(document):
    row = calls(document, "_convolution_pointwise.binary")[0]
    row["args"][1] = row["args"][0]


def odd_activation(document):
    row = calls(document, "_linear_pointwise")[0]
    row["args"] = ["no such" if a == "gelu" else a for a in row["args"]]


def odd_value(document):
    document["nodes"][-2]["value"] = ["float32", [[1]], "cpu"]


def other_op(document):
    calls(document, "_linear_pointwise")[0]["target"] = "mkldnn.data_ptr.default"


@pytest.mark.parametrize(
    "edit", [not_optimized, geometry, fewer_groups, another_weight, another_addend, odd_activation, odd_value, other_op]
)
def test_what_does_not_fit_is_refused(network, tmp_path, edit):
    _, fast, x = network
    path = tmp_path / "fast.demask"
    demask.save(fast, path)
    edited(path, edit)
    with pytest.raises((DemaskError, RuntimeError, ValueError)):
        demask.load(path)(x)


def test_what_files_say_of_values_cannot_make_a_call_write_elsewhere(network, tmp_path):
    """Claims that all values are alike make more calls write in place; the answer stays."""
    model, fast, x = network
    path = tmp_path / "fast.demask"
    demask.save(fast, path)

    def lie(document):
        for row in document["nodes"]:
            row["value"] = ["float32", ["s0", 4], "cpu"]

    edited(path, lie)
    with contextlib.suppress(RuntimeError):  # shapes that do not fit are torch's to refuse
        close(demask.load(path)(x), model(x))


def test_old_files_are_read(network, tmp_path):
    """Files written before there were optimized networks do not say which they are."""
    model, _, x = network
    slim, path = demask.demask(model, (x,)), tmp_path / "slim.demask"
    demask.save(slim, path)
    edited(path, lambda document: document.pop("optimized"))
    loaded = demask.load(path)
    assert type(loaded).graph_module() is Demasked
    close(loaded(x), model(x))


def test_a_torch_without_onednn_runs_the_plain_ops(network, tmp_path, monkeypatch):
    model, fast, x = network
    demask.save(fast, tmp_path / "fast.demask")
    monkeypatch.setattr("demask.files.archive.available", lambda *_: False)
    loaded = demask.load(tmp_path / "fast.demask")
    assert "mkldnn" not in loaded.code
    close(loaded(x), model(x))


def test_bytes_are_the_same_twice(network, tmp_path):
    _, fast, _ = network
    for name in ("one", "two"):
        demask.save(fast, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
