"""An ONNX file with less in it: edited until nothing more is removed.

Branches of `If` and bodies of loops are edited as files of their own: what they read from the graph
around them, and what they return, is not cut. Calls of functions that the file defines are written out to
be edited, and put back unchanged.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput, DemaskError, Mismatch, NotExportable
from demask.failures import is_strict
from demask.files.atomic_write import write
from demask.files.onnx.check import Judge, inputs_of, open_sizes, resized
from demask.files.onnx.edit.constants import evaluated
from demask.files.onnx.edit.editor import Editor, Unsupported, union
from demask.files.onnx.edit.foreign import declared_types, opaque_outputs
from demask.files.onnx.edit.names import NamedValues, name_values, with_sizes
from demask.files.onnx.edit.ops import handle
from demask.files.onnx.edit.protos import (
    attributes_of,
    copy_of,
    graph_names,
    graph_reads,
    is_standard,
    op_of,
    outer_reads,
    rename,
    shell_of,
    subgraphs,
    tensors_of,
    with_opset,
)
from demask.files.onnx.model import OnnxFile
from demask.files.onnx.read.reader import parse_model, read_with_proto
from demask.files.onnx.values import numpy_of
from demask.files.onnx.write.writer import write_weights
from demask.graph.capture.capture import check_tensors
from demask.ops import Table
from demask.shrink.layout.cells import Layout

LEAST_BYTES = 4096  # of tensors in a body that is worth an edit of its own
Arrays = Mapping[str, np.ndarray]
EditModel = Callable[[Any, Sequence[Tensor]], Any]
PASSES = 4
WORTH = 1.01  # inserted nodes take time: they are to save more than this
GROWTHS = 40  # nodes between a layer and what lacks its positions, at most
_Edit = tuple[Any, tuple[tuple[str, str], ...], frozenset[str]]  # model, barriers, foreign ops


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call, and the nodes that it was replaced with."""

    call: Any
    nodes: tuple[Any, ...]


def write_out_calls(model: Any) -> tuple[Any, list[WrittenCall]]:
    """The file with the bodies of functions in place of their calls. Calls stay of a body of
    another op set."""
    functions = {_message_key(function, function.name): function for function in model.functions}
    if not functions:
        return model, []
    new, calls = copy_of(model), []
    taken = graph_names(model.graph) | {node.name for node in model.graph.node}
    del new.graph.node[:]
    for node in model.graph.node:
        nodes = list(_written_out(node, functions, new, taken))
        if nodes != [node]:
            calls.append(WrittenCall(node, tuple(nodes)))
        new.graph.node.extend(nodes)
    return new, calls


def put_back_calls(model: Any, calls: Sequence[WrittenCall], original: Any) -> Any:
    """The file with the calls whose nodes are unchanged, without functions that nothing calls."""
    index_of = {node.SerializeToString(): k for k, node in enumerate(model.graph.node)}
    nodes: dict[int, Any] = dict(enumerate(model.graph.node))
    for call in calls:
        at = [index_of.get(node.SerializeToString(), -1) for node in call.nodes]
        if min(at) >= 0:
            nodes = {k: node for k, node in nodes.items() if k not in at} | {max(at): call.call}
    new = copy_of(model)
    del new.graph.node[:], new.functions[:]
    new.graph.node.extend(nodes[k] for k in sorted(nodes))
    unused = _called_functions(original.graph.node, original) - _called_functions(new.graph.node, original)
    new.functions.extend(f for f in original.functions if _message_key(f, f.name) not in unused)
    return new


def _message_key(proto: Any, name: str) -> tuple[str, str, str]:
    return "" if is_standard(proto) else proto.domain, name, proto.overload


def _called_functions(nodes: Collection[Any], model: Any) -> set[tuple[str, str, str]]:
    """The functions that nodes call, directly or not."""
    functions = {_message_key(function, function.name): function for function in model.functions}
    called, queue = set(), list(nodes)
    while queue:
        node = queue.pop()
        key = _message_key(node, node.op_type)
        if key in functions and key not in called:
            called.add(key)
            queue += functions[key].node
        queue += [inner for graph in subgraphs(node) for inner in graph.node]
    return called


def _written_out(node: Any, functions: dict[Any, Any], model: Any, taken: set[str]) -> Iterator[Any]:
    """A node, or the nodes of the function that it calls. taken: names of the file; it grows."""
    function = functions.get(_message_key(node, node.op_type))
    if function is None or not _fits_declaration(function, model):
        yield node
        return
    names = dict(zip(function.output, node.output, strict=False))
    names = {formal: actual for formal, actual in names.items() if actual}
    names |= {name: node.input[k] if k < len(node.input) else "" for k, name in enumerate(function.input)}
    values = {a.name: a for a in (*function.attribute_proto, *node.attribute)}
    prefix = next(filter(None, node.output))  # which no other node has

    def fresh(name: str) -> str:
        name = f"{prefix}/{name}"
        while name in taken:
            name += "_"
        taken.add(name)
        return name

    for inner in function.node:
        copy = copy_of(inner)
        copy.name = fresh(inner.name) if inner.name else ""
        for k, name in enumerate(inner.input):
            copy.input[k] = names.get(name, name)
        for k, name in enumerate(inner.output):
            if name and name not in names:
                names[name] = fresh(name)
            copy.output[k] = names[name] if name else ""
        _bind(copy, values)
        for graph in subgraphs(copy):
            inner_names = sorted(graph_names(graph) - {"", *names})
            rename(graph, names | {name: fresh(name) for name in inner_names})
        yield from _written_out(copy, functions, model, taken)


def _bind(node: Any, values: Mapping[str, Any]) -> None:
    """Give attributes that are those of the function the values of the call, in place."""
    attributes = [copy_of(attribute) for attribute in node.attribute]
    del node.attribute[:]
    for attribute in attributes:
        if not attribute.ref_attr_name:
            node.attribute.append(attribute)
        elif attribute.ref_attr_name in values:
            node.attribute.append(values[attribute.ref_attr_name])
            node.attribute[-1].name = attribute.name
    for graph in subgraphs(node):
        for inner in graph.node:
            _bind(inner, values)


def _fits_declaration(function: Any, model: Any) -> bool:
    """Whether the body can stand in the main graph."""
    versions = {e.domain: e.version for e in model.opset_import}
    if any(versions.get(e.domain, e.version) != e.version for e in function.opset_import):
        return False
    computed = {name for node in function.node for name in node.output}
    if not computed.issuperset(function.output):
        return False
    model.opset_import.extend(e for e in function.opset_import if e.domain not in versions)
    return True


def edit_bodies(model: Any, feeds: Arrays, edit: EditModel) -> Any:
    """The file with smaller bodies, or the file itself. edit: returns a smaller file, or the same
    one, for example inputs."""
    stored = {t.name: t for t in model.graph.initializer}
    bodies = [
        (k, j)
        for k, node in enumerate(model.graph.node)
        for j, body in enumerate(subgraphs(node))
        if sum(t.ByteSize() for t in tensors_of(body))
        + sum(stored[n].ByteSize() for n in set(outer_reads(body)) & set(stored))
        > LEAST_BYTES
    ]
    if not bodies:
        return model
    new, taken = copy_of(model), graph_names(model.graph)
    producers = {name for node in model.graph.node for name in node.output if name}
    reads = {n for k, j in bodies for n in outer_reads(subgraphs(model.graph.node[k])[j])}
    reads |= {name for k, _ in bodies for name in model.graph.node[k].input}
    computed = evaluated(model, reads & producers, producers, feeds)
    arrays, types = {**computed, **feeds}, declared_types(model, infer=bool(computed))
    for k, j in bodies:
        body = subgraphs(new.graph.node[k])[j]
        part = _as_file(model, model.graph.node[k], body, arrays, types)
        if part is None:
            continue
        file, inputs = part
        try:
            judge = Judge.of_file(file.SerializeToString(), inputs)
            if judge.original.outputs(inputs, optimized=True) is None:
                continue
            smaller = edit(file, inputs)
            if smaller is file:
                continue
            judge.compare(smaller.SerializeToString())
        except DemaskError as error:  # it stays as it is
            if is_strict() and isinstance(error, Mismatch):
                raise
            continue
        _put_back(body, smaller.graph, stored, taken)
    live = {n for node in new.graph.node for n in (*node.input, *graph_reads(node))}
    live |= {value.name for value in new.graph.output}
    for tensor in list(new.graph.initializer):
        if tensor.name not in live:
            new.graph.initializer.remove(tensor)
    return new if new.ByteSize() < model.ByteSize() else model


def _as_file(
    model: Any, node: Any, body: Any, arrays: Arrays, types: Mapping[str, Any]
) -> tuple[Any, tuple[Tensor, ...]] | None:
    """A body as a file, and example inputs. None where these are not known."""
    from onnx import ModelProto, helper

    examples = _body_inputs(node, body, arrays)
    stored = {t.name: t for t in model.graph.initializer}
    file = ModelProto(ir_version=model.ir_version)
    file.opset_import.extend(model.opset_import)
    file.functions.extend(model.functions)
    file.graph.CopyFrom(body)
    del file.graph.input[:]
    for name in dict.fromkeys(outer_reads(body)):
        if name in stored:
            file.graph.initializer.append(stored[name])
        else:
            examples.append((name, arrays.get(name), types.get(name, (0, None))[1]))
    for name, array, dims in examples:
        if array is None or array.dtype.kind not in "fiub":
            return None
        dims = dims if dims is not None and len(dims) == array.ndim else [None] * array.ndim
        sizes = [n or f"{name}.{axis}" for axis, n in enumerate(dims)]
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        file.graph.input.append(helper.make_tensor_value_info(name, kind, sizes))
    computed = {name for inner in file.graph.node for name in inner.output}
    if not computed.issuperset(value.name for value in file.graph.output):
        return None
    return file, tuple(torch.from_numpy(np.array(array)) for _, array, _ in examples)


def _body_inputs(node: Any, body: Any, arrays: Arrays) -> list[tuple[str, Any, Any]]:
    """Names, examples and sizes of the inputs of a loop's body: those of its first step."""
    values: list[Any] = [arrays.get(name) for name in node.input]
    if not is_standard(node) or node.op_type not in ("Loop", "Scan"):
        values = []
    elif node.op_type == "Loop":
        values = [np.array(0, np.int64), np.array(True), *values[2:]]
    else:
        attributes = attributes_of(node)
        count = attributes["num_scan_inputs"]
        axes = attributes.get("scan_input_axes") or [0] * count
        slices = [
            x if x is None else x.take(0, a) if x.shape[a] else None for x, a in zip(values[-count:], axes, strict=True)
        ]
        values = [*values[:-count], *slices]
    inputs = []
    for k, value in enumerate(body.input):
        shape = value.type.tensor_type.shape
        dims = [d.dim_value or d.dim_param or None for d in shape.dim]
        array = values[k] if k < len(values) else None
        inputs.append((value.name, array, dims if len(dims) else None))
    return inputs


def _put_back(body: Any, edited: Any, stored: Mapping[str, Any], taken: set[str]) -> None:
    """Replace a body by an edited one, in place. Tensors of the graph around it that were not cut
    are read from there; new names differ from all others in the file, and are added to `taken`."""
    before, inputs = graph_names(body), list(body.input)
    new = copy_of(edited)
    del new.input[:], new.initializer[:]
    new.input.extend(inputs)
    names: dict[str, str] = {}
    for tensor in edited.initializer:
        if tensor != stored.get(tensor.name):
            new.initializer.append(tensor)
            if tensor.name in stored:
                names[tensor.name] = tensor.name
    names |= {name: name for name in graph_names(new) - before if name in taken}
    for name in names:
        while names[name] in taken:
            names[name] += "_"
        taken.add(names[name])
    taken |= graph_names(new)
    rename(new, names)
    body.CopyFrom(new)


@dataclass(frozen=True, slots=True)
class EditedFile:
    """A file, edited."""

    model: Any  # its ModelProto
    nodes: int  # how many it has
    unchanged: int  # how many of these are those of the original, byte for byte
    barriers: tuple[tuple[str, str], ...]  # nodes that are not cut, and why
    external: frozenset[str]  # tensors that the original stores in other files
    foreign: frozenset[str]  # ops that demask could not capture, by an output; not those that read such outputs


def edit_file(
    path: str | os.PathLike[str], args: Sequence[Tensor], table: Table, *, insert: bool = True
) -> EditedFile | None:
    """The smaller file; None where editing removes nothing. Arguments and errors as `examine`."""
    edited, is_smaller = examine(path, args, table, insert=insert)
    return edited if is_smaller else None


def examine(
    path: str | os.PathLike[str], args: Sequence[Tensor], table: Table, *, insert: bool = True
) -> tuple[EditedFile, bool]:
    """The edited file, and whether it is smaller; if not, it is the original, with its barriers.

    Args:
        path: name of the file, which is not changed.
        args: example inputs.
        table: of ATen ops.
        insert: whether nodes that add and order positions may be inserted, where that is smaller
            than computing these positions.

    Raises:
        BadInput: the file cannot be read, or has what no edit preserves.
        RefusedFile: the file has contents out of bounds.
        NotExportable: the file cannot be captured with the dynamic sizes that it declares.
    """
    original, external = _load_with_data(path)
    _check_order(original)
    model, barriers, foreign = _edit_model(original, args, Path(path).parent, table, insert)
    edited = _describe_file(model, original, external)
    return replace(edited, barriers=barriers, foreign=foreign), model is not original


def file_with(path: str | os.PathLike[str], model: Any = None, opset: int | None = None) -> EditedFile:
    """The file at `path` with another model.

    Args:
        path: name of the original.
        model: a ModelProto. Default: that of the file.
        opset: version of ONNX's op set to convert to. Default: that of the model.

    Raises:
        NotExportable: the model cannot be converted.
    """
    original, external = _load_with_data(path)
    model = original if model is None else model
    model = model if opset is None else with_opset(model, opset)
    return _describe_file(model, original, external)


def _load_with_data(path: str | os.PathLike[str]) -> tuple[Any, frozenset[str]]:
    """The ModelProto of a valid file with all data, and the names of its external tensors."""
    from onnx import external_data_helper

    model = read_with_proto(path)[1]
    names = [t.name for t in model.graph.initializer if t.data_location == t.EXTERNAL]
    external_data_helper.load_external_data_for_model(model, os.fspath(Path(path).parent))
    return model, frozenset(names)


def _describe_file(model: Any, original: Any, external: frozenset[str]) -> EditedFile:
    """A file that replaces another one."""
    nodes = {node.SerializeToString() for node in original.graph.node}
    unchanged = sum(node.SerializeToString() in nodes for node in model.graph.node)
    return EditedFile(model, len(model.graph.node), unchanged, (), external, frozenset())


def _edit_model(original: Any, args: Sequence[Tensor], folder: Path, table: Table, insert: bool) -> _Edit:
    """The smaller file; the original where editing removes nothing. Functions that the file defines
    are written out first; if that leads to no smaller file, their calls stay as they are."""

    def edit_body(model: Any, inputs: Sequence[Tensor]) -> Any:
        return _edit_model(model, inputs, folder, table, insert)[0]

    inlined, calls = write_out_calls(original)
    barriers, foreign = (), frozenset()
    for start, written in ((inlined, calls), (original, [])) if calls else ((original, []),):
        feeds = _example_feeds(parse_model(start, folder), args)
        model = edit_bodies(start, feeds, edit_body)
        for k in range(PASSES):
            smaller, whole_nodes, opaque = edit_once(model, folder, args, table, insert=insert)
            if k == 0:
                barriers, foreign = whole_nodes, opaque
            if smaller.ByteSize() >= model.ByteSize():
                break
            model = smaller
            if not whole_nodes:  # all that readers do not want is cut
                break
        if model is not start:
            model = put_back_calls(model, written, original) if written else model
            if model.ByteSize() < original.ByteSize():
                return model, barriers, foreign
    return original, barriers, foreign


def _example_feeds(file: OnnxFile, args: Sequence[Tensor]) -> dict[str, np.ndarray]:
    check_tensors(args, file.graph.inputs)
    return {port.name: numpy_of(x) for port, x in zip(file.graph.inputs, args, strict=True)}


def edit_once(model: Any, folder: Path, args: Sequence[Tensor], table: Table, *, insert: bool = True) -> _Edit:
    """A file after one walk, nodes that are not cut, and ops that demask could not capture.

    folder: of external tensors. insert: as for `edit_file`.
    """
    shell = shell_of(model)  # before there are more copies of the tensors
    file = parse_model(model, folder)
    feeds = _example_feeds(file, args)
    named = _name_values(file, model, args, table)
    names = {name for name, v in named.values.items() if (v.known & (v.fill != 0)).any()}
    names -= set(feeds)
    producers = {n for node in model.graph.node for n in node.output if n}
    run = evaluated(model, names & producers, producers, feeds)
    computed: dict[str, Layout] = {}

    def walked(grown: Mapping[str, Layout]) -> Editor:
        while True:
            editor = Editor(model, named, run, handle, computed, grown)
            try:
                editor.walk()
            except Unsupported as reason:
                raise BadInput(f"the file cannot be edited: {reason}") from reason
            if not editor.missing:
                return editor
            if all(computed.get(name) == layout for name, layout in editor.missing.items()):
                raise BadInput(f"no value for {min(editor.missing)!r}")
            computed.update(editor.missing)

    follow = {name for n in model.graph.node if not named.opaque.isdisjoint(n.input) for name in n.output}
    return *_cheapest_edit(walked, shell, insert), named.opaque - follow


def _name_values(file: OnnxFile, model: Any, args: Sequence[Tensor], table: Table) -> NamedValues:
    """Facts and layouts of the tensors of a file, for all sizes that it leaves open and takes.

    Where torch.export makes one of them static (size 1, or one for which ops compute other axes), a
    larger one may be dynamic; that which the runtime takes no other number for is static.

    Raises:
        NotExportable: another size is static, or the runtime does not take the file.
    """
    outputs = functools.partial(opaque_outputs, model, _example_feeds(file, args))
    named = name_values(file, args, table, outputs)
    feeds = dict(zip((port.name for port in file.graph.inputs), args, strict=True))
    axes_of = open_sizes(inputs_of(model), feeds)
    producers = {name for node in model.graph.node for name in node.output if name}
    ends = {value.name for value in model.graph.output} & producers

    def is_run(feeds: Mapping[str, Tensor]) -> bool:
        arrays = {name: numpy_of(x) for name, x in feeds.items()}
        return bool(evaluated(model, ends, producers, arrays))

    if named.static and is_run(feeds):
        taken = set()
        for name in sorted(named.static):
            value, axis = axes_of[name][0]
            count = feeds[value].shape[axis]
            others = (resized(feeds, axes_of, {name: n}) for n in (1, count, 1 - count) if n)
            if (other := next(filter(is_run, others), None)) is not None:
                taken.add(name)
                feeds = other
        if not taken:
            return named
        file = with_sizes(file, {n: x.shape for n, x in feeds.items()}, named.static - taken)
        named = name_values(file, tuple(feeds.values()), table, outputs)
    if named.static:
        name = min(named.static)
        raise NotExportable(
            f"size {name!r} of {axes_of[name][0][0]!r} is static", "the file", "the file is exported instead"
        )
    return named


def _cheapest_edit(walked: Callable[[Mapping[str, Layout]], Editor], shell: Any, insert: bool) -> tuple[Any, Any]:
    """The smallest file, and nodes that are not cut.

    Where a reader lacks positions of a value, nodes are inserted, or the nodes before compute these
    positions, up to the layers, whose masked rows stay.

    insert: False for the latter in any case.
    """
    editor = walked({})
    best = result, barriers = editor.result(shell), tuple(editor.barriers)
    least = size = result.ByteSize()
    grown: dict[str, Layout] = {}
    for _ in range(GROWTHS):  # each walk moves what is inserted to the nodes before
        more = {
            name: union(grown.get(name, layout), layout, editor.shape(name))
            for name, layout in editor.expansions.items()
        }
        if all(grown.get(name) == layout for name, layout in more.items()):
            break
        grown |= more
        editor = walked(grown)
        result, barriers = editor.result(shell), tuple(editor.barriers)
        if (size := result.ByteSize()) <= least:
            best, least = (result, barriers), size
    return best if insert and least * WORTH < size else (result, barriers)


def _check_order(model: Any) -> None:
    """Raise BadInput unless every node follows those that it reads."""
    known = {t.name for t in model.graph.initializer} | {v.name for v in model.graph.input}
    known |= {t.values.name for t in model.graph.sparse_initializer}
    for node in model.graph.node:
        late = {name for name in (*node.input, *graph_reads(node)) if name} - known
        if late:
            raise BadInput(f"node {node.name!r} reads {min(late)!r} before it is computed")
        known |= set(node.output)


def save_edited(edited: EditedFile, path: str | os.PathLike[str]) -> None:
    """Write an edited file, tensors that were in other files to one in its folder."""
    model = edited.model
    external = [t for t in model.graph.initializer if t.name in edited.external]
    if external:
        from onnx import external_data_helper

        model = copy_of(model)
        external = [t for t in model.graph.initializer if t.name in edited.external]
        data = [functools.partial(bytes, tensor.raw_data) for tensor in external]
        weights, ranges = write_weights(Path(path), data)
        for tensor, (offset, length) in zip(external, ranges, strict=True):
            external_data_helper.set_external_data(tensor, weights.name, offset, length)
            tensor.ClearField("raw_data")
    with write(path) as file:
        file.write(model.SerializeToString())


@dataclass(frozen=True, slots=True)
class NodeChange:
    """One node that an edit changes. node: its name, or that of its first output. op: with its
    domain unless that is ONNX's own. change: what becomes of it and its tensors."""

    node: str
    op: str
    change: str


def changes_of(original: Any, edited: Any) -> Iterator[NodeChange]:
    """The nodes of a ModelProto that another one has in another form, in order; then new ones."""
    before, after = _initializers(original), _initializers(edited)
    nodes = {_key_name(node): node for node in edited.graph.node}
    for node in original.graph.node:
        new = nodes.pop(_key_name(node), None)
        if new is None:
            yield NodeChange(_node_name(node), op_of(node), "removed")
            continue
        words = [
            _describe_cut(before[a], after[b])
            for a, b in zip(node.input, new.input, strict=False)
            if a in before and b in after
        ]
        words = [word for word in words if word]
        if not words and node.SerializeToString() != new.SerializeToString():
            is_cut = subgraphs(node) != subgraphs(new)
            words = ["its bodies are cut" if is_cut else "reads other values, or has other attributes"]
        if words:
            yield NodeChange(_node_name(node), op_of(node), "; ".join(words))
    for node in nodes.values():
        yield NodeChange(_node_name(node), op_of(node), "added")


def _initializers(model: Any) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in model.graph.initializer}


def _describe_cut(a: Any, b: Any) -> str:
    """How a tensor differs; empty if it does not."""
    old, new = list(a.dims), list(b.dims)
    if old != new:
        share = math.prod(new) / max(math.prod(old), 1)
        return f"{a.name} {old} -> {new} ({100 * share:.0f} %)"
    return "" if _tensor_bytes(a) == _tensor_bytes(b) else f"{a.name} {old}: other values"


def _tensor_bytes(tensor: Any) -> bytes:
    """The contents of a tensor, which may be raw data or lists of numbers."""
    from onnx import numpy_helper

    return tensor.raw_data or numpy_helper.to_array(tensor).tobytes()


def _key_name(node: Any) -> str:
    return next(filter(None, node.output), node.name)


def _node_name(node: Any) -> str:
    return node.name or _key_name(node)
