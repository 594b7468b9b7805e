"""ZClipCallback in the Trainer of Transformers, against plain PyTorch on the batches that the Trainer drew."""

import itertools

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import zclip_ext
from zclip_ext.integrations.transformers import ZClipCallback

OPTIONS = {"warmup_steps": 5}
STEPS = 12


class Data(torch.utils.data.Dataset):
    """Of one epoch; a factor of each sample scales its loss."""

    def __init__(self, spikes=(), size=STEPS * 4):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, 6, generator=generator)
        self.factor = torch.ones(size)
        for place, factor in spikes:
            self.factor[place] = factor

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "factor": self.factor[index]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.seen = []

    def forward(self, x, factor):
        self.seen.append((x, factor))
        return {"loss": (self.layers(x).squeeze(-1).square() * factor).mean()}


class Watch(TrainerCallback):
    def __init__(self, zclip):
        self.zclip, self.norms, self.scales, self.weights, self.logs = zclip, [], [], [], []

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self.zclip.last is None:  # the Trainer has put another in its place
            return
        self.norms.append(float(self.zclip.last.grad_norm))
        self.scales.append(float(self.zclip.last.scale))
        self.weights.append([p.detach().clone() for p in model.parameters()])

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def trainer_of(folder, callback, *, spikes=(), **arguments):
    settings = {
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "max_steps": STEPS,
        "remove_unused_columns": False,
        **arguments,
    }
    watch = Watch(callback.zclip)
    return watch, Trainer(
        Net(), TrainingArguments(str(folder), **settings), train_dataset=Data(spikes), callbacks=[callback, watch]
    )


def plain(batches, accumulate=1):
    """The same steps without a Trainer."""
    net = Net()
    optimizer = zclip_ext.ZClipOptimizer(torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.0), **OPTIONS)
    norms, scales = [], []
    for start in range(0, len(batches), accumulate):
        optimizer.zero_grad()
        for batch in batches[start : start + accumulate]:
            (net(*batch)["loss"] / accumulate).backward()
        optimizer.step()
        norms.append(float(optimizer.zclip.last.grad_norm))
        scales.append(float(optimizer.zclip.last.scale))
    return norms, scales, [p.detach() for p in net.parameters()]


@pytest.fixture
def spiked(tmp_path):
    """Which sample the Trainer draws at its tenth step."""
    _, trainer = trainer_of(tmp_path / "first", ZClipCallback(**OPTIONS))
    trainer.train()
    x = trainer.model.seen[9][0][0]
    return int((trainer.train_dataset.x == x).all(-1).nonzero()[0])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_same_as_plain_torch(tmp_path, spiked, accumulate):
    callback = ZClipCallback(**OPTIONS)
    settings = {"gradient_accumulation_steps": accumulate, "max_steps": STEPS // accumulate}
    settings["per_device_train_batch_size"] = 4
    watch, trainer = trainer_of(tmp_path, callback, spikes=[(spiked, 400.0)], **settings)
    trainer.train()
    norms, scales, weights = plain(trainer.model.seen, accumulate)
    assert callback.zclip.metrics()["steps"] == STEPS // accumulate
    assert watch.norms == pytest.approx(norms, rel=1e-5)
    assert watch.scales == pytest.approx(scales, rel=1e-5)
    if accumulate == 1:
        assert [step for step, scale in enumerate(scales) if scale < 1] == [9]
    for mine, wanted in zip(watch.weights[-1], weights, strict=True):
        assert torch.allclose(mine, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("factor", "options"), [(float("nan"), {}), (400.0, {"on_spike": "skip"})])
def test_a_step_that_is_left_out_changes_nothing(tmp_path, spiked, factor, options):
    callback = ZClipCallback(**OPTIONS, **options)
    watch, trainer = trainer_of(tmp_path, callback, spikes=[(spiked, factor)])
    with pytest.warns(zclip_ext.ZClipWarning, match="left out a step"):
        trainer.train()
    moved = [any((a != b).any() for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(watch.weights)]
    assert moved == [step != 8 for step in range(STEPS - 1)]
    assert all(state["step"] == STEPS - 1 for state in trainer.optimizer.state.values())
    assert callback.zclip.metrics()["skipped"] == 1


@pytest.mark.parametrize("restores", [False, True])
def test_resumes_bit_for_bit(tmp_path, restores):
    whole = ZClipCallback(**OPTIONS)
    _, trainer = trainer_of(tmp_path, whole, save_strategy="steps", save_steps=4)
    trainer.train()
    for cut in (4, 8):  # within the warm-up, and behind it
        again = ZClipCallback(**OPTIONS)
        watch, trainer = trainer_of(tmp_path, again, restore_callback_states_from_checkpoint=restores)
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{cut}"))
        found = next(c for c in trainer.callback_handler.callbacks if isinstance(c, ZClipCallback))
        assert len(watch.norms) == (0 if restores else STEPS - cut)
        assert found.statistics == whole.statistics


def test_a_checkpoint_without_statistics_starts_afresh(tmp_path):
    _, trainer = trainer_of(tmp_path, ZClipCallback(), save_strategy="steps", save_steps=6)
    trainer.remove_callback(ZClipCallback)
    trainer.train()
    callback = ZClipCallback(**OPTIONS)
    _, trainer = trainer_of(tmp_path, callback)
    with pytest.warns(zclip_ext.ZClipWarning, match="start afresh"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert callback.zclip.metrics()["steps"] == STEPS - 6


def test_metrics_are_logged(tmp_path):
    watch, trainer = trainer_of(tmp_path, ZClipCallback(**OPTIONS))
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["zclip/grad_norm"] for entry in steps] == watch.norms
    assert [entry["grad_norm"] for entry in steps] == pytest.approx(watch.norms, rel=1e-5)  # the Trainer's own
    assert "zclip/scale" in watch.logs[0]


def test_reporters_see_metrics_of_a_callback_that_is_put_first(tmp_path):
    unused = ZClipCallback()
    watch, trainer = trainer_of(tmp_path, unused)
    trainer.remove_callback(ZClipCallback)
    watch.zclip = ZClipCallback.add_to(trainer, **OPTIONS).zclip
    trainer.callback_handler.callbacks.remove(watch)
    trainer.callback_handler.callbacks.insert(1, watch)  # where reporters stand
    trainer.train()
    assert all("zclip/grad_norm" in logs for logs in watch.logs if "loss" in logs)


def test_what_clips_twice_is_told(tmp_path):
    _, trainer = trainer_of(tmp_path, ZClipCallback(), max_grad_norm=1.0)
    with pytest.warns(zclip_ext.ZClipWarning, match="max_grad_norm=1 of TrainingArguments clips before ZClip"):
        trainer.train()
    _, trainer = trainer_of(tmp_path, ZClipCallback())
    trainer.add_callback(ZClipCallback())
    with pytest.raises(ValueError, match="got two of them"):
        trainer.train()
    _, trainer = trainer_of(tmp_path, ZClipCallback())
    wrapped = zclip_ext.ZClipOptimizer(torch.optim.AdamW(trainer.model.parameters()))
    trainer.optimizer, trainer.lr_scheduler = wrapped, torch.optim.lr_scheduler.ConstantLR(wrapped)
    with pytest.raises(ValueError, match="got a ZClipOptimizer beside it"):
        trainer.train()


def test_deepspeed_is_told_to_use_its_config(tmp_path):
    _, trainer = trainer_of(tmp_path, ZClipCallback())
    trainer.args.deepspeed = {"zero_optimization": {"stage": 1}}
    with pytest.raises(ValueError, match=r"zclip_ext\.integrations\.deepspeed"):
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)


def test_the_wrapper_goes_through_the_trainer(tmp_path, spiked):
    """Without a callback: an optimizer as any other, which keeps its statistics in its own state."""
    found = {}
    for title, cut in (("whole", None), ("resumed", 8)):
        watch, trainer = trainer_of(tmp_path, ZClipCallback(), save_strategy="steps", save_steps=8)
        trainer.remove_callback(ZClipCallback)
        optimizer = zclip_ext.ZClipOptimizer(torch.optim.AdamW(trainer.model.parameters(), lr=0.01), **OPTIONS)
        watch.zclip = optimizer.zclip
        trainer.optimizer = optimizer
        trainer.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        trainer.train(resume_from_checkpoint=None if cut is None else str(tmp_path / f"checkpoint-{cut}"))
        found[title] = optimizer.zclip.state_dict()
    assert found["whole"] == found["resumed"]
    assert found["whole"]["steps"] == STEPS
