"""The tensors from which cached values were computed, and whether they have changed.

torch counts writes to a tensor (`_version`), but not writes through `.data`. Parameters of an
optimized network are `CountedParameter`s, which count these, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter, getitem, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

_version, _address = attrgetter("_version"), Tensor.data_ptr
_data: Any = Tensor.data


class CountedParameter(nn.Parameter):
    """A parameter whose `_version` also counts writes through `.data`.

    It is pickled as an `nn.Parameter`.

    >>> weight = CountedParameter(torch.ones(2))
    >>> weight.data.mul_(2), weight._version
    (tensor([2., 2.]), 1)
    """

    @property
    def data(self) -> Tensor:
        """The detached tensor, which shares memory and `_version` with the parameter."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _data.__set__(self, value)
        increment_version(self)


def count_writes(module: nn.Module) -> None:
    """Make parameters count writes. Inference tensors, for which torch counts no writes, become
    normal tensors."""
    normal: dict[int, Tensor] = {}
    for submodule in module.modules():
        tables: Any = submodule._parameters, submodule._buffers
        for tensors in tables:
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_inference():
                    tensors[name] = normal.setdefault(id(tensor), _without_inference_mode(tensor))
                if type(tensors[name]) is nn.Parameter:
                    tensors[name].__class__ = CountedParameter


def _without_inference_mode(tensor: Tensor) -> Tensor:
    """A copy of an inference tensor as a normal one; of a parameter, a parameter."""
    with torch.inference_mode(False), torch.no_grad():
        copy = tensor.clone()
        return CountedParameter(copy, False) if isinstance(tensor, nn.Parameter) else copy


@dataclass(slots=True)
class Sources:
    """Tensors and modules of a network, and the tensors' versions when values were computed.

    holders, names: the dictionaries and keys under which `objects` are stored. tensors: those among
    them that values are computed from, by path. aliases: plain tensors that share memory and
    version with them (torch's calls on subclasses take longer), by path. Writes that torch does not
    count (through NumPy or DLPack) are not seen. A copy, and what a pickle holds, has the versions
    of its own tensors.
    """

    holders: list[dict[str, Any]]
    names: list[str]
    objects: list[Any]
    tensors: dict[str, Tensor]
    aliases: dict[str, Tensor] = field(init=False)
    versions: list[int] = field(init=False)
    buffers: list[Tensor] = field(init=False)  # setting their `.data` is not counted:
    addresses: list[int] = field(init=False)  # addresses are compared

    def __post_init__(self) -> None:
        for tensor in self.tensors.values():
            if type(tensor) is nn.Parameter:  # of a pickle
                tensor.__class__ = CountedParameter
        self.aliases = {path: tensor.detach() for path, tensor in self.tensors.items()}
        self.versions = list(map(_version, self.aliases.values()))
        self.buffers = [t for t in self.objects if isinstance(t, Tensor) and type(t) is not CountedParameter]
        self.addresses = list(map(_address, self.buffers))

    def __getstate__(self) -> tuple[Any, ...]:
        return self.holders, self.names, self.objects, self.tensors

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.holders, self.names, self.objects, self.tensors = state
        if any(tensor.is_inference() for tensor in self.tensors.values()):
            self.holders, self.tensors = [{}], {}  # torch counts no writes: as if changed
        self.__post_init__()

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
    """The tensors that a module has under these paths. None if one is computed on access (by
    `torch.nn.utils.parametrize`, say), so that changes cannot be detected."""
    count_writes(module)
    entries: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
    tensors: dict[str, Tensor] = {}
    for path in dict.fromkeys(paths):
        *steps, leaf = path.split(".")
        owner = module
        for step in steps:
            child = owner._modules[step]
            entries[id(owner), step] = (owner._modules, step, child)
            assert child is not None
            owner = child
        kinds = (vars(owner), owner._parameters, owner._buffers)
        holder: Any = next((kind for kind in kinds if leaf in kind), None)
        if holder is None or not isinstance(holder[leaf], Tensor):
            return None
        entries[id(owner), leaf] = (holder, leaf, holder[leaf])
        tensors[path] = holder[leaf]
    if any(tensor.is_inference() for tensor in tensors.values()):
        return None
    holders, names, objects = (
        (list(column) for column in zip(*entries.values(), strict=True)) if (entries) else ([], [], [])
    )
    return Sources(holders, names, objects, tensors)
