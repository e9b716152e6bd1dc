"""The input positions that tiles of the outputs read along one image axis, without borders.

    needed(A) = [start(A), end(A)):  a tile that begins at A, in positions of the input, reads from
    start(A) on, and one that ends at A reads to before end(A)

computed from the outputs to the inputs: the union of the needs of a value's readers.

The calls of one run of a model, recorded on tensors without data.

torch.export proves much that a halo does not need, and takes seconds for hundreds of layers. This
dispatch mode records the calls as they run: in inference mode torch dispatches composite ops
(conv2d, linear, group_norm) unsplit, which is the level of the table. Models that the recording does
not support (control flow that depends on values, writes through views) go through torch.export.
"""

from __future__ import annotations

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
from demask.failures import is_strict
from demask.graph.capture.capture import capture
from demask.graph.capture.fold_constants import fold_constants
from demask.graph.capture.functionalize import functionalize
from demask.graph.module_copy import structural_copy
from demask.graph.result.demasked_module import to_exportable
from demask.ops import Table
from demask.ops.entry import Declined, op_name
from demask.ops.flow import Part, follow
from demask.ops.relation import Relation, bind
from demask.ops.schema import fake
from demask.rewrites.driver import rewrite
from demask.rewrites.normalize import CANONICAL
from demask.traverse.halos.axis_steps import SAME, AxisStep, Rules


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
        recording = _run(to_exportable(structural_copy(model, share=True).eval()), args, kwargs)
    except Exception as error:  # export has a better message, or supports the model
        exported = _exported(model, args, kwargs)
        if is_strict() and not isinstance(error, _NotRecordable):
            raise
        return exported
    is_known = all(_is_known(node, table) for node in recording.graph.nodes)
    return recording if is_known else _exported(model, args, kwargs)


def _is_known(node: fx.Node, table: Table) -> bool:
    is_op = isinstance(node.target, OpOverload)
    return not is_op or op_name(node.target) in table


def _exported(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> HaloRecording:
    """The recording by torch.export, functional and canonical."""
    program = rewrite(fold_constants(functionalize(capture(model, args, kwargs, dynamic_shapes={}))), CANONICAL)
    inputs = [n if isinstance(n.meta.get("val"), Tensor) else None for n in program.graph.find_nodes(op="placeholder")]
    for node in program.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        path = next(reversed([entry[0] for entry in stack.values()]), "")
        node.meta["module"] = path.removeprefix("L['self']").lstrip(".")
    (result,) = next(iter(program.graph.find_nodes(op="output"))).args
    outputs: Any = [n if isinstance(n, fx.Node) else None for n in result]
    return HaloRecording(program.graph, tuple(inputs), tuple(outputs))


def _run(work: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> HaloRecording:
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    mode = _HaloRecorder()
    nodes: list[fx.Node | None] = [None] * len(leaves)
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[k] = torch.empty_like(leaf, device="meta", requires_grad=False)
            nodes[k] = mode.input(leaves[k])
    for name, module in work.named_modules():
        module.register_forward_pre_hook(_entering(mode.modules, name))
        module.register_forward_hook(_leaving(mode.modules))
    meta_args, meta_kwargs = pytree.tree_unflatten(leaves, spec)
    with torch.inference_mode(), mode:
        result = work(*meta_args, **meta_kwargs)
    outputs = [mode.node(v) for v in pytree.tree_leaves(result)]
    return HaloRecording(mode.graph, tuple(nodes), tuple(outputs))


def _entering(modules: list[str], name: str) -> Callable[..., None]:
    return lambda *_: modules.append(name)


def _leaving(modules: list[str]) -> Callable[..., None]:
    def leave(*_: Any) -> None:
        modules.pop()  # a hook that returns something replaces the module's output

    return leave


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
        result = self._result(func, [self._value(leaf) for leaf in leaves], spec)
        nodes = [self._operand(leaf) for leaf in leaves]
        operands, keywords = pytree.tree_unflatten(nodes, spec)
        if is_mutable(func):
            self._write(func, args, operands, keywords)
            return args[0]
        node = self._call(func, operands, keywords, result)
        if isinstance(result, Tensor):
            self._remember(result, node)
            return result
        for k, part in enumerate(result):
            if isinstance(part, Tensor):
                self._remember(part, self._call(operator.getitem, (node, k), {}, part))
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

    def _call(self, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(val=value, module=self.modules[-1])
        return node

    def _write(self, func: Any, args: Any, operands: Any, keywords: Any) -> None:
        """Record an in-place call as the op that returns a new value."""
        name = base_name(func)
        functional = getattr(torch.ops.aten, name.removesuffix("_"), None)
        functional = getattr(functional, overload_name(func), None)
        if not name.endswith("_") or functional is None or id(args[0]) not in self.recorded:
            raise _NotRecordable(f"{func} writes into a value that no input determines")
        aliases = self.aliases[_storage(args[0])]
        if any(_geometry(tensor) != _geometry(args[0]) for tensor in aliases):
            raise _NotRecordable(f"{func} writes through a view")
        node = self._call(functional, operands, keywords, args[0])
        for tensor in aliases:
            self.recorded[id(tensor)] = (tensor, node)

    def _remember(self, tensor: Tensor, node: fx.Node) -> fx.Node:
        if id(tensor) not in self.recorded:
            self.aliases.setdefault(_storage(tensor), []).append(tensor)
        self.recorded[id(tensor)] = (tensor, node)
        return node

    def _value(self, leaf: Any) -> Any:
        """A leaf of a call as the call runs on it: without data."""
        if not isinstance(leaf, Tensor) or id(leaf) in self.recorded:
            return leaf
        return fake(self._constant(leaf))

    def _operand(self, leaf: Any) -> Any:
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
    def read_whole(self) -> tuple[fx.Node, ...]:
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
        return tuple(n for n in dict.fromkeys((*self.outputs, *self.read_whole)) if n in self.parts)


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
        relation, out = _read(node, relations)
        part = _part_of(relation, node, out, parts)
        if part is not None:
            parts[node] = part
        edges[node] = tuple(
            _edge(relation, k, source, (node, out), parts, rules, last) for k, source in _sources(relation, node)
        )
        if part is not None:
            scales[node] = _scale(edges[node], scales, parts, part)
    outputs = tuple(node for node in recording.outputs if node is not None)
    live = _live(edges, outputs)
    needed = live.union(inputs)
    return Paths(_only(edges, needed), _only(parts, needed), _only(scales, needed), outputs)


def _only(by_node: dict[fx.Node, Value], nodes: set[fx.Node]) -> dict[fx.Node, Value]:
    return {node: value for node, value in by_node.items() if node in nodes}


def _live(edges: Mapping[fx.Node, tuple[SpanEdge, ...]], outputs: tuple[fx.Node, ...]) -> set[fx.Node]:
    """The nodes that the outputs depend on."""
    live = set(outputs)
    for node in reversed(list(edges)):
        if node in live:
            live.update(edge.source for edge in edges[node])
    return live


def _read(node: fx.Node, relations: Mapping[fx.Node, Relation | Declined]) -> tuple[Relation | Declined, int]:
    """The relation that computes a value, and the index of the value among its outputs."""
    if node.target is operator.getitem:
        call, out = node.args
        return relations[call], out  # type: ignore[index,return-value]
    return relations[node], 0


def _sources(relation: Relation | Declined, node: fx.Node) -> list[tuple[int, fx.Node]]:
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
    for k, source in _sources(relation, node):
        if source in parts and isinstance(relation, Relation):
            candidates.append(follow(relation, k, parts[source], out=out))
        elif source in parts and fake(source).shape == fake(node).shape:
            candidates.append(parts[source])
    known = [part for part in candidates if part is not None]
    alike = [part for part in known if part.axis == known[0].axis]
    return min(alike, key=lambda part: part.inner, default=None)


def _edge(
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


def _scale(edges, scales: Mapping[fx.Node, Fraction], parts, part: Part) -> Fraction:
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
            needed = _through(edge, span, local)
            if needed is not None:
                result[edge.source] = _union(result.get(edge.source), needed)
    return result


def _through(edge: SpanEdge, span: Span, local: bool) -> Span | None:
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
