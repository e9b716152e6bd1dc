"""Shared by tests of sparse layers."""

import pytest

from demask.kernels.llvm import availability as llvm


@pytest.fixture(autouse=True)
def small_products_use_threads(monkeypatch):
    """As many threads as are set for networks of tests, too, of which one would take less time."""
    if llvm.is_installed():
        from demask.sparse.products import cpu_products

        monkeypatch.setattr(cpu_products, "WORK", 1 << 12)
