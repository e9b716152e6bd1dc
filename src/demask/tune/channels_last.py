"""Conversion of images to channels last in memory if their convolutions are faster that way.

The values are the same in another order. oneDNN then does not reorder them around each call, nor
pad narrow layers to whole vectors of channels.
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
from demask.ops.schema import fake
from demask.tune.buffer_assignment import returns_new_memory

aten = torch.ops.aten
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
CONVOLUTIONS = {op for op, axes in (traits.CONVOLUTIONS | traits.TRANSPOSED_CONVOLUTIONS).items() if axes > 1}
Wants = Callable[[fx.Node], bool]  # whether a convolution should run in channels last


def is_image_convolution(node: fx.Node) -> bool:
    """Whether a call is a convolution of images, fused or not."""
    pointwise = ops()._convolution_pointwise
    return is_image(node) and (node.target in CONVOLUTIONS or node.target in (pointwise.default, pointwise.binary))


def is_image(node: fx.Node) -> bool:
    """Whether a value is a batch of images or volumes."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.ndim in FORMATS


def may_change_layout(program: Program) -> bool:
    """Whether the memory format may change: not if a call depends on it (`as_strided`)."""
    return not any(n.target is aten.as_strided.default for n in program.graph.nodes)


def convert_layouts(program: Program, wants: Wants, table: Table) -> Program:
    """The program with convolutions in channels last if `wants` returns True; its outputs have
    their former layout.

    Views that would fail on other strides must be reshapes already (see `fold_affine.absorbed`).
    """
    editor = GraphEditor(program)
    layout = _ChannelsLast(editor, table)
    for node in editor.calls():
        if node not in layout.live or not is_image(node):
            continue
        if is_image_convolution(node):
            layout.settle(node, wants(node))
        elif layout.continues(node):
            layout.settle(node, True)
    layout.restore()
    return editor.finish()


class _ChannelsLast:
    """Rewrites a graph from call to call. last: values in channels last. conversions: by value and
    target layout (True: channels last)."""

    def __init__(self, editor: GraphEditor, table: Table):
        self.editor, self.table = editor, table
        self.live = input_dependent(editor.graph)
        self.last: set[fx.Node] = set()
        self.conversions: dict[tuple[fx.Node, bool], fx.Node] = {}

    def continues(self, node: fx.Node) -> bool:
        """Whether a call preserves the layout of its operands, and one is in channels last."""
        preserves = is_pointwise(node, self.table) or node.target in traits.FORMAT_PRESERVING
        return preserves and any(source in self.last for source in node.all_input_nodes)

    def settle(self, node: fx.Node, last: bool) -> None:
        """Convert a call's images to one layout, which its own value then has, too."""
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
        """Convert the map that `node` expands to all images."""
        for source in node.all_input_nodes if node.target is aten.expand.default else ():
            if is_image(source) and source not in self.last:
                node.replace_input_with(source, self.converted(source, True, node))

    def converted(self, source: fx.Node, last: bool, reader: fx.Node) -> fx.Node:
        """A value in the other layout."""
        if (source, last) not in self.conversions:
            kwargs = {"memory_format": FORMATS[_rank(source)]} if last else {}
            copy = self.editor.insert(reader, source, aten.contiguous.default, source, **kwargs)
            self.conversions[source, last] = copy
            if last:
                self.last.add(copy)
        return self.conversions[source, last]

    def restore(self) -> None:
        """Convert returned images to torch's default layout."""
        for source in list(self.last):
            for user in [u for u in source.users if _returns_view(u)]:
                user.replace_input_with(source, self.converted(source, False, user))
        output = next(iter(reversed(self.editor.graph.nodes)))
        usual = [
            n
            for n in output.all_input_nodes
            if is_image(n) and n in self.live and n.op == "call_function" and fake(n).is_contiguous()
        ]
        for source in usual if self.last else ():
            output.replace_input_with(source, self.converted(source, False, output))


def _returns_view(node: fx.Node) -> bool:
    """Whether a call is a view that is returned, directly or through other views."""
    if node.op != "call_function" or returns_new_memory(node):
        return False
    return any(user.op == "output" or _returns_view(user) for user in node.users)


def _is_packed(node: fx.Node) -> bool:
    return node.target is ops()._reorder_convolution_weight.default


def _rank(node: fx.Node) -> int:
    return fake(node).ndim
