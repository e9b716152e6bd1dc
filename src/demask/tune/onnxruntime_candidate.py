"""The form of a program that runtimes of ONNX files like: plain layers, at widths they are fast at.

A runtime fuses layers with norms and activations behind them, and keeps images in blocks of
channels: 16 wide, of tensors whose channels come in fours (ONNX Runtime 1.31, MLAS). What stands
between layers breaks both: a scatter at a join, a border map, a norm behind a sum.
"""

from __future__ import annotations

from demask.graph.program import Program
from demask.ops import Table
from demask.tune.passes.absorb_gathers import ungathered
from demask.tune.passes.fold_affine import absorbed
from demask.tune.passes.join_as_sum import summed
from demask.tune.passes.pad_channels import rounded, widened


def for_runtime(program: Program, table: Table, multiple: int = 1) -> Program:
    """The program with norms in the weights, joins as sums of layers that write at their places,
    and widths rounded up to a multiple. Equal up to the rounding of weights in their dtype."""
    program = summed(absorbed(program), lambda *_: "grow")
    program = widened(program, lambda *_: True, table)
    if multiple == 1:
        return program
    program = ungathered(program, table)
    width = lambda count: -(-count // multiple) * multiple  # noqa: E731
    return rounded(program, width, lambda *_: True, table)
