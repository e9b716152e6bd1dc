"""Writing of demasked networks as .pt2, which torch reads without demask; reading of models."""

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
from demask.files import archive
from demask.files.atomic_write import check_writable, write
from demask.files.bounded_read import open_zip, other_kind
from demask.files.pt2_gate import open_pt2
from demask.files.retrace import example, export_graph
from demask.graph.isolation import in_isolation
from demask.graph.module_copy import structural_copy
from demask.graph.provenance import provenance_of
from demask.graph.result.class_result import as_graph
from demask.graph.result.demasked_module import Demasked
from demask.ops.custom import custom_op_of


@in_isolation
@public
def to_pt2(slim: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a demasked network, in eval mode, to a .pt2 file that `torch.export.load` reads.

    Reading it needs torch only, not demask. Sizes that are dynamic in the network are dynamic in
    the file, too. The file contains no example inputs and no paths of this machine.

    Args:
        slim: a network with the attribute `demasked`, a result of demask's functions.
        path: name of the file, which is replaced if it exists.

    Raises:
        BadInput: `slim` has no attribute `demasked`, or the file cannot be written.
        NotExportable: torch.export cannot capture the network.

    Example:
        >>> import tempfile, torch, demask
        >>> slim = demask.demask(torch.nn.Linear(4, 2).eval(), (torch.zeros(1, 4),))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     demask.to_pt2(slim, f"{folder}/net.pt2")
        ...     again = torch.export.load(f"{folder}/net.pt2").module()
        >>> torch.allclose(slim(torch.ones(1, 4)), again(torch.ones(1, 4)))
        True
    """
    check_writable(path)
    provenance_of(slim)
    graph: Any = as_graph(slim)
    if isinstance(graph, Demasked):
        graph = lower_own_ops(graph.plain())  # runs on any torch and machine
    exported = export_graph(graph)
    _strip_debug_metadata(exported)
    if exported._guards_code:  # torch tests guards only if it has an example: zeros, stored once
        exported._example_inputs = pytree.tree_map_only(
            Tensor, lambda x: torch.zeros((), dtype=x.dtype).expand(x.shape), example(graph)[:2]
        )
    with write(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export warns of its own internals
        target: Any = _DeferredErrors(file)
        torch.export.save(exported, target)
        if target.failure is not None:
            raise target.failure


class _DeferredErrors(io.RawIOBase):
    """A file that never raises, because torch's writer aborts the process if `write` raises.
    failure: the first error; later data is not written."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.failure: BaseException | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, *_: Any) -> int:
        """Ignored: torch seeks to the beginning when all is written."""
        return 0

    def write(self, data: Any) -> int:
        if self.failure is None:
            try:
                self.file.write(data)
            except BaseException as error:  # KeyboardInterrupt too
                self.failure = error
        return len(data)


def lower_own_ops(slim: Demasked) -> Demasked:
    """The network with demask's own ops replaced by the ATen calls that define them."""
    if not any(custom_op_of(node.target) for node in slim.graph.nodes):
        return slim
    copy: Any = structural_copy(slim, share=True)
    for node in copy.graph.nodes:
        own = custom_op_of(node.target)
        node.target = node.target if own is None else own.run
    copy.recompile()
    return copy


def read_model(path: str | os.PathLike[str], *, namespaces: Collection[str] = ()) -> ExportedProgram | fx.GraphModule:
    """The model in the file at `path`: a demasked GraphModule, or the ExportedProgram of a .pt2.

    The content decides, not the suffix. Errors as `archive.load` and `gate.open_pt2`; those for
    TorchScript, pickles and files of weights say what to do.
    """
    try:
        with open_zip(path) as file:
            demasked = archive.GRAPH in file.namelist()
        return archive.load(path) if demasked else open_pt2(path, namespaces=namespaces)
    except BadInput as error:
        if kind := other_kind(path):
            raise BadInput(f"{path}: expected a .pt2 or .demask file, got {kind}") from error
        raise


def _strip_debug_metadata(exported: ExportedProgram) -> None:
    """Remove debugging metadata: stack traces name files of this machine."""
    for module in exported.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.meta = {k: v for k, v in node.meta.items() if k in ("val", "nn_module_stack")}
    exported._example_inputs = None
