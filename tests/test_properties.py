"""What holds for any gradients."""

import math

import pytest
import torch
from helpers import usual_norms
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import zclip_ext
from zclip_ext import replay

norms = st.floats(1e-3, 1e3)
anything = st.one_of(norms, st.just(0.0), st.floats(allow_nan=True, allow_infinity=True, min_value=None))
options = st.fixed_dictionaries(
    {
        "clip_option": st.sampled_from(["reciprocal", "mean", "max"]),
        "log_space": st.booleans(),
        "robust_warmup": st.booleans(),
        "patience": st.sampled_from([None, 2, 50]),
        "min_rel_std": st.sampled_from([0.0, 0.01]),
        "skip_update_on_spike": st.booleans(),
        "warmup_steps": st.sampled_from([2, 25]),
        "clip_quantile": st.sampled_from([None, 0.1, 0.9]),
    }
)
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def train(shards, steps, **chosen):
    """Scales and spikes over the steps; a step is a list of numbers, split over parameters as `shards` says."""
    zclip, decisions = zclip_ext.ZClip(**chosen), []
    for values in steps:
        parameters = [nn.Parameter(torch.zeros(len(shard), dtype=torch.float32)) for shard in shards]
        for parameter, shard in zip(parameters, shards, strict=True):
            parameter.grad = torch.tensor([values[i] for i in shard], dtype=torch.float32)
        result = zclip.step(parameters)
        decisions.append((result.scale.item(), bool(result.is_spike)))
    return decisions


gradients = st.lists(st.lists(st.floats(-100, 100, width=16), min_size=6, max_size=6), min_size=5, max_size=40)


@quick
@given(gradients, options, st.integers(-20, 20))
def test_scaling_all_gradients_changes_no_decision(steps, chosen, power):
    chosen = {**chosen, "log_space": False}
    factor = 2.0**power  # exact, so that the decisions are too
    scaled = [[value * factor for value in values] for values in steps]
    assert train([range(6)], scaled, **chosen) == train([range(6)], steps, **chosen)


@quick
@given(gradients, options, st.permutations(range(6)))
def test_permuting_parameters_changes_no_decision(steps, chosen, order):
    # Half-precision values are few enough bits for their squares to add up without rounding, in any order.
    one = train([[i] for i in range(6)], steps, **chosen)
    other = train([[i] for i in order], steps, **chosen)
    assert [spike for _, spike in one] == [spike for _, spike in other]
    assert [scale for scale, _ in one] == pytest.approx([scale for scale, _ in other], rel=1e-9)


@quick
@given(gradients, options, st.integers(1, 5))
def test_splitting_parameters_changes_no_decision(steps, chosen, cut):
    whole = train([range(6)], steps, **chosen)
    split = train([range(cut), range(cut, 6)], steps, **chosen)
    for (scale, spike), (other_scale, other_spike) in zip(whole, split, strict=True):
        assert scale == pytest.approx(other_scale, rel=1e-6)
        assert spike == other_spike


@quick
@given(st.lists(anything, max_size=120), options)
def test_statistics_stay_finite_for_any_input(trace, chosen):
    zclip = zclip_ext.ZClip(**chosen, dry_run=True)
    for norm in trace:
        zclip.decide(norm)
    state = zclip.state_dict()
    assert all(math.isfinite(value) for name, value in state.items() if not name.startswith("last_"))
    assert state["var"] >= 0
    assert (state["quantile"] > 0) == (chosen["clip_quantile"] is not None and state["samples"] > 0)


@quick
@given(st.lists(norms, min_size=1, max_size=60), options, st.sampled_from([None, 0.5, 2.0]), st.integers(1, 5000))
def test_the_clipped_norm_is_never_above_the_limit(backend, trace, chosen, cap, size):
    zclip = zclip_ext.ZClip(**chosen, max_grad_norm=cap)
    parameter = nn.Parameter(torch.zeros(size))
    direction = torch.randn(size)
    direction /= direction.double().norm()
    for norm in usual_norms() + trace[-3:]:
        quantile = zclip.metrics()["quantile"] or math.inf
        parameter.grad = direction * norm
        result = zclip.step([parameter])
        limit = min(float(result.threshold), quantile, math.inf if cap is None else cap)
        # One float32 rounding for each element.
        assert parameter.grad.double().norm().item() <= limit * (1 + 2**-23)


@quick
@given(st.lists(norms, max_size=80), options)
def test_decisions_are_sound(trace, chosen):
    for step in replay(trace, **chosen):
        assert 0.0 < step["scale"] <= 1.0
        assert step["threshold"] > 0.0
        assert step["is_spike"] == (step["z_score"] > 2.5)
        assert step["scale"] < 1.0 or step["grad_norm"] <= step["threshold"]
        if chosen["clip_quantile"] is None:
            assert step["scale"] == 1.0 or step["grad_norm"] > step["threshold"]
