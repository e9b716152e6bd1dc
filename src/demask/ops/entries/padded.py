"""Windows that read explicit pads, as one op each: what the pad alone hides, the pair shows.

    padded_conv2d(x, w, ..., pads, pad_value) == conv2d(constant_pad_nd(x, pads, pad_value), w, ...)

A constant channel is not constant behind a pad with zeros, yet what a convolution makes of it is a
border map, as if the convolution padded by itself. These ops exist while a graph is rewritten;
`shrink.absorb_pads` puts them in and takes them out again.
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
WINDOWS = (*traits.CONVOLUTIONS_ANY_PADDING, *traits.TRANSPOSED_CONVOLUTIONS,
           *traits.MAX_POOLS, *traits.AVERAGE_POOLS)  # fmt: skip
_LIBRARY = torch.library.Library("demask", "FRAGMENT")


def _defined(window: Any) -> Any:
    """The op of a window that reads pads: its schema with two arguments more."""
    text = str(schema_of(window)).removeprefix("aten::").removesuffix(") -> Tensor")
    name, _, rest = text.partition("(")
    plain = f"padded_{name.replace('.', '_')}"
    _LIBRARY.define(f"{plain}({rest}, *, SymInt[] pads=[], float pad_value=0.0) -> Tensor")
    _LIBRARY.impl(plain, _composed(window), "CompositeImplicitAutograd")
    return getattr(torch.ops.demask, plain).default


def _composed(window: Any) -> Callable[..., Any]:
    def run(x: Any, *args: Any, pads: Any = (), pad_value: float = 0.0) -> Any:
        return window(aten.constant_pad_nd.default(x, pads, pad_value), *args)

    return run


PADDED: Mapping[Any, Any] = {window: _defined(window) for window in WINDOWS}
PLAIN: Mapping[Any, Any] = {padded: window for window, padded in PADDED.items()}


def with_padded(table: Table) -> Table:
    """The table with an entry for each of these ops: its window's, which reads the pads too."""
    entries = {
        op_name(padded): _entry(table[op_name(window)])
        for window, padded in PADDED.items()
        if op_name(window) in table and op_name(padded) not in table
    }
    return table.extended(entries) if entries else table


def _entry(window: Entry) -> Entry:
    def reads_padding(node: fx.Node) -> bool:
        found = schema.arguments(node)
        # What lies below every number is no more read by a maximum than its own padding.
        seen = found["pad_value"] != float("-inf") and grows(found["pads"])
        return seen or window.reads_padding(node)

    return replace(window, pads=reads_padding, cases=())


def grows(pads: Any) -> bool:
    """May pads add a position? Numbers below zero crop; sizes of run time may be any."""
    return any(not isinstance(n, int) or n > 0 for n in pads)
