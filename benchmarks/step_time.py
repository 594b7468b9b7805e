"""How long one clip step takes, side by side with peers in one run: medians, ratios, a table, JSON and a bar chart.

    python benchmarks/step_time.py                # what the README quotes
    python benchmarks/step_time.py --quick        # smaller lists, a few seconds

"pure torch" is zclip_ext without its extension. Peers: torch.nn.utils.clip_grad_norm_ (foreach), the authors' package
(PyPI zclip 1.0.0), and the floor, one read of the same bytes. Each round runs every peer once,
in turn, so that noise of the machine hits all alike.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import zclip as upstream
from rich.console import Console
from rich.table import Table
from torch import nn

import zclip_ext
from zclip_ext import ops

FOLDER = Path(__file__).resolve().parent
PEERS = COMPILED, TORCH, CLIP, UPSTREAM, FLOOR = "zclip_ext", "pure torch", "clip_grad_norm_", "zclip 1.0.0", "one read"
USUAL_NORM = 1.0

# A transformer block of width 768 and 12 of them: 75.5 million parameters as a model's list has them.
BLOCK: list[tuple[int, ...]] = [(768, 768)] * 4 + [(3072, 768), (768, 2048)] + [(768,)] * 4


class Case:
    """A list of parameters with gradients of a usual norm, and the ways to clip them."""

    def __init__(self, name: str, shapes: list[tuple[int, ...]], dtype: torch.dtype, *, spike: bool = False) -> None:
        self.name = name
        self.spike = spike
        count = sum(torch.Size(shape).numel() for shape in shapes)
        # Over one flat memory would be the best case for the reader: each tensor has its own, as after a backward.
        self.parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        self.gradients = [torch.full(shape, USUAL_NORM / count**0.5, dtype=dtype) for shape in shapes]
        self.bytes = count * self.gradients[0].element_size()
        self.model = nn.Module()
        self.model.everything = nn.ParameterList(self.parameters)
        self.flat = torch.zeros(-(-self.bytes // 8), dtype=torch.int64)

    def prepare(self) -> None:
        """Fresh gradients; ten times the usual norm where the case is a spike."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient.clone()
            elif self.spike:
                parameter.grad.copy_(gradient)
            if self.spike:
                parameter.grad.mul_(10)

    def steps(self) -> dict[str, Callable[[], Any]]:
        read = floor_reader()
        ours = {name: zclip_ext.ZClip() for name in (COMPILED, TORCH)}
        theirs = upstream.ZClip(max_grad_norm=None)
        for _ in range(25):
            for zclip in ours.values():
                zclip.decide(USUAL_NORM)
            theirs.buffer.append(USUAL_NORM)
        theirs._initialize_ema()

        def pure_torch() -> None:
            with without_extension():
                ours[TORCH].step(self.parameters)

        return {
            COMPILED: lambda: ours[COMPILED].step(self.parameters),
            TORCH: pure_torch,
            CLIP: lambda: torch.nn.utils.clip_grad_norm_(self.parameters, USUAL_NORM, foreach=True),
            UPSTREAM: lambda: theirs.step(self.model),
            FLOOR: lambda: read(self.flat),
        }


@contextmanager
def without_extension() -> Iterator[None]:
    extension, ops._compiled = ops._compiled, None
    try:
        yield
    finally:
        ops._compiled = extension


def floor_reader() -> Callable[[torch.Tensor], None]:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "floor.so"
        compiler = os.environ.get("CXX", "c++")
        flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, str(FOLDER / "floor.cpp"), "-o", str(library)], check=True, timeout=60)
        read_once = ctypes.CDLL(str(library)).read_once
    read_once.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    return lambda words: read_once(words.data_ptr(), words.numel(), torch.get_num_threads())


def extra_memory(case: Case) -> int | None:
    """Bytes by which one step of ours raises the process's peak, where the system tells it."""
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not os.access(clear, os.W_OK):
        return None

    def kilobytes(field: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field))

    zclip = zclip_ext.ZClip()
    zclip.step(case.parameters)
    clear.write_text("5")  # the peak starts again at what is used now
    before = kilobytes("VmRSS")
    zclip.step(case.parameters)
    return max(0, kilobytes("VmHWM") - before) * 1024


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Median seconds of each peer."""
    steps = case.steps()
    seconds: dict[str, list[float]] = {name: [] for name in PEERS}
    for index in range(rounds + 2):
        for name, step in steps.items():
            case.prepare()
            start = time.perf_counter()
            step()
            if index >= 2:  # the first rounds warm up
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def cases(quick: bool) -> Iterator[Case]:
    blocks, many, few = (1, 500, 200) if quick else (12, 5000, 2000)
    millions = f"{sum(torch.Size(shape).numel() for shape in BLOCK) * blocks / 1e6:.0f}M"
    yield Case(f"{millions}, fp32", BLOCK * blocks, torch.float32)
    yield Case(f"{millions}, bf16", BLOCK * blocks, torch.bfloat16)
    yield Case(f"{many} x 1, fp32", [(1,)] * many, torch.float32)
    yield Case(f"{few} x 1024, fp32", [(1024,)] * few, torch.float32)
    yield Case(f"{millions}, fp32, spike", BLOCK * blocks, torch.float32, spike=True)


def table_of(results: list[dict[str, Any]]) -> Table:
    table = Table(title="One clip step: median milliseconds (times clip_grad_norm_)")
    table.add_column("gradients")
    for name in PEERS:
        table.add_column(name, justify="right")
    table.add_column("extra memory", justify="right")
    for row in results:
        base = row["seconds"][CLIP]
        cells = [f"{row['seconds'][name] * 1e3:.2f} ({row['seconds'][name] / base:.2f})" for name in PEERS]
        memory = row["extra_bytes"]
        table.add_row(row["case"], *cells, "?" if memory is None else f"{memory / 1024:.0f} KiB")
    return table


def draw(results: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    colors = ["#0072b2", "#56b4e9", "#999999", "#d55e00", "#000000"]
    width = 0.8 / len(PEERS)
    for index, (name, color) in enumerate(zip(PEERS, colors, strict=True)):
        ratios = [row["seconds"][name] / row["seconds"][CLIP] for row in results]
        places = [place + (index - (len(PEERS) - 1) / 2) * width for place in range(len(results))]
        bars = axes.bar(places, ratios, width, label=name, color=color)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, rotation=90, padding=2)
    axes.set_xticks(range(len(results)), [row["case"] for row in results])
    axes.set_yscale("log")
    axes.set_ylim(top=axes.get_ylim()[1] * 3)
    axes.axhline(1.0, color="#999999", linewidth=0.8, zorder=0)
    axes.set_ylabel("time of one clip step,\ntimes clip_grad_norm_ (lower is better)")
    axes.legend(ncols=len(PEERS), fontsize=8, loc="upper center", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller lists and fewer rounds")
    parser.add_argument("--rounds", type=int, help="how often each peer is timed (default 31, quick: 5)")
    parser.add_argument("--out", type=Path, default=FOLDER / "results", help="folder for step_time.json and .png")
    arguments = parser.parse_args()
    rounds = arguments.rounds if arguments.rounds is not None else 5 if arguments.quick else 31
    if rounds < 1:
        parser.error(f"argument --rounds: got {rounds}, allowed is a whole number of at least 1")
    if zclip_ext.backend() != "compiled":
        parser.error("the extension is not there to be measured; see the warning above")
    # The same gradients are clipped again and again here, on purpose.
    warnings.filterwarnings("ignore", category=zclip_ext.ZClipWarning)
    console, results = Console(), []
    console.width = max(console.width, 120)
    for case in cases(arguments.quick):
        with console.status(case.name):
            seconds = measure(case, rounds)
            results.append(
                {"case": case.name, "seconds": seconds, "bytes": case.bytes, "extra_bytes": extra_memory(case)}
            )
    console.print(table_of(results))
    arguments.out.mkdir(parents=True, exist_ok=True)
    machine = {"cores": os.cpu_count(), "architecture": platform.machine(), "gpu": None}
    versions = {"torch": torch.__version__, "zclip_ext": zclip_ext.__version__, "python": platform.python_version()}
    report = {
        "machine": machine,
        "versions": versions,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "results": results,
    }
    (arguments.out / "step_time.json").write_text(json.dumps(report, indent=2) + "\n")
    draw(results, arguments.out / "step_time.png")
    console.print(f"wrote {arguments.out / 'step_time.json'} and step_time.png")


if __name__ == "__main__":
    main()
