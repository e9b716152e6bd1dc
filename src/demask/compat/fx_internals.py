"""How torch.fx generates code and stores the call signature of a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.graph import _PyTreeCodeGen as PyTreeCodeGen
from torch.fx.graph import _PyTreeInfo as PyTreeInfo

__all__ = ["FUNCTIONS", "NN_FUNCTIONS", "NN_PATH", "PyTreeCodeGen", "PyTreeInfo", "codegen_of", "signature_of"]

# torch's bindings of ops: the functions of `torch` and of `torch.nn.functional`.
_C: Any = torch._C
FUNCTIONS, NN_FUNCTIONS = _C._VariableFunctions, _C._nn
NN_PATH = "torch._C._nn"  # of NN_FUNCTIONS, in generated code


def codegen_of(graph: fx.Graph) -> Any:
    """The code generator of a graph."""
    return graph._codegen


def signature_of(graph: fx.Graph) -> Any:
    """The PyTreeInfo of a graph: names of arguments, pytree specs of arguments and of the result.

    Raises AttributeError for a graph that torch.fx traced, which has none.
    """
    return codegen_of(graph).pytree_info
