"""Every pass of optimize() computes what it was given: alone and in sequence, in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

import micro_recurrent  # noqa: F401  (their networks join MICROS)
import micro_sequences  # noqa: F401
from demask.failures import Log, strict
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.queries import ExampleSizes
from demask.graph.result.demasked_module import build_plain
from demask.machine.cost import Question
from demask.ops import TABLE
from demask.rewrites import rule
from demask.rewrites.driver import rewrite
from demask.rewrites.rule import Phase
from demask.shrink.pipeline import capture_program, shrink_program
from demask.tune import epilogue as epilogues
from demask.tune import fuse_epilogues as fuse
from demask.tune import join_as_sum as joins
from demask.tune.candidates import PLAIN_LAYERS, TUNE, generate_candidates
from demask.tune.channels_last import images_channels_last
from demask.tune.fold_affine import FOLD
from demask.tune.fuse_epilogues import epilogues_fused
from demask.tune.layer_costs import LayerCosts
from demask.tune.onnxruntime_candidate import for_runtime
from demask.tune.pad_channels import PADS_REMOVED, widths_rounded
from fuzz.generate import generate
from fuzz.laws import difference
from micro import MICROS, Micro, Net, dead
from night import at_night

LIMIT = 1e-10  # max |a - b| / max |a| per output leaf, float64: a re-ordered sum is about 1e-15
Pass = Callable[[Program], Program]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated.*:FutureWarning"),
]


@pytest.fixture(autouse=True)
def any_dtype(monkeypatch):
    """Layers fuse in float64 too: `epilogues.plain` takes what was fused apart again to run it."""
    monkeypatch.setattr(fuse, "available", lambda dtype, device: True)


def program_of(model: nn.Module, args: tuple[Tensor, ...], shapes: Any = None) -> Program:
    return shrink_program(capture_program(model, args, None, shapes), TABLE)[0]


def made(case: Micro) -> tuple[Program, tuple[Tensor, ...]]:
    torch.manual_seed(7)
    model, args = case.make()
    args = tuple(a.double() if a.is_floating_point() else a for a in args)
    return program_of(model.double().eval(), args), args


def ran(program: Program, inputs: tuple[Any, ...], *, metas: bool = True) -> list[Any]:
    """What a program of ATen calls returns; each value is checked against what its meta says."""
    given_inputs = iter(pytree.tree_leaves(inputs))
    example = ExampleSizes.of(program.graph, pytree.tree_leaves(inputs))
    values: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given_inputs)
        elif node.op == "get_attr":
            values[node] = program.constants[str(node.target)].tensor
        elif node.op == "output":
            return list(map_arg(node.args[0], lambda n: values[n]))
        else:
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
            with torch.no_grad():
                values[node] = node.target(*args, **kwargs)
        said, value = node.meta.get("val"), values[node]
        if metas and isinstance(said, Tensor) and isinstance(value, Tensor):
            assert tuple(value.shape) == example.shape(node), (node.format_node(), value.shape)
            assert value.dtype is said.dtype, (node.format_node(), value.dtype)
    raise AssertionError("a graph without an output")


def text(program: Program) -> list[str]:
    """A program in words: calls, values, constants."""
    graph = [f"{n.format_node()} {n.args} {n.kwargs} {_said(n)}" for n in program.graph.nodes]
    return graph + [
        f"{name} {c.name} {c.aliases} {c.tensor.dtype} {c.tensor.tolist()}" for name, c in program.constants.items()
    ]


def _said(node: fx.Node) -> str:
    value = node.meta.get("val")
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else str(value)


def batches(args: tuple[Tensor, ...], program: Program) -> list[tuple[Tensor, ...]]:
    """The example, and other numbers, at batch 1 and batch 3 where that is free."""
    sizes = []
    nodes = [n for n in program.graph.nodes if n.op == "placeholder"]
    if all(not isinstance(n.meta["val"].shape[0], int) for n in nodes):
        sizes += [1, 3]
    draw = torch.Generator().manual_seed(3)
    found = [args]
    for size in sizes:
        found.append(
            tuple(
                torch.randn(size, *a.shape[1:], dtype=a.dtype, generator=draw)
                if a.is_floating_point()
                else a.repeat_interleave(size, 0)[:size]
                for a in args
            )
        )
    return found


def check(program: Program, change: Pass, args: tuple[Tensor, ...]) -> Program:
    """change(program) computes what program does, and leaves program as it is."""
    before = text(program)
    after = change(program)
    assert text(program) == before, "the pass changed the program it was given"
    after.graph.lint()
    whole = epilogues.unfuse(after)
    for inputs in batches(args, program):
        expected, found = ran(program, inputs, metas=False), ran(whole, inputs)
        for a, b in zip(expected, found, strict=True):
            if isinstance(a, Tensor):
                assert difference(a, b) <= LIMIT, after.graph
    return after


def applied(*entries: rule.Rule | rule.Pass) -> Pass:
    return lambda program: rewrite(program, Phase("test", entries), TABLE)


def _mixed(program: Program) -> Program:
    turn = count()
    return applied(images_channels_last(lambda _: next(turn) % 2 == 0))(program)


def then(*passes: Pass) -> Pass:
    def all_of(program: Program) -> Program:
        for change in passes:
            program = change(program)
        return program

    return all_of


folded = applied(*FOLD.entries)
fused = applied(epilogues_fused(lambda *_: True))
LAST, FIRST = (applied(images_channels_last(lambda _, wanted=wanted: wanted)) for wanted in (True, False))
PASSES: dict[str, Pass] = {
    **{entry.name: applied(entry) for entry in (*FOLD.entries, *TUNE.entries)},
    "for a runtime": lambda program: for_runtime(program, TABLE, 8),
    "first": FIRST,
    "mixed": _mixed,
}
SEQUENCES: dict[str, Pass] = {
    f"{multiple}, {name}": then(folded, applied(*joined, PADS_REMOVED, widths_rounded(multiple)), fused, laid)
    for joined, multiple, name, laid in (
        ((joins.JOINS_AS_SUMS,), 8, "last", LAST),
        ((), 16, "mixed", _mixed),
        ((joins.JOINS_AS_SUMS,), 16, "first", FIRST),
    )
}


@pytest.mark.sampled(36)
@pytest.mark.parametrize("case", MICROS, ids=lambda c: c.name)
def test_every_pass_is_an_identity(case: Micro) -> None:
    program, args = made(case)
    for change in [*PASSES.values(), next(iter(SEQUENCES.values()))]:
        check(program, change, args)


@pytest.mark.sampled(36)
@pytest.mark.parametrize("case", MICROS, ids=lambda c: c.name)
def test_constants_that_are_computed_leave_no_border_maps(case: Micro) -> None:
    """Without border maps the same is computed, and in the form for runtimes too."""
    torch.manual_seed(7)
    model, args = case.make()
    args = tuple(a.double() if a.is_floating_point() else a for a in args)
    whole = capture_program(model.double().eval(), args, None, None)
    program, provenance = shrink_program(whole, TABLE, borders=False)
    assert "border map" not in provenance.effects
    check(whole, lambda _: program, args)
    check(program, lambda p: for_runtime(p, TABLE, 8), args)


@pytest.mark.nightly
@pytest.mark.parametrize("case", MICROS, ids=lambda c: c.name)
def test_every_sequence_is_an_identity(case: Micro) -> None:
    program, args = made(case)
    for change in SEQUENCES.values():
        check(program, change, args)


def everything(seeds: range, few: bool = False) -> None:
    """Every sequence (or one for each), on the networks of these seeds."""
    for seed in seeds:
        drawn = generate(seed)
        args = drawn.example(drawn.batch)
        program = program_of(drawn.build(), args)
        some = slice(seed % 4, seed % 4 + 1) if few else slice(None)
        for name, change in list(SEQUENCES.items())[some]:
            try:
                check(program, change, args)
            except Exception as error:
                words = f"seed {seed}, {name}: {type(error).__name__}: {str(error)[:300]}"
                raise AssertionError(words) from error


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", [323, 342, 349])
def test_networks_that_found_faults(seed: int) -> None:
    """Branches that no input reaches, and layers in groups, do not take rows."""
    everything(range(seed, seed + 1))


@pytest.mark.parametrize("seeds", [range(2), *at_night(range(2, 8))], ids=str)
def test_random_networks(seeds: range) -> None:
    everything(seeds, few=True)


STARTS = [range(8, 20), *(range(k, k + 20) for k in (20, *range(100, 500, 20)))]


@pytest.mark.nightly
@pytest.mark.parametrize("seeds", STARTS, ids=str)
def test_many_random_networks(seeds: range) -> None:
    everything(seeds)


# What a pass must leave alone.


def alike(model: nn.Module, change: Pass, *args: Tensor) -> None:
    args = tuple(a.double() for a in args)
    check(program_of(model.double().eval(), args), change, args)


def scaled(factor: Tensor) -> nn.Module:
    net = Net(lambda m, x: m["a"](x) * m["b"].factor, a=nn.Conv2d(3, 8, 3), b=nn.Module())
    net.steps["b"].register_buffer("factor", factor)
    return net


def test_rows_of_an_image_without_a_batch_are_no_channels() -> None:
    alike(scaled(torch.randn(1, 8, 1)), folded, torch.randn(3, 10, 9))


def test_rows_of_an_image_without_a_batch_are_not_widened() -> None:
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3))
    alike(net, applied(widths_rounded(8)), torch.randn(3, 10, 9))


@pytest.mark.parametrize("kind", ["images", "tokens"])
def test_a_branch_that_is_broadcast_into_a_join(kind: str) -> None:
    """Its value is as small as before: not of the join's sizes."""
    images = kind == "images"

    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        mean = x.mean((2, 3) if images else 1, keepdim=True)
        return m["d"](((m["a"](x).relu() + m["b"](mean)) + m["c"](x)).relu())

    def layer(i: int, o: int) -> nn.Module:
        return nn.Conv2d(i, o, 1) if images else nn.Linear(i, o)

    net = Net(
        run,
        a=dead(layer(3, 8), [0, 1, 2, 3]),
        b=dead(layer(3, 8), [0, 4, 5]),
        c=dead(layer(3, 8), [2, 3, 6]),
        d=layer(8, 4),
    )
    x = torch.randn(2, 3, 8, 8) if images else torch.randn(2, 5, 3)
    alike(net, then(applied(joins.JOINS_AS_SUMS), fused), x)


def test_the_sizes_of_a_branch_that_no_input_reaches() -> None:
    everything(range(113, 114))


def test_a_norm_by_its_batch_is_not_absorbed() -> None:
    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        mean, var = m["n"].running_mean, m["n"].running_var
        return F.batch_norm(m["a"](x), mean, var, training=True)

    net = Net(run, a=nn.Conv2d(3, 8, 3), n=nn.BatchNorm2d(8))
    alike(net, folded, torch.randn(2, 3, 10, 9))


# The checkers themselves: each fails on a fault planted for it.

RESIDUAL = next(case for case in MICROS if case.name == "misaligned_residual")


def fails(change: Pass) -> None:
    program, args = made(RESIDUAL)
    with pytest.raises(AssertionError):
        check(program, change, args)


def test_a_forgotten_constant_is_noticed() -> None:
    def spoil(program: Program) -> Program:
        editor = GraphEditor(program)
        node = editor.calls(torch.ops.aten.conv2d.default)[0]
        weight = node.args[1]
        node.replace_input_with(weight, editor.replace_constant(weight, editor.tensor(weight) * 1.001, node))
        return editor.finish()

    fails(spoil)


def test_a_wrong_meta_is_noticed() -> None:
    def spoil(program: Program) -> Program:
        editor = GraphEditor(program)
        node = editor.calls(torch.ops.aten.relu.default)[0]
        node.meta["val"] = node.meta["val"].new_empty((*node.meta["val"].shape[:3], 77))
        return editor.finish()

    fails(spoil)


def test_a_changed_program_is_noticed() -> None:
    def spoil(program: Program) -> Program:
        next(iter(program.constants.values())).tensor.mul_(1)
        next(iter(program.constants.values())).tensor.view(-1)[-1] += 1e-13
        return GraphEditor(program).finish()

    fails(spoil)


def test_rows_at_the_wrong_places_are_noticed(monkeypatch) -> None:
    real = joins._branch

    def turned(value, where, *rest):
        return real(value, where.roll(1), *rest)

    monkeypatch.setattr(joins, "_branch", turned)
    fails(then(folded, applied(joins.JOINS_AS_SUMS)))


class FixedCosts:
    """Seconds that follow from the size of a question."""

    def seconds(self, question: Question) -> float:
        return 1e-6 + 1e-11 * question.flops + 1e-10 * question.bytes


def test_a_rewrite_that_fails_is_left_out_of_candidates(monkeypatch) -> None:
    def fails(*_: Any) -> Program:
        raise KeyError("planted")

    monkeypatch.setattr(fuse, "fuse_epilogues", fails)
    program, args = made(RESIDUAL)
    costs: Any = FixedCosts()
    log, asker = Log(), LayerCosts(costs, ExampleSizes.of(program.graph, args))
    with strict(False):
        candidates = list(generate_candidates(program, asker, TABLE, lambda _: None, log=log))
    assert len(candidates) > 1 and all("the fusion of epilogues is left out" in note for note in log.notes)
    for candidate in candidates:
        check(program, lambda _, candidate=candidate: candidate.program, args)


class Squeezed(nn.Module):
    """Squeeze and excitation, its gate spelled as ONNX files spell hardsigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(6, 3, 1), nn.Conv2d(3, 6, 1)
        self.shift = nn.Parameter(torch.randn(1, 6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.b(torch.relu(self.a(x.mean((2, 3), keepdim=True)))) + self.shift
        return x * torch.clamp(gate * 0.2 + 0.5, 0, 1) / 3


def test_convolutions_of_one_pixel_are_linear_layers() -> None:
    net, x = Squeezed().eval(), torch.randn(2, 6, 5, 7)
    program = rewrite(capture_program(net, (x,), None, None), PLAIN_LAYERS, TABLE)
    calls = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert [name for name in calls if "conv" in name or "linear" in name] == (["aten.linear.default"] * 2)
    assert calls.count("aten.flatten.using_ints") == 1
    assert calls.count("aten.add.Tensor") == 0  # the shift and 0.2 x + 0.5 are in the weights
    torch.testing.assert_close(build_plain(program)(x), net(x))
