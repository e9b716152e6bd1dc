"""`slim()`: a masked checkpoint folder becomes a smaller one that computes the same.

    folder -> family, stacks of layers -> slices, by the op table -> zeros of the tensors
           -> fates of slices, in a small network -> sizes that a config can say -> tensors

One tensor at a time is in memory.
"""

from __future__ import annotations

import contextlib
import copy as copies
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from demask.checkpoint.family import Family, find_stacks, numbers_of_config
from demask.checkpoint.folder import (
    CONFIG,
    INDEX,
    SINGLE,
    STATE,
    CheckpointFolder,
    write_index,
    write_json,
)
from demask.checkpoint.plan import CheckpointPlan, plan_checkpoint
from demask.checkpoint.proof import prove
from demask.checkpoint.report import CheckpointReport, describe_plan
from demask.checkpoint.sizes import apply_changes
from demask.checkpoint.targets import TARGETS
from demask.checkpoint.tensors import StoredTensors
from demask.errors import BadInput, NotExportable
from demask.failures import CallFailed, described, public
from demask.files import atomic_write as atomic
from demask.files.weight_file import WeightFile
from demask.machine.allocator import release_free_memory
from demask.progress import ProgressStep

MULTIPLE = 64  # of units: what quantizers and kernels of the loaders take
COUNTS = re.compile("layer|depth|expert|heads|blocks")  # in names of configs
MANY = 10_000  # more of these than any model has
BUFFER_BYTES = 2**32  # of tables that a class computes, more than those of any


def _silent(title: str, done: int = 1) -> None:
    """A step that shows nothing."""


@public
def slim(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    target: str = "transformers",
    multiple: int = MULTIPLE,
    check: bool = True,
    progress: ProgressStep = _silent,
) -> CheckpointReport:
    """Write a checkpoint folder that computes the same as a masked one, with smaller tensors.

    Removed is what zeros make useless, by the op table: units of feed-forward layers and experts,
    heads of attention with the keys and values that they share, layers that return their inputs.
    A unit that is always the same number goes into the bias that reads it. The result is a folder
    of the same class that `from_pretrained` and other loaders read. Its config has one size for all
    layers, so each keeps as many zeros as the layer with most live units or heads needs.

    Args:
        folder: a folder of Hugging Face: config.json, safetensors files, an index if there are
            several. Its class must be one of transformers, whose code is not in the folder.
        out: the new folder. It appears complete or not at all; while it is written, it is
            `out` + ".partial", from which a later call with the same arguments goes on.
        target: what is to load the folder: "transformers" (default), "vllm" or "mlx". They differ
            in whether they load a family with fewer heads.
        multiple: units are rounded up to a multiple of it, 64 by default: libraries that quantize
            or multiply in blocks take no others.
        check: whether the result is loaded with transformers and compared with the original, for
            texts of two lengths, with padding, and 32 tokens one by one, before it appears.
        progress: called with a text at each step.

    Returns:
        What was removed, and the sizes before and after.

    Raises:
        BadInput: the folder is incomplete or damaged, or `out` exists.
        NotExportable: transformers cannot build or run the class, or it cannot be captured.
        Mismatch: the result computes something else.
    """
    source, final = Path(folder), Path(out)
    if multiple < 1:
        raise BadInput(f"expected a multiple of at least 1, got {multiple}")
    if target not in TARGETS:
        raise BadInput(f"expected a target of {', '.join(TARGETS)}, got {target!r}")
    check_output(source, final)
    progress("reading the headers")
    stored_folder = CheckpointFolder.read(source)
    if "quantization_config" in stored_folder.config:
        kind = stored_folder.config["quantization_config"]
        name = kind.get("quant_method", "?") if isinstance(kind, dict) else "?"
        raise BadInput(f"{source}: its weights are quantized ({name}), which are not cut; slim the "
                       "folder that they were quantized from, and quantize the result")  # fmt: skip
    check_counts(stored_folder)
    family = Family.of(source, stored_folder.config)
    data = family.full_config(stored_folder.config)
    try:
        model = family.build(data)
    except Exception as error:
        raise BadInput(f"{source}: {family.model.__name__} cannot be built from its config: "
                       f"{described(error)}") from error  # fmt: skip
    check_tensors(StoredTensors(stored_folder, model, ()))
    stored = StoredTensors(stored_folder, model, find_stacks(family, data, model))
    try:
        plan = plan_checkpoint(stored, family, data, TARGETS[target], multiple, progress)
    except CallFailed as error:
        raise NotExportable(f"what its zeros make useless is not known ({error})", "unknown",
                            "its checkpoint stays as it is") from error  # fmt: skip
    config = copies.deepcopy(dict(stored_folder.config))
    apply_changes(config, data, plan.config)
    partial = final.with_name(final.name + ".partial")
    with unfinished_folder(partial, fingerprint(stored_folder, target, multiple)):
        write_tensors(stored, plan, partial, progress)
        for name in stored_folder.others:
            shutil.copyfile(source / name, partial / name)
        write_json(partial / CONFIG, config)
        proof = prove(family, source, partial, bool(plan.added), progress) if check else None
        os.replace(partial, final)
        (final / STATE).unlink()
    return describe_plan(stored, plan, final, proof)


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
            raise BadInput(f"{folder.path / CONFIG}: {'.'.join(keys)} is {value}, and the folder "
                           f"has {len(folder.file_of)} tensors")  # fmt: skip


def check_tensors(stored: StoredTensors) -> None:
    """Raise BadInput where tensors are not those of the class and config."""
    path, kind = stored.folder.path, type(stored.model)
    for name, parameter in stored.parameter_of.items():
        if parameter is None:
            continue
        here, there = stored.folder.stored(name).shape, stored.shapes[parameter]
        if here != there:
            raise BadInput(f"{path}: {name} is {here}, and {there} by the config; "
                           "the folder does not fit its class")  # fmt: skip
    if not any(p is not None for p in stored.parameter_of.values()):
        raise BadInput(f"{path}: none of its tensors belongs to {kind.__name__}")
    ignored = getattr(stored.model, "_keys_to_ignore_on_load_missing", None) or ()
    tied: dict[int, list[str]] = {}
    for name, parameter in stored.model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    for names in tied.values():
        if not any(map(stored.is_stored, names)) and not any(
            re.search(pattern, names[0]) for pattern in ignored
        ):
            raise BadInput(
                f"{path}: no tensor is {names[0]} of {kind.__name__}, which "
                "transformers fills with random numbers; copy the folder again"
            )
    buffers = sum(b.numel() * b.element_size() for b in stored.model.buffers())
    if buffers > stored.folder.nbytes + BUFFER_BYTES:
        raise BadInput(f"{path / CONFIG}: {kind.__name__} computes tables of {buffers:,} bytes; a "
                       "size in its config is too large")  # fmt: skip


def fingerprint(folder: CheckpointFolder, target: str, multiple: int) -> str:
    """A hash of the origin of a folder, to tell whether an unfinished one can go on."""
    files = {name: (file.size, file.modified) for name, file in folder.files.items()}
    text = json.dumps([str(folder.path.resolve()), dict(folder.config), files, target, multiple,
                       version("demask")])  # fmt: skip
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def unfinished_folder(path: Path, state: str) -> Iterator[None]:
    """An unfinished folder that this process alone writes, with the complete files of an earlier
    call with the same state. It stays where the block raises."""
    with atomic.locked_folder(path):
        names = [name for name in os.listdir(path) if not name.startswith(atomic.PREFIX)]
        if names and STATE not in names:
            raise BadInput(f"{path}: exists, and no unfinished folder of demask; remove it")
        if names and (path / STATE).read_text() != state:
            for entry in os.scandir(path):
                os.unlink(entry)
        with atomic.write(path / STATE) as file:
            file.write(state.encode())
        yield


def write_tensors(
    stored: StoredTensors, plan: CheckpointPlan, target: Path, step: ProgressStep
) -> None:
    """Write the tensors that stay into files of the same names, and their index. Files that are
    complete stay."""
    folder, written = stored.folder, dict[str, WeightFile]()
    for number, (file_name, file) in enumerate(folder.files.items(), 1):
        names: dict[str, str] = {}
        for name in file.tensors:
            new = new_name(stored, plan, name)
            if new is not None:
                names[new] = name
        step(f"writing file {number} of {len(folder.files)}")
        hollow = {new: torch.empty(cut_shape(stored, plan, name), dtype=folder.stored(name).dtype,
                                   device="meta") for new, name in names.items()}  # fmt: skip
        path = target / file_name
        if path.exists():
            written[file_name] = WeightFile.read(path)
            continue

        def read(new: str, names: Mapping[str, str] = names) -> Tensor:
            release_free_memory()
            return cut_tensor(stored, plan, names[new])

        written[file_name] = WeightFile.write(path, hollow, read, file.metadata)
    if set(written) != {SINGLE} or INDEX in os.listdir(folder.path):
        write_index(target, written)


def new_name(stored: StoredTensors, plan: CheckpointPlan, name: str) -> str | None:
    """The name of a tensor in the new folder; None for one in a layer that goes."""
    at = stored.layer_of(name)
    if at is None:
        return name
    stack, layer = at
    layers = list(plan.layers[stack.path])
    return stored.renumbered(name, layers.index(layer)) if layer in layers else None


def cut_shape(stored: StoredTensors, plan: CheckpointPlan, name: str) -> tuple[int, ...]:
    """The shape of a tensor that is written."""
    shape = list(stored.folder.stored(name).shape)
    for axis, positions in plan.cuts.get(name, {}).items():
        shape[axis] = positions.shape[-1]
    return tuple(shape)


def cut_tensor(stored: StoredTensors, plan: CheckpointPlan, name: str) -> Tensor:
    """A tensor that is written."""
    tensor = stored.folder.tensor(name)
    for axis, positions in plan.cuts.get(name, {}).items():
        if positions.ndim == 1:
            tensor = tensor.index_select(axis, positions)
        else:
            tensor = torch.stack([t.index_select(axis - 1, p)
                                  for t, p in zip(tensor, positions, strict=True)])  # fmt: skip
    if name in plan.added:
        tensor = (tensor.double() + plan.added[name]).to(tensor.dtype)
    return tensor
