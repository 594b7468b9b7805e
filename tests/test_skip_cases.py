"""Cases B of the field: what a step that is left out must mean."""

import math
import warnings

import pytest
import torch
from helpers import parameter, set_norm, step, usual_norms, warmed
from torch import nn

import zclip_ext
from zclip_ext import replay


def test_p22_skips_are_never_silent(backend):
    zclip, p = warmed()
    with pytest.warns(zclip_ext.ZClipWarning) as caught:
        for _ in range(5):
            set_norm([p], math.nan)
            zclip.step([p])
    assert [str(w.message).rsplit(": ", 1)[1] for w in caught] == ["1)"]
    metrics = zclip.metrics()
    assert (metrics["skipped"], metrics["consecutive_skips"], metrics["nonfinite"]) == (5, 5, 5)
    with pytest.warns(zclip_ext.ZClipWarning, match="so far: 10"):
        for _ in range(5):
            set_norm([p], math.nan)
            zclip.step([p])


def test_p22_each_tracker_speaks_for_itself():
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for zclip in (zclip_ext.ZClip(), zclip_ext.ZClip()):
                zclip.decide(math.nan)
        assert [w.filename for w in caught] == [__file__] * 2


def test_p23_a_skip_at_the_first_step_returns_as_any_other():
    p = nn.Parameter(torch.ones(2))
    optimizer = zclip_ext.ZClipOptimizer(torch.optim.SGD([p], lr=0.1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)

    def closure():
        p.grad = torch.tensor([math.nan, 1.0])
        return 3.0

    with pytest.warns(zclip_ext.ZClipWarning) as caught:
        assert optimizer.step(closure) == 3.0
        scheduler.step()
    assert [w.category for w in caught] == [zclip_ext.ZClipWarning]  # torch has nothing to say of the order
    assert optimizer.last_step_skipped
    assert p.tolist() == [1.0, 1.0]
    assert scheduler.get_last_lr() == [0.05]  # a scheduler is the loop's own: it moves on
    p.grad = torch.ones(2)
    assert optimizer.step(lambda: 4.0) == 4.0
    assert not optimizer.last_step_skipped


def test_p24_one_nan_skips_one_step(backend):
    verdicts = [step["verdict"] for step in replay([*usual_norms(), math.nan, *usual_norms(50)])]
    assert verdicts.count(0.0) == 75


def test_p25_the_length_of_a_run_of_raised_norms_is_told(backend):
    zclip, p = warmed(alpha=0.999)
    state = zclip.state_dict()
    for _ in range(5):
        result = step(zclip, p, state["mean"] + 2.0 * math.sqrt(state["var"]))
        assert not result.is_spike
    assert result.elevated_run == 5
    assert zclip.metrics()["elevated_run"] == 5
    assert step(zclip, p, 0.95).elevated_run == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_p26_skip_raise_or_pass(backend, value):
    def optimizer(**options):
        p = parameter([1.0, value])
        p.data.fill_(2.0)
        return p, zclip_ext.ZClipOptimizer(torch.optim.SGD([p], lr=0.1), **options)

    p, skipping = optimizer()
    with pytest.warns(zclip_ext.ZClipWarning):
        skipping.step()
    assert p.tolist() == [2.0, 2.0]

    p, raising = optimizer(on_nonfinite="raise")
    with pytest.raises(zclip_ext.NonFiniteGradientError, match="inf or NaN"):
        raising.step()
    assert p.tolist() == [2.0, 2.0]
    assert p.grad[0].item() == 1.0
    assert raising.zclip.metrics()["nonfinite"] == 1

    p, passing = optimizer(on_nonfinite="pass")
    passing.step()
    assert p[0].item() == pytest.approx(1.9)
    assert not math.isfinite(p[1].item())
    assert passing.zclip.metrics()["skipped"] == 0


def test_a_skipped_spike_leaves_weights_and_moments(backend):
    p = nn.Parameter(torch.ones(4))
    optimizer = zclip_ext.ZClipOptimizer(torch.optim.AdamW([p], lr=0.1), on_spike="skip")
    for norm in usual_norms():
        set_norm([p], norm)
        optimizer.step()
    before = p.detach().clone(), optimizer.state[p]["exp_avg"].clone(), optimizer.state[p]["step"].clone()
    set_norm([p], 50.0)
    with pytest.warns(zclip_ext.ZClipWarning, match="spike"):
        optimizer.step()
    after = p.detach(), optimizer.state[p]["exp_avg"], optimizer.state[p]["step"]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    set_norm([p], 1.0)
    optimizer.step()
    assert not torch.equal(p.detach(), before[0])
