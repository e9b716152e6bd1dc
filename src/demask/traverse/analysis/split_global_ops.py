"""Split calls that need every row at once into statistics and a pointwise application.

    norm(x) == x * scale + shift           scale, shift: of the moments of x, one per channel
    softmax(x) == exp(x - max(x)) / sum(exp(x - max(x)))

The statistics are reductions, computed part by part (`partial_reductions`). Calls with several
outputs become calls with one, which can be cut.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from demask.errors import BadInput
from demask.facts.analysis import Analysis
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.ops import Case, Entry, Relation, Table, schema, traits
from demask.ops.custom import CustomOp
from demask.ops.entry import Shape as S
from demask.ops.schema import fake, same_shape
from demask.registry import CUSTOM_OPS
from demask.traverse.analysis.partial_reductions import moments_of
from demask.traverse.axes import NONE, Axes, axes_of, image_axes

aten = torch.ops.aten
_Rule = Callable[[GraphEditor, fx.Node, Mapping[str, Any]], "fx.Node | None"]


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


def split_global_calls(program: Program, table: Table, nodes: Collection[str] | None = None) -> Program:
    """The program with global calls replaced by statistics and their application.

    Calls with several outputs are replaced by calls with one output.

    Args:
        table: one of `with_moments`, also to be used for the result.
        nodes: names of the calls to rewrite; None: those that `global_calls` returns.

    Raises:
        BadInput: for names that the graph lacks or that no rule rewrites.
    """
    chosen = global_calls(program, table) if nodes is None else sorted(nodes)
    editor = _with_single_outputs(program)
    known = {node.name: node for node in program.graph.nodes}
    copies = {node.name: node for node in editor.graph.nodes}
    for name in chosen:
        if name not in known:
            raise BadInput(f"expected names of calls in the graph, got {name!r}, which it lacks")
        target = known[name].target
        if target not in _RULES and target not in _OUTPUT_RULES:
            raise BadInput(f"{name} ({target}) has no statistics to separate")
        if target in _RULES:
            _replace_call(editor, copies[name])
    for node in editor.graph.find_nodes(op="call_function", target=aten.expand.default):
        _broadcast_unexpanded(node)
    return editor.finish()


def global_calls(program: Program, table: Table, inputs: Mapping[str, Axes] | None = None) -> tuple[str, ...]:
    """Names of the calls whose output has rows or columns, each of which needs all of the input's.

    table: one of `with_moments`. inputs: the axes of placeholders by name; None: those of images
    (n c h w) and sequences (n c l).
    """
    editor = _with_single_outputs(program)
    trained = [node for node in editor.graph.nodes if _uses_batch_statistics(node)]
    names = [node.name for node in trained]
    for node in trained:  # the table has no entry for them, so that their axes would end there
        _replace_call(editor, node)
    relations = Analysis(program.with_graph(editor.graph), table).relations
    placeholders = editor.graph.find_nodes(op="placeholder")
    pairs = {n: image_axes(n) if inputs is None else inputs.get(n.name) for n in placeholders}
    axes = axes_of(editor.graph, relations, {n: pair for n, pair in pairs.items() if pair and pair[0] is not None})
    for node, relation in relations.items():
        if node.target in _RULES and isinstance(relation, Relation) and _needs_all(relation, axes):
            names.append(node.name)
    return tuple(names)


def _with_single_outputs(program: Program) -> GraphEditor:
    """An editor whose graph has calls of one output in place of calls of several, where known."""
    editor = GraphEditor(program)
    for node in editor.calls(*_OUTPUT_RULES):
        _split_outputs(editor, node)
    return editor


def _needs_all(relation: Relation, axes: Mapping[fx.Node, Axes]) -> bool:
    """Whether a cut axis of the operand must be complete, or a pool reduces it to one position."""
    x, output = relation.operands[0].value, fake(relation.node)
    cut = [axis for axis in axes.get(x, NONE) if axis is not None]
    if relation.node.target in _POOLS:
        return any(output.shape[axis] == 1 < fake(x).shape[axis] for axis in cut)
    return any(set(relation.ins[0][axis]) & relation.complete for axis in cut)


def _replace_call(editor: GraphEditor, node: fx.Node) -> None:
    with editor.graph.inserting_before(node):
        replacement = _RULES[node.target](editor, node, schema.arguments(node))
    if replacement is not None:
        editor.replace(node, replacement, inherit=True)


def _broadcast_unexpanded(node: fx.Node) -> None:
    """Let arithmetic broadcast a full value instead of reading its expanded copy."""
    for user in [user for user in node.users if user.target in traits.ARITHMETIC]:
        others = [fake(n) for n in user.all_input_nodes if n is not node]
        if any(same_shape(v, fake(user)) for v in others):
            user.replace_input_with(node, node.args[0])  # type: ignore[arg-type]


def _mean_and_variance(editor: GraphEditor, x: fx.Node, dims: list[int]) -> tuple[fx.Node, fx.Node]:
    """The nodes of mean and variance, float64, reduced axes of size one."""
    stacked = editor.call(torch.ops.demask.moments.default, x, dims)
    return editor.call(aten.select.int, stacked, 0, 0), editor.call(aten.select.int, stacked, 0, 1)


def _deviation(editor: GraphEditor, variance: fx.Node, eps: float) -> fx.Node:
    """1 / sqrt(variance + eps)"""
    return editor.call(aten.rsqrt.default, editor.call(aten.add.Scalar, variance, eps))


def _apply_norm(editor: GraphEditor, node: fx.Node, x: fx.Node, scale: fx.Node, shift: fx.Node | None) -> fx.Node:
    """x * scale + shift, in float32 at least, as torch's norms do."""
    dtype = fake(node).dtype
    work = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    scale = _cast(editor, scale, work)
    if shift is None:
        result = editor.call(aten.mul.Tensor, x, scale)
    else:
        result = editor.call(aten.addcmul.default, _cast(editor, shift, work), x, scale)
    return _cast(editor, result, dtype)


def _cast(editor: GraphEditor, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    is_same = fake(node).dtype == dtype
    return node if is_same else editor.call(aten.to.dtype, node, dtype)


def _normalize_groups(
    editor: GraphEditor, node: fx.Node, bound: Mapping[str, Any], groups: int, dims: list[int]
) -> fx.Node:
    """The norm over groups of channels: moments per channel, merged in each group."""
    x = bound["input"]
    shape = fake(x).shape
    batch, per_group = 1 if 0 in dims else shape[0], shape[1] // groups
    mean, variance = _mean_and_variance(editor, x, dims)
    grouped = [batch, groups, per_group]
    mean, variance = (editor.call(aten.reshape.default, v, grouped) for v in (mean, variance))
    if per_group > 1:
        mean, variance = _merge_groups(editor, mean, variance)
    scale = _deviation(editor, variance, bound["eps"])
    weight, bias = (
        None if bound[name] is None else editor.call(aten.reshape.default, bound[name], [1, *grouped[1:]])
        for name in ("weight", "bias")
    )
    if weight is not None:
        scale = editor.call(aten.mul.Tensor, weight, scale)
    shift = editor.call(aten.neg.default, editor.call(aten.mul.Tensor, mean, scale))
    if bias is not None:
        shift = editor.call(aten.add.Tensor, bias, shift)
    pair = [_per_channel(editor, v, grouped, fake(x).ndim) for v in (scale, shift)]
    return _apply_norm(editor, node, x, *pair)


def _merge_groups(editor: GraphEditor, mean: fx.Node, variance: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Mean and variance over channels of equal size: the mean of means; the mean of variances plus
    squared distances from that mean."""
    overall = editor.call(aten.mean.dim, mean, [2], True)
    distances = editor.call(aten.square.default, editor.call(aten.sub.Tensor, mean, overall))
    second_moments = editor.call(aten.add.Tensor, variance, distances)
    return overall, editor.call(aten.mean.dim, second_moments, [2], True)


def _per_channel(editor: GraphEditor, value: fx.Node, grouped: list[int], rank: int) -> fx.Node:
    expanded = value if grouped[2] == 1 else editor.call(aten.expand.default, value, grouped)
    sizes = [grouped[0], grouped[1] * grouped[2], *[1] * (rank - 2)]
    return editor.call(aten.reshape.default, expanded, sizes)


def _group_norm(editor: GraphEditor, node: fx.Node, bound: Mapping[str, Any]) -> fx.Node | None:
    space = list(range(2, fake(node).ndim))
    return _normalize_groups(editor, node, bound, bound["num_groups"], space) if space else None


def _instance_norm(editor: GraphEditor, node: fx.Node, bound: Mapping[str, Any]) -> fx.Node | None:
    if not bound["use_input_stats"]:
        return None
    value = fake(node)
    return _normalize_groups(editor, node, bound, value.shape[1], list(range(2, value.ndim)))


def _uses_batch_statistics(node: fx.Node) -> bool:
    return node.target is aten.batch_norm.default and schema.arguments(node)["training"]


def _batch_norm(editor: GraphEditor, node: fx.Node, bound: Mapping[str, Any]) -> fx.Node | None:
    value = fake(node)
    dims = [0, *range(2, value.ndim)]
    return _normalize_groups(editor, node, bound, value.shape[1], dims)


def _layer_norm(editor: GraphEditor, node: fx.Node, bound: Mapping[str, Any]) -> fx.Node:
    x, rank = bound["input"], fake(node).ndim
    dims = list(range(rank - len(bound["normalized_shape"]), rank))
    mean, variance = _mean_and_variance(editor, x, dims)
    scale = _deviation(editor, variance, bound["eps"])
    shift = editor.call(aten.neg.default, editor.call(aten.mul.Tensor, mean, scale))
    return _apply_affine(editor, node, x, (scale, shift), (bound["weight"], bound["bias"]))


def _rms_norm(editor: GraphEditor, node: fx.Node, bound: Mapping[str, Any]) -> fx.Node:
    """The mean of squares is the variance plus the squared mean."""
    x, rank = bound["input"], fake(node).ndim
    dims = list(range(rank - len(bound["normalized_shape"]), rank))
    mean, variance = _mean_and_variance(editor, x, dims)
    power = editor.call(aten.add.Tensor, variance, editor.call(aten.square.default, mean))
    eps = bound["eps"]
    work = torch.float64 if fake(x).dtype == torch.float64 else torch.float32
    scale = _deviation(editor, power, torch.finfo(work).eps if eps is None else eps)
    return _apply_affine(editor, node, x, (scale, None), (bound["weight"], None))


def _apply_affine(
    editor: GraphEditor,
    node: fx.Node,
    x: fx.Node,
    norm: tuple[fx.Node, fx.Node | None],
    affine: tuple[fx.Node | None, fx.Node | None],
) -> fx.Node:
    """Apply the norm, then a weight and a bias per position."""
    result, (weight, bias) = _apply_norm(editor, node, x, *norm), affine
    if weight is not None and bias is not None:
        result = editor.call(aten.addcmul.default, bias, result, weight)
    elif weight is not None:
        result = editor.call(aten.mul.Tensor, result, weight)
    elif bias is not None:
        result = editor.call(aten.add.Tensor, result, bias)
    return _cast(editor, result, fake(node).dtype)


def _exponentials(editor: GraphEditor, node: fx.Node, bound: Mapping[str, Any]) -> tuple[fx.Node, fx.Node, fx.Node]:
    """x - max(x), its exponentials, and their sum; half precision in float32, as torch does."""
    x, dtype = bound["self"], fake(node).dtype
    work = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    x = _cast(editor, x, work)
    dim = bound["dim"]
    shifted = editor.call(aten.sub.Tensor, x, editor.call(aten.amax.default, x, [dim], True))
    exponentials = editor.call(aten.exp.default, shifted)
    return shifted, exponentials, editor.call(aten.sum.dim_IntList, exponentials, [dim], True)


def _softmax(editor: GraphEditor, node: fx.Node, bound: Mapping[str, Any]) -> fx.Node:
    _, exponentials, total = _exponentials(editor, node, bound)
    result = editor.call(aten.div.Tensor, exponentials, total)
    return _cast(editor, result, fake(node).dtype)


def _log_softmax(editor: GraphEditor, node: fx.Node, bound: Mapping[str, Any]) -> fx.Node:
    shifted, _, total = _exponentials(editor, node, bound)
    result = editor.call(aten.sub.Tensor, shifted, editor.call(aten.log.default, total))
    return _cast(editor, result, fake(node).dtype)


def _adaptive_pool(editor: GraphEditor, node: fx.Node, bound: Mapping[str, Any]) -> fx.Node | None:
    """The mean along axes of which one position remains, then the pool along the others."""
    x, sizes = bound["self"], list(bound["output_size"])
    rank = fake(x).ndim
    space = range(rank - len(sizes), rank)
    dims = [k for k, size in zip(space, sizes, strict=True) if size == 1 < fake(x).shape[k]]
    if not dims:
        return None
    mean = editor.call(aten.mean.dim, x, dims, True)
    shape = fake(mean).shape
    if all(shape[k] == size for k, size in zip(space, sizes, strict=True)):
        return mean
    return editor.call(node.target, mean, sizes)


def _global_pool(editor: GraphEditor, node: fx.Node, bound: Mapping[str, Any]) -> fx.Node | None:
    """A mean or maximum in place of a pool whose window is the full image."""
    x = bound["self"]
    size, kernel, padding = fake(x).shape, bound["kernel_size"], bound["padding"]
    space = list(range(fake(x).ndim - len(kernel), fake(x).ndim))
    image = [size[k] for k in space]
    kernel = list(kernel) * (len(space) // len(kernel))
    if list(kernel) != image or any(padding) or math.prod(image) == 1:
        return None
    if bound.get("divisor_override") is not None or any(d != 1 for d in bound.get("dilation", ())):
        return None
    reduce = aten.mean.dim if "avg" in str(node.target) else aten.amax.default
    return editor.call(reduce, x, space, True)


def _split_outputs(editor: GraphEditor, node: fx.Node) -> None:
    """Replace each output of a call by a call with one output, where a rule is known."""
    for user in list(node.users):
        if user.target is not operator.getitem:
            continue
        with editor.graph.inserting_before(user):
            replacement = _OUTPUT_RULES[node.target](editor, node, schema.output_of(user))
        if replacement is not None:
            editor.replace(user, replacement, inherit=True)


def _split(editor: GraphEditor, node: fx.Node, k: int) -> fx.Node | None:
    bound, values = schema.arguments(node), schema.outputs(node)
    x, dim = bound["self"], bound["dim"] % values[0].ndim
    sizes = [value.shape[dim] for value in values]
    if not all(isinstance(size, int) for size in sizes):
        return None
    start = sum(sizes[:k])
    return editor.call(aten.slice.Tensor, x, dim, start, start + sizes[k])


def _unbind(editor: GraphEditor, node: fx.Node, k: int) -> fx.Node:
    bound = schema.arguments(node)
    return editor.call(aten.select.int, bound["self"], bound["dim"], k)


def _variance_or_mean(editor: GraphEditor, node: fx.Node, k: int) -> fx.Node:
    bound = schema.arguments(node)
    x, keep = bound["self"], bound.get("keepdim", False)
    dims = bound.get("dim") or list(range(fake(x).ndim))
    if k:
        return editor.call(aten.mean.dim, x, dims, keep)
    correction = bound["correction"] if "correction" in bound else float(bound["unbiased"])
    return editor.call(aten.var.correction, x, dims, correction=correction, keepdim=keep)


def _extreme(editor: GraphEditor, node: fx.Node, k: int) -> fx.Node:
    """Values (output 0) or positions (output 1) of the largest or smallest along an axis."""
    bound, largest = schema.arguments(node), node.target is aten.max.dim
    x, dim, keep = bound["self"], bound["dim"], bound["keepdim"]
    if k == 0:
        return editor.call(aten.amax.default if largest else aten.amin.default, x, [dim], keep)
    return editor.call(aten.argmax.default if largest else aten.argmin.default, x, dim, keep)


def _adaptive_max(editor: GraphEditor, node: fx.Node, k: int) -> fx.Node | None:
    bound = schema.arguments(node)
    x, sizes = bound["self"], list(bound["output_size"])
    if k or any(size != 1 for size in sizes):
        return None
    rank = fake(x).ndim
    return editor.call(aten.amax.default, x, list(range(rank - len(sizes), rank)), True)


_OUTPUT_RULES: dict[Any, Callable[[GraphEditor, fx.Node, int], fx.Node | None]] = {
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.chunk.default: _split,
    aten.tensor_split.sections: _split,
    aten.tensor_split.indices: _split,
    aten.unbind.int: _unbind,
    aten.var_mean.correction: _variance_or_mean,
    aten.var_mean.dim: _variance_or_mean,
    aten.var_mean.default: _variance_or_mean,
    aten.max.dim: _extreme,
    aten.min.dim: _extreme,
    **dict.fromkeys(traits.ADAPTIVE_MAX_POOLS, _adaptive_max),
}
_POOLS: dict[Any, _Rule] = {
    **dict.fromkeys(traits.ADAPTIVE_AVERAGE_POOLS, _adaptive_pool),
    **dict.fromkeys((*traits.AVERAGE_POOLS, *traits.MAX_POOLS), _global_pool),
}
_RULES: dict[Any, _Rule] = {
    **_POOLS,
    aten.group_norm.default: _group_norm,
    aten.instance_norm.default: _instance_norm,
    aten.batch_norm.default: _batch_norm,
    aten.layer_norm.default: _layer_norm,
    aten.rms_norm.default: _rms_norm,
    aten.softmax.int: _softmax,
    aten.log_softmax.int: _log_softmax,
}
