"""Names of tensors in checkpoint files of transformers, and those of the parameters they become.

`from_pretrained` renames tensors (old names, prefixes) and merges some (experts of one layer);
these rules are in transformers.conversion_mapping and core_model_loading, which change between
releases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor


def parameters_of_files(model: Any, names: Iterable[str]) -> dict[str, str | None]:
    """By name of a tensor in a file, the parameter or buffer it is, by its name in the model; None
    for tensors that are merged with others, or that the model does not have."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    own = model.state_dict()
    result: dict[str, str | None] = {}
    for name in names:
        renamed, merged = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        result[name] = renamed if merged is None and renamed in own else None
    return result


def tensors_of_files(model: Any, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `save_pretrained` would write for parameters of these values, by the names in files."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(values)))


def decoded_config(kind: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """A config as its class takes it: files write what is not finite in JSON as an object."""
    return kind._decode_special_floats(dict(data))
