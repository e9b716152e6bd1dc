"""`demask stream`: run a network on images larger than memory, from a file to a file. `demask halo`: how
far beyond a tile a network reads, as model zoos need it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer

from demask.cli.failures import INTERRUPTED
from demask.cli.options import Fix, Imports, Model, NetworkOptions, ShowOptions, import_modules
from demask.errors import BadInput
from demask.installation import install_command
from demask.machine.byte_sizes import BUDGET
from demask.pages import Lines, OnPage
from demask.progress import progress

READ = ".npy .zarr .tif .ome.tif .svs .ndpi .mrxs"
WRITTEN = ".npy, .ome.zarr (OME-NGFF), .ome.tif, .tif (with coordinates: GeoTIFF) or .cog.tif"
CONNECT = 30.0  # seconds to wait for a scheduler
Roi = Annotated[int, typer.Option("--tile", min=1, metavar="N", help="Rows of a tile with its halo, for MONAI.")]


def stream(
    model: Model,
    source: Annotated[Path, typer.Argument(metavar="IN", help=f"Images: {READ} and others of OpenSlide.")],
    destination: Annotated[
        Path, typer.Argument(metavar="OUT", help=f"{WRITTEN}. Appears, complete, when all is done.")
    ],
    memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="What the call may take on top of the libraries: 512MiB, 1.5GB, or a number of bytes."
        ),
    ] = BUDGET,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="uint8 or uint16 (round(clamp(y, 0, 1) * largest), NaN as 0), float16, float32 or "
            "float64; argmax: the class of each position. Default: what the network returns.",
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="AXES",
            help="A letter per axis of IN: N C D H W, or T Z Y X S: --layout HWC. Default: what "
            "the file says, else NCHW.",
        ),
    ] = None,
    region: Annotated[
        str | None, typer.Option(metavar="Y,X,H,W", help="Only this part: first row, column, rows, columns.")
    ] = None,
    mask: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npy",
            help="Bools (rows, columns) of any size over the image: only where they are True is "
            "anything computed; elsewhere 0.",
        ),
    ] = None,
    normalize: Annotated[
        str | None,
        typer.Option(
            metavar="image|MEANS/DEVIATIONS",
            help="image: each channel to mean 0 and deviation 1 over the entire image; or numbers "
            "per channel: --normalize 0.5,0.4,0.4/0.2,0.2,0.2.",
        ),
    ] = None,
    statistics: Annotated[
        str,
        typer.Option(
            metavar="image|tile:N|FILE.json",
            help="What norms over the image normalize by: the image, as MODEL does; windows of N "
            "rows and columns; or constants of demask.traverse.calibrate(...).to_dict().",
        ),
    ] = "image",
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Rows and columns of a chunk of .zarr. Default: 512.")
    ] = None,
    stripe: Annotated[
        int | None, typer.Option(min=1, help="Rows per task, the unit that is resumed. Default: chosen.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Go on with an unfinished OUT, or not.")] = True,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Tasks run on the workers of this Dask scheduler, such as tcp://10.0.0.5:8786. "
            "All must see the same files.",
        ),
    ] = None,
    spill: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where intermediate maps go. Default: the folder of OUT.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the plan, and run nothing.")] = False,
    *,
    display: ShowOptions,
    imports: Imports = None,
    fix: Fix = None,
) -> None:
    """Run MODEL on images of any size within a budget of memory, from a file to a file.

    Images are read and results are written some rows at a time; between layers only the rows that
    are still needed stay in memory. The result is that of MODEL on each image by itself. MODEL must
    take images of this size: export it with dynamic sizes. A network of floating-point inputs
    receives uint8 images as x / 255. What is interrupted is continued by the same command. Formats
    other than .npy need the extra `stream`.

    \b
    Examples:
      demask stream model.pt2 image.npy result.npy --memory 256MiB --plan
      demask stream model.pt2 image.npy result.npy --memory 256MiB --output uint8
    """
    options = {
        "memory": memory,
        "output": output,
        "layout": layout,
        "region": _parse_region(region),
        "mask": _read_mask(mask),
        "normalize": _parse_normalization(normalize),
        "statistics": _read_statistics(statistics),
        "chunk": chunk,
        "stripe": stripe,
        "spill": spill,
    }
    with ExitStack() as stack:
        with progress("loading") as step:
            from demask.cli.read_network import fixed_network
            from demask.traverse.storage.open_ends import check_target
            from demask.traverse.stream import prepare

            check_target(destination)
            import_modules(imports)
            network = fixed_network(model, fix) if fix else model
            step("planning")
            client = stack.enter_context(_connect(scheduler))
            job = prepare(network, source, destination, client=client, **options)
        if plan:
            display.show(job.plan, {"rows": job.rows, "plan": job.plan.to_dict()})
            return
        done = _run_until_interrupted(job, resume)
    data = done.to_dict() | {"output": str(destination), "plan": job.plan.to_dict()}
    written = Lines([f"written to {destination}"], is_close=True)
    tiles = OnPage(job.plan.page().sections)
    display.show(done.page().followed_by(written, tiles), data)


def _run_until_interrupted(job: Any, resume: bool) -> Any:
    """The result of a job. What Ctrl-C interrupts can go on, and the message says so."""
    try:
        with progress("streaming", job.steps) as step:
            return job.run(step, resume=resume)
    except KeyboardInterrupt:
        typer.echo("demask: interrupted; the same command continues from here", err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def _connect(address: str | None) -> Iterator[Any]:
    """A client of a Dask scheduler, or None."""
    if address is None:
        yield None
        return
    try:
        from distributed import Client
    except ModuleNotFoundError as error:
        raise BadInput(
            f"--scheduler needs dask.distributed, which is not installed: {install_command('stream')}"
        ) from error
    try:
        client = Client(address, timeout=CONNECT)
    except (OSError, ValueError) as error:
        raise BadInput(f"--scheduler {address}: no scheduler answers there ({error})") from error
    with client:
        yield client


def _parse_region(text: str | None) -> tuple[int, int, int, int] | None:
    if text is None:
        return None
    numbers = text.split(",")
    if len(numbers) != 4 or not all(n.strip().isdecimal() for n in numbers):
        raise BadInput(f"expected --region Y,X,H,W, such as 0,512,1024,1024, got {text!r}")
    top, left, rows, columns = map(int, numbers)
    return top, left, rows, columns


def _parse_normalization(text: str | None) -> Any:
    """ "image", or (means, deviations)."""
    if text is None or text == "image":
        return text
    try:
        means, deviations = ([float(n) for n in row.split(",")] for row in text.split("/"))
    except ValueError:
        raise BadInput(
            f"expected --normalize image or MEANS/DEVIATIONS, such as 0.5,0.4,0.4/0.2,0.2,0.2, got {text!r}"
        ) from None
    return means, deviations


def _read_statistics(text: str) -> Any:
    """The text, or the frozen statistics in a file."""
    if not text.endswith(".json"):
        return text
    from demask.traverse import FrozenStatistics

    try:
        return FrozenStatistics.from_dict(json.loads(Path(text).read_text()))
    except (OSError, ValueError) as error:
        raise BadInput(f"--statistics {text}: {error}") from error


def _read_mask(path: Path | None) -> Any:
    """The array of a mask's file."""
    if path is None:
        return None
    import numpy as np

    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise BadInput(f"--mask {path}: expected a .npy file of bools: {error}") from error


@dataclass(frozen=True, slots=True)
class ZooEntry:
    """What to enter in other tools for one axis of one input."""

    input: str
    axis: str
    # of Real-ESRGAN: positions of the input at either side of a tile, so that tiles begin at multiples of `align`
    tile_pad: int
    align: int
    # of bioimage.io: positions to cut off the output at either side; None if output and input have no fixed ratio
    halo: int | None
    overlap: float | None  # of MONAI: share of roi_size; None where a tile of that size has no right position
    exact: bool  # False where a call reads the entire image, so that no padding is enough

    def __str__(self) -> str:
        halo = "of no fixed size" if self.halo is None else self.halo
        overlap = "none: larger tiles are required" if self.overlap is None else self.overlap
        return (
            f"{self.input}, {self.axis}: Real-ESRGAN tile_pad {self.tile_pad}; "
            f"bioimage.io halo {halo}; MONAI overlap {overlap}"
        )


def halo(model: Model, tile: Roi = 512, *, display: ShowOptions, options: NetworkOptions) -> None:
    """Print how far beyond a tile MODEL reads, exactly, and what to enter in other tools.

    With less, tiles differ from the untiled image. Where a call reads the entire image, such as group
    norm, no padding is enough: the numbers are then those for tiles that receive its statistics, as
    in demask stream.

    \b
    Example:
      demask halo model.pt2 --tile 256
    """
    with progress("loading") as step:
        import torch

        from demask.cli.read_network import read_network
        from demask.traverse import halo

        network = read_network(model, options)
        step("following what each output reads")
        example = network.example
        result = halo(network.model, example)
        with torch.no_grad():
            output = network.module(*example)
    shape = tuple(output.shape) if isinstance(output, torch.Tensor) else ()
    shapes = [tuple(getattr(value, "shape", ())) for value in example]
    entries = list(_zoo_entries(result, shapes, shape, tile))
    data = result.to_dict() | {"entries": [asdict(entry) for entry in entries]}
    others = Lines([*map(str, entries)], "In other tools")
    display.show(result.page().followed_by(others), data)


def _zoo_entries(
    result: Any, shapes: Sequence[tuple[int, ...]], output: tuple[int, ...], tile: int
) -> Iterator[ZooEntry]:
    for one in result.inputs:
        for axis, name, side in ((2, "rows", one.rows), (3, "columns", one.columns)):
            if side is None:
                continue
            reach = max(side.local_before, side.local_after)
            padding = -(-reach // side.align) * side.align
            has_axis = len(output) == len(shapes[one.leaf])
            ratio = Fraction(output[axis], shapes[one.leaf][axis]) if has_axis else None
            overlap = math.ceil(2000 * padding / tile) / 1000 if 2 * padding < tile else None
            yield ZooEntry(
                one.name,
                name,
                padding,
                side.align,
                None if ratio is None else math.ceil(reach * ratio),
                overlap,
                side.exact,
            )
