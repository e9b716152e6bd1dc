"""Training with 10 % of the weights from the start: layers of nonzeros and masked dense ones.

    python -m benchmarks run sparse_training [--threads 1 2] [--pairs 15] [--losses 40]

A multilayer perceptron 784-2048-2048-10 on random inputs, batches of 128 and 512, and ResNet-20 on
CIFAR-10 (JPEGs in shared/data), batch 128. The masked twin is dense, and its gradients are
multiplied by the mask, which is the least that masked training can do. Both begin with the same
weights and see the same batches; SGD with momentum. Steps of both are timed in turns, each forward,
backward and update.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cifar
from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.tables import RESULTS, load_average, markdown, provenance
from demask.machine.allocator import fix_allocator
from demask.sparse import SparseConv2d, SparseLinear

BENCHMARK = Benchmark(
    "training with 10 % of the weights: sparse layers and masked dense ones", "not timed",
    ("sparse_training.md",), needs=(DEV, SHARED_DATA),
    quick="--threads 1 --pairs 2 --losses 2",
)  # fmt: skip

DENSITY, SEED = 0.1, 0
Batch = tuple[Tensor, Tensor]


def perceptron() -> nn.Module:
    """784-2048-2048-10."""
    return nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )


@torch.no_grad()
def mask(net: nn.Module, density: float, seed: int) -> nn.Module:
    """The network with so many of the weights of its layers, in place, as many in each; what is
    left is scaled so that signals keep their size."""
    generator = torch.Generator().manual_seed(seed)
    for layer in net.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            w = layer.weight
            chosen = torch.randperm(w.numel(), generator=generator)[: round(density * w.numel())]
            there = torch.zeros(w.numel(), dtype=torch.bool).index_fill(0, chosen, True)
            w *= there.view(w.shape) / density**0.5
    return net


def of_nonzeros(net: nn.Module) -> nn.Module:
    """A copy with sparse layers."""
    sparse = copy.deepcopy(net)
    for name, layer in list(sparse.named_modules()):
        if isinstance(layer, nn.Linear | nn.Conv2d):
            kind = SparseLinear if isinstance(layer, nn.Linear) else SparseConv2d
            owner, _, last = name.rpartition(".")
            setattr(sparse.get_submodule(owner), last, kind.from_dense(layer))  # type: ignore[arg-type]
    return sparse


class Trainer:
    """A network, its optimizer and, for the dense one, its masks."""

    def __init__(self, net: nn.Module, masked: bool):
        self.net = net.train()
        self.masks = [
            (layer.weight, (layer.weight.detach() != 0).float())
            for layer in net.modules()
            if masked and isinstance(layer, nn.Linear | nn.Conv2d)
        ]
        self.optimizer = torch.optim.SGD(net.parameters(), 0.02, momentum=0.9)

    def step(self, batch: Batch) -> float:
        """One step; the loss before it."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.optimizer.zero_grad()
        loss.backward()
        for weight, there in self.masks:
            if weight.grad is not None:
                weight.grad.mul_(there)
        self.optimizer.step()
        return loss.item()


def twins(build: Callable[[], nn.Module]) -> tuple[Trainer, Trainer]:
    """Masked dense and sparse, with the same weights."""
    torch.manual_seed(SEED)
    dense = mask(build(), DENSITY, SEED)
    sparse = of_nonzeros(dense)
    return Trainer(dense, True), Trainer(sparse, False)


def count_live_bytes() -> int:
    """Bytes of all tensors that are alive."""
    gc.collect()
    stores = {}
    for one in gc.get_objects():
        if issubclass(type(one), Tensor) and one.layout == torch.strided:
            store = one.untyped_storage()
            stores[store.data_ptr()] = store.nbytes()
    return sum(stores.values())


@dataclass(frozen=True, slots=True)
class Bytes:
    """What a network takes after a step. trained: parameters, gradients and optimizer state of the
    layers with nonzeros. others: of norms and biases. overhead: masks, or indices and what kernels
    cache. counted: all tensors that are alive more than before."""

    nonzeros: int
    trained: int
    others: int
    counted: int

    @property
    def overhead(self) -> int:
        return self.counted - self.trained - self.others


def memory(build: Callable[[], nn.Module], batch: Batch, sparse: bool) -> Bytes:
    """Bytes of one network, measured."""
    before = count_live_bytes()
    torch.manual_seed(SEED)
    net = mask(build(), DENSITY, SEED)
    trainer = Trainer(of_nonzeros(net) if sparse else net, not sparse)
    del net
    trainer.step(batch)
    kinds = (SparseLinear, SparseConv2d) if sparse else (nn.Linear, nn.Conv2d)
    weights = [m.values if sparse else m.weight for m in trainer.net.modules()
               if isinstance(m, kinds)]  # type: ignore[union-attr]  # fmt: skip
    ours = {id(w) for w in weights}
    sizes = [0, 0]
    for p in trainer.net.parameters():
        state = [t for t in trainer.optimizer.state[p].values() if isinstance(t, Tensor)]
        grads = [] if p.grad is None else [p.grad]
        sizes[id(p) in ours] += sum(t.nbytes for t in (p, *grads, *state))
    others = sizes[0] + sum(
        b.nbytes for m in trainer.net.modules() if isinstance(m, nn.BatchNorm2d)
        for b in m.buffers()
    )  # fmt: skip
    count = sum(int((w != 0).sum()) for w in weights)
    return Bytes(count, sizes[1], others, count_live_bytes() - before)


@dataclass(frozen=True, slots=True)
class Timed:
    """Milliseconds per step, in turns, and what the losses differed by."""

    name: str
    threads: int
    dense: list[float]
    sparse: list[float]


def timed(name: str, build: Callable[[], nn.Module], batch: Batch, pairs: int) -> Timed:
    """Steps of both twins on one batch, in turns."""
    both = twins(build)
    for trainer in both * 2:
        trainer.step(batch)
    milliseconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(pairs):
        for trainer, times in zip(both, milliseconds, strict=True):
            begin = time.perf_counter()
            trainer.step(batch)
            times.append(1e3 * (time.perf_counter() - begin))
    return Timed(name, torch.get_num_threads(), *milliseconds)


def losses(build: Callable[[], nn.Module], batches: Sequence[Batch]) -> list[tuple[float, ...]]:
    """Of masked dense in float64, masked dense and sparse, step by step."""
    dense, sparse = twins(build)
    exact = Trainer(twins(build)[0].net.double(), True)
    return [
        (
            exact.step((images.double(), labels)),
            *(t.step((images, labels)) for t in (dense, sparse)),
        )
        for images, labels in batches
    ]


def pictures(count: int, size: int) -> list[Batch]:
    """Batches of CIFAR-10's training images, in an order that a seed draws."""
    images, labels = cifar.images(count * size, "cifar10_train_jpeg.zip")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
    return [(images[part], labels[part]) for part in order.split(size)]


def random(size: int) -> Batch:
    generator = torch.Generator().manual_seed(SEED)
    images = torch.randn(size, 784, generator=generator)
    return images, torch.randint(10, (size,), generator=generator)


def _spread(times: list[float]) -> str:
    low, _, high = quantiles(times, n=4)
    return f"{median(times):.1f} ({low:.1f} to {high:.1f})"


def page(rows: list[Timed], curve: list[tuple[float, ...]],
         memory_of: dict[str, tuple[Bytes, Bytes]], words: str) -> str:  # fmt: skip
    """The page of results."""
    steps = []
    for row in rows:
        ratios = [a / b for a, b in zip(row.dense, row.sparse, strict=True)]
        low, _, high = quantiles(ratios, n=4)
        ratio = f"{median(ratios):.2f} ({low:.2f} to {high:.2f})"
        pairs = str(len(ratios))
        cells = [row.name, str(row.threads), _spread(row.dense), _spread(row.sparse), ratio, pairs]
        steps.append(cells)
    head = ["network", "threads", "masked dense, ms", "sparse, ms", "times as fast", "pairs"]
    bytes_ = [
        [name, kind, str(b.nonzeros), f"{b.trained:,}", f"{b.trained / b.nonzeros:.1f}",
         f"{b.overhead:,}", f"{b.counted:,}"]
        for name, both in memory_of.items()
        for kind, b in zip(("masked", "sparse"), both, strict=True)
    ]  # fmt: skip
    places = sorted({*range(0, len(curve), max(1, len(curve) // 8)), len(curve) - 1})
    shown = [[str(k + 1), *(f"{v:.6f}" for v in curve[k]),
              *(f"{abs(v - curve[k][0]):.1e}" for v in curve[k][1:])] for k in places]  # fmt: skip
    most = [max(abs(row[k] - row[0]) for row in curve) for k in (1, 2)]
    return "\n".join([
        "# Training with nonzeros alone", "", words, "",
        f"{DENSITY:.0%} of each layer's weights, from the start; forward, backward and SGD with "
        "momentum, in turns with a dense twin whose gradients are masked. Medians and quartiles; "
        "the ratio is of each pair.", "", markdown(head, steps), "",
        "## Memory after a step", "",
        "Bytes of tensors. Trained: values, gradients and momentum of the layers; overhead: "
        "masks, or indices and what kernels cache; all: everything alive, with norms "
        "and biases.", "",
        markdown(["network", "twin", "nonzeros", "trained", "per nonzero", "overhead", "all"],
                 bytes_), "",
        "## The loss, step by step", "",
        "ResNet-20, the same weights, images and order, and the masked dense twin in float64: "
        "rounding errors grow in the course of training, with either. Largest difference from "
        f"float64 in {len(curve)} steps: {most[0]:.1e} masked dense, {most[1]:.1e} sparse.", "",
        markdown(["step", "float64", "masked dense", "sparse", "dense - float64",
                  "sparse - float64"], shown), "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=15, help="steps of each network")
    parser.add_argument("--losses", type=int, default=40, help="steps of the loss curve")
    parser.add_argument("--output", type=Path, default=RESULTS / "sparse_training.md")
    options = parser.parse_args()
    allocator, before = fix_allocator(), load_average()
    batches = pictures(options.losses, 128)
    cases: list[tuple[str, Callable[[], nn.Module], Batch]] = [
        ("perceptron, batch 128", perceptron, random(128)),
        ("perceptron, batch 512", perceptron, random(512)),
        ("ResNet-20, batch 128", lambda: cifar.ResNet(20), batches[0]),
    ]
    memory_of = {name: (memory(build, batch, False), memory(build, batch, True))
            for name, build, batch in (cases[0], cases[2])}  # fmt: skip
    rows = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for name, build, batch in cases:
            rows.append(timed(name, build, batch, options.pairs))
            print(name, threads, _spread(rows[-1].dense), _spread(rows[-1].sparse), flush=True)
    curve = losses(lambda: cifar.ResNet(20), batches)
    words = provenance("sparse_training", allocator, before=before)
    text = page(rows, curve, memory_of, words)
    options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
