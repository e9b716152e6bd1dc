"""torch's ONNX exporter: its list of functions, and two patches that avoid repeated work.

The exporter needs onnxscript, so it is imported in functions.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from typing import Any

from torch import fx

_KNOWN = "demask: every node has its value"  # in `meta` of a graph module
_EXPORTING = threading.RLock()
_LISTED: dict[int, Any] = {}  # by opset: the exporter's list of ONNX functions


def exporter_targets() -> set[Any]:
    """The functions and overloads of ops for which the exporter has ONNX functions."""
    from torch.onnx._internal.exporter._torchlib import _torchlib_registry

    return {meta.fx_target for meta in _torchlib_registry.get_torchlib_ops()}


def use_known_values(module: fx.GraphModule) -> None:
    """Let the exporter read the values of this module's nodes instead of running each on fake
    tensors: it needs their dtypes to insert casts, and runs only these.

    The patch is process-wide and permanent, since the exporter creates its interpreter itself. It
    has no effect on other modules, which lack the mark in `meta`.
    """
    import torch.onnx._internal.fx.passes.type_promotion as promotion

    module.meta[_KNOWN] = True
    kind = promotion._TypePromotionInterpreter
    run, rule_of = kind.run_node, promotion.get_type_promotion_rule
    if hasattr(run, "plain"):
        return

    def run_node(self: Any, n: fx.Node) -> Any:
        if n.op != "call_function" or _KNOWN not in self.module.meta or "val" not in n.meta:
            return run(self, n)
        with self._set_current_node(n):
            if rule := rule_of(n, self.type_promotion_table):
                self._maybe_promote_node(n, rule)
        return n.meta["val"]

    run_node.plain = run  # type: ignore[attr-defined]
    kind.run_node = run_node


@contextlib.contextmanager
def list_functions_once() -> Iterator[None]:
    """In the block, the exporter copies the list of ONNX functions of the first call in the process
    instead of reading the source of each function, which takes half a second per call.

    The patch is process-wide, since the exporter creates its registry itself; a lock admits one
    thread at a time.
    """
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    def copied(opset_version: int) -> ONNXRegistry:
        if opset_version not in _LISTED:
            _LISTED[opset_version] = listed(opset_version=opset_version)
        registry = copy.copy(_LISTED[opset_version])
        registry.functions = {op: list(known) for op, known in registry.functions.items()}
        return registry

    with _EXPORTING:
        before, listed = vars(ONNXRegistry)["from_torchlib"], ONNXRegistry.from_torchlib
        ONNXRegistry.from_torchlib = staticmethod(copied)  # type: ignore[method-assign]
        try:
            yield
        finally:
            ONNXRegistry.from_torchlib = before
