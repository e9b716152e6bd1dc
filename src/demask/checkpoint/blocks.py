"""Folders whose config lists their layers, each with sizes of its own: nemotron-nas, also DeciLM.

All layers have equally many queries. A layer has fewer keys and values where its queries share
them: those of dead heads, whose weights are zero, are spread over the heads that stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from demask.checkpoint.family import ConfigData, Family
from demask.checkpoint.folder import CheckpointFolder
from demask.checkpoint.plan import CheckpointPlan, find_cuts, new_shape
from demask.checkpoint.streamed import StreamedModel
from demask.checkpoint.targets import HALVES, BlockFormat, LoaderTarget, differs_from_llama, has_biases, head_size
from demask.checkpoint.tensors import StoredTensors
from demask.errors import BadInput, Mismatch

_QUERIES = ("q_proj.weight", "o_proj.weight")
CODE_FILE = "configuration_decilm.py"
# transformers has no class of such configs: vLLM takes it from the folder.
CODE = '''"""The config of this folder: its layers have sizes of their own."""

from transformers import PretrainedConfig


class Block(dict):
    """A dictionary of which the values are attributes, too."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class DeciLMConfig(PretrainedConfig):
    model_type = "nemotron-nas"

    def __init__(self, block_configs=(), **values):
        self.block_configs = [
            Block({name: Block(half) for name, half in block.items()}) for block in block_configs
        ]
        super().__init__(**values)
'''


def check_blocks(model: Any, loader: LoaderTarget) -> BlockFormat:
    """The format of a folder with sizes by layer for a model, which is on the meta device. Raises
    BadInput, with the reason, where none computes what the model does."""
    own, kind = loader.blocks.get(model.config.model_type), type(model).__name__
    if own is None:
        kinds = ", ".join(loader.blocks) or "nothing"
        raise BadInput(f"{loader.name} loads sizes by layer of {kinds}, got {kind}; write one size for all layers")
    problem = differs_from_llama(model)
    config = model.config
    if not problem and has_biases(model):
        problem = "has no biases"
    if not problem and not own.own_head_size:
        width = head_size(config) * config.num_attention_heads
        if width != config.hidden_size:
            problem = f"has heads of {config.hidden_size} numbers altogether, not {width}"
    if problem:
        raise BadInput(f"{loader.name}: its {own.name} {problem}; write one size for all layers")
    return own


def fit_blocks(stored: StoredTensors, plan: CheckpointPlan, own: BlockFormat) -> CheckpointPlan:
    """The plan with numbers of heads and units that the format can say."""
    config = stored.model.config
    size, most = head_size(config), config.num_attention_heads
    shared = most // config.num_key_value_heads
    live = [count if s.group.kind == "head" else 0 for s, count in zip(plan.slices, plan.counts, strict=True)]
    fits: list[tuple[int, int, list[int]]] = []
    for queries in range(shared * max([1, *live]), most + 1) if own.own_head_size else [most]:
        divisors = [n for n in range(1, queries // shared + 1) if queries % n == 0]
        if max(live) <= divisors[-1]:
            heads = [next(n for n in divisors if n >= count) if count else 0 for count in live]
            fits.append((sum(queries + n for n in heads if n), queries, heads))
    _, queries, heads = min(fits)
    counts = [
        n if s.group.kind == "head" else count for s, count, n in zip(plan.slices, plan.counts, heads, strict=True)
    ]
    cuts = {name: dict(axes) for name, axes in find_cuts(stored, plan.slices, counts).items()}
    for mine, count in zip(plan.slices, counts, strict=True):
        for member, parameter in mine.parameters():
            name = stored.name_of(parameter)
            assert name is not None
            length = stored.folder.stored(name).shape[member.axis]
            positions = cuts.setdefault(name, {}).get(member.axis, torch.arange(length))
            if mine.group.kind == "unit":
                more = -count % own.multiple
            elif count and parameter.endswith(_QUERIES):
                positions, more = positions.view(count, -1), (queries // count - shared) * size
            else:
                continue
            cuts[name][member.axis] = F.pad(positions, (0, more), value=-1).flatten()
    return replace(plan, counts=counts, cuts=cuts)


def config_of_blocks(stored: StoredTensors, plan: CheckpointPlan, own: BlockFormat) -> ConfigData:
    """The config of a folder. plan: from `fit_blocks`."""
    (stack,), size = stored.stacks, head_size(stored.model.config)

    def length(layer: int, name: str) -> int:
        tensor = stored.name_of(stack.name(layer, name + ".weight"))
        assert tensor is not None
        return 0 if tensor in plan.dropped else new_shape(stored, plan, tensor)[0]

    blocks: list[dict[str, Any]] = []
    width, layers = stored.model.config.hidden_size, plan.layers[stack.path]
    queries = max(length(layer, "self_attn.q_proj") for layer in layers) // size
    queries = queries or stored.model.config.num_attention_heads
    for layer in layers:
        heads, units = length(layer, "self_attn.k_proj") // size, length(layer, "mlp.up_proj")
        halves: dict[str, dict[str, Any]] = {
            "attention": {"no_op": not heads, "replace_with_linear": False},
            "ffn": {"no_op": not units, "replace_with_linear": False},
        }
        if heads:
            halves["attention"]["n_heads_in_group"] = queries // heads
        if units and own.multiple > 1:  # the middle of the numbers that are rounded up to `units`
            halves["ffn"]["ffn_mult"] = round((units - own.multiple / 2) * 3 / (2 * width), 6)
        elif units:
            halves["ffn"]["intermediate_size"] = units
        blocks.append(halves)
    config = {
        **plan.config,
        "architectures": ["DeciLMForCausalLM"],
        "model_type": own.name,
        "num_attention_heads": queries,
        "head_dim": size,
        "block_configs": blocks,
    }
    del config["num_key_value_heads"], config["intermediate_size"]
    if own.code:
        config["auto_map"] = {"AutoConfig": f"{Path(CODE_FILE).stem}.DeciLMConfig"}
    return config


class BlockModel(StreamedModel):
    """A folder of blocks in the class of the original, by what its config says: with zeros up to
    the original's number of queries and to the most units, and keys and values of each query.

    Args:
        stored: the original.
    """

    def __init__(self, family: Family, folder: CheckpointFolder, stored: StoredTensors, own: BlockFormat):
        config, (self._stack,) = dict(folder.config), stored.stacks
        before, width = stored.model.config, config["hidden_size"]
        self._blocks, self._size = config.pop("block_configs"), config["head_dim"]
        self._queries = config["num_attention_heads"]
        self._units_as_loaded = [_units_as_loaded(block["ffn"], width, own) for block in self._blocks]
        heads = before.num_attention_heads
        config |= {
            "architectures": [type(stored.model).__name__],
            "model_type": before.model_type,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "intermediate_size": max([1, *self._units_as_loaded]),
        }
        config.pop("auto_map", None)
        super().__init__(family, folder, config)
        gone = tuple(
            self._stack.name(k, name)
            for k, block in enumerate(self._blocks)
            for half, kind in (("attention", "head"), ("ffn", "unit"))
            if block[half]["no_op"]
            for name in HALVES[kind]
        )
        self.missing = [name for name in self.missing if not name.startswith(gone)]

    def read(self, name: str) -> Tensor:
        value, full = super().read(name), self.model.get_parameter(name).shape
        split = self._stack.split(name)
        if split is None or self.stored.name_of(self._source.get(name, name)) is None:
            return value
        (layer, inside), shape = split, list(full)
        part = inside.rpartition(".")[0].rpartition(".")[2]
        if inside.startswith("self_attn."):
            group = self._blocks[layer]["attention"]["n_heads_in_group"]
            heads = self._queries // (group if part in ("k_proj", "v_proj") else 1)
            shape[part == "o_proj"] = heads * self._size
        elif inside.startswith("mlp."):
            shape[part == "down_proj"] = self._units_as_loaded[layer]
        if list(value.shape) != shape:
            raise Mismatch(f"{name} is {tuple(value.shape)}, and {tuple(shape)} by the new config")
        if part in ("k_proj", "v_proj"):
            value = value.view(-1, self._size, full[1])
            value = value.repeat_interleave(self._queries // len(value), 0).flatten(0, 1)
        missing = [most - own for most, own in zip(full, value.shape, strict=True)]
        return F.pad(value, [n for more in reversed(missing) for n in (0, more)])


def _units_as_loaded(half: Mapping[str, Any], width: int, own: BlockFormat) -> int:
    """The units of a layer, as loaders read them."""
    if half["no_op"]:
        return 0
    if "ffn_mult" not in half:
        return half["intermediate_size"]
    return -(-int(2 * half["ffn_mult"] * width / 3) // own.multiple) * own.multiple
