"""Bytes of weights that are read for a number of inputs: counted or predicted, and as a table.

Weights are the matrices and kernels that a call multiplies with. Biases, parameters of norms and
rows of embeddings are left out: together they are a thousandth of the traffic.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerTraffic:
    """The bytes of weights read by one call that multiplies with constant weights.

    Attributes:
        name: name of the call.
        weight: name of the weight among the model's constants.
        connected: whether the call is a fully connected layer, which runs for many inputs at a
            time.
        weight_bytes: size of the weight in bytes.
        read: bytes of the weight read, for all inputs.
    """

    name: str
    weight: str
    connected: bool
    weight_bytes: int
    read: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of weights that a network reads for a number of inputs; prints as a table.

    The saving is computed as in US 10,417,555 B2: a layer of 16M weights of 2 bytes reads 32 MB for
    sixteen images at once and 512 MB for sixteen images one by one. (The patent prints 256 MB,
    which is one byte per weight.) If 90 % of all weights are in such layers, 15/16 * 0.9 = 84 % of
    the bytes are saved.

    Attributes:
        inputs: number of inputs.
        layers: tuple of `LayerTraffic`, one entry per call with weights, in order of execution.
        weight_bytes: bytes of all weights.
        weight_bytes_read: bytes of weights read for all inputs.
        unbatched: bytes of weights read if each input is computed alone.
        saved: 1 - weight_bytes_read / unbatched, from 0 to 1.
        connected: the `Traffic` of fully connected layers only.

    Example:
        >>> from demask.traverse.batching.weight_traffic import LayerTraffic, Traffic
        >>> M = 2**20
        >>> conv = LayerTraffic("conv", "conv.weight", False, 10 * M, 16 * 10 * M)
        >>> fc = LayerTraffic("fc", "fc.weight", True, 90 * M, 90 * M)
        >>> both = Traffic(16, (conv, fc))
        >>> both.weight_bytes // M, both.weight_bytes_read // M, both.unbatched // M
        (100, 250, 1600)
        >>> round(both.saved, 3), 15 / 16 * 0.9
        (0.844, 0.84375)
    """

    inputs: int
    layers: tuple[LayerTraffic, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; those that several layers share count once."""
        return sum({layer.weight: layer.weight_bytes for layer in self.layers}.values())

    @property
    def weight_bytes_read(self) -> int:
        """Bytes that were read."""
        return sum(layer.read for layer in self.layers)

    @property
    def unbatched(self) -> int:
        """Bytes to read if every call read its weights for each input separately."""
        return self.inputs * sum(layer.weight_bytes for layer in self.layers)

    @property
    def saved(self) -> float:
        """The share of the unbatched bytes that was not read."""
        return 1 - self.weight_bytes_read / self.unbatched if self.unbatched else 0.0

    @property
    def connected(self) -> Traffic:
        """The traffic of the fully connected layers only."""
        return Traffic(self.inputs, tuple(layer for layer in self.layers if layer.connected))

    def __str__(self) -> str:
        """A table: a row per layer, the sum of the fully connected ones, and of all."""
        lines = [("layer", "kind", "weights, MB", "one by one, MB", "read, MB", "saved")]
        for layer in self.layers:
            kind = "connected" if layer.connected else ""
            lines.append((layer.name, kind, *_cells(Traffic(self.inputs, (layer,)))))
        count = f"{self.inputs} input{'s' if self.inputs != 1 else ''}"
        lines.append(("fully connected", "", *_cells(self.connected)))
        lines.append((f"all, {count}", "", *_cells(self)))
        widths = [max(len(line[k]) for line in lines) for k in range(6)]
        rule = "  ".join("-" * width for width in widths)
        shown = ["  ".join(_aligned(line, widths)).rstrip() for line in lines]
        return "\n".join([shown[0], rule, *shown[1:-2], rule, *shown[-2:]])


def _cells(traffic: Traffic) -> tuple[str, str, str, str]:
    sizes = (traffic.weight_bytes, traffic.unbatched, traffic.weight_bytes_read)
    first, second, third = (f"{size / 1e6:,.3f}" for size in sizes)
    return first, second, third, f"{100 * traffic.saved:.1f} %"


def _aligned(line: tuple[str, ...], widths: list[int]) -> list[str]:
    """Words aligned left, numbers right."""
    pairs = enumerate(zip(line, widths, strict=True))
    return [word.ljust(width) if k < 2 else word.rjust(width) for k, (word, width) in pairs]
