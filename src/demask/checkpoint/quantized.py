"""Weights of 8 bits with scales: which tensors they are, what they say, and how scales are cut.

A weight is a tensor of float8 or int8; its values are the products with its scales, one for all of
it, for each row, or for each block of rows and columns. As they are written by transformers (fp8,
fbgemm_fp8), and by llm-compressor and vLLM (compressed-tensors).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from demask.errors import BadInput, DemaskError
from demask.files.weight_file import StoredTensor

KEY = "quantization_config"
_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors")
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")  # of compressed-tensors
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_SUFFIXES = ("_scale_inv", "_scale")
_ADVICE = "slim the folder that they were quantized from, and quantize the result"


@dataclass(frozen=True, slots=True)
class Scale:
    """The scales of a weight.

    Attributes:
        name: their tensor.
        blocks: by axis of the weight, how many neighbors have a scale in common; 0: all of them.
    """

    name: str
    blocks: tuple[int, ...]

    def values(self, weight: Tensor, scales: Tensor) -> Tensor:
        """The products of a weight and its scales, float32."""
        result = weight.float()
        scales = scales.float().reshape(self._shape(scales.shape))
        for axis, block in enumerate(self.blocks):
            if block > 1:
                scales = scales.repeat_interleave(block, axis).narrow(axis, 0, weight.shape[axis])
        return result.mul_(scales)

    def _shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the scales with as many axes as the weight."""
        return (*shape, *[1] * len(self.blocks))[: len(self.blocks)]

    def cuts(self, cuts: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The positions of the scales that stay with those of the weight, by axis. Raises
        DemaskError where only a part of a block stays."""
        own: dict[int, Tensor] = {}
        for axis, positions in cuts.items():
            block = self.blocks[axis]
            if not block:
                continue
            own[axis] = positions[..., ::block] // block
            near = own[axis].repeat_interleave(block, -1)[..., : positions.shape[-1]]
            if not torch.equal(near, positions // block):
                raise DemaskError(f"{self.name}: a block of {block} is cut in two")
        return own


def find_scales(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, Scale]:
    """By weight of 8 bits in a folder, its scales. Raises BadInput for weights that are quantized
    otherwise."""
    if KEY not in config:
        return {}
    settings = config[KEY] if isinstance(config[KEY], dict) else {}
    method = settings.get("quant_method", "?")
    if method == "compressed-tensors":
        formats = [settings.get("format"), *(group.get("format") for group in _groups(settings))]
        method = next((f"{method}: {f}" for f in formats if f and f not in _FORMATS), method)
    if method not in _METHODS:
        raise BadInput(f"{folder}: its weights are quantized ({method}), which are not cut; " + _ADVICE)
    more: dict[str, str] = {}  # by module, a tensor besides its weight, scale and bias
    for name, stored in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf.startswith("weight_") and leaf[6:] not in _SUFFIXES and stored.shape not in ((), (1,)):
            more[module] = name
    scales: dict[str, Scale] = {}
    for name, stored in tensors.items():
        if stored.dtype not in _EIGHT_BITS:
            continue
        other = more.get(name.rpartition(".")[0])
        own = next((name + s for s in _SUFFIXES if name + s in tensors), None)
        blocks = (
            None
            if own is None or other
            else _find_blocks(stored.shape, tensors[own], settings.get("weight_block_size"))
        )
        if own is None or blocks is None:
            problem = f"{other}, besides scales" if other else "no scales that fit it"
            raise BadInput(f"{folder}: {name} is {stored.dtype} with {problem}; {_ADVICE}")
        scales[name] = Scale(own, blocks)
    return scales


def _groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    return [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []


def _find_blocks(shape: Sequence[int], scale: StoredTensor, sizes: Any) -> tuple[int, ...] | None:
    """By axis, how many positions of a weight have a scale in common, as in `Scale`; None where the
    shape of the scales does not say so. sizes: of blocks, if the config tells them."""
    if not scale.dtype.is_floating_point or len(scale.shape) > len(shape):
        return None
    every = isinstance(sizes, list) and len(sizes) == len(shape)
    blocks = list[int]()
    for axis, (n, own) in enumerate(zip(shape, (*scale.shape, *[1] * len(shape)), strict=False)):
        if own == 1:
            blocks.append(0)
        elif own == n:
            blocks.append(1)
        elif every and type(sizes[axis]) is int and sizes[axis] > 0 and -(-n // sizes[axis]) == own:
            blocks.append(sizes[axis])
        elif own and n % own == 0:
            blocks.append(n // own)
        else:
            return None
    return tuple(blocks)
