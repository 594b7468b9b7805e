"""Trains the demo's Llama with its weights spread over many ranks by FSDP2, and ZClip in the optimizer.

    torchrun --nproc-per-node 2 integrations/train_fsdp2.py                       # on GPUs by NCCL, else by gloo
    torchrun --nproc-per-node 2 integrations/train_fsdp2.py --resume --steps 200  # goes on, to the same bits on CPUs
    torchrun --nproc-per-node 4 integrations/train_fsdp2.py --resume --steps 300  # and on any number of ranks

All that ZClip needs is the line in `build` that wraps the optimizer: the norm is that of the whole gradient, every rank
decides the same, and the checkpoint of the optimizer holds the statistics.
Needs `pip install "zclip-ext[demo]"`, and --out on a disk that all ranks share.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import demo
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from zclip_ext import ZClipOptimizer

# What a run can't go on without having the same of. The number of ranks is not among them.
SETTINGS = ("--lr", "--batch", "--length", "--bad-share", "--seed")
LOGGED = ("grad_norm", "clipped_norm", "spike_level", "threshold", "z_score", "scale", "is_spike")
SHOWN = "step {step}  loss {loss:.3f}  norm {grad_norm:.3f} -> {clipped_norm:.3f}  z {z_score:+.1f}"


def join_ranks() -> torch.device:
    """Meets the other ranks that torchrun has started. Returns this rank's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def build(args: argparse.Namespace, device: torch.device) -> tuple[nn.Module, ZClipOptimizer]:
    torch.manual_seed(args.seed)  # every rank makes the same weights, of which fully_shard leaves it its part
    model = demo.build_model(args.length).to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, ZClipOptimizer(torch.optim.AdamW(model.parameters(), lr=args.lr))


def train_step(model: nn.Module, optimizer: ZClipOptimizer, tokens: Tensor) -> float:
    """One step on this rank's part of a batch. Returns the loss over all of it, in nats per byte."""
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()  # leaves each rank its part of the mean gradient
    optimizer.step()  # clips by the norm of the whole gradient, then steps
    optimizer.zero_grad()
    total = loss.detach()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def train(args: argparse.Namespace) -> None:
    """Trains up to ``--steps``; rank 0 writes the log."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    demo.check_shares(args.batch, world)
    data = demo.text_of(args)
    settings = demo.settings_of(args, SETTINGS, data)
    start = saved_step(args, settings) if args.resume else 0
    log = None
    if rank == 0:
        log = demo.open_log(args.out / "log.jsonl", start)
        if not start:
            (args.out / "latest").unlink(missing_ok=True)  # first: it must not name a folder that is gone
        for folder in args.out.glob("step-*"):  # of an earlier run, or saved by half
            if int(folder.name.removeprefix("step-")) > start:
                shutil.rmtree(folder)
    device = join_ranks()
    model, optimizer = build(args, device)
    if start:
        load(args.out / f"step-{start}", model, optimizer)

    for step in range(start, args.steps):
        for group in optimizer.param_groups:  # from the step alone, so there is no scheduler to save
            group["lr"] = args.lr * min(1, (step + 1) / demo.WARMUP_STEPS)
        tokens, bad = data.train_batch(step)  # the same on every rank
        loss = train_step(model, optimizer, tokens.chunk(world)[rank].to(device))
        if log is not None:
            seen = optimizer.zclip.last  # the same on every rank, too
            row = {"step": step, "bad": bad, "loss": loss, **{name: getattr(seen, name).item() for name in LOGGED}}
            log.write(demo.log_line(row))
            if step % 10 == 0 or step + 1 == args.steps:
                print(SHOWN.format_map(row), flush=True)
        if (step + 1) % args.checkpoint_every == 0 or step + 1 == args.steps:
            save(args.out, step + 1, model, optimizer, settings)

    optimizer.zclip.check_consistency()  # all ranks must call it
    if log is not None:
        demo.print_metrics(optimizer.zclip)
    dist.barrier()  # a rank that leaves while others still talk to it ends by an abort now and then
    dist.destroy_process_group()


def states_of(model: nn.Module, optimizer: ZClipOptimizer) -> dict[str, Any]:
    """This rank's part of all that a checkpoint holds; ZClip's statistics are in the optimizer's."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def save(out: Path, step: int, model: nn.Module, optimizer: ZClipOptimizer, settings: dict[str, Any]) -> None:
    """All ranks write; only then does ``latest`` change, so that it tells of a whole checkpoint at all times."""
    dcp.save(states_of(model, optimizer), checkpoint_id=out / f"step-{step}")  # type: ignore[attr-defined]
    if dist.get_rank() == 0:
        temporary = out / "latest.tmp"
        temporary.write_text(json.dumps({"step": step, "settings": settings}), encoding="utf-8")
        temporary.replace(out / "latest")


def load(folder: Path, model: nn.Module, optimizer: ZClipOptimizer) -> None:
    """Each rank reads what it holds now, however many ranks wrote it."""
    states = states_of(model, optimizer)
    dcp.load(states, checkpoint_id=folder)  # type: ignore[attr-defined]
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])


def saved_step(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    """The step that the last checkpoint is at; 0 where there is none."""
    path = args.out / "latest"
    if not path.exists():
        return 0
    saved = json.loads(path.read_text(encoding="utf-8"))
    demo.check_settings(settings, saved["settings"], path)
    demo.check_steps(args.steps, saved["step"], path)
    return int(saved["step"])


def build_parser() -> argparse.ArgumentParser:
    parser = demo.new_parser(__doc__)
    add = parser.add_argument
    add("--steps", type=demo.whole(1, 10**9), default=100, help="in all; more than before goes on with --resume")
    add("--lr", type=demo.real(0, 10), default=3e-3, help=f"of AdamW, after {demo.WARMUP_STEPS} steps of warm-up")
    add("--batch", type=demo.whole(1, 4096), default=8, help="windows of text in a step, all ranks together")
    demo.add_text_arguments(parser)
    add("--out", type=Path, default=Path("runs/fsdp2"), help="folder of log and checkpoints; written over")
    add("--checkpoint-every", type=demo.whole(1, 10**9), default=100, help="steps")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out")
    return parser


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(f"no other ranks: start it by torchrun --nproc-per-node 2 {sys.argv[0]}")
    demo.make_folder(parser, args.out)
    demo.run(parser, args, train)


if __name__ == "__main__":
    main()
