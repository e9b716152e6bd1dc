"""Side networks: what constants under zero padding make is computed for one image of a batch."""

import torch
from torch import Tensor, nn

import demask
from test_micro import difference


class Parts(nn.Module):
    """A value of which one part is constant, and half of another a constant that met a border."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 1)
        self.depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.last = nn.Conv2d(8, 5, 3)
        with torch.no_grad():
            self.first.weight[:8] = 0
            self.depthwise.weight[:4] = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, z = self.depthwise(self.first(x)).split([4, 8], 1)
        return y.amax(1), self.last(z)


def test_a_part_that_is_known_beside_one_that_varies_at_borders() -> None:
    torch.manual_seed(0)
    net = Parts().double().eval()
    slim = demask.demask(net, (torch.randn(3, 3, 9, 9).double(),), result="graph")
    for batch in (3, 1):
        x = torch.randn(batch, 3, 9, 9).double()
        expected, found = net(x), slim(x)
        assert max(map(difference, expected, found)) <= 1e-10
    sizes = {name: tuple(p.shape) for name, p in slim.named_parameters()}
    assert sizes["first.weight"][0] == sizes["depthwise.weight"][0] == 4
    assert sizes["last.weight"][1] == 4
