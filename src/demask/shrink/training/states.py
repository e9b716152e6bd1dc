"""Optimizer states of a parameter, cut as the parameter was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from demask.errors import BadInput
from demask.graph.result.origin import Piece
from demask.shrink.emit.constant_store import cut
from demask.shrink.training.pieces import sliced_shape

# Factored second moments (Adafactor), and the axis of the parameter over which each is averaged:
# in torch it has size one, in transformers it is gone.
AVERAGED = {"row_var": -1, "col_var": -2, "exp_avg_sq_row": -1, "exp_avg_sq_col": -2}


def cut_states(name: str, states: Mapping[str, Any], piece: Piece, own: Tensor) -> dict[str, Any]:
    """The states of a parameter for the piece of it that a demasked network has.

    name: the parameter's, for messages. own: the network's parameter. Tensors have their dtypes and
    devices and are new, in the memory format of `own` if they have its shape. Raises BadInput for
    states whose axes are unknown.
    """
    return {key: _cut_state(f"{key!r} of {name}", key, value, piece, own) for key, value in states.items()}


def _cut_state(where: str, key: str, value: Any, piece: Piece, own: Tensor) -> Any:
    if not isinstance(value, Tensor):
        if _has_tensors(value):
            raise BadInput(
                f"the optimizer's state {where} is a {type(value).__name__} of tensors, whose axes "
                "are not known: carry optimizers with one state per parameter (SGD, Adam, ...)"
            )
        return value
    if tuple(value.shape) == piece.shape:
        part = cut(value, piece.positions).reshape(own.shape)
        return torch.empty_like(own, dtype=part.dtype, device=part.device).detach().copy_(part)
    if value.numel() == 1:
        return value.clone()
    axes = _axes_of(key, value, piece)
    if axes is None:
        raise BadInput(
            f"the optimizer's state {where} has the shape {tuple(value.shape)}, which is neither "
            f"the parameter's, {piece.shape}, nor a number, so it cannot be cut: carry only "
            "optimizers with states of the parameters' shapes, or start a new one"
        )
    positions = tuple(None if axis is None else piece.positions[axis] for axis in axes)
    part = cut(value, positions)
    return part * _fewer(AVERAGED[key], piece) if key in AVERAGED else part


def _axes_of(key: str, value: Tensor, piece: Piece) -> list[int | None] | None:
    """For each axis of a state, the axis of the parameter that it is; None where it has size one.
    None if the state has other axes."""
    count = len(piece.shape)
    axes: list[int | None] = list(range(count))
    if key in AVERAGED and value.ndim == count - 1:
        del axes[AVERAGED[key]]
    if len(axes) != value.ndim:
        return None
    sizes = [piece.shape[axis] for axis in axes if axis is not None]
    if any(a not in (1, b) for a, b in zip(value.shape, sizes, strict=True)):
        return None
    return [axis if n > 1 else None for axis, n in zip(axes, value.shape, strict=True)]


def _fewer(axis: int, piece: Piece) -> float:
    """The factor of an average over an axis that has fewer positions now: those that were removed
    added nothing to the sum."""
    return piece.shape[axis] / max(sliced_shape(piece.shape, piece.positions)[axis], 1)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensors, value))
    return isinstance(value, Tensor)
