"""Folders with packed weights in `from_pretrained` and `save_pretrained` of transformers.

They count as quantized by a method of transformers' registry, which this module adds to when it is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from demask.checkpoint.packed_weights import (
    LAYERS,
    METHOD,
    empty_weight,
    packed_layers,
    read_layers,
    set_packed_layers,
    settings_of,
)
from demask.registry import RUNNERS
from demask.sparse.packed_linear import PackedLinear

quantizers: Any = import_module("transformers.quantizers")  # its bases have no types
settings: Any = import_module("transformers.utils.quantization_config")


@quantizers.register_quantization_config(METHOD)
class PackedConfig(settings.QuantizationConfigMixin):
    """The `quantization_config` of a folder with packed layers."""

    def __init__(self, layers: Mapping[str, Any], **_: Any):
        self.quant_method: Any = METHOD
        self.layers = dict(layers)


@quantizers.register_quantizer(METHOD)
class PackedLoader(quantizers.HfQuantizer):
    """Makes layers packed before their values are loaded, and writes which are when they are saved."""

    is_trainable = True  # adapters on it, and what is not packed

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        layers = read_layers({LAYERS: self.quantization_config.layers}, "quantization_config")
        prefix = f"{model.base_model_prefix}."
        if not hasattr(model, model.base_model_prefix):  # the network without its head
            layers = {name.removeprefix(prefix): layer for name, layer in layers.items() if name.startswith(prefix)}
        set_packed_layers(model, layers)
        empty = {rf"(^|\.){re.escape(name)}\.weight$" for name in layers}
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *empty}
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        layers = packed_layers(model)
        self.quantization_config.layers = settings_of(layers)[LAYERS]
        model.config.quantization_config = self.quantization_config
        empty = {f"{name}.weight": empty_weight(model.get_submodule(name).dtype) for name in layers}
        return {**model.state_dict(), **empty}, {}

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        for name, layer in list(model.named_modules()):
            if isinstance(layer, PackedLinear):
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, layer.to_dense().to(dtype or layer.dtype))
        return model


def record_packed_layers(model: nn.Module) -> None:
    """Have `save_pretrained` write which layers of a network of transformers are packed."""
    any_model: Any = model
    any_model.hf_quantizer = PackedLoader(PackedConfig({}))


RUNNERS.register("packed", record_packed_layers)
