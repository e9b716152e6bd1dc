"""Averaged weights (EMA, SWA) of a network, cut for the smaller network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from demask.errors import BadInput
from demask.graph.capture.fold_constants import plain_name
from demask.graph.module_copy import structural_copy
from demask.graph.result.origin import Origin, Piece
from demask.graph.result.resize import tensors_of
from demask.shrink.emit.constant_store import cut
from demask.shrink.training.pieces import NetworkTensors

# Of torch.optim.swa_utils.AveragedModel and DistributedDataParallel.
_PREFIX, _COUNTER = "module.", "n_averaged"


def carry_average(slim: nn.Module, ema: Any, origin: Origin) -> Callable[[], None]:
    """What replaces averaged weights by those of the small network, in place, when it is called.
    Raises BadInput, before that, for averages of another network."""
    if isinstance(ema, MutableMapping):
        return _carry_dict(slim, ema, origin)
    if not isinstance(ema, nn.Module):
        raise BadInput(f"ema: expected an AveragedModel, a module or a state dict, got {type(ema).__name__}")
    inner = getattr(ema, "module", None)
    average = inner if isinstance(inner, nn.Module) else ema
    small = _average(slim, _without_prefix(NetworkTensors.of(average).values), origin)
    for module in small.modules():
        module.training = average.training

    def replace_module() -> None:
        if average is not ema:
            ema.module = small
            return
        # The averaged network itself: others refer to this object.
        vars(ema).clear()
        ema.__class__ = small.__class__
        vars(ema).update(vars(small))

    return replace_module


def _carry_dict(slim: nn.Module, ema: MutableMapping[str, Any], origin: Origin) -> Callable[[], None]:
    tensors = {name: value for name, value in ema.items() if isinstance(value, Tensor)}
    plain = _without_prefix(tensors)
    prefix = _PREFIX if plain.keys() != tensors.keys() else ""
    values: dict[str, Tensor] = {}
    for name, value in plain.items():
        mask = plain.get(f"{name.removesuffix('_orig')}_mask") if name.endswith("_orig") else None
        values[plain_name(name)] = value if mask is None else value * mask
    # Of what parametrizations compute, no entry is the average.
    computed = {
        piece.source
        for piece in origin.pieces.values()
        if len(piece.parameters) > 0 and not piece.has_state and piece.source not in piece.parameters
    }
    values = {name: value for name, value in values.items() if name not in computed} | plain
    new = {prefix + name: t for name, t in _average(slim, values, origin).state_dict().items()}
    own = {prefix + name for name in plain}

    def replace_entries() -> None:
        for name in own & set(ema):
            del ema[name]
        ema.update(new)

    return replace_entries


def _without_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their names in the network, without the prefix of a wrapper, if all but the
    wrapper's counter have it."""
    if all(name.startswith(_PREFIX) or name == _COUNTER for name in tensors):
        tensors = {name: value for name, value in tensors.items() if name != _COUNTER}
    else:
        return dict(tensors)
    return {name.removeprefix(_PREFIX): value for name, value in tensors.items()}


def _average(slim: nn.Module, values: Mapping[str, Tensor], origin: Origin) -> nn.Module:
    """A copy of the small network with averaged weights. values: of the original, averaged."""
    parts = {name: _part(piece, values) for name, piece in origin.pieces.items() if piece.is_slice}
    small = structural_copy(slim, share=False)
    own = NetworkTensors.of(small)
    stored = dict(tensors_of(small))
    with torch.no_grad():
        for name, part in parts.items():
            raw = own.raw.get(name, (name,))
            if len(raw) == 1 and (tensor := stored.get(raw[0])) is not None:
                tensor.data = part.reshape(tensor.shape)
    return small


def _part(piece: Piece, values: Mapping[str, Tensor]) -> Tensor:
    """The averaged piece of the original."""
    whole = values.get(piece.source)
    if whole is None or tuple(whole.shape) != piece.shape:
        got = "none" if whole is None else str(tuple(whole.shape))
        raise BadInput(
            f"ema: expected averages of the network that was demasked, with {piece.source} of "
            f"shape {piece.shape}, got {got}"
        )
    part = cut(whole.detach(), piece.positions)
    if piece.offset is None:
        return part
    return part + piece.offset.reshape(part.shape).to(part)
