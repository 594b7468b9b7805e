"""Scripts that can't be edited: `python -m zclip_ext.launch`, alone and under the launchers of DeepSpeed and torch."""

import json
import sys

import pytest
from launchers import DEEPSPEED, TORCHRUN, free_port, run, seen_by

from zclip_ext import launch

LOOKING = """
import json, sys
x = 1
seen = {"name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0], "main": sys.modules["__main__"].x}
seen["hooked"] = hasattr(sys.modules["deepspeed"].DeepSpeedEngine.__init__, "_zclip_original")
print("SEEN " + json.dumps(seen))
"""

SPAWNING = """
import json, multiprocessing

class Result:
    pass

def work(_):
    return Result()

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        [result] = pool.map_async(work, [0]).get(60)
    print("SEEN " + json.dumps(type(result) is Result))
"""

TRAINING = """
import argparse, json, time
import deepspeed, torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
args = deepspeed.add_config_arguments(parser).parse_args()
given = args.local_rank  # deepspeed.initialize sets it
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
deepspeed.init_distributed()
model = torch.nn.Linear(4, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(args=args, model=model, optimizer=optimizer)
for step in range(12):
    size = 100.0 if step == 11 else 1 + step % 2 / 10
    engine.backward(engine(torch.full((2, 4), size)).mean())
    engine.step()
seen = {"rank": torch.distributed.get_rank(), "ranks": torch.distributed.get_world_size(), "given": given}
print("SEEN " + json.dumps({**seen, **engine.zclip.metrics()}), flush=True)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
time.sleep(0.5)  # threads of gloo still let go of tensors
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0,
    "zclip": {"enabled": True, "warmup_steps": 8},
}


@pytest.fixture
def script(tmp_path):
    """In a folder that is not the current one."""
    path = tmp_path / "scripts" / "look.py"
    path.parent.mkdir()
    path.write_text(LOOKING)
    return path


def test_a_file_runs_as_python_runs_it(tmp_path, script):
    arguments = ["--help", "-m", "--", "x y", ""]
    [seen] = seen_by(run("-m", "zclip_ext.launch", "--local_rank=1", "scripts/look.py", *arguments, folder=tmp_path))
    assert seen == {
        "name": "__main__",
        "file": str(script),
        "argv": [str(script), "--local_rank=1", *arguments],
        "path": str(script.parent),
        "main": 1,
        "hooked": True,
    }


def test_a_module_runs_as_python_runs_it(tmp_path, script):
    command = ["-m", "zclip_ext.launch", "--local-rank=0", "-m", "scripts.look", "--help"]
    [seen] = seen_by(run(*command, folder=tmp_path))
    assert seen == {
        "name": "__main__",
        "file": str(script),
        "argv": [str(script), "--local-rank=0", "--help"],
        "path": str(tmp_path),
        "main": 1,
        "hooked": True,
    }


def test_processes_that_a_script_spawns_send_back_its_classes(tmp_path):
    (tmp_path / "spawns.py").write_text(SPAWNING)
    assert seen_by(run("-m", "zclip_ext.launch", "spawns.py", folder=tmp_path)) == [True]


@pytest.mark.parametrize(("last", "code"), [("raise SystemExit(7)", 7), ("raise KeyError('its own')", 1)])
def test_exit_codes_and_exceptions_go_through(tmp_path, last, code):
    (tmp_path / "ends.py").write_text(last)
    result = run("-m", "zclip_ext.launch", "ends.py", folder=tmp_path)
    assert result.returncode == code
    assert ("KeyError: 'its own'" in result.stderr) == (code == 1)


def launched(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["launch.py", *arguments])
    launch.main()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "SCRIPT: got none, expected a Python file, or -m and the name of a module"),
        (["--local_rank=0"], "SCRIPT: got none"),
        (["-m"], "SCRIPT: got none"),
        (["none.py"], "SCRIPT: got 'none.py', expected a Python file that is there"),
        (["-m", "none"], "-m: got 'none', expected a module that can be run (it isn't there)"),
        (["-m", "none.such"], "-m: got 'none.such', expected a module that can be run (No module named 'none')"),
        (["-m", "json"], "-m: got 'json', expected a module that can be run (a package without __main__)"),
        (["--steps", "3", "none.py"], "unrecognized arguments: --steps"),
    ],
)
def test_what_can_not_run_is_named(monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        launched(monkeypatch, *arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_help(monkeypatch, capsys):
    with pytest.raises(SystemExit) as error:
        launched(monkeypatch, "--help")
    assert not error.value.code
    assert "deepspeed --module zclip_ext.launch train.py" in capsys.readouterr().out


def test_without_deepspeed_the_extra_is_named(monkeypatch, script):
    monkeypatch.delitem(sys.modules, "zclip_ext.integrations.deepspeed", raising=False)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match=r"pip install 'zclip-ext\[deepspeed\]'"):
        launched(monkeypatch, str(script))


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_an_unedited_script_clips_under_launchers(tmp_path, launcher):
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    if launcher == "deepspeed":
        command = [*DEEPSPEED, "--num_gpus", 2, "--master_port", free_port(), "--module", "zclip_ext.launch"]
    else:
        command = [*TORCHRUN, "-m", "zclip_ext.launch"]
    result = run(*command, "train.py", "--deepspeed_config", "ds.json", folder=tmp_path)
    ranks = sorted(seen_by(result), key=lambda seen: seen["rank"])
    assert [seen["given"] for seen in ranks] == ([0, 1] if launcher == "deepspeed" else [None, None])
    for seen in ranks:
        assert seen["ranks"] == 2
        assert seen["steps"] == 12
        assert (seen["spikes"], seen["clipped"]) == (1, 1)
        # The weights have no part in this gradient: two ranks' mean of 100, in four elements.
        assert seen["grad_norm"] == pytest.approx(200)
        assert 0 < seen["scale"] < 0.1
        assert seen["clipped_norm"] == pytest.approx(seen["threshold"])
    assert "ZClip clips (ZeRO 1, DeepSpeedZeroOptimizer)" in result.stdout
