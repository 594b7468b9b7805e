"""Trains the demo's Llama by DeepSpeed with ZeRO 3, and ZClip from the config alone.

    deepspeed integrations/train_deepspeed.py                               # on all GPUs, else by one process
    deepspeed --num_gpus 2 integrations/train_deepspeed.py --save runs/ds   # on CPUs the number of processes
    torchrun --nproc-per-node 2 integrations/train_deepspeed.py --resume runs/ds --steps 200
    python integrations/train_deepspeed.py --stage 1                        # one process

All that ZClip needs is the import of zclip_ext.integrations.deepspeed and the "zclip" block of ds_zclip_zero3.json:
the statistics travel in DeepSpeed's checkpoints by themselves.
Needs `pip install "zclip-ext[deepspeed,demo]"`, and --save on a disk that all ranks share.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import demo
import torch
import torch.distributed as dist
from torch import Tensor

import zclip_ext.integrations.deepspeed  # noqa: F401

CONFIG = Path(__file__).with_name("ds_zclip_zero3.json")
# What a run can't go on without having the same of; DeepSpeed itself asks for the same stage and number of ranks.
SETTINGS = ("--length", "--bad-share", "--seed")
LOGGED = ("grad_norm", "threshold", "z_score", "scale")
SHOWN = (
    "step {step}  loss {loss:.3f}  norm {grad_norm:.3f}  threshold {threshold:.3f}  z {z_score:+.1f}  scale {scale:.3f}"
)
# What a launcher sets. Port 0: any that is free.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def read_config(args: argparse.Namespace, world: int) -> dict[str, Any]:
    """The DeepSpeed config, with what the command line overrides."""
    try:
        config = json.loads(args.deepspeed_config.read_text(encoding="utf-8"))
    except OSError as error:
        raise demo.SettingError(f"--deepspeed_config: {error}") from None
    except ValueError as error:
        raise demo.SettingError(f"--deepspeed_config: {args.deepspeed_config}: {error}") from None
    if not isinstance(config, dict):
        raise demo.SettingError(f"--deepspeed_config: {args.deepspeed_config} holds no JSON object")
    if "stage" in args:
        config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": args.stage}
    if args.bf16:
        config["bf16"] = {"enabled": True}
    batch = args.batch if "batch" in args else config.get("train_batch_size")
    if not isinstance(batch, int):
        raise demo.SettingError(f"--batch: not given, and train_batch_size in {args.deepspeed_config} is {batch}")
    parts = world * config.get("gradient_accumulation_steps", 1)
    if batch % parts:
        raise demo.SettingError(
            f"--batch: got {batch}, which can't be shared out evenly to {parts} parts: "
            "ranks times gradient_accumulation_steps"
        )
    return {**config, "train_batch_size": batch, "train_micro_batch_size_per_gpu": batch // parts}


def join_ranks() -> None:
    """Meets the other ranks that a launcher has started, by NCCL on GPUs, else by gloo."""
    if "RANK" not in os.environ:
        os.environ.update(ALONE)
    if deepspeed.get_accelerator().device_name() == "cpu":
        # What DeepSpeed would else compile here, for a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()


def train_step(engine: Any, tokens: Tensor) -> float:
    """One step on this rank's part of a batch. Returns the loss over all of it, in nats per byte."""
    total = torch.zeros((), device=engine.device)
    for part in tokens.to(engine.device).chunk(engine.gradient_accumulation_steps()):
        loss = engine(input_ids=part, labels=part).loss
        engine.backward(loss)
        engine.step()  # after the last part it clips by the norm of the whole gradient, then steps
        total += loss.detach() / engine.gradient_accumulation_steps()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def train(args: argparse.Namespace) -> None:
    """Trains up to ``--steps``; rank 0 prints."""
    config = read_config(args, int(os.environ.get("WORLD_SIZE", 1)))
    data = demo.text_of(args, config["train_batch_size"])
    settings = {"--batch": data.batch, **demo.settings_of(args, SETTINGS, data)}
    join_ranks()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    engine, *_ = deepspeed.initialize(model=demo.build_model(args.length), config=config)
    if getattr(engine, "zclip", None) is None:
        raise demo.SettingError(f'--deepspeed_config: {args.deepspeed_config} lacks "zclip": {{"enabled": true}}')
    start = load(args, engine, settings) if args.resume else 0
    if rank == 0:
        print(f"ZeRO {int(engine.zero_optimization_stage())}, ranks: {world}, step {start}: {engine.zclip}")

    for step in range(start, args.steps):
        tokens, bad = data.train_batch(step)  # the same on every rank
        lr = engine.get_lr()[0]
        loss = train_step(engine, tokens.chunk(world)[rank])
        seen = engine.zclip.last  # the same on every rank, too
        is_last = step + 1 == args.steps
        if rank == 0 and (step % args.print_every == 0 or is_last or seen.is_spike):
            row = {"step": step, "loss": loss, **{name: getattr(seen, name).item() for name in LOGGED}}
            notes = "  spike" * bool(seen.is_spike) + "  bad batch" * bad
            print(f"{SHOWN.format_map(row)}  lr {lr:.2e}{notes}", flush=True)
        if args.save and ((step + 1) % args.checkpoint_every == 0 or is_last):
            engine.save_checkpoint(str(args.save), tag=f"step-{step + 1}", client_state={"settings": settings})

    if rank == 0:
        demo.print_metrics(engine.zclip)
    dist.barrier()  # a rank that leaves while others still talk to it ends by an abort now and then
    dist.destroy_process_group()
    time.sleep(0.5)  # and so does one while a thread of gloo, which DeepSpeed keeps, still lets go of its tensors


def load(args: argparse.Namespace, engine: Any, settings: dict[str, Any]) -> int:
    """Takes back the last checkpoint in ``--resume``, ZClip's statistics included. Returns the step that it is at."""
    path, client_state = engine.load_checkpoint(str(args.resume))
    if path is None:
        raise demo.SettingError(f"--resume: no DeepSpeed checkpoint in {args.resume}")
    demo.check_settings(settings, client_state.get("settings", {}), path, instead="leave out --resume")
    demo.check_steps(args.steps, engine.global_steps, path)
    return int(engine.global_steps)


def build_parser() -> argparse.ArgumentParser:
    parser = demo.new_parser(__doc__)
    add = parser.add_argument
    add("--deepspeed_config", type=Path, default=CONFIG, help="JSON with a zclip block")
    add("--stage", type=demo.whole(0, 3), default=argparse.SUPPRESS, help="of ZeRO, in place of the config's")
    add("--bf16", action="store_true", help="train in bf16, whatever the config says")
    add("--steps", type=demo.whole(1, 10**9), default=100, help="in all; more than before goes on with --resume")
    add(
        "--batch",
        type=demo.whole(1, 4096),
        default=argparse.SUPPRESS,
        help="windows of text in a step, all ranks together, in place of the config's train_batch_size",
    )
    demo.add_text_arguments(parser)
    add("--print-every", type=demo.whole(1, 10**9), default=10, help="steps; spikes are printed, too")
    add("--save", type=Path, help="folder for checkpoints, of which the last is gone on from")
    add("--checkpoint-every", type=demo.whole(1, 10**9), default=100, help="steps, with --save")
    add("--resume", type=Path, help="folder of checkpoints to go on from")
    add("--local_rank", help=argparse.SUPPRESS)  # the launcher's; what counts is in the environment
    return parser


def main() -> None:
    # Torch's names that DeepSpeed calls, at every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    parser = build_parser()
    args = parser.parse_args()
    demo.run(parser, args, train)


if __name__ == "__main__":
    main()
