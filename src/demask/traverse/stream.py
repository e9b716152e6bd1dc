"""stream(): a network over images that need not fit into memory, from a file to a file."""

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
from demask.machine.arena import extent
from demask.machine.byte_sizes import BUDGET, human, parse_memory
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
    """What stream() did. shape, dtype: of what was written. seconds: of execution. peak: bytes
    predicted at most, beside what the process held before. macs: multiply-adds, counted."""

    shape: tuple[int, ...]
    dtype: str
    images: int
    rows: int
    seconds: float
    peak: int
    macs: int

    def to_dict(self) -> dict[str, Any]:
        """In JSON types."""
        return {name: getattr(self, name) for name in self.__slots__} | {"shape": list(self.shape)}

    def __str__(self) -> str:
        many = f"{self.images:,} images, " if self.images > 1 else ""
        return (f"{many}{self.rows:,} rows in {self.seconds:.1f} s, predicted peak "
                f"{human(self.peak)}: {self.dtype} {self.shape}")  # fmt: skip


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
    """Run a network on the images in `source`, one after another, within a budget of memory.

    model: a module, an ExportedProgram, or the path of a .pt2, .demask or .onnx file. source:
    images (N, C, H, W), volumes or sequences: the path of a .npy file, an array, which may be
    memory-mapped, or a tensor. destination: the path of a .npy file, which appears when all is
    done, or an array or tensor to fill. memory: bytes above what the process holds at the call.
    output: a dtype to write, None for the network's; "uint8" is round(clamp(y, 0, 1) * 255), NaN
    as 0. Images of uint8 are given to networks that take floating numbers as x / 255. client: for
    clusters, which are not built yet. progress: called with words and, as `done`, steps done since.
    spill: a folder for intermediate maps; None: that of the destination's file, else the system's.
    table: the op table, as `demask.demask` takes it.

    The result equals that of the model in eval mode on each image alone, as `tile` says. BadInput:
    what does not fit together, and budgets that no plan fits. Rows 003-a and 003-h.

    >>> import torch
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
    """What `stream` would do, with its plan; nothing has run and nothing is written yet."""
    if client is not None:
        raise BadInput("client: streaming over a cluster is not built yet; leave it out")
    if output is not None and output not in OUTPUTS:
        raise BadInput(f"expected output=None or one of {OUTPUTS}, got {output!r}")
    budget, given = parse_memory(memory), _source(source)
    flow, node = _flow(model, given, table)
    made = flow.outputs[0]
    axes = flow.axes.get(made, NONE)
    images = given.shape[0]
    shape = _batched(tuple(made.meta["val"].shape), images)
    sink = _sink(destination, shape, axes, made.meta["val"].dtype, output)
    _check_apart(source, destination, given, sink)
    ends = replace(given, axes=flow.axes[node], index=0), sink.image(0)
    folder = str(spill or _folder(destination))
    if not os.path.isdir(folder):
        raise BadInput(f"spill: expected a folder that exists, got {folder}")
    plan, layout = _planned(flow, budget, *ends)
    return Streaming(flow, plan, layout, *ends, images, folder)


def _planned(flow: Flow, budget: int, source: Any, sink: Any) -> tuple[TilePlan, MemoryLayout]:
    """The plan of one image. Buffers of the ends are largest for windows that are all of a value;
    they are read and written one after the other."""
    beside = max(end.workspace(_all(end)) for end in (source, sink))
    plan, layout = plan_tiles(flow, budget, reserved=beside)
    compiler = layout.compile_kernels()
    return plan_tiles(flow, budget, reserved=beside + compiler) if compiler else (plan, layout)


@dataclass(frozen=True, slots=True)
class Streaming:
    """A network, its plan and its ends, ready to run. source, sink: of the first image."""

    flow: Flow
    plan: TilePlan
    layout: MemoryLayout
    source: ArraySource | TensorSource
    sink: ArraySink | TensorSink
    images: int
    folder: str

    @property
    def rows(self) -> int:
        """Rows that will be written, of all images."""
        return self.images * _extents(_all(self.sink))[0]

    @property
    def steps(self) -> int:
        """How often `run` calls its progress with one step done."""
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
        """One image; the multiply-adds that it took."""
        flow = self.flow
        node, made = flow.inputs[0], flow.outputs[0]
        cut = made in flow.axes
        call = ImageRun({node: source}, {made: sink} if cut else {}, flow.constants)
        values, counter = execute(flow, self.layout, call, folder=self.folder, on_step=tell.step)
        if not cut:
            sink.write(_all(self.sink), values[made])
        return counter.macs


class Counted:
    """A sink that counts the positions it is given, so that none is missing at the end."""

    def __init__(self, sink: Sink, window: Window, tell: _RowProgress):
        self.sink, self.tell, self.done = sink, tell, 0
        self.height, self.width = _extents(window)

    def write(self, window: Window, part: Tensor) -> None:
        self.sink.write(window, part)
        rows, columns = _extents(window)
        self.done += rows * columns
        self.tell.rows += rows * columns / self.width

    def check(self) -> None:
        """Raise RuntimeError where positions were left out or came twice: never a file of those."""
        if self.done != self.height * self.width:
            raise RuntimeError(f"the plan wrote {self.done} positions of an image of "
                               f"{self.height} x {self.width}; please report this")  # fmt: skip


class _RowProgress:
    """Tells how many rows were written so far."""

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
    made = [n for n in flow.outputs if isinstance(n, fx.Node) and n.op == "call_function"]
    if len(flow.inputs) != 1 or len(nodes) != 1:
        raise BadInput(f"stream() takes networks of one input, got {len(flow.inputs)}")
    if len(flow.outputs) != 1 or len(made) != 1:
        raise BadInput(f"stream() takes networks of one output that they compute, "
                       f"got {len(flow.outputs)}")  # fmt: skip
    return flow, nodes[0]


def _source(given: End) -> ArraySource | TensorSource:
    if isinstance(given, str | os.PathLike):
        return array_source(given, NONE)
    if isinstance(given, np.ndarray | Tensor):
        return tensor_source(given, NONE)
    raise BadInput(f"source: expected the path of a .npy file, an array or a tensor, "
                   f"got {type(given).__name__}")  # fmt: skip


def _sink(
    given: End, shape: tuple[int, ...], axes: Axes, values: torch.dtype, output: str | None
) -> ArraySink | TensorSink:
    wanted = values if output is None else getattr(torch, output)
    if isinstance(given, str | os.PathLike):
        if Path(given).suffix != ".npy":
            raise BadInput(f"expected a destination that ends in .npy, got {given}; rename it")
        return array_sink(given, shape, axes, values, wanted)
    if not isinstance(given, np.ndarray | Tensor):
        raise BadInput(f"destination: expected the path of a .npy file, an array or a tensor, "
                       f"got {type(given).__name__}")  # fmt: skip
    sink = tensor_sink(given, axes, values)
    if sink.shape != shape:
        raise BadInput(f"the destination has the shape {sink.shape}, the result {shape}")
    if output is not None and sink.tensor.dtype != wanted:
        raise BadInput(f"the destination holds {name_of(sink.tensor.dtype)}, and output={output!r} "
                       "was asked for: leave `output` out")  # fmt: skip
    return sink


def _batched(shape: tuple[int, ...], images: int) -> tuple[int, ...]:
    """The shape of the results of all images."""
    if images > 1 and (not shape or shape[0] != 1):
        raise BadInput(f"the result of one image has the shape {shape}: it has no axis for "
                       f"{images} images; stream them one by one")  # fmt: skip
    return (images, *shape[1:]) if shape else shape


def _check_apart(source: End, destination: End, given: Any, sink: Any) -> None:
    """Raise BadInput where writing would change what is still to be read. A path as destination is
    a new file, even where it replaces the source."""
    if not isinstance(sink, TensorSink):
        return
    held, name = getattr(destination, "filename", None), getattr(source, "filename", source)
    if held is not None and isinstance(name, str | os.PathLike) and os.path.samefile(held, name):
        raise BadInput(f"source and destination both lie in {held}")
    if isinstance(given, TensorSource):
        (first, last), (start, end) = _place(given.tensor), _place(sink.tensor)
        if first < end and start < last:
            raise BadInput("source and destination share memory; give a destination of its own")


def _place(tensor: Tensor) -> tuple[int, int]:
    """The addresses that a tensor spans."""
    first = tensor.data_ptr()
    return first, first + extent(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _folder(destination: End) -> Path | str:
    """Where intermediate maps go: a disk that has room for the result has room for more."""
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
    """The window that is all of an end's value."""
    rows, columns = ((0, 1 if axis is None else end.shape[axis]) for axis in end.axes)
    return rows, columns


def _extents(window: Window) -> tuple[int, int]:
    (top, bottom), (left, right) = window
    return bottom - top, right - left


__all__ = ["Streamed", "Streaming", "prepare", "stream"]
