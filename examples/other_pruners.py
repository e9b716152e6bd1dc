"""Masks of other tools: Torch-Pruning, NNI, SparseML, or tensors of your own.

All that `demask` reads is numbers, so what another tool left is enough, in one of three forms:

- Weights with zeros (SparseML, LLM-Compressor, `prune.remove`, any `state_dict`): load them.
- Masks by layer (NNI: `{"conv1": {"weight": mask, "bias": mask}}`): `masks={"conv1.weight": mask}`.
- Channels that go together (Torch-Pruning lists them in groups): set them to zero, or write masks.

Masks passed by name are applied first; with `masks=` only declared zeros are removed, and a
weight that is zero for another reason stays trainable. Torch-Pruning also cuts by itself
(`group.prune()`), but with a constant left in a cut channel its result is another network: a
mask, removed here, is not. See [what counts as a mask](../docs/guide.md#what-counts-as-a-mask).

It prints:

```text
zeros: Conv2d(3, 6, kernel_size=(3, 3), stride=(1, 1))
masks: Conv2d(3, 6, kernel_size=(3, 3), stride=(1, 1))
group: Conv2d(3, 6, kernel_size=(3, 3), stride=(1, 1)) True
```
"""

import torch
from torch import nn

import demask


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)]
    return nn.Sequential(*layers).eval()


images = torch.randn(2, 3, 16, 16)
dead = torch.arange(16) < 10

# Weights with zeros, as SparseML writes them: a state_dict is loaded, nothing else is known.
state = network().state_dict()
for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
    state[name][dead] = 0
torch.save(state, "sparse.pt")
net = network()
net.load_state_dict(torch.load("sparse.pt"))
print("zeros:", demask.demask(net, (images,))[0])

# Masks by layer, as NNI saves them (torch.save of nested mappings).
live = (~dead).float()
torch.save({"0": {"weight": live.view(-1, 1, 1, 1).expand(16, 3, 3, 3), "bias": live}}, "nni.pt")
masks = {
    f"{layer}.{name}": mask
    for layer, tensors in torch.load("nni.pt").items()
    for name, mask in tensors.items()
    if mask is not None
}
slim = demask.demask(network(), (images,), masks=masks)
print("masks:", slim[0])

# Channels of a group, as Torch-Pruning lists them: (name of the layer, channels) pairs.
net, group = network(), [("0", range(10)), ("1", range(10))]
with torch.no_grad():
    for layer, channels in group:
        module = net.get_submodule(layer)
        module.weight[list(channels)] = 0
        module.bias[list(channels)] = 0
slim = demask.demask(net, (images,))
print("group:", slim[0], demask.verify(net, slim, (images,)).ok)
