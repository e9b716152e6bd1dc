"""MACs are those of one call on the example inputs, not on the sizes that were captured."""

import pytest
import torch
from torch import nn

import demask
from demask import pilot
from demask.ops import TABLE
from demask.optimize import optimized_provenance
from demask.shrink.pipeline import capture_program, shrink_program
from demask.stride import raise_strides

CONV = 32 * 32 * 8 * 3 * 9  # MACs for one image


def network() -> nn.Module:
    return nn.Conv2d(3, 8, 3, padding=1).eval()


def images(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, 32, 32)


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("reduce", [demask.demask, raise_strides])
def test_macs_are_those_of_the_example(reduce, batch):
    report = demask.report(reduce(network(), (images(batch),)))
    assert report.before.macs == report.after.macs == batch * CONV


@pytest.mark.parametrize("batch", [1, 3])
def test_macs_of_optimized_networks_are_those_of_the_example(batch):
    fast = demask.optimize(network(), (images(batch),), cache=False)
    assert demask.report(fast).before.macs == batch * CONV
    program = capture_program(network(), (images(batch),), None, None)
    record = optimized_provenance(*shrink_program(program, TABLE), TABLE)
    assert record.before.macs == record.after.macs == batch * CONV


@pytest.mark.parametrize("batch", [1, 3])
def test_macs_of_pilots_are_those_of_the_inputs(batch):
    found = pilot.compare(network(), [(images(batch),)], by=["bits:8"], pairs=0)
    assert found.macs == found.rows[0].macs == batch * CONV


@pytest.mark.parametrize("batch", [1, 4])
def test_macs_of_a_part_are_those_of_its_call(batch):
    model = nn.Sequential(network(), nn.ReLU())
    report = demask.report(demask.demask(model, (images(batch),), modules=["0"]))
    assert report.before.macs == report.after.macs == batch * CONV


def test_an_exported_program_has_the_sizes_of_its_own_example():
    batch = torch.export.Dim("batch")
    exported = torch.export.export(network(), (images(3),), dynamic_shapes=({0: batch},))
    assert demask.demask(exported).demasked.before.macs == 3 * CONV
    assert demask.demask(exported, (images(1),)).demasked.before.macs == CONV


@pytest.mark.parametrize("batch", [1, 3])
def test_macs_of_recurrent_layers_are_those_of_the_example(batch):
    model = nn.LSTM(4, 5, batch_first=True).eval()
    slim = demask.demask(model, (torch.randn(batch, 7, 4),))
    assert slim.demasked.before.macs == batch * 7 * 4 * 5 * (4 + 5)
