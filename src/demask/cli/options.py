"""Options that several commands share, and how results are checked, written and printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer

from demask.cli.groups import next_command
from demask.errors import BadInput
from demask.installation import VERSION
from demask.pages import Command, InTerminal, Lines, OnPage, Page, PageSource, Section

SUBJECTS = ("model", "a", "data", "runs")  # parameters that name what a command works on


class Switch(StrEnum):
    """Values of an option that turns something on or off."""

    on = "on"
    off = "off"


def check_output(path: Path, suffixes: tuple[str, ...]) -> None:
    """Raise BadInput now if `path` could not be written after the work."""
    from demask.files.atomic_write import check_writable

    if path.suffix not in suffixes:
        known = " or ".join(suffixes)
        raise BadInput(f"expected an output that ends in {known}, got {path}; rename it")
    check_writable(path)


def _checked_picture(path: Path | None) -> Path | None:
    """The file of an option. Raises BadInput now if no picture could be drawn to it after the work."""
    from demask.files.atomic_write import PICTURE_SUFFIXES, check_picture

    if path is not None:
        check_output(path, PICTURE_SUFFIXES)
        check_picture(path, "--plot")
    return path


@dataclass(frozen=True, slots=True)
class PageFile:
    """A web page to write. context: of the command that writes it."""

    path: Path
    context: typer.Context

    @classmethod
    def checked(cls, context: typer.Context, value: Path | None) -> PageFile | None:
        """The file of an option. Raises BadInput now if it could not be written after the work."""
        if value is None:
            return None
        check_output(value, (".html",))
        return cls(value, context)

    def write(self, page: Page) -> None:
        """Write a page with the command as its title, and with the next useful command."""
        from demask.pages.source import write_page

        names = self.context.params
        subject = next((str(names[name]) for name in SUBJECTS if name in names), "")
        title = f"{self.context.command_path} {Path(subject).name}".rstrip()
        note = " ".join(filter(None, (page.note, f"demask {VERSION}")))
        page = page.followed_by(Command(next_command(self.context)))
        write_page(replace(page, title=title, note=note), self.path)


Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="A .pt2 file of torch.export.save, a .demask archive of demask.save, or a .onnx file."
    ),
]
Sizes = Annotated[
    list[str] | None,
    typer.Option(
        "--size",
        metavar="NAME=N",
        help="A dynamic size of the example inputs, by its name in the file or as INPUT.AXIS where "
        "it has none: --size height=480 --size x.2=48. May be repeated. Default: the "
        "file's own example; for ONNX files batches of 1, images of 224 x 224, else 16.",
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="[NAME=]FILE",
        help="Example inputs to check and measure with: .npy (one input), .npz or .safetensors (by "
        "name, or in order). May be repeated. Default: seeded numbers that the first "
        "ops can work with.",
    ),
]
Fix = Annotated[
    list[str] | None,
    typer.Option(
        "--fix",
        metavar="NAME=VALUE",
        help="A constant in place of an input of an ONNX file, a number or a list: --fix "
        "rate=16000 --fix scales=[1,1,2,2]. May be repeated.",
    ),
]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Import a module that defines what the network takes or returns, such as "
        "transformers.modeling_outputs. May be repeated.",
    ),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        metavar="RATIO",
        help="For .onnx: the largest difference allowed, relative to the largest value of an "
        "output. Default: 64 units in the last place (1 % at most) or, if that is more, what "
        "rounding moves the network itself.",
    ),
]
Picture = Annotated[
    Path | None, typer.Option(metavar="FILE", callback=_checked_picture, help="Also draw it: .svg, .png or .pdf.")
]


@dataclass(frozen=True, slots=True)
class ShowOptions:
    """The options of a command that say how its result is shown."""

    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")] = False
    page: Annotated[
        Any,
        typer.Option(
            "--report",
            "--page",
            parser=Path,
            metavar="FILE.html",
            callback=PageFile.checked,
            help="Also write the result as one web page: a picture, tables, and what to do next.",
        ),
    ] = None

    def show(self, shown: Page | PageSource, data: dict[str, Any]) -> None:
        """Print a result as text or its data as JSON, and write the web page if one is wanted, which
        ends with the next useful command."""
        from demask.pages.text import text_of

        shown = shown if isinstance(shown, Page) else shown.page()
        typer.echo(json.dumps(data, indent=2) if self.as_json else text_of(shown.sections))
        if self.page is not None:
            self.page.write(shown)
            if not self.as_json:
                typer.echo(f"report in {self.page.path}")


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """The options of a command that say how its network and example inputs are read."""

    imports: Imports = None
    sizes: Sizes = None
    inputs: Inputs = None
    static: Annotated[bool, typer.Option("--static", help="Fix all dynamic sizes to those of the example inputs.")] = (
        False
    )
    fix: Fix = None


def verify_and_write(network: Any, result: Any, output: Path, step: Any, *, exact: bool = True) -> Any:
    """The verification of a result against its network; then the result is written. exact: False
    writes it even if it differs."""
    import demask

    step("checking that it computes the same")
    verification = demask.verify(network.model, result, network.args, check=exact)
    step("writing")
    save = {".demask": demask.save, ".onnx": demask.to_onnx}.get(output.suffix, demask.to_pt2)
    save(result, output)
    return verification


def import_modules(modules: list[str] | None) -> None:
    """Import modules by name; BadInput where there is no such module."""
    for name in modules or ():
        try:
            import_module(name)
        except ImportError as error:
            raise BadInput(f"cannot import {name}: {error}; is it installed here?") from error


def plain(verification: Any) -> dict[str, Any]:
    """A verification as JSON values: a dtype as its name, NaN and infinity as words."""
    row = asdict(verification) | {"dtype": str(verification.dtype).removeprefix("torch.")}
    odd = {key: str(x) for key, x in row.items() if isinstance(x, float) and not isfinite(x)}
    return row | odd


def show_written(result: Any, output: Path, verification: Any, options: ShowOptions) -> None:
    """Print the report of a result that was written to `output`, and its verification."""
    import demask

    report = demask.report(result)
    data = {"output": str(output), "report": report.to_dict()}
    data["verification"] = plain(verification)
    written = written_sections(output, str(verification), verification.page().sections)
    options.show(report.page().followed_by(*written), data)


def written_sections(output: Path, words: str, verified: Sequence[Section] = ()) -> list[Section]:
    """What was written where. words: in which way it was checked; verified: the same on a page."""
    line = f"written to {output}"
    return [
        InTerminal([Lines([f"{line} ({words})"], is_close=True)]),
        OnPage([*verified, Lines([f"{line}."], "" if verified else "Written")]),
    ]
