"""The layout of the state and the ZClip rule in float64 torch ops, on any device and without a branch on a value.

The same rule stands in ``csrc/zclip_rule.h``, in the same order of operations: the two agree bit for bit, except for
the last bit of ``log`` and ``exp`` under ``log_space``. Without a compiler this one runs; with one it is the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .config import CLIP_OPTIONS, ON_NONFINITE, ON_SPIKE, ZClipConfig

CONFIG_FIELDS = (
    "alpha",
    "alpha_down",
    "z_thresh",
    "warmup_steps",
    "clip_option",
    "clip_factor",
    "max_grad_norm",
    "min_threshold",
    "max_threshold",
    "clip_quantile",
    "patience",
    "min_rel_std",
    "eps",
    "log_space",
    "robust_warmup",
    "skip_update_on_spike",
    "on_spike",
    "on_nonfinite",
    "max_consecutive_skips",
)
STATE_FIELDS = (
    "steps",
    "samples",
    "mean",
    "var",
    "warm",
    "warmup_count",
    "warmup_mean",
    "warmup_m2",
    "streak_count",
    "streak_mean",
    "streak_m2",
    "quantile",
    "quantile_spread",
    "quantile_streak",
    "quantile_streak_min",
    "elevated_run",
    "spikes",
    "clipped",
    "capped",
    "rebaselined",
    "skipped",
    "consecutive_skips",
    "nonfinite",
    "zero_norm",
    "last_grad_norm",
    "last_z_score",
    "last_threshold",
    "last_scale",
)
RECORD_FIELDS = (
    "grad_norm",
    "threshold",
    "z_score",
    "scale",
    "is_spike",
    "is_finite",
    "verdict",
    "spike_level",
    "elevated_run",
)

# Values of the record's "verdict".
STEP, SKIP_STEP, RAISE_ERROR = 0.0, 1.0, 2.0

_CHOICES = {"clip_option": CLIP_OPTIONS, "on_spike": ON_SPIKE, "on_nonfinite": ON_NONFINITE}
# What stands for None.
_UNSET = dict.fromkeys(("max_threshold", "max_grad_norm", "patience", "max_consecutive_skips"), math.inf)
_UNSET |= {"min_threshold": 0.0, "clip_quantile": 0.0}

_MAX_SUM_OF_SQUARES = 1e300  # above it the squares of the norm would overflow the statistics
_ELEVATED = 1.0  # a z-score above this counts towards elevated_run
_MAD_TO_STD = 1.4826  # makes the median absolute deviation of a normal distribution its standard deviation

# How the running quantile follows the norms (clip_quantile). All of it is relative to the quantile itself.
_FIRST_SPREAD = 0.3  # wide: the first norm may lie far from the quantile
_KEEP_SPREAD, _TAKE_SPREAD = 0.98, 0.02  # remembers some 50 samples
_MAX_DEVIATION = 3.0  # in spreads: one spike hardly moves the spread
_SMALLEST_SPREAD = 0.01  # a constant norm must not make it blind
_LARGEST_SPREAD = 10.0  # wild norms must not make it overflow
_SMALLEST_RATE = 0.05  # forgets: what came long ago has little weight
_REACH = 3.0  # in spreads: how far a rate of 1 moves it
_SHIFT = 10  # so many norms in a row far above it: it starts again there


def config_numbers(config: ZClipConfig) -> list[float]:
    """The options as the numbers that the rule reads, in the order of ``CONFIG_FIELDS``."""
    numbers = []
    for name in CONFIG_FIELDS:
        value = getattr(config, name)
        if name == "alpha_down" and value is None:
            value = config.alpha
        elif name in _CHOICES:
            value = _CHOICES[name].index(value)
        elif value is None:
            value = _UNSET[name]
        numbers.append(float(value))
    return numbers


def buffer_size(config: ZClipConfig) -> int:
    """How many warm-up samples the state keeps behind its fields."""
    return config.warmup_steps if config.robust_warmup else 0


def new_state(config: ZClipConfig) -> list[float]:
    """The numbers of a state that has seen nothing: ``STATE_FIELDS``, then the buffer of warm-up samples."""
    fresh = {"last_threshold": math.inf, "last_scale": 1.0}
    return [fresh.get(name, 0.0) for name in STATE_FIELDS] + [0.0] * buffer_size(config)


def fields(state: Sequence[float]) -> dict[str, float]:
    """The numbers of a state by their names, without the buffer."""
    return dict(zip(STATE_FIELDS, state, strict=False))


def decide_(sums: Tensor, state: Tensor, config: Tensor, record: Tensor) -> None:
    """One step of the rule. All tensors are float64, on one device, and nothing is copied to the host.

    Args:
        sums: shape (2,): the sum of squares of all gradients, and how many of their elements are inf or NaN.
        state: shape (len(STATE_FIELDS) + buffer,), changed in place.
        config: shape (len(CONFIG_FIELDS),), from :func:`config_numbers`.
        record: shape (len(RECORD_FIELDS),), filled with what was decided.
    """
    c = dict(zip(CONFIG_FIELDS, config.unbind(), strict=True))
    s = dict(zip(STATE_FIELDS, state[: len(STATE_FIELDS)].unbind(), strict=True))
    buffer = state[len(STATE_FIELDS) :]
    zero, one = torch.zeros_like(sums[0]), torch.ones_like(sums[0])
    unlimited = torch.full_like(zero, math.inf)
    in_logs = c["log_space"] != 0

    g = _sqrt(sums[0])
    finite = (sums[1] == 0) & (sums[0] <= _MAX_SUM_OF_SQUARES)
    sampled = finite & (sums[0] > 0)
    y = torch.where(sampled, torch.where(in_logs, g.log(), g), zero)
    warming = sampled & (s["warm"] == 0)
    judged = sampled & (s["warm"] != 0)

    # Judge: z-score, spike or not, threshold, from the statistics before this step.
    unit = torch.where(in_logs, one, s["mean"])
    spread = torch.maximum(_sqrt(s["var"]), c["min_rel_std"] * unit)
    width = torch.where(judged, spread + c["eps"] * unit, one)
    level = s["mean"] + c["z_thresh"] * width
    z = torch.where(judged, (y - s["mean"]) / width, zero)
    spike = judged & (z > c["z_thresh"])
    level = torch.where(judged, torch.where(in_logs, level.exp(), level), unlimited)
    reach = c["clip_factor"] * c["z_thresh"] * spread
    harder = reach * (c["z_thresh"] / torch.where(spike, z, one))
    reach = torch.where(c["clip_option"] == CLIP_OPTIONS.index("reciprocal"), harder, reach)
    reach = torch.where(c["clip_option"] == CLIP_OPTIONS.index("mean"), zero, reach)
    target = torch.where(in_logs, (s["mean"] + reach).exp(), s["mean"] + reach)
    bounded = torch.minimum(torch.maximum(target, c["min_threshold"]), c["max_threshold"])
    threshold = torch.where(spike, bounded, unlimited)
    elevated = torch.where(z > _ELEVATED, s["elevated_run"] + 1, zero)

    # Learn: warm-up, streak, moving mean and variance.
    n = {name: value.clone() for name, value in s.items()}
    _welford(n, "warmup", y, warming)
    _end_warm_up(n, c, buffer, y, warming)
    _welford(n, "streak", y, spike)
    shifted = judged & (n["streak_count"] >= c["patience"])
    u = torch.where(spike, torch.minimum(torch.where(in_logs, threshold.log(), threshold), y), y)
    keep = torch.where(u < s["mean"], c["alpha_down"], c["alpha"])
    take = 1 - keep
    moved_mean = keep * s["mean"] + take * u
    moved_var = keep * s["var"] + take * ((u - moved_mean) * (u - moved_mean))
    moves = judged & ~shifted & ~(spike & (c["skip_update_on_spike"] != 0))
    streak_var = n["streak_m2"] / torch.where(shifted, n["streak_count"], one)
    n["mean"] = torch.where(moves, moved_mean, torch.where(shifted, n["streak_mean"], n["mean"]))
    n["var"] = torch.where(moves, moved_var, torch.where(shifted, streak_var, n["var"]))
    ended = shifted | (judged & ~spike)
    for name in ("streak_count", "streak_mean", "streak_m2"):
        n[name] = torch.where(ended, zero, n[name])
    quantile = _follow_quantile(n, c, g, sampled & (c["clip_quantile"] != 0))

    # Act: leave out, clip, or raise.
    passing = ~finite & (c["on_nonfinite"] == ON_NONFINITE.index("pass"))
    refused = ~finite & ~passing
    may_skip = spike & (c["on_spike"] == ON_SPIKE.index("skip"))
    skips = may_skip & (s["consecutive_skips"] < c["max_consecutive_skips"])
    left_out = refused | skips
    in_a_row = torch.where(left_out, s["consecutive_skips"] + 1, s["consecutive_skips"])
    n["consecutive_skips"] = torch.where(refused | may_skip, in_a_row, zero)
    too_many = n["consecutive_skips"] > c["max_consecutive_skips"]
    stop = refused & ((c["on_nonfinite"] == ON_NONFINITE.index("raise")) | too_many)
    learned = torch.minimum(threshold, quantile)
    limit = torch.minimum(learned, c["max_grad_norm"])
    clips = sampled & ~skips & (g > limit)
    scale = torch.where(clips, limit / torch.where(clips, g, one), one)
    verdict = left_out + stop.to(torch.float64)

    n["elevated_run"] = torch.where(judged, elevated, s["elevated_run"])
    counted = {
        "steps": torch.ones_like(finite),
        "samples": sampled,
        "spikes": spike,
        "clipped": clips,
        "capped": clips & (c["max_grad_norm"] < learned),
        "rebaselined": shifted,
        "skipped": left_out,
        "nonfinite": ~finite,
        "zero_norm": finite & ~sampled,
    }
    for name, happened in counted.items():
        n[name] = s[name] + happened
    n["last_grad_norm"], n["last_z_score"], n["last_threshold"], n["last_scale"] = g, z, threshold, scale
    state[: len(STATE_FIELDS)] = torch.stack([n[name] for name in STATE_FIELDS])
    outcome: Sequence[Tensor] = (g, threshold, z, scale, spike, finite, verdict, level, n["elevated_run"])
    record.copy_(torch.stack([value.to(torch.float64) for value in outcome]))


def _sqrt(x: Tensor) -> Tensor:
    """Correctly rounded, as C's is. On the CPU torch may leave it to a vector library whose last bit is another."""
    return torch.full_like(x, math.sqrt(x.item())) if x.device.type == "cpu" else x.sqrt()


def _welford(n: dict[str, Tensor], prefix: str, y: Tensor, active: Tensor) -> None:
    """Adds the sample to a running mean and sum of squared deviations, where ``active``."""
    count = n[f"{prefix}_count"] + 1
    delta = y - n[f"{prefix}_mean"]
    mean = n[f"{prefix}_mean"] + delta / count
    m2 = n[f"{prefix}_m2"] + delta * (y - mean)
    for name, value in (("count", count), ("mean", mean), ("m2", m2)):
        n[f"{prefix}_{name}"] = torch.where(active, value, n[f"{prefix}_{name}"])


def _end_warm_up(n: dict[str, Tensor], c: dict[str, Tensor], buffer: Tensor, y: Tensor, warming: Tensor) -> None:
    """Sets the first mean and variance with the last warm-up sample; keeps the samples where the buffer has room."""
    done = warming & (n["warmup_count"] >= c["warmup_steps"])
    count = torch.where(done, n["warmup_count"], torch.ones_like(y))
    mean, var = n["warmup_mean"], n["warmup_m2"] / count
    if len(buffer):
        positions = torch.arange(1, len(buffer) + 1, dtype=buffer.dtype, device=buffer.device)
        buffer.copy_(torch.where(warming & (positions == n["warmup_count"]), y, buffer))
        mean = _median(buffer)
        deviation = _MAD_TO_STD * _median((buffer - mean).abs())
        var = deviation * deviation
        buffer.copy_(torch.where(done, torch.zeros_like(buffer), buffer))
    n["mean"] = torch.where(done, mean, n["mean"])
    n["var"] = torch.where(done, var, n["var"])
    n["warm"] = torch.where(done, torch.ones_like(y), n["warm"])


def _follow_quantile(n: dict[str, Tensor], c: dict[str, Tensor], g: Tensor, active: Tensor) -> Tensor:
    """Returns the limit of this step, the quantile of the norms before it, inf where there is none; then moves it.

    A share p of the norms takes it down by 1 - p, the others take it up by p, so it rests where p of them lie below.
    Up is slow where p is small, so norms that stay far above it start it again, at the least of them.
    """
    zero, one, p = torch.zeros_like(g), torch.ones_like(g), c["clip_quantile"]
    first, moves = active & (n["quantile"] == 0), active & (n["quantile"] != 0)
    limit = torch.where(moves, n["quantile"], one)
    ratio = torch.where(moves, g, one) / limit
    deviation = torch.maximum(ratio, one / ratio) - 1
    largest = _MAX_DEVIATION * n["quantile_spread"]
    far_above = (ratio > 1) & (deviation > largest)
    streak = torch.where(far_above, n["quantile_streak"] + 1, zero)
    least = torch.where(n["quantile_streak"] == 0, g, torch.minimum(n["quantile_streak_min"], g))
    shifted = moves & (streak >= _SHIFT)
    starts = first | shifted

    spread = _KEEP_SPREAD * n["quantile_spread"] + _TAKE_SPREAD * torch.minimum(deviation, largest)
    spread = spread.clamp(_SMALLEST_SPREAD, _LARGEST_SPREAD)
    move = (one / (n["samples"] + 1)).clamp(min=_SMALLEST_RATE) * (_REACH * spread)
    moved = torch.where(ratio < 1, limit / (1 + move * (1 - p)), limit * (1 + move * p))

    def keep(name: str, started: Tensor, followed: Tensor) -> None:
        n[name] = torch.where(starts, started, torch.where(moves, followed, n[name]))

    keep("quantile", torch.where(shifted, least, g), moved)
    keep("quantile_spread", torch.full_like(g, _FIRST_SPREAD), spread)
    keep("quantile_streak", zero, streak)
    keep("quantile_streak_min", zero, torch.where(far_above, least, zero))
    return torch.where(moves, limit, torch.full_like(g, math.inf))


def _median(x: Tensor) -> Tensor:
    ordered = x.sort().values
    return (ordered[(len(x) - 1) // 2] + ordered[len(x) // 2]) * 0.5
