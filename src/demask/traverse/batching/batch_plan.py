"""One pass of a network over N inputs, as a list of levels.

A level is one fully connected layer, which runs for all N inputs at once so that its weights are
read once, or the calls between such layers, which run for `at_once` inputs at a time. Values that
later levels read are stored for all N inputs. `demask.traverse.batching.levels` computes the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx.node import map_aggregate

from demask.files.weight_file import StoredTensor
from demask.traverse.batching.batch_axis import BatchAxis
from demask.traverse.batching.weight_traffic import LayerTraffic, Traffic


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
