"""Networks that do not fit the accelerator's memory at once run in parts, with equal results."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from demask.errors import BadInput, BudgetTooSmall
from demask.exec.device import Device
from demask.stride.accelerator.addresses import INSTRUCTION_BYTES
from demask.stride.accelerator.instructions import Instructions, instructions
from demask.stride.accelerator.machine import ACTIVATIONS, HOST, WEIGHTS, Machine, compress, decompress
from instruction_networks import drawn, images, mobilenet, plain, resnet, same


class Residual(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.a, self.b = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return torch.relu(x + self.b(torch.relu(self.a(x))))


def stack() -> nn.Sequential:
    """Its values take 384 KiB for an image of 64 x 64."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Residual(), nn.Conv2d(8, 3, 3, padding=1))


def back(listing: Instructions) -> Instructions:
    return Instructions.from_dict(json.loads(json.dumps(listing.to_dict())))


def test_384_kib_in_50() -> None:
    model, x = drawn(stack()), images(1, 3, 64, 64)
    full = instructions(model, (x,))
    small = instructions(model, (x,), machine=Machine(activation_bytes=50 * 1024))
    assert full.plan is None and full.sizes[ACTIVATIONS] == 384 * 1024
    assert small.plan is not None and small.sizes[ACTIVATIONS] <= 50 * 1024
    same(small, model, x)
    assert small.counts.macs == full.counts.macs
    assert small.counts.total <= 2.5 * full.counts.total
    assert torch.equal(back(small).run(x), small.run(x)) and back(small).plan == small.plan
    assert "bands" in str(small.plan)


@pytest.mark.parametrize("share", [0.6, 0.3])
@pytest.mark.parametrize("network", [resnet, mobilenet])
def test_classifiers(network, share: float) -> None:
    """Strided, with pools over all rows: these are sums of sums of bands."""
    model, x = drawn(network()), images(2, 3, 64, 64)
    full = instructions(model, (x,))
    room = int(full.sizes[ACTIVATIONS] * share)
    small = instructions(model, (x,), machine=Machine(activation_bytes=room))
    assert small.sizes[ACTIVATIONS] <= room and small.counts.macs == full.counts.macs
    same(small, model, x)


def test_values_between_parts_are_on_the_host() -> None:
    model, x = drawn(stack()), images(1, 3, 64, 64)
    small = instructions(model, (x,), machine=Machine(activation_bytes=24 * 1024))
    spilled = {name for segment in small.plan.segments for name in segment.spills}
    assert spilled
    stored = {row.writes.value for row in small.instructions if row.writes.buffer == HOST}
    assert len(stored) == len(spilled) + 1
    loaded = {row.reads[0].value for row in small.instructions if row.op == "load"} - set(small.weights)
    assert loaded == {small.inputs[0][0]} | stored - {name for name, _ in small.outputs}
    same(small, model, x)


@pytest.mark.parametrize("kind", ["dense", "compressed"])
def test_one_memory_for_weights_values_and_instructions(kind) -> None:
    model, x = drawn(stack()), images(1, 3, 64, 64)
    for parameter in model.parameters():
        keep = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1)) < 0.2
        parameter.data *= keep if parameter.ndim > 1 else 1
    device = Device("50KiB", weights=kind)
    listing = instructions(model, (x,), device=device)
    same(listing, model, x)
    used = sum(listing.sizes.values()) + INSTRUCTION_BYTES * len(listing.instructions)
    assert used <= device.bytes
    assert listing.machine.activation_bytes + listing.sizes[WEIGHTS] <= device.bytes
    dense = sum(-(-tensor.numel() // 16) * 64 for tensor in listing.weights.values())
    assert listing.sizes[WEIGHTS] == dense if kind == "dense" else listing.sizes[WEIGHTS] < dense / 2
    assert torch.equal(back(listing).run(x), listing.run(x))


def test_compressed_weights_leave_more_for_values() -> None:
    model, x = (
        drawn(nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.Conv2d(64, 16, 3, padding=1))),
        images(1, 16, 8, 8),
    )
    for conv in model:
        conv.weight.data[:, 2:] = 0
    listing = instructions(model, (x,), device=Device("48KiB", weights="compressed"))
    same(listing, model, x)
    with pytest.raises(BudgetTooSmall, match=r"the device has 48.0 KiB, the network needs") as refusal:
        instructions(model, (x,), device=Device("48KiB", weights="dense"))
    enough = Device(refusal.value.least, weights="dense")
    assert instructions(model, (x,), device=enough).sizes[WEIGHTS] > 48 * 1024


@pytest.mark.parametrize("shape", [(1,), (31,), (32,), (3, 33), (2, 3, 5, 7)])
def test_compression(shape) -> None:
    for density in (0.0, 0.3, 1.0):
        weight = images(*shape) * (torch.rand(shape, generator=torch.Generator().manual_seed(3)) < density)
        words = compress(weight)
        assert torch.equal(decompress(words, shape), weight)
        assert len(words) == -(-weight.numel() // 32) + int(weight.count_nonzero())
        if density == 0.3:
            assert 4 * len(words) == Device(1, weights="compressed").weight_bytes([weight]) or weight.numel() < 9


@pytest.mark.parametrize("words", [[], [0], [1, 2, 3, 4], [0, 0, 0]])
def test_damaged_words_are_refused(words) -> None:
    """Of 33 elements: two words of bits, and as many nonzeros as bits."""
    with pytest.raises(BadInput, match=r"expected (a bit for each|\d+ nonzeros)"):
        decompress(torch.tensor(words, dtype=torch.int32).view(torch.float32), (33,))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["outside", "dense", "compressed"])
@pytest.mark.parametrize("network", [resnet, stack])
def test_what_an_error_asks_for_is_enough(network, kind) -> None:
    model, x = drawn(network()), images(1, 3, 32, 32)
    for room in (256, 6 * 1024):
        try:
            instructions(model, (x,), device=Device(room, weights=kind))
        except BudgetTooSmall as error:
            enough = Device(error.least, weights=kind)
            assert room < enough.bytes
            assert instructions(model, (x,), device=enough).plan is not None


def test_borders_are_the_units_own() -> None:
    """A pad of zeros before a convolution, or of -inf before a maximum, is not written: units read beyond images."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x):
            y = self.conv(F.pad(x, (1, 0, 2, 1)))
            return F.max_pool2d(F.pad(y, (1, 1, 0, 1), value=float("-inf")), 3, 1), F.pad(x, (1, 0, 2, 1))

    model, x = drawn(Net()), images(1, 3, 9, 9)
    listing = plain(model, (x,))
    same(listing, model, x)
    assert [row.op for row in listing.instructions].count("fill") == 1  # of the second result


def test_blocks_of_the_host_are_checked() -> None:
    model, x = drawn(stack()), images(1, 3, 64, 64)
    small = instructions(model, (x,), machine=Machine(activation_bytes=24 * 1024))
    rows = small.instructions
    middle = next(k for k, row in enumerate(rows) if row.writes.buffer == HOST)
    last = max(k for k, row in enumerate(rows) if row.writes.buffer == HOST)
    with pytest.raises(BadInput, match="expected a block that is stored on the host"):
        replace(small, instructions=rows[:middle] + rows[middle + 1 :]).run(x)
    with pytest.raises(BadInput, match="expected all blocks of"):
        replace(small, instructions=rows[:last] + rows[last + 1 :]).run(x)
    data = small.to_dict()
    load = next(row for row in data["instructions"] if row["op"] == "load" and "start" in row["settings"])
    for name, wrong in (("start", [0, 0, 64, 0]), ("size", [1, 3, 65, 64]), ("start", [0, 0])):
        before, load["settings"][name] = load["settings"][name], wrong
        with pytest.raises(BadInput, match="expected a block"):
            Instructions.from_dict(data)
        load["settings"][name] = before
    store = next(row for row in data["instructions"] if row["op"] == "store")
    store["settings"]["at"] = [0, 0, 64, 0]
    with pytest.raises(BadInput, match="expected a block within the result"):
        Instructions.from_dict(data)


def test_values_without_rows_are_not_cut() -> None:
    model, x = drawn(nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 8))), images(1, 64)
    with pytest.raises(BudgetTooSmall, match="pass machine=Machine"):
        instructions(model, (x,), machine=Machine(activation_bytes=8192))
    with pytest.raises(BadInput, match=r"expected demask.traverse.Device"):
        instructions(model, (x,), device="50KiB")  # type: ignore[arg-type]
