"""The curve of error against padding: measured by running the model on crops."""

import pytest
import torch
from test_traverse_halo import Apply, Level, conv, positive
from torch import nn

from demask.errors import BadInput
from demask.traverse.halo import halo


def test_the_curve_of_a_local_network_ends_at_nothing():
    model = nn.Sequential(*(conv(3, p=1) for _ in range(4)), Apply(lambda x: x / 1e4))
    x, told = torch.rand(1, 2, 64, 64, dtype=torch.float64), []
    positive(model).double()
    found = halo(model, (x,), curve=True, progress=lambda title, share: told.append(share))
    errors = {point.padding[0]: point.max_abs for point in found.curve}
    assert found.inputs[0].rows.before == 4
    assert all((error <= 1e-12) == (padding >= 4) for padding, error in errors.items())
    assert list(errors) == sorted(errors) and errors[0] > errors[3] > 0
    assert found.curve[0].changed > 0 == found.curve[-1].changed
    assert told == sorted(told) and told[-1] == 1


def test_the_curve_of_a_global_network_does_not():
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4))
    found = halo(model, (torch.rand(1, 2, 64, 64),), curve=True)
    assert min(point.max_abs for point in found.curve) > 1e-3
    assert any("tile's own statistics" in note for note in found.notes)


def test_the_curve_keeps_to_the_grid_of_strides():
    model = positive(Level(Level(conv(3, p=1), 2), 2)).double()
    found = halo(model, (torch.rand(1, 2, 64, 64, dtype=torch.float64),), curve=True)
    assert all(size % 4 == 0 for point in found.curve for size in point.padding)
    assert found.curve[-1].max_abs <= 1e-9 < found.curve[0].max_abs


def test_a_model_of_one_size_has_no_curve():
    model = nn.LayerNorm((2, 32, 32))
    with pytest.raises(BadInput, match="does not run on inputs"):
        halo(model, (torch.rand(1, 2, 32, 32),), curve=True)
