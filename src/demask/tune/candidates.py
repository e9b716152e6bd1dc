"""Candidate programs to benchmark, each built from the fastest implementation of every layer.

The cost model predicts the time of single layers. Whole candidates are measured, since layers share
caches and call overhead.

Convolutions of one-pixel images (in squeeze-and-excitation blocks) become linear layers:

    conv(x)[n, :, 0, 0] == W x[n, :, 0, 0] + b

Pointwise calls after such a layer run on rows, too, so that the next layer can read them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import fx

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.provenance import TuneDecision
from demask.graph.queries import POINTWISE, input_dependent, only_reader
from demask.ops import Table, op_name, schema
from demask.ops.schema import fake
from demask.ops.traits import CONV_OF_AXES, CONVOLUTIONS
from demask.rewrites.activations import ACTIVATIONS
from demask.rewrites.driver import rewrite
from demask.tune.channels_last import CONVOLUTIONS as IMAGES
from demask.tune.channels_last import convert_layouts, is_image_convolution, may_change_layout
from demask.tune.epilogue import Epilogue
from demask.tune.fold_affine import contraction_weight, fold_affine
from demask.tune.fuse_epilogues import epilogue_chain, fuse_epilogues
from demask.tune.join_as_sum import Sum, rewrite_joins
from demask.tune.layer_costs import PLAIN, Layer, LayerCosts
from demask.tune.pad_channels import Widening, remove_pads, round_widths

aten = torch.ops.aten


def convert_one_pixel_convs(program: Program, table: Table) -> Program:
    """The program with such convolutions as linear layers."""
    editor = GraphEditor(program)
    rows: dict[fx.Node, fx.Node] = {}  # one-pixel images as (batch, channels), by image
    for node in editor.calls(*CONVOLUTIONS):
        if _has_one_pixel(editor, node):
            _flatten(editor, node, rows, table)
    return editor.finish() if rows else program


def _has_one_pixel(editor: GraphEditor, node: fx.Node) -> bool:
    """Whether input and kernel of an ungrouped, unpadded convolution have one pixel."""
    weight = contraction_weight(editor, node)
    if weight is None:
        return False
    arguments = schema.arguments(node)
    sizes = [*fake(arguments["input"]).shape[2:], *weight.shape[2:]]
    plain = all(isinstance(n, int) and n == 1 for n in sizes)
    return plain and arguments["groups"] == 1 and not any(arguments["padding"])


def _flatten(editor: GraphEditor, node: fx.Node, rows: dict[fx.Node, fx.Node], table: Table) -> None:
    arguments = schema.arguments(node)
    x, axes = arguments["input"], fake(node).ndim - 2
    weight = editor.tensor(arguments["weight"])
    assert weight is not None
    kernel = editor.replace_constant(arguments["weight"], weight.flatten(1), node)
    row = rows.get(x) or editor.insert(node, None, aten.flatten.using_ints, x, 1)
    row = editor.insert(node, None, aten.linear.default, row, kernel, arguments["bias"])
    while (reader := only_reader(node)) is not None and _is_pointwise(reader, table):
        row = editor.insert(reader, None, reader.target, row, *reader.args[1:], **reader.kwargs)
        editor.replace(node, row)
        node = reader
    image = row
    for _ in range(axes):
        image = editor.insert(node, None, aten.unsqueeze.default, image, -1)
    rows[image] = row
    editor.replace(node, image)


def _is_pointwise(node: fx.Node, table: Table) -> bool:
    """Whether a call computes each element from the same element of its only tensor."""
    entry = table.get(op_name(node.target)) if node.op == "call_function" else None
    return entry is not None and entry.line in POINTWISE and len(node.all_input_nodes) == 1


GAIN = 0.97  # a rewrite must take less than this share of the original time
MULTIPLES = (8, 16)  # channels: half of a vector register, and a whole one


@dataclass(slots=True)
class Candidate:
    """A program to benchmark, with its name and the decisions for its layers. exact: the same
    program with exact weights, if this one stores weights in fewer bits."""

    name: str
    program: Program
    decisions: list[TuneDecision] = field(default_factory=list)
    exact: Program | None = None


def generate_candidates(
    program: Program, asker: LayerCosts, table: Table, tell: Callable[[str], object], *, few: bool = False
) -> Iterator[Candidate]:
    """The program with norms folded into weights, then with the fastest implementation of each
    layer: in the default layout, in channels last, or in the faster one for each image size.

    few: of networks of images only channels last. Next to segments, the default layout was not
    within 3 % of the fastest on any of 21 networks of torchvision and CIFAR, half masked or not.
    """
    base = convert_one_pixel_convs(fold_affine(rewrite(program, ACTIVATIONS)), table)
    tell("measuring layers")
    groups = seconds_by_image_size(base, asker)
    has_images = bool(groups) and may_change_layout(base)
    if not (few and has_images):
        yield Candidate("norms in the weights", base)
        builder = CandidateBuilder(asker, lambda _: False, table)
        yield builder.build("layers with their epilogues", base)
    if not has_images:
        return
    yield CandidateBuilder(asker, lambda _: True, table).build("channels last", base)
    choice = {size: costs[True] < GAIN * costs[False] for size, costs in groups.items()}
    if len(set(choice.values())) > 1:
        last = partial(_is_faster_channels_last, asker, choice)
        yield CandidateBuilder(asker, last, table).build("channels last for some sizes", base)


def _is_faster_channels_last(asker: LayerCosts, choice: dict[tuple[int, ...], bool], node: fx.Node) -> bool:
    """Whether channels last was chosen for images of the size of a node's value."""
    return choice.get(asker.shape(node)[2:], False)


def seconds_by_image_size(program: Program, asker: LayerCosts) -> dict[tuple[int, ...], dict[bool, float]]:
    """Seconds of all convolutions by output image size, in channels last (True) and without."""
    editor = GraphEditor(program)
    live = input_dependent(editor.graph)
    seconds: dict[tuple[int, ...], dict[bool, float]] = defaultdict(lambda: {True: 0.0, False: 0.0})
    for node in editor.calls(*IMAGES):
        if node in live and contraction_weight(editor, node) is not None and is_image_convolution(node):
            after = epilogue_chain(node, live)
            for last in (True, False):
                _, taken = asker.layer(asker.of(node), last, after.after, other=after.other is not None)
                seconds[asker.shape(node)[2:]][last] += taken
    return seconds


@dataclass(slots=True)
class CandidateBuilder:
    """Builds one candidate. last: whether a convolution runs in channels last."""

    asker: LayerCosts
    last: Callable[[fx.Node], bool]
    table: Table
    decisions: list[TuneDecision] = field(default_factory=list)

    def build(self, name: str, base: Program) -> Candidate:
        """The candidate for a program whose norms are folded into the weights."""
        program = rewrite_joins(base, self.join)
        program = remove_pads(program, self.worth, self.table)
        for multiple in MULTIPLES:
            width = lambda n, m=multiple: -(-n // m) * m  # noqa: E731
            program = round_widths(program, width, self.worth, self.table)
        program = fuse_epilogues(program, self.fuse)
        program = convert_layouts(program, self.last, self.table)
        return Candidate(name, program, self.decisions)

    def join(self, editor: GraphEditor, terms: Sum, branch: fx.Node, join: fx.Node) -> str | None:
        """The fastest way for a layer to write at its channels of a join: "grow" (rows for all
        channels), "place" (a 1 x 1 convolution after it), or None (keep scatter-adds and pads)."""
        layer, last = self.asker.of(branch), self.last(branch)
        after = _relu_after_join(join)
        shape, count = self.asker.shape(join), self.asker.shape(branch)[terms.axis]
        rows = shape[terms.axis] - count
        grown = self.asker.layer(layer.wider(rows), last, after, other=True)[1]
        alone = self.asker.layer(layer, last)[1]
        into = [shape, self.asker.shape(branch)]
        added = self.asker.call(aten.index_add_.default, last, into, layer.dtype, terms.axis, index=count)
        more = self.asker.call(aten.relu_.default, last, [shape], layer.dtype)
        seconds = {"grow": grown, "scatter-add": alone + added + more}
        if terms.axis == 1 and layer.convolves and "transpose" not in layer.target:
            seconds["place"] = alone + self._place(branch, layer, shape, last, after)
        best = min(seconds, key=seconds.__getitem__)
        self.decisions.append(TuneDecision(f"the join after {_layer_name(branch)}", best, seconds))
        return None if best == "scatter-add" else best

    def _place(self, branch: fx.Node, layer: Layer, shape: tuple[int, ...], last: bool, after: Epilogue) -> float:
        """Seconds of a 1 x 1 convolution that moves a layer's channels to those of a join."""
        axes, count = len(shape) - 2, self.asker.shape(branch)[1]
        geometry = ((1,) * axes, (0,) * axes, (1,) * axes, 1)
        weight = (shape[1], count, *[1] * axes)
        one = Layer(
            str(CONV_OF_AXES[axes]), self.asker.shape(branch), weight, geometry, False, layer.dtype, layer.device
        )
        return self.asker.layer(one, last, after, other=True)[1]

    def worth(self, editor: GraphEditor, plan: Widening, pad: fx.Node | None) -> bool:
        """Whether wider layers are faster than the present ones with the pad that is removed."""
        live = input_dependent(editor.graph)
        before = after = 0.0
        for node in {**plan.rows, **plan.columns}:
            layer, fusible = self.asker.of(node), epilogue_chain(node, live)
            wider = layer.wider(plan.more if node in plan.rows else 0, plan.more if node in plan.columns else 0)
            last, other = self.last(node), fusible.other is not None
            before += self.asker.layer(layer, last, fusible.after, other=other)[1]
            after += self.asker.layer(wider, last, fusible.after, other=other)[1]
        name = "the width of"
        if pad is not None:
            name, dtype = "the pad after", fake(pad).dtype
            source: fx.Node = schema.arguments(pad)["self"]
            pads = schema.arguments(pad)["pad"]
            target, shapes = aten.constant_pad_nd.default, [self.asker.shape(source)]
            before += self.asker.call(target, self.last(source), shapes, dtype, list(pads), 0.0)
        better = after < GAIN * before
        if better:
            first = next(iter(plan.rows), None)
            where = name if first is None else f"{name} {_layer_name(first)}"
            self.decisions.append(TuneDecision(where, "wider", {"as it is": before, "wider": after}))
        return better

    def fuse(self, node: fx.Node, after: Epilogue, other: bool) -> bool:
        """Whether a layer is faster as a oneDNN call with its epilogue."""
        layer, last = self.asker.of(node), self.last(node)
        names = self.asker.implementations(layer)
        seconds = {name: self.asker.seconds(layer, name, last, after, other) for name in names}
        best = min(seconds, key=seconds.__getitem__)
        self.decisions.append(TuneDecision(_layer_name(node), best, seconds))
        return best != PLAIN


def _layer_name(node: fx.Node) -> str:
    name = str(schema.arguments(node)["weight"].target)
    return name.rpartition(".")[0] or name


def _relu_after_join(join: fx.Node) -> Epilogue:
    readers = list(join.users)
    relu = len(readers) == 1 and readers[0].target is aten.relu.default
    return Epilogue("relu") if relu else Epilogue()
