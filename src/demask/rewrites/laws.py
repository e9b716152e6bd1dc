"""The laws that every rewrite must satisfy, tested without code per rewrite.

cases:    the rewrite changes them, and does not change what it refuses
equal:    the program computes the same after it: the same bits, if the rewrite is exact
values:   what replaces a call has its shape and dtype
once:     the rewrite changes nothing of its own result
guards:   without one of the conditions under which a rule refuses, another law is broken
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import Dim
from torch.utils import _pytree as pytree

from demask.failures import Log
from demask.graph.capture.capture import capture
from demask.graph.capture.fold_constants import fold_constants
from demask.graph.capture.functionalize import functionalize
from demask.graph.program import Program
from demask.graph.recorded_run import RecordedRun
from demask.ops import Table
from demask.ops.schema import same_shape
from demask.rewrites.driver import rewrite
from demask.rewrites.rule import NetworkCase, Pass, Phase, Rule


def check(entry: Rule | Pass, table: Table) -> str:
    """The first law that a rewrite breaks, as text; "" for none."""
    for number, each in enumerate(entry.cases):
        if text := _broken(entry, each, table):
            return f"case {number}: {text}"
    for number, each in enumerate(entry.refused if isinstance(entry, Rule) else ()):
        program, _ = captured(each)
        if _changes(entry, program, table)[1]:
            return f"refused case {number} is changed"
    return ""


def _broken(entry: Rule | Pass, each: NetworkCase, table: Table) -> str:
    program, inputs = captured(each)
    changed, count = _changes(entry, program, table)
    if not count:
        return "it is not changed"
    for node, before in zip(_outputs(changed), _outputs(program), strict=True):
        a, b = node.meta.get("val"), before.meta.get("val")
        if isinstance(a, Tensor) and isinstance(b, Tensor) and not (same_shape(a, b) and a.dtype == b.dtype):
            return f"its output is {a.dtype} of {tuple(a.shape)}, was {b.dtype} of {tuple(b.shape)}"
    for a, b in zip(_run_program(changed, inputs), _run_program(program, inputs), strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"it computes {a.dtype} of {tuple(a.shape)}, not {b.dtype} of {tuple(b.shape)}"
        gap = torch.where(a == b, 0.0, (a - b).abs().double()) if a.numel() else torch.zeros(1)
        if not entry.exact:
            gap = gap / max(float(b.abs().max()), 1.0) / entry.tolerance
        if not bool((gap <= (0 if entry.exact else 1)).all()):
            return "its output differs"
    if _changes(entry, changed, table)[1]:
        return "it is changed again"
    return ""


def without_guards(entry: Rule) -> Iterator[tuple[str, Rule]]:
    """The rule without one of its conditions, for each: `return None` under `if a or b`, once
    without a and once without b; and `x if a else None` as x."""
    source = textwrap.dedent(inspect.getsource(entry.apply))
    tree = ast.parse(source)
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    function.decorator_list = []
    for condition, change in _guards(function):
        undo = change()
        namespace = dict(entry.apply.__globals__)
        exec(compile(ast.fix_missing_locations(tree), "<rule>", "exec"), namespace)
        undo()
        yield condition, replace(entry, apply=namespace[function.name])


def _guards(function: ast.FunctionDef) -> Iterator[tuple[str, Any]]:
    """Every condition of a refusal, and a function that removes it and returns one that restores it."""
    for node in ast.walk(function):
        if isinstance(node, ast.If) and not node.orelse and _returns_none(node.body):
            test = node.test
            operands = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) else [test]
            for k, operand in enumerate(operands):
                others = [*operands[:k], *operands[k + 1 :]]
                rest = ast.BoolOp(ast.Or(), others) if len(others) > 1 else (others or [ast.Constant(False)])[0]
                yield ast.unparse(operand), _setter(node, "test", rest)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.IfExp):
            choice = node.value
            for none, other in ((choice.orelse, choice.body), (choice.body, choice.orelse)):
                if isinstance(none, ast.Constant) and none.value is None:
                    yield ast.unparse(choice.test), _setter(node, "value", other)


def _returns_none(body: list[ast.stmt]) -> bool:
    last = body[0]
    none = isinstance(last, ast.Return) and isinstance(last.value, ast.Constant) and last.value.value is None
    return none and len(body) == 1


def _setter(node: ast.AST, name: str, value: Any) -> Any:
    def change() -> Any:
        old = getattr(node, name)
        setattr(node, name, value)
        return lambda: setattr(node, name, old)

    return change


def captured(each: NetworkCase) -> tuple[Program, tuple[Any, ...]]:
    """The program of a case in float64, and its inputs."""
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(_draw(item, generator) if isinstance(item, tuple) else item for item in each.inputs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = each.network.double().eval()
    shapes = tuple(dict.fromkeys(each.dynamic.get(k, ()), Dim.AUTO) for k in range(len(inputs)))
    kinds = {parameter.kind for parameter in inspect.signature(network.forward).parameters.values()}
    wrapped = (shapes,) if inspect.Parameter.VAR_POSITIONAL in kinds else shapes
    return fold_constants(functionalize(capture(network, inputs, dynamic_shapes=wrapped))), inputs


def _draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1


def _changes(entry: Rule | Pass, program: Program, table: Table) -> tuple[Program, int]:
    """The program after a rewrite, and how many changes that made."""
    log = Log(changes=[])
    changed = rewrite(program, Phase("law", (entry,)), table, log)
    assert log.changes is not None
    if log.notes:
        raise AssertionError(log.notes[0])
    return changed, len(log.changes)


def _outputs(program: Program) -> list[fx.Node]:
    return [leaf for leaf in pytree.tree_leaves(program.graph.output_node().args) if isinstance(leaf, fx.Node)]


def _run_program(program: Program, inputs: tuple[Any, ...]) -> list[Tensor]:
    outputs = RecordedRun(program, ()).run(*inputs)
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
