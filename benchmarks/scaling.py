"""What a clip step costs on 1, 2 and 4 ranks: this rank's part of the norm, the collective, the scaling.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py

All ranks run on this machine (gloo over loopback), so the parts compete for its cores: what to read is how little the
collective moves, not a speed-up. Each rank holds its shard of 16 million float32 parameters, as FSDP2 would split them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

from zclip_ext import ZClip, ops

FOLDER = Path(__file__).resolve().parent
PARAMETERS = 16_000_000
TENSORS = 64
PARTS = ("local part", "collective", "decision", "scaling", "whole step")


def measure(rank: int, world: int, folder: str, rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    shards: list[torch.Tensor] = [
        nn.Parameter(torch.full((PARAMETERS // TENSORS // world,), float(rank))) for _ in range(TENSORS)
    ]
    for shard in shards:
        shard.grad = torch.full_like(shard, 1e-4)
    zclip = ZClip(shared_by=lambda parameter: None)  # each rank holds parameters of its own
    state, numbers = zclip._state, zclip._numbers
    grads = ops.collect(shards)
    device = torch.device("cpu")
    sums = ops.local_sumsq(grads, device)
    almost_one = torch.tensor(1.0 - 1e-9, dtype=torch.float64)
    steps: dict[str, Callable[[], Any]] = {
        "local part": lambda: ops.local_sumsq(ops.collect(shards), device),
        "collective": lambda: dist.all_reduce(sums.clone()) if world > 1 else None,
        "decision": lambda: ops.decide_(sums, state, numbers),
        "scaling": lambda: ops.scale_(grads, almost_one),
        "whole step": lambda: zclip.clip(shards),
    }
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}
    for index in range(rounds + 3):
        for part, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            if index >= 3:
                seconds[part].append(time.perf_counter() - start)
    results[rank] = {part: statistics.median(values) for part, values in seconds.items()}
    dist.destroy_process_group()


def run(world: int, rounds: int) -> dict[str, float]:
    """Medians of the slowest rank."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Manager() as manager:
        results = manager.dict()
        ranks = [context.Process(target=measure, args=(rank, world, folder, rounds, results)) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout=300)
            if process.exitcode != 0:
                raise RuntimeError(f"a rank ended with exit code {process.exitcode}")
        return {part: max(results[rank][part] for rank in range(world)) for part in PARTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=51, help="how often each part is timed")
    parser.add_argument("--out", type=Path, default=FOLDER / "results", help="folder for scaling.json")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"argument --rounds: got {arguments.rounds}, allowed is a whole number of at least 1")
    results = {str(world): run(world, arguments.rounds) for world in (1, 2, 4)}
    table = Table(
        "ranks", title="A clip step of 16M float32 parameters in all: median microseconds of the slowest rank"
    )
    for part in PARTS:
        table.add_column(part, justify="right")
    for world, seconds in results.items():
        table.add_row(world, *(f"{seconds[part] * 1e6:.0f}" for part in PARTS))
    console = Console()
    console.width = max(console.width, 100)
    console.print(table)
    arguments.out.mkdir(parents=True, exist_ok=True)
    machine = {"cores": os.cpu_count(), "architecture": platform.machine(), "gpu": None}
    report = {"machine": machine, "torch": torch.__version__, "rounds": arguments.rounds, "seconds": results}
    (arguments.out / "scaling.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
