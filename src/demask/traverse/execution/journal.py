"""The journal of an unfinished stream: which tasks are done, and what they wrote.

A line is added when a task is complete, so that a process may be killed at any moment: the next one
starts after the last complete line. Checksums say whether the written positions are still there.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
from torch import Tensor

from demask.errors import BadInput
from demask.traverse.storage.boxes import Box

try:
    import fcntl
except ImportError:
    fcntl = None

NAME, VERSION = "journal.jsonl", 1
TaskKey = tuple[int, int, int, int]  # image, segment, first row, end


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """A finished task: multiply-adds; written boxes with checksums; states of its reductions, by
    the name of the call."""

    macs: int
    written: tuple[tuple[Box, str], ...] = ()
    states: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A dictionary that JSON can represent."""
        tensors = {
            f"{name}\n{k}": tensor.contiguous() for name, state in self.states.items() for k, tensor in enumerate(state)
        }
        states = base64.b64encode(safetensors.torch.save(tensors)).decode() if tensors else ""
        return {"macs": self.macs, "written": self.written, "states": states}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TaskRecord:
        """The inverse of `to_dict`."""
        tensors = safetensors.torch.load(base64.b64decode(data["states"])) if data["states"] else {}
        states: dict[str, tuple[Tensor, ...]] = {}
        for key in sorted(tensors, key=lambda key: int(key.partition("\n")[2])):
            name = key.partition("\n")[0]
            states[name] = (*states.get(name, ()), tensors[key])
        written = tuple((tuple((int(a), int(b)) for a, b in box), str(check)) for box, check in data["written"])
        return cls(int(data["macs"]), written, states)


@dataclass(slots=True)
class Journal:
    """The journal in the folder of an unfinished file, locked by this process."""

    folder: Path
    done: dict[TaskKey, TaskRecord]
    file: BinaryIO

    @classmethod
    def open(cls, folder: Path, identity: Mapping[str, str], *, resume: bool) -> Journal:
        """The journal of a stream; a new one where there is none. resume: False deletes it first.

        identity: what must be equal to go on, in words.

        Raises:
            BadInput: the folder has the journal of another stream, or of one that is running.
        """
        path = folder / NAME
        try:
            folder.mkdir(exist_ok=True)
            file = open(path, "a+b")  # noqa: SIM115 - open as long as the journal
        except OSError as error:
            raise BadInput(f"cannot write {path}: {error.strerror or error}") from error
        _lock(file, folder)
        lines = _read_complete_lines(file) if resume else []
        if lines and lines[0].get("identity") != dict(identity):
            before = lines[0].get("identity") or {}
            other = [word for word in identity if before.get(word) != identity[word]]
            file.close()
            raise BadInput(
                f"{folder} has an unfinished stream of another {' and '.join(other)}; finish it "
                "with the same arguments, or pass resume=False (--no-resume) to begin anew"
            )
        if not lines:
            _begin_anew(folder, file, {"version": VERSION, "identity": dict(identity)})
        done: dict[Any, TaskRecord] = {tuple(line["task"]): TaskRecord.from_dict(line) for line in lines[1:]}
        return cls(folder, done, file)

    def add(self, task: TaskKey, record: TaskRecord) -> None:
        """Add a finished task."""
        self.done[task] = record
        _append(self.file, {"task": task} | record.to_dict())

    def close(self) -> None:
        """Release the lock. The folder stays, to go on."""
        self.file.close()

    def delete(self) -> None:
        """Delete the folder: the stream is complete."""
        self.file.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _lock(file: BinaryIO, folder: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise BadInput(f"another process is writing {folder}; wait for it") from error


def _read_complete_lines(file: BinaryIO) -> list[dict[str, Any]]:
    """The complete lines; what a killed process left of another is cut off."""
    file.seek(0)
    lines, end = [], 0
    for raw in file:
        try:
            line = json.loads(raw) if raw.endswith(b"\n") else None
        except ValueError:
            line = None
        if not isinstance(line, dict):
            break
        lines.append(line)
        end += len(raw)
    file.truncate(end)
    return lines if lines and lines[0].get("version") == VERSION else []


def _begin_anew(folder: Path, file: BinaryIO, first: Mapping[str, Any]) -> None:
    """Delete everything in the folder but the journal, and begin it."""
    for path in folder.iterdir():
        if path.name != NAME:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    file.truncate(0)
    _append(file, first)


def _append(file: BinaryIO, data: Mapping[str, Any]) -> None:
    file.write(json.dumps(data).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())
