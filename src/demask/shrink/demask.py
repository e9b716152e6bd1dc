"""demask(): capture a network, shrink it, and build the result as its own class or as a graph.

What `save_pretrained` of a demasked network writes is what `from_pretrained` reads. A config has one size
for all layers, and its class may derive sizes from others. Where no config describes the sizes that are
left, the network that is written has zeros again: as few as the smallest config with room for it asks for.
The network itself stays as it is.
"""

from __future__ import annotations

import copy as copies
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from demask.errors import BadInput, DemaskError, NotExportable
from demask.failures import Log, described, public, warn_caller
from demask.graph.capture.declared_masks import Masks, apply_masks, masks_of_submodule
from demask.graph.capture.module_state import KeepsState, keeps_equal_state, modules_without_state
from demask.graph.capture.weight_hooks import apply_weight_hooks
from demask.graph.example_inputs import draw_examples
from demask.graph.input_domains import state_domains
from demask.graph.isolation import in_isolation
from demask.graph.module_copy import structural_copy
from demask.graph.provenance import Provenance, provenance_of
from demask.graph.result.computed_tensors import describe_plain
from demask.graph.result.resize import assign_tensor, tensors_of
from demask.ops import TABLE, Table
from demask.registry import RUNNERS
from demask.rewrites.driver import Change
from demask.shrink.check import describe_difference
from demask.shrink.on_device import CPU, move_tensors, run_through_cpu
from demask.shrink.own_class.depth import without_dead_layers
from demask.shrink.own_class.pretrained import (
    SAVE,
    build_on_meta,
    copy_numbers,
    fit_config,
    is_never_written,
    try_config,
)
from demask.shrink.pipeline import programs_of, shrink_program
from demask.shrink.program_size import measure_module
from demask.shrink.strategies import DemaskCall, first_result
from demask.shrink.submodules import part_dynamic_shapes, replace_submodules
from demask.shrink.training.pieces import remember_original

_ADVICE = (
    "demask.save(model, path) and demask.load(path, into=Model(config)) need none, nor do networks "
    "with as many heads and units masked in every layer"
)


@dataclass(frozen=True, slots=True, eq=False)
class CheckedSave:
    """`save_pretrained` of a demasked network: writes what its class reads, or raises BadInput."""

    network: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        network: Any = self.network
        save = getattr(type(network), SAVE, None)
        adapters_alone = getattr(network, "_hf_peft_config_loaded", False)
        state = args[2] if len(args) > 2 else kwargs.get("state_dict")
        state = network.state_dict() if state is None else state
        wrong = "it is a graph, without a class"
        if save is not None:
            wrong = "" if adapters_alone else find_misfit(network, state)
        if wrong and save is not None and "state_dict" not in kwargs and len(args) < 3:
            padded = pad_to_config(network)
            if padded is not None:
                sizes = [sum(p.numel() for p in n.parameters()) for n in (network, padded)]
                warn_caller(
                    f"save_pretrained writes sizes that a config can say: {sizes[1]:,} "
                    f"parameters in place of {sizes[0]:,}, some of them zeros, as none "
                    f"describes this network ({wrong}). {_ADVICE}"
                )
                return save(padded, *args, **kwargs)
        if wrong:
            raise BadInput(
                f"save_pretrained wrote nothing, because from_pretrained would not read "
                f"this network from its config: {wrong}. {_ADVICE}"
            )
        return save(network, *args, **kwargs)  # type: ignore[misc]


def check_saves(network: nn.Module, original: Any = None) -> None:
    """Check what a demasked network and the models in it write with `save_pretrained`, in place.
    original: the network that a graph was computed from."""
    for module in network.modules():
        if callable(getattr(type(module), SAVE, None)):
            vars(module)[SAVE] = CheckedSave(module)
    if hasattr(original, SAVE):
        vars(network)[SAVE] = CheckedSave(network)


def find_misfit(model: Any, state: Mapping[str, Tensor]) -> str:
    """Why `from_pretrained` would not read a model from the tensors that `save_pretrained` writes:
    the first difference from a model that is built from the written config; "" if there is none."""
    graph = next((path for path, m in model.named_modules() if isinstance(m, fx.GraphModule)), None)
    if graph is not None:
        return f"{graph} is a graph"
    try:
        fresh: Any = build_on_meta(model, type(model.config), json.loads(model.config.to_json_string()))
    except Exception as error:  # sizes that do not fit each other, in the words of any library
        return f"its class refuses the config: {described(error)}"
    own = {name: t for name, t in fresh.state_dict(keep_vars=True).items() if not is_never_written(fresh, name)}
    for name in state:
        if name not in own and not is_never_written(fresh, name):
            return f"its config has no {name}"
    tied: dict[int, list[str]] = defaultdict(list)
    for name, tensor in own.items():
        tied[id(tensor)].append(name)
    places: dict[Any, str] = {}
    for names in tied.values():
        written = [name for name in names if name in state]
        if not written:
            return f"{names[0]} is missing"
        for name in written:
            here, there = tuple(state[name].shape), tuple(own[name].shape)
            if here != there:
                return f"{name} is {here}, and {there} by its config"
        first = state[written[0]]
        for name in written[1:]:
            if state[name].data_ptr() != first.data_ptr() and not torch.equal(state[name], first):
                return f"its config ties {name} to {written[0]}, which differs"
        other = places.setdefault((first.data_ptr(), first.device), written[0])
        if other != written[0] and first.numel() and not first.is_meta:
            return f"{written[0]} is tied to {other}, which its config does not say"
    buffers = dict(model.named_buffers())
    for name, buffer in fresh.named_buffers():
        here, there = tuple(buffers.get(name, buffer).shape), tuple(buffer.shape)
        if here != there:
            return f"{name} is {here}, and {there} by its config"
    return ""


def pad_to_config(network: Any) -> nn.Module | None:
    """A network that computes the same as a demasked one, and whose class reads it from its config:
    with zeros where that has more heads, units or channels. None where the sizes are not those that
    `demask()` returned."""
    full = _with_original_sizes(network)
    if full is None:
        return None
    args, kwargs = draw_examples((network,), (), {})
    for padded in (RUNNERS.get("smaller")(full), full):
        if padded is None or find_misfit(padded, padded.state_dict()):
            continue
        if not describe_difference(padded, network, args, kwargs):
            return padded
    return None


def _with_original_sizes(network: Any) -> Any | None:
    """A copy of a demasked network in which its tensors have their original sizes, zeros in the
    positions that were removed; None where that is unknown."""
    record = vars(network).get("demasked")
    config = copies.deepcopy(getattr(network, "config", None))
    fresh = None if config is None else try_config(network, config)
    if fresh is None or not isinstance(record, Provenance):
        return None
    shapes = {name: tuple(t.shape) for name, t in tensors_of(fresh)}
    larger: dict[str, Tensor] = {}
    for name, own in tensors_of(network):
        shape, cut = shapes.get(name), record.cuts.get(name)
        if shape == tuple(own.shape):
            continue
        if shape is None or cut is None or cut.shape != shape:
            return None
        positions = [sorted(range(n) if axis is None else axis) for n, axis in zip(shape, cut.kept, strict=True)]
        if [len(axis) for axis in positions] != list(own.shape):
            return None
        zeros = own.detach().new_zeros(shape)
        zeros[torch.meshgrid(*map(torch.tensor, positions), indexing="ij")] = own.detach()
        is_parameter = isinstance(own, nn.Parameter)
        larger[name] = nn.Parameter(zeros, own.requires_grad) if is_parameter else zeros
    if not larger:
        return None
    copy, tied = structural_copy(network, share=True), dict[int, Tensor]()
    for name, own in tensors_of(network):
        if name in larger:
            assign_tensor(copy, name, tied.setdefault(id(own), larger[name]))
    copy_numbers(copy, fresh, config)
    return copy


@dataclass(frozen=True, slots=True)
class Trace:
    """What demask() changes in a network, as `demask.explain` returns it; prints a paragraph per change.

    Attributes:
        changes: the changes in order: rewrites of calls into the normal form, with the calls before
            and after, and cuts of tensors, with their shapes before and after.
        notes: what failed and was left out.

    Example:
        >>> import torch, demask
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> net[0].weight.data[:5], net[0].bias.data[:5] = 0, 0
        >>> trace = demask.explain(net, (torch.ones(1, 4),))
        >>> [change.module for change in trace.changes]
        ['0', '2']
    """

    changes: tuple[Change, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The changes as plain dictionaries, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.changes), *self.notes]) or "nothing changes"


@in_isolation
@public
def demask(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    modules: str | Sequence[str] | None = None,
    table: Table = TABLE,
    check: bool = True,
    masks: Masks = "zeros",
    result: str = "auto",
    objective: str = "parameters",
    inputs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A smaller network with the outputs of `model` in eval mode, for the same arguments.

    Zeros in weights (pruned rows, columns, channels, heads) are removed, and constants that remain
    are folded into the next layers. Outputs are equal up to rounding, for finite inputs: 0 · x is
    taken to be 0. So the NaN of a removed 0 · Inf or 0 · NaN is not computed, and calls that
    compare or select such values (>, where, sort, argmax, nan_to_num) may return other numbers than
    in the model. `model` is not changed. Where a size cannot be dynamic, that of the example is
    used; where an op has no rule, its inputs keep their sizes. `demask.report` lists both.

    Args:
        model: an `nn.Module`, in any mode, or a `torch.export.ExportedProgram`.
        args: example inputs by position, a tuple such as (x,). Default: (), as for an exported
            program.
        kwargs: example inputs by name, a mapping. Default: None, for no such inputs.
        dynamic_shapes: the sizes that may differ from call to call. None (default): dimension 0 of
            each input, where torch.export proves that it can vary; with `modules`, as "all". "all":
            every size for which torch.export proves that. Other values are passed to
            `torch.export.export`.
        modules: the submodules to demask, in a copy of the full model: a list of names and globs,
            such as ["*.mlp"], or "auto": repeated blocks, such as the layers of a transformer, or
            else the largest submodules that can be captured. Default: None, for the full model.
        table: the table of ops. Default: `demask.ops.TABLE`; its method `extended` adds ops.
        check: whether to compare the result with `model` on the example inputs and on two random
            inputs of the same shapes. If they differ, a warning says so, and the result is the
            network before anything was removed. Default: True.
        masks: the zeros that count as removed weights. Other zeros stay, and can be trained.
            "zeros" (default): all zeros. "declared": zeros of torch.nn.utils.prune, of
            parametrizations and of buffers that are multiplied onto weights. {parameter name: mask
            tensor of 0 and 1}: the declared zeros, and the positions where the mask is 0. A mask
            has the parameter's shape or broadcasts to it; the result has the masked weights.
        result: "class": a network of the model's own class with smaller modules, and its methods,
            hooks and attributes; zeros stay where smaller shapes alone cannot remove them. "graph":
            the smallest network, an `fx.GraphModule`, which may have additional ops such as pads.
            "auto" (default): the class; where a graph would have 5 % fewer parameters, blocks in
            which that saves most are graph modules in it, and a graph is returned where the class
            keeps every parameter and MAC and a graph has 20 % fewer of either; both not for models
            with `generate` or `save_pretrained`. A warning says where the class costs more than
            5 %.
        objective: the size by which `result="auto"` chooses: "parameters" (default), or "macs", the
            multiply-adds of one call on the example inputs, with the same shares.
        inputs: the values that inputs may have, by name of an argument of forward, for the random
            inputs of the check: (low, high), both included, or "mask" (zeros and ones), "one-hot",
            "sorted" or "distinct". Default: None, for what the example shows: integers stay in its
            range, other numbers are normally distributed.

    Returns:
        The smaller network. Its attribute `demasked` is the record for `demask.report`.

    Raises:
        BadInput: an argument has a wrong type or value, a name in `modules` or `masks` does not
            exist, or the model does not run on the example inputs.
        NotExportable: torch.export cannot capture the model or a submodule in `modules`, or the
            captured graph has other outputs than the model.
        NeedsGraph: `result` is "class", and the model has none (an `ExportedProgram`, a graph), or
            has numbers among its inputs that may decide what its code does.

    Example:
        >>> import torch, demask
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> net[0].weight.data[:5] = 0  # outputs 0 to 4 of the first layer are constants
        >>> demask.demask(net, (torch.randn(3, 4),)).get_parameter("0.weight").shape
        torch.Size([3, 4])
    """
    unmasked, model = model, apply_masks(model, masks)
    if result not in ("auto", "class", "graph"):
        raise BadInput(f"expected result to be 'auto', 'class' or 'graph', got {result!r}")
    if objective not in ("parameters", "macs"):
        raise BadInput(f"expected objective to be 'parameters' or 'macs', got {objective!r}")
    options = {
        "dynamic_shapes": dynamic_shapes,
        "table": table,
        "check": check,
        "result": result,
        "objective": objective,
    }
    stated = state_domains(model, args, kwargs, inputs)
    # What becomes of modules is checked in the network.
    smaller = partial(demask, dynamic_shapes=part_dynamic_shapes(None), table=table, check=False, result="graph")
    has_depth = result != "graph" and masks == "zeros" and modules in (None, "auto")
    if has_depth and isinstance(model, nn.Module):
        short = without_dead_layers(model, args, kwargs, smaller)
        if short is not None:
            slim = demask(short.network, args, kwargs, modules=modules, inputs=inputs, **options)
            vars(slim)["demasked"] = short.original_record(provenance_of(slim))
            return _with_origin(slim, unmasked, model, masks)
    if modules is not None:
        if stated:
            raise BadInput("inputs= is of the network as one, not of modules=: leave one out")
        slim = _demask_modules(model, args, kwargs, modules, masks, options)
        return _with_origin(slim, unmasked, model, masks)
    moved = {"masks": move_tensors(masks, CPU), "inputs": inputs}
    slim = run_through_cpu(demask, model, args, kwargs, **moved, **options)
    if slim is not None:
        return _with_origin(slim, unmasked, model, masks)
    call = DemaskCall(model, args, kwargs, dynamic_shapes, table, masks, stated, check, smaller, objective)
    try:
        slim = first_result(call, result)
    except KeepsState as error:
        if result == "graph" or not isinstance(model, nn.Module):
            raise
        slim = _demask_with_state(call, model, error)
        if slim is None:
            names = modules_without_state(model, error.modules)
            slim = _demask_modules(model, args, kwargs, names, masks, options, optional=True)
        note = f"{error.where}: {error.op}; these modules have it themselves"
        record = provenance_of(slim)
        vars(slim)["demasked"] = replace(record, notes=(note, *record.notes))
    except NotExportable:
        is_module = isinstance(model, nn.Module)
        written = apply_weight_hooks(model, args, kwargs or {}) if is_module else None
        if written is None:
            raise
        slim = demask(written, args, kwargs, masks=masks, inputs=inputs, **options)
    if note := describe_plain(unmasked, slim):
        record = provenance_of(slim)
        vars(slim)["demasked"] = replace(record, notes=(note, *record.notes))
    return _with_origin(slim, unmasked, model, masks)


@in_isolation
@public
def explain(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    table: Table = TABLE,
    masks: Masks = "zeros",
) -> Trace:
    """Every change on the way from a network to the smallest graph that computes the same.

    It is what `demask.demask(model, args, result="graph")` does, without building the result.

    Args:
        model: an `nn.Module`, in any mode, or a `torch.export.ExportedProgram`.
        args: example inputs by position, a tuple such as (x,). Default: ().
        kwargs: example inputs by name, a mapping. Default: None, for no such inputs.
        dynamic_shapes: as of `demask.demask`. Default: None.
        table: the table of ops. Default: `demask.ops.TABLE`.
        masks: the zeros that count as removed weights, as of `demask.demask`. Default: "zeros".

    Raises:
        BadInput: an argument has a wrong type or value, or the model does not run on the example.
        NotExportable: torch.export cannot capture the model.

    Example:
        >>> import torch, demask
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.GLU(), nn.Linear(4, 2))
        >>> net[0].weight.data[:3], net[0].bias.data[:3] = 0, 0  # the values of three units
        >>> for change in demask.explain(net, (torch.ones(1, 4),)).changes[1:]:
        ...     print(*change.before, "->", *change.after)
        0.weight: 8x4 0.bias: 8 -> 0.weight: 2x4 0.bias: 2
        2.weight: 2x4 -> 2.weight: 2x1
    """
    log = Log(changes=[])
    program = next(programs_of(apply_masks(model, masks), args, kwargs, dynamic_shapes, masks))
    shrink_program(program, table, log=log)
    return Trace(tuple(log.changes or ()), log.notes)


def check_loaded_saves(network: nn.Module) -> None:
    """Check what a network that was loaded writes with `save_pretrained`, in place."""
    check_saves(network)


def _with_origin(slim: nn.Module, unmasked: Any, model: Any, masks: Masks) -> nn.Module:
    """A result with its sizes as those of the caller's network and its own, and with the link to
    that network. unmasked: the network without the masks that were passed."""
    record = provenance_of(slim)
    before = measure_module(unmasked, record.before.macs)
    after = measure_module(slim, record.after.macs)
    vars(slim)["demasked"] = replace(record, before=before, after=after)
    check_saves(slim, model)
    return remember_original(slim, unmasked, model, masks)


def _demask_with_state(call: DemaskCall, model: nn.Module, error: KeepsState) -> nn.Module | None:
    """A result of the class of a network that keeps state, if what it removes has a state that no
    call changes; else None."""
    try:
        own = first_result(replace(call, state=True), "smaller class")
    except DemaskError:
        return None
    inputs = call.args, dict(call.kwargs or {})
    return own if keeps_equal_state(model, own, inputs, error.attributes) else None


def _demask_modules(
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    names: str | Sequence[str],
    masks: Masks,
    options: Mapping[str, Any],
    *,
    optional: bool = False,
) -> nn.Module:
    """A copy of `model` with submodules `names` demasked. Raises what `replace_submodules` does."""
    options = {**options, "dynamic_shapes": part_dynamic_shapes(options["dynamic_shapes"])}

    def part(name: str, part_args: tuple[Any, ...], part_kwargs: dict[str, Any]) -> nn.Module:
        module = model.get_submodule(name)
        return demask(module, part_args, part_kwargs, masks=masks_of_submodule(masks, name), **options)

    slim = replace_submodules(model, args, kwargs, names, part, optional=optional)
    fit_config(slim, lambda: not describe_difference(slim, model, args, kwargs))
    return slim
