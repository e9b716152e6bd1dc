"""Sources of symbols; a module of its own, since importing it takes a second."""

from __future__ import annotations

from torch._dynamo.source import ConstantSource

__all__ = ["ConstantSource"]
