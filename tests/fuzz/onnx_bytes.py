"""Damaged ONNX files: the bytes of honest ones, changed; and the law that each is read or refused.

`python tests/fuzz/onnx_bytes.py FIRST COUNT FOLDER` checks seeds in a process of its own, so that a
crash is seen: `FOLDER/seed` says where it was.
"""

from __future__ import annotations

import random
import resource
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LIMIT = 2.0  # seconds of the processor for one file
MEMORY = 2**30  # bytes that a process may grow by over all its files
REAL = Path(__file__).parents[3] / "shared/data/ultraface_rfb_320.onnx"
WEIGHTS = "weights.bin"  # beside the file that names it

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
NUMBERS = [0, 1, -1, 2, 3, 7, 127, 255, 2**31 - 1, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63)]
TEXTS = ["", "x", "y", "w", "a.b", "Relu", "If", "Constant", "ai.onnx", "mine", "\x1b[2J",
         "é\u202e", "../up", "/etc/passwd", "plan", "forward", "x" * 5000]  # fmt: skip


# ------------------------------------------------------------------------------------ honest files


def value(name: str, kind: int = FLOAT, sizes: Any = ("n", 6)) -> Any:
    """An input or output."""
    return helper.make_tensor_value_info(name, kind, sizes)


def constant(name: str, array: Any) -> Any:
    """A tensor with its bytes in raw_data."""
    return numpy_helper.from_array(np.asarray(array), name)


def model(nodes: list[Any], constants: Any = (), functions: Any = (), *, ir: int = 9) -> Any:
    """A model from x to y."""
    graph = helper.make_graph(nodes, "g", [value("x")], [value("y", sizes=None)], list(constants))
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("mine", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=list(functions), ir_version=ir)


def weights(*sizes: int) -> np.ndarray:
    """Numbers of a fixed seed."""
    return np.random.default_rng(len(sizes)).normal(size=sizes).astype(np.float32)


def layers() -> Any:
    """Weights in raw_data and in float_data; arithmetic on shapes."""
    node = helper.make_node
    floats = helper.make_tensor("b", FLOAT, [8], np.arange(8.0))
    ints = helper.make_tensor("axes", INT64, [1], [0])
    return model(
        [node("Gemm", ["x", "w", "b"], ["h"], "gemm", alpha=1.0, transB=0),
         node("Relu", ["h"], ["r"], "relu"), node("Shape", ["x"], ["s"]),
         node("Gather", ["s", "zero"], ["n"], axis=0), node("Unsqueeze", ["n", "axes"], ["n1"]),
         node("Concat", ["n1", "two"], ["to"], axis=0), node("Reshape", ["r", "to"], ["y"])],
        [constant("w", weights(6, 8)), floats, ints, constant("zero", np.array(0)),
         constant("two", np.array([2, 4]))],
    )  # fmt: skip


def branches() -> Any:
    """If inside Loop, constants in graphs."""
    node = helper.make_node

    def branch(op: str) -> Any:
        made = node("Constant", [], [f"c{op}"], value=constant("", weights(6)))
        nodes = [made, node(op, ["v", f"c{op}"], [f"o{op}"])]
        return helper.make_graph(nodes, op, [], [value(f"o{op}")])

    body = helper.make_graph(
        [node("Greater", ["i", "one"], ["big"]),
         node("If", ["big"], ["next"], then_branch=branch("Add"), else_branch=branch("Mul")),
         node("Identity", ["c"], ["go"])],
        "body", [value("i", INT64, []), value("c", BOOL, []), value("v")],
        [value("go", BOOL, []), value("next")], [constant("one", np.array(1))],
    )  # fmt: skip
    trips = [constant("trips", np.array(3)), constant("yes", np.array(True))]
    return model([node("Loop", ["trips", "yes", "x"], ["y"], "loop", body=body)], trips)


def functions() -> Any:
    """A function that calls another, with an attribute that goes through."""
    node, opsets = helper.make_node, [helper.make_opsetid("", 18), helper.make_opsetid("mine", 1)]
    leaky = node("LeakyRelu", ["a"], ["b"])
    leaky.attribute.append(onnx.AttributeProto(
        name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT))  # fmt: skip
    inner = helper.make_function("mine", "Inner", ["a"], ["b"], [leaky], opsets, ["slope"])
    call = node("Inner", ["p"], ["q"], domain="mine", slope=0.2)
    outer = helper.make_function("mine", "Outer", ["p", "w"], ["r"],
                                 [call, node("Add", ["q", "w"], ["r"])], opsets)  # fmt: skip
    first = node("Outer", ["x", "w"], ["h"], "first", domain="mine")
    nodes = [first, node("Outer", ["h", "w"], ["y"], "second", domain="mine")]
    return model(nodes, [constant("w", weights(6))], [inner, outer])


def outside(
    location: str = WEIGHTS, offset: Any = 16, length: Any = 192, sizes: Any = (6, 8)
) -> Any:
    """A weight beside the file."""
    tensor = TensorProto(name="w", data_type=FLOAT, dims=sizes, data_location=TensorProto.EXTERNAL)
    pairs = {"location": location, "offset": offset, "length": length, "checksum": "0"}
    for key, text in pairs.items():
        if text is not None:
            tensor.external_data.add(key=key, value=str(text))
    return model([helper.make_node("MatMul", ["x", "w"], ["y"])], [tensor])


def kinds() -> Any:
    """Tensors of many types, text and a sparse one."""
    names = "FLOAT16 BFLOAT16 DOUBLE INT8 UINT8 INT16 UINT16 INT32 UINT32 UINT64 BOOL COMPLEX64 "
    names += "FLOAT8E4M3FN INT4 UINT4 FLOAT4E2M1"
    some = [helper.make_tensor(n, getattr(TensorProto, n), [3], [1, 0, 1]) for n in names.split()]
    some.append(helper.make_tensor("words", TensorProto.STRING, [2], [b"one", "zwö".encode()]))
    made = model([helper.make_node("Relu", ["x"], ["y"])], some)
    places = constant("", np.array([1, 4]))
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(
        constant("sparse", weights(2)), places, [3, 2]))  # fmt: skip
    return made


def honest() -> dict[str, bytes]:
    """Honest files, and the real one where it is."""
    makers = (layers, branches, functions, outside, kinds)
    found = {make.__name__: make().SerializeToString() for make in makers}
    if REAL.exists():
        found["real"] = REAL.read_bytes()
    return found


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
    from demask.files.onnx import wire

    pos, end = start, len(data) if end is None else end
    while pos < end:
        tag, pos = wire._varint(data, pos)
        if tag & 7 != 2:
            pos = wire._after_number(data, pos, tag & 7)
            continue
        yield pos
        size, pos = wire._varint(data, pos)
        if isinstance(table.get(tag), dict):
            yield from lengths(data, table[tag], pos, pos + size)
        pos += size


def relength(data: bytes, draw: random.Random, other: bytes) -> bytes:
    """The length of a field changed, by a little or to an absurd one."""
    from demask.files.onnx import wire

    table = wire._fields(onnx.ModelProto.DESCRIPTOR, {})
    made = data
    for place in sorted(draw.sample(list(lengths(data, table)), draw.choice([1, 1, 2])))[::-1]:
        size, behind = wire._varint(data, place)
        new = draw.choice([size + 1, max(size - 1, 0), 0, 2 * size, 2**31, 2**63, size + 2**32])
        made = made[:place] + varint(new) + made[behind:]
    return made


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])


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
    low, high = {field.TYPE_INT32: (-(2**31), 2**31), field.TYPE_UINT64: (0, 2**64)}.get(
        field.type, (-(2**63), 2**63))  # fmt: skip
    return draw.choice([n for n in (*NUMBERS, draw.randrange(30)) if low <= n < high])


DAMAGE = (flipped, cut, spliced, relength, revalued, revalued)


def damaged(seed: int, bases: dict[str, bytes]) -> bytes:
    """The file of a seed."""
    draw = random.Random(seed)
    small = [name for name in bases if name != "real"]
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


def grown() -> int:
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(first: int, count: int, folder: Path) -> int:
    """Check seeds; print those that break the law. The number of them."""
    bases, found = honest(), 0
    (folder / WEIGHTS).write_bytes(bytes(16) + weights(6, 8).tobytes())
    path = folder / "damaged.onnx"
    for data in bases.values():
        path.write_bytes(data)
        assert broken(path) is None, broken(path)
    before, seeds = grown(), folder / "seed"
    for seed in range(first, first + count):
        seeds.write_text(str(seed))
        path.write_bytes(damaged(seed, bases))
        why = broken(path)
        if why is not None:
            found += 1
            print(f"seed {seed}: {why}"[:600])
    if grown() - before > MEMORY:
        found += 1
        print(f"memory grew by {(grown() - before) >> 20} MiB")
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])) > 0)
