"""Sparse layers in place of torch's: values as a parameter, int32 indices as buffers.

    SparseLinear, SparseConv1d, SparseConv2d, SparseConvTranspose1d, SparseConvTranspose2d

They take what torch's take and return what torch's return, by `demask::segment`: optimizers,
deepcopy, pickle, safetensors, `.to()`, torch.export and torch.compile see plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demask.errors import BadInput
from demask.ops.activations import ActivationLike, act_of, module_of
from demask.sparse import reference as dense
from demask.sparse.segment.segment_op import segment
from demask.sparse.segment_program import (
    MAX_SIZE,
    ConvStep,
    LinearStep,
    Pair,
    SegmentProgram,
    Span,
    SparseWeight,
)

Sizes = int | Sequence[int]


class SparseLayer(nn.Module):
    """What sparse layers have in common. weight: a matrix [rows, columns], torch.sparse_csr or
    dense, whose zeros are left out. bias [rows]. activation: computed with the layer."""

    values: nn.Parameter
    crow: Tensor
    col: Tensor
    kind: ClassVar[str]  # of inputs, as programs name them

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: ActivationLike):
        super().__init__()
        values, crow, col = compressed(weight)
        self.rows, self.columns, self.act = *weight.shape, act_of(activation)
        self.values = nn.Parameter(values)
        self.register_buffer("crow", crow)
        self.register_buffer("col", col)
        if bias is not None and bias.shape != (self.rows,):
            raise BadInput(f"expected a bias of shape ({self.rows},), got {tuple(bias.shape)}")
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    def _step(self) -> LinearStep | ConvStep:
        """The layer as a step of a program."""
        raise NotImplementedError

    def _shape(self) -> tuple[int, ...]:
        """A shape of an input."""
        raise NotImplementedError

    def _spans(self) -> tuple[SparseWeight, Span | None]:
        """Weight and bias among `_weights`."""
        n = self.values.numel()
        bias = None if self.bias is None else (3, 0, self.rows)
        return SparseWeight((0, 0, n), (1, 0, self.rows + 1), (2, 0, n)), bias

    def _weights(self) -> list[Tensor]:
        found = [self.values, self.crow, self.col]
        return found if self.bias is None else [*found, self.bias]

    def _describe(self) -> None:
        """Note the program that computes this layer."""
        self.program = SegmentProgram((self.kind,), (self._step(),), (1,)).text()

    def _run(self, x: Tensor, program: str) -> Tensor:
        if x.dtype != self.values.dtype:
            if not (x.is_floating_point() and torch.is_autocast_enabled(x.device.type)):
                raise BadInput(f"expected an input of {self.values.dtype}, got {x.dtype}")
            x = x.to(self.values.dtype)
        return segment([x], self._weights(), program)[0]

    @property
    def density(self) -> float:
        """Stored entries over all entries of the matrix."""
        return self.values.numel() / max(self.rows * self.columns, 1)

    @property
    def weight(self) -> Tensor:
        """The weight as torch's layer has it; differentiable."""
        return dense.weight(self._step(), self._weights(), self._shape())

    @property
    def weight_csr(self) -> Tensor:
        """The matrix [rows, columns] as torch.sparse_csr, on the same memory; differentiable."""
        size = self.rows, self.columns
        return torch.sparse_csr_tensor(
            self.crow, self.col, self.values, size, check_invariants=False
        )

    def _dense(self, layer: nn.Module) -> nn.Module:
        """torch's layer with these weights; in a Sequential, if there is an activation."""
        with torch.no_grad():
            layer.get_parameter("weight").copy_(self.weight)
            if self.bias is not None:
                layer.get_parameter("bias").copy_(self.bias)
        whole = layer if self.act is None else nn.Sequential(layer, module_of(self.act))
        return whole.train(self.training)

    def _options(self) -> dict[str, Any]:
        """How torch's layer is made so that it is like this one."""
        return {
            "bias": self.bias is not None, "device": self.values.device, "dtype": self.values.dtype,
        }  # fmt: skip

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Loads as many nonzeros as there are; the shape of the layer must be the same."""
        values, col = (state_dict.get(f"{prefix}{key}") for key in ("values", "col"))
        there = isinstance(values, Tensor) and isinstance(col, Tensor) and values.ndim == 1
        if there and values.shape == col.shape != self.col.shape:
            self.values.data = self.values.new_empty(values.shape)
            self.values.grad = None  # of nonzeros that are gone
            self.col = self.col.new_empty(col.shape)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._describe()

    def extra_repr(self) -> str:
        act = "" if self.act is None else f", activation={self.act[0]}"
        return f"bias={self.bias is not None}, density={self.density:.3f}{act}"


class SparseLinear(SparseLayer):
    """act(x @ weight.T + bias) for x [..., in_features], with the nonzeros of the weight alone.

    weight [out_features, in_features]: torch.sparse_csr, or dense, whose zeros are left out.
    activation: a name ("relu", "relu6", "silu", "gelu", "hardswish", …) or torch's module of it.

    >>> layer = SparseLinear(torch.tensor([[0.0, 2.0], [0.0, 0.0]]), torch.tensor([0.0, 1.0]))
    >>> layer(torch.tensor([[3.0, 4.0]])).detach()
    tensor([[8., 1.]])
    """

    kind = "tokens"

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, activation: ActivationLike = None
    ) -> None:
        super().__init__(weight, bias, activation)
        self.out_features, self.in_features = self.rows, self.columns
        self._describe()

    @classmethod
    def from_dense(cls, module: nn.Linear, activation: ActivationLike = None) -> Self:
        """The layer with the nonzeros of an nn.Linear.

        >>> SparseLinear.from_dense(nn.Linear(4, 3), "relu")
        SparseLinear(in_features=4, out_features=3, bias=True, density=1.000, activation=relu)
        """
        expect(module, nn.Linear)
        return cls(module.weight, module.bias, activation).train(module.training)

    def to_dense(self) -> nn.Module:
        """torch's layer (and activation) that computes the same."""
        return self._dense(nn.Linear(self.columns, self.rows, **self._options()))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 1 or x.shape[-1] != self.columns:
            raise BadInput(f"expected x [..., {self.columns}], got {tuple(x.shape)}")
        return self._run(x, self.program)

    def _step(self) -> LinearStep:
        weight, bias = self._spans()
        return LinearStep(0, weight, bias, self.rows, self.act)

    def _shape(self) -> tuple[int, ...]:
        return (self.columns,)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.columns}, out_features={self.rows}"
        return f"{sizes}, {super().extra_repr()}"


class SparseConv(SparseLayer):
    """Convolutions over `axes` axes; `transposed` ones too. The matrix of a kernel is
    [out_channels, in_channels / groups · kernel], as `weight.flatten(1)` of torch's convolution;
    of a transposed one it is `weight.transpose(0, 1).flatten(1)`, group by group."""

    axes: ClassVar[int]
    transposed: ClassVar[bool] = False
    torch_type: ClassVar[type[nn.Module]]

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, kernel_size: Sizes, stride: Sizes = 1,
        padding: Sizes | str = 0, dilation: Sizes = 1, groups: int = 1,
        padding_mode: str = "zeros", output_padding: Sizes = 0, activation: ActivationLike = None,
    ) -> None:  # fmt: skip
        super().__init__(weight, bias, activation)
        self.kernel_size = self._sizes("kernel_size", kernel_size, 1)
        self.stride = self._sizes("stride", stride, 1)
        self.dilation = self._sizes("dilation", dilation, 1)
        self.output_padding = self._sizes("output_padding", output_padding, 0)
        self.groups, self.padding_mode, self.padding = groups, padding_mode, padding
        inner, rest = divmod(self.columns, math.prod(self.kernel_size))
        if rest:
            raise BadInput(
                f"expected columns for every place of a kernel of {self.kernel_size}, "
                f"got {self.columns} columns"
            )
        self.in_channels, self.out_channels = inner * groups, self.rows
        self._pads = self._padding(padding)
        self._check()
        self._describe()

    def _sizes(self, name: str, given: Sizes, least: int) -> tuple[int, ...]:
        """One size per axis."""
        found = (given,) * self.axes if isinstance(given, int) else tuple(given)
        if len(found) != self.axes or not all(isinstance(n, int) and n >= least for n in found):
            raise BadInput(f"expected {name}: {self.axes} sizes from {least} up, got {given!r}")
        return found

    def _padding(self, given: Sizes | str) -> tuple[Pair, ...]:
        """Before and behind each axis."""
        if given == "valid":
            return ((0, 0),) * self.axes
        if given == "same":
            if any(n != 1 for n in self.stride):
                raise BadInput(f"expected a stride of 1 with padding 'same', got {self.stride}")
            totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            return tuple((n // 2, n - n // 2) for n in totals)
        if isinstance(given, str):
            raise BadInput(f"expected padding 'same', 'valid' or numbers, got {given!r}")
        return tuple((n, n) for n in self._sizes("padding", given, 0))

    def _check(self) -> None:
        modes = ("zeros",) if self.transposed else ("zeros", "reflect", "replicate", "circular")
        if self.padding_mode not in modes:
            raise BadInput(f"expected a padding mode of {modes}, got {self.padding_mode!r}")
        room = [max(s, d) for s, d in zip(self.stride, self.dilation, strict=True)]
        if any(n >= limit for n, limit in zip(self.output_padding, room, strict=True)):
            raise BadInput(
                f"expected output_padding below stride or dilation, got {self.output_padding}"
            )
        if any(self.output_padding) and not self.transposed:
            raise BadInput("expected output_padding with a transposed convolution alone")

    @classmethod
    def from_dense(cls, module: Any, activation: ActivationLike = None) -> Self:
        """The layer with the nonzeros of torch's layer, and an activation behind it.

        >>> SparseConv2d.from_dense(nn.Conv2d(8, 4, 3, padding="same", groups=2), nn.SiLU())
        SparseConv2d(8, 4, kernel_size=(3, 3), stride=(1, 1), padding=same, groups=2, bias=True, \
density=1.000, activation=silu)
        """
        expect(module, cls.torch_type)
        kept = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
        options = {name: getattr(module, name) for name in kept}
        weight = module.weight
        if cls.transposed:
            options["output_padding"] = module.output_padding
            inner, outer, *kernel = weight.shape
            weight = weight.reshape(module.groups, inner // module.groups, outer, *kernel)
            weight = weight.transpose(1, 2).flatten(0, 1)
        made = cls(weight.flatten(1), module.bias, activation=activation, **options)
        return made.train(module.training)

    def to_dense(self) -> nn.Module:
        """torch's layer (and activation) that computes the same."""
        options = {"output_padding": self.output_padding} if self.transposed else {}
        made = self.torch_type(
            self.in_channels, self.out_channels, self.kernel_size, self.stride, self.padding,
            dilation=self.dilation, groups=self.groups, padding_mode=self.padding_mode,
            **options, **self._options(),
        )  # fmt: skip
        return self._dense(made)

    def forward(self, x: Tensor) -> Tensor:
        return self._convolved(x, self.program)

    def _convolved(self, x: Tensor, program: str) -> Tensor:
        single = x.ndim == self.axes + 1
        if x.ndim - (not single) != self.axes + 1 or x.shape[-self.axes - 1] != self.in_channels:
            sizes = ", ".join(("length",) if self.axes == 1 else ("height", "width"))
            expected = f"[batch, {self.in_channels}, {sizes}]"
            raise BadInput(f"expected x {expected}, got {tuple(x.shape)}")
        x = x.unsqueeze(0) if single else x
        if self.padding_mode != "zeros":
            x = F.pad(x, [n for pair in reversed(self._pads) for n in pair], self.padding_mode)
        y = self._run(x, program)
        return y.squeeze(0) if single else y

    def _step(self) -> ConvStep:
        return self._conv(self.output_padding)

    def _conv(self, more: Sequence[int]) -> ConvStep:
        """The step with so much output_padding."""
        weight, bias = self._spans()
        pads = self._pads if self.padding_mode == "zeros" else ((0, 0),) * self.axes
        pads = tuple((a, b - n) for (a, b), n in zip(pads, more, strict=True))
        whole = self.axes == 2
        fields: dict[str, Any] = {
            "kernel": self.kernel_size if whole else (1, *self.kernel_size),
            "stride": self.stride if whole else (1, *self.stride),
            "dilation": self.dilation if whole else (1, *self.dilation),
            "padding": pads if whole else ((0, 0), *pads),
        }
        fields |= {"groups": self.groups, "transposed": self.transposed, "act": self.act}
        return ConvStep(0, weight, bias, self.rows, **fields)

    def _shape(self) -> tuple[int, ...]:
        return (1, self.in_channels, *[1] * self.axes)

    def extra_repr(self) -> str:
        found = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        found += f", stride={self.stride}"
        plain = {"padding": 0, "dilation": 1, "groups": 1, "output_padding": 0}
        for name, usual in plain.items():
            value = getattr(self, name)
            if value not in (usual, (usual,) * self.axes):
                found += f", {name}={value}"
        mode = "" if self.padding_mode == "zeros" else f", padding_mode={self.padding_mode}"
        return f"{found}{mode}, {super().extra_repr()}"


class SparseConv1d(SparseConv):
    """A convolution of signals [batch, in_channels, length] (or one without batch), as nn.Conv1d.

    >>> conv = nn.Conv1d(4, 6, 3, padding=1)
    >>> layer = SparseConv1d.from_dense(conv)
    >>> layer(torch.ones(1, 4, 10)).shape
    torch.Size([1, 6, 10])
    """

    kind, axes, torch_type = "signal", 1, nn.Conv1d


class SparseConv2d(SparseConv):
    """A convolution of images [batch, in_channels, height, width] (or one without batch), as
    nn.Conv2d: any kernel, stride, padding, padding_mode, dilation and groups.

    >>> weight = torch.tensor([[0.0, 2.0]])  # 1x1, two channels to one
    >>> layer = SparseConv2d(weight, kernel_size=1, activation="relu6")
    >>> layer(torch.ones(1, 2, 1, 3)).detach()
    tensor([[[[2., 2., 2.]]]])
    """

    kind, axes, torch_type = "image", 2, nn.Conv2d


class SparseConvTranspose(SparseConv):
    """Transposed convolutions."""

    transposed = True

    def forward(self, x: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        if output_size is None:
            return self._convolved(x, self.program)
        step = self._conv(self._missing(x, output_size))
        return self._convolved(x, SegmentProgram((self.kind,), (step,), (1,)).text())

    def _missing(self, x: Tensor, output_size: Sequence[int]) -> list[int]:
        """The output_padding that gives an output of this size."""
        wanted, found = output_size[-self.axes :], x.shape[-self.axes :]
        missing = []
        for axis, (n, size) in enumerate(zip(found, wanted, strict=False)):
            reach = self.dilation[axis] * (self.kernel_size[axis] - 1)
            least = (n - 1) * self.stride[axis] + reach + 1 - sum(self._pads[axis])
            if not least <= size < least + self.stride[axis]:
                most = least + self.stride[axis] - 1
                raise BadInput(f"expected an output size of {least} to {most}, got {size}")
            missing.append(size - least)
        if len(missing) != self.axes:
            raise BadInput(f"expected {self.axes} output sizes, got {tuple(output_size)}")
        return missing


class SparseConvTranspose1d(SparseConvTranspose):
    """A transposed convolution of signals [batch, in_channels, length], as nn.ConvTranspose1d.

    >>> SparseConvTranspose1d.from_dense(nn.ConvTranspose1d(2, 3, 4, 2))(torch.ones(1, 2, 5)).shape
    torch.Size([1, 3, 12])
    """

    kind, axes, torch_type = "signal", 1, nn.ConvTranspose1d


class SparseConvTranspose2d(SparseConvTranspose):
    """A transposed convolution of images [batch, in_channels, height, width], as
    nn.ConvTranspose2d.

    >>> layer = SparseConvTranspose2d.from_dense(nn.ConvTranspose2d(2, 3, 2, 2, output_padding=1))
    >>> layer(torch.ones(1, 2, 5, 5)).shape
    torch.Size([1, 3, 11, 11])
    """

    kind, axes, torch_type = "image", 2, nn.ConvTranspose2d


def compressed(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, int32 row starts and int32 columns of a matrix, torch.sparse_csr or dense."""
    if weight.ndim != 2 or weight.layout not in (torch.sparse_csr, torch.strided):
        found = f"{tuple(weight.shape)}, {weight.layout}"
        raise BadInput(f"expected a weight [rows, columns], sparse_csr or dense, got {found}")
    if not weight.is_floating_point():
        raise BadInput(f"expected floating-point weights, got {weight.dtype}")
    weight = weight.detach()
    if weight.layout == torch.sparse_csr:
        values, col = weight.values().clone(), weight.col_indices()
        crow = weight.crow_indices()
    else:
        there = weight != 0
        values, col = weight[there], there.nonzero()[:, 1]
        crow = F.pad(there.sum(1).cumsum(0), (1, 0))
    if max(*weight.shape, values.numel()) > MAX_SIZE:
        raise BadInput(f"expected at most {MAX_SIZE} rows, columns and nonzeros")
    return values, crow.to(torch.int32, copy=True), col.to(torch.int32, copy=True)


def expect(module: Any, kind: type[nn.Module]) -> None:
    """Raise BadInput for a module that is not of torch's type."""
    if not isinstance(module, kind):
        raise BadInput(f"expected nn.{kind.__name__}, got {type(module).__name__}")
