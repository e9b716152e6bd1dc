"""The entries of a network's file: graph, provenance and tensors, encoded; and its class, which `load`
may build again without its code."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from demask.compat.fx_internals import PyTreeCodeGen, codegen_of
from demask.errors import BadInput, RefusedFile
from demask.files.node_codec import decode, encode, encode_target, encode_value
from demask.graph.provenance import provenance_of
from demask.graph.result.class_result import as_graph, is_class_result
from demask.graph.result.computed_tensors import parametrized_tensors
from demask.graph.result.demasked_module import Demasked
from demask.graph.result.module_calls import KINDS as MODULES
from demask.graph.result.module_calls import constructor_arguments, create_without_memory, kind_of
from demask.graph.result.uncalled_modules import is_holder
from demask.registry import RESULT_KINDS
from demask.shrink.demask import check_loaded_saves
from demask.tune.optimized_module import Optimized

_MODEL_MODULE = re.compile(r"transformers\.models\.\w+\.modeling_\w+", re.ASCII)
_CLASS_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
MOST_LAYERS = 10_000  # numbers of layers in a config
MAX_LAYER_DEPTH = 50
VERSION = 1
# What safetensors has no name for is stored as numbers of another dtype, a complex one as pairs.
STORED_AS = {
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
    torch.float8_e8m0fnu: torch.uint8,
    torch.float4_e2m1fn_x2: torch.uint8,
}


def encode_network(slim: nn.Module) -> tuple[str, bytes]:
    """The entries of a network's file: JSON text, and tensors in safetensors' format. Raises
    BadInput for a module, an op or a type of argument that cannot be stored."""
    provenance_of(slim)
    graph: fx.GraphModule = as_graph(slim, every_size=True)
    table, stored = _encode_tensors(graph, _computed_sources(slim))
    document = {
        "format": "demask",
        "version": VERSION,
        "optimized": isinstance(graph, Optimized),
        **_encode_signature(graph),
        "nodes": [_encode_node(node) for node in graph.graph.nodes],
        "modules": dict(_encode_modules(graph)),
        **table,
        "training": [name for name, module in graph.named_modules() if module.training],
        "demasked": provenance_of(graph).to_dict(),
        **_encode_extra(graph),
        **describe_class(slim),
    }
    return json.dumps(document, allow_nan=False), safetensors.torch.save(stored)


def _encode_signature(slim: fx.GraphModule) -> dict[str, Any]:
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


def _encode_extra(slim: nn.Module) -> dict[str, Any]:
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


def _encode_modules(slim: fx.GraphModule) -> Iterator[tuple[str, dict[str, Any]]]:
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
        if _state_shapes(create_without_memory(kind, fields)) != _state_shapes(module):
            raise BadInput(
                f"module {name} has other tensors than a {kind.__name__} of its sizes; make "
                "pruning and parametrizations permanent first (torch.nn.utils.prune.remove, "
                "torch.nn.utils.parametrize.remove_parametrizations)"
            )
        yield name, {"type": kind.__name__, **{n: encode(value) for n, value in fields.items()}}


def _state_shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items()}


def _computed_sources(slim: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """What a network of the caller's class computes tensors from that are plain in its graph."""
    for computed in parametrized_tensors(slim) if is_class_result(slim) else ():
        for name, tensor in computed.sources().items():
            yield computed.source_name(name), tensor, True


def _encode_tensors(
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
            stored[keys[id(tensor)]] = to_stored(values)
        row = {
            "name": name,
            "stored": keys[id(tensor)],
            "order": order,
            "parameter": isinstance(tensor, nn.Parameter),
            "persistent": persistent,
            "requires_grad": tensor.requires_grad,
        }
        if tensor.dtype in STORED_AS:
            row["dtype"] = str(tensor.dtype).removeprefix("torch.")
        table[part].append(row)
    return table, stored


def to_stored(values: Tensor) -> Tensor:
    """A contiguous tensor as it is stored."""
    if values.dtype not in STORED_AS:
        return values
    return torch.view_as_real(values) if values.is_complex() else values.view(STORED_AS[values.dtype])


def from_stored(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor of a dtype in `STORED_AS` that was stored. Raises RefusedFile if it was not."""
    pairs = not dtype.is_complex or stored.shape[-1:] == (2,)
    if dtype not in STORED_AS or stored.dtype != STORED_AS[dtype] or not pairs:
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


def describe_class(slim: nn.Module) -> dict[str, Any]:
    """The class of a network for its file: {} for a graph; the name of the class, and which modules
    are graphs in it, else what it is built from, if it can be."""
    if not is_class_result(slim):
        return {}
    kind = type(slim)
    record: dict[str, Any] = {"class": f"{kind.__module__}.{kind.__qualname__}"}
    if graphs := [p for p, m in slim.named_modules() if isinstance(m, Demasked) and m.trains]:
        return {"own": record | {"graphs": graphs}}
    config: Any = getattr(slim, "config", None)
    if _MODEL_MODULE.fullmatch(kind.__module__) and callable(getattr(config, "to_dict", None)):
        return {"own": record | {"config": config.to_dict()}}
    try:
        return {"own": record | {"layers": _describe_layers(slim)}}
    except BadInput:
        return {"own": record}


def build_class(record: Any, state: Mapping[str, Tensor]) -> nn.Module | None:
    """The network of a file's class with its tensors; None where the file does not have all of what
    it is built from."""
    match record:
        case {"class": str(), "layers": layers}:
            try:
                network = _build_layers(layers, 0)
            except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
                raise RefusedFile(f"the layers of its class are none of torch: {error}") from error
        case {"class": str(path), "config": dict(config)}:
            network = _build_model(path, config, state)
        case _:
            return None
    if network is None or not _has_all_tensors(network, state):
        return None
    own = network.state_dict()
    network.load_state_dict({name: state[name] for name in own}, assign=True)
    check_loaded_saves(network)
    return network


def _has_all_tensors(network: nn.Module, state: Mapping[str, Tensor]) -> bool:
    """Whether these are the tensors of a network; buffers that its own state leaves out may be
    among them."""
    own = dict(network.state_dict())
    others = state.keys() - own.keys() - {name for name, _ in network.named_buffers()}
    return not others and all(name in state and tensor.shape == state[name].shape for name, tensor in own.items())


def _describe_layers(module: nn.Module) -> dict[str, Any]:
    """A layer of torch, or a sequence of some. Raises BadInput for other modules."""
    if type(module) is nn.Sequential:
        layers = [[name, _describe_layers(layer)] for name, layer in module.named_children()]
        return {"type": "Sequential", "layers": layers}
    kind = kind_of(module)
    if kind is None or type(module) is not kind or any(parametrized_tensors(module)):
        raise BadInput(f"a {type(module).__name__} is no layer of torch")
    fields = dict(constructor_arguments(module, kind))
    return {"type": kind.__name__, **{name: encode(value) for name, value in fields.items()}}


def _build_layers(record: Any, depth: int) -> nn.Module:
    match record:
        case {"type": "Sequential", "layers": list(rows)} if depth < MAX_LAYER_DEPTH:
            sequence = nn.Sequential()
            for name, layer in rows:
                sequence.add_module(name, _build_layers(layer, depth + 1))
            return sequence
        case {"type": str(kind), **fields} if kind in MODULES:
            values = {name: decode(value, {}) for name, value in fields.items()}
            return create_without_memory(MODULES[kind], values)
    raise ValueError(f"{record!r:.40}")


def _build_model(path: str, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> nn.Module | None:
    """A model of transformers, if that is installed and has it: of the names that a file may have,
    only those of its own models are looked up."""
    module, _, name = path.rpartition(".")
    layers = [value for key, value in config.items() if "layer" in key and type(value) is int]
    if not (_MODEL_MODULE.fullmatch(module) and _CLASS_NAME.fullmatch(name)) or max(layers, default=0) > MOST_LAYERS:
        return None
    try:
        kind: Any = getattr(sys.modules.get(module) or importlib.import_module(module), name, None)
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            return None
        settings = getattr(kind, "config_class").from_dict(dict(config))  # noqa: B009
        with torch.device("meta"):  # no memory for sizes that no tensor of the file has
            fits = _has_all_tensors(kind(settings), state)
        return kind(settings).eval() if fits else None
    except Exception:  # another version of the library, in its own words
        return None
