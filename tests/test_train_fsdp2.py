"""The FSDP2 example as a newcomer runs it: torchrun on two ranks, --resume on the same and another number of them."""

import shutil
from pathlib import Path

import pytest
import torch
from launchers import TORCHRUN, run
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from zclip_ext.plot import read_log

SCRIPT = Path(__file__).resolve().parent.parent / "integrations" / "train_fsdp2.py"
SMALL = ["--batch", "2", "--length", "16", "--bad-share", "0.2"]
STEPS, CUT = 34, 29  # past the warm-up of the statistics, so that the last steps are judged by them


def trained(out, world, *arguments):
    """What torchrun printed."""
    command = [*TORCHRUN[:-1], world, SCRIPT, "--out", out, *SMALL, *arguments]
    result = run(*command, folder=out.parent, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def states(out):
    """Everything in the last checkpoint, by path."""
    dcp_to_torch_save(out / f"step-{STEPS}", out / "whole.pt")
    return dict(flat(torch.load(out / "whole.pt", weights_only=True)))


def flat(value, path=""):
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return [(path, value)]
    return [item for name, part in value.items() for item in flat(part, f"{path}/{name}")]


def column(rows, name):
    return [row[name] for row in rows]


def near(rows, others, names=("grad_norm", "loss")):
    for name in names:
        assert column(rows, name) == pytest.approx(column(others, name), rel=1e-4), name


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Uninterrupted, on two ranks."""
    out = tmp_path_factory.mktemp("straight")
    return out, trained(out, 2, "--steps", str(STEPS))


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """Both halves on two ranks; and the first half's checkpoint as it was."""
    out, copy = tmp_path_factory.mktemp("halves") / "run", tmp_path_factory.mktemp("copy") / "run"
    trained(out, 2, "--steps", str(CUT))
    shutil.copytree(out, copy)
    trained(out, 2, "--steps", str(STEPS), "--resume")
    return out, copy


def test_a_run_logs_and_reports(straight):
    out, output = straight
    rows = read_log(out / "log.jsonl")
    assert column(rows, "step") == list(range(STEPS))
    assert set(rows[0]) == {
        *("step", "bad", "loss", "grad_norm", "clipped_norm", "spike_level", "threshold", "z_score", "scale"),
        "is_spike",
    }
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["z_score"] != 0
    assert f"step {STEPS - 1}  loss" in output
    assert f"steps {STEPS}, samples {STEPS}" in output


def test_a_resumed_run_is_the_same_run(straight, halves):
    assert read_log(halves[0] / "log.jsonl") == read_log(straight[0] / "log.jsonl")
    first, second = states(halves[0]), states(straight[0])
    assert first.keys() == second.keys()
    assert any("zclip_mean" in name for name in first)
    for name, value in first.items():
        assert torch.equal(value, second[name]) if torch.is_tensor(value) else value == second[name], name


def test_one_rank_goes_on_from_the_checkpoint_of_two(straight, halves):
    copy = halves[1]
    trained(copy, 1, "--steps", str(STEPS), "--resume")
    rows, wanted = read_log(copy / "log.jsonl"), read_log(straight[0] / "log.jsonl")
    assert rows[:CUT] == wanted[:CUT]
    near(rows, wanted)
    # It goes on with the same statistics: fresh ones would judge by none.
    assert column(rows, "z_score")[CUT:] == pytest.approx(column(wanted, "z_score")[CUT:], rel=1e-3, abs=1e-3)


def test_the_number_of_ranks_does_not_matter(straight, tmp_path):
    trained(tmp_path, 1, "--steps", str(STEPS))
    near(read_log(tmp_path / "log.jsonl"), read_log(straight[0] / "log.jsonl"))


def alone(*arguments, **environment):
    """One rank without torchrun: enough for what is refused before ranks meet."""
    return run(SCRIPT, *arguments, folder=SCRIPT.parent, timeout=60, **environment)


def test_a_checkpoint_of_other_settings_is_refused(straight):
    arguments = ["--out", str(straight[0]), *SMALL, "--resume"]
    result = alone(*arguments, "--lr", "0.5", RANK="0", WORLD_SIZE="2")
    assert result.returncode == 2
    assert "--lr: got 0.5, but" in result.stderr
    result = alone(*arguments, "--steps", "5", RANK="0", WORLD_SIZE="2")
    assert result.returncode == 2
    assert f"--steps: got 5, but {straight[0] / 'latest'} is at step {STEPS} already" in result.stderr
    assert len(read_log(straight[0] / "log.jsonl")) == STEPS  # left as it was


@pytest.mark.parametrize(
    ("arguments", "ranks", "message"),
    [
        (["--steps", "0"], {}, "argument --steps: got '0', allowed is a whole number"),
        (["--batch", "3"], {"RANK": "0", "WORLD_SIZE": "2"}, "--batch: got 3, which can't be shared out evenly to 2"),
        ([], {}, "start it by torchrun"),
    ],
)
def test_bad_arguments_are_named(tmp_path, arguments, ranks, message):
    result = alone("--out", str(tmp_path), *arguments, **ranks)
    assert result.returncode == 2
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


def test_help():
    result = alone("--help")
    assert result.returncode == 0
    assert "--resume" in result.stdout
