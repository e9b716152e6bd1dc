"""Masked and demasked residual networks, timed beside each other: `python benchmarks/residual.py`.

The networks are those of He et al. 2015, "Deep residual learning for image recognition", section
4.2 (CIFAR images of 32 x 32, three stages, shortcuts without weights), with random weights and
batch norm statistics. Half of each convolution's output channels are masked, drawn anew for each
layer, so the sides of a residual add never agree. Writes benchmarks/results/residual.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import demask
from demask.graph.capture import capture
from demask.machine.allocator import fix_allocator
from demask.machine.timing import Timing, alternate
from demask.verify import ULPS

RESULTS = Path(__file__).parent / "results"
NETWORKS = ((20, 16), (56, 16), (20, 64))  # (depth, width of the first stage)
BATCHES = (64, 1)
IMAGE = (3, 32, 32)


class Block(nn.Module):
    """Two 3 x 3 convolutions added onto a shortcut, which is padded with zeros where it widens."""

    def __init__(self, channels: int, out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.stride, self.more = stride, out - channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.more:
            x = x[:, :, :: self.stride, :: self.stride]
            x = F.pad(x, (0, 0, 0, 0, self.more // 2, self.more - self.more // 2))
        return F.relu(x + y)


class ResNet(nn.Module):
    """`depth` = 6 n + 2 layers: a convolution, 3 stages of n blocks, a linear layer."""

    def __init__(self, depth: int, width: int = 16, classes: int = 10):
        super().__init__()
        count = (depth - 2) // 6
        self.conv = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        widths = [width] * count + [2 * width] * count + [4 * width] * count
        before = [width, *widths[:-1]]
        self.blocks = nn.Sequential(
            *(Block(a, b, 1 if a == b else 2) for a, b in zip(before, widths, strict=True))
        )
        self.linear = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn(self.conv(images))))
        return self.linear(x.mean((2, 3)))


def randomised(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """The model with batch norm scales, shifts and statistics drawn, in eval mode."""
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.weight.uniform_(0.5, 1.5, generator=generator)
                layer.bias.normal_(0, 0.2, generator=generator)
                layer.running_mean.normal_(0, 0.2, generator=generator)
                layer.running_var.uniform_(0.5, 1.5, generator=generator)
    return model.eval()


def masked(model: nn.Module, generator: torch.Generator, *, shifts: bool) -> nn.Module:
    """The model with half of each convolution's output channels zeroed, in place, a draw per layer.

    shifts: keep the batch norms as they are, so that a masked channel is a constant. Else their
    scale and shift are zeroed too, and a masked channel is 0.
    """
    layers = dict(model.named_modules())
    with torch.no_grad():
        for name, layer in layers.items():
            if isinstance(layer, nn.Conv2d):
                order = torch.randperm(layer.out_channels, generator=generator)
                gone = order[: layer.out_channels // 2]
                layer.weight[gone] = 0
                if not shifts:
                    norm = layers[name.replace("conv", "bn")]
                    norm.weight[gone] = norm.bias[gone] = 0
    return model


@dataclass(frozen=True, slots=True)
class Row:
    """One network in one setting; difference: relative, in float64; calls: before and after."""

    network: str
    shifts: str
    batch: int
    threads: int
    report: demask.Report
    calls: tuple[int, int]
    difference: float
    given: Timing
    result: Timing

    @property
    def speed(self) -> float:
        """How many times as fast the demasked network is: the ratio of the medians."""
        return self.given.median / self.result.median


def rows(threads: Sequence[int], pairs: int, seconds: float, bar: Progress) -> Iterator[Row]:
    """Every network, masked in both ways, at every batch size and number of threads."""
    tasks = [(d, w, s) for d, w in NETWORKS for s in (True, False)]
    step = bar.add_task("", total=len(tasks) * len(BATCHES) * len(threads))
    for depth, width, shifts in tasks:
        name = f"ResNet-{depth}" + (f", {width // 16} x wide" if width != 16 else "")
        bar.update(step, description=f"demasking {name}")
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        model = masked(randomised(ResNet(depth, width), generator), generator, shifts=shifts)
        example = (torch.randn(2, *IMAGE, generator=generator),)
        slim = demask.demask(model, example)
        difference = checked(model, slim, example)
        report, calls = demask.report(slim), (calls_of(model, example), calls_of(slim, example))
        for batch in BATCHES:
            images = torch.randn(batch, *IMAGE, generator=generator)
            for count in threads:
                bar.update(step, description=f"{name}, batch {batch}, {count} threads")
                given, result = timed(model, slim, images, count, pairs, seconds)
                kept = "kept" if shifts else "zero"
                yield Row(name, kept, batch, count, report, calls, difference, given, result)
                bar.advance(step)


def calls_of(model: nn.Module, example: tuple[Tensor]) -> int:
    """The calls of the captured graph."""
    return sum(node.op == "call_function" for node in capture(model, example).graph.nodes)


def checked(model: nn.Module, slim: nn.Module, example: tuple[Tensor]) -> float:
    """The relative difference of the two in float64, both made there; raises Mismatch above 1e-10,
    or where the float32 networks that are timed differ by more than 64 ulps."""
    ulps = demask.verify(model, slim, example, check=False).ulps
    if ulps > ULPS:
        raise demask.Mismatch(f"expected at most {ULPS:g} ulps in float32, got {ulps:.3g}")
    wide, inputs = deepcopy(model).double(), (example[0].double(),)
    return demask.verify(wide, demask.demask(wide, inputs), inputs).max_rel


def timed(
    model: nn.Module, slim: nn.Module, images: Tensor, threads: int, pairs: int, seconds: float
) -> tuple[Timing, Timing]:
    """Both networks on the same images, called in turns."""
    torch.set_num_threads(threads)
    with torch.inference_mode():
        calls = {"given": lambda: model(images), "result": lambda: slim(images)}
        found = alternate(calls, pairs, seconds=seconds)
    return found["given"], found["result"]


def machine() -> str:
    """This machine and the versions in words."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = f"{names[0]}, {len(names)} cores" if names else platform.processor() or "unknown CPU"
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    vectors = next((v for v in ("avx512f", "avx2", "asimd") if v in flags), "")
    return (
        f"{cpu}{f' ({vectors})' if vectors else ''}, {platform.system()}; Python "
        f"{platform.python_version()}, torch {torch.__version__}, demask {demask.__version__}"
    )


def load() -> str:
    """How busy the machine is: processes that run or want to, last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def spread(timing: Timing) -> str:
    """Milliseconds: median (10 %-90 %)."""
    low, median, high = (1e3 * t for t in (timing.low, timing.median, timing.high))
    return f"{median:.1f} ({low:.1f}–{high:.1f})"


def cells(row: Row) -> list[str]:
    before, after = row.report.before, row.report.after
    return [
        row.network, row.shifts, str(row.batch), str(row.threads),
        f"{before.parameters:,} → {after.parameters:,}", f"{after.macs / before.macs:.2f}",
        spread(row.given), spread(row.result), f"{row.speed:.2f}",
        "" if row.speed >= 1 else "slower", f"{row.difference:.0e}",
    ]  # fmt: skip


HEAD = [
    "network", "shifts", "batch", "threads", "parameters", "MACs left", "masked, ms",
    "demasked, ms", "speed", "", "difference",
]  # fmt: skip


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table of pipes."""
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in [list(head), rule, *lines])


def page(found: Sequence[Row], words: str) -> str:
    counts = sorted({t.count for row in found for t in (row.given, row.result)})
    slower = [row for row in found if row.speed < 1]
    return f"""# Residual networks, masked and demasked

Made by `python benchmarks/residual.py`. {words}

Half of each convolution's output channels are masked, drawn anew for each layer. Shifts *kept*:
batch norms stay as they are, so masked channels are constants; *zero*: they are 0. Milliseconds
are the median (10 %–90 % quantile) of {counts[0]}–{counts[-1]} alternated calls of each network in
one process. *MACs left*: demasked / masked. *Difference*: relative to the largest output, in
float64. Slower than the masked network: {len(slower)} of {len(found)} settings.

{markdown(HEAD, [cells(row) for row in found])}

Fewer MACs are no speed where a forward pass is mostly calls: the demasked graph has more of them,
some only to keep shapes or to give constants their border, and a border map is computed anew in
each call whatever the batch. `demask()` is minimal and knows no machine: it times nothing, and
never rounds an odd channel count up.

{markdown(["network", "shifts", "calls", *found[0].report.scatters], effects(found))}
"""


def effects(found: Sequence[Row]) -> list[list[str]]:
    """Calls and shape-keeping operations, once per network and kind of mask."""
    rows = {(row.network, row.shifts): row for row in found}.values()
    return [
        [r.network, r.shifts, f"{r.calls[0]} → {r.calls[1]}", *map(str, r.report.scatters.values())]
        for r in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--pairs", type=int, default=31, help="alternated calls of each network")
    parser.add_argument("--seconds", type=float, default=8.0, help="at most, per setting")
    parser.add_argument("--output", type=Path, default=RESULTS / "residual.md")
    asked = parser.parse_args()
    allocator, before = fix_allocator(), load()
    console = Console()
    with Progress(console=console, transient=True) as bar:
        found = list(rows(asked.threads, asked.pairs, asked.seconds, bar))
    today = datetime.date.today().isoformat()
    words = f"{today}. {machine()}; {allocator}. Load before and after: {before}, {load()}."
    table = Table(*HEAD, title=words)
    for row in found:
        table.add_row(*cells(row))
    console.print(table)
    asked.output.parent.mkdir(exist_ok=True)
    asked.output.write_text(page(found, words))


if __name__ == "__main__":
    main()
