"""What a zclip block costs a DeepSpeed step: seconds, and how often the host waits for the device.

    python benchmarks/deepspeed_step.py            # ZeRO 1, 2, 3 in fp32 and bf16, on 2 processes

Two engines of the same model, one with the block and one without, take steps in turn; the time is that of
``engine.step()``, the median of all. A wait is a number that Python reads from a tensor on the engine's device
(``aten::_local_scalar_dense``, ``.cpu()``). Without a GPU these tensors lie on the CPU, too: a tensor counts as the
device's unless it came from the one copy of the norm that ZClip makes, or from numbers of ZClip's own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PLAIN, OURS = "without", "with zclip"


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what the host reads of tensors that aren't its own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self.on_host: weakref.WeakSet[Any] = weakref.WeakSet()

    def copy_to_host(self, tensors: list[Tensor]) -> list[Tensor]:
        self.count += 1
        copies = [tensor.clone() for tensor in tensors]
        self.on_host.update(tensor.untyped_storage() for tensor in copies)
        return copies

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        hosts = all(self._is_hosts(tensor) for tensor in given) if given else _asked_by_zclip()
        if function is torch.ops.aten._local_scalar_dense.default:
            self.count += not hosts
        made = function(*args, **(kwargs or {}))
        if hosts:
            self.on_host.update(leaf.untyped_storage() for leaf in tree_leaves(made) if isinstance(leaf, Tensor))
        return made

    def _is_hosts(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self.on_host


def _asked_by_zclip() -> bool:
    """Whether a tensor made from nothing is of ZClip's making, which keeps its numbers on the host."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "torch":
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).startswith("zclip_ext")


def engines(stage: int, bf16: bool, width: int, layers: int) -> dict[str, Any]:
    import deepspeed

    made = {}
    for title in (PLAIN, OURS):
        torch.manual_seed(0)
        model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh())))
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": bf16},
            "steps_per_print": 10**9,
        }
        if title == OURS:
            config["zclip"] = {"enabled": True}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        made[title], *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return made


def step(engine: Any, batch: Tensor, waits: Waits | None = None) -> float:
    engine.backward(engine(batch).float().square().mean())
    start = time.perf_counter()
    if waits is None:
        engine.step()
    else:
        with waits:
            engine.step()
    return time.perf_counter() - start


def count_waits(engine: Any, batch: Tensor, steps: int) -> float:
    from zclip_ext.integrations.deepspeed import paths

    module: Any = paths
    waits, users = Waits(), module._on_host
    module._on_host = waits.copy_to_host
    try:
        for _ in range(steps):
            step(engine, batch, waits)
    finally:
        module._on_host = users
    return waits.count / steps


def measure(stage: int, bf16: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    made = engines(stage, bf16, arguments.width, arguments.layers)
    batch = torch.randn(4, arguments.width, dtype=torch.bfloat16 if bf16 else torch.float32)
    batch = batch.to(made[PLAIN].device)
    seconds: dict[str, list[float]] = {title: [] for title in made}
    for number in range(arguments.steps + 10):  # the first ones build state, and the ranks compare theirs
        order = list(made.items())
        for title, engine in order if number % 2 else order[::-1]:
            taken = step(engine, batch)
            if number >= 10:
                seconds[title].append(taken)
    found: dict[str, Any] = {"stage": stage, "dtype": "bf16" if bf16 else "fp32"}
    for title, engine in made.items():
        found[title] = {
            "ms": statistics.median(seconds[title]) * 1000,
            "waits": count_waits(engine, batch, 4),
        }
        engine.destroy()
    found["ratio"] = statistics.median(ours / plain for ours, plain in zip(seconds[OURS], seconds[PLAIN], strict=True))
    return found


def worker(arguments: argparse.Namespace) -> None:
    import deepspeed
    import deepspeed.ops

    import zclip_ext.integrations.deepspeed  # noqa: F401

    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled first
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    rows = [measure(stage, bf16, arguments) for stage in (1, 2, 3) for bf16 in (False, True)]
    if int(os.environ["RANK"]) == 0:
        print("RESULT", json.dumps(rows), flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| path | step without, ms | with, ms | ratio | waits a step without | with |", "|" + "---|" * 6]
    for row in rows:
        plain, ours = row[PLAIN], row[OURS]
        lines.append(
            f"| ZeRO {row['stage']}, {row['dtype']} | {plain['ms']:.2f} | {ours['ms']:.2f} | {row['ratio']:.2f} | "
            f"{plain['waits']:g} | {ours['waits']:g} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="timed steps of each engine (default: %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="of each layer (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="linear layers (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for the table and its figures as JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={arguments.processes}", __file__]
    options = [f"--{name}={getattr(arguments, name)}" for name in ("steps", "width", "layers")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, "--worker", *options], env=environment, capture_output=True, text=True, timeout=900
    )
    found = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        sys.exit(ended.stderr[-3000:])
    rows = json.loads(found[0].removeprefix("RESULT "))
    print(table(rows))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "deepspeed_step.md").write_text(table(rows) + "\n")
        (arguments.out / "deepspeed_step.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
