"""A YOLO: a detector whose backbone, neck and heads are masked together.

Detectors join maps of several scales by upsampling and concatenation, and split channels inside
of their blocks. The op table follows channels through all of it, so there is nothing to
configure: `prune.groups` lists what is removed together, `Pruner` masks it, `demask` removes it.

The network is a small one with the parts of YOLOv8 (its C2f blocks, a pyramid, heads without
anchors), with random weights. For one of ultralytics take the `nn.Module` inside
(`YOLO("yolov8n.pt").model`) with `image` as below, or its ONNX export with the [recipe for
files](onnx_file.py); networks that decode boxes at the end keep that part as it is.

It prints:

```text
Detector [(2, 7, 256), (2, 7, 64)]
21,350 -> 5,562 parameters, 2,778,624 -> 754,432 MACs per example
```
"""

import torch
from torch import nn

import demask
from demask import prune


class Conv(nn.Sequential):
    """Convolution, norm, SiLU."""

    def __init__(self, channels, out, kernel=1, stride=1):
        conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False)
        super().__init__(conv, nn.BatchNorm2d(out), nn.SiLU())


class C2f(nn.Module):
    """Half of the channels pass through blocks; all that is computed on the way is concatenated."""

    def __init__(self, channels, out, blocks=1):
        super().__init__()
        half = out // 2
        self.first, self.last = Conv(channels, out), Conv((2 + blocks) * half, out)
        pairs = (nn.Sequential(Conv(half, half, 3), Conv(half, half, 3)) for _ in range(blocks))
        self.blocks = nn.ModuleList(pairs)

    def forward(self, x):
        parts = list(self.first(x).chunk(2, 1))
        for block in self.blocks:
            parts.append(parts[-1] + block(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Detector(nn.Module):
    """Boxes (4 numbers) and classes at two scales."""

    def __init__(self, width=8, classes=3):
        super().__init__()
        self.stem = nn.Sequential(Conv(3, width, 3, 2), Conv(width, 2 * width, 3, 2))
        self.fine = C2f(2 * width, 2 * width)
        self.coarse = nn.Sequential(Conv(2 * width, 4 * width, 3, 2), C2f(4 * width, 4 * width))
        self.up, self.neck = nn.Upsample(scale_factor=2), C2f(6 * width, 2 * width)
        self.heads = nn.ModuleList(
            nn.Sequential(Conv(n * width, width, 3), nn.Conv2d(width, 4 + classes, 1)) for n in (2, 4)
        )

    def forward(self, image):
        fine = self.fine(self.stem(image))
        coarse = self.coarse(fine)
        fine = self.neck(torch.cat([self.up(coarse), fine], 1))
        maps = zip((fine, coarse), self.heads, strict=True)
        return [head(x).flatten(2) for x, head in maps]


torch.manual_seed(0)
net, image = Detector().eval(), torch.rand(2, 3, 64, 64)
pruned = prune.Pruner(net, image, schedule=prune.OneShot(0.5)).step()
slim = demask.demask(net, (image,))
print(type(slim).__name__, [tuple(boxes.shape) for boxes in slim(image)])
print(demask.report(slim).summary)
