"""Damaged ONNX files: the bytes of honest ones, changed; and the law that each is read or refused,
or edited or refused.

`python tests/fuzz/onnx_bytes.py FIRST COUNT FOLDER [edit]` checks seeds in a process of its own, so
that a crash is seen: `FOLDER/seed` says where it was.
"""

from __future__ import annotations

import random
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx

from onnx_files import honest, masked, varint, with_weights

LIMIT = 2.0  # seconds of the processor to read one file
EDIT_LIMIT = 20.0  # and to edit it, or to export it anew
EXPORTED = 10  # each so many-th file goes through `optimize_onnx` as a whole
MEMORY = 2**30  # bytes that a process may grow by over all its files
NUMBERS = [0, 1, -1, 2, 3, 7, 127, 255, 2**31 - 1, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63)]
TEXTS = ["", "x", "y", "w", "a.b", "Relu", "If", "Constant", "ai.onnx", "mine", "\x1b[2J",
         "é\u202e", "../up", "/etc/passwd", "plan", "forward", "x" * 5000]  # fmt: skip


# ----------------------------------------------------------------------------------------- damage


def flipped(data: bytes, draw: random.Random, other: bytes) -> bytes:
    """Some bits turned over, at the ends more often."""
    made = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8, 64])):
        end = draw.choice([len(made), min(len(made), 200)])
        place = draw.randrange(end)
        made[draw.choice([place, len(made) - 1 - place])] ^= 1 << draw.randrange(8)
    return bytes(made)


def cut(data: bytes, draw: random.Random, other: bytes) -> bytes:
    """The first bytes."""
    return data[: draw.randrange(len(data))]


def spliced(data: bytes, draw: random.Random, other: bytes) -> bytes:
    """A piece of another file, put in or in place of bytes here."""
    start = draw.randrange(len(other))
    piece = other[start : start + draw.choice([1, 4, 30, 300, 5000])]
    place = draw.randrange(len(data))
    return data[:place] + piece + data[place + draw.choice([0, len(piece), 2 * len(piece)]) :]


def lengths(data: bytes, table: Any, start: int = 0, end: int | None = None) -> Iterator[int]:
    """Where the lengths of fields stand, at all depths."""
    from demask.files.onnx.read import reader

    pos, end = start, len(data) if end is None else end
    while pos < end:
        tag, pos = reader._varint(data, pos)
        if tag & 7 != 2:
            pos = reader._after_number(data, pos, tag & 7)
            continue
        yield pos
        size, pos = reader._varint(data, pos)
        if isinstance(table.get(tag), dict):
            yield from lengths(data, table[tag], pos, pos + size)
        pos += size


def relength(data: bytes, draw: random.Random, other: bytes) -> bytes:
    """The length of a field changed, by a little or to an absurd one."""
    from demask.files.onnx.read import reader

    table = reader._field_table(onnx.ModelProto.DESCRIPTOR, {})
    made = data
    for place in sorted(draw.sample(list(lengths(data, table)), draw.choice([1, 1, 2])))[::-1]:
        size, behind = reader._varint(data, place)
        new = draw.choice([size + 1, max(size - 1, 0), 0, 2 * size, 2**31, 2**63, size + 2**32])
        made = made[:place] + varint(new) + made[behind:]
    return made


def revalued(data: bytes, draw: random.Random, other: bytes) -> bytes:
    """Fields of a readable file set to odd values, doubled, left out or moved."""
    made, donor = onnx.ModelProto.FromString(data), onnx.ModelProto.FromString(other)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        _revalue(draw.choice(messages(made)), draw, messages(donor))
    return made.SerializeToString()


def messages(root: Any) -> list[Any]:
    """A message and all below it (of many alike, the first few)."""
    found = [root]
    for field, held in root.ListFields():
        if field.message_type is not None:
            for inner in list(held)[:20] if field.is_repeated else [held]:
                found += messages(inner)
    return found


def _revalue(message: Any, draw: random.Random, donors: list[Any]) -> None:
    field = draw.choice(message.DESCRIPTOR.fields)
    if draw.random() < 0.8 and message.ListFields():
        field = draw.choice(message.ListFields())[0]
    held = getattr(message, field.name)
    if draw.random() < 0.15:
        message.ClearField(field.name)
    elif field.message_type is not None:
        alike = [m for m in donors if m.DESCRIPTOR is field.message_type] or [None]
        new = draw.choice(alike)
        target = held.add() if field.is_repeated else held
        if new is not None:
            target.CopyFrom(new)
    elif not field.is_repeated:
        setattr(message, field.name, odd(field, draw))
    elif len(held) and draw.random() < 0.7:
        held[draw.randrange(len(held))] = odd(field, draw)
    else:
        held.append(odd(field, draw))


def odd(field: Any, draw: random.Random) -> Any:
    """A value that the field can hold."""
    if field.type == field.TYPE_STRING:
        return draw.choice(TEXTS)
    if field.type == field.TYPE_BYTES:
        return draw.choice([b"", b"\xff", bytes(48), b"NOTSET", bytes(2**12)])
    if field.type == field.TYPE_ENUM:
        return draw.choice(field.enum_type.values).number
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return draw.choice([0.0, -1.0, 1e30, float("nan"), float("inf")])
    low, high = {field.TYPE_INT32: (-(2**31), 2**31), field.TYPE_UINT64: (0, 2**64)}.get(field.type, (-(2**63), 2**63))
    return draw.choice([n for n in (*NUMBERS, draw.randrange(30)) if low <= n < high])


DAMAGE = (flipped, cut, spliced, relength, revalued, revalued)


def damaged(seed: int, bases: dict[str, bytes]) -> bytes:
    """The file of a seed."""
    draw = random.Random(seed)
    small = sorted(bases.keys() - {"real"})
    name = draw.choice([*small, *small, *bases])
    other = bases[draw.choice(small)]
    return DAMAGE[seed % len(DAMAGE)](bases[name], draw, other)


# -------------------------------------------------------------------------------------------- law


def broken(path: Path) -> str | None:
    """Why the file at `path` breaks the law: it is read within a time, or refused by its name."""
    from demask.errors import DemaskError
    from demask.files.onnx.module import from_onnx

    start, why = time.process_time(), None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            from_onnx(path)
    except DemaskError as error:
        if str(path) not in str(error):
            why = f"an error that does not name the file: {error}"
        elif not str(error).replace("\n", "").isprintable():
            why = f"an error with raw characters: {str(error)!r}"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    spent = time.process_time() - start
    return f"{spent:.1f} s" if why is None and spent > LIMIT else why


def edit_broken(path: Path, seed: int = 0) -> str | None:
    """Why the file at `path` breaks the law: within a time it is edited to a file that loads, or
    refused, and nothing half written is left."""
    import torch

    from demask.errors import DemaskError
    from demask.files.onnx.edit.edit_file import edit_file, save_edited
    from demask.ops import TABLE
    from demask.optimize_onnx import optimize_onnx

    out, args = path.with_name("edited.onnx"), (torch.linspace(-1, 1, 12).reshape(2, 6),)
    out.unlink(missing_ok=True)
    before = {p.name for p in path.parent.iterdir()}
    start, why, is_refused = time.process_time(), None, False
    try:
        if seed % EXPORTED == 0:
            optimize_onnx(path, out, args, minimal=True)
        elif (edited := edit_file(path, args, TABLE)) is not None:
            save_edited(edited, out)
    except DemaskError as error:
        is_refused = True
        if not str(error).replace("\n", "").isprintable():
            why = f"an error with raw characters: {str(error)!r}"
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"
    spent = time.process_time() - start
    added = {p.name for p in path.parent.iterdir()} - before
    if why is None and ((is_refused and added) or added - {"edited.onnx", "edited.onnx.data"}):
        why = f"{added} is left"
    if why is None and out.exists():
        onnx.load(out)
    return f"{spent:.1f} s" if why is None and spent > EDIT_LIMIT else why


def grown() -> int:
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(first: int, count: int, folder: Path, law: str = "read") -> int:
    """Check seeds; print those that break the law. The number of them."""
    bases, found = honest() if law == "read" else masked(), 0
    path = with_weights(folder) / "damaged.onnx"
    check = broken if law == "read" else edit_broken
    for name, data in bases.items():
        path.write_bytes(data)
        assert (why := check(path)) is None, f"{name}: {why}"
    before, seeds = grown(), folder / "seed"
    for seed in range(first, first + count):
        seeds.write_text(str(seed))
        path.write_bytes(damaged(seed, bases))
        why = broken(path) if law == "read" else edit_broken(path, seed)
        if why is not None:
            found += 1
            print(f"seed {seed}: {why}"[:600])
    if grown() - before > MEMORY:
        found += 1
        print(f"memory grew by {(grown() - before) >> 20} MiB")
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:]) > 0)
