"""Checks of the arguments of `explain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.failures import described
from demask.numerics import is_number


def check_arguments(model: Any, loss: Any, candidates: Any) -> None:
    """Raise BadInput for arguments of `explain` that cannot be used."""
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"expected an nn.Module as model, got {type(model).__name__}; of an ExportedProgram pass its module()"
        )
    if not is_number(loss) or not 0 <= loss <= 1:
        raise BadInput(f"expected a loss of 0 to 1, as a share of inputs, got {loss!r}")
    pairs = candidates if isinstance(candidates, Sequence) else [candidates]
    for pair in pairs:
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise BadInput(
                "expected pairs of texts (pilot, condition) as candidates, such as "
                f"('bits:8', 'skip:0.5'), got {pair!r:.60}"
            )


def check_inputs(model: nn.Module, inputs: Sequence[tuple[Any, ...]]) -> None:
    """Raise BadInput unless each input fits the model and its first output has answers."""
    for k, args in enumerate(inputs):
        try:
            leaves = pytree.tree_leaves(model(*args))
        except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
            raise BadInput(
                f"input {k} does not fit the model: {described(error)}; inputs are "
                "one tensor or tuple of arguments for each call"
            ) from error
        if not leaves or not isinstance(leaves[0], Tensor) or leaves[0].ndim == 0:
            raise BadInput(
                "expected a tensor with an axis of answers as the first output, got "
                f"{leaves[0] if leaves else 'none'!r:.40}"
            )
