"""expand(): the weights of a demasked network in the original one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from demask.errors import BadInput
from demask.failures import described, public
from demask.graph.module_copy import structural_copy
from demask.graph.provenance import provenance_of
from demask.graph.result.computed_tensors import run_hooks
from demask.graph.result.demasked_module import Demasked
from demask.graph.result.origin import Origin, Piece, get_origin
from demask.shrink.check import describe_difference
from demask.shrink.emit.constant_store import cut
from demask.shrink.training.pieces import NetworkTensors, find_origin, find_trained


@public
def expand(slim: nn.Module, model: nn.Module | None = None) -> nn.Module:
    """A copy of the original network with the weights of the smaller one, computing what that
    computes: for checkpoints of the original shapes, and to let removed weights grow again.

    Where `slim` has weights, the copy has them; elsewhere it has the original's, under the
    original's masks: of torch.nn.utils.prune (weights under a mask are as they were), of
    parametrizations, and those passed to `demask()`, whose weights are zero. Constants that
    `demask()` added to a bias are subtracted again; where it added products of removed weights to
    others of their layer, the removed ones are zero. Outputs are equal up to rounding in eval mode:
    where that does not follow from the weights alone (constants were folded, or `slim` is from a
    file), both networks are called on random inputs of the recorded shapes.

    Args:
        slim: a network from `demask.demask`, trained or not. It is not changed.
        model: the original, which is not changed. Default: None: the one that was demasked, if it
            still exists. Needed for a network that was read from a file.

    Returns:
        A network of the original's class and shapes, in its mode, on its device.

    Raises:
        BadInput: `slim` is no demasked network, the original does not exist any more or is another
            one, or it cannot compute what `slim` computes: `slim` trained a tensor that it has not
            (a border map, a bias of a layer without one), weights that its masks set to zero, two
            parts of a tied tensor differently, or weights that its constants are computed from.

    Example:
        >>> import torch, demask
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> for tensor in (net[0].weight.data, net[0].bias.data):
        ...     tensor[:5] = 0
        >>> slim = demask.demask(net, (torch.ones(3, 4),))
        >>> slim[0].weight.data += 1
        >>> large = demask.expand(slim)
        >>> x = torch.randn(3, 4)
        >>> large[0].weight.shape, torch.allclose(large(x), slim(x), atol=1e-5)
        (torch.Size([8, 4]), True)
    """
    provenance_of(slim)
    if isinstance(slim, Demasked) and not slim.trains:
        raise BadInput(
            "an optimized, tiled or conditioned network is for inference, with weights of another "
            "form; pass the one of demask.demask(), which trains"
        )
    origin = get_origin(slim)
    if model is None:
        model = origin.model() if origin is not None and origin.model is not None else None
    if model is None:
        raise BadInput(
            "the network that this one was demasked from does not exist any more (or this one was "
            "read from a file): pass model=, the original"
        )
    if not isinstance(model, nn.Module):
        raise BadInput(f"model: expected an nn.Module, got {type(model).__name__}")
    own = NetworkTensors.of(slim).values
    pieces, masks = _pieces(slim, model, origin)
    if origin is not None:
        _refuse_trained_additions(own, origin)
    large = structural_copy(model, share=False)
    _fill(large, own, pieces, masks)
    _compare(large, own, pieces)
    is_changed = any(p.offset is not None or not p.is_slice for p in pieces.values())
    if origin is None or origin.added or is_changed:
        _run(large, slim)
    return large


def _pieces(
    slim: nn.Module, model: nn.Module, origin: Origin | None
) -> tuple[Mapping[str, Piece], Mapping[str, Tensor]]:
    """The pieces of `slim`, and the masks passed to `demask()`. Raises BadInput for a model of
    other names or shapes."""
    original = NetworkTensors.of(model)
    if origin is None:
        origin = find_origin(slim, model, original, {})
        if find_trained(origin, NetworkTensors.of(slim).values):  # offsets are steps of training
            plain = {name: replace(p, offset=None) for name, p in origin.pieces.items()}
            origin = replace(origin, pieces=plain)
    for piece in origin.pieces.values():
        value = original.values.get(piece.source)
        if value is None or tuple(value.shape) != piece.shape:
            got = "none" if value is None else str(tuple(value.shape))
            raise BadInput(
                f"model: expected the network that was demasked, with {piece.source} of shape {piece.shape}, got {got}"
            )
    return origin.pieces, origin.masks


def _refuse_trained_additions(own: Mapping[str, Tensor], origin: Origin) -> None:
    """Raise BadInput if a tensor that the original has not was trained."""
    for name, before in origin.added.items():
        if name in own and not torch.equal(own[name].to(before), before):
            raise BadInput(
                f"{name} was trained, and the original has no place for it: it replaced constants "
                "of removed slices; freeze it before training to expand the network"
            )


def _fill(
    large: nn.Module, own: Mapping[str, Tensor], pieces: Mapping[str, Piece], masks: Mapping[str, Tensor]
) -> None:
    """Write the tensors of the small network, and zeros under `masks`, into the large one."""
    with torch.no_grad():
        for name, mask in masks.items():
            large.get_parameter(name).masked_fill_(mask == 0, 0)
        for name, piece in pieces.items():
            if name in own:
                _write(large, piece, _part(own[name], piece))
        run_hooks(large)


def _part(tensor: Tensor, piece: Piece) -> Tensor:
    """The slice of the original's tensor that a tensor of the small network is."""
    is_offset = piece.offset is not None and not piece.carries
    part = tensor - piece.offset.to(tensor) if is_offset else tensor  # type: ignore[union-attr]
    sizes = [n if p is None else len(p) for n, p in zip(piece.shape, piece.positions, strict=True)]
    if part.numel() != torch.Size(sizes).numel():
        raise BadInput(f"{piece.source} is no slice in the small network: it cannot be expanded")
    return part.reshape(sizes)


def _write(large: nn.Module, piece: Piece, part: Tensor) -> None:
    """Write a slice of one tensor, in place, as the network stores it."""
    path, _, leaf = piece.source.rpartition(".")
    module: Any = large.get_submodule(path)
    stored = module._parameters.get(f"{leaf}_orig")
    if parametrize.is_parametrized(module, leaf):
        originals = module.parametrizations[leaf]
        stored = getattr(originals, "original", None) if piece.has_state else None
        if stored is None:
            _write_computed(module, leaf, piece, part)
            return
    elif stored is None:
        stored = getattr(module, leaf)
        if leaf not in module._parameters and leaf not in module._buffers:
            raise BadInput(f"{piece.source} is computed by a hook: it cannot be set")
    _set_part(stored, piece, part)


def _write_computed(module: Any, leaf: str, piece: Piece, part: Tensor) -> None:
    """Write a slice of a tensor that parametrizations compute, by their inverse. Raises BadInput
    where they cannot compute it."""
    value = getattr(module, leaf).detach().clone()
    _set_part(value, piece, part)
    originals = dict(module.parametrizations[leaf].named_parameters(recurse=False))
    before = {name: tensor.detach().clone() for name, tensor in originals.items()}
    try:
        setattr(module, leaf, value.clone())  # an inverse may store the tensor itself
    except Exception as error:  # a parametrization without an inverse
        raise BadInput(f"{piece.source} cannot be set: {described(error)}") from error
    rows = piece.positions[0] if piece.positions else None
    if rows is not None:
        removed = torch.ones(piece.shape[:1], dtype=torch.bool, device=value.device)
        removed[list(rows)] = False
        for name, tensor in originals.items():  # zero rows of a weight norm have no inverse
            if tensor.shape[:1] == piece.shape[:1]:
                tensor.data[removed] = before[name][removed]
    if not torch.allclose(getattr(module, leaf), value, rtol=1e-4, atol=1e-6):
        raise BadInput(f"the parametrizations of {piece.source} cannot compute what it was trained to")


def _set_part(tensor: Tensor, piece: Piece, part: Tensor) -> None:
    """Set the positions of a slice, in place; those that it carries are zero."""
    if piece.carries and len(piece.shape) > 1:
        tensor.data.zero_()
    index = [
        torch.arange(n) if p is None else torch.tensor(p, dtype=torch.long)
        for n, p in zip(piece.shape, piece.positions, strict=True)
    ]
    if not index:
        tensor.data.copy_(part)
        return
    grid = torch.meshgrid(*index, indexing="ij")
    tensor.data[tuple(axis.to(tensor.device) for axis in grid)] = part.to(tensor)


def _compare(large: nn.Module, own: Mapping[str, Tensor], pieces: Mapping[str, Piece]) -> None:
    """Raise BadInput unless the large network reads the small one's tensors at their positions:
    masks, parametrizations and tied tensors may prevent it."""
    values = NetworkTensors.of(large).values
    for name, piece in pieces.items():
        if name not in own:
            continue
        expected = _part(own[name], piece).to(values[piece.source])
        actual = cut(values[piece.source], piece.positions)
        if not torch.allclose(actual, expected, rtol=1e-5, atol=0, equal_nan=True):
            raise BadInput(
                f"the original cannot have the values that {name} was trained to: its masks or "
                f"parametrizations compute others for {piece.source}, or it is tied to a tensor "
                "with others; prune the small network with the same mask while it is trained"
            )


def _run(large: nn.Module, slim: nn.Module) -> None:
    """Raise BadInput if the networks compute different outputs."""
    if wrong := describe_difference(large, slim, (), {}):
        raise BadInput(
            f"the original with these weights computes something else ({wrong}): removed slices "
            "were constants, which are computed anew from the weights there, and are fixed in the "
            "small network; or `model` is not the network that was demasked; or this one was read "
            "from a file, which does not say what was added to its biases"
        )
