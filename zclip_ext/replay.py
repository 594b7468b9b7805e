"""What ZClip would have done on the gradient norms of a run that is over."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from . import rule
from .clipper import ZClip
from .config import ZClipConfig


def replay(norms: Iterable[float], config: ZClipConfig | None = None, **options: Any) -> list[dict[str, float]]:
    """Runs the rule over logged norms, without a gradient.

    Args:
        norms: global gradient norms before clipping, one for each step; inf or NaN where a step had none.
        config: a :class:`ZClipConfig`; or
        options: its fields by name.

    Returns:
        For each step the fields of :class:`ClipResult` as numbers, and the ``mean`` and ``std`` after it (see
        :meth:`ZClip.metrics`). Nothing is raised on a norm that is not finite: ``verdict`` tells what would have been
        done (0: a step, 1: left out, 2: an error).
    """
    zclip = ZClip(config, **options)
    zclip = ZClip(dataclasses.replace(zclip.config, dry_run=True))
    steps = []
    for norm in norms:
        record = zclip.decide(norm).record.tolist()
        metrics = zclip.metrics()
        steps.append(
            {**dict(zip(rule.RECORD_FIELDS, record, strict=True)), "mean": metrics["mean"], "std": metrics["std"]}
        )
    return steps
