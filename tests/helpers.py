"""Gradients with a known norm, usual norms, and random traces and options of the rule."""

import math
import random

import torch
from torch import nn

import zclip_ext
from zclip_ext import rule


def usual_norms(count=25):
    """The warm-up of tests/cases: 0.95, 1.05, 0.95, ... with mean 0.998 and std 0.05."""
    return [0.95 if index % 2 == 0 else 1.05 for index in range(count)]


def parameter(values, dtype=torch.float32):
    """A parameter of zeros whose gradient holds the values."""
    gradient = torch.as_tensor(values, dtype=dtype)
    made = nn.Parameter(torch.zeros_like(gradient))
    made.grad = gradient
    return made


def set_norm(parameters, norm):
    """Gives each parameter a gradient of equal elements, so that the global norm is `norm` (exact for one element)."""
    count = sum(p.numel() for p in parameters)
    for p in parameters:
        p.grad = torch.full_like(p, norm / math.sqrt(count))


def warmed(norms=None, **options):
    """A ZClip and one parameter of one element after the usual warm-up."""
    zclip = zclip_ext.ZClip(**options)
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    for norm in usual_norms() if norms is None else norms:
        step(zclip, p, norm)
    return zclip, p


def step(zclip, p, norm):
    """One step of a ZClip on one parameter whose gradient has that norm; a new gradient, as after zero_grad()."""
    set_norm([p], norm)
    return zclip.step([p])


def statistics(zclip):
    """What must not change on a step that is no sample."""
    state = zclip.state_dict()
    names = ("samples", "mean", "var", "warm", "warmup_count", "warmup_mean", "warmup_m2")
    return {name: state[name] for name in names}


def random_options(rng):
    """One draw over all options of the rule, log_space aside."""
    return {
        "alpha": rng.choice([0.9, 0.97]),
        "alpha_down": rng.choice([None, 0.85]),
        "z_thresh": rng.choice([2.0, 2.5]),
        "warmup_steps": rng.choice([2, 5, 25]),
        "clip_option": rng.choice(["reciprocal", "mean", "max"]),
        "clip_factor": rng.choice([0.5, 1.0, 3.0]),
        "max_grad_norm": rng.choice([None, None, 1.02, 3.0]),
        "min_threshold": rng.choice([None, None, 0.5]),
        "max_threshold": rng.choice([None, None, 2.0]),
        "clip_quantile": rng.choice([None, None, 0.1, 0.7]),
        "patience": rng.choice([None, 3, 50]),
        "min_rel_std": rng.choice([0.0, 0.01]),
        "robust_warmup": rng.choice([False, True]),
        "skip_update_on_spike": rng.choice([False, True]),
        "on_spike": rng.choice(["clip", "skip"]),
        "on_nonfinite": rng.choice(["skip", "raise", "pass"]),
        "max_consecutive_skips": rng.choice([None, 2, 100]),
    }


def random_norms(rng, count, *, wild=True):
    """Noisy norms around 1 with spikes, bursts, shifts and falls; `wild` adds zeros, inf, NaN and extreme sizes."""
    norms, level = [], 1.0
    for _ in range(count):
        level *= rng.choice([1.0] * 60 + [3.0, 0.3])
        level = min(max(level, 1e-3), 1e3)
        norm = level * math.exp(rng.gauss(0.0, 0.06))
        if rng.random() < 0.06:
            norm *= rng.choice([1.3, 2.0, 10.0, 300.0, 0.1])
        if wild and rng.random() < 0.05:
            norm = rng.choice([0.0, math.inf, math.nan, 1e20, 1e-25, 1e149, 1e160])
        norms.append(norm)
    return norms


def rule_steps(rng, count=150):
    """What a rule is given in `count` steps of random norms: sums of squares, and counts of what is not finite."""
    for norm in random_norms(rng, count):
        bad = float(not math.isfinite(norm) or rng.random() < 0.01)
        yield torch.tensor([norm * norm, bad], dtype=torch.float64)


class RuleRun:
    """A rule's state and its last record, both float64, on a device; `decide`: sums, state, config, record."""

    def __init__(self, config, decide, device="cpu"):
        self.decide = decide
        self.numbers, self.state = (
            torch.tensor(values, dtype=torch.float64, device=device)
            for values in (rule.config_numbers(config), rule.new_state(config))
        )
        self.record = torch.empty(len(rule.RECORD_FIELDS), dtype=torch.float64, device=device)

    def step(self, sums):
        self.decide(sums.to(self.state.device), self.state, self.numbers, self.record)
        return self.state, self.record


def seeded(seed):
    return random.Random(seed)
