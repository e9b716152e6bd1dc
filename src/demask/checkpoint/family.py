"""Families of models: a class of transformers, its configs, and its stacks of layers.

Nothing here names a family. What a config says of a number of layers shows by changing it and
building the class on the meta device; layers are of one kind where their modules agree.
"""

from __future__ import annotations

import copy as copies
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from demask.compat.transformers_names import decoded_config
from demask.errors import BadInput, NotExportable
from demask.failures import described
from demask.installation import install_command

ConfigData = dict[str, Any]  # a config as in config.json
Keys = tuple[str, ...]  # of a number in it, from the outside in
# Lists of configs whose numbers are layers, and flags by which a layer's number is in the
# mathematics, so that layers cannot be renumbered.
LISTS_OF_LAYERS = ("mlp_only_layers", "full_attn_idxs", "attn_layer_indices")
NUMBERED = ("scale_attn_by_inverse_layer_idx",)
_NO_LISTS = ("token", "_id", "_ids", "size", "shape", "lang")


@dataclass(frozen=True, slots=True)
class Family:
    """A class of transformers and the class of its configs."""

    model: Any
    config: Any

    @classmethod
    def of(cls, folder: Path, data: Mapping[str, Any]) -> Family:
        """The classes that a folder's config names. Raises BadInput where transformers is missing
        or has none."""
        try:
            import transformers
        except ModuleNotFoundError as error:
            message = f"checkpoint folders need transformers: {install_command('transformers')}"
            raise BadInput(message) from error
        names, kind = data.get("architectures") or [], data.get("model_type")
        if data.get("auto_map"):
            raise BadInput(
                f"{folder}: its code is in the folder (auto_map), which demask does not "
                "run; only classes of transformers are read"
            )
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise BadInput(f"{folder}: expected one class in `architectures`, got {names!r:.80}")
        try:
            model = getattr(transformers, names[0], None)
        except Exception as error:  # another package that the class needs, missing or broken
            raise BadInput(
                f"transformers cannot import {names[0]:.80}: {described(error)}; try "
                f"`from transformers import {names[0]:.80}`"
            ) from error
        if not (isinstance(model, type) and issubclass(model, transformers.PreTrainedModel)):
            raise BadInput(f"{folder}: transformers {transformers.__version__} has no {names[0]!r:.80}")
        config = transformers.AutoConfig.for_model(str(kind)) if kind else None
        kind = type(config) if config is not None else model.config_class
        return cls(model, kind)

    def build(self, data: Mapping[str, Any]) -> nn.Module:
        """A model on the meta device. Raises what the classes raise."""
        with torch.device("meta"):
            return self.model(self.config.from_dict(copies.deepcopy(dict(data)))).eval()

    def try_build(self, data: Mapping[str, Any]) -> nn.Module | None:
        """A model on the meta device, or None where the classes refuse a config."""
        try:
            return self.build(data)
        except Exception:  # in the words of any library
            return None

    def full_config(self, data: Mapping[str, Any]) -> ConfigData:
        """A config with all keys of its class."""
        try:
            data = decoded_config(self.config, copies.deepcopy(dict(data)))
            return self.config.from_dict(data).to_dict()
        except Exception as error:
            raise BadInput(f"{self.config.__name__} refuses the config: {described(error)}") from error


def as_class(family: Family, data: ConfigData, name: str, changes: Mapping[str, Any]) -> tuple[Family, ConfigData]:
    """Another class and its config, with all its keys: what a config says, and `changes`, without
    the keys that only the class before has."""
    changed = {**copies.deepcopy(data), "architectures": [name], **changes}
    other = Family.of(Path(name), changed)
    gone = family.config().to_dict().keys() - other.config().to_dict().keys()
    return other, other.full_config({k: v for k, v in changed.items() if k not in gone})


def slides(config: Any) -> bool:
    """Whether a layer attends to fewer tokens than all, in a window that slides."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    return getattr(config, "sliding_window", None) is not None


@dataclass(frozen=True, slots=True)
class LayerStack:
    """A list of layers in a model."""

    path: str  # "model.layers"
    count: Keys  # the keys of its length in the config; () if none says it
    kinds: tuple[int, ...]  # per layer, the first layer of the same kind: of equal modules, numbers and shapes

    def name(self, layer: int, inside: str) -> str:
        """The full name of a tensor in a layer."""
        return f"{self.path}.{layer}.{inside}"

    def split(self, name: str) -> tuple[int, str] | None:
        """The layer of a tensor and its name in it; None for tensors that are in no layer."""
        if not name.startswith(self.path + "."):
            return None
        number, _, inside = name[len(self.path) + 1 :].partition(".")
        return (int(number), inside) if number.isdigit() and inside else None


def find_stacks(family: Family, data: ConfigData, model: nn.Module) -> tuple[LayerStack, ...]:
    """The stacks of layers of a model, the outermost ones."""
    stacks: list[LayerStack] = []
    taken: set[Keys] = set()
    for path, module in model.named_modules():
        inner = any(path.startswith(stack.path + ".") for stack in stacks)
        if not isinstance(module, nn.ModuleList) or not len(module) or inner:
            continue
        if next(module.parameters(), None) is None:
            continue
        count = _find_count(family, data, path, len(module), taken)
        taken.add(count)
        layers = list(module)
        signatures = describe_layers(layers, find_own_numbers(layers))
        stacks.append(LayerStack(path, count, tuple(signatures.index(s) for s in signatures)))
    return tuple(stacks)


def _find_count(family: Family, data: ConfigData, path: str, size: int, taken: set[Keys]) -> Keys:
    """The keys of the number that says how many layers a stack has."""
    for keys, value in numbers_of_config(data):
        if value != size or keys in taken:
            continue
        other = family.try_build(with_layers(data, keys, [*range(size), size - 1]))
        if other is not None and len(_layers(other, path)) == size + 1:
            return keys
    return ()


def numbers_of_config(data: ConfigData, keys: Keys = ()) -> Iterator[tuple[Keys, int]]:
    """The integers of a config and of those in it."""
    for key, value in data.items():
        if type(value) is int:
            yield (*keys, key), value
        elif isinstance(value, dict):
            yield from numbers_of_config(value, (*keys, key))


def with_layers(data: ConfigData, count: Keys, layers: Sequence[int]) -> ConfigData:
    """A config with these layers of a stack, in this order: also in the lists that have one entry
    per layer, or that list layers."""
    other = copies.deepcopy(data)
    part = other
    for key in count[:-1]:
        part = part[key]
    size = part[count[-1]]
    part[count[-1]] = len(layers)
    for key, value in part.items():
        if not isinstance(value, list) or key.endswith(_NO_LISTS):
            continue
        if key in LISTS_OF_LAYERS:
            part[key] = [new for new, old in enumerate(layers) if old in value]
        elif len(value) == size:
            part[key] = [value[k] for k in layers]
    return other


def _layers(model: nn.Module, path: str) -> list[nn.Module]:
    return list(model.get_submodule(path).children())


def find_own_numbers(layers: Sequence[nn.Module]) -> set[tuple[str, str]]:
    """The attributes, by the path of a module in its layer, that are the layer's number in every
    layer. Of a single layer, whose number is 0, those that are named so."""
    attributes = [_attributes_of(layer) for layer in layers]
    own = {
        key for key in attributes[0] if all(type(a.get(key)) is int and a[key] == k for k, a in enumerate(attributes))
    }
    return {key for key in own if len(layers) > 1 or "idx" in key[1] or "index" in key[1]}


def describe_layers(layers: Sequence[nn.Module], own: Collection[tuple[str, str]]) -> list[tuple[Any, ...]]:
    """By layer, what distinguishes it from others: classes, shapes, numbers, flags and texts of its
    modules. own: the attributes that are its number."""
    return [
        (
            tuple((path, type(module).__name__) for path, module in layer.named_modules()),
            tuple((name, tuple(p.shape)) for name, p in layer.named_parameters()),
            tuple(sorted((k, repr(v)) for k, v in _attributes_of(layer).items() if k not in own)),
        )
        for layer in layers
    ]


def _attributes_of(layer: nn.Module) -> dict[tuple[str, str], Any]:
    return {
        (path, name): value
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if _distinguishes(name, value)
    }


def _distinguishes(name: str, value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(v, int | float | str) for v in value)
    return not name.startswith("_") and isinstance(value, int | float | str | None)


def keep_layers(
    family: Family, data: ConfigData, stacks: Sequence[LayerStack], layers: Mapping[str, Sequence[int]]
) -> ConfigData | None:
    """A config of which the layers are those of `layers`, by stack; None where its class builds
    others: a config may derive what a layer is from its number."""
    before = family.build(data)
    other = data
    for stack in stacks:
        chosen = layers[stack.path]
        if len(chosen) != len(stack.kinds):
            if not stack.count or any(_flag(data, key) for key in NUMBERED):
                return None
            other = with_layers(other, stack.count, chosen)
    after = family.try_build(other)
    if after is None:
        return None
    for stack in stacks:
        old, new = _layers(before, stack.path), _layers(after, stack.path)
        own = find_own_numbers(old)
        old, new = describe_layers(old, own), describe_layers(new, own)
        if new != [old[k] for k in layers[stack.path]]:
            return None
    return other


def _flag(data: Mapping[str, Any], key: str) -> bool:
    return any(
        value is True if name == key else isinstance(value, dict) and _flag(value, key) for name, value in data.items()
    )


def reduced_config(
    family: Family, data: ConfigData, stacks: Sequence[LayerStack]
) -> tuple[ConfigData, dict[str, list[int]]]:
    """A config with one layer of each kind, and these layers, by stack; with as many as its class
    needs to build them. Raises NotExportable where only the full number works and that is large."""
    one = {s.path: sorted(set(s.kinds)) for s in stacks}
    first = {s.path: list(range(max(s.kinds) + 1)) for s in stacks}
    every = {s.path: list(range(len(s.kinds))) for s in stacks}
    for layers in (one, first, every):
        reduced = keep_layers(family, data, stacks, layers)
        if reduced is not None:
            return reduced, layers
    raise NotExportable("its layers cannot be built again from its config", "unknown", "report it")
