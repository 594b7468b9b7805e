"""Runs scripts as users do, by this Python or by a launcher, and ends all of their processes when time is up."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys

DEEPSPEED = ["-m", "deepspeed.launcher.runner"]  # what `deepspeed` runs
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(*arguments, folder, timeout=100, **environment):
    """Runs this Python, and ends all of its processes when time is up."""
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **environment},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # at which launchers end their ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=20)
            os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def reports(result):
    """What processes reported, whether they ended well or not."""
    # Ranks share the pipe: the ends of lines may come late.
    return [json.JSONDecoder().raw_decode(report)[0] for report in result.stdout.split("SEEN ")[1:]]


def seen_by(result):
    """What each process reported."""
    assert result.returncode == 0, result.stdout + result.stderr
    return reports(result)
