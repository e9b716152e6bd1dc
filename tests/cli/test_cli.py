"""The command line: each command's result, its example, and each way it can be used wrong."""

import json
import re
import shutil
import sys
import time
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn.utils import prune

import demask
import own_process
from demask.cli import app, demo, digits, main
from demask.installation import install_command
from demask.progress import progress
from night import at_night

COMMANDS = ("demo", "slim", "inspect", "verify")
# Commands whose examples are run by tests of their own.
ELSEWHERE = ("bench", "halo", "lower", "optimize", "prune", "raise", "stream")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs `demask` with these words in an empty folder, in this process."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["demask", *map(str, words)])
        with pytest.raises(SystemExit) as exit_:
            main()
        return Outcome(exit_.value.code or 0, *capsys.readouterr())

    return call


@pytest.fixture
def model(stored, tmp_path):
    """A network, with its files in the folder that commands run in. stored: of the module, both."""
    net, folder = stored
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return net


def network(masked):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 5, 3, padding=1),
        nn.Flatten(),
        nn.Linear(5 * 6 * 7, 4),
    ).eval()
    if masked:
        for layer in (model[0], model[3]):
            prune.ln_structured(layer, "weight", amount=2, n=2, dim=0)
            prune.remove(layer, "weight")
    return model


def write(model, path):
    images = torch.randn(2, 3, 6, 7)
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (images,), dynamic_shapes=({0: batch},))
    torch.export.save(program, path)
    return path


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Files that commands may read: a masked model, a dense one, and one that is broken off."""
    folder = tmp_path_factory.mktemp("models")
    masked = write(network(masked=True), folder / "masked.pt2")
    write(network(masked=False), folder / "dense.pt2")
    (folder / "broken.pt2").write_bytes(masked.read_bytes()[: masked.stat().st_size // 2])
    return folder


@pytest.fixture
def few_digits(monkeypatch):
    """The demo's digits, cut down to one training batch."""
    every = digits.load_digits()
    few = digits.Digits(
        every.train_images[:64], every.train_labels[:64], every.test_images[:16], every.test_labels[:16]
    )
    monkeypatch.setattr(digits, "load_digits", lambda **options: few)
    return few


# -- slim ------------------------------------------------------------------------------------------


def test_slim_writes_a_smaller_network_that_plain_torch_loads(run, saved, tmp_path):
    outcome = run("slim", saved / "masked.pt2", "-o", "slim.pt2")
    assert outcome.code == 0, outcome.err
    assert "written to slim.pt2" in outcome.out
    words = f"next: demask verify {saved / 'masked.pt2'} slim.pt2"
    assert outcome.err.splitlines()[-1] == words
    assert "nothing left" not in outcome.out
    slim = torch.export.load(tmp_path / "slim.pt2").module()
    images = torch.randn(5, 3, 6, 7)
    torch.testing.assert_close(slim(images), network(masked=True)(images))
    sizes = [sum(p.numel() for p in net.parameters()) for net in (slim, network(masked=True))]
    assert sizes[0] < sizes[1]


def test_slim_into_an_archive_keeps_the_record(run, saved, tmp_path):
    assert run("slim", saved / "masked.pt2", "-o", "slim.demask").code == 0
    slim = demask.load(tmp_path / "slim.demask")
    assert not demask.report(slim).nothing_removed


def test_slim_with_nothing_to_remove_writes_and_says_so(run, saved, tmp_path):
    outcome = run("slim", saved / "dense.pt2", "-o", "slim.pt2")
    assert outcome.code == 0, outcome.err
    assert "nothing left to remove" in outcome.out.splitlines()
    assert (tmp_path / "slim.pt2").exists()


def test_slim_json_is_one_object(run, saved):
    outcome = run("slim", saved / "masked.pt2", "-o", "slim.pt2", "--json")
    assert "next: " not in outcome.err
    data = json.loads(outcome.out)
    assert data["output"] == "slim.pt2"
    assert data["report"]["after"]["parameters"] < data["report"]["before"]["parameters"]
    assert data["verification"]["ok"] is True
    assert data["verification"]["dtype"] == "float32"


def test_slim_that_differs_is_not_written(run, saved, tmp_path, monkeypatch):
    def disagree(*args, **kwargs):
        raise demask.Mismatch("expected the same, got other numbers, in output 0")

    monkeypatch.setattr(demask, "verify", disagree)
    outcome = run("slim", saved / "masked.pt2", "-o", "slim.pt2")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == "demask: expected the same, got other numbers, in output 0\n"
    assert list(tmp_path.iterdir()) == []


def test_a_failed_slim_keeps_an_earlier_output(run, saved, tmp_path):
    (tmp_path / "slim.pt2").write_text("earlier")
    assert run("slim", saved / "broken.pt2", "-o", "slim.pt2").code == 2
    assert (tmp_path / "slim.pt2").read_text() == "earlier"


# -- inspect ---------------------------------------------------------------------------------------


def test_inspect_shows_the_masked_share_of_each_module(run, saved):
    outcome = run("inspect", saved / "masked.pt2", "--json")
    assert outcome.code == 0, outcome.err
    data = json.loads(outcome.out)
    modules = {row["module"]: row for row in data["modules"]}
    # Two of five filters with their bias; of those that stay two of eight channels, which are
    # constants under zero padding: their sum over both is kept as one border kernel per filter.
    assert modules["3"]["masked"] == 2 * (8 * 9 + 1) + 3 * 2 * 9 - 3 * 9
    assert modules["3"]["parameters"] == 5 * (8 * 9 + 1)
    assert data["ops"]["with_entry"]["aten.conv2d.default"] == 2
    assert data["ops"]["without_entry"] == {}
    assert data["report"]["nothing_removed"] is False


def test_inspect_says_when_nothing_is_left(run, saved):
    outcome = run("inspect", saved / "dense.pt2")
    assert outcome.code == 0, outcome.err
    assert "nothing left to remove" in outcome.out.splitlines()
    assert "2 aten.conv2d" in outcome.out
    assert "ops without an entry: none" in outcome.out


def test_inspect_counts_every_parameter_of_a_dense_model(run, saved):
    data = json.loads(run("inspect", saved / "dense.pt2", "--json").out)
    weights = {"0": 8 * 28, "1": 8 * 2, "3": 5 * 73, "5": 4 * 211}
    assert {row["module"]: row["parameters"] for row in data["modules"]} == weights
    assert {row["masked"] for row in data["modules"]} == {0}


def test_inspect_names_ops_without_an_entry(run, tmp_path):
    class Odd(nn.Module):
        def forward(self, x):
            return torch.renorm(x, 2, 0, 1.0)

    program = torch.export.export(Odd(), (torch.randn(2, 3),))
    torch.export.save(program, tmp_path / "odd.pt2")
    outcome = run("inspect", "odd.pt2", "--json")
    assert json.loads(outcome.out)["ops"]["without_entry"] == {"aten.renorm.default": 1}


class Gappy(nn.Module):
    """Six of the sixteen units between two layers are masked, with `op` there in between."""

    def __init__(self, op):
        super().__init__()
        torch.manual_seed(0)
        self.op, self.first, self.last = op, nn.Linear(4, 16), nn.Linear(16, 3)
        with torch.no_grad():
            self.first.weight[:6], self.first.bias[:6] = 0, 0

    def forward(self, x):
        return self.last(self.op(self.first(x))) + torch.arange(3).cumprod(0)


class Unread(Gappy):
    """The last layer reads ten units of sixteen: the other six are made for nobody."""

    def __init__(self, op):
        super().__init__(op)
        with torch.no_grad():
            self.first.weight[:6], self.first.bias[:6], self.last.weight[:, :6] = 1, 1, 0


def gap_of(run, tmp_path, model):
    """What `demask inspect` tells of the one op that slices were kept for, and its text."""
    torch.export.save(torch.export.export(model, (torch.randn(5, 4),)), tmp_path / "odd.pt2")
    (gap,) = json.loads(run("inspect", "odd.pt2", "--json").out)["ops"]["gaps"]
    return gap, run("inspect", "odd.pt2").out


@pytest.mark.parametrize(
    ("model", "frees"),
    # Masked before: six columns of the last layer. Unread: six rows of the first with their bias.
    [(Gappy(torch.special.bessel_j1), 6 * 3), (Unread(torch.special.bessel_j1), 6 * 5)],
    ids=["put back", "unread"],
)
def test_inspect_tells_what_an_entry_would_free(run, tmp_path, model, frees):
    gap, text = gap_of(run, tmp_path, model)
    assert gap == {
        "op": "aten.special_bessel_j1.default",
        "calls": 1,
        "slices": 6,
        "places": ["special_bessel_j1"],
        "frees": frees,
    }
    row = next(line.split() for line in text.splitlines() if line.startswith(" aten.special_bessel_j1"))
    assert " ".join(row) == f"aten.special_bessel_j1 1 {gap['slices']} at most {frees} parameters"
    assert max(map(len, text.splitlines())) <= 100


def test_inspect_does_not_guess_of_an_op_that_changes_the_shape(run, tmp_path):
    class Top(Gappy):
        def forward(self, x):
            return self.op(self.first(x))

    gap, text = gap_of(run, tmp_path, Top(lambda x: x.unfold(1, 2, 2)))
    assert (gap["op"], gap["slices"], gap["frees"]) == ("aten.unfold.default", 6, None)
    assert "not known" in text


def test_inspect_tells_of_calls_that_an_entry_does_not_cover(run, tmp_path):
    gap, text = gap_of(run, tmp_path, Gappy(lambda x: nn.functional.dropout(x, 0.5, True)))
    assert (gap["op"], gap["frees"]) == ("aten.dropout.default", None)
    assert "draws random numbers" in text


# -- verify ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pt2", "demask"])
def test_verify_takes_either_kind_of_file_in_either_order(run, saved, kind):
    slim = f"slim.{kind}"
    run("slim", saved / "masked.pt2", "-o", slim)
    for pair in ((saved / "masked.pt2", slim), (slim, saved / "masked.pt2")):
        outcome = run("verify", *pair)
        assert outcome.code == 0, outcome.err
        assert outcome.out.startswith("equal: ")


def test_verify_exits_with_1_on_a_difference(run, saved):
    outcome = run("verify", saved / "masked.pt2", saved / "dense.pt2")
    assert outcome.code == 1
    assert outcome.out.startswith("DIFFERENT (output ")
    outcome = run("verify", saved / "masked.pt2", saved / "dense.pt2", "--json")
    assert outcome.code == 1
    assert json.loads(outcome.out)["ok"] is False


# -- demo ------------------------------------------------------------------------------------------


def test_the_demo_compares_three_networks(run, few_digits):
    outcome = run("demo", "--runs", 2, "--json")
    assert outcome.code == 0, outcome.err
    data = json.loads(outcome.out)
    dense, masked, slim = (data["contenders"][key] for key in ("dense", "masked", "demasked"))
    assert masked["sizes"] == dense["sizes"]
    assert slim["sizes"]["parameters"] < masked["sizes"]["parameters"] / 2
    assert slim["sizes"]["macs"] < masked["sizes"]["macs"] / 2
    assert slim["accuracy"] == masked["accuracy"]
    assert slim["difference"] < 1e-3 < dense["difference"]


def test_the_demo_prints_one_table_and_moves_its_bar_to_the_end(few_digits):
    moved = []
    table = str(demo.run(few_digits, lambda title, done=1: moved.append(done), runs=1))
    assert sum(moved) == demo.steps(few_digits)
    rows = [line.split("  ")[0].strip() for line in table.splitlines()]
    for row in ("parameters", "MACs per image", "bytes", "test accuracy", "scatters left"):
        assert row in rows
    assert max(map(len, table.splitlines())) <= 100
    assert "allocator" in table


def test_the_two_sides_of_a_residual_lose_different_channels():
    torch.manual_seed(0)
    model = digits.DigitNet(width=16)
    digits.prune_channels(model)
    kept = [layer.weight_mask[:, 0, 0, 0].bool() for layer in (model.stem, model.blocks[0].conv2)]
    assert [side.sum().item() for side in kept] == [8, 8]
    assert not torch.equal(*kept)


def test_the_demo_without_scikit_learn_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    outcome = run("demo")
    assert (outcome.code, outcome.out) == (2, "")
    assert install_command("demo") in outcome.err


# -- the whole command line ------------------------------------------------------------------------


def examples(help_text):
    lines = help_text.splitlines()
    start = next(k for k, line in enumerate(lines) if line.strip() in ("Example:", "Try it:"))
    return [line.split() for line in lines[start:] if line.strip().startswith("demask ")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("command", [*COMMANDS[1:], *at_night(COMMANDS[0])])
def test_the_example_in_the_help_runs(run, saved, few_digits, tmp_path, command):
    shown = run(command, "--help")
    assert shown.code == 0
    for name in ("model.pt2", "slim.pt2"):
        (tmp_path / name).write_bytes((saved / "masked.pt2").read_bytes())
    found = examples(shown.out)
    assert found
    if any("model.onnx" in words for words in found):
        assert run("slim", "model.pt2", "-o", "model.onnx", "--minimal").code == 0
    if any("speech.onnx" in words for words in found):
        pytest.importorskip("test_onnx_fix").speech(tmp_path / "speech.onnx")
    for folder in {word for words in found for word in words} & {"Llama-masked", "Llama-sparse"}:
        folders = pytest.importorskip("masked_folders")
        with torch.no_grad():
            folders.write(folders.llama(), tmp_path / folder)
    for words in found:
        outcome = run(*words[1:])
        assert outcome.code == 0, outcome.err


def test_what_is_removed_from_a_folder_on_request(run, saved, tmp_path, monkeypatch):
    from demask import checkpoint

    calls, report = [], SimpleNamespace(to_dict=dict)
    monkeypatch.setattr(checkpoint, "slim", lambda *_, **options: calls.append(options) or report)
    (tmp_path / "model").mkdir()
    (tmp_path / "rows.txt").write_text("12 13\n14\n")
    (tmp_path / "words.txt").write_text("twelve")
    for words in (
        ["--vocabulary", "drop-zero"],
        ["--vocabulary", "rows.txt"],
        ["--experts", "drop", "--adapter", "lora"],
        [],
    ):
        run("slim", "model", "-o", "out", *words)
    names = ("vocabulary", "experts", "adapter")
    assert [tuple(options[name] for name in names) for options in calls] == [
        ("drop-zero", "keep", None),
        ([12, 13, 14], "keep", None),
        (None, "drop", Path("lora")),
        (None, "keep", None),
    ]
    outcome = run("slim", "model", "-o", "out", "--vocabulary", "words.txt")
    assert outcome.code == 2 and "words.txt: expected numbers" in outcome.err
    outcome = run("slim", saved / "masked.pt2", "-o", "out.pt2", "--experts", "drop")
    assert outcome.code == 2 and "--experts: for folders" in outcome.err


def blocks(language):
    """The README's code blocks in one language."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_python_of_the_readme_prints_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,), (output,) = blocks("python"), blocks("text")
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == output
    assert {path.name for path in tmp_path.iterdir()} == {"slim.demask"}


@pytest.mark.nightly
def test_the_commands_of_the_readme_run_in_order(run, few_digits, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)  # it takes minutes
    lines = [line.partition("#")[0].split() for block in blocks("sh") for line in block.splitlines()]
    commands = [words[1:] for words in lines if words and words[0] == "demask"]
    assert [words[0] for words in commands] == [
        "demo",
        "inspect",
        "slim",
        "optimize",
        "bench",
        "verify",
        "slim",
        "slim",
        "prune",
    ]
    for words in commands:
        outcome = run(*words)
        assert outcome.code == 0, outcome.err


def test_the_examples_of_every_command_run_somewhere():
    assert {command.name for command in app.registered_commands} == {*COMMANDS, *ELSEWHERE}


def test_a_real_process_exits_with_2_and_one_message(tmp_path):
    code, words = "from demask.cli import main; main()", ("slim", "none.pt2", "-o", "slim.pt2")
    status, out, err = own_process.run(code, *words, folder=tmp_path)
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith("demask: none.pt2")  # after progress, if it took long
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


# -- progress --------------------------------------------------------------------------------------


def terminal(is_terminal):
    return Console(file=StringIO(), force_terminal=is_terminal, width=80)


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        pass
    assert condition()


def test_a_bar_shows_on_a_terminal_and_goes_when_the_work_ends():
    console = terminal(True)
    with progress("first", total=2, patience=0, terminal=console) as step:
        wait_for(lambda: "first" in console.file.getvalue())
        step("second")
        wait_for(lambda: "second" in console.file.getvalue())
    # The last thing drawn is the erasing of the bar's line.
    assert console.file.getvalue().endswith("\x1b[2K")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_quick_work_shows_nothing(is_terminal):
    console = terminal(is_terminal)
    with progress("quick", patience=60, terminal=console) as step:
        step("next")
    assert console.file.getvalue() == ""


def test_without_a_terminal_progress_is_lines(monkeypatch):
    monkeypatch.setattr("demask.progress.SILENCE", 0.1)
    console = terminal(False)
    with progress("first", total=5, patience=0.01, terminal=console) as step:
        wait_for(lambda: console.file.getvalue().count("first, 0 of 5 (") == 2)  # it takes long
        for done in (1, 2):
            step("[second]", done)
        wait_for(lambda: "second" in console.file.getvalue())
    assert "[second], 3 of 5 (" in console.file.getvalue().splitlines()[-1]


def test_the_bar_goes_when_the_work_fails():
    console = terminal(True)
    with pytest.raises(ZeroDivisionError), progress("failing", patience=0, terminal=console):
        wait_for(lambda: "failing" in console.file.getvalue())
        raise ZeroDivisionError
    assert console.file.getvalue().endswith("\x1b[2K")
