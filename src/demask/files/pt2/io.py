"""Demasked networks as .pt2 files, which any torch reads without demask; and reading both kinds."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Collection
from typing import Any, BinaryIO

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.failures import public
from demask.files.archive import archive
from demask.files.atomic_write import check_writable, write
from demask.files.bounded_read import open_zip
from demask.files.file_kinds import other_kind
from demask.files.pt2.gate import open_pt2
from demask.files.retrace import example, traced
from demask.graph.module_copy import structural_copy
from demask.graph.result.class_result import as_graph
from demask.graph.result.demasked_module import Demasked
from demask.ops.custom import own_of


@public
def to_pt2(slim: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a demasked network, in eval mode, as a .pt2 that plain torch.export.load reads.

    Dimensions that `slim.demasked.inputs` names stay dynamic; sizes that the network refuses, the
    file refuses. No inputs of yours and no paths of this machine are in the file. NotExportable:
    torch.export does not take the network.
    """
    check_writable(path)
    graph: Any = as_graph(slim)
    if isinstance(graph, Demasked):
        graph = spelled_out(graph.plain())  # what another torch and machine can run
    exported = traced(graph)
    _strip(exported)
    if exported._guards_code:  # torch tests those where there is an example: zeros, stored once
        exported._example_inputs = pytree.tree_map_only(Tensor, _one_zero, example(graph)[:2])
    with write(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export warns of its own internals
        patient: Any = _Patient(file)
        torch.export.save(exported, patient)
        if patient.failure is not None:
            raise patient.failure


def _one_zero(x: Tensor) -> Tensor:
    return torch.zeros((), dtype=x.dtype).expand(x.shape)


class _Patient(io.RawIOBase):
    """A file for torch's writer, which ends the process where writing raises. failure: the first
    error, after which nothing more is written."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.failure: BaseException | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, *_: Any) -> int:
        """To the beginning, when all is written; of no use here."""
        return 0

    def write(self, data: Any) -> int:
        if self.failure is None:
            try:
                self.file.write(data)
            except BaseException as error:  # KeyboardInterrupt too
                self.failure = error
        return len(data)


def spelled_out(slim: Demasked) -> Demasked:
    """The network with demask's own ops as the arithmetic that they stand for."""
    if not any(own_of(node.target) for node in slim.graph.nodes):
        return slim
    twin: Any = structural_copy(slim, share=True)
    for node in twin.graph.nodes:
        own = own_of(node.target)
        node.target = node.target if own is None else own.run
    twin.recompile()
    return twin


def read_model(
    path: str | os.PathLike[str], *, namespaces: Collection[str] = ()
) -> ExportedProgram | fx.GraphModule:
    """The model in the file at `path`: a demasked GraphModule, or the ExportedProgram of a .pt2.

    The content decides, not the suffix. Errors as `archive.load` and `pt2_gate.open_pt2`; of
    TorchScript, pickles and files of weights they say what to do.
    """
    try:
        with open_zip(path) as file:
            demasked = archive.GRAPH in file.namelist()
        return archive.load(path) if demasked else open_pt2(path, namespaces=namespaces)
    except BadInput as error:
        if kind := other_kind(path):
            raise BadInput(f"{path}: expected a .pt2 or .demask file, found {kind}") from error
        raise


def _strip(exported: ExportedProgram) -> None:
    """Leave out what only debugging needs: stack traces name files of this machine."""
    for module in exported.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.meta = {k: v for k, v in node.meta.items() if k in ("val", "nn_module_stack")}
    exported._example_inputs = None
