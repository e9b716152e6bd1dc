"""The pipeline: capture, fold, know, need, place, rewrite, build."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from demask.facts.known import Facts, Relations, is_matrix, known
from demask.facts.needed import needed
from demask.graph.capture import capture
from demask.graph.fold import folded
from demask.graph.functional import functionalized
from demask.graph.guards import renamed
from demask.graph.hoist import hoisted
from demask.graph.program import Program
from demask.graph.provenance import Cut, InputSpec, Provenance, Reason, Sizes
from demask.graph.recurrent import layered
from demask.graph.result import Demasked, build
from demask.graph.spell import spelled
from demask.graph.unmerge import unmerged
from demask.ops import TABLE, Declined, Relation, Table, bind, schema
from demask.shrink.align import aligned
from demask.shrink.condense import condensed
from demask.shrink.groups import grouped
from demask.shrink.names import named
from demask.shrink.place import place
from demask.shrink.rewrite import Rewritten, rewrite
from demask.shrink.side import sided
from demask.shrink.stack import apart, stacked


def demask(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    modules: Sequence[str] | None = None,
    table: Table | None = None,
) -> Demasked:
    """A smaller module that computes what `model` computes in eval mode: same call, same outputs.

    args, kwargs: example inputs; dimension 0 of each is dynamic where torch.export proves it can
    be. dynamic_shapes: goes to torch.export as it is; "all" makes every size dynamic that it
    proves can be (the default for parts). modules: names of submodules to demask alone, in a copy
    of the model. table: the op table to use (`demask.ops.TABLE.extended(...)`).
    Raises NotExportable or BadInput. The model is not changed. Feature rows 000-a to 000-k.

    >>> import torch, demask
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> net[0].weight.data[:5] = 0
    >>> demask.demask(net, (torch.randn(3, 4),)).get_parameter("0.weight").shape
    torch.Size([3, 4])
    """
    if modules is not None:
        from demask.shrink.partial import demask_modules

        return demask_modules(model, args, kwargs, dynamic_shapes, modules, table)  # type: ignore[return-value]
    program = folded(apart(functionalized(capture(model, args, kwargs, dynamic_shapes))))
    if isinstance(model, Demasked):
        inherited = renamed(model.demasked.guards, model.demasked.inputs, _inputs(program))
        program = replace(program, guards=tuple(dict.fromkeys((*program.guards, *inherited))))
    return shrunk(program, TABLE if table is None else table)


def simplified(program: Program) -> Program:
    """Canonically spelled, constants folded: what the facts are read off."""
    return folded(hoisted(unmerged(spelled(program))))


def relations_of(graph: fx.Graph, table: Table) -> dict[fx.Node, Relation | Declined]:
    """What the table says of every call of a graph."""
    return {
        node: bind(node, table)
        for node in graph.nodes
        if node.op == "call_function"
        and node.target is not operator.getitem
        and _makes_tensors(node)
    }


def _makes_tensors(node: fx.Node) -> bool:
    return all(isinstance(value, Tensor) for value in schema.outputs(node))


def shrunk(given: Program, table: Table) -> Demasked:
    """The module of the smallest program that computes the same as a functional, folded one.

    Passes are made until one makes nothing smaller: what a pass adds to keep shapes (a border map,
    a vector of constants) may itself hold zeros. So demasking twice is demasking once; and where
    nothing at all became smaller, the program is built as it was given.
    """
    first = step = _measured(given, table)
    while (smaller := _smaller(step, table)) is not None:
        step = smaller
    if step is first:
        step = replace(first, program=_owned(given), cuts=_uncut(given))
    program, cuts = named(stacked(step.program), step.cuts)
    return build(program, _provenance(first, replace(step, cuts=cuts)))


@dataclass(frozen=True, slots=True)
class _Step:
    """A program, how it measures, and how its tensors were cut from those of the first."""

    program: Program
    relations: Relations
    sizes: Sizes
    cuts: Mapping[str, Cut]
    reasons: tuple[Reason, ...] = ()

    @property
    def weight(self) -> tuple[int, int, int]:
        """Parameters, MACs, elements written: what has to shrink."""
        return (self.sizes.parameters, self.sizes.macs, _traffic(self.program))


def _measured(program: Program, table: Table) -> _Step:
    relations = relations_of(layered(program).graph, table)
    return _Step(program, relations, sizes_of(program, relations), _uncut(program))


def _smaller(step: _Step, table: Table) -> _Step | None:
    """One more pass, if it makes the program smaller in something and no larger in parameters."""
    for attempt in _attempts(simplified(step.program), table):
        made = _measured(folded(attempt.program), table)
        less = made.weight[0] < step.weight[0] or (
            made.weight[1:] != step.weight[1:]
            and (made.weight[1] <= step.weight[1] and made.weight[2] <= step.weight[2])
        )
        if made.weight[0] <= step.weight[0] and less:
            composed = {name: _composed(cut, step.cuts) for name, cut in attempt.cuts.items()}
            # What folding made of a cut tensor, under its name, is no cut.
            cuts = {
                name: cut
                for name, cut in composed.items()
                if name in made.cuts and math.prod(_left(cut)) == math.prod(made.cuts[name].shape)
            }
            return replace(made, cuts=cuts, reasons=(*step.reasons, *attempt.reasons))
    return None


def _attempts(program: Program, table: Table) -> Iterator[Rewritten]:
    """Ways to rewrite a program, the one that removes most first: with complete axes over what
    varies, with heads re-ordered, with side networks split off, as it is; with weights that several
    calls read cut alike; and frugal (constants that would be matrices are computed instead)."""
    relations = relations_of(program.graph, table)
    facts = facts_of(program, relations)
    dense = condensed(program, relations, facts)
    if dense is not None:
        yield from _attempts(folded(dense), table)
    needs = needed(program.graph, relations, facts)
    apart_heads = grouped(program, relations, facts, needs)
    if apart_heads is not None:
        yield from _attempts(folded(apart_heads), table)
    ordered = aligned(program, relations, facts, needs)
    if ordered is not None:
        yield from _attempts(folded(ordered), table)
    split = sided(program, relations, facts)
    if split is not None:
        yield _attempt(split, relations_of(split.graph, table))
    yield _attempt(program, relations, facts)
    if any(node.op == "get_attr" and len(node.users) > 1 for node in program.graph.nodes):
        yield _attempt(program, relations, facts, tied=True)
    if any(is_matrix(fact) for (node, _), fact in facts.items() if node.op == "call_function"):
        yield _attempt(program, relations, facts_of(program, relations, frugal=True))


def _uncut(program: Program) -> dict[str, Cut]:
    return {
        name: Cut(c.name, tuple(c.tensor.shape), (None,) * c.tensor.ndim)
        for name, c in program.constants.items()
    }


def _left(cut: Cut) -> tuple[int, ...]:
    """The shape of what a cut leaves."""
    return tuple(n if p is None else len(p) for n, p in zip(cut.shape, cut.kept, strict=True))


def _composed(later: Cut, earlier: Mapping[str, Cut]) -> Cut:
    """Where a tensor cut twice came from in the first program."""
    first = earlier.get(later.source)
    if first is None:
        return later
    made = _left(first)
    # A norm's scale carries axes of size one behind its own.
    if later.shape != made + (1,) * (len(later.shape) - len(made)):
        return later  # A tensor folded between passes, under the name of one it was folded from.
    kept = tuple(
        b if a is None else a if b is None else tuple(a[p] for p in b)
        for a, b in zip(first.kept, later.kept, strict=False)
    )
    return Cut(first.source, first.shape, kept)


def facts_of(program: Program, relations: Relations, *, frugal: bool = False) -> Facts:
    """What is known of every value of a program."""
    values = {name: constant.tensor for name, constant in program.constants.items()}
    return known(program.graph, relations, values, frugal=frugal)


def _attempt(
    program: Program, relations: Relations, facts: Facts | None = None, *, tied: bool = False
) -> Rewritten:
    """One pass over the program."""
    facts = facts_of(program, relations) if facts is None else facts
    needs = needed(program.graph, relations, facts)
    placement = place(program.graph, relations, facts, needs, tied=tied)
    return rewrite(program, relations, facts, needs, placement)


def _owned(program: Program) -> Program:
    """The program with tensors of its own; tied ones stay tied."""
    clones: dict[Any, Tensor] = {}
    constants = {}
    for name, constant in program.constants.items():
        tensor = constant.tensor
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        constants[name] = replace(constant, tensor=clones.setdefault(key, tensor.clone()))
    return program.with_graph(program.graph, constants)


def _traffic(program: Program) -> int:
    """Elements that the calls of a program write, on the example sizes."""
    total = 0
    for node in program.graph.nodes:
        for value in schema.outputs(node) if node.op == "call_function" else ():
            if isinstance(value, Tensor):
                total += math.prod(schema.hint(size) for size in value.shape)
    return total


def _provenance(first: _Step, last: _Step) -> Provenance:
    marks = [node.meta["effect"] for node in last.program.graph.nodes if "effect" in node.meta]
    return Provenance(
        cuts=last.cuts,
        reasons=last.reasons,
        effects=dict(Counter(marks)),
        notes=first.program.notes,
        inputs=_inputs(first.program),
        before=first.sizes,
        after=last.sizes,
        removed=_removed(first.program, last.program),
        guards=first.program.guards,
    )


def sizes_of(program: Program, relations: Mapping[fx.Node, Relation | Declined]) -> Sizes:
    """Parameters, MACs of one call on the example sizes, bytes; tied tensors count once."""
    tensors = {
        c.tensor.data_ptr(): c.tensor for c in program.constants.values() if c.tensor.numel()
    }
    counted = [t for t in tensors.values() if t.is_floating_point()]
    return Sizes(
        parameters=sum(t.numel() for t in counted),
        macs=sum(_macs(r) for r in relations.values() if isinstance(r, Relation)),
        bytes=sum(t.numel() * t.element_size() for t in tensors.values()),
    )


def _macs(relation: Relation) -> int:
    """Multiplications that are summed, read off the letters of the line."""
    if relation.back:
        return _recurrent_macs(relation)
    if relation.entry.fill not in ("sum", "mix"):
        return 0
    sizes = _letter_sizes(relation)
    first, second = relation.factors
    kernel = relation.window & relation.letters(relation.ins[second])
    if relation.entry.fill == "sum":
        letters = relation.letters(relation.outs[0]) | relation.contracted | kernel
        return math.prod(sizes[a] for a in letters)
    main = relation.letters(relation.ins[relation.entry.main])
    values = math.prod(sizes[a] for a in main | relation.letters(relation.outs[0]))
    if not relation.contracted:
        return values
    # Attention: the products that make the weights, then those of the weights with the values.
    weights = relation.letters(relation.ins[first]) | relation.letters(relation.ins[second])
    return math.prod(sizes[a] for a in weights) + values


def _recurrent_macs(relation: Relation) -> int:
    """Every entry of every matrix once a step."""
    sizes = _letter_sizes(relation)
    weights = [relation.letters(axes) for axes in relation.ins if len(axes) == 2]
    steps = relation.letters(relation.ins[0]) - frozenset().union(*weights)
    return math.prod(sizes[a] for a in steps) * sum(math.prod(sizes[a] for a in w) for w in weights)


def _letter_sizes(relation: Relation) -> dict[str, int]:
    """The size of every letter on the example."""
    sizes = {letter: size for letter, size in relation.size.items() if size is not None}
    shapes = [
        o.value.meta["val"].shape if isinstance(o.value, fx.Node) else () for o in relation.operands
    ]
    shapes += [value.shape for value in schema.outputs(relation.node)]
    for axes, shape in zip([*relation.ins, *relation.outs], shapes, strict=True):
        for axis, size in zip(axes, shape, strict=True):
            rest = [a for a in axis if a not in sizes]
            if len(rest) == 1:
                known = math.prod(sizes[a] for a in axis if a in sizes)
                sizes[rest[0]] = schema.hint(size) // max(known, 1)
    return sizes


def _removed(before: Program, after: Program) -> dict[str, int]:
    """Per module, how many parameters are gone."""
    found: dict[str, int] = {}
    for sign, constants in ((1, before.constants), (-1, after.constants)):
        for name, constant in constants.items():
            if constant.tensor.is_floating_point():
                module = next(iter(constant.aliases), name).rpartition(".")[0]
                found[module] = found.get(module, 0) + sign * constant.tensor.numel()
    return {module: count for module, count in found.items() if count > 0}


def _inputs(program: Program) -> tuple[InputSpec, ...]:
    specs = []
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, Tensor):
            sizes = tuple(s if isinstance(s, int) else str(s.node.expr) for s in value.shape)
            example = tuple(schema.hint(s) for s in value.shape)
            dtype = str(value.dtype).removeprefix("torch.")
            specs.append(InputSpec(node.name, sizes, dtype, example))
    return tuple(specs)
