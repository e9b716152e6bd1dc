"""A network read packet by packet: up to a budget or a priority, or single rows."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from demask.errors import BadInput, RefusedFile
from demask.graph.module_copy import structural_copy
from demask.machine.byte_sizes import parse_memory
from demask.numerics import is_integer, is_number
from demask.pilot.packet_index import (
    HEADER,
    HEADER_BYTES,
    PAGE,
    Array,
    Marker,
    PacketIndex,
    check_addresses,
    header_length,
    parse,
)

Take = Callable[[int, Tensor, Tensor], None]
RUN_BYTES = 4 * 2**20  # read at once at most, where packets are adjacent


@dataclass(frozen=True, slots=True)
class Partial:
    """The part of a network that a `PacketReader` has read so far.

    Attributes:
        values: tensors by name, in the reader's memory, which later reads change; `filled` returns
            copies.
        read: for each tensor in packets a bool tensor [rows], True for rows that were read.
        pilot: for each tensor in packets its 8-bit form: float32 scales [rows] and int8 values of
            the tensor's shape; empty where it was not read.
        aliases: pairs (further name, name) of tied weights; default ().
        complete: whether every row was read.
    """

    values: Mapping[str, Tensor]
    read: Mapping[str, Tensor]
    pilot: Mapping[str, tuple[Tensor, Tensor]]
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every row was read."""
        return all(bool(rows.all()) for rows in self.read.values())

    def filled(self, fill: Literal["zeros", "pilot"] = "zeros") -> dict[str, Tensor]:
        """Copies of the tensors by name, with values for rows that were not read.

        Args:
            fill: "zeros" (the default), or "pilot" for the 8-bit form (scale times int8).

        Raises:
            BadInput: `fill` is another text, or the 8-bit form was not read.
        """
        if fill not in ("zeros", "pilot"):
            raise BadInput(f"expected fill='zeros' or 'pilot', got {fill!r}")
        if fill == "pilot" and not self.complete and not self.pilot:
            raise BadInput(
                "the pilot's 8-bit weights were not read: write the file with "
                "plane=True and read with pilot=True, or use fill='zeros'"
            )
        tensors = {}
        for name, value in self.values.items():
            tensors[name] = value.clone()
            if name not in self.read or self.read[name].all():
                continue
            absent = ~self.read[name]
            tensors[name][absent] = 0
            if fill == "pilot":
                scale, steps = self.pilot[name]
                wide = steps[absent].float() * scale[absent].view(-1, *[1] * (steps.ndim - 1))
                tensors[name][absent] = wide.to(value.dtype)
        return tensors

    def load(self, model: nn.Module, fill: Literal["zeros", "pilot"] = "zeros") -> nn.Module:
        """A copy of `model` with these weights.

        Args:
            model: an nn.Module, which may be on the meta device and is not changed.
            fill: values of rows that were not read, as of `filled`.

        Raises:
            BadInput: the model has other names or shapes, or as of `filled`.
        """
        values = self.filled(fill)
        copied = structural_copy(model, share=True)
        wanted = copied.state_dict(keep_vars=True)
        names = {**{n: n for n in values}, **dict(self.aliases)}
        if wanted.keys() != names.keys():
            odd = sorted(wanted.keys() ^ names.keys())
            raise BadInput(f"the file and the model have different tensors: {odd[:5]}")
        for name, other in names.items():
            here, there = wanted[name], values[other]
            if here.shape != there.shape:
                raise BadInput(f"{name}: the file has {tuple(there.shape)}, the model {tuple(here.shape)}")
            if isinstance(here, nn.Parameter) and not isinstance(there, nn.Parameter):
                values[other] = nn.Parameter(there, here.requires_grad)
        copied.load_state_dict({n: values[o] for n, o in names.items()}, assign=True)
        return copied


@dataclass(slots=True)
class _PacketFile:
    """An open file: its descriptor, where its data begins, how much there is."""

    path: Path
    descriptor: int
    start: int = 0
    size: int = 0


@dataclass(slots=True)
class _ReaderState:
    """The tensors that a reader has read."""

    values: dict[str, Tensor] = field(default_factory=dict)
    read: dict[str, Tensor] = field(default_factory=dict)
    pilot: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


def _is_replaced(path: Path, descriptor: int) -> bool:
    """Whether another file has the path of an open one by now; then its shards are gone, too."""
    try:
        return not os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


class PacketReader:
    """A reader of files of `write_packets` in parts: the most important rows, or rows by number.

    A packet is a block of rows of one tensor after a header with their priority. `read` reads the
    next packets up to a budget of bytes, `read_above` all packets of at least a priority, and
    `read_rows` the packets of some rows of a tensor. Each packet is read once, and each result
    contains all that was read before. Checksums (CRC-32) are compared for all data. A reader is a
    context manager, and `close` closes its files.

    Args:
        path: of the file, or of the first of several.

    Attributes:
        index: the `PacketIndex`: tensors in the file and addresses of their packets.
        bytes_read: number of bytes that were read so far, the index included.
        reads: number of read calls so far.

    Raises:
        BadInput: the file does not exist or cannot be read, is no packet file, or ends early.
        RefusedFile: the path is no plain file, or the index is damaged or names data that the files
            do not have; when data are read: the data differ from their checksum.

    Example:
        >>> import os, tempfile, torch
        >>> from demask.pilot import PacketReader, write_packets
        >>> layer = torch.nn.Linear(4000, 256)  # 16 kB per row, 4 MB in all
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = write_packets(path := os.path.join(folder, "layer.packets"), layer)
        ...     with PacketReader(path) as reader:
        ...         row = reader.read_rows("weight", [200])
        ...         part = reader.read("100KiB")  # and the six rows of largest norm
        >>> torch.equal(row, layer.weight[200:201]), int(part.read["weight"].sum())
        (True, 7)
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.bytes_read = self.reads = 0
        self._files: list[_PacketFile] = []
        self._state = _ReaderState()
        self._lookup: dict[str, Array] = {}
        try:
            self.index = self._opened(Path(path))
        except BaseException:
            self.close()
            raise
        self._pending = np.ones(len(self.index.packets), dtype=bool)
        self._sizes = self.index.sizes()

    def _opened(self, path: Path) -> PacketIndex:
        while True:
            main = self._open(path, follow=True)
            index = parse(self._pread(main, 8, main.start - 8), str(path))
            folder = Path(os.path.realpath(path)).parent
            try:
                for name in index.shards:
                    self._open(folder / name, follow=False)
                break
            except BadInput:
                if not _is_replaced(path, main.descriptor):
                    raise
                self.close()
        check_addresses(index, {k: f.size for k, f in enumerate(self._files)}, str(path))
        return index

    def _open(self, path: Path, *, follow: bool) -> _PacketFile:
        # Not blocking: a pipe would wait for a writer. A shard is a file of this folder, no link.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
        flags |= 0 if follow else getattr(os, "O_NOFOLLOW", 0)
        try:
            file = _PacketFile(path, os.open(path, flags))
            self._files.append(file)
            status = os.fstat(file.descriptor)
        except OSError as error:
            raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from error
        if not stat.S_ISREG(status.st_mode):
            raise RefusedFile(f"{path}: expected a plain file")
        if status.st_size < 8:
            raise BadInput(f"{path}: expected a packet file, got {status.st_size} bytes")
        first = self._pread(file, 0, 8)
        file.start = header_length(bytes(first), status.st_size, str(path))
        file.size = status.st_size - file.start
        return file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files; tensors that were read remain valid."""
        for file in self._files:
            os.close(file.descriptor)
        self._files = []

    # ------------------------------------------------------------------------------------- reading

    def read(self, budget: str | int | None = None, *, pilot: bool = False) -> Partial:
        """A `Partial` with all that was read so far and the next packets, highest priority first.

        The first call also reads the tensors outside of packets (small ones, such as biases).
        Reading stops at the first packet that exceeds the budget.

        Args:
            budget: most bytes that this call reads: a number, or a text such as "8MiB"; default
                None: all packets.
            pilot: whether to read the 8-bit form of all weights first; default False.

        Raises:
            BadInput: the budget is no amount of memory or is less than the bytes of the tensors
                outside of packets and of the 8-bit form, the file has no 8-bit form, or the reader
                is closed.
            RefusedFile: data differ from their checksum.
        """
        left = None if budget is None else parse_memory(budget)
        left = self._front(left, pilot)
        chosen, ends = [], {}
        for k in np.flatnonzero(self._pending).tolist():
            cost = self._cost(k, ends)
            if left is not None:
                if cost > left:
                    break
                left -= cost
            chosen.append(k)
        self._fetch(chosen)
        return self._partial()

    def read_above(self, priority: float, *, pilot: bool = False) -> Partial:
        """A `Partial` with all that was read so far and every packet of at least this priority.

        Args:
            priority: a number, compared with the highest priority of a packet's rows.
            pilot: whether to read the 8-bit form of all weights first; default False.

        Raises:
            BadInput: `priority` is no number, the file has no 8-bit form, or the reader is closed.
            RefusedFile: data differ from their checksum.
        """
        if not is_number(priority):
            raise BadInput(f"expected a number as priority, got {priority!r:.40}")
        self._front(None, pilot)
        high = self._pending & (self.index.packets["priority"] >= np.float32(priority))
        self._fetch(np.flatnonzero(high).tolist())
        return self._partial()

    def read_rows(self, name: str, rows: Sequence[int] | Tensor) -> Tensor:
        """Rows of one tensor, [rows, ...] in the order of `rows` and the tensor's dtype.

        The packets of these rows are read, if they were not before.

        Args:
            name: name of a tensor in packets.
            rows: row numbers, a sequence of int or an int64 tensor [rows].

        Raises:
            BadInput: the tensor is not in packets, a row does not exist, or the reader is closed.
            RefusedFile: data differ from their checksum.
        """
        number = self.number(name)
        wanted = torch.as_tensor(rows, dtype=torch.int64)
        count = self.index.tensors[number].rows
        if wanted.ndim != 1 or bool(((wanted < 0) | (wanted >= count)).any()):
            raise BadInput(f"{name} has rows 0 to {count - 1}, got {rows!r:.60}")
        holders = np.unique(self.holders(name)[wanted.numpy()])
        self._fetch(holders[self._pending[holders]].tolist())
        if not len(wanted):
            self._allocate_tensor(number)
        return self._state.values[name][wanted]

    def load_rows(self, name: str, rows: Tensor | None = None) -> Tensor:
        """Rows of one tensor as `read_rows` returns them, which the reader does not retain: a later call reads them
        again.

        Args:
            name: name of a tensor in packets.
            rows: int64 tensor [rows] of distinct row numbers; default None: all.

        Raises:
            BadInput: the tensor is not in packets, a row does not exist, or the reader is closed.
            RefusedFile: data differ from their checksum.
        """
        tensor = self.index.tensors[self.number(name)]
        wanted = torch.arange(tensor.rows) if rows is None else rows
        if wanted.ndim != 1 or bool(((wanted < 0) | (wanted >= tensor.rows)).any()):
            raise BadInput(f"{name} has rows 0 to {tensor.rows - 1}, got {rows!r:.60}")
        position = torch.full((tensor.rows,), -1)
        position[wanted] = torch.arange(len(wanted))
        result = torch.empty(len(wanted), *tensor.shape[1:], dtype=tensor.dtype)

        def take(k: int, here: Tensor, values: Tensor) -> None:
            there = position[here]
            result[there[there >= 0]] = values[there >= 0]

        self._fetch(np.unique(self.holders(name)[wanted.numpy()]).tolist(), take)
        return result

    def tensor(self, name: str) -> Tensor:
        """A tensor outside of packets.

        Args:
            name: name of the tensor.

        Raises:
            BadInput: there is no such tensor, or the reader is closed.
            RefusedFile: data differ from their checksum.
        """
        self._front(None, pilot=False)
        if name not in (section.name for section in self.index.sections):
            raise BadInput(f"{name!r} is no tensor outside of packets")
        return self._state.values[name]

    def number(self, name: str) -> int:
        """The number of a tensor in packets, in the index. Raises BadInput for another name."""
        number = next((k for k, t in enumerate(self.index.tensors) if t.name == name), None)
        if number is None:
            known = [t.name for t in self.index.tensors]
            raise BadInput(f"{name!r} is not in packets; these are: {known[:10]}")
        return number

    def holders(self, name: str) -> Array:
        """The number of the packet in the index that has each row of a tensor, int64 array [rows].

        Args:
            name: name of a tensor in packets.

        Raises:
            BadInput: the tensor is not in packets.
        """
        number = self.number(name)
        tensor = self.index.tensors[number]
        if tensor.name not in self._lookup:
            packet_of_row = np.empty(tensor.rows, dtype=np.int64)
            for k in np.flatnonzero(self.index.packets["tensor"] == number):
                first, count = self.index.packets[["first", "count"]][k]
                packet_of_row[tensor.order[first : first + count]] = k
            self._lookup[tensor.name] = packet_of_row
        return self._lookup[tensor.name]

    def _partial(self) -> Partial:
        for number in range(len(self.index.tensors)):
            self._allocate_tensor(number)
        state = self._state
        read = {name: rows.clone() for name, rows in state.read.items()}
        return Partial(dict(state.values), read, dict(state.pilot), self.index.aliases)

    def _cost(self, k: int, ends: dict[int, int]) -> int:
        """Bytes that packet `k` adds to a run that ended, per file, at `ends`."""
        number, start = (int(self.index.packets["file"][k]), int(self.index.packets["page"][k]) * PAGE)
        previous_end = ends.get(number)
        ends[number] = start + int(self._sizes[k])
        gap = start - previous_end if previous_end is not None and 0 <= start - previous_end < PAGE else 0
        return gap + int(self._sizes[k])

    def _front(self, left: int | None, pilot: bool) -> int | None:
        """Read the parts before the packets that were not read; the rest of the budget."""
        sections, plane = self.index.sections, []
        if pilot:
            plane = [t for t in self.index.tensors if t.name not in self._state.pilot]
            if any(t.plane is None for t in plane):
                raise BadInput("the file has no 8-bit form of its weights: write with plane=True")
        missing = bool(sections) and sections[0].name not in self._state.values
        need = (self.index.rest[0] if missing else 0) + sum(t.plane_bytes for t in plane)
        if left is not None and need > left:
            raise BadInput(f"what comes first has {need} bytes, the budget is {left}")
        if missing:
            self._read_sections()
        for tensor in plane:
            offset, crc = tensor.plane or (0, 0)
            data = self._data(0, offset, tensor.plane_bytes)
            self._checked(zlib.crc32(data) == crc, self._files[0], f"8-bit {tensor.name}")
            scale = torch.frombuffer(data, dtype=torch.float32, count=tensor.rows)
            steps = torch.frombuffer(data, dtype=torch.int8, offset=4 * tensor.rows)
            self._state.pilot[tensor.name] = scale, steps.view(tensor.shape)
        return None if left is None else left - need

    def _read_sections(self) -> None:
        size, crc = self.index.rest
        data = self._data(0, 0, size) if size else bytearray()
        self._checked(zlib.crc32(data) == crc, self._files[0], "tensors outside of packets")
        for section in self.index.sections:
            value = torch.empty(section.shape, dtype=section.dtype)
            if value.numel():
                piece = data[section.offset : section.offset + section.nbytes]
                plain = torch.frombuffer(piece, dtype=torch.uint8)
                if section.dtype == torch.bool:
                    plain = plain.ne(0)  # a byte of 2 is no bool
                value = plain.view(section.dtype).view(section.shape)
            self._state.values[section.name] = value

    def _fetch(self, chosen: list[int], take: Take | None = None) -> None:
        """Read these packets: one read for each run of neighbours. take: gets the number of each packet, its rows and
        their values; default: retains them."""
        for run in self._runs(chosen):
            first, last = run[0], run[-1]
            number = int(self.index.packets["file"][first])
            begin = int(self.index.packets["page"][first]) * PAGE
            end = int(self.index.packets["page"][last]) * PAGE + int(self._sizes[last])
            data = memoryview(self._data(number, begin, end - begin))
            for k in run:
                offset = int(self.index.packets["page"][k]) * PAGE - begin
                rows, values = self._checked_rows(k, data[offset : offset + int(self._sizes[k])], self._files[number])
                (take or self._retain)(k, rows, values)

    def _runs(self, chosen: list[int]) -> Iterator[list[int]]:
        """Groups of adjacent packets, at most `RUN_BYTES` together or a single one."""
        packets, pages = self.index.packets, self.index.pages()
        by_address = sorted(chosen, key=lambda k: (packets["file"][k], packets["page"][k]))
        run: list[int] = []
        for k in by_address:
            if run:
                last = packets[run[-1]]
                near = packets["file"][k] == last["file"]
                near = near and packets["page"][k] == last["page"] + pages[run[-1]]
                span = (packets["page"][k] + pages[k] - packets["page"][run[0]]) * PAGE
                if not near or span > RUN_BYTES:
                    yield run
                    run = []
            run.append(k)
        if run:
            yield run

    def _checked_rows(self, k: int, data: memoryview, file: _PacketFile) -> tuple[Tensor, Tensor]:
        """The rows of a packet, int64 [rows], and their values, which share its memory."""
        packet, tensor = self.index.packets[k], self.index.tensors[self.index.packets["tensor"][k]]
        marker = Marker(*HEADER.unpack_from(data))
        crc = int.from_bytes(data[HEADER.size : HEADER_BYTES], "little")
        same = (
            (marker.tensor, marker.first, marker.count) == (packet["tensor"], packet["first"], packet["count"])
            and marker.priority == packet["priority"]
            and crc == packet["crc"]
        )
        self._checked(bool(same), file, f"the marker of packet {k} ({tensor.name})")
        checksum = zlib.crc32(data[HEADER_BYTES:], zlib.crc32(data[: HEADER.size]))
        self._checked(checksum == crc, file, f"packet {k} ({tensor.name})")
        values = torch.frombuffer(data, dtype=tensor.dtype, offset=HEADER_BYTES)
        rows = torch.from_numpy(tensor.order[marker.first : marker.first + marker.count])
        return rows, values.view(-1, *tensor.shape[1:])

    def _retain(self, k: int, rows: Tensor, values: Tensor) -> None:
        """Copy the rows of a packet into the tensor."""
        number = int(self.index.packets["tensor"][k])
        self._allocate_tensor(number)
        name = self.index.tensors[number].name
        self._state.values[name][rows] = values
        self._state.read[name][rows] = True
        self._pending[k] = False

    def _allocate_tensor(self, number: int) -> None:
        """Memory for a tensor, at its first packet."""
        tensor = self.index.tensors[number]
        if tensor.name not in self._state.values:
            self._state.values[tensor.name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
            self._state.read[tensor.name] = torch.zeros(tensor.rows, dtype=torch.bool)

    def marker(self, k: int) -> Marker:
        """The header of one packet, a record of seven numbers.

        `priority` is the highest of its rows and `norm` the L2 norm of its weights, which are at
        most 2^`exponent` in magnitude. `scale` is the largest magnitude / 127. The packet has
        `count` rows of `index.tensors[tensor]`, from position `first` of the order of priority.

        Args:
            k: number of the packet in the index, 0 or more.

        Raises:
            BadInput: there is no such packet, or the reader is closed.
        """
        count = len(self.index.packets)
        if not is_integer(k) or not 0 <= k < count:
            raise BadInput(f"expected a packet from 0 to {count - 1}, got {k!r}")
        packet = self.index.packets[k]
        data = self._data(int(packet["file"]), int(packet["page"]) * PAGE, HEADER_BYTES)
        return Marker(*HEADER.unpack_from(data))

    def _checked(self, fine: bool, file: _PacketFile, what: str) -> None:
        if not fine:
            raise RefusedFile(
                f"{file.path}: {what} is not what was written (its CRC or marker "
                "differs from the index); copy the file again"
            )

    def _data(self, number: int, offset: int, size: int) -> bytearray:
        if not self._files:
            raise BadInput("the reader is closed; open the file again")
        file = self._files[number]
        return self._pread(file, file.start + offset, size)

    def _pread(self, file: _PacketFile, offset: int, size: int) -> Any:
        """Bytes of a file, counted."""
        data = bytearray(size)
        done, view = 0, memoryview(data)
        while done < size:
            got = os.preadv(file.descriptor, [view[done:]], offset + done)
            self.reads += 1
            if got == 0:
                raise BadInput(f"{file.path}: ends {size - done} bytes early; copy it again")
            done += got
            self.bytes_read += got
        return data
