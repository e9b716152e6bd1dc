"""Fixtures of the tests of plans."""

from __future__ import annotations

import pytest


@pytest.fixture
def emitted(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the weights that were emitted as dense layers, by any kernel."""
    layer_plan = pytest.importorskip("demask.sparse.plan.layers.layer_plan")
    shapes: list[tuple[int, ...]] = []
    emit = layer_plan.emit_dense

    def record(tape, isa, piece):
        shapes.extend(block.weight.shape for block in piece.layer.blocks)
        return emit(tape, isa, piece)

    def filtered(tape, isa, piece, block):
        shapes.append(block.weight.shape)
        return emit_winograd(tape, isa, piece, block)

    tape_builder = pytest.importorskip("demask.sparse.plan.tape_builder")
    emit_winograd = tape_builder.emit_winograd
    monkeypatch.setattr(tape_builder, "emit_winograd", filtered)
    monkeypatch.setattr(layer_plan, "emit_dense", record)
    return shapes
