"""Packets: written and read back bit for bit, counted, in order; what was spoilt is refused."""

import errno
import json
import math
import os
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from demask.errors import BadInput, RefusedFile
from demask.pilot import packet_index, packet_reader
from demask.pilot.packet_writer import PacketReader, write


class Net(nn.Module):
    """Matrices and filters of odd sizes, tied weights, buffers, a scalar, other dtypes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(37, 70)
        self.conv = nn.Conv2d(3, 50, 3)
        self.norm = nn.BatchNorm2d(50)
        self.half = nn.Linear(450, 33).half()
        self.wide = nn.Linear(600, 7, dtype=torch.float64)
        self.brain = nn.Linear(80, 60).bfloat16()
        self.head = nn.Linear(70, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("none", torch.zeros(0, 4))


@pytest.fixture
def net():
    torch.manual_seed(0)
    made = Net()
    made.wide.weight.data[0, 0] = math.inf
    made.wide.weight.data[1, 0] = math.nan
    made.conv.weight.data[:5] = 0
    return made


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


class Counted:
    """`os.preadv`, and what it returned."""

    def __init__(self):
        self.bytes = self.calls = 0
        self.real = os.preadv

    def __call__(self, descriptor, buffers, offset):
        got = self.real(descriptor, buffers, offset)
        self.bytes, self.calls = self.bytes + got, self.calls + 1
        return got


@pytest.fixture
def counted(monkeypatch):
    made = Counted()
    monkeypatch.setattr(packet_reader.os, "preadv", made)
    return made


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("block", ["1KiB", "4KiB", 20000])
def test_a_full_read_is_the_original_bit_for_bit(net, tmp_path, counted, shards, block):
    index = write(tmp_path / "n.packets", net, block=block, shards=shards)
    assert len(list(tmp_path.iterdir())) == shards
    with PacketReader(tmp_path / "n.packets") as reader:
        partial = reader.read()
        assert partial.complete
        loaded = partial.load(Net().to("meta"))
        assert (reader.bytes_read, reader.reads) == (counted.bytes, counted.calls)
        before = counted.calls
        reader.read()
        assert counted.calls == before  # every packet is read once
    assert loaded.head.weight is loaded.embed.weight
    for name, tensor in net.state_dict().items():
        assert equal(loaded.state_dict()[name], tensor), name
    assert dict(index.aliases) == {"head.weight": "embed.weight"}
    assert all(size % packet_index.PAGE >= 0 for size in index.sizes())


def test_markers_say_what_they_stand_before(net, tmp_path):
    write(tmp_path / "n", net, block="2KiB")
    with PacketReader(tmp_path / "n") as reader:
        index, values = reader.index, reader.read().values
        start = reader._files[0].start
        raw = (tmp_path / "n").read_bytes()
        for k, packet in enumerate(index.packets):
            marker, tensor = reader.marker(k), index.tensors[packet["tensor"]]
            rows = values[tensor.name][tensor.order[marker.first : marker.first + marker.count]]
            at = start + packet["page"] * 4096
            assert at % 4096 == 0
            assert raw[at : at + 28] == marker.packed()
            assert raw[at + 32 : at + index.sizes()[k]] == bits(rows).numpy().tobytes()
            if not rows.isfinite().all():
                continue
            top = float(rows.double().abs().max())
            assert marker.norm == pytest.approx(float(rows.double().norm()), rel=1e-6)
            assert marker.scale == pytest.approx(top / 127, rel=1e-6)
            assert top <= 2.0**marker.exponent and (top == 0 or top >= 2.0 ** (marker.exponent - 1))
            assert marker.priority == packet["priority"]
        assert (np.diff(index.packets["priority"]) <= 0).all()


def test_rows_of_a_packet_are_those_of_like_priority(tmp_path):
    weight = torch.arange(64 * 512.0).view(64, 512)  # two rows per packet
    priorities = torch.randperm(64, generator=torch.Generator().manual_seed(1)).float()
    index = write(tmp_path / "w", {"w": weight}, {"w": priorities})
    with PacketReader(tmp_path / "w") as reader:
        partial = reader.read_above(40.0)
        rows = partial.read["w"]
        assert torch.equal(rows, priorities >= 40)
        assert torch.equal(partial.values["w"][rows], weight[rows])
        assert not partial.values["w"][~rows].any()
    assert index.packets["count"].tolist() == [2] * 32


@pytest.mark.parametrize(("budget", "shards"), [(10_000, 2), (20_500, 1), (45_000, 1)])
def test_a_budget_is_kept_and_the_next_read_goes_on(net, tmp_path, counted, budget, shards):
    write(tmp_path / "n", net, shards=shards)
    with PacketReader(tmp_path / "n") as reader:
        seen = -1
        while True:
            before = counted.bytes
            partial = reader.read(budget)
            assert counted.bytes - before <= budget
            have = sum(int(r.sum()) for r in partial.read.values())
            pending = reader.index.packets["priority"][reader._pending]
            done = reader.index.packets["priority"][~reader._pending]
            assert not len(pending) or not len(done) or done.min() >= pending.max()
            if have == seen:
                break
            seen = have
        assert partial.complete
        with pytest.raises(BadInput, match="comes first"):
            PacketReader(tmp_path / "n").read(8)


def test_short_reads_are_gone_on_with_and_counted(net, tmp_path, monkeypatch):
    write(tmp_path / "n", net)
    real, got = os.preadv, []

    def short(descriptor, buffers, offset):
        got.append(real(descriptor, [buffers[0][:1000]], offset))
        return got[-1]

    monkeypatch.setattr(packet_reader.os, "preadv", short)
    with PacketReader(tmp_path / "n") as reader:
        partial = reader.read()
        assert (reader.bytes_read, reader.reads) == (sum(got), len(got))
    assert equal(partial.values["conv.weight"], net.conv.weight)


def test_what_was_read_later_is_not_in_an_earlier_copy(tmp_path):
    write(tmp_path / "n", {"w": torch.ones(64, 512)}, {"w": torch.arange(64.0)})
    with PacketReader(tmp_path / "n") as reader:
        early = reader.read_above(60.0)
        reader.read()
        assert early.filled()["w"].any(1).nonzero().flatten().tolist() == [60, 61, 62, 63]


def test_rows_that_a_certificate_demands(net, tmp_path, counted):
    index = write(tmp_path / "n", net)
    with PacketReader(tmp_path / "n") as reader:
        before, rows = counted.bytes, [36, 0, 0, 7]
        assert reader.bytes_read == before
        found = reader.read_rows("embed.weight", rows)
        assert torch.equal(found, net.embed.weight[rows])
        holders = np.unique(reader.holders("embed.weight")[rows])
        least, most = index.sizes()[holders].sum(), 4096 * index.pages()[holders].sum()
        assert least <= reader.bytes_read - before == counted.bytes - before <= most
        assert reader.read_rows("embed.weight", []).shape == (0, 70)
        for name, rows in (("mask", [0]), ("embed.weight", [37]), ("embed.weight", [-1])):
            with pytest.raises(BadInput, match=name.split(".")[0]):
                reader.read_rows(name, rows)


def test_rows_not_read_are_zero_or_the_pilots(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 40), nn.ReLU(), nn.Linear(40, 500))
    index = write(tmp_path / "n", net, {"0": torch.arange(40.0)}, plane=True)
    with PacketReader(tmp_path / "n") as reader:
        partial = reader.read_above(35.0, pilot=True)
        assert reader.bytes_read == os.stat(tmp_path / "n").st_size - _unread(reader)
    zeros, pilot = partial.load(net, "zeros"), partial.load(net, "pilot")
    rows = partial.read["0.weight"]
    assert rows[35:].all() and not rows[:20].any()
    assert partial.read["2.weight"].all()  # no priority is known: these come first
    for made, least in ((zeros, 1.0), (pilot, 0.0)):
        assert torch.equal(made[0].weight[rows], net[0].weight[rows])
        assert torch.equal(made[0].bias, net[0].bias)
        error = (made[0].weight - net[0].weight).abs()[~rows]
        scale = net[0].weight[~rows].abs().amax(1, keepdim=True) / 127
        allowed = net[0].weight.abs()[~rows] * least + (1 - least) * scale * 0.5 * (1 + 1e-5)
        assert (error <= allowed).all()
    assert not zeros[0].weight[~rows].any()
    assert index.plane_bytes == 40 * 304 + 500 * 44
    with PacketReader(tmp_path / "n") as reader, pytest.raises(BadInput, match="pilot=True"):
        reader.read_above(35.0).load(net, "pilot")


def _unread(reader):
    """Bytes of the file that a reader had no reason to read: packets, and what fills pages."""
    index, size = reader.index, os.stat(reader._files[0].path).st_size
    pieces = [(s.offset, s.offset + s.nbytes) for s in index.sections]
    pieces = [(0, index.rest[0])] + [(t.plane[0], t.plane[0] + t.plane_bytes) for t in index.tensors]
    taken = np.flatnonzero(~reader._pending)
    starts = index.packets["page"][taken] * 4096
    pieces += [*zip(starts.tolist(), (starts + index.sizes()[taken]).tolist(), strict=True)]
    pieces.sort()
    total = reader._files[0].start + sum(end - begin for begin, end in pieces)
    for (_, end), (begin, _) in pairwise(pieces[3:]):
        total += begin - end if begin - end < 4096 else 0  # read through, within a run
    return size - total


# -------------------------------------------------------------------------------- spoilt, refused


def test_every_flipped_bit_is_noticed(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 70))
    path = tmp_path / "n"
    write(path, net, plane=True)
    with PacketReader(path) as reader:
        index, start = reader.index, reader._files[0].start
    good = path.read_bytes()
    spans = [(0, index.rest[0])] + [(t.plane[0], t.plane[0] + t.plane_bytes) for t in index.tensors]
    starts = index.packets["page"] * 4096
    spans += [*zip(starts.tolist(), (starts + index.sizes()).tolist(), strict=True)]
    generator = torch.Generator().manual_seed(0)
    places = [start + a for a, _ in spans] + [start + b - 1 for _, b in spans]
    for a, b in spans:
        places += [start + a + int(torch.randint(b - a, (), generator=generator)) for _ in range(20)]
    for k in range(32):  # every byte of a marker
        places.append(start + int(starts[1]) + k)
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << int(torch.randint(8, (), generator=generator))
        path.write_bytes(bad)
        with PacketReader(path) as reader, pytest.raises(RefusedFile, match="not what was written"):
            reader.read(pilot=True)
    path.write_bytes(good)
    with PacketReader(path) as reader:
        assert reader.read(pilot=True).complete


def test_shards_of_another_network_are_refused(tmp_path):
    for seed, name in ((0, "a"), (1, "b")):
        torch.manual_seed(seed)
        write(tmp_path / name, nn.Linear(64, 64), {"weight": torch.ones(64)}, shards=2)
    (shard,), (other,) = tmp_path.glob("a-*-1"), tmp_path.glob("b-*-1")
    os.replace(other, shard)
    with PacketReader(tmp_path / "a") as reader, pytest.raises(RefusedFile, match=shard.name):
        reader.read()
    os.remove(shard)
    with pytest.raises(BadInput, match="cannot be read"):
        PacketReader(tmp_path / "a")
    os.symlink(tmp_path / "b", shard)
    with pytest.raises(BadInput, match="cannot be read"):
        PacketReader(tmp_path / "a")


def _weight(path):
    """What a reader makes of the file."""
    with PacketReader(path) as reader:
        return reader.read().values["weight"]


@pytest.mark.parametrize("renames", [0, 1, 2, 3])
def test_a_killed_writer_leaves_the_old_or_the_new_network(tmp_path, monkeypatch, renames):
    """Replacing files one by one ends after each of them; the next writer cleans up."""
    path = tmp_path / "n.packets"
    nets = [nn.Linear(60, 40) for _ in range(3)]
    write(path, nets[0], shards=3)
    replace, done = os.replace, []

    def killed(source, target):
        if len(done) == renames:
            raise KeyboardInterrupt
        replace(source, target)
        done.append(target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        patched.setattr(Path, "unlink", lambda *_, **__: None)  # a dead process removes nothing
        if renames < 3:
            with pytest.raises(KeyboardInterrupt):
                write(path, nets[1], shards=3)
        else:
            write(path, nets[1], shards=3)
    assert torch.equal(_weight(path), nets[renames == 3].weight)
    write(path, nets[2], shards=2)
    assert torch.equal(_weight(path), nets[2].weight)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_writer_that_fails_removes_the_shards_that_it_added(tmp_path, monkeypatch):
    path, net = tmp_path / "n", nn.Linear(60, 40)
    write(path, net, shards=2)
    before = sorted(tmp_path.iterdir())

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for other in (nn.Linear(60, 40), net):  # the same network has shards of the same names
        with monkeypatch.context() as patched, pytest.raises(BadInput, match="No space left"):
            patched.setattr(os, "fsync" if other is net else "replace", full)
            write(path, other, shards=2)
        assert sorted(tmp_path.iterdir()) == before
    assert torch.equal(_weight(path), net.weight)


def _document(path):
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def _change(*keys, value):
    """An edit: the entry at `keys` becomes `value`, or what `value` makes of it."""

    def edit(document):
        *way, last = keys
        for key in way:
            document = document[key]
        document[last] = value(document[last]) if callable(value) else value

    return edit


def _swapped(values):
    return [values[1], values[0], *values[2:]]


EDITS = {
    "format": _change("format", value="demask.other"),
    "version": _change("version", value=2),
    "one entry more": _change("more", value=1),
    "shard outside": _change("shards", value=["../x"]),
    "shard absolute": _change("shards", value=["/etc/passwd"]),
    "shard hidden": _change("shards", value=[".x"]),
    "shard twice": _change("shards", value=["x", "x"]),
    "shard no text": _change("shards", value=[1]),
    "dtype": _change("tensors", "0.weight", "dtype", value="F33"),
    "dtype of integers": _change("tensors", "0.weight", "dtype", value="I32"),
    "shape of strings": _change("tensors", "0.weight", "shape", value=["60", 40]),
    "shape negative": _change("tensors", "0.weight", "shape", value=[60, -40]),
    "shape too large": _change("tensors", "0.weight", "shape", value=[60, 2**60]),
    "shape larger": _change("tensors", "0.weight", "shape", value=[60, 4_000_000]),
    "shape smaller": _change("tensors", "0.weight", "shape", value=[59, 40]),
    "order twice": _change("tensors", "0.weight", "order", value=lambda v: [v[0], *v[:-1]]),
    "order short": _change("tensors", "0.weight", "order", value=lambda v: v[:-1]),
    "order of floats": _change("tensors", "0.weight", "order", value=lambda v: [0.0, *v[1:]]),
    "plane outside": _change("tensors", "0.weight", "plane", 0, value=10**9),
    "plane on packets": _change("tensors", "0.weight", "plane", 0, value=lambda v: v + 8192),
    "plane CRC": _change("tensors", "0.weight", "plane", 1, value="xyz"),
    "section elsewhere": _change("sections", "2.bias", "offset", value=10**6),
    "section larger": _change("sections", "0.bias", "shape", value=[10**12]),
    "section on another": _change("sections", "2.bias", "offset", value=0),
    "rest": _change("rest", 0, value=8),
    "alias of nothing": _change("aliases", value={"x": "y"}),
    "alias over": _change("aliases", value={"0.bias": "0.weight"}),
    "a tensor twice": lambda d: d["tensors"].update({"0.bias": d["tensors"]["0.weight"]}),
    "a packet less": lambda d: [
        d["packets"].update({k: v[:-8] if k == "crc" else v[:-1]}) for k, v in list(d["packets"].items())
    ],
    "page outside": _change("packets", "page", 0, value=10**9),
    "page negative": _change("packets", "page", 0, value=-1),
    "page huge": _change("packets", "page", 0, value=2**63),
    "pages alike": _change("packets", "page", 0, value=lambda v: v + 1),
    "file": _change("packets", "file", 0, value=1),
    "tensor": _change("packets", "tensor", 0, value=9),
    "count": _change("packets", "count", 0, value=lambda v: v - 1),
    "count zero": _change("packets", "count", 0, value=0),
    "first": _change("packets", "first", 0, value=lambda v: v + 1),
    "priority": _change("packets", "priority", value=lambda v: v[::-1]),
    "priority infinite": _change("packets", "priority", 0, value=1e300),
    "priority text": _change("packets", "priority", 0, value="1"),
    "short column": _change("packets", "first", value=lambda v: v[:-1]),
    "CRCs": _change("packets", "crc", value=lambda v: v[:-8]),
    "a column more": _change("packets", "more", value=[]),
    "columns no object": _change("packets", value=[]),
}


@pytest.mark.parametrize("name", EDITS)
def test_hostile_indices_are_refused(name, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 70))
    write(tmp_path / "n", net, plane=True)
    document, data = _document(tmp_path / "n")
    EDITS[name](document)
    (tmp_path / "n").write_bytes(packet_index.framed(document) + data)
    with pytest.raises(RefusedFile):
        PacketReader(tmp_path / "n")


def test_packets_swapped_in_the_index_are_refused(tmp_path):
    write(tmp_path / "n", {"w": torch.randn(64, 512)})
    document, data = _document(tmp_path / "n")
    _change("packets", "page", value=_swapped)(document)
    (tmp_path / "n").write_bytes(packet_index.framed(document) + data)
    with PacketReader(tmp_path / "n") as reader, pytest.raises(RefusedFile, match="marker"):
        reader.read()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\0" * 4096,
        b"\xff" * 4096,
        struct.pack("<Q", 4088) + b" " * 4088,
        struct.pack("<Q", 4088) + b"[]".ljust(4088),
        struct.pack("<Q", 4088) + b"{}".ljust(4088),
        struct.pack("<Q", 4088) + b"[" * 4088,
        struct.pack("<Q", 10**8 - 8) + b"{}",
    ],
)
def test_other_files_are_refused(data, tmp_path):
    (tmp_path / "n").write_bytes(data)
    with pytest.raises((BadInput, RefusedFile)):
        PacketReader(tmp_path / "n")


def test_pipes_truncated_and_missing_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "missing", "."):
        with pytest.raises(BadInput):
            PacketReader(tmp_path / name)
    write(tmp_path / "n", {"w": torch.randn(64, 512)})
    raw = (tmp_path / "n").read_bytes()
    (tmp_path / "n").write_bytes(raw[:-1])
    with pytest.raises(RefusedFile, match="truncated"):
        PacketReader(tmp_path / "n")


def test_a_closed_reader_and_another_model_are_refused(tmp_path):
    write(tmp_path / "n", nn.Linear(64, 64))
    reader = PacketReader(tmp_path / "n")
    reader.close()
    with pytest.raises(BadInput, match="closed"):
        reader.read()
    with PacketReader(tmp_path / "n") as reader:
        partial = reader.read()
    with pytest.raises(BadInput, match=r"\(64, 65\)"):
        partial.load(nn.Linear(65, 64))
    with pytest.raises(BadInput, match="other"):
        partial.load(nn.ModuleDict({"other": nn.Linear(64, 64)}))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"weight": torch.ones(63)}, "64 finite numbers"),
        ({"weight": torch.full((64,), math.nan)}, "not finite"),
        ({"other": torch.ones(64)}, "other"),
        (3, "int"),
    ],
)
def test_priorities_that_do_not_fit_are_refused(data, words, tmp_path):
    with pytest.raises(BadInput, match=words):
        write(tmp_path / "n", nn.Linear(64, 64), data)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(BadInput, match="meta"):
        write(tmp_path / "n", nn.Linear(64, 64, device="meta"))
    with pytest.raises(BadInput, match="8-bit"):
        write(tmp_path / "n", {"w": torch.full((64, 64), math.inf)}, plane=True)
    with pytest.raises(BadInput, match="complex128"):
        write(tmp_path / "n", {"w": torch.ones(64, 64, dtype=torch.complex128)})
    with pytest.raises(BadInput, match="name of letters"):
        write(tmp_path / "a b", nn.Linear(64, 64), shards=2)
    assert not list(tmp_path.iterdir())
