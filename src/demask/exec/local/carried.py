"""Calls on parts, where the cut axes are carried: the op on parts, and rearranged values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from demask.compat.dispatch import OpOverload, base_name, overload_name, schema_of
from demask.exec.axes import COLUMNS, Window, strides
from demask.exec.local.call import LocalCall, LocalKind, Scratch, out_overload
from demask.ops import regions
from demask.ops.entry import Declined, op_name
from demask.ops.schema import fake

aten = torch.ops.aten
# Ops that return their first operand, possibly in another dtype or at another address.
_COPIES = {
    aten.clone,
    aten.contiguous,
    aten.alias,
    aten.detach,
    aten.to,
    aten._to_copy,
    aten.dropout,
    aten.feature_dropout,
    aten.alpha_dropout,
    aten.feature_alpha_dropout,
    aten.lift_fresh,
    aten.lift_fresh_copy,
}
_SHUFFLES = {aten.pixel_shuffle, aten.pixel_unshuffle, aten.channel_shuffle}
Bound = Mapping[str, Any]


def _relu(bound: Bound, into: Tensor) -> None:
    """relu is clamp_min at 0, which has an `out`."""
    aten.clamp_min.out(bound["self"], 0, out=into)


def _batch_norm(bound: Bound, into: Tensor) -> None:
    names = ("input", "weight", "bias", "running_mean", "running_var")
    unused = [into.new_empty(0) for _ in range(2)]
    aten.native_batch_norm.out(
        *(bound[n] for n in names),
        False,
        bound["momentum"],
        bound["eps"],
        out=into,
        save_mean=unused[0],
        save_invstd=unused[1],
    )


def _linear(bound: Bound, into: Tensor) -> None:
    """The product added to the bias, as torch computes it; `linear.out` adds the bias last."""
    x, weight, bias = (bound[name] for name in ("input", "weight", "bias"))
    if not (x.is_contiguous() and into.is_contiguous()):
        into.copy_(aten.linear.default(x, weight, bias))
        return
    x_matrix, into_matrix = x.view(-1, x.shape[-1]), into.view(-1, into.shape[-1])
    if bias is None:
        torch.mm(x_matrix, weight.t(), out=into_matrix)
    else:
        torch.addmm(bias, x_matrix, weight.t(), out=into_matrix)


def _matmul(bound: Bound, into: Tensor) -> None:
    """`matmul.out` folds rows and columns into one axis: it fails where `into` is a view."""
    x, other = bound["self"], bound["other"]
    if x.is_contiguous() and other.is_contiguous() and into.is_contiguous():
        aten.matmul.out(x, other, out=into)
    else:
        into.copy_(aten.matmul.default(x, other))


_WRITERS: dict[Any, Callable[[Bound, Tensor], None]] = {
    aten.relu.default: _relu,
    aten.batch_norm.default: _batch_norm,
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
}
_PRODUCTS = (_linear, _matmul)  # torch allocates the result where `into` is not contiguous


def _block_sizes(call: LocalCall) -> tuple[int, int] | Declined:
    """Block sizes of the output along rows and columns; 0: one block, the full axis."""
    sizes, name = [], op_name(call.node.target)
    for dim, axis in enumerate(call.axes):
        if axis is not None and "groups" in call.bound and len(call.relation.outs[0][axis]) > 1:
            return Declined(f"{name}: groups of channels have no parts yet")
        operand_sizes = {
            0 if regions.is_whole(call.relation, k, axis) else regions.carried_steps(call.relation, k, axis)[2]
            for k, cut in enumerate(call.cuts)
            if axis is not None and cut.rules[dim] is not None
        }
        if len(operand_sizes) > 1:
            return Declined(f"{name}: operands are cut at different positions")
        sizes.append(operand_sizes.pop() if operand_sizes else 1)
    return sizes[0], sizes[1]


def _rounded_to_blocks(call: LocalCall, blocks: tuple[int, int], window: Window) -> Window:
    pair = []
    for axis, size, (start, end) in zip(call.axes, blocks, window, strict=True):
        if axis is not None and not size:
            pair.append((0, call.shape[axis]))
        elif axis is None:
            pair.append((start, end))
        else:
            pair.append((start // size * size, -(-end // size) * size))
    return pair[0], pair[1]


@dataclass(frozen=True, slots=True, eq=False)
class LocalApply(LocalKind):
    """The op on parts, with size arguments replaced by those of the part.

    how: "copy", "write" (a function of this file), "out" (the op's overload), "inplace" (over a
    copy of its operand), "result" (torch allocates, the result is copied), "view" (nothing is
    allocated). target: the function or overload. count: multiply-adds of the full call.
    """

    call: LocalCall
    blocks: tuple[int, int]  # see `_block_sizes`
    how: str
    target: Any
    elementwise: bool
    count: int

    @staticmethod
    def of(call: LocalCall) -> LocalApply | Declined:
        blocks = _block_sizes(call)
        if isinstance(blocks, Declined):
            return blocks
        target: Any = call.node.target
        if not isinstance(target, OpOverload):
            return Declined(f"{op_name(target)}: no operator of torch's")
        how, chosen = _select_writer(call, target)
        pointwise = torch.Tag.pointwise in target.tags or how == "copy" or target in _WRITERS
        pointwise &= blocks in ((1, 1), (1, 0)) and chosen not in _PRODUCTS
        return LocalApply(call, blocks, how, chosen, pointwise, _count_macs(call))

    @property
    def pointwise(self) -> bool:
        return self.elementwise

    def computed_window(self, window: Window) -> Window:
        return _rounded_to_blocks(self.call, self.blocks, window)

    def run(self, values: list[Any], window: Window, into: Tensor, scratch: Scratch) -> None:
        if self.how == "copy":
            into.copy_(values[0])
            return
        arguments = self.call.arguments(values, **size_arguments(self.call, tuple(into.shape)))
        if self.how == "write":
            self.target(arguments, into)
            return
        if self.how == "inplace":
            into.copy_(values[0])
            arguments[self.call.relation.operands[0].name] = into
        args, kwargs = bind_arguments(self.target, arguments)
        if self.how == "out":
            self.target(*args, **kwargs, out=into)
            return
        result = self.target(*args, **kwargs)
        if self.how != "inplace":
            into.copy_(result)

    def allocated_bytes(self, window: Window) -> int:
        computed = self.computed_window(window)
        if self.how == "result" or (self.target in _PRODUCTS and not self._is_one_matrix(computed)):
            return self.call.bytes(computed)
        return 0

    def _is_one_matrix(self, window: Window) -> bool:
        """Whether a linear layer's rows are one matrix in the layout of parts."""
        axis, sizes = self.call.axes[COLUMNS], self.call.sizes(window)
        full = axis is None or sizes[axis] == self.call.shape[axis]
        contiguous = torch.empty(sizes, device="meta").stride()
        ours = strides(sizes, self.call.axes)
        return full and all(a == b for a, b, n in zip(contiguous, ours, sizes, strict=True) if n > 1)

    def macs(self, window: Window) -> int:
        return self.count * math.prod(self.call.sizes(window)) // max(math.prod(self.call.shape), 1)


def size_arguments(call: LocalCall, shape: tuple[int, ...]) -> dict[str, Any]:
    """The arguments of a call that are sizes or counts, for a part of this shape."""
    entry = call.relation.entry
    if entry.args is None:
        return {}
    local_arguments = entry.args(call.node, [list(shape)])  # type: ignore[arg-type]
    return {name: value for name, value in local_arguments.items() if isinstance(value, (list, int))}


def _select_writer(call: LocalCall, target: Any) -> tuple[str, Any]:
    """How a call writes into its output's memory (see `LocalApply.how`), and the target."""
    first = call.relation.operands[0].value if call.relation.operands else None
    if target.overloadpacket in _COPIES:
        return "copy", target
    if target in _WRITERS:
        return "write", _WRITERS[target]
    out = out_overload(target)
    # Image kernels write any `out` as if it had the memory format of their input.
    if out is not None and not call.relation.window:
        return "out", out
    inplace = _inplace_overload(target)
    nodes = [o.value for o in call.relation.operands if isinstance(o.value, torch.fx.Node)]
    if inplace is not None and nodes == [first]:
        value = fake(nodes[0])
        if tuple(value.shape) == call.shape and value.dtype == call.dtype:
            return "inplace", inplace
    aliases = [r.alias_info for r in schema_of(target).returns]
    return ("view" if aliases and aliases[0] is not None else "result"), target


def _inplace_overload(target: Any) -> Any:
    """The overload that writes over its first operand; None where torch generates it as a copy."""
    if target.namespace != "aten":
        return None
    overload = getattr(getattr(aten, f"{base_name(target)}_", None), overload_name(target), None)
    if overload is None or torch.Tag.generated in overload.tags:
        return None
    return overload if len(schema_of(overload).arguments) == len(schema_of(target).arguments) else None


def bind_arguments(target: Any, bound: Bound) -> tuple[list[Any], dict[str, Any]]:
    """All arguments of an op except `out`: positional ones, and keywords by name."""
    args = [bound[a.name] for a in schema_of(target).arguments if not a.kwarg_only and not a.is_out]
    keywords = {a.name: bound[a.name] for a in schema_of(target).arguments if a.kwarg_only and not a.is_out}
    return args, keywords


def _count_macs(call: LocalCall) -> int:
    """Multiply-adds of the full call, from the letters of its entry."""
    relation = call.relation
    if relation.entry.fill not in ("sum", "mix"):
        return 0
    output_letters = relation.letters(relation.outs[0])
    size = {k: n or 1 for k, n in relation.size.items()}

    def product(letters: frozenset[str]) -> int:
        return math.prod(size[letter] for letter in letters)

    if relation.entry.fill == "sum":
        return product(output_letters | relation.contracted)
    values = product(output_letters | relation.letters(relation.ins[relation.entry.main]))
    if not relation.contracted:
        return values
    # Attention: query times key, then weights times values.
    first, second = relation.factors
    return product(relation.letters(relation.ins[first]) | relation.letters(relation.ins[second])) + values


def is_rearranged(call: LocalCall) -> bool:
    """Whether a call is a view or a shuffle of its operand: the same values, in another order."""
    relation, target = call.relation, call.node.target
    if relation.entry.fill != "same" or len(relation.operands) != 1 or relation.moved or relation.window:
        return False
    if not isinstance(target, OpOverload):
        return False
    returns = schema_of(target).returns
    views = len(returns) == 1 and returns[0].alias_info is not None
    keeps_all = relation.letters(relation.ins[0]) <= relation.letters(relation.outs[0])
    return keeps_all and (views or target.overloadpacket in _SHUFFLES)


@dataclass(frozen=True, slots=True, eq=False)
class LocalRearrange(LocalKind):
    """A copy between two views with one axis per letter; it allocates nothing.

    before, after: the letters of operand and output; the letters that both share along rows or
    columns are merged into one, "#0" or "#1".
    """

    call: LocalCall
    blocks: tuple[int, int]
    before: tuple[str, ...]
    after: tuple[str, ...]

    @staticmethod
    def of(call: LocalCall) -> LocalKind | Declined:
        blocks = _block_sizes(call)
        if isinstance(blocks, Declined):
            return blocks
        ins, outs = list(call.relation.ins[0]), list(call.relation.outs[0])
        for dim, axis in enumerate(call.axes):
            operand_axis = call.cuts[0].axes[dim]
            if axis is not None and operand_axis is not None and blocks[dim]:
                common = regions.carried_steps(call.relation, 0, axis)[0]
                ins[operand_axis] = (f"#{dim}", *ins[operand_axis][common:])
                outs[axis] = (f"#{dim}", *outs[axis][common:])
        before, after = (tuple(a for axis in axes for a in axis) for axes in (ins, outs))
        return LocalRearrange(call, blocks, before, after)

    def computed_window(self, window: Window) -> Window:
        return _rounded_to_blocks(self.call, self.blocks, window)

    def run(self, values: list[Any], window: Window, into: Tensor, scratch: Scratch) -> None:
        size: dict[str, int] = {k: n or 1 for k, n in self.call.relation.size.items()}
        for dim, (start, end) in enumerate(self.computed_window(window)):
            size[f"#{dim}"] = (end - start) // max(self.blocks[dim], 1)
        x = values[0].view([size[a] for a in self.before])
        x = x.permute([self.before.index(a) for a in self.after if a in self.before])
        for k, letter in enumerate(self.after):
            x = x if letter in self.before else x.unsqueeze(k)
        into.view([size[a] for a in self.after]).copy_(x)
