"""The example for Transformers as a newcomer runs it: alone, and --resume."""

import json
import shutil
from pathlib import Path

from launchers import run

SCRIPT = Path(__file__).resolve().parent.parent / "integrations" / "train_transformers.py"
SMALL = ["--batch", "2", "--length", "16", "--print-every", "1"]
STEPS, CUT = 32, 28  # past the warm-up of the statistics


def trained(out, *arguments):
    ended = run(SCRIPT, "--out", out, *SMALL, *arguments, folder=out.parent, timeout=120)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [line for line in ended.stdout.splitlines() if line.startswith(("step ", "zclip:"))]


def statistics(out):
    saved = json.loads((out / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return saved["stateful_callbacks"]["ZClipCallback"]["attributes"]["statistics"]


def test_a_resumed_run_is_the_same_run(tmp_path):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    lines = trained(straight, "--steps", str(STEPS), "--checkpoint-every", str(CUT))
    shutil.copytree(straight / f"checkpoint-{CUT}", resumed / f"checkpoint-{CUT}")
    again = trained(resumed, "--steps", str(STEPS), "--resume")
    assert again == lines[CUT:]
    assert statistics(resumed) == statistics(straight)
    assert statistics(straight)["samples"] == STEPS
    assert len(lines) == STEPS + 1


def test_help_and_a_missing_checkpoint(tmp_path):
    for arguments, code, words in (
        (["--help"], 0, "--z-thresh"),
        (["--resume", "--out", tmp_path], 2, "no checkpoint in"),
    ):
        ended = run(SCRIPT, *arguments, folder=tmp_path, timeout=60)
        assert ended.returncode == code
        assert words in ended.stdout + ended.stderr
