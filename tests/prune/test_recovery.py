"""Norm statistics that are recomputed, and the loss of distillation."""

import math

import pytest
import torch
from torch import nn

from demask.errors import BadInput
from demask.prune.recovery import distillation_loss, recalibrate_norms


class Network(nn.Module):
    """Two norms with other settings each, one of them without statistics, and dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 5, 3)
        self.first = nn.BatchNorm2d(5, momentum=0.3)
        self.drop = nn.Dropout(0.5)
        self.untracked = nn.BatchNorm2d(5, track_running_stats=False)
        self.second = nn.BatchNorm1d(5)

    def forward(self, x, scale=1.0):
        x = self.untracked(self.drop(self.first(self.conv(x) * scale)))
        return self.second(x.mean((2, 3)))


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_statistics_are_the_mean_over_the_batches():
    model = Network().train()
    model.second.eval()
    model.first.running_mean.fill_(100)
    batches = [torch.randn(n, 3, 6, 7) for n in (4, 2, 8)]
    before = state(model)
    assert recalibrate_norms(model, iter(batches)) == 3
    with torch.no_grad():
        outputs = [model.conv(x) for x in batches]
        mean = torch.stack([y.mean((0, 2, 3)) for y in outputs]).mean(0)
        variance = torch.stack([y.var((0, 2, 3)) for y in outputs]).mean(0)
    torch.testing.assert_close(model.first.running_mean, mean)
    torch.testing.assert_close(model.first.running_var, variance)
    assert model.first.num_batches_tracked == model.second.num_batches_tracked == 3
    assert (model.first.momentum, model.second.momentum) == (0.3, 0.1)
    assert [m.training for m in (model, model.first, model.drop, model.second)] == [True, True, True, False]
    unchanged = [name for name in before if "running" not in name and "num_" not in name]
    assert all(torch.equal(before[name], model.state_dict()[name]) for name in unchanged)
    assert not model.first.running_mean.requires_grad


def test_dropout_is_off_so_the_order_of_draws_does_not_matter():
    batches = [torch.randn(8, 3, 6, 6)]
    models = [Network().train(), Network().eval()]
    for seed, model in enumerate(models):
        torch.manual_seed(seed)
        recalibrate_norms(model, batches)
    torch.testing.assert_close(models[0].second.running_var, models[1].second.running_var)


def test_batches_are_tensors_tuples_or_mappings():
    x = torch.randn(4, 3, 6, 6)
    kinds = [x * 2, (x, 2.0), {"x": x, "scale": 2.0}]
    means = []
    for batch in kinds:
        model = Network()
        recalibrate_norms(model, [batch])
        means.append(model.second.running_mean)
    # The scale is applied after the convolution, which has a bias: the first differs from it.
    torch.testing.assert_close(means[1], means[2])


@pytest.mark.parametrize("batches", [[], [torch.ones(4, 3, 6, 6), torch.ones(4, 7)], [{"y": 1}]])
def test_a_failure_changes_nothing(batches):
    model = Network().train()
    before = state(model)
    with pytest.raises(BadInput, match=r"one batch or more|does not run on batch"):
        recalibrate_norms(model, batches)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert model.first.momentum == 0.3 and model.drop.training


def test_the_loss_is_that_of_the_paper():
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True), None
    teacher = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    heat = 2.5
    p, q = (torch.softmax(x / heat, -1) for x in (teacher, student))
    wanted = heat**2 * (p * (p / q).log()).sum(-1).mean()
    loss = distillation_loss(student, teacher, heat)
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    assert teacher.grad is None
    # Section 2: the gradient is T (q - p) / N; in the limit of a high temperature it no longer
    # depends on it, (z - v) / (N classes) of logits with mean 0.
    torch.testing.assert_close(student.grad, (heat * (q - p) / 6).detach())
    student.grad = None
    distillation_loss(student, teacher, 1e5).backward()
    centred = [x - x.mean(-1, keepdim=True) for x in (student, teacher)]
    torch.testing.assert_close(student.grad, ((centred[0] - centred[1]) / 30).detach(), rtol=1e-3, atol=1e-6)


def test_targets_are_mixed_in_and_ignored_positions_count_nowhere():
    torch.manual_seed(0)
    student, teacher = torch.randn(4, 3), torch.randn(4, 3)
    targets = torch.tensor([0, -100, 2, 1])
    kept = [0, 2, 3]
    soft = distillation_loss(student[kept], teacher[kept], 2.0)
    hard = nn.functional.cross_entropy(student, targets)
    mixed = distillation_loss(student, teacher, 2.0, targets=targets, hard_share=0.25)
    torch.testing.assert_close(mixed, 0.75 * soft + 0.25 * hard)


def test_bad_arguments_of_the_loss():
    x = torch.ones(2, 3)
    for call, complaint in (
        (lambda: distillation_loss(x, torch.ones(3, 2)), "same shape"),
        (lambda: distillation_loss(x, x, 0), "temperature above 0"),
        (lambda: distillation_loss(x, x, math.nan), "temperature above 0"),
        (lambda: distillation_loss(x, x, hard_share=2), "from 0 to 1"),
        (lambda: distillation_loss(x, x, targets=torch.zeros(3).long()), "one for each position"),
    ):
        with pytest.raises(BadInput, match=complaint):
            call()
