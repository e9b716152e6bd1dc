"""The networks that pilots are measured on, trained here with fixed seeds and stored in a folder.

Multi-layer perceptrons on Fashion-MNIST (Xiao et al. 2017), with ReLU, whose hidden values are
pushed to zero by a penalty on their sum, or not; one wide network whose pixels are standardised, so
that no input is zero; and a small transformer on bytes of this project's documents, for its blocks
linear, ReLU, linear. Run as a script it trains those that are not yet in the folder.
"""

from __future__ import annotations

import argparse
import gzip
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from demask.sparse.products.packed_product import multiplies_in_bfloat16

DATA = Path("/usr/share/datasets/fashion-mnist")  # of the Debian package dataset-fashion-mnist
MEAN, DEVIATION = 0.2860, 0.3530  # of the training pixels
SEED, EPOCHS, BATCH, RATE = 0, 4, 512, 1e-3
STEPS, TEXTS, LENGTH = 400, 12, 64  # of the transformer


@dataclass(frozen=True, slots=True)
class Spec:
    """One perceptron: its widths, the factor of the penalty, whether pixels are standardised."""

    widths: tuple[int, ...]
    penalty: float
    standard: bool = False


SPECS = {
    "l1-1e-3": Spec((784, 4096, 4096, 10), 1e-3),
    "none": Spec((784, 4096, 4096, 10), 0.0),
    "wide": Spec((784, 16384, 10), 3e-4, standard=True),
    "l1-1e-4": Spec((784, 4096, 4096, 10), 1e-4),
}
TRANSFORMER = "transformer"
FFN_PENALTY = 1e-4


def perceptron(widths: tuple[int, ...]) -> nn.Sequential:
    """linear, ReLU, … linear: modules "0", "2", …"""
    layers: list[nn.Module] = []
    for i, o in pairwise(widths):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def images(part: str, data: Path = DATA, standard: bool = False) -> tuple[Tensor, Tensor]:
    """(pixels float32 [n, 784] in [0, 1], or standardised; classes int64 [n]) of "train" or
    "test"; FileNotFoundError without the data set."""
    stem = {"train": "train", "test": "t10k"}[part]
    with gzip.open(data / f"{stem}-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784)
    with gzip.open(data / f"{stem}-labels-idx1-ubyte.gz") as file:
        classes = np.frombuffer(file.read(), np.uint8, offset=8)
    x = torch.from_numpy(pixels.astype(np.float32) / 255)
    return (x - MEAN) / DEVIATION if standard else x, torch.from_numpy(classes.astype(np.int64))


def trained(name: str, data: Path = DATA) -> nn.Sequential:
    """A perceptron of SPECS, trained: AdamW, its rate falling to 0."""
    spec = SPECS[name]
    torch.manual_seed(SEED)
    model, (x, classes) = perceptron(spec.widths), images("train", data, spec.standard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    steps = EPOCHS * -(-len(x) // BATCH)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    order = torch.Generator().manual_seed(SEED)
    loss = torch.zeros(())
    for epoch in range(EPOCHS):
        for picked in torch.randperm(len(x), generator=order).split(BATCH):
            penalty, h = torch.zeros(()), x[picked]
            with fast_products():
                for layer in model:
                    h = layer(h)
                    if isinstance(layer, nn.ReLU) and spec.penalty:
                        penalty = penalty + h.float().sum(1).mean()
                loss = F.cross_entropy(h.float(), classes[picked]) + spec.penalty * penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            falling.step()
        print(f"{name}: epoch {epoch + 1} of {EPOCHS}, loss {loss.item():.3f}", flush=True)
    return model.eval()


def fast_products() -> torch.autocast:
    """A context of products in bfloat16, where this machine multiplies that faster."""
    return torch.autocast("cpu", torch.bfloat16, multiplies_in_bfloat16(torch.get_num_threads()))


class Block(nn.Module):
    """Attention to what came before, then linear, ReLU, linear; norms before both."""

    def __init__(self, width: int = 768, hidden: int = 3072, heads: int = 12):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ffn = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        parts = self.mixed(self.before(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).reshape(n, t, width))
        return x + self.ffn(self.between(x))


class Bytes(nn.Module):
    """The next byte of a text: a decoder of a few blocks."""

    def __init__(self, blocks: int = 2, width: int = 768, length: int = LENGTH):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(blocks)])
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places(torch.arange(text.shape[1], device=text.device))
        return self.out(self.norm(self.blocks(x)))


def documents() -> Tensor:
    """Bytes of this project's documents, int64 [n]."""
    folder = Path(__file__).parents[2]
    files = [folder / "README.md", *sorted((folder / "docs").glob("*.md"))]
    text = b"".join(path.read_bytes() for path in files)
    return torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))


def watched(model: Bytes, text: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The logits of a text, and the outputs of each block's ReLU, [n, t, hidden] each."""
    activations: list[Tensor] = []
    relus = [module for module in model.modules() if isinstance(module, nn.ReLU)]

    def keep(_: nn.Module, args: object, y: Tensor) -> None:
        activations.append(y)

    hooks = [relu.register_forward_hook(keep) for relu in relus]
    logits = model(text)
    for hook in hooks:
        hook.remove()
    return logits, activations


def transformer() -> Bytes:
    """The decoder, trained for a short time with a penalty on what its ReLUs let through."""
    torch.manual_seed(SEED)
    model, text = Bytes(), documents()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(STEPS):
        starts = torch.randint(len(text) - LENGTH - 1, (TEXTS,))
        rows = torch.stack([text[s : s + LENGTH + 1] for s in starts.tolist()])
        with fast_products():
            logits, seen = watched(model, rows[:, :-1])
        penalty = torch.stack([y.float().sum(-1).mean() for y in seen]).sum()
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + FFN_PENALTY * penalty).backward()
        optimizer.step()
        if step % 10 == 9:
            live = [f"{(y > 0).float().mean().item():.3f}" for y in seen]
            print(f"transformer: step {step + 1}, loss {loss.item():.3f}, live {live}", flush=True)
    return model.eval()


def network(name: str, cache: Path, data: Path = DATA) -> nn.Module:
    """A network of SPECS, or the transformer, in eval mode: from the folder, or trained and stored
    there as NAME.safetensors. ValueError for other names."""
    if name not in (*SPECS, TRANSFORMER):
        raise ValueError(f"expected one of {[*SPECS, TRANSFORMER]}, got {name!r}")
    path = cache / f"{name}.safetensors"
    if path.exists():
        model = Bytes() if name == TRANSFORMER else perceptron(SPECS[name].widths)
        model.load_state_dict(load_file(path))
        return model.eval()
    cache.mkdir(parents=True, exist_ok=True)
    model = transformer() if name == TRANSFORMER else trained(name, data)
    partial = path.with_suffix(".part")
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, partial)
    partial.rename(path)
    return model


@torch.no_grad()
def described(name: str, model: nn.Module, data: Path = DATA) -> str:
    """Accuracy and the share of hidden values above zero, in words."""
    if name == TRANSFORMER:
        assert isinstance(model, Bytes)
        live = [(y > 0).float().mean().item() for y in watched(model, documents()[None, :LENGTH])[1]]
        return f"{name}: live {', '.join(f'{share:.1%}' for share in live)}"
    x, classes = images("test", data, SPECS[name].standard)
    assert isinstance(model, nn.Sequential)
    live = []
    for layer in model:
        x = layer(x)
        live += [(x > 0).float().mean().item()] if isinstance(layer, nn.ReLU) else []
    right = (x.argmax(1) == classes).float().mean().item()
    return f"{name}: accuracy {right:.2%}, live {', '.join(f'{share:.1%}' for share in live)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="folder of trained networks")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of Fashion-MNIST")
    parser.add_argument("--networks", nargs="+", default=[*SPECS, TRANSFORMER])
    options = parser.parse_args()
    for name in options.networks:
        start = time.perf_counter()
        model = network(name, options.cache, options.data)
        print(described(name, model, options.data), f"({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
