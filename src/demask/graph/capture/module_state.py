"""State that a network keeps in Python between calls, such as the membrane of a spiking neuron.

A graph has the values of such attributes at capture for ever. Attributes that a call changes are
seen by comparing them before and after; whether a later call depends on them, by running a network
that was called before and one that was not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from demask.errors import NotExportable
from demask.graph.example_runs import Inputs, equal_outputs, run_seeded
from demask.graph.input_domains import draw_like
from demask.graph.module_copy import copy_with_state

CALLS = 4  # of a sequence that is compared with single calls
FAR = 16.0  # factor of a state, such that thresholds are passed
_REGISTERED = frozenset(vars(nn.Module()))  # parameters, buffers, submodules, hooks, the mode
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
Attribute = tuple[str, str]  # the path of a module, and the name of an attribute
_DEPTH = 6  # containers and objects within one another


class KeepsState(NotExportable):
    """A network keeps state in Python between calls. modules: the paths of the modules that do.
    attributes: where they keep it."""

    def __init__(self, attributes: tuple[Attribute, ...]) -> None:
        names = tuple(f"{path}.{name}".lstrip(".") for path, name in attributes)
        modules = tuple(dict.fromkeys(path for path, _ in attributes))
        listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        owners = ", ".join(path or "the network itself" for path in modules[:3])
        super().__init__(
            f"Python attributes are a state between calls ({listed})",
            owners,
            "a graph would have the value of the first call for ever: pass the state in and return "
            "it, or demask the modules without state: modules=[...]",
        )
        self.modules, self.attributes = modules, attributes


def modules_without_state(model: nn.Module, stateful: Sequence[str]) -> list[str]:
    """The outermost submodules with parameters that neither keep state nor contain a module that
    does, nor are in one. stateful: the paths of the modules that do."""

    def related(path: str, other: str) -> bool:
        return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.") or not other

    names: list[str] = []
    for path, module in model.named_modules():
        free = path and not any(related(path, other) for other in stateful)
        if free and not any(related(path, name) for name in names) and next(module.parameters(), None) is not None:
            names.append(path)
    return names


def keeps_equal_state(model: nn.Module, own: nn.Module, inputs: Inputs, attributes: Sequence[Attribute]) -> bool:
    """Whether a smaller network of the same class has the outputs and the state of a network over a
    sequence of calls.

    What it has removed of a tensor of the state must be the same after each call: then it is so
    after every later call, since a removed slice reads a constant and its own state alone.
    """
    networks = copy_with_state(model), copy_with_state(own)
    states: list[list[tuple[Any, Any]]] = []
    for call in _drawn_sequence(inputs):
        try:
            outputs = [pytree.tree_leaves(run_seeded(network, call)) for network in networks]
        except Exception:
            return False
        for a, b in zip(*outputs, strict=True):
            if isinstance(a, Tensor) and not _is_close(a, b):
                return False
        first, second = networks
        states.append(
            [
                (vars(first.get_submodule(path)).get(name), vars(second.get_submodule(path)).get(name))
                for path, name in attributes
            ]
        )
    return all(_is_cut_of_state(values) for values in zip(*states, strict=True))


def _is_cut_of_state(values: Sequence[tuple[Any, Any]]) -> bool:
    """Whether each second value is the first, or slices of it along one axis, the others of which
    never change."""
    first, second = values[0]
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return all(type(a) is type(b) and repr(a) == repr(b) for a, b in values)
    if not all(
        isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == first.shape and b.shape == second.shape
        for a, b in values
    ):
        return False
    axes = [k for k, (n, m) in enumerate(zip(first.shape, second.shape, strict=False)) if n != m]
    if first.ndim != second.ndim or len(axes) > 1:
        return False
    if not axes:
        return all(_is_close(a, b) for a, b in values)
    rows = torch.stack([a for a, _ in values]).movedim(axes[0] + 1, 0)
    cut = list(torch.stack([b for _, b in values]).movedim(axes[0] + 1, 0))
    for row in rows:  # in order, as positions that stay are
        if cut and _is_close(row, cut[0]):
            del cut[0]
        elif not all(torch.equal(row[0], value) for value in row[1:]):
            return False
    return not cut


def _is_close(a: Tensor, b: Any) -> bool:
    same = isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype
    return same and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def watch_attributes(work: nn.Module) -> dict[Attribute, None]:
    """The attributes, by path and name, that calls of a network change: filled by hooks from now
    on. work: a copy of the caller's model. torch.export restores attributes after it has traced
    them, so that they are compared at the end of the traced call."""
    before, changed = dict[Attribute, Any](), dict[Attribute, None]()

    def enter(*_: Any) -> None:
        before.clear()
        before.update(_attributes_of(work))

    def leave(*_: Any) -> None:
        changed.update(dict.fromkeys(_changed_attributes(before, _attributes_of(work))))

    work.register_forward_pre_hook(enter)
    work.register_forward_hook(leave)
    return changed


def _attributes_of(network: nn.Module) -> dict[Attribute, Any]:
    """What comparing tells a change by, for each attribute of each module, by path and name: of
    atoms and arrays the value, of tensors the identity and the number of writes, of containers and
    objects what they contain."""
    return {
        (path, name): _fingerprint(value, _DEPTH)
        for path, module in network.named_modules()
        for name, value in vars(module).items()
        if name not in _REGISTERED
    }


def _fingerprint(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return kind, repr(value)
    if isinstance(value, Tensor):
        return value, None if value.is_inference() else value._version
    if isinstance(value, nn.Module) or not depth:
        return (value,)
    if isinstance(value, (list, tuple, deque)):
        return kind, value, [_fingerprint(item, depth - 1) for item in value]
    if isinstance(value, Mapping):
        return kind, value, [(repr(k), _fingerprint(v, depth - 1)) for k, v in value.items()]
    if isinstance(value, (set, frozenset)):
        return kind, value, sorted(map(repr, value))
    if callable(getattr(value, "tobytes", None)):  # an array of NumPy
        return kind, value, value.tobytes()
    inner = getattr(value, "__dict__", None)
    return value, _fingerprint(inner, depth - 1) if inner and not isinstance(value, type) else None


def _is_same(a: Any, b: Any) -> bool:
    """Whether two fingerprints are of an unchanged value. Objects are compared by identity."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return a is b or (type(a) in (bool, int, str, bytes, type) and a == b)


def _changed_attributes(before: Mapping[Attribute, Any], after: Mapping[Attribute, Any]) -> Iterator[Attribute]:
    for attribute, value in after.items():
        if attribute not in before or not _is_same(before[attribute], value):
            yield attribute


def check_state(model: nn.Module, inputs: Inputs, changed: tuple[Attribute, ...]) -> tuple[str, ...]:
    """Notes on attributes that a call changes. Raises KeepsState where a later call depends on
    them: one of a sequence of calls returns something else than the same call of a new copy."""
    set_by_calls: dict[Attribute, None] = {}
    if _depends_on_earlier_calls(model, inputs, set_by_calls):
        raise KeepsState(changed)
    # torch.export sets more attributes than a call does.
    names = [f"{path}.{name}".lstrip(".") for path, name in changed if (path, name) in set_by_calls]
    if not names:
        return ()
    return (f"a call of the model sets {', '.join(names[:5])}; a graph sets no attributes",)


def _depends_on_earlier_calls(model: nn.Module, inputs: Inputs, set_by_calls: dict[Attribute, None]) -> bool:
    """Whether one of a sequence of calls returns something else than the same call of a new copy.
    set_by_calls: filled with the attributes that calls set to other values."""
    called, changing = copy_with_state(model), set[Attribute]()
    for k, call in enumerate(_drawn_sequence(inputs)):
        try:
            expected = run_seeded(copy_with_state(model), call)
        except Exception:
            continue  # the model rejects these values
        if k == CALLS - 1:
            _enlarge(called, changing)
        before = _attributes_of(called)
        try:
            outputs = run_seeded(called, call)
        except Exception:
            return True
        after = _attributes_of(called)
        changes = list(_changed_attributes(before, after))
        if k:  # what the first call alone sets is a cache
            changing |= set(changes)
        if k < CALLS - 1:  # the last one sets enlarged numbers back
            set_by_calls.update(
                dict.fromkeys(name for name in changes if not _is_recomputed(before.get(name), after[name]))
            )
        pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(outputs), strict=False)
        for a, b in pairs:
            if isinstance(a, Tensor) and not (isinstance(b, Tensor) and equal_outputs(a, b)):
                return True
    return False


def _is_recomputed(before: Any, after: Any) -> bool:
    """Whether fingerprints are of two tensors of the same values."""
    a, b = (value[0] if isinstance(value, tuple) else None for value in (before, after))
    return isinstance(a, Tensor) and isinstance(b, Tensor) and equal_outputs(a, b)


def _drawn_sequence(inputs: Inputs) -> Iterator[Inputs]:
    """The example, twice, then normally distributed numbers."""
    draw = torch.Generator().manual_seed(0)
    for k in range(CALLS):
        yield (inputs if k < 2 else pytree.tree_map_only(Tensor, lambda leaf: draw_like(leaf, draw), inputs))


def _enlarge(network: nn.Module, attributes: Iterable[Attribute]) -> None:
    """Multiply the floating-point numbers among attributes, in place."""
    for path, name in attributes:
        module = network.get_submodule(path)
        value = vars(module).get(name)
        if isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point()):
            vars(module)[name] = value * FAR
