"""ZClip in plain Python, written from the description of the rule (docs/design.md, section 3), not from its code."""

import math
import statistics


def mean_and_variance(values):
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / len(values)


class ReferenceZClip:
    def __init__(
        self,
        alpha=0.97,
        alpha_down=None,
        z_thresh=2.5,
        warmup_steps=25,
        clip_option="reciprocal",
        clip_factor=1.0,
        max_grad_norm=None,
        min_threshold=None,
        max_threshold=None,
        clip_quantile=None,
        patience=50,
        min_rel_std=0.01,
        eps=1e-6,
        log_space=False,
        robust_warmup=False,
        skip_update_on_spike=False,
        on_spike="clip",
        on_nonfinite="skip",
        max_consecutive_skips=100,
    ):
        self.__dict__.update({name: value for name, value in locals().items() if name != "self"})
        self.mean = self.var = None
        self.first, self.streak = [], []
        self.quantile = self.quantile_spread = None
        self.far_above = []
        self.quantile_limit = math.inf
        self.skips_in_a_row = 0
        self.counts = dict.fromkeys(
            ("samples", "spikes", "clipped", "capped", "rebaselined", "skipped", "nonfinite", "zero_norm"), 0
        )

    def step(self, g):
        """Returns threshold, z-score, scale and what becomes of the step: "step", "skip" or "raise"."""
        if not math.isfinite(g) or g > 1e150:
            self.counts["nonfinite"] += 1
            if self.on_nonfinite == "pass":
                self.skips_in_a_row = 0
                return math.inf, 0.0, 1.0, "step"
            self.counts["skipped"] += 1
            self.skips_in_a_row += 1
            limit = math.inf if self.max_consecutive_skips is None else self.max_consecutive_skips
            stop = self.on_nonfinite == "raise" or self.skips_in_a_row > limit
            return math.inf, 0.0, 1.0, "raise" if stop else "skip"
        if g == 0:
            self.counts["zero_norm"] += 1
            self.skips_in_a_row = 0
            return math.inf, 0.0, 1.0, "step"

        self.counts["samples"] += 1
        if self.clip_quantile is not None:
            self.follow_quantile(g)
        y = math.log(g) if self.log_space else g
        if self.mean is None:
            self.warm_up(y)
            return self.limit(g, math.inf, 0.0)

        unit = 1.0 if self.log_space else self.mean
        s = max(math.sqrt(self.var), self.min_rel_std * unit)
        z = (y - self.mean) / (s + self.eps * unit)
        if z <= self.z_thresh:
            self.streak = []
            self.update(y)
            return self.limit(g, math.inf, z)

        self.counts["spikes"] += 1
        spread = {
            "reciprocal": self.clip_factor * self.z_thresh**2 / z * s,
            "mean": 0.0,
            "max": self.clip_factor * self.z_thresh * s,
        }[self.clip_option]
        threshold = math.exp(self.mean + spread) if self.log_space else self.mean + spread
        if self.min_threshold is not None:
            threshold = max(threshold, self.min_threshold)
        if self.max_threshold is not None:
            threshold = min(threshold, self.max_threshold)
        self.streak.append(y)
        if self.patience is not None and len(self.streak) >= self.patience:
            self.mean, self.var = mean_and_variance(self.streak)
            self.streak = []
            self.counts["rebaselined"] += 1
        elif not self.skip_update_on_spike:
            fed = min(threshold, g)
            self.update(math.log(fed) if self.log_space else fed)
        return self.limit(g, threshold, z, spike=True)

    def warm_up(self, y):
        self.first.append(y)
        if len(self.first) < self.warmup_steps:
            return
        self.mean, self.var = mean_and_variance(self.first)
        if self.robust_warmup:
            self.mean = statistics.median(self.first)
            self.var = (1.4826 * statistics.median(abs(y - self.mean) for y in self.first)) ** 2

    def update(self, u):
        alpha = self.alpha_down if u < self.mean and self.alpha_down is not None else self.alpha
        self.mean = alpha * self.mean + (1 - alpha) * u
        self.var = alpha * self.var + (1 - alpha) * (u - self.mean) ** 2

    def follow_quantile(self, g):
        if self.quantile is None:
            self.quantile, self.quantile_spread = g, 0.3
            return
        self.quantile_limit = q = self.quantile
        deviation = (g / q if g >= q else q / g) - 1
        self.far_above = [*self.far_above, g] if g > q and deviation > 3 * self.quantile_spread else []
        if len(self.far_above) == 10:
            self.quantile, self.quantile_spread, self.far_above = min(self.far_above), 0.3, []
            return
        spread = 0.98 * self.quantile_spread + 0.02 * min(deviation, 3 * self.quantile_spread)
        self.quantile_spread = min(max(spread, 0.01), 10.0)
        move = 3 * self.quantile_spread * max(0.05, 1 / self.counts["samples"])
        if g < q:
            self.quantile = q / (1 + (1 - self.clip_quantile) * move)
        else:
            self.quantile = q * (1 + self.clip_quantile * move)

    def limit(self, g, threshold, z, spike=False):
        if spike and self.on_spike == "skip":
            if self.max_consecutive_skips is None or self.skips_in_a_row < self.max_consecutive_skips:
                self.counts["skipped"] += 1
                self.skips_in_a_row += 1
                return threshold, z, 1.0, "skip"
        else:
            self.skips_in_a_row = 0
        cap = math.inf if self.max_grad_norm is None else self.max_grad_norm
        limit = min(threshold, cap, self.quantile_limit)
        if g <= limit:
            return threshold, z, 1.0, "step"
        self.counts["clipped"] += 1
        self.counts["capped"] += cap < min(threshold, self.quantile_limit)
        return threshold, z, limit / g, "step"
