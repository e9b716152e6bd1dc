"""The input positions that tiles of the outputs read along one image axis, without borders.

    needed(A) = [start(A), end(A)):  a tile that begins at A, in positions of the input, reads from
    start(A) on, and one that ends at A reads to before end(A)

computed from the outputs to the inputs: the union of the needs of a value's readers.

The calls are recorded in one run of the model, on tensors without data. torch.export proves much
that a halo does not need, and takes seconds for hundreds of layers. The dispatch mode here records
calls as they run: in inference mode torch dispatches composite ops (conv2d, linear, group_norm)
unsplit, which is the level of the table. Models that the recording does not support (control flow
that depends on values, writes through views) go through torch.export.

Near a border a call reads less than inside. For a halo only the inside matters: each call's rule
(`ops.regions`) is evaluated where no border clips it, and extrapolated. Rules repeat: `period`
positions further along the output is `step` positions further along the operand.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.compat.dispatch import OpOverload, TorchDispatchMode, base_name, is_mutable, overload_name
from demask.exec.analysis.flow import capture_at_sizes
from demask.failures import is_strict
from demask.graph.module_copy import structural_copy
from demask.graph.result.demasked_module import to_exportable
from demask.ops import Table, schema
from demask.ops.entry import Declined, op_name
from demask.ops.flow import Part, follow
from demask.ops.regions import needed_interval
from demask.ops.relation import Relation, bind
from demask.ops.schema import fake

PERIODS = 64  # the longest period that is searched for
WINDOW = 16  # positions per query: more than a transposed convolution leaves out in a row


@dataclass(frozen=True, slots=True)
class AxisStep:
    """The positions that a call reads on an image without borders.

    Positions from `o` on read from `start(o)` on; positions before `o` read to before `end(o)`:

        start(o + period) == start(o) + step,    end(o + period) == end(o) + step

    exact: False where the rule does not repeat (resizing with align_corners). Then start and end
    are bounds, off by at most two positions plus the drift along the axis.
    """

    period: int
    step: int
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    exact: bool = True

    @property
    def scale(self) -> Fraction:
        """Positions of the operand per position of the output."""
        return Fraction(self.step, self.period)

    def start(self, position: int) -> int:
        if not self.exact:
            return position * self.step // self.period + self.starts[0]
        periods, rest = divmod(position, self.period)
        return periods * self.step + self.starts[rest]

    def end(self, position: int) -> int:
        if not self.exact:
            return -(-position * self.step // self.period) + self.ends[0]
        periods, rest = divmod(position, self.period)
        return periods * self.step + self.ends[rest]


SAME = AxisStep(1, 1, (0,), (0,))


class TooSmall(Exception):
    """The image is so small that every position of a call reads its border."""


class Rules:
    """The step of each call, computed once for equal calls."""

    def __init__(self) -> None:
        self._cache: dict[Any, AxisStep | str | None] = {}

    def step(
        self, relation: Relation, operand: int, parts: tuple[Part, Part], out: int, last: bool
    ) -> AxisStep | str | None:
        """The step from an output to an operand; a reason (str) where every position reads all of
        it; None where the middle of the output reads nothing of it.

        parts: the axis of the operand and of the output. last: the image cannot be enlarged.

        Raises:
            TooSmall: if the image must be enlarged, unless `last`.
        """
        before, after = parts
        carried_part = follow(relation, operand, before, out=out)
        if carried_part is None or carried_part.axis != after.axis:
            return f"reads all of {relation.operands[operand].name!r} at every position"
        letters = relation.outs[out][after.axis]
        if letters[0] not in relation.window | relation.moved:
            return _step_carried(relation, operand, (before, carried_part, after), out)
        key = (_cache_key(relation), operand, parts, out)
        if key not in self._cache:
            step = _fit_step(_AxisRule(relation, operand, before, after, out), last)
            self._cache[key] = step
        return self._cache[key]


def _cache_key(relation: Relation) -> tuple[Any, ...]:
    names = {operand.name for operand in relation.operands}
    numbers = [repr(v) for k, v in schema.arguments(relation.node).items() if k not in names]
    operands = [fake(o.value) if isinstance(o.value, fx.Node) else o.value for o in relation.operands]
    return relation.node.target, tuple(numbers), tuple(tuple(schema.sizes(value)) for value in operands)


def _step_carried(relation: Relation, operand: int, parts: tuple[Part, Part, Part], out: int) -> AxisStep | str:
    """The step of a carried axis: position by position, unless the call needs all of it at once.

    parts: of the operand, the operand's in the output, and the output's own, which may be finer.
    """
    before, carried_part, after = parts
    letters = set(relation.ins[operand][before.axis]) & set(relation.outs[out][after.axis])
    if letters & relation.complete and relation.entry.fill != "same":
        return "normalizes over all positions"
    if letters & relation.looped:
        return "carries a state from position to position"
    if carried_part.inner * carried_part.size != after.inner * after.size or carried_part.inner % after.inner:
        return "moves positions across the image"
    count, step = carried_part.inner // after.inner, before.size // carried_part.size
    ends = (0, *[step] * (count - 1))  # part of a position is read as all of it
    return AxisStep(count, step, (0,) * count, ends)


@dataclass(frozen=True, slots=True)
class _AxisRule:
    """The region rule of a call between a part of an operand's axis and one of an output's."""

    relation: Relation
    operand: int
    before: Part
    after: Part
    out: int

    @property
    def moves(self) -> bool:
        """Whether the axis is moved: its positions follow a map that may differ everywhere."""
        return self.relation.outs[self.out][self.after.axis][0] in self.relation.moved

    def low(self, position: int) -> int:
        """The first position read by positions from `position` on."""
        end = position + (1 if self.moves else WINDOW)
        return self._needed(position, min(end, self.after.size))[0] // self.before.inner

    def high(self, position: int) -> int:
        """One past the last position read by positions before `position`."""
        start = position - (1 if self.moves else WINDOW)
        return -(-self._needed(max(start, 0), position)[1] // self.before.inner)

    def one(self) -> tuple[int, int]:
        """The interval that the position in the middle reads."""
        middle = self.after.size // 2
        low, high = self._needed(middle, middle + 1)
        return low // self.before.inner, -(-high // self.before.inner)

    def _needed(self, start: int, end: int) -> tuple[int, int]:
        inner = self.after.inner
        return needed_interval(self.relation, self.operand, self.after.axis, start * inner, end * inner, out=self.out)


def _fit_step(rule: _AxisRule, last: bool) -> AxisStep | str | None:
    operand_size, output_size = rule.before.size, rule.after.size
    low, high = rule.one()
    if rule.moves and low == high:
        return None
    if not last and (low <= 0 or high >= operand_size):
        raise TooSmall(f"{rule.relation.node}")
    if (low, high) == (0, operand_size) and operand_size > 1:
        return f"reads all {operand_size} positions at every position"
    step = _find_period(rule)
    if step is not None:
        return step
    scale, inside = Fraction(operand_size, output_size), _unclipped_positions(rule)[0]
    if not last and inside[1] - inside[0] <= 2 * scale.denominator <= output_size:
        raise TooSmall(f"{rule.relation.node}")
    lows = [rule.low(o) - math.floor(o * scale) for o in range(output_size)]
    highs = [rule.high(o) - math.ceil(o * scale) for o in range(1, output_size + 1)]
    if max(-min(lows), max(highs)) > operand_size // 2:
        return "moves positions across the image"
    # One more on both sides: positions not tested here may round differently.
    bound = (min(lows) - 1,), (max(highs) + 1,)
    return AxisStep(scale.denominator, scale.numerator, *bound, exact=False)


def _find_period(rule: _AxisRule) -> AxisStep | None:
    """The step of the shortest period with which the rule repeats inside the borders."""
    lows, highs = _unclipped_positions(rule)
    longest = min(PERIODS, *((last - first + 1) // 2 for first, last in (lows, highs)))
    for period in range(1, longest + 1):
        step = rule.low(lows[0] + period) - rule.low(lows[0])
        if step > 0 and _repeats(rule.low, lows, period, step) and _repeats(rule.high, highs, period, step):
            starts = _values_of_period(rule.low, lows, period, step)
            return AxisStep(period, step, starts, _values_of_period(rule.high, highs, period, step))
    return None


def _unclipped_positions(rule: _AxisRule) -> tuple[tuple[int, int], tuple[int, int]]:
    """The first and last output position whose `low`, and whose `high`, no border clips."""
    operand_size, output_size = rule.before.size, rule.after.size
    if rule.moves:  # pads, crops and rolled positions are at the ends
        return (output_size // 4, 3 * output_size // 4), (output_size // 4, 3 * output_size // 4)
    first = bisect.bisect_right(range(output_size), 0, key=rule.low)
    final = bisect.bisect_left(range(1, output_size + 1), operand_size, key=rule.high)
    return (first, final - 1), (first + 1, final)


def _repeats(value: Callable[[int], int], inside: tuple[int, int], period: int, step: int) -> bool:
    """Whether value(o + period) == value(o) + step at both ends and in the middle of the inside."""
    first, last = inside
    span = last - period - first
    anchors = {first, first + max(span - period, 0) // 2, max(first, last - 2 * period + 1)}
    return all(
        value(position + period) - value(position) == step
        for anchor in anchors
        for position in range(anchor, min(anchor + period, last - period + 1))
    )


def _values_of_period(value: Callable[[int], int], inside: tuple[int, int], period: int, step: int) -> tuple[int, ...]:
    """The values of one period in the middle of the inside, by position modulo the period."""
    middle = (sum(inside) - period + 1) // 2
    values = {}
    for position in range(middle, middle + period):
        values[position % period] = value(position) - position // period * step
    return tuple(values[rest] for rest in range(period))


@dataclass(frozen=True, slots=True)
class HaloRecording:
    """The calls of one run that depend on the inputs.

    inputs, outputs: a node per leaf of (args, kwargs) and of the result; None for leaves that are
    no tensors, and for outputs that depend on no input. Nodes have meta["val"], and meta["module"],
    the path of the calling module.
    """

    graph: fx.Graph
    inputs: tuple[fx.Node | None, ...]
    outputs: tuple[fx.Node | None, ...]


class _NotRecordable(Exception):
    """The recording does not support the model; the message contains the reason."""


def record_calls(
    model: nn.Module | ExportedProgram, args: tuple[Any, ...], kwargs: Mapping[str, Any], table: Table
) -> HaloRecording:
    """The calls of `model(*args, **kwargs)` in eval mode; the model is not changed.

    Raises:
        NotExportable, BadInput: as `capture`, if neither recording nor export supports the model.
    """
    if isinstance(model, ExportedProgram):  # as a module, which is captured at the example's sizes
        return _exported(model.module(check_guards=False), args, kwargs)
    try:
        recording = _record_on_meta(to_exportable(structural_copy(model, share=True).eval()), args, kwargs)
    except Exception as error:  # export has a better message, or supports the model
        exported = _exported(model, args, kwargs)
        if is_strict() and not isinstance(error, _NotRecordable):
            raise
        return exported
    ops = [node.target for node in recording.graph.nodes if isinstance(node.target, OpOverload)]
    return recording if all(op_name(op) in table for op in ops) else _exported(model, args, kwargs)


def _exported(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> HaloRecording:
    """The recording by torch.export, functional and canonical."""
    program = capture_at_sizes(model, args, kwargs)
    inputs = [n if isinstance(n.meta.get("val"), Tensor) else None for n in program.graph.find_nodes(op="placeholder")]
    for node in program.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        path = next(reversed([entry[0] for entry in stack.values()]), "")
        node.meta["module"] = path.removeprefix("L['self']").lstrip(".")
    (result,) = next(iter(program.graph.find_nodes(op="output"))).args
    outputs: Any = [n if isinstance(n, fx.Node) else None for n in result]
    return HaloRecording(program.graph, tuple(inputs), tuple(outputs))


def _record_on_meta(work: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> HaloRecording:
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    mode = _HaloRecorder()
    nodes: list[fx.Node | None] = [None] * len(leaves)
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[k] = torch.empty_like(leaf, device="meta", requires_grad=False)
            nodes[k] = mode.input(leaves[k])

    def leave(*_: Any) -> None:
        mode.modules.pop()  # a hook that returns something replaces the module's output

    for name, module in work.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: mode.modules.append(name))
        module.register_forward_hook(leave)
    meta_args, meta_kwargs = pytree.tree_unflatten(leaves, spec)
    with torch.inference_mode(), mode:
        result = work(*meta_args, **meta_kwargs)
    outputs = [mode.node(v) for v in pytree.tree_leaves(result)]
    return HaloRecording(mode.graph, tuple(nodes), tuple(outputs))


class _HaloRecorder(TorchDispatchMode):
    """A mode that records every call that reads a tensor that depends on an input. Such tensors are
    meta tensors; all others are real, and calls among them run.

    modules: names of the modules being called, innermost last. recorded: tensors with their node by
    id; they stay alive, so that no id is reused. aliases: recorded tensors by storage. results:
    shape, strides and dtype by call, as torch takes long to compute them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.modules = [""]
        self.recorded: dict[int, tuple[Tensor, fx.Node]] = {}
        self.constants: dict[int, tuple[Tensor, fx.Node]] = {}
        self.aliases: dict[int, list[Tensor]] = {}
        self.results: dict[Any, tuple[Any, ...]] = {}

    def input(self, tensor: Tensor) -> fx.Node:
        node = self.graph.placeholder(f"input_{len(self.recorded)}")
        node.meta["val"] = tensor
        return self._remember(tensor, node)

    def node(self, value: Any) -> fx.Node | None:
        return self.recorded[id(value)][1] if id(value) in self.recorded else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        if not any(id(leaf) in self.recorded for leaf in leaves):
            return func(*args, **(kwargs or {}))
        result = self._result(func, [self._without_data(leaf) for leaf in leaves], spec)
        nodes = [self._node_or_value(leaf) for leaf in leaves]
        operands, keywords = pytree.tree_unflatten(nodes, spec)
        if is_mutable(func):
            self._record_in_place_call(func, args, operands, keywords)
            return args[0]
        node = self._append_call(func, operands, keywords, result)
        if isinstance(result, Tensor):
            self._remember(result, node)
            return result
        for k, part in enumerate(result):
            if isinstance(part, Tensor):
                self._remember(part, self._append_call(operator.getitem, (node, k), {}, part))
        return result

    def _result(self, func: Any, leaves: list[Any], spec: Any) -> Any:
        """The result of a call on tensors without data."""
        key = (func, spec, *map(_describe, leaves))
        if key in self.results:
            return torch.empty_strided(*self.results[key][:2], dtype=self.results[key][2], device="meta")
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            storages = {_storage(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
            if _storage(result) not in storages and not is_mutable(func):
                self.results[key] = (result.shape, result.stride(), result.dtype)
        return result

    def _append_call(self, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(val=value, module=self.modules[-1])
        return node

    def _record_in_place_call(self, func: Any, args: Any, operands: Any, keywords: Any) -> None:
        """Record an in-place call as the op that returns a new value."""
        name = base_name(func)
        functional = getattr(torch.ops.aten, name.removesuffix("_"), None)
        functional = getattr(functional, overload_name(func), None)
        if not name.endswith("_") or functional is None or id(args[0]) not in self.recorded:
            raise _NotRecordable(f"{func} writes into a value that no input determines")
        aliases = self.aliases[_storage(args[0])]
        if any(_geometry(tensor) != _geometry(args[0]) for tensor in aliases):
            raise _NotRecordable(f"{func} writes through a view")
        node = self._append_call(functional, operands, keywords, args[0])
        for tensor in aliases:
            self.recorded[id(tensor)] = (tensor, node)

    def _remember(self, tensor: Tensor, node: fx.Node) -> fx.Node:
        if id(tensor) not in self.recorded:
            self.aliases.setdefault(_storage(tensor), []).append(tensor)
        self.recorded[id(tensor)] = (tensor, node)
        return node

    def _without_data(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or id(leaf) in self.recorded:
            return leaf
        return fake(self._constant(leaf))

    def _node_or_value(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return self.node(leaf) or self._constant(leaf)

    def _constant(self, tensor: Tensor) -> fx.Node:
        if id(tensor) in self.constants:
            return self.constants[id(tensor)][1]
        node = self.graph.create_node("get_attr", f"constant_{len(self.constants)}")
        node.meta["val"] = tensor.to("meta")
        if not tensor.is_floating_point() and not tensor.is_meta:
            node.meta["positions"] = tensor
        self.constants[id(tensor)] = (tensor, node)
        return node


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.shape, leaf.stride()
    return type(leaf), leaf if isinstance(leaf, (int, float, bool)) else repr(leaf)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


NAMES = ("rows", "columns")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class SpanEdge:
    """One value that a call reads.

    step: positions read along the image axis; None where every position reads all of the value
    (`all_positions`), or none of it. why: reason why a value with the axis is read in full. like: whether
    such a value has as many positions as the output.
    """

    source: fx.Node
    step: AxisStep | None = None
    all_positions: bool = False
    why: str = ""
    like: bool = False


@dataclass(frozen=True, slots=True)
class Paths:
    """A recording along one image axis.

    edges: the values that each node reads. parts: of the values that have the axis. scales:
    positions of the first input per position of a value. outputs: of the network.
    """

    edges: Mapping[fx.Node, tuple[SpanEdge, ...]]
    parts: Mapping[fx.Node, Part]
    scales: Mapping[fx.Node, Fraction]
    outputs: tuple[fx.Node, ...]

    def scale(self, node: fx.Node) -> Fraction:
        """Positions of the first input per index of a value's axis."""
        part = self.parts[node]
        covers = part.covers(fake(node).shape[part.axis])
        return self.scales[node] / (part.inner if covers else 1)

    @property
    def read_in_full(self) -> tuple[fx.Node, ...]:
        """The values with the axis that a call without the axis reads in full."""
        sources = (
            edge.source
            for node, edges in self.edges.items()
            for edge in edges
            if edge.why and not (edge.like and node in self.parts)
        )
        return tuple(dict.fromkeys(sources))

    @property
    def seeds(self) -> tuple[fx.Node, ...]:
        """The values to tile: the outputs, and values that global calls read."""
        return tuple(n for n in dict.fromkeys((*self.outputs, *self.read_in_full)) if n in self.parts)


def relations_of(recording: HaloRecording, table: Table) -> dict[fx.Node, Relation | Declined]:
    """The relation of every call; those with several outputs are read through their outputs."""
    return {
        node: bind(node, table)
        for node in recording.graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    }


def paths_of(
    recording: HaloRecording,
    relations: Mapping[fx.Node, Relation | Declined],
    inputs: Mapping[fx.Node, Part],
    rules: Rules,
    last: bool,
) -> Paths:
    """The paths of an image axis through a recording.

    inputs: the placeholders that have the image axis. last: the image cannot be enlarged. Raises
    TooSmall as `Rules.step`.
    """
    parts, scales, edges = dict(inputs), {}, {}
    first = next(iter(inputs.values()), None)
    for node, part in inputs.items():
        scales[node] = Fraction(first.size, part.size) if first else Fraction(1)
    for node in recording.graph.nodes:
        if node.op != "call_function" or not isinstance(fake(node), Tensor):
            continue
        relation, out = _relation_of(node, relations)
        part = _part_of(relation, node, out, parts)
        if part is not None:
            parts[node] = part
        edges[node] = tuple(
            _read_edge(relation, k, source, (node, out), parts, rules, last)
            for k, source in _node_operands(relation, node)
        )
        if part is not None:
            scales[node] = _scale_of(edges[node], scales, parts, part)
    outputs = tuple(node for node in recording.outputs if node is not None)
    live = _find_live(edges, outputs)
    needed = live.union(inputs)
    return Paths(_only(edges, needed), _only(parts, needed), _only(scales, needed), outputs)


def _only(by_node: dict[fx.Node, Value], nodes: set[fx.Node]) -> dict[fx.Node, Value]:
    return {node: value for node, value in by_node.items() if node in nodes}


def _find_live(edges: Mapping[fx.Node, tuple[SpanEdge, ...]], outputs: tuple[fx.Node, ...]) -> set[fx.Node]:
    live = set(outputs)
    for node in reversed(list(edges)):
        if node in live:
            live.update(edge.source for edge in edges[node])
    return live


def _relation_of(node: fx.Node, relations: Mapping[fx.Node, Relation | Declined]) -> tuple[Relation | Declined, int]:
    """The relation that computes a value, and the index of the value among its outputs."""
    if node.target is operator.getitem:
        call, out = node.args
        return relations[call], out  # type: ignore[index,return-value]
    return relations[node], 0


def _node_operands(relation: Relation | Declined, node: fx.Node) -> list[tuple[int, fx.Node]]:
    """The operands that are nodes, with their index in the relation."""
    if isinstance(relation, Relation):
        operands = [(k, operand.value) for k, operand in enumerate(relation.operands)]
        return [(k, value) for k, value in operands if isinstance(value, fx.Node)]
    call: Any = node.args[0] if node.target is operator.getitem else node
    return list(enumerate(call.all_input_nodes))


def _part_of(relation: Relation | Declined, node: fx.Node, out: int, parts: Mapping[fx.Node, Part]) -> Part | None:
    """The part of a value's axes that is the image axis: that of the first operand that has it, or
    the finest on the same axis. A call without a rule is assumed to keep the axis if it keeps the
    shape."""
    candidates: list[Part | None] = []
    for k, source in _node_operands(relation, node):
        if source in parts and isinstance(relation, Relation):
            candidates.append(follow(relation, k, parts[source], out=out))
        elif source in parts and fake(source).shape == fake(node).shape:
            candidates.append(parts[source])
    known = [part for part in candidates if part is not None]
    alike = [part for part in known if part.axis == known[0].axis]
    return min(alike, key=lambda part: part.inner, default=None)


def _read_edge(
    relation: Relation | Declined,
    operand: int,
    source: fx.Node,
    reader: tuple[fx.Node, int],
    parts: Mapping[fx.Node, Part],
    rules: Rules,
    last: bool,
) -> SpanEdge:
    before, after = parts.get(source), parts.get(reader[0])
    if before is None:
        return SpanEdge(source, all_positions=True)
    like = after is not None and before.size == after.size
    if isinstance(relation, Declined):
        return SpanEdge(source, None, True, relation.text, like)
    if after is None:
        return SpanEdge(source, None, True, "reduces all positions to one value", like)
    step = rules.step(relation, operand, (before, after), reader[1], last)
    return SpanEdge(source, None, True, step, like) if isinstance(step, str) else SpanEdge(source, step)


def _scale_of(edges, scales: Mapping[fx.Node, Fraction], parts, part: Part) -> Fraction:
    """The scale of a value, from the first operand that is read in steps, else from sizes."""
    for edge in edges:
        if edge.step is not None:
            return scales[edge.source] * edge.step.scale
    source = next(edge.source for edge in edges if edge.source in scales)
    return scales[source] * Fraction(parts[source].size, part.size)


# --- from outputs to inputs ---------------------------------------------------------------------

Span = tuple[float, float]
ALL: Span = (-math.inf, math.inf)


def spans(paths: Paths, position: Fraction, *, local: bool) -> dict[fx.Node, Span]:
    """For each value, where a tile that begins at `position` starts to read, and where one that
    ends there stops.

    position: of the first input. local: treat global calls as position by position; where one ends
    the axis, its operand is tiled.
    """
    result: dict[fx.Node, Span] = {}
    for node in paths.seeds if local else paths.outputs:
        own = position / paths.scales[node] if node in paths.parts else None
        result[node] = ALL if own is None else (math.floor(own), math.ceil(own))
    for node in reversed(list(paths.edges)):
        span = result.get(node)
        if span is None:
            continue
        for edge in paths.edges[node]:
            needed = _span_of_operand(edge, span, local)
            if needed is not None:
                result[edge.source] = _union(result.get(edge.source), needed)
    return result


def _span_of_operand(edge: SpanEdge, span: Span, local: bool) -> Span | None:
    """The span of an operand that a reader with `span` needs; None: nothing."""
    step = SAME if local and edge.why and edge.like else edge.step
    if span == ALL:
        return None if local else ALL
    if step is None:
        return ALL if edge.all_positions and not local else None
    return step.start(int(span[0])), step.end(int(span[1]))


def _union(a: Span | None, b: Span) -> Span:
    return b if a is None else (min(a[0], b[0]), max(a[1], b[1]))


def alignments(paths: Paths, inputs: Mapping[fx.Node, Part]) -> Iterator[Fraction]:
    """The positions of the first input where tiles may begin, for one period of all steps."""
    ends = [paths.scale(node) for node in (*paths.seeds, *inputs)]
    grid, period = least_multiple(ends), least_multiple([*ends, *_periods(paths)])
    yield from (grid * k for k in range(int(period / grid)))


def _periods(paths: Paths) -> Iterator[Fraction]:
    for node, edges in paths.edges.items():
        if node in paths.scales:
            yield paths.scales[node]
        for edge in edges:
            if edge.step is not None and edge.step.exact:
                yield edge.step.period * paths.scales[node]


def alignment(paths: Paths, node: fx.Node) -> int:
    """The number of positions of which crops of this input begin at a multiple, so that strided
    layers sample the same positions as in the full image."""
    return int(least_multiple([Fraction(1), *(s / paths.scales[node] for s in paths.scales.values())]))


def least_multiple(values: list[Fraction]) -> Fraction:
    """The least common multiple."""
    distinct = set(values)
    tops, bottoms = (v.numerator for v in distinct), (v.denominator for v in distinct)
    return Fraction(math.lcm(*tops), math.gcd(*bottoms))
