"""Sizes that are symbols, and what is assumed of them."""

from __future__ import annotations

import torch
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
    free_unbacked_symbols,
    guard_or_true,
    statically_known_false,
    statically_known_true,
)

__all__ = [
    "SYM_SQRT",
    "DimDynamic",
    "GuardOnDataDependentSymNode",
    "ShapeEnv",
    "StatelessSymbolicContext",
    "free_unbacked_symbols",
    "guard_or_true",
    "require",
    "statically_known_false",
    "statically_known_true",
]

require = torch._check  # of a condition on sizes: torch.export reads it as a fact
SYM_SQRT = "torch._sym_sqrt"  # the square root of a size, as exported programs name it
