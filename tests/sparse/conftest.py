"""Shared by tests of sparse layers."""

import pytest

from demask.kernels.llvm import availability as llvm
from demask.machine.cost import Costs
from demask.sparse.products import form_choice


@pytest.fixture(autouse=True)
def small_products_use_threads(monkeypatch):
    """As many threads as are set for networks of tests, too, of which one would take less time."""
    if llvm.is_installed():
        from demask.sparse.products import cpu_products

        monkeypatch.setattr(cpu_products, "WORK", 1 << 12)


@pytest.fixture(autouse=True)
def forms_are_chosen_by_bytes(monkeypatch):
    """What a machine takes for each form is neither measured nor stored."""
    monkeypatch.setattr(
        form_choice, "costs_of_machine", lambda threads: Costs.open(False, threads=threads, measure=False)
    )
