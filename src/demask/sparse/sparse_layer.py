"""The base class of sparse layers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demask.errors import BadInput
from demask.ops.activations import ActivationLike, act_of, activation_module
from demask.sparse import reference as dense
from demask.sparse.segment.segment_op import segment
from demask.sparse.segment_program import SegmentProgram
from demask.sparse.segment_steps import MAX_SIZE, ConvStep, LinearStep, Span, SparseWeight


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

    def _step(self) -> LinearStep | ConvStep:
        """The layer as a step of a program."""
        raise NotImplementedError

    def _shape(self) -> tuple[int, ...]:
        """An example input shape."""
        raise NotImplementedError

    def _spans(self) -> tuple[SparseWeight, Span | None]:
        """Spans of weight and bias in `_weights`."""
        n = self.values.numel()
        bias = None if self.bias is None else (3, 0, self.rows)
        return SparseWeight((0, 0, n), (1, 0, self.rows + 1), (2, 0, n)), bias

    def _weights(self) -> list[Tensor]:
        """The tensors that the program reads."""
        tensors = [self.values, self.crow, self.col]
        return tensors if self.bias is None else [*tensors, self.bias]

    def _set_program(self) -> None:
        """Set the text of the program that computes this layer."""
        self.program = SegmentProgram((self.kind,), (self._step(),), (1,)).text()

    def _run(self, x: Tensor, program: str) -> Tensor:
        """The output of a program for one input."""
        if x.dtype != self.values.dtype:
            if not (x.is_floating_point() and torch.is_autocast_enabled(x.device.type)):
                raise BadInput(f"expected an input of {self.values.dtype}, got {x.dtype}")
            x = x.to(self.values.dtype)
        return segment([x], self._weights(), program)[0]

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
        return dense.weight(self._step(), self._weights(), self._shape())

    @property
    def weight_csr(self) -> Tensor:
        """The weight matrix [rows, columns] as torch.sparse_csr, sharing memory; differentiable."""
        size = self.rows, self.columns
        return torch.sparse_csr_tensor(self.crow, self.col, self.values, size, check_invariants=False)

    def _dense(self, layer: nn.Module) -> nn.Module:
        """A torch layer with these weights, in a Sequential if there is an activation."""
        with torch.no_grad():
            layer.get_parameter("weight").copy_(self.weight)
            if self.bias is not None:
                layer.get_parameter("bias").copy_(self.bias)
        module = layer if self.act is None else nn.Sequential(layer, activation_module(self.act))
        return module.train(self.training)

    def _options(self) -> dict[str, Any]:
        """Arguments of the equivalent torch layer."""
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
