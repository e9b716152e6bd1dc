"""calibrate(): the statistics that norms over the image see on tiles."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from demask.errors import BadInput
from demask.failures import public
from demask.graph.isolation import in_isolation
from demask.graph.program import Program
from demask.ops.schema import fake
from demask.traverse.analysis.captured_size import captured, network_of
from demask.traverse.normalization import FrozenStatistics, measure, with_normalized_input
from demask.traverse.storage.dtype_conversion import assign

Model = nn.Module | ExportedProgram | str | os.PathLike[str]


@in_isolation
@public
def calibrate(model: Model, tiles: Tensor | np.ndarray | Iterable[Any], *, normalize: Any = None) -> FrozenStatistics:
    """The statistics that the norms of a network see on tiles, as `FrozenStatistics`.

    Group and instance norms that were trained on tiles see other statistics on a full image. With
    `stream(..., statistics=calibrate(model, tiles))` they use those of the tiles, as constants. The
    mean and the variance of each norm are averaged over the tiles, as batch norm averages them.

    Args:
        model: network of one input, as in `stream`.
        tiles: tensor or array (N, C, H, W) of N tiles, or an iterable of such; uint8 tiles are read
            as x / 255, as in `stream`. Take tiles as those of the training, of its size.
        normalize: as in `stream`; default None, no normalization.

    Raises:
        BadInput: a tile has a wrong shape or dtype, there is none, or the network has no norm whose
            statistics are over the image.
        NotExportable: torch.export cannot capture the model.

    Example:
        >>> import torch
        >>> from torch.nn import Conv2d, InstanceNorm2d, Sequential
        >>> from demask.traverse import calibrate, stream
        >>> net = Sequential(Conv2d(3, 4, 3, padding=1), InstanceNorm2d(4), Conv2d(4, 3, 1))
        >>> frozen = calibrate(net, torch.rand(8, 3, 32, 32))
        >>> len(frozen.norms), len(frozen.norms[0].mean), frozen.tiles
        (1, 4, 8)
        >>> x, y = torch.rand(1, 3, 90, 70), torch.empty(1, 3, 90, 70)
        >>> stream(net, x, y, memory="16MiB", statistics=frozen).rows
        90
    """
    frozen = measure(_calls(model, tiles, normalize))
    if not frozen.tiles:
        raise BadInput(
            "calibrate: expected at least one tile, and a network with norms over the "
            "image, such as group or instance norm"
        )
    return frozen


def _calls(model: Model, tiles: Any, normalize: Any) -> Iterator[tuple[Program, Tensor]]:
    """The program of each tile, and the tile as the network takes it."""
    network, programs = network_of(model), {}
    for batch in [tiles] if isinstance(tiles, Tensor | np.ndarray) else tiles:
        values = torch.as_tensor(batch)
        if values.ndim < 3 or 0 in values.shape:
            raise BadInput(f"calibrate: expected tiles (N, C, H, W), got {tuple(values.shape)}")
        key = tuple(values.shape[1:]), values.dtype
        if key not in programs:
            program = captured(network, (1, *key[0]), key[1])
            programs[key] = with_normalized_input(program, normalize)
        inputs = list(programs[key].graph.find_nodes(op="placeholder"))
        for tile in values.split(1):
            into = torch.empty(tile.shape, dtype=fake(inputs[0]).dtype)
            assign(into, tile)
            yield programs[key], into
