"""What demask() keeps in memory: no copies of weights, no masks as large as weights."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import demask
from demask import judge
from demask.facts.analysis import Analysis
from demask.graph.example_runs import run_seeded
from demask.graph.module_copy import structural_copy
from demask.graph.program import copy_tensors
from demask.ops import TABLE
from demask.shrink.own_class import build
from demask.shrink.pipeline import capture_program, shrink_program


class Residual(nn.Module):
    """Two layers whose masks do not agree, so that the class keeps zeros that a graph does not."""

    def __init__(self):
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.rest, self.last = nn.RNN(5, 3, batch_first=True), nn.Linear(5, 11)

    def forward(self, numbers):
        x = self.table(numbers)
        x = x + self.second(torch.relu(self.first(x)))
        return self.last(x), self.rest(x)[0]


@pytest.fixture
def residual():
    torch.manual_seed(0)
    network = Residual().eval()
    with torch.no_grad():
        for tensor in (network.first.weight, network.first.bias):
            tensor[:2] = 0
        network.second.weight[3], network.second.bias[3] = 0, 0
    return network, (torch.tensor([[1, 2, 3, 6]]),)


def memories(tensors):
    return {t.untyped_storage().data_ptr() for t in tensors if t.numel()}


def tensors_of(network):
    return [*network.parameters(), *network.buffers()]


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("options", [{"result": "class"}, {"result": "graph"}, {"modules": ["second", "first"]}])
def test_a_result_has_memory_of_its_own(residual, options, zeros):
    network, args = residual
    model = network if zeros else Residual().eval()
    before = copy.deepcopy(model.state_dict())
    slim = demask.demask(model, args, **options)
    assert not memories(tensors_of(model)) & memories(tensors_of(slim))
    with torch.no_grad():
        for tensor in tensors_of(slim):
            tensor.zero_()
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


@pytest.fixture
def chain():
    network = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 4)).eval()
    with torch.no_grad():
        network[0].weight[:2], network[0].bias[:2] = 0, 0
    return network, capture_program(network, (torch.randn(2, 3),), None, None)


def test_a_program_shares_what_stays_whole(chain):
    network, program = chain
    small, _ = shrink_program(program, TABLE)
    whole = [network[2].bias, network[4].weight, network[4].bias]
    shared = memories(c.tensor for c in small.constants.values()) & memories(network.parameters())
    assert shared == memories(whole)


def test_masks_of_weights_vary_along_one_axis(chain):
    analysis = Analysis(chain[1], TABLE)
    needs, facts = analysis.needed, analysis.known
    masks = [*needs.value.values(), *needs.edge.values(), *needs.live.values()]
    masks += [fact.zero for fact in facts.values()]
    masks += [mask for fact in facts.values() for mask in fact._over.values()]
    assert max(sum(n > 1 for n in mask.shape) for mask in masks) == 1
    assert any(mask.shape == (1, 5) for mask in masks)
    assert any(mask.shape == (5, 1) for mask in masks)


def test_a_network_that_is_not_the_class_is_freed(residual, monkeypatch):
    """What a proof refuses would be in memory, next to the network that is returned."""
    network, args = residual
    built, resize = [], build.resize

    def watched(*proof):
        own = resize(*proof)
        built.append(weakref.ref(own))
        return own

    monkeypatch.setattr(build, "resize", watched)
    gc.disable()
    try:
        slim = demask.demask(network, args, result="class")
        assert [own() is slim for own in built[-1:]] == [True]
        assert len(built) > 1
        assert not any(own() for own in built[:-1])
    finally:
        gc.enable()


def test_networks_in_double_are_freed(residual, monkeypatch):
    """One of twice the size at a time, even where the garbage collector does not run."""
    network, args = residual
    held, to_wide = [], judge.to_wide

    def watched(wide):
        alive = [t for refs in held for ref in refs if (t := ref()) is not None]
        assert not [t for t in alive if t.device.type != "meta"]
        held.append([weakref.ref(t) for t in tensors_of(to_wide(wide))])
        return wide

    monkeypatch.setattr(judge, "to_wide", watched)
    graph = demask.demask(network, args, result="graph")
    draw = judge.Draw("the example", (args, {}))
    expected = [(draw, run_seeded(network, draw.inputs))]
    copies = [partial(structural_copy, graph, share=False)] * 2
    explain = judge.InFloat64(copies[0], expected, copies[1])
    gc.disable()
    try:
        explain(0, judge.pair_up(expected[0][1], expected[0][1]))
        assert len(held) == 2
    finally:
        gc.enable()


def test_empty_tensors_are_not_tied_by_a_copy(residual):
    """They have no memory, and so the same address."""
    network, args = residual
    program = capture_program(network, args, None, None)
    first, second = list(program.constants.values())[:2]
    constants = {c.name: c.moved(lambda _: torch.empty(0, 5)) for c in (first, second)}
    one, two = copy_tensors(program.with_graph(program.graph, constants)).constants.values()
    assert one.tensor is not two.tensor


def test_views_of_one_tensor_are_not_tied_by_a_copy(chain):
    program, tensor = chain[1], torch.randn(2, 3)
    first, second, third = list(program.constants.values())[:3]
    constants = {
        c.name: c.moved(lambda _, t=t: t) for c, t in ((first, tensor), (second, tensor.view(6)), (third, tensor))
    }
    copied = copy_tensors(program.with_graph(program.graph, constants), []).constants.values()
    one, two, three = (c.tensor for c in copied)
    assert one is three is tensor
    assert torch.equal(two, tensor.flatten())
    assert not memories([one]) & memories([two])


def test_modules_that_stay_have_their_own_tensors_everywhere(residual):
    """A recurrent layer has its weights in a list, too."""
    network, args = residual
    slim = demask.demask(network, args, modules=["second"])
    assert slim.second is not network.second
    assert all(a is b for a, b in zip(slim.rest._flat_weights, slim.rest.parameters(), strict=True))
    assert not memories(slim.rest._flat_weights) & memories(network.rest.parameters())
