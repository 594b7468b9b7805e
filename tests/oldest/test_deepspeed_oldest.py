"""The oldest DeepSpeed that is supported: 0.16.9 with torch 2.7.0, in the environment of `make test-oldest`.

Up to 0.19.7 DeepSpeed takes a norm that isn't finite for 1.0, and its bf16 optimizer dies of it. ZeRO 3 on CPUs is left
out: there it corrupts gradients by itself now and then.
"""

import sys
import tempfile
from pathlib import Path

import deepspeed
import pytest
from packaging.version import Version

from zclip_ext.integrations.deepspeed import settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "ranks"))
import launch
from deepspeed_paths import SPIKES, STEPS, dtype_of

PATHS = [
    "ZeRO 0, fp32",
    "ZeRO 0, bf16",
    *(f"ZeRO {stage}, {kind}" for stage in (1, 2) for kind in ("fp32", "bf16", "fp16", "offload")),
    *(f"ZeRO {stage}, {kind}" for stage in (1, 2) for kind in ("accumulation", "groups")),
    "ZeRO 1, bf16, fp32 sums",
]
SKIPS = ["ZeRO 1, fp32", "ZeRO 2, bf16", "ZeRO 1, bf16, fp32 sums"]
P73 = ["ZeRO 1, fp32", "ZeRO 2, fp32"]


@pytest.fixture(scope="module")
def reports():
    assert Version(deepspeed.__version__) < Version(settings.REFERENCE), (
        "run this in the environment of make test-oldest"
    )
    names = [f"deepspeed_p73:{path}" for path in P73] + [f"deepspeed_skips:{path}" for path in SKIPS]
    with tempfile.TemporaryDirectory() as folder:
        found = launch.run([*names, *(f"deepspeed_path:{path}:{folder}" for path in PATHS)], 2, timeout=300)
    return {":".join(case.split(":")[:2]): report for case, report in found.items()}


@pytest.mark.parametrize("path", PATHS)
def test_path(reports, path):
    for report in reports[f"deepspeed_path:{path}"]:
        assert isinstance(report, dict), report
        # Sums and float32 norms in another order than the reference's, after spikes of 40x and 300x.
        assert report["difference"] < (1e-3 if dtype_of(path).itemsize == 2 else 1e-6)
        assert set(SPIKES) <= {step for step, scale in enumerate(report["scales"]) if scale < 1}
        assert report["global_steps"] == STEPS
        assert report["skipped_steps"] == 1
        assert report["scheduled"] == STEPS - 1
        assert report["nonfinite"] == (0 if "fp16" in path else 1)
        assert report["resumed_bits"] == report["bits"] == reports[f"deepspeed_path:{path}"][0]["bits"]
        assert report["clip_grad"] in (5.0, None)


@pytest.mark.parametrize("path", P73)
def test_p73_a_norm_of_minus_one_is_not_finite(reports, path):
    for report in reports[f"deepspeed_p73:{path}"]:
        assert {"nonfinite", "skipped"} <= set(report["changed"])
        assert report["sign"] == [True, True]


@pytest.mark.parametrize("path", SKIPS)
def test_policies(reports, path):
    for report in reports[f"deepspeed_skips:{path}"]:
        assert report["skip"]["skipped_steps"] == 3
        assert report["skip"]["still"]
        assert "max_consecutive_skips=1" in report["limit"]["said"][1]
