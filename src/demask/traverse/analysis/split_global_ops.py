"""Calls that need every row at once, spelled so that all but their statistics goes row by row.

    norm(x) == x * scale + shift           scale, shift: of the moments of x, one per channel
    softmax(x) == exp(x - max(x)) / sum(exp(x - max(x)))

The statistics are reductions, whole values computed part by part (`reductions`); the application
is pointwise. Calls with several outputs become calls with one, which can be cut.
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
from demask.ops.custom import Own
from demask.ops.entries import norm
from demask.ops.entry import Shape as S
from demask.ops.schema import same_shape
from demask.registry import CUSTOM_OPS
from demask.traverse.analysis.partial_reductions import moments_of
from demask.traverse.axes import Axes, axes_of

aten = torch.ops.aten
_Rule = Callable[[GraphEditor, fx.Node, Mapping[str, Any]], "fx.Node | None"]


@torch.library.custom_op("demask::moments", mutates_args=())
def moments(x: Tensor, dims: list[int]) -> Tensor:
    """Mean and population variance over some axes, kept one long, stacked, in float64."""
    return moments_of(x, tuple(dims))


@moments.register_fake
def _(x: Tensor, dims: list[int]) -> Tensor:
    gone = {dim % x.ndim for dim in dims}
    kept = [1 if k in gone else n for k, n in enumerate(x.shape)]
    return x.new_empty([2, *kept], dtype=torch.float64)


def _moments(x: Tensor, dims: list[int]) -> Tensor:
    variance, mean = torch.var_mean(x.double(), dims, correction=0, keepdim=True)
    return torch.stack([mean, variance])


CUSTOM_OPS.register("moments", Own(_moments))


def _moments_line(node: fx.Node) -> str:
    found = schema.arguments(node)
    rank = found["x"].meta["val"].ndim
    gone = {dim % rank for dim in found["dims"]}
    before = " ".join(f"!a{k}" if k in gone else f"a{k}" for k in range(rank))
    after = " ".join("1" if k in gone else f"a{k}" for k in range(rank))
    return f"{before} -> which {after}"


def _reduction(*cases: tuple[Any, ...]) -> Entry:
    """Axes of `dim` must be complete and are gone, or one long, in the output."""
    return Entry(_LINE, sized=True, cases=tuple(Case(args, {}) for args in cases))


_LINE = dict(norm.ENTRIES)["aten.amax.default"].line
_X, _BOOL = S((2, 3, 4)), S((2, 3, 4), of="bool")
_MOMENTS = (Case((_X, [1]), {}), Case((S((2, 3, 4, 5)), [2, 3]), {}))
ENTRIES: Mapping[str, Entry] = {
    # Each of its values is two: the table says one of a position.
    "demask.moments.default": Entry(_moments_line, fill="none", sized=True, cases=_MOMENTS),
    "aten.prod.dim_int": _reduction((_X, 1)),
    **{f"aten.{op}.default": _reduction((_X,)) for op in ("prod", "max", "min", "var", "std")},
    **{f"aten.{op}.dim": _reduction((_X, [1])) for op in ("var", "std")},
    **{f"aten.{op}.default": _reduction((_BOOL,)) for op in ("any", "all")},
    **{f"aten.{op}.dim": _reduction((_BOOL, 1)) for op in ("any", "all")},
    **{f"aten.{op}.dims": _reduction((_BOOL, [1, 2], True)) for op in ("any", "all")},
    "aten.logsumexp.default": _reduction((_X, [1], True)),
    "aten.norm.Scalar": _reduction((_X,)),
    "aten.norm.ScalarOpt_dim": _reduction((_X, 2, [1])),
    **{f"aten.arg{op}.default": _reduction((_X,), (_X, 1)) for op in ("max", "min")},
}


def with_reductions(table: Table) -> Table:
    """The table with entries of reductions that only traversal splits, unless it has its own."""
    return table.extended({op: entry for op, entry in ENTRIES.items() if op not in table})


def parted(program: Program, table: Table, nodes: Collection[str] | None = None) -> Program:
    """The program with calls that need all rows as statistics and what applies them.

    nodes: names of the calls to rewrite; None: those that `global_calls` names. Outputs of calls
    with several are made by calls with one in either case. Names that the graph does not have, or
    that no rule rewrites, raise BadInput. table: one of `with_reductions`, as the result's.
    """
    chosen = global_calls(program, table) if nodes is None else sorted(nodes)
    editor = _picked(program)
    known = {node.name: node for node in program.graph.nodes}
    left = {node.name: node for node in editor.graph.nodes}
    for name in chosen:
        if name not in known:
            raise BadInput(f"expected names of calls in the graph, got {name!r}, which it lacks")
        target = known[name].target
        if target not in _RULES and target not in _PICKED:
            raise BadInput(f"{name} ({target}) has no statistics to take apart")
        if target in _RULES:
            _replace(editor, left[name])
    for node in editor.graph.find_nodes(op="call_function", target=aten.expand.default):
        _unexpand(node)
    return editor.finish()


def global_calls(
    program: Program, table: Table, inputs: Mapping[str, Axes] | None = None
) -> tuple[str, ...]:
    """Names of the calls that pass rows or columns on, but need them all.

    table: one of `with_reductions`. inputs: the axes of placeholders by name; None: of images
    (n c h w) and sequences (n c l).
    """
    editor = _picked(program)
    trained = [node for node in editor.graph.nodes if _is_trained(node)]
    names = [node.name for node in trained]
    for node in trained:  # the table has no line for them, so that their axes would end there
        _replace(editor, node)
    relations = Analysis(program.with_graph(editor.graph), table).relations
    axes = axes_of(editor.graph, relations, _given(editor.graph, inputs))
    for node, relation in relations.items():
        if node.target in _RULES and isinstance(relation, Relation) and _needs(relation, axes):
            names.append(node.name)
    return tuple(names)


def folded_scale(program: Program) -> Program:
    """The program of `parted` with norms in the weights of the 1x1 convolutions before them.

    Such a convolution runs twice, for the moments and scaled, and its result is kept by nobody.
    """
    editor = GraphEditor(program)
    for node in editor.calls(aten.addcmul.default):
        operands: Any = node.args
        shift, conv, scale = operands
        if not _is_point(conv, node) or tuple(scale.meta["val"].shape[2:]) != (1, 1):
            continue
        found = schema.arguments(conv)
        with editor.graph.inserting_before(node):
            flat, bias = (editor.call(aten.reshape.default, v, [-1]) for v in (scale, shift))
            if found["bias"] is not None:
                bias = editor.call(aten.addcmul.default, bias, found["bias"], flat)
            column = editor.call(aten.reshape.default, scale, [-1, 1, 1, 1])
            weight = editor.call(aten.mul.Tensor, found["weight"], column)
            made = editor.call_named(conv.target, found | {"weight": weight, "bias": bias})
        editor.replace(node, made, inherit=True)
    return editor.finish()


def _is_point(conv: Any, norm: fx.Node) -> bool:
    """Is it a dense 1x1 convolution of one image that only a norm and its moments read?"""
    if conv.target is not aten.conv2d.default or conv.meta["val"].shape[0] != 1:
        return False
    found, readers = schema.arguments(conv), {user.target for user in conv.users}
    point = found["weight"].meta["val"].shape[2:] == (1, 1) and found["groups"] == 1
    return point and readers == {norm.target, torch.ops.demask.moments.default}


def _picked(program: Program) -> GraphEditor:
    """A copy of the graph whose calls with several outputs are calls with one, where known."""
    editor = GraphEditor(program)
    for node in editor.calls(*_PICKED):
        _pick(editor, node)
    return editor


def _given(graph: fx.Graph, inputs: Mapping[str, Axes] | None) -> dict[fx.Node, Axes]:
    found: dict[fx.Node, Axes] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(value, Tensor):
            continue
        plain: Axes = (2, 3) if value.ndim > 3 else (2, None) if value.ndim == 3 else (None, None)
        pair = plain if inputs is None else inputs.get(node.name, (None, None))
        if pair[0] is not None:
            found[node] = pair
    return found


def _needs(relation: Relation, axes: Mapping[fx.Node, Axes]) -> bool:
    """Must an axis be complete along which the operand is cut, or does a pool leave one of many?"""
    x, made = relation.operands[0].value, relation.node.meta["val"]
    cut = [axis for axis in axes.get(x, (None, None)) if axis is not None]
    if relation.node.target in _POOLS:
        return any(made.shape[axis] == 1 < x.meta["val"].shape[axis] for axis in cut)
    return any(set(relation.ins[0][axis]) & relation.complete for axis in cut)


def _replace(editor: GraphEditor, node: fx.Node) -> None:
    with editor.graph.inserting_before(node):
        made = _RULES[node.target](editor, node, schema.arguments(node))
    if made is not None:
        editor.replace(node, made, inherit=True)


def _unexpand(node: fx.Node) -> None:
    """Let arithmetic read a whole value itself, not widened to the size of what is beside it."""
    for user in [user for user in node.users if user.target in traits.ARITHMETIC]:
        others = [n.meta["val"] for n in user.all_input_nodes if n is not node]
        if any(same_shape(v, user.meta["val"]) for v in others):
            user.replace_input_with(node, node.args[0])  # type: ignore[arg-type]


def _moments_of(editor: GraphEditor, x: fx.Node, dims: list[int]) -> tuple[fx.Node, fx.Node]:
    """The nodes of mean and variance, in float64, their axes one long."""
    both = editor.call(torch.ops.demask.moments.default, x, dims)
    return editor.call(aten.select.int, both, 0, 0), editor.call(aten.select.int, both, 0, 1)


def _deviation(editor: GraphEditor, variance: fx.Node, eps: float) -> fx.Node:
    """1 / sqrt(variance + eps)"""
    return editor.call(aten.rsqrt.default, editor.call(aten.add.Scalar, variance, eps))


def _applied(
    editor: GraphEditor, node: fx.Node, x: fx.Node, scale: fx.Node, shift: fx.Node | None
) -> fx.Node:
    """x * scale + shift, in single precision at least, as torch's norms do."""
    dtype = node.meta["val"].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    scale = _cast(editor, scale, wide)
    if shift is None:
        made = editor.call(aten.mul.Tensor, x, scale)
    else:
        made = editor.call(aten.addcmul.default, _cast(editor, shift, wide), x, scale)
    return _cast(editor, made, dtype)


def _cast(editor: GraphEditor, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    same = node.meta["val"].dtype == dtype
    return node if same else editor.call(aten.to.dtype, node, dtype)


def _channels(
    editor: GraphEditor, node: fx.Node, found: Mapping[str, Any], groups: int, dims: list[int]
) -> fx.Node:
    """The norm over groups of channels: moments per channel, merged in each group."""
    x = found["input"]
    shape = x.meta["val"].shape
    batch, inside = 1 if 0 in dims else shape[0], shape[1] // groups
    mean, variance = _moments_of(editor, x, dims)
    apart = [batch, groups, inside]
    mean, variance = (editor.call(aten.reshape.default, v, apart) for v in (mean, variance))
    if inside > 1:
        mean, variance = _merged(editor, mean, variance)
    scale = _deviation(editor, variance, found["eps"])
    weight, bias = (_by_group(editor, found[name], apart) for name in ("weight", "bias"))
    if weight is not None:
        scale = editor.call(aten.mul.Tensor, weight, scale)
    shift = editor.call(aten.neg.default, editor.call(aten.mul.Tensor, mean, scale))
    if bias is not None:
        shift = editor.call(aten.add.Tensor, bias, shift)
    pair = [_per_channel(editor, v, apart, x.meta["val"].ndim) for v in (scale, shift)]
    return _applied(editor, node, x, *pair)


def _merged(editor: GraphEditor, mean: fx.Node, variance: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Over channels of as many positions each: the mean of means, and of variances and squared
    distances from it."""
    middle = editor.call(aten.mean.dim, mean, [2], True)
    apart = editor.call(aten.square.default, editor.call(aten.sub.Tensor, mean, middle))
    spread = editor.call(aten.add.Tensor, variance, apart)
    return middle, editor.call(aten.mean.dim, spread, [2], True)


def _by_group(editor: GraphEditor, given: fx.Node | None, apart: list[int]) -> fx.Node | None:
    return None if given is None else editor.call(aten.reshape.default, given, [1, *apart[1:]])


def _per_channel(editor: GraphEditor, value: fx.Node, apart: list[int], rank: int) -> fx.Node:
    wide = value if apart[2] == 1 else editor.call(aten.expand.default, value, apart)
    sizes = [apart[0], apart[1] * apart[2], *[1] * (rank - 2)]
    return editor.call(aten.reshape.default, wide, sizes)


def _group_norm(editor: GraphEditor, node: fx.Node, found: Mapping[str, Any]) -> fx.Node | None:
    space = list(range(2, node.meta["val"].ndim))
    return _channels(editor, node, found, found["num_groups"], space) if space else None


def _instance_norm(editor: GraphEditor, node: fx.Node, found: Mapping[str, Any]) -> fx.Node | None:
    if not found["use_input_stats"]:
        return None
    value = node.meta["val"]
    return _channels(editor, node, found, value.shape[1], list(range(2, value.ndim)))


def _is_trained(node: fx.Node) -> bool:
    """A batch norm that uses the statistics of its batch; the table has no line for it."""
    return node.target is aten.batch_norm.default and schema.arguments(node)["training"]


def _batch_norm(editor: GraphEditor, node: fx.Node, found: Mapping[str, Any]) -> fx.Node | None:
    value = node.meta["val"]
    dims = [0, *range(2, value.ndim)]
    return _channels(editor, node, found, value.shape[1], dims)


def _layer_norm(editor: GraphEditor, node: fx.Node, found: Mapping[str, Any]) -> fx.Node:
    x, rank = found["input"], node.meta["val"].ndim
    dims = list(range(rank - len(found["normalized_shape"]), rank))
    mean, variance = _moments_of(editor, x, dims)
    scale = _deviation(editor, variance, found["eps"])
    shift = editor.call(aten.neg.default, editor.call(aten.mul.Tensor, mean, scale))
    return _weighted(editor, node, x, (scale, shift), (found["weight"], found["bias"]))


def _rms_norm(editor: GraphEditor, node: fx.Node, found: Mapping[str, Any]) -> fx.Node:
    """The mean of squares is the variance and the squared mean together."""
    x, rank = found["input"], node.meta["val"].ndim
    dims = list(range(rank - len(found["normalized_shape"]), rank))
    mean, variance = _moments_of(editor, x, dims)
    power = editor.call(aten.add.Tensor, variance, editor.call(aten.square.default, mean))
    eps = found["eps"]
    single = torch.float64 if x.meta["val"].dtype == torch.float64 else torch.float32
    scale = _deviation(editor, power, torch.finfo(single).eps if eps is None else eps)
    return _weighted(editor, node, x, (scale, None), (found["weight"], None))


def _weighted(
    editor: GraphEditor,
    node: fx.Node,
    x: fx.Node,
    norm: tuple[fx.Node, fx.Node | None],
    affine: tuple[fx.Node | None, fx.Node | None],
) -> fx.Node:
    """The norm applied, then a weight and a bias per position."""
    made, (weight, bias) = _applied(editor, node, x, *norm), affine
    if weight is not None and bias is not None:
        made = editor.call(aten.addcmul.default, bias, made, weight)
    elif weight is not None:
        made = editor.call(aten.mul.Tensor, made, weight)
    elif bias is not None:
        made = editor.call(aten.add.Tensor, made, bias)
    return _cast(editor, made, node.meta["val"].dtype)


def _shifted(
    editor: GraphEditor, node: fx.Node, found: Mapping[str, Any]
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """x - max(x), its exponentials, and their sum; half precision in single, as torch does."""
    x, dtype = found["self"], node.meta["val"].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    x = _cast(editor, x, wide)
    dim = found["dim"]
    apart = editor.call(aten.sub.Tensor, x, editor.call(aten.amax.default, x, [dim], True))
    raised = editor.call(aten.exp.default, apart)
    return apart, raised, editor.call(aten.sum.dim_IntList, raised, [dim], True)


def _softmax(editor: GraphEditor, node: fx.Node, found: Mapping[str, Any]) -> fx.Node:
    _, raised, total = _shifted(editor, node, found)
    made = editor.call(aten.div.Tensor, raised, total)
    return _cast(editor, made, node.meta["val"].dtype)


def _log_softmax(editor: GraphEditor, node: fx.Node, found: Mapping[str, Any]) -> fx.Node:
    apart, _, total = _shifted(editor, node, found)
    made = editor.call(aten.sub.Tensor, apart, editor.call(aten.log.default, total))
    return _cast(editor, made, node.meta["val"].dtype)


def _adaptive(editor: GraphEditor, node: fx.Node, found: Mapping[str, Any]) -> fx.Node | None:
    """An adaptive average of all positions along an axis is their mean; along others it stays."""
    x, sizes = found["self"], list(found["output_size"])
    rank = x.meta["val"].ndim
    space = range(rank - len(sizes), rank)
    dims = [k for k, size in zip(space, sizes, strict=True) if size == 1 < x.meta["val"].shape[k]]
    if not dims:
        return None
    mean = editor.call(aten.mean.dim, x, dims, True)
    shape = mean.meta["val"].shape
    if all(shape[k] == size for k, size in zip(space, sizes, strict=True)):
        return mean
    return editor.call(node.target, mean, sizes)


def _whole_pool(editor: GraphEditor, node: fx.Node, found: Mapping[str, Any]) -> fx.Node | None:
    """A pool whose one window is the whole image."""
    x = found["self"]
    size, kernel, padding = x.meta["val"].shape, found["kernel_size"], found["padding"]
    space = list(range(x.meta["val"].ndim - len(kernel), x.meta["val"].ndim))
    inside = [size[k] for k in space]
    kernel = list(kernel) * (len(space) // len(kernel))
    if list(kernel) != inside or any(padding) or math.prod(inside) == 1:
        return None
    if found.get("divisor_override") is not None or any(d != 1 for d in found.get("dilation", ())):
        return None
    reduce = aten.mean.dim if "avg" in str(node.target) else aten.amax.default
    return editor.call(reduce, x, space, True)


def _pick(editor: GraphEditor, node: fx.Node) -> None:
    """Put a call of one output in the place of each output of a call, where one is known."""
    for user in list(node.users):
        if user.target is not operator.getitem:
            continue
        with editor.graph.inserting_before(user):
            made = _PICKED[node.target](editor, node, int(user.args[1]))  # type: ignore[arg-type]
        if made is not None:
            editor.replace(user, made, inherit=True)


def _split(editor: GraphEditor, node: fx.Node, k: int) -> fx.Node | None:
    found, values = schema.arguments(node), schema.outputs(node)
    x, dim = found["self"], found["dim"] % values[0].ndim
    sizes = [value.shape[dim] for value in values]
    if not all(isinstance(size, int) for size in sizes):
        return None
    start = sum(sizes[:k])
    return editor.call(aten.slice.Tensor, x, dim, start, start + sizes[k])


def _unbind(editor: GraphEditor, node: fx.Node, k: int) -> fx.Node:
    found = schema.arguments(node)
    return editor.call(aten.select.int, found["self"], found["dim"], k)


def _spread_and_mean(editor: GraphEditor, node: fx.Node, k: int) -> fx.Node:
    found = schema.arguments(node)
    x, keep = found["self"], found.get("keepdim", False)
    dims = found.get("dim") or list(range(x.meta["val"].ndim))
    if k:
        return editor.call(aten.mean.dim, x, dims, keep)
    less = found["correction"] if "correction" in found else float(found["unbiased"])
    return editor.call(aten.var.correction, x, dims, correction=less, keepdim=keep)


def _extreme(editor: GraphEditor, node: fx.Node, k: int) -> fx.Node:
    """Values and places of the largest or smallest along an axis."""
    found, largest = schema.arguments(node), node.target is aten.max.dim
    x, dim, keep = found["self"], found["dim"], found["keepdim"]
    if k == 0:
        return editor.call(aten.amax.default if largest else aten.amin.default, x, [dim], keep)
    return editor.call(aten.argmax.default if largest else aten.argmin.default, x, dim, keep)


def _adaptive_max(editor: GraphEditor, node: fx.Node, k: int) -> fx.Node | None:
    found = schema.arguments(node)
    x, sizes = found["self"], list(found["output_size"])
    if k or any(size != 1 for size in sizes):
        return None
    rank = x.meta["val"].ndim
    return editor.call(aten.amax.default, x, list(range(rank - len(sizes), rank)), True)


_PICKED: dict[Any, Callable[[GraphEditor, fx.Node, int], fx.Node | None]] = {
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.chunk.default: _split,
    aten.tensor_split.sections: _split,
    aten.tensor_split.indices: _split,
    aten.unbind.int: _unbind,
    aten.var_mean.correction: _spread_and_mean,
    aten.var_mean.dim: _spread_and_mean,
    aten.var_mean.default: _spread_and_mean,
    aten.max.dim: _extreme,
    aten.min.dim: _extreme,
    **dict.fromkeys(traits.ADAPTIVE_MAX_POOLS, _adaptive_max),
}
_POOLS: dict[Any, _Rule] = {
    **dict.fromkeys(traits.ADAPTIVE_AVERAGE_POOLS, _adaptive),
    **dict.fromkeys((*traits.AVERAGE_POOLS, *traits.MAX_POOLS), _whole_pool),
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

__all__ = ["ENTRIES", "folded_scale", "global_calls", "moments", "parted", "with_reductions"]
