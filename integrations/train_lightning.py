"""Trains the demo's Llama by Lightning, with ZClip as a callback.

    python integrations/train_lightning.py
    python integrations/train_lightning.py --resume --steps 200    # goes on, to the same bits on CPUs
    python integrations/train_lightning.py --devices 2             # DDP: Lightning starts the ranks

All that ZClip needs is `ZClipCallback` in the trainer's callbacks: it clips before each step of the optimizer, its
metrics go to the trainer's logger as zclip/..., and the trainer's checkpoints hold its statistics.
Needs `pip install "zclip-ext[demo,lightning]"`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import demo
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from stdlib_text import StdlibText
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset

from zclip_ext.integrations.lightning import ZClipCallback

# What a run can't go on without having the same of.
SETTINGS = ("--lr", "--batch", "--length", "--bad-share", "--z-thresh", "--precision", "--seed")


class Batches(IterableDataset[tuple[Tensor, bool]]):
    """This rank's part of the batches from the step on that the trainer is at."""

    def __init__(self, data: StdlibText, trainer: pl.Trainer) -> None:
        self.data, self.trainer = data, trainer

    def __iter__(self) -> Iterator[tuple[Tensor, bool]]:
        step = self.trainer.global_step
        while True:
            tokens, bad = self.data.train_batch(step)  # the same on every rank
            yield tokens.chunk(self.trainer.world_size)[self.trainer.global_rank], bad
            step += 1


class Llama(pl.LightningModule):
    def __init__(self, data: StdlibText, args: argparse.Namespace, settings: dict[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters({"settings": settings})
        torch.manual_seed(args.seed)
        self.model = demo.build_model(args.length)
        self.data, self.lr = data, args.lr

    def training_step(self, batch: tuple[Tensor, bool], index: int) -> Tensor:
        tokens, bad = batch
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss  # nats per byte
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        self.log("bad", float(bad))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        scheduler = LambdaLR(optimizer, lambda step: min(1, (step + 1) / demo.WARMUP_STEPS))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> DataLoader[tuple[Tensor, bool]]:
        return DataLoader(Batches(self.data, self.trainer), batch_size=None)


def train(args: argparse.Namespace) -> None:
    """Trains up to ``--steps``, and leaves a checkpoint."""
    demo.check_shares(args.batch, args.devices)
    data = demo.text_of(args)
    settings = demo.settings_of(args, SETTINGS, data)
    checkpoint = args.out / "last.ckpt"
    resumed = checkpoint if args.resume and checkpoint.exists() else None
    if resumed is not None:
        check(resumed, args.steps, settings)

    zclip = ZClipCallback(z_thresh=args.z_thresh)
    keep = ModelCheckpoint(
        args.out, filename="last", every_n_train_steps=args.checkpoint_every, enable_version_counter=False
    )
    trainer = pl.Trainer(
        max_steps=args.steps,
        accelerator=args.accelerator,
        devices=args.devices,
        precision=args.precision,
        callbacks=[zclip, keep],
        logger=CSVLogger(args.out, name="log"),  # a folder for each start
        log_every_n_steps=1,
        enable_model_summary=False,
    )
    trainer.fit(Llama(data, args, settings), ckpt_path=resumed)
    trainer.save_checkpoint(checkpoint)
    if trainer.is_global_zero:
        demo.print_metrics(zclip.zclips[0])
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves while others still talk to it ends by an abort now and then
        dist.destroy_process_group()


def check(checkpoint: Path, steps: int, settings: dict[str, Any]) -> None:
    """Raises SettingError where a run can't go on from a checkpoint."""
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    demo.check_settings(settings, saved["hyper_parameters"]["settings"], checkpoint)
    demo.check_steps(steps, saved["global_step"], checkpoint)


def build_parser() -> argparse.ArgumentParser:
    parser = demo.new_parser(__doc__)
    add = parser.add_argument
    add("--steps", type=demo.whole(1, 10**9), default=100, help="in all; more than before goes on with --resume")
    add("--lr", type=demo.real(0, 10), default=3e-3, help=f"of AdamW, after {demo.WARMUP_STEPS} steps of warm-up")
    add("--batch", type=demo.whole(1, 4096), default=8, help="windows of text in a step, all ranks together")
    demo.add_text_arguments(parser)
    add("--z-thresh", type=demo.real(0, 1e6), default=2.5, help="z-score above which a gradient norm is a spike")
    add("--precision", choices=["32-true", "bf16-mixed", "16-mixed"], default="32-true", help="as Lightning calls it")
    add("--accelerator", default="cpu" if not torch.cuda.is_available() else "cuda", help="as Lightning calls it")
    add("--devices", type=demo.whole(1, 4096), default=1, help="ranks on this machine")
    add("--out", type=Path, default=Path("runs/lightning"), help="folder of logs and checkpoint; written over")
    add("--checkpoint-every", type=demo.whole(1, 10**9), default=100, help="steps")
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    return parser


def main() -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # so that the bits don't hang on the number of cores
    parser = build_parser()
    args = parser.parse_args()
    demo.make_folder(parser, args.out)
    demo.run(parser, args, train)


if __name__ == "__main__":
    main()
