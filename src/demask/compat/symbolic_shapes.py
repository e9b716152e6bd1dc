"""Symbolic sizes, and guards on them."""

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

require = torch._check  # states a condition on sizes, which torch.export assumes
SYM_SQRT = "torch._sym_sqrt"  # the name of a size's square root in exported programs
