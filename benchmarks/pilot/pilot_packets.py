"""Bytes read against accuracy: `python -m benchmarks run pilot_packets --cache FOLDER`.

Perceptrons 784-4096-4096-10 on Fashion-MNIST, trained with a penalty on their hidden values and
without, in packets that are sorted by priority. A budget of bytes is read, highest priority first;
what was not read is zero, or the 8-bit weights that are stored first. In the exact mode each image
reads the 8-bit weights and the rows that they do not prove to be zero after the ReLU. Bytes are
those of the reads. Writes benchmarks/results/pilot_packets.md; no figure depends on the machine.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor, nn

from benchmarks.common.catalog import DEV, Benchmark
from benchmarks.common.tables import RESULTS, markdown, provenance
from benchmarks.pilot.trained_networks import images, network
from demask.machine.byte_sizes import format_bytes
from demask.machine.threads import set_threads
from demask.pilot.packets.writer import PacketReader, write

BENCHMARK = Benchmark(
    "bytes read against accuracy", "not timed", needs=(DEV, "a folder of trained networks (`--cache`)", "Fashion-MNIST"), quick="--images 200",
)  # fmt: skip

NETWORKS = {"l1-1e-3": "penalty 1e-3", "none": "no penalty"}
SHARES = (0.125, 0.28, 0.375, 0.5, 0.75)  # of the bytes of the weights
CALIBRATION = 2000  # training images
LOOKED = 25  # images whose rows are read from the file in the exact mode
PART = 1000  # images at a time
UNIT = 2.0**-24  # float32: half a unit in the last place, relative


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes and accuracy of one way to read a network."""

    network: str
    priorities: str
    fill: str
    nbytes: int
    reads: int
    whole: int
    right: float
    lost: float
    same: float


def weight_bytes(model: nn.Module) -> int:
    """Of all weights, as a plain file holds them."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def priorities(model: nn.Sequential, seen: Tensor) -> dict[str, dict[str, Tensor]]:
    """Three kinds: of rows by their norm, of units by what they were in a calibration set times the
    norm of the weights that read them, and by chance. Each as its rank in its layer, so that layers
    take their turns; the last layer comes first."""
    layers, draw = linears(model), torch.Generator().manual_seed(0)
    ranks_of: dict[str, dict[str, Tensor]] = {
        "row norm": {},
        "calibration × out norm": {},
        "random": {},
    }
    names, h = list(layers), seen
    for name, following in zip(names, [*names[1:], None], strict=True):
        layer = layers[name]
        h = layer(h).relu()
        outs = torch.ones(len(layer.weight))
        if following is not None:
            outs = layers[following].weight.norm(dim=0)
        values = {
            "row norm": layer.weight.norm(dim=1), "calibration × out norm": h.mean(0) * outs,
            "random": torch.rand(len(outs), generator=draw),
        }  # fmt: skip
        for kind, value in values.items():
            last = following is None
            ranks = value.argsort(stable=True).argsort().float() / len(value)
            ranks_of[kind][name] = torch.full_like(value, 2.0) if last else ranks
    return ranks_of


def answered(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(batch).argmax(1) for batch in x.split(PART)])


def budgets(
    name: str, model: nn.Sequential, x: Tensor, classes: Tensor, seen: Tensor, folder: Path,
    bar: Progress,
) -> list[Row]:  # fmt: skip
    """The network read up to shares of its bytes, by each kind of priority, with both fills."""
    rows, full, whole = [], answered(model, x), weight_bytes(model)
    base = float((full == classes).float().mean())
    for kind, ranks_of in bar.track(priorities(model, seen).items(), description=name):
        path = folder / f"{name}.packets"
        write(path, model, ranks_of, plane=True)
        for fill in ("zeros", "pilot"):
            if fill == "pilot" and kind == "random":
                continue
            for partial, nbytes, reads in _read(path, model, fill, whole):
                answers = answered(partial, x)
                right = float((answers == classes).float().mean())
                rows.append(Row(name, kind, fill, nbytes, reads, whole, 100 * right,
                                100 * (base - right),
                                100 * float((answers == full).float().mean())))  # fmt: skip
    return rows


def _read(
    path: Path, model: nn.Sequential, fill: str, whole: int
) -> Iterator[tuple[nn.Module, int, int]]:
    """The network read up to each share of the bytes, the index included: bytes and reads."""
    with PacketReader(path) as reader:
        first = reader.index.rest[0] + (reader.index.plane_bytes if fill == "pilot" else 0)
        for share in SHARES:
            budget = int(share * whole) - reader.bytes_read
            if budget < first:  # does not reach for the pilot's weights
                continue
            partial = reader.read(budget, pilot=fill == "pilot")
            first = 0
            network = partial.load(model, "pilot" if fill == "pilot" else "zeros")
            yield network, reader.bytes_read, reader.reads


# -------------------------------------------------------------------------------------- exact mode


@dataclass(frozen=True, slots=True)
class Exact:
    """What the exact mode reads per image: mean bytes of packets and pilot, of `whole`; the shares
    of rows demanded per layer; outputs that changed, of how many images."""

    network: str
    nbytes: float
    worst: int
    whole: int
    rows: tuple[float, ...]
    changed: int
    count: int
    looked: int


def demanded(x: Tensor, layer: nn.Linear, scale: Tensor, steps: Tensor) -> Tensor:
    """Which rows (images, rows) might be positive after the ReLU.

    |w - s q| <= s/2, so w x + b <= s q x + b + s/2 |x|_1; computed in float64, plus what a float32
    sum of n terms may differ from the exact one: gamma_n |w| |x| (Higham, section 3.1), of which
    |w| <= 127.5 s bounds the weights.
    """
    wide = x.double()
    total = wide.abs().sum(1, keepdim=True)
    s = scale.double()
    n = layer.in_features + 1
    gamma = n * UNIT / (1 - n * UNIT)
    bound = (wide @ steps.double().t()) * s + layer.bias.double()
    slack = total * s * (0.5 * (1 + 1e-6) + 127.5 * gamma) + gamma * layer.bias.double().abs()
    return bound + slack > 0


def exact(name: str, model: nn.Sequential, x: Tensor, seen: Tensor, folder: Path,
          bar: Progress) -> Exact:  # fmt: skip
    """Per image the rows that are demanded: zeros elsewhere change nothing."""
    path, layers = folder / f"{name}.packets", linears(model)
    ranks_of = priorities(model, seen)["calibration × out norm"]
    write(path, model, ranks_of, plane=True)
    with PacketReader(path) as reader:
        partial = reader.read(pilot=True)
        index, holders = reader.index, {n: reader.holders(f"{n}.weight") for n in layers}
    sizes, each, shares, changed = index.sizes(), [], [], 0
    for k, batch in enumerate(bar.track(x.split(PART), description=f"{name}, exact")):
        h, needs = batch, {}
        for layer_name, layer in layers.items():
            pilot = partial.pilot[f"{layer_name}.weight"]
            last = layer_name == list(layers)[-1]
            needs[layer_name] = demanded(h, layer, *pilot)
            if last:
                needs[layer_name][:] = True
            y = layer(h)
            h = y if last else torch.where(needs[layer_name], y.relu(), 0.0)
        changed += int((h != model(batch)).any(1).sum())
        each += _packet_bytes(needs, holders, sizes)
        shares.append([float(needs[n].double().mean()) for n in layers])
        if k == 0:
            _looked(path, needs, each, index.rest[0], layers, model)
    fixed = index.plane_bytes + index.rest[0]
    means = tuple(float(v) for v in np.mean(shares, 0))
    whole = weight_bytes(model)
    return Exact(name, fixed + float(np.mean(each)), fixed + max(each), whole, means, changed,
                 len(x), LOOKED)  # fmt: skip


def _packet_bytes(
    needs: Mapping[str, Tensor], holders: Mapping[str, np.ndarray], sizes: np.ndarray
) -> list[int]:
    """Bytes of the packets that hold what each image demands."""
    total = np.zeros(len(next(iter(needs.values()))), dtype=np.int64)
    for name, need in needs.items():
        packets, place = np.unique(holders[name], return_inverse=True)
        demands = torch.zeros(len(need), len(packets))
        demands.index_add_(1, torch.from_numpy(place), need.float())
        total += (demands.numpy() > 0) @ sizes[packets]
    return total.tolist()


def _looked(
    path: Path, needs: Mapping[str, Tensor], each: list[int], rest: int,
    layers: Mapping[str, nn.Linear], model: nn.Sequential,
) -> None:  # fmt: skip
    """Read some images' rows from the file: they are the network's, and the bytes those counted, up
    to what is read through between neighbours."""
    for k in range(LOOKED):
        with PacketReader(path) as reader:
            before = reader.bytes_read
            for name, layer in layers.items():
                rows = needs[name][k].nonzero().flatten()
                if not torch.equal(reader.read_rows(f"{name}.weight", rows), layer.weight[rows]):
                    raise AssertionError(f"{name}: other rows than the network's")
            packets = reader.index.sizes()[~reader._pending]
            got = reader.bytes_read - before
            if packets.sum() != each[k] or not 0 <= got - each[k] <= 4096 * len(packets):
                raise AssertionError(f"image {k}: read {got} bytes, counted {each[k]}")


# ---------------------------------------------------------------------------------------- the page


def page(rows: list[Row], exact_results: list[Exact], words: str, count: int) -> str:
    """The page of the results."""
    lines = [
        [NETWORKS[r.network], r.priorities, r.fill, format_bytes(r.nbytes),
         f"{r.whole / r.nbytes:.2f} x", str(r.reads), f"{r.right:.2f} %", f"{-r.lost:+.2f}",
         f"{r.same:.2f} %"]
        for r in rows
    ]  # fmt: skip
    head = ["network", "priorities", "rows not read", "bytes read", "fewer", "reads", "right",
            "points", "same class"]  # fmt: skip
    exact_lines = [
        [NETWORKS[e.network], format_bytes(e.nbytes), f"{e.whole / e.nbytes:.2f} x",
         format_bytes(e.worst), " / ".join(f"{100 * s:.1f} %" for s in e.rows),
         f"{e.changed} of {e.count}"]
        for e in exact_results
    ]  # fmt: skip
    exact_head = ["network", "bytes per image, mean", "fewer", "most", "rows demanded, by layer",
             "outputs changed"]  # fmt: skip
    return f"""# Packets: bytes read against accuracy

{words}

{count} test images of Fashion-MNIST, perceptrons 784-4096-4096-10. Packets of one row (two in the
first layer), sorted by priority. Bytes are all that was read, the index included, and what fills
pages where neighbours are read in one go; "fewer" is against the bytes of the weights in a plain
file. The 8-bit weights ("pilot") are a quarter of these and come first.

{markdown(head, lines)}

Exact mode, each image by itself, nothing cached from the one before: the 8-bit weights, then the
rows that they do not prove to be zero. Outputs are compared bit by bit with the network's; {LOOKED}
images per network were read from the file, the others counted from its index:

{markdown(exact_head, exact_lines)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="folder of trained networks")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "pilot_packets.md")
    options = parser.parse_args()
    (x, classes), (seen, _) = images("test"), images("train")
    x, classes, seen = x[: options.images], classes[: options.images], seen[:CALIBRATION]
    rows, exact_results = [], []
    with (
        torch.no_grad(), set_threads(options.threads), Progress(transient=True) as bar,
        tempfile.TemporaryDirectory() as folder,
    ):  # fmt: skip
        for name in NETWORKS:
            model = network(name, options.cache)
            assert isinstance(model, nn.Sequential)
            rows += budgets(name, model, x, classes, seen, Path(folder), bar)
            exact_results.append(exact(name, model, x, seen, Path(folder), bar))
    words = provenance("pilot_packets")
    text = page(rows, exact_results, words, len(x))
    options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
