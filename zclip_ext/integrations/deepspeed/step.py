"""The decision of one step of a DeepSpeed engine: taken once, from the one global norm, however often asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ... import ops
from ...clipper import ZClip
from ...distributed import is_first
from ...result import ClipResult
from ...telemetry import NonFiniteGradientError, warn


class Step:
    """The step that an engine is taking.

    Args:
        zclip: judges it.
        optimizer: the engine's, whose ``overflow`` tells the engine that a step was left out.
    """

    def __init__(self, zclip: ZClip, optimizer: Any) -> None:
        self.zclip = zclip
        self.optimizer = optimizer
        self._has_warned = False
        self.begin()

    def begin(self) -> None:
        """Forgets the last decision. DeepSpeed updates the loss scale before it unscales: what it is now counts."""
        self.result: ClipResult | None = None
        self.error: NonFiniteGradientError | None = None
        self.loss_scale = loss_scale_of(self.optimizer) * _autocast_scale(self.optimizer)
        self.group_norms: list[Any] = []
        # Older versions reset it for fp16 only, and would skip for ever.
        self.optimizer.overflow = False

    @property
    def left_out(self) -> bool:
        return self.result is not None and self.result.left_out

    def judge(self, scaled_norm: Any) -> ClipResult:
        """The decision of this step, the same however often it is asked for.

        Args:
            scaled_norm: the global norm, a number or a tensor, times the loss scale.
        """
        if self.result is None:
            norm = float(scaled_norm) / self.loss_scale
            if any(not float(group_norm) >= 0 for group_norm in self.group_norms):
                norm = math.nan  # DeepSpeed's -1 for a group, hidden in the root of the sum of squares
            self.decide(lambda: self.zclip.decide(norm))
        assert self.result is not None
        return self.result

    def decide(self, ask: Callable[[], ClipResult]) -> ClipResult:
        """Keeps what ZClip says. An error waits until DeepSpeed has ended the step, as one that is left out."""
        try:
            self.result = ask()
        except NonFiniteGradientError as error:
            self.error, self.result = error, self.zclip.last
        assert self.result is not None
        if self.result.left_out:
            self.optimizer.overflow = True
        return self.result

    def end(self) -> None:
        """Raises what has waited. What comes next is another step."""
        error, self.error, self.result = self.error, None, None
        if error is not None:
            raise error

    def warn_of_no_question(self, version: str) -> None:
        """A seam that a version of DeepSpeed doesn't use."""
        if not self._has_warned and is_first():
            self._has_warned = True
            warn(f"DeepSpeed {version} took a step without asking for a clip: ZClip doesn't work in this engine")

    def scale_(self, tensors: list[Any]) -> None:
        """Scales gradients where DeepSpeed can't be made to."""
        if self.result is not None and not self.left_out and not self.zclip.config.dry_run:
            ops.scale_(ops.of(tensors), self.result.scale)


def loss_scale_of(optimizer: Any) -> float:
    """What DeepSpeed divides gradients by."""
    scale = getattr(optimizer, "loss_scale", None)
    return 1.0 if scale is None else float(scale)


def _autocast_scale(optimizer: Any) -> float:
    """What torch_autocast in fp16 multiplies the loss by, beside the loss scale."""
    scaler = getattr(optimizer, "torch_autocast_gradscaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())
