"""`--help`: quick, by job, with examples that parse; and the next command after each."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import demask
from demask.cli import app
from demask.cli.groups import NEXT, next_command

GROUP = get_command(app)
COMMANDS = {
    name if inner is None else f"{name} {inner}": command if inner is None else one
    for name, command in GROUP.commands.items()
    for inner, one in getattr(command, "commands", {None: None}).items()
}
README = Path(__file__).parents[2] / "README.md"


def context_of(line):
    """The context of a command line, parsed but not run. Raises what the command line raises."""
    words = shlex.split(line, comments=True)
    assert words[0] == "demask"
    context = GROUP.make_context("demask", words[1:])
    while hasattr(context.command, "commands"):
        words = [*context._protected_args, *context.args]
        command = context.command.commands[words[0]]
        context = command.make_context(words[0], words[1:], parent=context)
    return context


def examples(command):
    """The lines below "Example:" in a command's help."""
    return re.findall(r"^ *(demask .*)$", command.help.partition("\n\b\nExample")[2], re.MULTILINE)


QUICK = """
import sys
from demask.cli import main
for words in (["--help"], ["slim", "--help"], ["pilot", "compare", "--help"], ["--version"]):
    sys.argv = ["demask", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code
assert not {"torch", "numpy", "rich", "pydantic"} & {*sys.modules}
"""


def test_the_help_imports_nothing_that_takes_long():
    # Not one of `own_process`: those have imported torch.
    done = subprocess.run([sys.executable, "-c", QUICK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Make a network smaller:" in done.stdout
    assert done.stdout.endswith(f"demask {demask.__version__}\n")


MISSING = """
import sys
from demask.cli import main
for words in (["slim", "none.pt2", "-o", "slim.pt2"], ["verify", "none.pt2", "none.pt2"],
              ["pilot", "compare", "none.pt2", "none.npy"],
              ["stream", "none.pt2", "a.npy", "b.npy"]):
    sys.argv = ["demask", *words]
    try:
        main()
    except SystemExit as end:
        assert end.code == 2
assert not {"torch", "numpy", "rich"} & {*sys.modules}
"""


def test_a_file_that_does_not_exist_imports_nothing_that_takes_long():
    done = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["demask: none.pt2: no such file; check the path"] * 4


def test_commands_are_listed_by_job_with_full_sentences(capsys):
    with pytest.raises(SystemExit):
        GROUP.main(["--help"], prog_name="demask")
    text = capsys.readouterr().out
    flat = " ".join(text.split())
    for command in GROUP.commands.values():
        first = command.help.split("\n\n")[0]
        assert f"{command.name} {' '.join(first.split())}" in flat
        assert f"{command.rich_help_panel}:\n" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_a_command_parse(name):
    lines = examples(COMMANDS[name])
    assert lines
    for line in lines:
        assert context_of(line).command is COMMANDS[name]
    for one in COMMANDS[name].params:
        assert one.help, f"{name} {one.name} has no description"


def test_the_commands_of_the_readme_parse():
    lines = re.findall(r"^demask .*$", README.read_text(), re.MULTILINE)
    assert lines
    for line in lines:
        context_of(line)


def test_an_option_that_is_misspelled_does_not_parse():
    with pytest.raises(Exception, match="--ouput"):
        context_of("demask slim model.pt2 --ouput slim.pt2")


def test_every_command_has_a_next_one_that_parses():
    assert {re.sub(" --.*", "", key) for key in NEXT} == {*COMMANDS}
    for line in (line for lines in NEXT.values() for line in lines):
        if line.startswith("demask "):
            context_of(re.sub(r"{(\w+)}", r"\1", line))


@pytest.mark.parametrize(
    ("line", "following"),
    [
        ("slim model.pt2 -o 'a b.pt2'", "verify model.pt2 'a b.pt2'"),
        ("slim model.onnx --in-place --threads 2", "bench model.onnx --threads 2"),
        (
            "slim m.pt2 -o s.pt2 --import a --import b --size x=2 --static",
            "verify m.pt2 s.pt2 --import a --import b --size x=2",
        ),
        ("inspect model.onnx --fix 'r=[1, 2]' --static", "slim model.onnx -o slim.onnx --static --fix 'r=[1, 2]'"),
        ("optimize model.pt2 -o fast.pt2 --threads 1", "bench model.pt2 --threads 1"),
        ("demo", "demo --keep model.pt2"),
        ("demo --keep m.pt2", "inspect m.pt2"),
        (
            "stream m.pt2 i.npy o.npy --memory 1GB --no-resume --plan",
            "stream m.pt2 i.npy o.npy --memory 1GB --no-resume",
        ),
        ("pilot condition m.pt2 --data i.npy", "bench m.pt2"),
    ],
)
def test_the_next_command(line, following):
    assert next_command(context_of(f"demask {line}")) == f"demask {following}"
    context_of(f"demask {following}")


def test_the_next_command_after_a_folder_is_one_of_its_loader(tmp_path):
    line = f"demask slim {shlex.quote(str(tmp_path))} -o out"
    assert next_command(context_of(f"{line} --for vllm")) == "vllm serve out"
    assert next_command(context_of(line)).endswith(" out")
