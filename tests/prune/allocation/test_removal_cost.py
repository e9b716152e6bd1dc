"""Predicted parameters and MACs are those of the network that demask returns, exactly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import architectures
import cifar
import demask
import networks
from demask.prune.allocation.budgets import NetworkContext
from demask.prune.pruner import Pruner
from demask.prune.removal_cost import CountedProducts, RemovalCost
from night import at_night


def resnet20() -> tuple[nn.Module, Tensor]:
    return cifar.ResNet(20).eval(), torch.randn(3, 3, 32, 32)


def of_torchvision(name: str) -> Callable[[], tuple[nn.Module, Tensor]]:
    def build() -> tuple[nn.Module, Tensor]:
        models = networks.torchvision().models
        return models.get_model(name, num_classes=10).eval(), torch.randn(2, 3, 64, 64)

    return build


def bert() -> tuple[nn.Module, Tensor]:
    config = architectures.transformers().BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=56, vocab_size=50
    )
    return architectures.transformers().BertModel(config).eval(), torch.randint(0, 50, (2, 12))


def llama() -> tuple[nn.Module, Tensor]:
    config = architectures.transformers().LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=44,
        vocab_size=50,
        use_cache=False,
    )
    return architectures.transformers().LlamaForCausalLM(config).eval(), torch.randint(0, 50, (2, 12))


CASES = {
    "resnet20": (resnet20, "channel"),
    "bert-head": (bert, "head"),
    "bert-unit": (bert, "unit"),
    "bert-channel": (bert, "channel"),
    "llama-head": (llama, "head"),
    "llama-unit": (llama, "unit"),
    "llama-channel": (llama, "channel"),
    "resnet18": (of_torchvision("resnet18"), "channel"),
    "mobilenet_v2": (of_torchvision("mobilenet_v2"), "channel"),
    "densenet121": (of_torchvision("densenet121"), "channel"),
}


def draw_masks(pruner: Pruner, seed: int) -> dict[str, Tensor]:
    """Other counts of slices in each group, at least one."""
    draw = torch.Generator().manual_seed(seed)
    masks = {}
    for candidates in pruner.candidates:
        share = torch.rand((), generator=draw) * 0.7 + 0.2
        mask = torch.rand(candidates.units, generator=draw) < share
        mask[torch.randint(candidates.units, (), generator=draw)] = True
        masks[candidates.name] = mask
    return masks


BY_DAY = ("resnet20", "bert-unit", "llama-head")  # each structure, and each network


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*BY_DAY, *at_night(*(name for name in CASES if name not in BY_DAY))])
def test_predicted_sizes_are_those_after_demask(name: str) -> None:
    build, structure = CASES[name]
    torch.manual_seed(0)
    model, x = build()
    pruner = Pruner(model, x, structure=structure)
    masks = draw_masks(pruner, 1)
    masked = NetworkContext.of(pruner, 0.5).masked(masks)
    after = demask.demask(masked, (x,), check=False, result="graph").demasked
    sizes = pruner.removal_cost.sizes(masks)
    assert (sizes.parameters, sizes.macs) == (after.after.parameters, after.after.macs)
    whole = pruner.removal_cost.sizes({})
    gone = after.before.parameters - after.after.parameters
    unread = gone - sum(after.removed.values())  # parameters that no call reads
    assert (whole.parameters, whole.macs) == (after.before.parameters - unread, after.before.macs)
    assert whole.macs > sizes.macs
    counts = {name: int(mask.sum()) for name, mask in masks.items()}
    left = {g.name: torch.ones(g.size, dtype=torch.bool) for g in pruner.removal_cost.groups}
    counted = CountedProducts.of(pruner.removal_cost.products, left)
    assert counted.total(counts) == sizes.macs  # slices of one group are alike here
    assert counted.total({}) == whole.macs


def classifiers() -> list[tuple[nn.Module, Tensor]]:
    """Classifiers that read one token of their last layer."""
    transformers = architectures.transformers()
    size = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 40, "num_labels": 3}
    bert = transformers.BertConfig(num_hidden_layers=2, vocab_size=50, **size)
    vit = transformers.ViTConfig(num_hidden_layers=2, image_size=32, patch_size=8, **size)
    return [
        (transformers.BertForSequenceClassification(bert).eval(), torch.randint(0, 50, (2, 12))),
        (transformers.ViTForImageClassification(vit).eval(), torch.randn(2, 3, 32, 32)),
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [0, 1])
def test_tokens_that_nothing_reads_are_in_no_size(number: int) -> None:
    model, x = classifiers()[number]
    dense = demask.demask(model, (x,), check=False, result="graph").demasked
    pruned = Pruner(model, x, structure="head").step(0.5)
    slim = demask.demask(model, (x,), check=False, result="graph").demasked
    assert dense.after.macs < dense.before.macs
    assert (pruned.before.parameters, pruned.before.macs) == (dense.after.parameters, dense.after.macs)
    assert (pruned.after.parameters, pruned.after.macs) == (slim.after.parameters, slim.after.macs)


class Joined(nn.Module):
    """The second layer reads the inputs as well, which always stay."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8, bias=False), nn.Linear(12, 5, bias=False)
        self.third = nn.Linear(5, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([x, torch.relu(self.first(x))], 1)
        return self.third(torch.relu(self.second(joined)))


class Uneven(nn.Module):
    """A product of the first three channels of eight alone: a slice costs as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8, bias=False), nn.Linear(8, 5, bias=False)
        self.third = nn.Linear(5, 2, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.first(x))
        part = y[:, :3]
        return part.unsqueeze(1) @ part.unsqueeze(2), self.third(torch.relu(self.second(y)))


@pytest.mark.parametrize("network", [Joined, Uneven])
@pytest.mark.parametrize("gone", [[0], [7], [1, 2, 6]])
def test_slices_beside_others(network: type[nn.Module], gone: list[int]) -> None:
    torch.manual_seed(0)
    model, x = network().eval(), torch.randn(2, 4)
    pruner = Pruner(model, x)
    weights: dict[str, Tensor] = dict(model.named_parameters())
    with torch.no_grad():
        weights["first.weight"][gone] = 0
        weights["second.weight"][:2] = 0
    after = demask.demask(model, (x,), result="graph").demasked.after
    masks = {name: weights[name] != 0 for name in ("first.weight", "second.weight")}
    sizes = pruner.removal_cost.masked(masks)
    assert (sizes.parameters, sizes.macs) == (after.parameters, after.macs)


def test_the_shared_calls_of_a_coupling_are_counted_once() -> None:
    layer = nn.Linear(6, 6, bias=False)
    model = nn.Sequential(nn.Linear(4, 6), layer, nn.ReLU(), layer, nn.Linear(6, 2)).eval()
    pruner = Pruner(model, torch.randn(3, 4))
    cost = RemovalCost.of(pruner.coupling)
    assert cost.sizes({}).parameters == sum(p.numel() for p in model.parameters())
    assert cost.sizes({}).macs == 3 * (4 * 6 + 2 * 6 * 6 + 6 * 2)
