"""The class of a network in its file: what `load` needs to build it again without its code.

Two kinds of networks can be built from what a file says: torch's own layers in `nn.Sequential`, and
models of transformers, from their config. Of others, the file has the name of the class alone.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from demask.errors import BadInput, RefusedFile
from demask.files.archive.node_codec import decode, encode
from demask.graph.result.class_result import is_class_result
from demask.graph.result.computed_tensors import parametrized_tensors
from demask.graph.result.demasked_module import Demasked
from demask.graph.result.module_calls import KINDS as MODULES
from demask.graph.result.module_calls import constructor_arguments, create_without_memory, kind_of
from demask.shrink.demask import check_loaded_saves

_MODEL = re.compile(r"transformers\.models\.\w+\.modeling_\w+", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
MOST_LAYERS = 10_000  # numbers of layers in a config
MAX_DEPTH = 50


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
    if _MODEL.fullmatch(kind.__module__) and callable(getattr(config, "to_dict", None)):
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
    if network is None or not _fits(network, state):
        return None
    own = network.state_dict()
    network.load_state_dict({name: state[name] for name in own}, assign=True)
    check_loaded_saves(network)
    return network


def _fits(network: nn.Module, state: Mapping[str, Tensor]) -> bool:
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
        case {"type": "Sequential", "layers": list(rows)} if depth < MAX_DEPTH:
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
    if not (_MODEL.fullmatch(module) and _NAME.fullmatch(name)) or max(layers, default=0) > MOST_LAYERS:
        return None
    try:
        kind: Any = getattr(sys.modules.get(module) or importlib.import_module(module), name, None)
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            return None
        settings = getattr(kind, "config_class").from_dict(dict(config))  # noqa: B009
        with torch.device("meta"):  # no memory for sizes that no tensor of the file has
            fits = _fits(kind(settings), state)
        return kind(settings).eval() if fits else None
    except Exception:  # another version of the library, in its own words
        return None
