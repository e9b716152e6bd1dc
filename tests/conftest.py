"""Shared by all tests."""

import sys
import zipfile
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """The entries of an honest .pt2, by name below its root folder."""
    from pt2_files import AUTO, CALL, Small, export

    path = tmp_path_factory.mktemp("honest") / "model.pt2"
    shapes = {"x": {0: AUTO}, "spare": None, "scale": None}
    torch.export.save(export(Small().eval(), *CALL, shapes), path)
    with zipfile.ZipFile(path) as archive:
        return {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}
