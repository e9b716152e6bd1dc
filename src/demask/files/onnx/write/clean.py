"""Cleaning an exported graph without changing a bit of what it computes, or making it larger.

Not by onnxscript's rewrite rules: they match constants within a tolerance (`x + 1e-8` was dropped
as an addition of zero), move norms into weights, and cut `x[:2], x[2:]` of five columns into three
and two. A runtime fuses and folds on its own when it loads the file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

# Moves and integer arithmetic, which evaluation answers exactly. Arithmetic on floats is left to
# the runtime: it rounds in its own way, and a convolution of ones would become a map per pixel.
MOVES = frozenset(("Concat", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose",
                   "Unsqueeze"))  # fmt: skip
WHOLE = frozenset(("Add", "Mul", "Sub"))
# What every number of an attribute is where it is left out, of ops over windows.
WINDOWS = {"pads": 0, "output_padding": 0, "strides": 1, "dilations": 1}
SMALL = 64  # elements; a folded constant that is larger is not larger than what it was computed of


def clean(model: Any) -> None:
    """Inline functions, fold constants that stay as small, and drop what nothing reads."""
    import onnx_ir.passes.common as common
    from onnx_ir.passes import Sequential
    from onnxscript.optimizer import fold_constants_ir

    graph, own = model.graph, frozenset(model.graph.initializers)
    common.InlinePass()(model)
    fold_constants_ir(
        model, onnx_shape_inference=True, output_size_limit=SMALL, should_fold=is_exact
    )
    for node in graph:
        if node.op_type in ("Conv", "ConvTranspose") and _is_zero(node.inputs[2:]):
            node.resize_inputs(2)
    common.RemoveUnusedNodesPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    _merge(graph, own)
    Sequential(
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)
    made = (value for node in graph.all_nodes() for value in node.outputs)
    for noted in (graph, *graph.inputs, *graph.initializers.values(), *made):
        noted.metadata_props.clear()  # the exporter's notes on its program
    for node in graph.all_nodes():
        node.name = None  # the exporter's, from those of values
        _leave_out_defaults(node, model.opset_imports.get(node.domain))


def _leave_out_defaults(node: Any, version: int | None) -> None:
    """Drop attributes that have the value which they have when they are left out."""
    import onnx
    import onnx_ir as ir

    for name, number in WINDOWS.items() if "Conv" in node.op_type or "Pool" in node.op_type else ():
        if name in node.attributes and set(node.attributes[name].as_ints()) == {number}:
            del node.attributes[name]
    if version is None or not onnx.defs.has(node.op_type, version, node.domain):
        return
    value = onnx.helper.get_attribute_value
    for name, known in onnx.defs.get_schema(node.op_type, version, node.domain).attributes.items():
        if name not in node.attributes or not known.default_value.type:
            continue
        given = ir.to_proto(node.attributes[name])
        if given.type == known.default_value.type and value(given) == value(known.default_value):
            del node.attributes[name]


def _merge(graph: Any, own: Collection[str]) -> None:
    """Let equal small constants be one. own: names of the network's tensors, which stay apart: two
    that are equal now may be trained later."""
    from onnx_ir.convenience import replace_all_uses_with

    seen: dict[Any, Any] = {}
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if name in own or tensor is None or tensor.size > SMALL or value.is_graph_output():
            continue
        key = (tensor.dtype, tuple(tensor.shape), tensor.tobytes())
        if (twin := seen.setdefault(key, value)) is not value:
            replace_all_uses_with(value, twin)
            del graph.initializers[name]


def _is_zero(values: Sequence[Any]) -> bool:
    """Whether a bias is the zeros that the exporter writes for a layer without one."""
    from onnx_ir.convenience import get_const_tensor

    maker = values[0].producer() if values and values[0] is not None else None
    if maker is None or maker.op_type != "Expand":
        return False
    tensor = get_const_tensor(maker.inputs[0])
    return tensor is not None and not tensor.numpy().any()


def is_exact(node: Any) -> bool:
    """Whether a node over constants is folded."""
    dtypes = [value.dtype for value in node.inputs if value is not None]
    if node.domain not in ("", "ai.onnx") or any(dtype is None for dtype in dtypes):
        return False
    if node.op_type == "Cast":
        return _widens(dtypes[0], node.attributes["to"].as_int())
    return node.op_type in MOVES or (
        node.op_type in WHOLE and all(dtype.is_integer() for dtype in dtypes)
    )


def _widens(source: Any, target: int) -> bool:
    """Whether numbers of one type are rounded alike by every cast to another: not from floats to
    integers, where what does not fit is anything."""
    return source.is_integer() or source.name == "BOOL" or not _is_whole(target)


def _is_whole(target: int) -> bool:
    from onnx_ir import DataType

    return DataType(target).is_integer()
