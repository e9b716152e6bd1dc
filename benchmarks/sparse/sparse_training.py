"""Training with 10 % of the weights from the start: layers of nonzeros and masked dense ones.

    python -m benchmarks run sparse_training [--threads 1 2] [--pairs 15] [--losses 40]

A multilayer perceptron 784-2048-2048-10 on random inputs, batches of 128 and 512, and ResNet-20 on
CIFAR-10 (JPEGs in shared/data), batch 128. The masked twin is dense, and its gradients are
multiplied by the mask, which is the least that masked training can do. Both begin with the same
weights and see the same batches; SGD with momentum. Steps of both, with each number of threads, are
timed in turns in one process, each forward, backward and update.
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cifar
from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.ledger import Page, Run, Table, save
from demask.machine.allocator import fix_allocator
from demask.machine.clock import Timing, race, set_threads
from demask.machine.describe import format_counts, load_average
from demask.sparse import SparseConv2d, SparseLinear

BENCHMARK = Benchmark(
    "training with 10 % of the weights: sparse layers and masked dense ones",
    "not timed",
    needs=(DEV, SHARED_DATA),
    quick="--threads 1 --pairs 2 --losses 2",
    measures=("sparse/trained_layers.py", "sparse/products", "kernels"),
)

DENSITY, SEED = 0.1, 0
Batch = tuple[Tensor, Tensor]


def perceptron() -> nn.Module:
    """784-2048-2048-10."""
    return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


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
    weights = [m.values if sparse else m.weight for m in trainer.net.modules() if isinstance(m, kinds)]  # type: ignore[union-attr]
    ours = {id(w) for w in weights}
    sizes = [0, 0]
    for p in trainer.net.parameters():
        state = [t for t in trainer.optimizer.state[p].values() if isinstance(t, Tensor)]
        grads = [] if p.grad is None else [p.grad]
        sizes[id(p) in ours] += sum(t.nbytes for t in (p, *grads, *state))
    others = sizes[0] + sum(
        b.nbytes for m in trainer.net.modules() if isinstance(m, nn.BatchNorm2d) for b in m.buffers()
    )
    count = sum(int((w != 0).sum()) for w in weights)
    return Bytes(count, sizes[1], others, count_live_bytes() - before)


@dataclass(frozen=True, slots=True)
class Timed:
    """Steps of both twins with a number of threads. ratios: masked dense by sparse, over pairs of steps.
    scaling: sparse with the first number of threads by sparse with this one, the median over pairs."""

    name: str
    threads: int
    dense: Timing
    sparse: Timing
    ratios: Timing
    scaling: float


def timed(name: str, build: Callable[[], nn.Module], batch: Batch, pairs: int, threads: Sequence[int]) -> list[Timed]:
    """Steps of both twins on one batch with each number of threads, all in turns."""
    dense, sparse = twins(build)

    def step(trainer: Trainer, count: int) -> float:
        with set_threads(count):
            return trainer.step(batch)

    trainers = {"dense": dense, "sparse": sparse}
    calls = {f"{who} {n}": partial(step, trainer, n) for n in threads for who, trainer in trainers.items()}
    seconds = race(calls, pairs, 2)

    def ratios(over: str, under: str) -> list[float]:
        return [a / b for a, b in zip(seconds[over], seconds[under], strict=True)]

    return [
        Timed(
            name,
            n,
            Timing.of(seconds[f"dense {n}"]),
            Timing.of(seconds[f"sparse {n}"]),
            Timing.of(ratios(f"dense {n}", f"sparse {n}")),
            median(ratios(f"sparse {threads[0]}", f"sparse {n}")),
        )
        for n in threads
    ]


def losses(build: Callable[[], nn.Module], batches: Sequence[Batch]) -> list[tuple[float, ...]]:
    """Of masked dense in float64, masked dense and sparse, step by step."""
    dense, sparse = twins(build)
    exact = Trainer(twins(build)[0].net.double(), True)
    return [
        (exact.step((images.double(), labels)), *(t.step((images, labels)) for t in (dense, sparse)))
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


STEPS = ["network", "threads", "masked dense, ms", "sparse, ms", "times as fast", "10 %", "90 %", "sparse: by threads"]
MEMORY = ["network", "twin", "nonzeros", "trained, bytes", "trained per nonzero", "overhead, bytes", "all, bytes"]
LOSS = ["step", "loss in float64", "masked dense: off by", "sparse: off by"]


def page(
    rows: Sequence[Timed], curve: Sequence[tuple[float, ...]], memory_of: Mapping[str, tuple[Bytes, Bytes]]
) -> Page:
    """The page of results."""
    counts = format_counts(timing for row in rows for timing in (row.dense, row.sparse))
    steps = [
        [r.name, r.threads, r.dense, r.sparse, r.ratios.median, r.ratios.low, r.ratios.high, r.scaling] for r in rows
    ]
    bytes_ = [
        [name, kind, b.nonzeros, b.trained, b.trained / b.nonzeros, b.overhead, b.counted]
        for name, both in memory_of.items()
        for kind, b in zip(("masked", "sparse"), both, strict=True)
    ]
    off = [[abs(loss - exact) for loss in others] for exact, *others in curve]
    most = [max(errors) for errors in zip(*off, strict=True)]
    places = sorted({*range(0, len(curve), max(1, len(curve) // 8)), len(curve) - 1})
    speeds = [row.ratios.median for row in rows]
    less = [sparse.counted / masked.counted for masked, sparse in memory_of.values()]
    summary = (
        f"{min(speeds):.2f} to {max(speeds):.2f} times as fast as masked dense layers, "
        f"slower in {sum(speed < 1 for speed in speeds)} of {len(speeds)}; "
        f"{min(less):.2f} to {max(less):.2f} of the memory"
    )
    return Page(
        "Training with nonzeros alone",
        [
            f"""
{DENSITY:.0%} of each layer's weights, from the start; forward, backward and SGD with momentum, in
turns with a dense twin whose gradients are masked, with each number of threads. Median (10 %–90 %
quantile) of {counts} steps; *times as fast*: the median and quantiles over pairs; *by threads*: how
many times as fast sparse steps are as with {rows[0].threads} thread(s).""",
            Table(STEPS, steps, 2),
            """
## Memory after a step

Bytes of tensors. *Trained*: values, gradients and momentum of the layers; *overhead*: masks, or
indices and what kernels cache; *all*: everything alive, with norms and biases.""",
            Table(MEMORY, bytes_, 2),
            f"""
## The loss, step by step

ResNet-20, the same weights, images and order, and the masked dense twin in float64: rounding errors
grow in the course of training, with either. Largest difference from float64 in {len(curve)} steps:
{most[0]:.1e} masked dense, {most[1]:.1e} sparse.""",
            Table(LOSS, [[k + 1, curve[k][0], *off[k]] for k in places]),
        ],
        summary,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=15, help="steps of each network")
    parser.add_argument("--losses", type=int, default=40, help="steps of the loss curve")
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    options = parser.parse_args()
    allocator, before = fix_allocator(), load_average()
    batches = pictures(options.losses, 128)
    cases: list[tuple[str, Callable[[], nn.Module], Batch]] = [
        ("perceptron, batch 128", perceptron, random(128)),
        ("perceptron, batch 512", perceptron, random(512)),
        ("ResNet-20, batch 128", lambda: cifar.ResNet(20), batches[0]),
    ]
    memory_of = {
        name: (memory(build, batch, False), memory(build, batch, True)) for name, build, batch in (cases[0], cases[2])
    }
    rows = []
    for name, build, batch in cases:
        rows += timed(name, build, batch, options.pairs, options.threads)
        print(*rows[-len(options.threads) :], sep="\n", flush=True)
    curve = losses(lambda: cifar.ResNet(20), batches)
    run = Run.now(allocator, before=before)
    print(save("sparse_training", page(rows, curve, memory_of), run, options.output))


if __name__ == "__main__":
    main()
