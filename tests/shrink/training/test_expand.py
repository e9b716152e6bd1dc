"""expand(): the original network with the small one's weights computes what the small one does."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize, prune

import demask
import micro_recurrent  # noqa: F401  (their networks join MICROS)
import micro_sequences  # noqa: F401
from demask.graph.result.demasked_module import build
from demask.graph.result.origin import get_origin
from demask.ops import TABLE
from demask.shrink.pipeline import capture_program, shrink_program
from demask.shrink.training.pieces import NetworkTensors
from demask.tune.optimized_module import Optimized
from micro import MICROS, Micro
from test_micro import difference, made

# One tensor cut in two ways, trained differently; constants computed from weights that are trained.
REFUSED = {"reused_module": "or it is tied to a tensor", "constants_excited_by_the_image": "computes something else"}


def nudge(slim: nn.Module) -> None:
    """Change all weights that are pieces of the original's, as training would."""
    pieces = get_origin(slim).pieces
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in NetworkTensors.of(slim).parameters.items():
            if name in pieces and pieces[name].is_slice:
                step = torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
                parameter.add_(0.1 * step * (parameter != 0))


@pytest.mark.sampled(64)
@pytest.mark.parametrize("case", MICROS, ids=lambda c: c.name)
@pytest.mark.parametrize("result", ["auto", "graph"])
def test_a_trained_network_expands(case: Micro, result: str) -> None:
    model, args = made(case)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    slim = demask.demask(model, args, result=result)
    nudge(slim)
    if case.name in REFUSED and isinstance(slim, fx.GraphModule):
        with pytest.raises(demask.BadInput, match=REFUSED[case.name]):
            demask.expand(slim)
        return
    if case.name == "uneven_groups" and result == "auto":  # several groups became one
        with pytest.raises(demask.BadInput, match="is no slice in the small network"):
            demask.expand(slim)
        return
    large = demask.expand(slim)  # also one with kernels that carry constants of removed channels
    assert type(large) is type(model)
    state = large.state_dict()
    assert [*state] == [*before]
    assert all(state[name].shape == tensor.shape for name, tensor in before.items())
    assert difference(large(*args), slim(*args)) < 1e-9
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_original_cannot_compute_is_refused(name: str) -> None:
    [case] = [case for case in MICROS if case.name == name]
    test_a_trained_network_expands(case, "graph")


def two_layers() -> nn.Sequential:
    """Some units of the first layer masked by torch.nn.utils.prune."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    keep = torch.ones(7, dtype=torch.double).index_fill(0, torch.tensor([0, 3]), 0)
    prune.custom_from_mask(net[0], "weight", keep[:, None].expand(7, 4))
    prune.custom_from_mask(net[0], "bias", keep)
    return net


def inputs() -> tuple[Tensor]:
    return (torch.randn(5, 4, generator=torch.Generator().manual_seed(2)).double(),)


def slimmed(net: nn.Module, **options: Any) -> nn.Module:
    return demask.demask(net, inputs(), **options)


def test_masks_are_as_they_were_and_weights_under_them() -> None:
    net = two_layers()
    slim = slimmed(net)
    nudge(slim)
    large = demask.expand(slim)
    assert prune.is_pruned(large[0])
    assert torch.equal(large[0].weight_mask, net[0].weight_mask)
    removed, rest = torch.tensor([0, 3]), torch.tensor([1, 2, 4, 5, 6])
    assert torch.equal(large[0].weight_orig[removed], net[0].weight_orig[removed])
    assert torch.equal(large[0].weight_orig[rest], slim[0].weight)
    assert torch.equal(large[2].weight[:, removed], net[2].weight[:, removed])
    assert torch.equal(large[2].weight[:, rest], slim[2].weight)
    torch.testing.assert_close(large(*inputs()), slim(*inputs()), rtol=1e-12, atol=1e-12)
    large(*inputs()).sum().backward()
    assert not large[0].weight_orig.grad[removed].any()
    again = slimmed(large)
    assert torch.equal(again[0].weight, slim[0].weight)


def test_masks_passed_to_demask_are_zeros() -> None:
    net = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    mask = torch.ones(7).index_fill(0, torch.tensor([0, 3]), 0)
    slim = slimmed(net, masks={"0.weight": mask[:, None], "0.bias": mask})
    nudge(slim)
    large = demask.expand(slim)
    assert not large[0].weight[[0, 3]].any()
    torch.testing.assert_close(large(*inputs()), slim(*inputs()), rtol=1e-12, atol=1e-12)


def test_weights_trained_under_a_mask_are_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    keep = torch.ones(3, 7, dtype=torch.double)
    keep[0, :4] = 0  # no slice: zeros that remain
    prune.custom_from_mask(net[2], "weight", keep)
    slim = slimmed(net)
    nudge(slim)
    torch.testing.assert_close(demask.expand(slim)(*inputs()), slim(*inputs()))
    with torch.no_grad():
        slim[2].weight += 0.1
    with pytest.raises(demask.BadInput, match=r"its masks or parametrizations compute others"):
        demask.expand(slim)


def border() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 5, 3, padding=1, bias=False)).double()
    with torch.no_grad():
        net[0].weight[:2] = 0  # their biases are constants in a padded window
    return net, torch.randn(2, 3, 6, 6, dtype=torch.double)


def test_a_trained_border_map_is_refused() -> None:
    net, x = border()
    slim = demask.demask(net, (x,), result="graph")
    nudge(slim)
    torch.testing.assert_close(demask.expand(slim)(x), slim(x), rtol=1e-10, atol=1e-10)
    [name] = [name for name, _ in slim.named_parameters() if "border" in name]
    with torch.no_grad():
        slim.get_parameter(name)[0] += 1
    with pytest.raises(demask.BadInput, match=f"{name} was trained, and the original has no place"):
        demask.expand(slim)


def test_an_optimized_network_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval(), torch.ones(3, 4)
    with torch.no_grad():
        model[0].weight[:4], model[0].bias[:4] = 0, 0
    program, record = shrink_program(capture_program(model, (x,), None, None), TABLE)
    fast = build(program, record, Optimized)
    with pytest.raises(demask.BadInput, match="is for inference"):
        demask.expand(fast, model)


def test_it_needs_the_original() -> None:
    net = two_layers()
    slim = slimmed(net)
    nudge(slim)
    loaded = pickle.loads(pickle.dumps(slim))
    with pytest.raises(demask.BadInput, match="pass model=, the original"):
        demask.expand(loaded)
    large = demask.expand(loaded, net)
    torch.testing.assert_close(large(*inputs()), slim(*inputs()), rtol=1e-12, atol=1e-12)
    del net
    gc.collect()
    with pytest.raises(demask.BadInput, match="does not exist any more"):
        demask.expand(slim)
    with pytest.raises(demask.BadInput, match="expected the network that was demasked"):
        demask.expand(slim, nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    with pytest.raises(demask.BadInput, match=r"expected an nn\.Module"):
        demask.expand(slim, "net.pt2")
    with pytest.raises(demask.BadInput, match="without the attribute `demasked`"):
        demask.expand(large)


def test_constants_that_a_file_does_not_tell_are_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    with torch.no_grad():
        net[0].weight[:2] = 0
    slim = slimmed(net)
    loaded = pickle.loads(pickle.dumps(slim))
    for large in (demask.expand(slim), demask.expand(loaded, net)):
        torch.testing.assert_close(large(*inputs()), slim(*inputs()))
    with torch.no_grad():
        loaded[0].weight += 0.1
    with pytest.raises(demask.BadInput, match="computes something else"):
        demask.expand(loaded, net)


def weight_normed() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    nn.utils.parametrizations.weight_norm(net[0])
    with torch.no_grad():
        net[0].parametrizations.weight.original0[:2] = 0
        net[0].bias[:2] = 0
    return net


class Doubled(nn.Module):
    """A parametrization without an inverse."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def doubled() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    with torch.no_grad():
        net[0].weight[:2] = 0
        net[0].bias[:2] = 0
    parametrize.register_parametrization(net[0], "weight", Doubled())
    return net


def test_plain_weights_of_parametrizations_need_an_inverse() -> None:
    slim = demask.demask(net := doubled(), inputs(), result="graph")
    nudge(slim)
    with pytest.raises(demask.BadInput, match="cannot be set"):
        demask.expand(slim, net)


@pytest.mark.parametrize("make", [weight_normed, doubled])
def test_parametrizations_expand(make: Callable[[], nn.Module]) -> None:
    slim = demask.demask(net := make(), inputs(), result="class")
    nudge(slim)
    assert parametrize.is_parametrized(slim[0], "weight") and slim[0].out_features == 5
    large = demask.expand(slim)
    assert parametrize.is_parametrized(large[0], "weight")
    assert large.state_dict().keys() == net.state_dict().keys()
    torch.testing.assert_close(large(*inputs()), slim(*inputs()), rtol=1e-10, atol=1e-10)
