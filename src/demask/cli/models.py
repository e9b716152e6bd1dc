"""Reading the networks that commands are given, whatever their file is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from demask.files.pt2 import read_model
from demask.graph.provenance import InputSpec, Provenance


@dataclass(frozen=True, slots=True)
class Network:
    """A network read from a file, and example arguments: empty where the program tells them."""

    model: ExportedProgram | fx.GraphModule
    args: tuple[Tensor, ...]

    @property
    def module(self) -> nn.Module:
        """The network as something that can be called."""
        if isinstance(self.model, ExportedProgram):
            return self.model.module(check_guards=False)
        return self.model


def read_network(path: Path) -> Network:
    """The network in a .pt2 file or an archive of demask; raises BadInput for anything else."""
    model = read_model(path)
    if isinstance(model, ExportedProgram):
        return Network(model, ())
    record = cast(Provenance, model.demasked)
    return Network(model, tuple(map(example, record.inputs)))


def example(spec: InputSpec) -> Tensor:
    """A tensor of the input's example size: seeded normal numbers, or zeros in integer types."""
    dtype = getattr(torch, spec.dtype)
    if not dtype.is_floating_point:
        return torch.zeros(spec.example, dtype=dtype)
    return torch.randn(spec.example, generator=torch.Generator().manual_seed(0)).to(dtype)
