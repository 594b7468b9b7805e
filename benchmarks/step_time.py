"""How long one clip step takes, side by side with peers in one run: medians, ratios, a table, JSON and a bar chart.

    python benchmarks/step_time.py                # what the README quotes
    python benchmarks/step_time.py --quick        # smaller lists, a few seconds
    python benchmarks/step_time.py --device cuda  # a GPU, with lists of a size for one

"pure torch" is zclip_ext without its extension. Peers: torch.nn.utils.clip_grad_norm_ (foreach; on a GPU also tensor by
tensor), the authors' package (PyPI zclip 1.0.0) and on a GPU the norm of DeepSpeed, where they are installed, and the
floor, one read of the same bytes: on a GPU half the time of a copy of them. Each round runs every peer once, in turn,
so that noise of the machine hits all alike. On a GPU a round is several steps in a row, waited for at the end.
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
from rich.console import Console
from rich.table import Table
from torch import nn

import zclip_ext
from zclip_ext import ops

FOLDER = Path(__file__).resolve().parent
COMPILED, TORCH, CLIP, UPSTREAM, FLOOR = "zclip_ext", "pure torch", "clip_grad_norm_", "zclip 1.0.0", "one read"
SINGLE, DEEPSPEED = "tensor by tensor", "DeepSpeed's norm"
USUAL_NORM = 1.0
STEPS_IN_A_ROW = 10  # on a GPU, but for spikes, whose gradients are made anew, and for pure torch, whose step is long

# A transformer block of width 768 and 12 of them: 75.5 million parameters as a model's list has them.
BLOCK: list[tuple[int, ...]] = [(768, 768)] * 4 + [(3072, 768), (768, 2048)] + [(768,)] * 4
# The same of width 2048: with its embeddings and 16 of them a model of a billion.
LARGE_BLOCK: list[tuple[int, ...]] = [(2048, 2048)] * 4 + [(5632, 2048)] * 3 + [(2048,)] * 2
EMBEDDINGS: list[tuple[int, ...]] = [(32000, 2048)] * 2


class Case:
    """A list of parameters with gradients of a usual norm, and the ways to clip them."""

    def __init__(
        self, name: str, shapes: list[tuple[int, ...]], dtype: torch.dtype, *, spike: bool = False, device: str = "cpu"
    ) -> None:
        self.name = name
        self.spike = spike
        self.device = device
        count = sum(torch.Size(shape).numel() for shape in shapes)
        # Over one flat memory would be the best case for the reader: each tensor has its own, as after a backward.
        self.parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) for shape in shapes]
        value = USUAL_NORM / count**0.5
        self.gradients = [torch.full(shape, value, dtype=dtype, device=device) for shape in shapes]
        self.bytes = count * self.gradients[0].element_size()
        self.model = nn.Module()
        self.model.everything = nn.ParameterList(self.parameters)
        self.flat = torch.zeros(-(-self.bytes // 8), dtype=torch.int64, device=device)
        self.copy = torch.empty_like(self.flat) if device == "cuda" else None

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
        ours = {name: zclip_ext.ZClip() for name in (COMPILED, TORCH)}
        usual = torch.full((), USUAL_NORM, dtype=torch.float64, device=self.device)
        for _ in range(25):
            for zclip in ours.values():
                zclip.decide(usual)

        def pure_torch() -> None:
            with without_extension():
                ours[TORCH].step(self.parameters)

        def clip(foreach: bool) -> Callable[[], Any]:
            return lambda: torch.nn.utils.clip_grad_norm_(self.parameters, USUAL_NORM, foreach=foreach)

        steps = {
            COMPILED: lambda: ours[COMPILED].step(self.parameters),
            TORCH: pure_torch,
            CLIP: clip(True),
            **upstream(self),
        }
        if self.copy is None:
            read = floor_reader()
            return {**steps, FLOOR: lambda: read(self.flat)}
        copy = self.copy
        return {**steps, SINGLE: clip(False), **deepspeed_norm(self), FLOOR: lambda: copy.copy_(self.flat)}


def upstream(case: Case) -> dict[str, Callable[[], Any]]:
    """The authors' package, where it is installed."""
    try:
        import zclip
    except ImportError:
        return {}
    theirs = zclip.ZClip(max_grad_norm=None)
    theirs.buffer.extend([USUAL_NORM] * 25)
    theirs._initialize_ema()
    return {UPSTREAM: lambda: theirs.step(case.model)}


def deepspeed_norm(case: Case) -> dict[str, Callable[[], Any]]:
    """DeepSpeed's way to the norm of a list, where it is installed: no scaling."""
    try:
        from deepspeed.runtime.utils import get_global_norm_of_tensors
    except ImportError:
        return {}
    return {DEEPSPEED: lambda: get_global_norm_of_tensors([p.grad for p in case.parameters])}


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
    """Bytes by which one step of ours raises the peak of what is in use, where the system tells it."""
    zclip = zclip_ext.ZClip()
    zclip.step(case.parameters)
    if case.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        zclip.step(case.parameters)
        return torch.cuda.max_memory_allocated() - allocated
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not os.access(clear, os.W_OK):
        return None

    def kilobytes(field: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field))

    clear.write_text("5")  # the peak starts again at what is used now
    before = kilobytes("VmRSS")
    zclip.step(case.parameters)
    return max(0, kilobytes("VmHWM") - before) * 1024


def seconds_of(name: str, step: Callable[[], Any], case: Case) -> float:
    case.prepare()
    on_gpu = case.device == "cuda"
    repeats = STEPS_IN_A_ROW if on_gpu and not case.spike and name != TORCH else 1
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Median seconds of each peer."""
    steps = case.steps()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds + 2):
        for name, step in steps.items():
            taken = seconds_of(name, step, case)
            if index >= 2:  # the first rounds warm up
                seconds[name].append(taken)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    if case.copy is not None:
        medians[FLOOR] /= 2  # a copy reads and writes
    return medians


def cases(quick: bool, device: str) -> Iterator[Case]:
    blocks, many, few = (1, 500, 200) if quick else (12, 5000, 2000)
    model, name = BLOCK * blocks, f"{elements(BLOCK * blocks) / 1e6:.0f}M"
    if device == "cuda":
        large = LARGE_BLOCK * (2 if quick else 16) + EMBEDDINGS
        millions = f"{elements(large) / 1e6:.0f}M"
        yield Case(f"{millions}, bf16", large, torch.bfloat16, device=device)
        yield Case(f"{millions}, bf16, spike", large, torch.bfloat16, spike=True, device=device)
        yield Case("300 x 1024, bf16", [(1024,)] * 300, torch.bfloat16, device=device)
        yield Case("1000 x 1024, fp32", [(1024,)] * 1000, torch.float32, device=device)
        yield Case(f"{name}, fp32", model, torch.float32, device=device)
        return
    yield Case(f"{name}, fp32", model, torch.float32)
    yield Case(f"{name}, bf16", model, torch.bfloat16)
    yield Case(f"{many} x 1, fp32", [(1,)] * many, torch.float32)
    yield Case(f"{few} x 1024, fp32", [(1024,)] * few, torch.float32)
    yield Case(f"{name}, fp32, spike", model, torch.float32, spike=True)


def elements(shapes: list[tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def table_of(results: list[dict[str, Any]]) -> Table:
    table = Table(title="One clip step: median milliseconds (times clip_grad_norm_)")
    table.add_column("gradients")
    for name in results[0]["seconds"]:
        table.add_column(name, justify="right")
    table.add_column("one read / zclip_ext", justify="right")
    table.add_column("extra memory", justify="right")
    for row in results:
        base = row["seconds"][CLIP]
        cells = [f"{seconds * 1e3:.3g} ({seconds / base:.2f})" for seconds in row["seconds"].values()]
        memory = row["extra_bytes"]
        share = f"{row['seconds'][FLOOR] / row['seconds'][COMPILED]:.2f}"
        table.add_row(row["case"], *cells, share, "?" if memory is None else f"{memory / 1024:.0f} KiB")
    return table


def draw(results: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    colors = {COMPILED: "#0072b2", TORCH: "#56b4e9", CLIP: "#999999", UPSTREAM: "#d55e00", FLOOR: "#000000"}
    colors |= {SINGLE: "#cccccc", DEEPSPEED: "#009e73"}
    peers = list(results[0]["seconds"])
    width = 0.8 / len(peers)
    for index, name in enumerate(peers):
        ratios = [row["seconds"][name] / row["seconds"][CLIP] for row in results]
        places = [place + (index - (len(peers) - 1) / 2) * width for place in range(len(results))]
        bars = axes.bar(places, ratios, width, label=name, color=colors[name])
        axes.bar_label(bars, fmt="%.2f", fontsize=7, rotation=90, padding=2)
    axes.set_xticks(range(len(results)), [row["case"] for row in results])
    axes.set_yscale("log")
    axes.set_ylim(top=axes.get_ylim()[1] * 3)
    axes.axhline(1.0, color="#999999", linewidth=0.8, zorder=0)
    axes.set_ylabel("time of one clip step,\ntimes clip_grad_norm_ (lower is better)")
    axes.legend(ncols=len(peers), fontsize=8, loc="upper center", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller lists and fewer rounds")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the gradients are")
    parser.add_argument("--rounds", type=int, help="how often each peer is timed (default 31, quick: 5)")
    parser.add_argument("--out", type=Path, default=FOLDER / "results", help="folder for the table, JSON and chart")
    arguments = parser.parse_args()
    rounds = arguments.rounds if arguments.rounds is not None else 5 if arguments.quick else 31
    if rounds < 1:
        parser.error(f"argument --rounds: got {rounds}, allowed is a whole number of at least 1")
    device = arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: got 'cuda', but torch sees no GPU")
    if zclip_ext.backend(device) != "compiled":
        parser.error("the extension is not there to be measured; see the warning above")
    # The same gradients are clipped again and again here, on purpose.
    warnings.filterwarnings("ignore", category=zclip_ext.ZClipWarning)
    console = Console(record=True)
    results: list[dict[str, Any]] = []
    console.width = max(console.width, 150)
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    report = {
        "machine": {"cores": os.cpu_count(), "architecture": platform.machine(), "gpu": gpu},
        "versions": {
            "torch": torch.__version__,
            "zclip_ext": zclip_ext.__version__,
            "python": platform.python_version(),
        },
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "results": results,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / ("step_time" if device == "cpu" else "step_time_cuda")
    for case in cases(arguments.quick, device):
        with console.status(case.name):
            seconds = measure(case, rounds)
            results.append(
                {"case": case.name, "seconds": seconds, "bytes": case.bytes, "extra_bytes": extra_memory(case)}
            )
        path.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")  # one that is ended keeps what it has
    console.print(table_of(results))
    path.with_suffix(".txt").write_text(console.export_text())
    draw(results, path.with_suffix(".png"))
    console.print(f"wrote {path}.txt, .json and .png")


if __name__ == "__main__":
    main()
