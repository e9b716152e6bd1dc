"""Functionalization: in-place ops become new values.

torch.export emits `y[:, 0] = 0` as slice, select and fill_, whose result no node reads. Every write
becomes a new value of the tensor that it writes to, also through views, and later readers of that
tensor, or of a view of it, read the new value. Calls that are not affected do not change.

Squeezes of dynamic axes, with guards on the sizes.

`squeeze` drops an axis of size one and has no effect on others, so that its output's rank was
determined by the example. The graph states that case explicitly, and its guards refuse other sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from demask.compat.dispatch import OpOverload, base_name, is_mutable, overload_name, schema_of
from demask.compat.fake_tensors import FakeTensorMode
from demask.compat.symbolic_shapes import free_unbacked_symbols
from demask.errors import NotExportable
from demask.graph.editor import GraphEditor
from demask.graph.guards import to_python
from demask.graph.program import Program
from demask.ops import schema
from demask.ops.schema import arguments, draws_random_numbers, fake, same_shape
from demask.ops.traits import SQUEEZES

aten = torch.ops.aten


def squeeze_static_axes(program: Program) -> Program:
    """The program whose squeezes drop only static axes; guards fix the sizes of dynamic ones."""
    if not any(_is_dynamic(node) for node in program.graph.nodes):
        return program
    editor, guards = GraphEditor(program), dict.fromkeys(program.guards)
    for node in filter(_is_dynamic, editor.calls()):
        x: Any = node.args[0]
        shape = fake(x).shape
        with editor.graph.inserting_before(node):
            value = x
            for dim in sorted(_squeezed_dims(node), reverse=True):
                size = shape[dim]
                if isinstance(size, int):
                    value = editor.call(aten.squeeze.dim, value, dim) if size == 1 else value
                    continue
                if free_unbacked_symbols(size):  # data-dependent: torch decides in each call
                    value = editor.call(aten.squeeze.dim, value, dim)
                    continue
                is_one, text = schema.example_size(size) == 1, to_python(size.node.expr)
                if text is not None:
                    guards[f"{text} == 1" if is_one else f"{text} >= 2"] = None
                value = editor.call(aten.select.int, value, dim, 0) if is_one else value
        editor.replace(node, value)
    # In-place calls, whose outputs no node reads, are still in the graph: nothing may be dropped.
    return replace(program, graph=editor.graph, guards=tuple(guards))


def _squeezed_dims(node: fx.Node) -> list[int]:
    """The axes that a squeeze drops if their size is one."""
    rank = fake(node.args[0]).ndim
    dims: Any = schema.arguments(node).get("dim", range(rank))
    return [d % rank for d in ([dims] if isinstance(dims, int) else dims)] if rank else []


def _is_dynamic(node: fx.Node) -> bool:
    """Whether a call squeezes a dynamic axis."""
    if node.target not in SQUEEZES:
        return False
    shape = fake(node.args[0]).shape
    return any(not isinstance(shape[dim], int) for dim in _squeezed_dims(node))


_SAME = {"alias", "detach", "contiguous", "dropout", "feature_dropout", "lift_fresh", "to"}
_RESHAPED = {"view", "reshape", "flatten", "unflatten", "_unsafe_view", "unsqueeze", "squeeze"}
_PERHAPS = {"reshape", "flatten", "unflatten", "contiguous", "to"}  # views only if strides allow it
_SPLITS = {"split", "split_with_sizes", "chunk", "tensor_split", "unbind"}
_MAYBE = {"dropout", "feature_dropout"}  # in eval mode they return their input itself


def functionalize(program: Program, *, writes: bool = False) -> Program:
    """The same program without in-place ops. Raises NotExportable for writes into parameters and
    buffers, and for writes through a view that cannot be inverted.

    writes: whether the program may write to its inputs, whose values after a call it then returns;
    False: NotExportable is raised.
    """
    program = squeeze_static_axes(program)
    if not any(_writes(node) for node in program.graph.nodes):
        return _laid_out(program)
    graph = _pieces(program)
    guards = _one_layout(graph)
    functionalizer = _Functionalizer(program)
    for node in graph.nodes:
        functionalizer.visit(node)
    written = [node for node in functionalizer.version if node.op == "placeholder"]
    if written and not writes:
        first = next(node for node in graph.nodes if _writes(node) and functionalizer.root(node) is written[0])
        raise NotExportable(
            f"input {written[0].target} is changed by forward ({first.target})",
            _where(first),
            f"clone it first: {written[0].target} = {written[0].target}.clone()",
        )
    result = functionalizer.editor.graph.output_node()
    outputs: Any = result.args[0]
    result.args = ((*outputs, *map(functionalizer.read, written)),)
    guards = tuple(dict.fromkeys((*program.guards, *guards)))
    names = (*program.written, *(str(node.target) for node in written))
    return _laid_out(replace(program, graph=functionalizer.editor.graph, guards=guards, written=names))


def _laid_out(program: Program) -> Program:
    """The program whose `as_strided` calls, which depend on memory layout, read row-major copies.
    Raises NotExportable if the model's tensor is not row-major."""
    if not any(node.target is aten.as_strided.default for node in program.graph.nodes):
        return program
    editor = GraphEditor(program)
    for node in editor.calls(aten.as_strided.default):
        x: Any = node.args[0]
        straight = _with_static_sizes(fake(x), _symbols(node)).is_contiguous()
        if not straight or fake(x).storage_offset() != 0:
            raise NotExportable(
                "as_strided of a tensor that is not contiguous",
                _where(node),
                "use x.contiguous().as_strided(...), unfold or indexing",
            )
        with editor.graph.inserting_before(node):
            copy = editor.call(aten.clone.default, x, memory_format=torch.contiguous_format)
        node.replace_input_with(x, copy)
    return editor.finish()


def _pieces(program: Program) -> fx.Graph:
    """The graph with slices in the place of outputs of splits: writes to slices are invertible."""
    editor = GraphEditor(program)
    for node in editor.calls(operator.getitem):
        source = node.args[0]
        if not isinstance(source, fx.Node) or _base_name(source) not in _SPLITS:
            continue
        x, dim = source.args[0], arguments(source)["dim"]
        index: Any = node.args[1]
        with editor.graph.inserting_before(node):
            if _base_name(source) == "unbind":
                part = editor.call(aten.select.int, x, dim, index)
            else:
                start, length = 0, 0
                for k, output in enumerate(fake(source)[: index + 1]):
                    start, length = _add_sizes(editor, start, length), output.shape[dim]
                    if not isinstance(length, int):
                        piece = editor.call(operator.getitem, source, k)
                        length = editor.call(aten.sym_size.int, piece, dim)
                stop = _add_sizes(editor, start, length)
                part = editor.call(aten.slice.Tensor, x, dim, start, stop)
        editor.replace(node, part)
    return editor.graph


def _writes(node: fx.Node) -> bool:
    """Whether a call writes to one of its operands."""
    target = node.target
    return isinstance(target, OpOverload) and is_mutable(target)


def _base_name(node: fx.Node) -> str:
    return base_name(node.target) if _is_op(node) else ""


def _is_op(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload)


def _is_view(node: fx.Node) -> bool:
    """Whether the node's value is a view of its first operand."""
    if node.op != "call_function":
        return False
    if not _is_op(node):
        return _is_part_of_view(node)
    if _base_name(node) in _MAYBE:
        return not draws_random_numbers(node)
    returns = schema_of(node.target).returns
    aliased = bool(returns) and returns[0].alias_info is not None
    return aliased and (_base_name(node) not in _PERHAPS or bool(_shares_memory(node)))


def _is_part_of_view(node: fx.Node) -> bool:
    """Whether a getitem reads a view: outputs of a split are, outputs of a pooling are not."""
    source = node.args[0] if node.target is operator.getitem else None
    if not isinstance(source, fx.Node) or not _is_op(source):
        return False
    returns = schema_of(source.target).returns
    return returns[min(schema.output_of(node), len(returns) - 1)].alias_info is not None


def _shares_memory(node: fx.Node, sizes: Mapping[sympy.Symbol, int] | None = None) -> bool | None:
    """Whether the output of a call that may copy (reshape of a transposed tensor) shares memory
    with its operand. sizes: values of dynamic sizes; default: those of the example. None: the call
    fails for these sizes.
    """
    at = _symbols(node) | dict(sizes or {})
    with FakeTensorMode():
        try:
            values = {n: _with_static_sizes(fake(n), at) for n in node.all_input_nodes}
            output = schema.call_on(node, values.__getitem__)
        except (RuntimeError, ZeroDivisionError):
            return None
    operand = values[schema.source_of(node)]
    return output.untyped_storage()._cdata == operand.untyped_storage()._cdata


def _with_static_sizes(value: Any, at: Mapping[sympy.Symbol, int]) -> Any:
    """A fake value with static sizes and strides: the symbols `at` these values."""
    if not isinstance(value, Tensor):
        return _size_at(value, at)
    sizes, strides = ([_size_at(n, at) for n in ns] for ns in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)


def _size_at(size: Any, at: Mapping[sympy.Symbol, int]) -> Any:
    """The value of a size, the symbols `at` these values."""
    return int(size.node.expr.subs(at)) if isinstance(size, torch.SymInt) else size


def _symbols(node: fx.Node) -> dict[sympy.Symbol, int]:
    """The symbols in the sizes of a call's operands, with their values in the example."""
    values: dict[sympy.Symbol, int] = {}
    for source in node.all_input_nodes:
        value = fake(source)
        sizes = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                known = size.node.shape_env.backed_var_to_val
                values |= {s: int(known.get(s, 2)) for s in size.node.expr.free_symbols}
    return values


def _one_layout(graph: fx.Graph) -> tuple[str, ...]:
    """Guards for which the calls after a write are views if they are views in the example (a
    flattened transposed tensor is one for a single image only). Raises NotExportable if that
    depends on sizes other than 1."""
    parent = {
        node: node.all_input_nodes[0]
        for node in graph.nodes
        if node.all_input_nodes and (_is_view(node) or _base_name(node) in _PERHAPS)
    }

    def root(node: fx.Node) -> fx.Node:
        while node in parent:
            node = parent[node]
        return node

    written = {root(node.all_input_nodes[0]) for node in graph.nodes if _writes(node)}
    guards: dict[str, None] = {}
    for node in parent:
        if _base_name(node) not in _PERHAPS or root(node) not in written:
            continue
        shares = _shares_memory(node)
        for symbol, hint in _symbols(node).items():
            if any(_shares_memory(node, {symbol: n}) not in (shares, None) for n in (2, hint + 1)):
                raise NotExportable(
                    f"a write that reaches {node.target}, which copies for some sizes only",
                    _where(node),
                    "clone the tensor before it is written, or give this size as a static one",
                )
            if _shares_memory(node, {symbol: 1}) not in (shares, None):
                guards[f"{symbol} >= 2"] = None
    return tuple(guards)


class _Functionalizer:
    """Rebuilds the graph node by node. now: the current value of each old node. parent: the operand
    of each view. version: the number of writes to each root; seen: the version that `now` is of."""

    def __init__(self, program: Program):
        self.editor = GraphEditor.empty(program)
        self.now: dict[fx.Node, fx.Node] = {}
        self.parent: dict[fx.Node, fx.Node] = {}
        self.version: dict[fx.Node, int] = {}
        self.seen: dict[fx.Node, int] = {}

    def visit(self, node: fx.Node) -> None:
        """Add the value of an old node, or the new value after its write."""
        if _writes(node):
            last = next(iter(reversed(self.editor.graph.nodes)), None)
            self._write(node)
            self._mark(node, last)
            return
        if _is_view(node):
            self.parent[node] = node.all_input_nodes[0]
        self._set(node, self.editor.graph.node_copy(node, self.read))

    def _mark(self, node: fx.Node, last: fx.Node | None) -> None:
        """Set the module of the nodes after `last` to the module of `node`."""
        stack = node.meta.get("nn_module_stack")
        for added in reversed(self.editor.graph.nodes):
            if added is last or stack is None:
                return
            added.meta.setdefault("nn_module_stack", stack)

    def read(self, node: fx.Node) -> fx.Node:
        """The current value of an old node: views of a written tensor are computed again."""
        if self.seen[node] != self.version.get(self.root(node), 0):
            # An in-place call returns its target; a view is computed again from the new value.
            if _writes(node):
                self._set(node, self.read(self.parent[node]))
            else:
                self._set(node, self.editor.graph.node_copy(node, self.read))
        return self.now[node]

    def _set(self, node: fx.Node, value: fx.Node) -> None:
        self.now[node] = value
        self.seen[node] = self.version.get(self.root(node), 0)

    def root(self, node: fx.Node) -> fx.Node:
        """The tensor that a view of a view is a view of."""
        while node in self.parent:
            node = self.parent[node]
        return node

    def _write(self, node: fx.Node) -> None:
        """Set the new values of an in-place call's target and of the tensors it is a view of."""
        target = node.args[0]
        assert isinstance(target, fx.Node)
        value = self._functional(node, target)
        root = self.root(target)
        if root.op == "get_attr":
            raise NotExportable(
                f"{root.target} is changed by forward ({node.target})",
                _where(node),
                "keep state outside the module: return it and pass it in",
            )
        step = target
        while step in self.parent:
            value = self._write_back(step, self.parent[step], value)
            step = self.parent[step]
        self.version[root] = self.version.get(root, 0) + 1
        self._set(root, value)
        # The in-place call returns its target.
        self.parent[node] = target
        self.now[node], self.seen[node] = self.read(target), self.version[root]

    def _functional(self, node: fx.Node, target: fx.Node) -> fx.Node:
        """The value of the target after the in-place call."""
        editor, old = self.editor, self.read(target)
        name = _base_name(node)
        if name in ("copy_", "fill_", "zero_"):
            value = self._filled(node, old, name)
        else:
            packet = getattr(aten, name.removesuffix("_"), None)
            overload = getattr(packet, overload_name(node.target), None)
            if not name.endswith("_") or overload is None:
                raise NotExportable(
                    f"in-place op {node.target}", _where(node), "use the form that returns a new tensor"
                )
            args, kwargs = map_arg((node.args, node.kwargs), self.read)
            if node.all_input_nodes == [target] and fake(old).is_floating_point():
                # An op of one float tensor, such as an activation: the value has its metadata.
                value = editor.call_shaped(fake(old).shape, old, overload, args, kwargs)
            else:
                value = editor.call(overload, *args, **kwargs)
        if fake(value).dtype != fake(old).dtype:
            value = editor.call(aten.to.dtype, value, fake(old).dtype)
        return value

    def _filled(self, node: fx.Node, old: fx.Node, name: str) -> fx.Node:
        editor = self.editor
        if name == "zero_":
            return editor.call(aten.zeros_like.default, old)
        source = node.args[1]
        if not isinstance(source, fx.Node):
            return editor.call(aten.full_like.default, old, source)
        value = self.read(source)
        if fake(value).dtype != fake(old).dtype:
            value = editor.call(aten.to.dtype, value, fake(old).dtype)
        if same_shape(fake(value), fake(old)):
            return value
        return editor.call(aten.expand.default, value, editor.sizes(old))

    def _write_back(self, view: fx.Node, parent: fx.Node, value: fx.Node) -> fx.Node:
        """The parent with `value` in the place of the elements of a view."""
        name, whole = _base_name(view), self.read(parent)
        whole_slice = name == "slice" and same_shape(fake(value), fake(whole))
        if name in _SAME or name.endswith("_") or whole_slice:
            return value
        if name in _RESHAPED:
            return self.editor.call(aten.reshape.default, value, self.editor.sizes(whole))
        writer: Callable[..., fx.Node] | None = _WRITERS.get(name)
        if writer is None:
            raise NotExportable(
                f"a write through {view.target}",
                _where(view),
                "clone the view, change the clone, and put it back with torch.where or torch.cat",
            )
        return writer(self.editor, self.read(view), whole, value)


def _slice(editor: GraphEditor, view: fx.Node, whole: fx.Node, value: fx.Node) -> fx.Node:
    return editor.call(aten.slice_scatter.default, whole, value, *view.args[1:], **view.kwargs)


def _narrow(editor: GraphEditor, view: fx.Node, whole: fx.Node, value: fx.Node) -> fx.Node:
    args: Any = view.args[1:]
    dim, start, length = args
    if isinstance(start, int) and start < 0:
        start = _add_sizes(editor, editor.sizes(whole)[dim], start)
    end = _add_sizes(editor, start, length)
    return editor.call(aten.slice_scatter.default, whole, value, dim, start, end)


def _select(editor: GraphEditor, view: fx.Node, whole: fx.Node, value: fx.Node) -> fx.Node:
    dim, index = view.args[1:]
    end = None if index == -1 else _add_sizes(editor, index, 1)
    value = editor.call(aten.unsqueeze.default, value, dim)
    return editor.call(aten.slice_scatter.default, whole, value, dim, index, end)


def _add_sizes(editor: GraphEditor, a: Any, b: Any) -> Any:
    return a + b if isinstance(a, int) and isinstance(b, int) else editor.call(operator.add, a, b)


def _permute(editor: GraphEditor, view: fx.Node, whole: fx.Node, value: fx.Node) -> fx.Node:
    axes: Any = view.args[1]
    dims = [dim % len(axes) for dim in axes]
    return editor.call(aten.permute.default, value, [dims.index(k) for k in range(len(dims))])


def _transpose(editor: GraphEditor, view: fx.Node, whole: fx.Node, value: fx.Node) -> fx.Node:
    return editor.call(view.target, value, *view.args[1:])


_WRITERS: dict[str, Callable[..., fx.Node]] = {
    "slice": _slice,
    "narrow": _narrow,
    "select": _select,
    "permute": _permute,
    "transpose": _transpose,
    "t": _transpose,
}


def _where(node: fx.Node) -> str:
    """The module that contains a call, if it is known: "blocks.0 (Attention)"."""
    modules = node.meta.get("nn_module_stack") or {}
    path, kind = list(modules.values())[-1] if modules else ("", "")
    name = str(kind).rpartition(".")[2]
    return f"{path or 'forward'} ({name})" if name else "unknown"
