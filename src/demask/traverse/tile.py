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
from demask.ops.regions import region_rule
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
    """A network with the model's outputs that needs little memory: it runs in tiles and bands.

    Its `plan` is a `Plan`.

    Results equal those of the model in eval mode, except for the order of sums in statistics over
    space (in float64 here) and kernels that torch selects by size. Unchanged weights are shared
    with the model, not copied.

    Args:
        model: an nn.Module that torch.export supports.
        args, kwargs: an example call with images (N, C, H, W), volumes or sequences. The plan is
            for the sizes of its images. With an example of two images or more, calls may pass any
            number; they run one after another.
        memory: bytes ("256MiB", "1GiB", 10**9; default "512MiB") in addition to the process at the
            call, the caller's inputs and the results.
        workers: 1 (the default) to 64 threads that run strips of bands in parallel, each with its
            own memory and share of torch's threads. 1 leaves the threads to torch, which is as fast
            on an idle machine.
        table: the op table, as in `demask.demask`.

    Raises:
        BudgetTooSmall: if no plan fits; its `least` is a sufficient budget in bytes.
        BadInput: no input has rows, `workers` is out of range, or the network mixes the images of a
            batch.
        NotExportable: if torch.export does not support the model.

    Example:
        >>> import torch
        >>> from torch.nn import Conv2d, ReLU, Sequential
        >>> net = Sequential(Conv2d(3, 8, 3, padding=1), ReLU(), Conv2d(8, 3, 3, padding=1))
        >>> x = torch.randn(1, 3, 64, 64)
        >>> from demask.traverse import tile
        >>> small = tile(net, (x,), memory="16MiB")
        >>> torch.allclose(small(x), net(x), atol=1e-6)
        True
    """
    program, flow, tile_plan, layout = _planned(
        model, args, kwargs, parse_memory(memory), workers, table
    )
    return tiled(program, tile_plan, flow, layout, table)


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
    """How `tile` would run the model, as a `Plan`, which prints as a table; nothing is run.

    Args:
        model, args, kwargs, memory, workers, table: as of `tile`.

    Raises:
        BudgetTooSmall, BadInput, NotExportable: as of `tile`.

    Example:
        >>> import torch
        >>> from torch.nn import Conv2d, ReLU, Sequential
        >>> net = Sequential(Conv2d(3, 8, 3, padding=1), ReLU(), Conv2d(8, 3, 3, padding=1))
        >>> from demask.traverse import plan
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
    program = read(model, args, kwargs)
    count = _count(program)
    has_several = count > 1
    if has_several:
        _check_independent(program, count, table)
        program = read(model, *_first(args, kwargs or {}, count))
    flow = flow_of(program, table)
    if not flow.axes:
        raise BadInput(
            "no input has rows to cut: expected images (N, C, H, W), volumes or sequences"
        )
    tile_plan, layout = plan_tiles(flow, budget, workers=workers)
    return program, flow, replace(tile_plan, images=has_several), layout


def _count(program: Program) -> int:
    """The number of images in the example."""
    values = [n.meta.get("val") for n in program.graph.find_nodes(op="placeholder")]
    return max((v.shape[0] for v in values if isinstance(v, Tensor) and v.ndim >= 3), default=1)


def _first(args: Any, kwargs: Any, count: int) -> tuple[Any, Any]:
    """The example with its first image only."""

    def first_image(leaf: Any) -> Any:
        has_images = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == count
        return leaf[:1] if has_images else leaf

    return pytree.tree_map(first_image, (args, dict(kwargs)))


def _check_independent(program: Program, count: int, table: Table) -> None:
    """Raise BadInput unless each result of an image depends on that image only."""
    inputs = {n: (0, None) for n in program.graph.find_nodes(op="placeholder")
              if tuple(getattr(n.meta.get("val"), "shape", ()))[:1] == (count,)}  # fmt: skip
    relations = Analysis(program, with_reductions(table)).relations
    axes = axes_of(program.graph, relations, inputs)
    outputs: Any = next(iter(program.graph.find_nodes(op="output"))).args[0]
    for node in [*program.graph.nodes, *outputs]:
        if not isinstance(node, fx.Node) or node.op != "call_function":
            continue
        operands = [n for n in node.all_input_nodes if n in axes]
        if operands and (axes.get(node) != (0, None) or _mixes(relations[node], axes, count)):
            raise BadInput(f"{node.name} ({node.target}) mixes the images of a batch; give an "
                           "example of one image, and pass one image per call")  # fmt: skip


def _mixes(relation: Any, axes: Mapping[fx.Node, Axes], count: int) -> bool:
    """Whether an image of a call's output needs another image of an operand."""
    cut_operands = [k for k, operand in enumerate(relation.operands) if operand.value in axes]
    return any(axis_of(relation, k, 0) != 0 or region_rule(relation, k, 0)(i, i + 1) != (i, i + 1)
               for k in cut_operands for i in range(count))  # fmt: skip
