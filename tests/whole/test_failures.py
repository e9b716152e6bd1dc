"""What a rule or a pass raises: the network computes the same, and the report says what failed.

Every test plants an exception in one stage; `strict(False)` is the mode of users.
"""

import importlib
import threading
import zipfile
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

import demask
from demask.compat.fake_shapes import shapes_only
from demask.errors import BadInput, DemaskError, InternalError, Mismatch, NotExportable, TableError
from demask.failures import Log, public, strict
from demask.graph.capture.errors import part_of
from demask.ops import TABLE, Entry
from demask.rewrites.normalize import NORMALIZE, glu
from demask.rewrites.rule import Pass, Phase
from graphs import to_graph

# Its passes are looked up there.
PIPELINE = importlib.import_module("demask.shrink.pipeline")


class Net(nn.Module):
    """Dead units in two layers, one call that rules fail on, and a last layer that stays."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 10), nn.Linear(10, 3)
        with torch.no_grad():
            for layer, dead in ((self.a, 3), (self.b, 4)):
                layer.weight[:dead] = 0
                layer.bias[:dead] = 0

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.relu(self.a(x)))))


def smaller(**kwargs):
    net, x = Net(), torch.randn(4, 6)
    slim = to_graph(net, (x,), **kwargs)
    torch.testing.assert_close(slim(x), net(x))
    return slim.demasked


def raising(real, error, op=None):
    """`real`, but for calls of `op` (of any, by default), where it raises."""

    def planted(*args, **kwargs):
        names = [str(getattr(getattr(a, "node", a), "target", "")) for a in args]
        if op is None or any(op in name for name in names):
            raise error
        return real(*args, **kwargs)

    return planted


ERRORS = [
    KeyError("tanh", 0),
    TableError("3 axes"),
    RuntimeError("no\nway"),
    AssertionError(),
    IndexError("5"),
    NotExportable("x", "y", "z"),
    TypeError("None"),
    GuardOnDataDependentSymNode(None, "u0"),
]
CALLS = [
    ("demask.facts.analysis", "bind"),
    ("demask.facts.known", "forward"),
    ("demask.facts.needed", "_operand_need"),
    ("demask.shrink.layout.placement.Placer", "_tie_operand"),
    ("demask.shrink.emit.emit_program", "emit_plain"),
]


def owner(path):
    module, _, name = path.rpartition(".")
    return importlib.import_module(path) if name.islower() else getattr(importlib.import_module(module), name)


CASES = [*((*call, ERRORS[0]) for call in CALLS), *((*CALLS[-1], error) for error in ERRORS[1:])]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("where", "name", "error"), CASES)
def test_a_rule_that_fails_declines_its_call(monkeypatch, where, name, error):
    real = getattr(owner(where), name)
    monkeypatch.setattr(owner(where), name, raising(real, error, "tanh"))
    with pytest.raises(type(error)):
        smaller()
    with strict(False):
        record = smaller()
    assert record.after.parameters < record.before.parameters  # by the units of the first layer
    (note,) = [note for note in record.notes if "tanh" in note]
    assert type(error).__name__ in note


@pytest.mark.parametrize("name", ["fold_constants", "name_tied_tensors", "split_side_network"])
def test_a_pass_that_fails_is_left_out(monkeypatch, name):
    monkeypatch.setattr(PIPELINE, name, raising(None, KeyError("planted")))
    with strict(False):
        record = smaller()
    assert record.after.parameters < record.before.parameters
    assert any("left out" in note and "KeyError: 'planted'" in note for note in record.notes)


ENTRIES = [glu, *(entry for entry in NORMALIZE.entries if isinstance(entry, Pass))]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_of_the_normal_form_that_fails_is_left_out(monkeypatch, entry):
    planted = replace(entry, apply=raising(None, KeyError("planted")))
    entries = tuple(planted if each is entry else each for each in NORMALIZE.entries)
    monkeypatch.setattr(PIPELINE, "NORMALIZE", Phase("planted", entries))
    net, x = nn.Sequential(Net(), nn.Linear(3, 4), nn.GLU()).eval(), torch.randn(4, 6)
    with strict(False):
        slim = to_graph(net, (x,))
    torch.testing.assert_close(slim(x), net(x))
    assert slim.demasked.after.parameters < slim.demasked.before.parameters
    failed = [note for note in slim.demasked.notes if "KeyError: 'planted'" in note]
    assert failed and all(entry.name in note and "left out" in note for note in failed)


def test_a_form_that_fails_is_left_out(monkeypatch):
    forms = [(raising(None, IndexError("planted")), name) for _, name in PIPELINE._REWRITES]
    monkeypatch.setattr(PIPELINE, "_REWRITES", tuple(forms))
    with strict(False):
        record = smaller()
    assert record.after.parameters < record.before.parameters
    assert sum("IndexError: planted" in note for note in record.notes) == len(forms)


@pytest.mark.parametrize("name", ["emit_program", "_shrink_once", "_shrink_repeatedly"])
def test_where_all_fails_the_network_is_as_it_was(monkeypatch, name):
    monkeypatch.setattr(PIPELINE, name, raising(None, ValueError("planted")))
    with strict(False):
        record = smaller()
    assert record.after == record.before
    assert any("ValueError: planted" in note for note in record.notes)


def test_macs_that_cannot_be_counted_are_none(monkeypatch):
    measure = importlib.import_module("demask.shrink.program_size")
    monkeypatch.setattr(measure, "count_macs", raising(measure.count_macs, KeyError("planted"), "linear"))
    with strict(False):
        record = smaller()
    assert record.after.parameters < record.before.parameters


def test_memory_errors_are_raised(monkeypatch):
    monkeypatch.setattr(PIPELINE, "emit_program", raising(None, MemoryError()))
    with strict(False), pytest.raises(MemoryError):
        smaller()
    with strict(False), pytest.raises(MemoryError):
        Log().attempt("a step", raising(None, MemoryError()), None)


def drop_a_live_unit(monkeypatch):
    """Plant the worst defect: a rule that calls the first live unit of a layer dead."""
    needed = importlib.import_module("demask.facts.needed").needed

    def planted(*args):
        needs = needed(*args)
        for (node, _), live in needs.live.items():
            if "linear" in str(node.target) and live.shape[-1] == 10:
                live[..., -1] = False
        return needs

    monkeypatch.setattr("demask.facts.analysis.needed", planted)


def test_a_wrong_result_is_caught(monkeypatch):
    drop_a_live_unit(monkeypatch)
    with pytest.raises(Mismatch, match="output 0 differs by"):
        smaller()
    with strict(False), pytest.warns(UserWarning, match="changed what this network computes") as found:
        record = smaller()
    assert record.after == record.before
    assert not record.effects
    assert record.notes[0] == str(found[0].message)
    assert str(demask.report(_holder(record))).index("changed what") < 600
    path = record.notes[0].partition("report it with ")[2].partition(" (the graph")[0]
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        assert {"report.json", "captured.txt", "result.txt", "zeros/0.npy"} <= names
        assert "linear" in archive.read("captured.txt").decode()


def test_a_wrong_result_names_the_entries_that_a_user_added():
    @torch.library.custom_op("failures::flip", mutates_args=())
    def flip(x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1)

    class Flip(nn.Module):
        def forward(self, x):
            return flip(x)

    flip.register_fake(torch.empty_like)
    net = nn.Sequential(nn.Linear(4, 8), Flip(), nn.Linear(8, 2)).eval()
    net[0].weight.data[:5] = 0
    table = TABLE.extended({"failures::flip": Entry("... -> ...")})  # positions change: wrong
    with strict(False), pytest.warns(UserWarning, match=r"may be wrong \(failures.flip.default\): test each by"):
        demask.demask(net, (torch.randn(3, 4),), table=table, result="graph")


def _holder(record):
    holder = nn.Module()
    holder.demasked = record
    return holder


def test_a_wrong_result_is_returned_unchecked_where_asked(monkeypatch):
    drop_a_live_unit(monkeypatch)
    net, x = Net(), torch.randn(4, 6)
    assert not torch.allclose(to_graph(net, (x,), check=False)(x), net(x))


def test_the_check_of_parts_names_the_part(monkeypatch):
    drop_a_live_unit(monkeypatch)
    net = nn.Sequential(Net(), nn.ReLU())
    x = torch.randn(4, 6)
    with strict(False), pytest.warns(UserWarning, match="changed what"):
        slim = to_graph(net, (x,), modules=["0"])
    torch.testing.assert_close(slim(x), net(x))


class Counted(nn.Module):
    """Counts calls of one module in all its copies."""

    calls = 0

    def forward(self, x):
        type(self).calls += not isinstance(x, torch._subclasses.FakeTensor)
        return x


def test_the_check_takes_few_calls_of_each():
    """One before the model is captured, which refuses examples that fail, and three to compare."""
    net, x = nn.Sequential(Net(), Counted()), torch.randn(4, 6)
    Counted.calls = 0
    to_graph(net, (x,), check=False)
    before, Counted.calls = Counted.calls, 0
    to_graph(net, (x,))
    assert (before, Counted.calls) == (0, 1 + 3)


class Chaotic(nn.Module):
    """Magnifies rounding errors by far more than 64 units; exact in float64."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        y = self.net(x) * 3
        for _ in range(40):
            y = torch.sin(3 * y)
        return y


def test_an_ill_conditioned_network_is_no_defect():
    net, x = Chaotic(), torch.randn(64, 6)
    slim = to_graph(net, (x,))
    assert slim.demasked.after.parameters < slim.demasked.before.parameters


class Tokens(nn.Module):
    """Indices that draws must keep to; a mask of -inf, of which rows may be all of it."""

    def __init__(self):
        super().__init__()
        self.embed, self.net = nn.Embedding(5, 6), Net()

    def forward(self, tokens, mask):
        x = self.net(self.embed(tokens))
        return x + mask, x.argmax(-1)


def test_draws_keep_to_what_the_network_takes():
    mask = torch.zeros(2, 7, 3).masked_fill(torch.rand(2, 7, 3) < 0.3, float("-inf"))
    slim = to_graph(Tokens(), (torch.randint(5, (2, 7)), mask))
    assert not any("not checked" in note for note in slim.demasked.notes)


class Stateful(nn.Module):
    def forward(self, x):
        return x + torch.rand(x.shape)


def test_random_outputs_are_not_checked():
    net = nn.Sequential(Net(), Stateful())
    torch.nn.init.zeros_(net[0].b.weight)
    slim = to_graph(net, (torch.randn(4, 6),))
    assert slim.demasked.after.parameters < slim.demasked.before.parameters


@pytest.mark.parametrize(
    "call",
    [
        demask.demask,
        lambda m, args: demask.optimize(m, args, threads=1, cache=False),
        lambda m, args: demask.verify(m, m, args),
        lambda m, args: demask.demask(m, args, modules="auto"),
        lambda m, args: demask.to_onnx(m, "never.onnx", args),
        demask.prune.groups,
        demask.stride.lower,
    ],
)
@pytest.mark.parametrize("strictly", [True, False])
def test_tensors_without_data_are_named(call, strictly):
    net, x = Net().eval(), torch.randn(2, 6)
    with strict(strictly):
        with pytest.raises(BadInput, match=r"a\.weight of \w+ is on device 'meta'"):
            call(Net().to("meta"), (x,))
        with pytest.raises(BadInput, match=r"tensor of \w+\[0\] is on device 'meta'"):
            call(net, (x.to("meta"),))


class Branching(Net):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


def test_advice_names_a_module_that_the_network_has():
    with pytest.raises(NotExportable, match=r"modules=\['b'\]"):  # the largest
        demask.demask(Branching(), (torch.ones(2, 6),))
    assert part_of(nn.ReLU()) == "modules='auto'"
    assert part_of(nn.ModuleDict({"blocks": nn.ModuleList([Net()])})) == "modules=['blocks.0']"


def test_a_capture_that_differs_is_refused(monkeypatch):
    real = PIPELINE.shared_captures

    def planted(*args, **options):
        for program in real(*args, **options):
            graph = program.graph
            for node in graph.nodes:
                if "tanh" in str(node.target):
                    node.target = torch.ops.aten.sigmoid.default
            yield program

    monkeypatch.setattr(PIPELINE, "shared_captures", planted)
    with pytest.raises(NotExportable, match="does not compute what the model does"):
        smaller()


def test_errors_of_public_functions():
    def fails(x):
        raise x

    with strict(False):
        for error, kind in [
            (KeyError("a"), InternalError),
            (OSError(2, "no", "f"), OSError),
            (OSError(2, "no"), DemaskError),
            (BadInput("b"), BadInput),
            (MemoryError(), MemoryError),
        ]:
            with pytest.raises(kind):
                public(fails)(error)
        with pytest.raises(TypeError, match="missing a required"):
            public(fails)()
    with pytest.raises(KeyError):
        public(fails)(KeyError("a"))


class Resized(nn.Module):
    """Sizes that only expressions over dynamic sizes say, in integers and in floats."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 6, 3, 2, padding=1), nn.Conv2d(6, 4, 3)
        with torch.no_grad():
            self.a.weight[:3], self.a.bias[:3] = 0, 0.5

    def forward(self, x):
        y = self.a(x)
        height, width = y.shape[-2:]
        y = nn.functional.interpolate(y, size=(torch.sym_int(height * 1.5) + 1, max(width * 2, height)))
        return self.b(y).mean((1, 2, 3)) + y.shape[-1] % 3


def test_sizes_are_expressions_of_dynamic_sizes():
    net = Resized().eval()
    slim = to_graph(net, (torch.randn(2, 3, 24, 20),), dynamic_shapes="all")
    assert sum(isinstance(size, str) for size in slim.demasked.inputs[0].sizes) == 3
    assert slim.demasked.after.parameters < slim.demasked.before.parameters
    x = torch.randn(3, 3, 36, 22)
    torch.testing.assert_close(slim(x), net(x))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("shapes", "fails", "left"),
    [
        ("all", lambda sizes: sum(map(_named, sizes)) > 1, ("s", 3, 24, 20)),
        ("all", lambda sizes: any(map(_named, sizes)), (2, 3, 24, 20)),
        (None, lambda sizes: any(map(_named, sizes)), (2, 3, 24, 20)),
        ("all", lambda sizes: True, ("s", 3, "s", "s")),
    ],
)
def test_fewer_sizes_are_dynamic_where_more_fail(monkeypatch, shapes, fails, left):
    real = PIPELINE.emit_program

    def planted(program, *args):
        value = next(n for n in program.graph.nodes if n.op == "placeholder").meta["val"]
        if fails(value.shape):
            raise RuntimeError("planted")
        return real(program, *args)

    monkeypatch.setattr(PIPELINE, "emit_program", planted)
    net, x = Resized().eval(), torch.randn(2, 3, 24, 20)
    with strict(False):
        slim = to_graph(net, (x,), dynamic_shapes=shapes)
    sizes = slim.demasked.inputs[0].sizes
    assert tuple("s" if isinstance(size, str) else size for size in sizes) == left
    torch.testing.assert_close(slim(x), net(x))
    works = slim.demasked.after.parameters < slim.demasked.before.parameters
    assert works == any("only takes inputs of these sizes" in note for note in slim.demasked.notes)
    assert any("planted" in note for note in slim.demasked.notes)


def _named(size):
    return isinstance(size, torch.SymInt)


def test_one_thread_after_the_other_has_our_kernels_and_torch_is_left_as_it_was():
    op = torch.ops.aten.lstm.input
    before, inside, seen = dict(op.py_kernels), threading.Event(), []

    def second():
        inside.wait()
        with shapes_only():
            seen.append(("second", dict(op.py_kernels) != before))

    thread = threading.Thread(target=second)
    thread.start()
    with shapes_only(), shapes_only():
        inside.set()
        thread.join(0.2)  # it waits for this one
        seen.append(("first", dict(op.py_kernels) != before))
    thread.join()
    assert seen == [("first", True), ("second", True)]
    assert dict(op.py_kernels) == before


class Frames(nn.Module):
    """As speech models are: how many frames there are depends on values."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        y = self.net(x)
        count = (y.sum() * 0 + 5).long().item()
        torch._check(count >= 1)
        steps = torch.arange(count) + 1.0
        return y.sum(0) * steps.unsqueeze(1).exp()


def test_sizes_that_values_decide():
    net, x = Frames(), torch.randn(4, 6)
    with strict(False):
        slim = to_graph(net, (x,))
    torch.testing.assert_close(slim(x), net(x))
    assert slim.demasked.after.parameters < slim.demasked.before.parameters


def calls():
    """Public functions with wrong arguments of every kind, as (name, call)."""
    net, x = Net().eval(), torch.randn(4, 6)
    slim = to_graph(net, (x,))
    for value in (None, "text", x, (torch.randn(4, 5),), (x, x), ({"a": x},)):
        yield "demask(args)", lambda value=value: to_graph(net, value)
        yield "verify(args)", lambda value=value: demask.verify(net, slim, value)
    for value in (None, "text", 3, (), {}, x):
        yield "demask(model)", lambda value=value: to_graph(value, (x,))
        yield "demask(kwargs)", lambda value=value: to_graph(net, (x,), value)
        yield "demask(modules)", lambda value=value: to_graph(net, (x,), modules=value)
        yield "verify(model)", lambda value=value: demask.verify(value, slim, (x,))
        yield "verify(slim)", lambda value=value: demask.verify(net, value, (x,))
        yield "report", lambda value=value: demask.report(value)
        yield "save", lambda value=value: demask.save(value, "nowhere/at/all")
        yield "load", lambda value=value: demask.load(value)
        yield "from_onnx", lambda value=value: demask.from_onnx(value)
        yield "optimize", lambda value=value: demask.optimize(value, (x,), cache=False)
        yield "halo", lambda value=value: demask.traverse.halo(value, (x,))
        yield "plan", lambda value=value: demask.traverse.plan(value, (x,))
        yield "lower", lambda value=value: demask.stride.lower(value, (x,))
        yield "to_pt2", lambda value=value: demask.to_pt2(value, "nowhere/at/all")
        yield "to_onnx", lambda value=value: demask.to_onnx(value, "nowhere/at/all", (x,))
    yield "save(path)", lambda: demask.save(slim, "nowhere/at/all")
    yield "demask(table)", lambda: to_graph(net, (x,), table="text")
    yield "demask(shapes)", lambda: to_graph(net, (x,), dynamic_shapes="text")
    yield "script", lambda: to_graph(torch.jit.script(net), (x,))
    yield "other model", lambda: demask.verify(nn.Linear(5, 3), slim, (x,))


@pytest.mark.nightly  # some 80 calls
@pytest.mark.filterwarnings("ignore")
def test_wrong_arguments_raise_our_errors():
    raised = []
    with strict(False):
        for name, call in calls():
            try:
                call()
            except DemaskError as error:
                raised.append((name, error))
            except Exception as error:
                raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    inside = [f"{name}: {error}" for name, error in raised if isinstance(error, InternalError)]
    assert not inside, "\n".join(inside)
    words = {name: str(error) for name, error in raised}
    assert "TorchScript" in words["script"]
    assert "same inputs" in words["other model"]


class Padded(nn.Module):
    """Decides by an integer that is stored as a buffer, as audio codecs do."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.register_buffer("pad", torch.tensor(2), persistent=False)

    def forward(self, x):
        y = self.net(x)
        return nn.functional.pad(y, (self.pad, 0)) if self.pad > 1 else y


def test_code_may_decide_by_buffers():
    net, x = Padded(), torch.randn(4, 6)
    slim = to_graph(net, (x,))
    torch.testing.assert_close(slim(x), net(x))
    assert slim.demasked.after.parameters < slim.demasked.before.parameters
    assert any("are constants: pad" in note for note in slim.demasked.notes)


def test_a_form_that_always_applies_ends(monkeypatch):
    """Each form is applied once in a row; the network shrinks as without it."""
    asked = []

    def endless(reading):
        asked.append(reading)
        assert len(asked) < 20
        return reading.program

    net, x = Net().eval(), torch.randn(2, 6)
    expected = to_graph(net, (x,)).state_dict()
    monkeypatch.setattr(PIPELINE, "_REWRITES", ((endless, "an endless form"), *PIPELINE._REWRITES))
    slim = to_graph(net, (x,)).state_dict()
    assert {k: v.shape for k, v in slim.items()} == {k: v.shape for k, v in expected.items()}
    assert asked
