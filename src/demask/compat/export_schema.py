"""The schema of .pt2 files, and torch's reader."""

from __future__ import annotations

from torch._export.serde import schema
from torch._export.serde.schema import SCHEMA_VERSION, Layout
from torch._export.serde.serialize import _SERIALIZE_TO_TORCH_DTYPE as DTYPES
from torch._export.serde.union import _Union as Union
from torch.export.pt2_archive._package import load_pt2

__all__ = ["DTYPES", "SCHEMA_VERSION", "Layout", "Union", "load_pt2", "schema"]
