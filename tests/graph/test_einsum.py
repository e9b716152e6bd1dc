"""einsum of any operands becomes products of two operands that the table has."""

import pytest
import torch
from torch import nn

import demask
from demask.graph.capture.capture import capture
from demask.graph.capture.functionalize import functionalize
from demask.ops import TABLE, Relation, bind
from demask.rewrites.driver import rewrite
from demask.rewrites.normalize import CANONICAL
from test_micro import difference

EQUATIONS = {
    "bi,oi,co->bc": ((3, 4), (5, 4), (6, 5)),
    "bi,ji,kj,lk->bl": ((3, 4), (5, 4), (6, 5), (2, 6)),
    "...i,oi->...o": ((2, 3, 4), (5, 4)),
    "...ti,...si->...ts": ((2, 3, 4, 5), (2, 3, 6, 5)),
    "bi,oi": ((3, 4), (5, 4)),
    "bij,oi->bo": ((3, 4, 5), (6, 4)),
    "bi,i,oi->bo": ((3, 4), (4,), (5, 4)),
    "bij->bi": ((3, 4, 5),),
    "bij->jb": ((3, 4, 5),),
    "bti,oi->bto": ((2, 3, 4), (5, 4)),
    "...->": ((2, 3),),
}


class Product(nn.Module):
    def __init__(self, equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.equation = equation
        self.weights = nn.ParameterList(torch.randn(shape).double() for shape in shapes[1:])

    def forward(self, x):
        return torch.einsum(self.equation, x, *self.weights)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_every_call_has_a_rule(equation):
    shapes = EQUATIONS[equation]
    net, x = Product(equation, shapes), torch.randn(shapes[0]).double()
    program = rewrite(functionalize(capture(net, (x,))), CANONICAL)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    assert all(isinstance(bind(node, TABLE), Relation) for node in calls)
    slim = demask.demask(net, (x,), result="graph")
    assert difference(net(x), slim(x)) <= 1e-12


def test_repeated_letters_stay():
    net, x = Product("bii->b", ((2, 3, 3),)), torch.randn(2, 3, 3).double()
    program = rewrite(functionalize(capture(net, (x,))), CANONICAL)
    assert any(node.target is torch.ops.aten.einsum.default for node in program.graph.nodes)
    assert difference(net(x), demask.demask(net, (x,), result="graph")(x)) == 0


def test_a_chain_of_products_is_cut():
    """Of 5 units 2 are read, of 6 channels 3: 4 · 2 + 2 · 3 + 3 · 2 numbers are left."""
    net = Product("bi,ji,kj,lk->bl", ((3, 4), (5, 4), (6, 5), (2, 6)))
    with torch.no_grad():
        net.weights[0][:3] = 0
        net.weights[1][:3] = 0
    x = torch.randn(3, 4).double()
    for result in ("graph", "class"):
        slim = demask.demask(net, (x,), result=result)
        assert difference(net(x), slim(x)) <= 1e-12
        assert sum(p.numel() for p in slim.parameters()) == 4 * 2 + 2 * 3 + 3 * 2
