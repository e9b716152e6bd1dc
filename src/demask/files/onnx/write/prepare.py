"""A demasked network as an exported program that torch's ONNX exporter takes as it is.

The exporter traces what it takes two times more, to decompose calls that it has no ONNX function
for. On dynamic sizes that is most of its time (20 of 25 seconds of a text detector with 350 calls),
and nearly all calls need none of it: here those that do are decomposed alone, on the fake values
that their operands have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from demask.compat.dispatch import OpOverload, has_schema, schema_of
from demask.compat.fake_tensors import enable_python_dispatcher
from demask.compat.fx_internals import signature_of
from demask.compat.onnx_exporter import exporter_targets, use_known_values
from demask.compat.tracing import decomposition_table, make_fx
from demask.files.onnx.write.canonical_calls import spell, takes_sizes
from demask.files.onnx.write.recurrent_ops import kept_whole
from demask.graph.editor import GraphEditor, drop_unread
from demask.graph.fake_values import mode_of
from demask.graph.result import module_calls as modules
from demask.graph.result.demasked_module import Demasked
from demask.ops.traits import DECOMPOSED_WITH_NUMBERS, DROPOUTS

aten = torch.ops.aten


class PreparedProgram(ExportedProgram):
    """A program whose calls all have ONNX functions."""

    def run_decompositions(self, *_: Any, **__: Any) -> ExportedProgram:  # type: ignore[override]
        return self


def ready(slim: Demasked, translated: Mapping[Any, Any]) -> ExportedProgram | None:
    """The network for `torch.onnx.export`; None where it has to be traced anew: it was read from a
    file or changed since, or holds modules that are not ours. translated: ops that the exporter is
    given functions for."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(slim.graph, {}))
    if not _valued(graph, slim):
        return None
    kept_whole(graph)
    spell(graph)
    doubles = _lift_numbers(graph)
    registered = _registered() | {op.name() for op in translated}
    apart = [node for node in graph.nodes if isinstance(node.target, OpOverload)
             and (node.target.name() not in registered
                  or (node.target in DECOMPOSED_WITH_NUMBERS and takes_sizes(node)))]  # fmt: skip
    table = _decompositions(registered) if apart else {}
    if not all(_decomposed(graph, node, table) for node in apart):
        return None
    drop_unread(graph)
    return _program(slim, graph, doubles)


def _lift_numbers(graph: fx.Graph) -> dict[str, Tensor]:
    """Read numbers that are operands in float64 as constants, by their names: the exporter writes
    them in float32."""
    constants, mode = {}, mode_of(graph)
    for node in list(graph.nodes):
        value, target = node.meta.get("val"), node.target
        if not isinstance(value, Tensor) or value.dtype != torch.float64 or node.op == "get_attr":
            continue
        kinds = schema_of(target).arguments if has_schema(target) else ()
        for place, (number, kind) in enumerate(zip(node.args, kinds, strict=False)):
            if type(number) is float and isinstance(kind.type, torch.TensorType):
                name = f"number {len(constants)}"  # which no attribute is called
                constants[name] = torch.tensor(number, dtype=torch.float64)
                with graph.inserting_before(node):
                    read = graph.create_node("get_attr", name)
                read.meta["val"] = mode.from_tensor(constants[name], static_shapes=True)
                node.update_arg(place, read)
    return constants


def _registered() -> set[str]:
    """The names of ops that torch's exporter has ONNX functions for."""
    from onnxscript.function_libs.torch_lib import ops, registration

    assert ops  # which registers what it defines
    names = {op.name() for op in exporter_targets() if isinstance(op, OpOverload)}
    return names | {name for name, _ in registration.default_registry.items()}


def _decompositions(registered: set[str]) -> dict[Any, Callable[..., Any]]:
    """How torch takes apart the ops that have none."""
    both = decomposition_table | dict(torch.export.default_decompositions().items())
    return {op: made for op, made in both.items()
            if isinstance(op, OpOverload) and op.name() not in registered}  # fmt: skip


def _valued(graph: fx.Graph, slim: nn.Module) -> bool:
    """Let every node have the fake value that it makes, in the dtypes that the network has now."""
    inputs = graph.find_nodes(op="placeholder")
    if not inputs or any("val" not in node.meta for node in inputs):
        return False
    if modules.spell(graph, slim):
        return False
    editor = GraphEditor.in_place(graph)
    for node in list(graph.nodes):
        if node.target in DROPOUTS:
            editor.replace(node, node.args[0])
            continue
        if node.op == "get_attr":
            tensor = _held(slim, str(node.target))
            value = node.meta.setdefault("val", editor.values.like(tensor))
            if (value.dtype, value.shape) != (tensor.dtype, tensor.shape):
                return False
        elif node.op == "call_function" and "val" not in node.meta:
            editor.set_value(node)
    return True


def _held(module: nn.Module, name: str) -> Tensor:
    return reduce(getattr, name.split("."), module)  # type: ignore[return-value]


def _decomposed(graph: fx.Graph, node: fx.Node, table: dict[Any, Callable[..., Any]]) -> bool:
    """Put what a call consists of in its place; False where that cannot be found."""
    values = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    leaves, spec = pytree.tree_flatten(values)
    reads = [n for n in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(n, fx.Node)]
    places = [k for k, leaf in enumerate(pytree.tree_leaves((node.args, node.kwargs)))
              if isinstance(leaf, fx.Node)]  # fmt: skip
    if not all(isinstance(leaves[k], Tensor | torch.SymInt | torch.SymFloat) for k in places):
        return False

    def call(*operands: Any) -> Any:
        filled = list(leaves)
        for place, operand in zip(places, operands, strict=True):
            filled[place] = operand
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    own = table | {op: made for op, made in decomposition_table.items() if op == node.target}
    env = mode_of(graph).shape_env
    unasked = nullcontext() if env is None else env.suppress_guards()
    with torch.no_grad(), enable_python_dispatcher(), unasked:
        # Nodes may share one fake value, and tracing tells tensors apart by identity.
        operands = [v.detach() if isinstance(v, Tensor) else v for v in (leaves[k] for k in places)]
        traced = make_fx(call, decomposition_table=own)(*operands)
    inner = traced.graph.find_nodes(op="placeholder")
    if any(
        n.op in ("get_attr", "call_module") or n.target == node.target for n in traced.graph.nodes
    ):
        return False
    mapping: dict[fx.Node, Any] = dict(zip(inner, reads, strict=True))
    with graph.inserting_before(node):
        result = graph.graph_copy(traced.graph, mapping)
    _replace(graph, node, result)
    return True


def _replace(graph: fx.Graph, node: fx.Node, result: Any) -> None:
    """Let the readers of a call, or of its parts, read `result`."""
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)


def _program(slim: Demasked, graph: fx.Graph, own: Mapping[str, Tensor]) -> ExportedProgram | None:
    """The exported program of a graph, whose constants become its first inputs."""
    (result,) = graph.find_nodes(op="output")
    outputs = result.args[0] if isinstance(result.args[0], list | tuple) else (result.args[0],)
    if not all(isinstance(n, fx.Node) and isinstance(n.meta["val"], Tensor) for n in outputs):
        return None
    specs, tensors = _lifted(graph, slim, own)
    for node in graph.find_nodes(op="placeholder")[len(specs) :]:
        value: Any = node.meta["val"]
        tensor = isinstance(value, Tensor)
        argument = TensorArgument(node.name) if tensor else ConstantArgument(node.name, value)
        specs.append(InputSpec(InputKind.USER_INPUT, argument, None))
    made = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in outputs]
    result.args = (tuple(outputs),)
    info = signature_of(slim.graph)
    call = ModuleCallSignature([], [], info.in_spec, info.out_spec)
    program = PreparedProgram(
        nn.Module(), graph, ExportGraphSignature(specs, made), tensors, {},
        [ModuleCallEntry("", call)],
    )  # fmt: skip
    use_known_values(program.graph_module)
    return program


def _lifted(
    graph: fx.Graph, slim: nn.Module, own: Mapping[str, Tensor]
) -> tuple[list[InputSpec], dict[str, Tensor]]:
    """Read constants as inputs, in front of the others: what they are, and the tensors by name."""
    specs, tensors = [], {}
    first, *others = graph.find_nodes(op="placeholder")
    if (head := next(iter(graph.nodes))) is not first:
        head.prepend(first)
    for node in reversed(others):
        first.append(node)
    inputs: dict[str, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name not in inputs:
            tensor = tensors[name] = own[name] if name in own else _held(slim, name)
            with graph.inserting_before(first):
                lifted = inputs[name] = graph.placeholder(re.sub(r"\W", "_", f"c_{name}"))
            lifted.meta["val"] = node.meta["val"]
            parameter = isinstance(tensor, nn.Parameter)
            kind = InputKind.PARAMETER if parameter else InputKind.BUFFER
            persistent = None if parameter else True
            specs.append(InputSpec(kind, TensorArgument(lifted.name), name, persistent))
        node.replace_all_uses_with(inputs[name])
        graph.erase_node(node)
    return specs, tensors
