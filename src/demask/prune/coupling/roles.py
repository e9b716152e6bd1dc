"""Roles of a constant's axes: what the calls that read it do with its slices."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from demask.facts.known import Key, key_of
from demask.ops import Relation, bind
from demask.ops.flow import base
from demask.prune.coupling.axis_ties import AxisTies

READS, ROWS, LOOKUP, SHIFTS = "reads", "rows", "lookup", "shifts"
AxisRoles = defaultdict[int, set[tuple[int, str]]]  # by axis: cells and their roles
Roles = defaultdict[Key, AxisRoles]


def find_roles(ties: AxisTies) -> dict[str, AxisRoles]:
    """By constant and axis: cells and their roles. READS: the positions are summed over; ROWS: they
    are outputs of a product; LOOKUP: of an embedding; SHIFTS: of other calls (biases, norms)."""
    roles: Roles = defaultdict(lambda: defaultdict(set))
    constants: dict[str, AxisRoles] = defaultdict(lambda: defaultdict(set))
    for node in reversed(list(ties.program.graph.nodes)):
        if node.op == "get_attr":
            for axis, cell_roles in roles[node, 0].items():
                constants[str(node.target)][axis] |= cell_roles
        elif node in ties.relations:
            _add_reader(ties, node, roles)
        elif node in ties.weights and node in ties.letters:
            _trace_back(ties, node, roles)
    return constants


def _add_reader(ties: AxisTies, node: fx.Node, roles: Roles) -> None:
    """Add the roles of the constants that a call reads."""
    relation, letters = ties.relations[node], ties.letters[node]
    read = relation.contracted | relation.back
    is_product = relation.entry.fill in ("sum", "mix", "recur")
    factors = _factors(relation)
    for k, operand in enumerate(relation.operands):
        if operand.value not in ties.weights:
            continue
        rows = ROWS if is_product and k in factors else SHIFTS
        rows = LOOKUP if _is_lookup(relation) else rows
        for d, axis in enumerate(relation.ins[k]):
            roles[key_of(operand.value)][d] |= {(letters[a], READS if a in read else rows) for a in axis}


def _factors(relation: Relation) -> set[int]:
    """The operands that are multiplied; of a recurrent call, its matrices."""
    if relation.back:
        return {k for k, axes in enumerate(relation.ins) if len(axes) == 2}
    return set(relation.factors)


def _is_lookup(relation: Relation) -> bool:
    """Whether a call takes rows of a table."""
    return relation.entry.fill == "same" and bool(relation.complete) and len(relation.operands) > 1


def _trace_back(ties: AxisTies, node: fx.Node, roles: Roles) -> None:
    """Add the roles of the operands of a computed weight, letter by letter."""
    relation, letters = bind(node, ties.table), ties.letters[node]
    assert isinstance(relation, Relation)
    cell_roles: dict[str, set[str]] = defaultdict(set)
    for out, axes in enumerate(relation.outs):
        for d, axis in enumerate(axes):
            for cell, role in roles[node, out][d]:
                same = set(ties.leaves([cell]))
                for a in axis:
                    cell_roles[base(a)] |= {role} if same & set(ties.leaves([letters[a]])) else set()
    for k, operand in enumerate(relation.operands):
        if isinstance(operand.value, fx.Node):
            for d, axis in enumerate(relation.ins[k]):
                roles[key_of(operand.value)][d] |= {(letters[a], role) for a in axis for role in cell_roles[base(a)]}
