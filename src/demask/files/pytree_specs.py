"""Pytree specs, the container structure of a model's arguments and results, as text from a file.

torch resolves a spec by importing the modules it names (default factories, enumerations), so a
spec is checked before torch reads it.
"""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree

from demask.errors import BadInput, RefusedFile
from demask.files.allowed_names import check_name
from demask.files.bounded_read import parse_json

MAX_NODES = 200_000
MAX_DEPTH = 50
_FACTORIES = frozenset("list dict tuple set int float str bool".split())
_KEYED = ("builtins.dict", "collections.OrderedDict", "collections.defaultdict")
_SCALAR = str | int | float | bool | None


def check_spec(text: Any) -> str:
    """Return `text` if it is a pytree spec of known container types, safe for torch to read.

    Raises:
        BadInput: a container type that a library must register first; the message names it.
        RefusedFile: anything that would import a module, and specs that are too large.
    """
    if not isinstance(text, str):
        raise RefusedFile(f"got a tree spec of type {type(text).__name__}; expected a string")
    document = parse_json(text, "tree spec")
    match document:
        case [1, dict(root)]:
            pending: list[tuple[Any, int]] = [(root, 0)]
        case _:
            raise RefusedFile("got a tree spec of an unknown version; expected version 1")
    count = 0
    while pending:
        node, depth = pending.pop()
        count += 1
        if count > MAX_NODES or depth > MAX_DEPTH:
            raise RefusedFile(f"got a tree spec of more than {MAX_NODES} nodes or too deep")
        pending.extend((child, depth + 1) for child in _children(node))
    return text


def load_spec(text: Any) -> pytree.TreeSpec:
    """The pytree spec in `text`; errors as `check_spec`."""
    checked = check_spec(text)
    try:
        return pytree.treespec_loads(checked)
    except Exception as error:
        raise BadInput(f"this torch cannot read the tree spec: {error}") from error


def check_call_spec(text: Any) -> str:
    """`check_spec` for (args, kwargs): keywords must be identifiers, as they become source code."""
    spec = load_spec(text)
    if spec.type is not tuple or spec.num_children != 2:
        return check_spec(text)
    keywords = spec.child(1)
    for name in keywords.context if keywords.type is dict else ():
        check_name(name)
    return text


def _children(node: Any) -> list[Any]:
    """The children of a node, after its own type and context are checked."""
    match node:
        case {"type": None, "context": None, "children_spec": [], **rest} if not rest:
            return []
        case {"type": str(kind), "context": context, "children_spec": list(children), **rest} if not rest:
            _check_context(kind, context, len(children))
            return children
        case _:
            raise RefusedFile("got a tree spec node that is neither a leaf nor a container")


def _check_context(kind: str, context: Any, children: int) -> None:
    if kind not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
        module = kind.rpartition(".")[0]
        raise BadInput(
            f"the model takes or returns a {kind!r}, which is not known here: import {module} "
            f"first (on the command line: --import {module}); if that does not register it, do so "
            "with torch.export.register_dataclass"
        )
    if kind == "collections.defaultdict":
        context = _default_keys(context)
    elif kind == "collections.namedtuple":
        if context not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
            raise BadInput(
                f"the model takes or returns the named tuple {context!r}, which is not "
                "known here; import the library that defines it first"
            )
    elif isinstance(context, str):
        context = parse_json(context, f"context of {kind}")
    _check_inert(context)
    if kind in _KEYED and (not isinstance(context, list) or len(context) != children):
        raise RefusedFile(f"got a {kind} of {children} values whose keys do not match")


def _default_keys(context: Any) -> Any:
    match context:
        case {"default_factory_module": "builtins", "default_factory_name": str(name), "dict_context": list(keys)} if (
            name in _FACTORIES
        ):
            return keys
        case _:
            raise RefusedFile("got a defaultdict whose factory is not a builtin type")


def _check_inert(context: Any) -> None:
    """Refuse JSON objects that torch decodes as enumerations: it would import their module."""
    match context:
        case dict():
            if "__enum__" in context:
                raise RefusedFile("got an enumeration in a tree spec; expected plain keys")
            parts: list[Any] = list(context.values())
        case list():
            parts = context
        case _:
            return
    for part in parts:
        if not isinstance(part, _SCALAR):
            _check_inert(part)
