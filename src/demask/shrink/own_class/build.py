"""Builds a demasked program as the caller's own network: the same modules, with cut tensors.

Where every cut is expressed by shapes, a copy of the network with the cut tensors computes the
demasked program. That is proved, not assumed: the copy is captured, and its program must equal the
demasked one, call by call and number by number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from demask.graph.capture.capture import recorded_interface
from demask.graph.capture.fold_constants import plain_name
from demask.graph.module_copy import structural_copy
from demask.graph.program import Constant, Program, copy_tensors
from demask.graph.provenance import Cut, Positions
from demask.graph.result.computed_tensors import remove_parametrizations
from demask.graph.result.demasked_module import Demasked
from demask.graph.result.resize import assign_tensor, numbers_of, tensors_of, update_attributes
from demask.shrink.emit.constant_store import cut, select
from demask.shrink.own_class.numbers import calls_of, fit_numbers
from demask.shrink.own_class.proof import ProgramMismatch, Proof


def own_class(model: nn.Module, proof: Proof) -> nn.Module:
    """A network of the class of `model` that computes the smaller program. Raises ProgramMismatch
    where there is none."""
    copy = resize(model, proof)
    fit_numbers(copy, proof)
    return copy


def find_class(model: nn.Module | ExportedProgram) -> nn.Module:
    """The model, if it is of a class that its caller has; else raises ProgramMismatch."""
    if isinstance(model, ExportedProgram | Demasked) or recorded_interface(model) is not None:
        kind = "an ExportedProgram" if isinstance(model, ExportedProgram) else "a graph"
        raise ProgramMismatch(f"{kind} has no class of its own")
    return model


def resize(model: nn.Module, proof: Proof) -> nn.Module:
    """A copy of the model with the tensors of the smaller program, and torch's modules with numbers
    that fit them. Raises ProgramMismatch where there is no such network."""
    copy = structural_copy(model, share=True)
    remove_parametrizations(copy)
    for name in _assign(copy, proof):
        raise ProgramMismatch(f"nothing of {name} is left", name.rpartition(".")[0])
    calls = calls_of(proof.after)
    for path, module in copy.named_modules(remove_duplicate=False):
        if isinstance(module, nn.MultiheadAttention) and not _is_whole(module):
            raise ProgramMismatch(f"{path} has no attribute for heads that are narrower than its input", path)
        if any(n is not None for n in module._parameters.values()) or path in calls:
            update_attributes(module, calls.get(path, ()))
    return copy


def changed_numbers(model: Any, own: nn.Module) -> dict[str, dict[str, Any]]:
    """The number attributes of modules that differ in `own` from the model, by path and name."""
    modules, changed = dict(own.named_modules()), {}
    for path, module in model.named_modules():
        twin = modules.get(path)
        attributes = vars(twin) if twin is not None else {}
        new = {
            name: attributes[name] for name, value in numbers_of(module).items() if attributes.get(name, value) != value
        }
        if new:
            changed[path] = new
    return changed


def find_branch(program: Program) -> str:
    """A condition on sizes by which the network's code may branch, so that nothing is proved for
    other sizes; "" if there is none. Limits of tables, and sizes that must be equal, decide
    nothing."""
    plain = re.compile(r"\w+ <= \d+|\(\w+\) == \(\w+\)")
    return next((guard for guard in program.guards if not plain.fullmatch(guard)), "")


def find_number(program: Program) -> str:
    """An input that is a number, of other values of which nothing is proved; "" if there is
    none."""
    return next(
        (
            str(node.target)
            for node in program.graph.find_nodes(op="placeholder")
            if type(node.meta.get("val")) in (int, float, complex)
        ),
        "",
    )


def _is_whole(module: nn.MultiheadAttention) -> bool:
    """Whether an attention's heads together are as wide as its input and output."""
    joint, width = module.in_proj_weight, module.out_proj.weight.shape
    parts = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    rows = [len(joint) / 3] if joint is not None else [len(p) for p in parts if p is not None]
    return width[0] == width[1] == module.embed_dim and set(rows) == {width[0]}


def _assign(copy: nn.Module, proof: Proof) -> list[str]:
    """Assign the tensors of the program to the copy, and copies of those that it does not read;
    returns the names of parameters that the network read and the program does not."""
    before, cuts = proof.before, proof.cuts
    after = copy_tensors(proof.after, before.constants.values())
    own = dict(tensors_of(copy))
    assigned: dict[str, Tensor] = {}
    for name, constant in after.constants.items():
        tensor: Tensor | None = None
        for alias in map(plain_name, constant.aliases or (name,)):
            if tensor is None:
                tensor = _cut_value(own.get(alias), constant, cuts.get(name), before)
            if assign_tensor(copy, alias, tensor):
                assigned[alias] = tensor
    clones: dict[int, Tensor] = {}
    for name, old in own.items():
        if name not in assigned:
            positions = _mask_positions(name, old, cuts)
            if id(old) not in clones:
                clones[id(old)] = _as_parameter_like(cut(old.detach(), positions), old)
            assign_tensor(copy, name, clones[id(old)])
    for module in copy.modules():  # tensors that are neither parameters nor buffers
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not any(value is new for new in assigned.values()):
                vars(module)[name] = value.detach().clone()
    read = {plain_name(alias) for name, c in before.constants.items() if c.parameter for alias in c.aliases or (name,)}
    return sorted(name for name in read - assigned.keys() if name in own)


def _cut_value(own: Tensor | None, constant: Constant, how: Cut | None, before: Program) -> Tensor:
    """The tensor for a constant of the program: a cut of the network's own tensor, if the constant
    is computed from it (one plus a scale, the rows of a table), so that the code computes the same
    from the cut; else the constant itself."""
    positions = None if own is None or how is None else _remaining_positions(own, constant, how, before)
    if own is None or positions is None:
        tensor = constant.tensor
        return nn.Parameter(tensor, constant.requires_grad) if constant.parameter else tensor
    tensor, wanted = constant.tensor, _ascending(positions)
    is_equal = own.dtype == tensor.dtype and torch.equal(select(own.detach(), wanted), tensor)
    return _as_parameter_like(tensor if is_equal else cut(own.detach(), wanted), own)


def _remaining_positions(own: Tensor, constant: Constant, how: Cut, before: Program) -> tuple[Positions, ...] | None:
    """The positions that remain of the network's own tensor; None if the program's constant
    differs.

    The constant may be computed from the tensor: with more axes, or some of its rows.
    """
    source = before.constants.get(how.source)
    if source is None or not torch.equal(select(source.tensor, how.kept), constant.tensor):
        return None
    return how.along(own.shape)


def _ascending(positions: Sequence[Positions]) -> tuple[Positions, ...]:
    """Positions in ascending order, as the network's own code has them."""
    return tuple(None if axis is None else tuple(sorted(axis)) for axis in positions)


def _as_parameter_like(tensor: Tensor, old: Tensor) -> Tensor:
    """The tensor as a parameter, if the old one is."""
    return nn.Parameter(tensor, old.requires_grad) if isinstance(old, nn.Parameter) else tensor


def _mask_positions(name: str, tensor: Tensor, cuts: Mapping[str, Cut]) -> tuple[Any, ...]:
    """The positions that remain of a buffer that is never read by itself and that broadcasts over a
    cut tensor of its module: a mask."""
    path = name.rpartition(".")[0]
    none = (None,) * tensor.ndim
    if isinstance(tensor, nn.Parameter) or not tensor.ndim:
        return none
    for other, how in cuts.items():
        if other.rpartition(".")[0] == path and len(how.shape) >= tensor.ndim:
            remaining = how.along(tensor.shape) or none
            if any(positions is not None for positions in remaining):
                return _ascending(remaining)
    return none
