"""Outputs of modules, in terms of the outputs of their ATen calls.

A pattern states a module's output by numbers of the call's outputs: an LSTM returns (0, (1, 2)),
its output and both states; a max pool returns 0. None: both are the same.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from demask.ops import schema
from demask.ops.schema import fake

Path = tuple[int, ...]


def paths(pattern: Any, start: Path = ()) -> dict[int, Path]:
    """The path in the module's output of each output of the call.

    >>> paths((0, (1, 2))), paths(0)
    ({0: (0,), 1: (1, 0), 2: (1, 1)}, {0: ()})
    """
    if isinstance(pattern, int):
        return {pattern: start}
    parts = (paths(part, (*start, k)) for k, part in enumerate(pattern))
    return {output: path for part in parts for output, path in part.items()}


def is_returned(call: fx.Node, pattern: Any) -> bool:
    """Whether a module returns all outputs of a call that are read."""
    known = () if pattern is None else paths(pattern)
    return pattern is None or all(user.target is operator.getitem and user.args[1] in known for user in call.users)


def read_from_module(node: fx.Node, pattern: Any) -> None:
    """Rewrite the readers of a call's outputs for the module that replaces the call."""
    if pattern is None:
        return
    path_of_output = paths(pattern)
    if "val" in node.meta:
        node.meta["val"] = _in_module_order(pattern, fake(node))
    inner: dict[Path, fx.Node] = {(): node}
    for user in list(node.users):
        *parents, last = path_of_output[schema.output_of(user)] or (None,)
        for k in range(1, len(parents) + 1):
            if (path := tuple(parents[:k])) not in inner:
                with node.graph.inserting_after(inner[path[:-1]]):
                    read = (inner[path[:-1]], path[-1])
                    inner[path] = node.graph.call_function(operator.getitem, read)
                if "val" in read[0].meta:
                    inner[path].meta["val"] = fake(read[0])[read[1]]
        if last is None:
            user.replace_all_uses_with(node)
            node.graph.erase_node(user)
        else:
            user.args = (inner[tuple(parents)], last)


def _in_module_order(pattern: Any, outputs: Any) -> Any:
    if isinstance(pattern, int):
        return outputs[pattern]
    return tuple(_in_module_order(part, outputs) for part in pattern)


def has_separate_reads(node: fx.Node, pattern: Any) -> bool:
    """Whether only single outputs of the call are read of a module's output."""
    if pattern is None or isinstance(pattern, int):
        return True
    for user in node.users:
        if user.target is not operator.getitem or not isinstance(user.args[1], int):
            return False
        if not has_separate_reads(user, part := pattern[user.args[1]]) or part is None:
            return False
    return True


def read_from_call(node: fx.Node, pattern: Any) -> None:
    """Rewrite the readers of a module's output for the call that replaces the module: the inverse
    of `read_from_module`."""
    if isinstance(pattern, int):
        with node.graph.inserting_after(node):
            read = node.graph.call_function(operator.getitem, (node, pattern))
        read.meta = {key: value for key, value in node.meta.items() if key in ("val", "value")}
        node.replace_all_uses_with(read, delete_user_cb=lambda user: user is not read)
        node.meta.pop("val", None)
    elif pattern is not None:
        _flatten(node, node, pattern)
        if "val" in node.meta:
            node.meta["val"] = tuple(pytree.tree_leaves(fake(node)))


def _flatten(call: fx.Node, node: fx.Node, pattern: Any) -> None:
    """Let readers of a part of a module's output read outputs of the call."""
    for user in list(node.users):
        part = pattern[user.args[1]]
        if isinstance(part, int):
            user.args = (call, part)
        else:
            _flatten(call, user, part)
            call.graph.erase_node(user)
