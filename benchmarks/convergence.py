"""Does clipping help a training run? Small Llamas on real text, each way to clip, over learning rates and seeds.

    python benchmarks/convergence.py --quick               # under five minutes on two cores
    python benchmarks/convergence.py                       # the tables of docs/results.md: 1.5 hours
    python benchmarks/convergence.py --plan ablation       # its parts, one at a time: 20 minutes
    python benchmarks/convergence.py --plan large --device cuda

What is run stands in convergence.json: sizes, regimes, methods, and plans, which are grids of these. Each run is one
line of JSON with all its settings in convergence.jsonl under --out; a run that is there already, also of another plan,
is not done again, so a study that was stopped goes on. convergence_report.py makes the tables and pictures of a plan.

Needs `pip install "zclip-ext[demo]" zclip==1.0.0`.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import math
import multiprocessing
import os
import platform
import random
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TextIO

import clip_rules
import convergence_report
import docs_table
import torch
from rich.console import Console
from torch import Tensor, nn

import zclip_ext
from zclip_ext.plot import read_log

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "integrations"))
import demo  # noqa: E402
from stdlib_text import StdlibText  # noqa: E402

AXES = ("seed", "regime", "size", "lr", "method")  # in this order, so that a study that is cut short has whole seeds
HELD_OUT_WINDOWS = 256  # at the end
CURVE_WINDOWS = 64  # on the way
CURVE_POINTS = 16
SPIKE = 0.5  # nats above the moving mean of the training loss
EMA = 0.9


def settings_of(plan: str, book: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every run of a plan, with all that it depends on."""
    known = {"regime": book["regimes"], "size": book["sizes"], "method": book["methods"]}
    for grid in book["plans"][plan]:
        for values in itertools.product(*(grid[axis] for axis in AXES)):
            names = dict(zip(AXES, values, strict=True))
            for axis, entries in known.items():
                if names[axis] not in entries:
                    raise SystemExit(f"plan {plan!r}: unknown {axis} {names[axis]!r}, known are {', '.join(entries)}")
            yield {
                **names,
                "training": {**book["regimes"][names["regime"]], **grid.get("training", {})},
                "model": book["sizes"][names["size"]],
                "rules": book["methods"][names["method"]],
            }


@functools.cache
def text() -> StdlibText:
    return StdlibText(batch=1, length=2, bad_share=0.0, bad_after=0, seed=0)


@functools.cache
def log_frequencies() -> Tensor:
    """What a model gives each byte that has learnt how frequent they are, and nothing else."""
    counts = torch.bincount(text().text.long(), minlength=256).double() + 1
    return (counts / counts.sum()).log()


@functools.cache
def loss_of_frequencies() -> float:
    """Of that model on held-out text, nats per byte."""
    return -float(log_frequencies()[text().held_out.long()].mean())


class Data:
    """The batches of a run: some are corrupted, and from given steps on they have another shape."""

    def __init__(self, training: dict[str, Any], seed: int) -> None:
        self.text = copy.copy(text())
        self.text.seed, self.text.bad_share = seed, training["bad_share"]
        self.seed, self.one_place = seed, training["one_place"]
        self.shapes = {0: (training["batch"], training["length"])}
        self.shapes |= {int(step): tuple(shape) for step, shape in training["shapes"].items()}

    def batch(self, step: int) -> tuple[Tensor, bool]:
        """Tokens, int64, and whether they are corrupted: byte code, or any bytes."""
        self.text.batch, self.text.length = self.shapes[max(at for at in self.shapes if at <= step)]
        tokens, bad = self.text.train_batch(step)
        chance = random.Random(f"{self.seed}:{step}:kind")
        if bad and chance.random() < 0.5:
            tokens = torch.tensor(chance.choices(range(256), k=tokens.numel())).view_as(tokens)
        if self.one_place and not bad:
            start = chance.randrange(len(self.text.text) - tokens.numel())
            tokens = self.text.text[start : start + tokens.numel()].view_as(tokens).long()
        return tokens, bad

    def held_out(self, windows: int) -> list[Tensor]:
        held_out = copy.copy(self.text)
        held_out.batch, held_out.length = self.shapes[0]
        return held_out.held_out_batches(max(1, windows // held_out.batch))


@torch.no_grad()
def loss_on(model: nn.Module, batches: list[Tensor], device: str) -> float:
    model.eval()
    losses = [float(model(input_ids=batch.to(device), labels=batch.to(device)).loss) for batch in batches]
    model.train()
    return sum(losses) / len(losses)


def rate_at(step: int, training: dict[str, Any]) -> float:
    """Linear warm-up, then half a cosine down to a tenth; as a share of the learning rate."""
    if step < training["warmup"]:
        return (step + 1) / float(training["warmup"])
    progress = (step - training["warmup"]) / max(1, training["steps"] - training["warmup"])
    return 0.55 + 0.45 * math.cos(math.pi * progress)


def train(settings: dict[str, Any], device: str) -> dict[str, Any]:
    """One run. Returns what was measured."""
    warnings.filterwarnings("ignore", category=zclip_ext.ZClipWarning)  # what they tell of is counted here
    training = settings["training"]
    torch.manual_seed(settings["seed"])
    longest = max([training["length"], *(length for _, length in training["shapes"].values())])
    model = demo.build_model(longest, settings["model"]).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings["lr"],
        betas=(0.9, training["beta2"]),
        weight_decay=training["weight_decay"],
    )
    data, clip = Data(training, settings["seed"]), clip_rules.build(settings["rules"])
    on_the_way, at_the_end = data.held_out(CURVE_WINDOWS), data.held_out(HELD_OUT_WINDOWS)
    every = max(1, training["steps"] // CURVE_POINTS)
    curve: list[tuple[int, float]] = []
    norms: list[float] = []
    bad_steps: list[tuple[int, float | None, float | None]] = []
    clips, left_out, false_alarms = 0, 0, 0
    seconds: dict[str, list[float]] = {"clip": [], "rest": []}
    watch, of_text = LossWatch(), LossWatch()
    frequencies = log_frequencies()

    def norm() -> float:
        return float(nn.utils.get_total_norm(clip_rules.gradients_of(model)))

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    for step in range(training["steps"]):
        optimizer.param_groups[0]["lr"] = settings["lr"] * rate_at(step, training)
        tokens, bad = data.batch(step)
        start = now()
        loss = model(input_ids=tokens.to(device), labels=tokens.to(device)).loss
        loss.backward()
        backward = now() - start
        before = norm()
        start = now()
        takes_step = clip(model)
        seconds["clip"].append(now() - start)
        norms.append(before)
        after = norm()
        clipped = after < before * (1 - 1e-6)
        clips += clipped
        left_out += not takes_step
        if bad:
            bad_steps.append((step, short(before), short(after)))
        else:
            false_alarms += clipped
        start = now()
        if takes_step:
            optimizer.step()
        optimizer.zero_grad()
        seconds["rest"].append(backward + now() - start)
        value = loss.item()
        watch.see(value, bad)
        of_text.see(-float(frequencies[tokens].mean()), bad)
        if not math.isfinite(value):
            break
        if (step + 1) % every == 0 or step + 1 == training["steps"]:
            curve.append((step + 1, loss_on(model, on_the_way, device)))
    end = loss_on(model, at_the_end, device)
    finite = [value for value in norms if math.isfinite(value)] or [math.nan]
    return {
        "held_out_loss": short(end),
        "diverged": has_diverged(end, curve, steps=len(norms), wanted=training["steps"]),
        "loss_spikes": watch.spikes,
        "loss_spikes_of_frequencies": of_text.spikes,
        "steps": len(norms),
        "clip_rate": clips / len(norms),
        "false_alarms": false_alarms / max(1, len(norms) - len(bad_steps)),
        "bad_steps": bad_steps,
        "left_out": left_out,
        "clip_share": statistics.median(seconds["clip"]) / statistics.median(seconds["rest"]),
        "seconds": round(sum(map(sum, seconds.values())), 2),
        "norm": {
            "median": short(statistics.median(finite)),
            "p99": short(sorted(finite)[int(0.99 * len(finite))]),
            "largest of the first 25": short(max(finite[:25])),
        },
        "curve": [(at, short(value)) for at, value in curve],
    }


def has_diverged(end: float, curve: list[tuple[int, float]], *, steps: int, wanted: int) -> bool:
    """The loss is not finite, no better than the bytes' frequencies, or half a nat above the best of the run."""
    best = min((loss for _, loss in curve if math.isfinite(loss)), default=math.inf)
    return steps < wanted or not (end < loss_of_frequencies() and end < best + SPIKE)


def short(value: float) -> float | None:
    """Six digits; JSON has no inf and no NaN."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


class LossWatch:
    """Counts loss spikes: a good batch with a loss of SPIKE above the moving mean, where the one before had none."""

    def __init__(self) -> None:
        self.spikes = 0
        self.mean = math.inf
        self.in_spike = False

    def see(self, loss: float, bad: bool) -> None:
        if bad:
            return
        spiked = not loss <= self.mean + SPIKE
        self.spikes += spiked and not self.in_spike
        self.in_spike = spiked
        if math.isinf(self.mean):
            self.mean = loss
        elif math.isfinite(loss):
            self.mean = EMA * self.mean + (1 - EMA) * min(loss, self.mean + SPIKE)


def start_worker() -> None:
    torch.set_num_threads(1)


def key(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def about(device: str) -> dict[str, str]:
    """What else a run depends on. Runs that differ in this are not put into one table."""
    return {
        "device": device,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "zclip_ext": zclip_ext.__version__,
        "text": text().fingerprint,
    }


def read(path: Path, expected: dict[str, str]) -> list[dict[str, Any]]:
    """The runs that are there.

    Raises:
        ValueError: a run of another device, machine, text or version.
    """
    rows = read_log(path) if path.exists() else []
    for row in rows:
        for name, value in row["about"].items():
            if value != expected[name]:
                raise ValueError(f"{path} holds runs with {name} {value!r}, here it is {expected[name]!r}")
    return rows


def run_all(
    wanted: list[dict[str, Any]], log: TextIO, jobs: int, here: dict[str, str], console: Console
) -> Iterator[dict[str, Any]]:
    """Runs what is wanted; each run goes into the log when it is done, and is given."""
    context = multiprocessing.get_context("spawn")
    start = time.perf_counter()
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=start_worker) as pool:
        futures = {pool.submit(train, settings, here["device"]): settings for settings in wanted}
        try:
            for number, future in enumerate(as_completed(futures), start=1):
                settings, found = futures[future], future.result()
                row = {"settings": settings, "result": found, "about": here}
                log.write(json.dumps(row, allow_nan=False) + "\n")
                yield row
                left = (time.perf_counter() - start) / number * (len(wanted) - number)
                loss = "diverged" if found["diverged"] else f"{found['held_out_loss']:.3f}"
                names = " ".join(f"{settings[axis]}" for axis in AXES)
                console.print(f"{number}/{len(wanted)} {names}: {loss}, {left / 60:.0f} min left", highlight=False)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def main() -> None:
    book = json.loads((FOLDER / "convergence.json").read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=list(book["plans"]), default="full", help="a plan in convergence.json")
    parser.add_argument("--quick", action="store_const", dest="plan", const="quick", help="the same as --plan quick")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--jobs", type=demo.whole(1, 1024), help="runs at the same time, of one thread each (default: cores; cuda: 1)"
    )
    parser.add_argument("--report", action="store_true", help="run nothing, report what is there")
    parser.add_argument("--write", action="store_true", help="put the tables of this plan into docs/results.md")
    parser.add_argument("--out", type=Path, default=Path("runs/convergence"), help="folder for lines, tables, pictures")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: got 'cuda', but torch sees no GPU")
    jobs = arguments.jobs if arguments.jobs is not None else 1 if arguments.device == "cuda" else os.cpu_count() or 1
    demo.make_folder(parser, arguments.out)
    name = "convergence" if arguments.plan == "full" else f"convergence_{arguments.plan}"
    path = arguments.out / "convergence.jsonl"
    console = Console()
    runs = {key(settings): settings for settings in settings_of(arguments.plan, book)}
    here = about(arguments.device)
    try:
        rows = read(path, here)
    except ValueError as error:
        parser.error(f"argument --out: {error}")
    done = {key(row["settings"]): row for row in rows}
    wanted = [settings for known, settings in runs.items() if known not in done]
    if wanted and not arguments.report:
        console.print(f"{len(runs)} runs, {len(runs) - len(wanted)} of them are in {path} already")
        with demo.open_log(path, len(rows)) as log:  # less half a line, of a run that was killed
            done |= {key(row["settings"]): row for row in run_all(wanted, log, jobs, here, console)}
    found = [done[known] for known in runs if known in done]
    if not found:
        parser.error(f"argument --report: no run of the plan {arguments.plan!r} is in {path}")
    summary = convergence_report.write(found, arguments.out / name)
    print(summary)
    if arguments.write:
        docs_table.put(summary, page="results.md", name=arguments.plan)


if __name__ == "__main__":
    main()
