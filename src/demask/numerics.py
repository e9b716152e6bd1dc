"""Comparison of outputs: relative errors, units in the last place, float types of a graph. And
reductions of masks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from demask.pytree_paths import leaves_with_paths

Network = TypeVar("Network", bound=nn.Module)

RELATIVE = 1e-10  # max |a - b| / max |a| in float64
ULPS = 64.0  # of max |a|, in the network's own dtype
WORSE = 8.0  # times the rounding error of the network before demasking
NARROW = (torch.float16, torch.bfloat16, torch.float32)
_PACKED = (torch.float4_e2m1fn_x2,)
_CREATES = re.compile(r"aten\.(new_|full|zeros|ones|arange|empty|scalar_tensor|linspace)")


def ulp_size(largest: float, eps: float) -> float:
    """The size of one unit in the last place of `largest` >= 0, in a float type with machine
    epsilon `eps`."""
    return eps * 2.0 ** math.floor(math.log2(largest)) if largest else 0.0


def in_units(gap: float, largest: float, eps: float) -> float:
    """The difference `gap` in units in the last place of `largest`, the largest value compared."""
    ulp = ulp_size(largest, eps)
    return gap / ulp if ulp else (math.inf if gap else 0.0)


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
    cannot compute with, as float32 and complex64, and pairs of floats of 4 bits as bytes."""
    x = x.detach()
    if x.dtype in _PACKED:
        return x.view(torch.uint8)
    if x.dtype is torch.complex32:
        return x.to(torch.complex64)
    return x.float() if x.is_floating_point() and x.dtype.itemsize == 1 else x


def has_only_finite(x: Tensor) -> bool:
    """Whether no element is NaN or infinite, without a tensor that says so of each.

    >>> has_only_finite(torch.tensor([1.0, 2.0])), has_only_finite(torch.tensor([1.0, torch.nan]))
    (True, False)
    """
    x = to_computable(x)
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    if not (x.is_floating_point() and x.numel()):
        return True
    return all(math.isfinite(end) for end in torch.aminmax(x))


def named_leaves(value: Any) -> list[tuple[str, Any]]:
    """The leaves of an output, each with its path. Objects that are no pytrees (a cache, a
    dataclass) are replaced by the tensors and numbers in their attributes, at any depth.

    >>> import torch
    >>> [path for path, _ in named_leaves({"logits": torch.ones(2), "rest": (1, None)})]
    ["['logits']", "['rest'][0]", "['rest'][1]"]
    """
    return list(_leaves("", value, frozenset()))


def _leaves(prefix: str, value: Any, ancestors: frozenset[int]) -> Iterator[tuple[str, Any]]:
    for path, leaf in leaves_with_paths(value):
        full_path = prefix + pytree.keystr(path)
        attributes = _parts(leaf)
        if attributes is None:
            yield full_path, leaf
        elif id(leaf) not in ancestors:  # an object that contains itself is visited once
            for name, attribute in attributes.items():
                if not isinstance(attribute, type) and not callable(attribute):
                    yield from _leaves(f"{full_path}.{name}", attribute, ancestors | {id(leaf)})


def _parts(leaf: Any) -> Mapping[str, Any] | None:
    """The attributes of an object, by name; None for tensors and objects without attributes."""
    if isinstance(leaf, (Tensor, type)) or callable(leaf):
        return None
    slots = [name for kind in type(leaf).__mro__ for name in getattr(kind, "__slots__", ())]
    if not slots and not hasattr(leaf, "__dict__"):
        return None
    return {name: getattr(leaf, name) for name in slots if hasattr(leaf, name)} | {**getattr(leaf, "__dict__", {})}


def max_size_and_gap(a: Tensor, b: Tensor) -> tuple[float, float]:
    """max |a| and max |a - b|, computed in float64; a and b are finite, not empty, of one shape."""
    a, b = to_computable(a), to_computable(b)
    dtype = torch.complex128 if a.is_complex() else torch.float64
    return float(a.abs().max()), float((a.to(dtype) - b.to(dtype)).abs().max())


@dataclass(frozen=True, slots=True)
class Difference:
    """How an output differs from the expected one.

    Attributes:
        text: a difference other than rounding (shape, dtype, unequal integers), in words, or "".
        size: the largest finite expected magnitude, in float64.
        gap: the largest difference where the expected value is finite, in float64; infinite where
            the actual value is not finite.
        eps: machine epsilon of their dtype.
        is_finite: whether all values of both are finite.
        has_other_infinities: whether values differ where the expected one is not finite.
    """

    text: str = ""
    size: float = 0.0
    gap: float = 0.0
    eps: float = 0.0
    is_finite: bool = True
    has_other_infinities: bool = False

    @property
    def relative(self) -> float:
        """gap / size; infinite if the values cannot be subtracted."""
        if self.text and not self.gap:
            return math.inf
        return self.gap / self.size if self.size else (math.inf if self.gap else 0.0)

    def ulps(self, eps: float = 0.0) -> float:
        """The gap in units in the last place of the size. eps: machine epsilon of the least precise
        type that the network computes in, if it is larger than that of the outputs."""
        return in_units(self.gap, self.size, max(eps, self.eps))

    def is_rounding(self, eps: float = 0.0) -> bool:
        """Whether the gap is what sums in another order cause: at most 64 ulps, in float64 1e-10 of
        the size, since nothing tells there how badly a network rounds. eps: as for `ulps`.

        >>> Difference(size=1.0, gap=1e-12, eps=2.0**-52).is_rounding()
        True
        >>> Difference(size=1.0, gap=1e-5, eps=2.0**-23).is_rounding()
        False
        """
        return self.relative <= RELATIVE or self.ulps(eps) <= ULPS


def compare(expected: Any, actual: Any) -> Difference:
    """How an output differs from the expected one; each is a tensor, number, string or None.

    >>> import torch
    >>> compare(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0])).relative
    0.25
    >>> compare(torch.ones(2), torch.ones(3)).text
    'is torch.float32 (3,), expected torch.float32 (2,)'
    """
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        other = f"is {actual!r:.40}, expected {expected!r:.40}"
        return Difference("" if _is_same(expected, actual) else other)
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        own, other = (f"{x.dtype} {tuple(x.shape)}" for x in (actual, expected))
        return Difference(f"is {own}, expected {other}")
    if expected.dtype in _PACKED:
        expected, actual = to_computable(expected), to_computable(actual)
    if not expected.is_floating_point() and not expected.is_complex():
        same = torch.equal(expected, actual)
        size, gap = (0.0, 0.0) if same else max_size_and_gap(expected.double(), actual.double())
        return Difference("" if same else f"({expected.dtype}) is not equal", size, gap)
    eps, a, b = torch.finfo(expected.dtype).eps, to_computable(expected), to_computable(actual)
    finite, also = torch.isfinite(a), torch.isfinite(b)
    others = not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num())
    whole = bool(finite.all() and also.all())
    a, b = (x if whole else x[finite] for x in (a, b))
    if not a.numel():
        return Difference("", 0.0, 0.0, eps, whole, others)
    size, gap = max_size_and_gap(a, b)
    return Difference("", size, gap if gap == gap else math.inf, eps, whole, others)


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def _is_same(expected: Any, actual: Any) -> bool:
    """Whether numbers, strings, dtypes, devices or None are equal. Other objects count as equal."""
    if isinstance(expected, Tensor) or isinstance(actual, Tensor):
        return False
    is_plain = isinstance(expected, _PLAIN)
    return not is_plain or expected == actual or expected != expected


def is_about_as_exact(exact: Tensor, before: Tensor, after: Tensor) -> bool:
    """Whether the error of `after` is at most WORSE times that of `before`, both measured against
    the float64 result: rounding errors of an ill-conditioned network are large in both."""
    error_before, error_after = (max_size_and_gap(exact, x.to(exact))[1] for x in (before, after))
    return error_after <= WORSE * error_before


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
            module.eps = torch.finfo(own if module.weight is None else module.weight.dtype).eps
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
                node.kwargs = {**node.kwargs, "eps": torch.finfo(dtype).eps}
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


def without_repeats(mask: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    """The mask with size 1 for those of some axes (None: of all) along which it is expanded."""
    for axis in range(mask.ndim) if axes is None else axes:
        if mask.shape[axis] > 1 and not mask.stride(axis):
            mask = mask.narrow(axis, 0, 1)
    return mask
