"""Fixtures of the tests of plans: what was computed in which form."""

from __future__ import annotations

import pytest

pytest.importorskip("llvmlite")  # optional

from random_segments import computed_as, record


@pytest.fixture
def emitted(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the weights that were emitted as dense layers, by any kernel."""
    return computed_as("dense", monkeypatch)


@pytest.fixture
def filtered(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the weights of layers by minimal filtering."""
    from demask.exec.tape import tape_builder

    return record(monkeypatch, tape_builder, "emit_winograd", lambda tape, isa, piece, block: [block.weight.shape])


@pytest.fixture
def always(monkeypatch) -> list[int]:
    """Channels are in lanes of all dense layers; the threads of their calls."""
    return computed_as("channels", monkeypatch)


@pytest.fixture(params=["stored", "permuted"])
def edges(request, monkeypatch) -> list:
    """The layers that were emitted as depthwise layers, whose lines over the edges of tiles are
    stored, or permuted as they are read."""
    return computed_as(f"depthwise {request.param}", monkeypatch)
