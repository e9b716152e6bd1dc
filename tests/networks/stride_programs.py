"""Programs built call by call for the tests of strides: no export, so hundreds take seconds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from demask.graph.editor import GraphEditor
from demask.graph.program import Constant, Program

aten = torch.ops.aten


class Net:
    """A graph that grows call by call; every node knows its (fake) value."""

    def __init__(self) -> None:
        self.graph, self.constants = fx.Graph(), {}
        self.editor = GraphEditor.in_place(self.graph)

    def input(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        node.meta["val"] = self.editor.values.like(torch.empty(shape, dtype=dtype))
        return node

    def constant(self, tensor: Tensor) -> fx.Node:
        name = f"c{len(self.constants)}"
        self.constants[name] = Constant(tensor, name, parameter=True)
        node = self.graph.create_node("get_attr", name)
        node.meta["val"] = self.editor.values.like(tensor)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.editor.call(target, *args, **kwargs)

    def program(self, *outs: fx.Node) -> Program:
        self.graph.output(outs)
        return Program(self.graph, self.constants, None, None, ())


def ran(program: Program, *inputs: Tensor) -> list[Tensor]:
    """What a program returns; the shape and dtype of every value are those that its meta says."""
    arguments, values = iter(inputs), {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(arguments)
        elif node.op == "get_attr":
            values[node] = program.constants[str(node.target)].tensor
        elif node.op == "output":
            return [values[n] for n in node.args[0]]
        else:
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
            values[node] = node.target(*args, **kwargs)
        said, value = node.meta["val"], values[node]
        if isinstance(value, Tensor):
            assert said.dtype == value.dtype, node
            alike = (not isinstance(n, int) or n == m for n, m in zip(said.shape, value.shape, strict=True))
            assert all(alike), node
    raise AssertionError("a graph without an output")


def calls(program: Program, *targets: Any) -> list[fx.Node]:
    return [n for n in program.graph.nodes if n.op == "call_function" and (not targets or n.target in targets)]


def text(program: Program) -> str:
    """A program in words: two that read alike are the same."""
    return "\n".join(f"{n.name} {n.target} {n.args} {n.kwargs}" for n in program.graph.nodes)
