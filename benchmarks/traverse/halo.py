"""The exact halo of six networks, the padding that people use, and the error of smaller ones.

    python -m benchmarks run halo

Draws docs/halo.svg: the error of a tile of TAEF2's decoder, with its trained weights, against the
padding.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

import torch
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress
from torch import Tensor, nn

import traverse_networks as shared
from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.ledger import Cell, Page, Run, Table, save
from demask.cli.bench import FASTER, ORIGINAL_COLOR, SLOWER, WORD_COLOR
from demask.machine.clock import Timing
from demask.machine.describe import load_average
from demask.traverse.halo import Halo, Point, halo

BENCHMARK = Benchmark(
    "the exact halo of six networks, and the error of smaller ones",
    "minutes",
    writes=("docs/halo.svg",),
    needs=(DEV, SHARED_DATA),
    quick="--rounds 1",
)

PICTURE = Path(__file__).parents[2] / "docs" / "halo.svg"
HEAD = ("network", "halo before", "halo after", "exact", "people use", "tool", "ms")
LATENT = 64  # rows and columns of the latent that the curve is of; its tile is 16 of them
USED = {11: "Tiled VAE", 16: "diffusers"}  # latent positions, of tools for such decoders
FLOOR = 1e-7  # what the picture draws for less


@dataclass(frozen=True, slots=True)
class Known:
    """A network, the channels of its input, and the padding that a tool gives its tiles."""

    name: str
    make: Callable[[], nn.Module]
    channels: int
    padding: str
    tool: str


NETWORKS = (
    Known("SD-VAE decoder", shared.sd_decoder, 4, "11; 16, blended", "Tiled VAE; diffusers"),
    Known("SD-VAE encoder", shared.sd_encoder, 3, "32", "Tiled VAE"),
    Known("TAEF2 decoder", shared.taef2, 32, "—", "—"),
    Known("RRDB-23", lambda: shared.RRDB(23), 3, "10", "Real-ESRGAN, x4plus"),
    Known("RRDB-6", lambda: shared.RRDB(6), 3, "10", "Real-ESRGAN, anime 6B"),
    Known("SRVGG-16", lambda: shared.SRVGG(16), 3, "10", "Real-ESRGAN"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """The halo of one network, and the time of a call, capture included."""

    network: str
    before: int
    after: int
    exact: bool
    padding: str
    tool: str
    time: Timing

    def cells(self) -> list[Cell]:
        exact = "yes" if self.exact else "convolutions"
        return [self.network, self.before, self.after, exact, self.padding, self.tool, self.time]


def row(known: Known, rounds: int) -> Row:
    """The halo along rows, global calls taken position by position, timed after a first call."""
    model, x = known.make().eval(), torch.zeros(1, known.channels, 64, 64)
    result, seconds = halo(model, (x,)), []
    for _ in range(rounds):
        start = time.perf_counter()
        result = halo(model, (x,))
        seconds.append(time.perf_counter() - start)
    side = result.inputs[0].rows
    return Row(
        known.name, side.local_before, side.local_after, side.exact, known.padding, known.tool, Timing.of(seconds)
    )


# --- the curve ----------------------------------------------------------------------------------


class FixedNorm(nn.Module):
    """A group norm with the statistics of the whole image."""

    def __init__(self, norm: nn.GroupNorm, x: Tensor):
        super().__init__()
        groups = x.double().unflatten(1, (norm.num_groups, -1)).flatten(2)
        spread = (groups.var(2, correction=0) + norm.eps).rsqrt()
        each = x.shape[1] // norm.num_groups
        scale = norm.weight * spread[0].repeat_interleave(each)
        shift = norm.bias - scale * groups.mean(2)[0].repeat_interleave(each)
        self.scale, self.shift = (v.float().view(1, -1, 1, 1) for v in (scale, shift))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


@torch.no_grad()
def with_statistics(model: nn.Module, x: Tensor) -> nn.Module:
    """The model with the statistics of each group norm as they are on the whole image `x`."""
    norms = {n: m for n, m in model.named_modules() if isinstance(m, nn.GroupNorm)}
    seen: dict[str, nn.Module] = {}
    hooks = [
        m.register_forward_pre_hook(lambda norm, args, n=n: seen.update({n: FixedNorm(norm, args[0])}))
        for n, m in norms.items()
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    for name, norm in seen.items():
        model.set_submodule(name, norm)
    return model


def curves(bar: Progress) -> dict[str, Halo]:
    """Of TAEF2: with each tile's own statistics, and with those of the whole image."""
    x = shared.latent(LATENT, LATENT)
    models = {
        "each tile's own statistics": shared.taef2(),
        "statistics of the whole image": with_statistics(shared.taef2(), x),
    }
    curve_of = {}
    for name, model in models.items():
        task = bar.add_task(name, total=1.0)
        step = lambda title, share, task=task: bar.update(task, completed=share)  # noqa: E731
        curve_of[name] = halo(model, (x,), curve=True, progress=step)
    return curve_of


def draw(halos: dict[str, Halo], path: Path, words: str) -> None:
    """The largest error and the 8-bit values that change, against the padding."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "halo"  # the same picture for the same numbers
    figure = Figure(figsize=(8.5, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    marks = zip((SLOWER, FASTER), ("s", "o"), halos.items(), strict=True)
    for colour, mark, (name, one) in marks:
        places = [point.padding[0] for point in one.curve]
        for axes, values in zip(panels, _values(one.curve), strict=True):
            axes.plot(places, values, color=colour, marker=mark, markersize=4, label=name)
    side = next(iter(halos.values())).inputs[0].rows
    panels[0].set_yscale("log")
    panels[0].set_ylim(FLOOR / 2, 100)  # room for words above the lines
    panels[0].set_yticks([10.0**k for k in range(-6, 1, 2)])
    panels[1].set_ylim(-4, 145)
    panels[1].set_yticks(range(0, 101, 20))
    style = {"textcoords": "offset points", "ha": "right", "fontsize": 8, "color": WORD_COLOR}
    for point in [p for one in halos.values() for p in one.curve if p.max_abs < FLOOR]:
        at = (point.padding[0], FLOOR)
        panels[0].annotate(f"{point.max_abs:.0g}", at, xytext=(-6, -2), **style)
    panels[0].set_title("largest error of a tile (values 0 to 1)", loc="left", fontsize=10)
    panels[1].set_title("8-bit values that change, %", loc="left", fontsize=10)
    for axes in panels:
        _mark(axes, {**USED, side.local_before: "exact halo"})
    panels[1].legend(fontsize=8, loc="center right", framealpha=1, edgecolor="none")
    figure.suptitle("TAEF2 decoder: a tile against the untiled picture", fontsize=12)
    figure.supxlabel(fill(words, 150), x=0.01, ha="left", fontsize=7, color=WORD_COLOR, parse_math=False)
    dated = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
    figure.savefig(path, dpi=110, **dated)


def _values(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [max(p.max_abs, FLOOR) for p in points], [100 * p.changed for p in points]


def _mark(axes, places: dict[int, str]) -> None:
    """Lines at the exact halo and at the padding of tools, with words."""
    for place, words in places.items():
        axes.axvline(place, color=ORIGINAL_COLOR, linestyle=":", linewidth=1, zorder=0)
        axes.annotate(
            f"{place}: {words}",
            (place, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-3, -4),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="top",
            fontsize=7,
            color=WORD_COLOR,
        )
    axes.set_xlabel("padding on each side, latent positions", fontsize=9)
    axes.set_xticks(range(0, 21, 5))
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


# --- the page -----------------------------------------------------------------------------------


def page(rows: Sequence[Row], halos: dict[str, Halo]) -> Page:
    lines = [
        [points[0].padding[0], *(x for p in points for x in (p.max_abs, 100 * p.changed))]
        for points in zip(*(one.curve for one in halos.values()), strict=True)
    ]
    head = ["padding", *(f"{kind}: {name}" for name in halos for kind in ("error", "8-bit, %"))]
    text = f"""
How many input positions beyond a tile are needed so that the tile is exact, and what tools use.
*Exact* "convolutions": the network also has global calls (norms, attention), whose statistics must
come from the whole image; the halo is then that of the rest. Milliseconds: median (10 %–90 %
quantile) of {rows[0].time.count} calls on a 64 x 64 example, reading the model included, after one
call that is not counted."""
    curve = f"""
TAEF2's decoder with trained weights on the latent of a photograph, {LATENT} x {LATENT}; a tile of a
quarter of each side, in the middle, against the same network untiled. Error: largest absolute
difference; 8-bit: share of the values that change. In latent positions."""
    summary = "; ".join(f"{row.network} {max(row.before, row.after)}" for row in rows)
    parts = [text, Table(HEAD, [one.cells() for one in rows]), curve, Table(head, lines)]
    return Page("The exact halo", parts, f"positions of the input: {summary}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    parser.add_argument("--picture", type=Path, help="docs/halo.svg for the full run")
    options = parser.parse_args()
    before, console = load_average(), Console()
    with Progress(console=console, transient=True) as bar:
        rows = [row(known, options.rounds) for known in bar.track(NETWORKS, description="halo")]
        halos = curves(bar)
    run = Run.now(before=before)
    text = save("halo", page(rows, halos), run, options.output)
    usual = options.output.with_suffix(".svg") if options.output else PICTURE
    draw(halos, options.picture or usual, str(run))
    console.print(Markdown(text))


if __name__ == "__main__":
    main()
