"""LSTM and GRU as they come in ONNX files: units that are always zero are removed from the file.

Built by hand, since exporters write the operators in one way only: both directions, initial states,
lengths, and GRU with both of its orders of reset and product.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

import demask

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

STEPS, BATCH, FEATURES, HIDDEN, OUT = 7, 3, 6, 10, 4
REST = [1, 4, 5, 8]  # units that are zero at every step
GATES = {"LSTM": 4, "GRU": 3}
CASES = [
    ("LSTM", "reverse", {}),
    ("LSTM", "bidirectional", {}),
    ("GRU", "forward", {"linear_before_reset": 1}),
    ("GRU", "bidirectional", {"linear_before_reset": 1}),
    ("GRU", "reverse", {"linear_before_reset": 0}),
]


def written(path: Path, op: str, direction: str, attributes: dict[str, int]) -> Path:
    """A file: x [steps, batch, features], a layer, a product of its outputs [steps, batch, OUT]."""
    rng = np.random.default_rng(0)
    ways = 2 if direction == "bidirectional" else 1

    def numbers(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / 3).astype(np.float32)

    # axes: direction, gate, unit, column. The last gate is what a unit's value is computed from:
    # i, o, f, c of an LSTM; z, r, h of a GRU.
    gates = GATES[op]
    w, r = numbers(ways, gates, HIDDEN, FEATURES), numbers(ways, gates, HIDDEN, HIDDEN)
    b = numbers(ways, 2, gates, HIDDEN)
    w[:, -1, REST] = r[:, -1, REST] = 0
    b[:, :, -1, REST] = 0
    constants = {
        "w": w.reshape(ways, gates * HIDDEN, FEATURES),
        "r": r.reshape(ways, gates * HIDDEN, HIDDEN),
        "b": b.reshape(ways, 2 * gates * HIDDEN),
        "last": numbers(ways * HIDDEN, OUT),
        "shape": np.array([0, 0, -1]),
    }
    make = onnx.helper.make_node
    nodes = [
        make(op, ["x", "w", "r", "b"], ["all", "h"], hidden_size=HIDDEN, direction=direction, **attributes),
        make("Transpose", ["all"], ["t"], perm=[0, 2, 1, 3]),
        make("Reshape", ["t", "shape"], ["flat"]),
        make("MatMul", ["flat", "last"], ["y"]),
    ]
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        nodes,
        "recurrent",
        [onnx.helper.make_tensor_value_info("x", kind, ["steps", "batch", FEATURES])],
        [onnx.helper.make_tensor_value_info("y", kind, ["steps", "batch", OUT])],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return path


def count(op: str, direction: str, units: int) -> int:
    """Numbers of a layer of so many units and of the product behind it."""
    ways = 2 if direction == "bidirectional" else 1
    return ways * (GATES[op] * units * (FEATURES + units + 2) + units * OUT)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("op", "direction", "attributes"), CASES)
def test_units_at_rest_leave_the_file(op: str, direction: str, attributes: dict[str, int], tmp_path: Path):
    given, out = tmp_path / "given.onnx", tmp_path / "out.onnx"
    written(given, op, direction, attributes)
    x = torch.randn(STEPS, BATCH, FEATURES, generator=torch.Generator().manual_seed(1))
    slim = demask.demask(demask.from_onnx(given), (x,))
    demask.to_onnx(slim, out)
    units = HIDDEN - len(REST)
    # Where a GRU resets before its product, torch has no such operator: it stands step by step,
    # and biases that belong to gates of the first steps stay.
    apart = 12 if attributes.get("linear_before_reset") == 0 else 0
    numbers = sum(parameter.numel() for parameter in slim.state_dict().values())
    assert count(op, direction, units) <= numbers <= count(op, direction, units) + apart
    y, z = (run(path, x.numpy()) for path in (given, out))
    assert np.abs(y - z).max() <= 1e-6
    if not apart:  # the operators themselves, for any number of steps
        x = torch.randn(2 * STEPS, BATCH + 1, FEATURES)
        assert np.abs(run(given, x.numpy()) - run(out, x.numpy())).max() <= 1e-6
        assert op in {node.op_type for node in onnx.load(out).graph.node}


def run(path: Path, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]
