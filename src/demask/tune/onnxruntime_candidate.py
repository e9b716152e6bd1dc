"""A program rewritten for ONNX runtimes: plain layers, with widths for which kernels are fast.

A runtime fuses layers with the norms and activations that follow, and stores images in blocks of 16
channels if the channel count is a multiple of 4 (ONNX Runtime 1.31, MLAS). Ops between layers
prevent both: a scatter at a join, a border map, a norm after a sum.
"""

from __future__ import annotations

from demask.graph.program import Program
from demask.ops import Table
from demask.rewrites.driver import rewrite
from demask.rewrites.rule import Phase
from demask.tune.absorb_gathers import ABSORB_GATHERS
from demask.tune.fold_affine import FOLD_AFFINE
from demask.tune.join_as_sum import JOINS_AS_SUMS
from demask.tune.pad_channels import PADS_REMOVED, widths_rounded

RUNTIME = Phase("layers of runtimes", (FOLD_AFFINE, JOINS_AS_SUMS, PADS_REMOVED))


def for_runtime(program: Program, table: Table, multiple: int = 1) -> Program:
    """The program with norms folded into weights, joins as sums of layers that write at their own
    positions, and widths rounded up to a multiple. Equal up to rounding of the weights."""
    widths = () if multiple == 1 else (ABSORB_GATHERS, widths_rounded(multiple))
    return rewrite(program, Phase(RUNTIME.name, (*RUNTIME.entries, *widths)), table)
