"""Sparse replacements of torch layers: values are a parameter, int32 indices are buffers.

They run as `demask::segment`. All their state is plain tensors, so optimizers, deepcopy, pickle,
safetensors, `.to()`, torch.export and torch.compile work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demask.errors import BadInput
from demask.exec.steps import segment_weights as stored
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import (
    MAX_SIZE,
    Conv,
    Layer,
    Outputs,
    Pair,
    Span,
    SparseWeight,
    Step,
    conv_step,
    linear_step,
)
from demask.ops.activations import ActivationLike, act_of, activation_module
from demask.sparse.csr_matrix import CsrMatrix
from demask.sparse.functional import DCSR, product_of_rows
from demask.sparse.segment.segment_op import segment


class SparseLayer(nn.Module):
    """Base class of sparse layers: a CSR matrix of weights, a bias and an activation.

    Args:
        weight: floating-point matrix [rows, columns], torch.sparse_csr or dense, copied; zeros of a
            dense matrix are not stored.
        bias: vector [rows], or None.
        activation: function applied to the result, or None.

    Attributes:
        values: stored weights, a parameter [number of stored weights].
        crow, col: int32 buffers, row starts [rows + 1] and columns of `values`, as in CSR.
        rows, columns: sizes of the matrix.
        act: (name, parameters) of the activation, or None.
        program: JSON text from which `demask::segment` computes the layer.
    """

    values: nn.Parameter
    crow: Tensor
    col: Tensor
    kind: ClassVar[str]  # of the input, as named in programs

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

    def _layer_step(self) -> Layer:
        raise NotImplementedError

    def _example_shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    def _weight_spans(self) -> tuple[SparseWeight, Span | None]:
        n = self.values.numel()
        bias = None if self.bias is None else (3, 0, self.rows)
        return SparseWeight((0, 0, n), (1, 0, self.rows + 1), (2, 0, n)), bias

    def _program_weights(self) -> list[Tensor]:
        tensors = [self.values, self.crow, self.col]
        return tensors if self.bias is None else [*tensors, self.bias]

    def _set_program(self) -> None:
        self.program = SegmentProgram((self.kind,), (self._layer_step(),), (1,)).text()

    def _run_program(self, x: Tensor, program: str) -> Tensor:
        if x.dtype != self.values.dtype:
            if not (x.is_floating_point() and torch.is_autocast_enabled(x.device.type)):
                raise BadInput(f"expected an input of {self.values.dtype}, got {x.dtype}")
            x = x.to(self.values.dtype)
        return segment([x], self._program_weights(), program)[0]

    @property
    def density(self) -> float:
        """The number of stored weights divided by rows * columns, from 0 to 1."""
        return self.values.numel() / max(self.rows * self.columns, 1)

    @property
    def weight(self) -> Tensor:
        """The dense weight in the shape and dtype of the torch layer's; differentiable.

        Raises:
            BadInput: `crow` or `col` are not valid CSR indices of the matrix.
        """
        return stored.weight(self._layer_step(), self._program_weights(), self._example_shape())

    @property
    def weight_csr(self) -> Tensor:
        """The weight matrix [rows, columns] as torch.sparse_csr, sharing memory; differentiable."""
        size = self.rows, self.columns
        return torch.sparse_csr_tensor(self.crow, self.col, self.values, size, check_invariants=False)

    def _dense_layers(self, layer: nn.Module) -> nn.Module:
        """A torch layer with these weights, in a Sequential if there is an activation."""
        with torch.no_grad():
            layer.get_parameter("weight").copy_(self.weight)
            if self.bias is not None:
                layer.get_parameter("bias").copy_(self.bias)
        module = layer if self.act is None else nn.Sequential(layer, activation_module(self.act))
        return module.train(self.training)

    def _torch_options(self) -> dict[str, Any]:
        return {"bias": self.bias is not None, "device": self.values.device, "dtype": self.values.dtype}

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Loads any number of nonzeros; the shape of the layer must be the same."""
        values, col = (state_dict.get(f"{prefix}{key}") for key in ("values", "col"))
        is_complete = isinstance(values, Tensor) and isinstance(col, Tensor) and values.ndim == 1
        if is_complete and values.shape == col.shape != self.col.shape:
            self.values.data = self.values.new_empty(values.shape)
            self.values.grad = None  # of the previous nonzeros
            self.col = self.col.new_empty(col.shape)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._set_program()
        # The number of columns is not stored: a smaller one is not recognized.
        if is_complete and col.numel() and not col.is_meta and int(col.max()) >= self.columns:
            error_msgs.append(
                f"size mismatch for {prefix}col: expected columns below "
                f"{self.columns}, got {int(col.max())}: weights of another "
                f"layer"
            )

    def extra_repr(self) -> str:
        """The text in parentheses in the layer's repr: bias, density and activation."""
        act = "" if self.act is None else f", activation={self.act[0]}"
        return f"bias={self.bias is not None}, density={self.density:.3f}{act}"


def compressed(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, int32 row starts and int32 columns of a sparse_csr or dense matrix."""
    if weight.ndim != 2 or weight.layout not in (torch.sparse_csr, torch.strided):
        description = f"{tuple(weight.shape)}, {weight.layout}"
        raise BadInput(f"expected a weight [rows, columns], sparse_csr or dense, got {description}")
    if not weight.is_floating_point():
        raise BadInput(f"expected floating-point weights, got {weight.dtype}")
    weight = weight.detach()
    if weight.layout == torch.sparse_csr:
        values, col = weight.values().clone(), weight.col_indices()
        crow = weight.crow_indices()
    else:
        is_nonzero = weight != 0
        values, col = weight[is_nonzero], is_nonzero.nonzero()[:, 1]
        crow = F.pad(is_nonzero.sum(1).cumsum(0), (1, 0))
    if max(*weight.shape, values.numel()) > MAX_SIZE:
        raise BadInput(f"expected at most {MAX_SIZE} rows, columns and nonzeros")
    return values, crow.to(torch.int32, copy=True), col.to(torch.int32, copy=True)


def expect(module: Any, kind: type[nn.Module]) -> None:
    """Raise BadInput if a module is not of a torch type."""
    if not isinstance(module, kind):
        raise BadInput(f"expected nn.{kind.__name__}, got {type(module).__name__}")


Sizes = int | Sequence[int]


class SparseLinear(SparseLayer):
    """A fully connected layer like nn.Linear that stores and multiplies only the nonzero weights.

    It computes activation(x @ weight.T + bias) for x [..., in_features], in the dtype of the
    weight. `from_dense` converts an nn.Linear, `to_dense` converts back. Training changes the
    stored weights, not their positions. `load_state_dict` accepts another number of stored weights.

    Args:
        weight: floating-point matrix [out_features, in_features], torch.sparse_csr or dense,
            copied; out_features is 1 or more. Zeros of a dense weight are not stored.
        bias: floating-point vector [out_features], copied; default None, no bias.
        activation: function applied to each output: a name, "relu", "relu6", "leaky_relu", "elu",
            "selu", "sigmoid", "tanh", "silu", "gelu", "gelu_tanh", "hardswish" or "hardsigmoid", with
            torch's default parameters; or a torch module of one of them or nn.Hardtanh, such as
            nn.LeakyReLU(0.2). Default None, no activation.

    Attributes:
        values: stored weights, a parameter [number of stored weights] of the dtype of `weight`.
        crow, col: int32 buffers, row starts [out_features + 1] and columns of `values`, as in CSR.
        bias, density: parameter [out_features] or None; share of weights that are stored, 0 to 1.
        weight: dense weight [out_features, in_features], computed at each access; differentiable.
        weight_csr: weight as torch.sparse_csr, which shares memory with `values`; differentiable.
        in_features, out_features: sizes of the last axis of input and output.

    Raises:
        BadInput: `weight` has another shape, layout or dtype than listed above, `bias` another
            shape, the activation is unknown, or there are 2^31 or more rows, columns or weights.
        RuntimeError: `bias` is not floating-point.

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

    def __init__(self, weight: Tensor, bias: Tensor | None = None, activation: ActivationLike = None) -> None:
        super().__init__(weight, bias, activation)
        self.out_features, self.in_features = self.rows, self.columns
        self._set_program()

    @classmethod
    def from_dense(cls, module: nn.Linear, activation: ActivationLike = None) -> Self:
        """A SparseLinear with copies of the nonzero weights and the bias of an nn.Linear.

        Args:
            module: nn.Linear to convert; the result is in the same training mode.
            activation: as in `SparseLinear`; default None.

        Raises:
            BadInput: `module` is not an nn.Linear, or the activation is unknown.

        Example:
            >>> from torch import nn
            >>> from demask.sparse import SparseLinear
            >>> SparseLinear.from_dense(nn.Linear(4, 3), "relu")
            SparseLinear(in_features=4, out_features=3, bias=True, density=1.000, activation=relu)
        """
        expect(module, nn.Linear)
        return cls(module.weight, module.bias, activation).train(module.training)

    def to_dense(self) -> nn.Module:
        """The equivalent nn.Linear; with an activation, an nn.Sequential of both.

        Example:
            >>> import torch
            >>> from demask.sparse import SparseLinear
            >>> SparseLinear(torch.ones(3, 2)).to_dense()
            Linear(in_features=2, out_features=3, bias=False)
        """
        return self._dense_layers(nn.Linear(self.columns, self.rows, **self._torch_options()))

    def forward(self, x: Tensor | DCSR) -> Tensor:
        """The output [..., out_features] for x [..., in_features], in the dtype of the weight.

        Of a sparse x [tokens, in_features] only the stored elements are multiplied, and have gradients;
        the output is dense.

        Args:
            x: input of the dtype of the weight; under autocast a dense one of any floating-point dtype.
                Dense, or torch.sparse_csr or DCSR with two axes (DCSR under torch.compile).

        Raises:
            BadInput: the last axis or the dtype of x does not match, or stored indices are invalid.
        """
        if isinstance(x, DCSR) or x.layout == torch.sparse_csr:
            size, dtype = (x.size, x.values.dtype) if isinstance(x, DCSR) else (tuple(x.shape), x.dtype)
            if len(size) != 2 or size[1] != self.columns or dtype != self.values.dtype:
                raise BadInput(f"expected x [tokens, {self.columns}] of {self.values.dtype}, got {size}, {dtype}")
            w = CsrMatrix(self.crow, self.col, self.values, None, (self.rows, self.columns))
            return product_of_rows(x, w, self.bias, self.act)
        if x.ndim < 1 or x.shape[-1] != self.columns:
            raise BadInput(f"expected x [..., {self.columns}], got {tuple(x.shape)}")
        return self._run_program(x, self.program)

    def _layer_step(self) -> Step[Outputs]:
        weight, bias = self._weight_spans()
        return linear_step(0, weight, bias, self.rows, self.act)

    def _example_shape(self) -> tuple[int, ...]:
        return (self.columns,)

    def extra_repr(self) -> str:
        """The text in parentheses in the layer's repr: features, bias, density and activation."""
        sizes = f"in_features={self.columns}, out_features={self.rows}"
        return f"{sizes}, {super().extra_repr()}"


class SparseConv(SparseLayer):
    """Base class of sparse convolutions with `axes` axes, 1 or 2."""

    axes: ClassVar[int]
    transposed: ClassVar[bool] = False
    torch_type: ClassVar[type[nn.Module]]

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        padding_mode: str = "zeros",
        output_padding: Sizes = 0,
        activation: ActivationLike = None,
    ) -> None:
        super().__init__(weight, bias, activation)
        self.kernel_size = self._axis_sizes("kernel_size", kernel_size, 1)
        self.stride = self._axis_sizes("stride", stride, 1)
        self.dilation = self._axis_sizes("dilation", dilation, 1)
        self.output_padding = self._axis_sizes("output_padding", output_padding, 0)
        self.groups, self.padding_mode, self.padding = groups, padding_mode, padding
        group_channels, remainder = divmod(self.columns, math.prod(self.kernel_size))
        if remainder:
            raise BadInput(
                f"expected a multiple of the {self.kernel_size} kernel positions as columns, got {self.columns} columns"
            )
        self.in_channels, self.out_channels = group_channels * groups, self.rows
        self._pads = self._axis_padding(padding)
        self._check_options()
        self._set_program()

    def _axis_sizes(self, name: str, value: Sizes, least: int) -> tuple[int, ...]:
        sizes = (value,) * self.axes if isinstance(value, int) else tuple(value)
        if len(sizes) != self.axes or not all(isinstance(n, int) and n >= least for n in sizes):
            raise BadInput(f"expected {name}: {self.axes} sizes from {least} up, got {value!r}")
        return sizes

    def _axis_padding(self, padding: Sizes | str) -> tuple[Pair, ...]:
        """Padding before and after each axis."""
        if padding == "valid" and not self.transposed:
            return ((0, 0),) * self.axes
        if padding == "same" and not self.transposed:
            if any(n != 1 for n in self.stride):
                raise BadInput(f"expected a stride of 1 with padding 'same', got {self.stride}")
            totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            return tuple((n // 2, n - n // 2) for n in totals)
        if isinstance(padding, str):
            words = "" if self.transposed else "'same', 'valid' or "
            raise BadInput(f"expected padding {words}numbers, got {padding!r}")
        return tuple((n, n) for n in self._axis_sizes("padding", padding, 0))

    def _check_options(self) -> None:
        """Raise BadInput for options that cannot be combined."""
        modes = ("zeros",) if self.transposed else ("zeros", "reflect", "replicate", "circular")
        if self.padding_mode not in modes:
            raise BadInput(f"expected a padding mode of {modes}, got {self.padding_mode!r}")
        limits = [max(s, d) for s, d in zip(self.stride, self.dilation, strict=True)]
        if any(n >= limit for n, limit in zip(self.output_padding, limits, strict=True)):
            raise BadInput(f"expected output_padding below stride or dilation, got {self.output_padding}")
        if any(self.output_padding) and not self.transposed:
            raise BadInput("expected output_padding only for a transposed convolution")

    @classmethod
    def from_dense(cls, module: Any, activation: ActivationLike = None) -> Self:
        """A sparse layer with copies of the nonzero weights and the bias of a torch convolution.

        Args:
            module: nn.Conv1d for SparseConv1d, and so on; the result is in the same training mode.
            activation: as in `SparseLinear`; default None.

        Raises:
            BadInput: `module` is another layer, or the activation is unknown.

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
            weight = weight.reshape(module.groups, in_channels // module.groups, out_channels, *kernel)
            weight = weight.transpose(1, 2).flatten(0, 1)
        layer = cls(weight.flatten(1), module.bias, activation=activation, **options)
        return layer.train(module.training)

    def to_dense(self) -> nn.Module:
        """The equivalent torch convolution; with an activation, an nn.Sequential of both.

        Example:
            >>> import torch
            >>> from demask.sparse import SparseConv1d
            >>> SparseConv1d(torch.ones(3, 2), kernel_size=1).to_dense()
            Conv1d(2, 3, kernel_size=(1,), stride=(1,), bias=False)
        """
        options = {"output_padding": self.output_padding} if self.transposed else {}
        layer = self.torch_type(
            self.in_channels,
            self.out_channels,
            self.kernel_size,
            self.stride,
            self.padding,
            dilation=self.dilation,
            groups=self.groups,
            padding_mode=self.padding_mode,
            **options,
            **self._torch_options(),
        )
        return self._dense_layers(layer)

    def forward(self, x: Tensor) -> Tensor:
        """The output, [batch, out_channels, length] or [batch, out_channels, height, width].

        Args:
            x: [batch, in_channels, length] or [batch, in_channels, height, width], or without
                batch, in the dtype of the weight; under autocast, in any floating-point dtype.

        Raises:
            BadInput: the shape or dtype of x does not match, or x is smaller than one window.
            RuntimeError: x is too small for padding mode "reflect" or "circular".
        """
        return self._convolve(x, self.program)

    def _convolve(self, x: Tensor, program: str) -> Tensor:
        """The output of a program for x, with or without a batch axis."""
        unbatched = x.ndim == self.axes + 1
        if x.ndim - (not unbatched) != self.axes + 1 or x.shape[-self.axes - 1] != self.in_channels:
            sizes = ", ".join(("length",) if self.axes == 1 else ("height", "width"))
            expected = f"[batch, {self.in_channels}, {sizes}]"
            raise BadInput(f"expected x {expected}, got {tuple(x.shape)}")
        x = x.unsqueeze(0) if unbatched else x
        if self.padding_mode != "zeros":
            x = F.pad(x, [n for pair in reversed(self._pads) for n in pair], self.padding_mode)
        y = self._run_program(x, program)
        return y.squeeze(0) if unbatched else y

    def _layer_step(self) -> Conv:
        return self._conv_step(self.output_padding)

    def _conv_step(self, output_padding: Sequence[int]) -> Conv:
        """The step with this output_padding per axis."""
        weight, bias = self._weight_spans()
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
        return conv_step(0, weight, bias, self.rows, **fields)

    def _example_shape(self) -> tuple[int, ...]:
        return (1, self.in_channels, *[1] * self.axes)

    def extra_repr(self) -> str:
        """The text in parentheses in the layer's repr: channels and options other than defaults."""
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
    """A convolution layer like nn.Conv1d that stores and multiplies only the nonzero weights.

    It maps [batch, in_channels, length] to [batch, out_channels, output length], with or without
    batch. `from_dense` and `to_dense` convert from and to nn.Conv1d.

    Args:
        weight: floating-point matrix [out_channels, in_channels / groups * kernel_size],
            torch.sparse_csr or dense, copied: `weight.flatten(1)` of the nn.Conv1d.
        bias, activation: vector [out_channels] and function, as in `SparseLinear`; default None.
        kernel_size: window size in positions, 1 or more.
        stride: positions from one window to the next, 1 (default) or more.
        dilation: positions from one kernel element to the next, 1 (default) or more.
        padding: positions added per border, 0 (default) or more; "valid": 0; "same": as many as
            make the output as large as the input, for stride 1 only.
        groups: number of channel groups, a divisor of out_channels; default 1.
        padding_mode: values of the padding: "zeros" (default), "reflect", "replicate", "circular".
        output_padding: must be 0 (default); transposed convolutions use it.

    Attributes:
        values, crow, col, bias, density, weight_csr: as in `SparseLinear`.
        weight: dense weight [out_channels, in_channels / groups, kernel_size], differentiable.
        in_channels, out_channels: integers. The options are attributes, too, sizes as tuples.

    Raises:
        BadInput: an argument has another value, dtype or shape than listed above.
        TypeError: a size is neither an integer nor a sequence.

    Example:
        >>> import torch
        >>> from demask.sparse import SparseConv1d
        >>> difference = SparseConv1d(torch.tensor([[-1.0, 0.0, 1.0]]), kernel_size=3)
        >>> difference(torch.tensor([[[0.0, 1.0, 4.0, 9.0]]])).detach()
        tensor([[[4., 8.]]])
    """

    kind, axes, torch_type = "signal", 1, nn.Conv1d


class SparseConv2d(SparseConv):
    """A convolution layer like nn.Conv2d that stores and multiplies only the nonzero weights.

    It maps [batch, in_channels, height, width] to [batch, out_channels, output height, output
    width], with or without batch. `from_dense` and `to_dense` convert from and to nn.Conv2d.

    Args:
        weight: floating-point matrix [out_channels, in_channels / groups * kernel height * kernel
            width], torch.sparse_csr or dense, copied: `weight.flatten(1)` of the nn.Conv2d.
        bias: floating-point vector [out_channels], copied; default None, no bias.
        activation: "relu" or another name or module that `SparseLinear` lists; default None.
        kernel_size: window size in positions, 1 or more. Sizes are one integer or (height, width).
        stride: positions from one window to the next, 1 (default) or more.
        dilation: positions from one kernel element to the next, 1 (default) or more.
        padding: positions added per border, 0 (default) or more; "valid": 0; "same": as many as
            make the output as large as the input, for stride 1 only.
        groups: number of channel groups, a divisor of out_channels; default 1.
        padding_mode: values of the padding: "zeros" (default), "reflect", "replicate", "circular".
        output_padding: must be 0 (default); transposed convolutions use it.

    Attributes:
        values: stored weights, a parameter [number of stored weights].
        crow, col: int32 buffers, row starts [out_channels + 1] and columns of `values`, as in CSR.
        bias, density: parameter [out_channels] or None; share of weights that are stored, 0 to 1.
        weight, weight_csr: dense, of nn.Conv2d's shape; a torch.sparse_csr matrix; differentiable.
        in_channels, out_channels: integers. The options are attributes, too, sizes as tuples.

    Raises:
        BadInput: an argument has another value, dtype or shape than listed above.
        TypeError: a size is neither an integer nor a sequence.
        RuntimeError: `bias` is not floating-point.

    Example:
        >>> import torch
        >>> from demask.sparse import SparseConv2d
        >>> dense = torch.nn.Conv2d(8, 16, 3, padding=1)
        >>> _ = dense.weight.data[:, 2:].zero_()  # three quarters
        >>> layer, x = SparseConv2d.from_dense(dense), torch.randn(1, 8, 10, 10)
        >>> layer.density, torch.allclose(layer(x), dense(x), atol=1e-5)
        (0.25, True)
    """

    kind, axes, torch_type = "image", 2, nn.Conv2d


class SparseConvTranspose(SparseConv):
    """Base class of sparse transposed convolutions."""

    transposed = True

    def forward(self, x: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """The output, [batch, out_channels, length] or [batch, out_channels, height, width].

        Args:
            x: [batch, in_channels, length] or [batch, in_channels, height, width], or without
                batch, in the dtype of the weight; under autocast, in any floating-point dtype.
            output_size: sizes of the output's last axes, instead of `output_padding`; at most
                `stride` - 1 above the smallest size. Default None, the sizes by `output_padding`.

        Raises:
            BadInput: the shape or dtype of x does not match, or `output_size` is not possible.
        """
        if output_size is None:
            return self._convolve(x, self.program)
        step = self._conv_step(self._missing_padding(x, output_size))
        return self._convolve(x, SegmentProgram((self.kind,), (step,), (1,)).text())

    def _missing_padding(self, x: Tensor, output_size: Sequence[int]) -> list[int]:
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
    """A transposed convolution like nn.ConvTranspose1d that computes with the nonzero weights only.

    It maps [batch, in_channels, length] to [batch, out_channels, output length], with or without
    batch. `from_dense` and `to_dense` convert from and to nn.ConvTranspose1d.

    Args:
        weight: floating-point matrix [out_channels, in_channels / groups * kernel_size],
            torch.sparse_csr or dense, copied. Row i has the weights of output channel i: with one
            group `weight.transpose(0, 1).flatten(1)` of the nn.ConvTranspose1d, with G groups
            `weight.unflatten(0, (G, -1)).transpose(1, 2).flatten(0, 1).flatten(1)`.
        bias, activation: vector [out_channels] and function, as in `SparseLinear`; default None.
        kernel_size: window size in positions, 1 or more.
        stride: output positions from one window to the next, 1 (default) or more.
        dilation: output positions from one kernel element to the next, 1 (default) or more.
        padding: positions removed at each border of the output, 0 (default) or more.
        groups: number of channel groups, a divisor of out_channels; default 1.
        output_padding: positions added after the output, 0 (default) to max(stride, dilation) - 1.
        padding_mode: must be "zeros", the default.

    Attributes:
        values, crow, col, bias, density, weight_csr: as in `SparseLinear`.
        weight: dense weight [in_channels, out_channels / groups, kernel_size], differentiable.
        in_channels, out_channels: integers. The options are attributes, too, sizes as tuples.

    Raises:
        BadInput, TypeError: under the conditions of `SparseConv1d`.

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
    """A transposed convolution like nn.ConvTranspose2d that computes with the nonzero weights only.

    It maps [batch, in_channels, height, width] to [batch, out_channels, output height, output
    width]; batch is optional. `from_dense` and `to_dense` convert from and to nn.ConvTranspose2d.

    Args:
        weight: floating-point matrix [out_channels, in_channels / groups * kernel height * kernel
            width], torch.sparse_csr or dense, copied; in the order of `SparseConvTranspose1d`.
        bias: floating-point vector [out_channels], copied; default None, no bias.
        activation: "relu" or another name or module that `SparseLinear` lists; default None.
        kernel_size: window size in positions, 1 or more. Sizes are one integer or (height, width).
        stride: output positions from one window to the next, 1 (default) or more.
        dilation: output positions from one kernel element to the next, 1 (default) or more.
        padding: positions removed at each border of the output, 0 (default) or more.
        groups: number of channel groups, a divisor of out_channels; default 1.
        output_padding: positions added after each axis, 0 (default) to max(stride, dilation) - 1.
        padding_mode: must be "zeros", the default.

    Attributes:
        values, crow, col, bias, density: as in `SparseConv2d`.
        weight, weight_csr: dense, of nn.ConvTranspose2d's shape; as the argument; differentiable.
        in_channels, out_channels: integers. The options are attributes, too, sizes as tuples.

    Raises:
        BadInput: an argument has another value, dtype or shape than listed above.
        TypeError, RuntimeError: a size is no integer or sequence; `bias` is not floating-point.

    Example:
        >>> import torch
        >>> from demask.sparse import SparseConvTranspose2d
        >>> dense, x = torch.nn.ConvTranspose2d(2, 3, 2, stride=2), torch.randn(1, 2, 5, 5)
        >>> layer = SparseConvTranspose2d.from_dense(dense)
        >>> torch.allclose(layer(x), dense(x), atol=1e-6), tuple(layer(x).shape)
        (True, (1, 3, 10, 10))
    """

    kind, axes, torch_type = "image", 2, nn.ConvTranspose2d
