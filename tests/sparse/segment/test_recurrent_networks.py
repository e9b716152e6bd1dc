"""Networks with LSTM and GRU become one segment, and come back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_sparse_segments import all_sparse, always, and_back, check, made, steps
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import demask
from demask.exec.steps.match_calls import MatchedCall
from demask.graph.editor import GraphEditor
from demask.rewrites.driver import rewrite
from demask.shrink.pipeline import capture_program
from demask.sparse.segment.build_segments import layers_of, segmented, segments_of
from demask.tune.fold_affine import FOLD
from test_tune import ran

SIGNAL = torch.randn(2, 3, 13, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(1))
UNITS = 64 * 2.0**-23

pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")


class Speech(nn.Module):
    """Convolutions of a signal, recurrent layers, a linear layer; keywords: of the layers."""

    def __init__(self, kind: type[nn.Module] = nn.LSTM, **keywords: Any):
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv1d(6, 5, 3, 2))
        self.rnn = kind(5, 4, **keywords)
        self.head = nn.Linear(8 if keywords.get("bidirectional") else 4, 2)

    def forward(self, x: Tensor, *states: Tensor) -> Any:
        y = self.front(x).relu()
        y = y.transpose(1, 2) if self.rnn.batch_first else y.permute(2, 0, 1)
        given = states if len(states) > 1 else states[0] if states else None
        y, after = self.rnn(y, given)
        return torch.sigmoid(self.head(y)), after


class LastState(nn.Module):
    """Reads the last hidden state, or the last output, of a layer."""

    def __init__(self, kind: type[nn.Module], output: bool):
        super().__init__()
        self.rnn, self.head, self.output = kind(6, 5, batch_first=True), nn.Linear(5, 3), output

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.rnn(x)
        state = state if isinstance(state, Tensor) else state[0]
        return self.head(out[:, -1] if self.output else state.squeeze(0))


class Stack(nn.Module):
    """Layers of different widths, one after another, with a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.LSTM(6, 9, batch_first=True), nn.GRU(9, 6, batch_first=True, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x)[0])[0]


def states(kind: type[nn.Module], layers: int, batch: int = 2) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(2)
    count = 2 if kind is nn.LSTM else 1
    return tuple(torch.randn(layers, batch, 4, generator=draw) for _ in range(count))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "lstm": (lambda: Speech(batch_first=True), (SIGNAL,)),
    "gru": (lambda: Speech(nn.GRU), (SIGNAL,)),
    "given states": (lambda: Speech(batch_first=True), (SIGNAL, *states(nn.LSTM, 1))),
    "layers": (lambda: Speech(nn.GRU, num_layers=2), (SIGNAL, *states(nn.GRU, 2))),
    "directions": (lambda: Speech(bidirectional=True, num_layers=2, batch_first=True), (SIGNAL,)),
    "directions with states": (lambda: Speech(bidirectional=True), (SIGNAL, *states(nn.LSTM, 2))),
    "no bias": (lambda: Speech(nn.GRU, bias=False, bidirectional=True), (SIGNAL,)),
    "last state": (lambda: LastState(nn.LSTM, False), (TOKENS,)),
    "last output": (lambda: LastState(nn.GRU, True), (TOKENS,)),
    "stack": (Stack, (TOKENS,)),
    "alone": (lambda: nn.LSTM(6, 5), (TOKENS,)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_becomes_one_segment_and_comes_back(name: str) -> None:
    make, inputs = NETWORKS[name]
    program, args = made(make(), *inputs)
    found = check(program, all_sparse, args)
    assert len(segments_of(found.graph)) == 1, steps(found)
    assert not any(".input" in str(node.target) for node in found.graph.nodes)
    back = check(program, and_back, args)
    assert not segments_of(back.graph)
    before, after = ({c.name for c in p.constants.values()} for p in (program, back))
    assert before == after


@pytest.mark.parametrize("name", ["given states", "directions", "layers", "stack", "alone"])
def test_plans_in_float32(name: str) -> None:
    """The same bits for any number of threads, and the network in float64 up to rounding."""
    make, inputs = NETWORKS[name]
    torch.manual_seed(3)
    model = make().eval()
    program = rewrite(capture_program(model, inputs, None, None), FOLD)
    program = segmented(program, always, always)
    with torch.no_grad():
        want = model.double()(*(x.double() for x in inputs))
    wanted = tree_leaves(want)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(ran(program, inputs))
    finally:
        torch.set_num_threads(before)
    for y, other, third, exact in zip(*found, wanted, strict=True):
        assert float((y - exact).abs().max()) <= UNITS * float(exact.abs().max())
        assert torch.equal(y, other) and torch.equal(y, third)


def test_one_segment_without_other_layers_in_it() -> None:
    """A recurrent layer needs no sparse layer around it."""

    def never(editor: GraphEditor, call: MatchedCall) -> bool:
        return False

    program = capture_program(Stack().eval(), (TOKENS,), None, None)
    assert len(segments_of(segmented(program, never, never).graph)) == 1


def test_products_are_counted() -> None:
    program = segmented(capture_program(Stack().eval(), (TOKENS,), None, None), always, always)
    found = {layer.name: (layer.weights, layer.products) for layer in layers_of(program)}
    weights = 4 * 9 * (6 + 9), 3 * 6 * (9 + 6)
    assert found == {"a.l0": (weights[0], 14 * weights[0]), "b.l0": (weights[1], 14 * weights[1])}


@pytest.mark.parametrize(
    "make", [lambda: nn.LSTM(6, 5, proj_size=3), lambda: nn.RNN(6, 5)], ids=["projection", "no gates"]
)
def test_other_layers_stay_as_they_are(make: Callable[[], nn.Module]) -> None:
    program = capture_program(make().eval(), (TOKENS,), None, None)
    after = segmented(program, always, always)
    assert not segments_of(after.graph)
    assert str(after.graph) == str(program.graph)


def test_an_optimized_network(tmp_path: Path) -> None:
    """With the outputs of torch, for other batches too, after it was saved, and in float64."""
    torch.manual_seed(4)
    model = Speech(bidirectional=True, batch_first=True).eval()
    with torch.no_grad():
        fast = demask.optimize(model, (SIGNAL,), cache=False)
        demask.save(fast, tmp_path / "fast.demask")
        loaded = demask.load(tmp_path / "fast.demask")
        for x in (SIGNAL, SIGNAL[:1]):
            wanted = tree_leaves(model(x))
            for result in (fast(x), loaded(x), copy.deepcopy(fast).double()(x.double())):
                for y, want in zip(tree_leaves(result), wanted, strict=True):
                    assert torch.allclose(y.float(), want, 1e-5, 1e-6)


def test_layers_of_any_length() -> None:
    """Of a length that is known only at run time, the layer is in the segment, slices after it."""
    model, length = nn.LSTM(6, 5).eval(), torch.export.Dim("length", min=2, max=64)
    program = capture_program(model, (TOKENS,), None, {"input": {0: length}})
    after = segmented(program, always, always)
    assert len(segments_of(after.graph)) == 1
    with torch.no_grad():
        for x in (TOKENS, torch.cat([TOKENS] * 3)):
            for y, want in zip(ran(after, (x,)), tree_leaves(model(x)), strict=True):
                assert torch.allclose(y, want, 1e-5, 1e-6)
