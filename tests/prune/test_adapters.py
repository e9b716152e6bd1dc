"""The callbacks of training engines: what they prune and when, checkpoints, the small network."""

import contextlib
import warnings

import pytest
import torch
from torch import nn

import architectures
import demask
import networks
from demask import prune
from demask.errors import BadInput
from demask.prune.adapters import ScheduledPruner

ROUNDS = 3
STEPS = 12  # of training: pruned before updates 2, 5 and 8
TIMES = {"start": 2, "every": 3, "rounds": ROUNDS}
LEFT = [{"0": 6, "2": 5}, {"0": 5, "2": 4}, {"0": 4, "2": 4}]


class Classifier(nn.Module):
    """Takes what transformers' Trainer passes, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        if labels is None:
            return logits
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


X = torch.randn(96, 4, generator=torch.Generator().manual_seed(2))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


def new_pruner(model, score=None):
    schedule = prune.Iterative(ROUNDS, fraction=0.5)
    return prune.Pruner(model, (X[:2],), score=score or prune.L1(), schedule=schedule)


def left_of(callback):
    return [sum(pruned.left.values()) for pruned in callback.history]


# -- what they share ------------------------------------------------------------------------------


def test_steps_are_taken_when_they_are_due():
    model = Classifier()
    order = [name.removesuffix("_orig") for name, _ in model.named_parameters()]
    scheduled = ScheduledPruner(new_pruner(model), **TIMES)
    masked = [name.removesuffix("_orig") for name, _ in model.named_parameters()]
    assert sorted(order) == sorted(masked)
    taken = [k for k in range(STEPS) if scheduled.before_update(k) is not None]
    assert taken == [2, 5, 8]
    assert masked == [name.removesuffix("_orig") for name, _ in model.named_parameters()]
    assert [pruned.step for pruned in scheduled.history] == [1, 2, 3]


def test_ones_change_no_output():
    model = Classifier()
    before = model(X).detach()
    ScheduledPruner(new_pruner(model), 0, 1, 1)
    assert torch.equal(model(X), before)


@pytest.mark.parametrize("times", [(-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_bad_times(times):
    with pytest.raises(BadInput, match="expected start of 0 or more"):
        ScheduledPruner(new_pruner(Classifier()), *times)


def check_slim(model, slim, optimizer):
    """The small network computes what the masked one does, and its optimizer goes on."""
    assert sum(p.numel() for p in slim.parameters()) < sum(p.numel() for p in model.parameters())
    demask.verify(model, slim, (X[:2],))
    mine = {id(p) for p in slim.parameters()}
    assert mine == {id(p) for group in optimizer.param_groups for p in group["params"]}
    states = [optimizer.state[p] for p in slim.parameters()]
    assert all(
        state["exp_avg"].shape == p.shape and state["step"] > 0
        for p, state in zip(slim.parameters(), states, strict=True)
    )


# -- Lightning ------------------------------------------------------------------------------------


def lightning_parts():
    with contextlib.suppress(ImportError):
        networks.torchvision()  # which torchmetrics imports
    pytest.importorskip("lightning", reason="lightning is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning.pytorch as pl
        from lightning.pytorch.callbacks import ModelCheckpoint

        from demask.prune.adapters.lightning import PruneCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Classifier()

        def training_step(self, batch, number):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    return pl, ModelCheckpoint, PruneCallback, Module


def fit(tmp_path, steps, callback_options=None, ckpt_path=None, score=None, checkpoint_at=None):
    pl, checkpoint, prune_callback, module_class = lightning_parts()
    module = module_class()
    callback = prune_callback(new_pruner(module.net, score), **TIMES, **(callback_options or {}))
    more = []
    if checkpoint_at:
        more = [checkpoint(tmp_path, "at", every_n_train_steps=checkpoint_at, save_top_k=1)]
    rows = torch.utils.data.TensorDataset(X[:48], Y[:48])  # an epoch ends where checkpoints are
    data = torch.utils.data.DataLoader(rows, batch_size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of loaders with few workers, and of versions
        trainer = pl.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=bool(more),
            callbacks=[callback, *more],
            default_root_dir=tmp_path,
        )
        trainer.fit(module, data, ckpt_path=ckpt_path)
    return module, callback, trainer


def test_lightning_prunes_by_schedule_and_demasks_at_the_end(tmp_path):
    module, callback, trainer = fit(tmp_path, STEPS, {"demask_with": (X[:2],)}, score=prune.Taylor())
    assert left_of(callback) == [14, 12, 8]
    assert trainer.callback_metrics["pruned_macs"] == callback.history[-1].after.macs
    [optimizer] = trainer.optimizers
    check_slim(module.net, callback.slim, optimizer)


def test_lightning_goes_on_from_a_checkpoint(tmp_path):
    whole, callback, _ = fit(tmp_path / "whole", STEPS)
    fit(tmp_path, 6, checkpoint_at=6)
    module, resumed, _ = fit(tmp_path, STEPS, ckpt_path=tmp_path / "at.ckpt")
    assert left_of(resumed) == left_of(callback)[2:]
    assert [p.step for p in resumed.history] == [3]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, module.state_dict()[name]), name
    assert {n for n, _ in module.named_buffers()} == {n for n, _ in whole.named_buffers()}


# -- transformers ---------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, k):
        return {"x": X[k], "labels": Y[k]}


def train(tmp_path, steps, stop=None, resume=None, score=None, **options):
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    transformers = architectures.transformers()
    from demask.prune.adapters.transformers import PruneCallback

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop |= state.global_step == stop
            return control

    model = Classifier()
    callback = PruneCallback(new_pruner(model, score), **TIMES, resume=resume, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of versions of accelerate
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(
                output_dir=str(tmp_path),
                max_steps=steps,
                per_device_train_batch_size=8,
                learning_rate=1e-2,
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                save_steps=6,
                save_strategy="steps" if stop else "no",
                logging_strategy="no",
                dataloader_pin_memory=False,
                seed=0,
            ),
            train_dataset=Rows(),
            callbacks=[callback, Stop()],
        )
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return model, callback, trainer


def test_transformers_prunes_by_schedule_and_demasks_at_the_end(tmp_path):
    model, callback, trainer = train(tmp_path, STEPS, score=prune.Taylor(), demask_with=(X[:2],))
    assert left_of(callback) == [14, 12, 8]
    check_slim(model, callback.slim, getattr(trainer.optimizer, "optimizer", trainer.optimizer))


def test_transformers_goes_on_from_a_checkpoint(tmp_path):
    whole, callback, _ = train(tmp_path / "whole", STEPS)
    train(tmp_path, STEPS, stop=6)
    model, resumed, _ = train(tmp_path, STEPS, resume=tmp_path / "checkpoint-6")
    assert left_of(resumed) == left_of(callback)[2:]
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], msg=name)


def test_transformers_without_the_masks_of_a_checkpoint(tmp_path):
    with pytest.raises(BadInput, match=r"expected .*pruner\.pt"):
        train(tmp_path, 1, resume=tmp_path)
