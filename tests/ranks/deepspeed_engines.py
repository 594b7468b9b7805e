"""Engines of kinds that the paths don't cover: several at once, tied layers, tensor parallel, Muon, scalers, hooks."""

import copy

import deepspeed
import layouts
import torch
import torch.distributed as dist
from common import bits, error_of, norm_of
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed_paths import NOT_FINITE, PATHS, zero
from deepspeed_run import Run
from torch import nn

import zclip_ext
import zclip_ext.integrations.deepspeed as adapter


class Halves:
    """Ranks 0 and 1 train one model, ranks 2 and 3 another."""

    def __init__(self):
        self.groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self.alone = [dist.new_group([rank]) for rank in range(4)]

    def get_model_parallel_rank(self):
        return 0

    def get_model_parallel_world_size(self):
        return 1

    def get_model_parallel_group(self):
        return self.alone[dist.get_rank()]

    def get_data_parallel_rank(self):
        return dist.get_rank() % 2

    def get_data_parallel_world_size(self):
        return 2

    def get_data_parallel_group(self):
        return self.groups[dist.get_rank() // 2]


def initialize(model, config, **more):
    config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, **config}
    return deepspeed.initialize(model=model, config=config, **more)[0]


def deepspeed_two_models(stage):
    """Models that are trained apart in one job, the second for fewer steps."""
    half = dist.get_rank() // 2
    torch.manual_seed(half)
    net = layouts.Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    config = {**zero(int(stage)), "zclip": {"warmup_steps": 2}}
    engine = initialize(net, config, optimizer=optimizer, mpu=Halves())
    wanted = []
    for step in range(3 if half == 0 else 1):
        parts = layouts.whole_batch(step).chunk(4)[half * 2 : half * 2 + 2]
        single = layouts.Net()
        single.load_state_dict({n: p.detach().clone() for n, p in net.state_dict().items()})
        (single(torch.cat(parts)).square().mean() * (1 + 4 * half)).backward()
        wanted.append(norm_of([p.grad for p in single.parameters()]))
        engine.backward(engine(parts[dist.get_rank() % 2]).square().mean() * (1 + 4 * half))
        engine.step()
    return [float(engine.zclip.last.grad_norm), wanted[-1], engine.zclip.metrics()["steps"]]


class Twin:
    """The same model in one process, which takes the steps of an engine with its scales."""

    def __init__(self, model, lr):
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), lr=lr)
        self.report = {"norms": [], "wanted": [], "scales": []}

    def follow(self, loss, seen):
        """`seen`: what ZClip saw in the engine."""
        self.optimizer.zero_grad()
        loss.backward()
        self.report["wanted"].append(norm_of([p.grad for p in self.model.parameters()]))
        self.report["norms"].append(float(seen.grad_norm))
        self.report["scales"].append(float(seen.scale))
        for p in self.model.parameters():
            p.grad *= self.report["scales"][-1]
        self.optimizer.step()


def deepspeed_copies_in_a_pipeline(name):
    """Two stages of two ranks each, and one layer that stands on both stages."""
    from deepspeed.pipe import PipelineModule, TiedLayerSpec

    torch.manual_seed(0)
    first = torch.nn.Linear(12, 12, bias=False)
    net = layouts.Net()
    reference = torch.nn.Sequential(first, net.blocks[0], net.blocks[1], first)
    twin = Twin(reference, lr=0.1)
    ends = TiedLayerSpec("ends", torch.nn.Linear, 12, 12, bias=False)
    model = PipelineModule(
        [ends, *copy.deepcopy([net.blocks[0], net.blocks[1]]), ends],
        num_stages=2,
        loss_fn=lambda out, scale: out.square().mean() * scale.mean(),
        partition_method="uniform",
    )
    model.tied_modules["ends"].load_state_dict(first.state_dict())
    config = {"gradient_accumulation_steps": 2, "zclip": {"warmup_steps": 2}, **PATHS[name]}
    engine = initialize(model, config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    where = engine.grid.get_data_parallel_rank()
    for step, scale in enumerate((1.0, 1.0, 40.0, 1.0)):
        batch = layouts.whole_batch(step)
        parts = batch.chunk(2)[where].chunk(2)
        engine.train_batch(iter([(part, torch.full((1,), scale)) for part in parts]))
        twin.follow(reference(batch).square().mean() * scale, engine.zclip.last)
    mine = torch.cat([p.detach().flatten() for p in engine.module.parameters()])
    stage = engine.grid.get_stage_id()
    wanted = [*reference[:2].parameters()] if stage == 0 else [*reference[2].parameters(), *reference[3].parameters()]
    wanted = torch.cat([p.detach().flatten() for p in wanted])
    difference = (mine.sort().values - wanted.sort().values).abs().max().item()
    report = {**twin.report, "difference": difference, "bits": bits(engine.zclip)}
    engine.destroy()
    return report


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.up, self.down, self.norm = nn.Linear(12, 24), nn.Linear(24, 12), nn.LayerNorm(12)

    def forward(self, x):
        return self.norm(self.down(torch.relu(self.up(x))))


def deepspeed_tensor_parallel(stage):
    """DeepSpeed splits two layers over the ranks by itself."""
    specs = [
        {"patterns": [r".*up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*down\.weight$"], "partition_type": "row"},
    ]
    split = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": specs}}
    single, net = Mlp(), Mlp()
    twin = Twin(single, lr=0.01)
    config = {**zero(int(stage)), "tensor_parallel": split, "zclip": {"warmup_steps": 2}}
    engine = initialize(net, config, optimizer=torch.optim.SGD(net.parameters(), lr=0.01))
    for step, factor in enumerate((1.0, 1.0, 40.0, 1.0)):
        batch = layouts.whole_batch(step)[:2]
        engine.backward(engine(batch).pow(3).mean() * factor)
        engine.step()
        twin.follow(single(batch).pow(3).mean() * factor, engine.zclip.last)
    report = {**twin.report, "bits": bits(engine.zclip)}
    engine.destroy()
    return report


def deepspeed_muon(stage):
    net = nn.Sequential(nn.Linear(12, 16, bias=False), nn.ReLU(), nn.Linear(16, 12, bias=False))
    config = {**zero(int(stage)), "optimizer": {"type": "Muon", "params": {"lr": 0.001, "torch_adam": True}}}
    config["zclip"] = {"enabled": True}
    return error_of(lambda: initialize(net, config, model_parameters=list(net.parameters())), ValueError)


def deepspeed_scaler():
    """torch_autocast in fp16 without ZeRO: the scaler's overflows are its own affair."""
    PATHS["ZeRO 0, autocast in fp16"] = {**zero(0), "torch_autocast": {"enabled": True, "dtype": "float16"}}
    run = Run("ZeRO 0, autocast in fp16", {"warmup_steps": 2, "on_nonfinite": "raise"})
    scaler = run.engine.torch_autocast_z0_gradscaler
    scales = []
    for step in (0, 1, NOT_FINITE, 2):
        run.step(step)
        scales.append(scaler.get_scale())
    metrics = run.engine.zclip.metrics()
    report = {"scales": scales, "skipped_steps": run.engine.skipped_steps, "scheduled": run.scheduler.last_epoch}
    report |= {name: metrics[name] for name in ("samples", "nonfinite", "skipped", "steps")}
    run.close()
    return report


def deepspeed_hooks():
    """Another's hook on the engine, under ours and over it."""
    ours = DeepSpeedEngine.__init__
    calls = []

    def theirs(self, *args, **kwargs):
        calls.append(1)
        return ours(self, *args, **kwargs)

    DeepSpeedEngine.__init__ = theirs
    adapter.disable()
    adapter.enable()
    adapter.enable()
    try:
        run = Run("ZeRO 1, fp32", {"warmup_steps": 2})
        run.step(0)
    finally:
        DeepSpeedEngine.__init__ = ours
    steps = run.engine.zclip.metrics()["steps"]
    run.close()
    return [len(calls), steps]


def deepspeed_wrappers():
    """A ZClipOptimizer where the block says no, and one that a function makes."""

    def make(parameters):
        return zclip_ext.ZClipOptimizer(torch.optim.AdamW(parameters, lr=0.1))

    net = layouts.Net()
    config = {**zero(1), "zclip": {"enabled": False}}
    engine = initialize(net, config, optimizer=make(net.parameters()))
    report = {"off": [hasattr(engine, "zclip"), type(engine.basic_optimizer).__name__]}
    engine.destroy()
    net = layouts.Net()
    report["function"] = error_of(lambda: initialize(net, zero(1), optimizer=make), ValueError)
    return report
