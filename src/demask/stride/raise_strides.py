"""raise_strides(): subsampling after a convolution of stride 1 becomes the convolution's stride.

Calls that select every s-th position are rewritten as slices (`subsampling_as_slices`). A slice is
a support, a progression along a spatial axis: the sweeps and the placement of demask() move it back
through calls that carry positions, and the convolution absorbs it as a stride
(`shrink.emit.strided_conv`). Constants are hidden from the analysis, so that nothing else is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from demask.facts.analysis import Analysis
from demask.failures import Log, public
from demask.graph.capture.fold_constants import fold_constants
from demask.graph.isolation import in_isolation
from demask.graph.program import Program
from demask.graph.result.demasked_module import Demasked
from demask.ops import TABLE, Relation, Table, schema
from demask.rewrites.driver import rewrite
from demask.rewrites.normalize import CANONICAL
from demask.rewrites.rule import Pass, Phase, case
from demask.shrink.build_uncut import build_uncut
from demask.shrink.emit.emit_program import emit_program
from demask.shrink.layout.layout_analysis import LayoutAnalysis
from demask.shrink.layout.ties import strided_axes
from demask.shrink.on_device import run_through_cpu
from demask.shrink.pipeline import capture_program
from demask.shrink.program_size import count_elements_written, count_macs
from demask.stride.average_pools import SCALED_SUMS_AS_POOLS, SUMS_AS_POOLS
from demask.stride.subsampling_as_slices import SUBSAMPLING_AS_SLICES

PASSES = 1000  # upper bound; every pass reduces the work of some call


@in_isolation
@public
def raise_strides(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    table: Table = TABLE,
) -> Demasked:
    """A network with the outputs of `model` in eval mode and larger strides, which does less work.

    The inverse of `lower`. Ops that select every s-th position after a convolution (a slice, a pool
    with windows of size 1, a mask before a pool) become the stride of the convolution. Pointwise
    ops, norms and sums of branches may be between the convolution and the op that selects. A
    depthwise convolution that computes means becomes an average pool if its weights are buffers or
    constants, not parameters. Outputs are equal up to rounding. `model` is not changed.

    Args:
        model: an `nn.Module`, in any mode, or a `torch.export.ExportedProgram`.
        args: example inputs by position, a tuple such as (x,). Default: ().
        kwargs: example inputs by name, a mapping. Default: None, for no such inputs.
        dynamic_shapes: sizes that may vary between calls, as for `demask.demask`. Default: the
            batch, where torch.export proves that it can vary. Strides along axes of dynamic size do
            not change.
        table: the table of ops. Default: `demask.ops.TABLE`.

    Returns:
        A graph module. Its `demasked.notes` is a tuple of texts, one of them for each strided
        convolution, with the stride, and one for each rewrite that failed.

    Raises:
        BadInput: the model does not run on the example inputs.
        NotExportable: the model cannot be captured.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from demask.stride import raise_strides
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(1, 2)).eval()
        >>> x = torch.randn(1, 3, 32, 32)
        >>> fast = raise_strides(net, (x,))
        >>> fast.get_submodule("0").stride, torch.allclose(fast(x), net(x), atol=1e-6)
        ((2, 2), True)
    """
    rest = {"dynamic_shapes": dynamic_shapes, "table": table}
    if (elsewhere := run_through_cpu(raise_strides, model, args, kwargs, **rest)) is not None:
        return elsewhere
    before = capture_program(model, args, kwargs, dynamic_shapes)
    log = Log()
    program, strides = raised(before, table, log)
    return build_uncut(Analysis(before, table), program, (*strides, *log.notes))


@in_isolation
@public
def raised(program: Program, table: Table = TABLE, log: Log | None = None) -> tuple[Program, tuple[str, ...]]:
    """The program with raised strides, and a description of each strided convolution.

    log: notes what failed, and collects changes if it has a list for them, also those of trials
    that are not cheaper."""
    best = fold_constants(rewrite(program, CANONICAL, table, log))
    start, weight = rewrite(best, SUBSAMPLING_AS_SLICES, table, log), _work(best, table)
    for _ in range(PASSES):
        pulled = rewrite(fold_constants(rewrite(start, CANONICAL, table, log)), ABSORBED, table, log)
        start = rewrite(pulled, SUBSAMPLING_AS_SLICES, table, log)
        # May compute more until its slices are pulled back in turn.
        lightest = min(((_work(one, table), k, one) for k, one in enumerate((pulled, start))))
        if lightest[0] >= weight:
            break
        weight, best = lightest[0], lightest[2]
    for phase in (SCALED_SUMS_AS_POOLS, SUMS_AS_POOLS):
        best = rewrite(best, phase, table, log)
    return best, _describe_strided(best, table)


class _EverySecond(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, ::2, ::2]


class _SlicedSum(nn.Module):
    """A slice of a sum and a join of branches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 1), nn.Conv2d(3, 2, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x) + self.b(x), self.c(x)], 1).sigmoid()[:, :, ::2, ::2]


def _absorb_slices(program: Program, table: Table) -> Program:
    """The program with slices moved back to convolutions and absorbed there."""
    hidden = program.with_graph(program.graph, {})
    analysis = LayoutAnalysis.of(hidden, table)
    placement = analysis.placer.placement()
    rewritten = emit_program(program, analysis.relations, analysis.known, analysis.needs, placement)
    return fold_constants(rewritten.program)


ABSORBED_SLICES = Pass(
    "absorbed slices",
    _absorb_slices,
    "Slices after convolutions become strides, through calls that carry positions",
    cases=(
        case(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), _EverySecond()), (2, 3, 8, 9)),
        case(_SlicedSum(), (2, 3, 8, 9)),
    ),
    exact=False,
)


ABSORBED = Phase("strides", (ABSORBED_SLICES,))


def _work(program: Program, table: Table) -> tuple[int, int]:
    """Multiply-adds, and written elements."""
    relations = Analysis(program, table).relations
    macs = sum(count_macs(r) for r in relations.values() if isinstance(r, Relation))
    return macs, count_elements_written(program)


def _describe_strided(program: Program, table: Table) -> tuple[str, ...]:
    relations = Analysis(program, table).relations
    convolutions = [r.node for r in relations.values() if isinstance(r, Relation) and strided_axes(r)]
    strided = [n for n in convolutions if any(s > 1 for s in schema.arguments(n)["stride"])]
    return tuple(f"{n.name}: stride {list(schema.arguments(n)['stride'])}" for n in strided)


__all__ = ["raise_strides", "raised"]
