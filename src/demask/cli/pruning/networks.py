"""Networks of `demask prune`: a function of the user's, or a small one for digits."""

from __future__ import annotations

import inspect
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from demask.errors import BadInput

DIGITS_WIDTH = 24  # of the built-in network: its training takes seconds
COUNTS = ("num_classes", "classes", "n_classes")  # parameters that take the number of classes


def build_network(function: str | None, classes: int, channels: int) -> nn.Module:
    """A network with as many outputs as classes.

    function: "module:function" (or a class), called with the number of classes if it has a
    parameter for it (num_classes, classes) or takes any keyword; else without arguments. None for
    the built-in network, which takes images of one channel (digits). Raises BadInput where there is
    no such function, or it returns no network.
    """
    if function is None:
        if channels != 1:
            raise BadInput("expected --network MODULE:FUNCTION for images in color; the built-in network reads digits")
        from demask.cli.demo.digits import DigitNet

        return DigitNet(DIGITS_WIDTH)
    build = _function(function)
    try:
        network = build(**_arguments(build, classes))
    except Exception as error:  # the user's code
        raise BadInput(f"--network {function} failed: {type(error).__name__}: {error}") from error
    if not isinstance(network, nn.Module):
        raise BadInput(f"expected --network {function} to return an nn.Module, got {type(network).__name__}")
    return network


def _function(text: str) -> Any:
    module, _, name = text.partition(":")
    if not module or not name:
        raise BadInput(f"expected --network MODULE:FUNCTION, such as torchvision.models:resnet18, got {text!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadInput(f"--network {text}: {error}") from error


def _arguments(build: Any, classes: int) -> dict[str, int]:
    try:
        parameters = inspect.signature(build).parameters
    except ValueError:  # of a built-in
        return {}
    name = next((name for name in COUNTS if name in parameters), None)
    if name is None and any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        name = COUNTS[0]
    return {name: classes} if name else {}


def load_weights(network: nn.Module, path: Path) -> None:
    """Load a state dict into a network, in place: .safetensors, or .pt and .pth of tensors alone.

    Counters of batch norms may be missing. Raises BadInput for a file of another network.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            state = torch.load(path, weights_only=True)
        absent, unknown = network.load_state_dict(state, strict=False)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # of a pickle, a header, or shapes that differ
        first = str(error).splitlines()[-1].strip() if str(error) else type(error).__name__
        raise BadInput(f"{path} does not fit the network: {first}") from error
    absent = [name for name in absent if not name.endswith("num_batches_tracked")]
    if absent or unknown:
        word, names = ("lacks", absent) if absent else ("has unknown", unknown)
        raise BadInput(f"{path} does not fit the network: it {word} {', '.join(names[:3])}")
