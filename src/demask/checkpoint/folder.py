"""Checkpoint folders of Hugging Face: a config, tensors in one or several safetensors files, an
index, and files that belong to the model, such as the tokenizer's.

Format of the index: https://huggingface.co/docs/safetensors and `model.safetensors.index.json`,
{"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}.

Weights of 8 bits (float8 or int8) have scales: their values are the products with them, one for all of a
weight, for each row, or for each block of rows and columns. As they are written by transformers (fp8,
fbgemm_fp8), and by llm-compressor and vLLM (compressed-tensors).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from demask.checkpoint.packed_weights import METHOD, PackedWeight, read_layers
from demask.errors import BadInput, DemaskError, RefusedFile
from demask.files import atomic_write as atomic
from demask.files.bounded_read import MAX_JSON_BYTES, open_plain, parse_json
from demask.files.weight_file import StoredTensor, WeightFile
from demask.sparse.products.packed import PackedMatrix, check_tensors
from demask.sparse.products.packed_product import to_dense

QUANTIZATION = "quantization_config"
_QUANTIZATION_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors")
_COMPRESSED_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")  # of compressed-tensors
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_SCALE_SUFFIXES = ("_scale_inv", "_scale")
_QUANTIZED_ADVICE = "slim the folder that they were quantized from, and quantize the result"
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MODULES = "modules.json"  # of sentence-transformers: a list of modules, with their folders
STATE = "demask-partial.txt"  # in an unfinished folder: a hash of its origin
BLOCK_BYTES = 16 * 2**20  # of a tensor that is read in blocks
# Files of weights in other formats, which describe the network with its zeros.
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint folder, of which the config and the headers were read."""

    path: Path
    config: Mapping[str, Any]  # its config.json
    files: Mapping[str, WeightFile]  # of tensors, by name, in the order of the index
    file_of: Mapping[str, str]  # by tensor
    # files that are copied, also from folders in it: the tokenizer's, the generation config, texts, and the
    # modules that sentence-transformers runs after this one
    others: tuple[str, ...]
    left: tuple[str, ...]  # what is not copied: weights in other formats, links to folders
    scales: Mapping[str, Scale]  # by weight of 8 bits

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> CheckpointFolder:
        """The folder at `path`.

        Raises:
            BadInput: no folder, a file is missing, truncated or not what the index says, or the
                tensors are not in safetensors files.
            RefusedFile: a file out of bounds, or a link or name that leaves the folder.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise BadInput(f"{folder}: expected a checkpoint folder with {CONFIG} and {SINGLE}")
        config = read_json(folder, CONFIG)
        index = read_json(folder, INDEX)["weight_map"] if (folder / INDEX).exists() else None
        if index is None and not (folder / SINGLE).exists():
            pickles = sorted(p.name for p in folder.glob("*.bin"))
            advice = (
                f"; it has {pickles[0]}: read it with transformers' from_pretrained, and write it "
                "with save_pretrained, which makes safetensors files"
                if pickles
                else ""
            )
            raise BadInput(f"{folder}: expected {SINGLE} or {INDEX}{advice}")
        if index is not None and not (isinstance(index, dict) and all(isinstance(v, str) for v in index.values())):
            raise BadInput(f"{folder / INDEX}: expected the file of each tensor in weight_map")
        names = [SINGLE] if index is None else list(dict.fromkeys(index.values()))
        files = {name: WeightFile.read(_path_inside(folder, name)) for name in names}
        file_of: dict[str, str] = {}
        for name, file in files.items():
            if file.unread:
                raise BadInput(
                    f"{folder / name}: {file.unread[0]} and {len(file.unread) - 1} more "
                    "tensors have a dtype that demask does not read"
                )
            file_of |= dict.fromkeys(file.tensors, name)
        if index is not None and index != file_of:
            tensor = min(t for t in index.keys() | file_of.keys() if index.get(t) != file_of.get(t))
            raise BadInput(
                f"{folder / INDEX}: {tensor} is said to be in {index.get(tensor)}, and "
                f"is in {file_of.get(tensor)}; write the index again"
            )
        if not file_of:
            raise BadInput(f"{folder}: its files have no tensors")
        others, left = find_others(folder, names)
        settings = config.get(QUANTIZATION)
        if isinstance(settings, dict) and settings.get("quant_method") == METHOD:
            packed = read_layers(settings, str(folder / CONFIG))
            return PackedFolder.of(folder, config, files, file_of, others, left, packed)
        shapes = {tensor: files[name].tensors[tensor] for tensor, name in file_of.items()}
        scales = find_scales(folder, config, shapes)
        return cls(folder, config, files, file_of, others, left, scales)

    def stored(self, name: str) -> StoredTensor:
        """What the headers say of a tensor."""
        return self.files[self.file_of[name]].tensors[name]

    def tensor(self, name: str) -> Tensor:
        """The values of a tensor, in new memory: of a weight of 8 bits the products with its
        scales, float32."""
        scale = self.scales.get(name)
        values = self.written(name)
        return values if scale is None else scale.values(values, self.written(scale.name))

    def written(self, name: str) -> Tensor:
        """A tensor as it is in its file, in new memory."""
        return self.files[self.file_of[name]].tensor(self.stored(name))

    def blocks(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """The first row and the values of each block of rows of a tensor (first axis), in memory
        that the next block overwrites."""
        stored = self.stored(name)
        rows = max(1, BLOCK_BYTES // max(1, stored.row_bytes))
        buffer = self._buffer
        if rows * stored.row_bytes > len(buffer):
            buffer = torch.empty(rows * stored.row_bytes, dtype=torch.uint8)
        return self.files[self.file_of[name]].blocks(stored, rows, buffer)

    @cached_property
    def _buffer(self) -> Tensor:
        """Memory for one block, used again: freed blocks between small results stay resident."""
        return torch.empty(BLOCK_BYTES, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for file in self.files.values() for t in file.tensors.values())

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(t.nbytes // t.dtype.itemsize for file in self.files.values() for t in file.tensors.values())


@dataclass(frozen=True)
class PackedFolder(CheckpointFolder):
    """A folder with packed weights, as if they were dense. Its config does not say that they are packed."""

    packed: Mapping[str, PackedWeight]  # by weight
    stored_files: Mapping[str, WeightFile]  # with the tensors that are there

    @classmethod
    def of(
        cls,
        path: Path,
        config: Mapping[str, Any],
        files: Mapping[str, WeightFile],
        file_of: Mapping[str, str],
        others: tuple[str, ...],
        left: tuple[str, ...],
        layers: Mapping[str, PackedWeight],
    ) -> PackedFolder:
        """Raises BadInput where tensors are not what the config says of a layer."""
        tensors = {name: dict(file.tensors) for name, file in files.items()}
        dense_file_of = dict(file_of)
        for layer, weight in layers.items():
            names = weight.names(layer)
            own = [files[file_of[name]].tensors[name] for name in names if name in file_of]
            dtype = own[0].dtype if own and weight.dtype is None else torch.float32
            expected = [(t.dtype, tuple(t.shape)) for t in weight.empty(dtype).all_tensors]
            if [(t.dtype, t.shape) for t in own] != expected:
                raise BadInput(f"{path}: {layer} is {weight.form} by {CONFIG}, but its tensors are not; copy it again")
            first = file_of[names[0]]
            for name in (*names, *({f"{layer}.weight"} & file_of.keys())):
                del tensors[dense_file_of.pop(name)][name]
            tensors[first][f"{layer}.weight"] = StoredTensor(f"{layer}.weight", dtype, weight.size, 0)
            dense_file_of[f"{layer}.weight"] = first
        dense_files = {name: replace(file, tensors=tensors[name]) for name, file in files.items()}
        packed = {f"{layer}.weight": weight for layer, weight in layers.items()}
        config = {key: value for key, value in config.items() if key != QUANTIZATION}
        return cls(path, config, dense_files, dense_file_of, others, left, {}, packed, files)

    def written(self, name: str) -> Tensor:
        weight = self.packed.get(name)
        if weight is None:
            return super().written(name)
        stored = {part: file for file in self.stored_files.values() for part in file.tensors}
        tensors = [stored[part].tensor(stored[part].tensors[part]) for part in weight.names(name.rpartition(".")[0])]
        scale = tensors.pop() if weight.dtype == torch.int8 else None
        matrix = PackedMatrix(weight.form, weight.size, tuple(tensors), scale)
        check_tensors(matrix)
        return to_dense(matrix, self.stored(name).dtype)

    def blocks(self, name: str) -> Iterator[tuple[int, Tensor]]:
        return iter([(0, self.written(name))]) if name in self.packed else super().blocks(name)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for file in self.stored_files.values() for t in file.tensors.values())


@dataclass(frozen=True)
class CutFolder(CheckpointFolder):
    """A folder as if it had fewer tensors, or smaller ones."""

    origin: CheckpointFolder  # the folder that is read
    names: Mapping[str, str]  # by tensor, its name there
    # by tensor there and axis, the positions that stay, as in `CheckpointPlan`
    cuts: Mapping[str, Mapping[int, Tensor]]

    @classmethod
    def of(
        cls,
        origin: CheckpointFolder,
        config: Mapping[str, Any],
        names: Mapping[str, str],
        cuts: Mapping[str, Mapping[int, Tensor]],
    ) -> CutFolder:
        """A folder with another config and the tensors of `names`, in the files of `origin`. The
        scales of a tensor are cut with it."""
        cuts = with_scales(cuts, origin.scales)
        files: dict[str, WeightFile] = {}
        for name, file in origin.files.items():
            own = {
                new: replace(file.tensors[old], name=new, shape=cut_shape(file.tensors[old].shape, cuts.get(old, {})))
                for new, old in names.items()
                if old in file.tensors
            }
            files[name] = replace(file, tensors=own)
        file_of = {new: origin.file_of[old] for new, old in names.items()}
        new_names = {old: new for new, old in names.items()}
        scales = {
            new_names[old]: replace(scale, name=new_names[scale.name])
            for old, scale in origin.scales.items()
            if old in new_names
        }
        return cls(origin.path, config, files, file_of, origin.others, origin.left, scales, origin, names, cuts)

    def written(self, name: str) -> Tensor:
        old = self.names[name]
        return cut(self.origin.written(old), self.cuts.get(old, {}))

    def blocks(self, name: str) -> Iterator[tuple[int, Tensor]]:
        if self.names[name] in self.cuts:
            return iter([(0, self.written(name))])
        return self.origin.blocks(self.names[name])


def cut_shape(shape: Sequence[int], cuts: Mapping[int, Tensor]) -> tuple[int, ...]:
    """The shape of a tensor of which some positions stay."""
    return tuple(cuts[axis].shape[-1] if axis in cuts else n for axis, n in enumerate(shape))


def cut(tensor: Tensor, cuts: Mapping[int, Tensor]) -> Tensor:
    """A tensor of which some positions stay. cuts: by axis, int64 [positions], -1 where there are
    zeros; of a tensor of three axes, for each position of the first: [first axis, positions]."""
    for axis, positions in cuts.items():
        if positions.ndim == 1:
            tensor = tensor.index_select(axis, positions.clamp(min=0))
            if (positions < 0).any():
                tensor.index_fill_(axis, (positions < 0).nonzero()[:, 0], 0)
        else:
            tensor = torch.stack([t.index_select(axis - 1, p) for t, p in zip(tensor, positions, strict=True)])
    return tensor


def with_scales(
    cuts: Mapping[str, Mapping[int, Tensor]], scales: Mapping[str, Scale]
) -> dict[str, Mapping[int, Tensor]]:
    """Cuts of tensors, and of the scales of those that have some."""
    every = dict(cuts)
    for name, axes in cuts.items():
        if (scale := scales.get(name)) is not None:
            every[scale.name] = scale.cuts(axes)
    return every


def copy_files(folder: Path, names: Iterable[str], target: Path) -> None:
    """Copy files of a folder, by their paths in it."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, target / name)


def find_others(folder: Path, weights: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The files of a folder and of folders in it that are copied, and what is not. weights: the
    names of the files of its model."""
    modules = _paths_of_modules(folder)
    others, left = list[str](), list[str]()
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        for entry in sorted(os.scandir(folder / prefix), key=lambda e: e.name):
            name = prefix + entry.name
            is_other = entry.name.endswith((*_OTHER_WEIGHTS, ".index.json"))
            if not prefix and name in (CONFIG, INDEX, STATE, *weights):
                continue
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                waiting.append(name + "/")
            elif entry.is_file() and (not is_other or prefix in modules):
                _refuse_link_outside_folder(folder, folder / name)
                others.append(name)
            else:
                left.append(name)
    return tuple(sorted(others)), tuple(sorted(left))


def _paths_of_modules(folder: Path) -> set[str]:
    """The folders of the modules that sentence-transformers runs after a model, each with a "/"."""
    modules: Any = []
    if (folder / MODULES).is_file():
        modules = _parse_json(folder, MODULES)
    paths = [m.get("path") for m in modules if isinstance(m, dict)] if isinstance(modules, list) else []
    return {f"{path.strip('/')}/" for path in paths if isinstance(path, str)}


def _path_inside(folder: Path, name: str) -> Path:
    """The path of a file in a folder. Raises RefusedFile for a name with a path, and for a link
    that leaves the folder."""
    path = folder / name
    if Path(name).name != name or "\0" in name:
        raise RefusedFile(f"{folder / INDEX}: expected the name of a file in the folder, got {name!r:.80}")
    if not path.is_file():
        raise BadInput(f"{path}: no such file, though {INDEX} names it; copy it again")
    return _refuse_link_outside_folder(folder, path)


def _refuse_link_outside_folder(folder: Path, path: Path) -> Path:
    target, real = path.resolve(), folder.resolve()
    if real not in target.parents and target.parent != real.parent.parent / "blobs":
        raise RefusedFile(f"{path}: a link to {target}, outside of the folder; copy the file")
    return path


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of a folder."""
    if not (folder / name).exists():
        raise BadInput(f"{folder}: expected a checkpoint folder; it has no {name}")
    value = _parse_json(folder, name)
    if not isinstance(value, dict) or (name == INDEX and "weight_map" not in value):
        raise BadInput(f"{folder / name}: expected a JSON object, as transformers writes it")
    return value


def _parse_json(folder: Path, name: str) -> Any:
    with open_plain(_path_inside(folder, name)) as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise RefusedFile(f"{folder / name}: expected at most {MAX_JSON_BYTES:,} bytes")
    return parse_json(data, str(folder / name))


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, complete or not at all."""
    with atomic.write(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_index(folder: Path, files: Mapping[str, WeightFile]) -> None:
    """Write the index of a folder with several files."""
    total = sum(t.nbytes for file in files.values() for t in file.tensors.values())
    weights = {tensor: name for name, file in files.items() for tensor in file.tensors}
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weights})


@dataclass(frozen=True, slots=True)
class Scale:
    """The scales of a weight."""

    name: str  # their tensor
    blocks: tuple[int, ...]  # by axis of the weight, how many neighbors have a scale in common; 0: all of them

    def values(self, weight: Tensor, scales: Tensor) -> Tensor:
        """The products of a weight and its scales, float32."""
        result = weight.float()
        rank = len(self.blocks)
        scales = scales.float().reshape((*scales.shape, *[1] * rank)[:rank])
        for axis, block in enumerate(self.blocks):
            if block > 1:
                scales = scales.repeat_interleave(block, axis).narrow(axis, 0, weight.shape[axis])
        return result.mul_(scales)

    def cuts(self, cuts: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The positions of the scales that stay with those of the weight, by axis. Raises
        DemaskError where only a part of a block stays."""
        own: dict[int, Tensor] = {}
        for axis, positions in cuts.items():
            block = self.blocks[axis]
            if not block:
                continue
            own[axis] = positions[..., ::block] // block
            near = own[axis].repeat_interleave(block, -1)[..., : positions.shape[-1]]
            if not torch.equal(near, positions // block):
                raise DemaskError(f"{self.name}: a block of {block} is cut in two")
        return own


def find_scales(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, Scale]:
    """By weight of 8 bits in a folder, its scales. Raises BadInput for weights that are quantized
    otherwise."""
    if QUANTIZATION not in config:
        return {}
    settings = config[QUANTIZATION] if isinstance(config[QUANTIZATION], dict) else {}
    method = settings.get("quant_method", "?")
    if method == "compressed-tensors":
        formats = [settings.get("format"), *(group.get("format") for group in _config_groups(settings))]
        method = next((f"{method}: {f}" for f in formats if f and f not in _COMPRESSED_FORMATS), method)
    if method not in _QUANTIZATION_METHODS:
        raise BadInput(f"{folder}: its weights are quantized ({method}), which are not cut; " + _QUANTIZED_ADVICE)
    more: dict[str, str] = {}  # by module, a tensor besides its weight, scale and bias
    for name, stored in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf.startswith("weight_") and leaf[6:] not in _SCALE_SUFFIXES and stored.shape not in ((), (1,)):
            more[module] = name
    scales: dict[str, Scale] = {}
    for name, stored in tensors.items():
        if stored.dtype not in _EIGHT_BITS:
            continue
        other = more.get(name.rpartition(".")[0])
        own = next((name + s for s in _SCALE_SUFFIXES if name + s in tensors), None)
        blocks = (
            None
            if own is None or other
            else _find_blocks(stored.shape, tensors[own], settings.get("weight_block_size"))
        )
        if own is None or blocks is None:
            problem = f"{other}, besides scales" if other else "no scales that fit it"
            raise BadInput(f"{folder}: {name} is {stored.dtype} with {problem}; {_QUANTIZED_ADVICE}")
        scales[name] = Scale(own, blocks)
    return scales


def _config_groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    return [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []


def _find_blocks(shape: Sequence[int], scale: StoredTensor, sizes: Any) -> tuple[int, ...] | None:
    """By axis, how many positions of a weight have a scale in common, as in `Scale`; None where the
    shape of the scales does not say so. sizes: of blocks, if the config tells them."""
    if not scale.dtype.is_floating_point or len(scale.shape) > len(shape):
        return None
    every = isinstance(sizes, list) and len(sizes) == len(shape)
    blocks = list[int]()
    for axis, (n, own) in enumerate(zip(shape, (*scale.shape, *[1] * len(shape)), strict=False)):
        if own == 1:
            blocks.append(0)
        elif own == n:
            blocks.append(1)
        elif every and type(sizes[axis]) is int and sizes[axis] > 0 and -(-n // sizes[axis]) == own:
            blocks.append(sizes[axis])
        elif own and n % own == 0:
            blocks.append(n // own)
        else:
            return None
    return tuple(blocks)
