"""demask slim model.onnx: one file in, the file that runs fastest out, equal in ONNX Runtime."""

import importlib
import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from test_onnx_out import agree
from test_onnx_out import run as runtime
from torch import nn

import demask
from demask.errors import BadInput, Mismatch
from demask.failures import strict
from demask.files.onnx import check as checking
from demask.installation import install_command
from demask.machine import clock as timer
from demask.optimize_onnx import deploy
from test_cli import run  # noqa: F401  (a fixture)

deploying = importlib.import_module("demask.optimize_onnx")

SHARED = Path(__file__).parents[3] / "shared" / "data"
FACES = SHARED / "ultraface_rfb_320.onnx"


def network(norm_shift=0.5):
    """A depthwise stage and a join; half of each convolution's channels zero, shifts kept."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.stem_norm = nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24)
            self.deep = nn.Conv2d(24, 24, 3, padding=1, groups=24)
            self.deep_norm, self.point = nn.BatchNorm2d(24), nn.Conv2d(24, 24, 1)
            self.head = nn.Linear(24, 5)

        def forward(self, x):
            y = torch.relu(self.stem_norm(self.stem(x)))
            y = torch.relu(self.deep_norm(self.deep(y)))
            return self.head(torch.relu(self.point(y)).mean((2, 3)))

    net = Net().eval()
    with torch.no_grad():
        for conv, step in ((net.stem, 2), (net.deep, 3), (net.point, 2)):
            conv.weight[::step] = 0
            conv.bias[::step] = 0
        for norm in (net.stem_norm, net.deep_norm):
            norm.bias.fill_(norm_shift)
    return net


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """The network as an ONNX file with a dynamic batch."""
    path = tmp_path_factory.mktemp("given") / "model.onnx"
    demask.to_onnx(network(), path, (torch.randn(2, 3, 16, 16),))
    return path


@pytest.fixture
def fast(monkeypatch):
    """Timings that say what is fast: each form's bytes, so that tests need no quiet machine."""
    monkeypatch.setattr(deploying, "ROUNDS", 2)
    monkeypatch.setattr(deploying, "PAIRS", 4)

    def clock_of(seconds):
        def measured(calls, pairs, *_, **__):
            for call in calls.values():
                call()
            return {name: [seconds(name)] * pairs for name in calls}

        monkeypatch.setattr(timer, "race", measured)

    return clock_of


def width_of(path, name):
    return {t.name: tuple(t.dims) for t in onnx.load(path).graph.initializer}[name]


def same(a, b):
    for batch in (1, 3):
        x = torch.randn(batch, 3, 16, 16)
        agree(runtime(b, x), runtime(a, x))


def test_the_fastest_candidate_is_written(given, tmp_path, fast, monkeypatch):
    monkeypatch.setattr(deploying, "MULTIPLES", (4, 1))
    fast(lambda name: 0.5 if "of 4" in name and "computed" in name else 1.0)
    net = demask.from_onnx(given)
    made = deploy(lambda: net, (torch.randn(1, 3, 16, 16),), tmp_path / "slim.onnx", file=given)
    record = made.slim.demasked
    assert record.decisions[0].chosen == "widths in multiples of 4, constants computed"
    names = record.decisions[0].seconds  # the minimal widths are multiples of 4
    assert "minimal widths, constants computed" not in names
    assert (record.speed.ratio, record.speed.threads) == (2.0, torch.get_num_threads())
    assert made.error < 1e-5
    assert "2.00 x" in str(demask.report(made.slim))
    same(given, tmp_path / "slim.onnx")
    assert width_of(tmp_path / "slim.onnx", "point.weight") == (12, 16, 1, 1)


@pytest.mark.nightly
def test_where_nothing_is_faster_the_file_is_written_as_it_was(given, tmp_path, fast):
    fast(lambda name: 1.0 if name == "given" else 1.5)
    net = demask.from_onnx(given)
    made = deploy(lambda: net, (torch.randn(1, 3, 16, 16),), tmp_path / "slim.onnx", file=given)
    assert (tmp_path / "slim.onnx").read_bytes() == given.read_bytes()
    assert "as the network" not in made.slim.demasked.notes
    assert any("which is written, unchanged" in note for note in made.slim.demasked.notes)
    assert made.slim.demasked.after == made.slim.demasked.before


def exported_minimally(given, folder):
    """What --minimal writes, which has to be a new export; the result equals the original."""
    net, x = demask.from_onnx(given), (torch.randn(1, 3, 16, 16),)
    made = deploy(lambda: net, x, folder / "slim.onnx", file=given, minimal=True)
    same(given, folder / "slim.onnx")
    assert made.edited is None
    return made


def test_minimal_is_the_smallest_and_is_not_timed(given, tmp_path, monkeypatch):
    """A new export has border maps in place of channels, so its tensors are smaller."""
    monkeypatch.setattr(timer, "race", None)
    exported_minimally(given, tmp_path)
    slim = demask.demask(demask.from_onnx(given), (torch.randn(1, 3, 16, 16),))
    assert width_of(tmp_path / "slim.onnx", "stem.weight") == slim.get_parameter("stem.weight").shape


def test_the_file_is_edited_where_an_export_is_no_smaller(given, tmp_path, monkeypatch):
    monkeypatch.setattr(deploying, "NOISE", 100.0)
    net, x = demask.from_onnx(given), (torch.randn(1, 3, 16, 16),)
    made = deploy(lambda: net, x, tmp_path / "slim.onnx", file=given, minimal=True)
    same(given, tmp_path / "slim.onnx")
    assert width_of(tmp_path / "slim.onnx", "stem.weight") == (16, 3, 3, 3)  # 24 at first
    before, after = onnx.load(given), onnx.load(tmp_path / "slim.onnx")
    assert {node.name for node in before.graph.node} >= {node.name for node in after.graph.node}
    again = demask.from_onnx(tmp_path / "slim.onnx")
    numbers = sum(p.numel() for p in again.parameters())
    assert made.slim.demasked.after.parameters == numbers  # of this file, not of an export
    left = [sizes.parameters[1] for sizes in made.slim.demasked.modules.values()]
    assert sum(left) == numbers and made.slim.demasked.removed


@pytest.mark.parametrize("minimal", [True, False])
def test_an_export_passes_the_comparison_of_edits(given, tmp_path, fast, monkeypatch, minimal):
    """Each export is smaller and faster here, but differs on inputs that edits are compared on."""
    fast(lambda name: 1.0 if "edited" in name else 0.5 if "width" in name else 1.5)
    calls, real = [], checking.Judge.compare

    def compared(judge, data):
        calls.append(data)
        if b"MyEdit" not in data:
            raise Mismatch("output 0 differs on silence")
        return real(judge, data)

    edit = deploying.edit_file

    def marked(*args, **options):
        edited = edit(*args, **options)
        edited.model.doc_string = "MyEdit"
        return edited

    monkeypatch.setattr(deploying, "edit_file", marked)
    monkeypatch.setattr(checking.Judge, "compare", compared)
    net, x = demask.from_onnx(given), (torch.randn(1, 3, 16, 16),)
    with strict(False):
        made = deploy(lambda: net, x, tmp_path / "slim.onnx", file=given, minimal=minimal)
    same(given, tmp_path / "slim.onnx")
    assert made.edited is not None and len(calls) > 1
    assert any("differs on silence" in note for note in made.slim.demasked.notes)


def test_where_editing_fails_the_network_is_exported_anew(given, tmp_path, monkeypatch):
    monkeypatch.setattr(deploying, "edit_file", _fails)
    made = exported_minimally(given, tmp_path)
    assert any("could not be edited: no rule" in note for note in made.slim.demasked.notes)


def _fails(*_, **__):
    raise BadInput("no rule")


def test_an_edited_file_that_is_wrong_is_not_written(given, tmp_path, monkeypatch):
    real = deploying.edit_file

    def wrong(*args, **options):
        edited = real(*args, **options)
        bias = next(t for t in edited.model.graph.initializer if t.name == "head.bias")
        bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + 0.01, bias.name))
        return edited

    monkeypatch.setattr(deploying, "edit_file", wrong)
    monkeypatch.setattr(deploying, "NOISE", 100.0)
    with pytest.raises(Mismatch):
        exported_minimally(given, tmp_path)
    with strict(False):
        made = exported_minimally(given, tmp_path)
    assert any("of its largest value" in note for note in made.slim.demasked.notes)


def test_without_a_runtime_widths_are_multiples_of_eight(given, tmp_path, monkeypatch):
    monkeypatch.setattr(checking, "onnxruntime", lambda: None)
    monkeypatch.setattr(deploying, "edit_file", _fails)
    net = demask.from_onnx(given)
    made = deploy(lambda: net, (torch.randn(1, 3, 16, 16),), tmp_path / "slim.onnx", file=given)
    assert made.error < 1e-5 and "reference implementation of onnx" in made.checked
    assert width_of(tmp_path / "slim.onnx", "point.weight") == (16, 16, 1, 1)
    same(given, tmp_path / "slim.onnx")


def test_a_candidate_that_is_wrong_is_not_written(given, tmp_path, monkeypatch):
    real = deploying.for_runtime

    def wrong(program, table, multiple):
        made = real(program, table, multiple)
        weight = made.constants["head.bias"].tensor
        weight.add_(0.01)
        return made

    monkeypatch.setattr(deploying, "for_runtime", wrong)
    monkeypatch.setattr(deploying, "edit_file", _fails)
    net = demask.from_onnx(given)
    with pytest.raises(Mismatch, match="of its largest value"):
        deploy(lambda: net, (torch.randn(1, 3, 16, 16),), tmp_path / "slim.onnx", file=given)
    assert not (tmp_path / "slim.onnx").exists()


@pytest.mark.nightly
def test_a_module_of_pytorch_is_deployed_too(tmp_path, fast):
    fast(lambda name: 1.0 if name == "given" else 0.5)
    net, x = network(), (torch.randn(2, 3, 16, 16),)
    deploy(lambda: net, x, tmp_path / "slim.onnx")
    with torch.no_grad():
        for batch in (1, 4):
            x = torch.randn(batch, 3, 16, 16)
            agree(runtime(tmp_path / "slim.onnx", x), [net(x)])


@pytest.mark.nightly
def test_real_timings_say_what_they_measured(given, tmp_path, monkeypatch):
    real = timer.race
    monkeypatch.setattr(timer, "race", lambda calls, *_, **__: real(calls, 3, 1))
    net = demask.from_onnx(given)
    x = (torch.randn(1, 3, 16, 16),)
    made = deploy(lambda: net, x, tmp_path / "slim.onnx", file=given, threads=1)
    seconds = made.slim.demasked.decisions[0].seconds
    assert "given" in seconds and any(name.startswith("minimal widths") for name in seconds)
    assert all(taken > 0 for taken in seconds.values())
    same(given, tmp_path / "slim.onnx")


# -- the command line ------------------------------------------------------------------------------


def test_the_commands_take_onnx_files(run, given, tmp_path, fast, monkeypatch):  # noqa: F811
    monkeypatch.setattr(deploying, "MULTIPLES", (4,))
    fast(lambda name: 1.0 if name == "given" else 0.5)
    (tmp_path / "model.onnx").write_bytes(given.read_bytes())
    outcome = run("slim", "model.onnx", "-o", "slim.onnx", "--size", "batch=2", "--json")
    assert outcome.code == 0, outcome.err
    told = json.loads(outcome.out)
    assert told["report"]["after"]["parameters"] < told["report"]["before"]["parameters"]
    assert run("verify", "model.onnx", "slim.onnx").code == 0
    assert run("slim", "model.onnx", "-o", "slim.pt2").code == 0
    assert run("slim", "slim.pt2", "-o", "again.onnx", "--minimal").code == 0
    assert run("slim", "model.onnx", "-o", "slim.demask").code == 0
    shown = run("inspect", "model.onnx")
    assert shown.code == 0 and "point" in shown.out and "aten.conv2d" in shown.out
    same(given, tmp_path / "again.onnx")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["slim", "no.onnx", "-o", "slim.onnx"], "no.onnx"),
        (["slim", "broken.onnx", "-o", "slim.onnx"], "broken.onnx"),
        (["inspect", "broken.onnx"], "broken.onnx"),
        (["slim", "model.onnx", "-o", "slim.onnx", "--size", "width=3"], "no such size"),
        (["slim", "model.onnx", "-o", "slim.onnx", "--size", "batch=-3"], "NAME=NUMBER"),
        (["slim", "model.onnx", "-o", "slim.onnx", "--size", "batch=99999999999"], "NAME=NUMBER"),
        (["slim", "model.onnx", "-o", "slim.pt2", "--minimal"], "for .onnx results"),
        (["slim", "model.onnx", "-o", "gone/slim.onnx"], "does not exist"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_left(run, given, tmp_path, words, complaint):  # noqa: F811
    (tmp_path / "model.onnx").write_bytes(given.read_bytes())
    (tmp_path / "broken.onnx").write_bytes(given.read_bytes()[:1000])
    before = sorted(tmp_path.iterdir())
    outcome = run(*words)
    assert outcome.code == 2 and complaint in outcome.err and outcome.out == ""
    assert sorted(tmp_path.iterdir()) == before


def test_without_onnx_the_error_says_what_to_install(given, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(BadInput, match=re.escape(install_command("onnx"))):
        demask.from_onnx(given)


@pytest.mark.skipif(not FACES.exists(), reason="needs ../shared/data/ultraface_rfb_320.onnx")
@pytest.mark.nightly
def test_a_trained_face_detector(tmp_path, fast, monkeypatch):
    """40 % of the channels of each convolution masked, in the file's initializers."""
    monkeypatch.setattr(deploying, "MULTIPLES", ())
    fast(lambda name: 1.0 if name == "given" else 0.5)
    model, generator = onnx.load(FACES), np.random.default_rng(0)
    for tensor in model.graph.initializer:
        if len(tensor.dims) == 4:
            weight = onnx.numpy_helper.to_array(tensor).copy()
            weight[generator.permutation(len(weight))[: int(0.4 * len(weight))]] = 0
            tensor.CopyFrom(onnx.numpy_helper.from_array(weight, tensor.name))
    onnx.save(model, tmp_path / "masked.onnx")
    net = demask.from_onnx(tmp_path / "masked.onnx")
    image = torch.randn(1, 3, 240, 320)
    made = deploy(lambda: net, (image,), tmp_path / "slim.onnx", file=tmp_path / "masked.onnx")
    assert made.error <= 1e-4  # as much as rounding in another order moves it
    agree(runtime(tmp_path / "slim.onnx", image), runtime(tmp_path / "masked.onnx", image))
    sizes = made.slim.demasked
    assert sizes.after.parameters < 0.65 * sizes.before.parameters
    assert [v.name for v in onnx.load(tmp_path / "slim.onnx").graph.output] == ["scores", "boxes"]


def test_the_table_has_the_numbers_that_the_ratio_is_from(given, tmp_path, fast, monkeypatch):
    """The edit was fast in the first rounds, and slower than the original in the last ones."""
    fast(lambda name: 1.0)
    monkeypatch.setattr(deploying, "MULTIPLES", ())

    def measured(calls, pairs, *_, **__):
        is_last = len(calls) == 2 and pairs == deploying.PAIRS
        seconds = {name: 1.0 if name == "given" else 1.01 if is_last else 0.4 for name in calls}
        return {name: [s] * pairs for name, s in seconds.items()}

    monkeypatch.setattr(timer, "race", measured)
    net = demask.from_onnx(given)
    made = deploy(lambda: net, (torch.randn(1, 3, 16, 16),), tmp_path / "slim.onnx", file=given)
    decision, speed = made.slim.demasked.decisions[0], made.slim.demasked.speed
    assert decision.seconds["given"] == 1.0 and decision.seconds["the file, edited"] == 1.01
    assert speed.ratio < 1 and decision.chosen == "the file, edited"
    assert made.edited is not None  # smaller, and no slower than noise


@pytest.mark.parametrize(("first", "last", "is_edited"), [(0.5, 0.5, False), (0.9, 0.9, True), (0.5, 0.95, True)])
def test_an_export_has_to_be_much_faster_than_the_edit(given, tmp_path, fast, monkeypatch, first, last, is_edited):
    """first, last: seconds of exports in the race of all candidates, and in the last rounds; those
    of the edit are 1."""
    fast(lambda name: 1.0)
    monkeypatch.setattr(deploying, "MULTIPLES", ())

    def measured(calls, pairs, *_, **__):
        export = last if pairs == deploying.PAIRS else first
        seconds = {"given": 2.0, deploying.EDITED: 1.0}
        return {name: [seconds.get(name, export)] * pairs for name in calls}

    monkeypatch.setattr(timer, "race", measured)
    net = demask.from_onnx(given)
    made = deploy(lambda: net, (torch.randn(1, 3, 16, 16),), tmp_path / "slim.onnx", file=given)
    assert (made.edited is not None) == is_edited
