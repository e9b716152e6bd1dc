"""LoRA adapters of a checkpoint folder, as peft writes them, that are cut with it.

A weight W [out, in] becomes W + s B A (Hu et al., 2021): lora_A [r, in] has a column for each
position that W reads, lora_B [out, r] a row for each that it computes. They are cut where W is. A
slice may go if it is dead without the adapter and with it: where W, and the rows of B or columns of
A, are zero. DoRA (Liu et al., 2024) also has a magnitude for each row.
"""

from __future__ import annotations

import copy as copies
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from demask.checkpoint.family import LayerStack
from demask.checkpoint.folder import copy_files, cut, cut_shape, find_others, read_json, write_json
from demask.errors import BadInput
from demask.files.weight_file import WeightFile

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LEAVES = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "A",
    ".lora_embedding_B": "B",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
}
# Settings by which an adapter is more than products and copies of weights.
_OTHERS = (
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "megatron_config",
    "velora_config",
    "monteclora_config",
    "arrow_config",
    "kasa_config",
    "alora_invocation_tokens",
)
_ADVICE = "merge it into the folder, and slim that"
# Settings that name modules.
_NAMES = ("target_modules", "exclude_modules", "modules_to_save", "rank_pattern", "alpha_pattern")


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """A tensor of an adapter. parameter: that it changes; role: "A", "B", "magnitude" or, of a
    tensor in its place, "copy"; axes: by axis of the parameter, its own."""

    parameter: str
    role: str
    axes: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """An adapter of a folder."""

    path: Path
    config: Mapping[str, Any]  # its adapter_config.json
    file: WeightFile
    parts: Mapping[str, AdapterPart]  # by tensor
    # by parameter and axis, the positions that it has, where they are fewer than in `file`
    cuts: Mapping[str, Mapping[int, Tensor]]

    @classmethod
    def read(cls, path: Path, model: nn.Module, parameters: Collection[str | None]) -> LoraAdapter:
        """The adapter of a folder. Raises BadInput for what is none, or none of the model.

        Args:
            model: the folder's, on the meta device.
            parameters: those that are tensors of the folder.
        """
        if not (path / ADAPTER_WEIGHTS).is_file():
            raise BadInput(
                f"{path}: expected an adapter folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}, as peft writes it"
            )
        config, file = read_json(path, ADAPTER_CONFIG), WeightFile.read(path / ADAPTER_WEIGHTS)
        kind = config.get("peft_type")
        more = [key for key in _OTHERS if config.get(key)]
        if kind != "LORA" or more or file.unread:
            raise BadInput(
                f"{path}: expected an adapter of type LORA, got {kind!r:.40}"
                f"{f' with {more[0]}' if more else ''}; {_ADVICE}"
            )
        shapes = {name: tuple(p.shape) for name, p in model.state_dict().items() if name in parameters}
        parts: dict[str, AdapterPart] = {}
        for name, stored in file.tensors.items():
            parts[name] = part = _part_of(name, model, shapes, path)
            shape, own = shapes[part.parameter], stored.shape
            if any(axis >= len(own) or own[axis] != shape[k] for k, axis in part.axes.items()):
                raise BadInput(
                    f"{path}: {name} is {own}, and {part.parameter} is {shape}; it is the adapter of another folder"
                )
        return cls(path, config, file, parts, {})

    def tensor(self, name: str) -> Tensor:
        """A tensor, in new memory."""
        return cut(self.file.tensor(self.file.tensors[name]), self._own_cuts(name))

    def _own_cuts(self, name: str) -> dict[int, Tensor]:
        part = self.parts[name]
        own = self.cuts.get(part.parameter, {})
        return {axis: own[k] for k, axis in part.axes.items() if k in own}

    def cut_with(self, parameters: Mapping[str, str | None], cuts: Mapping[str, Mapping[int, Tensor]]) -> LoraAdapter:
        """The adapter of a folder whose tensors are cut.

        Args:
            parameters: by tensor of the folder, the parameter that it is.
            cuts: by tensor and axis, the positions that stay.
        """
        own = {name: dict(axes) for name, axes in self.cuts.items()}
        for name, axes in cuts.items():
            parameter = parameters.get(name)
            for axis, positions in axes.items() if parameter is not None else ():
                before = own.setdefault(str(parameter), {})
                before[axis] = before[axis][positions] if axis in before else positions
        return replace(self, cuts=own)

    def changes(self, prefixes: tuple[str, ...]) -> bool:
        """Whether it changes a parameter whose name begins so."""
        return any(part.parameter.startswith(prefixes) for part in self.parts.values())

    def zeros(self, parameter: str) -> Iterator[dict[int, Tensor]]:
        """For each change of a parameter, by axis the positions at which it leaves zeros zero all
        along the other axes, bool."""
        for name, part in self.parts.items():
            if part.parameter == parameter and part.role == "copy":
                tensor = self.tensor(name)
                yield {k: _zero_along(tensor, k) for k in range(tensor.ndim)}
        every = {
            part.role: (part, self.tensor(name))
            for name, part in self.parts.items()
            if part.parameter == parameter and part.role in "AB"
        }
        nothing = any(not bool(tensor.any()) for _, tensor in every.values())
        if every:
            yield {
                k: _zero_along(tensor, axis) | nothing
                for part, tensor in every.values()
                for k, axis in part.axes.items()
            }

    def applied(self, parameter: str, values: Tensor) -> Tensor:
        """The values of a parameter with the adapter."""
        own = {part.role: (part, name) for name, part in self.parts.items() if part.parameter == parameter}
        if "copy" in own:
            values = self.tensor(own["copy"][1])
        if "A" not in own:
            return values
        a, b = (self.tensor(own[role][1]).float() for role in "AB")
        transposed = 1 in own["B"][0].axes  # of a weight [in, out]
        weight = values.float().T if transposed else values.float()
        weight = weight + self._scaling(parameter, len(a)) * (b @ a)
        if "magnitude" in own:
            magnitude = self.tensor(own["magnitude"][1]).float()
            weight = (magnitude / weight.norm(dim=1))[:, None] * weight
        return (weight.T if transposed else weight).contiguous()

    def _scaling(self, parameter: str, rank: int) -> float:
        module = parameter.rpartition(".")[0]
        alpha = self.config.get("lora_alpha", 8)
        for key, value in (self.config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({key})$", module):
                alpha = value
                break
        return float(alpha) / (rank**0.5 if self.config.get("use_rslora") else rank)

    def write(self, out: Path, base: Path, stacks: Sequence[LayerStack], layers: Mapping[str, Sequence[int]]) -> None:
        """Write it into a new folder.

        Args:
            base: the path of the folder that it is of, for its config.
            stacks: the stacks of layers of the original.
            layers: by stack, the layers that stay.
        """
        names: dict[str, str] = {}
        for name, part in self.parts.items():
            new = part.parameter
            for stack in stacks:
                if (split := stack.split(new)) is not None:
                    left = list(layers[stack.path])
                    new = stack.name(left.index(split[0]), split[1]) if split[0] in left else ""
            if new:
                old, new = (p.rpartition(".")[0] for p in (part.parameter, new))
                names[name.replace(_PREFIX + old, _PREFIX + new, 1)] = name
        stored = self.file.tensors
        hollow = {
            name: torch.empty(cut_shape(stored[old].shape, self._own_cuts(old)), dtype=stored[old].dtype, device="meta")
            for name, old in names.items()
        }
        out.mkdir(exist_ok=True)
        others, _ = find_others(self.path, (ADAPTER_CONFIG, ADAPTER_WEIGHTS))
        copy_files(self.path, others, out)
        WeightFile.write(out / ADAPTER_WEIGHTS, hollow, lambda name: self.tensor(names[name]), self.file.metadata)
        config = {**copies.deepcopy(dict(self.config)), "base_model_name_or_path": str(base)}
        if (chosen := self._layers(stacks, layers)) is not None:
            config["layers_to_transform"] = chosen
        write_json(out / ADAPTER_CONFIG, config)

    def _layers(self, stacks: Sequence[LayerStack], layers: Mapping[str, Sequence[int]]) -> list[int] | None:
        """The setting of layers to change, with their new numbers; None if there is none. Raises
        BadInput where names in settings say numbers of layers, and some are removed."""
        smaller = [stack for stack in stacks if len(layers[stack.path]) != len(stack.kinds)]
        chosen = self.config.get("layers_to_transform")
        chosen = [chosen] if isinstance(chosen, int) else chosen
        if not smaller:
            return chosen
        for key in _NAMES:
            value = self.config.get(key) or ()
            for text in [value] if isinstance(value, str) else value:
                if re.search(r"(^|\W)\d+(\W|$)", text):
                    raise BadInput(
                        f"{self.path / ADAPTER_CONFIG}: {text!r:.80} in {key} says the "
                        "number of a layer, and some are removed"
                    )
        if chosen is not None and len(stacks) > 1:
            raise BadInput(
                f"{self.path / ADAPTER_CONFIG}: layers_to_transform does not say of "
                "which stack of layers, and some are removed"
            )
        left = list(layers[smaller[0].path])
        return None if chosen is None else [left.index(k) for k in chosen if k in left]


def _zero_along(tensor: Tensor, axis: int) -> Tensor:
    """The positions of an axis at which a tensor is zero all along the others, bool."""
    return (tensor == 0).movedim(axis, 0).reshape(tensor.shape[axis], -1).all(1)


def _part_of(name: str, model: nn.Module, shapes: Mapping[str, tuple[int, ...]], path: Path) -> AdapterPart:
    """What a tensor of an adapter is. Raises BadInput for what changes no tensor of the folder.

    shapes: of the parameters that are tensors of the folder.
    """
    own = name.removeprefix(_PREFIX)
    leaf = next((leaf for leaf in _LEAVES if own.endswith(leaf)), None)
    if leaf is None:
        parameter, role = own.replace(".base_layer.", "."), "copy"
    else:
        parameter, role = own.removesuffix(leaf) + ".weight", _LEAVES[leaf]
    if parameter not in shapes:
        raise BadInput(f"{path}: {name} changes {parameter}, which is no tensor of the folder; {_ADVICE}")
    if role == "copy":
        return AdapterPart(parameter, role, {k: k for k in range(len(shapes[parameter]))})
    module = model.get_submodule(parameter.rpartition(".")[0])
    transposed = isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D"
    if not (transposed or isinstance(module, nn.Linear)):
        raise BadInput(f"{path}: {name} changes a {type(module).__name__}, which is not cut; {_ADVICE}")
    rows, columns = (1, 0) if transposed else (0, 1)
    return AdapterPart(parameter, role, {columns: 1} if role == "A" else {rows: 0})
