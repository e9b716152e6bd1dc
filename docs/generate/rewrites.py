"""docs/rewrites.md, from the table of rewrites."""

from __future__ import annotations

from demask.exec.analysis.split_global_ops import BROADCAST, SINGLE_OUTPUTS, STATISTICS
from demask.ops.entry import op_name
from demask.rewrites.activations import ACTIVATIONS
from demask.rewrites.normalize import NORMALIZE
from demask.rewrites.onnx import ONNX
from demask.rewrites.rule import Pass, Phase, Rule
from demask.rewrites.segment import SEGMENT
from demask.shrink.stack_border_maps import SEPARATE, STACKED
from demask.stride.average_pools import POOLS_AS_CONVOLUTIONS, SCALED_SUMS_AS_POOLS, SUMS_AS_POOLS
from demask.stride.raise_strides import ABSORBED
from demask.stride.recurrent_passes import RECURRENT_PASSES
from demask.stride.subsampling_as_slices import SUBSAMPLING_AS_SLICES
from demask.tune.candidates import TUNE
from demask.tune.fold_affine import FOLD
from docs.generate import DOCS

PATH = DOCS / "rewrites.md"
STRIDE = (SUBSAMPLING_AS_SLICES, ABSORBED, POOLS_AS_CONVOLUTIONS, SCALED_SUMS_AS_POOLS, SUMS_AS_POOLS, RECURRENT_PASSES)
TRAVERSE = (SINGLE_OUTPUTS, STATISTICS, BROADCAST)
PHASES = (NORMALIZE, ACTIVATIONS, ONNX, SEGMENT, SEPARATE, STACKED, FOLD, TUNE, *TRAVERSE, *STRIDE)
HEAD = """# Rewrites

One entry per rewrite: a program changed into one that computes the same. Made from the phases in
`demask.rewrites` by `python -m docs rewrites`; a test keeps it so. `demask inspect MODEL --rewrites`
and `demask.explain(model, args)` print what each of them changes in a network.

- *ops*: those whose calls a rule is for; a pass looks at the program.
- *cases*: networks on which the laws are tested: a rule changes its cases and not what it refuses,
  outputs are equal (*exact*: bit for bit), its own result is not changed again, and without any one
  of its guards a law is broken (`demask.rewrites.laws`).

"""


def row(entry: Rule | Pass) -> str:
    """One entry as cells of a table."""
    ops, cases = "(program)", f"{len(entry.cases)}"
    if isinstance(entry, Rule):
        ops = ", ".join(f"`{name}`" for name in sorted(op_name(op).removeprefix("aten.") for op in entry.ops))
        cases += f" / {len(entry.refused)}"
    cells = (entry.name, ops, entry.reason.replace("|", "\\|"), "yes" if entry.exact else "", cases)
    return "| " + " | ".join(cells) + " |"


def section(phase: Phase) -> str:
    """The table of a phase."""
    head = "| rewrite | ops (`aten.`) | what it does | exact | cases / refused |\n| --- | --- | --- | --- | --- |"
    return f"## {phase.name[:1].upper()}{phase.name[1:]}\n\n" + "\n".join([head, *map(row, phase.entries)])


def page() -> str:
    """The page."""
    return HEAD + "\n\n".join(map(section, PHASES)) + "\n"
