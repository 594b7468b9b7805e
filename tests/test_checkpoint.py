"""The state of a ZClip as plain numbers: every field checked, and options that changed in between."""

import json
import math

import pytest
from helpers import usual_norms, warmed

import zclip_ext
from zclip_ext import ZClip, ZClipWarning


def test_json_carries_it():
    zclip, _ = warmed()
    zclip.decide(5.0)
    state = json.loads(json.dumps(zclip.state_dict()))
    other = ZClip()
    other.load_state_dict(state)
    assert other.state_dict() == zclip.state_dict()
    assert other.metrics() == zclip.metrics()
    assert other.decide(1.2).record.tolist() == zclip.decide(1.2).record.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, r"state_dict\['version'\]: got 2, allowed is 1"),
        ({"mean": None}, r"state_dict\['mean'\]: got None, expected a number"),
        ({"mean": math.nan}, r"state_dict\['mean'\]: got nan"),
        ({"var": -0.5}, r"state_dict\['var'\]: got -0.5"),
        ({"quantile": -1.0}, r"state_dict\['quantile'\]: got -1.0"),
        ({"quantile_streak": 0.5}, r"state_dict\['quantile_streak'\]: got 0.5"),
        ({"quantile_spread": math.inf}, r"state_dict\['quantile_spread'\]: got inf"),
        ({"steps": 1.5}, r"state_dict\['steps'\]: got 1.5, allowed is a whole number"),
        ({"spikes": -1}, r"state_dict\['spikes'\]: got -1"),
        ({"spikes": True}, r"state_dict\['spikes'\]: got True, expected a number"),
        ({"log_space": 7}, r"state_dict\['log_space'\]: got 7, allowed is 0 or 1"),
        ({"more": 1}, "unknown field 'more'"),
    ],
)
def test_every_field_is_checked(change, message):
    zclip, _ = warmed()
    before = zclip.state_dict()
    with pytest.raises(ValueError, match=message):
        zclip.load_state_dict({**before, **change})
    assert zclip.state_dict() == before


@pytest.mark.parametrize("name", ["version", "mean", "steps", "last_scale"])
def test_missing_fields_are_named(name):
    state = ZClip().state_dict()
    del state[name]
    with pytest.raises(ValueError, match=name):
        ZClip().load_state_dict(state)


def test_only_a_mapping_is_a_state():
    with pytest.raises(ValueError, match="got list, expected a mapping"):
        ZClip().load_state_dict([1])


def test_a_state_after_a_bad_step_can_be_loaded():
    zclip, _ = warmed()
    with pytest.warns(ZClipWarning):
        zclip.decide(math.nan)
    other = ZClip()
    other.load_state_dict(zclip.state_dict())
    assert other.metrics()["nonfinite"] == 1


def test_counters_go_on():
    zclip = ZClip(on_spike="skip")
    for norm in usual_norms():
        zclip.decide(norm)
    with pytest.warns(ZClipWarning):
        zclip.decide(9.0)
    other = ZClip(on_spike="skip")
    other.load_state_dict(zclip.state_dict())
    other.decide(9.0)
    assert other.metrics()["consecutive_skips"] == 2


@pytest.mark.parametrize(
    ("saved_with", "loaded_with", "samples", "reason"),
    [
        ({}, {"log_space": True}, 25, "log_space is not what"),
        ({}, {"robust_warmup": True}, 13, "robust_warmup needs warm-up samples"),
        ({"warmup_steps": 30}, {}, 27, "warmup_steps is no more than"),
    ],
)
def test_statistics_that_the_options_cannot_go_on_from_start_afresh(saved_with, loaded_with, samples, reason):
    zclip = ZClip(**saved_with)
    for norm in usual_norms(samples):
        zclip.decide(norm)
    other = ZClip(**loaded_with)
    with pytest.warns(ZClipWarning, match=reason):
        other.load_state_dict(zclip.state_dict())
    assert other.state_dict()["warm"] == 0
    assert other.metrics()["steps"] == samples
    for norm in usual_norms():
        other.decide(norm)
    assert other.state_dict()["warm"] == 1
    assert other.metrics()["mean"] == pytest.approx(0.998, rel=0.06)


def test_options_that_may_change_in_between():
    zclip, _ = warmed()
    other = ZClip(z_thresh=4.0, max_grad_norm=2.0, patience=None, warmup_steps=100)
    other.load_state_dict(zclip.state_dict())
    assert other.state_dict()["warm"] == 1
    assert other.decide(1.15).scale == 1.0  # z = 3


def test_clip_quantile_switched_on_and_off_in_between():
    zclip, _ = warmed()
    assert zclip.state_dict()["quantile"] == 0
    on = ZClip(clip_quantile=0.1)
    on.load_state_dict(zclip.state_dict())
    assert on.decide(1.0).scale == 1.0  # the first sample only starts it
    assert on.metrics()["quantile"] == 1.0
    assert on.decide(1.05).scale == 1.0 / 1.05
    saved = on.state_dict()
    off = ZClip()
    off.load_state_dict(saved)
    assert off.decide(1.05).scale == 1.0
    assert off.metrics()["quantile"] == 0
    for name in ("quantile", "quantile_spread"):
        assert off.state_dict()[name] == saved[name]
    for _ in range(100):
        off.decide(20.0)
    on.load_state_dict(off.state_dict())
    assert [on.decide(20.0).scale for _ in range(11)][-1] == 1.0  # where the norms are now, after ten


def test_the_quantile_outlives_a_new_warm_up():
    zclip, _ = warmed(clip_quantile=0.1)
    other = ZClip(clip_quantile=0.1, log_space=True)
    with pytest.warns(ZClipWarning, match="log_space is not what"):
        other.load_state_dict(zclip.state_dict())
    assert other.metrics()["quantile"] == zclip.metrics()["quantile"] > 0


def test_robust_warm_up_resumes_in_its_middle():
    norms = [*usual_norms(24), 100.0]
    straight = ZClip(robust_warmup=True)
    for norm in norms:
        straight.decide(norm)
    halves = ZClip(robust_warmup=True)
    for index, norm in enumerate(norms):
        if index == 11:
            state = halves.state_dict()
            halves = ZClip(robust_warmup=True)
            halves.load_state_dict(state)
        halves.decide(norm)
    assert halves.state_dict() == straight.state_dict()


def test_reset_forgets_all():
    zclip, _ = warmed()
    zclip.reset()
    assert zclip.state_dict() == ZClip().state_dict()
    assert zclip.last is None


def test_metrics_have_the_documented_keys():
    documented = {"grad_norm", "clipped_norm", "threshold", "z_score", "mean", "std", "scale", "steps", "samples"}
    documented |= {"spikes", "capped", "clip_rate", "cap_rate", "rebaselined", "skipped", "nonfinite", "zero_norm"}
    documented |= {"consecutive_skips", "elevated_run", "clipped", "quantile"}
    assert set(ZClip().metrics()) == documented


def test_p88_rates():
    zclip = zclip_ext.ZClip()
    for index in range(100):
        zclip.decide(8.0 if index in (40, 60, 80) else usual_norms()[index % 2])
    metrics = zclip.metrics()
    assert (metrics["clip_rate"], metrics["cap_rate"], metrics["skipped"]) == (0.03, 0.0, 0)


def test_p71_both_norms():
    zclip, _ = warmed()
    zclip.decide(5.0)
    metrics = zclip.metrics()
    assert metrics["grad_norm"] == 5.0
    assert metrics["clipped_norm"] == pytest.approx(min(5.0, metrics["threshold"]))
