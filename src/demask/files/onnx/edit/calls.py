"""What a handler of an op reads and changes: one node of the file, and layouts of its operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from demask.files.onnx.edit.editor import Editor, Unsupported, require
from demask.files.onnx.edit.protos import attributes_of, copy_of, graph_reads, op_of, set_attribute
from demask.shrink.layout.cells import Layout


@dataclass(frozen=True)
class NodeEdit:
    """One node while it is edited."""

    editor: Editor
    node: Any  # the original
    new: Any  # its copy, which the handler changes
    wanted: Sequence[Layout | None]  # of each output, the layout that readers want; None where it is not computed

    @cached_property
    def attributes(self) -> dict[str, Any]:
        return attributes_of(self.node)

    @property
    def opset(self) -> int:
        """The version of ONNX's own op set in the file."""
        return self.editor.opset

    @property
    def layout(self) -> Layout:
        """The wanted layout of the first output."""
        layout = self.wanted[0] if self.wanted else None
        if layout is None:
            raise Unsupported("its first output is not computed")
        return layout

    def name(self, k: int) -> str:
        """The name of operand k; "" where the node has none."""
        return self.node.input[k] if k < len(self.node.input) else ""

    def shape(self, k: int) -> tuple[Any, ...]:
        """The original sizes of operand k."""
        return self.editor.shape(self.name(k))

    def constant(self, k: int) -> Any:
        """The array of operand k, which must be constant."""
        require(self.name(k) in self.editor.constants, f"operand {k} is not constant")
        return self.editor.array(self.name(k))

    def adapt(self, k: int, layout: Layout, *, broadcast: bool = False) -> None:
        """Read operand k in another layout."""
        self.new.input[k] = self.editor.adapt(self.name(k), layout, broadcast=broadcast)

    def broadcast(self, k: int, layout: Layout) -> Layout:
        """The layout of operand k, which broadcasts, for a layout of the output."""
        shape = self.shape(k)
        offset = len(layout) - len(shape)
        return tuple(None if n == 1 else layout[a + offset] for a, n in enumerate(shape))

    def replace(self, k: int, name: str) -> None:
        """Read another value as operand k, which may be new."""
        while len(self.new.input) <= k:
            self.new.input.append("")
        self.new.input[k] = name

    def sum_with(self, constant: str, output: str) -> None:
        """Make the sum of the node's output, which has a new name, and a constant the last node."""
        inner = self.new.output[0]
        self.new.output[0], self.new.name = output, self.editor.node_name(f"{output}_sum")
        self.become("Add", [inner, constant])

    def become(self, op: str, inputs: Sequence[str]) -> None:
        """Make the node one of another op without attributes, with its name and outputs."""
        from onnx import helper

        outputs, name = list(self.new.output), self.new.name
        self.new.CopyFrom(helper.make_node(op, inputs, outputs, name=name))

    def axes(self, k: int | None, rank: int, *, name: str = "axes") -> list[int] | None:
        """Axes that are an attribute or, since a later op set, operand k; None: not stated."""
        if name in self.attributes:
            values: Iterable[int] = self.attributes[name]
        elif k is not None and self.name(k):
            values = self.constant(k).reshape(-1).tolist()
        else:
            return None
        return [int(axis) % max(rank, 1) for axis in values]

    def integers(self, k: int, name: str) -> list[int]:
        """Integers that are an attribute or, since a later op set, operand k."""
        return list(self.attributes.get(name) or self.constant(k).reshape(-1).tolist())

    def set(self, name: str, value: Any) -> None:
        set_attribute(self.new, name, value)


UNCHANGED = "\0"  # before the names of operands that no handler has adapted yet
Handler = Callable[[NodeEdit], Sequence[Layout | None]]
"""Changes `new`, a copy of the node, and returns the layout of each output: at the positions of the
layouts, the new node computes what the original one does. Operands that it does not adapt are read
at all positions. Raises Unsupported."""


class Handlers(dict[str, Handler]):
    """Handlers of ONNX's own ops by name."""

    def __call__(self, *names: str) -> Callable[[Handler], Handler]:
        def enter(handler: Handler) -> Handler:
            for name in names:
                if name in self:
                    raise KeyError(f"two handlers of {name}; expected one")
                self[name] = handler
            return handler

        return enter


HANDLERS = Handlers()


def handle(editor: Editor, node: Any, wanted: Sequence[Layout | None]) -> tuple[Any, Sequence[Layout | None]]:
    """The edited node, and the layouts of its outputs. Raises Unsupported."""
    handler = HANDLERS.get(op_of(node))
    if handler is None or graph_reads(node):
        raise Unsupported("no handler")
    edit, start = NodeEdit(editor, node, copy_of(node), wanted), len(editor.nodes)
    edit.new.input[:] = [name and UNCHANGED + name for name in node.input]
    layouts = handler(edit)
    added = editor.nodes[start:]
    for new in (*added, edit.new):
        is_last = len(editor.nodes) == start + len(added)
        for k, name in enumerate(new.input):
            if name.startswith(UNCHANGED):
                require(is_last, "computed operands of a node before its last")
                new.input[k] = editor.complete(name.removeprefix(UNCHANGED))
    return edit.new, layouts
