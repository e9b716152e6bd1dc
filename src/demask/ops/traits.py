"""Families of ATen ops, each stated once and used by all engines.

Ops with windows are mapped to the number of axes that their windows slide along.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from demask.ops import TABLE
from demask.ops.entries import contraction as contract
from demask.ops.entries import movement as move
from demask.ops.entries import window

aten = torch.ops.aten


def aten_op(name: str) -> Any:
    """The ATen op with a name.

    >>> aten_op("relu.default") is torch.ops.aten.relu.default
    True
    """
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload)


def _ops(names: str) -> frozenset[Any]:
    """The ATen ops with these names, separated by blanks."""
    return frozenset(map(aten_op, names.split()))


def _by_axes(kind: str, overload: str = "default") -> dict[Any, int]:
    """The table's ops of a kind ("conv") -> 1, 2 or 3 axes, in this order."""
    pattern = re.compile(rf"aten\.({kind}(\d)d\.({overload}))")
    matches = (pattern.fullmatch(name) for name, _ in (*contract.ENTRIES, *window.ENTRIES))
    return {aten_op(match[1]): int(match[2]) for match in matches if match}


# Convolutions whose padding is numbers; and those whose padding is a name ("same") as well.
CONVOLUTIONS = _by_axes("conv")
CONVOLUTIONS_ANY_PADDING = {**CONVOLUTIONS, **_by_axes("conv", "padding")}
TRANSPOSED_CONVOLUTIONS = _by_axes("conv_transpose", "default|input")
MAX_POOLS = _by_axes("max_pool")
AVERAGE_POOLS = _by_axes("avg_pool")
ADAPTIVE_AVERAGE_POOLS = _by_axes("adaptive_avg_pool")
ADAPTIVE_MAX_POOLS = _by_axes("adaptive_max_pool")
# Pools with one output, which is zero where the input is.
POOLS = {**ADAPTIVE_AVERAGE_POOLS, **AVERAGE_POOLS, **MAX_POOLS}
# Sums, means and maxima over axes, which parts of a value have, too.
SUMS, MEANS, MAXIMA = _ops("sum.default sum.dim_IntList"), _ops("mean.default mean.dim"), _ops("amax.default")
# Layers and norms of vectors along the last axis; products of two values.
OVER_LAST_AXIS = _ops("linear.default layer_norm.default rms_norm.default")
PRODUCTS_OF_VALUES = _ops("matmul.default bmm.default")
CONV_OF_AXES = {axes: op for op, axes in CONVOLUTIONS.items()}
AVERAGE_POOL_OF_AXES = {axes: op for op, axes in AVERAGE_POOLS.items()}
# Layers: contractions of one input with a weight -> the weight's axis of output channels.
OUTPUT_AXIS = {**dict.fromkeys((*CONVOLUTIONS, aten.linear.default), 0), **dict.fromkeys(TRANSPOSED_CONVOLUTIONS, 1)}

# Elements in the same row-major order, in another shape.
RESHAPES = _ops(" ".join(name.removeprefix("aten.") for name, entry in move.ENTRIES if entry.line is move.view))
SQUEEZES = _ops("squeeze.default squeeze.dim squeeze.dims")
# Reshapes that may split axes; among these: those that refuse strides that would require a copy,
# and those that users write.
SPLITS_OF_AXES = RESHAPES - SQUEEZES - {aten.flatten.using_ints}
VIEWS = _ops("view.default _unsafe_view.default")
VIEW_OR_RESHAPE = _ops("view.default reshape.default")
# Axes in another order; and the two axes of a matrix exchanged.
TRANSPOSES = _ops("transpose.int permute.default")
MATRIX_TRANSPOSES = _ops("t.default numpy_T.default mT.default")
# Ops that take one position of an axis and drop the axis; all ops that take positions of one axis.
SELECTS = _ops("select.int unbind.int")
TAKES = SELECTS | _ops("""chunk.default split.Tensor split_with_sizes.default slice.Tensor
                          narrow.default""")
PADS = _ops("constant_pad_nd.default pad.default")
# Names: each element of the output is an element of the first operand.
MOVES = frozenset(name for name, _ in move.ENTRIES if "pad" not in name) - {
    "aten.cat.default",
    "aten.slice_scatter.default",
}
# The operand itself, in its memory; or in memory that may be new.
ALIASES = _ops("alias.default detach.default")
COPIES = _ops("clone.default contiguous.default")
IDENTITIES = ALIASES | COPIES
DROPOUTS = _ops("dropout.default feature_dropout.default")
# Matrices that share the memory of their operand; and other values that do.
TRANSPOSED_VIEWS = TRANSPOSES | MATRIX_TRANSPOSES | ALIASES
MEMORY_VIEWS = TRANSPOSED_VIEWS | _ops("""view.default unsqueeze.default squeeze.dim select.int
                                          slice.Tensor expand.default""")
# Ops that repeat positions of axes of size one.
EXPANSIONS = _ops("expand.default")
# Names: the output never shares memory with an operand, although the op may decompose into ops that
# include views (norms, softmax, windows); the same for products of two operands or more.
OWN_MEMORY = frozenset(name for name, entry in TABLE.items() if entry.affine or entry.rest or entry.region)
SUMS_OF_PRODUCTS = frozenset(name for name, entry in TABLE.items() if entry.fill in ("sum", "mix"))
# By name: (operand that is indexed, argument of its axis, operand of positions along it).
INDEXED = {
    "aten.embedding.default": (0, None, 1),
    "aten.index_select.default": (0, 1, 2),
    "aten.gather.default": (0, 1, 2),
}

# Tensors of zeros of sizes that are arguments; tensors of zeros; tensors of one number.
SIZED_ZEROS = _ops("zeros.default new_zeros.default")
ZEROS = SIZED_ZEROS | {aten.zeros_like.default}
FULLS = _ops("full.default new_full.default full_like.default")

# Sums of two tensors -> the sign of the second. Products, whose operands may be exchanged.
SUM_SIGNS: Mapping[Any, int] = {aten.add.Tensor: 1, aten.sub.Tensor: -1}
ADDS = _ops("add.Tensor add_.Tensor")
MULTIPLICATIONS = _ops("mul.Tensor mul.Scalar")
DIVISIONS = _ops("div.Tensor div.Scalar")
COMMUTATIVE = _ops("add.Tensor mul.Tensor")
ARITHMETIC = COMMUTATIVE | _ops("sub.Tensor div.Tensor")
WHERES = _ops("where.self where.ScalarOther where.ScalarSelf")
RELUS = _ops("relu.default relu6.default")  # 0 for all that is below 0
CLAMPS = _ops("clamp.default clamp_min.default hardtanh.default")  # a lower bound as an argument
# Ops that join branches at positions of an axis.
JOINS = _ops("index_add.default cat.default")
# Ops that preserve the memory format of images, in addition to pointwise ops.
FORMAT_PRESERVING = _ops("batch_norm.default max_pool2d.default avg_pool2d.default cat.default")
# Norms -> the argument that selects the statistics of the batch.
BATCH_STATISTICS: Mapping[Any, str] = {
    aten.batch_norm.default: "training",
    aten.instance_norm.default: "use_input_stats",
}
# Ops of a tensor and a number -> the op of two tensors.
OF_TWO_TENSORS: Mapping[Any, Any] = {
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
    **{
        aten_op(f"{name}.Scalar"): aten_op(f"{name}.Tensor")
        for name in ("remainder", "bitwise_and", "bitwise_or", "bitwise_xor")
    },
    **{
        aten_op(f"__{name}__.Scalar"): aten_op(f"bitwise_{to}.Tensor")
        for name, to in (
            ("and", "and"),
            ("or", "or"),
            ("xor", "xor"),
            ("lshift", "left_shift"),
            ("rshift", "right_shift"),
        )
    },
}
# Ops whose numbers torch.export passes to ops of a tensor and a number when it decomposes them.
DECOMPOSED_WITH_NUMBERS = _ops("""addbmm.default addcdiv.default addcmul.default addmm.default
    addmv.default addr.default baddbmm.default celu.default elu.default hardtanh.default
    leaky_relu.default softplus.default""")

# Norms whose statistics may be over the image, by their arguments.
IMAGE_NORMS = frozenset({aten.group_norm.default, aten.instance_norm.default, aten.batch_norm.default})
