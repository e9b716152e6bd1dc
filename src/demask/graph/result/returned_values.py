"""What modules return, and the outputs of the calls that they make.

A pattern says the one in numbers of the other: an LSTM returns (0, (1, 2)), its output and both
states; a pool over maxima returns 0 alone. None: both are the same.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

Path = tuple[int, ...]


def paths(pattern: Any, start: Path = ()) -> dict[int, Path]:
    """Per output of the call, where the module returns it.

    >>> paths((0, (1, 2))), paths(0)
    ({0: (0,), 1: (1, 0), 2: (1, 1)}, {0: ()})
    """
    if isinstance(pattern, int):
        return {pattern: start}
    parts = (paths(part, (*start, k)) for k, part in enumerate(pattern))
    return {output: path for part in parts for output, path in part.items()}


def is_returned(call: fx.Node, pattern: Any) -> bool:
    """Does a module return all that is read of a call?"""
    known = () if pattern is None else paths(pattern)
    return pattern is None or all(
        user.target is operator.getitem and user.args[1] in known for user in call.users
    )


def nested(node: fx.Node, pattern: Any) -> None:
    """Read the outputs of a call where the module returns them that is called from now on."""
    if pattern is None:
        return
    where = paths(pattern)
    inner: dict[Path, fx.Node] = {(): node}
    for user in list(node.users):
        *parents, last = where[user.args[1]] or (None,)  # type: ignore[index]
        for k in range(1, len(parents) + 1):
            if (path := tuple(parents[:k])) not in inner:
                with node.graph.inserting_after(inner[path[:-1]]):
                    read = (inner[path[:-1]], path[-1])
                    inner[path] = node.graph.call_function(operator.getitem, read)
        if last is None:
            user.replace_all_uses_with(node)
            node.graph.erase_node(user)
        else:
            user.args = (inner[tuple(parents)], last)


def is_read_apart(node: fx.Node, pattern: Any) -> bool:
    """Is only read of what a module returns what are outputs of its call, one by one?"""
    if pattern is None or isinstance(pattern, int):
        return True
    for user in node.users:
        if user.target is not operator.getitem or not isinstance(user.args[1], int):
            return False
        if not is_read_apart(user, part := pattern[user.args[1]]) or part is None:
            return False
    return True


def flat(node: fx.Node, pattern: Any) -> None:
    """Read what a module returns from the outputs of the call that is made from now on: the inverse
    of `nested`."""
    if isinstance(pattern, int):
        with node.graph.inserting_after(node):
            read = node.graph.call_function(operator.getitem, (node, pattern))
        read.meta = {key: value for key, value in node.meta.items() if key in ("val", "value")}
        node.replace_all_uses_with(read, delete_user_cb=lambda user: user is not read)
        node.meta.pop("val", None)
    elif pattern is not None:
        _flatten(node, node, pattern)


def _flatten(call: fx.Node, node: fx.Node, pattern: Any) -> None:
    for user in list(node.users):
        part = pattern[user.args[1]]  # type: ignore[index]
        if isinstance(part, int):
            user.args = (call, part)
        else:
            _flatten(call, user, part)
            call.graph.erase_node(user)
