"""A memory that plans are for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from demask.errors import BadInput
from demask.machine.byte_sizes import parse_memory

WEIGHTS = ("dense", "compressed", "outside")


@dataclass(frozen=True, slots=True)
class Device:
    """The memory of an accelerator, or a cache, for `plan`: the process is not counted in it.

    A plan for it has in that memory the rows that are live and the weights of the calls that run. Inputs, results,
    and stored values that do not fit are outside.

    Args:
        memory: bytes, an int of at least 1 or a text such as "32KiB".
        weights: how the weights of a segment are in the memory: "dense" (default), as they are; "compressed", the
            nonzeros and a bit for each element, where that is less; "outside", not at all, as those that are streamed.

    Raises:
        BadInput: another memory or word.

    Example:
        >>> import torch
        >>> from demask.traverse import Device, plan
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Conv2d(4, 4, 3, padding=1))
        >>> tiles = plan(net, (torch.zeros(1, 3, 64, 64),), device=Device("32KiB"))
        >>> tiles.peak <= 32 * 1024, tiles.segments[0].mode
        (True, 'bands')
    """

    memory: str | int
    weights: Literal["dense", "compressed", "outside"] = "dense"

    def __post_init__(self) -> None:
        parse_memory(self.memory)  # raises BadInput
        if self.weights not in WEIGHTS:
            raise BadInput(f"expected weights of {WEIGHTS}, got {self.weights!r:.40}")

    @property
    def bytes(self) -> int:
        """Bytes of the memory."""
        return parse_memory(self.memory)

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
