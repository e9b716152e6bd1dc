"""Conversion of images to channels last in memory if their convolutions are faster that way.

The values are the same in another order. oneDNN then does not reorder them around each call, nor
pad narrow layers to full vectors of channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx, nn

from demask.compat.onednn import ops
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.queries import COPY, input_dependent, is_pointwise
from demask.graph.value import Value
from demask.ops import Table, traits
from demask.rewrites.rule import Pass, case
from demask.tune.buffer_assignment import returns_new_memory

aten = torch.ops.aten
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
CONVOLUTIONS = {op for op, axes in (traits.CONVOLUTIONS | traits.TRANSPOSED_CONVOLUTIONS).items() if axes > 1}
Wants = Callable[[Value], bool]  # whether a convolution should run in channels last


def is_image_convolution(call: Value) -> bool:
    """Whether a call is a convolution of images, fused or not."""
    pointwise = ops()._convolution_pointwise
    return is_image(call) and call.calls(*CONVOLUTIONS, pointwise.default, pointwise.binary)


def is_image(value: Value) -> bool:
    """Whether a value is a batch of images or volumes."""
    return value.is_tensor and value.rank in FORMATS


def may_change_layout(program: Program) -> bool:
    """Whether the memory format may change: not if a call depends on it (`as_strided`)."""
    return not any(n.target is aten.as_strided.default for n in program.graph.nodes)


def convert_layouts(program: Program, table: Table, wants: Wants) -> Program:
    """The program with convolutions in channels last if `wants` returns True; its outputs have
    their former layout.

    Views that would fail on other strides must be reshapes already (see `fold_affine`).
    """
    layout = _ChannelsLast(GraphEditor(program), table)
    for node in layout.editor.calls():
        call = Value(node, layout.editor)
        if node not in layout.live or not is_image(call):
            continue
        if is_image_convolution(call):
            layout.settle(call, wants(call))
        elif layout.continues(call):
            layout.settle(call, True)
    layout.restore()
    return layout.editor.finish() if layout.conversions else program


class _ChannelsLast:
    """Rewrites a graph from call to call. last: values in channels last. conversions: by value and
    target layout (True: channels last)."""

    def __init__(self, editor: GraphEditor, table: Table):
        self.editor, self.table = editor, table
        self.live = input_dependent(editor.graph)
        copies = [Value(node, editor) for node in editor.calls(aten.contiguous.default)]
        self.last = dict.fromkeys(copy for copy in copies if copy.arg("memory_format") in FORMATS.values())
        self.conversions: dict[tuple[Value, bool], fx.Node] = {}

    def continues(self, call: Value) -> bool:
        """Whether a call preserves the layout of its operands, and one is in channels last."""
        preserves = is_pointwise(call.node, self.table) or call.calls(*traits.FORMAT_PRESERVING)
        return preserves and any(source in self.last for source in call.operands)

    def settle(self, call: Value, last: bool) -> None:
        """Convert a call's images to one layout, which its own value then has, too."""
        for source in call.operands:
            if not is_image(source) or source.calls(ops()._reorder_convolution_weight.default):
                continue
            if source.calls(COPY) and source.arg("self").node not in self.live:
                source.node.kwargs = {"memory_format": FORMATS[source.rank]} if last else {}
                if last:
                    self.spread(source.arg("self"))
            elif (source in self.last) != last:
                call.node.replace_input_with(source.node, self.converted(source, last, call.node))
        if last:
            self.last[call] = None

    def spread(self, value: Value) -> None:
        """Convert the map that a value expands to all images."""
        for source in value.operands if value.calls(aten.expand.default) else ():
            if is_image(source) and source not in self.last:
                value.node.replace_input_with(source.node, self.converted(source, True, value.node))

    def converted(self, source: Value, last: bool, reader: fx.Node) -> fx.Node:
        """A value in the other layout."""
        if (source, last) not in self.conversions:
            kwargs = {"memory_format": FORMATS[source.rank]} if last else {}
            copy = self.editor.insert(reader, source.node, aten.contiguous.default, source.node, **kwargs)
            self.conversions[source, last] = copy
            if last:
                self.last[Value(copy, self.editor)] = None
        return self.conversions[source, last]

    def restore(self) -> None:
        """Convert returned images to torch's default layout."""
        for source in list(self.last):
            for user in source.users:
                if _returns_view(user):
                    user.node.replace_input_with(source.node, self.converted(source, False, user.node))
        output = self.editor.graph.output_node()
        for node in output.all_input_nodes if self.last else ():
            value = Value(node, self.editor)
            is_usual = node in self.live and is_image(value) and value.fake.is_contiguous()
            if is_usual and node.op == "call_function" and not value.calls(aten.contiguous.default):
                output.replace_input_with(node, self.converted(value, False, output))


def _returns_view(call: Value) -> bool:
    """Whether a call is a view that is returned, directly or through other views."""
    if call.node.op != "call_function" or returns_new_memory(call.node) or call.calls(aten.contiguous.default):
        return False
    return any(user.node.op == "output" or _returns_view(user) for user in call.users)


_CASES = (
    case(nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()), (2, 2, 6, 5)),
    case(nn.Sequential(nn.ConvTranspose2d(2, 6, 3), nn.Sigmoid()), (2, 2, 4, 5), dynamic={0: (0,)}),
    case(nn.Conv3d(2, 4, 2), (2, 2, 3, 4, 5)),
)


def images_channels_last(wants: Wants) -> Pass:
    """The pass that converts convolutions where that is wanted."""
    return Pass(
        "images in channels last",
        lambda program, table: convert_layouts(program, table, wants),
        "The values are the same in another order in memory",
        cases=_CASES,
        exact=False,
    )
