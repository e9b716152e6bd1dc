"""Parametrizations of the layers of a smaller network: the tensors below a weight are cut where
that commutes with the parametrization, so that training continues as it would have."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from demask.graph.module_copy import structural_copy
from demask.graph.provenance import Cut, Positions
from demask.graph.result.computed_tensors import ComputedTensor, computed_tensors, remove_parametrizations
from demask.graph.result.resize import module_at
from demask.judge import Pair
from demask.shrink.emit.constant_store import cut

Axes = tuple[Positions, ...]  # the positions that remain of each axis of a tensor
DRAWS = 2  # of other weights, for which the parametrization must commute with the cut, too


def keep_parametrizations(own: nn.Module, model: nn.Module, cuts: Mapping[str, Cut]) -> dict[str, Cut]:
    """Let the layers of a smaller network compute their weights as those of `model` do, in place,
    where a cut of what they compute them from is the cut of the weights; returns these cuts.

    own: a network of the model's class with plain weights. cuts: of these. Masks stay plain.
    """
    reference = structural_copy(model, share=True)
    remove_parametrizations(reference, ComputedTensor.is_mask)
    readers, below = _count_readers(reference), {}
    for computed in computed_tensors(reference):
        module = module_at(own, computed.path)
        plain = None if module is None else module._parameters.get(computed.leaf)
        is_tied = any(readers[p] > n for p, n in _count_readers(computed.part).items())
        if module is None or plain is None or is_tied:
            continue
        how = cuts.get(computed.name)
        axes = (None,) * plain.ndim if how is None else tuple(map(_ascending, how.kept))
        choice = find_source_cuts(computed, axes, plain.detach())
        if choice is None:
            continue
        sources = computed.sources()
        computed.with_sources(_cut_all(sources, choice)).attach(module)
        for name, source in sources.items():
            if any(axis is not None for axis in choice[name]):
                path = computed.source_name(name)
                below[path] = Cut(path, tuple(source.shape), choice[name])
    return below


def find_source_cuts(computed: ComputedTensor, axes: Axes, value: Tensor) -> Mapping[str, Axes] | None:
    """By name in `computed.part`, how to cut what a tensor is computed from, such that the result
    is the tensor cut to `axes`, which has this `value`; None where that is not so.

    It is so in eval and in train mode, for drawn values of all that remains, and the gradient of
    what is removed is zero, so that training would leave it what it is: a removed column of zeros
    adds nothing to the norm of a row, one of other numbers does.
    """
    uncut: dict[str, Axes] = {n: (None,) * t.ndim for n, t in computed.sources().items()}
    if all(axis is None for axis in axes):
        return uncut if Pair("", computed.value(), value).is_same else None
    try:
        with torch.random.fork_rng(devices=()):
            choice = _choose(computed, axes)
            return choice if _commutes(computed, choice, axes, value) else None
    except Exception:  # code for other sizes, or not for float64
        return None


def _count_readers(network: nn.Module) -> Counter[int]:
    """By identity of a parameter, in how many places it is stored."""
    stored = (p for module in network.modules() for p in module._parameters.values())
    return Counter(id(parameter) for parameter in stored if parameter is not None)


def _choose(computed: ComputedTensor, axes: Axes) -> dict[str, Axes]:
    """The cut of each source that removes most of what has no effect on the cut tensor. Only these
    are tried, as some kernels of torch write outside of their memory for sizes that do not fit."""
    sources, shape = computed.sources(), tuple(computed.value().shape)
    choice: dict[str, Axes] = {}
    for name in sorted(sources, key=lambda name: not isinstance(sources[name], nn.Parameter)):
        each = [_axis_options(size, shape, axes) for size in sources[name].shape]
        cuts = sorted(itertools.product(*each), key=lambda c: cut(sources[name], c).numel())
        choice[name] = next(c for c in cuts if _is_safe(computed, choice | {name: c}, axes))
    return choice


def _axis_options(size: int, shape: Sequence[int], axes: Axes) -> list[Positions]:
    """What may remain of an axis of a source: all, or what remains of the axes of the tensor that
    are one axis here."""
    options: list[Positions] = [None]
    for count in range(1, len(shape) + 1):
        for group in itertools.combinations(range(len(shape)), count):
            sizes = [shape[axis] for axis in group]
            if math.prod(sizes) == size and any(axes[axis] is not None for axis in group):
                numbers = torch.arange(size).reshape(sizes)
                numbers = cut(numbers, tuple(axes[axis] for axis in group))
                options.append(tuple(numbers.flatten().tolist()))
    return list(dict.fromkeys(options))


def _is_safe(computed: ComputedTensor, choice: Mapping[str, Axes], axes: Axes) -> bool:
    """Whether what is removed of the last source in `choice` has no effect on the cut tensor: in
    training, where it has a gradient, and in eval mode, where it is a buffer."""
    sources, name = computed.sources(), list(choice)[-1]
    removed = ~_remaining(sources[name], choice[name])
    if not removed.any():
        return True
    drawn = {n: _draw(source, choice.get(n), 1) for n, source in sources.items()}
    if not isinstance(sources[name], nn.Parameter):
        before = cut(computed.with_sources(drawn).value(), axes)
        drawn[name] = torch.where(removed, _other(drawn[name]), drawn[name])
        return torch.equal(cut(computed.with_sources(drawn).value(), axes), before)
    with torch.enable_grad():
        value = cut(computed.with_sources(drawn).value(training=True), axes)
        factors = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
        (grad,) = torch.autograd.grad(value, drawn[name], factors, allow_unused=True)
    return grad is None or not grad[removed].any()


def _other(buffer: Tensor) -> Tensor:
    """Other values of a buffer."""
    return ~buffer if buffer.dtype == torch.bool else buffer + 1


def _commutes(computed: ComputedTensor, choice: Mapping[str, Axes], axes: Axes, value: Tensor) -> bool:
    """Whether cut sources compute the cut tensor, of this value."""
    sources = computed.sources()
    for training, k in itertools.product((False, True), range(DRAWS + 1)):
        drawn = {name: _draw(source, choice[name], k) for name, source in sources.items()}
        uncut = computed.with_sources(drawn)
        part = computed.with_sources(_cut_all(drawn, choice))
        with torch.no_grad():
            expected = cut(uncut.value(training=training), axes)
            actual = part.value(training=training)
        after = _cut_all(uncut.sources(), choice)  # buffers may have changed
        pairs = [(expected, actual), *((after[n], t) for n, t in part.sources().items())]
        if (training, k) == (False, 0):
            pairs.append((expected.to(value.dtype), value))
        if not all(Pair("", a, b).is_same for a, b in pairs):
            return False
    return True


def _draw(source: Tensor, cuts: Axes | None, k: int) -> Tensor:
    """A tensor in float64. For k > 0 a parameter has other numbers where it remains: of the same
    signs, and none is zero."""
    dtype = torch.float64 if source.is_floating_point() else source.dtype
    exact = source.detach().to(dtype, copy=True)  # train mode changes buffers in place
    if not isinstance(source, nn.Parameter):
        return exact
    draw = torch.rand(source.shape, generator=torch.Generator().manual_seed(k)).to(exact)
    typical = exact.square().mean().sqrt() or 1.0
    other = torch.where(exact == 0, (draw - 0.5) * typical, exact * (0.5 + draw))
    drawn = other if cuts is None else torch.where(_remaining(source, cuts), other, exact)
    return nn.Parameter(drawn if k else exact)


def _remaining(source: Tensor, cuts: Axes) -> Tensor:
    """Which elements of a tensor remain."""
    inside = torch.zeros(source.shape, dtype=torch.bool, device=source.device)
    index = [
        torch.arange(n) if p is None else torch.tensor(p, dtype=torch.long)
        for n, p in zip(source.shape, cuts, strict=True)
    ]
    inside[torch.meshgrid(*index, indexing="ij") if index else ()] = True
    return inside


def _cut_all(sources: Mapping[str, Tensor], choice: Mapping[str, Axes]) -> dict[str, Tensor]:
    """All sources, cut."""
    parts = {name: cut(source.detach(), choice[name]) for name, source in sources.items()}
    return {
        name: nn.Parameter(part, sources[name].requires_grad) if isinstance(sources[name], nn.Parameter) else part
        for name, part in parts.items()
    }


def _ascending(positions: Positions) -> Positions:
    """Positions in the order in which a network of the model's class has them."""
    return None if positions is None else tuple(sorted(positions))
