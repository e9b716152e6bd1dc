"""Pages of which most is paper, restored where something is on them, against the whole page:
`python -m benchmarks run pilot_regions`.

The network has the size and the blocks of TAEF2's decoder after three strided convolutions, and
its result is added to the page. Its weights are random: its result is no better than the page, but
it takes the time and has the halo of such networks, and every layer counts in what is compared.
Contenders take turns in one process, page by page, in alternating order, with an allocator that
reuses memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import onnxruntime
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from rich.console import Console
from torch import Tensor, nn

import demask
import networks
from benchmarks.common import turns
from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.inductor import NAME
from benchmarks.common.ledger import RESULTS, Cell, Page, Run, Table, save
from benchmarks.pilot.pilot_mlp import compiled
from benchmarks.pilot.pilot_pages import page
from demask.machine.allocator import fix_allocator
from demask.machine.describe import format_threads, load_average
from demask.ops import TABLE
from demask.pilot.conditions.regions import InRegions, Missed, Regions
from demask.traverse import tile
from traverse_networks import SEED, Block, conv

BENCHMARK = Benchmark(
    "mostly empty pages: regions against the whole page",
    "not timed",
    needs=(DEV, SHARED_DATA),
    quick="--size 256 --pages 1 --threads 1",
    writes=("pilot_regions.png",),
    measures=("pilot", "traverse", "kernels"),
)

SIZE, PAGES, THREADS, TILE, GROW = 2048, 8, 2, 64, 8
TOLERANCE = 8 / 255  # a difference that matters, of values from 0 to 1
SAMPLE = 256  # pixels a side of the part of a page that the last layer is scaled with
MEMORY = "512MiB"
WHOLE = ("torch, channels_last", f"demask.traverse, {MEMORY}", "ONNX Runtime", NAME)  # 20 GiB together


class Restorer(nn.Module):
    """Pages (n, 3, h, w) -> pages, h and w multiples of 8: what is not white to an eighth by
    strided convolutions, back by the blocks of TAEF2's decoder without its norms, added to the
    page. Beside the page stands white, as convolutions pad it."""

    def __init__(self, width: int = 64):
        super().__init__()
        layers: list[nn.Module] = []
        for inner in (3, width, width):
            layers += [nn.Conv2d(inner, width, 3, 2, 1), nn.ReLU()]
        for k, blocks in enumerate((3, 3, 3, 1)):
            if k:
                layers += [nn.Upsample(scale_factor=2), conv(width, width, bias=False)]
            layers += [Block(width, pooled=False) for _ in range(blocks)]
        self.layers = nn.Sequential(*layers, conv(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(1 - x)


@torch.no_grad()
def restorer() -> nn.Module:
    """The network with random weights and small biases; what it adds to a page of noise is scaled
    to a twentieth of the range of values."""
    generator = torch.Generator().manual_seed(SEED)
    model = networks.randomised(Restorer(), generator, gain=2.0)
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    for layer in convolutions:
        if layer.bias is not None:
            layer.bias.mul_(0.1)
    noise = torch.rand(1, 3, SAMPLE, SAMPLE, generator=generator)
    convolutions[-1].weight.mul_(0.05 / (model(noise) - noise).std())
    return model.eval()


def page_itself(x: Tensor) -> Tensor:
    return x


CONDITIONS: Mapping[str, tuple[Regions, Any]] = {
    "regions by contrast": (Regions(0.1, tile=TILE, grow=GROW, fill=page_itself), None),
    "regions by downsample:8": (Regions(0.1, tile=TILE, grow=GROW, fill=page_itself), "downsample:8:area"),
    "downsample:8, filled in": (Regions(0.05, tile=TILE, grow=GROW, fill="pilot"), "downsample:8:area"),
}


# --- contenders ---------------------------------------------------------------------------------

Call = Callable[[Tensor], Tensor]


def contenders(model: nn.Module, x: Tensor, names: Sequence[str], folder: str) -> dict[str, Call]:
    """The call of each contender named, of a page to a page."""
    calls: dict[str, Call] = {}
    for name in names:
        if name == WHOLE[0]:
            last: Any = restorer()
            last = last.to(memory_format=torch.channels_last)
            calls[name] = lambda x, m=last: m(x.contiguous(memory_format=torch.channels_last))
        elif name == WHOLE[1]:
            calls[name] = tile(model, (x,), memory=MEMORY)
        elif name == NAME:
            calls[name] = compiled(model, x)
        else:
            calls[name] = in_runtime(model, x, Path(folder, "restorer.onnx"))
    return calls


def in_runtime(model: nn.Module, x: Tensor, path: Path) -> Call:
    demask.to_onnx(model, path, (x[..., :SAMPLE, :SAMPLE],), dynamic_shapes="all")  # checked at this size
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (port,) = session.get_inputs()
    return lambda x: torch.from_numpy(session.run(None, {port.name: x.numpy()})[0])


# --- one page -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Row:
    """One page. seconds: of a call, by contender. ran: what ours reported of their call.
    differences: the largest one from the reference within what was run, and the share of equal
    values; missed: what was left out."""

    seed: int
    seconds: dict[str, float] = field(default_factory=dict)
    ran: dict[str, str] = field(default_factory=dict)
    selected: dict[str, float] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)
    differences: dict[str, tuple[float, float]] = field(default_factory=dict)
    missed: dict[str, Missed] = field(default_factory=dict)

    def gain(self, who: str) -> float:
        """How many times as fast as the fastest contender that runs the whole page."""
        whole = [self.seconds[name] for name in self.seconds if name in WHOLE]
        return min(whole) / self.seconds[who] if whole else float("nan")


@torch.no_grad()
def measured(seed: int, x: Tensor, whole: Mapping[str, Call], ours: Mapping[str, InRegions], reference: Call) -> Row:
    """A turn of each contender on a page; results of ours are compared with the whole page's."""
    row = Row(seed)
    every: list[tuple[str, Call]] = [*whole.items(), *ours.items()]
    results: dict[str, Tensor] = {}
    for name, call in every[:: -1 if seed % 2 else 1]:
        turns.settle()
        start = perf_counter()
        y = call(x)
        row.seconds[name] = perf_counter() - start
        if name in ours:
            results[name] = y
    full = reference(x)
    for name, module in ours.items():
        ran = module.last.images[0]
        row.ran[name], row.selected[name], row.work[name] = str(ran), ran.selected, ran.work
        where = module.last.where
        gap = (results[name] - full).abs().movedim(1, -1)[where]
        equal = float((gap == 0).double().mean()) if gap.numel() else 1.0
        row.differences[name] = (float(gap.max()) if gap.numel() else 0.0, equal)
        row.missed[name] = Regions.missed(full, module.filled(x), where, TOLERANCE)
    return row


# --- the picture --------------------------------------------------------------------------------


def picture(x: Tensor, module: InRegions, path: Path, side: int = 640) -> None:
    """A page with the rectangles that were run, in colour; what was not is pale."""
    (ran,) = module.last.images
    size = x.shape[-1]
    pale = torch.where(ran.where, x[0], 0.35 * x[0] + 0.5)
    small = F.interpolate(pale[None], (side, side), mode="area")[0]
    sheet = Image.fromarray((small.clamp(0, 1) * 255).byte().permute(1, 2, 0).contiguous().numpy())
    pen = ImageDraw.Draw(sheet)
    for top, bottom, left, right in ran.areas:
        corners = [k * side // size for k in (left, top, right, bottom)]
        pen.rectangle([corners[0], corners[1], corners[2] - 1, corners[3] - 1], outline="#ff3b30", width=2)
    sheet.quantize(128).save(path, optimize=True)


# --- the page of results ------------------------------------------------------------------------

SPEED = ["contender", "seconds", "least", "most", "times as fast as the fastest whole", "work"]
QUALITY = [
    "condition",
    "largest difference where run",
    "share of values equal",
    "matters, %",
    "missed, % of the page",
    "recall, %",
    "largest difference elsewhere",
]
EACH = ["page", "condition", "ran", "seconds", "times as fast"]


def times(rows: Sequence[Row]) -> Iterator[list[Cell]]:
    for name in rows[0].seconds:
        seconds = [row.seconds[name] for row in rows]
        work = median(row.work.get(name, 1.0) for row in rows)
        gain = median(row.gain(name) for row in rows)
        yield [name, median(seconds), min(seconds), max(seconds), gain, work]


def quality(rows: Sequence[Row]) -> Iterator[list[Cell]]:
    for name in rows[0].missed:
        missed = [row.missed[name] for row in rows]
        yield [
            name,
            max(row.differences[name][0] for row in rows),
            min(row.differences[name][1] for row in rows),
            100 * median(one.matters for one in missed),
            100 * median(one.missed for one in missed),
            100 * median(one.recall for one in missed),
            max(one.worst for one in missed),
        ]


def report(rows: Sequence[Row], size: int) -> Page:
    each: list[list[Cell]] = [
        [row.seed, name, words, row.seconds[name], row.gain(name)] for row in rows for name, words in row.ran.items()
    ]
    gains = [row.gain(name) for row in rows for name in row.ran]
    recall = [100 * missed.recall for row in rows for missed in row.missed.values()]
    summary = (
        f"{min(gains):.2f} to {max(gains):.2f} times as fast as the fastest that runs the "
        f"whole page, slower in {sum(gain < 1 for gain in gains)} of {len(gains)}; "
        f"{min(recall):.0f} to {max(recall):.0f} % of what matters is run"
    )
    return Page(
        "Pages restored where something is on them",
        [
            f"""
{len(rows)} pages of {size} x {size} pixels, from seed {rows[0].seed}: text of this project's
documents and a photograph, paper with noise and shade
([pilot_pages.py](../pilot/pilot_pages.py)). The network has the size and the blocks of TAEF2's
decoder, and random weights. Batch 1, float32. Medians over the pages; a turn is one call. *Work*:
multiply-adds with halos over those of the whole page. *Difference where run*: from the whole page
in `demask.traverse`, whose kernels are the same; torch and oneDNN choose them by size.

*Matters*: the whole run and what stands in for it differ by more than 8/255 in some channel;
*missed*: that part of it that was not run; *recall*: the share of it that was. *By contrast*: tiles
whose input varies by more than 0.1 within 8 x 8 pixels; elsewhere the page itself. *By
downsample:8*: tiles in which the answer of the network at an eighth of the resolution is more than
0.1 from the page; elsewhere the page. *Filled in*: tiles in which that answer varies by more than
0.05; elsewhere that answer.""",
            Table(SPEED, [*times(rows)]),
            Table(QUALITY, [*quality(rows)]),
            "![A page, and the rectangles that were run](pilot_regions.png)",
            Table(EACH, each, 2),
        ],
        summary,
    )


# --- the command line ---------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pages", type=int, default=PAGES)
    add("--size", type=int, default=SIZE, help="pixels a side, a multiple of 64")
    add("--threads", type=int, default=THREADS)
    add("--first", type=int, default=0, help="the seed of the first page")
    add("--contenders", nargs="*", choices=WHOLE, default=list(WHOLE))
    add("--output", type=Path, help="a page of its own, in place of the ledger")
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    options, console = arguments(), Console(markup=False)
    torch.set_num_threads(options.threads)
    allocator, before = fix_allocator(), load_average()
    model = restorer()
    x, _ = page(0, options.size)
    rows: list[Row] = []
    with TemporaryDirectory() as folder:
        whole = contenders(model, x, options.contenders, folder)
        ours = {
            name: condition.applied(model, (x,), None, pilot, TABLE) for name, (condition, pilot) in CONDITIONS.items()
        }
        reference = next(iter(ours.values())).tiled_model
        for call in (*whole.values(), *ours.values()):  # the first call of each is not timed
            call(x)
        for seed in range(options.first, options.first + options.pages):
            x, _ = page(seed, options.size)
            rows.append(measured(seed, x, whole, ours, reference))
            if seed == options.first:
                path = options.output or RESULTS / "pilot_regions.md"
                picture(x, next(iter(ours.values())), path.with_suffix(".png"))
            timings = "; ".join(f"{name} {n:.2f} s" for name, n in rows[-1].seconds.items())
            console.print(f"page {seed}: {timings}")
            for name, ran in rows[-1].ran.items():
                console.print(f"  {name}: {ran}; {rows[-1].differences[name]}; {rows[-1].missed[name]}")
    run = Run.now(format_threads(options.threads), allocator, before=before)
    print(save("pilot_regions", report(rows, options.size), run, options.output))


if __name__ == "__main__":
    main()
