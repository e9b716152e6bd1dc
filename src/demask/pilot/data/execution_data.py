"""Execution data: what one or several runs measured of each part of a network.

One magnitude per channel, unit, head, token or tile of each layer: the mean of |value| (or the
largest) after the layer's norm and activation. It is stored as safetensors, and can be read,
printed and drawn: per layer a heat map over inputs and positions, or bars.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from matplotlib.axes import Axes
from safetensors import SafetensorError, safe_open
from torch import Tensor

from demask.errors import BadInput
from demask.files import atomic_write as atomic
from demask.files.atomic_write import PICTURE_DOTS, check_picture, write
from demask.files.bounded_read import parse_json
from demask.machine.byte_sizes import format_bytes
from demask.pages import Lines, Page, PageSource, TextTable

BARS, COLOURS = "#2a78b5", "viridis"
ACROSS, WIDTH, PANEL = 3, 10.0, 1.7  # panels in a row; inches
MOST = 60  # panels


def draw(magnitudes: Mapping[str, Tensor], grids: Mapping[str, tuple[int, int]], title: str, path: Path) -> None:
    """Write the picture to `path`, completely or not at all; its suffix is the format.

    magnitudes: by layer, [positions] or [inputs, positions]. grids: rows and columns of tiles.
    """
    check_picture(path)
    from matplotlib.figure import Figure

    layers = list(magnitudes.items())[:MOST]
    if not layers:
        raise BadInput("there is nothing to draw: no layer has magnitudes")
    across = min(ACROSS, len(layers))
    down = math.ceil(len(layers) / across)
    figure = Figure(figsize=(WIDTH, PANEL * down + 0.8), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for axes, (name, values) in zip(panels, layers, strict=False):
        _panel(axes, name, values, grids.get(name))
    for axes in panels[len(layers) :]:
        axes.axis("off")
    left = len(magnitudes) - len(layers)
    more = f" ({left} more layers not drawn)" if left else ""
    figure.suptitle(title + more, fontsize=11, parse_math=False)
    with atomic.write(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=PICTURE_DOTS)


def _panel(axes: Axes, name: str, values: Tensor, grid: tuple[int, int] | None) -> None:
    axes.set_title(name, loc="left", fontsize=8, parse_math=False)
    axes.tick_params(labelsize=7)
    inputs = len(values) if values.ndim == 2 else 1
    each = values.reshape(inputs, -1)
    if grid is not None:
        image = axes.imshow(each.mean(0).reshape(grid).numpy(), cmap=COLOURS, aspect="equal")
    elif inputs == 1:
        axes.bar(range(each.shape[1]), each[0].numpy(), color=BARS, width=1.0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0)
        return
    else:
        image = axes.imshow(each.numpy(), cmap=COLOURS, aspect="auto", interpolation="nearest")
        axes.set_ylabel("input", fontsize=7)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01)
    bar.ax.tick_params(labelsize=6)


FORMAT = "demask execution data 1"
MEASURES = ("mean", "max", "contribution")


@dataclass(frozen=True, slots=True)
class ExecutionData(PageSource):
    """Magnitudes of the values of each part of each layer, from one or several runs.

    A magnitude is the mean or the largest of |value|, or the contribution to the outputs, as
    `measure` says. Parts are channels, units, heads, tokens or tiles, as `per` says. `collect`
    returns execution data; `condition` takes them as a pilot (the cheap run that selects the work),
    `write_packets` and `Gate` as priorities. `save` and `load` use the safetensors format, `plot`
    draws a picture, and `print` shows a table.

    Args:
        per: the part that is measured: "channel", "unit", "head", "token" or "tile:T" (T x T
            positions).
        magnitudes: by layer name, float32 [inputs, positions], or [positions] for all inputs
            together.
        source: a description of the inputs.
        measure: "mean" (the default) or "max": of |value| over each part; or "contribution".
        grids: by layer name, (rows, columns) of tiles; positions are in row-major order. Default
            empty.
        slices: number of slices in which the network ran; default 1.
        peak_weight_bytes: most bytes of weights in memory at a time; default 0.

    Raises:
        BadInput: magnitudes are not float32 with one or two axes. `per` and `measure` are not
            checked here; `load` refuses a file with another `measure`.

    Example:
        >>> import torch
        >>> from demask.pilot import ExecutionData
        >>> two_inputs = {"fc": torch.tensor([[1.0, 3.0], [3.0, 3.0]])}
        >>> data = ExecutionData("unit", two_inputs, source="two inputs")
        >>> data.priorities("fc")  # the mean over the inputs
        tensor([2., 3.])
    """

    per: str
    magnitudes: Mapping[str, Tensor]
    source: str
    measure: str = "mean"
    grids: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    slices: int = 1
    peak_weight_bytes: int = 0

    def __post_init__(self) -> None:
        for name, values in self.magnitudes.items():
            if values.dtype != torch.float32 or values.ndim not in (1, 2):
                raise BadInput(
                    f"magnitudes of {name}: expected float32 [positions] or [inputs, positions], "
                    f"got {values.dtype} {list(values.shape)}"
                )

    @property
    def held(self) -> int:
        """`peak_weight_bytes`, under its earlier name."""
        return self.peak_weight_bytes

    @property
    def quantity(self) -> str:
        """What magnitudes are, in words: "mean |value|", "max |value|" or "contribution"."""
        return self.measure if self.measure == "contribution" else f"{self.measure} |value|"

    def mean(self) -> ExecutionData:
        """An ExecutionData with the mean over all inputs: float32 [positions] per layer."""
        means = {n: m.mean(0) if m.ndim == 2 else m for n, m in self.magnitudes.items()}
        return replace(self, magnitudes=means)

    def priorities(self, name: str) -> Tensor:
        """The mean magnitude of each position of a layer over all inputs, float32 [positions].

        Args:
            name: name of the layer.

        Raises:
            BadInput: there are no magnitudes of this layer.
        """
        if name not in self.magnitudes:
            known = ", ".join(list(self.magnitudes)[:5])
            raise BadInput(f"there are no magnitudes of {name!r}; there are of {known}")
        return self.mean().magnitudes[name]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the data to a safetensors file, completely or not at all.

        Args:
            path: of the file; an existing one is replaced.

        Raises:
            BadInput: the path cannot be written.
        """
        about = {
            "format": FORMAT,
            "per": self.per,
            "source": self.source,
            "measure": self.measure,
            "grids": {name: list(grid) for name, grid in self.grids.items()},
            "slices": self.slices,
            "held": self.peak_weight_bytes,
            "layers": list(self.magnitudes),
        }
        tensors = {name: m.contiguous() for name, m in self.magnitudes.items()}
        data = safetensors.torch.save(tensors, {"demask": json.dumps(about)})
        with write(path) as file:
            file.write(data)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ExecutionData:
        """The execution data of a file that `save` wrote.

        Args:
            path: of the file.

        Raises:
            BadInput: the file cannot be read or was not written by `save`.
        """
        try:
            with safe_open(path, framework="pt") as file:
                text = (file.metadata() or {}).get("demask", "")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise BadInput(f"{path}: expected execution data in safetensors ({error})") from error
        about = _about(text, tensors, Path(path))
        grids = {name: (rows, columns) for name, (rows, columns) in about["grids"].items()}
        order = {name: tensors[name] for name in about["layers"]}
        return cls(about["per"], order, about["source"], about["measure"], grids, about["slices"], about["held"])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws a heat map per layer, or bars where there is one input; needs matplotlib.

        Args:
            path: of the picture; the suffix, .svg, .png or .pdf, is the format.

        Raises:
            BadInput: the suffix is another one, there is no layer, matplotlib (the extra "plot") is
                not installed, or the path cannot be written.
        """
        title = f"{self.quantity} per {self.per}, {self.source}"
        draw(self.magnitudes, self.grids, title, Path(path))

    def page(self) -> Page:
        """What `print`, `to_html` and notebooks show, as sections."""
        heads = ("layer", "inputs", f"{self.per}s", "mean", "least", "most", "zero")
        rows = [(name, *_cells(values)) for name, values in self.magnitudes.items()]
        slices = f"; {self.slices} slices, weights in memory: {format_bytes(self.peak_weight_bytes)}"
        words = f"{self.quantity} per {self.per}, of {self.source}"
        words += slices if self.slices > 1 else ""
        table = TextTable(heads, rows, "Layers", pad_edge=False)
        return Page("demask pilot collect", (table, Lines([words], is_close=True)))


def _cells(values: Tensor) -> list[str]:
    inputs = len(values) if values.ndim == 2 else 1
    each = values.reshape(inputs, -1).mean(0)
    if not each.numel():
        return [str(inputs), "0", "–", "–", "–", "–"]
    zero = float((values == 0).float().mean())
    numbers = [f"{float(v):.3g}" for v in (each.mean(), each.min(), each.max())]
    return [str(inputs), str(each.numel()), *numbers, f"{100 * zero:.0f} %"]


def _about(text: str, tensors: Mapping[str, Tensor], path: Path) -> dict[str, Any]:
    """The metadata of a file, checked."""
    fields = parse_json(text or "{}", f"{path}: metadata")
    match fields:
        case {
            "format": "demask execution data 1",
            "per": str(),
            "source": str(),
            "measure": "mean" | "max" | "contribution",
            "grids": dict(grids),
            "slices": int(),
            "held": int(),
            "layers": list(layers),
        } if sorted(map(str, layers)) == sorted(tensors) and all(map(_is_grid, grids.values())):
            return fields
    raise BadInput(f"{path}: expected execution data that demask wrote; collect it again")


def _is_grid(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(n) is int for n in value)
