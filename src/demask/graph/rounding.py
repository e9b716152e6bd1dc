"""The rounding error of a network, estimated by random perturbation.

Each call of the network is run in float64, and its output is perturbed by one rounding error of the
network's own dtype. Outputs that cancel, or divide by small numbers, change much: two correct
implementations then differ as much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from demask.compat.dispatch import TorchDispatchMode
from demask.graph.module_copy import structural_copy
from demask.graph.result.module_calls import lower_modules
from demask.numerics import NARROW, to_double, to_wide
from demask.ops import Table, op_name

SEEDS = 4
# Runtimes approximate these with an error relative to 1, not to the value: exp(x) - 1, for example.
# The numbers are how many rounding errors that is in float32, for which the approximations are
# chosen; ONNX Runtime 1.31 has 1.4 in sigmoid, 2.7 in tanh, at most 1.3 in the others.
_NEAR_ONE = {"sigmoid": 2, "tanh": 3, "erf": 2, "hardsigmoid": 2, "elu": 2, "celu": 2, "selu": 2}
# ONNX Runtime adds float32 term by term: n errors add up to about sqrt(n).
_SUMS = frozenset(("sum", "mean"))
_CASTS = frozenset(("to", "_to_copy", "convert_element_type"))
_POINTWISE = frozenset(("... -> ...", "..., ... -> ...", "..., ..., ... -> ..."))
_SMOOTH = frozenset(("silu", "gelu", "hardswish"))  # an operand times one of these


class Rounding:
    """The outputs of a network in float64, exact and with every call perturbed."""

    def __init__(self, module: fx.GraphModule, table: Table) -> None:
        self.module, self.table = module, table

    @cached_property
    def double(self) -> fx.GraphModule:
        """A copy of the network in float64, including dtypes among the arguments of calls."""
        double: Any = structural_copy(self.module, share=False)
        lower_modules(double.graph, double)
        return to_wide(double)

    def runs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[list[Any]]:
        """The flat outputs of one call: first exact, then SEEDS times perturbed by the rounding of
        the least precise float type of the network; each run is computed on demand."""
        dtype = _narrowest(self.module, args, kwargs)
        inputs = [
            leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
            for leaf in pytree.tree_leaves((args, kwargs))
        ]
        for seed in range(SEEDS + 1):
            run = _Rounded(self.double, dtype if seed else None, seed, self.table)
            with torch.no_grad():
                yield pytree.tree_leaves(run.run(*inputs, enable_io_processing=False))


def _narrowest(module: fx.GraphModule, args: Any, kwargs: Any) -> torch.dtype:
    """The least precise float type of the tensors and inputs, and among the arguments of calls."""
    leaves = [n for node in module.graph.nodes for n in pytree.tree_leaves((node.args, node.kwargs))]
    dtypes = [leaf for leaf in leaves if leaf in NARROW]
    tensors = [*module.parameters(), *module.buffers(), *pytree.tree_leaves((args, kwargs))]
    dtypes += [t.dtype for t in tensors if isinstance(t, Tensor) and t.is_floating_point()]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


class _Rounded(fx.Interpreter):
    """Runs a graph and moves each call's output to the next number above or below, at random."""

    def __init__(self, module: fx.GraphModule, dtype: torch.dtype | None, seed: int, table: Table):
        super().__init__(module)
        self.unit, self.draw = dtype and torch.finfo(dtype), torch.Generator().manual_seed(seed)
        self.table = table

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op not in ("call_function", "call_module") or self.unit is None:
            return value
        unit, operands = self.unit, [self.env[operand] for operand in n.all_input_nodes]
        operands = [x for x in operands if isinstance(x, Tensor)]
        return pytree.tree_map(lambda leaf: self._rounded(n, leaf, operands, unit), value)

    def _rounded(self, node: fx.Node, value: Any, operands: Sequence[Tensor], unit: torch.finfo) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return value
        is_single = unit.dtype == "float32"
        if (scale := _scale(node, value, operands, self.table, is_single)) is None:
            return value
        up = torch.randint(0, 2, value.shape, generator=self.draw, dtype=torch.int8)
        return value + (2 * up - 1).to(value) * (unit.eps * (scale + unit.tiny))


def _scale(
    node: fx.Node, value: Tensor, operands: Sequence[Tensor], table: Table, is_single: bool
) -> Tensor | float | None:
    """The magnitude that a call's rounding error is relative to: of each element, or of the largest
    output for sums; None if the call only moves values, or converts integers."""
    name = op_name(node.target)
    entry, base = table.get(name), name.split(".")[1] if "." in name else name
    if entry is not None and entry.fill == "same":
        return None
    if base in _CASTS and not any(x.is_floating_point() for x in operands):
        return None
    if base in _NEAR_ONE:
        return value.abs().clamp(min=1) * (_NEAR_ONE[base] if is_single else 1)
    if entry is not None and entry.line in _POINTWISE and base not in _SMOOTH:
        return value.abs()
    finite = value[value.isfinite()]
    largest = finite.abs().max() if finite.numel() else 0.0
    if base not in _SUMS or not is_single:
        return largest
    terms = max((x.numel() for x in operands), default=1) / value.numel()
    return largest * max(terms, 1) ** 0.5


class _NarrowFloats(TorchDispatchMode):
    """Records whether a call returns floats narrower than float64."""

    is_narrow = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves(result)
        self.is_narrow |= any(isinstance(t, Tensor) and t.dtype in NARROW for t in leaves)
        return result


class _UnstatedEpsilon(TorchFunctionMode):
    """Records whether code calls an RMS norm without `eps`, which is then that of the dtype."""

    is_met = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.rms_norm, torch.nn.functional.rms_norm):
            eps = args[3] if len(args) > 3 else (kwargs or {}).get("eps")
            self.is_met |= eps is None
        return func(*args, **(kwargs or {}))


def narrows(network: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a network in float64 computes narrower floats, or with another epsilon, or cannot run
    since its code casts."""
    inputs = pytree.tree_map(to_double, (args, kwargs))
    with torch.no_grad(), _NarrowFloats() as mode, _UnstatedEpsilon() as epsilon:
        try:
            network(*inputs[0], **inputs[1])
        except Exception:  # RuntimeError of torch, or what a network makes of it
            return True
    return mode.is_narrow or epsilon.is_met
