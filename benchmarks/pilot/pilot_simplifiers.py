"""Simplifiers of four networks: what each keeps, and what it costs. `demask pilot compare`, with
seeds and intervals.

ResNet-20 and -56 have trained weights (shared/data next to the project) and run once, on the images
of all seeds. The perceptron 784-512-512-10 and the vision transformer are trained here on
Fashion-MNIST, once for each seed. Writes benchmarks/results/pilot_simplifiers.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn

import cifar
from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.tables import RESULTS, load_average, markdown, provenance
from benchmarks.pilot.trained_networks import DATA, images
from demask.machine.allocator import fix_allocator
from demask.machine.byte_sizes import format_bytes
from demask.pilot import Comparison, compare
from demask.pilot.compare import ComparisonRow

BENCHMARK = Benchmark(
    "simplifiers of four networks: agreement and cost", "not timed", needs=(DEV, SHARED_DATA, "Fashion-MNIST"),
    quick="--networks perceptron --seeds 1 --images 50 --steps 50 --pairs 0",
)  # fmt: skip

BY = ("bits:8", "bits:6", "bits:4", "bits:4:64", "bits:2", "exponents", "rank:0.5", "rank:0.25",
      "channels:0.75", "channels:0.5", "downsample:2:bilinear", "downsample:2:area")  # fmt: skip
BATCH, DRAWS, LEVEL = 50, 2000, 0.95
HEAD = ("simplifier", "same class, %", "error", "correlation", "zeros: precision, %", "recall, %",
        "weights, %", "MACs, %", "speed")  # fmt: skip


class Transformer(nn.Module):
    """A vision transformer: patches of 4 x 4, width 64, two layers with ReLU, a class token."""

    def __init__(self, width: int = 64, layers: int = 2):
        super().__init__()
        self.patch = nn.Conv2d(1, width, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(0.02 * torch.randn(1, 50, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


def perceptron() -> nn.Module:
    """784-512-512-10 on images."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512),
                         nn.ReLU(), nn.Linear(512, 10))  # fmt: skip


def trained(kind: type[nn.Module] | object, seed: int, data: Path, steps: int) -> nn.Module:
    """A network trained on Fashion-MNIST: AdamW, batches of 128, a rate that falls to zero."""
    torch.manual_seed(seed)
    model = Transformer() if kind is Transformer else perceptron()
    pixels, classes = images("train", data)
    pixels = pixels.reshape(-1, 1, 28, 28)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rates = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        chosen = torch.randint(len(pixels), (128,))
        optimizer.zero_grad()
        F.cross_entropy(model(pixels[chosen]), classes[chosen]).backward()
        optimizer.step()
        rates.step()
    return model.eval()


def cases(options: argparse.Namespace) -> Iterator[tuple[str, int, nn.Module, Tensor, Tensor]]:
    """Network, seed, module, images, classes."""
    pixels, classes = images("test", options.data)
    for name, kind in (("perceptron", perceptron), ("transformer", Transformer)):
        for seed in range(options.seeds) if name in options.networks else ():
            model = trained(kind, seed, options.data, options.steps)
            some = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(seed))
            some = some[: options.images]
            yield name, seed, model, pixels[some].reshape(-1, 1, 28, 28), classes[some]
    for depth in (20, 56):
        if (name := f"ResNet-{depth}") in options.networks:
            yield name, 0, cifar.trained(depth), *cifar.images(options.images * options.seeds)


@dataclass(frozen=True, slots=True)
class NetworkComparison:
    """One network and seed: its accuracy, and the comparison."""

    network: str
    accuracy: float
    comparison: Comparison


def measured(options: argparse.Namespace, bar: Progress) -> Iterator[NetworkComparison]:
    for name, seed, model, pixels, classes in cases(options):
        task = bar.add_task(f"{name}, seed {seed}", total=None)
        calls = [(part,) for part in pixels.split(BATCH)]
        with torch.no_grad():
            answers = torch.cat([model(part).argmax(1) for part in pixels.split(BATCH)])
        comparison = compare(model, calls, by=BY, pairs=options.pairs, seconds=options.seconds,
                        progress=lambda words, task=task, name=name: bar.update(
                            task, description=f"{name}: {words}"))  # fmt: skip
        yield NetworkComparison(name, (answers == classes).double().mean().item(), comparison)
        bar.remove_task(task)


def interval(same: Sequence[bool]) -> tuple[float, float, float]:
    """A share in percent, and its 95 % bootstrap interval over the images of all seeds."""
    hits = torch.tensor(same, dtype=torch.float64)
    draws = torch.randint(len(hits), (DRAWS, len(hits)), generator=torch.Generator().manual_seed(0))
    shares = hits[draws].mean(1)
    low, high = (shares.quantile(q).item() for q in ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return 100 * hits.mean().item(), 100 * low, 100 * high


def spread(values: Sequence[float | None], scale: float = 1.0, digits: int = 3) -> str:
    """The mean over seeds, and the least and the most."""
    known = [scale * v for v in values if v is not None]
    if not known:
        return "–"
    low, high = min(known), max(known)
    words = f"{mean(known):.{digits}g}"
    return words if low == high else f"{words} ({low:.{digits}g}–{high:.{digits}g})"


def cells(rows: Sequence[ComparisonRow], comparisons: Sequence[NetworkComparison]) -> list[str]:
    """One simplifier of one network, over its seeds."""
    by = rows[0].by
    if rows[0].refused:
        return [by, f"refused: {rows[0].refused}", *["–"] * (len(HEAD) - 2)]
    same = [hit for one in comparisons for hit in one.comparison.same[by]]
    share, low, high = interval(same)
    full = comparisons[0].comparison
    return [
        by, f"{share:.1f} ({low:.1f}–{high:.1f})", spread([r.error for r in rows], digits=2),
        spread([r.correlation for r in rows]), spread([r.precision for r in rows], 100),
        spread([r.recall for r in rows], 100),
        f"{100 * rows[0].weight_bytes / full.weight_bytes:.0f}",
        f"{100 * rows[0].macs / full.macs:.0f}", spread([r.speed for r in rows]),
    ]  # fmt: skip


def page(comparisons: Sequence[NetworkComparison], options: argparse.Namespace, words: str) -> str:
    """The page of results."""
    parts = [
        "# Simplifiers",
        f"{words} {options.seeds} seeds of {options.images} "
        f"images each; the ResNets, which are not trained here, on as many at once. "
        f"Same class: share of images on which the simplified network names the class "
        f"that the full one names, with a 95 % bootstrap interval over all images. Other columns: "
        f"the mean over seeds (least–most). Error: of all outputs, relative, Euclidean. "
        f"Correlation: of magnitudes per channel with the full run's, mean over layers. Zeros: "
        f"those after ReLU that the simplified run predicts, element by element. Weights: bytes "
        f"as they would be stored, of the full network's. Speed: time of the full network over the "
        f"simplified one's in turns, one thread, batches of {BATCH}: rounded weights are computed "
        f"with as float32 here, so theirs says nothing.",
    ]
    for name in dict.fromkeys(one.network for one in comparisons):
        mine = [one for one in comparisons if one.network == name]
        first = mine[0].comparison
        accuracy = spread([one.accuracy for one in mine], 100)
        zeros = spread([one.comparison.zeros for one in mine], 100)
        lines = [cells([one.comparison.rows[k] for one in mine], mine) for k in range(len(BY))]
        parts += [
            f"## {name}",
            f"Accuracy {accuracy} %, {format_bytes(first.weight_bytes)}, "
            f"{zeros} % zeros after ReLU.",
            markdown(HEAD, lines),
        ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    names = ("ResNet-20", "ResNet-56", "perceptron", "transformer")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, default=300, help="of each seed")
    parser.add_argument("--steps", type=int, default=600, help="of training")
    parser.add_argument("--pairs", type=int, default=11, help="calls of each, in turns; 0: none")
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing, at most, for each")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of Fashion-MNIST")
    parser.add_argument("--output", type=Path, default=RESULTS / "pilot_simplifiers.md")
    options = parser.parse_args()
    allocator, before = fix_allocator(), load_average()
    torch.set_num_threads(1)
    options.output.parent.mkdir(exist_ok=True)
    comparisons: list[NetworkComparison] = []
    with Progress(transient=True) as bar:
        for one in measured(options, bar):
            comparisons.append(one)
            words = provenance("pilot_simplifiers", allocator, before=before)
            options.output.write_text(page(comparisons, options, words))
    print(options.output.read_text())


if __name__ == "__main__":
    main()
