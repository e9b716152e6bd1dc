"""The condition *regions*: the network runs where an image has activity.

A pilot measures the activity of each tile: the network at a lower resolution, or the contrast of
the input. Tiles above a threshold become a few rectangles, and there the network is run exactly,
with the halo that its layers read (`traverse.execution.region_runner`). Elsewhere the output is the
pilot's answer, a constant, or a function of the input. Where rectangles would cost more than the
image, the full image is run.

The activity of an image: one magnitude per tile.

A map of activity may have any size; its positions cover the image in proportion, and a tile has the
largest value of those that it touches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from demask.compat.fx_internals import signature_of
from demask.errors import BadInput
from demask.exec.analysis.flow import Flow
from demask.numerics import is_integer, is_number
from demask.ops import TABLE, Table
from demask.ops.schema import fake
from demask.pilot.conditions.base import Args, Conditioned, Decision, Kwargs
from demask.pilot.simplifiers.simplify import Simplifier, simplifier, simplify
from demask.traverse.execution.region_runner import Rectangle, RegionNetwork, fit_cost, rectangles, refusals
from demask.traverse.execution.segment_executor import Counter
from demask.traverse.execution.tiled_module import Prepared, Tiled, call_by_image, constants, empty_result, run_image
from demask.traverse.halo import Halo, halo
from demask.traverse.tile import tile as tiled

BLOCK = 8  # pixels a side of the blocks of `contrast`


def contrast(x: Tensor, block: int = BLOCK) -> Tensor:
    """The largest range of values in each block, over the channels: [n, c, h, w] -> [n, ceil(h /
    block), ceil(w / block)].

    A block includes one row and one column of the next, so that an edge between two blocks counts.
    Cost: one or two comparisons per value.

    >>> x = torch.zeros(1, 1, 16, 16)
    >>> x[..., 8:, :] = 1.0
    >>> contrast(x)
    tensor([[[1., 1.],
             [0., 0.]]])
    """
    padding = [-n % block for n in x.shape[2:]]
    if any(padding):
        x = F.pad(x.float(), (0, padding[1], 0, padding[0]), mode="replicate")
    largest = _extreme(x, block, torch.amax, torch.maximum)
    return (largest - _extreme(x, block, torch.amin, torch.minimum)).amax(1)


def _extreme(x: Tensor, block: int, of: Callable[..., Tensor], two: Callable[..., Tensor]) -> Tensor:
    """The largest or the smallest value of each block and of the first positions after it; rows
    first, whose values are contiguous."""
    for axis in (2, 3):
        count = x.shape[axis] // block
        extremes = of(x.unflatten(axis, (count, block)), axis + 1)
        if count > 1:
            following = x.narrow(axis, block, x.shape[axis] - block)
            firsts = following.unflatten(axis, (count - 1, block)).select(axis + 1, 0)
            inner = extremes.narrow(axis, 0, count - 1)
            inner.copy_(two(inner, firsts))
        x = extremes
    return x


def per_tile(activity: Tensor, size: tuple[int, int], tile: int, grow: int = 0) -> Tensor:
    """The largest activity that each tile of an image of `size` touches, with `grow` positions
    around it: [n, h, w] -> [n, ceil(rows / tile), ceil(columns / tile)]. NaN counts as infinite, so
    that unknown tiles are run.

    >>> per_tile(torch.arange(4.0).reshape(1, 2, 2), (8, 8), 4)
    tensor([[[0., 1.],
             [2., 3.]]])
    >>> per_tile(torch.arange(4.0).reshape(1, 2, 2), (8, 8), 4, grow=1)
    tensor([[[3., 3.],
             [3., 3.]]])
    """
    if activity.ndim != 3 or not activity.numel():
        raise BadInput(f"expected a map of activity [images, rows, columns], got {list(activity.shape)}")
    maxima = activity.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    for axis in (1, 2):
        spans = _spans(size[axis - 1], maxima.shape[axis], tile, grow)
        maxima = torch.stack([maxima.narrow(axis, low, high - low).amax(axis) for low, high in spans], axis)
    return maxima


def _spans(length: int, map_size: int, tile: int, grow: int) -> list[tuple[int, int]]:
    """Per tile, the range of positions that it touches on a map of `map_size` positions over
    `length`.

    Positions that are no integer multiple of the image's may be one off: of blocks of eight the last is
    often smaller.
    """
    slack = int(length % map_size != 0)
    ends = ((max(k - grow, 0), min(k + tile + grow, length)) for k in range(0, length, tile))
    ranges = ((low * map_size // length, -(-high * map_size // length)) for low, high in ends)
    return [(max(low - slack, 0), min(high + slack, map_size)) for low, high in ranges]


def differences(answers: Sequence[Tensor], fills: Sequence[Tensor]) -> Tensor:
    """The distance of a pilot's answers from the fills, the largest over channels and outputs,
    which have one size: [n, c, h, w] each -> [n, h, w]."""
    return together([(a - b).abs().amax(1) for a, b in zip(answers, fills, strict=True)])


def contrasts(answers: Sequence[Tensor]) -> Tensor:
    """The contrast of a pilot's answers, at most over outputs: [n, c, h, w] each -> a map."""
    return together([contrast(answer) for answer in answers])


def together(maps: Sequence[Tensor]) -> Tensor:
    """One map of several, of the size of the largest: the largest value at each position."""
    largest = max(maps, key=lambda one: one.shape[1] * one.shape[2])
    size = (largest.shape[1], largest.shape[2])
    spread = [F.adaptive_max_pool2d(one, size) if one.shape != largest.shape else one for one in maps]
    return torch.stack(spread).amax(0)


Answers = Callable[..., Any]  # of the network's arguments; returns its outputs, or a map of activity
PILOT = "pilot"


@dataclass(frozen=True)
class Missed:
    """The share of an output that a choice of regions left out; the result of `Regions.missed`.

    A position is an (image, row, column) of the output, with all channels. It matters where the
    full run and the fill (the output where nothing is run) differ by more than a tolerance in a
    channel.

    Attributes:
        matters: share of all positions that matter, 0 to 1.
        missed: share of all positions that matter and were not run, 0 to 1.
        worst: largest |full run - fill| of a channel at a position that was not run, in units of
            the output; 0 where all positions were run.
        recall: share of the positions that matter which were run, 0 to 1; 1 where none matters.

    Example:
        >>> import torch
        >>> from demask.pilot import Regions
        >>> full = torch.tensor([[[[0.0, 1.0], [1.0, 0.0]]]])
        >>> was_run = torch.tensor([[[True, True], [False, False]]])
        >>> missed = Regions.missed(full, fill=torch.zeros(()), where=was_run, tolerance=0.5)
        >>> missed, missed.recall
        (Missed(matters=0.5, missed=0.25, worst=1.0), 0.5)
    """

    matters: float
    missed: float
    worst: float

    @property
    def recall(self) -> float:
        """The share of the positions that matter which were run, 0 to 1; 1 where none matters."""
        return 1 - self.missed / self.matters if self.matters else 1.0


@dataclass(frozen=True)
class Regions:
    """A condition that runs the network only in the parts of an image where a pilot sees activity.

    A condition selects the work that a network does. Pass `Regions(0.1)`, or its text "regions:0.1"
    or "regions:0.1:tile=32", to the function `condition`. Tiles of the output whose activity is
    above the threshold are covered by a few rectangles. In these the network is run, with the halo
    (the positions around a rectangle that its layers read). Values there are those of the full run
    up to rounding: float64 differs by at most 1e-12 of the largest value, float32 in the last
    digits. Where the rectangles would cost more than the image, the full image is run. Regions are
    for inference on the CPU.

    The pilot (the cheap first run) is one of these:

    - a simplifier (derives a cheaper network), its text, such as "downsample:8:bilinear", or a
      network with the same inputs and output shapes. With fill="pilot" the activity is the contrast
      (largest less smallest value) of the pilot's output in blocks of 8 x 8 positions; with another
      fill, the activity is the difference of that output from the fill;
    - a function of the network's arguments that returns a map of activity, float [images, rows,
      columns], with any number of rows and columns;
    - None: the activity is the contrast of the first input with four axes, in the same blocks.

    The conditioned module takes images of the example's size, and any number of images if the
    example has two or more. The attribute `last` prints how the last call ran, and `last.where` is
    a bool tensor [images, rows, columns] that is True where the network was run.

    Args:
        threshold: activity above which a tile is run, in units of the values that are compared;
            default 0.1.
        tile: side of a tile in positions of the output, 1 or more; default 64.
        grow: number of positions around a tile that count as its own when its activity is measured,
            0 or more; default 0.
        fill: output where nothing is run: "pilot" (the default) for the pilot's output, a number,
            or a function of the network's arguments whose results broadcast to the outputs.

    Raises:
        BadInput: `tile` is below 1, `grow` below 0, or `fill` another text; when the condition is
            applied: the pilot does not fit, fill="pilot" without a pilot that is a network, or a
            layer reads the full image (a norm over the image, a global pool, attention); when the
            conditioned module is called: images have another size than the example's.
        NotExportable: when the condition is applied: torch.export cannot capture the model.

    Example:
        >>> import torch
        >>> from torch.nn import Conv2d, ReLU, Sequential
        >>> from demask.pilot import Regions, condition
        >>> net = Sequential(Conv2d(1, 4, 3, padding=1), ReLU(), Conv2d(4, 1, 3, padding=1)).eval()
        >>> x = torch.zeros(1, 1, 256, 256)
        >>> x[..., 70:100, 140:180] = 1.0
        >>> part = condition(net, (x,), condition=Regions(0.5, tile=32, fill=0.0), check=False)
        >>> _ = part(x)
        >>> print(part.last)
        image 0: 6.2 % of positions selected; rectangles: 1 with 6.2 %; 0.064 of the multiply-adds
    """

    threshold: float = 0.1
    tile: int = 64
    grow: int = 0
    fill: float | str | Answers = PILOT

    name: ClassVar[str] = "regions"

    def __post_init__(self) -> None:
        if not is_number(self.threshold):
            raise BadInput(f"expected a number as threshold, such as 0.5, got {self.threshold!r}")
        sizes = self.tile, self.grow
        if not all(map(is_integer, sizes)) or self.tile < 1 or self.grow < 0:
            raise BadInput(
                "expected tiles of at least one position and a growth of none or more, "
                f"got tile={self.tile!r}, grow={self.grow!r}"
            )
        if self.fill != PILOT and not is_number(self.fill) and not callable(self.fill):
            raise BadInput(
                f"expected fill={PILOT!r}, a number or a function of the network's arguments, got {self.fill!r}"
            )

    def applied(self, model: nn.Module, args: Args, kwargs: Kwargs, pilot: Any, table: Table = TABLE) -> InRegions:
        """The module that runs the model in regions, for inference on the CPU.

        The module shares the model's weights.

        Arguments are those of `Condition.applied`; `pilot` may also be a function.

        Raises:
            BadInput: a layer reads the full image, or the pilot does not fit.
            NotExportable: torch.export cannot capture the model.
        """
        runs, text = _pilot(model, args, kwargs, pilot, table)
        if self.fill == PILOT and not isinstance(runs, nn.Module):
            raise BadInput(
                "fill='pilot' needs a pilot that answers as the network does, as does "
                f"'downsample:8:bilinear'; got {text}: or set fill=0.0"
            )
        tiled_model = tiled(model, args, kwargs, memory=2**62, table=table)
        reasons = refusals(tiled_model.ready().flow)
        if reasons:
            raise BadInput(_refused(halo(model, args, kwargs, table=table), reasons))
        return InRegions(self, tiled_model, runs, text)

    @staticmethod
    def missed(full: Tensor, fill: Tensor, where: Tensor, tolerance: float) -> Missed:
        """The share of one output that a choice of regions left out.

        Args:
            full: output of the full run, float [images, channels, rows, columns].
            fill: output where nothing is run; a tensor that broadcasts to the shape of `full`.
            where: bool [images, rows, columns], True where the network was run.
            tolerance: difference above which a position matters, the largest over the channels.

        Raises:
            RuntimeError: the shapes do not fit.

        >>> import torch
        >>> from demask.pilot import Regions
        >>> full = torch.tensor([[[[0.0, 1.0], [1.0, 0.0]]]])
        >>> where = torch.tensor([[[True, True], [False, False]]])
        >>> Regions.missed(full, torch.zeros(()), where, 0.5)
        Missed(matters=0.5, missed=0.25, worst=1.0)
        """
        gap = (full - fill).abs().amax(1)
        matters = gap > tolerance
        outside = gap.masked_fill(where, 0.0)
        share = (matters & ~where).double().mean()
        return Missed(float(matters.double().mean()), float(share), float(outside.max()))


def _pilot(
    model: nn.Module, args: Args, kwargs: Kwargs, pilot: Any, table: Table
) -> tuple[nn.Module | Answers | None, str]:
    """What runs first, and its name."""
    if pilot is None:
        return None, "contrast"
    if isinstance(pilot, nn.Module):
        return pilot, type(pilot).__name__
    if isinstance(pilot, str | Simplifier):
        return simplify(model, args, kwargs, by=pilot, table=table), simplifier(pilot).text()
    if callable(pilot):
        return pilot, getattr(pilot, "__name__", type(pilot).__name__)
    raise BadInput(
        f"expected a simplifier, a module, a function that gives a map of activity, or None, got {type(pilot).__name__}"
    )


def _refused(reach: Halo, reasons: Sequence[str]) -> str:
    """Why the network is refused, by its own calls where these are known."""
    calls = [str(one) for one in reach.barriers]
    return (
        "the network cannot be run in regions: parts of an image do not determine parts of "
        "its output\n  " + "\n  ".join(calls or reasons) + "\nRun it in full, or condition "
        "it otherwise, such as by 'route'"
    )


@dataclass(frozen=True)
class Ran:
    """How one image was run. selected: the share of its positions in selected tiles; areas: the
    rectangles that were run, size: of the image. macs: multiply-adds with halos; macs_full: of the
    full image. is_full: whether rectangles would have cost more."""

    selected: float
    areas: tuple[Rectangle, ...]
    size: tuple[int, int]
    macs: int
    macs_full: int
    is_full: bool

    @property
    def where(self) -> Tensor:
        """What was run: bool [rows, columns]."""
        covered = torch.zeros(self.size, dtype=torch.bool)
        for top, bottom, left, right in self.areas:
            covered[top:bottom, left:right] = True
        return covered

    @property
    def covered(self) -> float:
        """The share of positions that were run."""
        return float(self.where.double().mean())

    @property
    def work(self) -> float:
        """Multiply-adds over those of the full image."""
        return self.macs / self.macs_full if self.macs_full else 1.0

    def __str__(self) -> str:
        how = "full image" if self.is_full else f"rectangles: {len(self.areas)} with {self.covered:.1%}"
        text = f"{self.selected:.1%} of positions selected; {how}; {self.work:.3f} of the multiply-adds"
        return text.replace("%", " %")


@dataclass(frozen=True)
class Last:
    """How the last call ran: image by image."""

    images: tuple[Ran, ...] = ()

    @property
    def where(self) -> Tensor:
        """What was run: bool [images, rows, columns] of the largest output."""
        return torch.stack([one.where for one in self.images])

    def __str__(self) -> str:
        return "\n".join(f"image {k}: {one}" for k, one in enumerate(self.images))


class InRegions(nn.Module):
    """A network that runs where an image has activity. conditioned: what was decided; last: how the
    last call ran."""

    def __init__(self, condition: Regions, tiled_model: Tiled, pilot: Any, text: str):
        super().__init__()
        self.condition, self.tiled_model, self.pilot = condition, tiled_model, pilot
        self.windows = RegionNetwork.of(tiled_model.ready().flow)
        self.last = Last()
        rows, columns = self.windows.size
        side = condition.tile
        self._cost = fit_cost(self.windows, side)
        self._all = Rectangle(0, rows, 0, columns)
        self._seconds = self.windows.seconds(self._all)
        self._macs = self.windows.macs(self._all)
        why = f"all of its calls can run on parts of {rows} x {columns} positions"
        self.conditioned = Conditioned(
            condition, text, False, (Decision("the network", f"run in tiles of {side} x {side}", why),)
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ran: list[Ran] = []
        with torch.no_grad():
            state: list[Any] = []

            def run(
                module: Tiled, here: Prepared, flat: list[Any], results: list[Any], k: int, n: int
            ) -> tuple[dict[fx.Node, Any], Counter]:
                if not state:
                    state.append(self._begun(here.flow, args, kwargs, flat, results, n))
                ran.append(self._ran(state[0][k]))
                if ran[-1].is_full:
                    return run_image(module, here, flat, results, k, n)
                inputs = constants(module, here.flow) | dict(zip(here.flow.inputs, flat, strict=True))
                outputs = dict(zip(here.flow.outputs, results, strict=True))
                return {}, self.windows.run(ran[-1].areas, inputs, outputs, k)

            try:
                outputs = call_by_image(self.tiled_model, args, kwargs, run)
            except ValueError as error:
                raise _unlike(error) from error
        self.last = Last(tuple(ran))
        return outputs

    def filled(self, *args: Any, **kwargs: Any) -> Any:
        """The output where nothing is run, as the network would return it."""
        flow = self.tiled_model.ready().flow
        with torch.no_grad():
            fills = self._fills(flow, self._answers(args, kwargs), args, kwargs)
            count = next(x.shape[0] for x in _tensors((args, kwargs)))
            shapes = [(count, *fake(node).shape[1:]) for node in flow.outputs]
            expanded = [fill.expand(shape) for fill, shape in zip(fills, shapes, strict=True)]
        return pytree.tree_unflatten(expanded, signature_of(self.tiled_model.graph).out_spec)

    def _begun(self, flow: Flow, args: Any, kwargs: Any, flat: Sequence[Any], results: list[Any], n: int) -> Tensor:
        """Fill all results; which tiles of each image are selected."""
        answers = self._answers(args, kwargs)
        fills = self._fills(flow, answers, args, kwargs)
        for k, (node, fill) in enumerate(zip(flow.outputs, fills, strict=True)):
            first = flow.outputs.index(node)
            results[k] = results[first] if first < k else empty_result(node, flat, n).copy_(fill)
        if answers is None:
            activity = self._activity(args, kwargs)
        elif self.condition.fill == PILOT:
            activity = contrasts(answers)
        else:
            activity = differences(answers, fills)
        if activity.shape[0] != n:
            raise BadInput(f"expected activity of {n} images, got {list(activity.shape)}")
        side, grow = self.condition.tile, self.condition.grow
        return per_tile(activity, self.windows.size, side, grow) > self.condition.threshold

    def _answers(self, args: Any, kwargs: Any) -> list[Tensor] | None:
        return _tensors(self.pilot(*args, **kwargs)) if isinstance(self.pilot, nn.Module) else None

    def _activity(self, args: Any, kwargs: Any) -> Tensor:
        if self.pilot is not None:
            return self.pilot(*args, **kwargs)
        images = [x for x in _tensors((args, kwargs)) if x.ndim == 4]
        return contrast(images[0])

    def _fills(self, flow: Flow, answers: list[Tensor] | None, args: Any, kwargs: Any) -> list[Tensor]:
        """The fill of each output."""
        fill = self.condition.fill
        if fill == PILOT and answers is not None:
            fill_values = answers
        elif isinstance(fill, int | float):
            fill_values = [torch.tensor(float(fill))] * len(flow.outputs)
        else:
            assert callable(fill)
            fill_values = _tensors(fill(*args, **kwargs))
        if len(fill_values) != len(flow.outputs):
            raise BadInput(f"the network returns {len(flow.outputs)} images, but fill gives {len(fill_values)}")
        return fill_values

    def _ran(self, selected: Tensor) -> Ran:
        """How to run an image with these tiles selected."""
        side, size = self.condition.tile, self.windows.size
        areas = rectangles(selected, side, size, self._cost)
        tiles = selected.repeat_interleave(side, 0).repeat_interleave(side, 1)
        selected_share = float(tiles[: size[0], : size[1]].double().mean())
        if sum(map(self.windows.seconds, areas)) >= self._seconds:
            return Ran(selected_share, (self._all,), size, self._macs, self._macs, True)
        macs = sum(map(self.windows.macs, areas))
        return Ran(selected_share, areas, size, macs, self._macs, False)


def _unlike(error: ValueError) -> ValueError:
    """Why these inputs are not for a network in regions, and what to do."""
    if isinstance(error, BadInput):
        return error
    what = str(error).partition("; call ")[0].partition("; give ")[0]
    return BadInput(
        f"{what}. Regions are for images of the example's size, for several at once if the example "
        "has two or more: condition the network with such an example"
    )


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


__all__ = ["InRegions", "Last", "Missed", "Ran", "Regions"]
