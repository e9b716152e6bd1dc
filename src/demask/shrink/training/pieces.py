"""The pieces of an original network that a demasked network consists of."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils.weak import WeakIdKeyDictionary

from demask.failures import is_strict
from demask.graph.capture.declared_masks import Masks
from demask.graph.capture.fold_constants import plain_name
from demask.graph.module_copy import structural_copy
from demask.graph.provenance import Cut, Positions, Provenance
from demask.graph.result.computed_tensors import computed_tensors, parametrized_tensors, remove_parametrizations
from demask.graph.result.origin import Origin, OriginalParameter, Piece, set_origin
from demask.graph.result.resize import tensors_of
from demask.shrink.emit.constant_store import select


@dataclass(frozen=True, slots=True)
class NetworkTensors:
    """The tensors of a network under all their names.

    values: parameters and buffers as layers read them, masked and parametrized, and what
    parametrizations compute them from. raw: for each parameter of `values`, the names of the
    parameters that it is computed from, its own if it is stored. parameters: by these names; tied
    ones have the first of their names in `raw`.
    """

    values: Mapping[str, Tensor]
    raw: Mapping[str, tuple[str, ...]]
    parameters: Mapping[str, nn.Parameter]

    @classmethod
    def of(cls, network: nn.Module | ExportedProgram) -> NetworkTensors:
        computed_from: dict[str, str] = {}
        if isinstance(network, ExportedProgram):
            named: list[tuple[str, Any]] = list(network.named_parameters())
            values = {plain_name(name): tensor.detach() for name, tensor in [*named, *network.named_buffers()]}
        else:
            named = list(network.named_parameters(remove_duplicate=False))
            plain = structural_copy(network, share=True)
            remove_parametrizations(plain)
            values = {name: tensor.detach() for name, tensor in tensors_of(plain)}
            for computed in parametrized_tensors(network):
                computed_from |= dict.fromkeys(computed.source_names(), computed.name)
            values |= {name: tensor.detach() for name, tensor in tensors_of(network) if name in computed_from}
        first: dict[int, str] = {}
        raw: dict[str, tuple[str, ...]] = {}
        for name, parameter in named:
            own = first.setdefault(id(parameter), name)
            plain_one = name if name in values else plain_name(name)
            for one in {plain_one, computed_from.get(name, plain_one)}:
                raw[one] = (*raw.get(one, ()), own)
        return cls(values, raw, {name: p for name, p in named if first[id(p)] == name})


def remember_original(slim: nn.Module, model: nn.Module | ExportedProgram, masked: Any, masks: Masks) -> nn.Module:
    """`slim`, with the link to the network that it was computed from. masked: `model` with the
    masks that were passed to `demask()`; it differs from `model` only if there are any."""
    origin = None
    try:
        passed = masks if isinstance(masks, Mapping) else {}
        origin = find_origin(slim, model, NetworkTensors.of(masked), passed, is_new=True)
    except Exception:  # a network that cannot be copied: carry() then says that there is no link
        if is_strict():
            raise
    set_origin(slim, origin)
    return slim


def find_origin(
    slim: nn.Module,
    model: nn.Module | ExportedProgram,
    original: NetworkTensors,
    masks: Mapping[str, Tensor],
    *,
    is_new: bool = False,
) -> Origin:
    """The origin of a network that has not been trained since it was demasked. original: the
    tensors of `model`, with all masks. is_new: whether that is certain, so that weights which are
    no slices carry others."""
    record: Any = getattr(slim, "demasked", None)
    cuts = _cuts_of(record) if isinstance(record, Provenance) else {}
    parameters, own = NetworkTensors.of(model).parameters, NetworkTensors.of(slim)
    pieces: dict[str, Piece] = {}
    added: dict[str, Tensor] = {}
    masked = masked_elements(model, masks, original.raw)
    for name, tensor in own.values.items():
        if any(source != name and source in original.values for source in own.raw.get(name, ())):
            continue  # its sources are pieces of the original's
        piece = _find_piece(name, tensor, cuts.get(name), original, parameters, is_new)
        if piece is not None:
            pieces[name] = piece
            if piece.is_slice and piece.source in masked:
                zeros = masked[piece.source].expand(piece.shape)
                under = select(zeros, piece.positions).reshape(tensor.shape).to(tensor.device) & (tensor == 0)
                pieces[name] = replace(piece, masked=under if bool(under.any()) else None)
        elif tensor.is_floating_point():
            added[name] = tensor.clone()
    for layer in [name.rpartition(".")[0] for name, piece in pieces.items() if piece.carries]:
        bias = f"{layer}.bias".lstrip(".")
        if bias in pieces:
            pieces[bias] = replace(pieces[bias], carries=True)
    return Origin(
        {name: OriginalParameter(weakref.ref(p), tuple(p.shape), p.requires_grad) for name, p in parameters.items()},
        pieces,
        added,
        masks,
        weakref.ref(model) if isinstance(model, nn.Module) else None,
    )


# Of parameters whose gradients are zero where a mask is (`mask_gradient`), which of their elements these are.
_MASKED: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()


def mask_gradient(parameter: Tensor, masked: Tensor) -> None:
    """Let the gradients of a parameter be zero at these elements from now on."""
    if parameter.requires_grad and parameter not in _MASKED:
        _MASKED[parameter] = masked
        parameter.register_hook(lambda gradient: gradient.masked_fill(masked.to(gradient.device), 0))


def masked_elements(
    model: nn.Module | ExportedProgram, masks: Mapping[str, Tensor], raw: Mapping[str, Sequence[str]]
) -> dict[str, Tensor]:
    """Which elements of a network's tensors are zero under its masks: of torch.nn.utils.prune, of parametrizations,
    of `mask_gradient`, and `masks`, which were passed to `demask()`. Their shapes expand to the tensors'. raw: by
    name of a tensor, those of the parameters that it is computed from."""
    masked = {name: mask == 0 for name, mask in masks.items() if isinstance(mask, Tensor)}
    if not isinstance(model, nn.Module):
        return masked
    more = [(c.name, c.zeros_of_mask()) for c in computed_tensors(model) if c.is_mask()]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    sources = [(name, parameters.get(names[0])) for name, names in raw.items() if len(names) == 1]
    more += [(name, _MASKED[p]) for name, p in sources if p is not None and p in _MASKED]
    for name, zeros in more:
        masked[name] = zeros | masked[name].to(zeros.device) if name in masked else zeros
    return masked


def find_trained(origin: Origin, values: Mapping[str, Tensor]) -> str:
    """The first weight of a small network that is no slice of the original's, though it has the
    shape of one: the network was trained, or is another one's. "" if there is none.

    Only for an origin without a link, whose pieces were computed from the networks as they are.
    Vectors do not count: constants may have been added to them.
    """
    for name, piece in origin.pieces.items():
        size = sliced_shape(piece.shape, piece.positions)
        matrix = len(size) > 1 and size == own_shape(values[name], len(size))
        if matrix and piece.parameters and not piece.is_slice:
            return name
    return ""


def _find_piece(
    name: str, tensor: Tensor, how: Cut | None, original: NetworkTensors, parameters: Mapping[str, Tensor], is_new: bool
) -> Piece | None:
    """The piece that a tensor is; None if the original has nothing like it."""
    source = how.source if how is not None else name
    value = original.values.get(source)
    if value is None:
        return None
    raw, shape = original.raw.get(source, ()), tuple(value.shape)
    positions = (None,) * value.ndim if how is None else how.along(shape)
    if positions is None or sliced_shape(shape, positions) != own_shape(tensor, value.ndim):
        positions = _find_rows(tensor, value, how)
    if positions is None:
        # Computed from the source in another way than by slicing; a buffer is like a new one then.
        return Piece(source, shape, (None,) * value.ndim, raw) if raw else None
    orders = (positions, _ascending(positions))
    parts = [(order, select(value, order).reshape(tensor.shape)) for order in dict.fromkeys(orders)]
    agreeing = [(order, part) for order, part in parts if _agrees_where_nonzero(tensor, part)]
    carries = is_new and not agreeing and value.ndim > 1 and how is not None
    is_shifted = not agreeing and (value.ndim == 1 or carries) and tensor.is_floating_point()
    positions, part = (agreeing or parts)[0]
    stored = parameters[raw[0]].detach() if len(raw) == 1 else None
    is_masked = (
        stored is not None
        and stored.shape == value.shape
        and _agrees_where_nonzero(part, select(stored, positions).reshape(tensor.shape))
    )
    offset = torch.where(tensor == 0, torch.zeros_like(part), tensor - part) if is_shifted else None
    fits = bool(agreeing) or is_shifted
    return Piece(source, shape, positions, raw, is_masked and fits, fits, offset, carries and is_shifted)


def _cuts_of(record: Provenance) -> dict[str, Cut]:
    """The cuts of a network. One of the original's class without graphs has positions in ascending
    order, whatever order the record has."""
    if record.form != "class" or record.graph_reasons:
        return dict(record.cuts)
    return {name: replace(how, kept=_ascending(how.kept)) for name, how in record.cuts.items()}


def _ascending(positions: Sequence[Positions]) -> tuple[Positions, ...]:
    return tuple(None if axis is None else tuple(sorted(axis)) for axis in positions)


def _agrees_where_nonzero(masked: Tensor, whole: Tensor) -> bool:
    """Whether a tensor has another's elements, or zeros in their place."""
    return torch.equal(masked, whole) or bool(((masked == whole) | (masked == 0)).all())


def _find_rows(tensor: Tensor, table: Tensor, how: Cut | None) -> tuple[Positions, ...] | None:
    """The cut of a table that a network reads by constant indices: of rows one after another, as
    positional embeddings are. None if it reads others."""
    if how is None or table.ndim != 2 or how.shape[-1:] != table.shape[1:]:
        return None
    columns = how.kept[-1]
    values = select(table, (None, columns))
    if tensor.shape[-1:] != values.shape[1:]:
        return None
    rows = tensor.reshape(-1, values.shape[1])
    starts = (values == rows[:1]).all(1).nonzero().flatten().tolist()
    for start in starts:
        if torch.equal(values[start : start + len(rows)], rows):
            return tuple(range(start, start + len(rows))), columns
    return None


def sliced_shape(shape: Sequence[int], positions: Sequence[Positions]) -> tuple[int, ...]:
    """The shape of a tensor's slice at some positions per axis; None for a full axis."""
    return tuple(n if p is None else len(p) for n, p in zip(shape, positions, strict=True))


def own_shape(tensor: Tensor, axes: int) -> tuple[int, ...]:
    """The shape of a tensor without axes of size one after its first `axes`, which the scale of a
    sliced norm has to broadcast."""
    shape = tuple(tensor.shape)
    return shape[:axes] if all(n == 1 for n in shape[axes:]) else shape
