"""Values by name: one value and one module per name, imported at first use; saved networks of every
kind load where only `demask` was imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import demask
from demask.errors import BadInput, TableError
from demask.ops.custom import is_custom_op
from demask.registry import CUSTOM_OPS, RESULT_KINDS, Registry
from demask.tune.optimized_module import Optimized


def test_values_by_name() -> None:
    colors = Registry("color")
    colors.register("red", 1)
    assert colors.get("red") == 1 and colors.name_of(1) == "red" and colors.name_of(2) is None
    assert "red" in colors and "blue" not in colors and colors.names() == ["red"]


def test_duplicates_raise() -> None:
    colors = Registry("color")
    colors.register("red", 1)
    with pytest.raises(TableError, match="color 'red' is registered already"):
        colors.register("red", 2)
    colors.declare("blue", "blue")
    with pytest.raises(TableError, match="color 'blue' is declared already"):
        colors.declare("blue", "other")
    assert colors.get("red") == 1


def test_an_unknown_name_lists_the_known_ones() -> None:
    colors = Registry("color")
    colors.declare("red", "red")
    colors.register("blue", 1)
    with pytest.raises(BadInput, match="expected a color of blue, red; got 'green'"):
        colors.get("green")


COLORS = Registry("color")  # where modules of tests register


def test_a_declared_module_is_imported_at_the_first_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "paint.py").write_text(f"from {__name__} import COLORS\nCOLORS.register('red', object())\n")
    (tmp_path / "empty.py").write_text("")
    COLORS.declare("red", "paint")
    COLORS.declare("blue", "empty")
    assert "red" in COLORS and COLORS.names() == ["blue", "red"] and "paint" not in sys.modules
    first = COLORS.get("red")
    assert "paint" in sys.modules and COLORS.get("red") is first
    with pytest.raises(BadInput, match="got 'blue'"):
        COLORS.get("blue")  # its module registers nothing


def test_declared_modules_register_their_names() -> None:
    for registry in (CUSTOM_OPS, RESULT_KINDS):
        for name in registry.names():
            registry.get(name)
        assert registry.names() == sorted(registry.modules)
    for name, own in CUSTOM_OPS.values.items():
        assert own.run.__module__ == CUSTOM_OPS.modules[name] and is_custom_op(name)
    for name, kind in RESULT_KINDS.values.items():
        assert kind.__module__ == RESULT_KINDS.modules[name]
    assert not is_custom_op("none")


def networks() -> dict[str, nn.Module]:
    """A small network of every kind that `demask.save` writes."""
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))
    with torch.no_grad():
        for parameter in conv.parameters():  # integers, so that sums are exact
            parameter.copy_(torch.randint(-3, 4, parameter.shape))
    image = (torch.ones(1, 3, 8, 8),)
    slim = demask.demask(conv.eval(), image, result="graph")
    fast = Optimized.of(slim, slim.graph, slim.graph._codegen.pytree_info, slim.demasked)
    tiled = demask.traverse.tile(conv, image, memory="32MiB")
    return {"graph": slim, "optimized": fast, "tiled": tiled}


LOAD = """
import sys
import demask
nets = [demask.load(path) for path in sys.argv[1:]]
import torch
for net in nets:
    print(type(net).graph_module().__name__, net(torch.ones(1, 3, 8, 8)).flatten().tolist())
"""


@pytest.mark.nightly
def test_archives_of_every_kind_load_where_only_demask_is_imported(tmp_path: Path) -> None:
    saved = networks()
    assert {*RESULT_KINDS.names()} < {*saved}
    lines = []
    for name, network in saved.items():
        demask.save(network, tmp_path / f"{name}.demask")
        kind: Any = type(network)
        values = network(torch.ones(1, 3, 8, 8)).flatten().tolist()
        lines.append(f"{kind.graph_module().__name__} {values}")
    command = [sys.executable, "-c", LOAD, *(tmp_path / f"{name}.demask" for name in saved)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == lines
