"""Capture of transformers models with experts: grouped products in the place of a Python loop.

The library runs experts in a Python loop over those that tokens select ("eager"), which cannot be
captured, or all in one grouped product, which computes the same. A setting of the model selects
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.export import ExportedProgram

Export = tuple[ExportedProgram, tuple[str, ...]]  # and notes
NOTE = "experts are computed by grouped products: a loop over the experts that tokens select cannot be captured"


def export_with_grouped_experts(model: nn.Module, exports: Iterator[Export]) -> Iterator[Export]:
    """The exports of a model. A model that loops over its experts uses grouped products during each
    export, which a note states."""
    if not _loops_over_experts(model):
        yield from exports
        return
    while True:
        with _grouped(model):
            export = next(exports, None)
        if export is None:
            return
        yield export[0], (*export[1], NOTE)


def _loops_over_experts(model: nn.Module) -> bool:
    """Whether a model runs its experts in a loop and can use grouped products. (A model without
    experts has the setting, too, and refuses to change it.)"""
    settings = getattr(model, "get_experts_implementation", None)
    if not callable(settings) or "eager" not in settings().values():  # type: ignore[union-attr]
        return False
    try:
        with _grouped(model):
            return True
    except ValueError:
        return False


@contextmanager
def _grouped(model: nn.Module) -> Iterator[None]:
    """Experts run by grouped products in the block. The model's settings, which copies share, are
    restored after it."""
    before = model.get_experts_implementation()  # type: ignore[operator]
    model.set_experts_implementation("grouped_mm")  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_experts_implementation(before)  # type: ignore[operator]
