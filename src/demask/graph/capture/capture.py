"""Capture: from an nn.Module to a Program, by torch.export, in eval mode, on a copy.

Experts of transformers models. The library runs experts in a Python loop over those that tokens select
("eager"), which cannot be captured, or all in one grouped product, which computes the same. A setting of
the model selects one.

Regions that torch.export stores as separate graphs are inlined: `with torch.no_grad():` in a model exported
with gradients, a disabled autocast. Some calls are specialized to the sizes of the example, although they
need not be: they get symbolic sizes again.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import itertools
import logging
import operator
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from demask.compat.ambient import one_at_a_time
from demask.compat.fake_shapes import shapes_only
from demask.compat.fake_tensors import FakeTensor, export_without_cache
from demask.compat.fx_internals import signature_of
from demask.compat.tracing import without_stack_traces
from demask.errors import BadInput, DemaskError, NotExportable
from demask.graph.capture.errors import DATA_DEPENDENT, check_call, export_error
from demask.graph.capture.export_guards import collect_conditions, describe_ranges, find_violated_guard
from demask.graph.capture.module_state import check_state, watch_attributes
from demask.graph.fake_values import mode_of
from demask.graph.module_copy import buffers_as_numbers, structural_copy, without_caches
from demask.graph.program import Constant, Program
from demask.graph.provenance import Interface
from demask.graph.result.demasked_module import to_exportable
from demask.ops import schema
from demask.ops.schema import fake
from demask.pytree_paths import complete_keys

_ABSENT = object()


@contextlib.contextmanager
def symbolic_sizes(network: nn.Module) -> Iterator[Callable[[], bool]]:
    """Inside, `len` and `take_along_dim` of tensors with dynamic sizes are symbolic: the former in
    the files that define the network's classes. Other calls, also of other threads, are as before.
    The value tells whether there was such a tensor."""
    length, take = len, torch.take_along_dim
    seen: list[Any] = []

    def symbolic_length(value: Any, /) -> Any:
        if isinstance(value, Tensor) and value.ndim and isinstance(value.shape[0], torch.SymInt):
            seen.append(value)
            return value.shape[0]
        return length(value)

    def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None, **out: Any) -> Tensor:
        shapes = [input.shape, indices.shape]
        is_symbolic = any(isinstance(size, torch.SymInt) for shape in shapes for size in shape)
        if not is_symbolic or dim is None or out:
            return take(input, indices, dim, **out)
        seen.append(input)
        before, after = slice(dim % input.ndim), slice(dim % input.ndim + 1, None)
        wide = [torch.broadcast_shapes(*(shape[part] for shape in shapes)) for part in (before, after)]
        x, index = (value.expand(*wide[0], value.shape[dim], *wide[1]) for value in (input, indices))
        return x.gather(dim, index)

    own = {kind.__module__ for module in network.modules() for kind in type(module).__mro__}
    files = [sys.modules[name] for name in own if name in sys.modules and not _is_library(name)]
    patches = [
        (torch, "take_along_dim", take_along_dim),
        (Tensor, "take_along_dim", take_along_dim),
        *((file, "len", symbolic_length) for file in files),
    ]
    with one_at_a_time():
        before = [vars(owner).get(name, _ABSENT) for owner, name, _ in patches]
        try:
            for owner, name, function in patches:
                setattr(owner, name, function)
            yield lambda: bool(seen)
        finally:
            for (owner, name, _), value in zip(patches, before, strict=True):
                if value is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, value)


def _is_library(name: str) -> bool:
    """Whether a module is Python's or torch's."""
    return name.partition(".")[0] in ("torch", "builtins", "typing", "abc", "collections")


_GRAD, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"


def inline_regions(module: fx.GraphModule) -> fx.Graph:
    """The module's graph with regions inlined. Raises NotExportable for a region under an enabled
    autocast, whose casts are in no graph."""
    if _region(module.graph) is None:
        return module.graph
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, mapping)
    graph.output(result)
    while (node := _region(graph)) is not None:
        _inline(graph, node, module)
    return graph


def _region(graph: fx.Graph) -> fx.Node | None:
    """The first call of a region; None if there is none."""
    calls = (node for node in graph.nodes if node.op == "call_function")
    return next((n for n in calls if str(n.target) in (_GRAD, _AUTOCAST)), None)


def _inline(graph: fx.Graph, node: fx.Node, module: fx.GraphModule) -> None:
    """Replace the call of a region by the region's calls."""
    is_autocast = str(node.target) == _AUTOCAST
    if is_autocast and node.args[2]:
        raise NotExportable(
            "a part of the model runs under torch.autocast",
            "unknown",
            "convert the model to the type that autocast would use, or export it without",
        )
    args: Any = node.args[4:] if is_autocast else node.args[1:]
    module_node, *inputs = args
    region: Any = module.get_submodule(str(module_node.target))
    placeholders = [n for n in region.graph.nodes if n.op == "placeholder"]
    mapping: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
    with graph.inserting_before(node):
        output: Any = graph.graph_copy(region.graph, mapping)
    for user in list(node.users):
        if user.target is operator.getitem and isinstance(output, (tuple, list)):
            user.replace_all_uses_with(output[schema.output_of(user)])
            graph.erase_node(user)
    if isinstance(output, fx.Node):
        node.replace_all_uses_with(output)
    graph.erase_node(node)
    if not module_node.users:
        graph.erase_node(module_node)


Export = tuple[ExportedProgram, tuple[str, ...]]  # and notes
NOTE = "experts are computed by grouped products: a loop over the experts that tokens select cannot be captured"


def export_with_grouped_experts(model: nn.Module, exports: Iterator[Export]) -> Iterator[Export]:
    """The exports of a model. A model that loops over its experts uses grouped products during each
    export, which a note states."""
    if not _loops_over_experts(model):
        yield from exports
        return
    while True:
        with _grouped(model):
            export = next(exports, None)
        if export is None:
            return
        yield export[0], (*export[1], NOTE)


def _loops_over_experts(model: Any) -> bool:
    """Whether a model runs its experts in a loop and can use grouped products. (A model without
    experts has the setting, too, and refuses to change it.)"""
    settings = getattr(model, "get_experts_implementation", None)
    if settings is None or "eager" not in settings().values():
        return False
    try:
        with _grouped(model):
            return True
    except ValueError:
        return False


@contextmanager
def _grouped(model: Any) -> Iterator[None]:
    """Experts run by grouped products in the block. The model's settings, which copies share, are
    restored after it."""
    before = model.get_experts_implementation()
    model.set_experts_implementation("grouped_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


_Export = tuple[ExportedProgram, tuple[str, ...]]  # and notes
_LICENCE = (
    "removing 0 · x is exact for finite x: the NaN of 0 · Inf and 0 · NaN is not computed, and "
    "calls that compare or select such values (>, where, sort, argmax, nan_to_num) may return "
    "other numbers"
)


def capture(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Program:
    """The program of `model(*args, **kwargs)`, captured in eval mode; the model is not changed.

    Args:
        dynamic_shapes: None: dimension 0 of the inputs is dynamic if torch.export supports it;
            "all": every dimension for which it does; other values are passed to torch.export.

    Raises:
        NotExportable: with the op, file and line, and what to change.
        BadInput: the model itself fails on the example inputs.
    """
    programs = capture_programs(model, args, kwargs, dynamic_shapes)
    first = next(programs)
    several = itertools.chain([first], programs)
    return next((p for p in several if find_violated_guard(p, args, kwargs) is None), first)


def capture_programs(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    *,
    state: bool = False,
) -> Iterator[Program]:
    """The programs of a call, with the most dynamic sizes first: all (for "all", or those that an
    ONNX file names), those of the batch, none. For other `dynamic_shapes`, only the program with
    these.

    state: whether the network may keep state in Python: the program is that of the first call.
    """
    if isinstance(model, ExportedProgram):
        yield _program(model, (), training=False)
        return
    check_call(model, args, kwargs, dynamic_shapes)
    complete_keys()
    work = to_exportable(without_caches(structural_copy(model, share=True)).eval())
    _name_keywords(work, kwargs or {}, dynamic_shapes)
    interface = recorded_interface(model)
    args, named = _separate(work, args, dict(kwargs or {}))
    changed = watch_attributes(work)
    if dynamic_shapes is None and interface is not None:
        exports = _as_declared(work, args, named, interface)
    else:
        exports = export_with_grouped_experts(work, _exports(work, args, named, dynamic_shapes))
    try:
        for exported, notes in exports:
            if changed and not state:
                notes = (*notes, *check_state(model, (args, named), tuple(changed)))
            yield replace(_program(exported, notes, model.training), interface=interface)
    except NotExportable as error:
        if DATA_DEPENDENT not in error.advice or not (names := buffers_as_numbers(work)):
            raise
        note = f"buffers on which the model's code branches are constants: {', '.join(names)}"
        try:
            numbers = list(_exports(work, args, named, dynamic_shapes))
        except DemaskError:
            advice = f"if that is a buffer ({', '.join(names[:3])}), make it a Python number; "
            raise NotExportable(error.op, error.where, advice + error.advice) from error
        for exported, notes in numbers:
            yield _program(exported, (*notes, note), model.training)


def _separate(work: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The inputs with each tensor once, and none that the model has: torch.export merges them."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    attributes = (vars(module).values() for module in work.modules())
    own = itertools.chain(work.parameters(), work.buffers(), *attributes)
    seen = {id(value) for value in own if isinstance(value, Tensor)}
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and id(leaf) in seen:
            leaves[k] = leaf.detach().clone()  # sizes of one memory would depend on each other
        seen.add(id(leaf))
    return pytree.tree_unflatten(leaves, spec)


def recorded_interface(model: nn.Module) -> Interface | None:
    """The interface of the ONNX file that a network was read from; None for other networks."""
    interface = getattr(getattr(model, "demasked", model), "interface", None)
    return interface if isinstance(interface, Interface) else None


def _exports(work, args, kwargs, dynamic_shapes) -> Iterator[_Export]:
    """The exports of a model, with the most dynamic sizes first, and notes."""
    if callable(dynamic_shapes):
        dynamic_shapes = _dynamic(work, args, kwargs, dynamic_shapes)
    if dynamic_shapes not in (None, "all"):
        try:
            yield _attempt(work, args, kwargs, dynamic_shapes), ()
        except NotExportable as error:
            advice = f'with dynamic_shapes="all", only sizes that may be are dynamic; {error.advice}'
            raise NotExportable(error.op, error.where, advice) from error
        return
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if not any(t.ndim for t in tensors):
        yield _attempt(work, args, kwargs, None), ()
        return
    notes = ("the first dimension of the inputs is static: the model's code depends on its value",)
    for first in (False, True) if dynamic_shapes == "all" else (True,):
        try:
            exported = _dynamically(work, args, kwargs, first=first)
        except (NotExportable, BadInput):
            continue  # Fewer dynamic sizes are tried next; the error shown is that of static sizes.
        if not first or _first_is_dynamic(exported):
            notes = ()
            yield exported, describe_ranges(exported)
    yield _attempt(work, args, kwargs, None), notes


def _as_declared(work: nn.Module, args: Any, kwargs: Any, interface: Interface) -> Iterator[_Export]:
    """The exports whose dynamic sizes are those that an ONNX file names; if torch.export fails,
    only the batch, or all but the batch, or none."""
    check_tensors([*args, *kwargs.values()], interface.inputs)
    ports = [p for p in interface.inputs if p.sizes is not None]
    names = {n for port in ports for n in port.sizes or () if isinstance(n, str)}
    batch = {p.sizes[0] for p in ports if p.sizes and isinstance(p.sizes[0], str)}
    kinds = [names, batch, names - batch] if batch < names else [names]
    for dynamic in filter(None, kinds):
        sized = _sized(args, kwargs, interface, dynamic)
        marks = functools.partial(_dynamic_dims, sized, interface, dynamic)
        shapes = _dynamic(work, *sized, marks)
        exported = None
        with contextlib.suppress(NotExportable):
            exported = _export(work, *sized, shapes)
        if exported is not None and _fits(exported, args, kwargs):
            yield exported, (*describe_ranges(exported), *_fixed_notes(exported, interface))
    exported = _attempt(work, args, kwargs, None)
    yield exported, tuple(_fixed_notes(exported, interface))


def check_tensors(values: Sequence[Any], ports: Sequence[Any]) -> None:
    """Raise BadInput unless there is one tensor per input of the file, of its number of axes."""
    kinds = [type(v).__name__ for v in values if not isinstance(v, Tensor) and v is not None]
    if kinds or len(values) != len(ports):
        raise BadInput(
            f"expected tensors for {[p.name for p in ports]}, got {len(values)} inputs"
            + (
                f", among them {', '.join(kinds)}: a network that takes sequences or text cannot be captured"
                if kinds
                else ""
            )
        )
    for x, port in zip(values, ports, strict=True):
        if x is not None and port.sizes is not None and x.ndim != len(port.sizes):
            raise BadInput(
                f"input {port.name!r}: expected {len(port.sizes)} axes, as the file declares "
                f"({list(port.sizes)}), got {x.ndim} ({list(x.shape)})"
            )


def _sized(args: Any, kwargs: Any, interface: Interface, dynamic: set[str]) -> tuple[Any, Any]:
    """The example with dynamic sizes of two in place of one: torch.export specializes size one."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    for k, (leaf, port) in enumerate(zip(leaves, interface.inputs, strict=True)):
        for axis, size in enumerate(port.sizes or ()):
            if size in dynamic and isinstance(leaf, Tensor) and leaf.shape[axis] == 1:
                leaves[k] = leaf = torch.cat([leaf, leaf], axis)
    return pytree.tree_unflatten(leaves, spec)


def _dynamic_dims(example: Any, interface: Interface, dynamic: set[str], leaf: Tensor) -> Any:
    """The dynamic axes of one tensor of the example, for torch.export."""
    leaves = pytree.tree_leaves(example)
    port = next(p for t, p in zip(leaves, interface.inputs, strict=True) if t is leaf)
    return {axis: Dim.AUTO for axis, size in enumerate(port.sizes or ()) if size in dynamic}


def _fixed_notes(exported: ExportedProgram, interface: Interface) -> Iterator[str]:
    """Notes on sizes that the file names and that the network fixes."""
    users = _user_inputs(exported)
    nodes = [node for node in exported.graph.nodes if node.name in users]
    for node, port in zip(nodes, interface.inputs, strict=True):
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, Tensor) else ()
        for axis, (size, named) in enumerate(zip(sizes, port.sizes or (), strict=False)):
            if isinstance(named, str) and isinstance(_settled(size), int):
                yield (
                    f"size {named!r} (axis {axis} of input {port.name!r}) is static, "
                    f"{_settled(size)}: the network depends on its value"
                )


def _dynamically(work: nn.Module, args: Any, kwargs: Any, *, first: bool) -> ExportedProgram:
    """The export with a dynamic first dimension of every input, or all dimensions dynamic. Batches
    of one are doubled, unless the model needs a size of one next to other batch sizes (positions
    for all texts)."""
    wide = pytree.tree_map(_double_batch_of_one, (args, kwargs))
    pairs = zip(pytree.tree_leaves(wide), pytree.tree_leaves((args, kwargs)), strict=True)
    if any(a is not b for a, b in pairs):
        with contextlib.suppress(NotExportable, BadInput):
            shapes = _dynamic(work, wide[0], wide[1], _auto(first))
            exported = _export(work, wide[0], wide[1], shapes)
            if _fits(exported, args, kwargs):
                return exported
    return _export(work, args, kwargs, _dynamic(work, args, kwargs, _auto(first)))


def _fits(exported: ExportedProgram, args: Any, kwargs: Any) -> bool:
    """Whether the export is valid for the sizes of the example inputs."""
    users = _user_inputs(exported)
    nodes = [node for node in exported.graph.nodes if node.name in users]
    sizes_by_symbol: dict[Any, int] = {}
    for node, leaf in zip(nodes, pytree.tree_leaves((args, kwargs)), strict=True):
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, Tensor) else ()
        for size, actual in zip(map(_settled, sizes), getattr(leaf, "shape", ()), strict=False):
            expected = size if isinstance(size, int) else sizes_by_symbol.setdefault(size.node.expr, actual)
            if expected != actual:
                return False
    return True


def _double_batch_of_one(leaf: Any) -> Any:
    """A leaf; a batch of one is doubled: torch.export specializes size 1."""
    one = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == 1
    return torch.cat([leaf, leaf]) if one else leaf


def _auto(first: bool) -> Callable[[Tensor], Any]:
    """A function that marks the first dimension of a tensor as dynamic, or all dimensions."""
    return lambda leaf: dict.fromkeys(range(1 if first else leaf.ndim), Dim.AUTO)


def _dynamic(work: nn.Module, args: Any, kwargs: Any, marks: Callable[[Tensor], Any]) -> Any:
    """The dynamic shapes for torch.export: the result of `marks` for each tensor input. In place of
    an object of a registered class, torch.export expects those of its children."""

    def is_object(value: Any) -> bool:
        return type(value) in pytree.SUPPORTED_NODES and type(value) not in pytree.BUILTIN_TYPES

    def spec(leaf: Any) -> Any:
        if is_object(leaf):
            children, _ = pytree.SUPPORTED_NODES[type(leaf)].flatten_fn(leaf)
            return pytree.tree_map(spec, children, is_leaf=is_object)
        return marks(leaf) if isinstance(leaf, Tensor) and leaf.ndim else None

    signature = inspect.signature(work.forward)
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise BadInput(f"the example inputs do not fit forward{signature}: {error}") from error
    return pytree.tree_map(spec, bound, is_leaf=is_object)


def _name_keywords(work: nn.Module, kwargs: Mapping[str, Any], dynamic_shapes: Any) -> None:
    """Add the keywords that are passed for `**kwargs` to the signature of forward, in place: torch
    2.13 has no other notation for their dynamic shapes. work: a copy of the caller's model."""
    signature = inspect.signature(work.forward)
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    more = [name for name in kwargs if name not in {p.name for p in named}]
    if len(named) == len(signature.parameters) or not more:
        return
    if isinstance(dynamic_shapes, dict) and not set(more) & set(dynamic_shapes):
        return  # The caller's own notation.
    plain = work.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in more]
    forward.__signature__ = signature.replace(parameters=[*named, *keywords])  # type: ignore[attr-defined]
    work.forward = forward


def _first_is_dynamic(exported: ExportedProgram) -> bool:
    """Whether the first dimension of an input is dynamic."""
    inputs = _user_inputs(exported)
    values = [n.meta.get("val") for n in exported.graph.nodes if n.name in inputs]
    sized = [v for v in values if isinstance(v, Tensor) and v.ndim]
    return any(not isinstance(_settled(v.shape[0]), int) for v in sized)


def _user_inputs(exported: ExportedProgram) -> set[str]:
    """The names of the nodes of the call's inputs."""
    specs = exported.graph_signature.input_specs
    return {s.arg.name for s in specs if s.kind is InputKind.USER_INPUT}


def _attempt(work: nn.Module, args: Any, kwargs: Any, shapes: Any) -> ExportedProgram:
    """The export of a call. Raises NotExportable, or BadInput if the model itself fails."""
    try:
        return _export(work, args, kwargs, shapes)
    except NotExportable:
        _check_runs(work, args, kwargs)
        raise


def _export(work: nn.Module, args: Any, kwargs: Any, shapes: Any) -> ExportedProgram:
    """The export of a call that the model may not accept: nothing but shapes is computed. Raises NotExportable."""
    uncached = export_without_cache()
    with warnings.catch_warnings(), _quiet(), shapes_only(), torch.no_grad(), uncached:
        warnings.simplefilter("ignore")
        with symbolic_sizes(work) as is_used:
            try:
                return torch.export.export(work, args, kwargs, dynamic_shapes=shapes, strict=False)
            except Exception as symbolic:
                error = symbolic
        if is_used():  # some code takes ints alone
            try:
                return torch.export.export(work, args, kwargs, dynamic_shapes=shapes, strict=False)
            except Exception as specialized:
                error = specialized
    raise export_error(error, work) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Export without logs and prints, which the error contains, and without recording the Python
    stack of each call."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()), without_stack_traces():
            yield
    finally:
        logger.setLevel(level)


def _check_runs(work: nn.Module, args: Any, kwargs: Any) -> None:
    """Raise BadInput if the model itself fails on its example inputs."""
    try:
        with torch.no_grad(), _quiet():  # torch.fx prints the code of a graph that fails
            work(*args, **kwargs)
    except Exception as error:
        leaves = pytree.tree_leaves((args, kwargs))
        shapes = [tuple(t.shape) for t in leaves if isinstance(t, Tensor)]
        raise BadInput(
            f"the model itself fails on the example inputs (shapes {shapes}): {type(error).__name__}: {error}"
        ) from error


def _program(exported: ExportedProgram, notes: tuple[str, ...], training: bool) -> Program:
    """The program of an export: parameters and buffers are read by get_attr, not passed in."""
    _refuse_mutation(exported)
    graph, exported_graph = fx.Graph(), inline_regions(exported.graph_module)
    graph.graph_copy(exported_graph, mapping := {})
    result = next(n for n in exported_graph.nodes if n.op == "output")
    specs = {s.arg.name: s for s in exported.graph_signature.input_specs}
    constants: dict[str, Constant] = {}
    tied = _tied(exported)
    inputs = [n for n in exported_graph.nodes if n.op == "placeholder"]
    for node in inputs:
        spec: Any = specs[node.name]
        if spec.kind is InputKind.USER_INPUT:
            if isinstance(spec.arg, ConstantArgument):
                mapping[node].meta["val"] = spec.arg.value
            continue
        if spec.kind is InputKind.CUSTOM_OBJ or spec.kind is InputKind.TOKEN:
            raise NotExportable(
                f"the model contains {spec.arg.name}, no tensor", "unknown", "replace the custom object by tensors"
            )
        constants[spec.target] = replace(_constant(exported, spec), aliases=tied[spec.target])
        with graph.inserting_before(mapping[node]):
            read = graph.create_node("get_attr", spec.target, name=f"{node.name}_")
        read.meta = dict(node.meta)
        mapping[node].replace_all_uses_with(read)
        graph.erase_node(mapping[node])
    values = map_arg(result.args[0], lambda n: mapping[n])
    values = _reread(values, mapping, graph)
    graph.output(tuple(values))
    _tidy(graph)
    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(_settled, fake(node))
    spec = exported.call_spec
    names = _names(exported)
    return Program(
        graph,
        constants,
        spec.in_spec,
        spec.out_spec,
        names,
        (*notes, _LICENCE),
        training,
        collect_conditions(exported, mode_of(graph).shape_env),
    )


def _settled(value: Any) -> Any:
    """A fake value, with ints in the place of symbolic sizes that are fixed to a number."""
    if isinstance(value, torch.SymInt) and value.node.expr.is_number:
        return int(value.node.expr)
    if not isinstance(value, FakeTensor) or not any(_is_fixed(size) for size in value.shape):
        return value
    sizes = [_settled(size) for size in value.shape]
    strides = [_settled(stride) for stride in value.stride()]
    with value.fake_mode:
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)


def _is_fixed(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_number)


def _reread(values, mapping, graph) -> list[Any]:
    """The outputs, where placeholders of constants are replaced by their get_attr nodes."""
    alive = {node.name: node for node in graph.nodes}
    return [
        alive.get(f"{v.name}_", v) if isinstance(v, fx.Node) and v.op == "placeholder" and v.name not in alive else v
        for v in values
    ]


def _tied(exported: ExportedProgram) -> dict[str, tuple[str, ...]]:
    """Per tensor, all names of its memory in the model's order; () if it has only one."""
    kinds = (InputKind.PARAMETER, InputKind.BUFFER)
    names_by_memory: dict[Any, list[str]] = {}
    for spec in exported.graph_signature.input_specs:
        tensor = _tensor(exported, spec) if spec.kind in kinds else None
        if tensor is not None:
            memory = tensor.data_ptr() or id(tensor)  # empty and meta tensors have no address
            key = (spec.kind, memory, tensor.dtype, tensor.shape, tensor.stride())
            names_by_memory.setdefault(key, []).append(str(spec.target))
    groups = [tuple(names) for names in names_by_memory.values() if len(names) > 1]
    return defaultdict(tuple, {name: group for group in groups for name in group})


def _tensor(exported: ExportedProgram, spec: Any) -> Tensor:
    pools = [exported.state_dict, exported.constants]
    return next(pool[spec.target] for pool in pools if spec.target in pool)


def _constant(exported: ExportedProgram, spec: Any) -> Constant:
    tensor = _tensor(exported, spec)
    parameter = isinstance(tensor, nn.Parameter)
    persistent = spec.kind is InputKind.PARAMETER or bool(getattr(spec, "persistent", False))
    return Constant(tensor.detach(), spec.target, parameter, tensor.requires_grad, persistent)


def _refuse_mutation(exported: ExportedProgram) -> None:
    """Raise NotExportable if forward changes a buffer."""
    for spec in exported.graph_signature.output_specs:
        if spec.kind.name == "BUFFER_MUTATION":
            advice = "keep state outside the module: return it and pass it in"
            raise NotExportable(f"buffer {spec.target} is changed by forward", "unknown", advice)


def _names(exported: ExportedProgram) -> tuple[str, ...]:
    """The argument names of forward in the exported module."""
    whole = next((call for call in exported.module_call_graph if not call.fqn), None)
    names = getattr(whole and whole.signature, "forward_arg_names", None)
    if names:
        return tuple(names)
    module = exported.module(check_guards=False)
    return tuple(signature_of(module.graph).orig_args)


_ASSERTS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")


def _tidy(graph: fx.Graph) -> None:
    """Remove assertions, and the sizes that only they read, in place."""
    for node in reversed(list(graph.nodes)):
        name = str(node.target)
        if node.op == "call_function" and not node.users and any(a in name for a in _ASSERTS):
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        pure = node.op == "get_attr" or node.target is operator.getitem or _is_size(node)
        if pure and not node.users:
            graph.erase_node(node)


def _is_size(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, (int, torch.SymInt, torch.SymBool))
