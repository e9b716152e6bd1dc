"""tile() and plan(): a model within a memory budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.facts.analysis import Analysis
from demask.failures import public
from demask.graph.program import Program
from demask.machine.byte_sizes import BUDGET, parse_memory
from demask.ops import TABLE, Table
from demask.ops.flow import axis_of
from demask.ops.regions import rule
from demask.traverse.analysis.flow import Flow, flow_of, read
from demask.traverse.analysis.split_global_ops import with_reductions
from demask.traverse.axes import Axes, axes_of
from demask.traverse.execution.tiled_module import Tiled, tiled
from demask.traverse.planning.plan import TilePlan
from demask.traverse.planning.plan_memory import WORKERS, MemoryLayout
from demask.traverse.planning.planner import plan_tiles


@public
def tile(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory: str | int = BUDGET,
    workers: int = 1,
    table: Table = TABLE,
) -> Tiled:
    """The model as a module that computes the same within a budget of memory (rows 003-a to 003-h).

    memory: bytes ("256MiB", "1GiB", 10**9) above what the process holds at the call, but for the
    caller's input and the result. args, kwargs: an example; the sizes of its images are those the
    plan is for. An example of two images or more allows any number: they run one after another.
    workers: threads that walk strips of bands side by side, each with memory of its own and its
    share of torch's threads; 1 leaves the threads to torch's calls, which is as fast on an idle
    machine. table: the op table, as `demask.demask` takes it.

    Weights that stay as they are given are shared with the model, not copied. The result equals the
    model in eval mode but for the order of sums in statistics over space (float64 there) and the
    kernels that torch chooses by size. BudgetTooSmall: no plan fits; `least` bytes would do.
    NotExportable: torch.export does not take the model.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    >>> x = torch.randn(1, 3, 64, 64)
    >>> small = tile(net, (x,), memory="16MiB")
    >>> torch.allclose(small(x), net(x), atol=1e-6)
    True
    """
    program, flow, made, layout = _planned(
        model, args, kwargs, parse_memory(memory), workers, table
    )
    return tiled(program, made, flow, layout, table)


@public
def plan(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory: str | int = BUDGET,
    workers: int = 1,
    table: Table = TABLE,
) -> TilePlan:
    """How `tile` would run the model: a value that prints. Nothing of the model runs.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    >>> plan(net, (torch.empty(1, 3, 2048, 2048),), memory="32MiB").recompute
    1.0
    """
    return _planned(model, args, kwargs, parse_memory(memory), workers, table)[2]


def _planned(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    budget: int,
    workers: int,
    table: Table,
) -> tuple[Program, Flow, TilePlan, MemoryLayout]:
    if not 1 <= workers <= WORKERS:
        raise BadInput(f"expected 1 to {WORKERS} workers, got {workers}")
    given = read(model, args, kwargs)
    count = _count(given)
    several = count > 1
    if several:
        _check_independent(given, count, table)
        given = read(model, *_first(args, kwargs or {}, count))
    flow = flow_of(given, table)
    if not flow.axes:
        raise BadInput(
            "no input has rows to cut: expected images (N, C, H, W), volumes or sequences"
        )
    made, layout = plan_tiles(flow, budget, workers=workers)
    return given, flow, replace(made, images=several), layout


def _count(program: Program) -> int:
    """Images of the example."""
    values = [n.meta.get("val") for n in program.graph.find_nodes(op="placeholder")]
    return max((v.shape[0] for v in values if isinstance(v, Tensor) and v.ndim >= 3), default=1)


def _first(args: Any, kwargs: Any, count: int) -> tuple[Any, Any]:
    """The example with its first image alone."""

    def one(leaf: Any) -> Any:
        mine = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == count
        return leaf[:1] if mine else leaf

    return pytree.tree_map(one, (args, dict(kwargs)))


def _check_independent(program: Program, count: int, table: Table) -> None:
    """BadInput unless every result of an image depends on that image alone."""
    inputs = {n: (0, None) for n in program.graph.find_nodes(op="placeholder")
              if tuple(getattr(n.meta.get("val"), "shape", ()))[:1] == (count,)}  # fmt: skip
    relations = Analysis(program, with_reductions(table)).relations
    found = axes_of(program.graph, relations, inputs)
    outputs: Any = next(iter(program.graph.find_nodes(op="output"))).args[0]
    for node in [*program.graph.nodes, *outputs]:
        if not isinstance(node, fx.Node) or node.op != "call_function":
            continue
        read = [n for n in node.all_input_nodes if n in found]
        if read and (found.get(node) != (0, None) or _mixes(relations[node], found, count)):
            raise BadInput(f"{node.name} ({node.target}) mixes the images of a batch; give an "
                           "example of one image, and call it so")  # fmt: skip


def _mixes(relation: Any, found: Mapping[fx.Node, Axes], count: int) -> bool:
    """Does an image of a call's output need another of an operand?"""
    mine = [k for k, operand in enumerate(relation.operands) if operand.value in found]
    return any(axis_of(relation, k, 0) != 0 or rule(relation, k, 0)(i, i + 1) != (i, i + 1)
               for k in mine for i in range(count))  # fmt: skip
