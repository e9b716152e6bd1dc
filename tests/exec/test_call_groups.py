"""Groups of calls: what they read, write and free, and that they compute what the network does."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.exec import call_groups
from demask.exec.call_groups import (
    Constants,
    bind_inputs,
    consecutive_groups,
    group_calls,
    returned,
    run_calls,
    stored_constants,
    walk,
)
from demask.files.weight_file import WeightFile
from demask.graph.capture.capture import capture
from demask.graph.capture.functionalize import functionalize
from demask.graph.program import Constant, Program

aten = torch.ops.aten


class Branches(nn.Module):
    """Values with several readers, a call with several outputs, calls on constants, results that are none of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6, bias=k == 1) for k in range(3))
        self.shift = nn.Parameter(torch.randn(6))
        self.register_buffer("mask", (torch.rand(6, 6) > 0.5).float())

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        first = torch.relu(self.a(x))
        top, index = first.max(1)
        middle = self.b(first) + y
        weight = torch.neg(self.c.weight * self.mask)
        masked = middle @ weight + top[:, None] * weight[:3]
        left, right = masked.chunk(2, 1)
        late = self.a(middle) + top[:, None] + index[:, None]
        return {"late": late * torch.cat([right, left], 1), "first": first, "y": y, "shift": self.shift}


@pytest.fixture(scope="module")
def network() -> tuple[nn.Module, tuple[Tensor, Tensor], Program]:
    torch.manual_seed(0)
    model, args = Branches().eval(), (torch.randn(3, 6), torch.randn(3, 6))
    program = functionalize(capture(model, args))
    node = next(n for n in program.graph.nodes if n.target is aten.relu.default)
    with program.graph.inserting_after(node):
        program.graph.call_function(aten.abs.default, (node,))  # a call that nothing reads
    return model, args, program


def calls_of(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "call_function"]


def check(result: object, expected: list[Tensor]) -> None:
    """Equal up to the order of sums: values from a file are at other addresses, where products run by other kernels."""
    for ours, theirs in zip(pytree.tree_leaves(result), expected, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_values_live_from_their_call_to_their_last_reader(network, seed: int) -> None:
    model, args, program = network
    draw, calls = random.Random(seed), calls_of(program)
    ends = sorted({len(calls), *draw.sample(range(1, len(calls)), draw.randint(0, 5))})
    cut = [calls[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    groups = group_calls(program, cut)
    results = set(program.graph.output_node().all_input_nodes)
    values = bind_inputs(program, args, {})
    inputs, ran = set(values), list[fx.Node]()

    def watch(call: fx.Node, value: object) -> None:
        rest = calls[len(ran) :]
        read = results.union(*(node.all_input_nodes for node in rest))
        assert call is rest[0] and set(values) == (read & {*inputs, *ran}) | {call}
        ran.append(call)

    for number, (group, members) in enumerate(zip(groups, cut, strict=True)):
        later = results.union(*(node.all_input_nodes for part in cut[number + 1 :] for node in part))
        before = set(values)
        assert group.calls == tuple(members) and set(group.writes) == later & set(members)
        assert set(group.reads) <= before and group.last_reads == set(group.reads) - later
        run_calls(group, values, lambda name: program.constants[name].tensor, watch)
        assert set(values) == later & {*inputs, *ran}
        assert set(group.constants) == {
            str(source.target) for node in members for source in node.all_input_nodes if source.op == "get_attr"
        }
    with torch.no_grad():
        expected = pytree.tree_leaves(model(*args))
    ours = returned(program, values, lambda name: program.constants[name].tensor)
    assert list(ours) == ["late", "first", "y", "shift"] and all(map(torch.equal, pytree.tree_leaves(ours), expected))


def test_calls_on_constants_run_in_each_group_that_reads_them(network) -> None:
    _, args, program = network
    constant: list[fx.Node] = []
    for node in calls_of(program):
        if all(source.op == "get_attr" or source in constant for source in node.all_input_nodes):
            constant.append(node)
    members = [[node] for node in calls_of(program) if node not in constant]
    groups = group_calls(program, members, set(constant))
    values, ran = bind_inputs(program, args, {}), list[fx.Node]()
    for group in groups:
        run_calls(group, values, lambda name: program.constants[name].tensor, lambda call, _: ran.append(call))
        assert not {*group.reads, *group.writes, *values} & set(constant)
    assert [(node.target, ran.count(node)) for node in constant[:2]] == [(aten.mul.Tensor, 2), (aten.neg.default, 2)]


@pytest.mark.parametrize("count", [1, 3])
def test_any_budget_gives_the_same_results(network, count: int) -> None:
    model, args, program = network
    constants, inputs = Constants(program), [bind_inputs(program, args, {})] * count
    (together,) = consecutive_groups(constants)
    total = sum(map(constants.nbytes, together.constants))
    with pytest.raises(BadInput, match="pass memory=") as caught:
        walk(constants, inputs, lambda *_: None, budget=1)
    least = int(str(caught.value).rpartition("=")[2])
    with pytest.raises(BadInput, match=f"of {least:,} bytes or more"):
        consecutive_groups(constants, least - 1)
    with torch.no_grad():
        expected = pytree.tree_leaves(model(*args))
    for budget in (least, least + 100, total, None):
        seen = list[tuple[int, fx.Node]]()
        run = walk(constants, inputs, lambda k, node, _, seen=seen: seen.append((k, node)), budget=budget, outputs=True)
        for k in range(count):
            assert [node for number, node in seen if number == k] == calls_of(program)
        assert run.peak_weight_bytes <= (budget or total) and run.boundary_bytes <= (budget or 0)
        assert (run.groups > 1) == (budget in (least, least + 100))
        for result in run.outputs:
            check(result, expected)
    assert together.calls == tuple(calls_of(program))


def test_values_beyond_the_budget_are_on_disk_until_they_are_read(network, monkeypatch) -> None:
    """A file for each input at a time: those that were read are removed."""
    _, args, program = network
    constants, inputs = Constants(program), [bind_inputs(program, args, {})] * 3
    counts = []

    def load(path: Path) -> dict[str, Tensor]:
        counts.append(len(list(path.parent.iterdir())))
        return load_file(path)

    monkeypatch.setattr(call_groups, "load_file", load)
    run = walk(constants, inputs, lambda *_: None, budget=288, outputs=True)
    assert run.spilled == max(counts) == 3 and counts[-1] == 1
    (expected,) = walk(constants, inputs[:1], lambda *_: None, outputs=True).outputs
    for result in run.outputs:
        check(result, pytree.tree_leaves(expected))


def test_constants_are_looked_up_by_any_of_their_names(network) -> None:
    tied = replace(network[2], constants={"key": Constant(torch.ones(1), "a", True, aliases=("a", "b"))})
    for name in ("key", "a", "b"):
        assert stored_constants(tied, {"other": 8, name: 7}) == {"key": 7}
    assert stored_constants(tied, {"other": 8}) == {}


def test_constants_in_a_file_are_read_with_their_axes_in_order(network, tmp_path) -> None:
    program, order = network[2], (1, 2, 0)
    tensor = torch.randn(2, 3, 5)
    file = WeightFile.write(tmp_path / "w.safetensors", {"w": tensor.permute(order)})
    constants = Constants(program, file, {"mask": (file.tensors["w"], order)})
    assert torch.equal(constants.read("mask"), tensor) and constants.nbytes("mask") == tensor.nbytes
    assert constants.read("shift") is program.constants["shift"].tensor and constants.nbytes("shift") == 24
