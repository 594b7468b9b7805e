"""Trains the demo's Llama by Composer's Trainer, with ZClip as one of its algorithms.

    python integrations/train_composer.py                                          # one process
    composer -n 2 integrations/train_composer.py --save runs/composer              # two ranks; on CPUs by gloo
    torchrun --nproc-per-node 2 integrations/train_composer.py --save runs/composer
    python integrations/train_composer.py --resume runs/composer --steps 200       # goes on, to the same bits on CPUs

All that ZClip needs is `algorithms=[ZClip(...)]`: it clips each batch before the optimizer steps, its metrics go to the
Trainer's loggers as zclip/*, and the statistics travel in the Trainer's checkpoints.
Needs `pip install "zclip-ext[composer,demo]"`, and --save on a disk that all ranks share.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import demo
import torch
from composer import Trainer
from composer.core import Callback, State
from composer.loggers import Logger
from composer.models import ComposerModel
from composer.utils import dist
from stdlib_text import StdlibText
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from zclip_ext.integrations.composer import ZClip

# What a run can't go on without having the same of.
SETTINGS = ("--batch", "--length", "--bad-share", "--seed")
SHOWN = (
    "step {step}  loss {loss:.3f}  norm {grad_norm:.3f}  threshold {threshold:.3f}  z {z_score:+.1f}  scale {scale:.3f}"
)


class Llama(ComposerModel):
    """The demo's model, with its loss in nats per byte."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.llama = demo.build_model(length)

    def forward(self, batch: Tensor) -> Any:
        return self.llama(input_ids=batch, labels=batch)

    def loss(self, outputs: Any, batch: Tensor) -> Tensor:
        loss: Tensor = outputs.loss
        return loss


class Windows(Dataset[Tensor]):
    """The windows of all steps' batches one after another, in the order that every trainer of the demo sees them in."""

    def __init__(self, data: StdlibText, steps: int) -> None:
        self.data, self.steps = data, steps
        self._held: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return self.steps * self.data.batch

    def __getitem__(self, index: int) -> Tensor:
        step, row = divmod(index, self.data.batch)
        if self._held is None or self._held[0] != step:
            self._held = step, self.data.train_batch(step)[0]
        return self._held[1][row]


class Progress(Callback):
    """Prints what ZClip saw, and keeps the run's settings in its checkpoints, to compare when one is gone on from."""

    def __init__(self, zclip: ZClip, data: StdlibText, settings: dict[str, Any], print_every: int) -> None:
        self.zclip, self.data, self.settings, self.print_every = zclip.zclip, data, settings, print_every

    def batch_end(self, state: State, logger: Logger) -> None:
        step = int(state.timestamp.batch) - 1
        loss = state.total_loss_dict["loss/train/total"]  # the mean over all ranks
        seen = self.zclip.last  # the same on every rank
        assert seen is not None
        is_last = state.timestamp >= state.max_duration
        if dist.get_global_rank() == 0 and (step % self.print_every == 0 or is_last or seen.is_spike):
            row = {name: getattr(seen, name).item() for name in ("grad_norm", "threshold", "z_score", "scale")}
            notes = "  spike" * bool(seen.is_spike) + "  bad batch" * self.data.train_batch(step)[1]
            print(f"{SHOWN.format_map({'step': step, 'loss': loss, **row})}{notes}", flush=True)

    def state_dict(self) -> dict[str, Any]:
        return {"settings": self.settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        demo.check_settings(self.settings, state["settings"], "the checkpoint", instead="leave out --resume")


def train(args: argparse.Namespace) -> None:
    """Trains up to ``--steps``; rank 0 prints."""
    world = dist.get_world_size()
    demo.check_shares(args.batch, world)
    data = demo.text_of(args)
    settings = demo.settings_of(args, SETTINGS, data)
    dist.initialize_dist("gpu" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    model, windows = Llama(args.length), Windows(data, args.steps)
    zclip = ZClip(z_thresh=args.z_thresh, max_grad_norm=args.max_grad_norm)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(windows, args.batch // world, sampler=dist.get_sampler(windows)),
        max_duration=f"{args.steps}ba",
        device_train_microbatch_size=args.microbatch,
        optimizers=torch.optim.AdamW(model.parameters(), lr=args.lr),
        algorithms=[zclip],
        callbacks=[Progress(zclip, data, settings, args.print_every)],
        progress_bar=False,
        save_folder=None if args.save is None else str(args.save),
        save_interval=f"{args.checkpoint_every}ba",
        save_overwrite=True,
        load_path=None if args.resume is None else str(latest(args.resume)),
    )
    demo.check_steps(args.steps, trainer.state.timestamp.batch.value, args.resume)
    trainer.fit()
    trainer.close()
    if dist.get_global_rank() == 0:
        demo.print_metrics(zclip.zclip)


def latest(folder: Path) -> Path:
    path = folder / "latest-rank0.pt"
    if not path.exists():
        raise demo.SettingError(f"--resume: no checkpoint of Composer in {folder}")
    return path


def build_parser() -> argparse.ArgumentParser:
    parser = demo.new_parser(__doc__)
    add = parser.add_argument
    add("--steps", type=demo.whole(1, 10**9), default=100, help="in all; more than before goes on with --resume")
    add("--lr", type=demo.real(0, 10), default=3e-3, help="of AdamW")
    add("--batch", type=demo.whole(1, 4096), default=8, help="windows of text in a step, all ranks together")
    add("--microbatch", type=demo.whole(1, 4096), help="windows that a rank computes at a time, all of its by default")
    demo.add_text_arguments(parser)
    add("--z-thresh", type=demo.real(0, 1e6), default=2.5, help="z-score above which a gradient norm is a spike")
    add("--max-grad-norm", type=demo.real(0, 1e6), help="a fixed limit on top")
    add("--print-every", type=demo.whole(1, 10**9), default=10, help="steps; spikes are printed, too")
    add("--save", type=Path, help="folder for checkpoints, of which the last is gone on from")
    add("--checkpoint-every", type=demo.whole(1, 10**9), default=100, help="steps, with --save")
    add("--resume", type=Path, help="folder of checkpoints to go on from")
    return parser


def main() -> None:
    if "WORLD_SIZE" in os.environ:  # torchrun's name of it is another than Composer's
        os.environ.setdefault("NODE_RANK", os.environ.get("GROUP_RANK", "0"))
    parser = build_parser()
    args = parser.parse_args()
    demo.run(parser, args, train)


if __name__ == "__main__":
    main()
