"""DeepSpeed's ways to train one model on two ranks, and the same training by one process without DeepSpeed."""

import copy
import itertools
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import layouts
from reference import ReferenceZClip

from zclip_ext import ops

WORLD = 2
STEPS = 14
SPIKES = {8: 40.0, 11: 300.0}
NOT_FINITE = 12  # on the last rank alone
OPTIONS = {"warmup_steps": 5, "z_thresh": 2.5}
LR = 0.05

BF16 = {"bf16": {"enabled": True}}
UNCHECKED = {"bf16": {"enabled": True, "check_grad_overflow": False}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
# A scale that grows within the run.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 3, "loss_scale_window": 4, "hysteresis": 1}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def zero(stage, **more):
    return {"zero_optimization": {"stage": stage, **more}}


# By name: the config. What else differs is read from the name. Pipelines come last, since they leave groups behind.
PATHS = {
    "ZeRO 0, fp32": zero(0),
    "ZeRO 0, fp32, gradient_clipping 0": {**zero(0), "gradient_clipping": 0.0},
    "ZeRO 0, bf16": {**zero(0), **BF16},
    "ZeRO 0, bf16, fused": {**zero(0), **BF16},
    "ZeRO 0, autocast": {**zero(0), **AUTOCAST},
    **{f"ZeRO {stage}, fp32": zero(stage) for stage in (1, 2, 3)},
    **{f"ZeRO {stage}, bf16": {**zero(stage), **BF16} for stage in (1, 2, 3)},
    # Without its own check DeepSpeed would apply what isn't finite.
    **{f"ZeRO {stage}, bf16, unchecked": {**zero(stage), **UNCHECKED} for stage in (1, 2)},
    "ZeRO 1, bf16, fp32 sums": {**zero(1), **BF16, **FP32_SUMS},
    **{f"ZeRO {stage}, fp16": {**zero(stage), **FP16} for stage in (1, 2, 3)},
    **{f"ZeRO {stage}, offload": zero(stage, **OFFLOAD) for stage in (1, 2, 3)},
    "ZeRO 2, bf16, offload": {**zero(2, **OFFLOAD), **BF16},
    **{f"ZeRO {stage}, autocast": {**zero(stage), **AUTOCAST} for stage in (1, 2, 3)},
    **{f"ZeRO {stage}, accumulation": {**zero(stage), "gradient_accumulation_steps": 2} for stage in (0, 1, 2, 3)},
    **{f"ZeRO {stage}, groups": zero(stage) for stage in (0, 1, 2, 3)},
    "ZeRO 3, sub-groups": zero(3, sub_group_size=100),
    "ZeRO 1, gradient_clipping 0": {**zero(1), "gradient_clipping": 0.0},
    "ZeRO 1, bf16, fp32 sums, gradient_clipping 0": {**zero(1), **BF16, **FP32_SUMS, "gradient_clipping": 0.0},
    "experts, fp32": zero(0),
    "experts, ZeRO 1": zero(1),
    "experts, ZeRO 2": zero(2),
    "experts, ZeRO 1, bf16": {**zero(1), **BF16, **FP32_SUMS},
    "pipeline, fp32": zero(0),
    "pipeline, bf16": {**zero(0), **BF16},
    "pipeline, ZeRO 1": zero(1),
    "pipeline, ZeRO 1, bf16": {**zero(1), **BF16, **FP32_SUMS},
}


class Experts(nn.Module):
    """The mathematics of DeepSpeed's MoE with one expert chosen for each token."""

    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, WORLD, bias=False)
        expert = nn.Linear(width, width)
        self.experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(WORLD))

    def forward(self, x):
        share, chosen = nn.functional.linear(x.float(), self.gate.weight.float()).softmax(-1).max(-1, keepdim=True)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        picked = outputs.gather(-1, chosen.unsqueeze(-2).expand(*x.shape, 1)).squeeze(-1)
        return x + share.to(x.dtype) * picked


class ExpertNet(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        torch.manual_seed(3)
        self.block = layouts.Block(width, 20)
        self.moe = Experts(width)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.moe(self.block(x)))


def factor(step, rank):
    if step == NOT_FINITE and rank == WORLD - 1:
        return float("nan")
    return SPIKES.get(step, 1.0)


def loss_of(model, batch, step, rank):
    return model(batch).float().square().mean() * factor(step, rank)


def dtype_of(name):
    return torch.bfloat16 if "bf16" in name else torch.float16 if "fp16" in name else torch.float32


def micro_batches(name):
    return 2 if "accumulation" in name or "pipeline" in name else 1


def make_optimizer(name, groups):
    """SGD in low precision, where Adam would make much of the last bit."""
    if dtype_of(name) is torch.float32 and "autocast" not in name and "experts" not in name:
        return torch.optim.AdamW(groups, lr=LR, foreach=False)
    return torch.optim.SGD(groups, lr=LR / 2)


def groups_of(name, model):
    parameters = list(model.parameters())
    if "groups" in name and "sub" not in name:
        return [{"params": parameters[::2], "lr": LR}, {"params": parameters[1::2], "lr": LR / 2}]
    return [{"params": parameters}]


def add(lists):
    return [sum(tensors) for tensors in zip(*lists, strict=True)]


class Reference:
    """One process, plain torch, ZClip in plain Python. Weights and norms after each step."""

    def __init__(self, name, options=OPTIONS):
        self.name, self.dtype = name, dtype_of(name)
        self.stage = PATHS[name]["zero_optimization"]["stage"]
        self.zclip_scales = not self.stage and self.dtype is torch.float32
        self.master = ExpertNet() if "experts" in name else layouts.Net()
        self.master.to(self.dtype).float()  # DeepSpeed keeps what is left of the weights in low precision
        self.optimizer = make_optimizer(name, groups_of(name, self.master))
        self.zclip = ReferenceZClip(**options)
        self.norms, self.scales = [], []

    def gradients(self, step, loss_scale):
        model = copy.deepcopy(self.master).to(self.dtype)
        ranks = 1 if "pipeline" in self.name else WORLD
        last = WORLD - 1
        batch = layouts.whole_batch(step).to(self.dtype)
        micros = micro_batches(self.name)
        parts = {}
        for rank, micro in itertools.product(range(ranks), range(micros)):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in self.name):
                loss = (
                    loss_of(model, batch.chunk(ranks)[rank].chunk(micros)[micro], step, last if ranks == 1 else rank)
                    / micros
                )
            (loss * loss_scale).backward()
            parts[rank, micro] = [
                torch.zeros_like(p, dtype=torch.float32) if p.grad is None else p.grad.float() / loss_scale
                for p in model.parameters()
            ]
        # ZeRO 2 and 3 reduce each micro-batch, others what has been added up.
        order = sorted(parts, key=lambda at: at[::-1]) if self.stage >= 2 else sorted(parts)
        inner = ranks if self.stage >= 2 else micros
        sums = [add(parts[at] for at in order[i : i + inner]) for i in range(0, len(order), inner)]
        return [total / ranks for total in add(sums)]

    def norm(self, grads):
        """In float64; where ZClip measures by itself, its own, which other tests hold against float64."""
        if self.zclip_scales:
            return ops.local_sumsq(grads, torch.device("cpu"))[0].sqrt().item()
        return sum(g.double().square().sum().item() for g in grads) ** 0.5

    def scaled(self, grad, scale):
        """ZClip rounds the product of float64 once; DeepSpeed multiplies by a float32."""
        return (grad.double() * scale).float() if self.zclip_scales else grad * scale

    def step(self, step, loss_scale=1.0, unscaled_by=1.0):
        """`unscaled_by`: DeepSpeed divides by the loss scale after it has updated it."""
        grads = self.gradients(step, loss_scale)
        norm = self.norm(grads)
        _, _, scale, what = self.zclip.step(norm)
        self.norms.append(norm)
        self.scales.append(scale)
        if what == "step":
            for p, g in zip(self.master.parameters(), grads, strict=True):
                p.grad = self.scaled(g, scale * loss_scale / unscaled_by)
            self.optimizer.step()

    def weights(self):
        return {name: p.detach().clone() for name, p in self.master.named_parameters()}


def engine_model(name):
    """The same weights in the modules that DeepSpeed wants, and the reference's name of each parameter."""
    if "pipeline" in name:
        from deepspeed.pipe import PipelineModule

        net = layouts.Net()
        layers = [net.blocks[0], net.blocks[1], net.head]
        model = PipelineModule(layers, num_stages=WORLD, loss_fn=lambda out, f: out.float().square().mean() * f.mean())
        prefixes = ("blocks.0", "blocks.1", "head")
        return model, lambda own: ".".join([prefixes[int(own.split(".")[0])], *own.split(".")[1:]])
    if "experts" in name:
        from deepspeed.moe.layer import MoE

        net = ExpertNet()
        made = MoE(12, net.moe.experts[0], num_experts=WORLD, ep_size=WORLD, k=1, capacity_factor=4.0, use_rts=False)
        made.deepspeed_moe.gate.wg.weight.data.copy_(net.moe.gate.weight.data)

        class Mixed(nn.Module):
            def __init__(self):
                super().__init__()
                self.block, self.moe, self.head = net.block, made, net.head

            def forward(self, x):
                x = self.block(x)
                return self.head(x + self.moe(x)[0])

        names = {"moe.deepspeed_moe.gate.wg.weight": "moe.gate.weight"}
        for kind in ("weight", "bias"):
            own = f"moe.deepspeed_moe.experts.deepspeed_experts.0.{kind}"
            names[own] = f"moe.experts.{dist.get_rank()}.{kind}"
        return Mixed(), lambda own: names.get(own, own)
    return layouts.Net(), lambda own: own
