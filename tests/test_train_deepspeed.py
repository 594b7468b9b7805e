"""The DeepSpeed example as a newcomer runs it: by each launcher, by plain python, and --resume after --save."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from launchers import DEEPSPEED, TORCHRUN, free_port, run, seen_by

SCRIPT = Path(__file__).resolve().parent.parent / "integrations" / "train_deepspeed.py"
SMALL = ["--batch", "2", "--length", "16", "--print-every", "1"]
STEPS, CUT = 14, 11  # past the warm-up of the statistics, so that the last steps are judged by them
CAP = 0.5  # under all norms of so few steps: each is clipped

# Many command lines in one process, since imports dominate.
REFUSING = f"""
import contextlib, io, json, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import train_deepspeed
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["train_deepspeed.py", *arguments]
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            train_deepspeed.main()
        except SystemExit as error:
            code = error.code
    print("SEEN " + json.dumps([code, errors.getvalue()]), flush=True)
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The one beside the script, with a short warm-up and a cap."""
    changed = json.loads(SCRIPT.with_name("ds_zclip_zero3.json").read_text())
    changed["zclip"] |= {"warmup_steps": 8, "max_grad_norm": CAP}
    path = tmp_path_factory.mktemp("config") / "ds.json"
    path.write_text(json.dumps(changed))
    return path


def trained(folder, config, *arguments, launcher=()):
    """The lines that rank 0 printed."""
    result = run(*launcher, SCRIPT, *SMALL, "--deepspeed_config", config, "--save", folder, *arguments, folder=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return [line for line in result.stdout.splitlines() if line.startswith(("ZeRO ", "step ", "zclip:"))]


def statistics(folder, step):
    """What each rank's part of a checkpoint holds of ZClip."""
    files = sorted((folder / f"step-{step}").glob("*model_states.pt"))
    return [torch.load(file, weights_only=False)["zclip_ext"] for file in files]


@pytest.fixture(scope="module")
def straight(tmp_path_factory, config):
    """Uninterrupted, on two ranks that `deepspeed` starts."""
    folder = tmp_path_factory.mktemp("straight")
    launcher = [*DEEPSPEED, "--num_gpus", 2, "--master_port", free_port()]
    arguments = ["--steps", STEPS, "--stage", 3, "--checkpoint-every", CUT]
    return folder, trained(folder, config, *arguments, launcher=launcher)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, config, straight):
    """What goes on from the checkpoint before the last, as if no more had been run, on two ranks of `torchrun`."""
    folder = tmp_path_factory.mktemp("resumed")
    shutil.copytree(straight[0] / f"step-{CUT}", folder / f"step-{CUT}")
    (folder / "latest").write_text(f"step-{CUT}")
    return folder, trained(folder, config, "--steps", STEPS, "--resume", folder, launcher=TORCHRUN)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, config):
    """One process that plain python starts."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, trained(folder, config, "--steps", 2, "--stage", 1, "--bf16")


def test_a_run_reports_and_clips(straight):
    folder, lines = straight
    assert lines[0].startswith("ZeRO 3, ranks: 2, step 0: ZClip(")
    assert [line.split()[1] for line in lines[1:-1]] == [str(step) for step in range(STEPS)]
    assert f"steps {STEPS}, samples {STEPS}" in lines[-1]
    first, second = statistics(folder, STEPS)
    assert first == second
    assert first["last_scale"] * first["last_grad_norm"] == pytest.approx(CAP)
    assert sum("spike" in line for line in lines[1:-1]) == first["spikes"]
    assert not any("scale 1.000" in line for line in lines)


def test_a_resumed_run_is_the_same_run(straight, resumed):
    folder, lines = resumed
    assert lines[0] == straight[1][0].replace("step 0:", f"step {CUT}:")
    assert lines[1:] == straight[1][CUT + 1 :]
    assert statistics(folder, STEPS) == statistics(straight[0], STEPS)


def test_one_process_needs_no_launcher(alone):
    folder, lines = alone
    assert lines[0].startswith("ZeRO 1, ranks: 1, step 0: ZClip(")
    assert "steps 2, samples 2" in lines[-1]
    assert [state["steps"] for state in statistics(folder, 2)] == [2]


def test_what_does_not_go_together_is_named(alone, config, tmp_path):
    accumulating, without = tmp_path / "accumulating.json", tmp_path / "without.json"
    accumulating.write_text(json.dumps({"gradient_accumulation_steps": 2}))
    without.write_text(json.dumps({"train_batch_size": 2}))
    resume = [*SMALL, "--deepspeed_config", str(config), "--stage", "1", "--bf16", "--resume"]
    cases = [
        (["--stage", "4"], "argument --stage: got '4', allowed is a whole number from 0 to 3"),
        (["--deepspeed_config", "none.json"], "--deepspeed_config: [Errno 2] No such file or directory: 'none.json'"),
        (["--deepspeed_config", str(SCRIPT)], f"--deepspeed_config: {SCRIPT}: Extra data: line 1"),
        (["--deepspeed_config", str(accumulating)], "--batch: not given, and train_batch_size in"),
        (["--deepspeed_config", str(accumulating), "--batch", "3"], "--batch: got 3, which can't be shared out evenly"),
        (["--deepspeed_config", str(without)], f'--deepspeed_config: {without} lacks "zclip": {{"enabled": true}}'),
        ([*resume, str(tmp_path)], f"--resume: no DeepSpeed checkpoint in {tmp_path}"),
        ([*resume, str(alone[0]), "--seed", "9"], "--seed: got 9, but"),
        ([*resume, str(alone[0]), "--steps", "1"], "--steps: got 1, but"),
    ]
    refused = seen_by(run("-c", REFUSING, json.dumps([arguments for arguments, _ in cases]), folder=tmp_path))
    for (arguments, message), (code, errors) in zip(cases, refused, strict=True):
        assert code == 2, arguments
        assert message in errors


def test_help(tmp_path):
    result = run(SCRIPT, "--help", folder=tmp_path)
    assert result.returncode == 0
    assert "--resume" in result.stdout
