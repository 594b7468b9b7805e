"""What ZClip does on each of DeepSpeed's paths, as a table in docs/deepspeed.md.

    python benchmarks/deepspeed_support.py            # prints the table
    python benchmarks/deepspeed_support.py --write    # and puts it into docs/deepspeed.md

Each path trains the same model on 2 ranks (gloo, this machine) for 14 steps, with spikes of 40x and 300x and one
gradient that isn't finite on one rank, and is held against one process without DeepSpeed: the largest difference of a
weight after any step. Then a second engine resumes from a checkpoint that was saved after a spike.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "ranks"))
import docs_table  # noqa: E402
import launch  # noqa: E402
from deepspeed_paths import PATHS, STEPS  # noqa: E402

HEAD = "| path | DeepSpeed's optimizer | works | largest difference | decisions a step | not finite | resume |"


def cells(ranks: list[Any]) -> list[str]:
    if any(isinstance(report, str) for report in ranks):
        return ["no: " + str(ranks[0]).splitlines()[-1], *["-"] * 5]
    first = ranks[0]
    asked = STEPS - (0 if first["nonfinite"] else first["skipped_steps"])
    once = all(report["steps"] == asked and report["bits"] == first["bits"] for report in ranks)
    held = first["skipped_steps"] == 1 and first["scheduled"] == STEPS - 1
    resumed = first["resume"]
    if resumed == "loaded":
        same = all(r["resumed_bits"] == r["bits"] and r["resumed_difference"] == 0 for r in ranks)
        resumed = "bit-equal" if same else "differs"
    worst = max(report["difference"] for report in ranks)
    left_out = "left out" if first["nonfinite"] else "left out as overflow"
    return [
        first["kind"].removeprefix("DeepSpeed"),
        "yes" if once and held else "no",
        f"{worst:.1g}" if worst else "0",
        "1, same on all ranks" if once else "differs",
        left_out if held else "applied",
        resumed,
    ]


def table() -> str:
    with tempfile.TemporaryDirectory() as folder:
        found = launch.run([f"deepspeed_path:{path}:{folder}" for path in PATHS], 2, timeout=500)
    rows = [HEAD, "|" + "---|" * 7]
    rows += [f"| {case.split(':')[1]} | {' | '.join(cells(ranks))} |" for case, ranks in found.items()]
    return "\n".join(rows)


if __name__ == "__main__":
    docs_table.main(__doc__, table, page="deepspeed.md", name="paths")
