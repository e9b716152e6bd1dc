"""Sources and sinks of .npy files, as `stream` makes them, for any shape."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

from demask.files.atomic_write import check_writable
from demask.traverse.storage import npy
from demask.traverse.storage.axis_order import AxisOrder
from demask.traverse.storage.dtype_conversion import check_conversion
from demask.traverse.storage.sources_and_sinks import StoredSink, StoredSource
from demask.traverse.storage.store import ArrayInfo, replace_path


def full_order(shape):
    """The order of an array whose axes are those of the images."""
    return AxisOrder.unchanged(shape)


def array_source(path, axes):
    store = npy.open_store(Path(path))
    return StoredSource.of(store, full_order(store.shape), axes)


@contextmanager
def array_sink(path, shape, axes, values, stored=None):
    """A sink of a new file, which gets its name at the end of the block."""
    final = check_writable(path)
    check_conversion(values, stored or values)
    part = final.with_name(f".{final.name}.part")
    info = ArrayInfo(tuple(shape), stored or values, "N" * len(shape), None)
    try:
        npy.create(part, info)
        yield StoredSink(npy.open_again(part, info), full_order(shape), axes, values)
        replace_path(part, final)
    finally:
        part.unlink(missing_ok=True)
