"""An ONNX file edited in place: it computes and stores only the layouts of its values.

Law: for every value, the new file equals the original at the positions of its layout; the other
positions are known, or nothing reads them. What does not change is copied byte for byte.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from demask.files.onnx.edit.constants import FileConstants
from demask.files.onnx.edit.names import NamedValues, Size
from demask.files.onnx.edit.protos import (
    attributes_of,
    copy_of,
    graph_names,
    graph_reads,
    is_standard,
    op_of,
    set_attribute,
)
from demask.files.onnx.values import numpy_of
from demask.shrink.layout.cells import Layout, Positions, cut_positions

FOUR_BIT, SCALE_BYTES = (21, 22), 4  # types of tensors; bytes of a scale
SLICE_INPUTS, PAD_INPUTS = 10, 11  # op sets since which Slice and Pad take operands
Handle = Callable[["Editor", Any, Sequence[Layout | None]], tuple[Any, Sequence[Layout | None]]]


class Editor:
    """The state of one walk over the nodes of a file.

    model: the file; it is not changed. values: facts and layouts. runtime_values: what the runtime
    computes for some names, for known elements. handle: edits a node. computed: positions of some
    values to compute in addition to those of their layouts. grown: the same, of values that are
    computed anyway, which spares nodes after them. missing: positions that a walk lacks; where
    there are any, its result is of no use. expansions: values of which readers lacked positions,
    for which nodes were inserted, and the layouts that would have spared these.
    """

    def __init__(
        self,
        model: Any,
        named: NamedValues,
        runtime_values: Mapping[str, np.ndarray],
        handle: Handle,
        computed: Mapping[str, Layout] = MappingProxyType({}),
        grown: Mapping[str, Layout] = MappingProxyType({}),
    ):
        self.graph = model.graph
        self.named, self.values = named, named.values
        self.runtime_values, self.handle = runtime_values, handle
        self.constants = FileConstants(model)
        self.opset = next((e.version for e in model.opset_import if is_standard(e)), 1)
        self.outputs = {value.name for value in self.graph.output}
        self.inner_reads = {n for node in self.graph.node for n in graph_reads(node)}
        self.layouts: dict[str, Layout] = {}  # of values that the new file has
        self.renamed: dict[str, str] = {}  # cut values; the name is the complete one's
        self.nodes: list[Any] = []
        self.tensors: dict[str, Any] = {}  # new ones
        self.shared: dict[tuple[Any, ...], str] = {}  # new tensors by contents
        self.cuts: dict[tuple[str, Any], str] = {}  # of constants, by layout or contents
        self.adapted: dict[tuple[str, Layout], str] = {}
        self.overridden: dict[str, Layout] = {}
        self.done: set[str] = set()  # outputs of nodes that were edited with one before them
        self.grown, self.expansions = grown, dict[str, Layout]()
        self.barriers: list[tuple[str, str]] = []  # nodes that are not cut, and why
        self.taken = set(self.constants.names) | graph_names(self.graph)
        self.node_names = {node.name for node in self.graph.node}
        self._types: dict[str, int] | None = None
        self.missing: dict[str, Layout] = {}
        for name, layout in computed.items():
            self._override(name, layout, self._unknown)
        for node in self.graph.node:
            if node.op_type in ("Shape", "Size") and is_standard(node):
                name = node.input[0]
                if name in self.values and self.wanted(name) is None:
                    self._override(name, self._first_positions(name), self._first_positions)

    # values of the original

    def shape(self, name: str) -> tuple[Size, ...]:
        """The original sizes of a value."""
        if name in self.values:
            return self.values[name].shape
        if name in self.constants:
            return self.constants.shape(name)
        require(name in self.named.hosts, f"{name!r} has no known sizes")
        return self.named.hosts[name].shape

    def array(self, name: str) -> np.ndarray:
        """The array of a constant."""
        try:
            return self.constants[name]
        except KeyError:
            raise Unsupported(f"the runtime does not compute constant {name!r}") from None

    def wanted(self, name: str) -> Layout | None:
        """The layout that readers want; None if the value is not computed."""
        layout = self.overridden.get(name, self.values[name].layout)
        if layout is None or name not in self.grown:
            return layout
        return union(self.grown[name], layout, self.shape(name))

    def _override(self, name: str, layout: Layout, rest: Callable[[str], Layout]) -> None:
        """Compute more positions of a value; `rest` are those of operands that are not computed."""
        if name in self.constants or name in self.overridden:
            return
        wanted = self.wanted(name)
        if wanted is not None:
            layout = union(wanted, layout, self.shape(name))
        self.overridden[name] = layout
        producer = self.constants.producers.get(name)
        for operand in producer.input if producer is not None else ():
            if operand in self.values and self.wanted(operand) is None:
                self._override(operand, rest(operand), rest)

    def _first_positions(self, name: str) -> Layout:
        """One position of each axis: of a value of which only the sizes are read."""
        return tuple((0,) if isinstance(n, int) and n > 1 else None for n in self.shape(name))

    def _unknown(self, name: str) -> Layout:
        """The positions of each axis that are not known; those of a known value are all."""
        known = self.values[name].known
        if known.all():
            return self._all(name)
        layout: list[Positions] = []
        for axis, size in enumerate(self.shape(name)):
            rows = np.moveaxis(known, axis, 0).reshape(known.shape[axis], -1)
            positions = np.flatnonzero(~rows.all(1)).tolist()
            layout.append(cut_positions(positions, size) if len(rows) == size else None)
        return tuple(layout)

    def is_known(self, name: str, layout: Layout) -> bool:
        """Whether a value is known at the positions of a layout. If not, they become computed."""
        known = self.values[name].known
        if () in layout:
            return True
        for axis, positions in enumerate(layout):
            if positions is not None and known.shape[axis] != 1:
                known = np.take(known, positions, axis)
        if not known.all():
            self.lacks(name, layout)
        return bool(known.all())

    def lacks(self, name: str, layout: Layout) -> None:
        """Have positions of a value computed in the next walk, without those that are known."""
        pairs = zip(layout, self._unknown(name), self.shape(name), strict=True)
        layout = tuple(
            cut_positions([p for p in all_positions(a, n) if p in set(b)], n) if b is not None else a
            for a, b, n in pairs
        )
        before = self.missing.get(name, self.overridden.get(name))
        if before is not None:
            layout = union(before, layout, self.shape(name))
        self.missing[name] = self._normal(name, layout)

    def fill(self, name: str) -> np.ndarray:
        """The known values of a tensor, 0 where unknown; each dimension is 1 or full."""
        require(name in self.values, f"{name!r} is a size")
        value = self.values[name]
        fill = value.fill.astype(self.dtype(name))
        run = self.runtime_values.get(name)
        if run is None or run.ndim != fill.ndim or not run.size:
            return fill
        run = run[tuple(slice(0, 1) if n == 1 else slice(None) for n in fill.shape)]
        return np.where(value.known, run, fill) if run.shape == fill.shape else fill

    def zeros(self, name: str) -> np.ndarray:
        """Which elements of a tensor are known to be 0; each dimension is 1 or full."""
        if name in self.constants:
            return self.array(name) == 0
        if name not in self.values:
            shape, numbers = self.shape(name), self.named.hosts[name]
            return np.zeros(shape, bool) if numbers.dtype == object else numbers == 0
        return self.values[name].known & (self.fill(name) == 0)

    def dtype(self, name: str) -> np.dtype:
        """The element type of a value."""
        if name in self.runtime_values:
            return self.runtime_values[name].dtype
        return numpy_of(torch.empty(0, dtype=self.values[name].dtype)).dtype

    # new nodes and tensors

    def fresh(self, base: str, suffix: str) -> str:
        """A new name."""
        name, k = f"{base}_{suffix}", 0
        while name in self.taken:
            k += 1
            name = f"{base}_{suffix}{k}"
        self.taken.add(name)
        return name

    def node_name(self, output: str) -> str:
        """A name for a node, which differs from those of all others: that of its output if free."""
        name = output
        while name in self.node_names:
            name = f"{name}_edit"
        self.node_names.add(name)
        return name

    def emit(self, op: str, inputs: Sequence[str], base: str, *, output: str | None = None, **attributes: Any) -> str:
        """Add a node; returns the name of its output."""
        from onnx import helper

        output = self.fresh(base, op.lower()) if output is None else output
        name = self.node_name(output)
        self.nodes.append(helper.make_node(op, inputs, [output], name=name, **attributes))
        return output

    def tensor(self, array: Any, base: str, suffix: str = "demask") -> str:
        """Add a constant, once for equal contents; returns its name."""
        from onnx import numpy_helper

        array = np.asarray(array)
        key = (array.tobytes(), array.shape, array.dtype, suffix == "cut" and base)
        if key not in self.shared:
            name = self.fresh(base, suffix)
            self.tensors[name] = numpy_helper.from_array(array, name)
            self.shared[key] = name
        return self.shared[key]

    def integers(self, values: Sequence[int]) -> str:
        """Add a constant vector of int64."""
        return self.tensor(np.asarray(values, np.int64), "integers")

    def replacement(self, array: np.ndarray, name: str) -> str:
        """A changed constant in place of another, whose name it takes if that has no reader."""
        variant = (name, (array.tobytes(), array.shape))
        if variant not in self.cuts:
            self.cuts[variant] = self.tensor(array, name, "cut")
        return self.cuts[variant]

    def _select(self, name: str, axis: int, positions: Sequence[int], base: str) -> str:
        """Some positions of an axis, by Slice where they have one step."""
        step = positions[1] - positions[0] if len(positions) > 1 else 1
        stop = positions[-1] + 1
        if step > 0 and list(positions) == list(range(positions[0], stop, step)):
            if self.opset >= SLICE_INPUTS:
                bounds = ([positions[0]], [stop], [axis], [step])
                return self.emit("Slice", [name, *map(self.integers, bounds)], base)
            if step == 1:
                starts = [positions[0]]
                return self.emit("Slice", [name], base, starts=starts, ends=[stop], axes=[axis])
        return self.emit("Gather", [name, self.integers(positions)], base, axis=axis)

    def pad_end(self, name: str, rank: int, axis: int, value: Any, base: str, dtype: Any) -> str:
        """One more position at the end of an axis, of one value. Pad takes few types: others are
        converted."""
        from onnx import TensorProto, helper

        pads = [0] * (2 * rank)
        pads[rank + axis] = 1
        if np.dtype(dtype).kind not in "fiu" or (self.opset < PAD_INPUTS and np.dtype(dtype).kind != "f"):
            number = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
            double = self.emit("Cast", [name], base, to=TensorProto.DOUBLE)
            padded = self.pad_end(double, rank, axis, value, base, np.float64)
            return self.emit("Cast", [padded], base, to=number)
        if self.opset < PAD_INPUTS:
            return self.emit("Pad", [name], base, pads=pads, value=float(value))
        constant = self.tensor(np.asarray(value, dtype), "value")
        return self.emit("Pad", [name, self.integers(pads), constant], base)

    # constants and values in other layouts

    def cut(self, name: str, layout: Layout) -> str:
        """The name of a constant at the positions of a layout."""
        layout = self._normal(name, layout)
        if all(positions is None for positions in layout):
            return name
        if (name, layout) not in self.cuts:
            self.cuts[name, layout] = self._new_cut(name, layout)
        return self.cuts[name, layout]

    def _normal(self, name: str, layout: Layout) -> Layout:
        shape = self.shape(name)
        require(len(shape) == len(layout), f"{name!r} has {len(shape)} axes, not {len(layout)}")
        return tuple(
            p if p is None or not isinstance(n, int) else cut_positions(p, n)
            for p, n in zip(layout, shape, strict=True)
        )

    def _new_cut(self, name: str, layout: Layout) -> str:
        from onnx import numpy_helper

        node = self.constants.producers.get(name) if name in self.constants else None
        if name in self.constants.tensors or (node is not None and node.op_type == "Constant"):
            array = self.array(name)
            index = np.ix_(*(all_positions(p, n) for p, n in zip(layout, array.shape, strict=True)))
            new = self.fresh(name, "cut")
            tensor = numpy_helper.from_array(np.ascontiguousarray(array[index]), new)
            self.tensors[new] = tensor
            return new
        operands = None if node is None else _operand_layouts(self, node, layout)
        if node is None or operands is None:
            for axis, positions in enumerate(layout):
                if positions is not None:
                    name = self._select(name, axis, positions, name)
            return name
        copy = copy_of(node)
        if (blocks := _blocks(self, node, layout)) is not None:
            set_attribute(copy, "block_size", blocks[0])
        for k, operand_layout in operands.items():
            copy.input[k] = self.cut(node.input[k], operand_layout)
        copy.output[0] = self.fresh(name, "cut")
        self.nodes.append(copy)
        return copy.output[0]

    def adapt(self, name: str, layout: Layout, *, broadcast: bool = False) -> str:
        """The name of a value at the positions of a layout, converted where it has another.

        broadcast: whether a known value may have axes of size 1, as its reader broadcasts.
        """
        if name in self.constants or name not in self.values:
            return self.cut(name, layout)
        layout = self._normal(name, layout)
        if name not in self.layouts:
            return self._known(name, layout, broadcast)
        if (name, layout) not in self.adapted:
            converted = self.renamed.get(name, name)
            current = list(self.layouts[name])
            both = union(layout, self.layouts[name], self.shape(name))
            if both != self.layouts[name]:
                before = self.expansions.get(name, both)
                self.expansions[name] = union(before, both, self.shape(name))
            for axis, positions in enumerate(layout):
                if current[axis] != positions:
                    converted = self._convert(converted, name, current, axis, positions)
                    current[axis] = positions
            self.adapted[name, layout] = converted
        return self.adapted[name, layout]

    def _known(self, name: str, layout: Layout, broadcast: bool) -> str:
        """A known value as a constant."""
        fill, shape = self.fill(name), self.shape(name)
        if not self.is_known(name, layout):
            return name
        for axis, positions in enumerate(layout):
            if positions is not None and fill.shape[axis] != 1:
                fill = np.take(fill, positions, axis)
        if not broadcast:
            sizes = [n if p is None else len(p) for p, n in zip(layout, shape, strict=True)]
            if not all(isinstance(n, int) for n in sizes):
                self.lacks(name, layout)
                return name
            fill = np.broadcast_to(fill, sizes)
        return self.tensor(fill, name, "known")

    def _convert(self, source: str, name: str, current: Sequence[Positions], axis: int, positions: Positions) -> str:
        """A value with other positions of one axis; known elements replace those it lacks."""
        size = self.shape(name)[axis]
        present, wanted = all_positions(current[axis], size), all_positions(positions, size)
        there = set(present)
        shared = [p for p in wanted if p in there]
        if len(shared) == len(wanted):
            index = {p: k for k, p in enumerate(present)}
            return self._select(source, axis, [index[p] for p in wanted], name)
        if len(shared) < len(present):
            index = {p: k for k, p in enumerate(present)}
            present = shared or present[:1]
            source = self._select(source, axis, [index[p] for p in present], name)
        lacking = tuple(p for p in wanted if p not in set(present))
        if not self.is_known(name, (*current[:axis], lacking, *current[axis + 1 :])):
            return name
        fill = self.fill(name)
        for other in range(fill.ndim):
            now = wanted if other == axis else current[other]
            if now is not None and fill.shape[other] != 1:
                fill = np.take(fill, now, other)
        if fill.shape[axis] == 1:
            fill = np.repeat(fill, len(wanted), axis)
        index = {p: k for k, p in enumerate(present)}
        missing = [k for k, p in enumerate(wanted) if p not in index]
        lacking = np.take(fill, missing, axis)
        is_uniform = bool((lacking == lacking.reshape(-1)[0]).all())
        value = lacking.reshape(-1)[0] if is_uniform else fill.dtype.type(0)
        source = self.pad_end(source, fill.ndim, axis, value, name, fill.dtype)
        source = self._select(source, axis, [index.get(p, len(present)) for p in wanted], name)
        if is_uniform:
            return source
        constant = np.zeros_like(fill)
        where = tuple(missing if k == axis else slice(None) for k in range(fill.ndim))
        constant[where] = lacking
        return self.emit("Add", [source, self.tensor(constant, name, "fill")], name)

    def complete(self, name: str) -> str:
        """The name of a value at all positions."""
        if name in self.constants or name not in self.values:
            return name
        return self.adapt(name, (None,) * len(self.shape(name)))

    # the walk

    def walk(self) -> None:
        """Edit every node, in the file's order."""
        for value in self.graph.input:
            if value.name in self.values:
                self.layouts[value.name] = (None,) * len(self.shape(value.name))
        for node in self.graph.node:
            self._edit(node)
        for value in self.graph.output:
            self._restore(value.name)

    def _edit(self, node: Any) -> None:
        outputs = [name for name in node.output if name]
        if self.done.issuperset(outputs) and outputs:
            return
        if outputs and all(name in self.constants for name in outputs):
            self.nodes.append(node)
            return
        if node.op_type == "Shape" and is_standard(node) and node.input[0] in self.layouts:
            self._edit_shape(node)
            return
        mapped = all(name in self.values for name in outputs)
        wanted = [self.wanted(name) if name in self.values else None for name in node.output]
        if mapped and outputs and all(layout is None for layout in wanted):
            return
        marks = self._mark()
        try:
            require(mapped, "outputs that are no tensors")
            require(outputs[0] not in self.named.opaque, "demask cannot capture it")
            new, layouts = self.handle(self, node, wanted)
            self._record(new, layouts)
        except Unsupported as reason:
            self._roll_back(marks)
            is_opaque = any(name in self.named.opaque for name in outputs)
            if is_opaque or any(p is not None for layout in wanted for p in layout or ()):
                unknown = next((name for name in node.input if name in self.named.opaque), "")
                words = f"it reads {unknown!r}, of which nothing is known" if unknown else str(reason)
                words = f"{op_of(node)} is not understood" if is_opaque and not unknown else words
                self.barriers.append((node.name or outputs[0], words))
            self._leave_uncut(node)

    def _record(self, new: Any, layouts: Sequence[Layout | None]) -> None:
        """Add a node, and the layouts of its outputs."""
        require(len(layouts) == len(new.output), "it has more outputs than its op")
        for k, (name, layout) in enumerate(zip(list(new.output), layouts, strict=True)):
            if not name or layout is None:
                continue
            self.layouts[name] = layout = self._normal(name, layout)
            is_cut = any(positions is not None for positions in layout)
            if is_cut and (name in self.outputs or name in self.inner_reads):
                new.output[k] = self.renamed[name] = self.fresh(name, "cut")
        self.nodes.append(new)

    def _leave_uncut(self, node: Any) -> None:
        copy = copy_of(node)
        for k, name in enumerate(node.input):
            copy.input[k] = self.complete(name) if name else ""
        for name in graph_reads(node):
            self._restore(name)
        layouts = [(None,) * len(self.shape(name)) if name in self.values else None for name in node.output]
        self._record(copy, layouts)

    def _restore(self, name: str) -> None:
        """Give a complete value its own name, where a value of fewer positions was computed."""
        if name not in self.values or name in self.constants:
            return
        if name in self.layouts and name not in self.renamed:
            return
        source = self.complete(name)
        producer = next((node for node in self.nodes[::-1] if source in node.output), None)
        if producer is not None and self.adapted.get((name, self._all(name))) == source:
            producer.output[list(producer.output).index(source)] = name
            self.adapted[name, self._all(name)] = name
        else:
            self.emit("Identity", [source], name, output=name)
        self.layouts[name] = self._all(name)
        self.renamed.pop(name, None)

    def _all(self, name: str) -> Layout:
        return (None,) * len(self.shape(name))

    def _edit_shape(self, node: Any) -> None:
        """The sizes of a value in the original: those of the smaller one, and a difference."""
        name, attributes = node.input[0], attributes_of(node)
        layout, shape = self.layouts[name], self.shape(name)
        lost = [0 if p is None else n - len(p) for p, n in zip(layout, shape, strict=True)]
        lost = lost[attributes.get("start", 0) : attributes.get("end", len(shape))]
        copy = copy_of(node)
        copy.input[0] = self.renamed.get(name, name)
        self.nodes.append(copy)
        if any(lost):
            copy.output[0] = self.fresh(node.output[0], "cut")
            self.emit("Add", [copy.output[0], self.integers(lost)], "", output=node.output[0])

    # the new file

    def result(self, shell: Any) -> Any:
        """The edited file, without nodes and tensors that nothing reads. shell: `shell_of` the
        file."""
        live: set[str] = set(self.outputs)
        nodes: list[Any] = []
        for node in reversed(self.nodes):
            if live & set(node.output) or not node.output:
                nodes.append(node)
                live |= {*filter(None, node.input), *graph_reads(node)}
        nodes.reverse()
        original = self._original_names(live)
        model = copy_of(shell)
        graph = model.graph
        graph.node.extend(_with_names(node, original) for node in nodes)
        tensors = [
            self._in_place_of(original[t.name], t) if t.name in original else t
            for t in (*self.graph.initializer, *self.tensors.values())
            if t.name in live
        ]
        index_of = {t.name: k for k, t in enumerate(self.graph.initializer)}
        tensors.sort(key=lambda t: index_of.get(t.name, len(index_of)))
        graph.initializer.extend(tensors)
        self._update_descriptions(graph, live | {original[n] for n in live & set(original)})
        return model

    def _in_place_of(self, name: str, tensor: Any) -> Any:
        """A new tensor with the name of another one, and what the file says of that."""
        tensor = copy_of(tensor)
        tensor.name = name
        if (replaced := self.constants.tensors.get(name)) is not None:
            tensor.doc_string = replaced.doc_string
            tensor.metadata_props.extend(replaced.metadata_props)
        return tensor

    def _original_names(self, live: set[str]) -> dict[str, str]:
        """The name of each constant that replaces another one everywhere: that of the latter."""
        ways: dict[str, set[str]] = {}
        for (name, _), new in self.cuts.items():
            if new in live and new != name:
                ways.setdefault(name, set()).add(new)
        return {news.copy().pop(): name for name, news in ways.items() if len(news) == 1 and name not in live}

    def _update_descriptions(self, graph: Any, live: set[str]) -> None:
        """Adapt sizes that are stated of values, and remove what is stated of values that went."""
        tensors = {tensor.name: tensor.dims for tensor in graph.initializer}
        present = live | {name for node in graph.node for name in node.output}
        for value in list(graph.value_info):
            sizes = value.type.tensor_type.shape.dim
            if value.name not in present:
                graph.value_info.remove(value)
            elif value.name in tensors:
                _set_sizes(sizes, tensors[value.name])
            elif value.name in self.layouts:
                _set_sizes(sizes, [len(p) if p else None for p in self.layouts[value.name]])
        for value in list(graph.input):  # files of IR version 3 and before list constants
            if value.name in tensors:
                _set_sizes(value.type.tensor_type.shape.dim, tensors[value.name])
            elif value.name in self.constants.tensors:
                graph.input.remove(value)
        for note in list(graph.quantization_annotation):
            if note.tensor_name not in present:
                graph.quantization_annotation.remove(note)
        for tensor in list(graph.sparse_initializer):
            if tensor.values.name not in present:
                graph.sparse_initializer.remove(tensor)

    def _mark(self) -> tuple[int, ...]:
        return tuple(map(len, (self.nodes, *self._caches())))

    def _caches(self) -> tuple[dict[Any, Any], ...]:
        return self.tensors, self.shared, self.cuts, self.adapted, self.expansions

    def _roll_back(self, marks: tuple[int, ...]) -> None:
        """Forget what was added since a mark: lists and dicts only grow."""
        del self.nodes[marks[0] :]
        for added, mark in zip(self._caches(), marks[1:], strict=True):
            while len(added) > mark:
                added.popitem()


def union(a: Layout, b: Layout, shape: Sequence[Size]) -> Layout:
    """The positions of two layouts: in the order of one that has all of them, the first if both
    do, else sorted."""

    def joined(p: Positions, q: Positions, size: Size) -> Positions:
        if p is None or q is None:
            return None
        if set(q) <= set(p):
            return p
        return q if set(p) < set(q) else cut_positions(sorted({*p, *q}), size)

    return tuple(map(joined, a, b, shape))


def _operand_layouts(editor: Editor, node: Any, layout: Layout) -> dict[int, Layout] | None:
    """The layouts of the operands of a node on constants, so that it computes a cut of its output;
    None where that has no rule."""
    if not is_standard(node):
        return None
    if node.op_type in ("Identity", "Cast"):
        return {0: layout}
    attributes = attributes_of(node)
    if node.op_type == "Transpose":
        order = attributes.get("perm") or list(range(len(layout)))[::-1]
        operand: list[Positions] = [None] * len(layout)
        for axis, source in enumerate(order):
            operand[source] = layout[axis]
        return {0: tuple(operand)}
    if node.op_type == "DequantizeLinear":
        layouts, blocks = {0: layout}, _blocks(editor, node, layout)
        for k in range(1, len(node.input)):
            if node.input[k] and (cut := scale_layout(editor, node, k, layout)) is not None:
                if cut == () and blocks is not None:
                    axis = attributes.get("axis", 1) % len(layout)
                    cut = (*layout[:axis], blocks[1], *layout[axis + 1 :])
                layouts[k] = cut
        return None if any(x == () for x in layouts.values()) else layouts
    return None


def _blocks(editor: Editor, node: Any, layout: Layout) -> tuple[int, tuple[int, ...]] | None:
    """For a cut along blocks of positions that share a scale: the new size of blocks, and the old
    block of each new one. None where there are no blocks, or their scales outweigh the cut."""
    attributes, shape = attributes_of(node), editor.shape(node.input[0])
    size, axis = attributes.get("block_size", 0), attributes.get("axis", 1) % max(len(layout), 1)
    positions = layout[axis] if layout else None
    if node.op_type != "DequantizeLinear" or not size or positions is None:
        return None
    of_positions = [p // size for p in positions]
    runs = [(block, len(list(run))) for block, run in itertools.groupby(of_positions)]
    if len({block for block, _ in runs}) < len(runs):
        return None  # in an order that mixes blocks
    *firsts, last = [count for _, count in runs]
    new = math.gcd(*firsts) if firsts else last  # the last block may be shorter
    blocks = tuple(block for block, count in runs for _ in range(-(-count // new)))
    tensor = editor.constants.tensors.get(node.input[0])
    itemsize = 0.5 if tensor is not None and tensor.data_type in FOUR_BIT else 1
    saved = (shape[axis] - len(positions)) * itemsize
    added = (len(blocks) - editor.shape(node.input[1])[axis]) * SCALE_BYTES
    return (new, blocks) if added < saved else None


def scale_layout(editor: Editor, node: Any, k: int, layout: Layout) -> Layout | None:
    """The layout of a scale or zero point (operand k) for a cut of a tensor; None: it stays as it
    is; (): the tensor cannot be cut so, as blocks of positions share a scale."""
    attributes, shape = attributes_of(node), editor.shape(node.input[k])
    axis = attributes.get("axis", 1) % max(len(layout), 1)
    if attributes.get("block_size") and len(shape) == len(layout):
        return () if layout[axis] is not None else layout
    if len(shape) == 1 and shape[0] != 1:
        return (layout[axis],)
    return None


def _with_names(node: Any, names: Mapping[str, str]) -> Any:
    """The node, with other names for some of its values."""
    if not any(name in names for name in (*node.input, *node.output)):
        return node
    node = copy_of(node)
    for values in (node.input, node.output):
        for k, name in enumerate(values):
            values[k] = names.get(name, name)
    return node


def _set_sizes(sizes: Any, new: Sequence[int | None]) -> None:
    for dimension, size in zip(sizes, new, strict=False):
        if size is not None and dimension.dim_value != size:
            dimension.dim_value = size


class Unsupported(Exception):
    """A node that no handler can cut: its operands and outputs are complete."""


def require(condition: object, reason: str) -> None:
    """Raise Unsupported with the reason unless the condition is true."""
    if not condition:
        raise Unsupported(reason)


def all_positions(positions: Positions, size: int) -> list[int]:
    """Positions as a list, those of a complete axis included.

    >>> all_positions(None, 3), all_positions((2, 0), 3)
    ([0, 1, 2], [2, 0])
    """
    return list(range(size)) if positions is None else list(positions)
