"""The options of ZClip: names, defaults, what is allowed. The one place where they are documented."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

CLIP_OPTIONS = ("reciprocal", "mean", "max")
ON_SPIKE = ("clip", "skip")
ON_NONFINITE = ("skip", "raise", "pass")

# The authors' package names the clip option "max" by a mode.
_UPSTREAM_MODES = {"zscore": None, "percentile": "max"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZClipConfig:
    """Options of the ZClip rule (arXiv 2504.02507). Immutable; every field is checked when it is made.

    Norms are L2 norms of the whole gradient, in the gradient's own units; everything else is a plain number.
    A value that is not allowed raises ``ValueError`` with the field's name, the value and what is allowed.

    Args:
        alpha: Weight of the past in the exponential moving mean and variance of the norm, in (0, 1).
        alpha_down: Takes ``alpha``'s place where a norm lies under the mean, so that the statistics follow a falling
            norm faster. ``None``: the same as ``alpha``, the published rule.
        z_thresh: A step whose z-score is above this is a spike, > 0.
        warmup_steps: How many samples set the first mean and variance, >= 2. Steps without a finite, non-zero norm are
            no samples. Until then only ``max_grad_norm`` and ``clip_quantile`` limit a step.
        clip_option: What a spike is scaled down to, with mean m, spread s (see ``min_rel_std``), z-score z:
            ``"reciprocal"``: m + clip_factor * z_thresh * s * (z_thresh / z), lower for a larger outlier;
            ``"mean"``: m; ``"max"``: m + clip_factor * z_thresh * s. The authors' ``"adaptive_scaling"`` is accepted
            for ``"reciprocal"``.
        clip_factor: Multiplies the spread in that threshold, never the mean, > 0.
        max_grad_norm: A fixed limit on top, also during warm-up, > 0. ``None``: no limit. (The authors' package has 1.0
            here, which makes every step of a model with a larger usual norm a clipped one.)
        min_threshold, max_threshold: Bounds of a spike's threshold, > 0. ``None``: no bound. The statistics are fed the
            bounded threshold.
        clip_quantile: No step's norm above this running quantile of the norms, from the second sample on, also during
            warm-up, in (0, 1). ``None``: no such limit. The run learns it by itself, for gradients of any scale; 0.1 is
            a good start. Some eight steps in ten are then scaled down, which reads and writes all gradients, and is
            meant for an optimizer that is invariant to the gradient's scale, such as Adam; to others it is a lower
            learning rate. It follows the norm down within some steps and up more slowly, the smaller it is; ten norms
            in a row far above it start it again, at the least of them.
        patience: After so many spikes in a row the norm has shifted for good, and mean and variance become those of the
            spikes, >= 2. ``None``: never, the published rule, which clips for ever after a lasting rise of the norm.
        min_rel_std: The spread is never taken as less than this part of the mean, in [0, 1). 0: the published rule.
        eps: Keeps the z-score finite where the spread is 0; relative to the mean, in (0, 1).
        log_space: Keep the statistics of log(norm): for norms with a long right tail. ``min_rel_std`` and ``eps`` are
            then absolute, since a spread of log(norm) is relative already.
        robust_warmup: Start from the median and the median absolute deviation of the warm-up samples, so that one
            outlier among them does not hide later ones.
        skip_update_on_spike: Leave mean and variance alone on a spike, rather than feed them its threshold.
        on_spike: ``"clip"`` scales a spike down; ``"skip"`` leaves the whole step out.
        on_nonfinite: What a gradient with inf or NaN does. ``"skip"`` leaves the step out, ``"raise"`` raises
            ``NonFiniteGradientError`` before anything changes, ``"pass"`` lets the step run on it. The statistics never
            see it.
        max_consecutive_skips: So many steps in a row may be left out, >= 1. After that a spike is clipped instead, and
            a gradient that is not finite raises. ``None``: any number.
        dry_run: Decide and record, but never touch a gradient, leave out a step or raise.
    """

    alpha: float = 0.97
    alpha_down: float | None = None
    z_thresh: float = 2.5
    warmup_steps: int = 25
    clip_option: str = "reciprocal"
    clip_factor: float = 1.0
    max_grad_norm: float | None = None
    min_threshold: float | None = None
    max_threshold: float | None = None
    clip_quantile: float | None = None
    patience: int | None = 50
    min_rel_std: float = 0.01
    eps: float = 1e-6
    log_space: bool = False
    robust_warmup: bool = False
    skip_update_on_spike: bool = False
    on_spike: str = "clip"
    on_nonfinite: str = "skip"
    max_consecutive_skips: int | None = 100
    dry_run: bool = False

    def __post_init__(self) -> None:
        if str(self.clip_option).lower() == "adaptive_scaling":  # the authors' name
            object.__setattr__(self, "clip_option", "reciprocal")
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _CHECKS[field.name](field.name, getattr(self, field.name)))
        lowest, highest = self.min_threshold, self.max_threshold
        if lowest is not None and highest is not None and lowest > highest:
            raise _error("min_threshold", lowest, f"a number up to max_threshold ({highest!r}) or None")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> ZClipConfig:
        """Makes a config from a mapping, as read from JSON or YAML. Accepts the authors' ``mode`` as well.

        Raises:
            TypeError: ``options`` is no mapping.
            ValueError: a key is unknown (the error names it and the nearest known one), or a value is not allowed.
        """
        if not isinstance(options, Mapping):
            raise TypeError(f"options: got {type(options).__name__}, expected a mapping of option names to values")
        options = dict(options)
        known = [field.name for field in dataclasses.fields(cls)]
        for key in options:
            if key not in known and key != "mode":
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
                raise ValueError(f"unknown ZClip option {key!r}; {hint}")
        if "mode" in options:
            mode = _one_of(tuple(_UPSTREAM_MODES))("mode", options.pop("mode"))
            if _UPSTREAM_MODES[mode] is not None:
                options["clip_option"] = _UPSTREAM_MODES[mode]
        return cls(**options)

    @classmethod
    def published(cls, **options: Any) -> ZClipConfig:
        """The rule of the paper alone: no shift guard (``patience=None``) and no floor (``min_rel_std=0``)."""
        return cls.from_dict({"patience": None, "min_rel_std": 0.0, **options})

    @property
    def may_leave_out(self) -> bool:
        """Whether there are steps that the optimizer must not take."""
        return not self.dry_run and not (self.on_nonfinite == "pass" and self.on_spike == "clip")

    def to_dict(self) -> dict[str, Any]:
        """All options as plain values; ``from_dict`` takes them back."""
        return dataclasses.asdict(self)


def _error(name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{name}: got {value!r}, allowed is {allowed}")


def _number(low: float, high: float = math.inf, *, include_low: bool = False, optional: bool = False) -> Any:
    interval = f"{'[' if include_low else '('}{low:g}, {high:g})"
    allowed = f"a number in {interval}" + (" or None" if optional else "")

    def check(name: str, value: object) -> float | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, Real):
            raise _error(name, value, allowed)
        number = float(value)
        if not (low < number < high or (include_low and number == low)):
            raise _error(name, value, allowed)
        return number

    return check


def _count(low: int, *, optional: bool = False) -> Any:
    allowed = f"a whole number of at least {low}" + (" or None" if optional else "")

    def check(name: str, value: object) -> int | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
            raise _error(name, value, allowed)
        return int(value)

    return check


def _one_of(choices: tuple[str, ...]) -> Any:
    def check(name: str, value: object) -> str:
        if not isinstance(value, str) or value.lower() not in choices:
            raise _error(name, value, "one of " + ", ".join(map(repr, choices)))
        return value.lower()

    return check


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _error(name, value, "True or False")
    return value


_CHECKS: dict[str, Any] = {
    "alpha": _number(0, 1),
    "alpha_down": _number(0, 1, optional=True),
    "z_thresh": _number(0),
    "warmup_steps": _count(2),
    "clip_option": _one_of(CLIP_OPTIONS),
    "clip_factor": _number(0),
    "max_grad_norm": _number(0, optional=True),
    "min_threshold": _number(0, optional=True),
    "max_threshold": _number(0, optional=True),
    "clip_quantile": _number(0, 1, optional=True),
    "patience": _count(2, optional=True),
    "min_rel_std": _number(0, 1, include_low=True),
    "eps": _number(0, 1),
    "log_space": _flag,
    "robust_warmup": _flag,
    "skip_update_on_spike": _flag,
    "on_spike": _one_of(ON_SPIKE),
    "on_nonfinite": _one_of(ON_NONFINITE),
    "max_consecutive_skips": _count(1, optional=True),
    "dry_run": _flag,
}
