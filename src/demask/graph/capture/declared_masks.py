"""Declared masks: the zeros of parameters that are removed weights.

By default all zeros are. If only zeros of masks are, the zeros of a new adapter or gate are weights
like others: they remain, and can be trained.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from demask.errors import BadInput
from demask.graph.module_copy import structural_copy
from demask.graph.program import Constant, Program

Masks = str | Mapping[str, Tensor]


def declare_masks(program: Program, masks: Masks) -> Program:
    """The program whose parameters have `declared` masks: zeros are removed weights where `masks`
    is 0, or where the graph multiplies by a mask."""
    if masks == "zeros":
        return program
    constants, mask_by_name = {}, masks if isinstance(masks, Mapping) else {}
    for name, constant in program.constants.items():
        if constant.parameter:
            declared = torch.zeros(constant.tensor.shape, dtype=torch.bool)
            for name_of_mask in {name, constant.name, *constant.aliases} & set(mask_by_name):
                declared |= _removed(mask_by_name[name_of_mask])
            constant = replace(constant, declared=declared)
        constants[name] = constant
    return program.with_graph(program.graph, constants)


def draw_weights(program: Program, sign: int) -> dict[str, Constant]:
    """The constants with random numbers of one sign wherever a parameter was not removed."""
    draw = torch.Generator().manual_seed(0)
    constants = dict(program.constants)
    for name, constant in constants.items():
        if constant.declared is not None:
            other = sign * (1 + torch.rand(constant.tensor.shape, generator=draw))
            other = other.to(constant.tensor.dtype).masked_fill(constant.declared, 0)
            constants[name] = replace(constant, tensor=other)
    return constants


def apply_masks(model: nn.Module | ExportedProgram, masks: Masks) -> nn.Module | ExportedProgram:
    """A copy of the model with masked parameters. Raises BadInput for a mask that does not fit."""
    if not isinstance(masks, Mapping):
        if masks not in ("zeros", "declared"):
            text = "expected masks to be 'zeros', 'declared' or a mapping from names of parameters"
            raise BadInput(f"{text} to tensors of 0 and 1, got {_describe_value(masks)}")
        return model
    if not isinstance(model, (nn.Module, ExportedProgram)):
        return model  # capture raises an error
    parameters = _parameters(model)
    for name, mask in masks.items():
        _check(name, mask, parameters, model)
    if not masks:
        return model
    if isinstance(model, ExportedProgram):
        masked_program = copy.copy(model)
        masked_program._state_dict = {**model.state_dict}
        for name, mask in masks.items():
            values = parameters[name].detach().masked_fill(_removed(mask), 0)
            masked_program._state_dict[name] = nn.Parameter(values, parameters[name].requires_grad)
        return masked_program
    copied = structural_copy(model, share=False)
    with torch.no_grad():
        for name, mask in masks.items():
            _parameters(copied)[name].masked_fill_(_removed(mask), 0)
    return copied


def masks_of_submodule(masks: Masks, module: str) -> Masks:
    """The masks of one submodule, by the names of its parameters in the submodule."""
    if not isinstance(masks, Mapping):
        return masks
    start = f"{module}."
    return {name.removeprefix(start): m for name, m in masks.items() if name.startswith(start)}


def _removed(mask: Tensor) -> Tensor:
    return mask == 0


def _parameters(model: nn.Module | ExportedProgram) -> dict[str, Tensor]:
    if isinstance(model, ExportedProgram):
        return dict(model.named_parameters())
    return dict(model.named_parameters(remove_duplicate=False))


def _check(name: Any, mask: Any, parameters: Mapping[str, Tensor], model: Any) -> None:
    """Raise BadInput for a mask that does not fit its parameter."""
    if name not in parameters:
        near = difflib.get_close_matches(str(name), parameters, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {sorted(parameters)[:8]}"
        is_buffer = isinstance(name, str) and name in dict(model.named_buffers())
        description = "a buffer, no parameter" if is_buffer else "no parameter of the model"
        raise BadInput(f"masks: {name!r} is {description}; {hint}")
    if not isinstance(mask, Tensor):
        raise BadInput(
            f"masks[{name!r}]: expected a tensor of 0 and 1, got {_describe_value(mask)}: pass torch.as_tensor(mask)"
        )
    shape, parameter = tuple(mask.shape), parameters[name]
    try:
        fits = torch.broadcast_shapes(shape, parameter.shape) == parameter.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise BadInput(
            f"masks[{name!r}]: expected the parameter's shape {tuple(parameter.shape)}, or one "
            f"that broadcasts to it, got {shape}: to remove rows, pass mask.view(-1, 1, ...)"
        )
    if mask.device != parameter.device:
        raise BadInput(
            f"masks[{name!r}]: expected a mask on {parameter.device}, the parameter's "
            f"device, got one on {mask.device}: move it there"
        )
    if mask.is_complex() or not bool(((mask == 0) | (mask == 1)).all()):
        raise BadInput(f"masks[{name!r}]: expected only 0 (remove) and 1, got other numbers: pass mask != 0")


def _describe_value(value: Any) -> str:
    """A value for a message: a string as it is, the type of others."""
    return repr(value) if isinstance(value, str) else type(value).__name__
