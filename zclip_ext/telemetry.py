"""What a run can know of ZClip: the metrics, and the warnings that nobody should have to ask for."""

from __future__ import annotations

import math
import sys
import warnings

from .config import ZClipConfig

METRICS = (
    "grad_norm",
    "clipped_norm",
    "threshold",
    "z_score",
    "mean",
    "std",
    "quantile",
    "scale",
    "steps",
    "samples",
    "spikes",
    "clipped",
    "capped",
    "clip_rate",
    "cap_rate",
    "rebaselined",
    "skipped",
    "consecutive_skips",
    "nonfinite",
    "zero_norm",
    "elevated_run",
)
_CAP_WINDOW = 100
# A warning points past these, at the script that uses them.
_TRAINERS = ("accelerate", "composer", "deepspeed", "lightning", "pytorch_lightning", "transformers")
_NOT_THE_CALLERS = ("zclip_ext", "torch", *_TRAINERS)


class ZClipWarning(UserWarning):
    """Something about the run that ZClip can see and its owner should know."""


class NonFiniteGradientError(FloatingPointError):
    """A gradient held inf or NaN, and ``on_nonfinite`` or ``max_consecutive_skips`` says to stop. No weight changed."""


def metrics(state: dict[str, float], config: ZClipConfig) -> dict[str, float]:
    """The numbers of a state as a run wants to log them; see :meth:`zclip_ext.ZClip.metrics`."""
    seen = max(state["samples"], 1.0)
    mean = math.exp(state["mean"]) if config.log_space and state["warm"] else state["mean"]
    values = {
        "grad_norm": state["last_grad_norm"],
        "clipped_norm": state["last_grad_norm"] * state["last_scale"],
        "threshold": state["last_threshold"],
        "z_score": state["last_z_score"],
        "mean": mean,
        "std": math.sqrt(state["var"]),
        "quantile": 0.0 if config.clip_quantile is None else state["quantile"],
        "scale": state["last_scale"],
        "clip_rate": state["spikes"] / seen,
        "cap_rate": state["capped"] / seen,
    }
    return {name: values[name] if name in values else state[name] for name in METRICS}


def warn(message: str) -> None:
    """A warning that points at the caller's line, and is shown each time.

    Python shows one text from one line once, also where it is another tracker's.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_THE_CALLERS:
        frame = frame.f_back
    warnings.warn_explicit(message, ZClipWarning, frame.f_code.co_filename, frame.f_lineno, registry={})


def warn_of_skip(grad_norm: float, skipped: int, is_spike: bool) -> None:
    """Warns of the first step that is left out, of the 10th, the 100th, and so on."""
    if _reaches_a_power_of_ten(skipped - 1, skipped):
        reason = f"its gradient norm of {grad_norm:.4g} is a spike" if is_spike else "its gradient is not finite"
        warn(f"ZClip left out a step: {reason} (steps left out so far: {skipped})")


def warn_of_late_skips(before: int, skipped: int) -> None:
    """The same of steps that were left out on the device, once the host knows; it knew of ``before``."""
    if _reaches_a_power_of_ten(before, skipped):
        steps = "a step" if skipped - before == 1 else f"{skipped - before} steps"
        warn(f"ZClip left out {steps}: the gradient was not finite, or a spike (steps left out so far: {skipped})")


def _reaches_a_power_of_ten(before: int, after: int) -> bool:
    return before == 0 or len(str(before)) < len(str(after))


def warn_of_no_statistics() -> None:
    """Of a checkpoint that was saved without ZClip."""
    warn("the checkpoint holds no ZClip statistics: they start afresh, with a warm-up")


class CapWatch:
    """Warns once where ``max_grad_norm``, not the statistics, decides most steps: a lower learning rate, unseen."""

    def __init__(self, max_grad_norm: float | None, steps: float, capped: float) -> None:
        self._limit = max_grad_norm
        self._steps = steps
        self._capped = capped
        self._warned = False

    def is_due(self, steps: float) -> bool:
        return self._limit is not None and not self._warned and steps - self._steps >= _CAP_WINDOW

    def look(self, state: dict[str, float]) -> None:
        if not self.is_due(state["steps"]):
            return
        rate = (state["capped"] - self._capped) / (state["steps"] - self._steps)
        self._steps, self._capped = state["steps"], state["capped"]
        if rate > 0.5:
            self._warned = True
            warn(
                f"max_grad_norm={self._limit:g} scaled down {rate:.0%} of the last steps (usual norm: "
                f"{state['mean']:.4g}): it acts as a lower learning rate, not as protection from spikes. Raise it, or "
                "set it to None"
            )
