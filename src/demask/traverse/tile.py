"""tile() and plan(): a model within a memory budget; spread(): on several units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.exec.analysis.flow import Flow, capture_at_sizes, flow_of
from demask.exec.analysis.split_global_ops import with_moments
from demask.exec.axes import Axes, axes_of
from demask.exec.device import Device
from demask.exec.parts import flow_in_calls
from demask.exec.planning.plan import TilePlan
from demask.exec.planning.plan_memory import WORKERS, MemoryLayout
from demask.exec.planning.planner import plan_flow
from demask.facts.analysis import Analysis
from demask.failures import public
from demask.graph.isolation import in_isolation
from demask.graph.program import Program
from demask.machine.byte_sizes import BUDGET, parse_memory
from demask.numerics import is_integer
from demask.ops import TABLE, Table
from demask.ops.flow import axis_of
from demask.ops.regions import region_rule
from demask.traverse.execution.stage_parts import PartsOfStages, choose_parts
from demask.traverse.execution.tiled_module import Tiled, tiled
from demask.traverse.units import LAYOUTS, UnitTraffic, unit_traffic


@in_isolation
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
    """A module that computes the model's outputs in tiles of the image within a memory budget.

    It is called like the model, with CPU tensors of the example's shapes, for inference only: calls
    record no gradients. Its attribute `plan` is the `Plan` that it executes. Parameters are shared
    with the model, not copied. `demask.save` and `demask.load` store the module with its plan.

    Outputs equal those of the model in eval mode up to rounding: statistics over the image, such as
    those of group norm, are summed in float64 and in another order, and torch may select other
    kernels for other sizes. A call with inputs of other shapes, dtypes or devices raises
    ValueError.

    Args:
        model: nn.Module that torch.export supports, or an ExportedProgram, on the CPU.
        args: tuple of example inputs: images (N, C, H, W), volumes (N, C, D, H, W) or sequences (N,
            C, L), which are cut into bands along H, D or L; and other inputs. Only shapes and
            dtypes of tensors matter. If the example has N >= 2 images, calls accept any number of
            images and compute them one after another; else one.
        kwargs: mapping of example keyword inputs; default None, no keyword inputs.
        memory: budget in bytes, an int or a text such as "256MiB" or "1.5GB"; default "512MiB". It
            covers what a call adds to the memory of the process, except for inputs and results.
        workers: number of threads that compute strips of the image in parallel, each with memory of
            its own, 1 to 64. With 1 (default), each operation uses torch's threads instead.
        table: op table, which describes which inputs each output position of an ATen op reads;
            default `demask.ops.TABLE`. `TABLE.extended` adds your own ops.

    Raises:
        BudgetTooSmall: no plan fits `memory`; the attribute `least` is a sufficient budget in
            bytes. The class is in `demask.errors` and derives from BadInput.
        BadInput: an argument has a wrong type or value; the model fails on the example; no input is
            an image, volume or sequence; or outputs of one image depend on another image.
        NotExportable: torch.export cannot capture the model.

    Example:
        >>> import torch
        >>> from torch.nn import Conv2d, ReLU, Sequential
        >>> from demask.traverse import tile
        >>> net = Sequential(Conv2d(3, 8, 3, padding=1), ReLU(), Conv2d(8, 3, 3, padding=1))
        >>> x = torch.randn(1, 3, 64, 64)
        >>> small = tile(net, (x,), memory="16MiB")
        >>> torch.allclose(small(x), net(x), atol=1e-6)
        True
    """
    program, flow, tile_plan, layout = _plan_model(model, args, kwargs, parse_memory(memory), workers, table)
    return tiled(program, tile_plan, flow, layout, table)


@in_isolation
@public
def plan(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory: str | int = BUDGET,
    device: Device | None = None,
    workers: int = 1,
    table: Table = TABLE,
) -> TilePlan:
    """The `Plan` by which `tile` would execute the model, without executing the model.

    A `Plan` prints as a table and has the predicted memory in bytes as `peak`. Segments of 10**9 multiply-adds or more
    are timed on zeros, some rows of them, unless the times are known: in bands, and in parts on other kernels.

    Args:
        model: nn.Module that torch.export supports, or an ExportedProgram, on the CPU.
        args: tuple of example inputs, as in `tile`. Only shapes and dtypes of tensors matter, so an
            image larger than memory can be passed as `torch.empty(1).expand(1, 3, 16384, 16384)`.
        kwargs: mapping of example keyword inputs; default None, no keyword inputs.
        memory: budget in bytes, an int or a text such as "256MiB"; default "512MiB".
        device: the memory of an accelerator, or a cache, to plan for in place of `memory`, which need not hold this
            process: 32 KiB may do. `tile` does not execute such a plan. Default: None, this process.
        workers: number of threads that compute strips of the image in parallel, 1 to 64; default 1.
        table: op table, as in `tile`; default `demask.ops.TABLE`.

    Raises:
        BudgetTooSmall: no plan fits `memory`; the attribute `least` is a sufficient budget in
            bytes.
        BadInput: an argument has a wrong type or value; the model fails on the example; no input is
            an image, volume or sequence; or outputs of one image depend on another image.
        NotExportable: torch.export cannot capture the model.

    Example:
        >>> import torch
        >>> from torch.nn import Conv2d, ReLU, Sequential
        >>> from demask.traverse import plan
        >>> net = Sequential(Conv2d(3, 8, 3, padding=1), ReLU(), Conv2d(8, 3, 3, padding=1))
        >>> tiles = plan(net, (torch.empty(1, 3, 2048, 2048),), memory="32MiB")
        >>> tiles.segments[0].mode, tiles.peak < 32 * 2**20, tiles.recompute
        ('bands', True, 1.0)
    """
    budget = parse_memory(memory) if device is None else device.bytes
    return _plan_model(model, args, kwargs, budget, workers, table, device)[2]


@in_isolation
@public
def spread(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: Device | None = None,
    layouts: Sequence[str] = tuple(LAYOUTS),
    until: str | None = None,
    table: Table = TABLE,
) -> UnitTraffic:
    """What units that compute a network side by side exchange, for several layouts of tiles.

    Each unit computes its tiles of every feature map, one layer after another; layers are computed by all units at the
    same time. Only sizes of the example matter.

    Args:
        model: nn.Module that torch.export supports, on the CPU.
        args: tuple of example inputs: images (N, C, H, W), volumes or sequences.
        kwargs: mapping of example keyword inputs; default None.
        device: the units, what their memories and those outside cost, and how much is in them: layouts that need more
            are named. Default: `Device(units=4)`, memories without limit.
        layouts: names of layouts: "strips" of rows, "columns", "quadrants", "checkerboard" (four tiles for each
            unit, none next to another of its own), "z order" (tiles along the Z curve, in runs), "mirrored" (two
            strips for each unit, in opposite order). Default: all.
        until: the name of a module after which one unit computes the rest; default None: all units to the end.
        table: op table; default `demask.ops.TABLE`.

    Returns:
        A `UnitTraffic`, which prints as a table; each `LayoutTraffic` has the network in tiles as `module`.

    Raises:
        BadInput: a number or name is out of range, or no input has rows.
        NotExportable: torch.export cannot capture the model.

    Example:
        >>> import torch
        >>> from demask.traverse import spread
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))
        >>> x = torch.randn(1, 3, 32, 32)
        >>> (quadrants,) = spread(net, (x,), layouts=("quadrants",)).layouts
        >>> torch.allclose(quadrants.module(x), net(x), atol=1e-5)
        True
    """
    flow = flow_in_calls(capture_at_sizes(model, args, kwargs), table)
    return unit_traffic(flow, Device(units=4) if device is None else device, layouts, until)


def _plan_model(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    budget: int,
    workers: int,
    table: Table,
    device: Device | None = None,
) -> tuple[Program, Flow, TilePlan, MemoryLayout]:
    if not is_integer(workers) or not 1 <= workers <= WORKERS:
        raise BadInput(f"expected 1 to {WORKERS} workers, got {workers!r}")
    program = capture_at_sizes(model, args, kwargs)
    values = [n.meta.get("val") for n in program.graph.find_nodes(op="placeholder")]
    count = max((v.shape[0] for v in values if isinstance(v, Tensor) and v.ndim >= 3), default=1)
    has_several = count > 1
    if has_several:
        _check_independent(program, count, table)
        program = capture_at_sizes(model, *_first_image(args, kwargs or {}, count))
    flow = flow_of(program, table)
    if not flow.axes:
        raise BadInput("no input has rows to cut: expected images (N, C, H, W), volumes or sequences")
    if device is not None:
        flow, tile_plan, layout = plan_flow(replace(flow.without_compiler, device=device), budget, workers=workers)
    else:
        flow, tile_plan, layout = plan_flow(replace(flow, parts=PartsOfStages(table)), budget, workers=workers)
        tile_plan, layout = choose_parts(flow, tile_plan, layout)
    return program, flow, replace(tile_plan, images=has_several), layout


def _first_image(args: Any, kwargs: Any, count: int) -> tuple[Any, Any]:
    def cut_leaf(leaf: Any) -> Any:
        has_images = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == count
        return leaf[:1] if has_images else leaf

    return pytree.tree_map(cut_leaf, (args, dict(kwargs)))


def _check_independent(program: Program, count: int, table: Table) -> None:
    """Raise BadInput unless each result of an image depends on that image only."""
    inputs = {
        n: (0, None)
        for n in program.graph.find_nodes(op="placeholder")
        if tuple(getattr(n.meta.get("val"), "shape", ()))[:1] == (count,)
    }
    relations = Analysis(program, with_moments(table)).relations
    axes = axes_of(program.graph, relations, inputs)
    outputs: Any = next(iter(program.graph.find_nodes(op="output"))).args[0]
    for node in [*program.graph.nodes, *outputs]:
        if not isinstance(node, fx.Node) or node.op != "call_function":
            continue
        operands = [n for n in node.all_input_nodes if n in axes]
        if operands and (axes.get(node) != (0, None) or _mixes_images(relations[node], axes, count)):
            raise BadInput(
                f"{node.name} ({node.target}) mixes the images of a batch; give an "
                "example of one image, and pass one image per call"
            )


def _mixes_images(relation: Any, axes: Mapping[fx.Node, Axes], count: int) -> bool:
    """Whether an image of a call's output needs another image of an operand."""
    cut_operands = [k for k, operand in enumerate(relation.operands) if operand.value in axes]
    return any(
        axis_of(relation, k, 0) != 0 or region_rule(relation, k, 0)(i, i + 1) != (i, i + 1)
        for k in cut_operands
        for i in range(count)
    )
