"""Weights in a file in the order of their importance, each block after its header.

One read at one address fetches both the priority and the weights, so a network can be read up to a
budget of bytes or a priority, or just the rows that a certificate needs. `write` writes the file,
`PacketReader` reads it; `demask.pilot.packet_index` documents the format.
"""

from __future__ import annotations

import hashlib
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from demask.errors import BadInput
from demask.failures import public
from demask.files import atomic_write as atomic
from demask.files.weight_file import DTYPES, StoredTensor
from demask.machine.byte_sizes import parse_memory
from demask.pilot.packet_index import COLUMNS, HEADER_BYTES, PAGE, Array, Blocked, Marker, PacketIndex, framed, is_plain
from demask.pilot.packet_reader import PacketReader, Partial

SHARD = "demask.packets.shard"


@public
def write(
    path: str | os.PathLike[str],
    weights: nn.Module | Mapping[str, Tensor],
    data: Any = None,
    *,
    block: str | int = "4KiB",
    shards: int = 1,
    plane: bool = False,
) -> PacketIndex:
    """Writes weights to a file, the most important rows first, and returns the file's index.

    A packet is a block of rows of one tensor after a header with their priority. `PacketReader`
    reads the packets up to a number of bytes or down to a priority, or single rows. Tensors of
    floating-point numbers with two or more axes and at least `block` bytes are stored in packets of
    full rows (first axis: output units, filters); all other tensors are stored ahead of the
    packets. The file appears completely or not at all.

    Args:
        path: of the file; an existing one is replaced.
        weights: a model (its state_dict is written), or a mapping from names to tensors.
        data: priorities of rows: an ExecutionData (its magnitudes by layer; "fc1" is for
            "fc1.weight"), or a mapping from names of layers or weights to one finite number per
            row. Tensors without priorities get the highest of all. Default None: the L2 norm of
            each row.
        block: least bytes of a packet, a number or a text such as "4KiB" (the default): a packet
            has the fewest rows that reach it. Packets begin at multiples of 4,096 bytes.
        shards: number of files, 1 (the default) to 256. Packets of similar priority are stored in
            different files, so that several disks are read together. Files after the first are
            named after the first and their contents, as in "model.bin-0c27ed5f-1". The first file
            names the others and is replaced last, so at any moment either the old or the new
            network can be read; then old shards are removed.
        plane: whether to store a second, 8-bit form of all weights in packets (a float32 scale per
            row and an int8 per weight), which a reader can use for rows that it does not read;
            default False.

    Returns:
        A `PacketIndex`: the tensors, and the addresses of all packets.

    Raises:
        BadInput: `shards` or `block` is not valid, a tensor is on the meta device or has a dtype
            that cannot be stored, such as complex128, priorities do not fit the tensors or are not
            finite, plane=True and a weight contains Inf or NaN, the index is too large (write with
            larger blocks), the name of a file in shards has other characters than letters, digits
            and . + - _, or the path cannot be written.
        FileError: the disk is full, or another error of the file system.

    Example:
        >>> import os, tempfile, torch
        >>> from demask.pilot import PacketReader, write_packets
        >>> layer = torch.nn.Linear(1024, 256)  # 1 MiB of weights, 4 KiB per row
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "layer.packets")
        ...     _ = write_packets(path, layer, {"weight": torch.arange(256.0)})
        ...     with PacketReader(path) as reader:
        ...         part = reader.read_above(250)  # the six rows of priority 250 to 255
        >>> int(part.read["weight"].sum()), reader.bytes_read < 100_000
        (6, True)
    """
    if type(shards) is not int or not 1 <= shards <= 256:
        raise BadInput(f"expected shards from 1 to 256, got {shards!r}")
    tensors, aliases = _distinct(weights)
    least = parse_memory(block)
    blocked = {
        n: t
        for n, t in tensors.items()
        if t.ndim > 1 and t.is_floating_point() and t.numel() * t.element_size() >= least
    }
    plain = {n: t for n, t in tensors.items() if n not in blocked}
    priorities = _priorities(blocked, data)
    kinds = tuple(
        Blocked(n, t.dtype, tuple(t.shape), np.argsort(-priorities[n], kind="stable")) for n, t in blocked.items()
    )
    final = atomic.check_writable(path)
    sections = tuple(_sections(plain))
    rest = sections[-1].offset + sections[-1].nbytes if sections else 0
    packets, planes = _placed(kinds, priorities, least, shards, rest, plane)
    kinds = tuple(Blocked(t.name, t.dtype, t.shape, t.order, planes.get(t.name)) for t in kinds)
    index = PacketIndex(kinds, sections, (rest, 0), packets, (), aliases)
    if shards > 1:
        index = replace(index, shards=_shard_names(final.name, shards, index, blocked))
    return _written(final, index, [*blocked.values()], plain)


def _shard_names(name: str, shards: int, index: PacketIndex, blocked: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of the files after the first, from their contents: other weights, other names."""
    digest = hashlib.sha256(index.encoded())
    for tensor in blocked.values():
        digest.update(_bytes(tensor))
    names = tuple(f"{name}-{digest.hexdigest()[:8]}-{k}" for k in range(1, shards))
    if not is_plain(names[-1]):
        raise BadInput(f"{name!r}: a file in shards needs a name of letters, digits, . + - _")
    return names


def _distinct(weights: nn.Module | Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[tuple[str, str], ...]]:
    """Tensors by name, each once, and the further names of tied ones."""
    state = weights.state_dict() if isinstance(weights, nn.Module) else weights
    if not isinstance(state, Mapping):
        raise BadInput(f"expected a model, or a mapping from names to tensors, got {type(state).__name__}")
    tensors: dict[str, Tensor] = {}
    aliases, seen = [], {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES.values():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise BadInput(f"{name}: expected a tensor of {', '.join(DTYPES)}, got {kind}")
        if tensor.is_meta:
            raise BadInput(f"{name} has no values (it is on the meta device); load them first")
        key = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device
        if tensor.numel() and key in seen:
            aliases.append((name, seen[key]))
            continue
        seen[key] = name
        tensors[name] = tensor.detach()
    return tensors, tuple(aliases)


def _priorities(blocked: Mapping[str, Tensor], data: Any) -> dict[str, Array]:
    """A float32 per row of each tensor."""
    if data is None:
        return {n: _norms(t) for n, t in blocked.items()}
    row_priorities, unused = {}, set()
    named = data.magnitudes if hasattr(data, "magnitudes") else data
    if not isinstance(named, Mapping):
        raise BadInput(f"expected an ExecutionData or a mapping from names to priorities, got {type(data).__name__}")
    for name in named:
        weight = next((w for w in (name, f"{name}.weight") if w in blocked), None)
        if weight is None:
            unused.add(name)
            continue
        values = data.priorities(name) if hasattr(data, "priorities") else named[name]
        row_priorities[weight] = _numbers(torch.as_tensor(values), name, len(blocked[weight]))
    if unused and (named is data or not row_priorities):
        raise BadInput(
            f"there are priorities for {sorted(unused)[:5]}, which have no weights in "
            f"packets; those that have: {sorted(blocked)[:10]}"
        )
    top = max((float(v.max()) for v in row_priorities.values()), default=0.0)
    return {n: row_priorities.get(n, np.full(len(t), top, dtype=np.float32)) for n, t in blocked.items()}


def _norms(weight: Tensor) -> Array:
    """The L2 norm of each row; one that is not finite is the largest float32."""
    norms = torch.linalg.vector_norm(weight.flatten(1).double(), dim=1).cpu()
    most = torch.finfo(torch.float32).max
    return norms.nan_to_num(most, most).clamp(max=most).to(torch.float32).numpy()


def _numbers(values: Tensor, name: str, rows: int) -> Array:
    numbers = values.detach().cpu().to(torch.float32).numpy()
    if numbers.shape != (rows,) or not np.isfinite(numbers).all():
        raise BadInput(
            f"priorities of {name}: expected {rows} finite numbers, one per row, got "
            + (f"shape {numbers.shape}" if numbers.shape != (rows,) else "values that are not finite")
        )
    return numbers


def _sections(plain: Mapping[str, Tensor]) -> Iterator[StoredTensor]:
    end = 0
    for name, tensor in plain.items():
        end += -end % 8
        section = StoredTensor(name, tensor.dtype, tuple(tensor.shape), end)
        yield section
        end += section.nbytes


def _placed(
    kinds: tuple[Blocked, ...], priorities: Mapping[str, Array], least: int, shards: int, rest: int, plane: bool
) -> tuple[Array, dict[str, tuple[int, int]]]:
    """Packets at their addresses, without CRCs, and the addresses of the 8-bit forms."""
    entries = []
    for number, tensor in enumerate(kinds):
        each = min(-(-least // tensor.row_bytes), tensor.rows)
        for first in range(0, tensor.rows, each):
            top = float(priorities[tensor.name][tensor.order[first]])
            entries.append((number, first, min(each, tensor.rows - first), 0, 0, top, 0))
    packets = np.array(entries, dtype=COLUMNS)
    packets = packets[np.argsort(-packets["priority"], kind="stable")]
    packets["file"] = np.arange(len(packets)) % shards
    row_bytes = np.array([t.row_bytes for t in kinds], dtype=np.int64)
    sizes = HEADER_BYTES + packets["count"] * row_bytes[packets["tensor"]]
    end, planes = rest + -rest % PAGE, {}
    for tensor in kinds if plane else ():
        planes[tensor.name] = end, 0
        end += tensor.plane_bytes + -tensor.plane_bytes % PAGE
    for number in range(shards):
        mine = packets["file"] == number
        pages = -(-sizes[mine] // PAGE)
        before = 0 if number else end // PAGE
        packets["page"][mine] = before + np.cumsum(pages) - pages
    return packets, planes


# ------------------------------------------------------------------------------------- to the disk


def _written(final: Path, index: PacketIndex, blocked: list[Tensor], plain: Mapping[str, Tensor]) -> PacketIndex:
    """Write the files of an index, the first one last, so that what it names exists; the index with
    CRCs."""
    shards = [final.with_name(name) for name in index.shards]
    added = [path for path in shards if not path.exists()]
    try:
        with ExitStack() as stack:
            # Left in reverse: shards are renamed before the file that names them.
            files = [stack.enter_context(atomic.write(path)) for path in (final, *shards)]
            begun = os.fstat(files[0].fileno()).st_mtime_ns
            complete = _filled(files, final.name, index, blocked, plain)
    except BaseException:
        for path in added:
            path.unlink(missing_ok=True)
        raise
    _remove_old_shards(final, index.shards, begun)
    return complete


def _filled(
    files: list[BinaryIO], name: str, index: PacketIndex, blocked: list[Tensor], plain: Mapping[str, Tensor]
) -> PacketIndex:
    """Write what an index says into its files; the index with its CRCs."""
    packets, tensors = index.packets.copy(), list(index.tensors)
    first, starts = files[0], [len(index.encoded())]
    for k, file in enumerate(files[1:], 1):
        file.write(_shard_head(name, k))
        starts.append(file.tell())
    crc = _put_sections(first, starts[0], index.sections, plain)
    for k, tensor in enumerate(tensors):
        if tensor.plane is not None:
            data = quantized(blocked[k])
            _put(first, starts[0] + tensor.plane[0], data)
            tensors[k] = replace(tensor, plane=(tensor.plane[0], zlib.crc32(data)))
    for k, packet in enumerate(packets):
        data, packets["crc"][k] = _packet(packet, index, blocked[packet["tensor"]])
        _put(files[packet["file"]], starts[packet["file"]] + int(packet["page"]) * PAGE, data)
    complete = replace(index, tensors=tuple(tensors), rest=(index.rest[0], crc), packets=packets)
    _put(first, 0, complete.encoded())
    return complete


def _shard_head(name: str, number: int) -> bytes:
    return framed({"format": SHARD, "of": name, "number": number})


def _remove_old_shards(final: Path, current: tuple[str, ...], begun: int) -> None:
    """Remove the shards of earlier files of this name, and what a killed process left. begun: a
    later shard, in nanoseconds, is that of another process which is about to name it."""
    with suppress(OSError), os.scandir(final.parent) as entries:
        shards = [e for e in entries if e.name.startswith(f"{final.name}-")]
        for entry in shards:
            number = entry.name.rpartition("-")[2]
            if entry.name in current or not number.isdecimal() or len(number) > 3:
                continue
            if entry.is_file(follow_symlinks=False) and entry.stat().st_mtime_ns <= begun:
                head = _shard_head(final.name, int(number))
                with suppress(OSError), open(entry.path, "rb") as file:
                    if file.read(len(head)) == head:
                        os.unlink(entry.path)


def _put(file: BinaryIO, offset: int, data: bytes) -> None:
    file.seek(offset)
    file.write(data)


def _put_sections(file: BinaryIO, start: int, sections: tuple[StoredTensor, ...], plain: Mapping[str, Tensor]) -> int:
    """Write the tensors outside of packets; the CRC of them all."""
    data = bytearray()
    for section in sections:
        data += bytes(section.offset - len(data)) + _bytes(plain[section.name])
    _put(file, start, bytes(data))
    return zlib.crc32(data)


def _packet(packet: Any, index: PacketIndex, weight: Tensor) -> tuple[bytes, int]:
    """Header and weights of a packet, and its CRC."""
    order = index.tensors[packet["tensor"]].order
    first, count = int(packet["first"]), int(packet["count"])
    rows = weight[torch.from_numpy(order[first : first + count]).to(weight.device)]
    wide = rows.double()
    largest = float(wide.abs().max())
    exponent = math.frexp(largest)[1] if math.isfinite(largest) else 0
    marker = Marker(
        float(packet["priority"]),
        _float32(torch.linalg.vector_norm(wide)),
        exponent,
        _float32(wide.abs().max() / 127),
        int(packet["tensor"]),
        first,
        count,
    )
    header, body = marker.packed(), _bytes(rows)
    crc = zlib.crc32(body, zlib.crc32(header))
    return header + crc.to_bytes(4, "little") + body, crc


def _float32(value: Tensor) -> float:
    return float(value.float())  # struct refuses a float64 beyond float32's range


def _bytes(tensor: Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def quantized(weight: Tensor) -> bytes:
    """The 8-bit form of a weight: a float32 scale per row, then int8, w about scale · q.

    Symmetric, rounded to nearest: |w - scale · q| is at most half a scale. BadInput: weights that
    are not finite, for which there is no such form.
    """
    wide = weight.detach().cpu().float().flatten(1)
    if not bool(wide.isfinite().all()):
        raise BadInput("weights with Inf or NaN have no 8-bit form; write with plane=False")
    scale = wide.abs().amax(1) / 127
    steps = torch.where(scale > 0, scale, torch.ones_like(scale))
    values = (wide / steps[:, None]).round().clamp(-127, 127).to(torch.int8)
    return _bytes(steps) + _bytes(values)


__all__ = ["PacketReader", "Partial", "quantized", "write"]
