"""Saving on some number of ranks and loading on another, as each rank does it."""

import layouts
import torch
import torch.distributed as dist
from common import backward, bits, layout_of
from torch.distributed.fsdp import StateDictType

from zclip_ext import ZClipOptimizer


def checkpoint_save(name, folder, *arguments):
    """Trains some steps, one of them a spike, and saves."""
    layout, optimizer = trained(name, range(30), *arguments)
    if name == "fsdp1":
        save_fsdp1(layout.model, optimizer, folder)
    else:
        import torch.distributed.checkpoint as dcp

        dcp.save(states(layout, optimizer), checkpoint_id=folder)
    return bits(optimizer.zclip)


def checkpoint_load(name, folder, *arguments):
    """Loads it, perhaps on another number of ranks; the next decisions."""
    layout, optimizer = trained(name, range(0), *arguments)
    if name == "fsdp1":
        load_fsdp1(layout.model, optimizer, folder)
    else:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

        state = states(layout, optimizer)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(layout.model, state["model"])
        set_optimizer_state_dict(layout.model, optimizer, state["optimizer"])
    loaded = bits(optimizer.zclip)
    train(layout, optimizer, range(30, 36))
    optimizer.zclip.check_consistency()
    return [loaded, float(optimizer.zclip.last), optimizer.zclip.metrics()["mean"]]


def states(layout, optimizer):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    return {"model": get_model_state_dict(layout.model), "optimizer": get_optimizer_state_dict(layout.model, optimizer)}


def save_fsdp1(model, optimizer, folder):
    """FSDP1's own way: for dcp.load its states lack keys on some ranks, whatever the optimizer (torch 2.13)."""
    with layouts.FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = {
            "model": model.state_dict(),
            "optimizer": layouts.FullyShardedDataParallel.optim_state_dict(model, optimizer),
        }
    if dist.get_rank() == 0:
        torch.save(state, f"{folder}.pt")
    dist.barrier()


def load_fsdp1(model, optimizer, folder):
    state = torch.load(f"{folder}.pt", weights_only=True)
    with layouts.FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(state["model"])
        inner = layouts.FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state["optimizer"])
    optimizer.load_state_dict(inner)


def trained(name, steps, *arguments):
    layout = layout_of(name, *arguments)
    inner = torch.optim.AdamW(layout.parameters(), lr=1e-3)
    optimizer = ZClipOptimizer(inner, model=layout.module, warmup_steps=10)
    train(layout, optimizer, steps)
    return layout, optimizer


def train(layout, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        backward(layout, step, 5.0 if step in (20, 33) else 1.0)
        optimizer.step()
