"""The laws of the table, over every entry: scatter, region, minimality; and planted faults."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

import demask
from demask.errors import Mismatch, TableError
from demask.ops import TABLE, Declined, Entry, Relation, Table, bind, regions
from demask.ops.entry import Case
from demask.ops.entry import Shape as S
from demask.ops.laws import (
    LawModule,
    call_node,
    check,
    check_region_law,
    check_scatter_law,
    law_cases,
    maskable_axes,
    missed,
    target_of,
)
from night import at_night
from torch_release import since

OLDER = {"aten.aminmax.default": since(2, 12, "its gradient")}  # which the laws compare
CASES = [pytest.param(*found, id=f"{found[0]}-{found[1]}", marks=OLDER.get(found[0], ())) for found in law_cases(TABLE)]
SEVERAL = {case.values[0] for case in CASES if case.values[1] == 1}


def is_by_day(name, index):
    """Whether a case is the one of its op that runs by day: of several the first or the second."""
    return index == (zlib.crc32(name.encode()) % 2 if name in SEVERAL else 0)


LATER = [case for case in CASES if not is_by_day(*case.values[:2])]  # by night alone
ONE_OF_EACH = [*(case for case in CASES if case not in LATER), *at_night(*LATER)]
# These tests are the check, and must see what the own one would.
shrink = partial(demask.demask, check=False, result="graph")
# A seed says nothing to shrink to, and an export takes as long as it takes.
DRAWS = settings(
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)

WITHOUT_CASES = {
    "aten._grouped_mm.default": "no float64; tests/graph/test_experts.py",
    "transformers.grouped_mm_fallback.default": "of another library; tests/graph/test_experts.py",
}
# Slices that no output shows for a reason of values, which the table does not state: ops, or cases.
INSENSITIVE = {
    "aten.eq.Tensor": "False wherever a constant meets drawn inputs",
    "aten.ne.Tensor": "True wherever a constant meets drawn inputs",
    "aten.logical_or.default": "what is or-ed with a true constant",
    "aten.pow.Tensor_Tensor": "what is raised to a constant 0",
    "aten.layer_norm.default-0": "a shift of all values alike",
    "aten.addcmul.default": "a factor of a product that is zero everywhere, beside what is added",
    "aten.var.correction": "a shift of all values alike",
    "aten.std.correction": "a shift of all values alike",
    **{f"aten.adaptive_max_pool{d}d.default": "indices in an image of one value, whatever it is" for d in (1, 2, 3)},
    "aten.scaled_dot_product_attention.default": "heads without a product, or that are not read, "
    "beside heads that stay: one call makes all of them alike",
    **{
        f"aten.{name}": "constants beside values that are selected in their place on drawn inputs"
        for name in (
            "max.dim",
            "min.dim",
            "median.default",
            "median.dim",
            "nanmedian.default",
            "nanmedian.dim",
            "mode.default",
            "kthvalue.default",
            "cummax.default",
            "cummin.default",
            "sort.default",
            "sort.stable",
            "argsort.default",
            "argsort.stable",
            "topk.default",
            "argmax.default",
            "argmin.default",
        )
    },
    **{
        f"aten.{name}.{kind}": "inputs beside one that decides it"
        for name in ("any", "all")
        for kind in ("default", "dim", "dims")
    },
    "aten.isnan.default": "False for every finite input",
    "aten.isinf.default": "False for every finite input",
    "aten.isfinite.default": "True for every finite input",
    "aten.gru.input-2": "the reset gate of a unit that reads nothing back",
    "aten.rnn_relu.input": "units whose sums stay below 0 on drawn inputs",
    "aten.lstm.input-2": "what only a given initial state reaches",
    "aten.rnn_tanh.input-2": "what only a given initial state reaches",
    "aten.lstm.input-4": "cells that a projected call has beyond its outputs",
    "aten.lstm.input-5": "cells that a projected call has beyond its outputs",
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seeds(name: str, index: int, draw: int) -> range:
    """An even seed, which masks what may be cut, and an odd one, which masks anything."""
    first = zlib.crc32(f"{name} {index} {draw}".encode()) // 4 * 2
    return range(first, first + 2)


def scatter_and_minimality(name: str, index: int, case: Case, draw: int, parts: tuple[int, ...] = (0, 1)) -> None:
    """parts: which of the two seeds of a draw."""
    for seed in (seeds(name, index, draw)[part] for part in parts):
        result = check_scatter_law(name, case, seed, TABLE, shrink)
        assert result.error <= 1e-10, f"{name} case {index} seed {seed}: {result.error}"
        if seed % 2 == 0 and not {name, f"{name}-{index}"} & set(INSENSITIVE):
            assert missed(result.slim, result.draw) == [], f"{name} case {index} seed {seed}"


def test_every_entry_has_cases():
    assert {name for name, entry in TABLE.items() if not entry.cases} == set(WITHOUT_CASES)


@pytest.mark.parametrize(("name", "index", "case"), ONE_OF_EACH)
@settings(DRAWS, max_examples=1)
@given(draw=st.integers(0, 1000))
def test_scatter_law_and_minimality(name, index, case, draw):
    # One seed a case: where an op has several cases, the two kinds take turns. Both where masks
    # over anything reach axes that the other kind leaves alone.
    narrow, wide = (maskable_axes(name, case, TABLE, every=every, first=False) for every in (0, 1))
    scatter_and_minimality(name, index, case, draw, (index % 2,) if narrow == wide else (0, 1))


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "index", "case"), CASES)
@settings(DRAWS, max_examples=20)
@given(draw=st.integers(0, 1000))
def test_scatter_law_and_minimality_many_draws(name, index, case, draw):
    scatter_and_minimality(name, index, case, draw)


def computed() -> Iterator[tuple[str, int, int, Case]]:
    """Cases of which one constant is an input: weights that other networks make."""
    for name, index, case in law_cases(TABLE):
        leaves, spec = pytree.tree_flatten((case.args, dict(case.kwargs)))
        for k, leaf in enumerate(leaves):
            # A vocabulary is no batch.
            if isinstance(leaf, S) and leaf.constant and "embedding" not in name:
                changed = [*leaves[:k], replace(leaf, constant=False), *leaves[k + 1 :]]
                yield name, index, k, Case(*pytree.tree_unflatten(changed, spec))


# By day one seed of norms, and those that were wrong once.
BY_DAY = {
    ("aten.group_norm.default", 2): 5,
    ("aten.batch_norm.default", 3): 19,
    ("aten.conv_transpose2d.input", 2): 1,
    ("aten.conv1d.default", 1): 2,
    ("aten.conv1d.default", 2): 2,
    ("aten.rnn_tanh.input", 2): 2,
    ("aten.lstm.input", 1): 2,
    ("aten.gru.input", 1): 2,
}


@pytest.mark.parametrize(
    ("name", "index", "k", "case", "seeds"),
    [
        *(
            (*row, (BY_DAY.get((row[0], row[2]), 1),))
            for row in computed()
            if TABLE[row[0]].affine or (row[0], row[2]) in BY_DAY
        ),
        *at_night(*((*row, range(2, 12)) for row in computed())),
    ],
)
def test_the_scatter_law_where_a_constant_is_computed(name, index, k, case, seeds):
    for seed in seeds:
        result = check_scatter_law(name, case, seed, TABLE, shrink)
        assert result.error <= 1e-10, f"{name} case {index}, leaf {k}, seed {seed}: {result.error}"


class Normed(nn.Module):
    """A norm over 8 channels of what a layer makes, half of them constant, and a layer behind it.

    which: the parameter of the norm that comes as an input, if one does."""

    def __init__(self, op, which: str):
        super().__init__()
        self.op, self.which = op, which
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.weight, self.bias = (nn.Parameter(torch.randn(8)) for _ in range(2))
        with torch.no_grad():
            self.first.weight[::2] = 0
            self.weight[1::2] = 0

    def forward(self, x, given):
        vectors = {"weight": self.weight, "bias": self.bias} | {self.which: given + 1}
        return self.last(self.op(self.first(x), vectors["weight"], vectors["bias"]))


NORMS = {
    "batch_norm": lambda x, w, b: F.batch_norm(x, torch.ones(8).to(x), torch.ones(8).to(x), w, b),
    "layer_norm": lambda x, w, b: F.layer_norm(x, (8,), w, b),
    "rms_norm": lambda x, w, b: F.rms_norm(x, (8,), w) + b,
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "instance_norm": lambda x, w, b: F.instance_norm(x.expand(3, 5, 8).mT, None, None, w, b).mT,
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("which", ["", "weight", "bias"])
def test_where_a_scale_is_zero_the_output_is_the_shift(name, which):
    torch.manual_seed(3)
    net = Normed(NORMS[name], which).double().eval()
    x, given = torch.randn(5, 8).double(), torch.randn(8).double()
    slim = shrink(net, (x, given))
    expected = net(x, given)
    assert (slim(x, given) - expected).abs().max() <= 1e-10 * expected.abs().max()
    if not which:
        assert slim.demasked.after.parameters < slim.demasked.before.parameters


@pytest.mark.parametrize(("name", "index", "case"), CASES)
def test_region_law(name, index, case):
    result = check_region_law(name, case, index, TABLE)
    assert not isinstance(result, Declined)
    assert result.broken == ()


# Geometry: windows of drawn sizes, where one-off errors hide.

WINDOWS = settings(DRAWS, max_examples=50)


def intact(name: str, *args, **kwargs) -> bool:
    """Does the region law hold, and is no claim wider than what is read?"""
    result = check_region_law(name, Case(args, kwargs), 0, TABLE)
    assert not isinstance(result, Declined)
    assert result.broken == ()
    return result.loose == ()


@WINDOWS
@given(
    st.integers(6, 12),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 2),
    st.one_of(st.integers(0, 3), st.just("valid")),
)
def test_regions_of_convolutions_are_tight(size, kernel, stride, dilation, padding):
    assume(size + 2 * (padding if isinstance(padding, int) else 0) > dilation * (kernel - 1))
    overload = "padding" if isinstance(padding, str) else "default"
    where = padding if isinstance(padding, str) else [padding]
    weight = S((2, 3, kernel), True)
    exact = intact(f"aten.conv1d.{overload}", S((2, 3, size)), weight, None, [stride], where, [dilation])
    # A window with gaps, or one that lies all in the padding, may skip the first position.
    assert exact or dilation > 1 or (where != "valid" and where[0] >= kernel)


@settings(WINDOWS, max_examples=20)
@given(st.integers(5, 9), st.sampled_from([1, 3, 5]), st.integers(1, 2))
def test_regions_of_same_padding_are_tight(size, kernel, dilation):
    weight = S((2, 3, kernel), True)
    exact = intact("aten.conv1d.padding", S((2, 3, size)), weight, None, [1], "same", [dilation])
    assert exact or dilation > 1


@WINDOWS
@given(*[st.integers(*bounds) for bounds in [(2, 7), (1, 4), (1, 4), (0, 2), (0, 2), (1, 2)]])
def test_regions_of_transposed_convolutions_hold(size, kernel, stride, padding, extra, dilation):
    assume(extra < max(stride, dilation))
    assume((size - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra + 1 > 0)
    weight = S((3, 2, kernel), True)
    exact = intact(
        "aten.conv_transpose1d.default", S((2, 3, size)), weight, None, [stride], [padding], [extra], 1, [dilation]
    )
    # With gaps inside a dilated window the first and last input reached may be read by no row.
    assert exact or dilation > 1 or kernel < stride


@WINDOWS
@given(st.integers(4, 12), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.booleans())
def test_regions_of_pools_are_tight(size, kernel, stride, padding, ceil):
    assume(2 * padding <= kernel <= size)
    x = S((2, 3, size))
    assert intact("aten.max_pool1d.default", x, [kernel], [stride], [padding], 1, ceil)
    assert intact("aten.avg_pool1d.default", x, [kernel], [stride], [padding], ceil)


@settings(WINDOWS, max_examples=30)
@given(st.integers(1, 12), st.integers(1, 12))
def test_regions_of_adaptive_pools_are_tight(size, out):
    assert intact("aten.adaptive_avg_pool1d.default", S((2, 3, size)), [out])


@settings(WINDOWS, max_examples=30)
@given(st.integers(1, 9), st.one_of(st.integers(1, 20), st.floats(0.3, 4.0)), st.booleans())
@example(9, 1.2, False)
def test_regions_of_resizes_hold(size, out, align):
    assume(isinstance(out, int) or size * out >= 1)
    how = (None, [out]) if isinstance(out, float) else ([out], None)
    line, plane = S((2, 3, size)), S((1, 2, size, 2))
    # Single and double precision round multiples of a factor to different sides of an integer:
    # the claim has both.
    halves = [k / 2 / out for k in range(2, 2 * int(size * out))] if isinstance(out, float) else []
    rounded = any(abs(place - round(place)) < 1e-5 for place in halves)
    assert intact("aten.upsample_nearest1d.vec", line, *how) or rounded
    assert intact("aten._upsample_nearest_exact1d.vec", line, *how) or rounded
    intact("aten.upsample_linear1d.vec", line, how[0], align, how[1])
    both = [None if v is None else [v[0], 2] for v in how]
    intact("aten.upsample_bicubic2d.vec", plane, both[0], align, both[1])


def related(target, *args) -> Relation:
    relation = bind(call_node(target, *args), TABLE)
    assert isinstance(relation, Relation)
    return relation


def test_regions_of_the_documented_forms():
    aten, x = torch.ops.aten, torch.zeros(2, 12, 5)
    gap = related(aten.conv_transpose1d.default, x, torch.zeros(12, 3, 1), None, [2])
    assert regions.needed_interval(gap, 0, 2, 1, 2) in [(1, 1)]  # no input reaches row 1
    assert regions.needed_interval(gap, 0, 2, 1, 3) == (1, 2)
    split = related(aten.view.default, x, [2, 3, 4, 5])
    assert [regions.axis_of(split, 0, axis) for axis in range(4)] == [0, 1, 1, 2]
    assert regions.needed_interval(split, 0, 1, 1, 2) == (4, 8)
    assert regions.needed_interval(split, 0, 2, 1, 2) == (0, 12)
    joined = related(aten.view.default, x, [2, 60])
    assert regions.needed_interval(joined, 0, 1, 12, 16) == (2, 4)
    normed = related(aten.layer_norm.default, x, [5])
    assert (regions.needed_interval(normed, 0, 1, 3, 4), regions.needed_interval(normed, 0, 2, 3, 4)) == (
        (3, 4),
        (0, 5),
    )
    both = related(aten.cat.default, [x, x[:, :7]], 1)
    assert [regions.needed_interval(both, k, 1, 10, 14) for k in (0, 1)] == [(10, 12), (0, 2)]
    flipped = related(aten.flip.default, x, [1])
    assert regions.needed_interval(flipped, 0, 1, 2, 4) == (8, 10)
    assert regions.input_start(flipped, 0, 1, 2) == 0
    assert regions.input_end(flipped, 0, 1, 4) == 12
    linear = related(aten.linear.default, x, torch.zeros(7, 5), torch.zeros(7))
    assert regions.axis_of(linear, 0, 2) is None
    with pytest.raises(ValueError, match="operand 'input' has no axis along axis 2"):
        regions.needed_interval(linear, 0, 2, 0, 1)


class Put(nn.Module):
    """Slices written into a batch of two; capture does not ask how many images they come from."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([[1.0, 0, 1], [1, 0, 0]])[:, :, None])

    def forward(self, x, y):
        return torch.slice_scatter(x * self.mask + 1, y.relu(), 1, 1, 3) * self.mask


def test_an_axis_that_is_static_in_one_tensor_alone():
    net, given = Put(), (torch.randn(2, 3, 4), torch.randn(2, 2, 4))
    slim = shrink(net, given)
    assert torch.equal(net(*given), slim(*given))
    assert any("of any size in another" in reason.text for reason in slim.demasked.reasons)


# Planted faults: every checker must see them.


def planted(**entries: Entry) -> Table:
    """The table with some entries replaced; dots in names are written __."""
    wrong = {name.replace("__", "."): entry for name, entry in entries.items()}
    return Table([(name, wrong.get(name, entry)) for name, entry in TABLE.items()])


def changed(name: str, **columns) -> Table:
    return planted(**{name: replace(TABLE[name], **columns)})


def scatter_breaks(name: str, table: Table) -> bool:
    cases = [found for found in law_cases(table) if found[0] == name]
    for (_, index, case), draw in [(c, d) for c in cases for d in range(8)]:
        for seed in seeds(name, index, draw):
            try:
                result = check_scatter_law(name, case, seed, table, shrink)
            except RuntimeError:
                return True  # The module that came out does not even run.
            if not result.ok:
                return True
    return False


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("aten.sigmoid.default", {"zero": "any"}),  # says sigmoid(0) is 0
        ("aten.cos.default", {"fill": "same"}),  # says cos(c) is c
        ("aten.conv1d.default", {"pads": False}),
        ("aten.flip.default", {"line": "... -> ..."}),
        ("aten.sub.Tensor", {"zero": "first"}),  # says 0 - y is 0
        ("aten.softmax.int", {"line": "... -> ..."}),
        ("aten.sum.dim_IntList", {"sized": False}),
        ("aten.cumsum.default", {"sized": False}),
        ("aten.index_add.default", {"fill": "same"}),  # says what is added changes nothing
        ("aten.index_add.default", {"line": lambda _: "n c, e, e c -> n c", "fill": "sum"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_column_breaks_the_scatter_law(name, columns):
    assert scatter_breaks(name, changed(name, **columns))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("aten.t.default", "a b -> a b"),
        ("aten.mm.default", "t i, o i -> t o"),
        ("aten.linear.default", "... i, i o, o -> ... o"),
        ("aten.bmm.default", "b t i, t i o -> b t o"),
    ],
)
def test_wrong_letters_are_refused(name, line):
    with pytest.raises(TableError):
        check(name, changed(name, line=line), shrink)


def region_breaks(name: str, table: Table) -> bool:
    results = (check_region_law(*found[:1], found[2], 0, table) for found in law_cases(table) if found[0] == name)
    return any(not isinstance(result, Declined) and result.broken for result in results)


@pytest.mark.parametrize(
    ("name", "region"),
    [
        ("aten.conv2d.default", "transposed"),
        ("aten.conv_transpose1d.default", "conv"),
        ("aten.upsample_bilinear2d.vec", "nearest"),
        ("aten.upsample_bicubic2d.vec", "linear"),
        ("aten._upsample_nearest_exact1d.vec", "nearest"),
        ("aten.adaptive_avg_pool1d.default", "nearest"),
    ],
)
def test_a_wrong_region_class_breaks_the_region_law(name, region):
    assert not region_breaks(name, TABLE)
    assert region_breaks(name, changed(name, region=region))


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("region", sorted(regions._RULES))
def test_a_region_one_short_breaks_the_region_law(monkeypatch, region, side):
    rule = regions._RULES[region]

    def short(axis, start, end):
        low, high = rule(axis, start, end)
        return (low + 1, high) if side == 0 else (low, high - 1)

    names = [name for name, entry in TABLE.items() if entry.region == region]
    monkeypatch.setitem(regions._RULES, region, short)
    assert all(region_breaks(name, TABLE) for name in names)


def test_moved_axes_taken_for_carried_break_the_region_law():
    assert region_breaks("aten.flip.default", changed("aten.flip.default", line="... -> ..."))
    assert region_breaks("aten.softmax.int", changed("aten.softmax.int", line="... -> ..."))


def dead_middle() -> nn.Sequential:
    """Hidden unit 1 is never read, hidden unit 2 is constant: both are work for nothing."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
        net[2].weight[:, 1] = 0
        net[0].weight[2] = 0
        net[0].bias[2] = -1
    return net


def test_the_oracle_sees_what_is_left_behind():
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(1)).double()
    net = dead_middle()
    assert missed(net, (x,)) == [
        "0.weight, axis 0: position 1",
        "0.bias, axis 0: position 1",
        "2.weight, axis 1: position 2",
    ]
    assert missed(shrink(net, (x,)), (x,)) == []
    without = Table([(name, entry) for name, entry in TABLE.items() if name != "aten.relu.default"])
    assert "0.weight, axis 0: position 1" in missed(shrink(net, (x,), table=without), (x,))


def test_the_oracle_sees_a_missing_affine_law():
    case = TABLE["aten.batch_norm.default"].cases[0]
    table = changed("aten.batch_norm.default", affine=None)
    results = (check_scatter_law("aten.batch_norm.default", case, seed, table, shrink) for seed in range(0, 40, 4))
    assert any(result.ok and missed(result.slim, result.draw) for result in results)


def test_check_holds_on_own_ops_and_names_what_breaks():
    table = TABLE.extended({"aten::tan": Entry("... -> ...", cases=(Case((S((2, 3, 4)),), {}),))})
    check("aten.tan.default", table, shrink)
    wrong = TABLE.extended({"aten::tan": Entry("... -> ...", fill="same", cases=(Case((S((2, 3, 4)),), {}),))})
    with pytest.raises(Mismatch, match=r"aten\.tan\.default, case 0, seed \d: .* relative"):
        check("aten.tan.default", wrong, shrink, seeds=8)
    with pytest.raises(TableError, match="no entry with cases"):
        check("aten.tan.default", TABLE, shrink)
    with pytest.raises(TableError, match=r"torch\.ops does not have"):
        target_of("aten.nothing.default")


def test_law_modules_are_drawn_from_their_seed():
    case = TABLE["aten.linear.default"].cases[0]
    first, again, other = (LawModule(torch.ops.aten.linear.default, case, s) for s in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert first.inputs(1)[0].equal(again.inputs(1)[0])
    assert not first.inputs(1)[0].equal(other.inputs(1)[0])
