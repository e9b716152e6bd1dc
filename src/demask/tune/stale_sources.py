"""The tensors that plans were computed from, and whether they are still the same.

torch counts the writes to a tensor (`_version`), but not those through `.data`. The parameters of
an optimized network are `CountedParameter`s, of which these are counted, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter, getitem, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

_version, _address = attrgetter("_version"), Tensor.data_ptr
_data: Any = Tensor.data


class CountedParameter(nn.Parameter):
    """A parameter of which writes through `.data` are counted in `_version`, too.

    It is pickled as an `nn.Parameter`.

    >>> weight = CountedParameter(torch.ones(2))
    >>> weight.data.mul_(2), weight._version
    (tensor([2., 2.]), 1)
    """

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The tensor without its gradient, with which it shares memory and the count."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _data.__set__(self, value)
        increment_version(self)


def count_writes(module: nn.Module) -> None:
    """Let writes to parameters be counted, and make normal tensors of inference tensors, of which
    torch counts none."""
    normal: dict[int, Tensor] = {}
    for part in module.modules():
        kinds: Any = part._parameters, part._buffers
        for tensors in kinds:
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_inference():
                    tensors[name] = normal.setdefault(id(tensor), _normal(tensor))
                if type(tensors[name]) is nn.Parameter:
                    tensors[name].__class__ = CountedParameter


def _normal(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        copy = tensor.clone()
        return CountedParameter(copy, False) if isinstance(tensor, nn.Parameter) else copy


@dataclass(slots=True)
class Sources:
    """Tensors by where a module has them, their aliases by name, and how often they were written to
    when plans were made from them.

    aliases: share memory and version with the tensors, and are of no subclass, with which torch's
    calls take longer. Writes that torch does not count (through NumPy or DLPack) are not seen.
    """

    holders: list[dict[str, Any]]
    names: list[str]
    objects: list[Any]
    aliases: dict[str, Tensor]
    versions: list[int]
    buffers: list[Tensor]  # their `.data` can be set without being counted
    addresses: list[int]

    def unchanged(self) -> bool:
        """Whether the module still has these tensors, with the same values."""
        try:
            same = all(map(is_, map(getitem, self.holders, self.names), self.objects))
        except KeyError:
            return False
        return (
            same
            and list(map(_version, self.aliases.values())) == self.versions
            and list(map(_address, self.buffers)) == self.addresses
        )


def sources_of(module: nn.Module, paths: Iterable[str]) -> Sources | None:
    """The tensors that a module has under these names; None where one is computed when it is read
    (by `torch.nn.utils.parametrize`, say), so that no change of it can be seen."""
    count_writes(module)
    places: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
    aliases: dict[str, Tensor] = {}
    for path in dict.fromkeys(paths):
        *steps, leaf = path.split(".")
        here = module
        for step in steps:
            child = here._modules[step]
            places[id(here), step] = (here._modules, step, child)
            assert child is not None
            here = child
        kinds = (vars(here), here._parameters, here._buffers)
        holder: Any = next((kind for kind in kinds if leaf in kind), None)
        if holder is None or not isinstance(holder[leaf], Tensor):
            return None
        places[id(here), leaf] = (holder, leaf, holder[leaf])
        aliases[path] = holder[leaf].detach()
    holders, names, objects = (list(column) for column in zip(*places.values(), strict=True)) if (
        places) else ([], [], [])  # fmt: skip
    if any(alias.is_inference() for alias in aliases.values()):
        return None
    buffers = [t for t in objects if isinstance(t, Tensor) and type(t) is not CountedParameter]
    return Sources(holders, names, objects, aliases, list(map(_version, aliases.values())), buffers,
                   list(map(_address, buffers)))  # fmt: skip
