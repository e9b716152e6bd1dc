"""Modules that a network does not call in eval mode, such as auxiliary classifiers: they follow
what is cut of their inputs, or are named."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.fx import GraphModule
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from demask.graph.capture.fold_constants import plain_name
from demask.graph.example_runs import Inputs, copy_in_eval, run_seeded
from demask.graph.module_copy import structural_copy
from demask.graph.program import Program
from demask.graph.provenance import Cut, provenance_of
from demask.graph.result.computed_tensors import remove_parametrizations
from demask.graph.result.resize import module_at, put_module
from demask.shrink.own_class.numbers import is_below


def find_uncalled(model: nn.Module, program: Program, inputs: Inputs) -> list[str]:
    """The outermost modules with parameters that a network does not call in eval mode, and of
    which its program reads none."""
    graphs = [path for path, module in model.named_modules() if isinstance(module, GraphModule)]
    if "" in graphs:
        return []
    read = {plain_name(alias) for name, c in program.constants.items() for alias in c.aliases or (name,)}
    plain = structural_copy(model, share=True)
    remove_parametrizations(plain)
    paths: list[str] = []
    for path, module in plain.named_modules():
        names = [f"{path}.{name}" for name, _ in module.named_parameters(remove_duplicate=False)]
        if path and names and read.isdisjoint(names) and not is_below(path, [*paths, *graphs]):
            paths.append(path)
    called = _find_called(copy_in_eval(plain), inputs, paths) if paths else set()
    return [path for path in paths if path not in called]


def in_train_mode(model: nn.Module, paths: Sequence[str]) -> nn.Module | None:
    """A copy of a network in which the modules around `paths` are in train mode for ever, and all
    others in eval mode, so that code calls what it calls in train mode alone and computes what does
    not depend on chance. None where that is the network already."""
    copy = copy_in_eval(model)
    around = [
        module for path, module in copy.named_modules() if not path or any(p.startswith(f"{path}.") for p in paths)
    ]
    if copy.training or any(map(parametrize.is_parametrized, around)):
        return None
    for module in around:
        kind: Any = type(module)
        module.__class__ = type(kind.__name__, (kind,), {"training": _ALWAYS})
    return copy


class _WithoutDropout(TorchFunctionMode):
    """Functions of dropout return their input."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "dropout" in getattr(func, "__name__", ""):
            return args[0] if args else kwargs["input"]
        return func(*args, **(kwargs or {}))


_ALWAYS = property(lambda _: True, lambda *_: None)


def let_uncalled_follow(
    own: nn.Module,
    model: nn.Module,
    uncalled: Sequence[str],
    inputs: Inputs,
    smaller: Callable[[nn.Module], nn.Module],
    differ: Callable[[nn.Module, nn.Module], str],
) -> tuple[dict[str, Cut], list[str]]:
    """Put modules that are called in train mode alone into a smaller network as they are in the
    result for train mode, in place, where the network then computes the same in that mode; returns
    the cuts of their tensors, and the modules that do not fit or are not called there either.

    own: a network of the model's class. smaller: what demask() returns in the class of a network.
    differ: how two networks differ for the same inputs; "" if they do not.
    """
    with _WithoutDropout(), contextlib.suppress(Exception):  # it may have no class, or no export
        original = in_train_mode(model, uncalled)
        called = set[str]() if original is None else _find_called(original, inputs, uncalled)
        others = [path for path in uncalled if path not in called]
        if original is None or not called or not _differ(own, original, uncalled, differ):
            return {}, others
        other = smaller(original)
        before = {path: own.get_submodule(path) for path in called}
        after = {path: _with_modes(other.get_submodule(path), m) for path, m in before.items()}
        for path, module in after.items():
            put_module(own, path, module)
        if not _differ(own, original, uncalled, differ):
            cuts = provenance_of(other).cuts
            return {name: how for name, how in cuts.items() if is_below(name, called)}, others
        for path, module in before.items():
            put_module(own, path, module)
    return {}, list(uncalled)


def describe_uncalled(model: nn.Module, paths: Sequence[str], cuts: Mapping[str, Cut]) -> tuple[str, ...]:
    """Notes on modules that keep their sizes, where they may read an axis that was cut."""
    axes = (axis for how in cuts.values() for axis in zip(how.shape, how.kept, strict=True))
    sizes = {size for size, remain in axes if remain is not None and len(remain) < size}
    notes = []
    for path in paths:
        shapes = {n for p in model.get_submodule(path).parameters() for n in p.shape}
        if read := sorted(shapes & sizes):
            numbers = " or ".join(map(str, read))
            notes.append(
                f"{path} is not called for these inputs in eval mode and keeps its sizes: "
                f"what it reads of {numbers} channels may have fewer now"
            )
    return tuple(notes)


def _find_called(network: nn.Module, inputs: Inputs, paths: Sequence[str]) -> set[str]:
    """Which of some modules a call of a network calls, or a module inside of. network: a copy."""
    called: set[str] = set()
    for path in paths:
        for module in network.get_submodule(path).modules():
            module.register_forward_pre_hook(lambda *_, path=path: called.add(path))
    with contextlib.suppress(Exception):  # what a network raises in train mode
        run_seeded(network, inputs)
    return called


def _differ(
    own: nn.Module, original: nn.Module, uncalled: Sequence[str], differ: Callable[[nn.Module, nn.Module], str]
) -> bool:
    """Whether a smaller network differs from `original` in the same mode, or fails there."""
    try:
        smaller: Any = in_train_mode(own, uncalled)
        return bool(differ(smaller, original))
    except Exception:  # layers that do not fit each other
        return True


def _with_modes(module: nn.Module, like: nn.Module) -> nn.Module:
    """A module with another's modules in train or eval mode."""
    for path, part in module.named_modules():
        twin = module_at(like, path)
        part.training = like.training if twin is None else twin.training
    return module
