"""Sparse replacements of torch layers: values are a parameter, int32 indices are buffers.

    SparseLinear, SparseConv1d, SparseConv2d, SparseConvTranspose1d, SparseConvTranspose2d

They have the inputs and outputs of the torch layers and run as `demask::segment`. All their state
is plain tensors, so optimizers, deepcopy, pickle, safetensors, `.to()`, torch.export and
torch.compile work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from torch.nn import functional as F

from demask.errors import BadInput
from demask.ops.activations import ActivationLike
from demask.sparse.segment_program import ConvStep, LinearStep, Pair, SegmentProgram
from demask.sparse.sparse_layer import SparseLayer, expect

Sizes = int | Sequence[int]


class SparseLinear(SparseLayer):
    """A layer like nn.Linear that stores and multiplies the nonzero weights only.

    It computes activation(x @ weight.T + bias) for x [..., in_features], in the dtype of the
    weight. `from_dense` converts an nn.Linear, `to_dense` converts back.

    Args:
        weight: [out_features, in_features], torch.sparse_csr or dense, floating-point; zeros of a
            dense weight are not stored.
        bias: [out_features]; default None: none.
        activation: a name: "relu", "relu6", "leaky_relu", "sigmoid", "tanh", "silu", "gelu",
            "gelu_tanh", "hardswish" or "hardsigmoid"; or a torch module of one of them, such as
            nn.LeakyReLU(0.2); default None: none.

    Attributes:
        values: the nonzeros, a parameter [nonzeros]; crow, col: their row starts and columns, int32
            buffers.
        density: stored weights divided by all.

    Raises:
        BadInput: a shape, dtype or activation that is not supported, or 2^31 or more rows, columns
            or nonzeros.

    Example:
        >>> import torch
        >>> from demask.sparse import SparseLinear
        >>> layer = SparseLinear(torch.tensor([[0.0, 2.0], [0.0, 0.0]]), torch.tensor([0.0, 1.0]))
        >>> layer(torch.tensor([[3.0, 4.0]])).detach()
        tensor([[8., 1.]])
        >>> layer.values.tolist(), layer.density
        ([2.0], 0.25)
    """

    kind = "tokens"

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, activation: ActivationLike = None
    ) -> None:
        super().__init__(weight, bias, activation)
        self.out_features, self.in_features = self.rows, self.columns
        self._set_program()

    @classmethod
    def from_dense(cls, module: nn.Linear, activation: ActivationLike = None) -> Self:
        """A sparse layer with the nonzeros of an nn.Linear, in the same training mode.

        Args:
            module: the layer to convert.
            activation: applied after the layer; default none.

        Raises:
            BadInput: `module` is not an nn.Linear, or the activation is not supported.

        Example:
            >>> from torch import nn
            >>> from demask.sparse import SparseLinear
            >>> SparseLinear.from_dense(nn.Linear(4, 3), "relu")
            SparseLinear(in_features=4, out_features=3, bias=True, density=1.000, activation=relu)
        """
        expect(module, nn.Linear)
        return cls(module.weight, module.bias, activation).train(module.training)

    def to_dense(self) -> nn.Module:
        """The equivalent nn.Linear, in a Sequential with the activation if there is one.

        Example:
            >>> import torch
            >>> from demask.sparse import SparseLinear
            >>> SparseLinear(torch.ones(3, 2)).to_dense()
            Linear(in_features=2, out_features=3, bias=False)
        """
        return self._dense(nn.Linear(self.columns, self.rows, **self._options()))

    def forward(self, x: Tensor) -> Tensor:
        """The output [..., out_features] for x [..., in_features], in the dtype of the weight.

        Raises:
            BadInput: the size or dtype of x does not match.
        """
        if x.ndim < 1 or x.shape[-1] != self.columns:
            raise BadInput(f"expected x [..., {self.columns}], got {tuple(x.shape)}")
        return self._run(x, self.program)

    def _step(self) -> LinearStep:
        weight, bias = self._spans()
        return LinearStep(0, weight, bias, self.rows, self.act)

    def _shape(self) -> tuple[int, ...]:
        return (self.columns,)

    def extra_repr(self) -> str:
        """Features, bias, density and activation."""
        sizes = f"in_features={self.columns}, out_features={self.rows}"
        return f"{sizes}, {super().extra_repr()}"


class SparseConv(SparseLayer):
    """Base class of sparse convolutions over `axes` axes.

    The matrix is [out_channels, in_channels / groups * kernel], `weight.flatten(1)` of the torch
    convolution; for transposed ones `weight.transpose(0, 1).flatten(1)` of each group.
    """

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
        group_channels, remainder = divmod(self.columns, math.prod(self.kernel_size))
        if remainder:
            raise BadInput(
                f"expected a multiple of the {self.kernel_size} kernel positions as columns, "
                f"got {self.columns} columns"
            )
        self.in_channels, self.out_channels = group_channels * groups, self.rows
        self._pads = self._padding(padding)
        self._check()
        self._set_program()

    def _sizes(self, name: str, value: Sizes, least: int) -> tuple[int, ...]:
        """One size per axis, each an integer of at least `least`."""
        sizes = (value,) * self.axes if isinstance(value, int) else tuple(value)
        if len(sizes) != self.axes or not all(isinstance(n, int) and n >= least for n in sizes):
            raise BadInput(f"expected {name}: {self.axes} sizes from {least} up, got {value!r}")
        return sizes

    def _padding(self, padding: Sizes | str) -> tuple[Pair, ...]:
        """Padding before and after each axis."""
        if padding == "valid":
            return ((0, 0),) * self.axes
        if padding == "same":
            if any(n != 1 for n in self.stride):
                raise BadInput(f"expected a stride of 1 with padding 'same', got {self.stride}")
            totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            return tuple((n // 2, n - n // 2) for n in totals)
        if isinstance(padding, str):
            raise BadInput(f"expected padding 'same', 'valid' or numbers, got {padding!r}")
        return tuple((n, n) for n in self._sizes("padding", padding, 0))

    def _check(self) -> None:
        """Raise BadInput for options that cannot be combined."""
        modes = ("zeros",) if self.transposed else ("zeros", "reflect", "replicate", "circular")
        if self.padding_mode not in modes:
            raise BadInput(f"expected a padding mode of {modes}, got {self.padding_mode!r}")
        limits = [max(s, d) for s, d in zip(self.stride, self.dilation, strict=True)]
        if any(n >= limit for n, limit in zip(self.output_padding, limits, strict=True)):
            raise BadInput(
                f"expected output_padding below stride or dilation, got {self.output_padding}"
            )
        if any(self.output_padding) and not self.transposed:
            raise BadInput("expected output_padding only for a transposed convolution")

    @classmethod
    def from_dense(cls, module: Any, activation: ActivationLike = None) -> Self:
        """A sparse layer with the nonzeros of a torch convolution, in the same training mode.

        Args:
            module: an instance of `torch_type`.
            activation: applied after the layer; default none.

        Raises:
            BadInput: `module` has another type, or the activation is not supported.

        Example:
            >>> from torch import nn
            >>> from demask.sparse import SparseConv2d
            >>> SparseConv2d.from_dense(nn.Conv2d(8, 4, 3))
            SparseConv2d(8, 4, kernel_size=(3, 3), stride=(1, 1), bias=True, density=1.000)
        """
        expect(module, cls.torch_type)
        names = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
        options = {name: getattr(module, name) for name in names}
        weight = module.weight
        if cls.transposed:
            options["output_padding"] = module.output_padding
            in_channels, out_channels, *kernel = weight.shape
            weight = weight.reshape(
                module.groups, in_channels // module.groups, out_channels, *kernel
            )
            weight = weight.transpose(1, 2).flatten(0, 1)
        layer = cls(weight.flatten(1), module.bias, activation=activation, **options)
        return layer.train(module.training)

    def to_dense(self) -> nn.Module:
        """The equivalent torch layer, in a Sequential with the activation if there is one.

        Example:
            >>> import torch
            >>> from demask.sparse import SparseConv1d
            >>> SparseConv1d(torch.ones(3, 2), kernel_size=1).to_dense()
            Conv1d(2, 3, kernel_size=(1,), stride=(1,), bias=False)
        """
        options = {"output_padding": self.output_padding} if self.transposed else {}
        layer = self.torch_type(
            self.in_channels, self.out_channels, self.kernel_size, self.stride, self.padding,
            dilation=self.dilation, groups=self.groups, padding_mode=self.padding_mode,
            **options, **self._options(),
        )  # fmt: skip
        return self._dense(layer)

    def forward(self, x: Tensor) -> Tensor:
        """The output [batch, out_channels, ...] for x [batch, in_channels, ...]; batch is optional.

        Raises:
            BadInput: the shape or dtype of x does not match.
        """
        return self._convolved(x, self.program)

    def _convolved(self, x: Tensor, program: str) -> Tensor:
        """The output of a program for x, with or without a batch axis."""
        unbatched = x.ndim == self.axes + 1
        if x.ndim - (not unbatched) != self.axes + 1 or x.shape[-self.axes - 1] != self.in_channels:
            sizes = ", ".join(("length",) if self.axes == 1 else ("height", "width"))
            expected = f"[batch, {self.in_channels}, {sizes}]"
            raise BadInput(f"expected x {expected}, got {tuple(x.shape)}")
        x = x.unsqueeze(0) if unbatched else x
        if self.padding_mode != "zeros":
            x = F.pad(x, [n for pair in reversed(self._pads) for n in pair], self.padding_mode)
        y = self._run(x, program)
        return y.squeeze(0) if unbatched else y

    def _step(self) -> ConvStep:
        return self._conv(self.output_padding)

    def _conv(self, output_padding: Sequence[int]) -> ConvStep:
        """The step with this output_padding per axis."""
        weight, bias = self._spans()
        pads = self._pads if self.padding_mode == "zeros" else ((0, 0),) * self.axes
        pads = tuple((a, b - n) for (a, b), n in zip(pads, output_padding, strict=True))
        is_image = self.axes == 2
        fields: dict[str, Any] = {
            "kernel": self.kernel_size if is_image else (1, *self.kernel_size),
            "stride": self.stride if is_image else (1, *self.stride),
            "dilation": self.dilation if is_image else (1, *self.dilation),
            "padding": pads if is_image else ((0, 0), *pads),
        }
        fields |= {"groups": self.groups, "transposed": self.transposed, "act": self.act}
        return ConvStep(0, weight, bias, self.rows, **fields)

    def _shape(self) -> tuple[int, ...]:
        return (1, self.in_channels, *[1] * self.axes)

    def extra_repr(self) -> str:
        """Options that differ from their defaults."""
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        text += f", stride={self.stride}"
        defaults = {"padding": 0, "dilation": 1, "groups": 1, "output_padding": 0}
        for name, default in defaults.items():
            value = getattr(self, name)
            if value not in (default, (default,) * self.axes):
                text += f", {name}={value}"
        mode = "" if self.padding_mode == "zeros" else f", padding_mode={self.padding_mode}"
        return f"{text}{mode}, {super().extra_repr()}"


class SparseConv1d(SparseConv):
    """A layer like nn.Conv1d that computes with the nonzero weights only.

    Inputs are signals [batch, in_channels, length], or one without batch. `from_dense` converts an
    nn.Conv1d, `to_dense` converts back.

    Args:
        weight: matrix [out_channels, in_channels / groups * kernel_size], torch.sparse_csr or
            dense: `weight.flatten(1)` of the nn.Conv1d.
        bias: [out_channels]; default None: none.
        kernel_size: of the window, an integer.
        stride, padding, dilation, groups, padding_mode: as in nn.Conv1d; defaults 1, 0, 1, 1,
            "zeros".
        activation: a name or a torch module, as of `SparseLinear`; default None: none.

    Raises:
        BadInput: an option, shape or activation that is not supported.

    Example:
        >>> import torch
        >>> from demask.sparse import SparseConv1d
        >>> difference = SparseConv1d(torch.tensor([[-1.0, 0.0, 1.0]]), kernel_size=3)
        >>> difference(torch.tensor([[[0.0, 1.0, 4.0, 9.0]]])).detach()
        tensor([[[4., 8.]]])
    """

    kind, axes, torch_type = "signal", 1, nn.Conv1d


class SparseConv2d(SparseConv):
    """A layer like nn.Conv2d that computes with the nonzero weights only.

    Inputs are images [batch, in_channels, height, width], or one without batch. `from_dense`
    converts an nn.Conv2d, `to_dense` converts back.

    Args:
        weight: matrix [out_channels, in_channels / groups * kernel height * kernel width],
            torch.sparse_csr or dense: `weight.flatten(1)` of the nn.Conv2d.
        bias: [out_channels]; default None: none.
        kernel_size: of the window, an integer or two.
        stride, padding, dilation, groups, padding_mode: as in nn.Conv2d; defaults 1, 0, 1, 1,
            "zeros".
        activation: a name or a torch module, as of `SparseLinear`; default None: none.

    Raises:
        BadInput: an option, shape or activation that is not supported.

    Example:
        >>> import torch
        >>> from demask.sparse import SparseConv2d
        >>> dense = torch.nn.Conv2d(8, 16, 3, padding=1)
        >>> with torch.no_grad():
        ...     _ = dense.weight[:, 2:].zero_()  # three quarters
        >>> layer, x = SparseConv2d.from_dense(dense), torch.randn(1, 8, 10, 10)
        >>> layer.density, torch.allclose(layer(x), dense(x), atol=1e-5)
        (0.25, True)
    """

    kind, axes, torch_type = "image", 2, nn.Conv2d


class SparseConvTranspose(SparseConv):
    """Base class of sparse transposed convolutions."""

    transposed = True

    def forward(self, x: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """The output for x [batch, in_channels, ...] (or without batch).

        output_size: sizes of the last axes of the output; by default those of `output_padding`.

        Raises:
            BadInput: the shape or dtype of x, or the output size, does not match.
        """
        if output_size is None:
            return self._convolved(x, self.program)
        step = self._conv(self._missing(x, output_size))
        return self._convolved(x, SegmentProgram((self.kind,), (step,), (1,)).text())

    def _missing(self, x: Tensor, output_size: Sequence[int]) -> list[int]:
        """The output_padding that results in an output of this size."""
        output_sizes, input_sizes = output_size[-self.axes :], x.shape[-self.axes :]
        missing = []
        for axis, (input_size, size) in enumerate(zip(input_sizes, output_sizes, strict=False)):
            reach = self.dilation[axis] * (self.kernel_size[axis] - 1)
            smallest = (input_size - 1) * self.stride[axis] + reach + 1 - sum(self._pads[axis])
            if not smallest <= size < smallest + self.stride[axis]:
                largest = smallest + self.stride[axis] - 1
                raise BadInput(f"expected an output size of {smallest} to {largest}, got {size}")
            missing.append(size - smallest)
        if len(missing) != self.axes:
            raise BadInput(f"expected {self.axes} output sizes, got {tuple(output_size)}")
        return missing


class SparseConvTranspose1d(SparseConvTranspose):
    """A layer like nn.ConvTranspose1d that computes with the nonzero weights only.

    Inputs are signals [batch, in_channels, length], or one without batch. `from_dense` converts an
    nn.ConvTranspose1d, `to_dense` converts back.

    Args:
        weight: matrix [out_channels, in_channels / groups * kernel_size], torch.sparse_csr or
            dense. A row has the weights of one output channel, groups one after another. With one
            group it is `weight.transpose(0, 1).flatten(1)` of the nn.ConvTranspose1d; with G groups
            `weight.unflatten(0, (G, -1)).transpose(1, 2).flatten(0, 1).flatten(1)`.
        bias: [out_channels]; default None: none.
        kernel_size: of the window, an integer.
        stride, padding, dilation, groups, output_padding: as in nn.ConvTranspose1d; defaults 1, 0,
            1, 1, 0.
        activation: a name or a torch module, as of `SparseLinear`; default None: none.

    Raises:
        BadInput: an option, shape or activation that is not supported.

    Example:
        >>> import torch
        >>> from demask.sparse import SparseConvTranspose1d
        >>> dense, x = torch.nn.ConvTranspose1d(4, 6, 3, groups=2, bias=False), torch.randn(1, 4, 9)
        >>> rows = dense.weight.unflatten(0, (2, -1)).transpose(1, 2).flatten(0, 1).flatten(1)
        >>> layer = SparseConvTranspose1d(rows, kernel_size=3, groups=2)
        >>> tuple(rows.shape), torch.allclose(layer(x), dense(x), atol=1e-6)
        ((6, 6), True)
    """

    kind, axes, torch_type = "signal", 1, nn.ConvTranspose1d


class SparseConvTranspose2d(SparseConvTranspose):
    """A layer like nn.ConvTranspose2d that computes with the nonzero weights only.

    Inputs are images [batch, in_channels, height, width], or one without batch. `from_dense`
    converts an nn.ConvTranspose2d, `to_dense` converts back.

    Args:
        weight: matrix [out_channels, in_channels / groups * kernel height * kernel width],
            torch.sparse_csr or dense. A row has the weights of one output channel, groups one after
            another. With one group it is `weight.transpose(0, 1).flatten(1)` of the
            nn.ConvTranspose2d; with G groups
            `weight.unflatten(0, (G, -1)).transpose(1, 2).flatten(0, 1).flatten(1)`.
        bias: [out_channels]; default None: none.
        kernel_size: of the window, an integer or two.
        stride, padding, dilation, groups, output_padding: as in nn.ConvTranspose2d; defaults 1, 0,
            1, 1, 0.
        activation: a name or a torch module, as of `SparseLinear`; default None: none.

    Raises:
        BadInput: an option, shape or activation that is not supported.

    Example:
        >>> import torch
        >>> from demask.sparse import SparseConvTranspose2d
        >>> dense, x = torch.nn.ConvTranspose2d(2, 3, 2, stride=2), torch.randn(1, 2, 5, 5)
        >>> layer = SparseConvTranspose2d.from_dense(dense)
        >>> torch.allclose(layer(x), dense(x), atol=1e-6), tuple(layer(x).shape)
        (True, (1, 3, 10, 10))
    """

    kind, axes, torch_type = "image", 2, nn.ConvTranspose2d
