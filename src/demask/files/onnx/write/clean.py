"""Exact cleanup of an exported graph: no result changes by a bit, and the graph does not grow.

onnxscript's rewrite rules are not used: they match constants within a tolerance (`x + 1e-8` was
removed as an addition of zero), fold norms into weights, and rewrite `x[:2], x[2:]` of five columns
as splits of three and two. Runtimes fuse and fold when they load the file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

# Movement and integer arithmetic are evaluated exactly. Arithmetic on floats is left to the
# runtime, whose rounding differs; a folded convolution of ones would also become a map per pixel.
MOVES = frozenset(("Concat", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"))
INTEGER_OPS = frozenset(("Add", "Mul", "Sub"))
# Default values of attributes of window ops, one number for every axis.
WINDOWS = {"pads": 0, "output_padding": 0, "strides": 1, "dilations": 1}
SMALL = 64  # elements; a larger folded constant is no larger than its operands


def clean(model: Any, ties: Mapping[str, str]) -> None:
    """Inline functions, fold constants that stay small, and remove unused nodes, in place. ties:
    tensors that are stored under another name, which is the value."""
    import onnx_ir.passes.common as common
    from onnx_ir.convenience import replace_all_uses_with
    from onnx_ir.passes import Sequential
    from onnxscript.optimizer import fold_constants_ir

    graph, network_tensors = model.graph, frozenset(model.graph.initializers)
    common.InlinePass()(model)
    for name, first in ties.items():
        value = graph.initializers.get(name)
        if value is not None and first in graph.initializers and not value.is_graph_output():
            replace_all_uses_with(value, graph.initializers[first])
            del graph.initializers[name]
    _rename_clashes(graph)  # before values are folded, which become tensors with these names
    fold_constants_ir(model, onnx_shape_inference=True, output_size_limit=SMALL, should_fold=is_exact)
    for node in graph:
        if node.op_type in ("Conv", "ConvTranspose") and _is_zero(node.inputs[2:]):
            node.resize_inputs(2)
    common.RemoveUnusedNodesPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    _merge_constants(graph, network_tensors)
    Sequential(
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)
    outputs = (value for node in graph.all_nodes() for value in node.outputs)
    for item in (graph, *graph.inputs, *graph.initializers.values(), *outputs):
        item.metadata_props.clear()  # written by the exporter
    for node in graph.all_nodes():
        node.name = None  # the exporter's, derived from names of values
        _drop_defaults(node, model.opset_imports.get(node.domain))


def _rename_clashes(graph: Any) -> None:
    """Rename computed values that are called as a tensor of the network: the exporter's own names,
    `val_0`, are those of tensors of networks that it wrote before."""
    taken = {*graph.initializers, *(value.name for value in graph.inputs)}
    outputs = [value for node in graph.all_nodes() for value in node.outputs]
    names = {value.name for value in outputs}
    for value in outputs:
        if value.name in taken:
            k = 0
            while (name := f"{value.name}_{k}") in taken | names:
                k += 1
            value.name = name
            names.add(name)


def _drop_defaults(node: Any, version: int | None) -> None:
    """Remove attributes whose value is the default."""
    import onnx
    import onnx_ir as ir

    for name, number in WINDOWS.items() if "Conv" in node.op_type or "Pool" in node.op_type else ():
        if name in node.attributes and set(node.attributes[name].as_ints()) == {number}:
            del node.attributes[name]
    if version is None or not onnx.defs.has(node.op_type, version, node.domain):
        return
    value = onnx.helper.get_attribute_value
    for name, declared in onnx.defs.get_schema(node.op_type, version, node.domain).attributes.items():
        if name not in node.attributes or not declared.default_value.type:
            continue
        attribute = ir.to_proto(node.attributes[name])
        if attribute.type == declared.default_value.type and value(attribute) == value(declared.default_value):
            del node.attributes[name]


def _merge_constants(graph: Any, own: Collection[str]) -> None:
    """Merge equal small constants. own: names of the network's tensors, not merged, as training may
    change them."""
    from onnx_ir.convenience import replace_all_uses_with

    unique: dict[Any, Any] = {}
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if name in own or tensor is None or tensor.size > SMALL or value.is_graph_output():
            continue
        key = (tensor.dtype, tuple(tensor.shape), tensor.tobytes())
        if (equal := unique.setdefault(key, value)) is not value:
            replace_all_uses_with(value, equal)
            del graph.initializers[name]


def _is_zero(values: Sequence[Any]) -> bool:
    """Whether a bias is the zeros that the exporter writes for a layer without bias."""
    from onnx_ir.convenience import get_const_tensor

    maker = values[0].producer() if values and values[0] is not None else None
    if maker is None or maker.op_type != "Expand":
        return False
    tensor = get_const_tensor(maker.inputs[0])
    return tensor is not None and not tensor.numpy().any()


def is_exact(node: Any) -> bool:
    """Whether a node whose inputs are constants is folded, because its result is exact."""
    dtypes = [value.dtype for value in node.inputs if value is not None]
    if node.domain not in ("", "ai.onnx") or any(dtype is None for dtype in dtypes):
        return False
    if node.op_type == "Cast":
        return _is_exact_cast(dtypes[0], node.attributes["to"].as_int())
    return node.op_type in MOVES or (node.op_type in INTEGER_OPS and all(dtype.is_integer() for dtype in dtypes))


def _is_exact_cast(source: Any, target: int) -> bool:
    """Whether every runtime casts numbers of one type to another equally: not from floats to
    integers, where the result of an overflow is undefined."""
    from onnx_ir import DataType

    return source.is_integer() or source.name == "BOOL" or not DataType(target).is_integer()
