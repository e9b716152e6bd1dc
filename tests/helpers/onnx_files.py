"""Honest ONNX files to spoil, and how a spoilt one has to be refused: shared by tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from demask.errors import BadInput
from demask.files.onnx.module import from_onnx

REAL = Path(__file__).parents[3] / "shared/data/ultraface_rfb_320.onnx"
WEIGHTS = "weights.bin"  # beside the file that names it
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def value(name: str, kind: int = FLOAT, sizes: Any = ("n", 6)) -> Any:
    """An input or output."""
    return helper.make_tensor_value_info(name, kind, sizes)


def constant(name: str, array: Any) -> Any:
    """A tensor with its bytes in raw_data."""
    return numpy_helper.from_array(np.asarray(array), name)


def node(op: str, reads: Any, makes: Any, name: str = "", **attributes: Any) -> Any:
    """A call of an op."""
    return helper.make_node(op, reads, makes, name, **attributes)


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
    floats = helper.make_tensor("b", FLOAT, [8], np.arange(8.0))
    ints = helper.make_tensor("axes", INT64, [1], [0])
    return model(
        [
            node("Gemm", ["x", "w", "b"], ["h"], "gemm", alpha=1.0, transB=0),
            node("Relu", ["h"], ["r"], "relu"),
            node("Shape", ["x"], ["s"]),
            node("Gather", ["s", "zero"], ["n"], axis=0),
            node("Unsqueeze", ["n", "axes"], ["n1"]),
            node("Concat", ["n1", "two"], ["to"], axis=0),
            node("Reshape", ["r", "to"], ["y"]),
        ],
        [constant("w", weights(6, 8)), floats, ints, constant("zero", np.array(0)), constant("two", np.array([2, 4]))],
    )


def branches() -> Any:
    """If inside Loop, constants in graphs."""

    def branch(op: str) -> Any:
        made = node("Constant", [], [f"c{op}"], value=constant("", weights(6)))
        nodes = [made, node(op, ["v", f"c{op}"], [f"o{op}"])]
        return helper.make_graph(nodes, op, [], [value(f"o{op}")])

    body = helper.make_graph(
        [
            node("Greater", ["i", "one"], ["big"]),
            node("If", ["big"], ["next"], then_branch=branch("Add"), else_branch=branch("Mul")),
            node("Identity", ["c"], ["go"]),
        ],
        "body",
        [value("i", INT64, []), value("c", BOOL, []), value("v")],
        [value("go", BOOL, []), value("next")],
        [constant("one", np.array(1))],
    )
    trips = [constant("trips", np.array(3)), constant("yes", np.array(True))]
    return model([node("Loop", ["trips", "yes", "x"], ["y"], "loop", body=body)], trips)


def functions() -> Any:
    """A function that calls another, with an attribute that goes through."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("mine", 1)]
    leaky = node("LeakyRelu", ["a"], ["b"])
    leaky.attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT))
    inner = helper.make_function("mine", "Inner", ["a"], ["b"], [leaky], opsets, ["slope"])
    call = node("Inner", ["p"], ["q"], domain="mine", slope=0.2)
    outer = helper.make_function("mine", "Outer", ["p", "w"], ["r"], [call, node("Add", ["q", "w"], ["r"])], opsets)
    first = node("Outer", ["x", "w"], ["h"], "first", domain="mine")
    nodes = [first, node("Outer", ["h", "w"], ["y"], "second", domain="mine")]
    return model(nodes, [constant("w", weights(6))], [inner, outer])


def outside(location: str = WEIGHTS, offset: Any = 16, length: Any = 192, sizes: Any = (6, 8)) -> Any:
    """A weight beside the file."""
    tensor = TensorProto(name="w", data_type=FLOAT, dims=sizes, data_location=TensorProto.EXTERNAL)
    pairs = {"location": location, "offset": offset, "length": length, "checksum": "0"}
    for key, text in pairs.items():
        if text is not None:
            tensor.external_data.add(key=key, value=str(text))
    return model([node("MatMul", ["x", "w"], ["y"])], [tensor])


def kinds() -> Any:
    """Tensors of many types, text and a sparse one."""
    names = "FLOAT16 BFLOAT16 DOUBLE INT8 UINT8 INT16 UINT16 INT32 UINT32 UINT64 BOOL COMPLEX64 "
    names += "FLOAT8E4M3FN INT4 UINT4 FLOAT4E2M1"
    some = [helper.make_tensor(n, getattr(TensorProto, n), [3], [1, 0, 1]) for n in names.split()]
    some.append(helper.make_tensor("words", TensorProto.STRING, [2], [b"one", "zwö".encode()]))
    made = model([node("Relu", ["x"], ["y"])], some)
    places = constant("", np.array([1, 4]))
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(constant("sparse", weights(2)), places, [3, 2]))
    return made


def honest() -> dict[str, bytes]:
    """Honest files, and the real one where it is."""
    makers = (layers, branches, functions, outside, kinds)
    found = {make.__name__: make().SerializeToString() for make in makers}
    if REAL.exists():
        found["real"] = REAL.read_bytes()
    return found


def masked() -> dict[str, bytes]:
    """Small files whose layers have rows of zeros, so that an edit changes them: x, two layers, and
    between them nodes of one kind."""

    def zeros(*sizes: int, axis: int = -1) -> np.ndarray:
        array = weights(*sizes)
        np.moveaxis(array, axis, 0)[::2] = 0
        return array

    def layers_around(nodes: list[Any], constants: Any = (), width: int = 8) -> bytes:
        first = node("Gemm", ["x", "w", "b"], ["h"], "first")
        last = node("Gemm", [nodes[-1].output[0], "v"], ["y"], "last", transB=1)
        tensors = {"w": zeros(6, 8), "b": zeros(8), "v": weights(5, width), **dict(constants)}
        stored = [constant(name, array) for name, array in tensors.items()]
        return model([first, *nodes, last], stored).SerializeToString()

    def ints(*values: int) -> np.ndarray:
        return np.array(values, np.int64)

    image = node("Reshape", ["h", "to"], ["i"])
    flat, sizes = node("Flatten", ["c"], ["f"]), {"to": ints(0, 8, 1, 1)}
    branch = [helper.make_graph([node(op, ["h"], [f"o{op}"])], op, [], [value(f"o{op}")]) for op in ("Relu", "Neg")]
    return {
        "relu": layers_around([node("Relu", ["h"], ["r"])]),
        "sum": layers_around(
            [node("Gemm", ["x", "u"], ["k"]), node("Add", ["h", "k"], ["s"]),
             node("Sigmoid", ["s"], ["r"])], {"u": zeros(6, 8)[:, ::-1].copy()}),
        "conv": layers_around(
            [image, node("Conv", ["i", "k"], ["d"], pads=[1, 1, 1, 1]),
             node("BatchNormalization", ["d", "o", "b", "b", "o"], ["n"]),
             node("MaxPool", ["n"], ["c"], kernel_shape=[1, 1]), flat],
            {**sizes, "k": zeros(8, 8, 3, 3, axis=0), "o": np.abs(weights(8))}),
        "depthwise": layers_around(
            [image, node("Conv", ["i", "k"], ["c"], group=8, pads=[1, 1, 1, 1]), flat],
            {**sizes, "k": weights(8, 1, 3, 3)}),
        "transposed": layers_around(
            [image, node("ConvTranspose", ["i", "k"], ["c"]), flat],
            {**sizes, "k": zeros(8, 8, 1, 1, axis=1)}),
        "concat": layers_around(
            [node("Split", ["h"], ["p", "q"], axis=1, num_outputs=2),
             node("Concat", ["q", "p", "x"], ["c"], axis=1)], width=14),
        "attention": layers_around(
            [node("Unsqueeze", ["h", "axis"], ["u"]),
             node("Transpose", ["u"], ["t"], perm=[0, 2, 1]), node("MatMul", ["t", "u"], ["a"]),
             node("Softmax", ["a"], ["s"]),
             node("MatMul", ["u", "s"], ["m"]), node("Squeeze", ["m", "axis"], ["c"])],
            {"axis": ints(1)}),
        "norm": layers_around(
            [node("LayerNormalization", ["h", "o", "b"], ["n"]), node("Erf", ["n"], ["g"])],
            {"o": weights(8)}),
        "integers": layers_around(
            [node("QuantizeLinear", ["h", "s", "z"], ["q"]),
             node("DequantizeLinear", ["q", "s", "z"], ["d"])],
            {"s": np.float32(0.1), "z": np.uint8(128)}),
        "dynamic": layers_around(
            [node("DynamicQuantizeLinear", ["h"], ["q", "s", "z"]),
             node("MatMulInteger", ["q", "k", "z"], ["m"]), node("Cast", ["m"], ["c"], to=FLOAT)],
            {"k": (zeros(8, 8) * 20).astype(np.int8)}),
        "moves": layers_around(
            [node("Slice", ["h", "one", "end", "one"], ["s"]),
             node("Pad", ["s", "pads"], ["p"]), node("Gather", ["p", "rows"], ["g"], axis=1),
             node("Expand", ["g", "to"], ["e"])],
            {"one": ints(1), "end": ints(99), "pads": ints(0, 1, 0, 0),
             "rows": ints(3, 0, 5, 7, 1, 2, 2, 6), "to": ints(1, 8)}),
        "sizes": layers_around(
            [node("Shape", ["h"], ["s"]), node("Relu", ["h"], ["r"]),
             node("Reshape", ["r", "s"], ["c"])]),
        "branches": layers_around(
            [node("ReduceSum", ["h"], ["n"], keepdims=0), node("Greater", ["n", "zero"], ["t"]),
             node("If", ["t"], ["c"], then_branch=branch[0], else_branch=branch[1])],
            {"zero": np.float32(0)}),
    }  # fmt: skip


def with_weights(folder: Path) -> Path:
    """The folder, with the weights in it that `outside` names."""
    (folder / WEIGHTS).write_bytes(bytes(16) + weights(6, 8).tobytes())
    return folder


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])


# ----------------------------------------------------------------------------------- spoilt files


def edited(make: Callable[[], Any], change: Callable[[Any], Any]) -> Any:
    """An honest model, changed."""
    made = make()
    change(made)
    return made


def weight(**fields: Any) -> Callable[[Any], None]:
    """A change of the first constant."""

    def change(made: Any) -> None:
        held = made.graph.initializer[0]
        for name, new in fields.items():
            held.ClearField(name)
            if isinstance(new, list):
                getattr(held, name).extend(new)
            else:
                setattr(held, name, new)

    return change


def refused(path: Path | str, words: str, error: type[BadInput] = BadInput) -> None:
    """`from_onnx` raises just this error, with these words and the file's name, printable."""
    start = time.process_time()
    with pytest.raises(BadInput, match=words) as caught:
        from_onnx(path)
    assert type(caught.value) is error, caught.value
    text = str(caught.value)
    assert str(path) in text and text.isprintable(), text
    assert time.process_time() - start < 10  # of the processor; most take milliseconds


def planted(folder: Path, made: Any, words: str, error: type[BadInput] = BadInput) -> None:
    """A model (or bytes) written to the folder is refused."""
    path = folder / "planted.onnx"
    path.write_bytes(made if isinstance(made, bytes) else made.SerializeToString())
    refused(path, words, error)
