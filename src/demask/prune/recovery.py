"""What gets accuracy back after slices were masked: norm statistics and a teacher's logits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demask.errors import BadInput
from demask.failures import public

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@public
def recalibrate_norms(model: nn.Module, batches: Iterable[Any]) -> int:
    """Recompute the running statistics of all batch norms, in place.

    Statistics of a network are off once its channels are masked. Each becomes the mean over the
    batches of that batch's mean and (unbiased) variance: PyTorch's cumulative average, which weighs
    all batches alike. Only norms are in train mode meanwhile, so dropout is off; no gradient is
    computed. Modes and momenta are restored. Norms without running statistics are left alone.

    Args:
        model: the network; its weights do not change.
        batches: inputs, one call each: a tensor, a tuple of arguments, or a mapping of keywords. Of
            a loader of (images, labels): `(images for images, _ in loader)`.

    Returns:
        The number of batches, an int.

    Raises:
        BadInput: no batches, or the model does not run on one; the statistics are then unchanged.

    Example:
        >>> import torch
        >>> from demask import prune
        >>> norm = torch.nn.BatchNorm1d(2).eval()
        >>> prune.recalibrate_norms(norm, [torch.tensor([[1.0, 0], [3, 0]])])
        1
        >>> norm.running_mean, norm.training
        (tensor([2., 0.]), False)
    """
    if isinstance(batches, (Tensor, Mapping)):
        raise BadInput(
            "expected batches to be a list or another iterable of inputs, got one "
            f"{type(batches).__name__}: pass [batch]"
        )
    norms = [m for m in model.modules() if isinstance(m, NORMS) and m.running_mean is not None]
    before = [{name: getattr(norm, name).clone() for name in STATISTICS} for norm in norms]
    count = 0
    try:
        with _cumulative_norms(model, norms), torch.no_grad():
            for batch in batches:
                _call_model(model, batch, count)
                count += 1
        if not count:
            raise BadInput(
                "expected one batch or more, got none: a loader that was read to its end is empty, make a new one"
            )
    except BaseException:
        for norm, statistics in zip(norms, before, strict=True):
            for name, values in statistics.items():
                getattr(norm, name).copy_(values)
        raise
    return count


def _call_model(model: nn.Module, batch: Any, number: int) -> None:
    try:
        if isinstance(batch, Mapping):
            model(**batch)
        else:
            model(*batch if isinstance(batch, (tuple, list)) else (batch,))
    except (RuntimeError, TypeError, ValueError) as error:
        raise BadInput(
            f"the model does not run on batch {number} ({error}): expected a tensor, a tuple of "
            "arguments or a mapping of keywords, without labels"
        ) from error


@contextmanager
def _cumulative_norms(model: nn.Module, norms: Sequence[Any]) -> Iterator[None]:
    """All in eval mode but the norms, which start to average anew; modes and momenta restored."""
    modes = [(module, module.training) for module in model.modules()]
    momenta = [norm.momentum for norm in norms]
    try:
        model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.train()
            norm.momentum = None  # torch: a cumulative moving average
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, mode in modes:
            module.training = mode


@public
def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    temperature: float = 4.0,
    *,
    targets: Tensor | None = None,
    hard_share: float = 0.1,
    ignore_index: int = -100,
) -> Tensor:
    """How far a student's logits are from its teacher's, a scalar tensor.

    T² · KL(softmax(teacher / T) ‖ softmax(student / T)), the mean over all positions: Hinton,
    Vinyals & Dean 2015, "Distilling the knowledge in a neural network", section 2. The factor T²
    makes gradients as large for every temperature. The teacher gets no gradient.

    Args:
        student_logits, teacher_logits: floating point, [..., classes], of the same shape.
        temperature: T, above 0. Default: 4.
        targets: labels, integers [...]. Default: None, for the teacher alone.
        hard_share: with targets, the weight of cross-entropy with them; the other loss has the rest
            of 1. Default: 0.1.
        ignore_index: positions with this target count for neither loss. Default: -100.

    Raises:
        BadInput: shapes that differ, a temperature of 0 or less, or a share outside of 0 to 1.

    Example:
        >>> import torch
        >>> from demask import prune
        >>> logits = torch.tensor([[1.0, 2.0]])
        >>> prune.distillation_loss(logits, logits).item()
        0.0
    """
    if student_logits.shape != teacher_logits.shape:
        raise BadInput(
            f"expected logits of the same shape, got {tuple(student_logits.shape)} of "
            f"the student, {tuple(teacher_logits.shape)} of the teacher"
        )
    if not temperature > 0 or not 0 <= hard_share <= 1:
        raise BadInput(
            f"expected temperature above 0 and hard_share from 0 to 1, got {temperature!r} and {hard_share!r}"
        )
    student, teacher = (x.reshape(-1, x.shape[-1]) for x in (student_logits, teacher_logits))
    labels = None
    if targets is not None:
        if targets.shape != student_logits.shape[:-1]:
            raise BadInput(
                f"expected targets of shape {tuple(student_logits.shape[:-1])}, one for "
                f"each position, got {tuple(targets.shape)}"
            )
        counted = targets.reshape(-1) != ignore_index
        labels, student, teacher = targets.reshape(-1)[counted], student[counted], teacher[counted]
    goal = F.log_softmax(teacher.detach() / temperature, -1)
    guess = F.log_softmax(student / temperature, -1)
    soft = F.kl_div(guess, goal, reduction="batchmean", log_target=True) * temperature**2
    if labels is None:
        return soft
    return (1 - hard_share) * soft + hard_share * F.cross_entropy(student, labels)
