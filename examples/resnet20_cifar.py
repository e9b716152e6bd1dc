"""ResNet-20 on CIFAR-10 with half of its MACs: `python examples/resnet20_cifar.py`.

The trained weights (of the original images) are fine-tuned on the JPEG images. That dense network
is the teacher of all ways to half of the MACs, which get the same epochs and the same loss:
`demask.prune` of channels, in steps, with the small network trained on by the carried optimizer,
and Torch-Pruning's group-norm pruner. `--ways` adds single weights, two of every four,
Torch-Pruning after its regularization, and the dense network trained on for as many epochs; each
takes from the epochs of the others. A step is measured first, and the epochs are chosen by it so
that training ends after `--minutes`; `--epochs` sets them. `--device cuda` trains on a GPU;
milliseconds are of the CPU in any case. `--keep FOLDER` stores every network there, and reads those
that are there.

Needs the folder shared/data next to the project, Pillow, and torch-pruning for its rows. Writes
examples/results/resnet20_cifar.md and .svg (`--quick`: to build/examples).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from cifar_resnet20 import Block, Images, accuracy, normalized, pretrained
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn import functional as F

import demask
from demask import prune
from demask.graph.provenance import Sizes
from demask.machine.clock import Timing, race
from demask.machine.describe import describe_machine, format_spread, load_average

ROOT = Path(__file__).parents[1]
RESULTS, QUICK = ROOT / "examples" / "results", ROOT / "build" / "examples"
BATCH, MOMENTUM, DECAY = 128, 0.9, 5e-4
RATE, TUNING_RATE, WARMUP = 0.04, 0.02, 20  # highest learning rates; steps up to them
# Until a share of the steps: the sides of crops. Small ones take two thirds of the time.
GROWING, WHOLE = ((0.5, 24), (0.8, 28), (1.0, 32)), ((1.0, 32),)
Crops = tuple[tuple[float, int], ...]
BUDGET = 0.5  # of the MACs
PRUNING = 0.1  # of the tuning: the steps of pruning
REGULARIZING = 0.3  # of the tuning: Torch-Pruning's regularization
ROUNDS = 3
FLOOR = 0.4  # of each group stays; the best of 0.3 and 0.4 right after pruning, norms recalibrated
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantiles, by number of seeds
DENSE, LONGER = "dense", "dense, trained on"
OURS, WEIGHTS = "demask.prune, channels", "demask.prune, 2 of 4 weights"
AT_ONCE, REGULARIZED = "Torch-Pruning, at once", "Torch-Pruning, regularized first"


# --------------------------------------------------------------------------------------- training


def augmented(pixels: Tensor, side: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Half of the images mirrored, all of a batch cropped at the same place, zeros around them; and
    which are mirrored, bool (n,)."""
    mirrored = (torch.rand(len(pixels), generator=random) < 0.5).to(pixels.device)
    x = torch.where(mirrored.view(-1, 1, 1, 1), pixels.flip(3), pixels)
    margin = (32 - side) // 2 if side < 32 else 4
    down, right = torch.randint(2 * margin + 1, (2,), generator=random).tolist()
    x = x if side < 32 else F.pad(x, (4, 4, 4, 4))
    return x[:, :, down : down + side, right : right + side], mirrored


@dataclass
class Run:
    """A network in training, on the device of the images. accuracies: (epochs, accuracy)."""

    model: nn.Module
    train: Images
    test: Images
    steps: int
    seed: int
    tick: Callable[[str], None]
    rate: float = RATE
    teacher: Tensor | None = None  # logits [mirrored, image, class]
    crops: Crops = GROWING
    done: int = 0
    accuracies: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self.order = self.batches()
        self.model.to(self.train.pixels.device)
        self.new_optimizer()

    def new_optimizer(self) -> None:
        """An optimizer without momentum, at this place of the schedule."""
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), self.rate, MOMENTUM, weight_decay=DECAY, nesterov=True
        )

    def batches(self) -> Iterator[Tensor]:
        """Shuffled places of training images, endlessly; tails are dropped."""
        while True:
            order = torch.randperm(len(self.train.labels), generator=self.random)
            yield from (part for part in order.split(BATCH) if len(part) == BATCH)

    def go(self, until: float, title: str, after_backward: Callable[[], None] | None = None):
        """Train until this share of the steps is done."""
        self.model.train()
        while self.done < round(until * self.steps):
            part = next(self.order).to(self.train.pixels.device)
            progress = self.done / self.steps
            for group in self.optimizer.param_groups:  # a cosine, from `rate` to 0
                group["lr"] = self.rate * (1 + np.cos(np.pi * progress)) / 2
                group["lr"] *= min((self.done + 1) / WARMUP, 1)
            side = next(side for end, side in self.crops if progress < end)
            pixels, mirrored = augmented(self.train.pixels[part], side, self.random)
            loss = self.loss(self.model(normalized(pixels)), part, mirrored)
            self.optimizer.zero_grad()
            loss.backward()
            if after_backward is not None:
                after_backward()
            self.optimizer.step()
            self.done += 1
            self.tick(title)
            if self.done % max(self.steps // 5, 1) == 0:
                self.evaluate()
                self.model.train()
        self.model.eval()

    def loss(self, logits: Tensor, part: Tensor, mirrored: Tensor) -> Tensor:
        """Cross-entropy, or the distance to the teacher's logits of the full images."""
        labels = self.train.labels[part]
        if self.teacher is None:
            return F.cross_entropy(logits, labels)
        return prune.distillation_loss(logits, self.teacher[mirrored.long(), part], targets=labels)

    def evaluate(self) -> float:
        """The accuracy on the test images, in percent."""
        right = accuracy(self.model, self.test)
        epochs = self.done * BATCH / len(self.train.labels)
        self.accuracies.append((epochs, right))
        return right


def logits_of(model: nn.Module, images: Images) -> Tensor:
    """Logits of all images and of their mirror images: (2, n, classes)."""
    model.eval()
    with torch.inference_mode():
        both = [
            torch.cat([model(normalized(x.flip(3) if mirrored else x)) for x in images.pixels.split(500)])
            for mirrored in (False, True)
        ]
    return torch.stack(both).clone()


# -------------------------------------------------------------------------------------- contenders


def train_dense(run: Run) -> nn.Module:
    """The dense network, fine-tuned or trained on."""
    run.go(1.0, LONGER if run.teacher is not None else DENSE)
    return run.model


def prune_ours(run: Run) -> nn.Module:
    """Masked in steps while it trains, demasked, and trained on with the same optimizer."""
    example = (normalized(run.test.pixels[:2]),)
    pruner = new_pruner(run.model, example)
    for number in range(ROUNDS):
        run.go(max(PRUNING / ROUNDS, 1 / run.steps) * (number + 1), OURS)
        pruner.step()
    pruner.remove()
    masked = run.model.eval()
    slim = demask.demask(masked, example, dynamic_shapes="all")  # crops have other sizes
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        demask.verify(masked, slim, example)
    demask.carry(slim, run.optimizer)
    run.model = slim
    run.go(1.0, OURS)
    return slim


def prune_weights(run: Run) -> nn.Module:
    """Two of every four consecutive weights masked at once, by size; masks stay while it trains."""
    layers = [name for name, module in run.model.named_modules() if isinstance(module, nn.Conv2d)]
    pruner = prune.Pruner(
        run.model,
        (normalized(run.test.pixels[:2]),),
        score=prune.L1(),
        structure="2:4",
        schedule=prune.OneShot(0.5),
        skip=[layers[0], "linear"],
    )
    pruner.step()
    run.go(1.0, WEIGHTS)
    pruner.remove()
    return run.model


def new_pruner(model: nn.Module, example: tuple[Tensor]) -> prune.Pruner:
    """Channels whose inputs vary least, as many of each group as a knapsack over MACs says."""
    return prune.Pruner(
        model,
        example,
        score=prune.Fluctuation(),
        allocation=prune.MACs(budget=BUDGET, floor=FLOOR),
        schedule=prune.Cubic(0.0, 0.9, steps=ROUNDS),
    )


def prune_peer(run: Run, *, regularize: bool) -> nn.Module:
    """Torch-Pruning's group-norm pruner, to the same MACs. It changes the network in place; there
    is no optimizer for that one, so its momentum starts anew.

    Of this network it can prune the inner channels of blocks: the shortcuts pad channels by
    constants of Python, which it does not change.
    """
    import torch_pruning as tp

    example = normalized(run.test.pixels[:1])
    fixed = [run.model.linear, run.model.conv1]
    fixed += [m.conv2 for m in run.model.modules() if isinstance(m, Block)]
    macs = tp.utils.count_ops_and_params(run.model, example)[0]
    pruner = tp.pruner.GroupNormPruner(
        run.model,
        example,
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        global_pruning=True,
        pruning_ratio=0.95,
        iterative_steps=200,
        ignored_layers=fixed,
    )
    if regularize:
        pruner.update_regularizer()
        run.go(REGULARIZING, REGULARIZED, lambda: pruner.regularize(run.model))
    while tp.utils.count_ops_and_params(run.model, example)[0] > BUDGET * macs:
        pruner.step()
    run.new_optimizer()
    run.go(1.0, REGULARIZED if regularize else AT_ONCE)
    return run.model


WAYS = {
    "dense": LONGER,
    "channels": OURS,
    "weights": WEIGHTS,
    "torch-pruning": AT_ONCE,
    "torch-pruning-regularized": REGULARIZED,
}
DEFAULT = ("channels", "torch-pruning")
CONTENDERS: dict[str, Callable[[Run], nn.Module]] = {
    LONGER: train_dense,
    OURS: prune_ours,
    WEIGHTS: prune_weights,
    AT_ONCE: lambda run: prune_peer(run, regularize=False),
    REGULARIZED: lambda run: prune_peer(run, regularize=True),
}

NOTES = {
    LONGER: f"""*{LONGER}*: with the epochs, the targets and the rates of the others.""",
    OURS: f"""*{OURS}*: those that vary least (`Fluctuation`) are masked in {ROUNDS} steps during
the first {100 * PRUNING:.0f} % of the epochs, as a knapsack over MACs allots them, at least
{100 * FLOOR:.0f} % of each group; then the small network trains on with the carried momentum.""",
    WEIGHTS: f"""*{WEIGHTS}*: two of every four inputs of all convolutions but the first, the
smallest, at once.""",
    AT_ONCE: f"""*{AT_ONCE}*: its `GroupNormPruner` (global, group magnitude). It prunes the inner
channels of blocks alone, since it does not change the constants by which these shortcuts pad
channels. Its published anchor is another setting: ResNet-56, 2.1 times fewer MACs, 100 epochs, a
loss of 0.07 to 0.6 points.""",
    REGULARIZED: f"""*{REGULARIZED}*: after its regularization for {100 * REGULARIZING:.0f} % of the
epochs.""",
}


# ----------------------------------------------------------------------------------------- results


@dataclass(frozen=True, slots=True)
class Outcome:
    """One contender with one seed. model: on the CPU. seconds: of all its training."""

    name: str
    seed: int
    model: nn.Module
    accuracy: float
    sizes: Sizes
    curve: list[tuple[float, float]]
    seconds: float


def epochs_within(seconds: float, step: float, images: int, runs: int) -> float:
    """Epochs of the dense network and of each run that fit. step: seconds of a step of the dense
    network on full images; crops take two thirds, small networks two thirds of that."""
    return seconds * BATCH / (step * images * 0.67 * (1 + 0.75 * runs))


def seconds_per_step(model: nn.Module, train: Images) -> float:
    """The median of five steps."""
    taken: list[float] = []
    run = Run(deepcopy(model), train, train, 5, 0, lambda _: taken.append(time.perf_counter()))
    run.evaluate = lambda: 0.0  # type: ignore[method-assign]
    run.go(1.0, "")
    return sorted(b - a for a, b in pairwise(taken))[2]


def recall(file: Path | None, compute: Callable[[], Outcome]) -> Outcome:
    """What a file has, or else what is computed and stored there."""
    if file is not None and file.exists():
        return torch.load(file, weights_only=False)
    outcome = compute()
    if file is not None:
        torch.save(outcome, file)
    return outcome


def outcomes(
    seeds: list[int],
    names: list[str],
    epochs: tuple[float, float],
    train: Images,
    test: Images,
    bar: Progress,
    folder: Path | None = None,
    crops: Crops = GROWING,
) -> Iterator[Outcome]:
    """The dense network, and every contender with every seed, which begin from it.

    epochs: of the dense network, and of each contender. folder: see `recall`.
    """
    dense_steps, steps = (max(round(e * len(train.labels) / BATCH), 4 * ROUNDS) for e in epochs)
    task = bar.add_task("", total=dense_steps + steps * len(seeds) * len(names))

    def tick(title: str) -> None:
        bar.update(task, advance=1, description=title)

    def finished(name: str, seed: int, run: Run, train_it: Callable[[Run], nn.Module]) -> Outcome:
        torch.manual_seed(run.seed)
        began = time.perf_counter()
        run.evaluate()
        model = train_it(run).eval()
        right = run.evaluate()
        seconds = time.perf_counter() - began
        model = model.cpu()
        return Outcome(name, seed, model, right, sizes_of(model), run.accuracies, seconds)

    def tuned(name: str, seed: int) -> Outcome:
        copy = deepcopy(dense.model)
        run = Run(copy, train, test, steps, seed + 100, tick, TUNING_RATE, teacher, crops)
        return finished(name, seed, run, CONTENDERS[name])

    def file_of(name: str) -> Path | None:
        return folder / f"{name}.pt" if folder is not None else None

    dense = recall(
        file_of("dense"), lambda: finished(DENSE, 0, Run(pretrained(), train, test, dense_steps, 0, tick), train_dense)
    )
    yield dense
    teacher = logits_of(deepcopy(dense.model).to(train.pixels.device), train)
    for seed, (way, name) in product(seeds, WAYS.items()):
        if name in names:
            file = file_of(f"{way}-{seed}")
            yield recall(file, lambda name=name, seed=seed: tuned(name, seed))


def sizes_of(model: nn.Module) -> Sizes:
    """Parameters and MACs of one image; zeros in convolutions count for neither."""
    example = (torch.zeros(1, 3, 32, 32),)
    slim = demask.demask(model, example, check=False)
    sizes = demask.report(slim).after
    positions: dict[str, int] = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, y, name=name: positions.update({name: y[0, 0].numel()}))
        for name, layer in slim.named_modules()
        if isinstance(layer, nn.Conv2d)
    ]
    with torch.inference_mode():
        slim(*example)
    for hook in hooks:
        hook.remove()
    zeros = {name: int((slim.get_submodule(name).weight == 0).sum()) for name in positions}
    return replace(
        sizes,
        parameters=sizes.parameters - sum(zeros.values()),
        macs=sizes.macs - sum(count * positions[name] for name, count in zeros.items()),
    )


def timed(results: list[Outcome], test: Images) -> dict[str, Timing]:
    """Seconds of a batch of 64 in each network of the first seed, optimized, all in turns."""
    x = normalized(test.pixels[:64].cpu())
    first = {r.name: r for r in reversed(results)}
    fast = {name: demask.optimize(r.model, (x,)) for name, r in reversed(first.items())}
    calls = {name: lambda run=run: run(x) for name, run in fast.items()}
    with torch.inference_mode():
        return Timing.of_each(race(calls, 31, seconds=20))


def interval(values: list[float], digits: int = 2) -> str:
    """Mean ± 95 % interval of Student's t; of fewer than three values, these."""
    if len(values) < 3:
        return ", ".join(f"{value:.{digits}f}" for value in values)
    reach = STUDENT.get(len(values), 1.96) * stdev(values) / len(values) ** 0.5
    return f"{mean(values):.{digits}f} ± {reach:.{digits}f}"


def page(
    results: list[Outcome],
    epochs: tuple[float, float],
    before: str,
    images: int,
    timings: dict[str, Timing],
    crops: Crops,
    device: str,
) -> str:
    """The page of results."""
    names = list(dict.fromkeys(r.name for r in results))
    dense = results[0]
    rows = []
    for name in names:
        own = [r for r in results if r.name == name]
        lost = interval([dense.accuracy - r.accuracy for r in own])
        rows.append(
            [
                name,
                interval([r.accuracy for r in own]),
                lost if name != DENSE else "",
                f"{100 * mean(r.sizes.macs for r in own) / dense.sizes.macs:.1f} %",
                f"{mean(r.sizes.parameters for r in own):,.0f}",
                format_spread(timings[name]),
                f"{mean(r.seconds for r in own):.0f} s",
            ]
        )
    head = ["", "test accuracy, %", "less than dense, points", "MACs", "parameters", "ms, 64 images", "training"]
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    sides = ", ".join(f"{side} until {100 * end:.0f} %" for end, side in GROWING)
    of = " of the dense network" if crops == WHOLE else ""
    seeds = len({r.seed for r in results[1:]})
    many = "One seed" if seeds == 1 else f"{seeds} seeds"
    trained = "the CPU" if device == "cpu" else torch.cuda.get_device_name(device)
    longer = "" if LONGER in names else " With as many epochs the dense network may be better."
    notes = "\n".join(NOTES[name] for name in names if name in NOTES)
    spread = ", 95 % intervals of Student's t" if seeds > 2 else ""
    return f"""# ResNet-20 on CIFAR-10 with half of its MACs

{images:,} JPEG images; published weights fine-tuned for {epochs[0]:.2g} epochs; from there
{epochs[1]:.2g} epochs for each row and seed, with the dense network's logits as targets (Hinton et
al. 2015).{longer} Sides of the crops{of}: {sides} of the
steps. {many} of one dense network{spread}. Trained on {trained}. Milliseconds are of the CPU, of
`demask.optimize` of the first seed's networks, in turns.

{table}

{notes}

![Test accuracy by epoch, and at the end](resnet20_cifar.svg)

Made by `{" ".join(["python examples/resnet20_cifar.py", *sys.argv[1:]])}`.
{describe_machine()}, demask {demask.__version__}. Load before and after: {before},
{load_average()}.
"""


def draw(results: list[Outcome], path: Path) -> None:
    """Accuracy by epoch, each seed a line, and at the end, with intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    curves, ends = figure.subplots(1, 2, width_ratios=(3, 2))
    names = list(dict.fromkeys(r.name for r in results))
    palette = ("#8c8c8c", "black", "#d1661f", "#8c4fa3", "#2a78b5", "#5aa469")
    colors = dict(zip((DENSE, *CONTENDERS), palette, strict=True))
    for place, name in enumerate(names):
        own = [r for r in results if r.name == name]
        for k, r in enumerate(own):
            curves.plot(
                *zip(*r.curve, strict=True),
                color=colors[name],
                linewidth=1.1,
                alpha=0.8,
                label=name if k == 0 else None,
            )
        values = [r.accuracy for r in own]
        ends.plot(values, [place] * len(values), "o", color=colors[name], markersize=5, alpha=0.7)
        if len(values) > 2:
            reach = STUDENT.get(len(values), 1.96) * stdev(values) / len(values) ** 0.5
            ends.errorbar(mean(values), place, xerr=reach, color=colors[name], capsize=4, fmt="|")
    curves.set_xlabel("epochs of tuning")
    curves.set_ylabel("test accuracy, %")
    curves.legend(fontsize=8, frameon=False)
    ends.set_yticks(range(len(names)), names, fontsize=8)
    ends.invert_yaxis()
    ends.set_xlabel("test accuracy at the end, %")
    for axes in (curves, ends):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few steps, to build/examples")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--ways", nargs="+", choices=WAYS, help=f"default: {', '.join(DEFAULT)}")
    parser.add_argument("--minutes", type=float, default=50, help="for all training, about")
    parser.add_argument("--epochs", type=float, help="of each way; default: by --minutes")
    parser.add_argument("--whole", action="store_true", help="no small crops to begin with")
    parser.add_argument("--dense-epochs", type=float, default=3, help="at most --epochs")
    parser.add_argument("--device", default="cpu", help="that trains: cpu (default) or cuda")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of the networks")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="folder; default: examples/results")
    return parser.parse_args()


def main() -> None:
    options, before = parse(), load_average()
    torch.set_num_threads(options.threads)
    torch.backends.cudnn.benchmark = True
    output = options.output or (QUICK if options.quick else RESULTS)
    output.mkdir(parents=True, exist_ok=True)
    ways = options.ways or (WAYS if options.quick else DEFAULT)
    names = [WAYS[w] for w in ways if not w.startswith("torch-") or find_spec("torch_pruning")]
    train, test = (
        Images.read(f"cifar10_{name}_jpeg.zip", most if options.quick else None).to(options.device)
        for name, most in (("train", 1280), ("test", 200))
    )
    seeds = options.seeds[:1] if options.quick else options.seeds
    each = 1.0 if options.quick else options.epochs
    if each is None:
        step, runs = seconds_per_step(pretrained(), train), len(seeds) * len(names)
        each = epochs_within(60 * options.minutes, step, len(train.labels), runs)
    epochs = min(each, options.dense_epochs), each
    crops = WHOLE if options.whole else GROWING
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        results: list[Outcome] = []
        for outcome in outcomes(seeds, names, epochs, train, test, bar, options.keep, crops):
            results.append(outcome)
            print(
                f"seed {outcome.seed}, {outcome.name}: {outcome.accuracy:.2f} %, "
                f"{outcome.sizes.macs:,} MACs, {outcome.seconds:.0f} s",
                flush=True,
            )
    draw(results, output / "resnet20_cifar.svg")
    timings = timed(results, test)
    text = page(results, epochs, before, len(train.labels), timings, crops, options.device)
    (output / "resnet20_cifar.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
