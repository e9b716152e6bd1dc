"""Calls of ATen ops as steps of a segment: what each computes, on values of which kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from demask.graph.editor import GraphEditor
from demask.graph.queries import input_dependent
from demask.ops import schema
from demask.ops.activations import Act, by_op
from demask.ops.schema import same_size
from demask.ops.traits import IDENTITIES, SQUEEZES
from demask.sparse.segment_program import (
    Add,
    Cat,
    ConvStep,
    Flat,
    LinearStep,
    Map,
    MeanStep,
    PoolStep,
    SparseWeight,
    Step,
)

aten = torch.ops.aten
NONE = SparseWeight((0, 0, 0), (0, 0, 0), (0, 0, 0))  # until a segment has a place for it


@dataclass(frozen=True, slots=True)
class MatchedCall:
    """A call that a segment can take over.

    reads: the values it reads; kind, makes: what they and its own value are taken for ("" until
    that is known: a call on each number by itself fits any). step: what it does, with values and
    weights left open; None for what it reads, as it is. weight, bias: of a layer, nodes that read
    constants.
    """

    node: fx.Node
    reads: tuple[fx.Node, ...]
    kind: str
    makes: str
    step: Step | None
    weight: fx.Node | None = None
    bias: fx.Node | None = None

    @property
    def is_layer(self) -> bool:
        return self.weight is not None

    @property
    def is_pointwise(self) -> bool:
        return isinstance(self.step, (Map, Add))

    @property
    def act(self) -> Act | None:
        """The activation that it is, and nothing else."""
        return self.step.act if isinstance(self.step, Map) else None


def calls_of(editor: GraphEditor, dtype: torch.dtype) -> dict[fx.Node, MatchedCall]:
    """The calls on values of this dtype, on the CPU, that a segment could take over, in order."""
    live, found = input_dependent(editor.graph), {}
    rules = {**_RULES, **dict.fromkeys(by_op(), _activation)}
    for node in editor.graph.nodes:
        rule = rules.get(node.target) if node.op == "call_function" and node in live else None
        if rule is None or not _fits(node, dtype):
            continue
        call = rule(editor, node, schema.arguments(node))
        if call is not None and all(_fits(source, dtype) for source in call.reads):
            found[node] = call
    return _with_kinds(found)


def matrix(call: MatchedCall, weight: Tensor) -> Tensor:
    """The weight of a layer as a matrix [out, in / groups · kernel]."""
    if not isinstance(call.step, ConvStep) or not call.step.transposed:
        return weight.flatten(1)
    inner, outer, *kernel = weight.shape
    groups = call.step.groups
    parts = weight.reshape(groups, inner // groups, outer, *kernel).transpose(1, 2)
    return parts.reshape(groups * outer, -1)


def _fits(node: fx.Node, dtype: torch.dtype) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return value.dtype is dtype and value.device.type == "cpu"


def _with_kinds(found: Mapping[fx.Node, MatchedCall]) -> dict[fx.Node, MatchedCall]:
    """The calls with the kinds of their values: as they are made, else as they are read, else by
    their rank."""
    wanted: dict[fx.Node, str] = {}
    for node, call in reversed(list(found.items())):
        kind = call.kind or next((wanted[u] for u in node.users if u in wanted), "")
        if kind:
            wanted[node] = kind
    made: dict[fx.Node, MatchedCall] = {}
    for node, call in found.items():
        if not call.kind:
            kinds = [made[source].makes for source in call.reads if source in made]
            kind = next(iter(kinds), wanted.get(node, ""))
            kind = kind or ("image" if node.meta["val"].ndim == 4 else "tokens")
            if not _has_rank(node, kind) or not _goes_along(call, node, kind):
                continue
            call = replace(call, kind=kind, makes=kind)
        made[node] = call
    return made


def _has_rank(node: fx.Node, kind: str) -> bool:
    rank = node.meta["val"].ndim
    return rank > 0 if kind == "tokens" else rank == {"image": 4, "signal": 3}[kind]


def _goes_along(call: MatchedCall, node: fx.Node, kind: str) -> bool:
    """Are values joined along their channels?"""
    if not isinstance(call.step, Cat):
        return True
    rank = node.meta["val"].ndim
    return schema.arguments(node)["dim"] % rank == (rank - 1 if kind == "tokens" else 1)


# ---------------------------------------------------------------------------------------- layers

Found = Mapping[str, Any]
Rule = Callable[[GraphEditor, fx.Node, Found], "MatchedCall | None"]


def _convolution(editor: GraphEditor, node: fx.Node, found: Found) -> MatchedCall | None:
    weight = _constants(editor, found)
    if weight is None or node.meta["val"].ndim != weight.ndim:
        return None  # computed weights, or an image without a batch
    axes = weight.ndim - 2
    stride, dilation = (_spread(found[key], axes) for key in ("stride", "dilation"))
    kernel = tuple(weight.shape[2:])
    pads = _padding(found["padding"], kernel, dilation, axes)
    if stride is None or dilation is None or pads is None:
        return None
    window = _images(kernel, stride, pads, dilation)
    step = ConvStep(0, NONE, None, weight.shape[0], **window, groups=found["groups"])
    return _layer(node, found, "signal" if axes == 1 else "image", step)


def _transposed(editor: GraphEditor, node: fx.Node, found: Found) -> MatchedCall | None:
    weight = _constants(editor, found)
    if weight is None or node.meta["val"].ndim != weight.ndim:
        return None
    axes = weight.ndim - 2
    numbers = [_spread(found[key], axes) for key in ("stride", "dilation", "padding",
                                                     "output_padding")]  # fmt: skip
    if any(n is None for n in numbers):
        return None
    stride, dilation, before, more = numbers
    pads = tuple((a, a - b) for a, b in zip(before, more, strict=True))  # type: ignore[arg-type]
    if any(behind < 0 for _, behind in pads):
        return None  # it makes zeros behind what it computes
    out, kernel = weight.shape[1] * found["groups"], tuple(weight.shape[2:])
    window = _images(kernel, stride, pads, dilation)
    step = ConvStep(0, NONE, None, out, **window, groups=found["groups"], transposed=True)
    return _layer(node, found, "signal" if axes == 1 else "image", step)


def _images(kernel: Any, stride: Any, pads: Any, dilation: Any) -> dict[str, Any]:
    """Geometry along height and width; a signal is an image of one row."""
    found = {"kernel": kernel, "stride": stride, "padding": pads, "dilation": dilation}
    if len(kernel) == 2:
        return found
    line = {"kernel": 1, "stride": 1, "padding": (0, 0), "dilation": 1}
    return {key: (line[key], *value) for key, value in found.items()}


def _linear(editor: GraphEditor, node: fx.Node, found: Found) -> MatchedCall | None:
    weight = _constants(editor, found)
    if weight is None or weight.ndim != 2:
        return None
    return _layer(node, found, "tokens", LinearStep(0, NONE, None, weight.shape[0]))


def _layer(node: fx.Node, found: Found, kind: str, step: Step) -> MatchedCall | None:
    made = MatchedCall(node, (found["input"],), kind, kind, step, found["weight"], found["bias"])
    return made if isinstance(found["input"], fx.Node) else None


def _constants(editor: GraphEditor, found: Found) -> Tensor | None:
    """The weight of a layer, if it and the bias are constants."""
    weight, bias = editor.tensor(found["weight"]), editor.tensor(found["bias"])
    if weight is None or (found["bias"] is not None and bias is None) or not weight.numel():
        return None
    alike = bias is None or bias.dtype is weight.dtype
    return weight if alike and weight.layout is torch.strided else None


def _spread(value: Any, count: int) -> tuple[int, ...] | None:
    """One number per axis; None where one is known only at run time."""
    numbers = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not all(type(n) is int for n in numbers):
        return None
    return numbers * count if len(numbers) == 1 else numbers


def _padding(value: Any, kernel: Sequence[int], dilation: Any, axes: int) -> Any:
    """Lines before and behind each axis, of numbers or "same" and "valid"."""
    if value == "valid":
        return ((0, 0),) * axes
    if value == "same":
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((n // 2, n - n // 2) for n in reach)
    numbers = _spread(value, axes)
    return None if numbers is None else tuple((n, n) for n in numbers)


# ----------------------------------------------------------------------- what is between layers


def _activation(editor: GraphEditor, node: fx.Node, found: Found) -> MatchedCall | None:
    for activation, op in by_op()[node.target]:
        numbers = op.read(found.__getitem__)
        if numbers is not None:
            x = next(iter(found.values()))  # an op's first argument
            return MatchedCall(node, (x,), "", "", Map(0, (activation.name, numbers)))
    return None


def _same(editor: GraphEditor, node: fx.Node, found: Found) -> MatchedCall | None:
    """The same numbers, in memory of their own or not."""
    x = found["self"]
    return MatchedCall(node, (x,), "", "", None) if _alike(node, x) else None


def _sum(editor: GraphEditor, node: fx.Node, found: Found) -> MatchedCall | None:
    sides = found["self"], found["other"]
    if found["alpha"] != 1 or not all(isinstance(side, fx.Node) for side in sides):
        return None
    return (
        MatchedCall(node, sides, "", "", Add(0, 0)) if all(_alike(node, s) for s in sides) else None
    )


def _joined(editor: GraphEditor, node: fx.Node, found: Found) -> MatchedCall | None:
    parts = tuple(found["tensors"])
    rank = node.meta["val"].ndim
    if any(part.meta["val"].ndim != rank for part in parts):  # torch lets empty vectors pass
        return None
    return MatchedCall(node, parts, "", "", Cat((0,)))


def _largest(editor: GraphEditor, node: fx.Node, found: Found) -> MatchedCall | None:
    return _pooled(node, found, mean=False, counted=True)


def _averaged(editor: GraphEditor, node: fx.Node, found: Found) -> MatchedCall | None:
    if found["divisor_override"] is not None:
        return None
    return _pooled(node, found, mean=True, counted=found["count_include_pad"])


def _pooled(node: fx.Node, found: Found, *, mean: bool, counted: bool) -> MatchedCall | None:
    kernel = _spread(found["kernel_size"], 2)
    stride = _spread(found["stride"] or found["kernel_size"], 2)
    padding, dilation = (_spread(found.get(key, 1), 2) for key in ("padding", "dilation"))
    if None in (kernel, stride, padding, dilation) or node.meta["val"].ndim != 4:
        return None
    step = PoolStep(0, mean, kernel, stride, padding, dilation, found["ceil_mode"], counted)  # type: ignore
    return MatchedCall(node, (found["self"],), "image", "image", step)


def _adaptive(editor: GraphEditor, node: fx.Node, found: Found) -> MatchedCall | None:
    x = found["self"]
    if node.meta["val"].ndim != 4:
        return None
    if _alike(node, x):
        return MatchedCall(node, (x,), "", "", None)
    whole = _spread(found["output_size"], 2) == (1, 1)
    return MatchedCall(node, (x,), "image", "image", MeanStep(0, keep=True)) if whole else None


def _mean(editor: GraphEditor, node: fx.Node, found: Found) -> MatchedCall | None:
    x, dims = found["self"], found["dim"]
    rank = x.meta["val"].ndim
    if rank != 4 or sorted(d % 4 for d in dims or ()) != [2, 3] or found["dtype"] is not None:
        return None
    made = "image" if found["keepdim"] else "tokens"
    return MatchedCall(node, (x,), "image", made, MeanStep(0, keep=found["keepdim"]))


def _flat(editor: GraphEditor, node: fx.Node, found: Found) -> MatchedCall | None:
    """Images of one pixel as rows; anything into the shape that it has."""
    x = found["self"]
    if not isinstance(x.meta.get("val"), Tensor):
        return None
    if _alike(node, x):
        return MatchedCall(node, (x,), "", "", None)
    before, after = x.meta["val"].shape, node.meta["val"].shape
    rows = len(before) == 4 and len(after) == 2 and tuple(before[2:]) == (1, 1)
    if not rows or not all(map(same_size, before[:2], after)):
        return None
    return MatchedCall(node, (x,), "image", "tokens", Flat(0))


def _alike(node: fx.Node, other: fx.Node) -> bool:
    """Are two values of one shape?"""
    mine, theirs = node.meta["val"], other.meta.get("val")
    if not isinstance(theirs, Tensor) or theirs.ndim != mine.ndim:
        return False
    return all(map(same_size, mine.shape, theirs.shape))


_RULES: dict[Any, Rule] = {
    aten.conv1d.default: _convolution, aten.conv1d.padding: _convolution,
    aten.conv2d.default: _convolution, aten.conv2d.padding: _convolution,
    aten.conv_transpose1d.default: _transposed, aten.conv_transpose2d.input: _transposed,
    aten.linear.default: _linear,
    aten.add.Tensor: _sum,
    aten.cat.default: _joined,
    aten.max_pool2d.default: _largest,
    aten.avg_pool2d.default: _averaged,
    aten.adaptive_avg_pool2d.default: _adaptive,
    aten.mean.dim: _mean,
    aten.flatten.using_ints: _flat, aten.view.default: _flat, aten.reshape.default: _flat,
    **dict.fromkeys(SQUEEZES, _flat),
    **dict.fromkeys(IDENTITIES, _same),
}  # fmt: skip
