"""Linear layers with constant weights in a packed form (`products.packed`), and their ops.

    torch.ops.demask.packed_linear(Tensor x, Tensor[] tensors, Tensor? scale, Tensor? bias, str form,
                                   int rows, int columns) -> Tensor
    torch.ops.demask.packed_weight(Tensor[] tensors, Tensor? scale, str form, int rows, int columns, bool double)
        -> Tensor                  the dense weight in float32, or float64, which the gradient of x reads

    y[..., r] = sum over k of w[r, k] * x[..., k] + bias[r]

Sums are float32 and rounded once, to the dtype of x. The weight gets no gradient; x and the bias do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.library import Library

from demask.compat.dispatch import needs_no_dispatch
from demask.errors import BadInput
from demask.kernels.plan_cache import PlanCache, plans_of, version
from demask.sparse.csr_matrix import NUMBERS
from demask.sparse.products.form_choice import chosen_form
from demask.sparse.products.packed import FORMS, LEAST_GROUP, PackedMatrix, check_tensors, pack, quantize
from demask.sparse.products.packed_product import linear, to_dense

_LIBRARY = Library("demask", "FRAGMENT")
_LIBRARY.define(
    "packed_linear(Tensor x, Tensor[] tensors, Tensor? scale, Tensor? bias, str form, int rows, int columns) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "packed_weight(Tensor[] tensors, Tensor? scale, str form, int rows, int columns, bool double) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
PACKED_LINEAR = torch.ops.demask.packed_linear.default


class CheckedTensors(PlanCache):
    """Which versions of the tensors of a packed matrix were checked. The text is its form."""

    parse = staticmethod(str)


def _check_operands(x: Tensor, packed: PackedMatrix, bias: Tensor | None) -> None:
    rows, columns = packed.size
    if not x.dtype.is_floating_point or (x.dtype == torch.float64) != (packed.dtype == torch.float64):
        raise BadInput(f"expected floating-point numbers for a weight in {packed.dtype}, got {x.dtype}")
    if x.ndim < 1 or x.shape[-1] != columns:
        raise BadInput(f"expected an input [..., {columns}], got {tuple(x.shape)}")
    if bias is not None and bias.shape != (rows,):
        raise BadInput(f"expected a bias of shape ({rows},), got {tuple(bias.shape)}")


def _on_any_device(
    x: Tensor, tensors: list[Tensor], scale: Tensor | None, bias: Tensor | None, form: str, rows: int, columns: int
) -> Tensor:
    packed = PackedMatrix(form, (rows, columns), tuple(tensors), scale)
    all_tensors = packed.all_tensors
    checked = plans_of(all_tensors, f"{form} {rows} {columns}", CheckedTensors)
    versions = checked.versions_of(all_tensors)
    if checked.versions != versions:
        check_tensors(packed)
        checked.versions = versions
    _check_operands(x, packed, bias)
    return linear(packed, x, bias)


def _dense_weight(
    tensors: list[Tensor], scale: Tensor | None, form: str, rows: int, columns: int, double: bool
) -> Tensor:
    packed = PackedMatrix(form, (rows, columns), tuple(tensors), scale)
    return to_dense(packed, torch.float64 if double else torch.float32).clone()


def _fake_weight(
    tensors: list[Tensor], scale: Tensor | None, form: str, rows: int, columns: int, double: bool
) -> Tensor:
    return tensors[0].new_empty((rows, columns), dtype=torch.float64 if double else torch.float32)


def _fake(
    x: Tensor, tensors: list[Tensor], scale: Tensor | None, bias: Tensor | None, form: str, rows: int, columns: int
) -> Tensor:
    _check_operands(x, PackedMatrix(form, (rows, columns), tuple(tensors), scale), bias)
    return x.new_empty((*x.shape[:-1], rows))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, tensors, scale, bias, ctx.form, rows, columns = inputs
    ctx.size, ctx.dtype = (rows, columns), x.dtype
    ctx.save_for_backward(scale, bias, *tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    scale, bias, *tensors = ctx.saved_tensors
    of_x = of_bias = None
    wide = torch.float64 if ctx.dtype == torch.float64 else torch.float32
    if ctx.needs_input_grad[0]:
        op = torch.ops.demask.packed_weight.default
        weight = op(tensors, scale, ctx.form, *ctx.size, wide == torch.float64)
        of_x = (grad.to(wide) @ weight).to(ctx.dtype)
    if bias is not None and ctx.needs_input_grad[3]:
        of_bias = grad.to(wide).reshape(-1, grad.shape[-1]).sum(0).to(bias.dtype)
    return of_x, [None] * len(tensors), None, of_bias, None, None, None


_LIBRARY.impl("packed_linear", _on_any_device, "CompositeExplicitAutograd")
_LIBRARY.impl("packed_weight", _dense_weight, "CompositeExplicitAutograd")
torch.library.register_fake("demask::packed_linear", _fake, lib=_LIBRARY)
torch.library.register_fake("demask::packed_weight", _fake_weight, lib=_LIBRARY)
torch.library.register_autograd("demask::packed_linear", _gradients, setup_context=_save, lib=_LIBRARY)


class PackedLinear(nn.Linear):
    """An `nn.Linear` whose weight is constant and stored packed: for inference, and for adapters on it.

    Zeros of the weight are not stored, and with few tokens at a time they are not read either. Sums are float32. The
    layer is an `nn.Linear` for others: `weight` is the dense matrix, computed when it is read. It gets no gradient and
    cannot be assigned; the input and the bias get gradients. Weights are buffers, so `state_dict`, `copy.deepcopy`,
    `pickle`, `torch.compile` and `torch.export` work; a state with a dense `weight` is packed when it is loaded.

    Args:
        packed: the weight, shape (out_features, in_features), from `PackedLinear.from_dense`.
        bias: vector [out_features], or None.

    Attributes:
        form: "dense", "bitmap" (a bit for each element and the nonzeros) or "columns" (nonzeros and their columns).
            "columns" skips zeros; the others multiply them, so that 0 times infinity is NaN, as in torch.

    Example:
        >>> import torch
        >>> from demask.sparse import PackedLinear
        >>> layer = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
        >>> layer.weight.data *= torch.rand(64, 64) < 0.5
        >>> packed = PackedLinear.from_dense(layer, form="bitmap")
        >>> torch.equal(packed.weight, layer.weight), packed(torch.ones(1, 64, dtype=torch.bfloat16)).shape
        (True, torch.Size([1, 64]))
    """

    values: Tensor
    scale: Tensor | None

    def __init__(self, packed: PackedMatrix, bias: Tensor | None = None, *, dtype: torch.dtype | None = None):
        nn.Module.__init__(self)
        self.out_features, self.in_features = packed.size
        self.form = packed.form
        self.dtype = dtype or (packed.dtype if packed.scale is None else torch.float32)
        for name, tensor in zip(FORMS[packed.form], packed.tensors, strict=True):
            self.register_buffer(name, tensor)
        self.register_buffer("scale", packed.scale)
        if bias is None:
            self.register_parameter("bias", None)
        else:
            self.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)

    @classmethod
    def from_dense(
        cls, layer: nn.Linear, form: str | None = None, *, dtype: torch.dtype | None = None, group: int = 0
    ) -> Self:
        """The layer with its weight packed.

        Args:
            layer: in float32, bfloat16 or float16. Its bias is shared; a dense weight in its own dtype, too.
            form: one of those above. Default: the fastest for one token, by the number of zeros.
            dtype: of the stored weight, such as torch.bfloat16 of a float32 layer; torch.int8 for integers with
                scales, a rounding of up to 1/254 of the largest weight with the same scale. Default: the layer's,
                which is exact.
            group: with torch.int8, how many columns of a row have a scale in common: 32, or another power of two
                from it on, but not in form "columns". Default: 0, a scale for each row.

        Raises:
            BadInput: another dtype, form or group.
        """
        weight, stored = layer.weight.detach(), dtype or layer.weight.dtype
        if weight.dtype not in NUMBERS or weight.dtype == torch.int8 or stored not in NUMBERS:
            raise BadInput(
                f"expected a weight in float32, bfloat16 or float16, got {weight.dtype} to store in {stored}"
            )
        packed = pack_weight(weight, form, stored, group)
        return cls(packed, layer.bias, dtype=weight.dtype).train(layer.training)

    @property
    def packed(self) -> PackedMatrix:
        """The weight in its form."""
        tensors = tuple(getattr(self, name) for name in FORMS[self.form])
        return PackedMatrix(self.form, (self.out_features, self.in_features), tensors, self.scale)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dense weight [out_features, in_features], computed for this read; it takes no gradient."""
        return to_dense(self.packed, self.dtype)

    def to_dense(self) -> nn.Linear:
        """An `nn.Linear` with the same weight and bias."""
        options = {"device": self.values.device, "dtype": self.dtype}
        layer = nn.Linear(self.in_features, self.out_features, self.bias is not None, **options)
        layer.weight = nn.Parameter(self.weight)
        if self.bias is not None:
            layer.bias = self.bias
        layer.train(self.training)
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """The product of an input [..., in_features], in its dtype."""
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        if needs_no_dispatch((input, *self._buffers.values(), self.bias)):
            packed = self._checked_matrix()
            _check_operands(input, packed, self.bias)
            return linear(packed, input, self.bias)
        packed = self.packed
        return PACKED_LINEAR(input, packed.tensors, packed.scale, self.bias, packed.form, *packed.size)

    def _checked_matrix(self) -> PackedMatrix:
        """The weight, whose tensors kernels follow: checked where they were written or replaced since."""
        state = [(t.data_ptr(), version(t)) for t in self._buffers.values() if t is not None]
        checked: tuple[list[tuple[int, int]], PackedMatrix] | None = self.__dict__.get("_checked")
        if checked is not None and checked[0] == state:
            return checked[1]
        packed = self.packed
        check_tensors(packed)
        self.__dict__["_checked"] = state, packed
        return packed

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_checked"}

    def extra_repr(self) -> str:
        """Sizes, form and dtype."""
        stored = str(self.values.dtype).removeprefix("torch.")
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, {bias=}, form={self.form}, {stored}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        scale = self.scale
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.values.device)).dtype
        if scale is not None and self.scale is not None:
            self.scale = scale.to(self.values.device)  # float32, whatever the dtype of the layer
        return self

    def _load_from_state_dict(  # type: ignore[override]
        self, state_dict: Any, prefix: str, *args: Any
    ) -> None:
        names = FORMS[self.form]
        if f"{prefix}weight" in state_dict:
            dense = state_dict.pop(f"{prefix}weight").to(self.dtype)
            if dense.shape == (self.out_features, self.in_features):
                packed = pack_weight(dense, self.form, self.values.dtype, self.packed.group)
                state_dict |= {f"{prefix}{name}": t for name, t in zip(names, packed.tensors, strict=True)}
                if packed.scale is not None:
                    state_dict[f"{prefix}scale"] = packed.scale
        for name in names:  # of any number of nonzeros
            tensor = state_dict.get(f"{prefix}{name}")
            if isinstance(tensor, Tensor) and tensor.shape != (own := getattr(self, name)).shape:
                self.register_buffer(name, own.new_empty(tensor.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)


def check_group(dtype: torch.dtype | None, group: int) -> None:
    """Raise BadInput for groups of columns that have no scales."""
    if type(group) is not int or (group and (group < LEAST_GROUP or group & (group - 1))):
        raise BadInput(f"expected a group of {LEAST_GROUP} columns or another power of two from it on, got {group!r}")
    if group and dtype != torch.int8:
        raise BadInput(f"expected groups of columns with dtype=torch.int8, which has scales, got {dtype}")


def pack_weight(weight: Tensor, form: str | None, dtype: torch.dtype, group: int = 0, vectors: int = 1) -> PackedMatrix:
    """A dense weight in a form (None: the fastest for so many vectors) and a dtype; group: as of
    `PackedLinear.from_dense`. Raises BadInput for other forms and groups."""
    check_group(dtype, group)
    scale = None
    if dtype == torch.int8:
        weight, scale = quantize(weight, group)
    weight = weight.to(dtype)
    if form is None:
        rows, columns = weight.shape
        density = int(weight.count_nonzero()) / max(weight.numel(), 1)
        form = chosen_form((rows, columns), density, dtype, vectors, group)
    if form not in FORMS or (group and form == "columns"):
        raise BadInput(f"expected one of the forms {', '.join(FORMS)}, or with groups dense or bitmap, got {form!r}")
    return pack(weight, form, scale)
