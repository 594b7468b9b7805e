"""One rank: runs the named cases in order and prints what each returns as a line of JSON."""

import datetime
import importlib
import json
import sys
import traceback

import torch
import torch.distributed as dist

# By the first word of a case.
MODULES = {
    "accelerate": ["accelerate_cases"],
    "checkpoint": ["checkpoints"],
    "deepspeed": ["deepspeed_cases", "deepspeed_engines"],
}


def main():
    rank, folder, world, timeout, names = sys.argv[1:6]
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=int(rank),
        world_size=int(world),
        timeout=datetime.timedelta(seconds=float(timeout)),
    )
    for name in names.split("|"):
        function, *argument = name.split(":")
        try:
            modules = map(importlib.import_module, MODULES.get(function.split("_")[0], ["cases"]))
            report = next(getattr(module, function) for module in modules if hasattr(module, function))(*argument)
        except BaseException:  # some of torch's own are no Exceptions
            report = "error: " + traceback.format_exc(limit=-4)
        print("REPORT", json.dumps([name, report]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
