"""Calls on parts, where the cut axes are carried: the op on parts, and values laid out anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from demask.compat.dispatch import OpOverload, base_name, overload_name, schema_of
from demask.ops import regions
from demask.ops.entry import Declined, op_name
from demask.traverse.axes import COLUMNS, Window, strides
from demask.traverse.local.call import LocalCall, LocalKind, Scratch, out_overload

aten = torch.ops.aten
# Ops that hand their first operand on, in another type or at another address at most.
_COPIES = {aten.clone, aten.contiguous, aten.alias, aten.detach, aten.to, aten._to_copy,
           aten.dropout, aten.feature_dropout, aten.lift_fresh, aten.lift_fresh_copy}  # fmt: skip
_SHUFFLES = {aten.pixel_shuffle, aten.pixel_unshuffle, aten.channel_shuffle}
Found = Mapping[str, Any]


def _relu(found: Found, into: Tensor) -> None:
    """relu is clamp_min at 0, which has an `out`."""
    aten.clamp_min.out(found["self"], 0, out=into)


def _batch_norm(found: Found, into: Tensor) -> None:
    names = ("input", "weight", "bias", "running_mean", "running_var")
    saved = [into.new_empty(0) for _ in range(2)]
    aten.native_batch_norm.out(
        *(found[n] for n in names), False, found["momentum"], found["eps"],
        out=into, save_mean=saved[0], save_invstd=saved[1],
    )  # fmt: skip


def _linear(found: Found, into: Tensor) -> None:
    """The bias under the product, as torch puts it: `linear.out` adds it behind."""
    x, weight, bias = (found[name] for name in ("input", "weight", "bias"))
    if not (x.is_contiguous() and into.is_contiguous()):
        into.copy_(aten.linear.default(x, weight, bias))
        return
    flat, made = x.view(-1, x.shape[-1]), into.view(-1, into.shape[-1])
    if bias is None:
        torch.mm(flat, weight.t(), out=made)
    else:
        torch.addmm(bias, flat, weight.t(), out=made)


def _matmul(found: Found, into: Tensor) -> None:
    """`matmul.out` folds rows and columns into one: it fails where a tile lies in a wider map."""
    x, other = found["self"], found["other"]
    if x.is_contiguous() and other.is_contiguous() and into.is_contiguous():
        aten.matmul.out(x, other, out=into)
    else:
        into.copy_(aten.matmul.default(x, other))


_WRITERS: dict[Any, Callable[[Found, Tensor], None]] = {
    aten.relu.default: _relu,
    aten.batch_norm.default: _batch_norm,
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
}
_PRODUCTS = (_linear, _matmul)  # torch allocates the result where it is not contiguous


@dataclass(frozen=True, slots=True)
class _Carried:
    """How many positions of the output, along rows and columns, belong together: a window is made
    in whole steps of them. 0: all."""

    tiles: tuple[int, int]

    def window(self, call: LocalCall, window: Window) -> Window:
        pair = []
        for axis, tile, (start, end) in zip(call.axes, self.tiles, window, strict=True):
            if axis is not None and not tile:
                pair.append((0, call.shape[axis]))
            elif axis is None or tile == 1:
                pair.append((start, end))
            else:
                pair.append((start // tile * tile, -(-end // tile) * tile))
        return pair[0], pair[1]


def _carried(call: LocalCall) -> _Carried | Declined:
    tiles, name = [], op_name(call.node.target)
    for dim, axis in enumerate(call.axes):
        if axis is not None and "groups" in call.found and len(call.relation.outs[0][axis]) > 1:
            return Declined(f"{name}: groups of channels have no parts yet")
        found = {
            0
            if regions.is_whole(call.relation, k, axis)
            else regions.steps(call.relation, k, axis)[2]
            for k, cut in enumerate(call.cuts)
            if axis is not None and cut.rules[dim] is not None
        }
        if len(found) > 1:
            return Declined(f"{name}: operands are cut at different positions")
        tiles.append(found.pop() if found else 1)
    return _Carried((tiles[0], tiles[1]))


@dataclass(frozen=True, slots=True, eq=False)
class Apply(LocalKind):
    """The op on parts, the sizes among its arguments made local.

    how: "copy", "write" (a function of ours), "out" (the op's own), "inplace" (over a copy of its
    operand), "result" (torch allocates, the result is copied), "view" (nothing is allocated).
    """

    call: LocalCall
    carried: _Carried
    how: str
    target: Any
    elementwise: bool
    count: int

    @staticmethod
    def of(call: LocalCall) -> Apply | Declined:
        carried = _carried(call)
        if isinstance(carried, Declined):
            return carried
        target: Any = call.node.target
        if not isinstance(target, OpOverload):
            return Declined(f"{op_name(target)}: no operator of torch's")
        how, found = _way(call, target)
        even = carried.tiles in ((1, 1), (1, 0))
        pointwise = torch.Tag.pointwise in target.tags or how == "copy" or target in _WRITERS
        pointwise &= even and found not in _PRODUCTS
        return Apply(call, carried, how, found, pointwise, _products(call))

    @property
    def pointwise(self) -> bool:  # type: ignore[override]
        return self.elementwise

    def made(self, window: Window) -> Window:
        return self.carried.window(self.call, window)

    def run(self, values: list[Any], window: Window, into: Tensor, scratch: Scratch) -> None:
        if self.how == "copy":
            into.copy_(values[0])
            return
        found = self.call.arguments(values, **self._sizes(tuple(into.shape)))
        if self.how == "write":
            self.target(found, into)
            return
        if self.how == "inplace":
            into.copy_(values[0])
            found[self.call.relation.operands[0].name] = into
        args, kwargs = spelled(self.target, found)
        if self.how == "out":
            self.target(*args, **kwargs, out=into)
            return
        result = self.target(*args, **kwargs)
        if self.how != "inplace":
            into.copy_(result)

    def _sizes(self, made: tuple[int, ...]) -> dict[str, Any]:
        """Arguments that hold sizes or counts; others (a scale) stay as they were."""
        entry = self.call.relation.entry
        if entry.args is None:
            return {}
        found = entry.args(self.call.node, [list(made)])  # type: ignore[arg-type]
        return {name: value for name, value in found.items() if isinstance(value, (list, int))}

    def beside(self, window: Window) -> int:
        made = self.made(window)
        product = self.target in _PRODUCTS
        if self.how == "result" or (product and not self._contiguous(made)):
            return self.call.bytes(made)
        return 0

    def _contiguous(self, window: Window) -> bool:
        """Are a linear layer's rows, in the layout of parts, one matrix?"""
        axis, sizes = self.call.axes[COLUMNS], self.call.sizes(window)
        full = axis is None or sizes[axis] == self.call.shape[axis]
        plain = torch.empty(sizes, device="meta").stride()
        ours = strides(sizes, self.call.axes)
        return full and all(a == b for a, b, n in zip(plain, ours, sizes, strict=True) if n > 1)

    def macs(self, window: Window) -> int:
        sizes, whole = self.call.sizes(window), self.call.shape
        return self.count * math.prod(sizes) // max(math.prod(whole), 1)


def _way(call: LocalCall, target: Any) -> tuple[str, Any]:
    """How a call writes into memory it is given."""
    first = call.relation.operands[0].value if call.relation.operands else None
    if target.overloadpacket in _COPIES:
        return "copy", target
    if target in _WRITERS:
        return "write", _WRITERS[target]
    found = out_overload(target)
    # Kernels of images write any `out` as if it were laid out as their input.
    if found is not None and not call.relation.window:
        return "out", found
    over = _inplace(target)
    tensors = [o for o in call.relation.operands if isinstance(o.value, torch.fx.Node)]
    if over is not None and len(tensors) == 1 and first is tensors[0].value and _alike(first, call):
        return "inplace", over
    aliases = [r.alias_info for r in schema_of(target).returns]
    return ("view" if aliases and aliases[0] is not None else "result"), target


def _inplace(target: Any) -> Any:
    """The overload that writes over its first operand, if it is no copy behind the scenes."""
    if target.namespace != "aten":
        return None
    over = getattr(getattr(aten, f"{base_name(target)}_", None), overload_name(target), None)
    if over is None or torch.Tag.generated in over.tags:
        return None
    return over if len(schema_of(over).arguments) == len(schema_of(target).arguments) else None


def _alike(node: Any, call: LocalCall) -> bool:
    value = node.meta["val"]
    return tuple(value.shape) == call.shape and value.dtype == call.dtype


def spelled(target: Any, found: Found) -> tuple[list[Any], dict[str, Any]]:
    """All arguments of an op but its `out`, by position and by keyword."""
    args = [found[a.name] for a in schema_of(target).arguments if not a.kwarg_only and not a.is_out]
    more = {
        a.name: found[a.name] for a in schema_of(target).arguments if a.kwarg_only and not a.is_out
    }
    return args, more


def _products(call: LocalCall) -> int:
    """Multiply-adds of the whole call, read off the letters of its line."""
    relation = call.relation
    if relation.entry.fill not in ("sum", "mix"):
        return 0
    made = relation.letters(relation.outs[0])
    size = {k: n or 1 for k, n in relation.size.items()}

    def product(letters: frozenset[str]) -> int:
        return math.prod(size[letter] for letter in letters)

    if relation.entry.fill == "sum":
        return product(made | relation.contracted)
    values = product(made | relation.letters(relation.ins[relation.entry.main]))
    if not relation.contracted:
        return values
    # Attention: the products that make the weights, then those of the weights with the values.
    first, second = relation.factors
    return (
        product(relation.letters(relation.ins[first]) | relation.letters(relation.ins[second]))
        + values
    )


def is_rearranged(call: LocalCall) -> bool:
    """Is a call a view of its operand, or a shuffle: values that stood there, and no other?"""
    relation, target = call.relation, call.node.target
    if (
        relation.entry.fill != "same"
        or len(relation.operands) != 1
        or relation.moved
        or relation.window
    ):
        return False
    if not isinstance(target, OpOverload):
        return False
    returns = schema_of(target).returns
    views = len(returns) == 1 and returns[0].alias_info is not None
    kept = relation.letters(relation.ins[0]) <= relation.letters(relation.outs[0])
    return kept and (views or target.overloadpacket in _SHUFFLES)


@dataclass(frozen=True, slots=True, eq=False)
class Rearrange(LocalKind):
    """A copy between two views, each with one axis per letter: no memory but the output's.

    before, after: the letters of each, those along rows and columns that both share merged into
    one named after the dimension.
    """

    call: LocalCall
    carried: _Carried
    before: tuple[str, ...]
    after: tuple[str, ...]

    @staticmethod
    def of(call: LocalCall) -> LocalKind | Declined:
        carried = _carried(call)
        if isinstance(carried, Declined):
            return carried
        ins, outs = list(call.relation.ins[0]), list(call.relation.outs[0])
        for dim, axis in enumerate(call.axes):
            at = call.cuts[0].axes[dim]
            if axis is not None and at is not None and carried.tiles[dim]:
                common = regions.steps(call.relation, 0, axis)[0]
                ins[at] = (f"#{dim}", *ins[at][common:])
                outs[axis] = (f"#{dim}", *outs[axis][common:])
        before, after = (tuple(a for axis in axes for a in axis) for axes in (ins, outs))
        return Rearrange(call, carried, before, after)

    def made(self, window: Window) -> Window:
        return self.carried.window(self.call, window)

    def run(self, values: list[Any], window: Window, into: Tensor, scratch: Scratch) -> None:
        size: dict[str, int] = {k: n or 1 for k, n in self.call.relation.size.items()}
        for dim, (start, end) in enumerate(self.made(window)):
            size[f"#{dim}"] = (end - start) // max(self.carried.tiles[dim], 1)
        x = values[0].view([size[a] for a in self.before])
        x = x.permute([self.before.index(a) for a in self.after if a in self.before])
        for k, letter in enumerate(self.after):
            x = x if letter in self.before else x.unsqueeze(k)
        into.view([size[a] for a in self.after]).copy_(x)


__all__ = ["Apply", "Rearrange", "is_rearranged", "spelled"]
