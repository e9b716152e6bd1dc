"""Captures that equal modules share: equal layers of a language model are captured once.

torch.export runs a module's code on tensors without data, so its graph is determined by the code,
the other attributes, and the shapes of tensors and inputs. If two modules agree in all of these,
the graph of one with the tensors of the other is the graph of the other.
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

from demask.graph.capture.capture import capture_programs
from demask.graph.module_copy import is_number, structural_copy
from demask.graph.program import Program, copy_graph
from demask.graph.result.resize import tensors_of

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (dict, OrderedDict, list)
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)  # by key
Place = tuple[int, str]  # an integer attribute: index of the module in traversal order, and name


@contextmanager
def share_captures() -> Iterator[None]:
    """In the block, equal modules that are captured in this thread share one graph."""
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
    *,
    state: bool = False,
) -> Iterator[Program]:
    """The programs that `capture_programs` returns; in a `share_captures` block, those of an equal
    module with the tensors of this one.

    Integer attributes may differ if the code does not read them, such as the index of a layer. So
    reads of differing integers are recorded from the second module on.
    """
    entries = _ENTRIES.get()
    if entries is None or state or not isinstance(model, nn.Module):
        yield from capture_programs(model, args, kwargs, dynamic_shapes, state=state)
        return
    anatomy = Anatomy.of(model, (args, kwargs, dynamic_shapes))
    equal = [entry for entry in entries if entry.anatomy.parts == anatomy.parts]
    for entry in equal:
        if entry.differing(anatomy) <= entry.watched - entry.read:
            programs = tuple(entry.programs)
            yield from (_with_tensors(program, model) for program in programs)
            more = capture_programs(model, args, kwargs, dynamic_shapes)
            yield from itertools.islice(more, len(programs), None)
            return
    entry = _SharedCapture(anatomy, frozenset().union(*(e.watched | e.differing(anatomy) for e in equal)))
    entries.append(entry)
    tensors = dict(tensors_of(model))
    shared = True
    for program in capture_programs(entry.watch(model), args, kwargs, dynamic_shapes):
        # Tensors with other names are created by the code, from values that may differ.
        shared = shared and all(c.name in tensors for c in program.constants.values())
        if shared:
            entry.programs.append(program)
        yield program.with_graph(copy_graph(program)[0])


def _with_tensors(program: Program, model: nn.Module) -> Program:
    """The program of an equal module, with the tensors of this one."""
    tensors = dict(tensors_of(model))
    constants = {
        name: replace(constant, tensor=tensors[constant.name].detach()) for name, constant in program.constants.items()
    }
    return program.with_graph(copy_graph(program)[0], constants)


@dataclass(slots=True, eq=False)
class _SharedCapture:
    """A captured module. watched: the integers whose reads were recorded in `read`. programs: the
    programs so far."""

    anatomy: Anatomy
    watched: frozenset[Place]
    read: set[Place] = field(default_factory=set)
    programs: list[Program] = field(default_factory=list)

    def differing(self, other: Anatomy) -> set[Place]:
        """The integers that differ in an equal module."""
        return {place for place, value in self.anatomy.numbers.items() if other.numbers[place] != value}

    def watch(self, model: nn.Module) -> nn.Module:
        """A copy of the model that records reads of the watched integers; the model if there are
        none."""
        if not self.watched:
            return model
        copy = structural_copy(model, share=True)
        modules, own = Anatomy.of(copy, ()).modules, {id(module) for module in copy.modules()}
        for k, group in itertools.groupby(sorted(self.watched), key=lambda place: place[0]):
            places = list(group)
            if id(modules[k]) in own:
                modules[k].__class__ = self._watched_class(type(modules[k]), places)
            else:
                self.read.update(places)  # of a module that is no submodule
        return copy

    def _watched_class(self, kind: type, places: list[Place]) -> type:
        """A class of the same name whose instances record reads of integer attributes."""

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


_ENTRIES: ContextVar[list[_SharedCapture] | None] = ContextVar("demask_shared_captures", default=None)


@dataclass(frozen=True, slots=True)
class _Same:
    """A value that equals only itself: a class, or an object that is not compared by contents."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


@dataclass(slots=True)
class Anatomy:
    """All that determines the graph of a module for a call: modules with equal anatomies have equal
    graphs.

    parts: nested tuples of everything except the integer attributes of modules, which are in
    `numbers`. modules: in traversal order. Tensors are compared by dtype, shape and strides;
    integer buffers, on which code may branch, also by value.
    """

    parts: Any = None
    numbers: dict[Place, int] = field(default_factory=dict)
    modules: list[nn.Module] = field(default_factory=list)
    _seen: dict[int, int] = field(default_factory=dict)
    _alive: list[Any] = field(default_factory=list)  # so that ids are unique
    _memory: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, inputs: Any) -> Anatomy:
        """The anatomy of a module with its inputs: (args, kwargs, dynamic shapes)."""
        anatomy = cls()
        leaves, spec = pytree.tree_flatten(inputs)
        module_parts = anatomy._value(model)
        anatomy.parts = (module_parts, spec, [anatomy._input(leaf) for leaf in leaves])
        return anatomy

    def _input(self, leaf: Any) -> Any:
        return self._tensor(leaf) if type(leaf) is Tensor else self._value(leaf)

    def _visited_index(self, value: Any) -> int | None:
        """The index of a value that was visited before; None for a new one, which gets an index."""
        number = self._seen.get(id(value))
        if number is None:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
        return number

    def _value(self, value: Any) -> Any:
        """A value as nested tuples; a value that was visited before as its index."""
        kind = type(value)
        if kind in _ATOMS:
            return kind, repr(value)
        if kind in (tuple, torch.Size):
            return kind, [self._value(item) for item in value]
        if (number := self._visited_index(value)) is not None:
            return "again", number
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, Tensor):
            return _Same(value)  # neither parameter nor buffer: the code may read its data
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
            kind = kind.__bases__  # each parametrized module has its own class
        parts = []
        for name, value in vars(module).items():
            if type(value) is int:
                self.numbers[place, name] = value
                parts.append(name)
            elif name in ("_parameters", "_buffers"):
                parts.append((name, [(key, self._own(key, t)) for key, t in value.items()]))
            elif name in _HOOKS:
                parts.append((name, self._numbered_hooks(module, value)))
            else:
                parts.append((name, self._value(value)))
        return _Same(kind) if isinstance(kind, type) else kind, parts

    def _numbered_hooks(self, module: nn.Module, hooks: Mapping[int, Any] | None) -> Any:
        """The hooks of a module, with keys numbered within the module."""
        ids = sorted({key for name in _HOOKS for key in getattr(module, name) or ()})
        return [(ids.index(key), self._value(hook)) for key, hook in (hooks or {}).items()]

    def _own(self, name: str, tensor: Tensor | None) -> Any:
        """A parameter or buffer; with its value if that is an integer."""
        if tensor is None:
            return None
        number = tensor.item() if is_number(name, tensor) else None
        return self._tensor(tensor), number

    def _tensor(self, tensor: Tensor) -> Any:
        """All of a tensor except its data; the index of the tensor that it shares memory with."""
        if (number := self._visited_index(tensor)) is not None:
            return "again", number
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return _Same(tensor)
        memory = self._memory.setdefault(tensor.data_ptr() or id(tensor), len(self._memory))
        return (type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad, memory)


class _Plain:
    """An object with attributes and nothing else."""


def _is_plain(kind: type) -> bool:
    """Whether objects of a class are determined by their attributes."""
    copying = ("__reduce__", "__reduce_ex__", "__getstate__")
    sizes = (kind.__basicsize__, kind.__itemsize__)
    return sizes == (_Plain.__basicsize__, 0) and all(getattr(kind, name) is getattr(object, name) for name in copying)
