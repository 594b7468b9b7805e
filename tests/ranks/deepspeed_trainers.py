"""Accelerate and Transformers under DeepSpeed: what each rank trains, and returns for the test to judge.

All is as their users write it, plus the import of the adapter and the "zclip" block. The process is one rank of a
launch, with the environment that a launcher sets; the arguments are a folder and the cases to run in order.
"""

import json
import signal
import sys
import traceback
import warnings
from pathlib import Path

import deepspeed.ops
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DummyOptim, DummyScheduler, InitProcessGroupKwargs
from common import bits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import zclip_ext.integrations.deepspeed  # noqa: F401
from zclip_ext import ZClipOptimizer, ZClipWarning

WORLD = 2
PER_RANK = 4
STEPS = 12
SAVED = 6
SPIKE, FACTOR = 8, 40.0
NAN = 10
LR = 0.01


def options(kinds):
    return {"warmup_steps": 5, "on_spike": "skip" if "skip" in kinds else "clip"}


def written(stage, *kinds):
    """The JSON, as open as users leave it."""
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": int(stage)},
        "zclip": {"enabled": True, **options(kinds)},
    }
    if "json" in kinds:  # torch's AdamW, since DeepSpeed's own is compiled; the rate stays LR
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
        warmup = {"warmup_min_lr": LR, "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
        config["scheduler"] = {"type": "WarmupLR", "params": warmup}
    return config


def factor(step, rank):
    """What is wrong with the loss of a step; NaN is one rank's alone."""
    if step == SPIKE:
        return FACTOR
    return float("nan") if step == NAN and rank == WORLD - 1 else 1.0


def decision(zclip):
    last = zclip.last
    numbers = {name: float(getattr(last, name)) for name in ("grad_norm", "scale")}
    return {**numbers, "is_spike": bool(last.is_spike), "left_out": bool(last.left_out)}


def outcome(engine):
    metrics = engine.zclip.metrics()
    return {
        "counts": {name: metrics[name] for name in ("steps", "samples", "skipped", "nonfinite")},
        "skipped_steps": engine.skipped_steps,
        "state": bits(engine.zclip),
    }


def weights_of(model):
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def samples(accumulate):
    """Inputs, targets and factors: step by step, in each the micro-batches in order, in each the ranks."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(STEPS * accumulate * WORLD * PER_RANK, width, generator=generator) for width in (8, 4))
    factors = [factor(step, rank) for step in range(STEPS) for _ in range(accumulate) for rank in range(WORLD)]
    return x, y, torch.tensor(factors).repeat_interleave(PER_RANK)


def loss_of(model, x, y, factors):
    return ((model(x) - y).square().mean(1) * factors).mean()


def unsharded(accumulate, kinds):
    """The same training in one process, by torch and ZClipOptimizer: its decisions and weights."""
    model = net(seed=0)
    optimizer = ZClipOptimizer(torch.optim.AdamW(model.parameters(), lr=LR), **options(kinds))
    decisions = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in zip(*(part.chunk(STEPS) for part in samples(accumulate)), strict=True):
            optimizer.zero_grad()
            loss_of(model, *batch).backward()
            optimizer.step()
            decisions.append(decision(optimizer.zclip))
    return decisions, weights_of(model)


def accelerated(config, folder, accumulate, *, dummies, resume=False):
    """The loop of Accelerate's documentation."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        gradient_accumulation_steps=accumulate,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],  # without a GPU Accelerate else counts one process
    )
    model = net(seed=1 if resume else 0)
    if dummies:
        optimizer = DummyOptim(model.parameters(), lr=LR, weight_decay=0.01)
        scheduler = DummyScheduler(optimizer)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    data = DataLoader(TensorDataset(*samples(accumulate)), batch_size=PER_RANK)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)

    report = {"processes": accelerator.num_processes, "steps": []}
    if resume:
        accelerator.load_state(folder)
        report["loaded"] = bits(model.zclip)
        data = accelerator.skip_first_batches(data, SAVED * accumulate)
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, *batch))
            if accelerator.sync_gradients:
                returned = accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            inner = scheduler.scheduler
            others = {
                "returned": returned,
                "skipped": accelerator.optimizer_step_was_skipped,
                "scheduled": inner.last_batch_iteration if dummies else inner.last_epoch,
            }
            report["steps"].append({**decision(model.zclip), **others})
            if not resume and len(report["steps"]) == SAVED:
                accelerator.save_state(folder)
                report["saved"] = bits(model.zclip)
    report.update(outcome(model))
    weights = weights_of(model.module)
    accelerator.free_memory()
    return report, weights


def accelerate(folder, stage, *kinds):
    """A run, its second half resumed by another model, and the run of the unsharded model."""
    accumulate = 2 if "accumulate" in kinds else 1
    folder = "-".join([f"{folder}/accelerate", stage, *kinds])
    config = written(stage, *kinds)
    if "json" in kinds:
        config = f"{folder}-{dist.get_rank()}.json"
        Path(config).write_text(json.dumps(written(stage, *kinds)))
    report, weights = accelerated(config, folder, accumulate, dummies="json" in kinds)
    resumed, resumed_weights = accelerated(config, folder, accumulate, dummies="json" in kinds, resume=True)
    decisions, expected = unsharded(accumulate, kinds)
    return {
        **report,
        "resumed": resumed,
        "same_weights": torch.equal(weights, resumed_weights),
        "expected": decisions,
        "worst_weight": (weights - expected).abs().max().item(),
    }


class Watch(TrainerCallback):
    """Reads what ZClip decided at each step of a Trainer."""

    def __init__(self):
        self.trainer, self.steps, self.saved = None, [], None

    def on_step_end(self, args, state, control, **kwargs):
        skipped = self.trainer.accelerator.optimizer_step_was_skipped
        self.steps.append({**decision(self.trainer.model_wrapped.zclip), "skipped": skipped})

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == SAVED:
            self.saved = bits(self.trainer.model_wrapped.zclip)

    def loss(self, outputs, labels, num_items_in_batch=None):
        loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss * factor(self.trainer.state.global_step, dist.get_rank())


def trained(config, folder, kinds, *, resume=False):
    accumulate = 2 if "accumulate" in kinds else 1
    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed=config,
        use_cpu=True,
        bf16="bf16" in kinds,
        max_steps=STEPS,
        per_device_train_batch_size=PER_RANK,
        gradient_accumulation_steps=accumulate,
        learning_rate=LR,
        save_steps=SAVED,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
    )
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(32, (STEPS * accumulate * WORLD * PER_RANK, 8), generator=generator)
    torch.manual_seed(1 if resume else 0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    watch = Watch()
    trainer = watch.trainer = Trainer(
        model=LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        compute_loss_func=watch.loss,
        callbacks=[watch],
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED}" if resume else None)
    engine = trainer.model_wrapped
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    report = {"steps": watch.steps, "saved": watch.saved, "logged": logged, **outcome(engine)}
    weights = weights_of(engine.module)
    trainer.accelerator.free_memory()
    return report, weights


def trainer(folder, stage, *kinds):
    """A run, and its second half resumed by another model."""
    folder = "-".join([f"{folder}/trainer", stage, *kinds])
    report, weights = trained(written(stage, *kinds), folder, kinds)
    resumed, resumed_weights = trained(written(stage, *kinds), folder, kinds, resume=True)
    return {**report, "resumed": resumed, "same_weights": torch.equal(weights, resumed_weights)}


def main():
    signal.alarm(300)  # so that it doesn't outlive a test that was itself killed
    folder, *names = sys.argv[1:]
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing is compiled
    for name in names:
        function, *arguments = name.split(":")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                report = {"accelerate": accelerate, "trainer": trainer}[function](folder, *arguments)
                report["warnings"] = [str(w.message) for w in caught if w.category is ZClipWarning]
            except BaseException:
                report = "error: " + traceback.format_exc(limit=-4)
        print("REPORT", json.dumps([name, report]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
