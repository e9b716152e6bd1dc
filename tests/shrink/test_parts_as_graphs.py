"""Networks of which a part fits its own class and another does not: there graphs stand in it."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import demask
from architectures import transformers
from demask.failures import strict


class Block(nn.Module):
    """Two convolutions beside the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(F.relu(self.first(x))))


class Net(nn.Module):
    """Three blocks, a label and a method."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.label = nn.Conv2d(3, width, 3, padding=1), "mine"
        self.blocks = nn.Sequential(*[Block(width) for _ in range(3)])
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))

    def predict(self, x: Tensor) -> Tensor:
        return self(x).argmax(-1)


def mask(layer: nn.Conv2d, channels: slice) -> None:
    with torch.no_grad():
        layer.weight[channels] = 0
        assert layer.bias is not None
        layer.bias[channels] = 0


def unlike() -> Net:
    """The stream's first half is masked but for what the second block adds, which adds little;
    units in all blocks."""
    torch.manual_seed(0)
    net = Net().eval()
    mask(net.stem, slice(4))
    for k, block in enumerate(net.blocks):
        mask(block.first, slice(k + 1))  # type: ignore[union-attr]
        mask(block.second, slice(2, 8) if k == 1 else slice(4))  # type: ignore[union-attr]
    return net


def graphs(net: nn.Module) -> list[str]:
    return [path for path, part in net.named_modules() if isinstance(part, fx.GraphModule)]


X = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(1))


def test_only_the_blocks_where_streams_meet_are_graphs():
    net = unlike()
    slim: Any = demask.demask(net, (X,))
    assert type(slim) is Net and slim.label == "mine"
    assert 0 < len(graphs(slim)) < 3 and "blocks.0" not in graphs(slim)
    assert type(slim.blocks[0]) is Block and slim.blocks[0].first.out_channels == 7
    assert torch.equal(slim.predict(X), net.predict(X))
    assert demask.verify(net, slim, (X,)).ok
    sizes = [demask.demask(net, (X,), result=result).demasked.after.parameters for result in ("graph", "class")]
    assert sizes[0] <= slim.demasked.after.parameters < sizes[1]
    assert any("blocks.1 is a graph" in why for why in slim.demasked.graph_reasons)


def test_other_sizes_hooks_copies_and_files(tmp_path: Path):
    net = unlike()
    calls: list[str] = []
    for k, block in enumerate(net.blocks):
        block.register_forward_hook(lambda *_, k=k: calls.append(f"blocks.{k}"))
    slim: Any = demask.demask(net, (X,))
    calls.clear()
    other = torch.randn(5, 3, 9, 9)
    assert torch.allclose(slim(other), net.eval()(other), atol=1e-6)
    assert calls.count("blocks.1") == 2
    part = graphs(slim)[0]
    fired: list[int] = []
    slim.get_submodule(f"{part}.first").register_forward_hook(lambda *_: fired.append(1))
    torch.testing.assert_close(copy.deepcopy(slim)(other), slim(other))
    assert len(fired) == 2
    for block in slim.modules():
        vars(block)["_forward_hooks"] = OrderedDict()  # lambdas, which no pickle takes
    again: Any = pickle.loads(pickle.dumps(slim))
    torch.testing.assert_close(again(other), slim(other))
    compiled: Any = torch.compile(slim, backend="eager")
    torch.testing.assert_close(compiled(other), slim(other))
    state = {name: torch.zeros_like(p) for name, p in slim.named_parameters()}
    assert not torch.func.functional_call(slim, state, (other,)).any()
    demask.save(slim, tmp_path / "slim.dmk")
    torch.testing.assert_close(demask.load(tmp_path / "slim.dmk")(other), slim(other))


def test_all_parameters_train_and_a_second_round_is_smaller():
    slim: Any = demask.demask(unlike(), (X,))
    optimizer = torch.optim.Adam(slim.parameters(), lr=0.01)
    before = {name: p.detach().clone() for name, p in slim.named_parameters()}
    slim.train()
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(slim(X), torch.tensor([0, 1])).backward()
        optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in slim.named_parameters())
    names = {name for name, _ in unlike().named_parameters()}
    assert {name for name, _ in slim.named_parameters()} <= names
    slim.eval()
    mask(slim.get_submodule("blocks.2.first"), slice(2))
    again: Any = demask.demask(slim, (X,))
    assert type(again) is Net
    assert again.demasked.after.parameters < slim.demasked.after.parameters
    torch.testing.assert_close(again(X), slim(X))
    trained = {name for name, p in again.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in slim.named_parameters()}


class Gated(nn.Module):
    """Takes a tensor, one to scale by, and perhaps a third; returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, *, scale: Tensor, **more: Tensor | None) -> tuple[Any, ...]:
        y = self.a(x) + self.b(x) * scale
        if (mask := more.get("mask")) is not None:
            y = y * mask
        return self.c(y), None


class Several(nn.Module):
    """Calls its parts by keywords, the sizes of the input among what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Gated(), Gated()])
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / x.shape[1]
        for part in self.parts:
            x, _ = part(x, scale=scale, **self.more(x))
        return self.out(x)

    def more(self, x: Tensor) -> dict[str, Any]:
        return {}


class Optional(Several):
    """Masks batches alone, as attention often does."""

    def more(self, x: Tensor) -> dict[str, Any]:
        alone = not torch.compiler.is_exporting() and x.shape[0] == 1
        ones = 2 * torch.sigmoid(1e-30 * x[..., :1])  # which no capture knows to be ones
        return {"mask": None if alone else ones}


def masked_apart(net: Several) -> Several:
    with torch.no_grad():
        for layer, units in ((net.parts[0].a, slice(3)), (net.parts[0].b, slice(2, 6))):
            layer.weight[units], layer.bias[units] = 0, 0  # type: ignore[index, operator]
    return net.eval()


def test_keywords_and_tuples():
    torch.manual_seed(0)
    net, x = masked_apart(Several()), torch.randn(2, 5, 6)
    slim: Any = demask.demask(net, (x,))
    assert type(slim) is Several and graphs(slim) == ["parts.0"]
    assert demask.verify(net, slim, (x,)).ok
    other = torch.randn(3, 9, 6)
    torch.testing.assert_close(demask.demask(net, (x,), dynamic_shapes="all")(other), net(other))


class Crossed(nn.Module):
    """Reads the second of two arguments of one shape first, and returns two values of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        late = self.c(F.relu(self.b(y)) + F.relu(self.a(x)))
        return self.d(F.relu(x)), late


class Crossing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.part = nn.Linear(6, 6), nn.Linear(6, 6), Crossed()

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.part(self.first(x), self.second(x))
        return one - 2 * two


def test_arguments_and_results_of_one_shape_are_told_by_their_values():
    torch.manual_seed(0)
    net, x = Crossing().eval(), torch.randn(2, 6)
    with torch.no_grad():
        for layer, units in ((net.part.a, slice(3)), (net.part.b, slice(2, 6))):
            layer.weight[units], layer.bias[units] = 0, 0
    slim: Any = demask.demask(net, (x,))
    assert graphs(slim) == ["part"]
    assert demask.verify(net, slim, (x,)).ok


def test_a_part_whose_arguments_may_be_none_is_no_graph():
    """A graph would be for None alone, which the code around gives in some calls."""
    torch.manual_seed(0)
    net = masked_apart(Optional())
    for batch in (1, 2):  # no mask for one, and a mask for two
        x = torch.randn(batch, 5, 6)
        with strict(False):
            slim: Any = demask.demask(net, (x,))
        assert graphs(slim) == []
        assert demask.verify(net, slim, (x,)).ok


def test_a_part_that_is_called_twice_is_no_graph():
    torch.manual_seed(0)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = Block(8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.inner(self.inner(x)).mean((2, 3)))

    net = Twice().eval()
    mask(net.inner.second, slice(5))
    x = torch.randn(2, 8, 5, 5)
    x[:, :5] = 0
    slim = demask.demask(net, (x,))
    assert "inner" not in graphs(slim)
    assert demask.verify(net, slim, (x,)).ok


@pytest.mark.nightly
def test_an_encoder_with_parts_of_heads_masked_is_of_its_class():
    hub = transformers()
    torch.manual_seed(0)
    config = hub.BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=50
    )
    net = hub.BertModel(config).eval()
    with torch.no_grad():
        for k, layer in enumerate(net.encoder.layer):
            layer.intermediate.dense.weight[: 3 + k] = 0
            layer.intermediate.dense.bias[: 3 + k] = 0
    ids = torch.arange(14).reshape(2, 7)
    whole = demask.demask(net, (ids,))
    assert type(whole) is type(net) and not graphs(whole)  # fewer positions than its table has
    with torch.no_grad():
        value = net.encoder.layer[1].attention.self.value
        value.weight[:1], value.bias[:1] = 0, 0
    slim: Any = demask.demask(net, (ids,))
    assert type(slim) is type(net) and not graphs(slim)
    assert demask.verify(net, slim, (ids,)).ok


class Attention(nn.Module):
    """Attention with the width of a head written into the code."""

    def __init__(self) -> None:
        super().__init__()
        self.joint, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        b, n = x.shape[:2]
        q, k, v = self.joint(x).view(b, n, 3, 4, 4).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v)
        return self.out(heads.transpose(1, 2).reshape(b, n, 16))


class TwoAttentions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Attention(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.one(x))


def test_heads_of_which_values_alone_are_zero_are_removed_by_graphs() -> None:
    """Their queries and keys go with them."""
    torch.manual_seed(0)
    net = TwoAttentions().eval()
    with torch.no_grad():
        for part in (net.one, net.two):
            part.joint.weight[32:36] = 0
            part.joint.bias[32:36] = 0
    x = torch.randn(2, 5, 16)
    with pytest.warns(UserWarning, match="2 of its modules as graphs"):
        slim: Any = demask.demask(net, (x,))
    assert type(slim) is TwoAttentions
    assert isinstance(slim.one, fx.GraphModule) and isinstance(slim.two, fx.GraphModule)
    torch.testing.assert_close(slim(x), net(x))


class Inverted(nn.Module):
    """A depthwise convolution in an expansion, gated, beside the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 4 * width
        self.pw, self.bn1 = nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.dw = nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False)
        self.bn2, self.gate = nn.BatchNorm2d(inner), nn.Conv2d(inner, inner, 1)
        self.pwl = nn.Conv2d(inner, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.bn2(self.dw(F.silu(self.bn1(self.pw(x))))))
        return x + self.pwl(y * self.gate(y.mean((2, 3), keepdim=True)).sigmoid())


class Mobile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 8, 3), nn.Sequential(Inverted(8), Inverted(8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def pruned() -> Mobile:
    torch.manual_seed(0)
    net = Mobile().eval()
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.bias, std=0.1)
        if isinstance(layer, nn.Conv2d):
            prune.ln_structured(layer, "weight", amount=0.5, n=2, dim=0)
    return net


class Fused(nn.Module):
    """Attention whose code reads heads and their width, of one layer for three."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(b, n, c))


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm, self.head = Fused(), nn.LayerNorm(32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + self.attn(x))[:, 0])


def without_heads() -> Vit:
    torch.manual_seed(0)
    net = Vit().eval()
    with torch.no_grad():
        net.attn.proj.weight[:, 8:24] = 0
    return net


@pytest.mark.parametrize(
    "net, fresh, x, named",
    [
        (pruned(), Mobile, torch.randn(2, 3, 9, 9), "blocks.0, blocks.1 are graphs"),
        (without_heads(), Vit, torch.randn(2, 6, 32), "attn is a graph"),
    ],
    ids=["convolutions", "fused attention"],
)
def test_a_class_refuses_what_graphs_compute(net: nn.Module, fresh: Any, x: Tensor, named: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="of its modules as graphs"):
        slim: Any = demask.demask(net, (x,))
    file, refused = tmp_path / "net.demask", f"{named} in the demasked network, and the class does"
    demask.save(slim, file)
    torch.save(slim.state_dict(), tmp_path / "net.pt")
    stored = torch.load(tmp_path / "net.pt", weights_only=True)
    with pytest.raises(demask.BadInput, match=refused):
        demask.load(file, into=fresh())
    for state in (slim.state_dict(), stored):
        with pytest.raises(demask.BadInput, match=refused):
            demask.resize(fresh(), state)
    with pytest.raises(demask.BadInput, match='result="class"'):  # tensors alone
        demask.resize(fresh(), dict(slim.state_dict()))
    with pytest.warns(UserWarning, match="returns a graph: .*" + named.split(" ")[0].strip(",")):
        loaded = demask.load(file)
    torch.testing.assert_close(loaded(x), slim(x))
    torch.testing.assert_close(demask.resize(slim, slim.state_dict())(x), slim(x))
    own: Any = demask.demask(net, (x,), result="class")
    demask.save(own, file)
    for other in (demask.load(file, into=fresh()), demask.resize(fresh(), own.state_dict(), own.demasked.numbers)):
        assert torch.equal(other.eval()(x), own(x))


def test_a_class_gets_what_one_graph_computes_only_if_it_does(tmp_path: Path) -> None:
    net, x = without_heads(), torch.randn(2, 6, 32)
    graph = demask.demask(net, (x,), result="graph")
    demask.save(graph, tmp_path / "net.demask")
    for put in (
        lambda: demask.load(tmp_path / "net.demask", into=Vit()),
        lambda: demask.resize(Vit(), graph.state_dict()),
    ):
        with pytest.raises(demask.BadInput, match="all of it is a graph"):
            put()
    layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    with torch.no_grad():
        layers[0].weight[:3], layers[0].bias[:3] = 0, 0  # type: ignore[index, operator]
    demask.save(demask.demask(layers, (x[0, :, :4],), result="graph"), tmp_path / "b.demask")
    loaded: Any = demask.load(tmp_path / "b.demask", into=layers)
    assert loaded[0].out_features == 5
