"""Configs of models of transformers that describe the sizes of their tensors."""

from __future__ import annotations

import copy as copies
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from demask.graph.result.resize import numbers_of

SAVE = "save_pretrained"
# Numbers of configs that are no sizes; sizes that a config may leave open; numbers of heads.
_NO_SIZE = re.compile(r"^_|(_id|_idx|_index|_ratio)$")
_OPEN_SIZE = re.compile("inner|dim$|_size$")
HEADS = re.compile("head|group|kv")
Place = tuple[Any, ...]  # of a number in a config: names of attributes, and the index in a list


def fitting_configs(model: nn.Module) -> Iterator[None]:
    """Set the config of a model with cut tensors to its sizes, and the numbers of its modules to
    those of a model with this config; yields after each config with such tensors.

    If the caller accepts none, the model has its old config and numbers again.
    """
    config = getattr(model, "config", None)
    if config is None or not callable(getattr(type(model), SAVE, None)):
        return
    old = copies.deepcopy(config)
    numbers = {path: numbers_of(module) for path, module in model.named_modules()}
    fitting = find_config(model, old)
    if fitting is not None:
        copy_numbers(model, *fitting)
        yield
    _assign_config(config, old)
    for path, module in model.named_modules():
        vars(module).update(numbers[path])


def fit_config(network: nn.Module, is_same: Callable[[], bool]) -> None:
    """Fit the config of a network of which modules were replaced, if it has one. is_same: whether
    the network computes what it did, with the numbers of a config."""
    for _ in fitting_configs(network):
        if is_same():
            return


def is_never_written(model: Any, name: str) -> bool:
    """Whether the class computes a tensor itself, which is in no file."""
    return name in (getattr(model, "_keys_to_ignore_on_save", None) or ())


def find_config(model: nn.Module, config: Any) -> tuple[nn.Module, Any] | None:
    """A model and its config with tensors of the model's shapes, or None. The search changes one
    number after the other, each time the one that corrects most shapes."""
    original, config = config, _with_width_of_heads(config)
    fresh = first = try_config(model, config)
    options = _options(config, _changed_sizes(fresh, model))
    best = _count_misfits(model, fresh)
    while fresh is not None and best > 0:
        tries = []
        for place, values in options.items():
            for value in values:
                other = copies.deepcopy(config)
                _set_number(other, place, value)
                candidate = try_config(model, other)
                tries.append((_count_misfits(model, candidate), len(tries), other, candidate))
        least, _, other, candidate = min(tries, default=(best, 0, None, None))
        if least >= best:
            return None
        best, config, fresh = least, other, candidate
    plain = copies.deepcopy(config)
    for place, part in _nested_configs(original):
        if "head_dim" not in vars(part):
            vars(dict(_nested_configs(plain))[place]).pop("head_dim", None)
    if plain.to_dict() != config.to_dict():
        candidate = try_config(model, plain)
        if _count_misfits(model, candidate) == 0:
            config, fresh = plain, candidate
    if fresh is None or first is None or _computes_otherwise(model, fresh, first):
        return None
    return fresh, config


def _computes_otherwise(model: nn.Module, fresh: nn.Module, first: nn.Module) -> bool:
    """Whether a class derives from a config what the model does not have: reals, such as the scale
    of attention, and buffers that are in no file. first: the model of the config before."""
    modules, before = dict(model.named_modules()), dict(first.named_modules())
    for path, module in fresh.named_modules():
        own, old = vars(modules.get(path, module)), vars(before.get(path, module))
        if any(
            type(value) is float and value != old.get(name) and value != own.get(name)
            for name, value in vars(module).items()
        ):
            return True
    written, shapes = fresh.state_dict(), {n: t.shape for n, t in first.named_buffers()}
    return any(
        shapes.get(name) != buffer.shape
        for name, buffer in fresh.named_buffers()
        if name not in written or is_never_written(fresh, name)
    )


def _nested_configs(config: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """A config and those in it, as of the encoders of images and of texts, by place."""
    yield place, config
    for name, value in vars(config).items():
        if _is_config(value):
            yield from _nested_configs(value, (*place, name))


def _is_config(value: Any) -> bool:
    return callable(getattr(value, "to_diff_dict", None)) and not isinstance(value, type)


def _with_width_of_heads(config: Any) -> Any:
    """A config that says how wide heads are: many derive it from the width and the number of heads,
    which no longer holds where heads were removed."""
    other = copies.deepcopy(config)
    for _, part in _nested_configs(other):
        names = ("hidden_size", "num_attention_heads", "head_dim")
        match [getattr(part, name, None) for name in names]:
            case [int(width), int(heads), None] if heads and width % heads == 0:
                part.head_dim = width // heads
    return other


def _set_number(config: Any, place: Place, value: int) -> None:
    """Set a number of a config, in place."""
    name, *rest = place
    if not rest:
        setattr(config, name, value)
    elif isinstance(rest[0], int):
        values = list(getattr(config, name))
        values[rest[0]] = value
        vars(config)[name] = type(getattr(config, name))(values)
    else:
        _set_number(getattr(config, name), (*rest,), value)


def _assign_config(config: Any, other: Any) -> None:
    """Set a config, and those in it, to the values of another, in place: modules share them."""
    for name in vars(config).keys() - vars(other).keys():
        del vars(config)[name]
    for name, value in vars(other).items():
        if _is_config(value) and _is_config(vars(config).get(name)):
            _assign_config(vars(config)[name], value)
        else:
            vars(config)[name] = value


def _count_misfits(model: nn.Module, other: nn.Module | None) -> int:
    """The number of tensors that differ in shape; buffers, which are not pruned, count most."""
    if other is None:
        return 10**9
    total = 0
    for weight, kind in ((1, "named_parameters"), (10**6, "named_buffers")):
        mine, theirs = ({name: tuple(t.shape) for name, t in getattr(m, kind)()} for m in (model, other))
        names = mine.keys() | theirs.keys()
        total += weight * sum(mine.get(name) != theirs.get(name) for name in names)
    return total


def build_on_meta(model: nn.Module, kind: Any, written: Mapping[str, Any]) -> nn.Module:
    """A model of the same class and a config as it is in a file, without memory for its tensors.
    kind: the class of the config."""
    with torch.device("meta"):
        return type(model)(kind.from_dict(dict(written)))


def try_config(model: nn.Module, config: Any) -> nn.Module | None:
    """A model of the same class and a config on the meta device; None if there is none."""
    try:
        return build_on_meta(model, type(config), config.to_dict())
    except Exception:  # sizes that do not fit each other, in the words of any library
        return None


def _changed_sizes(fresh: nn.Module | None, model: nn.Module) -> set[tuple[int, int]]:
    """The sizes of parameters that differ in two models, in pairs."""
    new = {name: p.shape for name, p in model.named_parameters()}
    old = {} if fresh is None else {name: p.shape for name, p in fresh.named_parameters()}
    both = [(old[name], new[name]) for name in old.keys() & new.keys()]
    pairs = {pair for a, b in both if len(a) == len(b) for pair in zip(a, b, strict=True)}
    return {(a, b) for a, b in pairs if a != b}


def _options(config: Any, pairs: set[tuple[int, int]]) -> dict[Place, list[int]]:
    """Possible values of numbers of a config: those that axes of their size became; for heads, also
    the same share as of any axis."""
    options: dict[Place, list[int]] = {}
    for part, holder in _nested_configs(config):
        for name, value in vars(holder).items():
            if _NO_SIZE.search(name):
                continue
            rows: list[tuple[Place, Any]] = [((*part, name), value)]
            if isinstance(value, list | tuple):
                rows = [((*part, name, k), number) for k, number in enumerate(value)]
            for place, number in rows:
                if type(number) is int:
                    sizes = {b for a, b in pairs if a == number}
                elif number is None and _OPEN_SIZE.search(name):
                    sizes = {b for _, b in pairs}
                else:
                    continue
                if number and HEADS.search(name):
                    sizes |= {number * b // a for a, b in pairs if number * b % a == 0}
                if sizes := sizes - {0, number}:
                    options[place] = sorted(sizes)
    return options


def find_config_with_room(model: nn.Module, config: Any) -> Any:
    """The smallest config with room for the tensors of a model and as many heads as the original
    has.

    config: the original, with room for all tensors. The search makes one number after the other as
    small as it can be.
    """
    fresh = try_config(model, config)
    for place, values in _options(config, _changed_sizes(fresh, model)).items():
        name = next(part for part in reversed(place) if isinstance(part, str))
        for value in () if HEADS.search(name) and not name.endswith("dim") else values:
            smaller = copies.deepcopy(config)
            _set_number(smaller, place, value)
            candidate = try_config(model, smaller)
            if fresh is not None and _has_room(candidate, model, fresh):
                config, fresh = smaller, candidate
                break
    return config


def _has_room(fresh: nn.Module | None, model: nn.Module, most: nn.Module) -> bool:
    """Whether the tensors of a model are at least as large as another's, and at most as large as
    those of a third, of which some are larger."""
    if fresh is None:
        return False
    own, least, full = ({name: tuple(t.shape) for name, t in m.state_dict().items()} for m in (fresh, model, most))
    if not own.keys() == least.keys() == full.keys() or own == full:
        return False
    return all(
        len(shape) == len(least[name]) == len(full[name])
        and all(a <= n <= b for a, n, b in zip(least[name], shape, full[name], strict=True))
        for name, shape in own.items()
    )


def copy_numbers(model: Any, fresh: nn.Module, config: Any) -> None:
    """Copy to a model the numbers of one with the same tensors, and its config."""
    _assign_config(model.config, config)
    modules = dict(model.named_modules())
    for path, module in fresh.named_modules():
        own = modules.get(path)
        for name in numbers_of(own) if own is not None else ():
            if name in vars(module):
                setattr(own, name, vars(module)[name])
