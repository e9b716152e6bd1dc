"""The form of instruction lists in JSON, and what a list from a file must obey."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.machine.arena import align_size
from demask.records import Limit, Stored, decode
from demask.stride.accelerator.machine import (
    ACTIVATIONS,
    HOST,
    MAX_BYTES,
    WEIGHTS,
    WORD,
    BufferOperand,
    Instruction,
    Shape,
    Text,
)
from demask.stride.accelerator.units import check_instruction

if TYPE_CHECKING:
    from demask.stride.accelerator.instructions import Instructions

FORMAT = "demask instructions 1"
MAX_INSTRUCTIONS = 1_000_000
SHORT = Limit(f"at most {MAX_INSTRUCTIONS}", lambda rows: len(rows) <= MAX_INSTRUCTIONS)
Ports = Annotated[tuple[tuple[Text, Shape], ...], SHORT]  # names and shapes
Steps = Annotated[tuple[Instruction, ...], SHORT]


def _write_weight(tensor: Tensor) -> dict[str, Any]:
    data = tensor.contiguous().numpy().astype("<f4").tobytes()
    return {"shape": list(tensor.shape), "data": base64.b64encode(data).decode()}


def _read_weight(data: Any) -> Tensor:
    _need(isinstance(data, dict) and set(data) == {"shape", "data"}, "a shape and data", data)
    shape, text = decode(Shape, data["shape"], "shape"), data["data"]
    size = math.prod(shape) * WORD
    _need(isinstance(text, str) and len(text) == 4 * -(-size // 3), f"{size} bytes in base64", text)
    content = base64.b64decode(text, validate=True)
    _need(len(content) == size, f"{size} bytes", len(content))
    return torch.from_numpy(np.frombuffer(content, "<f4").astype(np.float32)).reshape(shape)


Weights = Mapping[Text, Annotated[Tensor, Stored(_write_weight, _read_weight)]]


def check(listing: Instructions) -> Instructions:
    """A list from a file. Raises BadInput if it cannot run on its machine."""
    machine, weights, sizes = listing.machine, listing.weights, listing.sizes
    names = {name for name, _ in (*listing.inputs, *listing.outputs)}
    distinct = len(names) == len(listing.inputs) + len(listing.outputs) and not names & set(weights)
    _need(distinct, "distinct names of inputs, outputs and weights", sorted(names))
    room = {
        WEIGHTS: min(machine.weight_bytes, sum(align_size(t.numel() * WORD) for t in weights.values())),
        ACTIVATIONS: min(machine.activation_bytes, MAX_BYTES),
    }
    _need(set(sizes) == set(room), f"sizes of {sorted(room)}", sorted(sizes))
    for buffer, size in sizes.items():
        is_valid = 0 <= size <= room[buffer] and size % WORD == 0
        _need(is_valid, f"at most {room[buffer]} bytes of {buffer}", size)
    host = {name: tuple(tensor.shape) for name, tensor in weights.items()} | dict(listing.inputs)
    wanted = dict(listing.outputs)
    for k, row in enumerate(listing.instructions):
        try:
            for operand in row.reads:
                _check_operand(operand, sizes, host)
            _check_operand(row.writes, sizes, wanted)
            check_instruction(row)
        except BadInput as error:
            raise BadInput(f"instruction {k}: {error}") from error
    stored = [row.writes.value for row in listing.instructions if row.writes.buffer == HOST]
    _need(sorted(stored) == sorted(wanted), f"each of {sorted(wanted)} stored once", stored)
    return listing


def _check_operand(operand: BufferOperand, sizes: Mapping[str, int], host: Mapping[str, tuple[int, ...]]) -> None:
    """host: shapes of values of the host that the operand may be."""
    if operand.buffer == HOST:
        _need(host.get(operand.value) == operand.shape and operand.address == 0, "a value of the host", operand)
    else:
        size = sizes[operand.buffer]
        _need(operand.address + operand.bytes <= size, f"an address within {size} bytes", operand)


def _need(is_valid: bool, expected: str, actual: Any) -> None:
    if not is_valid:
        raise BadInput(f"instruction list: expected {expected}, got {str(actual)[:80]}")
