"""What a pass writes over, and what it keeps: only what nobody reads, and nobody else has."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import micro_recurrent  # noqa: F401  (their networks join MICROS)
import micro_sequences  # noqa: F401
from demask.graph.result.demasked_module import build, build_plain
from demask.ops import TABLE
from demask.rewrites.driver import rewrite
from demask.shrink.pipeline import capture_program, shrink_program
from demask.tune import buffer_assignment as memory
from demask.tune import shape_cache as plans
from demask.tune.buffer_assignment import InArena, InPlace, assign_buffers
from demask.tune.channels_last import convert_layouts
from demask.tune.fold_affine import FOLD
from demask.tune.fuse_epilogues import fuse_epilogues
from demask.tune.optimized_module import Optimized
from fuzz.laws import difference
from micro import MICROS, Micro

# Of the largest output: what optimize() promises, for kernels that sum in another order.
LIMIT = 64 * torch.finfo(torch.float32).eps
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning"),
]


class Calls(nn.Module):
    """A function of (modules, inputs) over named modules and buffers."""

    def __init__(self, run: Callable[..., object], **parts: nn.Module | Tensor):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> object:
        return self.run(self, *inputs)


def plain_form(program):
    return program


def fused_form(program):
    return fuse_epilogues(rewrite(program, FOLD), lambda *_: True)


def last_form(program):
    return convert_layouts(fused_form(program), TABLE, lambda _: True)


FORMS = {"plain": plain_form, "fused": fused_form, "last": last_form}


def pair_of(model: nn.Module, args: tuple, form=plain_form) -> tuple[nn.Module, Optimized]:
    """The network demasked as plain ops, and as the fast module."""
    program, provenance = shrink_program(capture_program(model.eval(), args, None, None), TABLE)
    return build_plain(program), build(form(program), provenance, Optimized).eval()


def same(expected: nn.Module, module: nn.Module, args: tuple, limit: float = LIMIT) -> None:
    """Both return the same, twice; inputs stay, and outputs are nobody else's."""
    with torch.no_grad():
        wanted = pytree.tree_leaves(expected(*(a.clone() for a in args)))
    before = [a.clone() for a in args]
    first = pytree.tree_leaves(module(*args))
    held = [a.clone() if isinstance(a, Tensor) else a for a in first]
    second = pytree.tree_leaves(module(*args))
    for found in (held, first, second):
        for a, b in zip(wanted, found, strict=True):
            assert difference(a, b) <= limit
    assert all(map(torch.equal, before, args)), "an input was written to"


def net(case: Micro) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(7)
    return case.make()


@pytest.mark.sampled(18)
@pytest.mark.parametrize(
    "form", ["last", *(pytest.param(form, marks=pytest.mark.nightly) for form in ("plain", "fused"))]
)
@pytest.mark.parametrize("case", MICROS, ids=lambda c: c.name)
def test_the_fast_module_computes_the_same(case: Micro, form: str) -> None:
    model, args = net(case)
    expected, module = pair_of(model, args, FORMS[form])
    draw = torch.Generator().manual_seed(1)
    for batch in (len(args[0]), 1, 3, len(args[0])):
        same(expected, module, tuple(torch.randn(batch, *a.shape[1:], generator=draw) for a in args))


def residual(form=fused_form) -> tuple[nn.Module, Optimized, tuple[Tensor, ...]]:
    return copy.deepcopy(residual_once(form))


@functools.cache
def residual_once(form) -> tuple[nn.Module, Optimized, tuple[Tensor, ...]]:
    model, args = net(next(c for c in MICROS if c.name == "misaligned_residual"))
    return *pair_of(model, args, form), args


@pytest.mark.parametrize("form", FORMS)
def test_any_strides(form: str) -> None:
    expected, module, (x,) = residual(FORMS[form])
    images = [
        x.contiguous(memory_format=torch.channels_last),
        x.transpose(2, 3).contiguous().transpose(2, 3),
        torch.randn(2, 6, 16, 6)[:, ::2, ::2],
        x[:1].expand(3, -1, -1, -1),
        x.flip(3),
    ]
    for image in images:
        same(expected, module, (image,))
        fresh = copy.deepcopy(module)  # whose plan is made of these strides
        same(expected, fresh, (image,))
        same(expected, fresh, (image.contiguous(),))


@pytest.mark.parametrize("form", FORMS)
def test_more_sizes_than_plans_are_kept(form: str) -> None:
    expected, module, (x,) = residual(FORMS[form])
    for batch in [*range(1, plans.ENTRIES + 5), 1, 2, 1, plans.ENTRIES]:
        same(expected, module, (torch.randn(batch, *x.shape[1:]),))
    assert len(module.plans.known) == plans.ENTRIES


def test_the_plan_used_longest_ago_goes_first() -> None:
    _, module, (x,) = residual()
    module(x)
    mine = next(iter(module.plans.known.values()))
    for batch in range(len(x) + 1, len(x) + 2 * plans.ENTRIES):
        module(torch.randn(batch, *x.shape[1:]))
        module(x)
    assert any(plan is mine for plan in module.plans.known.values())


@pytest.mark.parametrize("form", FORMS)
def test_threads(form: str) -> None:
    expected, module, (x,) = residual(FORMS[form])
    inputs = [torch.randn(1 + k % 3, *x.shape[1:]) for k in range(6)]
    with torch.no_grad():
        wanted = [expected(i) for i in inputs]
    wrong = []

    def calls(k: int) -> None:
        for _ in range(60):
            if difference(wanted[k], module(inputs[k])) > LIMIT:
                wrong.append(k)

    threads = [threading.Thread(target=calls, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("form", FORMS)
def test_copies(form: str) -> None:
    expected, module, args = residual(FORMS[form])
    module(*args)
    same(expected, copy.deepcopy(module), args)
    same(expected, pickle.loads(pickle.dumps(module)), args)


def other_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value + 0.25 for name, value in module.state_dict().items()}


@pytest.mark.parametrize("form", FORMS)
def test_weights_loaded(form: str) -> None:
    _, module, args = residual(FORMS[form])
    module(*args)
    module.load_state_dict(other_weights(module))
    same(module.plain(), module, args)


@pytest.mark.parametrize("form", FORMS)
def test_weights_loaded_through_a_parent(form: str) -> None:
    _, module, args = residual(FORMS[form])
    parent = nn.Sequential(module)
    parent(*args)
    parent.load_state_dict(other_weights(parent))
    same(module.plain(), parent, args)


@pytest.mark.parametrize("form", FORMS)
def test_other_dtypes(form: str) -> None:
    expected, module, (x,) = residual(FORMS[form])
    module(x)
    same(expected.double(), module.double(), (x.double(),), 1e-6)
    inner = nn.Sequential(copy.deepcopy(module)).to(torch.bfloat16)
    same(expected.to(torch.bfloat16), inner, (x.to(torch.bfloat16),), 0.05)


def test_inputs_that_require_gradients() -> None:
    expected, module, (x,) = residual()
    found = module(x.clone().requires_grad_())
    assert not found.requires_grad and difference(expected(x).detach(), found) <= LIMIT


def test_a_call_that_raises_leaves_the_module_usable() -> None:
    expected, module, (x,) = residual()
    for wrong in (x[:, :2], x[0], x.double(), None):
        with pytest.raises((ValueError, RuntimeError, AttributeError, TypeError)):
            module(wrong)
    same(expected, module, (x,))


def test_outputs_share_no_memory() -> None:
    for case in MICROS[::12]:
        model, args = net(case)
        _, module = pair_of(model, args, last_form)
        outputs = [o for o in pytree.tree_leaves(module(*args)) if o.numel()]
        plans_made = list(module.plans.known.values())
        arenas = [view for plan in plans_made for memory in plan.spare for view in memory]
        kept = [t for plan in plans_made for t in plan.precomputed if isinstance(t, Tensor)] + arenas
        places = {t.untyped_storage().data_ptr() for t in kept if not t.is_mkldnn}
        assert not places & {o.untyped_storage().data_ptr() for o in outputs}, case.name


# Faults.

STEPS = {"c": nn.Linear(4, 8), "d": nn.Linear(8, 8), "e": nn.Linear(16, 3)}


def branches(m: nn.Module, x: Tensor) -> Tensor:
    y = m.c(x).tanh()
    return m.e(torch.cat([y.sigmoid(), m.d(y).relu()], 1))


def test_inference_mode_first() -> None:
    x = torch.randn(2, 4)
    expected, module = pair_of(Calls(branches, **STEPS), (x,))
    with torch.inference_mode():
        module(x)
    same(expected, module, (x,))


@pytest.mark.parametrize(
    "make",
    [
        lambda m, x: (m.c(x), x.new_ones(x.shape[0], 2)),
        lambda m, x: (m.c(x), torch.zeros(x.shape[0], 3).t()),
        lambda m, x: (m.c(x), torch.arange(x.shape[0]) * 2.0),
    ],
    ids=("new_ones", "view of zeros", "arange"),
)
def test_what_is_kept_is_not_given_away(make) -> None:
    x = torch.randn(2, 4)
    expected, module = pair_of(Calls(make, **STEPS), (x,))
    module(x)[1].add_(5)
    same(expected, module, (x,))


def test_a_fill_value_read_from_an_input_is_no_size() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        return m.c(x) + torch.full_like(x, x.sum().item()).repeat(1, 2)

    expected, module = pair_of(Calls(run, **STEPS), (torch.randn(2, 4),))
    for _ in range(2):
        same(expected, module, (torch.randn(2, 4),))


def test_another_dtype_of_the_same_sizes() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        return torch.cat([x.exp(), x.tanh()], 1).sum(1)

    x = torch.randn(2, 4)
    expected, module = pair_of(Calls(run), (x,))
    same(expected, module, (x,))
    same(expected, module, (x.double(),))


OVERLAPS = {
    "broadcast_to": lambda m, x: m.c(x).unsqueeze(1).broadcast_to(2, 5, 8).relu(),
    "meshgrid": lambda m, x: [g.relu() for g in torch.meshgrid(*m.c(x), indexing="ij")],
    "expand": lambda m, x: m.c(x).unsqueeze(1).expand(2, 5, 8).relu(),
    "unfold": lambda m, x: m.c(x).unfold(1, 4, 2).relu(),
}
HIDDEN = {"unsafe_split": lambda m, x: _split(m.c(x).tanh()), "_unsafe_view": lambda m, x: _viewed(m.c(x).tanh())}


def _split(y: Tensor) -> Tensor:
    return torch.unsafe_split(y, 4, 1)[0].relu() + y[:, :4]


def _viewed(y: Tensor) -> Tensor:
    return torch.ops.aten._unsafe_view(y, [16]).relu().view(2, 8) + y


@pytest.mark.parametrize("name", [*OVERLAPS, *HIDDEN])
def test_values_that_share_memory(name: str) -> None:
    x = torch.randn(2, 4)
    same(*pair_of(Calls({**OVERLAPS, **HIDDEN}[name], **STEPS), (x,)), (x,))


def test_a_view_of_a_sum_written_over_a_permuted_operand() -> None:
    def run(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = m.a(x), m.b(x)
        return (a + b.permute(0, 1, 3, 2)).view(2, -1), a

    parts = {"a": nn.Conv2d(3, 8, 3), "b": nn.Conv2d(3, 8, 3)}
    x = torch.randn(2, 3, 10, 10)
    same(*pair_of(Calls(run, **parts), (x,)), (x,))


def test_images_in_one_dimension() -> None:
    model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 3))
    x = torch.randn(2, 3, 12)
    same(*pair_of(model, (x,), fused_form), (x,))


# Small graphs by hand: who is written over.


def calls_of(run: Callable[..., object], **parts) -> dict[str, InPlace | InArena]:
    """By op, what was decided (of several calls of one op, of the last)."""
    captured = capture_program(Calls(run, **parts).eval(), (torch.randn(2, 4),), None, None)
    program, provenance = shrink_program(captured, TABLE)
    graph = build(program, provenance, Optimized).graph
    found = assign_buffers(graph)
    return {n.target._opname: found.get(n) for n in graph.nodes if hasattr(n.target, "_opname")}


def in_place(run, **parts) -> set[str]:
    return {op for op, call in calls_of(run, **parts).items() if isinstance(call, InPlace)}


def in_arena(run, **parts) -> set[str]:
    return {op for op, call in calls_of(run, **parts).items() if isinstance(call, InArena)}


def test_a_value_nobody_reads_again_is_written_over() -> None:
    assert in_place(lambda m, x: x.exp().relu()) == {"relu"}


@pytest.mark.parametrize("run", [
    lambda m, x: x.relu(),
    lambda m, x: x.view(-1).relu(),
    lambda m, x: m.t.relu() + x.exp()[:2, :4],
    lambda m, x: (y := x.exp(), y.relu()),
    lambda m, x: (y := x.exp(), y.view(-1).relu()),
    lambda m, x: (y := x.exp(), y[:, 1:].relu()),
    lambda m, x: (y := x.exp(), y.relu() * 2, y[:1])[1:],
    lambda m, x: (y := x.exp()).relu() @ y.t(),
    lambda m, x: (y := x.exp()).view(-1).relu().view(2, 4) @ y.t(),
], ids=("input", "view of input", "constant", "output", "view of output", "part of output",
        "its view is output", "read later", "read later, by a view"))  # fmt: skip
def test_what_must_stay_is_not_written_over(run) -> None:
    assert "relu" not in in_place(run, t=torch.randn(2, 4))
    x = torch.randn(2, 4)
    same(*pair_of(Calls(run, t=torch.randn(2, 4)), (x,)), (x,))


@pytest.mark.parametrize(
    "run",
    [
        lambda m, x: x.exp(),
        lambda m, x: x.exp().view(-1),
        lambda m, x: (x.exp()[:, 1:],),
        lambda m, x: {"a": [x.exp().t()]},
        lambda m, x: x.exp().split(2, 1)[0],
    ],
    ids=("itself", "a view", "a slice", "nested", "a part"),
)
def test_outputs_are_not_in_the_arena(run) -> None:
    assert in_arena(run) == set()


def test_values_between_are_in_the_arena() -> None:
    run = lambda m, x: (x.exp() @ m.t).sum(1)  # noqa: E731
    assert {"exp"} <= in_arena(run, t=torch.randn(4, 4))


def late(m: nn.Module, x: Tensor) -> Tensor:
    y = x.exp()
    z = y.view(-1)
    w = (x * 3).sigmoid()
    return z.view(2, 4) + w @ m.t + y


def broken_by(monkeypatch, name: str, wrong) -> bool:
    """Does a fault in what is known of bodies show in what comes out?"""
    monkeypatch.setattr(memory._Buffers, name, wrong)
    x = torch.randn(2, 4)
    runs = [
        (late, {"t": torch.randn(4, 4)}),
        (lambda m, x: (y := x.exp(), y.relu() - 2)[:2], {}),
        (lambda m, x: (y := x.exp()).neg() @ y.t(), {}),
        (lambda m, x: x.neg() + 1, {}),
    ]
    for run, parts in runs:
        try:
            same(*pair_of(Calls(run, **parts), (x.clone(),)), (x,))
        except (AssertionError, RuntimeError):
            return True
    return False


def test_memory_of_others_taken_for_ours_is_noticed(monkeypatch) -> None:
    assert broken_by(monkeypatch, "is_own", lambda self, node: True)


def test_a_life_that_ends_too_early_is_noticed(monkeypatch) -> None:
    def early(self, node):
        return min((self.order[u] for m in self.members(node) for u in m.users), default=0)

    assert broken_by(monkeypatch, "last_read", early)


def test_a_view_that_keeps_nothing_alive_is_noticed(monkeypatch) -> None:
    def alone(self, node):
        return max((self.order[u] for u in node.users), default=0)

    assert broken_by(monkeypatch, "last_read", alone)


def test_no_fault_no_noise(monkeypatch) -> None:
    assert not broken_by(monkeypatch, "last_read", memory._Buffers.last_read)
