"""stream(): run a network on images that need not fit into memory, from file to file."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from demask.errors import BadInput
from demask.failures import public
from demask.machine.arena import strided_bytes
from demask.machine.byte_sizes import BUDGET, format_bytes, parse_memory
from demask.ops import TABLE, Table
from demask.traverse.analysis.captured_size import captured, network_of
from demask.traverse.analysis.flow import Flow, flow_of
from demask.traverse.axes import NONE, Axes, Window
from demask.traverse.execution.run import ImageRun, execute
from demask.traverse.planning.plan import TilePlan
from demask.traverse.planning.plan_memory import MemoryLayout
from demask.traverse.planning.planner import plan_tiles
from demask.traverse.storage.dtype_conversion import name_of
from demask.traverse.storage.sources_and_sinks import (
    ArraySink,
    ArraySource,
    Sink,
    TensorSink,
    TensorSource,
    array_sink,
    array_source,
    tensor_sink,
    tensor_source,
)

End = str | os.PathLike[str] | np.ndarray | Tensor
Model = nn.Module | ExportedProgram | str | os.PathLike[str]
OUTPUTS = ("uint8", "float16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class Streamed:
    """The result of `stream`: shape and dtype of the output, and the time and memory of the run.

    Attributes:
        shape: shape of the written array, N first.
        dtype: name of the written dtype, such as "float32" or "uint8".
        images: number of images, N.
        rows: number of rows of all images written.
        seconds: time of execution, without capture and planning of the network.
        peak: predicted maximum of memory in bytes, in addition to the process before the call.
        macs: multiply-adds executed, for all images.

    Example:
        >>> import torch
        >>> from demask.traverse import stream
        >>> net = torch.nn.Conv2d(3, 1, 3)
        >>> x, y = torch.rand(2, 3, 64, 48), torch.empty(2, 1, 62, 46)
        >>> streamed = stream(net, x, y, memory="16MiB")
        >>> streamed.shape, streamed.images, streamed.rows, streamed.peak < 16 * 2**20
        ((2, 1, 62, 46), 2, 124, True)
    """

    shape: tuple[int, ...]
    dtype: str
    images: int
    rows: int
    seconds: float
    peak: int
    macs: int

    def to_dict(self) -> dict[str, Any]:
        """The attributes as a dictionary of JSON types; `shape` as a list of integers."""
        return {name: getattr(self, name) for name in self.__slots__} | {"shape": list(self.shape)}

    def __str__(self) -> str:
        many = f"{self.images:,} images, " if self.images > 1 else ""
        return (f"{many}{self.rows:,} rows in {self.seconds:.1f} s, predicted peak "
                f"{format_bytes(self.peak)}: {self.dtype} {self.shape}")  # fmt: skip


@public
def stream(
    model: Model,
    source: End,
    destination: End,
    *,
    memory: str | int = BUDGET,
    output: str | None = None,
    client: Any = None,
    progress: Callable[..., object] | None = None,
    spill: str | os.PathLike[str] | None = None,
    table: Table = TABLE,
) -> Streamed:
    """The shape, time and memory of a run from file to file, as a `Streamed`.

    The network is executed in tiles, one image after another, and its outputs are written to
    `destination`. Images and outputs may be larger than memory. Outputs equal the model's outputs
    in eval mode on each image up to rounding, as in `tile`. A network of floating-point inputs
    receives uint8 images as x / 255.

    Args:
        model: nn.Module or ExportedProgram with one input and one output, on the CPU; or the path
            of a .pt2, .demask or .onnx file.
        source: images (N, C, H, W), volumes (N, C, D, H, W) or sequences (N, C, L): the path of a
            .npy file, a NumPy array, which may be memory-mapped, or a CPU tensor.
        destination: path of a .npy file, which is replaced when the result is complete; or an array
            or tensor of the result's shape, which is filled.
        memory: budget in bytes, an int or a text such as "256MiB", for what the call adds to the
            memory of the process; default "512MiB". Arrays and tensors that you pass do not count.
        output: dtype to write: "float16", "float32", "float64"; or "uint8", round(clamp(y, 0, 1) *
            255) with 0 for NaN. Default None: the dtype of the network's output, or of
            `destination` if it is an array or tensor.
        client: must be None, the default; reserved for clusters.
        progress: function called after each step with a text, and with the keyword `done=1`;
            default None, no calls.
        spill: existing folder for values that do not fit in memory; default None, the folder of
            `destination`, or the system's temporary folder if `destination` is no path.
        table: op table, as in `tile`; default `demask.ops.TABLE`.

    Raises:
        BadInput: an argument has a wrong type or value; a file is missing or damaged; the network
            has several inputs or outputs; or source, network and destination do not fit together in
            shape or dtype, or share memory.
        BudgetTooSmall: no plan fits `memory`; the attribute `least` is a sufficient budget in
            bytes.
        NotExportable: torch.export cannot capture the model.
        FileError: reading or writing fails, for example because the disk is full.

    Example:
        >>> import torch
        >>> from demask.traverse import stream
        >>> net = torch.nn.Conv2d(3, 1, 3, padding=1)
        >>> x, y = torch.rand(2, 3, 64, 48), torch.empty(2, 1, 64, 48)
        >>> stream(net, x, y, memory="16MiB").rows, torch.allclose(y, net(x), atol=1e-6)
        (128, True)
    """
    job = prepare(
        model, source, destination, memory=memory, output=output, client=client, spill=spill,
        table=table,
    )  # fmt: skip
    return job.run(progress)


def prepare(
    model: Model,
    source: End,
    destination: End,
    *,
    memory: str | int = BUDGET,
    output: str | None = None,
    client: Any = None,
    spill: str | os.PathLike[str] | None = None,
    table: Table = TABLE,
) -> Streaming:
    """The job of `stream` with its plan, before anything runs or is written."""
    if client is not None:
        raise BadInput("client: streaming over a cluster is not built yet; leave it out")
    if output is not None and output not in OUTPUTS:
        raise BadInput(f"expected output=None or one of {OUTPUTS}, got {output!r}")
    budget, reader = parse_memory(memory), _source(source)
    flow, node = _flow(model, reader, table)
    output_node = flow.outputs[0]
    axes = flow.axes.get(output_node, NONE)
    images = reader.shape[0]
    shape = _batched(tuple(output_node.meta["val"].shape), images)
    sink = _sink(destination, shape, axes, output_node.meta["val"].dtype, output)
    _check_separate(source, destination, reader, sink)
    ends = replace(reader, axes=flow.axes[node], index=0), sink.image(0)
    folder = str(spill or _folder(destination))
    if not os.path.isdir(folder):
        raise BadInput(f"spill: expected a folder that exists, got {folder}")
    plan, layout = _planned(flow, budget, *ends)
    return Streaming(flow, plan, layout, *ends, images, folder)


def _planned(flow: Flow, budget: int, source: Any, sink: Any) -> tuple[TilePlan, MemoryLayout]:
    """The plan of one image. Its reserved bytes are the larger buffer of source and sink, which is
    largest for a whole value."""
    reserved = max(end.workspace(_all(end)) for end in (source, sink))
    plan, layout = plan_tiles(flow, budget, reserved=reserved)
    compiler = layout.compile_kernels()
    return plan_tiles(flow, budget, reserved=reserved + compiler) if compiler else (plan, layout)


@dataclass(frozen=True, slots=True)
class Streaming:
    """A network with its plan, ready to run. source, sink: of the first image."""

    flow: Flow
    plan: TilePlan
    layout: MemoryLayout
    source: ArraySource | TensorSource
    sink: ArraySink | TensorSink
    images: int
    folder: str

    @property
    def rows(self) -> int:
        """The number of rows to write, of all images."""
        return self.images * _extents(_all(self.sink))[0]

    @property
    def steps(self) -> int:
        """The number of times that `run` calls `progress`."""
        return self.images * sum(segment.steps for segment in self.plan.segments)

    def run(self, progress: Callable[..., object] | None = None) -> Streamed:
        """Execute the plan, image after image."""
        begun, macs = time.perf_counter(), 0
        tell = _RowProgress(self.rows, progress)
        with _opened(self.sink) as sink, torch.no_grad():
            for k in range(self.images):
                counted = Counted(sink.image(k), _all(self.sink), tell)
                macs += self._execute(self.source.image(k), counted, tell)
                counted.check()
        whole = self.sink.tensor if isinstance(self.sink, TensorSink) else self.sink.layout
        seconds = time.perf_counter() - begun
        return Streamed(tuple(whole.shape), name_of(whole.dtype), self.images, self.rows, seconds,
                        self.plan.peak, macs)  # fmt: skip

    def _execute(self, source: Any, sink: Counted, tell: _RowProgress) -> int:
        """Run one image. Returns its multiply-adds."""
        flow = self.flow
        node, output = flow.inputs[0], flow.outputs[0]
        has_rows = output in flow.axes
        call = ImageRun({node: source}, {output: sink} if has_rows else {}, flow.constants)
        values, counter = execute(flow, self.layout, call, folder=self.folder, on_step=tell.step)
        if not has_rows:
            sink.write(_all(self.sink), values[output])
        return counter.macs


class Counted:
    """A sink that counts written positions, to check that none is missing."""

    def __init__(self, sink: Sink, window: Window, tell: _RowProgress):
        self.sink, self.tell, self.done = sink, tell, 0
        self.height, self.width = _extents(window)

    def write(self, window: Window, part: Tensor) -> None:
        self.sink.write(window, part)
        rows, columns = _extents(window)
        self.done += rows * columns
        self.tell.rows += rows * columns / self.width

    def check(self) -> None:
        """Raise RuntimeError where positions were missed or written twice."""
        if self.done != self.height * self.width:
            raise RuntimeError(f"the plan wrote {self.done} positions of an image of "
                               f"{self.height} x {self.width}; please report this")  # fmt: skip


class _RowProgress:
    """Reports the number of rows written so far."""

    def __init__(self, total: int, progress: Callable[..., object] | None):
        self.total, self.progress, self.rows = total, progress, 0.0

    def step(self, *_: object) -> None:
        if self.progress is not None:
            self.progress(f"{int(self.rows):,} of {self.total:,} rows", done=1)


# ---------------------------------------------------------------------------------------- ends


def _flow(model: Model, source: ArraySource | TensorSource, table: Table) -> tuple[Flow, fx.Node]:
    """A network captured for one image of a source, and its input."""
    shape = source.shape
    if not 3 <= len(shape) <= 5 or 0 in shape:
        raise BadInput(f"expected images (N, C, H, W), volumes (N, C, D, H, W) or sequences "
                       f"(N, C, L) of at least one position, got {shape}")  # fmt: skip
    flow = flow_of(captured(network_of(model), (1, *shape[1:]), source.dtype), table)
    nodes = [n for n in flow.inputs if n in flow.axes]
    computed = [n for n in flow.outputs if isinstance(n, fx.Node) and n.op == "call_function"]
    if len(flow.inputs) != 1 or len(nodes) != 1:
        raise BadInput(f"stream() takes networks of one input, got {len(flow.inputs)}")
    if len(flow.outputs) != 1 or len(computed) != 1:
        raise BadInput(f"stream() takes networks of one output that they compute, "
                       f"got {len(flow.outputs)}")  # fmt: skip
    return flow, nodes[0]


def _source(source: End) -> ArraySource | TensorSource:
    if isinstance(source, str | os.PathLike):
        return array_source(source, NONE)
    if isinstance(source, np.ndarray | Tensor):
        return tensor_source(source, NONE)
    raise BadInput(f"source: expected the path of a .npy file, an array or a tensor, "
                   f"got {type(source).__name__}")  # fmt: skip


def _sink(
    destination: End, shape: tuple[int, ...], axes: Axes, values: torch.dtype, output: str | None
) -> ArraySink | TensorSink:
    wanted = values if output is None else getattr(torch, output)
    if isinstance(destination, str | os.PathLike):
        if Path(destination).suffix != ".npy":
            raise BadInput(
                f"expected a destination that ends in .npy, got {destination}; rename it"
            )
        return array_sink(destination, shape, axes, values, wanted)
    if not isinstance(destination, np.ndarray | Tensor):
        raise BadInput(f"destination: expected the path of a .npy file, an array or a tensor, "
                       f"got {type(destination).__name__}")  # fmt: skip
    sink = tensor_sink(destination, axes, values)
    if sink.shape != shape:
        raise BadInput(f"the destination has the shape {sink.shape}, the result {shape}")
    if output is not None and sink.tensor.dtype != wanted:
        raise BadInput(f"the destination holds {name_of(sink.tensor.dtype)}, and output={output!r} "
                       "was requested: leave `output` out")  # fmt: skip
    return sink


def _batched(shape: tuple[int, ...], images: int) -> tuple[int, ...]:
    """The shape of the results of all images."""
    if images > 1 and (not shape or shape[0] != 1):
        raise BadInput(f"the result of one image has the shape {shape}: it has no axis for "
                       f"{images} images; stream them one by one")  # fmt: skip
    return (images, *shape[1:]) if shape else shape


def _check_separate(source: End, destination: End, reader: Any, sink: Any) -> None:
    """Raise BadInput where source and destination share memory or a mapped file. A path as
    destination is a new file, even where it replaces the source."""
    if not isinstance(sink, TensorSink):
        return
    mapped_file, name = getattr(destination, "filename", None), getattr(source, "filename", source)
    if (
        mapped_file is not None
        and isinstance(name, str | os.PathLike)
        and os.path.samefile(mapped_file, name)
    ):
        raise BadInput(f"source and destination are both in {mapped_file}; write to another file")
    if isinstance(reader, TensorSource):
        (first, last), (start, end) = _address_range(reader.tensor), _address_range(sink.tensor)
        if first < end and start < last:
            raise BadInput("source and destination share memory; give a separate destination")


def _address_range(tensor: Tensor) -> tuple[int, int]:
    """The addresses that a tensor spans."""
    first = tensor.data_ptr()
    return first, first + strided_bytes(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _folder(destination: End) -> Path | str:
    """The folder for intermediate maps: that of the result, whose disk is likely to have room."""
    if isinstance(destination, str | os.PathLike):
        return Path(destination).resolve().parent
    return tempfile.gettempdir()


@contextmanager
def _opened(sink: ArraySink | TensorSink) -> Iterator[ArraySink | TensorSink]:
    if isinstance(sink, TensorSink):
        yield sink
        return
    with sink.opened() as opened:
        yield opened


def _all(end: Any) -> Window:
    """The window of the whole value of a source or sink."""
    rows, columns = ((0, 1 if axis is None else end.shape[axis]) for axis in end.axes)
    return rows, columns


def _extents(window: Window) -> tuple[int, int]:
    (top, bottom), (left, right) = window
    return bottom - top, right - left


__all__ = ["Streamed", "Streaming", "prepare", "stream"]
