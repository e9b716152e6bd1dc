"""Comparing simplifiers: every number of a row, by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from demask.errors import BadInput
from demask.pilot import Bits, collect, compare, simplify
from pilot_networks import networks


@pytest.fixture(scope="module")
def residual():
    return networks()["residual"]


@pytest.fixture(scope="module")
def found(residual):
    model, args = residual
    by = ["bits:4", "channels:0.5", "downsample:2", "rank:0.5"]
    return compare(model, [(args[0][:2],), (args[0][2:],)], by=by, pairs=2, seconds=1)


def zeros(model, x):
    """Of each of the three ReLUs, where it gives zero."""
    seen = []
    with torch.no_grad():
        stem = F.relu(model.bn(model.stem(x)))
        a = F.relu(model.bna(model.a(stem)))
        seen += [stem == 0, a == 0, F.relu(stem + model.bnb(model.b(a))) == 0]
    return torch.cat([z.flatten() for z in seen])


@torch.no_grad()
def test_the_numbers_of_a_row(residual, found):
    model, (x,) = residual
    pilot = networks()["residual"][0]
    slim = simplify(model, (x,), by="bits:4")
    for name in ("stem", "a", "b", "head"):
        pilot.get_submodule(name).weight.copy_(slim.get_parameter(f"{name}.weight"))
    row, full, cheap = found.rows[0], model(x), pilot(x)
    torch.testing.assert_close(slim(x), cheap)
    assert row.agreement == (full.argmax(1) == cheap.argmax(1)).double().mean()
    assert row.error == pytest.approx(((full - cheap).norm() / full.norm()).item(), rel=1e-4)
    mine, theirs = zeros(model, x), zeros(pilot, x)
    assert row.precision == pytest.approx((mine & theirs).sum().item() / theirs.sum().item())
    assert row.recall == pytest.approx((mine & theirs).sum().item() / mine.sum().item())
    assert found.zeros == pytest.approx(mine.double().mean().item())
    both = [collect(net, (x,)).magnitudes for net in (model, pilot)]
    each = [torch.corrcoef(torch.stack([both[0][n].flatten(), both[1][n].flatten()]))[0, 1] for n in both[0]]
    assert row.correlation == pytest.approx(torch.stack(each).mean().item(), rel=1e-4)
    assert found.inputs == 3 and len(found.same["bits:4"]) == 3


def test_bytes_and_multiplications(residual, found):
    model, _ = residual
    weights = {n: p for n, p in model.named_parameters() if p.ndim > 1}
    rest = sum(p.nbytes for p in model.parameters() if p.ndim == 1)
    rest += sum(b.nbytes for b in model.buffers() if b.is_floating_point())
    bits, channels, smaller, thin = found.rows
    assert bits.weight_bytes == rest + sum(p.numel() // 2 + 4 * len(p) for p in weights.values())
    assert bits.macs == found.macs and found.weight_bytes == smaller.weight_bytes
    assert 3.5 < found.macs / smaller.macs < 4.1 and channels.macs < 0.5 * found.macs
    assert thin.weight_bytes < found.weight_bytes and thin.macs < found.macs
    assert all(row.speed and row.timing and row.timing.count >= 1 for row in found.rows)


def test_zeros_of_channels_that_are_gone_are_said_to_be_zero(residual, found):
    assert found.rows[1].recall is not None and found.rows[1].recall > 0.5
    assert found.rows[2].recall is not None  # of the nearest position of the smaller image


def test_what_is_refused_has_a_row_that_says_why():
    model, args = networks()["recurrent"]
    head = nn.Sequential(model, _First(), nn.Linear(7, 3)).eval()
    made = compare(head, args, by=[Bits(8), "downsample:2"], pairs=0)
    assert not made.rows[0].refused and made.rows[0].agreement is not None
    assert "no input has spatial axes" in made.rows[1].refused
    assert "downsample:2:bilinear: refused" in str(made)
    assert made.rows[0].speed is None and made.zeros is None and made.rows[0].recall is None


class _First(nn.Module):
    def forward(self, pair):
        return pair[0]


def test_the_text_and_the_numbers_agree(found):
    text, data = str(found), found.to_dict()
    assert [row["by"] for row in data["rows"]] == [row.by for row in found.rows]
    for row in found.rows:
        line = next(line for line in text.splitlines() if line.startswith(row.by))
        assert f"{100 * row.agreement:.1f} %" in line and f"{row.speed:.2f} ×" in line
    assert "3 inputs" in text


def test_outputs_without_classes_have_no_agreement():
    model, args = networks()["unet"]
    row = compare(model, args, by=["bits:8"], pairs=0).rows[0]
    assert row.error is not None and row.error < 0.02
    alone = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)).eval()
    assert compare(alone, (torch.randn(5, 4),), by=["bits:8"], pairs=0).rows[0].agreement is None


def test_no_inputs_and_unknown_simplifiers_are_refused(residual):
    with pytest.raises(BadInput, match="one input or more"):
        compare(residual[0], [])
    with pytest.raises(BadInput, match="expected a simplifier such as"):
        compare(*residual, by=["nothing"])


def test_multiplications_are_those_of_the_inputs_given():
    """Not those of the example that a network was exported with."""
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    sizes = ({0: torch.export.Dim("n", min=1, max=64)},)
    program = torch.export.export(net, (torch.randn(3, 6),), dynamic_shapes=sizes)
    found = compare(program, (torch.randn(5, 6),), by=["bits:8"], pairs=0)
    assert found.macs == found.rows[0].macs == 5 * (6 * 8 + 8 * 4)
