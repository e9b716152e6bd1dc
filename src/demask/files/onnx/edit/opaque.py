"""An op of which only the types and sizes of its outputs are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Dimension = int | tuple[int, int] | None  # a size; that of an axis (operand, axis); any


@dataclass(frozen=True, slots=True)
class OpaqueOutput:
    """An output: its dtype ("float32") and sizes."""

    dtype: str
    sizes: tuple[Dimension, ...]


# Nothing may run it ahead: not where all that it reads is stored, either.
@torch.library.custom_op("demask::opaque", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def opaque(operands: list[Tensor], dtypes: str, ranks: list[int], operand: list[int], axis: list[int]) -> list[Tensor]:
    """Stands in a program that is analyzed, never run, for a call that demask has no function for.

    Args:
        operands: all tensors that the call reads.
        dtypes: of the outputs, comma-separated. ranks: of each output.
        operand, axis: of each dimension of all outputs: an axis of an operand; (-1, n) for a fixed
            size n; (-2, 0) for a size that depends on data.
    """
    return _outputs(operands, dtypes, ranks, operand, axis, lambda: 1)


@opaque.register_fake
def _(operands: list[Tensor], dtypes: str, ranks: list[int], operand: list[int], axis: list[int]) -> list[Tensor]:
    context = torch.library.get_ctx()
    return _outputs(operands, dtypes, ranks, operand, axis, context.new_dynamic_size)


def _outputs(operands, dtypes, ranks, operand, axis, new_size) -> list[Tensor]:
    def size(k: int, at: int):
        return operands[k].shape[at] if k >= 0 else at if k == -1 else new_size()

    sizes, outputs = iter(zip(operand, axis, strict=True)), []
    for dtype, rank in zip(dtypes.split(","), ranks, strict=True):
        shape = [size(*next(sizes)) for _ in range(rank)]
        outputs.append(torch.zeros(shape, dtype=getattr(torch, dtype)))
    return outputs


def opaque_call(operands: Sequence[Tensor], outputs: Sequence[OpaqueOutput]) -> list[Tensor]:
    """The outputs of a call."""
    pairs = [(-2, 0) if n is None else (-1, n) if isinstance(n, int) else n for output in outputs for n in output.sizes]
    return torch.ops.demask.opaque(
        list(operands),
        ",".join(o.dtype for o in outputs),
        [len(o.sizes) for o in outputs],
        [k for k, _ in pairs],
        [at for _, at in pairs],
    )
