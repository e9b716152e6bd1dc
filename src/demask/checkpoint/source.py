"""Checkpoint folders that are to be changed: opened, with all checks before any work."""

from __future__ import annotations

import os
import re
from pathlib import Path

from demask.checkpoint.family import ConfigData, Family, find_stacks, numbers_of_config
from demask.checkpoint.folder import CONFIG, CheckpointFolder
from demask.checkpoint.tensors import StoredTensors
from demask.errors import BadInput
from demask.failures import described

COUNTS = re.compile("layer|depth|expert|heads|blocks")  # in names of configs
MANY = 10_000  # more of these than any model has
BUFFER_BYTES = 2**32  # of tables that a class computes, more than those of any


def open_checkpoint(source: Path) -> tuple[Family, ConfigData, StoredTensors]:
    """A folder's class, its config with all keys, and its tensors. Raises BadInput for a folder
    that is incomplete, damaged, quantized in a way that cannot be cut, or of no class of
    transformers."""
    folder = CheckpointFolder.read(source)
    check_counts(folder)
    family = Family.of(source, folder.config)
    data = family.full_config(folder.config)
    try:
        model = family.build(data)
    except Exception as error:
        raise BadInput(
            f"{source}: {family.model.__name__} cannot be built from its config: {described(error)}"
        ) from error
    check_tensors(StoredTensors(folder, model, ()))
    return family, data, StoredTensors(folder, model, find_stacks(family, data, model))


def check_output(source: Path, target: Path) -> None:
    """Raise BadInput where the new folder cannot be written."""
    if "\0" in str(target):
        raise BadInput(f"expected the name of a new folder, got {str(target)!r:.80}")
    if target.exists() or target.is_symlink():
        raise BadInput(f"{target}: exists; give the name of a new folder")
    parent = target.resolve().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise BadInput(f"cannot write {target}: {parent} is no folder that can be written")
    if source.resolve() in (target.resolve(), *target.resolve().parents):
        raise BadInput(f"{target}: expected a folder outside of {source}")


def check_counts(folder: CheckpointFolder) -> None:
    """Raise BadInput where a config counts more layers, experts or heads than a folder has room
    for: some classes make lists of that length before a model is built."""
    for keys, value in numbers_of_config(dict(folder.config)):
        if COUNTS.search(keys[-1]) and value > max(MANY, len(folder.file_of)):
            raise BadInput(
                f"{folder.path / CONFIG}: {'.'.join(keys)} is {value}, and the folder has {len(folder.file_of)} tensors"
            )


def check_tensors(stored: StoredTensors) -> None:
    """Raise BadInput where tensors are not those of the class and config."""
    path, kind = stored.folder.path, type(stored.model)
    for name, parameter in stored.parameter_of.items():
        if parameter is None:
            continue
        here, there = stored.folder.stored(name).shape, stored.shapes[parameter]
        if here != there:
            raise BadInput(f"{path}: {name} is {here}, and {there} by the config; the folder does not fit its class")
    if not any(p is not None for p in stored.parameter_of.values()):
        raise BadInput(f"{path}: none of its tensors belongs to {kind.__name__}")
    ignored = getattr(stored.model, "_keys_to_ignore_on_load_missing", None) or ()
    tied: dict[int, list[str]] = {}
    for name, parameter in stored.model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    for names in tied.values():
        if not any(map(stored.is_stored, names)) and not any(re.search(pattern, names[0]) for pattern in ignored):
            raise BadInput(
                f"{path}: no tensor is {names[0]} of {kind.__name__}, which "
                "transformers draws at random; copy the folder again"
            )
    buffers = sum(b.numel() * b.element_size() for b in stored.model.buffers())
    if buffers > stored.folder.nbytes + BUFFER_BYTES:
        raise BadInput(
            f"{path / CONFIG}: {kind.__name__} computes tables of {buffers:,} bytes; a size in its config is too large"
        )
