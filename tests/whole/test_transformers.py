"""Transformers, heads, units, channels and layers masked: exact at two batches and two lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import demask
from anatomy import MASKS, removed
from architectures import ARCHITECTURES, LENGTH, VOCABULARY, WIDTH, Architecture, built, masked, token_ids, transformers
from demask.graph.result.module_calls import graph_of_calls
from demask.judge import RELATIVE, ULPS
from demask.ops.laws import missed
from graphs import form_of, to_graph
from night import at_night

DEPENDS = 1e-3  # of the largest output: at least so much differs between two inputs
QUICK = {"llama": ("unit",), "fused_qkv": ("layer",), "torch_encoder": ("channel",)}
PAIRS = [(name, kind) for name in ARCHITECTURES for kind in MASKS]


def skip_unless_installed(name: str) -> None:
    if ARCHITECTURES[name].hub:
        try:
            transformers()
        except ImportError as error:
            pytest.skip(f"transformers is not installed: {error}")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def demasked(model: nn.Module, chosen: Architecture, inputs: dict[str, Tensor], **options: Any) -> Any:
    return demask.demask(model, (), inputs, dynamic_shapes=chosen.shapes, **options)


def ulps(a: Tensor, b: Tensor, dtype: torch.dtype) -> float:
    """max |a - b| in units in the last place of max |a|."""
    largest = float(a.abs().max())
    unit = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(largest))
    return float((a.double() - b.double()).abs().max()) / unit


def leaves(module: nn.Module, inputs: dict[str, Tensor]) -> tuple[list[Tensor], Any]:
    with torch.no_grad():
        made = module(**inputs)
    return pytree.tree_leaves(made), type(made)


def difference(model: nn.Module, slim: nn.Module, inputs: dict[str, Tensor]) -> float:
    """max |a - b| / max |a|, of the output where that is largest; types and shapes are equal."""
    (expected, kind), (found, slim_kind) = leaves(model, inputs), leaves(slim, inputs)
    assert slim_kind is kind
    worst = 0.0
    for a, b in zip(expected, found, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert bool(torch.isfinite(a).all()), "the case is void: an output is not finite"
        worst = max(worst, float((a - b).abs().max() / a.abs().max()))
    return worst


def assert_depends(model: nn.Module, one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Fails where the outputs hardly depend on the inputs: equality would prove nothing."""
    pairs = zip(leaves(model, one)[0], leaves(model, other)[0], strict=True)
    assert max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs) >= DEPENDS


def pair_of(name: str, kind: str) -> object:
    marks = () if kind in QUICK.get(name, ()) else pytest.mark.nightly
    return pytest.param(name, kind, id=f"{name}-{kind}", marks=marks)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "kind"), [pair_of(*pair) for pair in PAIRS])
def test_exact_at_two_batches_and_two_lengths(name: str, kind: str, result: Callable[..., None]) -> None:
    skip_unless_installed(name)
    chosen, draw = ARCHITECTURES[name], generator()
    result(suite="transformers", network=name, mask=kind)
    if kind in chosen.declined:
        result(note=chosen.declined[kind])
        return
    model = masked(name, kind, draw)
    inputs = chosen.inputs(2, chosen.lengths[0], draw)
    slim = demasked(model, chosen, inputs)
    before, after = slim.demasked.before.parameters, slim.demasked.after.parameters
    more, reason = LARGER.get((name, kind), (0, ""))
    least = after
    if form_of(slim) != "graph":
        graph = demasked(model, chosen, inputs, result="graph")
        assert form_of(graph) == "graph" and difference(model, graph, inputs) <= allowed(chosen)
        least = graph.demasked.after.parameters
    result(before=before, after=after, graph=least, form=form_of(slim), **({"note": reason} if reason else {}))

    errors = [
        difference(model, slim, chosen.inputs(batch, length, draw)) for length in chosen.lengths for batch in (1, 3)
    ]
    result(error=max(errors), allowed=allowed(chosen))
    assert max(errors) <= allowed(chosen)
    assert_depends(model, inputs, chosen.inputs(2, chosen.lengths[0], draw))
    sizes = [spec.sizes for spec in slim.demasked.inputs]
    for axes, found in zip(chosen.dynamic.values(), sizes, strict=True):
        assert tuple(k for k, size in enumerate(found) if isinstance(size, str)) == axes
    assert after <= before
    if kind in COUNTED:
        by_hand = before - removed(model, chosen.family, chosen.heads, kind)
        assert by_hand < before, "the case is void: nothing could go"
        assert least <= by_hand + more
        assert least > by_hand or not more, "as small as by hand by now: take it out of LARGER"


def allowed(chosen: Architecture) -> float:
    """Relative to the largest output. What the network's own code casts to counts."""
    if chosen.narrow is None:
        return RELATIVE
    return ULPS / 2 * torch.finfo(chosen.narrow).eps  # a unit is at least half of eps · largest


# As many parameters are left as in a module written by hand, but for these: per network and mask,
# at most how many more, and why.
COUNTED = ("head", "head_constant", "head_output", "partial", "unit")
LARGER: dict[tuple[str, str], tuple[int, str]] = {
    ("segformer", "unit"): (1280, "constants pass a padded depthwise convolution: at its border they differ"),
    **{
        (name, "head_constant"): (more, "the mask is an input, which may hide every key of a text")
        for name, more in {"albert": 2096, "bert": 4192, "distilbert": 4192, "roberta": 4192}.items()
    },
}


def test_every_declined_mask_has_a_reason() -> None:
    for chosen in ARCHITECTURES.values():
        assert all(kind in MASKS and reason for kind, reason in chosen.declined.items())
        assert chosen.lengths[1:] or chosen.static


# Slices that no output depends on in the network without masks either.
INHERENT = {
    "*attention.self.key.bias": "it shifts a row's logits alike, which softmax forgets",
    "*qkv.bias": "it holds the keys' bias",
    "*c_attn.bias": "it holds the keys' bias",
    "*token_type_embeddings.weight": "the second type is never asked for",
}


class Called(nn.Module):
    """A module that takes its keywords as one dictionary."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: dict[str, Tensor]) -> object:
        return self.module(**inputs)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param("llama_exact_norms", "head"),
        *(
            pytest.param(name, kind, marks=pytest.mark.nightly)
            for name in ("bert", "gpt2", "llama_exact_norms", "fused_qkv")
            for kind in ("head", "unit", "channel")
            if (name, kind) != ("llama_exact_norms", "head")
        ),
    ],
)
def test_nothing_is_missed(name: str, kind: str) -> None:
    skip_unless_installed(name)
    chosen, draw = ARCHITECTURES[name], generator()
    given = chosen.inputs(2, 7, draw)
    slim = to_graph(masked(name, kind, draw), (), given, dynamic_shapes=chosen.shapes)
    inputs = chosen.inputs(24, LENGTH, draw)  # every position is asked for, and every token:
    inputs["input_ids"] = torch.randint(VOCABULARY, (24, LENGTH), generator=draw)
    lines = [line.removeprefix("module.") for line in missed(Called(slim), (inputs,))]
    names = {line.partition(",")[0] for line in lines}
    assert [n for n in names if not any(fnmatchcase(n, known) for known in INHERENT)] == []


@pytest.mark.nightly
def test_the_oracle_sees_a_planted_miss() -> None:
    chosen, draw = ARCHITECTURES["fused_qkv"], generator()
    model = built("fused_qkv", draw)
    with torch.no_grad():
        model.get_parameter("blocks.0.fc2.weight")[:, 5] = 0
    lines = missed(Called(model), (chosen.inputs(24, LENGTH, draw),))
    assert any("blocks.0.fc1.weight, axis 0: position 5" in line for line in lines)


@pytest.mark.parametrize(
    ("kind", "part", "left"),
    [("unit", "mlp", 1 / 2), *at_night(("head", "mlp", 1), ("head_output", "self_attn.o_proj", 1 / 2))],
)
def test_part_of_a_model_generates_the_same_tokens(kind: str, part: str, left: float) -> None:
    """Parts alone are demasked, for any length: the step after the prompt reads one token. The
    cache, which no export takes, goes on."""
    skip_unless_installed("llama")
    draw = generator()
    model: Any = masked("llama", kind, draw)
    parts = [f"model.layers.{k}.{part}" for k in range(2)]
    slim: Any = demask.demask(model, (), {"input_ids": token_ids(2, 7, draw)}, modules=parts)
    options = {"use_cache": True, "do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    for prompt in (token_ids(3, 9, draw), token_ids(1, 1, draw)):
        expected = model.generate(prompt, **options)
        assert expected.shape[1] > prompt.shape[1] + 2, "the case is void: hardly a token"
        assert torch.equal(slim.generate(prompt, **options), expected)
    found = slim.get_submodule(parts[0]).demasked
    assert found.after.parameters == left * found.before.parameters


def test_an_attention_that_is_called_by_keywords_is_a_part() -> None:
    """Without a cache it exports, positions of one text for all of them included; it comes back in
    its class, which takes a cache. Where one is in the example, the error says so."""
    skip_unless_installed("llama")
    draw = generator()
    model: Any = masked("llama", "head", draw)
    parts = [f"model.layers.{k}.self_attn" for k in range(2)]
    inputs = {"input_ids": token_ids(2, 7, draw)}
    slim: Any = demask.demask(model, (), inputs, modules=parts)
    for batch, length in ((2, 7), (3, 11), (1, 1)):
        given = {"input_ids": token_ids(batch, length, draw)}
        assert difference(model, slim, given) <= allowed(ARCHITECTURES["llama"])
    found = slim.get_submodule(parts[0]).demasked
    assert found.after.parameters < found.before.parameters
    options = {"use_cache": True, "max_new_tokens": 4, "pad_token_id": 0, "do_sample": False}
    assert torch.equal(slim.generate(**inputs, **options), model.generate(**inputs, **options))
    with pytest.raises(demask.NotExportable, match="use_cache=False"):
        demask.demask(model, (), inputs | {"use_cache": True}, modules=parts)


def test_swin_shifts_its_windows_and_merges_patches() -> None:
    skip_unless_installed("swin")
    model: Any = built("swin", generator())
    blocks = [block for layer in model.swin.encoder.layers for block in layer.blocks]
    assert [block.shift_size for block in blocks] == [0, 2, 0, 2]
    assert all(min(block.input_resolution) >= 2 * block.window_size for block in blocks)
    assert any(name.endswith("downsample.reduction") for name, _ in model.named_modules())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fused_qkv", torch.float32),
        *at_night(
            ("bert", torch.float64), ("llama", torch.float32), ("llama", torch.float64), ("vit_eager", torch.float32)
        ),
    ],
)
def test_verify_takes_keywords_and_casts(name: str, dtype: torch.dtype) -> None:
    skip_unless_installed(name)
    chosen, draw = ARCHITECTURES[name], generator()
    model = masked(name, "stream", draw).to(dtype)
    inputs = chosen.inputs(2, chosen.lengths[0], draw)
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    slim = demasked(model, chosen, inputs, result="graph")
    found = demask.verify(model, slim, (), inputs)
    assert found.ok
    assert found.vacuous == ()
    assert demask.report(slim).after.parameters < demask.report(slim).before.parameters


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes_stay(name: str, dtype: torch.dtype) -> None:
    skip_unless_installed(name)
    chosen, draw = ARCHITECTURES[name], generator()
    model = masked(name, "unit", draw).to(dtype)
    inputs = chosen.inputs(2, 7, draw)
    slim = demasked(model, chosen, inputs)
    assert {p.dtype for p in slim.parameters()} == {dtype}
    for length in chosen.lengths:
        inputs = chosen.inputs(3, length, draw)
        pairs = zip(leaves(model, inputs)[0], leaves(slim, inputs)[0], strict=True)
        for a, b in pairs:
            assert a.dtype == b.dtype == dtype
            assert ulps(a, b, dtype) <= ULPS


@pytest.fixture
def process_group(tmp_path: Path) -> Any:
    """One process, for DistributedDataParallel."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["fused_qkv", *at_night("bert")])
def test_a_result_trains_in_data_parallel(name: str, process_group: None) -> None:
    skip_unless_installed(name)
    chosen, draw = ARCHITECTURES[name], generator()
    inputs = chosen.inputs(4, 7, draw)
    slim = demasked(masked(name, "unit", draw), chosen, inputs).train()
    parallel = DistributedDataParallel(slim)
    optimizer = torch.optim.SGD(slim.parameters(), lr=0.1)
    before = [p.detach().clone() for p in slim.parameters()]
    pytree.tree_leaves(parallel(**inputs))[0].square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in slim.parameters())
    optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, slim.parameters(), strict=True)]
    assert sum(moved) > len(moved) / 2
    assert all(bool(p.isfinite().all()) for p in slim.parameters())


@pytest.mark.parametrize("kind", ["channel", *at_night("unit")])
def test_tied_embeddings_stay_tied(kind: str) -> None:
    """GPT-2 looks tokens up in the matrix that makes its logits."""
    skip_unless_installed("gpt2")
    chosen, draw = ARCHITECTURES["gpt2"], generator()
    inputs = chosen.inputs(2, 7, draw)
    slim = demasked(masked("gpt2", kind, draw), chosen, inputs, result="graph")
    tables = [p for p in slim.parameters() if p.shape[0] == VOCABULARY]
    assert [p.shape[1] for p in tables] == [WIDTH if kind == "unit" else WIDTH * 3 // 4]
    table = slim.get_parameter("lm_head.weight")
    readers = [
        str(node.target)
        for read in graph_of_calls(slim).nodes
        if read.op == "get_attr" and slim.state_dict(keep_vars=True).get(read.target) is table
        for node in read.users
    ]
    assert sorted(readers) == ["aten.embedding.default", "aten.linear.default"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["bert", "llama_exact_norms", "fused_qkv", "torch_encoder"])
def test_exact_on_a_gpu(name: str) -> None:
    skip_unless_installed(name)
    chosen, draw = ARCHITECTURES[name], generator()
    model = masked(name, "unit", draw).cuda()

    def inputs(batch: int, length: int) -> dict[str, Tensor]:
        return {k: v.cuda() for k, v in chosen.inputs(batch, length, draw).items()}

    slim = demasked(model, chosen, inputs(2, 7))
    assert {p.device.type for p in slim.parameters()} == {"cuda"}
    assert slim.demasked.after.parameters < slim.demasked.before.parameters
    for length in chosen.lengths:
        assert difference(model, slim, inputs(3, length)) <= RELATIVE


@pytest.mark.parametrize("name", ["fused_qkv", "torch_encoder"])
def test_masks_and_counts_by_hand(name: str) -> None:
    """What `anatomy` says of a network with 4 heads of 8, 56 units, 2 layers of width 32."""
    chosen = ARCHITECTURES[name]
    heads, units = 2 * 2 * 8 * (3 * 33 + 32), 2 * 28 * (33 + 32)
    for kind, count in {"head": heads, "head_output": heads, "unit": units, "layer": 0}.items():
        model = masked(name, kind, generator())
        assert removed(model, chosen.family, chosen.heads, kind) == count
    whole = built(name, generator())
    assert removed(whole, chosen.family, chosen.heads, "head") == 0
    assert not any(bool((p == 0).any()) for p in whole.parameters())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_mask_zeroes_what_it_says(name: str) -> None:
    """A pattern that matches nothing would leave a network unmasked, and every test passes."""
    skip_unless_installed(name)
    chosen = ARCHITECTURES[name]
    zeros = {}
    for kind in MASKS:
        if kind not in chosen.declined:
            model = masked(name, kind, generator())
            zeros[kind] = sum(int((p == 0).sum()) for p in model.parameters())
            assert zeros[kind] > 0, kind
            if kind in COUNTED:
                assert removed(model, chosen.family, chosen.heads, kind) > 0, kind
    assert zeros["stream"] < zeros["channel"] or name == "gemma2"
    assert zeros["head_constant"] <= zeros["head"]


def test_the_comparison_finds_a_planted_fault() -> None:
    chosen, draw = ARCHITECTURES["fused_qkv"], generator()
    model, inputs = masked("fused_qkv", "unit", draw), chosen.inputs(2, 7, draw)
    slim = demasked(model, chosen, inputs)
    assert difference(model, slim, inputs) <= RELATIVE
    with torch.no_grad():
        slim.get_parameter("classify.bias")[0] += 1e-8
    assert difference(model, slim, inputs) > RELATIVE
    with pytest.raises(AssertionError):
        assert_depends(model, inputs, inputs)
