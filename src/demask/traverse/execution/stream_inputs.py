"""What a stream consists of: the network for one image, the mask, and texts that identify both."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from demask.errors import BadInput
from demask.machine.arena import strided_bytes
from demask.ops import Table
from demask.traverse.analysis.captured_size import captured, network_of
from demask.traverse.analysis.flow import Flow, flow_of
from demask.traverse.axes import NONE, Axes
from demask.traverse.execution.tasks import TaskMask
from demask.traverse.normalization.inputs import with_normalized_input
from demask.traverse.normalization.statistics import Statistics, with_statistics
from demask.traverse.storage.dtype_conversion import check_conversion, name_of
from demask.traverse.storage.open_ends import FileTarget, open_sink
from demask.traverse.storage.sources_and_sinks import TensorSink, TensorSource
from demask.traverse.storage.stored_ends import StoredSink, StoredSource
from demask.traverse.storage.stores.store import backing_file

CLASSES = 256  # at most, to store their numbers as uint8


def capture_flow(
    model: Any, source: StoredSource | TensorSource, normalize: Any, statistics: Statistics, table: Table
) -> tuple[Flow, fx.Node]:
    """A network captured for one image of a source, and its input."""
    shape = source.shape
    if not 3 <= len(shape) <= 5 or 0 in shape:
        raise BadInput(
            f"expected images (N, C, H, W), volumes (N, C, D, H, W) or sequences "
            f"(N, C, L) of at least one position, got {shape}"
        )
    program = captured(network_of(model), (1, *shape[1:]), source.dtype)
    program = with_statistics(with_normalized_input(program, normalize), statistics)
    flow = flow_of(program, table)
    nodes = [n for n in flow.inputs if n in flow.axes]
    computed = [n for n in flow.outputs if isinstance(n, fx.Node) and n.op == "call_function"]
    if len(flow.inputs) != 1 or len(nodes) != 1:
        raise BadInput(f"stream() takes networks of one input, got {len(flow.inputs)}")
    if len(flow.outputs) != 1 or len(computed) != 1:
        raise BadInput(f"stream() takes networks of one output that they compute, got {len(flow.outputs)}")
    return flow, nodes[0]


def result_of(shape: tuple[int, ...], values: torch.dtype, output: str | None) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a result: of the network's output, or of its classes."""
    if output != "argmax":
        return shape, values if output is None else getattr(torch, output)
    if len(shape) < 3 or not values.is_floating_point:
        raise BadInput(f"output='argmax': expected scores (N, classes, ...), got {shape}")
    stored = torch.uint8 if shape[1] <= CLASSES else torch.uint16
    return (shape[0], 1, *shape[2:]), stored


def batched(shape: tuple[int, ...], images: int) -> tuple[int, ...]:
    """The shape of the results of all images."""
    if images > 1 and (not shape or shape[0] != 1):
        raise BadInput(
            f"the result of one image has the shape {shape}: it has no axis for {images} images; stream them one by one"
        )
    return (images, *shape[1:]) if shape else shape


@dataclass(slots=True)
class _PlannedStore:
    """A file that does not exist yet, for what is computed from its sizes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[int, ...] | None
    name: str = "the result"
    layout: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(range(len(self.shape)))


def planned_sink(target: FileTarget, axes: Axes, values: torch.dtype) -> StoredSink:
    """The sink of a file that is not created yet, of one image."""
    info = target.info
    store: Any = _PlannedStore(info.shape, info.dtype, info.chunks)
    return StoredSink(store, target.images, axes, 0, values)


def fillable_sink(
    destination: Any, shape: tuple[int, ...], values: torch.dtype, output: str | None, layout: str | None
) -> TensorSink | StoredSink:
    """The array or tensor that a user gave for the result."""
    sink = open_sink(destination, shape, values, layout)
    stored = sink.tensor.dtype if isinstance(sink, TensorSink) else sink.dtype
    if output not in (None, "argmax") and stored != getattr(torch, output):
        raise BadInput(
            f"the destination holds {name_of(stored)}, and output={output!r} was requested: leave `output` out"
        )
    if output != "argmax":
        check_conversion(values, stored)
    return sink


def check_separate(source: Any, destination: Any, reader: Any, sink: Any) -> None:
    """Raise BadInput where source and destination share memory or a mapped file. A path as
    destination is a new file, even where it replaces the source."""
    mapped_file, name = getattr(destination, "filename", None), getattr(source, "filename", source)
    if (
        isinstance(mapped_file, str | os.PathLike)
        and isinstance(name, str | os.PathLike)
        and os.path.samefile(mapped_file, name)
    ):
        raise BadInput(f"source and destination are both in {mapped_file}; write to another file")
    if source is destination:
        raise BadInput("source and destination are the same; give a separate destination")
    if isinstance(reader, TensorSource) and isinstance(sink, TensorSink):
        (first, last), (start, end) = _address_range(reader.tensor), _address_range(sink.tensor)
        if first < end and start < last:
            raise BadInput("source and destination share memory; give a separate destination")


def _address_range(tensor: Tensor) -> tuple[int, int]:
    """The addresses that a tensor spans."""
    first = tensor.data_ptr()
    return first, first + strided_bytes(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def folder_of(destination: Any) -> Path | str:
    """The folder for intermediate maps: that of the result, whose disk is likely to have room."""
    if isinstance(destination, str | os.PathLike):
        return Path(destination).resolve().parent
    mapped = isinstance(destination, np.ndarray) and backing_file(destination) is not None
    name = getattr(destination, "filename", None) if mapped else None
    return Path(name).resolve().parent if name else tempfile.gettempdir()


def mask_of(mask: Any, shape: tuple[int, ...], axes: Axes) -> TaskMask | None:
    """A mask of any size, at the size of the result: each position has the nearest one's value."""
    if mask is None:
        return None
    values = np.asarray(mask)
    if values.ndim != 2 or 0 in values.shape or values.dtype != bool:
        raise BadInput(f"mask: expected bools (rows, columns), got {values.dtype} {values.shape}")
    if len(shape) != 4 or None in axes:
        raise BadInput(f"mask: the result has the shape {shape}, expected images (N, C, H, W)")
    rows, columns = ((np.arange(n) * m // n) for n, m in zip(shape[-2:], values.shape, strict=True))
    return TaskMask(torch.from_numpy(np.ascontiguousarray(values[rows][:, columns])))


def network_digest(flow: Flow) -> str:
    """A text that differs for networks with other calls or other weights."""
    digest = hashlib.blake2b(str(flow.program.graph).encode(), digest_size=16)
    for name, constant in sorted(flow.program.constants.items()):
        tensor = constant.tensor.detach()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        data = tensor.contiguous().reshape(-1)
        digest.update(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")
    return digest.hexdigest()


def digest_of(*texts: str) -> str:
    """A short text that differs for other texts."""
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=16).hexdigest()


__all__ = [
    "NONE",
    "batched",
    "capture_flow",
    "check_separate",
    "digest_of",
    "fillable_sink",
    "folder_of",
    "mask_of",
    "network_digest",
    "planned_sink",
    "result_of",
]
