"""Activations as kernels take them."""

from __future__ import annotations

Act = tuple[str, tuple[float, ...]]  # an activation, as torch names it, and its numbers
