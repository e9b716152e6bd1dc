"""Images with their channels last in memory, where their convolutions are faster so.

The same numbers in another order: oneDNN need not reorder them around each call, and a narrow
layer is not rounded up to whole vectors of channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from demask.compat.onednn import ops
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.queries import COPY, input_dependent, is_pointwise
from demask.ops import Table, traits
from demask.tune.module.buffer_assignment import fresh

aten = torch.ops.aten
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
CONVOLUTIONS = {
    op for op, axes in (traits.CONVOLUTIONS | traits.TRANSPOSED_CONVOLUTIONS).items() if axes > 1
}
Wants = Callable[[fx.Node], bool]  # should this convolution have its channels last?


def convolves(node: fx.Node) -> bool:
    """Is a call a convolution of images, with an epilogue or without?"""
    pointwise = ops()._convolution_pointwise
    return is_image(node) and (
        node.target in CONVOLUTIONS or node.target in (pointwise.default, pointwise.binary)
    )


def is_image(node: fx.Node) -> bool:
    """Is a value an image or a volume, with a batch and channels?"""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.ndim in FORMATS


def movable(program: Program) -> bool:
    """May images be laid out anew? Not where a call speaks of memory itself."""
    return not any(n.target is aten.as_strided.default for n in program.graph.nodes)


def laid_out(program: Program, wants: Wants, table: Table) -> Program:
    """The program with channels last where `wants` says so; what it returns is laid out as before.

    Views that other strides would refuse have become reshapes (`affine.absorbed`).
    """
    editor = GraphEditor(program)
    layout = _ChannelsLast(editor, table)
    for node in editor.calls():
        if node not in layout.live or not is_image(node):
            continue
        if convolves(node):
            layout.settle(node, wants(node))
        elif layout.continues(node):
            layout.settle(node, True)
    layout.restore()
    return editor.finish()


class _ChannelsLast:
    """Which values have their channels last, while a graph is walked."""

    def __init__(self, editor: GraphEditor, table: Table):
        self.editor, self.table = editor, table
        self.live = input_dependent(editor.graph)
        self.last: set[fx.Node] = set()
        self.made: dict[tuple[fx.Node, bool], fx.Node] = {}

    def continues(self, node: fx.Node) -> bool:
        """Does a call keep the layout of its operands, some of which have their channels last?"""
        keeps = is_pointwise(node, self.table) or node.target in traits.FORMAT_PRESERVING
        return keeps and any(source in self.last for source in node.all_input_nodes)

    def settle(self, node: fx.Node, last: bool) -> None:
        """Give a call its images in one layout; its own value then has it, too."""
        for source in node.all_input_nodes:
            if not is_image(source) or _is_packed(source):
                continue
            if source.target is COPY and source.args[0] not in self.live:
                source.kwargs = {"memory_format": FORMATS[_rank(source)]} if last else {}
                if last:
                    self.spread(source.args[0])
            elif (source in self.last) != last:
                node.replace_input_with(source, self.converted(source, last, node))
        if last:
            self.last.add(node)

    def spread(self, node: Any) -> None:
        """Lay out the map that is expanded to all images."""
        for source in node.all_input_nodes if node.target is aten.expand.default else ():
            if is_image(source) and source not in self.last:
                node.replace_input_with(source, self.converted(source, True, node))

    def converted(self, source: fx.Node, last: bool, reader: fx.Node) -> fx.Node:
        """A value in the other layout."""
        if (source, last) not in self.made:
            kwargs = {"memory_format": FORMATS[_rank(source)]} if last else {}
            made = self.editor.insert(reader, source, aten.contiguous.default, source, **kwargs)
            self.made[source, last] = made
            if last:
                self.last.add(made)
        return self.made[source, last]

    def restore(self) -> None:
        """Images that are returned, in torch's usual layout."""
        for source in list(self.last):
            for user in [u for u in source.users if _returns_view(u)]:
                user.replace_input_with(source, self.converted(source, False, user))
        output = next(iter(reversed(self.editor.graph.nodes)))
        usual = [n for n in output.all_input_nodes if is_image(n) and n in self.live
                 and n.op == "call_function" and n.meta["val"].is_contiguous()]  # fmt: skip
        for source in usual if self.last else ():
            output.replace_input_with(source, self.converted(source, False, output))


def _returns_view(node: fx.Node) -> bool:
    """Is a call a view, itself returned or a view of it?"""
    if node.op != "call_function" or fresh(node):
        return False
    return any(user.op == "output" or _returns_view(user) for user in node.users)


def _is_packed(node: fx.Node) -> bool:
    return node.target is ops()._reorder_convolution_weight.default


def _rank(node: fx.Node) -> int:
    return node.meta["val"].ndim
