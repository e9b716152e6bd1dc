"""Base classes of torch's layers, and the test for global hooks."""

from __future__ import annotations

from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.conv import _ConvNd as ConvNd
from torch.nn.modules.module import _has_any_global_hook as has_any_global_hook

__all__ = ["ConvNd", "NormBase", "has_any_global_hook"]
