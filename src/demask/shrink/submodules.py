"""Some submodules of a model demasked, in a copy of the full model."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from demask.errors import BadInput, NotExportable
from demask.failures import described
from demask.graph.capture.errors import check_call
from demask.graph.capture.shared_captures import share_captures
from demask.graph.module_copy import copy_with_state, structural_copy
from demask.graph.provenance import WHOLE, InputSpec, Provenance, provenance_of
from demask.graph.result.class_result import record_call
from demask.graph.result.resize import put_module
from demask.shrink.program_size import measure_module

Part = Callable[[str, tuple[Any, ...], dict[str, Any]], nn.Module]


def part_dynamic_shapes(dynamic_shapes: Any) -> Any:
    """The dynamic shapes of parts: all sizes by default, as the calls of the rest are not known."""
    return "all" if dynamic_shapes is None else dynamic_shapes


def replace_submodules(
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    names: str | Sequence[str],
    part: Part,
    *,
    optional: bool = False,
) -> nn.Module:
    """A copy of `model` in which each submodule in `names` is replaced by `part(name, args,
    kwargs)`, a demasked network for the inputs of its first call.

    Args:
        names: names and globs of submodules, or "auto". The rest of the model need not export.
        optional: whether submodules that are never called stay, and of those that cannot be
            captured the children are tried, as for "auto".

    Raises:
        BadInput: a name is no submodule, is inside another one in the list, or is never called.
        NotExportable: a submodule cannot be exported.
    """
    if not isinstance(model, nn.Module):
        raise BadInput(f"modules= takes an nn.Module, got {type(model).__name__}: demask it whole")
    if names != "auto" and (isinstance(names, str) or not all(isinstance(name, str) for name in names)):
        raise BadInput(f'modules must be a list of names or globs of submodules ("*.mlp"), or "auto", got {names!r}')
    check_call(model, args, kwargs, None)
    wanted = blocks_of(model) if names == "auto" else match_names(model, names)
    tried = optional or names == "auto"
    calls = record_first_calls(model, args, dict(kwargs or {}), None if tried else wanted)
    missing = [name for name in wanted if name not in calls]
    if missing and not tried:
        raise BadInput(f"{missing[0]!r} is never called on the example inputs: pass inputs that reach it")
    sharing = structural_copy(model, share=True)
    parts: dict[str, nn.Module] = {}
    queue = [name for name in wanted if name in calls]
    with share_captures():
        for name in queue:
            try:
                parts[name] = part(name, *calls[name])
            except NotExportable:
                if not tried:
                    raise
                inside = model.get_submodule(name).named_children()
                queue += [f"{name}.{leaf}" for leaf, _ in inside if f"{name}.{leaf}" in calls]
                continue
            put_module(sharing, name, parts[name])
    if names == "auto" and not parts:
        raise NotExportable("no module can be captured", "unknown", "demask it whole to see why")
    result = structural_copy(sharing, share=False, uncopied=parts.values())
    records = {name: provenance_of(demasked) for name, demasked in parts.items()}
    record_call(result, merge_records(model, result, records, args, kwargs), args, kwargs)
    return result


def merge_records(
    model: nn.Module, result: nn.Module, records: Mapping[str, Provenance], args: Any, kwargs: Any
) -> Provenance:
    """The record of a network, merged from those of its parts. MACs are those of the parts."""
    leaves = [x for x in pytree.tree_leaves((args, dict(kwargs or {}))) if isinstance(x, Tensor)]
    inputs = tuple(
        InputSpec(f"input_{k}", tuple(x.shape), str(x.dtype).removeprefix("torch."), tuple(x.shape))
        for k, x in enumerate(leaves)
    )
    effects: Counter[str] = Counter()
    for record in records.values():
        effects.update(record.effects)
    return Provenance(
        cuts={
            f"{name}.{key}": replace(cut, source=f"{name}.{cut.source}")
            for name, r in records.items()
            for key, cut in r.cuts.items()
        },
        reasons=tuple(
            replace(reason, module=f"{name}.{reason.module}".rstrip("."))
            for name, r in records.items()
            for reason in r.reasons
        ),
        effects=dict(effects),
        notes=tuple(dict.fromkeys(note for r in records.values() for note in r.notes)),
        inputs=inputs,
        before=measure_module(model, sum(r.before.macs for r in records.values())),
        after=measure_module(result, sum(r.after.macs for r in records.values())),
        removed={f"{name}.{key}".rstrip("."): count for name, r in records.items() for key, count in r.removed.items()},
        decisions=tuple(
            replace(decision, place=name if decision.place == WHOLE else f"{name}.{decision.place}")
            for name, r in records.items()
            for decision in r.decisions
        ),
        densities={f"{name}.{key}": density for name, r in records.items() for key, density in r.densities.items()},
        modules={f"{name}.{key}".rstrip("."): sizes for name, r in records.items() for key, sizes in r.modules.items()},
        form="class",
        graph_reasons=tuple(f"{name}: {why}" for name, r in records.items() for why in r.graph_reasons),
    )


def match_names(model: nn.Module, names: Sequence[str]) -> list[str]:
    """The submodules that match names and globs, in the model's order; raises BadInput."""
    known = dict(model.named_modules())
    matches: dict[str, str] = {}
    for name in names:
        globbed = any(letter in name for letter in "*?[")
        matching = fnmatch.filter([k for k in known if k], name) if globbed else [name]
        if (name not in known and not (globbed and matching)) or not name:
            near = sorted(k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2] and k)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it has {sorted(k for k in known if k)[:8]}"
            raise BadInput(f"the model has no submodule {name!r}{hint}")
        matches |= dict.fromkeys(matching, name)
    for name, pattern in list(matches.items()):
        outer = [other for other in matches if name.startswith(f"{other}.")]
        if outer and pattern != name:
            del matches[name]  # a glob matches modules inside its matches, too
        elif outer:
            raise BadInput(f"{name!r} is inside {outer[0]!r}: name only the outer one")
    return [name for name in known if name in matches]


def blocks_of(model: nn.Module) -> list[str]:
    """The parts of a model to demask one by one: blocks that repeat, else its children."""
    return find_repeated_blocks(model) or [name for name, _ in model.named_children()]


def find_repeated_blocks(model: nn.Module) -> list[str]:
    """The outermost submodules in lists that have several of one class."""
    blocks: list[str] = []
    for path, holder in model.named_modules():
        if any(path == name or path.startswith(f"{name}.") for name in blocks):
            continue
        if isinstance(holder, (nn.ModuleList, nn.Sequential)):
            kinds = Counter(type(block) for block in holder if any(True for _ in block.children()))
            blocks += [f"{path}.{k}".lstrip(".") for k, block in enumerate(holder) if kinds[type(block)] > 1]
    return blocks


def record_first_calls(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str] | None
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """The inputs of the first call of each submodule in `names` (None: of all that are called),
    from one run in eval mode on a copy. Raises BadInput where the model fails."""
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    work = copy_with_state(model)

    def watch(name: str):
        def hook(_: nn.Module, call_args: tuple[Any, ...], call_kwargs: dict[str, Any]) -> None:
            calls.setdefault(name, (call_args, dict(call_kwargs)))

        return hook

    for name in [path for path, _ in work.named_modules()] if names is None else names:
        work.get_submodule(name).register_forward_pre_hook(watch(name), with_kwargs=True)
    try:
        with torch.no_grad():
            work(*args, **kwargs)
    except Exception as error:
        raise BadInput(f"the model itself fails on the example inputs: {described(error)}") from error
    return calls
