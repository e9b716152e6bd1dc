"""The run law: a call on parts of its operands makes that part of what it makes of the whole.

run(parts, window) == op(whole)[window], over every case of the table and over drawn geometry.
"""

from __future__ import annotations

import random
import zlib

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from demask.exec import axes as parts
from demask.exec.local.call import Sliding
from demask.exec.local.dispatch import Local, local
from demask.machine.arena import ALIGNMENT
from demask.ops import TABLE, Declined, Relation, regions
from demask.ops.entry import Case
from demask.ops.entry import Shape as S
from demask.ops.laws import check_region_law
from demask.tune.epilogue import Epilogue
from local_runs import CONV, DRAWS, IMAGE, Placed, Scratch, check, holds, image_call, related, run, values_of, windows
from test_laws import ONE_OF_EACH


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# What no part of can be run: several outputs, or every choice of rows is normalised over or summed.
NEVER = {
    "aten.unbind.int",
    "aten.split.Tensor",
    "aten.split_with_sizes.default",
    "aten.chunk.default",
    "aten.tensor_split.sections",
    "aten.tensor_split.indices",
    "aten.var_mean.correction",
    *(f"aten.adaptive_max_pool{d}d.default" for d in (1, 2, 3)),
    *(f"aten.{name}.default" for name in ("zeros", "ones", "full", "mean", "sum", "std", "all")),
    "aten.max.default",
    "aten.std_mean.default",
    "aten.max.dim",
    "aten.mode.default",
    *(f"aten.new_{name}.default" for name in ("zeros", "ones", "full")),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "index", "case"), ONE_OF_EACH)
def test_run_law(name, index, case):
    seed = zlib.crc32(f"{name}-{index}".encode())
    relation = related(name, case.args, case.kwargs, seed=seed)
    if isinstance(relation, Declined):
        pytest.skip(relation.text)
    found = check(relation, seed, exact=False)
    never = name in NEVER or not any(relation.outs) or found.declined  # no output has an axis
    assert found.runs or never or any(s in name for s in ("lstm", "gru", "rnn", "quant"))


# Geometry: windows of drawn sizes, where one-off errors hide.

WINDOWS = settings(DRAWS, max_examples=40)


def of(*bounds):
    return st.tuples(*[st.integers(*b) for b in bounds])


@WINDOWS
@given(
    of((5, 11), (5, 11)),
    of((1, 7), (1, 7)),
    of((1, 4), (1, 4)),
    of((0, 3), (0, 3)),
    of((1, 3), (1, 3)),
    st.sampled_from([(1, 2, 3), (2, 2, 1), (4, 1, 1)]),
    st.booleans(),
)
def test_convolutions(size, kernel, stride, pad, dilation, groups, bias):
    assume(all(n + 2 * p > d * (k - 1) for n, p, d, k in zip(size, pad, dilation, kernel, strict=True)))
    g, i, o = groups
    weight, vector = S((g * o, i, *kernel), True), S((g * o,), True) if bias else None
    x = S((1, g * i, *size))
    args = (x, weight, vector, list(stride), list(pad), list(dilation), g)
    holds("aten.conv2d.default", *args)
    holds("aten.conv2d.default", *args, dtype=torch.int64, exact=True)


@settings(WINDOWS, max_examples=20)
@given(of((7, 12), (7, 12)), of((1, 4), (1, 4)), st.integers(1, 2), st.sampled_from(["same", "valid"]))
def test_convolutions_padded_by_name(size, kernel, dilation, padding):
    even = any(dilation * (k - 1) % 2 for k in kernel)
    assume(padding == "valid" or not even)  # torch warns, and pads unevenly
    args = (S((1, 2, *size)), S((3, 2, *kernel), True), None, [1, 1], padding, [dilation] * 2)
    holds("aten.conv2d.padding", *args)


@WINDOWS
@given(
    of((2, 7), (2, 7)),
    of((1, 5), (1, 5)),
    of((1, 4), (1, 4)),
    of((0, 2), (0, 2)),
    of((0, 2), (0, 2)),
    st.integers(1, 2),
    st.sampled_from([1, 2]),
)
def test_transposed_convolutions(size, kernel, stride, pad, extra, dilation, groups):
    assume(all(e < max(s, dilation) for e, s in zip(extra, stride, strict=True)))
    made = [
        (n - 1) * s - 2 * p + dilation * (k - 1) + e + 1
        for n, s, p, k, e in zip(size, stride, pad, kernel, extra, strict=True)
    ]
    assume(min(made) > 0)
    weight = S((2 * groups, 3, *kernel), True)
    holds(
        "aten.conv_transpose2d.input",
        S((1, 2 * groups, *size)),
        weight,
        S((3 * groups,), True),
        list(stride),
        list(pad),
        list(extra),
        groups,
        [dilation] * 2,
    )


@pytest.mark.nightly
@WINDOWS
@given(
    of((4, 12), (4, 12)),
    of((1, 5), (1, 5)),
    of((1, 4), (1, 4)),
    of((0, 2), (0, 2)),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 3]),
)
def test_pools(size, kernel, stride, pad, dilation, ceil, include, divisor):
    assume(all(2 * p <= k <= n for p, k, n in zip(pad, kernel, size, strict=True)))
    x, how = S((1, 3, *size)), (list(kernel), list(stride), list(pad))
    holds("aten.avg_pool2d.default", x, *how, ceil, include, divisor)
    assume(all(n + 2 * p > dilation * (k - 1) for n, p, k in zip(size, pad, kernel, strict=True)))
    for dtype in (torch.float64, torch.int64):
        holds("aten.max_pool2d.default", x, *how, [dilation] * 2, ceil, dtype=dtype, exact=True)


@settings(WINDOWS, max_examples=20)
@given(st.integers(4, 12), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2), st.booleans(), st.booleans())
def test_pools_of_sequences(size, kernel, stride, pad, ceil, include):
    assume(2 * pad <= kernel <= size)
    x, line = S((1, 3, size)), (2, None)
    holds("aten.avg_pool1d.default", x, [kernel], [stride], [pad], ceil, include, axes=line)
    holds("aten.max_pool1d.default", x, [kernel], [stride], [pad], 1, ceil, axes=line)


@settings(WINDOWS, max_examples=20)
@given(of((1, 12), (1, 12)), of((2, 9), (2, 9)))
def test_adaptive_pools(size, out):
    holds("aten.adaptive_avg_pool2d.default", S((1, 3, *size)), list(out))


@pytest.mark.nightly
@settings(WINDOWS, max_examples=20)
@given(
    of((1, 9), (1, 9)),
    st.one_of(
        of((1, 20), (1, 20)),
        st.tuples(st.floats(0.3, 5), st.floats(0.3, 5)),
        of((1, 8), (1, 8)).map(lambda t: tuple(map(float, t))),
    ),
    st.booleans(),
)
def test_resizes(size, out, align):
    scaled = isinstance(out[0], float)
    assume(not scaled or all(n * f >= 1 for n, f in zip(size, out, strict=True)))
    how = (None, list(out)) if scaled else (list(out), None)
    x = S((1, 3, *size))
    for name in ("upsample_nearest2d", "_upsample_nearest_exact2d"):
        holds(f"aten.{name}.vec", x, *how, exact=True)
    for name in ("upsample_bilinear2d", "upsample_bicubic2d"):
        holds(f"aten.{name}.vec", x, how[0], align, how[1])


@settings(WINDOWS, max_examples=20)
@given(of((4, 9), (4, 9)), of((-1, 3), (0, 3), (-2, 3), (0, 3)), st.sampled_from(["reflect", "replicate", "circular"]))
def test_pads(size, pad, mode):
    x = S((1, 3, *size))
    holds("aten.constant_pad_nd.default", x, list(pad), 0.5, exact=True)
    positive = [max(p, 0) for p in pad]
    holds("aten.pad.default", x, positive, mode, exact=True)


@pytest.mark.nightly
@settings(WINDOWS, max_examples=20)
@given(of((4, 9), (4, 9)), st.integers(0, 3), st.integers(1, 9), st.integers(1, 3), st.integers(-4, 4))
def test_moves(size, start, length, step, shift):
    x, more = S((1, 3, *size)), S((1, 3, size[0], 5))
    stop = min(start + length, size[0])
    holds("aten.slice.Tensor", x, 2, start, stop, step, exact=True)
    holds("aten.flip.default", x, [2], exact=True)
    holds("aten.flip.default", x, [2, 3], exact=True)
    holds("aten.roll.default", x, [shift, 1], [2, 3], exact=True)
    holds("aten.cat.default", [x, S((1, 3, length, size[1]))], 2, exact=True)
    holds("aten.cat.default", [x, more, x], 3, exact=True)
    holds("aten.cat.default", [x, S((1, length, *size))], 1, exact=True)
    index = S((length,), True, size[0])
    holds("aten.index_select.default", x, 2, index, exact=True)
    holds("aten.slice_scatter.default", x, S((1, 3, stop - start, size[1])), 2, start, stop, exact=True)


@settings(WINDOWS, max_examples=15)
@given(of((2, 5), (2, 5)), st.integers(1, 3))
def test_shuffles_and_views(size, r):
    h, w = size
    holds("aten.pixel_shuffle.default", S((1, 2 * r * r, h, w)), r, exact=True)
    holds("aten.flatten.using_ints", S((1, 3, h, w)), 2, axes=(2, None), exact=True)
    holds("aten.view.default", S((1, h * w, 3)), [1, h, w, 3], axes=(1, None), exact=True)
    holds("aten.view.default", S((1, h, r, w, r, 3)), [1, h * r, w * r, 3], axes=(1, 2), exact=True)
    holds("aten.permute.default", S((1, 3, h, w)), [0, 2, 3, 1], axes=(1, 2), exact=True)


@pytest.mark.parametrize("scale", [1.14, 2.2])
@pytest.mark.parametrize("name", ["upsample_nearest2d", "_upsample_nearest_exact2d"])
def test_sizes_that_some_kernels_treat_apart(name, scale):
    """7 positions times 1.14 are 7: there ATen copies, whatever the scale."""
    case = Case((S((1, 2, 3, 7)), None, [2.0, scale]), {})
    claims = check_region_law(f"aten.{name}.vec", case, 0, TABLE)
    assert not isinstance(claims, Declined)
    assert claims.broken == ()
    holds(f"aten.{name}.vec", *case.args, exact=True)


# Planted faults: the law must see them.


def breaks(name: str, *args) -> bool:
    try:
        holds(name, *args)
    except (AssertionError, RuntimeError):
        return True
    return False


@pytest.mark.parametrize("side", [0, 1])
def test_a_need_one_short_breaks_the_law(monkeypatch, side):
    rule = regions._RULES["conv"]

    def short(axis, start, end):
        low, high = rule(axis, start, end)
        return (low + 1, high) if side == 0 else (low, high - 1)

    assert not breaks(*CONV)
    monkeypatch.setitem(regions._RULES, "conv", short)
    assert breaks(*CONV)


def test_padding_inside_the_image_breaks_the_law(monkeypatch):
    plain = Sliding.margins

    def everywhere(self, interval):
        before, inside, after = plain(self, interval)
        padding = self.geometry.padding
        return padding, inside - (padding - before), after

    monkeypatch.setattr(Sliding, "margins", everywhere)
    assert breaks(*CONV)
    assert breaks("aten.avg_pool2d.default", S((1, 3, 9, 9)), [3, 3], [1, 1], [1, 1])


def test_weights_of_other_positions_break_the_law(monkeypatch):
    from demask.exec.local import resize as local_resize

    call = ("aten.upsample_bilinear2d.vec", S((1, 3, 7, 6)), [15, 9], False, None)
    plain = local_resize.resample
    assert not breaks(*call)

    def first(x, into, axis, pieces, weights, origin):
        plain(x, into, axis, pieces, weights, 0)

    monkeypatch.setattr(local_resize, "resample", first)
    assert breaks(*call)


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
    """The full call in the layout of parts, channels last. Which sums a convolution of one tap
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
