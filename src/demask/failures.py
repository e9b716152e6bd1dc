"""What becomes of an exception that nobody raised on purpose.

A rule that fails on one call leaves that call as it is; a pass that fails is skipped; a public
function that still fails raises InternalError. Each says what failed. In strict mode, which tests
run in, the exception itself is raised.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from torch import nn
from torch.export import ExportedProgram

from demask.errors import BadInput, DemaskError, FileError, InternalError

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
_STRICT: ContextVar[bool] = ContextVar("demask_strict", default=False)


def is_strict() -> bool:
    """Whether exceptions are raised as they are."""
    return _STRICT.get()


def set_strict(on: bool) -> None:
    """Raise exceptions as they are (on) or not, in this thread from now on."""
    _STRICT.set(on)


@contextlib.contextmanager
def strict(on: bool) -> Iterator[None]:
    """Strict mode on or off while it lasts, in this thread."""
    token = _STRICT.set(on)
    try:
        yield
    finally:
        _STRICT.reset(token)


class CallFailed(Exception):
    """A rule raised on one call of a graph. It never leaves demask: the call is declined.

    node: the call. reason: what was raised, in one line.
    """

    def __init__(self, node: Any, reason: str):
        super().__init__(f"{node}: {reason}")
        self.node, self.reason = node, reason


def described(error: BaseException) -> str:
    """The type of an exception and the first line of its text."""
    if type(error).__name__ == "GuardOnDataDependentSymNode":
        return "GuardOnDataDependentSymNode: a size depends on the values of a tensor"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


@contextlib.contextmanager
def attributed(node: Any) -> Iterator[None]:
    """What is raised inside becomes CallFailed of a call; in strict mode it stays what it is."""
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
    """Runs steps that a result can do without, and collects what failed, in words.

    gave_up: whether a step failed without which nothing, or little, can be removed. apart: whether
    what no input decides was split off, to be computed once a call.
    """

    failures: dict[str, str] = field(default_factory=dict)
    gave_up: bool = False
    apart: bool = False

    @property
    def notes(self) -> tuple[str, ...]:
        """What failed, in words."""
        return tuple(self.failures.values())

    def add(self, failures: Mapping[str, str]) -> None:
        """Collect what failed, in words, by what it was: each once."""
        for what, text in failures.items():
            self.failures.setdefault(what, text)

    def attempt(
        self, what: str, step: Callable[[], T], otherwise: U, *, essential: bool = False
    ) -> T | U:
        """What `step` returns; `otherwise`, with a note that `what` is left out, where it fails."""
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


# What public functions take under these names.
_ARGUMENTS: dict[str, tuple[tuple[type, ...], str]] = {
    "model": ((nn.Module, ExportedProgram), "an nn.Module or an ExportedProgram"),
    "slim": ((nn.Module,), "an nn.Module"),
    "module": ((nn.Module, ExportedProgram), "an nn.Module or an ExportedProgram"),
    "args": ((tuple,), "a tuple of the model's inputs: (x,) for one"),
    "kwargs": ((Mapping, type(None)), "a mapping from names to inputs, or None"),
    "path": ((str, os.PathLike), "a path"),
    "modules": ((list, tuple, type(None)), "a list of names of submodules, or None"),
}


def _wrong_argument(named: Mapping[str, Any]) -> str:
    """Which argument is not what its name takes, in words; "" for none."""
    for name, value in named.items():
        kinds, words = _ARGUMENTS.get(name, ((object,), ""))
        if not isinstance(value, kinds):
            return f"{name} must be {words}, got {type(value).__name__}"
    return ""


def public(function: Callable[P, T]) -> Callable[P, T]:
    """A function of the public interface: what it raises is a DemaskError.

    A TypeError of a call that does not fit the signature, KeyboardInterrupt and MemoryError pass.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (DemaskError, MemoryError, Warning):
            raise
        except OSError as error:
            raise FileError(f"{function.__name__}: {error}") from error
        except Exception as error:
            named = signature.bind(*args, **kwargs).arguments
            if is_strict():
                raise
            if wrong := _wrong_argument(named):
                raise BadInput(f"{function.__name__}: {wrong}") from error
            raise InternalError(function.__name__, described(error)) from error

    return wrapper
