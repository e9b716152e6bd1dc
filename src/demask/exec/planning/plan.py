"""Execution plans: which calls run together, how, and with which memory and multiply-adds.

A plan can be printed, stored in a file, and rejected before anything runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from demask.machine.byte_sizes import format_bytes
from demask.pages import InTerminal, Lines, OnPage, Page, PageSource, Span, TextTable, Timeline
from demask.records import Limit, decode, encode

LAYERWISE, BANDS, FRUSTUMS, PARTS, BARRIER = "layer-wise", "bands", "frustums", "parts", "barrier"
MODES = (LAYERWISE, BANDS, FRUSTUMS, PARTS, BARRIER)
Count = Annotated[int, Limit("a count", range(2**62).__contains__)]


@dataclass(frozen=True, slots=True)
class Segment:
    """One step of a `Plan`: calls of the network that run together, and how they run.

    A call is one execution of an ATen op in the captured graph. The values that segments pass to
    each other are stored in full; values inside a segment are not.

    Attributes:
        mode: "layer-wise": each call computes its full output. "bands": some rows at a time over
            the full width; rows that the next band reads again stay in memory. "frustums":
            overlapping tiles that share nothing and compute the overlap again. "parts": tiles of the
            full width, each a network of its own that kernels of `demask.optimize` compute. "barrier":
            calls on values without rows, such as statistics.
        nodes: names of the calls in order of execution; a cheap call may be in several segments.
        keeps: names of the values stored in full: those that later segments read, and outputs.
        spills: names out of `keeps` that are stored on disk; default ().
        over: names of stored values that overwrite another stored value in memory; the key
            overwrites the value; default {}.
        rows: height of a band, part or tile, in rows of the tallest stored value; else 0 (default).
        columns: width of a tile in columns; 0 (default) in the other modes.
        row_steps: number of steps of bands in which one row of the tallest stored value is computed: the rows of
            layers before it, which are taller, do not fit the memory at once; default 1.
        steps: number of bands, parts or tiles of one image; default 1.
        workers: number of threads, each of which computes a strip of the image; default 1.
        bytes: predicted memory of values inside the segment, in bytes; default 0.
        stored: bytes of the stored values in memory while it runs, its own and others; default 0.
        macs: multiply-adds for one image; default 0.
        traffic: bytes of stored values and inputs that are read and written; default 0.
        stripe: rows of the tallest stored value that one task of `stream` computes by itself, with
            the rows around them that it needs; 0 (default): the segment is not cut into tasks.

    Example:
        >>> import torch
        >>> from demask.traverse import plan
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 3, padding=1), torch.nn.ReLU())
        >>> segment = plan(model, (torch.ones(1, 1, 64, 64),), memory="64MiB").segments[0]
        >>> segment.nodes, segment.mode, segment.macs
        (('conv2d', 'relu'), 'layer-wise', 36864)
    """

    mode: Annotated[str, Limit(f"one of {MODES}", MODES.__contains__)]
    nodes: tuple[str, ...]
    keeps: tuple[str, ...]
    spills: tuple[str, ...] = ()
    over: Mapping[str, str] = field(default_factory=dict)
    rows: Count = 0
    columns: Count = 0
    steps: Count = 1
    workers: Count = 1
    bytes: Count = 0
    macs: Count = 0
    traffic: Count = 0
    stripe: Count = 0
    stored: Count = 0
    row_steps: Count = 1


@dataclass(frozen=True, slots=True)
class TilePlan(PageSource):
    """The result of `plan`: how a network is executed within a memory budget.

    It prints as a table; `to_html` and notebooks also show its memory over time.

    `demask.traverse.Plan` is this class. `plan` predicts all numbers, for one image, from the
    graph.

    Attributes:
        segments: tuple of `Segment`, groups of calls that run together, in order of execution.
        budget: bytes that were available, the argument `memory`.
        peak: predicted maximum of used memory in bytes: `live` + `overhead`.
        live: maximum bytes of values, and of copies of weights in the layout of a kernel.
        overhead: estimated bytes of libraries and of oneDNN's kernels.
        macs: multiply-adds, those that run twice counted twice.
        macs_untiled: multiply-adds of the network without tiling.
        recompute: `macs` / `macs_untiled`, a float, 1.0 if nothing is computed twice.
        traffic: bytes of inputs and of stored values that segments read and write.
        sizes: tuple of the shapes of the inputs that are cut into tiles, with N = 1.
        images: whether a call may pass several images, which are computed one after another;
            default False.
        notes: tuple of texts on calls that are not cut into tiles, with the reason; default ().

    Example:
        >>> import torch
        >>> from demask.traverse import Plan, plan
        >>> network = torch.nn.Conv2d(1, 4, 3)
        >>> tiles = plan(network, (torch.zeros(1, 1, 64, 64),), memory="64MiB")
        >>> tiles.peak <= tiles.budget, Plan.from_dict(tiles.to_dict()) == tiles
        (True, True)
    """

    segments: tuple[Segment, ...]
    budget: Count
    peak: Count
    live: Count
    overhead: Count
    macs: Count
    macs_untiled: Count
    traffic: Count
    sizes: tuple[tuple[Count, ...], ...]
    images: bool = False
    notes: tuple[str, ...] = ()

    @property
    def recompute(self) -> float:
        """The plan's multiply-adds divided by those without tiling, 1.0 if none are repeated."""
        return self.macs / self.macs_untiled if self.macs_untiled else 1.0

    def to_dict(self) -> dict[str, Any]:
        """The attributes as a dictionary of JSON types, each segment as a dictionary."""
        return encode(TilePlan, self)

    @classmethod
    def from_dict(cls, data: Any) -> TilePlan:
        """The plan that a dictionary describes.

        It equals the plan whose `to_dict()` returned the dictionary, also after a round trip
        through JSON.

        Args:
            data: dictionary from `to_dict`.

        Raises:
            BadInput: an entry is missing, or has another type or value than `to_dict` writes.
        """
        return decode(TilePlan, data, "the plan of the network is damaged")

    def page(self) -> Page:
        """What `print`, `to_html` and notebooks show, as sections."""
        head = (
            f"{len(self.segments)} segments; peak {format_bytes(self.peak)} of "
            f"{format_bytes(self.budget)} (live {format_bytes(self.live)}, "
            f"process {format_bytes(self.overhead)}); "
            f"{self.macs:.4g} MACs ({self.recompute:.4f} x untiled); "
            f"traffic {format_bytes(self.traffic)}"
        )
        heads = ("", "mode", "tile", "steps", "calls", "keeps", "memory", "MACs", "traffic")
        rows = [_row(k, segment) for k, segment in enumerate(self.segments)]
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in (heads, *rows)
        ]
        segments = TextTable(("segment", *heads[1:]), rows, "Segments", left=(0, 1, 2, 4, 5))
        return Page(
            "demask: plan of tiles",
            (
                InTerminal([Lines([head, *lines])]),
                OnPage([self._timeline(), segments]),
                Lines(self.notes, "Notes", is_close=True),
            ),
            head,
        )

    def _timeline(self) -> Timeline:
        spans = [
            Span(_span(s.nodes), s.macs + 1, s.stored + s.bytes, f"{s.mode}, {s.macs:.3g} MACs") for s in self.segments
        ]
        limits = {"budget": self.budget} if self.budget <= CLOSE * self.peak else {}
        return Timeline(spans, "multiply-adds, segment after segment", "Values in memory", limits)


CLOSE = 3  # a budget of at most so many times the peak is drawn with it


def _row(k: int, segment: Segment) -> tuple[str, ...]:
    tile = {
        BANDS: f"{segment.rows} rows",
        PARTS: f"{segment.rows} rows",
        FRUSTUMS: f"{segment.rows} x {segment.columns}",
    }
    stored = ", ".join(f"{name} on disk" if name in segment.spills else name for name in segment.keeps)
    if segment.row_steps > 1:
        tile[BANDS] = f"{segment.rows} / {segment.row_steps} of a row"
    if segment.workers > 1:
        tile[BANDS] += f" x {segment.workers} strips"
    if segment.stripe:
        tile[segment.mode] += f" in tasks of {segment.stripe}"
    return (
        str(k),
        segment.mode,
        tile.get(segment.mode, "whole"),
        str(segment.steps),
        _span(segment.nodes),
        stored,
        format_bytes(segment.bytes),
        f"{segment.macs:.3g}",
        format_bytes(segment.traffic),
    )


def _span(nodes: tuple[str, ...]) -> str:
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} … {nodes[-1]} ({len(nodes)})"
