"""Conditions on channels: those that a pilot rates important are computed, the others are not.

The pilot chooses positions per layer and call: a run-time index. `demask.shrink.runtime_index`
rewrites the network to convolutions and products on gathered weights, through the table, so any
network that the table covers can be conditioned. What is not computed is 0 (`Skip`), a constant
(`ConstantChannels`), the pilot's own value (`PilotValue`), or computed with fewer bits (`Precision`).

The pilot is a simplified network, which runs on the live input first; or execution data of an
earlier frame or a calibration set, which `module.update(data)` replaces. All inputs of a batch
share one index: a position is important where it is so for one of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from demask.errors import BadInput
from demask.facts.analysis import Analysis
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.numerics import is_integer, is_number
from demask.ops import TABLE, Table
from demask.ops.schema import fake
from demask.pilot.conditions.base import Conditioned, Decision
from demask.pilot.conditions.conditioned_values import ConditionedValue, means, observing, targets_of, targets_of_layers
from demask.pilot.conditions.indexed_module import ChosenPositions, Supported
from demask.pilot.data.execution_data import ExecutionData
from demask.pilot.data.sliced_run import flat
from demask.pilot.simplifiers.rounding import quantized
from demask.pilot.simplifiers.simplify import Simplifier, simplify
from demask.pilot.weight_layers import by_rows, from_rows, layers_of
from demask.shrink.layout.cells import RunTimeIndex
from demask.shrink.pipeline import canonicalize, capture_program
from demask.shrink.runtime_index import IndexedSupport, add_inputs

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Selective:
    """The parameters of all conditions on channels: which positions of which layers."""

    name: ClassVar[str]
    keep: float | None = None
    threshold: float | None = None
    layers: str = "*"

    def __post_init__(self) -> None:
        name, keep, threshold = self.name, self.keep, self.threshold
        if (keep is None) == (threshold is None):
            raise BadInput(
                f"expected {name} with one of keep and threshold, such as '{name}:0.5' or '{name}:threshold=0.1'"
            )
        if keep is not None and not (is_number(keep) and 0 < keep <= 1):
            raise BadInput(f"expected a share above 0, at most 1, for keep of {name}, got {keep!r}")
        if threshold is not None and not (is_number(threshold) and threshold >= 0):
            raise BadInput(f"expected a threshold of 0 or more of {name}, got {threshold!r}")


@dataclass(frozen=True, slots=True)
class Skip(_Selective):
    """A condition that computes only the channels that a cheap first run, the pilot, rates high.

    A condition selects the work that a network does. Pass `Skip(0.5)`, or its text "skip:0.5" or
    "skip:threshold=0.1", to the function `condition`. A channel is a unit of a linear layer or a
    filter of a convolution; channels that are not computed are 0. The pilot is a simplifier
    (derives a cheaper network), its text or a network, which runs first on every input, or an
    ExecutionData of earlier inputs. A channel's magnitude is the mean |value| of the channel in the
    pilot. All inputs of a batch share one choice, by the largest magnitude over the batch.

    The conditioned module has `last`, a tuple with the numbers of the computed channels of each
    conditioned layer in the last call (ascending, int64). With an ExecutionData as pilot, the
    module has a method `update(data)`, which sets the magnitudes for later calls.

    Args:
        keep: share of each layer's channels that is computed, the largest magnitudes first, above
            0, at most 1, at least one channel; default None.
        threshold: an alternative to `keep`, 0 or more: channels are computed whose magnitude is
            above `threshold` times the mean of their layer, at least one channel; default None.
        layers: pattern (as of `fnmatch`: *, ?, [...]) of names of the layers that are conditioned,
            such as "layer3.*"; default "*": all.

    Raises:
        BadInput: not exactly one of `keep` and `threshold` is set, or a value is out of range; when
            the condition is applied: there is no pilot, no layer can be conditioned, or the pilot
            lacks one of the layers.
        NotExportable: when the condition is applied: torch.export cannot capture the model.

    Example:
        >>> import torch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> from demask.pilot import Skip, condition
        >>> net = Sequential(Linear(8, 64), ReLU(), Linear(64, 4)).eval()
        >>> x = torch.randn(2, 8)
        >>> half = condition(net, (x,), pilot="bits:4", condition=Skip(0.5), check=False)
        >>> half(x).shape, len(half.last[0])  # 32 of 64 hidden units were computed
        (torch.Size([2, 4]), 32)
    """

    name: ClassVar[str] = "skip"

    def applied(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        pilot: Any,
        table: Table = TABLE,
    ) -> Supported:
        """The module in which channels that are not computed are 0.

        Arguments are those of `Condition.applied`.
        """
        return _Draft(self, model, args, kwargs, pilot, table).with_constants([0.0])


@dataclass(frozen=True, slots=True)
class ConstantChannels(_Selective):
    """A condition like `Skip` in which channels that are not computed have a constant value, not 0.

    A condition selects the work that a network does. Pass `Constant(0.5)`, or its text
    "constant:0.5" or "constant:0.5:value=1", to the function `condition`. `Constant` is the public
    name of this class. The pilot (the cheap first run that rates channels) and the attributes of
    the conditioned module are those of `Skip`.

    Args:
        keep: share of each layer's channels that is computed, the largest magnitudes first, above
            0, at most 1, at least one channel; default None.
        threshold: an alternative to `keep`, 0 or more: a channel is computed if its magnitude is
            above `threshold` times the mean of its layer, at least one channel; default None.
        layers: pattern (as of `fnmatch`: *, ?, [...]) of names of the layers that are conditioned,
            such as "layer3.*"; default "*": all.
        value: the constant, which replaces the channel after the norm and activation that follow
            the layer: a number for all channels, or "mean" (the default) for each channel's mean
            there over the example inputs, which should then be a representative batch.

    Raises:
        BadInput: not exactly one of `keep` and `threshold` is set, a value is out of range, or
            `value` is neither a number nor "mean"; when the condition is applied: there is no
            pilot, no layer can be conditioned, or the pilot lacks one of the layers.
        NotExportable: when the condition is applied: torch.export cannot capture the model.

    Example:
        >>> import torch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> from demask.pilot import Constant, condition
        >>> net, x = Sequential(Linear(8, 64), ReLU(), Linear(64, 4)).eval(), torch.randn(50, 8)
        >>> half = condition(net, (x,), pilot="bits:8", condition=Constant(0.5), check=False)
        >>> y = half(x)  # 32 of 64 hidden units are computed, the others are their mean over x
        >>> len(half.last[0]), half.conditioned.condition.value
        (32, 'mean')
    """

    name: ClassVar[str] = "constant"
    value: float | str = "mean"

    def __post_init__(self) -> None:
        _Selective.__post_init__(self)
        if self.value != "mean" and (not is_number(self.value) or math.isinf(float(self.value))):
            raise BadInput(f"expected a finite number or 'mean' for value, got {self.value!r}")

    def applied(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        pilot: Any,
        table: Table = TABLE,
    ) -> Supported:
        """The module with constants in the other channels.

        Arguments are those of `Condition.applied`.
        """
        draft = _Draft(self, model, args, kwargs, pilot, table)
        if isinstance(self.value, str):
            leaves = flat(draft.program, args, dict(kwargs or {}))
            return draft.with_constants(means(draft.program, draft.targets, leaves))
        return draft.with_constants([self.value])


@dataclass(frozen=True, slots=True)
class PilotValue(_Selective):
    """A condition like `Skip` in which channels that are not computed have the pilot's own values.

    A condition selects the work that a network does. Pass `Value(0.5)`, or its text "value:0.5" or
    "value:threshold=0.1", to the function `condition`. The pilot is a simplifier (derives a cheaper
    network), its text or a network, which runs first on every input. The pilot's values must have
    the shapes of the network's values, so "downsample:N" cannot be the pilot. The magnitudes of
    channels and the attribute `last` of the conditioned module are those of `Skip`.

    Args:
        keep: share of each layer's channels that is computed in full, the largest magnitudes first,
            above 0, at most 1, at least one channel; default None.
        threshold: an alternative to `keep`, 0 or more: channels are computed in full whose
            magnitude is above `threshold` times the mean of their layer, at least one channel;
            default None.
        layers: pattern (as of `fnmatch`: *, ?, [...]) of names of the layers that are conditioned,
            such as "layer3.*"; default "*": all.

    Raises:
        BadInput: not exactly one of `keep` and `threshold` is set, or a value is out of range; when
            the condition is applied: as for `Skip`, or the pilot is an ExecutionData or has values
            of other shapes.
        NotExportable: when the condition is applied: torch.export cannot capture the model.

    Example:
        >>> import torch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> from demask.pilot import Value, condition
        >>> net, x = Sequential(Linear(8, 64), ReLU(), Linear(64, 4)).eval(), torch.randn(2, 8)
        >>> half = condition(net, (x,), pilot="bits:8", condition=Value(0.5), check=False)
        >>> torch.allclose(half(x), net(x), atol=0.1)  # the other half has rounded weights
        True
    """

    name: ClassVar[str] = "value"

    def applied(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        pilot: Any,
        table: Table = TABLE,
    ) -> Supported:
        """The module with the pilot's values in the other channels.

        Arguments are those of `Condition.applied`.
        """
        return _Draft(self, model, args, kwargs, pilot, table).with_values()


@dataclass(frozen=True, slots=True)
class Precision(_Selective):
    """A condition that computes channels of low importance with weights of few bits.

    A condition selects the work that a network does. Pass `Precision(0.5)`, or its text
    "precision:0.5" or "precision:0.5:bits=4", to the function `condition`. Precision is for
    measuring how lower precision changes the outputs. No time is saved: each layer runs twice, once
    per group of channels, and rounded weights keep their dtype. The pilot (the cheap first run that
    rates channels) and the attributes of the conditioned module are those of `Skip`.

    Args:
        keep: share of each layer's channels that has full precision, the largest magnitudes first,
            above 0, at most 1; default None.
        threshold: an alternative to `keep`, 0 or more: a channel has full precision if its
            magnitude is above `threshold` times the mean of its layer; default None.
        layers: pattern (as of `fnmatch`: *, ?, [...]) of names of the layers that are conditioned,
            such as "layer3.*"; default "*": all.
        bits: bits of the other channels' weights, an integer from 1 to 16, rounded as by `Bits`;
            default 8.

    Raises:
        BadInput: not exactly one of `keep` and `threshold` is set, or a value is out of range; when
            the condition is applied: there is no pilot, no layer can be conditioned, or the pilot
            lacks one of the layers.
        NotExportable: when the condition is applied: torch.export cannot capture the model.

    Example:
        >>> import torch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> from demask.pilot import Precision, condition
        >>> net, x = Sequential(Linear(8, 64), ReLU(), Linear(64, 4)).eval(), torch.randn(2, 8)
        >>> half = condition(net, (x,), pilot="bits:4", condition=Precision(0.5), check=False)
        >>> torch.allclose(half(x), net(x), atol=0.1), torch.equal(half(x), net(x))
        (True, False)
    """

    name: ClassVar[str] = "precision"
    bits: int = 8

    def __post_init__(self) -> None:
        _Selective.__post_init__(self)
        if not is_integer(self.bits) or not 1 <= self.bits <= 16:
            raise BadInput(f"expected 1 to 16 bits, got {self.bits!r}; such as 8")

    def applied(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        pilot: Any,
        table: Table = TABLE,
    ) -> Supported:
        """The module with rounded weights in the other channels.

        Arguments are those of `Condition.applied`.
        """
        return _Draft(self, model, args, kwargs, pilot, table).with_bits(self.bits)


Kind = Skip | ConstantChannels | PilotValue | Precision


class _Draft:
    """A condition that is being applied: the program, its conditioned values, and the pilot."""

    def __init__(self, kind: Kind, model: nn.Module, args: tuple[Any, ...], kwargs: Any, pilot: Any, table: Table):
        self.kind, self.args, self.kwargs = kind, args, dict(kwargs or {})
        self.program = canonicalize(capture_program(model, args, kwargs, None), table)
        self.analysis = Analysis(self.program, table)
        conditionable, excluded = targets_of(self.analysis)
        self.targets = [t for t in conditionable if fnmatchcase(t.layer, kind.layers)]
        self.left = [
            *excluded,
            *(Decision(t.layer, "dense", f"not of {kind.layers!r}") for t in conditionable if t not in self.targets),
        ]
        if not self.targets:
            why = "; ".join(map(str, self.left[:3])) or "it has no layers"
            raise BadInput(f"nothing of this network can be conditioned by {kind.name}: {why}")
        self.pilot, self.text = self._piloted(model, pilot)

    def _piloted(self, model: nn.Module, pilot: Any) -> tuple[Any, str]:
        """The analysis of the pilot, or execution data; and its text."""
        if isinstance(pilot, ExecutionData):
            return pilot, pilot.source
        if isinstance(pilot, str | Simplifier):
            module = simplify(model, self.args, self.kwargs, by=pilot, table=self.analysis.table)
            text = pilot if isinstance(pilot, str) else pilot.text()
        elif isinstance(pilot, nn.Module):
            module, text = pilot, type(pilot).__name__
        else:
            raise BadInput(
                f"{self.kind.name} needs a pilot, which says what is important: a "
                "simplifier such as 'bits:4', a module, or ExecutionData (collect); "
                f"got {type(pilot).__name__}"
            )
        program = canonicalize(capture_program(module, self.args, self.kwargs, None), self.analysis.table)
        return Analysis(program, self.analysis.table), text

    def with_constants(self, fills: Sequence[float | Tensor]) -> Supported:
        """The module in which positions that are not computed are constants, one for all targets
        or one each."""
        program, indices, mapping = add_inputs(self.program, self._indices())
        picks = {}
        for k, target in enumerate(self.targets):
            fill = fills[k] if len(fills) > 1 else fills[0]
            value = fake(target.node)
            fill_tensor = fill if isinstance(fill, Tensor) else torch.full([1] * value.ndim, float(fill))
            index = RunTimeIndex(indices[f"index_{k}"], target.size)
            picks[mapping[target.node], 0] = IndexedSupport(target.axis, index, fill_tensor.to(value.dtype))
        return self._module(program, picks, self._observer())

    def with_values(self) -> Supported:
        """The module in which they are the pilot's values."""
        if isinstance(self.pilot, ExecutionData):
            raise BadInput(
                "value needs a pilot that runs on the live input, for its values: a simplifier "
                "such as 'bits:4' or a module; got ExecutionData"
            )
        targets, _ = targets_of(self.pilot)
        theirs = targets_of_layers(targets, [t.layer for t in self.targets], "the pilot")
        for mine, other in zip(self.targets, theirs, strict=True):
            self._check_alike(mine, other)
        like = {f"value_{k}": fake(t.node) for k, t in enumerate(self.targets)}
        program, inputs, mapping = add_inputs(self.program, {**self._indices(), **like})
        picks = {}
        for k, target in enumerate(self.targets):
            index = RunTimeIndex(inputs[f"index_{k}"], target.size)
            picks[mapping[target.node], 0] = IndexedSupport(target.axis, index, inputs[f"value_{k}"])
        return self._module(program, picks, observing(self.pilot.program, theirs, values=True), values=True)

    def _check_alike(self, mine: ConditionedValue, other: ConditionedValue) -> None:
        a, b = fake(mine.node).shape, fake(other.node).shape
        fixed = zip(a, b, strict=False)
        if len(a) != len(b) or any(m != n for m, n in fixed if isinstance(m, int)):
            raise BadInput(
                f"expected the pilot to have values like the network's at {mine.layer!r}, "
                f"{list(a)}, got {list(b)}; pass a pilot of the same sizes"
            )

    def with_bits(self, bits: int) -> Supported:
        """The module in which they are computed with weights of fewer bits."""
        changed, layers = _doubled(self.analysis, [t.layer for t in self.targets], bits)
        sizes = {f"index_{k}": t.size for k, t in enumerate(self.targets)}
        sizes |= {f"rest_{k}": t.size for k, t in enumerate(self.targets)}
        program, inputs, mapping = add_inputs(changed, sizes)
        picks = {}
        for k, (node, twin, axis) in enumerate(layers):
            size = self.targets[k].size
            zero = torch.zeros([1] * fake(node).ndim, dtype=fake(node).dtype)
            for name, call in ((f"index_{k}", node), (f"rest_{k}", twin)):
                picks[mapping[call], 0] = IndexedSupport(axis, RunTimeIndex(inputs[name], size), zero)
        return self._module(program, picks, self._observer(), rest=True)

    def _indices(self) -> dict[str, Any]:
        return {f"index_{k}": target.size for k, target in enumerate(self.targets)}

    def _observer(self) -> Program | None:
        """The pilot that returns magnitudes; None for execution data."""
        if isinstance(self.pilot, ExecutionData):
            return None
        names = [target.layer for target in self.targets]
        targets, _ = targets_of(self.pilot)
        return observing(self.pilot.program, targets_of_layers(targets, names, "the pilot"))

    def _module(
        self, program: Program, picks: Any, observer: Program | None, *, values: bool = False, rest: bool = False
    ) -> Supported:
        kind = self.kind
        what = f"{kind.keep:g} of" if kind.keep is not None else f"above {kind.threshold:g} mean:"
        more = "; the others run too: this saves no time" if rest else ""
        lines = [Decision(t.layer, kind.name, f"{what} {t.size} positions{more}") for t in self.targets]
        about = Conditioned(kind, self.text, exact=False, decisions=(*lines, *self.left))
        chosen = ChosenPositions(
            tuple(t.layer for t in self.targets),
            tuple(t.size for t in self.targets),
            kind.keep,
            kind.threshold,
            rest,
            values,
        )
        module = Supported(program, picks, observer, chosen, about, self.analysis.table)
        if isinstance(self.pilot, ExecutionData):
            module.update(self.pilot)
        return module


def _doubled(analysis: Analysis, names: Sequence[str], bits: int) -> tuple[Program, list[tuple[fx.Node, fx.Node, int]]]:
    """The program in which each of these layers is added to its twin with weights of fewer bits;
    and per layer both calls, and the axis of their positions."""
    editor, pairs = GraphEditor(analysis.program), []
    graph = editor.graph
    layers = {x.name: x for x in layers_of(analysis)}
    for layer in (layers[name] for name in names):
        assert layer.axis is not None
        node, read = editor.copies[layer.node], editor.copies[layer.read]
        old = editor.constants[layer.weight]
        name = f"{layer.weight}_bits{bits}"
        rounded = from_rows(quantized(by_rows(old.tensor, layer.rows), bits), old.tensor, layer.rows)
        constant = replace(old, tensor=rounded, name=f"{old.name}_bits{bits}", aliases=())
        editor.constants[name] = constant
        readers = list(node.users)
        with graph.inserting_after(node):
            twin = graph.node_copy(node)
        with graph.inserting_before(twin):
            weight = editor.read_constant(name)
        twin.replace_input_with(read, weight)
        with graph.inserting_after(twin):
            both = editor.call(aten.add.Tensor, node, twin)
        for reader in readers:
            reader.replace_input_with(node, both)
        pairs.append((node, twin, layer.axis))
    return editor.finish(), pairs
