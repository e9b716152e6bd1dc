"""Every result prints as text and is a page: the same numbers, self-contained, readable by all."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import demask
from demask.checkpoint.proof import CheckpointProof
from demask.checkpoint.report import CheckpointReport, SliceCount
from demask.cli.bench import Bench, BenchRow
from demask.cli.commands.inspection import EditInspection, Gap, Inspection, ModuleShare, RewriteInspection
from demask.cli.demo import Demo, DemoNetwork
from demask.cli.pruning import Curves, PruneResult
from demask.files.onnx.edit.edit_file import EditedFile, NodeChange
from demask.graph.provenance import WHOLE, ModuleSizes, Provenance, Reason, Sizes, Speed
from demask.graph.provenance import TuneDecision as Decided
from demask.machine.clock import Timing
from demask.optimize_onnx import Deployed
from demask.pages import Box, Command, Lines, NetworkPicture, OnPage, Page, PageSource, TextTable
from demask.pages.html import document, fragment
from demask.pages.text import text_of
from demask.pilot.compare import Comparison, ComparisonRow
from demask.pilot.conditions.base import Conditioned, Decision
from demask.pilot.explain import ExplainedPair, Explanation
from demask.prune.masked_copies import PruningOptions
from demask.prune.scores import L1
from demask.prune.search import Search
from demask.prune.sensitivity import Sensitivity, SensitivityRow
from demask.prune.trial import SearchTrial
from demask.report import report
from demask.traverse.stream import Streamed
from html_page import HtmlPage, numbers

EVIL = "<script>alert(1)</script>"
SPEED = Speed((0.002, 0.0019, 0.0022), (0.001, 0.0009, 0.0012), 2.0, 1.87, 30, 2, "a machine")
TIMING = Timing(0.0105, 0.0098, 0.0123, 30)


def recorded(**fields):
    """A network with a record of all that a report shows."""
    record = {
        "cuts": {},
        "reasons": (
            Reason("conv2", "layer3.conv2", 1, 48, "no rule for aten.foo"),
            Reason("cat_1", EVIL, 1, 3, "graph output"),
        ),
        "effects": {"scatter-add": 2, "pad": 1},
        "notes": ('a graph would have 123 parameters, 127 fewer (result="graph")', "a note"),
        "inputs": (),
        "before": Sizes(1000, 20_000, 4000),
        "after": Sizes(250, 5000, 1000),
        "removed": {"stem": 50, "layer3.conv2": 700},
        "decisions": (
            Decided(WHOLE, "fused", {"given": 0.002, "fused": 0.001}),
            *(Decided(f"part{k}", "packed", {"packed": 0.0003, "plain": 0.0004}) for k in range(5)),
        ),
        "speed": SPEED,
        "densities": {"layer3.conv2": 0.25},
        "modules": {
            "stem": ModuleSizes((300, 250), (15_000, 4500)),
            "layer3.conv2": ModuleSizes((700, 0), (5000, 500)),
        },
    }
    network = nn.Module()
    network.demasked = Provenance(**(record | fields))
    return network


def halves(result="auto"):
    """Two convolutions, a norm and a linear layer, of which half the channels are zero."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 5)
    ).eval()
    with torch.no_grad():
        model[0].weight[:4], model[0].bias[:4], model[1].bias[:4] = 0, 0, 0
        model[3].weight[2:5], model[3].bias[2:5] = 0, 0
    return demask.demask(model, (torch.randn(2, 3, 6, 6),), result=result)


def bench():
    rows = [
        BenchRow(threads, 8, name, 1234, 0.5, TIMING, 1.25, 1e-6)
        for threads in (1, 2)
        for name in ("original", "demasked")
    ]
    return Bench("model.pt2", (*rows, BenchRow(2, 8, EVIL, 99, failure="no compiler")), "machine")


def tiles():
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 3)).eval()
    return demask.traverse.plan(network, (torch.zeros(1, 1, 96, 96),), memory="16MiB")


def pruned():
    curves = Curves(
        [(k, 2.0 / (k + 1)) for k in range(900)], [(0, 0.1), (899, 0.9)], [(300, "pruned"), (600, "demasked")]
    )
    timings = {"before": TIMING, "after": replace(TIMING, median=0.0061)}
    verification = demask.verify(nn.ReLU(), nn.ReLU(), (torch.ones(1, 3),))
    shares = {"dense": 0.981, "masked": 0.752, "tuned": 0.968}
    return PruneResult(
        nn.ReLU(), report(recorded()), shares, timings, verification, curves, ("Step 300: 4 of 32 masked.",)
    )


def checkpoint():
    slices = (SliceCount("model.layers.*.mlp.up_proj", "unit", 3, 24, (14, 18), 20, (16, 18, 20)),)
    return CheckpointReport(
        Path("slim"),
        (75_000, 41_000),
        (18_912, 10_400),
        {"model.layers": (3, 2)},
        slices,
        0.531,
        0.45,
        {"vllm": 0.52},
        "layer 2 costs the difference: mask it to 16 units to save 3.1% more",
        ("the head is tied",),
        CheckpointProof(9.6e-07, "float32", 32, 1),
        2**30,
    )


def inspection():
    many = tuple(ModuleShare(f"layer{k}", 100 + k, k) for k in range(30))
    gaps = (Gap("aten.foo.default", 2, 48, ("layer3",), 777), Gap("aten.bar", 1, 3, (), None))
    return Inspection(report(recorded()), many, {"aten.relu.default": 7}, {"aten.foo": 2}, gaps)


def edit():
    changes = tuple(NodeChange(f"/conv{k}", "Conv", f"{64 + k} -> 48 channels") for k in range(30))
    return EditInspection((9000, 5000), 41, 11, changes, (("/n1", "why"), ("/n2", "why")))


def deployed():
    edited = EditedFile(None, 41, 11, (("/n1", "no rule"),), frozenset(), foreign=frozenset({"com.foo.Bar"}))
    decisions = recorded().demasked.decisions
    return Deployed(None, 1e-6, edited, "largest difference 1e-06", ("a note",), SPEED, decisions)


def demo():
    sizes = (Sizes(1000, 2000, 4000), Sizes(1000, 2000, 4000), Sizes(250, 500, 1000))
    names = ("dense", "masked", "demasked")
    networks = {
        name: DemoNetwork(size, 0.981, 1e-6, {1: TIMING, 2: TIMING}) for name, size in zip(names, sizes, strict=True)
    }
    return Demo(networks, report(recorded()), "torch 2, malloc")


def conditioned():
    decisions = (Decision("0", "skip", "0.5 of 64 positions"), Decision(EVIL, "dense", "returned"))
    return Conditioned(demask.pilot.Skip(0.5), "bits:8", False, decisions)


def compared():
    rows = (
        ComparisonRow("bits:8", 0.99, 0.012, 0.998, 0.97, 0.96, 352, 1200, 1.7, TIMING),
        ComparisonRow("rank:0.5", refused="it has no linear layer"),
    )
    return Comparison(rows, 32, 848, 1100, 0.515, TIMING, {})


def explained():
    lines = (
        ExplainedPair("", "columns", 0.0012, 1.43, 0.0, True, True, "columns"),
        ExplainedPair("bits:4", "skip:0.5", None, None, None, False, False, "no"),
    )
    return Explanation(lines, 0.0017, 12, 2, "a machine", "use columns")


def sensitivity():
    rows = [
        SensitivityRow(f"layer{k}.{EVIL}", 16, n, 0.9 - 0.05 * k, 900 - n, 9000 - n, 0.4)
        for k in range(10)
        for n in (4, 8)
    ]
    return Sensitivity(SensitivityRow("", 0, 0, 0.93, 1000, 10_000, 0.5), tuple(rows))


def search(cost):
    trials = [
        SearchTrial(k, {EVIL: k}, {EVIL: k / 16}, None if k > 14 else 1 - 0.01 * k, 1000 - k, 9000 - k, 0.5 - 0.01 * k)
        for k in range(-1, 17)
    ]
    return Search(trials[0], tuple(trials[1:]), cost, None, PruningOptions(L1(), "channel", []))


RESULTS = {
    "Report": [lambda: report(recorded()), lambda: report(halves()), lambda: report(halves("graph"))],
    "Verification": [lambda: demask.verify(nn.ReLU(), nn.ReLU(), (torch.ones(1, 3),))],
    "CheckpointReport": [checkpoint],
    "Deployed": [deployed, lambda: Deployed(recorded(), 1e-6, None, "largest difference 1e-06")],
    "Bench": [bench],
    "Inspection": [inspection],
    "EditInspection": [edit, lambda: EditInspection((9, 9), note="an edit removes 0 bytes")],
    "RewriteInspection": [lambda: RewriteInspection(demask.explain(nn.GLU(), (torch.ones(2, 4),)))],
    "Demo": [demo],
    "PruneResult": [pruned],
    "Sensitivity": [sensitivity],
    "Search": [lambda: search("macs"), lambda: search("ms")],
    "TilePlan": [tiles],
    "UnitTraffic": [lambda: demask.traverse.spread(nn.Conv2d(1, 1, 5), (torch.ones(1, 1, 32, 32),))],
    "Streamed": [lambda: Streamed((2, 1, 62, 46), "uint8", 2, 124, 1.25, 2**24, 10**6, 31)],
    "Halo": [lambda: demask.traverse.halo(nn.Conv2d(1, 1, 5), (torch.ones(1, 1, 32, 32),))],
    "Instructions": [
        lambda: demask.stride.instructions(
            nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4)),
            (torch.ones(1, 1, 7, 7),),
        )
    ],
    "Conditioned": [conditioned],
    "Comparison": [compared],
    "Explanation": [explained],
    "ExecutionData": [lambda: demask.pilot.ExecutionData("unit", {EVIL: torch.tensor([[1.5, 3.25]])}, "two inputs")],
}
CASES = [pytest.param(cache(make), id=f"{name}-{k}") for name, makes in RESULTS.items() for k, make in enumerate(makes)]


def test_every_kind_of_result_is_here():
    assert demask.Verification and demask.stride.Instructions  # imported when they are read
    assert {kind.__name__ for kind in PageSource.__subclasses__()} == RESULTS.keys()


@pytest.mark.parametrize("make", CASES)
def test_a_page_has_all_numbers_of_the_terminal(make, tmp_path):
    result = make()
    result.to_html(tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    page, text = HtmlPage(html), str(result)
    assert numbers(text) <= numbers(page.text), numbers(text) - numbers(page.text)
    assert html.startswith("<!doctype html>") and "script" not in page.tags
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("make", CASES)
def test_notebooks_show_the_same_as_a_part(make):
    result = make()
    part = HtmlPage(result._repr_html_())
    assert part.text in HtmlPage(document(result.page())).text
    assert not {"html", "body", "head", "h1", "main"} & set(part.tags)


def test_the_style_of_a_part_is_its_own():
    style = fragment(Page("a", ())).partition("<style>")[2].partition("</style>")[0]
    selectors = [
        line.partition("{")[0].strip() for line in style.splitlines() if "{" in line and not line.startswith("@media")
    ]
    assert len(selectors) > 30
    assert all(one.startswith(".demask-page") for one in selectors)


@pytest.mark.parametrize("options", [{}, {"result": "graph"}, {"modules": ["0", "3"]}])
def test_modules_add_up_to_the_network(options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.LSTM(8, 4))
    nn.init.zeros_(model[0].weight[:3]), nn.init.zeros_(model[0].bias[:3])
    shown = report(demask.demask(model, (torch.randn(5, 2, 4),), **options))
    assert [row.name for row in shown.modules] == options.get("modules", ["0", "2", "3"])
    for k, sizes in enumerate((shown.before, shown.after)):
        assert sum(row.macs[k] for row in shown.modules) == sizes.macs
        if "modules" not in options:
            assert sum(row.parameters[k] for row in shown.modules) == sizes.parameters
    assert shown.modules[0].weight == ((8, 4), (5, 4))


def test_modules_have_milliseconds_where_they_were_measured():
    decisions = (
        Decided(WHOLE, "fused", {"given": 0.002, "fused": 0.001}),
        Decided("stem", "packed", {"packed": 0.0003, "plain": 0.0004}),
    )
    records = {"parts": {"decisions": decisions}, "whole": {}, "no": {"speed": None}}
    shown = {name: HtmlPage(document(report(recorded(**fields)).page())).text for name, fields in records.items()}
    assert "4,500 30.0 % – 0.300 layer3.conv2" in shown["parts"]
    assert "2.000 1.000 Milliseconds of modules are" in shown["parts"]
    assert "2.000 1.000 Milliseconds are of the network" in shown["whole"]
    assert "ms before" in shown["whole"] and "ms before" not in shown["no"]
    assert sum(row.seconds == (None, None) for row in report(recorded()).modules) == 2


def test_records_of_modules_are_stored(tmp_path):
    slim = halves("graph")
    demask.save(slim, tmp_path / "slim.demask")
    loaded = report(demask.load(tmp_path / "slim.demask"))
    assert loaded.modules == report(slim).modules != ()


def test_a_timeline_has_the_values_that_are_read_later():
    """x, a and b are alive while a + b is computed; views have no memory of their own."""

    class Sum(nn.Module):
        def forward(self, x):
            a = x.exp()
            b = a.view(-1).sin().view(4, 2)
            return a + b

    slim = demask.demask(Sum(), (torch.ones(4, 2),), result="graph", dynamic_shapes={})
    spans = report(slim).timeline.spans
    assert {span.name: span.bytes for span in spans} == {"exp": 64, "view": 32, "sin": 64, "view_1": 64, "add": 96}


def test_names_are_escaped_wherever_they_are_shown():
    box = Box(EVIL, (4, 2), (3, 1), EVIL, EVIL)
    sections = (
        Lines([EVIL], EVIL),
        TextTable((EVIL,), [(EVIL,)], EVIL, title=EVIL),
        NetworkPicture([box], EVIL, EVIL, EVIL, words=EVIL),
        Command(EVIL, EVIL, EVIL),
    )
    page = HtmlPage(document(Page(EVIL, (OnPage(sections),), EVIL, EVIL)))
    assert "script" not in page.tags
    assert page.text.count(EVIL) >= 15


def test_a_terminal_shows_sections_with_a_line_between_them():
    table = TextTable(("a", "b"), [("x", "1"), ("y", "22")], "heading")
    sections = (Lines(["one", "two"]), table, Lines([]), Lines(["three"], is_close=True), OnPage([Lines(["not here"])]))
    lines = text_of(sections).splitlines()
    assert [line.strip() for line in lines if not line.startswith("─")] == [
        "one",
        "two",
        "",
        "a    b",
        "x    1",
        "y   22",
        "three",
    ]
