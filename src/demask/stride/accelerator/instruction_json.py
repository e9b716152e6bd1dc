"""Instruction lists as JSON and back. Everything that is read is validated."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.machine.arena import align_size
from demask.stride.accelerator.machine import (
    ACTIVATIONS,
    BUFFERS,
    HOST,
    WEIGHTS,
    WORD,
    BufferOperand,
    Instruction,
    Machine,
    Setting,
    machine_of,
)
from demask.stride.accelerator.units import check_instruction

FORMAT = "demask instructions 1"
MAX_INSTRUCTIONS, MAX_RANK, MAX_TEXT = 1_000_000, 16, 1000
MAX_BYTES = 2**34  # of one buffer, which the interpreter allocates
Ports = tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes
_FIELDS = {"format", "machine", "inputs", "outputs", "weights", "instructions", "sizes", "notes"}
_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def encode(
    machine: Machine,
    inputs: Ports,
    outputs: Ports,
    weights: Mapping[str, Tensor],
    instructions: tuple[Instruction, ...],
    sizes: Mapping[str, int],
    notes: tuple[str, ...],
) -> dict[str, Any]:
    """An instruction list in JSON types."""
    return {
        "format": FORMAT,
        "machine": {name: getattr(machine, name) for name in Machine.__slots__},
        "inputs": [[name, list(shape)] for name, shape in inputs],
        "outputs": [[name, list(shape)] for name, shape in outputs],
        "sizes": dict(sizes),
        "notes": list(notes),
        "instructions": [_row(row) for row in instructions],
        "weights": {name: _packed(tensor) for name, tensor in weights.items()},
    }


def decode(data: Any) -> dict[str, Any]:
    """The fields of an instruction list that `encoded` wrote. Raises BadInput if it is damaged or
    cannot run on its machine."""
    _need(isinstance(data, dict) and set(data) == _FIELDS, f"an object with {sorted(_FIELDS)}", data)
    _need(data["format"] == FORMAT, f"the format {FORMAT!r}", data["format"])
    machine = machine_of(data["machine"])
    weights = _weights(data["weights"])
    notes, rows = data["notes"], data["instructions"]
    _need(isinstance(notes, list) and all(isinstance(n, str) for n in notes), "notes", notes)
    _need(isinstance(rows, list) and len(rows) <= MAX_INSTRUCTIONS, "a list of instructions", rows)
    inputs, outputs = _ports(data["inputs"]), _ports(data["outputs"])
    sizes = _sizes(data["sizes"], machine, weights)
    names = {name for name, _ in (*inputs, *outputs)}
    distinct = len(names) == len(inputs) + len(outputs) and not names & set(weights)
    _need(distinct, "distinct names of inputs, outputs and weights", sorted(names))
    host = {name: tuple(tensor.shape) for name, tensor in weights.items()} | dict(inputs)
    wanted, instructions = dict(outputs), list[Instruction]()
    for k, row in enumerate(rows):
        try:
            instructions.append(_instruction(row, sizes, host, wanted))
        except BadInput as error:
            raise BadInput(f"instruction {k}: {error}") from error
    stored = [row.writes.value for row in instructions if row.writes.buffer == HOST]
    _need(sorted(stored) == sorted(wanted), f"each of {sorted(wanted)} stored once", stored)
    return {
        "machine": machine,
        "inputs": inputs,
        "outputs": outputs,
        "weights": weights,
        "instructions": tuple(instructions),
        "sizes": sizes,
        "notes": tuple(notes),
    }


def _row(row: Instruction) -> dict[str, Any]:
    return {
        "op": row.op,
        "reads": [_operand_fields(operand) for operand in row.reads],
        "writes": _operand_fields(row.writes),
        "settings": {name: _encode(value) for name, value in row.settings.items()},
    }


def _operand_fields(operand: BufferOperand) -> list[Any]:
    return [operand.value, operand.buffer, operand.address, list(operand.shape)]


def _encode(value: Setting) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return value if math.isfinite(value) else str(value)


def _packed(tensor: Tensor) -> dict[str, Any]:
    data = tensor.contiguous().numpy().astype("<f4").tobytes()
    return {"shape": list(tensor.shape), "data": base64.b64encode(data).decode()}


def _weights(data: Any) -> dict[str, Tensor]:
    _need(isinstance(data, dict), "an object of weights", data)
    return {_text(name): _tensor(name, value) for name, value in data.items()}


def _tensor(name: str, data: Any) -> Tensor:
    _need(isinstance(data, dict) and set(data) == {"shape", "data"}, "a shape and data", data)
    shape, text = _shape(data["shape"]), data["data"]
    size = math.prod(shape) * WORD
    _need(
        isinstance(text, str) and len(text) == 4 * -(-size // 3),
        f"{size} bytes in base64 for the weight {name:.60}",
        text,
    )
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadInput(f"weight {name:.60}: expected base64 text, got other characters") from error
    _need(len(content) == size, f"{size} bytes for the weight {name:.60}", len(content))
    return torch.from_numpy(np.frombuffer(content, "<f4").astype(np.float32)).reshape(shape)


def _sizes(data: Any, machine: Machine, weights: Mapping[str, Tensor]) -> dict[str, int]:
    _need(isinstance(data, dict) and set(data) == {WEIGHTS, ACTIVATIONS}, "the buffers' sizes", data)
    room = {
        WEIGHTS: min(machine.weight_bytes, sum(align_size(t.numel() * WORD) for t in weights.values())),
        ACTIVATIONS: min(machine.activation_bytes, MAX_BYTES),
    }
    for buffer, size in data.items():
        is_valid = type(size) is int and 0 <= size <= room[buffer] and size % WORD == 0
        _need(is_valid, f"at most {room[buffer]} bytes of {buffer}", size)
    return dict(data)


def _ports(data: Any) -> Ports:
    _need(isinstance(data, list) and len(data) <= MAX_INSTRUCTIONS, "names and shapes", data)
    for port in data:
        _need(isinstance(port, list) and len(port) == 2, "a name and a shape", port)
    return tuple((_text(name), _shape(shape)) for name, shape in data)


def _instruction(
    data: Any, sizes: Mapping[str, int], host: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> Instruction:
    """An instruction from JSON. host: shapes of values that it may load. wanted: of outputs."""
    fields = {"op", "reads", "writes", "settings"}
    _need(isinstance(data, dict) and set(data) == fields, f"an object with {sorted(fields)}", data)
    reads, settings = data["reads"], data["settings"]
    _need(isinstance(reads, list) and isinstance(settings, dict), "operands and settings", data)
    operands = tuple(_operand(x, sizes, host) for x in reads)
    parsed_settings = {_text(name): _setting(value) for name, value in settings.items()}
    instruction = Instruction(_text(data["op"]), operands, _operand(data["writes"], sizes, wanted), parsed_settings)
    check_instruction(instruction)
    return instruction


def _operand(data: Any, sizes: Mapping[str, int], host: Mapping[str, tuple[int, ...]]) -> BufferOperand:
    _need(isinstance(data, list) and len(data) == 4, "a value, buffer, address and shape", data)
    value, buffer, address, shape = _text(data[0]), data[1], data[2], _shape(data[3])
    _need(isinstance(buffer, str) and buffer in BUFFERS, f"one of {BUFFERS}", buffer)
    _need(type(address) is int and address >= 0 and address % WORD == 0, "an address", address)
    if buffer == HOST:
        _need(host.get(value) == shape and address == 0, "a value of the host", data)
    else:
        end = address + math.prod(shape) * WORD
        _need(end <= sizes[buffer], f"an address within {sizes[buffer]} bytes of {buffer}", data)
    return BufferOperand(value, buffer, address, shape)


def _setting(value: Any) -> Setting:
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if type(value) is float or (type(value) is int and abs(value) < 2**48):
        return value
    if isinstance(value, list) and len(value) <= MAX_RANK:
        _need(all(type(n) is int and abs(n) < 2**48 for n in value), "integers", value)
        return tuple(value)
    raise BadInput(f"instruction list: expected a number or integers, got {value!r:.80}")


def _shape(data: Any) -> tuple[int, ...]:
    is_list = isinstance(data, list) and len(data) <= MAX_RANK
    _need(is_list and all(type(n) is int and 0 < n < 2**40 for n in data), "a shape", data)
    _need(math.prod(data) * WORD <= MAX_BYTES, f"at most {MAX_BYTES} bytes", data)
    return tuple(data)


def _text(data: Any) -> str:
    _need(isinstance(data, str) and len(data) <= MAX_TEXT, "a name", data)
    return data


def _need(is_valid: bool, expected: str, actual: Any) -> None:
    if not is_valid:
        text = repr(actual) if isinstance(actual, (str, int, float)) else str(actual)
        raise BadInput(f"instruction list: expected {expected}, got {text[:80]}")
