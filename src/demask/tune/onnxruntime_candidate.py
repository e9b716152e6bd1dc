"""A program rewritten for ONNX runtimes: plain layers, with widths for which kernels are fast.

A runtime fuses layers with the norms and activations that follow, and stores images in blocks of 16
channels if the channel count is a multiple of 4 (ONNX Runtime 1.31, MLAS). Ops between layers
prevent both: a scatter at a join, a border map, a norm after a sum.
"""

from __future__ import annotations

from demask.graph.program import Program
from demask.ops import Table
from demask.tune.absorb_gathers import absorb_gathers
from demask.tune.fold_affine import fold_affine
from demask.tune.join_as_sum import rewrite_joins
from demask.tune.pad_channels import remove_pads, round_widths


def for_runtime(program: Program, table: Table, multiple: int = 1) -> Program:
    """The program with norms folded into weights, joins as sums of layers that write at their own
    positions, and widths rounded up to a multiple. Equal up to rounding of the weights."""
    program = rewrite_joins(fold_affine(program), lambda *_: "grow")
    program = remove_pads(program, lambda *_: True, table)
    if multiple == 1:
        return program
    program = absorb_gathers(program, table)
    width = lambda count: -(-count // multiple) * multiple  # noqa: E731
    return round_widths(program, width, lambda *_: True, table)
