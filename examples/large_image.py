"""A 20,000-pixel image through a network, from file to file, in 1 GB.

Layer by layer this takes 25.6 GB for one map of 16 channels. `stream` computes some rows of the
last layer at a time, and of the others what these need, so the result is that of the network on
the image: no seams, nothing blended. Group and instance norms work too, with the statistics of the
full image; the map before each is then on disk. Run as

    python large_image.py --pixels 20000 --memory 1GB

which takes minutes and 2.4 GB of disk. Sources and results may be Zarr, TIFF, GeoTIFF or
slides; `demask stream model.pt2 image.npy result.npy --memory 1GB` does the same. See [images
larger than memory](../docs/traverse.md).

It prints:

```text
fits: True
(1, 3, 256, 256) uint8
8-bit values differ by at most 1: True
```
"""

import argparse

import numpy as np
import torch
from torch import nn

from demask.traverse import plan, stream

parser = argparse.ArgumentParser()
parser.add_argument("--pixels", type=int, default=256)
parser.add_argument("--memory", default="24MiB")
options = parser.parse_args()

torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1),
    nn.SiLU(),
    nn.Conv2d(16, 16, 3, padding=1),
    nn.SiLU(),
    nn.Conv2d(16, 3, 3, padding=1),
).eval()

# An 8-bit image that was never in memory: its rows are written one after the other.
size = options.pixels
generator = np.random.default_rng(0)
header = {"descr": "|u1", "fortran_order": False, "shape": (1, 3, size, size)}
with open("image.npy", "wb") as file:
    np.lib.format.write_array_header_1_0(file, header)
    for _ in range(3 * size):
        file.write(generator.integers(0, 256, size, np.uint8).tobytes())

example = torch.empty(1).expand(1, 3, size, size)  # takes no memory
planned = plan(net, (example,), memory=options.memory)  # refused here if the budget is too small
print("fits:", planned.peak <= planned.budget)
done = stream(net, "image.npy", "result.npy", memory=options.memory, output="uint8")
print(done.shape, done.dtype)

if size <= 1000:  # what fits is compared
    with torch.no_grad():
        expected = net(torch.from_numpy(np.load("image.npy")).float() / 255)
    expected = (expected.clamp(0, 1) * 255).round().numpy()
    largest = np.abs(np.load("result.npy").astype(int) - expected.astype(int)).max()
    print("8-bit values differ by at most 1:", largest <= 1)
