"""Captures that equal modules share: the layers of a language model are captured once, not each.

torch.export runs a module's code on tensors without numbers, so its graph follows from the code,
the other attributes, and the shapes of tensors and inputs. Where two modules agree in all of them,
the graph of one, with the tensors of the other, is the graph of the other.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from demask.graph.capture.capture import captures
from demask.graph.module_copy import is_number, structural_copy
from demask.graph.program import Program, copy_graph
from demask.graph.result.resize import tensors_of

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (dict, OrderedDict, list)
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)  # by numbers of their own
Place = tuple[int, str]  # a number: of which module, in the order of a walk, and its name


@contextmanager
def sharing() -> Iterator[None]:
    """While it lasts, equal modules that are captured in this thread share one graph."""
    token = _ENTRIES.set([])
    try:
        yield
    finally:
        _ENTRIES.reset(token)


def shared_captures(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
) -> Iterator[Program]:
    """The programs that `captures` returns. Where captures are shared, those of an equal module,
    with the tensors of this one.

    Whole numbers of modules may differ where the code does not read them: which of the layers this
    is. So from the second module on the reads of such numbers are watched.
    """
    entries = _ENTRIES.get()
    if entries is None or not isinstance(model, nn.Module):
        yield from captures(model, args, kwargs, dynamic_shapes)
        return
    anatomy = Anatomy.of(model, (args, kwargs))
    alike = [entry for entry in entries if entry.anatomy.parts == anatomy.parts]
    for entry in alike:
        if entry.differing(anatomy) <= entry.watched - entry.read:
            programs = tuple(entry.programs)
            yield from (_with_tensors(program, model) for program in programs)
            more = captures(model, args, kwargs, dynamic_shapes)
            yield from itertools.islice(more, len(programs), None)
            return
    entry = _SharedCapture(
        anatomy, frozenset().union(*(e.watched | e.differing(anatomy) for e in alike))
    )
    entries.append(entry)
    own = dict(tensors_of(model))
    shared = True
    for program in captures(entry.watch(model), args, kwargs, dynamic_shapes):
        # Other tensors are made by the code, of what it reads elsewhere.
        shared = shared and all(c.name in own for c in program.constants.values())
        if shared:
            entry.programs.append(program)
        yield program.with_graph(copy_graph(program)[0])


def _with_tensors(program: Program, model: nn.Module) -> Program:
    """The program of an equal module, with the tensors of this one."""
    own = dict(tensors_of(model))
    constants = {
        name: replace(constant, tensor=own[constant.name].detach())
        for name, constant in program.constants.items()
    }
    return program.with_graph(copy_graph(program)[0], constants)


@dataclass(slots=True, eq=False)
class _SharedCapture:
    """A module that was captured. watched: the whole numbers whose reads were recorded in `read`.
    programs: those captured so far."""

    anatomy: Anatomy
    watched: frozenset[Place]
    read: set[Place] = field(default_factory=set)
    programs: list[Program] = field(default_factory=list)

    def differing(self, other: Anatomy) -> set[Place]:
        """The whole numbers that are others in an equal module."""
        return {
            place for place, value in self.anatomy.numbers.items() if other.numbers[place] != value
        }

    def watch(self, model: nn.Module) -> nn.Module:
        """A copy that records reads of the watched numbers; the model, if there are none."""
        if not self.watched:
            return model
        copy = structural_copy(model, share=True)
        modules, own = Anatomy.of(copy, ()).modules, {id(module) for module in copy.modules()}
        for k, group in itertools.groupby(sorted(self.watched), key=lambda place: place[0]):
            places = list(group)
            if id(modules[k]) in own:
                modules[k].__class__ = self._watched_class(type(modules[k]), places)
            else:
                self.read.update(places)  # of a module that the code has from elsewhere
        return copy

    def _watched_class(self, kind: type, places: list[Place]) -> type:
        """A class of the same name whose instances record reads; values stay where they are."""

        def recorded(place: Place) -> property:
            def get(module: nn.Module) -> Any:
                self.read.add(place)
                return vars(module)[place[1]]

            def put(module: nn.Module, value: Any) -> None:
                self.read.add(place)
                vars(module)[place[1]] = value

            return property(get, put)

        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        return type(kind.__name__, (kind,), names | {p[1]: recorded(p) for p in places})


_ENTRIES: ContextVar[list[_SharedCapture] | None] = ContextVar(
    "demask_shared_captures", default=None
)


@dataclass(frozen=True, slots=True)
class _Same:
    """A value that equals no other: a class, an object that is not looked into."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


@dataclass(slots=True)
class Anatomy:
    """What the graph of a module follows from, for a call: equal where graphs are equal.

    parts: nested tuples, everything but the whole numbers that are attributes of modules, which are
    in `numbers`. modules: those met, in the order of the walk. Tensors are compared by dtype, shape
    and strides; whole numbers in buffers, by which code may decide, by value, too.
    """

    parts: Any = None
    numbers: dict[Place, int] = field(default_factory=dict)
    modules: list[nn.Module] = field(default_factory=list)
    _seen: dict[int, int] = field(default_factory=dict)
    _alive: list[Any] = field(default_factory=list)  # so that an id is of one value
    _memory: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, inputs: Any) -> Anatomy:
        """The anatomy of a module that is called with (args, kwargs)."""
        made = cls()
        leaves, spec = pytree.tree_flatten(inputs)
        own = made._value(model)
        made.parts = (own, spec, [made._input(leaf) for leaf in leaves])
        return made

    def _input(self, leaf: Any) -> Any:
        return self._tensor(leaf) if type(leaf) is Tensor else self._value(leaf)

    def _again(self, value: Any) -> int | None:
        """The number of a value that was met before; others are numbered."""
        number = self._seen.get(id(value))
        if number is None:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
        return number

    def _value(self, value: Any) -> Any:
        """A value as nested tuples; one that was met before as its number."""
        kind = type(value)
        if kind in _ATOMS:
            return kind, repr(value)
        if kind in (tuple, torch.Size):
            return kind, [self._value(item) for item in value]
        if (number := self._again(value)) is not None:
            return "again", number
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, Tensor):
            return _Same(value)  # neither parameter nor buffer: the code may read its numbers
        if kind in _CONTAINERS:
            items = value.items() if isinstance(value, dict) else value
            return kind, [self._value(item) for item in items]
        if kind is set and all(type(item) in _ATOMS for item in value):
            return kind, sorted(map(repr, value))
        if kind is FunctionType:
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            rest = cells, value.__defaults__, value.__kwdefaults__, vars(value)
            return kind, _Same(value.__code__), _Same(value.__globals__), self._value(rest)
        if kind is MethodType:
            return kind, self._value(value.__func__), self._value(value.__self__)
        if _is_plain(kind):
            return _Same(kind), self._value(vars(value))
        return _Same(value)

    def _module(self, module: nn.Module) -> Any:
        place = len(self.modules)
        self.modules.append(module)
        kind = type(module)
        if parametrize.is_parametrized(module):
            kind = kind.__bases__  # a class for each module
        parts = []
        for name, value in vars(module).items():
            if type(value) is int:
                self.numbers[place, name] = value
                parts.append(name)
            elif name in ("_parameters", "_buffers"):
                parts.append((name, [(key, self._own(key, t)) for key, t in value.items()]))
            elif name in _HOOKS:
                parts.append((name, self._hooks(module, value)))
            else:
                parts.append((name, self._value(value)))
        return _Same(kind) if isinstance(kind, type) else kind, parts

    def _hooks(self, module: nn.Module, hooks: Mapping[int, Any] | None) -> Any:
        """Hooks, numbered within their module."""
        ids = sorted({key for name in _HOOKS for key in getattr(module, name) or ()})
        return [(ids.index(key), self._value(hook)) for key, hook in (hooks or {}).items()]

    def _own(self, name: str, tensor: Tensor | None) -> Any:
        """A parameter or buffer."""
        if tensor is None:
            return None
        number = tensor.item() if is_number(name, tensor) else None
        return self._tensor(tensor), number

    def _tensor(self, tensor: Tensor) -> Any:
        """All of a tensor but its numbers; which of those met share its memory."""
        if (number := self._again(tensor)) is not None:
            return "again", number
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return _Same(tensor)
        memory = self._memory.setdefault(tensor.data_ptr() or id(tensor), len(self._memory))
        return (type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(),
                tensor.requires_grad, memory)  # fmt: skip


class _Plain:
    """An object with attributes and nothing else."""


def _is_plain(kind: type) -> bool:
    """Is an object of this class described by its attributes?"""
    copying = ("__reduce__", "__reduce_ex__", "__getstate__")
    sizes = (kind.__basicsize__, kind.__itemsize__)
    return sizes == (_Plain.__basicsize__, 0) and all(
        getattr(kind, name) is getattr(object, name) for name in copying
    )
