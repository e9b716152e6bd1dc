"""A MiniLM-sized encoder, masked and demasked, timed in turns with one built for the widths left:
`python -m benchmarks run encoder`.

BERT with 6 layers of width 384, 12 heads and 1,536 feed-forward units (random weights). In each
layer half of the heads (rows of the values, biases too) and half of the units (rows, not their
biases) are masked, drawn anew. Writes benchmarks/results/encoder.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.export import Dim

import demask
from architectures import transformers
from benchmarks.common.catalog import DEV, Benchmark
from benchmarks.common.command import command
from benchmarks.common.inductor import NAME, inductor
from benchmarks.common.ledger import Cell, Page, Table
from demask.machine.clock import Timing, race
from demask.machine.describe import format_counts

BENCHMARK = Benchmark(
    "a MiniLM-sized encoder: masked, demasked, and built by hand",
    "at most 60 s a setting",
    needs=(DEV,),
    quick="--threads 1 --pairs 3 --seconds 2",
)

LAYERS, WIDTH, HEADS, UNITS, SIZE = 6, 384, 12, 1536, 32
SHAPES = ((8, 128), (1, 128), (8, 16))
DYNAMIC = {"input_ids": {0: Dim.AUTO, 1: Dim.AUTO}}


def encoder(attention: str) -> nn.Module:
    """The network with random weights; its biases too are random."""
    hub: Any = transformers()
    config = hub.BertConfig(
        vocab_size=30522,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=UNITS,
        attn_implementation=attention,
    )
    model = hub.BertModel(config, add_pooling_layer=False).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.02)
    return model


def masked(model: Any, generator: torch.Generator) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A copy with half of the heads and units masked, and per layer those that are left."""
    model, left = deepcopy(model), []
    for layer in model.encoder.layer:
        heads = torch.randperm(HEADS, generator=generator)
        units = torch.randperm(UNITS, generator=generator)
        value = layer.attention.self.value
        with torch.no_grad():
            for head in heads[: HEADS // 2].tolist():
                value.weight[head * SIZE : (head + 1) * SIZE] = 0
                value.bias[head * SIZE : (head + 1) * SIZE] = 0
            layer.intermediate.dense.weight[units[: UNITS // 2]] = 0
        left.append((heads[HEADS // 2 :].sort().values, units[UNITS // 2 :].sort().values))
    return model, left


def by_hand(model: Any, left: list[tuple[Tensor, Tensor]]) -> nn.Module:
    """The same network with layers of the widths that are left; what dead units add is a bias."""
    model = deepcopy(model)
    for layer, (heads, units) in zip(model.encoder.layer, left, strict=True):
        rows = (heads.unsqueeze(1) * SIZE + torch.arange(SIZE)).flatten()
        attention, inner, outer = layer.attention, layer.intermediate.dense, layer.output.dense
        for name in ("query", "key", "value"):
            setattr(attention.self, name, _part(getattr(attention.self, name), rows=rows))
        attention.self.num_attention_heads = len(heads)
        attention.self.all_head_size = len(rows)
        attention.output.dense = _part(attention.output.dense, columns=rows)
        dead = torch.ones(UNITS, dtype=torch.bool)
        dead[units] = False
        with torch.no_grad():
            rest = outer.weight[:, dead] @ nn.functional.gelu(inner.bias[dead])
            layer.output.dense = _part(outer, columns=units)
            layer.output.dense.bias += rest
        layer.intermediate.dense = _part(inner, rows=units)
    return model


def _part(linear: nn.Linear, rows: Tensor | None = None, columns: Tensor | None = None) -> nn.Linear:
    weight, bias = linear.weight.data, linear.bias.data.clone()
    if rows is not None:
        weight, bias = weight[rows], bias[rows]
    if columns is not None:
        weight = weight[:, columns]
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight, layer.bias = nn.Parameter(weight.clone()), nn.Parameter(bias)
    return layer


class HiddenState(nn.Module):
    """The last hidden state of an encoder, of token numbers."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor) -> Tensor:
        return self.encoder(input_ids=ids).last_hidden_state


@dataclass(frozen=True, slots=True)
class Row:
    """One setting; difference: to the masked network, relative, float32."""

    attention: str
    batch: int
    length: int
    threads: int
    report: demask.Report
    difference: float
    masked: Timing
    result: Timing
    hand: Timing
    masked_compiled: Timing
    result_compiled: Timing

    @property
    def speed(self) -> float:
        """The median time of the masked network over that of the demasked one."""
        return self.masked.median / self.result.median


def rows(threads: Sequence[int], pairs: int, seconds: float, bar: Progress) -> Iterator[Row]:
    step = bar.add_task("", total=2 * len(SHAPES) * len(threads))
    for attention in ("sdpa", "eager"):
        bar.update(step, description=f"demasking ({attention})")
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)
        model, left = masked(encoder(attention), generator)
        hand = by_hand(model, left)
        ids = torch.randint(0, 30522, (2, 128), generator=generator)
        slim = demask.demask(model, (), {"input_ids": ids}, dynamic_shapes=DYNAMIC)
        for batch, length in SHAPES:
            ids = torch.randint(0, 30522, (batch, length), generator=generator)
            difference = furthest(model, [slim, hand], ids)
            for count in threads:
                bar.update(step, description=f"{attention}, {batch} x {length}, {count} threads")
                torch.set_num_threads(count)
                calls: dict[str, Callable[[], object]] = {
                    name: lambda network=network, ids=ids: network(input_ids=ids)
                    for name, network in (("masked", model), ("result", slim), ("hand", hand))
                }
                calls |= {
                    f"{n}, {NAME}": inductor(HiddenState(network), ids)
                    for n, network in (("masked", model), ("result", slim))
                }
                with torch.no_grad():
                    timings = Timing.of_each(race(calls, pairs, seconds=seconds))
                times = [timings[name] for name in calls]
                yield Row(attention, batch, length, count, demask.report(slim), difference, *times)
                bar.advance(step)


def furthest(model: nn.Module, others: Sequence[nn.Module], ids: Tensor) -> float:
    """The largest relative difference of the others' outputs; raises Mismatch above 1e-4."""
    with torch.inference_mode():
        wanted, *outputs = (m(input_ids=ids).last_hidden_state for m in (model, *others))
    worst = max(float((wanted - output).abs().max() / wanted.abs().max()) for output in outputs)
    if worst > 1e-4:
        raise demask.Mismatch(f"expected the same outputs, got a relative difference of {worst:g}")
    return worst


HEAD = [
    "attention",
    "batch x tokens",
    "threads",
    "parameters",
    "MACs left",
    "masked, ms",
    "demasked, ms",
    "speed",
    "by hand, ms",
    f"masked, {NAME}, ms",
    f"demasked, {NAME}, ms",
    "difference",
]


def cells(row: Row) -> list[Cell]:
    before, after = row.report.before, row.report.after
    return [
        row.attention,
        f"{row.batch} x {row.length}",
        row.threads,
        f"{before.parameters:,} → {after.parameters:,}",
        after.macs / before.macs,
        row.masked,
        row.result,
        row.speed,
        row.hand,
        row.masked_compiled,
        row.result_compiled,
        row.difference,
    ]


def page(rows: Sequence[Row]) -> Page:
    counts = format_counts(t for row in rows for t in (row.masked, row.result, row.hand))
    speeds = [row.speed for row in rows]
    text = f"""
BERT with {LAYERS} layers of width {WIDTH}, {HEADS} heads and {UNITS:,} units, random weights; half
of the heads and half of the units of each layer are masked (not biases of units). One demask, with
batch and length dynamic, serves all sizes. Milliseconds are the median (10 %–90 % quantile) of
{counts} alternated calls of each network in one process, float32. *By hand*: the same code with
layers of the widths that are left. *eager*: attention as products and softmax. *Difference*: the
larger of both to the masked network."""
    return Page(
        "A MiniLM-sized encoder, masked and demasked",
        [text, Table(HEAD, [*map(cells, rows)], 3)],
        f"{min(speeds):.2f} to {max(speeds):.2f} times as fast as masked; slower in "
        f"{sum(speed < 1 for speed in speeds)} of {len(rows)}",
    )


def main() -> None:
    command("encoder", __doc__, rows, page, seconds=12.0)


if __name__ == "__main__":
    main()
