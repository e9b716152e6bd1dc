"""Candidates of a network whose linear layers multiply few vectors at a time: with packed weights.

Segments multiply in float32; these layers are in any dtype that `products.packed` stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Tensor, fx

from demask.facts.analysis import Analysis
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.kernels.llvm import availability as llvm
from demask.ops import Table, schema
from demask.shrink.program_size import sum_macs
from demask.sparse.csr_matrix import NUMBERS
from demask.sparse.packed_linear import PACKED_LINEAR
from demask.sparse.products.form_choice import chosen_form
from demask.sparse.products.packed import FORMS, pack
from demask.sparse.segment.build_segments import StoredLayer
from demask.tune.candidates import Candidate
from demask.tune.layer_costs import LayerCosts

PACKED, ZEROS = "packed layers", "packed layers, with their zeros"
FEW = 8  # vectors at most
LEAST_SHARE = 0.5  # of the multiply-adds of a network, in layers with few vectors


def packed_candidates(
    program: Program, asker: LayerCosts, table: Table, tell: Callable[[str], object]
) -> Iterator[Candidate]:
    """The program with packed layers, if most of its multiply-adds are in layers with few vectors: in
    the form that takes the least time from memory, and with all zeros, which may take less from
    caches."""
    editor = GraphEditor(program)
    work = sum(vectors * weight.numel() for weight, vectors in _few_vectors(editor, asker).values())
    if not work or not llvm.is_installed():
        return
    if work < LEAST_SHARE * sum_macs(Analysis(program, table).relations, asker.example):
        return
    tell("measuring packed layers")
    packed = pack_layers(program, asker)
    yield Candidate(PACKED, packed)
    if any(schema.arguments(node)["form"] != "dense" for node in GraphEditor(packed).calls(PACKED_LINEAR)):
        yield Candidate(ZEROS, pack_layers(program, asker, "dense"))


def pack_layers(program: Program, asker: LayerCosts, form: str | None = None) -> Program:
    """The program with the linear layers packed that multiply few vectors on the example. form: of all
    weights. Default: of each the one that takes the least time from memory."""
    editor = GraphEditor(program)
    for node, (weight, vectors) in _few_vectors(editor, asker).items():
        x, read, bias = (schema.arguments(node)[name] for name in ("input", "weight", "bias"))
        (rows, columns), density = weight.shape, int(weight.count_nonzero()) / weight.numel()
        best = form or chosen_form((rows, columns), density, weight.dtype, vectors, costs=asker.costs)
        packed = pack(weight, best)
        name = editor.constants[str(read.target)].name.rpartition(".")[0]
        tensors = [
            editor.add_constant(f"{name}.{part}".lstrip("."), tensor, node, parameter=tensor.is_floating_point())
            for part, tensor in zip(FORMS[packed.form], packed.tensors, strict=True)
        ]
        call = editor.insert(node, node, PACKED_LINEAR, x, tensors, None, bias, packed.form, *packed.size)
        editor.replace(node, call)
    return editor.finish()


def _few_vectors(editor: GraphEditor, asker: LayerCosts) -> dict[fx.Node, tuple[Tensor, int]]:
    """The linear layers that multiply few vectors on the example, with a weight of their own: it, and
    how many."""
    layers = {}
    for node in editor.calls(torch.ops.aten.linear.default):
        x, read = (schema.arguments(node)[name] for name in ("input", "weight"))
        weight, vectors = editor.tensor(read), prod(asker.shape(x)[:-1])
        if weight is None or not weight.is_floating_point() or weight.dtype not in NUMBERS or not weight.is_cpu:
            continue
        if 0 < vectors <= FEW and weight.numel() and len(read.users) == 1:
            layers[node] = weight.detach(), vectors
    return layers


def packed_layers_of(program: Program) -> list[StoredLayer]:
    """The packed layers of a program, for the sizes of the example inputs."""
    editor, layers = GraphEditor(program), []
    for node in editor.calls(PACKED_LINEAR):
        arguments = schema.arguments(node)
        constant = editor.constants[str(arguments["tensors"][0].target)]
        stored, weights = constant.tensor.numel(), arguments["rows"] * arguments["columns"]
        vectors = prod(program.example.shape(arguments["x"])[:-1])
        layers.append(StoredLayer(constant.name.rpartition(".")[0], stored, weights, stored * vectors))
    return layers
