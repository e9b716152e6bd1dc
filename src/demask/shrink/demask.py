"""demask(): capture a network, shrink it, and build the result as its own class or as a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from demask.errors import BadInput, CaptureDiffers, DemaskError, NeedsGraph
from demask.failures import Log, described, is_strict, public
from demask.graph.capture.declared_masks import Masks, apply_masks, masks_of_submodule
from demask.graph.program import Program
from demask.graph.provenance import Provenance
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

CLASS_OVERHEAD = 1.01  # most parameters of a result of the own class, relative to a graph


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
) -> nn.Module:
    """A smaller network that computes what `model` computes in eval mode: same call, same outputs.

    The model is not changed. A call whose rule fails stays as it is; where sizes cannot be dynamic,
    static ones are tried: `demask.report` says why.

    Args:
        model: a network, or its exported program.
        args, kwargs: example inputs; dimension 0 of each is dynamic where torch.export proves it
            can be.
        dynamic_shapes: passed to torch.export unchanged; "all" makes every size dynamic that
            torch.export proves can be (the default for parts).
        modules: names and globs ("*.mlp") of submodules to demask alone, in a copy of the model, or
            "auto": blocks that repeat, else the largest that can be captured.
        table: the op table to use (`demask.ops.TABLE.extended(...)`).
        check: whether to run the result and the model on the example and on two random draws like
            it. Where they differ, a warning says so, and the network is returned as it was
            captured.
        masks: which zeros say that a weight was removed. "zeros": all of them. "declared": those of
            torch.nn.utils.prune, of parametrizations and of buffers multiplied onto weights; all
            other parameters stay, to be trained (an adapter that begins at zero). {name: tensor}:
            declared ones, and those of these masks (0: removed), which are multiplied onto the
            parameters of these names.
        result: the type of the result. "class": a network of the model's own class whose modules
            are smaller, with its methods, hooks and attributes. "graph": an fx.GraphModule that
            calls modules. "auto": the class, with graphs for the modules that need them; a graph
            where that is the whole network.

    Returns:
        The smaller network; `.demasked` is its record.

    Raises:
        BadInput: an argument is not valid, or the model fails on the example.
        NotExportable: torch.export cannot capture the network.
        NeedsGraph: `result` is "class" and more than shapes changed; it names the layers that would
            have to be masked alike.

    Example:
        >>> import torch, demask
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> net[0].weight.data[:5] = 0
        >>> demask.demask(net, (torch.randn(3, 4),)).get_parameter("0.weight").shape
        torch.Size([3, 4])
    """
    model = apply_masks(model, masks)
    if result not in ("auto", "class", "graph"):
        raise BadInput(f"expected result to be 'auto', 'class' or 'graph', got {result!r}")
    options = {"dynamic_shapes": dynamic_shapes, "table": table, "check": check, "result": result}
    if modules is not None:
        return _demask_modules(model, args, kwargs, modules, masks, options)
    slim = run_through_cpu(demask, model, args, kwargs, masks=move_tensors(masks, CPU), **options)
    if slim is not None:
        return slim
    call = _DemaskCall(model, args, kwargs, dynamic_shapes, table, masks)
    differs: CaptureDiffers | None = None
    for program, target, record, has_side in _candidates(call.programs(model), call.table):
        own, reasons = call.class_result(program, target, record, has_side, result, check)
        if own is not None:
            return own
        record = replace(record, graph_reasons=reasons)
        slim = build(target, record, originals=originals_of(model, program))
        try:
            return check_result(slim, program, model, args, kwargs) if check else slim
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
) -> nn.Module:
    """A copy of `model` with submodules `names` demasked. Raises what `replace_submodules` does."""
    options = {**options, "dynamic_shapes": part_dynamic_shapes(options["dynamic_shapes"])}

    def part(name: str, part_args: tuple[Any, ...], part_kwargs: dict[str, Any]) -> nn.Module:
        module = model.get_submodule(name)
        return demask(
            module, part_args, part_kwargs, masks=masks_of_submodule(masks, name), **options
        )

    return replace_submodules(model, args, kwargs, names, part)


@dataclass(frozen=True, slots=True)
class _DemaskCall:
    """A call of demask()."""

    model: nn.Module | ExportedProgram
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None
    shapes: Any
    table: Table
    masks: Masks

    def programs(self, model: nn.Module | ExportedProgram) -> Iterator[Program]:
        """The programs of a network for the inputs of this call."""
        return programs_of(model, self.args, self.kwargs, self.shapes, self.masks)

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
                own, self.model, self.args, self.kwargs, record=known
            )
            if wrong:
                raise ProgramMismatch(f"the network computes something else: {wrong}")
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
