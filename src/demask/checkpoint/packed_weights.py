"""Linear layers whose weights are stored packed in a folder: without their zeros (`sparse.products.packed`).

In place of `layer.weight` a folder has the tensors of a form, such as `layer.values`, `layer.bits` and
`layer.starts`, and an empty `layer.weight`: loaders that do not know this form warn of it at most, and would go
on with random weights, but they refuse sizes that are others than the layer's. Its config says so, as it says how
weights are quantized:

    "quantization_config": {"quant_method": "demask", "layers": {
        "model.layers.0.mlp.up_proj": {"form": "bitmap", "size": [5632, 2048], "numbers": 3460300}}}

"dtype" is that of the stored numbers where it is not the layer's: 8-bit integers, which have a scale for each row,
or for each "group" of so many of its columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from demask.errors import BadInput
from demask.sparse.packed_linear import PackedLinear, check_group
from demask.sparse.products.packed import FORMS, PackedMatrix, empty_matrix

METHOD = "demask"  # of quantization, as a config names it
LAYERS = "layers"
_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "int8")}
_MOST = 2**31  # rows, or columns


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """How a folder stores the weight of a layer.

    Attributes:
        form: of `FORMS`.
        size: rows and columns.
        numbers: how many of its elements are stored.
        dtype: of the stored numbers; None for that of the layer.
        group: how many columns have a scale in common; 0: all, or there are no scales.
    """

    form: str
    size: tuple[int, int]
    numbers: int
    dtype: torch.dtype | None = None
    group: int = 0

    @classmethod
    def of(cls, layer: PackedLinear) -> PackedWeight:
        """How the weight of a layer is stored."""
        weight = layer.packed
        dtype = None if weight.dtype == layer.dtype else weight.dtype
        return cls(weight.form, weight.size, weight.stored_numbers, dtype, weight.group)

    @classmethod
    def from_config(cls, data: Any, name: str) -> PackedWeight:
        """What a config says of a layer. Raises BadInput."""
        match data:
            case {"form": str(form), "size": [int(rows), int(columns)], "numbers": int(numbers)} if form in FORMS:
                dtype = data.get("dtype")
                is_dtype = dtype is None or (isinstance(dtype, str) and dtype in _DTYPES)
                is_size = min(rows, columns) > 0 and max(rows, columns) < _MOST
                if is_dtype and is_size and 0 <= numbers <= rows * columns:
                    stored, group = None if dtype is None else _DTYPES[dtype], data.get("group", 0)
                    try:
                        check_group(stored, group)
                    except BadInput as error:
                        raise BadInput(f"{name}: {error}") from None
                    return cls(form, (rows, columns), numbers, stored, group)
        raise BadInput(f"{name}: expected a form, a size and how many numbers are stored, got {data!r:.200}")

    def to_config(self) -> dict[str, Any]:
        """What a config says of it."""
        entry: dict[str, Any] = {"form": self.form, "size": list(self.size), "numbers": self.numbers}
        if self.dtype is not None:
            entry["dtype"] = str(self.dtype).removeprefix("torch.")
        return entry | {"group": self.group} if self.group else entry

    def empty(self, dtype: torch.dtype) -> PackedMatrix:
        """The matrix without values, on the meta device. dtype: of the layer."""
        return empty_matrix(self.form, self.size, self.numbers, self.dtype or dtype, "meta", self.group)

    def names(self, layer: str) -> list[str]:
        """The names of its tensors, in the order of `PackedMatrix.all_tensors`."""
        leaves = (*FORMS[self.form], *(["scale"] if self.dtype == torch.int8 else []))
        return [f"{layer}.{leaf}" for leaf in leaves]


def empty_weight(dtype: torch.dtype) -> Tensor:
    """What a folder has as the `weight` of a packed layer. dtype: of the layer."""
    return torch.empty(0, dtype=dtype)


def read_layers(settings: Mapping[str, Any], where: str) -> dict[str, PackedWeight]:
    """The packed layers of a folder, by name, from its config. Raises BadInput."""
    layers = settings.get(LAYERS)
    if not isinstance(layers, dict):
        raise BadInput(f"{where}: expected the packed layers, got {layers!r:.80}")
    return {name: PackedWeight.from_config(entry, f"{where}: {name}") for name, entry in layers.items()}


def settings_of(layers: Mapping[str, PackedWeight]) -> dict[str, Any]:
    """The `quantization_config` of a folder with packed layers."""
    return {"quant_method": METHOD, LAYERS: {name: weight.to_config() for name, weight in layers.items()}}


def packed_layers(model: nn.Module) -> dict[str, PackedWeight]:
    """The packed layers of a network, by name."""
    return {n: PackedWeight.of(layer) for n, layer in model.named_modules() if isinstance(layer, PackedLinear)}


def set_packed_layers(model: nn.Module, layers: Mapping[str, PackedWeight]) -> None:
    """Replace linear layers of a network by packed ones without values, on the meta device. Raises BadInput."""
    for name, weight in layers.items():
        try:
            layer = model.get_submodule(name)
        except AttributeError:
            layer = None
        if not isinstance(layer, nn.Linear) or tuple(layer.weight.shape) != weight.size:
            got = "is none" if layer is None else f"is {layer}"
            raise BadInput(f"{name}: expected a linear layer of size {weight.size}, but it {got}")
        dtype, parent = layer.weight.dtype, model.get_submodule(name.rpartition(".")[0])
        packed = PackedLinear(weight.empty(dtype), layer.bias, dtype=dtype).train(layer.training)
        setattr(parent, name.rpartition(".")[2], packed)


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers whose weights are no other module's."""
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    for name, module in model.named_modules():
        if type(module) is nn.Linear and users[id(module.weight)] == 1:
            yield name, module
