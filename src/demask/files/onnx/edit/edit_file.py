"""An ONNX file with less in it: edited until nothing more is removed."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from demask.errors import BadInput, NotExportable
from demask.files.atomic_write import write
from demask.files.onnx.check import inputs_of, open_sizes, resized
from demask.files.onnx.edit.bodies import edit_bodies
from demask.files.onnx.edit.constants import evaluated
from demask.files.onnx.edit.convert import with_opset
from demask.files.onnx.edit.editor import Editor, union
from demask.files.onnx.edit.foreign import opaque_outputs
from demask.files.onnx.edit.functions import put_back_calls, write_out_calls
from demask.files.onnx.edit.names import NamedValues, name_values, with_sizes
from demask.files.onnx.edit.ops import handle
from demask.files.onnx.edit.protos import copy_of, graph_reads, shell_of
from demask.files.onnx.edit.refusals import Unsupported
from demask.files.onnx.model import OnnxFile
from demask.files.onnx.read.reader import parse_model, read_with_proto
from demask.files.onnx.values import numpy_of
from demask.files.onnx.write.writer import write_weights
from demask.graph.capture.capture import check_tensors
from demask.ops import Table
from demask.shrink.layout.cells import Layout

PASSES = 4
WORTH = 1.01  # inserted nodes take time: they are to save more than this
GROWTHS = 40  # nodes between a layer and what lacks its positions, at most


@dataclass(frozen=True, slots=True)
class EditedFile:
    """A file, edited.

    model: its ModelProto. nodes: how many nodes it has, of these `unchanged` are those of the
    original, byte for byte. barriers: nodes that are not cut, and why. foreign: ops that demask
    could not capture, by an output. external: tensors that the original stores in other files.
    """

    model: Any
    nodes: int
    unchanged: int
    barriers: tuple[tuple[str, str], ...]
    external: frozenset[str]
    foreign: frozenset[str]


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
    original, external = _loaded(path)
    _check_order(original)
    model, barriers, foreign = _edit_model(original, args, Path(path).parent, table, insert)
    edited = _described(model, original, external)
    return replace(edited, barriers=barriers, foreign=foreign), model is not original


def file_with(path: str | os.PathLike[str], model: Any = None, opset: int | None = None) -> EditedFile:
    """The file at `path` with another model in its place.

    Args:
        path: name of the original.
        model: a ModelProto. Default: that of the file.
        opset: version of ONNX's op set to convert to. Default: that of the model.

    Raises:
        NotExportable: the model cannot be converted.
    """
    original, external = _loaded(path)
    model = original if model is None else model
    model = model if opset is None else with_opset(model, opset)
    return _described(model, original, external)


def _loaded(path: str | os.PathLike[str]) -> tuple[Any, frozenset[str]]:
    """The ModelProto of a valid file with all data, and the names of its external tensors."""
    from onnx import external_data_helper

    model = read_with_proto(path)[1]
    names = [t.name for t in model.graph.initializer if t.data_location == t.EXTERNAL]
    external_data_helper.load_external_data_for_model(model, os.fspath(Path(path).parent))
    return model, frozenset(names)


def _described(model: Any, original: Any, external: frozenset[str]) -> EditedFile:
    """A file that replaces another one."""
    nodes = {node.SerializeToString() for node in original.graph.node}
    unchanged = sum(node.SerializeToString() in nodes for node in model.graph.node)
    return EditedFile(model, len(model.graph.node), unchanged, (), external, frozenset())


_Edit = tuple[Any, tuple[tuple[str, str], ...], frozenset[str]]  # model, barriers, foreign ops


def _edit_model(original: Any, args: Sequence[Tensor], folder: Path, table: Table, insert: bool) -> _Edit:
    """The smaller file; the original where editing removes nothing. Functions that the file defines
    are written out first; if that leads to no smaller file, their calls stay as they are."""

    def edit_body(model: Any, inputs: Sequence[Tensor]) -> Any:
        return _edit_model(model, inputs, folder, table, insert)[0]

    inlined, calls = write_out_calls(original)
    barriers, foreign = (), frozenset()
    for start, written in ((inlined, calls), (original, [])) if calls else ((original, []),):
        feeds = _feeds(parse_model(start, folder), args)
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


def _feeds(file: OnnxFile, args: Sequence[Tensor]) -> dict[str, np.ndarray]:
    check_tensors(args, file.graph.inputs)
    return {port.name: numpy_of(x) for port, x in zip(file.graph.inputs, args, strict=True)}


def edit_once(model: Any, folder: Path, args: Sequence[Tensor], table: Table, *, insert: bool = True) -> _Edit:
    """A file after one walk, nodes that are not cut, and ops that demask could not capture.

    folder: of external tensors. insert: as for `edit_file`.
    """
    shell = shell_of(model)  # before there are more copies of the tensors
    file = parse_model(model, folder)
    feeds = _feeds(file, args)
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

    return *_cheapest(walked, shell, insert), named.opaque


def _name_values(file: OnnxFile, model: Any, args: Sequence[Tensor], table: Table) -> NamedValues:
    """Facts and layouts of the tensors of a file, for all sizes that it leaves open and takes.

    Where torch.export makes one of them static (size 1, or one for which ops compute other axes), a
    larger one may be dynamic; that which the runtime takes no other number for is static.

    Raises:
        NotExportable: another size is static, or the runtime does not take the file.
    """
    outputs = functools.partial(opaque_outputs, model, _feeds(file, args))
    named = name_values(file, args, table, outputs)
    feeds = dict(zip((port.name for port in file.graph.inputs), args, strict=True))
    places = open_sizes(inputs_of(model), feeds)
    producers = {name for node in model.graph.node for name in node.output if name}
    ends = {value.name for value in model.graph.output} & producers

    def is_run(feeds: Mapping[str, Tensor]) -> bool:
        arrays = {name: numpy_of(x) for name, x in feeds.items()}
        return bool(evaluated(model, ends, producers, arrays))

    if named.static and is_run(feeds):
        taken = set()
        for name in sorted(named.static):
            value, axis = places[name][0]
            count = feeds[value].shape[axis]
            others = (resized(feeds, places, {name: n}) for n in (1, count, 1 - count) if n)
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
            f"size {name!r} of {places[name][0][0]!r} is static", "the file", "the file is exported instead"
        )
    return named


def _cheapest(walked: Callable[[Mapping[str, Layout]], Editor], shell: Any, insert: bool) -> tuple[Any, Any]:
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
