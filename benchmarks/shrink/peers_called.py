"""The contenders of peers.py: how each is called, and its result."""

from __future__ import annotations

import importlib
import math
import re
import sys
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

import demask
import networks
from benchmarks.common.inductor import NAME, inductor

MASKED, DEMASK, FOLDED = "masked", "demask", "folded, then demask"
SIMPLIFY, MASK, OWN = "torch-simplify", "torch-pruning, mask", "torch-pruning, own choice"
PLAIN, PRUNED, BOTH = "OpenVINO, masked", "OpenVINO, pruned", "OpenVINO, demask"
COMPILED, SLIM_COMPILED = f"masked, {NAME}", f"demask, {NAME}"
TORCH = (MASKED, DEMASK, FOLDED, SIMPLIFY, MASK, OWN, COMPILED, SLIM_COMPILED)
OPENVINO = (PLAIN, PRUNED, BOTH)
WRONG = 1e-4  # relative, float32: rounding stays below 1e-5 here, a lost constant is above 1e-3

Call = Callable[[Tensor], Tensor]
Ready = Callable[[Tensor, int], Call]

CALLED = {
    DEMASK: "`demask.demask(model, (images,))`. The time includes torch.export.",
    FOLDED: "the same, of `torch.fx.experimental.optimization.fuse(model)`. demask leaves batch "
    "norms as they are; torch-simplify and OpenVINO fold them into convolutions, a gain by itself.",
    SIMPLIFY: "`simplify.simplify(deepcopy(model), torch.zeros(1, *size))`, its defaults: it folds "
    "batch norms into convolutions, propagates biases, removes. The result takes images of that "
    "one size only; bias maps as large as an activation count as stored numbers.",
    MASK: "it takes no masks and chooses channels itself, so it is handed those that it can take: "
    "from `DependencyGraph().build_dependency`, a channel of a coupled group is removed when every "
    "convolution or linear layer that reads it reads nothing but zeros, constants disregarded "
    "(by a run of a copy whose weights are 1 where they are not 0, without shifts). Where one "
    "layer of a group is alive, the channel stays in all. Constants are lost: that is the error.",
    OWN: "what its README shows: `BasePruner(model, images, importance=GroupMagnitudeImportance(), "
    "pruning_ratio=0.5, ignored_layers=[last layer]).step()` on the masked network. It removes "
    "live channels too: the error says how far the result is from the masked network.",
    COMPILED: "`torch.compile(model)` with inductor, constants frozen, sizes fixed.",
    SLIM_COMPILED: "the same, of the result of demask.",
    PLAIN: "`openvino.convert_model(model, example_input=images)`, reshaped to the batch, compiled "
    "for the CPU in float32. Another runtime with its own fusions: compare its columns with each "
    "other, not with the torch ones.",
    PRUNED: "the same, then `apply_moc_transformations(cf=True)` and `apply_pruning_transformation`"
    " from `openvino._offline_transformations`, the only interface left to that pass.",
    BOTH: "the result of demask converted and compiled in the same way.",
}


def simplified(model: nn.Module, images: Tensor) -> nn.Module:
    """What torch-simplify makes of a copy."""
    networks.torchvision()  # which it imports
    from simplify import simplify

    return simplify(deepcopy(model), torch.zeros(1, *images.shape[1:]))


@torch.no_grad()
def read(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Which input channels of each plain convolution and linear layer carry more than a constant.

    Read off a copy in which every weight is 1 / inputs, or 0 where it is 0, shifts and means are 0:
    images of ones stay positive wherever something flows, and are 0 elsewhere.
    """
    probe, carrying = deepcopy(model).double(), {}
    for name, layer in probe.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            layer.weight.copy_((layer.weight != 0) / layer.weight[0].numel())
            if layer.bias is not None:
                layer.bias.zero_()
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.zero_()
            layer.running_var.fill_(1)
        if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1):

            def look(_: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
                carrying[name] = inputs[0].transpose(0, 1).flatten(1).abs().amax(1) > 0

            layer.register_forward_pre_hook(look)
    probe(torch.ones_like(images, dtype=torch.float64))
    return carrying


def unread(graph: Any, group: Any, alive: Mapping[nn.Module, Tensor]) -> list[int]:
    """The channels of a group's first layer that no layer of the group reads anything from."""
    read_channels: set[int] = set()
    readers = 0
    for item in group:
        layer = item.dep.target.module
        if layer in alive and graph.is_in_channel_pruning_fn(item.dep.handler):
            readers += 1
            if max(item.idxs) >= len(alive[layer]):
                raise IndexError(
                    f"its group couples channel {max(item.idxs)} of a layer that reads {len(alive[layer])}"
                )
            pairs = zip(item.idxs, item.root_idxs, strict=True)
            read_channels |= {root for channel, root in pairs if alive[layer][channel]}
    return sorted(set(group[0].root_idxs) - read_channels) if readers else []


def pruned_by_mask(model: nn.Module, images: Tensor) -> nn.Module:
    """What torch-pruning can take of the masked channels, off a copy."""
    from torch_pruning import DependencyGraph

    result = deepcopy(model)
    layers = dict(result.named_modules())
    alive = {layers[name]: channels for name, channels in read(model, images).items()}
    graph = DependencyGraph().build_dependency(result, (images,), verbose=False)
    groups = list(graph.get_all_groups(root_module_types=(nn.Conv2d, nn.Linear)))
    # All are chosen before the first is removed, as `alive` counts channels of the whole network.
    chosen = [(group[0].dep, unread(graph, group, alive)) for group in groups]
    for first, channels in chosen:
        if channels:
            group = graph.get_pruning_group(first.target.module, first.handler, channels)
            if graph.check_pruning_group(group):
                group.prune()
    return result


def pruned_by_choice(model: nn.Module, images: Tensor) -> nn.Module:
    """A copy pruned by torch-pruning, which chooses half of the channels itself."""
    import torch_pruning as tp

    result = deepcopy(model)
    last = [m for m in result.modules() if isinstance(m, nn.Conv2d | nn.Linear)][-1]
    tp.pruner.BasePruner(
        result, (images,), importance=tp.importance.GroupMagnitudeImportance(), pruning_ratio=0.5, ignored_layers=[last]
    ).step()
    return result


def openvino_module() -> ModuleType:
    """OpenVINO without its telemetry package, which forks this process and reports each conversion
    over the network; where that is absent, OpenVINO has a stub for it."""
    if "openvino" not in sys.modules:
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    return importlib.import_module("openvino")


def converted(model: nn.Module, images: Tensor, *, shrink: bool = False) -> Any:
    """The network in OpenVINO, its input as large as the images; shrink: with the Pruning pass."""
    openvino = openvino_module()
    from openvino import _offline_transformations as offline

    graph = openvino.convert_model(model, example_input=images)
    graph.reshape(list(images.shape))
    if shrink:
        offline.apply_moc_transformations(graph, cf=True)
        offline.apply_pruning_transformation(graph)
    return graph


def compiled(graph: Any, threads: int) -> Call:
    """The graph as a function of images."""
    openvino = openvino_module()
    options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.Core().compile_model(graph, "CPU", options).create_infer_request()

    def call(images: Tensor) -> Tensor:
        outputs = request.infer([images.numpy()], share_inputs=True, share_outputs=True)
        return torch.from_numpy(outputs[0])

    return call


@dataclass(frozen=True, slots=True)
class Compiled:
    """A network that torch.compile compiles for each batch and number of threads."""

    model: nn.Module


def called(call: Callable[[], object], _: Tensor) -> Any:
    """What it returns for the images that it was compiled with."""
    return call()


def stored(result: Any) -> int:
    """Numbers that a network stores: parameters and buffers, or float constants of OpenVINO."""
    result = result.model if isinstance(result, Compiled) else result
    if isinstance(result, nn.Module):
        return sum(v.numel() for v in chain(result.parameters(), result.buffers()) if v.ndim)
    constants = [node.output(0) for node in result.get_ops() if node.get_type_name() == "Constant"]
    return sum(math.prod(c.get_shape()) for c in constants if c.get_element_type().is_real())


@dataclass(frozen=True, slots=True)
class Outcome:
    """A contender's result. ready: a call for images like these and threads; None if it failed.

    numbers: stored. error: of the outputs on two images, relative to the largest, in float32.
    seconds: to build it.
    """

    ready: Ready | None
    numbers: int = 0
    error: float = 0.0
    seconds: float = 0.0
    failure: str = ""

    @property
    def wrong(self) -> bool:
        return not self.error <= WRONG  # not `>`: NaN is wrong


def outcomes(model: nn.Module, images: Tensor, expected: Tensor) -> dict[str, Outcome]:
    """Every contender's result for a masked network that computes `expected` from the images."""

    @cache
    def slim() -> nn.Module:
        return demask.demask(model, (images,))

    builders: dict[str, Callable[[Tensor], Any]] = {
        MASKED: lambda x: model,
        DEMASK: lambda x: slim(),
        FOLDED: lambda x: demask.demask(fuse(model), (x,)),
        SIMPLIFY: lambda x: simplified(model, x),
        MASK: lambda x: pruned_by_mask(model, x),
        OWN: lambda x: pruned_by_choice(model, x),
        COMPILED: lambda x: Compiled(model),
        SLIM_COMPILED: lambda x: Compiled(slim()),
        PLAIN: lambda x: converted(model, x),
        PRUNED: lambda x: converted(model, x, shrink=True),
        BOTH: lambda x: converted(slim(), x),
    }
    return {who: attempted(build, images, expected) for who, build in builders.items()}


def attempted(build: Callable[[Tensor], Any], images: Tensor, expected: Tensor) -> Outcome:
    """The outcome of one contender; where it raises or changes the outputs' shape, why it fails."""
    start = time.perf_counter()
    try:
        result = build(images)
        seconds = time.perf_counter() - start
        if isinstance(result, nn.Module):
            ready: Ready = lambda x, threads: result  # noqa: E731
        elif isinstance(result, Compiled):
            ready = lambda x, threads: partial(called, inductor(result.model, x))  # noqa: E731
        else:
            ready = lambda x, threads: compiled(build(x), threads)  # noqa: E731
        with torch.inference_mode():
            outputs = ready(images, 1)(images).clone()
    except Exception as error:  # a peer may raise anything, and then that is its result
        line = re.sub(r"\(?/\S+", "", str(error).strip().partition("\n")[0])  # no paths from here
        return Outcome(None, failure=f"{type(error).__name__}: {line[:90]}")
    if outputs.shape != expected.shape:
        shapes = f"outputs of {tuple(outputs.shape)} for {tuple(expected.shape)}"
        return Outcome(None, failure=shapes)
    return Outcome(ready, stored(result), relative(expected, outputs), seconds)


def relative(expected: Tensor, outputs: Tensor) -> float:
    """The largest difference, relative to the largest expected value."""
    return float((expected - outputs).abs().max() / expected.abs().max())
