"""A small network for tests of pruning, and evaluations that other processes can import."""

import os
import time
from pathlib import Path

import torch
from torch import nn

X = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(1))
SIZES = {"0": 6, "3": 8, "6": 10}  # of the groups of `network()`


def network():
    """Two convolutions and two linear layers, on (n, 1, 8, 8)."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 9, 10),
        nn.ReLU(),
        nn.Linear(10, 4),
    )
    model[1].running_var.uniform_(0.5, 2)
    return model.eval()


REFERENCE = network()(X).detach()


def closeness(model):
    """Higher for outputs closer to those of the network as it is."""
    with torch.no_grad():
        return -float((model(X) - REFERENCE).norm())


def noted_closeness(model, folder):
    """The same, slowly; leaves a file that names the process, at its start."""
    Path(folder, f"{os.getpid()}-{time.monotonic_ns()}").touch()
    time.sleep(0.3)
    return closeness(model)
