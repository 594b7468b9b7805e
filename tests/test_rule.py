"""The rule against the plain-Python reference, and the two implementations of it against each other."""

import math

import pytest
import torch
from helpers import RuleRun, random_norms, random_options, rule_steps, seeded, usual_norms
from reference import ReferenceZClip

import zclip_ext
from zclip_ext import ops, replay, rule

VERDICTS = {"step": 0.0, "skip": 1.0, "raise": 2.0}


@pytest.mark.parametrize("log_space", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_agrees_with_reference(seed, log_space):
    rng = seeded(seed)
    options = {**random_options(rng), "log_space": log_space}
    norms = random_norms(rng, 400)
    reference = ReferenceZClip(**options)
    for index, (norm, step) in enumerate(zip(norms, replay(norms, **options), strict=True)):
        threshold, z, scale, verdict = reference.step(norm)
        where = f"step {index}, norm {norm}, options {options}"
        # The reference sums in another order; what is compared is the rule.
        assert step["z_score"] == pytest.approx(z, rel=1e-6, abs=1e-6), where
        assert step["threshold"] == pytest.approx(threshold, rel=1e-9), where
        assert step["scale"] == pytest.approx(scale, rel=1e-9), where
        assert step["verdict"] == VERDICTS[verdict], where
        assert step["is_finite"] == (math.isfinite(norm) and norm < 1e150), where


@pytest.mark.parametrize("seed", range(10))
def test_counts_as_reference_does(seed):
    rng = seeded(1000 + seed)
    options = {**random_options(rng), "on_nonfinite": "skip", "max_consecutive_skips": None}
    norms = random_norms(rng, 400)
    reference, zclip = ReferenceZClip(**options), zclip_ext.ZClip(**options)
    with pytest.warns(zclip_ext.ZClipWarning):
        for norm in norms:
            reference.step(norm)
            zclip.decide(norm)
    state = zclip.state_dict()
    assert {name: state[name] for name in reference.counts} == reference.counts
    assert state["steps"] == len(norms)


@pytest.mark.parametrize("seed", range(60))
def test_compiled_and_torch_agree_bit_for_bit(seed):
    rng = seeded(2000 + seed)
    compare(rng, random_options(rng), exact=True)


@pytest.mark.parametrize("seed", range(10))
def test_compiled_and_torch_agree_in_log_space(seed):
    rng = seeded(3000 + seed)
    # log and exp differ in the last bit between libraries, so the states drift apart by as little.
    compare(rng, {**random_options(rng), "log_space": True}, exact=False)


def compare(rng, options, *, exact):
    config = zclip_ext.ZClipConfig(**options)
    compiled, in_torch = RuleRun(config, ops._compiled.decide), RuleRun(config, rule.decide_)
    for sums in rule_steps(rng):
        for first, second in zip(compiled.step(sums), in_torch.step(sums), strict=True):
            if exact:
                assert torch.equal(first.nan_to_num(nan=-7.0), second.nan_to_num(nan=-7.0)), (sums, options)
            else:
                # The mean of logs passes through 0, where a relative tolerance has no meaning.
                torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("log_space", [False, True])
def test_statistics_stay_finite(seed, log_space):
    rng = seeded(4000 + seed)
    zclip = zclip_ext.ZClip(**{**random_options(rng), "log_space": log_space, "dry_run": True})
    for norm in random_norms(rng, 300):
        zclip.decide(norm * rng.choice([1.0, 1e-150, 1e100, -1.0]))
    state = zclip.state_dict()
    for name in ("mean", "var", "warmup_mean", "warmup_m2", "streak_mean", "streak_m2"):
        assert math.isfinite(state[name]), name


@pytest.mark.parametrize("rise", [1.4, 2.0, 20.0])
@pytest.mark.parametrize("seed", range(3))
def test_recovers_from_a_lasting_rise(rise, seed):
    rng = seeded(seed)
    norms = [rng.gauss(1.0, 0.05) for _ in range(300)] + [rise * rng.gauss(1.0, 0.05) for _ in range(2700)]
    clipped = [step["scale"] < 1.0 for step in replay(norms)]
    assert sum(clipped[-500:]) < 15
    # The published rule never does.
    published = [step["scale"] < 1.0 for step in replay(norms, zclip_ext.ZClipConfig.published())]
    assert sum(published[-500:]) == 500


@pytest.mark.parametrize("seed", range(3))
def test_a_burst_is_clipped_and_moves_the_mean_little(seed):
    rng = seeded(seed)
    steps = replay([rng.gauss(1.0, 0.05) for _ in range(300)] + [10.0] * 3)
    assert all(step["scale"] < 0.2 for step in steps[-3:])
    assert abs(steps[-1]["mean"] / steps[-4]["mean"] - 1.0) < 0.05


def test_threshold_shrinks_as_the_outlier_grows():
    thresholds = [replay([*usual_norms(), norm])[-1]["threshold"] for norm in (1.5, 3.0, 30.0)]
    assert thresholds == sorted(thresholds, reverse=True)
    assert thresholds[-1] > 0.998


def test_spike_level_is_where_a_spike_begins():
    level = replay([*usual_norms(), 1.0])[-1]["spike_level"]
    assert replay([*usual_norms(), level * (1 - 1e-12)])[-1]["is_spike"] == 0
    assert replay([*usual_norms(), level * (1 + 1e-12)])[-1]["is_spike"] == 1


def test_rebaselines_to_the_streak():
    steps = replay([*usual_norms(), *[4.0, 6.0] * 5], patience=10)
    assert steps[-1]["mean"] == pytest.approx(5.0)
    assert steps[-1]["std"] == pytest.approx(1.0)
    assert steps[-1]["is_spike"] == 1  # the step that completes the streak is itself still clipped


def test_a_normal_step_ends_a_streak():
    steps = replay([*usual_norms(), *[5.0] * 9, 1.0, *[5.0] * 9], patience=10)
    assert steps[-1]["mean"] < 1.5
