"""DeepSpeed by its JSON: real engines on two ranks (gloo), each path against one process without DeepSpeed. Cases F.

The workers stand in tests/ranks; one launch runs all cases.
"""

import math
import subprocess
import sys
from pathlib import Path

import pytest

import zclip_ext
from zclip_ext.integrations.deepspeed import settings

sys.path.insert(0, str(Path(__file__).resolve().parent / "ranks"))
import launch
from deepspeed_paths import NOT_FINITE, PATHS, SPIKES, STEPS, dtype_of

UNTOUCHED = [
    "ZeRO 0, fp32",
    "ZeRO 0, fp32, gradient_clipping 0",
    "ZeRO 0, bf16",
    "ZeRO 1, bf16, fp32 sums",
    "ZeRO 1, fp32",
    "ZeRO 2, bf16",
    "ZeRO 3, fp32",
]
SKIPS = ["ZeRO 0, fp32", "ZeRO 0, bf16", "ZeRO 1, bf16, fp32 sums", "ZeRO 2, bf16", "ZeRO 3, fp32"]
CHECKPOINTS = ["ZeRO 0, fp32", "ZeRO 1, fp32", "ZeRO 3, bf16"]
UNIVERSAL = ["ZeRO 1, fp32", "ZeRO 3, fp32"]  # its converter wants the moments of Adam
OTHERS = [
    *(f"deepspeed_{case}:{path}" for case in ("untouched", "dry_run") for path in UNTOUCHED),
    *(f"deepspeed_p73:ZeRO {stage}, fp32" for stage in (1, 2, 3)),
    *(f"deepspeed_p74:{path}" for path in ("ZeRO 1, fp32", "ZeRO 1, bf16, fp32 sums", "ZeRO 2, fp32", "ZeRO 3, fp32")),
    *("deepspeed_p75:ZeRO 1, fp32", "deepspeed_p75:ZeRO 3, fp32", "deepspeed_p77:ZeRO 2, fp32", "deepspeed_refused"),
    *(f"deepspeed_skips:{path}" for path in SKIPS),
    *("deepspeed_inconsistent:ZeRO 1, fp32", "deepspeed_late_scheduler", "deepspeed_says:ZeRO 3, fp32"),
    *("deepspeed_built_before", "deepspeed_scaler", "deepspeed_hooks", "deepspeed_wrappers"),
    *(f"deepspeed_muon:{stage}" for stage in (1, 2)),
]


def on_disk(case, path, folder=""):
    return f"deepspeed_{case}:{path}:{folder}"


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What each rank of each case returned, by number of ranks and case."""
    folder = tmp_path_factory.mktemp("deepspeed")
    # The paths come last, since those with pipelines are the last of them.
    names = [*OTHERS, on_disk("monitor", "ZeRO 1, fp32", folder)]
    names += [on_disk("checkpoint_on_and_off", path, folder) for path in CHECKPOINTS]
    names += [on_disk("save", path, folder / f"universal{index}") for index, path in enumerate(UNIVERSAL)]
    names += [on_disk("path", path, folder) for path in PATHS]
    found = {2: launch.run(names, 2, timeout=400)}
    # Tensor parallelism leaves marks in its process.
    found[2] |= launch.run([f"deepspeed_tensor_parallel:{stage}" for stage in (0, 1, 3)], 2, timeout=120)
    for index in range(len(UNIVERSAL)):
        convert(folder / f"universal{index}")
    names = [on_disk("load_universal", path, folder / f"universal{index}") for index, path in enumerate(UNIVERSAL)]
    found[1] = launch.run(names, 1, timeout=120)
    names = [f"deepspeed_two_models:{stage}" for stage in (0, 1)]
    names += [f"deepspeed_copies_in_a_pipeline:{path}" for path in ("ZeRO 0, fp32", "ZeRO 1, fp32")]
    found[4] = launch.run(names, 4, timeout=120)
    return found


def convert(folder):
    """To a checkpoint that any number of ranks can load."""
    module = "deepspeed.checkpoint.ds_to_universal"
    parts = ["--input_folder", str(folder / "here"), "--output_folder", str(folder / "universal")]
    parts += ["--inject_missing_state"]  # of ZeRO 1 and 2, what Megatron would add by itself
    ended = subprocess.run([sys.executable, "-m", module, *parts], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]


def of(reports, case, world=2):
    """The report of each rank of the case whose name starts so."""
    found = next(value for name, value in reports[world].items() if name == case or name.startswith(f"{case}:"))
    for report in found:
        assert not isinstance(report, str) or not report.startswith("error"), report
    return found


def path_report(reports, path):
    return of(reports, f"deepspeed_path:{path}")


def allowed_difference(path):
    """Of weights, after spikes of 40x and 300x."""
    if dtype_of(path).itemsize == 2 or "autocast" in path:
        return 1e-3
    # One unit in the last place of a weight near 1, where DeepSpeed's float32 norm or order of sums has another bit.
    if path in ("ZeRO 3, offload", "ZeRO 2, accumulation"):
        return 6e-8
    return 2e-7 if "experts" in path else 0.0  # DeepSpeed adds up the experts' outputs in another order


@pytest.mark.parametrize("path", PATHS)
def test_weights_follow_the_single_process(reports, path):
    for report in path_report(reports, path):
        assert report["difference"] <= allowed_difference(path)


@pytest.mark.parametrize("path", PATHS)
def test_norm_is_that_of_the_whole_gradient_before_clipping(reports, path):
    """P71, P78: in fp16 with the loss scale of before its update, which grows within the run."""
    tolerance = 1e-6 if allowed_difference(path) < 1e-3 else 2e-2
    for report in path_report(reports, path):
        seen = [norm for norm in report["norms"] if math.isfinite(norm)]
        wanted = [norm for norm in report["reference_norms"] if math.isfinite(norm)]
        if "fp16" in path:  # the step that overflowed is not asked for: the norm of the step before stands there still
            del seen[NOT_FINITE]
            assert len({before for before, _ in report["loss_scales"]}) > 2
        assert seen == pytest.approx(wanted, rel=tolerance)
        if "fp16" not in path:  # at growth DeepSpeed divides its own report by the new scale
            said = [norm for norm in report["says_norm"] if math.isfinite(norm)]
            assert said == pytest.approx(seen, rel=1e-6)


@pytest.mark.parametrize("path", PATHS)
def test_spikes_alone_are_scaled_and_once(reports, path):
    """P79: each cell of the matrix is clipped by what the rule says."""
    for report in path_report(reports, path):
        scaled = [step for step, scale in enumerate(report["scales"]) if scale < 1]
        assert scaled == ([*SPIKES, NOT_FINITE] if "fp16" in path else [*SPIKES])
        for step in SPIKES:
            assert report["scales"][step] == pytest.approx(report["reference_scales"][step], rel=2e-2)


@pytest.mark.parametrize("path", PATHS)
def test_one_decision_a_step_on_all_ranks(reports, path):
    found = path_report(reports, path)
    overflown = 1 if "fp16" in path else 0
    for report in found:
        assert report["global_steps"] == STEPS
        assert report["steps"] == STEPS - overflown
        assert report["bits"] == found[0]["bits"]


@pytest.mark.parametrize("path", PATHS)
def test_not_finite_on_one_rank_is_left_out_everywhere(reports, path):
    """And the learning rate waits. P78: in fp16 the overflow is DeepSpeed's, and is neither sampled nor counted."""
    for report in path_report(reports, path):
        assert report["skipped_steps"] == 1
        assert report["scheduled"] == STEPS - 1
        assert report["nonfinite"] == (0 if "fp16" in path else 1)


@pytest.mark.parametrize("path", PATHS)
def test_resumes_bit_for_bit(reports, path):
    for report in path_report(reports, path):
        if path == "pipeline, bf16":  # by DeepSpeed 0.19.8, also without ZClip
            assert report["resume"] == "DeepSpeed can't load its checkpoint"
            continue
        assert report["resumed_bits"] == report["bits"]
        assert report["resumed_difference"] == 0
        assert report["client_state"] == ["mine"]


@pytest.mark.parametrize("path", PATHS)
def test_clip_grad_stays_the_users(reports, path):
    """Also in a checkpoint that is saved from within the step of a spike."""
    users = 0.0 if "gradient_clipping 0" in path else 5.0
    for report in path_report(reports, path):
        assert report["clip_grad"] in (users, None)
        assert report["saved_clip_grads"] in ([users], [])


@pytest.mark.parametrize("path", UNTOUCHED)
def test_without_the_block_deepspeed_is_as_before(reports, path):
    for report in of(reports, f"deepspeed_untouched:{path}"):
        for way in ("off", "dry run", "disabled"):
            assert report[way] == report["no block"], way
        assert report["on"] != report["no block"]


@pytest.mark.parametrize("path", UNTOUCHED)
def test_a_dry_run_only_watches(reports, path):
    for steps, spikes, scales in of(reports, f"deepspeed_dry_run:{path}"):
        assert (steps, spikes) == (4, 1)
        assert scales[2] < 0.1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_p73_a_norm_of_minus_one_is_not_finite(reports, stage):
    for report in of(reports, f"deepspeed_p73:ZeRO {stage}, fp32"):
        assert "samples" not in report["changed"]
        assert "mean" not in report["changed"]
        assert {"nonfinite", "skipped"} <= set(report["changed"])
        assert report["overflow"]
        assert report["sign"] == [True, True]
        assert report["skipped_steps"] == 1


@pytest.mark.parametrize("path", ["ZeRO 1, fp32", "ZeRO 1, bf16, fp32 sums", "ZeRO 2, fp32", "ZeRO 3, fp32"])
def test_p74_the_plain_api_under_zero_is_an_error(reports, path):
    for said in of(reports, f"deepspeed_p74:{path}"):
        assert "belongs to DeepSpeed's ZeRO" in said
        assert '"zclip": {"enabled": true}' in said


@pytest.mark.parametrize("stage", [1, 3])
def test_p75_deepspeeds_own_limit_is_superseded(reports, stage):
    first, *others = of(reports, f"deepspeed_p75:ZeRO {stage}, fp32")
    for report in (first, *others):
        for way in ("default", "written", "zero"):
            assert min(report[way]["norms"]) > 100
            assert report[way]["scales"] == [1.0, 1.0, 1.0]
        capped = report["capped"]
        assert [n * s for n, s in zip(capped["norms"], capped["scales"], strict=True)] == pytest.approx([0.01] * 3)
        assert (report["written"]["clip_grad"], report["zero"]["clip_grad"]) == (5.0, 0.0)
        assert not report["default"]["said"]
        assert not report["zero"]["said"]
    assert len(first["written"]["said"]) == 1
    assert "gradient_clipping=5" in first["written"]["said"][0]
    assert not any(report["written"]["said"] for report in others)


def test_p77_a_wrapper_is_unwrapped(reports):
    for report in of(reports, "deepspeed_p77:ZeRO 2, fp32"):
        for way, z_thresh in (("alone", 3.0), ("beside a block", 4.0)):
            assert report[way]["basic"] == "AdamW"
            assert report[way]["is_inner"]
            assert report[way]["z_thresh"] == z_thresh
            assert report[way]["steps"] == 1
            assert report[way]["left"] == []
            assert all("got a ZClipOptimizer" in said for said in report[way]["said"])
    assert [len(report["alone"]["said"]) for report in of(reports, "deepspeed_p77:ZeRO 2, fp32")] == [1, 0]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("unknown key", ["'z_tresh'", "did you mean 'z_thresh'"]),  # P76
        ("auto", ["zclip.z_thresh", '"auto"']),
        ("wrong type", ["alpha", "'0.9'", "(0, 1)"]),
        ("no object", ["zclip: got 'on'"]),
        ("enabled", ["zclip.enabled", "'yes'", "true or false"]),
        ("fp16 without ZeRO", ["doesn't scale the loss", '"stage": 1']),
        ("compute_grad_norm", ['"compute_grad_norm": false', "Remove it"]),  # P80
        ("experts without ZeRO in bf16", ["leaves the experts out", '"stage": 1']),
    ],
)
def test_refused_at_start(reports, what, words):
    for report in of(reports, "deepspeed_refused"):
        for word in words:
            assert word in report[what]


class Stub:
    """An engine of a kind that can't be built without a GPU."""

    def __init__(self, optimizer="AdamW", zenflow=False, super_offload=False):
        self.basic_optimizer = self.optimizer = type(optimizer, (), {})()
        self.zenflow, self._super_offload, self.has_moe_layers = zenflow, super_offload, False

    def zero_optimization(self):
        return True

    def fp16_enabled(self):
        return False

    def super_offload(self):
        return self._super_offload


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (Stub(zenflow=True), "ZenFlow"),
        (Stub(super_offload=True), "SuperOffload"),
        (Stub(optimizer="OnebitAdam"), "momentum"),
    ],
)
def test_refused_kinds_of_engine(engine, words):
    with pytest.raises(ValueError, match=words):
        settings.check_engine(engine, settings.REFERENCE)


def test_usual_kinds_are_not_refused():
    settings.check_engine(Stub(), settings.REFERENCE)


def test_versions():
    with pytest.raises(RuntimeError, match=r"version 0\.14\.0, ZClip needs 0\.16\.9"):
        settings.check_version("0.14.0")
    with pytest.warns(zclip_ext.ZClipWarning, match=r"0\.17\.1 takes a gradient norm that isn't finite for 1\.0"):
        settings.check_version("0.17.1")
    settings.check_version(settings.REFERENCE)


def test_block():
    assert settings.parse({"enabled": False, "z_thresh": 3}) is None
    assert settings.parse({"z_thresh": 3}) == zclip_ext.ZClipConfig(z_thresh=3.0)
    assert settings.parse({"enabled": True, "mode": "percentile"}).clip_option == "max"
    with pytest.raises(ValueError, match="z_thresh"):  # also of a block that is off
        settings.parse({"enabled": False, "z_thresh": -1})


@pytest.mark.parametrize("path", SKIPS)
def test_policies(reports, path):
    for report in of(reports, f"deepspeed_skips:{path}"):
        skip, stop, limit = report["skip"], report["raise"], report["limit"]
        assert not skip["moved"]
        assert stop["moved"]
        assert (skip["spikes"], skip["nonfinite"], skip["skipped"], skip["skipped_steps"]) == (1, 2, 3, 3)
        assert skip["scheduled"] == 8
        assert skip["said"] == ["no error", "no error"]
        assert all("on_nonfinite='raise'" in said for said in stop["said"])
        assert limit["said"][0] == "no error"
        assert "max_consecutive_skips=1" in limit["said"][1]
        assert (stop["skipped_steps"], limit["skipped_steps"]) == (2, 2)
        for each in (skip, stop, limit):
            assert each["all_moved"]
            assert each["still"]
            assert each["samples"] == 9


@pytest.mark.parametrize("path", CHECKPOINTS)
def test_resume_with_zclip_newly_on_or_off(reports, path):
    for rank, report in enumerate(of(reports, f"deepspeed_checkpoint_on_and_off:{path}")):
        assert report["newly on"] == report["newly off"] == 1
        assert report["client"] == {"mine": 1}
        assert report["fresh"] == 0
        assert report["module only"] == 2
        assert any("starts afresh" in said or "start afresh" in said for said in report["said"]) == (rank == 0)


@pytest.mark.parametrize("path", UNIVERSAL)
def test_universal_checkpoint_on_another_number_of_ranks(reports, path):
    saved = of(reports, f"deepspeed_save:{path}")
    loaded, steps = of(reports, f"deepspeed_load_universal:{path}", world=1)[0]
    assert loaded == saved[0] == saved[1]
    assert steps == 5


def test_metrics_in_the_monitor(reports):
    (files, rows, scales), nothing = of(reports, "deepspeed_monitor:ZeRO 1, fp32")
    assert rows == [[8 * (step + 1), pytest.approx(scale)] for step, scale in enumerate(scales)]
    assert any(name.startswith("events.out.tfevents") for name in files)
    for name in ("grad_norm", "threshold", "scale", "clip_rate", "skipped"):
        assert f"Train_Samples_zclip_{name}.csv" in files
    assert nothing is None


def test_ranks_that_differ_are_everyones_error(reports):
    for said in of(reports, "deepspeed_inconsistent:ZeRO 1, fp32"):
        assert said[:5] == ["no error"] * 5
        assert "rank 1 differs from most in steps" in said[5]


def test_a_scheduler_of_torch_can_be_built_afterwards(reports):
    for rate, said in of(reports, "deepspeed_late_scheduler"):
        assert rate == pytest.approx(0.05 / 2)
        assert said == []


def test_says_where_it_is_and_what_it_supersedes(reports):
    lines, silent = of(reports, "deepspeed_says:ZeRO 3, fp32")
    assert len(lines) == 1
    for part in ("ZeRO 3", "z_thresh=3.0", "default gradient_clipping of 1"):
        assert part in lines[0]
    assert silent == []


def test_an_engine_that_was_built_before_is_warned_of(reports):
    for said in of(reports, "deepspeed_built_before"):
        assert len(said) == 1
        assert "it trains without ZClip" in said[0]


@pytest.mark.parametrize("path", ["ZeRO 0, fp32", "ZeRO 1, fp32"])
def test_copies_on_stages_and_replicas_count_once(reports, path):
    for report in of(reports, f"deepspeed_copies_in_a_pipeline:{path}", world=4):
        assert report["norms"] == pytest.approx(report["wanted"], rel=1e-6)
        assert [scale < 1 for scale in report["scales"]] == [False, False, True, False]
        assert report["difference"] < 6e-8
        assert report["bits"] == of(reports, f"deepspeed_copies_in_a_pipeline:{path}", world=4)[0]["bits"]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_tensor_parallel(reports, stage):
    found = of(reports, f"deepspeed_tensor_parallel:{stage}")
    for report in found:
        assert report["norms"] == pytest.approx(report["wanted"], rel=1e-6)
        assert [scale < 1 for scale in report["scales"]] == [False, False, True, False]
        assert report["bits"] == found[0]["bits"]


@pytest.mark.parametrize("stage", [0, 1])
def test_models_that_are_trained_apart_in_one_job(reports, stage):
    """Each has its own norm, and nobody waits for the other, which takes fewer steps."""
    for rank, (norm, wanted, steps) in enumerate(of(reports, f"deepspeed_two_models:{stage}", world=4)):
        assert norm == pytest.approx(wanted, rel=1e-6)
        assert steps == (3 if rank < 2 else 1)


@pytest.mark.parametrize("stage", [1, 2])
def test_p79_muon_on_zero_is_refused(reports, stage):
    for said in of(reports, f"deepspeed_muon:{stage}"):
        assert "hides every spike" in said


def test_overflows_of_a_scaler_are_its_own(reports):
    """Also where ZClip would raise: the scale falls, nothing is sampled or counted, and the learning rate waits."""
    for report in of(reports, "deepspeed_scaler"):
        assert report["scales"] == [65536.0, 65536.0, 32768.0, 32768.0]
        assert (report["samples"], report["steps"], report["nonfinite"], report["skipped"]) == (3, 3, 0, 0)
        assert (report["skipped_steps"], report["scheduled"]) == (1, 3)


def test_hooks_of_others_stay(reports):
    for calls, steps in of(reports, "deepspeed_hooks"):
        assert (calls, steps) == (1, 1)


def test_wrappers_where_they_do_not_belong(reports):
    for report in of(reports, "deepspeed_wrappers"):
        assert report["off"] == [False, "AdamW"]
        assert "got a function that makes a ZClipOptimizer" in report["function"]
