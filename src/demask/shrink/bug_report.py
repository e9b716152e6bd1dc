"""The file that a defect is reported with: the graph of a network, without its weights."""

from __future__ import annotations

import io
import json
import platform
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from demask.graph.program import Constant, Program
from demask.installation import VERSION

SMALL = 4096  # most elements of an integer tensor (indices, sizes) whose values are written


def write_bug_report(program: Program, slim: fx.GraphModule, failure: str) -> Path:
    """The path of a new .zip in the temporary folder: both graphs as text, sizes, versions, the
    failure, and per tensor where it is zero. It has no weights."""
    folder = Path(tempfile.mkdtemp(prefix="demask-report-"))
    path = folder / "report.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("report.json", json.dumps(_summary(program, failure), indent=1))
        archive.writestr("captured.txt", _text(program.graph))
        archive.writestr("result.txt", f"{_text(slim.graph)}\n{slim.code}")
        for k, constant in enumerate(program.constants.values()):
            archive.writestr(f"zeros/{k}.npy", _zeros(constant.tensor))
    return path


def _summary(program: Program, failure: str) -> dict[str, Any]:
    return {
        "failure": failure,
        "seeds": [0],
        "versions": {
            "demask": VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.platform(),
        },
        "notes": list(program.notes),
        "guards": list(program.guards),
        "constants": [_constant(constant) for constant in program.constants.values()],
    }


def _constant(constant: Constant) -> dict[str, Any]:
    tensor = constant.tensor
    plain = not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() <= SMALL
    return {
        "name": constant.name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "parameter": constant.parameter,
        "aliases": list(constant.aliases),
        "zeros": int((tensor == 0).sum()),
        "one value": bool(tensor.numel() and (tensor == tensor.reshape(-1)[0]).all()),
        "values": tensor.tolist() if plain else None,
    }


def _text(graph: fx.Graph) -> str:
    """Every call of a graph, with the shape and dtype of its output."""
    lines = []
    for node in graph.nodes:
        value = node.meta.get("val")
        shape = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        lines.append(f"{node.format_node()}    # {shape}")
    return "\n".join(lines)


def _zeros(tensor: Tensor) -> bytes:
    """Where a tensor is 0, one bit per element, as a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, np.packbits((tensor == 0).cpu().numpy().reshape(-1)))
    return buffer.getvalue()
