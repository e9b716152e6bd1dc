"""Programs: text in and out, hostile text, shapes; and what they compute in ATen ops."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from demask.errors import BadInput
from demask.exec.steps import reference as dense
from demask.exec.steps import segment_weights as stored
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_rows import call
from demask.exec.steps.segment_steps import (
    SparseWeight,
    activation_step,
    add_step,
    concat_step,
    conv_step,
    flat_step,
    linear_step,
    mean_step,
    pool_step,
)
from demask.ops.activations import ACTIVATIONS
from sparse_cases import convolved, csr, layer, matrix, weight

EVERY = SegmentProgram(
    ("image",),
    (
        conv_step(0, weight(4, 9), (3, 0, 4), 4, (3, 3), (2, 2), ((1, 1), (0, 2)), (1, 2), 2, name="c"),
        activation_step(1, ("leaky_relu", (0.1,))),
        pool_step(2, True, (2, 2), (2, 2), (1, 0), ceil=True, counted=False),
        add_step(3, 3, ("clamp", (0.0, 6.0))),
        concat_step((4, 3)),
        mean_step(5, True),
        flat_step(6),
        linear_step(7, SparseWeight((0, 0, 4), (1, 0, 6), (2, 0, 4), (4, 0, 5)), None, 5, ("gelu", ())),
    ),
    (8, 5),
)


def test_a_program_comes_back_from_its_text():
    assert SegmentProgram.parse(EVERY.text()) == EVERY
    assert EVERY.kinds == ("image",) * 7 + ("tokens",) * 2


def test_a_dense_weight_has_no_row_starts_and_columns():
    step = linear_step(0, SparseWeight((0, 0, 6)), None, 2)
    program = SegmentProgram(("tokens",), (step,), (1,))
    assert '"weight":[[0,0,6]]' in program.text()
    assert SegmentProgram.parse(program.text()) == program
    x, values = torch.randn(4, 3), torch.randn(6)
    (y,) = dense.run(program, [x], [values])
    assert torch.equal(y, x @ values.reshape(2, 3).T)
    for wrong in (torch.randn(4, 2), torch.randn(4, 4)):
        with pytest.raises(BadInput, match="expected a matrix 2 x"):
            dense.run(program, [wrong], [values])
    with pytest.raises(BadInput, match="expected float values"):
        dense.run(program, [x], [values.to(torch.int8)])


def test_shapes_of_values():
    shapes = EVERY.shapes([(3, 4, 9, 12)])
    assert shapes[1] == (3, 4, 5, 5)
    assert shapes[3] == (3, 4, 3, 3)
    assert (shapes[5], shapes[8]) == ((3, 8, 3, 3), (3, 5))


def changed(**fields) -> dict:
    """The text of a convolution with other fields, as JSON."""
    step = {"op": "conv", "x": 0, "weight": [[0, 0, 9], [1, 0, 5], [2, 0, 9]], "bias": None, "out": 4, "kernel": [3, 3]}
    return {"inputs": ["image"], "steps": [step | fields], "outputs": [1]}


WRONG_FIELDS = [
    {"x": 1},
    {"x": -1},
    {"x": True},
    {"x": [0]},
    {"out": 0},
    {"out": 2.0},
    {"out": 5},
    {"kernel": [3]},
    {"kernel": [0, 1]},
    {"kernel": 3},
    {"stride": [1, -1]},
    {"dilation": [2**31, 1]},
    {"padding": [[0, 0]]},
    {"padding": [[0, 0, 0], [0]]},
    {"padding": [[0, -1], [0, 0]]},
    {"padding": [[-1, 0], [0, 0]], "transposed": True},
    {"padding": [[0, -1], [0, 0]], "transposed": True},  # stride and dilation 1: no room
    {"padding": [[0, -2], [0, 0]], "transposed": True, "stride": [2, 1]},
    {"padding": [1, 1]},
    {"groups": 3},
    {"groups": 0},
    {"transposed": 1},
    {"act": ["relu"]},
    {"act": ["relu", [1.0]]},
    {"act": ["clamp", [0.0, float("nan")]]},
    {"act": ["clamp", [0, 10**400]]},
    {"act": ["eval", []]},
    {"act": [["relu"], []]},
    {"bias": [3, 0, 5]},
    {"bias": [3, 0]},
    {"bias": [3, 4, 0]},
    {"bias": "abc"},
    {"weight": [[0, 0, 9], [1, 0, 5]]},
    {"weight": [[0, 0, 9]]},  # of 4 rows
    {"weight": [[0, 0, 8], None, None, [3, 0, 4]]},
    {"weight": [[0, 0, 8], [1, 0, 5], None]},
    {"weight": []},
    {"weight": [[0, 0, 9], [1, 0, 4], [2, 0, 9]]},
    {"weight": [[0, 0, 9], [1, 0, 5], [2, 0, 8]]},
    {"weight": [[0, 0, 2**31], [1, 0, 5], [2, 0, 2**31]]},
    {"weight": [[0, 0, 9], [1, 0, 5], [2, 0, 9], [3, 0, 9]]},
    {"weight": 5},
    {"name": 3},
    {"add": 1},
    {"unknown": 1},
    {"op": "exec"},
    {"op": []},
]


@pytest.mark.parametrize("fields", WRONG_FIELDS, ids=lambda f: json.dumps(f)[:40])
def test_a_step_that_makes_no_sense_is_refused(fields):
    SegmentProgram.parse(json.dumps(changed()))
    with pytest.raises(BadInput):
        SegmentProgram.parse(json.dumps(changed(**fields)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "null",
        "{}",
        "[" * 100_000,
        '{"inputs": ["image"]}',
        " " * 5_000_000,
        '{"inputs":["image"],"steps":[],"outputs":[]}',
        '{"inputs":["image"],"steps":[],"outputs":[1]}',
        '{"inputs":["video"],"steps":[],"outputs":[0]}',
        '{"inputs":[],"steps":[],"outputs":[0]}',
        '{"inputs":["image"],"steps":[{"op":"pool","x":0,"mean":true,"kernel":[2,2],"stride":[1,1],'
        '"dilation":[2,1]}],"outputs":[0]}',
        '{"inputs":["image"],"steps":[{"op":"cat","xs":[]}],"outputs":[0]}',
        '{"inputs":["image"],"steps":[{"op":"mean","x":0,"keep":1}],"outputs":[0]}',
        '{"inputs":["image"],"steps":[{"op":"add","x":0,"z":null}],"outputs":[0]}',
        '{"inputs":["image","tokens"],"steps":[{"op":"add","x":0,"z":1}],"outputs":[0]}',
        '{"inputs":["tokens"],"steps":[{"op":"flat","x":0}],"outputs":[0]}',
        '{"inputs":["signal"],"steps":[{"op":"map","x":0,"act":null}],"outputs":[0]}',
    ],
    ids=lambda text: text[:30],
)
def test_text_that_is_no_program_is_refused(text):
    with pytest.raises(BadInput):
        SegmentProgram.parse(text)


def test_random_damage_gives_a_program_or_bad_input():
    draw, text = random.Random(0), EVERY.text()
    parts = ["-1", "0", "1e99", "null", "[]", "{}", '"relu"', "99999999999", "true", "[[0,0],[0,0]]"]
    whole = json.loads(text)
    for _ in range(3000):
        found = json.loads(json.dumps(whole))
        step = draw.choice(found["steps"])
        step[draw.choice([*step, "add", "z", "xs", "x"])] = json.loads(draw.choice(parts))
        damaged = json.dumps(found) if draw.random() < 0.8 else flipped(text, draw)
        try:
            program = SegmentProgram.parse(damaged)
            program.shapes([(2, 4, 9, 12)] * len(program.inputs))
        except BadInput:
            continue
        assert SegmentProgram.parse(program.text()) == program


def flipped(text: str, draw: random.Random) -> str:
    """The text with one character replaced by another one of it."""
    place = draw.randrange(len(text))
    return text[:place] + draw.choice(text) + text[place + 1 :]


@pytest.mark.parametrize(
    ("step", "shapes"),
    [
        (conv_step(0, weight(2, 1), None, 2, (3, 3)), [(1, 2, 2, 9)]),
        (conv_step(0, weight(2, 1), None, 2, (1, 1), groups=2), [(1, 3, 4, 4)]),
        (conv_step(0, weight(2, 1), None, 2, (1, 1)), [(1, 2, 4)]),
        (conv_step(0, weight(2, 1), None, 2, (2, 2), padding=((3, 3), (0, 0)), transposed=True), [(1, 2, 3, 3)]),
        (pool_step(0, False, (3, 3), (1, 1)), [(1, 1, 2, 2)]),
        (flat_step(0), [(1, 2, 1, 2)]),
        (add_step(0, 1), [(1, 2, 3, 3), (1, 2, 3, 4)]),
        (concat_step((0, 1)), [(1, 2, 3, 3), (1, 2, 3, 4)]),
        (conv_step(0, weight(2, 1), None, 2, (1, 1), add=1), [(1, 3, 3, 3), (1, 3, 3, 3)]),
    ],
)
def test_sizes_that_do_not_fit_are_refused(step, shapes):
    program = SegmentProgram(("image",) * len(shapes), (step,), (len(shapes),))
    with pytest.raises(BadInput):
        program.shapes(shapes)


def test_a_kernel_of_height_two_is_none_for_signals():
    with pytest.raises(BadInput, match="height 1"):
        SegmentProgram(("signal",), (conv_step(0, weight(2, 1), None, 2, (2, 3)),), (1,))


CONVS = [
    {"kernel": (1, 1)},
    {"kernel": (3, 2), "padding": ((1, 1), (1, 0))},
    {"kernel": (3, 3), "stride": (2, 3), "padding": ((0, 2), (3, 1)), "dilation": (2, 1)},
    {"kernel": (2, 3), "groups": 2, "padding": ((0, 0), (4, 4))},
    {"kernel": (3, 3), "groups": 6, "padding": ((1, 1), (1, 1))},
    {"kernel": (1, 1), "transposed": True},
    {"kernel": (3, 2), "stride": (2, 3), "transposed": True, "padding": ((1, 1), (0, 1))},
    {"kernel": (3, 3), "stride": (2, 2), "transposed": True, "padding": ((1, 0), (0, -1))},
    {"kernel": (2, 2), "dilation": (2, 3), "transposed": True, "padding": ((0, -1), (2, -2))},
    {"kernel": (3, 3), "stride": (2, 1), "transposed": True, "groups": 3, "padding": ((0, 2), (3, 0))},
]


@pytest.mark.parametrize("fields", CONVS, ids=str)
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_convolutions_by_their_definition(fields, density):
    rows, inner = 6, 6 // fields.get("groups", 1)
    w = matrix(rows, inner * fields["kernel"][0] * fields["kernel"][1], density)
    w[1] = 0  # a row without nonzeros
    bias = torch.randn(rows, dtype=torch.float64)
    program, weights = layer("image", w, bias, **fields)
    x = torch.randn(2, 6, 7, 5, dtype=torch.float64)
    wanted = convolved(x, w, program.steps[0]) + bias.reshape(-1, 1, 1)
    (found,) = dense.run(program, [x], weights)
    assert found.shape == wanted.shape == program.shapes([x.shape])[1]
    # 1e-13: sums of at most 54 products in another order
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_signal_is_an_image_of_height_one(transposed):
    fields = {"kernel": (1, 3), "stride": (1, 2), "padding": ((0, 0), (1, 0)), "groups": 2, "transposed": transposed}
    w, x = matrix(4, 9, 0.5), torch.randn(2, 6, 8, dtype=torch.float64)
    program, weights = layer("signal", w, **fields)
    (found,) = dense.run(program, [x], weights)
    wanted = convolved(x.unsqueeze(2), w, program.steps[0]).squeeze(2)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_torch(name):
    numbers = {"leaky_relu": (0.2,), "elu": (0.5,), "clamp": (-0.5, 1.5)}.get(name, ())
    plain = {
        "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
        "elu": lambda x: F.elu(x, 0.5),
        "clamp": lambda x: x.clamp(-0.5, 1.5),
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }
    function = plain.get(name) or getattr(torch, name, None) or getattr(F, name)
    x, z = torch.randn(3, 5), torch.randn(3, 4)
    program, weights = layer("tokens", matrix(4, 5, 0.5, dtype=torch.float32), act=(name, numbers))
    (step,) = program.steps
    added = SegmentProgram(("tokens", "tokens"), (replace(step, reads=(0, 1), adds=True),), (2,))
    y = F.linear(x, stored.weight(step, weights, x.shape)) + z
    assert torch.equal(dense.run(added, [x, z], weights)[0], function(y))
    mapped = SegmentProgram(("tokens",), (activation_step(0, (name, numbers)),), (1,))
    assert torch.equal(dense.run(mapped, [y], [])[0], function(y))


def test_pools_means_and_joins():
    x, z = torch.randn(2, 3, 7, 6), torch.randn(2, 3, 7, 6)
    pools = [
        (pool_step(0, False, (3, 2), (2, 2), (1, 1), (2, 1), ceil=True), F.max_pool2d(x, (3, 2), 2, 1, (2, 1), True)),
        (
            pool_step(0, True, (3, 3), (2, 1), (1, 0), ceil=True, counted=False),
            F.avg_pool2d(x, 3, (2, 1), (1, 0), True, False),
        ),
        (mean_step(0, True), x.mean((2, 3), keepdim=True)),
        (mean_step(0, False), x.mean((2, 3))),
        (concat_step((0, 1, 0)), torch.cat([x, z, x], 1)),
        (add_step(0, 1, ("relu", ())), (x + z).relu()),
    ]
    for step, wanted in pools:
        program = SegmentProgram(("image", "image"), (step,), (2,))
        (found,) = dense.run(program, [x, z], [])
        assert torch.equal(found, wanted)
        assert tuple(found.shape) == program.shapes([x.shape, z.shape])[2]


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5), (2, 3, 1, 5)])
def test_tokens_have_any_rank(shape):
    x = torch.randn(shape)
    program = SegmentProgram(("tokens",), (concat_step((0, 0)), add_step(1, 1)), (2,))
    assert torch.equal(dense.run(program, [x], [])[0], 2 * torch.cat([x, x], -1))
    program, weights = layer("tokens", matrix(3, 5, 0.5, dtype=torch.float32))
    wanted = x @ stored.weight(program.steps[0], weights, shape).T
    torch.testing.assert_close(dense.run(program, [x], weights)[0], wanted)


def test_stored_types():
    w = matrix(4, 6, 0.5, dtype=torch.float32)
    values, crow, col = csr(w)
    scale = torch.tensor([1.0, 0.5, 0.25, 2.0])
    spans = weight(4, len(values))
    step = linear_step(0, replace(spans, scale=(3, 0, 4)), None, 4)
    whole = torch.arange(len(values)).to(torch.int8) - 4
    expected = torch.zeros(4, 6).masked_scatter(w != 0, whole.float()) * scale[:, None]
    assert torch.equal(stored.weight(step, [whole, crow, col, scale], (6,)), expected)
    step = linear_step(0, spans, None, 4)
    short = [values.bfloat16(), crow, col]
    assert torch.equal(stored.weight(step, short, (6,), torch.float64), w.bfloat16().double())


def test_entries_that_are_there_twice_are_summed():
    weights = [torch.tensor([1.0, 2.0]), *(torch.tensor(n, dtype=torch.int32) for n in ([0, 2], [1, 1]))]
    found = stored.weight(linear_step(0, weight(1, 2), None, 1), weights, (3,))
    assert found.tolist() == [[0.0, 3.0, 0.0]]


HOSTILE = {
    "a column beyond the last": lambda v, crow, col: (v, crow, col + 5),
    "a negative column": lambda v, crow, col: (v, crow, col - 1),
    "row starts that fall": lambda v, crow, col: (v, crow.flip(0), col),
    "row starts from 1": lambda v, crow, col: (v, crow + 1, col),
    "a row start beyond the end": lambda v, crow, col: (v, crow.index_fill(0, torch.tensor(2), 99), col),
    "differences that overflow": lambda v, crow, col: (
        v,
        torch.tensor([0, 2**31 - 1, -(2**31), -1, len(v)], dtype=torch.int32),
        col,
    ),
    "64-bit columns": lambda v, crow, col: (v, crow, col.long()),
    "integers without a scale": lambda v, crow, col: (v.to(torch.int8), crow, col),
    "values too short": lambda v, crow, col: (v[:-1], crow, col),
    "columns too short": lambda v, crow, col: (v, crow, col[:-1]),
    "no columns": lambda v, crow, col: (v, crow),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_weights_are_refused(name):
    w = matrix(4, 6, 0.6, dtype=torch.float32)
    w[0, 0] = 1.0  # column 0 is there, so that one less is negative
    program, weights = layer("tokens", w)
    dense.run(program, [torch.ones(1, 6)], weights)
    with pytest.raises(BadInput):
        dense.run(program, [torch.ones(1, 6)], list(HOSTILE[name](*weights)))


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, 6, dtype=torch.int64),
        torch.ones(2, 5),
        torch.ones(2, 6).to_sparse(),
        torch.ones(2, 6, dtype=torch.complex64),
    ],
    ids=["integers", "five columns", "sparse", "complex"],
)
def test_inputs_that_do_not_fit_are_refused(x):
    w = matrix(4, 6, 0.6, dtype=torch.float32)
    w[0, 5] = 1.0
    program, weights = layer("tokens", w)
    with pytest.raises(BadInput):
        dense.run(program, [x], weights)


def test_gradients_reach_values_biases_and_inputs():
    fields = {"kernel": (2, 2), "stride": (2, 1), "act": ("silu", ())}
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    program, weights = layer("image", matrix(4, 12, 0.4), bias, **fields)
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    weights[0].requires_grad_()
    _, crow, col, _ = weights
    assert torch.autograd.gradcheck(
        lambda x, v, b: dense.run(program, [x], [v, crow, col, b])[0], (x, weights[0], bias), fast_mode=True
    )


def test_calls_are_traced_with_dense_weights():
    program, weights = layer("image", matrix(4, 27, 0.3, dtype=torch.float32), kernel=(3, 3))
    (step,) = program.steps
    x = torch.randn(2, 3, 6, 6)
    w = stored.weight(step, weights, x.shape)
    traced = make_fx(lambda x: call(step, "image", [x], w), tracing_mode="symbolic", _allow_non_fake_inputs=True)
    graph = traced(x)
    called = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    assert torch.ops.aten.convolution.default in called
    assert not any("index" in str(target) for target in called)
    again = torch.randn(5, 3, 9, 6)
    assert torch.equal(graph(again), dense.run(program, [again], weights)[0])


def test_whole_programs_are_traced():
    program, weights = layer("tokens", matrix(4, 5, 0.3, dtype=torch.float32))
    x = torch.randn(2, 5)
    graph = make_fx(lambda x, *w: dense.run(program, [x], w)[0], tracing_mode="fake")(x, *weights)
    assert torch.equal(graph(x, *weights), dense.run(program, [x], weights)[0])


def test_what_a_step_reads():
    assert concat_step((3, 4)).reads == (3, 4)
    assert add_step(1, 2).reads == (1, 2)
    assert conv_step(1, weight(1, 0), None, 1, (1, 1), add=0).reads == (1, 0)
