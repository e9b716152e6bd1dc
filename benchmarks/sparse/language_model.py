"""A language model of 1.1 billion parameters, token by token, in torch and packed: `python -m benchmarks run
language_model`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn

from benchmarks.common.catalog import BENCH, Benchmark
from benchmarks.common.command import command
from benchmarks.common.ledger import Cell, Page, Table
from demask.machine.byte_sizes import format_bytes
from demask.machine.clock import Timing, race
from demask.sparse import sparsify

BENCHMARK = Benchmark(
    "a language model of 1.1 billion parameters, token by token",
    "about 20 minutes, and 8 GiB of memory",
    needs=(BENCH,),
    quick="--networks TinyLlama_70% --threads 2 --pairs 1 --seconds 1",
)

#: TinyLlama's configuration (Zhang et al. 2024, arXiv 2401.02385)
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
}
NETWORKS = [f"TinyLlama_{zeros}%" for zeros in (0, 50, 70)]
PROMPT, TOKENS = 16, 64
TEXTS = 3  # that each generates in turns
LONG = 256  # tokens of a prompt that is read at once
OURS, TORCH = "demask", "torch"


@dataclass(frozen=True, slots=True)
class Row:
    """One setting. what: is timed. packed: layers, of how many. sizes: bytes of all tensors, before and after. same:
    share of generated tokens that are equal."""

    name: str
    what: str
    threads: int
    packed: tuple[int, int]
    sizes: tuple[int, int]
    same: float
    timings: Mapping[str, Timing]

    @property
    def speedup(self) -> float:
        return self.timings[TORCH].median / self.timings[OURS].median


def build(name: str) -> Any:
    """The network with random weights in bfloat16; its linear layers but the last have zeros in no pattern."""
    from networks import torchvision  # transformers reads images with it

    torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)).to(torch.bfloat16).eval()
    zeros = int(name.partition("_")[2].rstrip("%")) / 100
    for path, layer in model.named_modules():
        if zeros and isinstance(layer, nn.Linear) and path != "lm_head":
            layer.weight.data *= torch.rand(layer.weight.shape) >= zeros
    return model


def count_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers."""
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def rows(chosen: Sequence[str], threads: Sequence[int], pairs: int, seconds: float, bar: Progress) -> Iterator[Row]:
    step = bar.add_task("", total=len(chosen) * len(threads))
    for name in chosen:
        model = build(name)
        # Two networks over the same memory: what sparsify leaves is shared.
        shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
        packed = copy.deepcopy(model, shared)
        for count in threads:
            bar.update(step, description=f"{name}, {count} threads")
            torch.set_num_threads(count)
            with torch.no_grad():
                report = sparsify(packed)
                yield from measure(name, model, packed, count, pairs, seconds, len(report.layers))
            bar.advance(step)


def measure(name: str, model: Any, packed: Any, threads: int, pairs: int, seconds: float, layers: int) -> Iterator[Row]:
    prompt, text = torch.randint(5, 30_000, (1, PROMPT)), torch.randint(5, 30_000, (1, LONG))

    def generate(network: Any) -> Tensor:
        return network.generate(prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0)

    same = float((generate(model) == generate(packed))[0, PROMPT:].float().mean())
    count = sum(type(layer) is not nn.Linear for layer in packed.modules() if isinstance(layer, nn.Linear))
    setting = threads, (count, layers), (count_bytes(model), count_bytes(packed)), same
    texts = {TORCH: lambda: generate(model), OURS: lambda: generate(packed)}
    yield Row(name, f"{TOKENS} tokens", *setting, Timing.of_each(race(texts, min(pairs, TEXTS), 0)))
    prompts = {TORCH: lambda: model(text), OURS: lambda: packed(text)}
    yield Row(name, f"a prompt of {LONG}", *setting, Timing.of_each(race(prompts, pairs, 1, seconds=seconds)))


HEAD = [
    "network",
    "what",
    "threads",
    "layers packed",
    "bytes",
    "of torch's",
    "torch, ms",
    "demask, ms",
    "tokens a second",
    "over torch",
    "same tokens",
]


def cells(row: Row) -> list[Cell]:
    before, after = row.sizes
    per_second = TOKENS / row.timings[OURS].median if row.what.endswith("tokens") else None
    times = [row.timings[TORCH], row.timings[OURS]]
    packed = "{} of {}".format(*row.packed)
    share = after / before
    return [
        row.name.replace("_", ", "),
        row.what,
        row.threads,
        packed,
        format_bytes(after),
        share,
        *times,
        per_second,
        row.speedup,
        row.same,
    ]


def page(rows: Sequence[Row]) -> Page:
    text = f"""
TinyLlama's configuration with random weights in bfloat16, zeros in no pattern in all linear layers but the last.
*torch*: transformers as it is. *demask*: the same after `demask.sparse.sparsify`. *{TOKENS} tokens*: generated with
a cache after a prompt of {PROMPT}. *a prompt of {LONG}*: one call for all of its tokens. Both run in turns in one
process (median, 10 %–90 % quantile). *bytes*: of all parameters and buffers. *same tokens*: random weights decide
by less than rounding, after which texts differ; sums are float32 in demask and rounded to bfloat16 in torch."""
    speeds = [row.speedup for row in rows if row.what.endswith("tokens")]
    summary = f"{min(speeds):.2f} to {max(speeds):.2f} times the tokens a second of torch"
    return Page("A language model, token by token", [text, Table(HEAD, [*map(cells, rows)], 3)], summary)


def main() -> None:
    command("language_model", __doc__, rows, page, 5.0, NETWORKS)


if __name__ == "__main__":
    main()
