"""Two nodes with two ranks each: network namespaces of this machine, joined by a virtual cable.

The ranks train one model split over both nodes. Then the second node is lost: its processes are killed, or its cable is
unplugged. Every wait has a time-out. Namespaces need root and `ip`.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "ranks"))
import launch
import layouts
import node

ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLE = "cable"
NUMBERS = itertools.count()
START_TIMEOUT = 90
GROUP_TIMEOUT = 20
# One wait of the group, and as much again for a busy machine to notice, unwind and end the process.
END_TIMEOUT = 2 * GROUP_TIMEOUT

# FSDP2 over all ranks; and with the shards on a node and replicas across, as clusters do. The second is not for the
# cable: a mesh of several dimensions makes groups of its own, and these have torch's time-out of 30 minutes.
LAYOUTS = {"unplugged": "fsdp2", "killed": "fsdp2:hsdp"}
SURVIVORS = {"unplugged": [0, 1, 2, 3], "killed": [0, 1]}


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=10)


def must(done):
    assert done.returncode == 0, f"{' '.join(done.args)}: {done.stderr}"


def skip(reason):
    reason = f"no network namespaces on this machine: {reason}"
    warnings.warn(reason, stacklevel=2)  # pytest shows warnings without being asked, reasons for a skip it doesn't
    pytest.skip(reason)


@contextlib.contextmanager
def two_nodes():
    """The names of two connected namespaces."""
    if shutil.which("ip") is None:
        skip("`ip` is missing, install iproute2")
    nodes = [f"zclip-{os.getpid()}-{next(NUMBERS)}" for _ in ADDRESSES]
    try:
        for name in nodes:
            made = ip("netns", "add", name)
            if made.returncode != 0:
                skip(made.stderr.strip())
        must(ip("-n", nodes[0], "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", nodes[1]))
        for name, address in zip(nodes, ADDRESSES, strict=True):
            must(ip("-n", name, "address", "add", f"{address}/24", "dev", CABLE))
            must(ip("-n", name, "link", "set", "lo", "up"))
            must(ip("-n", name, "link", "set", CABLE, "up"))
        yield nodes
    finally:
        for name in nodes:
            ip("netns", "del", name)


class Process:
    """A rank on a node. `ip netns exec` becomes the worker, so that the process id is the worker's."""

    def __init__(self, rank, on_node, layout, folder):
        self.rank, self.code = rank, None
        self.files = [folder / f"{rank}.{name}" for name in ("out", "error")]
        script = str(launch.FOLDER / "node.py")
        worker = [sys.executable, script, str(rank), f"{ADDRESSES[0]}:29500", str(GROUP_TIMEOUT), *layout.split(":")]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": CABLE,
            "PYTHONPATH": os.pathsep.join([str(launch.FOLDER.parent.parent), os.environ.get("PYTHONPATH", "")]),
        }
        out, error = (file.open("w") for file in self.files)
        with out, error:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", on_node, *worker], env=environment, stdout=out, stderr=error
            )

    def report(self):
        """What it printed after its last step, None before that."""
        lines = self.files[0].read_text().splitlines(keepends=True)
        return next((json.loads(line[len("REPORT ") :]) for line in lines if line.endswith("}\n")), None)

    def error(self):
        return self.files[1].read_text()[-3000:]


def wait_until_trained(ranks):
    give_up = time.monotonic() + START_TIMEOUT
    while True:
        trained = all(rank.report() for rank in ranks)
        for rank in ranks:
            assert rank.process.poll() is None, f"rank {rank.rank} ended: {rank.error()}"
        if trained:
            return
        assert time.monotonic() < give_up, f"not trained after {START_TIMEOUT} s: {[rank.error() for rank in ranks]}"
        time.sleep(0.1)


def wait_until_ended(ranks):
    """Notes the exit codes; None of one that still runs at the time-out."""
    give_up = time.monotonic() + END_TIMEOUT
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < give_up:
        time.sleep(0.1)
    for rank in ranks:
        rank.code = rank.process.poll()


@contextlib.contextmanager
def training(layout, folder):
    """Two nodes and their four ranks, which have reported and go on training."""
    ranks = []
    with two_nodes() as nodes:
        try:
            for rank in range(4):
                ranks.append(Process(rank, nodes[rank // 2], layout, folder))
            wait_until_trained(ranks)
            yield nodes, ranks
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.wait(timeout=10)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The ranks by how the second node was lost. One run ends while the other waits for the group's time-out."""
    with training(LAYOUTS["unplugged"], tmp_path_factory.mktemp("unplugged")) as (nodes, unplugged):
        must(ip("-n", nodes[1], "link", "set", CABLE, "down"))
        with training(LAYOUTS["killed"], tmp_path_factory.mktemp("killed")) as (_, killed):
            for rank in killed[2:]:
                rank.process.send_signal(signal.SIGKILL)
            wait_until_ended(killed)
        wait_until_ended(unplugged)
    return {"unplugged": unplugged, "killed": killed}


@pytest.mark.parametrize("loss", LAYOUTS)
def test_both_nodes_find_the_spike_and_decide_alike(runs, loss):
    first, *others = [rank.report() for rank in runs[loss]]
    assert others == [first] * 3  # norms, thresholds, scales and the state, bit for bit
    spike = first["decisions"][node.SPIKE]
    assert spike["is_spike"]
    assert float.fromhex(spike["scale"]) < 1
    assert float.fromhex(spike["grad_norm"]) > float.fromhex(spike["threshold"])


@pytest.mark.parametrize("loss", LAYOUTS)
def test_norms_and_spikes_are_those_of_the_whole_model_on_one_machine(runs, loss):
    alone = layouts.Layout(layouts.Net(), feed=lambda batch: batch)
    decisions = runs[loss][0].report()["decisions"]
    for step, (expected, _) in enumerate(itertools.islice(node.training(alone), node.STEPS)):
        # Float32 rounding of gradients and weights: the ranks add up in another order than one process does.
        norm = float.fromhex(expected["grad_norm"])
        assert float.fromhex(decisions[step]["grad_norm"]) == pytest.approx(norm, rel=1e-5), f"step {step}"
        assert decisions[step]["is_spike"] == expected["is_spike"], f"step {step}"


@pytest.mark.parametrize("loss", LAYOUTS)
def test_a_lost_node_leaves_the_others_with_an_error(runs, loss):
    for number in SURVIVORS[loss]:
        rank = runs[loss][number]
        assert rank.code is not None, f"rank {number} hangs"
        assert rank.code == 1, f"rank {number}: {rank.error()}"
        assert re.search(r"Error: .*gloo", rank.error()), f"rank {number}: {rank.error()}"
