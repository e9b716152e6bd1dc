"""The op `demask::segment`: what runs it, what is kept, gradients, torch.compile, torch.export."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from dataclasses import replace

import pytest
import torch
from torch.library import opcheck

from demask.errors import BadInput
from demask.exec.steps import reference as dense
from demask.exec.steps import segment_weights as stored
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import (
    SparseWeight,
    activation_step,
    add_step,
    conv_step,
    flat_step,
    is_layer,
    linear_step,
    mean_step,
)
from demask.exec.tape.segment_plan import NoPlan, SegmentPlan
from demask.kernels.plan_cache import PLANS, WEIGHTS
from demask.sparse.segment.segment_op import segment
from guarded import guarded
from sparse_cases import csr, layer, matrix, weight

pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
OP = torch.ops.demask.segment.default
CLOSE = {"rtol": 2e-6, "atol": 2e-6}  # float32: sums of at most 100 products


@pytest.fixture
def made(monkeypatch):
    """The plans that are made while a test runs."""
    found, of = [], SegmentPlan.of

    def noted(*args):
        found.append(None)
        found[-1] = of(*args)
        return found[-1]

    monkeypatch.setattr(SegmentPlan, "of", noted)
    return found


def small(bias=True, dtype=torch.float32, density=0.5):
    """A linear layer 6 -> 4 as program text and weights."""
    given = torch.randn(4, dtype=dtype) if bias else None
    program, weights = layer("tokens", matrix(4, 6, density, dtype=dtype), given)
    return program, weights


def network():
    """A convolution with a residual sum, an activation, a mean and a linear layer."""
    conv, final = matrix(4, 36, 0.4, 1, torch.float32), matrix(3, 4, 0.6, 2, torch.float32)
    weights = [*csr(conv), torch.randn(4), *csr(final)]
    n, m = len(weights[0]), len(weights[4])
    same = ((1, 1), (1, 1))
    steps = (
        conv_step(0, weight(4, n), (3, 0, 4), 4, (3, 3), padding=same, act=("relu", ()), add=0),
        mean_step(1, True),
        flat_step(2),
        linear_step(3, SparseWeight((4, 0, m), (5, 0, 4), (6, 0, m)), None, 3),
    )
    return SegmentProgram(("image",), steps, (4, 1)), weights


def test_a_plan_computes_what_aten_ops_compute(made):
    program, weights = network()
    x = torch.randn(2, 4, 6, 5)
    for found, wanted in zip(segment([x], weights, program.text()), dense.run(program, [x], weights), strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)
        assert found.is_contiguous()
    segment([x + 1], weights, program.text())
    assert len(made) == 1


def densely(program, weights):
    """The same program with dense weights."""
    steps, kept = [], list(weights)
    for step in program.steps:
        if is_layer(step):
            rows = stored.scattered(step, weights, {4: 36, 3: 4}[step.fields.out], None)
            span = len(kept), 0, rows.numel()
            kept.append(rows.flatten())
            step = replace(step, weight=SparseWeight(span))
        steps.append(step)
    return replace(program, steps=tuple(steps)), kept


def test_dense_weights_are_the_same_to_plans_and_gradients(made):
    program, weights = network()
    other, values = densely(program, weights)
    x = torch.randn(2, 4, 6, 5)
    for a, b in zip(segment([x], values, other.text()), segment([x], weights, program.text()), strict=True):
        assert torch.equal(a, b)
    assert len(made) == 2
    gradients = []
    for one, tensors in ((program, weights), (other, values)):
        x = x.detach().requires_grad_()
        (segment([x], tensors, one.text())[0] ** 2).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, **CLOSE)
    with pytest.raises(BadInput, match="expected a matrix"):
        segment(
            [torch.randn(2, 3, 6, 5)],
            values,
            replace(other, steps=(replace(other.steps[0], reads=(0,), adds=False), *other.steps[1:])).text(),
        )


def test_float64_is_run_without_plans(made):
    program, weights = small(dtype=torch.float64)
    x = torch.randn(3, 6, dtype=torch.float64)
    (found,) = segment([x], weights, program.text())
    torch.testing.assert_close(found, dense.run(program, [x], weights)[0], rtol=1e-14, atol=1e-14)
    assert not made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_numbers_are_computed_in_float32_and_rounded_once(made, dtype):
    program, weights = small(dtype=dtype)
    x = torch.randn(3, 6, dtype=dtype)
    found = [segment([y], weights, program.text())[0] for y in (x, x.t().contiguous().t())]
    wide = [w.double() if w.is_floating_point() else w for w in weights]
    exact = dense.run(program, [x.double()], wide)[0]
    assert all(y.dtype == dtype and y.is_contiguous() for y in found)
    rounding = torch.finfo(dtype).eps / 2 * exact.abs() + 1e-6 * exact.abs().max()
    assert all(bool(((y.double() - exact).abs() <= rounding).all()) for y in found)
    assert len(made) == 2  # of two layouts of x


def test_what_kernels_cannot_do_is_run_without_plans(monkeypatch):
    program, weights = small()
    asked = []

    def refused(*args):
        asked.append(args)
        raise NoPlan("not today")

    monkeypatch.setattr(SegmentPlan, "of", refused)
    x = torch.randn(3, 6)
    for _ in range(3):
        (found,) = segment([x], weights, program.text())
        torch.testing.assert_close(found, dense.run(program, [x], weights)[0], **CLOSE)
    assert len(asked) == 1  # and it is remembered


@pytest.mark.parametrize("shape", [(0, 6), (2, 0, 6)])
def test_no_tokens_at_all(shape):
    program, weights = small()
    assert segment([torch.ones(shape)], weights, program.text())[0].shape == (*shape[:-1], 4)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(6, 5).T,
        torch.randn(5, 12)[:, ::2],
        torch.randn(1, 6).expand(5, 6),
        torch.randn(31)[1:].reshape(5, 6),
        torch.randn(3, 2, 6).transpose(0, 1),
        torch.randn(6),
    ],
    ids=["transposed", "every other", "expanded", "misaligned", "swapped", "one"],
)
def test_inputs_of_any_strides(x):
    program, weights = small()
    (found,) = segment([x], weights, program.text())
    torch.testing.assert_close(found, dense.run(program, [x], weights)[0], **CLOSE)


@pytest.mark.parametrize("change", ["channels last", "slice", "misaligned"])
def test_images_of_any_strides(change):
    program, weights = network()
    x = torch.randn(2, 4, 6, 5)
    x = {
        "channels last": lambda: x.contiguous(memory_format=torch.channels_last),
        "slice": lambda: torch.randn(3, 9, 8, 11)[1:, 1:5, 2:, ::2][..., :5],
        "misaligned": lambda: torch.randn(241)[1:].reshape(2, 4, 6, 5),
    }[change]()
    for found, wanted in zip(segment([x], weights, program.text()), dense.run(program, [x], weights), strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)


def test_outputs_are_in_memory_of_their_own():
    x = torch.randn(2, 3, 1, 1)
    program = SegmentProgram(("image",), (flat_step(0), activation_step(0, ("relu", ()))), (0, 1, 2, 2, 0))
    for given in (x, x.double()):
        found = segment([given], [], program.text())
        assert torch.equal(found[1], given.flatten(1))
        places = {t.data_ptr() for t in (given, *found)}
        assert len(places) == 6


def test_written_weights_are_seen():
    program, weights = small()
    x, text = torch.randn(3, 6), program.text()
    for _ in range(3):
        with torch.no_grad():
            weights[0].mul_(2)
            weights[3].add_(1)
        for _ in range(4):
            wanted = dense.run(program, [x], weights)[0]
            torch.testing.assert_close(segment([x], weights, text)[0], wanted, **CLOSE)


def test_written_weights_of_inference_mode_are_seen(made):
    with torch.inference_mode():
        program, weights = small()
        x, text = torch.randn(3, 6), program.text()
        for _ in range(3):
            weights[0].mul_(2)  # not counted by torch
            for _ in range(4):
                wanted = dense.run(program, [x], weights)[0]
                torch.testing.assert_close(segment([x], weights, text)[0], wanted, **CLOSE)
    assert len(made) == 3


def test_other_weights_in_the_same_memory_are_seen():
    program, weights = small(bias=False)
    x, text, places = torch.randn(3, 6), program.text(), set()
    values = weights.pop(0)
    memory = torch.empty_like(values)
    for k in range(20):
        memory.copy_(values + k)
        other = torch.from_numpy(memory.numpy())  # a tensor of its own, with no history
        places.add(other.data_ptr())
        wanted = dense.run(program, [x], [other, *weights])[0]
        torch.testing.assert_close(segment([x], [other, *weights], text)[0], wanted, **CLOSE)
        del other
    assert len(places) == 1


def test_a_parameter_with_other_data_is_seen():
    program, weights = small(bias=False)
    x, text = torch.randn(3, 6), program.text()
    weights[0] = torch.nn.Parameter(weights[0])
    with torch.no_grad():
        for k in range(6):
            weights[0].data = weights[0].data * 0.5 + k % 2
            wanted = dense.run(program, [x], weights)[0]
            torch.testing.assert_close(segment([x], weights, text)[0], wanted, **CLOSE)


def test_two_programs_over_the_same_weights():
    program, weights = small()
    (step,) = program.steps
    x = torch.randn(3, 6)
    for act in ("relu", "silu", "tanh", "gelu"):  # texts of equal length among them
        other = SegmentProgram(("tokens",), (step, activation_step(1, (act, ()))), (2,))
        wanted = dense.run(other, [x], weights)[0]
        torch.testing.assert_close(segment([x], weights, other.text())[0], wanted, **CLOSE)


def test_weights_read_in_another_way_are_others():
    program, weights = small(bias=False)
    values, crow, col = weights
    x, text = torch.randn(3, 6), program.text()
    twice = torch.randn(2 * len(values))
    for view in (twice[: len(values)], twice[::2], twice[len(values) :]):
        wanted = dense.run(program, [x], [view, crow, col])[0]
        torch.testing.assert_close(segment([x], [view, crow, col], text)[0], wanted, **CLOSE)


def test_plans_go_with_their_weights(made):
    program, weights = small()
    gc.collect()
    before = len(WEIGHTS.entries)
    segment([torch.ones(1, 6)], weights, program.text())
    assert len(WEIGHTS.entries) == before + 1
    plan = weakref.ref(made.pop())
    del weights
    gc.collect()
    assert len(WEIGHTS.entries) == before
    assert plan() is None


def test_no_more_plans_than_allowed(made):
    program, weights = small()
    for n in (*range(1, 40), *range(1, 40)):
        segment([torch.ones(n, 6)], weights, program.text())
    entries = WEIGHTS.entries
    (kept,) = entries[next(w for w in entries if w and w[0][1] == weights[0].data_ptr())]
    assert len(kept.plans) == PLANS
    # after PLANS sizes new plans wait for calls, since they push out those before them
    assert len(made) < 20


def test_training_makes_no_plans(made):
    program, weights = small()
    text, x = program.text(), torch.randn(3, 6)
    weights[0].requires_grad_()
    for _ in range(10):
        segment([x], weights, text)[0].sum().backward()
        with torch.no_grad():
            weights[0] -= 0.1 * weights[0].grad
    assert not made
    with torch.no_grad():
        for _ in range(3):
            (found,) = segment([x], weights, text)
        torch.testing.assert_close(found, dense.run(program, [x], weights)[0], **CLOSE)
    assert len(made) == 1


def test_threads_call_at_once():
    program, weights = network()
    text, wrong = program.text(), []
    inputs = [torch.randn(1, 4, 6, 4 + k % 3) for k in range(6)]
    wanted = [dense.run(program, [x], weights) for x in inputs]

    def work(k):
        for _ in range(60):
            found = segment([inputs[k]], weights, text)
            if not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted[k], strict=True)):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


BAD = {
    "a column too many": lambda x, w: ([x[:, :5]], w),
    "integers": lambda x, w: ([x.long()], w),
    "two inputs": lambda x, w: ([x, x], w),
    "no inputs": lambda x, w: ([], w),
    "a scalar": lambda x, w: ([torch.tensor(1.0)], w),
    "columns outside": lambda x, w: ([x], [w[0], w[1], w[2] + 3, w[3]]),
    "row starts outside": lambda x, w: ([x], [w[0], w[1] * 9, w[2], w[3]]),
    "64-bit columns": lambda x, w: ([x], [w[0], w[1], w[2].long(), w[3]]),
    "too few weights": lambda x, w: ([x], w[:2]),
    "short values": lambda x, w: ([x], [w[0][1:], *w[1:]]),
    "a sparse input": lambda x, w: ([x.to_sparse()], w),
    "a sparse weight": lambda x, w: ([x], [w[0].to_sparse(), *w[1:]]),
    "weights elsewhere": lambda x, w: ([x], [t.to("meta") for t in w]),
    "inputs elsewhere": lambda x, w: ([x.to("meta")], w),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("grad", [False, True])
def test_what_does_not_fit_is_refused(name, grad):
    program, weights = small(density=1.0)
    inputs, weights = BAD[name](torch.ones(2, 6), weights)
    if grad and weights[0].layout == torch.strided:
        weights = [weights[0].clone().requires_grad_(), *weights[1:]]
    for _ in range(2):
        with pytest.raises(BadInput):
            segment(inputs, weights, program.text())


def test_text_that_is_no_program_is_refused():
    with pytest.raises(BadInput):
        segment([torch.ones(1, 6)], small()[1], "{}")


def test_gradients():
    program, weights = network()
    x = torch.randn(1, 4, 3, 2, dtype=torch.float64, requires_grad=True)
    fixed = [w if w.dtype == torch.int32 else w.double().requires_grad_() for w in weights]
    wanted = [w for w in fixed if w.requires_grad]

    def run(x, *wanted):
        rest = iter(wanted)
        given = [next(rest) if w.requires_grad else w for w in fixed]
        return tuple(segment([x], given, program.text()))

    assert torch.autograd.gradcheck(run, (x, *wanted), fast_mode=True)


def test_gradients_of_gradients():
    program, weights = small(dtype=torch.float64)
    program = SegmentProgram(("tokens",), (*program.steps, activation_step(1, ("silu", ()))), (2,))
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    values, crow, col, bias = weights
    values.requires_grad_()
    assert torch.autograd.gradgradcheck(
        lambda x, v: segment([x], [v, crow, col, bias], program.text())[0], (x, values), fast_mode=True
    )


def test_gradients_of_a_tensor_given_twice():
    program = SegmentProgram(("tokens", "tokens"), (activation_step(0, ("tanh", ())), add_step(2, 1)), (3,))
    x = torch.randn(2, 6, requires_grad=True)
    segment([x, x], [], program.text())[0].sum().backward()
    torch.testing.assert_close(x.grad, 2 - torch.tanh(x.detach()) ** 2)
    made = segment([x, x], [], program.text())[0].sum()
    (again,) = torch.autograd.grad(made, x, create_graph=True)
    torch.testing.assert_close(again, x.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_of_several_layers_take_no_dense_weights(monkeypatch, frozen, dtype):
    program, weights = network()
    x = torch.randn(2, 4, 6, 5, dtype=dtype, requires_grad=True)
    wanted = [w.double() if w.is_floating_point() else w for w in weights]
    weights = [w.to(dtype, copy=True) if w.is_floating_point() else w for w in weights]
    y = x.detach().double().requires_grad_()
    of = [(x, y)] if frozen else [(x, y), (weights[0].requires_grad_(), wanted[0].requires_grad_())]
    exact = torch.autograd.grad(sum(t.sum() for t in dense.run(program, [y], wanted)), [b for _, b in of])

    def refuse(*_):
        raise AssertionError("a dense weight")

    monkeypatch.setattr(stored, "scattered", refuse)
    outputs = segment([x], weights, program.text())
    found = torch.autograd.grad(sum(t.sum() for t in outputs), [a for a, _ in of])
    close = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=close, atol=close)


def test_functional_transforms():
    program, (values, crow, col, bias) = small()
    x, text = torch.randn(3, 6), program.text()

    def loss(v, x):
        return segment([x], [v, crow, col, bias], text)[0].square().sum()

    found = torch.func.grad(loss)(values, x)
    leaf = values.clone().requires_grad_()
    assert torch.allclose(found, torch.autograd.grad(loss(leaf, x), leaf)[0], atol=1e-5)


def test_mapped_over_a_batch():
    program, (values, crow, col, bias) = small()
    x, text = torch.randn(5, 3, 6), program.text()
    several = torch.stack([values, 2 * values, values, values, 3 * values], 1)

    def run(x, v):
        return segment([x], [v, crow, col, bias], text)[0]

    found = torch.vmap(run, (0, 1))(x, several)
    wanted = torch.stack([run(x[k], several[:, k].contiguous()) for k in range(5)])
    torch.testing.assert_close(found, wanted, **CLOSE)
    slopes = torch.vmap(torch.func.grad(lambda x, v: run(x, v).sum()), (0, None))(x, values)
    dense_weight = stored.weight(program.steps[0], [values, crow, col, bias], (6,))
    torch.testing.assert_close(slopes, dense_weight.sum(0).expand(5, 3, 6), **CLOSE)


@pytest.mark.parametrize("end", [True, False], ids=["end", "beginning"])
def test_nothing_is_read_beside_inputs_and_weights(end):
    program, weights = network()
    weights = [guarded(w, end) for w in weights]
    for shape in ((1, 4, 1, 1), (2, 4, 6, 5), (3, 4, 17, 9)):
        x = guarded(torch.randn(shape), end)
        for found, wanted in zip(segment([x], weights, program.text()), dense.run(program, [x], weights), strict=True):
            torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grad", [True, False])
def test_torch_checks_the_op(dtype, grad):
    program, weights = network()
    weights = [w if w.dtype == torch.int32 else w.to(dtype).requires_grad_(grad) for w in weights]
    x = torch.randn(2, 4, 6, 5, dtype=dtype, requires_grad=grad)
    opcheck(OP, ([x], weights, program.text()), rtol=1e-4, atol=1e-4)
    last = x.detach().contiguous(memory_format=torch.channels_last)
    opcheck(OP, ([last], weights, program.text()), rtol=1e-4, atol=1e-4)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        program, weights = network()
        self.text = program.text()
        for k, w in enumerate(weights):
            if w.dtype == torch.int32:
                self.register_buffer(f"w{k}", w)
            else:
                self.register_parameter(f"w{k}", torch.nn.Parameter(w))

    def forward(self, x):
        weights = [getattr(self, f"w{k}") for k in range(7)]
        tokens, image = segment([x.relu()], weights, self.text)
        return tokens * 2, image.sum()


def test_torch_compile():
    net, x = Net(), torch.randn(2, 4, 6, 5, requires_grad=True)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (2, 3):
        x = torch.randn(size, 4, 6, 5, requires_grad=True)
        for found, wanted in zip(compiled(x), net(x), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        params = [x, net.w0, net.w3]
        slopes = [torch.autograd.grad(sum(y.sum() for y in run(x)), params) for run in (compiled, net)]
        for found, wanted in zip(*slopes, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_torch_export():
    net, x = Net().eval(), torch.randn(2, 4, 6, 5)
    shapes = {"x": {0: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(net, (x,), dynamic_shapes=shapes).run_decompositions()
    assert [n.target for n in program.graph.nodes].count(OP) == 1
    again = torch.randn(5, 4, 6, 9)
    for found, wanted in zip(program.module()(again), net(again), strict=True):
        assert torch.equal(found, wanted)


def test_no_warnings_in_a_backward_pass():
    program, weights = small()
    weights[0].requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        segment([torch.ones(2, 6)], weights, program.text())[0].sum().backward()
    assert weights[0].grad is not None
