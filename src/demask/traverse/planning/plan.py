"""A plan as a value: which calls run together, how, and what that takes. It can be printed, kept in
a file, refused before anything runs, and held to its prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from demask.errors import BadInput
from demask.machine.byte_sizes import human

LAYERWISE, BANDS, FRUSTUMS, BARRIER = "layer-wise", "bands", "frustums", "barrier"
MODES = (LAYERWISE, BANDS, FRUSTUMS, BARRIER)


@dataclass(frozen=True, slots=True)
class Segment:
    """Calls that run together.

    mode: "layer-wise" (call by call, whole values), "bands" (`rows` rows of the tallest value made
    per step, over the full width, with rolling line buffers), "frustums" (tiles of `rows` x
    `columns` that overlap and share nothing), "barrier" (what is made of statistics: no rows).
    nodes: the calls, in order; some may have run in an earlier segment and run again. keeps: values
    that are read later. spills: those of them on disk. over: maps written over a map read here.
    bytes: of the segment's own memory, without the maps that live beside it. traffic: bytes that
    enter and leave the segment. steps: bands or tiles. workers: walk strips of bands side by side.
    """

    mode: str
    nodes: tuple[str, ...]
    keeps: tuple[str, ...]
    spills: tuple[str, ...] = ()
    over: Mapping[str, str] = field(default_factory=dict)
    rows: int = 0
    columns: int = 0
    steps: int = 1
    workers: int = 1
    bytes: int = 0
    macs: int = 0
    traffic: int = 0


@dataclass(frozen=True, slots=True)
class TilePlan:
    """How a network is executed within a budget.

    budget, peak: bytes asked for, and predicted at most: everything live at once, and what the
    process takes beside (`overhead`). macs: multiply-adds, those computed twice included;
    macs_untiled: of the network as given. traffic: bytes that segments read and write.
    sizes: of the inputs the plan is for, one image each; images: may a call bring several, which
    are independent of each other?
    """

    segments: tuple[Segment, ...]
    budget: int
    peak: int
    live: int
    overhead: int
    macs: int
    macs_untiled: int
    traffic: int
    sizes: tuple[tuple[int, ...], ...]
    images: bool = False
    notes: tuple[str, ...] = ()

    @property
    def recompute(self) -> float:
        """Multiply-adds over those of the network as given."""
        return self.macs / self.macs_untiled if self.macs_untiled else 1.0

    def to_dict(self) -> dict[str, Any]:
        """The plan in JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> TilePlan:
        """The plan that to_dict() gave. BadInput: damaged."""
        try:
            segments = tuple(_segment(row) for row in data["segments"])
            numbers = {key: _number(data[key]) for key in _NUMBERS}
            sizes = tuple(tuple(map(_number, row)) for row in data["sizes"])
            images = data["images"] is True
            return cls(
                segments,
                sizes=sizes,
                images=images,
                notes=tuple(map(_word, data["notes"])),
                **numbers,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(f"the plan of the network is damaged: {error!r}") from error

    def __str__(self) -> str:
        head = (f"{len(self.segments)} segments; peak {human(self.peak)} of {human(self.budget)} "
                f"(live {human(self.live)}, process {human(self.overhead)}); "
                f"{self.macs:.4g} MACs ({self.recompute:.4f} x untiled); "
                f"traffic {human(self.traffic)}")  # fmt: skip
        rows = [("", "mode", "tile", "steps", "calls", "keeps", "memory", "MACs", "traffic")]
        rows += [_row(k, segment) for k, segment in enumerate(self.segments)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip()
                 for row in rows]  # fmt: skip
        return "\n".join([head, *lines, *self.notes])


_NUMBERS = ("budget", "peak", "live", "overhead", "macs", "macs_untiled", "traffic")


def _row(k: int, segment: Segment) -> tuple[str, ...]:
    tile = {BANDS: f"{segment.rows} rows", FRUSTUMS: f"{segment.rows} x {segment.columns}"}
    kept = ", ".join(
        f"{name} on disk" if name in segment.spills else name for name in segment.keeps
    )
    if segment.workers > 1:
        tile[BANDS] += f" x {segment.workers} strips"
    return (str(k), segment.mode, tile.get(segment.mode, "whole"), str(segment.steps),
            _span(segment.nodes), kept, human(segment.bytes), f"{segment.macs:.3g}",
            human(segment.traffic))  # fmt: skip


def _span(nodes: tuple[str, ...]) -> str:
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} … {nodes[-1]} ({len(nodes)})"


def _segment(row: Any) -> Segment:
    mode = _word(row["mode"])
    if mode not in MODES:
        raise ValueError(f"mode {mode!r}")
    names = {key: tuple(map(_word, row[key])) for key in ("nodes", "keeps", "spills")}
    numbers = {
        key: _number(row[key])
        for key in ("rows", "columns", "steps", "workers", "bytes", "macs", "traffic")
    }
    over = {_word(a): _word(b) for a, b in row["over"].items()}
    found: dict[str, Any] = {**names, **numbers}
    return Segment(mode, over=over, **found)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"expected a count, got {value!r:.40}")
    return value


def _word(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"expected a word, got {value!r:.40}")
    return value
