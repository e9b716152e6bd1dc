"""The op `demask::segment`: a program as one call of a graph, whatever runs it.

    torch.ops.demask.segment(Tensor[] inputs, Tensor[] weights, str program) -> Tensor[]

float32 on the CPU is run by plans (`sparse.plan`), made at the first call and kept as long as the
weights live; layers that are trained by kernels that read values in place (`sparse.training`);
everything else by ATen ops (`sparse.dense`), as are other gradients. Outputs are contiguous and
share no memory with anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from demask.compat.dispatch import BelowAutograd, count_dispatch_modes, has_functorch_transforms
from demask.kernels.llvm import availability as llvm
from demask.kernels.llvm.availability import NoPlan
from demask.kernels.plan_cache import PlanCache, Planned, plans_of
from demask.sparse import reference as dense
from demask.sparse.products import gpu_segment
from demask.sparse.segment_program import SegmentProgram
from demask.sparse.training.recompute import parsed, recomputed

PLAIN = (Tensor, torch.nn.Parameter)

# Not torch.library.custom_op: a call of its ops costs 12 µs of Python, one of these 4 to 6.
_LIBRARY = Library("demask", "FRAGMENT")
_LIBRARY.define(
    "segment(Tensor[] inputs, Tensor[] weights, str program) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def segment(inputs: Sequence[Tensor], weights: Sequence[Tensor], program: str) -> list[Tensor]:
    """The outputs of a program (`Program.text`), in the dtype of the inputs.

    inputs: floating-point tensors of one dtype. weights: what the spans of the program count.
    BadInput where program, inputs and weights do not fit. Writes into a weight are seen; of those
    through `.data` or NumPy, which torch does not count, ones that change most of it.

    >>> from demask.sparse.segment_program import Linear, Program, Weight
    >>> step = Linear(0, Weight((0, 0, 1), (1, 0, 3), (1, 3, 4)), None, out=2)
    >>> weights = [torch.tensor([5.0]), torch.tensor([0, 0, 1, 2], dtype=torch.int32)]
    >>> segment([torch.eye(3)], weights, Program(("tokens",), (step,), (1,)).text())
    [tensor([[0., 0.],
            [0., 0.],
            [0., 5.]])]
    """
    return torch.ops.demask.segment.default(inputs, weights, program)


class SegmentPlans(PlanCache):
    """Plans of a segment."""

    parse = staticmethod(parsed)

    def run(self, inputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
        """The outputs, by a plan or without."""
        sizes = tuple([(x.shape, x.stride(), x.dtype) for x in inputs])
        key = self.versions_of(weights), sizes, torch.get_num_threads()
        plan, copied = self.plan(key, inputs, weights)
        if plan is None:
            return without_plan(self.program, inputs, weights)
        given = list(inputs)
        for place in copied:
            given[place] = inputs[place].contiguous()
        try:
            return plan(given)
        except NoPlan:  # no memory for it at this moment
            return without_plan(self.program, inputs, weights)

    def new_plan(self, inputs: list[Tensor], weights: list[Tensor]) -> Planned:
        return planned(self.program, inputs, weights)


def planned(program: SegmentProgram, inputs: list[Tensor], weights: list[Tensor]) -> Planned:
    """A plan, if kernels can do it; BadInput for what does not fit."""
    dense.check(program, inputs, weights)
    if inputs[0].dtype != torch.float32 or any(x.numel() == 0 for x in inputs):
        return None, ()
    if not llvm.installed():
        return None, ()
    from demask.sparse.plan.segment_plan import SegmentPlan

    copied = tuple(place for place, x in enumerate(inputs) if _apart(program, place, x))
    given = [x.contiguous() if place in copied else x for place, x in enumerate(inputs)]
    try:
        return SegmentPlan.of(program, weights, given, torch.get_num_threads()), copied
    except NoPlan:
        return None, ()


def _apart(program: SegmentProgram, place: int, x: Tensor) -> bool:
    """Whether an input holds tokens that do not follow one another at one distance."""
    tokens = program.inputs[place] == "tokens" and x.ndim > 2
    return tokens and x.flatten(0, -2).data_ptr() != x.data_ptr()


def without_plan(
    program: SegmentProgram, inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[Tensor]:
    """The outputs by ATen ops, and on a GPU by its kernels, contiguous and in memory of their
    own."""
    run = gpu_segment.run if inputs and inputs[0].is_cuda else dense.run
    found = run(program, inputs, weights)
    used = {id(t.untyped_storage()) for t in (*inputs, *weights)}
    for place, y in enumerate(found):
        if not y.is_contiguous() or id(y.untyped_storage()) in used:
            found[place] = y.clone(memory_format=torch.contiguous_format)
        used.add(id(found[place].untyped_storage()))
    return found


def on_cpu(inputs: list[Tensor], weights: list[Tensor], text: str) -> list[Tensor]:
    """The op's kernel on the CPU."""
    try:
        plans = plans_of(weights, text, SegmentPlans)
    except RuntimeError:  # sparse tensors have no memory that could be named
        dense.check(parsed(text), inputs, weights)
        raise
    return plans.run(inputs, weights)


def elsewhere(inputs: list[Tensor], weights: list[Tensor], text: str) -> list[Tensor]:
    """The op's kernel on other devices."""
    return without_plan(parsed(text), inputs, weights)


def fake(inputs: list[Tensor], weights: list[Tensor], text: str) -> list[Tensor]:
    """Outputs without values; sizes may be symbolic."""
    program = parsed(text)
    shapes = dense.check(program, inputs, weights)
    return [inputs[0].new_empty(shapes[value]) for value in program.outputs]


def with_gradients(inputs: list[Tensor], weights: list[Tensor], text: str) -> list[Tensor]:
    """The op's kernel above those of devices: it records what gradients need, if any do."""
    given = (*inputs, *weights)
    if has_functorch_transforms():
        return dense.run(parsed(text), inputs, weights)
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        if inputs and inputs[0].is_cuda:
            return without_plan(parsed(text), inputs, weights)
        from demask.sparse.training.trained_layers import trained

        found = trained(parsed(text), inputs, weights)
        if found is not None:
            return [found]
        return list(Recomputed.apply(text, len(inputs), *given))
    here = all(type(t) in PLAIN and t.is_cpu for t in given)
    if here and not count_dispatch_modes():
        return on_cpu(inputs, weights, text)  # as the call below, 4 µs earlier
    with BelowAutograd():
        return torch.ops.demask.segment.default(inputs, weights, text)


class Recomputed(torch.autograd.Function):
    """Gradients of a program: those of `dense.run`, computed again."""

    @staticmethod
    def forward(ctx: Any, text: str, count: int, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.text, ctx.count = text, count
        ctx.save_for_backward(*given)
        with BelowAutograd():
            inputs, weights = list(given[:count]), list(given[count:])
            return tuple(torch.ops.demask.segment.default(inputs, weights, text))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        return (None, None, *recomputed(ctx.text, ctx.count, ctx.saved_tensors, needed, grads))


def mapped(info: Any, dims: Any, *given: Any) -> tuple[list[Tensor], list[int]]:
    """The op under torch.vmap: one call after the other."""
    (inputs, weights, text), (input_dims, weight_dims, _) = given, dims

    def part(tensors: list[Tensor], axes: list[int | None], k: int) -> list[Tensor]:
        return [t if axis is None else t.select(axis, k)
                for t, axis in zip(tensors, axes, strict=True)]  # fmt: skip

    made = [segment(part(inputs, input_dims, k), part(weights, weight_dims, k), text)
            for k in range(info.batch_size)]  # fmt: skip
    found = [torch.stack(one) for one in zip(*made, strict=True)]
    return found, [0] * len(found)


_LIBRARY.impl("segment", on_cpu, "CPU")
_LIBRARY.impl("segment", elsewhere, "CompositeExplicitAutograd")
_LIBRARY.impl("segment", with_gradients, "Autograd")
torch.library.register_fake("demask::segment", fake, lib=_LIBRARY)
torch.library.register_vmap("demask::segment", mapped, lib=_LIBRARY)
