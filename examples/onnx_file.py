"""An ONNX file: read, demasked, written; no code of the network is needed.

`demask slim model.onnx -o slim.onnx` does this in one command, edits the file in place of
exporting it, and measures in ONNX Runtime which widths are fast. In Python the network is an
`nn.Module` in between, which can be pruned and trained. See [ONNX files](../docs/onnx.md).

It prints:

```text
['input_1'] ['output']
3,208 -> 1,608 parameters, 2,583,936 -> 1,291,968 MACs per example
same outputs: True
```
"""

import numpy as np
import onnxruntime
import torch
from torch import nn
from torch.nn.utils import prune

import demask

# A masked file; yours comes from elsewhere.
torch.manual_seed(0)
images = torch.randn(2, 3, 32, 32)
net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 8, 3)).eval()
prune.remove(prune.ln_structured(net[0], "weight", amount=0.5, n=2, dim=0), "weight")
demask.to_onnx(net, "model.onnx", (images,))

network = demask.from_onnx("model.onnx")
print([port.name for port in network.interface.inputs], [port.name for port in network.interface.outputs])
slim = demask.demask(network, (images,))
demask.verify(network, slim, (images,))  # raises where they differ
demask.to_onnx(slim, "slim.onnx")  # same names, same dynamic sizes
print(demask.report(slim).summary)

answers = []
for file in ("model.onnx", "slim.onnx"):
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    answers.append(session.run(None, {session.get_inputs()[0].name: images.numpy()})[0])
print("same outputs:", np.allclose(*answers, atol=1e-5))
