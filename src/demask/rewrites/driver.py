"""Application of phases of rewrites to programs, and the trace of what they change."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from torch import Tensor, fx

from demask.compat.dispatch import OpOverload
from demask.failures import Log
from demask.graph.editor import NO_OPS, GraphEditor, drop_unread
from demask.graph.program import Program, path_of
from demask.graph.value import Value
from demask.ops import Table, op_name, schema
from demask.rewrites.rule import Pass, Phase, Replacement, Rule


@dataclass(frozen=True, slots=True)
class Change:
    """What an entry changed.

    phase, rewrite, reason: of the entry. module: the module whose code has the call. before, after:
    the calls that went and those in their place, as text.
    """

    phase: str
    rewrite: str
    reason: str
    module: str
    before: tuple[str, ...]
    after: tuple[str, ...]

    def __str__(self) -> str:
        head = f"{self.phase}, {self.rewrite}: {self.reason}" + (f" [{self.module}]" if self.module else "")
        return "\n".join([head, *(f"  - {line}" for line in self.before), *(f"  + {line}" for line in self.after)])


def rewrite(program: Program, phase: Phase, table: Table = NO_OPS, log: Log | None = None) -> Program:
    """The program that the entries of a phase turn this one into.

    table: of ops. log: notes the entries, and the calls of rules, that failed,
    which are left out; and collects changes, if it has a list for them.
    """
    log, start = Log() if log is None else log, program
    for kind, entries in groupby(phase.entries, type):
        if kind is Rule:
            editor, rules, count = GraphEditor(program, table=table), Phase(phase.name, tuple(entries)), 0
            while (replaced := apply_rules(editor, rules, log)) and phase.repeat:
                count += replaced
                drop_unread(editor.graph)
            if count + replaced:
                program = editor.finish()
            continue
        for entry in entries:
            assert isinstance(entry, Pass)
            before, program = program, log.attempt(entry.name, partial(entry.apply, program, table), program)
            if log.changes is not None and before is not program:
                log.changes += differences(
                    call_lines(before.graph), call_lines(program.graph), phase.name, entry.name, entry.reason
                )
    return rewrite(program, phase, table, log) if phase.repeat and program is not start else program


def apply_rules(
    editor: GraphEditor, phase: Phase, log: Log | None = None, *, names: Collection[str] | None = None
) -> int:
    """Apply a phase of rules alone to the calls of a graph that are read, in its order, once and in
    place; the number of calls that were replaced. names: of the calls that may be; None: all of them."""
    log = Log() if log is None else log
    by_op: dict[Any, list[Rule]] = {}
    for each in phase.entries:
        assert isinstance(each, Rule)
        for op in each.ops:
            by_op.setdefault(op, []).append(each)
    count = 0
    for node in editor.calls(*by_op):
        if not node.users or (names is not None and node.name not in names):
            continue
        for each in by_op[node.target]:
            what = f"{phase.name}, {each.name}, of {node.name} ({node.target})"
            if log.attempt(what, partial(_apply_rule, editor, each, node, phase.name, log), False):
                count += 1
                break
    return count


def _apply_rule(editor: GraphEditor, each: Rule, node: fx.Node, phase: str, log: Log) -> bool:
    """Whether a rule replaced a call."""
    call, last = Value(node, editor), node.prev
    with editor.graph.inserting_before(node):
        replacement: Replacement = each.apply(call, *call.arguments.values())
    if replacement is None:
        return False
    if log.changes is not None:
        added = _nodes_between(last, node)
        log.changes.append(
            Change(phase, each.name, each.reason, path_of(node), (_call_text(node),), (*map(_call_text, added),))
        )
    if isinstance(replacement, Value):
        new = replacement.node
        editor.replace(node, new, inherit=new not in node.all_input_nodes)
        return True
    for user in list(node.users):  # reads one of several outputs
        new = replacement[schema.output_of(user)]
        if new is not None:
            editor.replace(user, new.node, inherit=True)
    return True


def _nodes_between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    while (first := first.next) is not last:
        yield first


def call_lines(graph: fx.Graph) -> dict[str, str]:
    """The calls of a graph as lines, and the module of each."""
    return {_call_text(node): path_of(node) for node in graph.nodes if node.op == "call_function"}


def differences(
    before: dict[str, str], after: dict[str, str], phase: str, rewrite: str, reason: str
) -> Iterator[Change]:
    """What a rewrite changed: calls (`call_lines`) that are only before or only after it, by module."""
    both = (before, after)
    sides = [{text: module for text, module in one.items() if text not in other} for one, other in (both, both[::-1])]
    for module in dict.fromkeys([*sides[0].values(), *sides[1].values()]):
        lines = [tuple(text for text, of in side.items() if of == module) for side in sides]
        yield Change(phase, rewrite, reason, module, *lines)


def _call_text(node: fx.Node) -> str:
    """A call as a line: its name, op, operands, and the shape of its value."""
    if node.op == "get_attr":
        return f"{node.name} = {node.target}{_shape(node)}"
    target = op_name(node.target) if isinstance(node.target, OpOverload) else getattr(node.target, "__name__", "")
    arguments = [*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())]
    return f"{node.name} = {target}({', '.join(arguments)}){_shape(node)}"


def _shape(node: fx.Node) -> str:
    value = node.meta.get("val")
    return f": {'x'.join(map(str, value.shape)) or 'number'}" if isinstance(value, Tensor) else ""
