"""ZClipOptimizer through Accelerate's `prepare`, alone and by two ranks, against plain PyTorch."""

import sys
from pathlib import Path

import pytest
import torch

import zclip_ext

sys.path.insert(0, str(Path(__file__).resolve().parent / "ranks"))
import launch
import layouts


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    cases = ["accelerate_same", "accelerate_accumulates", "accelerate_bf16"]
    found = {}
    for world in (1, 2):
        folder = tmp_path_factory.mktemp("accelerate")
        for case, ranks in launch.run([*cases, f"accelerate_resumes:{folder}"], world).items():
            found[case.split(":")[0], world] = ranks
    return found


def of(reports, case, world):
    for report in reports[case, world]:
        assert not isinstance(report, str), report
    return reports[case, world]


def plain(spoil=()):
    """The same steps by one process without Accelerate."""
    net = layouts.Net()
    optimizer = zclip_ext.ZClipOptimizer(torch.optim.AdamW(net.parameters(), lr=0.01), warmup_steps=4)
    norms, scales = [], []
    for step in range(12):
        optimizer.zero_grad()
        factor = 40.0 if step == 8 else float("nan") if step in spoil else 1.0
        (layouts.loss_of(net, layouts.whole_batch(step)) * factor).backward()
        optimizer.step()
        norms.append(float(optimizer.zclip.last.grad_norm))
        scales.append(float(optimizer.zclip.last.scale))
    return norms, scales, [p.detach().double().sum().item() for p in net.parameters()]


@pytest.mark.filterwarnings("ignore::zclip_ext.ZClipWarning")
@pytest.mark.parametrize("world", [1, 2])
def test_same_as_plain_torch(reports, world):
    norms, scales, weights = plain(spoil=(10,))
    for report in of(reports, "accelerate_same", world):
        assert report["norms"] == pytest.approx(norms, rel=1e-5, nan_ok=True)
        assert report["scales"] == pytest.approx(scales, rel=1e-5)
        assert report["weights"] == pytest.approx(weights, abs=1e-5)
        assert report["skipped"] == [step == 10 for step in range(12)]
        assert [step for step, scale in enumerate(scales) if scale < 1] == [8]
        assert report["bits"] == reports["accelerate_same", world][0]["bits"]


@pytest.mark.parametrize("world", [1, 2])
def test_one_sample_for_each_accumulated_step(reports, world):
    norms, scales, weights = plain()
    for report in of(reports, "accelerate_accumulates", world):
        assert report["norms"] == pytest.approx(norms, rel=1e-5)
        assert report["scales"] == pytest.approx(scales, rel=1e-5)
        assert report["weights"] == pytest.approx(weights, abs=1e-5)


@pytest.mark.parametrize("world", [1, 2])
def test_resumes_bit_for_bit(reports, world):
    for whole, resumed in of(reports, "accelerate_resumes", world):
        assert resumed["bits"] == whole["bits"]
        assert resumed["weights"] == whole["weights"]
        assert resumed["norms"] == whole["norms"][6:]


@pytest.mark.parametrize("world", [1, 2])
def test_bf16(reports, world):
    norms, _, _ = plain()
    for report in of(reports, "accelerate_bf16", world):
        assert report["norms"][:4] == pytest.approx(norms[:4], rel=0.05)  # bfloat16 keeps 8 bits
        assert [step for step, scale in enumerate(report["scales"]) if scale < 0.5] == [8]


def test_p85_the_record_is_the_same_however_it_was_asked_for():
    """The other trainers' helpers return floats, tensors or None."""
    net = layouts.Net()
    layouts.loss_of(net, layouts.whole_batch(0)).backward()
    for result in (
        zclip_ext.ZClip().step(net),
        zclip_ext.ZClip().clip([*net.parameters()]),
        zclip_ext.ZClip().decide(1.0),
    ):
        assert isinstance(result, zclip_ext.ClipResult)
        for name in ("grad_norm", "clipped_norm", "threshold", "z_score", "scale", "is_spike", "is_finite", "skipped"):
            assert getattr(result, name).shape == ()
        assert isinstance(float(result), float)
