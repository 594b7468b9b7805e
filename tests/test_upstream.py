"""A differential test against the authors' package (PyPI zclip 1.0.0): the published rule, step by step."""

import pytest
import torch
import zclip as upstream
from helpers import seeded, usual_norms
from torch import nn

import zclip_ext

MODES = [
    {"mode": "zscore", "clip_option": "adaptive_scaling"},
    {"mode": "zscore", "clip_option": "mean"},
    {"mode": "percentile"},
]


def spiky_norms(rng, count):
    """Noise of 5 % with spikes of all sizes. No lasting shift: after one the published variance decays to 0, and only
    eps, which is absolute there and relative here, is left of it."""
    return [rng.gauss(1.0, 0.05) * (rng.choice([1.3, 2, 10, 300]) if rng.random() < 0.04 else 1) for _ in range(count)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 3))
        self.bias = nn.Parameter(torch.zeros(3))

    def set_gradients(self, norm, generator):
        gradients = [torch.randn(p.shape, generator=generator) for p in self.parameters()]
        total = torch.cat([g.flatten() for g in gradients]).double().norm()
        for p, gradient in zip(self.parameters(), gradients, strict=True):
            p.grad = gradient * (norm / total)


@pytest.mark.filterwarnings("ignore:max_grad_norm")  # it does cap most steps here
@pytest.mark.parametrize("skip_update_on_spike", [False, True])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(mode.values()))
def test_agrees_over_a_random_trace(mode, max_grad_norm, skip_update_on_spike):
    options = {**mode, "max_grad_norm": max_grad_norm, "skip_update_on_spike": skip_update_on_spike}
    theirs = upstream.ZClip(**options)
    ours = zclip_ext.ZClip(zclip_ext.ZClipConfig.published(**options))
    first, second = Model(), Model()
    spikes = 0
    for index, norm in enumerate(usual_norms() + spiky_norms(seeded(7), 1975)):
        for model in (first, second):
            model.set_gradients(norm, torch.Generator().manual_seed(index))
        clip_value = theirs._compute_clip_val(norm) if theirs.initialized else None
        returned = theirs.step(first)
        result = ours.step(second)
        where = f"step {index}, norm {norm}"
        assert float(result) == pytest.approx(returned, rel=1e-6), where
        assert bool(result.is_spike) == (clip_value is not None), where
        if clip_value is not None:
            spikes += 1
            assert float(result.threshold) == pytest.approx(clip_value, rel=1e-5), where
        for p, q in zip(first.parameters(), second.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=0.0, msg=where)
    assert ours.state_dict()["mean"] == pytest.approx(theirs.mean, rel=1e-5)
    assert ours.state_dict()["var"] == pytest.approx(theirs.var, rel=1e-4)
    assert spikes > 50


def test_the_same_call_and_a_float():
    model = Model()
    model.set_gradients(2.0, torch.Generator().manual_seed(0))
    result = zclip_ext.ZClip(mode="zscore", clip_option="adaptive_scaling").step(model)
    assert f"{result:.3f}" == "2.000"
    assert float(result) == pytest.approx(2.0, rel=1e-6)
    assert result > 1.5
    assert result <= 2.1
    assert (round(result, 3), round(result.item(), 3), "%.1f" % result) == (2.0, 2.0, "2.0")  # noqa: UP031
