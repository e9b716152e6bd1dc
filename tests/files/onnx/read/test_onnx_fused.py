"""Ops of com.microsoft: as ONNX Runtime computes them, alone and in files that it wrote."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from demask.files.onnx import from_onnx
from demask.files.onnx.check import Judge
from demask.files.onnx.edit.edit_file import edit_file
from demask.files.onnx.ops import ENTRIES
from demask.ops import TABLE

IMAGE, WEIGHT, ROWS = (2, 4, 5, 6), (3, 4, 3, 3), (2, 3, 8)
FUSED = [
    ("Relu", []),
    ("Sigmoid", []),
    ("Tanh", []),
    ("LeakyRelu", [0.1]),
    ("Clip", [-0.5, 0.25]),
    ("HardSigmoid", [0.3, 0.4]),
]
CASES = [
    *(
        ("FusedConv", (IMAGE, WEIGHT, (3,)), {"activation": name, **({"activation_params": p} if p else {})})
        for name, p in FUSED
    ),
    ("FusedConv", (IMAGE, WEIGHT, (3,), (2, 3, 5, 6)), {"activation": "HardSwish", "pads": [1] * 4}),
    *(
        ("FusedGemm", ((3, 5), (5, 4), (4,)), {"activation": name})
        for name in ("Relu", "Sigmoid", "Tanh", "Softplus", "Softsign")
    ),
    *(
        ("FusedGemm", ((3, 5), (5, 4)), {"activation": name, "activation_alpha": 0.3, **more})
        for name, more in (("Elu", {}), ("HardSigmoid", {"activation_beta": 0.4}))
    ),
    (
        "FusedGemm",
        ((5, 3), (4, 5), (4,)),
        {"activation": "LeakyRelu", "activation_alpha": 0.2, "transA": 1, "transB": 1, "alpha": 0.5},
    ),
    ("FusedMatMul", ((2, 3, 4, 5), (2, 3, 5, 6)), {"alpha": 0.5}),
    ("FusedMatMul", ((2, 3, 5, 4), (2, 3, 6, 5)), {"transA": 1, "transB": 1}),
    ("FusedMatMul", ((4, 2, 3, 5), (2, 3, 5, 6)), {"transBatchA": 1}),
    ("FusedMatMul", ((5, 2, 3, 4), (5, 2, 3, 6)), {"transBatchA": 1, "transA": 1, "transBatchB": 1}),
    *((op, (ROWS,), {}) for op in ("Gelu", "FastGelu", "QuickGelu")),
    ("QuickGelu", (ROWS,), {"alpha": 0.7}),
    *((op, (ROWS, (8,)), {}) for op in ("BiasGelu", "FastGelu")),
    ("SkipLayerNormalization", (ROWS, ROWS, (8,)), {}),
    ("SkipLayerNormalization", (ROWS, ROWS, (8,), (8,), (8,)), {"epsilon": 0.01}),
    ("SkipLayerNormalization", (ROWS, ROWS[1:], (8,), (8,)), {}),
    ("SkipSimplifiedLayerNormalization", (ROWS, ROWS, (8,)), {}),
    ("SkipSimplifiedLayerNormalization", (ROWS, ROWS, (8,), (8,)), {"epsilon": 0.01}),
]


def session(model, **options):
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    for name, value in options.items():
        setattr(settings, name, value)
    source = model if isinstance(model, str) else model.SerializeToString()
    return onnxruntime.InferenceSession(source, settings, providers=["CPUExecutionProvider"])


def write(path, nodes, inputs, outputs, tensors=()):
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors)
    model = helper.make_model(graph, ir_version=8, opset_imports=imports)
    onnx.save(model, path)
    return model


@pytest.mark.parametrize("op, shapes, attributes", CASES)
def test_fused_ops_are_computed_as_the_runtime_does(tmp_path, op, shapes, attributes):
    draw = np.random.default_rng(0)
    arrays = [draw.uniform(-1, 1, n).astype(np.float32) for n in shapes]
    names = [f"x{k}" for k in range(len(arrays))]
    outputs = ["y", "", "", "z"] if op.startswith("Skip") else ["y"]
    node = helper.make_node(op, names, outputs, domain="com.microsoft", **attributes)
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in zip(names, arrays, strict=True)]
    infos = [onnx.ValueInfoProto(name=name) for name in outputs if name]
    model = write(tmp_path / "in.onnx", [node], inputs, infos)
    expected = session(model).run(None, dict(zip(names, arrays, strict=True)))
    results = from_onnx(tmp_path / "in.onnx")(*map(torch.from_numpy, arrays))
    for a, b in zip(expected, results if isinstance(results, tuple) else [results], strict=True):
        np.testing.assert_allclose(b.numpy(), a, atol=2e-6)


def test_every_fused_op_has_a_case():
    fused = {name for domain, name in ENTRIES if domain == "com.microsoft"}
    assert fused == {op for op, _, _ in CASES}


@pytest.mark.parametrize("level, share", [("EXTENDED", 0.65), ("ALL", 0.8)])
def test_files_that_the_runtime_wrote_are_cut(tmp_path, level, share):
    """Of two convolutions and a linear layer, half of the units are zero. With all optimizations,
    convolutions are those of this machine."""
    draw = np.random.default_rng(0)

    def half(*shape):
        array = draw.uniform(-1, 1, shape).astype(np.float32)
        array[::2] = 0
        return array

    tensors = {
        "w": half(32, 3, 3, 3),
        "v": draw.uniform(-1, 1, (32, 32, 1, 1)),
        "b": half(32),
        "u": half(64, 32),
        "t": draw.uniform(-1, 1, (8, 64)),
    }
    tensors = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in tensors.items()]
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w", "b"], ["a"]),
        node("Relu", ["a"], ["a1"]),
        node("Conv", ["a1", "v"], ["c"]),
        node("Add", ["c", "a1"], ["c1"]),
        node("Relu", ["c1"], ["c2"]),
        node("GlobalAveragePool", ["c2"], ["d"]),
        node("Flatten", ["d"], ["d1"]),
        node("Gemm", ["d1", "u"], ["e"], transB=1),
        node("Relu", ["e"], ["e1"]),
        node("Gemm", ["e1", "t"], ["y"], transB=1),
    ]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", *sizes])
        for name, sizes in (("x", [3, 9, 9]), ("y", [8]))
    )
    model = write(tmp_path / "in.onnx", nodes, [x], [y], tensors)
    path = str(tmp_path / "fused.onnx")
    level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    session(model, graph_optimization_level=level, optimized_model_filepath=path)
    args = (torch.randn(2, 3, 9, 9),)
    edited = edit_file(path, args, TABLE).model
    Judge.of_file(path, args).compare(edited.SerializeToString())
    assert edited.ByteSize() < share * onnx.load(path).ByteSize()
