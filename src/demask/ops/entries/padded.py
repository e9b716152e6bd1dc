"""Ops that pad and apply a window (convolution, pooling), for analysis only.

    padded_conv2d(x, w, ..., pads, pad_value) == conv2d(constant_pad_nd(x, pads, pad_value), w, ...)

A constant channel is not constant after a pad with zeros, but the output of the convolution is a
border map, as if the convolution itself padded. These ops exist while a graph is rewritten:
`shrink.rewrites.absorb_pads` inserts and removes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from demask.compat.dispatch import schema_of
from demask.ops import schema, traits
from demask.ops.entry import Entry, Table, op_name

aten = torch.ops.aten
WINDOWS = (*traits.CONVOLUTIONS_ANY_PADDING, *traits.TRANSPOSED_CONVOLUTIONS, *traits.MAX_POOLS, *traits.AVERAGE_POOLS)
_LIBRARY = torch.library.Library("demask", "FRAGMENT")


def _defined(window: Any) -> Any:
    """The padded op of a window: its schema with the arguments `pads` and `pad_value`."""
    text = str(schema_of(window)).removeprefix("aten::").removesuffix(") -> Tensor")
    name, _, rest = text.partition("(")
    plain = f"padded_{name.replace('.', '_')}"
    _LIBRARY.define(f"{plain}({rest}, *, SymInt[] pads=[], float pad_value=0.0) -> Tensor")
    _LIBRARY.impl(plain, _composed(window), "CompositeImplicitAutograd")
    return getattr(torch.ops.demask, plain).default


def _composed(window: Any) -> Callable[..., Any]:
    """The kernel of a padded op: a pad, then the window."""

    def run(x: Any, *args: Any, pads: Any = (), pad_value: float = 0.0) -> Any:
        return window(aten.constant_pad_nd.default(x, pads, pad_value), *args)

    return run


PADDED: Mapping[Any, Any] = {window: _defined(window) for window in WINDOWS}
PLAIN: Mapping[Any, Any] = {padded: window for window, padded in PADDED.items()}


def add_padded_entries(table: Table) -> Table:
    """The table with entries for these ops: those of their windows, which also read the pads."""
    entries = {
        op_name(padded): _entry(table[op_name(window)])
        for window, padded in PADDED.items()
        if op_name(window) in table and op_name(padded) not in table
    }
    return table.extended(entries) if entries else table


def _entry(window: Entry) -> Entry:
    """The entry of the padded op of a window."""

    def reads_padding(node: fx.Node) -> bool:
        call_arguments = schema.arguments(node)
        # -inf never changes a maximum, just as the padding of max pools.
        is_read = call_arguments["pad_value"] != float("-inf") and may_add_positions(call_arguments["pads"])
        return is_read or window.reads_padding(node)

    return replace(window, pads=reads_padding, cases=())


def may_add_positions(pads: Any) -> bool:
    """Whether pads may add positions: negative numbers crop; dynamic sizes may be positive."""
    return any(not isinstance(n, int) or n > 0 for n in pads)
