"""Trains a small Llama on Python sources with real bad batches among them, and compares ways to clip its gradients.

    python integrations/train_pytorch.py                                # all four, about two minutes on one core
    python integrations/train_pytorch.py --method zclip --steps 2000
    python integrations/train_pytorch.py --resume                       # goes on after Ctrl-C, to the same bits

What a run with ZClip needs of all this stands in `Run`: one line that wraps the optimizer.
Needs `pip install "zclip-ext[demo]"`.
"""

from __future__ import annotations

import argparse
import math
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import demo
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from stdlib_text import StdlibText
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from zclip_ext import ZClip, ZClipOptimizer
from zclip_ext.plot import plot_runs, read_log

CAP = 1.0
# The limit on the norm that is the same at all steps, by method.
CAPS = {"none": math.inf, "fixed": CAP, "zclip": math.inf, "zclip-cap": CAP}
HELD_OUT_BATCHES = 16
LAST_BATCHES = 50
NOTE = "loss {loss:.2f}  norm {grad_norm:.2f}  z {z_score:+.1f}"
# What a run can't go on without having the same of.
SETTINGS = ("--lr", "--batch", "--length", "--bad-share", "--z-thresh", "--seed")


class Run:
    """A model, its optimizer, and how its gradients are clipped."""

    def __init__(self, method: str, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.method, self.step, self.seconds = method, 0, 0.0
        self.model = demo.build_model(args.length).to(args.device)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.observer: ZClip | None = None
        if method == "zclip":
            self.optimizer = ZClipOptimizer(self.optimizer, z_thresh=args.z_thresh)
        elif method == "zclip-cap":
            self.optimizer = ZClipOptimizer(self.optimizer, z_thresh=args.z_thresh, max_grad_norm=CAP)
        else:
            # Touches no gradient: it counts the spikes that this run meets, by the same rule.
            self.observer = ZClip(z_thresh=args.z_thresh, dry_run=True)
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1, (step + 1) / demo.WARMUP_STEPS))

    def train_step(self, tokens: Tensor) -> float:
        """One step on int64 tokens of shape (batch, length). Returns the loss in nats per byte."""
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if self.observer is not None:
            self.observer.step(self.model)
        if self.method == "fixed":
            nn.utils.clip_grad_norm_(self.model.parameters(), CAP)
        self.optimizer.step()  # a ZClipOptimizer clips before it steps
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step += 1
        return float(loss.item())

    def clipping(self) -> dict[str, float | bool]:
        """What ZClip saw in the last step, and what was done to the gradient."""
        zclip = self.optimizer.zclip if isinstance(self.optimizer, ZClipOptimizer) else self.observer
        assert zclip is not None
        assert zclip.last is not None
        result = zclip.last
        norm, scale = float(result.grad_norm), float(result.scale)
        if zclip is self.observer:  # its scale is what ZClip would have done; this is clip_grad_norm_'s
            scale = min(1.0, CAPS[self.method] / (norm + 1e-6))
        return {
            "grad_norm": norm,
            "clipped_norm": norm * scale,
            "spike_level": float(result.spike_level),
            "threshold": float(result.threshold),
            "z_score": float(result.z_score),
            "scale": scale,
            "is_spike": bool(result.is_spike),
        }

    def held_out_loss(self, batches: list[Tensor]) -> float:
        self.model.eval()
        with torch.no_grad():
            losses = [float(self.model(input_ids=tokens, labels=tokens).loss) for tokens in batches]
        self.model.train()
        return sum(losses) / len(losses)

    def save(self, path: Path, settings: dict[str, Any]) -> None:
        saved = {"settings": settings, "step": self.step, "seconds": self.seconds}
        for name in ("model", "optimizer", "scheduler", "observer"):
            part = getattr(self, name)
            saved[name] = None if part is None else part.state_dict()
        temporary = path.with_suffix(".tmp")
        torch.save(saved, temporary)
        temporary.replace(path)  # in one go: there is a whole checkpoint at all times

    def load(self, path: Path, settings: dict[str, Any]) -> None:
        """Takes back what :meth:`save` wrote; a run goes on from there to the bits that it would have come to."""
        saved = torch.load(path, map_location="cpu", weights_only=True)
        demo.check_settings(settings, saved["settings"], path)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        if self.observer is not None:
            self.observer.load_state_dict(saved["observer"])
        self.step, self.seconds = saved["step"], saved["seconds"]


class Interrupt:
    """While it is entered, Ctrl-C lets a step end first, so that no checkpoint holds half of one. A second: at once."""

    asked = False

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def train(run: Run, data: StdlibText, args: argparse.Namespace, progress: Progress, interrupt: Interrupt) -> None:
    """Trains up to ``--steps`` or until interrupted, with a row of the log a step, and a checkpoint at the end."""
    checkpoint, log_path = args.out / f"{run.method}.pt", args.out / f"{run.method}.jsonl"
    if checkpoint.exists():
        run.load(checkpoint, args.settings)
        demo.check_steps(args.steps, run.step, checkpoint)
    start = run.step
    bar = progress.add_task(run.method, total=args.steps, completed=start, note="")
    with demo.open_log(log_path, start) as log:
        while run.step < args.steps and not interrupt.asked:
            began = time.perf_counter()
            tokens, bad = data.train_batch(run.step)
            row = {"step": run.step, "bad": bad, "loss": run.train_step(tokens.to(args.device)), **run.clipping()}
            log.write(demo.log_line(row))
            run.seconds += time.perf_counter() - began
            progress.update(bar, completed=run.step, note=NOTE.format_map(row))
            if run.step % args.checkpoint_every == 0:
                run.save(checkpoint, args.settings)
    if run.step > start:
        run.save(checkpoint, args.settings)


def counts(rows: list[dict[str, Any]]) -> list[int]:
    """Bad batches, spikes met, bad batches among them, spikes clipped to their threshold, steps the cap limited."""
    spikes = [row for row in rows if row["is_spike"]]
    clipped = [row for row in spikes if math.isclose(row["clipped_norm"], row["threshold"])]
    capped = sum(row["scale"] < 1 for row in rows) - len(clipped)
    bad = [sum(row["bad"] for row in some) for some in (rows, spikes)]
    return [bad[0], len(spikes), bad[1], len(clipped), capped]


def report(runs: list[tuple[Run, float]], out: Path, console: Console) -> None:
    """The table and the picture, from the logs."""
    logs = {run.method: read_log(out / f"{run.method}.jsonl") for run, _ in runs}
    caption = (
        f"Losses in nats per byte, on held-out text and as the mean of the last {LAST_BATCHES} good batches. Bad "
        "batches met; spikes met, how many of them on bad batches, and clipped to their threshold; steps limited "
        "by the cap."
    )
    table = Table(caption=caption, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for column in ("steps", "held-out", "train", "bad", "spikes", "on bad", "clipped", "capped", "sec"):
        table.add_column(column, justify="right", no_wrap=True)
    for run, held_out in runs:
        rows = logs[run.method]
        good = [row["loss"] or math.nan for row in rows if not row["bad"]][-LAST_BATCHES:]
        losses = f"{held_out:.3f}", f"{sum(good) / max(1, len(good)):.3f}"
        table.add_row(run.method, str(run.step), *losses, *map(str, counts(rows)), f"{run.seconds:.0f}")
    console.print(table)
    try:
        plot_runs(logs, out / "demo.png", focus="zclip" if "zclip" in logs else list(logs)[-1])
        console.print(f"picture: {out / 'demo.png'}, logs: {out}/*.jsonl")
    except ImportError as error:
        console.print(f"no picture: {error}", markup=False)


def compare(args: argparse.Namespace, console: Console) -> int:
    """Trains with each method and reports, also on what is there when Ctrl-C ends it early. Returns the exit code."""
    data = demo.text_of(args)
    args.settings = demo.settings_of(args, SETTINGS, data)
    methods = list(CAPS) if args.method == "all" else [args.method]
    if not args.resume:
        for method in methods:
            (args.out / f"{method}.pt").unlink(missing_ok=True)
    held_out = [tokens.to(args.device) for tokens in data.held_out_batches(HELD_OUT_BATCHES)]
    runs = []
    columns = TextColumn("{task.description:9}"), BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[note]}")
    with Interrupt() as interrupt, Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for method in methods:
            if interrupt.asked:
                break
            run = Run(method, args)
            train(run, data, args, progress, interrupt)
            if run.step:
                runs.append((run, run.held_out_loss(held_out)))
    if runs:
        report(runs, args.out, console)
    if not interrupt.asked:
        return 0
    resume = [] if args.resume else ["--resume"]
    console.print(f"interrupted; to go on: {shlex.join(['python', *sys.argv, *resume])}", markup=False, soft_wrap=True)
    return 130


def device(text: str) -> torch.device:
    try:
        return torch.empty(0, device=text).device
    except (AssertionError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(f"got {text!r}: {str(error).splitlines()[0]}") from None


def build_parser() -> argparse.ArgumentParser:
    parser = demo.new_parser(__doc__)
    add = parser.add_argument
    methods = "none, clip_grad_norm_ to 1, ZClip, ZClip that also limits the norm to 1, or all four one after another"
    add("--method", choices=[*CAPS, "all"], default="all", help=methods)
    add("--steps", type=demo.whole(1, 10**9), default=360, help="of each run; more than before goes on with --resume")
    add("--lr", type=demo.real(0, 10), default=3e-3, help=f"of AdamW, after {demo.WARMUP_STEPS} steps of warm-up")
    add("--batch", type=demo.whole(1, 4096), default=8, help="windows of text in a step")
    demo.add_text_arguments(parser)
    add("--z-thresh", type=demo.real(0, 1e6), default=2.5, help="z-score above which a gradient norm is a spike")
    add("--device", type=device, default="cpu", help="such as cpu or cuda")
    add("--out", type=Path, default=Path("runs/demo"), help="folder of logs, checkpoints and picture; written over")
    add("--checkpoint-every", type=demo.whole(1, 10**9), default=100, help="steps")
    add("--resume", action="store_true", help="go on from the checkpoints in --out; what is done is not run again")
    return parser


def main() -> int:
    # So that the bits don't hang on the number of cores. Two threads take about 0.6 of the time on idle cores,
    # and three times as long or more where something else runs as well and they wait for each other.
    torch.set_num_threads(1)
    parser = build_parser()
    args = parser.parse_args()
    console = Console()
    demo.make_folder(parser, args.out)
    try:
        return compare(args, console)
    except demo.SettingError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        console.print("stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main())
