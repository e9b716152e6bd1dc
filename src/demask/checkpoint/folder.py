"""Checkpoint folders of Hugging Face: a config, tensors in one or several safetensors files, an
index, and files that belong to the model, such as the tokenizer's.

Format of the index: https://huggingface.co/docs/safetensors and `model.safetensors.index.json`,
{"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from demask.errors import BadInput, RefusedFile
from demask.files import atomic_write as atomic
from demask.files.bounded_read import MAX_JSON_BYTES, open_plain, parse_json
from demask.files.weight_file import StoredTensor, WeightFile

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
STATE = "demask-partial.txt"  # in an unfinished folder: a hash of its origin
BLOCK_BYTES = 16 * 2**20  # of a tensor that is read in blocks
# Files of weights in other formats, which describe the network with its zeros.
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint folder, of which the config and the headers were read.

    Attributes:
        path: the folder.
        config: its config.json.
        files: by name, its files of tensors, in the order of the index.
        file_of: by tensor, the name of its file.
        others: the names of files that are copied: the tokenizer's, the generation config, texts.
    """

    path: Path
    config: Mapping[str, Any]
    files: Mapping[str, WeightFile]
    file_of: Mapping[str, str]
    others: tuple[str, ...]

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
        if index is not None and not (
            isinstance(index, dict) and all(isinstance(v, str) for v in index.values())
        ):
            raise BadInput(f"{folder / INDEX}: expected the file of each tensor in weight_map")
        names = [SINGLE] if index is None else list(dict.fromkeys(index.values()))
        files = {name: WeightFile.read(_inside(folder, name)) for name in names}
        file_of: dict[str, str] = {}
        for name, file in files.items():
            if file.unread:
                raise BadInput(f"{folder / name}: {file.unread[0]} and {len(file.unread) - 1} more "
                               "tensors have a dtype that demask does not read")  # fmt: skip
            file_of |= dict.fromkeys(file.tensors, name)
        if index is not None and index != file_of:
            tensor = min(t for t in index.keys() | file_of.keys() if index.get(t) != file_of.get(t))
            raise BadInput(f"{folder / INDEX}: {tensor} is said to be in {index.get(tensor)}, and "
                           f"is in {file_of.get(tensor)}; write the index again")  # fmt: skip
        if not file_of:
            raise BadInput(f"{folder}: its files have no tensors")
        others = sorted(
            entry.name for entry in os.scandir(folder)
            if entry.is_file() and entry.name not in (CONFIG, INDEX, STATE)
            and not entry.name.endswith((*_OTHER_WEIGHTS, ".index.json"))
        )  # fmt: skip
        for name in others:
            _inside(folder, name)
        return cls(folder, config, files, file_of, tuple(others))

    def stored(self, name: str) -> StoredTensor:
        """What the headers say of a tensor."""
        return self.files[self.file_of[name]].tensors[name]

    def tensor(self, name: str) -> Tensor:
        """A tensor, in new memory."""
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
        return sum(t.nbytes // t.dtype.itemsize for file in self.files.values()
                   for t in file.tensors.values())  # fmt: skip


def _inside(folder: Path, name: str) -> Path:
    """The path of a file in a folder. Raises RefusedFile for a name with a path, and for a link
    that leaves the folder, except into the `blobs` of a hub's cache, which consists of links."""
    path, real = folder / name, folder.resolve()
    if Path(name).name != name or "\0" in name:
        raise RefusedFile(f"{folder / INDEX}: expected the name of a file in the folder, "
                          f"got {name!r:.80}")  # fmt: skip
    if not path.is_file():
        raise BadInput(f"{path}: no such file, though {INDEX} names it; copy it again")
    target = path.resolve()
    if target.parent not in (real, real.parent.parent / "blobs"):
        raise RefusedFile(f"{path}: a link to {target}, outside of the folder; copy the file")
    return path


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of a folder."""
    if not (folder / name).exists():
        raise BadInput(f"{folder}: expected a checkpoint folder; it has no {name}")
    with open_plain(_inside(folder, name)) as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise RefusedFile(f"{folder / name}: expected at most {MAX_JSON_BYTES:,} bytes")
    value = parse_json(data, str(folder / name))
    if not isinstance(value, dict) or (name == INDEX and "weight_map" not in value):
        raise BadInput(f"{folder / name}: expected a JSON object, as transformers writes it")
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, complete or not at all."""
    with atomic.write(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_index(folder: Path, files: Mapping[str, WeightFile]) -> None:
    """Write the index of a folder with several files."""
    total = sum(t.nbytes for file in files.values() for t in file.tensors.values())
    weights = {tensor: name for name, file in files.items() for tensor in file.tensors}
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weights})
