"""Starts worker processes on this machine and collects what each of them reports.

One launch runs many cases, since starting and importing dominate. Rendezvous is a file; every wait has a time-out.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def start(cases, world, folder, *, timeout=60, extra=()):
    """The processes of one launch, each running `cases` (names, in order) as one rank."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # What a launcher sets, and DeepSpeed asks for. Where a process group is there nobody meets at the port.
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "PYTHONPATH": os.pathsep.join([str(FOLDER), str(FOLDER.parent.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [
        sys.executable,
        str(FOLDER / "worker.py"),
        str(folder),
        str(world),
        str(timeout),
        "|".join(cases),
        *extra,
    ]
    return [
        subprocess.Popen(
            [*command[:2], str(rank), *command[2:]],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


def run(cases, world, *, timeout=240):
    """Reports by case: a list with what each rank returned, or an "error: ..." text."""
    with tempfile.TemporaryDirectory() as folder:
        processes = start(cases, world, folder)
        try:
            # All at once: a rank whose pipe is full would hold up the others.
            with ThreadPoolExecutor(world) as readers:
                outputs = list(readers.map(lambda process: process.communicate(timeout=timeout), processes))
        finally:
            for process in processes:
                process.kill()
        reports = {}
        for rank, (out, error) in enumerate(outputs):
            lines = [json.loads(line[len("REPORT ") :]) for line in out.splitlines() if line.startswith("REPORT ")]
            for case, report in lines:
                reports.setdefault(case, [None] * world)[rank] = report
            if len(lines) < len(cases):
                reports.setdefault(cases[len(lines)], [None] * world)[rank] = (
                    f"error: the process ended: {error[-3000:]}"
                )
    return reports
