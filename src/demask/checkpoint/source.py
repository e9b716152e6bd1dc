"""Checkpoint folders that are to be changed: opened, with all checks before any work."""

from __future__ import annotations

import os
from pathlib import Path

from demask.checkpoint.family import ConfigData, Family, find_stacks
from demask.checkpoint.folder import CheckpointFolder
from demask.checkpoint.tensors import StoredTensors
from demask.errors import BadInput
from demask.failures import described


def open_checkpoint(source: Path) -> tuple[Family, ConfigData, StoredTensors]:
    """A folder's class, its config with all keys, and its tensors. Raises BadInput for a folder
    that is incomplete, damaged, quantized, or of no class of transformers."""
    folder = CheckpointFolder.read(source)
    if "quantization_config" in folder.config:
        kind = folder.config["quantization_config"]
        name = kind.get("quant_method", "?") if isinstance(kind, dict) else "?"
        raise BadInput(f"{source}: its weights are quantized ({name}), which are not cut; slim the "
                       "folder that they were quantized from, and quantize the result")  # fmt: skip
    family = Family.of(source, folder.config)
    data = family.full_config(folder.config)
    try:
        model = family.build(data)
    except Exception as error:
        raise BadInput(f"{source}: {family.model.__name__} cannot be built from its config: "
                       f"{described(error)}") from error  # fmt: skip
    stored = StoredTensors(folder, model, find_stacks(family, data, model))
    check_shapes(stored)
    return family, data, stored


def check_output(source: Path, target: Path) -> None:
    """Raise BadInput where the new folder cannot be written."""
    if target.exists() or target.is_symlink():
        raise BadInput(f"{target}: exists; give the name of a new folder")
    parent = target.resolve().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise BadInput(f"cannot write {target}: {parent} is no folder that can be written")
    if source.resolve() in (target.resolve(), *target.resolve().parents):
        raise BadInput(f"{target}: expected a folder outside of {source}")


def check_shapes(stored: StoredTensors) -> None:
    """Raise BadInput where a tensor is not as large as the config says."""
    for name, parameter in stored.parameter_of.items():
        if parameter is None:
            continue
        here, there = stored.folder.stored(name).shape, stored.shapes[parameter]
        if here != there:
            raise BadInput(f"{stored.folder.path}: {name} is {here}, and {there} by the config; "
                           "the folder does not fit its class")  # fmt: skip
    if not any(p is not None for p in stored.parameter_of.values()):
        raise BadInput(f"{stored.folder.path}: none of its tensors belongs to "
                       f"{type(stored.model).__name__}")  # fmt: skip
