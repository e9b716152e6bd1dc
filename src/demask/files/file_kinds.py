"""Recognition of weight files and other formats where a network is expected."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from demask.errors import BadInput
from demask.files.bounded_read import open_plain

EXPORT = (
    "build its Python module, load the weights into it, and write "
    "torch.export.save(torch.export.export(module, inputs), 'model.pt2')"
)
TORCHSCRIPT = f"TorchScript of torch.jit.save, which torch.export does not take: {EXPORT}"
PICKLE = f"a pickle of torch.save, which has no graph and runs code when it is read: {EXPORT}"
SAFETENSORS = f"safetensors, which have weights and no graph: {EXPORT}"
ONNX = "an ONNX file: rename it to end in .onnx"


def other_kind(path: str | os.PathLike[str]) -> str:
    """Format of a file without a network that demask can read, and advice; "" if unknown."""
    try:
        with open_plain(path) as file:
            head = file.read(64)
            if head.startswith(b"PK"):
                with zipfile.ZipFile(file) as archive:
                    return _zip_kind(archive.namelist())
    except (BadInput, zipfile.BadZipFile, NotImplementedError, ValueError):
        return ""
    if head.startswith(b"\x80"):  # torch.save before 1.6, and pickle itself
        return PICKLE
    if int.from_bytes(head[:8], "little") < 2**27 and head[8:9] == b"{":
        return SAFETENSORS
    return ONNX if _starts_as_onnx(head, Path(path).suffix) else ""


def _zip_kind(names: list[str]) -> str:
    inner = {name.partition("/")[2] for name in names}
    if "data.pkl" not in inner:
        return ""
    return TORCHSCRIPT if "constants.pkl" in inner else PICKLE


def _starts_as_onnx(head: bytes, suffix: str) -> bool:
    """Whether a file begins like ONNX: format version, then producer or opsets."""
    return suffix != ".onnx" and head[:1] == b"\x08" and head[2:3] in (b"\x12", b"\x3a", b"\x42")
