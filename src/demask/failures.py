"""Handling of unexpected exceptions.

A rule that fails on one call leaves that call unchanged; a pass that fails is skipped; a public
function that still fails raises InternalError. Each reports what failed. Tests run in strict mode,
where the exception itself is raised.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.errors import BadInput, DemaskError, FileError, InternalError
from demask.pytree_paths import leaves_with_paths

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
_STRICT: ContextVar[bool] = ContextVar("demask_strict", default=False)


def is_strict() -> bool:
    """Whether unexpected exceptions are raised unchanged."""
    return _STRICT.get()


def set_strict(on: bool) -> None:
    """Switch strict mode on or off in this thread, from now on."""
    _STRICT.set(on)


@contextlib.contextmanager
def strict(on: bool) -> Iterator[None]:
    """A context in which strict mode is on or off, in this thread."""
    token = _STRICT.set(on)
    try:
        yield
    finally:
        _STRICT.reset(token)


class CallFailed(Exception):
    """A rule raised on one call of a graph. Internal: the call is declined.

    node: the call. reason: type and first line of the exception.
    """

    def __init__(self, node: Any, reason: str):
        super().__init__(f"{node}: {reason}")
        self.node, self.reason = node, reason


def described(error: BaseException) -> str:
    """Type and first line of an exception, as text."""
    if type(error).__name__ == "GuardOnDataDependentSymNode":
        return "GuardOnDataDependentSymNode: a size depends on the values of a tensor"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


@contextlib.contextmanager
def attributed(node: Any) -> Iterator[None]:
    """A context that turns exceptions into CallFailed of `node`, except in strict mode."""
    try:
        yield
    except (MemoryError, CallFailed):
        raise
    except Exception as error:
        if is_strict():
            raise
        raise CallFailed(node, described(error)) from error


@dataclass(slots=True)
class Log:
    """Runs optional steps and collects descriptions of those that failed.

    gave_up: whether an essential step failed, without which little or nothing can be removed.
    has_side_network: whether the side network (values that no input determines) was separated, to
    be computed once per call. changes: what rewrites changed (`demask.rewrites.driver.Change`), for
    callers that set it to a list.
    """

    failures: dict[str, str] = field(default_factory=dict)
    gave_up: bool = False
    has_side_network: bool = False
    changes: list[Any] | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Descriptions of what failed."""
        return tuple(self.failures.values())

    def add(self, failures: Mapping[str, str]) -> None:
        """Add descriptions of failures, keyed by what failed; a known key is skipped."""
        for what, text in failures.items():
            self.failures.setdefault(what, text)

    def attempt(self, what: str, step: Callable[[], T], otherwise: U, *, essential: bool = False) -> T | U:
        """The result of `step`, or `otherwise` and a note that `what` is left out if it fails."""
        try:
            return step()
        except MemoryError:
            raise
        except Exception as error:
            if is_strict():
                raise
            self.gave_up |= essential
            text = f"{what} is left out, since it failed ({described(error)}); please report it"
            self.add({text: text})
            return otherwise


# What is accepted in place of a number's type.
_NUMBERS: dict[type, tuple[type, ...]] = {int: (Integral,), float: (Real,)}

# Types that public functions accept for parameters of these names.
_ARGUMENTS: dict[str, tuple[tuple[type, ...], str]] = {
    "model": ((nn.Module, ExportedProgram), "an nn.Module or an ExportedProgram"),
    "slim": ((nn.Module,), "an nn.Module"),
    "module": ((nn.Module, ExportedProgram), "an nn.Module or an ExportedProgram"),
    "args": ((tuple,), "a tuple of the model's inputs: (x,) for one"),
    "kwargs": ((Mapping, type(None)), "a mapping from names to inputs, or None"),
    "path": ((str, os.PathLike), "a path"),
    "modules": ((list, tuple, type(None)), "a list of names of submodules, or None"),
}


def _wrong_argument(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Description of the first argument of a wrong type; "" for none."""
    hints: Mapping[str, Any] = {}
    with contextlib.suppress(NameError):  # a name that is imported for type checks only
        hints = get_type_hints(function)
    for name, value in arguments.items():
        types, expected = _ARGUMENTS.get(name) or _accepted(hints.get(name, Any))
        if not isinstance(value, types):
            return f"{name} must be {expected}, got {value!r:.40} ({type(value).__name__})"
    return ""


def _accepted(hint: Any) -> tuple[tuple[type, ...], str]:
    """The types of a type hint, and its words; (object,) where a value alone does not tell."""
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        several = [_accepted(part) for part in get_args(hint)]
        return tuple(t for types, _ in several for t in types), " or ".join(w for _, w in several)
    kind = get_origin(hint) or hint
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return (object,), ""
    if kind is type(None):
        return (kind,), "None"
    return _NUMBERS.get(kind, (kind,)), kind.__name__


def _without_data(arguments: Mapping[str, Any]) -> str:
    """The first tensor on device "meta" among arguments and in their networks; "" for none."""
    for path, leaf in leaves_with_paths(dict(arguments)):
        tensors: Mapping[str, Any] = {"": leaf}
        if isinstance(leaf, nn.Module):
            tensors = dict(itertools.chain(leaf.named_parameters(), leaf.named_buffers()))
        elif isinstance(leaf, ExportedProgram):
            tensors = leaf.state_dict
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor) and tensor.is_meta:
                place = pytree.keystr(path[1:])
                return f"{name or 'the tensor'} of {path[0].key}{place}"
    return ""


def warn_caller(text: str) -> None:
    """Warn at the line outside of this package that called it."""
    package = os.path.dirname(__file__) + os.sep
    frame, level = sys._getframe(1), 2
    while frame is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def public(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator of the public functions: every exception they raise is a DemaskError.

    Except TypeError for a call that does not fit the signature, KeyboardInterrupt and MemoryError.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (MemoryError, Warning):
            raise
        except OSError as error:
            raise FileError(f"{function.__name__}: {error}") from error
        except Exception as error:
            known = isinstance(error, DemaskError)
            if known and not any(w in str(error) for w in ("device meta", "meta tensor")):
                raise  # torch's words for them
            arguments = signature.bind(*args, **kwargs).arguments
            if empty := _without_data(arguments):
                raise BadInput(
                    f"{function.__name__}: {empty} is on device 'meta' and has no values; load "
                    "weights (load_state_dict(..., assign=True)) and pass inputs with values"
                ) from error
            if known or is_strict():
                raise
            if wrong := _wrong_argument(function, arguments):
                raise BadInput(f"{function.__name__}: {wrong}") from error
            raise InternalError(function.__name__, described(error)) from error

    return wrapper
