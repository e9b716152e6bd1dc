"""The op `demask::segment`: a program as one call of a graph.

    torch.ops.demask.segment(Tensor[] inputs, Tensor[] weights, str program) -> Tensor[]

The CPU runs plans (`exec.tape`), created at the first call and cached as long as the weights live;
float16 and bfloat16 are computed in float32, and outputs are rounded once. Layers in training, or in
float64, run by kernels that read values in place (`trained_layers`); everything else, including other
gradients, by ATen ops (`sparse.reference`). Outputs are contiguous and share no memory with other tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from demask.compat.dispatch import BelowAutograd, has_functorch_transforms, needs_no_dispatch
from demask.exec.steps import reference
from demask.exec.steps.segment_program import SegmentProgram
from demask.kernels.llvm import availability as llvm
from demask.kernels.llvm.availability import NoPlan
from demask.kernels.plan_cache import PlanCache, Planned, plans_of
from demask.sparse.products import gpu_segment
from demask.sparse.products.spmm_op import COMPILED
from demask.sparse.trained_layers import parsed, run_layer, trained

# Not torch.library.custom_op, whose calls cost 12 µs of Python; these cost 4 to 6.
_LIBRARY = Library("demask", "FRAGMENT")
_LIBRARY.define(
    "segment(Tensor[] inputs, Tensor[] weights, str program) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,)
)


def segment(inputs: Sequence[Tensor], weights: Sequence[Tensor], program: str) -> list[Tensor]:
    """The outputs of a program (`SegmentProgram.text`), in the dtype of the inputs.

    inputs: floating-point tensors of one dtype. weights: tensors that the spans of the program
    refer to. Writes into a weight are noticed; of those through `.data` or NumPy, which torch does
    not count, only those that change most of it. Raises BadInput if program, inputs and weights do
    not match.

    >>> from demask.exec.steps.segment_program import SegmentProgram
    >>> from demask.exec.steps.segment_steps import SparseWeight, linear_step
    >>> step = linear_step(0, SparseWeight((0, 0, 1), (1, 0, 3), (1, 3, 4)), None, out=2)
    >>> weights = [torch.tensor([5.0]), torch.tensor([0, 0, 1, 2], dtype=torch.int32)]
    >>> segment([torch.eye(3)], weights, SegmentProgram(("tokens",), (step,), (1,)).text())
    [tensor([[0., 0.],
            [0., 0.],
            [0., 5.]])]
    """
    if needs_no_dispatch((*inputs, *weights)):
        return on_cpu(list(inputs), list(weights), program)
    return torch.ops.demask.segment.default(inputs, weights, program)


class SegmentPlans(PlanCache):
    """Plans of a segment."""

    parse = staticmethod(parsed)

    def __init__(self, text: str):
        super().__init__(text)
        static = self.program.static
        self.dynamic = [k for k in range(len(self.program.inputs)) if k not in static]

    def run(self, inputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
        """The outputs, by a plan if there is one. A plan checks its static inputs itself."""
        if len(inputs) != len(self.program.inputs):
            reference.check(self.program, inputs, weights)  # raises BadInput
        plan, copied = self.plan(self.key(inputs, weights), inputs, weights)
        if plan is None:
            return without_plan(self.program, inputs, weights)
        plan_inputs = list(inputs)
        for number in copied:
            plan_inputs[number] = inputs[number].float().contiguous()
        try:
            outputs = plan(plan_inputs)
        except NoPlan:  # no memory for a call now
            return without_plan(self.program, inputs, weights)
        dtype = inputs[0].dtype
        return outputs if dtype is torch.float32 else [y.to(dtype) for y in outputs]

    def key(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[tuple[int, ...], Hashable, int]:
        """What a plan depends on: versions of the weights, sizes of the inputs, threads."""
        sizes = tuple([((x := inputs[k]).shape, x.stride(), x.dtype) for k in self.dynamic])
        return self.versions_of(weights), sizes, torch.get_num_threads()

    def new_plan(self, inputs: list[Tensor], weights: list[Tensor]) -> Planned:
        return planned(self.program, inputs, weights)


def planned(program: SegmentProgram, inputs: list[Tensor], weights: list[Tensor]) -> Planned:
    """(plan or None, numbers of inputs to copy). Raises BadInput for invalid arguments."""
    reference.check(program, inputs, weights)
    dtype = inputs[0].dtype
    if dtype not in COMPILED or any(x.numel() == 0 for x in inputs):
        return None, ()
    if not llvm.is_installed():
        return None, ()
    from demask.exec.tape.segment_plan import SegmentPlan

    copied = tuple(k for k, x in enumerate(inputs) if dtype != torch.float32 or _has_gaps(program, k, x))
    plan_inputs = [x.float().contiguous() if k in copied else x for k, x in enumerate(inputs)]
    try:
        return SegmentPlan.of(program, weights, plan_inputs, torch.get_num_threads()), copied
    except NoPlan:
        return None, ()


def _has_gaps(program: SegmentProgram, number: int, x: Tensor) -> bool:
    """Whether an input has tokens without one constant stride."""
    is_tokens = program.inputs[number] == "tokens" and x.ndim > 2
    return is_tokens and x.flatten(0, -2).data_ptr() != x.data_ptr()


def without_plan(program: SegmentProgram, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """The outputs by ATen ops and kernels of single layers, contiguous and in memory of their own."""
    if inputs and inputs[0].is_cuda:
        outputs = gpu_segment.run(program, inputs, weights)
    else:
        outputs = reference.run(program, inputs, weights, run_layer)
    return in_own_memory(outputs, (*inputs, *weights))


def in_own_memory(outputs: list[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """The outputs, contiguous; those that share memory with others or with each other are copied."""
    used_storages = {id(t.untyped_storage()) for t in others}
    for number, y in enumerate(outputs):
        if not y.is_contiguous() or id(y.untyped_storage()) in used_storages:
            outputs[number] = y.clone(memory_format=torch.contiguous_format)
        used_storages.add(id(outputs[number].untyped_storage()))
    return outputs


def on_cpu(inputs: list[Tensor], weights: list[Tensor], text: str) -> list[Tensor]:
    """The implementation for the CPU."""
    try:
        plans = plans_of(weights, text, SegmentPlans)
    except RuntimeError:  # sparse tensors have no storage
        reference.check(parsed(text), inputs, weights)
        raise
    return plans.run(inputs, weights)


def on_other_devices(inputs: list[Tensor], weights: list[Tensor], text: str) -> list[Tensor]:
    """The implementation for other devices."""
    return without_plan(parsed(text), inputs, weights)


def fake(inputs: list[Tensor], weights: list[Tensor], text: str) -> list[Tensor]:
    """Outputs without values, for tracing; sizes may be symbolic."""
    program = parsed(text)
    shapes = reference.check(program, inputs, weights)
    return [inputs[0].new_empty(shapes[value]) for value in program.outputs]


def with_gradients(inputs: list[Tensor], weights: list[Tensor], text: str) -> list[Tensor]:
    """The implementation above devices, which records gradients if needed."""
    tensors = (*inputs, *weights)
    if has_functorch_transforms():
        return reference.run(parsed(text), inputs, weights)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        if inputs and inputs[0].is_cuda:
            return without_plan(parsed(text), inputs, weights)
        outputs = trained(parsed(text), inputs, weights)
        if outputs is not None:
            return in_own_memory(outputs, tensors)
        return list(Recomputed.apply(text, len(inputs), *tensors))
    if needs_no_dispatch(tensors):
        return on_cpu(inputs, weights, text)
    with BelowAutograd():
        return torch.ops.demask.segment.default(inputs, weights, text)


def recomputed(
    text: str, count: int, tensors: Sequence[Tensor], needed: Sequence[bool], grads: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients of a program, as those of `reference.run`; None for tensors that need none.

    tensors: `count` inputs, then weights. needed: which of them need a gradient. grads: gradients
    of the outputs.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, since a tensor may be passed twice; leaves, unless second derivatives are needed.
        tensors = [t.view_as(t) if create_graph else t.detach() for t in tensors]
        differentiated = [
            t if create_graph else t.requires_grad_() for t, need in zip(tensors, needed, strict=True) if need
        ]
        outputs = reference.run(parsed(text), tensors[:count], tensors[count:])
        gradients = iter(
            torch.autograd.grad(outputs, differentiated, grads, create_graph=create_graph, allow_unused=True)
        )
    return [next(gradients) if need else None for need in needed]


class Recomputed(torch.autograd.Function):
    """Gradients of a program by recomputation with `reference.run`."""

    @staticmethod
    def forward(ctx: Any, text: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.text, ctx.count = text, count
        ctx.save_for_backward(*tensors)
        with BelowAutograd():
            inputs, weights = list(tensors[:count]), list(tensors[count:])
            return tuple(torch.ops.demask.segment.default(inputs, weights, text))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        return (None, None, *recomputed(ctx.text, ctx.count, ctx.saved_tensors, needed, grads))


def mapped(info: Any, dims: Any, *arguments: Any) -> tuple[list[Tensor], list[int]]:
    """The op under torch.vmap: one call per batch element."""
    (inputs, weights, text), (input_dims, weight_dims, _) = arguments, dims

    def part(tensors: list[Tensor], axes: list[int | None], k: int) -> list[Tensor]:
        return [t if axis is None else t.select(axis, k) for t, axis in zip(tensors, axes, strict=True)]

    results = [
        segment(part(inputs, input_dims, k), part(weights, weight_dims, k), text) for k in range(info.batch_size)
    ]
    stacked = [torch.stack(outputs) for outputs in zip(*results, strict=True)]
    return stacked, [0] * len(stacked)


_LIBRARY.impl("segment", on_cpu, "CPU")
_LIBRARY.impl("segment", on_other_devices, "CompositeExplicitAutograd")
_LIBRARY.impl("segment", with_gradients, "Autograd")
torch.library.register_fake("demask::segment", fake, lib=_LIBRARY)
torch.library.register_vmap("demask::segment", mapped, lib=_LIBRARY)
