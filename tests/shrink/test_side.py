"""Side networks: what constants under zero padding make is computed for one image of a batch."""

import torch
from torch import Tensor, nn

import demask
from micro import MICROS
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


def test_a_side_of_which_a_norm_leaves_nothing() -> None:
    """A convolution that reads no channel of it is zeros: torch returns no channel for it."""
    [case] = [case for case in MICROS if case.name == "constants_through_padded_depthwise"]
    torch.manual_seed(3)
    model, args = case.make()
    net, x = model.double().eval(), args[0].double()
    slim = demask.demask(net, (x,), result="graph")
    assert difference(net(x), slim(x)) <= 1e-12
    assert slim.demasked.after.parameters < 122  # with what other weights leave of it
