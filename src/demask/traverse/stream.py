"""stream(): run a network on images that need not fit into memory, from file to file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from demask.errors import BadInput
from demask.failures import public
from demask.machine.byte_sizes import BUDGET
from demask.ops import TABLE, Table
from demask.traverse.execution.stream_job import OUTPUTS, Streamed, Streaming, StreamOptions, prepare_stream
from demask.traverse.normalization import IMAGE, Statistics
from demask.traverse.storage.open_ends import Region

Model = nn.Module | ExportedProgram | str | os.PathLike[str]


@public
def stream(
    model: Model,
    source: Any,
    destination: Any,
    *,
    memory: str | int = BUDGET,
    output: str | None = None,
    layout: str | None = None,
    region: Region | None = None,
    mask: Any = None,
    normalize: Any = None,
    statistics: Statistics = IMAGE,
    chunk: int | None = None,
    stripe: int | None = None,
    resume: bool = True,
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
            .npy file, a Zarr array or OME-NGFF group (.zarr), a TIFF, OME-TIFF or GeoTIFF (.tif) or
            a slide (.svs, .ndpi, .mrxs and others of OpenSlide); a NumPy array, which may be
            memory-mapped; a CPU tensor; or any object with `shape` and `dtype` that can be sliced,
            such as an array of zarr or h5py. Positions without data of a GeoTIFF are read as 0.
        destination: path of a file, which appears, or is replaced, when the result is complete:
            .npy, .zarr (OME-NGFF 0.5), .ome.tif, .tif (GeoTIFF if the source has coordinates) or
            .cog.tif; or an array, a tensor or an object to which slices can be assigned, of the
            result's shape, which is filled. Sizes of pixels, coordinates and the value for missing
            data are taken from the source.
        memory: budget in bytes, an int or a text such as "256MiB", for what the call adds to the
            memory of the process; default "512MiB". Arrays and tensors that you pass do not count.
        output: dtype to write: "float16", "float32", "float64"; "uint8" or "uint16",
            round(clamp(y, 0, 1) * 255 or 65535) with 0 for NaN; or "argmax", the number of the
            largest channel, (N, 1, H, W). Default None: the dtype of the network's output, or of
            `destination` if it is an array or tensor.
        layout: a letter for each axis of the source, of N, C, D, H, W, L or of T, Z, Y, X, S, such
            as "HWC" or "TCZYX"; default None: what the file says, else N and C first. T is a series
            of images, each on its own; next to N, as in "NCTHW", the frames that a network of
            videos takes together. An array or tensor as destination has the same axes, or those of
            the network.
        region: (first row, first column, rows, columns) of each image to read; the result is that
            of this part alone. Default None, the full image.
        mask: bools (rows, columns) of any size, scaled to the result: what is computed. Where they
            are False the result is 0. Statistics remain those of the full image. Default None,
            everything.
        normalize: "image": each channel has mean 0 and variance 1 over the full image, in a first
            pass; or (means, deviations), a number or one per channel: the network receives
            (x - mean) / deviation. Default None, no normalization.
        statistics: what group and instance norms normalize by: "image" (default), as the network
            does; "tile:N", windows of about N rows and columns of the input that divide the image
            evenly; or the constants that `calibrate` returns.
        chunk: rows and columns of a chunk of a .zarr file; default None, 512.
        stripe: rows of the result per task, rounded up to full chunks; default None, as few as
            cost 5 % more multiply-adds. A task is what is resumed, and what a worker computes.
        resume: whether to go on where an unfinished run to the same file stopped; True (default)
            checks what is there, False deletes it.
        client: a `dask.distributed.Client`, on whose workers the tasks run; `memory` is then the
            budget of each worker, and all must see the files of source and destination. Default
            None, this process.
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
        model,
        source,
        destination,
        memory=memory,
        output=output,
        layout=layout,
        region=region,
        mask=mask,
        normalize=normalize,
        statistics=statistics,
        chunk=chunk,
        stripe=stripe,
        client=client,
        spill=spill,
        table=table,
    )
    return job.run(progress, resume=resume)


@dataclass(frozen=True, slots=True)
class PreparedStream:
    """A job with its plan, and the client that runs its tasks, if any."""

    job: Streaming
    client: Any = None
    call: tuple[Any, ...] = ()

    @property
    def plan(self) -> Any:
        """The plan of one image."""
        return self.job.plan

    @property
    def rows(self) -> int:
        """Rows to write."""
        return self.job.rows

    @property
    def steps(self) -> int:
        """Calls of `progress`."""
        return self.job.steps

    def run(self, progress: Callable[..., object] | None = None, *, resume: bool = True) -> Streamed:
        """Execute the job."""
        cluster = None
        if self.client is not None:
            from demask.traverse.execution.cluster import Cluster

            cluster = Cluster.of(self.client, self.job, prepare_again, *self.call)
        return self.job.run(progress, resume=resume, cluster=cluster)


def prepare(
    model: Model,
    source: Any,
    destination: Any,
    *,
    client: Any = None,
    spill: str | os.PathLike[str] | None = None,
    table: Table = TABLE,
    **options: Any,
) -> PreparedStream:
    """The job of `stream` with its plan, before anything runs or is written."""
    wanted = StreamOptions(**options, shared=client is not None)
    if client is not None and not (hasattr(client, "submit") and hasattr(client, "scatter")):
        raise BadInput(f"client: expected a dask.distributed.Client, got {type(client).__name__}")
    if client is not None and table is not TABLE:
        raise BadInput("client: tasks run with demask's own op table; leave `table` out")
    if client is not None:  # workers may run in other folders
        model, source, destination = map(_with_absolute_path, (model, source, destination))
    job = prepare_stream(model, source, destination, wanted, spill=spill, table=table)
    return PreparedStream(job, client, (model, source, destination, wanted))


def _with_absolute_path(end: Any) -> Any:
    return Path(end).resolve() if isinstance(end, str | os.PathLike) else end


def prepare_again(model: Model, source: Any, destination: Any, options: StreamOptions) -> Streaming:
    """The job of a call, in a worker."""
    return prepare_stream(model, source, destination, options, table=TABLE)


__all__ = ["OUTPUTS", "PreparedStream", "Streamed", "prepare", "stream"]
