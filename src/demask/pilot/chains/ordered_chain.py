"""The best answer within a time limit: hidden units are computed in order of importance.

A pilot of few bits runs a chain linear, ReLU, linear, … first. Each hidden unit then has a
priority, the most it can add to the next layer:

    priority(u) = |pilot's activation of u| · ‖next layer's weights for u‖

Units are computed in full precision in that order, block by block, until the time or the bytes of
weights are spent; the others keep the pilot's value. With nothing computed the answer is the
pilot's own. Each layer gets a share of what is left after the pilot in proportion to its weights.
The last layer, where it is small, is always run in full.

Several inputs at a time share one order: the priority of a unit is its largest over the inputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demask.errors import BadInput
from demask.kernels.llvm import availability as llvm
from demask.kernels.llvm.availability import NoPlan
from demask.kernels.memory_probe import MemoryProbe
from demask.kernels.plan_cache import ChangeCounter
from demask.pilot.chains.chain_op import ROWS
from demask.pilot.chains.ordered_plan import ChosenUnits, Estimated, packed, unfit
from demask.pilot.simplifiers.rounding import Bits, quantized

DEFAULT = Bits(4, 64)
BLOCK_BYTES = 2**20  # of weights between two looks at the clock
PIECE = 512  # units that are sorted at once, at least
SMALL = 16  # a last layer of less than this part of the weights is always run in full


class Done(NamedTuple):
    """What a call did.

    seconds: of the whole call; pilot: of the pilot. units: how many were computed in full
    precision, per layer; of: how many each layer has. bytes: of weights that were read, the pilot's
    included.
    """

    seconds: float
    pilot: float
    units: tuple[int, ...]
    of: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Limit:
    """When a chain stops: after seconds from its start, after bytes of weights, or both."""

    seconds: float = math.inf
    bytes: float = math.inf


class OrderedLayer:
    """A linear layer with its pilot: weight (o, i) and bias (o,), float32 on the CPU.

    Up to 4 inputs are run one by one by kernels (`ordered_plan`), which read the pilot's packed 8
    or 4 bits, and chosen rows in place. More inputs, other bits (`ordered_plan.unfit`) and weights
    with NaN or infinities are run by torch, with the pilot's weights unpacked to float32. The
    kernels' estimates differ from torch's by the rounding of the input to 16 bits, some 1e-5 of its
    range.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, bits: Bits):
        self.weight = weight.detach().contiguous()
        self.bias = None if bias is None else bias.detach().contiguous()
        tensors = [self.weight] if self.bias is None else [self.weight, self.bias]
        self.bits, self.finite = bits, all(bool(t.isfinite().all()) for t in tensors)
        self._compiled = self.finite and self.weight.numel() > 0 and llvm.is_installed()
        self.pilot_bytes = bits.weight_bytes(self.weight, len(self.weight)) + self._bias_bytes
        self.columns_norm = torch.linalg.vector_norm(self.weight, dim=0)
        fits = self._compiled and not unfit(bits, self.weight.shape[1])
        self._packed = packed(self.weight, self.bias, bits) if fits else None
        self._plans: dict[int, tuple[Estimated | None, ChosenUnits]] = {}
        if self._compiled:
            self._plan()

    @property
    def _bias_bytes(self) -> int:
        return 0 if self.bias is None else 4 * len(self.bias)

    @property
    def row_bytes(self) -> int:
        return 4 * self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.row_bytes * len(self.weight)

    @functools.cached_property
    def low(self) -> Tensor:
        """The pilot's weights (o, i), unpacked."""
        return quantized(self.weight, self.bits.bits, self.bits.group)

    def pilot(self, x: Tensor) -> Tensor:
        """(n, i) → (n, o) with weights of few bits."""
        if self._few(x) and (plan := self._plan()[0]) is not None:
            with suppress(NoPlan):  # no memory for it at this moment
                return plan(x.contiguous())
        return F.linear(x, self.low, self.bias)

    def full(self, x: Tensor) -> Tensor:
        """(n, i) → (n, o) in full precision."""
        return F.linear(x, self.weight, self.bias)

    def rows(self, x: Tensor, units: Tensor) -> Tensor:
        """(n, i) → (n, units): these rows alone. Raises BadInput for numbers outside of 0 to o - 1,
        and for more than o of them."""
        count = len(self.weight)
        if len(units) > count or bool(((units < 0) | (units >= count)).any()):
            raise BadInput(f"expected at most {count} units from 0 to {count - 1}")
        if not self._few(x):
            return self._by_torch(x, units)
        values = x.new_empty((len(x), count))
        self.refine(x, units, values)
        return values[:, units]

    def refine(self, x: Tensor, units: Tensor, values: Tensor) -> None:
        """Write these rows alone into values (n, o)."""
        if self._few(x) and values.is_contiguous():
            with suppress(NoPlan):  # no memory for it at this moment
                self._plan()[1](x.contiguous(), units.int().contiguous(), values)
                return
        values[:, units] = self._by_torch(x, units)

    def _by_torch(self, x: Tensor, units: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.index_select(0, units)
        return F.linear(x, self.weight.index_select(0, units), bias)

    def _few(self, x: Tensor) -> bool:
        """Whether the kernels run so many inputs."""
        return self._compiled and 0 < len(x) <= ROWS

    def _plan(self) -> tuple[Estimated | None, ChosenUnits]:
        """The plans for the current number of torch threads."""
        threads = torch.get_num_threads()
        if threads not in self._plans:
            first = None if self._packed is None else Estimated(self._packed, threads)
            self._plans[threads] = first, ChosenUnits(self.weight, self.bias, threads)
        return self._plans[threads]


class Falling:
    """The indices of float32 numbers (o,) in falling order, equal ones by index; sorted in steps,
    as far as they are read.

    >>> Falling(torch.tensor([1.0, 3.0, 2.0, 3.0])).places(0, 3)
    tensor([1, 3, 2], dtype=torch.int32)
    """

    def __init__(self, values: Tensor):
        bits = (values.detach() + 0.0).numpy().view(np.int32)  # -0 is 0
        rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # whole numbers in the order of the values
        index = np.arange(len(bits), dtype=np.int64)
        self.keys = (-rising.astype(np.int64) << 32) | index  # no two are equal
        self.order, self.sorted = np.empty(len(bits), np.int32), 0

    def places(self, first: int, last: int) -> Tensor:
        """The indices of ranks `first` to `last`, int32 [last - first]."""
        if last > self.sorted:
            end = min(max(last, 2 * self.sorted, PIECE), len(self.keys))
            rest, count = self.keys[self.sorted :], end - self.sorted
            if count < len(rest):
                rest.partition(count)
            rest[:count].sort()
            self.order[self.sorted : end] = rest[:count].astype(np.int32)  # the lower half
            self.sorted = end
        return torch.from_numpy(self.order[first:last])


class OrderedChain:
    """Layers with a ReLU between each two, run in order of importance.

    clock: returns seconds that never decrease; replaced in tests.
    """

    def __init__(
        self, layers: Sequence[OrderedLayer], block_bytes: int = BLOCK_BYTES, clock: Callable[[], float] = monotonic
    ):
        self.layers, self.block_bytes, self.clock = tuple(layers), block_bytes, clock
        whole = sum(layer.nbytes for layer in layers)
        self.last_in_full = len(layers) > 1 and layers[-1].nbytes * SMALL < whole
        self.ordered = self.layers[:-1] if self.last_in_full else self.layers
        self.tail = 0.0  # seconds of the last layer in the call before
        self.finite = all(layer.finite for layer in layers)

    @property
    def pilot_bytes(self) -> float:
        """Bytes that are read whatever the limit: the pilot's weights, and the last layer's own
        where it is small."""
        end = self.layers[-1].nbytes if self.last_in_full else 0
        return sum(layer.pilot_bytes for layer in self.ordered) + end

    def __call__(self, x: Tensor, limit: Limit) -> tuple[Tensor, Done]:
        """The answer (n, o) to x (n, i) within a limit, and what was done."""
        start = self.clock()
        values = self.piloted(x)
        end, spent = self.clock(), self.pilot_bytes
        pilot = end - start
        left = max(limit.seconds - pilot - self.tail, 0.0)
        whole, so_far, units = sum(layer.nbytes for layer in self.ordered), 0, []
        bytes_left = min(max(limit.bytes - spent, 0.0), float(whole))
        for k, layer in enumerate(self.ordered):
            so_far += layer.nbytes
            until = end + left * so_far / whole
            most = int(bytes_left * len(layer.weight) / whole + 1e-6)  # of a unit
            x, count = self._refined(k, x, values[k], until, most)
            units.append(count)
            spent += count * layer.row_bytes
        if self.last_in_full:
            before = self.clock()
            x = self.layers[-1].full(x)
            self.tail = self.clock() - before
        of = tuple(len(layer.weight) for layer in self.ordered)
        return x, Done(self.clock() - start, pilot, tuple(units), of, math.ceil(spent))

    def piloted(self, x: Tensor) -> list[Tensor]:
        """The pilot's values before the ReLU, of each layer that is run in order."""
        values = []
        for layer in self.ordered:
            values.append(layer.pilot(x))
            x = values[-1].relu()
        return values

    def priorities(self, k: int, values: Tensor) -> Tensor:
        """The priorities (o,) of the units of layer k, from the pilot's values (n, o).

        Units that the ReLU sets to zero are ordered by how near they are to passing it.
        """
        if k + 1 == len(self.layers):
            return values.abs().amax(0)
        return (values * self.layers[k + 1].columns_norm).amax(0)

    def _refined(self, k: int, x: Tensor, values: Tensor, until: float, most: int) -> tuple[Tensor, int]:
        """The outputs of layer k, most important units from x and the others from the pilot; how
        many."""
        layer, is_last = self.layers[k], k + 1 == len(self.layers)
        step, done = max(self.block_bytes // layer.row_bytes, 1), 0
        most = min(most, len(layer.weight))
        if most and self.clock() < until:
            order = Falling(self.priorities(k, values))
            while done < most and self.clock() < until:
                units = order.places(done, min(done + step, most))
                layer.refine(x, units, values)
                done += len(units)
        return (values if is_last else values.relu()), done


class Ordered(nn.Module):
    """The module of one chain of a graph: called with an input and the chain's weights and biases.

    last: what the last call did; None before the first call, and where torch ran the chain: other
    dtypes and devices, values that are not finite, gradients that are recorded. Weights that change
    are prepared again.
    """

    def __init__(self, biased: tuple[bool, ...], bits: Bits, limit: Limit):
        super().__init__()
        self.biased, self.bits, self.limit = biased, bits, limit
        self.last: Done | None = None
        self._changes = ChangeCounter()
        self._prepared: tuple[Any, list[Tensor], Callable[[], bool], OrderedChain] | None = None

    def forward(self, x: Tensor, *tensors: Tensor) -> Tensor:
        self.last = None
        pairs = self._pairs(tensors)
        chain = self.prepared(pairs) if self._fits(x, tensors) else None
        if chain is None or not chain.finite:
            return plain(x, pairs)
        y, self.last = chain(x.reshape(-1, x.shape[-1]), self.limit)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def prepared(self, pairs: Sequence[tuple[Tensor, Tensor | None]]) -> OrderedChain:
        """The chain of these weights, reused as long as they do not change. Of changes that torch
        does not count, those of most of a weight are noticed (`kernels.memory_probe`)."""
        flat = [t for pair in pairs for t in pair if t is not None]
        if any(t.is_inference() for t in flat):
            key: Any = self._changes.edition(flat)
        else:
            key = tuple((id(t), t.data_ptr(), t._version) for t in flat)
        if self._prepared is None or self._prepared[0] != key or not self._prepared[2]():
            # the tensors and their memory live as long as the key, so that no other gets their ids
            alive = [*flat, *(t.detach() for t in flat)]
            chain = OrderedChain([OrderedLayer(w, b, self.bits) for w, b in pairs])
            same = MemoryProbe(flat).same if llvm.is_installed() else lambda: True
            self._prepared = key, alive, same, chain
        return self._prepared[3]

    def _pairs(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
        remaining = iter(tensors)
        return [(next(remaining), next(remaining) if bias else None) for bias in self.biased]

    def _fits(self, x: Tensor, tensors: Sequence[Tensor]) -> bool:
        every = (x, *tensors)
        if torch.is_grad_enabled() and any(t.requires_grad for t in every):
            return False
        fits = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in every)
        return fits and x.numel() > 0 and bool(x.isfinite().all())

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_prepared": None, "_changes": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._changes = ChangeCounter()

    def __deepcopy__(self, memo: dict[int, Any]) -> Ordered:
        return Ordered(self.biased, self.bits, self.limit).train(self.training)

    def extra_repr(self) -> str:
        return f"{len(self.biased)} layers, {self.bits.text()}, {self.limit}"


def plain(x: Tensor, pairs: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """The output of the chain by torch's own ops."""
    for k, (weight, bias) in enumerate(pairs):
        x = F.linear(x.relu() if k else x, weight, bias)
    return x
