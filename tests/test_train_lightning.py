"""The Lightning example as a newcomer runs it: alone, resumed, on two ranks, and against the demo without Lightning."""

import csv
import json
from pathlib import Path

import pytest
import torch
from launchers import run, seen_by

from zclip_ext.plot import read_log

SCRIPT = Path(__file__).resolve().parent.parent / "integrations" / "train_lightning.py"
SMALL = ["--batch", "2", "--length", "16", "--bad-share", "0.2"]
STEPS, CUT = 34, 29  # past the warm-up of the statistics, so that the last steps are judged by them

# Many command lines in one process, since imports dominate.
MANY = f"""
import contextlib, io, json, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import train_lightning
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["train_lightning.py", *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        try:
            train_lightning.main()
        except SystemExit as error:
            code = error.code
    print("SEEN " + json.dumps([code, printed.getvalue()]), flush=True)
"""


def trained(out, *arguments):
    """What was logged, by step, and what was printed."""
    result = run(SCRIPT, "--out", out, *SMALL, *arguments, folder=out.parent, timeout=120)
    assert result.returncode == 0, result.stderr
    newest = max((out / "log").glob("version_*"), key=lambda folder: int(folder.name.split("_")[1]))
    with (newest / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {int(row["step"]): {name: float(value) for name, value in row.items()} for row in rows}, result.stdout


def flat(value, path=""):
    """Everything in a checkpoint, by path, but for the paths of files in it."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return [(path, value)]
    return [
        item for name, part in value.items() if "Checkpoint" not in str(name) for item in flat(part, f"{path}/{name}")
    ]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Uninterrupted."""
    out = tmp_path_factory.mktemp("straight")
    return out, *trained(out, "--steps", STEPS)


def test_a_run_logs_and_reports(straight):
    _, rows, output = straight
    assert sorted(rows) == list(range(STEPS))
    assert rows[STEPS - 1]["loss"] < rows[0]["loss"]
    assert rows[STEPS - 1]["zclip/z_score"] != 0
    assert f"steps {STEPS}, samples {STEPS}" in output


def test_the_norms_are_those_of_the_demo_without_lightning(straight, tmp_path):
    script = SCRIPT.with_name("train_pytorch.py")
    arguments = ["--method", "zclip", "--steps", STEPS, "--out", tmp_path, *SMALL]
    result = run(script, *arguments, folder=tmp_path, timeout=120)
    assert result.returncode == 0, result.stderr
    for row, wanted in zip(straight[1].values(), read_log(tmp_path / "zclip.jsonl"), strict=True):
        for name in ("grad_norm", "clipped_norm", "z_score", "scale"):
            assert row[f"zclip/{name}"] == pytest.approx(wanted[name], rel=1e-5, abs=1e-5), (row["step"], name)


def test_a_resumed_run_is_the_same_run(straight, tmp_path):
    trained(tmp_path, "--steps", CUT)
    rows, _ = trained(tmp_path, "--steps", STEPS, "--resume")
    for step in range(CUT, STEPS):
        assert {**rows[step], "epoch": 0} == {**straight[1][step], "epoch": 0}
    first, second = (dict(flat(torch.load(out / "last.ckpt", weights_only=True))) for out in (straight[0], tmp_path))
    statistics = [name for name in first if name.endswith("/optimizers/0/mean")]
    assert len(statistics) == 1
    for name in [*statistics, *(name for name in first if name.startswith(("/state_dict", "/optimizer_states")))]:
        value, other = first[name], second[name]
        assert torch.equal(value, other) if torch.is_tensor(value) else value == other, name


def test_two_ranks(straight, tmp_path):
    rows, output = trained(tmp_path, "--steps", 5, "--devices", 2)
    assert output.count("zclip:") == 1
    for step, row in rows.items():
        for name in ("loss", "zclip/grad_norm"):
            assert row[name] == pytest.approx(straight[1][step][name], rel=1e-4), (step, name)


def test_what_does_not_go_together_is_named(straight, tmp_path):
    resume = ["--out", str(straight[0]), *SMALL, "--resume"]
    cases = [
        ([*resume, "--lr", "0.5"], 2, "--lr: got 0.5, but"),
        ([*resume, "--steps", "5"], 2, f"last.ckpt is at step {STEPS} already"),
        (["--out", str(tmp_path), "--batch", "3", "--devices", "2"], 2, "--batch: got 3, which can't be shared out"),
        (["--steps", "0"], 2, "argument --steps: got '0', allowed is a whole number"),
        (["--help"], 0, "--resume"),
    ]
    seen = seen_by(run("-c", MANY, json.dumps([arguments for arguments, *_ in cases]), folder=tmp_path, timeout=120))
    for (arguments, code, message), (exit_code, printed) in zip(cases, seen, strict=True):
        assert (exit_code or 0) == code, arguments
        assert message in printed, arguments
