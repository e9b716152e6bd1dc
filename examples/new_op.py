"""A new op: one entry, and demask removes what is masked around it.

An op that the table does not know stops the cut: its inputs keep their sizes, the result is
correct, and the report says `no rule for ...`. One entry changes that. Its line names the axes;
the laws, run on the cases of the entry, say whether it is true, not that it is enough: that of a
product also says what a zero in an operand does, `Entry("... c, c -> ... c", zero="any")`. An op
of your own is registered by `torch.library.custom_op` with a fake, as `torch.export` needs it. A
package can add entries for its users: it exports a table, which all functions take as `table=`.

How to read a line, and all columns: [adding an op](../docs/architecture.md#adding-an-op); the
built-in entries: [the table](../docs/table.md).

It prints:

```text
without an entry: no rule for recipes.softsign.default
with it: (3, 4) equal: True
```
"""

import torch
from torch import nn

import demask
from demask.ops import TABLE, Case, Entry
from demask.ops.entry import Shape
from demask.ops.laws import check


@torch.library.custom_op("recipes::softsign", mutates_args=())
def softsign(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + x.abs())


@softsign.register_fake
def _(x):
    return torch.empty_like(x)


class Softsign(nn.Module):
    def forward(self, x):
        return softsign(x)


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), Softsign(), nn.Linear(8, 2)).eval()
net[0].weight.data[:5] = 0  # five outputs are constants
x = torch.randn(3, 4)

for reason in demask.demask(net, (x,)).demasked.reasons:
    print("without an entry:", reason.text)

entry = Entry("... -> ...", cases=(Case((Shape((2, 3, 4)),), {}),))  # each axis stays as it is
table = TABLE.extended({"recipes::softsign": entry})
check("recipes.softsign.default", table, demask.demask)  # raises where the line is wrong
slim = demask.demask(net, (x,), table=table)
print("with it:", tuple(slim[0].weight.shape), "equal:", demask.verify(net, slim, (x,), table=table).ok)
