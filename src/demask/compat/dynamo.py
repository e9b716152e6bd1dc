"""Sources of symbols; a separate module, since its import takes a second."""

from __future__ import annotations

from torch._dynamo.source import ConstantSource

__all__ = ["ConstantSource"]
