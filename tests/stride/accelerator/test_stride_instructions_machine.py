"""What a list of instructions costs, where its values lie, what is noticed, what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from demask.errors import BadInput, BudgetTooSmall
from demask.stride.accelerator.instructions import _check_inputs, instructions
from demask.stride.accelerator.machine import ACTIVATIONS, HOST, WEIGHTS, BufferOperand, Instruction, Machine
from demask.stride.accelerator.units import unit_of
from instruction_networks import Block, Function, X, drawn, images, lenet, plain, same


def test_only_inputs_weights_and_outputs_cross():
    model, x = drawn(lenet()), images(2, 1, 28, 28)
    listing = plain(model, (x,))
    counts = listing.counts
    assert counts.transfers == {"weights": len(listing.weights), "inputs": 1, "outputs": 1}
    held = sum(tensor.numel() for tensor in model.state_dict().values())
    assert counts.transferred["weights"] == 4 * held
    assert counts.transferred["inputs"] == 4 * x.numel()
    assert counts.transferred["outputs"] == 4 * 20
    dma = [k for k, row in enumerate(listing.instructions) if unit_of(row.op) == "dma"]
    loads = len(listing.weights) + 1
    assert dma == [*range(loads), len(listing.instructions) - 1]
    between = listing.instructions[loads:-1]
    assert all(HOST not in [x.buffer for x in (*row.reads, row.writes)] for row in between)


def test_counts_are_those_of_the_model_of_cost():
    model, x = drawn(nn.Sequential(nn.Conv2d(3, 300, 3), nn.ReLU())), images(1, 3, 10, 10)
    machine = Machine(rows=16, columns=128, lanes=64, host_bytes=32)
    counts = plain(model, (x,), machine).counts
    made, tiles = 300 * 64, math.ceil(27 / 16) * math.ceil(300 / 128)
    assert counts.macs == 27 * made
    assert counts.cycles["matrix"] == tiles * 64 + 16 + 128
    assert counts.cycles["vector"] == 2 * made // 64  # bias and ReLU
    loaded = [math.ceil(4 * n / 32) for n in (27 * 300, 300, 300, made)]
    assert counts.cycles["dma"] == sum(loaded)
    assert counts.read[WEIGHTS] == 4 * (27 * 300 + 300)
    assert counts.written[ACTIVATIONS] == 4 * (300 + 3 * made)
    assert counts.read[ACTIVATIONS] == 4 * (3 * 300 + 3 * made)  # the image once per column tile
    assert counts.written[HOST] == 4 * made
    assert counts.loading == sum(loaded[:2])
    assert counts.total == sum(counts.cycles.values()) - counts.loading
    assert counts.instructions == {"dma": 4, "matrix": 1, "vector": 2, "pool": 0, "move": 0}


def test_pools_cost_the_taps_that_lie_in_the_image():
    model, x = nn.AvgPool2d(100, ceil_mode=True, padding=1), images(1, 128, 4, 5)
    counts = plain(model, (x,)).counts
    assert counts.cycles["pool"] == 5 * 6


def test_groups_share_a_tile_where_they_fit_on_its_diagonal():
    machine = Machine(rows=128, columns=128)
    assert machine.matrix(1000, 9, 1, 64) == math.ceil(64 / (128 // 9)) * 1000 + 256
    assert machine.matrix(1000, 200, 1, 4) == 4 * 2 * 1000 + 256
    assert machine.matrix(1, 128, 128, 1) == 128 + 256  # loading the tile takes its rows


def test_activations_share_places_and_vectors_write_over_what_they_read():
    model, x = drawn(lenet()), images(1, 1, 28, 28)
    listing = plain(model, (x,))
    values = {row.writes.value: row.writes for row in listing.instructions if row.writes.buffer == ACTIVATIONS}
    assert listing.sizes[ACTIVATIONS] < sum(operand.bytes for operand in values.values())
    vectors = [row for row in listing.instructions if unit_of(row.op) == "vector"]
    assert any(row.reads[0].address == row.writes.address for row in vectors)


def _moved(row: Instruction, value: str, address: int) -> Instruction:
    """An instruction that finds or leaves a value at another address."""
    reads, writes = (
        [replace(op, address=address) if op.buffer == ACTIVATIONS and op.value == value else op for op in ops]
        for ops in (row.reads, [row.writes])
    )
    return replace(row, reads=tuple(reads), writes=writes[0])


def test_a_value_laid_over_another_is_noticed():
    """Two values that are wanted at once, at one place: the read of the lost one stops the run."""
    model, x = drawn(Block(4, 4, 1)), images(1, 4, 6, 6)
    listing = plain(model, (x,))
    same(listing, model, x)
    made, read = {}, {}
    for k, row in enumerate(listing.instructions):
        read |= {op.value: k for op in row.reads if op.buffer == ACTIVATIONS}
        if row.writes.buffer == ACTIVATIONS:
            made.setdefault(row.writes.value, (k, row.writes.address))
    pairs = [(v, w) for v in made for w in made if made[v][0] < made[w][0] < read[v]]
    assert len(pairs) > 4
    for v, w in pairs:
        rows = tuple(_moved(row, w, made[v][1]) for row in listing.instructions)
        with pytest.raises(BadInput, match=r"instruction \d+ .*(holds|disjoint)"):
            replace(listing, instructions=rows).run(x)


def test_a_value_that_lies_elsewhere_is_noticed():
    model, x = drawn(Block(4, 4, 1)), images(1, 4, 6, 6)
    listing = plain(model, (x,))
    for k, row in enumerate(listing.instructions):
        if row.writes.buffer == ACTIVATIONS:
            rows = list(listing.instructions)
            rows[k] = _moved(row, row.writes.value, row.writes.address + 4)
            with pytest.raises(BadInput, match=r"instruction \d+"):
                replace(listing, instructions=tuple(rows)).run(x)


def test_a_word_that_is_overwritten_in_part_is_noticed():
    model, x = Function(lambda x: (x * 2).sum(1) + x.sum(1)).eval(), images(1, 3, 8)
    listing = plain(model, (x,))
    k = next(k for k, row in enumerate(listing.instructions) if row.op == "sum_pool")
    row = listing.instructions[k]
    inner = next(row for row in listing.instructions if row.op == "load").writes
    planted = Instruction("fill", (), BufferOperand("stray", ACTIVATIONS, inner.address + 40, (1,)), {"value": 0.0})
    rows = (*listing.instructions[:k], planted, *listing.instructions[k:])
    with pytest.raises(BadInput, match="byte 40 of them holds stray"):
        replace(listing, instructions=rows).run(x)
    assert row.op == "sum_pool"


def test_a_result_over_an_operand_of_another_form_is_noticed():
    x = BufferOperand("x", ACTIVATIONS, 0, (1, 4))
    row = Instruction(
        "product", (x, BufferOperand("w", WEIGHTS, 0, (4, 4))), replace(x, value="y", address=8), {"transposed": 0}
    )
    listing = plain(Function(lambda x: x + 1).eval(), (images(1, 4),))
    with pytest.raises(BadInput, match="disjoint result and operands"):
        replace(listing, instructions=(row,), sizes={WEIGHTS: 64, ACTIVATIONS: 64}).run(images(1, 4))


REFUSED = {
    "sort": (lambda x: x.sort(-1)[0], "sort.*no unit"),
    "two at once": (lambda x: x.cumsum(1) + x.logcumsumexp(1), "cumsum.*logcumsumexp"),
    "stride": (lambda x: F.conv2d(x, torch.ones(1, 3, 1, 1), stride=2), "steps of one"),
    "integers": (lambda x: (x > 0).sum(1), "only torch.float32"),
    "condition": (lambda x: torch.where(x > 0, x, 0), "depends on the input"),
    "windows that differ": (lambda x: F.adaptive_avg_pool2d(x, 2), "windows differ"),
    "where the maximum was": (lambda x: x.max(1)[1], "no unit"),
    "constant integers": (lambda x: (x, torch.arange(3)), "output.*only torch.float32"),
    "nothing": (lambda x: (x, None), "output.*None"),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), "no unit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_machine_lacks_is_refused_by_name(name):
    function, words = REFUSED[name]
    with pytest.raises(BadInput, match=words):
        plain(Function(function).eval(), (images(*X),))


def test_numbers_other_than_float32_are_refused():
    with pytest.raises(BadInput, match=r"input_1.*torch.float64"):
        plain(nn.ReLU(), (images(2, 3).double(),))


def test_dynamic_sizes_are_refused():
    batch = {0: torch.export.Dim.AUTO}
    made = torch.export.export(nn.Linear(3, 2), (images(4, 3),), dynamic_shapes=(batch,))
    with pytest.raises(BadInput, match="sizes of input_1 are dynamic"):
        instructions(made, (images(4, 3),))


def test_a_buffer_that_is_too_small_is_refused_with_what_is_needed():
    model, x = drawn(lenet()), images(2, 1, 28, 28)
    needed = plain(model, (x,)).sizes
    assert plain(model, (x,), Machine(weight_bytes=needed[WEIGHTS])).sizes == needed
    with pytest.raises(BudgetTooSmall, match=f"weight_bytes={needed[WEIGHTS]}"):
        plain(model, (x,), Machine(weight_bytes=needed[WEIGHTS] - 1))
    assert plain(model, (x,), Machine(activation_bytes=needed[ACTIVATIONS])).plan is None
    with pytest.raises(BudgetTooSmall, match="activation_bytes=") as refusal:
        plain(model, (x,), Machine(activation_bytes=64))
    enough = plain(model, (x,), Machine(activation_bytes=refusal.value.least))
    assert enough.plan is not None
    assert enough.sizes[ACTIVATIONS] <= refusal.value.least < needed[ACTIVATIONS]


def test_other_inputs_are_refused():
    listing = plain(nn.ReLU(), (images(2, 3),))
    for given in ((), (images(2, 4),), (images(2, 3).double(),), (images(2, 3),) * 2, ("x",)):
        with pytest.raises(BadInput, match=r"expected float32 tensors .*\(2, 3\)"):
            listing.run(*given)


def test_text_says_what_every_unit_does_and_where():
    listing = plain(drawn(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())), (images(1, 3, 5, 5),))
    lines = str(listing).splitlines()
    assert lines[0].startswith("7 instructions, ")
    assert [line.split()[1] for line in lines[-7:]] == ["dma", "dma", "dma", "matrix", "vector", "vector", "dma"]
    convolve = lines[-4]
    for words in (
        "convolve",
        "(1, 3, 5, 5)",
        "weights+0 0.weight (4, 3, 3, 3) -> activations+",
        "(1, 4, 5, 5)",
        "before 1 1",
        "groups 1",
    ):
        assert words in convolve


@pytest.mark.parametrize("inputs", [(), (torch.ones(1, 2),), (torch.ones(1, 3).double(),), (3,)])
def test_inputs_of_other_sizes_and_types_are_refused(inputs) -> None:
    _check_inputs((torch.ones(1, 3),), (("x", (1, 3)),))
    with pytest.raises(BadInput, match=r"expected float32 tensors x \(1, 3\)"):
        _check_inputs(inputs, (("x", (1, 3)),))
