"""Sparse training: layers that store and update the nonzeros of a pattern alone.

`SparseLinear.from_dense` takes the nonzeros of a layer. Weights, gradients and the optimizer's
states are then as large as these; there is no dense weight. `demask.optimize` uses the same
kernels for inference, where they were measured to be faster. On 2 cores that is from about 70 %
zeros on, on a GPU hardly ever: see [when it does not help](../docs/losses.md) and [sparse
weights](../docs/sparse.md).

It prints:

```text
same outputs: True
loss fell below half: True
2,000 numbers of 17,668; 4,000 of states
```
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import prune

from demask.sparse import SparseLinear

torch.manual_seed(0)
dense = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
for layer in (dense[0], dense[2]):
    prune.l1_unstructured(layer, "weight", amount=0.9)
    prune.remove(layer, "weight")

net = nn.Sequential(SparseLinear.from_dense(dense[0], "relu"), SparseLinear.from_dense(dense[2]))
x, classes = torch.randn(256, 64), torch.randint(4, (256,))
print("same outputs:", torch.allclose(net(x), dense(x), atol=1e-5))

optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
losses = []
for _ in range(50):
    optimizer.zero_grad()
    loss = cross_entropy(net(x), classes)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("loss fell below half:", losses[-1] < losses[0] / 2)

numbers = sum(p.numel() for p in net.parameters())
states = sum(t.numel() for s in optimizer.state.values() for t in s.values() if t.numel() > 1)
print(f"{numbers:,} numbers of {sum(p.numel() for p in dense.parameters()):,};", f"{states:,} of states")
