"""torch.compile as a contender."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config as settings
from torch import nn

NAME = "torch.compile"


def inductor(model: nn.Module, *inputs: Any) -> Callable[[], object]:
    """A call of the network compiled by inductor, with constants folded into its code (freezing),
    for these very sizes; compiled before it is returned.

    The compiled code belongs to the number of threads that is set now.
    """
    settings.freezing = True
    settings.compile_threads = 1  # no processes that would outlive this one
    torch._dynamo.config.recompile_limit = 10**6  # networks of one class share its code
    torch._dynamo.config.accumulated_recompile_limit = 10**6
    compiled = torch.compile(model, dynamic=False)

    def call() -> object:
        with torch.no_grad():
            return compiled(*inputs)

    call()
    return call


def forget() -> None:
    """Frees what was compiled for the settings before."""
    torch._dynamo.reset()
