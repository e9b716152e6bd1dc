"""`demask halo`: how far beyond a tile a network reads, as model zoos ask for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Annotated, Any

import typer

from demask.cli.options import Model, NetworkOptions, ShowOptions
from demask.pages import Lines
from demask.progress import progress

Roi = Annotated[int, typer.Option("--tile", min=1, metavar="N", help="Rows of a tile with its halo, for MONAI.")]


@dataclass(frozen=True, slots=True)
class ZooEntry:
    """What to enter in other tools for one axis of one input.

    tile_pad: of Real-ESRGAN, positions of the input at either side of a tile, so that tiles begin
    at multiples of `align`. halo: of bioimage.io, positions to cut off the output at either side;
    None where output and input are of no fixed ratio. overlap: of MONAI, as a share of roi_size;
    None where a tile of that size has no position that is right. exact: False where a call reads
    the whole image, and no padding is enough.
    """

    input: str
    axis: str
    tile_pad: int
    align: int
    halo: int | None
    overlap: float | None
    exact: bool

    def __str__(self) -> str:
        halo = "of no fixed size" if self.halo is None else self.halo
        overlap = "none: larger tiles are required" if self.overlap is None else self.overlap
        return (
            f"{self.input}, {self.axis}: Real-ESRGAN tile_pad {self.tile_pad}; "
            f"bioimage.io halo {halo}; MONAI overlap {overlap}"
        )


def halo(model: Model, tile: Roi = 512, *, display: ShowOptions, options: NetworkOptions) -> None:
    """Print how far beyond a tile MODEL reads, exactly, and what to enter in other tools.

    With less, tiles differ from the whole image. Where a call reads the whole image, such as group
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
    entries = list(_entries(result, shapes, shape, tile))
    data = result.to_dict() | {"entries": [asdict(entry) for entry in entries]}
    others = Lines([*map(str, entries)], "In other tools")
    display.show(result.page().followed_by(others), data)


def _entries(result: Any, shapes: Sequence[tuple[int, ...]], output: tuple[int, ...], tile: int) -> Iterator[ZooEntry]:
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
