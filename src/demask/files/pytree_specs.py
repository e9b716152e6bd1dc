"""The shapes of a model's arguments and results (pytree specs), as text from a file.

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
    """`text`, a pytree spec of known container types, safe for torch to read.

    BadInput names the type when it is one that a library would have to define first. RefusedFile:
    anything that would import a module, and specs too large.
    """
    if not isinstance(text, str):
        raise RefusedFile(f"found a tree spec of type {type(text).__name__}; expected a string")
    document = parse_json(text, "tree spec")
    match document:
        case [1, dict(root)]:
            pending: list[tuple[Any, int]] = [(root, 0)]
        case _:
            raise RefusedFile("found a tree spec of an unknown version; expected version 1")
    seen = 0
    while pending:
        node, depth = pending.pop()
        seen += 1
        if seen > MAX_NODES or depth > MAX_DEPTH:
            raise RefusedFile(f"found a tree spec of more than {MAX_NODES} nodes or too deep")
        pending.extend((child, depth + 1) for child in _children(node))
    return text


def load_spec(text: Any) -> pytree.TreeSpec:
    """The pytree spec that `text` writes; errors as `check_spec`."""
    checked = check_spec(text)
    try:
        return pytree.treespec_loads(checked)
    except Exception as error:
        raise BadInput(f"this torch cannot read the tree spec: {error}") from error


def check_call_spec(text: Any) -> str:
    """`check_spec` for (args, kwargs): the keyword names become source, so they are identifiers."""
    spec = load_spec(text)
    if spec.type is not tuple or spec.num_children != 2:
        return check_spec(text)
    keywords = spec.child(1)
    for name in keywords.context if keywords.type is dict else ():
        check_name(name)
    return text


def _children(node: Any) -> list[Any]:
    """The children of one node, whose own type and context are checked."""
    match node:
        case {"type": None, "context": None, "children_spec": [], **rest} if not rest:
            return []
        case {"type": str(kind), "context": context, "children_spec": list(children), **rest} if (
            not rest
        ):
            _check_context(kind, context, len(children))
            return children
        case _:
            raise RefusedFile("found a tree spec node that is neither a leaf nor a container")


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
        raise RefusedFile(f"found a {kind} of {children} values whose keys do not match")


def _default_keys(context: Any) -> Any:
    match context:
        case {
            "default_factory_module": "builtins",
            "default_factory_name": str(name),
            "dict_context": list(keys),
        } if name in _FACTORIES:
            return keys
        case _:
            raise RefusedFile("found a defaultdict whose factory is not a builtin type")


def _check_inert(context: Any) -> None:
    """JSON without the objects that torch turns into enumerations (it imports their module)."""
    match context:
        case dict():
            if "__enum__" in context:
                raise RefusedFile("found an enumeration in a tree spec; expected plain keys")
            parts: list[Any] = list(context.values())
        case list():
            parts = context
        case _:
            return
    for part in parts:
        if not isinstance(part, _SCALAR):
            _check_inert(part)
