"""Regions of sparse layers become segments, and segments ATen calls again: both are identities."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import replace
from graphlib import CycleError
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import micro_recurrent  # noqa: F401  (their networks join MICROS)
import micro_sequences  # noqa: F401
from demask.errors import BadInput
from demask.exec.steps import convex_groups as regions
from demask.exec.steps.match_calls import MatchedCall
from demask.exec.steps.segment_rows import name_of
from demask.exec.steps.segment_steps import SparseWeight, is_layer
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.result.demasked_module import build_plain
from demask.rewrites.driver import rewrite
from demask.shrink.pipeline import capture_program
from demask.sparse.segment import build_segments as segments
from demask.sparse.segment import inline as spell
from demask.sparse.segment.build_segments import SEGMENT, layers_of, segmented, segments_of
from demask.tune.fold_affine import FOLD
from fuzz.generate import generate
from micro import MICROS, Micro, Net
from test_tune import check, program_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning"),
]
Wanted = Callable[[GraphEditor, MatchedCall], bool]


def always(editor: GraphEditor, call: MatchedCall) -> bool:
    return True


def pruned(model: nn.Module, density: float = 0.4) -> nn.Module:
    """The model in eval mode with that share of each weight, drawn; norms drawn too."""
    torch.manual_seed(1)
    with torch.no_grad():
        for values in [*model.parameters(), *model.buffers()]:
            if values.is_floating_point() and values.ndim < 2:
                values.uniform_(0.5, 1.5)
            if values.ndim > 1:
                values.mul_(torch.rand(values.shape) < density)
    return model.double().eval()


def made(model: nn.Module, *args: Tensor, shapes: Any = None) -> tuple[Program, tuple[Any, ...]]:
    args = tuple(a.double() if a.is_floating_point() else a for a in args)
    return rewrite(capture_program(pruned(model), args, None, shapes), FOLD), args


def all_sparse(program: Program) -> Program:
    return segmented(program, always, always, dtype=torch.float64)


def and_back(program: Program) -> Program:
    return spell.inlined(all_sparse(program))


def constant(program: Program, name: str) -> Tensor:
    return next(c.tensor for c in program.constants.values() if c.name == name)


def steps(program: Program) -> list[str]:
    """The segments of a program in words: steps with their activations (and sums)."""
    found = []
    for _, inner in segments_of(program.graph):
        words = []
        for step in inner.steps:
            word = name_of(step)
            word += "+" if step.adds and is_layer(step) else ""
            words.append(f"{word} {step.act[0]}" if step.act else word)
        found.append(", ".join(words))
    return found


def images(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


X = torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))
SIGNAL = torch.randn(2, 4, 11, generator=torch.Generator().manual_seed(2))


class Bottleneck(nn.Module):
    def __init__(self, i: int, o: int, stride: int = 1):
        super().__init__()
        self.a, self.na = nn.Conv2d(i, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.b, self.nb = nn.Conv2d(4, 4, 3, stride, 1, bias=False), nn.BatchNorm2d(4)
        self.c, self.nc = nn.Conv2d(4, o, 1, bias=False), nn.BatchNorm2d(o)
        self.d = nn.Conv2d(i, o, 1, stride) if i != o else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.nb(self.b(self.na(self.a(x)).relu())).relu()
        return (self.nc(self.c(y)) + self.d(x)).relu()


def resnet() -> nn.Module:
    stem = (nn.Conv2d(3, 6, 7, 2, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return images(
        *stem,
        Bottleneck(6, 8),
        Bottleneck(8, 8),
        Bottleneck(8, 12, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 5),
    )


def mobilenet() -> nn.Module:
    def pair(i: int, o: int, stride: int) -> list[nn.Module]:
        return [
            nn.Conv2d(i, i, 3, stride, 1, groups=i, bias=False),
            nn.BatchNorm2d(i),
            nn.ReLU6(),
            nn.Conv2d(i, o, 1, bias=False),
            nn.BatchNorm2d(o),
            nn.ReLU6(),
        ]

    return images(
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.ReLU6(),
        *pair(8, 12, 1),
        *pair(12, 16, 2),
        nn.AvgPool2d(2),
        nn.Flatten(2),
        nn.AdaptiveAvgPool1d(1),
    )


def ffn(residual: bool) -> nn.Module:
    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        y = m["d"](m["b"](F.gelu(m["a"](x), approximate="tanh")))
        return m["n"](x + y if residual else y)

    return Net(run, a=nn.Linear(6, 12), b=nn.Linear(12, 6), n=nn.LayerNorm(6), d=nn.Dropout(0.1))


def inception() -> nn.Module:
    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        x = m["s"](x).sigmoid()
        parts = [m["a"](x).relu(), m["b"](F.avg_pool2d(x, 3, 1, 1)), F.max_pool2d(x, 3, 1, 1)]
        return m["c"](torch.cat(parts, 1))

    return Net(run, s=nn.Conv2d(3, 4, 3), a=nn.Conv2d(4, 5, 1), b=nn.Conv2d(4, 2, 1), c=nn.Conv2d(11, 3, 3))


def squeeze() -> nn.Module:
    """A product with one factor per channel, which is a step; its image has two other readers."""

    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        x = m["a"](x).relu()
        gate = m["c"](m["b"](x.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return m["d"](x * gate) + x

    return Net(run, a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 2, 1), c=nn.Conv2d(2, 4, 1), d=nn.Conv2d(4, 4, 1))


def leaving() -> nn.Module:
    """A product of equal shapes, which is no step: a path leaves and comes back."""

    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        x = m["a"](x).relu()
        return m["d"](x * x.cos()) + x

    return Net(run, a=nn.Conv2d(3, 4, 3), d=nn.Conv2d(4, 4, 1))


def both_kinds() -> nn.Module:
    """A value that a convolution of signals reads, and a linear layer."""
    return Net(
        lambda m, x: m["b"](m["a"](x).relu()).sum() + m["c"](m["a"](x).relu()),
        a=nn.Conv1d(4, 6, 3),
        b=nn.Conv1d(6, 3, 2),
        c=nn.Linear(9, 7),
    )


def twice() -> nn.Module:
    """One layer called twice, its own output added to itself, two outputs."""

    def run(m: nn.ModuleDict, x: Tensor) -> tuple[Tensor, Tensor]:
        y = m["a"](m["a"](x).tanh())
        return m["b"](y + y), y

    return Net(run, a=nn.Linear(6, 6), b=nn.Linear(6, 2))


def queries() -> nn.Module:
    return Net(
        lambda m, x: m["q"](x) @ m["k"](x).transpose(1, 2) @ m["v"](x),
        q=nn.Linear(6, 4),
        k=nn.Linear(6, 4),
        v=nn.Linear(6, 4),
    )


def ups() -> nn.Module:
    return images(
        nn.ConvTranspose2d(3, 6, 3, 2, 1, 1),
        nn.LeakyReLU(0.2),
        nn.ConvTranspose2d(6, 4, (2, 3), (2, 1), groups=2, dilation=(1, 2)),
    )


def same() -> nn.Module:
    return images(
        nn.Conv2d(3, 4, (4, 3), padding="same"),
        nn.Hardswish(),
        nn.Dropout(0.5),
        nn.Conv2d(4, 4, 2, padding="valid"),
        nn.Hardsigmoid(),
    )


# Network, input, its segments when every layer is sparse.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor, list[str]]] = {
    "resnet": (
        resnet,
        torch.randn(2, 3, 33, 32),
        [
            "conv relu, pool, conv relu, conv relu, conv, conv+ relu, conv relu, conv relu, "
            "conv+ relu, conv relu, conv relu, conv, conv+ relu, mean, flat, linear"
        ],
    ),
    "mobilenet": (mobilenet, X, ["conv clamp, conv clamp, conv clamp, conv clamp, conv clamp"]),
    "ffn": (lambda: ffn(False), TOKENS, ["linear gelu_tanh, linear, call"]),
    "ffn, residual": (lambda: ffn(True), TOKENS, ["linear gelu_tanh, linear+, call"]),
    "inception": (inception, X, ["conv sigmoid, conv relu, pool, conv, pool, cat, conv"]),
    "squeeze": (squeeze, X, ["conv relu, mean, conv relu, conv sigmoid, scale, conv+"]),
    "leaving": (leaving, X, ["conv relu", "conv+"]),
    "both kinds": (both_kinds, SIGNAL, ["conv relu, conv, conv relu", "linear"]),
    "twice": (twice, TOKENS, ["linear tanh, linear, add, linear"]),
    "queries": (queries, TOKENS, ["linear, linear, call, call, call, linear, call, call"]),
    "ups": (ups, X, ["conv leaky_relu, conv"]),
    "same": (same, X, ["conv hardswish, conv hardsigmoid"]),
    "rows": (lambda: images(nn.Linear(6, 5), nn.SiLU(), nn.Linear(5, 3)), torch.randn(3, 6), ["linear silu, linear"]),
    "dense connections": (
        lambda: Net(lambda m, x: m["b"](torch.cat([m["a"](x), x], -1)), a=nn.Linear(6, 4), b=nn.Linear(10, 2)),
        TOKENS,
        ["linear, cat, linear"],
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_becomes_these_segments_and_comes_back(name: str) -> None:
    make, x, expected = NETWORKS[name]
    program, args = made(make(), x)
    found = check(program, all_sparse, args)
    assert steps(found) == expected
    back = check(program, and_back, args)
    assert not segments_of(back.graph)
    names = {c.name for c in program.constants.values()}
    assert {n for n in back.constants if n not in names} <= {"0.bias", "3.bias"}, "renamed"


@pytest.mark.parametrize("name", ["ffn, residual"])
def test_segments_are_compiled_and_exported(name: str) -> None:
    make, x, _ = NETWORKS[name]
    program, args = made(make(), x)
    net = build_plain(all_sparse(program)).eval()
    with torch.no_grad():
        wanted = net(*args)
        compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
        exported = torch.export.export(net, args).run_decompositions().module()
        for run in (compiled, exported):
            torch.testing.assert_close(run(*args), wanted)


def test_every_size_may_be_dynamic() -> None:
    auto = torch.export.Dim.AUTO
    model, x = resnet(), torch.randn(2, 3, 33, 32)
    program, args = made(model, x, shapes=({0: auto, 2: auto, 3: auto},))
    found = check(program, all_sparse, args)
    assert len(steps(found)) == 1
    for step in segments_of(found.graph)[0][1].steps:
        fields = replace(step, weight=SparseWeight((0, 0, 0)), bias=None) if (is_layer(step)) else step
        assert not any(str(n) in str(fields) for n in (33, 32))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", MICROS, ids=lambda c: c.name)
def test_every_micro_network(case: Micro) -> None:
    torch.manual_seed(7)
    model, args = case.make()
    args = tuple(a.double() if a.is_floating_point() else a for a in args)
    program = rewrite(program_of(model.double().eval(), args), FOLD)
    check(program, all_sparse, args)
    check(program, and_back, args)


def drawn(seed: int) -> Wanted:
    """Says of each layer yes or no, at random, and always the same of one."""

    def wanted(editor: GraphEditor, call: MatchedCall) -> bool:
        return random.Random(f"{seed} {call.node.name}").random() < 0.5

    return wanted


def some_sparse(seed: int) -> Callable[[Program], Program]:
    return lambda p: segmented(p, drawn(seed), drawn(~seed), dtype=torch.float64)


@pytest.mark.parametrize("seeds", [range(4)], ids=str)
def test_random_networks_with_random_layers_sparse(seeds: range) -> None:
    for seed in seeds:
        network = generate(seed)
        args = network.example(network.batch)
        program = rewrite(program_of(network.build(), args), FOLD)
        for change in (all_sparse, some_sparse(seed), and_back):
            try:
                check(program, change, args)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {str(error)[:300]}") from error


def test_segments_that_read_nothing_but_another_segment() -> None:
    """Layers chosen at random: many neighbors are in segments of their own."""
    program, args = made(resnet(), torch.randn(2, 3, 33, 32))
    counts = {len(steps(check(program, some_sparse(seed), args))) for seed in range(8)}
    assert max(counts) >= 3


@pytest.mark.nightly
@pytest.mark.parametrize("seeds", [range(k, k + 20) for k in range(0, 400, 20)], ids=str)
def test_many_random_networks_with_random_layers_sparse(seeds: range) -> None:
    test_random_networks_with_random_layers_sparse(seeds)


def only(*names: str) -> Wanted:
    return lambda editor, call: segments.name_of(editor, call) in names


def never(editor: GraphEditor, call: MatchedCall) -> bool:
    return False


def split(make: Callable[[], nn.Module], x: Tensor, core: Wanted, between: Wanted) -> list[str]:
    program, args = made(make(), x)
    return steps(check(program, lambda p: segmented(p, core, between, dtype=torch.float64), args))


def test_a_region_begins_and_ends_with_sparse_layers() -> None:
    """What is behind the last one stays outside, but for its activation; pools between are in."""
    chain = images(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 2, 1),
    )
    for names, expected in {
        ("0",): ["conv relu"],
        ("3",): ["conv relu"],
        ("6",): ["conv"],
        ("0", "3"): ["conv relu, pool, conv relu"],
        ("3", "6"): ["conv relu, pool, conv"],
    }.items():
        assert split(lambda: chain, X, only(*names), never) == expected


def test_dense_layers_between_are_inside_where_that_is_allowed() -> None:
    chain = images(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 4))
    core = only("0", "4")
    assert split(lambda: chain, TOKENS, core, always) == ["linear relu, linear relu, linear"]
    assert split(lambda: chain, TOKENS, core, never) == ["linear relu", "linear"]
    assert split(lambda: chain, TOKENS, only("2"), always) == ["linear relu"]


def test_an_add_behind_the_last_layer_takes_what_does_not_depend_on_it() -> None:
    def behind(m: nn.ModuleDict, x: Tensor) -> Tensor:
        y = m["a"](x)
        return y + y.cumsum(1)  # made of it, outside

    def beside(m: nn.ModuleDict, x: Tensor) -> Tensor:
        return m["a"](x) + x

    layer = {"a": nn.Linear(6, 6)}
    assert split(lambda: Net(behind, **layer), TOKENS, always, always) == ["linear"]
    assert split(lambda: Net(beside, **layer), TOKENS, always, always) == ["linear+"]


def test_weights_of_the_segments() -> None:
    program, _ = made(images(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4, bias=False)), TOKENS)
    found = all_sparse(program)
    ((node, inner),) = segments_of(found.graph)
    values, index = (found.constants[str(n.target)].tensor for n in node.args[1])
    stored = sum(int(t.tensor.count_nonzero()) for t in program.constants.values() if t.tensor.ndim)
    assert values.numel() == stored and values.dtype is torch.float64
    assert index.dtype is torch.int32 and index.numel() == stored - 5 + (5 + 1) + (4 + 1)
    assert [step.name for step in inner.steps] == ["0", "2"]
    first, _ = layers_of(found)
    assert first.weights == 30 and first.products == 10 * first.stored == 10 * int(
        constant(program, "0.weight").count_nonzero()
    )


@pytest.mark.parametrize("batch", [1, 2])
def test_products_are_those_of_the_example(batch: int) -> None:
    program, _ = made(images(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)), TOKENS[:batch])
    for layer in layers_of(all_sparse(program)):
        assert layer.products == 5 * batch * layer.stored


def test_a_layer_called_twice_is_stored_once() -> None:
    program, _ = made(twice(), TOKENS)
    ((_, inner),) = segments_of(all_sparse(program).graph)
    a, again, _, b = inner.steps
    assert a.weight == again.weight and a.weight != b.weight


@pytest.mark.parametrize(("precision", "error"), [("bf16", 2**-8), ("int8", 1 / 254)])
def test_fewer_bits(precision: str, error: float) -> None:
    """bfloat16 has 8 bits; an integer is off by half of a 127th of the row's largest."""
    program, _ = made(images(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)), TOKENS)
    found = segmented(program, always, always, dtype=torch.float64, precision=precision)
    ((node, _),) = segments_of(found.graph)
    assert found.constants[str(node.args[1][2].target)].tensor.itemsize == {"bf16": 2, "int8": 1}[precision]
    back = spell.inlined(found)
    for name in ("0", "2"):
        exact = constant(program, f"{name}.weight")
        made_of = back.constants[f"{name}.weight"].tensor
        assert made_of.dtype is torch.float64
        limit = exact.abs() if precision == "bf16" else exact.abs().amax(1, keepdim=True)
        gap = (exact - made_of).abs()
        assert gap.max() > 0 and (gap <= error * limit * (1 + 1e-12)).all()
        assert torch.equal(back.constants[f"{name}.bias"].tensor, constant(program, f"{name}.bias"))


def test_what_the_gate_of_files_refuses() -> None:
    program, _ = made(images(nn.Linear(6, 5)), TOKENS)
    found = all_sparse(program)
    ((node, inner),) = segments_of(found.graph)
    values, index = (found.constants[str(n.target)].tensor for n in node.args[1])
    good: dict[str, Any] = {"inputs": [None], "weights": [values, index], "program": inner.text()}
    spell.check(good)
    spell.check(good | {"weights": [None, index]})  # computed: known when the op is called
    for bad in (
        {"program": "{}"},
        {"program": "[" * 100_000},
        {"inputs": [None, None]},
        {"weights": [values]},
        {"weights": [values[:-1], index]},
        {"weights": [values, index - 1]},
        {"weights": [values, index.long()]},
        {"weights": [values, index.flip(0)]},
        {"weights": [values.to(torch.int8), index]},
    ):
        with pytest.raises(BadInput):
            spell.check(good | bad)


# The checkers themselves: each fails on a fault planted for it.


def fails(change: Callable[[Program], Program], make: Callable[[], nn.Module], x: Tensor) -> None:
    program, args = made(make(), x)
    with pytest.raises((AssertionError, BadInput)):
        check(program, change, args)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("resnet", lambda s: replace(s, act=None) if is_layer(s) else s),
        ("resnet", lambda s: replace(s, reads=s.reads[:1], adds=False) if s.op == "conv" else s),
        ("resnet", lambda s: replace(s, bias=None) if is_layer(s) else s),
        ("ups", lambda s: replace(s, fields=s.fields._replace(transposed=False))),
        ("same", lambda s: replace(s, fields=s.fields._replace(padding=tuple((b, a) for a, b in s.fields.padding)))),
    ],
)
def test_a_forgotten_part_of_a_step_is_noticed(name: str, spoil: Any, monkeypatch) -> None:
    real = segments._Steps._append

    def append(self, chain):
        before = len(self.steps)
        real(self, chain)
        self.steps[before:] = map(spoil, self.steps[before:])

    monkeypatch.setattr(segments._Steps, "_append", append)
    fails(all_sparse, *NETWORKS[name][:2])


def test_a_region_that_is_not_convex_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(regions, "_segment_levels", lambda graph, known: dict.fromkeys(graph.nodes, 0))
    program, _ = made(leaving(), X)
    with pytest.raises(CycleError):
        all_sparse(program)


def test_the_op_is_what_graphs_call() -> None:
    program, _ = made(images(nn.Linear(6, 5)), TOKENS)
    targets = [n.target for n in all_sparse(program).graph.nodes if n.op == "call_function"]
    assert targets == [SEGMENT, operator.getitem]
