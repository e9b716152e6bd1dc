"""Networks that tests and benchmarks share: torchvision's, with random weights and masks drawn."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import warnings
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

LIMIT = 100e6  # parameters of the largest network that `zoo` names

# ReLU needs a gain of 2; masks take half of what is read. With 2, 1e-5 of EfficientNet's outputs
# depends on the images. With 3, those of its second version grow a million times, and a difference
# of one unit in the last place does too.
GAIN = 3.0
GAINS = {"efficientnet_v2": 2.0}


@functools.cache
def torchvision() -> ModuleType:
    """The module, also where its compiled ops do not fit this torch; ImportError where it is not
    installed.

    Its wheels are built with a CUDA torch, and their ops do not load with a CPU one. Importing
    then fails at two ops of which it wants to know the shapes. They are declared here, with an nms
    in plain torch: classifiers need neither, detectors need nms.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ImportError("torchvision is not installed: pip install --no-deps torchvision pillow")
    loads = _ops_load(Path(spec.origin).parent)
    if not loads:
        _declared_ops()
    module = importlib.import_module("torchvision")
    if not loads:
        importlib.import_module("torchvision.ops.boxes")._assert_has_ops = lambda: None
    return module


def _ops_load(folder: Path) -> bool:
    try:
        for library in folder.glob("_C*"):
            torch.ops.load_library(library)
    except OSError:
        return False
    return hasattr(torch.ops.torchvision, "nms")


@functools.cache
def _declared_ops() -> torch.library.Library:
    """The library that declares the two ops; cached, since they go when it does."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", nms, "CPU")
    return library


def nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """The indices of the boxes that overlap no better one by more than the threshold, best first.

    boxes: (n, 4), as x1, y1, x2, y2. scores: (n,). Overlap: intersection over union.
    """
    order = scores.argsort(descending=True, stable=True)
    low, high = boxes[order, :2], boxes[order, 2:]
    area = (high - low).prod(1)
    shared = torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low)
    shared = shared.clamp(min=0).prod(2)
    overlaps = shared / (area[:, None] + area - shared) > threshold
    selected = torch.ones(len(order), dtype=torch.bool)
    for k in range(len(order)):
        if selected[k]:
            selected[k + 1 :] &= ~overlaps[k, k + 1 :]
    return order[selected]


def zoo(limit: float = LIMIT) -> list[str]:
    """The names of torchvision's classification networks of at most `limit` parameters."""
    models = torchvision().models
    return [name for name in models.list_models(module=models) if _parameters(name) <= limit]


def _parameters(name: str) -> int:
    """How many parameters torchvision says that a network has."""
    weights = torchvision().models.get_model_weights(name)
    return next(iter(weights)).meta["num_params"]


def built(name: str, generator: torch.Generator) -> nn.Module:
    """A torchvision network by name, randomised, in eval mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of other initial weights to come
        model = torchvision().models.get_model(name, weights=None)
    gain = next((gain for start, gain in GAINS.items() if name.startswith(start)), GAIN)
    return randomised(model, generator, gain)


def randomised(model: nn.Module, generator: torch.Generator, gain: float = GAIN) -> nn.Module:
    """The model in eval mode with every parameter and every batch norm statistic drawn anew.

    Initial values hide much: shifts of 0, scales of 1 or of 1e-6, depthwise kernels so small that
    nothing of the input is left after a few of them. Matrices and kernels are drawn so that a layer
    keeps the size of what it reads (variance: gain / inputs per output), scales about 1, shifts and
    means about 0.
    """
    with torch.no_grad():
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            leaf = name.rpartition(".")[2]
            if not values.is_floating_point():
                continue
            if values.ndim > 1 and isinstance(values, nn.Parameter):
                values.normal_(0, math.sqrt(gain * len(values) / values.numel()), generator=generator)
            elif leaf.endswith("bias") or leaf == "running_mean":
                values.normal_(0, 0.2, generator=generator)
            elif leaf in ("weight", "running_var"):
                values.uniform_(0.5, 1.5, generator=generator)
    return model.eval()


def mask(model: nn.Module, generator: torch.Generator, amount: float = 0.5) -> nn.Module:
    """The model with a part of each convolution's output channels zeroed, a draw per layer.

    By torch.nn.utils.prune: every other layer keeps its mask and its weights, the rest have it
    multiplied in. Biases are left, and so are batch norms: a masked channel is a constant.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    seed = int(torch.randint(2**31, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # prune draws from the global generator alone
        for k, layer in enumerate(layers):
            prune.random_structured(layer, "weight", amount, dim=0)
            if k % 2:
                prune.remove(layer, "weight")
    return model


# By the class of a block: layers of one width inside it, which nothing outside of it reads. The
# last name of a row says that there is another layer, which reads them.
_INSIDE: dict[str, tuple[str, ...]] = {
    "BasicBlock": ("conv1 bn1 conv2",),
    "Bottleneck": ("conv1 bn1 conv2",),
    "ResBottleneckBlock": ("f.a.0 f.a.1 f.b.1 f.b.0",),
    "_DenseLayer": ("conv1 norm2 conv2",),
    "InvertedResidual": (
        "conv.0.0 conv.0.1 conv.1.0 conv.1.1 conv.2",
        "block.0.0 block.0.1 block.1.0 block.1.1 block.2",
        "branch2.0 branch2.1 branch2.3 branch2.4 branch2.5",
    ),
    "MBConv": ("block.0.0 block.0.1 block.1.0 block.1.1 block.3",),
    "FusedMBConv": ("block.0.0 block.0.1 block.1",),
    "_InvertedResidual": ("layers.0 layers.1 layers.3 layers.4 layers.6",),
    "Inception": ("branch2.0.conv branch2.0.bn branch2.1", "branch3.0.conv branch3.0.bn branch3.1"),
    "InceptionA": ("branch5x5_1.conv branch5x5_1.bn branch5x5_2",),
    "InceptionC": ("branch7x7_1.conv branch7x7_1.bn branch7x7_2",),
    "Fire": ("squeeze expand1x1",),
    "CNBlock": ("block.3 block.5",),
    "MLPBlock": ("0 3",),
    "MLP": ("0 3",),
}


def mask_inside(model: nn.Module, share: float = 0.5) -> int:
    """Zero the first channels of the layers inside of each block, with their norms: streams between
    blocks keep all of theirs, so the network's own class can say what is left. Plain stacks of
    convolutions are masked between each other. Returns how many layers were masked."""
    rows = [
        [block.get_submodule(name) for name in row.split()]
        for block in model.modules()
        for row in _INSIDE.get(type(block).__name__, ())
        if all(_has(block, name) for name in row.split())
    ]
    rows = rows or [[layer, layer] for layer in _stacked(model)]
    with torch.no_grad():
        for *row, reader in rows:
            for tensor in (p for layer in row for p in layer.parameters(recurse=False)):
                groups = _groups(reader, len(tensor))  # go as a whole
                tensor[: int(groups * share) * len(tensor) // groups] = 0
    return sum(len(row) - 1 for row in rows)


def _groups(reader: nn.Module, channels: int) -> int:
    """The groups in which a layer reads channels: as many as channels, where it has none."""
    groups = getattr(reader, "groups", 1)
    return groups if groups > 1 else channels


def _has(block: nn.Module, name: str) -> bool:
    try:
        block.get_submodule(name)
    except AttributeError:
        return False
    return True


def _stacked(model: nn.Module) -> list[nn.Module]:
    """The convolutions and norms of a plain stack."""
    layers = getattr(model, "features", ())
    return [layer for layer in layers if isinstance(layer, (nn.Conv2d, nn.BatchNorm2d))]
