"""Trains the demo's Llama in the Trainer of Transformers, with ZClip as a callback.

    python integrations/train_transformers.py
    torchrun --nproc-per-node 2 integrations/train_transformers.py --out runs/trainer
    python integrations/train_transformers.py --out runs/trainer --resume --steps 200

A checkpoint holds ZClip's statistics. Needs `pip install "zclip-ext[transformers,demo]"`.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import demo
import torch
from stdlib_text import StdlibText
from torch import Tensor
from torch.utils.data import IterableDataset

SHOWN = ("loss", "zclip/grad_norm", "zclip/threshold", "zclip/z_score", "zclip/scale")


class Windows(IterableDataset[dict[str, Tensor]]):
    """The demo's batches one after the other, window by window. With several ranks the Trainer deals them out."""

    def __init__(self, data: StdlibText, steps: int) -> None:
        self.data, self.steps = data, steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step in range(self.steps):
            tokens, _ = self.data.train_batch(step)
            for window in tokens:
                yield {"input_ids": window, "labels": window}


def train(args: argparse.Namespace) -> None:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from zclip_ext.integrations.transformers import ZClipCallback

    class Printer(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if state.is_world_process_zero and "zclip/scale" in logs:
                values = "  ".join(f"{name.removeprefix('zclip/')} {float(logs[name]):.3f}" for name in SHOWN)
                print(f"step {state.global_step}  {values}", flush=True)

    data = demo.text_of(args)
    settings = TrainingArguments(
        output_dir=str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=args.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=demo.WARMUP_STEPS,
        max_grad_norm=0.0,  # ZClip clips instead
        logging_steps=args.print_every,
        save_steps=args.checkpoint_every,
        seed=args.seed,
        disable_tqdm=True,
        report_to=[],
        remove_unused_columns=False,
        use_cpu=not torch.cuda.is_available(),
    )
    torch.manual_seed(args.seed)
    model = demo.build_model(args.length)
    windows = Windows(data, args.steps * settings.world_size)
    trainer = Trainer(model, settings, train_dataset=windows, callbacks=[Printer()])
    trainer.remove_callback(PrinterCallback)  # prints the same less readably
    callback = ZClipCallback.add_to(trainer, z_thresh=args.z_thresh)  # first, so that others see its metrics
    trainer.train(resume_from_checkpoint=args.resume)
    if trainer.is_world_process_zero():
        demo.print_metrics(callback.zclip)


def build_parser() -> argparse.ArgumentParser:
    parser = demo.new_parser(__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/trainer"), help="folder for checkpoints")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out")
    add("--steps", type=demo.whole(1, 10**9), default=100, help="in all; more than before goes on with --resume")
    add("--lr", type=demo.real(0, 1), default=3e-3, help="learning rate")
    add("--batch", type=demo.whole(1, 4096), default=8, help="windows of text in a step, on each rank")
    demo.add_text_arguments(parser)
    add("--z-thresh", type=demo.real(0, 10**9), default=2.5, help="a step with a larger z-score is a spike")
    add("--print-every", type=demo.whole(1, 10**9), default=10, help="steps")
    add("--checkpoint-every", type=demo.whole(1, 10**9), default=50, help="steps")
    return parser


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    parser = build_parser()
    args = parser.parse_args()
    if args.resume and not list(args.out.glob("checkpoint-*")):
        parser.error(f"--resume: no checkpoint in {args.out}")
    train(args)


if __name__ == "__main__":
    main()
