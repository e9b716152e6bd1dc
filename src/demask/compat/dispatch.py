"""Ops, their schemas, and the dispatch modes that are active."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "OWN_TYPES",
    "BelowAutograd",
    "OpOverload",
    "TorchDispatchMode",
    "base_name",
    "count_dispatch_modes",
    "count_function_modes",
    "has_composite_kernel",
    "has_functorch_transforms",
    "has_kernel",
    "has_schema",
    "is_mutable",
    "needs_no_dispatch",
    "overload_name",
    "peek_interpreter_stack",
    "read_schema",
    "schema_of",
    "tracing_state",
]

BelowAutograd = torch._C._AutoDispatchBelowAutograd
count_dispatch_modes = torch._C._len_torch_dispatch_stack
count_function_modes = torch._C._len_torch_function_stack
has_functorch_transforms = torch._C._are_functorch_transforms_active
tracing_state = torch._C._get_tracing_state  # of torch.jit; None if it does not trace
OWN_TYPES = (Tensor, torch.nn.Parameter)
has_kernel = torch._C._dispatch_has_kernel  # by the name of an overload: "aten::add.Tensor"
read_schema = torch._C._get_schema  # by the name of an op, "aten::add", and of an overload


def needs_no_dispatch(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a call of an op for the CPU may run its implementation at once: nothing records, traces or
    transforms the call, and the tensors are of torch's own types, on the CPU. Dispatch of an op that is
    written in Python takes 10 to 100 µs."""
    if torch.compiler.is_compiling() or tracing_state() is not None:
        return False
    if count_dispatch_modes() or count_function_modes() or has_functorch_transforms():
        return False
    records = torch.is_grad_enabled()
    for t in tensors:
        if t is not None and (type(t) not in OWN_TYPES or not t.is_cpu or (records and t.requires_grad)):
            return False
    return True


def schema_of(op: Any) -> Any:
    """The schema of an overload: arguments, returns and which of them share memory."""
    return op._schema


def has_schema(target: Any) -> bool:
    """Whether the target of a node is an overload of an op, not a Python function."""
    return hasattr(target, "_schema")


def is_mutable(op: Any) -> bool:
    """Whether an overload writes to one of its arguments."""
    return op._schema.is_mutable


def base_name(op: Any) -> str:
    """The name of an op without namespace and overload.

    >>> base_name(torch.ops.aten.add.Tensor)
    'add'
    """
    return op._opname


def overload_name(op: Any) -> str:
    """The name of an overload.

    >>> overload_name(torch.ops.aten.add.Tensor)
    'Tensor'
    """
    return op._overloadname


def has_composite_kernel(op: Any) -> bool:
    """Whether an overload is implemented by calls of other ops on every device."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
