"""What messages say to install fits how demask is installed."""

import json
import shlex
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

import demask
from demask.installation import install_command

GIT = {"url": "https://example.org/demask.git", "vcs_info": {"vcs": "git", "commit_id": "0123abc"}}


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        (None, ["demask[onnx]"]),
        ({"url": "file:///a%20b", "dir_info": {"editable": True}}, ["--editable", "/a b[onnx]"]),
        ({"url": "file:///a%20b", "dir_info": {}}, ["demask[onnx] @ file:///a%20b"]),
        ({"url": "file:///a.whl", "archive_info": {}}, ["demask[onnx] @ file:///a.whl"]),
        (GIT, ["demask[onnx] @ git+https://example.org/demask.git@0123abc"]),
    ],
)
def test_the_command_names_where_demask_came_from(monkeypatch, origin, words):
    text = None if origin is None else json.dumps(origin)
    installed = SimpleNamespace(read_text={"direct_url.json": text}.get)
    monkeypatch.setattr(metadata, "distribution", lambda name: installed)
    assert shlex.split(install_command("onnx")) == ["pip", "install", *words]


def test_a_source_tree_names_itself(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    root = Path(demask.__file__).parents[2]
    assert install_command("demo") == f'pip install "demask[demo] @ {root.as_uri()}"'
