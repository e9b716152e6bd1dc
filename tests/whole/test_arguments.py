"""Values that mean nothing are refused where they are passed: expected, got, what now."""

import math

import pytest
import torch
from torch import nn

import demask
from demask.errors import BadInput, InternalError
from demask.failures import public, strict
from demask.pilot import (
    Constant,
    Downsample,
    LowRank,
    PacketReader,
    Precision,
    Regions,
    Route,
    Router,
    Skip,
    clopper_pearson,
    explain,
    guarantee,
    paired_bound,
    write_packets,
)
from demask.pilot.chains.chain_cost import NOMINAL
from demask.pilot.guarantee import Outcomes
from demask.sparse import SparseConvTranspose1d, SparseConvTranspose2d, SparseLinear
from demask.stride import Target, instructions
from demask.traverse import Plan, plan, tile

NET = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
ROW, IMAGE = torch.ones(1, 8), torch.ones(1, 3, 9, 9)
CONV = nn.Conv2d(3, 8, 3)
NONE = torch.zeros(0, 10, dtype=torch.bool)


class Total(nn.Module):
    """A scalar."""

    def forward(self, x):
        return x.sum()


def explained(net=NET, inputs=(ROW,), **options):
    return explain(net, inputs, **{"candidates": [("", "columns")], "machine": NOMINAL} | options)


VALUES = {
    "no networks": lambda: Router(5, NET, Route(0.5)),  # type: ignore[arg-type]
    "no pilot": lambda: Router(NET, "bits:4", Route(0.5)),  # type: ignore[arg-type]
    "no route": lambda: Router(NET, NET, 0.5),  # type: ignore[arg-type]
    "route below": lambda: Route(-1),
    "route above": lambda: Route(1.5),
    "route in words": lambda: Route("0.5"),  # type: ignore[arg-type]
    "half a bit": lambda: Precision(0.5, bits=4.5),  # type: ignore[arg-type]
    "keep in words": lambda: Skip("0.5"),  # type: ignore[arg-type]
    "keep nan": lambda: Skip(math.nan),
    "no constant": lambda: Constant(0.5, value=None),  # type: ignore[arg-type]
    "regions nan": lambda: Regions(math.nan),
    "endless factor": lambda: Downsample(math.inf),
    "rank in words": lambda: LowRank("0.5"),  # type: ignore[arg-type]
    "largest nan": lambda: Target("a", frozenset(), largest=math.nan),
    "stride in words": lambda: Target("a", frozenset(), conv_stride="2"),  # type: ignore[arg-type]
    "half a count": lambda: clopper_pearson(1.5, 2),  # type: ignore[arg-type]
    "negative count": lambda: paired_bound(-5, 10, 100),
    "no knobs": lambda: guarantee(Outcomes((), NONE, NONE, NONE)),
    "no tensors": lambda: Outcomes((0.5,), [1], [1], [1]),  # type: ignore[arg-type]
    "no outcomes": lambda: guarantee(5),  # type: ignore[arg-type]
    "explain no network": lambda: explained(5),
    "explain a program": lambda: explained(torch.export.export(NET, (ROW,))),
    "explain no inputs": lambda: explained(inputs=5),
    "explain a scalar": lambda: explained(Total()),
    "explain another size": lambda: explained(inputs=[ROW, torch.ones(1, 9)]),
    "explain no pairs": lambda: explained(candidates=["columns"]),
    "explain no texts": lambda: explained(candidates=[(1, 2)]),
    "explain a loss": lambda: explained(loss="a"),
    "workers in words": lambda: tile(CONV, (IMAGE,), memory="1GiB", workers="a"),  # type: ignore[arg-type]
    "half a worker": lambda: plan(CONV, (IMAGE,), memory="1GiB", workers=1.5),  # type: ignore[arg-type]
    "no machine": lambda: instructions(NET, (ROW,), machine=5),  # type: ignore[arg-type]
    "lists for tensors": lambda: demask.resize(nn.Linear(2, 2), {"weight": [1], "bias": [1]}),  # type: ignore[dict-item]
    "same": lambda: SparseConvTranspose1d(torch.ones(3, 6), kernel_size=3, padding="same"),
    "valid": lambda: SparseConvTranspose2d(torch.ones(3, 9), kernel_size=3, padding="valid"),
}


@pytest.mark.parametrize("call", VALUES.values(), ids=VALUES)
def test_a_value_that_means_nothing_is_refused(call):
    with strict(False), pytest.raises(BadInput, match=r"expected .*got|must be .*got|does not fit"):
        call()


@pytest.mark.parametrize("weights", [5, None, [torch.ones(2)]])
def test_packets_are_of_named_tensors(weights, tmp_path):
    with strict(False), pytest.raises(BadInput, match="names to tensors"):
        write_packets(tmp_path / "a", weights)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("k", [-1, 4, 1.5, True])
def test_a_packet_that_is_not_there_has_no_marker(k, tmp_path):
    index = write_packets(tmp_path / "a", nn.Linear(1024, 4))
    with PacketReader(tmp_path / "a") as reader:
        assert reader.marker(len(index.packets) - 1).count == 1
        with pytest.raises(BadInput, match="from 0 to 3"):
            reader.marker(k)


def test_a_plan_says_yes_or_no_to_several_images():
    stored = plan(CONV, (IMAGE,), memory="1GiB").to_dict()
    assert Plan.from_dict(stored | {"images": True}).images
    for value in (5, 0, 1, None, "true"):
        with pytest.raises(BadInput, match="true or false"):
            Plan.from_dict(stored | {"images": value})


def test_weights_of_a_wider_layer_do_not_fit():
    layer = SparseLinear(torch.ones(3, 4))
    layer.load_state_dict(SparseLinear(torch.eye(3, 4)).state_dict())
    with pytest.raises(RuntimeError, match="size mismatch for col"):
        layer.load_state_dict(SparseLinear(torch.ones(3, 6)).state_dict())


def test_explain_does_not_change_a_network_that_trains():
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    explained(net, [torch.randn(2, 8)])
    assert net.training and all(part.training for part in net)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


class Kind:
    pass


@public
def several(count: int, share: float | None = None, kind: Kind | None = None, *, names: list[str] | None = None):
    raise TypeError("inside")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"count": "a"}, "count must be int, got 'a' (str)"),
        ({"count": 1, "share": "a"}, "share must be float or None, got 'a' (str)"),
        ({"count": 1, "share": 1, "kind": 5}, "kind must be Kind or None, got 5 (int)"),
        ({"count": 1, "names": "a"}, "names must be list or None, got 'a' (str)"),
    ],
)
def test_what_fails_inside_names_the_argument_of_another_type(arguments, words):
    with strict(False), pytest.raises(BadInput) as error:
        several(**arguments)
    assert str(error.value) == f"several: {words}"


def test_what_fails_inside_with_the_right_types_is_a_defect():
    with strict(False), pytest.raises(InternalError):
        several(1, 2, Kind(), names=["a"])
