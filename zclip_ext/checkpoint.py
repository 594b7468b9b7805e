"""The state as plain numbers, and back: every field checked, since a checkpoint may come from anywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from . import rule
from .config import ZClipConfig
from .telemetry import warn

VERSION = 1
_BUFFER = "warmup_norm_"
_NOT_COUNTS = {"mean", "var", "warmup_mean", "warmup_m2", "streak_mean", "streak_m2"}
_NOT_COUNTS |= {"quantile", "quantile_spread", "quantile_streak_min"}
_NOT_COUNTS |= {"last_grad_norm", "last_z_score", "last_threshold", "last_scale"}
_SIGNED = {"mean", "warmup_mean", "streak_mean", "last_z_score"}
_MAY_BE_INFINITE = {"last_grad_norm", "last_threshold"}


def save(numbers: list[float], config: ZClipConfig) -> dict[str, float]:
    """All fields of the state by name, the version of the format, and ``log_space``, which says what the means are of.

    Whole numbers are ints. The warm-up samples that ``robust_warmup`` keeps follow as ``warmup_norm_0`` and on. Which
    keys there are depends on the options alone: flattened distributed checkpoints look for those of a fresh state.
    """
    fields = dict(zip(rule.STATE_FIELDS, numbers, strict=False))
    saved: dict[str, float] = {"version": VERSION, "log_space": int(config.log_space)}
    saved |= {name: value if name in _NOT_COUNTS else int(value) for name, value in fields.items()}
    return saved | {f"{_BUFFER}{index}": value for index, value in enumerate(numbers[len(rule.STATE_FIELDS) :])}


def load(saved: Mapping[str, Any], config: ZClipConfig) -> list[float]:
    """The numbers of the state. Statistics that the options can't go on from start afresh, with a warning.

    Raises:
        ValueError: no mapping, another version, or a field that is missing, unknown or impossible; names it.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(f"state_dict: got {type(saved).__name__}, expected a mapping")
    if saved.get("version") != VERSION:
        raise ValueError(f"state_dict['version']: got {saved.get('version')!r}, allowed is {VERSION}")
    fields = {name: _number(name, saved) for name in rule.STATE_FIELDS}
    in_logs = saved.get("log_space")
    if in_logs not in (0, 1):
        raise ValueError(f"state_dict['log_space']: got {in_logs!r}, allowed is 0 or 1")
    samples = {name: _number(name, saved) for name in saved if str(name).startswith(_BUFFER)}
    unknown = set(saved) - {"version", "log_space"} - set(fields) - set(samples)
    if unknown:
        raise ValueError(f"state_dict: unknown field {sorted(map(str, unknown))[0]!r}")
    if bool(in_logs) != config.log_space:
        _start_afresh(fields, "log_space is not what the checkpoint was saved with")
    elif config.robust_warmup and not fields["warm"] and len(samples) < fields["warmup_count"]:
        _start_afresh(fields, "robust_warmup needs warm-up samples that the checkpoint doesn't hold")
    elif not fields["warm"] and fields["warmup_count"] >= config.warmup_steps:
        _start_afresh(fields, "warmup_steps is no more than the samples that the checkpoint holds")
    kept = 0 if fields["warm"] else int(fields["warmup_count"])
    buffer = [samples[f"{_BUFFER}{index}"] if index < kept else 0.0 for index in range(rule.buffer_size(config))]
    return [fields[name] for name in rule.STATE_FIELDS] + buffer


def _start_afresh(fields: dict[str, float], reason: str) -> None:
    for name in ("mean", "var", "warm", "elevated_run"):
        fields[name] = 0.0
    for name in ("warmup_count", "warmup_mean", "warmup_m2", "streak_count", "streak_mean", "streak_m2"):
        fields[name] = 0.0
    warn(f"ZClip starts its warm-up again: {reason}")


def _number(name: str, saved: Mapping[str, Any]) -> float:
    if name not in saved:
        raise ValueError(f"state_dict: missing field {name!r}")
    if isinstance(saved[name], bool) or not isinstance(saved[name], Real):
        raise ValueError(f"state_dict[{name!r}]: got {saved[name]!r}, expected a number")
    value = float(saved[name])
    whole = name not in _NOT_COUNTS and not name.startswith(_BUFFER)
    fits = math.isfinite(value) or name in _MAY_BE_INFINITE
    fits = fits and (value >= 0 or math.isnan(value) or name in _SIGNED or name.startswith(_BUFFER))
    if not fits or (whole and value != int(value)):
        allowed = (
            "a whole number of at least 0" if whole else "a finite number, or one of at least 0 where it can't be less"
        )
        raise ValueError(f"state_dict[{name!r}]: got {saved[name]!r}, allowed is {allowed}")
    return value
