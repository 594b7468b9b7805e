"""One rank of two nodes: trains, prints what it decided as a line of JSON, and goes on until an error ends it."""

import datetime
import json
import signal
import sys

import common
import torch
import torch.distributed as dist

from zclip_ext import ZClipOptimizer

STEPS = 40
SPIKE = 30


def training(layout):
    """Yields the norm and the decision of each step, as bits; one step has a bad batch."""
    optimizer = ZClipOptimizer(torch.optim.SGD(layout.parameters(), lr=0.02), model=layout.module, warmup_steps=10)
    step = 0
    while True:
        optimizer.zero_grad()
        common.backward(layout, step, 5.0 if step == SPIKE else 1.0)
        optimizer.step()
        result = optimizer.zclip.last
        decision = {name: float(getattr(result, name)).hex() for name in ("grad_norm", "threshold", "scale")}
        yield {**decision, "is_spike": bool(result.is_spike)}, optimizer
        step += 1


def main():
    signal.alarm(300)  # so that it doesn't outlive a test that was itself killed
    rank, address, timeout, name, *arguments = sys.argv[1:]
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}",
        rank=int(rank),
        world_size=4,
        timeout=datetime.timedelta(seconds=float(timeout)),
    )
    decisions = []
    for decision, optimizer in training(common.layout_of(name, *arguments)):
        decisions.append(decision)
        if len(decisions) == STEPS:
            optimizer.zclip.check_consistency()
            print("REPORT", json.dumps({"decisions": decisions, "state": common.bits(optimizer.zclip)}), flush=True)


if __name__ == "__main__":
    main()
