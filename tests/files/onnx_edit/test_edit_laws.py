"""The law of every handler: at the positions of its layout, the edited node equals the original."""

import functools
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from demask.files.onnx.edit.editor import Editor
from demask.files.onnx.edit.names import NamedValue, NamedValues
from demask.files.onnx.edit.ops import HANDLERS, handle
from demask.files.onnx.edit.ops.carried import POINTWISE, REDUCTIONS
from demask.files.onnx.edit.protos import op_of, shell_of

SEEDS = 12
IR = {7: 3, 9: 4, 10: 5, 11: 6, 13: 7, 14: 7, 17: 8, 19: 9, 21: 10, 22: 10, 23: 11}


@dataclass(frozen=True, eq=False)
class Case:
    """A node. data: shapes of computed operands. constants: arrays of the operands that follow, or
    shapes of random ones; None for an absent one, the name of a value. opsets: that take the node
    in this form. dtype: of the data. dynamic: whether it is quantized by a node before (x0, z0)."""

    op: str
    data: tuple[tuple[int, ...], ...]
    constants: tuple = ()
    attributes: dict = field(default_factory=dict)
    opsets: tuple[int, ...] = (9, 13, 17, 21)
    outputs: int = 1
    low: float = -1.0
    dtype: type = np.float32
    dynamic: bool = False
    units: bool = False  # a recurrent layer: its outputs have units and directions in common

    def __str__(self):
        return f"{self.op}-{'x'.join(map(str, self.data[0]))}-{sorted(self.attributes)}"


MS = "com.microsoft."
IMAGE, ROWS = (2, 6, 5, 4), (3, 4, 6)
ints = lambda *n: np.asarray(n, np.int64)  # noqa: E731
UNARY = (
    "Abs Ceil Cos Elu Erf Exp Floor HardSigmoid Identity LeakyRelu Neg Relu Selu Sigmoid Sign "
    "Sin Softplus Softsign Tanh"
).split()
POSITIVE = "Log Reciprocal Sqrt".split()
BINARY = "Add Div Mul Sub".split()
CASES = [
    *(Case(op, (IMAGE,)) for op in UNARY),
    *(Case(op, (IMAGE,), low=0.5) for op in POSITIVE),
    *(Case(op, (IMAGE, IMAGE), low=0.5) for op in BINARY),
    *(Case(op, (IMAGE,), ((6, 1, 1),), low=0.5) for op in BINARY),
    *(Case(op, (IMAGE, (6, 1, 4)), low=0.5) for op in BINARY),
    Case("Pow", (IMAGE,), (np.float32(2),), low=0.5),
    Case("Max", (IMAGE, IMAGE), ((5, 1),)),
    Case("Min", (IMAGE, IMAGE)),
    Case("Sum", (IMAGE, IMAGE)),
    Case("Mean", (IMAGE, IMAGE)),
    Case("PRelu", (IMAGE,), ((6, 1, 1),)),
    Case("Cast", (IMAGE,), attributes={"to": TensorProto.DOUBLE}),
    Case("Clip", (IMAGE,), (np.float32(-0.5), np.float32(0.5)), opsets=(11, 13, 17)),
    Case("CastLike", (IMAGE, (2, 3)), opsets=(17,)),
    Case("HardSwish", (IMAGE,), opsets=(17, 21)),
    Case("Gelu", (IMAGE,), opsets=(21,)),
    Case("Mish", (IMAGE,), opsets=(21,)),
    Case("Greater", (IMAGE, IMAGE)),
    Case("Equal", (IMAGE, IMAGE), opsets=(13,)),
    *(Case("Softmax", (ROWS,), attributes={"axis": a}) for a in (1, 2)),
    Case("LogSoftmax", (ROWS,), attributes={"axis": 1}),
    Case("CumSum", (ROWS,), (ints(1),), opsets=(11, 17)),
    Case("LpNormalization", (ROWS,), attributes={"axis": 1}),
    Case("LayerNormalization", (ROWS,), ((6,), (6,)), {"axis": -1}, (17, 21)),
    *(
        Case(op, (IMAGE,), attributes={"axes": [2, 3], "keepdims": k}, opsets=(9, 11), low=0.5)
        for op in REDUCTIONS
        for k in (0, 1)
    ),
    *(Case(op, (IMAGE,), (ints(1, -1),), {"keepdims": k}, (21,), low=0.5) for op in REDUCTIONS for k in (0, 1)),
    Case("ReduceSum", (IMAGE,)),
    *(Case(op, (IMAGE,), attributes={"axis": 2, "keepdims": k}) for op in ("ArgMax", "ArgMin") for k in (0, 1)),
    Case("BatchNormalization", (IMAGE,), ((6,), (6,), (6,), np.full(6, 0.7, np.float32))),
    Case("InstanceNormalization", (IMAGE,), ((6,), (6,))),
    *(
        Case(op, (IMAGE,), attributes={"kernel_shape": [2, 2], "strides": [2, 1]})
        for op in ("MaxPool", "AveragePool", "LpPool")
    ),
    *(Case(op, (IMAGE,)) for op in ("GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool")),
    Case("Resize", (IMAGE,), (None, np.array([1, 1, 2, 2], np.float32)), opsets=(13, 17)),
    Case("Resize", (IMAGE,), (None, None, ints(2, 6, 10, 8)), opsets=(13, 17)),
    Case("Upsample", (IMAGE,), (np.array([1, 1, 2, 2], np.float32),), opsets=(9,)),
    Case("DepthToSpace", ((2, 8, 3, 4),), attributes={"blocksize": 2}),
    Case("Conv", (IMAGE,), ((8, 6, 3, 3),), opsets=(7, 13, 21)),
    Case("Conv", (IMAGE,), ((8, 6, 3, 3), (8,))),
    Case("Conv", (IMAGE,), ((8, 6, 3, 3), (8,)), {"pads": [1, 1, 1, 1]}, (9, 11, 17)),
    Case("Conv", (IMAGE,), ((8, 6, 3, 3),), {"auto_pad": "SAME_UPPER"}, (11,)),
    Case("Conv", ((2, 6, 9),), ((8, 6, 3), (8,)), {"pads": [2, 0], "strides": [2]}),
    Case("Conv", (IMAGE,), ((6, 1, 3, 3), (6,)), {"group": 6, "pads": [1, 1, 1, 1]}),
    Case("Conv", (IMAGE,), ((8, 3, 3, 3), (8,)), {"group": 2}),
    Case("ConvTranspose", (IMAGE,), ((6, 8, 3, 3), (8,)), {"strides": [2, 2]}),
    *(
        Case(f"{MS}FusedConv", (IMAGE,), ((8, 6, 3, 3), (8,)), {"activation": name, **params})
        for name, params in (("Relu", {}), ("LeakyRelu", {"activation_params": [0.1]}))
    ),
    Case(f"{MS}FusedConv", (IMAGE,), ((8, 6, 3, 3), (8,), (2, 8, 5, 4)), {"activation": "Relu", "pads": [1, 1, 1, 1]}),
    Case(f"{MS}FusedConv", (IMAGE,), ((6, 1, 1, 1), None, IMAGE), {"activation": "Tanh", "group": 6}),
    Case(f"{MS}FusedGemm", ((3, 6),), ((6, 8), (8,)), {"alpha": 0.5, "activation": "Sigmoid"}),
    *(Case(f"{MS}FusedMatMul", (ROWS,), ((6, 8),), a) for a in ({}, {"alpha": 0.5})),
    Case(f"{MS}FusedMatMul", (ROWS,), ((8, 6),), {"transB": 1, "alpha": 2.0}),
    Case(f"{MS}FusedMatMul", (ROWS, (3, 5, 6)), (), {"transB": 1}),
    Case(f"{MS}FusedMatMul", ((3, 6, 4), (3, 6, 5)), (), {"transA": 1}),
    Case(f"{MS}FusedMatMul", ((3, 6, 4), (3, 5, 6)), (), {"transA": 1, "transB": 1}),
    Case(f"{MS}FusedMatMul", ((3, 6, 4),), ((6, 5),), {"transA": 1}),
    *(Case(f"{MS}{op}", (ROWS,)) for op in ("Gelu", "FastGelu", "QuickGelu")),
    *(Case(f"{MS}{op}", (ROWS,), ((6,),)) for op in ("BiasGelu", "FastGelu")),
    *(Case(f"{MS}SkipLayerNormalization", (ROWS, ROWS), c) for c in (((6,),), ((6,), (6,), (6,)))),
    Case(f"{MS}SkipLayerNormalization", (ROWS, ROWS[1:]), ((6,), (6,))),
    Case(f"{MS}SkipSimplifiedLayerNormalization", (ROWS, ROWS), ((6,), (6,))),
    Case("SimplifiedLayerNormalization", (ROWS,), ((6,),)),
    Case("Gemm", ((3, 6),), ((6, 8), (8,)), {"alpha": 0.5}),
    Case("Gemm", ((3, 6),), ((8, 6), (8,)), {"transB": 1}),
    Case("Gemm", ((3, 6),), ((8, 6),), {"transB": 1}, (11, 13)),
    Case("MatMul", (ROWS,), ((6, 8),)),
    Case("MatMul", (ROWS,), ((3, 6, 8),)),
    Case("MatMul", (ROWS, (3, 6, 5))),
    Case("MatMul", (ROWS, (6, 5))),
    Case("Einsum", (ROWS, (6, 5)), attributes={"equation": "abc, cd -> abd"}, opsets=(13,)),
    Case("Einsum", (ROWS,), ((6, 2, 5),), {"equation": "abc,cde->deab"}, (13, 22)),
    Case("Einsum", ((4, 4, 5),), ((5,),), {"equation": "aab,b->a"}, (13,)),
    *(Case("Transpose", (ROWS,), attributes=a) for a in ({}, {"perm": [1, 2, 0]})),
    Case("Squeeze", ((3, 1, 6, 1),), attributes={"axes": [1, -1]}, opsets=(11,)),
    Case("Squeeze", ((3, 1, 6, 1),), (ints(1, -1),), opsets=(13, 21)),
    Case("Squeeze", ((3, 1, 6, 1),)),
    Case("Unsqueeze", (ROWS,), attributes={"axes": [1, 3]}, opsets=(9, 11)),
    Case("Unsqueeze", (ROWS,), (ints(1, -1),), opsets=(13, 21)),
    Case("Reshape", (ROWS,), (ints(0, 4, 2, 3),)),
    Case("Reshape", ((4, 6, 5),), (ints(4, -1),)),
    Case("Reshape", ((4, 6, 5),), (ints(24, 5),)),
    Case("Reshape", ((24, 5),), (ints(4, 6, 5),)),
    Case("Reshape", ((4, 6, 5),), (ints(2, 2, 30),)),
    Case("Flatten", (IMAGE,)),
    Case("Expand", ((6, 1),), (ints(3, 6, 4),)),
    *(Case("Concat", (ROWS, (3, 5, 6)), attributes={"axis": 1}) for _ in range(1)),
    Case("Concat", (ROWS,), ((3, 4, 2),), {"axis": -1}),
    Case("Slice", (ROWS,), attributes={"starts": [1], "ends": [4], "axes": [2]}, opsets=(9,)),
    Case("Slice", (ROWS,), attributes={"starts": [1, 1], "ends": [3, 99]}, opsets=(9,)),
    Case("Slice", (ROWS,), (ints(4, 0), ints(0, 3), ints(2, 1), ints(-2, 1)), opsets=(11, 21)),
    Case("Slice", (ROWS,), (ints(1), ints(-1), ints(-1)), opsets=(11, 13)),
    Case("Split", (ROWS,), attributes={"axis": 2}, outputs=3, opsets=(9, 11, 13, 17)),
    Case("Split", (ROWS,), attributes={"axis": 2, "split": [1, 3, 2]}, outputs=3, opsets=(11,)),
    Case("Split", (ROWS,), (ints(1, 3, 2),), {"axis": 2}, outputs=3, opsets=(13, 21)),
    Case("Split", (ROWS,), attributes={"axis": 2, "num_outputs": 3}, outputs=3, opsets=(21,)),
    Case("Gather", (ROWS,), (ints(5, 0, 3),), {"axis": 2}),
    Case("Gather", (ROWS,), (np.int64(-2),), {"axis": 1}),
    Case("Gather", (ROWS,), (ints(1, 2, 0, 1).reshape(2, 2),), {"axis": 0}),
    Case("Pad", (ROWS,), attributes={"pads": [0, 1, 0, 0, 0, 2]}, opsets=(9,)),
    Case("Pad", (ROWS,), (ints(0, 1, 0, 0, 0, 2),), opsets=(11, 13, 21)),
    Case("Hardmax", (ROWS,), attributes={"axis": 2}),
    Case("SpaceToDepth", ((2, 3, 4, 6),), attributes={"blocksize": 2}),
    Case("RMSNormalization", (ROWS,), ((6,),), {"axis": -1}, (23,)),
    Case("ConvTranspose", (IMAGE,), ((6, 8, 3, 3), (8,)), {"pads": [1, 1, 1, 1]}, (11,)),
    Case("LayerNormalization", (IMAGE,), ((5, 4), (5, 4)), {"axis": 2}, (17,)),
    Case("Pad", (ROWS,), (ints(0, 0, 1, 0, 0, 2),), {"mode": "reflect"}, (13, 21)),
    Case("Pad", (ROWS,), (ints(1, 2), np.float32(0.5), ints(1)), opsets=(21,)),
    Case("Resize", (IMAGE,), (None, None, ints(2, 6, 7, 9)), {"mode": "linear"}, (13,)),
    Case("Slice", (ROWS,), (ints(-1), ints(-99), ints(2), ints(-3)), opsets=(11, 21)),
    Case("CumSum", (ROWS,), (ints(2),), {"reverse": 1, "exclusive": 1}, (11,)),
    Case("QuantizeLinear", (IMAGE,), (np.float32(0.02), np.uint8(128)), opsets=(11, 13)),
    Case(
        "QuantizeLinear",
        (IMAGE,),
        (np.linspace(0.01, 0.02, 6, dtype=np.float32), np.arange(6, dtype=np.uint8)),
        {"axis": 1},
        (13, 17),
    ),
]


def integers(*shape, low=-9, dtype=np.int8):
    """Integers, one of five in the first axis the same at all positions of the others."""
    array = np.random.default_rng(len(shape)).integers(low, low + 19, shape)
    array[::5] = low + 9
    return array.astype(dtype)


def floats(*shape):
    return np.random.default_rng(0).uniform(0.01, 0.02, shape).astype(np.float32)


uint8 = functools.partial(integers, low=0, dtype=np.uint8)
SCALE, POINT = np.float32(0.02), np.uint8(3)
INT8 = {"dtype": np.int8}
UINT8 = {"dtype": np.uint8}
CASES += [
    Case("QuantizeLinear", (IMAGE,), (SCALE,), opsets=(10, 13, 21)),
    Case("QuantizeLinear", (ROWS,), (floats(6), integers(6)), {"axis": -1}, (13, 19)),
    Case("QuantizeLinear", (ROWS,), (floats(1, 4, 6), np.zeros((1, 4, 6), np.int8)),
         {"axis": 0, "block_size": 3}, (21,)),
    Case("DequantizeLinear", (IMAGE,), (SCALE,), opsets=(10, 13, 21), **UINT8),
    Case("DequantizeLinear", (IMAGE,), (SCALE, POINT), opsets=(10, 13, 21), **UINT8),
    Case("DequantizeLinear", (IMAGE,), (floats(6), uint8(6)), opsets=(13, 19), **UINT8),
    Case("DequantizeLinear", (ROWS,), (floats(6),), {"axis": -1}, (13, 21), **INT8),
    Case("DequantizeLinear", (ROWS,), (floats(1), integers(1)), {"axis": 0}, (13,), **INT8),
    Case("DequantizeLinear", (ROWS,), (floats(3, 4, 2), integers(3, 4, 2)),
         {"axis": 2, "block_size": 3}, (21,), **INT8),
    Case("DequantizeLinear", ((4,),), (floats(4),), {"axis": 0}, (13,), dtype=np.int32),
    *(Case("DynamicQuantizeLinear", (n,), outputs=3, opsets=(11, 17)) for n in (IMAGE, ROWS)),
    *(Case("MatMulInteger", (ROWS,), (integers(6, 8), *c), opsets=(11, 17), dynamic=True)
      for c in (("z0",), ("z0", np.int8(2)), ("z0", integers(8)))),
    Case("MatMulInteger", (ROWS,), (uint8(3, 6, 8), "z0", POINT), opsets=(11,), dynamic=True),
    *(Case("MatMulInteger", (ROWS,), (uint8(6, 8), *c), opsets=(10,), **UINT8)
      for c in ((), (POINT,), (POINT, uint8(8)))),
    *(Case("ConvInteger", (IMAGE,), (uint8(8, 6, 3, 3), "z0", *c), a, (11, 17), dynamic=True)
      for c in ((), (POINT,)) for a in ({}, {"pads": [1, 1, 1, 1]})),
    Case("ConvInteger", (IMAGE,), (uint8(6, 1, 3, 3), "z0"), {"group": 6}, (11,), dynamic=True),
    Case("ConvInteger", (IMAGE,), (uint8(8, 3, 3, 3), "z0"), {"group": 2}, (11,), dynamic=True),
    *(Case("ConvInteger", (IMAGE,), (uint8(8, 6, 3, 3), *c), a, (10,), **UINT8)
      for c in ((), (POINT,), (POINT, POINT)) for a in ({}, {"pads": [1, 1, 1, 1]})),
]  # fmt: skip
for scale, point, a in (
    (SCALE, np.int8(2), {}),
    (floats(8), integers(8), {}),
    (floats(8), np.zeros(8, np.int8), {"pads": [1, 1, 1, 1]}),
):
    operands = (SCALE, POINT, integers(8, 6, 3, 3), scale, point, np.float32(0.03), np.uint8(9))
    CASES += [
        Case("QLinearConv", (IMAGE,), (*operands, *b), a, (10, 17), **UINT8)
        for b in ((), (integers(8, dtype=np.int32),))
    ]
operands = (SCALE, POINT, uint8(6, 1, 3, 3), SCALE, POINT, np.float32(0.03), np.uint8(9), None)
CASES += [Case("QLinearConv", (IMAGE,), operands[:-1], {"group": 6}, (10,), **UINT8)]
for scale, point in ((SCALE, np.int8(2)), (floats(8), integers(8))):
    operands = (SCALE, POINT, integers(6, 8), scale, point, np.float32(0.03), np.uint8(9))
    CASES.append(Case("QLinearMatMul", (ROWS,), operands, opsets=(10, 17), **UINT8))


def zero_units(case):
    """1 and 4 of the layers below, but where an activation is not 0 at 0."""
    return [] if case.attributes.get("activations") == ["Sigmoid"] else [1, 4]


def layer(op, *, direction="forward", operands="wrb", outputs=3, opsets=(7, 14, 22), **attributes):
    """A recurrent layer of 6 units: 1 and 4 are 0 at every step, 2 is read by no other. operands:
    letters of w, r, b, l (lengths), h, c (initial states), p."""
    rng, count = np.random.default_rng(0), 2 if direction == "bidirectional" else 1
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    zero = {
        "h": (1, 4),
        "c": (1, 4),
        "w": [g * 6 + u for g in range(gates) for u in (1, 4)],
        "b": [g * 6 + u for g in range(2 * gates) for u in (1, 4)],
    }
    state = (3, count, 6) if attributes.get("layout") else (count, 3, 6)
    shapes = {
        "w": (count, gates * 6, 5),
        "r": (count, gates * 6, 6),
        "b": (count, gates * 12),
        "h": state,
        "c": state,
        "p": (count, 18),
    }
    arrays = {k: rng.uniform(-1, 1, n).astype(np.float32) for k, n in shapes.items()}
    arrays["w"][:, zero["w"]] = arrays["r"][:, zero["w"]] = arrays["b"][:, zero["b"]] = 0
    arrays["h"][..., zero["h"]] = arrays["c"][..., zero["c"]] = arrays["r"][..., 2] = 0
    arrays["l"] = np.asarray([2, 4, 1], np.int32)
    order = "wrblhcp" if op == "LSTM" else "wrblh"
    constants = tuple(arrays[k] if k in operands else None for k in order)
    x = (3, 4, 5) if attributes.get("layout") else (4, 3, 5)
    attributes |= {"direction": direction, "hidden_size": 6}
    outputs = min(outputs, 3 if op == "LSTM" else 2)
    return Case(op, (x,), constants, attributes, opsets, outputs, units=True)


CASES += [
    *(layer(op, direction=way) for op in ("LSTM", "GRU", "RNN") for way in ("forward", "reverse", "bidirectional")),
    *(layer(op, operands="wr") for op in ("LSTM", "GRU", "RNN")),
    *(layer(op, direction="bidirectional", operands="wrblhc") for op in ("LSTM", "GRU", "RNN")),
    *(layer(op, direction=way, operands="wrh") for op in ("LSTM", "GRU") for way in ("reverse", "bidirectional")),
    layer("LSTM", direction="bidirectional", operands="wrbhcp"),
    layer("LSTM", outputs=1, operands="wrp", input_forget=1),
    *(layer(op, layout=1, opsets=(14, 22)) for op in ("LSTM", "GRU", "RNN")),
    layer("GRU", linear_before_reset=1, operands="wrbh"),
    layer("RNN", activations=["Relu"]),
    layer("RNN", activations=["Sigmoid"]),
    layer("LSTM", activations=["HardSigmoid", "Softsign", "Elu"], direction="reverse"),
    layer("GRU", activations=["Sigmoid", "Relu", "HardSigmoid", "Tanh"], direction="bidirectional"),
    layer(
        "LSTM", activations=["Sigmoid", "ScaledTanh", "Tanh"], activation_alpha=[0.5], activation_beta=[0.7], clip=0.8
    ),
]
#: ops and forms without a handler: their operands are complete, and what they compute is unchanged
WHOLE = [
    Case("GroupNormalization", (IMAGE,), ((6,), (6,)), {"num_groups": 2}, (21,)),
    Case("Einsum", (ROWS, (6, 5)), attributes={"equation": "...c,cd->...d"}, opsets=(13,)),
    Case("TopK", (ROWS,), (ints(3),), {"axis": 2}, (11, 21), outputs=2),
    Case("ScatterND", (ROWS,), (ints(0, 2).reshape(2, 1), (2, 4, 6)), opsets=(13,)),
    Case("GatherND", (ROWS,), (ints(0, 1, 2, 3).reshape(2, 2),), opsets=(13,)),
    Case("GatherElements", (ROWS,), (np.zeros((3, 4, 2), np.int64),), {"axis": 2}, (13,)),
    Case("ScatterElements", (ROWS,), (np.ones((3, 4, 2), np.int64), (3, 4, 2)), {"axis": 2}, (13,)),
    Case("ConvTranspose", (IMAGE,), ((6, 4, 3, 3),), {"group": 2}, (11,)),
    Case("Tile", (ROWS,), (ints(1, 2, 1),), opsets=(13,)),
    Case("Trilu", (ROWS,), opsets=(17,)),
    *(
        Case("OneHot", (ROWS,), (np.int64(9), np.float32([0, 1])), {"axis": a}, (9, 11), dtype=np.int64)
        for a in (-1, 1)
    ),
]


#: layers and norms whose weights are computed, so that they lack positions, too
COMPUTED = [
    replace(case, data=case.data + case.constants, constants=())
    for case in CASES + WHOLE
    if case.constants and all(isinstance(c, tuple) for c in case.constants)
]


def random_layout(rng, shape, axes=1):
    """Some positions of up to `axes` axes, at least one of each, in any order."""
    layout = [None] * len(shape)
    for axis in rng.permutation(len(shape))[:axes]:
        if shape[axis] > 1:
            count = int(rng.integers(1, shape[axis]))
            positions = rng.permutation(shape[axis])[:count].tolist()
            layout[axis] = tuple(sorted(positions) if rng.integers(2) else positions)
    return tuple(layout)


def grid(layout, shape):
    """The index of the positions of a layout."""
    return np.ix_(*(range(n) if p is None else p for p, n in zip(layout, shape, strict=True)))


def array_of(rng, constant, low):
    if isinstance(constant, tuple):
        return rng.uniform(low, 1, constant).astype(np.float32)
    return np.asarray(constant)


def run(model, feeds):
    if any(a.name == "layout" for node in model.graph.node for a in node.attribute):
        return ReferenceEvaluator(model).run(None, feeds)  # the runtime has no batch first
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = model.SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def example(case, opset, rng):
    """A file of one node, its inputs, and facts: operands lack positions, whose value is known."""
    names, values, feeds, inputs, nodes, tensors = [], {}, {}, [], [], []
    for k, shape in enumerate(case.data):
        data = rng.uniform(case.low, 1, shape).astype(np.float32)
        if case.dtype != np.float32:
            data = rng.integers(0, 9, shape).astype(case.dtype)
        layout = random_layout(rng, shape)
        if case.units:
            layout = (None, None, *random_layout(rng, shape[2:]))
        known = np.zeros([n if p else 1 for n, p in zip(shape, layout, strict=True)], bool)
        fills = [0.5, 0.75, 0.0 if case.low < 0 else 1.0] if case.dtype == np.float32 else [0, 3, 5]
        fill = case.dtype(0 if case.dynamic else rng.choice(fills))
        for axis, positions in enumerate(layout):
            if positions is not None:
                lacking = [p for p in range(shape[axis]) if p not in positions]
                index = tuple(lacking if a == axis else slice(None) for a in range(len(shape)))
                known[index], data[index] = True, fill
        number, dtype = helper.np_dtype_to_tensor_dtype(data.dtype), torch.from_numpy(data).dtype
        complete = NamedValue(
            shape, dtype, np.zeros([1] * len(shape), bool), np.zeros([1] * len(shape)), (None,) * len(shape)
        )
        values[f"in{k}"] = complete
        name = f"f{k}" if case.dynamic else f"x{k}"
        values[name] = NamedValue(shape, dtype, known, known * fill, layout)
        feeds[f"in{k}"] = data
        inputs.append(helper.make_tensor_value_info(f"in{k}", number, shape))
        nodes.append(helper.make_node("Identity", [f"in{k}"], [name]))
        if case.dynamic:
            nodes.append(helper.make_node("DynamicQuantizeLinear", [name], ["x0", "s0", "z0"]))
            values["x0"] = replace(complete, dtype=torch.uint8)
            one = NamedValue((), torch.uint8, np.array(False), np.array(0), ())
            values |= {"z0": one, "s0": replace(one, dtype=torch.float32)}
        names.append(f"x{k}")
    for k, constant in enumerate(case.constants):
        is_value = isinstance(constant, str)
        names.append("" if constant is None else constant if is_value else f"c{k}")
        if constant is not None and not is_value:
            array = array_of(rng, constant, case.low)
            tensors.append(numpy_helper.from_array(array, f"c{k}"))
    outputs = [f"y{k}" for k in range(case.outputs)]
    domain, _, op = case.op.rpartition(".")
    nodes.append(helper.make_node(op, names, outputs, domain=domain, **case.attributes))
    infos = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph(nodes, "g", inputs, infos, tensors)
    model = helper.make_model(
        graph,
        ir_version=IR[opset],
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)],
    )
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    expected = run(model, feeds)
    wanted = units = None
    for name, y in zip(outputs, expected, strict=True):
        if wanted is None or case.op != "Split":
            wanted = random_layout(rng, y.shape, axes=2)
        if case.units:
            axis = y.ndim - 2 if case.attributes.get("layout") else y.ndim - 3
            units = units or random_layout(rng, (y.shape[axis], 6), axes=2)
            wanted = tuple({axis: units[0], y.ndim - 1: units[1]}.get(k) for k in range(y.ndim))
        if case.op == "Split":
            wanted = tuple(None if p and max(p) >= n else p for p, n in zip(wanted, y.shape, strict=True))
        known = np.ones(y.shape, bool)  # where it is not wanted
        known[grid(wanted, y.shape)] = False
        fill = np.zeros(y.shape)
        if case.units:  # some are 0 at every step, others any number where they are not wanted
            fill[...] = ~np.isin(np.arange(6), zero_units(case))
            known |= fill == 0
        dtype = torch.from_numpy(np.zeros(1, y.dtype)).dtype
        values[name] = NamedValue(y.shape, dtype, known, fill, wanted)
    return model, feeds, expected, NamedValues(values, {}, frozenset())


@pytest.mark.parametrize("case", [*CASES, *WHOLE, *COMPUTED], ids=str)
def test_edited_nodes_equal_the_originals_at_the_positions_that_are_left(case):
    was_cut = False
    for opset in case.opsets:
        for seed in range(SEEDS):
            rng = np.random.default_rng([opset, seed])
            model, feeds, expected, named = example(case, opset, rng)
            before = model.SerializeToString()
            editor, computed = None, {}
            while editor is None or editor.missing:
                editor = Editor(model, named, {}, handle, computed)
                editor.walk()
                assert not editor.missing or editor.missing != computed, "no end"
                computed |= editor.missing
            edited = editor.result(shell_of(model))
            assert model.SerializeToString() == before
            results = run(edited, feeds)
            for k, (a, b) in enumerate(zip(expected, results, strict=True)):
                assert a.dtype == b.dtype and a.shape == b.shape
                layout = named.values[f"y{k}"].layout
                index = grid(layout, a.shape)
                np.testing.assert_allclose(
                    b[index].astype(np.float64),
                    a[index].astype(np.float64),
                    atol=3e-6,
                    rtol=3e-6,
                    err_msg=f"op set {opset}, seed {seed}, y{k} {layout}, "
                    f"x {[named.values[f'x{j}'].layout for j in range(len(case.data))]}",
                )
            was_cut |= not editor.barriers
    assert was_cut or case in WHOLE + COMPUTED, "never cut: only barriers"


def test_every_handler_has_a_case():
    """Pointwise ops share one handler: the cases have some of each arity."""
    tested = {case.op for case in CASES}
    assert not {op for op in HANDLERS if op not in POINTWISE} - tested


def test_ops_of_other_domains_have_their_domain_in_their_name():
    node = helper.make_node("Relu", ["x"], ["y"], domain="com.microsoft")
    assert op_of(node) == "com.microsoft.Relu"
