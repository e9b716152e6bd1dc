"""Plans that come with a file: refused in words, or right."""

from __future__ import annotations

import contextlib
import json
import zipfile

import pytest

import demask
from demask.errors import BadInput
from demask.exec.planning import plan as plans
from demask.records import decode
from fuzz.traversed import executed
from tiled_networks import build, same


def edited(path, edit) -> None:
    """The archive at `path` with its plan edited."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name, data in files.items() if data.startswith(b"{") and b"segments" in data)
    document = json.loads(files[name])
    edit(document["extra"])
    files[name] = json.dumps(document).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def first(row: str, value):
    """Sets an entry of the first segment in bands."""

    def edit(plan) -> None:
        next(s for s in plan["segments"] if s["mode"] == "bands")[row] = value

    return edit


def all_in_bands(plan) -> None:
    nodes = [name for s in plan["segments"] for name in s["nodes"]]
    last = plan["segments"][-1]
    plan["segments"] = [{**last, "nodes": nodes, "mode": "bands", "rows": 4}]


def unsafe(plan) -> None:
    """Each map is written over all that is read where it is made."""
    kept = [name for s in plan["segments"] for name in s["keeps"]]
    for segment in plan["segments"]:
        segment["over"] = {mine: other for mine in segment["keeps"] for other in kept if other != mine}


HOSTILE = {
    "no segments": lambda plan: plan.update(segments=[]),
    "none": lambda plan: plan.clear(),
    "no such calls": first("nodes", ["no_such_call"]),
    "no such maps": first("keeps", ["no_such_map"]),
    "another order": lambda plan: plan["segments"].reverse(),
    "no result": lambda plan: plan["segments"].pop(),
    "nothing kept": lambda plan: [s.update(keeps=[]) for s in plan["segments"]],
    "negative rows": first("rows", -3),
    "no rows": first("rows", 0),
    "rows in words": first("rows", "many"),
    "true rows": first("rows", True),
    "no columns": first("mode", "frustums"),
    "an unknown mode": first("mode", "sideways"),
    "no worker": first("workers", 0),
    "too many workers": first("workers", 10**6),
    "all in bands": all_in_bands,
    "written over what is read": unsafe,
}


@pytest.fixture(scope="module")
def stored_plan(tmp_path_factory) -> bytes:
    """A network with pools and attention in bands, and maps between them."""
    model, x = build("autoencoder")
    module, path = executed(model, x, "bands", 5, seed=4), tmp_path_factory.mktemp("plan") / "a"
    assert len([s for s in module.plan.segments if s.mode == "bands"]) > 3
    demask.save(module, path)
    return path.read_bytes()


def spoiled(stored: bytes, folder, edit):
    path = folder / "spoiled.demask"
    path.write_bytes(stored)
    edited(path, edit)
    return path


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_plans_are_refused(name: str, stored_plan, tmp_path) -> None:
    with pytest.raises(BadInput):
        demask.load(spoiled(stored_plan, tmp_path, HOSTILE[name]))


ODD = {
    "calls backwards": lambda plan: [s["nodes"].reverse() for s in plan["segments"]],
    "more rows than there are": first("rows", 2**40),
    "workers": first("workers", 3),
    "all on disk": lambda plan: [s.update(spills=s["keeps"]) for s in plan["segments"]],
    "no such map on disk": first("spills", ["no_such_map"]),
    "no such map written over": first("over", {"a": "b"}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ODD)
def test_odd_plans_are_refused_or_right(name: str, stored_plan, tmp_path) -> None:
    model, x = build("autoencoder")
    with contextlib.suppress(BadInput):
        same(model, demask.load(spoiled(stored_plan, tmp_path, ODD[name])), x)


@pytest.mark.parametrize("value", [-1, 2**62, 1.0, True, "3"])
def test_counts_of_stored_plans_are_whole_numbers(value) -> None:
    with pytest.raises(BadInput, match=r"expected (a count|an integer)"):
        decode(plans.Count, value, "plan")
    assert decode(plans.Count, 7, "plan") == 7
