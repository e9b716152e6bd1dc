"""One pass of a network over N inputs, as a list of levels.

A level is one fully connected layer, which runs for all N inputs at once so that its weights are
read once, or the calls between such layers, which run for `at_once` inputs at a time. Values that
later levels read are stored for all N inputs. `demask.traverse.batching.levels` computes the plan.

`Traffic` is the bytes of weights that are read for a number of inputs, counted or predicted.
Weights are the matrices and kernels that a call multiplies with. Biases, parameters of norms and
rows of embeddings are left out: together they are a thousandth of the traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx.node import map_aggregate

from demask.files.weight_file import StoredTensor
from demask.traverse.batching.batch_axis import BatchAxis


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
        >>> from demask.traverse.batching.batch_plan import LayerTraffic, Traffic
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
        sides = "<<>>>>"  # words aligned left, numbers right
        columns = list(zip(sides, widths, strict=True))
        shown = ["  ".join(f"{w:{s}{n}}" for w, (s, n) in zip(line, columns, strict=True)).rstrip() for line in lines]
        return "\n".join([shown[0], rule, *shown[1:-2], rule, *shown[-2:]])


def _cells(traffic: Traffic) -> tuple[str, str, str, str]:
    sizes = (traffic.weight_bytes, traffic.unbatched, traffic.weight_bytes_read)
    first, second, third = (f"{size / 1e6:,.3f}" for size in sizes)
    return first, second, third, f"{100 * traffic.saved:.1f} %"


@dataclass(frozen=True, slots=True)
class BatchRef:
    """A value by its name, in the arguments of a call."""

    name: str


@dataclass(frozen=True, slots=True)
class LayerWeight:
    """The constant that a call multiplies with. connected: used for all inputs at once."""

    constant: str
    nbytes: int
    connected: bool


@dataclass(frozen=True, slots=True)
class BatchCall:
    """A call of a level; frees: values of the level that nothing reads after it."""

    name: str
    target: Any
    args: Any
    kwargs: Any
    weight: LayerWeight | None = None
    frees: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StreamedLayer:
    """A fully connected layer whose weight stays in a file.

    x, bias: names of its operands. out_first: whether the weight is [out, in]; then blocks are
    outputs, else they are inputs, and partial products are summed. rows: of a block.
    """

    name: str
    x: str
    bias: str | None
    stored: StoredTensor
    out_first: bool
    rows: int = 0

    @property
    def outputs(self) -> int:
        """The number of output features."""
        return self.stored.shape[0 if self.out_first else 1]

    @property
    def sums_wide(self) -> bool:
        """Whether partial products are summed in float32, as for dtypes of less than 4 bytes."""
        return not self.out_first and self.stored.dtype.itemsize < 4


@dataclass(frozen=True, slots=True)
class Level:
    """A level of a pass.

    connected: whether it runs for all inputs at once. reads, writes: values that are stored for all
    inputs. drops: values that no later level reads. streamed: a layer whose weight is in a file;
    then there are no calls.
    """

    connected: bool
    calls: tuple[BatchCall, ...] = ()
    streamed: StreamedLayer | None = None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The levels of a pass, in order.

    batch_axes: of stored values, by name. sizes: values of integer nodes for 1, 2, ... inputs.
    inputs: per pass, N. at_once: inputs at a time between fully connected layers. peak: predicted
    maximum bytes; least: with the smallest blocks. resident: bytes of constants in memory, if
    others are in a file. input_names, outputs, out_spec: of the network.
    """

    levels: tuple[Level, ...]
    batch_axes: Mapping[str, BatchAxis]
    sizes: Mapping[str, tuple[int, ...]]
    inputs: int
    at_once: int
    peak: int
    least: int
    resident: int
    input_names: tuple[str, ...]
    outputs: tuple[Any, ...]
    out_spec: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchPlan:
        return self

    def traffic(self, batch: int) -> Traffic:
        """Predicted bytes of weights that a call with `batch` inputs reads."""
        passes = [min(self.inputs, batch - start) for start in range(0, batch, self.inputs)]
        steps = sum(-(-n // self.at_once) for n in passes)
        layers = [
            LayerTraffic(name, w.constant, w.connected, w.nbytes, w.nbytes * (len(passes) if w.connected else steps))
            for name, w in weights_of(self.levels)
        ]
        return Traffic(batch, tuple(layers))


def weights_of(levels: Sequence[Level]) -> Iterator[tuple[str, LayerWeight]]:
    """The calls that multiply with weights, in order."""
    for level in levels:
        if level.streamed is not None:
            stored = level.streamed.stored
            yield level.streamed.name, LayerWeight(stored.name, stored.nbytes, True)
        for call in level.calls:
            if call.weight is not None:
                yield call.name, call.weight


def constants_of(plan: BatchPlan) -> set[str]:
    """The names of the constants that a plan reads from memory."""
    return constants_read(plan.levels) | {r.name[1:] for r in plan.outputs if _is_constant(r)}


def constants_read(levels: Sequence[Level]) -> set[str]:
    """The names of the constants that levels read from memory."""
    names: set[str] = set()

    def visit(leaf: Any) -> Any:
        if _is_constant(leaf):
            names.add(leaf.name[1:])
        return leaf

    for level in levels:
        if level.streamed is not None and level.streamed.bias is not None:
            names.add(level.streamed.bias)
        for call in level.calls:
            map_aggregate((call.args, call.kwargs), visit)
    return names


def _is_constant(leaf: Any) -> bool:
    return isinstance(leaf, BatchRef) and leaf.name.startswith("=")
