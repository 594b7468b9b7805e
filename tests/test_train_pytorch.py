"""The demo's script as a newcomer runs it: a whole comparison, Ctrl-C, --resume to the same bits, and its errors."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from zclip_ext.plot import plot_runs, read_log

SCRIPT = Path(__file__).resolve().parent.parent / "integrations" / "train_pytorch.py"
SMALL = ["--batch", "2", "--length", "16", "--bad-share", "0.2"]
METHODS = ("none", "fixed", "zclip", "zclip-cap")


def start(out, *arguments):
    command = [sys.executable, str(SCRIPT), "--out", str(out), *SMALL, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def run(out, *arguments):
    process = start(out, *arguments)
    output, errors = process.communicate(timeout=240)
    return process.returncode, output, errors


def weights(path):
    return torch.load(path, weights_only=True)["model"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All four methods, uninterrupted."""
    out = tmp_path_factory.mktemp("whole")
    code, output, errors = run(out, "--steps", "70")
    assert code == 0, errors
    return out, output


def test_all_methods_log_report_and_draw(whole):
    out, output = whole
    for method in METHODS:
        rows = read_log(out / f"{method}.jsonl")
        assert [row["step"] for row in rows] == list(range(70))
        assert sum(row["bad"] for row in rows) > 0
        assert method in output
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    # The same data in the same order: the first step knows nothing of the method yet.
    assert len({json.dumps(read_log(out / f"{method}.jsonl")[0]["loss"]) for method in METHODS}) == 1
    fixed = read_log(out / "fixed.jsonl")
    assert all(row["clipped_norm"] <= 1.0 + 1e-6 for row in fixed)


@pytest.mark.parametrize("method", ["none", "zclip"])
@pytest.mark.parametrize("at", [13, 40])
def test_a_resumed_run_is_the_same_run(whole, tmp_path, method, at):
    assert run(tmp_path, "--method", method, "--steps", str(at))[0] == 0
    assert run(tmp_path, "--method", method, "--steps", "70", "--resume")[0] == 0
    assert read_log(tmp_path / f"{method}.jsonl") == read_log(whole[0] / f"{method}.jsonl")
    first, second = weights(tmp_path / f"{method}.pt"), weights(whole[0] / f"{method}.pt")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_ctrl_c_keeps_what_is_done(whole, tmp_path):
    process = start(tmp_path, "--method", "zclip", "--steps", "1000000", "--checkpoint-every", "1000000")
    log = tmp_path / "zclip.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.stat().st_size > 0):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "--resume" in output
    done = len(read_log(log))
    assert done > 0
    assert (tmp_path / "demo.png").exists()
    assert torch.load(tmp_path / "zclip.pt", weights_only=True)["step"] == done
    assert read_log(log)[:70] == read_log(whole[0] / "zclip.jsonl")[:done]


def test_a_checkpoint_of_other_settings_is_refused(whole):
    code, _, errors = run(whole[0], "--steps", "80", "--resume", "--lr", "0.5")
    assert code == 2
    assert "--lr: got 0.5, but" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: got '0', allowed is a whole number"),
        (["--bad-share", "1.5"], "argument --bad-share: got '1.5', allowed is a number in [0, 1)"),
        (["--device", "nowhere"], "argument --device: got 'nowhere'"),
        (["--method", "magic"], "argument --method: invalid choice: 'magic'"),
    ],
)
def test_bad_arguments_are_named(tmp_path, arguments, message):
    code, _, errors = run(tmp_path, *arguments)
    assert code == 2
    assert message in errors


def test_help():
    result = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    assert "--resume" in result.stdout


def test_a_picture_of_what_is_not_there_is_refused(tmp_path):
    row = {"step": 0, "loss": 1.0, "grad_norm": 1.0, "clipped_norm": 1.0, "spike_level": None, "is_spike": False}
    with pytest.raises(ValueError, match="focus: got 'b', allowed is a run in logs: 'a'"):
        plot_runs({"a": [row]}, tmp_path / "x.png", focus="b")
    with pytest.raises(ValueError, match=r"logs\['a'\]: has no rows"):
        plot_runs({"a": []}, tmp_path / "x.png", focus="a")
    with pytest.raises(ValueError, match=r"logs\['a'\]\[0\]: lacks the field 'loss'"):
        plot_runs({"a": [{"step": 0}]}, tmp_path / "x.png", focus="a")
    (tmp_path / "log.jsonl").write_text('{"step": 0}\nnonsense\n')
    with pytest.raises(ValueError, match="line 2"):
        read_log(tmp_path / "log.jsonl")
