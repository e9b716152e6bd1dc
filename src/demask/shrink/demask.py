"""demask(): capture a network, shrink it, and build the result as its own class or as a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from demask.errors import BadInput, CaptureDiffers, DemaskError, Mismatch, NeedsGraph, NotExportable
from demask.failures import Log, described, is_strict, public
from demask.graph.capture.declared_masks import Masks, apply_masks, masks_of_submodule
from demask.graph.capture.module_state import KeepsState, keeps_equal_state, modules_without_state
from demask.graph.capture.weight_hooks import apply_weight_hooks
from demask.graph.input_domains import Domains, state_domains
from demask.graph.isolation import in_isolation
from demask.graph.program import Program
from demask.graph.provenance import Provenance, provenance_of
from demask.graph.result.class_result import record_call
from demask.graph.result.demasked_module import build
from demask.graph.result.restore_modules import originals_of
from demask.ops import TABLE, Table
from demask.shrink.check import check_result, describe_difference
from demask.shrink.on_device import CPU, move_tensors, run_through_cpu
from demask.shrink.own_class.build import (
    PreservedShape,
    changed_numbers,
    count_zeros,
    effect_constants,
    explain_graphs,
    find_preserved_shapes,
    own_class,
    own_class_with_graphs,
    retain_zeros,
)
from demask.shrink.own_class.proof import ProgramMismatch, Proof
from demask.shrink.pipeline import NORMAL_FORMS, programs_of, shrink_program, smaller_sizes
from demask.shrink.submodules import part_dynamic_shapes, replace_submodules
from demask.shrink.training.pieces import remember_original

CLASS_OVERHEAD = 1.01  # most parameters of a result of the own class, relative to a graph


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
        modules: the submodules to demask, in a copy of the whole model: a list of names and globs,
            such as ["*.mlp"], or "auto": repeated blocks, such as the layers of a transformer, or
            else the largest submodules that can be captured. Default: None, for the whole model.
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
            hooks and attributes. "graph": an `fx.GraphModule`. "auto" (default): the class, in
            which modules that need additional ops are graph modules; or one graph module if the
            whole network does.
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
        NeedsGraph: `result` is "class", and the network needs additional ops. The message names the
            layers that have to be masked alike.

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
    options = {"dynamic_shapes": dynamic_shapes, "table": table, "check": check, "result": result}
    stated = state_domains(model, args, kwargs, inputs)
    if modules is not None:
        if stated:
            raise BadInput("inputs= is of the network as one, not of modules=: leave one out")
        slim = _demask_modules(model, args, kwargs, modules, masks, options)
        return remember_original(slim, unmasked, model, masks)
    moved = {"masks": move_tensors(masks, CPU), "inputs": inputs}
    slim = run_through_cpu(demask, model, args, kwargs, **moved, **options)
    if slim is not None:
        return remember_original(slim, unmasked, model, masks)
    call = _DemaskCall(model, args, kwargs, dynamic_shapes, table, masks, stated)
    try:
        slim = _demask_program(call, result, check)
    except KeepsState as error:
        if result == "graph" or not isinstance(model, nn.Module):
            raise
        slim = _demask_with_state(call, model, error, check)
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
    return remember_original(slim, unmasked, model, masks)


def _demask_with_state(
    call: _DemaskCall, model: nn.Module, error: KeepsState, check: bool
) -> nn.Module | None:
    """A result of the class of a network that keeps state, if what it removes has a state that no
    call changes; else None."""
    try:
        own = _demask_program(replace(call, state=True), "class", check)
    except DemaskError:
        return None
    inputs = call.args, dict(call.kwargs or {})
    return own if keeps_equal_state(model, own, inputs, error.attributes) else None


def _demask_program(call: _DemaskCall, result: str, check: bool) -> nn.Module:
    """The result of a call that is captured as one program."""
    model, args, kwargs = call.model, call.args, call.kwargs
    differs: CaptureDiffers | None = None
    for program, target, record, has_side in _candidates(call.programs(model), call.table):
        own, reasons = call.class_result(program, target, record, has_side, result, check)
        if own is not None:
            return own
        record = replace(record, graph_reasons=reasons)
        slim = build(target, record, originals=originals_of(model, program))
        try:
            if check:
                slim = check_result(slim, program, model, args, kwargs, call.stated)
            return slim
        except CaptureDiffers as error:
            differs = differs or error
    assert differs is not None  # there is a candidate, or the first program raised
    raise differs


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
        return demask(
            module, part_args, part_kwargs, masks=masks_of_submodule(masks, name), **options
        )

    return replace_submodules(model, args, kwargs, names, part, optional=optional)


@dataclass(frozen=True, slots=True)
class _DemaskCall:
    """A call of demask()."""

    model: nn.Module | ExportedProgram
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None
    shapes: Any
    table: Table
    masks: Masks
    stated: Domains
    state: bool = False  # whether the network keeps state in Python

    def programs(self, model: nn.Module | ExportedProgram) -> Iterator[Program]:
        """The programs of a network for the inputs of this call."""
        return programs_of(
            model,
            self.args,
            self.kwargs,
            self.shapes,
            self.masks,
            writes=True,
            stated=self.stated,
            state=self.state,
        )

    def class_result(
        self, program: Program, target: Program, record: Provenance, has_side: bool, result: str,
        check: bool,
    ) -> tuple[nn.Module | None, tuple[str, ...]]:  # fmt: skip
        """The result of the model's own class, if there is one and it may be returned; else why
        not. Raises NeedsGraph where nothing else may be returned.

        The result may have up to CLASS_OVERHEAD times the parameters of a graph: then a few zeros
        that were not pruned, such as the first of the numbers 0 to 15 in a buffer, are not removed.
        """
        if result == "graph":
            return None, ()
        if has_side:
            whole, other = shrink_program(program, self.table, sides=False)
            if other.after.parameters <= record.after.parameters:
                target, record = whole, other
        try:
            return self._build_class_result(program, target, record, check), ()
        except ProgramMismatch as error:
            failure = error
        spare = frozenset(effect_constants(target))
        more = (CLASS_OVERHEAD - 1) * record.after.parameters
        if spare and count_zeros(program, spare, record.cuts) <= more:
            with_zeros = retain_zeros(program, spare)
            whole, other = shrink_program(with_zeros, self.table, sides=False)
            if other.after.parameters <= CLASS_OVERHEAD * record.after.parameters:
                with contextlib.suppress(ProgramMismatch):
                    return self._build_class_result(
                        with_zeros, whole, other, check, spare=spare
                    ), ()
        places = find_preserved_shapes(target)
        reasons = (str(failure), *map(str, places))
        if result == "class":
            text = "this network can only be returned as a graph: " + "; ".join(reasons)
            raise NeedsGraph(text, reasons) from failure
        with contextlib.suppress(ProgramMismatch):
            return self._build_class_result(
                program, target, record, check, why=(failure, places)
            ), ()
        return None, reasons

    def _build_class_result(
        self, program: Program, target: Program, record: Provenance, check: bool,
        *, spare: frozenset[str] = frozenset(),
        why: tuple[ProgramMismatch, list[PreservedShape]] | None = None,
    ) -> nn.Module:  # fmt: skip
        """The result of the model's class that computes `target`, which `program` became; raises
        ProgramMismatch.

        spare: tensors whose zeros remove nothing. why: for a result with graphs for some modules:
        why it cannot be of the model's class alone, and where shapes are preserved.
        """
        again = replace(self, masks="zeros" if self.masks == "zeros" else "declared")

        def programs(network: nn.Module) -> Iterator[Program]:
            return (retain_zeros(captured, spare) for captured in again.programs(network))

        forms = [partial(form, table=self.table) for form in NORMAL_FORMS]
        inputs = self.args, dict(self.kwargs or {})
        proof = Proof(program, target, record.cuts, inputs, programs, forms)
        parts: tuple[str, ...] = ()
        try:
            if why is not None and isinstance(self.model, nn.Module):
                layers = originals_of(self.model, program)
                own, parts = own_class_with_graphs(self.model, proof, layers, why[0])
            else:
                own = own_class(self.model, proof)
            known = record if parts else None
            wrong = check and describe_difference(
                own, self.model, self.args, self.kwargs, record=known, stated=self.stated
            )
            if wrong:
                error = Mismatch if is_strict() and not parts else ProgramMismatch
                raise error(f"the network computes something else: {wrong}")
        except (MemoryError, ProgramMismatch):
            raise
        except Exception as error:
            if is_strict():
                raise
            raise ProgramMismatch(described(error)) from error
        record = replace(record, form="class", numbers=changed_numbers(self.model, own))
        if why is None:
            record = replace(record, effects={})
        record = replace(
            record,
            graph_reasons=tuple(explain_graphs(parts, why[1], why[0])) if why else (),
            notes=(*record.notes, *(f"{part}: {note}" for part in parts
                                    for note in _record_of(own, part).notes)),
        )  # fmt: skip
        record_call(own, record, self.args, self.kwargs)
        return own


def _record_of(network: nn.Module, path: str) -> Provenance:
    """The record of a part that is a graph."""
    part: Any = network.get_submodule(path)
    return part.demasked


def _candidates(
    programs: Iterator[Program], table: Table
) -> Iterator[tuple[Program, Program, Provenance, bool]]:
    """Programs that can be demasked, what they become, and whether a side network was split off;
    where none can, the first program unchanged."""
    failed: list[tuple[Program, Program, Provenance, bool]] = []
    reason = ""
    while True:
        try:
            program = next(programs, None)
        except DemaskError:
            if not reason:
                raise
            program = None
        if program is None:
            yield from failed[:1]
            return
        log, program = Log(), smaller_sizes(program, reason) if reason else program
        target, record = shrink_program(program, table, log=log)
        reason = reason or "".join(log.notes[:1])
        if log.gave_up:
            failed.append((program, target, record, log.has_side_network))
            continue
        yield program, target, record, log.has_side_network
        reason = "the captured graph does not compute what the model does"
