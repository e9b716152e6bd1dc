"""Small networks with every way in which slices hang together, and the law that groups obey."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import demask
from demask.prune.coupling import KINDS_OF, Coupling, select_groups
from demask.prune.removal_cost import RemovalCost


class Residual(nn.Module):
    """A stream of two sums, with batch norms, that a linear layer reads after a flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.a, self.a_norm = nn.Conv2d(6, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.b, self.b_norm = nn.Conv2d(5, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.head = nn.Linear(6 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(x + self.b_norm(self.b(F.relu(self.a_norm(self.a(x))))))
        return self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))


class PaddedShortcut(nn.Module):
    """The shortcut of CIFAR ResNets: strided, with channels of zeros on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.a, self.b = nn.Conv2d(4, 8, 3, 2, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))
        x = F.relu(shortcut + self.b(F.relu(self.a(x))))
        return self.head(x.mean((2, 3)))


class Concatenated(nn.Module):
    """Features joined with all before, as in DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 1)
        self.b, self.head = nn.Conv2d(7, 5, 1), nn.Conv2d(12, 2, 1)
        self.norm = nn.BatchNorm2d(7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.a(F.relu(x))], 1)
        return self.head(torch.cat([x, self.b(F.relu(self.norm(x)))], 1))


class Excited(nn.Module):
    """A depthwise convolution whose channels are multiplied with numbers from all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.depthwise = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.down, self.up = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.narrow = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.depthwise(F.silu(self.widen(x))))
        return self.narrow(x * self.up(F.silu(self.down(x.mean((2, 3), keepdim=True)))).sigmoid())


class Shuffled(nn.Module):
    """Channels split in halves and shuffled, as in ShuffleNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch = nn.Conv2d(3, 8, 1), nn.Conv2d(4, 4, 1)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.stem(x).chunk(2, 1)
        x = torch.cat([left, F.relu(self.branch(right))], 1)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        left, right = x.chunk(2, 1)
        return self.head(torch.cat([right, left], 1))


class Grouped(nn.Module):
    """A convolution in groups, and one that is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.grouped = nn.Conv2d(3, 12, 1), nn.Conv2d(12, 24, 3, groups=6)
        self.up, self.head = nn.ConvTranspose2d(24, 5, 2, 2), nn.Conv2d(5, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.up(F.relu(self.grouped(F.relu(self.stem(x)))))))


class UNet(nn.Module):
    """Skipped features joined again after an upsampling; group norm removes full groups."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8)
        self.b, self.c = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(14, 2, 1)
        self.shuffled = nn.Conv2d(6, 16, 1)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.norm(self.a(x)))
        b = F.relu(self.b(F.max_pool2d(a, 2)))
        return self.c(torch.cat([a, F.interpolate(b, scale_factor=2)], 1)) + self.last(
            F.pixel_shuffle(self.shuffled(b), 2)
        )


class Attention(nn.Module):
    """Queries, keys and values of one matrix; keys and values that two queries share."""

    def __init__(self, heads: int = 4, shared: int = 4, size: int = 3) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, size
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, (heads + 2 * shared) * size)
        self.out = nn.Linear(heads * size, 8)
        self.up, self.gate, self.down = nn.Linear(8, 10), nn.Linear(8, 10), nn.Linear(10, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(self.norm(x))
        sizes = [self.heads * self.size, self.shared * self.size, self.shared * self.size]
        q, k, v = (part.unflatten(2, (-1, self.size)).transpose(1, 2) for part in y.split(sizes, 2))
        repeat = self.heads // self.shared
        if repeat > 1:
            shape = x.shape[0], self.heads, x.shape[1], self.size
            k, v = (t[:, :, None].expand(-1, -1, repeat, -1, -1).reshape(shape) for t in (k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Latent(nn.Module):
    """Attention in single ops, with scores that all heads share, and keys of which a part is their
    own and a part is shared, written one after the other into an empty tensor."""

    def __init__(self, heads: int = 3, size: int = 4) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        self.q, self.latent = nn.Linear(8, heads * (size + 2)), nn.Linear(8, 5 + 2 + 1)
        self.kv, self.out = nn.Linear(5, heads * 2 * size), nn.Linear(heads * size, 8)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        latent, shared, scores = self.latent(x).split([5, 2, 1], 2)
        q = self.q(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        kv = self.kv(self.norm(latent)).unflatten(2, (self.heads, -1)).transpose(1, 2)
        k, v = kv.split(self.size, 3)
        keys = k.new_empty(*k.shape[:3], self.size + 2)
        keys[..., : self.size].copy_(k)
        keys[..., self.size :].copy_(shared[:, None].expand(-1, self.heads, -1, -1))
        scores = q @ keys.mT + scores.mT[:, None]
        y = scores.softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).flatten(2))


class Recurrent(nn.Module):
    """An LSTM in two directions, read by a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Embedded(nn.Module):
    """An embedding without a norm behind it, whose table is also the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 11, bias=False)
        self.last.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return self.last(x + torch.relu(self.hidden(x)))


class OneNumberAdded(nn.Module):
    """Each pixel's mean over channels is added to all of them: none of them vanishes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 6, 1), nn.Conv2d(3, 1, 1), nn.Conv2d(6, 2, 1)
        self.more = nn.Conv2d(2, 4, 1)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.more(self.head(self.a(x) + self.b(x))))


class Drawn(nn.Module):
    """A network drawn by a seed: convolutions, norms, sums, joins, slices, pads and rolls."""

    def __init__(self, seed: int, steps: int = 8) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)

        def draw(n: int) -> int:
            return int(torch.randint(n, (1,), generator=random))

        self.layers, self.steps, widths = nn.ModuleList(), [], [3]
        for _ in range(steps):
            kind, first, second = draw(7), draw(len(widths)), draw(len(widths))
            if kind < 2 or widths[first] < 4:  # a convolution
                kind, width = 0, 4 + draw(5)
                self.layers.append(nn.Conv2d(widths[first], width, 3, padding=1))
            elif kind == 2:
                width = widths[first]
                self.layers.append(nn.BatchNorm2d(width))
            else:  # a sum; a join; a part; a pad; a roll
                width = {
                    3: widths[first],
                    4: widths[first] + widths[second],
                    5: widths[first] // 2 + 1,
                    6: widths[first] + 3,
                }[kind]
                self.layers.append(nn.Identity())
                if kind == 3:
                    same = [k for k, n in enumerate(widths) if n == width]
                    second = same[draw(len(same))]
            self.steps.append((kind, first, second))
            widths.append(width)
        self.head = nn.Conv2d(widths[-1], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer, (kind, first, second) in zip(self.layers, self.steps, strict=True):
            a, b = values[first], values[second]
            if kind in (0, 2):
                values.append(torch.relu(layer(a)))
            else:
                moves = {
                    3: lambda a=a, b=b: a + b,
                    4: lambda a=a, b=b: torch.cat([a, b], 1),
                    5: lambda a=a: a[:, : a.shape[1] // 2 + 1].roll(1, 1),
                    6: lambda a=a: F.pad(a, (0, 0, 0, 0, 1, 2)),
                }
                values.append(moves[kind]())
        return self.head(values[-1])


IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
NETWORKS = {
    "residual": (Residual, IMAGE),
    "padded shortcut": (PaddedShortcut, IMAGE),
    "concatenated": (Concatenated, IMAGE),
    "excited": (Excited, IMAGE),
    "shuffled": (Shuffled, IMAGE),
    "grouped": (Grouped, IMAGE),
    "u-net": (UNet, IMAGE),
    "attention": (Attention, ROWS),
    "shared keys": (lambda: Attention(4, 2), ROWS),
    "latent keys": (Latent, ROWS),
    "recurrent": (Recurrent, ROWS[:, :, :4]),
    "embedded": (Embedded, torch.arange(8).view(2, 4)),
    "one number added": (OneNumberAdded, IMAGE),
}


def network(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    """A network with random weights, statistics and norms, in eval mode, and its inputs."""
    create, x = NETWORKS[name]
    torch.manual_seed(1)
    return randomized(create()), (x,)


def randomized(model: nn.Module) -> nn.Module:
    """The model in eval mode, with random norms, and no parameter of zeros."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter.normal_(std=0.5)
    return model.eval()


def broken_law(model: nn.Module, args=(), kwargs=None, structure="channel", seed=0, *, wasteful=False) -> list[str]:
    """What differs from the law of groups, in words: half of the slices of every group are zero in
    the weights that compute them; then demask removes them, everywhere, and nothing else.

    wasteful: whether demask removes something of the network as it is: what nothing reads, and
    zeros of pads. Then this, too.
    """
    coupling = Coupling.of(model, args, kwargs)
    groups = select_groups(coupling, KINDS_OF[structure])
    generator = torch.Generator().manual_seed(seed)
    masked = copy.deepcopy(model)
    parameters = dict(masked.named_parameters(remove_duplicate=False))
    masks, stays = {}, {}
    for group in groups:
        keep = torch.rand(group.size, generator=generator) > 0.5
        keep[0] = True
        for member in group.members:
            shape = parameters[member.parameter].shape
            line = [-1 if axis == member.axis else 1 for axis in range(len(shape))]
            left = member.mask(keep)
            place = member.parameter, member.axis
            stays[place] = stays.get(place, torch.ones_like(left)) & left
            if member.produces:
                mask = masks.setdefault(member.parameter, torch.ones(shape, dtype=torch.bool))
                mask &= left.view(line)
    with torch.no_grad():
        for name, mask in masks.items():
            parameters[name].mul_(mask)
    record = demask.demask(masked, args, kwargs, result="graph").demasked
    if not wasteful:
        return _differences(stays, record) + _other_sizes(coupling, masks, record)
    for cut in demask.demask(model, args, kwargs, result="graph").demasked.cuts.values():
        for axis, positions in enumerate(cut.kept if cut.source in parameters else ()):
            left = torch.ones(cut.shape[axis], dtype=torch.bool)
            if positions is not None:
                left = torch.zeros_like(left).index_fill(0, torch.tensor(positions), True)
            stays[cut.source, axis] = stays.get((cut.source, axis), left) & left
    return _differences(stays, record)


def _differences(stays, record) -> list[str]:
    names = {place for place, _ in stays}
    wrong = []
    for cut in record.cuts.values():
        for axis, positions in enumerate(cut.kept):
            n = cut.shape[axis]
            expected = stays.get((cut.source, axis), torch.ones(n, dtype=torch.bool))
            left = range(n) if positions is None else sorted(positions)
            if cut.source in names and list(left) != expected.nonzero().flatten().tolist():
                wrong.append(f"{cut.source} axis {axis}: {positions}, not {expected}")
    return wrong


def _other_sizes(coupling, masks, record) -> list[str]:
    wrong = []
    cost = RemovalCost.of(coupling)
    for what, mine, real in (("before", cost.masked({}), record.before), ("after", cost.masked(masks), record.after)):
        if (mine.parameters, mine.macs) != (real.parameters, real.macs):
            wrong.append(f"{what}: {mine}, not {real}")
    return wrong
