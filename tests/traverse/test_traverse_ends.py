"""Where parts come from and go to: every layout and type, by parts as whole."""

from __future__ import annotations

import itertools
import math
import mmap
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from demask.errors import BadInput
from demask.exec.axes import empty, part
from demask.traverse.storage import boxes
from demask.traverse.storage import sources_and_sinks as ends
from demask.traverse.storage.sources_and_sinks import StoredSink, StoredSource, spill, tensor_sink, tensor_source
from demask.traverse.storage.store import SliceStore, backing_file
from demask.traverse.stream import prepare
from stored_arrays import array_sink, array_source, full_order

SRC = Path(ends.__file__).parents[3]
AXES = [  # of a value of sizes 1 3 4 5 or fewer: rows and columns
    ((2, 3, 4, 5), (2, 3)),
    ((2, 3, 4, 5), (3, 2)),
    ((2, 3, 4, 5), (2, None)),
    ((2, 3, 7), (2, None)),
    ((2, 7, 3), (1, None)),
    ((7, 4), (0, None)),
    ((2, 3, 4, 5, 6), (2, 3)),
    ((2, 9), (None, None)),
]
NUMBERS = {"float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "uint16"}
relaxed = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def drawn(shape, dtype="float32", seed=0):
    draw = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return draw.normal(0.5, 0.6, shape).astype(dtype)
    return draw.integers(0, 100, shape).astype(dtype)


def whole(shape, axes):
    return tuple((0, 1 if axis is None else shape[axis]) for axis in axes)


def windows(data, shape, axes):
    """A drawn partition of a value into windows, in a drawn order."""
    cuts = []
    for axis in axes:
        size = 1 if axis is None else shape[axis]
        inner = data.draw(st.sets(st.integers(1, size - 1))) if size > 1 else set()
        places = [0, *sorted(inner), size]
        cuts.append(list(itertools.pairwise(places)))
    found = [(rows, columns) for rows in cuts[0] for columns in cuts[1]]
    return data.draw(st.permutations(found))


def read_by_parts(source, shape, axes, dtype, parts):
    """The value as its parts were read, and whether what was allocated is what was predicted."""
    made = empty(shape, axes, dtype)
    for window in parts:
        into = part(made, axes, window)
        with Allocated() as counted:
            source.read(window, into)
        assert max(counted.sizes, default=0) == source.workspace(window)
    return made


def written_by_parts(sink, value, axes, parts):
    held = empty(value.shape, axes, value.dtype).copy_(value)
    for window in parts:
        with Allocated() as counted:
            sink.write(window, part(held, axes, window))
        assert sum(counted.sizes) == sink.workspace(window)


class Allocated(TorchDispatchMode):
    """Bytes of each tensor that got memory of its own."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known | {0}:
                self.sizes.append(t.untyped_storage().nbytes())
        return out


def in_bytes(y):
    """The rule of 8-bit images, element by element."""
    y = y.astype(np.float64 if y.dtype == np.float64 else np.float32)
    scaled = [0 if math.isnan(v) else round(float(np.clip(v, 0, 1) * y.dtype.type(255))) for v in y.ravel()]
    return np.array(scaled, np.uint8).reshape(y.shape)


# -- laws ------------------------------------------------------------------------------------------


@relaxed
@given(st.data())
def test_what_is_read_by_parts_is_the_array(tmp_path, monkeypatch, data):
    """read(window) == array[window], from any order of the file, in any partition, of any dtype."""
    limit = data.draw(st.sampled_from([64, 200, 1 << 20]))
    monkeypatch.setattr(ends, "LIMIT", limit)
    shape, axes = data.draw(st.sampled_from(AXES))
    held = data.draw(st.sampled_from(sorted(NUMBERS)))
    array = drawn(shape, held)
    fortran = data.draw(st.booleans())
    np.save(tmp_path / "x.npy", np.asfortranarray(array) if fortran else array)
    kept = torch.from_numpy(array).dtype
    wanted = data.draw(st.sampled_from([kept, torch.float32, torch.float64, torch.bfloat16]))
    expected = torch.from_numpy(array).to(wanted)
    if held in ("uint8", "uint16") and wanted.is_floating_point:
        expected = expected / (255 if held == "uint8" else 65535)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for source in (array_source(tmp_path / "x.npy", axes), tensor_source(array, axes)):
        assert (source.shape, source.dtype) == (shape, kept)
        got = read_by_parts(source, shape, axes, wanted, windows(data, shape, axes))
        assert torch.equal(got, expected)
    got, sliced = empty(shape, axes, wanted), SliceStore.of(mapped)
    for window in windows(data, shape, axes):
        source = StoredSource.of(sliced, full_order(shape), axes)
        source.read(window, part(got, axes, window))
    assert torch.equal(got, expected)


@relaxed
@given(st.data())
def test_what_is_written_by_parts_is_the_array(tmp_path, monkeypatch, data):
    """The file's array equals the value, converted; in any partition, in any order."""
    limit = data.draw(st.sampled_from([64, 200, 1 << 20]))
    monkeypatch.setattr(ends, "LIMIT", limit)
    shape, axes = data.draw(st.sampled_from(AXES))
    values = data.draw(st.sampled_from(["float16", "float32", "float64", "int64", "uint8"]))
    array = drawn(shape, values)
    value = torch.from_numpy(array)
    eight = data.draw(st.booleans()) and value.is_floating_point()
    stored = torch.uint8 if eight else data.draw(st.sampled_from([value.dtype, torch.float64]))
    expected = in_bytes(array) if eight else value.to(stored).numpy()
    with array_sink(tmp_path / "y.npy", shape, axes, value.dtype, stored) as sink:
        assert sink.shape == shape
        written_by_parts(sink, value, axes, windows(data, shape, axes))
    found = np.load(tmp_path / "y.npy")
    assert found.dtype == expected.dtype and np.array_equal(found, expected)
    into = torch.zeros(shape, dtype=stored).transpose(0, -1).contiguous().transpose(0, -1)
    written_by_parts(tensor_sink(into, axes, value.dtype), value, axes, windows(data, shape, axes))
    assert np.array_equal(into.numpy(), expected)


@relaxed
@given(st.data())
def test_a_spill_gives_back_what_it_was_given(tmp_path, data):
    shape, axes = data.draw(st.sampled_from(AXES))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.int16]))
    value = torch.from_numpy(drawn(shape, "int64")).to(dtype)
    held = spill(torch.Size(shape), dtype, axes, tmp_path)
    assert list(tmp_path.iterdir()) == []  # it has no name
    written_by_parts(held, value, axes, windows(data, shape, axes))
    got = read_by_parts(held, shape, axes, dtype, windows(data, shape, axes))
    assert torch.equal(got, value)


@relaxed
@given(st.data())
def test_pieces_cover_a_box_once_and_the_first_is_the_largest(data):
    box = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(3, 9)), min_size=1, max_size=4))
    dims = data.draw(st.permutations(range(len(box))))
    limit = data.draw(st.integers(1, 200))
    seen = np.zeros([9] * len(box), int)
    found = list(boxes.pieces(tuple(box), tuple(dims), limit))
    for piece in found:
        seen[tuple(slice(a, b) for a, b in piece)] += 1
    inside = seen[tuple(slice(a, b) for a, b in box)]
    assert (inside == 1).all() and seen.sum() == inside.size
    sizes = [boxes.elements(piece) for piece in found]
    assert max(sizes, default=0) == next(iter(sizes), 0) <= limit


def test_images_of_a_batch_are_ends_of_their_own(tmp_path):
    array = drawn((3, 2, 4, 5))
    np.save(tmp_path / "x.npy", array)
    axes, part_ = (2, 3), ((1, 3), (0, 5))
    for source in (array_source(tmp_path / "x.npy", axes), tensor_source(array, axes)):
        one = source.image(1)
        assert one.shape == (1, 2, 4, 5)
        into = empty((1, 2, 2, 5), axes, torch.float32)
        one.read(part_, into)
        assert np.array_equal(into.numpy(), array[1:2, :, 1:3])
    out = torch.zeros(3, 2, 4, 5)
    with array_sink(tmp_path / "y.npy", array.shape, axes, torch.float32) as sink:
        for k in range(3):
            for place in (sink.image(k), tensor_sink(out, axes, torch.float32).image(k)):
                place.write(((0, 4), (0, 5)), torch.from_numpy(array[k : k + 1]))
    assert np.array_equal(np.load(tmp_path / "y.npy"), array)
    assert np.array_equal(out.numpy(), array)


# -- eight bits ------------------------------------------------------------------------------------

EDGES = [-math.inf, -1, -0.0, 0, 0.5 / 255, 1.5 / 255, 2.5 / 255, 0.5, 1, 1.0001, 7, math.inf, math.nan]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_eight_bits_follow_the_rule_at_the_edges(dtype):
    array = np.array(EDGES, dtype).reshape(1, 1, 1, -1)
    out = torch.empty(array.shape, dtype=torch.uint8)
    sink = tensor_sink(out, (2, 3), torch.from_numpy(array).dtype)
    sink.write(((0, 1), (0, len(EDGES))), torch.from_numpy(array))
    assert np.array_equal(out.numpy(), in_bytes(array))
    assert out[0, 0, 0, -1] == 0 and out[0, 0, 0, 10] == 255


def test_what_was_written_in_eight_bits_reads_back_as_itself():
    """write(read(u)) == u for every byte."""
    every = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        values, back = empty((1, 1, 16, 16), (2, 3), dtype), torch.zeros_like(every)
        tensor_source(every, (2, 3)).read(((0, 16), (0, 16)), values)
        tensor_sink(back, (2, 3), dtype).write(((0, 16), (0, 16)), values)
        assert torch.equal(back, every), dtype


# -- mappings --------------------------------------------------------------------------------------


def test_only_pages_that_are_in_a_file_are_released(tmp_path):
    np.save(tmp_path / "x.npy", drawn((1, 2, 3, 4)))
    plain = np.frombuffer(mmap.mmap(-1, 96), np.float32).reshape(1, 2, 3, 4)
    for mode, shared in (("r", True), ("r+", True), ("c", False)):
        array = np.load(tmp_path / "x.npy", mmap_mode=mode)
        mappings = [backing_file(a) for a in (array, array[:, :1], np.asarray(array))]
        assert [m is not None for m in mappings] == [shared] * 3
        values = SliceStore.of(array).read(tuple((0, n) for n in array.shape)).numpy()
        assert np.array_equal(values, array) and np.shares_memory(values, array) != shared
    assert backing_file(plain) is None


def test_a_mapped_destination_holds_what_was_written(tmp_path):
    value = torch.from_numpy(drawn((1, 2, 300, 400)))
    out = np.lib.format.open_memmap(tmp_path / "y.npy", "w+", np.uint8, (1, 2, 300, 400))
    order = full_order(out.shape)
    sink = StoredSink(SliceStore.of(out), order, (2, 3), torch.float32)
    sink.write(((0, 300), (0, 400)), value)
    del out, sink
    assert np.array_equal(np.load(tmp_path / "y.npy"), in_bytes(value.numpy()))


@pytest.mark.parametrize("data", [torch.ones(2, 3).to_sparse(), torch.ones(2, 3, device="meta")])
def test_tensors_elsewhere_are_refused(data) -> None:
    with pytest.raises(BadInput, match="expected a dense tensor on the CPU"):
        tensor_source(data, (0, 1))


def test_chunks_stay_until_there_is_no_room() -> None:
    """The one that was read least recently is dropped, and no more than needed."""
    reads, chunks = [], [((k, k + 1), (0, 4)) for k in range(3)]
    read = lambda chunk: reads.append(chunk) or torch.zeros(1, 4)  # noqa: E731
    store = SimpleNamespace(dtype=torch.float32, read=read)
    cache = ends._ChunkCache(most=2 * 16)
    for k in (0, 1, 0, 1, 2, 1, 0):
        cache.read(store, chunks[k])
    assert reads == [chunks[k] for k in (0, 1, 2, 0)]


class Chunked:
    """An array in chunks, as libraries offer it, that counts how often each is read and written."""

    def __init__(self, array, chunks):
        self.array, self.chunks, self.shape, self.dtype = array, chunks, array.shape, array.dtype
        self.reads, self.writes = Counter(), Counter()

    def __getitem__(self, index):
        self.reads[str(index)] += 1
        return self.array[index]

    def __setitem__(self, index, values):
        self.writes[str(index)] += 1
        self.array[index] = values


@pytest.mark.parametrize("chunks", [(1, 3, 8, 16), (1, 3, 8, 50), (2, 3, 37, 7), (1, 1, 8, 16)])
def test_chunks_are_read_and_written_once_in_the_memory_that_is_counted(chunks) -> None:
    """Of two rows of chunks: a budget counts `workspace`."""
    array, axes = drawn((1, 3, 37, 50)), (2, 3)
    from_, to = Chunked(array, chunks), Chunked(np.zeros(array.shape, np.uint8), chunks)
    order, most = full_order(array.shape), [0, 0]
    source = StoredSource.of(SliceStore.of(from_), order, axes)
    sink = StoredSink(SliceStore.of(to), order, axes, torch.float32)
    for window in [((row, min(row + 3, 37)), (0, 50)) for row in range(0, 37, 3)]:
        values = empty((1, 3, window[0][1] - window[0][0], 50), axes, torch.float32)
        source.read(window, values)
        sink.write(window, values)
        now = [sum(c.nbytes for c in source.cache.chunks.values()), sum(c.nbytes for c, _ in sink.open_chunks.values())]
        most = [max(pair) for pair in zip(most, now, strict=True)]
    assert all(0 < taken <= end.workspace(end.window) for end, taken in zip((source, sink), most, strict=True))
    assert np.array_equal(to.array, in_bytes(array))
    assert set(from_.reads.values()) == set(to.writes.values()) == {1}


def test_chunks_of_a_volume_are_read_once_in_the_memory_that_is_counted() -> None:
    """Its rows are those along the depth: a band begins and ends in two layers of chunks."""
    array, axes = drawn((1, 2, 9, 12, 10)), (2, 3)
    from_ = Chunked(array, (1, 1, 4, 5, 10))
    source = StoredSource.of(SliceStore.of(from_), full_order(array.shape), axes)
    for row in range(9):
        values = empty((1, 2, 1, 12, 10), axes, torch.float32)
        source.read(((row, row + 1), (0, 12)), values)
        assert np.array_equal(values.numpy(), array[:, :, row : row + 1])
        assert sum(c.nbytes for c in source.cache.chunks.values()) <= source.workspace(source.window)
    assert set(from_.reads.values()) == {1}


def test_buffers_of_chunks_are_in_the_plan_together() -> None:
    """The chunks of source and destination are in memory at the same time."""
    torch.manual_seed(0)
    net, x = torch.nn.Conv2d(3, 3, 1).eval(), drawn((1, 3, 256, 4096))
    out = Chunked(np.zeros_like(x), (1, 3, 256, 512))
    job = prepare(net, Chunked(x, (1, 3, 256, 512)), out, memory="100MiB")
    assert job.plan.peak > 2 * (2 * 4 * 3 * 256 * 4096)
    job.run()
    torch.testing.assert_close(torch.from_numpy(out.array), net(torch.from_numpy(x)).detach())


def test_a_job_that_stopped_may_run_again() -> None:
    """What it had of a chunk is not counted twice."""

    class Stop(Exception):
        pass

    def stop(words, done):
        if 256 < int(words.split()[0]) < 512:
            raise Stop

    torch.manual_seed(0)
    net, x = torch.nn.Conv2d(3, 3, 3, padding=1).eval(), drawn((1, 3, 512, 512))
    out = Chunked(np.zeros_like(x), (1, 3, 512, 512))
    job = prepare(net, x, out, memory="32MiB")
    with pytest.raises(Stop):
        job.run(stop)
    job.run()
    torch.testing.assert_close(torch.from_numpy(out.array), net(torch.from_numpy(x)).detach())
