"""Which norm is right on which layout: ours, torch's clip_grad_norm_ and FSDP1's own, as a table in docs/ranks.md.

    python benchmarks/layouts.py            # prints the table
    python benchmarks/layouts.py --write    # and puts it into docs/ranks.md

Each layout holds the same model on 2 or 4 ranks (gloo, this machine); what is right is the norm of the unsharded
model's gradient, to 1e-6 for ours and 1e-4 for the others.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "ranks"))
import docs_table  # noqa: E402
import launch  # noqa: E402

LAYOUTS = {
    "DDP": (2, "ddp"),
    "FSDP1, FULL_SHARD": (2, "fsdp1:FULL_SHARD:True"),
    "FSDP1, FULL_SHARD, use_orig_params=False": (2, "fsdp1:FULL_SHARD:False"),
    "FSDP1, SHARD_GRAD_OP": (2, "fsdp1:SHARD_GRAD_OP:True"),
    "FSDP1, NO_SHARD": (2, "fsdp1:NO_SHARD:True"),
    "FSDP1, HYBRID_SHARD, 2 x 2": (4, "fsdp1:HYBRID_SHARD:True"),
    "FSDP2": (4, "fsdp2"),
    "FSDP2, HSDP 2 x 2": (4, "fsdp2:hsdp"),
    "FSDP2, gradients offloaded": (2, "fsdp2:offload"),
    "tensor parallel, plain norms and head": (2, "tp"),
    "FSDP2 + tensor parallel, 2 x 2": (4, "fsdp2_tp"),
    "FSDP2 beside plain parameters": (2, "mixed"),
    "Partial gradients (sequence parallel)": (2, "partial_gradients"),
}


def verdicts(reports: dict[str, list[Any]], name: str) -> list[str]:
    ours = reports[f"norm:{name}"]
    right = all(
        isinstance(r, dict) and abs(r["norm"] / r["wanted"] - 1) < 1e-6 and r["bits"] == ours[0]["bits"] for r in ours
    )
    cells = ["right, same bits on all ranks" if right else "wrong"]
    for key in ("clip_grad_norm_", "FSDP1's own"):
        found = {r.get(key, "-") if isinstance(r, dict) else "hangs or dies" for r in reports[f"torch_clip:{name}"]}
        cells.append(" / ".join(sorted(found)))
    return cells


def table() -> str:
    found: dict[int, dict[str, list[Any]]] = {}
    for world in (2, 4):
        names = [name for ranks, name in LAYOUTS.values() if ranks == world]
        found[world] = launch.run([f"{case}:{name}" for case in ("norm", "torch_clip") for name in names], world)
    rows = ["| layout | ranks | zclip_ext | clip_grad_norm_ | FSDP1's own |", "|---|---|---|---|---|"]
    for title, (world, name) in LAYOUTS.items():
        rows.append(f"| {title} | {world} | {' | '.join(verdicts(found[world], name))} |")
    return "\n".join(rows)


if __name__ == "__main__":
    docs_table.main(__doc__, table, page="ranks.md", name="layouts")
