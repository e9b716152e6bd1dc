"""How torch.fx records calls of ops, and how torch decomposes ops."""

from __future__ import annotations

from torch._decomp import decomposition_table
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["decomposition_table", "make_fx"]
