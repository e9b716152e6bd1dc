"""sparsify(): the linear layers of a network stored packed, where that is faster, within the network's own class."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demask.errors import BadInput
from demask.machine.byte_sizes import format_bytes
from demask.machine.clock import is_faster, lower_bound, median_seconds, race
from demask.registry import RUNNERS
from demask.sparse.csr_matrix import NUMBERS
from demask.sparse.packed_linear import PackedLinear, check_group, pack_weight
from demask.sparse.products.form_choice import STEPS, chosen_form, copies
from demask.sparse.products.packed import PackedMatrix

ROUNDS, SECONDS = 20, 2.0  # of a timing, at most


@dataclass(frozen=True, slots=True)
class LayerChange:
    """What `sparsify` did with a layer.

    Attributes:
        name: of the module.
        size: rows and columns of its weight.
        zeros: the share of its elements that are zero, from 0 to 1.
        form: that it is stored in; "" where it is left as it was.
        nbytes: of the weight, before and after.
        speedup: seconds of torch's layer for `tokens` tokens, divided by those of the packed one; 0 if not timed.
        reason: why it was left; "" where it was not.

    Example:
        >>> from torch import nn
        >>> from demask.sparse import sparsify
        >>> (change,) = sparsify(nn.Sequential(nn.Linear(4, 4)), skip=["0"]).layers
        >>> change.name, change.size, change.form, change.reason
        ('0', (4, 4), '', 'skipped')
    """

    name: str
    size: tuple[int, int]
    zeros: float
    form: str
    nbytes: tuple[int, int]
    speedup: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Sparsified:
    """What `sparsify` did. str() is a table.

    Attributes:
        layers: a `LayerChange` for each linear layer.
        tokens: for how many tokens at a time layers were timed.

    Example:
        >>> from torch import nn
        >>> from demask.sparse import sparsify
        >>> report = sparsify(nn.Sequential(nn.Linear(4, 4)), min_sparsity=0.9)
        >>> report.nbytes, report.layers[0].reason
        ((64, 64), 'fewer zeros than 90%')
    """

    layers: tuple[LayerChange, ...]
    tokens: int = 1

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of the weights of all linear layers, before and after."""
        before, after = zip(*(layer.nbytes for layer in self.layers), strict=True) if self.layers else ((), ())
        return sum(before), sum(after)

    def __str__(self) -> str:
        from demask.text_table import number_table, render_text  # needs rich

        groups: dict[Any, list[LayerChange]] = {}
        for layer in self.layers:
            groups.setdefault((layer.size, round(STEPS * layer.zeros), layer.form, layer.reason), []).append(layer)
        table = number_table("layers", "weight", "zeros", "form", "bytes", f"{self.tokens} token: times as fast")
        for (size, *_), layers in groups.items():
            first = layers[0]
            name = first.name if len(layers) == 1 else f"{first.name} and {len(layers) - 1} more"
            speedup = f"{first.speedup:.2f}" if first.speedup else "–"
            before, after = (sum(layer.nbytes[k] for layer in layers) for k in range(2))
            share = f"{after / before:.0%}" if before else "–"
            what = first.form or f"left: {first.reason}"
            table.add_row(name, " x ".join(map(str, size)), f"{first.zeros:.0%}", what, share, speedup)
        before, after = self.nbytes
        count = sum(bool(layer.form) for layer in self.layers)
        head = f"{count} of {len(self.layers)} linear layers packed: {format_bytes(before)} -> {format_bytes(after)}"
        return f"{head}\n\n{render_text(table)}"


def sparsify(
    model: nn.Module,
    *,
    min_sparsity: float = 0.0,
    dtype: torch.dtype | None = None,
    tokens: int = 1,
    skip: Iterable[str] = (),
    group: int = 0,
) -> Sparsified:
    """Store the linear layers of a network packed, in place, wherever that is faster for few tokens at a time.

    Each `nn.Linear` becomes a `PackedLinear`, which is an `nn.Linear` too, if it was timed to be faster than torch's
    own; the others stay as they are. The network keeps its class: `generate`, `state_dict`, `torch.save`,
    `torch.compile` and adapters on its layers work as before; a network of transformers is saved packed by
    `save_pretrained`, and loaded by `demask.checkpoint.load`. It computes the same up to rounding: sums are
    float32, where torch rounds its own to the dtype of the layer, too. It is for inference: packed weights get no
    gradients. `PackedLinear.to_dense` undoes it.

    Args:
        model: on the CPU, with layers in bfloat16, float16 or float32. It is changed.
        min_sparsity: layers with a smaller share of zeros stay as they are. Default: 0. Layers without zeros are
            faster than torch's in bfloat16 on processors without instructions for it.
        dtype: that weights are stored in; torch.int8 rounds them, with a scale for each row. Default: their own,
            which is exact.
        tokens: how many tokens at a time to time layers for. Default: 1, as in `generate`.
        skip: names of modules that stay as they are, such as ["lm_head"].
        group: with torch.int8, how many columns of a row have a scale in common: 32, or another power of two from it
            on, such as 128, which rounds less. Default: 0, all of them.

    Returns:
        A `Sparsified`: what was done with each layer, and why.

    Raises:
        BadInput: an argument is out of range, or `skip` names no linear layer.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from demask.sparse import sparsify
        >>> net = nn.Sequential(nn.Linear(512, 512, dtype=torch.bfloat16), nn.ReLU())
        >>> net[0].weight.data *= torch.rand(512, 512) < 0.3
        >>> report = sparsify(net)
        >>> len(report.layers), net(torch.ones(1, 512, dtype=torch.bfloat16)).shape
        (1, torch.Size([1, 512]))
    """
    from demask.progress import progress

    if not 0 <= min_sparsity <= 1:
        raise BadInput(f"expected min_sparsity from 0 to 1, got {min_sparsity!r}")
    if type(tokens) is not int or tokens < 1:
        raise BadInput(f"expected a number of tokens from 1 on, got {tokens!r}")
    if dtype is not None and dtype not in NUMBERS:
        raise BadInput(f"expected to store float32, bfloat16, float16 or int8, got {dtype}")
    check_group(dtype, group)
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if "" in linear:
        raise BadInput("expected a network that has linear layers; pack a single one by PackedLinear.from_dense")
    left = set(skip)
    if unknown := left - linear.keys():
        raise BadInput(f"skip names {min(unknown)!r}, which is no linear layer")
    modules = [module for _, module in model.named_modules(remove_duplicate=False)]
    users = Counter(id(p) for module in modules for p in module._parameters.values() if p is not None)
    timings: dict[tuple[object, ...], tuple[float, float]] = {}
    changes = []
    with progress("packing weights", len(linear)) as step:
        for name, layer in linear.items():
            step(f"packing {name}")
            zeros = 1 - int(layer.weight.count_nonzero()) / max(layer.weight.numel(), 1)
            reason = _reason_to_leave(layer, users[id(layer.weight)])
            if not reason and name in left:
                reason = "skipped"
            if not reason and zeros < min_sparsity:
                reason = f"fewer zeros than {min_sparsity:.0%}"
            changes.append(_pack_if_faster(model, name, layer, zeros, reason, dtype, group, tokens, timings))
    library = sys.modules.get("transformers.modeling_utils")
    if library is not None and any(change.form for change in changes):
        for module in model.modules():
            if isinstance(module, library.PreTrainedModel):
                RUNNERS.get("packed")(module)
    return Sparsified(tuple(changes), tokens)


def _reason_to_leave(layer: nn.Linear, users: int) -> str:
    weight = layer.weight
    if isinstance(layer, PackedLinear):
        return "it is packed already"
    if type(layer) is not nn.Linear:
        return f"it is a {type(layer).__name__}"
    if not weight.is_cpu or weight.dtype not in NUMBERS or weight.dtype == torch.int8:
        return f"its weight is in {weight.dtype} on {weight.device}"
    if users > 1:
        return "its weight is tied to another module's"
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return "it has hooks" if any(hooks) else ""


def _pack_if_faster(
    model: nn.Module,
    name: str,
    layer: nn.Linear,
    zeros: float,
    reason: str,
    dtype: torch.dtype | None,
    group: int,
    tokens: int,
    timings: dict[tuple[object, ...], tuple[float, float]],
) -> LayerChange:
    weight = layer.weight
    size, before = (weight.shape[0], weight.shape[1]), weight.numel() * weight.element_size()
    if reason:
        return LayerChange(name, size, zeros, "", (before, before), reason=reason)
    stored = dtype or weight.dtype
    form = chosen_form(size, 1 - zeros, stored, tokens, group)
    key = size, weight.dtype, stored, form, round(STEPS * zeros)
    packed = None
    if key not in timings:
        packed = pack_weight(weight.detach(), form, stored, group)
        timings[key] = _times_as_fast(layer, packed, tokens)
    speedup, least = timings[key]
    if not is_faster(least, 1.0):
        return LayerChange(name, size, zeros, "", (before, before), speedup, f"torch's is not slower than {form}")
    packed = packed or pack_weight(weight.detach(), form, stored, group)
    parent, _, leaf = name.rpartition(".")
    replacement = PackedLinear(packed, layer.bias, dtype=weight.dtype).train(layer.training)
    setattr(model.get_submodule(parent), leaf, replacement)
    return LayerChange(name, size, zeros, form, (before, packed.nbytes), speedup)


def _times_as_fast(layer: nn.Linear, packed: PackedMatrix, tokens: int) -> tuple[float, float]:
    """Seconds of torch's layer divided by those of the packed one, and the lower bound of that; 0 if it is not known.

    Weights are read from memory, not from caches, as in a large network: several copies take turns.
    """
    weight = layer.weight.detach()
    x = torch.randn(tokens, weight.shape[1]).to(weight.dtype)
    weights = [m.tensors[0] for m in copies(PackedMatrix("dense", packed.size, (weight,)))]
    layers = [PackedLinear(one, layer.bias, dtype=weight.dtype) for one in copies(packed)]
    dense, own = cycle(weights), cycle(layers)
    warmup = max(len(weights), len(layers))  # the first call of a layer checks its tensors
    calls: dict[str, Callable[[], Tensor]] = {
        "torch": lambda: F.linear(x, next(dense), layer.bias),
        "packed": lambda: next(own)(x),
    }
    with torch.no_grad():
        samples = race(calls, ROUNDS, warmup, seconds=SECONDS)
    seconds = median_seconds(samples)
    is_known = len(samples["torch"]) > 1
    least = lower_bound(samples["torch"], samples["packed"]) if is_known else 0.0
    return seconds["torch"] / seconds["packed"], least
