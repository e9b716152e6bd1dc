"""A ResNet of torchvision: pruned, demasked, trained on, saved, loaded, served.

A residual add joins the channels of several layers, so `Pruner` masks them alike: what it masks,
`demask` removes. The result is a `torchvision.models.ResNet` with smaller layers. Your own
training loop continues with it, with the same optimizer: `carry` cuts the momentum as the weights
were cut.

Images here are small and random, so that the script runs in seconds. With your own data replace
`images` and `classes`; to keep accuracy, prune in several steps with some epochs between them.

See [pruning](../docs/prune.md) for scores, schedules and budgets, and [ONNX](../docs/onnx.md).

It prints:

```text
ResNet with 2,801,450 parameters
before 11,181,642
loaded: True
resized: True
served: True
```
"""

import numpy as np
import onnxruntime
import torch
from torch.nn.functional import cross_entropy
from torchvision.models import resnet18

import demask
from demask import prune

torch.manual_seed(0)
net = resnet18(num_classes=10)
images, classes = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def train(network, steps):
    network.train()
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(network(images), classes).backward()
        optimizer.step()
    network.eval()


train(net, 1)
pruner = prune.Pruner(net, images[:1], schedule=prune.OneShot(0.5))
pruner.step()  # masks half of the channels of each group
slim = demask.demask(net, (images[:1],))  # without them
demask.carry(slim, optimizer)
train(slim, 1)  # trains on
print(type(slim).__name__, "with", f"{sum(p.numel() for p in slim.parameters()):,} parameters")
print("before", f"{sum(p.numel() for p in net.parameters()):,}")

# One file, loaded in the network's own class; no pickle.
demask.save(slim, "slim.demask")
loaded = demask.load("slim.demask", into=resnet18(num_classes=10)).eval()
print("loaded:", torch.equal(loaded(images), slim(images)))

# The same from a plain checkpoint.
torch.save(slim.state_dict(), "slim.pt")
resized = demask.resize(resnet18(num_classes=10), torch.load("slim.pt")).eval()
print("resized:", torch.equal(resized(images), slim(images)))

# In ONNX Runtime, which needs neither torch nor demask.
demask.to_onnx(slim, "slim.onnx", (images,))
session = onnxruntime.InferenceSession("slim.onnx", providers=["CPUExecutionProvider"])
(served,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
print("served:", np.allclose(served, slim(images).detach().numpy(), atol=1e-4))
