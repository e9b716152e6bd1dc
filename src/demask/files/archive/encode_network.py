"""The entries of a network's file: graph, provenance and tensors, encoded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from demask.compat.fx_internals import PyTreeCodeGen, codegen_of
from demask.errors import BadInput, RefusedFile
from demask.files.archive.class_record import describe_class
from demask.files.archive.node_codec import encode, encode_target, encode_value
from demask.graph.provenance import provenance_of
from demask.graph.result.class_result import as_graph, is_class_result
from demask.graph.result.computed_tensors import parametrized_tensors
from demask.graph.result.demasked_module import Demasked
from demask.graph.result.module_calls import KINDS as MODULES
from demask.graph.result.module_calls import constructor_arguments, create_without_memory, kind_of
from demask.graph.result.uncalled_modules import is_holder
from demask.registry import RESULT_KINDS
from demask.tune.optimized_module import Optimized

VERSION = 1


def encode_network(slim: nn.Module) -> tuple[str, bytes]:
    """The entries of a network's file: JSON text, and tensors in safetensors' format. Raises
    BadInput for a module, an op or a type of argument that cannot be stored."""
    provenance_of(slim)
    graph: fx.GraphModule = as_graph(slim, every_size=True)
    table, stored = _tensor_table(graph, _sources(slim))
    document = {
        "format": "demask",
        "version": VERSION,
        "optimized": isinstance(graph, Optimized),
        **_signature(graph),
        "nodes": [_encode_node(node) for node in graph.graph.nodes],
        "modules": dict(_module_specs(graph)),
        **table,
        "training": [name for name, module in graph.named_modules() if module.training],
        "demasked": provenance_of(graph).to_dict(),
        **_extra(graph),
        **describe_class(slim),
    }
    return json.dumps(document, allow_nan=False), safetensors.torch.save(stored)


def _signature(slim: fx.GraphModule) -> dict[str, Any]:
    codegen = codegen_of(slim.graph)
    info = codegen.pytree_info if isinstance(codegen, PyTreeCodeGen) else None
    if info is None or info.out_spec is None:
        raise BadInput("expected a demasked network, got a graph without a call signature")
    try:
        specs = [pytree.treespec_dumps(spec) for spec in (info.in_spec, info.out_spec)]
    except (NotImplementedError, TypeError) as error:
        raise BadInput(
            f"the model takes or returns a type that cannot be written: {error}; register it with "
            "torch.export.register_dataclass(cls, serialized_type_name=...)"
        ) from error
    return {"orig_args": list(info.orig_args), "in_spec": specs[0], "out_spec": specs[1]}


def _extra(slim: nn.Module) -> dict[str, Any]:
    if not isinstance(slim, Demasked):
        return {}
    kind = RESULT_KINDS.name_of(type(slim).graph_module())
    return {} if kind is None else {"kind": kind, "extra": slim._archived()}


def _encode_node(node: fx.Node) -> dict[str, Any]:
    target = encode_target(node.target) if node.op == "call_function" else str(node.target)
    args = [encode(argument) for argument in node.args]
    kwargs = {name: encode(argument) for name, argument in node.kwargs.items()}
    row = {"op": node.op, "name": node.name, "target": target, "args": args, "kwargs": kwargs}
    value = node.meta.get("value")
    return row if value is None else row | {"value": encode_value(value)}


def _module_specs(slim: fx.GraphModule) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, module in slim.named_modules(remove_duplicate=False):
        if is_holder(module) or module is slim:
            continue
        kind = kind_of(module)
        if kind is None:
            raise BadInput(
                f"module {name} is a {type(module).__name__}, which the format cannot "
                f"store; it stores {', '.join(sorted(MODULES))}"
            )
        fields = dict(constructor_arguments(module, kind))
        if _shapes(create_without_memory(kind, fields)) != _shapes(module):
            raise BadInput(
                f"module {name} has other tensors than a {kind.__name__} of its sizes; make "
                "pruning and parametrizations permanent first (torch.nn.utils.prune.remove, "
                "torch.nn.utils.parametrize.remove_parametrizations)"
            )
        yield name, {"type": kind.__name__, **{n: encode(value) for n, value in fields.items()}}


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items()}


def _sources(slim: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """What a network of the caller's class computes tensors from that are plain in its graph."""
    for computed in parametrized_tensors(slim) if is_class_result(slim) else ():
        for name, tensor in computed.sources().items():
            yield computed.source_name(name), tensor, True


def _tensor_table(
    slim: fx.GraphModule, sources: Iterator[tuple[str, Tensor, bool]]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Tensor]]:
    """Per tensor a row with its name, properties and key of its values; and the values by key."""
    table: dict[str, list[dict[str, Any]]] = {"tensors": [], "sources": []}
    stored, keys = {}, {}
    named = [("tensors", *row) for row in named_tensors(slim)]
    for part, name, tensor, persistent in (*named, *(("sources", *row) for row in sources)):
        order = _dimension_order(tensor)
        if id(tensor) not in keys:
            keys[id(tensor)] = f"t{len(keys)}"
            # A copy: safetensors refuses tensors that share memory.
            values = tensor.detach().cpu().permute(order).contiguous().clone().resolve_conj()
            stored[keys[id(tensor)]] = to_parts(values)
        row = {
            "name": name,
            "stored": keys[id(tensor)],
            "order": order,
            "parameter": isinstance(tensor, nn.Parameter),
            "persistent": persistent,
            "requires_grad": tensor.requires_grad,
        }
        if tensor.dtype in PARTS:
            row["dtype"] = str(tensor.dtype).removeprefix("torch.")
        table[part].append(row)
    return table, stored


# What safetensors has no name for is stored as numbers of another dtype, a complex one as pairs.
PARTS = {
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
    torch.float8_e8m0fnu: torch.uint8,
    torch.float4_e2m1fn_x2: torch.uint8,
}


def to_parts(values: Tensor) -> Tensor:
    """A contiguous tensor as it is stored."""
    if values.dtype not in PARTS:
        return values
    return torch.view_as_real(values) if values.is_complex() else values.view(PARTS[values.dtype])


def from_parts(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor of a dtype in `PARTS` that was stored. Raises RefusedFile if it was not."""
    pairs = not dtype.is_complex or stored.shape[-1:] == (2,)
    if dtype not in PARTS or stored.dtype != PARTS[dtype] or not pairs:
        raise RefusedFile(f"a tensor of {dtype} is stored as {stored.dtype} {list(stored.shape)}")
    return torch.view_as_complex(stored) if dtype.is_complex else stored.view(dtype)


def named_tensors(slim: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Name, tensor and whether it is in the state dict, also of plain tensor attributes."""
    for prefix, module in slim.named_modules(remove_duplicate=False):
        plain = {n: v for n, v in vars(module).items() if isinstance(v, Tensor)}
        not_persistent = module._non_persistent_buffers_set | plain.keys()
        for name, tensor in (*module._parameters.items(), *module._buffers.items(), *plain.items()):
            if tensor is not None:
                yield f"{prefix}.{name}".lstrip("."), tensor, name not in not_persistent


def _dimension_order(tensor: Tensor) -> list[int]:
    """The axes from outermost to innermost in memory, which preserves channels_last."""
    axes = range(tensor.ndim)
    return sorted(axes, key=lambda d: -tensor.stride(d)) if 0 not in tensor.stride() else [*axes]
