"""Functions of ONNX ops at the edges that node tests of every day do not reach."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from demask.errors import BadInput
from demask.files.onnx.module import OnnxModule, key_of
from demask.files.onnx.ops.data import index, ml
from demask.files.onnx.ops.math.math import cut_quotient, quotient
from demask.files.onnx.ops.nn.norms import group_norm
from demask.files.onnx.read.reader import parse_model
from demask.files.onnx.values import Ratio
from onnx_files import helper, node, value

X = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0))


def network_of(call, opset: int) -> OnnxModule:
    """A network of one node, from x to y."""
    ports = [value("x", sizes=X.shape)], [value("y", sizes=None)]
    graph = helper.make_graph([call], "g", *ports)
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=7)
    return OnnxModule(parse_model(model, Path()))


@pytest.mark.parametrize("a", [-7, -6, -1, 0, 1, 6, 7])
@pytest.mark.parametrize("b", [-3, -2, 1, 2])
def test_quotients_are_cut_towards_zero(a: int, b: int) -> None:
    assert cut_quotient(a, b) == math.trunc(a / b)


def test_quotients_of_64_bits_without_sign() -> None:
    whole = [0, 1, 5, 6, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]
    pairs = [(a, b) for a in whole for b in whole[1:]]
    a, b = (torch.from_numpy(np.array(row, np.uint64)) for row in zip(*pairs, strict=True))
    assert quotient(a, b).tolist() == [x // y for x, y in pairs]


@pytest.mark.parametrize("whole", [-7, 0, 6, 7])
def test_fractions_are_rounded_like_floats(whole: int) -> None:
    ratio = Ratio(whole, 2)
    for rounded in (math.floor, math.ceil, math.trunc):
        assert rounded(ratio) == rounded(whole / 2)


def test_a_view_is_at_single_indices_and_progressions() -> None:
    for indices in (np.array(2), np.array([2]), np.array([1, 2, 3])):
        view = index._view_at(X, indices, 1)
        assert view is not None and np.array_equal(view, X.numpy()[:, indices])
    for indices in (np.array([[0, 1], [2, 3]]), np.array([[1]]), np.array([], np.int64)):
        assert index._view_at(X, indices, 1) is None


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_a_softmax_before_opset_13_is_over_all_axes_from_one_on(op: str, axis: int) -> None:
    net = network_of(node(op, ["x"], ["y"], axis=axis), 12)
    flat = X.reshape(math.prod(X.shape[: axis % 3]), -1)
    expected = {
        "Softmax": lambda: flat.softmax(-1),
        "LogSoftmax": lambda: flat.log_softmax(-1),
        "Hardmax": lambda: (flat == flat.amax(-1, keepdim=True)).float(),
    }[op]()
    torch.testing.assert_close(net(X), expected.view(X.shape))


@pytest.mark.parametrize("stash_type", [1, 11])
def test_group_norms_of_halves_are_computed_in_floats(stash_type: int) -> None:
    scale, bias = torch.linspace(0.5, 2, 6).half(), torch.linspace(-1, 3, 6).half()
    found = group_norm(X.half(), scale, bias, num_groups=2, version=21, stash_type=stash_type)
    exact = torch.group_norm(X.half().float(), 2, scale.float(), bias.float(), 1e-5)
    torch.testing.assert_close(found.float(), exact, rtol=2e-3, atol=4e-3)


def test_a_tree_with_another_transform_is_refused() -> None:
    leaf = {
        "nodes_splits": torch.zeros(1),
        "nodes_modes": torch.zeros(1, dtype=torch.uint8),
        "nodes_featureids": [0],
        "nodes_truenodeids": [0],
        "nodes_falsenodeids": [0],
        "nodes_trueleafs": [1],
        "nodes_falseleafs": [1],
        "leaf_targetids": [0],
        "leaf_weights": torch.ones(1),
        "tree_roots": [0],
        "n_targets": 1,
    }
    ml.tree_ensemble(torch.ones(2, 1), **leaf)
    with pytest.raises(BadInput, match="expected post_transform 0, 1 or 2, got 3"):
        ml.tree_ensemble(torch.ones(2, 1), **leaf, post_transform=3)


ML = "ai.onnx.ml"
ROWS = torch.tensor([[1.0, -2.0, 0.5], [torch.nan, 5.0, 2.0]])
SVM = {"coefficients": [1.0, -0.5], "support_vectors": [0.5, 1.0, -1.0, 2.0, 0.0, 1.0], "n_supports": 2, "rho": [0.25]}
REFERENCE = {
    "FeatureVectorizer": (ROWS, {"inputdimensions": [3]}),
    "Imputer": (ROWS, {"imputed_value_floats": [1.0, 2.0, 3.0], "replaced_value_float": torch.nan}),
    "OneHotEncoder": (torch.tensor([[2, 7], [3, 2]]), {"cats_int64s": [2, 3]}),
    **{
        f"SVMRegressor {kind}": (ROWS.nan_to_num(), {**SVM, "kernel_type": kind, "kernel_params": [0.3, 0.2, 2.0]})
        for kind in ("LINEAR", "POLY", "RBF", "SIGMOID")
    },
}


@pytest.mark.parametrize("name", REFERENCE)
def test_what_the_reference_computes_is_that_of_the_runtime(name: str) -> None:
    ort = pytest.importorskip("onnxruntime")
    x, attributes = REFERENCE[name]
    call = helper.make_node(name.partition(" ")[0], ["x"], ["y"], domain=ML, **attributes)
    kind = helper.np_dtype_to_tensor_dtype(x.numpy().dtype)
    ports = [helper.make_tensor_value_info("x", kind, x.shape)], [helper.make_tensor_value_info("y", 1, None)]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(ML, 3)]
    model = helper.make_model(helper.make_graph([call], "g", *ports), opset_imports=opsets, ir_version=8)
    (expected,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x.numpy()})
    net = OnnxModule(parse_model(model, Path()))
    torch.testing.assert_close(net(x), torch.from_numpy(expected), equal_nan=True)
    with pytest.raises(BadInput, match="numbers that a capture does not have"):
        torch.export.export(net, (x,))


def test_other_attributes_and_endless_sizes_are_refused() -> None:
    for attributes in ({"name": "other", "sample_size": 3}, {}):
        call = helper.make_node("MelWeightMatrix", ["x"] * 5, ["y"])
        call.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        with pytest.raises(BadInput, match="MelWeightMatrix"):
            network_of(call, 18)(torch.tensor(2**50))


def test_a_call_that_is_traced_is_not_recorded(monkeypatch) -> None:
    net = network_of(node("Relu", ["x"], ["y"]), 18)
    assert key_of([X], net) is not None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert key_of([X], net) is None
