"""Accelerate and Transformers' Trainer under DeepSpeed: the import and the "zclip" block are all that they need.

Two processes, started as a launcher does it; all cases run in one launch. The worker stands in tests/ranks.
"""

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch.distributed as dist

WORKER = Path(__file__).resolve().parent / "ranks" / "deepspeed_trainers.py"
WORLD = 2
STEPS, SAVED, SPIKE, NAN = 12, 6, 8, 10
ACCELERATE = [f"accelerate:{kind}" for kind in ("2", "3", "0", "2:accumulate", "2:json", "2:skip")]
TRAINER = ["trainer:2", "trainer:3:accumulate", "trainer:2:bf16", "trainer:2:json"]


def launch(cases, folder, timeout=240):
    """Reports by case: a list with what each rank returned. The store is this process's, as torchrun has it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "LOCAL_WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(WORKER.parent.parent.parent), os.environ.get("PYTHONPATH", "")]),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(WORLD),
    }
    outputs = [Path(folder, f"output-{rank}") for rank in range(WORLD)]
    errors = [Path(folder, f"errors-{rank}") for rank in range(WORLD)]
    processes, until = [], time.monotonic() + timeout
    try:
        for rank in range(WORLD):
            with outputs[rank].open("w") as output, errors[rank].open("w") as error:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(WORKER), str(folder), *cases],
                        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=output,
                        stderr=error,
                    )
                )
        for process in processes:
            process.wait(timeout=max(0.0, until - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    reports = {case: [f"error: {error.read_text()[-3000:]}" for error in errors] for case in cases}
    for rank, output in enumerate(outputs):
        for line in output.read_text().splitlines():
            if line.startswith("REPORT "):
                case, report = json.loads(line[len("REPORT ") :])
                reports[case][rank] = report
    return reports


@pytest.fixture(scope="module")
def reports():
    with tempfile.TemporaryDirectory() as folder:
        return launch(ACCELERATE + TRAINER, folder)


def of(reports, case):
    for rank, report in enumerate(reports[case]):
        assert not isinstance(report, str), f"rank {rank} of {case}: {report}"
    return reports[case]


def left_out(case):
    return [SPIKE, NAN] if case.endswith(":skip") else [NAN]


def exactly(value):
    """Bit for bit, and NaN equals NaN."""
    return json.dumps(value)


@pytest.mark.parametrize("case", ACCELERATE + TRAINER)
def test_one_decision_for_each_optimizer_step(reports, case):
    first, second = of(reports, case)
    assert exactly(first["steps"]) == exactly(second["steps"])
    assert first["state"] == second["state"]
    for report in (first, second):
        skipped = len(left_out(case))
        assert report["counts"] == {"steps": STEPS, "samples": STEPS - 1, "skipped": skipped, "nonfinite": 1}
        assert len(report["steps"]) == STEPS
        spike = report["steps"][SPIKE]
        assert spike["is_spike"]
        assert spike["left_out"] or spike["scale"] < 0.05
        assert [number for number, step in enumerate(report["steps"]) if step["skipped"]] == left_out(case)
        assert report["skipped_steps"] == skipped


@pytest.mark.parametrize("case", ACCELERATE + TRAINER)
def test_it_resumes_bit_for_bit(reports, case):
    for report in of(reports, case):
        resumed = report["resumed"]
        assert resumed.get("loaded", report["saved"]) == report["saved"]
        assert exactly(resumed["steps"]) == exactly(report["steps"][SAVED:])
        for name in ("state", "counts", "skipped_steps"):
            assert resumed[name] == report[name]
        assert report["same_weights"]


@pytest.mark.parametrize("case", ACCELERATE)
def test_accelerate_trains_as_one_process_does(reports, case):
    for report in of(reports, case):
        assert report["processes"] == WORLD
        for step, expected in zip(report["steps"], report["expected"], strict=True):
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6, nan_ok=True)
            assert step["scale"] == pytest.approx(expected["scale"], rel=1e-5)
            assert (step["is_spike"], step["left_out"]) == (expected["is_spike"], expected["left_out"])
        assert report["worst_weight"] < 1e-6


@pytest.mark.parametrize("case", ACCELERATE)
def test_clip_grad_norm_of_accelerate_clips_nothing_and_returns_the_norm(reports, case):
    for report in of(reports, case):
        for number, step in enumerate(report["steps"]):
            if number == NAN:
                assert not math.isfinite(step["returned"])
            else:
                assert step["returned"] == step["grad_norm"]


@pytest.mark.parametrize("case", ACCELERATE)
def test_a_step_that_is_left_out_holds_the_scheduler(reports, case):
    for report in of(reports, case):
        scheduled = [step["scheduled"] for step in report["steps"]]
        held = [number for number, (before, now) in enumerate(itertools.pairwise(scheduled), start=1) if now == before]
        assert held == left_out(case)


@pytest.mark.parametrize("case", TRAINER)
def test_trainer_logs_the_norm_before_it_is_clipped(reports, case):
    for report in of(reports, case):
        norms = [step["grad_norm"] for step in report["steps"]]
        assert not math.isfinite(report["logged"].pop(NAN))
        norms.pop(NAN)
        assert report["logged"] == norms


@pytest.mark.parametrize("case", ACCELERATE + TRAINER)
def test_a_gradient_clipping_that_auto_wrote_is_warned_of_once_for_each_engine(reports, case):
    superseded = [
        [text for text in report["warnings"] if text.startswith("gradient_clipping=1 in the DeepSpeed config")]
        for report in of(reports, case)
    ]
    assert [len(texts) for texts in superseded] == [2, 0]  # a run and one that resumes it, on the first rank
