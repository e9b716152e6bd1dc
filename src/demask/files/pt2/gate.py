"""Checks that every .pt2 file passes before torch reads it.

`torch.export.load` can run code from a file: pickled weights and sample inputs, Python in
symbolic expressions, in names (a graph becomes source) and in guards, any function named as an
operator, modules named in tree specs, compiled libraries. So the file is read here, within limits
and against allow lists, and torch reads a copy of the checked parts, without inputs.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from demask.compat.export_schema import DTYPES, SCHEMA_VERSION, Layout, load_pt2
from demask.errors import BadInput, RefusedFile
from demask.files.atomic_write import temporary_folder
from demask.files.bounded_read import open_zip, read_json
from demask.files.pt2.schema import clean_payloads, clean_program

MAX_EXPANDED = 2**28  # elements of a tensor that repeats stored elements (stride 0)

_PROGRAM = "models/model.json"
_TABLES = (
    ("data/weights/", "data/weights/model_weights_config.json"),
    ("data/constants/", "data/constants/model_constants_config.json"),
)
_DROPPED = ("extra/", ".data/", "data/sample_inputs/")
_FIXED = {"archive_format": b"pt2", "archive_version": b"0", "byteorder": b"little"}


@dataclass(frozen=True, slots=True)
class _Checked:
    """The parts of a .pt2 that torch will read: JSON by entry, and the entries of raw tensors."""

    root: str
    documents: dict[str, Any]
    payloads: tuple[str, ...]


def check(path: str | os.PathLike[str], *, namespaces: Collection[str] = ()) -> None:
    """Check that the .pt2 at `path` contains a plain program and raw tensors.

    Args:
        namespaces: op namespaces allowed in addition to aten, such as "torchvision". The caller
            has imported the libraries that define them.

    Raises:
        BadInput: not a readable .pt2.
        RefusedFile: contents that could run code or exhaust memory.
    """
    with _advising(), open_zip(path) as archive:
        _check_archive(archive, namespaces)


def open_pt2(path: str | os.PathLike[str], *, namespaces: Collection[str] = ()) -> torch.export.ExportedProgram:
    """The program in the .pt2 at `path`, without sample inputs; errors as `check`.

    Example: `open_pt2("model.pt2").module()(torch.randn(1, 3, 224, 224))`
    """
    with _advising(), temporary_folder() as folder:
        copy = folder / "model.pt2"
        with open_zip(path) as archive:
            _write_copy(archive, _check_archive(archive, namespaces), copy)
        return _load(copy, path)


@contextmanager
def _advising() -> Iterator[None]:
    try:
        yield
    except RefusedFile as error:
        raise RefusedFile(
            f"{error}\n  the file was not opened; export the model again with torch.export.save, "
            "from a source you trust"
        ) from None


def _load(copy: Path, path: str | os.PathLike[str]) -> torch.export.ExportedProgram:
    try:
        return load_pt2(str(copy)).exported_programs["model"]
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise BadInput(
            f"{path}: torch {torch.__version__} cannot read this program: {reason[-1][:300]}; "
            "export it again with this torch"
        ) from error


def _check_archive(archive: zipfile.ZipFile, namespaces: Collection[str]) -> _Checked:
    root, names = _entries(archive)
    documents, payloads, known = {}, [], {_PROGRAM, *_FIXED}
    for folder, table in _TABLES:
        config = clean_payloads(read_json(archive, f"{root}/{table}"))
        sizes = {
            name: archive.getinfo(f"{root}/{name}").file_size
            for name in names
            if name.startswith(folder) and name != table
        }
        _check_tensors(config["config"], folder, sizes)
        documents[table] = config
        used = {folder + meta["path_name"] for meta in config["config"].values()}
        payloads.extend(sorted(used))
        known |= used | {table}
    for name in names:
        if name not in known and not name.startswith(_DROPPED):
            raise RefusedFile(f"entry {name!r}: expected a program and raw tensors only")
    program = clean_program(read_json(archive, f"{root}/{_PROGRAM}"), {"aten", *namespaces})
    _check_version(program)
    documents[_PROGRAM] = program
    return _Checked(root, documents, tuple(payloads))


def _entries(archive: zipfile.ZipFile) -> tuple[str, list[str]]:
    """The archive's only root folder and the entries in it; checks the fixed entries."""
    full = archive.namelist()
    roots = {name.split("/")[0] for name in full}
    if len(roots) != 1 or not all("/" in name for name in full):
        raise BadInput(
            "expected a .pt2 written by torch.export.save (torch 2.8 or later), got another zip "
            "archive; save the model again with torch.export.save"
        )
    root = roots.pop()
    for name, expected in _FIXED.items():
        entry = f"{root}/{name}"
        if entry not in archive.NameToInfo or archive.getinfo(entry).file_size > 16:
            raise BadInput(f"entry {name!r} is missing; expected a whole .pt2 of torch.export.save")
        if archive.read(entry) != expected:
            raise BadInput(f"entry {name!r}: expected {expected!r}, got something else")
    return root, [name[len(root) + 1 :] for name in full]


def _check_version(program: dict[str, Any]) -> None:
    major = program["schema_version"]["major"]
    if major != SCHEMA_VERSION[0]:
        raise BadInput(
            f"schema version {major}, expected {SCHEMA_VERSION[0]}; export the model again with "
            f"torch {torch.__version__}"
        )


def _check_tensors(config: dict[str, Any], folder: str, sizes: dict[str, int]) -> None:
    dtypes: dict[str, int] = {}
    for fqn, meta in config.items():
        record = folder + meta["path_name"]
        if meta["use_pickle"]:
            raise RefusedFile(f"tensor {fqn}: stored as a pickle; expected raw bytes")
        if meta["tensor_meta"] is None or record not in sizes:
            raise BadInput(f"tensor {fqn}: its bytes ({record}) or its sizes are missing")
        dtype = meta["tensor_meta"]["dtype"]
        if dtypes.setdefault(record, dtype) != dtype:
            raise RefusedFile(f"tensor {fqn}: {record} is read as two dtypes")
        _check_extent(fqn, meta["tensor_meta"], sizes[record])


def _check_extent(fqn: str, meta: dict[str, Any], stored: int) -> None:
    """Refuse tensors with elements outside the `stored` bytes, or with far more elements."""
    if meta["layout"] != Layout.Strided or meta["dtype"] not in DTYPES:
        raise RefusedFile(f"tensor {fqn}: expected a strided tensor of a known dtype")
    width = DTYPES[meta["dtype"]].itemsize
    sizes, strides = _plain(fqn, meta["sizes"]), _plain(fqn, meta["strides"])
    offset = _plain(fqn, [meta["storage_offset"]])[0]
    if len(sizes) != len(strides) or len(sizes) > 64 or stored % width:
        raise RefusedFile(f"tensor {fqn}: sizes, strides and bytes do not match")
    count = math.prod(sizes)
    last = offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    available = stored // width
    if (count and last >= available) or offset > available or (not available and count):
        raise RefusedFile(f"tensor {fqn}: element {last} of {available} stored: out of bounds")
    if count > max(available, MAX_EXPANDED):
        raise RefusedFile(f"tensor {fqn}: {count} elements expanded from {available} stored")


def _plain(fqn: str, sizes: list[dict[str, Any]]) -> list[int]:
    values = [size.get("as_int", -1) for size in sizes]
    if min(values, default=0) < 0:
        raise RefusedFile(f"tensor {fqn}: a size, stride or offset that is not a natural number")
    return values


def _write_copy(archive: zipfile.ZipFile, checked: _Checked, copy: Path) -> None:
    with zipfile.ZipFile(copy, "w", zipfile.ZIP_STORED) as clean:
        for name in checked.payloads:
            source = archive.open(f"{checked.root}/{name}")
            with source, clean.open(f"model/{name}", "w", force_zip64=True) as target:
                shutil.copyfileobj(source, target, 2**20)
        for name, document in checked.documents.items():
            clean.writestr(f"model/{name}", json.dumps(document))
        for name, content in _FIXED.items():
            clean.writestr(f"model/{name}", content)
        clean.writestr("model/.data/version", b"6\n")
        clean.writestr("model/data/sample_inputs/model.pt", b"")
