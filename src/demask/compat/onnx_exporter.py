"""torch's ONNX exporter: its list of functions, and two patches that spare it repeated work.

Its modules need onnxscript, so they are imported in functions.
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
    """The functions, overloads of ops among them, that the exporter has ONNX functions for."""
    from torch.onnx._internal.exporter._torchlib import _torchlib_registry

    return {meta.fx_target for meta in _torchlib_registry.get_torchlib_ops()}


def use_known_values(module: fx.GraphModule) -> None:
    """Have the exporter read the values that nodes of this module have, where it would run each on
    fake tensors: it looks at their dtypes for casts to insert, and runs what it inserts.

    A patch of the process: the exporter creates its interpreter itself. It changes nothing for
    other modules, which lack the mark, so it stays.
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
    """While it lasts, the exporter copies the list of ONNX functions that the first call of the
    process left: it reads the source of each at every call, half a second of it.

    A patch of the process, since the exporter creates its registry itself; a lock lets one thread
    export at a time.
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
            ONNXRegistry.from_torchlib = before  # type: ignore[method-assign]
