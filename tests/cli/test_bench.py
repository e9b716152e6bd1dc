"""`demask bench`: its table, its JSON, its picture, and each way it can be used wrong."""

import json
import math
import re
import sys
from dataclasses import replace
from types import ModuleType

import matplotlib
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import demask
import test_cli
from demask.cli import bench
from demask.cli.read_network import read_network
from demask.installation import install_command
from demask.machine.clock import Timing
from demask.machine.describe import format_milliseconds
from html_page import HtmlPage

run, saved = test_cli.run, test_cli.saved  # fixtures
PLAIN = ["original", "demasked", "optimized"]
COMPILED = ["original, compiled", "demasked, compiled"]
QUICK = ("--pairs", 3)


@pytest.fixture
def optimized(monkeypatch):
    """Stands in for demask.optimize, whose own tests are elsewhere; collects what it was asked."""
    asked = []

    def optimize(model, args, kwargs=None, *, threads=None):
        asked.append((args[0].shape[0], threads))
        return demask.demask(model, args, kwargs)

    module = ModuleType("demask.optimize")
    module.optimize = optimize
    monkeypatch.setitem(sys.modules, "demask.optimize", module)
    return asked


@pytest.fixture
def compiler(monkeypatch):
    """Stands in for torch.compile: a real one takes seconds."""
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)


def export(model, path, *args, **kwargs):
    torch.export.save(torch.export.export(model, args, kwargs), path)
    return path


def row(contender, median, ratio, **more):
    timing = Timing(median, 0.9 * median, 1.2 * median, 30)
    return bench.BenchRow(1, 8, contender, 1234, timing=timing, ratio=ratio, difference=1e-7, **more)


MADE_UP = bench.Bench(
    "odd $name [x].pt2",
    (
        row("original", 0.02, 1.0),
        row("demasked", 0.01, 2.0, preparation=1.5),
        row("optimized", 0.0005, 40.0, preparation=3.0),
        row("original, compiled", 0.025, 0.8, preparation=9.0),
        bench.BenchRow(1, 8, "demasked, compiled", 1234, failure="No compiler [here]"),
    ),
    "made up",
)


# -- what is measured ------------------------------------------------------------------------------


def test_each_setting_has_a_row_per_contender(run, saved, optimized, compiler):
    words = ("--threads", 1, "--threads", 2, "--batch", 3, "--batch", 5, *QUICK, "--json")
    outcome = run("bench", saved / "masked.pt2", *words)
    assert outcome.code == 0, outcome.err
    data = json.loads(outcome.out)
    assert data.keys() == {"model", "rows", "machine"}
    settings = [(1, 3), (1, 5), (2, 3), (2, 5)]
    expected = [(*setting, name) for setting in settings for name in PLAIN + COMPILED]
    assert [(r["threads"], r["batch"], r["contender"]) for r in data["rows"]] == expected
    assert optimized == [(batch, threads) for threads, batch in settings]
    for found in data["rows"]:
        given = next(r for r in data["rows"] if r["batch"] == found["batch"] and r["threads"] == found["threads"])
        timing = found["timing"]
        assert timing["low"] <= timing["median"] <= timing["high"]
        assert timing["count"] == 3
        assert found["ratio"] == given["timing"]["median"] / timing["median"]
        assert found["difference"] < 1e-5
        assert (found["preparation"] is None) == (found["contender"] == "original")


def test_sizes_are_those_of_the_report(run, saved, optimized):
    outcome = run("bench", saved / "masked.pt2", "--no-compile", *QUICK, "--json")
    sizes = {r["contender"]: r["parameters"] for r in json.loads(outcome.out)["rows"]}
    program = torch.export.load(saved / "masked.pt2")
    report = demask.report(demask.demask(program))
    assert sizes["original"] == report.before.parameters
    assert sizes["demasked"] == sizes["optimized"] == report.after.parameters


def test_the_table(run, saved, optimized):
    outcome = run("bench", saved / "masked.pt2", "--no-compile", "--threads", 1, *QUICK)
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert " 1 thread, batch 2" in lines
    names = [line[3:].split("  ")[0] for line in lines if line.startswith("   ")]
    assert list(filter(None, names)) == PLAIN  # a title and a head start further right
    assert max(map(len, lines)) <= 100
    for word in ("torch", "demask", "allocator", "Load before and after", "3 alternating"):
        assert word in outcome.out


def test_a_page_has_the_milliseconds_of_each_module(run, saved, optimized, tmp_path, monkeypatch):
    words = ("bench", saved / "masked.pt2", "--no-compile", *QUICK)
    assert run(*words, "--report", "page.html").code == 0
    text = HtmlPage((tmp_path / "page.html").read_text()).text
    table = text.partition("ms before after 0 ")[2].partition("Milliseconds: medians, with")[0]
    times = [float(word) for word in table.split() if re.fullmatch(r"\d+\.\d{3}", word)]
    assert len(times) == 2 * 6  # layers 0, 1, 3, 5, other calls, all
    assert sum(times[:-2]) == pytest.approx(sum(times[-2:]), abs=0.01) and min(times) > 0
    monkeypatch.setattr(bench, "with_times", lambda *args: pytest.fail("timed without a page"))
    assert run(*words).code == 0


def test_losses_and_failures_are_told_in_their_rows():
    text = str(MADE_UP)
    rows = {line[3:24].strip(): line[24:] for line in text.splitlines() if line.startswith("   ")}
    assert "20.0 (18.0–24.0)" in rows["original"]
    assert "slower, 0.80 ×" in rows["original, compiled"]
    assert "0.500 (0.450–0.600)" in rows["optimized"]
    assert "fails: No compiler" in rows["demasked, compiled"]
    assert text.count("slower") == 1
    assert "[here]" in text  # no markup


def test_a_compiler_that_fails_is_a_row_with_its_reason(run, saved, optimized, monkeypatch):
    def broken(module, **options):
        raise RuntimeError("\nNo compiler [here]\n" + "long story " * 50)

    monkeypatch.setattr(torch, "compile", broken)
    outcome = run("bench", saved / "masked.pt2", *QUICK, "--json")
    assert outcome.code == 0, outcome.err
    rows = {r["contender"]: r for r in json.loads(outcome.out)["rows"]}
    for name in COMPILED:
        assert rows[name]["failure"] == "No compiler [here]"
        assert rows[name]["timing"] is rows[name]["ratio"] is rows[name]["preparation"] is None
    assert all(rows[name]["timing"] and not rows[name]["failure"] for name in PLAIN)


def test_a_graph_that_fails_when_called_is_a_row_too(run, saved, optimized, monkeypatch):
    def broken(module, **options):
        def call(*args):
            raise NotImplementedError

        return call

    monkeypatch.setattr(torch, "compile", broken)
    rows = json.loads(run("bench", saved / "masked.pt2", *QUICK, "--json").out)["rows"]
    assert [r["failure"] for r in rows] == [""] * 3 + ["NotImplementedError"] * 2


@pytest.mark.nightly
def test_torch_compile_itself(run, saved, optimized):
    rows = json.loads(run("bench", saved / "masked.pt2", *QUICK, "--json").out)["rows"]
    assert [r["failure"] for r in rows] == [""] * 5
    assert all(r["difference"] < 1e-5 for r in rows)
    assert all(r["preparation"] > 0.1 for r in rows if r["contender"] in COMPILED)


def test_the_bar_moves_to_the_end(saved, optimized, compiler):
    moved = []
    given = read_network(saved / "masked.pt2")
    for compiled in (True, False):
        plan = bench.BenchSettings((1, 2), (3,), pairs=1, compiled=compiled)
        moved.clear()
        bench.bench(given, "masked", plan, lambda title, done=1: moved.append(done))
        assert sum(moved) == plan.steps


def test_time_that_is_up_ends_the_rounds(run, saved, optimized):
    words = ("--no-compile", "--seconds", 0, "--json")
    rows = json.loads(run("bench", saved / "masked.pt2", *words).out)["rows"]
    assert {r["timing"]["count"] for r in rows} == {1}


# -- what it is fed --------------------------------------------------------------------------------


class Keyed(nn.Module):
    def forward(self, x, *, mask):
        return {"sum": (x * mask).sum(1), "same": mask}


def test_keywords_integers_and_several_outputs(run, tmp_path, monkeypatch, optimized):
    mask = torch.ones(2, 5, dtype=torch.int64)
    path = export(Keyed(), tmp_path / "keyed.pt2", torch.randn(2, 5), mask=mask)
    outcome = run("bench", path, "--no-compile", *QUICK, "--json")
    assert outcome.code == 0, outcome.err
    assert {r["difference"] for r in json.loads(outcome.out)["rows"]} == {0}


def test_an_archive_can_be_measured(run, saved, optimized):
    run("slim", saved / "masked.pt2", "-o", "slim.demask")
    outcome = run("bench", "slim.demask", "--no-compile", "--batch", 4, *QUICK, "--json")
    assert outcome.code == 0, outcome.err
    assert {r["batch"] for r in json.loads(outcome.out)["rows"]} == {4}


def test_another_batch_needs_a_dynamic_dimension(run, tmp_path, optimized):
    path = export(nn.Linear(4, 3), tmp_path / "fixed.pt2", torch.randn(2, 4))
    outcome = run("bench", path, "--no-compile", "--batch", 2, "--batch", 6)
    assert (outcome.code, outcome.out) == (2, "")
    assert "cannot run batch 6: dimension 0 of the inputs is fixed to 2" in outcome.err
    assert optimized == []
    assert run("bench", path, "--no-compile", "--batch", 2, *QUICK).code == 0


def test_a_batch_that_the_network_refuses(run, tmp_path, optimized):
    class Branching(nn.Linear):
        def forward(self, x):
            return super().forward(x if x.shape[0] > 3 else 2 * x)

    demask.save(demask.demask(Branching(4, 3), (torch.randn(5, 4),)), tmp_path / "many.demask")
    outcome = run("bench", "many.demask", "--no-compile", "--batch", 2, *QUICK)
    assert (outcome.code, outcome.out) == (2, "")
    assert "original does not run on inputs of batch 2" in outcome.err


def test_inputs_that_are_no_tensors_are_refused(run, tmp_path, optimized):
    class Scaled(nn.Module):
        def forward(self, x, scale):
            return x * scale

    path = export(Scaled(), tmp_path / "scaled.pt2", torch.randn(2, 3), 2.5)
    outcome = run("bench", path, "--no-compile")
    assert (outcome.code, outcome.out) == (2, "")
    assert "scale" in outcome.err


@pytest.mark.parametrize("fails", [False, True])
def test_threads_are_put_back(run, saved, optimized, monkeypatch, fails):
    def refuse(*args, **options):
        raise demask.BadInput(f"with {torch.get_num_threads()} threads")

    if fails:
        monkeypatch.setattr(sys.modules["demask.optimize"], "optimize", refuse)
    before = torch.get_num_threads()
    outcome = run("bench", saved / "masked.pt2", "--no-compile", "--threads", before + 1, *QUICK)
    assert torch.get_num_threads() == before
    assert outcome.code == (2 if fails else 0)
    assert (f"with {before + 1} threads" in outcome.err) == fails


# -- differences -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "got", "found"),
    [
        ([1.0, -4.0], [1.0, -4.0], 0),
        ([1.0, -4.0], [2.0, -4.0], 0.25),
        ([math.inf, math.nan, 2.0], [math.inf, math.nan, 1.0], 0.5),
        ([1.0], [math.nan], math.inf),
        ([0.0], [1.0], math.inf),
        ([1.0, 2.0], [1.0], math.inf),
        ([], [], 0),
        ([3 + 4j], [3 + 3j], 0.2),
        ([True, True], [True, False], 1),
    ],
)
def test_the_difference(expected, got, found):
    assert bench.relative_difference([torch.tensor(expected)], [torch.tensor(got)]) == found


def test_an_infinite_difference_is_valid_json():
    data = replace(MADE_UP.rows[0], difference=math.inf).to_dict()
    assert json.loads(json.dumps(data, allow_nan=False))["difference"] == "inf"


# -- the picture -----------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_the_plot_has_the_format_of_its_name(run, saved, optimized, tmp_path, suffix, start):
    words = ("--no-compile", "--plot", f"bench.{suffix}", *QUICK)
    outcome = run("bench", saved / "masked.pt2", *words)
    assert outcome.code == 0, outcome.err
    (picture,) = tmp_path.iterdir()
    assert picture.name == f"bench.{suffix}"
    assert picture.read_bytes().startswith(start)


def test_the_plot_tells_times_ratios_losses_and_reasons(tmp_path):
    wild = replace(MADE_UP.rows[1], timing=Timing(0.01, 0.009, 3.0, 30))
    found = replace(MADE_UP, rows=(MADE_UP.rows[0], wild, *MADE_UP.rows[2:]))
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        bench.draw(found, tmp_path / "bench.svg")
    text = (tmp_path / "bench.svg").read_text()
    for words in (
        "odd $name [x].pt2",
        "1 thread, batch 8",
        "20.0 ms",
        "0.500 ms, 40.00 ×",
        "25.0 ms, 0.80 × (slower)",
        "fails: No compiler [here]",
        "10.0 ms, 2.00 ×; 90 %: 3000.0",
    ):
        assert f">{words}<" in text
    assert text.count("(slower)") == 1


def test_axes_start_at_zero(tmp_path, monkeypatch):
    limits = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: limits.extend(x.get_xlim() for x in figure.axes))
    bench.draw(MADE_UP, tmp_path / "bench.svg")
    ((low, high),) = limits
    assert low == 0
    assert high > 30


def test_a_plot_without_matplotlib_says_what_to_install(run, tmp_path, monkeypatch):
    (tmp_path / "model.pt2").touch()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure")
    outcome = run("bench", "model.pt2", "--plot", "bench.svg")
    assert (outcome.code, outcome.out) == (2, "")
    assert install_command("plot") in outcome.err


def test_a_plot_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def fill_the_disk(figure, file, **options):
        file.write(b"half")
        raise OSError("disk full")

    (tmp_path / "bench.svg").write_text("earlier")
    monkeypatch.setattr(Figure, "savefig", fill_the_disk)
    with pytest.raises(demask.BadInput, match="disk full"):
        bench.draw(MADE_UP, tmp_path / "bench.svg")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("bench.svg", "earlier")]


# -- help ------------------------------------------------------------------------------------------


def test_the_example_in_the_help_runs(run, saved, optimized, compiler, tmp_path):
    (tmp_path / "model.pt2").write_bytes((saved / "masked.pt2").read_bytes())
    (words,) = test_cli.examples(run("bench", "--help").out)
    outcome = run(*words[1:])
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "bench.svg").exists()


@pytest.mark.parametrize(("seconds", "words"), [(12.84, "12840.0"), (0.001, "1.0"), (0.0004, "0.400")])
def test_milliseconds(seconds, words):
    assert format_milliseconds(seconds) == words
