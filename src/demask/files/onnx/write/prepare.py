"""Conversion of demasked networks to exported programs that torch's ONNX exporter uses unchanged.

The exporter traces a program twice more, to decompose calls that it has no ONNX function for. With
dynamic sizes that is most of its time (20 of 25 seconds for a text detector with 350 calls), though
few calls need it: here only those are decomposed, on the fake values of their operands.

Recurrent calls become custom ops: the exporter runs them step by step on fake tensors to infer shapes,
which fixes the number of steps (torch 2.13). For a custom op it infers only shapes, and the length stays
dynamic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
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
from demask.errors import NotExportable
from demask.graph.editor import GraphEditor, drop_unread
from demask.graph.fake_values import mode_of
from demask.graph.result import module_calls as modules
from demask.graph.result.demasked_module import Demasked
from demask.ops import schema
from demask.ops.entries.recurrent import GATES
from demask.ops.schema import fake
from demask.ops.traits import DECOMPOSED_WITH_NUMBERS, DROPOUTS, aten_op
from demask.rewrites.driver import apply_rules
from demask.rewrites.onnx import ONNX

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _OnnxRecurrentOp:
    """A recurrent op of ONNX. gates: torch's gate at each position in ONNX's order."""

    name: str
    gates: tuple[int, ...]
    attributes: Mapping[str, Any]


# ONNX: input, output, forget, cell; torch: input, forget, cell, output. And update, reset, hidden;
# torch: reset, update, new, with the reset gate applied after the product.
_KINDS = {
    "lstm.input": _OnnxRecurrentOp("LSTM", (0, 3, 1, 2), {}),
    "gru.input": _OnnxRecurrentOp("GRU", (1, 0, 2), {"linear_before_reset": 1}),
    "rnn_tanh.input": _OnnxRecurrentOp("RNN", (0,), {"activations": ["Tanh"]}),
    "rnn_relu.input": _OnnxRecurrentOp("RNN", (0,), {"activations": ["Relu"]}),
}


class PreparedProgram(ExportedProgram):
    """A program whose calls all have ONNX functions, so that nothing is decomposed."""

    def run_decompositions(self, *_: Any, **__: Any) -> ExportedProgram:
        return self


def prepare(slim: Demasked, translated: Mapping[Any, Any]) -> ExportedProgram | None:
    """The network for `torch.onnx.export`; None where it must be traced instead: it was read from a
    file, was changed, or has modules that are not demask's. translated: ops for which the exporter
    is passed functions."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(slim.graph, {}))
    if not _set_values(graph, slim):
        return None
    wrap_recurrent(graph)
    apply_rules(GraphEditor.in_place(graph), ONNX)
    doubles = _lift_numbers(graph)
    registered = _registered_op_names() | {op.name() for op in translated if isinstance(op, OpOverload)}
    undefined = [
        node
        for node in graph.nodes
        if isinstance(node.target, OpOverload)
        and (node.target.name() not in registered or (node.target in DECOMPOSED_WITH_NUMBERS and _takes_sizes(node)))
    ]
    table = _needed_decompositions(registered) if undefined else {}
    if not all(_decompose_call(graph, node, table) for node in undefined):
        return None
    drop_unread(graph)
    return _exported_program(slim, graph, doubles)


def _takes_sizes(node: fx.Node) -> bool:
    """Whether a call takes tensors, and numbers computed from dynamic sizes."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    values = [n.meta.get("val") for n in leaves if isinstance(n, fx.Node)]
    return any(isinstance(v, (torch.SymInt, torch.SymFloat)) for v in values) and any(
        isinstance(v, Tensor) for v in values
    )


def _lift_numbers(graph: fx.Graph) -> dict[str, Tensor]:
    """Replace number operands of float64 calls by constants, and return these by name: the exporter
    would write the numbers in float32."""
    constants, mode = {}, mode_of(graph)
    for node in list(graph.nodes):
        value, target = node.meta.get("val"), node.target
        if not isinstance(value, Tensor) or value.dtype != torch.float64 or node.op == "get_attr":
            continue
        kinds = schema_of(target).arguments if has_schema(target) else ()
        for position, (number, kind) in enumerate(zip(node.args, kinds, strict=False)):
            if type(number) is float and isinstance(kind.type, torch.TensorType):
                name = f"number {len(constants)}"  # a name that no attribute has
                constants[name] = torch.tensor(number, dtype=torch.float64)
                with graph.inserting_before(node):
                    read = graph.create_node("get_attr", name)
                read.meta["val"] = mode.from_tensor(constants[name], static_shapes=True)
                node.update_arg(position, read)
    return constants


def _registered_op_names() -> set[str]:
    """The names of ops that torch's exporter has ONNX functions for."""
    from onnxscript.function_libs.torch_lib import ops, registration

    assert ops  # importing it registers its functions
    names = {op.name() for op in exporter_targets() if isinstance(op, OpOverload)}
    return names | {name for name, _ in registration.default_registry.items()}


def _needed_decompositions(registered: set[str]) -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of ops that are not in `registered`."""
    known = decomposition_table | dict(torch.export.default_decompositions().items())
    return {
        op: decomposition
        for op, decomposition in known.items()
        if isinstance(op, OpOverload) and op.name() not in registered
    }


def _set_values(graph: fx.Graph, slim: nn.Module) -> bool:
    """Set the fake value of every node; False where values or dtypes of the network changed."""
    inputs = graph.find_nodes(op="placeholder")
    if not inputs or any("val" not in node.meta for node in inputs):
        return False
    if modules.lower_modules(graph, slim):
        return False
    editor = GraphEditor.in_place(graph)
    for node in list(graph.nodes):
        is_dropout = node.target in DROPOUTS and not schema.draws_random_numbers(node)
        if is_dropout or node.target is aten.resolve_conj.default:
            editor.replace(node, node.args[0])
            continue
        if node.op == "get_attr":
            tensor = _tensor_at(slim, str(node.target))
            value = node.meta.setdefault("val", editor.values.like(tensor))
            if (value.dtype, value.shape) != (tensor.dtype, tensor.shape):
                return False
        elif node.op == "call_function" and "val" not in node.meta:
            editor.set_value(node)
    return True


def _tensor_at(module: nn.Module, name: str) -> Tensor:
    return reduce(getattr, name.split("."), module)


def _decompose_call(graph: fx.Graph, node: fx.Node, table: dict[Any, Callable[..., Any]]) -> bool:
    """Replace a call by its decomposition; False where there is none."""
    target: Any = node.target
    values = map_arg((node.args, node.kwargs), lambda n: fake(n))
    leaves, spec = pytree.tree_flatten(values)
    reads = [n for n in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(n, fx.Node)]
    positions = [k for k, leaf in enumerate(pytree.tree_leaves((node.args, node.kwargs))) if isinstance(leaf, fx.Node)]
    if not all(isinstance(leaves[k], Tensor | torch.SymInt | torch.SymFloat) for k in positions):
        return False

    def call(*operands: Any) -> Any:
        filled = list(leaves)
        for position, operand in zip(positions, operands, strict=True):
            filled[position] = operand
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return target(*args, **kwargs)

    own_table = table | {op: decomposition for op, decomposition in decomposition_table.items() if op == node.target}
    mode = mode_of(graph)  # also of the tensors that a decomposition creates
    no_guards = nullcontext() if mode.shape_env is None else mode.shape_env.suppress_guards()
    with torch.no_grad(), enable_python_dispatcher(), no_guards, mode:
        # Nodes may share one fake value, and tracing distinguishes tensors by identity.
        operands = [v.detach() if isinstance(v, Tensor) else v for v in (leaves[k] for k in positions)]
        traced = make_fx(call, decomposition_table=own_table)(*operands)
    inner = traced.graph.find_nodes(op="placeholder")
    if any(n.op in ("get_attr", "call_module") or n.target == node.target for n in traced.graph.nodes):
        return False
    mapping: dict[fx.Node, Any] = dict(zip(inner, reads, strict=True))
    with graph.inserting_before(node):
        result = graph.graph_copy(traced.graph, mapping)
    _replace_call(graph, node, result)
    return True


def _replace_call(graph: fx.Graph, node: fx.Node, result: Any) -> None:
    """Replace a call, or the items of its result, by `result`."""
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)


def _exported_program(slim: Demasked, graph: fx.Graph, own: Mapping[str, Tensor]) -> ExportedProgram | None:
    """The exported program of a graph, whose constants become its first inputs."""
    specs, tensors = _lift_constants(graph, slim, own)
    (result,) = graph.find_nodes(op="output")
    outputs = result.args[0] if isinstance(result.args[0], list | tuple) else (result.args[0],)
    if not all(isinstance(n, fx.Node) and isinstance(fake(n), Tensor) for n in outputs):
        return None
    for node in graph.find_nodes(op="placeholder")[len(specs) :]:
        value: Any = fake(node)
        tensor = isinstance(value, Tensor)
        argument = TensorArgument(node.name) if tensor else ConstantArgument(node.name, value)
        specs.append(InputSpec(InputKind.USER_INPUT, argument, None))
    output_specs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in outputs]
    result.args = (tuple(outputs),)
    info = signature_of(slim.graph)
    call = ModuleCallSignature([], [], info.in_spec, info.out_spec)
    program = PreparedProgram(
        nn.Module(), graph, ExportGraphSignature(specs, output_specs), tensors, {}, [ModuleCallEntry("", call)]
    )
    use_known_values(program.graph_module)
    return program


def _lift_constants(
    graph: fx.Graph, slim: nn.Module, own: Mapping[str, Tensor]
) -> tuple[list[InputSpec], dict[str, Tensor]]:
    """Turn constants into inputs before the others; their specs, and the tensors by name."""
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
            tensor = tensors[name] = own[name] if name in own else _tensor_at(slim, name)
            with graph.inserting_before(first):
                placeholder = inputs[name] = graph.placeholder(re.sub(r"\W", "_", f"c_{name}"))
            placeholder.meta["val"] = fake(node)
            parameter = isinstance(tensor, nn.Parameter)
            kind = InputKind.PARAMETER if parameter else InputKind.BUFFER
            persistent = None if parameter else True
            specs.append(InputSpec(kind, TensorArgument(placeholder.name), name, persistent))
        node.replace_all_uses_with(inputs[name])
        graph.erase_node(node)
    return specs, tensors


@torch.library.custom_op("demask::recur", mutates_args=())
def recur(
    name: str,
    x: Tensor,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    biases: bool,
    layers: int,
    two: bool,
    batch_first: bool,
) -> list[Tensor]:
    """The recurrent call `name` ("aten.lstm.input"), outside of training."""
    hx: Any = list(states) if "lstm" in name else states[0]
    call = aten_op(name.removeprefix("aten."))
    outputs = call(x, hx, list(params), biases, layers, 0.0, False, two, batch_first)
    return [value.clone() for value in outputs]


@recur.register_fake
def _(
    name: str,
    x: Tensor,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    biases: bool,
    layers: int,
    two: bool,
    batch_first: bool,
) -> list[Tensor]:
    out = x.new_empty([x.shape[0], x.shape[1], (2 if two else 1) * states[0].shape[2]])
    return [out, *(torch.empty_like(state) for state in states)]


def wrap_recurrent(graph: fx.Graph) -> None:
    """Replace the recurrent calls of a graph by `recur`, in place."""
    for node in graph.nodes:
        if str(node.target) not in GATES:
            continue
        arguments = schema.arguments(node)
        hx = arguments["hx"]
        states = list(hx) if isinstance(hx, list | tuple) else [hx]
        layers, two = arguments["num_layers"], bool(arguments["bidirectional"])
        count = layers * (2 if two else 1) * (4 if arguments["has_biases"] else 2)
        if len(arguments["params"]) != count:
            raise NotExportable(
                "a projected LSTM", "the demasked graph", "ONNX's LSTM has no projection: write it as plain ops"
            )
        biases, batch_first = bool(arguments["has_biases"]), bool(arguments["batch_first"])
        params = list(arguments["params"])
        node.args = (str(node.target), arguments["input"], states, params, biases, layers, two, batch_first)
        node.kwargs, node.target = {}, torch.ops.demask.recur.default


def translation() -> dict[Any, Any]:
    """The ONNX function of `recur` for torch's exporter."""
    from onnxscript import opset18

    op: Any = opset18

    def written(name, x, states, params, biases, layers, two, batch_first):
        kind, directions = _KINDS[name.removeprefix("aten.")], 2 if two else 1
        value = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
        per_direction = len(params) // (layers * directions)
        finals: list[list[Any]] = [[] for _ in states]
        for layer in range(layers):
            groups = [params[(layer * directions + d) * per_direction :][:per_direction] for d in range(directions)]
            starts = [op.Slice(s, [layer * directions], [(layer + 1) * directions], [0]) for s in states]
            results = _onnx_layer(op, kind, value, groups, starts, biases)
            batch_second = op.Transpose(results[0], perm=[0, 2, 1, 3])
            value = op.Reshape(batch_second, op.Constant(value_ints=[0, 0, -1]))
            for final, state in zip(finals, results[1:], strict=True):
                final.append(state)
        out = op.Transpose(value, perm=[1, 0, 2]) if batch_first else value
        return [out, *(f[0] if layers == 1 else op.Concat(*f, axis=0) for f in finals)]

    return {torch.ops.demask.recur.default: written}


def _onnx_layer(
    op: Any, kind: _OnnxRecurrentOp, x: Any, groups: Sequence[Sequence[Any]], starts: Sequence[Any], biases: bool
) -> Sequence[Any]:
    """One layer's call: outputs of all steps (time, direction, batch, unit), and last states."""
    hidden = groups[0][1].shape[1]
    order = [gate * hidden + unit for gate in kind.gates for unit in range(hidden)]

    def stacked(parts: Sequence[Any]) -> Any:
        indices, first_axis = op.Constant(value_ints=order), op.Constant(value_ints=[0])
        return op.Concat(*(op.Unsqueeze(op.Gather(p, indices, axis=0), first_axis) for p in parts), axis=0)

    weights, recurrent_weights = (stacked([group[k] for group in groups]) for k in (0, 1))
    bias = None
    if biases:
        halves = [stacked([group[k] for group in groups]) for k in (2, 3)]
        bias = op.Concat(*halves, axis=1)
    attributes = dict(kind.attributes)
    if "activations" in attributes:
        attributes["activations"] = attributes["activations"] * len(groups)
    direction = "bidirectional" if len(groups) == 2 else "forward"
    call = getattr(op, kind.name)
    return call(
        x, weights, recurrent_weights, bias, None, *starts, hidden_size=hidden, direction=direction, **attributes
    )
