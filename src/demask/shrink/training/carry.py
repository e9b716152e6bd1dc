"""carry(): an optimizer of the original network becomes one of the demasked network.

Averaged weights (EMA, SWA) of a network, cut for the smaller network.

Optimizer states of a parameter, cut as the parameter was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from demask.errors import BadInput
from demask.failures import public, warn_caller
from demask.graph.capture.fold_constants import plain_name
from demask.graph.module_copy import structural_copy
from demask.graph.provenance import provenance_of
from demask.graph.result.origin import Origin, Piece, get_origin
from demask.graph.result.resize import tensors_of
from demask.shrink.emit.constant_store import cut
from demask.shrink.training.pieces import NetworkTensors, find_origin, find_trained, mask_gradient, sliced_shape

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
    return part * _average_factor(AVERAGED[key], piece) if key in AVERAGED else part


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


def _average_factor(axis: int, piece: Piece) -> float:
    """The factor of an average over an axis that has fewer positions now: those that were removed
    added nothing to the sum."""
    return piece.shape[axis] / max(sliced_shape(piece.shape, piece.positions)[axis], 1)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensors, value))
    return isinstance(value, Tensor)


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


Names = list[list[str | None]]  # per group, the original's parameters; None: of another network


@public
def carry(slim: nn.Module, optimizer: Any, *, ema: Any = None, model: Any = None) -> Any:
    """The optimizer of a network, for the smaller network that `demask()` returned: training
    continues where it was.

    The optimizer is changed in place, since schedulers and gradient scalers refer to it. Groups
    have their settings and the parameters of `slim` in place of the original's, in the order of
    `slim.named_parameters()`; parameters of other networks stay. States of a parameter's shape
    (momentum, Adam's moments, ...) are cut as the parameter was, numbers stay, averages over an
    axis (Adafactor) are cut and scaled to the smaller axis. What was removed is dropped. Parameters
    that the original has not (border maps, biases with folded constants of layers that had none)
    start without state in the group of their module. A bias to which constants were added has the
    slice of its source's states.

    Call it directly after `demask()`, between `optimizer.step()` and the next `backward()`:
    gradients are not carried. Then steps of `slim` are those of the masked network up to rounding,
    if the optimizer computes each element by itself: weights that stay in `slim` under a mask of
    torch.nn.utils.prune, of a parametrization or of `masks=` stay zero, by a hook on the parameter that
    sets their gradients to zero (copies and files of `slim` do not have it). Zeros that no mask makes are
    trained, as they are in the original. Steps differ:

    - where a removed slice was a constant that is not zero: in train mode a batch norm computed it
      from batch statistics, and its sources were trained; now it is one constant.
    - where the optimizer reads full tensors (Adafactor's clipping, LAMB, Muon; gradient clipping
      by norm: only if removed weights have gradients).
    - where dropout draws random numbers: for smaller tensors it draws other ones.
    - where a tied tensor was cut in two ways: it is two tensors now, with states of their own.

    Weight decay moves weights under a mask of torch.nn.utils.prune; they stay masked.

    Args:
        slim: a network from `demask.demask`.
        optimizer: an optimizer of the original's parameters, or of some of them; or the state dict
            of one, which is not changed. Without names of parameters, the state dict must have one
            group, of `model.parameters()` or of those that require gradients.
        ema: averaged weights of the original, changed in place: a
            `torch.optim.swa_utils.AveragedModel` (or another module with the averaged network as
            `module`), the averaged network itself, or its state dict. Tensors are cut as those of
            `slim` were. If constants were added to a bias in `slim`, they are added to the averaged
            one. Tensors that the original has not are those of `slim`. Default: None.
        model: the original. Needed only for a network that was read from a file, and must have the
            weights that it was demasked with. Default: None: `slim` has weak references to the
            original's parameters.

    Returns:
        The same optimizer; or a new state dict for an optimizer of `slim.parameters()`, in its
        groups.

    Raises:
        BadInput: `slim` is no demasked network or has no reference to the original, the optimizer
            or the averages are of another network, or a state cannot be cut. Nothing was changed.

    Example:
        >>> import torch, demask
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> for tensor in (net[0].weight.data, net[0].bias.data):
        ...     tensor[:5] = 0
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        >>> net(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> slim = demask.demask(net, (torch.ones(3, 4),))
        >>> demask.carry(slim, optimizer) is optimizer
        True
        >>> optimizer.state[slim[0].weight]["momentum_buffer"].shape
        torch.Size([3, 4])
    """
    provenance_of(slim)
    origin, own = _origin_of(slim, model), NetworkTensors.of(slim)
    _check_kind(optimizer)
    is_dict = isinstance(optimizer, Mapping)
    groups = optimizer["param_groups"] if is_dict else optimizer.param_groups
    names = _names_in_dict(groups, origin) if is_dict else _names_in(groups, origin, own)
    _check_names(names, origin)
    plan = _Plan(origin, own, names)
    states = optimizer["state"] if is_dict else optimizer.state
    cut = plan.states({name: states[key] for name, key in _keyed_parameters(names, groups) if key in states})
    commit = None if ema is None else carry_average(slim, ema, origin)
    if is_dict:
        result: Any = _new_dict(optimizer, plan, cut)
    else:
        result = optimizer
        _update(optimizer, plan, cut)
    if commit is not None:
        commit()
    for name, piece in plan.pieces.items():
        parameter = own.parameters[name]
        if piece.masked is not None and piece.masked.shape == parameter.shape:
            mask_gradient(parameter, piece.masked)
    return result


def _check_kind(optimizer: Any) -> None:
    """Raise BadInput for what is no optimizer and no state dict of one."""
    if isinstance(optimizer, Mapping):
        fits = {"state", "param_groups"} <= set(optimizer)
    else:
        fits = hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")
    if not fits:
        raise BadInput(f"expected an optimizer or the state dict of one, got {type(optimizer).__name__}")


def _origin_of(slim: nn.Module, model: Any) -> Origin:
    """Where the tensors of `slim` come from; raises BadInput where that is not known."""
    if model is None:
        origin = get_origin(slim)
        if origin is None:
            raise BadInput(
                "this network has no reference to the one that it was demasked from: it was read "
                "from a file or pickled, or changed since demask(); pass model=, the original"
            )
        return origin
    original, own = NetworkTensors.of(model), NetworkTensors.of(slim).values
    origin = find_origin(slim, model, original, {})
    if name := find_trained(origin, own):
        raise BadInput(
            f"{name} is no slice of {origin.pieces[name].source} of `model`: pass the original "
            "with the weights that it was demasked with, before the small network is trained"
        )
    return origin


def _names_in(groups: Sequence[Mapping[str, Any]], origin: Origin, own: NetworkTensors) -> Names:
    """The names of the parameters in an optimizer's groups. Raises BadInput if they are those of
    the small network already."""
    by_id = {id(p.reference()): name for name, p in origin.parameters.items()}
    by_id.pop(id(None), None)
    names: Names = [[by_id.get(id(p)) for p in group["params"]] for group in groups]
    present = {id(p) for p in own.parameters.values()}
    if any(id(p) in present for group in groups for p in group["params"]):
        raise BadInput("this optimizer has parameters of the small network already")
    return names


def _names_in_dict(groups: Sequence[Mapping[str, Any]], origin: Origin) -> Names:
    """The names of the parameters in the groups of a state dict; raises BadInput where they do not
    follow."""
    if all("param_names" in group for group in groups):
        known = origin.parameters
        return [[n if n in known else None for n in group["param_names"]] for group in groups]
    trained = [name for name, p in origin.parameters.items() if p.requires_grad]
    for names in (list(origin.parameters), trained):
        if len(groups) == 1 and len(names) == len(groups[0]["params"]):
            return [[*names]]
    count = sum(len(group["params"]) for group in groups)
    raise BadInput(
        f"this state dict has {count} parameters without names in {len(groups)} groups, and the "
        f"network has {len(origin.parameters)}, {len(trained)} of which require gradients: pass "
        "the optimizer itself, or construct it from model.named_parameters()"
    )


def _check_names(names: Names, origin: Origin) -> None:
    if not any(name is not None for group in names for name in group):
        some = ", ".join(list(origin.parameters)[:3])
        raise BadInput(
            "this optimizer has no parameter of the network that was demasked: expected one with "
            f"{some}, ...; if that network was demasked twice, carry the optimizer to the first "
            "result, then to the second"
        )


def _keyed_parameters(names: Names, groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The original's parameters in an optimizer, each with its key among the states."""
    for row, group in zip(names, groups, strict=True):
        for name, key in zip(row, group["params"], strict=True):
            if name is not None:
                yield name, key


class _Plan:
    """What becomes of an optimizer's parameters.

    own: the tensors of the small network. names: per group, the original's parameters. added: per
    group, the names of the small network's parameters.
    """

    def __init__(self, origin: Origin, own: NetworkTensors, names: Names) -> None:
        self.origin, self.own, self.names = origin, own, names
        group_of = {name: k for k, row in enumerate(names) for name in row if name is not None}
        self.pieces: dict[str, Piece] = {}
        self.added: list[list[str]] = [[] for _ in names]
        for plain, raw in own.raw.items():
            if plain in origin.pieces:
                for name in raw:
                    self.pieces.setdefault(name, origin.pieces[plain])
        for name, parameter in own.parameters.items():
            piece = self.pieces.get(name)
            if piece is not None:
                home = next((group_of[p] for p in piece.parameters if p in group_of), None)
            else:
                home = self._group_of_module(name, group_of) if parameter.requires_grad else None
            if home is not None:
                self.added[home].append(name)

    def _group_of_module(self, name: str, group_of: Mapping[str, int]) -> int | None:
        """The group of a parameter that the original has not: that of the parameters of its module,
        or of the smallest enclosing module that has any. None if these are in no group."""
        path = plain_name(name)
        while path:
            path = path.rpartition(".")[0]
            inside = [p for p in self.origin.parameters if not path or p.startswith(f"{path}.")]
            if inside:
                return next((group_of[p] for p in inside if p in group_of), None)
        return None

    def states(self, states: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The states of the small network's parameters. states: of the original's. Raises
        BadInput."""
        cut: dict[str, dict[str, Any]] = {}
        for name in (name for row in self.added for name in row):
            piece, parameter = self.pieces.get(name), self.own.parameters[name]
            sources = [p for p in (piece.parameters if piece else ()) if states.get(p)]
            if piece is None or not sources:
                continue
            count = math.prod(sliced_shape(piece.shape, piece.positions))
            if piece.has_state and count == parameter.numel():
                cut[name] = cut_states(sources[0], states[sources[0]], piece, parameter)
                if piece.masked is not None:  # moments of steps before the mask
                    for state in cut[name].values():
                        if isinstance(state, Tensor) and state.shape == piece.masked.shape:
                            state[piece.masked.to(state.device)] = 0
            else:
                warn_caller(
                    f"{name} starts without optimizer state: it is computed from "
                    f"{', '.join(sources)}, and is no slice of it"
                )
        return cut

    def rows(self, k: int, old: Sequence[Any], new: Callable[[str], Any]) -> list[Any]:
        """The new members of group k: the small network's in the place of the original's first one,
        and the others as they were. old: one entry per member; new: the entry of a new member."""
        rows: list[Any] = [new(name) for name in self.added[k]]
        first = next((i for i, name in enumerate(self.names[k]) if name is not None), len(old))
        others = [i for i, name in enumerate(self.names[k]) if name is None]
        return [*(old[i] for i in others if i < first), *rows, *(old[i] for i in others if i > first)]

    def labels(self, k: int, old: Sequence[str]) -> list[str]:
        """The new `param_names` of group k, with the prefix that the original's names had."""
        first = next(((o, n) for o, n in zip(old, self.names[k], strict=True) if n), ("", ""))
        prefix = first[0].removesuffix(first[1]) if first[0].endswith(first[1]) else ""
        return self.rows(k, old, lambda name: prefix + name)


def _update(optimizer: Any, plan: _Plan, states: Mapping[str, Any]) -> None:
    """Replace the parameters and states of an optimizer, in place."""
    for k, group in enumerate(optimizer.param_groups):
        for name, parameter in zip(plan.names[k], group["params"], strict=True):
            if name is not None:
                optimizer.state.pop(parameter, None)
        if "param_names" in group:
            group["param_names"] = plan.labels(k, group["param_names"])
        group["params"][:] = plan.rows(k, group["params"], plan.own.parameters.__getitem__)
    for name, state in states.items():
        optimizer.state[plan.own.parameters[name]] = state


def _new_dict(old: Mapping[str, Any], plan: _Plan, states: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of an optimizer of the small network."""
    groups: list[dict[str, Any]] = []
    new_states: dict[int, Any] = {}
    count = 0
    for k, group in enumerate(old["param_groups"]):
        members = plan.rows(k, [("", key) for key in group["params"]], lambda name: (name, None))
        new = {**group, "params": list(range(count, count + len(members)))}
        for index, (name, key) in enumerate(members, count):
            state = states.get(name) if name else old["state"].get(key)
            if state is not None:
                new_states[index] = {n: v.clone() if isinstance(v, Tensor) else v for n, v in state.items()}
        if "param_names" in group:
            new["param_names"] = plan.labels(k, group["param_names"])
        groups.append(new)
        count += len(members)
    return {**old, "state": new_states, "param_groups": groups}
