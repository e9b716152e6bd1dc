"""One pass of a network over N inputs, as a list of levels.

A level is one fully connected layer, which runs for all N inputs at once so that its weights are
read once, or the calls between such layers, which run for `at_once` inputs at a time. Values that
outlive a level are held for all N inputs (`demask.traverse.batching.levels` makes the plan).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx.node import map_aggregate

from demask.files.weight_file import StoredTensor
from demask.traverse.batching.batch_axis import Lane
from demask.traverse.batching.weight_traffic import LayerTraffic, Traffic


@dataclass(frozen=True, slots=True)
class BatchRef:
    """A value by its name, in the arguments of a call."""

    name: str


@dataclass(frozen=True, slots=True)
class LayerWeight:
    """The constant a call multiplies with: its name, its bytes, whether for all inputs at once."""

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

    x, bias: names of its operands. out_first: is the weight [out, in]? Then blocks are outputs;
    else they are inputs, and partial products are summed. rows: of a block.
    """

    name: str
    x: str
    bias: str | None
    stored: StoredTensor
    out_first: bool
    rows: int = 0

    @property
    def outputs(self) -> int:
        return self.stored.shape[0 if self.out_first else 1]

    @property
    def sums_wide(self) -> bool:
        """Partial products of narrow types are summed in float32."""
        return not self.out_first and self.stored.dtype.itemsize < 4


@dataclass(frozen=True, slots=True)
class Level:
    """connected: for all inputs at once. writes: values held after it; drops: held ones that are
    read no more. streamed: the layer, where its weight is in a file (then there are no calls)."""

    connected: bool
    calls: tuple[BatchCall, ...] = ()
    streamed: StreamedLayer | None = None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Levels in order, and what is known of them.

    lanes: of held values, by name. sizes: of numbers, for 1, 2, ... inputs. inputs: at a time, N.
    at_once: of those between fully connected layers. peak: bytes at most, predicted; least: what
    the smallest blocks would take. resident: those of constants in memory, where others are in a
    file. given, made: the network's inputs and outputs, and how those are
    packed.
    """

    levels: tuple[Level, ...]
    lanes: Mapping[str, Lane]
    sizes: Mapping[str, tuple[int, ...]]
    inputs: int
    at_once: int
    peak: int
    least: int
    resident: int
    given: tuple[str, ...]
    made: tuple[Any, ...]
    out_spec: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchPlan:
        return self

    def traffic(self, batch: int) -> Traffic:
        """Bytes of weights that a call with `batch` inputs reads."""
        passes = [min(self.inputs, batch - start) for start in range(0, batch, self.inputs)]
        steps = sum(-(-n // self.at_once) for n in passes)
        found = [
            LayerTraffic(name, w.constant, w.connected, w.nbytes,
                         w.nbytes * (len(passes) if w.connected else steps))
            for name, w in weights_of(self.levels)
        ]  # fmt: skip
        return Traffic(batch, tuple(found))


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
    return constants_read(plan.levels) | {r.name[1:] for r in plan.made if _is_constant(r)}


def constants_read(levels: Sequence[Level]) -> set[str]:
    found: set[str] = set()

    def visit(leaf: Any) -> Any:
        if _is_constant(leaf):
            found.add(leaf.name[1:])
        return leaf

    for level in levels:
        if level.streamed is not None and level.streamed.bias is not None:
            found.add(level.streamed.bias)
        for call in level.calls:
            map_aggregate((call.args, call.kwargs), visit)
    return found


def _is_constant(leaf: Any) -> bool:
    return isinstance(leaf, BatchRef) and leaf.name.startswith("=")
