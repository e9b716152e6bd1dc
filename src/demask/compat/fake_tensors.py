"""Fake tensors, which have shapes but no data."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._prims_common import is_contiguous_or_false
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, disable_fake_tensor_cache

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "disable_fake_tensor_cache",
    "enable_python_dispatcher",
    "export_without_cache",
    "is_contiguous_or_false",
]


def export_without_cache() -> AbstractContextManager[None]:
    """In the block, torch.export does not cache the results of calls on fake tensors: keys with
    symbolic sizes cost more than the cache saves."""
    return torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
