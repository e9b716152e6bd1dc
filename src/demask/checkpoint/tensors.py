"""Which tensors of a folder are which parameters, and where their zeros are.

A parameter of a model is a tensor of the same name, another name, or several tensors: experts of
one layer are stored one by one in many folders, and one tensor in the model.
Folders that are to be changed are opened here, with all checks before any work.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.checkpoint.adapter import LoraAdapter
from demask.checkpoint.family import ConfigData, Family, LayerStack, find_stacks, numbers_of_config
from demask.checkpoint.folder import CONFIG, CheckpointFolder
from demask.compat.transformers_names import parameters_of_files, tensors_of_files
from demask.errors import BadInput, DemaskError
from demask.failures import described

COUNTS = re.compile("layer|depth|expert|heads|blocks")  # in names of configs
MANY = 10_000  # more of these than any model has
BUFFER_BYTES = 2**32  # of tables that a class computes, more than those of any
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True, slots=True, eq=False)
class StoredPart:
    """A tensor of a folder that is an axis of a parameter, or a part of it."""

    tensor: str  # its name in the folder
    axis: int
    positions: Tensor | None = None  # int64, the parameter's position of each of its own; None: the same
    expert: int | None = None  # the position along the parameter's first axis, if it is of one expert


@dataclass(frozen=True, slots=True, eq=False)
class ZeroPattern:
    """Where a tensor is zero."""

    everywhere: bool
    # bool of the length, True where it is zero all along the other axes; of a tensor of three axes, for each
    # position of the first: [first axis, length]
    axes: Mapping[int, Tensor]


class StoredTensors:
    """The tensors of a folder, as the parameters of its model.

    Args:
        folder: the folder.
        model: its model, on the meta device.
        stacks: the model's stacks of layers.
        adapter: changes of parameters that may be applied or not: what is zero is so in both cases.
    """

    def __init__(
        self, folder: CheckpointFolder, model: Any, stacks: Sequence[LayerStack], adapter: LoraAdapter | None = None
    ):
        self.folder, self.model, self.stacks, self.adapter = folder, model, stacks, adapter
        self.parameter_of = parameters_of_files(model, folder.file_of)
        self.shapes = {name: tuple(p.shape) for name, p in model.state_dict().items()}
        self._name_of = {p: t for t, p in self.parameter_of.items() if p is not None}
        self._patterns: dict[str, ZeroPattern] = {}
        self._parts: dict[tuple[str, int], list[StoredPart]] = {}

    def parts(self, parameter: str, axis: int) -> list[StoredPart]:
        """The tensors that an axis of a parameter is stored in; [] if that is not known."""
        if (parameter, axis) not in self._parts:
            self._parts[parameter, axis] = self._find_parts(parameter, axis)
        return self._parts[parameter, axis]

    def _find_parts(self, parameter: str, axis: int) -> list[StoredPart]:
        if (name := self._name_of.get(parameter)) is not None:
            same = self.folder.stored(name).shape == self.shapes[parameter]
            return [StoredPart(name, axis)] if same else []
        shape = self.shapes.get(parameter, ())
        if len(shape) != 3:
            return []
        experts = torch.arange(shape[0]).view(-1, 1, 1) * shape[axis]
        marks = torch.arange(shape[axis]).view([-1 if k == axis else 1 for k in range(3)]) + experts
        try:
            stored = tensors_of_files(self.model, {parameter: marks})
        except Exception:  # an op on tensors of other sizes
            return []
        parts: list[StoredPart] = []
        for name, tensor in stored.items():
            numbers = tensor.reshape(-1)
            expert = int(numbers[0]) // shape[axis]
            full = self.folder.stored(name).shape if name in self.folder.file_of else ()
            along = [k for k, n in enumerate(tensor.shape) if n == numbers.numel()]
            is_expert = tensor.ndim == 2 and (numbers // shape[axis] == expert).all()
            if not is_expert or len(along) != 1 or len(full) != 2 or full[along[0]] != len(numbers):
                return []
            parts.append(StoredPart(name, along[0], numbers % shape[axis], expert))
        return parts

    def zeros(self, parameter: str, axis: int) -> Tensor | None:
        """Where a parameter is zero along an axis, bool [experts, length], of one expert if it has
        none; None if it is not known how it is stored."""
        parts = self.parts(parameter, axis)
        if not parts:
            return None
        if parts[0].expert is None:
            zeros = self.pattern(parts[0].tensor).axes[axis]
            return zeros if zeros.ndim == 2 else zeros[None]
        shape = self.shapes[parameter]
        result = torch.ones(shape[0], shape[axis], dtype=torch.bool)
        for part in parts:
            assert part.expert is not None
            result[part.expert, part.positions] = self.pattern(part.tensor).axes[part.axis]
        return result

    def merged(self, parameter: str) -> Tensor:
        """The values of a parameter that is several tensors."""
        result: Tensor | None = None
        for part in self.parts(parameter, 1):
            values = self.folder.tensor(part.tensor)
            if result is None:
                result = torch.empty(self.shapes[parameter], dtype=values.dtype)
            result[part.expert, part.positions] = values if part.axis == 0 else values.T
        assert result is not None
        return result

    def is_stored(self, parameter: str) -> bool:
        """Whether a parameter is one tensor of the folder, or several."""
        return parameter in self._name_of or bool(self.parts(parameter, 1))

    def pattern(self, name: str) -> ZeroPattern:
        """Where a tensor of the folder is zero. It is read once, in blocks."""
        if name not in self._patterns:
            pattern, parameter = _read_pattern(self.folder, name), self.parameter_of.get(name)
            if self.adapter is not None and parameter is not None:
                for zeros in self.adapter.zeros(parameter):
                    axes = {k: z & zeros[k] if k in zeros else z for k, z in pattern.axes.items()}
                    everywhere = pattern.everywhere and all(bool(z.all()) for z in zeros.values())
                    pattern = ZeroPattern(everywhere, axes)
            self._patterns[name] = pattern
        return self._patterns[name]

    def is_zero(self, parameter: str) -> bool:
        """Whether a parameter that is one tensor is zero everywhere."""
        name = self._name_of.get(parameter)
        return name is not None and self.pattern(name).everywhere

    def name_of(self, parameter: str) -> str | None:
        """The tensor that is a parameter; None if there is none, or several."""
        return self._name_of.get(parameter)

    @cached_property
    def numbered(self) -> dict[str, tuple[str, ...]]:
        """By stack, the parts of names in the folder before the number of a layer."""
        prefixes: dict[str, tuple[str, ...]] = {}
        for stack in self.stacks:
            for name, parameter in self.parameter_of.items():
                split = None if parameter is None else stack.split(parameter)
                if split is None:
                    continue
                parts = name.split(".")
                at = len(parts) - split[1].count(".") - 2
                if at >= 0 and parts[at] == str(split[0]):
                    prefixes[stack.path] = tuple(parts[:at])
                    break
        return prefixes

    def layer_of(self, name: str) -> tuple[LayerStack, int] | None:
        """The layer that a tensor of the folder is in, by its name there."""
        parts = tuple(name.split("."))
        for stack in self.stacks:
            prefix = self.numbered.get(stack.path)
            if prefix is not None and parts[: len(prefix)] == prefix and len(parts) > len(prefix) + 1:
                number = parts[len(prefix)]
                if number.isdigit() and int(number) < len(stack.kinds):
                    return stack, int(number)
        return None

    def renumbered(self, name: str, layer: int) -> str:
        """The name of a tensor in a layer of another number."""
        at = self.layer_of(name)
        if at is None:
            raise DemaskError(f"{name} is in no layer")
        parts = name.split(".")
        parts[len(self.numbered[at[0].path])] = str(layer)
        return ".".join(parts)


def _read_pattern(folder: CheckpointFolder, name: str) -> ZeroPattern:
    """Where a tensor is zero, read in blocks of rows. The bits of numbers along an axis are zero,
    but for the sign, where all bits of all of them together are."""
    stored = folder.stored(name)
    rank, integers = len(stored.shape), _INTEGERS.get(stored.dtype.itemsize)
    if rank == 0 or 0 in stored.shape or integers is None:
        return ZeroPattern(not folder.tensor(name).any(), {})
    sign = torch.iinfo(integers).min if stored.dtype.is_floating_point else 0
    rows, others = list[np.ndarray](), dict[int, np.ndarray]()
    each = rank == 3  # of three axes: for each position of the first one
    for _, block in folder.blocks(name):
        bits = block.view(integers).numpy()
        rows.append(np.bitwise_or.reduce(bits.reshape(len(bits), -1), 1))
        for axis in range(1, rank):
            rest = tuple(k for k in range(int(each), rank) if k != axis)
            own = np.bitwise_or.reduce(bits, rest)
            join = (lambda a, b: np.concatenate([a, b])) if each else np.bitwise_or
            others[axis] = own if axis not in others else join(others[axis], own)
    axes = {0: np.concatenate(rows), **others}
    zero = {axis: torch.from_numpy((bits & ~np.array(sign, bits.dtype)) == 0) for axis, bits in axes.items()}
    return ZeroPattern(bool(zero[0].all()), zero)


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
