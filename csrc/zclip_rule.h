// The ZClip rule (arXiv 2504.02507, with the additions of docs/design.md, section 3): scalars in, decision out.
//
// Plain C++ without library types, so that the CPU binding and a CUDA kernel compile the same text. Everything is
// double and every operation stands in the order of zclip_ext/rule.py: the two agree bit for bit when this file is
// compiled without contraction (-ffp-contract=off, --fmad=false). Only log_space may differ, in the last bit of log
// and exp.
#pragma once

#include <math.h>

#if defined(__CUDACC__)
#define ZCLIP_FN __host__ __device__ inline
#else
#define ZCLIP_FN inline
#endif

// Each layout is listed once. Python holds the same names in the same order (rule.py); the loader compares them.
#define ZCLIP_CONFIG_FIELDS(X) \
    X(alpha)                   \
    X(alpha_down)              \
    X(z_thresh)                \
    X(warmup_steps)            \
    X(clip_option)             \
    X(clip_factor)             \
    X(max_grad_norm)           \
    X(min_threshold)           \
    X(max_threshold)           \
    X(clip_quantile)           \
    X(patience)                \
    X(min_rel_std)             \
    X(eps)                     \
    X(log_space)               \
    X(robust_warmup)           \
    X(skip_update_on_spike)    \
    X(on_spike)                \
    X(on_nonfinite)            \
    X(max_consecutive_skips)

#define ZCLIP_STATE_FIELDS(X) \
    X(steps)                  \
    X(samples)                \
    X(mean)                   \
    X(var)                    \
    X(warm)                   \
    X(warmup_count)           \
    X(warmup_mean)            \
    X(warmup_m2)              \
    X(streak_count)           \
    X(streak_mean)            \
    X(streak_m2)              \
    X(quantile)               \
    X(quantile_spread)        \
    X(quantile_streak)        \
    X(quantile_streak_min)    \
    X(elevated_run)           \
    X(spikes)                 \
    X(clipped)                \
    X(capped)                 \
    X(rebaselined)            \
    X(skipped)                \
    X(consecutive_skips)      \
    X(nonfinite)              \
    X(zero_norm)              \
    X(last_grad_norm)         \
    X(last_z_score)           \
    X(last_threshold)         \
    X(last_scale)

#define ZCLIP_RECORD_FIELDS(X) \
    X(grad_norm)               \
    X(threshold)               \
    X(z_score)                 \
    X(scale)                   \
    X(is_spike)                \
    X(is_finite)               \
    X(verdict)                 \
    X(spike_level)             \
    X(elevated_run)

namespace zclip {

#define ZCLIP_DOUBLE(name) double name;
struct Config {
    ZCLIP_CONFIG_FIELDS(ZCLIP_DOUBLE)
};
struct State {
    ZCLIP_STATE_FIELDS(ZCLIP_DOUBLE)
};
struct Record {
    ZCLIP_RECORD_FIELDS(ZCLIP_DOUBLE)
};
#undef ZCLIP_DOUBLE

// Values of the fields that stand for a choice.
constexpr double kReciprocal = 0.0, kMean = 1.0, kMax = 2.0;       // clip_option
constexpr double kClip = 0.0, kSkipSpike = 1.0;                    // on_spike
constexpr double kSkip = 0.0, kRaise = 1.0, kPass = 2.0;           // on_nonfinite
constexpr double kStep = 0.0, kSkipStep = 1.0, kRaiseError = 2.0;  // verdict

// Above this sum of squares the gradient counts as not finite: the squares of its norm would overflow the statistics.
constexpr double kMaxSumOfSquares = 1e300;
// A z-score above this counts as elevated; the length of the run of such steps is reported, not acted on.
constexpr double kElevated = 1.0;
// Makes the median absolute deviation of a normal distribution its standard deviation.
constexpr double kMadToStd = 1.4826;

// How the running quantile follows the norms (clip_quantile). All of it is relative to the quantile itself.
constexpr double kFirstSpread = 0.3;                      // wide: the first norm may lie far from the quantile
constexpr double kKeepSpread = 0.98, kTakeSpread = 0.02;  // remembers some 50 samples
constexpr double kMaxDeviation = 3.0;                     // in spreads: one spike hardly moves the spread
constexpr double kSmallestSpread = 0.01;                  // a constant norm must not make it blind
constexpr double kLargestSpread = 10.0;                   // wild norms must not make it overflow
constexpr double kSmallestRate = 0.05;                    // forgets: what came long ago has little weight
constexpr double kReach = 3.0;                            // in spreads: how far a rate of 1 moves it
constexpr double kShift = 10.0;                           // so many norms in a row far above it: it starts again there

ZCLIP_FN double smaller(double a, double b) { return a < b ? a : b; }
ZCLIP_FN double larger(double a, double b) { return a > b ? a : b; }

ZCLIP_FN double median_of_sorted(const double* x, int n) { return (x[(n - 1) / 2] + x[n / 2]) * 0.5; }

ZCLIP_FN void sort_in_place(double* x, int n) {
    for (int i = 1; i < n; ++i) {
        const double value = x[i];
        int j = i;
        for (; j > 0 && x[j - 1] > value; --j) x[j] = x[j - 1];
        x[j] = value;
    }
}

// Adds one sample to a running mean and sum of squared deviations (Welford).
ZCLIP_FN void welford(double y, double* count, double* mean, double* m2) {
    *count = *count + 1.0;
    const double delta = y - *mean;
    *mean = *mean + delta / *count;
    *m2 = *m2 + delta * (y - *mean);
}

// `buffer` holds the warm-up samples where robust_warmup is set (warmup_steps doubles); it is empty again at the end.
ZCLIP_FN void warm_up(double y, const Config& c, State* s, double* buffer) {
    const int index = static_cast<int>(s->warmup_count);
    const bool full = s->warmup_count + 1.0 >= c.warmup_steps;
    welford(y, &s->warmup_count, &s->warmup_mean, &s->warmup_m2);
    if (c.robust_warmup != 0.0) buffer[index] = y;
    if (!full) return;
    s->warm = 1.0;
    s->mean = s->warmup_mean;
    s->var = s->warmup_m2 / s->warmup_count;
    if (c.robust_warmup != 0.0) {
        const int n = index + 1;
        sort_in_place(buffer, n);
        const double median = median_of_sorted(buffer, n);
        for (int i = 0; i < n; ++i) buffer[i] = fabs(buffer[i] - median);
        sort_in_place(buffer, n);
        const double deviation = kMadToStd * median_of_sorted(buffer, n);
        s->mean = median;
        s->var = deviation * deviation;
        for (int i = 0; i < n; ++i) buffer[i] = 0.0;
    }
}

// The variance is taken around the new mean, as the authors' code does.
ZCLIP_FN void move_average(double u, const Config& c, State* s) {
    const double keep = u < s->mean ? c.alpha_down : c.alpha;
    const double take = 1.0 - keep;
    s->mean = keep * s->mean + take * u;
    const double delta = u - s->mean;
    s->var = keep * s->var + take * (delta * delta);
}

// z-score, spike or not, and the threshold of a spike, from the statistics before this step.
ZCLIP_FN void judge(double y, const Config& c, State* s, Record* r) {
    const bool in_logs = c.log_space != 0.0;
    const double unit = in_logs ? 1.0 : s->mean;
    const double spread = larger(sqrt(s->var), c.min_rel_std * unit);
    const double width = spread + c.eps * unit;
    const double level = s->mean + c.z_thresh * width;
    r->z_score = (y - s->mean) / width;
    r->spike_level = in_logs ? exp(level) : level;
    s->elevated_run = r->z_score > kElevated ? s->elevated_run + 1.0 : 0.0;
    if (!(r->z_score > c.z_thresh)) return;
    double reach = c.clip_factor * c.z_thresh * spread;
    if (c.clip_option == kReciprocal) reach = reach * (c.z_thresh / r->z_score);
    if (c.clip_option == kMean) reach = 0.0;
    const double target = in_logs ? exp(s->mean + reach) : s->mean + reach;
    r->is_spike = 1.0;
    r->threshold = smaller(larger(target, c.min_threshold), c.max_threshold);
}

// A normal step feeds its own norm to the statistics, a spike its threshold; `patience` spikes in a row are a shift,
// and the statistics start again from them.
ZCLIP_FN void learn(double y, const Config& c, State* s, const Record& r) {
    double u = y;
    if (r.is_spike != 0.0) {
        s->spikes = s->spikes + 1.0;
        welford(y, &s->streak_count, &s->streak_mean, &s->streak_m2);
        u = smaller(c.log_space != 0.0 ? log(r.threshold) : r.threshold, y);
    }
    const bool shifted = s->streak_count >= c.patience;
    if (shifted) {
        s->rebaselined = s->rebaselined + 1.0;
        s->mean = s->streak_mean;
        s->var = s->streak_m2 / s->streak_count;
    } else if (r.is_spike == 0.0 || c.skip_update_on_spike == 0.0) {
        move_average(u, c, s);
    }
    if (shifted || r.is_spike == 0.0) {
        s->streak_count = 0.0;
        s->streak_mean = 0.0;
        s->streak_m2 = 0.0;
    }
}

ZCLIP_FN void start_quantile(double g, State* s) {
    s->quantile = g;
    s->quantile_spread = kFirstSpread;
    s->quantile_streak = 0.0;
    s->quantile_streak_min = 0.0;
}

// The limit of this step: the quantile of the norms before it. Then moves the quantile: a share p of the norms takes it
// down by 1 - p, the others take it up by p, so it rests where p of them lie below. `samples` counts this one, too.
// Up is slow where p is small, so norms that stay far above it start it again, at the least of them.
ZCLIP_FN double follow_quantile(double g, const Config& c, State* s) {
    if (s->quantile == 0.0) {
        start_quantile(g, s);
        return HUGE_VAL;
    }
    const double limit = s->quantile;
    const double ratio = g / limit;
    const double deviation = larger(ratio, 1.0 / ratio) - 1.0;
    const double largest = kMaxDeviation * s->quantile_spread;
    if (ratio > 1.0 && deviation > largest) {
        s->quantile_streak_min = s->quantile_streak == 0.0 ? g : smaller(s->quantile_streak_min, g);
        s->quantile_streak = s->quantile_streak + 1.0;
    } else {
        s->quantile_streak = 0.0;
        s->quantile_streak_min = 0.0;
    }
    if (s->quantile_streak >= kShift) {
        start_quantile(s->quantile_streak_min, s);
        return limit;
    }
    const double spread = kKeepSpread * s->quantile_spread + kTakeSpread * smaller(deviation, largest);
    s->quantile_spread = smaller(larger(spread, kSmallestSpread), kLargestSpread);
    const double move = larger(kSmallestRate, 1.0 / s->samples) * (kReach * s->quantile_spread);
    const double p = c.clip_quantile;
    s->quantile = ratio < 1.0 ? limit / (1.0 + move * (1.0 - p)) : limit * (1.0 + move * p);
    return limit;
}

// Past max_consecutive_skips a spike is clipped, until a step that is none, so that training goes on. `quantile` limits
// every step.
ZCLIP_FN void act(double quantile, const Config& c, State* s, Record* r) {
    const bool skips = r->is_spike != 0.0 && c.on_spike == kSkipSpike;
    if (skips && s->consecutive_skips < c.max_consecutive_skips) {
        s->skipped = s->skipped + 1.0;
        s->consecutive_skips = s->consecutive_skips + 1.0;
        r->verdict = kSkipStep;
        return;
    }
    if (!skips) s->consecutive_skips = 0.0;
    const double learned = smaller(r->threshold, quantile);
    const double limit = smaller(learned, c.max_grad_norm);
    if (!(r->grad_norm > limit)) return;
    r->scale = limit / r->grad_norm;
    s->clipped = s->clipped + 1.0;
    if (c.max_grad_norm < learned) s->capped = s->capped + 1.0;
}

ZCLIP_FN void refuse_nonfinite(const Config& c, State* s, Record* r) {
    r->is_finite = 0.0;
    s->nonfinite = s->nonfinite + 1.0;
    if (c.on_nonfinite == kPass) {
        s->consecutive_skips = 0.0;
        return;
    }
    s->skipped = s->skipped + 1.0;
    s->consecutive_skips = s->consecutive_skips + 1.0;
    const bool stop = c.on_nonfinite == kRaise || s->consecutive_skips > c.max_consecutive_skips;
    r->verdict = stop ? kRaiseError : kSkipStep;
}

// One step. `sumsq` is the sum of squares of all gradients, `nonfinite` how many of their elements are inf or NaN.
// Changes the state, fills the record. `buffer` is warm_up's.
ZCLIP_FN void decide(double sumsq, double nonfinite, const Config& c, State* s, double* buffer, Record* r) {
    s->steps = s->steps + 1.0;
    *r = Record{sqrt(sumsq), HUGE_VAL, 0.0, 1.0, 0.0, 1.0, kStep, HUGE_VAL, 0.0};
    if (nonfinite > 0.0 || !(sumsq <= kMaxSumOfSquares)) {
        refuse_nonfinite(c, s, r);
    } else if (sumsq == 0.0) {
        s->zero_norm = s->zero_norm + 1.0;
        s->consecutive_skips = 0.0;
    } else {
        const double y = c.log_space != 0.0 ? log(r->grad_norm) : r->grad_norm;
        s->samples = s->samples + 1.0;
        if (s->warm == 0.0) {
            warm_up(y, c, s, buffer);
        } else {
            judge(y, c, s, r);
            learn(y, c, s, *r);
        }
        act(c.clip_quantile != 0.0 ? follow_quantile(r->grad_norm, c, s) : HUGE_VAL, c, s, r);
    }
    r->elevated_run = s->elevated_run;
    s->last_grad_norm = r->grad_norm;
    s->last_z_score = r->z_score;
    s->last_threshold = r->threshold;
    s->last_scale = r->scale;
}

}  // namespace zclip
