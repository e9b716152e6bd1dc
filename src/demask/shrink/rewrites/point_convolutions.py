"""Convolutions without a neighborhood, computed at some positions of an image.

    conv(x)[..., positions]  ==  conv(x[..., positions])            for a kernel of one position

Such a convolution carries the positions of its input. In general it is treated as one with a
window, which may be strided: that needs no gather. Where the needed positions are in no
progression, this analysis carries them, through images as well: the axes of an image are merged
into one, since axes that are cut one by one would have the rows and columns of all positions.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from demask.facts.masks import any_over
from demask.graph.editor import GraphEditor
from demask.ops import Relation, schema
from demask.ops.schema import fake
from demask.ops.traits import RESHAPES
from demask.shrink.layout.layout_analysis import LayoutAnalysis
from demask.shrink.layout.points import is_point_convolution

aten = torch.ops.aten


def carry_positions(analysis: LayoutAnalysis) -> LayoutAnalysis | None:
    """The analysis in which such convolutions carry positions; None where that removes none."""
    live = {
        node: analysis.needs.live[node, 0]
        for node, relation in analysis.relations.items()
        if isinstance(relation, Relation) and is_point_convolution(relation)
    }
    space = {node: _needed_positions(mask, node) for node, mask in live.items()}
    images = [node for node, mask in space.items() if not _is_product(mask)]
    if not images and not any(_has_irregular_axis(mask) for mask in space.values()):
        return None
    carrying = replace(analysis, carries_points=True)
    return carrying.again(_merge_images(carrying, images).finish() if images else analysis.program)


def _needed_positions(mask: Tensor, node: fx.Node) -> Tensor:
    """The needed positions of an image: a mask over its axes."""
    rank = fake(schema.arguments(node)["weight"]).ndim - 2
    names = [str(k) for k in range(mask.ndim)]
    return any_over(mask, names, names[: mask.ndim - rank]).reshape(mask.shape[-rank:])


def _projections(mask: Tensor) -> list[Tensor]:
    """The positions along each axis at which a mask has any."""
    axes = [str(k) for k in range(mask.ndim)]
    return [any_over(mask, axes, [a for a in axes if a != k]).reshape(-1) for k in axes]


def _is_product(mask: Tensor) -> bool:
    """Whether positions of an image are all positions of some rows and columns."""
    product = torch.ones((), dtype=torch.bool)
    for line in _projections(mask):
        product = product.unsqueeze(-1) & line
    return torch.equal(product, mask)


def _has_irregular_axis(mask: Tensor) -> bool:
    """Whether the positions along some axis are no progression."""
    positions = [line.nonzero().flatten().tolist() for line in _projections(mask)]
    return any(len({b - a for a, b in itertools.pairwise(line)}) > 1 for line in positions)


def _merge_images(analysis: LayoutAnalysis, images: list[fx.Node]) -> GraphEditor:
    """The program in which calls around some convolutions have one axis of positions."""
    region = _around(analysis, images)
    editor = GraphEditor(analysis.program)
    merged: dict[fx.Node, fx.Node] = {}
    for node, rank in region.items():
        copy = editor.copies[node]
        with editor.graph.inserting_before(copy):
            relation: Any = analysis.relations[node]
            space = set(relation.outs[0][-rank:])
            values = [
                _merged(editor, operand.value, rank, merged)
                if space & set(axes)
                else editor.copies.get(operand.value, operand.value)
                for operand, axes in zip(relation.operands, relation.ins, strict=True)
            ]
            arguments = schema.replace_operands(schema.arguments(copy), relation.operands, values)
            merged[node] = editor.call_named(copy.target, arguments, copy)
    for node in region:
        copy = editor.copies[node]
        for user in list(copy.users):
            if user.target in RESHAPES and user.op == "call_function":
                _replace_reshaped(editor, user, merged[node])
        if copy.users:
            _replace_reshaped(editor, copy, merged[node])
    return editor


def _replace_reshaped(editor: GraphEditor, node: fx.Node, value: fx.Node) -> None:
    with editor.graph.inserting_before(node):
        shaped = editor.call(aten.reshape.default, value, editor.sizes(node))
    editor.replace(node, shaped, inherit=True)


def _merged(editor: GraphEditor, node: fx.Node, rank: int, merged: dict[fx.Node, fx.Node]) -> fx.Node:
    """A value whose last axes are merged into the first of them; the others have size one."""
    if node not in merged:
        sizes = editor.sizes(editor.copies[node])
        count = 1
        for size in fake(node).shape[-rank:]:
            count *= size
        shape = [*sizes[: len(sizes) - rank], count, *[1] * (rank - 1)]
        merged[node] = editor.call(aten.reshape.default, editor.copies[node], shape)
    return merged[node]


def _around(analysis: LayoutAnalysis, images: list[fx.Node]) -> dict[fx.Node, int]:
    """The calls around some convolutions that carry each position of an image, in graph order, and
    the number of axes of the image."""
    rank_of = {node: fake(schema.arguments(node)["weight"]).ndim - 2 for node in images}
    todo = list(images)
    while todo:
        node = todo.pop()
        rank = rank_of[node]
        for other in [*node.all_input_nodes, *node.users]:
            if other not in rank_of and _carries(analysis, other, node, rank):
                rank_of[other] = rank
                todo.append(other)
    return {node: rank_of[node] for node in analysis.program.graph.nodes if node in rank_of}


def _carries(analysis: LayoutAnalysis, node: fx.Node, near: fx.Node, rank: int) -> bool:
    """Whether a call carries each of the last axes of its operands, which are static."""
    relation = analysis.relations.get(node)
    if not isinstance(relation, Relation) or len(relation.outs) != 1 or relation.entry.free:
        return False
    space = relation.outs[0][-rank:]
    sizes = [fake(node).shape[-rank:], fake(near).shape[-rank:]]
    if len(relation.outs[0]) <= rank or sizes[0] != sizes[1]:
        return False
    if any(len(axis) != 1 or axis[0] in relation.mixed for axis in space):
        return False
    if relation.entry.args is not None and not is_point_convolution(relation):
        return False
    letters = {axis[0] for axis in space}
    return all(axes[-rank:] == space or not letters & relation.letters(axes) for axes in relation.ins)
