"""Tensors of a slim network into an instance of the class that it came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from torch import Tensor, nn

from demask.errors import BadInput
from demask.failures import public
from demask.graph.module_copy import structural_copy
from demask.graph.provenance import Cut
from demask.graph.result.resize import (
    assign,
    bake,
    has_numbers,
    module_at,
    numbers_of,
    renumber,
    tensors_of,
)
from demask.shrink.own_class.pretrained import fitting_configs

Numbers = Mapping[str, Mapping[str, Any]]


@public
def resize(
    model: nn.Module, state_dict: Mapping[str, Tensor], numbers: Numbers | None = None
) -> nn.Module:
    """A copy of `model` with the tensors of a slim network of its class, whatever their shapes.

    state_dict: of a network that `demask.demask` gave back in the model's own class, as
    `state_dict()` or a safetensors file has it. numbers: by path of a module, numbers that its code
    reads and shapes do not tell (`{"layers.0.attention": {"num_heads": 2}}`; those that demasking
    changed are `slim.demasked.numbers`). The numbers of torch's layers, and the config of
    transformers' models, follow by themselves. Raises BadInput where names differ, or where a
    number could be several.

    >>> import torch, demask
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    >>> state = {"0.weight": torch.zeros(3, 4), "0.bias": torch.zeros(3),
    ...          "1.weight": torch.zeros(2, 3), "1.bias": torch.zeros(2)}
    >>> demask.resize(net, state)
    Sequential(
      (0): Linear(in_features=4, out_features=3, bias=True)
      (1): Linear(in_features=3, out_features=2, bias=True)
    )
    """
    if not isinstance(model, nn.Module) or not isinstance(state_dict, Mapping):
        kinds = f"{type(model).__name__} and {type(state_dict).__name__}"
        raise BadInput(f"expected an nn.Module and its state dict, got {kinds}")
    copy = structural_copy(model, share=True)
    bake(copy)
    old = dict(tensors_of(copy))
    _check_names(old.keys(), copy.state_dict().keys(), state_dict.keys())
    cuts: dict[str, Cut] = {}
    made: dict[int, Tensor] = {}
    for name, tensor in state_dict.items():
        held = old.get(name)
        if held is not None and tuple(held.shape) != tuple(tensor.shape):
            cuts[name] = _cut(name, held, tensor)
        if id(tensor) not in made:
            grad = held is None or held.requires_grad or not isinstance(held, nn.Parameter)
            made[id(tensor)] = tensor.detach().clone()
            if held is None or isinstance(held, nn.Parameter):
                made[id(tensor)] = nn.Parameter(made[id(tensor)], grad)
        if not assign(copy, name, made[id(tensor)]):
            raise BadInput(f"the model has no place for {name!r}")
    _own_the_rest(copy, set(state_dict))
    for module in copy.modules():
        renumber(module)
    for _ in fitting_configs(copy):
        if _agrees(copy, numbers):
            return copy
    _set_numbers(copy, cuts, numbers)
    return copy


def _agrees(copy: nn.Module, numbers: Numbers | None) -> bool:
    """Do the modules have the numbers given?"""
    return all(
        _plain(getattr(module_at(copy, path), name, None)) == _plain(value)
        for path, values in (numbers or {}).items()
        for name, value in values.items()
    )


def _plain(value: Any) -> Any:
    """A number, or a row of them as files hold it."""
    return list(value) if isinstance(value, tuple) else value


def _check_names(known: Set[str], needed: Set[str], names: Set[str]) -> None:
    """Raise BadInput unless a state dict has all names needed, and no others than those known;
    biases may be new, and buffers that no state dict has may be there (files hold them)."""
    missing = sorted(needed - names)
    more = sorted(name for name in names - known if not name.endswith("bias"))
    if missing or more:
        raise BadInput(
            "expected the state dict of a slim network of this class, but it "
            + " and ".join(
                f"{verb} {', '.join(names[:3])}"
                for verb, names in (("lacks", missing), ("has", more))
                if names
            )
        )


def _cut(name: str, old: Tensor, new: Tensor) -> Cut:
    """A cut of which sizes alone are known."""
    if old.ndim != new.ndim or any(a < b for a, b in zip(old.shape, new.shape, strict=True)):
        shapes = f"{tuple(new.shape)} is not cut from {tuple(old.shape)}"
        raise BadInput(f"{name}: {shapes}; give a model as large as the one that was demasked")
    kept = tuple(None if a == b else tuple(range(b))
                 for a, b in zip(old.shape, new.shape, strict=True))  # fmt: skip
    return Cut(name, tuple(old.shape), kept)


def _own_the_rest(copy: nn.Module, done: set[str]) -> None:
    """Tensors that no state dict holds are copies, too."""
    for name, buffer in list(copy.named_buffers(remove_duplicate=False)):
        if name not in done:
            assign(copy, name, buffer.clone())


def _set_numbers(copy: nn.Module, cuts: Mapping[str, Cut], numbers: Numbers | None) -> None:
    """Set numbers that modules' own code reads: those given, or those that follow from shapes."""
    for path, values in (numbers or {}).items():
        module = module_at(copy, path)
        if module is None:
            raise BadInput(f"numbers: the model has no module {path!r}")
        for name, value in values.items():
            setattr(module, name, value)
    if numbers is not None:
        return
    for path, module in copy.named_modules():
        if has_numbers(module):
            continue
        for name, value in numbers_of(module).items():
            became = set(_became(path, value, cuts))
            if len(became) > 1:
                options = ", ".join(map(str, sorted(became)))
                raise BadInput(
                    f"{path or 'the model'}: shapes do not tell whether {name} = {value} became "
                    f"one of {options}; pass numbers=slim.demasked.numbers"
                )
            if became:
                setattr(module, name, became.pop())


def _became(path: str, value: Any, cuts: Mapping[str, Cut]) -> Iterator[int]:
    """What sizes equal to a number became in a module's own tensors and those of its layers."""
    for name, cut in cuts.items():
        holder = name.rpartition(".")[0]
        if path in (holder, holder.rpartition(".")[0]):
            for size, kept in zip(cut.shape, cut.kept, strict=True):
                if size == value:
                    yield size if kept is None else len(kept)
