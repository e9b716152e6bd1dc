"""An encoder pruned while transformers' Trainer trains it: `python examples/encoder_trainer.py`.

The task is made from what Python ships: which module of the standard library a line of source is
from. The encoder is BERT's, as small as two cores train in minutes (by default 4 layers of 128, 4
heads, 512 units). Halfway half of its heads and units are masked; then the small network is
demasked out and trained on, with the optimizer's state carried over and, to compare, with a new
optimizer. Both losses are drawn, and the masked network that trains on.

BERT-base's layers, on a GPU: `--size 768x12x12 --rate 1e-4 --device cuda --name
encoder_trainer_base`.

Needs transformers and accelerate. Writes examples/results/encoder_trainer.md and .svg (`--quick`:
to build/examples).
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import demask
from demask import prune
from demask.machine.clock import Timing, race
from demask.machine.describe import describe_machine, format_spread, load_average

ROOT = Path(__file__).parents[1]
# transformers imports torchvision, whose wheels do not load next to a CPU build of torch.
with contextlib.suppress(ImportError):
    sys.path.append(str(ROOT / "tests" / "networks" / "zoo"))
    from networks import torchvision

    torchvision()

from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    logging,
)

from demask.prune.adapters.transformers import PruneCallback  # noqa: E402

RESULTS, QUICK = ROOT / "examples" / "results", ROOT / "build" / "examples"
MODULES = (
    "argparse",
    "ast",
    "datetime",
    "decimal",
    "doctest",
    "inspect",
    "ipaddress",
    "optparse",
    "pickle",
    "subprocess",
    "tarfile",
    "threading",
    "turtle",
    "typing",
    "zipfile",
    "_pydatetime",
    "_pydecimal",
    "dataclasses",
    "statistics",
    "fractions",
)
LENGTH, WORDS = 32, 4000  # tokens of a line; of the vocabulary
PAD, UNKNOWN, START = 0, 1, 2
AMOUNT, ROUNDS = 0.5, 3  # of heads and units; steps of pruning
TOKEN = re.compile(r"[A-Za-z]+|\d|[^\sA-Za-z\d]")


# ------------------------------------------------------------------------------------------- task


@dataclass(frozen=True)
class Lines(Dataset):
    """Lines of source: tokens (n, LENGTH), and the number of the module they are from (n,)."""

    tokens: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        tokens = self.tokens[k]
        return {"input_ids": tokens, "attention_mask": (tokens != PAD).long(), "labels": self.labels[k]}


def read_task(test_share: float = 0.15) -> tuple[Lines, Lines, tuple[str, ...]]:
    """Lines to train with, others to test, and the modules' names. No line is in both, nor from two
    modules."""
    folder = Path(sysconfig.get_path("stdlib"))
    found: dict[str, set[str]] = {}
    for name in MODULES:
        file = folder / f"{name}.py"
        for line in file.read_text().splitlines() if file.exists() else ():
            if len(TOKEN.findall(line)) >= 4:
                found.setdefault(line.strip(), set()).add(name)
    lines = sorted((line, next(iter(names))) for line, names in found.items() if len(names) == 1)
    modules = tuple(sorted({name for _, name in lines}))
    counts = Counter(word for line, _ in lines for word in TOKEN.findall(line))
    numbers = {word: k + 3 for k, (word, _) in enumerate(counts.most_common(WORDS - 3))}
    rows = [[START, *(numbers.get(w, UNKNOWN) for w in TOKEN.findall(line))] for line, _ in lines]
    tokens = torch.tensor([(row + [PAD] * LENGTH)[:LENGTH] for row in rows])
    labels = torch.tensor([modules.index(name) for _, name in lines])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order.tensor_split([int(test_share * len(labels))])
    return Lines(tokens[train], labels[train]), Lines(tokens[test], labels[test]), modules


def new_model(classes: int, size: str) -> BertForSequenceClassification:
    """BERT with random weights. size: "128x4x2" is 4 layers of 128 with 2 heads."""
    width, layers, heads = map(int, size.split("x"))
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=LENGTH,
            num_labels=classes,
            attn_implementation="sdpa",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


# --------------------------------------------------------------------------------------- training


class Losses(TrainerCallback):
    """Notes the training loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.values.append(logs["loss"])


class StopAt(TrainerCallback):
    """Ends training at a step of the schedule."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_training_stop |= state.global_step >= self.step
        return control


def arguments(options: argparse.Namespace, steps: int) -> TrainingArguments:
    """Every step is logged; nothing is saved or sent anywhere."""
    return TrainingArguments(
        output_dir=str(options.output),
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=256,
        report_to=[],
        disable_tqdm=True,
        use_cpu=options.device == "cpu",
        seed=0,
        dataloader_pin_memory=False,
    )


def accuracy(model: torch.nn.Module, lines: Lines) -> float:
    """Percent of the lines whose module is named."""
    model.eval()
    with torch.inference_mode():
        right = sum(
            (logits(model, x).argmax(1).cpu() == y).sum().item()
            for x, y in zip(lines.tokens.split(256), lines.labels.split(256), strict=True)
        )
    return 100 * right / len(lines)


def logits(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Of a model on any device, (n, classes)."""
    tokens = tokens.to(next(model.parameters()).device)
    out = model(input_ids=tokens, attention_mask=(tokens != PAD).long())
    return out["logits"]


# ------------------------------------------------------------------------------------------- runs


@dataclass
class Training:
    """A model with its pruners, optimizer and schedule. masks: heads, and units."""

    model: BertForSequenceClassification
    pruners: list[prune.Pruner]
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler

    @classmethod
    def new(cls, options: argparse.Namespace, classes: int) -> Training:
        """From random weights. The optimizer is made before any mask: its order is the model's."""
        torch.manual_seed(0)
        model = new_model(classes, options.size).to(options.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_of(options.steps))
        example = example_inputs(2, options.device)
        pruners = [
            prune.Pruner(
                model,
                example,
                score=prune.Taylor(),
                structure=structure,
                schedule=prune.Iterative(ROUNDS, fraction=AMOUNT),
            )
            for structure in ("head", "unit")
        ]
        return cls(model, pruners, optimizer, schedule)

    def twin(self, options: argparse.Namespace, classes: int) -> Training:
        """The same weights, masks, states and place of the schedule, in other objects."""
        other = Training.new(options, classes)
        for mine, theirs in zip(self.pruners, other.pruners, strict=True):
            PruneCallback(theirs)  # masks of ones
            theirs.load_state_dict(mine.state_dict())
        other.model.load_state_dict(self.model.state_dict())
        other.optimizer.load_state_dict(self.optimizer.state_dict())
        other.schedule.load_state_dict(self.schedule.state_dict())
        return other

    def train(self, lines: Lines, until: int, options: argparse.Namespace, *callbacks: TrainerCallback) -> list[float]:
        """Train so many steps more with transformers' Trainer: the loss of each."""
        losses = Losses()
        trainer = Trainer(
            self.model,
            arguments(options, until),
            train_dataset=lines,
            optimizers=(self.optimizer, self.schedule),
            callbacks=[losses, *callbacks],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return losses.values


def rate_of(steps: int) -> Any:
    """The share of the rate by step: it rises for a tenth of the steps, and falls to 0."""
    rise = max(steps // 10, 1)
    return lambda step: min(step / rise, max(steps - step, 0) / (steps - rise))


def example_inputs(count: int, device: str) -> dict[str, Tensor]:
    ones = torch.ones(count, LENGTH, dtype=torch.long, device=device)
    return {"input_ids": ones, "attention_mask": ones.clone()}


def demasked(training: Training, device: str) -> nn.Module:
    """The small network; checked."""
    model, example = training.model.eval(), example_inputs(2, device)
    slim = demask.demask(model, (), example)
    demask.verify(model, slim, (), example)
    return slim


@dataclass(frozen=True)
class Outcome:
    """losses: by way to go on, of every step from the middle on. before: of the steps before.
    timings: by device, and by way."""

    before: list[float]
    losses: dict[str, list[float]]
    accuracies: dict[str, float]
    sizes: tuple[Any, Any]
    timings: dict[str, dict[str, Timing]]
    pruned: list[int]


MASKED, CARRIED, NEW = "masked", "demasked, carried", "demasked, new optimizer"


def run(options: argparse.Namespace, train: Lines, test: Lines, classes: int) -> Outcome:
    """Train, prune, and go on from one place in three ways, with the same batches."""
    first, middle = Training.new(options, classes), options.steps // 2
    every = middle // (2 * ROUNDS)
    callbacks = [PruneCallback(p, start=middle // 2, every=every, rounds=ROUNDS) for p in first.pruners]
    before = first.train(train, middle, options, *callbacks)
    trainings = {name: first.twin(options, classes) for name in (MASKED, CARRIED, NEW)}
    for name in (CARRIED, NEW):
        training = trainings[name]
        slim = demasked(training, options.device)
        if name == CARRIED:
            demask.carry(slim, training.optimizer)
        else:
            rate = training.schedule.state_dict()
            training.optimizer = torch.optim.AdamW(slim.parameters(), lr=options.rate, weight_decay=0.01)
            training.schedule = torch.optim.lr_scheduler.LambdaLR(training.optimizer, rate_of(options.steps))
            training.schedule.load_state_dict(rate)
        training.model = slim.train()
    report = demask.report(slim)
    losses = {n: t.train(train, options.steps - middle, options) for n, t in trainings.items()}
    accuracies = {"at the middle": accuracy(first.model, test)}
    accuracies |= {name: accuracy(t.model, test) for name, t in trainings.items()}
    models = {name: training.model.eval() for name, training in trainings.items()}
    timings = {device: time_on(models, device, test) for device in dict.fromkeys((options.device, "cpu"))}
    steps = [middle // 2 + k * every for k in range(ROUNDS)]
    return Outcome(before, losses, accuracies, (report.before, report.after), timings, steps)


def time_on(models: dict[str, nn.Module], device: str, lines: Lines) -> dict[str, Timing]:
    """Seconds of 32 lines in each model, in turns; the models are on that device then."""
    models = {name: model.to(device) for name, model in models.items()}
    x = lines.tokens[:32].to(device)

    def call(model: nn.Module) -> None:
        logits(model, x)
        if device != "cpu":
            torch.accelerator.synchronize()

    with torch.inference_mode():
        calls = {name: lambda m=model: call(m) for name, model in models.items()}
        return Timing.of_each(race(calls, 15, seconds=6))


# ----------------------------------------------------------------------------------------- results


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Means over the last `width` values."""
    return [mean(values[max(k - width + 1, 0) : k + 1]) for k in range(len(values))]


def draw(outcome: Outcome, path: Path) -> None:
    """The loss of all steps, and the difference of both ways from the masked network's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.4), layout="constrained")
    losses, differences = figure.subplots(2, 1)
    middle = len(outcome.before)
    width = max(middle // 40, 1)
    colors = {MASKED: "#8c8c8c", CARRIED: "#2a78b5", NEW: "#d1661f"}
    losses.plot(smooth(outcome.before, width), color="black", linewidth=1, label="while pruned")
    for name, values in outcome.losses.items():
        whole = smooth([*outcome.before, *values], width)
        losses.plot(
            range(middle - 1, len(whole)),
            whole[middle - 1 :],
            color=colors[name],
            linewidth=3 if name == MASKED else 1.1,
            label=name,
        )
    for step in outcome.pruned:
        losses.axvline(step, color="#d1661f", linestyle=":", linewidth=0.8)
    losses.axvline(middle, color="black", linestyle="--", linewidth=0.8)
    losses.set_ylabel(f"training loss, mean of {width} steps")
    losses.set_xlabel("step (dotted: pruning; dashed: demask)")
    for name in (CARRIED, NEW):
        difference = [a - b for a, b in zip(outcome.losses[name], outcome.losses[MASKED], strict=True)]
        differences.plot(
            range(middle, middle + len(difference)), difference, color=colors[name], linewidth=1, label=name
        )
    differences.set_ylabel("loss - loss of the masked network")
    differences.set_xlabel("step")
    for axes in (losses, differences):
        axes.legend(fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def page(outcome: Outcome, options: argparse.Namespace, task: str, seconds: float) -> str:
    """The page of results."""
    near = min(20, len(outcome.losses[MASKED]))
    places = {device: "CPU" if device == "cpu" else torch.cuda.get_device_name(device) for device in outcome.timings}
    head = [
        "",
        "test accuracy, %",
        *(f"ms, 32 lines, {place}" for place in places.values()),
        f"largest change of the loss, {near} steps",
    ]
    rows = [head, ["---"] * len(head)]
    for name, values in outcome.losses.items():
        pairs = zip(values[:near], outcome.losses[MASKED][:near], strict=True)
        change = max(abs(a - b) for a, b in pairs)
        rows.append(
            [
                name,
                f"{outcome.accuracies[name]:.1f}",
                *(format_spread(timings[name]) for timings in outcome.timings.values()),
                "" if name == MASKED else f"{change:.2g}",
            ]
        )
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    before, after = outcome.sizes
    return f"""# An encoder pruned while transformers' Trainer trains it

{task}
BERT's architecture, {options.size} (width x layers x heads), random weights, no dropout (its draws
depend on sizes). After {options.steps // 4} steps of {options.batch} lines, heads and units are
masked in {ROUNDS} rounds to {100 * AMOUNT:.0f} %, by Taylor's score; after {options.steps // 2} the
network is demasked: {before.parameters:,} -> {after.parameters:,} parameters,
{before.macs:,} -> {after.macs:,} MACs for two lines (the last layer is computed for the one token
that the classifier reads, too). Then each row goes on for
{options.steps - options.steps // 2} steps with the same batches and the same schedule of the rate.
Accuracy at the demasking: {outcome.accuracies["at the middle"]:.1f} %. Trained on
{places[options.device]}; milliseconds are of torch, with {options.threads} threads on the CPU.

{table}

The last column: the largest difference of the loss from that of the masked network.

![Training loss, and its difference from the masked network's]({options.name}.svg)

Made by `{" ".join(["python examples/encoder_trainer.py", *sys.argv[1:]])}` in
{seconds / 60:.1f} minutes. {describe_machine()}, demask {demask.__version__}. Load at the end:
{load_average()}.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few steps, to build/examples")
    parser.add_argument("--size", default="128x4x4", metavar="WIDTHxLAYERSxHEADS")
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--device", default="cpu", help="that trains: cpu (default) or cuda")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="encoder_trainer", help="of the page and the picture")
    parser.add_argument("--output", type=Path, help="folder; default: examples/results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    options.output = options.output or (QUICK if options.quick else RESULTS)
    options.output.mkdir(parents=True, exist_ok=True)
    if options.quick:
        options.size, options.steps, options.batch = "64x2x2", min(options.steps, 48), 16
    train, test, modules = read_task()
    task = (
        f"Which of {len(modules)} modules of Python's standard library a line of source is "
        f"from: {len(train):,} lines to train with, {len(test):,} others to test."
    )
    began = time.perf_counter()
    outcome = run(options, train, test, len(modules))
    draw(outcome, options.output / f"{options.name}.svg")
    text = page(outcome, options, task, time.perf_counter() - began)
    (options.output / f"{options.name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
