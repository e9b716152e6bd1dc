"""Part of a model: some submodules demasked, in a copy of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from demask.errors import BadInput
from demask.failures import described
from demask.graph.copying import structural_copy
from demask.graph.declared import Masks, within
from demask.ops import Table


def demask_modules(
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
    names: Sequence[str],
    table: Table | None,
    check: bool,
    masks: Masks,
) -> nn.Module:
    """A copy of `model` with submodules `names` demasked, each on the inputs of its first call.

    The rest of the model need not export. Raises BadInput for a name that is no submodule, lies
    inside another one named, or is never called; NotExportable for one that does not export.
    """
    from demask.shrink.demask import demask

    if not isinstance(model, nn.Module):
        raise BadInput(f"modules= takes an nn.Module, got {type(model).__name__}: demask it whole")
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise BadInput(f"modules must be a list of names of submodules, got {names!r}")
    if not isinstance(args, tuple) or not isinstance(kwargs or {}, Mapping):
        raise BadInput("args must be a tuple of inputs and kwargs a mapping, got "
                       f"{type(args).__name__} and {type(kwargs).__name__}")  # fmt: skip
    _check(model, names)
    # How the rest of the model will call its parts is not known: any size may come.
    shapes = "all" if dynamic_shapes is None else dynamic_shapes
    calls = _calls(model, args, dict(kwargs or {}), names)
    result = structural_copy(model, share=False)
    for name in names:
        given, named = calls[name]
        part = model.get_submodule(name)
        slim = demask(
            part, given, named, dynamic_shapes=shapes, table=table, check=check,
            masks=within(masks, name),
        )  # fmt: skip
        parent, _, leaf = name.rpartition(".")
        holder = result.get_submodule(parent)
        if isinstance(holder, (nn.Sequential, nn.ModuleList)):
            holder[int(leaf)] = slim
        else:
            setattr(holder, leaf, slim)
    return result


def _check(model: nn.Module, names: Sequence[str]) -> None:
    known = dict(model.named_modules())
    for name in names:
        if name not in known or not name:
            near = sorted(k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2] and k)
            hint = (
                f"; did you mean {near[0]!r}?"
                if near
                else f"; it has {sorted(k for k in known if k)[:8]}"
            )
            raise BadInput(f"the model has no submodule {name!r}{hint}")
        inside = [other for other in names if other != name and name.startswith(f"{other}.")]
        if inside:
            raise BadInput(f"{name!r} lies inside {inside[0]!r}: name only the outer one")


def _calls(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """The inputs of each named submodule's first call, from one run in eval mode on a copy."""
    found: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    work = structural_copy(model, share=True).eval()

    def watch(name: str):
        def hook(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            found.setdefault(name, (given, dict(named)))

        return hook

    for name in names:
        work.get_submodule(name).register_forward_pre_hook(watch(name), with_kwargs=True)
    try:
        with torch.no_grad():
            work(*args, **kwargs)
    except Exception as error:
        raise BadInput(
            f"the model itself fails on the example inputs: {described(error)}"
        ) from error
    missing = [name for name in names if name not in found]
    if missing:
        raise BadInput(
            f"{missing[0]!r} is never called on the example inputs: give inputs that reach it"
        )
    return found
