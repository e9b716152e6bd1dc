"""Recorded calls of modules from ONNX: they compute what running node by node does, and follow the
weights, the sizes and the mode of a call."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from onnx import helper
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import demask
from demask.files.onnx import module
from demask.files.onnx.module import OnnxModule, OnnxRecording
from onnx_files import constant, layers, model, node, value, weights

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


def network(tmp_path, graph: Any) -> OnnxModule:
    path = tmp_path / "net.onnx"
    path.write_bytes(graph.SerializeToString())
    return demask.from_onnx(path)


def plainly(net: OnnxModule, *inputs: Tensor) -> Tensor:
    """Node by node."""
    (made,) = net._run(net.plan, inputs, {})
    return net._tensor(made)


def recordings(net: OnnxModule) -> list[OnnxRecording | None]:
    return list(net.recordings.by_key.values())


def is_replayed(net: OnnxModule, x: Tensor) -> bool:
    """Whether a second call is, bit for bit what the nodes make."""
    expected = plainly(net, x)
    assert torch.equal(net(x), expected)
    calls = []
    net._run, run = lambda *a: calls.append(1) or run(*a), net._run
    try:
        assert torch.equal(net(x), expected)
    finally:
        del net._run
    return not calls


def test_a_second_call_makes_no_arithmetic_on_sizes(tmp_path):
    net = network(tmp_path, layers())
    assert is_replayed(net, X)
    (made,) = recordings(net)
    assert len(made.steps) == 4 < len(net.plan.steps)  # Gemm, Relu, Reshape; Shape is compared
    assert is_replayed(net, X[:2])
    assert len(recordings(net)) == 2


def changed_in_place(net):
    with torch.no_grad():
        net.w.mul_(2)


def replaced(net):
    net.w = nn.Parameter(net.w.detach() + 1)


def pruned(net):
    prune.random_unstructured(net, "w", 0.5)


class Doubled(nn.Module):
    def forward(self, w):
        return 2 * w


def parametrized(net):
    parametrize.register_parametrization(net, "w", Doubled())


def in_double(net):
    net.double()


def loaded(net):
    net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()})


@pytest.mark.parametrize("change", [changed_in_place, replaced, pruned, parametrized, in_double, loaded])
def test_weights_that_change_are_followed(tmp_path, change):
    net = network(tmp_path, layers())
    before = net(X)
    change(net)
    x = X.to(net.w.dtype)
    with torch.no_grad():
        assert torch.equal(net(x), plainly(net, x))
        assert torch.equal(net(x), plainly(net, x))
    assert not torch.equal(net(x).float(), before)


def test_gradients_and_modes(tmp_path):
    net = network(tmp_path, layers())
    with torch.inference_mode():
        first = net(X)
    for _ in range(2):
        net.zero_grad()
        net(X).square().sum().backward()
        made = net.w.grad.clone()
        net.zero_grad()
        plainly(net, X).square().sum().backward()
        assert torch.equal(made, net.w.grad)
    assert torch.equal(first, net(X).detach())
    torch.testing.assert_close(torch.vmap(net)(X[None])[0], net(X))
    assert torch.export.export(net, (X,), strict=False)


def test_copies_and_pickles_begin_anew(tmp_path):
    net = network(tmp_path, layers())
    net(X)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert not recordings(twin)
        assert torch.equal(twin(X), net(X))


def test_sizes_that_depend_on_values_are_compared(tmp_path):
    """The rows above 0, counted: as many as the values say."""
    graph = model(
        [
            node("ReduceMax", ["x", "one"], ["m"], keepdims=0),
            node("Greater", ["m", "zero"], ["g"]),
            node("Compress", ["x", "g"], ["c"], axis=0),
            node("Shape", ["c"], ["s"]),
            node("ConstantOfShape", ["s"], ["o"]),
            node("Add", ["c", "o"], ["y"]),
        ],
        [constant("one", np.array([1])), constant("zero", np.float32(0))],
    )
    net = network(tmp_path, graph)
    x = X.abs()
    assert is_replayed(net, x)
    less = torch.cat([x[:1], -x[1:]])
    for inputs in (less, x, less):
        assert torch.equal(net(inputs), plainly(net, inputs))
    assert len(net(less)) == 1


def test_a_branch_that_a_size_chooses(tmp_path):
    def branch(name, op):
        return helper.make_graph([node(op, ["x"], [name])], name, [], [value(name, sizes=None)])

    graph = model(
        [
            node("Shape", ["x"], ["s"]),
            node("Gather", ["s", "zero"], ["n"], axis=0),
            node("Greater", ["n", "two"], ["more"]),
            node("If", ["more"], ["h"], then_branch=branch("t", "Neg"), else_branch=branch("e", "Abs")),
            node("Add", ["h", "x"], ["y"]),
        ],
        [constant("zero", np.array(0)), constant("two", np.array(2))],
    )
    net = network(tmp_path, graph)
    assert is_replayed(net, X)
    assert is_replayed(net, X[:2])
    assert not net(X).any()


def test_a_branch_that_a_value_chooses_is_not_recorded(tmp_path):
    def branch(name, op):
        return helper.make_graph([node(op, ["x"], [name])], name, [], [value(name, sizes=None)])

    graph = model(
        [
            node("ReduceSum", ["x"], ["r"], keepdims=0),
            node("Greater", ["r", "zero"], ["more"]),
            node("If", ["more"], ["y"], then_branch=branch("t", "Neg"), else_branch=branch("e", "Abs")),
        ],
        [constant("zero", np.float32(0))],
    )
    net = network(tmp_path, graph)
    for x in (X.abs(), -X.abs()):
        assert torch.equal(net(x), -x.abs() if x.sum() > 0 else x.abs())
    assert recordings(net) == [None]


def test_numbers_taken_from_a_tensor_are_not_recorded(tmp_path):
    """How often to repeat is computed from the input."""
    graph = model(
        [
            node("ReduceMax", ["x"], ["m"], keepdims=0),
            node("Cast", ["m"], ["k"], to=7),
            node("Unsqueeze", ["k", "axis"], ["k1"]),
            node("Concat", ["k1", "one"], ["n"], axis=0),
            node("Tile", ["x", "n"], ["y"]),
        ],
        [constant("axis", np.array([0])), constant("one", np.array([1]))],
    )
    net = network(tmp_path, graph)
    for top in (1, 3, 2):
        assert net(torch.full((1, 6), float(top))).shape == (top, 6)


def test_a_caller_may_write_into_outputs(tmp_path):
    """A constant made from sizes is the output, or a view of it."""
    graph = model(
        [node("Shape", ["x"], ["s"]), node("Cast", ["s"], ["f"], to=1), node("Unsqueeze", ["f", "zero"], ["y"])],
        [constant("zero", np.array([0]))],
    )
    net = network(tmp_path, graph)
    for _ in range(3):
        made = net(X)
        assert made.tolist() == [[3, 6]]
        made.zero_()


def test_recordings_are_few(tmp_path):
    net = network(tmp_path, layers())
    sizes = [torch.randn(n, 6) for n in range(1, module.MOST + 6)]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(net, sizes * 3))
    assert all(torch.equal(a, plainly(net, x)) for a, x in zip(made, sizes * 3, strict=True))
    assert len(recordings(net)) == module.MOST


def test_what_fails_names_its_node(tmp_path):
    net = network(tmp_path, layers())
    net(X)
    net.w = nn.Parameter(torch.randn(8, 5))
    with pytest.raises(demask.errors.BadInput, match="gemm"):
        net(X)


def test_random_numbers_are_drawn_anew(tmp_path):
    graph = model(
        [node("RandomNormalLike", ["x"], ["r"]), node("Add", ["x", "r"], ["y"])], [constant("w", weights(2, 2))]
    )
    net = network(tmp_path, graph)
    assert len({net(X).sum().item() for _ in range(4)}) == 4
