"""Split calls that need every row at once into statistics and a pointwise application.

    norm(x) == x * scale + shift           scale, shift: of the moments of x, one per channel
    softmax(x) == exp(x - max(x)) / sum(exp(x - max(x)))

The statistics are reductions, computed part by part (`partial_reductions`). Calls with several
outputs become calls with one, which can be cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from demask.exec.analysis.partial_reductions import moments_of
from demask.exec.axes import NONE, Axes, axes_of, image_axes
from demask.facts.analysis import Analysis
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.value import Value
from demask.numerics import rms_norm_eps
from demask.ops import Case, Entry, Relation, Table, schema, traits
from demask.ops.custom import CustomOp
from demask.ops.entry import Shape as S
from demask.ops.schema import fake
from demask.registry import CUSTOM_OPS
from demask.rewrites.driver import apply_rules
from demask.rewrites.rule import Phase, case, rule
from demask.rewrites.segment import split_as_slices

aten = torch.ops.aten
X = (2, 4, 6, 5)  # the shape of most cases


@torch.library.custom_op("demask::moments", mutates_args=())
def moments(x: Tensor, dims: list[int]) -> Tensor:
    """Mean and population variance over some axes, stacked, float64 [2, ...]; these axes have size
    one."""
    return moments_of(x, tuple(dims))


@moments.register_fake
def _(x: Tensor, dims: list[int]) -> Tensor:
    reduced = {dim % x.ndim for dim in dims}
    sizes = [1 if k in reduced else n for k, n in enumerate(x.shape)]
    return x.new_empty([2, *sizes], dtype=torch.float64)


def _reference_moments(x: Tensor, dims: list[int]) -> Tensor:
    variance, mean = torch.var_mean(x.double(), dims, correction=0, keepdim=True)
    return torch.stack([mean, variance])


CUSTOM_OPS.register("moments", CustomOp(_reference_moments))


def _moments_line(node: fx.Node) -> str:
    """The entry line of a `moments` call: the reduced axes must be complete."""
    bound = schema.arguments(node)
    rank = fake(bound["x"]).ndim
    reduced = {dim % rank for dim in bound["dims"]}
    before = " ".join(f"!a{k}" if k in reduced else f"a{k}" for k in range(rank))
    after = " ".join("1" if k in reduced else f"a{k}" for k in range(rank))
    return f"{before} -> which {after}"


# Two output values per reduced position, so it has no transfer rule.
_MOMENTS = Entry(
    _moments_line, fill="none", sized=True, cases=(Case((S((2, 3, 4)), [1]), {}), Case((S((2, 3, 4, 5)), [2, 3]), {}))
)


def with_moments(table: Table) -> Table:
    """The table, extended by `moments`, which only traversal uses."""
    name = "demask.moments.default"
    return table if name in table else table.extended({name: _MOMENTS})


# ------------------------------------------------------------------- calls with several outputs


@rule(aten.unbind.int, cases=(case(lambda x: x.unbind(1)[1:3], X), case(lambda x: x.unbind(-1)[0], X)))
def unbind(out: Value, x: Value, dim: int) -> tuple[Value | None, ...]:
    """The outputs of unbind are selections of one position."""
    return tuple(x.select(dim, k) if k in out.outputs_read else None for k in range(len(out.fake)))


@rule(
    aten.var_mean.correction,
    aten.var_mean.dim,
    aten.var_mean.default,
    cases=(
        case(lambda x: torch.var_mean(x, (1, 3), keepdim=True), X),
        case(lambda x: aten.var_mean.dim(x, [2], False), X),
        case(lambda x: aten.var_mean.default(x)[0], X),
    ),
    exact=False,
)
def variance_and_mean(out: Value, x: Value, *_: Any) -> tuple[Value | None, ...]:
    """The variance, and the mean."""
    arguments, read = out.arguments, out.outputs_read
    keep, dims = arguments.get("keepdim", False), arguments.get("dim") or list(range(x.rank))
    correction = arguments["correction"] if "correction" in arguments else float(arguments["unbiased"])
    variance = x.var(dims, correction=correction, keepdim=keep) if 0 in read else None
    return variance, x.mean(dims, keep) if 1 in read else None


@rule(
    aten.max.dim,
    aten.min.dim,
    cases=(case(lambda x: tuple(x.max(2)), X), case(lambda x: x.min(-1, keepdim=True)[1], X)),
)
def extreme_and_position(out: Value, x: Value, dim: int, keep: bool) -> tuple[Value | None, ...]:
    """The largest or smallest values, and their positions."""
    is_max, read = out.calls(aten.max.dim), out.outputs_read
    values = (x.amax if is_max else x.amin)([dim], keep) if 0 in read else None
    return values, (x.argmax if is_max else x.argmin)(dim, keep) if 1 in read else None


@rule(
    *traits.ADAPTIVE_MAX_POOLS,
    cases=(
        case(lambda x: F.adaptive_max_pool2d(x, 1), X),
        case(lambda x: F.adaptive_max_pool1d(x, 1, return_indices=True), X[:3]),
    ),
    refused=(
        case(lambda x: F.adaptive_max_pool2d(x, (1, 2)), X),
        case(lambda x: F.adaptive_max_pool2d(x, 1, return_indices=True)[1], X),
    ),
)
def adaptive_max_pool_of_one(out: Value, x: Value, sizes: list[int]) -> tuple[Value | None, ...] | None:
    """A pool with one position is a maximum."""
    if any(size != 1 for size in sizes) or 0 not in out.outputs_read:
        return None
    return x.amax(list(range(x.rank - len(sizes), x.rank)), True), None


SINGLE_OUTPUTS = Phase(
    "calls with one output",
    (split_as_slices, unbind, variance_and_mean, extreme_and_position, adaptive_max_pool_of_one),
)


# ------------------------------------------------------------------------------------------ norms


@rule(
    aten.group_norm.default,
    cases=(
        case(lambda x: F.group_norm(x, 2, x[0, :, 0, 0], x[1, :, 0, 0]), X),
        case(lambda x: F.group_norm(x, 4), X[:3]),
    ),
    refused=(case(lambda x: F.group_norm(x, 2), X[:2]),),
    exact=False,
)
def group_norm(
    out: Value, x: Value, groups: int, weight: Value | None, bias: Value | None, eps: float, *_: Any
) -> Value | None:
    """norm(x) == x * scale + shift, of the moments of x per channel, merged in each group"""
    if x.rank < 3:
        return None
    return _normalize_groups(x, groups, list(range(2, x.rank)), weight, bias, eps)


@rule(
    aten.instance_norm.default,
    cases=(case(lambda x: F.instance_norm(x, weight=x[0, :, 0, 0]), X),),
    refused=(case(lambda x, m: F.instance_norm(x, m, m.abs(), use_input_stats=False), X, (4,)),),
    exact=False,
)
def instance_norm(
    out: Value, x: Value, weight: Value | None, bias: Value | None, mean: Any, var: Any, of_input: bool, *rest: Any
) -> Value | None:
    """norm(x) == x * scale + shift, of the moments of x per channel"""
    if not of_input:
        return None
    return _normalize_groups(x, x.shape[1], list(range(2, x.rank)), weight, bias, out.arg("eps"))


@rule(
    aten.batch_norm.default,
    cases=(case(lambda x: F.batch_norm(x, None, None, bias=x[0, :, 0, 0], training=True), X),),
    refused=(case(lambda x, m: F.batch_norm(x, m, m.abs()), X, (4,)),),
    exact=False,
)
def batch_norm_of_its_batch(
    out: Value, x: Value, weight: Value | None, bias: Value | None, mean: Any, var: Any, training: bool, *rest: Any
) -> Value | None:
    """norm(x) == x * scale + shift, of the moments of x per channel over the batch"""
    if not training:
        return None
    return _normalize_groups(x, x.shape[1], [0, *range(2, x.rank)], weight, bias, out.arg("eps"))


def _normalize_groups(
    x: Value, groups: int, dims: list[int], weight: Value | None, bias: Value | None, eps: float
) -> Value:
    """The norm over groups of channels: moments per channel, merged in each group."""
    grouped = [1 if 0 in dims else x.shape[0], groups, x.shape[1] // groups]
    mean, variance = (value.reshape(grouped) for value in _mean_and_variance(x, dims))
    if grouped[2] > 1:
        mean, variance = _merge_groups(mean, variance)
    scale = (variance + eps).rsqrt()
    weight, bias = (None if value is None else value.reshape([1, *grouped[1:]]) for value in (weight, bias))
    if weight is not None:
        scale = weight * scale
    shift = -(mean * scale)
    if bias is not None:
        shift = bias + shift
    return _apply_norm(x, *(_per_channel(value, grouped, x.rank) for value in (scale, shift)))


def _mean_and_variance(x: Value, dims: list[int]) -> tuple[Value, Value]:
    """Mean and variance, float64, reduced axes of size one."""
    stacked = x.call(torch.ops.demask.moments.default, x, dims)
    return stacked.select(0, 0), stacked.select(0, 1)


def _merge_groups(mean: Value, variance: Value) -> tuple[Value, Value]:
    """Mean and variance over channels of equal size: the mean of means; the mean of variances plus
    squared distances from that mean."""
    overall = mean.mean([2], True)
    return overall, (variance + (mean - overall).square()).mean([2], True)


def _per_channel(value: Value, grouped: list[int], rank: int) -> Value:
    expanded = value if grouped[2] == 1 else value.expand(grouped)
    return expanded.reshape([grouped[0], grouped[1] * grouped[2], *[1] * (rank - 2)])


def _apply_norm(x: Value, scale: Value, shift: Value | None = None) -> Value:
    """x * scale + shift, in float32 at least, as torch's norms do."""
    work = _work_type(x.dtype)
    scale = _cast(scale, work)
    return _cast(x * scale if shift is None else _cast(shift, work).addcmul(x, scale), x.dtype)


def _work_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which torch computes norms and softmax."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _cast(value: Value, dtype: torch.dtype) -> Value:
    return value if value.dtype == dtype else value.to(dtype)


@rule(
    aten.layer_norm.default,
    cases=(
        case(lambda x: F.layer_norm(x, (6, 5)), X),
        case(lambda x: F.layer_norm(x, (5,), x[0, 0, 0], x[0, 0, 1]), X),
        case(lambda x: F.layer_norm(x, (5,), x[0, 0, 0]), X),
        case(lambda x: F.layer_norm(x, (5,), None, x[0, 0, 0]), X),
    ),
    exact=False,
)
def layer_norm(
    out: Value, x: Value, shape: list[int], weight: Value | None, bias: Value | None, eps: float, *_: Any
) -> Value:
    """norm(x) == (x * scale + shift) * weight + bias, of the moments of x"""
    mean, variance = _mean_and_variance(x, list(range(x.rank - len(shape), x.rank)))
    scale = (variance + eps).rsqrt()
    result = _apply_norm(x, scale, -(mean * scale))
    if weight is not None and bias is not None:
        result = bias.addcmul(result, weight)
    elif weight is not None:
        result = result * weight
    elif bias is not None:
        result = result + bias
    return _cast(result, out.dtype)


@rule(
    aten.rms_norm.default,
    cases=(case(lambda x: F.rms_norm(x, (6, 5)), X), case(lambda x: F.rms_norm(x, (5,), x[0, 0, 0], eps=1e-3), X)),
    exact=False,
)
def rms_norm(out: Value, x: Value, shape: list[int], weight: Value | None, eps: float | None) -> Value:
    """norm(x) == x * scale * weight, where the mean of squares is the variance plus the squared mean"""
    mean, variance = _mean_and_variance(x, list(range(x.rank - len(shape), x.rank)))
    scale = (variance + mean.square() + (rms_norm_eps(x.dtype) if eps is None else eps)).rsqrt()
    result = _apply_norm(x, scale)
    return result if weight is None else _cast(result * weight, out.dtype)


@rule(
    aten.softmax.int,
    aten.log_softmax.int,
    cases=(case(lambda x: F.softmax(x, 2), X), case(lambda x: F.log_softmax(x, -1), X)),
    exact=False,
)
def softmax(out: Value, x: Value, dim: int, *_: Any) -> Value:
    """softmax(x) == exp(x - max(x)) / sum(exp(x - max(x)))"""
    x = _cast(x, _work_type(out.dtype))
    shifted = x - x.amax([dim], True)
    exponentials = shifted.exp()
    total = exponentials.sum([dim], True)
    result = exponentials / total if out.calls(aten.softmax.int) else shifted - total.log()
    return _cast(result, out.dtype)


# ------------------------------------------------------------------------------------------ pools


@rule(
    *traits.ADAPTIVE_AVERAGE_POOLS,
    cases=(
        case(lambda x: F.adaptive_avg_pool2d(x, 1), X),
        case(lambda x: F.adaptive_avg_pool2d(x, (1, 3)), X),
        case(lambda x: F.adaptive_avg_pool1d(x, 1), X[:3]),
    ),
    refused=(
        case(lambda x: F.adaptive_avg_pool2d(x, (2, 3)), X),
        case(lambda x: F.adaptive_avg_pool1d(x, 1), (2, 3, 1)),
    ),
    exact=False,
)
def adaptive_pool_of_one(out: Value, x: Value, sizes: list[int]) -> Value | None:
    """The mean along axes of which one position remains, then the pool along the others."""
    space = range(x.rank - len(sizes), x.rank)
    dims = [k for k, size in zip(space, sizes, strict=True) if size == 1 < x.shape[k]]
    if not dims:
        return None
    mean = x.mean(dims, True)
    is_complete = all(mean.shape[k] == size for k, size in zip(space, sizes, strict=True))
    return mean if is_complete else out.like(self=mean)


@rule(
    *traits.AVERAGE_POOLS,
    *traits.MAX_POOLS,
    cases=(
        case(lambda x: F.avg_pool2d(x, (6, 5)), X),
        case(lambda x: aten.max_pool2d(x, [5]), (2, 4, 5, 5)),
        case(lambda x: F.max_pool1d(x, 6), X[:3]),
    ),
    refused=(
        case(lambda x: F.avg_pool2d(x, (6, 4)), X),
        case(lambda x: F.avg_pool2d(x, (6, 5), padding=(1, 0)), X),
        case(lambda x: F.avg_pool2d(x, (6, 5), divisor_override=7), X),
    ),
    exact=False,
)
def pool_of_full_image(out: Value, x: Value, kernel: list[int], *_: Any) -> Value | None:
    """A pool whose window is the full image is a mean or a maximum."""
    axes = traits.POOLS[out.target]
    kernel = kernel * (axes // len(kernel))
    if kernel != list(x.shape[-axes:]) or any(out.arg("padding")):
        return None
    if out.arguments.get("divisor_override") is not None:
        return None
    space = list(range(x.rank - axes, x.rank))
    return x.mean(space, True) if out.calls(*traits.AVERAGE_POOLS) else x.amax(space, True)


STATISTICS = Phase(
    "statistics and their application",
    (
        adaptive_pool_of_one,
        pool_of_full_image,
        group_norm,
        instance_norm,
        batch_norm_of_its_batch,
        layer_norm,
        rms_norm,
        softmax,
    ),
)


@rule(
    *traits.ARITHMETIC,
    cases=(
        case(lambda x: x - x[:, :1].expand(2, 4, 6, 5), X),
        case(lambda x: x[0, 0, 0].expand(2, 4, 6, 5) / x, X),
        case(lambda x: torch.add(x[:, :1].expand(2, 4, 6, 5), x[:1].expand(2, 4, 6, 5), alpha=2), X),
    ),
    refused=(
        case(lambda x: x[:, :1].expand(2, 4, 6, 5) * x[:, 0, 0, 0][:, None, None, None], X),
        case(lambda x: x.float() * x[0, 0, 0, 0].expand(2, 4, 6, 5), X),
    ),
)
def broadcast_without_expand(out: Value, x: Any, other: Any, *_: Any) -> Value | None:
    """Arithmetic broadcasts a value instead of reading its expanded copy."""
    narrow, wide = _unexpanded(x), _unexpanded(other)
    if narrow is not None and isinstance(other, Value) and other.is_shaped(out):
        return out.like(self=narrow)
    if wide is None or not x.is_shaped(out):
        return None
    return out.like(other=wide)


def _unexpanded(value: Any) -> Value | None:
    """The operand of an expand; None for other values, and for a number, whose type would count less."""
    if not isinstance(value, Value) or not value.calls(aten.expand.default):
        return None
    source = value.arg("self")
    return source if source.rank else None


BROADCAST = Phase("broadcast values", (broadcast_without_expand,))


# --------------------------------------------------------------------------------- their application


def split_global_calls(program: Program, table: Table) -> Program:
    """The program with global calls replaced by statistics and their application, and calls with
    several outputs by calls with one output.

    table: one of `with_moments`, also to be used for the result.
    """
    names = global_calls(program, table)
    editor = GraphEditor(program)
    apply_rules(editor, SINGLE_OUTPUTS)
    apply_rules(editor, STATISTICS, names=names)
    apply_rules(editor, BROADCAST)
    return editor.finish()


def global_calls(program: Program, table: Table, inputs: Mapping[str, Axes] | None = None) -> tuple[str, ...]:
    """Names of the calls whose output has rows or columns, each of which needs all of the input's.

    table: one of `with_moments`. inputs: the axes of placeholders by name; None: those of images
    (n c h w) and sequences (n c l).
    """
    editor = GraphEditor(program)
    apply_rules(editor, SINGLE_OUTPUTS)
    names = [node.name for node in editor.calls(aten.batch_norm.default) if schema.arguments(node)["training"]]
    # The table has no entry for them, so that their axes would end there.
    apply_rules(editor, STATISTICS, names=names)
    relations = Analysis(program.with_graph(editor.graph), table).relations
    placeholders = editor.graph.find_nodes(op="placeholder")
    pairs = {n: image_axes(n) if inputs is None else inputs.get(n.name) for n in placeholders}
    axes = axes_of(editor.graph, relations, {n: pair for n, pair in pairs.items() if pair and pair[0] is not None})
    calls = ((node, relations[node]) for node in editor.calls(*STATISTICS.ops))
    names += [node.name for node, relation in calls if isinstance(relation, Relation) and _needs_all(relation, axes)]
    return tuple(names)


def _needs_all(relation: Relation, axes: Mapping[fx.Node, Axes]) -> bool:
    """Whether a cut axis of the operand must be complete, or a pool reduces it to one position."""
    x, output = relation.operands[0].value, fake(relation.node)
    cut = [axis for axis in axes.get(x, NONE) if axis is not None]
    if relation.node.target in traits.POOLS:
        return any(output.shape[axis] == 1 < fake(x).shape[axis] for axis in cut)
    return any(set(relation.ins[0][axis]) & relation.complete for axis in cut)
