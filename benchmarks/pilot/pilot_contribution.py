"""Do magnitudes and contributions rank channels as their removal does? Four trained networks.

Each channel of each measured layer is set to zero in turn, and the length of the change of all outputs is measured, the
mean over the inputs. Spearman's rank correlation of that with what `collect` measures, over the channels of a layer.
Nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, fx, nn
from torch.nn import functional as F

import cifar
import demask
from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.ledger import Page, Run, Table, save
from benchmarks.pilot.pilot_pages import photograph
from demask.facts.analysis import Analysis
from demask.graph.program import Program
from demask.machine.describe import load_average
from demask.ops import TABLE, schema
from demask.pilot import collect
from demask.pilot.data.measured_values import MeasuredValue, sites_of
from demask.shrink.pipeline import capture_program

BENCHMARK = Benchmark(
    "Channels ranked by magnitude, by contribution, and by their removal",
    "about 15 minutes",
    needs=(DEV, SHARED_DATA),
    quick="--images 4 --layers 3 --networks ResNet-20",
)
FACES = Path(__file__).parents[3] / "shared" / "data" / "ultraface_rfb_320.onnx"
MEASURES = ("mean", "max", "contribution")
HEAD = ("network", "layers", "channels", "measure", "median", "least", "layers of 0.9 or more, %")


def networks(images: int) -> dict[str, tuple[nn.Module, Tensor]]:
    """Trained networks, with inputs that they are for."""
    x = cifar.images(images)[0]
    picture = torch.tensor(list(photograph().convert("RGB").getdata()), dtype=torch.float32)
    width, height = photograph().size
    picture = picture.view(height, width, 3).permute(2, 0, 1)[None]
    scenes = torch.cat([F.interpolate(part, (240, 320)) for part in (picture, picture.flip(3), picture[..., ::2, ::2])])
    return {
        "ResNet-20": (cifar.trained(20), x),
        "ResNet-56": (cifar.trained(56), x),
        "perceptron": digits(images),
        "UltraFace": (demask.from_onnx(FACES), (scenes[:1] - 127) / 128),
    }


def digits(images: int) -> tuple[nn.Module, Tensor]:
    """A perceptron trained on most of the handwritten digits of scikit-learn, and some of the others."""
    data, classes = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    x = data.float() / 16
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(300):
        optimizer.zero_grad()
        F.cross_entropy(model(x[:1500]), classes[:1500]).backward()
        optimizer.step()
    return model, x[1500 : 1500 + images]


class Removal:
    """A network, run once; then from a value on, with a channel of that value set to zero."""

    def __init__(self, program: Program, x: Tensor):
        self.program, self.values = program, dict[fx.Node, Any]()
        for node in program.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = x
            elif node.op == "get_attr":
                self.values[node] = program.constants[str(node.target)].tensor
            elif node.op == "call_function":
                self.values[node] = schema.call_on(node, self.values.__getitem__)

    def effect(self, site: MeasuredValue, channel: int) -> float:
        """The length of the change of all outputs, the mean over the inputs."""
        changed = self.values[site.node].clone()
        changed.select(site.axis or 0, channel).zero_()
        values = {site.node: changed}
        for node in self.program.graph.nodes:
            if node.op == "call_function" and any(n in values for n in node.all_input_nodes):
                values[node] = schema.call_on(node, lambda n: values.get(n, self.values[n]))
        final: Any = self.program.graph.output_node().args[0]
        pairs = [(values[v], self.values[v]) for v in final if isinstance(v, fx.Node) and v in values]
        squares = [(new - old).flatten(1).square().sum(1) for new, old in pairs]
        return float(torch.stack(squares).sum(0).sqrt().mean()) if squares else 0.0


def spearman(a: Tensor, b: Tensor) -> float:
    """The rank correlation of two vectors; equal values have the mean of their ranks."""

    def ranks(x: Tensor) -> Tensor:
        smaller = (x[:, None] > x[None]).sum(1)
        return smaller + ((x[:, None] == x[None]).sum(1) - 1) / 2

    return float(torch.corrcoef(torch.stack([ranks(a.double()), ranks(b.double())]))[0, 1])


def correlations(name: str, model: nn.Module, x: Tensor, most: int) -> tuple[int, dict[str, list[float]]]:
    """The number of channels, and by measure the rank correlation of each layer but the last."""
    program = capture_program(model, (x,), {}, None)
    removal, data = Removal(program, x), {measure: collect(model, (x,), measure=measure) for measure in MEASURES}
    sites = [site for site in sites_of(Analysis(program, TABLE)) if site.name in data["mean"].magnitudes]
    sites = [site for site in sites if len(data["mean"].priorities(site.name)) > 2][: most or None]
    ranked: dict[str, list[float]] = {measure: [] for measure in MEASURES}
    channels = 0
    for site in track(sites, name):
        count = len(data["mean"].priorities(site.name))
        with torch.no_grad():
            effects = torch.tensor([removal.effect(site, channel) for channel in range(count)])
        if bool((effects == effects[0]).all()):
            continue
        channels += count
        for measure in MEASURES:
            ranked[measure].append(spearman(data[measure].priorities(site.name), effects))
    return channels, ranked


def rows(options: argparse.Namespace) -> Iterator[list[Any]]:
    for name, (model, x) in networks(options.images).items():
        if name not in options.networks:
            continue
        channels, ranked = correlations(name, model.eval(), x, options.layers)
        for measure, values in ranked.items():
            sorted_values = torch.tensor(values)
            high = 100 * float((sorted_values >= 0.9).float().mean())
            least, median = float(sorted_values.min()), float(sorted_values.median())
            yield [name, len(values), channels, measure, median, least, high]


def page(results: list[list[Any]], images: int) -> Page:
    text = f"""
Spearman's rank correlation, over the channels of a layer, of what `collect` measures with what the removal of each
channel alone does: the length of the change of all outputs, the mean over the inputs. CIFAR-10 (JPEG) test images for
the ResNets and digits for the perceptron, {images} of them; a photograph for the face detector, whose contributions are
estimated (it has 26,520 outputs) and whose outputs change by more than their first order. *mean*, *max*: of |value|;
*contribution*: of first order, `collect(measure="contribution")`."""
    by_contribution = [row for row in results if row[3] == "contribution"]
    summary = "contribution: median " + ", ".join(f"{row[4]:.2f} ({row[0]})" for row in by_contribution)
    return Page("Channels ranked by magnitude and by contribution", [text, Table(HEAD, results, 4)], summary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--layers", type=int, default=0, help="the first ones only; 0: all")
    parser.add_argument("--networks", nargs="+", default=["ResNet-20", "ResNet-56", "perceptron", "UltraFace"])
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    options = parser.parse_args()
    before, results, text = load_average(), [], ""
    for row in rows(options):
        results.append(row)
        text = save("pilot_contribution", page(results, options.images), Run.now(before=before), options.output)
    print(text)


if __name__ == "__main__":
    main()
