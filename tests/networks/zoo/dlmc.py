"""Where the weights of a really pruned ResNet-50 are not zero: the Deep Learning Matrix Collection
(Gale, Zaharia, Young, Elsen, "Sparse GPU kernels for deep learning", SC20), read from
shared/data/dlmc_subset.zip next to the project.

A file holds one weight's positions, a row per output. Its columns are in the order of TensorFlow,
(kernel row, kernel column, input channel), the channel fastest. The collection does not say so; the
patterns do (magnitude pruning, 0.9): read this way, the corner taps of 7x7 and the first stage's
3x3 kernels keep about half of what the centre keeps, and how much a 3x3 layer reads of a channel
correlates with how much writes to it (0.24 to 0.69); in torch's order (input channel,
kernel row, kernel column) all taps keep the same share, and the correlation is about zero.
"""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import numpy as np
import torch
from torch import Tensor

DATA = Path(__file__).parents[4] / "shared" / "data" / "dlmc_subset.zip"
SPARSITIES = (0.8, 0.9, 0.95)
BLOCKS = (3, 4, 6, 3)  # of ResNet-50, per stage


def names() -> dict[str, str]:
    """The collection's name of each weight by torchvision's name of its layer: 54 of them.

    >>> names()["layer3.0.conv2"], names()["layer3.5.conv2"]
    ('bottleneck_2_block_group_projection_block_group3', 'bottleneck_2_block_group3_5_1')
    """
    names_of = {"conv1": "initial_conv", "fc": "final_dense"}
    for stage, blocks in enumerate(BLOCKS, 1):
        first = f"block_group_projection_block_group{stage}"
        names_of[f"layer{stage}.0.downsample.0"] = f"bottleneck_projection_{first}"
        for part in (1, 2, 3):
            names_of[f"layer{stage}.0.conv{part}"] = f"bottleneck_{part}_{first}"
            for block in range(1, blocks):
                words = f"bottleneck_{part}_block_group{stage}_{block}_1"
                names_of[f"layer{stage}.{block}.conv{part}"] = words
    return names_of


def parsed(text: str) -> Tensor:
    """The positions that a .smtx file names, (rows, columns) of bool.

    Its three lines are rows, columns and nonzeros; where each row starts, and the end; the column
    of each nonzero. ValueError where they contradict each other.

    >>> parsed("2, 3, 2\\n0 2 2\\n0 2")
    tensor([[ True, False,  True],
            [False, False, False]])
    """
    head, starts, places = (*text.splitlines(), "", "", "")[:3]
    sizes = np.array(head.replace(",", " ").split(), np.int64)
    if len(sizes) != 3:
        raise ValueError(f"expected a line of rows, columns and nonzeros, got {head[:40]!r}")
    rows, columns, count = (int(size) for size in sizes)
    ends, column = (np.array(line.split(), np.int64) for line in (starts, places))
    lengths = np.diff(ends)
    if len(ends) != rows + 1 or ends[0] != 0 or ends[-1] != count or (lengths < 0).any():
        raise ValueError(f"expected {rows} rows that end at {count}, got offsets that do not")
    if len(column) != count or (count and not 0 <= column.min() <= column.max() < columns):
        raise ValueError(f"expected {count} columns below {columns}, got {len(column)} or larger")
    mask = np.zeros((rows, columns), bool)
    mask[np.repeat(np.arange(rows), lengths), column] = True
    if mask.sum() != count:
        raise ValueError(f"expected {count} positions, got {mask.sum()}: some are there twice")
    return torch.from_numpy(mask)


def shaped(mask: Tensor, shape: torch.Size) -> Tensor:
    """A mask of `parsed` as torch lays a weight out: (out, in) or (out, in, height, width).

    ValueError where the sizes differ.

    >>> shaped(torch.tensor([[True, True, False, False]]), torch.Size([1, 2, 2, 1]))[0, :, :, 0]
    tensor([[ True, False],
            [ True, False]])
    """
    outputs, inputs, *kernel = shape
    if mask.shape != (outputs, shape[1:].numel()):
        raise ValueError(f"expected a mask for a weight of {tuple(shape)}, got {tuple(mask.shape)}")
    return mask.view(outputs, *kernel, inputs).movedim(-1, 1).contiguous()


def masks(sparsity: float, path: Path = DATA) -> dict[str, Tensor]:
    """The mask of every convolution and of the classifier of a ResNet-50, (rows, columns) as the
    collection has them, by torchvision's name of the layer. sparsity: one of `SPARSITIES`.

    FileNotFoundError where the collection is not next to the project.
    """
    with ZipFile(path) as archive:
        return {
            layer: parsed(archive.read(f"rn50/magnitude_pruning/{sparsity:g}/{name}.smtx").decode())
            for layer, name in names().items()
        }
