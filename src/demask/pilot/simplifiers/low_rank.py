"""Weights of low rank: a layer becomes two thin ones.

    W ~ B A,   linear(x, W) ~ linear(linear(x, A), B),   A: (r, i), B: (o, r)

A convolution is a matrix (o, i·k·k): A is a convolution of the same windows to r channels, B one of
1 x 1. The factors are those of the singular value decomposition, the best of their rank in the
Frobenius norm (Eckart and Young 1936).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from demask.errors import BadInput
from demask.facts.analysis import Analysis
from demask.graph.editor import GraphEditor
from demask.graph.result.demasked_module import Demasked
from demask.numerics import is_number
from demask.ops import schema
from demask.ops.traits import CONV_OF_AXES, CONVOLUTIONS_ANY_PADDING
from demask.pilot.weight_layers import WeightLayer, by_rows, check_finite, from_rows, layers_of
from demask.shrink.build_uncut import build_uncut

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class LowRank:
    """A simplifier that replaces each weight matrix by the nearest matrix of a lower rank.

    A simplifier derives a cheaper network from a network. The factors are those of the truncated
    singular value decomposition, the best of their rank in the Frobenius norm (Eckart and Young
    1936). A linear layer or convolution becomes two smaller layers where these need fewer
    multiply-adds; elsewhere the layer remains, with the product of the factors as its weight.
    Grouped and recurrent layers do not change. Pass `LowRank(0.25)`, or its text "rank:0.25", as
    `by` of `simplify` and `compare`.

    Args:
        fraction: the new rank divided by the full rank (the smaller side of the matrix), above 0,
            at most 1; the rank is rounded and at least 1.

    Raises:
        BadInput: `fraction` is out of range; when the simplifier is applied: a weight contains Inf
            or NaN.

    Example:
        >>> import torch
        >>> from demask.pilot import LowRank, simplify
        >>> net = torch.nn.Sequential(torch.nn.Linear(16, 16)).eval()
        >>> thin = simplify(net, (torch.zeros(1, 16),), by=LowRank(0.25))  # 16 to 4 to 16
        >>> sum(p.numel() for p in net.parameters()), sum(p.numel() for p in thin.parameters())
        (272, 144)
    """

    fraction: float

    def __post_init__(self) -> None:
        if not is_number(self.fraction) or not 0 < self.fraction <= 1:
            raise BadInput(
                f"expected a fraction of the rank above 0 and up to 1, got {self.fraction!r}; such as 'rank:0.25'"
            )

    def text(self) -> str:
        """The simplifier's text, such as "rank:0.25"."""
        return f"rank:{self.fraction:g}"

    def applied(self, analysis: Analysis) -> Demasked:
        """The network with factored layers; `demasked.notes` has a line per layer.

        Args:
            analysis: facts about the captured network, which is not changed.

        Raises:
            BadInput: a weight contains Inf or NaN.
        """
        editor = GraphEditor(analysis.program)
        layers = layers_of(analysis.again(editor.finish()))
        notes = [note for layer in layers for note in self._factor_layer(editor, layer)]
        return build_uncut(analysis, editor.finish(), notes)

    def weight_bytes(self, weight: Tensor, rows: int) -> float:
        """Bytes of one weight in its own dtype.

        Args:
            weight: a tensor of any shape.
            rows: not used.
        """
        return weight.numel() * weight.element_size()

    def _factor_layer(self, editor: GraphEditor, layer: WeightLayer) -> Iterator[str]:
        weight = editor.constants[layer.weight].tensor
        if layer.relation.back or schema.arguments(layer.node).get("groups", 1) != 1:
            kind = "recurrent" if layer.relation.back else "grouped"
            yield f"{layer.name}: a {kind} layer keeps its rank"
            return
        check_finite(weight, editor.constants[layer.weight].name)
        matrix = by_rows(weight, layer.rows)
        count, columns = matrix.shape
        rank = max(1, round(self.fraction * min(count, columns)))
        basis, mixed = factors(matrix, rank)
        thin = rank * (count + columns) < count * columns
        if not (thin and _split_call(editor, layer, basis, mixed)):
            product = from_rows(mixed @ basis, weight, layer.rows)
            read = editor.replace_constant(layer.read, product, layer.node)
            layer.node.replace_input_with(layer.read, read)
        form = "two layers" if thin else "one product"
        yield f"{layer.name}: rank {rank} of {min(count, columns)}, {form}"


def factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(A, B) of shapes (rank, columns) and (rows, rank) with B @ A the nearest matrix of that rank;
    each has the square roots of the singular values as a factor. Computed in float64."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    root = values[:rank].sqrt()
    return root[:, None] * right[:rank], left[:, :rank] * root


def _split_call(editor: GraphEditor, layer: WeightLayer, basis: Tensor, mixed: Tensor) -> bool:
    """Replace one call by two; False for ops for which that is not implemented."""
    node, weight = layer.node, editor.constants[layer.weight].tensor
    rank = len(basis)
    arguments = schema.arguments(node)

    def thin(tensor: Tensor) -> fx.Node:
        name = f"{layer.name}.basis.weight"
        return editor.add_constant(name, tensor.to(weight.dtype), node, parameter=True)

    def wide(tensor: Tensor) -> fx.Node:
        return editor.replace_constant(layer.read, tensor.to(weight.dtype).contiguous(), node)

    if layer.operand == 1 and node.target is aten.linear.default:
        first = editor.insert(node, None, node.target, arguments["input"], thin(basis))
        parts = [first, wide(mixed), *([arguments["bias"]] if arguments["bias"] else [])]
        call = editor.insert(node, node, node.target, *parts)
    elif layer.operand == 1 and node.target in CONVOLUTIONS_ANY_PADDING:
        kernel = basis.reshape(rank, *weight.shape[1:])
        args, kwargs = schema.bind_arguments(node.target, arguments | {"weight": thin(kernel), "bias": None})
        first = editor.insert(node, None, node.target, *args, **kwargs)
        point = mixed.reshape(len(mixed), rank, *[1] * (weight.ndim - 2))
        plain = CONV_OF_AXES[weight.ndim - 2]
        call = editor.insert(node, node, plain, first, wide(point), arguments["bias"])
    elif node.target is aten.addmm.default and layer.operand == 2:
        first = editor.insert(node, None, aten.mm.default, arguments["mat1"], thin(basis.T))
        call = editor.repeat_call(node, mat1=first, mat2=wide(mixed.T))
    else:
        return False
    editor.replace(node, call)
    return True
