"""What an edit changes, node by node: what `demask inspect` prints before anything is written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from demask.files.onnx.edit.protos import op_of, subgraphs


@dataclass(frozen=True, slots=True)
class NodeChange:
    """One node that an edit changes. node: its name, or that of its first output. op: with its
    domain unless that is ONNX's own. change: what becomes of it and its tensors."""

    node: str
    op: str
    change: str


def changes_of(original: Any, edited: Any) -> Iterator[NodeChange]:
    """The nodes of a ModelProto that another one has in another form, in order; then new ones."""
    before, after = _tensors(original), _tensors(edited)
    nodes = {_key(node): node for node in edited.graph.node}
    for node in original.graph.node:
        new = nodes.pop(_key(node), None)
        if new is None:
            yield NodeChange(_label(node), op_of(node), "removed")
            continue
        words = [
            _cut(before[a], after[b]) for a, b in zip(node.input, new.input, strict=False) if a in before and b in after
        ]
        words = [word for word in words if word]
        if not words and node.SerializeToString() != new.SerializeToString():
            is_cut = subgraphs(node) != subgraphs(new)
            words = ["its bodies are cut" if is_cut else "reads other values, or has other attributes"]
        if words:
            yield NodeChange(_label(node), op_of(node), "; ".join(words))
    for node in nodes.values():
        yield NodeChange(_label(node), op_of(node), "added")


def _tensors(model: Any) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in model.graph.initializer}


def _cut(a: Any, b: Any) -> str:
    """How a tensor differs; empty if it does not."""
    old, new = list(a.dims), list(b.dims)
    if old != new:
        share = math.prod(new) / max(math.prod(old), 1)
        return f"{a.name} {old} -> {new} ({100 * share:.0f} %)"
    return "" if _bytes(a) == _bytes(b) else f"{a.name} {old}: other values"


def _bytes(tensor: Any) -> bytes:
    """The contents of a tensor, which may be raw data or lists of numbers."""
    from onnx import numpy_helper

    return tensor.raw_data or numpy_helper.to_array(tensor).tobytes()


def _key(node: Any) -> str:
    return next(filter(None, node.output), node.name)


def _label(node: Any) -> str:
    return node.name or _key(node)
