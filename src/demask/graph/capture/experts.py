"""Experts of a transformers model in one call each, while it is captured.

The library runs experts one by one in a Python loop over those that tokens chose ("eager"), which
no graph can hold, or all in one grouped product, which computes the same. Which one is a setting
of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.export import ExportedProgram

Export = tuple[ExportedProgram, tuple[str, ...]]  # and what to say of it
NOTE = (
    "experts are computed by grouped products: a loop over the experts that tokens chose cannot be "
    "captured"
)


def in_one_call(model: nn.Module, exports: Iterator[Export]) -> Iterator[Export]:
    """The exports of a model, each made while a model that loops over its experts runs them by
    grouped products, with a note that says so."""
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
    """Does a model run its experts in a loop, where it could do without? (A model without experts
    has the setting too, and refuses to change it.)"""
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
    """While it lasts, experts run by grouped products. The model's settings, which a copy shares
    with it, are restored."""
    before = model.get_experts_implementation()  # type: ignore[operator]
    model.set_experts_implementation("grouped_mm")  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_experts_implementation(before)  # type: ignore[operator]
