"""Where a transformer keeps its heads, units and channels, and masks that zero some of them.

A family is described by names. Everything a mask writes into is seen through views of the model's
own parameters, whatever their layout: heads come first, then positions in the head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Family:
    """Names of a family's parts; `*` matches anything, mostly a layer's number.

    attentions: "prefix: q k v o", or "prefix: qkv o" where one layer makes all three. fused: how
    the rows of that layer are ordered: "3hd" (all queries first) or "h3d" (per head). feeds:
    "prefix: in out" or "prefix: gate up out". writers: modules and parameters that write into the
    residual stream, norms over it included. embeddings: look-up tables, or the convolution that
    makes patches. layer: the prefix of one layer.
    """

    attentions: tuple[str, ...]
    feeds: tuple[str, ...]
    writers: tuple[str, ...]
    embeddings: tuple[str, ...]
    layer: str
    fused: str = ""


@dataclass(frozen=True, slots=True)
class Attention:
    """Views of one attention's parameters.

    q, k, v: weights and biases, (heads, positions in the head, ...); k and v may have fewer heads,
    each shared by consecutive heads of q. o: (heads, positions, out). out: o's weight and bias.
    """

    name: str
    q: tuple[Tensor, ...]
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    o: Tensor
    out: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Feed:
    """Views of one feed-forward network's parameters, units first.

    rows: the weights that make the units, one matrix, or gate and up. biases: theirs. columns: the
    weight that reads the units. out: that weight and its bias.
    """

    name: str
    rows: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    columns: Tensor
    out: tuple[Tensor, ...]


def attentions(model: nn.Module, family: Family, heads: Callable[[str], int]) -> list[Attention]:
    """The attentions of a model in its order. heads: of the attention with that name."""
    parts = []
    for prefix, names in _matches(model, family.attentions):
        count = heads(prefix)
        *makers, o = (_parameters(model, f"{prefix}.{name}".lstrip(".")) for name in names)
        columns = _split(o[0].T, count)
        size = columns.shape[1]
        if len(makers) == 1:
            q, k, v = _fused(makers[0], family.fused, count)
        else:
            q, k, v = (tuple(_split(t, len(t) // size) for t in maker) for maker in makers)
        parts.append(Attention(prefix, q, k, v, columns, o))
    return parts


def feeds(model: nn.Module, family: Family) -> list[Feed]:
    """The feed-forward networks of a model, in its order."""
    parts = []
    for prefix, names in _matches(model, family.feeds):
        *makers, out = (_parameters(model, f"{prefix}.{name}".lstrip(".")) for name in names)
        rows = tuple(maker[0] for maker in makers)
        biases = tuple(t for maker in makers for t in maker[1:])
        parts.append(Feed(prefix, rows, biases, out[0].T, out))
    return parts


def _matches(model: nn.Module, patterns: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """The prefixes that a model has, with the names that follow them."""
    modules = [name for name, _ in model.named_modules()]
    for pattern in patterns:
        prefix, _, names = pattern.partition(":")
        yield from ((name, names.split()) for name in modules if fnmatchcase(name, prefix))


def _parameters(model: nn.Module, name: str) -> tuple[Tensor, ...]:
    """A layer's weight (out, ...) and its bias, if it has one; or a parameter, channels first."""
    named = dict(model.named_parameters(remove_duplicate=False))
    if name in named:
        return (named[name].detach().movedim(-1, 0),)
    if f"{name}_weight" in named:  # of nn.MultiheadAttention
        return named[f"{name}_weight"].detach(), named[f"{name}_bias"].detach()
    module = model.get_submodule(name)
    is_transposed = isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D"
    tensors = [p.detach() for _, p in module.named_parameters(recurse=False)]
    return tuple(p.movedim(-1, 0) if is_transposed else p for p in tensors)


def _split(value: Tensor, heads: int) -> Tensor:
    return value.unflatten(0, (heads, len(value) // heads))


def _fused(
    maker: tuple[Tensor, ...], order: str, heads: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    parts: list[tuple[Tensor, ...]] = []
    for k in range(3):
        if order == "h3d":
            parts.append(tuple(t.unflatten(0, (heads, 3, -1))[:, k] for t in maker))
        else:
            parts.append(tuple(t.unflatten(0, (3, heads, -1))[k] for t in maker))
    return parts[0], parts[1], parts[2]


# The masks. Each writes zeros into its model; `heads` as above.

Heads = Callable[[str], int]


def head(model: nn.Module, family: Family, heads: Heads) -> None:
    """Half of the heads have values of zero, other heads in every other layer."""
    for k, part in enumerate(attentions(model, family, heads)):
        for values in part.v:
            values[k % 2 :: 2] = 0


def head_constant(model: nn.Module, family: Family, heads: Heads) -> None:
    """Half of the heads have value weights of zero and keep their biases: a constant each."""
    for k, part in enumerate(attentions(model, family, heads)):
        for values in part.v:
            if values.ndim > 2:
                values[k % 2 :: 2] = 0


def head_output(model: nn.Module, family: Family, heads: Heads) -> None:
    """Half of the heads are not read by the output projection: all those of a shared key."""
    for k, part in enumerate(attentions(model, family, heads)):
        groups = _split(part.o, len(part.k[0]))
        groups[k % 2 :: 2] = 0


def partial(model: nn.Module, family: Family, heads: Heads) -> None:
    """Some positions of every head are zero: others, and another number, in every head.

    In queries and keys, positions half a head from each other are zero together, as rotary
    embeddings pair them.
    """
    for part in attentions(model, family, heads):
        for maker in (part.q, part.k):
            for h in range(len(maker[0])):
                pair = torch.arange(h % 2 + 1) + h
                half = maker[0].shape[1] // 2
                for values in maker:
                    values[h, pair % half] = 0
                    values[h, pair % half + half] = 0
        size = part.o.shape[1]
        for h in range(len(part.v[0])):
            for values in part.v:
                values[h, (torch.arange(h % 2 + 1) + 2 * h) % size] = 0
        for h in range(len(part.o)):
            part.o[h, (torch.arange(h % 3 + 1) + h + 4) % size] = 0


def unit(model: nn.Module, family: Family, heads: Heads) -> None:
    """Half of the units have weights of zero and keep their bias; of gated ones the gate or the
    other factor."""
    for k, part in enumerate(feeds(model, family)):
        if len(part.rows) == 1:
            part.rows[0][k % 2 :: 2] = 0
        else:
            part.rows[0][k % 2 :: 4] = 0
            part.rows[1][k % 2 + 2 :: 4] = 0


def channel(model: nn.Module, family: Family, heads: Heads) -> None:
    """A quarter of the residual stream's channels is zero in everything that writes into it."""
    for values in written(model, family.writers):
        values[1::4] = 0


def stream(model: nn.Module, family: Family, heads: Heads) -> None:
    """As `channel`, but norms keep their scales and shifts: they make something of zeros."""
    norms = {t.data_ptr() for t in written(model, ("*norm*", "*Norm*", "*ln_*"))}
    for values in written(model, family.writers):
        if values.data_ptr() not in norms:
            values[1::4] = 0


def embedding(model: nn.Module, family: Family, heads: Heads) -> None:
    """A quarter of the channels is zero in the embeddings, where other layers go on writing."""
    for values in written(model, family.embeddings):
        if values.ndim > 1:
            values[1::4] = 0


def layer(model: nn.Module, family: Family, heads: Heads) -> None:
    """One layer's attention and feed-forward network add nothing."""
    for part in (*attentions(model, family, heads), *feeds(model, family)):
        if re.match(re.escape(family.layer) + r"(\.|$)", part.name):
            for values in part.out:
                values.zero_()


def written(model: nn.Module, patterns: tuple[str, ...]) -> list[Tensor]:
    """The parameters of all modules, and parameters, of those names, channels first."""
    names = [n for n, _ in model.named_modules()] + [n for n, _ in model.named_parameters(remove_duplicate=False)]
    chosen = [n for n in names if any(fnmatchcase(n, pattern) for pattern in patterns)]
    return [values for name in chosen for values in _parameters(model, name)]


MASKS: dict[str, Callable[[nn.Module, Family, Heads], None]] = {
    mask.__name__: mask for mask in (head, head_constant, head_output, partial, unit, channel, stream, embedding, layer)
}


def removed(model: nn.Module, family: Family, heads: Heads, kind: str) -> int:
    """How many parameters of attentions and feed-forward networks a mask leaves without a use.

    Counted by hand, as a module would be written for what is left: the same number of positions in
    every head, that of the largest. Kinds that zero channels are not counted: 0.
    """
    if kind == "unit":
        return sum(_dead_units(part) for part in feeds(model, family))
    if kind in ("head", "head_constant", "head_output", "partial"):
        return sum(_dead_positions(part) for part in attentions(model, family, heads))
    return 0


def _dead_units(part: Feed) -> int:
    """Units of which all rows, or one of two factors without a bias, are zero."""
    dead = torch.stack([(rows == 0).flatten(1).all(1) for rows in part.rows]).any(0)
    count = int(dead.sum()) if len(part.rows) == 1 or not part.biases else 0
    return sum(t.numel() // len(t) * count for t in (*part.rows, *part.biases, part.columns))


def _dead_positions(part: Attention) -> int:
    """In heads whose values are all zero, or unread, everything; in others what is dead in all."""
    shared = len(part.q[0]) // len(part.k[0])
    values = _alive(part.v[0]) & _alive(part.o).unflatten(0, (-1, shared)).any(1)  # (k heads, d)
    keys = _alive(part.k[0]) & _alive(part.q[0]).unflatten(0, (-1, shared)).any(1)
    lives = values.any(1)
    alive_heads = int(lives.sum())
    widths = [int(alive[lives].sum(1).max()) if alive_heads else 0 for alive in (keys, values)]
    total = 0
    for tensors, width in (((*part.q, *part.k), widths[0]), ((*part.v, part.o), widths[1])):
        for t in tensors:
            count = alive_heads * len(t) // len(lives) * width
            total += t.numel() - t[0, 0].numel() * count
    return total


def _alive(values: Tensor) -> Tensor:
    """(heads, positions): is any weight not zero?"""
    return (values != 0).flatten(2).any(2)
