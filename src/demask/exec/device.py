"""A device that plans are for: its memories, what they cost, and its units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Literal

from torch import Tensor

from demask.errors import BadInput
from demask.machine.byte_sizes import parse_memory
from demask.machine.cost import TWO_CORES, Roofline
from demask.numerics import is_integer, is_number

WEIGHTS = ("dense", "compressed", "outside")
UNITS = 256  # at most


@dataclass(frozen=True, slots=True)
class Memory:
    """A memory of a `Device`.

    Args:
        size: bytes, an int of at least 1 or a text such as "32KiB"; default None, as many as it takes.
        rate: bytes read or written per second; default 40e9.
        picojoules: energy per byte; default 160, of DRAM. A memory of 1 MB takes 12.5, one of 8 KB 1.25 (Horowitz
            2014, "Computing's energy problem", ISSCC).

    Raises:
        BadInput: another size, a rate that is not above 0, a negative energy.

    Example:
        >>> from demask.traverse import Memory
        >>> Memory("32KiB", rate=80e9, picojoules=1.25).bytes
        32768
    """

    size: str | int | None = None
    rate: float = TWO_CORES.far
    picojoules: float = 160.0

    def __post_init__(self) -> None:
        if self.size is not None:
            parse_memory(self.size)  # raises BadInput
        if not is_number(self.rate) or not self.rate > 0:
            raise BadInput(f"expected bytes per second above 0 as rate, got {self.rate!r:.40}")
        if not is_number(self.picojoules) or not (isfinite(self.picojoules) and self.picojoules >= 0):
            raise BadInput(f"expected picojoules of at least 0, got {self.picojoules!r:.40}")

    @property
    def bytes(self) -> float:
        """Its bytes; infinite without a size."""
        return inf if self.size is None else parse_memory(self.size)


# Of a unit, of other units, outside.
DEFAULTS = (Memory(rate=TWO_CORES.near, picojoules=1.25), Memory(picojoules=12.5), Memory())


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator, or a cache, for `plan`, `spread`, `batch`, `traffic` and `stride.instructions`: this process is
    not counted in its memory.

    A plan for it has in the memory of a unit the rows that are live and the weights of the calls that run. Inputs,
    results, and stored values that do not fit are outside.

    Args:
        memory: of a unit: bytes, an int of at least 1 or a text such as "32KiB", or a `Memory`. Or up to three of
            these, the innermost first: of a unit, of other units, outside; default for others: a `Memory` without
            limit, of 80e9, 40e9 and 40e9 bytes per second and 1.25, 12.5 and 160 picojoules per byte. Default: None,
            all without limit, for `spread`.
        weights: how the weights of a segment are in the memory: "dense" (default), as they are; "compressed", the
            nonzeros and a bit for each element, where that is less; "outside", not at all, as those that are streamed.
        units: number of units that compute side by side, 1 to 256; default 1. `spread` says what they exchange; the
            others plan for one unit.
        macs: multiply-adds per second of a unit; default 90e9.
        call: seconds that each step of a call takes beyond that; default 120e-6.

    Raises:
        BadInput: another memory, word or number.

    Example:
        >>> import torch
        >>> from demask.traverse import Device, plan
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Conv2d(4, 4, 3, padding=1))
        >>> tiles = plan(net, (torch.zeros(1, 3, 64, 64),), device=Device("32KiB"))
        >>> tiles.peak <= 32 * 1024, tiles.segments[0].mode
        (True, 'bands')
    """

    memory: str | int | Memory | Sequence[str | int | Memory | None] | None = None
    weights: Literal["dense", "compressed", "outside"] = "dense"
    units: int = 1
    macs: float = TWO_CORES.macs
    call: float = TWO_CORES.call

    def __post_init__(self) -> None:
        if isinstance(self.memory, list | tuple) and not 1 <= len(self.memory) <= len(DEFAULTS):
            raise BadInput(f"expected 1 to {len(DEFAULTS)} memories, the innermost first, got {len(self.memory)}")
        _ = self.memories  # raises BadInput
        if self.weights not in WEIGHTS:
            raise BadInput(f"expected weights of {WEIGHTS}, got {self.weights!r:.40}")
        if not is_integer(self.units) or not 1 <= self.units <= UNITS:
            raise BadInput(f"expected 1 to {UNITS} units, got {self.units!r:.40}")
        if not is_number(self.macs) or not self.macs > 0:
            raise BadInput(f"expected multiply-adds per second above 0 as macs, got {self.macs!r:.40}")
        if not is_number(self.call) or not self.call >= 0:
            raise BadInput(f"expected seconds of at least 0 as call, got {self.call!r:.40}")

    @property
    def memories(self) -> tuple[Memory, Memory, Memory]:
        """The memory of a unit, that of other units, and outside."""
        stated = self.memory if isinstance(self.memory, list | tuple) else (self.memory,)
        pairs = zip(stated, DEFAULTS[: len(stated)], strict=True)
        inner = [one if isinstance(one, Memory) else replace(default, size=one) for one, default in pairs]
        own, others, outside = (*inner, *DEFAULTS[len(inner) :])
        return own, others, outside

    @property
    def bytes(self) -> int:
        """Bytes of the memory of a unit. Raises BadInput where it has no limit, or there are several units."""
        size, units = self.memories[0].size, self.units
        if size is None:
            raise BadInput(
                "expected a device with the size of its memory, such as Device('64KiB'), got one without limit"
            )
        if units != 1:
            raise BadInput(f"plans are for one unit, got {units}: demask.traverse.spread says what several exchange")
        return parse_memory(size)

    @property
    def rates(self) -> Roofline:
        """What plans are ranked by."""
        own, _, outside = self.memories
        return Roofline(self.macs, outside.rate, self.call, near=own.rate, disk=outside.rate, cache=inf)

    def weight_bytes(self, weights: Iterable[Tensor]) -> int:
        """Bytes that weights take in the memory."""
        if self.weights == "outside":
            return 0
        return sum(map(_compressed_bytes if self.weights == "compressed" else _dense_bytes, weights))


def _dense_bytes(weight: Tensor) -> int:
    return weight.numel() * weight.element_size()


def _compressed_bytes(weight: Tensor) -> int:
    """Of the nonzeros and a bit for each element, in words of 32 bits, or of all elements."""
    nonzeros = int(weight.count_nonzero()) * weight.element_size()
    return min(_dense_bytes(weight), nonzeros + -(-weight.numel() // 32) * 4)
