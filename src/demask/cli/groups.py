"""How commands are listed in `--help`, and the line after each that names the next useful one."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from itertools import groupby
from pathlib import Path
from string import Formatter
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from demask.files.bounded_read import check_exists

# Per command, what to call next: the first line of which all {parameters} have a value. A command
# that depends on the kind of its input or on an option has a line for each: see `_key_of`.
NEXT: dict[str, tuple[str, ...]] = {
    "demo": ("demask inspect {keep}", "demask demo --keep model.pt2"),
    "inspect": ("demask slim {model} -o slim{suffix}",),
    "slim": ("demask verify {model} {output}", "demask bench {model}"),
    "slim --for transformers": (
        "python -c 'import sys, transformers as t; print(t.AutoModel.from_pretrained(sys.argv[1]))' {output}",
    ),
    "slim --sparse": ("python -c 'import sys, demask; print(demask.checkpoint.load(sys.argv[1]))' {output}",),
    "slim --for vllm": ("vllm serve {output}",),
    "slim --for mlx": ("mlx_lm.generate --model {output}",),
    "slim --for llama.cpp": ("llama-cli --model {output}",),
    "prune": ("demask optimize {output} -o fast.demask",),
    "optimize": ("demask bench {model}",),
    "bench": ("demask optimize {model} -o fast.demask",),
    "verify": ("demask bench {a}",),
    "stream": ("demask stream {model} {source} {destination} --plan",),
    "stream --plan": ("demask stream {model} {source} {destination}",),
    "halo": ("demask stream {model} image.npy result.npy --memory 256MiB",),
    "lower": ("demask verify {model} {output}",),
    "raise": ("demask verify {model} {output}",),
    "pilot compare": ("demask pilot explain {model} {data}",),
    "pilot collect": ("demask pilot explain {model} {data}",),
    "pilot explain": ("demask pilot condition {model} --data {data}",),
    "pilot condition": ("demask bench {output}", "demask bench {model}"),
}
READ = ("model", "a", "b", "data", "source")  # parameters that name files to read
NO_NEXT = "no next"  # what a command returns that wrote what no other command reads
NOT_REPEATED = ("plan", "plot", "page", "report")  # the next command would write over the files


class CommandsByJob(TyperGroup):
    """A group that lists its commands under the jobs that they are for, each with a full sentence.

    The job of a command is its `rich_help_panel`.
    """

    def get_help_option(self, ctx: Any) -> Any:
        """The option --help. Typer imports pydantic, half a second, to read a default of None."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands, as `--help` shows it."""
        commands: list[Any] = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        width = max(len(command.name) for command in commands)
        for job, of_job in groupby(commands, lambda command: command.rich_help_panel):
            rows = [(one.name.ljust(width), one.get_short_help_str(10**4)) for one in of_job]
            with formatter.section(job or "Commands"):
                formatter.write_dl(rows)


def add_command(app: typer.Typer, name: str, command: Callable[..., str | None], job: str | None = None) -> None:
    """Add a command to a group. Of a parameter whose type is a dataclass, the fields are the options."""
    parameters, groups = list[inspect.Parameter](), dict[str, Any]()
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind: Any = parameter.annotation
        if is_dataclass(kind):
            groups[parameter.name] = kind
            parameters += inspect.signature(groups[parameter.name], eval_str=True).parameters.values()
        else:
            parameters.append(parameter)

    def run(**values: Any) -> str | None:
        grouped = {
            group: kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            for group, kind in groups.items()
        }
        return command(**values, **grouped)

    run.__doc__, run.__annotations__ = command.__doc__, {}
    vars(run)["__signature__"] = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in parameters])
    app.command(name, cls=CommandWithNext, rich_help_panel=job)(run)


class CommandWithNext(TyperCommand):
    """A command that ends with a line on stderr, the next useful command; not after --json. That
    the files it reads exist is checked first: imports take seconds."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command in its context."""
        for name in READ:
            if isinstance(path := ctx.params.get(name), Path):
                check_exists(path)
        result = super().invoke(ctx)
        if not ctx.params.get("as_json") and result is not NO_NEXT:
            typer.echo(f"next: {next_command(ctx)}", err=True)
        return result


def next_command(ctx: Any) -> str:
    """What to call after the command of a context, as a line of a shell.

    Options that were passed to the command and that the next one has too are repeated.
    """
    values = {name: value for name, value in ctx.params.items() if value not in (None, False)}
    if "model" in values:
        values["suffix"] = values["model"].suffix
    templates = NEXT[_key_of(ctx)]
    names = [{name for _, name, _, _ in Formatter().parse(line) if name} for line in templates]
    which = next(k for k in range(len(templates)) if names[k] <= values.keys())
    quoted = {name: shlex.quote(str(values[name])) for name in names[which]}
    line = templates[which].format(**quoted)
    words = shlex.split(line)
    return line if words[0] != "demask" else shlex.join([*words, *_repeated_options(ctx, words)])


def _key_of(ctx: Any) -> str:
    name = ctx.command_path.partition(" ")[2]
    if name == "slim" and ctx.params["model"].is_dir():
        if ctx.params["sparse"]:
            return "slim --sparse"
        return f"slim --for {ctx.params['loader'] or 'transformers'}"
    return "stream --plan" if ctx.params.get("plan") else name


def _repeated_options(ctx: Any, words: list[str]) -> Iterator[str]:
    """The passed options that the command in `words` has too, as words."""
    command: Any = ctx.find_root().command
    for word in words[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    options = (one for one in command.params if one.param_type_name == "option")
    known = {name for one in options for name in one.opts}
    for one in ctx.command.params:
        source, value = ctx.get_parameter_source(one.name), ctx.params.get(one.name)
        is_known = known & {*one.opts} and not {*words} & {*one.opts}
        if not is_known or one.name in NOT_REPEATED or source.name != "COMMANDLINE":
            continue
        if isinstance(value, bool):
            yield one.opts[0] if value else one.secondary_opts[0]
            continue
        for item in value if isinstance(value, list | tuple) else [value]:
            yield from (one.opts[0], str(getattr(item, "value", item)))
