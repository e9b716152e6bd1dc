"""carry(): steps of the small network are those of the masked one, for all that training uses."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import demask
import test_tied
from architectures import transformers
from demask.graph.result.origin import get_origin
from night import at_night

Batch = tuple[Any, Tensor]
ROUNDING = 1e-9  # float64: sums of a few hundred terms in another order, over ten steps


class Block(nn.Module):
    """Two convolutions with norms, added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.n1 = nn.BatchNorm2d(channels)
        self.c2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.n2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.n2(self.c2(F.relu(self.n1(self.c1(x))))))


class Residual(nn.Module):
    """Images of 3 channels to 5 classes, over two residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 7, 3, padding=1), nn.BatchNorm2d(7)
        self.blocks = nn.Sequential(Block(7), Block(7))
        self.fc = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(F.relu(self.norm(self.stem(x)))).mean((2, 3)))


def mask(module: nn.Module, positions: Iterable[int], axis: int = 0, names: Any = None) -> None:
    """Mask slices of a module's tensors with torch.nn.utils.prune."""
    for name in names or [n for n, p in module.named_parameters(recurse=False) if p is not None]:
        ones = torch.ones_like(getattr(module, name))
        keep = ones.index_fill(axis, torch.tensor(list(positions)), 0)
        prune.custom_from_mask(module, name, keep)


def residual() -> Residual:
    """A network in train mode with three of seven inner channels of each block masked."""
    torch.manual_seed(0)
    net = Residual().double().train()
    for block in net.blocks:
        mask(block.c1, (0, 2, 5))
        mask(block.n1, (0, 2, 5))
    return net


def images(steps: int, seed: int = 1) -> list[Batch]:
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(4, 3, 6, 6, generator=draw).double(), torch.randint(0, 5, (4,), generator=draw))
        for _ in range(steps)
    ]


def train(
    net: nn.Module, optimizer: Any, batches: Iterable[Batch], each: Callable[[], object] = lambda: None
) -> list[float]:
    """One step per batch; the losses. each: is called after each step."""
    losses = []
    for x, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), labels)
        loss.backward()
        optimizer.step()
        each()
        losses.append(loss.item())
    return losses


def twin(net: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
    """A network of the same class and masks with the same values; deepcopy does not copy masked
    ones."""
    other = make()
    other.load_state_dict(net.state_dict())
    return other


def run_both(
    make: Callable[[], nn.Module],
    batches: list[Batch],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    **call: Any,
) -> tuple[list[float], list[float], nn.Module, nn.Module]:
    """Losses after half of the steps: of the masked network, and of the small one."""
    half = len(batches) // 2
    masked, net = make(), make()
    whole, optimizer = make_optimizer(masked.parameters()), make_optimizer(net.parameters())
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.7) for o in (whole, optimizer)]
    expected = train(masked, whole, batches, schedules[0].step)
    train(net, optimizer, batches[:half], schedules[1].step)
    slim = demask.demask(net, **(call or {"args": (batches[0][0],)}))
    assert demask.carry(slim, optimizer) is optimizer
    assert slim.training
    assert sum(p.numel() for p in slim.parameters()) < sum(p.numel() for p in net.parameters())
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == [id(p) for p in slim.parameters()]
    assert schedules[1].optimizer is optimizer
    return expected[half:], train(slim, optimizer, batches[half:], schedules[1].step), masked, slim


def assert_close(expected: list[float], actual: list[float], limit: float = ROUNDING) -> None:
    torch.testing.assert_close(
        torch.tensor(actual, dtype=torch.double), torch.tensor(expected, dtype=torch.double), rtol=limit, atol=limit
    )


# Without Rprop: signs of gradients that are 0 up to rounding (a bias before a norm) are random.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "foreach": lambda p: torch.optim.Adam(p, 1e-2, foreach=True, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, 1e-2),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_where_it_was(name: str) -> None:
    expected, actual, masked, slim = run_both(residual, images(10), OPTIMIZERS[name])
    assert_close(expected, actual)
    x = images(1, seed=5)[0][0]
    torch.testing.assert_close(slim.eval()(x), masked.eval()(x), rtol=ROUNDING, atol=ROUNDING)


def test_adafactor_goes_on_approximately() -> None:
    """Its steps depend on the mean square of full tensors, which have fewer zeros now."""
    expected, actual, _, _ = run_both(residual, images(10), lambda p: torch.optim.Adafactor(p, 1e-3))
    assert_close(expected, actual, 1e-3)


@pytest.mark.parametrize("name", ["sgd", "adamw", "rmsprop"])
def test_a_new_optimizer_does_something_else(name: str) -> None:
    batches = images(10)
    masked, net = residual(), residual()
    expected = train(masked, OPTIMIZERS[name](masked.parameters()), batches)[5:]
    train(net, OPTIMIZERS[name](net.parameters()), batches[:5])
    slim = demask.demask(net, (batches[0][0],))
    other = train(slim, OPTIMIZERS[name](slim.parameters()), batches[5:])
    assert abs(other[0] - expected[0]) < ROUNDING  # the network is the same
    assert max(abs(a - b) for a, b in zip(other, expected, strict=True)) > 1e-3


def single_weights() -> Residual:
    """Single weights masked, too, one of them after a step that gave it a momentum."""
    net = residual()
    for block in net.blocks:
        keep = torch.ones_like(block.c2.weight)
        keep.view(-1)[::3] = 0
        prune.custom_from_mask(block.c2, "weight", keep)
    return net


@pytest.mark.parametrize("result", ["class", "graph"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_weights_that_stay_under_a_mask_stay_zero(name: str, result: str) -> None:
    batches = images(10)
    call = {"args": (batches[0][0],), "result": result}
    expected, actual, masked, slim = run_both(single_weights, batches, OPTIMIZERS[name], **call)
    assert_close(expected, actual)
    if result == "class":
        assert torch.equal(slim.blocks[0].c2.weight == 0, masked.blocks[0].c2.weight[:, [1, 3, 4, 6]] == 0)


def carriers() -> nn.Sequential:
    """Masked convolutions whose norms make constants, which a border map or a channel that stays carries."""
    torch.manual_seed(0)
    net = nn.Sequential(*(m for c in (3, 8) for m in (nn.Conv2d(c, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU())))
    net = nn.Sequential(*net, nn.Conv2d(8, 5, 1), nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten()).double()
    for norm in (net[1], net[4]):
        nn.init.normal_(norm.bias)
    for k in (0, 3):
        mask(net[k], (0, 2, 5, 6), names=["weight"])
    return net


def test_a_channel_that_carries_constants_stays_masked() -> None:
    """A norm divides it by the root of its epsilon: weights that grow there moved the loss by a third."""
    batches = images(1) * 20
    net = carriers()
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    train(net, optimizer, batches)
    net.eval()
    slim = demask.demask(net, (batches[0][0],), result="class")
    assert slim[0].weight.shape[0] > 4
    demask.carry(slim, optimizer)
    train(slim.train(), optimizer, batches[:4])
    assert sorted((row == 0).all().item() for row in slim[0].weight) == [False] * 4 + [True] * (len(slim[0].weight) - 4)


def uneven() -> Residual:
    """Other channels masked in the operands of an add: a graph adds them at their places."""
    torch.manual_seed(0)
    net = Residual().double().train()
    mask(net.norm, (1, 2, 3))
    mask(net.blocks[0].n2, (0, 2))
    return net


def test_graphs_go_on_too() -> None:
    batches = images(8)
    call = {"args": (batches[0][0],), "result": "graph"}
    expected, actual, _, _ = run_both(uneven, batches, OPTIMIZERS["adamw"], **call)
    assert_close(expected, actual)


class Text(nn.Module):
    """A model of transformers that returns logits of the last token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(tokens).logits
        return logits if logits.ndim == 2 else logits[:, -1]


def bert() -> nn.Module:
    hub = transformers()
    torch.manual_seed(0)
    config = hub.BertConfig(
        vocab_size=31,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=20,
        max_position_embeddings=12,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    net = Text(hub.BertForSequenceClassification(config)).double().train()
    for layer in net.model.bert.encoder.layer:
        mask(layer.intermediate.dense, (0, 3, 7))
        mask(layer.attention.self.value, range(4, 8))
    return net


def llama() -> nn.Module:
    hub = transformers()
    torch.manual_seed(0)
    config = hub.LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=20,
        max_position_embeddings=12,
        tie_word_embeddings=True,
        use_cache=False,
    )
    net = Text(hub.LlamaForCausalLM(config)).double().train()
    for layer in net.model.model.layers:
        mask(layer.mlp.up_proj, (0, 3, 7))
        mask(layer.self_attn.v_proj, range(4))
    return net


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [llama, *at_night(bert)])
def test_language_models_go_on(make: Callable[[], nn.Module]) -> None:
    try:
        transformers()
    except ImportError as error:
        pytest.skip(f"transformers is not installed: {error}")
    draw = torch.Generator().manual_seed(1)
    batches = [
        (torch.randint(0, 31, (3, 6), generator=draw), torch.randint(0, 5, (3,), generator=draw)) for _ in range(6)
    ]
    expected, actual, _, slim = run_both(make, batches, OPTIMIZERS["adamw"])
    assert_close(expected, actual)
    assert slim.demasked.form == "class"


class Positions(nn.Module):
    """Learned positions added to a sequence of up to 9 rows, of which 4 are read."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(9, 4), nn.Linear(4, 6)
        self.last = nn.Linear(6, 5)
        self.register_buffer("places", torch.arange(9))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(self.places[2:6]) + x[:, None]
        return self.last(torch.tanh(self.first(rows))).mean(1)


def positions() -> Positions:
    torch.manual_seed(0)
    net = Positions().double()
    mask(net.first, (0, 4))
    return net


@pytest.mark.parametrize("result", ["class", "graph"])
def test_rows_of_a_table_go_on(result: str) -> None:
    call = {"args": (rows(1)[0][0],), "result": result}
    expected, actual, _, slim = run_both(positions, rows(6), OPTIMIZERS["sgd"], **call)
    assert_close(expected, actual)
    table = slim.table.weight
    assert table.numel() == (16 if result == "graph" else 36)


def units() -> nn.Sequential:
    """A network of three linear layers, some units of two of them masked."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 5))
    net.double()
    mask(net[0], (0, 4, 5))
    mask(net[2], (7, 1))
    return net


def rows(steps: int, seed: int = 2) -> list[Batch]:
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(6, 4, generator=draw).double(), torch.randint(0, 5, (6,), generator=draw)) for _ in range(steps)
    ]


def slimmed(net: nn.Module, **options: Any) -> nn.Module:
    return demask.demask(net, (rows(1)[0][0],), **options)


def test_groups_keep_their_settings_and_names() -> None:
    net, slim = units(), None
    named = dict(net.named_parameters())
    groups = [
        {"params": [(n, p) for n, p in named.items() if "weight" in n], "weight_decay": 0.1, "mine": "text"},
        {"params": [(n, p) for n, p in named.items() if "bias" in n], "lr": 0.3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    train(net, optimizer, rows(2), schedule.step)
    before = [{k: v for k, v in g.items() if "param" not in k} for g in optimizer.param_groups]
    demask.carry(slim := slimmed(net), optimizer)
    after = [{k: v for k, v in g.items() if "param" not in k} for g in optimizer.param_groups]
    assert before == after
    own = dict(slim.named_parameters())
    for group, kind in zip(optimizer.param_groups, ("weight", "bias"), strict=True):
        names = [name for name in own if kind in name]
        assert group["param_names"] == names
        assert [id(p) for p in group["params"]] == [id(own[name]) for name in names]
    assert set(optimizer.state) == set(slim.parameters())
    assert all(state["step"] == 2 for state in optimizer.state.values())
    torch.optim.AdamW(groups_of(slim), lr=0.01).load_state_dict(optimizer.state_dict())


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    named = list(net.named_parameters())
    return [{"params": [(n, p) for n, p in named if kind in n]} for kind in ("weight", "bias")]


@pytest.mark.parametrize("with_names", [False, True])
def test_a_state_dict_becomes_a_new_one(with_names: bool) -> None:
    net, batches = units(), rows(8)
    masked = twin(net, units)
    parameters = net.named_parameters() if with_names else net.parameters()
    optimizer = OPTIMIZERS["adamw"](parameters)
    expected = train(masked, OPTIMIZERS["adamw"](masked.parameters()), batches)[4:]
    train(net, optimizer, batches[:4])
    state = optimizer.state_dict()
    before = copy.deepcopy(state)
    slim = slimmed(net)
    new = demask.carry(slim, state)
    assert str(before) == str(state)
    other = OPTIMIZERS["adamw"](slim.named_parameters() if with_names else slim.parameters())
    other.load_state_dict(new)
    assert_close(expected, train(slim, other, batches[4:]))


def test_a_state_dict_of_several_groups_needs_names() -> None:
    net = units()
    optimizer = torch.optim.SGD([{"params": [p]} for p in net.parameters()], lr=0.1)
    with pytest.raises(demask.BadInput, match="6 parameters without names in 6 groups"):
        demask.carry(slimmed(net), optimizer.state_dict())


def test_several_optimizers_and_parameters_of_none() -> None:
    net, batches = units(), rows(3)
    net[2].requires_grad_(False)
    front = torch.optim.SGD(net[0].parameters(), 0.1, momentum=0.9)
    other = nn.Linear(2, 2).double()
    back = torch.optim.Adam([*other.parameters(), *net[4].parameters()], 0.1)
    for optimizer in (front, back):
        train(net, optimizer, batches)
    slim = slimmed(net)
    demask.carry(slim, front)
    demask.carry(slim, back)
    assert [id(p) for p in front.param_groups[0]["params"]] == list(map(id, slim[0].parameters()))
    assert [id(p) for p in back.param_groups[0]["params"]] == [
        *map(id, other.parameters()),
        *map(id, slim[4].parameters()),
    ]
    assert not any(p.requires_grad for p in slim[2].parameters())


def test_an_optimizer_before_its_first_step() -> None:
    net, batches = units(), rows(4)
    masked = twin(net, units)
    optimizer = OPTIMIZERS["adam"](net.parameters())
    demask.carry(slim := slimmed(net), optimizer)
    assert not optimizer.state
    expected = train(masked, OPTIMIZERS["adam"](masked.parameters()), batches)
    assert_close(expected, train(slim, optimizer, batches))


class Masked(nn.Module):
    """A parametrization that zeroes rows."""

    def __init__(self, keep: Tensor) -> None:
        super().__init__()
        self.register_buffer("keep", keep)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.keep


def parametrized() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 5)).double()
    keep = torch.ones(9, dtype=torch.double).index_fill(0, torch.tensor([1, 2]), 0)
    parametrize.register_parametrization(net[0], "weight", Masked(keep[:, None]))
    parametrize.register_parametrization(net[0], "bias", Masked(keep))
    return net


def test_parametrizations_that_are_masks() -> None:
    expected, actual, _, _ = run_both(parametrized, rows(8), OPTIMIZERS["adamw"])
    assert_close(expected, actual)


def test_other_parametrizations_start_without_state() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 5)).double()
    nn.utils.parametrizations.weight_norm(net[2])
    mask(net[0], (1, 2))
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    train(net, optimizer, rows(2))
    slim = slimmed(net)
    with pytest.warns(UserWarning, match=r"2\.weight starts without optimizer state"):
        demask.carry(slim, optimizer)
    [group] = optimizer.param_groups
    assert {id(p) for p in group["params"]} == {id(p) for p in slim.parameters()}
    assert slim[2].weight not in optimizer.state
    assert slim[2].bias in optimizer.state


def shifted() -> nn.Sequential:
    """A masked layer whose bias stays, so that its units are constants for the next layer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 5)).double()
    mask(net[0], (1, 2), names=["weight"])
    return net


def test_a_bias_with_constants_has_the_states_of_its_source() -> None:
    net, batches = shifted(), rows(3)
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    train(net, optimizer, batches)
    momentum = optimizer.state[net[2].bias]["momentum_buffer"].clone()
    slim = slimmed(net)
    assert not torch.equal(slim[2].bias, net[2].bias)
    demask.carry(slim, optimizer)
    assert torch.equal(optimizer.state[slim[2].bias]["momentum_buffer"], momentum)


def test_what_the_original_has_not_joins_the_group_of_its_module() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 5, 3, padding=1, bias=False)).double()
    mask(net[0], (1, 2), names=["weight"])
    groups = [{"params": list(layer.parameters()), "lr": 0.1 + k} for k, layer in enumerate(net)]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    x = torch.randn(2, 3, 6, 6).double()
    net(x).sum().backward()
    optimizer.step()
    slim = demask.demask(net, (x,), result="graph")
    new = [name for name in get_origin(slim).added if name in dict(slim.named_parameters())]
    assert len(new) == 1
    demask.carry(slim, optimizer)
    added = slim.get_parameter(new[0])
    assert any(p is added for p in optimizer.param_groups[1]["params"])
    assert added not in optimizer.state
    slim(x).sum().backward()
    optimizer.step()
    assert added in optimizer.state


def ema_of(net: nn.Module) -> AveragedModel:
    return AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)


def tied_norms() -> nn.Sequential:
    """Parametrized masks, which deepcopy and so AveragedModel accept, and a norm."""
    net = parametrized()
    net.insert(1, nn.BatchNorm1d(9).double())
    for name in ("weight", "bias"):
        keep = net[0].parametrizations.bias[0].keep
        parametrize.register_parametrization(net[1], name, Masked(keep))
    return net.train()


@pytest.mark.parametrize("kind", ["averaged model", "module", "state dict", "its state dict"])
def test_averages_go_on(kind: str) -> None:
    batches = rows(8)
    masked, net = tied_norms(), tied_norms()
    whole, optimizer = OPTIMIZERS["sgd"](masked.parameters()), OPTIMIZERS["sgd"](net.parameters())
    expected, average = ema_of(masked), ema_of(net)
    train(masked, whole, batches, lambda: expected.update_parameters(masked))
    train(net, optimizer, batches[:4], lambda: average.update_parameters(net))
    slim = slimmed(net)
    if kind == "averaged model":
        demask.carry(slim, optimizer, ema=average)
    elif kind == "module":
        demask.carry(slim, optimizer, ema=average.module)
    else:
        outer = kind == "its state dict"
        tensors = dict((average if outer else average.module).state_dict())
        demask.carry(slim, optimizer, ema=tensors)
        average.module = copy.deepcopy(slim)
        (average if outer else average.module).load_state_dict(tensors)
    assert average.n_averaged == 4
    train(slim, optimizer, batches[4:], lambda: average.update_parameters(slim))
    assert average.n_averaged == 8
    x = rows(1, seed=9)[0][0]
    torch.testing.assert_close(average.eval()(x), expected.eval()(x), rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        assert not torch.equal(average(x), slim.eval()(x))


def test_averages_have_the_constants_of_the_network() -> None:
    net, batches = shifted(), rows(3)
    average = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    old = average["2.bias"].add_(1).clone()
    slim = slimmed(net)
    constant = (slim[2].bias - net[2].bias).detach()
    demask.carry(slim, OPTIMIZERS["sgd"](net.parameters()), ema=average)
    assert set(average) == set(slim.state_dict())
    torch.testing.assert_close(average["2.bias"], old + constant)
    assert len(batches) == 3


def test_two_rounds() -> None:
    batches = rows(12)
    masked, net = units(), units()
    whole, optimizer = (OPTIMIZERS["adamw"](masked.parameters()), OPTIMIZERS["adamw"](net.parameters()))
    expected = train(masked, whole, batches[:8])
    train(net, optimizer, batches[:4])
    slim = slimmed(net)
    demask.carry(slim, optimizer)
    assert_close(expected[4:], train(slim, optimizer, batches[4:8]))
    keep = torch.ones(9, dtype=torch.double).index_fill(0, torch.tensor([0, 4, 5, 3]), 0)
    for name, rest in (("weight", keep[:, None].expand(9, 4)), ("bias", keep)):
        prune.custom_from_mask(masked[0], name, rest)
        prune.custom_from_mask(slim[0], name, rest[[1, 2, 3, 6, 7, 8]])
    expected = train(masked, whole, batches[8:10])
    assert_close(expected, train(slim, optimizer, batches[8:10]))
    again = slimmed(slim)
    assert again[0].weight.shape == (5, 4)
    demask.carry(again, optimizer)
    assert_close(train(masked, whole, batches[10:]), train(again, optimizer, batches[10:]))
    assert {id(p) for p in optimizer.state} == {id(p) for p in again.parameters()}


@pytest.mark.parametrize("second", ["passed", "prune"])
def test_second_rounds_hold_the_zeros_of_masks_that_were_passed(second: str) -> None:
    batches = rows(8)
    net = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 5)).double()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    train(net, optimizer, batches[:2])
    keep = torch.ones(9, 4).double()
    keep[3:, 1] = 0
    unit = torch.arange(9) != 0
    slim = slimmed(net, masks={"0.weight": keep * unit[:, None], "0.bias": unit})
    demask.carry(slim, optimizer)
    train(slim, optimizer, batches[2:4])
    unit = torch.arange(8) != 7
    if second == "prune":
        mask(slim[0], [7])
        again = slimmed(slim)
    else:
        again = slimmed(slim, masks={"0.weight": unit[:, None], "0.bias": unit})
    demask.carry(again, optimizer)
    train(again, optimizer, batches[4:])
    assert again[0].weight.shape == (7, 4)
    assert torch.equal(again[0].weight == 0, keep[1:8] == 0)


def test_scalers_and_schedulers_stay() -> None:
    net, batches = units().float(), [(x.float(), y) for x, y in rows(6)]
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)

    def step(network: nn.Module, x: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(network(x), labels)).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()

    for batch in batches[:3]:
        step(net, *batch)
    slim = demask.demask(net, (batches[0][0],))
    demask.carry(slim, optimizer)
    before = slim[0].weight.clone()
    for batch in batches[3:]:
        step(slim, *batch)
    assert scaler.get_scale() == 32.0  # grew before and after
    assert not torch.equal(before, slim[0].weight)
    assert schedule.last_epoch == 6


def test_the_original_is_not_kept_alive_and_copies_have_the_link() -> None:
    net = units()
    optimizer = OPTIMIZERS["adam"](net.parameters())
    train(net, optimizer, rows(2))
    slim = slimmed(net)
    reference = weakref.ref(net)
    copied = copy.deepcopy(slim).train()
    graph = copy.deepcopy(slimmed(net, result="graph"))
    del net
    gc.collect()
    assert reference() is None
    demask.carry(copied, copy_of(optimizer))
    demask.carry(graph, copy_of(optimizer))
    demask.carry(slim, optimizer)
    assert set(optimizer.state) == set(slim.parameters())


def copy_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same parameters, with copies of the states."""
    other = type(optimizer)(optimizer.param_groups[0]["params"])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other


@pytest.mark.filterwarnings("ignore:The tensor attributes")  # of torch, for torch's pruning
@pytest.mark.parametrize("kind", ["modules", "exported"])
def test_parts_and_exported_programs(kind: str) -> None:
    batches = rows(6)
    masked, net = units(), units()
    whole, optimizer = (OPTIMIZERS["adamw"](n.parameters()) for n in (masked, net))
    expected = train(masked, whole, batches)[3:]
    train(net, optimizer, batches[:3])
    if kind == "modules":
        slim = slimmed(nn.Sequential(net, nn.Identity()), modules=["0"])
        assert slim[0][0].weight.shape == (6, 4)
    else:
        slim = slimmed(torch.export.export(net, (batches[0][0],)))
    demask.carry(slim, optimizer)
    assert_close(expected, train(slim, optimizer, batches[3:]))


def test_a_part_replaced_in_its_network() -> None:
    net = nn.Sequential(units(), nn.ReLU(), nn.Linear(5, 5).double())
    optimizer = torch.optim.SGD(net.named_parameters(), 0.1, momentum=0.9)
    train(net, optimizer, rows(2))
    net[0] = slimmed(net[0])
    demask.carry(net[0], optimizer)
    [group] = optimizer.param_groups
    assert group["param_names"] == [name for name, _ in net.named_parameters()]
    assert [id(p) for p in group["params"]] == [id(p) for p in net.parameters()]


def test_a_tied_tensor_cut_in_two_ways_is_two() -> None:
    net = test_tied.masked(embed=False)
    optimizer = torch.optim.SGD(net.parameters(), 0.0, momentum=0.9)
    net(test_tied.TOKENS).square().sum().backward()
    optimizer.step()
    momentum = optimizer.state[net.embed.weight]["momentum_buffer"].clone()
    slim = test_tied.slimmed(net)
    embed, head = slim.embed.weight, slim.head.weight
    assert embed.shape == momentum.shape
    assert head.shape == (test_tied.WORDS, test_tied.WIDTH - test_tied.MASKED)
    demask.carry(slim, optimizer)
    assert torch.equal(optimizer.state[embed]["momentum_buffer"], momentum)
    rest = momentum[:, test_tied.MASKED :]
    assert torch.equal(optimizer.state[head]["momentum_buffer"], rest)
    present = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert present == {id(p) for p in slim.parameters()}


def test_a_network_from_a_file_needs_the_original() -> None:
    net, batches = units(), rows(6)
    masked = twin(net, units)
    expected = train(masked, OPTIMIZERS["adam"](masked.parameters()), batches)[3:]
    optimizer = OPTIMIZERS["adam"](net.parameters())
    train(net, optimizer, batches[:3])
    slim = pickle.loads(pickle.dumps(slimmed(net)))
    with pytest.raises(demask.BadInput, match="pass model=, the original"):
        demask.carry(slim, optimizer)
    with pytest.raises(demask.BadInput, match=r"0.weight is no slice of 0.weight of `model`"):
        demask.carry(slim, optimizer, model=twin(masked, units))
    demask.carry(slim, optimizer, model=net)
    assert_close(expected, train(slim, optimizer, batches[3:]))


class Preconditioned(torch.optim.SGD):
    """An optimizer with a state that is neither a number nor of the parameter's shape."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["gram"] = torch.eye(len(parameter) + 1)


BAD: dict[str, tuple[Callable[[nn.Module, nn.Module], Any], str]] = {
    "another model": (
        lambda net, slim: (OPTIMIZERS["sgd"](units().parameters()), None),
        "no parameter of the network that was demasked",
    ),
    "the small network's": (
        lambda net, slim: (OPTIMIZERS["sgd"](slim.parameters()), None),
        "parameters of the small network already",
    ),
    "averages of another": (
        lambda net, slim: (OPTIMIZERS["sgd"](net.parameters()), nn.Linear(2, 2)),
        "ema: expected averages of the network that was demasked",
    ),
    "no averages": (lambda net, slim: (OPTIMIZERS["sgd"](net.parameters()), 3), "ema: expected an AveragedModel"),
    "states of other shapes": (
        lambda net, slim: (Preconditioned(net.parameters(), 0.1, momentum=0.9), None),
        "'gram' of 0.weight_orig has the shape",
    ),
    "lists of states": (
        lambda net, slim: (torch.optim.LBFGS(net.parameters()), None),
        "cannot be cut|is a list of tensors",
    ),
    "no optimizer": (lambda net, slim: (nn.Linear(2, 2), None), "expected an optimizer"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_changes_nothing(name: str) -> None:
    make, message = BAD[name]
    net = units()
    slim = slimmed(net)
    optimizer, ema = make(net, slim)
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn_like(parameter)
        optimizer.step(*([lambda: torch.ones(())] if name == "lists of states" else []))
        optimizer.step(*([lambda: torch.ones(())] if name == "lists of states" else []))
        before = [copy.copy(group["params"]) for group in optimizer.param_groups]
        states = {id(p): {k: str(v) for k, v in s.items()} for p, s in optimizer.state.items()}
    with pytest.raises(demask.BadInput, match=message):
        demask.carry(slim, optimizer, ema=ema)
    if isinstance(optimizer, torch.optim.Optimizer):
        for group, old in zip(optimizer.param_groups, before, strict=True):
            assert [id(p) for p in group["params"]] == [id(p) for p in old]
        assert states == {id(p): {k: str(v) for k, v in s.items()} for p, s in optimizer.state.items()}


def test_it_takes_demasked_networks_only() -> None:
    net = units()
    with pytest.raises(demask.BadInput, match="without the attribute `demasked`"):
        demask.carry(net, OPTIMIZERS["sgd"](net.parameters()))
