"""What each rank does in the cases of DeepSpeed."""

import itertools
import logging
import os
import warnings

import deepspeed
import layouts
import torch
import torch.distributed as dist
from common import bits, error_of
from deepspeed.utils import logger
from deepspeed_paths import FP16, NOT_FINITE, OPTIONS, PATHS, SPIKES, STEPS, Reference, dtype_of, loss_of
from deepspeed_run import Run

import zclip_ext
import zclip_ext.integrations.deepspeed as adapter


def largest_difference(weights, wanted):
    return max((weights[name] - wanted[name]).abs().max().item() for name in weights)


def deepspeed_path(name, folder):
    """Trains, with spikes and a gradient that isn't finite; saves from within a spike's step; resumes."""
    folder = os.path.join(folder, name.replace(", ", "-").replace(" ", "_"))
    spike = min(SPIKES)
    block = {"enabled": True, **OPTIONS}
    first = Run(name, block)
    reference = Reference(name)
    differences = []
    for step in range(STEPS):
        if step == spike:
            first.scheduler.then = lambda: first.engine.save_checkpoint(folder, tag="in_step")
        first.step(step)
        first.scheduler.then = None
        reference.step(step, *first.loss_scales[-1])
        differences.append(largest_difference(first.weights(), reference.weights()))
        if step == spike:
            first.engine.save_checkpoint(folder, tag="after", client_state={"mine": 7})
    metrics = first.engine.zclip.metrics()
    report = {
        "kind": type(first.engine.optimizer).__name__,
        "difference": max(differences),
        "norms": first.norms,
        "reference_norms": reference.norms,
        "scales": first.scales,
        "reference_scales": reference.scales,
        "says_norm": first.says_norm,
        "steps": metrics["steps"],
        "nonfinite": metrics["nonfinite"],
        "global_steps": first.engine.global_steps,
        "skipped_steps": first.engine.skipped_steps,
        "scheduled": first.scheduler.last_epoch,
        "loss_scales": first.loss_scales,
        "bits": bits(first.engine.zclip),
        "clip_grad": getattr(first.engine.optimizer, "clip_grad", None),
        "saved_clip_grads": saved_clip_grads(os.path.join(folder, "in_step")),
    }
    second = Run(name, block)
    try:
        _, client_state = second.engine.load_checkpoint(folder, tag="after")
    except KeyError:
        report["resume"] = "DeepSpeed can't load its checkpoint"
    else:
        for step in range(spike + 1, STEPS):
            second.step(step)
        report |= {
            "resume": "loaded",
            "client_state": sorted(key for key in client_state if key in ("mine", "zclip_ext")),
            "resumed_bits": bits(second.engine.zclip),
            "resumed_difference": largest_difference(first.weights(), second.weights()),
        }
    first.close()
    second.close()
    return report


def saved_clip_grads(folder):
    def found(saved):
        for key, value in saved.items():
            if key == "clip_grad":
                yield value
            elif isinstance(value, dict):
                yield from found(value)

    files = [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".pt")]
    return sorted({value for file in files for value in found(torch.load(file, weights_only=False))})


def trained(name, zclip, steps=4, **more):
    """A run whose third step is a spike."""
    run = Run(name, zclip, **more)
    for step in (0, 1, 8, 3)[:steps]:
        run.step(step)
    return run


def weight_bits(run):
    return {name: value.double().sum().item().hex() for name, value in run.weights().items()}


def weight_bits_after(*arguments):
    run = trained(*arguments)
    found = weight_bits(run)
    run.close()
    return found


def error_of_step(run, step, kind=RuntimeError):
    return error_of(lambda: run.step(step), kind)


def deepspeed_untouched(name):
    """Weights with the hook in place but nothing to do, and without the hook; and with the block, which must differ."""
    report = {"no block": weight_bits_after(name, None), "off": weight_bits_after(name, {"enabled": False})}
    report["dry run"] = weight_bits_after(name, {"dry_run": True, "warmup_steps": 2})
    adapter.disable()
    report["disabled"] = weight_bits_after(name, {"enabled": True})
    adapter.enable()
    adapter.enable()
    report["on"] = weight_bits_after(name, {"warmup_steps": 2})
    return report


def deepspeed_dry_run(name):
    run = trained(name, {"dry_run": True, "warmup_steps": 2})
    metrics = run.engine.zclip.metrics()
    run.close()
    return [metrics["steps"], metrics["spikes"], run.scales]


def deepspeed_p73(name):
    """DeepSpeed's -1 for a norm that isn't finite, as the clip's own argument."""
    run = trained(name, {"warmup_steps": 2})
    optimizer, zclip = run.engine.optimizer, run.engine.zclip
    before = zclip.metrics()
    grad = torch.ones(4)
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        flat = optimizer.fp32_partitioned_groups_flat[0]
        flat.grad = torch.ones_like(flat)
        target, grad = 0, flat.grad
    else:
        target = [grad]
    optimizer.step = lambda: optimizer.unscale_and_clip_grads(target, torch.tensor(-1.0))
    run.engine._take_model_step(None)
    after = zclip.metrics()
    del optimizer.step
    report = {
        "changed": sorted(key for key in after if after[key] != before[key] and after[key] == after[key]),
        "overflow": optimizer.overflow,
        "sign": [grad.min().item() > 0, grad.max().item() < 2],
        "skipped_steps": run.engine.skipped_steps,
    }
    run.close()
    return report


def deepspeed_p74(name):
    """The plain API on parameters whose gradients ZeRO keeps to itself."""
    run = Run(name)
    run.step(0)
    batch = layouts.my_part(layouts.whole_batch(1)).to(dtype_of(name))
    run.engine.backward(loss_of(run.engine, batch, 1, 0))
    said = error_of(lambda: zclip_ext.ZClip().step(run.engine.module))
    run.close()
    return said


def deepspeed_p75(name):
    """Usual norms far above 1, where DeepSpeed's default limit of 1.0 would scale each step."""
    report = {}
    for title, zclip, more in (
        ("default", {"warmup_steps": 2}, {"gradient_clipping": None}),
        ("written", {"warmup_steps": 2}, {"gradient_clipping": 5.0}),
        ("zero", {"warmup_steps": 2}, {"gradient_clipping": 0.0}),
        ("capped", {"warmup_steps": 2, "max_grad_norm": 0.01}, {}),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", zclip_ext.ZClipWarning)
            run = Run(name, zclip, **more)
            said = [str(w.message) for w in caught if w.category is zclip_ext.ZClipWarning]
        for step in range(3):
            part = layouts.my_part(layouts.whole_batch(step)).to(dtype_of(name))
            run.engine.backward(loss_of(run.engine, part, step, 0) * 1000)
            run.engine.step()
            run.norms.append(float(run.engine.zclip.last.grad_norm))
            run.scales.append(float(run.engine.zclip.last.scale))
        report[title] = {
            "norms": run.norms,
            "scales": run.scales,
            "said": said,
            "clip_grad": run.engine.optimizer.clip_grad,
        }
        run.close()
    return report


def deepspeed_p77(name):
    """A ZClipOptimizer handed to deepspeed.initialize."""
    report = {}
    for title, zclip in (("alone", None), ("beside a block", {"z_thresh": 4.0, "warmup_steps": 2})):
        net = layouts.Net()
        inner = torch.optim.AdamW(net.parameters(), lr=0.1)
        wrapper = zclip_ext.ZClipOptimizer(inner, z_thresh=3.0, warmup_steps=2)
        config = {"train_micro_batch_size_per_gpu": 4, **PATHS[name], **({"zclip": zclip} if zclip else {})}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", zclip_ext.ZClipWarning)
            # No zero_allow_untested_optimizer: DeepSpeed asks for the exact type.
            engine, *_ = deepspeed.initialize(model=net, optimizer=wrapper, config=config)
        engine.backward(engine(layouts.my_part(layouts.whole_batch(0))).square().mean())
        engine.step()
        report[title] = {
            "basic": type(engine.basic_optimizer).__name__,
            "is_inner": engine.basic_optimizer is inner,
            "z_thresh": engine.zclip.config.z_thresh,
            "steps": engine.zclip.metrics()["steps"],
            "left": [key for key in inner.param_groups[0] if key.startswith("zclip")],
            "said": [str(w.message) for w in caught if w.category is zclip_ext.ZClipWarning],
        }
        engine.destroy()
    return report


def deepspeed_refused():
    """By what the config holds: the error."""

    def error(name, zclip=None, **more):
        return error_of(lambda: Run(name, zclip or {"enabled": True}, **more).close(), ValueError)

    return {
        "unknown key": error("ZeRO 1, fp32", {"z_tresh": 2}),
        "auto": error("ZeRO 1, fp32", {"enabled": True, "z_thresh": "auto"}),
        "wrong type": error("ZeRO 1, fp32", {"alpha": "0.9"}),
        "no object": error("ZeRO 1, fp32", "on"),
        "enabled": error("ZeRO 1, fp32", {"enabled": "yes"}),
        "fp16 without ZeRO": error("ZeRO 0, fp32", **FP16),
        "compute_grad_norm": error(
            "ZeRO 1, fp32", gradient_clipping=0.0, zero_optimization={"stage": 1, "compute_grad_norm": False}
        ),
        "experts without ZeRO in bf16": error("experts, fp32", bf16={"enabled": True}),
    }


def deepspeed_skips(name):
    """Spikes and gradients that aren't finite, by the policies of the config."""
    report = {}
    for title, options in (
        ("skip", {"on_spike": "skip"}),
        ("raise", {"on_nonfinite": "raise"}),
        ("limit", {"max_consecutive_skips": 1}),
    ):
        run = Run(name, {"warmup_steps": 5, **options})
        weights = []
        for step in range(9):
            run.step(step)
            weights.append(weight_bits(run))
        moved = [a != b for a, b in itertools.pairwise(weights)]
        said = [error_of_step(run, NOT_FINITE, zclip_ext.NonFiniteGradientError) for _ in range(2)]
        metrics = run.engine.zclip.metrics()
        report[title] = {
            "moved": moved[-1],
            "all_moved": all(moved[:-1]),
            "still": weight_bits(run) == weights[-1],
            "said": said,
            "skipped_steps": run.engine.skipped_steps,
            "scheduled": run.scheduler.last_epoch,
            **{key: metrics[key] for key in ("skipped", "spikes", "nonfinite", "samples")},
        }
        run.close()
    return report


def deepspeed_checkpoint_on_and_off(name, folder):
    """Checkpoints of runs without ZClip, with it, and of the model alone."""
    folder = os.path.join(folder, "on_off", name.replace(", ", "-").replace(" ", "_"))
    plain, ours = trained(name, None), trained(name, {"warmup_steps": 2})
    plain.engine.save_checkpoint(folder, tag="plain", client_state={"mine": 1})
    client = {"mine": 1}
    ours.engine.save_checkpoint(folder, tag="ours", client_state=client)
    report = {"client": client, "saved": bits(ours.engine.zclip)}
    plain.close()
    ours.close()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", zclip_ext.ZClipWarning)
        newly_on = trained(name, {"warmup_steps": 2}, steps=1)
        report["newly on"] = newly_on.engine.load_checkpoint(folder, tag="plain")[1]["mine"]
        report["said"] = [str(w.message) for w in caught if w.category is zclip_ext.ZClipWarning]
    report["fresh"] = newly_on.engine.zclip.metrics()["steps"]
    newly_on.close()
    newly_off = Run(name)
    report["newly off"] = newly_off.engine.load_checkpoint(folder, tag="ours")[1]["mine"]
    newly_off.close()
    module_only = trained(name, {"warmup_steps": 2}, steps=2)
    module_only.engine.load_checkpoint(folder, tag="ours", load_module_only=True)
    report["module only"] = module_only.engine.zclip.metrics()["steps"]
    module_only.close()
    return report


def deepspeed_save(name, folder):
    run = trained(name, {"warmup_steps": 2})
    run.engine.save_checkpoint(folder, tag="here")
    saved = bits(run.engine.zclip)
    run.close()
    return saved


def deepspeed_load_universal(name, folder):
    run = Run(name, {"warmup_steps": 2}, checkpoint={"load_universal": True})
    run.engine.load_checkpoint(folder, tag="universal")
    loaded = bits(run.engine.zclip)
    run.step(5)
    steps = run.engine.zclip.metrics()["steps"]
    run.close()
    return [loaded, steps]


def deepspeed_monitor(name, folder):
    """Metrics in the engine's own monitors."""
    where = {"enabled": True, "output_path": folder, "job_name": "run"}
    run = trained(name, {"warmup_steps": 2}, csv_monitor=where, tensorboard=where)
    run.close()
    if dist.get_rank() != 0:
        return None
    folder = os.path.join(folder, "run")
    with open(os.path.join(folder, "Train_Samples_zclip_scale.csv")) as file:
        rows = [line.split(",") for line in file.read().split()[1:]]
    return [sorted(os.listdir(folder)), [[int(samples), float(scale)] for samples, scale in rows], run.scales]


def deepspeed_inconsistent(name):
    """Statistics that differ between ranks are everyone's error."""
    run = trained(name, {"warmup_steps": 2})
    if dist.get_rank() == 1:
        run.engine.zclip.decide(3.0)
    said = []
    for step in range(6):
        said.append(error_of_step(run, step))
    run.close()
    return said


def deepspeed_late_scheduler():
    """A scheduler of torch built on the optimizer after ZClip is in the engine."""
    run = Run("ZeRO 0, fp32", {"warmup_steps": 2})
    scheduler = torch.optim.lr_scheduler.StepLR(run.engine.optimizer, 1, gamma=0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            run.step(step)
            scheduler.step()
    said = [str(w.message) for w in caught if "optimizer.step" in str(w.message)]
    rate = run.engine.get_lr()[0]
    run.close()
    return [rate, said]


def deepspeed_says(name):
    """What the log holds."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel("WARNING")
    try:
        trained(name, {"warmup_steps": 2, "z_thresh": 3.0}, gradient_clipping=None).close()
    finally:
        logger.setLevel("ERROR")
        logger.removeHandler(handler)
    return [line for line in lines if "ZClip clips" in line]


def deepspeed_built_before():
    """The hook comes after the engine."""
    adapter.disable()
    run = Run("ZeRO 1, fp32", {"enabled": True})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", zclip_ext.ZClipWarning)
        adapter.enable()
    said = [str(w.message) for w in caught if w.category is zclip_ext.ZClipWarning]
    run.close()
    return said
