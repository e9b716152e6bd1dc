"""Conditions on channels: those that a pilot rates important are computed, the others are not.

The pilot chooses positions per layer and call: a run-time index. `demask.shrink.runtime_index`
rewrites the network to convolutions and products on gathered weights, through the table, so any
network that the table covers can be conditioned. What is not computed is 0 (`Skip`), a constant
(`ConstantChannels`), the pilot's own value (`PilotValue`), or computed with fewer bits (`Precision`).

The pilot is a simplified network, which runs on the live input first; or execution data of an
earlier frame or a calibration set, which `module.update(data)` replaces. All inputs of a batch
share one index: a position is important where it is so for one of them.

A layer is conditioned at its value before that is joined with another: the output of the last call
after it that works on each position alone and reads nothing else but constants: its norm, its
activation. Positions that are left out there are left out of the layer and of all calls between; after
a sum they would be left out of what the layer is added to. An observer program returns one magnitude
per position of each of these values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.exec.call_groups import Constants, bind_inputs, walk
from demask.facts.analysis import Analysis
from demask.facts.known import Key
from demask.graph.editor import GraphEditor
from demask.graph.program import Program, copy_tensors
from demask.graph.queries import only_reader
from demask.graph.result.demasked_module import Demasked
from demask.numerics import is_integer, is_number
from demask.ops import TABLE, Declined, Relation, Table
from demask.ops.schema import fake
from demask.pilot.conditions.base import Args, Conditioned, Decision, Kwargs
from demask.pilot.data.execution_data import ExecutionData
from demask.pilot.data.measured_values import batch_axis
from demask.pilot.recurrent_units import index_units, output_of_units
from demask.pilot.simplifiers.rounding import quantized
from demask.pilot.simplifiers.simplify import Simplifier, simplify
from demask.pilot.weight_layers import WeightLayer, by_rows, from_rows, layers_of
from demask.shrink.build_uncut import build_sharing, build_uncut
from demask.shrink.layout.cells import RunTimeIndex
from demask.shrink.layout.ties import is_join
from demask.shrink.pipeline import canonicalize, capture_program
from demask.shrink.runtime_index import IndexedSupport, add_inputs, emit_indexed, emit_masked

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class ChosenPositions:
    """How positions are chosen from magnitudes.

    layers, sizes: the layers, and how many positions each has. keep: the share that is computed.
    threshold: or those above `threshold` times the mean of their layer. rest: whether the others
    are indexed too. values: whether the pilot's values are used.
    """

    layers: tuple[str, ...]
    sizes: tuple[int, ...]
    keep: float | None
    threshold: float | None
    rest: bool = False
    values: bool = False

    def indices(self, magnitudes: Sequence[Tensor]) -> list[Tensor]:
        """int64 [k] per layer, rising; with `rest`, then the others.

        >>> ChosenPositions(("a",), (4,), 0.5, None).indices([torch.tensor([1.0, 3.0, 0.0, 2.0])])
        [tensor([1, 3])]
        """
        indices = [self._index(m) for m in magnitudes]
        return indices + [_others(i, n) for i, n in zip(indices, self.sizes, strict=True)] * self.rest

    def _index(self, magnitudes: Tensor) -> Tensor:
        if self.keep is not None:
            count = max(1, round(self.keep * len(magnitudes)))
            return magnitudes.topk(count).indices.sort().values
        assert self.threshold is not None
        above = (magnitudes > self.threshold * magnitudes.mean()).nonzero().squeeze(1)
        return above if len(above) else magnitudes.argmax().reshape(1)


def _others(index: Tensor, size: int) -> Tensor:
    mask = torch.ones(size, dtype=torch.bool, device=index.device)
    return mask.index_fill(0, index, False).nonzero().squeeze(1)


class Supported(nn.Module):
    """A network of which a pilot chooses what is computed, call by call.

    pilot: returns magnitudes (and values); None where `update` sets them. networks: by name, modules that take the
    inputs, the indices, and the pilot's values; `network` computes what the indices select, and `full` all of it.
    chosen: how indices follow from magnitudes. conditioned: what was done. last: the index of each layer in the last
    call.
    """

    network: Demasked
    full: Demasked
    conditioned: Conditioned

    def __init__(
        self,
        draft: Draft,
        networks: Mapping[str, Demasked],
        observer: Program | None,
        *,
        values: bool = False,
        rest: bool = False,
    ):
        super().__init__()
        for name, network in networks.items():
            self.add_module(name, network)
        table = draft.analysis.table
        self.pilot = None if observer is None else build_uncut(Analysis(observer, table), observer, ())
        self.chosen, self.conditioned = draft.choice(rest=rest, values=values)
        self.last: tuple[Tensor, ...] = ()
        for k in range(len(self.chosen.layers) if observer is None else 0):
            self.register_buffer(f"magnitude_{k}", None)
        if isinstance(draft.pilot, ExecutionData):
            self.update(draft.pilot)
        self.eval()

    def update(self, data: ExecutionData) -> None:
        """Take the indices of later calls from other execution data, such as of the frame before.

        Raises BadInput where a pilot runs on the live input, or a layer or position is missing.
        """
        if self.pilot is not None:
            raise BadInput(
                "expected a module conditioned by ExecutionData; this one's pilot runs "
                "on the live input, and needs no update"
            )
        for k, (name, size) in enumerate(zip(self.chosen.layers, self.chosen.sizes, strict=True)):
            priorities = data.priorities(name)
            if len(priorities) != size:
                raise BadInput(
                    f"expected magnitudes of {size} positions of {name!r}, one per "
                    f"channel or unit, got {len(priorities)} {data.per}s"
                )
            setattr(self, f"magnitude_{k}", priorities.clone())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        magnitudes, values = self._piloted(args, kwargs)
        return self.run(self.chosen.indices(magnitudes), args, kwargs, values)

    def run(self, indices: Sequence[Tensor], args: Args, kwargs: Kwargs = None, values: Sequence[Tensor] = ()) -> Any:
        """The outputs for indices of your own, int64 [k] of distinct positions per layer."""
        self.last = tuple(indices)
        network = self.network if all(len(index) for index in indices) else self.full
        return network(*args, *indices, *values, **dict(kwargs or {}))

    def _piloted(self, args: Args, kwargs: Mapping[str, Any]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        count = len(self.chosen.layers)
        if self.pilot is None:
            return [getattr(self, f"magnitude_{k}") for k in range(count)], ()
        results = self.pilot(*args, **kwargs)
        return results[:count], results[count:]


@dataclass(frozen=True, slots=True)
class ConditionedValue:
    """A value that is conditioned. layer: the name of its layer. node: the call that returns the
    value.
    axis: of its positions. size: how many. is_recurrent: whether they are hidden units, which read each other."""

    layer: str
    node: fx.Node
    axis: int
    size: int
    is_recurrent: bool = False


def targets_of(analysis: Analysis) -> tuple[tuple[ConditionedValue, ...], tuple[Decision, ...]]:
    """The conditioned values in the order in which they run, and why other layers have none."""
    targets, declined = [], []
    for layer in layers_of(analysis):
        if layer.relation.back:
            units = recurrent_target(layer)
            if units is not None and all(other.node is not units.node for other in targets):
                targets.append(units)
            elif units is None:
                declined.append(Decision(layer.name, "dense", "its units are projected, or nothing reads them"))
            continue
        why = _unfit(layer)
        node = _end(layer.node, analysis.relations)
        if not why and any(reader.op == "output" for reader in node.users):
            why = "the network's output is returned in full"
        if why:
            declined.append(Decision(layer.name, "dense", why))
            continue
        assert layer.axis is not None
        targets.append(ConditionedValue(layer.name, node, layer.axis, fake(node).shape[layer.axis]))
    return tuple(targets), tuple(declined)


def recurrent_target(layer: WeightLayer) -> ConditionedValue | None:
    """The hidden units of a recurrent call; None where they are no positions of its output."""
    output = output_of_units(layer.node)
    if output is None:
        return None
    axis = fake(output).ndim - 1
    return ConditionedValue(layer.name, output, axis, fake(output).shape[axis], is_recurrent=True)


def _unfit(layer: WeightLayer) -> str:
    """Why a layer is not conditioned; "" where it can be."""
    if layer.axis is None or not layer.relation.contracted:
        return "it works on each channel alone, and follows what it reads"
    size = fake(layer.node).shape[layer.axis]
    if not isinstance(size, int) or size < 2:
        return "it has one position, or as many as the input says"
    return ""


def _end(node: fx.Node, relations: Mapping[fx.Node, Relation | Declined]) -> fx.Node:
    while (reader := only_reader(node)) is not None:
        relation = relations.get(reader)
        if not isinstance(relation, Relation) or not _follows(relation, node):
            break
        node = reader
    return node


def _follows(relation: Relation, node: fx.Node) -> bool:
    """Whether a call works on each position of a value alone, with constants."""
    if relation.entry.fill != "run" or relation.entry.free or len(relation.outs) != 1:
        return False
    marked = relation.window | relation.complete | relation.moved | relation.back
    if marked or is_join(relation):
        return False
    mine = [relation.ins[k] for k, o in enumerate(relation.operands) if o.value is node]
    same = fake(relation.node).ndim == fake(node).ndim
    return same and all(axes == relation.outs[0] for axes in mine)


def targets_of_layers(targets: Iterable[ConditionedValue], layers: Sequence[str], what: str) -> list[ConditionedValue]:
    """The targets of these layers; raises BadInput where one has none."""
    known = {target.layer: target for target in targets}
    missing = [name for name in layers if name not in known]
    if missing:
        raise BadInput(
            f"expected {what} to have layer {missing[0]!r}, as the network has; its "
            f"layers are {', '.join(list(known)[:5])}, …"
        )
    return [known[name] for name in layers]


def observing(program: Program, targets: Sequence[ConditionedValue], *, values: bool = False) -> Program:
    """The program that returns one magnitude per position of each target: the mean |value|, the
    largest over the inputs of a batch. values: also return the values themselves, after the
    magnitudes."""
    editor = GraphEditor(program)
    output = editor.graph.output_node()
    with editor.graph.inserting_before(output):
        nodes = [editor.copies[target.node] for target in targets]
        results = [_magnitude(editor, n, t.axis) for n, t in zip(nodes, targets, strict=True)]
        results += nodes if values else []
    output.args = (tuple(results),)
    spec = pytree.tree_structure((0,) * len(results))
    return replace(editor.finish(), out_spec=spec)


def _magnitude(editor: GraphEditor, node: fx.Node, axis: int) -> fx.Node:
    batch, rank = batch_axis(node), fake(node).ndim
    rest = [k for k in range(rank) if k not in (axis, batch)]
    magnitude = editor.call(aten.abs.default, node)
    if rest:
        magnitude = editor.call(aten.mean.dim, magnitude, rest)
    if batch is not None and batch != axis:
        over = 0 if batch < axis else 1
        more = [0, 1, 0, 0] if over else [0, 0, 0, 1]  # one input of zeros: a batch may be empty
        magnitude = editor.call(aten.constant_pad_nd.default, magnitude, more)
        magnitude = editor.call(aten.amax.default, magnitude, [over])
    return magnitude


def means(program: Program, targets: Sequence[ConditionedValue], inputs: Mapping[fx.Node, Any]) -> list[Tensor]:
    """The mean of each target per position, over one call; each with the rank of its value."""
    mean_of: dict[fx.Node, Tensor] = {}
    nodes = {target.node: target.axis for target in targets}

    def see(_: int, node: fx.Node, value: Tensor) -> None:
        if node in nodes:
            rest = [k for k in range(value.ndim) if k != nodes[node]]
            mean_of[node] = value.mean(rest, keepdim=True) if rest else value

    walk(Constants(program), [inputs], see)
    return [mean_of[target.node] for target in targets]


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

    def applied(self, model: nn.Module, args: Args, kwargs: Kwargs, pilot: Any, table: Table = TABLE) -> Supported:
        """The module in which channels that are not computed are 0.

        Arguments are those of `Condition.applied`.
        """
        return Draft(self, model, args, kwargs, pilot, table).with_constants([0.0])


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

    def applied(self, model: nn.Module, args: Args, kwargs: Kwargs, pilot: Any, table: Table = TABLE) -> Supported:
        """The module with constants in the other channels.

        Arguments are those of `Condition.applied`.
        """
        draft = Draft(self, model, args, kwargs, pilot, table)
        if isinstance(self.value, str):
            inputs = bind_inputs(draft.program, args, dict(kwargs or {}))
            return draft.with_constants(means(draft.program, draft.targets, inputs))
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

    def applied(self, model: nn.Module, args: Args, kwargs: Kwargs, pilot: Any, table: Table = TABLE) -> Supported:
        """The module with the pilot's values in the other channels.

        Arguments are those of `Condition.applied`.
        """
        return Draft(self, model, args, kwargs, pilot, table).with_values()


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

    def applied(self, model: nn.Module, args: Args, kwargs: Kwargs, pilot: Any, table: Table = TABLE) -> Supported:
        """The module with rounded weights in the other channels.

        Arguments are those of `Condition.applied`.
        """
        return Draft(self, model, args, kwargs, pilot, table).with_bits(self.bits)


Kind = Skip | ConstantChannels | PilotValue | Precision


class Draft:
    """A condition that is being applied: the program, its conditioned values, and the pilot."""

    def __init__(self, kind: Kind, model: nn.Module, args: Args, kwargs: Any, pilot: Any, table: Table):
        self.kind, self.args, self.kwargs = kind, args, dict(kwargs or {})
        self.program = canonicalize(capture_program(model, args, kwargs, None), table)
        self.analysis = Analysis(self.program, table)
        conditionable, excluded = targets_of(self.analysis)
        if not isinstance(kind, Skip):
            why = "hidden units of recurrent layers can only be skipped: the condition 'skip'"
            excluded = (*excluded, *(Decision(t.layer, "dense", why) for t in conditionable if t.is_recurrent))
            conditionable = tuple(t for t in conditionable if not t.is_recurrent)
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
        return self._module(*self.constant_picks(fills), self.observer())

    def constant_picks(self, fills: Sequence[float | Tensor]) -> tuple[Program, dict[Key, IndexedSupport]]:
        """The program with the indices as inputs, and the supports of its conditioned values."""
        program, indices, mapping = add_inputs(self.program, self._indices())
        calls = {
            mapping[target.node]: indices[f"index_{k}"] for k, target in enumerate(self.targets) if target.is_recurrent
        }
        if calls:
            program, scattered, copies = index_units(program, calls)
            indices = {name: copies[node] for name, node in indices.items()}
            mapping = {old: scattered.get(new, copies.get(new)) for old, new in mapping.items()}
        picks = {}
        for k, target in enumerate(self.targets):
            fill = fills[k] if len(fills) > 1 else fills[0]
            value = fake(target.node)
            fill_tensor = fill if isinstance(fill, Tensor) else torch.full([1] * value.ndim, float(fill))
            index = RunTimeIndex(indices[f"index_{k}"], target.size)
            picks[mapping[target.node], 0] = IndexedSupport(target.axis, index, fill_tensor.to(value.dtype))
        return program, picks

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
        return self._module(program, picks, self.observer(), rest=True)

    def _indices(self) -> dict[str, Any]:
        return {f"index_{k}": target.size for k, target in enumerate(self.targets)}

    def observer(self) -> Program | None:
        """The pilot that returns magnitudes; None for execution data."""
        if isinstance(self.pilot, ExecutionData):
            return None
        names = [target.layer for target in self.targets]
        targets, _ = targets_of(self.pilot)
        return observing(self.pilot.program, targets_of_layers(targets, names, "the pilot"))

    def _module(
        self, program: Program, picks: Any, observer: Program | None, *, values: bool = False, rest: bool = False
    ) -> Supported:
        analysis = Analysis(copy_tensors(program), self.analysis.table)
        # torch has no convolution of no channels: where an index is empty all is computed.
        emitted = {"network": emit_indexed(analysis, picks), "full": emit_masked(analysis, picks)}
        networks = {name: build_sharing(analysis, written, ()) for name, written in emitted.items()}
        return Supported(self, networks, observer, values=values, rest=rest)

    def choice(self, *, rest: bool = False, values: bool = False) -> tuple[ChosenPositions, Conditioned]:
        """How positions are chosen, and the record of what is done."""
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
        return chosen, about


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
