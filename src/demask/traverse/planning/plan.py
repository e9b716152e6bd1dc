"""Execution plans: which calls run together, how, and with which memory and multiply-adds.

A plan can be printed, stored in a file, and rejected before anything runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from demask.errors import BadInput
from demask.machine.byte_sizes import format_bytes

LAYERWISE, BANDS, FRUSTUMS, BARRIER = "layer-wise", "bands", "frustums", "barrier"
MODES = (LAYERWISE, BANDS, FRUSTUMS, BARRIER)


@dataclass(frozen=True, slots=True)
class Segment:
    """One step of a `Plan`: some calls of the network that run together, and how.

    Attributes:
        mode: "layer-wise" (call by call, whole values), "bands" (some rows at a time, over the full
            width; lines that the next band reads again stay in buffers), "frustums" (tiles that
            overlap and share nothing) or "barrier" (calls on statistics, without rows).
        nodes: names of the calls, in order; some may run a second time.
        keeps: names of values that later segments read.
        spills: those of them that are on disk.
        over: maps that overwrite another one: target name to the name of the overwritten map.
        rows, columns: size of a band or tile in positions; 0 where it does not apply.
        steps: number of bands or tiles.
        workers: threads, one per strip of bands.
        bytes: memory of the segment, without maps of other segments.
        macs: multiply-adds.
        traffic: bytes read and written.

    Example:
        >>> import torch
        >>> from demask.traverse import plan
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 3, padding=1), torch.nn.ReLU())
        >>> segment = plan(model, (torch.ones(1, 1, 64, 64),), memory="64MiB").segments[0]
        >>> len(segment.nodes), segment.macs
        (2, 36864)
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
    """The result of `plan`: how a network is executed within a memory budget; prints as a table.

    The class is `demask.traverse.Plan`.

    Attributes:
        segments: the steps, a `Segment` each.
        budget: bytes available.
        peak: predicted maximum in bytes: `live` and `overhead` together.
        live: bytes of values and weights.
        overhead: bytes of the process.
        macs: multiply-adds, those computed twice included.
        macs_untiled: multiply-adds of the network without tiling.
        recompute: their ratio, 1.0 where nothing is computed twice.
        traffic: bytes that segments read and write.
        sizes: shapes of the inputs, one image each.
        images: whether a call may pass several images, which run one after another; default False.
        notes: calls that run whole, with reasons.

    Example:
        >>> import torch
        >>> from demask.traverse import Plan, plan
        >>> network = torch.nn.Conv2d(1, 4, 3)
        >>> tiles = plan(network, (torch.zeros(1, 1, 64, 64),), memory="64MiB")
        >>> tiles.peak <= tiles.budget, Plan.from_dict(tiles.to_dict()) == tiles
        (True, True)
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
        """Ratio of the plan's multiply-adds to those of the network without tiling."""
        return self.macs / self.macs_untiled if self.macs_untiled else 1.0

    def to_dict(self) -> dict[str, Any]:
        """The plan as a dictionary of JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> TilePlan:
        """The plan of a dictionary from `to_dict()`.

        Raises:
            BadInput: if a field is missing or of another type.
        """
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
        head = (f"{len(self.segments)} segments; peak {format_bytes(self.peak)} of "
                f"{format_bytes(self.budget)} (live {format_bytes(self.live)}, "
                f"process {format_bytes(self.overhead)}); "
                f"{self.macs:.4g} MACs ({self.recompute:.4f} x untiled); "
                f"traffic {format_bytes(self.traffic)}")  # fmt: skip
        rows = [("", "mode", "tile", "steps", "calls", "keeps", "memory", "MACs", "traffic")]
        rows += [_row(k, segment) for k, segment in enumerate(self.segments)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip()
                 for row in rows]  # fmt: skip
        return "\n".join([head, *lines, *self.notes])


_NUMBERS = ("budget", "peak", "live", "overhead", "macs", "macs_untiled", "traffic")


def _row(k: int, segment: Segment) -> tuple[str, ...]:
    tile = {BANDS: f"{segment.rows} rows", FRUSTUMS: f"{segment.rows} x {segment.columns}"}
    stored = ", ".join(
        f"{name} on disk" if name in segment.spills else name for name in segment.keeps
    )
    if segment.workers > 1:
        tile[BANDS] += f" x {segment.workers} strips"
    return (str(k), segment.mode, tile.get(segment.mode, "whole"), str(segment.steps),
            _span(segment.nodes), stored, format_bytes(segment.bytes), f"{segment.macs:.3g}",
            format_bytes(segment.traffic))  # fmt: skip


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
    fields: dict[str, Any] = {**names, **numbers}
    return Segment(mode, over=over, **fields)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"expected a count, got {value!r:.40}")
    return value


def _word(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"expected a word, got {value!r:.40}")
    return value
