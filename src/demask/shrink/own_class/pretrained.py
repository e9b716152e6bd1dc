"""Models of transformers whose layers were cut alike: their config says the new sizes."""

from __future__ import annotations

import copy as copies
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from demask.errors import BadInput
from demask.graph.result.resize import numbers_of

# What configs call sizes, and counts of heads.
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
    """Have the config of a model with cut tensors say their sizes, and its modules those numbers
    that a model of this config has: one config after the other that has such tensors. Where the
    caller takes none, the model has its old ones again, and `save_pretrained` refuses from now on;
    nothing happens to other models.
    """
    config = getattr(model, "config", None)
    if config is None or not callable(getattr(model, REFUSE, None)):
        return
    old = copies.deepcopy(config)
    numbers = {path: numbers_of(module) for path, module in model.named_modules()}
    found = _config_of(model, old)
    if found is not None:
        vars(model).pop(REFUSE, None)  # of an earlier round
        _take(model, *found)
        yield
    vars(config).update(vars(old))
    for path, module in model.named_modules():
        vars(module).update(numbers[path])
    vars(model)[REFUSE] = _refuse


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise BadInput(
        "save_pretrained writes a config, and none says the sizes of this network: its layers were "
        "cut differently. Use demask.save(model, path) and demask.load(path, into=Model(config)), "
        "or mask as many heads and units in every layer"
    )


def _config_of(model: nn.Module, config: Any) -> tuple[nn.Module, Any] | None:
    """A config, and a model made from it, that has tensors of the model's shapes: found by changing
    one number after the other, each time the one that makes most shapes right."""
    fresh = _made(type(model), config)
    options = _options(config, _changes(fresh, model))
    best = _misfits(model, fresh)
    while fresh is not None and best > 0:
        tries = []
        for name, values in options.items():
            for value in values:
                other = copies.deepcopy(config)
                setattr(other, name, value)
                made = _made(type(model), other)
                tries.append((_misfits(model, made), len(tries), other, made))
        least, _, other, made = min(tries, default=(best, 0, None, None))
        if least >= best:
            return None
        best, config, fresh = least, other, made
    return None if fresh is None else (fresh, config)


def _misfits(model: nn.Module, other: nn.Module | None) -> int:
    """How many tensors of two models differ in shape. Buffers, which nobody prunes, count most."""
    if other is None:
        return 10**9
    total = 0
    for weight, kind in ((1, "named_parameters"), (10**6, "named_buffers")):
        mine, theirs = ({name: tuple(t.shape) for name, t in getattr(m, kind)()}
                        for m in (model, other))  # fmt: skip
        names = mine.keys() | theirs.keys()
        total += weight * sum(mine.get(name) != theirs.get(name) for name in names)
    return total


def _made(kind: type[nn.Module], config: Any) -> nn.Module | None:
    """A model of a config that takes no memory; None where there is none."""
    try:
        with torch.device("meta"):
            return kind(copies.deepcopy(config))
    except Exception:  # sizes that do not fit each other, in the words of any library
        return None


def _changes(fresh: nn.Module | None, model: nn.Module) -> set[tuple[int, int]]:
    """The sizes of parameters that differ in two models, in pairs."""
    new = {name: p.shape for name, p in model.named_parameters()}
    old = {} if fresh is None else {name: p.shape for name, p in fresh.named_parameters()}
    both = [(old[name], new[name]) for name in old.keys() & new.keys()]
    pairs = {pair for a, b in both if len(a) == len(b) for pair in zip(a, b, strict=True)}
    return {(a, b) for a, b in pairs if a != b}


def _options(config: Any, pairs: set[tuple[int, int]]) -> dict[str, list[int]]:
    """What numbers of a config could become: what axes of their size became; of heads, as large a
    share as of any axis."""
    found: dict[str, list[int]] = {}
    for name, value in vars(config).items():
        if name not in _SIZES + _HEADS or not isinstance(value, int | None):
            continue  # some list a number for each stage
        sizes = {b for a, b in pairs if value is None or a == value}
        if name in _HEADS and type(value) is int:
            sizes |= {value * b // a for a, b in pairs if value * b % a == 0}
        if sizes := sizes - {0, value}:
            found[name] = sorted(sizes)
    return found


def _take(model: nn.Module, fresh: nn.Module, config: Any) -> None:
    """Give a model the numbers of one that has the same tensors, and its config."""
    for name, value in vars(config).items():
        setattr(model.config, name, value)  # one object, which all modules share
    modules = dict(model.named_modules())
    for path, module in fresh.named_modules():
        own = modules.get(path)
        for name in numbers_of(own) if own is not None else ():
            if name in vars(module):
                setattr(own, name, vars(module)[name])
