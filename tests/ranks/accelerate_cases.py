"""What each rank does in the cases of Accelerate."""

import accelerate
import layouts
import torch
import torch.distributed as dist
from accelerate import Accelerator
from common import bits

import zclip_ext

OPTIONS = {"warmup_steps": 4}


def accelerate_train(folder=None, accumulate=1, steps=12, cut=None, resume=False, precision="no", spoil=()):
    """A run as the documentation of Accelerate writes it. Returns norms, scales, the final weights and statistics."""
    accelerate.state.AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=precision)
    ranks, rank = accelerator.num_processes, accelerator.process_index
    net = layouts.Net()
    optimizer = zclip_ext.ZClipOptimizer(torch.optim.AdamW(net.parameters(), lr=0.01), **OPTIONS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    model, prepared, scheduler = accelerator.prepare(net, optimizer, scheduler)
    start = 0
    if resume:
        accelerator.load_state(folder)
        start = cut
    norms, scales, skipped = [], [], []
    for step in range(start, steps):
        whole = layouts.whole_batch(step // accumulate)
        part = whole.chunk(ranks)[rank].chunk(accumulate)[step % accumulate]
        with accelerator.accumulate(model):
            factor = 40.0 if step // accumulate == 8 else float("nan") if step in spoil and rank == ranks - 1 else 1.0
            accelerator.backward(layouts.loss_of(model, part).float() * factor)
            prepared.step()
            scheduler.step()
            prepared.zero_grad()
        if accelerator.sync_gradients:
            norms.append(float(optimizer.zclip.last.grad_norm))
            scales.append(float(optimizer.zclip.last.scale))
            skipped.append(optimizer.last_step_skipped)
        if cut is not None and not resume and step == cut - 1:
            accelerator.save_state(folder)
    weights = [p.detach().double().sum().item() for p in accelerator.unwrap_model(model).parameters()]
    report = {"norms": norms, "scales": scales, "weights": weights, "bits": bits(optimizer.zclip), "skipped": skipped}
    dist.barrier() if dist.is_initialized() else None
    return report


def accelerate_same():
    return accelerate_train(spoil=(10,))


def accelerate_accumulates():
    return accelerate_train(accumulate=2, steps=24)


def accelerate_resumes(folder):
    whole = accelerate_train(folder, cut=6)
    return [whole, accelerate_train(folder, cut=6, resume=True)]


def accelerate_bf16():
    return accelerate_train(precision="bf16")
