"""Lists of instructions in JSON: they come back; what is damaged is refused."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch.nn import functional as F

from demask.errors import BadInput
from demask.stride.accelerator.instructions import Instructions
from demask.stride.accelerator.machine import ACTIVATIONS, BufferOperand, Instruction
from demask.stride.accelerator.units import ABILITIES, check_instruction
from instruction_networks import Function, drawn, images, lenet, plain


@pytest.fixture(scope="module")
def stored():
    model, x = drawn(lenet()), images(1, 1, 28, 28)
    listing = plain(model, (x,))
    return listing, listing.to_dict(), x


def test_a_list_comes_back_from_json(stored):
    listing, data, x = stored
    again = Instructions.from_dict(json.loads(json.dumps(data, allow_nan=False)))
    assert again.to_dict() == data
    assert again.counts == listing.counts
    assert str(again) == str(listing)
    assert torch.equal(again.run(x), listing.run(x))


def test_settings_that_are_not_finite_come_back():
    model, x = Function(lambda x: F.pad(x, (1, 1), value=-math.inf)).eval(), images(2, 3)
    again = Instructions.from_dict(json.loads(json.dumps(plain(model, (x,)).to_dict())))
    assert torch.equal(again.run(x), model(x))


def _row(data, op):
    return next(row for row in data["instructions"] if row["op"] == op)


def _first(data, key, value):
    data[key][0] = value


HOSTILE = {
    "no object": lambda d: d.clear(),
    "format": lambda d: d.update(format="demask instructions 9"),
    "another key": lambda d: d.update(code="import os"),
    "machine": lambda d: d["machine"].update(rows=0),
    "machine of text": lambda d: d["machine"].update(rows="128"),
    "machine's keys": lambda d: d["machine"].pop("lanes"),
    "sizes": lambda d: d["sizes"].update(activations=2**60),
    "sizes of weights": lambda d: d["sizes"].update(weights=2**33),
    "sizes that no machine has": lambda d: (
        d["machine"].update(activation_bytes=2**47),
        d["sizes"].update(activations=2**40),
    ),
    "sizes, negative": lambda d: d["sizes"].update(activations=-64),
    "sizes, odd": lambda d: d["sizes"].update(activations=63),
    "ports": lambda d: _first(d, "inputs", ["x", [2**50]]),
    "port of a weight's name": lambda d: _first(d, "inputs", ["0.weight", [1]]),
    "no output": lambda d: d["instructions"].pop(),
    "two outputs": lambda d: d["instructions"].append(d["instructions"][-1]),
    "op": lambda d: _row(d, "convolve").update(op="system"),
    "op of no text": lambda d: _row(d, "convolve").update(op=["convolve"]),
    "operands": lambda d: _row(d, "convolve").update(reads=[]),
    "operand": lambda d: _row(d, "convolve")["reads"].__setitem__(0, ["x", "host", 0]),
    "buffer": lambda d: _row(d, "convolve")["reads"][0].__setitem__(1, "disk"),
    "buffer of no text": lambda d: _row(d, "convolve")["reads"][0].__setitem__(1, {}),
    "host": lambda d: _row(d, "convolve")["reads"][0].__setitem__(1, "host"),
    "address": lambda d: _row(d, "convolve")["reads"][0].__setitem__(2, -4),
    "address, odd": lambda d: _row(d, "convolve")["reads"][0].__setitem__(2, 2),
    "address, far": lambda d: _row(d, "convolve")["reads"][0].__setitem__(2, 2**40),
    "shape": lambda d: _row(d, "convolve")["writes"].__setitem__(3, [1, 6, 28, 29]),
    "shape of zero": lambda d: _row(d, "convolve")["writes"].__setitem__(3, [1, 0, 28, 28]),
    "shape of floats": lambda d: _row(d, "convolve")["writes"].__setitem__(3, [1.0, 6, 28, 28]),
    "groups": lambda d: _row(d, "convolve")["settings"].update(groups=0),
    "groups of text": lambda d: _row(d, "convolve")["settings"].update(groups="1"),
    "dilation": lambda d: _row(d, "convolve")["settings"].update(dilation=[0, 1]),
    "padding": lambda d: _row(d, "convolve")["settings"].update(before=[2**40, 2]),
    "padding, negative": lambda d: _row(d, "convolve")["settings"].update(before=[-2, 2]),
    "setting missing": lambda d: _row(d, "convolve")["settings"].pop("after"),
    "setting unknown": lambda d: _row(d, "convolve")["settings"].update(stride=[2, 2]),
    "window": lambda d: _row(d, "average_pool")["settings"].update(window=[0, 2]),
    "step": lambda d: _row(d, "average_pool")["settings"].update(step=[3, 3]),
    "product": lambda d: _row(d, "product")["settings"].update(transposed=0),
    "immediate": lambda d: _row(d, "sigmoid")["settings"].update(immediate=1.0),
    "weight": lambda d: d["weights"]["0.weight"].update(data="!" * 800),
    "weight, short": lambda d: d["weights"]["0.weight"].update(data="AAAA"),
    "weight's shape": lambda d: d["weights"]["0.weight"].update(shape=[6, 1, 5, 6]),
    "weight gone": lambda d: d["weights"].pop("0.weight"),
    "weights": lambda d: d.update(weights=[]),
    "notes": lambda d: d.update(notes=[1]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_json_is_refused(stored, name):
    data = copy.deepcopy(stored[1])
    HOSTILE[name](data)
    with pytest.raises(BadInput):
        Instructions.from_dict(data)


@pytest.mark.parametrize("data", [None, [], 3, "list", {"format": "demask instructions 1"}])
def test_what_is_no_list_is_refused(data):
    with pytest.raises(BadInput):
        Instructions.from_dict(data)


def test_every_value_of_a_list_may_be_damaged(stored):
    """Each leaf of the JSON, replaced: refused, or a list that runs or stops with BadInput."""
    data = stored[1]
    seen = 0
    for row in range(len(data["instructions"])):
        for change in ([], None, -1, 2**62, "x", {}, 0.5, True):
            for where in ("reads", "writes", "settings", "op"):
                damaged = {**data, "instructions": list(data["instructions"])}
                damaged["instructions"][row] = {**data["instructions"][row], where: change}
                if damaged["instructions"][row] == data["instructions"][row]:
                    continue
                try:
                    Instructions.from_dict(damaged)
                except BadInput:
                    seen += 1
    assert seen > 500


@pytest.mark.parametrize("op", sorted(ABILITIES))
def test_every_op_checks_its_operands(op):
    """No op takes as many operands as none does, or a setting that nobody knows."""
    x = BufferOperand("x", ACTIVATIONS, 0, (1,))
    with pytest.raises(BadInput, match="operands"):
        check_instruction(Instruction(op, (x,) * 5, x, {}))
    count = ABILITIES[op].reads[0]
    with pytest.raises(BadInput):
        check_instruction(Instruction(op, (x,) * count, x, {"unknown": 1}))
