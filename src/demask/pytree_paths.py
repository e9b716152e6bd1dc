"""Paths of the leaves of pytrees, also of classes that are registered without keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree


def leaves_with_paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[tuple[Any, ...], Any]]:
    """The leaves of a pytree, each with its path, as torch's `tree_leaves_with_path`.

    >>> [(pytree.keystr(path), leaf) for path, leaf in leaves_with_paths({"a": (1, 2)})]
    [("['a'][0]", 1), ("['a'][1]", 2)]
    """
    complete_keys()
    return pytree.tree_leaves_with_path(tree, is_leaf)


def complete_keys() -> None:
    """Add keys to classes that were registered as pytrees without (`register_pytree_node` without
    `flatten_with_keys_fn`, as in diffusers), for which torch.export and paths of leaves raise."""
    for kind, node in list(pytree.SUPPORTED_NODES.items()):
        if node.flatten_with_keys_fn is None:
            flatten = _with_keys(node.flatten_fn)
            pytree.SUPPORTED_NODES[kind] = node._replace(flatten_with_keys_fn=flatten)


def _with_keys(flatten: Callable[[Any], tuple[Any, Any]]) -> Callable[[Any], tuple[Any, Any]]:
    """A function that also returns keys: those of a mapping, else numbers."""

    def flatten_with_keys(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, context = flatten(tree)
        children = list(children)
        if isinstance(context, list) and len(context) == len(children):
            keys: list[Any] = [pytree.MappingKey(key) for key in context]
        else:
            keys = [pytree.SequenceKey(k) for k in range(len(children))]
        return list(zip(keys, children, strict=True)), context

    return flatten_with_keys
