"""What a call on parts adds onto, allocates and multiplies, and what it reads whole."""

from __future__ import annotations

import random

import pytest
import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from demask.machine.arena import ALIGNMENT
from demask.ops import Declined, Relation
from demask.ops.entry import Shape as S
from demask.traverse import axes as parts
from demask.traverse.local.dispatch import Local, local
from demask.tune.epilogue import Epilogue
from local_runs import CONV, IMAGE, Placed, Scratch, image_call, related, run, values_of, windows


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# What the memory and the multiply-adds of a call are said to be.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["none", "relu", "hardtanh", "swish"])
@pytest.mark.parametrize("add", [False, True])
def test_a_convolution_adds_onto_its_memory_and_is_activated(dtype, name, add):
    here = image_call(*CONV, dtype=dtype)
    after = Epilogue(name, (0.0, 1.0) if name == "hardtanh" else ())
    whole = here.node.meta["val"]
    base = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    activation = {
        "none": lambda v: v,
        "relu": torch.relu,
        "swish": torch.nn.functional.silu,
        "hardtanh": lambda v: v.clamp(0.0, 1.0),
    }[name]
    for window in [((0, 12), (0, 10)), ((3, 7), (0, 10)), ((11, 12), (2, 5))]:
        part = parts.part(base, here.axes, window)
        more = {"add": True, "prefill": part} if add else {}
        made = run(here, window, values_of(here), after=None if name == "none" else after, **more)
        expected = parts.part(whole, here.axes, window)
        expected = activation(expected + part if add else expected)
        ulps = {torch.float32: 4, torch.float64: 4, torch.bfloat16: 2}[dtype]  # one more rounding
        gap = (made - expected).abs().max() / whole.abs().max()
        assert float(gap) <= ulps * torch.finfo(dtype).eps


def test_only_a_convolution_adds():
    here = image_call("aten.relu.default", S((1, 3, 5, 4)))
    with pytest.raises(ValueError, match="expected a convolution to add onto"):
        here.run([torch.zeros(1, 3, 5, 4)], ((0, 5), (0, 4)), add=True)


_STRIDED = ([2, 2], [1, 1], [1, 1])
BIT_EQUAL = [
    CONV,
    ("aten.conv2d.default", S((1, 8, 13, 10)), S((8, 1, 3, 3), True), None, *_STRIDED, 8),
    ("aten.conv2d.default", S((1, 8, 12, 10)), S((5, 8, 1, 1), True), S((5,), True)),
    ("aten.max_pool2d.default", S((1, 8, 13, 10)), [3, 3], [2, 2], [1, 1]),
    ("aten.avg_pool2d.default", S((1, 8, 13, 10)), [3, 3], [2, 2], [1, 1]),
    ("aten.avg_pool2d.default", S((1, 8, 13, 10)), [3, 3], [2, 2], [1, 1], True, False),
    ("aten.upsample_nearest2d.vec", S((1, 8, 7, 5)), None, [2.0, 2.0]),
    ("aten.upsample_nearest2d.vec", S((1, 8, 7, 5)), None, [3.0, 3.0]),
    ("aten.upsample_bilinear2d.vec", S((1, 8, 7, 5)), None, False, [2.0, 2.0]),
    ("aten.upsample_bicubic2d.vec", S((1, 8, 7, 5)), None, False, [4.0, 4.0]),
    ("aten.upsample_bilinear2d.vec", S((1, 8, 17, 5)), None, False, [4.0, 3.0]),
    (
        "aten.batch_norm.default",
        S((1, 8, 7, 5)),
        *[S((8,), True)] * 3,
        S((8,), True, "positive"),
        False,
        0.1,
        1e-5,
        False,
    ),
    ("aten.silu.default", S((1, 8, 7, 5))),
    ("aten.gelu.default", S((1, 8, 7, 5))),
    ("aten.relu.default", S((1, 8, 7, 5))),
    ("aten.add.Tensor", S((1, 8, 7, 5)), S((8, 1, 1), True)),
]


def _weight(here) -> fx.Node:
    return here.node.args[1]


@pytest.mark.parametrize("call", BIT_EQUAL, ids=lambda c: c[0])
def test_single_precision_is_bit_equal_to_the_whole_call(call):
    """The whole call in the layout of parts, channels last. Which sums a convolution of one tap
    makes first is oneDNN's choice, by processor and layout: some add the bias first."""
    here = image_call(*call)
    values = values_of(here)
    single = call[0] == "aten.conv2d.default" and values[_weight(here)].shape[-1] == 1
    slack = 4 * torch.finfo(torch.float32).eps if single else 0.0
    whole = here.node.target(*fx.node.map_arg(here.node.args, lambda n: values[n]))
    for window in windows(whole.shape, here.axes, random.Random(5)):
        expected = parts.part(whole, here.axes, window)
        if window[1] == (0, whole.shape[3]):
            gap = (run(here, window, values) - expected).abs().max()
            assert gap <= slack * expected.abs().max(), window


TEMPORARY = [
    (*CONV,),
    ("aten.max_pool2d.default", S((1, 4, 13, 10)), [5, 5], [1, 1], [2, 2]),
    ("aten.max_pool2d.default", S((1, 4, 13, 10)), [2, 2]),
    ("aten.avg_pool2d.default", S((1, 4, 13, 10)), [3, 3], [2, 2], [1, 1]),
    ("aten.conv_transpose2d.input", S((1, 4, 7, 6)), S((4, 3, 4, 4), True), None, [2, 2], [1, 1]),
    ("aten.upsample_bilinear2d.vec", S((1, 4, 7, 6)), None, False, [2.0, 2.0]),
    ("aten.upsample_bilinear2d.vec", S((1, 4, 7, 6)), [15, 9], False, None),
    ("aten.upsample_nearest2d.vec", S((1, 4, 7, 6)), None, [2.0, 2.0]),
    ("aten.pixel_shuffle.default", S((1, 4, 7, 6)), 2),
    ("aten.flip.default", S((1, 4, 7, 6)), [2]),
    ("aten.add.Tensor", S((1, 4, 7, 6)), S((1, 4, 7, 6))),
    ("aten.relu.default", S((1, 4, 7, 6))),
    ("aten.silu.default", S((1, 4, 7, 6))),
    ("aten.selu.default", S((1, 4, 7, 6))),
    ("aten.prelu.default", S((1, 4, 7, 6)), S((4,), True)),
    ("aten.cat.default", [S((1, 4, 7, 6)), S((1, 3, 7, 6))], 1),
]


@pytest.mark.parametrize("call", TEMPORARY, ids=lambda c: c[0])
def test_temporary_is_what_scratch_and_torch_allocate(call):
    """Rows in full width: what a call leaves behind is counted by torch's own profiler."""
    here = image_call(*call)
    values, shape = values_of(here), here.call.shape
    for rows in [(0, shape[2]), (0, 4), (1, 3), (2, 6), (shape[2] - 2, shape[2])]:
        window = (rows, (0, shape[3]))
        scratch = Scratch()
        operands = [values.get(o.value, o.value) for o in here.relation.operands]
        for k, read in enumerate(here.reads):
            needs = tuple(here.needs(k, dim, *window[dim]) for dim in (0, 1))
            operands[read.operand] = parts.part(operands[read.operand], here.call_axes[read.node], needs)
        into = parts.empty(here.call.sizes(window), here.axes, here.call.dtype)
        here.run(operands, window, into, Scratch())
        with torch.profiler.profile(profile_memory=True) as seen:
            here.run(operands, window, into, scratch)
        allocated = sum(e.nbytes() for e in _allocations(seen) if e.nbytes() > 0)
        asked, beside = here.scratch_bytes(window), here.allocated_bytes(window)
        assert asked - ALIGNMENT <= scratch.bytes <= asked, (window, scratch.asked)
        assert allocated <= beside + 4096 + _of_onednn(here), (window, allocated)
        assert allocated >= beside - ALIGNMENT, (window, allocated)  # nothing is counted in vain


def _of_onednn(here: Placed) -> int:
    """What its convolutions allocate inside: the weight laid out anew, twice, and a scratchpad."""
    weight = here.call.bound.get("weight")
    if weight is None or "conv" not in str(here.node.target):
        return 0
    return 2 * weight.meta["val"].nbytes + 64 * 1024


def _allocations(seen):
    return [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]


@pytest.mark.parametrize(
    "call",
    [
        (*CONV,),
        ("aten.conv2d.default", S((1, 8, 13, 10)), S((8, 4, 3, 3), True), None, [2, 2], [1, 1], [1, 1], 2),
        ("aten.conv_transpose2d.input", S((1, 4, 7, 6)), S((4, 3, 4, 4), True), None, [2, 2], [1, 1]),
    ],
    ids=lambda c: c[0],
)
def test_multiply_adds_are_the_plain_count(call):
    here = image_call(*call)
    found = {n: n.meta["val"] for n in here.node.graph.nodes if n is not here.node}
    with FlopCounterMode(display=False) as flops:
        here.node.target(*fx.node.map_arg(here.node.args, lambda n: found[n]))
    rows = here.call.shape[2]
    whole = here.macs(((0, rows), (0, here.call.shape[3])))
    assert 2 * whole == flops.get_total_flops()
    if "transpose" not in call[0]:
        split = [here.macs((r, (0, here.call.shape[3]))) for r in ((0, 4), (4, rows))]
        assert sum(split) == whole


def test_multiply_adds_of_products():
    line = image_call("aten.linear.default", S((1, 6, 4)), S((5, 4), True), S((5,), True), pair=(1, None))
    assert line.macs(((0, 6), (0, 1))) == 6 * 4 * 5
    assert line.macs(((2, 3), (0, 1))) == 4 * 5
    q, k, v = S((1, 2, 6, 4)), S((1, 2, 7, 4)), S((1, 2, 7, 3))
    attention = image_call("aten.scaled_dot_product_attention.default", q, k, v, pair=(2, None))
    assert attention.macs(((0, 6), (0, 1))) == 2 * 6 * 7 * (4 + 3)
    assert attention.macs(((1, 3), (0, 1))) == 2 * 2 * 7 * (4 + 3)


def test_keys_and_values_are_read_whole():
    q, k, v = S((1, 2, 6, 4)), S((1, 2, 7, 4)), S((1, 2, 7, 3))
    relation = related("aten.scaled_dot_product_attention.default", (q, k, v), {})
    assert isinstance(relation, Relation)
    axes = {o.value: (2, None) for o in relation.operands} | {relation.node: (2, None)}
    here = local(relation.node, relation, axes)
    assert isinstance(here, Local)
    assert [read.all_rows for read in here.reads] == [False, True, True]
    assert [here.needs(k, 0, 2, 4) for k in range(3)] == [(2, 4), (0, 7), (0, 7)]
    assert here.needs(1, 1, 0, 1) == (0, 1)


def test_a_positional_map_is_sliced():
    relation = related("aten.add.Tensor", (S((1, 3, 6, 5)), S((1, 3, 6, 5), True)), {})
    assert isinstance(relation, Relation)
    x, positions = (o.value for o in relation.operands)
    here = local(relation.node, relation, {x: IMAGE, relation.node: IMAGE})
    assert isinstance(here, Local) and len(here.reads) == 1
    made = here.run([x.meta["val"][:, :, 2:4], positions.meta["val"]], ((2, 4), (0, 5)))
    assert torch.equal(made, relation.node.meta["val"][:, :, 2:4])


@pytest.mark.parametrize(
    ("name", "args", "axis", "reason"),
    [
        ("aten.softmax.int", (S((1, 3, 6, 5)), 2), 2, "needs all rows at once"),
        ("aten.group_norm.default", (S((1, 4, 6, 5)), 2), 2, "needs all rows at once"),
        ("aten.split.Tensor", (S((1, 4, 6, 5)), 2, 1), 2, "several outputs"),
    ],
)
def test_what_has_no_parts_says_why(name, args, axis, reason):
    relation = related(name, args, {})
    assert isinstance(relation, Relation)
    found = local(relation.node, relation, {relation.operands[0].value: (axis, None), relation.node: (axis, None)})
    assert isinstance(found, Declined) and reason in found.text
