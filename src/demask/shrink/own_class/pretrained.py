"""Models of transformers whose layers were cut alike: a config with the new sizes."""

from __future__ import annotations

import copy as copies
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from demask.errors import BadInput
from demask.graph.result.resize import numbers_of

# Attributes of configs with sizes, and with counts of heads.
_SIZES = (
    "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "d_ff",
    "hidden_dim", "hidden_size", "n_embd", "dim", "d_model", "vocab_size", "embedding_size",
    "word_embed_proj_dim",
)  # fmt: skip
_HEADS = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "n_head", "num_heads", "n_heads",
    "encoder_attention_heads", "decoder_attention_heads", "d_kv",
)  # fmt: skip
REFUSE = "save_pretrained"


def fitting_configs(model: nn.Module) -> Iterator[None]:
    """Set the config of a model with cut tensors to its sizes, and the numbers of its modules to
    those of a model with this config; yields after each config with such tensors.

    If the caller accepts none, the model has its old numbers again, and `save_pretrained` raises
    BadInput from now on; other models are not affected.
    """
    config = getattr(model, "config", None)
    if config is None or not callable(getattr(model, REFUSE, None)):
        return
    old = copies.deepcopy(config)
    numbers = {path: numbers_of(module) for path, module in model.named_modules()}
    fitting = _find_config(model, old)
    if fitting is not None:
        vars(model).pop(REFUSE, None)  # of an earlier round
        _copy_numbers(model, *fitting)
        yield
    vars(config).update(vars(old))
    for path, module in model.named_modules():
        vars(module).update(numbers[path])
    vars(model)[REFUSE] = _refuse


def fit_config(network: nn.Module, is_same: Callable[[], bool]) -> None:
    """Fit the config of a network of which modules were replaced, if it has one. is_same: whether
    the network computes what it did, with the numbers of a config."""
    for _ in fitting_configs(network):
        if is_same():
            return


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise BadInput(
        "save_pretrained writes a config, and no config has the sizes of this network: its layers "
        "were cut differently. Use demask.save(model, path) and "
        "demask.load(path, into=Model(config)), "
        "or mask as many heads and units in every layer"
    )


def _find_config(model: nn.Module, config: Any) -> tuple[nn.Module, Any] | None:
    """A model and its config with tensors of the model's shapes, or None. The search changes one
    number after the other, each time the one that corrects most shapes."""
    original_names, config = vars(config), _with_width_of_heads(config)
    fresh = _build_on_meta(type(model), config)
    options = _options(config, _changed_sizes(fresh, model))
    best = _count_misfits(model, fresh)
    while fresh is not None and best > 0:
        tries = []
        for name, values in options.items():
            for value in values:
                other = copies.deepcopy(config)
                setattr(other, name, value)
                candidate = _build_on_meta(type(model), other)
                tries.append((_count_misfits(model, candidate), len(tries), other, candidate))
        least, _, other, candidate = min(tries, default=(best, 0, None, None))
        if least >= best:
            return None
        best, config, fresh = least, other, candidate
    if (
        fresh is not None
        and "head_dim" not in original_names
        and _count_misfits(
            model, plain := _build_on_meta(type(model), _without(config, "head_dim"))
        )
        == 0
    ):
        config, fresh = _without(config, "head_dim"), plain
    return None if fresh is None else (fresh, config)


def _with_width_of_heads(config: Any) -> Any:
    """A config that says how wide heads are: many derive it from the width and the number of heads,
    which no longer holds where heads were removed."""
    width, heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
    if getattr(config, "head_dim", None) is not None or type(width) is not int:
        return config
    other = copies.deepcopy(config)
    if type(heads) is int and heads and width % heads == 0:
        other.head_dim = width // heads
    return other


def _without(config: Any, name: str) -> Any:
    other = copies.deepcopy(config)
    vars(other).pop(name, None)
    return other


def _count_misfits(model: nn.Module, other: nn.Module | None) -> int:
    """The number of tensors that differ in shape; buffers, which are not pruned, count most."""
    if other is None:
        return 10**9
    total = 0
    for weight, kind in ((1, "named_parameters"), (10**6, "named_buffers")):
        mine, theirs = ({name: tuple(t.shape) for name, t in getattr(m, kind)()}
                        for m in (model, other))  # fmt: skip
        names = mine.keys() | theirs.keys()
        total += weight * sum(mine.get(name) != theirs.get(name) for name in names)
    return total


def _build_on_meta(kind: type[nn.Module], config: Any) -> nn.Module | None:
    """A model of a config, without memory for its tensors; None if there is none."""
    try:
        with torch.device("meta"):
            return kind(type(config).from_dict(config.to_dict()))  # which checks it as a file's
    except Exception:  # sizes that do not fit each other, in the words of any library
        return None


def _changed_sizes(fresh: nn.Module | None, model: nn.Module) -> set[tuple[int, int]]:
    """The sizes of parameters that differ in two models, in pairs."""
    new = {name: p.shape for name, p in model.named_parameters()}
    old = {} if fresh is None else {name: p.shape for name, p in fresh.named_parameters()}
    both = [(old[name], new[name]) for name in old.keys() & new.keys()]
    pairs = {pair for a, b in both if len(a) == len(b) for pair in zip(a, b, strict=True)}
    return {(a, b) for a, b in pairs if a != b}


def _options(config: Any, pairs: set[tuple[int, int]]) -> dict[str, list[int]]:
    """Possible values of numbers of a config: those that axes of their size became; for heads, also
    the same share as of any axis."""
    options: dict[str, list[int]] = {}
    for name, value in vars(config).items():
        if name not in _SIZES + _HEADS or not isinstance(value, int | None):
            continue  # some configs list a number per stage
        sizes = {b for a, b in pairs if value is None or a == value}
        if name in _HEADS and type(value) is int:
            sizes |= {value * b // a for a, b in pairs if value * b % a == 0}
        if sizes := sizes - {0, value}:
            options[name] = sorted(sizes)
    return options


def _copy_numbers(model: nn.Module, fresh: nn.Module, config: Any) -> None:
    """Copy to a model the numbers of one with the same tensors, and its config."""
    for name, value in vars(config).items():
        setattr(model.config, name, value)  # one object, which all modules share
    modules = dict(model.named_modules())
    for path, module in fresh.named_modules():
        own = modules.get(path)
        for name in numbers_of(own) if own is not None else ():
            if name in vars(module):
                setattr(own, name, vars(module)[name])
