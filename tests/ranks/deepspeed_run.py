"""One engine of DeepSpeed on one rank, and what its steps were."""

import deepspeed
import deepspeed.ops
import layouts
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger, safe_get_full_fp32_param
from deepspeed_paths import (
    NOT_FINITE,
    PATHS,
    dtype_of,
    engine_model,
    factor,
    groups_of,
    loss_of,
    make_optimizer,
    micro_batches,
)

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing is compiled
get_accelerator().is_fp16_supported = lambda: True
logger.setLevel("ERROR")
deepspeed.init_distributed("gloo")


USERS_CLIP = 5.0  # what must stay in the optimizer and its checkpoints


class Scheduler(torch.optim.lr_scheduler.LambdaLR):
    """Saves a checkpoint from within the step of the engine, where it is asked to."""

    def __init__(self, optimizer):
        self.then = None
        super().__init__(optimizer, lambda epoch: 1.0)

    def step(self, *args):
        super().step(*args)
        if self.then is not None:
            self.then()

    def state_dict(self):
        return {key: value for key, value in super().state_dict().items() if key != "then"}


class Run:
    """One engine and what its steps were."""

    def __init__(self, name, zclip=None, **more):
        torch.manual_seed(0)
        model, self.reference_name = engine_model(name)
        groups = groups_of(name, model)
        if "experts" in name:
            from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

            groups = split({"params": groups[0]["params"], "name": "all"})
        optimizer = make_optimizer(name, groups)
        if "fused" in name:
            optimizer.__class__ = fused_class(type(optimizer))
        self.scheduler = Scheduler(optimizer)
        config = {
            "train_micro_batch_size_per_gpu": layouts.whole_batch(0).shape[0] // 2 // micro_batches(name),
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
            "gradient_clipping": USERS_CLIP,
            **PATHS[name],
            **more,
        }
        if "pipeline" in name:
            config["train_micro_batch_size_per_gpu"] *= 2
            config["gradient_accumulation_steps"] = micro_batches(name)
        if zclip is not None:
            config["zclip"] = zclip
        config = {key: value for key, value in config.items() if value is not None}
        self.name = name
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=self.scheduler, config=config
        )
        self.loss_scales, self.norms, self.scales = [], [], []
        self.says_norm = []

    def loss_scale(self):
        return float(getattr(self.engine.optimizer, "loss_scale", None) or 1.0)

    def step(self, step):
        before = self.loss_scale()
        if "pipeline" in self.name:
            self.pipeline_step(step)
        else:
            for part in layouts.my_part(layouts.whole_batch(step)).chunk(micro_batches(self.name)):
                if "autocast" not in self.name:
                    part = part.to(dtype_of(self.name))
                self.engine.backward(loss_of(self.engine, part, step, dist.get_rank()))
                self.engine.step()
        self.loss_scales.append((before, self.loss_scale()))
        zclip = getattr(self.engine, "zclip", None)
        if zclip is not None and zclip.last is not None:
            self.norms.append(float(zclip.last.grad_norm))
            self.scales.append(float(zclip.last.scale))
        norm = self.engine.get_global_grad_norm()
        self.says_norm.append(None if norm is None else float(norm))

    def pipeline_step(self, step):
        """Not a number on one stage alone: its gradients are spoiled behind the loss."""
        last = dist.get_rank() == dist.get_world_size() - 1
        spoil = step == NOT_FINITE and last
        first = next(iter(self.engine.module.parameters()))
        hook = first.register_hook(lambda grad: grad * float("nan")) if spoil else None
        batches = layouts.whole_batch(step).to(dtype_of(self.name)).chunk(micro_batches(self.name))
        scale = torch.full((1,), factor(step, 0))
        self.engine.train_batch(iter([(batch, scale) for batch in batches]))
        if hook is not None:
            hook.remove()

    def weights(self):
        """In full precision, by the reference's names."""
        optimizer, found, full = self.engine.optimizer, {}, {}
        kind = type(optimizer).__name__
        if kind == "FP16_UnfusedOptimizer":
            groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
            full = {id(low): high for lows, highs in groups for low, high in zip(lows, highs, strict=True)}
        elif kind == "FP16_Optimizer":
            for lows, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
                parts = flat.split([low.numel() for low in lows])
                full |= {id(low): part.view_as(low) for low, part in zip(lows, parts, strict=True)}
        for own, parameter in self.engine.module.named_parameters():
            value = full.get(id(parameter))
            if value is None and (self.engine.zero_optimization() or kind == "BF16_Optimizer"):
                value = safe_get_full_fp32_param(parameter)
            value = parameter if value is None else value
            found[self.reference_name(own)] = value.detach().float().clone()
        return found

    def close(self):
        self.engine.destroy()


def fused_class(base):
    """DeepSpeed's fused Adam chooses FP16_Optimizer by its type; its kernel isn't built here."""
    from deepspeed.ops.adam import FusedAdam

    return type("FusedAdam", (base, FusedAdam), {"step": base.step})
