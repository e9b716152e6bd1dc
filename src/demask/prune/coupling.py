"""Slices of a network: positions of axes that can only be removed together.

`Coupling.of(model, inputs)` captures a network and ties its axes (`AxisTies`). Positions of cells
that are tied form a slice; slices with positions in the same axes form a group.

Groups are channels, units of linear layers or heads of attention. `groups()` lists them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from demask.errors import BadInput
from demask.failures import public
from demask.graph.capture.fold_constants import fold_constants, plain_name
from demask.graph.isolation import in_isolation
from demask.graph.module_copy import structural_copy
from demask.graph.program import Program, path_of
from demask.graph.provenance import Sizes
from demask.graph.split_recurrent import split_recurrent
from demask.ops import TABLE, Relation, Table, schema
from demask.ops.entries.contraction import GROUPED
from demask.ops.entry import op_name
from demask.ops.traits import RESHAPES
from demask.prune.axis_ties import READS, ROWS, SHIFTS, AxisTies, find_roles
from demask.shrink.on_device import CPU, copy_to_cpu, device_of
from demask.shrink.pipeline import canonicalize, programs_of
from demask.shrink.program_size import measure_program
from demask.text_table import number_table, render_text

Arguments = tuple[tuple[Any, ...], Mapping[str, Any] | None]
# The kinds of groups that a structure consists of.
KINDS_OF = {"channel": ("channel", "unit"), "unit": ("unit",), "head": ("head",), "expert": ("expert",)}


@in_isolation
@public
def groups(model: nn.Module, example_inputs: Any, *, structure: str = "channel", skip: Sequence[str] = ()) -> Groups:
    """The slices of a network that can only be removed together, by the op table.

    A slice is a position of an axis (a channel) or several (the rows of a head): where it is zero
    in all weights that compute it, `demask.demask` removes it there and in all weights that read
    it. What reaches the inputs or outputs of the network, or a call that needs the full axis (a
    layer norm, a softmax), cannot be removed and is in no group.

    Args:
        model: an `nn.Module`, in any mode. It may be masked or parametrized.
        example_inputs: a tuple of the model's inputs, one tensor, or a mapping of keyword inputs.
        structure: "channel" (default): outputs of convolutions and linear layers, features of
            attention heads among them; "unit": of linear layers outside of attention (feed-forward)
            alone; "head": heads of attention, with the keys and values that several queries share.
        skip: names or globs of modules and parameters that are to remain uncut.

    Returns:
        A tuple of `Group`, in the order of calls; no position is in two of them. `print` shows it
        as a table.

    Raises:
        BadInput: an unknown structure, a name in `skip` that does not exist, or inputs that the
            model does not accept.
        NotExportable: the model cannot be captured in full.

    Example:
        >>> import torch
        >>> from demask import prune
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> [str(group) for group in prune.groups(net, torch.zeros(1, 4))]
        ['0: 8 units of 0.weight[0], 0.bias[0]; read by 2.weight[1]']
    """
    args, kwargs = as_arguments(example_inputs)
    kinds = kinds_of(structure)
    return select_groups(Coupling.of(model, args, kwargs, skip=skip), kinds)


def as_arguments(example_inputs: Any) -> Arguments:
    """Example inputs as arguments by position and by name. Raises BadInput for other types."""
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), None
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple):
        return example_inputs, None
    raise BadInput(
        "expected example_inputs to be a tuple of the model's inputs, a tensor or a mapping of "
        f"keyword inputs, got {type(example_inputs).__name__}"
    )


def kinds_of(structure: str) -> tuple[str, ...]:
    """The kinds of groups of a structure. Raises BadInput for others."""
    if structure not in KINDS_OF:
        raise BadInput(f"expected a structure of {', '.join(KINDS_OF)}; got {structure!r}")
    return KINDS_OF[structure]


def select_groups(coupling: Coupling, kinds: Iterable[str]) -> Groups:
    """The groups of some kinds. Of groups with common positions, as the axis (group, channel) of a
    grouped convolution has, that with most slices."""
    every = (*coupling.groups, *coupling.experts)
    candidates = [group for group in every if group.kind in kinds]
    chosen: set[str] = set()
    taken: dict[tuple[str, int], Tensor] = {}
    for group in sorted(candidates, key=lambda group: -group.size):
        places = {(m.parameter, m.axis): m.slices >= 0 for m in group.members}
        if any(bool((taken[p] & mask).any()) for p, mask in places.items() if p in taken):
            continue
        chosen.add(group.name)
        for place, mask in places.items():
            taken[place] = taken[place] | mask if place in taken else mask
    return Groups(group for group in candidates if group.name in chosen)


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """Where the slices of a group are in one parameter.

    Attributes:
        parameter: its name in `model.named_parameters(remove_duplicate=False)`, without the
            suffixes of masks and parametrizations: "layer1.0.conv1.weight". A tied parameter has
            one member, with its first name.
        axis: the axis of the parameter.
        slices: int64 [length of the axis]: the slice that each position belongs to, -1 for none.
        produces: True: where these positions are zero in all producing members, the slice is
            (rows, biases, scales and shifts of norms, columns of embeddings). False: they are
            multiplied with the slice (columns of the next weight).
        is_weight: whether it is the weight of a product or an embedding, not a bias or norm.

    Example:
        >>> import torch
        >>> from demask import prune
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 3))
        >>> (group,) = prune.groups(net, (torch.zeros(1, 3, 8, 8),))
        >>> [(m.parameter, m.axis, m.produces) for m in group.members]
        [('0.weight', 0, True), ('0.bias', 0, True), ('1.weight', 1, False)]
        >>> group.members[0].positions(2)
        tensor([2])
    """

    parameter: str
    axis: int
    slices: Tensor = field(repr=False)
    produces: bool
    is_weight: bool = True

    def positions(self, k: int) -> Tensor:
        """The positions along `axis` that belong to slice k, int64, in order."""
        return (self.slices == k).nonzero().squeeze(1)

    def mask(self, keep: Tensor) -> Tensor:
        """The positions along `axis` that stay, bool [length of the axis], of slices that do.

        Args:
            keep: bool [number of slices].
        """
        return (self.slices < 0) | keep.to(self.slices.device)[self.slices.clamp(min=0)]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Slices that can be removed one by one, each of them everywhere at once.

    Attributes:
        name: the first module that computes them, as "layer1.0.conv1"; unique among groups.
        size: the number of slices.
        members: where they are in the model's parameters, a tuple of `Member`.
        kind: "channel"; "unit": of linear layers alone; "head": of attention, with the keys and
            values that several heads share; "expert".

    Example:
        >>> import torch
        >>> from demask import prune
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> (group,) = prune.groups(net, (torch.zeros(1, 4),))
        >>> print(group)
        0: 8 units of 0.weight[0], 0.bias[0]; read by 2.weight[1]
    """

    name: str
    size: int
    members: tuple[Member, ...]
    kind: str

    @property
    def producers(self) -> tuple[Member, ...]:
        """The members that must be zero for a slice to be."""
        return tuple(member for member in self.members if member.produces)

    @property
    def readers(self) -> tuple[Member, ...]:
        """The members that are multiplied with the slices."""
        return tuple(member for member in self.members if not member.produces)

    def gone(self, masks: Mapping[str, Tensor]) -> Tensor:
        """The slices that masks make zero, bool [size].

        Args:
            masks: by parameter, bool of its shape, True where it stays; others stay uncut.
        """
        live = torch.zeros(self.size, dtype=torch.bool)
        for member in self.producers:
            mask = masks.get(member.parameter)
            stays = member.slices >= 0
            if mask is not None:
                stays = stays & _any_along(mask, member.axis)
            live[member.slices[stays]] = True
        return ~live

    def __str__(self) -> str:
        computed, read = (
            ", ".join(f"{m.parameter}[{m.axis}]" for m in members) for members in (self.producers, self.readers)
        )
        return f"{self.name}: {self.size} {self.kind}s of {computed}" + (f"; read by {read}" if read else "")


def _any_along(mask: Tensor, axis: int) -> Tensor:
    """Any element at each position of an axis, bool [length of the axis], on the CPU."""
    return mask.movedim(axis, 0).reshape(mask.shape[axis], -1).any(1).cpu()


def _weights_text(members: tuple[Member, ...], most: int = 3) -> str:
    names = list(dict.fromkeys(m.parameter for m in members if m.is_weight))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class Groups(tuple[Group, ...]):
    """Groups of a network; it prints as a table."""

    def __str__(self) -> str:
        table = number_table("group", "slices", pad_edge=False)
        for head in ("kind", "computed by", "read by"):
            table.add_column(head, overflow="fold")
        for group in self:
            table.add_row(
                group.name, str(group.size), group.kind, *map(_weights_text, (group.producers, group.readers))
            )
        return render_text(table)


def with_plain_weights(model: nn.Module) -> nn.Module:
    """The model, or a copy of it in which every tensor with a parametrization or a hook of
    torch.nn.utils.prune is a parameter of its plain name."""
    if not any(map(_has_computed_weights, model.modules())):
        return model
    copy = structural_copy(model, share=False)
    for module in copy.modules():
        for hook in [*module._forward_pre_hooks.values()]:
            if isinstance(hook, prune.BasePruningMethod):
                _make_plain(module, hook._tensor_name)
        if parametrize.is_parametrized(module):
            _without_parametrizations(module)
    return copy


def _without_parametrizations(module: nn.Module) -> None:
    """Replace the parametrized tensors of a copied module by plain parameters of their values, in
    place. Its class, which the original has too, stays as it is."""
    parametrizations: Any = module.parametrizations
    values = {name: getattr(module, name).detach().clone() for name in parametrizations}
    module.__class__ = parametrize.type_before_parametrizations(module)
    del module._modules["parametrizations"]
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(value))


def _has_computed_weights(module: nn.Module) -> bool:
    hooks = module._forward_pre_hooks.values()
    return parametrize.is_parametrized(module) or any(isinstance(hook, prune.BasePruningMethod) for hook in hooks)


def _make_plain(module: nn.Module, name: str) -> None:
    """Replace a pruned tensor of a module by a plain parameter of its value, in place."""
    value = getattr(module, f"{name}_orig").detach() * getattr(module, f"{name}_mask")
    for key, hook in [*module._forward_pre_hooks.items()]:
        if isinstance(hook, prune.BasePruningMethod) and hook._tensor_name == name:
            del module._forward_pre_hooks[key]
    delattr(module, name)
    del module._parameters[f"{name}_orig"], module._buffers[f"{name}_mask"]
    module.register_parameter(name, nn.Parameter(value))


class Kinds:
    """The kinds of the cells of a network.

    heads: cells along which attention is computed one by one. features: its other cells.
    convolved: those of convolutions.
    """

    def __init__(self, ties: AxisTies):
        self.ties = ties
        self.heads: set[int] = set()
        self.features: set[int] = set()
        self.convolved: set[int] = set()
        for node, relation in ties.relations.items():
            if relation.entry.fill == "mix":
                self._add_attention(relation, ties.letters[node])
            elif relation.entry.fill == "sum" and relation.window:
                self.convolved |= self._cuttable_cells(relation.size, ties.letters[node])
            elif relation.entry.fill == "sum" and not self._reads_weight(relation):
                self.features |= self._cuttable_cells(relation.contracted, ties.letters[node])

    def of(self, cells: set[int]) -> str:
        """The kind of a group with these cells."""
        if cells & self.heads:
            return "head"
        return "channel" if cells & (self.features | self.convolved) else "unit"

    def are_features(self, cells: Iterable[int]) -> bool:
        """Whether cells are features of attention, which no weight need read."""
        return not self.features.isdisjoint(cells)

    def _add_attention(self, relation: Relation, letters: Mapping[str, int]) -> None:
        values = relation.letters(relation.ins[relation.entry.main])
        outputs = relation.letters(relation.outs[0])
        heads = self._cuttable_cells(values & outputs & relation.letters(relation.ins[0]), letters)
        every = {a for axes in (*relation.ins, *relation.outs) for a in relation.letters(axes)}
        self.heads |= heads
        self.features |= self._cuttable_cells(every, letters) - heads

    def _cuttable_cells(self, names: Iterable[str], letters: Mapping[str, int]) -> set[int]:
        cells = self.ties.cells
        leaves = self.ties.leaves(letters[a] for a in names)
        return {c for c in leaves if not cells.forced(c) and cells.size(c) != 1}

    def _reads_weight(self, relation: Relation) -> bool:
        values = [relation.operands[k].value for k in relation.factors]
        return any(schema.is_constant(v) or v in self.ties.weights for v in values)


class _ParameterCell(NamedTuple):
    """One cell of one axis of a parameter."""

    parameter: str
    axis: int
    cell: int
    slices: Tensor  # int64 [length of the axis], -1: none
    roles: frozenset[str]


@dataclass(frozen=True, eq=False)
class Coupling:
    """The slices of a captured network.

    ties: its axes. slice_of: by final cell that need not stay uncut, the slice of each position,
    int64 [size], -1 for positions that must stay. total: the size of its tensors, with 0 MACs;
    constants that it computes from others are stored instead of them. skipped: names of parameters
    that stay uncut.
    """

    program: Program
    ties: AxisTies
    slice_of: Mapping[int, Tensor]
    total: Sizes
    skipped: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        skip: Sequence[str] = (),
        table: Table = TABLE,
    ) -> Coupling:
        """The slices of a network, computed on the CPU. Raises BadInput for a name in `skip` that
        does not exist, or for inputs that the model does not accept, NotExportable where it cannot
        be captured."""
        skipped = _matching_names(skip, model)
        plain: Any = with_plain_weights(model)
        if device_of(plain, args, kwargs) != CPU:
            plain, args, kwargs = copy_to_cpu(plain, args, kwargs)
        programs = programs_of(plain, args, kwargs, None, fold_parameters=False)
        captured = next(programs)
        program = canonicalize(split_recurrent(captured), table, fold_parameters=False)
        total = measure_program(fold_constants(captured), {})
        ties = AxisTies(program, table)
        for name in ties.names():
            if skipped & {name, *program.constants[name].aliases}:
                ties.force(name)
        return cls(program, ties, _find_slices(ties), total, frozenset(skipped))

    # --- groups -----------------------------------------------------------------------------------

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups, of every kind, in the order of the calls that read their parameters."""
        return tuple(group for group, _ in self._numbered_groups)

    @cached_property
    def numbers(self) -> dict[str, Tensor]:
        """By group, the numbers of its slices in `slice_of`, int64 [size]."""
        return {group.name: numbers for group, numbers in self._numbered_groups}

    @cached_property
    def _numbered_groups(self) -> list[tuple[Group, Tensor]]:
        """All groups, each with the numbers of its slices, int64 [size]."""
        places = list(self._parameter_cells())
        signatures: dict[int, list[tuple[int, int]]] = {}
        for k, place in enumerate(places):
            numbers, counts = torch.unique(place.slices[place.slices >= 0], return_counts=True)
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                signatures.setdefault(number, []).append((k, count))
        alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for number, signature in signatures.items():
            alike.setdefault(tuple(signature), []).append(number)
        kinds, names = Kinds(self.ties), set[str]()
        groups: list[tuple[Group, Tensor]] = []
        for signature, numbers in sorted(alike.items()):
            mine = [places[k] for k, _ in signature]
            rows = [place for place in mine if place.roles - {READS, SHIFTS}]
            is_read = any(READS in p.roles for p in mine)
            if rows and len(numbers) > 1 and (is_read or kinds.are_features(p.cell for p in mine)):
                order = _in_order(rows[0].slices, numbers)
                kind = kinds.of({p.cell for p in mine})
                module = _module_of(rows[0].parameter)
                members = tuple(_make_member(place, order) for place in mine)
                groups.append((Group(_unused_name(module, names), len(order), members, kind), order))
        return groups

    @cached_property
    def experts(self) -> tuple[Group, ...]:
        """The experts of each layer that selects a matrix per row (grouped products).

        Zeros make an expert's output zero; demask leaves its weights, since rows may select it.
        """
        stacks: dict[int, list[Member]] = {}
        for node in self.ties.relations:
            if str(node.target) in GROUPED:
                (cell,) = self.ties.leaves([self.ties.letters[node]["e"]])
                stacks.setdefault(cell, [])
        for name in self.ties.names():
            constant = self.program.constants[name]
            full = (constant.aliases or (constant.name,))[0]
            cells = [self.ties.leaves(axis) for axis in self.ties.constant(name)]
            for axis, (cell, *more) in enumerate(cells):
                if constant.parameter and cell in stacks and not more:
                    slices = torch.arange(constant.tensor.shape[axis])
                    stacks[cell].append(Member(full, axis, slices, True))
        return tuple(
            Group(_module_of(members[0].parameter), len(members[0].slices), tuple(members), "expert")
            for members in stacks.values()
            if members and self.skipped.isdisjoint(member.parameter for member in members)
        )

    def heads_that_stay(self) -> dict[str, str]:
        """By module of attention, why none of its heads is in a group; without those of which some
        are, and of a single head."""
        ties, reasons = self.ties, dict[str, str]()
        of_weights = {leaf for name in ties.names() for axis in ties.constant(name) for leaf in ties.leaves(axis)}
        for node, relation in ties.relations.items():
            if relation.entry.fill != "mix":
                continue
            letters = relation.letters(relation.outs[0]) & relation.letters(relation.ins[0])
            cells = [
                c
                for c in ties.leaves(ties.letters[node][a] for a in letters)
                if c in of_weights and ties.cells.size(c) != 1
            ]
            cause = ties.cause(cells[0]) if cells else None
            if cause is None or not all(map(ties.cells.forced, cells)):
                continue
            read = ties.relations[cause].contracted if cause in ties.relations else ()
            shared = cells[0] in ties.leaves(ties.letters[cause][a] for a in read)
            reason = f"{op_name(cause.target)} in {path_of(cause) or 'the model'} needs all of them"
            if cause.op == "placeholder" or cause.target in RESHAPES:
                reason = "an axis that has them has the batch, too"
            reasons[path_of(node)] = "they share keys and values" if shared else reason
        return reasons

    def _parameter_cells(self) -> Iterator[_ParameterCell]:
        """The cells of all axes of parameters that have slices."""
        roles = find_roles(self.ties)
        for name in self.ties.names():
            constant = self.program.constants[name]
            if not constant.parameter or not constant.tensor.is_floating_point():
                continue
            for axis, cells in enumerate(self.ties.constant(name)):
                for cell, slices in self.slices_along(cells):
                    mine = {role for c, role in roles[name][axis] if cell in self.ties.leaves([c])} or {
                        role for _, role in roles[name][axis]
                    }
                    full = (constant.aliases or (constant.name,))[0]
                    yield _ParameterCell(full, axis, cell, slices, frozenset(mine))

    def slices_along(self, axis: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        """The final cells of an axis that have slices, each with the slice of each position of the
        axis, by its number in `slice_of`, int64 [size of the axis], -1: none."""
        leaves = self.ties.leaves(axis)
        sizes = [self.ties.cells.size(cell) or 1 for cell in leaves]
        for k, cell in enumerate(leaves):
            if cell in self.slice_of:
                slices = self.slice_of[cell].view(1, -1, 1)
                slices = slices.expand(math.prod(sizes[:k]), -1, math.prod(sizes[k + 1 :]))
                yield cell, slices.reshape(-1)

    def matrices(self) -> Iterator[tuple[str, int]]:
        """The weights of products that are not skipped, each with its axis of outputs."""
        every = find_roles(self.ties)
        for name in self.ties.names():
            roles = {d: {role for _, role in pairs} for d, pairs in every[name].items()}
            outputs = [d for d in sorted(roles) if ROWS in roles[d] and READS not in roles[d]]
            first = outputs or [d for d in sorted(roles) if ROWS in roles[d]]
            constant = self.program.constants[name]
            full = (constant.aliases or (constant.name,))[0]
            is_weight = constant.parameter and constant.tensor.ndim > 1
            if first and is_weight and full not in self.skipped:
                yield full, first[0]


def _module_of(parameter: str) -> str:
    """The module of a parameter; of one without a module, its own name."""
    return parameter.rpartition(".")[0] or parameter


def _unused_name(name: str, names: set[str]) -> str:
    k, unused = 1, name
    while unused in names:
        k, unused = k + 1, f"{name}#{k + 1}"
    names.add(unused)
    return unused


def _in_order(slices: Tensor, numbers: Sequence[int]) -> Tensor:
    """Numbers of slices in the order of their first positions along an axis, int64."""
    mine = set(numbers)
    return torch.tensor([n for n in dict.fromkeys(slices.tolist()) if n in mine])


def _make_member(place: _ParameterCell, order: Tensor) -> Member:
    numbers, index = order.sort()
    near = torch.searchsorted(numbers, place.slices).clamp(max=len(numbers) - 1)
    slices = torch.where(numbers[near] == place.slices, index[near], -1)
    return Member(place.parameter, place.axis, slices, place.roles != {READS}, place.roles != {SHIFTS})


def _matching_names(patterns: Sequence[str], model: nn.Module) -> set[str]:
    """The names of parameters that are, or are in modules, that the patterns name. Raises BadInput
    for a pattern that names nothing."""
    names = {plain_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    matching: set[str] = set()
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise BadInput(f"expected skip to be a list of names or globs, got {patterns!r:.60}")
    for pattern in patterns:
        mine = {name for name in names if any(fnmatchcase(p, pattern) for p in _module_paths(name))}
        if not mine:
            raise BadInput(
                f"expected names or globs of modules or parameters in skip, got {pattern!r}, which "
                "names none; see model.named_modules()"
            )
        matching |= mine
    return matching


def _module_paths(name: str) -> Iterator[str]:
    """The name of a parameter, and those of the modules that contain it."""
    parts = name.split(".")
    return (".".join(parts[: k + 1]) for k in range(len(parts)))


def _find_slices(ties: AxisTies) -> dict[int, Tensor]:
    """By final cell that need not stay uncut, the slice of each position, a number below that of
    all positions; -1 where it must stay."""
    links = list(ties.position_ties())
    cells = sorted({leaf for axis in _axes_of(ties) for leaf in ties.leaves(axis)})
    sized = [cell for cell in cells if ties.cells.size(cell) is not None]
    first, total = {}, 0
    for cell in sized:
        first[cell], total = total, total + (ties.cells.size(cell) or 0)
    left = [first[t.left] + t.a for t in links if {t.left, t.right} <= first.keys()]
    right = [first[t.right] + t.b for t in links if {t.left, t.right} <= first.keys()]
    numbers = _components(total, _joined_cells(left), _joined_cells(right))
    is_uncut = torch.zeros(total, dtype=torch.bool)
    for cell in sized:
        if ties.cells.forced(cell):
            is_uncut[numbers[first[cell] : first[cell] + (ties.cells.size(cell) or 0)]] = True
    numbers = torch.where(is_uncut[numbers], -1, numbers)
    return {
        cell: numbers[first[cell] : first[cell] + (ties.cells.size(cell) or 0)]
        for cell in sized
        if not ties.cells.forced(cell)
    }


def _axes_of(ties: AxisTies) -> Iterator[Iterable[int]]:
    for axes in ties.value.values():
        yield from axes
    for letters in ties.letters.values():
        yield letters.values()


def _joined_cells(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def _components(count: int, left: Tensor, right: Tensor) -> Tensor:
    """The least number of each of `count` numbers' component, where left[k] and right[k] are in
    one; int64 [count]."""
    least = torch.arange(count)
    while True:
        low = torch.minimum(least[left], least[right])
        smaller = least.scatter_reduce(0, left, low, "amin").scatter_reduce(0, right, low, "amin")
        smaller = smaller[smaller]
        if torch.equal(smaller, least):
            return least
        least = smaller
