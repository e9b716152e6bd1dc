"""What each part of each layer contributes to the outputs of a run, to first order.

Setting part p of a value v to zero changes outputs y by about J_p v_p, where J is the derivative of y by v (a Taylor
expansion of y in the part; Molchanov et al. 2017, "Pruning convolutional neural networks for resource efficient
inference", use it for a loss). The contribution of p is the length of that change:

    contribution(p) = || sum over the elements e of p of dy / dv_e * v_e ||

It takes one derivative per output. Of more than DIRECTIONS outputs, the length is estimated from as many sums of all
outputs with random signs: the mean of their squares is the square of the length (Hutchinson 1990).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from demask.errors import BadInput
from demask.exec.call_groups import Constants, consecutive_groups, run_calls
from demask.graph.program import Program
from demask.ops import schema
from demask.pilot.data.measured_values import MeasuredValue, batch_axis

DIRECTIONS = 64  # derivatives of one run
Measured = tuple[Tensor, tuple[int, int] | None]  # contributions, and the grid of tiles


def contributions(
    program: Program,
    sites: Mapping[fx.Node, Sequence[MeasuredValue]],
    calls: Sequence[Mapping[fx.Node, Any]],
    see: Callable[[int, MeasuredValue, Measured], None],
    progress: Callable[[str], None] | None = None,
) -> None:
    """Pass the contributions of the parts of each site in each call to `see`.

    calls: the values of the inputs in each. see: gets the number of the call, the site, and float32 (inputs, parts).

    Raises BadInput where no output is a number that can be differentiated.
    """
    for number, inputs in enumerate(calls):
        values, outputs = _run(program, sites, inputs)
        squares: dict[MeasuredValue, Tensor] = {}
        grids: dict[MeasuredValue, tuple[int, int] | None] = {}
        for direction in _directions(outputs):
            total = torch.stack([(y * d).sum() for (y, _), d in zip(outputs, direction, strict=True)]).sum()
            gradients = torch.autograd.grad(total, list(values.values()), retain_graph=True, allow_unused=True)
            for (node, value), gradient in zip(values.items(), gradients, strict=True):
                change = torch.zeros_like(value) if gradient is None else value.detach() * gradient
                for site in sites[node]:
                    of_parts, grids[site] = site.measured(change, "sum")
                    squares[site] = squares.get(site, torch.zeros(())) + of_parts.square()
        for site, total in squares.items():
            see(number, site, (total.sqrt(), grids[site]))
        if progress is not None:
            progress(f"input {number + 1} of {len(calls)}")


def _run(
    program: Program, sites: Mapping[fx.Node, Sequence[MeasuredValue]], inputs: Mapping[fx.Node, Any]
) -> tuple[dict[fx.Node, Tensor], list[tuple[Tensor, int | None]]]:
    """The values of the sites in one call that records derivatives; and the outputs, with the axis of the inputs."""
    values, measured = dict(inputs), dict[fx.Node, Tensor]()

    def compute(node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
        result = schema.call_on(node, value)
        if node in sites:
            result = measured[node] = result if result.requires_grad else result.detach().requires_grad_()
        return result

    (group,) = consecutive_groups(Constants(program))
    with torch.enable_grad():
        run_calls(group, values, lambda name: program.constants[name].tensor.detach(), compute=compute)
    final: Any = program.graph.output_node().args[0]
    results = [v for v in final if isinstance(v, fx.Node) and isinstance(values.get(v), Tensor)]
    outputs = [(values[v], batch_axis(v)) for v in results]
    outputs = [(y, axis) for y, axis in outputs if y.requires_grad]
    if not outputs:
        raise BadInput("contributions are changes of outputs that are floating-point numbers; the network has none")
    return measured, outputs


def _directions(outputs: Sequence[tuple[Tensor, int | None]]) -> Iterator[list[Tensor]]:
    """Factors of the outputs, the same for all inputs of a batch: one output at a time; or random signs, divided by
    the root of their number, so that squares are summed in both cases."""
    shapes = [[1 if axis == k else n for k, n in enumerate(y.shape)] for y, axis in outputs]
    sizes = [math.prod(shape) for shape in shapes]
    count = sum(sizes)
    if count <= DIRECTIONS:
        rows = torch.eye(count)
    else:
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (DIRECTIONS, count), generator=generator)
        rows = (2.0 * signs - 1) / math.sqrt(DIRECTIONS)
    for row in rows:
        yield [part.reshape(shape) for part, shape in zip(row.split(sizes), shapes, strict=True)]
