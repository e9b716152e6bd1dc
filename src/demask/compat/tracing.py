"""Tracing by torch.fx, and torch's decompositions of ops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._decomp import decomposition_table
from torch.fx import config
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["decomposition_table", "make_fx", "without_stack_traces"]


@contextlib.contextmanager
def without_stack_traces() -> Iterator[None]:
    """In the block, nodes do not record the Python stack of their calls, which takes a seventh of
    the time of an export. torch 2.11 always records it."""
    settings: Any = config
    before = getattr(settings, "do_not_emit_stack_traces", None)
    if before is None:
        yield
        return
    settings.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        settings.do_not_emit_stack_traces = before
