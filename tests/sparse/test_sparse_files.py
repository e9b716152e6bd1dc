"""Networks with segments: what optimize() makes of sparse layers, in files and other dtypes too."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_sparse_segments import always, pruned, resnet
from torch import Tensor, nn

import demask
import test_cli
from demask.errors import RefusedFile
from demask.failures import strict
from demask.graph.program import Program
from demask.graph.result.demasked_module import Demasked, build
from demask.machine import clock as timer
from demask.machine.cost import Costs
from demask.ops import TABLE
from demask.rewrites.driver import rewrite
from demask.shrink.pipeline import capture_program, shrink_program
from demask.sparse.segment import candidates as sparse_forms
from demask.sparse.segment.build_segments import SEGMENT, segmented, segments_of
from demask.sparse.segment.candidates import ALL, DENSE, EACH, SPARSE
from demask.tune.fold_affine import FOLD
from demask.tune.optimized_module import Optimized
from test_fast_files import edited

run, saved = test_cli.run, test_cli.saved  # fixtures
module = importlib.import_module("demask.optimize")
race = importlib.import_module("demask.tune.race")
FORMS = (ALL, EACH)
X = torch.randn(2, 3, 33, 32, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")


def close(a: Tensor, b: Tensor, limit: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, atol=limit * float(b.detach().abs().max()), rtol=0)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return pruned(resnet()).float()


@pytest.fixture(scope="module")
def network(model) -> tuple[nn.Module, Optimized, Tensor]:
    """A network, the same as one segment, its input."""
    program = capture_program(model, (X,), None, None)
    provenance = shrink_program(program, TABLE)[1]
    form = segmented(rewrite(program, FOLD), always, always)
    assert len(segments_of(form.graph)) == 1
    return model, build(form, provenance, Optimized), X


def has_segments(network: Demasked) -> bool:
    return any(node.target is SEGMENT for node in network.graph.nodes)


# ------------------------------------------------------------------------------------------ files


def test_a_file_gives_back_the_segment(network, tmp_path):
    model, fast, x = network
    close(fast(x), model(x))
    demask.save(fast, tmp_path / "fast.demask")
    loaded = demask.load(tmp_path / "fast.demask")
    assert isinstance(loaded, Optimized) and has_segments(loaded)
    assert loaded.code == fast.code and loaded.demasked == fast.demasked
    assert torch.equal(loaded(x), fast(x))
    close(loaded(x[:1]), model(x[:1]))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda fast: pickle.loads(pickle.dumps(fast))])
def test_copies_have_weights_of_their_own(network, again):
    _, fast, x = network
    expected, other = fast(x), again(fast)
    assert torch.equal(other(x), expected)
    with torch.no_grad():
        other.get_parameter("segment.values").zero_()
    other.refresh()
    assert not other(x).any() and torch.equal(fast(x), expected)


def test_a_pt2_file_holds_dense_layers(network, tmp_path):
    model, fast, x = network
    demask.to_pt2(fast, tmp_path / "fast.pt2")
    exported = torch.export.load(tmp_path / "fast.pt2")
    assert not [n for n in exported.graph.nodes if "demask" in str(n.target)]
    close(exported.module()(x), model(x))
    close(exported.module()(x[:1]), model(x[:1]))


@pytest.mark.nightly
def test_an_onnx_file_holds_dense_layers(network, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    model, fast, x = network
    demask.to_onnx(fast, tmp_path / "fast.onnx")
    session = runtime.InferenceSession(tmp_path / "fast.onnx")
    name = session.get_inputs()[0].name
    close(torch.from_numpy(session.run(None, {name: x.numpy()})[0]), model(x))


@pytest.mark.parametrize("through_file", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_another_dtype_goes_on_with_dense_weights(network, dtype, through_file, tmp_path):
    model, fast, x = network
    other = copy.deepcopy(fast)
    if through_file:
        demask.save(fast, tmp_path / "fast.demask")
        other = demask.load(tmp_path / "fast.demask")
    other = other.to(dtype)
    assert not has_segments(other)
    names = {n for n, _ in other.named_parameters()}
    assert "0.weight" in names and not any("segment" in n for n in names)
    limit = {torch.float64: 1e-5, torch.float16: 0.02, torch.bfloat16: 0.1}[dtype]
    close(other(x.to(dtype)).float(), model(x), limit)


class Head(nn.Module):
    """Two maps as rows of two numbers, joined; their scores."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.maps = nn.ModuleList(nn.Conv2d(8, out, 3, out - 3) for out in (4, 6))
        self.last = nn.Linear(2, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.stem(x).relu()
        rows = [m(y).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 2) for m in self.maps]
        joined = torch.cat(rows, 1)
        return joined.softmax(-1), self.last((joined[:, 1:] * 0.2).exp())


@pytest.mark.nightly
def test_steps_of_single_ops_in_files_and_other_dtypes(tmp_path):
    """Layers after them have the sizes that these calls make, which files do not state."""
    torch.manual_seed(0)
    model, x = Head().eval(), torch.randn(2, 3, 9, 8)
    smaller, provenance = shrink_program(capture_program(model, (x,), None, None), TABLE)
    fast = build(segmented(smaller, always, always), provenance, Optimized)
    (program,) = [p for _, p in segments_of(fast.graph)]
    assert {"permute", "reshape", "join", "softmax", "times", "exp"} <= {step.op for step in program.steps}
    demask.save(fast, tmp_path / "fast.demask")
    loaded = demask.load(tmp_path / "fast.demask")
    wide = demask.load(tmp_path / "fast.demask").double()
    demask.to_onnx(loaded, tmp_path / "fast.onnx", (x,))
    assert not has_segments(wide)
    for images in (x, torch.randn(5, 3, 9, 8)):
        for a, b, c, d in zip(model(images), fast(images), loaded(images), wide(images.double()), strict=True):
            close(b, a)
            assert torch.equal(b, c)
            close(d.float(), a)


def test_it_is_verified_and_demasked_again(network):
    model, fast, x = network
    found = demask.verify(model, fast, (x,))
    assert found.ok and found.max_rel < 1e-6
    close(demask.demask(fast, (x,))(x), model(x))


def test_a_wrong_weight_is_found_by_verify(network):
    model, fast, x = network
    wrong = copy.deepcopy(fast)
    with torch.no_grad():
        wrong.get_parameter("segment.values")[-1] *= 1.01  # of the classes
    with pytest.raises(demask.Mismatch):
        demask.verify(model, wrong, (x,))


def test_bytes_are_the_same_twice(network, tmp_path):
    _, fast, _ = network
    for name in ("one", "two"):
        demask.save(fast, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_network_that_calls_the_op_itself_is_saved_and_spelled_out(network, tmp_path):
    """Segments need no optimize(): `demask.sparse` has modules of them."""
    model, fast, x = network
    program = segmented(rewrite(capture_program(model, (x,), None, None), FOLD), always, always)
    plain = build(program, fast.demasked).eval()
    demask.save(plain, tmp_path / "plain.demask")
    loaded = demask.load(tmp_path / "plain.demask")
    assert type(loaded).graph_module() is Demasked and has_segments(loaded)
    close(loaded(x), model(x))
    for one in (plain, loaded):
        assert not has_segments(one.plain()) and one.plain().training == one.training
        close(one.plain()(x), model(x))
    demask.to_pt2(plain, tmp_path / "plain.pt2")
    close(torch.export.load(tmp_path / "plain.pt2").module()(x), model(x))


def segment(document: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in document["nodes"] if "segment" in row["target"] and row["args"])


def step(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], None]:
    """An edit of the first step of the program."""

    def edit(document: dict[str, Any]) -> None:
        row = segment(document)
        program = json.loads(row["args"][2])
        change(program["steps"][0])
        row["args"][2] = json.dumps(program)

    return edit


def text(value: str) -> Callable[[dict[str, Any]], None]:
    return lambda document: segment(document)["args"].__setitem__(2, value)


def swapped(document: dict[str, Any]) -> None:
    row = segment(document)
    row["args"][1] = row["args"][1][::-1]


HOSTILE = {
    "no program": text("import os"),
    "deep": text("[" * 10_000),
    "no steps": text('{"inputs":["image"],"steps":[],"outputs":[7]}'),
    "values beyond the tensor": step(lambda s: s["weight"][0].__setitem__(2, 2**40)),
    "another tensor": step(lambda s: s["weight"].__setitem__(0, [9, 0, s["weight"][0][2]])),
    "fewer rows": step(lambda s: s.update(out=s["out"] + 1)),
    "a bias beyond the tensor": step(lambda s: s.update(bias=[0, 2**30, 2**30 + s["out"]])),
    "row starts that are columns": step(lambda s: s["weight"].__setitem__(1, [1, 3, s["out"] + 1 + 3])),
    "no such step": step(lambda s: s.update(op="exec")),
    "an unknown field": step(lambda s: s.update(path="x")),
    "a name that is code": step(lambda s: s.update(name='a", exec("raise SystemExit")) #')),
    "a name that is Python's": step(lambda s: s.update(name="__class__")),
    "values before they are made": step(lambda s: s.update(x=40)),
    "swapped weights": swapped,
    "more inputs": lambda d: segment(d)["args"].__setitem__(0, segment(d)["args"][0] * 2),
    "no inputs": lambda d: segment(d)["args"].__setitem__(0, []),
    "no text": lambda d: segment(d)["args"].__setitem__(2, 7),
    "another op of demask's": lambda d: segment(d).update(target="demask.no_such.default"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_are_refused(network, tmp_path, name):
    _, fast, _ = network
    path = tmp_path / "fast.demask"
    demask.save(fast, path)
    edited(path, HOSTILE[name])
    with pytest.raises(RefusedFile):
        demask.load(path)


SIZES = {
    "columns beyond the input": step(lambda s: s.update(kernel=[1, 1], padding=[[0, 0], [0, 0]])),
    "groups that do not divide": step(lambda s: s.update(groups=2)),
}


@pytest.mark.parametrize("name", SIZES)
def test_programs_that_do_not_fit_their_inputs_are_refused_when_called(network, tmp_path, name):
    """How many channels an input has is known when it comes."""
    _, fast, x = network
    path = tmp_path / "fast.demask"
    demask.save(fast, path)
    edited(path, SIZES[name])
    loaded = demask.load(path)
    with pytest.raises((demask.DemaskError, RuntimeError, ValueError)):
        loaded(x)


# --------------------------------------------------------------------------------------- optimize


@pytest.fixture
def quick(monkeypatch):
    """Costs by the number of nonzeros, few rounds; forms with segments win where there are any."""
    real = Costs.open.__func__

    def opened(cls, path=None, **options):
        return real(cls, path, **{**options, "measure": False})

    monkeypatch.setattr(Costs, "open", classmethod(opened))
    monkeypatch.setattr(timer, "lower_bound", lambda given, result: 1.0)
    prefer(monkeypatch, *FORMS)


def prefer(monkeypatch, *words: str) -> None:
    """Let forms with one of these words in their name win every race."""

    def sampled(contenders, pairs=30, warmup=3, **_):
        for call in contenders.values():
            call(), call()
        return {n: [0.5 if is_named(n, words) else 1.0] * max(pairs, 2) for n in contenders}

    monkeypatch.setattr(timer, "race", sampled)


def is_named(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name for word in words)


def optimized(model: nn.Module, **options: Any) -> Demasked:
    return demask.optimize(model, (X,), cache=False, **options)


@pytest.fixture(scope="module")
def results() -> list[Demasked]:
    """Holds what `fast` gives."""
    return []


@pytest.fixture
def fast(model, quick, results) -> Demasked:
    """The network optimized, once for all tests that do not change it."""
    if not results:
        results.append(optimized(model))
    return results[0]


def test_a_sparse_network_becomes_a_segment(model, fast):
    assert isinstance(fast, Optimized) and has_segments(fast)
    for x in (X, X[:1], torch.randn(3, 3, 33, 32)):
        close(fast(x), model(x))
    whole, *layers = fast.demasked.decisions
    assert whole.chosen in (EACH, ALL, f"{EACH}, uncut", f"{ALL}, uncut")
    assert all(set(d.seconds) == {DENSE, SPARSE} for d in layers if d.chosen == SPARSE)
    assert not [note for note in fast.demasked.notes if "left out" in note]
    before, after = fast.demasked.before, fast.demasked.after
    assert after.parameters < before.parameters and after.macs < 0.7 * before.macs


def test_the_report_says_which_layers_and_how_much_is_stored(model, fast, tmp_path):
    report = demask.report(fast)
    weight = model.get_parameter("9.weight")
    stored = float(weight.count_nonzero()) / weight.numel()
    assert report.densities["9"] == pytest.approx(stored, abs=0.2)  # dead columns may be gone
    assert "sparse layers" in str(report) and "weights stored" in str(report)
    assert report.to_dict()["densities"] == dict(report.densities)
    report.to_html(tmp_path / "page.html")
    assert "Sparse layers" in (tmp_path / "page.html").read_text()
    demask.save(fast, tmp_path / "fast.demask")
    assert demask.report(demask.load(tmp_path / "fast.demask")).densities == report.densities


def test_without_the_backend_there_are_no_segments(model, quick):
    fast = optimized(model, backends=("torch",))
    assert not has_segments(fast)
    assert not any(is_named(name, FORMS) for name in fast.demasked.decisions[0].seconds)


def test_dense_networks_become_segments_without_sparse_layers(quick):
    dense = resnet().eval()
    fast = optimized(dense, precision="int8")
    whole, *others = fast.demasked.decisions
    assert whole.chosen == ALL and has_segments(fast)
    assert not any(is_named(name, (EACH, "uncut")) for name in whole.seconds)
    assert SPARSE not in {decision.chosen for decision in others}
    assert fast.demasked.densities == {} and "sparse layers" not in str(demask.report(fast))
    assert any("has no effect" in note for note in fast.demasked.notes)
    close(fast(X), dense(X))


@pytest.mark.nightly
def test_another_dtype_has_no_segments(model, quick):
    fast = demask.optimize(copy.deepcopy(model).double(), (X.double(),), cache=False)
    assert not has_segments(fast)


@pytest.mark.parametrize(
    ("precision", "limit"), [pytest.param("bf16", 0.02, marks=pytest.mark.nightly), ("int8", 0.05)]
)
def test_lossy_storage_says_how_far_it_is_off(model, quick, precision, limit, tmp_path):
    fast = optimized(model, precision=precision)
    assert has_segments(fast)
    (note,) = [n for n in fast.demasked.notes if precision in n]
    said = float(note.split(" at most, ")[1].split()[0])
    exact = model(X).detach()
    gap = float((fast(X) - exact).abs().max() / exact.abs().max())
    assert 0 < gap <= 1.1 * said and said < limit
    assert not demask.verify(model, fast, (X,), check=False).ok
    demask.save(fast, tmp_path / "fast.demask")
    assert torch.equal(demask.load(tmp_path / "fast.demask")(X), fast(X))
    wide = copy.deepcopy(fast).double()
    close(wide(X.double()).float(), fast(X), 1e-4)


@pytest.mark.nightly
def test_exact_weights_of_a_lossy_form_are_checked(model, quick, monkeypatch):
    """A form is left out where more than the storage of its weights is wrong."""
    real = sparse_forms.segmented

    def wrong(program: Program, *args: Any, **options: Any) -> Program:
        made = real(program, *args, **options)
        for name, constant in made.constants.items():
            if name.startswith("segment.values"):
                constant.tensor[-1] += 0.1
        return made

    monkeypatch.setattr(sparse_forms, "segmented", wrong)
    with strict(False):
        fast = optimized(model, precision="bf16")
    assert not has_segments(fast)
    assert any("left out" in note for note in fast.demasked.notes)


def test_a_sparse_form_that_is_slower_is_not_taken(model, quick, monkeypatch):
    monkeypatch.setattr(timer, "lower_bound", lambda given, result: 0.9)
    fast = optimized(model)
    assert not isinstance(fast, Optimized)
    assert any("may be slower" in note for note in fast.demasked.notes)


def test_the_cost_model_chooses_layer_by_layer(model, quick, monkeypatch):
    """A layer that is slower sparse stays dense in the one form, not in the other."""
    real = Costs.seconds

    def seconds(self, question):
        slow = "sparse; Layer" in question.name and "linear" in question.name
        return 1.0 if slow else real(self, question)

    monkeypatch.setattr(Costs, "seconds", seconds)
    prefer(monkeypatch, EACH)
    fast = optimized(model)
    assert ("9", DENSE) in {(d.place, d.chosen) for d in fast.demasked.decisions}
    assert fast.demasked.densities and "9" not in fast.demasked.densities
    prefer(monkeypatch, ALL)
    assert "9" in optimized(model).demasked.densities


def test_dense_forms_are_left_out_where_a_sparse_one_is_far_ahead(model, quick, monkeypatch):
    monkeypatch.setattr(sparse_forms, "AHEAD", float("inf"))
    names = optimized(model).demasked.decisions[0].seconds
    assert all(name == "given" or is_named(name, FORMS) for name in names)
    monkeypatch.setattr(sparse_forms, "AHEAD", 0.0)
    monkeypatch.setattr(sparse_forms.FusedLayer, "roofline", lambda *_: 0.0)
    assert module.DEMASKED in optimized(model).demasked.decisions[0].seconds


@pytest.mark.nightly
def test_a_warm_cache_needs_no_measurement(model, monkeypatch, tmp_path):
    cache = tmp_path / "costs.json"
    for share in ("SPREAD", "WAITED"):  # however busy the machine is
        monkeypatch.setattr(f"demask.machine.cost.{share}", float("inf"))
    first = demask.optimize(model, (X,), cache=cache)
    monkeypatch.setattr(Costs, "time_calls", lambda *_, **__: pytest.fail("measured again"))
    demask.optimize(model, (X,), cache=cache)
    assert not [n for n in first.demasked.notes if "left out" in n or "no further" in n]


def test_the_command_line(run, saved, tmp_path):
    outcome = run(
        "optimize",
        saved / "masked.pt2",
        "-o",
        "fast.demask",
        "--precision",
        "int8",
        "--threads",
        1,
        "--cache",
        "costs.json",
    )
    assert outcome.code == 0, outcome.err
    assert demask.load(tmp_path / "fast.demask").demasked.notes
    wrong = run("optimize", saved / "masked.pt2", "-o", "x.demask", "--precision", "int3")
    assert wrong.code == 2 and "int3" in wrong.err


@pytest.mark.nightly
def test_a_fault_in_the_sparse_forms_leaves_the_dense_ones(model, quick, monkeypatch):
    def broken(*_: Any, **__: Any) -> Program:
        raise KeyError("planted")

    monkeypatch.setattr(sparse_forms, "segmented", broken)
    with strict(False):
        fast = optimized(model)
    assert any("planted" in note for note in fast.demasked.notes)
    assert module.DEMASKED in fast.demasked.decisions[0].seconds
    close(fast(X), model(X))
