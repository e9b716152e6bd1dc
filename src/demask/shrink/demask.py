"""demask(): a network captured, made smaller, and given back as the caller's own or as a graph."""

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
from demask.graph.capture.declared_masks import Masks, masked, within
from demask.graph.program import Program
from demask.graph.provenance import Provenance
from demask.graph.result.class_result import remember
from demask.graph.result.demasked_module import build
from demask.graph.result.restore_modules import originals_of
from demask.ops import TABLE, Table
from demask.shrink.check import checked, unlike
from demask.shrink.on_device import CPU, on_device, through_cpu
from demask.shrink.own_class.build import (
    PreservedShape,
    changed_numbers,
    constants_at_effects,
    own_class,
    own_class_with_graphs,
    places_of,
    reasons_for,
    spared,
    zeros_cost,
)
from demask.shrink.own_class.proof import Proof, Unlike
from demask.shrink.pipeline import FORMS, programs_of, reduced, smaller_sizes
from demask.shrink.submodules import sizes_of_parts, with_parts

GIVES_WAY = 1.01  # times the parameters of a graph, that a network of its own class may have


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

    args, kwargs: example inputs; dimension 0 of each is dynamic where torch.export proves it can
    be. dynamic_shapes: goes to torch.export as it is; "all" makes every size dynamic that it
    proves can be (the default for parts). modules: names and globs ("*.mlp") of submodules to
    demask alone, in a copy of the model, or "auto": blocks that repeat, else the largest that can
    be captured. table: the op table to use (`demask.ops.TABLE.extended(...)`). check: run the
    result and the model on the example and on two random draws like it; where they differ, a
    warning says so, and the network is returned as it was captured. A call whose rule fails stays
    as it is; where sizes cannot be dynamic, static ones are tried: `demask.report` says why.
    masks: which zeros say that a weight was removed. "zeros": all of them. "declared": those of
    torch.nn.utils.prune, of parametrizations and of buffers multiplied onto weights; all other
    parameters stay, to be trained (an adapter that begins at zero). {name: tensor}: declared ones,
    and those of these masks (0: removed), which are multiplied onto the parameters of these names.
    result: what comes back. "class": a network of the model's own class whose modules are smaller,
    with its methods, hooks and attributes; NeedsGraph where more than shapes changed, with what
    would have to be masked alike. "graph": an fx.GraphModule that calls modules. "auto": the class,
    with graphs for the modules that need them; a graph where that is the whole network.
    Raises NotExportable or BadInput. The model is not changed. Feature rows 000-a to 000-k.

    >>> import torch, demask
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> net[0].weight.data[:5] = 0
    >>> demask.demask(net, (torch.randn(3, 4),)).get_parameter("0.weight").shape
    torch.Size([3, 4])
    """
    model = masked(model, masks)
    if result not in ("auto", "class", "graph"):
        raise BadInput(f"expected result to be 'auto', 'class' or 'graph', got {result!r}")
    if modules is not None:
        return _demask_modules(
            model, args, kwargs, dynamic_shapes, modules, table, check, masks, result
        )
    rest = {"dynamic_shapes": dynamic_shapes, "table": table, "check": check, "result": result}
    slim = through_cpu(demask, model, args, kwargs, masks=on_device(masks, CPU), **rest)
    if slim is not None:
        return slim
    call = _DemaskCall(model, args, kwargs, dynamic_shapes, table, masks)
    differs: CaptureDiffers | None = None
    for program, target, record, apart in _candidates(call.programs(model), call.table):
        own, reasons = call.own(program, target, record, apart, result, check)
        if own is not None:
            return own
        record = replace(record, graph_reasons=reasons)
        slim = build(target, record, originals=originals_of(model, program))
        try:
            return checked(slim, program, model, args, kwargs) if check else slim
        except CaptureDiffers as error:
            differs = differs or error
    assert differs is not None  # there is a candidate, or the first program raised
    raise differs


def _demask_modules(
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
    names: str | Sequence[str],
    table: Table,
    check: bool,
    masks: Masks,
    form: str,
) -> nn.Module:
    """A copy of `model` with submodules `names` demasked. Raises what `with_parts` does."""

    def part(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> nn.Module:
        return demask(
            model.get_submodule(name), given, named, dynamic_shapes=sizes_of_parts(dynamic_shapes),
            table=table, check=check, masks=within(masks, name), result=form,
        )  # fmt: skip

    return with_parts(model, args, kwargs, names, part)


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
        """The programs of a network that is called in this way."""
        return programs_of(model, self.args, self.kwargs, self.shapes, self.masks)

    def own(
        self, program: Program, target: Program, record: Provenance, apart: bool, result: str,
        check: bool,
    ) -> tuple[nn.Module | None, tuple[str, ...]]:  # fmt: skip
        """The result of the caller's own class, if it is asked for and there is one; else why not.
        Raises NeedsGraph where nothing else is asked for.

        What gives way for it is less than GIVES_WAY of the parameters that a graph would have: a
        few zeros that nobody pruned, such as the first of the numbers 0 to 15 in a buffer.
        """
        if result == "graph":
            return None, ()
        if apart:
            whole, other = reduced(program, self.table, sides=False)
            if other.after.parameters <= record.after.parameters:
                target, record = whole, other
        try:
            return self._own(program, target, record, check), ()
        except Unlike as error:
            failure = error
        spare = frozenset(constants_at_effects(target))
        more = (GIVES_WAY - 1) * record.after.parameters
        if spare and zeros_cost(program, spare, record.cuts) <= more:
            kept = spared(program, spare)
            whole, other = reduced(kept, self.table, sides=False)
            if other.after.parameters <= GIVES_WAY * record.after.parameters:
                with contextlib.suppress(Unlike):
                    return self._own(kept, whole, other, check, spare=spare), ()
        places = places_of(target)
        reasons = (str(failure), *map(str, places))
        if result == "class":
            text = "this network comes back as a graph alone: " + "; ".join(reasons)
            raise NeedsGraph(text, reasons) from failure
        with contextlib.suppress(Unlike):
            return self._own(program, target, record, check, why=(failure, places)), ()
        return None, reasons

    def _own(
        self, program: Program, target: Program, record: Provenance, check: bool,
        *, spare: frozenset[str] = frozenset(), why: tuple[Unlike, list[PreservedShape]] | None = None,
    ) -> nn.Module:  # fmt: skip
        """The class result that computes `target`, which `program` became; raises Unlike.

        spare: tensors whose zeros remove nothing. why: parts are graphs, since not all of it can be
        of the model's class: what failed, and where shapes are kept.
        """
        again = replace(self, masks="zeros" if self.masks == "zeros" else "declared")

        def programs(network: nn.Module) -> Iterator[Program]:
            return (spared(captured, spare) for captured in again.programs(network))

        forms = [partial(form, table=self.table) for form in FORMS]
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
            wrong = check and unlike(own, self.model, self.args, self.kwargs, record=known)
            if wrong:
                raise Unlike(f"the network computes something else: {wrong}")
        except (MemoryError, Unlike):
            raise
        except Exception as error:
            if is_strict():
                raise
            raise Unlike(described(error)) from error
        record = replace(record, form="class", numbers=changed_numbers(self.model, own))
        if why is None:
            record = replace(record, effects={})
        record = replace(
            record,
            graph_reasons=tuple(reasons_for(parts, why[1], why[0])) if why else (),
            notes=(*record.notes, *(f"{part}: {note}" for part in parts
                                    for note in _record_of(own, part).notes)),
        )  # fmt: skip
        remember(own, record, self.args, self.kwargs)
        return own


def _record_of(network: nn.Module, path: str) -> Provenance:
    """What was done to a part that is a graph."""
    part: Any = network.get_submodule(path)
    return part.demasked


def _candidates(
    programs: Iterator[Program], table: Table
) -> Iterator[tuple[Program, Program, Provenance, bool]]:
    """Programs for which demasking works out, what they become, and whether a part was split off;
    where it does for none, the first program as it is."""
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
        target, record = reduced(program, table, log=log)
        reason = reason or "".join(log.notes[:1])
        if log.gave_up:
            failed.append((program, target, record, log.apart))
            continue
        yield program, target, record, log.apart
        reason = "the graph captured does not compute what the model does"
