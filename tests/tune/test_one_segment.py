"""optimize() with all layers in segments: outputs as exact as promised, whatever is done to it."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import demask
from demask.exec.steps.segment_rows import name_of
from demask.kernels.plan_cache import WEIGHTS
from demask.machine import clock as timer
from demask.machine.cost import Costs
from demask.ops import TABLE
from demask.shrink.pipeline import capture_program, shrink_program
from demask.sparse.segment import inline as segment_call
from demask.sparse.segment.build_segments import segmented, segments_of
from demask.sparse.segment.candidates import ALL, BY_INDEX, EACH, OUTSIDE
from demask.tune.optimized_module import Optimized
from torch_release import RELEASE, since

optimize = importlib.import_module("demask.optimize")
candidates = importlib.import_module("demask.sparse.segment.candidates")
race = importlib.import_module("demask.tune.race")
LIMIT = 64 * torch.finfo(torch.float32).eps  # of the largest output: what optimize() promises
SIZES = [(1, 24, 20), (3, 24, 20), (1, 17, 31), (3, 17, 31)]  # batch, height, width
if RELEASE < (2, 12):  # which captures the average pool for heights like these alone
    SIZES = [(1, 24, 20), (3, 24, 20), (1, 24, 31), (3, 24, 31)]
pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(self.down(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


class Net(nn.Module):
    """One of everything that segments hold."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.a, self.a_norm = nn.Conv2d(16, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.b, self.b_norm = nn.Conv2d(16, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.excite = SqueezeExcite(16)
        self.before = nn.BatchNorm2d(16)  # after a sum: no layer can take it
        self.left, self.right = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1)
        self.grouped = nn.Conv2d(16, 12, 3, padding=1, groups=4)
        self.classes = nn.Linear(12, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem_norm(self.stem(x)).relu(), 3, 2, 1)
        y = self.b_norm(self.b(self.a_norm(self.a(x)).relu()))
        x = (x + self.excite(y)).relu()
        x = F.silu(self.before(x))
        left, right = x[:, :8], x[:, 8:]
        x = torch.cat([self.left(left), self.right(right).relu()], 1)
        # a channel shuffle
        n, c, h, w = x.shape
        x = x.reshape(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        x = F.avg_pool2d(F.hardswish(self.grouped(x)), 2)
        return self.classes(F.adaptive_avg_pool2d(x, 1).flatten(1))


def masked_network(*names: str) -> Net:
    """A network with a third of the channels of the named layers masked. Shifts remain: the next
    layers have border maps."""
    torch.manual_seed(3)
    net = Net().eval()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                for values in (module.weight, module.running_var):
                    values.uniform_(0.5, 1.5)
                for values in (module.bias, module.running_mean):
                    values.normal_()
        for name in names:
            net.get_submodule(name).weight[::3] = 0
            net.get_submodule(f"{name}_norm").running_mean[::3] = 0
    return net


def image(batch: int, height: int, width: int) -> Tensor:
    draw = torch.Generator().manual_seed(batch * height)
    return torch.randn(batch, 3, height, width, generator=draw)


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """Costs that are not measured, few rounds; segments of all layers win."""
    real = Costs.open.__func__

    def opened(cls, path=None, **options):
        return real(cls, path, **{**options, "measure": False})

    def sampled(contenders, pairs=30, warmup=3, **_):
        for call in contenders.values():
            call()
        return {n: [0.5 if n == ALL else 1.0] * max(pairs, 2) for n in contenders}

    monkeypatch.setattr(Costs, "open", classmethod(opened))
    monkeypatch.setattr(timer, "lower_bound", lambda *_: 1.0)
    monkeypatch.setattr(timer, "race", sampled)


@dataclass(frozen=True)
class Pair:
    model: Net
    fast: Any

    def agree(self, network: Any = None, limit: float = LIMIT, sizes=SIZES) -> None:
        """The network has the outputs of the model in float64."""
        network, wide = network or self.fast, copy.deepcopy(self.model).double()
        dtype = next(network.parameters()).dtype if isinstance(network, nn.Module) else None
        for size in sizes:
            x = image(*size)
            with torch.no_grad():
                expected, output = wide(x.double()), network(x.to(dtype or x.dtype))
            gap = (output.double() - expected).abs().max()
            assert gap <= limit * expected.abs().max(), size


@pytest.fixture(scope="module")
def made() -> list[Pair]:
    return []


@pytest.fixture
def pair(quick, made: list[Pair]) -> Pair:
    if not made:
        model = masked_network("a")
        fast = demask.optimize(model, (image(*SIZES[0]),), dynamic_shapes="all", cache=False)
        made.append(Pair(model, fast))
    return made[0]


def test_the_whole_network_is_one_segment(pair) -> None:
    record = pair.fast.demasked
    assert isinstance(pair.fast, Optimized) and record.decisions[0].chosen == ALL
    ((_, program),) = segments_of(pair.fast.graph)
    assert program.static  # border maps of the masked channels with shifts
    names = {name_of(step) for step in program.steps}
    assert names == {"conv", "linear", "pool", "mean", "flat", "add", "scale", "cat", "select"}
    assert record.densities == {} and len(record.decisions) == 1
    assert not any("left out" in note for note in record.notes)
    assert record.after.parameters < record.before.parameters
    assert "sparse" not in str(demask.report(pair.fast))


def test_outputs_for_several_batches_and_image_sizes(pair) -> None:
    pair.agree()
    pair.agree()  # by plans that exist


@pytest.mark.nightly
def test_without_dynamic_sizes_operands_of_a_sum_may_have_different_channels() -> None:
    model = masked_network("stem", "a", "b")
    for batch in (1, 3):
        x = image(batch, 24, 20)
        fast = demask.optimize(model, (x,), cache=False)
        assert fast.demasked.decisions[0].chosen == ALL
        assert len(segments_of(fast.graph)) == 1
        Pair(model, fast).agree(sizes=SIZES[:2])


@pytest.mark.parametrize("again", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies(pair, again) -> None:
    other = again(pair.fast)
    assert other.code == pair.fast.code
    pair.agree(other)
    with torch.no_grad():
        other.get_parameter("segment.values").zero_()
    assert not other(image(*SIZES[0])).any()
    pair.agree()


def test_files(pair, tmp_path) -> None:
    demask.save(pair.fast, tmp_path / "fast.demask")
    loaded = demask.load(tmp_path / "fast.demask")
    assert isinstance(loaded, Optimized) and segments_of(loaded.graph)
    pair.agree(loaded)


def test_reloaded_weights_are_used(pair) -> None:
    other = copy.deepcopy(pair.fast)
    pair.agree(other)
    state = {name: value.clone() for name, value in other.state_dict().items()}
    other.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    with torch.no_grad():
        assert not torch.allclose(other(image(*SIZES[0])), pair.fast(image(*SIZES[0])))
    other.load_state_dict(state)
    pair.agree(other)


@pytest.mark.parametrize(
    "write", [lambda weight: weight.mul_(0.5), lambda weight: weight.data.mul_(0.5)], ids=["counted", "data"]
)
def test_written_weights_are_used(pair, write) -> None:
    other = copy.deepcopy(pair.fast)
    x = image(*SIZES[0])
    before = other(x)
    with torch.no_grad():
        write(other.get_parameter("segment.values"))
    after = other(x)
    assert not torch.allclose(before, after)
    assert torch.equal(copy.deepcopy(other)(x), after)


def test_other_dtypes(pair) -> None:
    wide = copy.deepcopy(pair.fast).double()
    assert not segments_of(wide.graph)
    pair.agree(wide, 1e-5)
    pair.agree(copy.deepcopy(pair.fast).bfloat16(), 0.2)


@since(2, 12, "the average pool is captured for heights of one parity")
def test_exported_and_compiled(pair, tmp_path) -> None:
    demask.to_pt2(pair.fast, tmp_path / "fast.pt2")
    exported = torch.export.load(tmp_path / "fast.pt2").module()
    assert not [n for n in exported.graph.nodes if "demask" in str(n.target)]
    pair.agree(exported)
    compiled = torch.compile(pair.fast, backend="eager", fullgraph=True)
    for size in SIZES[:2]:
        x = image(*size)
        torch.testing.assert_close(compiled(x), pair.fast(x), rtol=1e-4, atol=1e-4)


def test_an_onnx_file(pair, tmp_path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    demask.to_onnx(pair.fast, tmp_path / "fast.onnx")
    session = runtime.InferenceSession(tmp_path / "fast.onnx")
    name = session.get_inputs()[0].name
    pair.agree(lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0]), 1e-4)


# ------------------------------------------------------------------------------------- the call


@pytest.fixture
def dispatched(monkeypatch) -> list[int]:
    """Calls of the op, instead of its plans."""
    calls: list[int] = []
    real = segment_call.segment

    def counted(*args: Any) -> Any:
        calls.append(1)
        return real(*args)

    monkeypatch.setattr(segment_call, "segment", counted)
    return calls


def test_plain_calls_do_not_pass_through_the_dispatcher(pair, dispatched) -> None:
    pair.agree()
    assert not dispatched
    x = image(*SIZES[0])
    expected = pair.fast(x)
    with torch.inference_mode():
        assert torch.equal(pair.fast(x), expected)
    assert torch.equal(pair.fast(nn.Parameter(x)), expected)
    assert not dispatched


def test_modes_and_transforms_call_the_op(pair, dispatched) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = image(*SIZES[1])
    expected = pair.fast(x)
    with FlopCounterMode(display=False):
        assert torch.equal(pair.fast(x), expected)
    assert len(dispatched) == 1
    each = torch.vmap(lambda one: pair.fast(one[None])[0])(x)
    torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-4)
    assert len(dispatched) == 2


def test_several_threads(pair) -> None:
    inputs = [image(*size) for size in SIZES]
    expected = [pair.fast(x) for x in inputs]
    wrong: list[int] = []

    def run(k: int) -> None:
        for _ in range(30):
            if not torch.equal(pair.fast(inputs[k]), expected[k]):
                wrong.append(k)

    threads = [threading.Thread(target=run, args=(k % len(inputs),)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_plans_end_with_the_network(pair) -> None:
    gc.collect()  # those of networks of earlier tests
    other, before = copy.deepcopy(pair.fast), len(WEIGHTS.entries)
    other(image(*SIZES[0]))
    assert len(WEIGHTS.entries) == before + 1
    other.refresh()
    del other
    gc.collect()
    assert len(WEIGHTS.entries) == before


# --------------------------------------------------------------------------- which networks have it


def names(model: nn.Module, *args: Tensor, **options: Any) -> set[str]:
    fast = demask.optimize(model.eval(), args, cache=False, **options)
    return set(fast.demasked.decisions[0].seconds)


def test_large_products_of_dense_matrices_are_tried_outside_too() -> None:
    """From 64 tokens torch may multiply them faster; sparse ones are always inside."""
    torch.manual_seed(0)
    mlp = nn.Sequential(
        nn.Linear(128, 1024),
        nn.GELU(),
        nn.Linear(1024, 128),
        nn.Linear(128, 128),
        nn.GELU(),
        nn.Linear(128, 300),
        nn.Linear(300, 256),
    )
    assert {ALL, ALL + OUTSIDE} <= names(mlp, torch.randn(1, 64, 128))
    assert ALL + OUTSIDE not in names(mlp, torch.randn(1, 63, 128))
    with torch.no_grad():
        mlp[6].weight.mul_(torch.rand_like(mlp[6].weight) < 0.2)
    assert ALL + OUTSIDE not in names(mlp, torch.randn(1, 64, 128))


def test_networks_whose_work_is_elsewhere_have_no_segments() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.last = nn.RNN(16, 32), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.rnn(x)[0])

    torch.manual_seed(0)
    assert not names(Head(), torch.randn(5, 2, 16)) & {ALL, EACH}
    network = Head()
    network.rnn = nn.LSTM(16, 32)
    assert ALL in names(network, torch.randn(5, 2, 16))


def test_without_kernels_there_are_no_segments(monkeypatch) -> None:
    monkeypatch.setattr(candidates.llvm, "is_installed", lambda: False)
    assert ALL not in names(nn.Sequential(nn.Conv2d(3, 4, 3)), image(1, 8, 8))


def test_others_are_left_out_where_segments_are_far_ahead(monkeypatch) -> None:
    model, x = masked_network("a"), image(*SIZES[0])
    rooflines = [float("inf"), 0.0, 0.0]  # seconds, of each layer
    for seconds, ahead in zip(rooflines, (0.0, float("inf"), 0.0), strict=True):
        monkeypatch.setattr(candidates.FusedLayer, "roofline", lambda *_, s=seconds: s)
        monkeypatch.setattr(candidates, "AHEAD", ahead)
        others = names(model, x) - {optimize.GIVEN, ALL, ALL + BY_INDEX}
        assert (optimize.DEMASKED in others) == (seconds == ahead == 0.0) == bool(others)


def test_layers_in_a_segment_have_their_weights_and_biases():
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.GRU(8, 5)).eval()
    program = capture_program(net, (torch.randn(3, 2, 6),), {}, None)
    program, provenance = shrink_program(program, TABLE)
    in_one = segmented(program, lambda *_: True, lambda *_: True)
    record = optimize.optimized_provenance(in_one, provenance, TABLE)
    for path, layer in (("0", net[0]), ("2", net[2])):
        count = sum(p.numel() for p in layer.parameters())
        assert record.modules[path].parameters == (count, count)
    assert not record.removed
