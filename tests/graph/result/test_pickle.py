"""A whole result goes through pickle: into files of torch.save, to processes that are spawned."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

import demask
import own_process
from demask.graph.node_records import graph_of, records_of
from demask.graph.result.demasked_module import Demasked
from graphs import to_graph
from test_guards import Branches
from test_tied import TOKENS, check_tied, masked, slimmed
from test_transformers import ARCHITECTURES, demasked, difference, generator, skip_unless_installed
from test_transformers import masked as masked_transformer


class Sized(nn.Module):
    """Computes with sizes, drops out, and returns a dictionary of tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.head = nn.Dropout(0.5), nn.Conv2d(8, 2, 1)
        with torch.no_grad():
            self.conv.weight[:3], self.conv.bias[:3] = 0, 0.5

    def forward(self, x: Tensor, scale: float = 2.0) -> dict[str, tuple[Tensor, Tensor]]:
        y = self.head(self.drop(self.norm(self.conv(x)).relu())) * scale
        n, c, h, w = y.shape
        return {"maps": (y.reshape(n, c * h, w), y.flatten(2).sum(2))}


def sized(dtype: torch.dtype = torch.float64) -> tuple[Demasked, Callable[[int], Tensor]]:
    torch.manual_seed(0)
    shapes = (dict.fromkeys((0, 2, 3), torch.export.Dim.AUTO),)
    net = Sized().to(dtype).eval()
    slim = to_graph(net, (torch.randn(2, 3, 8, 10, dtype=dtype),), dynamic_shapes=shapes)
    return slim, lambda k: torch.randn(k, 3, 7 + k, 9, dtype=dtype)


def pickled(slim: nn.Module) -> Demasked:
    return pickle.loads(pickle.dumps(slim))


def through_file(slim: nn.Module) -> Demasked:
    file = io.BytesIO()
    torch.save(slim, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


ROADS = pytest.mark.parametrize("road", [pickled, through_file])


def same_state(a: nn.Module, b: nn.Module) -> None:
    """Tensors by all their names: kind, memory layout, values; and every module's mode."""
    for named in ("named_parameters", "named_buffers"):
        one, other = (dict(getattr(m, named)(remove_duplicate=False)) for m in (a, b))
        assert list(one) == list(other)
        for name, tensor in one.items():
            twin = other[name]
            assert type(twin) is type(tensor) and twin.requires_grad == tensor.requires_grad
            assert twin.dtype == tensor.dtype and twin.stride() == tensor.stride()
            assert torch.equal(twin, tensor) and twin is not tensor
    assert list(a.state_dict()) == list(b.state_dict())  # what is not persistent stays out
    modes = [{name: module.training for name, module in m.named_modules()} for m in (a, b)]
    assert modes[0] == modes[1]


@pytest.mark.sampled(2)
@ROADS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_all_of_a_result_comes_back(road, dtype: torch.dtype) -> None:
    slim, draw = sized(dtype)
    slim.train()
    slim.norm.eval()  # a frozen batch norm stays frozen
    slim.head.bias.requires_grad_(False)
    slim.to(memory_format=torch.channels_last)
    back = road(slim)
    assert isinstance(back, Demasked) and back.demasked == slim.demasked
    assert back.code == slim.code
    assert [n.name for n in back.graph.nodes] == [n.name for n in slim.graph.nodes]
    same_state(slim, back)
    for k in (1, 2):
        x = draw(k)
        (one, two), (other, more) = slim.eval()(x)["maps"], back.eval()(x)["maps"]
        assert torch.equal(one, other) and torch.equal(two, more)


@ROADS
def test_tied_names_and_buffers_that_are_not_stored(road) -> None:
    model = masked()
    slim = slimmed(model)
    back = road(slim)
    check_tied(back)
    same_state(slim, back)
    assert "scale" in dict(back.named_buffers()) and "scale" not in back.state_dict()
    torch.testing.assert_close(back(TOKENS), model(TOKENS), rtol=1e-12, atol=1e-12)


@ROADS
def test_checks_of_sizes_come_back(road) -> None:
    slim = to_graph(Branches(), (torch.randn(5, 3),))
    back, x = road(slim), torch.randn(4, 3)
    assert torch.equal(back(x), x * 2)
    for refused, words in ((x[:3], ">= 4"), (torch.randn(5, 2), "expected sizes")):
        with pytest.raises(ValueError, match=words):
            back(refused)


def test_what_came_back_is_an_ordinary_result(tmp_path: Path) -> None:
    slim, draw = sized()
    back, x = pickled(slim), draw(3)
    want = slim(x)["maps"][0]
    again = to_graph(back, (x,))
    demask.save(back, tmp_path / "slim")
    others = (copy.deepcopy(back), pickled(pickled(back)), again, demask.load(tmp_path / "slim"))
    for module in others:
        torch.testing.assert_close(module(x)["maps"][0], want, rtol=0, atol=0)
    demask.verify(slim, back, (x,))
    torch._dynamo.reset()
    compiled = torch.compile(back, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x)["maps"][0], want)
    back.train()(x)["maps"][0].sum().backward()
    assert all(p.grad is not None for p in back.parameters())
    assert all(p.grad is None for p in slim.parameters())


def test_a_copy_and_a_loaded_file_can_be_pickled(tmp_path: Path) -> None:
    slim, draw = sized()
    demask.save(slim, tmp_path / "slim")
    x = draw(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch warns of copies of its own specs
        sources = (copy.deepcopy(slim), demask.load(tmp_path / "slim"))
    for source in sources:
        assert torch.equal(pickled(source)(x)["maps"][0], slim(x)["maps"][0])


def test_a_part_is_pickled_with_its_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 6), nn.ReLU())).eval()
    x = torch.randn(5, 3)
    slim = to_graph(model, (x,), modules=["1"])
    back = through_file(slim)
    assert torch.equal(back(x), slim(x))
    assert back[1].demasked == slim[1].demasked


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_transformer_with_outputs_of_its_own_type(name: str) -> None:
    skip_unless_installed(name)
    chosen, draw = ARCHITECTURES[name], generator()
    model = masked_transformer(name, "unit", draw)
    slim = demasked(model, chosen, chosen.inputs(2, 7, draw))
    back = pickled(slim)
    same_state(slim, back)
    assert difference(slim, back, chosen.inputs(3, 11, draw)) == 0


def run(slim: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return slim(x)["maps"][0]


def test_another_process_runs_it() -> None:
    slim, draw = sized()
    x = draw(2)
    with ProcessPoolExecutor(1, mp_context=own_process.context()) as pool:
        found = pool.submit(run, slim, x).result()
    assert torch.equal(found, run(slim, x))


def test_rows_keep_names_and_arguments() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.name = "input"  # torch.fx would number a builtin's name
    y = graph.call_function(torch.ops.aten.slice.Tensor, (x, 1, 0, 3))
    z = graph.call_function(torch.ops.aten.cat.default, ([x, y], 1))
    graph.output({"all": (z, slice(x, None), 2.5)})
    again = graph_of(pickle.loads(pickle.dumps(records_of(graph))))
    assert str(again) == str(graph)
    assert [n.target for n in again.nodes] == [n.target for n in graph.nodes]
    assert records_of(again) == records_of(graph)
