"""Three rounds of training, pruning and demask() on four networks of the caller's own class:
`python -m benchmarks run three_rounds`.

torchvision's ResNet-50 at full width, and small ones of transformers: Whisper, DETR and Mixtral,
with random weights. Each round trains a few steps with AdamW, sets more channels, heads or units to
zero, demasks, and cuts the optimizer's states (`demask.carry`). Exits with 1 where the result has
another class, other outputs or other tokens.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import demask
from architectures import drawn, transformers
from benchmarks.common.catalog import DEV, Benchmark
from benchmarks.common.ledger import Cell, Page, Run, Table, save, text_of
from demask.machine.describe import load_average
from networks import torchvision

BENCHMARK = Benchmark(
    "three rounds of training, pruning and demask(): class, outputs, tokens, files",
    "minutes",
    needs=(DEV,),
    quick="--networks mixtral",
)

ROUNDS, STEPS = 3, 3
LIMIT = 1e-5  # of the largest output, in float32: reordered sums through all layers
TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True, slots=True)
class Case:
    """A network, its example, and how a round masks it.

    zero: sets more of the network to zero, in the round with a number. prompt: what `generate`
    continues.
    """

    network: Any
    inputs: Mapping[str, Tensor]
    zero: Callable[[Any, int], None]
    prompt: Mapping[str, Tensor] = field(default_factory=dict)


def _zero_units(outer: nn.Module, inner: nn.Module, count: int) -> None:
    """Units whose row and column are the smallest become zero."""
    weights: Any = outer.weight, inner.weight
    order = (weights[0].norm(dim=0) * weights[1].norm(dim=1)).argsort()
    weights[0].data[:, order[:count]] = 0


def resnet(generator: torch.Generator) -> Case:
    """Another tenth of each convolution's channels, drawn for each: operands of a residual add
    differ, and norms keep their shifts."""

    def zero(model: nn.Module, _: int) -> None:
        modules = list(model.modules())
        for conv, norm in itertools.pairwise(modules):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                order = torch.randperm(conv.out_channels, generator=generator)
                dead = order[: max(conv.out_channels // 10, 1)]
                conv.weight.data[dead] = 0

    model: Any = torchvision().models.resnet50()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias, std=0.3, generator=generator)
    return Case(model, {"x": torch.randn(2, 3, 64, 64, generator=generator)}, zero)


def whisper(generator: torch.Generator) -> Case:
    """Units of all layers, and in the first round a head of each attention."""
    hub: Any = transformers()
    config = hub.WhisperConfig(
        vocab_size=60,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **TOKENS,
    )

    def zero(model: Any, number: int) -> None:
        for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
            _zero_units(layer.fc2, layer.fc1, 16)
            layer.self_attn.out_proj.weight.data[:, 8 * number : 8 * number + 8] = 0

    features = torch.randn(2, 8, 32, generator=generator)
    tokens = torch.randint(3, 50, (2, 5), generator=generator)
    inputs = {"input_features": features, "decoder_input_ids": tokens}
    return Case(
        drawn(hub.WhisperForConditionalGeneration(config), generator), inputs, zero, {"input_features": features}
    )


def detr(generator: torch.Generator) -> Case:
    """Units of all layers, and channels inside of the backbone's blocks."""
    hub: Any = transformers()
    backbone = hub.ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 32, 64, 64], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    config = hub.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        num_queries=6,
    )

    def zero(model: nn.Module, _: int) -> None:
        for name, module in model.named_modules():
            if name.endswith("mlp") and hasattr(module, "fc2"):
                _zero_units(module.fc2, module.fc1, 16)  # type: ignore[arg-type]
            elif name.endswith("layer.1.convolution"):
                weight: Any = module.weight
                weight.data[weight.flatten(1).norm(dim=1).argsort()[: len(weight) // 8 + 1]] = 0

    images = torch.randn(2, 3, 64, 64, generator=generator)
    return Case(drawn(hub.DetrForObjectDetection(config), generator), {"pixel_values": images}, zero)


def mixtral(generator: torch.Generator) -> Case:
    """The same units of all experts of a layer, and one group of heads in the second round."""
    hub: Any = transformers()
    config = hub.MixtralConfig(
        vocab_size=60,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        **TOKENS,
    )

    def zero(model: Any, number: int) -> None:
        for layer in model.model.layers:
            down = layer.mlp.experts.down_proj
            down.data[:, :, down.norm(dim=(0, 1)).argsort()[:16]] = 0
            if number == 1:
                layer.self_attn.o_proj.weight.data[:, :32] = 0

    tokens = torch.randint(3, 50, (2, 6), generator=generator)
    return Case(drawn(hub.MixtralForCausalLM(config), generator), {"input_ids": tokens}, zero, {"input_ids": tokens})


CASES = {"resnet50": resnet, "whisper": whisper, "detr": detr, "mixtral": mixtral}


@dataclass(frozen=True, slots=True)
class Row:
    """A round of a network. difference: relative to the largest output of the masked one."""

    network: str
    number: int
    before: int
    after: int
    form: str
    difference: float
    tokens: str
    loss: float
    faults: tuple[str, ...]


def outputs_of(network: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    outputs: Any = network(**inputs)
    outputs = dict(outputs) if isinstance(outputs, Mapping) else outputs
    return [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]


def furthest(one: nn.Module, other: nn.Module, inputs: Mapping[str, Tensor]) -> float:
    """The largest difference of two networks' outputs, relative to the largest output."""
    with torch.no_grad():
        pairs = zip(outputs_of(one, inputs), outputs_of(other, inputs), strict=True)
        return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


def train(network: nn.Module, case: Case, optimizer: torch.optim.Optimizer) -> float:
    """The loss after some steps towards outputs of zero, in eval mode: without dropout."""
    loss = torch.zeros(())
    for _ in range(STEPS):
        optimizer.zero_grad()
        outputs = [x for x in outputs_of(network, case.inputs) if x.requires_grad]
        loss = torch.stack([x.square().mean() for x in outputs]).sum()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def rounds(name: str, case: Case) -> Iterator[tuple[Row, Any]]:
    """Each round, and the network after it."""
    network = case.network.eval()
    if hasattr(network, "config"):
        network.config.use_cache = False
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
    for number in range(ROUNDS):
        loss = train(network, case, optimizer)
        case.zero(network, number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of sizes that graphs would have
            slim: Any = demask.demask(network, (), dict(case.inputs))
        faults, difference = [], furthest(network, slim, case.inputs)
        graphs = sum(isinstance(module, fx.GraphModule) for module in slim.modules())
        if type(slim) is not type(network):
            faults.append(f"its class is {type(slim).__name__}")
        if not difference <= LIMIT:
            faults.append(f"outputs differ by {difference:.0e}")
        tokens = ""
        if case.prompt:
            options = {"max_new_tokens": 12, "do_sample": False, "use_cache": True}
            one, other = (n.generate(**case.prompt, **options) for n in (network, slim))
            tokens = f"{one.numel()} equal" if torch.equal(one, other) else "differ"
            faults += ["tokens differ"] * (tokens == "differ")
        demask.carry(slim, optimizer)
        carried = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if carried != {id(p) for p in slim.parameters()}:
            faults.append("the optimizer has other parameters")
        sizes = (sum(p.numel() for p in n.parameters()) for n in (network, slim))
        form = f"class, {graphs} graphs" if graphs else "class"
        yield Row(name, number + 1, *sizes, form, difference, tokens, loss, tuple(faults)), slim
        network = slim


def file_of(network: Any, case: Case) -> str:
    """What became of the last network in a folder of `save_pretrained`."""
    if not hasattr(network, "save_pretrained"):
        return ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            network.save_pretrained(folder)
        except demask.BadInput as error:
            return f"refused: {str(error).partition('config: ')[2].partition('. Use')[0]}"
        again, loading = type(network).from_pretrained(folder, output_loading_info=True)
        if any(loading.values()):
            return f"differs: {loading}"
        return f"read again, outputs differ by {furthest(network, again.eval(), case.inputs):.0e}"


HEAD = ["network", "round", "parameters", "returned", "difference", "generated tokens", "loss", "faults"]


def cells(row: Row) -> list[Cell]:
    sizes = f"{row.before:,} → {row.after:,}"
    return [row.network, row.number, sizes, row.form, row.difference, row.tokens, row.loss, "; ".join(row.faults)]


def summarize(rows: Sequence[Mapping[str, Any]]) -> str:
    return (
        f"{sum(not row['faults'] for row in rows)} of {len(rows)} rounds return the same class "
        "with the same outputs and tokens"
    )


def page(rows: Sequence[Row], files: Sequence[list[Cell]]) -> Page:
    text = f"""
ResNet-50 is torchvision's at full width on images of 64 x 64, the others are small; weights are
random. Each round: {STEPS} steps of AdamW, more zeros, `demask`, `carry`. *Difference*: of outputs
of the demasked network to the masked one, relative to the largest, float32 (at most
{LIMIT:g}). *Loss*: before zeros."""
    after = "The folder that `save_pretrained` writes after the last round:"
    table = Table(HEAD, [*map(cells, rows)], 2, merge=True)
    folders = Table(["network", "folder"], files, merge=True)
    title = "Three rounds of training, pruning and demask()"
    return Page(title, [text, table, after, folders], summarize)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=sorted(CASES), default=[*CASES])
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    options, before = parser.parse_args(), load_average()
    rows, files = list[Row](), list[list[Cell]]()
    torch.set_num_threads(1)
    logging: Any = transformers().logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for name in options.networks:
        torch.manual_seed(0)
        case, last = CASES[name](torch.Generator().manual_seed(0)), None
        for row, slim in rounds(name, case):
            print(*map(text_of, cells(row)), sep=" | ", flush=True)
            rows.append(row)
            last = slim
        if file := file_of(last, case):
            files.append([name, file])
        run = Run.now("1 thread", before=before)
        save("three_rounds", page(rows, files), run, options.output)
    sys.exit(1 if any(row.faults for row in rows) else 0)


if __name__ == "__main__":
    main()
