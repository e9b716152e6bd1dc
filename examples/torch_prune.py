"""Masks of torch.nn.utils.prune: removed, whether or not you have called `prune.remove`.

Structured masks become smaller layers. Where layers are added to each other and were masked one
by one, your own class keeps what one of them has: `demask.prune.align` masks them alike (a step
of pruning: train afterwards), `result="graph"` takes more out and returns a graph. Masks in no
pattern stay under `demask`; for those see [sparse training](sparse_training.py) and
`demask.optimize`.

It prints:

```text
masked one by one: 10474 -> 6610
as a graph: 3028
aligned: 16 channels masked in all layers of their group
Residual 2938
equal: True
```
"""

import torch
from torch import nn
from torch.nn.utils import prune

import demask


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 32, 3, padding=1)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = torch.relu(x + self.second(x))
        return self.head(x.mean((2, 3)))


torch.manual_seed(0)
net, images = Residual().eval(), torch.randn(4, 3, 16, 16)
for layer in (net.first, net.second):
    for name in ("weight", "bias"):
        if name == "weight":
            prune.ln_structured(layer, name, amount=0.5, n=2, dim=0)
        else:  # the same channels
            prune.custom_from_mask(layer, name, layer.weight_mask.flatten(1)[:, 0])
full = sum(p.numel() for p in net.parameters())

slim = demask.demask(net, (images,), result="class")
print("masked one by one:", full, "->", sum(p.numel() for p in slim.parameters()))
graph = demask.demask(net, (images,), result="graph")
print("as a graph:", sum(p.numel() for p in graph.parameters()))

for aligned in demask.prune.align(net, images):
    print("aligned:", len(aligned.slices), "channels masked in all layers of their group")
slim = demask.demask(net, (images,))
print(type(slim).__name__, sum(p.numel() for p in slim.parameters()))
print("equal:", demask.verify(net, slim, (images,)).ok)
