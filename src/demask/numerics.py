"""Float types of tensors and graphs, and reductions of masks."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

Network = TypeVar("Network", bound=nn.Module)

NARROW = (torch.float16, torch.bfloat16, torch.float32)
PACKED = (torch.float4_e2m1fn_x2,)
_FEW_BITS = {
    getattr(torch, f"{kind}{bits}"): getattr(torch, f"{kind}8") for kind in ("int", "uint") for bits in range(1, 8)
}
_CREATES = re.compile(r"aten\.(new_|full|zeros|ones|arange|empty|scalar_tensor|linspace)")


def is_number(value: Any) -> bool:
    """Whether a value is a real number other than NaN; bools are none.

    >>> [is_number(value) for value in (2, 0.5, float("nan"), True, "2", None)]
    [True, True, False, False, False, False]
    """
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def is_integer(value: Any) -> bool:
    """Whether a value is an integer; bools are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def to_computable(x: Tensor) -> Tensor:
    """A tensor detached from autograd; floats of 8 bits and complex numbers of 16, which torch
    cannot compute with, as float32 and complex64, pairs of floats of 4 bits as bytes, and integers of
    fewer bits as those of 8."""
    x = x.detach()
    if x.dtype in _FEW_BITS:
        return x.view(_FEW_BITS[x.dtype])
    if x.dtype in PACKED:
        return x.view(torch.uint8)
    if x.dtype is torch.complex32:
        return x.to(torch.complex64)
    return x.float() if x.is_floating_point() and x.dtype.itemsize == 1 else x


def rms_norm_eps(dtype: torch.dtype) -> float:
    """The epsilon of an RMS norm that states none, by the dtype of its input: that of the type it computes in.

    >>> rms_norm_eps(torch.bfloat16) == rms_norm_eps(torch.float32) == torch.finfo(torch.float32).eps
    True
    """
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def has_only_finite(x: Tensor) -> bool:
    """Whether no element is NaN or infinite, without a tensor that says so of each.

    >>> has_only_finite(torch.tensor([1.0, 2.0])), has_only_finite(torch.tensor([1.0, torch.nan]))
    (True, False)
    """
    x = to_computable(without_repeats(x))
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    if not (x.is_floating_point() and x.numel()):
        return True
    return all(math.isfinite(end) for end in torch.aminmax(x))


def find_narrow_casts(module: nn.Module) -> list[tuple[str, torch.dtype]]:
    """The calls that cast to a float type narrower than that of the parameters: name and dtype."""
    if not isinstance(module, fx.GraphModule):
        return []
    parameter_dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    casts = []
    for node in module.graph.nodes:
        name = str(node.target)
        for value in [*node.args, *node.kwargs.values()]:
            is_cast = value in NARROW and not _CREATES.match(name)
            if is_cast and torch.finfo(value).eps > torch.finfo(parameter_dtype).eps:
                casts.append((node.name, value))
    return casts


def to_wide(network: Network) -> Network:
    """The network itself, converted to float64 in place, with the float dtypes among the arguments
    of a graph's calls. An RMS norm without `eps` keeps the one that it had: of its own dtype."""
    own = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
    for module in network.modules():
        if isinstance(module, nn.RMSNorm) and module.eps is None:
            module.eps = rms_norm_eps(own if module.weight is None else module.weight.dtype)
    network.double()
    if not isinstance(network, fx.GraphModule):
        return network

    def wider(value: Any) -> Any:
        return torch.float64 if value in NARROW else value

    for node in network.graph.nodes:
        node.args = map_aggregate(node.args, wider)
        node.kwargs = map_aggregate(node.kwargs, wider)
        if str(node.target) == "aten.rms_norm.default":
            dtype = getattr(node.meta.get("val"), "dtype", own)
            if (node.args[3] if len(node.args) > 3 else node.kwargs.get("eps")) is None:
                node.args = node.args[:3]
                node.kwargs = {**node.kwargs, "eps": rms_norm_eps(dtype)}
    network.recompile()
    return network


def to_double(leaf: Any) -> Any:
    """A floating-point tensor converted to float64; anything else unchanged."""
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def any_along(mask: Tensor, axes: Sequence[int], *, keepdim: bool = False) -> Tensor:
    """`mask.any(dim=axes)`, as the largest byte: torch takes a hundredth of the time for it.

    >>> any_along(torch.tensor([[True, False], [False, False]]), [1])
    tensor([ True, False])
    """
    if not mask.numel():
        return mask.any(dim=list(axes), keepdim=keepdim)
    mask = without_repeats(mask, axes)
    # The outermost axis on its own: together with inner ones it is read with a stride.
    codes = mask.view(torch.uint8)
    for part in ([k for k in axes if k == 0], [k for k in axes if k]):
        codes = codes.amax(part, keepdim=True) if part else codes
    return (codes if keepdim else codes.squeeze(tuple(axes))).view(torch.bool)


def all_along(mask: Tensor, axes: Sequence[int], *, keepdim: bool = False) -> Tensor:
    """`mask.all(dim=axes)`; see `any_along`."""
    return ~any_along(~mask, axes, keepdim=keepdim)


def has_any(mask: Tensor) -> bool:
    """Whether any element of a mask is true."""
    return bool(mask.numel()) and bool(without_repeats(mask).view(torch.uint8).amax())


def is_all(mask: Tensor) -> bool:
    """Whether all elements of a mask are true."""
    return not mask.numel() or bool(without_repeats(mask).view(torch.uint8).amin())


def without_repeats(tensor: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    """The tensor with size 1 for those of some axes (None: of all) along which it is expanded."""
    for axis in range(tensor.ndim) if axes is None else axes:
        if tensor.shape[axis] > 1 and not tensor.stride(axis):
            tensor = tensor.narrow(axis, 0, 1)
    return tensor
